"""Checkpoints that an earlier jaxpar wrote go on to restore, to the bit, with records and callbacks' memories.

`XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/checkpoint/test_written_checkpoints.py NAME` writes
those of the jaxpar at hand to written/NAME.tar.gz, on as many devices as the tests have.
"""

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import data, train, updaters

WRITTEN = Path(__file__).parent / "written"
TREE = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
CASES = {
    "device": {},
    "local": {"kind": "local", "optimizer": TREE},
    "sharded": {"kind": "sharded"},
    "sharded_tree": {"kind": "sharded", "optimizer": TREE},
    "dist_sync": {"kind": "dist_sync"},
    "dist_async": {"kind": "dist_async", "staleness": 2},
    "key": {"optimizer": updaters.mxnet_adam(0.05)},
    "key_sharded": {"kind": "sharded", "optimizer": updaters.mxnet_sgd(0.05, momentum=0.9)},
    "2bit": {"compression": {"type": "2bit", "threshold": 0.1}},
    "int8_sharded": {"kind": "sharded", "compression": {"type": "int8"}},
    "transform": {"grad_transform": optax.clip_by_global_norm(0.5)},
    "scaled": {"loss_scale": "dynamic", "nonfinite": "skip"},
    "local_steps": {"local_steps": 2, "outer_optimizer": optax.sgd(0.7, momentum=0.9)},
    "virtual": {"virtual_shards": 4},
}


class Counter:
    """A callback whose memory has arrays of several dtypes. `seen` are the memories that it was called with."""

    def __init__(self):
        self.seen = []

    def init(self, state):
        return {"count": jnp.zeros((), jnp.int32), "half": np.zeros(3, np.float16), "word": "none", "number": 0.1}

    def on_epoch(self, memory, state, record):
        self.seen.append(memory)
        half = memory["half"] + np.float16(0.1)
        return {"count": memory["count"] + 3, "half": half, "word": "some", "number": memory["number"] / 3}, False


def loss_fn(params, batch, rng):
    hidden = jax.nn.relu(batch["image"] @ params["a"] + params["b"][None])
    hidden = hidden * jax.random.bernoulli(rng, 0.9, hidden.shape)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(hidden @ params["c"], batch["label"])
    return losses.mean(), {"accuracy": ((hidden @ params["c"]).argmax(1) == batch["label"]).mean()}


def start(optimizer=None, **options):
    """A fresh state of a case, and the step."""
    numbers = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(numbers.standard_normal(shape), jnp.float32)  # noqa: E731
    params = {"a": normal(6, 10), "b": jnp.zeros(10), "c": normal(10, 3)}
    state, step = train.start(params, optimizer or optax.adam(0.05), loss_fn, rng=7, **options)
    return step.complete(state), step


def run(folder, case, epochs):
    """The state, the history and the counter after `epochs`, counted from the beginning."""
    state, step = start(**CASES[case])
    numbers = np.random.default_rng(1)
    examples = data.Dataset(numbers.standard_normal((32, 6)).astype(np.float32), np.arange(32) % 3)
    counter = Counter()
    callbacks = [train.EarlyStopping("loss", patience=5), counter]
    options = {"batch_size": 16, "callbacks": callbacks, "progress": False, "checkpoint_dir": folder}
    state, history = train.fit(state, step, examples, epochs=epochs, **options)
    return state, history, counter


def facts(state, history):
    """What has to be equal, as JSON: the bits of each array, and the losses."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        value = np.asarray(leaf)
        arrays[jax.tree_util.keystr(path)] = [str(value.dtype), list(value.shape), value.tobytes().hex()]
    return {"arrays": arrays, "losses": [record["loss"] for record in history]}


@pytest.fixture(scope="module", params=sorted(file.name for file in WRITTEN.glob("*.tar.gz")))
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(WRITTEN / request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case", [c if c in ("device", "2bit") else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_what_was_written_restores_to_the_bit(written, case):
    expected = json.loads((written / f"{case}.json").read_text())
    state, history, _ = run(written / case, case, 1)  # nothing is left to train
    assert facts(state, history) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["device", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_run_goes_on_from_what_was_written(written, tmp_path, case):
    shutil.copytree(written / case, tmp_path / case)
    _, history, counter = run(tmp_path / case, case, 2)
    assert [record["loss"] for record in history][:1] == json.loads((written / f"{case}.json").read_text())["losses"]
    assert len(history) == 2
    (memory,) = counter.seen
    assert memory["count"] == 3
    assert memory["count"].dtype == jnp.int32
    assert memory["half"].tolist() == [np.float16(0.1)] * 3
    assert memory["half"].dtype == np.float16
    assert (memory["word"], memory["number"]) == ("some", 0.1 / 3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            result = facts(*run(Path(folder) / name, name, 1)[:2])
            (Path(folder) / f"{name}.json").write_text(json.dumps(result))
        WRITTEN.mkdir(exist_ok=True)
        with tarfile.open(WRITTEN / f"{sys.argv[1]}.tar.gz", "w:gz") as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.add(path, path.name)
