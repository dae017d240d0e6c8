"""What the benchmarks share: contenders that take turns, ratios pair by pair, a table, a JSON file.

A machine that other programs use as well is never equally fast twice. So the contenders of a row take turns in
short rounds (A B C A B C ...), a ratio is formed inside each round between two neighbours, and the median over
the rounds is what is reported. Absolute times are given for orientation only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MXNET_PYTHON = HERE.parent / ".venv-mxnet" / "bin" / "python"

Turn = Callable[[int], float]
"""`turn(repeats) -> seconds` for one repeat, the mean over that many."""


def timed(once: Callable[[], Any]) -> Turn:
    """A turn out of a function that does the work once and returns when it is done."""

    def turn(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            once()
        return (time.perf_counter() - start) / repeats

    return turn


def take_turns(
    contenders: Mapping[str, Turn], rounds: int, turn_seconds: float, most_seconds: float = 60
) -> dict[str, list[float]]:
    """Seconds for one repeat of each contender in each round.

    Every turn takes about `turn_seconds`, or one repeat where that is longer; it begins with one repeat that is
    not counted, since the caches hold what the one before left there. Where all rounds would take more than
    `most_seconds` there are fewer of them, but five at least.
    """
    once, repeats = {}, {}
    for name, turn in contenders.items():
        turn(2)
        once[name] = turn(2)
        repeats[name] = max(1, min(1000, round(turn_seconds / once[name])))
    a_round = sum((repeats[name] + 1) * seconds for name, seconds in once.items())
    rounds = min(rounds, max(5, int(most_seconds / a_round)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, turn in contenders.items():
            turn(1)
            times[name].append(turn(repeats[name]))
    return times


def ratio(times: Mapping[str, Sequence[float]], slower: str, faster: str) -> float:
    """How many times longer `slower` took: the median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(times[slower], times[faster], strict=True))


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


KEEP_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**63 - 1)}
"""What `use_cpu_devices(keep_memory=True)` does, for the environment of a child."""


class Child:
    """A peer that lives in another interpreter and measures on command, one JSON object a line each way."""

    version = "unknown"

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.pid = self._process.pid

    def ask(self, **request: Any) -> Any:
        """The answer to a request; `RuntimeError` with the child's words where it failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the peer failed: {answer['error']}")
        return answer["result"]

    def turn(self, name: str) -> Turn:
        """A turn of the contender `name` that an earlier request has set up."""
        return lambda repeats: self.ask(do="measure", name=name, repeats=repeats)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        if self._process.stdout is not None:
            self._process.stdout.close()


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """What a `Child` runs: the answer to each request, or what went wrong."""
    for line in sys.stdin:
        try:
            reply = {"result": answer(json.loads(line))}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), flush=True)


@contextlib.contextmanager
def one_core(*pids: int) -> Iterator[None]:
    """These processes, with all their threads, on one core while it lasts; `OSError` where the system has no such
    thing (it is Linux's).

    Threads that wait for one another all the time are woken faster on their own core than on another, idle one.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise OSError("this system cannot keep a process on one core")
    cores = os.sched_getaffinity(0)
    _keep_on(pids, {min(cores)})
    try:
        yield
    finally:
        _keep_on(pids, cores)


def _keep_on(pids: Iterable[int], cores: set[int]) -> None:
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended since
                os.sched_setaffinity(int(thread), cores)


def start_mxnet(python: str | None = None) -> Child | None:
    """MXNet's peer, or None, said in one line, where its environment does not exist."""
    found = python or os.environ.get("JAXPAR_MXNET_PYTHON") or str(MXNET_PYTHON)
    if shutil.which(found) is None:
        print(f"no MXNet: there is no {Path(found).name} in its environment; `make mxnet` builds it (Python 3.8)")
        return None
    child = Child([found, str(HERE / "_mxnet_peer.py")])
    try:
        child.version = child.ask(do="version")
    except (RuntimeError, ValueError) as error:
        print(f"no MXNet: {error}; `make mxnet` builds its environment (Python 3.8)")
        child.close()
        return None
    return child


def environment(mxnet: Child | None = None) -> dict[str, str]:
    """The machine in words, and the versions."""
    words = {
        "machine": f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} {platform.system()}",
        "python": platform.python_version(),
    }
    for package in ("jax", "jaxlib", "numpy", "optax", "flax", "torch"):
        try:
            words[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            words[package] = "not installed"
    words["mxnet"] = "not installed" if mxnet is None else mxnet.version
    return words


def arguments(description: str, rounds: int, turn_seconds: float, **flags: str) -> argparse.Namespace:
    """The command line that all benchmarks have, and flags of one, with what each does."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("rows", nargs="*", help="the rows to measure, by name (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few rounds: does it run at all?")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of turns (default {rounds})")
    parser.add_argument("--turn-seconds", type=float, default=turn_seconds, help="about how long a turn takes")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: results/, nothing with --quick)")
    parser.add_argument("--mxnet-python", help="the Python that has MXNet (default: .venv-mxnet, `make mxnet`)")
    parser.add_argument("--no-mxnet", action="store_true", help="leave MXNet out")
    for name, effect in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=effect)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.turn_seconds = min(options.rounds, 2), 0.001
    return options


def save(options: argparse.Namespace, name: str, report: Mapping[str, Any]) -> None:
    """The report as JSON, where the command line says."""
    path = _file(options, name)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def saved(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """What `save` wrote there before, or nothing."""
    path = _file(options, name)
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def _file(options: argparse.Namespace, name: str) -> Path | None:
    return options.output or (None if options.quick else HERE / "results" / f"{name}.json")


def show(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, aligned."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    print("\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]), flush=True)
