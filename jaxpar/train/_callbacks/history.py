"""What `fit` measured, epoch by epoch: a list of dicts, a table, a DataFrame, a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from ..._core.arguments import describe
from ..._core.calls import answers
from ..._core.text import Table, plural
from .figures import new_figure, readable, save_figure

Record = dict[str, Any]

# What a record has next to metrics.
NO_METRICS = ("epoch", "step", "seconds", "images_per_second", "skipped", "interrupted", "under_way")

_MOST = 40  # rows of the table
_COLUMNS = 3  # pictures side by side


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


def number_text(value: Any) -> str:
    """A metric in a few digits.

    >>> number_text(0.25), number_text(1e-7), number_text(3)
    ('0.2500', '1.000e-07', '3')
    """
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"


def line(record: Record, epochs: int | None = None, unit: str = "images") -> str:
    """One line about an epoch: its metrics, except columns such as `eval_recall/0`, and its speed.

    Args:
        epochs: how many the run has.
        unit: what the data consists of.

    >>> line({"epoch": 1, "loss": 2.3, "accuracy": 0.1, "test_accuracy": None, "seconds": 2.0,
    ...       "images_per_second": 30000.0}, 5)
    'epoch 1/5  loss 2.3000  accuracy 0.1000  2.0 s  30,000 images/s'
    """
    words = [f"epoch {record['epoch']}" + (f"/{epochs}" if epochs else "")]
    for name, value in record.items():
        if name not in NO_METRICS and "/" not in name and value is not None and not isinstance(value, bool):
            words.append(f"{name.replace('_', ' ')} {number_text(value)}")
    words += [f"{record['seconds']:.1f} s", f"{record['images_per_second']:,.0f} {unit}/s"]
    return "  ".join(words)


def metric_groups(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """The metrics that some record has, to be drawn together: a label and a name in the records for each curve.

    >>> metric_groups([{"epoch": 1, "loss": 2.0, "eval_loss": 3.0, "eval_recall/0": 0.5, "accuracy": None}])
    {'loss': {'train': 'loss', 'eval': 'eval_loss'}, 'recall': {'eval 0': 'eval_recall/0'}}
    """
    groups: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(name for record in records for name in record if name not in NO_METRICS):
        values = [record.get(name) for record in records]
        if any(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            part = next((part for part in ("test", "eval") if name.startswith(f"{part}_")), "train")
            group, _, column = name.removeprefix(f"{part}_").partition("/")
            groups.setdefault(group, {})[f"{part} {column}".strip()] = name
    return groups


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "seconds":
        return f"{value:.2f}"
    return f"{value:,.0f}" if name == "images_per_second" else number_text(value)


@answers("to_pandas")
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


@answers("plot_history")
@readable
def plot_history(history: Sequence[Record], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the loss and all other metrics, one picture each. Training and evaluation are in one.

    The axis is the epoch, or the step where evaluations within epochs are among the records.

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
    groups = metric_groups(history)
    columns = min(len(groups), _COLUMNS) or 1
    rows = -(-len(groups) // columns) or 1
    figure = new_figure("plot_history", 4.5 * columns, 3.2 * rows)
    axis = "step" if any(record.get("under_way") for record in history) else "epoch"
    places_of = [record[axis] for record in history]
    places = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for group, curves in groups.items():
        axes = places.pop(0)
        for label, name in curves.items():
            values = [record.get(name) for record in history]
            axes.plot(places_of, [math.nan if v is None else v for v in values], marker="o", label=label)
        axes.set(xlabel=axis, ylabel=group.replace("_", " "))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in places:
        figure.delaxes(axes)
    return save_figure(figure, path)
