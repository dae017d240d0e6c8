"""The formulas for CPUs against XLA's own convolution: values, derivatives of both modes, mapped and sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_model import near, normal
from jax import lax
from jax.sharding import PartitionSpec as P
from kv_model import on_mesh

from jaxpar._cpu import lenet_layers


def reference(x_WxCxHxN, weight, bias):
    """The same by `lax.conv_general_dilated` and `lax.reduce_window`."""
    y = lax.conv_general_dilated(
        x_WxCxHxN, weight, (1, 1), "VALID", dimension_numbers=("WCHN", "HWIO", "WCHN"), precision="highest"
    )
    y = jax.nn.relu(y + bias[None, :, None, None])
    return lax.reduce_window(y, 0.0, lax.add, (2, 1, 2, 1), (2, 1, 2, 1), "VALID") / 4


def reference_direct(x_WxHxN, weight, bias):
    return reference(x_WxHxN[:, None], weight, bias)


def winograd_case(height=12, window=5, channels=3, out=4, batch=6):
    return normal(lenet_layers.WIDTH, channels, height, batch), normal(window, 5, channels, out), normal(out)


def direct_case(width=9, height=12, window=(3, 3), out=4, batch=6):
    return normal(width, height, batch), normal(*window, 1, out), normal(out)


CASES = {
    "winograd": (lenet_layers.winograd, reference, winograd_case()),
    "direct": (lenet_layers.direct, reference_direct, direct_case()),
}
both = pytest.mark.parametrize(("fast", "plain", "args"), CASES.values(), ids=CASES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "args",
    [
        winograd_case(),
        winograd_case(height=13),  # an odd row is left out
        winograd_case(window=3),
        winograd_case(height=2, window=1),
        winograd_case(channels=1, out=1, batch=1),
        winograd_case(channels=20, out=50, batch=17),
    ],
)
def test_winograd_is_convolution_relu_and_mean(args):
    near(jax.jit(lenet_layers.winograd)(*args), jax.jit(reference)(*args))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "args",
    [
        direct_case(),
        direct_case(width=10, height=13),  # an odd row and column are left out
        direct_case(window=(5, 2)),
        direct_case(width=2, height=2, window=(1, 1), out=1, batch=1),
        direct_case(width=18, height=28, out=20, batch=33),
    ],
)
def test_direct_is_convolution_relu_and_mean(args):
    near(jax.jit(lenet_layers.direct)(*args), jax.jit(reference_direct)(*args))


def loss(f):
    return lambda *args: (f(*args) ** 2).sum()


@pytest.mark.slow
@both
@pytest.mark.parametrize("arguments", [(0, 1, 2), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3))])
def test_gradients_of_all_arguments_and_of_one(fast, plain, args, arguments):
    """The rules leave out what has no tangent."""
    near(jax.jit(jax.grad(loss(fast), arguments))(*args), jax.jit(jax.grad(loss(plain), arguments))(*args))


def along(f, args):
    """The value and its derivative in one direction."""
    return jax.jit(lambda *args: jax.jvp(f, args, jax.tree.map(jnp.cos, args)))(*args)


@pytest.mark.slow
@both
def test_forward_mode(fast, plain, args):
    near(along(fast, args), along(plain, args))


@pytest.mark.slow
@both
def test_second_derivatives(fast, plain, args):
    first = jax.grad(loss(fast), (0, 1, 2)), jax.grad(loss(plain), (0, 1, 2))
    near(*(along(gradient, args) for gradient in first), rtol=1e-5)


@both
def test_jit_and_vmap(fast, plain, args):
    x, weight, bias = args
    several, plain = np.stack([weight, 2 * weight, -weight]), jax.jit(plain)
    near(jax.jit(jax.vmap(fast, (None, 0, None)))(x, several, bias), np.stack([plain(x, w, bias) for w in several]))


@pytest.mark.slow
@both
def test_over_devices_jax_adds_the_gradients_up(fast, plain, args):
    """Where JAX checks, it sums by itself. test_lenet.py has steps of both engines, which do not check."""
    ours, plain = (jax.grad(loss(f), (1, 2)) for f in (fast, plain))
    in_specs = (P(*[None] * (args[0].ndim - 1), "data"), P(), P())
    near(on_mesh(ours, jax.devices()[:2], in_specs, check_vma=True)(*args), jax.jit(plain)(*args))


def test_toom_cook_is_exact_but_for_rounding():
    of_points, of_weight, of_input = lenet_layers._toom_cook()
    x, w = np.random.default_rng(1).standard_normal((2, 8))
    w = w[:5]
    wanted = np.correlate(x, w, "valid")
    np.testing.assert_allclose(of_points @ ((of_weight @ w) * (of_input @ x)), wanted, rtol=0, atol=1e-12)
    # Its scales are powers of two, so that they do not round: each entry stays a multiple of a small one.
    assert (of_input * 64 == np.round(of_input * 64)).all()


@pytest.mark.slow
def test_dead_units_have_no_gradient():
    x, weight, _ = direct_case()
    bias = jnp.full(4, -1e3)
    assert not np.any(jax.jit(jax.grad(loss(lenet_layers.direct), 1))(x, weight, bias))
