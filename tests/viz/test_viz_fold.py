"""What one box is: labels that only fit what they say, and branches that stay apart."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from viz_models import Spec, f32

from jaxpar import viz

X, W = Spec((3, 4), f32), Spec((1, 4), f32)


def ops(fn, *args, **kwargs):
    return [node.op for node in viz.trace(fn, *args, **kwargs).layers]


def labels(fn, *args):
    return [(node.op, node.detail) for node in viz.trace(fn, *args).layers]


def branch(w, x):
    return jnp.cos(jnp.sin(x) * w) + x


def nested(w, x):
    return branch(w, x) + branch(2 * w, x)


def wrapped(w, x):
    return branch(w, x)


@pytest.mark.parametrize("fn", [branch, nested, wrapped])
def test_branches_of_one_function_stay_apart(fn):
    def comprehension(params, x):
        a, b = [fn(w, x) for w in params]
        return a + b

    def one_line(params, x):
        return fn(params[0], x) + fn(params[1], x)

    def loop(params, x):
        total = 0.0
        for w in params:
            total = total + fn(w, x)
        return total

    for network in (comprehension, one_line, loop):
        graph = viz.trace(network, [W, W], X)
        assert [node.op for node in graph.layers] == [fn.__name__, fn.__name__, "add"]
        first, second, total = graph.layers
        assert (first.weights, second.weights) == (("params[0]",), ("params[1]",))
        assert {(e.source, e.target) for e in graph.edges} >= {(first.name, total.name), (second.name, total.name)}
    assert ops(lambda x, y: sum([branch(1.0, v) for v in (x, y)]), X, X, params_argnums=None).count("branch") == 2


def test_the_leaves_of_an_optimizer_are_one_node():
    params = {"a": X, "b": W, "c": X}
    assert labels(lambda p, g: jax.tree.map(lambda p, g: p - 0.1 * g, p, g), params, params) == [("sub", "×3")]


def collective_step(check_vma):
    def loss(params, x):
        return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)

    def local(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.lax.pmean(grads, "data"), jax.lax.pmean(value, "data")

    mesh = Mesh(jax.devices()[:4], ("data",))
    specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P()), "check_vma": check_vma}
    return viz.trace(
        jax.shard_map(local, mesh=mesh, **specs), {"w": Spec((4, 3), f32), "b": Spec((3,), f32)}, Spec((8, 4), f32)
    )


def test_a_mean_over_devices_is_one_node_of_what_is_sent():
    graph = collective_step(False)
    sent = [(node.op, node.detail) for node in graph.layers if "over" in node.detail]
    assert sent == [("pmean", "over data ×2, 60 B"), ("pmean", "over data, 4 B")]
    assert not any(edge.source.startswith("p") and edge.target.startswith("pmean") for edge in graph.edges)


def test_a_sum_over_devices_that_differentiation_adds_is_drawn():
    graph = collective_step(True)
    sent = [(node.op, node.detail) for node in graph.layers if "over" in node.detail]
    assert sent == [("psum", "over data ×2, 60 B"), ("pmean", "over data ×2, 60 B"), ("pmean", "over data, 4 B")]
    assert sum(node.kind == "FullyConnected" for node in graph.layers) == 2


def split(x):
    return jnp.sin(x) + x * x


def attention(x):
    return jnp.cos(x) * x + jnp.sin(x)


def layer_norm(x):
    return x * 2 + jnp.sin(x)


def softmax(x):
    return x / jnp.abs(x).sum(-1, keepdims=True)


def dropout(x):
    return x[:, 1:]


def relu(x):
    return x @ x.T


def mse(x):
    return jnp.sum(x**2)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (split, ["split"]),
        (attention, ["attention"]),
        (layer_norm, ["layer_norm"]),
        (softmax, ["softmax"]),
        (dropout, ["slice"]),
        (relu, ["MatMul"]),
        (mse, ["pow", "sum"]),
    ],
)
def test_a_name_is_not_enough(fn, expected):
    assert ops(lambda x: fn(x), X) == expected


def _window(x, reduce, start):
    return jax.lax.reduce_window(x, start, reduce, (2, 2), (1, 2), "VALID")


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.split(x, 2, axis=1), [("split", "")]),
        (lambda x: jnp.maximum(x, 1), [("maximum", "")]),
        (lambda x: jnp.maximum(x.astype(jnp.int32), 0), [("maximum", "")]),
        (lambda x: x.sum() / 2.0, [("sum", "")]),
        (lambda x: 12 / x.sum(), [("sum", "")]),
        (lambda x: x.sum() / 12, [("mean", "")]),
        (lambda x: ((x - x.mean()) ** 2).mean(), [("Elementwise", "mean, sub, pow")]),
        (lambda x: ((x[:, None] - 2 * x[None]) ** 2).sum(-1), [("Elementwise", "sub, pow, sum")]),
        (lambda x: jax.nn.logsumexp(x, -1).mean(), [("logsumexp", ""), ("mean", "")]),
        (lambda x: x.reshape(3, 2, 2).mean(-1), [("mean", "")]),
        (lambda x: _window(x, jax.lax.add, 0.0) / 4, [("Pooling", "avg, 2x2/1x2")]),
        (lambda x: _window(x, jax.lax.add, 0.0) / 7, [("Pooling", "sum, 2x2/1x2")]),
        (lambda x: _window(x, jax.lax.mul, 1.0), [("reduce_window", "")]),
        (lambda x: (x[:, ::2] + x[:, 1::2]) / 3, [("Pooling", "sum, 2/2")]),
        (lambda x: x[:2:2, ::2] + x[1::2, 1::2], [("Elementwise", "slice, add")]),
        (
            lambda x: -(jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(),
            [("Softmax", ""), ("LogSoftmax", ""), ("mul", ""), ("sum", "")],
        ),
    ],
)
def test_what_only_resembles_a_layer_is_none(fn, expected):
    assert labels(fn, X) == expected


def test_an_offset_after_a_softmax_is_no_bias_of_it():
    assert ops(lambda w, x: jax.nn.softmax(x) + w, W, X) == ["Softmax", "add"]


def test_random_numbers_of_jax_are_named():
    def noise(key):
        keys = jax.random.split(key)
        return jax.random.normal(keys[0], (3,))

    graph = viz.trace(noise, jax.random.key(0))
    assert {(node.op, node.detail) for node in graph.layers if node.op != "slice"} == {
        ("Random", "split"),
        ("Random", "normal"),
    }
