"""Under Ray Train: which worker this is, joining the others, and what is reported. Most of it without Ray."""

import contextlib
import json
import os
import re
import shutil
import sys
import types
from pathlib import Path

import jax
import jax.experimental.multihost_utils
import jax.numpy as jnp
import optax
import pytest
import world
from launched import launch, python
from test_distributed_start import BY_HAND, SLURM
from world import points, run_on

from jaxpar import checkpoint, distributed, kv, train
from jaxpar.distributed import _environment, _initialize

TX = optax.adam(0.05)


class FakeRay(types.ModuleType):
    """What a worker sees of `ray.train`, with a storage that outlives it."""

    def __init__(self, storage, size=1, rank=0):
        super().__init__("ray.train")
        self.storage, self.size, self.rank, self.reports = storage, size, rank, []
        self.collective = types.ModuleType("ray.train.collective")
        self.collective.broadcast_from_rank_zero = self.broadcast
        self.Checkpoint = types.SimpleNamespace(from_directory=Path)

    def get_context(self):
        if self.size is None:
            raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")
        return types.SimpleNamespace(get_world_size=lambda: self.size, get_world_rank=lambda: self.rank)

    def broadcast(self, given):
        assert (given is None) == (self.rank > 0)
        return given or "10.0.0.1:4000"

    def report(self, metrics, checkpoint=None):
        json.dumps(metrics)
        kept = None
        if checkpoint is not None:
            kept = self.storage / f"checkpoint_{len(os.listdir(self.storage))}"
            shutil.copytree(checkpoint, kept)
        self.reports.append((metrics, kept))

    def get_all_reported_checkpoints(self):
        def reported(metrics, kept):
            whole = types.SimpleNamespace(as_directory=lambda: contextlib.nullcontext(str(kept)))
            return types.SimpleNamespace(metrics=metrics, checkpoint=whole)

        return [reported(*each) for each in self.reports if each[1] is not None]


@pytest.fixture
def ray(tmp_path, monkeypatch):
    (tmp_path / "storage").mkdir()
    fake = FakeRay(tmp_path / "storage")
    monkeypatch.setitem(sys.modules, "ray.train", fake)
    monkeypatch.setitem(sys.modules, "ray.train.collective", fake.collective)
    return fake


def find(env, *given):
    return _environment.find(*(given or (None, None, None)), env)


# Which worker this is


def test_workers_are_found(ray):
    ray.size, ray.rank = 2, 1
    assert find({}) == find(SLURM) == "Ray Train"  # Ray itself was started by srun
    assert find(BY_HAND).source == "JAXPAR_*"
    assert find({}, "b:2", 3, 0).num_processes == 3
    ray.size = 1
    assert find({}) is find(SLURM) is None
    ray.size = None  # the driver
    assert find({}) is None
    assert find(SLURM).source == "SLURM"


def test_training_apart_is_refused(ray):
    """Each worker would train a model of its own, and report it."""
    ray.size = 2
    store = kv.from_params({"w": jnp.zeros(4)}, optimizer=TX)
    for function in (kv.rank, lambda: kv.create("dist_sync"), lambda: train.create_state(store, 0)):
        with pytest.raises(RuntimeError, match=r"one of several \(Ray Train\) and has not joined the others"):
            function()


def test_workers_meet_by_ray(ray, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(_initialize, "this", _initialize.Process())
    monkeypatch.setattr(_initialize, "is_jax_used", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: started.append((given, options)))
    monkeypatch.setattr(jax.experimental.multihost_utils.distributed.global_state, "num_processes", 2)
    monkeypatch.setattr(_environment, "_free_address_of_ray", lambda: "10.0.0.1:4000")
    for ray.rank in (0, 1):
        ray.size, _initialize.this.is_joined = 2, False
        distributed.initialize()
        assert (distributed.known_processes(), _initialize.this.client) == (2, None)  # no heartbeats
    assert [given for given, _ in started] == [("10.0.0.1:4000", 2, 0), ("10.0.0.1:4000", 2, 1)]
    assert {options["heartbeat_timeout_seconds"] for _, options in started} == {100}  # of jax, its default
    said = "jaxpar: jax runs in 2 processes; Ray watches them and starts them again, so jaxpar sends no heartbeats\n"
    assert capsys.readouterr().out == said
    monkeypatch.setitem(sys.modules, "ray.train.collective", None)  # an older one
    with pytest.raises(ModuleNotFoundError, match=r"ray.train.collective"):
        _environment.meet_by_ray(ray)


@pytest.mark.parametrize("in_ray", [True, False])
def test_other_code_has_started_jax(in_ray, ray, monkeypatch, capsys):
    monkeypatch.setattr(_initialize, "this", _initialize.Process())
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax.experimental.multihost_utils.distributed.global_state, "num_processes", 2)
    for name in "process_count", "process_index":  # they start devices, which may come too early
        monkeypatch.setattr(jax, name, None)
    ray.size = 2 if in_ray else None
    for _ in range(2):
        distributed.initialize()
        assert distributed.known_processes() == 2
    assert _initialize.this.client is None
    said = "jaxpar: Ray Train has started jax in 2 processes; Ray watches them and starts them again"
    assert capsys.readouterr().out.split(", so")[0].strip() == (said if in_ray else "")
    _initialize._attach(2, 0)
    with pytest.raises(RuntimeError, match=r"num_processes=3, but jax.distributed was initialised .* it is 2"):
        distributed.initialize("a:1", 3, 0)
    with pytest.raises(RuntimeError, match=r"process_id=1, but jax.distributed was initialised .* it is 0"):
        distributed.initialize("a:1", 2, 1)


# What is reported


def run(directory, epochs=3, **options):
    options = {"epochs": epochs, "callbacks": train.to_ray(), "checkpoint_dir": directory, **options}
    return run_on(points(32), world.start_classifier(TX), **options)  # two steps of 16


def same(state, path, like):
    world.same(checkpoint.restore(path, like), state)


@pytest.mark.slow
def test_each_record_and_its_checkpoint(ray, tmp_path):
    state, history = run(tmp_path / "run", keep=1)
    assert [(m["epoch"], m["step"], m["loss"]) for m, _ in ray.reports] == [
        (r["epoch"], r["step"], r["loss"]) for r in history
    ]
    assert all("test_loss" not in metrics for metrics, _ in ray.reports)  # nothing was measured
    same(state, ray.reports[-1][1], state)
    assert not list((tmp_path / "run").glob(".unfinished*"))
    run(tmp_path / "run", epochs=3)
    assert len(ray.reports) == 3  # nothing new, and nothing twice


def test_without_checkpoints_and_outside(ray, tmp_path):
    run(None, epochs=1)
    assert [(m["epoch"], kept) for m, kept in ray.reports] == [(1, None)]
    ray.size = None
    run(tmp_path / "outside", epochs=1)
    assert len(ray.reports) == 1


def test_other_workers_report_without_a_checkpoint(ray, tmp_path):
    ray.size, ray.rank = 1, 1
    run(tmp_path / "run", epochs=1)
    assert [kept for _, kept in ray.reports] == [None]


def test_started_again_on_a_new_host(ray, tmp_path):
    """Ray's copy goes back where it is missing, and the run goes on with the same bits and the same history."""
    state, history = run(tmp_path / "whole", epochs=4)
    ray.reports.clear()
    run(tmp_path / "run", epochs=2)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    again, records = run(tmp_path / "run", epochs=4)
    assert [r["loss"] for r in records] == [r["loss"] for r in history]
    assert [m["epoch"] for m, _ in ray.reports] == [1, 2, 3, 4]
    same(state, ray.reports[-1][1], again)
    run(tmp_path / "another", epochs=1)  # a second fit in the same worker takes nothing of the first
    assert ray.reports[-1][0]["epoch"] == 1


def test_a_relative_directory_in_another_session(ray, tmp_path, monkeypatch):
    """Ray starts a worker in a directory of the session, so the same words name another directory then."""
    for session, epochs in (("first", 2), ("second", 3)):
        (tmp_path / session).mkdir()
        monkeypatch.chdir(tmp_path / session)
        run("run", epochs=epochs)
    assert [m["epoch"] for m, _ in ray.reports] == [1, 2, 3]
    ray.reports[-1][0]["checkpoint_dir"] = str(tmp_path / "second" / "run")  # of an earlier jaxpar
    shutil.rmtree("run")
    run("run", epochs=4)
    assert [m["epoch"] for m, _ in ray.reports] == [1, 2, 3, 4]


def test_saved_and_not_reported(ray, tmp_path):
    """A worker is killed between the two. The next one reports the epoch, also where it has no step to make."""
    run(tmp_path / "run", epochs=3)
    for left, epochs in ((1, 4), (2, 3)):
        del ray.reports[left:]
        run(tmp_path / "run", epochs=epochs)
        assert [m["epoch"] for m, _ in ray.reports] == [*range(1, len(ray.reports) + 1)]
        assert len(ray.reports) >= 3
        assert all(kept for _, kept in ray.reports[-2:])


def test_a_damaged_checkpoint_gives_way_to_the_copy(ray, tmp_path, capsys):
    state, _ = run(tmp_path / "run", epochs=2)
    newest = max((tmp_path / "run").glob("step_*"))
    (newest / "jaxpar.json").write_text("{}")
    again, records = run(tmp_path / "run", epochs=2)
    assert (int(again.step), len(records)) == (4, 2)
    same(state, newest.with_name(newest.name + ".2"), again)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint._adopt(newest, tmp_path / "run")


# With Ray itself

TRAIN = """
import json, os, pathlib, signal, sys
import jax, numpy as np, optax
import jaxpar as jp

jp.distributed.initialize()
assert (jp.distributed.known_processes(), jp.kv.num_workers(), jax.device_count()) == (2, 2, 4)
folder = pathlib.Path(os.environ["FOLDER"])
images = np.random.default_rng(0).random((64, 8), np.float32)
lines = jp.data.Dataset(images, images[:, 0])
params = {"w": np.zeros(8, np.float32), "b": np.zeros((), np.float32)}
store = jp.kv.from_params(params, kind="dist_sync", optimizer=optax.adam(0.05))

def loss_fn(params, batch, rng):
    return ((batch["image"] @ params["w"] + params["b"] - batch["label"]) ** 2).mean(), {}

def on_step(step, metrics):
    # Worker 1 first, and process 0, which writes and reports, after the start that follows.
    for rank, at in ((1, 10), (0, 14)):
        kill = folder / f"kill {rank}"
        if kill.exists() and step == at and jp.kv.rank() == rank:
            kill.rename(folder / f"killed {rank}")
            os.kill(os.getpid(), signal.SIGKILL)

state, history = jp.train.fit(
    jp.train.create_state(store, 0), jp.train.make_train_step(loss_fn), lines, epochs=5, batch_size=16,
    checkpoint_dir=folder / "run", callbacks=jp.train.to_ray(), on_step=on_step, progress=False)
if jp.kv.rank() == 0:
    bits = np.concatenate([np.ravel(x) for x in jax.tree.leaves(jp.kv.to_params(state.store))]).tobytes().hex()
    (folder / "answer.json").write_text(json.dumps({"bits": bits, "loss": [r["loss"] for r in history]}))
"""
BEFORE = """
import ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
"""
AFTER = """
import json, pathlib
from ray.train.v2.jax.config import JaxConfig

reported = {"epochs": [metrics["epoch"] for _, metrics in result.best_checkpoints]}
reported["checkpoint"] = result.checkpoint.path
pathlib.Path("/shared/own/reported.json").write_text(json.dumps(reported))
cpus["FOLDER"] = "/shared/attached"
trainer = JaxTrainer(
    train, jax_config=JaxConfig(use_gpu=True), scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="attached", storage_path="/shared/ray", worker_runtime_env={"env_vars": cpus}))
trainer.fit()
ray.shutdown()
"""


def program_of_the_page(folder):
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text().partition("## Ray Train")[2]
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    block = block.replace("cpus = {", f'cpus = {{"FOLDER": "/shared/own", "PYTHONPATH": {os.environ["PYTHONPATH"]!r}, ')
    return (BEFORE + block + AFTER).replace("/shared", str(folder))


@pytest.mark.slow  # Ray takes seven seconds to start, and ten for each group of workers
def test_killed_workers_are_started_again_and_end_with_the_same_bits(tmp_path, monkeypatch):
    """One script: under the launcher, in Ray where jaxpar starts jax and each is killed, and where Ray does."""
    pytest.importorskip("ray.train", reason="the extra ray is not installed")
    pytest.importorskip("ray.train.v2.jax", reason="this Ray has no JaxTrainer")
    monkeypatch.setenv("PYTHONPATH", str(Path(train.__file__).parents[2]))
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # Ray's workers have none
    ray = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    for name in ("whole", "own", "attached"):
        (tmp_path / name).mkdir()
    words = ["-n", "2", "--devices", "2", "--", "python", str(script)]
    launch(*words, timeout=900, FOLDER=str(tmp_path / "whole"))
    for rank in (0, 1):
        (tmp_path / "own" / f"kill {rank}").touch()
    (tmp_path / "in_ray.py").write_text(program_of_the_page(tmp_path))
    done = python(str(tmp_path / "in_ray.py"), timeout=900, **ray)
    said = done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "own").glob("kill*")} == {"killed 0", "killed 1"}
    whole, own, attached = (
        json.loads((tmp_path / name / "answer.json").read_text()) for name in ("whole", "own", "attached")
    )
    assert own == attached == whole
    reported = json.loads((tmp_path / "own" / "reported.json").read_text())
    assert reported["epochs"] == [1, 2, 3, 4, 5]
    assert checkpoint.latest(Path(reported["checkpoint"]).parent).name == Path(reported["checkpoint"]).name
    assert "resumed from step 8 in" in said
    assert "resumed from step 12 in" in said
    assert said.count("jaxpar: jax runs in 2 processes; Ray watches them") >= 3  # at the start, and after each loss
    assert "jaxpar: Ray Train has started jax in 2 processes" in said
