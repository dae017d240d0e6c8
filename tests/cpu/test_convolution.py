"""`models.conv_general_dilated` gives what lax's gives wherever it is called. Its gradients are products on CPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_model import close, same, text
from jax import export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from kv_model import on_mesh
from world import mostly_slow

from jaxpar import models, viz

IMAGES, WINDOWS = "NHWC", "HWIO"


def arrays(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def by(conv, *strides_and_padding, **options):
    options = {"dimension_numbers": (IMAGES, WINDOWS, IMAGES)} | options
    return lambda x, w: conv(x, w, *(strides_and_padding or ((1, 1), "SAME")), **options)


def grads(conv):
    return jax.grad(lambda x, w: jnp.sin(conv(x, w)).sum(), argnums=(0, 1))


BOTH = models.conv_general_dilated, lax.conv_general_dilated
OURS, LAXS = map(by, BOTH)
X, W = arrays((4, 12, 10, 3), (3, 3, 3, 5))

MANY = arrays((128, 6, 6, 3))[0]

ONE_AXIS = {"dimension_numbers": ("NHC", "HIO", "NHC")}
CASES = {
    "same": ((4, 12, 10, 3), (3, 3, 3, 5), (1, 1), "SAME", {}),
    "valid": ((4, 12, 10, 3), (3, 2, 3, 5), (1, 1), "VALID", {}),
    "many channels": ((2, 12, 12, 16), (3, 3, 16, 8), (1, 1), "SAME", {}),
    "in blocks": ((6, 16, 16, 256), (3, 2, 256, 256), (1, 1), "SAME", {}),
    "tiles": ((2, 8, 8, 80), (3, 3, 80, 96), (1, 1), "SAME", {}),
    "tiles, odd sizes": ((3, 7, 9, 96), (3, 3, 96, 80), (1, 1), ((2, 1), (0, 3)), {}),
    "tiles, valid": ((2, 11, 10, 128), (3, 3, 128, 64), (1, 1), "VALID", {}),
    "tiles, cropped": ((4, 9, 12, 96), (3, 3, 96, 96), (1, 1), ((-1, 2), (0, -2)), {}),
    "tiles, one row": ((8, 1, 9, 96), (3, 3, 96, 96), (1, 1), "SAME", {}),
    "patches in blocks": ((6, 64, 64, 3), (5, 5, 3, 40), (2, 2), "SAME", {}),
    "one example": ((1, 48, 48, 8), (3, 3, 8, 8), (1, 1), "SAME", {}),
    "strides": ((4, 16, 14, 3), (3, 3, 3, 5), (2, 1), "SAME", {}),
    "1 x 1": ((4, 12, 10, 3), (1, 1, 3, 5), (1, 1), "SAME", {}),
    "1 x 1, strides": ((4, 12, 11, 3), (1, 1, 3, 5), (2, 2), "SAME", {}),
    "dilated window": ((4, 16, 14, 3), (3, 3, 3, 5), (1, 1), "SAME", {"rhs_dilation": (2, 3)}),
    "dilated window, strides": ((4, 20, 18, 3), (3, 3, 3, 5), (2, 2), "SAME", {"rhs_dilation": (2, 1)}),
    "dilated images": ((4, 6, 6, 3), (3, 3, 3, 5), (1, 1), ((2, 1), (1, 2)), {"lhs_dilation": (2, 2)}),
    "cropped": ((4, 14, 12, 3), (3, 3, 3, 5), (1, 1), ((-1, 2), (0, -2)), {}),
    "groups": ((4, 12, 10, 4), (3, 3, 2, 6), (1, 1), "SAME", {"feature_group_count": 2}),
    "depthwise": ((4, 12, 10, 4), (3, 3, 1, 4), (1, 1), "SAME", {"feature_group_count": 4}),
    "groups of many": ((2, 6, 6, 32), (3, 3, 16, 32), (1, 1), "SAME", {"feature_group_count": 2}),
    "depthwise, strides": ((4, 12, 11, 4), (3, 3, 1, 4), (2, 1), "SAME", {"feature_group_count": 4}),
    "depthwise, dilated": (
        (4, 9, 8, 4),
        (3, 2, 1, 4),
        (1, 1),
        ((-1, 2), (3, 0)),
        {"feature_group_count": 4, "rhs_dilation": (2, 1), "lhs_dilation": (1, 2)},
    ),
    "depthwise, channels first": (
        (4, 5, 34, 10),
        (5, 1, 3, 3),
        (1, 2),
        "SAME",
        {"dimension_numbers": ("NCHW", "OIHW", "CHWN"), "feature_group_count": 5},
    ),
    "depthwise, 1-D": ((4, 40, 6), (7, 1, 6), (1,), "SAME", {**ONE_AXIS, "feature_group_count": 6}),
    "depthwise, two of each": ((4, 12, 10, 4), (3, 3, 1, 8), (1, 1), "SAME", {"feature_group_count": 4}),
    "dilated images and window": (
        (4, 6, 6, 3),
        (3, 2, 3, 5),
        (1, 1),
        ((4, 1), (1, 2)),
        {"lhs_dilation": (3, 2), "rhs_dilation": (2, 1)},
    ),
    "dilated images, strides": ((4, 6, 7, 3), (3, 2, 3, 5), (2, 1), ((2, 1), (1, 2)), {"lhs_dilation": (3, 2)}),
    "dilated images, cropped": ((4, 6, 7, 3), (3, 2, 3, 5), (1, 1), ((-1, 1), (1, -2)), {"lhs_dilation": (2, 2)}),
    "batch groups": ((4, 12, 10, 3), (3, 3, 3, 6), (1, 1), "SAME", {"batch_group_count": 2}),
    "channels first": ((4, 3, 12, 10), (5, 3, 3, 3), (1, 1), "SAME", {"dimension_numbers": ("NCHW", "OIHW", "NCHW")}),
    "mixed layouts": ((12, 4, 10, 3), (3, 5, 3, 3), (1, 1), "SAME", {"dimension_numbers": ("HNWC", "IOHW", "CWNH")}),
    "1-D": ((4, 40, 3), (5, 3, 6), (1,), "SAME", ONE_AXIS),
    "3-D": ((2, 8, 9, 7, 3), (2, 3, 2, 3, 4), (1, 2, 1), "SAME", {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")}),
    "no images": ((0, 12, 10, 3), (3, 3, 3, 5), (1, 1), "SAME", {}),
}


EACH = mostly_slow(CASES, "same", "strides", "dilated images", "depthwise", "mixed layouts")


@pytest.mark.parametrize("groups", [1, 4])
def test_a_window_that_is_larger_than_the_images(groups):
    x, w = arrays((2, 3, 3, 4), (5, 2, 4 // groups, 4))
    ours, laxs = (by(conv, (1, 1), "VALID", feature_group_count=groups) for conv in BOTH)
    assert ours(x, w).shape == laxs(x, w).shape == (2, 0, 2, 4)
    same(grads(ours)(x, w), grads(laxs)(x, w))


def case_of(case):
    """Images, filter, and the convolution of the case by ours and by lax's."""
    x_shape, w_shape, strides, padding, options = CASES[case]
    return (*arrays(x_shape, w_shape), *(by(conv, strides, padding, **options) for conv in BOTH))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", EACH)
def test_the_numbers_of_lax(case):
    x, w, ours, laxs = case_of(case)
    close(ours(x, w), laxs(x, w))
    close(jax.jit(ours)(x, w), jax.jit(laxs)(x, w))
    close(jax.jit(grads(ours))(x, w), jax.jit(grads(laxs))(x, w))


def in_scan(conv):
    return lambda x, w: lax.map(lambda x: (jax.jit(conv)(x, w), grads(conv)(x, w)), x[None])


LEFT_TO_XLA = (
    "groups", "depthwise, dilated", "depthwise, two of each", "dilated images, strides", "batch groups", "no images"
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH)
def test_every_formula_inside_of_loops(case):
    """There XLA has no fast convolution, so formulas are taken that are slower than XLA's outside."""
    x, w, ours, laxs = case_of(case)
    wanted = jax.jit(laxs)(x, w), jax.jit(grads(laxs))(x, w)
    for conv in (laxs, ours):
        looped = jax.jit(models.fast_on_cpus(in_scan(conv)))
        if case not in LEFT_TO_XLA:
            assert "stablehlo.convolution" not in looped.lower(x, w).as_text()
    close(jax.tree.map(lambda x: x[0], looped(x, w)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_sums_of_half_precision_are_those_of_float32(dtype):
    x, w = arrays(X.shape, W.shape, dtype=dtype)
    wide = jax.jit(grads(OURS))(x.astype(jnp.float32), w.astype(jnp.float32))
    for found, right in zip(*map(jax.tree.leaves, (jax.jit(grads(OURS))(x, w), wide)), strict=True):
        assert found.dtype == dtype
        assert float(abs(found.astype(jnp.float32) - right).max() / abs(right).max()) < 2 * jnp.finfo(dtype).eps
    same(*(by(conv, (1, 1), "SAME", preferred_element_type=jnp.float32)(x, w) for conv in BOTH))


def test_the_errors_are_those_of_lax():
    for args in (((1, 1), ((1, 1),)), ((1,), "VALID"), ((1, 1), 3)):
        errors = []
        for conv in BOTH:
            with pytest.raises((TypeError, ValueError)) as error:
                conv(X, W, *args, dimension_numbers=(IMAGES, WINDOWS, IMAGES))
            errors.append((type(error.value), str(error.value)))
        assert errors[0] == errors[1]
    with pytest.raises(TypeError, match="dtype"):
        OURS(X, W.astype(jnp.bfloat16))


@pytest.mark.slow
def test_derivatives_of_any_order():
    few = W[:, :, :, :2]
    tangents = (X + 1, W - 1)
    close(jax.jvp(OURS, (X, W), tangents), jax.jvp(LAXS, (X, W), tangents))
    close(jax.linearize(OURS, X, W)[1](*tangents), jax.linearize(LAXS, X, W)[1](*tangents))
    cubes = [lambda w, conv=conv: (conv(X[:2, :6, :6], w) ** 3).sum() for conv in (OURS, LAXS)]
    close(*(jax.jit(jax.hessian(cube))(few) for cube in cubes))
    close(*(jax.grad(lambda w, cube=cube: (jax.grad(cube)(w) ** 2).sum())(few) for cube in cubes))
    close(*(jax.jvp(jax.grad(cube), (few,), (few + 1,)) for cube in cubes))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 3)])
def test_batches_of_convolutions(axes):
    many = [jnp.stack([a, 2 * a, a - 1], axis) if axis is not None else a for a, axis in zip((X, W), axes, strict=True)]
    for make in (lambda conv: conv, grads):
        close(*(jax.jit(jax.vmap(make(conv), axes))(*many) for conv in (OURS, LAXS)))


@pytest.mark.slow
def test_loops_and_memory_saved():
    images = jnp.stack([X, X + 1])

    def loss(conv):
        return lambda w: lax.map(lambda x: (jax.checkpoint(conv)(x, w) ** 2).sum(), images).sum()

    close(*(jax.jit(jax.grad(loss(conv)))(W) for conv in (OURS, LAXS)))


def test_the_gradient_of_the_filter_is_a_product():
    """And where no formula applies it is lax's own."""
    count = functools.partial(str.count, text(grads(OURS), MANY, W))
    assert (count("stablehlo.convolution"), count("stablehlo.dot_general")) == (2, 1)  # forward, and of the images
    assert text(grads(LAXS), X, W).count("stablehlo.convolution") == 3
    small = X[:, :5, :5]  # the window is as large as the result: no filter's gradient to the eye
    assert text(OURS, small, W).count("dot_general") == 0


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_window_as_large_as_the_image_is_lax_to_the_bit(layout):
    """It has the shape of a filter's gradient: a dense layer as a convolution, the patches of a small image."""
    x, w = arrays((4, 8, 8, 3), (8, 8, 3, 5))
    x = x.transpose(0, 3, 1, 2) if layout == "NCHW" else x
    for strides, window in (((1, 1), w), ((4, 4), w[:4, :4])):
        ours, laxs = (by(conv, strides, "VALID", dimension_numbers=(layout, "HWIO", layout)) for conv in BOTH)
        assert "dot_general" not in text(ours, x, window)
        same(ours(x, window), laxs(x, window))


def test_other_platforms_have_lax():
    lowered = jax.jit(grads(OURS)).trace(X, W).lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("stablehlo.convolution") == 3
    assert "dot_general" not in lowered


SMALL = {  # images, window, padding, dilation of the images
    "tiny": ((3, 2, 2, 5), (3, 3, 5, 4), "SAME", (1, 1)),
    "tiny, cropped": ((3, 4, 3, 5), (2, 3, 5, 4), ((-1, 0), (0, 1)), (1, 1)),
    "one place": ((3, 3, 3, 5), (3, 3, 5, 4), "VALID", (1, 1)),
    "many channels": ((2, 4, 3, 256), (3, 3, 256, 256), "SAME", (1, 1)),
    "dilated": ((3, 2, 2, 5), (3, 3, 5, 4), ((1, 2), (2, 1)), (2, 2)),
    "tiles": ((128, 3, 4, 128), (3, 3, 128, 256), "SAME", (1, 1)),
    "tiles of odd sides, cropped": ((64, 7, 6, 256), (3, 3, 256, 128), ((2, -1), (1, 2)), (1, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL)
def test_small_images_are_products(case):
    x_shape, w_shape, padding, dilation = SMALL[case]
    x, w = arrays(x_shape, w_shape)
    w = w / np.sqrt(w[..., 0].size)
    ours, laxs = (by(conv, (1, 1), padding, lhs_dilation=dilation) for conv in BOTH)
    assert "stablehlo.convolution" in text(laxs, x, w)
    assert "stablehlo.convolution" not in text(ours, x, w)
    close(jax.jit(ours)(x, w), jax.jit(laxs)(x, w))
    close(jax.jit(grads(ours))(x, w), jax.jit(grads(laxs))(x, w))


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("tiles")])
def test_windows_of_3_by_3_with_many_channels_are_16_products(case):
    """Forward, and both gradients: 48 products of less than half of the multiplications."""
    x, w, ours, _ = case_of(case)
    lowered = text(grads(ours), x, w)
    assert "stablehlo.convolution" not in lowered
    assert lowered.count("stablehlo.dot_general") == 48


def test_copies_of_tiles_have_a_limit():
    """Sums of tiles are four times as many numbers as the images."""
    w = jax.ShapeDtypeStruct((3, 3, 128, 128), jnp.float32)
    few, many = (text(OURS, jax.ShapeDtypeStruct((n, 112, 112, 128), jnp.float32), w) for n in (8, 64))
    assert "stablehlo.convolution" not in few
    assert "stablehlo.convolution" in many


def test_the_gradient_of_small_images_with_strides_is_a_product():
    x, w = arrays((8, 4, 4, 16), (3, 3, 16, 16))
    of_images = lambda conv: jax.jit(jax.grad(lambda x: jnp.sin(by(conv, (2, 2), "SAME")(x, w)).sum()))  # noqa: E731
    ours, laxs = map(of_images, BOTH)
    assert "lhs_dilate = [2, 2]" in laxs.lower(x).as_text()
    assert "lhs_dilate = [2, 2]" not in ours.lower(x).as_text()
    close(ours(x), laxs(x))


def test_copies_are_made_a_few_examples_at_a_time():
    """A loop over blocks keeps them in the cache; small ones need none."""
    x, w = arrays(*CASES["in blocks"][:2])
    assert "stablehlo.while" in text(grads(OURS), x, w)
    assert "stablehlo.while" not in text(grads(OURS), X, W)


MESH = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", MESH)
def test_automatic_partitioning_exchanges_the_gradient_only(axis_type):
    """A loop over the examples would gather the images on every device."""
    x, w = arrays(*CASES["in blocks"][:2])
    x = jnp.concatenate([x[:8]] * 2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(MESH[axis_type],))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        args = jax.device_put(x, split), jax.device_put(w, whole)
        compiled = jax.jit(grads(OURS), out_shardings=(split, whole)).lower(*args).compile()
        found = compiled(*args)
    assert "all-gather" not in compiled.as_text()
    assert "all-reduce" in compiled.as_text()
    close(jax.device_get(found), grads(LAXS)(x, w))


@pytest.mark.slow
def test_shard_map_and_pmap():
    """With the loops over blocks of examples."""
    x, w = arrays((16, *CASES["in blocks"][0][1:]), CASES["in blocks"][1])

    def local(x, w):
        gx, gw = grads(OURS)(x, w)
        return gx, lax.psum(gw, "data")

    whole = grads(LAXS)(x, w)
    mapped = on_mesh(local, jax.devices()[:2], (P("data"), P()), (P("data"), P()))
    assert "stablehlo.while" in text(mapped, x, w)
    close(mapped(x, w), whole)
    gx, gw = jax.pmap(local, "data", in_axes=(0, None))(x.reshape(2, 8, *x.shape[1:]), w)
    close((gx.reshape(x.shape), gw[0]), whole)


@pytest.mark.slow
def test_export_with_a_symbolic_batch():
    (n,) = export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((n, *X.shape[1:]), X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype)
    exported = export.export(jax.jit(grads(OURS)))(*shapes)
    close(export.deserialize(exported.serialize()).call(X, W), grads(LAXS)(X, W))


@pytest.mark.slow
def test_in_flax():
    nnx, linen = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")

    def gradient(**options):
        layer = nnx.Conv(3, 5, (3, 3), rngs=nnx.Rngs(0), **options)
        return nnx.grad(lambda layer: (layer(X) ** 2).sum())(layer)["kernel"].get_value()

    close(gradient(conv_general_dilated=models.conv_general_dilated), gradient())
    layer = linen.Conv(5, (3, 3), conv_general_dilated=models.conv_general_dilated)
    params = layer.init(jax.random.key(0), MANY)
    assert text(jax.grad(lambda p: (layer.apply(p, MANY) ** 2).sum()), params).count("dot_general") == 1


def test_a_picture_knows_it():
    ours, laxs = ([(layer.op, layer.flops) for layer in viz.trace(conv, X, W).layers] for conv in (OURS, LAXS))
    assert ours == laxs
    assert ours[0][0] == "Convolution"
