"""Calls with NumPy's arrays where the user disallows implicit transfers: what jaxpar is given it places explicitly."""

import jax
import numpy as np
import optax
import pytest
from world import apply, mostly_slow

from jaxpar import data, kv, train

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
DATA = data.Dataset(X, np.zeros(32, np.int32))
BATCH = {"image": X[:8], "label": np.zeros(8, np.int32)}
VALUE = np.ones((3, 2), np.float32)
TX = optax.adam(0.1)


@pytest.fixture
def guarded():
    with jax.transfer_guard("disallow"):
        yield


def loss_fn(params, batch, rng):
    return ((batch["image"] @ params["w"]) ** 2).mean(), {}


STEPS = {engine: train.make_train_step(loss_fn, engine=engine) for engine in ("pmap", "shard_map", "jit")}


def start(kind="device"):
    store = kv.from_params({"w": np.ones((4, 3), np.float32)}, kind=kind, optimizer=TX)
    return train.create_state(store, 0, devices=jax.devices()[:2])


KINDS = ("device", "local", "sharded", "dist_sync", "dist_async")
COMBINATIONS = [
    (kind, engine) for kind in KINDS for engine in STEPS if engine != "jit" or kind not in ("local", "dist_async")
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "engine"), COMBINATIONS)
@pytest.mark.usefixtures("guarded")
def test_training(kind, engine, tmp_path):
    step = STEPS[engine]
    state = start(kind)
    for _ in range(2):
        state, metrics = step(state, BATCH)
    assert np.isfinite(jax.device_get(metrics["loss"]))
    options = {"batch_size": 8, "progress": False, "test_data": DATA, "apply_fn": apply}
    for epochs in (1, 2):
        state, history = train.fit(start(kind), step, DATA, epochs=epochs, checkpoint_dir=tmp_path, **options)
    assert len(history) == 2
    assert train.evaluate(state, apply, DATA, batch_size=8)["loss"] > 0
    assert train.predict(state, apply, X[:13], batch_size=8).shape == (13, 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("train_data", [{"image": X, "label": DATA.labels}, [BATCH] * 3, DATA], ids=type)
@pytest.mark.usefixtures("guarded")
def test_sources(train_data):
    _, history = train.fit(start(), STEPS["pmap"], train_data, epochs=1, batch_size=8, progress=False)
    assert np.isfinite(history[0]["loss"])
    batches = DATA.batches(8, devices=jax.devices()[:2], resident=False, rng=np.zeros(2, np.uint32))
    assert len(list(data.prefetch([BATCH] * 2))) == 2
    assert len(list(batches)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(KINDS, "device", "sharded"))
@pytest.mark.usefixtures("guarded")
def test_verbs_of_a_store(kind):
    store = kv.create(kind, devices=jax.devices()[:2] if kind == "sharded" else None)
    store = kv.init(store, [0, 1], [VALUE, VALUE])
    store = kv.push(store, 0, [VALUE, VALUE])
    store, _ = kv.pushpull(kv.set_optimizer(store, TX), [0, 1], [[VALUE] * 2] * 2)
    store = kv.flush(kv.set_gradient_compression(store, {"type": "2bit"}))
    store = kv.push(store, 0, [VALUE, VALUE])
    store, _ = kv.broadcast(store, 5, VALUE)
    assert jax.device_get(kv.pull(store, 5)).tolist() == VALUE.tolist()
    assert len(kv.pull(store, [0, 1], devices=jax.devices()[:2])[0]) == 2


def test_a_guard_of_explicit_transfers_stays():
    with jax.transfer_guard_host_to_device("disallow_explicit"), pytest.raises(RuntimeError, match="Disallowed"):
        kv.init(kv.create(), 0, VALUE)


def test_the_guard_is_there_again_after_a_call():
    with jax.transfer_guard_host_to_device("disallow"):
        kv.init(kv.create(), 0, VALUE)
        with pytest.raises(RuntimeError, match="Disallowed"):
            jax.jit(lambda x: x + 1)(VALUE)
