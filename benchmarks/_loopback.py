"""Sums and steps over several processes of this machine, timed; a child of `scale.py`, one of each process.

Command line: `_loopback.py port processes index rounds network ...`. Process 0 prints a JSON object:
seconds of each item in each round. All items take turns, and before each turn the processes meet.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_NUM_CPU_DEVICES"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from _hlo import collectives
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxpar as jp

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes of a sum; the first and the last are for the fit
REPEATS = 3
BATCH = {"lenet": 64, "mlp": 32}  # examples of each process
WIDTHS = (784, 1024, 1024, 10)  # mlp: 1.9 million parameters


def mlp_init(rng: Any) -> Any:
    pairs = list(itertools.pairwise(WIDTHS))
    keys = jax.random.split(rng, len(pairs))
    return [0.03 * jax.random.normal(k, pair) for k, pair in zip(keys, pairs, strict=True)]


def mlp_apply(params: Any, images: Any) -> Any:
    x = images.reshape(images.shape[0], -1)
    for w in params[:-1]:
        x = jax.nn.relu(x @ w)
    return x @ params[-1]


NETWORKS = {"lenet": (jp.models.lenet.init, jp.models.lenet.apply), "mlp": (mlp_init, mlp_apply)}


def over(devices: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("data",)), P("data"))


def global_array(sharding: NamedSharding, local: Any) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, local)


def summing(nbytes: int, body: Callable[[Any], Any]) -> Callable[[], None]:
    along = over(jax.devices())
    value = global_array(along, np.ones((1, nbytes // 4), np.float32))
    run = jax.jit(jax.shard_map(body, mesh=along.mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))

    def once() -> None:
        jax.block_until_ready(run(value))

    return once


def stepping(network: str, devices: Any, index: int) -> tuple[Callable[[], None], list[dict[str, int]]]:
    """The training step on these devices, and the collectives it was compiled to."""
    init, apply = NETWORKS[network]

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        del rng
        logits = apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), {}

    store = jp.kv.from_params(init(jax.random.key(0)), kind="device", optimizer=optax.sgd(1e-3))
    state = jp.train.create_state(store, 0, devices=devices)
    step = jp.train.make_train_step(loss_fn, engine="shard_map", devices=devices)
    rng = np.random.default_rng(index)
    images = rng.random((BATCH[network], 28, 28, 1), np.float32)
    labels = rng.integers(0, 10, BATCH[network], dtype=np.int32)
    batch = {"image": global_array(over(devices), images), "label": global_array(over(devices), labels)}
    text = step.lower(state, batch).compile().as_text()
    assert text is not None
    found = [{"bytes": round(c.nbytes), "arrays": c.arrays} for c in collectives(text, len(devices))]

    def once() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    return once, found


def main() -> None:
    port, processes, index, rounds = map(int, sys.argv[1:5])
    jp.distributed.initialize(f"localhost:{port}", processes, index)
    items: dict[str, Callable[[], None]] = {"nothing": summing(SIZES[0], lambda x: x + 1)}
    for size in SIZES:
        items[f"sum {size}"] = summing(size, lambda x: jax.lax.psum(x, "data"))
    sent = {}
    for network in sys.argv[5:]:
        items[f"{network} alone"], _ = stepping(network, jax.local_devices(), index)
        items[f"{network} together"], sent[network] = stepping(network, jax.devices(), index)
    seconds: dict[str, list[float]] = {name: [] for name in items}
    meet = items[f"sum {SIZES[0]}"]
    for turn in range(rounds + 1):
        for name, once in items.items():
            meet()
            start = time.perf_counter()
            for _ in range(REPEATS):
                once()
            if turn:  # the first one warms up
                seconds[name].append((time.perf_counter() - start) / REPEATS)
    meet()
    if index == 0:
        print(json.dumps({"seconds": seconds, "collectives": sent}), flush=True)


if __name__ == "__main__":
    main()
