"""`record=`: the norms that a step reports, under every engine, kind and option, against their definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from world import line, mostly_slow, squares

from jaxpar import data, train, updaters

RATE = 0.25
NORMS = ("grad_norm", "update_norm")
EACH = (*NORMS, "grad_norms", "update_norms")
PARAMS = {"w": jnp.arange(3.0), "b": jnp.float32(0.5)}


def gradient(batch):
    return jax.tree.leaves(jax.jit(jax.grad(lambda p, b: squares(p, b, None)[0]))(PARAMS, batch))


def norm(leaves):
    return np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in leaves))


CASES = [
    {"engine": "pmap", "kind": "sharded", "accumulate": 2},
    {"engine": "jit", "nonfinite": "skip"},
    {"virtual_shards": 4},
    {"local_steps": 1},
    {"engine": "shard_map", "kind": "device", "loss_scale": "dynamic"},
    {"engine": "shard_map", "kind": "local", "unused": "skip"},
    {"engine": "jit", "kind": "sharded", "loss_scale": 8.0},
    {"mesh": True},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_norms_of_gradients_and_updates(options):
    where = {"devices": jax.devices()[:4]}
    if options.get("mesh"):
        where = {"mesh": jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])}
        where["sharding"] = jax.sharding.PartitionSpec()
    options = {name: value for name, value in options.items() if name != "mesh"}
    state, step = train.start(PARAMS, optax.sgd(RATE), squares, record=EACH, **where, **options)
    batch = line()
    want = norm(gradient(batch))
    if "local_steps" in options:  # the mean over the devices
        shares = [{name: x[i : i + 4] for name, x in batch.items()} for i in range(0, 16, 4)]
        want = np.mean([norm(gradient(share)) for share in shares])
    _, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], want, rtol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], RATE * want, rtol=1e-5)  # of local steps before they agree
    for i, name in enumerate(("b", "w")):
        want = norm([gradient(batch)[i]])
        if "local_steps" in options:
            want = np.mean([norm([gradient(share)[i]]) for share in shares])
        np.testing.assert_allclose(metrics[f"grad_norm/{name}"], want, rtol=1e-5)
        np.testing.assert_allclose(metrics[f"update_norm/{name}"], RATE * want, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, *mostly_slow([{"virtual_shards": 4}, {"engine": "jit"}, {"local_steps": 2}])])
def test_a_step_that_is_skipped_changes_nothing(options):
    state, step = train.start(PARAMS, optax.sgd(RATE), squares, record=EACH, nonfinite="skip", **options)
    batch = line()
    _, metrics = step(state, {**batch, "y": batch["y"] * np.nan})
    assert np.isnan(metrics["grad_norm"])
    assert metrics["update_norm"] == metrics["update_norm/b"] == metrics["update_norm/w"] == 0


@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_rows_are_part_of_the_norms(kind):
    """Each device has all summed rows, and in kind `sharded` a part of all else."""

    def loss_fn(params, batch):
        return jnp.mean(params["table"][batch["id"]] * batch["x"][:, None] * params["w"][None])

    params = {"table": jnp.arange(20.0).reshape(10, 2), "w": jnp.array([1.0, 2.0])}
    batch = {"id": np.array([1, 7, 7, 1, 3, 9, 1, 0]), "x": np.arange(8, dtype=np.float32)}
    of_table, of_w = jax.tree.leaves(jax.jit(jax.grad(loss_fn))(params, batch))
    want = norm([of_table, of_w])
    options = {"devices": jax.devices()[:4], "kind": kind, "row_sparse": "table"}
    state, step = train.start(params, optax.sgd(RATE), loss_fn, record=EACH, **options)
    _, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], want, rtol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], RATE * want, rtol=1e-5)
    for name, of_param in (("table", of_table), ("w", of_w)):
        np.testing.assert_allclose(metrics[f"grad_norm/{name}"], norm([of_param]), rtol=1e-5)
        np.testing.assert_allclose(metrics[f"update_norm/{name}"], RATE * norm([of_param]), rtol=1e-5)


def test_norms_are_in_the_records_and_before_the_transform():
    clip = optax.clip_by_global_norm(0.01)
    devices = jax.devices()[:2]
    options = {"record": NORMS, "grad_transform": clip, "devices": devices}
    state, step = train.start(PARAMS, optax.sgd(RATE), squares, frozen="b", **options)
    seen = []
    given = data.from_iterable([line()] * 2, steps_per_epoch=2)
    _, (record,) = train.fit(
        state, step, given, epochs=1, batch_size=16, progress=False, on_step=lambda n, metrics: seen.append(metrics)
    )
    np.testing.assert_allclose(seen[0]["grad_norm"], norm(gradient(line())[1:]), rtol=1e-5)  # of the trained ones
    np.testing.assert_allclose(seen[0]["update_norm"], RATE * 0.01, rtol=1e-4)
    np.testing.assert_allclose(record["grad_norm"], np.mean([each["grad_norm"] for each in seen]), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"kind": "sharded"}, *mostly_slow([{"virtual_shards": 4}, {"engine": "jit"}, {"local_steps": 1}])],
    ids=str,
)
def test_the_learning_rate_of_the_update(options):
    schedule = optax.linear_schedule(0.5, 0.0, 4)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    where = {"devices": jax.devices()[:4]}
    state, step = train.start(PARAMS, tx, squares, record=("lr", "update_norm", "grad_norm"), **where, **options)
    for n in range(3):
        state, metrics = step(state, line())
        np.testing.assert_allclose(metrics["lr"], schedule(n), rtol=1e-6)
        # It is the rate of this update, and of no other.
        np.testing.assert_allclose(metrics["update_norm"], schedule(n) * metrics["grad_norm"], rtol=1e-5)


def test_the_learning_rates_of_several_optimizers():
    rates = {"fast": 0.5, "slow": 0.125}
    txs = {name: optax.inject_hyperparams(optax.sgd)(learning_rate=rate) for name, rate in rates.items()}
    tx = optax.multi_transform(txs, {"w": "fast", "b": "slow"})
    state, step = train.start(PARAMS, tx, squares, record="lr")
    _, metrics = step(state, line())
    recorded = {name: float(x) for name, x in metrics.items() if name.startswith("lr")}
    assert recorded == {"lr/fast": 0.5, "lr/slow": 0.125}


def test_the_learning_rate_of_an_updater_with_a_state_for_each_key():
    state, step = train.start(PARAMS, updaters.mxnet_sgd(RATE, rate_in_state=True), squares, record="lr")
    state, metrics = step(state, line())
    assert metrics["lr"] == RATE
    one = updaters.set_learning_rate({0: state.store.updater_state[0]}, 0.5)
    state = dataclasses.replace(
        state, store=dataclasses.replace(state.store, updater_state=state.store.updater_state | one)
    )
    _, metrics = step(state, line())
    assert np.isnan(metrics["lr"])  # no number is the rate


def test_what_record_refuses():
    with pytest.raises(ValueError, match="unknown record 'rate'; known are lr, grad_norm, update_norm"):
        train.make_train_step(squares, record=("rate", "grad_norm"))
    for tx in (optax.adam(0.1), updaters.mxnet_sgd(optax.linear_schedule(0.5, 0.0, 4))):
        state, step = train.start(PARAMS, tx, squares, record="lr")
        with pytest.raises(
            ValueError, match="record='lr': the state of this optimizer has no learning rate; make it by"
        ):
            step(state, line())
        assert not state.step.is_deleted()
    own = lambda params, batch, rng: (squares(params, batch, rng)[0], {"grad_norm": 1.0})  # noqa: E731
    state, step = train.start(PARAMS, optax.sgd(RATE), own, record="grad_norm")
    with pytest.raises(ValueError, match="aux of loss_fn has 'grad_norm', which the step reports itself"):
        step(state, line())
