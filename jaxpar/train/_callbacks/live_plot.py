"""A plot of the losses in a notebook that is updated while the training runs."""

from __future__ import annotations

import time
from typing import Any

import jax

from ..._core.text import in_notebook
from .figures import new_figure, png
from .history import History, Record
from .line import line

_EVERY = 1.0  # seconds between two pictures, at least
_SHARE = 0.05  # of the time that drawing may take
_POINTS = 1000  # of the curve of the steps. More cannot be seen.


class LivePlot:
    """A callback of `fit` that draws loss and accuracy in a notebook while the training runs.

    The picture is updated in place, about once a second. Drawing takes at most a twentieth of the time. Outside a
    notebook, and in all processes except the first, nothing is drawn. Give its `on_step` to `fit` too for the loss of
    each step.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> plot = LivePlot()
        >>> # state, history = train.fit(..., callbacks=plot, on_step=plot.on_step, progress=False)
    """

    def __init__(self):
        self._figure = new_figure("LivePlot", 9, 3.2)
        self._axes = self._figure.subplots(1, 2)
        self._draws = in_notebook() and jax.process_index() == 0
        self._clear()

    def __call__(self, state: Any, record: Record) -> None:
        """Add the record of an epoch: `callback(state, record)`."""
        self._records.append(record)
        self._add(line(record))

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a step: `fit(..., on_step=plot.on_step)`."""
        loss = metrics.get("loss", float("nan"))
        if step % self._stride == 0:
            self._losses.append((step, loss))
        if len(self._losses) > 2 * _POINTS:
            self._losses, self._stride = self._losses[1::2], 2 * self._stride
        self._add(f"step {step}  loss {loss:.4f}")

    def on_end(self, history: History) -> None:
        """Draw what the last picture does not show. The next run begins another picture."""
        del history
        if not self._is_current:
            self._draw()
        self._clear()

    def _clear(self) -> None:
        self._losses: list[tuple[int, float]] = []
        self._stride = 1
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
        self._plot()
        content = {"image/png": png(self._figure), "text/plain": self._title}
        if self._shown is None:
            self._shown = display(content, raw=True, display_id=True)
        else:
            self._shown.update(content, raw=True)
        self._is_current = True
        now = time.perf_counter()
        self._due = now + max(_EVERY, (now - began) / _SHARE)

    def _plot(self) -> None:
        for axes, name in zip(self._axes, ("loss", "accuracy"), strict=True):
            axes.clear()
            axes.set(xlabel="step", ylabel=name)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
            for label, field in (("train", name), ("test", f"test_{name}")):
                found = [(r["step"], r[field]) for r in self._records if r.get(field) is not None]
                if found:
                    axes.plot(*zip(*found, strict=True), marker="o", label=label)
        if self._losses:
            loss = self._axes[0]
            loss.plot(*zip(*self._losses, strict=True), alpha=0.35, linewidth=1, color="tab:gray", label="step")
        for axes in self._axes:
            if axes.get_lines():
                axes.legend()
        self._figure.suptitle(self._title, fontsize=10)
