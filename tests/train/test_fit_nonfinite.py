"""The loop where numbers are not finite: updates left out are counted, or it stops with the state before."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import world
from kv_model import assert_unchanged, snapshot
from world import LOSS, run_on, same, step_of

from jaxpar import checkpoint, data, train

TX = optax.adam(0.1)
STEPS = 6  # batches of 8 in an epoch


def points(bad=()):
    good = world.points(8 * STEPS)
    images = good.images.copy()
    images[list(bad), 1] = np.nan
    return data.Dataset(images, good.labels)


start = functools.partial(world.start_classifier, TX)
step_with = functools.partial(step_of, LOSS)


def run(step, dataset, state=None, **options):
    return run_on(dataset, start() if state is None else state, step=step, batch_size=8, **options)


def batches(dataset):
    """Those of two epochs of `fit`."""
    order = jax.random.fold_in(jax.random.key(3), 0x5FFE1E)
    return data.batches(dataset, 8, rng=order, epochs=2, devices=jax.devices()[:2])


def bad_steps(dataset):
    """The numbers of the steps whose batches have a NaN in them."""
    return [i for i, batch in enumerate(batches(dataset)) if np.isnan(np.asarray(batch["image"])).any()]


@pytest.mark.slow
def test_updates_that_are_left_out_are_counted(tmp_path):
    dataset = points(bad=[20])
    assert len(bad_steps(dataset)) == 2
    state, history = run(step_with(nonfinite="skip"), dataset, metrics_file=tmp_path / "m.jsonl")
    assert [record["skipped"] for record in history] == [1, 1]
    assert all(np.isfinite([record["loss"], record["accuracy"]]).all() for record in history)
    assert history[1]["loss"] < history[0]["loss"]
    assert int(state.step) == 2 * STEPS
    assert int(state.nonfinite["skipped"]) == 2
    assert [json.loads(text)["skipped"] for text in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 1]
    first = bad_steps(dataset)[0] + 1
    with pytest.warns(UserWarning, match=rf"loss of step {first} \(the first is 1\) is nan") as seen:
        _, plain = run(step_with(nonfinite="ignore"), dataset, epochs=2)
    assert len(seen) == 1
    assert np.isnan(plain[0]["loss"])
    assert "skipped" not in plain[0]


def test_an_epoch_without_one_update():
    _, history = run(step_with(nonfinite="skip"), points(bad=range(8 * STEPS)), epochs=1)
    assert history[0]["skipped"] == STEPS
    assert np.isnan(history[0]["loss"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "sharded"])
@pytest.mark.parametrize("row", [3, 20, 47])
def test_it_stops_with_the_state_before_the_bad_step(tmp_path, kind, row):
    dataset = points(bad=[row])
    step = step_with(nonfinite="stop")
    first = bad_steps(dataset)[0]
    message = rf"train step {first} .*the loss and the gradients of 'w'; no update was made since"
    with pytest.raises(FloatingPointError, match=message) as error:
        run(step, dataset, start(kind=kind), checkpoint_dir=tmp_path, checkpoint_every=2)
    stopped = error.value
    assert (stopped.step, stopped.names, int(stopped.state.step)) == (first, ("loss", "w"), first)
    assert stopped.history == []

    want = start(kind=kind)
    for batch in itertools.islice(batches(dataset), first):
        want, _ = step(want, batch)
    want = step.complete(want)
    assert_unchanged(stopped.state, snapshot(want))
    if first:
        saved = checkpoint.restore(checkpoint.latest(tmp_path), step.complete(start(kind=kind)))
        assert saved.store == want.store
        assert not saved.nonfinite["found"].any()


def test_it_goes_on_from_there_when_the_data_is_mended(tmp_path):
    bad, step = points(bad=[20]), step_with(nonfinite="stop")
    first = bad_steps(bad)[0]
    assert first > 1
    with pytest.raises(train.NonFiniteError):
        run(step, bad, checkpoint_dir=tmp_path)
    resumed, history = run(step, points(), checkpoint_dir=tmp_path)
    want, want_history = run(step, points())
    same(resumed, want)
    assert [r["loss"] for r in history] == pytest.approx([r["loss"] for r in want_history], rel=1e-6)


def test_it_goes_back_over_the_end_of_an_epoch_whose_length_is_unknown(tmp_path):
    """The last batch of the second epoch is bad, so that epoch is not over where the run goes on."""
    lengths = (2, 3)

    def loader(dataset):
        def read(epoch):
            for i in range(2 * epoch, 2 * epoch + lengths[epoch]):
                yield {"image": dataset.images[8 * i : 8 * i + 8], "label": dataset.labels[8 * i : 8 * i + 8]}

        return data.from_iterable(read, steps_per_epoch="all")

    step = step_with(nonfinite="stop")
    with pytest.raises(train.NonFiniteError) as stopped:
        run(step, loader(points(bad=[35])), checkpoint_dir=tmp_path)
    assert (stopped.value.step, [record["step"] for record in stopped.value.history]) == (4, [2])
    resumed, history = run(step, loader(points()), checkpoint_dir=tmp_path)
    want, want_history = run(step, loader(points()))
    same(resumed, want)
    assert [(r["epoch"], r["step"]) for r in history] == [(1, 2), (2, 5)]
    assert [r["loss"] for r in history] == pytest.approx([r["loss"] for r in want_history], rel=1e-6)


@pytest.mark.slow
def test_a_state_that_was_given_away_resumes_with_all_its_parts(tmp_path):
    """As in a cell that is run again."""
    step = step_with(nonfinite="skip", loss_scale="dynamic", grad_transform=optax.trace(0.5))
    state = start()
    run(step, points(), state, checkpoint_dir=tmp_path, epochs=1)
    assert state.store.values[0].is_deleted()
    again, _ = run(step, points(), state, checkpoint_dir=tmp_path)
    want, _ = run(step, points())
    same(again, want)
    assert int(again.loss_scale["good_steps"]) == 2 * STEPS


@pytest.mark.slow
def test_a_loss_scale_that_is_too_large_at_first_stops_nothing():
    step = step_with(nonfinite="stop", loss_scale=train.DynamicLossScale(initial=2.0**20), compute_dtype=jnp.float16)
    state, history = run(step, points())
    assert history[0]["skipped"] > 0
    assert history[1]["skipped"] == 0
    assert history[1]["loss"] < history[0]["loss"]
    assert int(state.nonfinite["skipped"]) == history[0]["skipped"]


def test_steps_between_an_overflow_and_a_nan_count(tmp_path):
    """The metrics of the overflow are read when the state already is that of the NaN."""
    scale = train.DynamicLossScale(initial=2.0**19)
    step = step_with(nonfinite="stop", loss_scale=scale, compute_dtype=jnp.float16)
    dataset, seen = points(bad=[20]), []
    bad = bad_steps(dataset)[0]
    assert bad > 2
    with pytest.raises(train.NonFiniteError, match=f"step {bad} "):
        run(step, dataset, on_step=lambda number, metrics: seen.append((number, metrics["skipped"])))
    assert [number for number, _ in seen] == list(range(1, bad + 1))
    assert seen[0] == (1, 1.0)
    assert seen[-1] == (bad, 0.0)


def test_a_callback_that_raises_it_moves_nothing(tmp_path):
    """As `train.check_finite` in a callback does. The state stays that of the epoch, and its record is made again."""
    step, dataset = step_with(nonfinite="skip"), points(bad=[20])

    def strict(state, record):
        train.check_finite(record, state)

    with pytest.raises(train.NonFiniteError, match=f"step {bad_steps(dataset)[0]} "):
        run(step, dataset, callbacks=strict, checkpoint_dir=tmp_path)
    again, history = run(step, dataset, checkpoint_dir=tmp_path)
    want, records = run(step, dataset)
    same(again, want)
    assert [(r["epoch"], r["step"], r["loss"]) for r in history] == [
        (r["epoch"], r["step"], r["loss"]) for r in records
    ]
