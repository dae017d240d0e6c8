"""What MXNet's symbols do with images beside convolution and pooling: resize, sample, correlate, and patches of them.

As in `_layers`, arguments and defaults are those of MXNet's operators. Images are (batch, channels, height, width).
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks
from ._arrays import check_count

_MOST_WEIGHTS = 2**26  # of a matrix that is made of sizes alone
_MOST_DISPLACEMENTS = 10_000


def _check_sizes(name: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """`ValueError` for what a damaged file says, before a matrix of (new, old) asks for all memory."""
    if not all(m > 0 and n * m <= _MOST_WEIGHTS for n, m in zip(old, new, strict=True)):
        raise ValueError(f"{name}: an image of {old} cannot become one of {new}")


def adaptive_avg_pooling(data: jax.Array, *, output_size: tuple[int, ...] = ()) -> jax.Array:
    """Means over equal windows, which overlap where the sizes do not divide."""
    sizes = output_size or (1,)
    sizes = sizes * 2 if len(sizes) == 1 else sizes
    _check_sizes("AdaptiveAvgPooling2D", data.shape[2:], sizes)

    def weights(old: int, new: int) -> np.ndarray:
        first, end = np.arange(new) * old // new, -(-(np.arange(new) + 1) * old // new)
        inside = (np.arange(old) >= first[:, None]) & (np.arange(old) < end[:, None])
        return inside / (end - first)[:, None]

    rows, columns = (weights(n, m).astype(data.dtype) for n, m in zip(data.shape[2:], sizes, strict=True))
    return jnp.einsum("nchw,yh,xw->ncyx", data, rows, columns)


def bilinear_resize(
    data: jax.Array,
    like: jax.Array | None = None,
    *,
    height: int = 1,
    width: int = 1,
    scale_height: float | None = None,
    scale_width: float | None = None,
    mode: str = "size",
    align_corners: bool = True,
) -> jax.Array:
    def new_size(n: int, size: int, scale: float | None, of_like: int) -> int:
        match mode:
            case "size":
                return size if scale is None else int(scale * n)
            case "odd_scale":
                return int(n * (scale or 0)) if n % 2 == 0 else int((n - 1) * (scale or 0)) + 1
            case "like":
                return of_like
            case "to_even_down" | "to_even_up" | "to_odd_down" | "to_odd_up":
                is_right = n % 2 == ("odd" in mode)
                return n if is_right else n + (1 if mode.endswith("up") else -1)
            case _:
                raise ValueError(f"BilinearResize2D: mode {mode!r} is unknown")

    def weights(old: int, new: int) -> np.ndarray:
        """(new, old): what each place has of the two places between which it lies."""
        if align_corners:
            at = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
        else:
            at = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
        first = np.minimum(at.astype(int), old - 1)
        second = np.minimum(first + 1, old - 1)
        share = (at - first)[:, None]
        return np.eye(old)[first] * (1 - share) + np.eye(old)[second] * share

    of_like = data.shape if like is None else like.shape
    new_height = new_size(data.shape[2], height, scale_height, of_like[2])
    new_width = new_size(data.shape[3], width, scale_width, of_like[3])
    _check_sizes("BilinearResize2D", data.shape[2:], (new_height, new_width))
    rows, columns = weights(data.shape[2], new_height), weights(data.shape[3], new_width)
    return jnp.einsum("nchw,yh,xw->ncyx", data, rows.astype(data.dtype), columns.astype(data.dtype))


def grid_generator(data: jax.Array, *, transform_type: str, target_shape: tuple[int, ...] = (0, 0)) -> jax.Array:
    """Places (batch, x and y, height, width), -1 to 1 over the image: of an affine map, or of a flow in pixels."""
    checks.choice(transform_type, "GridGenerator", "transform_type", ("affine", "warp"))
    height, width = target_shape if transform_type == "affine" else data.shape[2:]
    y, x = jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij")
    if transform_type == "warp":
        size = jnp.array([width - 1, height - 1], data.dtype).reshape(1, 2, 1, 1)
        return (data + jnp.stack([x, y]).astype(data.dtype)[None]) / (size / 2) - 1
    x, y = x * (2 / (width - 1)) - 1, y * (2 / (height - 1)) - 1
    places = jnp.stack([x, y, jnp.ones_like(x)]).astype(data.dtype)
    return jnp.einsum("nij,jhw->nihw", data.reshape(-1, 2, 3), places)


def _sampled(image: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
    """Values of (channels, height, width) at places in pixels, between four pixels. Those outside are 0."""
    _, height, width = image.shape
    top, left = jnp.floor(y), jnp.floor(x)
    out = jnp.zeros((image.shape[0], *y.shape), image.dtype)
    for dy, dx in itertools.product((0, 1), (0, 1)):
        row, column = top + dy, left + dx
        weight = (1 - jnp.abs(y - row)) * (1 - jnp.abs(x - column))
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        pixels = image[:, row.astype(int).clip(0, height - 1), column.astype(int).clip(0, width - 1)]
        out += jnp.where(inside[None], pixels * weight[None], 0)
    return out


def bilinear_sampler(data: jax.Array, grid: jax.Array) -> jax.Array:
    """The image at the places of a grid, -1 to 1."""
    _, _, height, width = data.shape
    x, y = (grid[:, 0] + 1) * (width - 1) / 2, (grid[:, 1] + 1) * (height - 1) / 2
    return jax.vmap(_sampled)(data, y, x)


def spatial_transformer(
    data: jax.Array, loc: jax.Array, *, target_shape: tuple[int, ...] = (0, 0), transform_type: str, sampler_type: str
) -> jax.Array:
    checks.choice(transform_type, "SpatialTransformer", "transform_type", ("affine",))
    checks.choice(sampler_type, "SpatialTransformer", "sampler_type", ("bilinear",))
    shape = target_shape if any(target_shape) else data.shape[2:]
    return bilinear_sampler(data, grid_generator(loc, transform_type="affine", target_shape=shape))


def correlation(
    data1: jax.Array,
    data2: jax.Array,
    *,
    kernel_size: int = 1,
    max_displacement: int = 1,
    stride1: int = 1,
    stride2: int = 1,
    pad_size: int = 0,
    is_multiply: bool = True,
) -> jax.Array:
    """Of each place the mean product, or distance, of a window and of the windows that are displaced."""
    padding = [(0, 0), (0, 0), (pad_size, pad_size), (pad_size, pad_size)]
    first, second = jnp.pad(data1, padding), jnp.pad(data2, padding)
    border = max_displacement + (kernel_size - 1) // 2
    sizes = [-(-(n - 2 * border) // stride1) for n in first.shape[2:]]
    reach = max_displacement // stride2
    places = f"Correlation: max_displacement {max_displacement} by steps of {stride2}"
    check_count((2 * reach + 1) ** 2, places, _MOST_DISPLACEMENTS)
    steps = [i * stride2 for i in range(-reach, reach + 1)]

    def window(image: jax.Array, dy: int, dx: int) -> jax.Array:
        starts = (max_displacement + dy, max_displacement + dx)
        ends = [start + (n - 1) * stride1 + kernel_size for start, n in zip(starts, sizes, strict=True)]
        return image[:, :, starts[0] : ends[0], starts[1] : ends[1]]

    outputs: list[jax.Array] = []
    for dy, dx in itertools.product(steps, steps):
        a, b = window(first, 0, 0), window(second, dy, dx)
        near = (a * b if is_multiply else jnp.abs(a - b)).sum(1)
        shape, strides = (1, kernel_size, kernel_size), (1, stride1, stride1)
        outputs.append(lax.reduce_window(near, 0.0, lax.add, shape, strides, "VALID"))
    return jnp.stack(outputs, 1) / (kernel_size**2 * data1.shape[1])


def im2col(
    data: jax.Array,
    *,
    kernel: tuple[int, ...],
    stride: tuple[int, ...] = (),
    dilate: tuple[int, ...] = (),
    pad: tuple[int, ...] = (),
) -> jax.Array:
    """The windows of images, (batch, channels * kernel, places)."""
    ones = (1,) * len(kernel)
    padding = [(n, n) for n in pad or (0,) * len(kernel)]
    patches = lax.conv_general_dilated_patches(data, kernel, stride or ones, padding, rhs_dilation=dilate or ones)
    return patches.reshape(*patches.shape[:2], -1)


def col2im(
    data: jax.Array,
    *,
    output_size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...] = (),
    dilate: tuple[int, ...] = (),
    pad: tuple[int, ...] = (),
) -> jax.Array:
    """The images whose windows these are, summed where windows overlap: `im2col` transposed."""
    shape = (data.shape[0], data.shape[1] // math.prod(kernel), *output_size)

    def windows(image: jax.Array) -> jax.Array:
        return im2col(image, kernel=kernel, stride=stride, dilate=dilate, pad=pad)

    return jax.linear_transpose(windows, jax.ShapeDtypeStruct(shape, data.dtype))(data)[0]


def deformable_convolution(
    data: jax.Array,
    offset: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    kernel: tuple[int, ...],
    num_filter: int,
    stride: tuple[int, ...] = (),
    dilate: tuple[int, ...] = (),
    pad: tuple[int, ...] = (),
    num_group: int = 1,
    num_deformable_group: int = 1,
    no_bias: bool = False,
    layout: str | None = None,
) -> jax.Array:
    """A convolution each of whose taps is displaced by an offset of its own, (2 * groups * kernel) channels."""
    height, width = data.shape[2:]
    y, x = _displaced(offset, kernel, stride, dilate, pad, num_deformable_group)
    # As in MXNet, a place beyond the last pixel has that pixel, and one outside of the image is 0.
    inside = (y >= 0) & (x >= 0) & (y < height) & (x < width)
    y, x = jnp.where(y >= height - 1, height - 1, y), jnp.where(x >= width - 1, width - 1, x)
    patches = jnp.where(inside[:, :, None], _patches(data, y, x), 0)
    return _filtered(patches, weight, bias, num_group, num_filter)


def modulated_deformable_convolution(
    data: jax.Array,
    offset: jax.Array,
    mask: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    kernel: tuple[int, ...],
    num_filter: int,
    stride: tuple[int, ...] = (),
    dilate: tuple[int, ...] = (),
    pad: tuple[int, ...] = (),
    num_group: int = 1,
    num_deformable_group: int = 1,
    no_bias: bool = False,
    im2col_step: int = 64,
    layout: str | None = None,
) -> jax.Array:
    """The same with a factor for each tap, (groups * kernel) channels. As in MXNet, the image goes on with zeros."""
    y, x = _displaced(offset, kernel, stride, dilate, pad, num_deformable_group)
    patches = _patches(data, y, x) * mask.reshape(y.shape)[:, :, None]
    return _filtered(patches, weight, bias, num_group, num_filter)


def _displaced(
    offset: jax.Array,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilate: tuple[int, ...],
    pad: tuple[int, ...],
    groups: int,
) -> tuple[jax.Array, jax.Array]:
    """The places of the taps, y and x, each (batch, groups, *kernel, rows, columns)."""
    stride, dilate, pad = stride or (1, 1), dilate or (1, 1), pad or (0, 0)
    batch, _, rows, columns = offset.shape
    offset = offset.reshape(batch, groups, *kernel, 2, rows, columns)
    tap_y, tap_x, row, column = jnp.ogrid[: kernel[0], : kernel[1], :rows, :columns]
    y = offset[:, :, :, :, 0] + (tap_y * dilate[0] + row * stride[0] - pad[0])[None, None]
    x = offset[:, :, :, :, 1] + (tap_x * dilate[1] + column * stride[1] - pad[1])[None, None]
    return y, x


def _patches(data: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
    """(batch, groups, channels, *kernel, rows, columns)"""
    groups = data.reshape(len(data), y.shape[1], -1, *data.shape[2:])
    return jax.vmap(jax.vmap(_sampled))(groups, y, x)


def _filtered(
    patches: jax.Array, weight: jax.Array, bias: jax.Array | None, num_group: int, num_filter: int
) -> jax.Array:
    batch, (rows, columns) = len(patches), patches.shape[-2:]
    patches = patches.reshape(batch, num_group, -1, rows, columns)
    weight = weight.reshape(num_group, num_filter // num_group, -1)
    out = jnp.einsum("ngkyx,gfk->ngfyx", patches, weight).reshape(batch, num_filter, rows, columns)
    return out if bias is None else out + bias.reshape(1, -1, 1, 1)


def to_tensor(data: jax.Array) -> jax.Array:
    """Pixels of 0 to 255, channels last, as 0 to 1, channels first."""
    return jnp.moveaxis(data, -1, -3).astype(jnp.float32) / 255


def image_normalize(
    data: jax.Array,
    *,
    mean: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0),
    std: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
) -> jax.Array:
    channels = data.shape[-3]
    of_channels = [(values * channels if len(values) == 1 else values)[:channels] for values in (mean, std)]
    axes = (1,) * (data.ndim - 3) + (-1, 1, 1)
    means, deviations = (jnp.array(values, data.dtype).reshape(axes) for values in of_channels)
    return (data - means) / deviations


def image_resize(
    data: jax.Array, *, size: tuple[int, ...] = (), keep_ratio: bool = False, interp: int = 1
) -> jax.Array:
    """Images whose channels are last, in a new size: (width, height), or one number for both or for the short side.

    `interp` is 0 of the nearest pixel, 1 bilinear, 2 bicubic, as OpenCV computes these.
    """
    old_height, old_width = data.shape[-3:-1]
    if len(size) == 2:
        width, height = size
    elif len(size) == 1 and not keep_ratio:
        width, height = size * 2
    elif len(size) == 1:
        short = min(old_height, old_width)
        width, height = old_width * size[0] // short, old_height * size[0] // short
    else:
        raise ValueError(f"image resize: size must have one or two numbers, got {size}")
    if interp not in (0, 1, 2):
        raise ValueError(f"image resize: interp must be 0 (nearest), 1 (bilinear) or 2 (bicubic), got {interp}")
    _check_sizes("image resize", (old_height, old_width), (height, width))

    def weights(old: int, new: int) -> np.ndarray:
        """(new, old): what each pixel has of the old ones. Beyond the edge stands the last one."""
        if interp == 0:
            return np.eye(old)[np.minimum((np.arange(new) * (old / new)).astype(int), old - 1)]
        at = (np.arange(new) + 0.5) * (old / new) - 0.5
        first = np.floor(at).astype(int)
        total = np.zeros((new, old))
        for step in (0, 1) if interp == 1 else (-1, 0, 1, 2):
            distance = np.abs(at - (first + step))
            if interp == 1:
                share = 1 - distance
            else:
                near = (1.25 * distance - 2.25) * distance**2 + 1
                far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
                share = np.where(distance <= 1, near, far)
            total += np.eye(old)[(first + step).clip(0, old - 1)] * share[:, None]
        return total

    rows, columns = (jnp.array(weights(*pair), jnp.float32) for pair in ((old_height, height), (old_width, width)))
    out = jnp.einsum("...hwc,yh,xw->...yxc", data.astype(jnp.float32), rows, columns)
    if jnp.issubdtype(data.dtype, jnp.integer):
        limits = jnp.iinfo(data.dtype)
        out = jnp.round(out).clip(int(limits.min), int(limits.max))
    return out.astype(data.dtype)
