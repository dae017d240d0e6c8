"""Parameter servers that never make a worker wait: MXNet's own `dist_async`, on Ray actors.

One or more servers hold the parameters; each worker pulls them, computes a gradient on its own batch and pushes it,
and a server updates with every push as it comes. There is no barrier and no order: a slow worker delays nobody, a
killed one is not missed, and two runs are never the same. What SPMD can offer instead, deterministic and usually
better, is kind `dist_async` of `jaxpar.kv`; docs/free_running.md compares the two.

Needs Ray (`pip install "jaxpar[ray]"`), which is imported when servers start. Arrays travel as NumPy arrays through
host memory. Gradient compression is not available here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from . import kv, updaters
from .updaters import UpdateFn, Updater, stateless

if TYPE_CHECKING:
    import optax

Shape = tuple[int, ...]

SPLIT = 1_000_000
"""Elements from which on a value is cut over all servers: MXNet's default of MXNET_KVSTORE_BIGARRAY_BOUND."""


class ServerLost(RuntimeError):
    """A server is gone, and what it held with it."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a value that one server holds: elements `start` to `stop` of the flat value of `key`."""

    key: int
    start: int
    stop: int


def placement(shapes: Sequence[Shape], servers: int, split: int = SPLIT) -> tuple[tuple[Piece, ...], ...]:
    """Which server holds what, by MXNet's rule.

    Args:
        shapes: of the values of keys 0, 1, ...
        servers: how many, at least 1.
        split: values of so many elements or more are cut evenly over all servers; a smaller one goes whole to
            server `key * 9973 % servers`.

    Returns:
        The pieces of each server, by ascending key; every element of every value is in exactly one.

    Example:
        >>> placement([(3,), (2, 2)], servers=2, split=4)
        ((Piece(key=0, start=0, stop=3), Piece(key=1, start=0, stop=2)), (Piece(key=1, start=2, stop=4),))
    """
    held: list[list[Piece]] = [[] for _ in range(servers)]
    for key, shape in enumerate(shapes):
        size = math.prod(shape)
        if servers == 1 or size < split:
            held[key * 9973 % servers].append(Piece(key, 0, size))
            continue
        ends = [size * i // servers for i in range(servers + 1)]
        for pieces, (start, stop) in zip(held, itertools.pairwise(ends), strict=True):
            if stop > start:
                pieces.append(Piece(key, start, stop))
    return tuple(map(tuple, held))


class _Server:
    """One server: a `jaxpar.kv` store of its pieces, and a count of what reached it. Runs as a Ray actor."""

    def __init__(self, values: dict[int, np.ndarray], updater: Any, optimizer: Any):
        store = kv.create("local")
        store = store if updater is None else kv.set_updater(store, updater)
        store = store if optimizer is None else kv.set_optimizer(store, optimizer)
        self._keys = list(values)
        self._store = kv.init(store, self._keys, list(values.values()))
        compiled = isinstance(self._store.updater, Updater)
        self._update = jax.jit(self._pushed, donate_argnums=0) if compiled else self._pushed
        self._version = 0
        self._pushes: collections.Counter[int] = collections.Counter()
        self._staleness: collections.Counter[int] = collections.Counter()

    def _pushed(self, store: kv.KVStore, values: list[Any]) -> kv.KVStore:
        return kv.push(store, self._keys, values)

    def push(self, worker: int, version: int, values: list[np.ndarray]) -> None:
        if self._keys:
            self._store = self._update(self._store, values)
        self._staleness[self._version - version] += 1
        self._pushes[worker] += 1
        self._version += 1

    def pull(self) -> tuple[int, list[np.ndarray]]:
        return self._version, [np.array(self._store.values[k]) for k in self._keys]

    def status(self) -> dict[str, Any]:
        return {"pushes": dict(self._pushes), "staleness": dict(sorted(self._staleness.items()))}


@dataclasses.dataclass(frozen=True)
class Servers:
    """Running servers, and where everything is. Can be sent to any Ray task or actor.

    Attributes:
        handles: the Ray actors.
        pieces: what each of them holds, see `placement`.
        shapes, dtypes: of the values.
        paths: where in the parameters each stands.
        treedef: the structure of the parameters.
        timeout: seconds to wait for an answer.
    """

    handles: tuple[Any, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[Any, ...]
    paths: tuple[str, ...]
    treedef: Any
    timeout: float


def start(
    params: Any,
    *,
    optimizer: optax.GradientTransformation | Updater | None = None,
    updater: Updater | UpdateFn | None = None,
    servers: int = 1,
    split: int = SPLIT,
    timeout: float = 60,
) -> Servers:
    """Starts servers that hold these parameters; starts Ray on this machine where it does not run yet.

    Args:
        params: a pytree of arrays.
        optimizer, updater: as in `kv.from_params`; what a push does. Where values are split each server sees its
            piece only, so they must be elementwise. None: a push replaces the value.
        servers: how many.
        split: see `placement`.
        timeout: seconds that a worker waits for a server's answer before it is an error. Processes have five
            minutes to start, since each imports JAX.

    Raises:
        ImportError: Ray is not installed.
        ValueError: less than one server, both an optimizer and an updater; an updater that is not elementwise for a
            value that is split.
        TypeError: a leaf of params that is no array.
    """
    store = kv.from_params(params, kind="local", optimizer=optimizer, updater=updater)  # all checks are there
    if isinstance(servers, bool) or not isinstance(servers, int) or servers < 1:
        raise ValueError(f"free_running.start: servers must be an int of 1 or more, got {servers!r}")
    keys = sorted(store.values)
    values = [np.asarray(store.values[k]) for k in keys]
    pieces = placement([v.shape for v in values], servers, split)
    _check_pieces(store, pieces)
    ray = _ray()
    actor = ray.remote(num_cpus=0, runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}})(_Server)
    cut = [{p.key: _cut(values[p.key], p) for p in held} for held in pieces]
    handles = tuple(actor.remote(held, updater, optimizer) for held in cut)
    started = Servers(
        handles,
        pieces,
        tuple(v.shape for v in values),
        tuple(v.dtype for v in values),
        tuple(kv.names(store)[k] for k in keys),
        store.treedef,
        timeout,
    )
    _ask(dataclasses.replace(started, timeout=_TO_START), [handle.status.remote() for handle in handles])
    return started


def _check_pieces(store: kv.KVStore, pieces: Sequence[Sequence[Piece]]) -> None:
    """`ValueError` where a value is cut and the updater is not elementwise."""
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in store.values.items()}
    lengths = [{p.key: p.stop - p.start for p in held if p.stop - p.start < specs[p.key].size} for held in pieces]
    updater = store.updater
    if not isinstance(updater, Updater):
        for k in set().union(*lengths):
            jax.eval_shape(functools.partial(updater, k), specs[k], specs[k])  # its error, where it cannot be traced
        updater = stateless(updater)
    for held in lengths:
        forms = {k: (specs[k], jax.ShapeDtypeStruct((n,), specs[k].dtype), None) for k, n in held.items()}
        updaters.check_elementwise_forms(updater, forms, kv.names(store), "free_running.start", _ADVICE)


_ADVICE = (
    "a value of `split` elements or more is cut over all servers, so its updater must be elementwise; give "
    "servers=1 or a larger split"
)
_TO_START = 300.0


def _ray() -> Any:
    """Ray, which runs on this machine afterwards if it did not before."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            'jaxpar.free_running needs Ray, which is not installed; pip install "jaxpar[ray]" adds it'
        ) from error
    if not ray.is_initialized():
        with warnings.catch_warnings():  # Ray forks to start other programs at once, which does not harm JAX
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    return ray


def _cut(value: np.ndarray, piece: Piece) -> np.ndarray:
    """A whole value keeps its shape, so that an updater may look at it."""
    whole = piece.stop - piece.start == value.size
    return value if whole else value.reshape(-1)[piece.start : piece.stop]


class Worker:
    """One worker's connection to the servers.

    Args:
        servers: from `start`.
        index: the number of this worker, for the servers' count.
    """

    def __init__(self, servers: Servers, index: int = 0):
        self.servers: Servers = servers
        self.index: int = index
        self._versions = [0] * len(servers.handles)

    def pull(self) -> Any:
        """The parameters as they are now, NumPy arrays in the pytree that `start` was given.

        Each server answers for itself: pieces of different servers may be of different ages.

        Raises:
            ServerLost: a server is gone, or silent for longer than `timeout`.
        """
        servers = self.servers
        answers = _ask(servers, [handle.pull.remote() for handle in servers.handles])
        self._versions = [version for version, _ in answers]
        leaves: list[Any] = [None] * len(servers.shapes)
        parts: dict[int, list[np.ndarray]] = collections.defaultdict(list)
        for held, (_, values) in zip(servers.pieces, answers, strict=True):
            for piece, value in zip(held, values, strict=True):
                parts[piece.key].append(value.reshape(-1))
        for key, found in parts.items():
            leaves[key] = (found[0] if len(found) == 1 else np.concatenate(found)).reshape(servers.shapes[key])
        return servers.treedef.unflatten(leaves)

    def push(self, grads: Any) -> None:
        """Hands a pytree like the parameters to the servers; returns when each has updated.

        Raises:
            ValueError: another structure or shape than the parameters have; nothing was sent.
            ServerLost: as in `pull`; servers that are left have updated.
        """
        servers = self.servers
        leaves = _checked(servers, grads)
        answers = []
        for handle, held, version in zip(servers.handles, servers.pieces, self._versions, strict=True):
            cut = [_cut(leaves[p.key], p) for p in held]
            answers.append(handle.push.remote(self.index, version, cut))
        _ask(servers, answers)


def _checked(servers: Servers, grads: Any) -> list[np.ndarray]:
    leaves, treedef = jax.tree.flatten(grads)
    if treedef != servers.treedef:
        raise ValueError(
            f"free_running push: expected the structure of the parameters, {servers.treedef}, got {treedef}"
        )
    arrays = [np.asarray(leaf) for leaf in leaves]
    for path, array, shape in zip(servers.paths, arrays, servers.shapes, strict=True):
        if array.shape != shape:
            raise ValueError(f"free_running push: {path!r}: expected shape {shape}, got {array.shape}")
    return [a.astype(d, casting="same_kind") for a, d in zip(arrays, servers.dtypes, strict=True)]


def _ask(servers: Servers, answers: list[Any]) -> list[Any]:
    """What all servers answer; the first that does not is named, with what is lost."""
    ray = _ray()
    found = []
    for i, answer in enumerate(answers):
        try:
            found.append(ray.get(answer, timeout=servers.timeout))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            silent = isinstance(error, ray.exceptions.GetTimeoutError)
            what = f"has not answered for {servers.timeout:g} s" if silent else "is gone"
            names = [servers.paths[p.key] for p in servers.pieces[i]]
            raise ServerLost(
                f"free_running: server {i} of {len(answers)} {what}; it held {', '.join(names) or 'nothing'}. Start "
                "servers again from the last parameters that you kept"
            ) from error
    return found


def status(servers: Servers) -> list[dict[str, Any]]:
    """What each server has seen: `pushes`, a count for each worker, and `staleness`.

    `staleness` maps s to the number of pushes whose gradient was computed with parameters that s other pushes had
    changed meanwhile; {0: n} would be a run in which nobody overtook anybody.

    Raises:
        ServerLost: as in `Worker.pull`.
    """
    return _ask(servers, [handle.status.remote() for handle in servers.handles])


def stop(servers: Servers) -> None:
    """Ends the servers; what they hold is gone. Ray itself goes on."""
    ray = _ray()
    for handle in servers.handles:
        ray.kill(handle)


class _Runner:
    """One worker, as a Ray actor."""

    def pid(self) -> int:
        import os

        return os.getpid()

    def run(self, fn: Callable[[Worker], Any], servers: Servers, index: int) -> Any:
        return fn(Worker(servers, index))


@dataclasses.dataclass(frozen=True)
class Running:
    """Workers under way.

    Attributes:
        handles: the Ray actors.
        results: what will come of them.
        pids: their processes on this machine.
    """

    handles: tuple[Any, ...]
    results: tuple[Any, ...]
    pids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of the workers.

    Attributes:
        results: what the function returned, by the worker's number.
        lost: why a worker returned nothing, by its number.
    """

    results: dict[int, Any]
    lost: dict[int, str]


def run(fn: Callable[[Worker], Any], servers: Servers, *, workers: int, **options: Any) -> Running:
    """Starts `fn(worker)` in processes of their own and returns at once.

    Args:
        fn: what each does; `worker.index` tells them apart.
        servers: from `start`.
        workers: how many.
        options: Ray's own for an actor, such as `num_gpus=1`; without any a worker reserves nothing.
    """
    ray = _ray()
    actor = ray.remote(**{"num_cpus": 0, **options})(_Runner)
    handles = tuple(actor.remote() for _ in range(workers))
    pids = tuple(ray.get([handle.pid.remote() for handle in handles], timeout=_TO_START))
    sent = ray.put(servers)
    return Running(handles, tuple(h.run.remote(fn, sent, i) for i, h in enumerate(handles)), pids)


def finish(running: Running) -> Outcome:
    """Waits for the workers and ends their processes; lost ones do not keep the others from finishing.

    Raises:
        RuntimeError: every worker was lost; the reasons are in the message.
    """
    ray = _ray()
    results, lost = {}, {}
    for i, result in enumerate(running.results):
        try:
            results[i] = ray.get(result)
        except ray.exceptions.RayActorError:
            lost[i] = "its process ended"
        except ray.exceptions.RayTaskError as error:
            lost[i] = str(error.cause)
    for handle in running.handles:
        ray.kill(handle)
    if lost and not results:
        reasons = "; ".join(f"worker {i}: {why}" for i, why in lost.items())
        raise RuntimeError(f"free_running: every worker was lost: {reasons}")
    return Outcome(results, lost)
