"""A NaN or infinite loss or gradient on any device: nobody updates, nothing else changes, the keys are named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import collectives_in, on_host
from world import EVERYWHERE, IN_TURN, KINDS, adam, by_hand, close, line, squares, start, steady, step_of, text_of

from jaxpar import train


def poisoned(n=16, seed=0, value=np.nan, row=5):
    """A batch of which one device alone gets a bad example."""
    batch = line(n, seed)
    batch["y"][row] = value
    return batch


def copy(state):
    """Every leaf, by its path, before the state is donated."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(on_host(state))}


def assert_same(after, before, *, but=()):
    changed = {name for name in before if not np.array_equal(after[name], before[name], equal_nan=True)}
    assert after.keys() == before.keys()
    assert changed == set(but)


NOTES = (".nonfinite['found']", ".nonfinite['skipped']", ".nonfinite['step']")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("engine", "kind", "value"), [*((*where, np.nan) for where in EVERYWHERE), ("pmap", "device", np.inf)]
)
def test_one_bad_device_and_nobody_updates(engine, kind, value):
    step = step_of(squares, engine=engine, nonfinite="skip")
    state = start(4, kind, adam())
    state, metrics = step(state, line(seed=0))
    assert float(metrics["skipped"]) == 0.0
    before = copy(state)
    state, metrics = step(state, poisoned(value=value))
    assert float(metrics["skipped"]) == 1.0
    assert not np.isfinite(float(metrics["loss"]))
    assert_same(copy(state), before, but=[".step", *NOTES])
    assert int(state.step) == 2
    assert (int(state.nonfinite["step"]), int(state.nonfinite["skipped"])) == (1, 1)
    state, metrics = step(state, line(seed=1))
    close(state.params, by_hand(adam(), 2))
    for leaf in state.store.values.values() if kind != "sharded" else ():
        shards = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert all(np.array_equal(shard, shards[0]) for shard in shards)


def roots(params, batch, rng):
    """A loss that is finite where its gradient is not: the root of 0."""
    return jnp.sqrt(params["w"] * batch).sum() + params["b"], {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_finite_loss_with_a_gradient_that_is_not(kind):
    def fresh():
        return start(2, kind, params={"w": jnp.ones(()), "b": jnp.zeros(())})

    state, metrics = step_of(roots, nonfinite="skip")(fresh(), jnp.array([1.0, 0.0]))
    assert (float(metrics["skipped"]), float(metrics["loss"])) == (1.0, 0.5)
    assert state.params["w"] == 1.0
    with pytest.raises(FloatingPointError, match=r"step 0 .*not finite: the gradients of 'w'; its update was left out"):
        train.check_finite(metrics, state)
    state, _ = step_of(roots)(fresh(), jnp.array([1.0, 0.0]))
    assert np.isnan(float(state.params["w"])), "ignored where nobody asks for it"


def compressed(params, tx, kind, spec, **options):
    def loss_fn(params, batch, rng):
        return (params["w"] * batch[0]).sum(), {}

    return train.start(params, tx, loss_fn, kind=kind, compression=spec, devices=jax.devices()[:4], **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train step. the loss does not depend on")
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("device", {"type": "2bit", "threshold": 0.25}),
        ("sharded", {"type": "bf16"}),
        ("device", {"type": "topk", "ratio": 0.1}),
        ("sharded", {"type": "topk", "ratio": 0.1}),
        ("sharded", {"type": "powersgd"}),
    ],
)
def test_compressed_stores_look_at_what_is_pushed(kind, spec):
    """Compressors make zeros of NaN, or keep it in their residuals."""
    params = {"w": jnp.ones((64, 32)), "b": jnp.ones(())}
    state, step = compressed(params, adam(), kind, spec, nonfinite="skip")
    good = np.random.default_rng(0).standard_normal((4, 64, 32)).astype(np.float32)
    bad = good.copy()
    bad[2, 3, 4] = np.nan
    state, metrics = step(state, good)
    before = copy(state)
    assert any("residuals" in name for name in before)
    state, metrics = step(state, bad)
    assert float(metrics["skipped"]) == 1.0
    assert_same(copy(state), before, but=[".step", *NOTES])
    with pytest.raises(train.NonFiniteError) as error:
        train.check_finite(metrics, state)
    assert error.value.names == ("loss", "w")


def roots_of_first(params, batch, rng):
    return roots(params, batch[0], rng)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["device", "sharded"])
@pytest.mark.parametrize("compression", ["2bit", "int8", "1bit", "bf16", "int3", "topk", "powersgd"])
def test_the_loss_shows_a_gradient_that_a_compressor_could_not_send(compression, kind):
    """A residual keeps NaN, for which `2bit` sends 0: the param would never train again, and nothing would show it."""
    params, losses = {"w": jnp.ones((8, 2)), "b": jnp.zeros(())}, []
    state = start(4, kind, params=params, compression={"type": compression})
    good = np.full((4, 8, 2), 1e-4, np.float32)
    bad = good.copy()
    bad[2, 5, 1] = 0  # the gradient of its root is NaN, and the root is not
    for batch in (good, bad, good):
        state, metrics = step_of(roots_of_first)(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).tolist() == [True, True, False], losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_a_compressor_that_overflows_is_noticed(kind):
    """What is pushed is finite; four such numbers rounded to bfloat16 are not, added up."""
    state, step = compressed({"w": jnp.ones(32)}, optax.sgd(0.125), kind, {"type": "bf16"}, nonfinite="skip")
    pushed = np.zeros((4, 32), np.float32)
    for first, skipped, want in ((8.0, 0.0, 0.0), (3.4e38, 1.0, 0.0), (8.0, 0.0, -1.0)):
        pushed[:, 0] = first
        state, metrics = step(state, pushed)
        assert float(metrics["skipped"]) == skipped
        np.testing.assert_array_equal(state.params["w"], [want] + 31 * [1.0])


@pytest.mark.sampled(1)
def test_states_of_transforms_and_models_stay_too(engine):
    def loss(params, batch, rng, seen):
        value, aux = squares(params, batch, rng)
        return value, aux, {"mean": 0.5 * seen["mean"] + batch["y"].mean(), "count": seen["count"] + 1}

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9))
    state = start(4, model_state={"mean": jnp.zeros(()), "count": jnp.int32(0)})
    step = train.make_train_step(loss, engine=engine, grad_transform=tx, nonfinite="skip")
    state, _ = step(state, line())
    before = copy(state)
    assert any(name.startswith(".transform") for name in before)
    assert int(state.model_state["count"]) == 1
    state, metrics = step(state, poisoned())
    assert float(metrics["skipped"]) == 1.0
    assert_same(copy(state), before, but=[".step", *NOTES])


# ---- stop


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "kind"), IN_TURN)
def test_a_stopped_state_is_the_one_before_the_bad_step(engine, kind):
    step = step_of(squares, engine=engine, nonfinite="stop")
    state = start(4, kind, adam())
    for i in range(2):
        state, metrics = step(state, line(seed=i))
        train.check_finite(metrics, state)
    before = copy(state)
    state, first = step(state, poisoned())
    for i in range(2, 4):  # the host has sent more steps by the time that it looks
        state, metrics = step(state, line(seed=i))
        assert float(metrics["skipped"]) == 1.0
    for seen in (first, metrics):
        with pytest.raises(train.NonFiniteError, match=r"step 2 .*loss and the gradients of 'b', 'w'; no") as error:
            train.check_finite(seen, state)
        assert (error.value.step, error.value.names) == (2, ("loss", "b", "w"))
    assert_same(copy(error.value.state), before)
    lies = [x.sharding for x in jax.tree.leaves(state)]
    assert [x.sharding for x in jax.tree.leaves(error.value.state)] == lies
    state, metrics = step(error.value.state, line(seed=2))
    train.check_finite(metrics, state)
    close(state.params, by_hand(adam(), 3))


def test_only_the_keys_that_are_not_finite_are_named():
    params = {"good": jnp.ones(2), "n": jnp.arange(2), "bad": {"w": jnp.ones(())}}
    loss = lambda p, b, rng: ((p["good"] * b[0]).sum() + jnp.sqrt(p["bad"]["w"] * b[0]), {})  # noqa: E731
    step = train.make_train_step(loss, nonfinite="stop")
    state, metrics = step(start(2, params=params), jnp.array([1.0, 0.0]))
    with pytest.raises(train.NonFiniteError) as error:
        train.check_finite(metrics, state)
    assert error.value.names == ("bad/w",)


def test_without_the_option_check_finite_sees_the_loss():
    step = step_of(squares)
    state, metrics = step(start(), line())
    train.check_finite(metrics, state)
    state, metrics = step(state, poisoned())
    with pytest.raises(train.NonFiniteError, match=r"step 1 .*not finite: the loss; its update was made"):
        train.check_finite(metrics, state)


def test_many_names_are_cut():
    names = tuple(f"layer{i}" for i in range(12))
    assert "'layer7' and 4 more; so" in str(train.NonFiniteError(3, names, start(1), "so"))
    assert "the loss and the gradients of 'layer0', " in str(train.NonFiniteError(3, ("loss", *names), start(1), "so"))


# ---- what it costs


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("engine", "kind", "action"),
    [(*where, action) for where, action in zip(IN_TURN, ("skip", "stop", "skip"), strict=True)],
)
def test_a_few_numbers_more_in_the_same_collectives(engine, kind, action):
    texts = [text_of(4, kind, engine=engine, **options) for options in ({}, {"nonfinite": action})]
    plain, careful = (collectives_in(text) for text in texts)
    assert [name for name, _ in careful] == [name for name, _ in plain]
    assert ["is-finite(" in text for text in texts] == [False, True], "nobody looks who was not asked to"
    assert sum(size for _, size in careful) - sum(size for _, size in plain) == 4 * 3  # the loss, w, b


@pytest.mark.sampled(1)
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_one_program_with_its_state_donated(action):
    step = step_of(squares, nonfinite=action)
    state = step.complete(start(4, "device", adam()))
    head = text_of(4, "device", nonfinite=action).splitlines()[0]
    assert head.count("may-alias") + head.count("must-alias") >= 2 * 3 + 2 + 3  # as without, and the notes
    _, metrics = steady(step, state, [line(), poisoned(), line(seed=1)])
    assert float(metrics["skipped"]) == (action == "stop")


@pytest.mark.filterwarnings("ignore:train step. the loss does not depend on")
def test_a_metric_that_the_step_reports_itself():
    step = train.make_train_step(lambda p, b, rng: (p["w"].sum(), {"skipped": 1.0}), nonfinite="skip")
    with pytest.raises(ValueError, match="has 'skipped', which the step reports itself; rename that value"):
        step(start(), line())
