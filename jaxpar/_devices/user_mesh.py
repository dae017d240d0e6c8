"""The mesh that a user has set by `jax.set_mesh`, and how a call leaves it and comes back.

Programs of jaxpar run over meshes of their own, see `mesh`. JAX lets no program run over one mesh where another is
set. So an entrance of the package runs outside of the user's mesh, and the mesh is set again when it returns. Then
the same compiled programs run as without a mesh, with the same bits.

Axes of the type Explicit are a part of the type of an array. An array of such a mesh is used together with arrays of
no other mesh. So at an entrance the arrays that are given are taken without these types, and arrays that are returned
get them again. Nothing is copied: the new array has the buffers of the old one.

Inside a user's `jit` or `shard_map` a mesh cannot be left. There the functions run in it, on traced arrays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .._core.arrays import PyTree, Tree, is_traced, is_tracing
from .._core.transfers import allows_transfers
from .mesh import copies_on, split_over

Args = ParamSpec("Args")
Result = TypeVar("Result")
Item = TypeVar("Item")

_END: Any = object()


def on_own_mesh(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """The function, run outside of the user's mesh on arrays without its types."""
    return in_user_mesh(fn, has_typed_result=False)


def in_user_mesh_now(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """As `in_user_mesh`, and computed as at the prompt where no argument is traced, inside of a `jit` too."""
    return in_user_mesh(fn, is_now=True)


def in_user_mesh(
    fn: Callable[Args, Result], *, has_typed_result: bool = True, is_now: bool = False
) -> Callable[Args, Result]:
    """As `on_own_mesh`, and the arrays of the result are of the user's mesh."""

    @functools.wraps(fn)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        __tracebackhide__ = True  # IPython and pytest leave this frame out of a traceback
        if is_now and is_tracing() and not is_traced((args, kwargs)):
            # JAX would record the operations on constants, and what it records has no devices. Inside of a `shard_map`
            # it has to: no program over several devices can run there.
            is_mapped = kwargs.get("axis_name") is not None or jax.sharding.get_abstract_mesh().manual_axes
            if not is_mapped:
                with jax.core.eval_context():
                    return call(*args, **kwargs)
        if jax.sharding.get_abstract_mesh().empty:
            args, kwargs = without_types((args, kwargs))
            return fn(*args, **kwargs)
        with outside_mesh() as user:
            if user is not None:
                args, kwargs = without_types((args, kwargs))
                result = fn(*args, **kwargs)
                return with_types(result, user) if has_typed_result else result
        # Something is traced in the user's mesh, which cannot be left.
        check_traced((args, kwargs), fn.__name__)
        return fn(*args, **kwargs)

    return call


def each_in_user_mesh(items: Iterator[Item]) -> Iterator[Item]:
    """The items of an iterator, each made as `in_user_mesh` calls a function."""
    advance = allows_transfers(in_user_mesh(lambda: next(items, _END)))
    while (item := advance()) is not _END:
        yield item


@contextlib.contextmanager
def outside_mesh() -> Generator[Mesh | None]:
    """A block in which no mesh is set. Its value is the user's mesh, or None if there is none or it cannot be left."""
    user = None
    if not jax.sharding.get_abstract_mesh().empty:
        with contextlib.suppress(ValueError):  # something is traced
            user = jax.sharding.get_mesh()
    if user is None:
        yield None
        return
    with jax.set_mesh(None):
        yield user


def has_types(mesh: Mesh | AbstractMesh) -> bool:
    """Whether axes of a mesh are a part of the types of its arrays."""
    return not set(mesh.axis_types) <= {AxisType.Auto}


def without_types(tree: Tree) -> Tree:
    """The arrays of a user's Explicit meshes as arrays of our own. All else stays, to the object."""
    avals = [getattr(leaf, "aval", None) for leaf in jax.tree.leaves(tree)]
    # Many arrays have few shardings, so this is fast where nothing has types.
    shardings: dict[int, Any] = {id(s): s for s in [getattr(aval, "sharding", None) for aval in avals]}
    meshes = [sharding.mesh for sharding in shardings.values() if hasattr(sharding, "mesh")]
    if {kind for mesh in meshes for kind in mesh.axis_types} <= {AxisType.Auto}:
        return tree
    return _with_shardings(tree, _own_sharding_of)


def with_types(tree: Tree, mesh: Mesh) -> Tree:
    """The arrays on all devices of a mesh as arrays of that mesh, if it has types. All else stays."""

    def sharding_of(array: jax.Array) -> Sharding | None:
        return _user_sharding(mesh, array.sharding) if isinstance(array.sharding, NamedSharding) else None

    return _with_shardings(tree, sharding_of) if has_types(mesh) else tree


# Traced values inside of a user's mesh, where axes of the type Explicit are a part of the type of a value.


def check_traced(tree: PyTree, caller: str) -> None:
    """`ValueError` for a traced value of another mesh than the one that is set around the program."""
    around = jax.sharding.get_abstract_mesh()
    for leaf in jax.tree.leaves(tree) if has_types(around) else ():
        if isinstance(leaf, jax.core.Tracer):
            mesh = jax.typeof(leaf).sharding.mesh
            if not mesh.empty and mesh != around:
                raise ValueError(
                    f"{caller}: a value of shape {leaf.shape} is on another mesh than that around this jit: expected "
                    f"{around}, got {mesh}; make the store inside of jax.set_mesh, or kv.place it there before the jit"
                )


def is_split(value: object) -> bool:
    """Whether a traced value is split along an Explicit axis."""
    return isinstance(value, jax.core.Tracer) and any(jax.typeof(value).sharding.spec)


def unsplit(value: jax.Array) -> jax.Array:
    """The value, with a traced one whole along each Explicit axis, so that it can be made flat."""
    return jax.reshard(value, jax.typeof(value).sharding.update(spec=PartitionSpec())) if is_split(value) else value


def split_like(value: jax.Array, other: jax.Array) -> jax.Array:
    """The value, with a traced one split along Explicit axes as another value of its shape is."""
    if not isinstance(value, jax.core.Tracer) or not isinstance(other, jax.core.Tracer):
        return value
    sharding, wanted = jax.typeof(value).sharding, jax.typeof(other).sharding
    return value if sharding.spec == wanted.spec or wanted.mesh.empty else jax.reshard(value, wanted)


def _with_shardings(tree: Tree, sharding_of: Callable[[jax.Array], Sharding | None]) -> Tree:
    """The tree with the arrays for which there is another sharding. An array that appears twice stays one array."""
    leaves, structure = jax.tree.flatten(tree)
    new: dict[int, jax.Array] = {}  # by the id of the old array
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and id(leaf) not in new:
            sharding = sharding_of(leaf)
            if sharding is not None:
                new[id(leaf)] = with_sharding(leaf, sharding)
    return structure.unflatten([new.get(id(leaf), leaf) for leaf in leaves]) if new else tree


def with_sharding(array: jax.Array, sharding: Sharding) -> jax.Array:
    """The same buffers under another sharding, which must lay them out alike."""
    shards = [shard.data for shard in array.addressable_shards]  # arrays of one device, without types
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _own_sharding_of(array: jax.Array) -> Sharding | None:
    """The equivalent sharding without axis types. None: the array has no types."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        return _own_sharding(sharding)
    # An array that was put on one device keeps the types of the mesh that it comes from.
    return None if jax.typeof(array).sharding.mesh.empty else sharding


@functools.lru_cache(maxsize=1024)
def _own_sharding(sharding: NamedSharding) -> NamedSharding | None:
    """The equivalent sharding without axis types. None: the mesh has no types."""
    mesh = sharding.mesh
    spec: list[Any] = list(sharding.spec)
    if not isinstance(mesh, Mesh) or not has_types(mesh):
        return None
    devices = tuple(mesh.devices.flat)
    if sharding.is_fully_replicated:
        return copies_on(devices)
    first = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    if first == mesh.axis_names and not any(spec[1:]):
        return split_over(devices)
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), sharding.spec)


@functools.lru_cache(maxsize=1024)
def _user_sharding(user: Mesh, sharding: NamedSharding) -> NamedSharding | None:
    """The equivalent sharding over the user's mesh, or None."""
    # There is one for the same devices in the same order. So the arrays of a store, which go into one program, stay
    # together.
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh) or has_types(mesh) or tuple(user.devices.flat) != tuple(mesh.devices.flat):
        return None
    if sharding.is_fully_replicated:
        return NamedSharding(user, PartitionSpec())
    if mesh.axis_names == user.axis_names and mesh.devices.shape == user.devices.shape:
        return NamedSharding(user, sharding.spec)
    if len(mesh.axis_names) > 1:
        return None
    # Our mesh has one axis. Where it splits a dimension, all axes of the user's mesh together split it alike.
    names: Any = user.axis_names
    every = names if len(names) > 1 else names[0]
    return NamedSharding(user, PartitionSpec(*[entry and every for entry in sharding.spec]))
