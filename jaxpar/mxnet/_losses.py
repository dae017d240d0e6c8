"""The loss layers of MXNet's symbols. They give predictions forward; backward, the gradient of a loss of their own.

Except for `SoftmaxOutput` with `out_grad`, they ignore the gradient of what comes after them. So the gradient of the
sum of a network's outputs is the gradient with which MXNet trains it. Without a label they are plain functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._core import checks


def _with_gradient(
    forward: Callable[[jax.Array], jax.Array],
    backward: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    data: jax.Array,
    label: jax.Array | None,
) -> jax.Array:
    """`forward(data)`, with the gradient `backward(output, label, gradient of the output)` if there is a label."""
    if label is None:
        return forward(data)

    @jax.custom_vjp
    def layer(data: jax.Array, label: jax.Array) -> jax.Array:
        return forward(data)

    def fwd(data: jax.Array, label: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out = forward(data)
        return out, (out, label)

    def bwd(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
        out, label = residuals
        return backward(out, label, gradient).reshape(out.shape).astype(out.dtype), None  # no gradient of the label

    layer.defvjp(fwd, bwd)
    return layer(data, label)


def softmax_output(
    data: jax.Array,
    label: jax.Array | None = None,
    *,
    grad_scale: float = 1.0,
    ignore_label: float = -1.0,
    multi_output: bool = False,
    use_ignore: bool = False,
    preserve_shape: bool = False,
    normalization: str = "null",
    out_grad: bool = False,
    smooth_alpha: float = 0.0,
) -> jax.Array:
    checks.choice(normalization, "SoftmaxOutput", "normalization", ("null", "batch", "valid"))
    rows = (data.shape[0], math.prod(data.shape[1:]), 1)  # of the batch, of classes, and places in an image
    if multi_output:
        rows = (data.shape[0], data.shape[1], math.prod(data.shape[2:]))
    elif preserve_shape:
        rows = (math.prod(data.shape[:-1]), data.shape[-1], 1)

    def forward(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x, 1 if multi_output else -1 if preserve_shape else tuple(range(1, x.ndim)))

    def backward(out: jax.Array, label: jax.Array, gradient: jax.Array) -> jax.Array:
        if label.shape == out.shape:  # a probability of each class
            return (out - label) * grad_scale
        # The gradient of the cross-entropy by the scores is the prediction less the target.
        y = out.reshape(rows)  # (batch, classes, places)
        label = label.reshape(rows[0], rows[2])  # (batch, places)
        classes = label.astype(jnp.int32)
        hit = jax.nn.one_hot(classes, rows[1], axis=1, dtype=y.dtype)
        smooth = smooth_alpha / max(rows[1] - 1, 1)
        grads = y - jnp.where(hit > 0, 1 - smooth_alpha, smooth) if smooth_alpha else y - hit
        ignored = classes == int(ignore_label)
        if use_ignore:
            grads = jnp.where(jnp.expand_dims(ignored, 1), 0, grads)
        # As MXNet divides: "null" of an image by its places, "batch" by the examples too, "valid" by the labels that
        # are not ignored, and by these alone.
        count = label.shape[0] if normalization == "batch" else 1
        if normalization == "valid":
            count = jnp.maximum((~ignored).sum(), 1).astype(y.dtype)
        elif multi_output:
            count = count * rows[2]
        grads = grads * (grad_scale / count)
        return grads.reshape(out.shape) * gradient if out_grad else grads

    return _with_gradient(forward, backward, data, label)


def _regression(
    forward: Callable[[jax.Array], jax.Array], slope: Callable[[jax.Array], jax.Array]
) -> Callable[..., jax.Array]:
    def layer(data: jax.Array, label: jax.Array | None = None, *, grad_scale: float = 1.0) -> jax.Array:
        def backward(out: jax.Array, label: jax.Array, gradient: jax.Array) -> jax.Array:
            outputs = max(label.size // label.shape[0], 1)  # a mean over what belongs to one example
            return slope(out - label.reshape(out.shape)) * (grad_scale / outputs)

        return _with_gradient(forward, backward, data, label)

    return layer


def _same(x: jax.Array) -> jax.Array:
    return x


linear_regression = _regression(_same, _same)
logistic_regression = _regression(jax.nn.sigmoid, _same)
mae_regression = _regression(_same, jnp.sign)


def make_loss(
    data: jax.Array, *, grad_scale: float = 1.0, valid_thresh: float = 0.0, normalization: str = "null"
) -> jax.Array:
    """The data, whose gradient is `grad_scale` everywhere."""
    checks.choice(normalization, "MakeLoss", "normalization", ("null", "batch", "valid"))

    def backward(out: jax.Array, label: jax.Array, gradient: jax.Array) -> jax.Array:
        count = {"null": 1, "batch": out.shape[0] if out.ndim else 1}.get(normalization)
        if count is None:
            count = jnp.maximum((out > valid_thresh).sum(), 1).astype(out.dtype)
        return jnp.ones_like(out) * (grad_scale / count)

    return _with_gradient(_same, backward, data, jnp.zeros(()))


def with_sparse_activations(
    data: jax.Array,
    moving_avg: jax.Array,
    *,
    sparseness_target: float = 0.1,
    penalty: float = 1e-3,
    momentum: float = 0.9,
    train: bool,
) -> tuple[jax.Array, tuple[jax.Array]]:
    """The data (batch, features), with the gradient of a penalty too: the divergence of a mean from its target."""
    if not train:
        return data, (moving_avg,)
    mean = momentum * moving_avg + (1 - momentum) * jax.lax.stop_gradient(data).mean(0)
    slope = penalty * ((1 - sparseness_target) / (1 - mean) - sparseness_target / mean)
    # As in MXNet, the penalty counts whatever the gradient of the output is.
    return _with_gradient(_same, lambda out, slope, gradient: gradient + slope[None], data, slope), (mean,)


def softmax_cross_entropy(data: jax.Array, label: jax.Array) -> jax.Array:
    """The sum over the batch, as an array of one number."""
    rows = jax.nn.log_softmax(data, -1)
    return -jnp.take_along_axis(rows, label.astype(jnp.int32)[:, None], 1, mode="clip").sum().reshape(1)


def svm_output(
    data: jax.Array,
    label: jax.Array | None = None,
    *,
    margin: float = 1.0,
    regularization_coefficient: float = 1.0,
    use_linear: bool = False,
) -> jax.Array:
    """Scores, with the gradient of a hinge loss of each class, or of its square."""

    def backward(out: jax.Array, label: jax.Array, gradient: jax.Array) -> jax.Array:
        sign = jnp.where(jax.nn.one_hot(label.astype(jnp.int32), out.shape[1]) > 0, -1, 1)
        missing = jnp.maximum(margin + sign * out, 0)  # to the margin, of the own class and of the others
        slope = jnp.where(missing > 0, 1, 0) if use_linear else 2 * missing
        return regularization_coefficient * sign * slope

    return _with_gradient(_same, backward, data, label)


def ctc_loss(
    data: jax.Array,
    label: jax.Array,
    data_lengths: jax.Array | None = None,
    label_lengths: jax.Array | None = None,
    *,
    use_data_lengths: bool = False,
    use_label_lengths: bool = False,
    blank_label: str = "first",
) -> jax.Array:
    """The loss of each sequence of (steps, batch, classes), which are no probabilities yet. Labels are (batch, labels).

    Without lengths the first 0 ends a label where the blank is class 0, and the first -1 where it is the last class.
    """
    checks.choice(blank_label, "CTCLoss", "blank_label", ("first", "last"))
    if use_label_lengths and not use_data_lengths:
        label_lengths = data_lengths  # it is the third array then
    steps, _, classes = data.shape
    label = label.astype(jnp.int32)
    if use_label_lengths and label_lengths is not None:
        is_label = jnp.arange(label.shape[1])[None] < label_lengths[:, None]
    else:
        is_label = jnp.cumprod(label != (0 if blank_label == "first" else -1), 1) > 0
    is_step = jnp.ones((data.shape[1], steps), bool)
    if use_data_lengths and data_lengths is not None:
        is_step = jnp.arange(steps)[None] < data_lengths[:, None]
    import optax  # `import jaxpar` loads nothing but jax

    losses = optax.ctc_loss(
        data.swapaxes(0, 1).astype(jnp.float32),
        (~is_step).astype(jnp.float32),
        jnp.where(is_label, label, 0),
        (~is_label).astype(jnp.float32),
        blank_id=0 if blank_label == "first" else classes - 1,
    )
    # As in MXNet, a label that is too long for its steps has no loss, and no gradient.
    repeats = ((label[:, 1:] == label[:, :-1]) & is_label[:, 1:]).sum(1)
    is_possible = is_label.sum(1) + repeats <= is_step.sum(1)
    return jnp.where(is_possible, losses, 0).astype(data.dtype)


def hawkes_log_likelihood(
    lda: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lags: jax.Array,
    marks: jax.Array,
    valid_length: jax.Array,
    max_time: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The log-likelihood (batch,) of sequences of events of processes that excite themselves, and their new states.

    `lda` (batch, marks) are rates without excitement, `alpha` and `beta` (marks,) how an event excites and how that
    decays, `state` (batch, marks) the excitement at the beginning. `lags` and `marks` (batch, events) are times since
    the event before and kinds of events. As many as `valid_length` (batch,) count, until the time `max_time` (batch,).
    """

    def of_sequence(
        rates: jax.Array, state: jax.Array, lags: jax.Array, marks: jax.Array, length: jax.Array, end: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def event(carry: tuple[jax.Array, ...], now: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
            likelihood, time, last, state = carry  # `last` (marks,): the time of the last event of each kind
            number, lag, mark = now
            is_event = number < length
            new_time = time + lag
            since = new_time - last[mark]
            decay = jnp.exp(-beta[mark] * since)
            rate = rates[mark] + alpha[mark] * beta[mark] * state[mark] * decay
            expected = rates[mark] * since + alpha[mark] * state[mark] * (1 - decay)
            # What stands behind the last event may have no logarithm, whose gradient would be NaN.
            likelihood += jnp.where(is_event, jnp.log(jnp.where(is_event, rate, 1)) - expected, 0)
            state = jnp.where(is_event, state.at[mark].set(1 + state[mark] * decay), state)
            last = jnp.where(is_event, last.at[mark].set(new_time), last)
            return (likelihood, jnp.where(is_event, new_time, time), last, state), None

        start = jnp.zeros((), lda.dtype), jnp.zeros((), lda.dtype), jnp.zeros_like(rates), state
        events = jnp.arange(len(lags)), lags, marks.astype(jnp.int32)
        (likelihood, _, last, state), _ = jax.lax.scan(event, start, events)
        decay = jnp.exp(-beta * (end - last))
        return likelihood - (rates * (end - last) + alpha * state * (1 - decay)).sum(), decay * state

    return jax.vmap(of_sequence)(lda, state, lags, marks, valid_length, max_time)
