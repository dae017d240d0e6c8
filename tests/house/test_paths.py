"""Paths that a user gives: of this machine, absolute from the call on, and all by one function."""

import functools
import os
import pathlib
import sys
import types

import jax
import numpy as np
import pytest
from world import STEP, TEST, apply, crash_after, numbers, points, same, start_classifier

import jaxpar.__main__
from jaxpar import checkpoint, data, mxnet, train, viz
from jaxpar._core import files
from jaxpar.train._callbacks.history import History

TRAIN = points(48)  # three steps of 16


def fit(**options):
    state = start_classifier()
    try:
        return train.fit(state, STEP, TRAIN, **{"batch_size": 16, "epochs": 2, "progress": False, **options})
    except ValueError:
        assert not state.step.is_deleted()  # before any work
        raise


def dense(x):
    return x * 2


class Bucket:
    """A path object of a bucket, as of cloudpathlib: to ask for its local path downloads it."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text

    def __fspath__(self):
        raise AssertionError("it would download a file")


plot = lambda: viz.plot_network(dense, np.ones(2, np.float32))  # noqa: E731
HISTORY = History([{"epoch": 1, "step": 3, "loss": 1.0, "accuracy": 0.5}])
TAKERS = {
    "checkpoint_dir": lambda path: fit(checkpoint_dir=path),
    "certificate": lambda path: fit(certificate=path),
    "metrics_file": lambda path: fit(metrics_file=path),
    "profile": lambda path: fit(profile=path),
    "profile of steps": lambda path: fit(profile=(path, 0, 2)),
    "to_jsonl": train.to_jsonl,
    "to_tensorboard": train.to_tensorboard,
    "use_compilation_cache": train.use_compilation_cache,
    "save": lambda path: checkpoint.save(path, {"w": np.ones(2)}),
    "restore": lambda path: checkpoint.restore(path, {"w": np.ones(2)}),
    "latest": checkpoint.latest,
    "best": checkpoint.best,
    "Manager": checkpoint.Manager,
    "data_dir": lambda path: data.load("fashion_mnist", "train", data_dir=path),
    "plot_history": lambda path: train.plot_history(HISTORY, path),
    "plot_confusion_matrix": lambda path: train.plot_confusion_matrix(np.eye(2, dtype=int), path=path),
    "save of a plot": lambda path: plot().save(os.fspath(path) + "/net.dot"),
    "directory of a plot": lambda path: plot().save("net.dot", path),
    "render of a plot": lambda path: plot().render(outfile=os.fspath(path) + "/net.dot"),
    "profile of a step": lambda path: viz.trace_step(dense, np.ones(2), profile=path),
    "load_params": mxnet.load_params,
    "load_symbol": mxnet.load_symbol,
    "load_checkpoint": lambda path: mxnet.load_checkpoint(path, 1),
    "port": mxnet.port,
    "RecordFile": mxnet.RecordFile,
    "load_list": mxnet.load_list,
}
OTHER = {
    "s3://bucket/run": "on another system .s3.",
    "gs://bucket/run": "on another system .gs.",
    "hf://user/run": "on another system .hf.",
    "hdfs://node:9000/run": "on another system .hdfs.",
    "memory://run": "on another system .memory.",
    "dbfs:/run": "on another system .dbfs.",
    "simplecache::s3://bucket/run": "on another system .s3.",
    "file://machine/run": "names no file of this machine",
    "$HOME/run": r"does not replace \$HOME as a shell does; give os.path.expandvars",
    "runs/${JOB}/a": "does not replace",
    "~nobody-of-this-name/run": "there is no home directory ~nobody-of-this-name",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Those that take buckets too, see tests/checkpoint/test_cloud_paths.py.
OF_CHECKPOINTS = ("checkpoint_dir", "save", "restore", "latest", "best", "Manager")
BUCKETS = ("s3://bucket/run", "gs://bucket/run")


@pytest.mark.parametrize(
    ("taker", "path"),
    [(taker, path) for taker in TAKERS for path in OTHER if taker not in OF_CHECKPOINTS or path not in BUCKETS],
)
def test_what_is_no_path_of_this_machine_is_refused_by_all(folder, taker, path):
    cache = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)  # where there is one, use_compilation_cache looks at no path
    try:
        with pytest.raises(ValueError, match=OTHER[path]):
            TAKERS[taker](path)
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "make",
    [pathlib.Path, Bucket, lambda text: pytest.importorskip("etils.epath").Path(text)],
    ids=["Path", "cloud", "epath"],
)
@pytest.mark.parametrize("name", ["certificate", "to_tensorboard", "load_symbol", "load_params"])
def test_objects_of_paths_are_looked_at_too(folder, name, make):
    """pathlib makes s3:/bucket of s3://bucket."""
    with pytest.raises(ValueError, match=r"on another system .s3.*; give a folder of a disk or mount"):
        TAKERS[name](make("s3://bucket/run"))
    assert os.listdir(folder) == []


@pytest.mark.parametrize("words", ["--output-dir", "--metrics-file", "--data-dir", "--config"])
def test_options_of_the_command_line(folder, capsys, words):
    with pytest.raises(SystemExit) as ended:
        jaxpar.__main__.main(["train", f"{words}=s3://bucket/run"])
    assert ended.value.code == 2
    assert f"argument {words}: it is 's3://bucket/run', on another system (s3)" in capsys.readouterr().err
    assert os.listdir(folder) == []


def test_what_a_path_means(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    path = functools.partial(files.as_path, what="f: x")
    assert path("a") == path(pathlib.Path("a")) == path(b"a") == folder / "a"
    assert path("~/a") == path(pathlib.Path("~/a")) == folder / "home" / "a"
    assert path("./~a") == folder / "~a"
    assert path("file:///a%20b") == path("file://localhost/a b") == path("FILE:/a b") == pathlib.Path("/a b")
    for name in ("C:/a", "lr:0.1/a", "12:30:00", "cost$", "a$ b", "file:a", "a//b", "a/../b"):
        assert path(name) == folder / name, name
    with pytest.raises(ValueError, match="names no file of this machine"):
        path(pathlib.Path("file:///a"))  # which may have been file://a
    for wrong in ("", "a\0b"):
        with pytest.raises(ValueError, match="f: x must not be empty or have a NUL"):
            path(wrong)
    for wrong, said in ((3, "got 3"), (None, "a NoneType"), (types, "a module")):
        with pytest.raises(TypeError, match=f"f: x must be a path.*{said}"):
            path(wrong)


@pytest.mark.slow
def test_the_directory_may_change_while_a_run_is_under_way(folder):
    """As by %cd, a library of configurations, or a callback: all is written where the call said."""
    board = train.to_tensorboard("board")
    given = {
        **{"checkpoint_dir": "points", "certificate": "run.jsonl", "certificate_every": 2, "metrics_file": "m.jsonl"},
        **{"profile": ("trace", 2, 2), "on_step": board.on_step, "epochs": 3},
    }

    def go(state, record):
        away = folder / f"away{record['epoch']}"
        away.mkdir(exist_ok=True)
        os.chdir(away)

    lines = train.to_jsonl("l.jsonl")
    with pytest.raises(RuntimeError, match="crash"):
        fit(**given, callbacks=[go, lines, board, crash_after(2)])
    os.chdir(folder)
    state, history = fit(**{**given, "profile": None}, callbacks=[go, lines, board])
    os.chdir(folder)
    assert [record["epoch"] for record in history] == [1, 2, 3]
    whole, _ = fit(epochs=3)
    same(state, whole)
    assert not list(folder.glob("away*/*"))
    assert checkpoint.latest("points") == pathlib.Path("points/step_00000009")
    for name in ("m.jsonl", "l.jsonl"):
        assert len((folder / name).read_text().splitlines()) == 3, name
    assert len((folder / "run.jsonl").read_text().splitlines()) == 1 + 4
    assert list((folder / "board").iterdir())
    assert list((folder / "trace").rglob("*.xplane.pb"))


def test_a_manager_stays_where_it_was_made(folder):
    manager = checkpoint.Manager("points")
    (folder / "away").mkdir()
    os.chdir(folder / "away")
    manager.save({"w": np.ones(2)})
    manager.close()
    assert manager.restore_latest({"w": np.zeros(2)})[0]["w"].tolist() == [1, 1]
    assert os.listdir(folder / "away") == []


@pytest.mark.slow
def test_the_home_directory(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    _, history = fit(checkpoint_dir="~/run/points", metrics_file="~/run/m.jsonl", test_data=TEST, apply_fn=apply)
    assert os.listdir(folder) == ["home"]
    assert numbers(fit(checkpoint_dir=folder / "home/run/points", test_data=TEST, apply_fn=apply)[1]) == numbers(
        history
    )
    assert checkpoint.latest("~/run/points") == folder / "home/run/points/step_00000006"
    assert plot().save("~/net.dot") == str(folder / "home" / "net.dot")


def test_a_plot_of_the_command_line_is_written_where_it_was_asked_for(folder, monkeypatch, capsys):
    (folder / "away").mkdir()
    (folder / "moves.py").write_text("import os\nos.chdir('away')\ndef net(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "moves", raising=False)
    assert jaxpar.__main__.main(["plot", "moves:net", "--shape", "2", "-o", "net.dot"]) == 0, capsys.readouterr()
    assert (folder / "net.dot").exists()
