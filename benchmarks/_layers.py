"""The layers of `layers.py`: shapes, how often a step has each, what each computes or moves, and how one is measured.

Images are N, H, W, C, filters H, W, I, O, weights of products inputs x outputs. Both libraries get the same numbers.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

THREE_WAYS = ("forward", "inputs", "weights")
FORWARD, BOTH = "forward", "forward + backward"
HEADS = 8
LEARNING_RATE = 0.01
REST = 0.02  # seconds after a turn: OpenMP's threads look for work for 5 to 10 ms more, on the other library's cores


class Part(NamedTuple):
    """One layer as a network has it.

    Attributes:
        kind: its function, a name in `KINDS`.
        sizes: as the function of that name here takes them.
        count: how often a step has it. 0 where it is a part of another row.
        needs_inputs: whether the step needs the gradient of its inputs, of layers measured in three ways.
    """

    kind: str
    sizes: tuple[int, ...]
    count: int = 1
    needs_inputs: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {KINDS[self.kind](*self.sizes).words}".strip()

    def work(self) -> Work:
        return KINDS[self.kind](*self.sizes)

    def directions(self) -> list[str]:
        return [way for way in self.work().amounts if self.needs_inputs or way != "inputs"]

    def counted(self) -> list[str]:
        """The directions that make up the layer in a step."""
        ways = self.directions()
        return [BOTH] if BOTH in ways else ways


class Work(NamedTuple):
    """What a layer has to do.

    Attributes:
        words: its sizes.
        operands: shapes of floating operands, in order.
        result: shape.
        amounts: by direction, operations or bytes. Bytes are each operand and each result, once.
        unit: of a speed, "GFLOP/s" or "GB/s".
        ids: shape of the integers that come last, and what they are less than.
        trained: the operands that have a gradient; all of them where it is empty.
    """

    words: str
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    amounts: dict[str, int]
    unit: str = "GB/s"
    ids: tuple[tuple[int, ...], int] | None = None
    trained: tuple[int, ...] = ()

    def with_gradient(self) -> tuple[int, ...]:
        return self.trained or tuple(range(len(self.operands)))


@lru_cache(maxsize=1)  # for all directions of a layer
def numbers(part: Part) -> tuple[list[np.ndarray], np.ndarray]:
    """The operands of a layer and the cotangent of its result. They are not to be changed."""
    work, rng = part.work(), np.random.default_rng(0)
    operands = [_normal(rng, shape) for shape in work.operands]
    if work.ids is not None:
        operands.append(rng.integers(0, work.ids[1], work.ids[0], dtype=np.int32))
    return operands, np.asarray(rng.standard_normal(work.result), np.float32)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of a size that layers keep. A matrix is a weight, and is divided by the root of what it sums over."""
    scale = math.prod(shape[:-1]) ** -0.5 if len(shape) == 2 else 1
    return np.float32(scale) * rng.standard_normal(shape, np.float32)


def _convolution(batch: int, side: int, before: int, after: int, size: int, stride: int = 1) -> Work:
    out = side // stride
    words = f"{batch} × {side}·{side}, {before} → {after}, {size}·{size}" + (f", stride {stride}" if stride > 1 else "")
    shapes = (batch, side, side, before), (size, size, before, after)
    amounts = dict.fromkeys(THREE_WAYS, 2 * batch * out * out * size * size * before * after)
    return Work(words, shapes, (batch, out, out, after), amounts, "GFLOP/s")


def _product(*sizes: int) -> Work:
    """With its bias, as a dense layer has it."""
    *rows, before, after = sizes
    amounts = dict.fromkeys(THREE_WAYS, 2 * math.prod(sizes))
    shapes = (*rows, before), (before, after), (after,)
    return Work(f"{_by(rows)}, {before} → {after}", shapes, (*rows, after), amounts, "GFLOP/s")


def _gemm(side: int) -> Work:
    return Work(f"{side}³", ((side, side),) * 2, (side, side), {FORWARD: 2 * side**3}, "GFLOP/s")


def _mapped(*shape: int, parameters: int = 0) -> Work:
    """Reads and writes once each way; on the way back it reads what it was given, and the cotangent."""
    size = 4 * math.prod(shape)
    shapes = (shape, *((shape[-1],),) * parameters)
    return Work(_by(shape), shapes, shape, {FORWARD: 2 * size, BOTH: 5 * size})


def _relu_and_pool(*shape: int) -> Work:
    batch, height, width, channels = shape
    size = math.prod(shape)
    return Work(_by(shape), (shape,), (batch, height // 2, width // 2, channels), {FORWARD: 5 * size, BOTH: 14 * size})


def _mean(batch: int, height: int, width: int, channels: int) -> Work:
    shape = batch, height, width, channels
    size = 4 * math.prod(shape)
    return Work(_by(shape), (shape,), (batch, channels), {FORWARD: size, BOTH: 2 * size})


def _residual(*shape: int) -> Work:
    """Both operands have the same cotangent."""
    size = 4 * math.prod(shape)
    return Work(_by(shape), (shape, shape), shape, {FORWARD: 3 * size, BOTH: 6 * size}, trained=(0,))


def _sum(*shape: int) -> Work:
    return Work(_by(shape), (shape, shape), shape, {FORWARD: 12 * math.prod(shape)})


def _cross_entropy(*shape: int) -> Work:
    size = 4 * math.prod(shape)
    return Work(_by(shape), (shape,), (), {FORWARD: size, BOTH: 3 * size}, ids=(shape[:-1], shape[-1]))


def _embedding(texts: int, tokens: int, vocabulary: int, width: int) -> Work:
    size, table = 4 * texts * tokens * width, 4 * vocabulary * width
    shapes = (vocabulary, width), (tokens, width)
    amounts = {FORWARD: 2 * size, BOTH: 3 * size + table}
    return Work(_by((texts, tokens, width)), shapes, (texts, tokens, width), amounts, ids=((texts, tokens), vocabulary))


def _attention(texts: int, tokens: int, width: int) -> Work:
    """From queries, keys and values side by side; causal, but zeros are counted."""
    flops = 4 * texts * tokens * tokens * width
    operands = ((texts, tokens, 3 * width),)
    amounts = {FORWARD: flops, BOTH: 3 * flops}
    return Work(f"{_by((texts, tokens, width))}, {HEADS} heads", operands, (texts, tokens, width), amounts, "GFLOP/s")


def _lstm(batch: int, steps: int, before: int, width: int) -> Work:
    """The last state. The sequences need no gradient."""
    shapes = (batch, steps, before), (before, 4 * width), (width, 4 * width), (4 * width,)
    a_weight = 2 * batch * steps * 4 * width
    amounts = {FORWARD: a_weight * (before + width), BOTH: a_weight * (2 * before + 3 * width)}
    return Work(
        f"{batch} × {steps} × {before} → {width}", shapes, (batch, width), amounts, "GFLOP/s", trained=(1, 2, 3)
    )


def _update(numbers: int) -> Work:
    """Reads weights and gradients, writes weights."""
    return Work(f"{numbers:,} numbers", (), (), {FORWARD: 12 * numbers})


def _by(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


KINDS: dict[str, Callable[..., Work]] = {
    "call": lambda: Work("of a program", ((4096,),), (4096,), {FORWARD: 2**15}),  # XLA runs tiny ones in the caller
    "gemm": _gemm,
    "convolution": _convolution,
    "product": _product,
    "batch norm": partial(_mapped, parameters=2),
    "batch norm, ReLU": partial(_mapped, parameters=2),
    "ReLU, max pool": _relu_and_pool,
    "mean over pixels": _mean,
    "residual, ReLU": _residual,
    "sum": _sum,
    "ReLU": _mapped,
    "GELU": _mapped,
    "layer norm": partial(_mapped, parameters=2),
    "attention": _attention,
    "embedding": _embedding,
    "cross-entropy": _cross_entropy,
    "LSTM": _lstm,
    "SGD": _update,
}


def _resnet18() -> Iterator[Part]:
    yield Part("convolution", (32, 32, 3, 64, 3), needs_inputs=False)
    previous = 64
    for side, width, equal in ((32, 64, 4), (16, 128, 3), (8, 256, 3), (4, 512, 3)):
        enlarges = width != previous
        if enlarges:
            yield Part("convolution", (32, 2 * side, previous, width, 3, 2))
            yield Part("convolution", (32, 2 * side, previous, width, 1, 2))
        yield Part("convolution", (32, side, width, width, 3), equal)
        shape, previous = (32, side, side, width), width
        yield Part("batch norm, ReLU", shape, 2 if enlarges else 3)
        yield Part("batch norm", shape, 3 if enlarges else 2)
        yield Part("residual, ReLU", shape, 2)
        yield Part("sum", shape, {32: 3, 4: 1}.get(side, 2))  # of the two cotangents of a block's inputs
    yield Part("mean over pixels", (32, 4, 4, 512))
    yield Part("product", (32, 512, 10))
    yield Part("cross-entropy", (32, 10))
    yield Part("SGD", (11_173_962,))


LIMITS = (Part("gemm", (1024,), 0), Part("sum", (32, 512, 512), 0), Part("call", (), 0))
NETWORKS: dict[str, tuple[Part, ...]] = {
    "cnn": (
        Part("convolution", (128, 32, 3, 32, 3), needs_inputs=False),
        *(Part("convolution", sizes) for sizes in ((128, 16, 32, 64, 3), (128, 8, 64, 128, 3))),
        *(Part("ReLU, max pool", (128, side, side, width)) for side, width in ((32, 32), (16, 64), (8, 128))),
        Part("product", (128, 2048, 10)),
        Part("cross-entropy", (128, 10)),
        Part("SGD", (113_514,)),
    ),
    "resnet18": tuple(_resnet18()),
    "transformer": (
        *(Part("product", (16, 64, *widths), 4) for widths in ((256, 768), (256, 256), (256, 1024), (1024, 256))),
        Part("product", (16, 64, 256, 1000)),
        Part("attention", (16, 64, 256), 4),
        Part("GELU", (16, 64, 1024), 4),
        Part("layer norm", (16, 64, 256), 9),
        Part("sum", (16, 64, 256), 16),  # 8 residuals, and of their cotangents
        Part("embedding", (16, 64, 1000, 256)),
        Part("cross-entropy", (16, 64, 1000)),
        Part("SGD", (3_688_936,)),
    ),
    "lstm": (
        Part("LSTM", (32, 64, 128, 256)),
        Part("product", (2048, 128, 1024), 0, needs_inputs=False),
        Part("product", (32, 256, 1024), 0),
        Part("product", (32, 256, 10)),
        Part("cross-entropy", (32, 10)),
        Part("SGD", (396_810,)),
    ),
    "mlp": (
        Part("product", (256, 784, 512), needs_inputs=False),
        *(Part("product", sizes) for sizes in ((256, 512, 512), (256, 512, 10))),
        Part("ReLU", (256, 512), 2),
        Part("cross-entropy", (256, 10)),
        Part("SGD", (669_706,)),
    ),
}


def answers(version: str, start: Callable[..., Callable[[], Any]], norms: Callable[[Any], list[float]]) -> Any:
    """What a child says: to a contender's start the norms of its results, then seconds, or what the system counted."""
    contender: list[Callable[[], Any]] = []

    def answer(request: dict[str, Any]) -> Any:
        match request["do"]:
            case "version":
                return version
            case "start":
                contender[:] = []  # its memory first
                contender.append(start(**request["what"]))
                return norms(contender[0]())
            case "measure":
                seconds = _measured(contender[0], request["repeats"])[0]
                if request["repeats"] > 1:
                    time.sleep(REST)
                return seconds
            case "count":
                return _measured(contender[0], request["repeats"])[1:]
            case other:
                raise ValueError(f"no request {other!r}")

    return answer


def _measured(once: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Seconds of one, cores that were busy, and pages that the kernel gave to one."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(repeats):
        once()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds / repeats, processor / seconds, (after.ru_minflt - before.ru_minflt) / repeats
