"""Where two runs part, and whether it is rounding.

Two right runs on other numbers of devices part after a step, and soon are as far apart as a right one and a wrong one.
So curves and last states do not tell a bug from rounding. One step from the same state does: its gradients differ by as
much as rounding may do, or by far more.
"""

from __future__ import annotations

import dataclasses
import html
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import checkpoint, kv
from ..._core.arrays import PyTree, is_prng_key
from ..._core.text import Table, describe
from ..._core.transfers import allows_transfers
from ..._devices.mesh import to_host
from .._step.state import TrainState
from .saved_run import SavedRun, gradients_of

_SEEDS = 3  # of changes that say what rounding does to a gradient
# Right steps on other devices are at 0 to 3, and a mean in place of a sum, or a share twice, at 300,000 and more.
_MOST_UNITS = 30.0
# A step whose gradient depends on the order of the rows by more than this, relatively, has dropout or statistics of a
# share of the batch. Then another order says nothing of rounding.
_MOST_ROUNDING = 1e-2
_SHOWN = 12  # leaves


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """What `train.compare` found.

    Attributes:
        first_step: the first step after which the states of two runs differ, as far as states are known. None: they are
            equal, or two states were compared.
        first_leaf: the first leaf that differs there, params before the state of the optimizer. None: none does.
        distances: {leaf: norm of the difference over the norm}, of the leaves that differ there.
        units: {param: distance of its gradients}, of one step from the same state and batch, in units of what
            rounding may do. Empty if that could not be computed.
        is_rounding: whether the difference is rounding. None: that cannot be told, and `why` says the reason.
        why: what the comparison rests on, in a sentence.
    """

    first_step: int | None
    first_leaf: str | None
    distances: Mapping[str, float]
    units: Mapping[str, float]
    is_rounding: bool | None
    why: str

    @property
    def largest(self) -> tuple[str, float] | None:
        """The leaf that differs most, and its distance."""
        return max(self.distances.items(), key=lambda item: item[1], default=None)

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        rows = [
            [name, f"{distance:.2e}", f"{self.units[name]:.3g}" if name in self.units else ""]
            for name, distance in sorted(self.distances.items(), key=lambda item: -item[1])[:_SHOWN]
        ]
        columns = ("leaf", "distance", "gradient, in units of rounding")
        return f"<div>{lines}{Table('', columns, rows, _SHOWN, 'right')._repr_html_() if rows else ''}</div>"

    def _lines(self) -> list[str]:
        verdict = {True: "rounding", False: "not rounding", None: "rounding or not: cannot be told"}[self.is_rounding]
        if not self.distances:
            return [f"equal: {self.why}"]
        at = "" if self.first_step is None else f" after step {self.first_step}"
        leaf, distance = self.largest or ("", 0.0)
        lines = [f"they differ{at}, first in {self.first_leaf}; most in {leaf}, by {distance:.2e}"]
        if self.units:
            param, units = max(self.units.items(), key=lambda item: item[1])
            lines.append(
                f"gradients of one step from the same state: {units:.3g} units of rounding at most, in {param}"
            )
        return [*lines, f"{verdict}: {self.why}"]


@allows_transfers
def compare(a: SavedRun | TrainState, b: SavedRun | TrainState) -> Comparison:
    """Where two runs, or two states, differ, and whether it is rounding.

    Runs need the step and the data, `train.open(directory, step, data)`, for the exact step and for the verdict. Each
    may have devices and an engine of its own.

    Args:
        a, b: two runs of `train.open`, or two states.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import train
        >>> loss_fn = lambda params, batch, rng: (((params["w"] - batch) ** 2).mean(), {})
        >>> state, _ = train.start({"w": jnp.ones(2), "b": jnp.ones(2)}, optax.sgd(0.1), loss_fn)
        >>> other, _ = train.start({"w": jnp.ones(2), "b": jnp.full(2, 1.5)}, optax.sgd(0.1), loss_fn)
        >>> found = train.compare(state, other)
        >>> found.first_leaf, found.largest
        ('params/b', ('params/b', 0.5))
    """
    if isinstance(a, TrainState) and isinstance(b, TrainState):
        distances = _distances(a, b)
        why = "of two states alone nothing more is known" if distances else "all leaves have the same bits"
        return Comparison(None, next(iter(distances), None), distances, {}, None, why)
    if not isinstance(a, SavedRun) or not isinstance(b, SavedRun):
        raise TypeError(f"train.compare: expected two runs or two states, got {describe(a)} and {describe(b)}")
    if a._like is None or b._like is None:
        raise ValueError("train.compare: give both runs their step: train.open(directory, step, data)")
    can_compute = a.data is not None and b.data is not None

    # States that both runs have, or can compute: from the first checkpoint of the one that begins later.
    begin = max(a._saved[0].step, b._saved[0].step)
    saved = set(a.checkpoints) | set(b.checkpoints) if can_compute else set(a.checkpoints) & set(b.checkpoints)
    end = min(a.last_step, b.last_step)
    steps = sorted(step for step in saved | ({begin} if can_compute else set()) if begin <= step <= end)
    if not steps:
        return Comparison(None, None, {}, {}, None, "the runs have no checkpoint of one step")

    # Two runs that differ stay different, so the first step of these is found by halves.
    low, high, found = 0, len(steps), dict[str, float]()
    while low < high:
        middle = (low + high) // 2
        distances = _distances(a.at(steps[middle]), b.at(steps[middle]))
        if distances:
            high, found = middle, distances
        else:
            low = middle + 1
    if low == len(steps):
        why = f"the states of {len(steps)} steps, {steps[0]} to {steps[-1]}, have the same bits"
        return Comparison(None, None, {}, {}, None, why)
    first_step = steps[low]

    # Then, step by step after the last one that is equal, the first that differs.
    if can_compute and low > 0:
        # One run after the other, since both may read one iterator.
        start = steps[low - 1]
        pairs = zip(a._hashes(start, first_step), b._hashes(start, first_step), strict=True)
        number = start + next((i for i, (of_a, of_b) in enumerate(pairs, 1) if of_a != of_b), first_step - start)
        if number < first_step and (distances := _distances(a.at(number), b.at(number))):
            first_step, found = number, distances
    first_leaf = next(iter(found))

    # Why: what the two steps are given, and then what they make of it.
    if not can_compute:
        why = "without the data no step is computed; give train.open(directory, step, data)"
        return Comparison(first_step, first_leaf, found, {}, None, why)
    if (first_step in a.left_out) != (first_step in b.left_out):
        name = a.directory.name if first_step in a.left_out else b.directory.name
        why = f"{name} leaves out step {first_step}"
        return Comparison(first_step, first_leaf, found, {}, False, why)
    state = a.at(max(first_step - 1, begin))
    number = int(state.step) + 1
    batch = _host_batch(a, number)
    if not _same_bits(batch, _host_batch(b, number)):
        return Comparison(first_step, first_leaf, found, {}, False, f"the batches of step {number} differ")
    # The gradients do not depend on the optimizer, and say more of loss functions and steps than their texts do.
    if a.made_by.get("optimizer") != b.made_by.get("optimizer"):
        return Comparison(first_step, first_leaf, found, {}, False, "the optimizers differ")
    try:
        units, noise, unknown = _units(a, b, state, batch)
    except checkpoint.CheckpointError as error:  # the state of one run does not fit the other
        return Comparison(first_step, first_leaf, found, {}, None, str(error))
    if unknown:
        return Comparison(first_step, first_leaf, found, {}, None, f"{unknown} in step {number}")
    if noise > _MOST_ROUNDING:
        why = (
            f"the gradients of step {number} change by {noise:.1e} with the order of the rows, as dropout and "
            "statistics of a share of the batch do; with virtual_shards= they are the same on any number of devices"
        )
        return Comparison(first_step, first_leaf, found, units, None, why)
    is_rounding = max(units.values(), default=0.0) <= _MOST_UNITS
    names = [name for name in ("jax", "processor", "devices", "engine", "kind") if {*a.made_by, *b.made_by} >= {name}]
    differences = [
        f"{name}: {a.made_by.get(name)} and {b.made_by.get(name)}"
        for name in names
        if a.made_by.get(name) != b.made_by.get(name)
    ]
    why = f"one step from the same state, with the batch of step {number}"
    return Comparison(
        first_step, first_leaf, found, units, is_rounding, why + (f" ({'; '.join(differences)})" if differences else "")
    )


def _units(a: SavedRun, b: SavedRun, state: TrainState, batch: PyTree) -> tuple[dict[str, float], float, str]:
    """How far the gradients of two steps are apart, {param: distance in units of rounding}.

    Also by how much another order of the rows changes them at most, relatively, and why nothing is known, or "".
    """
    assert a.step is not None
    assert b.step is not None
    # One state and one batch for both steps, so that only what these compute can differ.
    with tempfile.TemporaryDirectory() as folder:  # a checkpoint goes onto any devices and into any kind of store
        path = Path(folder) / "state"
        checkpoint.save(path, state)
        in_b = checkpoint.restore(path, b._like)
    assert in_b is not None
    by_a, by_b = gradients_of(a.step, state), gradients_of(b.step, in_b)
    if by_a is None or by_b is None:
        return {}, 0.0, "an update is not by the gradient of a known step alone"
    of_a, of_b = _host(by_a(state, batch)), _host(by_b(in_b, batch))
    if of_a.keys() != of_b.keys():
        return {}, 0.0, "the two train other params"
    if not all(np.isfinite(x.astype(np.complex128)).all() for x in (*of_a.values(), *of_b.values())):
        return {}, 0.0, "the gradients are not finite"

    # What rounding may do, from three seeds: the rows in another order; and params and inputs that differ by the last
    # bit of their largest number, since a program that rounds otherwise is as one that got such numbers. The second
    # counts where a little decides much, as between equal numbers of a pooling.
    order_noise, noise = 0.0, dict.fromkeys(of_a, 0.0)
    for seed in range(_SEEDS):
        draw = np.random.default_rng(seed)

        def shuffled(rows: np.ndarray, seed: int = seed) -> np.ndarray:
            return rows[np.random.default_rng(seed).permutation(len(rows))]

        def nudged(x: np.ndarray, draw: np.random.Generator = draw) -> np.ndarray:
            if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
                return x
            return (x + float(jnp.finfo(x.dtype).eps) * np.abs(x).max() * draw.choice([-1, 1], x.shape)).astype(x.dtype)

        params = {k: jax.device_put(nudged(np.asarray(to_host(v))), v.sharding) for k, v in state.store.values.items()}
        near = dataclasses.replace(state, store=dataclasses.replace(state.store, values=params))
        for is_order, changed, rows in (
            (True, state, jax.tree.map(shuffled, batch)),
            (False, near, jax.tree.map(nudged, batch)),
        ):
            other = _host(by_a(changed, rows))
            distances = {name: _distance(of_a[name], other[name]) for name in of_a}
            noise = {name: max(noise[name], distance) for name, distance in distances.items()}
            if is_order:
                order_noise = max(order_noise, *distances.values())
    least = float(np.finfo(np.float32).eps) / 2  # a leaf may round in none of these, and in another program
    return {name: _distance(of_a[name], of_b[name]) / max(noise[name], least) for name in of_a}, order_noise, ""


def _host(tree: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(to_host(x)) for name, x in tree.items()}


def _host_batch(run: SavedRun, number: int) -> PyTree:
    """The batch of a step in host memory, without the padding of virtual shards."""
    state, saved = run._restored("train.compare", number - 1)
    batches = run._batches("train.compare", state, saved, number - 1, placed=False)
    return jax.tree.map(np.asarray, next(batches))


def _same_bits(a: PyTree, b: PyTree) -> bool:
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


def _leaves(state: TrainState) -> dict[str, Any]:
    """The leaves of a state by name: params, then what goes with them."""
    store = state.store
    params = zip(kv.names(store).values(), jax.tree.leaves(kv.to_params(store)), strict=True)
    beside_params = {
        "optimizer": (store.optimizer_state, store.updater_state),
        **{
            name: getattr(state, name)
            for name in ("model_state", "transform", "loss_scale", "nonfinite", "outer", "local")
        },
        "step": state.step,
    }
    named = {f"params/{name}": value for name, value in params}
    for path, leaf in jax.tree_util.tree_leaves_with_path(beside_params):
        named[jax.tree_util.keystr(path, simple=True, separator="/")] = leaf
    return named


def _distances(a: TrainState, b: TrainState) -> dict[str, float]:
    """How far leaves are apart, of those whose bits differ, in the order of the leaves. Infinite where one has none."""
    distances: dict[str, float] = {}
    of_a, of_b = _leaves(a), _leaves(b)
    for name, x in of_a.items():
        y = of_b.get(name)
        if y is None:
            distances[name] = float("inf")
            continue
        x, y = (np.asarray(to_host(jax.random.key_data(z) if is_prng_key(z) else z)) for z in (x, y))
        if x.shape != y.shape:
            # Stores of different kinds keep the state of an optimizer in other shapes.
            if name.startswith("params/"):
                distances[name] = float("inf")
        elif x.dtype != y.dtype or x.tobytes() != y.tobytes():
            distances[name] = _distance(x, y)
    return distances | {name: float("inf") for name in of_b if name not in of_a}


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    """The norm of the difference over the norm of the first."""
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    norm, difference = float(np.linalg.norm(x)), float(np.linalg.norm(x - y))
    return difference / norm if norm else float("inf") if difference else 0.0
