"""Arrays on devices: the mesh of a store, its two shardings, transfers and copies, over several processes too.

Emulated CPU devices are the host's own cores, and one memory:

The hang. Before jax 0.12, a program with collectives over several CPU devices could hang forever when it was started
while its inputs were still being computed. XLA has as many threads as there are devices. They wait in the collective
for a device whose inputs need one of these threads. So with older jax, `wait_before_collectives` comes before each such
program.

Programs at the same time. A process starts a program over several of its CPU devices after the previous one has ended.
It starts a program over one device at once. Gloo has one connection for each group of devices in several processes. Two
programs that use the connection at the same time receive each other's messages. So `run_by_itself` runs programs over
one device of each process.

The memory. A jax array never changes, and jax copies a donated array whose memory is in use elsewhere. So the same
bytes can be the value on every CPU device of this process. `share_or_put` shares memory where `jax.device_put` would
copy, and so does a program that is given NumPy arrays, which are views of this memory, inside of `on`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._core.arrays import Device, PyTree, Tree, is_deleted, is_prng_key, is_traced, is_tracing, without_keys

Result = TypeVar("Result")
Item = TypeVar("Item")

STORE_AXIS = "data"
# Arrays of one program. XLA compiles a kernel for each, so a program for thousands of them would take minutes.
MOST = 256
# Bytes. From here on, a copy on one emulated device costs more than a second array of the same memory.
LARGE = 1 << 20

_CAN_HANG = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)


def mesh_of(devices: Sequence[Device]) -> Mesh:
    """The mesh of these devices, with the one axis `STORE_AXIS`."""
    mesh: Any = copies_on(tuple(devices)).mesh  # of others it may be an AbstractMesh
    return mesh


def auto_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes of type Auto, for programs that the compiler spreads. `jax.make_mesh` makes Explicit ones."""
    return Mesh(mesh.devices, mesh.axis_names)


@functools.lru_cache(maxsize=128)
def copies_on(devices: tuple[Device, ...]) -> NamedSharding:
    """The sharding of a value with a whole copy on each device."""
    return NamedSharding(Mesh(np.array(devices), (STORE_AXIS,)), PartitionSpec())


@functools.lru_cache(maxsize=128)
def split_over(devices: tuple[Device, ...]) -> NamedSharding:
    """The sharding that gives each device an equal part along the first axis."""
    return NamedSharding(copies_on(devices).mesh, PartitionSpec(STORE_AXIS))


def for_programs(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """The items in pieces, of which each is for one program."""
    return (items[start : start + MOST] for start in range(0, len(items), MOST))


def are_on(tree: PyTree, devices: Sequence[Device]) -> bool:
    """Whether all arrays of a pytree are on these devices, so that a program over them, in this order, takes them."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    shardings = {array.sharding for array in arrays}
    in_order = {tuple(np.ravel(np.asarray(s.mesh.devices))) for s in shardings if isinstance(s, NamedSharding)}
    return in_order <= {tuple(devices)} and {frozenset(s.device_set) for s in shardings} <= {frozenset(devices)}


def one_on_each(lists: Iterable[Sequence[jax.Array]]) -> tuple[Device, ...] | None:
    """The devices in their order, if each list has one array on each of the same several ones."""
    shardings = [[array.sharding for array in arrays] for arrays in lists]
    first = shardings[0]
    if len(first) < 2 or {type(s) for s in first} != {SingleDeviceSharding}:
        return None
    devices = tuple([next(iter(s.device_set)) for s in first])
    is_same = shardings.count(first) == len(shardings) and len(set(devices)) == len(devices)
    return devices if is_same else None


def assemble(shards: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    """Make one array from this process's arrays, one on each device: stacked, or replicated. Copies nothing."""
    shape = shards[0].shape
    if not sharding.is_fully_replicated:
        shape = (sharding.num_devices * shape[0], *shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))


def spans_processes(leaf: object) -> TypeGuard[jax.Array]:
    """Whether some of the array's devices are of another process."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable


def put(tree: PyTree, sharding: Sharding | None) -> PyTree:
    """Arrays with that sharding, as `jax.device_put`, over the devices of several processes too."""
    # 1. What is there already. `jax.device_put` would take 10 µs for each of these arrays. One on a single device it
    #    may commit.
    leaves = jax.tree.leaves(tree)
    if isinstance(sharding, NamedSharding) and {getattr(leaf, "sharding", None) for leaf in leaves} <= {sharding}:
        return tree

    # 2. Within this process, as jax does it. Inside a traced function arrays have no values, and the devices need not
    #    exist.
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    stays_here = is_tracing() or sharding is None or sharding.is_fully_addressable
    if stays_here and not any(map(spans_processes, leaves)):
        return jax.device_put(tree, sharding)

    # 3. Over processes nothing is sent: each of them fills the part of its own devices, so every process must give the
    #    same arrays. An array that already spans processes is resharded by a program over its devices.
    def over_processes(leaf: Any) -> jax.Array:
        if spans_processes(leaf):
            if sharding is not None and leaf.sharding.device_set == sharding.device_set:
                return jax.device_put(leaf, sharding)  # in any order of the devices
            leaf = to_host(leaf)
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if not sharding.addressable_devices:
            devices = sorted(map(str, sharding.device_set))
            raise ValueError(f"the given devices all belong to other processes: {devices}")
        leaf = np.asarray(leaf)
        # np.array: jax shares memory between CPU devices and NumPy where it can, and each device needs its own.
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.array(leaf[index]))

    plain, restore = without_keys(tree)
    return restore(jax.tree.map(over_processes, plain))


def put_copy(tree: PyTree, sharding: Sharding) -> PyTree:
    """Copies of the arrays with that sharding. Donating the copies leaves the given arrays valid."""
    # `device_put(may_alias=False)` is not enough. From one device to several it keeps the buffer of the first.
    return put(jax.tree.map(jnp.copy, tree), sharding)


def to_host(leaf: Any) -> Any:
    """The array, or all of one that spans processes. If that is not replicated, every process must call this."""
    if not spans_processes(leaf):
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(leaf, tiled=True)


# Emulated devices.


def can_hang(devices: Sequence[Device]) -> bool:
    """Whether a program with collectives over these devices can hang."""
    return _CAN_HANG and len(devices) > 1 and devices[0].platform == "cpu"


def wait_before_collectives(tree: PyTree, devices: Sequence[Device]) -> None:
    """Wait for the arrays of a pytree if a program over these devices can hang otherwise."""
    if can_hang(devices) and not is_traced(tree):
        jax.block_until_ready(tree)


def run_by_itself(program: Callable[..., Result], *args: Any) -> Result:
    """The results of a program over one device of each process, while no other program runs."""
    devices = tuple(jax.local_devices())
    if len(devices) == 1 or devices[0].platform != "cpu":
        return program(*args)
    # Before it: XLA starts a program over several devices after the last one has ended. So where this one has ended,
    # none is under way. After it: the next one would be started beside it.
    wait_for_all, number = _after_all_programs(devices)
    wait_for_all(number).block_until_ready()
    return jax.block_until_ready(program(*args))


@functools.cache
def _after_all_programs(devices: tuple[Device, ...]) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """A program that XLA starts after all other programs over several of these devices, and its argument."""
    return jax.jit(lambda x: x + 1), jax.device_put(np.int32(0), copies_on(devices))


def one_memory(devices: Iterable[Device]) -> bool:
    """Whether all these devices are CPU devices of this process."""
    return all(d.platform == "cpu" and d.process_index == jax.process_index() for d in devices)


def share_or_put(arrays: Sequence[jax.Array], sharding: Sharding) -> list[jax.Array]:
    """Arrays with that sharding, as `jax.device_put`, without copies inside one memory.

    Shared is an array on one device that goes whole to devices of its memory. The call waits until it is computed.
    """

    def is_elsewhere(array: jax.Array) -> bool:
        return isinstance(array.sharding, SingleDeviceSharding) and array.sharding != sharding

    if sharding.is_fully_replicated and one_memory(sharding.device_set):
        return jax.device_put([np.asarray(a) if is_elsewhere(a) and _can_share(a) else a for a in arrays], sharding)
    return jax.device_put(list(arrays), sharding)


# Donated memory.


def is_donated(state: PyTree) -> bool:
    return any(map(is_deleted, jax.tree.leaves(state)))


def check_not_donated(state: PyTree, caller: str) -> None:
    """`RuntimeError` for a state that was donated to a step."""
    if is_donated(state):
        raise RuntimeError(
            f"{caller}: this state was donated to a step; use the state that it returned: state, metrics = step(state, "
            "batch). To keep old params, copy them before: jax.device_get(state.params)"
        ) from None


def zeros_if_donated(state: Tree) -> Tree:
    """The pytree with zeros in place of donated arrays, as a template to restore a checkpoint into."""
    # Random keys need `device_put`.
    return jax.tree.map(lambda x: jax.device_put(jnp.zeros_like(x), x.sharding) if is_deleted(x) else x, state)


def own_copies(tree: Tree) -> Tree:
    """Copies of the arrays of a pytree on the same devices. Tracers stay unchanged. Nothing is compiled."""
    leaves, treedef = jax.tree.flatten(tree)
    # All in one call of `device_put`, which takes half the time of a call for each of a hundred small arrays.
    places = [i for i, leaf in enumerate(leaves) if not is_traced(leaf)]
    arrays = [leaves[i] for i in places]
    # None: a copy where the array is. One that spans processes is given its sharding.
    shardings = [array.sharding if spans_processes(array) else None for array in arrays]
    for i, copy in zip(places, jax.device_put(arrays, shardings, may_alias=False), strict=True):
        leaves[i] = copy
    return treedef.unflatten(leaves)


def donatable(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays of the same values, where the given ones are, for a user who may donate them.

    Large values of emulated devices share the memory of the given ones. XLA does not write to such memory.
    """
    # A large value of one memory is shared instead of copied. All small ones of a sharding are one program.
    copies: dict[int, jax.Array] = {}
    small: dict[Sharding, list[int]] = {}
    several = jax.process_count() > 1  # asked once: many arrays are asked for each pull
    for i, array in enumerate(arrays):
        if several and spans_processes(array):
            copies[i] = jax.device_put(array, array.sharding, may_alias=False)
        elif array.nbytes >= LARGE and _can_share(array):
            view = np.asarray(array)  # of the same memory, which it keeps alive
            if array.committed:
                copies[i] = jax.device_put(view, array.sharding)
            else:
                with jax.default_device(*array.sharding.device_set):
                    copies[i] = jnp.asarray(view)
        else:
            small.setdefault(array.sharding, []).append(i)
    for sharding, places in small.items():
        program = _copy_program(None if isinstance(sharding, SingleDeviceSharding) else sharding)
        for batch in for_programs(places):
            copies |= zip(batch, program([arrays[i] for i in batch]), strict=True)
    return [copies[i] for i in range(len(arrays))]


def _can_share(array: jax.Array) -> bool:
    return not is_prng_key(array) and array.is_fully_replicated and one_memory(array.sharding.device_set)


@functools.lru_cache(maxsize=64)
def _copy_program(sharding: Sharding | None) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda arrays: [jnp.copy(a) for a in arrays], out_shardings=sharding)
