"""A training step computes anyone's convolutions, products and pooling by the formulas that are fast on CPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cpu_model import close, normal, text
from jax import lax
from jax.sharding import PartitionSpec as P
from kv_model import on_mesh

from jaxpar import kv, train
from jaxpar._cpu import for_platform
from jaxpar.models import fast_on_cpus
from jaxpar.train._step import programs

NUMBERS = ("NHWC", "HWIO", "NHWC")


PARAMS = {"conv": normal(3, 3, 3, 4), "dense": normal(4, 5), "out": normal(5, 2)}
BATCH = {"x": normal(128, 6, 6, 3), "y": normal(128, 3, 3, 2)}


def loss_fn(params, batch, rng):
    x = lax.conv_general_dilated(batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=NUMBERS)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jnp.tanh(x @ params["dense"])
    return ((x @ params["out"] - batch["y"]) ** 2).mean(), {"largest": x.max()}


def gradient(loss=loss_fn):
    return jax.value_and_grad(lambda params, batch: loss(params, batch, None), has_aux=True)


def slow_parts(function, *args):
    """How many searches in windows, convolutions with large windows, and products over several axes there are."""
    lowered = text(function, *args)
    filters = re.findall(r"stablehlo.convolution.*: \(tensor<\S+>, tensor<(\d+)x(\d+)x", lowered)
    return {
        "searches": lowered.count("stablehlo.select_and_scatter"),
        "large windows": sum(int(size) > 5 for shape in filters for size in shape),
        "summed axes": len(re.findall(r"dot_general.* contracting_dims = \[\d+, ", lowered)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pmap", "shard_map", "jit"])
@pytest.mark.parametrize("count", [4, 1])
def test_a_step_has_the_gradient_of_lax(engine, count):
    state, step = train.start(PARAMS, optax.sgd(0.1), loss_fn, engine=engine, devices=jax.devices()[:count])
    new, metrics = step(state, BATCH)
    (loss, aux), grads = jax.jit(gradient())(PARAMS, BATCH)
    close(kv.to_params(new.store), jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads))
    close([metrics["loss"]], [loss])
    assert aux.keys() < metrics.keys()


def test_what_is_slow_on_cpus_is_gone():
    before, after = (slow_parts(f, PARAMS, BATCH) for f in (gradient(), fast_on_cpus(gradient())))
    assert all(before.values())
    assert after == dict.fromkeys(after, 0)


def test_a_step_for_other_devices_is_left_as_it_is(monkeypatch):
    """A GPU's program is lax's own, in a loop too, and the loss is traced once for both."""
    platforms, traced = [], []

    def for_gpus(function, platform, *_):
        platforms.append(platform)
        assert for_platform(function, "gpu") is function
        return function

    def loss(params, batch, rng):
        traced.append(rng)
        return loss_fn(params, batch, rng)

    monkeypatch.setattr(programs, "for_platform", for_gpus)
    state, step = train.start(PARAMS, optax.sgd(0.1), loss, devices=jax.devices()[:1])
    for batch, many in ((BATCH, False), (jax.tree.map(lambda x: x[None], BATCH), True)):
        lowered = step.lower(state, batch, many=many).as_text()
        assert "select_and_scatter" in lowered
        assert "convolution_in_loop" not in lowered
    assert set(platforms) == {"cpu"}
    assert len(traced) == 1  # once for both programs


def in_scan(params, batch, rng):
    return lax.scan(lambda total, _: (total + loss_fn(params, batch, rng)[0], None), 0.0, None, 2)[0], {}


def in_branch(params, batch, rng):
    return lax.cond(batch["y"][0, 0, 0, 0] > -9, lambda: loss_fn(params, batch, rng)[0], lambda: 0.0), {}


@jax.custom_vjp
def identity(x):
    return x


identity.defvjp(lambda x: (x, None), lambda _, cotangent: (jax.tree.map(lambda x: 2 * x, cotangent),))


def nested(params, batch, rng):
    inner = jax.checkpoint(jax.jit(lambda params: loss_fn(identity(params), batch, rng)[0]))
    return inner(params), {}


def over_batch(params, batch, rng):
    one = lambda x, y: loss_fn(params, {"x": x[None], "y": y[None]}, rng)[0]  # noqa: E731
    return jax.vmap(one)(batch["x"], batch["y"]).mean(), {}


@pytest.mark.slow
@pytest.mark.parametrize("loss", [in_scan, in_branch, nested, over_batch])
def test_inside_of_other_programs(loss):
    plain, ours = gradient(loss), fast_on_cpus(gradient(loss))
    before = slow_parts(plain, PARAMS, BATCH)
    assert all(before.values())
    close(jax.jit(ours)(PARAMS, BATCH), jax.jit(plain)(PARAMS, BATCH))
    assert slow_parts(ours, PARAMS, BATCH) == dict.fromkeys(before, 0)


@pytest.mark.slow
def test_inside_of_shard_map_and_vmap_and_derivatives():
    mean = lambda p, b: lax.pmean(fast_on_cpus(gradient())(p, b)[1], "data")  # noqa: E731
    wanted = jax.jit(gradient())(PARAMS, BATCH)[1]
    close(on_mesh(mean, jax.devices()[:4], (P(), P("data")))(PARAMS, BATCH), wanted)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    ours, plain = (jax.jit(jax.vmap(f, (0, None))) for f in (fast_on_cpus(gradient()), gradient()))
    close(ours(stacked, BATCH), plain(stacked, BATCH))
    second = [jax.jit(jax.grad(lambda p, f=f: optax.tree.norm(f(p, BATCH)[1]))) for f in (
        fast_on_cpus(gradient()), gradient())]  # fmt: skip
    close(second[0](PARAMS), second[1](PARAMS))


PRODUCTS = {
    "two summed axes": ((3, 4, 5), (3, 4, 6), (((0, 1), (0, 1)), ((), ()))),
    "in another order": ((3, 4, 5), (4, 3, 6), (((0, 1), (1, 0)), ((), ()))),
    "apart": ((3, 5, 4), (3, 4, 6), (((0, 2), (0, 1)), ((), ()))),
    "at the end": ((5, 3, 4), (6, 3, 4), (((1, 2), (1, 2)), ((), ()))),
    "a batch": ((2, 3, 4, 5), (2, 3, 4, 6), (((1, 2), (1, 2)), ((0,), (0,)))),
    "everything": ((3, 4), (3, 4), (((0, 1), (0, 1)), ((), ()))),
    "none": ((3, 4), (5, 6), (((), ()), ((), ()))),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
def test_products_of_lax(name, dtype):
    left, right, numbers = PRODUCTS[name]
    a, b = ((10 * normal(*shape)).round().astype(dtype) for shape in (left, right))
    product = lambda a, b: lax.dot_general(a, b, numbers, preferred_element_type=np.float32)  # noqa: E731
    np.testing.assert_array_equal(fast_on_cpus(product)(a, b), product(a, b))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_sums_of_half_precision_are_of_float32(dtype):
    x = jnp.asarray(normal(37, 4, 5), dtype)

    def squares(x):
        return (x * x).sum((0, 1), dtype=dtype)

    def by_hand(x):
        return (x * x).astype(np.float32).sum((0, 1)).astype(dtype)

    whole = lambda f: lambda x: jax.grad(lambda x: f(x)[0])(x)  # noqa: E731
    for transformed in (lambda f: f, jax.vmap, lambda f: jax.vmap(jax.vmap(f)), whole):
        given = jnp.stack([jnp.stack([x])]) if transformed is not whole else x
        wanted = jax.jit(transformed(by_hand))(given)
        np.testing.assert_array_equal(jax.jit(fast_on_cpus(transformed(squares)))(given), wanted)
        np.testing.assert_array_equal(jax.jit(transformed(fast_on_cpus(squares)))(given), wanted)
    assert "reduce_sum[" in str(jax.make_jaxpr(fast_on_cpus(squares))(x))


def test_lines_of_source_and_names_stay():
    def named(x):
        with jax.named_scope("my_layer"):
            return jnp.tensordot(x, x, 3)

    compiled = jax.jit(fast_on_cpus(named)).lower(normal(2, 3, 4)).compile().as_text()
    assert "my_layer" in compiled
    assert "test_formulas.py" in compiled


def test_what_else_a_function_does(capfd):
    def effects(x):
        jax.debug.print("the sum is {}", x.sum(), ordered=True)
        return {"y": x @ x, "key": jax.random.key(0), "none": None}

    result = jax.jit(fast_on_cpus(effects))(jnp.eye(2))
    jax.effects_barrier()
    assert capfd.readouterr().out == "the sum is 2.0\n"
    assert result["none"] is None
    assert jax.dtypes.issubdtype(result["key"].dtype, jax.dtypes.prng_key)


@pytest.mark.slow
def test_a_pallas_kernel_is_left_as_it_is():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(a, b, out):
        out[...] = a[...] @ b[...]

    def product(a, b):
        return pallas.pallas_call(kernel, jax.ShapeDtypeStruct((8, 8), np.float32), interpret=True)(a, b)

    close(jax.jit(fast_on_cpus(product))(normal(8, 8), normal(8, 8)), normal(8, 8) @ normal(8, 8))


@jax.custom_jvp
def square(x):
    return x @ x


square.defjvp(lambda primals, tangents: (square(*primals), 3 * tangents[0] @ primals[0]))

ANY = {
    "a rule of its own, not differentiated": lambda x: jax.nn.relu(square(identity(x))),
    "differentiated after": jax.grad(lambda x: fast_on_cpus(lambda x: square(identity(x)))(x).sum()),
    "forward mode": lambda x: jax.jvp(fast_on_cpus(lambda x: jax.nn.gelu(square(x))), (x,), (x,)),
    "a loop": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ x)), (0, x))[1],
    "branches": lambda x: lax.switch(jnp.int32(1), [lambda x: x, lambda x: x @ x], x),
    "a solver": jax.grad(lambda x: jnp.linalg.solve(x + 9 * jnp.eye(4), x).sum()),
    "a callback": lambda x: jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct((4, 4), np.float32), x),
    "twice": fast_on_cpus(lambda x: fast_on_cpus(square)(x) @ x),
    "integers": lambda x: jax.vjp(lambda x, i: x[i], x, jnp.array([1, 0]))[1](x[:2])[0],
    "a policy": jax.grad(jax.checkpoint(lambda x: jnp.sin(x @ x).sum(), policy=jax.checkpoint_policies.dots_saveable)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("how", [jax.jit, pytest.param(lambda f: f, marks=pytest.mark.slow)], ids=["jit", "eager"])
def test_any_function(name, how):
    close(how(fast_on_cpus(ANY[name]))(normal(4, 4)), how(ANY[name])(normal(4, 4)))
