"""What MXNet's symbols do with whole arrays: reshape, slice, join, reduce, look up, multiply.

As in `_layers`, arguments and defaults are those of MXNet's operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import checks
from ._operator import dtype_of

_MOST_ELEMENTS = 2**27  # of an array that is made of attributes alone
LEFT_OUT = -5  # the code of an axis of 1 in a new shape, which only `mx.np` has


def check_count(count: float, what: str, most: int = _MOST_ELEMENTS) -> None:
    """`ValueError` for more than `most`, as a damaged file may say, before they take all memory."""
    if not count <= most:  # also for NaN
        raise ValueError(f"{what} is too large: {count:,} in place of {most:,} at most")


def reshape(
    data: jax.Array,
    *,
    shape: tuple[int, ...] = (),
    reverse: bool = False,
    target_shape: tuple[int, ...] = (),
    keep_highest: bool = False,
) -> jax.Array:
    if target_shape and not shape:  # the form before 0.9
        codes = data.shape[:1] + target_shape[1:] if keep_highest else target_shape
        return data.reshape([-1 if n == 0 else n for n in codes])
    if reverse:  # all is read from behind, and the two numbers of a -4 stand before it
        return data.reshape(_new_shape(data.shape[::-1], shape[::-1])[::-1])
    return data.reshape(_new_shape(data.shape, shape))


def _new_shape(old: tuple[int, ...], codes: tuple[int, ...]) -> list[int]:
    """The shape of MXNet's codes.

    0 keeps an axis, -1 is what is left, -2 keeps all further axes, -3 joins two, -4 splits one into the next two, and
    `LEFT_OUT` leaves out one of 1.
    """
    new: list[int] = []
    at, code = 0, iter(codes)  # the next axis of the array; some codes take two more numbers, or two axes
    try:
        for n in code:
            if n == -2:
                new += old[at:]
                at = len(old)
            elif n == -3:
                new.append(old[at] * old[at + 1])
                at += 2
            elif n == -4:
                first, second = next(code), next(code)
                first = old[at] // second if first == -1 else first
                new += [first, old[at] // first if second == -1 else second]
                at += 1
            elif n == LEFT_OUT and old[at] == 1:
                at += 1
            else:
                new.append(old[at] if n == 0 else n)
                at += 1
    except (IndexError, StopIteration, ZeroDivisionError):
        raise ValueError(f"Reshape: {codes} does not fit an array of shape {old}") from None
    return new


def reshape_like(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    lhs_begin: int | None = None,
    lhs_end: int | None = None,
    rhs_begin: int | None = None,
    rhs_end: int | None = None,
) -> jax.Array:
    """The left array, of whose axes from `lhs_begin` to `lhs_end` the shape is that of the right one's."""
    first, end, _ = slice(lhs_begin, lhs_end).indices(lhs.ndim)
    return lhs.reshape(lhs.shape[:first] + rhs.shape[rhs_begin:rhs_end] + lhs.shape[end:])


def broadcast_like(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    lhs_axes: tuple[int, ...] | None = None,
    rhs_axes: tuple[int, ...] | None = None,
) -> jax.Array:
    if lhs_axes is None or rhs_axes is None:
        return jnp.broadcast_to(lhs, rhs.shape)
    return broadcast_axis(lhs, axis=lhs_axes, size=tuple(rhs.shape[axis] for axis in rhs_axes))


def pad(data: jax.Array, *, mode: str, pad_width: tuple[int, ...], constant_value: float = 0.0) -> jax.Array:
    checks.choice(mode, "Pad", "mode", ("constant", "edge", "reflect"))
    pairs = list(zip(pad_width[::2], pad_width[1::2], strict=True))
    return jnp.pad(data, pairs, mode, **({"constant_values": constant_value} if mode == "constant" else {}))


def slice_(
    data: jax.Array, *, begin: tuple[int | None, ...], end: tuple[int | None, ...], step: tuple[int | None, ...] = ()
) -> jax.Array:
    steps = step or (None,) * len(begin)
    return data[tuple(slice(b, e, s) for b, e, s in zip(begin, end, steps, strict=True))]


def slice_axis(data: jax.Array, *, axis: int, begin: int, end: int | None) -> jax.Array:
    return data[(slice(None),) * (axis % data.ndim) + (slice(begin, end),)]


def slice_like(data: jax.Array, shape_like: jax.Array, *, axes: tuple[int, ...] = ()) -> jax.Array:
    chosen = [a % data.ndim for a in axes] or range(data.ndim)
    return data[tuple(slice(shape_like.shape[i] if i in chosen else None) for i in range(data.ndim))]


def slice_channel(
    data: jax.Array, *, num_outputs: int, axis: int = 1, squeeze_axis: bool = False
) -> jax.Array | tuple[jax.Array, ...]:
    if not 1 <= num_outputs <= data.shape[axis] or data.shape[axis] % num_outputs:
        raise ValueError(f"SliceChannel: an axis of {data.shape[axis]} has no {num_outputs} equal parts")
    return _several(jnp.split(data, num_outputs, axis), axis if squeeze_axis else None)


def _several(arrays: Sequence[jax.Array], squeezed: int | None) -> jax.Array | tuple[jax.Array, ...]:
    """The outputs of an operator: as in MXNet, an array where there is one."""
    outputs = tuple(array if squeezed is None else array.squeeze(squeezed) for array in arrays)
    return outputs[0] if len(outputs) == 1 else outputs


def crop(
    *data: jax.Array,
    num_args: int = 1,
    offset: tuple[int, int] = (0, 0),
    h_w: tuple[int, int] = (0, 0),
    center_crop: bool = False,
) -> jax.Array:
    image, *references = data
    height, width = references[0].shape[-2:] if references else h_w
    top, left = offset
    if center_crop:
        top, left = (image.shape[2] - height) // 2, (image.shape[3] - width) // 2
    return image[:, :, top : top + height, left : left + width]


def reduction(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """An operator that reduces the given axes, or all others than these."""

    def reduce(
        data: jax.Array, *, axis: tuple[int, ...] | None = None, keepdims: bool = False, exclude: bool = False
    ) -> jax.Array:
        chosen = tuple(a % data.ndim for a in axis) if axis else tuple(range(data.ndim))
        if exclude and axis:
            chosen = tuple(a for a in range(data.ndim) if a not in chosen)
        out = _with_axis(function(data, axis=chosen, keepdims=keepdims))
        return out.astype(data.dtype) if jnp.issubdtype(data.dtype, jnp.integer) else out

    return reduce


def _with_axis(out: jax.Array) -> jax.Array:
    return out if out.ndim else out.reshape(1)  # MXNet has no arrays without axes


def extreme(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`max` or `min`. As in MXNet, each of several equal largest values has the whole gradient."""

    def apply(data: jax.Array, *, axis: tuple[int, ...], keepdims: bool) -> jax.Array:
        extremum = lax.stop_gradient(function(data, axis=axis, keepdims=True))
        # 0, with the gradient of all values that are equal to the extremum.
        reached = jnp.where(data == extremum, data - lax.stop_gradient(data), 0).sum(axis=axis, keepdims=keepdims)
        return extremum.reshape(reached.shape) + reached

    return apply


def absolute(data: jax.Array) -> jax.Array:
    """As in MXNet, the gradient at 0 is 0."""
    return data * lax.stop_gradient(jnp.sign(data))


def norm(
    data: jax.Array,
    *,
    ord: int = 2,
    axis: tuple[int, ...] | None = None,
    keepdims: bool = False,
    out_dtype: str | None = None,
) -> jax.Array:
    if ord not in (1, 2):
        raise ValueError(f"norm: ord must be 1 or 2, got {ord}")

    def measure(x: jax.Array, *, axis: tuple[int, ...], keepdims: bool) -> jax.Array:
        if ord == 1:
            return absolute(x).sum(axis=axis, keepdims=keepdims)
        return jnp.sqrt(jnp.square(x).sum(axis=axis, keepdims=keepdims))

    out = reduction(measure)(data, axis=axis, keepdims=keepdims)
    return out if out_dtype is None else out.astype(dtype_of(out_dtype))


def place(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`argmax` or `argmin`, whose result is floating as in MXNet."""

    def find(data: jax.Array, *, axis: int | None = None, keepdims: bool = False) -> jax.Array:
        return _with_axis(function(data, axis=axis, keepdims=keepdims).astype(jnp.float32))

    return find


def broadcast_to(data: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(data, [m if n == 0 else n for n, m in zip(shape, data.shape, strict=True)])


def broadcast_axis(data: jax.Array, *, axis: tuple[int, ...] = (), size: tuple[int, ...] = ()) -> jax.Array:
    sizes = dict(zip((a % data.ndim for a in axis), size, strict=True))
    return jnp.broadcast_to(data, [sizes.get(i, n) for i, n in enumerate(data.shape)])


def dot(lhs: jax.Array, rhs: jax.Array, *, transpose_a: bool = False, transpose_b: bool = False) -> jax.Array:
    """The last axis of the left by the first of the right."""
    left, right = 0 if transpose_a else lhs.ndim - 1, rhs.ndim - 1 if transpose_b else 0
    return _with_axis(lax.dot_general(lhs, rhs, (((left,), (right,)), ((), ()))))


def batch_dot(lhs: jax.Array, rhs: jax.Array, *, transpose_a: bool = False, transpose_b: bool = False) -> jax.Array:
    return lax.dot_general(lhs, rhs, (((1 if transpose_a else 2,), (2 if transpose_b else 1,)), ((0,), (0,))))


def _index(indices: jax.Array, size: int, mode: str) -> jax.Array:
    """Whole numbers from 0 to below `size`. `mode` is "clip" or "wrap"."""
    integers = indices.astype(jnp.int32)
    return integers % size if mode == "wrap" else integers.clip(0, size - 1)


def embedding(
    data: jax.Array, weight: jax.Array, *, input_dim: int, output_dim: int, dtype: str = "float32"
) -> jax.Array:
    return jnp.take(weight, data.astype(jnp.int32), axis=0, mode="clip")


def take(a: jax.Array, indices: jax.Array, *, axis: int = 0, mode: str = "clip") -> jax.Array:
    checks.choice(mode, "take", "mode", ("clip", "wrap", "raise"))
    if mode == "raise":  # a compiled program cannot, so an index out of bounds gives NaN, of integers the smallest
        integers = indices.astype(jnp.int32)
        return jnp.take(a, jnp.where(integers < 0, a.shape[axis], integers), axis, mode="fill")
    return jnp.take(a, _index(indices, a.shape[axis], mode), axis)


def pick(
    data: jax.Array, index: jax.Array, *, axis: int | None = -1, keepdims: bool = False, mode: str = "clip"
) -> jax.Array:
    checks.choice(mode, "pick", "mode", ("clip", "wrap"))
    axis = -1 if axis is None else axis
    at = _index(index, data.shape[axis], mode)
    if at.ndim < data.ndim:
        at = jnp.expand_dims(at, axis)
    picked = jnp.take_along_axis(data, at, axis)
    return picked if keepdims else picked.squeeze(axis)


def one_hot(
    indices: jax.Array, *, depth: int, on_value: float = 1.0, off_value: float = 0.0, dtype: str = "float32"
) -> jax.Array:
    hit = jax.nn.one_hot(indices.astype(jnp.int32), depth)
    return jnp.where(hit > 0, on_value, off_value).astype(dtype_of(dtype))


def where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    if condition.ndim < x.ndim:  # a vector chooses rows
        condition = condition.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(condition != 0, x, y)


def filled(value: float | None) -> Callable[..., jax.Array]:
    """An operator that makes an array of one number; None: of its attribute `value`.

    MXNet infers a 0 in the shape. Here it is 1, which operators broadcast: `_graph.check_shapes` says where.
    """

    def fill(*, shape: tuple[int, ...] = (), dtype: str | None = None, value: float = value or 0.0) -> jax.Array:
        shape = tuple(n or 1 for n in shape)
        check_count(math.prod(shape), f"an array of shape {shape}")
        return jnp.full(shape, value, dtype_of(dtype))

    return fill


def arange(
    *,
    start: float = 0.0,
    stop: float | None = None,
    step: float = 1.0,
    repeat: int = 1,
    infer_range: bool = False,
    dtype: str | None = None,
) -> jax.Array:
    if infer_range and stop is None:
        raise ValueError("_arange: infer_range=True is not supported; write stop=")
    start, stop = (0.0, start) if stop is None else (start, stop)
    count = abs((stop - start) / step) * repeat if step else math.inf
    check_count(count, f"_arange: from {start} to {stop} by {step}")
    return jnp.repeat(jnp.arange(start, stop, step), repeat).astype(dtype_of(dtype))


def _steps(data: jax.Array, lengths: jax.Array | None, axis: int) -> tuple[jax.Array, jax.Array]:
    """The number of each step along `axis`, and the length of each sequence along the axis of the batch: the whole."""
    lengths = jnp.full(data.shape[1 - axis], data.shape[axis]) if lengths is None else lengths
    shape = [1] * data.ndim
    shape[1 - axis] = -1
    return lax.broadcasted_iota(jnp.int32, data.shape, axis), lengths.astype(jnp.int32).reshape(shape)


def sequence_mask(
    data: jax.Array,
    sequence_length: jax.Array | None = None,
    *,
    use_sequence_length: bool = False,
    value: float = 0.0,
    axis: int = 0,
) -> jax.Array:
    step, length = _steps(data, sequence_length, axis)
    return jnp.where(step < length, data, value)


def sequence_last(
    data: jax.Array, sequence_length: jax.Array | None = None, *, use_sequence_length: bool = False, axis: int = 0
) -> jax.Array:
    step, length = _steps(data, sequence_length, axis)
    return jnp.where(step == length - 1, data, 0).sum(axis)


def sequence_reverse(
    data: jax.Array, sequence_length: jax.Array | None = None, *, use_sequence_length: bool = False, axis: int = 0
) -> jax.Array:
    step, length = _steps(data, sequence_length, axis)
    return jnp.take_along_axis(data, jnp.where(step < length, length - 1 - step, step), axis)


def arange_like(
    data: jax.Array, *, start: float = 0.0, step: float = 1.0, repeat: int = 1, axis: int | None = None
) -> jax.Array:
    """Numbers in the shape of the data, or along one of its axes. Each comes `repeat` times."""
    shape = data.shape if axis is None else (data.shape[axis],)
    return (start + step * (jnp.arange(math.prod(shape)) // repeat)).astype(data.dtype).reshape(shape)


def linspace(*, start: float, stop: float, num: int, endpoint: bool = True, dtype: str | None = None) -> jax.Array:
    check_count(num, "_linspace")
    return jnp.linspace(start, stop, num, endpoint, dtype=dtype_of(dtype))


def eye(*, N: int, M: int = 0, k: int = 0, dtype: str = "float32") -> jax.Array:
    check_count(N * (M or N), f"_eye: a matrix of {N} rows and {M or N} columns")
    return jnp.eye(N, M or N, k, dtype_of(dtype))


def _order(data: jax.Array, axis: int, is_ascend: bool) -> jax.Array:
    """The places of values in order. Equal ones stay in their order."""
    return jnp.argsort(data, axis, stable=True, descending=not is_ascend)


def sort(data: jax.Array, *, axis: int | None = -1, is_ascend: bool = True) -> jax.Array:
    data, axis = (data.ravel(), 0) if axis is None else (data, axis)
    return jnp.take_along_axis(data, _order(lax.stop_gradient(data), axis, is_ascend), axis)


def argsort(data: jax.Array, *, axis: int | None = -1, is_ascend: bool = True, dtype: str = "float32") -> jax.Array:
    data, axis = (data.ravel(), 0) if axis is None else (data, axis)
    return _order(data, axis, is_ascend).astype(dtype_of(dtype))


def topk(
    data: jax.Array,
    *,
    axis: int | None = -1,
    k: int = 1,
    ret_typ: str = "indices",
    is_ascend: bool = False,
    dtype: str = "float32",
) -> Any:
    """The k largest or smallest values along an axis, all of them for k = 0; where they are; both; or a mask."""
    checks.choice(ret_typ, "topk", "ret_typ", ("value", "indices", "mask", "both"))
    shape = data.shape
    data, axis = (data.ravel(), 0) if axis is None else (data, axis)
    count = k if k > 0 else data.shape[axis]
    order = lax.slice_in_dim(_order(lax.stop_gradient(data), axis, is_ascend), 0, count, axis=axis)
    if ret_typ == "mask":
        return jnp.put_along_axis(jnp.zeros_like(data), order, 1, axis, inplace=False).reshape(shape)
    values = jnp.take_along_axis(data, order, axis)
    indices = order.astype(dtype_of(dtype))
    return {"value": values, "indices": indices, "both": (values, indices)}[ret_typ]


def split_v2(
    data: jax.Array, *, indices: tuple[int, ...], axis: int = 1, squeeze_axis: bool = False, sections: int = 0
) -> jax.Array | tuple[jax.Array, ...]:
    """Equal sections, or what begins at each index."""
    arrays = jnp.split(data, sections if sections > 0 else list(indices)[1:], axis)
    return _several(arrays, axis if squeeze_axis else None)


def scatter_nd(data: jax.Array, indices: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Zeros with the data at these places. Of several at one place one is there, and all have its gradient."""
    check_count(math.prod(shape), f"scatter_nd: an array of shape {shape}")
    places = tuple(indices.astype(jnp.int32))
    out = jnp.zeros(shape, data.dtype).at[places].set(lax.stop_gradient(data))
    # 0, with the gradient of the place for each value that was written to it.
    return out + jnp.zeros(shape, data.dtype).at[places].add(data - lax.stop_gradient(data))


def slice_assign(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    begin: tuple[int | None, ...],
    end: tuple[int | None, ...],
    step: tuple[int | None, ...] = (),
) -> jax.Array:
    steps = step or (None,) * len(begin)
    return lhs.at[tuple(slice(b, e, s) for b, e, s in zip(begin, end, steps, strict=True))].set(rhs)


def slice_assign_scalar(
    data: jax.Array,
    *,
    begin: tuple[int | None, ...],
    end: tuple[int | None, ...],
    step: tuple[int | None, ...] = (),
    scalar: float = 0.0,
) -> jax.Array:
    return slice_assign(data, jnp.asarray(scalar, data.dtype), begin=begin, end=end, step=step)


def depth_to_space(data: jax.Array, *, block_size: int) -> jax.Array:
    batch, channels, height, width = data.shape
    blocks = data.reshape(batch, block_size, block_size, channels // block_size**2, height, width)
    return blocks.transpose(0, 3, 4, 1, 5, 2).reshape(batch, -1, height * block_size, width * block_size)


def space_to_depth(data: jax.Array, *, block_size: int) -> jax.Array:
    batch, channels, height, width = data.shape
    blocks = data.reshape(batch, channels, height // block_size, block_size, width // block_size, block_size)
    return blocks.transpose(0, 3, 5, 1, 2, 4).reshape(batch, -1, height // block_size, width // block_size)


def cumsum(a: jax.Array, *, axis: int | None = None, dtype: str | None = None) -> jax.Array:
    return jnp.cumsum(a, axis, None if dtype in (None, "None") else dtype_of(dtype))


def diag(data: jax.Array, *, k: int = 0, axis1: int = 0, axis2: int = 1) -> jax.Array:
    return jnp.diag(data, k) if data.ndim == 1 else jnp.diagonal(data, k, axis1, axis2)


def moments(
    data: jax.Array, *, axes: tuple[int, ...] | None = None, keepdims: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _with_axis(data.mean(axes, keepdims=keepdims)), _with_axis(data.var(axes, keepdims=keepdims))


def khatri_rao(*args: jax.Array) -> jax.Array:
    """The products of all rows, column by column."""
    out = args[0]
    for matrix in args[1:]:
        out = (out[:, None] * matrix[None]).reshape(-1, out.shape[1])
    return out


def index_array(data: jax.Array, *, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The places of the elements, in the last axis."""
    places = jnp.indices(data.shape)
    return jnp.stack([places[axis] for axis in (range(data.ndim) if axes is None else axes)], -1)


def histogram(
    data: jax.Array,
    bins: jax.Array | None = None,
    *,
    bin_cnt: int | None = None,
    range: tuple[float, ...] | None = None,
) -> tuple[jax.Array, jax.Array]:
    counts, edges = jnp.histogram(data, bin_cnt or 10 if bins is None else bins, range)
    return counts.astype(jnp.int32), edges.astype(data.dtype)


# Attention of gluon-nlp: queries, keys and values of all heads are interleaved in one array.


def _heads(array: jax.Array, heads: int, kinds: int) -> list[jax.Array]:
    """Of (steps, batch, heads * kinds * features) the kinds, each (batch * heads, steps, features)."""
    steps, batch, _ = array.shape
    split = array.reshape(steps, batch, heads, kinds, -1).transpose(3, 1, 2, 0, 4)
    return list(split.reshape(kinds, batch * heads, steps, -1))


def _scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return queries / math.sqrt(queries.shape[-1]) @ keys.swapaxes(1, 2)


def _attended(attention: jax.Array, values: jax.Array, heads: int) -> jax.Array:
    out = attention @ values  # (batch * heads, steps, features)
    steps = out.shape[1]
    return out.reshape(-1, heads, steps, out.shape[2]).transpose(2, 0, 1, 3).reshape(steps, -1, heads * out.shape[2])


def selfatt_qk(queries_keys_values: jax.Array, *, heads: int) -> jax.Array:
    queries, keys, _ = _heads(queries_keys_values, heads, 3)
    return _scores(queries, keys)


def selfatt_valatt(queries_keys_values: jax.Array, attention: jax.Array, *, heads: int) -> jax.Array:
    return _attended(attention, _heads(queries_keys_values, heads, 3)[2], heads)


def encdec_qk(queries: jax.Array, keys_values: jax.Array, *, heads: int) -> jax.Array:
    return _scores(_heads(queries, heads, 1)[0], _heads(keys_values, heads, 2)[0])


def encdec_valatt(keys_values: jax.Array, attention: jax.Array, *, heads: int) -> jax.Array:
    return _attended(attention, _heads(keys_values, heads, 2)[1], heads)
