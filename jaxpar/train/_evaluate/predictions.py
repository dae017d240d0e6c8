"""What a model gives for every example, and where a classifier is wrong."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import data
from ..._core import checks
from ..._core.calls import answers
from ..._core.recent import Recent
from ..._core.text import Table
from ..._devices import processes
from ..._devices.emulated import wait_before_collectives
from ..._devices.user_mesh import check_traced, on_own_mesh, outside_mesh
from .classification import check_classified, check_logits
from .every_example import Arrays, model_of
from .measure import examples_of

ApplyFn = Callable[..., Any]
_MOST = 10  # rows of the table


@answers("predict")
def predict(state_or_params: Any, apply_fn: ApplyFn, source: Any, *, batch_size: int) -> Any:
    """The outputs of a model for every example, in order.

    Args:
        state_or_params: a `TrainState`, or the parameters. The batches go to their devices.
        apply_fn: `apply_fn(params, inputs) -> outputs`, arrays with one row per example, or a pytree of them. With a
            `model_state`, `apply_fn(params, inputs, model_state)`. The same function object is compiled once.
        source: a `data.Dataset`, whose images are the inputs as `data.batches` gives them. Or inputs: an array, a
            pytree of arrays with a common first axis of n examples, the result of `data.from_arrays` or
            `data.from_iterable`, or batches as in `evaluate`. Of a batch `{"image", "label"}` the images are the input.
        batch_size: how many examples at a time, rounded up to a multiple of the number of devices. Batches that a
            source gives stay as they are.

    Returns:
        NumPy arrays with a first axis of n, in the structure that `apply_fn` returns. With several processes each gets
        all of them.

    Raises:
        ValueError: no examples, a batch size below 1, outputs without one row per example. Batches in several
            processes, since their order is not known.
        TypeError: an `apply_fn` without a hash, another source.

    Example:
        >>> from jaxpar import train
        >>> double = lambda params, x: {"twice": params * x}
        >>> train.predict(2.0, double, np.arange(5.0, dtype=np.float32), batch_size=2)["twice"].tolist()
        [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    with outside_mesh() as user:
        if user is None:
            check_traced(state_or_params, "predict")
        return _predict("predict", state_or_params, apply_fn, source, batch_size, user)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mistakes:
    """Examples that a classifier gets wrong, the most certain first.

    Attributes:
        indices: int64 (n,), their places in the data set.
        predicted: int32 (n,), the classes that were predicted.
        labels: int32 (n,), the right classes.
        probabilities: float32 (n,), of the predicted classes.
        examples: how many examples there were.
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
        columns = (self.indices, self.predicted, self.labels)
        rows = [(*map(str, row), f"{p:.4f}") for *row, p in zip(*columns, self.probabilities, strict=True)]
        return Table(repr(self), ("index", "predicted", "label", "probability"), rows, _MOST, "right")._repr_html_()


@answers("confusion_matrix")
@on_own_mesh
def confusion_matrix(
    state_or_params: Any, apply_fn: ApplyFn, dataset: data.Dataset, *, batch_size: int = 256
) -> np.ndarray:
    """How many examples of each class were classified as each class.

    Args:
        state_or_params, apply_fn, dataset, batch_size: as in `evaluate`.

    Returns:
        int64 (classes, classes). Row i, column j counts the examples of class i that are classified as j. The trace
        divided by the sum is the accuracy that `evaluate` gives.

    Raises:
        ValueError: labels that are no classes of the model, or no examples.
        TypeError: as `evaluate`.

    Example:
        >>> from jaxpar import data, train
        >>> points = data.Dataset(np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], np.array([0, 1, 2, 1]))
        >>> train.confusion_matrix({}, lambda params, images: images, points, batch_size=2).tolist()
        [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    """
    logits = _logits("confusion_matrix", state_or_params, apply_fn, dataset, batch_size)
    matrix = np.zeros((logits.shape[1], logits.shape[1]), np.int64)
    np.add.at(matrix, (dataset.labels, logits.argmax(axis=1)), 1)
    return matrix


@answers("mistakes")
@on_own_mesh
def mistakes(
    state_or_params: Any,
    apply_fn: ApplyFn,
    dataset: data.Dataset,
    *,
    batch_size: int = 256,
    most: int | None = None,
) -> Mistakes:
    """The examples that a classifier gets wrong, the most certain first.

    Args:
        state_or_params, apply_fn, dataset, batch_size: as in `evaluate`.
        most: how many to keep, 0 or more. None: all.

    Returns:
        `Mistakes(indices, predicted, labels, probabilities)`. The probability is the softmax of the logits at the
        predicted class.

    Raises:
        ValueError, TypeError: as `confusion_matrix`.

    Example:
        >>> from jaxpar import data, train
        >>> points = data.Dataset(np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], np.array([0, 1, 2, 1]))
        >>> wrong = train.mistakes({}, lambda params, images: 9 * images, points)
        >>> wrong, wrong.indices.tolist(), wrong.predicted.tolist(), wrong.labels.tolist()
        (Mistakes(1 of 4 examples), [3], [2], [1])
    """
    if most is not None:
        checks.whole_number(most, "mistakes", "most", least=0)
    logits = _logits("mistakes", state_or_params, apply_fn, dataset, batch_size)
    predicted = logits.argmax(axis=1).astype(np.int32)
    probabilities = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    wrong = np.flatnonzero(predicted != dataset.labels)
    wrong = wrong[np.argsort(-probabilities[wrong], kind="stable")][:most]
    return Mistakes(wrong, predicted[wrong], dataset.labels[wrong], probabilities[wrong], len(dataset))


def _logits(name: str, state_or_params: Any, apply_fn: ApplyFn, dataset: data.Dataset, batch_size: int) -> np.ndarray:
    """float32 (n, classes). All that can be known is checked before any work."""
    check_classified(dataset, name)
    checks.function(apply_fn, f"{name}: apply_fn")
    params, *model_state = model = model_of(state_or_params)
    size = _examples(name, model, dataset, batch_size).size
    image = jax.ShapeDtypeStruct((size, *dataset.images.shape[1:]), jnp.float32)
    logits = check_logits(jax.eval_shape(apply_fn, params, image, *model_state), size)
    labels = dataset.labels
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"{name}: the model has {logits.shape[1]} classes, the labels run from {labels.min()} to {labels.max()}"
        )
    return _predict(name, state_or_params, apply_fn, dataset, batch_size).astype(np.float32)


def _predict(name: str, state_or_params: Any, apply_fn: ApplyFn, source: Any, batch_size: int, user: Any = None) -> Any:
    model = model_of(state_or_params)
    examples = _examples(name, model, source, batch_size, user)
    devices = examples.places.devices or ()
    leaves, structure = jax.tree.flatten(model)
    key = (checks.function(apply_fn, f"{name}: apply_fn"), structure, examples.places.copies)
    outputs_of, parts, last = _programs(*key), [], None
    for piece in examples.pieces(lambda shapes: False):
        inputs = _inputs(examples, piece.batch)
        wait_before_collectives(inputs, devices)
        made = outputs_of(leaves, inputs), piece.valid
        if last is not None:  # while the devices compute the next one
            parts.append(_on_host(*last))
            processes.note_progress()
        last = made
    parts.append(_on_host(*last)) if last is not None else None
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


def _examples(name: str, model: Any, source: Any, batch_size: int, user: Any = None) -> Any:
    batch_size = checks.whole_number(batch_size, name, "batch_size")
    examples = examples_of(name, model, source, batch_size, user)
    if not isinstance(examples, Arrays) and processes.count() > 1:
        raise ValueError(
            f"{name}: in several processes each one reads its own share of the batches, so their order is not known; "
            "give a data.Dataset or arrays"
        )
    return examples


def _inputs(examples: Any, batch: Any) -> Any:
    """What the model gets of a batch: of images with labels only the images."""
    if isinstance(examples, Arrays) and not isinstance(examples.source, data.DatasetSource):
        return batch
    return batch["image"] if isinstance(batch, dict) and batch.keys() == {"image", "label"} else batch


def _on_host(outputs: Any, count: int) -> Any:
    """The first `count` rows."""
    return jax.tree.map(lambda x: np.asarray(x)[:count], outputs)


def _outputs(apply_fn: ApplyFn, structure: Any, copies: Any, leaves: list[jax.Array], inputs: Any) -> Any:
    """The outputs for a batch, with a copy on each device."""
    params, *model_state = structure.unflatten(leaves)
    outputs = apply_fn(params, inputs, *model_state)
    n = len(jax.tree.leaves(inputs)[0])
    for leaf in jax.tree.leaves(outputs):
        if jnp.shape(leaf)[:1] != (n,):
            raise ValueError(
                f"predict: apply_fn must return arrays with one row per example; got shape {jnp.shape(leaf)} for a "
                f"batch of {n}"
            )
    return outputs if copies is None else lax.with_sharding_constraint(outputs, copies)


_programs = Recent(lambda *key: jax.jit(functools.partial(_outputs, *key)))
