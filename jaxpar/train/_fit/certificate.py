"""The certificate of a run: a file of JSON lines with a hash of the state after every `certificate_every` steps.

{"certificate": 1, "jax": "0.12.0", "jaxpar": "0.3.0", "processor": "x86_64 ...", "platform": "cpu", ...,
 "run": {"model": ..., "data": ..., "seed": ..., "start": [0, "8100..."], "every": 100, ...}}
{"step": 100, "state": "85ffc70354b8bc7642208128a38005f1", "leaves": "x5Z1...", "shards": "5Sg0...", "gradient": ...}
{"left_out": 137}

The hash of the state says whether a step is right. The others, 24 bits each, say where it is wrong: those of the leaves
of the state; with virtual shards those of what each shard adds, and of the sums of the leaves of the gradient; and
where not each step has a line, that of the params `before` the step.
A step that made no update has a line of its own, which may come before its turn.
"""

from __future__ import annotations

import base64
import collections
import json
import os
import platform
import sys
from collections.abc import Callable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ... import checkpoint
from ..._core import files
from ..._core.arrays import PyTree
from ..._devices import mesh, processes
from .._callbacks.loggers import explain_errors
from .._step.state import TrainState
from .._step.train_step import TrainStep
from .._step.virtual import ShardHashes
from .compile_cache import cpu_info
from .identity import describe, differences
from .progress import Metrics

if TYPE_CHECKING:
    from .run import Run

_NUMBER = 1  # of the format
_PARTS = "leaves", "shards", "gradient", "before"
_FOR_DEVICES = ("devices", "processes", "engine", "kind")  # with virtual shards they do not change bits
_VECTORS = ("avx512f", "avx2", "avx", "sve", "asimd")


Entry = dict[str, Any]  # a line about a step
_OfShards = tuple[checkpoint._StateHash | None, ShardHashes]


class Certificate:
    """The lines of a certificate, which the devices may still compute. Every process computes them."""

    def __init__(self, every: int, write: Callable[[Entry], Any], close: Callable[[], None] = lambda: None):
        self.every, self._write, self._close = every, write, close
        self._unwritten: collections.deque[tuple[int, checkpoint._StateHash, _OfShards | None]] = collections.deque()
        self._of_shards: tuple[int, _OfShards | None] = 0, None
        self.names: dict[str, list[str]] = {}  # of the hashes of the leaves and of the gradient

    def is_due(self, step: int) -> bool:
        """Whether there is a line after this step."""
        return step % self.every == 0

    def make_step(self, number: int, step: TrainStep, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """A step for which there is a line, with hashes of its virtual shards for `take`."""
        if step.virtual_shards is None:
            return step(state, batch)
        # A shard that differs is at fault if it was given the right params, which the line of the step before says too.
        before = None if self.every == 1 else checkpoint._StateHash((state.store.values, state.model_state))
        state, metrics, hashes = step._with_hashes(state, batch)
        self._of_shards = number, (before, hashes)
        return state, metrics

    def take(self, step: int, state: TrainState) -> None:
        """Start to compute the hash of a state, if a line is due after this step."""
        if self.is_due(step):
            number, of_shards = self._of_shards
            self._unwritten.append((step, checkpoint._StateHash(state), of_shards if number == step else None))

    def write(self, until: int) -> None:
        """Write the lines up to a step. Waits for their hashes."""
        while self._unwritten and self._unwritten[0][0] <= until:
            step, state, of_shards = self._unwritten.popleft()
            entry = {"step": step, "state": str(state), "leaves": _short(state.sums)}
            self.names["leaves"] = [record["name"] for record in state.records]
            if of_shards is not None:
                before, hashes = of_shards
                if before is not None:
                    entry["before"] = _short(before.sums.sum(axis=0, dtype=np.uint32)[None])
                self.names["gradient"] = list(hashes.names)
                of_slots = np.asarray(mesh.to_host(hashes.of_slots))[: hashes.count]
                entry["shards"] = _short(of_slots.sum(axis=1, dtype=np.uint32))
                entry["gradient"] = _short(np.asarray(hashes.sums))
            self._write(entry)

    def leave_out(self, step: int) -> None:
        """Say that a step makes no update."""
        self._write({"left_out": step})

    def go_back(self, step: int) -> None:
        """Write the hashes up to a step, and forget those of later steps."""
        self.write(step)
        self._unwritten.clear()

    def close(self) -> None:
        """Let another run write the file."""
        self._close()


def begin(run: Run, state: TrainState, left_out: Set[int]) -> Certificate | None:
    """The certificate of a run, created or continued after the step of `state`. None where it has none.

    It says of the steps `left_out` that they make no update.

    `ValueError` for the file of another run, or of one whose bits may differ from those of this run, for a file that
    lacks a line, and for other content. `OSError` while another run writes it.
    """
    # Every process computes the hashes, since those of split arrays are sums over their devices, and process 0 writes
    # them. So all must have the same settings.
    path, header = run.certificate, None
    if path is not None:
        about = {**describe(run, state), "every": run.certificate_every}
        header = {**header_of(run.step, state), "run": about}
    processes.agree("fit: certificate= needs the same settings in all processes", json.dumps(header))
    if path is None or header is None:
        return None
    # Two runs of the same settings may begin with other params: the hash of the first state tells them apart.
    header["run"]["start"] = [int(state.step), str(checkpoint._StateHash(state))]
    lock = checkpoint._DirectoryLock(path.parent, path)
    with processes.raise_together():
        if jax.process_index() == 0:
            try:
                with explain_errors(path, "the certificate"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    lock.acquire()
                    _begin(path, header, int(state.step), left_out)
            except BaseException:
                lock.release()
                raise

    def write(entry: Entry) -> None:
        if jax.process_index() == 0:
            with explain_errors(path, "the certificate"):
                files.append(path, _line(entry).encode())

    return Certificate(run.certificate_every, write, lock.release)


def _begin(path: Path, header: dict[str, Any], at: int, left_out: Set[int]) -> None:
    """Drop the lines of steps after `at`, because the run repeats them."""
    content = b""
    if path.exists():
        with files.opened(path) as file:
            content = file.read()

    lines: dict[int, Entry] = {}
    if content:
        # Is it the file of this run? An earlier jaxpar did not write which run it is. Where two begin at other steps,
        # their first states cannot be compared.
        before, lines = parse(content[: content.rfind(b"\n") + 1], path)  # a crash may have cut the last line
        why, run_before, run_now = difference(before, header), before.get("run"), header["run"]
        if not why and run_before is not None:
            names = [name for name in run_now if name != "start" and name in run_before]
            if run_before["start"][0] == run_now["start"][0]:
                names.append("start")
            why = differences(run_before, run_now, names)
        if why:
            raise ValueError(f"fit: certificate {path} is from another run ({why}); give another file, or delete it")

        # Does it have each line up to here? A step in between could not be verified.
        if run_before is not None:
            start, every = run_before["start"][0], run_before["every"]
            expected = range(start - start % every + every, at + 1, every)
            if hole := next((step for step in expected if step not in lines), None):
                raise ValueError(
                    f"fit: certificate {path} has no line of step {hole}, and this run goes on after step {at}; give "
                    "another file, which begins there"
                )

        # The run goes on, so its header stays. One that begins before all lines of the file has its own.
        if run_before is None or run_before["start"][0] <= at:
            header = before

    # The lines up to here, and which steps make no update: those of the file may be of steps that are repeated.
    header = {name: value for name, value in header.items() if name != "left_out"}
    entries = [entry for step, entry in lines.items() if step <= at]
    text = "".join(map(_line, [header, *entries, *({"left_out": step} for step in sorted(left_out))]))
    files.replace(path, text.encode())  # also an equal one, to see that it can be written


def _line(entry: Entry) -> str:
    return json.dumps(entry) + "\n"


def _short(sums: np.ndarray) -> str:
    """24 bits of each of several hashes, as four characters."""
    # They only say which of many is wrong, where the hash of the state has said that one is.
    low = np.ascontiguousarray(sums[:, 0], "<u4").view(np.uint8).reshape(-1, 4)[:, :3]
    return base64.b64encode(low.tobytes()).decode()


def which_differ(a: Entry, b: Entry, name: str) -> list[int] | None:
    """The numbers of the hashes of this name that differ. None if they are not in both."""
    in_a, in_b = a.get(name), b.get(name)
    if in_a is None or in_b is None or len(in_a) != len(in_b):
        return None
    return [i for i in range(len(in_a) // 4) if in_a[4 * i : 4 * i + 4] != in_b[4 * i : 4 * i + 4]]


def header_of(step: object, state: TrainState) -> dict[str, Any]:
    """The settings that determine the bits of a run, as far as they are known."""
    devices = state.store.devices or tuple(jax.devices())
    # The make of the processor that computes. Of a CPU with its widest vectors, in whose order XLA adds.
    processor = devices[0].device_kind
    if devices[0].platform == "cpu":
        about = cpu_info()
        features = set(about.get("flags", about.get("Features", "")).split())
        vectors = next((name for name in _VECTORS if name in features), "")
        model = about.get("model name") or platform.processor()
        processor = " ".join(filter(None, (platform.machine(), model, vectors)))
    return {
        **{"certificate": _NUMBER, "jax": jax.__version__, "jaxpar": sys.modules["jaxpar"].__version__},
        **{"processor": processor, "platform": devices[0].platform, "devices": len(devices)},
        **{"processes": len({d.process_index for d in devices})},
        **{"virtual_shards": getattr(step, "virtual_shards", None), "engine": getattr(step, "engine", "own")},
        **{"kind": state.store.kind},
    }


def difference(header: dict[str, Any], other: dict[str, Any]) -> str:
    """Why the bits of two runs may differ, in words. "" if they must be equal."""
    ignored = ("run", "left_out") if header.get("virtual_shards") is None else ("run", "left_out", *_FOR_DEVICES)
    names = [name for name in other if name not in ignored and header.get(name) != other[name]]
    return "; ".join(f"{name.replace('_', ' ')}: {header.get(name)} in the file, {other[name]} now" for name in names)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[int, Entry]]:
    """The header and the lines of a certificate. `ValueError` where it cannot be read."""
    try:
        return parse(files.as_path(path, "the certificate").read_bytes(), path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def parse(content: bytes, path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[int, Entry]]:
    """The header of a certificate, and the line of each of its steps. `ValueError` for other content.

    The header has the numbers of the steps that made no update as `left_out`, if there are any.
    """
    header: dict[str, Any] = {}
    lines: dict[int, Entry] = {}
    last = 0
    text = content.decode("utf-8", "replace")
    if text and not text.endswith("\n"):
        raise ValueError(f"{path}: line {text.count(chr(10)) + 1} is incomplete")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
            if number == 1:
                header, is_good = entry, entry["certificate"] == _NUMBER
                if (run := entry.get("run")) is not None:  # an earlier jaxpar did not write which run it is
                    first, state, every = *run["start"], run["every"]
                    is_good = is_good and type(first) is int and isinstance(state, str)
                    is_good = is_good and type(every) is int and every > 0
            elif "left_out" in entry:
                is_good = type(entry["left_out"]) is int and entry["left_out"] > 0
                header["left_out"] = [*header.get("left_out", []), entry["left_out"]]
            else:
                step, state = entry["step"], entry["state"]
                is_good = type(step) is int and step > last and isinstance(state, str)
                is_good = is_good and all(isinstance(entry.get(name, ""), str) for name in _PARTS)
                lines[step], last = entry, step
        except (ValueError, KeyError, TypeError, RecursionError):
            is_good = False
        if not is_good:
            what = "is not the header of a certificate" if number == 1 else "is not the hash of a later step"
            raise ValueError(f"{path}: line {number} {what}; give the file that fit(certificate=...) wrote")
    if not header:
        raise ValueError(f"{path} is empty; give the file that fit(certificate=...) wrote")
    return header, lines
