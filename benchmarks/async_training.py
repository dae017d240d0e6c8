"""What is lost and what is saved where a step does not wait for the others: LeNet on Fashion-MNIST, 4 devices.

Each row trains the same network from the same parameters on the same batches in the same order, with SGD of one
learning rate: `dist_sync`, `dist_async` of several stalenesses, and local steps with and without an outer
optimizer. At the end nothing is left waiting (`step.finish`), and the accuracy is that on the 10,000 test images.

Bytes are read from the compiled program: what each device sends in a step by the ring algorithm, all collectives
together, those of a round of local steps divided by its length. Time is not measured: emulated devices share one
memory, so nothing here says how much faster a cluster would be.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses
import statistics
from typing import Any

import _hlo
import jax
import numpy as np
import optax
from _harness import arguments, environment, save, saved, show

from jaxpar import data, kv, train
from jaxpar.models import lenet

LEARNING_RATE, BATCH, EPOCHS = 0.2, 256, 3
SGD = optax.sgd(LEARNING_RATE)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)  # DiLoCo's
loss_fn = train.classification_loss(lenet.apply)


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to train: the options of the store and of the step."""

    store: dict[str, Any]
    step: dict[str, Any] = dataclasses.field(default_factory=dict)


ROWS = {
    "dist_sync": Row({"kind": "dist_sync"}),
    **{f"dist_async, staleness {n}": Row({"kind": "dist_async", "staleness": n}) for n in (1, 2, 4)},
    **{f"local_steps {n}": Row({"kind": "dist_sync"}, {"local_steps": n}) for n in (4, 16)},
    **{
        f"local_steps {n}, outer Nesterov": Row({"kind": "dist_sync"}, {"local_steps": n, "outer_optimizer": NESTEROV})
        for n in (4, 16)
    },
}


def begun(row: Row, seed: int) -> tuple[train.TrainState, train.TrainStep]:
    store = kv.from_params(lenet.init(jax.random.key(seed)), optimizer=SGD, **row.store)
    state = train.create_state(store, seed, devices=jax.devices()[:4])
    return state, train.make_train_step(loss_fn, **row.step)


def trained(row: Row, seed: int, sets: tuple[data.Dataset, data.Dataset], batch: int, epochs: int) -> dict[str, float]:
    """Loss (ln 10 = 2.3026 is that of a network that knows nothing) and accuracy on the test images."""
    state, step = begun(row, seed)
    state, _ = train.fit(state, step, sets[0], epochs=epochs, batch_size=batch, progress=False)
    return train.evaluate(step.finish(state), lenet.apply, sets[1], batch_size=1000)


def bytes_sent(row: Row, batch: int) -> float:
    """Bytes that each device sends in a step, a mean over the steps of a round."""
    state, step = begun(row, 0)
    images = {"image": np.zeros((batch, 28, 28, 1), np.float32), "label": np.zeros(batch, np.int32)}
    text = step.lower(state, images).compile().as_text()
    branches, _, every_step = text.partition("\nENTRY ")  # what ends a round stands in a branch of its own
    both = [sum(_hlo.sent(c, 4) for c in _hlo.collectives(part, 4)) for part in (every_step, branches)]
    return both[0] + both[1] / row.step.get("local_steps", 1)


def sets(quick: bool) -> tuple[data.Dataset, data.Dataset]:
    if not quick:
        return data.load("fashion_mnist", "train"), data.load("fashion_mnist", "test")
    rng = np.random.default_rng(0)
    few = data.Dataset(rng.integers(0, 256, (32, 28, 28, 1), np.uint8), rng.integers(0, 10, 32).astype(np.int32))
    return few, few


def main() -> None:
    options = arguments("Accuracy and bytes of training that does not wait; --rounds is the number of seeds.", 1, 0)
    batch, epochs = (8, 1) if options.quick else (BATCH, EPOCHS)
    both = sets(options.quick)
    report = {
        "environment": environment(),
        "source": both[0].source,
        "batch": batch,
        "epochs": epochs,
        "learning_rate": LEARNING_RATE,
        "rows": saved(options, "async_training").get("rows", {}),
    }
    for seed in range(options.rounds):
        for name in options.rows or ROWS:
            row = ROWS[name]
            found = report["rows"].setdefault(name, {"test": {}})
            found["bytes_a_step"] = round(bytes_sent(row, batch))
            found["test"][str(seed)] = scores = trained(row, seed, both, batch, epochs)
            print(f"{name}, seed {seed}: loss {scores['loss']:.4f}, accuracy {scores['accuracy']:.4f}", flush=True)
            save(options, "async_training", report)
    rows = []
    for name, found in report["rows"].items():
        scores = list(found["test"].values())
        accuracy, loss = ([s[what] for s in scores if what in s] for what in ("accuracy", "loss"))
        means = (f"{statistics.mean(x):.4f}" if x else "" for x in (accuracy, loss))
        rows.append((name, *means, str(len(scores)), f"{found['bytes_a_step']:,}"))
    show(("way", "test accuracy", "test loss", "seeds", "bytes a device sends in a step"), rows)


if __name__ == "__main__":
    main()
