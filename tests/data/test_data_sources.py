"""Training data of other libraries: what is read, how it is spread, what resuming skips, what is refused."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from world import STEP, crash_at, points, run_on, start_classifier

from jaxpar import data, train
from jaxpar._devices import processes
from jaxpar.data._batches import Placement
from jaxpar.data._iterable import _share_sharding

X = points(48).images
Y = X[:, :3].argmax(1)  # 64-bit
LOADER = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8)]
run = functools.partial(run_on, batch_size=8)


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


class Tensor:
    """As much of a PyTorch tensor as NumPy asks for, 64-bit labels included."""

    def __init__(self, array):
        self.values = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


class DeviceTensor:
    """A tensor that NumPy cannot read, and DLPack can."""

    def __init__(self, array):
        self.values = jnp.asarray(array)

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert device tensor to numpy")

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class Loader:
    """As a DataLoader: a length, and a new order for each pass."""

    def __init__(self, kind=Tensor):
        self.kind, self.passes = kind, 0

    def __len__(self):
        return len(LOADER)

    def __iter__(self):
        self.passes += 1
        return ([self.kind(x), self.kind(y)] for x, y in LOADER)


def by_hand(batches):
    """The weights after steps over these batches."""
    state = start_classifier()
    for x, y in batches:
        state, _ = STEP(state, {"image": x, "label": y.astype(np.int32)})
    return state.params["w"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, Tensor, DeviceTensor])
def test_a_loader_trains(kind):
    loader = Loader(kind)
    state, history = run(loader)
    assert loader.passes == 2
    assert int(state.step) == 12
    assert [record["examples_per_second"] > 0 for record in history] == [True, True]
    np.testing.assert_array_equal(state.params["w"], by_hand(LOADER * 2))


@pytest.mark.parametrize("devices", [1, 4], indirect=True)
def test_batches_are_split_over_the_devices(devices):
    (first, *rest) = data.from_iterable(LOADER).batches(8, devices=devices)
    assert len(rest) == 5
    assert first["image"].sharding.device_set == set(devices)
    assert first["image"].addressable_shards[0].data.shape == (8 // len(devices), 4)
    assert (first["image"].dtype, first["label"].dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(first["image"], X[:8])


class Seen:
    """A sharding of which two devices are of this process, as its `addressable_devices_indices_map` says."""

    def __init__(self, *rows):
        self.mesh, self.rows = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), rows

    def addressable_devices_indices_map(self, shape):
        return {device: (slice(*rows),) for device, rows in zip(jax.devices(), self.rows, strict=False)}


def test_a_batch_of_several_processes_lies_where_each_reads_its_share(monkeypatch):
    """Where a sharding gives rows to two processes the batch is split over all devices, and a step sends the rows."""
    monkeypatch.setattr(processes, "count", lambda: 2)
    shared, copied = Seen((0, 2), (2, 4)), Seen((0, 8), (0, 8))
    assert _share_sharding(8, Placement(shared, 4)) is shared
    assert _share_sharding(8, Placement(copied, 1)).spec == jax.sharding.PartitionSpec("data")
    assert _share_sharding(8, Placement()) is None


def test_elements_of_many_forms():
    pixels = (X * 255).astype(np.uint8)
    dicts = [{"image": pixels[:8].tolist(), "label": Y[:8].tolist()}]
    (batch,) = data.from_iterable(dicts).batches(8)
    assert batch["image"].shape == (8, 4)
    bytes_ = data.from_iterable([{"image": pixels[:8], "id": np.arange(8)}])
    (batch,) = bytes_.batches(8)
    np.testing.assert_allclose(batch["image"], pixels[:8] / np.float32(255), rtol=1e-6)
    (batch,) = dataclasses.replace(bytes_, dtype=None).batches(8)
    assert batch["image"].dtype == jnp.uint8
    (batch,) = data.from_iterable([(X[:8], Y[:8], Y[:8])], names=("a", "b", "c")).batches(8)
    assert sorted(batch) == ["a", "b", "c"]
    (batch,) = data.from_iterable([{"x": {"deep": X[:8]}}]).batches(8)
    assert batch["x"]["deep"].shape == (8, 4)


def test_single_examples_are_stacked_and_the_rest_left_out():
    rows = [{"image": x, "label": int(y)} for x, y in zip(X, Y, strict=True)]
    source = data.from_iterable(rows, batched=False)
    assert source.examples(10) == 48
    assert labels(source.batches(10)) == [Y[i : i + 10].tolist() for i in range(0, 40, 10)]
    state, _ = run(source)
    np.testing.assert_array_equal(state.params["w"], by_hand(LOADER * 2))


def test_a_function_of_the_epoch(tmp_path):
    asked = []

    def epoch(number):
        asked.append(number)
        return reversed(LOADER) if number % 2 else iter(LOADER)

    source = data.from_iterable(epoch, steps_per_epoch=6)
    state, history = run(source)
    assert asked == [0, 1]
    np.testing.assert_array_equal(state.params["w"], by_hand(LOADER + LOADER[::-1]))
    assert labels(source.batches(8, epochs=2, start=8)) == [y.tolist() for _, y in LOADER[::-1][2:]]
    assert asked == [0, 1, 1]  # earlier epochs are not even asked for
    assert labels(source.every_batch(8)) == [y.tolist() for _, y in LOADER]
    assert asked.pop() == 0  # an evaluation takes the first
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    with pytest.raises(RuntimeError, match="crash"):
        run(source, on_step=crash_at(9), **options)
    resumed, again = run(source, **options)
    np.testing.assert_array_equal(resumed.params["w"], state.params["w"])
    assert [r["loss"] for r in again] == [r["loss"] for r in history]


def test_an_iterator_is_read_on_and_never_rewound():
    stream = iter(LOADER * 2)
    state, _ = run(data.from_iterable(stream, steps_per_epoch=4), epochs=2)
    assert len(list(stream)) == 4  # no batch was read ahead
    np.testing.assert_array_equal(state.params["w"], by_hand((LOADER * 2)[:8]))
    stream = iter(LOADER)
    assert len(list(data.from_iterable(stream, steps_per_epoch=4).batches(8, start=1))) == 3
    assert len(list(stream)) == 3


def test_the_next_epoch_begins_with_what_an_epoch_left_of_a_pass():
    source = data.from_iterable(LOADER[:5], steps_per_epoch=2)
    want = [y.tolist() for _, y in LOADER[:5] * 2]
    assert labels(source.batches(8, epochs=5)) == want
    assert labels(source.batches(8, epochs=5, start=4)) == want[4:]


@pytest.mark.slow
def test_arrays_under_names_of_ones_own():
    source = data.from_arrays({"image": X, "label": Y})
    rng = jax.random.key(5)
    want = data.batches(data.Dataset(X, Y), 8, rng=rng, epochs=2, start=3)
    assert labels(source.batches(8, rng=rng, epochs=2, start=3, devices=jax.devices()[:2])) == labels(want)
    state, _ = run(source)
    other, _ = run(data.Dataset(X, Y))
    np.testing.assert_array_equal(state.params["w"], other.params["w"])
    (batch,) = data.from_arrays({"a": {"b": np.arange(4)}, "c": np.ones((4, 2))}).batches(4)
    assert batch["a"]["b"].tolist() == [0, 1, 2, 3]


def test_collect():
    loader = [*((Tensor(x), Tensor(y)) for x, y in LOADER), (X[:3], Y[:3])]
    dataset = data.collect(loader)
    np.testing.assert_array_equal(dataset.images, np.concatenate([X, X[:3]]))
    assert dataset.labels.dtype == np.int32
    examples = data.collect(({"image": x, "label": y, "text": 0} for x, y in zip(X, Y, strict=True)), batched=False)
    np.testing.assert_array_equal(examples.labels, Y)


def test_what_fit_asks_for_is_a_protocol():
    dataset = data.Dataset(X, Y)
    source = data.as_source(dataset)
    assert isinstance(source, data.Source)
    assert data.as_source(source) is source
    assert source.examples(8) == 48
    for batches in (source.batches(24), dataset.batches(24)):
        assert labels(batches) == [Y[:24].tolist(), Y[24:].tolist()]


@pytest.mark.others
@pytest.mark.skipif(importlib.util.find_spec("grain") is None, reason="Grain is not installed")
def test_a_data_set_of_grain():
    grain = importlib.import_module("grain.python")

    def epoch(number):
        rows = [{"image": x, "label": y} for x, y in zip(X, Y, strict=True)]
        return grain.MapDataset.source(rows).seed(number).shuffle().batch(8)

    state, _ = run(data.from_iterable(epoch, steps_per_epoch=6))
    assert int(state.step) == 12
    rows = grain.MapDataset.source([(x, y) for x, y in zip(X, Y, strict=True)]).batch(8)
    state, _ = run(rows)
    np.testing.assert_array_equal(state.params["w"], by_hand(LOADER * 2))


NUMBERS = {"x": np.arange(20.0, dtype=np.float32), "y": {"z": np.arange(20)}}
BATCHES = [{"x": np.full(4, i, np.float32)} for i in range(10)]


def seen(source, batch_size):
    return [x for batch in source.batches(batch_size) for x in np.asarray(batch["x"]).tolist()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("given", "batch_size"),
    [
        (NUMBERS, 1),
        (data.from_arrays(NUMBERS), 1),
        (BATCHES, 4),
        (data.from_iterable([{"x": np.float32(i)} for i in range(20)], batched=False), 1),
        (data.as_source(data.Dataset(np.zeros((20, 1)), np.arange(20))), 1),
    ],
    ids=["dict", "from_arrays", "batches", "examples", "DatasetSource"],
)
def test_every_source_of_known_length_is_split(given, batch_size):
    """The parts share no element and are the same ones each time. They train and they are evaluated."""
    parts, again = data.split(given, 0.7), data.split(given, 0.7, 0)
    if isinstance(given, data.DatasetSource):
        first, rest = (part.dataset.labels.tolist() for part in parts)
        assert again[0].dataset.labels.tolist() == first
    else:
        first, rest = (seen(part, batch_size) for part in parts)
        assert first == seen(again[0], batch_size)
        number = {"eval_fn": lambda params, batch: {"mean": batch["x"]}, "batch_size": 8}
        assert train.evaluate(0.0, data=parts[1], **number)["mean"] == pytest.approx(np.mean(rest))
    whole = data.as_source(given)
    assert [part.examples(batch_size) for part in parts] == [len(first), len(rest)]
    assert len(first) + len(rest) == whole.examples(batch_size)
    assert not set(first) & set(rest)
    assert (first, rest) == (sorted(first), sorted(rest))
    assert len(first) == 0.7 * whole.examples(batch_size)
    assert first != list(range(14))  # drawn
