"""Params that devices gather before a layer reads them: the layer reads the param, and not what a collective made.

The store of kind `sharded`, and FSDP by hand, keep a share of each param on each device, and pack small ones into a
bucket. Without this, a convolution would read a piece of a joined array, and would have no param, no name and no bias.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from .._read.raw import Eqn, Raw

# An array in row-major order: runs of elements, each with the param they are of, and how often all of them come again.
_Runs = list[tuple[int, int]]
_Flat = tuple[_Runs, int]

_KEEPS_ORDER = frozenset("reshape squeeze expand_dims copy copy_p convert_element_type stop_gradient".split())
_GATHERS = frozenset(("all_gather", "all_gather_invariant"))


def read_as_params(raw: Raw) -> None:
    """Make views of the equations that only gather, join and cut params, so that their readers read the params.

    A bucket of several params is no view of one. It vanishes where all that reads it is cut out of it again.
    """
    flats: dict[int, _Flat] = {}
    moves: list[Eqn] = []
    for eqn in raw.eqns:
        flat = None if eqn.backward or len(eqn.outs) != 1 else _flat_of(raw, eqn, flats)
        if flat is not None and eqn.outs[0] not in flats:
            flats[eqn.outs[0]] = flat
            moves.append(eqn)
    if not any(eqn.prim in _GATHERS for eqn in moves):
        return
    readers: dict[int, list[Eqn]] = {}
    for eqn in raw.eqns:
        for value in set(eqn.ins):
            readers.setdefault(value, []).append(eqn)
    only_cut = set[int]()  # the buckets of which every reader is a param, or such a bucket
    for eqn in reversed(moves):
        (out,) = eqn.outs
        ends = (reader.outs[0] for reader in readers.get(out, ()) if reader.outs)
        are_inside = all(end in flats and (_param_of(flats[end]) is not None or end in only_cut) for end in ends)
        if _param_of(flats[out]) is None and are_inside and out not in raw.outputs:
            only_cut.add(out)
    for eqn in moves:
        (out,) = eqn.outs
        param = _param_of(flats[out])
        if param is not None and all(value in only_cut or _is_of(raw, flats, value, param) for value in eqn.ins):
            eqn.view = True
            raw.show(out, param)
        elif out in only_cut:
            eqn.view, raw.values[out].kind = True, "const"
    for value in raw.values:  # what shows one of these shows its param
        value.root = value.root if value.shows is None else raw.values[value.shows].root


def _flat_of(raw: Raw, eqn: Eqn, flats: dict[int, _Flat]) -> _Flat | None:
    """The result of an equation that only moves elements of params. None for any other."""
    if eqn.prim != "concatenate" and len(eqn.ins) != 1:
        return None
    given = [_given(raw, flats, value, shape) for value, shape in zip(eqn.ins, eqn.in_shapes, strict=False)]
    known = [flat for flat in given if flat is not None]
    if len(known) < len(given) or not known:
        return None
    (runs, times), shape = known[0], eqn.in_shapes[0]
    one_param = _param_of(known[0])
    if eqn.prim in _KEEPS_ORDER:
        return runs, times
    if eqn.prim == "concatenate":
        # Along the first axis that is longer than 1, one array comes after the other.
        before = math.prod(shape[: eqn.params["dimension"]])
        return (_joined(run for runs, times in known for run in runs * times), 1) if before == 1 else None
    if eqn.prim in _GATHERS:
        at = eqn.params["all_gather_dimension"]
        first = math.prod(shape[:at]) == 1
        whole = eqn.params["axis_index_groups"] is None
        more = math.prod(eqn.out_shape) // max(1, math.prod(shape))
        return (runs, times * more) if whole and (first or one_param is not None) else None
    if eqn.prim == "slice":
        if one_param is not None:
            return [(one_param, math.prod(eqn.out_shape))], 1
        return _cut(runs, times, eqn)
    return None


def _given(raw: Raw, flats: dict[int, _Flat], value: int, shape: tuple[int, ...]) -> _Flat | None:
    """What an operand of this shape is: a param, also behind views, or what was made of params."""
    if value in flats:
        return flats[value]
    param = raw.weight_of(value)
    return ([(param, math.prod(shape))], 1) if param is not None else None


def _cut(runs: _Runs, times: int, eqn: Eqn) -> _Flat | None:
    """The same columns of each row, where a row is a share of a bucket."""
    *before, columns = eqn.in_shapes[0]
    start, stop = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(start)
    all_rows = list(start[:-1]) == [0] * len(before) and list(stop[:-1]) == before
    rows = math.prod(before)
    if set(steps) != {1} or not all_rows or rows == 0 or times % rows:
        return None
    row = runs * (times // rows)
    if sum(length for _, length in row) != columns:
        return None
    ends = list(itertools.accumulate((length for _, length in row), initial=0))
    pieces = [
        (param, min(end, stop[-1]) - max(begin, start[-1]))
        for (param, _), begin, end in zip(row, ends, ends[1:], strict=False)
        if min(end, stop[-1]) > max(begin, start[-1])
    ]
    return _joined(pieces), rows


def _joined(runs: Iterable[tuple[int, int]]) -> _Runs:
    """The same with neighbours of one param as one."""
    joined: _Runs = []
    for param, length in runs:
        if joined and joined[-1][0] == param:
            length += joined.pop()[1]
        joined.append((param, length))
    return joined


def _param_of(flat: _Flat) -> int | None:
    """The param that all elements are of. None for a bucket."""
    params = {param for param, _ in flat[0]}
    return params.pop() if len(params) == 1 else None


def _is_of(raw: Raw, flats: dict[int, _Flat], value: int, param: int) -> bool:
    """Whether a value is of this param alone."""
    return raw.weight_of(value) == param or (value in flats and _param_of(flats[value]) == param)
