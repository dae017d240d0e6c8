"""The loss of a classifier, as the training step takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..._core import checks
from ..._core.calls import answers


@dataclasses.dataclass(frozen=True)
class ClassificationLoss:
    """What `classification_loss` gives.

    Attributes:
        apply_fn: as given.
    """

    apply_fn: Callable[[Any, jax.Array], jax.Array]
    label_smoothing: float

    def __call__(self, params: Any, batch: dict[str, jax.Array], rng: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        del rng
        if not isinstance(batch, dict) or not {"image", "label"} <= batch.keys():
            raise TypeError(
                'classification_loss: a batch must be a dict with "image" and "label", as data.batches makes them; got '
                f"{sorted(batch) if isinstance(batch, dict) else checks.describe(batch)}; for other batches write a "
                "loss_fn(params, batch, rng) -> (loss, aux) yourself"
            )
        checks.labels(batch["label"], "classification_loss")
        logits = self.apply_fn(params, batch["image"]).astype(jnp.float32)
        labels = batch["label"][:, None]
        accuracy = (logits.argmax(axis=1) == labels[:, 0]).mean()
        return self._losses(logits, labels).mean(), {"accuracy": accuracy}

    def _losses(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        if not self.label_smoothing:
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=1)
        from optax import losses

        targets = jax.nn.one_hot(labels[:, 0], logits.shape[1], dtype=logits.dtype)
        return losses.softmax_cross_entropy(logits, losses.smooth_labels(targets, self.label_smoothing))


@answers("classification_loss")
def classification_loss(
    apply_fn: Callable[[Any, jax.Array], jax.Array],
    label_smoothing: float = 0.0,
) -> Callable[[Any, dict[str, jax.Array], jax.Array], tuple[jax.Array, dict[str, Any]]]:
    """A `loss_fn` for `make_train_step`: mean cross-entropy of the logits, and the accuracy.

    Args:
        apply_fn: `apply_fn(params, images) -> logits` of shape (n, classes).
        label_smoothing: how much of each target is spread evenly over all classes, from 0 and below 1. The accuracy,
            and what `evaluate` gives, are without it.

    Returns:
        `loss_fn(params, batch, rng) -> (loss, {"accuracy"})` for batches `{"image", "label"}` with integer
        labels. The loss is in nats per example.

    Raises:
        TypeError: `apply_fn` is no function, a `label_smoothing` that is no number.
        ValueError: a `label_smoothing` out of range.

    Example:
        >>> from jaxpar import models, train
        >>> loss_fn = train.classification_loss(models.lenet.apply)
        >>> batch = {"image": jnp.zeros((2, 28, 28, 1)), "label": jnp.array([3, 5])}
        >>> loss, aux = loss_fn(models.lenet.init(jax.random.key(0)), batch, jax.random.key(1))
        >>> round(float(loss), 3)
        2.303
    """
    if not callable(apply_fn):
        given = checks.describe(apply_fn)
        raise TypeError(f"classification_loss: expected the function apply_fn(params, images) itself; got {given}")
    smoothing = checks.number(
        label_smoothing,
        "classification_loss",
        "label_smoothing",
        "a number from 0 and below 1",
        lambda value: 0 <= value < 1,
    )
    return ClassificationLoss(apply_fn, smoothing)
