"""Which parameters a step trains: those whose gradient, or new value, depends on the backward pass.

A step may pack the gradients of several parameters into one array and share it among devices, so each element is
followed by itself.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .._read.costs import ELEMENTWISE
from .._read.raw import Eqn, Raw

# A level says what a value has to do with the backward pass: it is zeros, or does not depend on it, or depends on it.
# It is one number for a whole value, or an array (devices, *shape), with one device where all have the same.
_ZEROS, _FREE, _DEPENDS = range(3)
_Level = Any


def trained(raw: Raw, params: set[int]) -> set[int]:
    """The parameters whose results depend on the backward pass. All of them where there is none."""
    if not any(eqn.backward for eqn in raw.eqns):
        return params
    ends = defaultdict[str, list[int]](list)  # the results by each ending of their names
    for name, value in zip(raw.output_names, raw.outputs, strict=True):
        for at in range(len(name) + 1):
            ends[name[at:]].append(value)
    results = {weight: _results(raw, ends, weight) for weight in params}
    if not any(results.values()):  # the gradients stay inside
        return params
    found = _levels(raw, {})
    # A new value may depend on what the step handed on to itself, such as the pending gradients of dist_async.
    others = {n: _results(raw, ends, n) for n, v in enumerate(raw.values) if v.argument and n not in params}
    levels = {n: [_any_device(_level(raw, found, value)) for value in values] for n, values in others.items()}
    found = _levels(raw, {n: functools.reduce(np.maximum, of_each, _FREE) for n, of_each in levels.items()})
    return {weight for weight in params if any(np.max(_level(raw, found, n)) == _DEPENDS for n in results[weight])}


def _levels(raw: Raw, found: dict[int, _Level]) -> dict[int, _Level]:
    """The level of what each equation computes, added to those of arguments."""
    for eqn in raw.eqns:
        reads = any(raw.of(value).kind not in ("literal", "const") for value in eqn.ins)
        for number, out in enumerate(eqn.outs):
            own = _alone(raw, eqn, number)
            level = _through(own, [_level(raw, found, value) for value in own.ins])
            found[out] = _DEPENDS if eqn.backward and reads else level
    return found


def _any_device(level: _Level) -> _Level:
    return level.max(0, keepdims=True) if isinstance(level, np.ndarray) else level


def _alone(raw: Raw, eqn: Eqn, number: int) -> Eqn:
    """The equation as one that computes a single one of its results."""
    if eqn.prim == "cond":
        return replace(eqn, ins=eqn.ins[1 + number :: len(eqn.outs)])
    if eqn.prim != "split":
        return eqn
    axis, sizes, shape = eqn.params["axis"], eqn.params["sizes"], raw.values[eqn.outs[number]].shape
    start = tuple(sum(sizes[:number]) if n == axis else 0 for n in range(len(shape)))
    stop = tuple(map(sum, zip(start, shape, strict=True)))
    params = {"start_indices": start, "limit_indices": stop, "strides": None}
    return replace(eqn, prim="slice", params=params, out_shape=shape)


def _results(raw: Raw, ends: Mapping[str, list[int]], number: int) -> list[int]:
    """The results that have the path and the shape of an argument: its gradient, or its new value."""
    value = raw.values[number]
    found = ends.get(value.name.removeprefix(value.argument), ())
    return [result for result in found if raw.values[result].shape == value.shape]


def _level(raw: Raw, found: dict[int, _Level], number: int) -> _Level:
    """The level of a value. An argument or a result of a call has that of what it shows, of which it may be a part."""
    value = raw.values[number]
    if number not in found and value.root != number:
        level = _level(raw, found, value.root)
        return level if raw.values[value.root].shape == value.shape else int(np.max(level))
    return found.get(number, _ZEROS if value.kind == "literal" and not np.any(value.literal) else _FREE)


def _through(eqn: Eqn, ins: list[_Level]) -> _Level:
    """The level of what an equation computes, unless it is of the backward pass."""
    counts = {len(level) for level in ins if isinstance(level, np.ndarray)}
    if len(counts - {1}) > 1:  # along several axes of a mesh
        ins, counts = list(map(_any_device, ins)), {1}
    read = ins if eqn.prim == "concatenate" else ins[:1]  # not the places of a slice
    pairs = [(level, s) for level, s in zip(read, eqn.in_shapes, strict=False) if math.prod(s)]
    if eqn.prim in _MOVES and pairs and math.prod(eqn.out_shape):
        if not counts and len({level for level, _ in pairs}) == 1:
            return pairs[0][0]
        whole = [np.broadcast_to(np.int8(level), (max(counts, default=1), *shape)) for level, shape in pairs]
        level = _MOVES[eqn.prim](eqn, *whole).reshape(-1, *eqn.out_shape)
    elif eqn.prim in _ELEMENTWISE and len(eqn.outs) == 1:
        if eqn.prim == "select_n" and eqn.out_shape and not eqn.in_shapes[0]:
            ins = ins[1:]  # whether an update is made, as after an overflow, is no matter of one parameter
        level = functools.reduce(np.maximum, ins)
        if eqn.prim in _FACTORS:
            level = level * (_FACTORS[eqn.prim](*ins) != _ZEROS)
        level = level if eqn.prim in _LINEAR else np.maximum(level, _FREE)
    else:
        level = max([_FREE, *map(np.max, ins)])
    is_one = not isinstance(level, np.ndarray) or not eqn.out_shape or level.min() == level.max()
    return int(np.max(level)) if is_one else level


_LINEAR = frozenset(
    "add add_any sub neg mul div select_n convert_element_type pvary pcast copy device_put sharding_constraint".split()
)
_ELEMENTWISE = ELEMENTWISE | _LINEAR | frozenset("sqrt rsqrt pow integer_pow".split())
_FACTORS = {  # what makes the result zeros
    "mul": np.minimum,
    "div": lambda a, b: a,
    "select_n": lambda which, *cases: functools.reduce(np.maximum, cases),
}


def _slice(eqn: Eqn, x: np.ndarray) -> np.ndarray:
    start, stop, step = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    return x[(slice(None), *map(slice, start, stop, step or (1,) * len(start)))]


def _pad(eqn: Eqn, x: np.ndarray) -> np.ndarray:
    """Padding as what it is beside."""
    padding = zip(eqn.out_shape, x.shape[1:], eqn.params["padding_config"], strict=True)
    places = [np.clip((np.arange(new) - low) // (1 + inside), 0, old - 1) for new, old, (low, _, inside) in padding]
    return x[np.ix_(range(len(x)), *places)]


def _dynamic_slice(eqn: Eqn, x: np.ndarray) -> np.ndarray:
    """Any slice of this size."""
    cut = tuple(axis for axis, size in enumerate(eqn.out_shape, 1) if size != x.shape[axis])
    return np.broadcast_to(x.max(cut, keepdims=True), (len(x), *eqn.out_shape))


def _broadcast(eqn: Eqn, x: np.ndarray) -> np.ndarray:
    sizes = dict(zip(eqn.params["broadcast_dimensions"], x.shape[1:], strict=True))
    x = x.reshape(len(x), *(sizes.get(axis, 1) for axis in range(len(eqn.out_shape))))
    return np.broadcast_to(x, (len(x), *eqn.out_shape))


def _on_each(eqn: Eqn, x: np.ndarray) -> list[np.ndarray]:
    """What each device of a collective has."""
    count = eqn.params["axis_size"]
    return list(np.broadcast_to(x if len(x) == count else x.max(0), (count, *x.shape[1:])))


def _gather(eqn: Eqn, x: np.ndarray) -> np.ndarray:
    join = np.concatenate if eqn.params["tiled"] else np.stack
    return join(_on_each(eqn, x), eqn.params["all_gather_dimension"])


def _scatter(eqn: Eqn, x: np.ndarray) -> np.ndarray:
    return np.stack(np.split(x.max(0), eqn.params["axis_size"], eqn.params["scatter_dimension"]))


def _exchange(eqn: Eqn, x: np.ndarray) -> np.ndarray:
    devices = _on_each(eqn, x)
    sent = [np.split(own, len(devices), eqn.params["split_axis"]) for own in devices]
    return np.stack([np.concatenate(got, eqn.params["concat_axis"]) for got in zip(*sent, strict=True)])


_MOVES: dict[str, Callable[..., np.ndarray]] = {
    "concatenate": lambda eqn, *parts: np.concatenate(parts, 1 + eqn.params["dimension"]),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), lambda eqn, x: x),
    "transpose": lambda eqn, x: x.transpose(0, *(1 + axis for axis in eqn.params["permutation"])),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "reduce_sum": lambda eqn, x: x.max(tuple(1 + axis for axis in eqn.params["axes"])),
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin", "ppermute"), lambda eqn, x: x.max(0)),
    "all_gather": _gather,
    "all_gather_invariant": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
}
