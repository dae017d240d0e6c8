"""Which layers of a step are forward, which are their gradients, and what follows these: glue, then the optimizer.

`phases_of` reads the trace alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from .._draw import style
from .._fold.calls import OPTIMIZERS
from .._fold.cells import COLLECTIVES
from .._graph import BACKWARD, Node
from .._layout.net import Draft, Net
from .._read.raw import Eqn, Raw
from .._searches import reach, readers
from .graph import Phase, StepLayer
from .results import metrics_of, results_of

COMPRESSION = "compression"  # what makes codes of gradients, and gradients of codes
MOVE = "moved params"  # what makes the params of a later pass
CHOICE = "keep or update"  # what chooses between the old state and the new one, behind all else


@dataclass(slots=True, eq=False)
class Row:
    """A layer: its draft, those of its gradient and of what is computed again for that, and what gathers its params."""

    draft: Draft
    backward: list[Draft] = field(default_factory=list)
    gathered: list[Draft] = field(default_factory=list)


@dataclass(slots=True)
class Phases:
    """Which draft is part of what."""

    rows: list[Row] = field(default_factory=list)  # the layers, in the order of the trace
    optimizers: list[Draft] = field(default_factory=list)  # what follows the gradients and is no glue
    glue: list[Draft] = field(default_factory=list)  # collectives and copies, which only hand gradients on
    reported: set[int] = field(default_factory=set[int])  # glue that no new state is made of, such as a norm
    of: dict[int, Phase] = field(default_factory=dict[int, Phase])  # of each draft
    row_of: dict[int, Row] = field(default_factory=dict)  # of each forward and backward draft
    # What follows an update and is given no gradient itself, and that update: the mean of the params every few steps.
    follows: dict[int, int] = field(default_factory=dict)
    moves: dict[int, list[int]] = field(default_factory=dict)  # what moves params for a later pass: its layers
    beside: set[int] = field(default_factory=set[int])  # those of them that leave the params as they are: running means
    late: set[int] = field(default_factory=set[int])  # updates by gradients of an earlier step, which are in the state
    waiting: list[int] = field(default_factory=list[int])  # the layers whose gradients go there in this step
    gathers: dict[int, list[Row]] = field(default_factory=dict)  # what only gathers params: the layers that read it
    metrics: dict[str, list[int]] = field(default_factory=dict)  # each result that is no new state: its layers
    # Of each draft, those that hand it a gradient or what is computed from gradients.
    given: dict[int, set[int]] = field(default_factory=dict[int, set[int]])

    def whose_gradients(self, at: int, sources: Mapping[int, Iterable[int]]) -> list[int]:
        """The layers of the params whose gradients the backward pass of a layer hands on to an optimizer.

        Of one example, the gradient of a bias is that of the activation behind it.
        """
        row = self.row_of[at]
        read = (self.row_of[source] for source in sources.get(at, ()) if source in self.row_of)
        below = [one.draft.at for one in read if one.draft.weights and one.backward]
        return [at] if row.draft.weights or row.gathered else sorted(below) or [at]


def phases_of(net: Net) -> Phases:
    """The phases of a step. A step without gradients has no backward part anywhere."""
    phases, raw, sources = Phases(), net.raw, net.sources()
    readers_of, results = readers(sources), results_of(net.raw)

    # The gradients, what is before them and what is after. Remat computes layers again in the backward pass.
    gradients = {draft.at for draft in net.layers if draft.op.endswith(BACKWARD)}
    again = {d.at for d in net.layers if _is_computed_again([raw.eqns[number] for number in d.eqns])}
    before, after = reach(gradients | again, sources), reach(gradients, readers_of)
    layers = {draft.forward.at for draft in net.layers if draft.forward is not None}
    layers |= _computed_before(net, again, before | after)
    of_gradients = _of_gradients(raw)
    for source, target, value in net.edges:
        if raw.root(value) in of_gradients:
            phases.given.setdefault(target, set()).add(source)
    sums = {target for source, target, _ in net.edges if source in gradients and target not in gradients}
    gathers = _gathers(net, sources, readers_of) - layers

    # With `staleness` an optimizer is given the gradients of an earlier step, and those of this step go into the state.
    # Where something is computed from params and gradients of this step, it is an update too, and they go there.
    params = {weight for draft in net.layers if draft.at in before | layers for weight in draft.weights}
    goes_on = any(
        not eqn.backward and not params.isdisjoint(roots) and not of_gradients.isdisjoint(roots)
        for eqn in raw.eqns
        if (roots := {raw.root(value) for value in eqn.ins})
    )
    updates = {draft.at for draft in net.layers if draft.op in OPTIMIZERS} if gradients and not goes_on else set[int]()
    late = updates - after - before
    behind_late = reach(late, readers_of)

    for draft in net.layers:
        if draft.at in gathers and draft.at in before:
            phases.of[draft.at] = "parameters"
        elif draft.at in gradients or draft.at in again:
            phases.of[draft.at] = "backward"
        elif draft.op == MOVE or (draft.at in after and (draft.at not in layers or draft.at in sums)):
            phases.of[draft.at] = "optimizer"
        elif draft.at in before or draft.at in layers:  # also of a second network, behind the update of the first
            phases.of[draft.at] = "forward"
            row = phases.row_of[draft.at] = Row(draft)
            phases.rows.append(row)
        else:
            # A schedule of the optimizer reads no layer; a metric, or the check of a loss for NaN, does.
            reads_layers = not reach([draft.at], sources).isdisjoint(before | layers)
            leads_to = {draft.at} | reach([draft.at], readers_of)
            is_of_update = not reads_layers and not leads_to.isdisjoint(after | late)
            phases.of[draft.at] = "optimizer" if is_of_update or draft.at in behind_late else "elsewhere"
    _add_backward(net, phases)
    for draft in (draft for draft in net.layers if phases.of[draft.at] == "parameters"):
        ways = {at: read if phases.of.get(at) == "parameters" else set[int]() for at, read in readers_of.items()}
        rows = [phases.row_of[at] for at in sorted(reach([draft.at], ways)) if at in phases.row_of]
        phases.gathers[draft.at] = list({row.draft.at: row for row in rows}.values())
        for row in rows[:1] if draft.weights else ():
            row.gathered.append(draft)

    for draft in (draft for draft in net.layers if draft.op == MOVE and phases.of[draft.at] == "optimizer"):
        phases.moves[draft.at] = sorted(
            {row.draft.at for row in phases.rows}.intersection(readers_of.get(draft.at, ()))
        )

    # Which of what is after the gradients has a box: what makes a new state of them. The rest is glue.
    shapes = {name: raw.values[number].shape for name, number in zip(raw.output_names, raw.outputs, strict=True)}
    makes_state = {d.at for d in net.layers if any(name not in results or shapes[name] for name in d.outputs)}
    leads_to_state = reach(makes_state, {at: read for at, read in sources.items() if at not in phases.row_of})
    of_params = {draft.at for draft in net.layers if not params.isdisjoint(draft.weights)} - after
    parts = {at for at in of_params if phases.of[at] == "optimizer"}
    for draft in (draft for draft in net.layers if phases.of[draft.at] == "optimizer"):
        is_given = draft.at in after or draft.at in late
        if draft.op in OPTIMIZERS:
            # One that transforms gradients for another, as by clipping, reads no parameters and returns no new state.
            # An optimizer of shares reads a part of a param, and what it returns may be gathered.
            reads_part = not parts.isdisjoint(sources.get(draft.at, ()))
            returns = draft.weights or any(name not in results for name in draft.outputs) or reads_part
            is_glue = is_given and not returns
        else:
            # A schedule is given no gradient. What skips a step chooses between what there is already. A norm that is
            # only reported makes no new state.
            is_own = (
                draft.op in (COMPRESSION, MOVE) or draft.weights or any(name not in results for name in draft.outputs)
            )
            is_glue = not (is_given and is_own and _computes_with(raw, draft, of_gradients))
        is_glue |= draft.op in (*COLLECTIVES, CHOICE) or draft.at not in (leads_to_state | phases.moves.keys())
        is_glue |= bool(late) and draft.at not in late  # into the state, out of it, or a choice behind the update
        (phases.glue if is_glue else phases.optimizers).append(draft)
        if draft.at not in leads_to_state:
            phases.reported.add(draft.at)
        if draft.at in late and not is_glue:
            draft.detail = ", ".join(filter(None, (draft.detail, "of earlier gradients")))
    glue = {draft.at: phases.given.get(draft.at, set[int]()) for draft in phases.glue}
    phases.late = late - glue.keys()
    handed_on = set[int]().union(*glue.values())
    for row in phases.rows if late else ():
        if any(draft.at in handed_on for draft in row.backward):
            phases.waiting.append(row.draft.at)

    # What follows an update, and is given no gradient by another way: a condition, a running mean of the params.
    for draft in phases.optimizers:
        ends = reach(phases.given.get(draft.at, ()), glue) - glue.keys()
        last = [one for one in phases.optimizers if one.at in ends and changes_params(one, params)]
        if last and (_is_condition(raw, draft) or (draft.op not in OPTIMIZERS and ends.isdisjoint(gradients))):
            phases.follows[draft.at] = last[-1].at
            read = {raw.root(value) for _, target, value in net.edges if target == draft.at} & of_gradients
            phases.beside |= {draft.at} if not read.isdisjoint(map(raw.root, raw.outputs)) else set[int]()

    trained = [row.draft for row in phases.rows if row.backward]
    losses = {draft.at for draft in trained if draft.op == "Loss" or draft is trained[-1]}
    losses |= {draft.at for draft in trained if draft.layers > 1 and raw.values[draft.value].shape == ()}
    forward = {row.draft.at: row.draft for row in phases.rows}
    phases.metrics = metrics_of(net, forward, losses, phases.row_of.keys() | {one.at for one in phases.optimizers})
    return phases


def _is_computed_again(eqns: list[Eqn]) -> bool:
    """Whether remat computes all of these for a gradient. A closed remat may hold some of the gradient too."""
    return any(eqn.again for eqn in eqns) and all(eqn.again or eqn.backward for eqn in eqns)


def _of_gradients(raw: Raw) -> set[int]:
    """The values that are gradients or are computed from them.

    Whether a gradient is finite, one bool, is none of them. So a step that is skipped by it hands no gradient on there.
    """
    found, count_before = set[int](), -1
    while count_before < len(found):  # more than once where a loop reads what comes later
        count_before = len(found)
        for eqn in raw.eqns:
            if eqn.backward or any(raw.root(value) in found for value in eqn.ins):
                found.update(out for out in eqn.outs if (raw.values[out].dtype, raw.values[out].shape) != ("bool", ()))
    return found


def _computes_with(raw: Raw, draft: Draft, values: Set[int]) -> bool:
    """Whether a draft computes something from these values, and does not only show or choose some of them."""
    eqns = (raw.eqns[number] for number in draft.eqns)
    return any(
        not values.isdisjoint(map(raw.root, eqn.ins))
        for eqn in eqns
        if not eqn.view and not (eqn.prim in ("select_n", "cond") and raw.of(eqn.ins[0]).shape == ())
    )


def _computed_before(net: Net, again: Set[int], known: Set[int]) -> set[int]:
    """The layers that remat computes again with all before them, so that no gradient reads them.

    They are known by the lines that both come from.
    """
    raw = net.raw

    def steps(draft: Draft) -> set[tuple[object, ...]]:
        eqns = (raw.eqns[number] for number in draft.eqns)
        return {(e.prim, *(frame.call for frame in raw.own_stack(e)[-3:])) for e in eqns if not (e.view or e.backward)}

    missing, elsewhere = set[tuple[object, ...]](), [draft for draft in net.layers if draft.at not in known]
    for draft in net.layers if again and elsewhere else ():
        missing |= steps(draft) if draft.at in again else set[tuple[object, ...]]()
    for draft in net.layers if missing else ():
        missing -= steps(draft) if draft.at in known - again else set[tuple[object, ...]]()
    return {draft.at for draft in elsewhere if not missing.isdisjoint(steps(draft))}


def _is_condition(raw: Raw, draft: Draft) -> bool:
    return draft.layers > 1 and any(raw.eqns[number].prim == "cond" for number in draft.eqns)


def is_update(box: Draft | StepLayer) -> bool:
    return style.is_update(Node(box.op, box.op, box.detail))


def changes_params(box: Draft | StepLayer, params: Set[int] | Set[str]) -> bool:
    """Whether a box behind the gradients changes params: a known optimizer, or an update that reads some of them.

    The codes of compressed gradients, in kind "sharded" an array for each gradient, read no params.
    """
    return is_update(box) and box.op != MOVE and (box.op in OPTIMIZERS or not params.isdisjoint(box.weights))


def _gathers(net: Net, sources: Mapping[int, Iterable[int]], readers_of: Mapping[int, Iterable[int]]) -> set[int]:
    """What sends params between devices before a layer reads them, and the joining and cutting around that.

    The compiled program says what is sent, so a step has no boxes for these.
    """
    of_data = reach((draft.at for draft in net.drafts if draft.op == "input"), readers_of)
    of_params = {draft.at for draft in net.layers} - of_data
    sent = [draft.at for draft in net.layers if draft.at in of_params and draft.op in COLLECTIVES]
    around = (
        reach(sent, {at: of_params.intersection(ends) for at, ends in wires.items() if at in of_params})
        for wires in (sources, readers_of)
    )
    return set[int]().union(*around)


def _add_backward(net: Net, phases: Phases) -> None:
    """Give each backward draft to its layer. What is computed again belongs to the layer of the same place."""
    at_place: dict[int, Row] = {}
    sources = net.sources()
    for row in phases.rows:
        for number in row.draft.eqns:
            at_place.setdefault(net.raw.eqns[number].position, row)
    for draft in (draft for draft in net.layers if phases.of[draft.at] == "backward"):
        row = phases.row_of.get(draft.layer.at)
        if row is None:
            eqns = [net.raw.eqns[number] for owner in (draft.forward, draft) if owner for number in owner.eqns]
            places = [eqn.position for eqn in eqns] + [number for eqn in eqns for number in net.raw.above(eqn)]
            row = next((at_place[number] for number in places if number in at_place), None)
            row = row or _computed_again(net, phases, draft.layer, sources)
        if row is not None:
            row.backward.append(draft)
            phases.row_of[draft.at] = row


def _computed_again(net: Net, phases: Phases, again: Draft, sources: dict[int, set[int]]) -> Row | None:
    """The layer that remat computes again in another place: of the same line, and of the same params or operands."""

    def lines(draft: Draft) -> set[tuple[str, int]]:
        stacks = (net.raw.own_stack(net.raw.eqns[number]) for number in draft.eqns)
        return {(stack[-1].file, stack[-1].line) for stack in stacks if stack}

    at_lines = lines(again)
    rows = [row for row in phases.rows if not at_lines.isdisjoint(lines(row.draft))]
    rows = [row for row in rows if row.draft.op == again.op] or rows
    if again.weights:
        return next((row for row in rows if not set(row.draft.weights).isdisjoint(again.weights)), None)
    reads = {phases.row_of[at].draft.at if at in phases.row_of else at for at in sources.get(again.at, ())}
    same = [row for row in rows if not reads.isdisjoint(sources.get(row.draft.at, ()))]
    return same[0] if len(same) == 1 else rows[0] if len(rows) == 1 else None
