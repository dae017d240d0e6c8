"""What differentiation sends between devices: a box of its own, never a part of a layer's gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._read.raw import Eqn
from .cells import Cell, Cells, plain_name
from .patterns import COLLECTIVES, SENT, axis_names


@dataclass(slots=True)
class _Sent:
    """Collectives of gradients, while equations are read in order.

    Attributes:
        groups: those alike, none computed from another: by name, axes, scope, and how many are on the way to them.
        depths: of each value, how many of each kind are on the way to it.
        past: of each value, the layers whose gradients were sent on the way to it, a bit for each.
        after: the equations of a layer's gradient that need what was sent of it.
    """

    groups: dict[object, list[int]] = field(default_factory=dict)
    depths: dict[int, dict[object, int]] = field(default_factory=dict)
    past: dict[int, int] = field(default_factory=dict)
    after: set[int] = field(default_factory=set)


def fold_sent(cells: Cells, targets: dict[int, Cell]) -> tuple[set[int], set[int]]:
    """Make cells of what differentiation sends for layers that are no collectives.

    Returns:
        The ids of their equations, and of those that come after what was sent of the same layer.
    """
    found = _Sent()
    for eqn in cells.raw.eqns:
        if eqn.backward:
            _note(cells, eqn, targets.get(eqn.id), found)
    for eqns in found.groups.values():
        eqn = cells.raw.eqns[eqns[0]]
        times = f" ×{len(eqns)}" if len(eqns) > 1 else ""
        cells.new(eqns, plain_name(eqn.prim), f"over {axis_names(eqn)}{times}")
    return {number for eqns in found.groups.values() for number in eqns}, found.after


def _note(cells: Cells, eqn: Eqn, target: Cell | None, found: _Sent) -> None:
    roots = [cells.raw.root(value) for value in eqn.ins]
    known = [found.depths[root] for root in roots if root in found.depths]
    depths = {kind: max(way.get(kind, 0) for way in known) for way in known for kind in way}
    past = 0
    for root in roots:
        past |= found.past.get(root, 0)
    bit = 1 << target.id if target is not None else 0
    if past & bit:
        found.after.add(eqn.id)
    op = plain_name(eqn.prim)
    if op in SENT and (target is None or target.op not in COLLECTIVES):
        kind = (op, axis_names(eqn), eqn.scope)
        found.groups.setdefault((*kind, depths.get(kind, 0)), []).append(eqn.id)
        depths[kind] = depths.get(kind, 0) + 1
        past |= bit
    for out in eqn.outs:
        found.depths |= {out: depths} if depths else {}
        found.past |= {out: past} if past else {}
