"""Logs and certificates of several runs: none is cut by another, and one that goes on has its own once."""

import functools
import json
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from world import STEP, TX, apply, crash_after, points, run_on, same, start_classifier

from jaxpar import data, kv, train

TRAIN = points(48)  # three steps of 16
OTHER = points(48, seed=1)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(e.step, e.value) for e in EventAccumulator(str(directory)).Reload().Scalars("train/loss")]


def rated(rate):
    return start_classifier(optax.sgd(rate))


SWEEPS = {  # in what two runs of a sweep, or two folds, differ
    "data": [functools.partial(run_on, TRAIN), functools.partial(run_on, OTHER)],
    "seed": [lambda seed=seed, **given: run_on(TRAIN, start_classifier(rng=seed), **given) for seed in (1, 2)],
    "rate": [lambda **given: run_on(TRAIN, rated(0.5), **given), lambda **given: run_on(TRAIN, rated(0.25), **given)],
    "loss": [
        lambda smooth=smooth, **given: run_on(
            TRAIN, step=train.make_train_step(train.classification_loss(apply, smooth)), **given
        )
        for smooth in (0.0, 0.1)
    ],
    "step": [
        lambda count=count, **given: run_on(TRAIN, step=train.make_train_step(STEP.loss_fn, accumulate=count), **given)
        for count in (1, 2)
    ],
    "an iterable": [lambda **given: run_on(batches(TRAIN), **given), lambda **given: run_on(batches(OTHER), **given)],
}


def batches(dataset):
    found = [{"image": dataset.images[i : i + 16], "label": dataset.labels[i : i + 16]} for i in range(0, 48, 16)]
    return data.from_iterable(lambda epoch: iter(found), steps_per_epoch=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", SWEEPS)
def test_runs_of_a_sweep_keep_each_others_records(tmp_path, capsys, case):
    histories = []
    for run in SWEEPS[case]:
        board = train.to_tensorboard(tmp_path / "board")
        given = {"callbacks": [train.to_jsonl(tmp_path / "l.jsonl"), board], "metrics_file": tmp_path / "m.jsonl"}
        histories += run(**given)[1]
    assert lines(tmp_path / "l.jsonl") == lines(tmp_path / "m.jsonl") == histories
    assert len(histories) == 4
    assert [step for step, _ in scalars(tmp_path / "board")] == [3, 6, 3, 6]
    said = capsys.readouterr().out
    assert said.count("has the records of another run; those of this run follow them") == 2
    assert "which TensorBoard shows too" in said


def test_a_run_that_goes_on_among_others_has_its_records_once(tmp_path):
    files = {"metrics_file": tmp_path / "m.jsonl", "callbacks": train.to_jsonl(tmp_path / "l.jsonl")}
    own = {**files, "checkpoint_dir": tmp_path / "a", "epochs": 3}
    with pytest.raises(RuntimeError, match="crash"):
        run_on(TRAIN, **{**own, "callbacks": [own["callbacks"], crash_after(2)]})
    _, other = run_on(OTHER, **files)
    _, history = run_on(TRAIN, **own)
    for name in ("l.jsonl", "m.jsonl"):
        found = lines(tmp_path / name)
        assert len(found) == 5, name
        assert all(record in found for record in [*history, *other]), name


def test_the_same_call_again_replaces_its_records_in_words(tmp_path, capsys):
    for _ in range(2):
        _, history = run_on(TRAIN, metrics_file=tmp_path / "m.jsonl", callbacks=train.to_jsonl(tmp_path / "l.jsonl"))
    assert lines(tmp_path / "m.jsonl") == lines(tmp_path / "l.jsonl") == history
    assert capsys.readouterr().out.count("has 2 records of an earlier call of this run, which are replaced") == 2


def test_members_of_an_ensemble_are_runs_of_their_own(tmp_path):
    """They differ in the values of a large matrix alone. A random key beside it, a constant, is no obstacle."""

    def loss_fn(params, batch, rng):
        return ((batch["x"] @ params["w"]) ** 2).mean(), {}

    x = np.random.default_rng(0).standard_normal((8, 2000), np.float32)
    for member in range(2):
        w = np.random.default_rng(member).standard_normal((2000, 40), np.float32)
        state, step = train.start(
            {"w": w, "key": jax.random.key(0)}, optax.sgd(1e-4), loss_fn, devices=jax.devices()[:2]
        )
        train.fit(state, step, {"x": x}, epochs=1, batch_size=8, progress=False, metrics_file=tmp_path / "m.jsonl")
    losses = [record["loss"] for record in lines(tmp_path / "m.jsonl")]
    assert len({*losses}) == 2


def test_only_a_random_key_beside_vectors_names_a_run(tmp_path):
    params = {"b": np.ones(2, np.float32), "key": jax.random.key(0)}
    state, step = train.start(params, optax.sgd(0.1), lambda p, batch, rng: ((batch["x"] @ p["b"]).mean(), {}))
    train.fit(
        state, step, {"x": np.ones((8, 2))}, epochs=1, batch_size=8, progress=False, metrics_file=tmp_path / "m.jsonl"
    )
    assert len(lines(tmp_path / "m.jsonl")) == 1


def test_a_metrics_file_of_something_else_stays(tmp_path):
    (tmp_path / "thesis.txt").write_text("all my work\n")
    with pytest.raises(ValueError, match=r"thesis.txt has lines that are not JSON records"):
        run_on(TRAIN, metrics_file=tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "all my work\n"


# Weights & Biases, in place of the package


class WandbRun:
    def __init__(self, name):
        self.id, self.name, self.step, self.rows, self.ended, self.axes = name, name, 0, [], False, {}

    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric

    def log(self, row, step=None):
        if step is None or step >= self.step:  # else it is dropped with a warning
            self.rows.append(row)
            self.step = self.step + 1 if step is None else step

    def finish(self):
        self.ended = True


class Wandb:
    """`init` gives back the run that is open, unless it is asked for another one."""

    run = None

    def init(self, name="own", reinit=None, **options):
        if self.run is None or self.run.ended or reinit == "create_new":
            new = WandbRun(name)
            self.run = new if reinit is None else self.run
            return new
        return self.run


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", found := Wandb())
    return found


def test_an_open_run_of_the_user_gets_the_records_and_stays_open(wandb):
    mine = wandb.init(name="mine")
    for _ in range(50):  # it is ahead of the steps of fit
        mine.log({"own": 1})
    for train_data in (TRAIN, OTHER):  # two folds in one run
        board = train.to_wandb()
        run_on(train_data, callbacks=board, on_step=board.on_step)
        assert board.run is None
    rows = [row for row in mine.rows if "train/loss" in row]
    assert [row["fit/step"] for row in rows] == [3, 6, 3, 6]
    assert [row["fit/step"] for row in mine.rows if "step/loss" in row] == [1, 2, 3, 4, 5, 6] * 2
    assert mine.axes["train/*"] == mine.axes["step/*"] == "fit/step"
    assert not mine.ended


def test_a_run_with_a_name_is_opened_beside_that_of_the_user(wandb):
    mine = wandb.init(name="mine")
    mine.log({"own": 1}, step=100)
    board = train.to_wandb("numbers", name="fold 1")
    seen = []
    run_on(TRAIN, callbacks=[board, lambda state, record: seen.append(board.run)])
    assert (seen[0].name, seen[0].ended, len(seen[0].rows)) == ("fold 1", True, 2)
    assert (mine.ended, len(mine.rows), wandb.run) == (False, 1, mine)


def test_a_run_of_its_own_ends_with_fit(wandb):
    seen, board = [], train.to_wandb(name="alone")
    run_on(TRAIN, callbacks=[board, lambda state, record: seen.append(board.run)])
    assert (seen[0].name, seen[0].ended, len(seen[0].rows)) == ("alone", True, 2)


def test_an_old_wandb_that_gives_back_the_open_run_is_said(wandb, monkeypatch):
    mine = wandb.init(name="mine")
    monkeypatch.setattr(wandb, "init", lambda **options: mine, raising=False)
    with pytest.raises(RuntimeError, match=r"run mine is open, .*call wandb.finish\(\) before, or give no options"):
        run_on(TRAIN, callbacks=train.to_wandb("numbers"))
    assert not mine.ended


@pytest.mark.parametrize("path", ["s3://bucket/runs", "$HOME/runs"])
def test_a_directory_of_wandb_is_a_path(wandb, path):
    with pytest.raises(ValueError, match="to_wandb: dir is"):
        train.to_wandb(dir=path)


# Certificates


CERTIFIED = {"certificate_every": 2, "epochs": 2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", SWEEPS)
def test_the_certificate_of_another_run_is_refused(tmp_path, case):
    first, second = SWEEPS[case]
    first(certificate=tmp_path / "c", **CERTIFIED)
    before = (tmp_path / "c").read_bytes()
    if case == "an iterable":  # its data are not known before they are read
        return
    known = {"rate": "optimizer", "loss": "loss function", "step": "options of the step"}
    with pytest.raises(ValueError, match=rf"is from another run .*the {known.get(case, case)} differs"):
        second(certificate=tmp_path / "c", **CERTIFIED)
    assert (tmp_path / "c").read_bytes() == before


def test_other_values_at_the_start_and_batches_are_another_run(tmp_path):
    given = {"certificate": tmp_path / "c", **CERTIFIED}
    run_on(TRAIN, **given)
    params = {"w": np.ones((4, 3), np.float32)}
    store = kv.from_params(params, optimizer=TX)
    other = train.create_state(store, 3, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="the values at the start differs"):
        run_on(TRAIN, other, **given)
    with pytest.raises(ValueError, match="batch size: 16 in the file, 8 now"):
        run_on(TRAIN, **given, batch_size=8)
    with pytest.raises(ValueError, match="every: 2 in the file, 3 now"):
        run_on(TRAIN, **{**given, "certificate_every": 3})


def test_a_certificate_with_a_hole_is_refused(tmp_path):
    given = {**CERTIFIED, "certificate": tmp_path / "c", "checkpoint_dir": tmp_path / "a"}
    run_on(TRAIN, **given)
    text = (tmp_path / "c").read_text().splitlines(keepends=True)
    (tmp_path / "c").write_text("".join([*text[:2], *text[3:]]))  # without step 4
    with pytest.raises(ValueError, match=r"has no line of step 4, and this run goes on after step 6; give another"):
        run_on(TRAIN, **{**given, "epochs": 3})
    (tmp_path / "c").write_text("".join(text))
    assert len(run_on(TRAIN, **{**given, "epochs": 3})[1]) == 3
    assert [entry["step"] for entry in lines(tmp_path / "c")[1:]] == [2, 4, 6, 8]


def test_a_certificate_of_an_earlier_jaxpar_goes_on(tmp_path):
    given = {**CERTIFIED, "certificate": tmp_path / "c", "checkpoint_dir": tmp_path / "a"}
    run_on(TRAIN, **given)
    header, *rest = lines(tmp_path / "c")
    old = [{name: value for name, value in header.items() if name != "run"}, *rest]
    (tmp_path / "c").write_text("".join(json.dumps(line) + "\n" for line in old))
    state, _ = run_on(TRAIN, **{**given, "epochs": 3})
    assert lines(tmp_path / "c")[:4] == old
    assert len(lines(tmp_path / "c")) == 5
    same(state, run_on(TRAIN, epochs=3)[0])


def test_two_runs_do_not_write_one_certificate_at_once(tmp_path):
    given = {**CERTIFIED, "certificate": tmp_path / "c"}
    refused = []

    def second(state, record):
        with pytest.raises(OSError, match=r"another run, in process .*, writes it; give each run its own file"):
            run_on(TRAIN, **given)
        refused.append(record["epoch"])

    run_on(TRAIN, **given, callbacks=second)
    assert refused == [1, 2]
    before = (tmp_path / "c").read_bytes()
    run_on(TRAIN, **given)  # it was given up
    assert (tmp_path / "c").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.slow
def test_a_certificate_of_a_process_that_was_killed_goes_on(tmp_path):
    code = (
        "import sys, os, pathlib; from jaxpar.checkpoint._run import DirectoryLock as L; p = pathlib.Path(sys.argv[1]);"
    )
    subprocess.run([sys.executable, "-c", f"{code} L(p.parent, p).acquire(); os._exit(9)", tmp_path / "c"], check=False)
    assert (tmp_path / ".c.writer").exists()
    run_on(TRAIN, **CERTIFIED, certificate=tmp_path / "c")
    assert len(lines(tmp_path / "c")) == 4
