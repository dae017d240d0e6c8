"""The scopes of layers: named scopes, regions, and the modules of their parameters.

Where a library names no scopes, the path of a layer's parameters does: `encoder.blocks[0].attn.query` is in the modules
"encoder", "blocks.0" and "attn". A layer without parameters is in the smallest module whose call it is made in. Which
call is of which module is known from the parameters that are read in it.

Modules that name their calls while they are traced would tell the same, which tests/viz/test_viz_told.py checks. But
functions of dicts have none, and `remat` and `vmap` make modules anew, of which nobody knows the names.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .._fold.cells import Cell, Cells
from .._graph import BACKWARD
from .._read.arguments import RANDOM
from .._read.source import Frame
from .._scopes import Path, Scope, common_prefix, main_prefix, paths_of
from .names import GENERIC, name_of_weights
from .net import Draft, Net

_Path = tuple[str, ...]  # of parameters


@dataclass(slots=True, eq=False)
class Layer:
    """A layer on its way to a module."""

    frames: tuple[Frame, ...]  # the calls around it, from the outside in
    path: _Path | None  # the modules of its parameters. None where it has none with a name.
    scope: Path  # the named scopes and regions around it
    levels: tuple[int, ...]  # how many frames are around each of these. -1 for unknown.
    weights: frozenset[int]  # the parameters that it reads
    # what is found: each module, and the frame that calls it
    modules: list[tuple[int, str]] = field(default_factory=list)


def find_modules(layers: Sequence[Layer]) -> bool:
    """Write the modules of each layer. False where named scopes already have the names of the modules."""
    anchors = [layer for layer in layers if layer.path]
    named = sum(not set(layer.path or ()).isdisjoint(layer.scope) for layer in anchors)
    if not anchors or 2 * named >= len(anchors):
        return False
    for _, group in itertools.groupby(layers, lambda layer: layer.frames[0].function if layer.frames else -1):
        inside = list(group)
        around_all = common_prefix(tuple(frame.call for frame in layer.frames) for layer in inside)
        _visit(inside, max(0, len(around_all) - 1), [])
    return True


def _visit(layers: list[Layer], depth: int, modules: list[tuple[int, str]]) -> None:
    """Go through one call. `modules` are those around it, `depth` its place on the stack."""
    for _, group in itertools.groupby(layers, lambda layer: _place(layer, depth)):
        inside = list(group)
        if len(inside[0].frames) > depth + 1 and any(layer.path for layer in inside):
            for call in _calls(inside, depth + 1):
                _visit(call, depth + 1, modules + _modules_entered(call, depth + 1, [name for _, name in modules]))
            continue
        # Where no call goes on: the modules of a layer's parameters, else those around it.
        around = tuple(name for _, name in modules)
        for layer in inside:
            path = around if layer.path is None else layer.path
            same = len(common_prefix([around, path]))
            layer.modules = [*modules[:same], *((len(layer.frames) - 1, name) for name in path[same:])]


def _place(layer: Layer, depth: int) -> object:
    """The call of a layer from a frame: its place there and the function. A layer of the frame itself has none."""
    return (layer.frames[depth].call, layer.frames[depth + 1].function) if len(layer.frames) > depth + 1 else None


def _calls(layers: list[Layer], depth: int) -> list[list[Layer]]:
    """The separate calls of a function at one place: a loop over modules calls it for each."""
    shared = len(common_prefix([layer.path for layer in layers if layer.path is not None]))
    marks = [(n, s.path[shared] if len(s.path) > shared else "") for n, s in enumerate(layers) if s.path is not None]
    groups = [list(group) for _, group in itertools.groupby(marks, lambda mark: mark[1])]
    if len(groups) < 2 or len({group[0][1] for group in groups}) < len(groups):
        return [layers]
    places = [[frame.call for frame in layer.frames[depth:]] for layer in layers]
    read_at = [{tuple(places[n]) for n, _ in group} for group in groups]
    if any(a.isdisjoint(b) for a, b in itertools.pairwise(read_at)):
        return [layers]
    # Between the last layer of one call and the first of the next, the next begins where the lines go back.
    starts = [0]
    for before, after in itertools.pairwise(groups):
        last, first = before[-1][0], after[0][0]
        starts.append(next((n for n in range(last + 1, first + 1) if places[n] < places[n - 1]), first))
    return [layers[a:b] for a, b in itertools.pairwise([*starts, len(layers)])]


def _modules_entered(call: list[Layer], depth: int, around: list[str]) -> list[tuple[int, str]]:
    """The modules that a call goes into: what its parameters share, where it reads them at several places.

    Another is a wrapper, or calls one module again and again. It is of a module only where the calls inside are fewer
    than the modules on the path.
    """
    anchors = [layer for layer in call if layer.path is not None]
    shared = common_prefix([layer.path for layer in anchors if layer.path is not None])
    if list(shared[: len(around)]) != around:
        return []
    new = shared[len(around) :]
    innermost = any(len(layer.frames) == depth + 1 for layer in anchors)
    read_at: dict[object, set[int]] = {}
    for layer in anchors:
        read_at.setdefault(_place(layer, depth), set()).update(layer.weights)
    # Places that read the same call one module again, unless it has no modules inside: then they call a helper of it.
    calls_again = len(set(map(frozenset, read_at.values()))) < 2 and any(layer.path != shared for layer in anchors)
    if not innermost and (len(read_at) < 2 or calls_again):
        spare = [len(layer.path or ()) - len(around) - _methods(layer.frames[depth:]) + 1 for layer in anchors]
        new = new[: max(0, min(spare))] if _is_method(call[0].frames[depth]) else ()
    return [(depth, name) for name in new]


def _is_method(frame: Frame) -> bool:
    head, _, method = frame.name.rpartition(".")
    return bool(head) and not head.endswith("<locals>") and "<" not in method


def _methods(frames: Sequence[Frame]) -> int:
    """The number of modules that are called: methods, without those that a class calls of itself."""
    count, last = 0, ""
    for frame in filter(_is_method, frames):
        head, _, method = frame.name.rpartition(".")
        count += head != last or method == "__call__"
        last = head
    return count


def join_scopes(layers: Sequence[Layer]) -> list[Path]:
    """The scope of each layer: its named scopes and regions, and its modules, as they are nested."""
    common: dict[Path, tuple[int, ...]] = {}  # the calls around all layers of a scope
    for layer in layers:
        calls = tuple(frame.function for frame in layer.frames)
        for path in paths_of(layer.scope):
            common[path] = common_prefix([common.get(path, calls), calls])
    joined: list[Path] = []
    for layer in layers:
        scopes, modules = list[Scope](), list(layer.modules)
        for name, path, level in zip(layer.scope, paths_of(layer.scope), layer.levels, strict=True):
            around = level if level >= 0 else len(common[path])
            while modules and modules[0][0] < around:
                scopes.append(Scope(modules.pop(0)[1]))
            if name.is_region or name not in [module for _, module in layer.modules]:
                scopes.append(name)
        joined.append((*scopes, *(Scope(name) for _, name in modules)))
    return joined


def set_scopes(cells: Cells, net: Net, by_cell: dict[int, Draft], late: set[int]) -> None:
    """Write the scopes of the drafts before a gradient. A second call of a module gets a number.

    `late` are the cells of gradients and behind them.
    """
    stacks: dict[int, tuple[Frame, ...]] = {}
    first = {cell.id: _first(cells, cell, by_cell[cell.id].scope) for cell in cells if cell.id not in late}
    forward = [cells.cells[number] for number in sorted(first, key=first.__getitem__)]
    frames = {cell.id: frames_of(cells, cell, stacks) for cell in forward}
    _mark_tied(cells, forward, frames, by_cell)
    layers = [_layer(cells, first[cell.id], by_cell[cell.id], frames[cell.id]) for cell in forward]
    are_modules = find_modules(layers)
    for cell, scope in zip(forward, join_scopes(layers), strict=True) if are_modules else ():
        by_cell[cell.id].scope = scope
    drafts = [draft for draft in net.layers if not draft.op.endswith(BACKWARD)]
    number_calls(drafts, are_modules, {by_cell[number].at: found for number, found in frames.items()})
    if are_modules:
        fill_modules(net, drafts)


def number_calls(
    drafts: list[Draft],
    are_modules: bool,
    frames: Mapping[int, tuple[Frame, ...]],
    around: Path = (),
    calls: dict[Path, list[set[int]]] | None = None,
) -> None:
    """Number scopes that are entered again, "encoder (2)". A module that goes on with other parameters is not.

    `drafts` are the layers in the scope `around`, `frames` the calls around each. `calls` has the parameters that each
    call of a scope has read, and grows.
    """
    depth, calls = len(around), {} if calls is None else calls
    for name, group in itertools.groupby(drafts, lambda draft: draft.scope[depth : depth + 1]):
        if not name:
            continue
        inside = list(group)
        for run in [inside] if name[0].is_region else _calls_in_a_row(inside, frames):
            used = {weight for draft in run for weight in draft.weights}
            calls_of = calls.setdefault((*around, *name), [])
            # With other parameters than before it goes on with the same call, as two layers of a module do.
            if calls_of and (name[0].is_region or (are_modules and calls_of[-1].isdisjoint(used))):
                calls_of[-1] |= used
            else:
                calls_of.append(used)
            numbered = (*around, name[0] if len(calls_of) == 1 else name[0].numbered(len(calls_of)))
            for draft in run:
                draft.scope = (*numbered, *draft.scope[depth + 1 :])
            number_calls(run, are_modules, frames, numbered, calls)


def _calls_in_a_row(run: list[Draft], frames: Mapping[int, tuple[Frame, ...]]) -> list[list[Draft]]:
    """The layers of a module, as the calls of it where it is called several times in a row.

    Each call reads the parameters of the first layer, and the function around it is called for each from another place.
    In a loop inside of a module that place is the same.
    """
    first = next((draft for draft in run if draft.weights), None)
    if first is None:
        return [run]
    places = {draft.at: tuple(frame.call for frame in frames.get(draft.at, ())) for draft in run}
    same = [draft for draft in run if (draft.op, draft.weights) == (first.op, first.weights)]
    for again in same[1:]:
        depth = len(common_prefix([places[first.at], places[again.at]]))  # of the function that makes both calls
        called = [frames.get(draft.at, ())[depth + 1 : depth + 2] for draft in (first, again)]
        if not all(called) or called[0][0].function != called[1][0].function:
            continue
        calls = [list(call) for _, call in itertools.groupby(run, lambda draft: places[draft.at][: depth + 1])]  # noqa: B023
        if all(not set(same).isdisjoint(call) for call in calls):
            return calls
    return [run]


def _first(cells: Cells, cell: Cell, scope: Path) -> int:
    """The first equation of a cell in its scope."""
    return next(eqn.id for eqn in cells.steps(cell) if eqn.scope[: len(scope)] == scope)


def _mark_tied(
    cells: Cells, forward: list[Cell], calls: dict[int, tuple[Frame, ...]], by_cell: dict[int, Draft]
) -> None:
    """Mark layers that borrow the parameters of another kind of layer, and layers that share random state."""
    owners: dict[int, tuple[str, int]] = {}
    readers: dict[int, int] = {}
    for cell in forward:
        kind = (cell.op, calls[cell.id][-1].function if calls[cell.id] else -1)
        weights = by_cell[cell.id].weights
        new = set(weights) - owners.keys()
        by_cell[cell.id].borrowed = {weight for weight in weights if owners.setdefault(weight, kind) != kind}
        by_cell[cell.id].tied = bool(weights) and by_cell[cell.id].borrowed == set(weights)
        if new:  # a bias of its own beside the weight of another layer names it
            by_cell[cell.id].borrowed = set(weights) - new
        for weight in weights:
            readers[weight] = readers.get(weight, 0) + 1
    for cell in forward:
        paths = {weight: cells.raw.values[weight].path for weight in by_cell[cell.id].weights}
        random = bool(paths) and all(path[-1:] == (RANDOM,) for path in paths.values())
        by_cell[cell.id].tied |= random and any(readers[weight] > 1 for weight in paths)


def _layer(cells: Cells, first: int, draft: Draft, frames: tuple[Frame, ...]) -> Layer:
    eqn = cells.raw.eqns[first]
    levels = tuple(level if level < 0 else len(plain_stack(eqn.stack[:level])) for level in eqn.levels)
    paths = [path[:-1] for weight in draft.weights if (path := cells.raw.values[weight].path)]
    path = common_prefix(paths) if paths and not draft.tied else None
    longest = max(paths, key=len, default=())
    if path is not None and not draft.borrowed and all(longest[: len(outer)] == outer for outer in paths):
        path = longest  # a param of a module around it, such as learned queries, is read inside
    return Layer(frames, path, draft.scope, levels[: len(draft.scope)], frozenset(draft.weights))


_PRODUCTS = frozenset(("FullyConnected", "Convolution", "Deconvolution", "Embedding"))


def set_paths(net: Net) -> None:
    """Write the path of each layer: its modules and its own name. A module of one layer is the layer."""
    forward = [draft for draft in net.layers if draft.forward is None]
    # What holds modules, or params that name their layers, such as the matrices of an attention, is not one layer.
    every = [value.path for value in net.raw.values if value.kind == "weight" and value.path]
    modules = {path[:depth] for path in every for depth in range(1, len(path) - 1)}
    modules |= {path[:-1] for path in every if len(path) > 1 and path[-1] not in GENERIC}
    members = Counter(path for draft in forward for path in paths_of(draft.scope))
    named: dict[tuple[str, ...], set[tuple[str, ...]]] = {}  # the params of the first layer of a module
    for draft in forward:
        scope = draft.scope
        paths = {weight: path for weight in draft.weights if (path := net.raw.values[weight].path)}
        own = [path for weight, path in paths.items() if weight not in draft.borrowed]
        name = name_of_weights(own, modules)
        # A layer is called as the module of its params. A bias that another layer adds is called "bias".
        if name and own[0][-2:-1] == (name,):
            first = named.setdefault(own[0][:-1], set(own))
            name = own[0][-1] if len(own) == 1 and own[0] not in first else name
        if draft.tied and draft.op in _PRODUCTS:  # a penalty of the weights is no layer of their name
            lender = name_of_weights(list(paths.values()), modules) or "".join(next(iter(paths.values()), ())[-1:])
            name = f"= {lender}" if lender else ""
        if scope and members[scope] == 1 and not scope[-1].is_region:
            name, draft.scope = scope[-1].name, scope[:-1]
        if name:
            draft.path = (*(scope_part.name for scope_part in draft.scope if not scope_part.is_region), name)
    for draft in net.layers:
        if draft.forward is not None and draft.scope and members[draft.scope] == 1:
            draft.scope = draft.forward.scope


def fill_modules(net: Net, layers: list[Draft]) -> None:
    """Give layers without a scope that of the call that they are in, between its layers, or that they end.

    One that joins several results of a call, directly after it, ends it. One that joins those of two is in neither.
    """
    by_at = {draft.at: draft for draft in net.drafts}
    _fill((), layers, {at: [by_at[source] for source in read] for at, read in net.sources().items()})


def _fill(around: Path, drafts: list[Draft], sources: dict[int, list[Draft]]) -> None:
    """Fill the calls directly inside a scope, then those inside them."""
    depth = len(around)
    runs = [(name, list(run)) for name, run in itertools.groupby(drafts, lambda draft: draft.scope[depth : depth + 1])]
    for number, (name, run) in enumerate(runs):
        before = runs[number - 1][0] if number else ()
        if name or not before or before[0].is_region:
            continue
        scope = (*around, *before)
        # Between two layers of a call: it is of that call too, unless it has parameters of its own.
        if number + 1 < len(runs) and runs[number + 1][0] == before and not any(draft.weights for draft in run):
            for draft in run:
                draft.scope = scope
        for draft in run:
            read = sources.get(draft.at, [])
            joins_results = len(read) > 1 and all(source.scope[: len(scope)] == scope for source in read)
            if joins_results and not draft.weights:
                draft.scope = scope
    for name, run in itertools.groupby(drafts, lambda draft: draft.scope[depth : depth + 1]):
        if name:
            _fill((*around, *name), list(run), sources)


def frames_of(cells: Cells, cell: Cell, plain_stacks: dict[int, tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """The calls that most of a cell's FLOPs are in, without those of JAX. `plain_stacks`, by place, grows."""
    weights = Counter[int]()  # of each place
    for eqn in cells.steps(cell):
        if eqn.position not in plain_stacks:
            plain_stacks[eqn.position] = plain_stack(eqn.stack)
        weights[eqn.position] += 1 + eqn.flops
    stacks = [plain_stacks[position] for position in weights]
    keys = [tuple(key for frame in stack for key in (frame.function, frame.call)) for stack in stacks]
    shared = main_prefix(zip(keys, weights.values(), strict=True))
    inside = next(stack for stack, key in zip(stacks, keys, strict=True) if key[: len(shared)] == shared)
    return inside[: (len(shared) + 1) // 2]  # the last one may be at several places of its function


def plain_stack(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """A stack without the frames of JAX, and with those once that a nested jaxpr repeats."""
    frames = [frame for frame in stack if frame.origin != "jax"]
    starts = [n for n, frame in enumerate(frames) if frame.function == frames[0].function] or [0]
    joined: list[Frame] = []
    for start, end in zip(starts, [*starts[1:], len(frames)], strict=True):
        repeated = frames[start:end]
        pairs = list(zip(joined, repeated, strict=False))
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0].call == pair[1].call, pairs))
        if same < len(pairs) and joined[same].function == repeated[same].function:
            same += 1  # the last frame may be at two places of one function
        joined += repeated[same:]
    return tuple(joined)
