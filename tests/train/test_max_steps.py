"""`max_steps` and `eval_every`: a run that ends or is evaluated within an epoch, and goes on to the same bits."""

import dataclasses
import functools
import time

import numpy as np
import optax
import pytest
import world
from world import TEST, apply, numbers, points, run_on, same

from jaxpar import checkpoint, data, train

TRAIN = points(80)  # ten steps of 8
start = functools.partial(world.start_classifier, optax.sgd(0.5, momentum=0.9))


def run(state=None, **options):
    options = {"batch_size": 8, "epochs": None, "test_data": TEST, "apply_fn": apply, **options}
    return run_on(TRAIN, start() if state is None else state, **options)


def test_max_steps_ends_within_an_epoch_and_goes_on_to_the_same_bits(tmp_path):
    options = {"callbacks": train.EarlyStopping("test_loss", patience=9)}
    whole, history = run(max_steps=35, **options)
    assert [(r["epoch"], r["step"]) for r in history] == [(1, 10), (2, 20), (3, 30), (4, 35)]
    assert [r.get("interrupted") for r in history] == [None, None, None, True]
    assert int(whole.step) == 35
    assert history[-1]["test_loss"] == pytest.approx(train.evaluate(whole, apply, TEST, batch_size=8)["loss"], rel=1e-6)
    for most in (13, 17, 17, 20, 35, 35):  # 17 and 35 twice: nothing is left to do
        state, parts = run(max_steps=most, checkpoint_dir=tmp_path, **options)
        assert int(state.step) == most
        assert parts[-1].get("interrupted") == (None if most == 20 else True)
        assert parts[-1]["test_loss"] is not None
    same(state, whole)
    assert numbers(parts) == numbers(history)
    longer, history = run(epochs=4, **options)
    again, parts = run(epochs=4, checkpoint_dir=tmp_path, **options)
    same(again, longer)
    assert numbers(parts) == numbers(history)


def test_a_state_that_is_returned_goes_on_with_its_run(tmp_path):
    state, _ = run(max_steps=13, checkpoint_dir=tmp_path)
    state, history = run(state, max_steps=25, checkpoint_dir=tmp_path)  # the same cell with more steps
    same(state, run(max_steps=25)[0])
    assert [r["step"] for r in history] == [10, 20, 25]


def test_the_shorter_of_epochs_and_max_steps(capsys):
    assert [r["step"] for r in run(epochs=1, max_steps=25)[1]] == [10]
    assert [r["step"] for r in run(epochs=3, max_steps=5, progress=True)[1]] == [5]
    assert capsys.readouterr().out.startswith("step 5  epoch 1/1  loss")
    for name in ("max_steps", "eval_every"):
        with pytest.raises(ValueError, match=f"fit: {name} must be an int of 1 or more, got 0"):
            run(epochs=1, **{name: 0})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("per_program", ["auto", 3])
def test_eval_every(tmp_path, per_program):
    seen, steps = [], []

    def callback(state, record):
        scores = train.evaluate(state, apply, TEST, batch_size=8)
        assert record["test_loss"] == pytest.approx(scores["loss"], rel=1e-6)
        seen.append((record["epoch"], record["step"], record.get("under_way")))

    options = {"on_step": lambda step, metrics: steps.append(metrics["loss"]), "steps_per_execution": per_program}
    state, history = run(epochs=2, eval_every=4, callbacks=callback, metrics_file=tmp_path / "m", **options)
    want = [(1, 4, True), (1, 8, True), (1, 10, None), (2, 12, True), (2, 16, True), (2, 20, None)]
    assert seen == want
    assert [(r["epoch"], r["step"], r.get("under_way")) for r in history] == want
    assert len((tmp_path / "m").read_text().splitlines()) == 6
    means = [np.mean(steps[(step - 1) // 10 * 10 : step]) for _, step, _ in want]
    np.testing.assert_allclose([r["loss"] for r in history], means, rtol=1e-6)
    plain, epochs = run(epochs=2)
    same(state, plain)  # an evaluation changes nothing
    assert numbers(r for r in history if not r.get("under_way")) == numbers(epochs)


@pytest.mark.slow
def test_early_stopping_within_an_epoch_survives_a_resume(tmp_path):
    improve_until_step_12 = lambda state, record: record.update(own_loss=abs(record["step"] - 12))  # noqa: E731
    callbacks = [improve_until_step_12, train.EarlyStopping("own_loss", patience=3), train.KeepBest("own_loss")]
    options = {"eval_every": 4, "callbacks": callbacks}
    whole, history = run(epochs=9, checkpoint_dir=tmp_path / "a", **options)
    assert [r["step"] for r in history] == [4, 8, 10, 12, 16, 20, 24]
    assert history[-1]["interrupted"]
    assert checkpoint.best(tmp_path / "a").name == "step_00000012"  # a state within an epoch
    same(checkpoint.restore(tmp_path / "a" / "step_00000012", start()), run(max_steps=12)[0])
    for most in (4, 6, 12, 17, 20, 99):
        state, again = run(epochs=9, max_steps=most, checkpoint_dir=tmp_path / "b", **options)
    same(state, whole)
    assert numbers(again) == numbers(history)
    assert checkpoint.best(tmp_path / "b").name == "step_00000012"
    state, again = run(epochs=9, checkpoint_dir=tmp_path / "b", **options)  # it is over
    same(state, whole)
    assert numbers(again) == numbers(history)


def test_the_best_where_max_steps_ends_the_first_epoch(tmp_path):
    run(max_steps=5, checkpoint_dir=tmp_path, callbacks=train.KeepBest("test_loss"))
    assert checkpoint.best(tmp_path).name == "step_00000005"


def test_the_time_of_an_evaluation_is_no_time_of_training(monkeypatch):
    evaluated, clock = [], time.perf_counter

    def scores(evaluation, state):
        evaluated.append(int(state.step))
        return {}, {}

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1000 * len(evaluated))
    monkeypatch.setattr("jaxpar.train._evaluate.evaluate.Evaluation.scores", scores)
    _, history = run(epochs=1, eval_every=2)
    assert len(evaluated) == 5
    assert history[-1]["seconds"] < 1000


def test_a_run_that_is_complete_says_so(tmp_path, capsys):
    want, _ = run(epochs=2, checkpoint_dir=tmp_path)
    assert "0 steps trained" not in capsys.readouterr().out
    state, history = run(epochs=2, checkpoint_dir=tmp_path)
    out = capsys.readouterr().out
    assert "jaxpar: complete at step 20: 0 steps trained; raise epochs=, or resume=False for a new run\n" in out
    same(state, want)
    assert len(history) == 2
    run(max_steps=15, checkpoint_dir=tmp_path)
    assert "complete at step 20: 0 steps trained; raise max_steps=, or" in capsys.readouterr().out
    run(max_steps=21, checkpoint_dir=tmp_path)
    assert "0 steps trained" not in capsys.readouterr().out


def test_a_line_says_where_no_epoch_is_a_pass_over_the_data(tmp_path, capsys):
    """The step of a state says which batch comes next, also of other data: examples may come twice in an epoch."""
    line = "the state is at step 3, and a pass over these data has 10 batches: each epoch of this call begins behind 3"
    batches = [{"image": TRAIN.images[i : i + 8], "label": TRAIN.labels[i : i + 8]} for i in range(0, 80, 8)]
    options = {"batch_size": 8, "epochs": 1}
    for others in (TRAIN, batches, data.from_iterable(lambda epoch: iter(batches), steps_per_epoch="all")):
        has_line = others is TRAIN or others is batches
        state, _ = run(max_steps=3)
        assert "a pass over" not in capsys.readouterr().out
        state, _ = run_on(others, state, **options)
        assert (line in capsys.readouterr().out) is has_line
    # A pass begins with a step of 0, as docs/your_model.md says. A run that resumes has its own passes.
    state, _ = run_on(TRAIN, dataclasses.replace(state, step=0 * state.step), **options)
    run_on(TRAIN, state, **options)
    run(max_steps=3, checkpoint_dir=tmp_path)
    run(max_steps=13, checkpoint_dir=tmp_path)
    assert "a pass over" not in capsys.readouterr().out
