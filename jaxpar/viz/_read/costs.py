"""FLOPs of an equation, as XLA's cost analysis counts them.

`_FORMULAS` has a formula for each primitive that is known. The formulas are those of XLA, which counts multiplications
and additions and leaves out `exp` and the like, so that the sums can be compared with those of a compiled program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.extend.core as jex

from ..._core.arrays import Shaped

Jaxpr = Any  # a `jex.Jaxpr` or a `jex.ClosedJaxpr`: primitives have one or the other, by the version of jax
_Params = dict[str, Any]
_Avals = Sequence[Any]  # what has a shape and a dtype
_Formula = Callable[[_Params, _Avals, _Avals], int]


def flops(name: str, params: _Params, ins: _Avals, outs: _Avals) -> int:
    """Floating-point operations of one equation. Moving data costs 0, and so do exp, tanh and the like."""
    return _FORMULAS[name](params, ins, outs) if outs and name in _FORMULAS else 0


def is_uncounted(name: str, params: _Params) -> bool:
    """Whether there is no formula for a primitive, so that its 0 FLOPs say nothing."""
    return _kernel(params) is None if name == "pallas_call" else name not in _FORMULAS


def size(aval: object) -> int:
    """The number of elements."""
    return math.prod(getattr(aval, "shape", ()))


def nbytes(aval: object) -> int:
    """Bytes of an array. Random keys and tokens have none."""
    return size(aval) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def dtype_name(aval: object) -> str:
    """The name of a dtype: "float32". A token has none, and is "token"."""
    return _name(getattr(aval, "dtype", "token"))


@functools.lru_cache(maxsize=256)
def _name(dtype: Hashable) -> str:
    return str(dtype)  # slow: NumPy puts it together each time


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


def _select(params: _Params, ins: _Avals, outs: _Avals) -> int:
    """Several cases are picked two by two, each time by a comparison of the number, which is one or one an element."""
    if dtype_name(ins[0]) == "bool":
        return size(outs[0])
    return (len(ins) - 2) * (size(outs[0]) + size(ins[0]))


def _gather(params: _Params, ins: _Avals, outs: _Avals) -> int:
    """Where places outside give a filling, each index is compared with both ends, and each result picked."""
    if getattr(params["mode"], "name", "") != "FILL_OR_DROP":
        return 0
    indices, places = size(ins[1]), math.prod(ins[1].shape[:-1])
    return 3 * indices + max(0, indices - places) + size(outs[0])


def _clipped(params: _Params, ins: _Avals, outs: _Avals) -> int:
    """Of a scatter: one operation for each index that is brought between both ends."""
    return size(ins[1]) if getattr(params["mode"], "name", "") == "CLIP" else 0


def _integer_pow(params: _Params, ins: _Avals, outs: _Avals) -> int:
    power = abs(params["y"])
    products = max(0, power.bit_length() - 1 + power.bit_count() - 1)
    return (products + (params["y"] < 0)) * size(outs[0])


def _matrices(aval: Shaped) -> tuple[int, int, int]:
    """How many matrices, and their longer and shorter side. A complex operation is four."""
    *batch, rows, columns = aval.shape
    times = 4 if "complex" in str(aval.dtype) else 1
    return times * math.prod(batch), max(rows, columns), min(rows, columns)


def _cubic(factor: float, factor_of_values: float = 0, asked_by: Sequence[str] = ()) -> _Formula:
    """`factor` n³ for a square matrix. `factor_of_values` n³ where no param in `asked_by` asks for vectors too."""

    def formula(params: _Params, ins: _Avals, outs: _Avals) -> int:
        count, n, _ = _matrices(ins[0])
        only_values = asked_by and not any(params.get(name, True) for name in asked_by)
        return round(count * (factor_of_values if only_values else factor) * n**3)

    return formula


def _geqrf(params: _Params, ins: _Avals, outs: _Avals) -> int:
    count, m, n = _matrices(ins[0])
    return round(count * (2 * m * n**2 - 2 * n**3 / 3))


def _orthogonal(q: Shaped, reflectors: int) -> int:
    """To multiply out this many Householder reflections, for m rows and n columns."""
    count, m, n = _matrices(q)
    k = reflectors
    return round(count * (4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3))


def _lu(params: _Params, ins: _Avals, outs: _Avals) -> int:
    count, m, n = _matrices(ins[0])
    return round(count * (m * n**2 - n**3 / 3))


def _svd(params: _Params, ins: _Avals, outs: _Avals) -> int:
    count, m, n = _matrices(ins[0])
    if not params.get("compute_uv", True):
        return round(count * (4 * m * n**2 - 4 * n**3 / 3))
    if params.get("full_matrices", False):
        return count * (4 * m**2 * n + 8 * m * n**2 + 9 * n**3)
    return count * (14 * m * n**2 + 8 * n**3)


def _fft(params: _Params, ins: _Avals, outs: _Avals) -> int:
    """5 n log2 n, half of that for real numbers. Several axes are one transform of their product."""
    real = [aval for aval in (ins[0], outs[0]) if "complex" not in str(aval.dtype)]
    elements = math.prod((real or outs)[0].shape)
    return round((2.5 if real else 5) * elements * math.log2(max(1, math.prod(params["fft_lengths"]))))


def _kernel(params: _Params) -> int | None:
    """FLOPs of a Pallas kernel: the author's estimate, else its body for each place of the grid. None if unknown."""
    if (estimate := params.get("cost_estimate")) is not None:
        return int(estimate.flops)
    grid = getattr(params.get("grid_mapping"), "grid", None)
    if grid is None or not all(isinstance(steps, int) for steps in grid):
        return None
    cost, uncounted = body_cost(params["jaxpr"])
    return None if uncounted else math.prod(grid) * cost


def body_cost(body: Jaxpr) -> tuple[int, set[str]]:
    """FLOPs of a nested jaxpr, and what has no formula in it. Of a choice the costliest branch counts."""
    costs = [_nested_cost(eqn) for eqn in getattr(body, "jaxpr", body).eqns]
    return sum(cost for cost, _ in costs), set[str]().union(*(names for _, names in costs))


def _nested_cost(eqn: jex.JaxprEqn) -> tuple[int, set[str]]:
    name, params = eqn.primitive.name, eqn.params
    bodies = params.get("branches") or [params[key] for key in _BODIES if params.get(key) is not None][:1]
    if name == "pallas_call" or not bodies:
        avals = [atom.aval for atom in eqn.invars], [var.aval for var in eqn.outvars]
        return (0, {name}) if is_uncounted(name, params) else (flops(name, params, *avals), set[str]())
    cost, uncounted = max((body_cost(body) for body in bodies), key=lambda cost_of: cost_of[0])
    return params.get("length", 1) * cost, uncounted


_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr")

# FLOPs of an element of a half, a single, a double and a complex number, where these differ or XLA writes out other
# operations. As jax 0.12 counts them: 0.10 counts 53 for lgamma, 73 for digamma, 5 for asin and 1 for a complex abs.
WRITTEN_OUT = {
    "abs": (1, 1, 1, 25), "acos": (3, 3, 3, 105), "acosh": (7, 7, 7, 105), "asin": (3, 3, 3, 105),
    "asinh": (11, 11, 11, 104), "atanh": (6, 6, 6, 45), "bessel_i0e": (85, 83, 173, 0),
    "bessel_i1e": (85, 83, 173, 0), "conj": (4, 4, 4, 4), "cos": (0, 0, 0, 15), "cosh": (5, 3, 3, 95),
    "digamma": (77, 75, 75, 0), "erf_inv": (39, 37, 100, 0), "erfc": (64, 62, 90, 0), "exp": (0, 0, 0, 15),
    "exp2": (1, 1, 1, 16), "lgamma": (294, 292, 53, 0), "log": (0, 0, 0, 62), "log1p": (0, 0, 0, 79),
    "log2": (1, 1, 1, 0), "logistic": (3, 3, 3, 18), "max": (1, 1, 1, 9), "min": (1, 1, 1, 9),
    "nextafter": (24, 24, 24, 0), "one_minus_square": (3, 3, 3, 0), "polygamma": (262, 262, 262, 0),
    "sin": (0, 0, 0, 14), "sinh": (12, 10, 10, 95), "sqrt": (0, 0, 0, 86), "square": (1, 1, 1, 14),
    "zeta": (121, 121, 121, 0),
}  # fmt: skip


def _each(half: int, single: int, double: int, of_complex: int) -> _Formula:
    """So many FLOPs for each element of the result, by the dtype of the first operand."""
    by_dtype = {"float16": half, "bfloat16": half, "float64": double, "complex64": of_complex, "complex128": of_complex}
    return lambda params, ins, outs: size(outs[0]) * (by_dtype.get(dtype_name(ins[0]), single) if ins else single)


def _threefry(each: int, each_axis: int = 0) -> _Formula:
    """20 rounds of integers for each 32 bits, as XLA counts them on GPUs. Other generators cost nothing."""
    return lambda params, ins, outs: (
        (each + each_axis * max(1, len(outs[0].shape))) * size(outs[0]) if "fry" in str(ins[0].dtype) else 0
    )


def _named(names: str, formula: _Formula) -> dict[str, _Formula]:
    return dict.fromkeys(names.split(), formula)


_FORMULAS: dict[str, _Formula] = {
    # exp and the like, which XLA counts apart
    **_named("expm1 atan tan tanh rsqrt cbrt pow atan2 erf", lambda params, ins, outs: 0),
    # data that moves
    **_named(
        "slice dynamic_slice dynamic_update_slice concatenate pad reshape broadcast_in_dim transpose "
        "squeeze expand_dims stack unstack rev iota copy copy_p split tile stop_gradient "
        "optimization_barrier device_put sharding_constraint layout_constraint mesh_cast reshard pvary pcast "
        "pbroadcast core_pmap name empty empty2 full zeros_like instantiate_zeros create_token dce_sink "
        "lu_pivots_to_permutation symbolic_zeros all_gather all_gather_invariant all_gather_reduced all_to_all "
        "ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter ppermute pgather axis_index "
        "axis_size platform_index get swap program_id num_programs multiple_of broadcast "
        "after_all broadcast_to iota_2x32_shape unvmap_all unvmap_any unvmap_max new_ref empty_ref freeze free_ref "
        "reduced_vary_cast vary_unreduced_cast reduced_vary_cast_p vary_unreduced_cast_p preduced to_edtype "
        "from_edtype random_seed random_wrap random_unwrap random_clone rng_bit_generator rng_uniform "
        "debug_callback debug_print cond "
        # Equinox
        "select_if_vmap maybe_set nonbatchable nondifferentiable_backward nontraceable",
        lambda params, ins, outs: 0,
    ),
    # elements
    **_named(
        "add add_any sub mul div neg sign floor ceil round is_finite eq ne lt le gt ge and or xor not clamp "
        "bitcast_convert_type rem population_count clz real imag complex shift_left shift_right_logical "
        "shift_right_arithmetic eq_to le_to lt_to reduce_precision reciprocal mulhi",
        lambda params, ins, outs: size(outs[0]),
    ),
    "convert_element_type": lambda params, ins, outs: 0 if ins[0].dtype == outs[0].dtype else size(outs[0]),
    "select_n": _select,
    "integer_pow": _integer_pow,
    "polynomial": lambda params, ins, outs: 2 * max(0, len(ins) - 2) * size(outs[0]),
    **{name: _each(*each) for name, each in WRITTEN_OUT.items()},
    # rows and places
    "gather": _gather,
    "scatter": _clipped,
    **_named(
        "scatter-add scatter-sub scatter-mul scatter-min scatter-max scatter_add",
        lambda params, ins, outs: size(ins[2]) + _clipped(params, ins, outs),
    ),
    "addupdate": lambda params, ins, outs: size(ins[1]),
    # products. Each row of a ragged one meets one of the matrices
    "dot_general": _dot,
    **_named("ragged_dot ragged_dot_general", lambda params, ins, outs: 2 * size(outs[0]) * ins[0].shape[-1]),
    "conv_general_dilated": _conv,
    # reductions. One of places compares a value and its index, and tests for NaN too
    **_named(
        "reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor",
        lambda params, ins, outs: size(ins[0]) - size(outs[0]),
    ),
    **_named(
        "argmax argmin",
        lambda params, ins, outs: (
            (7 if str(ins[0].dtype).startswith(("int", "uint", "bool")) else 9) * (size(ins[0]) - size(outs[0]))
        ),
    ),
    **_named(
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add",
        lambda params, ins, outs: size(outs[0]) * (math.prod(params["window_dimensions"]) - 1),
    ),
    # the gradient of max pooling: comparisons in each window, and one addition
    **_named(
        "select_and_scatter_add select_and_scatter",
        lambda params, ins, outs: size(ins[0]) * math.prod(params["window_dimensions"]),
    ),
    # XLA counts a window as long as the axis for each element, or nothing, by the platform
    **_named("cumsum cumprod cummax cummin", lambda params, ins, outs: size(outs[0])),
    "cumlogsumexp": lambda params, ins, outs: 8 * size(outs[0]),
    # XLA takes the logarithm of all elements, also of those in other rows
    "sort": lambda params, ins, outs: size(ins[0]) * max(0, size(ins[0]) - 1).bit_length(),
    # one operation for each element that a device gets, on any number of devices
    **_named("psum psum2 psum_invariant pmax pmin", lambda params, ins, outs: sum(map(size, outs))),
    # linear algebra
    "fft": _fft,
    "cholesky": _cubic(1 / 3),
    "lu": _lu,
    "geqrf": _geqrf,
    "householder_product": lambda params, ins, outs: _orthogonal(ins[0], ins[1].shape[-1]),
    "qr": lambda params, ins, outs: _geqrf(params, ins, outs) + _orthogonal(outs[0], min(ins[0].shape[-2:])),
    "triangular_solve": lambda params, ins, outs: (
        size(ins[1]) * _matrices(ins[0])[1] * (4 if "complex" in str(ins[0].dtype) else 1)
    ),
    "tridiagonal_solve": lambda params, ins, outs: 8 * size(ins[3]),
    "svd": _svd,
    "eigh": _cubic(9),
    "eig": _cubic(25, 10, ("compute_left_eigenvectors", "compute_right_eigenvectors")),
    "schur": _cubic(25, 10, ("compute_schur_vectors",)),
    "hessenberg": _cubic(10 / 3),
    "tridiagonal": _cubic(4 / 3),
    # random numbers. Each further axis takes two operations for the place of an element
    "random_bits": _threefry(119, each_axis=2),
    "random_split": _threefry(120),
    "random_fold_in": _threefry(118),
    "threefry2x32": lambda params, ins, outs: 118 * size(outs[0]),
    "pallas_call": lambda params, ins, outs: _kernel(params) or 0,
}
