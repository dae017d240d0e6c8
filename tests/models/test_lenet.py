"""LeNet's faster formulas on a CPU are LeNet: logits, gradients, training; elsewhere it is computed as written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cpu_model import near

from jaxpar import train
from jaxpar.models import lenet

BATCH = 16
# The formulas that a CPU takes, and those of every other platform; a program of each for all tests.
apply, as_written = jax.jit(lenet.apply), jax.jit(lenet._anywhere)


def images(n=BATCH, seed=1):
    return np.random.default_rng(seed).random((n, 28, 28, 1), np.float32)


@functools.cache
def first():
    return jax.tree.map(np.asarray, jax.jit(lenet.init)(jax.random.key(0)))


@pytest.fixture
def params():
    """Large enough that no layer is lost in rounding."""
    return jax.tree.map(lambda x: 5 * x + np.float32(0.05 * (x.ndim == 1)), first())


def loss(apply):
    return lambda params, images: (apply(params, images) ** 2).sum()


gradients = jax.jit(jax.grad(loss(lenet.apply), (0, 1)))


def convolutions(fn, *args):
    return fn.lower(*args).compile().as_text().count(" convolution(")


@pytest.mark.slow
@pytest.mark.parametrize("n", [pytest.param(8, marks=pytest.mark.slow), 33])
def test_logits_of_any_batch(params, n):
    near(apply(params, images(n)), as_written(params, images(n)))


@pytest.mark.slow
def test_gradients(params):
    inputs = params, images()
    given = gradients(*inputs)
    with jax.enable_x64(True):  # in float32, jax 0.10.0 sums a bias's gradient as written 4e-6 away from this
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), inputs)
        near(given, jax.jit(jax.grad(loss(lenet._anywhere), (0, 1)))(*exact))


@pytest.mark.slow
def test_on_a_cpu_no_convolution_is_left_and_no_condition(params):
    text = gradients.lower(params, images()).compile().as_text()
    assert " convolution(" not in text
    assert " conditional(" not in text
    assert convolutions(as_written, params, images()) == 2


def test_other_platforms_get_xlas_convolutions(params):
    for platform in ("cuda", "tpu"):
        text = apply.trace(params, images()).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.convolution") == 2


@pytest.mark.parametrize("n", [1, 7])
def test_small_batches_are_computed_as_written(params, n):
    assert convolutions(apply, params, images(n)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_dtypes_are_computed_as_written(params, dtype):
    params, x = jax.tree.map(lambda x: x.astype(dtype), (params, images()))
    logits = apply(params, x)
    assert logits.dtype == dtype
    np.testing.assert_array_equal(np.asarray(logits), as_written(params, x))


def test_no_batch_at_all(params):
    assert apply(params, images(0)).shape == (0, 10)


@pytest.mark.slow  # tests/cpu/test_lenet_layers.py has its layers
def test_vmap_over_models(params):
    several = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    wanted = jnp.stack([as_written(jax.tree.map(lambda x, i=i: x[i], several), images()) for i in range(2)])
    near(jax.vmap(lenet.apply, (0, None))(several, images()), wanted)


@pytest.mark.slow  # tests/cpu/test_lenet_layers.py has its layers
def test_hessian_times_a_vector(params):
    direction = jax.tree.map(jnp.cos, params)

    def product(apply):
        gradient = jax.grad(loss(apply))
        return jax.jit(lambda p, x: jax.jvp(lambda p: gradient(p, x), (p,), (direction,))[1])(params, images())

    near(product(lenet.apply), product(as_written), rtol=1e-5)


@pytest.mark.slow
def test_steps_have_the_loss_curve_of_the_plain_formulation(engine):
    """From the recipe's weights, at its learning rate. From larger weights training is chaotic: pixels changed by
    1e-7 change the plain formulation's own curve by more than the formulas do."""
    rng, steps = np.random.default_rng(0), 40
    labels = rng.integers(0, 10, steps * BATCH, dtype=np.int32)
    pixels = rng.random((10, 28, 28, 1), np.float32)[labels]

    def curve(apply):
        where, losses = {"engine": engine, "devices": jax.devices()[:2]}, []
        state, step = train.start(first(), optax.sgd(0.2), train.classification_loss(apply), **where)
        for i in range(steps):
            at = slice(BATCH * i, BATCH * (i + 1))
            state, metrics = step(state, {"image": pixels[at], "label": labels[at]})
            losses.append(float(metrics["loss"]))
        return np.array(losses)

    np.testing.assert_allclose(curve(lenet.apply), curve(lenet._anywhere), rtol=1e-4)


@pytest.mark.slow
def test_it_is_exported_for_batches_of_any_size(params):
    (size,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((size, 28, 28, 1), jnp.float32)
    exported = jax.export.export(apply, platforms=["cpu", "cuda"])(params, shape)
    again = jax.export.deserialize(exported.serialize())
    for n in (1, 33):
        np.testing.assert_allclose(again.call(params, images(n)), apply(params, images(n)), rtol=1e-4, atol=1e-8)
