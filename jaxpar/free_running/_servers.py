"""Parameter servers and their workers, as Ray actors: what each of them holds and does, and the start of several.

Ray is imported when it is first used, and started for this machine only.

`start` places the pieces of the parameters on `Server`s, each a store of its own. A `Worker` pulls, computes and pushes
without waiting for other workers. So a gradient may be of older parameters than those that it changes: `status` counts
by how many pushes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import ipaddress
import itertools
import math
import os
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .. import kv, updaters
from .._core.arrays import PyTree
from .._core.checks import whole_number
from .._core.text import say_news
from .._core.transfers import allows_transfers
from ..updaters import UpdateFn, Updater, stateless

if TYPE_CHECKING:
    import optax

Shape = tuple[int, ...]

SPLIT = 1_000_000
"""Values of this many elements or more are cut over all servers. MXNet's MXNET_KVSTORE_BIGARRAY_BOUND has the same."""

_MOST_SERVERS = 2**16  # more is a number in the wrong place, and a list for each would fill the memory
_START_TIMEOUT = 300.0  # seconds in which a process starts; it imports JAX
_ON_NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # where it is 0, all of Ray listens on 127.0.0.1, on Linux too
_CONSTANT = "ENABLE_RAY_CLUSTER"
_LEAST = (2, 59)  # the first Ray whose own start asks for a token. Others let everybody run code here


def _get_ray() -> ModuleType:
    """The module `ray`. Ray is started on this machine if it does not run."""
    ray = importlib.import_module("ray")
    if ray.is_initialized():
        return ray
    if tuple(int(number) for number in re.findall(r"\d+", ray.__version__)[:2]) < _LEAST:
        raise ImportError(
            f"jaxpar.free_running needs Ray {_LEAST[0]}.{_LEAST[1]} or newer, which asks every connection for a token; "
            f'{ray.__version__} is installed, and pip install -U "jaxpar[ray]" brings a newer one'
        )
    with warnings.catch_warnings(), _on_loopback(ray):
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # it starts other programs, without JAX
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback and not os.environ.get(_ON_NETWORK):
        say_news(
            f"free_running: this Ray listens at {address}, which others on the network can reach; it asks them for "
            "a token"
        )
    return ray


@contextlib.contextmanager
def _on_loopback(ray: ModuleType) -> Generator[None]:
    """A block in which Ray starts for this machine only. The user's own setting of the variable stays."""
    # `_node_ip_address="127.0.0.1"` is not enough: on Linux Ray puts the address of the network in its place.
    if os.environ.get(_ON_NETWORK):
        yield
        return
    constants = ray._private.ray_constants
    before = getattr(constants, _CONSTANT, True)
    os.environ[_ON_NETWORK] = "0"  # for the programs that Ray starts
    setattr(constants, _CONSTANT, False)  # Ray has read the variable when it was imported
    try:
        yield
    finally:
        setattr(constants, _CONSTANT, before)
        del os.environ[_ON_NETWORK]


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a value that one server holds.

    Attributes:
        key: the key of the value.
        start, stop: the range of elements in the flat value.
    """

    key: int
    start: int
    stop: int


def placement(shapes: Sequence[Shape], servers: int, split: int = SPLIT) -> tuple[tuple[Piece, ...], ...]:
    """The pieces that each server holds, placed as in MXNet.

    Args:
        shapes: the shapes of the values of keys 0, 1, ...
        servers: the number of servers, at least 1.
        split: a value with at least this many elements is cut evenly over all servers. A smaller value is whole on
            server `key * 9973 % servers`.

    Returns:
        The pieces of each server, by ascending key. Every element of every value is in exactly one piece.

    Example:
        >>> placement([(3,), (2, 2)], servers=2, split=4)
        ((Piece(key=0, start=0, stop=3), Piece(key=1, start=0, stop=2)), (Piece(key=1, start=2, stop=4),))
    """
    whole_number(servers, "free_running.placement", "servers", most=_MOST_SERVERS)
    whole_number(split, "free_running.placement", "split", least=0)
    placed: list[list[Piece]] = [[] for _ in range(servers)]
    for key, shape in enumerate(shapes):
        size = math.prod(shape)
        if servers == 1 or size < max(split, 1):  # a value without elements is whole
            placed[key * 9973 % servers].append(Piece(key, 0, size))
            continue
        ends = [size * i // servers for i in range(servers + 1)]
        for pieces, (start, stop) in zip(placed, itertools.pairwise(ends), strict=True):
            if stop > start:
                pieces.append(Piece(key, start, stop))
    return tuple(map(tuple, placed))


def cut(value: np.ndarray, piece: Piece) -> np.ndarray:
    """The piece of a value, flat. A whole value keeps its shape, since an updater may depend on it."""
    is_whole = piece.stop - piece.start == value.size
    return value if is_whole else value.reshape(-1)[piece.start : piece.stop]


_ADVICE = (
    "a value of `split` elements or more is cut over all servers, so its updater must be elementwise; give "
    "servers=1 or a larger split"
)


class Server:
    """One server: a `jaxpar.kv` store of its pieces, and a count of the pushes. It runs as a Ray actor."""

    def __init__(
        self,
        values: dict[int, np.ndarray],
        updater: Updater | UpdateFn | None,
        optimizer: optax.GradientTransformation | Updater | None,
    ):
        store = kv.create("local")
        store = store if updater is None else kv.set_updater(store, updater)
        store = store if optimizer is None else kv.set_optimizer(store, optimizer)
        self._keys = list(values)
        self._store = kv.init(store, self._keys, list(values.values()))
        # A plain function as updater may do what cannot be traced, such as counting its calls.
        can_compile = isinstance(self._store.updater, Updater)
        self._update = jax.jit(self._push, donate_argnums=0) if can_compile else self._push
        self._pushes: collections.Counter[int] = collections.Counter()
        self._staleness: collections.Counter[int] = collections.Counter()

    def _push(self, store: kv.KVStore, values: list[np.ndarray]) -> kv.KVStore:
        return kv.push(store, self._keys, values)

    def push(self, worker: int, version: int, values: list[np.ndarray]) -> None:
        """Update with the gradients of one worker, computed with an earlier version of the parameters."""
        if self._keys:
            self._store = self._update(self._store, values)
        self._staleness[self._pushes.total() - version] += 1
        self._pushes[worker] += 1

    def pull(self) -> tuple[int, list[np.ndarray]]:
        """The version, which is the number of pushes, and the pieces as copies."""
        # Copies: the next push donates the buffers of these.
        return self._pushes.total(), [np.array(self._store.values[k]) for k in self._keys]

    def status(self) -> dict[str, dict[int, int]]:
        return {"pushes": dict(self._pushes), "staleness": dict(sorted(self._staleness.items()))}


@dataclasses.dataclass(frozen=True)
class Servers:
    """Running servers. Any Ray task or actor can receive this object.

    Attributes:
        handles: the Ray actors.
        pieces: the pieces that each server holds, see `placement`.
        shapes, dtypes: the shapes and dtypes of the values.
        paths: the path of each value in the parameters.
        treedef: the structure of the parameters.
        timeout: seconds to wait for an answer.
    """

    handles: tuple[Any, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[np.dtype[Any], ...]
    paths: tuple[str, ...]
    treedef: Any
    timeout: float


@allows_transfers
def start(
    params: PyTree,
    *,
    optimizer: optax.GradientTransformation | Updater | None = None,
    updater: Updater | UpdateFn | None = None,
    servers: int = 1,
    split: int = SPLIT,
    timeout: float = 60,
) -> Servers:
    """Start servers that hold the parameters, and start Ray if needed.

    Args:
        params: a pytree of arrays.
        optimizer, updater: how a push changes a value, as in `kv.set_optimizer` and `kv.set_updater`, with one state
            for each key. None: a push replaces the value. A server sees only its piece of a split value, so the updater
            must then be elementwise.
        servers: the number of servers.
        split: see `placement`.
        timeout: seconds that a worker waits for a server's answer before it raises. Processes have five minutes to
            start, since each one imports JAX.

    Raises:
        ImportError: Ray is not installed.
        ValueError: `servers` is below 1; both an optimizer and an updater are given; the updater is not elementwise for
            a split value.
        TypeError: a leaf of params is not an array, or `servers` is not an int.
    """
    store = kv.from_params(params, kind="local", optimizer=optimizer, updater=updater)
    if optimizer is not None:  # one state a key, as the servers have
        by_key = kv.set_optimizer(dataclasses.replace(store, treedef=None), optimizer)
        store = dataclasses.replace(by_key, treedef=store.treedef)
    keys = sorted(store.values)
    values = [np.asarray(store.values[k]) for k in keys]
    pieces = placement([v.shape for v in values], servers, split)
    _check_pieces(store, pieces)

    # A server keeps no processor to itself, and computes on CPUs: the accelerators are the workers'.
    actor = _get_ray().remote(num_cpus=0, runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}})(Server)
    by_server = [{piece.key: cut(values[piece.key], piece) for piece in of_server} for of_server in pieces]
    handles = tuple(actor.remote(cut_values, updater, optimizer) for cut_values in by_server)
    shapes, dtypes = tuple(v.shape for v in values), tuple(v.dtype for v in values)
    paths = tuple(kv.names(store)[k] for k in keys)
    started = Servers(handles, pieces, shapes, dtypes, paths, store.treedef, _START_TIMEOUT)
    status(started)  # waits until they run
    return dataclasses.replace(started, timeout=timeout)


def _check_pieces(store: kv.KVStore, pieces: Sequence[Sequence[Piece]]) -> None:
    """`ValueError` where a value is cut and the updater is not elementwise."""
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in store.values.items()}
    # The lengths of the pieces that are not a whole value, by key, of each server.
    lengths = [
        {piece.key: piece.stop - piece.start for piece in of_server if piece.stop - piece.start < specs[piece.key].size}
        for of_server in pieces
    ]
    updater = store.updater
    if not isinstance(updater, Updater):
        for k in set().union(*lengths):
            jax.eval_shape(functools.partial(updater, k), specs[k], specs[k])  # raises where it cannot be traced
        updater = stateless(updater)
    for of_server in lengths:
        forms = {k: (specs[k], jax.ShapeDtypeStruct((n,), specs[k].dtype), None) for k, n in of_server.items()}
        updaters._check_elementwise(updater, forms, kv.names(store), "free_running.start", _ADVICE)


class ServerLost(RuntimeError):
    """A server no longer answers. Its parameters are lost."""


def wait_for_answers(servers: Servers, answers: Sequence[Any]) -> list[Any]:
    """The answers of all servers, of Ray's references. `ServerLost` names the first that does not answer."""
    ray = _get_ray()
    results: list[Any] = []
    for i, (answer, pieces) in enumerate(zip(answers, servers.pieces, strict=True)):
        try:
            results.append(ray.get(answer, timeout=servers.timeout))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            is_silent = isinstance(error, ray.exceptions.GetTimeoutError)
            what = f"has not answered for {servers.timeout:g} s" if is_silent else "is gone"
            contents = ", ".join(servers.paths[piece.key] for piece in pieces) or "nothing"
            raise ServerLost(
                f"free_running: server {i} of {len(answers)} {what}; it held {contents}. Start servers again from the "
                "last parameters that you kept"
            ) from error
    return results


def status(servers: Servers) -> list[dict[str, Any]]:
    """The counts of each server: `pushes` of each worker, and `staleness`.

    `staleness` maps s to the number of pushes with staleness s: s other pushes changed the parameters between the
    worker's pull and its push. {0: n} means that no two workers overlapped.

    Raises:
        ServerLost: as in `Worker.pull`.
    """
    return wait_for_answers(servers, [handle.status.remote() for handle in servers.handles])


def stop(servers: Servers) -> None:
    """End the servers and discard their parameters. Ray keeps running."""
    ray = _get_ray()
    for handle in servers.handles:
        ray.kill(handle)


# Workers: their connection to the servers, and processes that run them.


class Worker:
    """One worker's connection to the servers.

    Args:
        servers: from `start`.
        index: the number of this worker, for the servers' counts.
    """

    def __init__(self, servers: Servers, index: int = 0):
        self.servers: Servers = servers
        self.index: int = index
        self._versions = [0] * len(servers.handles)

    def pull(self) -> PyTree:
        """The current parameters, as a pytree of NumPy arrays.

        The pytree has the structure given to `start`. Each server answers independently, so pieces of different servers
        may have different versions.

        Raises:
            ServerLost: a server has ended, or has not answered for `timeout` seconds.
        """
        servers = self.servers
        answers = wait_for_answers(servers, [handle.pull.remote() for handle in servers.handles])
        # A push tells each server of which version its gradients are, so that the server can count how stale they are.
        self._versions = [version for version, _ in answers]
        leaves: list[np.ndarray | None] = [None] * len(servers.shapes)
        cuts: dict[int, list[np.ndarray]] = collections.defaultdict(list)  # of each value, in the order of servers
        for pieces, (_, values) in zip(servers.pieces, answers, strict=True):
            for piece, value in zip(pieces, values, strict=True):
                cuts[piece.key].append(value.reshape(-1))
        for key, of_value in cuts.items():
            value = of_value[0] if len(of_value) == 1 else np.concatenate(of_value)
            leaves[key] = value.reshape(servers.shapes[key])
        return servers.treedef.unflatten(leaves)

    @allows_transfers
    def push(self, grads: PyTree) -> None:
        """Send gradients to the servers. Returns when each server has updated.

        Args:
            grads: a pytree like the parameters, of the same shapes.

        Raises:
            ValueError: structure or shape differ from the parameters, or a value is not finite, which would reach all
                workers. The message names the parameter. Nothing was sent.
            TypeError: a dtype cannot be cast to the dtype of the parameter. Nothing was sent.
            ServerLost: as in `pull`. The remaining servers have applied the push.
        """
        servers = self.servers
        leaves = _check_grads(servers, grads)
        answers = []
        for handle, pieces, version in zip(servers.handles, servers.pieces, self._versions, strict=True):
            values = [cut(leaves[piece.key], piece) for piece in pieces]
            answers.append(handle.push.remote(self.index, version, values))
        wait_for_answers(servers, answers)


def _check_grads(servers: Servers, grads: PyTree) -> list[np.ndarray]:
    """The leaves of the gradients, in the dtypes of the parameters."""
    arrays = [np.asarray(leaf) for leaf in servers.treedef.flatten_up_to(grads)]
    for path, array, shape in zip(servers.paths, arrays, servers.shapes, strict=True):
        if array.shape != shape:
            raise ValueError(f"free_running push: {path!r}: expected shape {shape}, got {array.shape}")
    with np.errstate(over="ignore"):  # what becomes infinite is refused below
        cast = [a.astype(d, casting="same_kind") for a, d in zip(arrays, servers.dtypes, strict=True)]
    for path, array in zip(servers.paths, cast, strict=True):
        is_inexact = jax.numpy.issubdtype(array.dtype, jax.numpy.inexact)
        if is_inexact and (wrong := array.size - np.count_nonzero(np.isfinite(array))):
            raise ValueError(
                f"free_running push: {path!r}: {wrong} of {array.size} values are NaN or infinite; nothing was sent. "
                "Leave this push out, or look at its batch and at the learning rate"
            )
    return cast


class _Runner:
    """One worker, as a Ray actor."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, fn: Callable[[Worker], Any], servers: Servers, index: int) -> Any:
        return fn(Worker(servers, index))


@dataclasses.dataclass(frozen=True)
class Running:
    """Running workers.

    Attributes:
        handles: the Ray actors.
        results: Ray's references to the future results.
        pids: their processes on this machine.
    """

    handles: tuple[Any, ...]
    results: tuple[Any, ...]
    pids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of the workers.

    Attributes:
        results: the result of the function, by worker number.
        lost: the reason why a worker returned nothing, by worker number.
    """

    results: dict[int, Any]
    lost: dict[int, str]


@allows_transfers
def run(fn: Callable[[Worker], Any], servers: Servers, *, workers: int, **options: Any) -> Running:
    """Start `fn(worker)` in new processes, and return at once.

    Args:
        fn: the function that each worker runs. `worker.index` is the worker's number.
        servers: from `start`.
        workers: the number of workers.
        options: Ray's options for an actor, such as `num_gpus=1`. By default a worker reserves no resources.
    """
    ray = _get_ray()
    actor = ray.remote(**{"num_cpus": 0, **options})(_Runner)
    handles = tuple(actor.remote() for _ in range(workers))
    pids = tuple(ray.get([handle.pid.remote() for handle in handles], timeout=_START_TIMEOUT))
    sent = ray.put(servers)
    return Running(handles, tuple(h.run.remote(fn, sent, i) for i, h in enumerate(handles)), pids)


@allows_transfers
def finish(running: Running) -> Outcome:
    """Wait for the workers and end their processes.

    Raises:
        RuntimeError: every worker was lost. The message says why.
    """
    ray = _get_ray()
    # One worker that is lost does not stop the others: what it returned is missing, and the reason is told.
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
