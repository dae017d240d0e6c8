"""Which server holds what."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from .._core import checks
from .._core.calls import answers

Shape = tuple[int, ...]

SPLIT = 1_000_000
"""Values of this many elements or more are cut over all servers. MXNet's MXNET_KVSTORE_BIGARRAY_BOUND has the same."""

_MOST_SERVERS = 2**16


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a value that one server holds.

    Attributes:
        key: of the value.
        start, stop: the elements, in the flat value.
    """

    key: int
    start: int
    stop: int


@answers("free_running.placement")
def placement(shapes: Sequence[Shape], servers: int, split: int = SPLIT) -> tuple[tuple[Piece, ...], ...]:
    """The pieces that each server holds, by MXNet's rule.

    Args:
        shapes: of the values of keys 0, 1, ...
        servers: how many, at least 1.
        split: values of this many elements or more are cut evenly over all servers. A smaller one is whole on server
            `key * 9973 % servers`.

    Returns:
        The pieces of each server, by ascending key. Every element of every value is in exactly one.

    Example:
        >>> placement([(3,), (2, 2)], servers=2, split=4)
        ((Piece(key=0, start=0, stop=3), Piece(key=1, start=0, stop=2)), (Piece(key=1, start=2, stop=4),))
    """
    checks.whole_number(servers, "free_running.placement", "servers", most=_MOST_SERVERS)
    checks.whole_number(split, "free_running.placement", "split", least=0)
    held: list[list[Piece]] = [[] for _ in range(servers)]
    for key, shape in enumerate(shapes):
        size = math.prod(shape)
        if servers == 1 or size < split:
            held[key * 9973 % servers].append(Piece(key, 0, size))
            continue
        ends = [size * i // servers for i in range(servers + 1)]
        for pieces, (start, stop) in zip(held, itertools.pairwise(ends), strict=True):
            if stop > start:
                pieces.append(Piece(key, start, stop))
    return tuple(map(tuple, held))


def cut(value: np.ndarray, piece: Piece) -> np.ndarray:
    """The piece of a value, flat. A whole value keeps its shape, since an updater may depend on it."""
    is_whole = piece.stop - piece.start == value.size
    return value if is_whole else value.reshape(-1)[piece.start : piece.stop]
