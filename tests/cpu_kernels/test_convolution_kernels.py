"""Convolutions by the kernels of jaxpar-cpu: the numbers of float64, the same bits anywhere, lax's NaN and infinity."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as kernels
from cpu_model import close, normal, text
from jax import export, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from kv_model import collectives_in
from reference import Case, digests, error, missing, of_lax, ours, reference
from world import mostly_slow

from jaxpar import kv, models, parallel, train
from jaxpar._cpu import is_slow_in_a_loop, kernels as jaxpar_kernels
from jaxpar.models import fast_on_cpus

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
NUMBERS = ("NHWC", "HWIO", "NHWC")


def conv(x, w, strides=(1, 1), padding="SAME", by=lax, **options):
    return by.conv_general_dilated(x, w, strides, padding, dimension_numbers=NUMBERS, **options)


def loss(w, x):
    return jnp.sin(conv(conv(x, w), w, (2, 2))).mean()


X, W = normal(8, 10, 11, 16), normal(3, 3, 16, 16) / 12


SEEDS = [*range(20), 156, 532, 604, 636]  # the last ones have one channel and one feature
CASES = [*dict.fromkeys([*SEEDS, *range(1000)])]  # the quick ones first


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", mostly_slow(CASES, *SEEDS, most=60))
def test_random_convolutions(seed):
    check_rounding(Case(seed), 1e-6)


def check_rounding(case, most):
    true, found = reference(case.x, case.w, case.dy, *case.geometry), ours(case)
    assert [(a.shape, a.dtype) for a in found] == [(a.shape, case.x.dtype) for a in true], case
    errors = [error(a, b) for a, b in zip(found, true, strict=True)]
    if max(errors) > most and jax.__version_info__ < (0, 11):  # XLA is wrong there if a window is all padding
        errors = [e for e, a, b in zip(errors, of_lax(case), true, strict=True) if error(a, b) < 1e-3 + 10 * most]
    assert max(errors) < most, case


@pytest.fixture(params=["products of bfloat16", "float32 alone"])
def processor(request, monkeypatch):
    """One that multiplies bfloat16, if this one does, and one that does not."""
    if request.param == "float32 alone":
        monkeypatch.setattr(jaxpar_kernels, "multiply_bfloat16", lambda: False)
    elif not jaxpar_kernels.multiply_bfloat16():
        pytest.skip("the processor has neither AMX nor AVX-512's products of bfloat16")
    return request.param


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", mostly_slow(CASES[: len(SEEDS) + 60], *SEEDS[:12], most=len(SEEDS)))
def test_random_convolutions_of_half_precision(seed, dtype, processor):
    """Sums are of float32: a result is that of float64, rounded once."""
    case = Case(seed)
    case.x, case.w, case.dy = (jnp.asarray(a, dtype) for a in (case.x, case.w, case.dy))
    check_rounding(case, float(jnp.finfo(dtype).eps) / 2 + 1e-6)


SHAPES = {  # images, window, strides; many sums and long ones
    "first layer": ((128, 32, 32, 3), (3, 3, 3, 32), (1, 1)),
    "many channels": ((4, 9, 9, 100), (3, 3, 100, 64), (1, 1)),
    "strides": ((16, 16, 16, 32), (3, 3, 32, 64), (2, 2)),
    "1 x 1": ((8, 7, 7, 700), (1, 1, 700, 40), (1, 1)),
    "large images": ((2, 112, 112, 8), (7, 7, 8, 16), (2, 2)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SHAPES)
def test_rounding_is_no_worse_than_that_of_lax(name):
    x_shape, w_shape, strides = SHAPES[name]
    case = Case(0)
    case.x, case.w = normal(*x_shape), normal(*w_shape)
    padding = lax.padtype_to_pads(x_shape[1:3], w_shape[:2], strides, "SAME")
    case.geometry, case.layouts, case.moved = (strides, padding, (1, 1), (1, 1), 1), NUMBERS, NUMBERS
    case.dy = normal(*reference(case.x, case.w, None, *case.geometry).shape)
    true = reference(case.x, case.w, case.dy, *case.geometry)
    for ours_, laxs, right in zip(ours(case), of_lax(case), true, strict=True):
        assert error(ours_, right) < 1.1 * error(laxs, right) + 5e-8


def test_the_kernels_are_called():
    x = text(jax.grad(lambda w: fast_on_cpus(loss)(w, X)), W)
    assert "stablehlo.convolution" not in x
    assert x.count("@jaxpar_cpu.ConvolutionFilter") == 2
    both = text(fast_on_cpus(jax.grad(loss, (0, 1))), W, X)
    assert both.count("stablehlo.custom_call @jaxpar_cpu.Convolution") == 6


TRANSFORMS = kernels.TRANSFORMS | {
    "vmap over images": lambda f: jax.vmap(jax.grad(f), (None, 0)),
    "vmap over filters": lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), x[0]),
    "vmap over both": lambda f: lambda w, x: jax.vmap(jax.grad(f))(jnp.stack([w] * 8), x),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name):
    x = X if name in kernels.TRANSFORMS else X[:, None]
    transformed = TRANSFORMS[name](loss)
    found = jax.jit(fast_on_cpus(transformed))
    assert "jaxpar_cpu.Convolution" in found.lower(W, x).as_text()
    assert "stablehlo.convolution" not in found.lower(W, x).as_text()
    close(found(W, x), jax.jit(transformed)(W, x), 1e-4)


def of_batch(params, batch, rng):
    return loss(params["w"], batch), {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["pmap", "shard_map", "jit"])
@pytest.mark.parametrize("count", [1, 4])
def test_a_step_of_each_engine(engine, count):
    state, step = train.start({"w": W}, optax.sgd(0.1), of_batch, engine=engine, devices=jax.devices()[:count])
    lowered = step.lower(state, X).as_text()
    assert "jaxpar_cpu.Convolution" in lowered
    new, _ = step(state, X)
    close(kv.to_params(new.store)["w"], W - 0.1 * jax.jit(jax.grad(loss))(W, X))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_a_step_computed_in_bfloat16(engine, processor):
    place = {"engine": engine, "devices": jax.devices()[:4], "compute_dtype": jnp.bfloat16}
    state, step = train.start({"w": W}, optax.sgd(1), of_batch, **place)
    lowered = step.lower(state, X).as_text()
    assert ("jaxpar_cpu.ConvolutionBf16" in lowered) == (processor == "products of bfloat16")
    assert "stablehlo.convolution" not in lowered
    new, _ = step(state, X)
    assert new.params["w"].dtype == np.float32
    grads = jax.jit(jax.grad(loss))(W, X)
    assert error(W - new.params["w"], np.asarray(grads, np.float64)) < 0.02


MESHES = {"data": (4,), "data model": (2, 2), "copies data": (2, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, pytest.param({"accumulate": 2, "remat": True}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("names", MESHES)
def test_a_step_on_a_mesh(names, options):
    """Each device has the kernels of its own images: strided, depthwise and 1-D ones, and those of a loop."""

    def of_batch(params, batch, rng):
        smooth = conv(params["w"][None, ..., 0], jnp.ones((3, 3, 16, 16)) / 144)  # of no image: no device has a share
        x = conv(conv(batch, params["w"] + smooth[0, ..., None], (2, 2)), params["each"], feature_group_count=16)
        x = lax.fori_loop(0, 2, lambda i, x: jnp.tanh(conv(x, params["w"])), x)
        x = lax.conv_general_dilated(x.mean(2), params["line"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
        return (x**2).mean(), {}

    params = {"w": W, "each": normal(3, 3, 1, 16), "line": normal(3, 16, 8)}
    axes = tuple(names.split())
    mesh = jax.make_mesh(MESHES[names], axes, axis_types=(AxisType.Auto,) * len(axes))
    place = {"mesh": mesh, "sharding": parallel.fsdp(axes[-1]), "axis_name": axes if "copies" in axes else "data"}
    state, step = train.start(params, optax.sgd(0.1), of_batch, **place, **options)
    compiled = step.lower(state, X).compile().as_text()
    assert compiled.count('"jaxpar_cpu.Convolution"') > 6
    assert "all-to-all" not in compiled
    assert max(size for name, size in collectives_in(compiled) if name == "all-gather") < X.nbytes / 4
    found, _ = step(state, X)
    grads = jax.grad(lambda p: of_batch(p, X, None)[0])(params)
    close(found.params, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))


@pytest.mark.slow
def test_a_loss_on_a_mesh_with_a_shard_map_of_its_own():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = {"mesh": mesh, "in_specs": (P("model"), P()), "out_specs": P("model"), "check_vma": False}
    own = jax.shard_map(conv, **split)

    def of_batch(params, batch, rng, inner=own):
        return jnp.sin(conv(inner(batch, params["w"]), params["w"])).mean(), {}

    state, step = train.start({"w": W}, optax.sgd(0.1), of_batch, mesh=mesh, sharding=parallel.fsdp("model"))
    new, _ = step(state, X)
    close(new.params["w"], W - 0.1 * jax.grad(lambda w: of_batch({"w": w}, X, None, conv)[0])(W))


def test_a_step_in_a_loop_is_not_slow():
    state, step = train.start({"w": W}, optax.sgd(0.1), of_batch, devices=jax.devices()[:1])
    assert not is_slow_in_a_loop(step.lower(state, X[None], many=True).as_text())


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_sharded_arrays_are_not_gathered(kind):
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    mesh = jax.make_mesh((4,), ("data",), axis_types=(types[kind],))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        compiled = jax.jit(fast_on_cpus(conv)).lower(x, W).compile()
        assert "all-gather" not in compiled.as_text()
        assert "jaxpar_cpu" not in compiled.as_text()
        close(jax.device_get(compiled(x, W)), conv(X, W))


def test_export_and_float64_take_the_kernels_of_xla():
    for dtype in (np.float32, jnp.bfloat16):
        exported = export.export(jax.jit(fast_on_cpus(conv)))(X.astype(dtype), W.astype(dtype))
        assert "jaxpar_cpu" not in exported.mlir_module()
    with jax.enable_x64(True):
        x, w = X.astype(np.float64), W.astype(np.float64)
        assert "jaxpar_cpu" not in text(fast_on_cpus(conv), x, w)
    tpu = jax.jit(fast_on_cpus(conv)).trace(X, W).lower(lowering_platforms=("tpu",)).as_text()
    assert "jaxpar_cpu" not in tpu


BAD = {"infinite": np.inf, "not a number": np.nan}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("where", ["images", "filter", "cotangent"])
@pytest.mark.parametrize("options", [{}, {"strides": (2, 2)}, {"lhs_dilation": (2, 2), "padding": ((1, 1), (2, 2))}])
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_what_is_not_finite_is_where_lax_has_it(value, where, options, dtype):
    x, w = X.astype(dtype), W.astype(dtype)
    dy = normal(*jax.eval_shape(lambda x, w: conv(x, w, **options), x, w).shape).astype(dtype)
    bad, at = {"images": (x, (0, 3, 4, 5)), "filter": (w, (0, 2, 3, 4)), "cotangent": (dy, (1, 2, 3, 4))}[where]
    bad[at] = BAD[value]

    def all_three(x, w, dy, by):
        y, back = jax.vjp(lambda x, w: conv(x, w, by=by, **options), x, w)
        return y, *back(dy)

    for ours_, laxs in zip(*(jax.jit(all_three, static_argnums=3)(x, w, dy, by) for by in (models, lax)), strict=True):
        # With strides, lax leaves out zeros around the images, and does not otherwise.
        if where == "filter" and options:
            assert np.isnan(ours_).sum() <= np.isnan(laxs).sum() + 2 * ours_.shape[1] * len(x)
            assert (np.isnan(ours_) >= np.isnan(laxs)).all()
            continue
        kernels.same_where_not_finite(ours_, laxs)


BITS = """
import hashlib, sys
import jax, jax.numpy as jnp, numpy as np
from jaxpar.models import fast_on_cpus
from test_convolution_kernels import W, X, loss, normal
many = normal(37, 12, 12, 16)
step = jax.jit(fast_on_cpus(jax.value_and_grad(loss, (0, 1))))
for device in jax.devices():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float32, jnp.bfloat16):
        found = step(*jax.device_put((jnp.asarray(W, dtype), jnp.asarray(many, dtype)), device))
        digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(found))).hexdigest()
        print(dtype.__name__, digest)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "devices"), kernels.ELSEWHERE, ids=["devices", "threads"])
def test_the_same_bits_on_any_number_of_threads_and_devices(begin, devices):
    one = digests(BITS, "1")
    assert len(one) == 2  # of each dtype
    assert digests(begin + BITS, devices) == one


@pytest.mark.slow
def test_eight_devices_with_collectives_do_not_hang():
    mesh = Mesh(jax.devices()[:8], "i")
    whole = jax.jit(jax.shard_map(
        lambda w, x: lax.pmean(fast_on_cpus(jax.grad(loss))(w, x), "i"),
        mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False,
    ))  # fmt: skip
    kernels.check_it_does_not_hang(whole, W, X)
