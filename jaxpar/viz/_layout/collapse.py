"""Large graphs made small: deep scopes close first, then parts of scopes, then whole stretches.

The items of a scope, layers and scopes, are in an order in which they can be computed. Neighbours whose names begin
alike are a part. Without such names the items are cut where only one value is needed on both sides: it dominates all
that follows.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from .._graph import BACKWARD, Node
from .._scopes import Path, Scope, paths_of, unique
from .._searches import circles
from .names import name_kinds, shared_name
from .net import Draft, Net, shared_scope, to_graph

_Closing = tuple[tuple[Path, bool], list[Draft]]  # the scope that closes, whether these are gradients, and drafts of it
MOST = 24  # children of a scope that a person can overlook
_SMALL = 2  # layers that are rather shown than one box for them
FEW_BOXES = 8  # in a picture, those of gradients too, below which single blocks are opened


def collapse_scopes(net: Net, depth: int) -> None:
    """Merge each scope deeper than `depth`. A scope around everything does not count."""
    depth += len(shared_scope(net.layers))
    _close(net, {path for path in _paths(net) if len(path) <= depth})


def open_where(net: Net, wanted: Callable[[Node], object]) -> None:
    """Open the scopes of whose closed box a function says so, from the outside in, and close the others."""
    is_open, asked = _around_all(net), set[Path]()
    while True:
        shown = net.copy()
        _close(shown, is_open)
        boxes = [(draft.closed, node) for draft, node in zip(shown.drafts, to_graph(shown).nodes, strict=True)]
        new = [(path, node) for path, node in boxes if path and path not in asked and not node.is_backward]
        if not new:
            break
        asked |= {path for path, _ in new}
        is_open |= {path for path, node in new if wanted(node)}
    _close(net, is_open)


def _paths(net: Net) -> list[Path]:
    """All scopes, in the order of their first layers."""
    return list(dict.fromkeys(path for draft in net.drafts for path in paths_of(draft.scope)))


def _close(net: Net, is_open: Container[Path]) -> None:
    """Merge the outermost of the scopes that are not open."""
    groups: dict[tuple[Path, bool], list[Draft]] = {}
    for draft in net.drafts:
        closed = next((path for path in paths_of(draft.scope) if path not in is_open), None)
        if closed is not None:
            groups.setdefault((closed, draft.forward is not None), []).append(draft)
    close_groups(net, list(groups.items()))


def close_groups(net: Net, groups: list[_Closing]) -> None:
    """Merge the drafts of each group, so that what they become has no circle."""
    if not groups:
        return
    sources, ordered, readers = net.sources(), net.ordered(), _readers(net)
    merged: list[tuple[list[Draft], Draft]] = []
    pieces = _without_circles(ordered, sources, groups)
    count = Counter(key for key, _ in pieces)
    for key, group in pieces:
        if len(group) > 1:
            path, is_backward = key
            scope = path[-1].numbered(1)
            if scope.kind == "part" and count[key] > 1:  # it is called by what is in it, and each piece holds less
                layers = {
                    draft.layer.at: replace(draft.layer, scope=_without_parts(draft.layer.scope)) for draft in group
                }
                inside = list(layers.values())
                scope = name_part(items_of(inside, len(shared_scope(inside))))
            made = _sum(group, scope + BACKWARD if is_backward else scope, path[:-1], readers)
            made.closed = path
            merged.append((group, made))
    net.merge(merged)


def _without_circles(ordered: list[Draft], sources: dict[int, set[int]], closings: list[_Closing]) -> list[_Closing]:
    """The parts, cut where a path leaves one and comes back, so that what they become has no circle.

    `ordered` has all drafts, each after those that it reads.
    """
    # Each draft stands for the first one of the part that it becomes.
    whose = {draft.at: draft.at for draft in ordered}
    for _, group in closings:
        whose |= dict.fromkeys((draft.at for draft in group), group[0].at)
    large = {group[0].at for _, group in closings if len(group) > 1}
    wires: dict[int, set[int]] = {number: set() for number in whose.values()}
    for at, number in whose.items():
        wires[number] |= {whose[source] for source in sources.get(at, ())} - {number}
    circle_of = {number: circle for circle, members in enumerate(circles(wires)) for number in members}
    level: dict[int, int] = {}  # how often a path on the way here has left a part of its circle
    for at in (draft.at for draft in ordered if whose[draft.at] in circle_of):
        inside = [s for s in sources.get(at, ()) if circle_of.get(whose[s]) == circle_of[whose[at]]]
        level[at] = max((level[s] + (whose[s] != whose[at] and whose[s] in large) for s in inside), default=0)
    cut: dict[tuple[int, int], _Closing] = {}
    for key, group in closings:
        for draft in group:
            cut.setdefault((group[0].at, level.get(draft.at, 0)), (key, []))[1].append(draft)
    return list(cut.values())


def _readers(net: Net) -> dict[int, set[int]]:
    """The drafts that read each one, without gradients that read a layer."""
    backward = {draft.at for draft in net.drafts if draft.forward is not None or draft.op.endswith(BACKWARD)}
    readers: dict[int, set[int]] = {}
    for source, target, _ in net.edges:
        if source in backward or target not in backward:
            readers.setdefault(source, set()).add(target)
    return readers


def _sum(group: list[Draft], op: str, scope: Path, readers: dict[int, set[int]]) -> Draft:
    """One draft for a group, with the sums of its costs. Gradients become the gradient of what their layers become.

    It is known by the last array that others read. Else by the last that is returned, which may be a running mean.
    """
    inside = {draft.at for draft in group}
    read = (draft for draft in reversed(group) if readers.get(draft.at, set[int]()) - inside)
    returned = (draft for draft in reversed(group) if draft.outputs)
    last = next(itertools.chain(read, returned), group[-1])
    layers = sum(draft.layers for draft in group)
    made = Draft(group[0].at, op, "", last.value, scope, group[0].source, name=op, layers=layers)
    made.equations, made.forward = sum(draft.equations for draft in group), group[0].forward
    made.add(group)
    made.detail = ", ".join([*made.sends, f"{layers} layers"])
    return made


def limit_nodes(net: Net, most: int) -> None:
    """Close until at most `most` layers are left."""
    close_until(net, lambda net: len(net.layers) <= most, room=min(MOST, most))
    if len(net.layers) > most:
        # Merge neighbours, whatever they are. Only gradients that no layer owns come here, or very few nodes.
        ordered = [draft for draft in net.ordered() if draft.op != "input"]
        cuts = [number * len(ordered) // most for number in range(most + 1)]
        stretches = [ordered[start:end] for start, end in pairwise(cuts) if end - start > 1]
        readers = _readers(net)
        net.merge([(stretch, _sum(stretch, name_part(items_of(stretch, 0)), (), readers)) for stretch in stretches])


def close_until(net: Net, fits: Callable[[Net], bool], *, room: int = MOST, few: int = 0) -> None:
    """Close scopes until a net fits: as many levels stay open as that allows.

    Where fewer than `few` boxes are left, the largest of them are opened one by one. The page of a network opens the
    same.
    """
    if fits(net):
        return
    # First the scopes as they are. Then their parts are scopes too, with fewer items each as long as nothing fits, the
    # boxes are few, or one of them stands for most of the net.
    count = sum(draft.layers for draft in net.layers)
    best, divided = None, net.copy()
    for most in (None, *(room >> halved for halved in range(room.bit_length() - 1))):
        if most is not None:
            add_parts(divided, most)
        closed = _opened(divided, fits, few)
        if closed is not None and (best is None or _most_hidden(closed) < _most_hidden(best)):
            best = closed
        if best is not None and len(best.layers) >= few and (not few or 2 * _most_hidden(best)[0] <= count):
            break
    best = best or _closed(divided, _around_all(divided))
    net.drafts, net.edges, net.carries, net.repeats = best.drafts, best.edges, best.carries, best.repeats


def _closed(net: Net, is_open: Container[Path]) -> Net:
    """A net with only these scopes open. Parts have no frames then: their names say what is in them, which is seen."""
    made = net.copy()
    _close(made, is_open)
    for draft in made.drafts:
        draft.scope = _without_parts(draft.scope)
    made.repeats = {_without_parts(path): count for path, count in made.repeats.items()}
    return made


def _without_parts(scope: Path) -> Path:
    return tuple(part for part in scope if part.kind != "part" or part.times is not None)


def _around_all(net: Net) -> set[Path]:
    """The scopes around everything, which do not count."""
    return set(paths_of(shared_scope(net.layers)))


def _opened(net: Net, fits: Callable[[Net], bool], few: int) -> Net | None:
    """A net with as many open levels of scopes as fit, and then the largest blocks while boxes are few.

    None where it does not even fit with all of them closed.
    """
    is_open, paths = _around_all(net), _paths(net)
    shown = _closed(net, is_open)
    if not fits(shown):
        return None
    for level in range(1 + len(is_open), 1 + max(map(len, paths), default=0)):
        more_open = is_open | {path for path in paths if len(path) == level}
        if not fits(more := _closed(net, more_open)):
            break
        is_open, shown = more_open, more
    tried = set[Path]()
    size = Counter(path for draft in net.drafts for path in paths_of(draft.scope))
    while len(shown.layers) < few:
        inside = [path for path in paths if path not in is_open | tried and path[:-1] in is_open | {()}]
        if not inside:
            break
        largest = max(inside, key=size.__getitem__)
        tried.add(largest)
        if fits(more := _closed(net, is_open | {largest})):
            is_open, shown = is_open | {largest}, more
    # A box of two layers that is no module says less than they do, and hides one box. Such are opened while all fits.
    parts = [path for path in paths if path[-1].kind == "part" and path not in is_open and path[:-1] in is_open | {()}]
    for path in sorted((path for path in parts if size[path] <= _SMALL), key=size.__getitem__) if few else ():
        if fits(more := _closed(net, is_open | {path})):
            is_open, shown = is_open | {path}, more
    return shown


def _most_hidden(net: Net) -> tuple[int, int]:
    """How many layers the largest box stands for. Of equal ones, the net with most boxes is the least."""
    return max((draft.layers for draft in net.layers), default=0), -len(net.layers)


@dataclass(slots=True)
class Item:
    """A layer or a scope."""

    drafts: list[Draft]  # the layers in it
    scope: Path | None  # of a scope, its path. None for a layer.
    kind: str  # of layer or of scope, without numbers
    name: str  # its own, without the modules around it. Empty where nothing names it.

    @property
    def flops(self) -> int:
        """Of all its layers."""
        return sum(draft.flops for draft in self.drafts)


def items_of(drafts: list[Draft], depth: int) -> list[Item]:
    """The items in a scope of this depth, in the order of their first layers."""
    groups: dict[object, list[Draft]] = {}
    for draft in drafts:
        key: object = draft.scope[: depth + 1] if len(draft.scope) > depth else draft.at
        groups.setdefault(key, []).append(draft)
    items: list[Item] = []
    for group in groups.values():
        first = group[0]
        if len(first.scope) > depth:
            scope = first.scope[depth]
            items.append(Item(group, first.scope[: depth + 1], scope.stem, scope))
        else:
            items.append(Item(group, None, first.op, first.name or "".join(first.layer.path[-1:])))
    return items


def wires_of(items: list[Item], sources: dict[int, set[int]]) -> tuple[list[Item], list[set[int]]]:
    """The items before it that each one reads. Items that read each other become one, with all between them."""
    owner = {draft.at: number for number, item in enumerate(items) for draft in item.drafts}
    reads = [
        {owner[s] for draft in item.drafts for s in sources.get(draft.at, ()) if owner.get(s, number) != number}
        for number, item in enumerate(items)
    ]
    last = list(range(len(items)))  # the last item that has to be in one with this
    for number, reads_of in enumerate(reads):
        last[number] = max(number, *reads_of) if reads_of else number
    # An item that reads a later one is in a circle with it. So all from the one to the other are one item.
    into, joined, end = [0] * len(items), list[Item](), -1
    for number, item in enumerate(items):
        if number > end:
            joined.append(item)
        else:
            before = joined[-1]
            joined[-1] = Item(before.drafts + item.drafts, None, before.kind, before.name)
        into[number] = len(joined) - 1
        end = max(end, last[number])
    wires: list[set[int]] = [set() for _ in joined]
    for number, reads_of in enumerate(reads):
        wires[into[number]] |= {into[source] for source in reads_of} - {into[number]}
    return joined, wires


Part: TypeAlias = "int | list[Part]"  # the number of an item, or a part
_LEAST_CUT = 0.95  # of all items, in the largest section
_WORDS = re.compile(r"[A-Za-z]+|\d+")
_NO_STEPS = frozenset("Attention GRU LSTM MatMul RoPE SelectiveScan".split())  # layers, though without params


def _divide(items: list[Item], wires: list[set[int]], numbers: list[int], most: int) -> list[Part]:
    """Nested parts of these items, at most `most` on each level: by their names, else where one value crosses."""
    if len(numbers) <= most:
        return list(numbers)
    groups = _by_names(items, wires, numbers, most) or _sections(items, wires, numbers)
    parts = [group[0] if len(group) == 1 else _divide(items, wires, group, most) for group in groups]
    while len(parts) > most:  # neighbours together, about as many in each part as there are parts
        count = math.ceil(len(parts) ** (1 / math.ceil(math.log(len(parts), most))))
        cuts = [number * len(parts) // count for number in range(count + 1)]
        parts = [parts[start:end] for start, end in pairwise(cuts)]
    return parts


def _by_names(items: list[Item], wires: list[set[int]], numbers: list[int], most: int) -> list[list[int]] | None:
    """Neighbours whose names begin with the same words, the longest that are few enough. None if that is no help.

    A step without a name goes with the items before it. Behind the last name that ends where one only reads another
    one. An attention without a name is no step of the layer before it.
    """
    named = [at for at, number in enumerate(numbers) if items[number].name]
    if not named:
        return None
    best, words = None, list[tuple[str, ...]]()  # ("conv", "2", "block", "1")
    for item in (items[number] for number in numbers):
        words.append(tuple(_WORDS.findall(item.name or (item.kind if item.kind in _NO_STEPS else ""))))
    end = named[-1] + 1
    while end < len(words) and (len(wires[numbers[end]]) > 1 or items[numbers[end]].kind == "Activation"):
        end += 1
    words[end:] = [("behind all names",)] * len(words[end:])
    for length in range(1, 1 + min(6, max(map(len, words)))):
        groups, last = list[list[int]](), tuple[str, ...]()
        for number, key in zip(numbers, (words_of[:length] for words_of in words), strict=True):
            if groups and (not key or not last or key == last):
                groups[-1].append(number)
            else:
                groups.append([number])
            last = key or last
        if 1 < len(groups) <= most:
            best = groups
    return best


def _sections(items: list[Item], wires: list[set[int]], numbers: list[int]) -> list[list[int]]:
    """The items, cut where at most one value crosses. Each by itself, if next to nothing can be cut off so."""
    place = {number: at for at, number in enumerate(numbers)}
    last, readers = [-1] * len(numbers), [0] * len(numbers)
    for at, number in enumerate(numbers):
        for source in wires[number] & place.keys():
            last[place[source]] = at
            readers[place[source]] += 1
    for ignore_far in (False, True):  # then without values that are read all along, such as a mask
        # How many values cross each place: one more behind where a value is made, one less behind its last reader.
        change = [0] * (len(numbers) + 1)
        for at, end in enumerate(last):
            is_far = readers[at] > 2 and 2 * (end - at) > len(numbers)
            if end > at and not (ignore_far and is_far):
                change[at] += 1
                change[end] -= 1
        crossing, sections = list(itertools.accumulate(change)), list[list[int]]()
        for at, number in enumerate(numbers):
            # An activation right after branches meet is part of their block.
            ends_block = items[number].kind == "Activation" and crossing[at] <= 1 and sections and len(sections[-1]) > 1
            if at == 0 or (crossing[at - 1] <= 1 and not ends_block):
                sections.append([])
            sections[-1].append(number)
        if max(map(len, sections)) <= _LEAST_CUT * len(numbers):
            return sections
    return [[number] for number in numbers]


def _numbers(part: Part) -> list[int]:
    if isinstance(part, int):
        return [part]
    return [number for inner in part for number in _numbers(inner)]


_Inserts = dict[int, list[tuple[int, Path]]]  # of each draft: parts, and the depth of the scope that they are in


def add_parts(net: Net, most: int = MOST) -> None:
    """Give each scope that holds more than `most` layers or scopes parts inside, which are scopes like any other."""
    layers = (draft for draft in net.layers if not draft.alone)
    forward = [draft for draft in layers if draft.forward is None and not draft.op.endswith(BACKWARD)]
    sources, inserts = net.sources(), _Inserts()
    _add_in_scope(sources, forward, (), most, inserts)
    renamed: dict[Path, Path] = {}
    for draft in net.drafts:
        parts = sorted(inserts.get(draft.layer.at, ()), reverse=True)
        for length in range(1, len(draft.scope) + 1):
            path = draft.scope[:length]
            if path in net.repeats and path not in renamed:
                renamed[path] = _inserted(path, parts, length - 1)
        draft.scope = _inserted(draft.scope, parts, len(draft.scope))
    net.repeats = {renamed.get(path, path): count for path, count in net.repeats.items()}


def _inserted(scope: Path, inserts: list[tuple[int, Path]], deepest: int) -> Path:
    """A scope with parts in it, the deepest first, as far as `deepest`."""
    for depth, path in inserts:
        if depth <= deepest:
            scope = (*scope[:depth], *path, *scope[depth:])
    return scope


def _add_in_scope(sources: dict[int, set[int]], drafts: list[Draft], scope: Path, most: int, inserts: _Inserts) -> None:
    """Find the parts directly inside a scope, and those in the scopes inside it."""
    items = items_of(drafts, len(scope))
    for item in items:
        if item.scope is not None:
            _add_in_scope(sources, item.drafts, item.scope, most, inserts)
    if len(items) > most:
        items, wires = wires_of(items, sources)
        parts = _divide(items, wires, list(range(len(items))), max(2, most))
        _name_parts(items, parts, (), len(scope), inserts, set())


def _name_parts(
    items: list[Item], parts: list[Part], path: Path, depth: int, inserts: _Inserts, taken: set[Scope]
) -> None:
    """Write the path of its parts on each draft."""
    for part in parts:
        if isinstance(part, int):
            for draft in items[part].drafts if path else ():
                inserts.setdefault(draft.at, []).append((depth, path))
            continue
        inside = [items[number] for number in _numbers(part)]
        name = name_part(inside)
        # The module of this name, where it is the only one and no layer beside it has params, is not framed twice.
        scopes = [item for item in inside if item.scope is not None]
        if len(scopes) == 1 and scopes[0].name == name and not any(i.name for i in inside if i.scope is None):
            for draft in (draft for item in inside for draft in item.drafts):
                added = path if draft in scopes[0].drafts else (*path, name)
                inserts.setdefault(draft.at, []).append((depth, added))
            continue
        name = unique(name, taken.__contains__)
        taken.add(name)
        _name_parts(items, part, (*path, name), depth, inserts, {name})


def name_part(items: Sequence[Item]) -> Scope:
    """A scope for a part of these items: what their names share, as "conv2_block1", else what is in it.

    A layer and steps without names are called as the layer. Where such a part is open, that is seen. Steps beside a
    loop or a repeat do not run as often as it, and so they are counted: "layers ×3 + 1".
    """
    named = [item for item in items if item.name]
    if len(named) == 1 < len(items):
        name, scope = named[0].name, named[0].scope
        if scope is None:
            # An attention or a scan says more than a smaller layer beside it, or than the letter of its own param.
            least = named[0].flops + (len(name) > 1)
            main = next((item.kind for item in items if item.kind in _NO_STEPS and item.flops >= least), name)
            return Scope(main, "part")
        if scope[-1].is_region or scope[-1].times is not None:
            return Scope(f"{name} + {len(items) - 1}", "part")
    if name := shared_name([item.name for item in named]):
        return Scope.of(name)
    kinds: list[tuple[str, int]] = []
    for item in items:
        is_part = item.scope is not None and item.scope[-1].kind == "part"  # named by what is in it, as this will be
        kinds += [(draft.op, draft.flops) for draft in item.drafts] if is_part else [(item.kind, item.flops)]
    return Scope(name_kinds(kinds), "part")
