"""Metrics for an `eval_fn`: values per example, and means with a weight or a last function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core import checks
from ..._core.calls import answers
from .._step.loss import Mean, wide


@answers("accuracy")
def accuracy(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array | Mean:
    """Whether the label has the largest logit, for each example.

    Args:
        logits: (n, ..., classes), such as (n, tokens, classes) for sequences.
        labels: integers (n, ...).
        mask: (n, ...), True for labels that count, or weights. None: all labels count.

    Returns:
        float32 (n,), the fraction of correct labels in each example. With a mask, the score is the mean over all labels
        that count.

    Raises:
        ValueError: the shape of labels or mask is wrong.
        TypeError: labels are not integers.

    Example:
        >>> accuracy(jnp.array([[1.0, 3.0], [2.0, 0.0]]), jnp.array([1, 1])).tolist()
        [1.0, 0.0]
    """
    _check_labels(logits, labels, "accuracy")
    return _mean(logits.argmax(axis=-1) == labels, mask, "accuracy")


@answers("top_k")
def top_k(logits: jax.Array, labels: jax.Array, k: int, mask: jax.Array | None = None) -> jax.Array | Mean:
    """Whether the logit of the label is among the k largest, for each example.

    Args:
        logits, labels, mask: as in `accuracy`.
        k: from 1 to the number of classes. `top_k(..., 1)` equals `accuracy`.

    Returns:
        As `accuracy`.

    Raises:
        ValueError: k is out of range, or the shape of labels or mask is wrong.
        TypeError: labels are not integers.

    Example:
        >>> top_k(jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), jnp.array([1, 2]), 2).tolist()
        [1.0, 0.0]
    """
    _check_labels(logits, labels, "top_k")
    if checks.whole_number(k, "top_k", "k") > logits.shape[-1]:
        raise ValueError(f"top_k: k must be at most the number of classes, {logits.shape[-1]}, got {k}")
    best = lax.top_k(logits, k)[1]
    return _mean((best == labels[..., None]).any(axis=-1), mask, "top_k")


@answers("cross_entropy")
def cross_entropy(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array | Mean:
    """The cross-entropy of the softmax of logits in nats, for each example.

    Args:
        logits, labels, mask: as in `accuracy`.

    Returns:
        float32 (n,), the mean over the labels of each example. With a mask, the score is the mean over all labels that
        count.

    Raises:
        ValueError, TypeError: as `accuracy`.

    Example:
        >>> round(float(cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0]), 3)
        1.386
    """
    return _mean(_nats(logits, labels, "cross_entropy"), mask, "cross_entropy")


@answers("perplexity")
def perplexity(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> Mean:
    """The exponential of the mean cross-entropy over all labels.

    Args:
        logits, labels, mask: as in `accuracy`. Labels are usually tokens.

    Returns:
        A `Mean` that takes the exponential after the last batch.

    Raises:
        ValueError, TypeError: as `accuracy`.

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
    weight = jnp.ones_like(nats) if mask is None else _mask(mask, nats, "perplexity")
    return Mean(_weighted(nats, weight), weight, np.exp)


@answers("mean_squared_error")
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
    error = jnp.asarray(predictions, wide(predictions)) - jnp.asarray(targets, wide(targets))
    return _mean(error**2, mask, "mean_squared_error")


@answers("per_class_accuracy")
def per_class_accuracy(logits: jax.Array, labels: jax.Array) -> Mean:
    """The recall of each class: the fraction of its examples classified correctly.

    Args:
        logits: (n, classes).
        labels: integers (n,).

    Returns:
        A `Mean` with one column for each class. `evaluate` returns an array (classes,), NaN for a class without
        examples. Records of `fit` have `eval_<name>/0`, `eval_<name>/1`, ...

    Raises:
        ValueError, TypeError: as `accuracy`.

    Example:
        >>> from jaxpar import train
        >>> def eval_fn(params, batch):
        ...     return {"recall": train.per_class_accuracy(batch["image"], batch["label"])}
        >>> points = {"image": np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], "label": np.array([0, 1, 2, 1])}
        >>> train.evaluate({}, data=points, eval_fn=eval_fn)["recall"].tolist()
        [1.0, 0.5, 1.0]
    """
    _check_labels(logits, labels, "per_class_accuracy")
    if jnp.ndim(labels) != 1:
        raise ValueError(f"per_class_accuracy: labels must be of shape (n,), got {jnp.shape(labels)}")
    of_class = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
    right = (logits.argmax(axis=-1) == labels)[:, None]
    return Mean(of_class * right, of_class, columns=True)


def _check_labels(logits: Any, labels: Any, where: str) -> None:
    """Errors unless there is one integer label for each row of logits."""
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise TypeError(f"{where}: labels must be integers, got {checks.describe(labels)}")
    if jnp.ndim(logits) < 2 or jnp.shape(logits)[:-1] != jnp.shape(labels):
        raise ValueError(
            f"{where}: expected logits (n, ..., classes) and labels (n, ...), got logits {jnp.shape(logits)} and "
            f"labels {jnp.shape(labels)}"
        )


def _nats(logits: Any, labels: Any, where: str) -> jax.Array:
    from optax import losses

    _check_labels(logits, labels, where)
    return losses.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits, wide(logits)), labels)


def _mean(values: jax.Array, mask: Any, where: str) -> jax.Array | Mean:
    """One value for each example, or the mean over what counts."""
    values = values.astype(wide(values))
    if mask is None:
        return values.mean(axis=tuple(range(1, values.ndim)))
    weight = _mask(mask, values, where)
    return Mean(_weighted(values, weight), weight)


def _mask(mask: Any, values: jax.Array, where: str) -> jax.Array:
    if jnp.shape(mask) != values.shape:
        raise ValueError(f"{where}: the mask must be of shape {values.shape}, got {jnp.shape(mask)}")
    return jnp.asarray(mask, wide(mask))


def _weighted(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Values times weights. What does not count may be NaN."""
    return jnp.where(weight == 0, 0, values * weight)
