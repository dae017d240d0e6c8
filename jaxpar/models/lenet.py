"""LeNet from MXNet's tutorial on several devices: two convolutions, two dense layers.

Shapes in names: B batch, H height, W width, C channels, D features.
"""

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from .._core import checks
from .._core.transfers import allows_transfers
from .._cpu import lenet_layers

Params = dict[str, dict[str, jax.Array]]  # {layer: {"weight", "bias"}}

_WEIGHT_STDDEV = 0.01
_LEAST_BATCH = 8  # fewer do not fill the vectors of a CPU
_SHAPES = {
    "conv1": (3, 3, 1, 20),
    "conv2": (5, 5, 20, 50),
    "dense1": (800, 128),
    "dense2": (128, 10),
}


@allows_transfers
def init(rng: jax.Array | int) -> Params:
    """The 129,068 parameters, float32. Weights are drawn from N(0, 0.01²), biases are 0.

    Args:
        rng: a random key, or an int that makes one.

    Returns:
        `{layer: {"weight", "bias"}}` for conv1 (3, 3, 1, 20), conv2 (5, 5, 20, 50), dense1 (800, 128) and dense2 (128,
        10). A bias has as many entries as the last axis of its weight.

    Example:
        >>> params = init(jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        129068
    """
    params = _draw(checks.random_key(rng, "lenet.init"))
    return {layer: {"weight": params[layer]["weight"], "bias": params[layer]["bias"]} for layer in _SHAPES}


@jax.jit
def _draw(rng: jax.Array) -> Params:
    """The parameters by one program, of normals without axes. Drawn in their shapes they compile slowly."""
    params: Params = {}
    for (layer, shape), rng_layer in zip(_SHAPES.items(), jax.random.split(rng, len(_SHAPES)), strict=True):
        normal = lax.optimization_barrier(jax.random.normal(rng_layer, (math.prod(shape),)))  # rounded as outside `jit`
        params[layer] = {"weight": (_WEIGHT_STDDEV * normal).reshape(shape), "bias": jnp.zeros(shape[-1])}
    return params


def apply(params: Params, images: jax.Array) -> jax.Array:
    """The logits of a batch of images.

    On CPUs, float32 batches of 8 or more images use faster formulas. The logits differ only by rounding.

    Args:
        params: from `init`.
        images: (B, 28, 28, 1), floating, pixels in [0, 1].

    Returns:
        (B, 10) logits, in the dtype of `images`.

    Raises:
        ValueError: `images` has another shape.

    Example:
        >>> apply(init(jax.random.key(0)), jnp.zeros((2, 28, 28, 1))).shape
        (2, 10)
    """
    if np.shape(images)[1:] != (28, 28, 1):
        raise ValueError(f"lenet.apply: images must have the shape (n, 28, 28, 1), got {np.shape(images)}")
    batch = images.shape[0]
    small = not isinstance(batch, int) or batch < _LEAST_BATCH  # `jax.export` has sizes that are no numbers
    if small or any(x.dtype != jnp.float32 for x in (images, *jax.tree.leaves(params))):
        return _anywhere(params, images)
    return _by_platform(params, images)


def from_mxnet(arrays: Mapping[str, np.ndarray]) -> Params:
    """The parameters of a LeNet that MXNet trained.

    The shapes identify the arrays, so the names do not matter. Dense weights may be (out, in), as in Gluon, or (in,
    out), as in the tutorial. MXNet's convolutions have the channels first, so their axes and the inputs of `dense1` are
    reordered.

    Args:
        arrays: {name: array}, eight arrays, as from `checkpoint.load_mxnet`.

    Returns:
        As `init`, float32.

    Raises:
        ValueError: the arrays have other shapes.

    Example:
        >>> shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (128, 800), (128,), (10, 128), (10,)]
        >>> params = from_mxnet({str(i): np.ones(shape) for i, shape in enumerate(shapes)})
        >>> params["conv2"]["weight"].shape
        (5, 5, 20, 50)
    """
    by_shape = {np.shape(array): np.asarray(array) for array in arrays.values()}
    params: Params = {}
    for layer, shape in _SHAPES.items():
        of_mxnet = (shape[3], shape[2], *shape[:2]) if len(shape) == 4 else shape[::-1]
        weight, bias = by_shape.get(of_mxnet, by_shape.get(shape)), by_shape.get(shape[-1:])
        if weight is None or bias is None or len(arrays) != 2 * len(_SHAPES):
            wanted = f"{2 * len(_SHAPES)} arrays, for {layer} a weight of shape {of_mxnet} and a bias of {shape[-1:]}"
            raise ValueError(f"lenet.from_mxnet: expected {wanted}; got {len(arrays)} of shapes {sorted(by_shape)}")
        weight = _weight_from_mxnet(layer, weight)
        params[layer] = {"weight": jnp.asarray(weight, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    return params


def _weight_from_mxnet(layer: str, weight: np.ndarray) -> np.ndarray:
    if weight.ndim == 4:
        return weight.transpose(2, 3, 1, 0)
    weight = weight if weight.shape == _SHAPES[layer] else weight.T
    if layer != "dense1":
        return weight
    # MXNet flattens (channels, rows, columns), this network (rows, columns, channels).
    channels = _SHAPES["conv2"][-1]
    side = math.isqrt(weight.shape[0] // channels)
    return weight.reshape(channels, side, side, -1).transpose(1, 2, 0, 3).reshape(weight.shape)


@partial(jax.jit, inline=True)  # without it each call outside of `jit` would compile both
def _by_platform(params: Params, images: jax.Array) -> jax.Array:
    return lax.platform_dependent(params, images, cpu=_on_cpu, default=_anywhere)


def _anywhere(params: Params, images: jax.Array) -> jax.Array:
    x_BxHxWxC = _mean_pool(jax.nn.relu(_conv2d(params["conv1"], images)))
    x_BxHxWxC = _mean_pool(jax.nn.relu(_conv2d(params["conv2"], x_BxHxWxC)))
    x_BxD = x_BxHxWxC.reshape(-1, _SHAPES["dense1"][0])
    x_BxD = jax.nn.relu(_dense(params["dense1"], x_BxD))
    return _dense(params["dense2"], x_BxD)


def _on_cpu(params: Params, images: jax.Array) -> jax.Array:
    """The same with the batch last, without the two last rows and columns, which the poolings leave out."""
    x_WxHxB = images[:, :26, :26, 0].transpose(2, 1, 0)
    # Without the constraint XLA keeps the batch first and only calls it last.
    x_WxHxB = with_layout_constraint(x_WxHxB, Layout(major_to_minor=(0, 1, 2)))
    x_WxCxHxB = lenet_layers.direct(x_WxHxB, **params["conv1"])
    x_WxCxHxB = lenet_layers.winograd(x_WxCxHxB, **params["conv2"])
    x_DxB = x_WxCxHxB.transpose(2, 0, 1, 3).reshape(-1, images.shape[0])
    x_DxB = jax.nn.relu(_dense_batch_last(params["dense1"], x_DxB))
    return _dense_batch_last(params["dense2"], x_DxB).T


def _conv2d(layer: dict[str, jax.Array], x_BxHxWxC: jax.Array) -> jax.Array:
    y_BxHxWxC = jax.lax.conv_general_dilated(
        x_BxHxWxC, layer["weight"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y_BxHxWxC + layer["bias"][None, None, None]


def _dense(layer: dict[str, jax.Array], x_BxD: jax.Array) -> jax.Array:
    return x_BxD @ layer["weight"] + layer["bias"][None]


def _dense_batch_last(layer: dict[str, jax.Array], x_DxB: jax.Array) -> jax.Array:
    return layer["weight"].T @ x_DxB + layer["bias"][:, None]


def _mean_pool(x_BxHxWxC: jax.Array) -> jax.Array:
    """The mean of windows of 2×2. An odd last row or column is left out."""
    _, height, width, _ = x_BxHxWxC.shape
    x_BxHxWxC = x_BxHxWxC[:, : height // 2 * 2, : width // 2 * 2]
    # Sums of slices are faster on a CPU than `reduce_window`.
    rows = x_BxHxWxC[:, 0::2] + x_BxHxWxC[:, 1::2]
    return (rows[:, :, 0::2] + rows[:, :, 1::2]) / 4


def __dir__() -> list[str]:
    return ["apply", "from_mxnet", "init"]
