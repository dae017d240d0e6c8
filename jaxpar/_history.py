"""The picture of a training run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


def plot_history(history: Sequence[dict[str, Any]], path: str | os.PathLike[str] | None = None) -> Any:
    """Loss and accuracy by epoch, side by side; needs matplotlib.

    Args:
        history: what `fit` returned.
        path: a file to write the picture to, in the format its name ends with.

    Returns:
        The matplotlib figure; a notebook shows it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: an empty history.

    Example:
        >>> figure = plot_history([{"epoch": 1, "loss": 2.3, "accuracy": 0.1, "test_accuracy": 0.2}])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['loss', 'accuracy']
    """
    if not history:
        raise ValueError("plot_history: the history is empty")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plot_history draws with matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    epochs = [record["epoch"] for record in history]
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for label, field in (("train", name), ("test", f"test_{name}")):
            values = [record.get(field) for record in history]
            if any(value is not None for value in values):
                axes.plot(epochs, [float("nan") if v is None else v for v in values], marker="o", label=label)
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if axes.get_lines():
            axes.legend()
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
