"""Sums that several layers of a network read are computed once on CPUs: programs that grow with the layers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxpar import train
from jaxpar.models import fast_on_cpus

BEFORE_0_11 = jax.__version_info__ < (0, 11)
WIDTH = 8


def norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def layer(weights, x):
    x = x + jnp.tanh(norm(x) @ weights["in"])
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]


def params_of(count):
    def of_layer(key):
        keys = jax.random.split(key, 3)
        shapes = {"in": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
        return {name: jax.random.normal(k, shapes[name]) / 4 for name, k in zip(shapes, keys, strict=True)}

    return [of_layer(key) for key in jax.random.split(jax.random.key(0), count)]


def loss_of(layer):
    def loss(params, x):
        return (functools.reduce(lambda x, weights: layer(weights, x), params, x) ** 2).mean()

    return loss


LAYERS = {
    "plain": layer,
    "in jit": jax.jit(layer),
    "recomputed": jax.checkpoint(layer),
    "with its derivative": jax.custom_jvp(layer),
}
LAYERS["with its derivative"].defjvp(lambda primals, tangents: jax.jvp(layer, primals, tangents))
INPUT = np.random.default_rng(0).normal(size=(6, WIDTH)).astype(np.float32)


def written(program):
    """How many values a program has written once."""
    count = 0
    for eqn in program.eqns:
        count += eqn.primitive.name == "copy"
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(value, "jaxpr", value)
            count += written(inner) if hasattr(inner, "eqns") else 0
    return count


@pytest.mark.parametrize("how", LAYERS)
def test_the_numbers_are_the_same(how):
    params = params_of(5)
    plain = jax.value_and_grad(loss_of(layer))
    fast = fast_on_cpus(jax.value_and_grad(loss_of(LAYERS[how])))
    assert written(jax.make_jaxpr(fast)(params, INPUT).jaxpr) >= 8
    expected = plain(params, INPUT)
    for call in (fast, jax.jit(fast)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), call(params, INPUT), expected)


def test_it_works_inside_of_other_transformations():
    params = params_of(3)
    plain = loss_of(layer)
    fast = fast_on_cpus(loss_of(layer))
    assert written(jax.make_jaxpr(fast)(params, INPUT).jaxpr) == 2
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    inputs = np.stack([INPUT, 2 * INPUT])
    close(jax.vmap(fast, (None, 0))(params, inputs), jax.vmap(plain, (None, 0))(params, inputs))
    jax.tree.map(close, jax.grad(fast)(params, INPUT), jax.grad(plain)(params, INPUT))
    jax.tree.map(
        close, jax.jvp(fast, (params, INPUT), (params, INPUT)), jax.jvp(plain, (params, INPUT), (params, INPUT))
    )
    hessian = lambda function: jax.jit(jax.hessian(lambda x: function(params, x[None])))(INPUT[0])  # noqa: E731
    close(hessian(fast), hessian(plain))
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    for check in (False, True):
        over_devices = jax.shard_map(
            lambda params, x: lax.pmean(fast(params, x), "data"),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=check,
        )
        close(jax.jit(over_devices)(params, INPUT), plain(params, INPUT))
    shared = jax.pmap(lambda x: lax.pmean(fast(params, x), "data"), axis_name="data", devices=jax.devices()[:2])
    close(shared(INPUT.reshape(2, 3, WIDTH))[0], plain(params, INPUT))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.tanh(jnp.tanh(x @ x) @ x),
        lambda x: norm(x) @ x,
        lambda x: (x + 1) * (x + 2) - x,
        lambda x: sum([x @ x for _ in range(20)]),  # a long sum that one value reads
        lambda x: (lambda y: (y * 2, y + 1))(x + jnp.tanh(x)),
    ],
)
def test_what_is_cheap_is_not_written(function):
    assert written(jax.make_jaxpr(fast_on_cpus(function))(jnp.ones((4, 4))).jaxpr) == 0


def test_a_layer_stays_one_program():
    """Where a layer inside of `jit` is called again and again, jax compiles it once."""
    program = jax.make_jaxpr(fast_on_cpus(loss_of(jax.jit(layer))))(params_of(12), INPUT)
    calls = [eqn.params["jaxpr"] for eqn in program.eqns if eqn.params.get("name") == "layer"]
    assert len(calls) == 12
    assert len(set(map(id, calls))) <= 3  # the first ones know less of their input


def test_sums_in_loops_and_branches_are_written_too():
    params = params_of(4)
    loss = loss_of(layer)

    def total(x):
        x = lax.scan(lambda x, _: (x - 0.1 * jax.grad(loss, 1)(params, x), None), x, length=2)[0]
        return lax.cond(x[0, 0] > 0, lambda: loss(params, x), lambda: 0.0)

    program = jax.make_jaxpr(fast_on_cpus(total))(INPUT).jaxpr
    inside = {eqn.primitive.name: written(program.replace(eqns=[eqn])) for eqn in program.eqns}
    assert inside["scan"] >= 6
    assert inside["cond"] == 3
    np.testing.assert_allclose(fast_on_cpus(total)(INPUT), total(INPUT), rtol=2e-5)


@pytest.mark.skipif(BEFORE_0_11, reason="XLA of jax 0.10 drops a barrier before it decides what it computes again")
@pytest.mark.parametrize(
    "options",
    [{"engine": engine} for engine in ("shard_map", "pmap", "jit")] + [{"accumulate": 3}, {"remat": True}],
    ids=str,
)
def test_the_program_of_a_step_grows_with_the_layers(options):
    def additions(count):
        loss = lambda params, batch: loss_of(layer)(params, batch["x"])  # noqa: E731
        state, step = train.start(params_of(count), optax.sgd(0.1), loss, devices=jax.devices()[:2], **options)
        batch = {"x": jax.ShapeDtypeStruct(INPUT.shape, jnp.float32)}
        text = step.lower(state, batch).compile().as_text()
        return len(re.findall(r" add\(", text))

    few, more, many = additions(3), additions(6), additions(12)
    assert many - more <= 2.2 * (more - few)


@pytest.mark.skipif(BEFORE_0_11, reason="XLA of jax 0.10 drops a barrier before it decides what it computes again")
@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint])
def test_layers_of_one_sum_that_are_programs(around):
    """The sum of a layer is a result of its program, and only the next layer reads it more than once."""

    @around
    def half(weights, x):
        return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]

    def additions(count):
        gradient = fast_on_cpus(jax.value_and_grad(loss_of(half)))
        return len(re.findall(r" add\(", jax.jit(gradient).lower(params_of(count), INPUT).compile().as_text()))

    few, more, many = additions(3), additions(6), additions(12)
    assert many - more <= 2.2 * (more - few)


def test_random_keys_that_are_chosen():
    def function(chosen, first, second):
        keys = jnp.where(chosen, first, second)
        return sum(jax.vmap(lambda key, i=i: jax.random.normal(jax.random.fold_in(key, i)))(keys) for i in range(5))

    args = jnp.array([True, False]), jax.random.split(jax.random.key(0)), jax.random.split(jax.random.key(1))
    assert written(jax.make_jaxpr(fast_on_cpus(function))(*args).jaxpr) == 1
    np.testing.assert_allclose(jax.jit(fast_on_cpus(function))(*args), function(*args), rtol=1e-5)
