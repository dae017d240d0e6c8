"""Whether a process that trains for long stays as it is: memory, descriptors, threads, temporary files.

    python tools/soak.py                       half an hour
    python tools/soak.py --minutes 5 --only fit
    python tools/soak.py --only plain          the same compilations by plain JAX, without jaxpar

One process does in turn what a notebook of a long day does. Nothing that it makes is kept. A table shows what the
process holds. The exit status is 0 where the second half of the time added nothing, but for the 40 to 50 KB that jax
keeps of each compilation, as `--only plain` shows. Caches fill for some minutes, so give it ten or more.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import checkpoint, data, kv, train

ENGINES = ("pmap", "shard_map", "jit")
KINDS = ("device", "local", "sharded")
POINTS = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
SET = data.Dataset(POINTS, (POINTS[:, 0] > 0).astype(np.int32))
ROWS = 12  # of the table
MIB = 1 << 20
FLAT = 3.0  # MiB that the second half may add
FOR_EACH = 0.05  # MiB that it may add for each compilation
COMPILED = [0]  # how many programs jax has compiled


def parameters() -> dict[str, jax.Array]:
    return {"w": jnp.zeros((8, 2)), "b": jnp.zeros(2)}


def new_loss(number: int) -> Callable[..., Any]:
    """A function that no other call has seen, with a constant of its own."""

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        logits = batch["image"] @ params["w"] + params["b"] * (1 + number)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), {"accuracy": (logits.argmax(1) == batch["label"]).mean()}

    return loss_fn


def start(number: int, engine: str) -> Any:
    kind = "device" if engine == "jit" and KINDS[number % 3] == "local" else KINDS[number % 3]
    store = kv.from_params(parameters(), kind=kind, optimizer=optax.adam(0.01 + number * 1e-6))
    return train.create_state(store, number, devices=jax.devices()[:2])


def new_fit(number: int, source: Any = SET, **options: Any) -> Any:
    step_options = {name: options.pop(name) for name in ("nonfinite",) if name in options}
    step = train.make_train_step(new_loss(number), engine=ENGINES[number // 3 % 3], **step_options)
    return train.fit(
        start(number, step.engine), step, source, batch_size=16, progress=False, **{"epochs": 2, **options}
    )


def fit(number: int) -> None:
    """Train by a new loss and a new optimizer, with evaluation, checkpoints, metrics and a certificate, and resume."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"checkpoint_dir": Path(folder, "points"), "metrics_file": Path(folder, "metrics")}
        options |= {"certificate": Path(folder, "run"), "certificate_every": 3, "checkpoint_every": 3}
        options |= {"test_data": SET, "apply_fn": lambda params, images: images @ params["w"] + params["b"]}
        new_fit(number, **options)
        state, _ = new_fit(number, **options, epochs=3)
        checkpoint.save(Path(folder, "one"), state)
        checkpoint.restore(Path(folder, "one"), state)


def push(number: int) -> None:
    """Push values of shapes that change, to a new store."""
    shape = (1 + number % 3, 1 + number % 4)
    store = kv.init(kv.create(KINDS[number % 3]), 3, jnp.zeros(shape))
    for i in range(4):
        store = kv.push(store, 3, [jnp.full(shape, i, jnp.float32)] * 2)
    kv.pull(store, 3)


class Broken(Exception):
    pass


class Loader:
    """Batches, and an exception after three of them."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        for i in range(3):
            yield {"image": POINTS[:16] * i, "label": SET.labels[:16]}
        raise Broken


def fail(number: int) -> None:
    """Exceptions of a loader, a callback, a loss and a wrong argument."""

    def raises(*_: Any) -> None:
        raise Broken

    with contextlib.suppress(Broken):
        new_fit(number, Loader())
    with contextlib.suppress(Broken):
        new_fit(number, callbacks=raises)
    nan = {"image": np.full_like(POINTS, np.nan), "label": SET.labels}
    with contextlib.suppress(train.NonFiniteError):
        new_fit(number, nan, nonfinite="stop")
    with contextlib.suppress(TypeError):
        new_fit(number, epoks=3)


def interrupt(number: int) -> None:
    """Ctrl-C within a run, which goes on afterwards."""

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        new_fit(number, on_step=on_step, on_interrupt="raise", checkpoint_dir=folder)


def evaluate(number: int) -> None:
    """Evaluate and predict by new functions."""

    def eval_fn(params: Any, batch: Any) -> dict[str, Any]:
        return {"squares": (batch["image"] @ params["w"] + number).sum(1) ** 2}

    train.evaluate(parameters(), data=SET, eval_fn=eval_fn, batch_size=16)


def plain(number: int) -> None:
    """What `fit` compiles, by plain JAX: a step and an evaluation of a new loss and a new optimizer."""
    loss_fn, tx = new_loss(number), optax.adam(0.01 + number * 1e-6)
    batch = {"image": POINTS[:16], "label": SET.labels[:16]}

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        found, grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, found

    params = parameters()
    state = tx.init(params)
    for _ in range(8):
        params, state, loss = step(params, state, batch)
    jax.block_until_ready(loss)


WORK = {"fit": fit, "push": push, "fail": fail, "interrupt": interrupt, "evaluate": evaluate}


def held() -> dict[str, float]:
    """What the process holds."""
    rss = resident()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return {
        "compiled": COMPILED[0],
        "MiB": rss,
        "trimmed": resident(),
        "arrays": len(jax.live_arrays()),
        "programs": len(jax.devices()[0].client.live_executables()),
        "objects": len(gc.get_objects()),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "temporary": len(os.listdir(tempfile.gettempdir())),
    }


def count_compilations(event: str, seconds: float, **about: Any) -> None:
    COMPILED[0] += event.endswith("backend_compile_duration")


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--only", choices=[*WORK, "plain"], action="append", help="do this only; more than once")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    jax.monitoring.register_event_duration_secs_listener(count_compilations)
    work = {**WORK, "plain": plain}
    chosen = options.only or list(WORK)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        print("minutes  rounds  " + "  ".join(f"{name:>9}" for name in held()), flush=True)
        rows = soak([work[name] for name in chosen], 60 * options.minutes)
    return judge(rows)


def soak(work: list[Callable[[int], None]], seconds: float) -> list[tuple[int, dict[str, float]]]:
    """Work for so long. Return the rounds so far and what the process held, for each row of the table."""
    began, number, rows = time.monotonic(), 0, list[tuple[int, dict[str, float]]]()
    with open(os.devnull, "w") as nowhere:
        while (now := time.monotonic() - began) < seconds or len(rows) < ROWS:
            if number and now >= len(rows) * seconds / ROWS:
                rows.append((number, held()))
                shown = "  ".join(f"{value:9.0f}" for value in rows[-1][1].values())
                print(f"{now / 60:7.1f}  {number:6}  {shown}", flush=True)
            number += 1
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                for do in work:
                    do(number)
    return rows


def judge(rows: list[tuple[int, dict[str, float]]]) -> int:
    """Say what grew in the second half of the table. 1 where something did."""
    half = [held for _, held in rows[len(rows) // 2 :]]
    first, last = half[: len(half) // 2], half[len(half) // 2 :]
    compiled = half[-1]["compiled"] - half[0]["compiled"]
    may = {"trimmed": FLAT + FOR_EACH * compiled}
    grew = False
    for name in ("trimmed", "arrays", "programs", "files", "threads", "tasks", "temporary"):
        before = [held[name] for held in first]
        least = min(before) if name == "trimmed" else max(before)  # a thread of a pool comes and goes
        more = min(held[name] for held in last) - least
        if more > may.get(name, 0):
            grew = True
        if more > 0:
            print(f"{name} grew by {more:.1f}, of {may.get(name, 0):.1f} that it may, in {compiled:.0f} compilations")
    print("something grew" if grew else "flat")
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
