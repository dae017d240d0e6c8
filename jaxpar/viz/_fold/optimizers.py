"""An optimizer's update of all parameters, as one cell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .._graph import BACKWARD
from .._read.raw import Eqn
from .._read.source import Frame
from .cells import Cell, Cells
from .patterns import COLLECTIVES

_UPDATES = frozenset(("update", "update_fn", "apply_updates", "apply"))
# Transforms of optax, and the optimizer that they are the core of. The first that is found names it.
_CORES = {
    "scale_by_lion": "Lion",
    "scale_by_muon": "Muon",
    "scale_by_factored_rms": "Adafactor",
    "scale_by_novograd": "NovoGrad",
    "scale_by_radam": "RAdam",
    "scale_by_amsgrad": "AMSGrad",
    "scale_by_adamax": "AdaMax",
    "scale_by_adan": "Adan",
    "scale_by_belief": "AdaBelief",
    "scale_by_yogi": "Yogi",
    "scale_by_sm3": "SM3",
    "scale_by_adadelta": "Adadelta",
    "scale_by_rss": "Adagrad",
    "scale_by_lbfgs": "L-BFGS",
    "scale_by_adam": "Adam",
    "scale_by_rms": "RMSProp",
    "scale_by_stddev": "RMSProp",
    "scale_by_sign": "SignSGD",
    "trace": "SGD",
}
_DECAYED = {"Adam": "AdamW"}
_TRUSTED = {"Adam": "LAMB", "AdamW": "LAMB", "SGD": "LARS"}
_RATES = frozenset(("scale", "scale_by_learning_rate", "scale_by_schedule"))
_PLAIN_UPDATE = "optimizer"
OPTIMIZERS = frozenset((*_CORES.values(), "AdamW", "LAMB", "LARS", _PLAIN_UPDATE))


@dataclass(slots=True)
class _Run:
    """Neighbouring equations of one update."""

    place: tuple[int, ...]
    function: str
    eqns: list[Eqn] = field(default_factory=list)


def fold_optimizers(cells: Cells) -> None:
    """Make one cell of each call of an optimizer of optax or of this package.

    What is added to the parameters is part of the update that computed it.
    """
    last: Cell | None = None
    for run in _runs(cells):
        if all(eqn.view for eqn in run.eqns):
            continue
        cell = cells.new([eqn.id for eqn in run.eqns if not eqn.view], _name(run), major=True)
        if run.function == "apply_updates" and last is not None and _makers(cells, cell) == {last.id}:
            cell = cells.new([*last.eqns, *cell.eqns], last.op, major=True)
        cell.detail = _detail(cells, cell)
        last = cell


def _runs(cells: Cells) -> list[_Run]:
    runs: list[_Run] = []
    same = False
    for eqn in cells.raw.eqns:
        if eqn.view:
            continue
        found = None if eqn.backward or eqn.prim in COLLECTIVES else _update(eqn.stack)
        if found is None:
            same = False
            continue
        place, function = found
        if not same or runs[-1].place != place:
            runs.append(_Run(place, function))
        runs[-1].eqns.append(eqn)
        same = True
    return runs


def _update(stack: tuple[Frame, ...]) -> tuple[tuple[int, ...], str] | None:
    """The place and the function of the outermost update on a stack."""
    for depth, frame in enumerate(stack):
        if frame.origin == "library" and _is_optimizer(frame):
            return (*(f.call for f in stack[:depth]), -2 - frame.function), _last(frame.name)
    return None


def _is_optimizer(frame: Frame) -> bool:
    if frame.package == "optax":
        return _last(frame.name) in _UPDATES
    return frame.package == "jaxpar" and frame.file.startswith("updaters/")


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _makers(cells: Cells, cell: Cell) -> set[int]:
    """The cells that a cell reads."""
    return {source.id for value in cells.data(cell) if (source := cells.producer(value)) is not None}


def _name(run: _Run) -> str:
    """The optimizer's name, from the transforms that it is made of."""
    frames = (frame for eqn in run.eqns for frame in eqn.stack if frame.package in ("optax", "jaxpar"))
    parts = {frame.name.split(".")[0].removeprefix("_") for frame in frames if _is_optimizer(frame)}
    core = next((name for part, name in _CORES.items() if part in parts), None)
    if core is None:
        unknown = any(part.startswith("scale_by_") and part not in _RATES for part in parts)
        return "SGD" if parts & _RATES and not unknown else _PLAIN_UPDATE
    if "add_decayed_weights" in parts:
        core = _DECAYED.get(core, core)
    return _TRUSTED.get(core, core) if "scale_by_trust_ratio" in parts else core


def _detail(cells: Cells, cell: Cell) -> str:
    """How many arrays it updates."""
    made = [value for value in cells.data(cell) if cells.raw.values[value].kind == "op"]
    return f"{len(made)} array{'s' * (len(made) != 1)}"


def updates(cells: Cells, ordered: Iterable[Cell]) -> dict[int, int]:
    """The functions of the user's that update parameters, by cell, and how many parameters each updates.

    They come after a gradient, read parameters, and make arrays of their shapes.

    Args:
        cells: all.
        ordered: all too, each after those that it reads.
    """
    late, found = set[int](), dict[int, int]()
    for cell in ordered if any(cell.op.endswith(BACKWARD) for cell in cells) else ():
        sources = (cells.producer(value) for value in cells.inputs(cell))
        if cell.op.endswith(BACKWARD):
            late.add(cell.id)
        elif any(source is not None and source.id in late for source in sources):
            late.add(cell.id)
            made = {cells.raw.values[out].shape for eqn in cells.eqns(cell) for out in eqn.outs}
            count = sum(cells.raw.values[weight].shape in made for weight in cells.weights(cell))
            if count and not cell.major and cell.op not in COLLECTIVES:
                found[cell.id] = count
    return found
