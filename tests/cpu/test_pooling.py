"""Pooling by slices: `models.max_pool` and `avg_pool` give what Flax's give, and the formulas what lax's own gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_model import normal, text
from jax import lax
from world import mostly_slow

from jaxpar import models, viz
from jaxpar.models import fast_on_cpus

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
    """With many equal entries, as after a ReLU. They are whole numbers, whose sums are exact in any order."""
    return np.random.default_rng(0).integers(-2, 3, shape).astype(dtype)


def reduced(x, init, operation, window, strides, padding):
    around = x.ndim - 1 - len(window)
    strides = strides or (1,) * len(window)
    sizes, steps = ((1,) * around + values + (1,) for values in (window, strides))
    pads = padding if isinstance(padding, str) else ((0, 0),) * around + padding + ((0, 0),)
    return lax.reduce_window(x, init, operation, sizes, steps, pads)


def gradient(fn, x):
    y, pull = jax.vjp(fn, x)
    return pull(jnp.asarray(np.random.default_rng(1).integers(-9, 10, y.shape), y.dtype))[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", mostly_slow(CASES, "halves", "overlapping"))
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
    x = images((1, 4, 4, 1))
    x[0, 0, 0], x[0, 1, 3], x[0, 2:] = np.nan, np.nan, -np.inf
    found = models.max_pool(x, (2, 2), (2, 2))
    np.testing.assert_array_equal(found.ravel(), [jnp.nan, jnp.nan, -jnp.inf, -jnp.inf])


@pytest.mark.slow
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
    with pytest.raises(ValueError, match=r"avg_pool: a window of \(9, 9\) has more than 64 .*the mean over the axes"):
        models.avg_pool(images((1, 9, 9, 1)), (9, 9))
    with pytest.raises(ValueError, match=r"max_pool: a window of \(1, 8\) is larger than inputs of \(2, 6, 6, 3\)"):
        models.max_pool(x, (1, 8))


def test_a_picture_knows_it():
    def net(x):
        return models.avg_pool(models.max_pool(x, (2, 2), (2, 2)), (3, 3))

    assert [layer.op for layer in viz.trace(net, images((2, 6, 6, 3))).layers] == ["Pooling", "Pooling"]


# ---- the formulas: size of a window, strides, padding, over images of this size


SIZE = (3, 9, 8, 2)
POOLS = {
    "halves": ((2, 2), (2, 2), "VALID"),
    "thirds and halves": ((3, 2), (3, 2), "VALID"),
    "one axis": ((1, 2), (1, 2), "VALID"),
    "windows that overlap": ((3, 3), (2, 2), "SAME"),
    "strides of 1": ((3, 3), (1, 1), "SAME"),
    "windows apart": ((2, 2), (3, 3), "VALID"),
    "halves, padded": ((2, 2), (2, 2), ((1, 0), (1, 1))),
    "one-sided padding": ((3, 3), (1, 1), ((2, 0), (0, 1))),
    "long windows": ((5, 4), (2, 3), ((2, 1), (0, 3))),
    "windows outside": ((2, 2), (2, 2), ((4, 0), (0, 3))),
    "one window": ((9, 8), (1, 1), "VALID"),
}
MAX, SUM = (-jnp.inf, lax.max), (0.0, lax.add)


def pool(kind, name):
    return lambda x: reduced(x, *kind, *POOLS[name])


def transposed(function):
    return lambda x, cotangent: jax.vjp(function, x)[1](cotangent)[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [MAX, SUM], ids=["max", "sum"])
@pytest.mark.parametrize("name", POOLS)
def test_formulas_give_the_numbers_of_lax_to_the_bit(kind, name):
    function, x = pool(kind, name), images(SIZE)
    y = function(x)
    np.testing.assert_array_equal(jax.jit(fast_on_cpus(function))(x), y)
    cotangent = np.random.default_rng(1).integers(-9, 10, y.shape).astype(y.dtype)
    of_lax = transposed(function)
    np.testing.assert_array_equal(jax.jit(fast_on_cpus(of_lax))(x, cotangent), of_lax(x, cotangent))
    ours = transposed(fast_on_cpus(function))  # derivatives of the replaced function
    np.testing.assert_array_equal(jax.jit(ours)(x, cotangent), of_lax(x, cotangent))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["halves", "windows that overlap", "windows apart", "one-sided padding"])
@pytest.mark.parametrize("kind", ["normal", "mostly minus infinity", "bfloat16"])
def test_the_gradient_of_max_pooling_to_the_bit(name, kind):
    x = normal(2, 9, 8, 3)
    if kind != "normal":
        x = x.astype(jnp.bfloat16) if kind == "bfloat16" else np.where(normal(2, 9, 8, 4)[..., :3] < 1, -np.inf, x)
    function = pool(MAX, name)
    y = function(x)
    cotangent = normal(*y.shape, 1)[..., 0].round().astype(y.dtype)  # sums without rounding: their order is free
    of_lax = transposed(function)
    np.testing.assert_array_equal(jax.jit(fast_on_cpus(of_lax))(x, cotangent), jax.jit(of_lax)(x, cotangent))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, jnp.bfloat16, np.float16])
def test_formulas_of_other_dtypes(dtype):
    x = np.abs(images(SIZE)).astype(dtype)
    least = -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min
    for kind in ((np.asarray(least, dtype), lax.max), (np.zeros((), dtype), lax.add)):
        function = lambda x, kind=kind: reduced(x, *kind, (3, 3), (2, 2), "SAME")  # noqa: E731
        found = jax.jit(fast_on_cpus(function))(x)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, jax.jit(function)(x))


def test_what_is_not_finite():
    x = images(SIZE)
    x[0, 0, 0, 0], x[1, 1, 1, 1], x[2] = np.nan, np.inf, -np.inf
    for kind in (MAX, SUM):
        for name in ("halves", "windows that overlap"):
            np.testing.assert_array_equal(fast_on_cpus(pool(kind, name))(x), pool(kind, name)(x))


def test_a_batch_of_them_and_second_derivatives():
    function = pool(SUM, "windows that overlap")
    stacked = np.stack([images(SIZE), 2 * images(SIZE)])
    np.testing.assert_array_equal(jax.vmap(fast_on_cpus(function))(stacked), jax.vmap(function)(stacked))
    bent = lambda x: (function(x) ** 3).sum()  # noqa: E731
    ours, plain = (jax.grad(lambda x, f=f: (jax.grad(f)(x) ** 2).sum()) for f in (fast_on_cpus(bent), bent))
    np.testing.assert_allclose(jax.jit(ours)(images(SIZE)), jax.jit(plain)(images(SIZE)), rtol=1e-5)


@pytest.mark.parametrize(("size", "window", "cut"), [(3, 5, 0), (4, 2, -1), (4, 2, -2)])
def test_windows_that_do_not_fit_and_padding_that_cuts(size, window, cut):
    x = np.arange(2 * size * size, dtype=np.float32).reshape(2, size, size, 1)
    for kind in (MAX, SUM):
        function = lambda x, kind=kind: reduced(x, *kind, (window,) * 2, None, ((cut, cut),) * 2)  # noqa: E731
        y = function(x)
        np.testing.assert_array_equal(jax.jit(fast_on_cpus(function))(x), y)
        if kind is SUM or cut == 0:  # lax has no gradient of a maximum there
            of_lax = transposed(function)
            np.testing.assert_array_equal(jax.jit(fast_on_cpus(of_lax))(x, y), of_lax(x, y))


def test_no_array_of_the_images_size_is_between_a_relu_and_its_gradient():
    x = np.zeros((8, 32, 32, 16), np.float32)
    gradient = fast_on_cpus(jax.grad(lambda x: (pool(MAX, "halves")(jax.nn.relu(x)) ** 2).sum()))
    memory = jax.jit(gradient).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < x.nbytes / 2 < memory.output_size_in_bytes


@pytest.mark.parametrize("kind", [MAX, SUM], ids=["max", "sum"])
def test_no_padded_array_is_written_down_where_windows_have_strides(kind):
    x = np.zeros((8, 32, 32, 16), np.float32)
    memory = jax.jit(fast_on_cpus(pool(kind, "windows that overlap"))).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < x.nbytes / 8


def test_where_slices_take_the_place_of_windows():
    x = images(SIZE)
    for kind in (MAX, SUM):
        assert "reduce_window" not in text(fast_on_cpus(pool(kind, "halves")), x)
        assert "reduce_window" in text(fast_on_cpus(pool(kind, "one window")), x)  # 72 places
    back = fast_on_cpus(transposed(pool(SUM, "halves")))
    assert "reduce_window" not in text(back, x, pool(SUM, "halves")(x))  # each entry is copied into its window
    for kind in (MAX, SUM):  # compared and added as float32, since processors without bfloat16 convert each view
        halves = text(fast_on_cpus(pool(kind, "halves")), x.astype(jnp.bfloat16))
        assert "reduce_window" not in halves
        assert halves.count("bf16>") < 8, halves
    apart = lambda x: lax.reduce_window(  # noqa: E731
        x, *SUM, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", window_dilation=(1, 2, 2, 1)
    )
    assert "reduce_window" in text(fast_on_cpus(apart), x)
    np.testing.assert_array_equal(fast_on_cpus(apart)(x), apart(x))
