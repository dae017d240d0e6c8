"""Where arrays come in: whose memory they are, which numbers fit, and how long a batch and an epoch are."""

import mmap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import data, kv, parallel, sparse, train
from jaxpar._core import host

TX = optax.sgd(0.01)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 8, 3)).astype(np.float32)
Y = RNG.standard_normal((12, 8)).astype(np.float32)
BATCHES = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]


def loss(params, batch, rng):
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean(), {}


STEP = train.make_train_step(loss)


def start(count=1):
    store = kv.from_params({"w": jnp.zeros(3)}, optimizer=TX)
    return train.create_state(store, 0, devices=jax.devices()[:count])


def trained(batches, count=1):
    """The weights after steps over batches that nobody changes."""
    state = start(count)
    for batch in batches:
        state, _ = STEP(state, jax.tree.map(jnp.array, batch))
    return np.asarray(state.params["w"])


def fit(source, count=1, **options):
    return train.fit(start(count), STEP, source, batch_size=8, progress=False, **options)


# Whoever keeps an array owns it. Memory of `mmap` begins at a page, so a CPU device takes it as it is.


def page(like):
    memory = np.frombuffer(mmap.mmap(-1, max(1, like.nbytes)), like.dtype).reshape(like.shape)
    memory[...] = like
    return memory


def read_only(array):
    view = array[:]
    view.flags.writeable = False
    return view


def refilling(batches, given=lambda array: array):
    """A loader with one buffer, as many have."""
    buffer = {name: page(array) for name, array in batches[0].items()}
    for batch in batches:
        for name, array in batch.items():
            buffer[name][...] = array
        yield {name: given(array) for name, array in buffer.items()}
    for array in buffer.values():
        array[...] = np.nan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("given", [lambda array: array, lambda array: array[:], read_only])
def test_a_loader_that_refills_its_buffer(given, count):
    want = trained(BATCHES, count)
    state, _ = fit(data.from_iterable(lambda: refilling(BATCHES, given), steps_per_epoch=12), count, epochs=1)
    np.testing.assert_array_equal(state.params["w"], want)
    state = start(count)
    for batch in data.prefetch(refilling(BATCHES, given)):
        state, _ = STEP(state, batch)
    np.testing.assert_array_equal(state.params["w"], want)
    state = start(count)
    for batch in refilling(BATCHES, given):  # NumPy's arrays go to the step itself
        state, _ = STEP(state, batch)
    np.testing.assert_array_equal(state.params["w"], want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_a_loader_that_refills_its_buffer_of_a_step_that_was_traced(engine, count):
    """Or that runs inside of a `jit` too. What is traced has no sharding, as arrays of NumPy have none."""
    step = train.make_train_step(STEP.loss_fn, engine=engine)
    jax.make_jaxpr(step)(start(count), BATCHES[0])
    state = start(count)
    for batch in refilling(BATCHES, lambda array: array):
        state, _ = step(state, batch)
    np.testing.assert_allclose(state.params["w"], trained(BATCHES, count), rtol=1e-6)
    with pytest.raises(ValueError, match="share the length of their first axis"):
        step(state, {**BATCHES[0], "extra": np.float32(1)})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 4])
def test_evaluations_of_a_loader_that_refills_its_buffer(count):
    """Of batches so large that the loader comes back before they are computed."""
    large = [{"x": np.full((512, 512), i, np.float32)} for i in range(1, 7)]
    params = jax.device_put({"w": jnp.eye(512)}, start(count).rng.sharding)

    def slow(params, batch):
        x = batch["x"]
        for _ in range(8):
            x = x @ params["w"]
        return x[:, 0]

    found = train.predict(params, slow, refilling(large))
    np.testing.assert_array_equal(found, np.repeat(np.arange(1, 7), 512))
    scores = train.evaluate(params, data=refilling(large), eval_fn=lambda p, b: {"x": slow(p, b)})
    assert scores == {"x": 3.5}


def test_single_examples_in_one_buffer():
    rows = [{"x": x, "y": y} for x, y in zip(X.reshape(-1, 3), Y.reshape(-1, 1), strict=True)]
    source = data.from_iterable(lambda: refilling(rows), batched=False, steps_per_epoch=12)
    np.testing.assert_array_equal(np.stack([batch["x"] for batch in source.batches(8)]), X)
    pairs = ((each["x"], each["y"]) for each in refilling(rows))
    np.testing.assert_array_equal(data.collect(pairs, batched=False).images, X.reshape(-1, 3))


def test_what_stores_and_devices_take():
    one, two = jax.devices()[:2]
    ones = np.ones((512, 64), np.float32)
    empty = kv.init(kv.create("device"), 0, jnp.zeros(ones.shape))
    double = parallel.spmd(lambda x: jnp.tanh(x @ x.T @ x), axis_name="i", devices=[one, two])
    want = double(np.ones((2, 512, 64), np.float32))
    ways = {
        "init": lambda a: kv.pull(kv.init(kv.create("device"), 0, a), 0),
        "push": lambda a: kv.pull(kv.push(empty, 0, a), 0),
        "from_params": lambda a: kv.to_params(kv.from_params({"w": a}))["w"],
        "rows": lambda a: sparse.RowSparse(np.arange(512), a, a.shape).values,
        "model_state": lambda a: train.create_state(
            kv.from_params({"w": ones[0]}, optimizer=TX), 0, model_state={"mean": a}
        ).model_state["mean"],
        "split_and_load": lambda a: parallel.split_and_load(a, [one])[0],
        "copy_to": lambda a: parallel.copy_to(a, two),
        "replicate": lambda a: parallel.replicate(a, [one, two]),
        "spmd": lambda a: double(np.broadcast_to(a, (2, *a.shape))) / want,
    }
    for name, take in ways.items():
        given = page(ones)
        taken = take(given)
        given[...] = 5
        np.testing.assert_array_equal(np.asarray(taken), np.ones(np.shape(taken)), err_msg=name)


def test_a_copy_costs_no_second_one():
    """JAX takes the copy as the memory of its array, so a batch is copied once."""
    copy = host.own_copy(X, "x")
    taken = jax.device_put(copy)
    assert taken.unsafe_buffer_pointer() == copy.__array_interface__["data"][0]


# Numbers that JAX keeps in other dtypes.


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (np.full(8, 2**40), "integers are stored as int32; these run from 1099511627776"),
        (np.full(8, 2**63, np.uint64), "integers are stored as uint32"),
        (np.full(8, 1e300), "float64 numbers are stored as float32, and some are beyond its largest"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_in_every_batch(wrong, what):
    def batch(extra):
        return {**BATCHES[0], "extra": extra}

    good = batch(np.ones(8, wrong.dtype))
    state, _ = STEP(start(), good)
    state, _ = STEP(state, good)
    with pytest.raises(ValueError, match=rf"train step: batch\['extra'\]: {what}"):
        STEP(state, batch(wrong))
    with pytest.raises(ValueError, match=rf"'extra': {what}"):
        fit([good, good, batch(wrong)], epochs=1)
    with pytest.raises(ValueError, match=rf"\['extra'\]: {what}"):
        list(data.prefetch([good, batch(wrong)]))
    with pytest.raises(ValueError, match=what):
        train.evaluate({}, data=[good, batch(wrong)], eval_fn=lambda p, b: {"y": b["y"]})
    for call in (lambda: kv.init(kv.create("device"), 0, wrong), lambda: kv.from_params({"w": wrong})):
        with pytest.raises(ValueError, match=what):
            call()


def test_infinity_and_small_numbers_are_no_overflow():
    taken = host.own_copy(np.array([np.inf, -np.inf, np.nan, 1e-300, 1.5]), "x")
    np.testing.assert_array_equal(taken, np.array([np.inf, -np.inf, np.nan, 0, 1.5], np.float32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 4])
def test_big_endian_arrays(count):
    big = [{"x": b["x"].astype(">f4"), "y": b["y"].astype(">f8")} for b in BATCHES]
    want = trained(BATCHES, count)
    state = start(count)
    for batch in big:
        state, _ = STEP(state, batch)
    np.testing.assert_array_equal(state.params["w"], want)
    state, _ = fit(big, count, epochs=1)
    np.testing.assert_array_equal(state.params["w"], want)
    whole = {"x": X.reshape(-1, 3).astype(">f4"), "y": Y.reshape(-1).astype(">f8")}
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in data.batches(whole, 8)]), X.reshape(-1, 3))
    fit(whole, count, epochs=1)
    labels = np.arange(96).astype(">i8")
    for resident in (True, False):
        images = data.Dataset(whole["x"], labels)
        (batch, *_) = data.batches(images, 8, resident=resident, devices=jax.devices()[:count])
        np.testing.assert_array_equal(batch["image"], X[0])
        assert batch["label"].tolist() == list(range(8))
    for score in (train.evaluate(state, data=d, eval_fn=lambda p, b: {"y": b["y"]}) for d in (whole, big)):
        assert score["y"] == pytest.approx(Y.mean(), rel=1e-5)
    value = np.arange(4).astype(">i4")
    store = kv.push(kv.init(kv.create("device"), 0, value), 0, value + 1)
    assert kv.pull(store, 0).tolist() == [1, 2, 3, 4]
    assert sparse.RowSparse(value, value.astype(">f4").reshape(4, 1), (4, 1)).values.tolist() == [[0], [1], [2], [3]]


# A batch of arrays of different lengths.


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"engine": "pmap"}, {"engine": "jit"}, {"accumulate": 2}, {"virtual_shards": 8}],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_each_array_is_cut_by_its_own_length(options, count):
    def two(params, batch, rng):
        return ((batch["a"] @ params["w"]) ** 2).mean() + jnp.sin(batch["b"] @ params["w"]).mean(), {}

    batch = {"a": X.reshape(-1, 3)[:64], "b": X.reshape(-1, 3)[64:80]}
    weights = jnp.full(3, 0.5)
    grad = jax.grad(lambda w: two({"w": w}, batch, None)[0])
    step = train.make_train_step(two, **options)
    # 3 devices cannot share 8 virtual shards, so each array is padded.
    devices = jax.devices()[: 3 if "virtual_shards" in options and count > 1 else count]
    state = train.create_state(kv.from_params({"w": weights}, optimizer=TX), 0, devices=devices)
    state, _ = step(state, batch)
    state, _ = train.fit(state, step, [batch], epochs=1, progress=False)
    for _ in range(2):
        weights = weights - 0.01 * grad(weights)
    np.testing.assert_allclose(state.params["w"], weights, rtol=1e-5)


def test_lengths_that_cannot_be():
    batch = {"x": X.reshape(-1, 3)[:64], "y": Y.reshape(-1)[:16]}
    short = {**batch, "y": batch["y"][:6]}
    with pytest.raises(
        ValueError, match=r"own length, but one of 6 rows, of arrays \[\(64, 3\), \(6,\)\], cannot be div"
    ):
        STEP(start(4), short)
    with pytest.raises(
        ValueError, match=r"or each have two or more rows in every share, got \[\(64, 3\), \(4,\)\]: in"
    ):
        STEP(start(4), {**batch, "y": batch["y"][:4]})  # each device would broadcast one row
    with pytest.raises(ValueError, match="must share the length of their first axis"):
        train.evaluate({}, data=[batch], eval_fn=lambda p, b: {"y": b["y"]})


# Every example once, or an error.

LENGTHS = [2, 4, 6]


def growing(epoch):
    first = sum(LENGTHS[: epoch % 3])
    yield from BATCHES[first : first + LENGTHS[epoch % 3]]


def places(history):
    return [(record["epoch"], record["step"]) for record in history]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", [2, "all"])
def test_epochs_of_different_lengths(steps, tmp_path):
    epochs, ends = (6, [(e, 2 * e) for e in range(1, 7)]) if steps == 2 else (3, [(1, 2), (2, 6), (3, 12)])
    want, source = trained(BATCHES), data.from_iterable(growing, steps_per_epoch=steps)
    state, history = fit(source, epochs=epochs)
    np.testing.assert_array_equal(state.params["w"], want)
    assert places(history) == ends
    for cut in (1, 2, 3, 4, 6, 7, 10, 11):  # also where a pass or an epoch ends
        options = {"epochs": epochs, "checkpoint_dir": tmp_path / f"{cut}", "checkpoint_every": cut}
        fit(data.from_iterable(growing, steps_per_epoch=steps), max_steps=cut, **options)
        state, history = fit(data.from_iterable(growing, steps_per_epoch=steps), **options)
        np.testing.assert_array_equal(state.params["w"], want)
        assert places(history) == ends
        state, history = fit(data.from_iterable(growing, steps_per_epoch=steps), **{**options, "epochs": epochs + 1})
        assert int(state.step) == 14
        assert places(history) == [*ends, (epochs + 1, 14)]


def test_a_run_of_more_epochs_than_are_asked_for_now_is_over(tmp_path):
    def fit_for(epochs, on_step=None):
        source = data.from_iterable(growing, steps_per_epoch="all")
        return fit(source, epochs=epochs, checkpoint_dir=tmp_path, on_step=on_step)

    def never(step, metrics):
        raise AssertionError(f"it trained on, to step {step}")

    state, history = fit_for(3)
    again, records = fit_for(2, never)
    np.testing.assert_array_equal(again.params["w"], state.params["w"])
    assert places(records) == places(history) == [(1, 2), (2, 6), (3, 12)]


def test_a_resume_that_is_refused_leaves_the_data_where_they_are(tmp_path):
    class Rows(data.ArraySource):
        position = 5

        def get_state(self):
            return self.position

        def set_state(self, position):
            type(self).position = position

    def fit_in_batches_of(size, epochs):
        source = Rows({"x": np.concatenate(X), "y": np.concatenate(Y)}, None)
        options = {"epochs": epochs, "batch_size": size, "checkpoint_dir": tmp_path, "progress": False}
        return train.fit(start(), STEP, source, **options)

    fit_in_batches_of(8, 1)
    Rows.position = 0
    with pytest.raises(ValueError, match="the checkpoint is from a run with batches of 8"):
        fit_in_batches_of(4, 2)
    assert Rows.position == 0
    fit_in_batches_of(8, 2)
    assert Rows.position == 5


def test_records_within_epochs_of_different_lengths():
    scores = {"eval_data": BATCHES, "eval_fn": lambda p, b: {"y": b["y"]}}
    _, history = fit(data.from_iterable(growing, steps_per_epoch="all"), epochs=2, eval_every=4, **scores)
    assert [(*place, record.get("under_way")) for place, record in zip(places(history), history, strict=True)] == [
        (1, 2, None),
        (2, 4, True),
        (2, 6, None),
    ]
    _, history = fit(data.from_iterable(growing, steps_per_epoch="all"), max_steps=9)
    assert [(*place, record.get("interrupted")) for place, record in zip(places(history), history, strict=True)] == [
        (1, 2, None),
        (2, 6, None),
        (3, 9, True),
    ]


class Ends:
    """Says that it has 10 batches, and has another number of them."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return 10

    def __getitem__(self, i):
        if i >= self.number:
            raise IndexError(i)
        return BATCHES[i]


def test_a_loader_that_ends_early_or_late():
    early, late = Ends(6), Ends(12)
    of = {"eval_fn": lambda p, b: {"y": b["y"]}}
    pairs = [(x, y) for x, y in zip(X, Y, strict=True)]
    calls = {
        "of length 10 ended after 6 batches": [
            lambda: train.evaluate({}, data=early, **of),
            lambda: train.evaluate(start(4), data=early, **of),
            lambda: train.predict({}, lambda p, b: b["y"], early),
            lambda: fit(BATCHES, epochs=1, eval_data=early, **of),
        ],
        "ended after 6 of the 10 batches of epoch 0": [
            lambda: fit(early, epochs=1),
            lambda: fit(data.from_iterable(early, steps_per_epoch="all"), epochs=1),
        ],
        "of length 10 has more batches": [lambda: fit(late, epochs=2)],
        "has 12 batches, and steps_per_epoch=5 leaves out some": [
            lambda: train.evaluate({}, data=data.from_iterable(BATCHES, steps_per_epoch=5), **of),
        ],
        "of length 10 ended after 6": [lambda: data.collect(Pairs(pairs[:6]))],
        "has no batch in epoch 0": [
            lambda: fit(data.from_iterable(lambda: iter(()), steps_per_epoch="all"), epochs=1),
        ],
    }
    for message, refused in calls.items():
        for call in refused:
            with pytest.raises(ValueError, match=message):
                call()


class Pairs(list):
    def __len__(self):
        return 10


def test_an_exception_comes_after_the_batches_before_it():
    def broken():
        yield from BATCHES[:2]
        raise OSError("the disk")

    for steps in (2, "all"):
        source = data.from_iterable(broken, steps_per_epoch=steps)
        with pytest.raises(OSError, match="the disk") as caught:
            fit(source, epochs=2)
        assert int(caught.value.state.step) == 2
