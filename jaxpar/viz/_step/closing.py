"""What of a step is named or closed from the beginning: parts of jaxpar's own step, conditions behind an update."""

from __future__ import annotations

from collections import Counter

from ..._core.text import plural
from .._fold.calls import OPTIMIZERS
from .._fold.cells import COLLECTIVES
from .._graph import BACKWARD
from .._layout.collapse import close_groups
from .._layout.net import Draft, Net
from .._scopes import Path, Scope, common_prefix
from .._searches import reach, readers
from .phases import CHOICE, COMPRESSION, MOVE, is_update


def open_remats(net: Net) -> None:
    """Take away the scopes of remat. What it computes again is part of the gradient of a layer outside of it."""

    def without(path: Path) -> Path:
        return tuple(part for part in path if not (part.is_region and part.name == "remat"))

    for draft in net.drafts:
        draft.scope = without(draft.scope)
    net.repeats = {without(path): count for path, count in net.repeats.items()}


def name_parts(net: Net) -> None:
    """Call parts of jaxpar's own step what they are for readers, and not as their functions are called."""
    for draft in (draft for draft in net.layers if draft.op not in COLLECTIVES | OPTIMIZERS):
        own = (frame for number in draft.eqns for frame in net.raw.own_stack(net.raw.eqns[number]))
        frames = {(frame.file.partition("/")[0], frame.name) for frame in own if frame.package == "jaxpar"}
        if any(room == "compression" for room, _ in frames):
            draft.op = COMPRESSION
        elif ("_store", "with_tables") in frames:
            draft.op = "rows into a table"
        elif ("_step", "DeviceStep.finish_step") in frames:
            draft.op = CHOICE
    codes = [draft for draft in net.layers if draft.op == COMPRESSION]
    _close_as(net, codes, COMPRESSION)  # one box before each collective, and one behind the last
    for draft in (draft for draft in net.layers if draft.op == COMPRESSION):
        draft.detail, draft.name, draft.path = "", "", ()


def join_scales(net: Net) -> None:
    """Make the scale of a loss part of the loss, which it is told by the function of a step that multiplies by it."""
    raw, sources = net.raw, net.sources()
    drafts = {draft.at: draft for draft in net.layers}
    into: dict[int, Draft] = {}
    for draft in net.layers:
        inner = [stack[-1] for number in draft.eqns if (stack := raw.own_stack(raw.eqns[number]))]
        is_scale = bool(inner) and all(f.package == "jaxpar" and f.name.endswith(".scaled_loss") for f in inner)
        losses = [drafts[at] for at in sources.get(draft.at, ()) if at in drafts]
        if is_scale and draft.forward is None and not draft.op.endswith(BACKWARD) and len(losses) == 1:
            into[draft.at] = losses[0]
    gradients = {draft.layer.at: draft for draft in net.layers if draft.forward is not None}
    for at, loss in list(into.items()):
        if at in gradients and loss.at in gradients:
            into[gradients[at].at] = gradients[loss.at]
    for at, kept in into.items():
        kept.add([drafts[at]])
    net.substitute(into)


def close_moves(net: Net) -> None:
    """Close what moves params between two passes, as in sharpness-aware minimization, to one box for each time.

    It is an update behind gradients that layers before later gradients read.
    """
    sources = net.sources()
    readers_of = readers(sources)
    gradients = {draft.at for draft in net.layers if draft.op.endswith(BACKWARD)}
    before, after = reach(gradients, sources), reach(gradients, readers_of)
    updates = {draft.at: draft for draft in net.layers if draft.at in after and draft.weights and is_update(draft)}
    layers = {d.at for d in net.layers if d.at in before and d.at not in gradients | updates.keys()}
    moves = [draft for at, draft in updates.items() if not layers.isdisjoint(readers_of.get(at, ()))]
    _close_as(net, moves, MOVE)
    ats = {draft.at for draft in moves}
    for draft in (draft for draft in net.layers if draft.at in ats or draft.op == MOVE):
        draft.op, draft.detail = MOVE, plural(len(draft.weights), "array")
        draft.name, draft.path = "", ()
    for draft in net.layers:  # updates, and what is sent for them, are in no part of the network
        draft.alone = draft.at in after and (is_update(draft) or draft.op in COLLECTIVES)


def _close_as(net: Net, drafts: list[Draft], name: str) -> None:
    """Close drafts to a box of this name, or to several where other layers are between them."""
    if drafts:
        around = common_prefix(draft.scope for draft in drafts)
        close_groups(net, [(((*around, Scope(name)), False), drafts)])


def close_conditions(net: Net) -> None:
    """Close each condition that only reads what an optimizer has updated, such as the mean of the params of a round.

    It is called by the scope directly around it, where that holds nothing else. Steps in it may be in modules too.
    """
    readers_of = readers(net.sources())
    updates = {draft.at for draft in net.layers if is_update(draft)}
    # What skips a step for a NaN, behind all else, reads the condition too.
    goals = {draft.at for draft in net.layers if draft.op.endswith(BACKWARD) or draft.op in OPTIMIZERS}
    places: dict[int, int] = {}  # of each draft in a condition, how many scopes are around the condition
    held, all_held = Counter[Scope](), Counter[Scope]()  # the drafts in conditions, and all, by the names around them
    for draft in net.layers:
        at = next((at for at, part in enumerate(draft.scope) if _is_condition(part)), None)
        names = {part.numbered(1) for part in draft.scope}
        all_held.update(names)
        if at is not None:
            places[draft.at] = at
            held.update(names)
    groups: dict[Path, list[Draft]] = {}
    for draft in (draft for draft in net.layers if draft.at in places):
        *_, name = (Scope(""), *draft.scope[: places[draft.at]])
        name = name.numbered(1)
        is_named = not name.is_region and 0 < held[name] == all_held[name]
        path = (name,) if is_named else draft.scope[: places[draft.at] + 1]
        groups.setdefault(path, []).append(draft)
    closed: list[tuple[tuple[Path, bool], list[Draft]]] = []
    for path, drafts in groups.items():
        ats = {draft.at for draft in drafts}
        is_last = goals.isdisjoint(reach(ats, readers_of) - ats)
        if is_last and not ats.isdisjoint(reach(updates - ats, readers_of)):
            around = common_prefix(draft.scope[: places[draft.at]] for draft in drafts)
            outside = tuple(part for part in around if part.numbered(1) != path[-1])
            closed.append((((*outside, path[-1]), False), drafts))
    kinds = {drafts[0].at: [d.detail if d.op == "Activation" else d.op for d in drafts] for _, drafts in closed}
    close_groups(net, closed)
    for draft in net.layers:  # one that no scope names says what it does
        if draft.op == "cond" and draft.layers > 1 and draft.at in kinds:
            draft.detail = ", ".join(kind for kind in dict.fromkeys(kinds[draft.at]) if kind != "cond")


def _is_condition(scope: Scope) -> bool:
    """Whether it is a `cond`, which may say what it computes: "cond: average"."""
    return scope.is_region and scope.name.partition(":")[0] == "cond"
