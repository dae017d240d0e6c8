"""Where a run left its certificate: what can be told of a line that differs, in words and as a picture."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from ... import data
from ..._core.arrays import PyTree
from ..._store.store import specs_of
from .._step.loss import run_loss
from .._step.state import TrainState, carries
from .._step.train_step import TrainStep
from .certificate import Entry, which_differ

if TYPE_CHECKING:
    from ... import viz

Network = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]  # a function and its arguments


@dataclasses.dataclass(frozen=True)
class Fault:
    """Where a run left its certificate.

    Attributes:
        first_step, last_step: the wrong step is one of these. They are equal where it is known.
        shards: the numbers of the virtual shards whose gradient was wrong. Empty: none, or that is not known.
        leaves: the names of what was wrong first: params by their gradients, or leaves of the state. Empty: not known.
        why: what this rests on, and what cannot be told, in a sentence.
    """

    first_step: int
    last_step: int
    shards: tuple[int, ...]
    leaves: tuple[str, ...]
    why: str
    # The loss function of the step and the shapes of its arguments, for the picture.
    _network: Network | None = dataclasses.field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        steps = (
            f"step {self.last_step}"
            if self.first_step == self.last_step
            else (f"one of the steps {self.first_step} to {self.last_step}")
        )
        shown = [*self.leaves[:_SHOWN], *(["..."] if len(self.leaves) > _SHOWN else [])]
        shards = (
            f", shard{'s' if len(self.shards) > 1 else ''} {', '.join(map(str, self.shards))}" if self.shards else ""
        )
        leaves = f", {', '.join(shown)}" if shown else ""
        return f"first wrong: {steps}{shards}{leaves} ({self.why})"

    def plot(self) -> viz.Plot:
        """The network of the loss function. Layers whose params, or the optimizer's state of them, were wrong are red.

        `fault.plot().save("fault.svg")` writes it. The function is traced for one device, and not run.

        Raises:
            ValueError: the step is a function of your own, which leaf was wrong is not known, or the loss function
                cannot be traced.
        """
        from ... import viz  # who trains does not need it

        if self._network is None:
            raise ValueError("train.Fault: no picture: only a step of make_train_step says what its loss function is")
        if not self.leaves:
            raise ValueError(f"train.Fault: no picture: which leaf was wrong is not known ({self.why})")
        try:
            fn, arguments = self._network()
            return viz._plot_marked(fn, arguments, self.leaves, str(self).partition(" (")[0])
        except Exception as error:  # of the data, which may be at their end, or of the loss function
            raise ValueError(f"train.Fault: no picture: {type(error).__name__}: {error}") from error

    def _repr_html_(self) -> str:
        from ... import viz

        text = f"<p>{html.escape(str(self))}</p>"
        try:
            picture = self.plot().pipe("svg", encoding="utf-8")
        except ValueError:  # there is none
            return text
        except viz.RenderError as error:
            return f"{text}<p>{html.escape(str(error))}</p>"
        return f"<div>{text}{picture[picture.find('<svg') :]}</div>"


_SHOWN = 4  # leaves


def network_of(step: TrainStep, state: TrainState, source: data.Source, batch_size: int) -> Network:
    """The loss function of a step as on one device, for a fault's picture.

    A source that does not know the shapes of its batches is asked for the next one when the picture is drawn.
    """
    specs, device = specs_of(state.store), (state.store.devices or jax.local_devices())[0]
    params = state.store.treedef.unflatten([specs[key] for key, _ in state.store.paths])
    has_state = carries(state.model_state)
    others = (state.rng, state.step, state.model_state if has_state else ())
    others = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), others)

    def network() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        shapes = getattr(source, "batch_shapes", lambda batch_size: None)(batch_size)
        batch = next(iter(source.batches(batch_size, rng=jax.random.key(0)))) if shapes is None else shapes

        def loss(params: PyTree, batch: PyTree, rng: jax.Array, number: jax.Array, model_state: PyTree) -> Any:
            return run_loss(step.loss_fn, (params, batch, rng, *([model_state] if has_state else [])), number)[0]

        # A loss function may ask for the axes of the devices.
        axes = (step.axis_name,) if step.global_step is None else step.global_step.axes
        mesh = Mesh(np.array(device).reshape([1] * len(axes)), axes)
        return jax.shard_map(loss, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), (params, batch, *others)

    return network


def fault_of(line: Entry, now: Entry, right: int, names: dict[str, list[str]]) -> Fault:
    """Where a line of a certificate differs from what was computed now, after the step `right`."""
    step = line["step"]
    of_leaves, of_shards, of_gradient, before = (
        which_differ(line, now, name) for name in ("leaves", "shards", "gradient", "before")
    )
    if of_leaves is None:
        return Fault(right + 1, step, (), (), "the certificate has no hashes of leaves; an earlier jaxpar wrote it")

    # In the order in which a step computes: the state it begins with, the params before it, its shards, their sum. The
    # first of these that differs is at fault, and what follows from it differs too.
    leaves = tuple(names["leaves"][i] for i in of_leaves)
    if right == step:
        return Fault(step, step, (), leaves, "the state that was begun with differs")
    first = right + 1
    if of_shards is None or of_gradient is None:
        why = (
            "no shard can be named: without virtual shards a gradient has other bits on other devices, and the "
            "certificate of an elastic run has hashes of leaves only"
        )
        return Fault(first, step, (), leaves, why + _ONLY_SOME * (first != step))
    gradient = tuple(names["gradient"][i] for i in of_gradient)
    if before:
        return Fault(first, step - 1, (), (), f"the params were wrong before step {step}" + _ONLY_SOME)
    # The params were right. Shards that differ were computed wrongly.
    if of_shards:
        why = "the other shards are right, and so were the params"
        if len(of_shards) == len(line["shards"]) // 4:
            why = "all shards differ: other data or another program; or the params changed after their hash was taken"
        return Fault(step, step, tuple(of_shards), gradient or leaves, why)
    if gradient:
        return Fault(step, step, (), gradient, "all shards are right, and their sum is wrong")
    why = "the gradient is right; the update, or the state of the optimizer before it, is wrong"
    return Fault(first, step, (), leaves, why + _ONLY_SOME * (first != step))


_ONLY_SOME = "; steps without a line are between, and certificate_every=1 tells these apart"
