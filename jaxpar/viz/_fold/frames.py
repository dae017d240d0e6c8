"""The calls around a cell, from the outside in."""

from __future__ import annotations

from .._graph import main_prefix
from .._read.source import Frame
from .cells import Cell, Cells


def frames_of(cells: Cells, cell: Cell, known: dict[int, tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """The calls that most of a cell's FLOPs are in, without those of JAX. `known` has them by place, and grows.

    The last one may be at several places of its function.
    """
    stacks: list[tuple[tuple[Frame, ...], int]] = []
    for eqn in cells.steps(cell):
        if eqn.position not in known:
            known[eqn.position] = plain_stack(eqn.stack)
        stacks.append((known[eqn.position], 1 + eqn.flops))
    keys = {stack: tuple(key for frame in stack for key in (frame.function, frame.call)) for stack, _ in stacks}
    shared = main_prefix((keys[stack], weight) for stack, weight in stacks)
    inside = next(stack for stack in keys if keys[stack][: len(shared)] == shared)
    return inside[: (len(shared) + 1) // 2]


def plain_stack(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """A stack without the frames of JAX, and with those once that a nested jaxpr repeats."""
    frames = [frame for frame in stack if frame.origin != "jax"]
    starts = [n for n, frame in enumerate(frames) if frame.function == frames[0].function] or [0]
    found: list[Frame] = []
    for start, end in zip(starts, [*starts[1:], len(frames)], strict=True):
        part = frames[start:end]
        same = len(_shared(tuple(found), tuple(part)))
        found += part[same:]
    return tuple(found)


def _shared(a: tuple[Frame, ...], b: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """What two stacks begin with. The last frame may be at two places of one function."""
    length = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x.call != y.call), min(len(a), len(b)))
    if length < min(len(a), len(b)) and a[length].function == b[length].function:
        length += 1
    return a[:length]
