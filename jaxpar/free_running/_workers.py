"""Workers: their connection to the servers, and processes that run them."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._core.calls import answers
from ._ray import START_TIMEOUT, get_ray
from ._servers import Servers, cut, wait_for_answers


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

    def pull(self) -> Any:
        """The current parameters, as a pytree of NumPy arrays.

        The pytree has the structure given to `start`. Each server answers independently, so pieces of different servers
        may have different versions.

        Raises:
            ServerLost: a server has ended, or has not answered for `timeout` seconds.
        """
        servers = self.servers
        answers = wait_for_answers(servers, [handle.pull.remote() for handle in servers.handles])
        self._versions = [version for version, _ in answers]
        leaves: list[Any] = [None] * len(servers.shapes)
        parts: dict[int, list[np.ndarray]] = collections.defaultdict(list)
        for held, (_, values) in zip(servers.pieces, answers, strict=True):
            for piece, value in zip(held, values, strict=True):
                parts[piece.key].append(value.reshape(-1))
        for key, cuts in parts.items():
            leaves[key] = (cuts[0] if len(cuts) == 1 else np.concatenate(cuts)).reshape(servers.shapes[key])
        return servers.treedef.unflatten(leaves)

    def push(self, grads: Any) -> None:
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
        for handle, held, version in zip(servers.handles, servers.pieces, self._versions, strict=True):
            answers.append(handle.push.remote(self.index, version, [cut(leaves[p.key], p) for p in held]))
        wait_for_answers(servers, answers)


def _check_grads(servers: Servers, grads: Any) -> list[np.ndarray]:
    """The leaves of the gradients, in the dtypes of the parameters."""
    leaves, treedef = jax.tree.flatten(grads)
    if treedef != servers.treedef:
        raise ValueError(
            f"free_running push: expected the structure of the parameters, {servers.treedef}, got {treedef}"
        )
    arrays = [np.asarray(leaf) for leaf in leaves]
    for path, array, shape in zip(servers.paths, arrays, servers.shapes, strict=True):
        if array.shape != shape:
            raise ValueError(f"free_running push: {path!r}: expected shape {shape}, got {array.shape}")
    with np.errstate(over="ignore"):  # what becomes infinite is refused below
        cast = [a.astype(d, casting="same_kind") for a, d in zip(arrays, servers.dtypes, strict=True)]
    for path, array in zip(servers.paths, cast, strict=True):
        _check_finite(path, array)
    return cast


def _check_finite(path: str, array: np.ndarray) -> None:
    """`ValueError` for NaN and infinity, also where the cast made them."""
    if not jax.numpy.issubdtype(array.dtype, jax.numpy.inexact):
        return
    if wrong := array.size - np.count_nonzero(np.isfinite(array)):
        raise ValueError(
            f"free_running push: {path!r}: {wrong} of {array.size} values are NaN or infinite; nothing was sent. Leave "
            "this push out, or look at its batch and at the learning rate"
        )


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


@answers("free_running.run")
def run(fn: Callable[[Worker], Any], servers: Servers, *, workers: int, **options: Any) -> Running:
    """Start `fn(worker)` in new processes, and return at once.

    Args:
        fn: the function that each worker runs. `worker.index` is the worker's number.
        servers: from `start`.
        workers: the number of workers.
        options: Ray's options for an actor, such as `num_gpus=1`. By default a worker reserves no resources.
    """
    ray = get_ray()
    actor = ray.remote(**{"num_cpus": 0, **options})(_Runner)
    handles = tuple(actor.remote() for _ in range(workers))
    pids = tuple(ray.get([handle.pid.remote() for handle in handles], timeout=START_TIMEOUT))
    sent = ray.put(servers)
    return Running(handles, tuple(h.run.remote(fn, sent, i) for i, h in enumerate(handles)), pids)


@answers("free_running.finish")
def finish(running: Running) -> Outcome:
    """Wait for the workers and end their processes.

    Raises:
        RuntimeError: every worker was lost. The message says why.
    """
    ray = get_ray()
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
