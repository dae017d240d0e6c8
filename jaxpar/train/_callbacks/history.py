"""What `fit` measured, epoch by epoch: a list of dicts, a table, a DataFrame, and pictures.

The figures are of matplotlib, and a notebook shows them without pyplot.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import time
from collections.abc import Generator, Sequence
from typing import Any

import jax

from ..._core import files
from ..._core.text import Table, describe, in_notebook, plural
from .._step.state import TrainState

Record = dict[str, Any]

SPEEDS = {"images_per_second": "images/s", "examples_per_second": "examples/s"}
NO_METRICS = ("epoch", "step", "seconds", *SPEEDS, "skipped", "interrupted", "under_way")  # what else a record has

_MOST_ROWS = 40  # of the table
_STYLE = "jaxpar.train.notebook"
_OWN = ("figure.facecolor", "text.color")  # a user who changed one of these has colours of their own
_COLUMNS = 3  # pictures of a history side by side

_EVERY = 1.0  # seconds between two pictures, at least
_SHARE = 0.05  # of the time that drawing may take
_POINTS = 1000  # of the curve of the steps. More cannot be seen.
_MOST_METRICS = 8  # that are drawn


class History(list[Record]):
    """A list with one dict for each epoch. Notebooks show it as a table."""

    def _repr_html_(self) -> str:
        """Only what some epoch has. A long history shows the first and the last epochs."""
        names = list(dict.fromkeys(n for record in self for n, value in record.items() if value is not None))
        rows = [[_text(name, record.get(name)) for name in names] for record in self]
        columns = tuple(name.replace("_", " ") for name in names)
        table = Table(plural(len(self), "epoch"), columns, rows, _MOST_ROWS, "right", first=_MOST_ROWS // 4)
        return table._repr_html_()


def number_text(value: Any) -> str:
    """A metric in a few digits: 0.2500, 1.000e-07, 3."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"


def line(record: Record, epochs: int | None = None) -> str:
    """One line about an epoch of so many: its metrics, except columns such as `eval_recall/0`, and its speed."""
    columns = [f"epoch {record['epoch']}" + (f"/{epochs}" if epochs else "")]
    for name, value in record.items():
        if name not in NO_METRICS and "/" not in name and value is not None and not isinstance(value, bool):
            columns.append(f"{name.replace('_', ' ')} {number_text(value)}")
    columns.append(f"{record['seconds']:.1f} s")
    columns += [f"{record[name]:,.0f} {unit}" for name, unit in SPEEDS.items() if name in record]
    return "  ".join(columns)


def metric_names(record: Record) -> list[str]:
    """The names of the metrics that a record has numbers of."""
    return [
        name
        for name, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in NO_METRICS
    ]


def metric_groups(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """The metrics that are drawn together: of each the curves, as {label: name in the records}."""
    groups: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(name for record in records for name in metric_names(record)):
        data = next((data for data in ("test", "eval") if name.startswith(f"{data}_")), "train")
        group, _, column = name.removeprefix(f"{data}_").partition("/")
        groups.setdefault(group, {})[f"{data} {column}".strip()] = name
    return groups


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "seconds":
        return f"{value:.2f}"
    return f"{value:,.0f}" if name in SPEEDS else number_text(value)


def to_pandas(history: Sequence[Record]) -> Any:
    """Convert a history to a `pandas.DataFrame` with one row for each epoch.

    It needs pandas. Values that were not measured are missing. `to_pandas(history).to_csv("history.csv")` writes a
    table.

    Example:
        >>> frame = to_pandas([{"epoch": 1, "loss": 2.5}, {"epoch": 2, "loss": 1.5}])  # doctest: +SKIP
        >>> float(frame["loss"].min())  # doctest: +SKIP
        1.5
    """
    check_records(history, "to_pandas")
    return import_for("to_pandas", "pandas").DataFrame(list(history))


def check_records(history: Any, where: str) -> None:
    if not isinstance(history, Sequence) or not all(isinstance(record, dict) for record in history):
        raise TypeError(f"{where}: expected the history, the second result of train.fit; got {describe(history)}")


def import_for(who: str, module: str, extra: str = "") -> Any:
    """A module of an optional package. `ModuleNotFoundError` says who needs it and how it is installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(f"{who} needs {package}: pip install {extra or package}") from error


# Pictures.


@contextlib.contextmanager
def readable(who: str) -> Generator[None]:
    """Draw in colours that read on a light and on a dark page, unless the user chose some. It decorates a function.

    `who` draws, for the message without matplotlib.
    """
    names = ("matplotlib", "matplotlib.figure", "matplotlib.style")  # `new_figure` needs the second
    matplotlib, *_ = [import_for(who, name) for name in names]
    now, default = matplotlib.rcParams, matplotlib.rcParamsDefault
    with matplotlib.style.context(_STYLE if all(now[name] == default[name] for name in _OWN) else {}):
        yield


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches, which is in no window and in no global list of figures."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), layout="constrained")
    figure._repr_png_ = lambda: png(figure)  # so a notebook shows it once
    return figure


def save_figure(figure: Any, path: str | os.PathLike[str] | None, where: str) -> Any:
    """Write the figure to a file if there is a path, and return it."""
    if path is not None:
        figure.savefig(files.as_path(path, f"{where}: path"), dpi=150)
    return figure


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


@readable("plot_history")
def plot_history(history: Sequence[Record], path: str | os.PathLike[str] | None = None) -> Any:
    """Plot each metric of a history, training and evaluation together. Returns the matplotlib figure.

    The axis is the epoch, or the step if the history has evaluations within epochs.

    Args:
        history: the history that `fit` returned.
        path: a file for the picture. Its suffix sets the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed. ValueError: the history is empty.

    Example:
        >>> figure = plot_history([{"epoch": 1, "loss": 2.3, "accuracy": 0.1, "test_accuracy": 0.2}])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['loss', 'accuracy']
    """
    check_records(history, "plot_history")
    if not history:
        raise ValueError("plot_history: the history is empty")
    groups = metric_groups(history)
    axis = "step" if any(record.get("under_way") for record in history) else "epoch"
    return save_figure(_figure(groups, axis, history, min(len(groups), _COLUMNS) or 1), path, "plot_history")


def _figure(groups: dict[str, dict[str, str]], axis: str, records: Sequence[Record], columns: int) -> Any:
    """A picture for each group of metrics, over the epochs or the steps of the records that have them."""
    rows = -(-len(groups) // columns) or 1
    figure = new_figure(4.5 * columns, 3.2 * rows)
    for i, (group, curves) in enumerate(groups.items(), 1):
        axes = figure.add_subplot(rows, columns, i)
        for label, name in curves.items():
            points = [(record[axis], record[name]) for record in records if record.get(name) is not None]
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(xlabel=axis, ylabel=group.replace("_", " "))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if curves:
            axes.legend()
    return figure


class LivePlot:
    """A callback of `fit` that plots the metrics live in a notebook.

    The plots are updated in place, about once a second, in at most a twentieth of the time. Outside a notebook, and in
    all processes except the first, nothing is drawn. It needs matplotlib.

    Example:
        >>> from jaxpar import train
        >>> plot = train.LivePlot()
        >>> # state, history = train.fit(..., callbacks=plot, progress=False)
    """

    def __init__(self):
        with readable("LivePlot"):  # an error now is better than after an epoch
            pass
        self._draws = in_notebook() and jax.process_index() == 0
        self._clear()

    def __call__(self, state: TrainState, record: Record) -> None:
        """Add the record of an epoch: `callback(state, record)`."""
        self._records.append(record)
        self._add(line(record))

    def on_start(self, history: History) -> None:
        """Draw the first plot while XLA compiles the first step."""
        self._records = list(history)
        self._add("compiling…")

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a step. `fit` calls it after each step."""
        if step <= self._last:  # `fit` calls it, and so may a function of the user
            return
        self._last, loss = step, metrics.get("loss", float("nan"))
        if step % self._stride == 0:
            self._losses.append((step, loss))
        if len(self._losses) > 2 * _POINTS:
            self._losses, self._stride = self._losses[1::2], 2 * self._stride
        self._add(f"step {step}  loss {loss:.4f}")

    def on_end(self, history: History) -> None:
        """Draw the remaining points. The next run begins a new plot."""
        if not self._is_current:
            self._draw()
        self._clear()

    def _clear(self) -> None:
        self._losses: list[tuple[int, float]] = []
        self._stride, self._last = 1, 0
        self._records: list[Record] = []
        self._title = ""
        self._shown: Any = None
        self._due = 0.0
        self._is_current = True

    def _add(self, title: str) -> None:
        self._title, self._is_current = title, False
        if time.perf_counter() >= self._due:
            self._draw()

    def _draw(self) -> None:
        if not self._draws:
            return
        from IPython.display import display

        began = time.perf_counter()
        content = {"image/png": png(self._plot()), "text/plain": self._title}
        if self._shown is None:
            self._shown = display(content, raw=True, display_id=True)
        else:
            self._shown.update(content, raw=True)
        self._is_current = True
        now = time.perf_counter()
        self._due = now + max(_EVERY, (now - began) / _SHARE)

    @readable("LivePlot")
    def _plot(self) -> Any:
        """The figure: two metrics in a row, loss and accuracy first."""
        groups = {"loss": {}, **metric_groups(self._records)}
        shown = sorted(groups.items(), key=lambda item: item[0] not in ("loss", "accuracy"))[:_MOST_METRICS]
        figure = _figure(dict(shown), "step", self._records, 2)
        if self._losses:
            axes = figure.axes[0]
            axes.plot(*zip(*self._losses, strict=True), alpha=0.35, linewidth=1, color="tab:gray", label="step")
            axes.legend()
        figure.suptitle(self._title, fontsize=10)
        return figure
