"""LeNet in an elastic run: a random process except the first is killed every few seconds, and joins again.

Four processes with two emulated devices each, under `python -m jaxpar launch --elastic`. The run ends with the first
epoch after the time is over. Then one process with one device makes as many steps, undisturbed, and the bits of all
parameters and of the optimizer are compared. `seconds` are from a kill to the end of the next step of process 0.

    python benchmarks/elastic.py --seconds 300 --every 5
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

EXAMPLES, BATCH, SHARDS = 2048, 64, 8
GOAL = 7.0  # seconds from a kill to the next step, on an idle machine


def worker(seconds: float, max_steps: int) -> None:
    """A process of the run, or the undisturbed one."""
    import jax
    import numpy as np
    import optax

    from jaxpar import data, distributed, kv, models, train

    if not max_steps:
        distributed.initialize(elastic=True)
    rank = jax.process_index()
    print(f"PID {rank} {os.getpid()}", flush=True)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (EXAMPLES, 28, 28, 1), dtype=np.uint8)
    examples = data.Dataset(images, rng.integers(0, 10, EXAMPLES).astype(np.int32))
    params = models.lenet.init(jax.random.key(0))
    store = kv.from_params(params, optimizer=optax.sgd(0.05, momentum=0.9))
    state = train.create_state(store, 0, devices=jax.devices()[:1] if max_steps else None)
    step = train.make_train_step(train.classification_loss(models.lenet.apply), virtual_shards=SHARDS)
    end = time.monotonic() + seconds

    def is_over(state: Any, record: Any) -> bool:
        return time.monotonic() > end and not max_steps

    state, history = train.fit(
        state,
        step,
        examples,
        epochs=None if max_steps else 1 << 20,
        max_steps=max_steps or None,
        batch_size=BATCH,
        progress=False,
        callbacks=is_over,
        on_step=lambda number, metrics: print(f"STEP {number} {time.time()}", flush=True),
    )
    leaves = jax.tree.leaves((kv.to_params(state.store), state.store.optimizer_state, state.store.updater_state))
    bits = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()[:16]
    print(f"BITS {rank} {int(state.step)} {bits} {history[-1]['loss']!r}", flush=True)


class Lines(threading.Thread):
    """What a process prints, line by line."""

    def __init__(self, pipe: Any):
        super().__init__(daemon=True)
        self._pipe, self.queue = pipe, queue.SimpleQueue[str]()

    def run(self) -> None:
        for line in self._pipe:
            self.queue.put(line)

    def get(self) -> list[str]:
        found: list[str] = []
        while not self.queue.empty():
            found.append(self.queue.get())
        return found


class Watch:
    """What the lines of a run tell."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.bits: dict[int, tuple[int, str]] = {}
        self.last_step, self.joined, self.restarts, self.again = 0.0, 0, 0, 0
        self.text: list[str] = []

    def read(self, lines: list[str]) -> None:
        for line in lines:
            self.text.append(line)
            if found := re.search(r"PID (\d+) (\d+)", line):
                self.joined += int(found[1]) in self.pids
                self.pids[int(found[1])] = int(found[2])
            elif found := re.search(r"STEP (\d+) ([\d.]+)", line):
                self.last_step = float(found[2])
            elif found := re.search(r"BITS (\d+) (\d+) (\w+)", line):
                self.bits[int(found[1])] = int(found[2]), found[3]
            self.restarts += "restart " in line
            self.again += "make it again" in line


def disturbed(seconds: float, every: float, processes: int, devices: int) -> dict[str, Any]:
    """The run with kills."""
    launch = [sys.executable, "-m", "jaxpar", "launch", "-n", str(processes), "--devices", str(devices), "--elastic"]
    command = [*launch, "--", "python", os.path.abspath(__file__), "--worker", str(seconds)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, watch, choice = Lines(run.stdout), Watch(), random.Random(0)
    lines.start()
    waits: list[float] = []
    killed: float | None = None
    kills, began, next_kill = 0, time.time(), float("inf")
    while run.poll() is None:
        watch.read(lines.get())
        now = time.time()
        if watch.last_step and next_kill == float("inf"):
            next_kill = now + every
        if killed is not None and watch.last_step > killed:
            waits.append(watch.last_step - killed)
            killed = None
        if now > next_kill and killed is None and now - began < seconds and len(watch.pids) == processes:
            victim = choice.randrange(1, processes)
            try:
                os.kill(watch.pids[victim], signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has not said its number yet
            killed, kills, next_kill = time.time(), kills + 1, now + every
        time.sleep(0.02)
    watch.read(lines.get())
    return {
        **{"status": run.returncode, "kills": kills, "joined": watch.joined, "restarts": watch.restarts},
        **{"made_again": watch.again, "seconds": [round(wait, 2) for wait in waits]},
        **{"bits": watch.bits, "text": "".join(watch.text[-60:])},
    }


def undisturbed(steps: int) -> tuple[int, str]:
    """(steps, bits) of one process with one device."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, os.path.abspath(__file__), "--worker", "0", "--max-steps", str(steps)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    watch = Watch()
    watch.read(done.stdout.splitlines())
    if 0 not in watch.bits:
        raise SystemExit(done.stderr)
    return watch.bits[0]


def main() -> int:
    """Run both, compare, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one kill to the next, at least")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--output", help="a file for the numbers, as JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--max-steps", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker, args.max_steps)
        return 0
    seconds, processes = (20.0, 2) if args.quick else (args.seconds, args.processes)
    found = disturbed(seconds, args.every, processes, args.devices)
    text = found.pop("text")
    if found["status"] or not found["bits"]:
        print(text)
        return 1
    steps = next(iter(found["bits"].values()))[0]
    same = {bits for _, bits in found["bits"].values()} | {undisturbed(steps)[1]}
    waits = sorted(found["seconds"]) or [float("nan")]
    report = {**found, "steps": steps, "equal": len(same) == 1, "median": statistics.median(waits), "worst": waits[-1]}
    print(
        f"{steps} steps, {found['kills']} kills, {found['joined']} joined again, {found['restarts']} restarts; "
        f"from a kill to the next step {report['median']:.1f} s, at worst {report['worst']:.1f} s; "
        f"bits {'equal' if report['equal'] else 'DIFFER'}: {' '.join(sorted(same))}"
    )
    if args.output:
        with open(args.output, "w") as file:
            json.dump(report, file, indent=1)
    return 0 if report["equal"] and not found["restarts"] else 1


if __name__ == "__main__":
    sys.exit(main())
