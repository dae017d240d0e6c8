"""What MXNet's symbols do with boxes: overlaps, non-maximum suppression, anchors and their targets, proposals.

As in `_layers`, arguments and defaults are those of MXNet's operators. A box is (left, top, right, bottom), or in the
format "center" (x, y, width, height). The number of boxes that remain is not known before, so those that do not are -1,
as in MXNet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks


def _corners(boxes: jax.Array, form: str) -> jax.Array:
    checks.choice(form, "boxes", "format", ("corner", "center"))
    if form == "corner":
        return boxes
    at, half = boxes[..., :2], boxes[..., 2:] / 2
    return jnp.concatenate([at - half, at + half], -1)


def _centers(boxes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, y) and (width, height)"""
    low, high = boxes[..., :2], boxes[..., 2:]
    return (low + high) / 2, high - low


def box_iou(lhs: jax.Array, rhs: jax.Array, *, format: str = "corner") -> jax.Array:
    """The overlap of each box of the left with each of the right, over the area of both. It has no gradient."""
    lhs, rhs = lax.stop_gradient(_corners(lhs, format)), lax.stop_gradient(_corners(rhs, format))
    shape = (*lhs.shape[:-1], *rhs.shape[:-1])
    return _overlaps(lhs.reshape(-1, 4), rhs.reshape(-1, 4)).reshape(shape)


def _overlaps(lhs: jax.Array, rhs: jax.Array, pixel: float = 0.0) -> jax.Array:
    """(boxes of the left, boxes of the right). `pixel` is 1 where the right and the last pixel are one."""

    def area(box: jax.Array) -> jax.Array:
        return (box[..., 2:] - box[..., :2] + pixel).clip(0).prod(-1)

    low = jnp.maximum(lhs[:, None, :2], rhs[None, :, :2])
    high = jnp.minimum(lhs[:, None, 2:], rhs[None, :, 2:])
    shared = (high - low + pixel).clip(0).prod(-1)
    union = area(lhs)[:, None] + area(rhs)[None] - shared
    return jnp.where(shared > 0, shared / jnp.where(union > 0, union, 1), 0)


def _remaining(
    boxes: jax.Array,  # (boxes, 4), the best first
    is_candidate: jax.Array,  # (boxes,)
    conflicts: Callable[[jax.Array, jax.Array], jax.Array],
    pixel: float = 0.0,
) -> jax.Array:
    """Which boxes remain: each candidate that does removes those behind it with which it conflicts.

    `conflicts(overlaps, number)` says with which boxes this one conflicts, of its overlaps with all.
    """
    places = jnp.arange(len(boxes))

    # Row by row, for the matrix of all pairs is 150 GB for the 175,000 boxes of gluoncv's SSD of 300 pixels.
    def remove(number: jax.Array, remains: jax.Array) -> jax.Array:
        overlaps = _overlaps(boxes[number][None], boxes, pixel)[0]
        return remains & ~(remains[number] & conflicts(overlaps, number) & (places > number))

    count = jnp.where(is_candidate, places + 1, 0).max(initial=0)  # behind the last candidate nothing is removed
    return lax.fori_loop(0, count, remove, is_candidate)


def box_nms(
    data: jax.Array,
    *,
    overlap_thresh: float = 0.5,
    valid_thresh: float = 0.0,
    topk: int = -1,
    coord_start: int = 2,
    score_index: int = 1,
    id_index: int = -1,
    background_id: int = -1,
    force_suppress: bool = False,
    in_format: str = "corner",
    out_format: str = "corner",
) -> jax.Array:
    """The rows that remain, best first, and rows of -1 behind them."""
    if topk == 0 or data.shape[-2] == 0:
        return data
    coordinates = slice(coord_start, coord_start + 4)
    is_by_class = id_index >= 0 and not force_suppress

    def of_image(rows: jax.Array) -> jax.Array:
        scores = lax.stop_gradient(rows[:, score_index])
        is_valid = scores > valid_thresh
        if id_index >= 0 and background_id >= 0:
            is_valid &= rows[:, id_index] != background_id
        order = jnp.argsort(jnp.where(is_valid, -scores, jnp.inf), stable=True)
        rows, is_valid = rows[order], is_valid[order]
        count = len(rows)
        if 0 < topk < count:
            rows, is_valid = rows[:topk], is_valid[:topk]
        fixed = lax.stop_gradient(rows)

        def conflicts(overlaps: jax.Array, number: jax.Array) -> jax.Array:
            are_close = overlaps > overlap_thresh
            return are_close & (fixed[number, id_index] == fixed[:, id_index]) if is_by_class else are_close

        remains = _remaining(_corners(fixed[:, coordinates], in_format), is_valid, conflicts)
        # Those that remain move to the front.
        front = jnp.argsort(~remains, stable=True)
        rows = jnp.where(remains[front][:, None], rows[front], -1)
        return jnp.pad(rows, ((0, count - len(rows)), (0, 0)), constant_values=-1)

    out = jax.vmap(of_image)(data.reshape(-1, *data.shape[-2:])).reshape(data.shape)
    if in_format != out_format:
        boxes = out[..., coordinates]
        new = _corners(boxes, "center") if out_format == "corner" else jnp.concatenate(_centers(boxes), -1)
        # As in MXNet, the gradient does not know of the change, and a box that begins below 0 is not changed.
        new = jnp.where(boxes[..., :1] < 0, boxes, boxes + lax.stop_gradient(new - boxes))
        out = out.at[..., coordinates].set(new)
    return out


def bipartite_matching(
    data: jax.Array, *, threshold: float, is_ascend: bool = False, topk: int = -1
) -> tuple[jax.Array, jax.Array]:
    """Pairs of rows and columns, the best score first: for each row its column, for each column its row, or -1."""
    rows, columns = data.shape[-2:]

    def of_matrix(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(scores if is_ascend else -scores, stable=True)
        is_good = scores < threshold if is_ascend else scores > threshold

        def match(step: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            of_rows, of_columns, count = found
            row, column = order[step] // columns, order[step] % columns
            is_new = (of_rows[row] < 0) & (of_columns[column] < 0) & is_good[order[step]]
            if topk > 0:
                is_new &= count <= topk  # as in MXNet, one more than `topk`
            of_rows = of_rows.at[row].set(jnp.where(is_new, column, of_rows[row]))
            of_columns = of_columns.at[column].set(jnp.where(is_new, row, of_columns[column]))
            return of_rows, of_columns, count + is_new

        start = jnp.full(rows, -1), jnp.full(columns, -1), 0
        of_rows, of_columns, _ = lax.fori_loop(0, rows * columns, match, start)
        return of_rows.astype(data.dtype), of_columns.astype(data.dtype)

    of_rows, of_columns = jax.vmap(of_matrix)(lax.stop_gradient(data).reshape(-1, rows * columns))
    return of_rows.reshape(data.shape[:-1]), of_columns.reshape(*data.shape[:-2], columns)


def _decoded(anchors: jax.Array, deltas: jax.Array) -> jax.Array:
    """Anchors that are moved by shares of their size, and grown by exponents."""
    at, size = _centers(anchors)
    center, half = deltas[..., :2] * size + at, jnp.exp(deltas[..., 2:]) * size / 2
    return jnp.concatenate([center - half, center + half], -1)


def box_decode(
    data: jax.Array,
    anchors: jax.Array,
    *,
    std0: float = 1.0,
    std1: float = 1.0,
    std2: float = 1.0,
    std3: float = 1.0,
    clip: float = -1.0,
    format: str = "center",
) -> jax.Array:
    data, anchors = lax.stop_gradient((data, anchors))  # as in MXNet
    deltas = data * jnp.array([std0, std1, std2, std3], data.dtype).reshape((1,) * (data.ndim - 1) + (4,))
    if clip > 0:
        deltas = deltas.at[..., 2:].min(clip)
    return _decoded(_corners(anchors, format), deltas)


def box_encode(
    samples: jax.Array,
    matches: jax.Array,
    anchors: jax.Array,
    refs: jax.Array,
    means: jax.Array,
    stds: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The targets of anchors and their masks: 1 where `samples` is. Their gradient is 0, as in MXNet."""
    boxes = jnp.take_along_axis(refs, matches.astype(jnp.int32)[..., None], 1)
    at, size = _centers(anchors)
    to, new_size = _centers(boxes)
    targets = jnp.concatenate([(to - at) / size, jnp.log(new_size / size)], -1)
    is_used = (samples > 0.5)[..., None]
    masks = jnp.broadcast_to(is_used, targets.shape).astype(refs.dtype)
    scaled = (targets - means.reshape(1, 1, 4)) / stds.reshape(1, 1, 4)
    return lax.stop_gradient(jnp.where(is_used, scaled, 0)), masks


# Single-shot detection


def multibox_prior(
    data: jax.Array,
    *,
    sizes: tuple[float, ...] = (1.0,),
    ratios: tuple[float, ...] = (1.0,),
    clip: bool = False,
    steps: tuple[float, ...] = (-1.0, -1.0),
    offsets: tuple[float, ...] = (0.5, 0.5),
) -> jax.Array:
    """Anchors (1, places * kinds, 4): all sizes with the first ratio, then the other ratios with the first size."""
    height, width = data.shape[2:]
    step_y, step_x = (1 / height, 1 / width) if min(steps) <= 0 else steps
    kinds = [(size, ratios[0]) for size in sizes] + [(sizes[0], ratio) for ratio in ratios[1:]]
    halves = [(size * height / width * ratio**0.5 / 2, size / ratio**0.5 / 2) for size, ratio in kinds]
    y, x = np.meshgrid(
        (np.arange(height) + offsets[0]) * step_y, (np.arange(width) + offsets[1]) * step_x, indexing="ij"
    )
    at, half = np.stack([x, y], -1)[:, :, None], np.array(halves)
    anchors = np.concatenate([at - half, at + half], -1).reshape(1, -1, 4)
    return jnp.array(anchors.clip(0, 1) if clip else anchors, data.dtype)


def multibox_detection(
    cls_prob: jax.Array,
    loc_pred: jax.Array,
    anchor: jax.Array,
    *,
    clip: bool = True,
    threshold: float = 0.01,
    background_id: int = 0,
    nms_threshold: float = 0.5,
    force_suppress: bool = False,
    variances: tuple[float, ...] = (0.1, 0.1, 0.2, 0.2),
    nms_topk: int = -1,
) -> jax.Array:
    """Rows (class, probability, box), best first. Those that are suppressed have the class -1, the others behind -1.

    As in MXNet's code, class 0 is the background, whatever `background_id` is, and rows behind `nms_topk` are in the
    order of the anchors.
    """
    factors = jnp.array([variances], loc_pred.dtype)

    def of_image(probabilities: jax.Array, deltas: jax.Array) -> jax.Array:
        kind, score = probabilities[1:].argmax(0), probabilities[1:].max(0)
        boxes = _decoded(anchor[0], deltas.reshape(-1, 4) * factors)
        boxes = boxes.clip(0, 1) if clip else boxes
        rows = jnp.concatenate([kind[:, None].astype(boxes.dtype), score[:, None], boxes], 1)
        is_found = score >= threshold
        rows = rows[jnp.argsort(~is_found, stable=True)]  # those that are found are in front
        is_found = jnp.sort(is_found, descending=True)
        if not 0 < nms_threshold <= 1:
            return jnp.where(is_found[:, None], rows, -1)
        order = jnp.argsort(jnp.where(is_found, -rows[:, 1], jnp.inf), stable=True)
        count = min(nms_topk, len(rows)) if nms_topk > 0 else len(rows)
        best = rows[order[:count]]

        def conflicts(overlaps: jax.Array, number: jax.Array) -> jax.Array:
            are_close = overlaps >= nms_threshold
            return are_close if force_suppress else are_close & (best[number, 0] == best[:, 0])

        remains = _remaining(best[:, 2:], is_found[:count], conflicts)
        best = best.at[:, 0].set(jnp.where(remains, best[:, 0], -1))
        rest = rows[count:].at[:, 0].set(-1)
        return jnp.where(is_found[:, None], jnp.concatenate([best, rest]), -1)

    return lax.stop_gradient(jax.vmap(of_image)(cls_prob, loc_pred))


def multibox_target(
    anchor: jax.Array,
    label: jax.Array,
    cls_pred: jax.Array,
    *,
    overlap_threshold: float = 0.5,
    ignore_label: float = -1.0,
    negative_mining_ratio: float = -1.0,
    negative_mining_thresh: float = 0.5,
    minimum_negative_samples: int = 0,
    variances: tuple[float, ...] = (0.1, 0.1, 0.2, 0.2),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of the anchors of each image the targets of their boxes, the masks of these, and their classes.

    `label` has rows (class, box), the last ones -1. As in MXNet's code, `minimum_negative_samples` has no effect.
    """
    anchors = anchor[0]
    count = len(anchors)

    def of_image(labels: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        is_label = jnp.cumprod(labels[:, 0] != -1) > 0
        overlaps = jnp.where(is_label[None], _overlaps(anchors, labels[:, 1:5]), -1)  # (anchors, labels)

        # Each label has the anchor that is nearest, the best pair first.
        def match(_: int, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            of_anchors, is_open = found
            free = jnp.where(is_open[None] & (of_anchors < 0)[:, None], overlaps, -1)
            best = free.argmax()
            row, column = best // len(labels), best % len(labels)
            is_match = free[row, column] > 1e-6
            of_anchors = of_anchors.at[row].set(jnp.where(is_match, column, of_anchors[row]))
            return of_anchors, is_open & ~(is_match & (jnp.arange(len(labels)) == column))

        matches, _ = lax.fori_loop(0, len(labels), match, (jnp.full(count, -1), is_label))
        # Every other anchor has the label that it overlaps most, if that is enough.
        is_positive, nearest = matches >= 0, overlaps.argmax(1)
        largest = jnp.where(is_positive, 1, overlaps.max(1))
        if overlap_threshold > 0:
            is_near = ~is_positive & (largest > overlap_threshold)
            matches, is_positive = jnp.where(is_near, nearest, matches), is_positive | is_near
        # Negative samples are all others, or those that look least like background.
        is_negative = ~is_positive
        if negative_mining_ratio > 0:
            positives = is_positive.sum()
            wanted = jnp.minimum((positives * negative_mining_ratio).astype(int), count - positives)
            is_candidate = is_negative & (largest < negative_mining_thresh)
            background = jax.nn.softmax(scores, 0)[0]
            order = jnp.argsort(jnp.where(is_candidate, background, jnp.inf), stable=True)
            rank = jnp.argsort(order)
            is_negative = is_candidate & (rank < wanted)
        boxes = labels[matches.clip(0)]
        at, size = _centers(anchors)
        to, new_size = _centers(boxes[:, 1:5])
        targets = jnp.concatenate([(to - at) / size, jnp.log(new_size / size)], 1)  # used of boxes with an area
        targets = jnp.where(is_positive[:, None], targets / jnp.array([variances], anchors.dtype), 0)
        masks = jnp.broadcast_to(is_positive[:, None], targets.shape).astype(anchors.dtype)
        classes = jnp.where(is_positive, boxes[:, 0] + 1, jnp.where(is_negative, 0, ignore_label))
        # An image without labels has no targets.
        has_labels = is_label[0]
        return (
            jnp.where(has_labels, targets, 0).ravel(),
            jnp.where(has_labels, masks, 0).ravel(),
            jnp.where(has_labels, classes, ignore_label),
        )

    return lax.stop_gradient(jax.vmap(of_image)(label, cls_pred))


# Detection in two stages


def proposal(
    cls_prob: jax.Array,
    bbox_pred: jax.Array,
    im_info: jax.Array,
    *,
    rpn_pre_nms_top_n: int = 6000,
    rpn_post_nms_top_n: int = 300,
    threshold: float = 0.7,
    rpn_min_size: int = 16,
    scales: tuple[float, ...] = (4.0, 8.0, 16.0, 32.0),
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0),
    feature_stride: int = 16,
    output_score: bool = False,
    iou_loss: bool = False,
) -> Any:
    """Regions (batch * proposals, image and box): the best anchors after their boxes are predicted."""
    batch, _, height, width = cls_prob.shape
    base: list[tuple[float, ...]] = []
    middle = (feature_stride - 1) / 2
    for ratio in ratios:
        for scale in scales:
            wide = math.floor(math.sqrt(math.floor(feature_stride**2 / ratio)) + 0.5)
            half_w, half_h = (wide * scale - 1) / 2, (math.floor(wide * ratio + 0.5) * scale - 1) / 2
            base.append((middle - half_w, middle - half_h, middle + half_w, middle + half_h))
    y, x = np.meshgrid(np.arange(height) * feature_stride, np.arange(width) * feature_stride, indexing="ij")
    shifts = np.stack([x, y, x, y], -1)[:, :, None]
    anchors = jnp.array((shifts + np.array(base)).reshape(-1, 4), jnp.float32)  # (rows * columns * kinds, 4)

    def of_image(scores: jax.Array, deltas: jax.Array, info: jax.Array) -> tuple[jax.Array, jax.Array]:
        kinds = len(base)
        scores = scores[kinds:].transpose(1, 2, 0).ravel()
        deltas = deltas.reshape(kinds, 4, height, width).transpose(2, 3, 0, 1).reshape(-1, 4)
        if iou_loss:
            boxes = anchors + deltas
        else:
            size = anchors[:, 2:] - anchors[:, :2] + 1
            at = anchors[:, :2] + 0.5 * (size - 1)
            center, half = deltas[:, :2] * size + at, 0.5 * (jnp.exp(deltas[:, 2:]) * size - 1)
            boxes = jnp.concatenate([center - half, center + half], 1)
        limit = jnp.stack([info[1], info[0], info[1], info[0]]) - 1
        boxes = jnp.maximum(jnp.minimum(boxes, limit[None]), 0)
        # What lies in the padding of the image, and boxes that are too small, come last.
        inside = (y[:, :, None] < jnp.floor(info[0] / feature_stride) * feature_stride) & (
            x[:, :, None] < jnp.floor(info[1] / feature_stride) * feature_stride
        )
        scores = jnp.where(jnp.broadcast_to(inside, (height, width, kinds)).ravel(), scores, -1)
        least = rpn_min_size * info[2]
        is_small = (boxes[:, 2:] - boxes[:, :2] + 1 < least).any(1)
        grown = boxes + jnp.array([[-0.5, -0.5, 0.5, 0.5]]) * least
        boxes, scores = jnp.where(is_small[:, None], grown, boxes), jnp.where(is_small, -1, scores)
        most = min(rpn_pre_nms_top_n if rpn_pre_nms_top_n > 0 else len(boxes), len(boxes))
        order = jnp.argsort(-scores, stable=True)[:most]
        boxes, scores = boxes[order], scores[order]
        remains = _remaining(boxes, jnp.ones(most, bool), lambda overlaps, _: overlaps > threshold, pixel=1.0)
        # Too few that remain are repeated from the first one.
        front = jnp.argsort(~remains, stable=True)
        count = jnp.minimum(remains.sum(), min(rpn_post_nms_top_n, most))
        chosen = front[jnp.arange(rpn_post_nms_top_n) % count]
        return boxes[chosen], scores[chosen]

    boxes, scores = jax.vmap(of_image)(cls_prob, bbox_pred, im_info)
    images = jnp.broadcast_to(jnp.arange(batch, dtype=boxes.dtype)[:, None, None], (*boxes.shape[:2], 1))
    regions = lax.stop_gradient(jnp.concatenate([images, boxes], 2).reshape(-1, 5))
    return (regions, lax.stop_gradient(scores.reshape(-1, 1))) if output_score else regions
