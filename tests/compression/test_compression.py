"""Gradient compression: MXNet's bits, what goes over the wire, and that nothing is lost."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from kv_model import FOUR, collectives_in, on_host, over_pmap, over_rows, over_shard_map, over_vmap

from jaxpar import compression

CODERS = [
    {"type": "2bit", "threshold": 0.5},
    {"type": "1bit", "threshold": 0.25},
    {"type": "int8"},
    {"type": "int8", "rounding": "stochastic"},
    {"type": "bf16"},
    {"type": "bf16", "rounding": "stochastic"},
    {"type": "topk", "ratio": 0.3},
    {"type": "int3"},
]
SHAPES = [(), (3, 0, 2), (17,), (5, 7, 11), (1030,)]


def name_of(spec):
    return "-".join(str(value) for value in spec.values())


def coder_of(spec):
    coder = compression.make(spec)
    assert coder is not None
    return coder


@pytest.fixture(params=CODERS, ids=name_of)
def coder(request):
    return coder_of(request.param)


def encode(coder, value):
    return coder.encode(value, coder.init(value.shape, value.dtype))


@functools.partial(jax.jit, static_argnums=0)
def encode_and_decode(coder, value, state=None):
    """One program, which compiles sooner than its operations one by one."""
    payload, state = encode(coder, value) if state is None else coder.encode(value, state)
    return (
        payload,
        coder.decode(payload, value.shape, value.dtype),
        coder.decode(payload, value.shape, "float32"),
        state,
    )


decode_sum = jax.jit(compression.decode_sum, static_argnums=(0, 2, 3))


def gradients(shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


# ---- MXNet's own numbers

P1 = [0.4, 0.5, 0.6, -0.5, -0.7, 0, 1.7, -1.2, 0.25]
P2 = [0.2, 0.5, 0.4, -0.1, -0.3, 0, 0, 0, 0.25]
H = 0.5
TABLE = [
    (P1, [0, H, H, -H, -H, 0, H, -H, 0], [62, 142, 0, 0], [0.4, 0, 0.1, 0, -0.2, 0, 1.2, -0.7, 0.25]),
    (P2, [H, H, H, 0, -H, 0, H, -H, H], [252, 142, 192, 0], [0.1, 0, 0, -0.1, 0, 0, 0.7, -0.2, 0]),
    ([0] * 9, [0] * 6 + [H, 0, 0], [0, 12, 0, 0], [0.1, 0, 0, -0.1, 0, 0, 0.2, -0.2, 0]),
    ([-0.6] * 9, [-H] * 6 + [0, -H, -H], [170, 162, 128, 0], [0, -0.1, -0.1, -0.2, -0.1, -0.1, -0.4, -0.3, -0.1]),
]


def test_2bit_is_mxnets_table_of_values_bytes_and_residuals():
    coder = coder_of({"type": "2bit", "threshold": 0.5})
    state = coder.init((9,), "float32")
    for pushed, stored, packed, residual in TABLE:
        payload, _, decoded, state = encode_and_decode(coder, np.array(pushed, np.float32), state)
        assert payload["codes"].dtype == jnp.uint32
        assert np.asarray(payload["codes"]).astype("<u4").tobytes() == bytes(packed)
        np.testing.assert_array_equal(decoded, stored)
        np.testing.assert_allclose(state["residual"], residual, atol=1e-6)


def test_1bit_is_mxnet_2s_rule_and_bytes():
    coder = coder_of({"type": "1bit", "threshold": 0.5})
    value = np.random.default_rng(0).normal(size=70).astype(np.float32)
    value[:2] = 0.5, np.nextafter(np.float32(0.5), np.float32(1))  # strictly greater
    payload, _, decoded, state = encode_and_decode(coder, value)
    up = value > 0.5
    packed = np.packbits(np.pad(up, (0, 96 - 70)))  # first element in the top bit
    assert np.asarray(payload["codes"]).astype("<u4").tobytes() == packed.tobytes()
    np.testing.assert_array_equal(decoded, np.where(up, 1, -1))
    np.testing.assert_array_equal(state["residual"], value - np.where(up, 1, -1).astype(np.float32))


# ---- nothing is lost


NUMBERS = st.floats(-100, 100, width=32)


# Few shapes, so that the examples share their programs.
@settings(max_examples=40, deadline=None)
@given(
    pushes=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 9), st.sampled_from([(1,), (3, 9)])).map(lambda case: (case[0], *case[1])),
        elements=NUMBERS,
    ),
    spec=st.sampled_from(CODERS),
)
def test_what_was_decoded_and_the_residual_are_what_was_pushed(pushes, spec):
    coder = coder_of(spec)
    shape = pushes.shape[1:]
    state = coder.init(shape, "float32")
    total = np.zeros(shape)
    for pushed in pushes:
        _, decoded, _, state = encode_and_decode(coder, pushed, state)
        total += np.asarray(decoded)
    scale = max(1, len(pushes)) * 200
    np.testing.assert_allclose(total + np.asarray(state["residual"]), pushes.sum(0, dtype=float), atol=scale * 1e-6)


# Rank, devices and shape; few of them, so that the examples share their programs.
POWER_ITERATIONS = [(1, 2, (5, 4)), (2, 1, (3, 5)), (3, 2, (2, 3)), (2, 2, (1, 5)), (1, 1, (1, 1))]


@functools.cache
def powersgd_allreduce(rank):
    reduce = functools.partial(compression.PowerSGD(rank).allreduce, psum=lambda tree: jax.lax.psum(tree, "data"))
    return jax.jit(jax.vmap(reduce, axis_name="data"))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(POWER_ITERATIONS).flatmap(
        lambda case: st.tuples(
            st.just(case[0]),
            st.integers(1, 3).flatmap(
                lambda pushes: hnp.arrays(np.float32, (pushes, case[1], *case[2]), elements=NUMBERS)
            ),
        )
    )
)
def test_powersgd_sums_and_residuals_are_what_was_pushed(rank_and_pushes):
    rank, pushes = rank_and_pushes
    devices, shape = pushes.shape[1], pushes.shape[2:]
    states = jax.tree.map(lambda x: np.stack([x] * devices), compression.PowerSGD(rank).init(shape, "float32"))
    total = np.zeros(shape)
    for pushed in pushes:
        summed, states = on_host(powersgd_allreduce(rank)(pushed, states))
        np.testing.assert_array_equal(summed, np.broadcast_to(summed[:1], summed.shape))
        total += summed[0]
    np.testing.assert_allclose(total + states["residual"].sum(0), pushes.sum((0, 1)), atol=0.05, rtol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_stochastic_rounding_is_unbiased_and_nearest_is_not(kind):
    value = np.full(1000, 1 + 0.3 / 127, np.float32)  # between two steps of both
    value[0] = 3

    def mean(rounding, pushes=400):
        coder = coder_of({"type": kind, "rounding": rounding})
        fresh = coder.init(value.shape, value.dtype)

        def push(state, _):
            payload, state = coder.encode(value, {**state, "residual": fresh["residual"]})
            return state, coder.decode(payload, value.shape, "float32")

        return np.asarray(jax.lax.scan(push, fresh, length=pushes)[1]).mean(0, dtype=float)[1:]

    step = {"int8": 3 / 127, "bf16": 2**-7}[kind]
    sigma = step / 2 / math.sqrt(400 * 999)
    assert abs(float(mean("stochastic").mean() - value[1])) < 5 * sigma
    assert abs(float(mean("nearest").mean() - value[1])) > 20 * sigma


def test_random_streams_differ_by_push_and_seed_and_can_be_repeated():
    coder = coder_of({"type": "bf16", "rounding": "stochastic"})
    value, fresh = gradients(100), coder.init((100,), "float32")
    first, *_, after = encode_and_decode(coder, value, fresh)
    again, *_ = encode_and_decode(coder, value, coder.init((100,), "float32"))
    next_push, *_ = encode_and_decode(coder, value, {**after, "residual": fresh["residual"]})
    other, *_ = encode_and_decode(coder, value, coder.init((100,), "float32", seed=1))
    np.testing.assert_array_equal(first["bits"], again["bits"])
    assert (np.asarray(first["bits"]) != next_push["bits"]).any()
    assert (np.asarray(first["bits"]) != other["bits"]).any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", [s for s in CODERS if s["type"] in ("int8", "bf16")], ids=name_of)
@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e30])
def test_what_is_sent_is_close_whatever_the_scale(spec, scale):
    coder = coder_of(spec)
    value = np.asarray(gradients(3000)) * np.float32(scale)
    _, _, decoded, state = encode_and_decode(coder, value)
    error = (np.asarray(decoded) - value).astype(float) / scale
    assert np.isfinite(np.asarray(state["residual"])).all()
    assert 0 < np.abs(error).max() <= (5 / 127 if spec["type"] == "int8" else 5 * 2**-7)


def test_bf16_nearest_is_the_cast_and_keeps_what_it_lost_under_jit():
    coder = coder_of({"type": "bf16"})
    value = np.asarray(gradients(3000))
    payload, *_, state = encode_and_decode(coder, value)
    cast = value.astype(jnp.bfloat16)
    assert payload["bits"].dtype == jnp.uint16
    np.testing.assert_array_equal(np.asarray(payload["bits"]), cast.view(np.uint16))
    np.testing.assert_array_equal(state["residual"], value - cast.astype(np.float32))
    assert np.abs(state["residual"]).max() > 0


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_bf16_sends_infinities_and_nan_as_they_are(rounding):
    """NaN has many bits. What is added for rounding would carry some of them over into -0.0 and 0.0."""
    bits = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    value = bits.view(np.float32)
    found = encode_and_decode(coder_of({"type": "bf16", "rounding": rounding}), value)[2]
    np.testing.assert_array_equal(found, value)


def test_int8_keeps_blocks_of_subnormal_scales_in_the_residual():
    """XLA flushes such scales to zero on CPUs, and not on GPUs. What is sent must not depend on that."""
    block = np.resize(np.float32([1, -1, 0.5, -0.25]), 1024)
    tiny = float(np.finfo(np.float32).tiny)
    value = np.concatenate([120 * tiny * block, 4 * 127 * tiny * block])
    payload, _, sent, state = encode_and_decode(compression.Int8(), value)
    assert payload["scales"][0] == 0
    assert payload["scales"][1] == np.float32(4 * tiny)
    assert not sent[:1024].any()
    np.testing.assert_array_equal(state["residual"][:1024], value[:1024])
    assert np.abs(payload["codes"][1024:]).max() == 127


def test_int8_sends_both_ends_of_its_range():
    value = np.float32([127, -127, 1, -1, 0])
    payload, _, sent, _ = encode_and_decode(compression.Int8(), value)
    assert payload["codes"].tolist() == [127, -127, 1, -1, 0]
    np.testing.assert_array_equal(sent, value)


def test_topk_sends_exactly_the_k_largest_magnitudes():
    coder = compression.TopK(0.1)
    value = gradients((20, 10))
    payload, *_, state = encode_and_decode(coder, value)
    assert payload["indices"].dtype == jnp.int32
    flat = np.asarray(value).reshape(-1)
    largest = np.sort(np.argsort(-np.abs(flat))[:20])
    np.testing.assert_array_equal(np.sort(payload["indices"]), largest)
    np.testing.assert_array_equal(payload["values"], flat[np.asarray(payload["indices"])])
    assert (np.asarray(state["residual"]) == 0).sum() == 20
    ties, *_ = encode_and_decode(coder, np.ones((20, 10), np.float32))
    assert len(set(ties["indices"].tolist())) == ties["indices"].size == 20


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("size", "sent"), [(0, 0), (1, 1), (3, 1), (14, 1), (16, 2)])
def test_topk_sends_one_element_at_least(size, sent):
    assert compression.TopK(0.1).wire_bytes((size,), "float32") == 8 * sent
    payload, *_ = encode(compression.TopK(0.1), np.arange(size, dtype=np.float32))
    assert payload["indices"].tolist() == list(range(size))[::-1][:sent]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "count"),
    [(8192, 4), (2048, 8), (5000, 3), (1030, 4), (1024, 7), (3000, 7)],
    ids=["whole blocks", "parts of a block", "rows across blocks", "a short last block", "one block", "many rows"],
)
def test_owners_decode_their_rows_of_int8(size, count):
    """Each row has other scales. The last one ends with padding."""
    value = np.random.default_rng(size).normal(size=size).astype(np.float32) * np.arange(1, size + 1)

    @jax.jit
    def decoded(value):
        payload, _ = encode(compression.Int8(), value)
        rows = compression.Int8().cut(payload, value.shape, count)
        row = lambda i: compression.Int8().decode_row(jax.tree.map(lambda x: x[i], rows), i)  # noqa: E731
        return compression.Int8().decode(payload, value.shape, "float32"), [row(i) for i in range(count)]

    whole, rows = decoded(value)
    np.testing.assert_array_equal(np.concatenate(rows)[:size], whole)
    assert not np.concatenate(rows)[size:].any()


# ---- PowerSGD


@pytest.mark.parametrize(("shape", "rank"), [((10, 20), 2), ((1, 20), 1), ((20, 1, 3), 2), ((20, 1), 1)])
def test_powersgd_sends_two_factors_of_its_rank(shape, rank):
    """A value is a matrix of its first axis by the others. A rank beyond the smaller axis says no more."""
    rows, columns = shape[0], math.prod(shape[1:])
    assert compression.PowerSGD(rank=2).wire_bytes(shape, "float32") == 4 * rank * (rows + columns)


@functools.partial(jax.jit, static_argnums=0)
def reduce_alone(coder, value, state):
    return coder.allreduce(value, state, lambda tree: tree)


@pytest.mark.slow
def test_powersgd_of_full_rank_is_exact():
    coder = compression.PowerSGD(4)
    value = gradients((3, 2, 4))
    total, state = reduce_alone(coder, value, coder.init(value.shape, value.dtype))
    np.testing.assert_allclose(total, value, atol=1e-5)
    np.testing.assert_allclose(state["residual"], 0, atol=1e-5)


def test_powersgd_warm_start_finds_the_best_rank_and_the_residual_brings_the_rest():
    coder = compression.PowerSGD(1)
    value = gradients((12, 8))
    fresh = coder.init(value.shape, value.dtype)
    state = fresh
    for _ in range(30):
        total, state = reduce_alone(coder, value, {**state, "residual": fresh["residual"]})
    u, s, vt = np.linalg.svd(np.asarray(value))
    np.testing.assert_allclose(total, s[0] * np.outer(u[:, 0], vt[0]), atol=1e-3)

    state, totals = fresh, []
    for _ in range(200):
        total, state = reduce_alone(coder, value, state)
        totals.append(np.asarray(total))
    assert np.abs(np.mean(totals, 0) - value).max() < 0.1
    assert np.abs(totals[-1] - value).max() > 0.3  # one push alone is far off


def test_powersgd_survives_zeros_and_tiny_gradients():
    coder = compression.PowerSGD(2)
    state = coder.init((6, 5), "float32")
    total, after = reduce_alone(coder, np.zeros((6, 5), np.float32), state)
    np.testing.assert_array_equal(total, 0)
    np.testing.assert_array_equal(after["q"], state["q"])
    value = np.outer(gradients(6), gradients(5, seed=1)) * np.float32(1e-25)
    for _ in range(3):
        total, after = reduce_alone(coder, value, {**after, "residual": state["residual"]})
    np.testing.assert_allclose(np.asarray(total, float) * 1e25, np.asarray(value, float) * 1e25, atol=1e-4)


@pytest.mark.sampled(2)
def test_powersgd_over_devices_equals_the_power_iteration_of_the_sum(devices):
    coder = compression.PowerSGD(2)
    n = len(devices)
    values = gradients((n, 6, 5))
    state = coder.init((6, 5), "float32")
    states = jax.tree.map(lambda x: np.stack([x] * n), state)
    reduce = functools.partial(coder.allreduce, psum=lambda tree: jax.lax.psum(tree, "data"))
    summed, states = on_host(jax.pmap(reduce, axis_name="data", devices=devices)(values, states))
    whole, _ = reduce_alone(coder, np.asarray(values).sum(0), state)
    for one in summed:
        np.testing.assert_allclose(one, whole, atol=1e-4)
    np.testing.assert_array_equal(states["q"], np.broadcast_to(states["q"][:1], states["q"].shape))


# ---- shapes, dtypes, sizes


# A program for each: a dtype only casts, so the second row has the other shapes of float16.
SHAPES_OF_DTYPES = [(shape, "bfloat16") for shape in SHAPES] + [
    pytest.param(shape, "float16", marks=() if shape == (5, 7, 11) else pytest.mark.slow) for shape in SHAPES
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES_OF_DTYPES, ids=str)
def test_every_shape_and_dtype(coder, shape, dtype):
    value, fresh = gradients(shape, dtype=dtype), coder.init(shape, dtype)
    payload, decoded, exact, state = encode_and_decode(coder, value, fresh)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(payload)) == coder.wire_bytes(shape, dtype)
    assert (decoded.shape, decoded.dtype) == (shape, dtype)
    assert state["residual"].shape == shape
    assert state["residual"].dtype == jnp.float32
    total = np.asarray(exact) + np.asarray(state["residual"])
    np.testing.assert_allclose(total, np.asarray(value, np.float32), atol=2e-6)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)


@pytest.mark.sampled(2)
def test_float64(coder):
    with jax.enable_x64(True):
        value = gradients((5, 7), dtype="float64")
        payload, decoded, _, state = encode_and_decode(coder, value, coder.init(value.shape, value.dtype))
        assert decoded.dtype == jnp.float64
        assert state["residual"].dtype == jnp.float32
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(payload)) == coder.wire_bytes((5, 7), "float64")
        np.testing.assert_allclose(np.asarray(decoded) + np.asarray(state["residual"]), value, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [*SHAPES, (40, 30), (3, 3, 8, 16)], ids=str)
def test_powersgd_every_shape(shape):
    coder = compression.PowerSGD(2)
    value = gradients(shape, dtype="bfloat16")
    sent = []

    def psum(tree):
        sent.extend(leaf.nbytes for leaf in jax.tree.leaves(tree))
        return tree

    reduce = jax.jit(lambda value: coder.allreduce(value, coder.init(shape, "bfloat16"), psum))
    total, state = reduce(value)
    assert (total.shape, total.dtype) == (shape, jnp.bfloat16)
    assert sum(sent) == (coder.wire_bytes(shape, "bfloat16") if value.size else 0)
    assert state["residual"].shape == shape
    assert coder.pays(shape, "float32") == (shape in [(40, 30), (3, 3, 8, 16), (5, 7, 11)])


PARTS = {"2bit": 16, "1bit": 32, "int3": 32 / 3, "int8": 4, "bf16": 2}


@pytest.mark.parametrize(("kind", "part"), PARTS.items())
def test_part_of_the_plain_bytes(kind, part):
    coder, size = coder_of({"type": kind}), 1 << 16
    assert coder.wire_bytes((size,), "float32") == pytest.approx(4 * size / part, rel=0.02)
    assert coder.pays((size,), "float32")


def test_what_does_not_pay():
    assert not coder_of({"type": "2bit"}).pays((1,), "float32")
    assert coder_of({"type": "2bit"}).pays((2,), "float32")
    assert not coder_of({"type": "2bit"}).pays((0,), "float32")
    assert not coder_of({"type": "2bit"}).pays((100,), "int32")
    assert not coder_of({"type": "bf16"}).pays((100,), "bfloat16")
    assert not coder_of({"type": "int8"}).pays((1,), "float32")
    assert not coder_of({"type": "int3"}).pays((4,), "float32")
    assert not coder_of({"type": "topk", "ratio": 0.6}).pays((100,), "float32")
    assert not compression.PowerSGD(2).pays((100,), "float32")
    assert not compression.PowerSGD(4).pays((6, 6), "float32")


@pytest.mark.parametrize("kind", ["1bit", "2bit", "bf16"])
def test_elementwise_codes_of_a_bucket_are_the_codes_of_its_parts(kind):
    coder = coder_of({"type": kind})
    assert coder.elementwise
    parts = [gradients(n, seed=n) for n in (32, 64, 45)]
    encode_all = jax.jit(lambda values: [encode(coder, value)[0] for value in values])
    whole, *each = encode_all([jnp.concatenate(parts), *parts])
    for name in whole:
        np.testing.assert_array_equal(whole[name], np.concatenate([payload[name] for payload in each]))


def test_class_attributes_say_how_a_store_may_use_it():
    known = {name: coder_of({"type": name}) for name in compression.TYPES if name != "none"}
    assert {name for name, coder in known.items() if coder.elementwise} == {"2bit", "1bit", "bf16"}
    assert {name for name, coder in known.items() if coder.linear} == {"powersgd"}
    assert {name for name, coder in known.items() if not coder.linear and coder.two_way} == {"int3"}


# ---- the same under every transform


def over_scan(push, devices, *args):
    return jax.lax.scan(lambda carry, row: (carry, push(*row)), None, args)[1]


@functools.cache
def pushed_eagerly(coder):
    """The function of one push, four values, their states, and what came of each push at the prompt."""
    values = np.asarray(gradients((4, 5, 9)))
    states = jax.tree.map(lambda x: np.stack([x] * 4), coder.init((5, 9), "float32"))

    def push(value, state):
        payload, state = coder.encode(value, state)
        return payload, coder.decode(payload, (5, 9), "float32"), state

    expected = [push(*jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), (values, states))) for i in range(4)]
    return push, values, states, jax.tree.map(lambda *x: np.stack(x), *expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("over", [over_vmap, over_pmap, over_shard_map, over_scan], ids=lambda f: f.__name__)
def test_transforms_give_the_eager_bits(coder, over):
    push, values, states, expected = pushed_eagerly(coder)
    got = over(push, FOUR, values, states)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if one.dtype == jnp.float32:  # products may be fused with sums
            np.testing.assert_allclose(one, other, atol=1e-6)
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", [s for s in CODERS if s["type"] in ("1bit", "2bit", "int8")], ids=name_of)
def test_the_packed_form_crosses_between_devices(spec):
    coder, size, n = coder_of(spec), 4096, 4

    def body(value, state):
        gathered = jax.lax.all_gather(coder.encode(value, state)[0], "data")
        return compression.decode_sum(coder, gathered, (size,), "float32")

    states = jax.tree.map(lambda x: np.stack([x] * n), coder.init((size,), "float32"))
    values = gradients((n, size))
    mapped = over_rows(body, jax.devices()[:n])
    summed = np.asarray(mapped(values, states))
    np.testing.assert_allclose(summed, np.broadcast_to(summed[:1], summed.shape))
    sent = collectives_in(mapped.lower(values, states).compile().as_text())
    assert {name for name, _ in sent} == {"all-gather"}
    assert sum(size for _, size in sent) == n * coder.wire_bytes((size,), "float32")


def test_equal_compressors_are_one_compiled_program():
    spec = {"type": "2bit", "threshold": 0.5}
    assert coder_of(spec) == coder_of({"type": "2bit", "threshold": np.float64(0.5)})
    assert hash(coder_of(spec)) == hash(coder_of(spec))
    assert coder_of(spec) != coder_of({**spec, "threshold": 0.25})
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(coder, value):
        traces.append(coder)
        return encode(coder, value)

    for _ in range(3):
        run(coder_of(spec), jnp.ones(5))
    assert len(traces) == 1


# ---- errors


def test_none():
    assert compression.make({"type": "none"}) is None


def made(kind, **parameters):
    return lambda: compression.make({"type": kind, **parameters})


KNOWN = "none, 1bit, 2bit, bf16, int3, int8, powersgd, topk"
T, V = TypeError, ValueError
# The error, the call, and the names and values that its message must have, in this order.
REFUSED = {
    "a word": (T, lambda: compression.make("2bit"), ['{"type": "2bit"}', "got '2bit'"]),
    "an unknown type": (V, made("3bit"), ["type '3bit'", KNOWN, "'2bit'"]),
    "no type": (V, lambda: compression.make({"threshold": 0.5}), ["type None", KNOWN]),
    "several types": (V, made(["2bit"]), ["list of 1", KNOWN]),
    "an unknown parameter": (V, made("2bit", treshold=1), ["'treshold'", "known are threshold", "'threshold'"]),
    "a parameter of no compression": (V, made("none", ratio=1), ["'none'", "'ratio'"]),
    "a threshold of 0": (V, made("2bit", threshold=0), ["'2bit'", "threshold", "float32 > 0", "got 0"]),
    "a threshold below 0": (V, made("2bit", threshold=-0.5), ["threshold", "float32 > 0", "got -0.5"]),
    "a threshold that float32 rounds to 0": (V, made("2bit", threshold=1e-60), ["threshold", "got 1e-60"]),
    "a threshold of NumPy": (V, made("2bit", threshold=np.float64(-1)), ["threshold", "got -1.0"]),
    "a text for a threshold": (T, made("2bit", threshold="0.5"), ["threshold", "got '0.5'"]),
    "a bool for a threshold": (T, made("2bit", threshold=True), ["threshold", "got True"]),
    "no number for a threshold": (V, made("1bit", threshold=np.nan), ["'1bit'", "threshold", "got nan"]),
    "an unknown rounding": (V, made("int8", rounding="up"), ["rounding 'up'", "nearest, stochastic"]),
    "a ratio above 1": (V, made("topk", ratio=1.5), ["'topk'", "ratio", "> 0 and <= 1", "got 1.5"]),
    "a rank of 0": (V, made("powersgd", rank=0), ["'powersgd'", "rank", "1 or more", "got 0"]),
    "a float for a rank": (T, made("powersgd", rank=1.5), ["rank", "1 or more", "got 1.5"]),
    "a payload of powersgd": (
        T,
        lambda: compression.PowerSGD().encode(jnp.ones((2, 3)), compression.PowerSGD().init((2, 3), "float32")),
        ["'powersgd'", "payload", "`allreduce`"],
    ),
    "a payload for powersgd": (
        T,
        lambda: compression.PowerSGD().decode(jnp.ones((2, 3)), (2, 3), "float32"),
        ["'powersgd'", "payload", "`allreduce`"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, call, content = REFUSED[case]
    with pytest.raises(error, match=".*".join(map(re.escape, content))):
        call()


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_only_floating_values_are_compressed(coder, dtype):
    assert not coder.pays((100,), dtype)
    with pytest.raises(TypeError, match=f"floating.* {dtype}"):
        coder.init((3,), dtype)


# ---- many devices


@pytest.mark.parametrize("count", [16, 17, 40])
def test_many_payloads_are_summed_in_their_order(count):
    coder = coder_of({"type": "int8"})
    values = np.random.default_rng(0).normal(size=(count, 5)).astype(np.float32)
    payloads, _, decoded, _ = zip(*[encode_and_decode(coder, v) for v in values], strict=True)
    stacked = jax.tree.map(lambda *x: np.stack(x), *payloads)
    np.testing.assert_allclose(
        decode_sum(coder, stacked, (5,), "float32"), sum(map(np.asarray, decoded)), rtol=1e-5, atol=1e-5
    )


def test_the_program_has_the_same_size_for_any_number_of_devices():
    coder = coder_of({"type": "2bit", "threshold": 0.5})

    def equations(count):
        words = jax.eval_shape(lambda: coder.encode(jnp.ones(40), coder.init((40,), "float32"))[0])
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), words)
        text = str(jax.make_jaxpr(lambda p: compression.decode_sum(coder, p, (40,), "float32"))(stacked))
        return text.count("\n")

    assert equations(2) == equations(16) == equations(512)
