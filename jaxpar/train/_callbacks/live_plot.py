"""A plot of the losses in a notebook that is updated while the training runs."""

from __future__ import annotations

import time
from typing import Any

import jax

from ..._core.text import in_notebook
from .figures import new_figure, png, readable
from .history import History, Record, line, metric_groups

_EVERY = 1.0  # seconds between two pictures, at least
_SHARE = 0.05  # of the time that drawing may take
_POINTS = 1000  # of the curve of the steps. More cannot be seen.
_MOST = 8  # metrics that are drawn


class LivePlot:
    """A callback of `fit` that draws the metrics in a notebook while the training runs.

    There is a picture for each metric: of the training, of the evaluation, and of the loss for each step. They are
    updated in place, about once a second. Drawing takes at most a twentieth of the time. Outside a notebook, and in all
    processes except the first, nothing is drawn.

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
        """Draw what is known before the first step, which XLA compiles now."""
        self._records = list(history)
        self._add("compiling…")

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a step. `fit` calls it for each one."""
        if step <= self._last:  # `fit` calls it, and so may a function of the user
            return
        self._last, loss = step, metrics.get("loss", float("nan"))
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

    @readable
    def _plot(self) -> Any:
        """The figure: two metrics in a row, each with its curves."""
        panels = _panels(self._records)
        rows = -(-len(panels) // 2)
        figure = new_figure("LivePlot", 9, 3.2 * rows)
        for i, (name, fields) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, 2, i)
            axes.set(xlabel="step", ylabel=name.replace("_", " "))
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
            for label, field in fields.items():
                found = [(r["step"], r[field]) for r in self._records if r.get(field) is not None]
                if found:
                    axes.plot(*zip(*found, strict=True), marker="o", label=label)
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
