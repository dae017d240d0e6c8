"""Records in JSON lines, TensorBoard and pandas: each epoch once, after a crash too."""

import contextlib
import functools
import json
import math
import os
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from world import TEST, apply, crash_after, points, run_on

from jaxpar import data, train

TRAIN = points(50)  # three steps of 16
run = functools.partial(run_on, TRAIN, test_data=TEST, apply_fn=apply)


NAMES = {
    *("train/loss", "train/accuracy", "train/seconds", "train/images_per_second"),
    *("test/loss", "test/accuracy", "step/loss", "step/accuracy"),
}


def at(step):
    return types.SimpleNamespace(step=step)


def lines(path):
    """Strict JSON: what Python's own reader takes beside it is an error."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(text, parse_constant=refuse) for text in path.read_text().splitlines()]


def test_json_lines_are_strict(tmp_path):
    odd = {"loss": math.nan, "high": math.inf, "low": -math.inf, "accuracy": None, "deep": {"x": math.nan}}
    train.to_jsonl(tmp_path / "a")(at(3), {"epoch": 1, **odd})
    want = {"loss": "NaN", "high": "Infinity", "low": "-Infinity", "accuracy": None, "deep": {"x": "NaN"}}
    assert lines(tmp_path / "a") == [{"step": 3, "epoch": 1, **want}]
    assert math.isnan(float(lines(tmp_path / "a")[0]["loss"]))
    assert float(lines(tmp_path / "a")[0]["low"]) == -math.inf


def test_the_metrics_file_is_strict_too(tmp_path):
    step = train.make_train_step(lambda p, b, rng: (jnp.sum(p["w"]) * jnp.nan, {}))
    with pytest.warns(UserWarning, match="the loss of step 1 "):
        run(step=step, epochs=1, metrics_file=tmp_path / "m.jsonl")
    assert lines(tmp_path / "m.jsonl")[0]["loss"] == "NaN"


def test_a_run_that_goes_on_has_each_epoch_once(tmp_path):
    path = tmp_path / "metrics"

    def steps():
        return [r["step"] for r in lines(path)]

    # The crash comes before the second checkpoint, so that the second epoch is made and written twice.
    with pytest.raises(RuntimeError, match="crash"):
        run(epochs=3, callbacks=[train.to_jsonl(path), crash_after(2)])
    assert steps() == [3, 6]
    _, history = run(epochs=3, checkpoint_dir=tmp_path / "c", callbacks=train.to_jsonl(path))
    assert steps() == [3, 6, 9]
    with open(path, "a") as file:
        file.write("9, torn")  # the process was killed while it wrote
    _, history = run(epochs=5, checkpoint_dir=tmp_path / "c", callbacks=train.to_jsonl(path))
    assert steps() == [3, 6, 9, 12, 15]
    assert [float(r["loss"]) for r in lines(path)] == [r["loss"] for r in history]
    run(epochs=1, callbacks=train.to_jsonl(path))  # another run into the same file
    assert steps() == [3]
    state, _ = run(epochs=1)
    run(state, epochs=1, callbacks=train.to_jsonl(path))  # and one that goes on from a state
    assert steps() == [3, 6]


def test_the_same_object_after_a_crash_has_each_step_once(tmp_path):
    """As in a notebook, where the callback outlives the run that failed."""
    rows, board = train.to_jsonl(tmp_path / "new" / "m.jsonl"), train.to_tensorboard(tmp_path / "board")
    with pytest.raises(RuntimeError, match="crash"):
        run(callbacks=[rows, board, crash_after(2)])
    _, history = run(callbacks=[rows, board])
    assert lines(tmp_path / "new" / "m.jsonl") == history
    assert [record["step"] for record in history] == [3, 6]
    assert [step for step, _ in scalars(tmp_path / "board")["train/loss"]] == [3, 6]


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("all my work\nand more\n")
    with pytest.raises(ValueError, match=r"thesis.txt has lines that are not JSON records with a step"):
        train.to_jsonl(path)(at(3), {"loss": 1.0})
    assert path.read_text() == "all my work\nand more\n"


def test_metrics_of_steps(tmp_path):
    seen = []
    sink = train.to_jsonl(tmp_path / "steps.jsonl")

    def on_step(step, metrics):
        seen.append((step, metrics))
        sink.on_step(step, metrics)

    _, history = run(on_step=on_step)
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert {type(v) for _, metrics in seen for v in metrics.values()} == {float}
    assert np.mean([m["loss"] for _, m in seen[:3]]) == pytest.approx(history[0]["loss"], rel=1e-6)
    assert lines(tmp_path / "steps.jsonl") == [{"step": step, **metrics} for step, metrics in seen]


def test_a_loop_of_ones_own(tmp_path):
    with contextlib.closing(train.to_jsonl(tmp_path / "a.jsonl")) as board:
        for step in (1, 2, 3):
            board.log(step, {"lr": jnp.float32(0.5), "step_time": np.float64(2.0), "note": "x"})
        board.log(4, {})
    whole = [{"step": step, "lr": 0.5, "step_time": 2.0, "note": "x"} for step in (1, 2, 3)]
    assert lines(tmp_path / "a.jsonl") == whole
    board.log(3, {"lr": 0.25})  # it is opened again, and goes on from there
    assert lines(tmp_path / "a.jsonl") == [*whole[:2], {"step": 3, "lr": 0.25}]
    board = train.to_tensorboard(tmp_path / "b")
    board.log(7, {"own/lr": jnp.bfloat16(0.5)})
    board.close()
    assert scalars(tmp_path / "b") == {"own/lr": [(7, 0.5)]}


def scalars(directory):
    """What TensorBoard's own reader finds: {tag: [(step, value)]}"""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard(tmp_path):
    board = train.to_tensorboard(tmp_path / "run")
    run(callbacks=board, on_step=board.on_step, checkpoint_dir=tmp_path / "c")
    _, history = run(epochs=3, callbacks=train.to_tensorboard(tmp_path / "run"), checkpoint_dir=tmp_path / "c")
    found = scalars(tmp_path / "run")
    assert set(found) == NAMES
    assert [step for step, _ in found["step/loss"]] == [1, 2, 3, 4, 5, 6]
    for tag, name in (("train/loss", "loss"), ("test/accuracy", "test_accuracy")):
        assert found[tag] == [(r["step"], pytest.approx(r[name])) for r in history]
    # Epochs that are made again after a crash replace those there were.
    train.to_tensorboard(tmp_path / "run")(at(6), {"epoch": 2, "loss": 7.0})
    assert scalars(tmp_path / "run")["train/loss"] == [(3, pytest.approx(history[0]["loss"])), (6, 7.0)]


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("pandas", lambda: train.to_pandas([])),
        ("matplotlib.figure", lambda: train.plot_history([{"epoch": 1, "loss": 1.0}])),
        ("tensorboard.summary.writer.record_writer", lambda: train.to_tensorboard("runs")),
        ("wandb", train.to_wandb),
        ("mlflow", train.to_mlflow),
    ],
    ids=["pandas", "matplotlib", "tensorboard", "wandb", "mlflow"],
)
def test_what_is_not_installed(monkeypatch, tmp_path, module, call):
    monkeypatch.chdir(tmp_path)  # the checkout may have a folder runs, of make train
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install '?(jaxpar\[)?{module.split('.')[0]}"):
        call()
    assert not os.path.exists("runs")


@pytest.mark.parametrize("tracker", [train.to_wandb, train.to_mlflow])
def test_a_name_that_is_no_string(tracker):
    with pytest.raises(TypeError, match=rf"train.{tracker.__name__}: \w+ must be a string, got 3"):
        tracker(3)


@pytest.mark.slow
def test_the_command_line(tmp_path, monkeypatch, capsys):
    from jaxpar.__main__ import main

    images = np.random.default_rng(0).integers(0, 256, (128, 28, 28, 1), np.uint8)
    few = data.Dataset(images, images[:, 14, 14, 0] // 26)
    monkeypatch.setattr(data, "load", lambda *args, **options: few)
    monkeypatch.setattr("jaxpar._cli.train._devices", lambda *args: jax.devices()[:1])  # they are there already
    places = {name: tmp_path / name for name in ("tensorboard-dir", "profile-dir", "metrics-file")}
    options = ["--no-compilation-cache", *(f"--{name}={path}" for name, path in places.items())]
    assert main(["train", "--epochs=1", "--batch-size=64", "--no-progress", *options]) == 0, capsys.readouterr()
    (record,) = lines(places["metrics-file"])
    found = scalars(places["tensorboard-dir"])
    assert found["test/accuracy"] == [(2, pytest.approx(record["test_accuracy"]))]
    assert [step for step, _ in found["step/loss"]] == [1, 2]
    assert list(places["profile-dir"].rglob("*.xplane.pb"))


def test_pandas():
    pytest.importorskip("pandas")
    _, history = run()
    frame = train.to_pandas(history)
    assert list(frame.columns) == list(history[0])
    assert frame["test_accuracy"].tolist() == [r["test_accuracy"] for r in history]


def test_a_place_that_cannot_be_written_is_known_at_the_start(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    made = []
    options = {"on_step": lambda *a: made.append(a)}
    with pytest.raises(OSError, match=r"metrics cannot be written to .*file/m.jsonl \(.*\); choose another place"):
        run(metrics_file=file / "m.jsonl", **options)
    with pytest.raises(OSError, match=r"metrics cannot be written to .* \(Is a directory\)"):
        run(metrics_file=tmp_path, **options)
    with pytest.raises(OSError, match=r"nothing can be written to .*file/c .*; choose another directory"):
        run(checkpoint_dir=file / "c", **options)
    assert (made, file.read_text(), os.listdir(tmp_path)) == ([], "mine", ["file"])
    with pytest.raises(OSError, match=r"metrics cannot be written to .*file/tb"):
        train.to_tensorboard(file / "tb")(at(3), {"loss": 1.0})


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (train.to_jsonl, lambda file: [(r["step"], r["loss"]) for r in lines(file)]),
        (train.to_tensorboard, lambda file: scalars(file.parent)["train/loss"]),
    ],
    ids=["jsonl", "tensorboard"],
)
def test_a_disk_that_fills_up_keeps_what_is_there(tmp_path, full_disk, make, read):
    sink = make(tmp_path / "metrics")
    sink(at(3), {"epoch": 1, "loss": 1.0})
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = file.read_bytes()
    full_disk(len(before) + 3)
    with pytest.raises(OSError, match=r"metrics cannot be written to .*metrics.* \(File too large\)"):
        sink(at(6), {"epoch": 2, "loss": 0.5})
    assert file.read_bytes() == before  # no half of a record
    full_disk(10**6)
    sink(at(6), {"epoch": 2, "loss": 0.25})
    assert file.read_bytes().startswith(before)
    assert read(file) == [(3, 1.0), (6, 0.25)]


def test_a_full_disk_under_fit(tmp_path, full_disk):
    """The metrics have no room left after the first epoch: the state of the second is saved all the same."""

    sink = train.to_jsonl(tmp_path / "m")

    def metrics(state, record):
        if record["epoch"] == 2:
            while not (tmp_path / "c" / "step_00000003").exists():  # its writer has the same limit
                time.sleep(0.01)
            full_disk((tmp_path / "m").stat().st_size + 3)
        try:
            sink(state, record)
        finally:
            full_disk(10**9)  # the checkpoints are on another disk

    with pytest.raises(OSError, match="metrics cannot be written") as raised:
        run(epochs=3, checkpoint_dir=tmp_path / "c", callbacks=[metrics])
    assert int(raised.value.state.step) == 6
    assert [r["step"] for r in lines(tmp_path / "m")] == [3]
    state, history = run(epochs=3, checkpoint_dir=tmp_path / "c", metrics_file=tmp_path / "m")
    whole, want = run(epochs=3)
    np.testing.assert_array_equal(state.params["w"], whole.params["w"])
    assert [r["loss"] for r in lines(tmp_path / "m")] == [r["loss"] for r in want] == [r["loss"] for r in history]


def test_a_full_disk_under_the_checkpoints(tmp_path, monkeypatch):
    """Only that `fit` says it, keeps what there is and hands over the state; test_checkpoint.py has the rest."""
    from jaxpar.checkpoint import _files

    def full(path):
        saved.append(path)
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        flush(path)

    saved, flush = [], _files._flush_all
    monkeypatch.setattr(_files, "_flush_all", full)
    with pytest.raises(OSError, match=r"step_00000006 could not be written \(No space left on device\)") as raised:
        run(epochs=3, checkpoint_dir=tmp_path)
    assert int(raised.value.state.step) == 9
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_00000003"]
    monkeypatch.undo()
    state, _ = run(epochs=3, checkpoint_dir=tmp_path)
    np.testing.assert_array_equal(state.params["w"], raised.value.state.params["w"])


@pytest.mark.parametrize("others", [{"metrics_file": "m.jsonl"}, {"callbacks": "m.jsonl"}])
def test_two_do_not_write_one_file(tmp_path, monkeypatch, others):
    monkeypatch.chdir(tmp_path)
    others = {name: train.to_jsonl(path) if name == "callbacks" else path for name, path in others.items()}
    with pytest.raises(ValueError, match=r"m\.jsonl is given twice; give metrics_file=, certificate= and each"):
        run(certificate=tmp_path / "m.jsonl", **others)
    with pytest.raises(ValueError, match=r"m\.jsonl is given twice"):
        run(metrics_file="m.jsonl", callbacks=[train.to_jsonl("other.jsonl"), train.to_jsonl(tmp_path / "m.jsonl")])
    assert list(tmp_path.iterdir()) == []


# ---- Weights & Biases and MLflow, written offline by their own packages and read back


@pytest.mark.others
@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_mlflow(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # what mlflow-skinny has without a server
    uri = (tmp_path / "runs").as_uri()
    board = train.to_mlflow("numbers", tracking_uri=uri, run_name="first")
    _, history = run(callbacks=board, on_step=board.on_step, checkpoint_dir=tmp_path / "c")
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "numbers"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status, found.info.run_id) == ("first", "FINISHED", board.run_id)
    assert set(found.data.metrics) == NAMES
    assert [m.step for m in client.get_metric_history(board.run_id, "step/loss")] == [1, 2, 3, 4, 5, 6]

    def crash(step, metrics):
        again.on_step(step, metrics)
        if step == 8:
            raise RuntimeError("crashed")

    for on_step in (crash, None):  # steps after the checkpoint, which the crash costs, are in the run once
        again = train.to_mlflow("numbers", tracking_uri=uri, run_id=board.run_id)
        options = {"callbacks": again, "on_step": on_step or again.on_step, "checkpoint_dir": tmp_path / "c"}
        with contextlib.suppress(RuntimeError):
            _, history = run(epochs=3, **options)
    assert [m.step for m in client.get_metric_history(board.run_id, "step/loss")] == [*range(1, 10)]
    for name, own in (("train/loss", "loss"), ("test/accuracy", "test_accuracy")):
        values = [(m.step, m.value) for m in client.get_metric_history(board.run_id, name)]
        assert values == [(r["step"], r[own]) for r in history]
    assert client.get_run(board.run_id).info.status == "FINISHED"
    again(None, {"step": 15, "epoch": 5, "loss": float("nan"), "test_loss": None, "seconds": 1.0})
    again.on_end([])
    assert np.isnan(client.get_metric_history(board.run_id, "train/loss")[-1].value)


@pytest.mark.others
@pytest.mark.filterwarnings("ignore")  # of wandb's own
def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    board = train.to_wandb("numbers", mode="offline", dir=str(tmp_path), name="first")
    _, history = run(callbacks=board, on_step=board.on_step)
    assert board.run is None  # it has ended with fit
    (file,) = tmp_path.rglob("*.wandb")
    end = time.monotonic() + 30  # wandb's own process writes the file, on a busy machine after the end of the run
    while len(rows := history_of(file)) < 6 and time.monotonic() < end:
        time.sleep(0.1)
    assert set().union(*rows) >= NAMES
    assert [row["_step"] for row in rows if "step/loss" in row] == [1, 2, 3, 4, 5, 6]
    losses = [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(r["step"], r["loss"]) for r in history]
    assert [row["test/accuracy"] for row in rows if "test/accuracy" in row] == [r["test_accuracy"] for r in history]


def history_of(file):
    """The rows of an offline run. wandb brings its messages and no reader: they are in the frames of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    rows, content = [], b""
    for frame in frames(file.read_bytes()):
        content += frame[1]
        if frame[0] in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(content)
            items, content = record.history.item, b""
            if items:
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def frames(raw, block=32768):
    """(sort, content) of each frame after the header of the file."""
    at = 7
    while at < len(raw):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, sort = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        yield sort, raw[at + 7 : at + 7 + length]
        at += 7 + length


@pytest.mark.parametrize("before", [[], [1, 4]])
def test_mlflow_gets_what_its_run_does_not_have(monkeypatch, capsys, before):
    """Without the package: a run that is gone on with has some steps of one metric."""
    written = []

    class Client:
        def __init__(self, tracking_uri):
            self.asked = []

        def update_run(self, run_id, status):
            assert (run_id, status) == ("a", "RUNNING")

        def get_metric_history(self, run_id, name):
            assert name not in self.asked  # once a metric
            self.asked.append(name)
            return [types.SimpleNamespace(step=step) for step in before if name == "step/loss"]

        def log_batch(self, run_id, metrics):
            written.extend((name, step) for name, _, _, step in metrics)

    entities = types.SimpleNamespace(Metric=lambda *parts: parts)
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client, entities=entities))
    board = train.to_mlflow(run_id="a")
    for step in (3, 4, 5):
        board.on_step(step, {"loss": 1.0, "new": 2.0})
    first = [("step/loss", step) for step in (3, 4, 5) if not before or step > 4]
    assert [each for each in written if each[0] == "step/loss"] == first
    assert [each for each in written if each[0] == "step/new"] == [("step/new", step) for step in (3, 4, 5)]
    said = capsys.readouterr().out
    assert said.startswith("jaxpar: to_mlflow: run a already has step 3") if before else said == ""
    assert said.count("\n") <= 1


def test_a_tracker_writes_what_a_record_has(monkeypatch):
    """The names, without either package."""
    from jaxpar.train._callbacks.loggers import Logger

    class Kept(Logger):
        def __init__(self):
            self.rows = []

        def _write(self, step, row):
            self.rows.append((step, row))

    board = Kept()
    values = {"loss": 0.5, "accuracy": None, "eval_f1": 0.25, "seconds": 2.0}
    board(None, {"epoch": 1, "step": 3, "under_way": True, **values})
    board.on_step(4, {"loss": 0.75})
    assert board.rows == [(3, {"train/loss": 0.5, "eval/f1": 0.25, "train/seconds": 2.0}), (4, {"step/loss": 0.75})]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    board(None, {"step": 6, "loss": 0.5})
    board.on_step(7, {"loss": 0.5})
    assert len(board.rows) == 2
