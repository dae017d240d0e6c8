"""A layer is found by a function that computes it: those of the package, and the user's."""

import jax
import jax.numpy as jnp
import optax
import pytest
from viz_models import Spec, f32, i32

from jaxpar import viz
from jaxpar.viz._fold.known import NORMS
from jaxpar.viz._fold.templates import _template_of

X = Spec((3, 8), f32)
PATTERNS = [rule for rule in viz.RULES if isinstance(rule, viz.Pattern)]


def labels(fn, *args, rules=(), params_argnums=None):
    graph = viz.trace(fn, *args, params_argnums=params_argnums, rules=rules)
    return [(node.op, node.detail) for node in graph.layers]


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_the_function_of_a_pattern_is_its_layer(number):
    pattern, template = PATTERNS[number], _template_of(PATTERNS[number])
    args = [Spec(template.raw.values[at].shape, f32) for at in template.arrays]
    of_params = range(1, len(args)) if pattern in NORMS else None  # what scales and shifts, or is stored
    found = labels(lambda *args: jnp.sin(jax.tree.leaves(pattern.fn(*args))[0]), *args, params_argnums=of_params)
    named = {"swish": ("Activation", "silu"), "hard_swish": ("Activation", "hard_silu")}  # a number is 1 by default
    named |= {"mean and variance": ("LayerNorm", ""), "root mean square": ("RMSNorm", "")}  # over the last axis
    assert found == [named.get(pattern.detail, (pattern.op, pattern.detail)), ("sin", "")]


def _exp(x):
    return jnp.exp(x - jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True)))


def _window(x, reduce, start):
    return jax.lax.reduce_window(x, start, reduce, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


IMAGES, LOGITS, PICKED = Spec((2, 4, 6, 3), f32), Spec((3, 5), f32), Spec((3,), i32)
INPUTS = {"Pooling": (IMAGES,), "softmax cross-entropy": (LOGITS, PICKED), "squared error": (X, X)}
SPELLINGS = {  # of one layer, by people who did not see its pattern
    ("Softmax", ""): [
        lambda x: _exp(x) / jnp.sum(_exp(x), axis=-1, keepdims=True),
        lambda x: (1 / jnp.sum(jnp.exp(x), 1, keepdims=True)) * jnp.exp(x),
        lambda x: jnp.exp(x) * jnp.exp(x).sum(0, keepdims=True) ** -1.0,
    ],
    ("Activation", "elu"): [
        lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1),
        lambda x: jnp.where(x > 0, x, 0.7 * jnp.expm1(jnp.minimum(x, 0))),
        lambda x: jnp.maximum(x, 0) + jnp.minimum(jnp.exp(x) - 1, 0),
    ],
    ("Activation", "selu"): [
        lambda x: 1.0507 * jnp.where(x > 0, x, 1.67326 * jnp.expm1(x)),
        lambda x: jnp.where(x >= 0, 1.0507009873 * x, 1.7580993408 * (jnp.exp(x) - 1)),
    ],
    ("Activation", "soft_sign"): [lambda x: x / (1 + jnp.abs(x)), lambda x: x / (jnp.maximum(x, -x) + 1.0)],
    ("Activation", "relu"): [lambda x: jnp.where(x > 0, x, 0), lambda x: (x + jnp.abs(x)) / 2],
    ("LayerNorm", ""): [
        lambda x: (
            (x - x.mean(-1, keepdims=True)) / jnp.sqrt(((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True))
        ),
        lambda x: (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, 1, keepdims=True) + 1e-6),
    ],
    ("Loss", "squared error"): [
        lambda x, y: jnp.mean((x - y) ** 2),
        lambda x, y: jnp.square(y - x).sum() / 24,
        lambda x, y: (lambda d: 0.5 * jnp.sum(d * d, -1).mean())(x - y),
    ],
    ("Loss", "softmax cross-entropy"): [
        lambda z, y: -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], axis=1).mean(),
        lambda z, y: -jax.nn.log_softmax(z)[jnp.arange(3), y].mean(),
        lambda z, y: -(jax.nn.one_hot(y, 5) * jax.nn.log_softmax(z)).sum(-1).mean(),
        lambda z, y: jnp.mean(-jnp.sum(jax.nn.one_hot(y, 5) * jax.nn.log_softmax(z), axis=-1)),
        lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y).mean(),
        lambda z, y: -jnp.where(y < 0, jnp.nan, jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1)[:, 0]).mean(),
    ],
    ("Pooling", "avg, 2x2/2x2"): [
        lambda x: _window(x, jax.lax.add, 0.0) / 4,
        lambda x: x.reshape(2, 2, 2, 3, 2, 3).mean((2, 4)),
        lambda x: (x[:, ::2, ::2] + x[:, 1::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, 1::2]) * 0.25,
    ],
    ("Pooling", "max, 2x2/2x2"): [
        lambda x: _window(x, jax.lax.max, -jnp.inf),
        lambda x: x.reshape(2, 2, 2, 3, 2, 3).max((2, 4)),
    ],
    ("Pooling", "max, 2/2"): [lambda x: jnp.maximum(x[:, ::2], x[:, 1::2])],
}


@pytest.mark.parametrize(
    ("label", "fn"),
    [pytest.param(label, fn, id=" ".join(label).strip()) for label, fns in SPELLINGS.items() for fn in fns],
)
def test_a_layer_is_one_node_however_it_is_spelled(label, fn):
    args = INPUTS.get(label[0]) or INPUTS.get(label[1], (X,))
    assert labels(lambda *args: jnp.sin(fn(*args)), *args) == [label, ("sin", "")]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.exp(x) / jnp.exp(2 * x).sum(-1, keepdims=True),
        lambda x: jnp.exp(x) / jnp.exp(x[::-1]).sum(-1, keepdims=True),
        lambda x: jnp.exp(x).sum(-1, keepdims=True) / jnp.exp(x),
        lambda x: x * 3 / 3,
        lambda x: jnp.where(x < 0, x, 0.1 * x),
    ],
)
def test_what_computes_something_else_is_none(fn):
    assert not {"Softmax", "Activation"} & {op for op, _ in labels(fn, X)}


def test_a_softmax_whose_sum_is_returned_stays_in_steps():
    def fn(x):
        total = jnp.exp(x).sum(-1, keepdims=True)
        return jnp.exp(x) / total, total

    assert "Softmax" not in [op for op, _ in labels(fn, X)]


SWIGLU = viz.Pattern("SwiGLU", lambda x, y: jax.nn.silu(x) * y)
HALF = Spec((3, 4), f32)


@pytest.mark.parametrize(
    ("pattern", "fn", "args"),
    [
        (SWIGLU, lambda x, y: y * jax.nn.silu(x), (X, X)),
        (SWIGLU, lambda x, y: y * (x / (1 + jnp.exp(-x))), (X, X)),
        (SWIGLU, lambda x, y: y.astype(jnp.bfloat16) * jax.nn.swish(x.astype(jnp.bfloat16)), (X, X)),
        (SWIGLU, lambda x: (lambda a, b: jax.nn.silu(a) * b)(*jnp.split(x, 2, -1)), (X,)),
        (viz.Pattern("Cap", lambda x, c=1.0: c * jnp.tanh(x / c)), lambda x: jnp.tanh(x / 30.0) * 30.0, (X,)),
        (viz.Pattern("Cap", lambda x, c=1.0: c * jnp.tanh(x / c)), lambda x: 3 * jnp.tanh(x / 3), (X,)),
        (viz.Pattern("Square", lambda x: x * x), lambda x: x**2, (X,)),
        (viz.Pattern("Gate", lambda a, b, c=0.5, d=0.5: a * c + b * d), lambda a, b: 0.9 * a + b / 10, (X, X)),
        (viz.Pattern("Distance", lambda x, c=2.0: jnp.abs(x + c)), lambda x: jnp.abs(x - 3), (X,)),
        (viz.Pattern("Scores", lambda q, k: q @ k.T), lambda q, k: q @ k.T, (X, X)),
    ],
)
def test_a_layer_of_the_user(pattern, fn, args):
    last = labels(lambda *args: jnp.sin(fn(*args)), *args, rules=[pattern])
    assert last == [(pattern.op, ""), ("sin", "")]
    assert pattern.op not in [op for op, _ in labels(fn, *args)]
    gradient = labels(jax.grad(lambda *args: jnp.sin(fn(*args)).sum().astype(f32)), *args, rules=[pattern])
    assert [op for op, _ in gradient].count(f"{pattern.op} (backward)") == 1


def test_numbers_of_a_pattern_are_the_same_wherever_it_has_them():
    cap = viz.Pattern("Cap", lambda x, c=1.0: c * jnp.tanh(x / c) + c)
    assert labels(lambda x: 3 * jnp.tanh(x / 3) + 3, X, rules=[cap]) == [("Cap", "")]
    for fn in (lambda x: 3 * jnp.tanh(x / 2) + 3, jnp.tanh, lambda x: jnp.tanh(x) + 2):
        assert ("Cap", "") not in labels(fn, X, rules=[cap])


def test_where_decides_and_several_results_may_be_read():
    def turn(x, y):
        turned = jnp.cos(x)
        return turned * y, turned

    assert labels(turn, X, X, rules=[viz.Pattern("Turn", turn)]) == [("Turn", "")]
    assert ("Turn", "") not in labels(turn, X, X, rules=[viz.Pattern("Turn", lambda x, y: turn(x, y)[0])])
    seen = []
    refused = viz.Pattern("Turn", turn, where=lambda cells, values: bool(seen.append(len(values))))
    assert ("Turn", "") not in labels(turn, X, X, rules=[refused])
    assert set(seen) == {2}
