"""Cut a sequence of items into nested parts with one way in and one way out.

The items are in an order in which they can be computed. Where only one value is needed on both sides of a place, the
sequence is cut there: that value dominates all that follows. What a part does beside each other is divided again.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import TypeAlias

from .._circles import connected
from .items import Item

Part: TypeAlias = "int | list[Part]"  # the number of an item, or a region
_LEAST_CUT = 0.95  # of all items, in the largest section
_NAMED = 3  # groups of one name, from which names tell more than edges
_WORDS = re.compile(r"[A-Za-z]+|\d+")
_Wires = list[set[int]]  # the items that each one reads


def divide(items: list[Item], wires: _Wires, most: int) -> list[Part]:
    """Nested parts of all items, at most about `most` on each level."""
    return _Divider(items, wires, most).divide(list(range(len(items))))


class _Divider:
    def __init__(self, items: list[Item], wires: _Wires, most: int) -> None:
        self.items = items
        self.wires = wires
        self.most = max(2, most)
        self.words = [tuple(_WORDS.findall("/".join(item.path))) for item in items]

    def divide(self, numbers: list[int]) -> list[Part]:
        """The parts of these items."""
        if len(numbers) <= self.most:
            return list(numbers)
        sections = self._sections(numbers)
        return self._divide_block(numbers) if len(sections) == 1 else self._divide_row(sections)

    def _divide_row(self, sections: list[list[int]]) -> list[Part]:
        """The parts of sections that follow each other."""
        parts = self._join_runs(self._with_activations(sections))
        return self.coarsen(parts) if len(parts) > 1 else self._inner(parts[0])

    def _inner(self, part: Part) -> list[Part]:
        return [part] if isinstance(part, int) else part

    def _divide_block(self, numbers: list[int]) -> list[Part]:
        """The parts between the only way in and the only way out: its branches, or else the sections inside."""
        if len(numbers) <= self.most:
            return list(numbers)
        inside, join = numbers[:-1], numbers[-1]
        branches = self._components(inside)
        if len(branches) > 1:
            parts: list[Part] = [branch[0] if len(branch) == 1 else self.divide(branch) for branch in branches]
            return self.coarsen([*parts, join])
        if len(self._by_names([*numbers]) or ()) < _NAMED:
            if len(sections := self._sections(inside)) > 1:
                return [*self._divide_row(sections), join]
            if len(sections := self._sections(numbers, ignore_far=True)) > 1:
                return self._divide_row(sections)
        return self.coarsen([*numbers])

    def _sections(self, numbers: list[int], ignore_far: bool = False) -> list[list[int]]:
        """The items, cut where at most one value crosses. One section, if next to nothing can be cut off.

        Args:
            numbers: of the items.
            ignore_far: do not count values that items in more than half of the row read, such as a mask.
        """
        place = {number: at for at, number in enumerate(numbers)}
        last, readers = [-1] * len(numbers), [0] * len(numbers)
        for at, number in enumerate(numbers):
            for source in self.wires[number]:
                if source in place:
                    last[place[source]] = at
                    readers[place[source]] += 1
        change = [0] * (len(numbers) + 1)
        for at, end in enumerate(last):
            far = ignore_far and readers[at] > 2 and 2 * (end - at) > len(numbers)
            if end > at and not far:
                change[at] += 1
                change[end] -= 1
        crossing = list(itertools.accumulate(change))
        sections: list[list[int]] = [[]]
        for at, number in enumerate(numbers):
            sections[-1].append(number)
            if crossing[at] <= 1 and at + 1 < len(numbers):
                sections.append([])
        useful = max(map(len, sections)) <= _LEAST_CUT * len(numbers)
        return sections if useful else [numbers]

    def _components(self, numbers: list[int]) -> list[list[int]]:
        """The items as sets that no edge joins."""
        inside = set(numbers)
        return connected(numbers, ((n, source) for n in numbers for source in self.wires[n] if source in inside))

    def _with_activations(self, sections: list[list[int]]) -> list[list[int]]:
        """An activation right after branches meet is part of their block."""
        found: list[list[int]] = []
        for section in sections:
            alone = len(section) == 1 and self.items[section[0]].kind == "Activation"
            if alone and found and len(found[-1]) > 1:
                found[-1].append(section[0])
            else:
                found.append(section)
        return found

    def _join_runs(self, sections: list[list[int]]) -> list[Part]:
        """Blocks, and what is in a row between two blocks as one part."""
        if all(len(section) == 1 for section in sections):
            return [part for section in sections for part in section]
        parts: list[Part] = []
        for single, group in itertools.groupby(sections, lambda section: len(section) == 1):
            group = list(group)
            if not single:
                parts += [self._divide_block(section) for section in group]
            elif len(group) == 1:
                parts.append(group[0][0])
            else:
                parts.append(self.coarsen([section[0] for section in group]))
        return parts

    def coarsen(self, parts: list[Part]) -> list[Part]:
        """At most `most` parts: grouped by their names, else by their shapes, else by their number."""
        if len(parts) <= self.most:
            return parts
        groups = self._by_names(parts) or self._by(parts, [self._shape(part) for part in parts]) or self._evenly(parts)
        return [group[0] if len(group) == 1 else self._again(group) for group in groups]

    def _again(self, parts: list[Part]) -> list[Part]:
        numbers = [part for part in parts if isinstance(part, int)]
        return self.divide(numbers) if len(numbers) == len(parts) else self.coarsen(parts)

    def _by_names(self, parts: list[Part]) -> list[list[Part]] | None:
        """Neighbours whose parameters begin with the same words. The longest names that are few enough."""
        best, words = None, [self._words(part) for part in parts]
        for length in range(1, 1 + min(6, max(map(len, words), default=0))):
            groups = self._by(parts, [found[:length] or None for found in words])
            if groups is not None:
                best = groups
        return best

    def _by(self, parts: list[Part], keys: Sequence[object]) -> list[list[Part]] | None:
        """Neighbours with the same key. None if that is no help.

        An item without a key goes with those before it, but not with a region.
        """
        groups: list[list[Part]] = []
        last: object = None
        for part, new in zip(parts, keys, strict=True):
            if new is None and groups and not isinstance(groups[-1][-1], int):
                new = "after a region"
            if groups and (new is None or last is None or new == last):
                groups[-1].append(part)
            else:
                groups.append([part])
            last = last if new is None else new
        return groups if 1 < len(groups) <= self.most else None

    def _evenly(self, parts: list[Part]) -> list[list[Part]]:
        levels = math.ceil(math.log(len(parts)) / math.log(self.most))
        count = math.ceil(len(parts) ** (1 / levels))
        cuts = [part * len(parts) // count for part in range(count + 1)]
        return [parts[start:end] for start, end in itertools.pairwise(cuts)]

    def _words(self, part: Part) -> tuple[str, ...]:
        """The words and numbers of the first name in a part: ("conv", "2", "block", "1")."""
        return next((words for number in _numbers(part) if (words := self.words[number])), ())

    def _shape(self, part: Part) -> object:
        *_, end = _numbers(part)
        return self.items[end].shape


def _numbers(part: Part) -> list[int]:
    if isinstance(part, int):
        return [part]
    return [number for inner in part for number in _numbers(inner)]
