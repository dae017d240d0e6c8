"""The first fold: a call of a known function is one cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .._read.raw import Eqn
from .._read.source import Frame
from .cells import Cells, components, plain_name, power_of
from .known import MATRIX, MINOR, SOLVERS, WINDOWS, Call, normalize
from .patterns import COLLECTIVES


def fold_calls(cells: Cells, calls: Iterable[Call]) -> None:
    """Make the first cells.

    A call in the table is one cell, and so is a call of JAX's own functions. Every other equation is one by itself.
    Gradients get no cells yet.
    """
    table = {normalize(call.function): call for call in calls}
    forward = [e for e in cells.raw.eqns if not (e.view or e.backward or e.residual or cells.owner[e.id])]
    _fold_calls(cells, table, forward, 0)


def _fold_calls(cells: Cells, table: Mapping[str, Call], eqns: list[Eqn], depth: int) -> None:
    for key, run in _runs(eqns, table, depth):
        if key is not None and key.call is not None and not _is_layer(cells, key, key.call, run):
            _fold_calls(cells, table, run, key.depth + 1)  # look inside
        else:
            _fold_run(cells, key, run)


@dataclass(frozen=True, slots=True)
class _Key:
    """A call on the stack. `depth` is its place there, `call` its entry in the table."""

    place: tuple[int, ...]
    frame: Frame = field(compare=False)
    call: Call | None
    depth: int


def _runs(eqns: list[Eqn], table: Mapping[str, Call], depth: int) -> list[tuple[_Key | None, list[Eqn]]]:
    """Equations of one call, next to each other. Where they begin again, it was called again."""
    runs: list[tuple[_Key | None, list[Eqn]]] = []
    keys: dict[object, _Key | None] = {}
    key: _Key | None = None
    for eqn in eqns:
        place = (eqn.position, *(frame.call for frame in eqn.stack if frame.call < 0))
        if place not in keys:
            keys[place] = _key(eqn.stack, table, depth)
        new = keys[place]
        if new is None or new != key or _begins_again(eqn, runs[-1][1], new.call):
            runs.append((new, []))
        runs[-1][1].append(eqn)
        key = new
    return runs


def _begins_again(eqn: Eqn, run: list[Eqn], call: Call | None) -> bool:
    first, last = run[0], run[-1]
    if eqn.position != first.position or eqn.prim != first.prim or plain_name(eqn.prim) in COLLECTIVES:
        return False
    if call is not None and call.tree:
        return last.position != first.position
    return last.position != first.position or (last.prim == eqn.prim and not eqn.tangent)


def _key(stack: tuple[Frame, ...], table: Mapping[str, Call], start: int) -> _Key | None:
    """The outermost call in the table, or else the outermost public JAX function."""
    boundary = None
    for depth, frame in enumerate(stack):
        call = table.get(normalize(frame.name)) if depth >= start else None
        if call is not None and "<locals>" not in frame.name and call.is_of(frame):
            return _Key(_place(stack, depth), frame, call, depth)
        if frame.origin != "jax":
            boundary = None
        elif boundary is None and _is_public(frame):
            boundary = depth
    return None if boundary is None else _Key(_place(stack, boundary), stack[boundary], None, boundary)


def _place(stack: tuple[Frame, ...], depth: int) -> tuple[int, ...]:
    return (*(frame.call for frame in stack[:depth]), -2 - stack[depth].function)


def _is_public(frame: Frame) -> bool:
    return "<" not in frame.name and "." not in frame.name and not frame.name.startswith("_operator")


def _short(name: str) -> str:
    return name.strip("_")


def _fold_run(cells: Cells, key: _Key | None, run: list[Eqn]) -> None:
    prims = {eqn.prim for eqn in run}
    if key is not None and key.call is not None:
        detail = _short(key.frame.name.removesuffix(".__call__")) if key.call.detail is None else key.call.detail
        cells.new([eqn.id for eqn in run], key.call.op, detail, major=key.call.op not in MINOR)
        return
    if key is None or len(run) == 1 or (prims & (MATRIX | WINDOWS) and not prims & SOLVERS):
        for eqn in run:
            op, detail = power_of(cells.raw, eqn) if eqn.prim in ("integer_pow", "pow") else (plain_name(eqn.prim), "")
            cells.new([eqn.id], op, detail, major=eqn.prim in SOLVERS)
    elif COLLECTIVES.intersection(map(plain_name, prims)):
        _fold_collective(cells, _short(key.frame.name), run)
    else:
        cells.new([eqn.id for eqn in run], _short(key.frame.name), major=not prims.isdisjoint(SOLVERS))


def _fold_collective(cells: Cells, name: str, run: list[Eqn]) -> None:
    """One cell of each array that a call sends, as `pmean` of a tree is a sum and a division of each leaf."""
    singles = [cells.new([eqn.id], plain_name(eqn.prim)) for eqn in run]
    for part in components(cells, singles):
        if len(part) > 1:
            cells.new([number for cell in part for number in cell.eqns], name)


def _is_layer(cells: Cells, key: _Key, call: Call, run: list[Eqn]) -> bool:
    """Whether a call of a known name is the layer, and no module around layers with parameters."""
    return call.is_meant(key.frame, run) and (call.matrices or not _multiplies_weight(cells, run))


def _multiplies_weight(cells: Cells, run: list[Eqn]) -> bool:
    return any(eqn.prim in MATRIX and any(cells.raw.weight_of(value) is not None for value in eqn.ins) for eqn in run)
