"""The known patterns, in the order in which they are tried.

Most are functions that compute a layer, written as users write them, a larger one before those that are in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.checks import describe
from . import layers
from .cells import Cells
from .templates import Fold, Pattern, Rule, fold_elementwise, fold_templates, is_elementwise
from .terms import has_one_axis, is_fixed, maker

_sigmoid, _exp = jax.nn.sigmoid, jnp.exp
Array = jax.Array

# Their values are compared, so one spelling of each is enough.
ACTIVATIONS = (
    Pattern("Activation", jnp.tanh, "tanh"),
    Pattern("Activation", jax.nn.sigmoid, "sigmoid"),
    Pattern("Activation", jax.nn.softplus, "softplus"),
    Pattern("Activation", lambda x: jax.nn.gelu(x, approximate=True), "gelu"),
    Pattern("Activation", jax.nn.mish, "mish"),
    Pattern("Activation", jax.nn.hard_swish, "hard_swish"),
    Pattern("Activation", lambda x: jax.nn.relu(x) ** 2, "squared_relu"),
    Pattern("Activation", jax.nn.relu, "relu"),
    Pattern("Activation", jax.nn.silu, "silu"),
    Pattern("Activation", lambda x, c=1.0: x * _sigmoid(c * x), "swish"),
    Pattern("Activation", lambda x, c=0.1: jnp.where(x < 0, c * x, x), "leaky_relu"),
    Pattern("Activation", lambda x, c=1.0: jnp.where(x < 0, c * (_exp(x) - 1), x), "elu"),
    Pattern("Activation", jax.nn.selu, "selu"),
    Pattern("Activation", jax.nn.soft_sign, "soft_sign"),
)


def _mean(x: Array, n: float) -> Array:
    return n * x.sum(-1, keepdims=True)


# What is divided by a root, of what, and what else a network may read of it, as for a running mean. `n` and `m` are one
# by the number of elements, or nearly so.
def _spread(x: Array, n: float, m: float) -> tuple[Array, ...]:
    mean = _mean(x, n)
    return x - mean, _mean(jnp.square(x - _mean(x, n)), m), mean


def _spread_by_squares(x: Array, n: float, m: float) -> tuple[Array, ...]:
    mean = _mean(x, n)
    return x - mean, _mean(jnp.square(x), m) - jnp.square(mean), mean


def _mean_of_squares(x: Array, n: float, m: float) -> tuple[Array, ...]:
    return x, _mean(jnp.square(x), m)


def _sum_of_squares(x: Array, n: float, m: float) -> tuple[Array, ...]:
    return x, jnp.square(x).sum(-1, keepdims=True)


_DIVIDED: tuple[Callable[[Array, Array, Array, float], Array], ...] = (
    lambda x, spread, scale, e: x * (lax.rsqrt(spread + e) * scale),
    lambda x, spread, scale, e: scale * x / jnp.sqrt(spread + e),
    lambda x, spread, scale, e: x * lax.rsqrt(spread + e),
    lambda x, spread, scale, e: x / jnp.sqrt(spread + e),
    lambda x, spread, scale, e: x * (1 / jnp.sqrt(spread + e)),
    lambda x, spread, scale, e: x / (jnp.sqrt(spread) + e),
    lambda x, spread, scale, e: x / jnp.sqrt(spread),
)


def _norm(detail: str, statistics: Callable[[Array, float, float], tuple[Array, ...]]) -> tuple[Pattern, ...]:
    """The ways to divide an array by the root of how far it spreads."""

    def pattern(divided: Callable[[Array, Array, Array, float], Array]) -> Pattern:
        def norm(x: Array, scale: Array, n: float = 1.0, m: float = 1.0, e: float = 1.0) -> tuple[Array, ...]:
            top, spread, *others = statistics(x, n, m)
            return divided(top, spread, scale, e), spread, *others

        return Pattern("Normalization", norm, detail, where=_are_scales)

    return tuple(map(pattern, _DIVIDED))


def _are_scales(cells: Cells, values: Sequence[int]) -> bool:
    """Whether all but the first are params, or a param and a constant make them."""
    for value in values[1:]:
        eqn = maker(cells, value)
        read = [each for each in ([value] if eqn is None else eqn.ins) if not is_fixed(cells, each)]
        if not read or any(cells.raw.weight_of(each) is None for each in read):
            return False
    return True


def _are_stored(cells: Cells, values: Sequence[int]) -> bool:
    """Whether all but the first are arguments with one value for each channel."""
    return all(cells.raw.of(value).kind in ("weight", "input") and has_one_axis(cells, value) for value in values[1:])


def _shifted(x: Array, mean: Array, scale: Array, bias: Array) -> Array:
    return x * scale + (bias - mean * scale)


STORED = tuple(
    Pattern("BatchNorm", fn, shapes=((4, 8), (1, 8), (1, 8), (1, 8), (1, 8)), where=_are_stored)
    for fn in (
        lambda x, mean, v, scale, bias, e=1.0: _shifted(x, mean, lax.rsqrt(v + e) * scale, bias),
        lambda x, mean, v, scale, e=1.0: (x - mean) * (lax.rsqrt(v + e) * scale),
        lambda x, mean, v, e=1.0: (x - mean) * lax.rsqrt(v + e),
        lambda x, mean, v, e=1.0: (x - mean) / jnp.sqrt(v + e),
    )
)
NORMS = (
    *_norm("mean and variance", _spread),
    *_norm("mean and variance", _spread_by_squares),
    *_norm("root mean square", _mean_of_squares),
    *_norm("unit length", _sum_of_squares),
    *STORED,
)


def _softmax(share: Callable[[Array], Array]) -> tuple[Pattern, ...]:
    def largest(x: Array) -> Array:
        return x.max(-1, keepdims=True)

    return (
        Pattern("Softmax", lambda x, c=0.0: share(_exp(x - jnp.maximum(largest(x), c)))),
        Pattern("Softmax", lambda x: share(_exp(x - largest(x)))),
        Pattern("Softmax", lambda x: share(_exp(x))),
    )


SOFTMAX = (
    *_softmax(lambda e: e / e.sum(-1, keepdims=True)),
    *_softmax(lambda e: e * (1 / e.sum(-1, keepdims=True))),
)


def _turned(x: Array, cos: Array, sin: Array, cos_2: Array, sin_2: Array) -> Array:
    a, b = x[:, :4], x[:, 4:]
    return jnp.concatenate([a * cos - b * sin, b * cos_2 + a * sin_2], -1)


def _turned_back(x: Array, cos: Array, sin: Array, cos_2: Array, sin_2: Array) -> Array:
    a, b = x[:, :4], x[:, 4:]
    return jnp.concatenate([a * cos + b * sin, b * cos_2 - a * sin_2], -1)


def _half_turned(x: Array, cos: Array, sin: Array) -> Array:
    return x * cos + jnp.concatenate([-x[:, 4:], x[:, :4]], -1) * sin


def _as_complex(x: Array, turns: Array) -> Array:
    y = lax.complex(x[:, :4], x[:, 4:]) * turns
    return jnp.concatenate([y.real, y.imag], -1)


def _as_sum(x: Array, turns: Array) -> Array:
    y = (x[:, :4] + 1j * x[:, 4:]) * turns
    return jnp.concatenate([y.real, y.imag], -1)


def _are_tables(cells: Cells, values: Sequence[int]) -> bool:
    """Whether all but the first may be sines and cosines, and the first has no array's shape of them."""
    return all(_is_table(cells, value) for value in values[1:])


def _is_table(cells: Cells, value: int) -> bool:
    """Whether a value may be sines and cosines: constants, parameters, or what is computed from them or from ids."""
    todo, steps = [cells.raw.root(value)], 0
    while todo:
        at, steps = todo.pop(), steps + 1
        shown = cells.raw.values[at]
        eqn = maker(cells, at)
        if steps > 24 or (eqn is None and shown.kind == "input" and shown.dtype.startswith(("float", "bfloat"))):
            return steps == 1 and shown.kind == "input"
        if eqn is not None:
            if eqn.prim in ("cos", "sin", "exp"):
                return True
            if eqn.prim in ("dot_general", "conv_general_dilated", "reduce_sum", "rsqrt"):
                return False
            todo += [cells.raw.root(operand) for operand in eqn.ins if eqn.prim != "gather" or operand == eqn.ins[0]]
    return True


_HALF = ((4, 8), (4, 4), (4, 4), (4, 4), (4, 4))
ROTARY = (
    Pattern("RoPE", _turned, shapes=_HALF, where=_are_tables),
    Pattern("RoPE", _turned_back, shapes=_HALF, where=_are_tables),
    Pattern("RoPE", _half_turned, where=_are_tables),
    Pattern("RoPE", _as_complex, shapes=_HALF, where=_are_tables),
    Pattern("RoPE", _as_sum, shapes=_HALF, where=_are_tables),
)


def _lstm(i: Array, f: Array, g: Array, o: Array, c: Array) -> tuple[Array, Array]:
    state = _sigmoid(f) * c + _sigmoid(i) * jnp.tanh(g)
    return _sigmoid(o) * jnp.tanh(state), state


LSTM = tuple(
    Pattern("LSTM", fn, "gates")
    for fn in (
        lambda i, f, g, o, c, i_2, f_2, g_2, o_2, more=1.0: _lstm(i + i_2, f + f_2 + more, g + g_2, o + o_2, c),
        lambda i, f, g, o, c, i_2, f_2, g_2, o_2: _lstm(i + i_2, f + f_2, g + g_2, o + o_2, c),
        lambda i, f, g, o, c, more=1.0: _lstm(i, f + more, g, o, c),
        _lstm,
    )
)


def _gru(mix: Callable[[Array, Array, Array], Array]) -> tuple[Pattern, ...]:
    def new(r: Array, a: Array, b: Array) -> Array:
        return jnp.tanh(a + _sigmoid(r) * b)

    return (
        Pattern("GRU", lambda z, r, a, b, h, z_2, r_2: mix(_sigmoid(z + z_2), new(r + r_2, a, b), h), "gates"),
        Pattern("GRU", lambda z, r, a, b, h: mix(_sigmoid(z), new(r, a, b), h), "gates"),
    )


GRU = (
    *_gru(lambda z, n, h: (1 - z) * n + z * h),
    *_gru(lambda z, n, h: z * n + (1 - z) * h),
    *_gru(lambda z, n, h: h + z * (n - h)),
    *_gru(lambda z, n, h: n + z * (h - n)),
)

# A larger pattern comes before those that it has parts of: a convolution takes its bias before sums are looked at, and
# gates are found behind their activations. What is left becomes part of a neighbour at the end.
RULES: tuple[Rule | Pattern, ...] = (
    *NORMS,
    Rule("normalization", frozenset(("Normalization", "BatchNorm")), layers.normalization),
    *ROTARY,
    Rule("convolution and its bias", frozenset(("conv",)), layers.convolution),
    Rule("matrix product with a parameter, and its bias", frozenset(("MatMul",)), layers.fully_connected),
    *SOFTMAX,
    Rule("attention", frozenset(("Softmax",)), layers.attention),
    Rule("cache of attention", frozenset(("Attention",)), layers.cache),
    Rule("rows of a table", frozenset(), layers.embedding),
    Rule("windows reduced", frozenset(), layers.window_pooling),
    Rule("slices added and scaled", frozenset(("add", "maximum")), layers.slice_pooling),
    Rule("axes split and reduced", frozenset(("sum", "mean", "max")), layers.reshape_pooling),
    *ACTIVATIONS,
    Rule("mean", frozenset(("sum",)), layers.mean),
    Rule("squared error", frozenset(("sub",)), layers.squared_error),
    Rule("cross-entropy", frozenset(("LogSoftmax", "logsumexp")), layers.cross_entropy),
    Rule("reduction of a loss", frozenset(("Loss",)), layers.reduction),
    Rule("Fourier transform", frozenset(), layers.transform),
    Rule("strided slices joined", frozenset(("Concat",)), layers.space_to_depth),
    Rule("one step", frozenset(("Flatten", "Concat", "stack")), layers.one_step),
    Rule("bias added late", frozenset(("add",)), layers.late_bias),
    *LSTM,
    *GRU,
    Rule("constant factor", frozenset(("mul", "div", "add", "sub", "neg")), layers.scale),
)


def fold_patterns(cells: Cells, rules: Iterable[Rule | Pattern]) -> None:
    """Apply each rule to all forward cells, one rule after the other. Patterns beside each other are one search."""
    for search, group in itertools.groupby(rules, _search_of):
        search(cells, list(group))


def _search_of(rule: Rule | Pattern) -> Callable[[Cells, Any], None]:
    if isinstance(rule, Rule):
        return _fold_rules
    return fold_elementwise if is_elementwise(rule) else fold_templates


def _fold_rules(cells: Cells, rules: Iterable[Rule]) -> None:
    for rule in rules:
        for cell in cells.of_kinds(rule.ops):
            fold = rule.match(cells, cell) if cell.id in cells.cells else None
            if fold is not None and not isinstance(fold, Fold):
                got = describe(fold)
                raise TypeError(f"viz: the match of viz.Rule {rule.name!r} must return a viz.Fold or None, got {got}")
            if fold is not None:
                cells.fold(fold.cells, fold.op, fold.detail, fold.major)
