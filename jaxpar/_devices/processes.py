"""Values, decisions and errors that all processes of a run share. Every process must make the same calls.

A collective that one process skips leaves the others waiting forever. So a decision on which the next calls depend is
made by one process for all (`ask_first`), and an exception in any process is raised in every process
(`raise_together`). With one process nothing is sent.

Two collectives do all the work, mostly over the leaders, the first device of each process: a gather of bytes
(`exchange`, `gather_rows`), and a sum of bytes to which only process 0 adds nonzero bytes (`from_first`, `plan_send`).
"""

# `jax.experimental.multihost_utils` has both, and they were tried in their place, with jax 0.12 on CPUs. Its
# `broadcast_one_to_all` adds the numbers themselves: of -0.0 it makes 0.0, of a NaN another one, and of the int64 2**40
# zero without an error. It takes no random keys and no texts. 100 MB took 7.6 s, and 3.2 s here, as it puts a copy on
# each device. `process_allgather` keeps bytes, all of one length. But both raise where processes have different numbers
# of devices, and both are over all devices, so on CPUs they would have to wait for all programs under way.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import jax
import numpy as np

from .._core.arrays import Device, PyTree, without_keys
from .mesh import assemble, copies_on, run_by_itself, spans_processes, split_over
from .user_mesh import on_own_mesh

E = TypeVar("E", bound=BaseException)
Answer = TypeVar("Answer")  # a value that JSON keeps as it is

# Bytes of a text that the first gather sends, with 4 of its length. A second one sends the rest of longer texts.
_FIRST_BYTES = 1020
_WORD = 4  # bytes of what is summed when process 0 sends


@dataclasses.dataclass
class ElasticRun:
    """Whether this run is elastic (set once by `initialize`), and whether its `fit` is running or over."""

    is_on: bool = False
    is_fitting: bool = False
    has_fitted: bool = False
    watchers: tuple[Callable[[], None], ...] = ()  # called after each batch of an evaluation


elastic_run = ElasticRun()


def become_elastic() -> None:
    """Make the run elastic: from now on, processes compute together only inside `fit`."""
    elastic_run.is_on = True


def is_elastic() -> bool:
    """Whether this process is part of an elastic run: processes may be lost and may join while it goes on.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.is_elastic()
        False
    """
    return elastic_run.is_on


def watch_progress(*watchers: Callable[[], None]) -> None:
    """Call these functions after each batch of an evaluation, so that a long evaluation does not count as stuck."""
    elastic_run.watchers = watchers


def note_progress() -> None:
    """Report that a batch of an evaluation is done."""
    for watcher in elastic_run.watchers:
        watcher()


def count() -> int:
    """The number of processes that make the same calls. It is 1 in an elastic run, in which nothing is sent between
    steps.
    """
    return 1 if elastic_run.is_on else jax.process_count()


def devices() -> tuple[Device, ...]:
    """The devices of the processes that make the same calls."""
    return tuple(jax.local_devices() if elastic_run.is_on else jax.devices())


def check_first_fit() -> None:
    """`RuntimeError` for a second call of `fit` in an elastic run."""
    if elastic_run.has_fitted:
        raise RuntimeError("fit: an elastic run has one call of fit; give that call all epochs")


@contextlib.contextmanager
def elastic_fit() -> Generator[None]:
    """A block in which `fit` makes steps over the processes of an elastic run."""
    elastic_run.is_fitting = elastic_run.has_fitted = True
    try:
        yield
    finally:
        elastic_run.is_fitting = False


def refuse_elastic(caller: str) -> None:
    """`RuntimeError` in an elastic run, for a call that needs all processes at once."""
    if elastic_run.is_on and not elastic_run.is_fitting:
        raise RuntimeError(
            f"{caller}: in an elastic run only `train.fit` computes over all processes; initialize without elastic=True"
        )


@functools.cache
def leaders() -> tuple[Device, ...]:
    """The first device of each process, in the order of the processes."""
    return tuple(min(jax.local_devices(i), key=lambda d: d.id) for i in range(jax.process_count()))


@on_own_mesh
def exchange(text: str) -> list[str]:
    """The text that each process gives, in the order of the processes."""
    if count() == 1:
        return [text]
    # All rows of a gather are of one length. Most texts are short, and take one gather: their length, then themselves.
    raw = text.encode()
    rows = _gather(len(raw).to_bytes(4, "big") + raw[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"))
    lengths = [int.from_bytes(row[:4].tobytes(), "big") for row in rows]
    texts = [row[4:].tobytes() for row in rows]
    if max(lengths) > _FIRST_BYTES:
        width = 1 << (max(lengths) - _FIRST_BYTES - 1).bit_length()  # few sizes, so few programs
        remainders = _gather(raw[_FIRST_BYTES:].ljust(width, b"\0"))
        texts = [first + remainder.tobytes() for first, remainder in zip(texts, remainders, strict=True)]
    return [padded[:length].decode() for padded, length in zip(texts, lengths, strict=True)]


@on_own_mesh
def from_first(tree: PyTree) -> PyTree:
    """The arrays of process 0, in host memory. Other processes must give arrays of the same shapes and dtypes."""
    # An array that spans processes is already equal in all of them and stays unchanged.
    if count() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    local = [i for i, leaf in enumerate(leaves) if not spans_processes(leaf)]
    if local:
        received = run_by_itself(plan_send([leaves[i] for i in local], leaders()))
        for i, leaf in zip(local, received, strict=True):
            leaves[i] = leaf
    return structure.unflatten(leaves)


def plan_send(tree: PyTree, devices: tuple[Device, ...]) -> Callable[[], PyTree]:
    """Compile the program that sends the arrays of process 0. The returned function runs it, and gives them in host
    memory. Every process must call both, with arrays of the same shapes and dtypes.
    """
    plain, restore = without_keys(tree)
    leaves, structure = jax.tree.flatten(plain)
    hosts = [np.asarray(leaf) for leaf in leaves]
    raw = b"".join(host.tobytes() for host in hosts)
    # Zeros from all but one device of process 0: the sum over the devices is then what that one gives. It is of the
    # bytes as integers, since a sum of the numbers themselves would lose the sign of -0.0.
    payload = np.frombuffer(raw.ljust(-(-len(raw) // _WORD) * _WORD, b"\0"), np.uint32)
    giver = next((d for d in devices if d.process_index == 0), devices[0])
    local = [d for d in devices if d.process_index == jax.process_index()]
    rows = _rows({d: payload if d == giver else np.zeros_like(payload) for d in local}, devices)
    total = jax.jit(lambda x: x.sum(0, dtype=x.dtype), out_shardings=copies_on(devices)).lower(rows).compile()

    def send() -> PyTree:
        sent, at, received = np.asarray(total(rows).addressable_data(0)).tobytes(), 0, list[np.ndarray]()
        for host in hosts:
            received.append(np.frombuffer(sent, host.dtype, host.size, at).reshape(host.shape))
            at += host.nbytes
        return restore(structure.unflatten(received))

    return send


@on_own_mesh
def gather_rows(tree: PyTree, counts: Sequence[int]) -> PyTree:
    """The first rows of the arrays of all processes, as many of each as `counts` says, in host memory."""
    local_count = counts[jax.process_index()]

    def gather(leaf: jax.typing.ArrayLike) -> np.ndarray:
        local = np.asarray(leaf)[:local_count]
        row_bytes = math.prod(local.shape[1:]) * local.dtype.itemsize
        gathered = _gather(local.tobytes().ljust(max(counts) * row_bytes, b"\0"))  # (processes, bytes), padded
        raw = b"".join(padded[: n * row_bytes].tobytes() for padded, n in zip(gathered, counts, strict=True))
        return np.frombuffer(raw, local.dtype).reshape(sum(counts), *local.shape[1:])

    return jax.tree.map(gather, tree)


def to_share(tree: PyTree, devices: Sequence[Device]) -> bool:
    """Whether the devices belong to several processes, while each process has separate arrays."""
    # Then `from_first` must send the values of one process, because values could differ.
    several = len({d.process_index for d in devices}) > 1
    return several and not all(map(spans_processes, jax.tree.leaves(tree)))


def ask_first(ask: Callable[[], Answer], *kinds: type[Exception]) -> Answer:
    """Call `ask` in process 0, and return its JSON result in every process, or raise its exception there. The others
    raise `kinds` unchanged, as Python's built-in types.
    """
    if count() == 1:
        return ask()
    answer = ""
    with raise_together(*kinds):
        if jax.process_index() == 0:
            answer = json.dumps(ask())
    return json.loads(exchange(answer)[0])


# The types of errors that other processes raise too, subclasses first.
_KINDS = (
    *(FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError, OSError),
    *(KeyError, IndexError, TypeError, ValueError, RuntimeError, Exception),
)


@contextlib.contextmanager
def raise_together(*kinds: type[Exception]) -> Generator[None]:
    """A block without collectives. An exception in any process is raised in every process."""
    if count() == 1:
        yield
        return
    # An error travels as the number of the first of these types that it is of: other processes may not know its class.
    types, local_error, report = (*kinds, *_KINDS), None, ""
    try:
        yield
    except SystemExit as error:  # the others would wait for this process
        local_error, report = error, json.dumps([len(types) - 1, f"sys.exit({error})"])
    except Exception as error:
        local_error = error
        kind = next(i for i, k in enumerate(types) if isinstance(error, k))
        report = json.dumps([kind, str(error) if types[kind] is not Exception else f"{type(error).__name__}: {error}"])
    reports = exchange(report)  # of each process: the number of a type and a message, or "" where nothing was raised
    if local_error is not None:
        raise in_all(local_error)
    for process, report in enumerate(reports):
        if report:
            kind, message = json.loads(report)
            error_type = RuntimeError if types[kind] is Exception else types[kind]
            raise in_all(error_type(f"process {process}: {message}"))


def in_all(error: E) -> E:
    """Mark an exception that every process raises at the same place."""
    with contextlib.suppress(AttributeError):  # an exception that takes no attributes
        error._is_in_all = True  # pyright: ignore[reportAttributeAccessIssue]
    return error


def is_in_all(error: BaseException) -> bool:
    """Whether every process has raised this exception, as from `raise_together`."""
    return count() == 1 or getattr(error, "_is_in_all", False)


def all_true(yes: bool) -> bool:
    """Whether the answer is yes in every process."""
    return "no" not in exchange("yes" if yes else "no")


def agree(what: str, text: str) -> None:
    """`ValueError` in every process unless all give the same text. `what` is the beginning of the message."""
    # A long text is compared by its hash, in one gather. Only where they differ the texts themselves are sent.
    short = text if len(text) < _FIRST_BYTES else hashlib.sha256(text.encode()).hexdigest()
    if len(set(exchange(short))) > 1:
        texts = exchange(text)
        other = next(i for i, theirs in enumerate(texts) if theirs != texts[0])
        first, second = (t if len(t) < 300 else f"{t[:300]}..." for t in (texts[0], texts[other]))
        raise ValueError(f"{what}; process 0: {first}, process {other}: {second}")


def _rows(local: dict[Device, np.ndarray], devices: tuple[Device, ...]) -> jax.Array:
    """(devices, n): a row on each device. Each process gives the rows (n,) of its own devices."""
    return assemble([jax.device_put(row[None], device) for device, row in local.items()], split_over(devices))


def _gather(raw: bytes) -> np.ndarray:
    """(processes, bytes): what each process gives, all of one length."""
    # jax's own gather is over all devices. This one is over one of each process, so it can run by itself.
    row = {leaders()[jax.process_index()]: np.frombuffer(raw, np.uint8)}
    rows = run_by_itself(_gather_program(), _rows(row, leaders()))
    return np.asarray(rows.addressable_data(0))


@functools.cache
def _gather_program() -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=copies_on(leaders()))
