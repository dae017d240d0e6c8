"""The drafts of a step as layers with a forward and a backward part, and optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._fold.cells import COLLECTIVES
from .._graph import BACKWARD
from .._layout.net import Draft, Net
from .._searches import reach, readers


@dataclass(slots=True, eq=False)
class Row:
    """A layer while the step is read.

    Attributes:
        draft: its own.
        backward: the drafts of its gradient, and of what is computed again for it.
    """

    draft: Draft
    backward: list[Draft] = field(default_factory=list)


@dataclass(slots=True)
class Phases:
    """Which draft is part of what.

    Attributes:
        rows: the layers, in the order of the trace.
        optimizers: what follows the gradients. Collectives and copies between them are not part of it.
        glue: what only hands gradients on.
        of: the phase of each draft.
        row_of: the layer of each forward and backward draft.
    """

    rows: list[Row] = field(default_factory=list)
    optimizers: list[Draft] = field(default_factory=list)
    glue: list[Draft] = field(default_factory=list)
    of: dict[int, str] = field(default_factory=dict)
    row_of: dict[int, Row] = field(default_factory=dict)


def phases_of(net: Net) -> Phases:
    """The phases of a step. A step without gradients has no backward part anywhere."""
    found = Phases()
    sources = net.sources()
    known = readers(sources)
    gradients = {draft.at for draft in net.layers if draft.op.endswith(BACKWARD)}
    after = reach(gradients, known)
    again = {d.at for d in net.layers if d.eqns and all(net.raw.eqns[number].again for number in d.eqns)}  # by remat
    before = reach(gradients | again, sources)
    layers = {draft.forward.at for draft in net.layers if draft.forward is not None}
    for draft in net.layers:
        if draft.at in gradients or draft.at in again:
            found.of[draft.at] = "backward"
        elif draft.at in after:
            found.of[draft.at] = "optimizer"
        elif draft.at in before or draft.at in layers:
            found.of[draft.at] = "forward"
            row = found.row_of[draft.at] = Row(draft)
            found.rows.append(row)
        else:  # a schedule of the optimizer, or a metric
            found.of[draft.at] = "optimizer" if reach([draft.at], known) & after else "elsewhere"
    _add_backward(net, found)
    for draft in (draft for draft in net.layers if found.of[draft.at] == "optimizer"):
        # What hands gradients on to an optimizer reads no parameters and returns no results, or is a collective.
        updates = draft.op not in COLLECTIVES and (draft.weights or draft.outputs)
        (found.glue if draft.at in after and not updates else found.optimizers).append(draft)
    return found


def _add_backward(net: Net, found: Phases) -> None:
    """Give each backward draft to its layer. What is computed again belongs to the layer of the same place."""
    at_place: dict[int, Row] = {}
    for row in found.rows:
        for number in row.draft.eqns:
            at_place.setdefault(net.raw.eqns[number].position, row)
    for draft in net.layers:
        if found.of[draft.at] != "backward":
            continue
        row = _row_of(net, draft, found, at_place)
        if row is not None:
            row.backward.append(draft)
            found.row_of[draft.at] = row


def _row_of(net: Net, draft: Draft, found: Phases, at_place: dict[int, Row]) -> Row | None:
    forward = draft.forward
    if forward is not None and forward.at in found.row_of:
        return found.row_of[forward.at]
    positions = [net.raw.eqns[number].position for one in (forward, draft) if one for number in one.eqns]
    above = [number for one in (forward, draft) if one for e in one.eqns for number in net.raw.above(net.raw.eqns[e])]
    return next((at_place[number] for number in (*positions, *above) if number in at_place), None)
