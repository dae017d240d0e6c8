"""What `virtual_shards` costs: seconds of a step with it over seconds of the plain step, in turns in one process.

    python benchmarks/virtual_shards.py [--rounds 20] [--batch 528]

LeNet, by number of emulated CPU devices. Each ratio is the median over rounds, in each of which both steps are
timed one after the other, so that the load of the machine falls on both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax

from jaxpar import kv, models, train
from jaxpar._devices.mesh import split_over

PLACES = ((8, 8), (4, 4), (2, 2), (1, 1), (2, 8), (1, 8), (3, 8))  # devices, V


def start(devices: int) -> train.TrainState:
    store = kv.from_params(models.lenet.init(jax.random.key(0)), optimizer=optax.sgd(0.1))
    return train.create_state(store, 0, devices=jax.devices()[:devices])


def timed(step: Any, state: Any, batch: Any, steps: int) -> tuple[Any, float]:
    begin = time.perf_counter()
    for _ in range(steps):
        state, metrics = step(state, batch)
    metrics["loss"].block_until_ready()
    jax.block_until_ready(state.store.values)
    return state, (time.perf_counter() - begin) / steps


def ratio(devices: int, shards: int, size: int, rounds: int) -> tuple[float, float]:
    """(median of the ratios, seconds of the plain step)."""
    loss = train.classification_loss(models.lenet.apply)
    numbers = np.random.default_rng(0)
    batch = {
        "image": numbers.uniform(size=(size, 28, 28, 1)).astype(np.float32),
        "label": numbers.integers(0, 10, size).astype(np.int32),
    }
    if size % devices == 0:
        batch = jax.device_put(batch, split_over(tuple(jax.devices()[:devices])))
    plain, virtual = train.make_train_step(loss), train.make_train_step(loss, virtual_shards=shards)
    one, other = start(devices), start(devices)
    one, other = timed(plain, one, batch, 2)[0], timed(virtual, other, batch, 2)[0]
    ratios, seconds = [], []
    for _ in range(rounds):
        one, a = timed(plain, one, batch, 2)
        other, b = timed(virtual, other, batch, 2)
        ratios.append(b / a)
        seconds.append(a)
    return statistics.median(ratios), statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=528, help="examples, a multiple of 48")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, LeNet, batch {args.batch}, {args.rounds} rounds")
    print("| devices | V | plain step, ms | with virtual shards |")
    print("|---|---|---|---|")
    for devices, shards in PLACES:
        found, seconds = ratio(devices, shards, args.batch, args.rounds)
        print(f"| {devices} | {shards} | {1000 * seconds:.1f} | ×{found:.2f} |", flush=True)


if __name__ == "__main__":
    main()
