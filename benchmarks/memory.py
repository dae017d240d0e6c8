"""What a process keeps of each `fit` with a new loss and a new optimizer, beside the same by plain JAX.

    python benchmarks/memory.py                300 of each, in a process of their own
    python benchmarks/memory.py fit --times 50
    python benchmarks/memory.py fit --clear    with jax.clear_caches() before each row of the table

One round of `fit` makes a loss, an optimizer and a state that no other has, trains, and drops them all. It compiles one
program, a loop over steps. One of `plain` is that loop by `jax.jit`, and one of `steps` the step of jaxpar without
`fit`. The table shows, after `gc.collect()`, what the process holds: MiB as they are and after `malloc_trim`,
the arrays and programs that are alive, the objects of Python, and how many programs were compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import data, kv, train

ROWS = 10  # of the table
POINTS = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
SET = data.Dataset(POINTS, (POINTS[:, 0] > 0).astype(np.int32))
COMPILED = [0]


def new_loss(number: int) -> Any:
    """A function that no other call has seen, with a constant of its own."""
    return lambda params, batch, rng: (
        optax.softmax_cross_entropy_with_integer_labels(
            batch["image"] @ params["w"] + params["b"] * (1 + number), batch["label"]
        ).mean(),
        {},
    )


def parameters() -> dict[str, jax.Array]:
    return {"w": jnp.zeros((8, 2)), "b": jnp.zeros(2)}


def started(number: int, devices: int) -> tuple[Any, Any]:
    store = kv.from_params(parameters(), optimizer=optax.adam(0.01 + number * 1e-6))
    state = train.create_state(store, number, devices=jax.devices()[:devices])
    return state, train.make_train_step(new_loss(number))


def fit(number: int, devices: int) -> None:
    state, step = started(number, devices)
    train.fit(state, step, SET, epochs=2, batch_size=16, progress=False)


def steps(number: int, devices: int) -> None:
    state, step = started(number, devices)
    for _ in range(8):
        state, _ = step(state, {"image": POINTS[:16], "label": SET.labels[:16]})
    jax.block_until_ready(state)


def plain(number: int, devices: int) -> None:
    loss_fn, tx = new_loss(number), optax.adam(0.01 + number * 1e-6)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, "data")))

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        found, grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, None)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), found

    @jax.jit
    def several(carry: Any, batches: Any) -> Any:
        return lax.scan(step, carry, batches)

    carry = jax.device_put((params := parameters(), tx.init(params)), whole)
    images, labels = POINTS.reshape(4, 16, 8), np.asarray(SET.labels).reshape(4, 16)
    batches = jax.device_put({"image": images, "label": labels}, split)
    for _ in range(2):
        carry, _ = several(carry, batches)
    jax.block_until_ready(carry)


WORK = {"fit": fit, "steps": steps, "plain": plain}


def held(clear: bool) -> dict[str, float]:
    gc.collect()
    if clear:
        jax.clear_caches()
        gc.collect()
    rss = resident()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return {
        "MiB": rss,
        "trimmed": resident(),
        "arrays": len(jax.live_arrays()),
        "programs": len(jax.devices()[0].client.live_executables()),
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
        "compiled": COMPILED[0],
    }


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def count_compilations(event: str, seconds: float, **about: Any) -> None:
    COMPILED[0] += event.endswith("backend_compile_duration")


def measure(name: str, options: argparse.Namespace) -> None:
    jax.monitoring.register_event_duration_secs_listener(count_compilations)
    print(f"{name}, {options.devices} devices, jax {jax.__version__}, Python {sys.version.split()[0]}")
    rows, every = list[dict[str, float]](), max(1, options.times // ROWS)
    for number in range(1, options.times + 1):
        WORK[name](number, options.devices)
        if number % every == 0:
            rows.append(held(options.clear))
            if len(rows) == 1:
                print("rounds  " + "  ".join(f"{each:>8}" for each in rows[0]))
            print(f"{number:6}  " + "  ".join(f"{value:8.0f}" for value in rows[-1].values()), flush=True)
    half = rows[len(rows) // 2 - 1 :]
    for first, last, words in ((rows[0], half[0], "first"), (half[0], half[-1], "second")):
        rounds = (last["compiled"] - first["compiled"]) / max(1, COMPILED[0] / options.times)
        kib = 1024 * (last["trimmed"] - first["trimmed"])
        objects = last["objects"] - first["objects"]
        print(f"{words} half: {kib / rounds:.0f} KiB and {objects / rounds:.1f} objects a round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", choices=[[], *WORK], help="these only")
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--clear", action="store_true", help="jax.clear_caches() before each row")
    options = parser.parse_args()
    if len(options.work) == 1:
        return measure(options.work[0], options)
    for name in options.work or WORK:  # each in a process of its own
        words = [name, f"--times={options.times}", f"--devices={options.devices}", *["--clear"] * options.clear]
        subprocess.run([sys.executable, __file__, *words], check=True)


if __name__ == "__main__":
    main()
