"""Any model and any value, over any source: each example counts once, on any devices, by one program."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import world
from jax.sharding import AxisType, Mesh
from kv_model import compilations
from world import apply, run_on

from jaxpar import data, kv, parallel, train
from jaxpar._devices.mesh import split_over
from jaxpar.train._evaluate.every_example import EvalProgram

RNG = np.random.default_rng(0)
N = 37
ROWS = {"x": RNG.standard_normal((N, 5)).astype(np.float32), "y": RNG.standard_normal((N, 4)).astype(np.float32)}
PARAMS = {"w": RNG.standard_normal((5, 4)).astype(np.float32)}
TOKENS = {"x": RNG.integers(0, 7, (N, 6)), "mask": (RNG.random((N, 6)) < 0.6)}
TABLE = RNG.standard_normal((7, 7)).astype(np.float32)


def errors(params, batch):
    return batch["x"] @ params["w"] - batch["y"]


def eval_fn(params, batch):
    mse = train.mean_squared_error(batch["x"] @ params["w"], batch["y"])
    return {"mse": mse, "largest": abs(errors(params, batch)).max(1)}


ERRORS = errors(PARAMS, ROWS)
WANT = {"mse": (ERRORS**2).mean(), "largest": np.abs(ERRORS).max(1).mean()}


def close(scores, want=WANT):
    assert [(name, type(score)) for name, score in scores.items()] == [(name, float) for name in want]
    assert scores == {k: pytest.approx(v, rel=1e-5) for k, v in want.items()}


def state_of(count, kind="device", params=PARAMS, **options):
    """A state on so many devices, or where there are none the params alone."""
    return params if count is None else world.start(count, kind, params=params, **options)


def parts(size, rows=ROWS):
    return [jax.tree.map(lambda x, at=at: x[at : at + size], rows) for at in range(0, N, size)]


@dataclasses.dataclass
class Loader:
    """What can be iterated over again and says nothing of its length."""

    batches: list

    def __iter__(self):
        return iter(self.batches)


SOURCES = {
    "a dict of arrays": lambda: ROWS,
    "from_arrays": lambda: data.from_arrays(ROWS),
    "a list of batches": lambda: parts(8),
    "a loader of batches of any length": lambda: Loader([*parts(11)[:2], *parts(37)[:0], *parts(11)[2:]]),
    "an iterator": lambda: iter(parts(7)),
    "a function of nothing": lambda: lambda: iter(parts(16)),
    "a function of the epoch": lambda: lambda epoch: iter(parts(16)),
    "from_iterable of examples": lambda: data.from_iterable(
        [jax.tree.map(lambda x, i=i: x[i], ROWS) for i in range(N)], batched=False
    ),
    "from_iterable of an endless function": lambda: data.from_iterable(
        lambda: (part for part in [*parts(8), *parts(8)]), steps_per_epoch=5
    ),
    "batches on the devices": lambda: (jax.tree.map(jnp.asarray, part) for part in parts(8)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("source", SOURCES)
def test_any_source(source):
    close(train.evaluate(state_of(4), data=SOURCES[source](), eval_fn=eval_fn, batch_size=10))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch_size", [1, 10, 64])
@pytest.mark.parametrize(("count", "kind"), [(None, ""), (1, "device"), (3, "sharded"), (8, "dist_sync")])
def test_any_devices(count, kind, batch_size):
    close(train.evaluate(state_of(count, kind), data=ROWS, eval_fn=eval_fn, batch_size=batch_size))


def masked(table, batch):
    """Each way to say the same mean over the tokens that count."""
    logits, labels = table[batch["x"]], (batch["x"] + 1) % 7
    nats = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    counted = jnp.where(batch["mask"], nats, 0)
    return {
        "rows": (counted.sum(1), batch["mask"].sum(1)),
        "tokens": (counted, batch["mask"]),
        "scalars": (counted.sum(), batch["mask"].sum()),
        "metric": train.cross_entropy(logits, labels, batch["mask"]),
        "perplexity": train.perplexity(logits, labels, batch["mask"]),
        "accuracy": train.accuracy(logits, labels, batch["mask"]),
    }


def want_masked():
    nats = -np.log(np.exp(TABLE) / np.exp(TABLE).sum(1, keepdims=True)).astype(np.float64)
    labels = (TOKENS["x"] + 1) % 7
    mean = nats[TOKENS["x"], labels][TOKENS["mask"]].mean()
    right = (TABLE.argmax(1)[TOKENS["x"]] == labels)[TOKENS["mask"]].mean()
    names = dict.fromkeys(("rows", "tokens", "scalars", "metric"), mean)
    return {**names, "perplexity": np.exp(mean), "accuracy": right}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("count", "size"), [(8, 36), (4, 8), (None, 16), (8, 64)])
def test_masked_tokens_count_once_however_they_are_summed(count, size):
    """37 leaves 5, 5, 37 and 37 examples for the last batch, which 4 and 8 devices cannot share."""
    table = state_of(count, params=TABLE)
    for source in (TOKENS, lambda: iter(parts(size, TOKENS))):
        close(train.evaluate(table, data=source, eval_fn=masked, batch_size=size), want_masked())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_a_mask_leaves_out_may_be_anything(bad):
    # Numbers: of a mask of booleans XLA makes a choice, which would hide NaN * 0.
    mask, labels = TOKENS["mask"].astype(np.float32), (TOKENS["x"] + 1) % 7
    logits = TABLE[TOKENS["x"]]
    broken = np.where(mask[..., None] > 0, logits, np.float32(bad))
    means = {
        "accuracy": train.accuracy,
        "top_k": functools.partial(train.top_k, k=2),
        "cross_entropy": train.cross_entropy,
        "perplexity": train.perplexity,
        "mean_squared_error": lambda logits, labels, mask: train.mean_squared_error(logits[..., 0], labels * 1.0, mask),
    }

    def eval_fn(params, batch):
        return {name: mean(batch["logits"], batch["labels"], mask=batch["mask"]) for name, mean in means.items()}

    found, want = (
        train.evaluate({}, data={"logits": x, "labels": labels, "mask": mask}, eval_fn=eval_fn, batch_size=N)
        for x in (broken, logits)
    )
    assert found == want
    assert np.isfinite(list(found.values())).all()


def test_the_last_batch_needs_no_more_memory_than_a_whole_one():
    """Four devices cannot share 15 examples evenly. The compiler keeps them split nevertheless."""
    seen = []

    def eval_fn(params, batch):
        seen.append(len(batch))
        return {"sum": (jnp.tanh(batch @ params).sum(), 1)}

    params = jax.device_put(jnp.ones((8, 256)), state_of(4).rng.sharding)
    program = EvalProgram(
        "evaluate", params, np.ones((31, 8), np.float32), 16, None, of=lambda call, x: call(x)["sum"][0], fn=eval_fn
    )
    shape = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=split_over(program.devices))
    whole, last = (
        program.jit().lower(program.leaves, shape, n).compile().memory_analysis().temp_size_in_bytes for n in (None, 15)
    )
    assert last <= whole
    assert seen == [16, 15]
    sums = train.evaluate(params, data=np.ones((31, 8), np.float32), eval_fn=eval_fn, batch_size=16)
    assert sums["sum"] == pytest.approx(31 * 256 * np.tanh(8.0) / 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("given", ["arrays", "batches", "a data set"])
def test_rows_that_see_each_other(given, count):
    """The last 5 of 37 examples are ranked, normalised and contrasted among themselves, as by plain JAX."""

    def apply_fn(params, x):
        scores = x @ params["w"]
        order = scores.argsort(0).astype(jnp.float32)
        return jnp.concatenate(
            [scores - scores.mean(0, keepdims=True), order, jax.nn.log_softmax(scores, 0), scores.cumsum(0)], 1
        )

    x = RNG.standard_normal((N, 4)).astype(np.float32)
    params = {"w": RNG.standard_normal((4, 3)).astype(np.float32)}
    state = state_of(count, params=params)
    parts = [x[i : i + 16] for i in range(0, N, 16)]
    want = np.concatenate([apply_fn(params, part) for part in parts])
    source = {"arrays": x, "batches": parts_of(parts), "a data set": data.Dataset(x, np.zeros(N, int))}[given]
    found = train.predict(state, lambda p, b: apply_fn(p, b["x"] if isinstance(b, dict) else b), source, batch_size=16)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    scores = train.evaluate(
        state,
        data={"x": x} if given != "batches" else source,
        eval_fn=lambda p, b: {"mean": (apply_fn(p, b["x"]) ** 2).mean(1)},
        batch_size=16,
    )
    assert scores["mean"] == pytest.approx((want**2).mean(), rel=1e-5)


def parts_of(parts):
    return [{"x": part} for part in parts]


@dataclasses.dataclass
class Extremes:
    """A metric as those of clu and metrax are: merged, then computed."""

    low: jax.Array
    high: jax.Array

    def merge(self, other):
        return Extremes(np.minimum(self.low, other.low), np.maximum(self.high, other.high))

    def compute(self):
        return {"low": self.low, "high": self.high}


jax.tree_util.register_dataclass(Extremes, ["low", "high"], [])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [None, 4])
def test_metrics_that_merge(count):
    def eval_fn(params, batch):
        return {"x": Extremes(batch["x"].min(), batch["x"].max()), "mean": batch["x"].mean(1)}

    params = state_of(count)
    scores = train.evaluate(params, data=ROWS, eval_fn=eval_fn, batch_size=16)
    x = ROWS["x"]
    close(scores, {"x_low": x.min(), "x_high": x.max(), "mean": x.mean()})
    with pytest.raises(ValueError, match="two of its values give the score 'x_low'"):
        train.evaluate(params, data=ROWS, eval_fn=lambda p, b: {**eval_fn(p, b), "x_low": b["x"].min(1)}, batch_size=16)
    whole = train.evaluate(params, data=ROWS, eval_fn=lambda p, b: eval_fn(p, b)["x"], batch_size=16)
    close(whole, {"low": x.min(), "high": x.max()})


@pytest.mark.others
def test_metrics_of_metrax_and_clu():
    """Merged as they are, and the last 5 of 37 examples as they are."""
    metrax, clu = pytest.importorskip("metrax"), pytest.importorskip("clu.metrics")
    labels = (ROWS["y"][:, 0] > 0).astype(np.int32)

    def measured(p, labels):
        return {
            "auc": metrax.AUCROC.from_model_output(predictions=p, labels=labels),
            "mse": metrax.MSE.from_model_output(predictions=p, labels=labels.astype(jnp.float32)),
            "average": clu.Average.from_model_output(p),
        }

    def eval_metrax(params, batch):
        return measured(jax.nn.sigmoid(batch["x"] @ params["w"])[:, 0], batch["label"])

    with jax.numpy_rank_promotion("allow"):
        scores = train.evaluate(state_of(4), data={**ROWS, "label": labels}, eval_fn=eval_metrax, batch_size=16)
        p = 1 / (1 + np.exp(-(ROWS["x"] @ PARAMS["w"])[:, 0]))
        close(scores, {name: float(m.compute()) for name, m in measured(jnp.asarray(p), jnp.asarray(labels)).items()})

        @clu.flax.struct.dataclass
        class Both(clu.Collection):
            mse: clu.Average.from_output("mse")
            largest: clu.Average.from_output("largest")

        both = lambda params, batch: Both.single_from_model_output(**eval_fn(params, batch))  # noqa: E731
        whole = train.evaluate(state_of(4), data=ROWS, eval_fn=both, batch_size=16)
    close(dict(sorted(whole.items(), reverse=True)))


def test_the_metrics():
    rng = np.random.default_rng(1)
    logits, labels = rng.standard_normal((N, 4)).astype(np.float32), rng.integers(0, 3, N)  # no example of class 3

    def eval_fn(params, batch):
        args = batch["logits"], batch["labels"]
        return {
            "accuracy": train.accuracy(*args),
            "top_1": train.top_k(*args, 1),
            "top_2": train.top_k(*args, 2),
            "nats": train.cross_entropy(*args),
            "recall": train.per_class_accuracy(*args),
        }

    scores = train.evaluate({}, data={"logits": logits, "labels": labels}, eval_fn=eval_fn, batch_size=8)
    right = logits.argmax(1) == labels
    recall = scores.pop("recall")
    np.testing.assert_allclose(recall[:3], [right[labels == k].mean() for k in range(3)], rtol=1e-6)
    assert np.isnan(recall[3])
    second = (np.argsort(-logits, 1)[:, :2] == labels[:, None]).any(1).mean()
    nats = -np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[np.arange(N), labels].mean()
    close(scores, {"accuracy": right.mean(), "top_1": right.mean(), "top_2": second, "nats": nats})
    assert train.top_k(jnp.zeros((1, 3)), jnp.array([2]), 1).tolist() == [0.0]  # of equal ones the first
    with pytest.raises(ValueError, match="k argument to top_k must be no larger than"):
        train.top_k(jnp.ones((4, 3)), jnp.ones(4, int), 4)


def test_sums_are_exact_beyond_what_float32_counts():
    """A float32 sum stays at 2 ** 24 when ones are added."""
    many = (np.full(2**12, 2.0**12 + 1, np.float32) for _ in range(9))
    scores = train.evaluate(1.0, data=many, eval_fn=lambda p, x: {"sum": (x.sum() * p, 1)})
    assert scores["sum"] == 2.0**24 + 2**12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_params_split_over_a_mesh_and_the_users_own_mesh(kind):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(kind,) * 2)
    store = kv.from_params(PARAMS, optimizer=optax.sgd(0.1), mesh=mesh, sharding=parallel.fsdp("data", min_size=1))
    state = train.create_state(store, 0)
    options = {"eval_fn": eval_fn, "batch_size": 16}
    close(train.evaluate(state, data=ROWS, **options))
    of_sums = lambda p, b: {"mse": (eval_fn(p, b)["mse"].sum(), N)}  # noqa: E731
    whole = train.evaluate(state, data=ROWS, batch_size=16, eval_fn=of_sums)
    assert whole["mse"] * 3 == pytest.approx(WANT["mse"], rel=1e-5)  # 16, 16 and the last 5: three batches
    meshes = []

    def read():
        for part in parts(16):
            meshes.append(jax.sharding.get_mesh())
            yield part

    with jax.set_mesh(mesh):
        close(train.evaluate(state, data=ROWS, **options))
        close(train.evaluate(state, data=read, **options))
        for split in (state, state.params):
            found = train.predict(split, lambda p, x: x @ p["w"], ROWS["x"], batch_size=16)
            np.testing.assert_allclose(found, ROWS["x"] @ PARAMS["w"], rtol=1e-4, atol=1e-5)
    assert meshes == [mesh] * 3


@pytest.mark.slow
def test_the_averaged_params_and_the_state_of_the_model():
    tx = optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1, b1=0.9)
    state = state_of(2, tx=tx, model_state={"shift": jnp.full(4, 3.0)})

    def loss_fn(params, batch, rng, model_state):
        return (errors(params, batch) ** 2).mean(), {}, model_state

    step = train.make_train_step(loss_fn)
    for _ in range(3):
        state, _ = step(state, jax.tree.map(lambda x: x[:16], ROWS))

    def eval_fn(params, batch, model_state):
        return {"error": (errors(params, batch) + model_state["shift"][None]).mean(1)}

    want = (ROWS["x"] @ np.asarray(state.eval_params["w"]) - ROWS["y"] + 3).mean()
    assert not np.allclose(state.params["w"], state.eval_params["w"])
    close(train.evaluate(state, data=ROWS, eval_fn=eval_fn, batch_size=8), {"error": want})


def test_without_devices_batches_are_as_long_as_asked_for():
    seen = set()

    def eval_fn(params, batch):
        seen.add(len(batch))
        return {"mean": params * batch}

    assert train.evaluate(2.0, data=np.arange(7.0), eval_fn=eval_fn, batch_size=5) == {"mean": 6.0}
    assert {n for n in seen if n < 8} == {5, 2}  # once with twice as many, which shows values of the whole batch


def test_a_function_is_compiled_once():
    state = state_of(4)

    def eval_fn(params, batch):
        return {"loss": (errors(params, batch) ** 2).mean(1)}

    with compilations() as count:
        train.evaluate(state, data=ROWS, eval_fn=eval_fn, batch_size=8)
    assert count() == 2  # whole batches, and the last 5 examples
    with compilations() as count:
        for source in (ROWS, parts(8)):
            train.evaluate(state, data=source, eval_fn=eval_fn, batch_size=8)
    assert count() == 0


@pytest.mark.slow
def test_what_a_function_reads_by_name_counts():
    """A cell of a notebook may change it, or a callback. The function is the same object, and the program is not."""
    factor, kept, state = 1.0, {"mean": jnp.float32(0)}, state_of(2)
    measure = lambda m: m * factor  # noqa: E731

    class Errors:
        power = 1

        def of(self, params, batch):
            wrong = (errors(params, batch) - kept["mean"]) ** self.power * factor
            return {"error": wrong.mean(1), "total": train.Mean(wrong.mean(1), jnp.ones(len(wrong)), measure)}

    held = Errors()
    outputs = lambda params, batch: held.of(params, batch)["error"]  # noqa: E731

    def check():
        with np.errstate(all="ignore"):
            want = ((np.asarray(errors(PARAMS, ROWS)) - float(kept["mean"])) ** held.power * factor).mean(1)
        scores = train.evaluate(state, data=ROWS, eval_fn=held.of)
        close(scores, {"error": want.mean(), "total": measure(want.mean())})
        np.testing.assert_allclose(train.predict(state, outputs, ROWS), want, rtol=1e-4)

    check()
    factor = 3.0
    check()
    held.power = 2
    check()
    kept["mean"] = jnp.float32(0.5)
    check()
    other = lambda m: m * factor + 1  # noqa: E731
    with compilations() as count:
        measure = other
        check()
    assert count() == 0


def test_predictions_of_batches():
    want = ROWS["x"] @ PARAMS["w"]
    of_x = lambda params, batch: batch["x"] @ params["w"]  # noqa: E731
    for source in (ROWS, data.from_arrays(ROWS), parts(7), lambda: iter(parts(16))):
        got = train.predict(state_of(4), of_x, source, batch_size=16)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    pairs = [(part["x"], part["y"]) for part in parts(10)]
    got = train.predict(state_of(4), lambda params, images: images @ params["w"], pairs, batch_size=16)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [4, None, 1])
def test_a_sum_over_the_axis_of_the_step_is_that_of_the_whole_batch(count):
    """A function that a loss shares, such as a mean over all devices, runs here too."""

    def eval_fn(params, batch):
        mean = jax.lax.pmean(errors(params, batch).mean(), "data")
        number = jax.lax.psum(len(batch["x"]), "data")
        return {"total": (number * mean, number), "mse": (errors(params, batch) ** 2).mean(1)}

    params = state_of(count)
    want = {"total": (ROWS["x"] @ PARAMS["w"] - ROWS["y"]).mean(), "mse": WANT["mse"]}
    close(train.evaluate(params, data=ROWS, eval_fn=eval_fn, batch_size=16), want)
    shifted = train.predict(params, lambda p, b: b["x"] @ p["w"] + jax.lax.psum(0.0, "data"), ROWS, batch_size=16)
    np.testing.assert_allclose(shifted, ROWS["x"] @ PARAMS["w"], rtol=1e-4, atol=1e-5)
    with pytest.raises(NameError, match="unbound axis name: model"):
        train.evaluate(params, data=ROWS, eval_fn=lambda p, b: {"x": jax.lax.psum(b["x"][:, 0], "model")})


def test_the_old_names_of_data_warn_and_say_the_new_one():
    points = data.Dataset(np.eye(3, dtype=np.float32), np.arange(3))
    apply = lambda params, x: x  # noqa: E731
    for call, want in (
        (lambda: train.evaluate(PARAMS, source=ROWS, eval_fn=eval_fn)["mse"], pytest.approx(WANT["mse"], rel=1e-5)),
        (lambda: train.evaluate({}, apply, dataset=points)["accuracy"], 1.0),
        (lambda: train.predict({}, apply, source=points).shape, (3, 3)),
        (lambda: train.confusion_matrix({}, apply, dataset=points).tolist(), np.eye(3).tolist()),
        (lambda: len(train.mistakes({}, apply, dataset=points)), 0),
    ):
        with pytest.warns(DeprecationWarning, match=r"(source|dataset)= is now called data="):
            assert call() == want
    with pytest.raises(TypeError, match="evaluate: source= is now called data=; give only data="):
        train.evaluate(PARAMS, source=ROWS, data=ROWS, eval_fn=eval_fn)


# ---- classifiers


SET = data.Dataset(ROWS["x"], RNG.integers(0, 4, N))


def probabilities(dataset):
    images = dataset.images / (255 if dataset.images.dtype == np.uint8 else 1)
    logits = images.astype(np.float64) @ PARAMS["w"].astype(np.float64)
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def scores_of(dataset):
    p, labels = probabilities(dataset), dataset.labels
    return {"loss": -np.log(p[np.arange(len(p)), labels]).mean(), "accuracy": (p.argmax(1) == labels).mean()}


@pytest.mark.slow
def test_parameters_on_one_other_device_or_in_numpy():
    for params in (jax.device_put(PARAMS, jax.devices()[3]), PARAMS):
        close(train.evaluate(params, apply, SET, batch_size=16), scores_of(SET))


def test_fewer_examples_than_devices():
    few = data.Dataset(SET.images[:3], SET.labels[:3])
    close(train.evaluate(state_of(8), apply, few, batch_size=256), scores_of(few))


@pytest.mark.slow
def test_an_odd_last_batch_compiles_one_program_more():
    state, programs = state_of(2), []

    def traced(params, images):
        programs.append(images.shape)
        return images @ params["w"]

    train.evaluate(state, traced, SET, batch_size=16)
    # One image is traced for the number of classes. A batch is traced in each call: is it still the same program?
    assert programs == [(1, 5), (16, 5), (16, 5), (5, 5)]
    train.evaluate(state, traced, SET, batch_size=16)
    assert programs[4:] == [(1, 5), (16, 5)]
    with compilations() as count:
        train.evaluate(state, traced, SET, batch_size=16)
    assert count() == 0


# ---- the confusion matrix and the mistakes of a classifier


BYTES = data.Dataset(RNG.integers(0, 256, (N, 5), np.uint8), RNG.integers(0, 4, N))
MATRIX = np.zeros((4, 4), np.int64)
np.add.at(MATRIX, (BYTES.labels, probabilities(BYTES).argmax(1)), 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch_size", [1, 10, 37, 64])
@pytest.mark.parametrize(("count", "kind"), [(None, ""), (1, "device"), (8, "device"), (3, "local"), (3, "sharded")])
def test_against_numpy(kind, count, batch_size):
    state = state_of(count, kind)
    matrix = train.confusion_matrix(state, apply, BYTES, batch_size=batch_size)
    np.testing.assert_array_equal(matrix, MATRIX)
    assert matrix.dtype == np.int64
    close(train.evaluate(state, apply, BYTES, batch_size=batch_size), scores_of(BYTES))

    wrong = train.mistakes(state, apply, BYTES, batch_size=batch_size)
    p = probabilities(BYTES)
    assert sorted(wrong.indices) == np.flatnonzero(p.argmax(1) != BYTES.labels).tolist()
    np.testing.assert_array_equal(wrong.predicted, p.argmax(1)[wrong.indices])
    np.testing.assert_array_equal(wrong.labels, BYTES.labels[wrong.indices])
    np.testing.assert_allclose(wrong.probabilities, p.max(1)[wrong.indices], rtol=1e-5)
    assert (np.diff(wrong.probabilities) <= 0).all()
    assert len(wrong) == matrix.sum() - matrix.trace()


def test_the_most_certain_ones():
    wrong, few = train.mistakes(PARAMS, apply, BYTES), train.mistakes(PARAMS, apply, BYTES, most=3)
    np.testing.assert_array_equal(few.indices, wrong.indices[:3])
    assert repr(few) == "Mistakes(3 of 37 examples)"
    assert few._repr_html_().count("<tr>") == 4
    assert "more" not in few._repr_html_()
    assert f"... and {len(wrong) - 10} more" in wrong._repr_html_()


@pytest.mark.parametrize(("count", "kind"), [(None, ""), (2, "device"), (3, "sharded")])
def test_the_outputs_of_every_example(kind, count):
    def outputs(params, inputs):
        return {"logits": inputs["x"] @ params["w"], "bytes": (inputs["i"] % 5).astype(jnp.uint8)}

    state = state_of(count, kind)
    inputs = {"x": BYTES.images.astype(np.float32), "i": np.arange(37)}
    got = train.predict(state, outputs, inputs, batch_size=10)
    np.testing.assert_array_equal(got["bytes"], np.arange(37) % 5)
    assert got["bytes"].dtype == np.uint8
    np.testing.assert_allclose(got["logits"], inputs["x"] @ PARAMS["w"], rtol=1e-4)
    of_images = train.predict(state, apply, BYTES, batch_size=64)
    np.testing.assert_allclose(of_images * 255, got["logits"], rtol=1e-4)
    np.testing.assert_array_equal(of_images, train.predict(state, apply, data.as_source(BYTES), batch_size=64))


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 1])
def test_a_model_with_a_state_of_its_own(count):
    def shifted(params, images, model_state):
        return apply(params, images) + model_state["shift"][None]

    shift = np.array([0, 0, 0, 9], np.float32)
    state = state_of(count, model_state={"shift": jnp.asarray(shift)})
    logits = train.predict(state, shifted, BYTES, batch_size=16)
    np.testing.assert_allclose(logits, BYTES.images / 255 @ PARAMS["w"] + shift, rtol=1e-4, atol=1e-5)
    matrix = train.confusion_matrix(state, shifted, BYTES, batch_size=16)
    assert matrix.sum(0).tolist() == np.bincount(logits.argmax(1), minlength=4).tolist()
    wrong = train.mistakes(state, shifted, BYTES, batch_size=16)
    assert len(wrong) == 37 - matrix.trace()
    alone = train.evaluate(PARAMS, lambda p, images: shifted(p, images, {"shift": shift}), BYTES, batch_size=16)
    close(train.evaluate(state, shifted, BYTES, batch_size=16), alone)
    assert matrix.trace() / matrix.sum() == pytest.approx(alone["accuracy"])


def test_the_picture_of_a_confusion_matrix(tmp_path):
    names = ["cat", "dog", "bird", "whale"]
    figure = train.plot_confusion_matrix(MATRIX, class_names=names, path=tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == names
    assert [t.get_text() for t in figure.axes[0].texts] == [str(x) for x in MATRIX.ravel()]
    assert figure._repr_png_()[:4] == b"\x89PNG"
    train.plot_confusion_matrix(np.zeros((100, 100), int))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("channels", [(), (1,), (3,)])
def test_the_picture_of_mistakes(tmp_path, channels):
    images = data.Dataset(RNG.random((12, 6, 5, *channels), np.float32), np.arange(12) % 4)

    def apply(params, images):
        return jax.nn.one_hot((images.reshape(len(images), -1).sum(1) * 100).astype(jnp.int32) % 4, 4) * 3

    wrong = train.mistakes({}, apply, images)
    figure = train.plot_mistakes(wrong, images, class_names=["a", "b", "c", "d"], most=7, path=tmp_path / "m.svg")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == min(7, len(wrong))
    said, label = "abcd"[wrong.predicted[0]], "abcd"[wrong.labels[0]]
    assert titles[0] == f"{said} 87%\nis {label}"
    with pytest.raises(TypeError, match="Invalid shape"):  # matplotlib's
        train.plot_mistakes(train.mistakes(PARAMS, lambda p, x: x @ p["w"], BYTES), BYTES)
    with pytest.raises(ValueError, match="nothing to show: 0 mistakes"):
        train.plot_mistakes(train.mistakes({}, apply, images, most=0), images)


# ---- labels that are no classes of the model


IMAGES = np.ones((8, 2), np.float32)


def started():
    return world.start(8, params={"w": jnp.ones((2, 3))})


def fit(dataset, state=None, **options):
    options = {"epochs": 1, "batch_size": 8, **options}
    return run_on(dataset, started() if state is None else state, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("last", "words"), [(3, "from 0 to 3"), (-1, "from -1 to 0")])
def test_labels_out_of_range(last, words):
    wrong = data.Dataset(IMAGES, np.array([0] * 7 + [last]))
    right = data.Dataset(IMAGES, np.arange(8) % 3)
    message = f"the model has 3 classes, but labels {words}; give labels 0 to 2"
    with pytest.raises(ValueError, match=f"fit: train_data: {message}"):
        fit(wrong)
    with pytest.raises(ValueError, match=f"fit: test_data: {message}"):
        fit(right, test_data=wrong, apply_fn=apply)
    with pytest.raises(ValueError, match=f"evaluate: {message}"):
        train.evaluate({"w": jnp.ones((2, 3))}, apply, wrong, batch_size=4)
    state, _ = fit(right, test_data=right, apply_fn=apply)
    assert train.evaluate(state, apply, right, batch_size=4)["accuracy"] == 0.375


def test_what_cannot_be_known_is_left_to_the_model():
    """A model that fails says so itself. Targets that are no classes are not looked at."""
    dataset = data.Dataset(IMAGES, np.arange(8))
    with pytest.raises(TypeError, match="dot_general"):
        train.evaluate({"w": jnp.ones((5, 3))}, apply, dataset, batch_size=8)

    def squares(params, batch, rng):
        return ((apply(params, batch["image"])[:, 0] - batch["label"]) ** 2).mean(), {}

    fit(dataset, step=train.make_train_step(squares))


def test_a_donated_state_is_checked_too(tmp_path):
    state = started()
    fit(data.Dataset(IMAGES, np.arange(8) % 3), state, checkpoint_dir=tmp_path)
    assert state.store.values[0].is_deleted()
    with pytest.raises(ValueError, match="but labels from 0 to 7"):
        fit(data.Dataset(IMAGES, np.arange(8)), state, epochs=2, checkpoint_dir=tmp_path)


# ---- the metrics of other libraries in docs/evaluate.md, beside scikit-learn's


@pytest.mark.others
@pytest.mark.parametrize("batch_size", [64, 48])
def test_the_metrics_of_the_page_are_those_of_scikit_learn(batch_size):
    pytest.importorskip("metrax", reason="the extra `others` is not installed")
    sklearn = pytest.importorskip("sklearn.metrics", reason="the extra `others` is not installed")
    page = (Path(__file__).parents[2] / "docs/evaluate.md").read_text()
    first = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    own = re.findall(r"^<!-- not run: .*?^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    namespace = {}
    with jax.numpy_rank_promotion("allow"):  # metrax compares with its thresholds so
        for block in (first, *own):
            exec(block.replace("epochs=20", "epochs=2").replace("batch_size=64", f"batch_size={batch_size}"), namespace)
    state, apply_fn, test = (namespace[name] for name in ("state", "apply_fn", "test"))
    logits = train.predict(state, apply_fn, test)
    found, chance = logits.argmax(axis=1), 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
    last = namespace["history"][-1]
    assert last["eval_auroc"] == pytest.approx(sklearn.roc_auc_score(test.labels, chance), abs=0.01)  # by thresholds
    assert last["eval_recall"] == pytest.approx(sklearn.recall_score(test.labels, found), abs=1e-5)
    assert last["eval_f1"] == pytest.approx(sklearn.f1_score(test.labels, found), abs=1e-5)
    assert last["eval_iou"] == pytest.approx(sklearn.jaccard_score(test.labels, found), abs=1e-5)
    assert namespace["macro"] == sklearn.f1_score(test.labels, found, average="macro")
    assert 0 < float(namespace["bleu"]) <= 1
