"""MXNet's `linalg` operators, of the last two axes of arrays."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._arrays import check_count

_MOST_ROWS = 2**13  # of a matrix whose size an attribute says


def _transposed(x: jax.Array, yes: bool = True) -> jax.Array:
    return x.swapaxes(-1, -2) if yes else x


def gemm2(
    a: jax.Array,
    b: jax.Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    axis: int = -2,
) -> jax.Array:
    """A product of matrices whose rows are along `axis`."""
    a, b = jnp.moveaxis(a, axis, -2), jnp.moveaxis(b, axis, -2)
    return jnp.moveaxis(alpha * (_transposed(a, transpose_a) @ _transposed(b, transpose_b)), -2, axis)


def gemm(
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    axis: int = -2,
) -> jax.Array:
    return gemm2(a, b, transpose_a=transpose_a, transpose_b=transpose_b, alpha=alpha, axis=axis) + beta * c


def syrk(a: jax.Array, *, transpose: bool = False, alpha: float = 1.0) -> jax.Array:
    return gemm2(a, a, transpose_a=transpose, transpose_b=not transpose, alpha=alpha)


def _triangle(a: jax.Array, lower: bool) -> jax.Array:
    return jnp.tril(a) if lower else jnp.triu(a)


def trmm(
    a: jax.Array,
    b: jax.Array,
    *,
    transpose: bool = False,
    rightside: bool = False,
    lower: bool = True,
    alpha: float = 1.0,
) -> jax.Array:
    a = _transposed(_triangle(a, lower), transpose)
    return alpha * (b @ a if rightside else a @ b)


def trsm(
    a: jax.Array,
    b: jax.Array,
    *,
    transpose: bool = False,
    rightside: bool = False,
    lower: bool = True,
    alpha: float = 1.0,
) -> jax.Array:
    """The x of a x = alpha b, or of x a = alpha b."""
    return lax.linalg.triangular_solve(
        _triangle(a, lower), alpha * b, left_side=not rightside, lower=lower, transpose_a=transpose
    )


def potri(a: jax.Array) -> jax.Array:
    """The inverse of a matrix, of its Cholesky factor."""
    inverse = trsm(a, jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape))
    return _transposed(inverse) @ inverse


def sumlogdiag(a: jax.Array) -> jax.Array:
    return jnp.log(jnp.diagonal(a, axis1=-2, axis2=-1)).sum(-1)


def gelqf(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Q, L) of a = L Q."""
    q, r = jnp.linalg.qr(_transposed(a))
    return _transposed(q), _transposed(r)


def syevd(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvectors as rows, and eigenvalues."""
    values, vectors = jnp.linalg.eigh(a)
    return _transposed(vectors), values


def makediag(a: jax.Array, *, offset: int = 0) -> jax.Array:
    size = a.shape[-1] + abs(offset)
    places = np.arange(a.shape[-1])
    return (
        jnp.zeros((*a.shape[:-1], size, size), a.dtype).at[..., places - min(offset, 0), places + max(offset, 0)].set(a)
    )


def _places(size: int, offset: int, lower: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of a triangle, of an upper one column by column. `lower` counts only without an offset."""
    is_lower = offset < 0 or (offset == 0 and lower)
    if is_lower:
        return np.tril_indices(size, offset)
    columns, rows = np.tril_indices(size, -offset)
    return rows, columns


def extracttrian(a: jax.Array, *, offset: int = 0, lower: bool = True) -> jax.Array:
    rows, columns = _places(a.shape[-1], offset, lower)
    return a[..., rows, columns]


def maketrian(a: jax.Array, *, offset: int = 0, lower: bool = True) -> jax.Array:
    size = (math.isqrt(8 * a.shape[-1] + 1) - 1) // 2 + abs(offset)
    check_count(size, f"linalg_maketrian: a matrix of {size} rows", _MOST_ROWS)
    rows, columns = _places(size, offset, lower)
    return jnp.zeros((*a.shape[:-1], size, size), a.dtype).at[..., rows, columns].set(a)
