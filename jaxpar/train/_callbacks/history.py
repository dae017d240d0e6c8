"""What `fit` measured, epoch by epoch: a list of dicts, a table, a DataFrame, and pictures.

`plot_history` draws a run that is over, `LivePlot` one that is under way in a notebook. The figures are of matplotlib,
and a notebook shows them without pyplot.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from collections.abc import Generator, Sequence
from typing import Any

import jax

from ..._core.calls import answers
from ..._core.text import Table, describe, in_notebook, plural

Record = dict[str, Any]

SPEEDS = {"images_per_second": "images/s", "examples_per_second": "examples/s"}
# What a record has next to metrics.
NO_METRICS = ("epoch", "step", "seconds", *SPEEDS, "skipped", "interrupted", "under_way")

_MOST_ROWS = 40  # of the table
_STYLE = "jaxpar.train.notebook"
_OWN = ("figure.facecolor", "text.color")  # a user who changed one of these has colours of their own
_COLUMNS = 3  # pictures of a history side by side

_EVERY = 1.0  # seconds between two pictures, at least
_SHARE = 0.05  # of the time that drawing may take
_POINTS = 1000  # of the curve of the steps. More cannot be seen.
_MOST_METRICS = 8  # that are drawn


class History(list[Record]):
    """A list with one dict for each epoch. Notebooks show it as a table.

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
        table = Table(plural(len(self), "epoch"), columns, rows, _MOST_ROWS, "right", first=_MOST_ROWS // 4)
        return table._repr_html_()


def number_text(value: Any) -> str:
    """A metric in a few digits.

    >>> number_text(0.25), number_text(1e-7), number_text(3)
    ('0.2500', '1.000e-07', '3')
    """
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"


def line(record: Record, epochs: int | None = None) -> str:
    """One line about an epoch of so many: its metrics, except columns such as `eval_recall/0`, and its speed.

    >>> line({"epoch": 1, "loss": 2.3, "accuracy": 0.1, "seconds": 2.0, "images_per_second": 30000.0}, 5)
    'epoch 1/5  loss 2.3000  accuracy 0.1000  2.0 s  30,000 images/s'
    """
    words = [f"epoch {record['epoch']}" + (f"/{epochs}" if epochs else "")]
    for name, value in record.items():
        if name not in NO_METRICS and "/" not in name and value is not None and not isinstance(value, bool):
            words.append(f"{name.replace('_', ' ')} {number_text(value)}")
    words.append(f"{record['seconds']:.1f} s")
    words += [f"{record[name]:,.0f} {unit}" for name, unit in SPEEDS.items() if name in record]
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
    return f"{value:,.0f}" if name in SPEEDS else number_text(value)


@answers("to_pandas")
def to_pandas(history: Sequence[Record]) -> Any:
    """Convert a history to a `pandas.DataFrame` with one row for each epoch.

    Values that were not measured are missing. `to_pandas(history).to_csv("history.csv")` writes a table.

    Raises:
        ModuleNotFoundError: pandas is not installed.

    Example:
        >>> frame = to_pandas([{"epoch": 1, "loss": 2.5}, {"epoch": 2, "loss": 1.5}])  # doctest: +SKIP
        >>> float(frame["loss"].min())  # doctest: +SKIP
        1.5
    """
    check_records(history, "to_pandas")
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas") from error
    return pandas.DataFrame(list(history))


def check_records(history: Any, where: str) -> None:
    if not isinstance(history, Sequence) or not all(isinstance(record, dict) for record in history):
        raise TypeError(f"{where}: expected the history, the second result of train.fit; got {describe(history)}")


# Pictures.


def new_figure(name: str, width: float, height: float) -> Any:
    """An empty figure of this size in inches. `name` is the function that draws, for the message without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{name} needs matplotlib: pip install matplotlib") from error
    figure: Any = Figure(figsize=(width, height), layout="constrained")
    # It is in no window and in no global list of figures, so a notebook shows it once, by this method.
    figure._repr_png_ = lambda: png(figure)
    return figure


@contextlib.contextmanager
def readable() -> Generator[None]:
    """Draw in colours that read on a light and on a dark page, unless the user chose some. It decorates a function."""
    try:
        import matplotlib.style
    except ModuleNotFoundError:  # `new_figure` says so, with the name of the function
        yield
        return
    now, default = matplotlib.rcParams, matplotlib.rcParamsDefault
    with matplotlib.style.context(_STYLE if all(now[name] == default[name] for name in _OWN) else {}):
        yield


def save_figure(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    """Write the figure to a file if there is a path, and return it."""
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


@answers("plot_history")
@readable()
def plot_history(history: Sequence[Record], path: str | os.PathLike[str] | None = None) -> Any:
    """Plot each metric of a history, training and evaluation together.

    The axis is the epoch, or the step if the history has evaluations within epochs.

    Args:
        history: the history that `fit` returned.
        path: a file for the picture. Its suffix sets the format.

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
    check_records(history, "plot_history")
    if not history:
        raise ValueError("plot_history: the history is empty")
    groups = metric_groups(history)
    columns = min(len(groups), _COLUMNS) or 1
    rows = -(-len(groups) // columns) or 1
    figure = new_figure("plot_history", 4.5 * columns, 3.2 * rows)
    axis = "step" if any(record.get("under_way") for record in history) else "epoch"
    places = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for group, curves in groups.items():
        axes = places.pop(0)
        _draw_curves(axes, axis, group, curves, history)
        axes.legend()
    for axes in places:
        figure.delaxes(axes)
    return save_figure(figure, path)


def _draw_curves(axes: Any, axis: str, metric: str, curves: dict[str, str], records: Sequence[Record]) -> None:
    """Draw a metric over the epochs or the steps of the records that have it."""
    for label, name in curves.items():
        found = [(record[axis], record[name]) for record in records if record.get(name) is not None]
        if found:
            axes.plot(*zip(*found, strict=True), marker="o", label=label)
    axes.set(xlabel=axis, ylabel=metric.replace("_", " "))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


class LivePlot:
    """A callback of `fit` that plots the metrics live in a notebook.

    Each metric has a plot with training and evaluation; the loss of each step has a plot too. The plots are updated in
    place, about once a second. Drawing takes at most a twentieth of the time. Outside a notebook, and in all processes
    except the first, nothing is drawn.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> from jaxpar import train
        >>> plot = train.LivePlot()
        >>> # state, history = train.fit(..., callbacks=plot, progress=False)
    """

    def __init__(self):
        new_figure("LivePlot", 1, 1)  # an error now is better than after an epoch
        self._draws = in_notebook() and jax.process_index() == 0
        self._clear()

    def __call__(self, state: Any, record: Record) -> None:
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

    @readable()
    def _plot(self) -> Any:
        """The figure: two metrics in a row, each with its curves."""
        panels = _panels(self._records)
        rows = -(-len(panels) // 2)
        figure = new_figure("LivePlot", 9, 3.2 * rows)
        for i, (name, fields) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, 2, i)
            _draw_curves(axes, "step", name, fields, self._records)
            if name == "loss" and self._losses:
                axes.plot(*zip(*self._losses, strict=True), alpha=0.35, linewidth=1, color="tab:gray", label="step")
            if axes.get_lines():
                axes.legend()
        figure.suptitle(self._title, fontsize=10)
        return figure


def _panels(records: list[Record]) -> dict[str, dict[str, str]]:
    """For each metric the label and the name in the records of each curve. Loss and accuracy come first.

    >>> _panels([{"epoch": 1, "step": 3, "norm": 2.0, "loss": 0.5, "eval_loss": 0.6, "seconds": 1.0}])
    {'loss': {'train': 'loss', 'eval': 'eval_loss'}, 'norm': {'train': 'norm'}}
    """
    groups = {"loss": {}, **metric_groups(records)}
    return dict(sorted(groups.items(), key=lambda item: item[0] not in ("loss", "accuracy"))[:_MOST_METRICS])
