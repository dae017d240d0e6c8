"""A picture of the losses that is drawn anew in its place while the training runs, in a notebook."""

from __future__ import annotations

import time
from typing import Any

from ..._core.figures import figure, png

_EVERY = 1.0  # seconds between two pictures, at least
_SHARE = 0.05  # of the time that drawing may take
_POINTS = 1000  # of the curve of the steps; more are not to be seen


class LivePlot:
    """The loss of each step, and loss and accuracy of each epoch.

    Args:
        epochs: how many there will be.
        steps: how many steps an epoch has.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """

    def __init__(self, epochs: int, steps: int):
        self._figure = figure('fit(progress="plot")', 9, 3.2)
        self._axes = self._figure.subplots(1, 2)
        self._epochs, self._steps = epochs, steps
        self._at, self._stride = 0, 1
        self._losses: list[tuple[float, float]] = []
        self._records: list[dict[str, Any]] = []
        self._words = ""
        self._shown: Any = None
        self._due = 0.0
        self._current = False

    def start(self, epoch: int, done: int) -> None:
        """A new epoch, of which `done` steps were made before."""
        self._at = (epoch - 1) * self._steps + done

    def step(self, metrics: dict[str, float], images_per_second: float) -> None:
        """One step more."""
        self._at += 1
        self._current = False
        if self._at % self._stride == 0:
            self._losses.append((self._at / self._steps, metrics.get("loss", float("nan"))))
        if len(self._losses) > 2 * _POINTS:
            self._losses, self._stride = self._losses[1::2], 2 * self._stride
        if time.perf_counter() >= self._due:
            self._words = (
                f"epoch {-(-self._at // self._steps)}/{self._epochs}  loss {metrics.get('loss', float('nan')):.4f}  "
                f"{images_per_second:,.0f} images/s"
            )
            self._draw()

    def end(self, record: dict[str, Any], words: str) -> None:
        """The epoch is over."""
        self._records.append(record)
        self._words = words
        self._current = False
        if time.perf_counter() >= self._due or record["epoch"] == self._epochs:
            self._draw()

    def close(self) -> None:
        """The last picture, if there is something that it does not show."""
        if not self._current and self._losses:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        began = time.perf_counter()
        self._plot()
        content = {"image/png": png(self._figure), "text/plain": self._words}
        if self._shown is None:
            self._shown = display(content, raw=True, display_id=True)
        else:
            self._shown.update(content, raw=True)
        self._current = True
        now = time.perf_counter()
        self._due = now + max(_EVERY, (now - began) / _SHARE)

    def _plot(self) -> None:
        loss, accuracy = self._axes
        for axes, name in ((loss, "loss"), (accuracy, "accuracy")):
            axes.clear()
            axes.set(xlabel="epoch", ylabel=name, xlim=(0, self._epochs))
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
            for label, field in (("train", name), ("test", f"test_{name}")):
                found = [(r["epoch"], r[field]) for r in self._records if r.get(field) is not None]
                if found:
                    axes.plot(*zip(*found, strict=True), marker="o", clip_on=False, label=label)
        if self._losses:
            loss.plot(*zip(*self._losses, strict=True), alpha=0.35, linewidth=1, color="tab:gray", label="step")
        for axes in self._axes:
            if axes.get_lines():
                axes.legend()
        self._figure.suptitle(self._words, fontsize=10)
