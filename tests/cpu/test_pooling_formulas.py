"""Pooling by slices: the numbers of lax's, forward and in the gradient, and where lax's own stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_model import normal
from jax import lax

from jaxpar.models import fast_on_cpus

# Size of a window, strides, padding, over images of 9 x 8.
POOLS = {
    "halves": ((2, 2), (2, 2), "VALID"),
    "thirds and halves": ((3, 2), (3, 2), "VALID"),
    "one axis": ((1, 2), (1, 2), "VALID"),
    "windows that overlap": ((3, 3), (2, 2), "SAME"),
    "strides of 1": ((3, 3), (1, 1), "SAME"),
    "windows apart": ((2, 2), (3, 3), "VALID"),
    "halves, padded": ((2, 2), (2, 2), ((0, 0), (1, 0), (1, 1), (0, 0))),
    "one-sided padding": ((3, 3), (1, 1), ((0, 0), (2, 0), (0, 1), (0, 0))),
    "one window": ((9, 8), (1, 1), "VALID"),
}
MAX, SUM = (-jnp.inf, lax.max), (0.0, lax.add)


def pool(kind, name):
    size, strides, padding = POOLS[name]
    return lambda x: lax.reduce_window(x, *kind, (1, *size, 1), (1, *strides, 1), padding)


def images(dtype=np.float32):
    """Whole numbers, whose sums are exact in any order."""
    return np.random.default_rng(0).integers(-9, 10, (3, 9, 8, 2)).astype(dtype)


def transposed(function):
    return lambda x, cotangent: jax.vjp(function, x)[1](cotangent)[0]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [MAX, SUM], ids=["max", "sum"])
@pytest.mark.parametrize("name", POOLS)
def test_the_numbers_of_lax_to_the_bit(kind, name):
    function, x = pool(kind, name), images()
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
def test_other_dtypes(dtype):
    x = np.abs(images()).astype(dtype)
    least = -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min
    for init, operation in ((np.asarray(least, dtype), lax.max), (np.zeros((), dtype), lax.add)):
        function = lambda x, init=init, operation=operation: lax.reduce_window(  # noqa: E731
            x, init, operation, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
        )
        found = jax.jit(fast_on_cpus(function))(x)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, jax.jit(function)(x))


def test_what_is_not_finite():
    x = images()
    x[0, 0, 0, 0], x[1, 1, 1, 1], x[2] = np.nan, np.inf, -np.inf
    for kind in (MAX, SUM):
        for name in ("halves", "windows that overlap"):
            np.testing.assert_array_equal(fast_on_cpus(pool(kind, name))(x), pool(kind, name)(x))


def test_a_batch_of_them_and_second_derivatives():
    function = pool(SUM, "windows that overlap")
    stacked = np.stack([images(), 2 * images()])
    np.testing.assert_array_equal(jax.vmap(fast_on_cpus(function))(stacked), jax.vmap(function)(stacked))
    bent = lambda x: (function(x) ** 3).sum()  # noqa: E731
    ours, plain = (jax.grad(lambda x, f=f: (jax.grad(f)(x) ** 2).sum()) for f in (fast_on_cpus(bent), bent))
    np.testing.assert_allclose(jax.jit(ours)(images()), jax.jit(plain)(images()), rtol=1e-5)


@pytest.mark.parametrize(("size", "window", "cut"), [(3, 5, 0), (4, 2, -1), (4, 2, -2)])
def test_windows_that_do_not_fit_and_padding_that_cuts(size, window, cut):
    x = np.arange(2 * size * size, dtype=np.float32).reshape(2, size, size, 1)
    pads = ((0, 0), (cut, cut), (cut, cut), (0, 0))
    for kind in (MAX, SUM):
        function = lambda x, kind=kind: lax.reduce_window(x, *kind, (1, window, window, 1), (1, 1, 1, 1), pads)  # noqa: E731
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


def text(function, *args):
    return jax.jit(fast_on_cpus(function)).lower(*args).as_text()


def test_where_slices_take_the_place_of_windows():
    x = images()
    for kind in (MAX, SUM):
        assert "reduce_window" not in text(pool(kind, "halves"), x)
        assert "reduce_window" in text(pool(kind, "one window"), x)  # 72 places
    y = pool(SUM, "halves")(x)
    assert "reduce_window" not in text(transposed(pool(SUM, "halves")), x, y)  # each entry is copied into its window
    assert "reduce_window" not in text(pool(SUM, "halves"), x.astype(jnp.bfloat16))
    apart = lambda x: lax.reduce_window(  # noqa: E731
        x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", window_dilation=(1, 2, 2, 1)
    )
    assert "reduce_window" in text(apart, x)
    np.testing.assert_array_equal(fast_on_cpus(apart)(x), apart(x))
