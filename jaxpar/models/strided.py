"""A small network for images of 28 × 28 pixels that learns fast on CPUs: two strided convolutions, two dense layers.

It has no pooling: a stride of 2 makes images smaller at a quarter of the work. A convolution is one matrix product of
all its windows. The batch is the last axis there, so that every copy and sum runs over whole vectors.

Shapes in names: B batch, H height, W width, C channels, K values in a window, D features.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks
from .._core.arguments import answers

_STRIDE = 2
_MEAN, _STDDEV = 0.25, 0.25  # about those of the pixels of MNIST and Fashion-MNIST
_SHAPES = {
    "conv1": (4, 4, 1, 24),
    "conv2": (3, 3, 24, 48),
    "dense1": (1728, 64),
    "dense2": (64, 10),
}


@answers("strided.init")
def init(rng: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """The 122,130 parameters, float32. Weights are drawn from N(0, 2/fan-in) (He et al. 2015), biases are 0.

    Args:
        rng: a random key.

    Returns:
        `{layer: {"weight", "bias"}}` for conv1 (4, 4, 1, 24), conv2 (3, 3, 24, 48), dense1 (1728, 64) and
        dense2 (64, 10). A bias has the last length of its weight.

    Example:
        >>> params = init(jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        122130
    """
    params = _draw(checks.random_key(rng, "strided.init"))
    return {layer: {"weight": params[layer]["weight"], "bias": params[layer]["bias"]} for layer in _SHAPES}


@jax.jit
def _draw(rng: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """The parameters by one program, of one array of normals, which compiles faster than one for each layer."""
    sizes = [math.prod(shape) for shape in _SHAPES.values()]
    normals = jnp.split(jax.random.normal(rng, (sum(sizes),)), np.cumsum(sizes)[:-1])
    params: dict[str, dict[str, jax.Array]] = {}
    for (layer, shape), normal in zip(_SHAPES.items(), normals, strict=True):
        stddev = math.sqrt(2 / math.prod(shape[:-1]))
        params[layer] = {"weight": (stddev * normal).reshape(shape), "bias": jnp.zeros(shape[-1])}
    return params


def apply(params: dict[str, dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    """The logits of a batch of images.

    Args:
        params: as `init` gives them.
        images: (B, 28, 28, 1), floating, pixels in [0, 1].

    Returns:
        (B, 10) logits, in the dtype of `images`.

    Raises:
        TypeError: `params` are those of another network.
        ValueError: `images` has another shape.

    Example:
        >>> apply(init(jax.random.key(0)), jnp.zeros((2, 28, 28, 1))).shape
        (2, 10)
    """
    if not isinstance(params, dict) or not set(_SHAPES) <= params.keys():
        raise TypeError(f"strided.apply: params must be those of strided.init, got {checks.describe(params)}")
    if np.shape(images)[1:] != (28, 28, 1):
        raise ValueError(f"strided.apply: images must have the shape (n, 28, 28, 1), got {np.shape(images)}")
    x_CxHxWxB = ((images - _MEAN) / _STDDEV).transpose(3, 1, 2, 0)
    x_CxHxWxB = jax.nn.relu(_conv2d(params["conv1"], x_CxHxWxB))
    x_CxHxWxB = jax.nn.relu(_conv2d(params["conv2"], x_CxHxWxB))
    x_DxB = x_CxHxWxB.reshape(-1, x_CxHxWxB.shape[-1])
    x_DxB = jax.nn.relu(_dense(params["dense1"], x_DxB))
    return _dense(params["dense2"], x_DxB).T


def _conv2d(layer: dict[str, jax.Array], x_CxHxWxB: jax.Array) -> jax.Array:
    height, width, _, channels = layer["weight"].shape
    down, across = ((n - k) // _STRIDE + 1 for n, k in zip(x_CxHxWxB.shape[1:3], (height, width), strict=True))
    windows_KxHWB = _windows(x_CxHxWxB, (height, width), (down, across))
    y = layer["weight"].reshape(-1, channels).T @ windows_KxHWB
    return y.reshape(channels, down, across, -1) + layer["bias"][:, None, None, None]


def _windows(x_CxHxWxB: jax.Array, window: tuple[int, int], count: tuple[int, int]) -> jax.Array:
    """What each place of the window meets, one below the other: (K, H' * W' * B).

    Pixels are sorted by whether their row and column are even, so that a place of the window meets a whole block. A
    loop over these is one small program, where slices that are concatenated are one for each place.
    """
    channels, height, width, batch = x_CxHxWxB.shape
    x = jnp.pad(x_CxHxWxB, ((0, 0), (0, height % _STRIDE), (0, width % _STRIDE), (0, 0)))
    x = x.reshape(channels, x.shape[1] // _STRIDE, _STRIDE, -1, _STRIDE, batch).transpose(2, 4, 0, 1, 3, 5)
    places = np.array([(h % _STRIDE, w % _STRIDE, h // _STRIDE, w // _STRIDE) for h, w in np.ndindex(window)])

    def block(place: jax.Array) -> jax.Array:
        start = (place[0], place[1], 0, place[2], place[3], 0)
        return lax.dynamic_slice(x, start, (1, 1, channels, *count, batch))

    return lax.map(block, jnp.asarray(places)).reshape(channels * len(places), -1)


def _dense(layer: dict[str, jax.Array], x_DxB: jax.Array) -> jax.Array:
    return layer["weight"].T @ x_DxB + layer["bias"][:, None]


def __dir__() -> list[str]:
    return ["apply", "init"]
