"""A learning-rate range test: short training with rates that grow, and the loss at each of them."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ... import data, updaters
from ..._core import checks, text
from ..._core.transfers import allows_transfers
from ..._devices import mesh, user_mesh
from .._callbacks.figures import new_figure, png, readable, save_figure
from .._step.state import TrainState, check_is_state
from .._step.train_step import TrainStep
from .progress import BEHIND

_CALLER = "train.lr_find"
_SMOOTH = 0.9  # of the average of the losses
_ROUNDING = 1e-5  # of the loss: what it falls by less is rounding
_TOO_MUCH = 4.0  # times the least loss so far, at which the test ends


@dataclasses.dataclass(frozen=True, repr=False)
class RateTest:
    """The result of `lr_find`. A notebook shows its curve.

    Attributes:
        rates: the learning rate of each step.
        losses: the loss of each step, before its update.
        smoothed: the exponential moving average of the losses.
        suggestion: the rate at which the smoothed loss falls fastest. None if the loss never falls.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None

    @readable("RateTest.plot")
    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot the loss over the rate. Returns the matplotlib figure."""
        figure = new_figure(6, 3.6)
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="tab:gray", alpha=0.4, linewidth=1, label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="tab:orange", linestyle="--", label=f"{self.suggestion:.2e}")
        # Losses explode at the highest rates, and would press the fall of the others flat.
        least = min(self.smoothed)
        axes.set(xlabel="learning rate", ylabel="loss", xscale="log")
        if math.isfinite(least):
            axes.set_ylim(top=max(self.smoothed[0], least) + 0.5 * abs(self.smoothed[0] - least) + 1e-12)
        axes.grid(alpha=0.3)
        axes.legend()
        return save_figure(figure, path, "lr_find, plot")

    def __repr__(self) -> str:
        rate = "none" if self.suggestion is None else f"{self.suggestion:.2e}"
        return f"RateTest({len(self.rates)} rates from {self.rates[0]:.2e} to {self.rates[-1]:.2e}, suggestion {rate})"

    def _repr_html_(self) -> str:
        rows = [(f"{rate:.2e}", f"{loss:.4f}") for rate, loss in zip(self.rates, self.smoothed, strict=True)]
        result = "no rate makes the loss fall" if self.suggestion is None else f"suggestion {self.suggestion:.2e}"
        columns = ("rate", "smoothed loss")
        table = text.Table(f"learning rates: {result}", columns, rows, 20, "right", first=10)._repr_html_()
        try:  # within the HTML, since a notebook that has this shows no picture of another kind
            curve = base64.b64encode(png(self.plot())).decode()
        except ModuleNotFoundError:
            return table
        return f'<div><img alt="loss over learning rate" src="data:image/png;base64,{curve}">{table}</div>'


@allows_transfers
def lr_find(
    state: TrainState,
    step: TrainStep,
    train_data: data.Dataset | data.Source | Iterable[Any],
    *,
    batch_size: int | None = None,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
) -> RateTest:
    """Find a learning rate: train a copy with growing rates.

    The method is from Smith (2017). The rate is changed in the state, so the step is compiled once. `state` stays
    unchanged: give `updaters.set_learning_rate(state, found.suggestion)` to `fit`. The test ends when the loss is four
    times the smallest loss, or is not finite.

    Args:
        state: a state whose optimizer has the rate, a number, in its state:
            `optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)`, or one of `jp.updaters` with `rate_in_state=True`.
        step: from `make_train_step`.
        train_data, batch_size: as in `fit`. The data repeat if there are too few.
        lowest, highest: the first and the last rate.
        steps: the number of rates, in equal ratios.

    Raises:
        TypeError, ValueError: the state has no rate, or the rate follows a schedule; `lowest` is not below `highest`;
            the data have less than one batch.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from jaxpar import data, train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["image"] @ params["w"] - batch["label"]) ** 2).mean(), {}
        >>> lines = data.Dataset(np.ones((8, 2), np.float32), np.ones(8, np.float32))
        >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        >>> state, step = train.start({"w": jnp.zeros(2)}, tx, loss_fn)
        >>> found = train.lr_find(state, step, lines, batch_size=8, lowest=1e-4, highest=10.0, steps=50)
        >>> 1e-3 < found.suggestion < 1.0, int(state.step)
        (True, 0)
    """
    steps = checks.whole_number(steps, _CALLER, "steps", least=2)
    for name, rate in (("lowest", lowest), ("highest", highest)):
        checks.number(rate, _CALLER, name, "a finite number above 0", lambda x: 0 < x < math.inf)
    if lowest >= highest:
        raise ValueError(f"{_CALLER}: lowest must be below highest, got {lowest} and {highest}")
    rates = np.geomspace(float(lowest), float(highest), steps).tolist()
    check_is_state(state, _CALLER)
    source = data.as_source(train_data)
    batch_size = data._usual_batch_size(source) if batch_size is None else batch_size
    batch_size = checks.whole_number(batch_size, _CALLER, "batch_size")
    checks.whole_batch(source.examples(batch_size), batch_size, _CALLER)
    # A copy, since the first step takes the state's memory. A rate that cannot be set is refused before work is spent.
    with user_mesh.outside_mesh():
        copy = updaters.set_learning_rate(mesh.own_copies(state), rates[0])
        options = data._batch_options(source, copy.store.devices, None, getattr(step, "virtual_shards", None))
        batches = source.batches(batch_size, rng=copy.rng, epochs=None, **options)

    def train(state: TrainState) -> Iterator[jax.Array]:
        """The loss at each rate, which may still be computed."""
        for rate, batch in zip(rates, batches, strict=False):
            with user_mesh.outside_mesh():
                state = updaters.set_learning_rate(state, rate)
            state, metrics = step(state, batch)
            yield metrics["loss"]

    losses, smoothed, mean = list[float](), list[float](), 0.0
    for loss in map(float, data._ahead(train(copy), BEHIND)):  # steps run ahead of the host
        # An exponential mean, since the loss of one batch says little about a rate.
        losses.append(loss)
        mean = _SMOOTH * mean + (1 - _SMOOTH) * loss
        smoothed.append(mean / (1 - _SMOOTH ** len(losses)))  # without the bias of the first values
        least = min(smoothed)
        if not math.isfinite(loss) or (len(losses) > 5 and smoothed[-1] > least + (_TOO_MUCH - 1) * abs(least)):
            break
    return RateTest(tuple(rates[: len(losses)]), tuple(losses), tuple(smoothed), _steepest(rates, smoothed))


def _steepest(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """The rate at which the loss falls fastest, before its least value."""
    # Over the logarithm of the rate, since the rates are in equal ratios.
    finite = list(itertools.takewhile(math.isfinite, smoothed))
    if len(finite) < 3:
        return None
    least = int(np.argmin(finite))
    if finite[0] - finite[least] <= _ROUNDING * abs(finite[0]):
        return None
    slopes = np.gradient(np.asarray(finite), np.log(rates[: len(finite)]))[: least + 1]
    steepest = int(np.argmin(slopes))
    return float(rates[steepest]) if slopes[steepest] < 0 else None
