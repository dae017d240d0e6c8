"""What MXNet's symbols do with each element of arrays, and softmax.

As in `_layers`, arguments and defaults are those of MXNet's operators. Gradients at ties and at the ends of ranges are
those of MXNet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from . import _arrays as arrays
from ._operator import dtype_of


def in_dtype(function: Callable[..., Any], *values: Any) -> jax.Array:
    """What a function gives, in the dtype of the arrays as in MXNet. Beside whole numbers a scalar is cut to one."""
    dtype = jnp.result_type(*(value for value in values if not isinstance(value, float)))
    if jnp.issubdtype(dtype, jnp.integer):
        values = tuple(jnp.asarray(int(v)).astype(dtype) if isinstance(v, float) else v for v in values)
    out = function(*values)
    return out if dtype == np.dtype(bool) else out.astype(dtype)


def aligned(*values: Any) -> list[jax.Array]:
    """Arrays with as many axes each, which NumPy broadcasts. JAX may be set to refuse what has fewer."""
    most = max(jnp.ndim(value) for value in values)
    return [jnp.expand_dims(value, range(most - jnp.ndim(value))) for value in values]


def rint(x: jax.Array) -> jax.Array:
    """As in MXNet, halves go down."""
    return jnp.where(x - jnp.floor(x) > jnp.ceil(x) - x, jnp.ceil(x), jnp.floor(x))


def round_(x: jax.Array) -> jax.Array:
    """Halves go away from 0."""
    return jnp.trunc(x) + jnp.trunc(2 * (x - jnp.trunc(x)))


def divide(a: ArrayLike, b: ArrayLike) -> jax.Array:
    """Of integers that without its fraction."""
    dtype = jnp.result_type(a, b)
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.divide(a, b)
    return lax.div(*jnp.broadcast_arrays(jnp.asarray(a, dtype), jnp.asarray(b, dtype)))


def mod(a: Any, b: Any) -> jax.Array:
    """As in MXNet, 0 where the divisor is, with the gradient of `a`."""
    remainder = jnp.mod(a, jnp.where(b == 0, 1, b))
    return jnp.where(b == 0, a - lax.stop_gradient(a), remainder)


def maximum(a: Any, b: Any) -> jax.Array:
    """As in MXNet, the first of two equal values has the whole gradient."""
    return jnp.where((a >= b) | jnp.isnan(a), a, b)


def minimum(a: Any, b: Any) -> jax.Array:
    return jnp.where((a <= b) | jnp.isnan(a), a, b)


def straight(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A function whose gradient is passed on as it is."""
    return lambda x: lax.stop_gradient(function(x)) + (x - lax.stop_gradient(x))


def softmax(function: Callable[..., jax.Array], sign: float = 1) -> Callable[..., jax.Array]:
    def softmax(
        data: jax.Array,
        length: jax.Array | None = None,
        *,
        axis: int = -1,
        temperature: float | None = None,
        dtype: str | None = None,
        use_length: bool | None = False,
    ) -> jax.Array:
        if use_length and function is jax.nn.log_softmax:
            raise ValueError("log_softmax: use_length is not supported")
        data = sign * data / temperature if temperature else sign * data
        if use_length and length is not None:
            # Behind its length a sequence has no probability.
            inside = jnp.expand_dims(length, axis) > lax.broadcasted_iota(jnp.int32, data.shape, axis % data.ndim)
            data = jnp.where(inside, data, jnp.finfo(data.dtype).min)
            out = jnp.where(inside, function(data, axis), 0)
        else:
            out = function(data, axis)
        return out.astype(dtype_of(dtype)) if dtype else out

    return softmax


def clip(data: jax.Array, *, a_min: float, a_max: float) -> jax.Array:
    """As in MXNet, a value at the bound has the whole gradient."""
    low, high = (jnp.asarray(bound).astype(data.dtype) for bound in (a_min, a_max))
    return jnp.where(data > high, high, jnp.where(data < low, low, data))


def hard_sigmoid(data: jax.Array, *, alpha: float = 0.2, beta: float = 0.5) -> jax.Array:
    """As in MXNet, a value at the bound has no gradient."""
    line = alpha * data + beta
    return jnp.where(line >= 1, 1, jnp.where(line <= 0, 0, line))


def smooth_l1(data: jax.Array, *, scalar: float = 1.0) -> jax.Array:
    square = scalar * scalar
    return jnp.where(jnp.abs(data) > 1 / square, jnp.abs(data) - 0.5 / square, 0.5 * square * data * data)


UNARY: dict[str, Callable[[Any], jax.Array]] = {
    **{n: getattr(jnp, n) for n in "sign ceil floor trunc square sqrt exp log log10 log2 log1p expm1".split()},
    **{n: getattr(jnp, n) for n in "sin cos tan sinh cosh tanh arcsin arccos arctan arcsinh arccosh arctanh".split()},
    **{n: getattr(jnp, n) for n in "negative reciprocal cbrt degrees radians zeros_like ones_like".split()},
    "abs": arrays.absolute,
    "fix": jnp.trunc,
    "rint": rint,
    "round": round_,
    "rsqrt": lambda x: lax.rsqrt(x * 1.0),  # of integers too
    "rcbrt": lambda x: 1 / jnp.cbrt(x),
    "relu": jax.nn.relu,
    "sigmoid": lambda x: jax.nn.sigmoid(x * 1.0),
    "softsign": jax.nn.soft_sign,
    "erf": jax.scipy.special.erf,
    "erfinv": jax.scipy.special.erfinv,
    "gamma": jax.scipy.special.gamma,
    "gammaln": jax.scipy.special.gammaln,
    "logical_not": lambda x: x == 0,
    "_contrib_round_ste": straight(round_),
    "_contrib_sign_ste": straight(jnp.sign),
    "_copyto _CrossDeviceCopy": jnp.asarray,
    "BlockGrad stop_gradient": lax.stop_gradient,
    "identity _copy": jnp.asarray,
}

# name: (function, names before 1.0, names with a number)
ARITHMETIC: dict[str, tuple[Callable[[Any, Any], jax.Array], str, str]] = {
    "add": (jnp.add, "elemwise_add broadcast_plus _plus _Plus _add _grad_add", "_plus_scalar _PlusScalar"),
    "sub": (jnp.subtract, "elemwise_sub broadcast_minus _minus _Minus _sub", "_minus_scalar _MinusScalar"),
    "mul": (jnp.multiply, "elemwise_mul _mul _Mul", "_mul_scalar _MulScalar"),
    "div": (divide, "elemwise_div _div _Div", "_div_scalar _DivScalar"),
    "mod": (mod, "_mod _Mod", "_mod_scalar _ModScalar"),
    "power": (jnp.power, "_power _Power _pow", "_power_scalar _PowerScalar"),
    "maximum": (maximum, "_maximum _Maximum", "_maximum_scalar _MaximumScalar"),
    "minimum": (minimum, "_minimum _Minimum", "_minimum_scalar _MinimumScalar"),
    "hypot": (jnp.hypot, "_hypot _Hypot", "_hypot_scalar _HypotScalar"),
    **{
        n: (
            getattr(jnp, n.replace("lesser", "less")),
            f"_{n} _{n.title()}",
            f"_{n}_scalar _{n.title().replace('_', '')}Scalar",
        )
        for n in "equal not_equal greater greater_equal lesser lesser_equal logical_and logical_or logical_xor".split()
    },
}
REVERSED: dict[str, Callable[[Any, Any], jax.Array]] = {
    "_rminus_scalar _RMinusScalar": lambda data, scalar: jnp.subtract(scalar, data),
    "_rdiv_scalar _RDivScalar": lambda data, scalar: divide(scalar, data),
    "_rpower_scalar _RPowerScalar": lambda data, scalar: jnp.power(scalar, data),
    "_rmod_scalar _RModScalar": lambda data, scalar: mod(scalar, data),
}
