"""What a model gives for every example, where a classifier is wrong, and pictures of that."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..._core import checks, text
from ..._core.arguments import renamed_arguments
from ..._core.arrays import PyTree
from ..._core.transfers import allows_transfers
from ..._devices import processes, user_mesh
from ...data import ArraySource, Dataset, IterableSource
from .._callbacks.figures import new_figure, readable, save_figure
from .evaluate import check_classes, check_classified, check_logits
from .every_example import EvalProgram, as_eval_source, with_axes

ApplyFn = Callable[..., Any]
_MOST = 10  # rows of the table
_NUMBERED = 25  # classes up to which the cells hold their counts
_COLUMNS = 5


@renamed_arguments(source="data")
@allows_transfers
def predict(state_or_params: PyTree, apply_fn: ApplyFn, data: Any, *, batch_size: int = 256) -> Any:
    """The outputs of a model for every example, in order.

    Args:
        state_or_params, batch_size: as in `evaluate`.
        apply_fn: `apply_fn(params, inputs) -> outputs`, an array or a pytree of arrays with one row for each example.
            With a `model_state`, `apply_fn(params, inputs, model_state)`. It is compiled as an `eval_fn` is.
        data: a `data.Dataset`, whose images are the inputs, as `data.batches` gives them; or inputs: an array, a pytree
            of arrays that share a first axis, or what `evaluate` takes with an `eval_fn`. In a batch `{"image",
            "label"}`, the images are the inputs.

    Returns:
        NumPy arrays with a first axis of n, in the structure that `apply_fn` returns. With several processes, each
        process gets all outputs.

    Raises:
        ValueError, TypeError: as `evaluate`; an output does not have one row for each example; batches are given with
            several processes, since their order is unknown.

    Example:
        >>> from jaxpar import train
        >>> double = lambda params, x: {"twice": params * x}
        >>> train.predict(2.0, double, np.arange(5.0, dtype=np.float32), batch_size=2)["twice"].tolist()
        [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    with user_mesh.outside_mesh() as user:
        return _predict(_program_of("predict", state_or_params, apply_fn, data, batch_size, user))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mistakes:
    """Examples that a classifier gets wrong, most confident first.

    Attributes:
        indices: int64 (n,), the positions in the data set.
        predicted: int32 (n,), the predicted classes.
        labels: int32 (n,), the true classes.
        probabilities: float32 (n,), the probabilities of the predicted classes.
        examples: the number of examples in the data set.
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
        examples = zip(self.indices, self.predicted, self.labels, self.probabilities, strict=True)
        rows = [(*map(str, row), f"{p:.4f}") for *row, p in examples]
        columns = ("index", "predicted", "label", "probability")
        return text.Table(repr(self), columns, rows, _MOST, "right")._repr_html_()


@renamed_arguments(dataset="data")
@allows_transfers
@user_mesh.on_own_mesh
def confusion_matrix(state_or_params: PyTree, apply_fn: ApplyFn, data: Dataset, *, batch_size: int = 256) -> np.ndarray:
    """Count the examples of each class by predicted class.

    Args:
        state_or_params, apply_fn, data, batch_size: as in `evaluate`, with its errors.

    Returns:
        int64 (classes, classes). Row i, column j counts the examples of class i with predicted class j. The trace
        divided by the sum is the accuracy of `evaluate`.

    Example:
        >>> from jaxpar import data, train
        >>> points = data.Dataset(np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], np.array([0, 1, 2, 1]))
        >>> train.confusion_matrix({}, lambda params, images: images, points, batch_size=2).tolist()
        [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    """
    logits = _logits("confusion_matrix", state_or_params, apply_fn, data, batch_size)
    matrix = np.zeros((logits.shape[1], logits.shape[1]), np.int64)
    np.add.at(matrix, (data.labels, logits.argmax(axis=1)), 1)
    return matrix


@renamed_arguments(dataset="data")
@allows_transfers
@user_mesh.on_own_mesh
def mistakes(
    state_or_params: PyTree, apply_fn: ApplyFn, data: Dataset, *, batch_size: int = 256, most: int | None = None
) -> Mistakes:
    """Find the examples that a classifier gets wrong, most confident first.

    Args:
        state_or_params, apply_fn, data, batch_size: as in `evaluate`, with its errors.
        most: the largest number of examples to return, 0 or more. None: all.

    Returns:
        `Mistakes`. The probability is the softmax of the logits at the predicted class.

    Example:
        >>> from jaxpar import data, train
        >>> points = data.Dataset(np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], np.array([0, 1, 2, 1]))
        >>> wrong = train.mistakes({}, lambda params, images: 9 * images, points)
        >>> wrong, wrong.indices.tolist(), wrong.predicted.tolist(), wrong.labels.tolist()
        (Mistakes(1 of 4 examples), [3], [2], [1])
    """
    if most is not None:
        checks.whole_number(most, "mistakes", "most", least=0)
    logits = _logits("mistakes", state_or_params, apply_fn, data, batch_size)  # (n, classes)
    predicted = logits.argmax(axis=1).astype(np.int32)
    # The softmax at the predicted class, whose logit is the largest: exp(0) / sum(exp(logits - largest)).
    probabilities = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    wrong = np.flatnonzero(predicted != data.labels)
    # A stable sort keeps the order of the data among equals, so the result is the same everywhere.
    wrong = wrong[np.argsort(-probabilities[wrong], kind="stable")][:most]
    return Mistakes(wrong, predicted[wrong], data.labels[wrong], probabilities[wrong], len(data))


def _logits(name: str, state_or_params: PyTree, apply_fn: ApplyFn, data: Dataset, batch_size: int) -> np.ndarray:
    """float32 (n, classes). All that can be known is checked before any work."""
    check_classified(data, name)
    program = _program_of(name, state_or_params, apply_fn, data, batch_size, None)
    # The shape of the logits, traced without a computation.
    params, *model_state = program.model
    image = jax.ShapeDtypeStruct((program.size, *data.images.shape[1:]), jnp.float32)
    logits = jax.eval_shape(with_axes(apply_fn, program.axes), params, image, *model_state)
    check_logits(logits, program.size)
    check_classes(name, apply_fn, program.model, data)
    return _predict(program).astype(np.float32)


def _program_of(
    name: str, state_or_params: PyTree, apply_fn: ApplyFn, data: Any, batch_size: int, user: Mesh | None
) -> EvalProgram:
    """The program of the outputs of a batch."""
    checks.function(apply_fn, f"{name}: apply_fn")
    source = as_eval_source(name, data)
    if isinstance(source, IterableSource) and processes.count() > 1:
        raise ValueError(
            f"{name}: with several processes the order of all examples is unknown; give a data.Dataset or arrays"
        )
    # Of images with labels the model gets the images. Arrays that were given are inputs as they are.
    of = _outputs if isinstance(source, ArraySource) else _outputs_of_images
    return EvalProgram(name, state_or_params, source, batch_size, user, of=of, fn=apply_fn)


def _predict(program: EvalProgram) -> PyTree:
    """The outputs of all batches, one after another, in host memory."""
    of_batches = [jax.tree.map(np.asarray, outputs) for outputs in program.run(ahead=1)]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *of_batches)


def _outputs(call: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
    outputs, n = call(inputs), jax.tree.leaves(inputs)[0].shape[0]
    for shape in map(jnp.shape, jax.tree.leaves(outputs)):
        if shape[:1] != (n,):
            # Else batches of different sizes would be put one after another, in rows that belong to no example.
            raise ValueError(f"predict: apply_fn must return one row per example; got shape {shape} for a batch of {n}")
    return outputs


def _outputs_of_images(call: Callable[[PyTree], PyTree], batch: PyTree) -> PyTree:
    has_labels = isinstance(batch, dict) and batch.keys() == {"image", "label"}
    return _outputs(call, batch["image"] if has_labels else batch)


# Pictures.


@readable("plot_confusion_matrix")
def plot_confusion_matrix(
    matrix: np.ndarray, *, class_names: Sequence[str] | None = None, path: str | os.PathLike[str] | None = None
) -> Any:
    """Draw a confusion matrix, coloured by the fraction of each row. Returns the matplotlib figure.

    Args:
        matrix: (classes, classes), from `confusion_matrix`.
        class_names: a name for each class. None: the class numbers.
        path: a file for the picture. Its suffix sets the format.

    Raises:
        ModuleNotFoundError: as of `plot_history`. ValueError: the matrix is not square. Matplotlib's, if
            names are missing.

    Example:
        >>> figure = plot_confusion_matrix(np.array([[3, 1], [0, 4]]), class_names=["cat", "dog"])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['3', '1', '0', '4']
    """
    matrix = np.asarray(matrix)
    n = len(matrix)
    if matrix.shape != (n, n):
        raise ValueError(f"plot_confusion_matrix: the matrix must be square, got shape {matrix.shape}")
    names = range(n) if class_names is None else class_names

    # The colours are fractions of a row, so that rare classes are as visible as others.
    side = min(12.0, 3.5 + 0.45 * n)
    figure = new_figure(side + 0.8, side)
    figure.set_layout_engine("compressed")  # the matrix is square, and the other one cuts its labels
    axes = figure.subplots()
    fractions = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, fraction=0.046, label="fraction of the class")

    # The counts in the cells and the names beside them, as long as they can be read.
    if n <= _NUMBERED:
        for i, j in np.ndindex(n, n):
            colour = "white" if fractions[i, j] > 0.5 else "black" if matrix[i, j] else "0.75"
            axes.text(j, i, str(matrix[i, j]), ha="center", va="center", fontsize=8, color=colour)
    if n <= 2 * _NUMBERED:
        axes.set_xticks(range(n), names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(n), names)
    axes.set(xlabel="predicted", ylabel="label")
    return save_figure(figure, path, "plot_confusion_matrix")


@renamed_arguments(dataset="data")
@readable("plot_mistakes")
def plot_mistakes(
    mistakes: Mistakes,
    data: Dataset,
    *,
    class_names: Sequence[str] | None = None,
    most: int = 20,
    path: str | os.PathLike[str] | None = None,
) -> Any:
    """Draw the images of mistakes, with predicted and true class. Returns the matplotlib figure.

    Args:
        mistakes: the result of `mistakes`.
        data: the data set given to `mistakes`. Images have shape (n, height, width), or (n, height, width, channels)
            with 1, 3 or 4 channels.
        class_names, path: as in `plot_confusion_matrix`.
        most: the largest number of images.

    Raises:
        ModuleNotFoundError: as of `plot_history`. ValueError: there are no mistakes.
    """
    checks.whole_number(most, "plot_mistakes", "most")
    if not len(mistakes):
        raise ValueError("plot_mistakes: nothing to show: 0 mistakes")
    images = data.images[mistakes.indices[:most]]
    # matplotlib takes one channel without its axis, and 3 or 4 as colours.
    rows = -(-len(images) // _COLUMNS)
    figure = new_figure(9.5, 2.3 * rows)
    for i, axes in enumerate(figure.subplots(rows, _COLUMNS, squeeze=False).flat):
        axes.axis("off")
        if i < len(images):
            image = images[i]
            axes.imshow(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image, cmap="gray")
            predicted, label = mistakes.predicted[i], mistakes.labels[i]
            if class_names is not None:
                predicted, label = class_names[predicted], class_names[label]
            axes.set_title(f"{predicted} {mistakes.probabilities[i]:.0%}\nis {label}", fontsize=9)
    return save_figure(figure, path, "plot_mistakes")
