"""Pictures of a run: `plot_history` of one that is over, `LivePlot` of one that is under way in a notebook.

The figures are of matplotlib, and a notebook shows them without pyplot.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Generator, Sequence
from typing import Any

import jax

from ..._core.calls import answers
from ..._core.text import in_notebook
from .history import History, Record, check_records, line, metric_groups

_STYLE = "jaxpar.train.notebook"
_OWN = ("figure.facecolor", "text.color")  # a user who changed one of these has colours of their own
_COLUMNS = 3  # pictures of a history side by side

_EVERY = 1.0  # seconds between two pictures, at least
_SHARE = 0.05  # of the time that drawing may take
_POINTS = 1000  # of the curve of the steps. More cannot be seen.
_MOST = 8  # metrics that are drawn


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
    return dict(sorted(groups.items(), key=lambda item: item[0] not in ("loss", "accuracy"))[:_MOST])
