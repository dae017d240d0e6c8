"""What a classifier says about every example of a data set: the confusion matrix, and where it is wrong."""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from ... import data
from ..._core import checks
from ..._core.recent import Recent
from ..._devices.emulated import wait_before_collectives
from ..._devices.placement import put
from .._step.state import TrainState
from . import evaluate

ApplyFn = Callable[[Any, jax.Array], jax.Array]
_MOST = 10


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mistakes:
    """Examples that a classifier gets wrong, the one that it is most certain of first.

    Attributes:
        indices: int64 (n,), their places in the data set.
        predicted: int32 (n,), the classes it says.
        labels: int32 (n,), the classes they are of.
        probabilities: float32 (n,), what it gives to the class it says.
        examples: how many there were to get right or wrong.
    """

    indices: np.ndarray
    predicted: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray
    examples: int

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"Mistakes({len(self)} of {self.examples} examples)"

    def _repr_html_(self) -> str:
        names = ("index", "predicted", "label", "probability")
        columns = (self.indices, self.predicted, self.labels, self.probabilities)
        head = "".join(f'<th style="text-align:right">{name}</th>' for name in names)
        body = ""
        for row in zip(*(column[:_MOST] for column in columns), strict=True):
            words = [f"{x:.4f}" if isinstance(x, np.floating) else str(x) for x in row]
            body += "<tr>" + "".join(f'<td style="text-align:right">{w}</td>' for w in words) + "</tr>"
        more = f"<p>... and {len(self) - _MOST} more</p>" if len(self) > _MOST else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<div><p>{html.escape(repr(self))}</p>{table}{more}</div>"


def confusion_matrix(
    state_or_params: Any, apply_fn: ApplyFn, dataset: data.Dataset, *, batch_size: int = 256
) -> np.ndarray:
    """How many examples of each class are taken for each class, counted on the devices.

    Args:
        state_or_params, apply_fn, dataset: as in `evaluate`.
        batch_size: how many examples at a time; rounded up to a multiple of the number of devices.

    Returns:
        int64 (classes, classes): row i, column j counts the examples of class i that are classified as j. Its
        trace divided by its sum is the accuracy that `evaluate` gives.

    Raises:
        ValueError: labels that are no classes of the model; no examples.

    Example:
        >>> from jaxpar import data, train
        >>> points = data.Dataset(np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], np.array([0, 1, 2, 1]))
        >>> train.confusion_matrix({}, lambda params, images: images, points, batch_size=2).tolist()
        [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    """
    params, classes, batches, devices = _prepared("confusion_matrix", state_or_params, apply_fn, dataset, batch_size)
    zeros = np.zeros((classes, classes), np.int32)
    matrix = jnp.asarray(zeros) if devices is None else put(zeros, evaluate._everywhere(devices))
    leaves, structure = jax.tree.flatten(params)
    add_counts = _count_programs(apply_fn, structure)
    for batch, valid in batches:
        wait_before_collectives((batch, matrix), devices or ())
        matrix = add_counts(leaves, batch, np.int32(valid), matrix)
    return np.asarray(matrix).astype(np.int64)


def mistakes(
    state_or_params: Any,
    apply_fn: ApplyFn,
    dataset: data.Dataset,
    *,
    batch_size: int = 256,
    most: int | None = None,
) -> Mistakes:
    """The examples that a classifier gets wrong, the one that it is most certain of first.

    Args:
        state_or_params, apply_fn, dataset: as in `evaluate`.
        batch_size: how many examples at a time; rounded up to a multiple of the number of devices.
        most: keep so many of them; None all.

    Returns:
        `Mistakes(indices, predicted, labels, probabilities)`; the probability is the softmax of the logits at the
        class that is predicted.

    Raises:
        ValueError: as `confusion_matrix`.

    Example:
        >>> from jaxpar import data, train
        >>> points = data.Dataset(np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], np.array([0, 1, 2, 1]))
        >>> wrong = train.mistakes({}, lambda params, images: 9 * images, points)
        >>> wrong, wrong.indices.tolist(), wrong.predicted.tolist(), wrong.labels.tolist()
        (Mistakes(1 of 4 examples), [3], [2], [1])
    """
    params, _, batches, devices = _prepared("mistakes", state_or_params, apply_fn, dataset, batch_size)
    where = None if devices is None else evaluate._everywhere(devices)
    leaves, structure = jax.tree.flatten(params)
    parts, says = [], _says_programs(apply_fn, where, structure)
    for batch, valid in batches:
        wait_before_collectives(batch, devices or ())
        parts.append((*says(leaves, batch["image"]), valid))
    predicted, probabilities = (np.concatenate([np.asarray(p[i])[: p[2]] for p in parts]) for i in (0, 1))
    wrong = np.flatnonzero(predicted != dataset.labels)
    wrong = wrong[np.argsort(-probabilities[wrong], kind="stable")][:most]
    return Mistakes(wrong, predicted[wrong], dataset.labels[wrong], probabilities[wrong], len(dataset))


def _prepared(
    name: str, state_or_params: Any, apply_fn: ApplyFn, dataset: data.Dataset, batch_size: int
) -> tuple[Any, int, Iterator[tuple[Any, int]], Any]:
    """The parameters, the number of classes, the batches with how many of each count, the devices."""
    if batch_size < 1 or not len(dataset):
        raise ValueError(f"{name}: needs examples and a batch_size >= 1, got {len(dataset)} and {batch_size}")
    checks.hashable(apply_fn, f"{name}: apply_fn")
    params = state_or_params.params if isinstance(state_or_params, TrainState) else state_or_params
    devices = evaluate._devices_of(params)
    count = len(devices or (None,))
    size = min(-(-batch_size // count), -(-len(dataset) // count)) * count
    image = jax.ShapeDtypeStruct((size, *dataset.images.shape[1:]), jnp.float32)
    logits = jax.eval_shape(apply_fn, params, image)
    labels = dataset.labels
    if len(logits.shape) != 2 or labels.ndim != 1 or labels.dtype != np.int32:
        raise ValueError(
            f"{name}: needs logits of shape (n, classes) and a label an example, an int; got logits {logits.shape}, "
            f"labels {labels.dtype} {labels.shape}"
        )
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"{name}: the model has {logits.shape[1]} classes, the labels run from {labels.min()} to {labels.max()}"
        )
    return params, logits.shape[1], evaluate._batches(dataset, size, devices), devices


def _add_counts(
    apply_fn: ApplyFn, structure: Any, leaves: list[jax.Array], batch: Any, count: Any, matrix: jax.Array
) -> jax.Array:
    """The matrix with the first `count` examples of a batch counted."""
    predicted = apply_fn(structure.unflatten(leaves), batch["image"]).argmax(axis=1)
    valid = jnp.arange(predicted.shape[0]) < count
    return matrix.at[batch["label"], predicted].add(valid.astype(matrix.dtype))


_count_programs = Recent(lambda *key: jax.jit(functools.partial(_add_counts, *key), donate_argnums=3))


def _says(
    apply_fn: ApplyFn, where: NamedSharding | None, structure: Any, leaves: list[jax.Array], images: jax.Array
) -> tuple[Any, Any]:
    """The classes and their probabilities, on each device."""
    p = jax.nn.softmax(apply_fn(structure.unflatten(leaves), images).astype(jnp.float32))
    said = p.argmax(axis=1).astype(jnp.int32), p.max(axis=1)
    return said if where is None else tuple(lax.with_sharding_constraint(x, where) for x in said)


_says_programs = Recent(lambda *key: jax.jit(functools.partial(_says, *key)))
