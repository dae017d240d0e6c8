"""LeNet in an elastic run: processes are killed every few seconds and join again, and others are stopped.

Four processes with three emulated devices each, under `python -m jaxpar launch --elastic`. The time begins with the
first step, and the run ends with the first epoch after the time and the returns. Then one process with one device
makes as many steps, undisturbed, and the certificates are compared: hashes of the state after every 10 steps. A
process is killed where at least two that compute are left. Each tenth kill may hit one that still starts. Each third
event is a stop (SIGSTOP) of up to 3 seconds of any process, the first and the launcher too. `seconds` are from a kill
to the end of the next step of process 0, apart where others were still starting, and where the victim was.

    python benchmarks/elastic.py --seconds 300 --every 5
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from _harness import environment

EXAMPLES, BATCH, SHARDS = 2304, 96, 12  # four processes with 3 devices each divide them, and so do fewer
PAUSE = 0.2  # seconds after each step, so that on two cores the processes that start get a turn
GOAL = 7.0  # seconds from a kill to the next step, on an idle machine


def worker(over: str, max_steps: int, certificate: str) -> None:
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

    def on_step(number: int, metrics: Any) -> None:
        print(f"STEP {number} {time.time()}", flush=True)
        time.sleep(0 if max_steps else PAUSE)

    state, history = train.fit(
        state,
        step,
        examples,
        epochs=None if max_steps else 1 << 20,
        max_steps=max_steps or None,
        batch_size=BATCH,
        progress=False,
        certificate=certificate,
        certificate_every=10,
        callbacks=lambda state, record: not max_steps and os.path.exists(over),
        on_step=on_step,
    )
    print(f"END {rank} {int(state.step)} {history[-1]['loss']!r}", flush=True)


class Lines:
    """What a process prints, line by line. A copy with times goes to a file."""

    def __init__(self, pipe: Any, log: str | None):
        self._pipe, self._log, self.queue = pipe, log, queue.SimpleQueue[str]()
        self.thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        with open(self._log or os.devnull, "w", buffering=1) as log:
            for line in self._pipe:
                log.write(f"{time.time():.2f} {line}")
                self.queue.put(line)

    def get(self) -> list[str]:
        found: list[str] = []
        while not self.queue.empty():
            found.append(self.queue.get())
        return found


class Watch:
    """What the lines of a run tell."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}  # of the processes that have called `initialize` and were not killed
        self.inside: set[int] = set()  # those that compute, as process 0 says
        self.ends: dict[int, tuple[int, str]] = {}  # steps and loss
        self.first_step = self.last_step = 0.0
        self.joined, self.restarts, self.again = 0, 0, 0
        self.text: list[str] = []

    def read(self, lines: list[str]) -> None:
        for line in lines:
            self.text.append(line)
            if found := re.search(r"PID (\d+) (\d+)", line):
                self.pids[int(found[1])] = int(found[2])
            elif found := re.search(r"STEP (\d+) ([\d.]+)", line):
                self.last_step = float(found[2])
                if not self.first_step:  # process 0 has waited for all
                    self.first_step, self.inside = self.last_step, set(self.pids)
            elif found := re.search(r"END (\d+) (\d+) ([\d.e-]+)", line):
                self.ends[int(found[1])] = int(found[2]), found[3]
            elif found := re.search(r"process ([\d, ]+) joins? ", line):
                ranks = set(map(int, found[1].split(", ")))
                self.inside |= ranks
                self.joined += len(ranks)
            self.restarts += "restart " in line
            self.again += "repeat it" in line


class Killer:
    """Kills a random process except the first every few seconds, where two that compute are left, or stops one.

    Args:
        launcher: its process number.
    """

    def __init__(self, every: float, launcher: int):
        self.every, self._choice, self._next, self._launcher = every, random.Random(0), 0.0, launcher
        self.kills, self.stops, self._under_way, self._stopped = 0, 0, "", (0, 0.0)
        self._at, self._back = 0.0, dict[int, float]()
        self.rejoins: list[float] = []
        self.waits: dict[str, list[float]] = {"others in": [], "others starting": [], "victim starting": []}

    def look(self, watch: Watch, processes: int) -> None:
        """Note the step after a kill, and kill the next one where it is time."""
        if self._under_way and watch.last_step > self._at:
            self.waits[self._under_way].append(round(watch.last_step - self._at, 2))
            self._under_way = ""
        for rank in [rank for rank in self._back if rank in watch.inside]:
            self.rejoins.append(round(time.time() - self._back.pop(rank), 1))
        if self._stopped[0] and time.time() > self._stopped[1]:
            self._signal(self._stopped[0], signal.SIGCONT)
            self._stopped = 0, 0.0
        if self._stopped[0]:
            return
        if self._under_way or not watch.first_step or time.time() < max(self._next, watch.first_step + self.every):
            return
        if (self.kills + self.stops) % 3 == 2:
            self._stop(watch)
            return
        victims = [rank for rank in watch.pids if rank in watch.inside - {0} and len(watch.inside) > 2]
        if self.kills % 10 == 9:
            victims += [rank for rank in watch.pids if rank not in watch.inside]
        if victims:
            self._kill(self._choice.choice(victims), watch, processes)

    @property
    def is_stopping(self) -> bool:
        """Whether a process is stopped and has to go on first."""
        return bool(self._stopped[0])

    def _stop(self, watch: Watch) -> None:
        """Stop any process for a while."""
        pid = self._choice.choice([*watch.pids.values(), self._launcher])
        if self._signal(pid, signal.SIGSTOP):
            self._stopped = pid, time.time() + self._choice.uniform(0.5, 3.0)
            self.stops, self._next = self.stops + 1, time.time() + self.every

    def _signal(self, pid: int, number: int) -> bool:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has ended, and another has not yet started
            return False
        return True

    def _kill(self, victim: int, watch: Watch, processes: int) -> None:
        others = len(watch.inside | {victim}) == processes
        computed = victim in watch.inside
        self._under_way = ("others in" if others else "others starting") if computed else "victim starting"
        if not self._signal(watch.pids.pop(victim), signal.SIGKILL):
            self._under_way = ""
            return
        watch.inside.discard(victim)
        self._at, self.kills = time.time(), self.kills + 1
        self._next, self._back[victim] = self._at + self.every, self._at


def disturbed(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The run with kills."""
    processes, over = args.processes, os.path.join(folder, "over")
    launch = [sys.executable, "-m", "jaxpar", "launch", "-n", str(processes), "--devices", str(args.devices)]
    certificate = os.path.join(folder, "disturbed.jsonl")
    worker = [os.path.abspath(__file__), "--worker", over, "--certificate", certificate]
    command = [*launch, "--elastic", "--", "python", *worker]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, watch, killer = Lines(run.stdout, args.log), Watch(), Killer(args.every, run.pid)
    lines.thread.start()
    while run.poll() is None:
        watch.read(lines.get())
        seconds = time.time() - watch.first_step if watch.first_step else 0.0
        events = killer.kills + killer.stops + watch.joined
        is_on = seconds < args.seconds or (events < args.events and seconds < args.most_seconds)
        if is_on or killer.is_stopping:
            killer.look(watch, processes)
        else:
            open(over, "w").close()
        time.sleep(0.02)
    lines.thread.join()
    watch.read(lines.get())
    return {
        **{"status": run.returncode, "minutes": round(seconds / 60, 1), "kills": killer.kills},
        **{"stops": killer.stops},
        **{"joined_again": watch.joined, "restarts": watch.restarts, "made_again": watch.again},
        **{"seconds": killer.waits, "seconds_to_join": killer.rejoins, "ends": watch.ends},
        "states": states_of(certificate),
        "text": "".join(watch.text[-60:]),
    }


def states_of(certificate: str) -> dict[int, str]:
    """The hash of each certified step."""
    if not os.path.exists(certificate):
        return {}
    with open(certificate) as file:
        return {line["step"]: line["state"] for line in map(json.loads, file) if "step" in line}


def undisturbed(steps: int, folder: str) -> dict[int, str]:
    """The hashes of one process with one device."""
    certificate = os.path.join(folder, "undisturbed.jsonl")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, os.path.abspath(__file__), "--worker", "", "--max-steps", str(steps)]
    done = subprocess.run(
        [*command, "--certificate", certificate], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return states_of(certificate)


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a script that kills processes: its own, and what all such scripts and their workers have."""
    parser.add_argument("--output", help="a file for the numbers, as JSON")
    parser.add_argument("--log", help="a file for what the processes print, with times")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--certificate", help=argparse.SUPPRESS)
    parser.add_argument("--max-steps", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run both, compare, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one event to the next, at least")
    parser.add_argument(
        "--events", type=int, default=0, help="the run goes on until there were so many kills, stops, joins"
    )
    parser.add_argument("--most-seconds", type=float, default=1500.0, help="but no longer than this")
    parser.add_argument("--processes", type=int, default=4)
    # Gloo takes each order of devices once. After some hundred events 2 devices a process have no new order left.
    parser.add_argument("--devices", type=int, default=3, help="of each process")
    args = arguments_of(parser)
    if args.worker is not None:
        worker(args.worker, args.max_steps, args.certificate)
        return 0
    if args.quick:
        args.seconds, args.processes = 20.0, 3
    with tempfile.TemporaryDirectory() as folder:
        found = disturbed(args, folder)
        text, states = found.pop("text"), found.pop("states")
        if found["status"] or not found["ends"]:
            print(text)
            return 1
        steps = next(iter(found["ends"].values()))[0]
        expected = undisturbed(steps, folder)
    differ = [step for step in expected if expected[step] != states.get(step)]
    is_equal = not differ and len(states) == len(expected) > 0 and len(set(found["ends"].values())) == 1
    waits = sorted(found["seconds"]["others in"] + found["seconds"]["others starting"]) or [float("nan")]
    report = {
        **found,
        "steps": steps,
        "certified": len(states),
        "equal": is_equal,
        "median": statistics.median(waits),
        "worst": waits[-1],
    }
    report["above_goal"] = sum(wait > GOAL for wait in waits)
    print(
        f"{steps} steps, {found['minutes']} minutes, {found['kills']} kills, {found['stops']} stops, "
        f"{found['joined_again']} joined again, "
        f"{found['restarts']} restarts; "
        f"from a kill to the next step {report['median']:.1f} s, at worst {report['worst']:.1f} s, "
        f"{report['above_goal']} of {len(waits)} above {GOAL:g} s; "
        f"{len(states)} certified states {'equal' if is_equal else f'DIFFER, first at step {differ[:1]}'}"
    )
    report["environment"] = {name: word for name, word in environment().items() if name not in ("torch", "mxnet")}
    if args.output:
        with open(args.output, "w") as file:
            json.dump(report, file, indent=1)
    return 0 if report["equal"] and not found["restarts"] else 1


if __name__ == "__main__":
    sys.exit(main())
