"""Weights & Biases and MLflow, written offline by their own packages and read back."""

import contextlib
import functools
import sys
import time
import types

import jax
import numpy as np
import pytest
from fit_model import apply, points, run_on

from jaxpar import train

TRAIN = points(48)  # three steps of 16
run = functools.partial(run_on, TRAIN, test_data=TRAIN, apply_fn=apply)


NAMES = {
    *("train/loss", "train/accuracy", "train/seconds", "train/images_per_second"),
    *("test/loss", "test/accuracy", "step/loss", "step/accuracy"),
}


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
    again = train.to_mlflow("numbers", tracking_uri=uri, run_id=board.run_id)
    _, history = run(epochs=3, callbacks=again, checkpoint_dir=tmp_path / "c")
    for name, own in (("train/loss", "loss"), ("test/accuracy", "test_accuracy")):
        values = [(m.step, m.value) for m in client.get_metric_history(board.run_id, name)]
        assert values == [(r["step"], r[own]) for r in history]
    assert client.get_run(board.run_id).info.status == "FINISHED"
    check_made_again(tmp_path, uri, again.run_id, client)
    again(None, {"step": 15, "epoch": 5, "loss": float("nan"), "test_loss": None, "seconds": 1.0})
    again.on_end([])
    assert np.isnan(client.get_metric_history(board.run_id, "train/loss")[-1].value)


def check_made_again(tmp_path, uri, run_id, client):
    """Steps after the checkpoint, which a crash costs, are in the run once. The run of `test_mlflow` has 9 steps."""

    def crash(step, metrics):
        board.on_step(step, metrics)
        if step == 11:
            raise RuntimeError("crashed")

    for on_step in (crash, None):
        board = train.to_mlflow("numbers", tracking_uri=uri, run_id=run_id)
        with contextlib.suppress(RuntimeError):
            run(epochs=4, callbacks=board, on_step=on_step or board.on_step, checkpoint_dir=tmp_path / "c")
    assert [m.step for m in client.get_metric_history(run_id, "step/loss")] == [*range(1, 7), 10, 11, 12]
    assert [m.step for m in client.get_metric_history(run_id, "train/loss")] == [3, 6, 9, 12]


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
    assert [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (r["step"], r["loss"]) for r in history
    ]
    assert [row["test/accuracy"] for row in rows if "test/accuracy" in row] == [r["test_accuracy"] for r in history]


def history_of(file):
    """The rows of an offline run. wandb brings its messages and no reader: they are in the frames of LevelDB's log."""
    import json

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


@pytest.mark.parametrize(("module", "call"), [("wandb", train.to_wandb), ("mlflow", train.to_mlflow)])
def test_a_tracker_that_is_not_installed(monkeypatch, module, call):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'jaxpar\[{module}\]'"):
        call()
    with pytest.raises(TypeError, match="must be a string, got 3"):
        call(3)


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
    board(
        None, {"epoch": 1, "step": 3, "loss": 0.5, "accuracy": None, "eval_f1": 0.25, "under_way": True, "seconds": 2.0}
    )
    board.on_step(4, {"loss": 0.75})
    assert board.rows == [(3, {"train/loss": 0.5, "eval/f1": 0.25, "train/seconds": 2.0}), (4, {"step/loss": 0.75})]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    board(None, {"step": 6, "loss": 0.5})
    board.on_step(7, {"loss": 0.5})
    assert len(board.rows) == 2
