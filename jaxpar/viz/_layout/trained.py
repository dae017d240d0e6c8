"""Which parameters a step trains: those whose gradient, or new value, depends on the backward pass.

A step may pack the gradients of several parameters into one array and share it among devices, so each element is
followed by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .._read.costs import ELEMENTWISE
from .._read.raw import Eqn, Raw

# A level says what a value has to do with the backward pass: it is zeros, or does not depend on it, or depends on it.
# It is one number for a whole value, or an array (devices, *shape), with one device where all have the same.
_ZEROS, _FREE, _DEPENDS = map(np.int8, range(3))
_Level = Any


def trained(raw: Raw, params: set[int]) -> set[int]:
    """The parameters whose results depend on the backward pass. All of them where there is none."""
    if not any(eqn.backward for eqn in raw.eqns):
        return params
    names = dict(zip(raw.output_names, raw.outputs, strict=True))
    results = {weight: _results(raw, names, weight) for weight in params}
    if not any(results.values()):  # the gradients stay inside
        return params
    found = _levels(raw, {})
    # A new value may depend on what the step handed on to itself, such as the pending gradients of dist_async.
    others = [n for n, value in enumerate(raw.values) if value.argument and n not in params]
    handed_on = {n: _DEPENDS for n in others if _depends(raw, found, _results(raw, names, n))}
    found = _levels(raw, handed_on) if handed_on else found
    return {weight for weight in params if _depends(raw, found, results[weight])}


def _depends(raw: Raw, found: dict[int, _Level], values: list[int]) -> bool:
    return any(np.max(_level(raw, found, value)) == _DEPENDS for value in values)


def _levels(raw: Raw, found: dict[int, _Level]) -> dict[int, _Level]:
    """The level of what each equation computes, added to those of arguments."""
    for eqn in raw.eqns:
        reads = any(raw.of(value).kind not in ("literal", "const") for value in eqn.ins)
        for number, out in enumerate(eqn.outs):
            ins = eqn.ins[1 + number :: len(eqn.outs)] if eqn.prim == "cond" else eqn.ins
            level = _through(eqn, [_level(raw, found, value) for value in ins])
            found[out] = _DEPENDS if eqn.backward and reads else level
    return found


def _results(raw: Raw, names: dict[str, int], weight: int) -> list[int]:
    """The results that have the path and the shape of a parameter: its gradient, or its new value."""
    value = raw.values[weight]
    tail = value.name.removeprefix(value.argument)
    return [n for name, n in names.items() if name.endswith(tail) and raw.values[n].shape == value.shape]


def _level(raw: Raw, found: dict[int, _Level], number: int) -> _Level:
    """The level of a value. An argument or a result of a call has that of what it shows, of which it may be a part."""
    value = raw.values[number]
    if number not in found and value.root != number:
        level = _level(raw, found, value.root)
        return level if raw.values[value.root].shape == value.shape else np.max(level)
    return found.get(number, _ZEROS if value.kind == "literal" and not np.any(value.literal) else _FREE)


def _through(eqn: Eqn, ins: list[_Level]) -> _Level:
    """The level of what an equation computes, unless it is of the backward pass."""
    if len({len(level) for level in ins if np.ndim(level)} - {1}) > 1:  # along several axes of a mesh
        ins = list(map(np.max, ins))
    if eqn.prim in _MOVES and all(map(math.prod, (*eqn.in_shapes, eqn.out_shape))):
        ins = ins if eqn.prim == "concatenate" else ins[:1]
        if not any(map(np.ndim, ins)) and len(set(ins)) == 1:
            return ins[0]
        count = max(len(level) if np.ndim(level) else 1 for level in ins)
        whole = [np.broadcast_to(level, (count, *shape)) for level, shape in zip(ins, eqn.in_shapes, strict=False)]
        level = _MOVES[eqn.prim](eqn, *whole).reshape(-1, *eqn.out_shape)
    elif eqn.prim in _ELEMENTWISE and len(eqn.outs) == 1:
        if eqn.prim == "select_n" and not eqn.in_shapes[0]:
            ins = ins[1:]  # which of two updates is made, such as none after an overflow, is no matter of one parameter
        level = functools.reduce(np.maximum, ins)
        if eqn.prim in _FACTORS:
            level = level * (_FACTORS[eqn.prim](*ins) != _ZEROS)
        level = level if eqn.prim in _LINEAR else np.maximum(level, _FREE)
    else:
        level = max([_FREE, *map(np.max, ins)])
    return np.max(level) if not eqn.out_shape or np.min(level) == np.max(level) else level


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
    "reshape": lambda eqn, x: x,
    "squeeze": lambda eqn, x: x,
    "expand_dims": lambda eqn, x: x,
    "transpose": lambda eqn, x: x.transpose(0, *(1 + axis for axis in eqn.params["permutation"])),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "reduce_sum": lambda eqn, x: x.max(tuple(1 + axis for axis in eqn.params["axes"])),
    "psum": lambda eqn, x: x.max(0),
    "psum_invariant": lambda eqn, x: x.max(0),
    "all_gather": _gather,
    "all_gather_invariant": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
}
