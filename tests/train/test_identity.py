"""Which run a call of `fit` is: options that mean the same are described alike, and others are not."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import train
from jaxpar.train._fit.identity import describe

TABLES = {"users": np.ones((8, 4), np.float32), "items": np.ones((8, 4), np.float32), "w": np.ones(3, np.float32)}
BATCH = {"user": np.arange(8), "item": np.arange(8)}
TX = optax.adam(1e-2)


def loss_fn(params, batch):
    return (params["users"][batch["user"]] * params["items"][batch["item"]]).mean() + params["w"].sum()


def described(**options):
    state, step = train.start(TABLES, TX, loss_fn, **options)
    return describe(types.SimpleNamespace(step=step, data_digest="0", batch_size=8), state)


ALIKE = {
    "several tables": [{"row_sparse": "users|items"}, {"row_sparse": ["items", "users"]}, {"row_sparse": "*s"}],
    "no tables": [{}, {"row_sparse": ()}],
    "frozen": [
        {"frozen": "users|items"},
        {"frozen": ["items", "users"]},
        {"frozen": lambda name, leaf: name[-1] == "s"},
    ],
    "record": [{"record": ("lr", "grad_norm")}, {"record": ["grad_norm", "lr"]}],
    "a dtype": [{"compute_dtype": each} for each in (jnp.bfloat16, "bfloat16", np.dtype("bfloat16"))],
    "a count": [{"accumulate": 2}, {"accumulate": np.int64(2)}],
    "virtual shards": [{"virtual_shards": 2}, {"virtual_shards": np.int32(2)}],
    "a loss scale": [{"loss_scale": "dynamic"}, {"loss_scale": train.DynamicLossScale(2**15, np.int64(2000), 2)}],
    "no remat": [{}, {"remat": None}],
    "a seed": [{"rng": 3}, {"rng": jax.random.key(3)}],
    "where": [{}, {"engine": "pmap"}, {"devices": jax.devices()[:1]}, {"kind": "sharded"}],
}
OTHERS = (
    {"row_sparse": "users"},
    {"frozen": "users"},
    {"record": "lr"},
    {"compute_dtype": jnp.float16},
    {"accumulate": 4},
    {"loss_scale": 8.0},
    {"rng": 4},
    {"compression": {"type": "2bit"}},
    {"compression": {"type": "2bit", "threshold": 0.1}},
    {"kind": "dist_async", "staleness": 2},
)


@pytest.mark.parametrize("name", ALIKE)
def test_options_that_mean_the_same_are_described_alike(name):
    first, *others = (described(**options) for options in ALIKE[name])
    assert all(other == first for other in others)


def test_other_options_are_described_otherwise():
    found = [described(**options) for options in ({}, *OTHERS)]
    assert [i for i, about in enumerate(found) if about in found[:i]] == []


def test_a_run_is_opened_by_another_writing_of_its_tables(tmp_path):
    def started(tables):
        return train.start(TABLES, TX, loss_fn, devices=jax.devices()[:1], row_sparse=tables)

    options = {"epochs": 1, "batch_size": 8, "progress": False}
    train.fit(*started("users|items"), BATCH, checkpoint_dir=tmp_path, **options)
    run = train.open(tmp_path, started(["items", "users"])[1], BATCH)
    assert int(run.at(1).step) == 1
    other = started("users")[1]
    with pytest.raises(ValueError, match="the options of the step differs"):
        train.open(tmp_path, other, BATCH)
