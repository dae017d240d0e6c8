"""Which devices exchange something in a collective, and along which axes of a mesh they are.

XLA writes them in four forms: as lists, as rows of numbers that count up, as axes of a mesh, and of a permutation as
pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from .proto import Message, inner, integer, integers, nested

Groups = tuple[tuple[int, ...], ...]

# Fields of HloInstructionProto, see `proto`. The first one is the form of earlier releases.
_GROUPS, _PAIRS, _LISTS, _ROWS, _AXES = 49, 52, 87, 92, 93
_KNOWN = 103  # the last field that is known here. A later one may be another form.


def read_groups(fields: Message, name: str) -> Groups:
    """The groups of devices of a collective: of a permutation each (source, target). Empty for one of all devices."""
    if pairs := tuple((integer(pair, 1), integer(pair, 2)) for pair in nested(fields, _PAIRS)):
        return pairs
    if axes := inner(fields, _AXES):
        return _of_mesh(axes)
    if rows := inner(fields, _ROWS):
        return _rows(_iota(integers(rows, 3), integers(rows, 4)), integer(rows, 2))
    lists = list(nested(inner(fields, _LISTS), 1)) or nested(fields, _GROUPS)
    if groups := tuple(tuple(integers(group, 1)) for group in lists):
        return groups
    if unknown := [number for number in fields if number > _KNOWN]:
        raise ValueError(f"viz: the devices of {name} may be in a form that is not known here, field {unknown[0]}")
    return ()


def _of_mesh(fields: Message) -> Groups:
    """Along axes of a mesh, of which each may be a part of an axis: the numbers before it, and its size."""
    mesh = inner(fields, 1)
    named = [integer(axis, 2) for axis in nested(mesh, 1)]
    transform = inner(mesh, 3)
    order = integers(mesh, 2) or _iota(integers(transform, 1) or named, integers(transform, 2)).ravel().tolist()
    parts = {integer(axis, 1): inner(axis, 2) for axis in nested(fields, 2)}
    sizes: dict[str, int] = {}
    for at, size in enumerate(named):
        before = integer(parts.get(at, {}), 1) or 1
        length = integer(parts.get(at, {}), 2) or size // before
        sizes |= {f"{at}:before": before, f"{at}:along": length, f"{at}:behind": size // before // length}
    along = tuple(f"{at}:along" for at in parts)
    return tuple(tuple(order[device] for device in group) for group in _along(along, sizes))


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
    if max(map(max, pairs), default=0) >= math.prod(sizes.values()):
        return ()
    places = np.unravel_index(np.array(pairs, int).reshape(-1, 2), tuple(sizes.values()))
    return tuple(name for name, at in zip(sizes, places, strict=True) if np.any(at[:, 0] != at[:, 1]))


def _along(axes: tuple[str, ...], sizes: Mapping[str, int]) -> Groups:
    """The groups of devices that differ only along these axes."""
    order = sorted(range(len(sizes)), key=lambda at: list(sizes)[at] in axes)
    return _rows(_iota(tuple(sizes.values()), order), math.prod(sizes[name] for name in axes))


def _iota(shape: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """The numbers from 0 in this shape, its axes in another order. As they are without one."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(order) if order else numbers


def _rows(numbers: np.ndarray, length: int) -> Groups:
    return tuple(map(tuple, numbers.reshape(-1, length).tolist()))
