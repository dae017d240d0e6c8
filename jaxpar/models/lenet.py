"""LeNet of MXNet's article on training with several devices: two convolutions, two dense layers.

Shapes in names: B batch, H height, W width, C channels, D features.
"""

import jax
import jax.numpy as jnp

_WEIGHT_STDDEV = 0.01
_SHAPES = {
    "conv1": (3, 3, 1, 20),
    "conv2": (5, 5, 20, 50),
    "dense1": (800, 128),
    "dense2": (128, 10),
}


def init(rng: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """Weights drawn from N(0, 0.01²), biases 0: 129,068 parameters, float32.

    Args:
        rng: a random key.

    Returns:
        `{layer: {"weight", "bias"}}` for conv1 (3, 3, 1, 20), conv2 (5, 5, 20, 50), dense1 (800, 128) and
        dense2 (128, 10); biases have the last length of their weight.

    Example:
        >>> params = init(jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        129068
    """
    return {
        layer: {"weight": _WEIGHT_STDDEV * jax.random.normal(rng_layer, shape), "bias": jnp.zeros(shape[-1])}
        for (layer, shape), rng_layer in zip(_SHAPES.items(), jax.random.split(rng, len(_SHAPES)), strict=True)
    }


def apply(params: dict[str, dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    """The logits of a batch of images.

    Args:
        params: as `init` gives them.
        images: (B, 28, 28, 1), floating, pixels in [0, 1].

    Returns:
        (B, 10) logits, in the dtype of `images`.

    Raises:
        ValueError: `images` has another shape.

    Example:
        >>> apply(init(jax.random.key(0)), jnp.zeros((2, 28, 28, 1))).shape
        (2, 10)
    """
    if images.shape[1:] != (28, 28, 1):
        raise ValueError(f"lenet.apply: images must have the shape (n, 28, 28, 1), got {images.shape}")
    x_BxHxWxC = _mean_pool(jax.nn.relu(_conv(params["conv1"], images)))
    x_BxHxWxC = _mean_pool(jax.nn.relu(_conv(params["conv2"], x_BxHxWxC)))
    x_BxD = x_BxHxWxC.reshape(x_BxHxWxC.shape[0], -1)
    x_BxD = jax.nn.relu(_dense(params["dense1"], x_BxD))
    return _dense(params["dense2"], x_BxD)


def _conv(layer: dict[str, jax.Array], x_BxHxWxC: jax.Array) -> jax.Array:
    y_BxHxWxC = jax.lax.conv_general_dilated(
        x_BxHxWxC, layer["weight"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y_BxHxWxC + layer["bias"][None, None, None]


def _dense(layer: dict[str, jax.Array], x_BxD: jax.Array) -> jax.Array:
    return x_BxD @ layer["weight"] + layer["bias"][None]


def _mean_pool(x_BxHxWxC: jax.Array) -> jax.Array:
    """Windows of 2×2, an odd last row or column dropped; four slices added, faster on CPU than reduce_window."""
    _, height, width, _ = x_BxHxWxC.shape
    x_BxHxWxC = x_BxHxWxC[:, : height // 2 * 2, : width // 2 * 2]
    rows = x_BxHxWxC[:, 0::2] + x_BxHxWxC[:, 1::2]
    return (rows[:, :, 0::2] + rows[:, :, 1::2]) / 4
