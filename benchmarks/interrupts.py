"""Ctrl-C at random moments of `fit`, and the same call again: does it end in the bits of an undisturbed run?

    python benchmarks/interrupts.py --stops 300 --seed 0
    python benchmarks/interrupts.py --only "shard_map, 4 devices"

Each stop is a SIGINT to this very process, from another thread, at a moment drawn over the whole call or over its last
five steps, evaluation and save. The process is as a notebook's kernel: `fit` returns the state. One stop of five is
followed by a second one, which raises. Then the same call is made again: with `checkpoint_dir` by the state that came
back, or by a new one as a cell that is run again makes it; without, by the state that came back and `max_steps` for the
steps that are left. A third of the steps is compiled anew.

After that these must be those of the undisturbed run: every bit of the state; how often each example was trained on;
the history; the lines of the metrics file, of the log of all steps and of the certificate; the checkpoints, all of them
good, and no other file. The handlers of signals and the threads must be those of before.

The table shows where the stops fell. `lost` is a state that neither came back nor was an attribute of what was raised.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import checkpoint, kv, train

SIZE, BATCH, EPOCHS = 160, 16, 3
STEPS = SIZE // BATCH * EPOCHS
RNG = np.random.default_rng(0)
EXAMPLES = {"x": RNG.normal(size=(SIZE, 4)).astype(np.float32), "id": np.arange(SIZE)}
EXAMPLES["y"] = EXAMPLES["x"].sum(1)
COUNTED = optax.sgd(1.0)  # of how often each example was used
TX = optax.multi_transform({"w": optax.sgd(0.125, momentum=0.5), "seen": COUNTED}, {"w": "w", "seen": "seen"})
CASES = [
    f"{engine}, {count} devices, {where}"
    for engine, count in (("pmap", 1), ("pmap", 4), ("shard_map", 4), ("jit", 1), ("jit", 4))
    for where in ("checkpoints", "no checkpoints")
]


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    error = batch["x"] @ params["w"] - batch["y"] + 0.01 * jax.random.normal(rng)
    # Each use of an example adds one over the size of a batch to its number, exactly.
    return (error**2).mean() - params["seen"][batch["id"]].mean(), {"error": jnp.abs(error).mean()}


def scores(params: Any, batch: Any) -> Any:
    return {"error": jnp.abs(batch["x"] @ params["w"] - batch["y"])}


class Stop(threading.Thread):
    """Sends one signal, or two, after a time from its start or from a mark that the call passes."""

    def __init__(self, mark: str, after: float, twice: float | None):
        super().__init__(daemon=True)
        self.mark, self.after, self.twice = mark, after, twice
        self.passed, self.over = threading.Event(), False
        self.where = ""  # it fell

    def run(self) -> None:
        if self.mark != "call":
            self.passed.wait()
        time.sleep(self.after)
        if self.over:
            return
        self.where = place_of(sys._current_frames()[threading.main_thread().ident or 0])
        os.kill(os.getpid(), signal.SIGINT)
        if self.twice is not None:
            time.sleep(self.twice)
            if not self.over:
                os.kill(os.getpid(), signal.SIGINT)


NAMES = {
    **dict.fromkeys(("scores", "make_record"), "evaluation"),
    **dict.fromkeys(("save", "_save", "written"), "save"),
    **dict.fromkeys(("close", "on_end", "close_certificate"), "last save"),
    "finish_interrupted": "end",
    **dict.fromkeys(("resume", "check", "begin", "on_start", "identity", "_open"), "before the steps"),
    **dict.fromkeys(("after_record", "on_step", "write", "take"), "callbacks and logs"),
    "own_steps": "steps",
}


def place_of(frame: Any) -> str:
    """What `fit` does, by the functions that the main thread is in."""
    names = list[str]()
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    inner = names[: names.index("train")] if "train" in names else []
    for name in reversed(inner):
        if name in NAMES:
            return NAMES[name]
    if inner:
        return "steps" if "train_loop" in inner else "start or end of the call"
    return "start or end of the call" if "fit" in names else "outside of fit"


class Case:
    """One sort of run, undisturbed at first."""

    def __init__(self, name: str):
        engine, count, where = name.split(", ")
        self.engine, self.devices = engine, jax.devices()[: int(count.split()[0])]
        self.saves = where == "checkpoints"
        self.step = self.new_step()
        for _ in range(2):  # the first one compiles
            with tempfile.TemporaryDirectory() as folder:
                self.marks = {"call": time.perf_counter()}
                state, history = self.fit(Path(folder), self.step, self.start(), None)
                now = time.perf_counter()
                self.left = {mark: now - at for mark, at in self.marks.items()}  # seconds from each mark to the end
                self.whole = self.kept(Path(folder), state, history)

    def new_step(self) -> Any:
        return train.make_train_step(lambda *args: loss_fn(*args), engine=self.engine)

    def start(self) -> Any:
        params = {"w": jnp.zeros(4), "seen": jnp.zeros(SIZE)}
        return train.create_state(kv.from_params(params, optimizer=TX), 7, devices=self.devices)

    def fit(self, folder: Path, step: Any, state: Any, stop: Stop | None, **options: Any) -> Any:
        log = train.to_jsonl(folder / "steps.jsonl")

        def pass_mark(mark: str) -> None:
            self.marks.setdefault(mark, time.perf_counter())
            if stop is not None and stop.mark == mark:
                stop.passed.set()

        def on_step(number: int, metrics: Any) -> None:
            if number >= STEPS - 5:
                pass_mark("last five steps")
            log.on_step(number, metrics)

        def callback(state: Any, record: Any) -> None:
            if record["step"] == STEPS:
                pass_mark("last save")

        options = {"epochs": EPOCHS, **options}
        if self.saves:
            options |= {"checkpoint_dir": folder / "run", "checkpoint_every": 7}
        options |= {"eval_data": EXAMPLES, "eval_fn": scores, "metrics_file": folder / "metrics.jsonl"}
        options |= {"certificate": folder / "certificate", "certificate_every": 5, "batch_size": BATCH}
        return train.fit(state, step, EXAMPLES, on_step=on_step, callbacks=[log, callback], progress=False, **options)

    def kept(self, folder: Path, state: Any, history: Any) -> dict[str, Any]:
        """What a run leaves, without what the clock measured."""
        timed = ("seconds", "examples_per_second")
        plain = lambda rows: [{k: v for k, v in row.items() if k not in timed} for row in rows]  # noqa: E731
        lines = lambda path: [json.loads(line) for line in path.read_text().splitlines()]  # noqa: E731
        leaves = [
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in jax.tree.leaves(state)
        ]
        found: dict[str, Any] = {
            "state": [np.asarray(x).tobytes().hex() for x in leaves],
            "uses of each example": np.unique(np.asarray(state.params["seen"])).tolist(),
            "history": plain(history),
            "metrics file": plain(lines(folder / "metrics.jsonl")),
            "log of steps": sorted(row["step"] for row in lines(folder / "steps.jsonl")),
            "certificate": lines(folder / "certificate")[1:],
            "files": sorted(path.name for path in folder.iterdir()),
        }
        if self.saves:
            run = folder / "run"
            names = {path.name for path in run.iterdir()}
            steps = sorted(name for name in names if name.startswith("step_"))
            found["last checkpoint"] = steps[-1][:13]
            found["other files of the run"] = sorted(names - set(steps))
            manager = checkpoint.Manager(run)
            good, _ = manager.restore_latest(state) or (None, None)
            found["checkpoint"] = good is not None and same_bits(good, state)
            for name in steps:
                checkpoint.restore(run / name, state)
        return found


def same_bits(a: Any, b: Any) -> bool:
    as_arrays = lambda tree: [  # noqa: E731
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]
    return all(x.tobytes() == y.tobytes() for x, y in zip(as_arrays(a), as_arrays(b), strict=True))


def donated(state: Any) -> bool:
    return any(x.is_deleted() for x in jax.tree.leaves(state))


def stop_once(case: Case, draw: random.Random, count: collections.Counter[str]) -> list[str]:
    """One stop, the same call again, and what is wrong after it."""
    mark = draw.choice(["call", "call", "last five steps", "last save"])
    twice = draw.random() * 0.01 if draw.random() < 0.2 else None
    anew, fresh, way = draw.random() < 0.33, draw.random() < 0.5, draw.choice(["auto", 1])
    seconds = case.left[mark] * (1 + 2 * anew * (mark == "call"))
    stop = Stop(mark, 0.9 * draw.random() * seconds, twice)
    wrong = list[str]()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = set(threading.enumerate())
    unraisable = list[str]()
    sys.unraisablehook = lambda about: unraisable.append(f"{about.exc_type.__name__} ignored in {about.object!r:.80}")
    with tempfile.TemporaryDirectory() as name:
        folder, step = Path(name), case.new_step() if anew else case.step
        given, state, history, how = case.start(), None, None, "returned"
        inside = ""  # of which functions it was raised
        try:
            stop.start()
            state, history = case.fit(folder, step, given, stop, steps_per_execution=way)
            stop.over = True
            stop.join(5.0) if stop.passed.is_set() or mark == "call" else None
        except KeyboardInterrupt as error:
            stop.over = True
            how = "raised"
            if state is None:
                inside = " > ".join(entry.name for entry in traceback.extract_tb(error.__traceback__)[1:])
                state, history = getattr(error, "state", None), getattr(error, "history", None)
            else:
                how = "after"
        except BaseException as error:
            stop.over = True
            wrong.append(f"raised {error!r}")
            how = "raised"
            state = getattr(error, "state", None)
        at = int(state.step) if state is not None and not donated(state) else None
        where = stop.where or "it came too late"
        if where == "steps" and at is not None and at >= STEPS - 5:
            where = "last five steps"
        lost = state is None and donated(given)
        if lost and not case.saves:
            count[f"{where}|lost{' by the second' if twice is not None else ''}"] += 1
            if twice is None:
                wrong.append(f"the state is lost, raised in {inside}")
        count[f"{where}|{how}"] += 1
        if [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != handlers:
            wrong.append("handlers differ")
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
                signal.signal(number, handler)
        whole = at is None or (at == STEPS and how != "raised")
        # A call that raises assigns nothing: the cell has the state of before, and goes on from the checkpoint.
        same = given if state is None or (case.saves and how == "raised") else state
        again = case.start() if case.saves and fresh else same
        # The same call again.
        if case.saves and not (again is state and at == STEPS):
            state, history = case.fit(folder, step, again, None, steps_per_execution=way)
        elif not case.saves and not lost and (at is None or at < STEPS):
            left = STEPS - (at or 0)
            state, history = case.fit(folder, step, again, None, steps_per_execution=way, max_steps=left, epochs=None)
        if lost and not case.saves:
            return wrong
        found = case.kept(folder, state, history)
        for name, value in case.whole.items():
            if name == "files" and twice is not None and at == STEPS:
                continue  # a second signal may leave a lock, which the next run takes over
            if name in ("history", "metrics file", "log of steps") and not case.saves and not whole:
                continue  # of two runs
            if found[name] != value:
                wrong.append(f"{name}: {found[name]!r:.150} instead of {value!r:.150}")
    stop.passed.set()
    stop.join()
    gc.collect()
    end = time.monotonic() + 3
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < end:
        time.sleep(0.02)
    wrong += [f"thread {thread.name} is left" for thread in left]
    wrong += unraisable
    return [
        f"{each} [{where}, {how} in {inside}, at {at}, twice {twice}, way {way}, anew {anew}, fresh {fresh}]"
        for each in wrong
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases with this in their names")
    options = parser.parse_args()
    sys.ps1 = ">>> "  # as at a prompt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    draw, count, wrong = random.Random(options.seed), collections.Counter[str](), 0
    names = [name for name in CASES if options.only in name]
    cases = {name: Case(name) for name in names}
    errors = sys.stderr
    for number in range(options.stops):
        name = names[number % len(names)]
        with open(os.devnull, "w") as nowhere:
            out, sys.stdout, sys.stderr = sys.stdout, nowhere, nowhere
            try:
                found = stop_once(cases[name], draw, count)
            except BaseException as error:
                found = ["".join(traceback.format_exception(error))]
            finally:
                sys.stdout, sys.stderr = out, errors
        for each in found:
            print(f"stop {number}, {name}: {each}", flush=True)
        wrong += bool(found)
    kinds = sorted({key.partition("|")[2] for key in count})
    print(f"\njax {jax.__version__}, {options.stops} stops, seed {options.seed}")
    print(f"{'the stop fell':32}" + "".join(f"{kind:>20}" for kind in kinds))
    for place in sorted({key.partition("|")[0] for key in count}):
        print(f"{place:32}" + "".join(f"{count[f'{place}|{kind}']:20}" for kind in kinds))
    print(f"{wrong} of {options.stops} stops had something wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
