"""The training loop: its record, its lines, the order of its batches, what it refuses."""

import dataclasses
import functools
import inspect
import json
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import compilations
from world import STEP, TX, apply, points, run_on, start_classifier

from jaxpar import data, kv, train
from jaxpar.train._callbacks.history import line
from jaxpar.train._fit.progress import Progress
from jaxpar.train._fit.run import FitOptions

TRAIN, TEST = points(50), points(21, 1)
FIELDS = {"epoch", "step", "loss", "accuracy", "test_loss", "test_accuracy", "seconds", "images_per_second"}
run = functools.partial(run_on, TRAIN)


def test_the_options_of_a_run_are_the_arguments_of_fit():
    parameters = inspect.signature(train.fit).parameters.values()
    arguments = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {field.name: field.default for field in dataclasses.fields(FitOptions)} == arguments


def test_the_history_and_the_metrics_file(tmp_path):
    seen = []

    def callback(state, record):
        seen.append((int(state.step), record["epoch"], record["test_accuracy"]))

    path = tmp_path / "new" / "metrics.jsonl"
    state, history = run(test_data=TEST, apply_fn=apply, metrics_file=path, callbacks=callback)
    assert int(state.step) == 6  # 50 examples make 3 whole batches of 16
    assert [set(record) for record in history] == [FIELDS] * 2
    assert [record["epoch"] for record in history] == [1, 2]
    assert [json.loads(text) for text in path.read_text().splitlines()] == history
    assert seen == [(3, 1, history[0]["test_accuracy"]), (6, 2, history[1]["test_accuracy"])]
    assert history[1]["loss"] < history[0]["loss"]
    scores = train.evaluate(state, apply, TEST, batch_size=7)
    np.testing.assert_allclose([history[1]["test_loss"], history[1]["test_accuracy"]], list(scores.values()), rtol=1e-5)
    assert all(record["images_per_second"] == pytest.approx(48 / record["seconds"]) for record in history)


def test_what_has_no_value_has_no_key():
    step = train.make_train_step(lambda p, b, rng: ((apply(p, b["image"]) ** 2).mean(), {"norm": jnp.ones(())}))
    _, history = run(step=step, epochs=1)
    assert list(history[0]) == ["epoch", "step", "loss", "norm", "seconds", "images_per_second"]
    assert history[0]["norm"] == 1.0
    _, history = run_on({"image": TRAIN.images, "label": TRAIN.labels}, step=step, epochs=1)
    assert list(history[0]) == ["epoch", "step", "loss", "norm", "seconds", "examples_per_second"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("count", "kind"), [(1, "device"), (4, "device"), (8, "sharded")])
def test_the_same_seed_is_the_same_run_on_any_devices(count, kind):
    want, want_history = run(start_classifier())
    state, history = run(start_classifier(count=count, kind=kind))
    np.testing.assert_allclose(state.params["w"], want.params["w"], atol=1e-6)
    np.testing.assert_allclose([r["loss"] for r in history], [r["loss"] for r in want_history], rtol=1e-5)
    other, _ = run(start_classifier(rng=4))
    assert not np.allclose(other.params["w"], want.params["w"], atol=1e-4)


def test_two_calls_go_on_where_one_would():
    whole, history = run(epochs=3)
    state, first = run(epochs=1)
    state, rest = run(state, epochs=2)
    assert [r["loss"] for r in first + rest] == [r["loss"] for r in history]
    np.testing.assert_array_equal(state.params["w"], whole.params["w"])


def test_the_loop_is_the_batches_and_the_steps():
    state = start_classifier()
    order = jax.random.fold_in(jax.random.key(3), 0x5FFE1E)
    for batch in data.batches(TRAIN, 16, rng=order, epochs=2, devices=jax.devices()[:2]):
        state, _ = STEP(state, batch)
    np.testing.assert_array_equal(state.params["w"], run()[0].params["w"])


def test_a_second_run_compiles_nothing():
    run(test_data=TEST, apply_fn=apply)
    state = start_classifier()
    with compilations() as count:
        run(state, test_data=TEST, apply_fn=apply)
    assert count() == 0


def test_plain_lines_where_there_is_no_terminal(capsys):
    _, history = run(progress=True, test_data=TEST, apply_fn=apply)
    out, err = capsys.readouterr()
    assert out.splitlines() == [line(record, 2) for record in history]
    assert out.startswith("epoch 1/2  loss 1.")
    assert "test accuracy" in out
    assert err == ""
    run(progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_bar_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("jaxpar.train._fit.progress.in_notebook", lambda: True)
    run(progress=True, epochs=1)
    out = capsys.readouterr().out
    assert "epoch 1/1" in out
    assert "images/s" in out
    bar = Progress(True)
    bar.start(4, "epoch 1", 2)  # an epoch that is resumed
    bar.step({"loss": 1.0}, 10.0)
    bar.close()
    assert "2/4" in capsys.readouterr().out

    # While XLA compiles, a thread draws the bar, so that its clock runs.
    drawn = threading.Event()
    monkeypatch.setattr("jaxpar.train._fit.progress._TICK", 0.01)
    bar.start(4, "epoch 1", 0, compiles=True)
    bar.bar.refresh = drawn.set
    assert drawn.wait(60)
    bar.close()


def test_thousands_of_epochs_are_a_line_for_some_of_them_or_one_bar(capsys, monkeypatch):
    run(progress=2, epochs=5)
    assert [text.partition("  ")[0] for text in capsys.readouterr().out.splitlines()] == [
        "epoch 2/5",
        "epoch 4/5",
        "epoch 5/5",
    ]
    monkeypatch.setattr("jaxpar.train._fit.progress.in_notebook", lambda: True)
    bar = Progress(True)
    bar.start(4, "epoch 1/3", 0)
    for to_come in (11, 10):
        bar.step({"loss": 1.0}, 0.0, to_come)
    assert "run left=00:0" in bar.bar.postfix  # beside what is left of the epoch
    bar.close()
    capsys.readouterr()
    run(progress="bar", epochs=5)
    out = capsys.readouterr().out
    assert "/15 [" in out  # of three steps in each of five epochs
    assert "loss 1." not in out  # no line of an epoch


def test_the_picture_of_a_history(tmp_path):
    _, history = run()
    figure = train.plot_history(history, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert [len(axes.get_lines()) for axes in figure.axes] == [1, 1]
    assert not train.plot_history([]).axes


@pytest.mark.parametrize("true", [True, np.True_, jnp.array(True)], ids=["python", "numpy", "jax"])
def test_a_callback_that_returns_true_ends_the_training(true, tmp_path):
    called = []

    def both(state, record):
        called.append(record["epoch"])
        return true if record["epoch"] == 2 else None

    state, history = run(epochs=5, callbacks=[both, lambda state, record: called.append("last")])
    assert int(state.step) == 6
    assert [r["epoch"] for r in history] == [1, 2]
    assert called == [1, "last", 2, "last"]
    run(epochs=5, callbacks=both, checkpoint_dir=tmp_path)
    again, same = run(epochs=5, callbacks=both, checkpoint_dir=tmp_path)  # in a new process: it is over
    assert [r["loss"] for r in same] == [r["loss"] for r in history]
    np.testing.assert_array_equal(again.params["w"], state.params["w"])
    assert called[4:] == [1, 2]


def test_a_callback_that_returns_something_else_does_not():
    state, _ = run(epochs=3, callbacks=lambda state, record: [1, "yes", np.ones(2)][record["epoch"] - 1])
    assert int(state.step) == 9


def test_the_metrics_of_steps_come_in_order_and_make_nothing_wait():
    behind, at = [], []

    def step(state, batch):
        state, metrics = STEP(state, batch)
        at.append(int(metrics["loss"] > 0))
        return state, metrics

    def on_step(number, metrics):
        assert metrics["loss"] > 0
        behind.append((number, len(at)))

    run_on(points(20 * 16), step=step, epochs=1, on_step=on_step)
    assert behind[:12] == [(i, i + 8) for i in range(1, 13)]
    assert [number for number, _ in behind] == list(range(1, 21))


def test_a_history_is_a_list_that_a_notebook_shows_as_a_table():
    _, history = run(test_data=TEST, apply_fn=apply)
    assert isinstance(history, list)
    html = history._repr_html_()
    assert html.startswith("<div><p>2 epochs</p><table>")
    assert html.count("<th") - html.count("<thead") == 8
    assert f">{history[0]['loss']:.4f}</td>" in html
    assert "test accuracy</th>" in html
    _, history = run(epochs=1)
    assert "test" not in history._repr_html_()  # what was not measured has no column
    many = train.History({"epoch": i, "<b>": 1e-7, "loss": float("nan")} for i in range(1, 101))
    html = many._repr_html_()
    assert html.count("<tr>") == 42
    assert "&lt;b&gt;" in html
    assert ">1.000e-07</td>" in html
    assert ">nan</td>" in html
    assert [f">{epoch}</td>" in html for epoch in (10, 11, 71, 100)] == [True, False, True, True]
    assert train.History()._repr_html_().startswith("<div><p>0 epochs</p>")


def trace_steps(directory):
    """The numbers of the steps that a trace names."""
    (file,) = directory.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax's reader aborts the process where a warning of its own is an error
        events = [e for plane in profile.planes for line in plane.lines for e in line.events if e.name == "train"]
        return sorted({dict(e.stats)["step_num"] for e in events})


@pytest.mark.slow  # three traces are read
def test_a_trace_of_some_steps(tmp_path):
    state, _ = run_on(points(18 * 16), epochs=1, profile=tmp_path / "a")
    assert trace_steps(tmp_path / "a") == [10, 11, 12, 13, 14]
    run(state, profile=(tmp_path / "b", 1, 2))
    assert trace_steps(tmp_path / "b") == [19, 20]
    run(epochs=1, profile=tmp_path / "c")  # a run that is shorter than that
    assert trace_steps(tmp_path / "c") == [0, 1, 2]
    with pytest.raises(ValueError, match="profile asks for 2 steps from step 5 on, but this call has 6 steps"):
        run(profile=(tmp_path / "d", 5, 2))


def test_a_failing_step_ends_the_trace_and_the_bar(tmp_path):
    def step(state, batch):
        if int(state.step) == 1:
            raise RuntimeError("mine")
        return STEP(state, batch)

    with pytest.raises(RuntimeError, match="mine"):
        run(step=step, profile=(tmp_path, 0, 3), progress=True)
    run(profile=(tmp_path / "again", 0, 1))  # there is none under way
    assert trace_steps(tmp_path / "again") == [0]


def test_a_source_of_ones_own_must_not_end_before_the_run():
    class Ends:
        def examples(self, batch_size):
            return 3 * batch_size

        def batches(self, batch_size, *, rng=None, epochs=1, start=0, devices=None):
            return iter([{"image": TRAIN.images[:16], "label": TRAIN.labels[:16]}] * 4)

    with pytest.raises(RuntimeError, match=r"Ends.batches ended after step 4, but the run goes on to step 6") as raised:
        run_on(Ends())
    assert int(raised.value.state.step) == 4


def with_norm(params, batch, rng):
    return ((apply(params, batch["image"]) - 1) ** 2).mean(), {"norm": (params["w"] ** 2).sum()}


@pytest.mark.slow
def test_a_live_plot_in_a_notebook(monkeypatch, capsys):
    shown = []  # the pictures in one place of the notebook

    def display(content, raw, display_id):
        assert raw
        assert display_id
        shown.append(content)
        return types.SimpleNamespace(update=lambda content, raw: shown.append(content))

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr("jaxpar.train._callbacks.figures.in_notebook", lambda: True)
    monkeypatch.setattr("jaxpar.train._callbacks.figures._EVERY", 0.0)
    monkeypatch.setattr("jaxpar.train._callbacks.figures._SHARE", 1e9)
    figures, plot_now = [], train.LivePlot._plot
    monkeypatch.setattr(train.LivePlot, "_plot", lambda plot: figures.append(plot_now(plot)) or figures[-1])
    plot = train.LivePlot()
    step = train.make_train_step(with_norm)
    _, history = run(step=step, callbacks=plot, epochs=1, test_data=TEST, apply_fn=apply)
    assert len(shown) == 5  # at the start, three steps and the epoch
    assert all(content["image/png"][:4] == b"\x89PNG" for content in shown)
    assert shown[0]["text/plain"] == "compiling…"
    assert shown[1]["text/plain"].startswith("step 1  loss 1.")
    assert shown[-1]["text/plain"] == line(history[-1])
    assert {a.get_ylabel(): [row.get_label() for row in a.get_lines()] for a in figures[-1].axes} == {
        "loss": ["train", "test", "step"],
        "accuracy": ["test"],
        "norm": ["train"],  # of one's own
    }
    assert len(figures[-1].axes[0].get_lines()[-1].get_xdata()) == 3
    assert capsys.readouterr().out == ""
    shown.clear()
    monkeypatch.setattr("jaxpar.train._callbacks.figures._EVERY", 1000.0)
    seen = []
    run(callbacks=plot, on_step=plot.on_step)  # as it had to be given before
    run(callbacks=[plot], on_step=lambda step, metrics: seen.append(step) or plot.on_step(step, metrics))
    assert seen == [1, 2, 3, 4, 5, 6]
    assert len(figures[-1].axes[0].get_lines()[-1].get_xdata()) == 6  # each step once
    assert len(shown) == 4  # at the start and at the end
    assert shown[-1]["text/plain"].startswith("epoch 2  loss")


def test_a_live_plot_elsewhere_draws_nothing(capsys, monkeypatch):
    monkeypatch.setattr("jaxpar.train._callbacks.figures.LivePlot._plot", lambda self: pytest.fail("it draws"))
    _, history = run(callbacks=train.LivePlot(), progress=True)
    assert capsys.readouterr().out.splitlines() == [line(record, 2) for record in history]


def test_callbacks_end_with_the_run():
    class Last:
        def __call__(self, state, record):
            if record["epoch"] == 2:
                raise RuntimeError("mine")

        def on_end(self, history):
            self.history = list(history)

    last = Last()
    _, history = run(epochs=1, callbacks=[last])
    assert last.history == history
    with pytest.raises(RuntimeError, match="mine") as raised:
        run(epochs=3, callbacks=[last])
    assert last.history == raised.value.history
    assert len(last.history) == 2


def test_a_state_shows_what_it_carries():
    state = start_classifier()
    assert repr(state).splitlines()[0].startswith("TrainState(step=0, rng=key<")
    assert "  0  w  float32[4,3]" in repr(state)
    assert "TrainState(step=0" in state._repr_html_()
    assert "<table>" in state._repr_html_()
    tx = optax.trace(0.9)
    store = kv.from_params({"w": jnp.zeros((4, 3))}, optimizer=TX)
    assert repr(train.create_state(store, 3, grad_transform=tx)).endswith("\ntransform: 1 array, 48 bytes")
    seen = []
    jax.jit(lambda s: seen.append(repr(s)))(state)
    assert seen[0].startswith("TrainState(step=traced")
    run(state, epochs=1)
    assert repr(state).startswith("TrainState(donated to a later step; use the state that it returned)")


def test_values_that_are_no_numbers_are_named():
    def loss(params, batch, rng):
        error = (batch["image"] @ params["w"] - batch["label"]) ** 2
        return error.mean(), {"each": error, "half": error.mean() / 2}

    examples = data.Dataset(np.ones((8, 2), np.float32), np.ones(8, np.float32))
    state, step = train.start({"w": jnp.zeros(2)}, optax.sgd(0.1), loss, devices=jax.devices()[:2])
    with pytest.warns(UserWarning, match=r"aux of loss_fn has 'each' of shape \(2,\)"):
        _, history = run_on(examples, state, step=step, epochs=1, batch_size=4)
    assert "half" in history[0]
    assert "each" not in history[0]


def test_a_resumed_run_says_that_the_data_are_others(tmp_path, capsys):
    train_data, other = points(64), points(64)
    other.labels[5] = (other.labels[5] + 1) % 3  # one label was mended
    run_on(train_data, epochs=1, checkpoint_dir=tmp_path)
    run_on(train_data, epochs=2, checkpoint_dir=tmp_path)
    assert "train_data" not in capsys.readouterr().err
    state, _ = run_on(other, epochs=3, checkpoint_dir=tmp_path)
    assert int(state.step) == 12
    assert f"train_data has other values than the run in {tmp_path} had until step 8" in capsys.readouterr().err
    run_on(other, epochs=4, checkpoint_dir=tmp_path)  # said once
    assert "train_data" not in capsys.readouterr().err
