"""A run as a value: any step of it again, its batches, forks, and where two runs part."""

import dataclasses
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import checkpoint, data, models, train
from jaxpar.train._callbacks import undo as undo_module

BATCHES, SIZE = 11, 32  # in an epoch, and examples in a batch
STEPS = 40


def net_loss(params, batch, rng, statistics):
    """A layer with statistics of the share, dropout, and a layer: what a step can depend on."""
    x = batch["x"] @ params["in"]
    mean = x.mean(0)
    statistics = {"mean": 0.9 * statistics["mean"] + 0.1 * mean.astype(jnp.float32)}
    x = jax.nn.relu(x - mean[None])
    x = jnp.where(jax.random.bernoulli(rng, 0.8, x.shape), x / 0.8, 0)
    error = ((x @ params["out"] - batch["y"]).astype(jnp.float32) ** 2).mean()
    return error, {"error": jnp.sqrt(error)}, statistics


def examples(seed=0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(BATCHES * SIZE, 8)).astype(np.float32)
    return {"x": x, "y": x[:, :2] + draw.normal(size=(len(x), 2)).astype(np.float32)}


def of_epoch(epoch):
    order = np.random.default_rng(epoch).permutation(BATCHES * SIZE).reshape(BATCHES, SIZE)
    return [{name: x[rows] for name, x in examples().items()} for rows in order]


def params():
    draw = np.random.default_rng(1)
    sizes = {"in": (8, 16), "out": (16, 2)}
    return {name: jnp.asarray(draw.normal(0, 0.3, size), jnp.float32) for name, size in sizes.items()}


def start(devices=1, tx=None, loss=net_loss, **options):
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS)) if tx is None else tx
    where = {"devices": jax.devices()[:devices], "grad_transform": optax.ema(0.9)}
    return train.start(params(), tx, loss, model_state={"mean": jnp.zeros(16)}, **where, **options)


def fit(directory, state, step, source=None, steps=STEPS, **options):
    """A run with a certificate of every step, and checkpoints of steps 0, 16, 32 and the ends of its epochs."""
    options = {"certificate": directory / "certificate.jsonl", "certificate_every": 1, "keep_every": 16, **options}
    source = examples() if source is None else source
    return train.fit(
        state, step, source, max_steps=steps, batch_size=SIZE, progress=False, checkpoint_dir=directory, **options
    )


def certified(directory):
    lines = train._read_certificate(directory / "certificate.jsonl")[1]
    return {step: line["state"] for step, line in lines.items()}


def hash_of(state):
    return str(checkpoint._StateHash(state))


OPTIONS = {
    "plain": {},
    "on four devices": {"devices": 4},
    "virtual shards": {"devices": 4, "virtual_shards": 8},
    "kind sharded": {"devices": 4, "kind": "sharded"},
    "float16": {"loss_scale": "dynamic", "compute_dtype": jnp.float16, "accumulate": 2},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "on four devices" else pytest.mark.slow) for n in OPTIONS]
)
def test_any_step_has_the_bits_of_the_certificate(name, tmp_path):
    state, step = start(**OPTIONS[name])
    fit(tmp_path, state, step)
    fresh, step = start(**OPTIONS[name])  # as in another session
    run, lines = train.open(tmp_path, step, examples()), certified(tmp_path)
    assert list(run.checkpoints)[:2] == [0, 16]
    assert run.not_exact == ""
    assert hash_of(run.at(0)) == hash_of(step.complete(fresh))
    for number in (1, 9, 16, 23, 33, STEPS):
        assert hash_of(run.at(number)) == lines[number], number


@pytest.mark.slow
def test_made_on_one_device_and_again_on_four_with_virtual_shards(tmp_path):
    fit(tmp_path, *start(1, virtual_shards=8), steps=20)
    run = train.open(tmp_path, start(4, virtual_shards=8)[1], examples())
    assert run.not_exact == ""
    assert hash_of(run.at(19)) == certified(tmp_path)[19]
    # Without virtual shards other devices round otherwise, and the run says so.
    run = train.open(tmp_path, start(4, virtual_shards=8)[1].on(jax.devices()[:2]), examples())
    assert run.not_exact == ""


@pytest.mark.slow
def test_other_devices_without_virtual_shards_are_said(tmp_path):
    fit(tmp_path, *start(1), steps=12)
    run = train.open(tmp_path, start(4)[1], examples())
    assert "devices: 1" in run.not_exact
    assert "to rounding" in repr(run)


class Seeking:
    """An iterator over all epochs that can go back."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return of_epoch((self.number - 1) // BATCHES)[(self.number - 1) % BATCHES]

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


SOURCES = {
    "a list": lambda: of_epoch(0),
    "a function of the epoch": lambda: data.from_iterable(of_epoch, steps_per_epoch=BATCHES),
    "an iterator that seeks": lambda: data.from_iterable(Seeking(), steps_per_epoch=BATCHES),
    "a data set": lambda: data.Dataset(*examples().values()),
}


def image_loss(params, batch, rng, statistics):
    return net_loss(params, {"x": batch["image"], "y": batch["label"]}, rng, statistics)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "an iterator that seeks" else pytest.mark.slow) for n in SOURCES]
)
def test_data_of_every_kind(name, tmp_path):
    loss = image_loss if name == "a data set" else net_loss
    fit(tmp_path, *start(loss=loss), SOURCES[name]())
    run, lines = train.open(tmp_path, start(loss=loss)[1], SOURCES[name]()), certified(tmp_path)
    steps = [17, 25, 12, 40] if name == "an iterator that seeks" else [5, 17, 25, 12, 40]
    assert [hash_of(run.at(number)) == lines[number] for number in steps] == [True] * len(steps)
    # The batch of a step is the one that the step saw.
    state = run.at(24)
    state, _ = run.step(state, run.batch(25))
    assert hash_of(state) == lines[25]


def test_a_generator_cannot_go_back(tmp_path):
    forever = lambda: data.from_iterable(  # noqa: E731
        (batch for epoch in range(9) for batch in of_epoch(epoch)), steps_per_epoch=BATCHES
    )
    fit(tmp_path, *start(), forever(), steps=20)
    run = train.open(tmp_path, start()[1], forever())
    assert hash_of(run.at(16)) == certified(tmp_path)[16]  # a checkpoint
    for ask in (lambda: run.at(17), lambda: run.batch(17), lambda: run.metrics(17, 18), lambda: run.fork("x", 17)):
        with pytest.raises(ValueError, match=r"read only once.*get_state"):
            ask()


@pytest.mark.slow
def test_metrics_are_those_of_the_steps(tmp_path):
    seen = {}
    fit(tmp_path, *start(4), steps=20, on_step=lambda number, metrics: seen.update({number: metrics}))
    rows = train.open(tmp_path, start(4)[1], examples()).metrics(13, 18)
    assert [row["step"] for row in rows] == list(range(13, 19))
    for row in rows:
        assert {name: row[name] for name in ("loss", "error")} == seen[row["step"]]

    # By SGD without momentum, the change is the rate times the gradient.
    by_sgd = lambda: train.start(params(), optax.sgd(0.25), plain_loss, devices=jax.devices()[:4])  # noqa: E731
    directory = tmp_path / "sgd"
    fit(directory, *by_sgd(), steps=3)
    run = train.open(directory, by_sgd()[1], examples())
    (row,) = run.metrics(2, 2)
    batch, before = jax.device_get((run.batch(2), run.at(1).params))
    grads = jax.grad(lambda params: plain_loss(params, batch, None)[0])(before)
    norm = np.linalg.norm(np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)]))
    np.testing.assert_allclose([row["grad_norm"], row["update_norm"]], [norm, norm / 4], rtol=1e-5)


def test_a_fork_is_a_run_that_skipped_the_batch(tmp_path):
    fit(tmp_path / "a", *start(4))
    run = train.open(tmp_path / "a", start(4)[1], examples())
    fork = run.fork(tmp_path / "b", at=25, without=[30])
    assert (list(fork.checkpoints), fork.left_out, fork.forked_from) == ([25], {30}, (str(tmp_path / "a"), 25))
    _, history = fit(tmp_path / "b", *fork, certificate=None)

    state, step = start(4)
    expected, records = fit(tmp_path / "c", state, step.without([30]))
    fork = train.open(tmp_path / "b", start(4)[1], examples())  # as in another session: the run knows what it left out
    assert (fork.last_step, fork.left_out) == (STEPS, {30})
    assert hash_of(fork.at(STEPS)) == hash_of(expected)
    assert hash_of(fork.at(34)) == certified(tmp_path / "c")[34]
    assert run.branches == [tmp_path / "b"]
    picture = ElementTree.fromstring(run._repr_html_())[0]
    titles = [title.text for title in picture.iter("title")]
    assert [title for title in titles if "checkpoint" in title] == [f"checkpoint of step {n}" for n in run.checkpoints]
    assert "b leaves after step 25" in titles
    assert len(picture.find("polyline").get("points").split()) == len(run.history)
    assert "step 30 is left out" in fork._repr_html_()
    numbers = lambda record: {n: record[n] for n in ("epoch", "step", "loss", "error")}  # noqa: E731
    assert list(map(numbers, history)) == list(map(numbers, records))
    (row,) = fork.metrics(30, 30)
    assert (row["skipped"], row["update_norm"], "grad_norm" in row) == (1, 0, False)

    found = train.compare(run, fork)
    assert (found.first_step, found.is_rounding, found.why) == (30, False, "b leaves out step 30")


@pytest.mark.slow
@pytest.mark.slow
def test_a_fork_that_is_there_goes_on_and_another_one_is_refused(tmp_path):
    """Somebody goes back to the cell that forks, after the fork was trained."""
    fit(tmp_path / "a", *start())
    make = lambda **options: train.open(tmp_path / "a", start()[1], examples()).fork(tmp_path / "b", **options)  # noqa: E731
    trained, _ = fit(tmp_path / "b", *make(at=24, without=[30]), steps=28, certificate=None)
    expected = hash_of(trained)

    fork = make(at=24, without=[30])
    assert (fork.last_step, fork.left_out, hash_of(fork.at(28))) == (28, {30}, expected)
    state, history = fit(tmp_path / "b", *fork, certificate=None)
    assert (int(state.step), history[-1]["step"]) == (STEPS, STEPS)
    before = {p: p.read_bytes() for p in (tmp_path / "b").rglob("*") if p.is_file()}
    for options in ({"at": 23, "without": [30]}, {"at": 24}, {"at": 24, "without": [30], "optimizer": optax.sgd(0.1)}):
        with pytest.raises(FileExistsError, match="give another directory"):
            make(**options)
    with pytest.raises(FileExistsError, match="give another directory"):
        train.open(tmp_path / "b", start()[1], examples()).fork(tmp_path / "a", at=24)
    assert {p: p.read_bytes() for p in (tmp_path / "b").rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_two_runs_over_one_iterator_are_compared_one_after_the_other(tmp_path):
    source = SOURCES["an iterator that seeks"]()
    fit(tmp_path / "a", *start(), source)
    run = train.open(tmp_path / "a", start()[1], source)
    fork = run.fork(tmp_path / "b", at=20, without=[24])
    fit(tmp_path / "b", *fork, certificate=None)
    found = train.compare(run, train.open(tmp_path / "b", fork.step, source))
    assert (found.first_step, found.why) == (24, "b leaves out step 24")


def with_unused(params, batch, rng):
    """The loss of `plain_loss` of params that have one leaf more."""
    return plain_loss({name: params[name] for name in ("in", "out")}, batch, rng)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_gradients_are_no_params(kind, tmp_path):
    """Where a step leaves params alone, a store that keeps what is pushed still has them."""
    rows = {}
    for unused in ("warn", "skip"):

        def make(unused=unused):
            given, where = {**params(), "other": jnp.full(3, 100.0)}, {"devices": jax.devices()[:2], "kind": kind}
            return train.start(given, optax.sgd(0.1), with_unused, unused=unused, **where)

        with warnings.catch_warnings(action="ignore"):
            fit(tmp_path / unused, *make(), steps=3)
            (rows[unused],) = train.open(tmp_path / unused, make()[1], examples()).metrics(2, 2)
    assert rows["warn"] == rows["skip"]

    # A gradient that is not finite has no norm, though the step keeps the params.
    source = data.from_iterable(spoiled, steps_per_epoch=BATCHES)
    make = lambda **options: train.start(params(), optax.sgd(0.01), plain_loss, kind=kind, **options)  # noqa: E731
    fit(tmp_path / "nan", *make(nonfinite="skip"), source, steps=21)
    before, bad, after = train.open(tmp_path / "nan", make(nonfinite="skip")[1], source).metrics(18, 20)
    assert np.isnan(bad["grad_norm"])
    assert (bad["skipped"], bad["update_norm"]) == (1, 0)
    assert np.isfinite([before["grad_norm"], after["grad_norm"]]).all()


CLIP = optax.clip_by_global_norm(0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"local_steps": 2}, {"grad_transform": CLIP}, {"kind": "dist_async"}], ids=list)
def test_norms_are_those_that_a_step_records(options, tmp_path):
    make = lambda **more: train.start(params(), optax.sgd(0.1), plain_loss, **options, **more)  # noqa: E731
    seen = []
    fit(tmp_path / "a", *make(record="grad_norm"), steps=4, on_step=lambda n, metrics: seen.append(metrics))
    fit(tmp_path / "b", *make(), steps=4)
    norms = [row["grad_norm"] for row in train.open(tmp_path / "b", make()[1], examples()).metrics(1, 4)]
    np.testing.assert_allclose(norms, [metrics["grad_norm"] for metrics in seen], rtol=1e-6)


def test_the_learning_rate_of_a_record_counts_updates(tmp_path):
    schedule = optax.linear_schedule(1.0, 0.0, 100)
    loss = lambda params, batch, rng: (0 * params["in"].sum() + 0 * params["out"].sum(), {})  # noqa: E731
    state, step = train.start(params(), optax.inject_hyperparams(optax.sgd)(schedule), loss)
    step = step.without([2, 5])
    state, history = fit(tmp_path, state, step, steps=8, callbacks=train.LearningRate(schedule))
    assert history[-1]["learning_rate"] == pytest.approx(train.LearningRate().measure(state)["learning_rate"])


@pytest.mark.slow
def test_a_fork_with_another_optimizer(tmp_path):
    fit(tmp_path / "a", *start(), steps=20)
    run = train.open(tmp_path / "a", start()[1], examples())
    fork = run.fork(tmp_path / "b", at=16, optimizer=optax.sgd(0.1))
    state, _ = fit(tmp_path / "b", *fork, steps=18, certificate=None)
    by_hand, step = start(tx=optax.sgd(0.1))
    by_hand = dataclasses.replace(run.at(16), store=train.open(tmp_path / "b", fork.step, examples()).at(16).store)
    for number in (17, 18):
        by_hand, _ = step(by_hand, run.batch(number))
    assert hash_of(state) == hash_of(by_hand)
    assert train.compare(run, fork).why == "the optimizers differ"


def test_what_another_run_is_refused_for(tmp_path):
    fit(tmp_path, *start(), steps=4)
    with pytest.raises(ValueError, match=r"another run.*the optimizer differs"):
        train.open(tmp_path, start(tx=optax.sgd(0.1))[1], examples())
    with pytest.raises(ValueError, match="the data differs"):
        train.open(tmp_path, start()[1], examples(seed=1))
    with pytest.raises(ValueError, match="the options of the step differs"):
        train.open(tmp_path, start(accumulate=2)[1], examples())
    with pytest.raises(ValueError, match="the loss function differs"):
        train.open(tmp_path, start(loss=lambda *args: net_loss(*args))[1], examples())
    with pytest.raises(FileNotFoundError, match="no checkpoint of fit"):
        train.open(tmp_path / "nothing")


def test_what_is_known_without_a_step(tmp_path):
    _, history = fit(tmp_path, *start(), steps=12)
    run = train.open(tmp_path)
    assert run.history == history[:1]
    assert run.to_dict()["checkpoints"].keys() == {0, 11, 12}
    for ask in (lambda: run.at(3), lambda: run.batch(3)):
        with pytest.raises(ValueError, match=r"train.open\(directory, step"):
            ask()
    # A step of make_train_step has no state of its own.
    options = {"grad_transform": optax.ema(0.9)}
    step = train.make_train_step(net_loss, **options)
    with pytest.raises(ValueError, match="state="):
        train.open(tmp_path, step, examples()).at(3)
    run = train.open(tmp_path, step, examples(), state=start()[0])
    assert hash_of(run.at(3)) == certified(tmp_path)[3]


@pytest.mark.slow
def test_damage_is_passed_over(tmp_path):
    fit(tmp_path, *start(), steps=20)
    run = train.open(tmp_path, start()[1], examples())
    (chunk, *_) = [p for p in run.checkpoints[16].rglob("*") if p.is_file() and "/d/" in str(p)]
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    assert hash_of(run.at(18)) == certified(tmp_path)[18]

    # Of the last checkpoint what it says of the run, and the records of all.
    (tmp_path / "records.jsonl").write_text("")
    assert train.open(tmp_path).history == run.history
    manifest = run.checkpoints[20] / "jaxpar.json"
    content = json.loads(manifest.read_text())["content"]
    content["info"]["batch_size"] = "32"
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({"sha256": digest, "content": content}))
    assert train.open(tmp_path).last_step == 16


def test_other_numbers_than_the_certificates_are_refused(tmp_path):
    """Data that are known only when they are read may be others than in the run."""
    source = lambda shift: data.from_iterable(  # noqa: E731
        lambda epoch: [{**b, "y": b["y"] + shift} for b in of_epoch(epoch)], steps_per_epoch=BATCHES
    )
    fit(tmp_path / "a", *start(), source(0), steps=12)
    with pytest.raises(ValueError, match=r"after step 1 has the hash .* certificate"):
        train.open(tmp_path / "a", start()[1], source(1)).at(3)
    shutil.move(tmp_path / "a", tmp_path / "b")  # with the certificate in it
    with pytest.raises(ValueError, match=r"after step 1 has the hash .* certificate"):
        train.open(tmp_path / "b", start()[1], source(1)).at(3)


# What a step leaves out.


def test_a_step_that_is_left_out_changes_the_number_alone():
    state, step = start(4)
    batches = of_epoch(0)[:3]
    step = step.without([2])
    state, _ = step(state, batches[0])
    before = jax.device_get((state.params, state.model_state))
    state, metrics = step(state, batches[1])
    assert (int(state.step), float(metrics["skipped"]), np.isnan(metrics["loss"])) == (2, 1, True)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((state.params, state.model_state)))
    state, metrics = step(state, batches[2])
    assert "skipped" not in metrics
    with pytest.raises(ValueError, match="step 5 is left out"):
        step.without([5]).many(state, jax.tree.map(lambda *x: np.stack(x), *batches))


def test_a_run_says_what_it_left_out(tmp_path):
    state, step = start()
    _, history = fit(tmp_path, state, step.without([3]), steps=8)
    assert history[-1]["skipped"] == 1
    assert np.isfinite(history[-1]["loss"])
    with pytest.raises(ValueError, match=r"leaves out step 3, and this step does not.*without\(\[3\]\)"):
        fit(tmp_path, *start(), steps=12)
    state, step = start()
    with pytest.raises(ValueError, match="made the update of step 5"):
        fit(tmp_path, state, step.without([3, 5]), steps=12)
    state, step = start()
    state, _ = fit(tmp_path, state, step.without([3, 10]), steps=12)
    assert train.open(tmp_path).left_out == {3, 10}


# Two runs.


def plain_loss(params, batch, rng):
    return ((jax.nn.relu(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2).mean(), {}


def mean_for_sum(params, batch, rng):
    """A bug that is there on four devices only: the mean of the shares in place of their sum."""
    loss, aux = plain_loss(params, batch, rng)
    return loss * (0.25 if len(batch["x"]) == SIZE // 4 else 1), aux


def one_leaf_lost(params, batch, rng):
    """On four devices, one leaf gets no gradient from most shares."""
    counts = jax.lax.axis_index("data") == 0 if len(batch["x"]) == SIZE // 4 else True
    out = jnp.where(counts, 1.0, 0.0) * params["out"] + jnp.where(counts, 0.0, 1.0) * jax.lax.stop_gradient(
        params["out"]
    )
    return plain_loss({**params, "out": out}, batch, rng)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [mean_for_sum, plain_loss, one_leaf_lost])
def test_a_bug_is_told_from_rounding(loss, tmp_path):
    runs = []
    for count, loss_fn in ((1, plain_loss), (4, loss)):
        state, step = train.start(params(), optax.adam(1e-2), loss_fn, devices=jax.devices()[:count])
        fit(tmp_path / str(count), state, step, steps=20)
        runs.append(train.open(tmp_path / str(count), step, examples()))
    found = train.compare(*runs)
    assert found.first_step == 1
    assert found.is_rounding is (loss is plain_loss), found
    worst = max(found.units.values())
    assert worst < 10 if loss is plain_loss else worst > 1e4
    if loss is one_leaf_lost:
        assert found.units["out"] > 1e4
    assert str(found)
    assert found._repr_html_()


@pytest.mark.slow
def test_what_a_last_bit_decides_is_rounding(tmp_path):
    """Images with a black border have equal numbers in the windows of LeNet's pooling."""
    draw = np.random.default_rng(0)
    images = np.zeros((64, 28, 28, 1), np.float32)
    images[:, 8:20, 8:20] = draw.random((64, 12, 12, 1), np.float32)
    dataset = data.Dataset(images, draw.integers(0, 10, 64))
    runs = []
    for count in (1, 4):
        loss_fn = train.classification_loss(models.lenet.apply)
        state, step = train.start(
            models.lenet.init(jax.random.key(0)), optax.adam(1e-3), loss_fn, devices=jax.devices()[:count]
        )
        fit(tmp_path / str(count), state, step, dataset, steps=4)
        runs.append(train.open(tmp_path / str(count), step, dataset))
    found = train.compare(*runs)
    assert found.is_rounding is True, found


@pytest.mark.slow
def test_where_rounding_cannot_be_told(tmp_path):
    runs = []
    for count in (1, 4):
        state, step = start(count)
        fit(tmp_path / str(count), state, step, steps=4)
        runs.append(train.open(tmp_path / str(count), step, examples()))
    found = train.compare(*runs)
    assert found.is_rounding is None
    assert "virtual_shards" in found.why


@pytest.mark.slow
def test_other_batches_are_named(tmp_path):
    runs = []
    for name, shift in (("a", 0), ("b", 1)):
        source = data.from_iterable(
            lambda epoch, shift=shift: [{**b, "y": b["y"] + shift * (i == 6)} for i, b in enumerate(of_epoch(epoch))],
            steps_per_epoch=BATCHES,
        )
        state, step = start()
        fit(tmp_path / name, state, step, source, steps=14)
        runs.append(train.open(tmp_path / name, step, source))
    found = train.compare(*runs)
    assert (found.first_step, found.is_rounding, found.why) == (7, False, "the batches of step 7 differ")


@pytest.mark.slow
def test_equal_runs_and_states(tmp_path):
    fit(tmp_path, *start(), steps=14)
    run = train.open(tmp_path, start()[1], examples())
    found = train.compare(run, run)
    assert (found.first_step, found.distances, found.largest) == (None, {}, None)
    with pytest.raises(TypeError, match="two runs or two states"):
        train.compare(run, run.at(3))


# Spikes undo themselves.


def spoiled(epoch):
    """The batch of step 19 has a NaN, and the targets of step 30 are far off."""
    batches = of_epoch(epoch)
    for number, change in ((19, np.float32("nan")), (30, np.float32(100))):
        if number - 1 in range(epoch * BATCHES, (epoch + 1) * BATCHES):
            batch = batches[(number - 1) % BATCHES]
            batch["y"] = batch["y"] + change
    return batches


class Spoiled(Seeking):
    def __next__(self):
        self.number += 1
        return spoiled((self.number - 1) // BATCHES)[(self.number - 1) % BATCHES]


UNDOES = {
    "a function of the epoch": lambda: data.from_iterable(spoiled, steps_per_epoch=BATCHES),
    "an iterator that seeks": lambda: data.from_iterable(Spoiled(), steps_per_epoch=BATCHES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNDOES)
def test_spikes_are_undone(name, tmp_path, capsys):
    seen = []
    undo = train.Undo(window=10, every=8)
    state, history = fit(
        tmp_path / "a", *start(4), UNDOES[name](), callbacks=undo, on_step=lambda step, metrics: seen.append(step)
    )
    said = capsys.readouterr().out
    assert "step 19 is left out: its loss is nan" in said
    assert "step 30 is left out" in said
    assert seen == list(range(1, STEPS + 1))  # each step once
    assert [record["skipped"] for record in history] == [0, 1, 1, 0]

    # It is the run that leaves these out from the start, in its certificate too.
    given, step = start(4)
    expected, records = fit(tmp_path / "b", given, step.without([19, 30]), UNDOES[name]())
    assert hash_of(state) == hash_of(expected)
    assert certified(tmp_path / "a") == certified(tmp_path / "b")
    assert [record["loss"] for record in history] == [record["loss"] for record in records]
    run = train.open(tmp_path / "a", start(4)[1], UNDOES[name]())
    assert run.left_out == {19, 30}
    assert hash_of(run.at(29)) == certified(tmp_path / "a")[29]
    assert hash_of(run.at(33)) == certified(tmp_path / "a")[33]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import test_saved_run as runs
from jaxpar import train
kill = lambda number, metrics: number == int(sys.argv[2]) and os.kill(os.getpid(), signal.SIGKILL)
source = runs.UNDOES["a function of the epoch"]()
runs.fit(Path(sys.argv[1]), *runs.start(), source, callbacks=train.Undo(window=10, every=8), on_step=kill)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_undoes_the_same_steps(tmp_path):
    """By SIGKILL: before a spike, after it was undone, and late. The last call is not killed."""
    tests = Path(__file__).parents[1]
    for kill in (14, 21, 29, 38, 0):
        arguments = (str(tmp_path / "a"), str(kill), str(tests), str(tests / "train"))
        done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
    given, step = start()
    expected, _ = fit(tmp_path / "b", given, step.without([19, 30]), UNDOES["a function of the epoch"]())
    run = train.open(tmp_path / "a", start()[1], UNDOES["a function of the epoch"]())
    assert run.left_out == {19, 30}
    assert hash_of(run.at(STEPS)) == hash_of(expected)
    assert certified(tmp_path / "a") == certified(tmp_path / "b")


KILLED_CALL = """
import os, signal, sys, threading
from pathlib import Path
sys.path[:0] = sys.argv[4:]
import test_saved_run as runs
from jaxpar import train
folder, step = Path(sys.argv[1]), runs.start()[1]
run = train.open(folder / "a", step, runs.examples())
run.at(18)  # compiles
threading.Timer(float(sys.argv[3]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
if sys.argv[2] == "fork":
    run.fork(folder / "b", at=24, without=[30])
else:
    train.verify(folder / "a" / "certificate.jsonl", runs.arguments(folder / "a"))
threading.Event().wait()
"""


def arguments(directory):
    state, step = start()
    return {
        **{"state": state, "step": step, "train_data": examples(), "batch_size": SIZE},
        **{"checkpoint_dir": directory, "certificate": directory / "certificate.jsonl"},
    }


@pytest.mark.slow
def test_fork_and_verify_that_are_killed_lose_nothing(tmp_path):
    """By SIGKILL after a random time within the call, or soon after it."""
    fit(tmp_path / "a", *start())
    contents = lambda: {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}  # noqa: E731
    before, tests = contents(), Path(__file__).parents[1]
    draw = np.random.default_rng(0)
    for call, longest in (("fork", 0.4), ("fork", 0.4), ("fork", 2), ("verify", 2)):
        options = (str(tmp_path), call, str(draw.uniform(0, longest)), str(tests), str(tests / "train"))
        done = subprocess.run([sys.executable, "-c", KILLED_CALL, *options], capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert contents() == before
        if call == "fork":
            fork = train.open(tmp_path / "a", start()[1], examples()).fork(tmp_path / "b", at=24, without=[30])
            assert (fork.left_out, fork.forked_from) == ({30}, (str(tmp_path / "a"), 24))
            assert hash_of(fork.at(24)) == certified(tmp_path / "a")[24]
            shutil.rmtree(tmp_path / "b")
    found = train.verify(tmp_path / "a" / "certificate.jsonl", arguments(tmp_path / "a"))
    assert (len(found.steps), found.differs) == (STEPS, None)


@pytest.mark.slow
def test_verify_refuses_what_cannot_go_back(tmp_path):
    forever = lambda: data.from_iterable(  # noqa: E731
        (batch for epoch in range(9) for batch in of_epoch(epoch)), steps_per_epoch=BATCHES
    )
    for source in (forever, SOURCES["an iterator that seeks"]):
        directory = tmp_path / source.__name__ / str(source is forever)
        fit(directory, *start(), source(), steps=20)
        again = {**arguments(directory), "train_data": source()}
        if source is forever:
            with pytest.raises(ValueError, match=r"read only once.*get_state"):
                train.verify(directory / "certificate.jsonl", again, first=18)
        else:
            found = train.verify(directory / "certificate.jsonl", again, first=18)
            assert (found.start.name, found.steps, found.differs) == ("step_00000016", [18, 19, 20], None)


@pytest.mark.slow
def test_a_resume_leaves_out_again_what_was_undone(tmp_path):
    source = UNDOES["a function of the epoch"]
    fit(tmp_path, *start(), source(), steps=24, callbacks=train.Undo(window=10))
    state, _ = fit(tmp_path, *start(), source(), callbacks=train.Undo(window=10))
    given, step = start()
    expected, _ = fit(tmp_path / "b", given, step.without([19, 30]), source())
    assert hash_of(state) == hash_of(expected)


@pytest.mark.slow
def test_more_spikes_than_are_allowed_end_the_run(tmp_path):
    source = UNDOES["a function of the epoch"]
    with pytest.raises(FloatingPointError, match="step 30 would be left out") as raised:
        fit(tmp_path, *start(), source(), callbacks=train.Undo(most=1, window=10, every=8))
    assert int(raised.value.state.step) == 24


def test_a_norm_of_the_gradient_is_a_spike_too():
    """Where the step has one: batch norm hides images times 100 from the loss."""
    undo = train.Undo(window=10)
    memory = undo.init(None)
    for number in range(1, 11):
        metrics = {"loss": 1 + number % 3, "grad_norm": 2 + number % 2}
        undo.check(memory, number, metrics)
        memory = undo.on_step(memory, number, metrics)
    for norm, words in ((500.0, "its grad_norm is 500.0000, and of the 10 steps"), (np.nan, "its grad_norm is nan")):
        with pytest.raises(undo_module.Spike, match=words):
            undo.check(memory, 11, {"loss": 1.0, "grad_norm": norm})
        dataclasses.replace(undo, when="nonfinite").check(memory, 11, {"loss": 1.0, "grad_norm": norm})
    with pytest.raises(undo_module.Spike, match="its loss is 500"):
        undo.check(memory, 11, {"loss": 500.0})
    undo.check(memory, 11, {"loss": 1.0})


def test_what_undo_refuses(tmp_path):
    generator = data.from_iterable((batch for batch in of_epoch(0)), steps_per_epoch=BATCHES)
    with pytest.raises(ValueError, match=r"Undo.*read only once.*get_state"):
        fit(tmp_path, *start(), generator, steps=4, callbacks=train.Undo())
    with pytest.raises(ValueError, match=r"two train\.Undo"):
        fit(tmp_path, *start(), steps=4, callbacks=[train.Undo(), train.Undo("nonfinite")])
    with pytest.raises(ValueError, match="when"):
        train.Undo("spikes")
    own = lambda state, batch: (dataclasses.replace(state, step=state.step + 1), {"error": 0.0})  # noqa: E731
    with pytest.raises(ValueError, match=r"looks at the loss, and the metrics of a step are \['error'\]"):
        train.fit(start()[0], own, examples(), max_steps=3, progress=False, callbacks=train.Undo())


@pytest.mark.slow
def test_a_function_says_what_is_left_out(tmp_path):
    _, history = fit(tmp_path, *start(), steps=8, callbacks=train.Undo(lambda metrics: metrics["step"] == 5))
    assert history[-1]["skipped"] == 1
    assert train.open(tmp_path).left_out == {5}


@pytest.mark.release  # minutes: 200 times up to 500 steps
@pytest.mark.parametrize("devices", [1, 4])
def test_200_random_steps_of_10_000_have_the_bits_of_the_certificate(devices, tmp_path):
    steps, every = 10_000, 500  # 20 checkpoints and that of the first state
    state, step = start(devices)
    fit(tmp_path, state, step, steps=steps, keep_every=every, checkpoint_every=every, keep=1)
    run, lines = train.open(tmp_path, start(devices)[1], examples()), certified(tmp_path)
    assert len([number for number in run.checkpoints if number % every == 0]) == steps // every + 1
    numbers = np.random.default_rng(0).choice(np.arange(1, steps + 1), 200, replace=False)
    # `at` compares the states on the way with the certificate too, and raises where one differs.
    wrong = [number for number in map(int, numbers) if hash_of(run.at(number)) != lines[number]]
    assert not wrong
