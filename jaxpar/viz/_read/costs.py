"""FLOPs of an equation, as XLA's cost analysis counts them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

_Params = dict[str, Any]
_Avals = Sequence[Any]  # what has a shape and a dtype

_ELEMENTWISE = frozenset(
    "add add_any sub mul div neg abs sign max min floor ceil round is_finite eq ne lt le gt ge and or xor not "
    "select_n clamp square convert_element_type nextafter rem population_count clz real imag complex conj shift_left "
    "shift_right_logical shift_right_arithmetic eq_to le_to lt_to reduce_precision".split()
)
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor".split())


def flops(name: str, params: _Params, ins: _Avals, outs: _Avals) -> int:
    """Floating-point operations of one equation. Moving data costs 0, and so do exp, tanh and the like.

    Args:
        name: of the primitive.
        params: of the equation.
        ins, outs: of each operand and result: anything with a `shape` and a `dtype`.
    """
    if name in _FORMULAS:
        return _FORMULAS[name](params, ins, outs)
    if name in _ELEMENTWISE:
        return 0 if name == "convert_element_type" and ins[0].dtype == outs[0].dtype else size(outs[0])
    if name in _REDUCTIONS:
        return size(ins[0]) - size(outs[0])
    if name.startswith("reduce_window"):
        return size(outs[0]) * (math.prod(params.get("window_dimensions", (1,))) - 1)
    if name.startswith("cum"):
        return size(outs[0])
    return 0


def size(aval: Any) -> int:
    """The number of elements."""
    return math.prod(getattr(aval, "shape", ()))


def nbytes(aval: Any) -> int:
    """Bytes of an array. Random keys and tokens have none."""
    return size(aval) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def _dot(params: _Params, ins: _Avals, outs: _Avals) -> int:
    (contracted, _), _ = params["dimension_numbers"]
    return 2 * size(outs[0]) * math.prod(ins[0].shape[axis] for axis in contracted)


def _conv(params: _Params, ins: _Avals, outs: _Avals) -> int:
    """XLA counts no products with padding, and so neither does this."""
    lhs, rhs, out = ins[0].shape, ins[1].shape, outs[0].shape
    numbers = params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    positions = 1
    for axis in range(len(lhs) - 2):
        positions *= _valid_positions(
            lhs[lhs_spec[2 + axis]],
            rhs[rhs_spec[2 + axis]],
            out[out_spec[2 + axis]],
            params["window_strides"][axis],
            params["padding"][axis][0],
            params["lhs_dilation"][axis],
            params["rhs_dilation"][axis],
        )
    batch = lhs[lhs_spec[0]] // params["batch_group_count"]
    return 2 * batch * out[out_spec[1]] * rhs[rhs_spec[1]] * positions


def _valid_positions(
    length: int, window: int, out: int, stride: int, pad: int, dilation: int, window_dilation: int
) -> int:
    """Pairs of output and tap that meet a real input, along one axis."""
    end = (length - 1) * dilation + 1
    count = 0
    for tap in range(window):
        start = tap * window_dilation - pad
        if dilation == 1:  # the outputs o with 0 <= start + o * stride < end
            first = max(0, -(start // stride))
            last = min(out - 1, (end - 1 - start) // stride)
            count += max(0, last - first + 1)
        else:
            count += sum(0 <= (at := start + o * stride) < end and at % dilation == 0 for o in range(out))
    return count


def _integer_pow(params: _Params, ins: _Avals, outs: _Avals) -> int:
    power = abs(params["y"])
    products = max(0, power.bit_length() - 1 + power.bit_count() - 1)
    return (products + (params["y"] < 0)) * size(outs[0])


def _scatter_add(params: _Params, ins: _Avals, outs: _Avals) -> int:
    return size(ins[2])


_FORMULAS: dict[str, Callable[[_Params, _Avals, _Avals], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "integer_pow": _integer_pow,
    "logistic": lambda params, ins, outs: 3 * size(outs[0]),
    "scatter-add": _scatter_add,
    "scatter-mul": _scatter_add,
    "sort": lambda params, ins, outs: size(ins[0]) * max(1, (ins[0].shape[-1:] or (1,))[0].bit_length() - 1),
}
