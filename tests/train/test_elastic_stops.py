"""Runs of which processes are killed and stopped, elastic and rigid. They end with the bits of an undisturbed one."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launched import command, environment

PROGRAM, STRANGER = (Path(__file__).parents[1] / name for name in ("elastic_run.py", "stranger.py"))
PROCESSES = 3


class Run:
    """A run under the launcher, and what it says."""

    def __init__(self, folder, *arguments, processes=PROCESSES, way=("--elastic",)):
        self.folder, self.processes = folder, processes
        folder.mkdir()
        self.env = environment(XLA_FLAGS="", PYTHONPATH=os.pathsep.join(sys.path))
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

    def end(self, expected=0):
        """The steps and the bits of its processes at the end, which has the expected status."""
        try:
            status = self.launcher.wait(180)
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


def attack(run, events):
    lost = 0
    run.wait("STEP 5")
    for event, losses in events:
        run.wait(r"STEP \d+", len(run.steps()) + 10)
        event(run)
        lost += losses
        run.wait(r"is started again as pid", lost)
        run.wait(r"PID \d+ \d+", PROCESSES + lost)
    (run.folder / "over").touch()
    return run.end()


def undisturbed(folder, steps):
    return Run(folder, f"slow:0:{steps // 6}", processes=1).end()


@pytest.mark.slow  # two minutes
def test_kills_stops_and_joins_change_no_bit(tmp_path):
    run = Run(tmp_path / "disturbed", "slow:0.2:10000")
    found = attack(run, EVENTS.values())
    assert run.steps() == [*range(1, run.steps()[-1] + 1)]  # each counted once
    assert "Traceback" not in run.output
    assert found == undisturbed(tmp_path / "undisturbed", run.steps()[-1])


@pytest.mark.slow  # 15 seconds
@pytest.mark.parametrize("who", ["the launcher", "process 0"])
def test_all_stop_after_the_same_step(tmp_path, who):
    run = Run(tmp_path / "run", "slow:0.05:10000", processes=2)
    run.wait("STEP 20")
    run.send(signal.SIGTERM, run.launcher.pid if who == "the launcher" else run.pid(0))
    assert run.end(143) == set(), run.output
    said = run.found(r"\[(\d)\] jaxpar: fit: SIGTERM: stopped after step (\d+), in epoch \d+ of 10000; (\w+)")
    assert {(rank, saved) for rank, _, saved in said} == {("0", "saved"), ("1", "nothing")}, run.output
    assert len({step for _, step, _ in said}) == 1, run.output


@pytest.mark.slow  # four minutes, of which two are standstill
def test_a_minute_of_standstill_changes_no_bit(tmp_path):
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
        pause(elastic, 60, number, *of_run(elastic), *of_run(rigid))
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
        assert found == undisturbed(tmp_path / f"undisturbed {run.folder.name}", run.steps()[-1])
        assert "Traceback" not in run.output
    assert elastic.steps() == [*range(1, elastic.steps()[-1] + 1)]  # each counted once
