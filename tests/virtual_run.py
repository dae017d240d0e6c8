"""What each of several processes runs for tests/train/test_virtual_shards.py: `fit` with a step of virtual shards.

python virtual_run.py HOST:PORT PROCESSES PROCESS FOLDER
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import data, distributed, kv, train


def loss_fn(params, batch, rng):
    hidden = jax.nn.gelu(batch["image"] @ params["a"])
    hidden = hidden * jax.random.bernoulli(rng, 0.9, hidden.shape)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(hidden @ params["b"], batch["label"])
    return losses.mean(), {"accuracy": ((hidden @ params["b"]).argmax(1) == batch["label"]).mean()}


def main(address, processes, process, folder):
    if int(processes) > 1:
        distributed.initialize(address, int(processes), int(process))
    numbers = np.random.default_rng(0)
    given = data.Dataset(numbers.normal(size=(200, 300)).astype(np.float32), np.arange(200) % 5)
    params = {"a": jnp.asarray(numbers.normal(size=(300, 80)) * 0.1, jnp.float32), "b": jnp.zeros((80, 5))}
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
    step = train.make_train_step(loss_fn, virtual_shards=8)
    state = train.create_state(kv.from_params(params, kind="dist_sync", optimizer=tx), 7)
    certified = {"certificate": Path(folder) / "run.jsonl", "certificate_every": 1}
    state, history = train.fit(state, step, given, epochs=2, batch_size=64, progress=False, **certified)
    leaves = jax.tree.leaves((state.store.values, state.store.optimizer_state, state.step))
    found = {str(i): np.asarray(x.addressable_data(0)) for i, x in enumerate(leaves)}
    found["loss"] = np.array([record["loss"] for record in history])
    np.savez(Path(folder) / f"process{process}.npz", **found)
    split(params, tx, given, Path(folder))


def split(params, tx, given, folder):
    """A state of which each device has a part, certified and saved."""
    state = train.create_state(kv.from_params(params, kind="sharded", optimizer=tx), 7)
    step = train.make_train_step(loss_fn)
    certified = {"certificate": folder / "split.jsonl", "certificate_every": 2, "checkpoint_dir": folder / "split"}
    train.fit(state, step, given, epochs=2, batch_size=48, progress=False, **certified)


main(*sys.argv[1:])
