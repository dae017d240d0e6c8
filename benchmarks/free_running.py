"""LeNet on Fashion-MNIST by workers that never wait: free-running servers on Ray, with and without a killed worker.

Every worker draws its own batches of 64, pulls, computes a gradient and pushes it; SGD with a learning rate of 0.05,
which moves the parameters by four pushes as far as one step of 256 at 0.2. The work is three epochs in all, shared
evenly by the workers; what a killed one had left to do is not done by others.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from _harness import arguments, environment, save, saved, show

from jaxpar import data, free_running, train
from jaxpar.models import lenet

LEARNING_RATE, BATCH, EPOCHS, WORKERS, SERVERS = 0.05, 64, 3, 3, 2


def worker_of(examples: data.Dataset, pushes: int, batch: int) -> Callable[[free_running.Worker], int]:
    """What each worker does: the function that is sent to it, with its data."""

    def work(worker: free_running.Worker) -> int:
        loss_fn = train.classification_loss(lenet.apply)
        gradient = jax.jit(jax.grad(lambda params, batch: loss_fn(params, batch, None)[0]))
        rng = np.random.default_rng(worker.index)
        for _ in range(pushes):
            chosen = rng.integers(0, len(examples.labels), batch)
            images = {"image": examples.images[chosen].astype(np.float32) / 255, "label": examples.labels[chosen]}
            worker.push(gradient(worker.pull(), images))
        return pushes

    return work


def trained(examples: data.Dataset, pushes: int, batch: int, kill: bool) -> dict[str, Any]:
    """Trains, with one worker killed when it has done half of its work, and says how it went."""
    servers = free_running.start(
        lenet.init(jax.random.key(0)), optimizer=optax.sgd(LEARNING_RATE), servers=SERVERS, split=50_000
    )
    start = time.perf_counter()
    running = free_running.run(worker_of(examples, pushes, batch), servers, workers=WORKERS)
    while kill:
        if free_running.status(servers)[0]["pushes"].get(1, 0) >= pushes // 2:
            os.kill(running.pids[1], signal.SIGKILL)
            break
        time.sleep(0.2)
    outcome = free_running.finish(running)
    seconds = time.perf_counter() - start
    status = free_running.status(servers)[0]
    params = free_running.Worker(servers).pull()
    free_running.stop(servers)
    count, staleness = sum(status["pushes"].values()), status["staleness"]
    return {
        "params": params,
        "pushes": status["pushes"],
        "lost": outcome.lost,
        "staleness": staleness,
        "mean_staleness": round(sum(s * n for s, n in staleness.items()) / count, 3),
        "images_per_second": round(count * batch / seconds),
    }


def main() -> None:
    options = arguments("LeNet by workers that never wait; --rounds is the number of runs of each row.", 1, 0)
    try:
        import ray
    except ImportError:
        print('no Ray: it is not installed in this environment; pip install "jaxpar[ray]" adds it')
        return
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=512 << 20)
    train_data, test_data = data.load("fashion_mnist", "train"), data.load("fashion_mnist", "test")
    pushes = 12 if options.quick else len(train_data.labels) * EPOCHS // (BATCH * WORKERS)
    report = {"environment": environment() | {"ray": ray.__version__}, "source": train_data.source, "rows": {}}
    report["rows"] = saved(options, "free_running").get("rows", {})
    for name in options.rows or ("3 workers", "3 workers, 1 killed"):
        for _ in range(options.rounds):
            found = trained(train_data, pushes, BATCH, "killed" in name)
            found |= train.evaluate(found.pop("params"), lenet.apply, test_data, batch_size=1000)
            report["rows"].setdefault(name, []).append(found)
            save(options, "free_running", report)
    header = ("workers", "test accuracy", "pushes of each", "mean staleness", "images/s")
    show(header, [(name, *cells(found)) for name, rows in report["rows"].items() for found in rows])
    ray.shutdown()


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    pushes = ", ".join(str(n) for _, n in sorted(found["pushes"].items()))
    return f"{found['accuracy']:.4f}", pushes, f"{found['mean_staleness']:.2f}", f"{found['images_per_second']:,}"


if __name__ == "__main__":
    main()
