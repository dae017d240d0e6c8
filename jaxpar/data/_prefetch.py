"""Batches of any iterator, sent to the devices ahead of their use."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding

from .._core import checks, host
from .._core.arrays import PyTree
from .._core.transfers import allows_transfers
from .._devices import mesh, processes, user_mesh
from ._batches import ahead, check_sharding

_CALLER = "data.prefetch"


@allows_transfers
def prefetch(iterator: Iterable[PyTree], sharding: PyTree = None, size: int = 2) -> Iterator[PyTree]:
    """Send batches to the devices ahead of their use.

    Transfers run while earlier batches are in use, without a thread. The first batch is read at the first `next`. At
    most `size` batches are read ahead of the batch in use.

    Args:
        iterator: an iterable of pytrees of NumPy or JAX arrays, such as batches of a loader. With several processes,
            each process gives the rows of its own devices.
        sharding: the sharding of each array: a `NamedSharding` over any mesh, or a `PartitionSpec` inside
            `jax.set_mesh(mesh)`; or a pytree of these, a prefix of the batches. None: the default device.
        size: the number of batches that are sent ahead. 0: a batch is sent at its `next`.

    Returns:
        An iterator of the same pytrees on the devices. An exception of `iterator` is raised after the batches before
        it.

    Raises:
        TypeError: `iterator` is not iterable, `size` is not an int, or `sharding` is not a sharding.
        ValueError: `size` is below 0. At reading: the sharding cannot divide an array.

    >>> import jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> sharding = NamedSharding(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), PartitionSpec("data"))
    >>> loader = ({"x": np.full((4, 3), i)} for i in range(3))
    >>> [batch["x"].sharding == sharding for batch in prefetch(loader, sharding)]
    [True, True, True]
    """
    elements = iter(iterator)
    size = checks.whole_number(size, _CALLER, "size", least=0)
    if sharding is not None:
        check = functools.partial(check_sharding, caller=_CALLER)
        sharding = jax.tree.map(check, sharding, is_leaf=lambda x: isinstance(x, (Sharding, P)))

    def sent() -> Iterator[PyTree]:
        # Outside of `ahead`, so that waiting for one batch does not keep the next from being sent.
        for batch in ahead((_to_devices(element, sharding) for element in elements), size):
            leaves = jax.tree.leaves(batch)
            mesh.wait_before_collectives(batch, tuple(leaves[0].sharding.device_set) if leaves else ())
            yield batch

    return sent()


def _to_devices(batch: PyTree, sharding: PyTree | None) -> PyTree:
    """The batch on the devices. The transfer is only started."""
    batch = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), batch)
    checks.arrays_of_numbers(batch, f"{_CALLER}: batch")
    # Meanwhile the iterator may write its next batch into the same memory.
    batch = host.own_copies(batch, f"{_CALLER}: batch")

    def put(leaf: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
        if processes.count() == 1 or mesh.spans_processes(leaf):
            return mesh.put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    with user_mesh.outside_mesh():
        if sharding is None:
            return jax.device_put(batch)
        return jax.tree.map(put, batch, jax.tree.broadcast(sharding, batch))
