"""Searches in a graph of numbers: what is reached, an order, what is connected, and what reads itself.

A graph is a mapping from each number to those that it reads, or to those that read it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def reach(starts: Iterable[T], wires: Mapping[T, Iterable[T]]) -> set[T]:
    """These numbers, and all that a way leads to from them.

    >>> sorted(reach([1], {1: [2], 2: [3], 4: [1]}))
    [1, 2, 3]
    """
    reached = set(starts)
    work = list(reached)
    while work:
        new = set(wires.get(work.pop(), ())) - reached
        reached |= new
        work += new
    return reached


def readers(sources: Mapping[T, Iterable[T]]) -> dict[T, list[T]]:
    """What reads each number.

    >>> readers({1: [2], 3: [2, 1]})
    {2: [1, 3], 1: [3]}
    """
    readers_of: dict[T, list[T]] = {}
    for number, read in sources.items():
        for source in read:
            readers_of.setdefault(source, []).append(number)
    return readers_of


def order(sources: Mapping[int, Collection[int]], rank: Callable[[int], int]) -> list[int]:
    """The numbers after all that they read, the lowest rank first. A circle begins with its lowest rank.

    All that are read have an entry in `sources`.

    >>> order({1: [3], 2: [], 3: []}, rank=lambda number: number), order({1: [2], 2: [1]}, rank=lambda number: number)
    ([2, 3, 1], [1, 2])
    """
    waiting = {number: len(read) for number, read in sources.items()}
    readers_of, later = readers(sources), iter(sorted(sources, key=rank))
    ready = [(rank(number), number) for number, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    ordered: dict[int, None] = {}
    while len(ordered) < len(waiting):
        number = heapq.heappop(ready)[1] if ready else next(number for number in later if number not in ordered)
        if number in ordered:  # the first of a circle, which is ready once more
            continue
        ordered[number] = None
        for reader in readers_of.get(number, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, (rank(reader), reader))
    return list(ordered)


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
    groups: dict[int, list[int]] = {}
    for number in group:
        groups.setdefault(find(number), []).append(number)
    return list(groups.values())


def circles(sources: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Sets of two numbers or more that reach each other. All that are read have an entry in `sources`.

    >>> [sorted(circle) for circle in circles({1: [2], 2: [3], 3: [2], 4: [1]})]
    [[2, 3]]
    """
    readers_of, ended = readers(sources), dict[int, None]()  # in the order in which depth-first searches leave them
    for root in sources:
        way, met = [(root, iter(sources[root]))] if root not in ended else [], {root}
        while way:
            number, sources_left = way[-1]
            new = next((other for other in sources_left if other not in ended and other not in met), None)
            if new is None:
                ended[way.pop()[0]] = None
            else:
                way.append((new, iter(sources[new])))
                met.add(new)
    components: list[list[int]] = []
    while ended:  # what reaches the last one of those that are left (Kosaraju 1978)
        circle, work = list[int](), [next(reversed(ended))]
        while work:
            if (number := work.pop()) in ended:
                del ended[number]
                circle.append(number)
                work += readers_of.get(number, ())
        if len(circle) > 1:
            components.append(circle)
    return components
