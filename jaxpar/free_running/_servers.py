"""A parameter server, and the start of several as Ray actors."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .. import kv, updaters
from .._core.calls import answers
from .._core.checks import whole_number
from ..updaters import UpdateFn, Updater, stateless
from ._placement import SPLIT, Piece, Shape, cut, placement
from ._ray import START_TIMEOUT, get_answers, get_ray

if TYPE_CHECKING:
    import optax

_ADVICE = (
    "a value of `split` elements or more is cut over all servers, so its updater must be elementwise; give "
    "servers=1 or a larger split"
)


class Server:
    """One server: a `jaxpar.kv` store of its pieces, and a count of the pushes. It runs as a Ray actor.

    Args:
        values: the pieces by key, NumPy arrays.
        updater, optimizer: as in `start`.
    """

    def __init__(self, values: dict[int, np.ndarray], updater: Any, optimizer: Any):
        store = kv.create("local")
        store = store if updater is None else kv.set_updater(store, updater)
        store = store if optimizer is None else kv.set_optimizer(store, optimizer)
        self._keys = list(values)
        self._store = kv.init(store, self._keys, list(values.values()))
        can_compile = isinstance(self._store.updater, Updater)
        self._update = jax.jit(self._push, donate_argnums=0) if can_compile else self._push
        self._version = 0
        self._pushes: collections.Counter[int] = collections.Counter()
        self._staleness: collections.Counter[int] = collections.Counter()

    def _push(self, store: kv.KVStore, values: list[Any]) -> kv.KVStore:
        return kv.push(store, self._keys, values)

    def push(self, worker: int, version: int, values: list[np.ndarray]) -> None:
        """Update with the gradients of one worker, computed with an earlier version of the parameters."""
        if self._keys:
            self._store = self._update(self._store, values)
        self._staleness[self._version - version] += 1
        self._pushes[worker] += 1
        self._version += 1

    def pull(self) -> tuple[int, list[np.ndarray]]:
        """The version, which is the number of pushes, and the pieces as copies."""
        return self._version, [np.array(self._store.values[k]) for k in self._keys]

    def status(self) -> dict[str, Any]:
        """The counts, see `status`."""
        return {"pushes": dict(self._pushes), "staleness": dict(sorted(self._staleness.items()))}


@dataclasses.dataclass(frozen=True)
class Servers:
    """Running servers, and what each of them holds. It can be sent to any Ray task or actor.

    Attributes:
        handles: the Ray actors.
        pieces: what each of them holds, see `placement`.
        shapes, dtypes: of the values.
        paths: the path of each value in the parameters.
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


@answers("free_running.start")
def start(
    params: Any,
    *,
    optimizer: optax.GradientTransformation | Updater | None = None,
    updater: Updater | UpdateFn | None = None,
    servers: int = 1,
    split: int = SPLIT,
    timeout: float = 60,
) -> Servers:
    """Start servers that hold these parameters. Ray is started on this machine if it does not run.

    Args:
        params: a pytree of arrays.
        optimizer, updater: what a push does, as in `kv.set_optimizer` and `kv.set_updater`, with one state a key. None:
            a push replaces the value. Where values are split each server sees only its piece, so the updater must be
            elementwise.
        servers: how many.
        split: see `placement`.
        timeout: seconds that a worker waits for a server's answer before it is an error. Processes have five
            minutes to start, since each imports JAX.

    Raises:
        ImportError: Ray is not installed.
        ValueError: less than one server. Both an optimizer and an updater. An updater that is not elementwise for a
            value that is split.
        TypeError: a leaf of params that is no array, or `servers` that is no int.
    """
    if optimizer is not None and updater is not None:
        raise ValueError("free_running.start: give an optimizer or an updater, not both")
    store = kv.from_params(params, kind="local", updater=updater)
    if optimizer is not None:  # one state a key, as the servers have
        store = dataclasses.replace(
            kv.set_optimizer(dataclasses.replace(store, treedef=None), optimizer), treedef=store.treedef
        )
    whole_number(servers, "free_running.start", "servers")
    keys = sorted(store.values)
    values = [np.asarray(store.values[k]) for k in keys]
    pieces = placement([v.shape for v in values], servers, split)
    _check_pieces(store, pieces)
    actor = get_ray().remote(num_cpus=0, runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}})(Server)
    parts = [{p.key: cut(values[p.key], p) for p in held} for held in pieces]
    handles = tuple(actor.remote(part, updater, optimizer) for part in parts)
    started = Servers(
        handles,
        pieces,
        tuple(v.shape for v in values),
        tuple(v.dtype for v in values),
        tuple(kv.names(store)[k] for k in keys),
        store.treedef,
        timeout,
    )
    status(dataclasses.replace(started, timeout=START_TIMEOUT))
    return started


def _check_pieces(store: kv.KVStore, pieces: Sequence[Sequence[Piece]]) -> None:
    """`ValueError` where a value is cut and the updater is not elementwise."""
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in store.values.items()}
    lengths = [{p.key: p.stop - p.start for p in held if p.stop - p.start < specs[p.key].size} for held in pieces]
    updater = store.updater
    if not isinstance(updater, Updater):
        for k in set().union(*lengths):
            jax.eval_shape(functools.partial(updater, k), specs[k], specs[k])  # raises where it cannot be traced
        updater = stateless(updater)
    for held in lengths:
        forms = {k: (specs[k], jax.ShapeDtypeStruct((n,), specs[k].dtype), None) for k, n in held.items()}
        updaters._check_elementwise_forms(updater, forms, kv.names(store), "free_running.start", _ADVICE)


def wait_for_answers(servers: Servers, answers: Sequence[Any]) -> list[Any]:
    """The answers of all servers. `ServerLost` names the first that does not answer."""
    contents = [[servers.paths[p.key] for p in held] for held in servers.pieces]
    return get_answers(answers, servers.timeout, contents)


@answers("free_running.status")
def status(servers: Servers) -> list[dict[str, Any]]:
    """The counts of each server: `pushes` of each worker, and `staleness`.

    `staleness` maps s to a number of pushes. Between the pull and the push of each, s other pushes changed the
    parameters. In a run with {0: n} no two workers overlapped.

    Raises:
        ServerLost: as in `Worker.pull`.
    """
    return wait_for_answers(servers, [handle.status.remote() for handle in servers.handles])


@answers("free_running.stop")
def stop(servers: Servers) -> None:
    """End the servers. What they hold is lost, and Ray itself runs on."""
    ray = get_ray()
    for handle in servers.handles:
        ray.kill(handle)
