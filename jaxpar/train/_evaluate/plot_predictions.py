"""Pictures of what a classifier gets right and wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import data
from ..._core import checks
from ..._core.calls import answers
from .._callbacks.figures import new_figure, readable, save_figure
from .predictions import Mistakes

_NUMBERED = 25  # classes up to which the cells hold their counts
_COLUMNS = 5


@answers("plot_confusion_matrix")
@readable
def plot_confusion_matrix(
    matrix: np.ndarray,
    *,
    class_names: Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Any:
    """Draw the counts of `confusion_matrix`, coloured by their fraction of the row.

    Args:
        matrix: (classes, classes).
        class_names: one for each class. None: their numbers.
        path: a file for the picture. Its ending says the format.

    Returns:
        The matplotlib figure, which a notebook shows.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: a matrix that is not square, or another number of names.

    Example:
        >>> figure = plot_confusion_matrix(np.array([[3, 1], [0, 4]]), class_names=["cat", "dog"])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['3', '1', '0', '4']
    """
    matrix = np.asarray(matrix)
    n = len(matrix)
    if matrix.shape != (n, n):
        raise ValueError(f"plot_confusion_matrix: the matrix must be square, got shape {matrix.shape}")
    names = _names("plot_confusion_matrix", class_names, n)
    side = min(12.0, 3.5 + 0.45 * n)
    figure = new_figure("plot_confusion_matrix", side + 0.8, side)
    figure.set_layout_engine("compressed")  # the matrix is square, and the other one cuts its labels
    axes = figure.subplots()
    parts = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    image = axes.imshow(parts, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, fraction=0.046, label="fraction of the class")
    if n <= _NUMBERED:
        for i, j in np.ndindex(n, n):
            colour = "white" if parts[i, j] > 0.5 else "black" if matrix[i, j] else "0.75"
            axes.text(j, i, str(matrix[i, j]), ha="center", va="center", fontsize=8, color=colour)
    if n <= 2 * _NUMBERED:
        axes.set_xticks(range(n), names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(n), names)
    axes.set(xlabel="predicted", ylabel="label")
    return save_figure(figure, path)


@answers("plot_mistakes")
@readable
def plot_mistakes(
    mistakes: Mistakes,
    dataset: data.Dataset,
    *,
    class_names: Sequence[str] | None = None,
    most: int = 20,
    path: str | os.PathLike[str] | None = None,
) -> Any:
    """Draw the images of the first mistakes, with the predicted and the right class.

    Args:
        mistakes: the result of `mistakes`.
        dataset: the one given to it. Images have shape (n, height, width), or with 1, 3 or 4 channels after that.
        class_names, path: as in `plot_confusion_matrix`.
        most: how many to show.

    Returns:
        The matplotlib figure, which a notebook shows.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no mistakes, or images of another shape.
    """
    checks.whole_number(most, "plot_mistakes", "most")
    if not len(mistakes):
        raise ValueError("plot_mistakes: nothing to show: 0 mistakes")
    images = dataset.images[mistakes.indices[:most]]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3, 4)):
        raise ValueError(f"plot_mistakes: expected images of shape (n, height, width[, 1, 3 or 4]), got {images.shape}")
    classes = 1 + max(int(mistakes.predicted.max()), int(mistakes.labels.max()))
    names = [str(i) for i in range(classes)] if class_names is None else list(class_names)
    if len(names) < classes:
        raise ValueError(f"plot_mistakes: {len(names)} class_names for {classes} classes")
    rows = -(-len(images) // _COLUMNS)
    figure = new_figure("plot_mistakes", 9.5, 2.3 * rows)
    for i, axes in enumerate(figure.subplots(rows, _COLUMNS, squeeze=False).flat):
        axes.axis("off")
        if i < len(images):
            image = images[i]
            axes.imshow(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image, cmap="gray")
            said, label = names[mistakes.predicted[i]], names[mistakes.labels[i]]
            axes.set_title(f"{said} {mistakes.probabilities[i]:.0%}\nis {label}", fontsize=9)
    return save_figure(figure, path)


def _names(name: str, class_names: Sequence[str] | None, n: int) -> list[str]:
    if class_names is None:
        return [str(i) for i in range(n)]
    if len(class_names) != n:
        raise ValueError(f"{name}: {len(class_names)} class_names for {n} classes")
    return list(class_names)
