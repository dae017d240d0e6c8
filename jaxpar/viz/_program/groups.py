"""Between which devices a collective runs, and along which axes of the mesh."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

from .hlo import Instruction

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"(?:^|, )replica_groups=@?mesh\[([^\]]*)\](?:, ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)


def groups_of(instruction: Instruction, devices: int) -> Groups:
    """The devices of a program that exchange something, in groups.

    Args:
        instruction: a collective. A permutation gives a group for each (source, target).
        devices: how many devices the program runs on.

    Raises:
        ValueError: the text of the groups is in no known form.
    """
    pairs = instruction.attribute("source_target_pairs")
    if pairs:
        return _lists(pairs)
    if mesh := _MESH.search(instruction.attributes):
        return _of_mesh(mesh)
    text = instruction.attribute("replica_groups")
    if not text or text == "{}":
        return (tuple(range(devices)),)
    if iota := _IOTA.match(text):
        return _rows(_iota(_ints(iota[2]), _ints(iota[3])), _ints(iota[1])[-1])
    if text.startswith("{"):
        return _lists(text)
    raise ValueError(f"viz: the devices of {instruction.name} are in a form that is not known here: {text}")


def axes_of(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh that these groups run along. Empty where they are no set of axes.

    >>> axes_of(((0, 2), (1, 3)), {"data": 2, "model": 2})
    ('data',)
    """
    wanted = {frozenset(group) for group in groups}
    names = [name for name, size in sizes.items() if size > 1]
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            if {frozenset(group) for group in _along(axes, sizes)} == wanted:
                return axes
    return ()


def axes_between(pairs: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes in which the two devices of a pair of a permutation differ."""
    places = list(itertools.product(*(range(size) for size in sizes.values())))
    crossed: set[str] = set()
    for pair in pairs:
        if max(pair) >= len(places):
            return ()
        for number, name in enumerate(sizes):
            if len({places[device][number] for device in pair}) > 1:
                crossed.add(name)
    return tuple(name for name in sizes if name in crossed)


def _along(axes: tuple[str, ...], sizes: Mapping[str, int]) -> Groups:
    """The groups of devices that differ only along these axes."""
    found: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        rest = tuple(at for name, at in zip(sizes, place, strict=True) if name not in axes)
        found.setdefault(rest, []).append(device)
    return tuple(map(tuple, found.values()))


def _lists(text: str) -> Groups:
    """`{{0,1},{2,3}}`."""
    return tuple(_ints(group) for group in re.findall(r"\{([\d,]+)\}", text.replace(" ", "")))


def _of_mesh(mesh: re.Match[str]) -> Groups:
    """`mesh['data'=2,'model'=4] {'model'}`, where an axis may be split: `'model':(2)2` is its second half."""
    named = re.findall(r"'([^']*)'=(\d+)", mesh[1])
    order = _iota(_ints(mesh[2]), _ints(mesh[3])) if mesh[2] else list(range(math.prod(int(n) for _, n in named)))
    wanted = {name: (int(before or 1), int(size or 0)) for name, before, size in _refs(mesh[4])}
    sizes: dict[str, int] = {}
    along: list[str] = []
    for name, size in ((name, int(size)) for name, size in named):
        before, part = wanted.get(name, (1, 1))
        part = part or size // before
        split = {f"{name}:0": before, f"{name}:1": part, f"{name}:2": size // before // part}
        sizes |= split
        along += [f"{name}:1"] if name in wanted else []
    return tuple(tuple(order[device] for device in group) for group in _along(tuple(along), sizes))


def _refs(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", text)


def _iota(shape: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """The numbers from 0 in this shape, its axes in another order, as one list."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axes = order or tuple(range(len(shape)))
    return [
        sum(at * strides[axis] for at, axis in zip(place, axes, strict=True))
        for place in itertools.product(*(range(shape[axis]) for axis in axes))
    ]


def _rows(numbers: list[int], length: int) -> Groups:
    return tuple(tuple(numbers[start : start + length]) for start in range(0, len(numbers), length))


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))
