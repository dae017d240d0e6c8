"""Sums of compressed values over devices: the same bits in every way, few bytes, and programs of one size."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P
from kv_model import on_mesh
from test_compression import name_of

from jaxpar import checkpoint, compression, kv, updaters
from jaxpar._devices import collectives
from jaxpar.compression import _codes, _sums as compressed
from jaxpar.compression._grid import Grid

# ---- sums as integers


@settings(max_examples=60, deadline=None)
@given(
    st.floats(2**-60, 2**60, width=32),
    st.sampled_from([1, 2, 3, 4, 7, 8, 16, 31, 64, 200, 512]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2]),
)
def test_the_code_of_a_sum_gives_it_back_bit_for_bit(step, count, seed, stride):
    rng, grid = np.random.default_rng(seed), Grid(step, count, stride)
    terms = rng.choice([-1, 1] if stride == 2 else [-1, 0, 1], size=(count, 64))
    terms[:, :8] = 1  # the largest
    terms[:, 8:32] = np.where(rng.random((count, 24)) < 0.1, -1, 1)
    total = sum(row.astype(np.float32) * np.float32(step) for row in terms)  # from left to right
    if grid.bits == 32:
        return
    codes = np.asarray(grid.encode(jnp.asarray(total)))
    assert int(codes.max()) < 2**grid.bits
    np.testing.assert_array_equal(np.asarray(grid.decode(jnp.asarray(codes))), total)
    if grid.is_exact:
        np.testing.assert_array_equal(total, terms.sum(0) * np.float32(step))


def test_bits_of_a_sum():
    assert [Grid(0.5, n).bits for n in (1, 2, 3, 4, 7, 8, 64, 512)] == [2, 3, 3, 4, 4, 5, 8, 11]
    assert [Grid(1.0, n, stride=2).bits for n in (1, 2, 3, 8, 512)] == [1, 2, 2, 4, 10]
    assert [Grid(0.1, n).bits for n in (1, 2, 8, 64, 512)] == [2, 3, 10, 19, 28]
    assert all(Grid(0.375, n).is_exact for n in (2, 512, 1 << 20))
    assert not Grid(0.1, 8).is_exact
    assert Grid(0.1, 2000).bits == 32  # the order of the additions needs as many bits as float32 has
    assert Grid(3e38, 2).bits == Grid(1e-38, 2).bits == 32  # sums overflow, units are subnormal


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bits", [1, 3, 5, 11, 31])
def test_codes_in_planes_and_lanes_come_back(bits):
    rng = np.random.default_rng(bits)
    short, long = (rng.integers(0, 2**bits, (3, size), np.uint32) for size in (64, 2 * 128 * 32))  # two blocks of lines

    @jax.jit
    def there_and_back(rows, flat):
        planes, lanes = [_codes.pack_planes(codes, bits) for codes in rows], _codes.pack_lanes(flat, bits)
        back = [_codes.in_order(_codes.unpack_planes(x, bits), 1) for x in planes]
        return planes, lanes, back, _codes.unpack_lanes(lanes, bits, 13)

    planes, lanes, unpacked, flat = there_and_back((short, long), short[0, :13])
    assert [(x.shape, x.dtype) for x in planes] == [((3, n * bits), jnp.uint32) for n in (2, 256)]
    np.testing.assert_array_equal(unpacked[0], short)
    np.testing.assert_array_equal(unpacked[1], long)
    assert lanes.size == -(-13 // (32 // bits))
    np.testing.assert_array_equal(flat, short[0, :13])


# ---- every way gives the sum of the payloads in their order


N = 8
SPECS = [
    {"type": "2bit", "threshold": 0.5},
    {"type": "2bit", "threshold": 0.1},
    {"type": "1bit"},
    {"type": "bf16"},
    {"type": "int8"},
    {"type": "topk", "ratio": 0.3},
]


LIMITS = collectives.BucketLimits()


def summed(spec, values, limits=LIMITS, dtype="float32"):
    """The sums of (devices, *shape) values over devices, as each device has them, and the new states."""
    compressor, count = compression.make(spec), values[0].shape[0]
    assert compressor is not None
    states = [compressor.init(v.shape[1:], dtype) for v in values]

    def body(values):
        sums, new = compressed.allreduce(compressor, [v[0] for v in values], states, "data", limits)
        return [s[None] for s in sums], jax.tree.map(lambda x: x[None], new)

    run = on_mesh(body, jax.devices()[:count], P("data"), P("data"))
    return jax.tree.map(np.asarray, run([jnp.asarray(v, dtype) for v in values]))


@functools.partial(jax.jit, static_argnums=0)
def decoded(compressor, values):
    """What each device sends of each value, decoded; one program compiles sooner than its operations one by one."""

    def one(value):
        payload, _ = compressor.encode(value, compressor.init(value.shape, value.dtype))
        return compressor.decode(payload, value.shape, "float32")

    return [jax.vmap(one)(value) for value in values]


def expected(spec, values, dtype="float32"):
    """The sum of what each device decodes, added in the order of the devices, on one device."""
    each = decoded(compression.make(spec), [jnp.asarray(v, dtype) for v in values])
    return [sum(np.asarray(value)).astype(jnp.dtype(dtype)) for value in each]


def normal(*shapes, count=N, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(count, *shape)).astype(np.float32) for shape in shapes]


SHAPES = [(2100,), (5, 7), (3,), (), (8200,)]
NARROW = {"type": "2bit", "threshold": 0.3}
BUCKETS = {"each_alone": 0, "one_bucket": 1 << 20}
SUMS = {  # the specification, the shapes, the options of `summed`
    **{name_of(spec): (spec, SHAPES, {}) for spec in SPECS},
    **{dtype: (NARROW, [(700,), (40,)], {"dtype": dtype}) for dtype in ("float16", "bfloat16")},
    **{
        name: (SPECS[1], [(64,), (3, 5), (40, 40)], {"limits": collectives.BucketLimits(alone_bytes=alone)})
        for name, alone in BUCKETS.items()
    },
}


def test_a_small_value_keeps_its_bits_beside_a_large_one():
    """A block of int8 has one scale, so it is of one value. Elements of other codes do not need that."""
    large, small = normal((40,), (40,))
    values = [1e3 * large, 1e-3 * small]
    sums, _ = summed({"type": "int8"}, values)
    for found, wanted in zip(sums, expected({"type": "int8"}, values), strict=True):
        np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("spec", "shapes", "options"), SUMS.values(), ids=SUMS)
def test_the_sum_is_that_of_the_decoded_payloads_on_every_device(spec, shapes, options):
    """Some values are gathered, some go to their owners. Narrow ones are rounded once. Buckets do not matter."""
    values = normal(*shapes)
    sums, _ = summed(spec, values, **options)
    for got, want in zip(sums, expected(spec, values, options.get("dtype", "float32")), strict=True):
        assert got.dtype == want.dtype
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))
        if spec["type"] == "int8":  # a product may be fused with the sum
            np.testing.assert_allclose(got[0], want, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(got[0], want)


@pytest.mark.slow
def test_every_way_gives_the_same_bits(monkeypatch):
    spec, values = {"type": "2bit", "threshold": 0.5}, normal((333,))
    found = {}
    for way in ("gather", "owners", "lanes", "dense"):
        monkeypatch.setattr(compressed, "bytes_of_words", lambda *args, way=way: {way: 0})
        found[way] = summed(spec, values)[0][0][0]
    for sums in found.values():
        np.testing.assert_array_equal(sums, expected(spec, values)[0])


# ---- bytes


@pytest.mark.parametrize("threshold", [0.5, 0.1])
@pytest.mark.parametrize("count", [2, 4, 8, 64, 512, 4096, 1 << 20])
def test_2bit_never_sends_more_than_plain(count, threshold):
    """Of an exact grid nothing is padded. Of another one an owner has at least one element."""
    for words in (1, 2, 7, 100, 1000, 10**6):
        grid = Grid(threshold, count)
        cost, plain = compressed.bytes_of_words(words, 4, 16, grid, count), 2 * 4 * 16 * words
        assert min(cost.values()) <= plain + (0 if grid.is_exact else 2 * 4 * count), (words, cost)


def lowered(body, count, out_specs, *arguments):
    """The program of a function over an abstract mesh of so many devices, as it is given to XLA."""
    mesh = AbstractMesh((count,), ("d",), axis_types=(AxisType.Auto,))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=out_specs, check_vma=False))
    return run.trace(*arguments).lower(lowering_platforms=("cpu",)).as_text()


def pushed(spec, count, shapes):
    """The program of one push."""
    keys = list(range(len(shapes)))
    store = kv.init(kv.create("device"), keys, [jnp.zeros(s) for s in shapes])
    store = kv.set_gradient_compression(store, spec)

    def body(values):
        after = kv.push(store, keys, [v[0] for v in values], axis_name="d")
        return kv.pull(after, keys), after.residuals

    text = lowered(body, count, (P(), P("d")), [jax.ShapeDtypeStruct((count, *s), jnp.float32) for s in shapes])
    return re.sub(r"replica_groups = dense<[^>]*> : tensor<[^>]*>", "", text)  # the numbers of the devices


TYPES = [*SPECS, {"type": "int3"}, {"type": "powersgd"}]


@pytest.mark.slow
@pytest.mark.parametrize("spec", TYPES, ids=name_of)
def test_the_program_does_not_grow_with_the_devices(spec):
    """Other ways may be chosen for more devices, so the largest program of few devices is the measure.

    It grows with the bits of a sum, of which there are log2 of the devices: each is a line where codes are unpacked.
    """
    few, many = ([len(pushed(spec, n, [(300, 100), (64,)])) for n in counts] for counts in ((2, 4, 8), (64, 512)))
    assert max(few) < 70_000
    assert max(many) <= 1.5 * max(few)
    assert few[2] <= 1.2 * few[1] or few[1] == few[0]  # equal where both are gathered, constant where both have owners


def sent_bytes(text, count):
    """What each device sends by the ring, of a program as it is given to XLA."""
    total = 0.0
    for op, dims, bits in re.findall(r'"stablehlo\.(all_\w+)".*?-> tensor<([\dx]*?)x?[uifb]+(\d+)>', text, re.S):
        size = np.prod([int(d) for d in dims.split("x") if d], dtype=int) * int(bits) / 8
        total += (2 if op == "all_reduce" else 1) * size * (count - 1) / count
    return total


LARGE = [(500, 800), (800,), (5000, 20), (20,)]
PLAIN = 4 * sum(int(np.prod(s)) for s in LARGE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        # of the plain bytes, for 2, 8, 64 and 512 devices: codes, and sums of as many bits as the grid needs
        ({"type": "2bit"}, [2 * 2, 2 + 5, 2 + 8, 2 + 11]),
        ({"type": "2bit", "threshold": 0.1}, [2 * 2, 2 + 10, 2 + 19, 2 + 28]),
        ({"type": "1bit"}, [2 * 1, 1 + 4, 1 + 7, 1 + 10]),
        ({"type": "int8"}, [2 * 8, 8 + 32, 8 + 32, 8 + 32]),
        ({"type": "bf16"}, [2 * 16, 16 + 32, 16 + 32, 16 + 32]),
        ({"type": "topk", "ratio": 0.3}, [2 * 0.6 * 32, 64, 64, 64]),
        ({"type": "int3"}, [3 + 3] * 4),
    ],
    ids=lambda x: name_of(x) if isinstance(x, dict) else "",
)
def test_what_is_sent_does_not_grow_with_the_devices(spec, parts):
    """What is padded, plain and agreed on besides is 6 % at most."""
    for count, bits in zip((2, 8, 64, 512), parts, strict=True):
        sent = sent_bytes(pushed(spec, count, LARGE), count) / (2 * (count - 1) / count * PLAIN)
        assert bits / 64 <= 1.01 * sent, (count, sent)
        assert sent <= 1.06 * bits / 64, (count, sent)


# ---- integers of 3 bits, coded twice


INT3 = {"type": "int3"}


def pushes_of_codes(kind, values, dtype="float32"):
    """The store after pushes (push, device, *shape) at the prompt."""
    here = jax.devices()[:4]
    store = kv.init(kv.create(kind, devices=here), 3, jnp.zeros(values.shape[2:], dtype))
    store = kv.set_updater(kv.set_gradient_compression(store, INT3), updaters.accumulate)
    for push in values:
        store = kv.push(store, 3, [jax.device_put(jnp.asarray(v, dtype), d) for v, d in zip(push, here, strict=True)])
    return store


def rounded(values):
    """(codes, step) in float32, as ties are decided there."""
    step = np.float32(np.abs(values).max() / np.float32(3))
    return np.round(values / step), step


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 13), (5,)], ids=str)  # the last owner has nothing of the second
def test_codes_are_those_of_the_rule(shape):
    (values,) = normal(shape, count=4, seed=1)
    store = pushes_of_codes("device", values[None])
    codes, step = rounded(values)
    np.testing.assert_allclose(store.residuals[3]["residual"], values - codes * step, atol=1e-5)
    total, pulled = codes.sum(0) * step, np.asarray(kv.pull(store, 3))
    _, back = rounded(total)
    assert np.abs(pulled - total).max() <= back / 2 + 1e-5  # sums of integers lie half way often, so either is right
    np.testing.assert_allclose(pulled / back, np.round(pulled / back), atol=1e-5)
    held = np.asarray(store.residuals[3]["owner_residual"]).reshape(-1)
    np.testing.assert_allclose(held[: total.size], (total - pulled).reshape(-1), atol=1e-5)
    assert not held[total.size :].any()  # what is padded


@pytest.mark.slow
def test_codes_of_zeros_tiny_and_wide_values():
    np.testing.assert_array_equal(kv.pull(pushes_of_codes("device", np.zeros((2, 4, 40))), 3), np.zeros(40))
    tiny = pushes_of_codes("device", np.full((1, 4, 40), 1e-30))
    np.testing.assert_allclose(np.asarray(kv.pull(tiny, 3), float) * 1e30, np.full(40, 4.0), rtol=1e-5)
    narrow = kv.pull(pushes_of_codes("sharded", np.full((1, 4, 40), 0.5), "bfloat16"), 3)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow.astype(jnp.float32), np.full(40, 2.0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_what_is_not_finite_is_not_hidden_by_codes(kind):
    values = np.ones((1, 4, 40))
    values[0, 2, 7] = np.nan
    assert np.isnan(kv.pull(pushes_of_codes(kind, values), 3)).all()


@pytest.mark.slow
def test_residuals_of_both_ends_stay_on_as_many_devices_and_start_again_on_others():
    store = pushes_of_codes("device", normal((50,), count=4)[0][None])
    held = store.residuals[3]
    assert {name: leaf.shape for name, leaf in held.items()} == {"residual": (4, 50), "owner_residual": (4, 13)}
    same = kv.place(store, jax.devices()[4:8]).residuals[3]
    for name, leaf in held.items():
        np.testing.assert_array_equal(same[name], leaf)
    other = kv.place(store, jax.devices()[:2]).residuals[3]
    assert {name: leaf.shape for name, leaf in other.items()} == {"residual": (2, 50), "owner_residual": (2, 25)}
    assert not any(np.any(leaf) for leaf in other.values())
    with pytest.raises(ValueError, match=r"key 3 is compressed and was pushed with 4 values before, now with 2"):
        kv.push(dataclasses.replace(store, devices=None), 3, [jnp.ones(50)] * 2)


@pytest.mark.slow
def test_both_residuals_are_saved_and_resumed(tmp_path, capsys):
    def state_of(count):
        store = kv.from_params({"w": jnp.zeros(50)}, devices=jax.devices()[:count])
        return kv.place(kv.set_gradient_compression(store, INT3), jax.devices()[:count])

    def push(store, seed):
        (values,) = normal((50,), count=len(store.devices), seed=seed)
        return kv.push(store, 0, [jax.device_put(v, d) for v, d in zip(values, store.devices, strict=True)])

    store = push(state_of(4), 0)
    checkpoint.save(tmp_path / "one", store)
    restored = checkpoint.restore(tmp_path / "one", like=state_of(4))
    assert push(restored, 1) == push(store, 1)
    assert not capsys.readouterr().err
    fewer = checkpoint.restore(tmp_path / "one", like=state_of(2))
    assert "residuals of keys [0] start anew" in capsys.readouterr().err
    assert not any(np.any(leaf) for leaf in fewer.residuals[0].values())


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[4], INT3], ids=name_of)
def test_over_two_axes_of_a_mesh(spec):
    """An axis name may be a tuple. The devices are then in the order of both axes."""
    (values,) = normal((40, 9), count=4)
    store = kv.set_gradient_compression(kv.init(kv.create("device"), 0, jnp.zeros((40, 9))), spec)

    def run(mesh, axes):
        body = lambda v: kv.pull(kv.push(store, 0, v[0], axis_name=axes), 0)  # noqa: E731
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(), check_vma=False))(values)

    four = np.array(jax.devices()[:4])
    np.testing.assert_allclose(
        run(Mesh(four.reshape(2, 2), ("a", "b")), ("a", "b")), run(Mesh(four, ("d",)), "d"), rtol=1e-6
    )


@pytest.mark.slow
def test_float64_values():
    with jax.enable_x64(True):
        values = np.random.default_rng(0).normal(size=(1, 4, 70))
        (total,), _ = summed(SPECS[1], [values[0]], dtype="float64")
        assert total.dtype == jnp.float64
        assert total[0].tolist() == expected(SPECS[1], [values[0]], "float64")[0].tolist()
        codes = kv.pull(pushes_of_codes("device", values, "float64"), 3)
        assert codes.dtype == jnp.float64
        assert np.isfinite(codes).all()


ELEMENTS = 16384  # 65,536 bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spec", "bytes_"),
    [
        ({"type": "none"}, [65536, 98304, 114688]),  # 2(N-1)/N of all
        ({"type": "2bit"}, [4096, 9216, 12544]),  # gathered; then 2 bits there, 4 or 5 bits back
        ({"type": "1bit"}, [2048, 6144, 8960]),
        ({"type": "bf16"}, [32768, 73728, 86016]),
        ({"type": "int8"}, [16448, 49344, 71736]),  # with 16 scales
        ({"type": "topk", "ratio": 0.3}, [39320, 98304, 114688]),
        ({"type": "int3"}, [6152, 9228, 10766]),  # with two scales, each summed by a ring
    ],
    ids=lambda x: x["type"] if isinstance(x, dict) else "",
)
def test_bytes_that_each_device_sends(spec, bytes_):
    assert [sent_bytes(pushed(spec, n, [(ELEMENTS,)]), n) for n in (2, 4, 8)] == bytes_


def test_parameters_are_gathered_once_on_512_devices():
    """One gather for each large value, which no bucket copies, and one for all small ones."""
    shapes, count = [(500, 800), (800,), (5000, 20), (20,), (64,)], 512

    def body(chunks):
        return collectives.all_gather(chunks, shapes, "d", LIMITS)

    sizes = [collectives.chunk_size(int(np.prod(s)), count) for s in shapes]
    text = lowered(body, count, P(), [jax.ShapeDtypeStruct((count * size,), jnp.float32) for size in sizes])
    assert text.count("stablehlo.all_gather") == 3
    assert text.count("stablehlo.concatenate") == 1
    assert sent_bytes(text, count) == (count - 1) * 4 * sum(sizes)
