"""Convolution, ReLU and 2×2 mean pooling in one, for LeNet on CPUs. The batch is the last axis.

XLA's own convolution is slow on a CPU where there are few channels, and its gradient of the filter is slower still.
With the batch last every loop runs over whole vectors, whatever the number of channels. There are two ways to compute:

- `direct`, for one channel: the sums over the window are written out. XLA makes one loop of convolution, ReLU and
  pooling, and nothing in between is stored.
- `winograd`, for a width of 12 and windows of 5: the minimal filtering of Winograd (1980) along the width, with the
  points of Toom and Cook. 4 results take 8 products where 20 are usual. The height is summed in matrix products. See
  Lavin and Gray (2016), "Fast algorithms for convolutional neural networks", who do this in both directions.

Both are float32 throughout. `winograd` rounds about four times as coarsely as a plain sum, 7e-7 of the result (root
mean square). With 12 products for all 8 results it would round at 2.5e-6, and units close to zero would be switched on
or off five times as often.
The derivatives are JAX's own, forward and reverse and of any order, except in the steps that have a rule here.

Shapes in names: W width, H height, C channels in, O channels out, N batch.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_POINTS = (0, 1, -1, 2, -2, 1 / 2, -1 / 2)  # and infinity
_TAPS = 5  # the width of a window
_STRIP = len(_POINTS) + 1  # how wide a strip of an image these points serve
_RESULTS = _STRIP - _TAPS + 1
WIDTH = _STRIP + _RESULTS  # that `winograd` takes: two strips that overlap
_PHASES = tuple(product(range(2), range(2)))  # the four places of a pooling window: across, down


def direct(x_WxHxN: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Convolution of one channel, ReLU, mean of 2×2.

    Args:
        x_WxHxN: float32.
        weight: (height, width, 1, O) of the window.
        bias: (O,).

    Returns:
        (W', O, H', N), W' = (W - width + 1) // 2 and H' likewise: an odd last row or column is left out.

    Example:
        >>> direct(jnp.ones((6, 8, 4)), jnp.ones((3, 3, 1, 2)), jnp.zeros(2)).shape
        (2, 2, 3, 4)
    """
    width, weight_HxWxO = weight.shape[1], weight[:, :, 0]

    def column(w: jax.Array) -> jax.Array:
        return _column(lax.dynamic_slice_in_dim(x_WxHxN, 2 * w, width + 1), weight_HxWxO, bias)

    return lax.map(column, jnp.arange((x_WxHxN.shape[0] - width + 1) // 2))


def winograd(x_WxCxHxN: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Convolution with a window of width 5, ReLU, mean of 2×2, of images of width 12.

    Args:
        x_WxCxHxN: float32, W = 12.
        weight: (height, 5, C, O) of the window.
        bias: (O,).

    Returns:
        (4, O, H', N), H' = (H - height + 1) // 2.

    Example:
        >>> winograd(jnp.ones((12, 3, 6, 4)), jnp.ones((5, 5, 3, 2)), jnp.zeros(2)).shape
        (4, 2, 1, 4)
    """
    of_points, of_weight, of_input = (m.astype(np.float32) for m in _toom_cook())
    height, _, channels, out = weight.shape
    rows = (x_WxCxHxN.shape[2] - height + 1) // 2 * 2
    strips = jnp.concatenate([x_WxCxHxN[:_STRIP], x_WxCxHxN[_RESULTS:]], axis=3)  # as if there were twice as many
    weight_PxOxK = jnp.einsum("pw,hwco->pohc", of_weight, weight).reshape(-1, out, height * channels)

    @jax.checkpoint  # cutting the windows out again is as fast as keeping them
    def at_point(weight_x: tuple[jax.Array, jax.Array]) -> jax.Array:
        weight_OxK, x_CxHxN = weight_x
        windows = _windows(x_CxHxN, height, rows)
        y_OxHN = weight_OxK @ windows.reshape(height * channels, -1)
        return y_OxHN.reshape(out, rows, -1)

    # One point at a time: its windows stay in the cache. A loop also keeps XLA from merging the axes of what a
    # matrix product reads, which would divide every index and make the sums before it ten times as slow; so do
    # the loops in `direct` and `_relu_pool`.
    y_PxOxHxN = lax.map(at_point, (weight_PxOxK, _along_width(of_input, strips)))
    y = _relu_pool(_along_width(of_points, y_PxOxHxN) + bias[None, :, None, None])
    y = y.reshape(*y.shape[:3], 2, -1)
    return y.transpose(3, 0, 1, 2, 4).reshape(-1, *y.shape[1:3], y.shape[-1])


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _windows(x_CxHxN: jax.Array, height: int, rows: int) -> jax.Array:
    """(height, C, rows, N): as many rows from each of the first ones on.

    The loop copies faster than `stack` does, but the transpose of `stack` is the faster one.
    """
    return lax.map(lambda h: lax.dynamic_slice_in_dim(x_CxHxN, h, rows, 1), jnp.arange(height))


@_windows.defjvp
def _windows_jvp(
    height: int, rows: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    return _windows(x, height, rows), jnp.stack([t[:, h : h + rows] for h in range(height)])


def _toom_cook() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For one strip: y = of_points @ ((of_weight @ w) * (of_input @ x)) is y[i] = sum over j of w[j] x[i + j]."""
    points = np.array(_POINTS)
    other_points = [np.delete(points, i) for i in range(len(points))]
    powers = points[:, None] ** np.arange(_TAPS)[None]
    of_weight = powers / [[np.prod(p - q)] for p, q in zip(points, other_points, strict=True)]
    of_weight = np.vstack([of_weight, np.eye(_TAPS)[-1:]])
    of_points = np.vstack([powers[:, :_RESULTS], np.eye(_RESULTS)[-1:]]).T
    of_input = np.array([np.append(np.poly(roots)[::-1], 0) for roots in other_points] + [np.poly(points)[::-1]])
    # Rows of about equal size round least; powers of two do not round at all.
    scale = 2.0 ** np.round(np.log2(np.sqrt(np.abs(of_input).sum(1) / np.abs(of_weight).sum(1))))[:, None]
    return of_points, of_weight * scale, of_input / scale


def _along_width(matrix: np.ndarray, x_WxCxHxN: jax.Array) -> jax.Array:
    """The matrix times each column of length W."""
    y = jnp.matmul(matrix, x_WxCxHxN.reshape(x_WxCxHxN.shape[0], -1))
    return y.reshape(-1, *x_WxCxHxN.shape[1:])


def _relu_pool(x_WxOxHxN: jax.Array) -> jax.Array:
    """Two columns at a time, in a loop for the reason given in `winograd`."""
    return lax.map(_relu_pool_pair, x_WxOxHxN.reshape(-1, 2, *x_WxOxHxN.shape[1:]))


@jax.custom_jvp
def _relu_pool_pair(x_WxOxHxN: jax.Array) -> jax.Array:
    """(2, O, H, N) to (O, H / 2, N)."""
    y = jax.nn.relu(_pool_windows(x_WxOxHxN))
    return (y[0, :, :, 0] + y[0, :, :, 1] + y[1, :, :, 0] + y[1, :, :, 1]) / 4


@_relu_pool_pair.defjvp
def _relu_pool_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sums of slices are fastest forward. Backward a sum over axes is, which only spreads the gradient."""
    (x,), (t,) = primals, tangents
    return _relu_pool_pair(x), jnp.where(_pool_windows(x) > 0, _pool_windows(t), 0).sum((0, 3)) / 4


def _pool_windows(x_WxOxHxN: jax.Array) -> jax.Array:
    width, out, height, batch = x_WxOxHxN.shape
    return x_WxOxHxN.reshape(width, out, height // 2, 2, batch)


@jax.custom_jvp
def _column(x_WxHxN: jax.Array, weight_HxWxO: jax.Array, bias: jax.Array) -> jax.Array:
    """One column of results, (O, H', N), from as many columns of pixels as it needs."""
    return sum(jax.nn.relu(z) for z in _before_relu(x_WxHxN, weight_HxWxO, bias)) / 4  # type: ignore[return-value]


def _before_relu(x_WxHxN: jax.Array, weight_HxWxO: jax.Array, bias: jax.Array) -> list[jax.Array]:
    """What the ReLU is given, (O, H', N) for each place of the pooling window."""
    shifted = _shifts(x_WxHxN, weight_HxWxO.shape)
    sums = []
    for across, down in _PHASES:
        z = bias[:, None, None]
        for h, w in np.ndindex(weight_HxWxO.shape[:2]):
            z = z + shifted[across + w, down + h][None] * weight_HxWxO[h, w][:, None, None]
        sums.append(z)
    return sums


def _shifts(x_WxHxN: jax.Array, window: tuple[int, ...]) -> dict[tuple[int, int], jax.Array]:
    """Every second pixel down, from each place that a pooling window of convolution windows covers: (H', N)."""
    height, width = window[:2]
    down = (x_WxHxN.shape[1] - height + 1) // 2
    return {(w, h): x_WxHxN[w, h : h + 2 * down - 1 : 2] for w, h in product(range(width + 1), range(height + 1))}


@partial(_column.defjvp, symbolic_zeros=True)
def _column_jvp(primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """The derivative as matrix products, which JAX turns into one product for the gradient of the weights."""
    x, weight, bias = primals
    # None for what is not differentiated, as images: what it would add is left out.
    t_x, t_weight, t_bias = (None if isinstance(t, jax.custom_derivatives.SymbolicZero) else t for t in tangents)
    result = _column(x, weight, bias)
    masks = jnp.stack([z > 0 for z in _before_relu(x, weight, bias)])
    t = jnp.zeros(masks.shape, x.dtype)
    if t_weight is not None:
        patches = jnp.stack(list(_shifts(x, weight.shape).values()))
        t_weight_WxHxO = t_weight.transpose(1, 0, 2)
        # One product for all places: in each the window is elsewhere among the pixels.
        padded = jnp.stack([jnp.pad(t_weight_WxHxO, ((w, 1 - w), (h, 1 - h), (0, 0))) for w, h in _PHASES])
        t += jnp.einsum("pko,khn->pohn", padded.reshape(len(_PHASES), -1, bias.size), patches)
    if t_bias is not None:
        t += t_bias[None, :, None, None]
    if t_x is not None:
        t += jnp.stack(_before_relu(t_x, weight, jnp.zeros_like(bias)))
    return result, jnp.where(masks, t, 0).sum(0) / 4
