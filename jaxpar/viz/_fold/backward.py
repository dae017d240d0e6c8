"""Gradients: one backward cell for each layer.

An equation of a gradient keeps the place in the program of the layer that it differentiates. Where a place ran several
times, as in a loop over layers, what the equation reads tells which time it was.
"""

from __future__ import annotations

from .._graph import BACKWARD
from .._read.raw import Eqn
from .._read.source import ANONYMOUS, Frame
from .._scopes import Path
from .cells import COLLECTIVES, SENT, Cell, Cells, axis_names, label_of, plain_name

# In the program, or of the user's code by its calls, and the remat around it.
_Place = tuple[int | tuple[int, ...], Path]


def fold_backward(cells: Cells) -> None:
    """Make a backward cell of the equations of each layer's gradient."""
    targets = _targets(cells)
    sent, after = _fold_sent(cells, targets)
    groups: dict[tuple[object, bool], list[int]] = {}
    for eqn in cells.raw.eqns:
        if eqn.backward and eqn.id not in sent:
            target = targets.get(eqn.id)
            key: object = target.id if target is not None else (_function(eqn.stack), eqn.scope)
            groups.setdefault((key, eqn.id in after), []).append(eqn.id)
    for (_, is_after), eqns in groups.items():
        if all(cells.raw.eqns[number].view for number in eqns):
            continue
        target = targets.get(eqns[0])
        op = target.op if target is not None else _function(cells.raw.eqns[eqns[0]].stack)
        prims = {cells.raw.eqns[number].prim for number in eqns if not cells.raw.eqns[number].view}
        # Behind what was sent, or without a layer, a single operation is called what it is.
        if len(prims) == 1 and (is_after or target is None):
            made = cells.new(eqns, plain_name(prims.pop()) + BACKWARD)
        else:
            made = cells.new(eqns, op + BACKWARD, target.detail if target else "", bool(target and target.major))
        made.forward = target


def _targets(cells: Cells) -> dict[int, Cell]:
    """The layer of each backward equation that has one, by its id."""
    # The forward cells at each place of the program, and at each place of the user's code.
    layers: dict[int, list[Cell]] = {}
    near: dict[tuple[int, ...], list[Cell]] = {}
    for cell in cells:
        for eqn in (eqn for eqn in cells.eqns(cell) if not eqn.backward):
            at_places = [layers.setdefault(position, []) for position in (eqn.position, *eqn.enclosing)]
            for cells_at in (*at_places, near.setdefault(_users_place(cells, eqn), [])):
                if cell not in cells_at[-1:]:
                    cells_at.append(cell)

    # A gradient belongs to the innermost place around it that has layers.
    computed = {eqn.position for eqn in cells.raw.eqns if not (eqn.backward or eqn.view)}  # not only shown
    computed |= {position for eqn in cells.raw.eqns if not eqn.backward for position in eqn.enclosing}
    several: dict[_Place, list[Eqn]] = {}
    elsewhere: list[Eqn] = []
    for eqn in (eqn for eqn in cells.raw.eqns if eqn.backward):
        around = (n for n in cells.raw.above(eqn) if n in layers and (n == eqn.position or n in computed))
        place = next(around, None)
        if place is None:
            elsewhere.append(eqn)
        else:
            several.setdefault((place, _rematted(eqn.scope)), []).append(eqn)
    # Others belong to the layers of the same lines of the user. The stack of a gradient in a remat of layers outside of
    # it may lack the call of the remat.
    for eqn in elsewhere:
        calls = _users_place(cells, eqn)
        starts = range(len(calls)) if _rematted(eqn.scope) else range(1)
        inner = next((calls[start:] for start in starts if calls[start:] in near), None)
        if inner is not None:
            several.setdefault((inner, ()), []).append(eqn)
    # Of several layers at a place, those that have a tangent were differentiated.
    places: list[tuple[list[Cell], list[Eqn]]] = []
    for (place, rematted), eqns in several.items():  # JAX 0.10 keeps no lines inside vmap: a network is at one place
        at_place = layers[place] if isinstance(place, int) else near[place]
        again = [cell for cell in at_place if _rematted(cells.raw.eqns[cell.eqns[0]].scope) == rematted]
        at_place = again if rematted and again else at_place  # gradients in a remat are of what it computes again
        differentiated = [cell for cell in at_place if any(eqn.tangent for eqn in cells.eqns(cell))]
        places.append((differentiated or at_place, eqns))
    return _which_times(cells, places)


def _rematted(scope: Path) -> Path:
    """The scope as far as the innermost remat. Empty where there is none."""
    ends = [depth for depth, part in enumerate(scope, 1) if part.is_region and part.name == "remat"]
    return scope[: ends[-1]] if ends else ()


def _users_place(cells: Cells, eqn: Eqn) -> tuple[int, ...]:
    """The place of an equation in the code outside of JAX."""
    return tuple(frame.call for frame in cells.raw.own_stack(eqn))


def _which_times(cells: Cells, places: list[tuple[list[Cell], list[Eqn]]]) -> dict[int, Cell]:
    """The layer of each equation, for several layers of one place."""
    target_of: dict[int, Cell] = {}
    waiting: list[tuple[list[Eqn], set[int], Cell]] = []
    for layers, eqns in places:
        # A value that only one of the layers reads or makes tells whose gradient the equations of a cotangent are.
        whose: dict[int, Cell | None] = {}
        for cell in layers:
            made = [out for eqn in cells.eqns(cell) for out in eqn.outs]
            for root in {*cells.inputs(cell), *made}:
                whose[root] = cell if whose.get(root, cell) is cell else None
        undecided: list[list[Eqn]] = []
        for group in _by_cotangent(cells, eqns):
            votes = [
                cell for eqn in group for value in eqn.ins if (cell := whose.get(cells.raw.root(value))) is not None
            ]
            if votes:
                target_of |= dict.fromkeys((eqn.id for eqn in group), max(votes, key=votes.count))
            else:
                undecided.append(group)
        # Where no value tells, the gradient of the last layer comes first.
        decided = {target_of[eqn.id].id for eqn in eqns if eqn.id in target_of}
        free = [cell for cell in layers if cell.id not in decided] or layers
        for number, group in enumerate(undecided):
            last = free[len(free) - 1 - number * len(free) // len(undecided)]
            waiting.append((group, {cell.id for cell in layers}, last))
    # But first of all they follow what they read: a sum that goes through all layers is of the later of two.
    for group, ids, last in sorted(waiting, key=lambda each: each[0][0].id):
        target = next((cell for cell in _followed(cells, group[0], target_of) if cell.id in ids), last)
        target_of |= {eqn.id: target for eqn in group}
    return target_of


def _followed(cells: Cells, eqn: Eqn, target_of: dict[int, Cell]) -> list[Cell]:
    """The layers whose gradients an equation reads, the later gradients first."""
    read = {number for value in eqn.ins if (number := cells.raw.of(value).producer) is not None}
    return [target_of[number] for number in sorted(read, reverse=True) if number in target_of]


def _by_cotangent(cells: Cells, eqns: list[Eqn]) -> list[list[Eqn]]:
    """Groups of equations that read the same cotangent."""
    raw = cells.raw
    group_of: dict[int, int] = {}  # a cotangent, or a result of a group: which group
    groups: list[list[Eqn]] = []
    for eqn in eqns:
        reads = {raw.root(value) for value in eqn.ins}
        cotangents = [
            root
            for root in sorted(reads)
            if (producer := raw.values[root].producer) is not None and raw.eqns[producer].backward
        ]
        number = next((group_of[root] for root in cotangents if root in group_of), None)
        if eqn.prim in ("add_any", "add") or number is None:
            number = len(groups)
            groups.append([])
        groups[number].append(eqn)
        if eqn.prim not in ("add_any", "add"):
            for root in cotangents:
                group_of.setdefault(root, number)
        if eqn.view or eqn.prim == "reduce_sum":
            group_of.setdefault(eqn.outs[0], number)
    return groups


def _function(stack: tuple[Frame, ...]) -> str:
    """The innermost function of the user: a rule of differentiation, where it has a name."""
    frame = next((frame for frame in reversed(stack) if frame.origin != "jax"), None)
    if frame is None or frame.name.endswith(ANONYMOUS):
        return "custom gradient"
    return frame.name.rsplit(".", 1)[-1].strip("_")


def _fold_sent(cells: Cells, targets: dict[int, Cell]) -> tuple[set[int], set[int]]:
    """Make cells of what differentiation sends. Their equations, and those after what was sent of the same layer."""
    groups: dict[object, list[int]] = {}  # those alike of which none is computed from another
    ways: dict[int, frozenset[int]] = {}  # of each value, the collectives on the way to it
    kinds: dict[int, tuple[object, int]] = {}  # of each collective, and how many of its kind are on the way to it
    after: set[int] = set()
    for eqn in (eqn for eqn in cells.raw.eqns if eqn.backward):
        way = frozenset[int]().union(*(ways.get(cells.raw.root(value), ()) for value in eqn.ins))
        op, target = plain_name(eqn.prim), targets.get(eqn.id)
        if target is not None and any(targets.get(number) is target for number in way):
            after.add(eqn.id)
        if op in SENT and (target is None or target.op not in COLLECTIVES):
            kind = (op, axis_names(eqn), eqn.scope)
            depth = 1 + max((kinds[number][1] for number in way if kinds[number][0] == kind), default=0)
            kinds[eqn.id] = kind, depth
            groups.setdefault((kind, depth), []).append(eqn.id)
            way |= {eqn.id}
        if way:
            ways |= dict.fromkeys(eqn.outs, way)
    for eqns in groups.values():
        op, detail = label_of(cells.raw, cells.raw.eqns[eqns[0]])
        cells.new(eqns, op, f"{detail} ×{len(eqns)}" if len(eqns) > 1 else detail)
    return set(kinds), after


def attach_views(cells: Cells) -> None:
    """Add each view that is in no cell to the cell that reads it, or to its operand's."""
    raw = cells.raw
    for eqn in reversed(raw.eqns):
        if not eqn.view or cells.owner[eqn.id] is not None:
            continue
        read_by = [number for out in eqn.outs for number in cells.read_by.get(out, ())]
        near = [cells.owner[number] for number in read_by if raw.eqns[number].backward == eqn.backward]
        owner = next((cell for cell in near if cell is not None), None) or cells.producer(eqn.outs[0])
        # A result of the function is of the layer that makes it. JAX says that remat makes a gradient's cast again.
        if owner is not None and not read_by:
            eqn.backward = cells.is_backward(owner)
        if owner is not None and cells.is_backward(owner) == eqn.backward:
            cells.add(eqn.id, owner)
            continue
        # Only gradients read it. A mask, or a cast of an input, is computed for them. A param is not of the backward
        # pass: the cast of one that remat makes again is a step of the layer whose gradient reads it, if there is one.
        reader = next(filter(None, (cells.owner[number] for number in read_by)), None)
        layer = reader.forward if reader is not None else None
        if reader is not None and (layer is None or raw.of(eqn.outs[0]).kind in ("const", "input")):
            layer = reader
            eqn.backward |= cells.is_backward(reader)
        if layer is not None and cells.is_backward(layer) == eqn.backward:
            cells.add(eqn.id, layer)


def attach_residuals(cells: Cells) -> None:
    """Add what differentiation computes next to a layer to the layer."""
    last: Cell | None = None
    for eqn in cells.raw.eqns:
        if eqn.residual and last is not None:
            cells.add(eqn.id, last)
        elif not eqn.backward and not eqn.view:
            last = cells.owner[eqn.id]
