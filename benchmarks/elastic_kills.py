"""An elastic run whose processes are killed within a second after they joined, again and again.

A process that has just joined connects to the others by Gloo. That is the worst moment to lose it. Three processes with
three emulated devices each run under `python -m jaxpar launch --elastic`, on loopback, with a model of two matrices. A
process is killed 0.1 to 1 second after process 0 has said that it joins. The launcher brings it back, it joins, and is
killed again. After eight kills it may stay, and it is the turn of the other one: the launcher ends a run of which a
process dies ten times without having worked.

A wait is the time from a kill to the end of the next step of process 0. Then one process with one device makes as many
steps, undisturbed, and the certificates are compared: hashes of the state after every 10 steps.

    python benchmarks/elastic_kills.py --kills 200
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from _harness import environment
from elastic import Lines, arguments_of, states_of

DEVICES, SHARDS = 3, 12
PAUSE = 0.25  # seconds after each step, so that on two cores the process that starts gets a turn
IN_A_ROW = 8  # kills of one process before it is the turn of the other
STANDSTILL = 8.0  # seconds after which each process is asked for its stacks


def worker(over: str, max_steps: int, certificate: str) -> None:
    """A process of the run, or the undisturbed one."""
    import jax
    import numpy as np
    import optax

    from jaxpar import distributed, train

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if not max_steps:
        distributed.initialize(elastic=True)
    rank = jax.process_index()
    print(f"PID {rank} {os.getpid()}", flush=True)
    draw = np.random.default_rng(0).normal
    examples = {"x": draw(size=(1440, 16)).astype(np.float32), "y": draw(size=1440).astype(np.float32)}
    params = {"w": draw(size=(16, 16)).astype(np.float32), "v": draw(size=16).astype(np.float32)}

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        hidden = jax.numpy.tanh(batch["x"] @ params["w"])
        return ((hidden @ params["v"] - batch["y"]) ** 2).mean() + jax.random.normal(rng, ()) * params["v"].sum(), {}

    def on_step(number: int, metrics: Any) -> None:
        print(f"STEP {number} {time.time()}", flush=True)
        time.sleep(0 if max_steps else PAUSE)

    options: dict[str, Any] = {"devices": jax.devices()[:1]} if max_steps else {}
    state, step = train.start(params, optax.sgd(1e-3, momentum=0.9), loss_fn, virtual_shards=SHARDS, **options)
    state, _ = train.fit(
        state,
        step,
        examples,
        epochs=None if max_steps else 1 << 20,
        max_steps=max_steps or None,
        batch_size=72,
        progress=False,
        certificate=certificate,
        certificate_every=10,
        callbacks=lambda state, record: not max_steps and os.path.exists(over),
        on_step=on_step,
    )
    print(f"END {rank} {int(state.step)}", flush=True)


class Kills:
    """What the lines of a run tell, and the kills."""

    def __init__(self, number: int, seed: int):
        self.number, self._choice = number, random.Random(seed)
        self.waits: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.ends: set[int] = set()  # steps
        self.pids: dict[int, int] = {}
        self.step, self.step_at, self.most_between = 0, 0.0, 0.0
        self._in: set[int] = set()
        self._victim, self._row = 1, 0
        self._kill_at, self._killed_at, self._asked = 0.0, 0.0, False
        self._delay: float | None = None

    def read(self, lines: list[str]) -> None:
        for line in lines:
            self.lines.append(line)
            if found := re.search(r"STEP (\d+) ([\d.]+)", line):
                self.step, at = int(found[1]), float(found[2])
                self.most_between = max(self.most_between, at - self.step_at if self.step_at else 0.0)
                self.step_at = at
                if self._killed_at and at > self._killed_at:
                    self._note(at - self._killed_at)
            elif found := re.search(r"PID (\d+) (\d+)", line):
                self.pids[int(found[1])] = int(found[2])
            elif found := re.search(r"process ([\d, ]+) joins? ", line):
                joined = set(map(int, found[1].split(", ")))
                self._in |= joined
                if self._victim in joined and len(self.waits) < self.number:
                    self._joined()
            elif found := re.search(r"END \d+ (\d+)", line):
                self.ends.add(int(found[1]))

    def _joined(self) -> None:
        self._row += 1
        if self._row <= IN_A_ROW:
            self._delay = self._choice.uniform(0.1, 1.0)
            self._kill_at = time.time() + self._delay
        else:  # it stays, and the other one is killed in a step, to begin its turn
            self._row, self._victim, self._delay, self._kill_at = 0, 3 - self._victim, None, time.time() + 3.0

    def look(self) -> None:
        """Kill where it is time. Ask for the stacks where the run stands still."""
        now = time.time()
        if not self._kill_at and not self._in and self.step:  # at the beginning
            self._in, self._kill_at = {0, 1, 2}, now + 1.0
        if self._kill_at and now >= self._kill_at and self._victim in self.pids:
            os.kill(self.pids.pop(self._victim), signal.SIGKILL)
            self._in.discard(self._victim)
            self._kill_at, self._killed_at, self._asked = 0.0, time.time(), False
        if self._killed_at and now > self._killed_at + STANDSTILL and not self._asked:
            self._asked = True
            for pid in self.pids.values():
                os.kill(pid, signal.SIGUSR1)

    def _note(self, wait: float) -> None:
        if self._delay is not None:
            self.waits.append({"victim": self._victim, "delay": round(self._delay, 2), "wait": round(wait, 2)})
            if wait > STANDSTILL:
                print(f"kill {len(self.waits)}, after {self._delay:.2f} s: {wait:.1f} s", flush=True)
        self._killed_at = 0.0


def disturbed(kills: Kills, log: str | None, folder: str, most_seconds: float) -> int:
    """The run with kills. Return its status."""
    over, certificate = (os.path.join(folder, name) for name in ("over", "disturbed.jsonl"))
    command = [sys.executable, "-m", "jaxpar", "launch", "-n", "3", "--devices", str(DEVICES), "--elastic"]
    command += ["--", "python", os.path.abspath(__file__), "--worker", over, "--certificate", certificate]
    # What comes back reads its programs, so that it is soon there.
    cache = {"JAX_COMPILATION_CACHE_DIR": os.path.join(folder, "programs")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    env = {**os.environ, **cache}
    run = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, began = Lines(run.stdout, log), time.time()
    lines.thread.start()
    while run.poll() is None:
        kills.read(lines.get())
        if len(kills.waits) < kills.number and time.time() < began + most_seconds:
            kills.look()
        else:
            open(over, "w").close()
        time.sleep(0.02)
    lines.thread.join()
    kills.read(lines.get())
    return run.returncode


def undisturbed(steps: int, folder: str) -> dict[int, str]:
    """The hashes of one process with one device."""
    certificate = os.path.join(folder, "undisturbed.jsonl")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, os.path.abspath(__file__), "--worker", "", "--max-steps", str(steps)]
    subprocess.run([*command, "--certificate", certificate], env=env, stdout=subprocess.DEVNULL, check=True)
    return states_of(certificate)


def main() -> int:
    """Run both, compare, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the seconds from a join to a kill")
    parser.add_argument("--most-seconds", type=float, default=3600.0, help="after which no more are killed")
    args = arguments_of(parser)
    if args.worker is not None:
        worker(args.worker, args.max_steps, args.certificate)
        return 0
    kills, began = Kills(3 if args.quick else args.kills, args.seed), time.time()
    with tempfile.TemporaryDirectory() as folder:
        status = disturbed(kills, args.log, folder, args.most_seconds)
        minutes = (time.time() - began) / 60
        if status or len(kills.ends) != 1 or not kills.waits:
            print("".join(kills.lines[-60:]))
            return 1
        states = states_of(os.path.join(folder, "disturbed.jsonl"))
        (steps,) = kills.ends
        is_equal = bool(states) and states == undisturbed(steps, folder)
    waits = sorted(kill["wait"] for kill in kills.waits)
    report = {
        **{"kills": len(waits), "minutes": round(minutes, 1), "steps": steps, "median": statistics.median(waits)},
        **{"p99": waits[min(len(waits) - 1, int(0.99 * len(waits)))], "longest": waits[-1]},
        **{"between_steps": round(kills.most_between, 2), "certified": len(states), "equal": is_equal},
        **{"waits": kills.waits, "environment": environment()},
    }
    print(
        f"{len(waits)} kills within a second after a join, {minutes:.1f} minutes, {steps} steps; from a kill to the "
        f"next step {report['median']:.1f} s in the median, p99 {report['p99']:.1f} s, at most {waits[-1]:.1f} s; "
        f"between two steps at most {kills.most_between:.1f} s; "
        f"{len(states)} certified states {'equal' if is_equal else 'DIFFER'}"
    )
    if args.output:
        with open(args.output, "w") as file:
            json.dump(report, file, indent=1)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
