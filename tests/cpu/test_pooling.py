"""`models.max_pool` and `avg_pool` give what Flax's give, and their gradients are those of XLA's search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar import models, viz

CASES = {
    "halves": ((4, 8, 6, 3), (2, 2), (2, 2), "VALID"),
    "the last row is left out": ((2, 7, 9, 3), (2, 2), (2, 2), "VALID"),
    "same": ((2, 7, 9, 3), (2, 2), (2, 2), "SAME"),
    "overlapping": ((2, 9, 9, 3), (3, 3), (2, 2), "SAME"),
    "padded": ((2, 8, 8, 3), (3, 2), (3, 2), ((1, 0), (2, 1))),
    "strides of 1": ((2, 6, 6, 3), (3, 3), None, "VALID"),
    "gaps": ((2, 9, 9, 3), (2, 2), (3, 4), "VALID"),
    "one image": ((6, 6, 3), (2, 2), (2, 2), "VALID"),
    "1-D": ((2, 8, 3), (2,), (2,), "VALID"),
    "3-D": ((2, 4, 6, 4, 3), (2, 3, 2), (2, 3, 2), "VALID"),
}


def images(shape, dtype=np.float32):
    """With many equal entries, as after a ReLU."""
    return jnp.asarray(np.random.default_rng(0).integers(-2, 3, shape), dtype)


def reduced(x, init, operation, window, strides, padding):
    around = x.ndim - 1 - len(window)
    strides = strides or (1,) * len(window)
    sizes, steps = ((1,) * around + values + (1,) for values in (window, strides))
    pads = padding if isinstance(padding, str) else ((0, 0),) * around + padding + ((0, 0),)
    return lax.reduce_window(x, init, operation, sizes, steps, pads)


def gradient(fn, x):
    y, pull = jax.vjp(fn, x)
    return pull(jnp.asarray(np.random.default_rng(1).integers(-9, 10, y.shape), y.dtype))[0]


OFTEN = ("halves", "overlapping")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in CASES])
def test_the_numbers_of_lax(case):
    shape, window, strides, padding = CASES[case]
    x = images(shape)
    ours, laxs = (
        lambda x: models.max_pool(x, window, strides, padding),
        lambda x: reduced(x, -jnp.inf, lax.max, window, strides, padding),
    )
    np.testing.assert_array_equal(*(jax.jit(f)(x) for f in (ours, laxs)))
    of_integers = (jax.jit(functools.partial(gradient, f))(x) for f in (ours, laxs))  # sums are exact
    np.testing.assert_array_equal(*of_integers)
    total, counts = map(jax.jit(lambda x: reduced(x, 0.0, lax.add, window, strides, padding)), (x, np.ones_like(x)))
    found = models.avg_pool(x, window, strides, padding)
    np.testing.assert_allclose(found, total / np.float32(np.prod(window)), rtol=1e-6, atol=1e-6)
    found = models.avg_pool(x, window, strides, padding, count_include_pad=False)
    np.testing.assert_allclose(found, total / counts, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_flax():
    nnx = pytest.importorskip("flax.nnx")
    x = images((2, 7, 9, 3))
    for args in (((2, 2), (2, 2)), ((3, 3),), ((3, 3), (2, 2), "SAME"), ((2, 2), (2, 2), ((1, 1), (0, 1)))):
        np.testing.assert_array_equal(models.max_pool(x, *args), nnx.max_pool(x, *args))
        np.testing.assert_allclose(models.avg_pool(x, *args), nnx.avg_pool(x, *args), rtol=1e-6, atol=1e-6)


def test_nan_and_infinity():
    x = images((1, 4, 4, 1)).at[0, 0, 0].set(jnp.nan).at[0, 1, 3].set(jnp.nan).at[0, 2:].set(-jnp.inf)
    found = models.max_pool(x, (2, 2), (2, 2))
    np.testing.assert_array_equal(found.ravel(), [jnp.nan, jnp.nan, -jnp.inf, -jnp.inf])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "uint8"])
def test_other_dtypes(dtype):
    x = images((2, 6, 6, 3)).astype(dtype)
    found = models.max_pool(x, (3, 3), (2, 2), "SAME")
    least = -jnp.inf if dtype == "bfloat16" else jnp.iinfo(dtype).min
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, reduced(x, jnp.asarray(least, dtype), lax.max, (3, 3), (2, 2), "SAME"))


@pytest.mark.slow
def test_transformations():
    x = images((3, 2, 6, 6, 3))

    def pool(x):
        return models.max_pool(x, (2, 2), (2, 2))

    np.testing.assert_array_equal(jax.vmap(pool)(x), pool(x))
    np.testing.assert_array_equal(lax.map(pool, x), pool(x))
    primal, tangent = jax.jvp(pool, (x,), (2 * x,))
    np.testing.assert_array_equal(tangent, 2 * primal)
    grad = jax.grad(lambda x: (pool(x) ** 2).sum())
    np.testing.assert_array_equal(jax.grad(lambda x: (grad(x) ** 2).sum())(x), 4 * grad(x))
    mesh = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, jax.P("data"))
        assert jax.typeof(jax.jit(pool)(split)).sharding.spec[0] == "data"
        np.testing.assert_array_equal(jax.jit(grad)(split), grad(x))


def test_mistakes():
    x = images((2, 6, 6, 3))
    with pytest.raises(ValueError, match=r"max_pool: inputs must be \(\.\.\., 2 spatial .*strides \(2,\)"):
        models.max_pool(x, (2, 2), (2,))
    with pytest.raises(ValueError, match="avg_pool: inputs must be"):
        models.avg_pool(x[0, 0], (2, 2))
    with pytest.raises(ValueError, match=r"max_pool: inputs must be .* got inputs of .*strides"):
        models.max_pool(x, (2, 2), (0, 1))
    with pytest.raises(ValueError, match=r"avg_pool: a window of \(9, 9\) has more than 64 .*the mean over the axes"):
        models.avg_pool(images((1, 9, 9, 1)), (9, 9))
    with pytest.raises(ValueError, match=r"max_pool: a window of \(1, 8\) is larger than inputs of \(2, 6, 6, 3\)"):
        models.max_pool(x, (1, 8))
    with pytest.raises(ValueError, match="max_pool: padding must have a pair for each of the 2 dimensions"):
        models.max_pool(x, (2, 2), (2, 2), ((0, 0),))


def test_a_picture_knows_it():
    def net(x):
        return models.avg_pool(models.max_pool(x, (2, 2), (2, 2)), (3, 3))

    assert [layer.op for layer in viz.trace(net, images((2, 6, 6, 3))).layers] == ["Pooling", "Pooling"]
