"""Seconds from the start of a process to the end of its first training step, and the memory this takes.

LeNet on Fashion-MNIST (random pixels where it is not installed), batch 256, one and four emulated devices. Every run
is a process of its own, started by this one, which also tells it when that was. The compilation cache is
`train.use_compilation_cache`: `off`; `cold`, an empty directory; `warm`, the same one again. Where programs can hang if
they start at once (`jaxpar/_devices/mesh.py`), `python -m jaxpar train` does without it, and so do the rows here.

`import` is Python, jax, jaxpar and the start of the devices; `data` reads the data set and gathers the first batch;
`compile` is XLA, or what it takes to load a program from the cache, in all stages together; `run` is a step that
follows the first one; `trace` is the rest, most of it Python that traces and lowers.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

GOAL = 5.0
CACHES = ("off", "cold", "warm")
PARTS = ("import", "data", "compile", "run", "trace")


class Stages:
    """Seconds of each stage, and how many of them XLA's compiler took."""

    def __init__(self, started: float):
        self._last = started
        self.seconds: dict[str, float] = {}
        self.compiling: dict[str, float] = {}
        self._compiling = 0.0

    def compiled(self, event: str, seconds: float, **about: Any) -> None:
        """A listener of `jax.monitoring`."""
        del about
        self._compiling += seconds if event == "/jax/core/compile/backend_compile_duration" else 0

    def end(self, stage: str) -> None:
        now = time.time()  # the only clock that this process shares with the one that started it
        self.seconds[stage], self._last = now - self._last, now
        self.compiling[stage], self._compiling = self._compiling, 0.0


def child(started: float, devices: int, batch: int, cache: str | None, examples: int | None) -> dict[str, Any]:
    """One run; `started` is the time at which its parent started it, `examples` asks for so many random ones."""
    stages = Stages(started)
    import jax
    import numpy as np
    import optax

    from jaxpar import data, kv, train
    from jaxpar._devices.mesh import can_hang
    from jaxpar.data import _load
    from jaxpar.models import lenet

    jax.monitoring.register_event_duration_secs_listener(stages.compiled)
    if cache is not None:
        train.use_compilation_cache(cache)
    chosen = jax.devices()[:devices]
    stages.end("import")
    if examples is None and _load.DEBIAN_DIR.exists():
        dataset = data.load("fashion_mnist", "train", verbose=False)
    else:
        rng, n = np.random.default_rng(0), examples or 60_000
        dataset = data.Dataset(rng.integers(0, 256, (n, 28, 28, 1), np.uint8), rng.integers(0, 10, n))
    batches = data.batches(dataset, batch, rng=jax.random.key(0), epochs=None, devices=chosen)
    first = jax.block_until_ready(next(batches))
    stages.end("data")
    store = kv.from_params(lenet.init(jax.random.key(0)), optimizer=optax.sgd(0.2))
    state = train.create_state(store, 0, devices=chosen)
    step = train.make_train_step(train.classification_loss(lenet.apply), devices=chosen)
    jax.block_until_ready(state)
    stages.end("state")
    state, metrics = jax.block_until_ready(step(state, first))
    stages.end("step")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    second = next(batches)
    jax.block_until_ready(second)
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(step(state, second))
    run = time.perf_counter() - start
    memory = step.lower(state, second).compile().memory_analysis()
    return {
        "seconds": split(stages, run),
        "stages": stages.seconds,
        "loss": float(metrics["loss"]),
        "source": dataset.source,
        "can_hang": can_hang(chosen),
        "peak_mb": peak / 1e6,
        "step_temp_mb": memory.temp_size_in_bytes / 1e6,
        "step_arguments_mb": memory.argument_size_in_bytes / 1e6,
    }


def split(stages: Stages, run: float) -> dict[str, float]:
    """The seconds by what was done; they add up to `total`."""
    found = {
        "total": sum(stages.seconds.values()),
        "import": stages.seconds["import"] - stages.compiling["import"],
        "data": stages.seconds["data"] - stages.compiling["data"],
        "compile": sum(stages.compiling.values()),
        "run": run,
    }
    found["trace"] = found["total"] - sum(found[part] for part in PARTS[:-1])
    return found


def run_child(devices: int, batch: int, cache: str | None, examples: int | None) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    env |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    asked = json.dumps([time.time(), devices, batch, cache, examples])
    command = [sys.executable, __file__, "child", asked]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def prepare() -> None:
    """Reads the data set once: the very first time it is written into TFDS's folder, which no run is to pay for."""
    from jaxpar import data
    from jaxpar.data import _load

    if _load.DEBIAN_DIR.exists():
        data.load("fashion_mnist", "train", verbose=False)


def measured(counts: list[int], rounds: int, batch: int, examples: int | None) -> dict[str, list[dict[str, Any]]]:
    """The runs of every row, the rows taking turns; each round has empty directories of its own."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for count in counts:
            with tempfile.TemporaryDirectory() as directory:
                for cache in CACHES:
                    row = f"{count} device{'s'[: count > 1]}, cache {cache}"
                    runs.setdefault(row, []).append(
                        run_child(count, batch, None if cache == "off" else directory, examples)
                    )
                    if runs[row][-1]["can_hang"]:
                        break
    return runs


def medians_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The same as one run, with the median of each number."""
    numbers = ("peak_mb", "step_temp_mb", "step_arguments_mb")
    return {
        "seconds": {k: round(statistics.median(r["seconds"][k] for r in runs), 3) for k in runs[0]["seconds"]},
        "all_seconds": [round(r["seconds"]["total"], 3) for r in runs],
        **{k: round(statistics.median(r[k] for r in runs), 2) for k in numbers},
        "source": runs[0]["source"],
        "can_hang": runs[0]["can_hang"],
    }


def main() -> None:
    from _harness import arguments, environment, save, show

    options = arguments("Seconds to the end of the first training step, and memory.", 5, 0)
    batch, examples = (8, 64) if options.quick else (256, None)
    counts = [1] if options.quick else [1, 4]
    rounds = 1 if options.quick else options.rounds
    if not options.quick:
        prepare()
    runs = measured(counts, rounds, batch, examples)
    rows = {row: medians_of(found) for row, found in runs.items()}
    slowest = max(row["seconds"]["total"] for row in rows.values())
    report = {"environment": environment(), "batch": batch, "rounds": rounds, "goal": GOAL, "rows": rows}
    header = (f"first step, batch {batch}", "total, s", *PARTS, "peak MB", "step: temporary MB", "arguments MB")
    show(header, [(name, *cells(row)) for name, row in rows.items()])
    for name in (name for name, row in rows.items() if row["can_hang"]):
        print(
            f"{name.split(',')[0]}: no compilation cache with this jax, whose programs can hang if they start at once"
        )
    print(f"the goal is {GOAL:.0f} s; the slowest row takes {slowest:.2f} s")
    save(options, "first_step", report)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    seconds = [f"{row['seconds'][part]:.2f}" for part in ("total", *PARTS)]
    return (*seconds, f"{row['peak_mb']:.0f}", f"{row['step_temp_mb']:.1f}", f"{row['step_arguments_mb']:.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(*json.loads(sys.argv[2]))))
    else:
        main()
