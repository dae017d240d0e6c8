"""Tables, loaders and iterators of other libraries: they are read as they are, or refused with what to write."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import data, kv, train

pytestmark = pytest.mark.others
RNG = np.random.default_rng(0)
X, Y = RNG.random(40, np.float32), RNG.random(40, np.float32)
ARRAYS = {"x": X, "y": Y}


def loss_fn(params, batch, rng):
    return ((params["w"] * batch["x"] - batch["y"]) ** 2).mean(), {}


def eval_fn(params, batch):
    return {"error": abs(params["w"] * batch["x"] - batch["y"])}


STEP = train.make_train_step(loss_fn)


def fit(given, **options):
    state = train.create_state(kv.from_params({"w": jnp.ones(())}, optimizer=optax.sgd(0.5)), 0)
    return train.fit(state, STEP, given, **{"epochs": 2, "progress": False, **options})


def weight(given, **options):
    return np.asarray(fit(given, **options)[0].params["w"])


def frame(library):
    return pytest.importorskip(library).DataFrame(ARRAYS)


TABLES = {
    "pandas": lambda: frame("pandas"),
    "polars": lambda: frame("polars"),
    "rows": lambda: [{"x": x, "y": float(y)} for x, y in zip(X, Y, strict=True)],
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_a_dict_of_arrays(kind):
    table = TABLES[kind]()
    assert data.as_source(table).examples(8) == 40
    np.testing.assert_array_equal(weight(table, batch_size=8), weight(ARRAYS, batch_size=8))
    found, want = (list(data.batches(each, 16, rng=jax.random.key(1))) for each in (table, ARRAYS))
    jax.tree.map(np.testing.assert_array_equal, found, want)
    params = {"w": np.float32(2)}
    assert train.evaluate(params, data=table, eval_fn=eval_fn) == train.evaluate(params, data=ARRAYS, eval_fn=eval_fn)
    double = train.predict(params, lambda params, batch: params["w"] * batch["x"], table)
    np.testing.assert_array_equal(double, 2 * X)


def test_a_table_with_columns_of_images_and_labels_is_no_data_set():
    pandas = pytest.importorskip("pandas")
    (batch,) = data.batches(pandas.DataFrame({"images": X[:4], "labels": Y[:4]}), 4)
    assert sorted(batch) == ["images", "labels"]


def test_rows_are_known_by_a_number_or_a_text_in_the_first():
    batches = [{"x": X[:8].tolist(), "y": Y[:8]}]
    assert data.as_source(batches).examples(8) == 8
    assert data.as_source([{"x": X[:8], "y": np.float32(3)}] * 3).examples(1) == 3
    assert isinstance(data.as_source([{"x": X[:8]}] * 3), data.IterableSource)  # it may be either, and stays a batch


def stand_in(module, name, **members):
    """An object of a class that is called as that of a library."""
    return type(name, (), {"__module__": module, **members})()


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("datasets.arrow_dataset", "Dataset", r"write data.from_arrays\(dataset.with_format\('numpy'\)\[:\]\) to have"),
        ("datasets.iterable_dataset", "IterableDataset", r"batched=False, steps_per_epoch=...\)"),
        ("datasets.dataset_dict", "DatasetDict", r"write dataset\['train'\]"),
        ("polars.lazyframe.frame", "LazyFrame", r"write frame.collect\(\)"),
    ],
)
def test_what_can_be_read_in_several_ways_is_refused_with_the_line_to_write(module, name, words):
    given = stand_in(module, name, __iter__=lambda self: iter(()), __len__=lambda self: 3)
    for call in (
        lambda: fit(given),
        lambda: data.batches(given, 8),
        lambda: data.split(given, 0.5),
        lambda: train.evaluate({"w": 1.0}, data=given, eval_fn=eval_fn),
        lambda: train.predict({"w": 1.0}, lambda params, batch: batch, given),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_the_lines_for_a_data_set_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({name: values.tolist() for name, values in ARRAYS.items()})
    whole = data.from_arrays(dataset.with_format("numpy")[:])
    np.testing.assert_array_equal(weight(whole, batch_size=8), weight(ARRAYS, batch_size=8))
    rows = data.from_iterable(dataset.with_format("numpy"), batched=False)
    assert [batch["x"].shape for batch in rows.batches(8)] == [(8,)] * 5
    assert train.evaluate({"w": 1.0}, data=rows, eval_fn=eval_fn)["error"] == pytest.approx(abs(X - Y).mean())


class DataLoader:
    """As much of PyTorch's as says how its batches are made."""

    def __init__(self, batch_size, drop_last):
        self.dataset, self.batch_size, self.drop_last = range(40), batch_size, drop_last

    def __len__(self):
        return 40 // self.batch_size if self.drop_last else -(-40 // self.batch_size)

    def __iter__(self):
        for at in range(0, 40, self.batch_size):
            if at + self.batch_size <= 40 or not self.drop_last:
                yield {name: values[at : at + self.batch_size] for name, values in ARRAYS.items()}


def test_a_loader_says_the_size_of_its_batches():
    loader = DataLoader(16, drop_last=True)
    state, history = fit(loader)  # without batch_size
    assert int(state.step) == 4
    assert history[0]["step"] == 2
    assert [batch["x"].shape for batch in data.batches(loader)] == [(16,), (16,)]
    found = train.evaluate({"w": 1.0}, data=DataLoader(16, False), eval_fn=eval_fn)
    assert found["error"] == pytest.approx(abs(X - Y).mean())
    assert int(fit(DataLoader(8, drop_last=False))[0].step) == 10


def test_a_batch_has_the_size_of_those_that_are_given_otherwise_32():
    def shapes(given):
        return [batch["x"].shape for batch in data.batches(given)]

    assert shapes([{"x": X[:10]}, {"x": X[10:20]}]) == [(10,), (10,)]
    assert shapes(ARRAYS) == [(32,)]
    assert data.batches(data.Dataset(X, Y)).__next__()["label"].shape == (32,)
    assert int(fit(ARRAYS)[0].step) == 2
    assert train.predict(2.0, lambda params, x: params * x, X).shape == (40,)


@pytest.mark.parametrize("option", [{"drop_remainder": False}, {"axis_name": "x"}, {"resident": True}])
def test_an_option_that_the_data_do_not_have(option):
    (name,) = option
    with pytest.raises(TypeError, match=f"IterableSource.* got an unexpected keyword argument '{name}'"):
        data.batches([{"x": X}], **option)
    if name != "resident":
        assert len(list(data.batches(ARRAYS, 16, **option))) == (3 if name == "drop_remainder" else 2)


class Iterator:
    """As those of Grain: it says where it is, and is set there."""

    def __init__(self, loader, as_bytes=False):
        self.loader, self.at, self.as_bytes = loader, 0, as_bytes

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.loader.most:
            raise StopIteration
        self.at += 1
        self.loader.read.append(self.at)
        rows = slice((self.at - 1) * 8 % 40, (self.at - 1) * 8 % 40 + 8)
        return {name: values[rows] for name, values in ARRAYS.items()}

    def get_state(self):
        return b"at %d" % self.at if self.as_bytes else {"at": self.at}

    def set_state(self, state):
        self.at = int(state[3:]) if self.as_bytes else state["at"]


class Loader:
    """What gives such an iterator for each pass, and knows what was read."""

    def __init__(self, most=5):
        self.read, self.most = [], most

    def __iter__(self):
        return Iterator(self)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["loader", "iterator", "bytes"])
def test_a_resumed_run_reads_on_where_the_iterator_was(kind, tmp_path):
    def source(loader):
        given = loader if kind == "loader" else Iterator(loader, as_bytes=kind == "bytes")
        return data.from_iterable(given, steps_per_epoch=5)

    def loader():
        return Loader(5 if kind == "loader" else 10)

    options = {"batch_size": 8, "checkpoint_dir": tmp_path}
    fit(source(loader()), max_steps=7, **options)
    again = loader()
    state, history = fit(source(again), **options)
    assert again.read == ([3, 4, 5] if kind == "loader" else [8, 9, 10])  # nothing is read again
    want, want_history = fit(source(loader()), batch_size=8)
    np.testing.assert_array_equal(state.params["w"], want.params["w"])
    assert [record["loss"] for record in history] == [record["loss"] for record in want_history]


def test_a_loader_and_an_iterator_of_grain(tmp_path):
    grain = pytest.importorskip("grain.python")
    rows = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]

    def loader():
        sampler = grain.IndexSampler(40, grain.NoSharding(), shuffle=True, num_epochs=1, seed=0)
        return grain.DataLoader(data_source=rows, sampler=sampler, operations=[grain.Batch(8)])

    def stream():
        return iter(grain.MapDataset.source(rows).seed(0).shuffle().repeat().batch(8).to_iter_dataset())

    for name, make in (("loader", loader), ("stream", stream)):
        options = {"batch_size": 8, "checkpoint_dir": tmp_path / name}
        fit(data.from_iterable(make(), steps_per_epoch=5), max_steps=7, **options)
        state, _ = fit(data.from_iterable(make(), steps_per_epoch=5), **options)
        want = weight(data.from_iterable(make(), steps_per_epoch=5), batch_size=8)
        np.testing.assert_array_equal(state.params["w"], want)
    batches = list(itertools.islice(data.batches(data.from_iterable(stream(), steps_per_epoch=2), 8), 2))
    assert [batch["x"].shape for batch in batches] == [(8,), (8,)]


def test_a_part_of_arrays_has_a_length_names_and_shapes():
    part, rest = data.split({"x": np.zeros((10, 3), np.float32), "y": {"z": np.arange(10)}}, 0.7)
    assert (len(part), len(rest)) == (7, 3)
    assert part["x"].shape == (7, 3)
    assert sorted([*part["y"]["z"].tolist(), *rest["y"]["z"].tolist()]) == list(range(10))
    assert repr(rest) == "ArraySource(3 examples: x float32 (3,), y/z int64 ())"
    assert repr(data.from_arrays(np.zeros((2, 3)))) == "ArraySource(2 examples: float64 (3,))"
    with pytest.raises(TypeError, match="not iterable"):
        iter(part)
