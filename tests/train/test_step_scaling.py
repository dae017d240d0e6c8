"""Loss scaling: gradients that float16 would lose, a scale that finds its size, and a state that is saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import collectives_in
from world import IN_TURN, adam, by_hand, close, line, squares, start, step_of, text_of, trained

from jaxpar import checkpoint, train


def tiny(params, batch, rng):
    """Its gradient is 1e-8 on the way back, which float16 takes for 0."""
    return (params["w"] * batch[:, 0] * batch[:, 1]).mean(), {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("engine", "kind", "loss_scale"), [("pmap", "device", 2.0**15), *((*where, "dynamic") for where in IN_TURN)]
)
def test_small_gradients_survive_float16(engine, kind, loss_scale):
    def moved(scale):
        state = start(2, kind, optax.sgd(1.0), {"w": jnp.zeros(())})
        step = step_of(tiny, engine=engine, compute_dtype=jnp.float16, loss_scale=scale)
        state, _ = step(state, jnp.full((2, 2), 1e-4))
        return -float(state.params["w"])

    assert moved(None) == 0.0
    assert moved(loss_scale) == pytest.approx(1e-8, rel=1e-2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "accumulate", "loss_scale"),
    [("device", 1, 0.5), ("device", 4, "dynamic"), ("sharded", 4, "dynamic"), ("local", 1, 1000.0)],
)
def test_in_float32_it_changes_nothing(kind, accumulate, loss_scale):
    step = step_of(squares, loss_scale=loss_scale, accumulate=accumulate)
    state, metrics = trained(step, start(4, kind, adam()), 3)
    close(state.params, by_hand(adam(), 3))
    loss, _ = squares(by_hand(adam(), 2), line(16, seed=2), None)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)


def test_the_scale_falls_until_nothing_overflows_and_grows_again(engine):
    scaling = train.DynamicLossScale(initial=2.0**16, period=3)
    loss = lambda params, batch, rng: (((params["w"] * batch) ** 2).mean(), {})  # noqa: E731
    step = step_of(loss, engine=engine, compute_dtype=jnp.float16, loss_scale=scaling)
    state = start(2, tx=optax.sgd(0.0), params={"w": jnp.ones(())})
    seen = []
    for _ in range(12):
        state, metrics = step(state, jnp.full(2, 5.0))  # 50 times the scale on the way back, and 65504 is the end
        seen.append((float(np.log2(metrics["loss_scale"])), float(metrics["skipped"])))
    falling = [(16.0 - i, 1.0) for i in range(6)]
    assert seen == [*falling, *[(10.0, 0.0)] * 3, (11.0, 1.0), *[(10.0, 0.0)] * 2]
    assert (int(state.step), int(state.nonfinite["skipped"])) == (12, 7)


def test_the_scale_keeps_to_its_bounds():
    scaling = train.DynamicLossScale(initial=4.0, period=1, least=2.0, most=8.0)
    state = start(1, tx=optax.sgd(0.0))
    step = step_of(squares, loss_scale=scaling)
    seen = []
    for bad in (False, False, False, True, True, True):
        batch = line()
        batch["y"][0] = np.nan if bad else 0.0
        state, metrics = step(state, batch)
        seen.append(float(metrics["loss_scale"]))
    assert seen == [4.0, 8.0, 8.0, 8.0, 4.0, 2.0]
    assert float(state.loss_scale["scale"]) == 2.0


@pytest.mark.sampled(1)
def test_stop_lets_the_scale_find_its_size_first(engine):
    def loss(params, batch, rng):  # the gradient of a constant is 0, be it NaN
        return jnp.where(params["w"] > 0, params["w"] * batch.mean() * 1.0, jnp.nan).astype(jnp.float32), {}

    scaling = train.DynamicLossScale(initial=2.0**20)
    step = train.make_train_step(
        loss, engine=engine, compute_dtype=jnp.float16, loss_scale=scaling, nonfinite="stop", accumulate=2
    )
    state = start(2, tx=optax.sgd(0.4), params={"w": jnp.ones(())})
    skipped = []
    for _ in range(12):
        state, metrics = step(state, jnp.full(4, 1.0))
        skipped.append(float(metrics["skipped"]))
        try:
            train.check_finite(metrics, state)
        except train.NonFiniteError as error:
            stopped = error
            break
    good = skipped.index(0.0)
    assert skipped == [1.0] * good + [0.0] * 3 + [1.0]  # 1, 0.6, 0.2, and -0.2 has no loss
    assert good == 5, "2**15 is the first scale that float16 holds"
    assert (stopped.step, stopped.names) == (good + 3, ("loss",))
    assert float(stopped.state.params["w"]) == pytest.approx(-0.2, rel=1e-2)
    assert float(stopped.state.loss_scale["scale"]) == 2.0**15


def test_stop_where_the_scale_is_at_its_least():
    scaling = train.DynamicLossScale(initial=2.0)
    loss = lambda p, b, rng: (jnp.sqrt(p["w"] * b).sum(), {})  # noqa: E731
    step = train.make_train_step(loss, loss_scale=scaling, nonfinite="stop")
    state = start(1, params={"w": jnp.ones(())})
    state, metrics = step(state, jnp.zeros(1))
    train.check_finite(metrics, state)
    state, metrics = step(state, jnp.zeros(1))
    with pytest.raises(train.NonFiniteError, match=r"step 1 .*the gradients of 'w'"):
        train.check_finite(metrics, state)


@pytest.mark.slow
def test_it_sends_what_looking_sends():
    sent = [
        collectives_in(text_of(4, "device", **options))
        for options in ({}, {"nonfinite": "skip"}, {"loss_scale": "dynamic"}, {"loss_scale": 8.0})
    ]
    assert sent[1] == sent[2]
    assert sent[0] == sent[3]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "restored"), [((4, "device"), (2, "sharded")), ((4, "device"), (4, "device"))])
def test_a_saved_scale_goes_on(tmp_path, saved, restored):
    scaling = train.DynamicLossScale(period=2)
    step = step_of(squares, loss_scale=scaling, grad_transform=optax.trace(0.9))
    state, _ = trained(step, start(*saved, adam()), 3)
    checkpoint.save(tmp_path / "state", state)
    like = step.complete(start(*restored, adam()))
    other = checkpoint.restore(tmp_path / "state", like)
    assert jax.tree.structure(other.transform) == jax.tree.structure(state.transform)
    (state, _), (other, _) = (trained(step, each, 2, first=3) for each in (state, other))
    close(other.params, state.params, atol=0 if saved == restored else 1e-6)
    assert float(other.loss_scale["scale"]) == float(state.loss_scale["scale"]) == 2.0**17
    assert int(other.nonfinite["skipped"]) == 0


def test_the_state_is_completed_once_and_what_is_there_stays():
    step = step_of(squares, nonfinite="skip", loss_scale="dynamic", grad_transform=optax.trace(0.9))
    state = step.complete(start(2))
    assert float(state.loss_scale["scale"]) == 2.0**15
    assert step.complete(state) is state
    given = train.create_state(state.store, 7, devices=jax.devices()[:2], grad_transform=optax.trace(0.9))
    assert step.complete(given).transform is given.transform
    plain = step_of(squares, grad_transform=optax.clip_by_global_norm(1.0))
    assert plain.complete(state) is state
    assert plain.complete(start(2)).transform == ()


def test_a_weight_that_16_bits_round_is_warned_of():
    """70,000 ones are infinite in float16, and the loss would be 0. A row for each example is summed in float32."""

    def pairs(params, batch, rng, *, rows=False):
        total, weight = params["w"] * batch, batch
        return ((total, weight) if rows else (total.sum(), weight.sum())), {}

    def loss_of(loss_fn):
        state = start(1, tx=optax.sgd(0.0), params={"w": jnp.ones(())})
        return float(step_of(loss_fn, compute_dtype=jnp.float16)(state, np.ones(70_000, np.float32))[1]["loss"])

    with pytest.warns(UserWarning, match="the loss: the weight is a sum in float16.* mask.sum.dtype=jnp.float32"):
        loss_of(pairs)
    assert loss_of(functools.partial(pairs, rows=True)) == 1.0
