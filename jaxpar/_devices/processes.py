"""What several processes tell each other: values, agreement and errors. Every process must make the same calls.

A collective that one process skips leaves the others waiting for ever, so a decision that steers what is called
next is made by one process for all, and an error in one is raised in all. With one process nothing is sent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._core.arrays import Device
from .placement import spans_processes

_AXIS = "processes"
_FIRST = 1020  # bytes of a message that travel without being asked for


@functools.cache
def leaders() -> tuple[Device, ...]:
    """The first device of each process, in the order of the processes."""
    first: dict[int, Device] = {}
    for device in jax.devices():
        if device.process_index not in first or device.id < first[device.process_index].id:
            first[device.process_index] = device
    return tuple(first[i] for i in range(jax.process_count()))


def exchange(text: str) -> list[str]:
    """The text of every process, in their order."""
    if jax.process_count() == 1:
        return [text]
    raw = text.encode()
    found = _gathered(np.frombuffer(len(raw).to_bytes(4, "big") + raw[:_FIRST].ljust(_FIRST, b"\0"), np.uint8))
    lengths = [int.from_bytes(row[:4].tobytes(), "big") for row in found]
    parts = [row[4:].tobytes() for row in found]
    if max(lengths) > _FIRST:
        width = 1 << (max(lengths) - _FIRST - 1).bit_length()  # few sizes, so few programs
        rest = _gathered(np.frombuffer(raw[_FIRST:].ljust(width, b"\0"), np.uint8))
        parts = [part + row.tobytes() for part, row in zip(parts, rest, strict=True)]
    return [part[:length].decode() for part, length in zip(parts, lengths, strict=True)]


def from_first(tree: Any) -> Any:
    """The arrays that process 0 gives, in host memory; the others must give arrays of the same shapes."""
    if jax.process_count() == 1:
        return tree
    mine = jax.process_index() == 0
    leaves, structure = jax.tree.flatten(tree)
    impls = [jax.random.key_impl(x) if _is_key(x) else None for x in leaves]
    hosts = [np.asarray(jax.random.key_data(x) if impl else x) for x, impl in zip(leaves, impls, strict=True)]
    spread = [_spread(x if mine else np.zeros_like(x)) for x in hosts]
    received = [np.asarray(x.addressable_data(0)) for x in _sums()(spread)]
    return structure.unflatten(
        [jax.random.wrap_key_data(jnp.asarray(x), impl=i) if i else x for x, i in zip(received, impls, strict=True)]
    )


def to_share(tree: Any, devices: Sequence[Device]) -> bool:
    """Whether arrays that each process has for itself go to devices of several, so that one must say what they are."""
    several = len({d.process_index for d in devices}) > 1
    return several and not any(map(spans_processes, jax.tree.leaves(tree)))


def ask_first(ask: Callable[[], Any], *kinds: type[Exception]) -> Any:
    """What process 0's call of `ask` returns, which must be JSON; where that raises, every process raises.

    The exception of another process is raised here as the first of `kinds`, or of Python's own, that it is of.
    """
    if jax.process_count() == 1:
        return ask()
    answer, error = None, None
    if jax.process_index() == 0:
        try:
            answer = ask()
        except Exception as raised:
            error = raised
    told = json.loads(exchange(json.dumps({"answer": answer, "error": _words(error, kinds)}))[0])
    _raise([told["error"]], error, kinds)
    return told["answer"]


@contextlib.contextmanager
def raise_together(*kinds: type[Exception]) -> Generator[None]:
    """What fails in this block in one process raises in every process. There may be no collective in it."""
    if jax.process_count() == 1:
        yield
        return
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    _raise([json.loads(said) for said in exchange(json.dumps(_words(error, kinds)))], error, kinds)


def all_true(yes: bool) -> bool:
    """Whether every process says yes."""
    if jax.process_count() == 1:
        return yes
    return "no" not in exchange("yes" if yes else "no")


def agree(what: str, text: str) -> None:
    """`ValueError` in every process where they do not all say the same."""
    if len(set(exchange(text if len(text) < _FIRST else hashlib.sha256(text.encode()).hexdigest()))) > 1:
        said = exchange(text)
        odd = next(i for i, other in enumerate(said) if other != said[0])
        raise ValueError(f"{what}; process 0: {_cut(said[0])}, process {odd}: {_cut(said[odd])}")


_KINDS = (
    *(FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError, OSError),
    *(KeyError, IndexError, TypeError, ValueError, RuntimeError, Exception),
)


def _words(error: Exception | None, kinds: tuple[type[Exception], ...]) -> Any:
    """The error as JSON: which of the kinds it is, and its message."""
    if error is None:
        return None
    known = (*kinds, *_KINDS)
    kind = next(i for i, k in enumerate(known) if isinstance(error, k))
    return [kind, str(error) if kind < len(known) - 1 else f"{type(error).__name__}: {error}"]


def _raise(errors: list[Any], own: Exception | None, kinds: tuple[type[Exception], ...]) -> None:
    if own is not None:
        raise own
    for process, error in enumerate(errors):
        if error is not None:
            kind = (*kinds, *_KINDS)[error[0]]
            raise (RuntimeError if kind is Exception else kind)(f"process {process}: {error[1]}")


def _cut(text: str) -> str:
    return text if len(text) < 300 else text[:300] + "..."


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _spread(mine: np.ndarray) -> jax.Array:
    """This process's array as its row of an array over the leaders."""
    sharding = NamedSharding(Mesh(np.array(leaders()), (_AXIS,)), P(_AXIS))
    row = jax.device_put(mine[None], leaders()[jax.process_index()])
    return jax.make_array_from_single_device_arrays((len(leaders()), *mine.shape), sharding, [row])


def _gathered(mine: np.ndarray) -> np.ndarray:
    return np.asarray(_copies()(_spread(mine)).addressable_data(0))


@functools.cache
def _copies() -> Callable[..., Any]:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(Mesh(np.array(leaders()), (_AXIS,)), P()))


@functools.cache
def _sums() -> Callable[..., Any]:
    everywhere = NamedSharding(Mesh(np.array(leaders()), (_AXIS,)), P())
    return jax.jit(lambda xs: [x.sum(0, dtype=x.dtype) for x in xs], out_shardings=everywhere)
