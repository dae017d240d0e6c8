"""The operators of `mx.np`, MXNet's NumPy interface, which networks have that were made under `npx.set_np()`.

Most are functions of jax.numpy. Layers are those of `_layers` in such networks too. Other than in `mx.sym` an array may
have no axes, whole numbers become floating where NumPy's do, and comparisons give booleans.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks
from . import _arrays as arrays
from ._elementwise import aligned, in_dtype, mod, rint
from ._operator import Operator, dtype_of, named, row, same
from ._shapes import back_of_one, back_same

AXES, AXIS, SHAPE, DTYPE = "tuple | None", "int | None", "tuple", "str | None"  # how attributes are read


def _whole(array: jax.Array) -> jax.Array:
    return array.astype(dtype_of("int64"))


def _number(scalar: float, is_int: bool) -> float:
    """A number of a file, where all have a fraction. `is_int` says that it was written without one."""
    return int(scalar) if is_int and float(scalar).is_integer() else scalar


def _unary(function: Callable[[Any], Any]) -> Operator:
    return row(lambda data: function(data), same, back_same)


def _binary(function: Callable[[Any, Any], jax.Array]) -> Operator:
    return row(lambda lhs, rhs: function(*aligned(lhs, rhs)), same)


def _with_scalar(function: Callable[[Any, Any], jax.Array]) -> Operator:
    return row(lambda data, *, scalar=1.0, is_int=True: function(data, _number(scalar, is_int)), same, back_same)


def _scalar_first(function: Callable[[Any, Any], jax.Array]) -> Operator:
    return row(lambda data, *, scalar=1.0, is_int=True: function(_number(scalar, is_int), data), same, back_same)


def _ldexp(a: Any, b: Any) -> jax.Array:
    """Of exponents with a fraction too."""
    return a * jnp.exp2(b * 1.0)


# As in MXNet, of whole numbers these are whole too.
_UNARY: dict[str, Callable[[Any], jax.Array]] = {
    **{n: getattr(jnp, n) for n in "sign ceil floor trunc square sqrt exp log log10 log2 log1p expm1".split()},
    **{n: getattr(jnp, n) for n in "sin cos tan sinh cosh tanh arcsin arccos arctan arcsinh arccosh arctanh".split()},
    **{n: getattr(jnp, n) for n in "negative cbrt degrees radians bitwise_not".split()},
    "absolute": arrays.absolute,
    "reciprocal": lambda x: 1 / x,
    "rint": rint,
    "fix": jnp.trunc,
}
_TESTS = "logical_not isfinite isinf isnan isneginf isposinf".split()
_BINARY: dict[str, Callable[[Any, Any], jax.Array]] = {
    **{n: getattr(jnp, n) for n in "add subtract multiply true_divide power copysign arctan2 hypot lcm".split()},
    **{n: getattr(jnp, n) for n in "equal not_equal less less_equal greater greater_equal".split()},
    **{n: getattr(jnp, n) for n in "bitwise_and bitwise_or bitwise_xor".split()},
    "mod": mod,
    "ldexp": _ldexp,
}
_REVERSED = "subtract true_divide mod power arctan2 copysign ldexp".split()


def _reduction(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def reduce(
        a: jax.Array,
        *,
        axis: tuple[int, ...] | None = None,
        dtype: str | None = None,
        keepdims: bool = False,
        initial: float | None = None,
    ) -> jax.Array:
        if initial is not None:
            raise ValueError("a sum or mean with initial= is not supported, nor is it in MXNet 1.9.1")
        axes = tuple(range(a.ndim)) if axis is None else axis
        return function(a if dtype in (None, "None") else a.astype(dtype_of(dtype)), axis=axes, keepdims=keepdims)

    return reduce


def _spread(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`std` or `var`."""

    def spread(
        a: jax.Array,
        *,
        axis: tuple[int, ...] | None = None,
        dtype: str | None = None,
        ddof: int = 0,
        keepdims: bool = False,
    ) -> jax.Array:
        a = a if dtype in (None, "None") else a.astype(dtype_of(dtype))
        return function(a, axis, ddof=ddof, keepdims=keepdims).astype(a.dtype)  # as in MXNet, of whole numbers too

    return spread


def _average(
    a: jax.Array,
    weights: jax.Array | None = None,
    *,
    axis: tuple[int, ...] | None = None,
    returned: bool = False,
    weighted: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The mean, and the sum of the weights."""
    return jnp.average(a, axis, weights if weighted else None, returned=True)


def _norm(
    data: jax.Array, *, ord: float = 2.0, axis: tuple[int, ...] | None = None, keepdims: bool = False, flag: int = -1
) -> jax.Array:
    """The norm of all elements, of vectors along an axis, or of matrices along two."""
    # With a flag of 1 and -2 it is the root of the sum of all squares, with 2 the nuclear norm of matrices.
    axes = tuple(range(data.ndim)) if axis is None else axis
    if flag in (1, -2):
        return jnp.sqrt(jnp.square(data).sum(axes, keepdims=keepdims))
    if len(axes) not in (1, 2):
        raise ValueError(f"norm: takes one or two axes, got {axes}")
    first, *second = axes
    return jnp.linalg.norm(data, "nuc" if flag == 2 else ord, axes if second else first, keepdims)


def _percentile(
    a: jax.Array,
    q: Any = None,
    *,
    axis: tuple[int, ...] | None = None,
    interpolation: str = "linear",
    keepdims: bool = False,
    q_scalar: float | None = None,
) -> jax.Array:
    """`q` is an array, or the number `q_scalar`."""
    return jnp.percentile(a, q if q_scalar is None else q_scalar, axis, method=interpolation, keepdims=keepdims)


def _reshape(data: jax.Array, *, newshape: tuple[int, ...], reverse: bool = False, order: str = "C") -> jax.Array:
    """To a shape of codes: -2 keeps an axis, -3 leaves one of 1 out, -4 keeps all further ones, -5 joins, -6 splits."""
    checks.choice(order, "npx.reshape", "order", ("C",))
    codes = {-2: 0, -3: arrays.LEFT_OUT, -4: -2, -5: -3, -6: -4}
    return arrays.reshape(data, shape=tuple(codes.get(n, n) for n in newshape), reverse=reverse)


def _broadcast_to(array: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """-2 in the shape is the length that the array has."""
    old = (1,) * (len(shape) - array.ndim) + array.shape
    return jnp.broadcast_to(array, [m if n == -2 else n for n, m in zip(shape, old, strict=True)])


def _pad(
    data: jax.Array, *, pad_width: str, mode: str = "constant", constant_value: float = 0.0, reflect_type: str = "even"
) -> jax.Array:
    """`pad_width` is the text of pairs, "((1, 2), (0, 0))", of one for all axes, or of a number."""
    checks.choice(reflect_type, "pad", "reflect_type", ("even",))
    checks.choice(mode, "pad", "mode", ("constant", "edge", "reflect", "symmetric", "maximum", "minimum"))
    numbers = [int(n) for n in pad_width.translate(str.maketrans("()[],L", " " * 6)).split()]
    pairs = np.broadcast_to(np.reshape(numbers, (-1, min(len(numbers), 2))), (data.ndim, 2))
    return jnp.pad(data, pairs, mode, **({"constant_values": constant_value} if mode == "constant" else {}))


def _filled(value: float) -> Callable[..., jax.Array]:
    def fill(*, shape: tuple[int, ...] = (), dtype: str | None = None) -> jax.Array:
        arrays.check_count(math.prod(shape), f"an array of shape {shape}")
        return jnp.full(shape, value, dtype_of(dtype))

    return fill


def _at_least(function: Callable[..., Any]) -> Operator:
    return row(lambda *arys, num_args=1: function(*arys), outputs=lambda attrs: attrs["num_args"])


def _eye(*, N: int, M: int | None = None, k: int = 0, dtype: str = "float32") -> jax.Array:
    return arrays.eye(N=N, M=N if M is None else M, k=k, dtype=dtype)


def _indices(*, dimensions: tuple[int, ...], dtype: str = "int32") -> jax.Array:
    arrays.check_count(math.prod(dimensions) * len(dimensions), f"indices of an array of shape {dimensions}")
    return jnp.indices(dimensions, dtype_of(dtype))


def _logspace(
    *, start: float, stop: float, num: int, endpoint: bool = True, base: float = 10.0, dtype: str | None = None
) -> jax.Array:
    arrays.check_count(num, "logspace")
    return jnp.logspace(start, stop, num, endpoint, base, dtype_of(dtype))


def _window(function: Callable[[int], jax.Array]) -> Callable[..., jax.Array]:
    def window(*, M: int | None = None, dtype: str = "float32") -> jax.Array:
        arrays.check_count(M or 0, "a window")
        return function(M or 0).astype(dtype_of(dtype))

    return window


def _differences(
    a: jax.Array,
    first: jax.Array | None = None,
    second: jax.Array | None = None,
    *,
    to_begin_arr_given: bool = False,
    to_end_arr_given: bool = False,
    to_begin_scalar: float | None = None,
    to_end_scalar: float | None = None,
) -> jax.Array:
    """`ediff1d`. What stands before and behind the differences is an array or a number."""
    begin = first if to_begin_arr_given else to_begin_scalar
    end = (second if to_begin_arr_given else first) if to_end_arr_given else to_end_scalar
    return jnp.ediff1d(a, end, begin)


def _where(condition: Any, x: Any, y: Any) -> jax.Array:
    condition, x, y = aligned(condition, x, y)
    return jnp.where(condition != 0, x, y)


def _parts(attrs: Mapping[str, Any]) -> int:
    return attrs["sections"] or len(attrs["indices"])


def _split(axis: int) -> Callable[..., Any]:
    """`hsplit` or `dsplit`. Of a vector both cut its only axis."""

    def split(
        data: jax.Array,
        *,
        indices: tuple[int, ...],
        axis: int = axis,
        squeeze_axis: bool = False,
        sections: int = 0,
    ) -> Any:
        return arrays.split_v2(data, indices=indices, axis=min(axis, data.ndim - 1), sections=sections)

    return split


def _random(
    draw: Callable[..., jax.Array], numbers: Mapping[str, float | None], *, is_of_each: bool = False
) -> Operator:
    """An operator that draws from a distribution. Those of its numbers that are None are arrays.

    `size` is the shape of what is drawn, or with `is_of_each` of what is drawn for each of the numbers.
    """

    def drawn(
        *values: jax.Array,
        size: tuple[int, ...] | None = None,
        dtype: str | None = None,
        rng: jax.Array | None,
        **given: float | None,
    ) -> jax.Array:
        # An array stands for a number that is not given, also where that has a default.
        of_all = {**(dict.fromkeys(numbers) if values else numbers), **given}
        if len(values) != len(missing := [name for name, number in of_all.items() if number is None]):
            raise ValueError(f"takes a number or an array for each of {[*numbers]}: {len(values)} arrays for {missing}")
        left = iter(values)
        parameters = [next(left) if number is None else jnp.float32(number) for number in of_all.values()]
        shape = jnp.broadcast_shapes(*(parameter.shape for parameter in parameters))
        shape = shape if size is None else (*size, *shape) if is_of_each else size
        key = checks.random_key(rng, "a random operator")
        aligned = [jnp.broadcast_to(parameter, shape) for parameter in parameters]
        return draw(key, shape, *aligned).astype(dtype_of(dtype))

    attributes = {**numbers, "size": None, "dtype": None}
    forms = {**dict.fromkeys(numbers, "float | None"), "size": AXES}
    names = [f"input{i + 1}" for i in range(len(numbers))]
    return Operator(named(drawn, names, attributes, forms=forms, optional=True, draws=True))


def _bernoulli(
    values: jax.Array | None = None,
    *,
    prob: float | None = None,
    logit: float | None = None,
    size: tuple[int, ...] | None = None,
    dtype: str = "float32",
    is_logit: bool,
    rng: jax.Array | None,
) -> jax.Array:
    number = values if values is not None else logit if is_logit else prob
    if number is None:
        raise ValueError(f"takes a number or an array for {'logit' if is_logit else 'prob'}")
    probability = jnp.asarray(number, jnp.float32)
    probability = jax.nn.sigmoid(probability) if is_logit else probability
    shape = probability.shape if size is None else size
    drawn = jax.random.bernoulli(checks.random_key(rng, "a random operator"), jnp.broadcast_to(probability, shape))
    return drawn.astype(dtype_of(dtype))


# How it is drawn from a key, a shape and numbers, and the numbers
_LOCATED = {"loc": None, "scale": None}
_DISTRIBUTIONS: dict[str, tuple[Callable[..., jax.Array], Mapping[str, float | None]]] = {
    "uniform": (
        lambda key, shape, low, high: jax.random.uniform(key, shape) * (high - low) + low,
        {"low": None, "high": None},
    ),
    "normal": (lambda key, shape, loc, scale: jax.random.normal(key, shape) * scale + loc, _LOCATED),
    "gumbel": (lambda key, shape, loc, scale: jax.random.gumbel(key, shape) * scale + loc, _LOCATED),
    "logistic": (lambda key, shape, loc, scale: jax.random.logistic(key, shape) * scale + loc, _LOCATED),
    "gamma": (
        lambda key, shape, alpha, scale: jax.random.gamma(key, alpha, shape) * scale,
        {"shape": None, "scale": None},
    ),
    "exponential": (lambda key, shape, scale: jax.random.exponential(key, shape) * scale, {"scale": 1.0}),
    "rayleigh": (lambda key, shape, scale: jax.random.rayleigh(key, scale, shape), {"scale": 1.0}),
    "pareto": (lambda key, shape, a: jax.random.pareto(key, a, shape) - 1, {"a": None}),
    "powerd": (lambda key, shape, a: jax.random.uniform(key, shape) ** (1 / a), {"a": None}),
    "weibull": (lambda key, shape, a: jax.random.weibull_min(key, 1.0, a, shape), {"a": None}),
}

OPERATORS: dict[str, Operator] = {
    **{f"_npi_{name}": _unary(functools.partial(in_dtype, function)) for name, function in _UNARY.items()},
    **{f"_npi_{name}": _unary(getattr(jnp, name)) for name in _TESTS},
    **{f"_npi_{name}": _binary(function) for name, function in _BINARY.items()},
    **{f"_npi_{name}_scalar": _with_scalar(function) for name, function in _BINARY.items()},
    **{f"_npi_r{name}_scalar": _scalar_first(_BINARY[name]) for name in _REVERSED},
    "_np_copy": _unary(jnp.asarray),
    "_npx_relu": _unary(jax.nn.relu),
    "_npx_sigmoid": _unary(jax.nn.sigmoid),
    "_npi_around": row(lambda x, *, decimals=0: lax.stop_gradient(jnp.round(x, decimals))),
    "_npi_nan_to_num": row(
        lambda data, *, copy=True, nan=0.0, posinf=None, neginf=None: jnp.nan_to_num(
            data, nan=nan, posinf=posinf, neginf=neginf
        ),
        posinf="float | None",
        neginf="float | None",
    ),
    # Sums and means
    "_np_sum": Operator(_reduction(jnp.sum)),
    "_np_prod": Operator(_reduction(jnp.prod)),
    "_np_max": Operator(_reduction(arrays.extreme(jnp.max))),
    "_np_min": Operator(_reduction(arrays.extreme(jnp.min))),
    "_npi_mean": Operator(_reduction(jnp.mean)),
    "_np_any": row(lambda a, *, axis=None, keepdims=False: jnp.any(a, axis, keepdims=keepdims), axis=AXES),
    "_np_all": row(lambda a, *, axis=None, keepdims=False: jnp.all(a, axis, keepdims=keepdims), axis=AXES),
    "_npi_std": Operator(_spread(jnp.std)),
    "_npi_var": Operator(_spread(jnp.var)),
    "_npi_average": Operator(_average, outputs=lambda attrs: 2),
    "_npi_norm": Operator(_norm),
    "_npi_argmax": row(
        lambda data, *, axis=None, keepdims=False: _whole(jnp.argmax(data, axis, keepdims=keepdims)), axis=AXIS
    ),
    "_npi_argmin": row(
        lambda data, *, axis=None, keepdims=False: _whole(jnp.argmin(data, axis, keepdims=keepdims)), axis=AXIS
    ),
    "_npi_percentile": Operator(_percentile),
    "_npi_diff": row(lambda a, *, n=1, axis=-1: jnp.diff(a, n, axis)),
    "_npi_ediff1d": Operator(_differences),
    "_npi_polyval": row(lambda p, x: jnp.polyval(p, x)),
    # Shapes
    "_np_reshape": row(
        lambda a, *, newshape, order="C": a.reshape(newshape, order=order),
        back=back_of_one(lambda shape, attrs: None),  # a file may say the shape of a variable
        newshape=SHAPE,
    ),
    "_npx_reshape": Operator(_reshape),
    "_np_squeeze": row(lambda a, *, axis=None: a.squeeze(axis), axis=AXES),
    "_np_transpose": row(lambda a, *, axes=None: a.transpose(axes or None), axes=AXES),
    "_np_moveaxis": row(
        lambda a, *, source, destination: jnp.moveaxis(a, source, destination), source=SHAPE, destination=SHAPE
    ),
    "_np_roll": row(lambda data, *, shift, axis=None: jnp.roll(data, shift, axis), shift=SHAPE, axis=AXES),
    "_npi_flip": row(lambda data, *, axis: jnp.flip(data, axis), axis=AXES),
    "_npi_rot90": row(lambda data, *, k=1, axes=None: jnp.rot90(data, k, axes or (0, 1)), axes=AXES),
    "_npi_broadcast_to": Operator(_broadcast_to),
    "_npi_concatenate": row(
        lambda *data, axis=0: jnp.concatenate([x.ravel() for x in data] if axis is None else data, axis or 0),
        axis=AXIS,
    ),
    "_npi_stack": row(lambda *data, axis=0: jnp.stack(data, axis)),
    "_npi_hstack": row(lambda *data: jnp.hstack(data)),
    "_npi_vstack": row(lambda *data: jnp.vstack(data)),
    "_npi_dstack": row(lambda *data: jnp.dstack(data)),
    "_npi_column_stack": row(lambda *data: jnp.column_stack(data)),
    "_np_atleast_1d": _at_least(jnp.atleast_1d),
    "_np_atleast_2d": _at_least(jnp.atleast_2d),
    "_np_atleast_3d": _at_least(jnp.atleast_3d),
    "_npi_pad": Operator(_pad),
    "_np_diag": row(lambda data, *, k=0: jnp.diag(data, k)),
    "_np_diagflat": row(lambda data, *, k=0: jnp.diagflat(data, k)),
    "_np_diagonal": row(lambda data, *, offset=0, axis1=0, axis2=1: jnp.diagonal(data, offset, axis1, axis2)),
    "_npi_diag_indices_from": row(lambda data: jnp.stack(jnp.diag_indices_from(data))),
    "_npi_tril": row(lambda data, *, k=0: jnp.tril(data, k)),
    # Arrays of numbers
    "_npi_zeros": Operator(_filled(0.0)),
    "_npi_ones": Operator(_filled(1.0)),
    "_npi_full_like": row(
        lambda a, *, fill_value, dtype=None: jnp.full(a.shape, fill_value, dtype_of(dtype, a.dtype.name)),
        fill_value="float",
        dtype=DTYPE,
    ),
    "_npi_identity": row(
        lambda *, shape, dtype=None: arrays.eye(N=shape[0], dtype=dtype or "float32"), shape=SHAPE, dtype=DTYPE
    ),
    "_npi_eye": Operator(_eye),
    "_npi_arange": Operator(arrays.arange),
    "_npi_indices": Operator(_indices),
    "_npi_logspace": Operator(_logspace),
    "_npi_blackman": Operator(_window(jnp.blackman)),
    "_npi_hamming": Operator(_window(jnp.hamming)),
    "_npi_hanning": Operator(_window(jnp.hanning)),
    # Choices
    "_npi_where": row(lambda condition, x, y: _where(condition, x, y)),
    "_npi_where_lscalar": row(lambda condition, x, *, scalar=0.0: _where(condition, jnp.asarray(scalar, x.dtype), x)),
    "_npi_where_rscalar": row(lambda condition, y, *, scalar=0.0: _where(condition, y, jnp.asarray(scalar, y.dtype))),
    "_npi_where_scalar2": row(lambda condition, *, x=0.0, y=0.0: jnp.where(condition != 0, x, y)),
    # Products
    "_np_dot": row(lambda a, b: jnp.dot(a, b)),
    "_np_trace": row(lambda data, *, offset=0, axis1=0, axis2=1: jnp.trace(data, offset, axis1, axis2)),
    "_npi_matmul": row(lambda a, b: jnp.matmul(a, b)),
    "_npi_tensordot": row(
        lambda a, b, *, a_axes_summed, b_axes_summed: jnp.tensordot(a, b, (a_axes_summed, b_axes_summed)),
        a_axes_summed=SHAPE,
        b_axes_summed=SHAPE,
    ),
    "_npi_tensordot_int_axes": row(lambda a, b, *, axes: jnp.tensordot(a, b, axes), axes="int"),
    "_npi_einsum": row(
        lambda *data, subscripts="", num_args=1, optimize=0: jnp.einsum(subscripts, *data), subscripts="str"
    ),
    # Linear algebra
    "_npi_cholesky": row(
        lambda A, *, lower=True: jnp.linalg.cholesky(A) if lower else jnp.linalg.cholesky(A).swapaxes(-1, -2)
    ),
    "_npi_svd": row(
        lambda A: tuple(jnp.linalg.svd(A, full_matrices=False)),
        outputs=lambda attrs: 3,
    ),
    "_npi_eigh": row(
        lambda A, *, UPLO="L": tuple(jnp.linalg.eigh(A, UPLO, symmetrize_input=False)), outputs=lambda attrs: 2
    ),
    "_npi_eigvalsh": row(lambda A, *, UPLO="L": jnp.linalg.eigh(A, UPLO, symmetrize_input=False)[0]),
    "_npi_solve": row(lambda A, B: jnp.linalg.solve(A, B)),
    "_npi_pinv": row(lambda A, rcond, *, hermitian=False: jnp.linalg.pinv(A, rcond, hermitian=hermitian)),
    "_npi_pinv_scalar_rcond": row(
        lambda A, *, rcond=1e-15, hermitian=False: jnp.linalg.pinv(A, rcond, hermitian=hermitian)
    ),
    "_npi_tensorinv": row(lambda a, *, ind=2: jnp.linalg.tensorinv(a, ind)),
    "_npi_tensorsolve": row(lambda a, b, *, a_axes=None: jnp.linalg.tensorsolve(a, b, a_axes or None), a_axes=AXES),
    # Parts
    "_npi_hsplit": Operator(_split(1), outputs=_parts),
    "_npi_dsplit": Operator(_split(2), outputs=_parts),
    # Random numbers
    **{f"_npi_{name}": _random(draw, numbers) for name, (draw, numbers) in _DISTRIBUTIONS.items()},
    "_npi_uniform_n": _random(*_DISTRIBUTIONS["uniform"], is_of_each=True),
    "_npi_normal_n": _random(*_DISTRIBUTIONS["normal"], is_of_each=True),
    "_npi_bernoulli": Operator(_bernoulli),
}
