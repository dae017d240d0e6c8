"""Parts of a graph of numbers: what is connected, and what reads itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field


def connected(numbers: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """These numbers as sets that no edge joins, each in the given order.

    >>> connected([3, 1, 2, 4], [(1, 4), (2, 3)])
    [[3, 2], [1, 4]]
    """
    group = {number: number for number in numbers}

    def find(number: int) -> int:
        while group[number] != number:
            group[number] = group[group[number]]
            number = group[number]
        return number

    for a, b in edges:
        group[find(a)] = find(b)
    found: dict[int, list[int]] = {}
    for number in group:
        found.setdefault(find(number), []).append(number)
    return list(found.values())


def circles(sources: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Sets of two numbers or more that reach each other.

    Args:
        sources: what each number reads. All that are read have an entry.

    >>> [sorted(circle) for circle in circles({1: [2], 2: [3], 3: [2], 4: [1]})]
    [[2, 3]]
    """
    search = _Search(sources)
    for root in sources:
        search.visit(root)
    return search.found


@dataclass(slots=True)
class _Search:
    """Strongly connected components of two numbers or more (Tarjan 1972), without recursion.

    Attributes:
        sources: what each number reads.
        order: when each number was met.
        low: the earliest number on the stack that each one reaches.
        stack: numbers whose component is not complete.
    """

    sources: Mapping[int, Collection[int]]
    order: dict[int, int] = field(default_factory=dict)
    low: dict[int, int] = field(default_factory=dict)
    stack: dict[int, None] = field(default_factory=dict)
    found: list[list[int]] = field(default_factory=list)

    def visit(self, root: int) -> None:
        """Search everything that a number reaches."""
        work: list[tuple[int, Iterator[int]]] = []
        new: int | None = None if root in self.order else root
        while new is not None or work:
            if new is not None:
                self.order[new] = self.low[new] = len(self.order)
                self.stack[new] = None
                work.append((new, iter(self.sources[new])))
            number, rest = work[-1]
            new = self._next(number, rest)
            if new is None:
                work.pop()
                self._finish(number, work[-1][0] if work else None)

    def _next(self, number: int, rest: Iterator[int]) -> int | None:
        """The next source that was not met before."""
        for other in rest:
            if other not in self.order:
                return other
            if other in self.stack:
                self.low[number] = min(self.low[number], self.order[other])
        return None

    def _finish(self, number: int, parent: int | None) -> None:
        """Hand what a number reaches to its parent. Take its component off the stack where it is the first."""
        if parent is not None:
            self.low[parent] = min(self.low[parent], self.low[number])
        if self.low[number] == self.order[number]:
            component: list[int] = []
            while not component or component[-1] != number:
                component.append(self.stack.popitem()[0])
            if len(component) > 1:
                self.found.append(component)
