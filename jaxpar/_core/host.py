"""Arrays of NumPy on their way to the devices: whose memory they are, and in which dtype JAX keeps them.

JAX reads host memory after `device_put` has returned, and a CPU device keeps the memory itself where it is aligned. So
the memory of a user, who may write the next batch into it, is copied before JAX gets it. `jax.device_put(x,
may_alias=False)` is no help: it shares the memory of NumPy arrays too (jax 0.10 to 0.12).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from .arrays import KeyPath, Tree

_ALIGNMENT = 64  # bytes. What begins at a multiple of it is the memory of an array on a CPU. All else is copied again.


def kept_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype in which JAX keeps numbers of this one: in the byte order of the machine, 32 bits wide without x64."""
    return np.dtype(jax.dtypes.canonicalize_dtype(np.dtype(dtype).newbyteorder("=")))


def own_copy(array: np.ndarray | np.generic, name: str) -> np.ndarray:
    """A copy of an array in host memory that nobody else writes to, in the dtype that JAX keeps.

    `ValueError` for numbers that this dtype cannot hold. `name` begins the message.
    """
    integers_fit(array, name)
    dtype = kept_dtype(array.dtype)
    size = math.prod(array.shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.__array_interface__["data"][0] % _ALIGNMENT
    copy = memory[first : first + size].view(dtype).reshape(array.shape)
    try:
        with np.errstate(over="raise"):
            copy[...] = array
    except FloatingPointError:
        raise ValueError(
            f"{name}: {array.dtype} numbers are stored as {dtype}, and some are beyond its largest, "
            f"{float(np.finfo(dtype).max):.3g}; scale them, or set jax_enable_x64"
        ) from None
    return copy


def own_copies(tree: Tree, caller: str) -> Tree:
    """The pytree with such copies of its arrays of NumPy. All else stays."""

    def copied(path: KeyPath, leaf: object) -> object:
        is_host = isinstance(leaf, (np.ndarray, np.generic))
        return own_copy(leaf, caller + jax.tree_util.keystr(path)) if is_host else leaf

    return jax.tree_util.tree_map_with_path(copied, tree)


def in_kept_dtype(array: Any, name: str) -> np.ndarray:
    """The array if JAX keeps its dtype, else a copy in the dtype that JAX keeps. Errors are those of `own_copy`."""
    return array if array.dtype == kept_dtype(array.dtype) else own_copy(array, name)


def integers_fit(
    array: jax.Array | np.ndarray | np.generic, name: str, dtype: type[np.integer[Any]] | None = None
) -> None:
    """`ValueError` for integers in host memory that `dtype`, by default the one that JAX keeps them in, cannot hold."""
    if isinstance(array, jax.Array) or array.dtype.kind not in "iu" or not array.size:
        return
    kept = kept_dtype(array.dtype) if dtype is None else np.dtype(dtype)
    if np.can_cast(array.dtype, kept):
        return
    limits, least, most = np.iinfo(kept), int(array.min()), int(array.max())
    if not limits.min <= least <= most <= limits.max:
        raise ValueError(
            f"{name}: integers are stored as {kept}; these run from {least} to {most}; number them from 0, by "
            f"np.unique(array, return_inverse=True)[1]{'' if dtype else ', or set jax_enable_x64'}"
        )
