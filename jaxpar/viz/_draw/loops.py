"""What is handed from one pass of a loop to the next, as few arrows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .._graph import Edge


def join_carries(edges: Iterable[Edge]) -> list[Edge]:
    """Edges as they are drawn: one arrow back from a layer to each that reads it in the next pass.

    What a layer hands to itself goes with an arrow back to a layer before it, where there is one. So the recurrence of
    an LSTM, a hidden state and a cell, is one arrow. A layer that hands on to itself only keeps its own.

    >>> cell = [Edge("dense", "gates"), Edge("gates", "dense", carry=True), Edge("gates", "gates", carry=True)]
    >>> [(edge.source, edge.target, edge.arrays) for edge in join_carries(cell) if edge.carry]
    [('gates', 'dense', 2)]
    """
    edges = list(edges)
    arrows: dict[tuple[str, str], Edge] = {}
    for edge in edges:
        if edge.carry:
            known = arrows.get((edge.source, edge.target))
            together = known.arrays + edge.arrays if known is not None else edge.arrays
            arrows[edge.source, edge.target] = replace(known or edge, arrays=together)
    for source, target in [ends for ends in arrows if ends[0] == ends[1]]:
        outer = next(
            (ends for ends in arrows if ends[0] == source != ends[1] and _reaches(edges, ends[1], source)), None
        )
        if outer is not None:
            arrows[outer] = replace(arrows[outer], arrays=arrows[outer].arrays + arrows.pop((source, target)).arrays)
    return [*(edge for edge in edges if not edge.carry), *arrows.values()]


def carry_label(edge: Edge) -> str:
    """What is written beside an arrow back."""
    return "carry" if edge.arrays == 1 else f"carry, {edge.arrays} arrays"


def _reaches(edges: list[Edge], start: str, end: str) -> bool:
    """Whether a way forward leads from a layer to another."""
    readers: dict[str, list[str]] = {}
    for edge in edges:
        if not edge.carry:
            readers.setdefault(edge.source, []).append(edge.target)
    seen, work = {start}, [start]
    while work:
        new = set(readers.get(work.pop(), ())) - seen
        seen |= new
        work += new
    return end in seen
