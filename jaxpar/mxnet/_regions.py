"""What MXNet's symbols compute of regions of images: means and largest values of the bins of each region.

As in `_layers`, arguments and defaults are those of MXNet's operators. Images are (batch, channels, height, width). A
region is the number of its image and a box. Only the images have a gradient, and what moves bins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def roi_align(
    data: jax.Array,
    rois: jax.Array,
    *,
    pooled_size: tuple[int, ...],
    spatial_scale: float,
    sample_ratio: int = -1,
    position_sensitive: bool = False,
    aligned: bool = False,
) -> jax.Array:
    """The means of samples between the pixels of each bin of regions. Only the data has a gradient."""
    rois = lax.stop_gradient(rois).astype(jnp.promote_types(rois.dtype, jnp.float32))
    images, boxes = rois[:, 0].astype(int), rois[:, 1:] * spatial_scale - (0.5 if aligned else 0)

    # Samples are a grid, so a bin is a product of weights of rows and of columns.
    def weights(low: jax.Array, high: jax.Array, bins: int, size: int) -> jax.Array:
        """(regions, bins, size)"""
        length = high - low if aligned else jnp.maximum(high - low, 1)
        step = length / bins
        count = jnp.full_like(step, sample_ratio) if sample_ratio > 0 else jnp.ceil(step)
        starts = low[:, None] + jnp.arange(bins)[None] * step[:, None]

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            at = starts + ((number + 0.5) * step / count)[:, None]
            is_used = (at >= -1) & (at <= size) & (number < count)[:, None]
            at = at.clip(0, size - 1)
            near = jnp.maximum(1 - jnp.abs(at[..., None] - jnp.arange(size)[None, None]), 0)
            return total + jnp.where(is_used[..., None], near, 0)

        # The number of samples of a bin follows from the region.
        most = count.max(initial=0).astype(int)
        total = lax.fori_loop(0, most, add, jnp.zeros((len(low), bins, size)))
        return total / count[:, None, None]

    height, width = data.shape[2:]
    rows = weights(boxes[:, 1], boxes[:, 3], pooled_size[0], height)
    columns = weights(boxes[:, 0], boxes[:, 2], pooled_size[1], width)
    rows, columns = (jnp.where((images >= 0)[:, None, None], w, 0).astype(data.dtype) for w in (rows, columns))
    if position_sensitive:  # each bin has channels of its own
        features = data.reshape(len(data), -1, *pooled_size, height, width)
        return _of_regions(features, images, rows, columns, "cyxhw,yh,xw->cyx")
    return _of_regions(data, images, rows, columns, "chw,yh,xw->cyx")


def _of_regions(features: jax.Array, images: jax.Array, rows: jax.Array, columns: jax.Array, form: str) -> jax.Array:
    """Sums over the pixels of regions, by the weights of their rows and of their columns, of the image of each."""

    # A few at a time: of a thousand regions the images of all are 60 GB in a detector of 1200 x 800 pixels.
    def of_region(region: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        image, of_rows, of_columns = region
        return jnp.einsum(form, features[image], of_rows, of_columns)

    return lax.map(of_region, (images.clip(0), rows, columns), batch_size=16)


def roi_pooling(data: jax.Array, rois: jax.Array, *, pooled_size: tuple[int, ...], spatial_scale: float) -> jax.Array:
    """The largest values of each bin of regions, 0 where a bin is empty."""
    rois = lax.stop_gradient(rois)
    height, width = data.shape[2:]

    def inside(low: jax.Array, high: jax.Array, bins: int, size: int) -> jax.Array:
        """(bins, size)"""
        step = jnp.maximum(high - low + 1, 1) / bins
        first = (jnp.floor(jnp.arange(bins) * step) + low).clip(0, size)
        end = (jnp.ceil((jnp.arange(bins) + 1) * step) + low).clip(0, size)
        places = jnp.arange(size)[None]
        return (places >= first[:, None]) & (places < end[:, None])

    def of_region(roi: jax.Array) -> jax.Array:
        image = data[roi[0].astype(int).clip(0, len(data) - 1)]
        # Halves are rounded away from 0, as in C.
        scaled = roi[1:] * spatial_scale
        box = jnp.trunc(scaled + jnp.where(scaled < 0, -0.5, 0.5))
        rows = inside(box[1], box[3], pooled_size[0], height)
        columns = inside(box[0], box[2], pooled_size[1], width)
        # The first one of several equal values, row by row, has the gradient: along columns first, then along rows.
        pixels = lax.stop_gradient(image)[:, :, None]
        best_column = jnp.where(columns[None, None], pixels, -jnp.inf).argmax(-1)  # (channels, height, columns)
        of_columns = jnp.where(columns[None, None], pixels, -jnp.inf).max(-1)[:, None]
        best_row = jnp.where(rows[None, :, :, None], of_columns, -jnp.inf).argmax(2)  # (channels, rows, columns)
        channel = jnp.arange(len(image))[:, None, None]
        column = best_column[channel, best_row, jnp.arange(pooled_size[1])[None, None]]
        is_full = (rows.any(1)[:, None] & columns.any(1)[None])[None]
        return jnp.where(is_full & (roi[0] >= 0), image[channel, best_row, column], 0)

    return lax.map(of_region, rois, batch_size=16)


def psroi_pooling(
    data: jax.Array,
    rois: jax.Array,
    *,
    spatial_scale: float,
    output_dim: int,
    pooled_size: int,
    group_size: int = 0,
) -> jax.Array:
    """The means of the bins of regions, each bin of channels of its own. An empty bin is 0."""
    rois = lax.stop_gradient(rois)
    height, width = data.shape[2:]
    groups = group_size or pooled_size
    # The corners are rounded to pixels, halves away from 0 as in C, and the last pixel belongs to the region.
    corners = jnp.trunc(rois[:, 1:] + jnp.where(rois[:, 1:] < 0, -0.5, 0.5))
    low, high = corners[:, :2] * spatial_scale, (corners[:, 2:] + 1) * spatial_scale

    def inside(axis: int, size: int) -> jax.Array:
        """(regions, bins, size): which pixels each bin has."""
        step = jnp.maximum(high[:, axis] - low[:, axis], 0.1)[:, None] / pooled_size
        first = jnp.floor(jnp.arange(pooled_size)[None] * step + low[:, axis, None]).clip(0, size)
        end = jnp.ceil((jnp.arange(pooled_size) + 1)[None] * step + low[:, axis, None]).clip(0, size)
        places = jnp.arange(size)[None, None]
        return ((places >= first[..., None]) & (places < end[..., None])).astype(data.dtype)

    rows, columns = inside(1, height), inside(0, width)
    group = (np.arange(pooled_size) * groups // pooled_size).clip(0, groups - 1)  # of each bin
    features = data.reshape(len(data), output_dim, groups, groups, height, width)[:, :, group][:, :, :, group]
    total = _of_regions(features, rois[:, 0].astype(int), rows, columns, "cyxhw,yh,xw->cyx")
    area = rows.sum(2)[:, None, :, None] * columns.sum(2)[:, None, None]
    return total / jnp.maximum(area, 1)


def deformable_psroi_pooling(
    data: jax.Array,
    rois: jax.Array,
    trans: jax.Array | None = None,
    *,
    spatial_scale: float,
    output_dim: int,
    group_size: int,
    pooled_size: int,
    part_size: int = 0,
    sample_per_part: int = 1,
    trans_std: float = 0.0,
    no_trans: bool = False,
) -> jax.Array:
    """The means of samples of each bin of regions. Bins have channels of their own, and `trans` moves them.

    `trans` (regions, 2 * classes, parts, parts) says how far, in x and y, over the size of the region.
    """
    height, width = data.shape[2:]
    rois = lax.stop_gradient(rois)
    # The corners are rounded to pixels, halves away from 0 as in C, and the last pixel belongs to the region.
    corners = jnp.trunc(rois[:, 1:] + jnp.where(rois[:, 1:] < 0, -0.5, 0.5))
    low, high = corners[:, :2] * spatial_scale - 0.5, (corners[:, 2:] + 1) * spatial_scale - 0.5
    size = jnp.maximum(high - low, 0.1)  # (regions, x and y)

    bins, parts = np.arange(pooled_size), part_size or pooled_size
    part = (bins.astype(np.float32) / np.float32(pooled_size) * np.float32(parts)).astype(int)  # of each bin
    group = (bins * group_size // pooled_size).clip(0, group_size - 1)
    if no_trans or trans is None:
        moves = jnp.zeros((len(rois), 1, 2, pooled_size, pooled_size), data.dtype)
    else:
        moves = trans.reshape(len(rois), -1, 2, parts, parts)[..., part[:, None], part] * trans_std
    output, bin_y, bin_x = np.ogrid[:output_dim, :pooled_size, :pooled_size]
    channel = (output * group_size + group[bin_y]) * group_size + group[bin_x]
    class_of = np.arange(output_dim) // (output_dim // moves.shape[1])  # of each output

    def of_region(region: tuple[jax.Array, ...]) -> jax.Array:
        image, low, size, move = region

        def places(axis: int, along: jax.Array, sample: jax.Array) -> jax.Array:
            """(classes, rows, columns, samples, samples)"""
            step = size[axis] / pooled_size
            starts = (along * step + low[axis])[None] + move[:, axis] * size[axis]
            return starts[..., None, None] + (sample * (step / sample_per_part))[None, None, None]

        along, sample = jnp.arange(pooled_size), jnp.arange(sample_per_part)
        y, x = places(1, along[:, None], sample[:, None]), places(0, along[None], sample[None])
        inside = (x >= -0.5) & (x <= width - 0.5) & (y >= -0.5) & (y <= height - 0.5)
        y, x, inside = (array[class_of] for array in (y.clip(0, height - 1), x.clip(0, width - 1), inside))
        values = _between(lambda row, column: data[image, channel[..., None, None], row, column], y, x)
        return jnp.where(inside, values, 0).sum((3, 4)) / jnp.maximum(inside.sum((3, 4)), 1)

    return lax.map(of_region, (rois[:, 0].astype(int), low, size, moves), batch_size=16)


def _between(pixels: Callable[[jax.Array, jax.Array], jax.Array], y: jax.Array, x: jax.Array) -> jax.Array:
    """Values at places between four pixels of an image, where `pixels(row, column)` gives pixels."""
    top, left = jnp.floor(y), jnp.floor(x)
    below, right = y - top, x - left
    rows, columns = (top.astype(int), jnp.ceil(y).astype(int)), (left.astype(int), jnp.ceil(x).astype(int))
    above = (1 - right) * pixels(rows[0], columns[0]) + right * pixels(rows[0], columns[1])
    return (1 - below) * above + below * (
        (1 - right) * pixels(rows[1], columns[0]) + right * pixels(rows[1], columns[1])
    )


def rroi_align(
    data: jax.Array,
    rois: jax.Array,
    *,
    pooled_size: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int = -1,
) -> jax.Array:
    """The means of samples of each bin of turned regions: image, x and y of the middle, width, height, degrees."""
    rois = lax.stop_gradient(rois).astype(jnp.promote_types(rois.dtype, jnp.float32))
    height, width = data.shape[2:]
    bins_y, bins_x = pooled_size

    def of_region(roi: jax.Array) -> jax.Array:
        image = data[roi[0].astype(int).clip(0, len(data) - 1)]
        middle_x, middle_y = roi[1] * spatial_scale, roi[2] * spatial_scale
        wide, high = jnp.maximum(roi[3] * spatial_scale, 1), jnp.maximum(roi[4] * spatial_scale, 1)
        cos, sin = jnp.cos(jnp.deg2rad(roi[5])), jnp.sin(jnp.deg2rad(roi[5]))
        step_y, step_x = high / bins_y, wide / bins_x
        # Without a ratio the number of samples follows from the region. JAX has no gradient of such a loop, nor has
        # MXNet of the operator.
        count_y: Any = sampling_ratio if sampling_ratio > 0 else jnp.ceil(step_y).astype(int)
        count_x: Any = sampling_ratio if sampling_ratio > 0 else jnp.ceil(step_x).astype(int)

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            y = (jnp.arange(bins_y)[:, None] + (number // count_x + 0.5) / count_y) * step_y - high / 2
            x = (jnp.arange(bins_x)[None] + (number % count_x + 0.5) / count_x) * step_x - wide / 2
            y, x = y * cos - x * sin + middle_y, x * cos + y * sin + middle_x
            inside = (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
            y, x = y.clip(0, height - 1), x.clip(0, width - 1)
            values = jax.vmap(lambda channel: _between(lambda row, column: channel[row, column], y, x))(image)
            return total + jnp.where(inside[None], values, 0)

        start = jnp.zeros((len(image), bins_y, bins_x), rois.dtype)
        return lax.fori_loop(0, count_y * count_x, add, start) / (count_y * count_x)

    return lax.map(of_region, rois, batch_size=16).astype(data.dtype)
