"""Pictures of a history, after a run and while it trains.

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

from ..._core import files
from ..._core.text import in_notebook
from .._step.state import TrainState
from .history import History, Record, import_for, line, metric_groups

_STYLE = "jaxpar.train.notebook"
_OWN = ("figure.facecolor", "text.color")  # a user who changed one of these has colours of their own
_COLUMNS = 3  # pictures of a history side by side

_EVERY = 1.0  # seconds between two pictures, at least
_SHARE = 0.05  # of the time that drawing may take
_POINTS = 1000  # of the curve of the steps. More cannot be seen.
_MOST_METRICS = 8  # that are drawn


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
    # pyplot would keep every figure until it is closed, and open a window where there is a screen.
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), layout="constrained")
    figure._repr_png_ = lambda: png(figure)  # so a notebook shows it once
    return figure


def save_figure(figure: Any, path: str | os.PathLike[str] | None, caller: str) -> Any:
    """Write the figure to a file if there is a path, and return it."""
    if path is not None:
        figure.savefig(files.as_path(path, f"{caller}: path"), dpi=150)
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
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> figure = plot_history([{"epoch": 1, "loss": 2.3, "accuracy": 0.1, "test_accuracy": 0.2}])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['loss', 'accuracy']
    """
    groups = metric_groups(history)
    axis = "step" if any(record.get("under_way") for record in history) else "epoch"
    return save_figure(_figure(groups, axis, history, min(len(groups), _COLUMNS) or 1), path, "plot_history")


def _figure(groups: dict[str, dict[str, str]], axis: str, records: Sequence[Record], columns: int) -> Any:
    """A picture for each group of metrics, over the epochs or the steps of the records that have them."""
    # A history may lack a metric in some records, such as scores of evaluations within an epoch.
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

    def __repr__(self) -> str:
        return f"LivePlot({'draws in this notebook' if self._draws else 'draws nothing outside of a notebook'})"

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
        # Every second point, evenly over the whole run. `[1::2]` keeps the multiples of the doubled stride.
        if len(self._losses) > 2 * _POINTS:
            self._losses, self._stride = self._losses[1::2], 2 * self._stride
        self._add(f"step {step}  loss {loss:.4f}")

    def on_end(self, history: History) -> None:
        """Draw the remaining points. The next run begins a new plot."""
        if not self._is_current:  # points came after the last picture, within its second
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

        # A picture takes longer the more there is in it, so the next one waits for twenty times as long.
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
