"""Runs of which processes are killed and stopped, elastic and rigid. They end with the bits of an undisturbed one."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launched import command, environment, launch

from jaxpar import checkpoint

PROGRAM, STRANGER = (Path(__file__).parents[1] / name for name in ("elastic_run.py", "stranger.py"))
PROCESSES = 3


class Run:
    """A run under the launcher, and what it says."""

    def __init__(self, folder, *arguments, processes=PROCESSES, way=("--elastic",)):
        self.folder, self.processes = folder, processes
        folder.mkdir()
        self.env = environment()
        launch = command("-n", str(processes), "--devices", "2", *way, "--", sys.executable, str(PROGRAM))
        self.launcher = subprocess.Popen(
            [*launch, str(folder), *arguments],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output, self._reading = "", threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self):
        for line in self.launcher.stdout:
            self.output += line

    def found(self, pattern):
        return re.findall(pattern, self.output)

    def wait(self, pattern, number=1):
        """Wait until a pattern was said so often."""
        end = time.monotonic() + 120
        while len(self.found(pattern)) < number:
            if self.launcher.poll() is not None or time.monotonic() > end:
                self.launcher.kill()
                raise AssertionError(f"{pattern} was not said {number} times:\n{self.output}")
            time.sleep(0.05)

    def pid(self, rank):
        return int(self.found(rf"PID {rank} (\d+)")[-1])

    def send(self, number, *pids):
        for pid in pids:
            os.kill(pid, number)

    def end(self, expected=0, seconds=180):
        """The steps and the bits of its processes at the end, which has the expected status."""
        try:
            status = self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            self.launcher.terminate()
            raise AssertionError(self.output) from None
        finally:
            self._reading.join()
            self.launcher.stdout.close()
        assert status == expected, self.output
        return set(self.found(r"BITS (\d+) (\w+)"))

    def steps(self):
        return list(map(int, self.found(r"STEP (\d+)")))


def pause(run, seconds, stop, *pids):
    run.send(stop, *pids)
    time.sleep(seconds)
    run.send(signal.SIGCONT, *pids)


def everything(run):
    return run.launcher.pid, *map(run.pid, range(run.processes))


def visit(run):
    """A stranger takes the number of process 2 at jax's service."""
    (address,) = re.findall(rb"JAXPAR_COORDINATOR=([^\0]+)", Path(f"/proc/{run.pid(0)}/environ").read_bytes())
    subprocess.run([sys.executable, str(STRANGER), address, str(PROCESSES), "2"], env=run.env, check=True, timeout=60)


# What happens, and how many processes are lost by it.
EVENTS = {
    "a process is killed": (lambda run: run.send(signal.SIGKILL, run.pid(1)), 1),
    "Ctrl-Z": (lambda run: pause(run, 7, signal.SIGTSTP, run.launcher.pid), 0),
    "a process is stopped": (lambda run: pause(run, 2, signal.SIGSTOP, run.pid(2)), 0),
    "a stranger writes": (visit, 1),
    "a container is stopped": (lambda run: pause(run, 7, signal.SIGSTOP, *everything(run)), 0),
    "a process is frozen": (lambda run: run.send(signal.SIGSTOP, run.pid(2)), 1),
    "the launcher is stopped": (lambda run: pause(run, 7, signal.SIGSTOP, run.launcher.pid), 0),
    "two are killed": (lambda run: run.send(signal.SIGKILL, run.pid(1), run.pid(2)), 2),
}


def end_of_undisturbed(folder, steps):
    return Run(folder, f"slow:0:{steps // 6}", processes=1).end()


@pytest.mark.slow  # two minutes
def test_kills_stops_and_joins_change_no_bit(tmp_path):
    run = Run(tmp_path / "disturbed", "slow:0.2:10000")
    lost = 0
    run.wait("STEP 5")
    for event, losses in EVENTS.values():
        run.wait(r"STEP \d+", len(run.steps()) + 10)
        event(run)
        lost += losses
        run.wait(r"is started again as pid", lost)
        run.wait(r"PID \d+ \d+", PROCESSES + lost)
    (run.folder / "over").touch()
    found = run.end()
    assert run.steps() == [*range(1, run.steps()[-1] + 1)]  # each counted once
    assert "Traceback" not in run.output
    assert found == end_of_undisturbed(tmp_path / "undisturbed", run.steps()[-1])


@pytest.mark.slow  # 15 seconds
@pytest.mark.parametrize("who", ["the launcher", pytest.param("process 0", marks=pytest.mark.release)])
def test_all_stop_after_the_same_step(tmp_path, who):
    run = Run(tmp_path / "run", "slow:0.05:10000", processes=2)
    run.wait("STEP 20")
    run.send(signal.SIGTERM, run.launcher.pid if who == "the launcher" else run.pid(0))
    assert run.end(143) == set(), run.output
    said = run.found(r"\[(\d)\] jaxpar: fit: SIGTERM: stopped after step (\d+), in epoch \d+ of 10000; (\w+)")
    assert {(rank, saved) for rank, _, saved in said} == {("0", "saved"), ("1", "nothing")}, run.output
    assert len({step for _, step, _ in said}) == 1, run.output


@pytest.mark.release  # minutes: a process counts as frozen after 30 seconds
@pytest.mark.parametrize("seconds", [40, 60])
def test_a_long_standstill_changes_no_bit(tmp_path, seconds):
    """All of a run stops, or its launcher alone: nothing is lost. One process of a rigid run stops: all begin again."""
    elastic = Run(tmp_path / "elastic", "slow:0.3:10000")
    rigid = Run(tmp_path / "rigid", "rigid", "slow:0.3:10000", processes=2, way=("--max-restarts", "3"))
    both = (elastic, rigid)

    def wait_for_steps(*runs):
        for run in runs:
            run.wait(r"STEP \d+", len(run.steps()) + 10)

    wait_for_steps(*both)
    elastic.wait(r"PID \d+ \d+", PROCESSES)
    for number, of_run in ((signal.SIGSTOP, everything), (signal.SIGTSTP, lambda run: [run.launcher.pid])):
        pause(elastic, seconds, number, *of_run(elastic), *of_run(rigid))
        wait_for_steps(*both)
    for run in both:
        assert "lost" not in run.output
        assert "stuck" not in run.output
    rigid.send(signal.SIGSTOP, rigid.pid(1))
    rigid.wait("restart 1 of 3")
    rigid.wait(r"PID 1 \d+", 2)
    wait_for_steps(rigid)
    assert "no heartbeat" in rigid.output
    for run in both:
        (run.folder / "over").touch()
        found = run.end()
        assert found == end_of_undisturbed(tmp_path / f"undisturbed {run.folder.name}", run.steps()[-1])
        assert "Traceback" not in run.output
    assert elastic.steps() == [*range(1, elastic.steps()[-1] + 1)]  # each counted once


# ---- processes that fail as they are asked to, once for each failure


def ended(folder, processes, *failures, options=(), losses=None):
    """A run that has ended well, and what its processes ended with. Where some were lost, no step counts twice."""
    run = Run(folder, *failures, processes=processes, way=("--elastic", *options))
    run.end(seconds=300)
    if losses is not None:
        assert run.output.count("is started again as pid") == losses, run.output
        assert run.steps() == [*range(1, 37)]
    return run, run.found(r"BITS (.*)")


def certificate(folder):
    """The hashes of the state and its leaves after each step. An elastic run has none of its shards."""
    header, *lines = (folder / "run.jsonl").read_text().splitlines()
    assert '"virtual_shards": 8' in header
    assert len(lines) == 36
    return [(entry["step"], entry["state"], entry["leaves"]) for entry in map(json.loads, lines)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run without a loss ends with: the results of its process, and its certificate."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return {*ended(folder, 1)[1]}, certificate(folder)


@pytest.mark.slow  # three minutes on a busy machine: three processes, three losses
def test_killed_frozen_and_stuck_processes_change_no_bit(tmp_path, undisturbed):
    failures = "kill:2:7", "stop:1:15", "loop:2:23"
    run, results = ended(tmp_path / "disturbed", 3, *failures, losses=3)
    assert "restart" not in run.output
    assert re.search(r"process 1 .*is lost: no heartbeat for \d+ seconds", run.output), run.output
    assert "process 2 is stuck: it loads the batch of step 24, for more than 10 seconds" in run.output
    assert "elastic_run.py" in run.output.partition("is stuck")[2]
    assert "process 1 was lost in step 16; the others repeat it" in run.output
    assert re.search(r"SEEN 0 12\b", run.output), run.output  # records, in process 0 only
    assert len(results) == 3, run.output
    assert ({*results}, certificate(tmp_path / "disturbed")) == undisturbed


@pytest.mark.slow  # a minute on a busy machine: three processes, two losses
@pytest.mark.parametrize("kind", ["silent", pytest.param("unseen", marks=pytest.mark.release)])
def test_nobody_waits_for_a_process_that_is_lost_while_it_connects(tmp_path, kind):
    # Gloo would wait 150 seconds for its connection, and 30 for its address. The next line is waited for 120 seconds.
    run = Run(tmp_path / "run", f"{kind}:2:7", "slow:0.2:10000")
    run.wait("process 2 joins after step")
    run.wait("process 2 was lost while the processes connected; the others connect again")
    run.wait("process 2 joins after step", 2)
    (run.folder / "over").touch()
    found = run.end()
    assert run.steps() == [*range(1, run.steps()[-1] + 1)]
    assert "Traceback" not in run.output
    assert found == end_of_undisturbed(tmp_path / "undisturbed", run.steps()[-1])


@pytest.mark.release  # a minute on a busy machine: three processes, two losses
def test_nobody_waits_for_a_process_that_starts(tmp_path, undisturbed):
    # Process 2 comes back and calls fit only after step 20. Process 1 is lost before that.
    run, results = ended(tmp_path / "disturbed", 3, "kill:2:7", "kill:1:15", "late:2:20", losses=2)
    assert "restart" not in run.output
    assert "process 1 was lost in step 16; the others repeat it" in run.output
    assert int(re.search(r"process (?:1, )?2 joins after step (\d+)", run.output)[1]) >= 20, run.output
    assert ({*results}, certificate(tmp_path / "disturbed")) == undisturbed


@pytest.mark.slow  # 15 seconds: two starts of two processes
def test_without_process_0_all_start_again_from_the_checkpoint(tmp_path, undisturbed):
    run, results = ended(tmp_path / "disturbed", 2, "kill:0:9", options=("--max-restarts", "1"))
    assert "an elastic run cannot continue without process 0" in run.output
    assert "restart 1 of 1 with 2 processes" in run.output
    assert re.search("resumed from step [2468] ", run.output), run.output
    assert ({*results}, certificate(tmp_path / "disturbed")) == undisturbed
    assert checkpoint.latest(tmp_path / "disturbed" / "run") is not None


@pytest.mark.release  # a minute: three processes, two of which come back with other programs
def test_a_process_with_another_program_is_refused_by_name_and_once(tmp_path):
    # Slow, so that both come back before the end, on a busy machine too.
    run, results = ended(tmp_path / "disturbed", 3, "rate:2:7", "data:1:15", "slow:1.2:6", losses=2)
    rate = "process 2 differs from process 0 in: the step, with its loss"
    assert run.output.count(rate) == 1, run.output
    data = "process 1 differs from process 0 in: the data. It ends with"
    assert run.output.count(data) == 1, run.output
    assert run.output.count("failed: status 78, with another program; it is not started again, and") == 2
    assert {*results} == {*ended(tmp_path / "undisturbed", 1)[1]}


RESUMED = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from jaxpar import distributed, train

class Source:
    def __len__(self):
        return 1
    def __iter__(self):
        if sys.argv[2] == "fail":
            raise RuntimeError("mine")
        yield arrays

distributed.initialize(elastic=True)
arrays = {"x": np.ones((48, 4), "float32")}
loss_fn = lambda p, batch, rng: ((batch["x"] @ p["w"]).mean(), {})
state, step = train.start({"w": jnp.ones(4)}, optax.sgd(0.1), loss_fn, virtual_shards=8)
state, history = train.fit(
    state, step, arrays, epochs=2, batch_size=16, progress=False, checkpoint_dir=sys.argv[1],
    eval_data=Source(), eval_fn=lambda p, batch: {"m": batch["x"] @ p["w"]}, callbacks=lambda *_: True,
)
print("END", int(state.step), [sorted(record) for record in history], flush=True)
"""


@pytest.mark.release  # 20 seconds
def test_a_resumed_run_that_makes_no_step_is_over_for_all(tmp_path):
    words = ["-n", "2", "--elastic", "--", sys.executable, "-c", RESUMED, str(tmp_path / "run")]
    failed = launch(*words, "fail", expect=1, timeout=100)
    assert "RuntimeError: mine" in failed.stderr  # the evaluation after the first epoch, in process 0
    for _ in range(2):  # it is made again, and a callback ends the run at once; then the run is over
        done = launch(*words, "go", timeout=100)
        ends = re.findall(r"END 3 (.*)", done.stdout)
        assert len(ends) == 2, done.stdout
        assert len(set(ends)) == 1
        assert "eval_m" in ends[0]
