"""Whether the labels of a data set are classes of a model, known before any work."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import data
from ..._core.recent import Recent
from ..._devices.user_mesh import outside_mesh
from .._step.loss import ClassificationLoss
from .._step.state import TrainState, params_shapes


def check_classes(where: str, apply_fn: Any, model: tuple[Any, ...], dataset: Any) -> None:
    """Check that integer labels are classes of the model. Nothing is computed.

    JAX takes an index out of range as another one, or gives NaN, and no error.

    Args:
        where: the words that the message begins with.
        apply_fn: `apply_fn(params, images, *rest) -> logits`, which is traced only.
        model: (params, *rest), arrays or their shapes.
        dataset: a `data.Dataset`. Of any other data the labels are not known.

    Raises:
        ValueError: a label is below 0, or the model has no such class.
    """
    if isinstance(dataset, data.DatasetSource):
        dataset = dataset.dataset
    if not isinstance(dataset, data.Dataset) or not len(dataset) or dataset.labels.dtype.kind not in "iu":
        return
    low, high = int(np.min(dataset.labels)), int(np.max(dataset.labels))
    count = _classes(apply_fn, model, dataset)
    if count is not None and (low < 0 or high >= count):
        raise ValueError(
            f"{where}: the model has {count} classes, the labels run from {low} to {high}; labels are 0 to {count - 1}"
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
    leaves, structure = jax.tree.flatten(model)
    types = tuple((np.shape(leaf), getattr(leaf, "dtype", np.result_type(type(leaf)))) for leaf in leaves)
    with contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else outside_mesh():
        shape = _logits(apply_fn, structure, types, dataset.images.shape[1:])
    return shape[-1] if shape[:-1] == (1, *dataset.labels.shape[1:]) else None


def _trace(apply_fn: Any, structure: Any, types: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the logits of one image. () where they are no array."""
    params, *rest = structure.unflatten([jax.ShapeDtypeStruct(*each) for each in types])
    try:
        return tuple(jax.eval_shape(apply_fn, params, jax.ShapeDtypeStruct((1, *shape), jnp.float32), *rest).shape)
    except Exception:
        return ()


_logits = Recent(_trace)
