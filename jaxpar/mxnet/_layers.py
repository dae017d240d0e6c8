"""The layers of MXNet's symbols as JAX functions: convolution, pooling, normalization, dense, dropout, recurrent ones.

The arguments of each are those of MXNet's operator of that name, with its defaults. Arrays come first, attributes are
given by keyword, and their types say how the strings of a symbol file are read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import checks

# MXNet's names of functions of `jax.nn`
ACTIVATIONS = {
    "softrelu": "softplus",
    "softsign": "soft_sign",
    **{name: name for name in ("relu", "sigmoid", "tanh", "log_sigmoid", "mish")},
}
_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_MOST_LAYERS = 1000
_Carry = tuple[jax.Array, ...]
# Of the input, of the state, the biases of both, and of the projection of the new state, where there is one
_Weights = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]


def per_channel(value: jax.Array, x: jax.Array, axis: int = 1) -> jax.Array:
    """A vector with the axes of `x`, along one of them."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return value.reshape(shape)


def _layout(layout: str | None, axes: int) -> str:
    """The letters of the axes, batch and channels first if nothing else is said."""
    if layout not in (None, "None"):
        return layout
    if axes not in _SPATIAL:
        raise ValueError(f"an image has 1 to 3 axes beside those of batch and channels, not {axes}")
    return "NC" + _SPATIAL[axes]


def _filled(values: tuple[int, ...], count: int, value: int) -> tuple[int, ...]:
    return values or (value,) * count


def convolution(
    data: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    kernel: tuple[int, ...],
    num_filter: int,
    stride: tuple[int, ...] = (),
    dilate: tuple[int, ...] = (),
    pad: tuple[int, ...] = (),
    num_group: int = 1,
    no_bias: bool = False,
    layout: str | None = None,
) -> jax.Array:
    axes = len(kernel)
    padding = [(p, p) for p in _filled(pad, axes, 0)]
    return _convolved(
        data,
        weight,
        bias,
        layout=_layout(layout, axes),
        strides=_filled(stride, axes, 1),
        padding=padding,
        rhs_dilation=_filled(dilate, axes, 1),
        groups=num_group,
    )


def _convolved(
    data: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    layout: str,
    strides: tuple[int, ...],
    padding: list[tuple[int, int]],
    lhs_dilation: tuple[int, ...] | None = None,
    rhs_dilation: tuple[int, ...],
    groups: int,
) -> jax.Array:
    out = lax.conv_general_dilated(
        data,
        weight,
        strides,
        padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=(layout, layout.replace("N", "O").replace("C", "I"), layout),
        feature_group_count=groups,
    )
    return out if bias is None else out + per_channel(bias, out, layout.index("C"))


def deconvolution(
    data: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    kernel: tuple[int, ...],
    num_filter: int,
    stride: tuple[int, ...] = (),
    dilate: tuple[int, ...] = (),
    pad: tuple[int, ...] = (),
    adj: tuple[int, ...] = (),
    target_shape: tuple[int, ...] = (),
    num_group: int = 1,
    no_bias: bool = True,
    layout: str | None = None,
) -> jax.Array:
    axes = len(kernel)
    if _layout(layout, axes) != "NC" + _SPATIAL[axes]:
        raise ValueError(f"Deconvolution: layout {layout} is not supported")
    stride, dilate = _filled(stride, axes, 1), _filled(dilate, axes, 1)
    pad, adj = _filled(pad, axes, 0), _filled(adj, axes, 0)
    reach = [d * (k - 1) for d, k in zip(dilate, kernel, strict=True)]
    if any(target_shape):  # in place of `pad` and `adj`, which follow from it
        spare = [
            s * (n - 1) + r + 1 - t for s, n, r, t in zip(stride, data.shape[2:], reach, target_shape, strict=True)
        ]
        adj = tuple(n % 2 for n in spare)
        pad = tuple((n + 1) // 2 for n in spare)
    # The gradient of a convolution: the kernel is mirrored, and its channels in and out are exchanged in each group.
    # From MXNet's (in, out / groups, *kernel) to JAX's (out, in / groups, *kernel).
    grouped = weight.reshape(num_group, -1, *weight.shape[1:]).swapaxes(1, 2)
    mirrored = jnp.flip(grouped.reshape(-1, *grouped.shape[2:]), range(2, 2 + axes))
    padding = [(r - p, r - p + a) for r, p, a in zip(reach, pad, adj, strict=True)]
    return _convolved(
        data,
        mirrored,
        bias,
        layout=_layout(None, axes),
        strides=(1,) * axes,
        padding=padding,
        lhs_dilation=stride,
        rhs_dilation=dilate,
        groups=num_group,
    )


def fully_connected(
    data: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    num_hidden: int,
    no_bias: bool = False,
    flatten: bool = True,
) -> jax.Array:
    if flatten:
        data = data.reshape(data.shape[0], -1)
    out = lax.dot_general(data, weight, (((data.ndim - 1,), (1,)), ((), ())))
    return out if bias is None else out + per_channel(bias, out, -1)


def batch_norm(
    data: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    moving_mean: jax.Array,
    moving_var: jax.Array,
    *,
    eps: float = 1e-3,
    momentum: float = 0.9,
    fix_gamma: bool = True,
    use_global_stats: bool = False,
    output_mean_var: bool = False,
    axis: int = 1,
    train: bool,
) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    """The outputs, and the new running mean and variance."""
    # In float32 at least: a mean over a batch, summed in 16 bits, would lose its last digits.
    x = data.astype(jnp.promote_types(data.dtype, jnp.float32))
    running = (moving_mean, moving_var)
    if train and not use_global_stats:
        axes = [i for i in range(x.ndim) if i != axis % x.ndim]
        mean, var = x.mean(axes), x.var(axes)
        old_and_new = zip(running, (mean, var), strict=True)
        running = tuple(lax.stop_gradient(old * momentum + new * (1 - momentum)) for old, new in old_and_new)
    else:
        mean, var = moving_mean, moving_var
    scale = jnp.ones_like(gamma) if fix_gamma else gamma
    inverse = lax.rsqrt(var + eps)
    out = (x - per_channel(mean, x, axis)) * per_channel(inverse * scale, x, axis) + per_channel(beta, x, axis)
    out = out.astype(data.dtype)
    # What MXNet calls the variance in its outputs is this inverse.
    return ((out, mean, inverse) if output_mean_var else out), (running[0], running[1])


@functools.wraps(batch_norm)
def batch_norm_with_relu(*arrays: jax.Array, **attributes: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    outputs, running = batch_norm(*arrays, **attributes)
    if isinstance(outputs, tuple):
        return (jax.nn.relu(outputs[0]), *outputs[1:]), running
    return jax.nn.relu(outputs), running


def pooling(
    data: jax.Array,
    *,
    kernel: tuple[int, ...] = (),
    pool_type: str = "max",
    global_pool: bool = False,
    pooling_convention: str = "valid",
    stride: tuple[int, ...] = (),
    pad: tuple[int, ...] = (),
    p_value: int | None = None,
    count_include_pad: bool | None = True,
    layout: str | None = None,
) -> jax.Array:
    letters = _layout(layout, data.ndim - 2)
    at = [i for i, letter in enumerate(letters) if letter not in "NC"]
    sizes = [data.shape[i] for i in at]
    axes = len(at)
    if not global_pool and len(kernel) != axes:
        raise ValueError(f"Pooling: kernel must have {axes} numbers, got {kernel}; write global_pool=True for all")
    if global_pool:
        kernel, stride, pad = tuple(sizes), (), ()
    stride, pad = _filled(stride, axes, 1), _filled(pad, axes, 0)
    window, strides, padding = [1] * data.ndim, [1] * data.ndim, [(0, 0)] * data.ndim
    beyond = False  # whether a window begins behind the padding, where nothing is
    full_padding = list(padding)  # with what a last, incomplete window reaches behind it
    for i, n, k, s, p in zip(at, sizes, kernel, stride, pad, strict=True):
        last = (_pooled(n, k, s, p, pooling_convention) - 1) * s
        window[i], strides[i], padding[i], beyond = k, s, (p, p), beyond or last >= n + p
        full_padding[i] = (p, max(p, last + k - n - p))

    def sums(x: jax.Array, around: list[tuple[int, int]]) -> jax.Array:
        return lax.reduce_window(x, 0.0, lax.add, window, strides, around)

    if pool_type == "max":
        out = lax.reduce_window(data, -jnp.inf, lax.max, window, strides, full_padding)
        return jnp.maximum(out, jnp.finfo(data.dtype).min) if beyond else out
    if pool_type == "lp":
        power = p_value or 2
        if power not in (1, 2, 3):
            raise ValueError(f"Pooling: p_value must be 1, 2 or 3, got {power}")
        total = sums(data**power, full_padding)  # as in MXNet, of signed values
        is_nonzero = total != 0  # as in MXNet, the gradient of a root of 0 is 0
        root = (jnp.sqrt, jnp.cbrt)[power - 2]
        return total if power == 1 else jnp.where(is_nonzero, root(jnp.where(is_nonzero, total, 1)), 0)
    if pool_type == "sum":
        return sums(data, full_padding)
    checks.choice(pool_type, "Pooling", "pool_type", ("max", "avg", "sum", "lp"))
    if full_padding == padding and (count_include_pad is not False or not any(pad)):
        return sums(data, full_padding) / math.prod(window)
    # What lies behind the padding, where only a last, incomplete window reaches, is not counted.
    ones = jnp.ones([data.shape[i] if i in at else 1 for i in range(data.ndim)], data.dtype)
    not_counted = full_padding
    if count_include_pad is not False:
        ones = jnp.pad(ones, padding, constant_values=1)
        not_counted = [(0, full - pad) for (_, full), (_, pad) in zip(full_padding, padding, strict=True)]
    return sums(data, full_padding) / jnp.maximum(sums(ones, not_counted), 1)


def pooling_v1(
    data: jax.Array,
    *,
    kernel: tuple[int, ...] = (),
    pool_type: str = "max",
    global_pool: bool = False,
    pooling_convention: str = "valid",
    stride: tuple[int, ...] = (),
    pad: tuple[int, ...] = (),
) -> jax.Array:
    """Pooling of MXNet before 0.12: the padding is zeros for a maximum too, and a mean is that of a whole window."""
    kernel, stride, pad = (data.shape[2:], (), ()) if global_pool else (kernel, stride, pad)
    data = jnp.pad(data, [(0, 0), (0, 0), *((p, p) for p in _filled(pad, len(kernel), 0))])
    kind = "sum" if pool_type == "avg" else pool_type
    out = pooling(data, kernel=kernel, pool_type=kind, pooling_convention=pooling_convention, stride=stride)
    return out / math.prod(kernel) if pool_type == "avg" else out


def _pooled(size: int, kernel: int, stride: int, pad: int, convention: str) -> int:
    """The length of an axis after pooling."""
    # MXNet 1.9.1 itself fails at "same".
    checks.choice(convention, "Pooling", "pooling_convention", ("valid", "full"))
    room = size + 2 * pad - kernel
    if room < 0:
        raise ValueError(f"Pooling: a kernel of {kernel} is larger than its input, {size} with a padding of {pad}")
    return 1 + (-(-room // stride) if convention == "full" else room // stride)


def dropout(
    data: jax.Array,
    *,
    p: float = 0.5,
    mode: str = "training",
    axes: tuple[int, ...] = (),
    train: bool,
    rng: jax.Array | None,
) -> jax.Array:
    checks.choice(mode, "Dropout", "mode", ("training", "always"))
    if not (train or mode == "always") or not p:
        return data
    shape = [1 if i in axes else n for i, n in enumerate(data.shape)]
    kept = jax.random.bernoulli(checks.random_key(rng, "Dropout"), 1 - p, shape)
    return jnp.where(kept, data / (1 - p), 0).astype(data.dtype)


def activation(data: jax.Array, *, act_type: str) -> jax.Array:
    return getattr(jax.nn, ACTIVATIONS[checks.choice(act_type, "Activation", "act_type", ACTIVATIONS)])(data)


def softmax_activation(data: jax.Array, *, mode: str = "instance") -> jax.Array:
    checks.choice(mode, "SoftmaxActivation", "mode", ("instance", "channel"))
    return jax.nn.softmax(data, 1 if mode == "channel" else -1)


def leaky_relu(
    data: jax.Array,
    gamma: jax.Array | None = None,
    *,
    act_type: str = "leaky",
    slope: float = 0.25,
    lower_bound: float = 0.125,
    upper_bound: float = 0.334,
    train: bool,
    rng: jax.Array | None,
) -> Any:
    if act_type == "gelu":
        return jax.nn.gelu(data, approximate=False)
    if act_type == "selu":
        return jax.nn.selu(data)
    if act_type == "elu":
        return jax.nn.elu(data, slope)
    # All others are a slope below 0: a number, one for each channel, or one that is drawn for each element.
    factor: Any = slope
    if act_type == "prelu" and gamma is not None:
        factor = gamma if gamma.ndim == data.ndim else per_channel(gamma, data, min(1, data.ndim - 1))
    elif act_type == "rrelu":
        factor = jnp.full_like(data, (lower_bound + upper_bound) / 2)
        if train:
            key = checks.random_key(rng, "LeakyReLU of type rrelu")
            factor = jax.random.uniform(key, data.shape, data.dtype, lower_bound, upper_bound)
    elif act_type != "leaky":
        raise ValueError(f"LeakyReLU: act_type {act_type!r} is unknown, or lacks its gamma")
    out = jnp.where(data > 0, data, factor * data)
    return (out, factor) if act_type == "rrelu" else out


def l2_normalization(data: jax.Array, *, eps: float = 1e-10, mode: str = "instance") -> jax.Array:
    axes = {"instance": range(1, data.ndim), "channel": (1,), "spatial": range(2, data.ndim)}
    summed = tuple(axes[checks.choice(mode, "L2Normalization", "mode", axes)])
    return data * lax.rsqrt(jnp.square(data).sum(summed, keepdims=True) + eps)


def lrn(data: jax.Array, *, nsize: int, alpha: float = 1e-4, beta: float = 0.75, knorm: float = 2.0) -> jax.Array:
    window = (1, nsize) + (1,) * (data.ndim - 2)
    padding = [(nsize // 2, nsize // 2) if i == 1 else (0, 0) for i in range(data.ndim)]
    near = lax.reduce_window(jnp.square(data), 0.0, lax.add, window, (1,) * data.ndim, padding)
    return data * (knorm + alpha / nsize * near) ** -beta


def _standardized(
    x: jax.Array, gamma: jax.Array, beta: jax.Array, eps: float, axes: tuple[int, ...], axis: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(values less their mean over their deviation, scaled and moved along an axis; mean; deviation) over `axes`.

    The mean and the deviation keep these axes, with a length of 1.
    """
    mean = x.mean(axes, keepdims=True)
    deviation = jnp.sqrt(x.var(axes, keepdims=True) + eps)
    out = (x - mean) / deviation * per_channel(gamma, x, axis) + per_channel(beta, x, axis)
    return out, mean, deviation


def layer_norm(
    data: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    output_mean_var: bool = False,
) -> Any:
    out, mean, deviation = _standardized(data, gamma, beta, eps, (axis,), axis)
    return (out, mean, deviation) if output_mean_var else out


def instance_norm(data: jax.Array, gamma: jax.Array, beta: jax.Array, *, eps: float = 1e-3) -> jax.Array:
    return _standardized(data, gamma, beta, eps, tuple(range(2, data.ndim)), 1)[0]


def group_norm(
    data: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    *,
    num_groups: int = 1,
    eps: float = 1e-5,
    output_mean_var: bool = False,
) -> Any:
    grouped = data.reshape(data.shape[0], num_groups, -1)  # (batch, groups, values)
    out, mean, deviation = _standardized(grouped, gamma, beta, eps, (2,), 1)
    out = out.reshape(data.shape)
    return (out, mean.squeeze(2), deviation.squeeze(2)) if output_mean_var else out


def up_sampling(
    data: jax.Array,
    weight: jax.Array | None = None,
    *more: jax.Array,
    scale: int,
    sample_type: str,
    num_filter: int = 0,
    num_args: int = 1,
    multi_input_mode: str = "concat",
) -> jax.Array:
    checks.choice(sample_type, "UpSampling", "sample_type", ("nearest", "bilinear"))
    checks.choice(multi_input_mode, "UpSampling", "multi_input_mode", ("concat", "sum"))
    if sample_type == "bilinear":
        if weight is None:
            raise ValueError("UpSampling: sample_type bilinear takes an image and a weight, got the image alone")
        return deconvolution(
            data,
            weight,
            kernel=(2 * scale - scale % 2,) * 2,
            num_filter=data.shape[1],
            stride=(scale, scale),
            pad=(math.ceil((scale - 1) / 2),) * 2,
            num_group=data.shape[1],
        )
    # All become as large as the first one does, whatever their own sizes. The second one is no weight then.
    height = data.shape[2] * scale
    images = [data, *([] if weight is None else [weight]), *more]
    grown = [x.repeat(height // x.shape[2], 2).repeat(height // x.shape[2], 3) for x in images]
    return sum(grown[1:], grown[0]) if multi_input_mode == "sum" else jnp.concatenate(grown, 1)


# Fused recurrent layers. Their weights are packed into one vector: first come the weights of all layers and directions,
# for each those from its input, those from its state and those of its projection, then the biases in the same order.


def parameter_count(
    mode: str, inputs: int, hidden: int, layers: int, directions: int, projection: int | None = None
) -> int:
    """The length of the vector of packed weights."""
    checks.choice(mode, "RNN", "mode", _GATES)
    checks.whole_number(hidden, "RNN", "state_size")
    checks.whole_number(layers, "RNN", "num_layers", most=_MOST_LAYERS)
    width = hidden if projection is None else projection  # of what a direction of a layer gives
    rows = _GATES[mode] * hidden * directions
    first, other = rows * (inputs + width + 2), rows * (width * directions + width + 2)
    return first + (layers - 1) * other + (0 if projection is None else layers * directions * width * hidden)


def _unpack(
    packed: jax.Array, gates: int, inputs: int, hidden: int, layers: int, directions: int, projection: int | None
) -> list[_Weights]:
    """The weights of each layer and direction."""
    rows, at = gates * hidden, 0
    weights: list[list[jax.Array]] = []
    width = hidden if projection is None else projection
    for layer in range(layers):
        from_input = width * directions if layer else inputs
        shapes = [(rows, from_input), (rows, width), *([] if projection is None else [(width, hidden)])]
        for _ in range(directions):
            matrices: list[jax.Array] = []
            for shape in shapes:
                matrices.append(packed[at : at + math.prod(shape)].reshape(shape))
                at += math.prod(shape)
            weights.append(matrices)
    biases = packed[at:].reshape(layers * directions, 2, rows)
    return [
        (matrices[0], matrices[1], bias[0], bias[1], None if projection is None else matrices[2])
        for matrices, bias in zip(weights, biases, strict=True)
    ]


def _cell(mode: str) -> Callable[[_Carry, jax.Array, jax.Array], _Carry]:
    """A function of the state and of what comes from input and state, to the new state."""

    def lstm(carry: _Carry, x: jax.Array, h: jax.Array) -> _Carry:
        into, forget, new, out = jnp.split(x + h, 4, 1)
        cell = jax.nn.sigmoid(forget) * carry[1] + jax.nn.sigmoid(into) * jnp.tanh(new)
        return jax.nn.sigmoid(out) * jnp.tanh(cell), cell

    def gru(carry: _Carry, x: jax.Array, h: jax.Array) -> _Carry:
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = jnp.split(x, 3, 1), jnp.split(h, 3, 1)
        update = jax.nn.sigmoid(update_x + update_h)
        new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
        return ((1 - update) * new + update * carry[0],)

    def plain(carry: _Carry, x: jax.Array, h: jax.Array) -> _Carry:
        return (jax.nn.relu(x + h) if mode == "rnn_relu" else jnp.tanh(x + h),)

    return {"lstm": lstm, "gru": gru}.get(mode, plain)


def rnn(
    data: jax.Array,
    parameters: jax.Array,
    state: jax.Array,
    state_cell: jax.Array | None = None,
    sequence_length: jax.Array | None = None,
    *,
    state_size: int,
    num_layers: int,
    mode: str,
    bidirectional: bool = False,
    p: float = 0.0,
    state_outputs: bool = False,
    projection_size: int | None = None,
    use_sequence_length: bool = False,
    lstm_state_clip_min: float | None = None,
    lstm_state_clip_max: float | None = None,
    train: bool,
    rng: jax.Array | None,
) -> Any:
    if lstm_state_clip_min is not None:
        raise ValueError("RNN: lstm_state_clip_min is not supported")
    if use_sequence_length and mode != "lstm":  # which has no cells: the lengths are the fourth array
        state_cell, sequence_length = None, state_cell
    if use_sequence_length and sequence_length is None:
        raise ValueError("RNN: use_sequence_length=True takes the lengths as the last array")
    if projection_size is not None and mode != "lstm":
        raise ValueError(f"RNN: projection_size is of mode lstm only, got mode {mode}")
    directions = 2 if bidirectional else 1
    _, batch, inputs = data.shape  # (steps, batch, features)
    expected = parameter_count(mode, inputs, state_size, num_layers, directions, projection_size)
    if parameters.shape != (expected,):
        raise ValueError(f"RNN: its packed weights must have the shape ({expected},), got {parameters.shape}")
    initial = [(state, projection_size or state_size)] + ([] if state_cell is None else [(state_cell, state_size)])
    # An exported network has zeros for states, of a batch that is that of the data. They are layer by layer, both
    # directions of each.
    states = [
        jnp.broadcast_to(array, (num_layers * directions, batch, width)).astype(data.dtype) for array, width in initial
    ]
    # As with cuDNN, a sequence is as long as its length says, in both directions. MXNet's CPU reads no lengths.
    steps = jnp.arange(data.shape[0])[:, None, None]
    is_within = None if sequence_length is None else steps < sequence_length[None, :, None]
    weights = _unpack(parameters, _GATES[mode], inputs, state_size, num_layers, directions, projection_size)
    x, last, cell = data, [[] for _ in states], _cell(mode)
    for layer in range(num_layers):
        if layer:  # between layers only, as in MXNet and cuDNN
            x = dropout(x, p=p, train=train, rng=None if rng is None else jax.random.fold_in(rng, layer))
        halves: list[jax.Array] = []
        for at in range(layer * directions, (layer + 1) * directions):
            out, end = _direction(cell, x, weights[at], tuple(s[at] for s in states), at % directions == 1, is_within)
            halves.append(out)
            for of_layers, value in zip(last, end, strict=True):
                of_layers.append(value)
        x = jnp.concatenate(halves, 2)
    return (x, *(jnp.stack(s) for s in last)) if state_outputs else x


def _direction(
    cell: Callable[[_Carry, jax.Array, jax.Array], _Carry],
    x: jax.Array,
    weights: _Weights,
    start: _Carry,
    reverse: bool,
    is_within: jax.Array | None,
) -> tuple[jax.Array, _Carry]:
    """One direction of one layer over all steps. A step behind the end of a sequence gives 0, and keeps the state."""
    from_input, from_state, input_bias, state_bias, projection = weights
    # The input of all steps in one product, (steps, batch, gates * hidden). Only that of the state is in the loop.
    projected = x @ from_input.T[None] + input_bias[None, None]

    def step(carry: _Carry, now: tuple[jax.Array, jax.Array | None]) -> tuple[_Carry, jax.Array]:
        from_data, within = now
        new = cell(carry, from_data, carry[0] @ from_state.T + state_bias[None])
        if projection is not None:
            new = (new[0] @ projection.T, *new[1:])
        if within is None:
            return new, new[0]
        kept = tuple(jnp.where(within, after, before) for after, before in zip(new, carry, strict=True))
        return kept, jnp.where(within, new[0], 0)

    end, out = lax.scan(step, start, (projected, is_within), reverse=reverse)
    return out, end
