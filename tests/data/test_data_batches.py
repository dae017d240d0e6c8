"""Batches: what is in them, in which order, where they lie, and what they cost."""

import functools
import gc
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import data, kv, models, train
from jaxpar._core.arrays import is_prng_key
from jaxpar.data import Dataset, _batches, batches


def make(size=37, shape=(3, 2, 1), dtype=np.uint8):
    pixels = np.random.default_rng(size).integers(0, 256, (size, *shape))
    return Dataset(pixels.astype(dtype), np.arange(size))


def labels(found):
    return [np.asarray(batch["label"]).tolist() for batch in found]


def same(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys() == {"image", "label"}
        for name in mine:
            assert mine[name].dtype == other[name].dtype
            np.testing.assert_array_equal(mine[name], other[name])


@pytest.mark.slow
def test_without_rng_the_stored_order_and_the_remainder_dropped():
    assert labels(batches(make(10), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert labels(batches(make(10), 4, drop_remainder=False))[2] == [8, 9]
    assert labels(batches(make(4), 2, epochs=2)) == [[0, 1], [2, 3]] * 2
    assert labels(itertools.islice(batches(make(4), 4, epochs=None), 3)) == [[0, 1, 2, 3]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("impl", [None, pytest.param("rbg", marks=pytest.mark.slow)])
def test_each_epoch_is_the_permutation_of_fold_in(impl):
    rng = jax.random.key(3, impl=impl)
    found = labels(batches(make(12), 4, rng=rng, epochs=3))
    for epoch in range(3):
        order = jax.random.permutation(jax.random.fold_in(rng, epoch), 12).tolist()
        assert [*itertools.chain(*found[3 * epoch : 3 * epoch + 3])] == order
    assert found[:3] != found[3:6]


@pytest.mark.slow
def test_raw_and_typed_keys_give_the_same_batches():
    same(batches(make(), 8, rng=jax.random.PRNGKey(5)), batches(make(), 8, rng=jax.random.key(5)))


TABLE = {"x": np.arange(40)}
MODELS = {
    **{"lenet": (), "strided": (), "matrix_factorization": (3, 4, 2)},
    "transformer": (models.transformer.Config(1, 4, 2, 8, 5),),
}
TAKE_A_SEED = {
    "data.batches": lambda rng: [*data.batches(TABLE, 8, rng=rng)],
    "Dataset.batches": lambda rng: [*make(40).batches(8, rng=rng)],
    "from_arrays": lambda rng: [*data.from_arrays(TABLE).batches(8, rng=rng)],
    "combine": lambda rng: [*data.combine((TABLE, TABLE)).batches(8, rng=rng)],
    "split": lambda rng: data.split(TABLE, 0.5, rng)[0].arrays,
    "create_state": lambda rng: train.create_state(kv.from_params({"w": np.zeros(2)}), rng).rng,
    "start": lambda rng: train.start({"w": np.zeros(2)}, optax.sgd(0.1), lambda p, b: p["w"].sum(), rng=rng)[0].rng,
    **{
        name: functools.partial(lambda name, rng: getattr(models, name).init(rng, *MODELS[name]), name)
        for name in MODELS
    },
}


@pytest.mark.parametrize("of", TAKE_A_SEED)
def test_an_int_is_the_key_of_that_seed_wherever_rng_is_asked_for(of):
    by_int, by_key, other = (jax.tree.leaves(TAKE_A_SEED[of](rng)) for rng in (5, jax.random.key(5), 6))
    for x, y in zip(by_int, by_key, strict=True):
        np.testing.assert_array_equal(*(jax.random.key_data(z) if is_prng_key(z) else z for z in (x, y)))
    assert any(not np.array_equal(x, y) for x, y in zip(by_int, other, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [2, 8], indirect=True)
def test_same_batches_on_any_number_of_devices(devices):
    dataset, rng = make(50), jax.random.key(0)
    one = batches(dataset, 16, rng=rng, epochs=2)
    same(batches(dataset, 16, rng=rng, epochs=2, devices=devices), one)


@pytest.mark.parametrize("devices", [4], indirect=True)
@pytest.mark.parametrize(("axis", "options"), [("data", {}), ("worker", {"axis_name": "worker"})])
def test_sharding_is_over_the_devices_in_the_order_given_and_the_axis_of_that_name(devices, axis, options):
    mesh = Mesh(np.array(devices[::-1]), (axis,))
    for resident in (True, False):
        batch = next(batches(make(), 8, devices=devices[::-1], resident=resident, **options))
        for array in batch.values():
            assert array.sharding == NamedSharding(mesh, P(axis))
        shard = next(s for s in batch["label"].addressable_shards if s.device == devices[-1])
        assert shard.data.tolist() == list(range(8 // len(devices)))


@pytest.mark.slow
def test_without_devices_arrays_are_uncommitted():
    for resident in (True, False):
        batch = next(batches(make(), 8, rng=jax.random.key(0), resident=resident))
        assert not any(array.committed for array in batch.values())


def test_streaming_keeps_two_batches_ahead(monkeypatch):
    sent = []
    send = _batches.send
    monkeypatch.setattr(_batches, "send", lambda *a: sent.append(len(a[1])) or send(*a))
    found = batches(make(40), 8, resident=False)
    next(found)
    assert len(sent) == 2 * 3  # images and labels of the one handed out and of the two behind it
    assert len(list(found)) == 4


@pytest.mark.slow
def test_images_are_scaled_on_the_way_or_left_alone():
    dataset = make(8)
    for resident in (True, False):
        image = next(batches(dataset, 8, resident=resident))["image"]
        assert image.dtype == jnp.float32
        np.testing.assert_allclose(image, dataset.images / np.float32(255), rtol=1.2e-7)
        assert (image.min() >= 0) & (image.max() <= 1)
        half = next(batches(dataset, 8, resident=resident, dtype=jnp.bfloat16))["image"]
        assert half.dtype == jnp.bfloat16
        np.testing.assert_array_equal(half, image.astype(jnp.bfloat16))
        raw = next(batches(dataset, 8, resident=resident, dtype=None))["image"]
        assert raw.dtype == jnp.uint8
        np.testing.assert_array_equal(raw, dataset.images)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int16])
def test_other_dtypes_are_only_cast(dtype):
    dataset = make(8, dtype=dtype)
    for resident in (True, False):
        image = next(batches(dataset, 8, devices=jax.devices()[:2], resident=resident))["image"]
        assert image.dtype == jnp.float32
        np.testing.assert_array_equal(image, dataset.images.astype(np.float32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rng", [None, jax.random.key(2)], ids=["in order", "shuffled"])
@pytest.mark.parametrize("resident", [True, False])
def test_start_skips_exactly_that_many_batches_and_streamed_ones_are_the_resident_ones(rng, resident):
    options = {"rng": rng, "epochs": 3, "drop_remainder": False, "devices": jax.devices()[:2]}
    everything = list(batches(make(10), 4, **options, resident=True))
    options["resident"] = resident
    for start in range(len(everything)):
        same(batches(make(10), 4, start=start, **options), everything[start:])
    assert list(batches(make(10), 4, start=len(everything), **options)) == []


def test_start_sends_nothing_of_what_it_skips(monkeypatch):
    rows = []
    monkeypatch.setattr(_batches, "send", lambda array, index, mesh: rows.extend(index) or jnp.zeros(1))
    list(batches(make(40), 8, start=4, resident=False))
    assert rows == [*range(32, 40)] * 2


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), batch_size=st.integers(1, 12), epochs=st.integers(0, 3), drop=st.booleans())
def test_segments_cover_each_epoch_once(size, batch_size, epochs, drop):
    if drop and size < batch_size:
        return
    found = [
        (segment.epoch, segment.first + i * segment.batch_size, segment.batch_size)
        for segment in _batches.segments(size, batch_size, epochs, 0, drop)
        for i in range(segment.number)
    ]
    count = data.num_batches(size, batch_size, drop_remainder=drop)
    assert len(found) == epochs * count
    for epoch in range(epochs):
        covered = [i for e, at, n in found if e == epoch for i in range(at, at + n)]
        assert covered == list(range(count * batch_size if drop else size))


@pytest.mark.parametrize("devices", [None, 4], ids=["default device", "4 devices"])
def test_a_batch_needs_nothing_from_the_host(devices):
    found = batches(make(400), 8, rng=jax.random.key(0), devices=devices and jax.devices()[:devices])
    next(found)
    with jax.transfer_guard("disallow"):
        rest = list(found)
    assert [batch["label"].shape for batch in rest] == [(8,)] * 49


@pytest.mark.slow
def test_one_program_for_all_batches_of_all_epochs(caplog):
    dataset, options = make(71, (5, 1)), {"rng": jax.random.key(0), "devices": jax.devices()[:4]}
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            list(batches(dataset, 8, epochs=3, **options))
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert len([m for m in compiled if "local" in m]) == 1
    assert len([m for m in compiled if "draw" in m]) == 1


@pytest.mark.slow
def test_small_batches_are_gathered_eight_at_a_time_and_large_ones_alone(monkeypatch):
    asked, gather = [], _batches.gather

    def counted(count, several, *rest):
        asked.append((count, several))
        return gather(count, several, *rest)

    monkeypatch.setattr(_batches, "gather", counted)
    assert labels(batches(make(39), 2, epochs=2, drop_remainder=False))[19:21] == [[38], [0, 1]]
    assert asked == [(2, 8)] * 3 + [(1, 8)] + [(2, 8)] * 3 + [(1, 8)]
    asked.clear()
    list(batches(make(8, (1 << 20,)), 2, dtype=None))  # 2 MB
    assert asked == [(2, 8)]
    asked.clear()
    list(batches(make(8, (1 << 20,)), 2))  # 8 MB in float32
    assert asked == [(2, 2)] * 2
    asked.clear()
    list(batches(make(8, (1 << 20,)), 8))
    assert asked == [(8, 1)]


def on_devices(shape):
    gc.collect()
    return len([array for array in jax.live_arrays() if array.shape == shape])


@pytest.mark.usefixtures("quick_collections")
def test_the_copy_on_the_devices_is_made_once_and_goes_with_the_data_set():
    dataset, shape = make(41, (7, 1)), (41, 7, 1)
    for devices in (None, jax.devices()[:2]):
        before = on_devices(shape)
        for _ in range(3):
            list(batches(dataset, 4, devices=devices))
            assert on_devices(shape) == before + 1
    for count in (3, 4):
        list(batches(dataset, 12, devices=jax.devices()[:count]))
    assert on_devices(shape) == 2  # the two placements used last
    del dataset
    assert on_devices(shape) == 0


def test_residence_is_decided_by_the_memory_that_is_free(monkeypatch):
    dataset, free = make(40), []
    monkeypatch.setattr(_batches, "free_bytes", lambda device: free[-1])
    chosen = []
    for name in ("from_devices", "from_host"):
        run = getattr(_batches, name)
        monkeypatch.setattr(_batches, name, lambda *args, name=name, run=run: chosen.append(name) or run(*args))
    two_copies = 2 * (dataset.images.nbytes + dataset.labels.nbytes)
    for room in (None, two_copies, two_copies - 1):
        free.append(room)
        batches(make(40), 8, devices=jax.devices()[:2])
    assert chosen == ["from_devices", "from_devices", "from_host"]
    list(batches(dataset, 8, devices=jax.devices()[:2], resident=True))
    batches(dataset, 8, devices=jax.devices()[:2])
    assert chosen[3:] == ["from_devices", "from_devices"]  # it is there already


def test_a_partition_spec_is_over_the_mesh_that_is_set():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[1:3])
    with jax.set_mesh(mesh):
        (batch,) = batches(make(4), 4, sharding=P("data"))
        (other,) = data.prefetch([np.zeros(4)], P("data"))
    assert batch["label"].sharding == other.sharding == NamedSharding(mesh, P("data"))


@pytest.mark.parametrize("size", [0, 2, 9])
def test_an_error_of_what_is_read_ahead_comes_after_the_batches_before_it(size):
    def read():
        yield from np.arange(4)
        raise OSError("the disk is gone")

    found = data.prefetch(read(), size=size)
    assert [int(next(found)) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)


def test_free_memory_is_what_the_device_says():
    class Device:
        platform = "gpu"

        def __init__(self, stats):
            self.memory_stats = lambda: stats

    assert _batches.free_bytes(Device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert _batches.free_bytes(Device(None)) is None
    assert _batches.free_bytes(jax.devices()[0]) > 0


def test_dataset_prints():
    assert repr(make(5)) == "Dataset(5 images uint8 (3, 2, 1), labels int32, source='arrays')"
    assert make(5).labels.dtype == np.int32
    assert Dataset(np.zeros((2, 3)), [0.5, 1.5]).labels.dtype == np.float64
    assert len(Dataset(jnp.zeros((2, 3)), jnp.zeros(2, jnp.int8))) == 2


@pytest.mark.parametrize("values", [np.array([-(2**31), 2**31 - 1]), np.array([0, 2**32 - 1], np.uint64)])
def test_64_bit_integers_that_fit(values):
    for source in ({"id": values}, [{"id": values}]):
        (batch,) = data.batches(source, 2)
        assert batch["id"].tolist() == values.tolist()
