"""The drafts of a step as layers with a forward and a backward part, and optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._fold.patterns import COLLECTIVES
from .._graph import BACKWARD
from .._layout.net import Draft, Net


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
    readers = _readers(net)
    gradients = {draft.at for draft in net.layers if _is_gradient(draft)}
    after = _reached(gradients, readers)
    again = {draft.at for draft in net.layers if _is_again(net, draft)}
    before = _reached(gradients | again, net.sources())
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
            found.of[draft.at] = "optimizer" if _reached({draft.at}, readers) & after else "elsewhere"
    _add_backward(net, found)
    _sort_updates(net, found, gradients)
    return found


def _is_gradient(draft: Draft) -> bool:
    return draft.op.endswith(BACKWARD)


def _is_again(net: Net, draft: Draft) -> bool:
    """Whether this is computed a second time, for the gradient."""
    return bool(draft.eqns) and all(net.raw.eqns[number].again for number in draft.eqns)


def _readers(net: Net) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for source, target, _ in net.edges:
        found.setdefault(source, set()).add(target)
    return found


def _reached(starts: set[int], readers: dict[int, set[int]]) -> set[int]:
    """All that depends on one of these."""
    found: set[int] = set()
    work = list(starts)
    while work:
        for reader in readers.get(work.pop(), ()):
            if reader not in found:
                found.add(reader)
                work.append(reader)
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


def _sort_updates(net: Net, found: Phases, gradients: set[int]) -> None:
    """Tell the optimizers from what only hands gradients on to them."""
    names = {draft.at: draft for draft in net.layers if found.of[draft.at] == "optimizer"}
    readers = _readers(net)
    for draft in names.values():
        hands_on = draft.at in _reached(gradients, readers) and not _updates(net, draft)
        (found.glue if hands_on else found.optimizers).append(draft)


def _updates(net: Net, draft: Draft) -> bool:
    """Whether a draft reads parameters or returns results, and is no collective."""
    return draft.op not in COLLECTIVES and bool(draft.weights or draft.outputs)
