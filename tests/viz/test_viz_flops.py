"""FLOPs of single functions and of whole networks, beside XLA's own count and published formulas."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from kv_model import on_mesh
from viz_models import Spec, f32, i32, xla_flops

from jaxpar import viz
from jaxpar.viz._read import costs

X, Y, IDS = Spec((8, 16), f32), Spec((16, 5), f32), Spec((6,), i32)
HALF, COMPLEX = Spec((8, 16), jnp.bfloat16), Spec((8, 16), jnp.complex64)
NEW = jax.__version_info__ >= (0, 12)


def grouped_batches(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", batch_group_count=2)


def pool(x, reduce, start):
    return lax.reduce_window(x, start, reduce, (2, 2), (2, 2), "VALID")


OF_ONE_ARRAY = [
    *(jax.nn.softmax, jax.nn.silu, jnp.exp2, jnp.sinc, jnp.sort, jnp.argsort),
]
COUNTED = {fn.__name__: (fn, X) for fn in OF_ONE_ARRAY} | {
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), X),
    "gelu of halves": (lambda x: jax.nn.gelu(x, approximate=False), HALF),
    "tanh gelu": (jax.nn.gelu, X),
    "gradient of tanh": (lambda x, g: jax.vjp(jnp.tanh, x)[1](g), X, X),
    "sort of 300": (jnp.sort, Spec((3, 100), f32)),
    "argmax": (lambda x: jnp.argmax(x, 1), X),
    "argmin of integers": (lambda x: jnp.argmin(x), IDS),
    "associative_scan": (lambda x: lax.associative_scan(jnp.add, x, axis=1), X),
    "grouped batches of a convolution": (grouped_batches, Spec((4, 3, 8, 8), f32), Spec((6, 3, 3, 3), f32)),
    "sum pooling": (lambda x: pool(x, lax.add, 0.0), X),
    "max pooling": (lambda x: pool(x, lax.max, -jnp.inf), X),
    "a product of windows": (lambda x: pool(x, lax.mul, 1.0), X),
    "gradient of sum pooling": (jax.grad(lambda x: pool(x, lax.add, 0.0).sum()), X),
    "gradient of max pooling": (jax.grad(lambda x: pool(x, lax.max, -jnp.inf).sum()), X),
    "take": (lambda x, ids: x[ids], X, IDS),
    "take with a filling": (lambda x, ids: x.at[ids].get(mode="fill") + x.at[ids, ids].get(mode="fill")[0], X, IDS),
    "scatter within ends": (lambda x, ids: x.at[ids, ids].set(1.0, mode="clip").at[ids].add(1.0, mode="clip"), X, IDS),
    "numbers alone": (lambda x: x * (4 - jnp.float32(2)) + jnp.zeros_like(x) * 0.1, X),
    "variance": (lambda x: jnp.var(x, ddof=1), X),
    "gradient of a cast": (jax.grad(lambda x: (x.astype(jnp.bfloat16) ** 2).astype(f32).sum()), X),
    "scatter_add": (lambda x, ids: x.at[ids].add(1.0), X, IDS),
    "scatter_max": (lambda x, ids: x.at[ids].max(1.0), X, IDS),
    "segment_sum": (lambda x, ids: jax.ops.segment_sum(x, ids, 4), Spec((6, 512), f32), IDS),
    "matrix product": (jnp.dot, X, Y),
    "complex product": (jnp.dot, COMPLEX, Spec((16, 5), jnp.complex64)),
    "random bits": (lambda key: jax.random.bits(key, (1000,)), jax.random.key(0)),
    "normal": (lambda key: jax.random.normal(key, (1000,)), jax.random.key(0)),
    "dropout": (lambda key, x: jnp.where(jax.random.bernoulli(key, 0.5, (8, 16)), x, 0), jax.random.key(0), X),
    "several cases": (lambda x, n: lax.select_n(n, x, x + 1, x + 2), X, Spec((8, 16), i32)),
    "bits of a float": (lambda x: lax.bitcast_convert_type(x, i32) + 1, X),
    "nothing added": (lambda x: (x + 0.0) * 1.0 - 0.0 + jnp.abs(x), X),
    "all bits but one": (lambda n: (n & 1) | n, IDS),
    "a mask": (lambda x: jnp.where(jnp.tril(jnp.ones((8, 16), bool)), x, 0), X),
    "bilinear weights": (lambda x: jax.image.resize(x, (5, 9), "bilinear"), X),
    "condition of a loop": (lambda x: lax.while_loop(lambda c: (c @ c.T).sum() < 9, lambda c: c * 2, x), X),
    "condition beside a counter": (
        lambda x: lax.while_loop(lambda c: (c[0].sum() < 9) & (c[1] < 5), lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0],
        X,
    ),
    "an error that only the condition reads": (
        lambda x: lax.while_loop(lambda c: c[1] > 0.1, lambda c: (c[0] * 2, jnp.abs(c[0] * 2 - c[0]).max()), (x, 1.0))[
            0
        ],
        X,
    ),
    "mean over devices": (on_mesh(lambda x: lax.pmean(jnp.sin(x) + 1, "data"), jax.devices()[:2], P("data")), X),
    "split": (lambda key: jax.random.split(key, 5), jax.random.key(0)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_xla_counts(name):
    fn, *args = COUNTED[name]
    graph = viz.trace(fn, *args, params_argnums=None)
    assert graph.total_flops == pytest.approx(xla_flops(fn, *args), rel=0.02, abs=3)
    assert graph.uncounted == ()


# The tables of what XLA writes out are those of jax 0.12. Of these jax 0.10 counts others.
OF_OLD_JAX = {"complex64": {"abs"}, "float32": {"lgamma", "digamma", "asin", "polygamma"}, "float64": {"digamma"}}
OF_OLD_JAX["bfloat16"] = OF_OLD_JAX["float32"]
FUNCTIONS = {"log2": jnp.log2}
HALF, SINGLE, DOUBLE, COMPLEX = range(4)  # columns of the table
WRITTEN_OUT = {
    "float32": {name for name, each in costs.WRITTEN_OUT.items() if each[SINGLE]} - {"conj", "one_minus_square"},
    "bfloat16": {name for name, each in costs.WRITTEN_OUT.items() if each[HALF] != each[SINGLE]},
    "float64": {name for name, each in costs.WRITTEN_OUT.items() if each[DOUBLE] != each[SINGLE]},
    "complex64": {name for name, each in costs.WRITTEN_OUT.items() if each[COMPLEX]},
}


@pytest.mark.parametrize("dtype", WRITTEN_OUT)
def test_functions_that_xla_writes_out_count_as_it_counts_them(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, counts = Spec((8, 16), dtype), {}
        for name in WRITTEN_OUT[dtype] - (set() if NEW else OF_OLD_JAX.get(dtype, set())):
            fn = FUNCTIONS.get(name) or getattr(lax, name)
            args = (x,) * (2 if name in ("nextafter", "zeta", "polygamma", "max", "min") else 1)
            counts[name] = viz.trace(fn, *args, params_argnums=None).total_flops, xla_flops(fn, *args)
        assert {name: found for name, (found, _) in counts.items()} == {name: xla for name, (_, xla) in counts.items()}


N, M, K = 512, 768, 7
SQUARE, TALL, RIGHT = Spec((3, N, N), f32), Spec((M, N), f32), Spec((3, N, K), f32)
LINALG = jnp.linalg
PUBLISHED = {
    "fft": (jnp.fft.fft, Spec((3, 128), jnp.complex64), 5 * 3 * 128 * 7),
    "ifft": (jnp.fft.ifft, Spec((3, 128), jnp.complex64), 5 * 3 * 128 * 7),
    "rfft": (jnp.fft.rfft, Spec((3, 128), f32), 5 * 3 * 128 * 7 / 2),
    "irfft": (jnp.fft.irfft, Spec((3, 65), jnp.complex64), 5 * 3 * 128 * 7 / 2),
    "fft2": (jnp.fft.fft2, Spec((32, 16), jnp.complex64), 5 * 512 * 9),
    "rfft2": (jnp.fft.rfft2, Spec((32, 16), f32), 5 * 512 * 9 / 2),
    "cholesky": (LINALG.cholesky, SQUARE, 3 * N**3 / 3),
    "lu": (lax.linalg.lu, SQUARE, 3 * 2 * N**3 / 3),
    "solve": (LINALG.solve, SQUARE, RIGHT, 3 * (2 * N**3 / 3 + 2 * N**2 * K)),
    "inv": (LINALG.inv, SQUARE, 3 * (2 * N**3 / 3 + 2 * N**3)),
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), SQUARE, RIGHT, 3 * N**2 * K),
    "cho_solve": (
        lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a[0]), b[0]),
        SQUARE,
        RIGHT,
        N**3 / 3 + 2 * N**2 * K,
    ),
    "householder_product": (
        lax.linalg.householder_product,
        TALL,
        Spec((K,), f32),
        4 * M * N * K - 2 * (M + N) * K**2 + 4 * K**3 / 3,
    ),
    "qr": (LINALG.qr, TALL, 4 * M * N**2 - 4 * N**3 / 3),
    "svd": (lambda a: LINALG.svd(a, full_matrices=False), TALL, 14 * M * N**2 + 8 * N**3),
    "singular values": (lambda a: LINALG.svd(a, compute_uv=False), TALL, 4 * M * N**2 - 4 * N**3 / 3),
    "eigh": (LINALG.eigh, SQUARE, 3 * 9 * N**3),
    "eig": (LINALG.eig, Spec((N, N), f32), 25 * N**3),
    "complex cholesky": (LINALG.cholesky, Spec((N, N), jnp.complex64), 4 * N**3 / 3),
    "cumsum": (lambda x: jnp.cumsum(x, 1), X, 8 * 16),
    "ragged_dot": (lax.ragged_dot, X, Spec((3, 16, 5), f32), Spec((3,), i32), 2 * 8 * 16 * 5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_has_a_published_count(name):
    """Within 5 %: signs, symmetric parts and permutations are counted beside it."""
    fn, *args, expected = PUBLISHED[name]
    graph = viz.trace(fn, *args, params_argnums=None)
    assert graph.total_flops == pytest.approx(expected, rel=0.05)
    assert graph.uncounted == ()


def newton(x):
    def solve(f, start):
        return lax.fori_loop(0, 5, lambda _, y: y - f(y) / (3 * y**2), start)

    return lax.custom_root(lambda y: y**3 - x, x, solve, lambda g, y: y / g(jnp.ones_like(y)))


def test_primitives_that_jax_keeps_whole_count_as_what_they_expand_to():
    """Jax 0.12 keeps these as one equation; 0.10 writes them out."""
    graph = viz.trace(jnp.searchsorted, Spec((100,), f32), Spec((7,), f32), params_argnums=None)
    assert [node.op for node in graph.layers] == ["searchsorted"]
    assert (graph.total_flops > 7 * 7, graph.uncounted) == (True, ())
    for fn in (newton, jax.grad(lambda x: newton(x).sum())):
        graph = viz.trace(fn, X)
        assert (graph.total_flops >= 5 * 7 * X.size, graph.uncounted) == (True, ())


def test_a_solver_among_small_steps_is_no_small_step():
    graph = viz.trace(lambda a, b: jnp.abs(LINALG.lstsq(a, b)[0]) * 2 + 1, Spec((20, 10), f32), Spec((20,), f32))
    assert graph.layers[0].op == "lstsq"
    graph = viz.trace(lambda a: jnp.abs(LINALG.svd(a * 2)[1]) + 1, Spec((20, 10), f32))
    assert "svd" in [node.op for node in graph.layers]


def test_powers_say_which():
    found = [viz.trace(fn, X).layers[0] for fn in (lambda x: x**2, jnp.square, lambda x: x**3, lambda x: x**0.5)]
    assert [(node.op, node.detail) for node in found] == [
        ("square", ""), ("square", ""), ("pow", "x^3"), ("pow", "x^0.5"),
    ]  # fmt: skip
    assert [node.flops for node in found] == [X.size, X.size, 2 * X.size, 0]


def kernel(x_ref, y_ref):
    y_ref[...] = jnp.maximum(x_ref[...] * 2.0, 0.0)


def pallas(x, **options):
    from jax.experimental import pallas as pl

    block = pl.BlockSpec((2, 4), lambda row, column: (row, column))
    return pl.pallas_call(
        kernel,
        grid=(4, 4),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        **options,
    )(x)


def test_a_pallas_kernel_is_its_body_for_each_step_of_the_grid_or_its_estimate():
    from jax.experimental import pallas as pl

    graph = viz.trace(pallas, X)
    assert [(node.op, node.detail) for node in graph.layers] == [("Pallas", "kernel")]
    assert graph.total_flops == 2 * X.size
    estimate = pl.CostEstimate(flops=999, transcendentals=0, bytes_accessed=0)
    assert viz.trace(lambda x: pallas(x, cost_estimate=estimate), X).total_flops == 999


def test_what_has_no_formula_is_named():
    graph = viz.trace(lambda x: lax.top_k(x, 2)[0] * 2, X)
    assert graph.uncounted == ("top_k",)
    plot = viz.plot_network(lambda x: jax.pure_callback(jnp.sin, X, x) + 1, X)
    assert plot.network.uncounted == ("pure_callback",)
    assert "FLOP without pure_callback" in plot.source
