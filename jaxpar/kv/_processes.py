"""The processes of a run: which one this is, and a push at the prompt by all of them.

Every process has its own copy of the stored values on its own devices, as a store of kind `device` does. A push sums
the values of each process first. Then the first devices of the processes push, in buckets and compressed if the store
says so. At last every process makes the same update. So all must push the same keys in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P, SingleDeviceSharding

from .. import distributed, sparse
from .._core.calls import answers
from .._devices import emulated, processes
from .._devices.mesh import STORE_AXIS, assemble, copies_on, mesh_of, put, spans_processes, split_over, to_host
from .._store.store import Arrays, Changes, KVStore, Lists, kind_of
from ..mxnet import _STORE_ARGUMENTS as MXNET_ARGUMENTS
from ..sparse import RowSparse
from ..updaters import assign
from . import _eager
from ._create import signature


def rank() -> int:
    """The number of this process, from 0.

    Raises:
        RuntimeError: the run has several processes, and this one has not joined the others. JAX would return 0 in each
            process. Call `jp.distributed.initialize()`, or make a store of a kind `dist_*`.

    Example:
        >>> from jaxpar import kv
        >>> kv.rank()
        0
    """
    distributed.check_joined("kv.rank", "JAX would return 0 in each process")
    return jax.process_index()


def num_workers() -> int:
    """The number of processes.

    Raises:
        RuntimeError: as for `rank`. JAX would return 1.

    Example:
        >>> from jaxpar import kv
        >>> kv.num_workers()
        1
    """
    distributed.check_joined("kv.num_workers", "JAX would return 1 in each process")
    return jax.process_count()


@answers("kv.barrier", MXNET_ARGUMENTS)
def barrier(name: str = "barrier") -> None:
    """Wait until every process has called `barrier`.

    Args:
        name: the name of the barrier, equal in every process.

    Raises:
        ValueError: processes give different names. Every process raises.
        RuntimeError: as for `rank`. The barrier would not wait.

    Example:
        >>> from jaxpar import kv
        >>> kv.barrier("epoch 1")
    """
    distributed.check_joined("kv.barrier", "it would not wait for them")
    processes.refuse_elastic("kv.barrier")
    processes.agree("kv.barrier: the processes wait at different barriers", name)


# A push of all processes.


def push(store: KVStore, pushed: Lists) -> Changes:
    """What a push changes."""
    leaders = processes.leaders()
    # The program of the sum takes stored values as every program of a push does, on the same devices.
    here = {k: put(to_host(store.values[k]), SingleDeviceSharding(_leader())) for k in pushed}
    own = _own_sums(store, here, pushed)
    values = {k: assemble([v], copies_on(leaders)) for k, v in here.items()}
    over = dataclasses.replace(store, values=values, updater_state=dict.fromkeys(values, ()), layouts=())
    summed = emulated.run_by_itself(_eager.push_over, leaders, over, assign, own)
    totals = {k: [put(v.addressable_data(0), store.values[k].sharding)] for k, v in summed.values.items()}
    changes = _eager.push(dataclasses.replace(store, compressor=None, residuals={}), totals)
    return changes._replace(residuals=summed.residuals)


def rows(store: KVStore, pushed: dict[int, list[RowSparse]]) -> dict[int, list[RowSparse]]:
    """For each key the sum of the rows that all processes push, unique and sorted, in every process."""
    return {k: [put(_add_rows(vs, store.values[k].dtype), store.values[k].sharding)] for k, vs in pushed.items()}


def agree(store: KVStore, pushed: dict[int, list[Any]]) -> None:
    """Compare what the processes push. With other keys in one of them, all would wait forever."""
    for k, values in pushed.items():
        if any(spans_processes(leaf) for leaf in jax.tree.leaves(values)):
            raise ValueError(
                f"kv.push: key {k}: this value is on devices of several processes; push what this process has, "
                "value.addressable_data(i), or push inside pmap or shard_map with axis_name"
            )
    where = f"kv.push: kind {store.kind!r}: every process must push the same keys, in the same shapes"
    like = {k: jax.ShapeDtypeStruct(vs[0].shape, store.values[k].dtype) for k, vs in pushed.items()}
    rows = [k for k, vs in pushed.items() if isinstance(vs[0], RowSparse)]
    processes.agree(where, signature(like) + (f", of keys {rows} rows" if rows else ""))


def _leader() -> Any:
    return processes.leaders()[jax.process_index()]


def _own_sums(store: KVStore, here: Arrays, pushed: Lists) -> Lists:
    """The sum of this process's values of each key, on its first device."""
    several = {k: vs for k, vs in pushed.items() if len(vs) > 1}
    states = dict.fromkeys(several, ())
    own = KVStore({k: here[k] for k in several}, states, {}, kind_of(store).within_process, limits=store.limits)
    sums = _eager.push(own, several).values if several else {}
    return {k: [_on_leader(sums[k] if k in sums else vs[0])] for k, vs in pushed.items()}


def _on_leader(value: jax.Array) -> jax.Array:
    for shard in value.addressable_shards if value.sharding.is_fully_replicated else ():
        if shard.device == _leader():
            return shard.data
    return jax.device_put(value, _leader())


def _add_rows(values: list[RowSparse], dtype: Any) -> RowSparse:
    own = jax.device_put([RowSparse(r.indices, r.values.astype(dtype), r.shape) for r in values], _leader())
    count = sum(r.indices.shape[0] for r in own)
    most = max(map(int, processes.exchange(str(count))))
    size = 1 << (most - 1).bit_length() if most else 1  # few sizes, so few programs
    mine = sparse.add(own, size=size)
    along = split_over(processes.leaders())
    run = _rows_program(processes.leaders(), mine.shape)
    rows = assemble([mine.indices], along), assemble([mine.values], along)
    indices, summed = emulated.run_by_itself(run, *rows)
    return RowSparse(indices.addressable_data(0), summed.addressable_data(0), mine.shape)


@functools.lru_cache(maxsize=64)
def _rows_program(devices: Any, shape: tuple[int, ...]) -> Any:
    def body(indices: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = sparse.allreduce(RowSparse(indices, values, shape), STORE_AXIS)
        return total.indices, total.values

    mesh, along = mesh_of(devices), P(STORE_AXIS)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(along, along), out_specs=P(), check_vma=False))
