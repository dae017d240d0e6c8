"""What an array is, and random keys as plain integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.core
import numpy as np
from jax.extend.core import get_opaque_trace_state

if TYPE_CHECKING:  # type checkers cannot see jax.Device
    Device = Any
else:
    Device = jax.Device

PyTree = Any  # arrays in dicts, lists, tuples and registered classes, in any depth: no type can say that
KeyPath = tuple[Any, ...]  # where a leaf is in its pytree: `DictKey`, `GetAttrKey`, `SequenceKey`, ... of jax.tree_util
Tree = TypeVar("Tree")  # a pytree whose structure and kinds of leaves a function keeps
Value = TypeVar("Value")


class Shaped(Protocol):
    """An array of JAX or NumPy, a `RowSparse`, or a `jax.ShapeDtypeStruct`, which has no values."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


with jax.core.eval_context():
    _AT_PROMPT = get_opaque_trace_state()


def nbytes(value: Shaped) -> int:
    """Bytes of an array, or of anything with a shape and a dtype."""
    dtype: Any = value.dtype if is_prng_key(value) else np.dtype(value.dtype)  # that of random keys is none of NumPy
    return math.prod(value.shape) * dtype.itemsize


def tree_nbytes(tree: PyTree) -> int:
    return sum(nbytes(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def is_of_numbers(value: object) -> bool:
    """Whether this has the dtype of numbers, or of truth values."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, np.number) or jax.numpy.issubdtype(dtype, np.bool_))


def is_traced(tree: PyTree) -> bool:
    """Whether some array of the pytree is a tracer, which has no values and no devices."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def is_deleted(value: object) -> bool:
    """Whether this is an array whose memory is gone, as after it was donated. A tracer never is."""
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted()


def check_plain(value: object, caller: str) -> None:
    """`TypeError` for an array of NumPy that says more than its numbers: a mask, a unit. The rest would be lost."""
    kind = type(value)
    if kind is np.ndarray or not isinstance(value, np.ndarray):
        return
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{caller}: expected plain numbers, got a {kind.__name__}, whose hidden numbers would count; fill them by "
            ".filled(0), or leave these rows out"
        )
    # Units and the like override NumPy's operations by one of these protocols.
    if any(getattr(kind, name) is not getattr(np.ndarray, name) for name in ("__array_ufunc__", "__array_function__")):
        raise TypeError(
            f"{caller}: expected plain numbers, got a {kind.__name__}, whose meaning beyond the numbers, such as a "
            "unit, would be lost; give np.asarray(array)"
        )


def is_tracing() -> bool:
    """Whether this runs inside a function that is traced: under `jit`, `vmap`, `grad`, ... It records operations.

    At the prompt they are computed at once.
    """
    return get_opaque_trace_state() != _AT_PROMPT


def is_prng_key(leaf: Any) -> bool:
    """Whether this is an array of typed random keys, as `jax.random.key` makes."""
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def without_keys(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """The pytree with uint32 arrays in place of random keys, and a function of such a pytree that restores them."""
    leaves, treedef = jax.tree.flatten(tree)
    impls = [jax.random.key_impl(leaf) if is_prng_key(leaf) else None for leaf in leaves]

    def restore(plain: PyTree) -> PyTree:
        wrapped = [
            leaf if impl is None else jax.random.wrap_key_data(jax.numpy.asarray(leaf), impl=impl)
            for leaf, impl in zip(treedef.flatten_up_to(plain), impls, strict=True)
        ]
        return treedef.unflatten(wrapped)

    plain = [leaf if impl is None else jax.random.key_data(leaf) for leaf, impl in zip(leaves, impls, strict=True)]
    return treedef.unflatten(plain), restore
