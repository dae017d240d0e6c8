"""Equations that are no layers: views, constants, wrapped indices."""

from __future__ import annotations

import math

import numpy as np

from .raw import Eqn, Raw

_VIEWS = frozenset(
    "broadcast_in_dim convert_element_type squeeze expand_dims stop_gradient pvary pcast pbroadcast copy copy_p "
    "transpose optimization_barrier sharding_constraint reduce_precision device_put reshape mesh_cast reshard "
    "random_wrap random_unwrap".split()
)

# The operand of these with which nothing is computed, and its places. XLA drops such steps, and does not count them.
_NEUTRAL = {"add": (0, 0, 1), "add_any": (0, 0, 1), "sub": (0, 1), "mul": (1, 0, 1)}
_PICKS = frozenset("slice dynamic_slice gather unstack squeeze".split())


def mark_view(raw: Raw, eqn: Eqn) -> None:
    """Decide whether an equation is a view, and of which value. One without results shows none."""
    if not eqn.outs:
        return
    if eqn.prim in _NEUTRAL and _computes_nothing(raw, eqn):
        eqn.flops = 0
    if _is_view(raw, eqn):
        eqn.view = True
        for out in eqn.outs:
            raw.values[out].root = eqn.ins[0]
    elif (index := _wrapped_index(raw, eqn)) is not None:
        eqn.view = True
        eqn.flops *= 3  # the test and the sum that it picks from are not drawn
        raw.values[eqn.outs[0]].root = index
    elif _is_constant(raw, eqn):
        eqn.view = True
        for out in eqn.outs:
            raw.values[out].kind = "const"


def mark_constants(raw: Raw) -> None:
    """Mark equations of which all operands are constants by now."""
    for eqn in raw.eqns:
        if not eqn.view and eqn.ins and _is_constant(raw, eqn):
            eqn.view = True
            for out in eqn.outs:
                raw.values[out].kind = "const"


def _is_view(raw: Raw, eqn: Eqn) -> bool:
    if eqn.prim in _PICKS and raw.of(eqn.ins[0]).dtype.startswith("key<"):
        return True  # one of several random keys
    if eqn.prim == "slice" or eqn.prim == "dynamic_slice":
        return raw.weight_of(eqn.ins[0]) is not None and not eqn.backward
    if eqn.prim == "reduce_sum" and math.prod(eqn.in_shapes[0]) == math.prod(eqn.out_shape):
        return True  # over axes of length 1
    if eqn.prim not in _VIEWS or not eqn.ins:
        return False
    return eqn.prim != "reshape" or not _flattens(eqn)


def _computes_nothing(raw: Raw, eqn: Eqn) -> bool:
    """Whether it adds a literal 0, or multiplies by a literal 1."""
    neutral, *places = _NEUTRAL[eqn.prim]
    shown = [raw.of(eqn.ins[at]) for at in places]
    return any(v.kind == "literal" and np.ndim(v.literal) == 0 and bool(v.literal == neutral) for v in shown)


def _flattens(eqn: Eqn) -> bool:
    """Whether a reshape keeps the first axis and joins the others. A gradient splits them."""
    shape, new = (eqn.out_shape, eqn.in_shapes[0]) if eqn.backward else (eqn.in_shapes[0], eqn.out_shape)
    return len(shape) > 2 and len(new) == 2 and shape[0] == new[0] and sum(d != 1 for d in shape[1:]) > 1


def _is_constant(raw: Raw, eqn: Eqn) -> bool:
    """Whether all operands are constants: a mask, a scale. Random numbers and mesh positions do not count."""
    if eqn.backward or eqn.prim in ("cond", "axis_index") or eqn.prim.startswith("random"):
        return False
    return all(raw.of(value).kind in ("literal", "const") for value in eqn.ins)


def _wrapped_index(raw: Raw, eqn: Eqn) -> int | None:
    """The `i` of `select_n(i < 0, i, i + N)`, JAX's reading of negative indices."""
    if eqn.prim != "select_n" or len(eqn.ins) != 3:
        return None
    test, index, wrapped = (raw.root(value) for value in eqn.ins)
    below, added = raw.values[test].producer, raw.values[wrapped].producer
    if below is None or added is None:
        return None
    lt, add = raw.eqns[below], raw.eqns[added]
    same = lt.prim == "lt" and add.prim == "add" and raw.root(lt.ins[0]) == index == raw.root(add.ins[0])
    return eqn.ins[1] if same and raw.of(lt.ins[1]).kind == "literal" else None
