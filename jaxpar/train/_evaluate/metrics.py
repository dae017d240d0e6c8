"""Metrics for an `eval_fn`, the values that it may return, and their sums over a batch.

A value is one number for each example, a pair (sum, weight), a `Mean`, or an object with `merge` and `compute`, as the
metrics of clu and metrax are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core import checks
from ..._core.arrays import PyTree
from .._step.loss import Mean, by_name, widen


def accuracy(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array | Mean:
    """Whether the label has the largest logit, for each example.

    Args:
        logits: (n, ..., classes), of two classes or more, such as (n, tokens, classes) for sequences.
        labels: integers (n, ...).
        mask: (n, ...), True for labels that count, or weights. None: all labels count.

    Returns:
        float32 (n,), the fraction of correct labels in each example. With a mask, the score is the mean over all labels
        that count.

    Raises:
        ValueError, TypeError: the shape of labels or mask is wrong, or labels are not integers.

    Example:
        >>> accuracy(jnp.array([[1.0, 3.0], [2.0, 0.0]]), jnp.array([1, 1])).tolist()
        [1.0, 0.0]
    """
    _check_labels(logits, labels, "accuracy")
    return _mean(logits.argmax(axis=-1) == labels, mask, "accuracy")


def top_k(logits: jax.Array, labels: jax.Array, k: int, mask: jax.Array | None = None) -> jax.Array | Mean:
    """Whether the logit of the label is among the k largest, for each example.

    Args:
        logits, labels, mask: as in `accuracy`, with its errors.
        k: from 1 to the number of classes. `top_k(..., 1)` equals `accuracy`.

    Returns:
        As `accuracy`.

    Raises:
        ValueError: k is out of range.

    Example:
        >>> top_k(jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), jnp.array([1, 2]), 2).tolist()
        [1.0, 0.0]
    """
    _check_labels(logits, labels, "top_k")
    best = lax.top_k(logits, checks.whole_number(k, "top_k", "k"))[1]
    return _mean((best == labels[..., None]).any(axis=-1), mask, "top_k")


def cross_entropy(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array | Mean:
    """The cross-entropy of the softmax of logits in nats, for each example.

    Args:
        logits, labels, mask: as in `accuracy`, with its errors.

    Returns:
        float32 (n,), the mean over the labels of each example. With a mask, the score is the mean over all labels that
        count. A label that is no class, such as -1 for "none", gives NaN unless the mask leaves it out.

    Example:
        >>> round(float(cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0]), 3)
        1.386
    """
    return _mean(_nats(logits, labels, "cross_entropy"), mask, "cross_entropy")


def perplexity(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> Mean:
    """The exponential of the mean cross-entropy over all labels.

    Args:
        logits, labels, mask: as in `accuracy`, with its errors. Labels are usually tokens.

    Returns:
        A `Mean` that takes the exponential after the last batch.

    Example:
        >>> from jaxpar import train
        >>> def eval_fn(params, batch):
        ...     return {"perplexity": train.perplexity(params[batch["x"]], batch["y"])}
        >>> tokens = {"x": np.zeros((6, 5), int), "y": np.ones((6, 5), int)}
        >>> scores = train.evaluate(np.zeros((3, 8), np.float32), data=tokens, eval_fn=eval_fn)
        >>> round(scores["perplexity"], 3)
        8.0
    """
    nats = _nats(logits, labels, "perplexity")
    mean = _weighted(nats, jnp.ones_like(nats) if mask is None else mask, "perplexity")
    return Mean(mean.total, mean.weight, np.exp)


def mean_squared_error(predictions: jax.Array, targets: jax.Array, mask: jax.Array | None = None) -> jax.Array | Mean:
    """The squared error of predictions, for each example.

    Args:
        predictions, targets: (n, ...), of the same shape.
        mask: (n, ...), True for entries that count, or weights. None: all entries count.

    Returns:
        float32 (n,), the mean over all axes after the first. With a mask, the score is the mean over all entries that
        count.

    Raises:
        ValueError: the shapes differ. They are not broadcast.

    Example:
        >>> mean_squared_error(jnp.array([[1.0, 2.0], [3.0, 5.0]]), jnp.array([[1.0, 0.0], [3.0, 4.0]])).tolist()
        [2.0, 0.5]
    """
    if jnp.shape(predictions) != jnp.shape(targets):
        raise ValueError(
            f"mean_squared_error: predictions {jnp.shape(predictions)} and targets {jnp.shape(targets)} must be of one "
            "shape; drop an axis of length 1 by predictions[:, 0], or add one by targets[:, None]"
        )
    error = widen(predictions) - widen(targets)
    return _mean(error**2, mask, "mean_squared_error")


def per_class_accuracy(logits: jax.Array, labels: jax.Array) -> Mean:
    """The recall of each class: the fraction of its examples classified correctly.

    Args:
        logits: (n, classes).
        labels: integers (n,). Other labels are errors as of `accuracy`.

    Returns:
        A `Mean` with one column for each class. `evaluate` returns an array (classes,), NaN for a class without
        examples. Records of `fit` have `eval_<name>/0`, `eval_<name>/1`, ...

    Example:
        >>> from jaxpar import train
        >>> def eval_fn(params, batch):
        ...     return {"recall": train.per_class_accuracy(batch["image"], batch["label"])}
        >>> points = {"image": np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], "label": np.array([0, 1, 2, 1])}
        >>> train.evaluate({}, data=points, eval_fn=eval_fn)["recall"].tolist()
        [1.0, 0.5, 1.0]
    """
    _check_labels(logits, labels, "per_class_accuracy")
    of_class = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)  # (n, classes)
    right = (logits.argmax(axis=-1) == labels)[:, None]
    return Mean(of_class * right, of_class, columns=True)


def _check_labels(logits: jax.Array, labels: jax.Array, caller: str) -> None:
    """Errors unless there is one integer label for each row of logits."""
    shape, of_labels = jnp.shape(logits), jnp.shape(labels)
    is_integer = jnp.issubdtype(jnp.result_type(labels), jnp.integer)
    hint = ""
    # The largest of one logit is always the first.
    is_one = len(shape) == 1 or shape[-1:] == (1,)
    if is_one:
        logit = "logits" if len(shape) == 1 else "logits[..., 0]"
        hint = f"; of one logit an example the classes are 0 and 1, write ({logit} > 0) == labels"
    elif len(shape) > 1 and of_labels == shape:
        hint = "; turn one-hot labels into integers by labels.argmax(-1)"
    elif len(shape) > 1 and of_labels == (*shape[:-1], 1):
        hint = "; drop the axis of length 1 by labels[..., 0]"
    elif not is_integer:
        hint = "; make floating class numbers integers by labels.astype(int)"
    if not is_integer:
        raise TypeError(f"{caller}: labels must be integers, got {checks.describe(labels)}{hint}")
    if is_one or len(shape) < 2 or shape[:-1] != of_labels:
        raise ValueError(
            f"{caller}: expected logits (n, ..., classes) and labels (n, ...), got logits {shape} and labels "
            f"{of_labels}{hint}"
        )


def _nats(logits: jax.Array, labels: jax.Array, caller: str) -> jax.Array:
    from optax import losses

    _check_labels(logits, labels, caller)
    nats = losses.softmax_cross_entropy_with_integer_labels(widen(logits), labels)  # NaN for a label that is too large
    return jnp.where(labels < 0, jnp.nan, nats)  # -1 would be the last class


def _mean(values: jax.Array, mask: jax.Array | None, caller: str) -> jax.Array | Mean:
    """One value for each example, or the mean over what counts."""
    values = widen(values)
    return values.mean(axis=tuple(range(1, values.ndim))) if mask is None else _weighted(values, mask, caller)


def _weighted(values: jax.Array, mask: jax.Array, caller: str) -> Mean:
    """The mean over what counts. What does not count may be NaN."""
    if jnp.shape(mask) != values.shape:
        raise ValueError(f"{caller}: the mask must be of shape {values.shape}, got {jnp.shape(mask)}")
    weight = widen(mask)
    return Mean(jnp.where(weight == 0, 0, values * weight), weight)


# What an `eval_fn` returns.


class ValuesError(ValueError):
    """An `eval_fn` returned an array that does not have one value for each example."""


_WANTED = (
    "return the values of the examples, of shape (n,), or a pair (sum, weight), or a metric with merge and compute"
)


def as_values(returned: PyTree, n: int) -> dict[str, Any]:
    """What an `eval_fn` returned for n examples, with a `Mean` or a metric for each name."""
    # A metric in place of the dict has the name "". Its `compute` gives the dict.
    if _is_metric(returned):
        return {"": returned}
    if not isinstance(returned, Mapping):
        raise TypeError(f"eval_fn must return a dict {{name: values}}, got {checks.describe(returned)}")
    values = by_name(returned, is_leaf=lambda x: _is_metric(x) or not isinstance(x, Mapping))
    return {name: _as_value(value, n, f"eval_fn: {name!r}") for name, value in values.items()}


def sum_up(value: PyTree) -> PyTree:
    """A `Mean` of sums over the examples, in float32 or wider. A metric stays as it is."""
    if not isinstance(value, Mean):
        return jax.tree.map(jnp.asarray, value)
    return jax.tree.map(lambda rows: widen(rows).sum(axis=0 if value.columns else None), value)


def _is_metric(value: object) -> bool:
    return callable(getattr(value, "merge", None)) and callable(getattr(value, "compute", None))


def _as_value(value: PyTree, n: int, caller: str) -> PyTree:
    """A `Mean` of arrays, of which both have a row for each example or none has; or a metric as it is."""
    if _is_metric(value):
        return value
    if isinstance(value, (tuple, list)):
        if len(value) != 2:  # a third would be taken as the final function of a `Mean`
            raise ValuesError(f"{caller} is a {type(value).__name__} of {len(value)}; {_WANTED}")
        total, weight = value
        value = Mean(total, weight)

    # One value for each example.
    if not isinstance(value, Mean):
        array = _array(value, caller)
        if array.shape == (n,):
            return Mean(array, jnp.ones(n, jnp.float32))
        advice = _WANTED
        if not array.ndim:
            advice = f"a mean over the batch cannot be averaged exactly; leave out the mean; {_WANTED}"
        elif array.shape[:1] == (n,):
            advice = f"take the mean over the other axes, or give the pair (values, ones_like(values)); {_WANTED}"
        raise ValuesError(f"{caller} has shape {array.shape} for {n} examples; {advice}")

    # A sum and a weight. Were only one of them a scalar, it would count once a batch, and the other for each example.
    total, weight = (_array(array, caller) for array in (value.total, value.weight))
    rows = total.shape == weight.shape and total.shape[:1] == (n,)
    if value.columns and not (rows and total.ndim == 2):
        raise ValuesError(f"{caller}: columns need totals and weights (n, k), got {total.shape} and {weight.shape}")
    if not rows and (total.ndim or weight.ndim):
        raise ValuesError(
            f"{caller}: the sum has shape {total.shape} and the weight {weight.shape} for {n} examples; return both "
            "with a row for each example, or both as scalars"
        )
    return Mean(total, weight, value.finish, value.columns)


def _array(value: PyTree, caller: str) -> jax.Array:
    array = jnp.asarray(value)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_) or jnp.iscomplexobj(array):
        raise TypeError(f"{caller}: expected real numbers, got {checks.describe(array)}")
    return array
