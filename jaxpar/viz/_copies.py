"""Params that `jax.pmap` is given as a stack, a copy for each of its devices. What counts are those of one device."""

from __future__ import annotations

from ._read.raw import Raw

_GATHERS = frozenset("all_gather all_gather_invariant all_to_all ragged_all_to_all ppermute".split())
_MOVES = frozenset("concatenate pad slice reshape".split())  # those that are no views


def count_copies(raw: Raw) -> None:
    """Count the params of one device, and note on how many devices they are.

    Nothing is changed where that cannot be said of all params: where some are read elsewhere, or where devices send
    each other what they have, which are shares of a param then.
    """
    scopes = {eqn.scope for eqn in raw.eqns}
    if not any(part.startswith("pmap ") for scope in scopes for part in scope):
        return
    copies: dict[int, int] = {}  # of each param that is a stack
    elsewhere, moved = set[int](), dict[int, set[int]]()
    for eqn in raw.eqns:
        params = {value: root for value in eqn.ins if (root := raw.weight_of(value)) is not None}
        read = set(params.values()).union(*(moved.get(raw.root(value), ()) for value in eqn.ins))
        if eqn.prim in _GATHERS and read:
            return
        if eqn.prim in _MOVES:
            moved |= dict.fromkeys(eqn.outs, read)
        if any(part.startswith("pmap ") for part in eqn.scope):
            copies |= {root: count for value, root in params.items() if (count := _copies(raw, value)) > 1}
        else:
            elsewhere |= read
    counts = set(copies.values())
    if len(counts) == 1 and elsewhere <= copies.keys():
        (raw.copies,) = counts
        for root in copies:
            value = raw.values[root]
            value.padding = value.elements - value.elements // raw.copies


def _copies(raw: Raw, value: int) -> int:
    """How many copies the array has that a value is one of, on a device of a `pmap`."""
    for inside in raw.shown(value):
        part, shows = raw.values[inside], raw.values[inside].shows
        if part.crosses == -1 and shows is not None and len(part.shape) == len(whole := raw.values[shows].shape):
            differing = [pair for pair in zip(part.shape, whole, strict=True) if pair[0] != pair[1]]
            if len(differing) == 1 and differing[0][0] == 1:
                return differing[0][1]
    return 1
