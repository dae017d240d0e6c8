"""Callbacks as values: what they remember is saved, so a resumed run decides as an undisturbed one."""

import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tqdm.auto
from optax import contrib
from world import STEP, TEST, TX, apply, crash_after, numbers, points, run_on, same, save_by_manager, start_classifier

from jaxpar import checkpoint, kv, train, updaters
from jaxpar.train._callbacks.memory import is_saved_memory, memory_from_json, memory_to_json
from jaxpar.train._callbacks.monitors import default_monitor

TRAIN = points(48)  # three steps of 16
TESTED = {"test_data": TEST, "apply_fn": apply}
run = functools.partial(run_on, TRAIN)


class Scripted:
    """Puts values of a metric into the records, epoch by epoch, before the others see them."""

    def __init__(self, *values, name="score"):
        self.values, self.name = values, name

    def __call__(self, state, record):
        record[self.name] = self.values[(int(state.step) - 1) // 3]


NAN = float("nan")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ((5, 4, 4, 4, 3, 2), {"patience": 2}, 4),
        ((5, 4, 3, 2, 1, 0), {}, 6),
        ((5, 6, 4, 5, 3, 4), {"patience": 2}, 6),
        ((1, 2, 2, 1, 0, 3), {"patience": 3, "mode": "max"}, 5),
        ((5, 4.9, 4.8, 4.7, 3, 2), {"patience": 3, "min_delta": 0.5}, 4),
        ((5, NAN, NAN, 4, 3, 2), {"patience": 3}, 6),
        ((NAN, NAN, NAN, 4, 3, 2), {"patience": 3}, 3),
        ((math.inf, math.inf, 1, 0, 0, 0), {"patience": 2}, 2),
    ],
)
def test_early_stopping(values, options, epochs, tmp_path):
    stopping = train.EarlyStopping("score", **{"mode": "min", "patience": 1, **options})
    callbacks = [Scripted(*values), stopping]
    state, history = run(epochs=6, callbacks=callbacks, checkpoint_dir=tmp_path, keep=9)
    assert len(history) == epochs
    # From every checkpoint of the run it goes on to the same epoch.
    for step in range(3, 3 * epochs, 3):
        like = checkpoint.restore(tmp_path / f"step_{step:08d}", start_classifier())
        part = tmp_path / f"part{step}"
        part.mkdir()
        (tmp_path / f"step_{step:08d}").rename(part / "step")
        resumed, again = run(epochs=6, callbacks=callbacks, checkpoint_dir=part)
        assert (len(again), int(like.step)) == (epochs, step)
        same(resumed, state)


def test_a_stopping_without_a_monitor_takes_what_there_is():
    assert default_monitor({"loss": 1.0, "test_loss": 1.0, "test_accuracy": 0.5}) == "test_loss"
    assert default_monitor({"loss": 1.0, "test_loss": 1.0, "eval_loss": 2.0}) == "eval_loss"
    assert default_monitor({"loss": 1.0, "test_loss": None, "eval_kind": 1.0, "eval_top5": 2.0}) == "eval_top5"
    assert default_monitor({"loss": 1.0, "accuracy": 0.5, "eval_kind": 1.0}) == "loss"
    step = train.make_train_step(lambda p, b, rng: (jnp.mean(b["image"]) + 0 * p["w"].sum(), {}))
    _, history = run(step=step, callbacks=train.EarlyStopping(patience=2), epochs=9)
    assert len(history) < 9


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("min", "loss eval_loss valLoss own_loss RMSE mean_squared_error cross_entropy crossEntropy kl_divergence"),
        ("min", "word_error_rate eval_loss/1 l2_loss log_loss mean_loss_2"),
        ("max", "accuracy test_accuracy top5 top1_accuracy recall_at_5 recall@10 f1_score log_likelihood bleu4 acc_1"),
        (None, "neg_loss negLoss negative_log_likelihood non_loss not_error minus_loss inv_mse nonloss antiloss"),
        (None, "1-acc 1_acc 1acc eval_1-acc 1/loss -loss eval_-loss exp(-loss) \u2212loss accuracy_1_minus"),
        (None, "score eval_score loss_score brier_score inaccuracy unlikelihood lossless error_free correct_errors"),
        (None, "loss_improvement loss_gain accuracy_drop delta_loss loss_scale loss_ratio accuracy_loss avoided_loss"),
        (None, "entropy distance top5_error map_loss reply learning_rate"),
    ],
)
def test_a_direction_is_guessed_only_where_the_name_is_certain(mode, names):
    for name in names.split():
        if mode is None:
            for make in (train.EarlyStopping, train.KeepBest):
                with pytest.raises(ValueError, match="does not tell whether more or less is better; give mode='min'"):
                    make(name)
            assert train.KeepBest(name, mode="max").mode == "max"
        else:
            record = {"step": 3, name: 1.0}
            keep = train.KeepBest(name)
            memory, _ = keep.on_epoch(keep.init(None), None, record)
            memory, _ = keep.on_epoch(memory, None, {"step": 6, name: 2.0})
            assert memory["step"] == (3 if mode == "min" else 6), name


def test_a_score_that_is_not_monitored_is_said(capsys):
    scores = {"eval_data": {"image": np.ones((4, 4), np.float32)}, "eval_fn": lambda p, b: {"score": b["image"][:, 0]}}
    run(epochs=1, callbacks=[train.EarlyStopping(), train.EarlyStopping("eval_score", mode="max")], **scores)
    said = capsys.readouterr().err
    assert said.count("fit: train.EarlyStopping monitors the loss of the training; give monitor= and mode= for") == 1
    assert "one of eval_score, whose names do not tell what is better" in said
    with pytest.raises(ValueError, match="the name 'eval_score' does not tell"):
        train.EarlyStopping("eval_score")


@pytest.mark.slow
def test_a_metric_that_there_is_not():
    made = []
    options = {"on_step": lambda *args: made.append(args)}
    words = r"train.EarlyStopping: unknown metric 'val_loss'; known are accuracy, loss"
    for monitor, message, more in [
        ("test_loss", "EarlyStopping monitors 'test_loss', but nothing is evaluated; give test_data", {}),
        ("val_loss", words, {}),
        ("test_auc", "unknown metric 'test_auc'; known are accuracy, loss, test_acc", TESTED),
    ]:
        with pytest.raises(ValueError, match=message):
            run(callbacks=train.EarlyStopping(monitor), **options, **more)
    assert not made
    with pytest.raises(ValueError, match=words) as raised:  # the metrics of a step of one's own are known when it ran
        run(callbacks=train.EarlyStopping("val_loss"), step=lambda state, batch: STEP(state, batch), **options)
    assert (made, int(raised.value.state.step)) == ([], 3)  # at the first step that was read


class StopsAt:
    """Ends the run at the step, and counts its calls in an attribute."""

    def __init__(self, step):
        self.step, self.calls = step, 0

    def __call__(self, state, record):
        self.calls += 1
        return record["step"] >= self.step


def below(bound):
    return lambda state, record: record["score"] < bound


def scripted(patience=1, **options):
    return [Scripted(5, 4, 4, 3, 2, 2, 1, 1, 1), train.EarlyStopping("score", mode="min", patience=patience, **options)]


ENDED = {  # what ended a run of nine epochs, what is given then, and after how many epochs that one ends
    "the same": (scripted, scripted, 3),
    "more patience": (scripted, lambda: scripted(2), 9),
    "another monitor": (scripted, lambda: [Scripted(), train.EarlyStopping("loss", patience=99)][1:], 9),
    "another least change": (scripted, lambda: scripted(min_delta=1.5), 4),
    "another beside it": (scripted, lambda: [*scripted(), lambda state, record: None], 3),
    "none": (scripted, list, 9),
    "the same object": (lambda: [StopsAt(6)], lambda: [StopsAt(6)], 2),
    "other attributes of an object": (lambda: [StopsAt(6)], lambda: [StopsAt(12)], 4),
    "the same function": (lambda: [scripted()[0], below(4.5)], lambda: [scripted()[0], below(4.5)], 2),
    "another bound of a function": (lambda: [scripted()[0], below(4.5)], lambda: [scripted()[0], below(3.5)], 4),
    "the one of two that is left": (lambda: [StopsAt(6), below(4.5), Scripted(5, 4)][::-1], lambda: [StopsAt(6)], 2),
    "the same memory": (lambda: Mine(2), lambda: Mine(2), 2),
    "another memory": (lambda: Mine(2), lambda: Mine(5), 5),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", ENDED)
def test_a_run_that_a_callback_ended_goes_on_with_another(tmp_path, capsys, case):
    first, then, epochs = ENDED[case]
    _, history = run(epochs=9, callbacks=first(), checkpoint_dir=tmp_path / "a", keep=9)
    ended = len(history)
    assert ended < 9
    capsys.readouterr()
    state, history = run(epochs=9, callbacks=then(), checkpoint_dir=tmp_path / "a")
    assert len(history) == epochs
    said = capsys.readouterr().out
    words = "other callbacks or limits are given, so it goes on" if epochs > ended else "0 steps trained; resume=False"
    assert f"a callback ended this run at step {3 * ended}" in said
    assert words in said
    whole, same_history = run(epochs=epochs)  # a run that nothing ended has these numbers
    same(state, whole)
    assert [record["loss"] for record in history] == [record["loss"] for record in same_history]


@pytest.mark.parametrize("limits", [{"epochs": 12}, {"max_steps": 11, "epochs": None}, {"epochs": 12, "max_steps": 30}])
def test_a_run_that_a_callback_ended_goes_on_to_other_limits(tmp_path, limits, capsys):
    options = {"callbacks": [StopsAt(6)], "checkpoint_dir": tmp_path}
    run(epochs=9, **options)
    run(epochs=9, **options)
    assert "to go on" in capsys.readouterr().out
    state, history = run(**{**options, **limits})
    assert int(state.step) == 9  # the same callback ends it again, at the next record
    assert [record["step"] for record in history] == [3, 6, 9]
    state, _ = run(**{**options, **limits})
    assert int(state.step) == 9


@pytest.mark.slow
def test_a_run_that_was_ended_within_an_epoch_goes_on_there(tmp_path):
    options = {"eval_every": 2, "checkpoint_dir": tmp_path, **TESTED}
    _, history = run(epochs=3, callbacks=StopsAt(4), **options)
    assert [record["step"] for record in history] == [2, 3, 4]
    state, history = run(epochs=3, **options)
    whole, expected = run(epochs=3, eval_every=2, **TESTED)
    same(state, whole)
    assert numbers(history) == numbers(expected)


def test_an_object_that_counts_ends_its_run_once(tmp_path):
    """As in a notebook: the object is the one that ended the run, and as it was then."""
    stops = StopsAt(6)
    for _ in range(3):
        assert len(run(epochs=9, callbacks=stops, checkpoint_dir=tmp_path)[1]) == 2
    assert len(run(epochs=9, callbacks=StopsAt(6), checkpoint_dir=tmp_path)[1]) == 2  # a new process


class Mine:
    """A callback with a memory of each sort: it counts steps, and stops after some records."""

    def __init__(self, records=99, more=None):
        self.records, self.more = records, more

    def init(self, state):
        arrays = {"losses": np.zeros(2), "device": jnp.zeros(2), "half": jnp.zeros((2, 3), jnp.bfloat16)}
        return {"steps": 0, "word": None, "more": self.more, **arrays}

    def on_step(self, memory, step, metrics):
        assert memory["steps"] in (0, step - 1)
        return {**memory, "steps": step, "losses": memory["losses"] * 0.9 + metrics["loss"]}

    def on_epoch(self, memory, state, record):
        assert memory["steps"] == record["step"]
        memory = {**memory, "device": memory["device"] + state.params["w"][0, :2], "word": f"epoch {record['epoch']}"}
        self.seen = memory
        return memory, record["step"] >= 3 * self.records


@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [2, None])
def test_a_memory_survives_a_resume_bit_for_bit(tmp_path, every, capsys):
    whole = Mine(4)
    state, history = run(epochs=9, callbacks=[whole])
    assert len(history) == 4
    half = Mine(4)
    both = [half, crash_after(3)] if every else [crash_after(3), half]
    with pytest.raises(RuntimeError, match="crash"):
        run(epochs=9, callbacks=both, checkpoint_dir=tmp_path / "b", checkpoint_every=every)
    resumed, again = run(epochs=9, callbacks=half, checkpoint_dir=tmp_path / "b")  # the third record is made again
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")  # it says only from where
    same(resumed, state)
    assert numbers(again) == numbers(history)
    jax.tree.map(np.testing.assert_array_equal, half.seen, whole.seen)
    assert jax.tree.map(type, half.seen) == jax.tree.map(type, whole.seen)


def test_a_memory_that_does_not_fit_starts_empty_and_is_named(tmp_path, capsys):
    run(epochs=1, callbacks=[Mine(), train.EarlyStopping()], checkpoint_dir=tmp_path)
    capsys.readouterr()
    others = [Mine(more=np.zeros(1)), train.KeepBest(), train.EarlyStopping(patience=9)]
    run(epochs=2, callbacks=others, checkpoint_dir=tmp_path)
    assert capsys.readouterr().err.splitlines() == [
        "jaxpar: fit: the checkpoint has no matching memory of Mine and KeepBest, so it starts anew; no callback uses "
        "the memory of Mine in the checkpoint"
    ]
    # A checkpoint from before there were memories.
    path = next(tmp_path.glob("step_00000006*"))
    _, info = checkpoint.Manager(tmp_path).restore_latest(start_classifier())
    assert [entry["name"] for entry in info.pop("callbacks")] == ["Mine", "KeepBest", "EarlyStopping"]
    save_by_manager(tmp_path / "old", checkpoint.restore(path, start_classifier()), info)
    _, history = run(epochs=3, callbacks=train.EarlyStopping(), checkpoint_dir=tmp_path / "old")
    assert len(history) == 3
    assert "no matching memory of EarlyStopping, so it starts anew" in capsys.readouterr().err
    run(epochs=4, checkpoint_dir=tmp_path / "old")
    assert "no callback uses the memory of EarlyStopping in the checkpoint" in capsys.readouterr().err


def test_memories_as_json():
    mine = {"a": [1, 0.1, None, "x", True], "b": (np.float32(0.1), jnp.arange(3), np.zeros((0, 2))), "c": -math.inf}
    saved = {"name": "mine", **json.loads(json.dumps(memory_to_json(mine, "mine")))}
    assert is_saved_memory(saved)
    back = memory_from_json(saved, mine)
    assert jax.tree.structure(back) == jax.tree.structure(mine)
    jax.tree.map(np.testing.assert_array_equal, back, mine)
    for wrong in ({"a": 1}, {**mine, "c": np.zeros(1)}, {**mine, "b": (1, *mine["b"][1:])}):
        with pytest.raises(ValueError, match="differs"):
            memory_from_json(saved, wrong)
    with pytest.raises(TypeError, match=r"save the memory of mine, .*; got <object .* at \['a'\]"):
        memory_to_json({"a": object()}, "mine")
    with pytest.raises(TypeError, match="arrays, numbers and texts"):
        memory_to_json(jax.random.key(0), "mine")
    with pytest.raises(ValueError, match="the memory of mine has 17,000,000 bytes, more than the 16,777,216"):
        memory_to_json(np.zeros(17_000_000, np.uint8), "mine")


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        {"name": "a", "names": ["x"], "values": []},
        {"name": 1, "names": [], "values": []},
        {"name": "a", "names": [1], "values": [1]},
        {"name": "a", "names": ["x"], "values": [[1]]},
        {"name": "a", "names": ["x"], "values": [{"dtype": "float32", "shape": [2], "data": "AAAA"}]},
        {"name": "a", "names": ["x"], "values": [{"dtype": "object", "shape": [0], "data": ""}]},
        {"name": "a", "names": ["x"], "values": [{"dtype": "float32", "shape": [-1], "data": ""}]},
        {"name": "a", "names": ["x"], "values": [{"dtype": "float32", "shape": [1], "data": "%%%%"}]},
        {"name": "a", "names": ["x"], "values": [{"shape": [1]}]},
    ],
)
def test_a_forged_memory_is_no_memory(wrong):
    assert not is_saved_memory(wrong)


HOOKS = "before_resume init on_start on_step on_step on_step on_media on_epoch on_saved on_end".split()


class Listens(train.Callback):
    """Has written every hook, and notes each call with the number of its arguments, the memory among them."""

    def __init__(self):
        self.heard = []
        for name in vars(train.Callback):
            if name.startswith(("on_", "before_")) and name != "on_step":
                setattr(self, name, functools.partial(self.note, name))

    def note(self, name, *args):
        self.heard.append((name, len(args)))
        return ({"calls": 1}, False) if name == "on_epoch" else None

    def init(self, state):
        self.heard.append(("init", 1))
        return {"calls": 0}

    def on_step(self, memory, step, metrics):
        self.heard.append(("on_step", 3))
        return memory


class Duck:
    """The same, of a class that does not know of `train.Callback`."""

    __init__, note, init, on_step = Listens.__init__, Listens.note, Listens.init, Listens.on_step


class Function:
    """What is called as a function may have those hooks that have no memory."""

    __init__, note = Listens.__init__, Listens.note

    def __call__(self, state, record):
        self.heard.append(("on_epoch", 3))


def test_all_kinds_of_callbacks_have_the_same_hooks(tmp_path):
    function = Function()
    del function.on_epoch  # it would be an object with half of a memory
    given = [Listens(), Duck(), train.Callback(), function]
    shown = {"eval_data": {"x": np.zeros((2, 4, 4))}, "eval_fn": lambda p, b: {"seen": train.Image(b["x"])}}
    run(epochs=1, callbacks=given, checkpoint_dir=tmp_path, **shown)
    expected = dict(zip(HOOKS, (1, 1, 1, 3, 3, 3, 2, 3, 2, 1), strict=True))
    assert given[0].heard == given[1].heard == [(name, expected[name]) for name in HOOKS]
    assert function.heard == [heard for heard in given[0].heard if heard[0] not in ("init", "on_step")]
    # Checkpoints name those with a memory by their own classes, and have none of the others.
    path = next(tmp_path.glob("step_*"))
    _, info = checkpoint.Manager(path.parent).restore_latest(start_classifier())
    assert [entry["name"] for entry in info["callbacks"]] == ["Listens", "Duck"]


def test_a_memory_that_no_checkpoint_would_have_is_refused():
    class Forgets(train.Callback):
        def on_step(self, memory, step, metrics):
            return (memory or 0) + 1

    class ForgetsEpochs(train.Callback):
        def on_epoch(self, memory, state, record):
            return (memory or 0) + 1, False

    for callback, words in [
        (Forgets(), r"Forgets.on_step returned the memory .*1.*, and the class has no init; write init\(self, state\)"),
        (ForgetsEpochs(), r"ForgetsEpochs.on_epoch returned the memory .*1.* no init"),
    ]:
        with pytest.raises(TypeError, match=words):
            run(epochs=1, callbacks=callback)


def test_what_is_no_callback():
    class Half:
        def init(self, state):
            return ()

    class Odd(Mine):
        def on_step(self, step, metrics):
            pass

    class Bare(Mine):
        def on_epoch(self, memory, state, record):
            return memory

    for options, words in [
        ({"callbacks": Half()}, r"must be a function of \(state, record\), .*Half.* object with init and on_epoch"),
        ({"callbacks": Odd()}, r"Odd has a memory, so its on_step must be a function of \(memory, step, metr"),
        ({"on_step": Mine().on_step}, r"on_step must be .* \(step, metrics\), got on_step\(memory, step, metrics\)"),
        ({"callbacks": Bare()}, r"Bare.on_epoch must return \(memory, stop\), got"),
        ({"callbacks": lambda state, record: state}, r"callback function returned a state, .* a schedule or optax"),
        ({"callbacks": Mine(more=object()), "checkpoint_dir": "never"}, r"save the memory of Mine.*\['more'\]"),
    ]:
        with pytest.raises(TypeError, match=words):
            run(**options)


@pytest.mark.sampled(1)
def test_the_best_checkpoint_stays(tmp_path, engine):
    step = train.make_train_step(train.classification_loss(apply), engine=engine)
    values = (0.3, 0.9, 0.5, NAN, 0.8, 0.9)
    callbacks = [Scripted(*values, name="my_accuracy"), train.KeepBest("my_accuracy")]
    run(step=step, epochs=6, callbacks=callbacks, checkpoint_dir=tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000006", "step_00000015", "step_00000018"]
    assert checkpoint.best(tmp_path).name == "step_00000006"
    best = checkpoint.restore(checkpoint.best(tmp_path), start_classifier())
    np.testing.assert_array_equal(best.params["w"], run(step=step, epochs=2)[0].params["w"])
    found = checkpoint.Manager(tmp_path).restore_best(start_classifier())
    same(found[0], best)
    # Resumed, the best of before is still the one to beat.
    callbacks[0] = Scripted(*values, 0.85, 0.95, 0.1, name="my_accuracy")
    run(step=step, epochs=7, callbacks=callbacks, checkpoint_dir=tmp_path, keep=2)
    assert checkpoint.best(tmp_path).name == "step_00000006"
    run(step=step, epochs=9, callbacks=callbacks, checkpoint_dir=tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000024", "step_00000027"]
    assert checkpoint.best(tmp_path).name == "step_00000024"


def test_a_damaged_best_is_passed_over(tmp_path, capsys):
    assert checkpoint.best(tmp_path / "none") is None
    manager = checkpoint.Manager(tmp_path, keep=3)
    for step, best in enumerate((True, False, True, False), 1):
        manager.save({"step": jnp.int32(step)}, best=best)
    manager.close()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert checkpoint.best(tmp_path).name == "save_00000003"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before  # looking writes nothing
    assert {path.name for path in tmp_path.iterdir()} == {f"save_{n:08d}" for n in (2, 3, 4)}
    save_by_manager(tmp_path, {"step": jnp.int32(5)}, best=True)
    manifest = tmp_path / "save_00000005" / "jaxpar.json"
    manifest.write_text(manifest.read_text().replace('"best": true', '"best": false'))
    assert checkpoint.best(tmp_path).name == "save_00000003"
    assert "save_00000005 is damaged" in capsys.readouterr().err
    assert int(checkpoint.Manager(tmp_path).restore_best({"step": jnp.int32(0)})[0]["step"]) == 3


def test_the_best_needs_checkpoints(tmp_path):
    with pytest.raises(ValueError, match=r"train.KeepBest keeps the best checkpoint, so give checkpoint_dir="):
        run(callbacks=train.KeepBest())
    with pytest.raises(ValueError, match=r"2 callbacks keep a best checkpoint.*give one train.KeepBest"):
        run(callbacks=[train.KeepBest(), train.KeepBest("accuracy")], checkpoint_dir=tmp_path)


BEST = train.EarlyStopping("score", mode="max", patience=2, restore_best=True)
SCORES = Scripted(0.1, 0.5, 0.3, 0.2, 0.9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("epochs", [4, 3, 2])  # stopped, at its end before that, at its best
def test_the_best_state_is_restored(tmp_path, epochs, capsys):
    want, _ = run(epochs=2)
    state, history = run(epochs=epochs, callbacks=[SCORES, BEST])
    same(state, want)
    assert len(history) == epochs
    assert ("restored the best state, of step 6" in capsys.readouterr().out) == (epochs > 2)
    options = {"callbacks": [SCORES, BEST], "checkpoint_dir": tmp_path, "keep": 1}
    saved, again = run(epochs=9, **options) if epochs == 4 else run(epochs=epochs, **options)
    jax.tree.map(np.testing.assert_array_equal, jax.random.key_data(saved.rng), jax.random.key_data(want.rng))
    jax.tree.map(np.testing.assert_array_equal, saved.store, want.store)
    assert numbers(again) == numbers(history)
    more, _ = run(saved, epochs=1)  # training goes on from it
    same(more, run(epochs=3)[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [{"epochs": 1}, {"epochs": 2}, {"epochs": 3}, {"max_steps": 4}, {"max_steps": 8}])
def test_a_resumed_run_restores_the_same_best_state(tmp_path, first, capsys):
    want, _ = run(epochs=9, callbacks=[SCORES, BEST])
    options = {"callbacks": [SCORES, BEST], "checkpoint_dir": tmp_path, "keep": 1}
    run(**{"epochs": 9, **first}, **options)
    capsys.readouterr()
    for _ in range(2):  # the second call finds it complete
        state, history = run(epochs=9, **options)
        jax.tree.map(np.testing.assert_array_equal, state.store, want.store)
        assert [record["epoch"] for record in history] == [1, 2, 3, 4]
    assert "a callback ended this run at step 12: 0 steps trained; resume=False for" in capsys.readouterr().out


def test_a_state_is_restored_only_where_one_is_the_best(tmp_path):
    want, _ = run(epochs=2)
    same(run(epochs=2, callbacks=[Scripted(NAN, NAN), BEST])[0], want)
    with pytest.raises(ValueError, match=r"one train.KeepBest, or one train.EarlyStopping\(restore_best=True\), which"):
        run(callbacks=[SCORES, BEST, train.KeepBest("accuracy")], checkpoint_dir=tmp_path)


def test_a_best_checkpoint_that_is_gone(tmp_path, capsys):
    options = {"callbacks": [SCORES, BEST], "checkpoint_dir": tmp_path, "keep": 1}
    run(epochs=3, **options)
    shutil.rmtree(checkpoint.best(tmp_path))
    with pytest.raises(checkpoint.CheckpointError, match="no good checkpoint of the best state, of step 6"):
        run(epochs=4, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [contrib.schedule_free_sgd(0.5), optax.chain(TX, updaters.average_params(0.9))],
    ids=["schedule_free", "ema"],
)
def test_the_best_of_an_optimizer_that_evaluates_other_parameters(tmp_path, tx):
    options = {"callbacks": train.KeepBest("test_loss"), "keep": 1, **TESTED}
    _, history = run(start_classifier(tx), epochs=4, checkpoint_dir=tmp_path, **options)
    best = checkpoint.restore(checkpoint.best(tmp_path), start_classifier(tx))
    record = min(history, key=lambda record: record["test_loss"])
    assert int(best.step) == record["step"]
    assert train.evaluate(best, apply, TEST, batch_size=16)["loss"] == pytest.approx(record["test_loss"], rel=1e-6)
    assert not np.allclose(best.eval_params["w"], best.params["w"])


@pytest.mark.slow
def test_a_changed_rate_beside_old_checkpoints_is_said(tmp_path, capsys):
    """A rate in the optimizer's program counts from there on. One in the state is that of the checkpoint."""
    fast, slow = optax.adam(0.1), optax.adam(0.01)
    for epochs in (1, 2):
        run(start_classifier(fast), epochs=epochs, checkpoint_dir=tmp_path / "a")
    assert not capsys.readouterr().err
    run(start_classifier(slow), epochs=3, checkpoint_dir=tmp_path / "a")
    assert "step_00000006: the optimizer has other numbers (learning rate, schedule, " in capsys.readouterr().err
    run(start_classifier(slow), epochs=4, checkpoint_dir=tmp_path / "a")
    assert not capsys.readouterr().err
    with pytest.raises(checkpoint.CheckpointError, match="saved with another optimizer"):
        run(start_classifier(optax.nadam(0.01)), epochs=5, checkpoint_dir=tmp_path / "a")

    in_state = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    run(start_classifier(in_state), epochs=1, checkpoint_dir=tmp_path / "b")
    state, _ = run(
        updaters.set_learning_rate(start_classifier(in_state), 0.25), epochs=2, checkpoint_dir=tmp_path / "b"
    )
    assert list(updaters.learning_rates(state).values()) == [0.5]
    said = capsys.readouterr().err
    assert "fit: the given state has the learning rate 0.25, but the run in" in said
    assert said.count("\n") == 1
    assert "keeps the rate of the checkpoint, 0.5. To change it, call updaters.set_learning_rate" in said
    schedule = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(1.0, 0.0, 20))
    for epochs in (1, 2):
        run(start_classifier(schedule), epochs=epochs, checkpoint_dir=tmp_path / "c")
    assert not capsys.readouterr().err


def test_the_learning_rate_in_the_record_of_a_run_that_is_over(tmp_path):
    """The record of an epoch that `max_steps` cut short is made again by the call that has nothing to do."""
    options = {"callbacks": train.LearningRate(0.5), "checkpoint_dir": tmp_path, "max_steps": 2}
    _, first = run(**options)
    _, again = run(**options)
    assert [r["learning_rate"] for r in first] == [r["learning_rate"] for r in again] == [0.5]


@pytest.mark.slow
def test_the_learning_rate_in_the_records():
    schedule = optax.linear_schedule(0.5, 0.1, 8)
    want = [float(schedule(2)), float(schedule(5))]  # of the last update of each epoch
    _, history = run(callbacks=train.LearningRate(schedule))
    assert [r["learning_rate"] for r in history] == want
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=schedule)
    _, history = run(start_classifier(injected), callbacks=train.LearningRate())
    assert [r["learning_rate"] for r in history] == pytest.approx(want)
    chain = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=0.25))
    state = updaters.set_learning_rate(start_classifier(chain), 0.125)
    _, history = run(state, callbacks=[train.LearningRate()])
    assert [r["learning_rate"] for r in history] == [0.125, 0.125]
    _, history = run(start_classifier(updaters.mxnet_sgd(0.75, rate_in_state=True)), callbacks=train.LearningRate())
    assert history[0]["learning_rate"] == 0.75
    _, history = run(callbacks=train.LearningRate(0.5))
    assert history[0]["learning_rate"] == 0.5
    with pytest.raises(ValueError, match=r"no learning rate; give the schedule, train.LearningRate\(schedule\), or"):
        run(callbacks=train.LearningRate())


def test_several_learning_rates_have_names():
    rate = optax.inject_hyperparams(optax.sgd)
    tx = optax.multi_transform({"head": rate(0.5), "body": rate(0.25)}, {"a": "head", "b": "body"})
    state = train.create_state(kv.from_params({"a": jnp.zeros(2), "b": jnp.zeros(2)}, optimizer=tx), 0)
    assert train.LearningRate().measure(state) == {"learning_rate_body": 0.25, "learning_rate_head": 0.5}


@pytest.mark.slow
def test_steps_that_are_skipped_use_no_rate():
    loss = train.classification_loss(apply)

    def sometimes(params, batch, rng):
        value, aux = loss(params, batch, rng)
        return jnp.where(jax.random.bernoulli(rng), value, jnp.nan), aux

    step = train.make_train_step(sometimes, nonfinite="skip")
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.5, 0.1, 8))
    state, history = run(start_classifier(injected), step=step, epochs=1)
    assert history[0]["skipped"] > 0
    schedule = train.LearningRate(optax.linear_schedule(0.5, 0.1, 8))
    assert schedule.measure(state) == pytest.approx(train.LearningRate().measure(state))


def test_the_learning_rate_in_the_bar(capsys, monkeypatch):
    monkeypatch.setattr("jaxpar.train._fit.progress.in_notebook", lambda: True)
    monkeypatch.setattr("jaxpar.train._fit.progress._MEASURE_EVERY", 0.0)
    monkeypatch.setattr("tqdm.auto.tqdm", functools.partial(tqdm.auto.tqdm, mininterval=0))
    run(progress=True, epochs=1, callbacks=train.LearningRate(0.5))
    out = capsys.readouterr().out
    assert "compiling…" in out
    assert "learning_rate=0.5" in out
