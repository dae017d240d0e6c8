"""The first layer that makes a NaN or an infinity: through loops, branches, custom rules, gradients, jit, devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxpar import train, viz

X = np.array([1.0, 2.0, 0.0, 4.0], np.float32)
WRONG = np.array([1.0, 2.0, -1.0, 4.0], np.float32)


@jax.custom_vjp
def rooted(x):
    return jnp.sqrt(x)


rooted.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, g: (g / x,))


@jax.custom_jvp
def logged(x):
    return jnp.log(x)


logged.defjvp(lambda x, t: (jnp.log(x[0]), t[0] / x[0]))


def in_scan(x):
    """The third pass: 3 - 3 = 0, whose logarithm is the first infinity."""
    return lax.scan(lambda c, n: (c - 1, jnp.log(c)), x[3] - 1.0, jnp.arange(5))[1]


def in_while(x):
    return lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] + 1 / (s[1] - 2)), (0, x[1]))[1]


def in_shard_map(x):
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    body = lambda x: lax.psum(jnp.log(x).sum(), "d")  # noqa: E731
    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P())(x)


def twice(x):
    """Two calls of one jitted function share its jaxpr. The second one is at fault."""
    root = jax.jit(lambda x: jnp.sqrt(x))
    return root(root(jnp.abs(x)) - 1.2)


CASES = {
    "plain": (lambda x: jnp.log(x) * 2, X, "log", "inf"),
    "nan": (lambda x: jnp.sqrt(x) + 1, WRONG, "sqrt", "nan"),
    "scan": (in_scan, X, "log", "inf"),
    "while": (in_while, X, "div", "inf"),
    "cond": (lambda x: lax.cond(x[0] > 0, lambda x: 1 / x, lambda x: x, x), X, "div", "inf"),
    "grad": (lambda x: jax.grad(lambda x: jnp.sqrt(x).sum())(x), X, None, "inf"),
    "custom_vjp": (lambda x: jax.grad(lambda x: rooted(x).sum())(x), X, "div", "inf"),
    "custom_jvp": (lambda x: logged(x), X, "log", "inf"),
    "remat": (lambda x: jax.checkpoint(lambda x: jnp.log(x).sum())(x), X, "log", "inf"),
    "jit twice": (twice, X, "sqrt", "nan"),
    "shard_map": (in_shard_map, X, "log", "inf"),
    "vmap": (lambda x: jax.vmap(jnp.log)(x), X, "log", "inf"),
    "overflow": (lambda x: (x * 60000).astype(jnp.float16).sum(), X, "convert_element_type", "inf"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_operation_in_the_order_of_the_run(name):
    fn, x, primitive, kind = CASES[name]
    found = viz.first_nonfinite(fn, x, params_argnums=None).found
    assert found.kind == kind
    assert primitive is None or found.primitive == primitive
    assert found.in_result
    assert "test_first_nonfinite.py:" in found.source
    if name != "overflow":
        assert found.layer


def test_the_range_before_it_and_its_layer_in_red():
    def net(params, x):
        hidden = jnp.tanh(x @ params["first"]["w"])
        return jnp.log(hidden @ params["second"]["w"])

    params = {name: {"w": np.full((4, 4), value, np.float32)} for name, value in (("first", 1.0), ("second", 0.0))}
    plot = viz.first_nonfinite(net, params, np.ones((2, 4), np.float32))
    assert (plot.found.primitive, plot.found.low, plot.found.high) == ("log", 0.0, 0.0)
    assert "makes an infinity of numbers from 0 to 0 at" in str(plot.found)
    assert plot.source.count("#f0382b") == 1
    assert plot.found.layer in {node.name for node in plot.network.nodes}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.tanh(x),
        lambda x: jax.nn.softmax(jnp.where(x > 1, x, -jnp.inf)),  # the infinities of a mask are meant
        lambda x: x.max(initial=-jnp.inf),
    ],
)
def test_finite_functions_and_masks(fn):
    plot = viz.first_nonfinite(fn, X, params_argnums=None)
    assert plot.found is None
    assert "#f0382b" not in plot.source


def test_what_no_result_shows_is_said():
    found = viz.first_nonfinite(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), X, params_argnums=None).found
    assert (found.kind, found.in_result) == ("inf", False)
    assert str(found).endswith("; no result has one")


def test_an_argument_with_a_nan():
    found = viz.first_nonfinite(lambda p, x: p["w"] * x, {"w": np.float32(np.nan)}, X).found
    assert (found.layer, found.primitive) == ("p['w']", "argument")


def test_a_step_of_many_devices_keeps_its_state():
    def loss(params, batch, rng):
        return jnp.log(jnp.square(batch["x"] @ params["w"])).mean()

    state, step = train.start({"w": np.zeros(4, np.float32)}, optax.sgd(0.1), loss, devices=jax.devices()[:4])
    batch = {"x": np.ones((8, 4), np.float32)}
    found = viz.first_nonfinite(step, state, batch).found
    assert (found.primitive, found.kind, found.low, found.high) == ("log", "inf", 0.0, 0.0)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
