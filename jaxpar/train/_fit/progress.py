"""What a running loop shows: a bar in a terminal or a notebook or a picture there, elsewhere a line per epoch."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import jax

from .live_plot import LivePlot


class Progress:
    """A bar for each epoch, or a line after it; nothing where it is switched off.

    Args:
        show: whether to show anything; "plot": as a picture, in a notebook.
        epochs: how many there will be in all.
        steps: how many steps an epoch has.
    """

    def __init__(self, show: bool | str, epochs: int, steps: int):
        show = show if jax.process_index() == 0 else False  # of several processes the first one speaks
        self._show, self._epochs, self._steps = bool(show), epochs, steps
        self._plot = LivePlot(epochs, steps) if show == "plot" and in_notebook() else None
        self._bars = bool(show) and self._plot is None and _interactive()
        self._bar: Any = None

    def start(self, epoch: int, done: int) -> None:
        """A new epoch, of which `done` steps were made before."""
        if self._plot is not None:
            self._plot.start(epoch, done)
        if self._bars:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tqdm's, where ipywidgets is missing: its plain bar will do
                from tqdm.auto import tqdm
            self._bar = tqdm(
                total=self._steps,
                initial=done,
                desc=f"epoch {epoch}/{self._epochs}",
                unit="step",
                file=sys.stdout,
            )

    def step(self, metrics: dict[str, float], images_per_second: float) -> None:
        """One step more; the metrics are of one that is finished, a little earlier."""
        if self._plot is not None:
            self._plot.step(metrics, images_per_second)
        if self._bar is not None:
            words = {k: f"{v:.4f}" for k, v in metrics.items()}
            if images_per_second:
                words["images/s"] = f"{images_per_second:,.0f}"
            self._bar.set_postfix(words, refresh=False)
            self._bar.update()

    def end(self, record: dict[str, Any]) -> None:
        """The epoch is over: its line, with the bar or without."""
        self._close_bar()
        if self._plot is not None:
            self._plot.end(record, line(record, self._epochs))
        elif self._show:
            print(line(record, self._epochs), flush=True)

    def close(self) -> None:
        if self._plot is not None:
            self._plot.close()
        self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.leave = False
            self._bar.total = self._bar.n  # the notebook's bar stays, red, where it is not full
            self._bar.close()
            self._bar = None


def line(record: dict[str, Any], epochs: int) -> str:
    """One line about an epoch.

    >>> line({"epoch": 1, "loss": 2.3, "accuracy": 0.1, "test_accuracy": None, "seconds": 2.0,
    ...       "images_per_second": 30000.0}, 5)
    'epoch 1/5  loss 2.3000  accuracy 0.1000  2.0 s  30,000 images/s'
    """
    words = [f"epoch {record['epoch']}/{epochs}"]
    for name in ("loss", "accuracy", "test_loss", "test_accuracy"):
        if record.get(name) is not None:
            words.append(f"{name.replace('_', ' ')} {record[name]:.4f}")
    words += [f"{record['seconds']:.1f} s", f"{record['images_per_second']:,.0f} images/s"]
    return "  ".join(words)


def _interactive() -> bool:
    return sys.stdout.isatty() or in_notebook()


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})
