"""A network for 28 × 28 images that trains fast on CPUs: two strided convolutions, two dense layers.

The network has no pooling: a stride of 2 shrinks the images at a quarter of the work. Each row of conv2's results is a
matrix product that fits the processor's cache. The windows of conv2 do not overlap. conv1 computes its results in the
order of these windows, so they need no copy.

Shapes in names: B batch, R rows of conv2's results, W the 2 × 2 places of its windows, K values in a window,
C channels, N the results in a row for all images of the batch, D features.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks
from .._core.transfers import allows_transfers

Params = dict[str, dict[str, jax.Array]]  # {layer: {"weight", "bias"}}

_MEAN, _STDDEV = 0.25, 0.25  # about those of the pixels of MNIST and Fashion-MNIST
_SIDE = 4  # of a window of the first convolution
_ROWS = 7  # of the second convolution's results
_SHAPES = {
    "conv1": (_SIDE, _SIDE, 1, 2 * _SIDE**2),
    "conv2": (2, 2, 32, 64),
    "dense1": (_ROWS**2 * 64, 32),
    "dense2": (32, 10),
}


@allows_transfers
def init(rng: jax.Array | int) -> Params:
    """The 109,514 parameters, float32. Biases are 0, weights are drawn from N(0, 2/fan-in) (He et al. 2015).

    The weights of conv1 are the 16 cosines of the two-dimensional discrete cosine transform, each with both signs, so
    that ReLU loses no information. Each is multiplied by its frequency, which acts like whitening of the data.

    Args:
        rng: a random key, or an int that makes one.

    Returns:
        `{layer: {"weight", "bias"}}` for conv1 (4, 4, 1, 32), conv2 (2, 2, 32, 64), dense1 (3136, 32) and
        dense2 (32, 10). A bias has as many entries as the last axis of its weight. The inputs of dense1 are ordered by
        row, channel and column.

    Example:
        >>> params = init(jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        109514
    """
    params = _draw(checks.random_key(rng, "strided.init"))
    return {layer: {"weight": params[layer]["weight"], "bias": params[layer]["bias"]} for layer in _SHAPES}


@jax.jit
def _draw(rng: jax.Array) -> Params:
    """The parameters by one program, of one array of normals, which compiles faster than one for each layer."""
    drawn = {layer: shape for layer, shape in _SHAPES.items() if layer != "conv1"}
    sizes = [math.prod(shape) for shape in drawn.values()]
    normals = jnp.split(jax.random.normal(rng, (sum(sizes),)), np.cumsum(sizes)[:-1])
    weights = {"conv1": jnp.asarray(_cosines())}
    for (layer, shape), normal in zip(drawn.items(), normals, strict=True):
        weights[layer] = (math.sqrt(2 / math.prod(shape[:-1])) * normal).reshape(shape)
    return {layer: {"weight": weight, "bias": jnp.zeros(weight.shape[-1])} for layer, weight in weights.items()}


def _cosines() -> np.ndarray:
    """The basis of the discrete cosine transform times frequency, both signs: (4, 4, 1, 32)."""
    n = np.arange(_SIDE)
    basis = np.cos(math.pi * (2 * n + 1) * n[:, None] / (2 * _SIDE)) * np.sqrt(np.where(n[:, None], 2, 1) / _SIDE)
    frequency = np.maximum(np.hypot(n[:, None], n), 0.5)  # a constant has none
    weight = np.einsum("uv,uh,vw->hwuv", frequency, basis, basis).reshape(_SIDE, _SIDE, 1, -1)
    return np.concatenate([weight, -weight], axis=-1).astype(np.float32)


def apply(params: Params, images: jax.Array) -> jax.Array:
    """The logits of a batch of images.

    Args:
        params: from `init`.
        images: (B, 28, 28, 1), floating, pixels in [0, 1].

    Returns:
        (B, 10) logits, in the dtype of `images`.

    Raises:
        ValueError: `images` has another shape. TypeError: `params` belong to another network.

    Example:
        >>> apply(init(jax.random.key(0)), jnp.zeros((2, 28, 28, 1))).shape
        (2, 10)
    """
    if np.shape(images)[1:] != (28, 28, 1):
        raise ValueError(f"strided.apply: images must have the shape (n, 28, 28, 1), got {np.shape(images)}")
    x_RxWxKxN = _windows((images - _MEAN) / _STDDEV)
    x_RxWxCxN = jax.nn.relu(_products(params["conv1"], x_RxWxKxN))
    x_RxKxN = x_RxWxCxN.reshape(_ROWS, math.prod(_SHAPES["conv2"][:3]), -1)
    x_RxCxN = jax.nn.relu(_products(params["conv2"], x_RxKxN))
    x_DxB = x_RxCxN.reshape(_SHAPES["dense1"][0], -1)
    x_DxB = jax.nn.relu(_products(params["dense1"], x_DxB))
    return _products(params["dense2"], x_DxB).T


def _windows(images: jax.Array) -> jax.Array:
    """The windows of conv1, of images that are padded by a pixel: (R, W, K, N).

    Pixels are sorted by their row and column modulo 4, so that what a place of the windows meets in a row lies
    together. A loop over these pieces is one small program, where slices that are concatenated are one for each.
    """
    # A black pixel around, and two more at the end, which no window meets: 4 divides the 32 rows and columns then.
    x = jnp.pad(images[..., 0], ((0, 0), (1, 3), (1, 3)), constant_values=-_MEAN / _STDDEV).transpose(1, 2, 0)
    x = x.reshape(_ROWS + 1, 4, _ROWS + 1, 4, -1).transpose(1, 3, 0, 2, 4)  # (row % 4, column % 4, row // 4, ..., B)
    # The first pixel of each place: row r of conv2's results, place (p, q) of its window, place (h, w) of conv1's.
    pixels = [(4 * r + 2 * p + h, 2 * q + w) for r, p, q, h, w in np.ndindex(_ROWS, 2, 2, _SIDE, _SIDE)]
    places = np.array([(h % 4, w % 4, h // 4, w // 4, 0) for h, w in pixels])

    def piece(place: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, place, (1, 1, 1, _ROWS, x.shape[-1]))

    return lax.map(piece, jnp.asarray(places)).reshape(_ROWS, 4, _SIDE**2, -1)


def _products(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The layer's weight, as a matrix of inputs by outputs, times each matrix of inputs by results."""
    weight = layer["weight"].reshape(-1, layer["weight"].shape[-1])
    each = jnp.broadcast_to(weight, (*x.shape[:-2], *weight.shape))  # so the gradient is a product for each too
    bias = layer["bias"].reshape(*(1 for _ in x.shape[:-2]), -1, 1)
    return jnp.einsum("...io,...in->...on", each, x) + bias


def __dir__() -> list[str]:
    return ["apply", "init"]
