"""Models that change a state of their own: batch norm, counters; averaged, carried, saved, evaluated."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import collectives_in
from test_definition import definition
from world import (
    IN_TURN,
    adam,
    close,
    line,
    mostly_slow,
    squares,
    start,
    steady,
    step_of,
    text_of,
    trained,
    update_of,
)

from jaxpar import checkpoint, data, kv, train

MOMENTUM = 0.9


FRESH = {"mean": jnp.zeros(3), "var": jnp.ones(3), "seen": jnp.int32(0)}


def normed(params, batch, rng, model_state):
    """A linear model behind a batch norm over the share. test_your_model.py has batch norms over all devices."""
    mean, var = batch["x"].mean(0), batch["x"].var(0)
    new = {
        "mean": MOMENTUM * model_state["mean"] + (1 - MOMENTUM) * mean,
        "var": MOMENTUM * model_state["var"] + (1 - MOMENTUM) * var,
        "seen": model_state["seen"] + 1,
    }
    x = (batch["x"] - mean[None]) / jnp.sqrt(var[None] + 1e-5)
    error = x @ params["w"] + params["b"] - batch["y"]
    return (error**2).mean(), {"error": jnp.abs(error).mean()}, new


@functools.cache
def oracle(steps, shares, parts=1):
    """Every share normed by itself, its running statistics averaged; `parts` microbatches in a row."""
    params, seen, rng = {"w": jnp.ones(3), "b": jnp.zeros(())}, FRESH, jax.random.key(7)
    state = adam().init(params)
    for i in range(steps):
        options = {"shares": shares, "accumulate": parts, "rng": rng, "step": i, "model_state": seen}
        grads, _, seen = definition(normed, params, line(16, seed=i), **options)
        params, state = update_of(adam())(grads, state, params)
    return params, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kind", "parts"),
    [*((*where, 1) for where in IN_TURN), ("pmap", "device", 2), ("shard_map", "sharded", 2)],
)
def test_running_statistics_are_means_over_the_devices(engine, kind, parts):
    step = step_of(normed, engine=engine, accumulate=parts)
    state, _ = trained(step, start(2, kind, adam(), model_state=FRESH), 3)
    params, want = oracle(3, 2, parts)
    close(state.params, params, rtol=1e-4)
    close(state.model_state, want, rtol=1e-4)
    assert (state.model_state["seen"].dtype, int(state.model_state["seen"])) == (jnp.int32, 3 * parts)


@pytest.mark.slow
def test_it_travels_with_the_metrics_and_is_donated(engine):
    state, batch = start(4, "device", adam(), model_state=FRESH), line()
    step = step_of(normed, engine=engine)
    text = step.lower(state, batch).compile().as_text()
    plain = text_of(4, "device", engine=engine)
    assert [name for name, _ in collectives_in(text)] == [name for name, _ in collectives_in(plain)]
    assert sum(n for _, n in collectives_in(text)) - sum(n for _, n in collectives_in(plain)) == 4 * 6
    head = text.splitlines()[0]
    assert head.count("may-alias") + head.count("must-alias") >= 2 * 3 + 2 + 3
    given = state.model_state
    state, _ = step(state, batch)
    assert all(leaf.is_deleted() for leaf in given.values())
    steady(step, state, [batch])


def test_two_networks_that_see_each_other():
    """Each is the model state of the other: the params of a store are copied, those of a state are its arrays."""

    def loss(params, batch, rng, other):
        return ((params["w"] - batch + other["w"]) ** 2).mean(), {}, other

    step = train.make_train_step(loss)
    params, tx = {"w": jnp.ones(())}, optax.sgd(0.25)
    one, two = (start(8, tx=tx, params=params, model_state=params) for _ in range(2))
    for _ in range(3):
        one, _ = step(one, jnp.ones(8))
        two, _ = step(dataclasses.replace(two, model_state=kv.to_params(one.store)), jnp.ones(8))
        one = dataclasses.replace(one, model_state=kv.to_params(two.store))
    assert (float(one.params["w"]), float(two.params["w"])) == (0.34375, 0.671875)  # w - (w + other - 1) / 2, in turns
    one = dataclasses.replace(one, model_state=two.params)
    step(two, jnp.ones(8))
    with pytest.raises(RuntimeError, match="this state shares the arrays in model_state with another"):
        step(one, jnp.ones(8))
    with pytest.raises(RuntimeError, match="this state was donated to a step"):
        step(two, jnp.ones(8))


def test_it_is_not_cast_but_may_be_narrow():
    seen = []

    def loss(params, batch, rng, model_state):
        seen.append((str(batch["x"].dtype), str(model_state["mean"].dtype), str(model_state["half"].dtype)))
        value, aux = squares(params, batch, rng)
        new = {"mean": model_state["mean"] + batch["x"].mean(), "half": model_state["half"] + jnp.float32(1)}
        return value, aux, new

    state = start(4, model_state={"mean": np.zeros((), np.float32), "half": jnp.zeros((), jnp.bfloat16)})
    state, _ = train.make_train_step(loss, compute_dtype=jnp.bfloat16)(state, line())
    assert seen == [("bfloat16", "float32", "bfloat16")]
    assert {k: str(v.dtype) for k, v in state.model_state.items()} == {"mean": "float32", "half": "bfloat16"}
    assert float(state.model_state["half"]) == 1.0
    np.testing.assert_allclose(state.model_state["mean"], line()["x"].mean(), atol=1e-2)


@pytest.mark.slow
def test_a_random_key_in_it_and_an_empty_one():
    def loss(params, batch, rng, model_state):
        value, aux = squares(params, batch, rng)
        return value, aux, {k: jax.random.split(v)[0] for k, v in model_state.items()}

    state, _ = train.make_train_step(loss, nonfinite="skip")(start(4, model_state={"rng": jax.random.key(5)}), line())
    assert state.model_state["rng"] == jax.random.split(jax.random.key(5))[0]
    state, _ = train.make_train_step(loss)(start(4, model_state={}), line())
    assert state.model_state == {}


# ---- random streams of the user's own

ROWS = 16
WAYS = [
    *({"engine": engine} for engine in ("pmap", "shard_map", "jit")),
    *({"engine": engine, "accumulate": 2} for engine in ("shard_map", "jit")),
    {"virtual_shards": 4, "devices": 4},
    {"virtual_shards": 4, "devices": 2},
    {"local_steps": 2},
    {"kind": "sharded", "nonfinite": "skip"},
    {"remat": True},
]


def streams(params, batch, rng, held):
    """Reports what each row drew, out of a stream with a count, as those of NNX, and out of a chain of keys."""
    chain, own = jax.random.split(held["chain"])
    keys = jax.random.fold_in(held["stream"], held["count"]), own
    draws = jnp.stack([jax.random.uniform(key, batch["row"].shape) for key in keys])
    report = jnp.zeros((2, ROWS)).at[:, batch["row"]].set(draws)
    new = {"chain": chain, "stream": held["stream"], "count": held["count"] + 1}
    return params["w"] * draws.mean(), {"drawn": report}, new


def drawn(steps, first=None, devices=4, **options):
    """What the rows drew in these steps, and the state after them."""
    held = {"chain": jax.random.key(1), "stream": jax.random.key(2), "count": jnp.uint32(0)}
    options |= {"devices": jax.devices()[:devices], "model_state": held}
    state, step = train.start({"w": jnp.ones(())}, optax.sgd(0.0), streams, **options)
    state, found = state if first is None else first, []
    parts = options.get("virtual_shards", devices) * options.get("accumulate", 1)
    for _ in range(steps):
        state, metrics = step(state, {"row": np.arange(ROWS)})
        found.append(np.asarray(metrics["drawn"]) * parts)  # each row is in one part, and the rest are zeros
    return np.stack(found) if found else None, state


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", mostly_slow(WAYS, WAYS[1], WAYS[2]), ids=str)
def test_no_two_rows_draw_the_same_of_a_stream_in_it(options):
    found, state = drawn(2, **options)
    assert len(np.unique(found.round(6))) == found.size
    held = state.model_state
    assert int(held["count"]) == 2 * options.get("accumulate", 1)
    assert held["stream"] == jax.random.key(2)
    chain = jax.random.key(1)
    for _ in range(int(held["count"])):
        chain = jax.random.split(chain)[0]
    assert held["chain"] == chain
    for key in (held["stream"], held["chain"]):
        assert len({np.asarray(shard.data).tobytes() for shard in jax.random.key_data(key).addressable_shards}) == 1
    # The rows of the first part draw what plain JAX draws, and all rows do on one device.
    part = ROWS // (4 * options.get("accumulate", 1))
    key = jax.random.fold_in(jax.random.key(2), 0)
    np.testing.assert_allclose(found[0, 0, :part], jax.random.uniform(key, (part,)), rtol=1e-6)


@pytest.mark.slow
def test_one_device_draws_what_plain_jax_draws():
    found, _ = drawn(2, devices=1)
    for count, rows in enumerate(found[:, 0]):
        key = jax.random.fold_in(jax.random.key(2), count)
        np.testing.assert_array_equal(rows, jax.random.uniform(key, (ROWS,)))


@pytest.mark.slow
def test_virtual_shards_draw_the_same_on_any_number_of_devices_also_resumed(tmp_path):
    found, _ = drawn(3, virtual_shards=4)
    first, state = drawn(1, virtual_shards=4, devices=2)
    checkpoint.save(tmp_path / "state", state)
    like = drawn(0, virtual_shards=4, devices=1)[1]
    rest, _ = drawn(2, checkpoint.restore(tmp_path / "state", like), virtual_shards=4, devices=1)
    np.testing.assert_array_equal(np.concatenate([first, rest]), found)


def test_a_raw_key_is_refused():
    """Nothing tells it from other integers, so all devices would draw the same."""
    with pytest.raises(TypeError, match=r"model_state\['key'\]: uint32\[2\] is a raw random key.*wrap_key_data"):
        start(4, model_state={"key": jax.random.PRNGKey(0)})
    start(4, model_state={"seen": jnp.zeros((), jnp.uint32), "both": jnp.zeros(2, jnp.int32)})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"engine": "shard_map"}, {"engine": "jit"}, {"virtual_shards": 4}], ids=str)
def test_a_state_and_a_metric_that_become_constants(options):
    """XLA's program for CPUs is read anew, and a constant result is a number of Python there."""
    before = {"seen": jnp.array(False), "steps": jnp.int32(0), "scale": jnp.float32(0), "half": jnp.bfloat16(0)}

    def loss(params, batch, rng, held):
        new = {"seen": jnp.array(True), "steps": jnp.int32(3), "scale": jnp.float32(0.5), "half": jnp.bfloat16(0.5)}
        return (params["w"] * batch).mean(), {"flag": jnp.array(True), "two": jnp.float32(2)}, new

    state, step = train.start(
        {"w": jnp.ones(())}, optax.sgd(0.1), loss, devices=jax.devices()[:4], model_state=before, **options
    )
    for _ in range(2):
        state, metrics = step(state, np.ones(4, np.float32))
    assert {k: (x.dtype, x.item()) for k, x in state.model_state.items()} == {
        **{"seen": (np.bool_, True), "steps": (np.int32, 3)},
        **{"scale": (np.float32, 0.5), "half": (jnp.bfloat16, 0.5)},
    }
    assert (float(metrics["flag"]), float(metrics["two"])) == (1, 2)


def test_it_goes_through_remat():
    state, _ = step_of(normed, remat=True)(start(2, "device", adam(), model_state=FRESH), line())
    close(state.model_state, oracle(1, 2)[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kind"), [(4, "sharded"), (2, "device")])
def test_it_is_saved_and_goes_on(tmp_path, count, kind):
    step = step_of(normed, nonfinite="skip")
    state, _ = trained(step, start(2, "device", adam(), model_state=FRESH), 2)
    checkpoint.save(tmp_path / "state", state)
    other = checkpoint.restore(tmp_path / "state", step.complete(start(count, kind, adam(), model_state=FRESH)))
    jax.tree.map(np.testing.assert_array_equal, other.model_state, state.model_state)
    (state, _), (other, _) = (trained(step, each, 1, first=2) for each in (state, other))
    if count == 2:
        close((other.params, other.model_state), (state.params, state.model_state), rtol=0, atol=0)
    assert int(other.model_state["seen"]) == 3


# ---- evaluation


SET = data.Dataset(np.random.default_rng(0).random((37, 5), np.float32), np.arange(37) % 4)


def apply(params, images, model_state):
    return (images - model_state["mean"][None]) @ params["w"]


@pytest.mark.slow
def test_fit_trains_and_evaluates_with_it(tmp_path):
    def loss(params, batch, rng, model_state):
        value, aux = train.classification_loss(lambda p, x: apply(p, x, model_state))(params, batch, rng)
        return value, aux, {"mean": 0.5 * (model_state["mean"] + batch["image"].mean(0))}

    def run(epochs, directory):
        state = start(2, tx=adam(), params={"w": jnp.zeros((5, 4))}, model_state={"mean": jnp.zeros(5)})
        options = {"test_data": SET, "apply_fn": apply, "progress": False, "checkpoint_dir": tmp_path / directory}
        return train.fit(state, step, SET, epochs=epochs, batch_size=8, **options)

    step = train.make_train_step(loss, loss_scale="dynamic")
    whole, history = run(2, "whole")
    assert history[1]["test_loss"] < history[0]["test_loss"]
    np.testing.assert_allclose(whole.model_state["mean"], SET.images.mean(0), atol=0.2)
    run(1, "parts")
    resumed, _ = run(2, "parts")
    jax.tree.map(np.testing.assert_array_equal, resumed.model_state, whole.model_state)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert int(resumed.loss_scale["good_steps"]) == 8


# ---- errors


def test_how_many_values_a_loss_function_must_return():
    two = train.make_train_step(lambda p, b, rng, model_state: (0.0, {}))
    with pytest.raises(TypeError, match=r"must return \(loss, aux, new_model_state\) .* got a tuple of 2"):
        two(start(2, model_state=FRESH), line())
    three = train.make_train_step(lambda p, b, rng: (p["w"].sum(), {}, {}))
    with pytest.raises(
        TypeError, match=r"must return loss or \(loss, aux\) .* got a tuple of 3; .*create_state\(model_state="
    ):
        three(start(2), line())


def test_a_state_with_random_keys_shows_its_bytes():
    state = train.create_state(
        kv.from_params({"w": jnp.ones(2)}), 0, model_state={"keys": jax.random.split(jax.random.key(0))}
    )
    for shown in (repr(state), state._repr_html_()):
        assert "model_state: 1 array, 16 bytes" in shown
