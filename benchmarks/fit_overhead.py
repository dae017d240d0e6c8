"""What `train.fit` costs on top of the bare step: LeNet steps in a loop, in `fit`, and with its progress bar.

The bare loop takes the epoch's shuffled batches, which lie on the devices before it begins, and waits at the end. One
takes a single batch again and again, which then lies in the processor's cache; one takes the batches as `data.batches`
makes them. `fit` does that, reads the metrics, keeps the history and draws the bar (onto a file that is thrown away).
They take turns.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import contextlib
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax
from _harness import arguments, environment, save, show

from jaxpar import data, kv, train
from jaxpar.models import lenet

BATCH = 256


def main() -> None:
    options = arguments("What fit costs on top of the bare step.", 7, 1)
    size, steps = (8, 4) if options.quick else (BATCH, 234)  # an epoch of Fashion-MNIST
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (size * steps, 28, 28, 1), dtype=np.uint8)
    dataset = data.Dataset(images, rng.integers(0, 10, size * steps, dtype=np.int32))
    devices = jax.devices()[:2]
    step = train.make_train_step(train.classification_loss(lenet.apply), devices=devices)

    def shuffled():
        return data.batches(dataset, size, rng=jax.random.key(0), devices=devices)

    ready = jax.block_until_ready(list(shuffled()))

    sgd = optax.sgd(0.1)  # one for all: a new one would be a new program to compile

    def fresh():
        store = kv.from_params(lenet.init(jax.random.key(0)), optimizer=sgd)
        return jax.block_until_ready(train.create_state(store, 0, devices=devices))

    def looped(batches) -> float:
        state = fresh()
        start = time.perf_counter()
        for batch in batches():
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    def fitted(progress: bool = False, **certified: Any) -> float:
        state = fresh()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            start = time.perf_counter()
            state, _ = train.fit(state, step, dataset, epochs=1, batch_size=size, progress=progress, **certified)
            jax.block_until_ready(state)
            return time.perf_counter() - start

    ways = {
        "bare step": lambda: looped(lambda: ready),
        "on one batch": lambda: looped(lambda: ready[:1] * steps),
        "with batches": lambda: looped(shuffled),
        "fit": fitted,
        "fit, progress": lambda: fitted(True),
        "fit, certificate": lambda: fitted(certificate=f"{folder}/run.jsonl", certificate_every=100),
    }
    times = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for way in ways.values():
            way()
        for _ in range(options.rounds):
            for name, way in ways.items():
                times[name].append(way())
    over = {n: statistics.median(t / b for t, b in zip(v, times["bare step"], strict=True)) for n, v in times.items()}
    ms = {name: 1e3 * statistics.median(values) / steps for name, values in times.items()}
    show(
        ("LeNet, batch " + str(size), "ms a step", "against the bare step"),
        [(n, f"{ms[n]:.2f}", f"{over[n]:.3f}x") for n in ways],
    )
    report = {"environment": environment(), "batch": size, "rounds": options.rounds, "ms": ms, "against_bare": over}
    save(options, "fit_overhead", report)


if __name__ == "__main__":
    main()
