"""Classifiers: the `eval_fn` of an `apply_fn` that gives logits, and whether labels are classes of the model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import data
from ..._core import checks
from ..._core.calls import check_takes
from ..._devices.user_mesh import outside_mesh
from .._step.loss import ClassificationLoss
from .._step.state import TrainState, params_shapes


@dataclasses.dataclass(frozen=True)
class Classification:
    """`eval_fn(params, batch) -> {"loss", "accuracy"}` of an `apply_fn`."""

    apply_fn: Callable[..., jax.Array]

    def __call__(self, params: Any, batch: Any, *model_state: Any) -> dict[str, jax.Array]:
        logits = check_logits(self.apply_fn(params, batch["image"], *model_state), len(batch["image"]))
        logits = logits.astype(jnp.float32)
        labels = batch["label"][:, None]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=1)[:, 0]
        return {"loss": losses, "accuracy": logits.argmax(axis=1) == labels[:, 0]}


def classification(apply_fn: Any, has_state: bool, where: str) -> Classification:
    """The `eval_fn` of a classifier. `TypeError` for an `apply_fn` that cannot be one."""
    names = ("params", "images", "model_state") if has_state else ("params", "images")
    hint = ", since the state has a model_state" if has_state else ""
    check_takes(apply_fn, names, f"{where}: apply_fn", hint)
    return Classification(checks.hashable(apply_fn, f"{where}: apply_fn"))


def check_logits(logits: Any, n: int) -> Any:
    """The logits. `ValueError` unless there is a row of them for each of n examples."""
    if not hasattr(logits, "shape") or len(logits.shape) != 2 or logits.shape[0] != n:
        raise ValueError(
            f"apply_fn: a classifier needs logits of shape (n, classes), got {checks.describe(logits)} for {n} images"
        )
    return logits


def check_classified(dataset: Any, where: str, hint: str = "") -> None:
    """`TypeError` unless this is a data set with one integer label per example. The hint is for other data."""
    if not isinstance(dataset, data.Dataset):
        raise TypeError(
            f"{where}: expected a data.Dataset, such as data.Dataset(images, labels) or data.collect(loader); "
            f"got {checks.describe(dataset)}{hint}"
        )
    checks.labels(dataset.labels, where)


def check_classes(where: str, apply_fn: Any, model: tuple[Any, ...], dataset: Any) -> None:
    """`ValueError` unless integer labels are classes of the model (params, *rest). Nothing is computed.

    JAX takes an index out of range as another one, or gives NaN, and no error. Of data other than a `data.Dataset` the
    labels are not known.
    """
    if isinstance(dataset, data.DatasetSource):
        dataset = dataset.dataset
    if not isinstance(dataset, data.Dataset) or not len(dataset) or dataset.labels.dtype.kind not in "iu":
        return
    low, high = int(np.min(dataset.labels)), int(np.max(dataset.labels))
    count = _classes(apply_fn, model, dataset)
    if count is not None and (low < 0 or high >= count):
        raise ValueError(
            f"{where}: the model has {count} classes, but labels from {low} to {high}; give labels 0 to {count - 1}"
        )


def check_training_classes(step: Any, state: TrainState, train_data: Any) -> None:
    """The same for the training data of a step whose loss is that of `train.classification_loss`.

    The state may be donated.
    """
    loss_fn = getattr(step, "loss_fn", None)
    if isinstance(loss_fn, ClassificationLoss):
        check_classes("fit: train_data", loss_fn.apply_fn, (params_shapes(state),), train_data)


def _classes(apply_fn: Any, model: tuple[Any, ...], dataset: data.Dataset) -> int | None:
    """The number of classes. None where it cannot be known: what is wrong then is said where `apply_fn` is called."""
    params, *rest = model
    image = jax.ShapeDtypeStruct((1, *dataset.images.shape[1:]), jnp.float32)
    with contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else outside_mesh():
        try:
            shape = tuple(jax.eval_shape(apply_fn, params, image, *rest).shape)
        except Exception:
            return None
    return shape[-1] if shape[:-1] == (1, *dataset.labels.shape[1:]) else None
