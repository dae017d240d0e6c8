"""What `fit` measured, epoch by epoch: a list of dicts, a table, a DataFrame, a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from ..._core.arguments import describe
from ..._core.text import Table, plural
from .figures import new_figure, save_figure

Record = dict[str, Any]

_MOST = 40  # rows of the table


class History(list[Record]):
    """A list with a dict for each epoch. A notebook shows it as a table.

    >>> History([{"epoch": 1, "loss": 2.5, "accuracy": None}])._repr_html_().count("<td")
    2
    """

    def _repr_html_(self) -> str:
        """Only what some epoch has. A long history shows the first and the last epochs."""
        names = [
            n for n in dict.fromkeys(n for record in self for n in record) if any(r.get(n) is not None for r in self)
        ]
        rows = [[_text(name, record.get(name)) for name in names] for record in self]
        columns = tuple(name.replace("_", " ") for name in names)
        table = Table(plural(len(self), "epoch"), columns, rows, _MOST, "right", first=_MOST // 4)
        return table._repr_html_()


def _text(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if name == "seconds":
        return f"{value:.2f}"
    if name == "images_per_second":
        return f"{value:,.0f}"
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"


def to_pandas(history: Sequence[Record]) -> Any:
    """A history as a `pandas.DataFrame` with a row for each epoch.

    What was not measured is missing in it. `to_pandas(history).to_csv("history.csv")` writes a table.

    Raises:
        ModuleNotFoundError: pandas is not installed.

    Example:
        >>> frame = to_pandas([{"epoch": 1, "loss": 2.5}, {"epoch": 2, "loss": 1.5}])  # doctest: +SKIP
        >>> float(frame["loss"].min())  # doctest: +SKIP
        1.5
    """
    _check_records(history, "to_pandas")
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas makes a pandas.DataFrame: pip install pandas") from error
    return pandas.DataFrame(list(history))


def _check_records(history: Any, where: str) -> None:
    if not isinstance(history, Sequence) or not all(isinstance(record, dict) for record in history):
        raise TypeError(f"{where}: expected the history, the second of what train.fit returns; got {describe(history)}")


def plot_history(history: Sequence[Record], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw loss and accuracy by epoch, side by side.

    Args:
        history: what `fit` returned.
        path: a file for the picture. Its ending says the format.

    Returns:
        The matplotlib figure, which a notebook shows.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: the history is empty.

    Example:
        >>> figure = plot_history([{"epoch": 1, "loss": 2.3, "accuracy": 0.1, "test_accuracy": 0.2}])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['loss', 'accuracy']
    """
    _check_records(history, "plot_history")
    if not history:
        raise ValueError("plot_history: the history is empty")
    figure = new_figure("plot_history", 9, 3.2)
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
    return save_figure(figure, path)
