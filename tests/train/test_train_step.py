"""The training step: the same numbers from any devices and engine, one program, memory handed on."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import world
from kv_model import collectives_in, compilations
from world import EVERYWHERE, IN_TURN, KINDS, adam, by_hand, close, line, squares, start, step_of, text_of, trained

from jaxpar import kv, train
from jaxpar._devices.mesh import split_over
from jaxpar.train._step import programs

# ---- the same numbers


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("engine", "kind", "count"), [*((*where, 4) for where in EVERYWHERE), ("pmap", "sharded", 1)])
def test_the_gradient_is_that_of_the_whole_batch(engine, count, kind):
    """Never one device's, nor their sum, which shard_map makes where its checks are on."""
    params = {"w": jnp.zeros(())}
    state = start(count, kind, optax.sgd(1.0), params)
    step = train.make_train_step(lambda p, b, rng: ((p["w"] * b).mean(), {}), engine=engine)
    state, _ = step(state, jnp.array([1.0, 2.0, 4.0, 7.0]))
    assert float(state.params["w"]) == -3.5


CLIP = optax.clip_by_global_norm(0.3)
CLIPPED = optax.chain(CLIP, optax.sgd(0.1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_clipping_by_the_global_norm_is_optaxs_chain(kind):
    state, _ = trained(step_of(squares, grad_transform=CLIP), start(4, kind), 3)
    close(state.params, by_hand(CLIPPED, 3))


MEAN = optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9))
SMOOTHED = optax.chain(MEAN, optax.sgd(0.1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_transform_with_a_state(kind):
    step = step_of(squares, grad_transform=MEAN, engine="shard_map")
    state, _ = trained(step, start(4, kind, grad_transform=MEAN), 3)
    close(state.params, by_hand(SMOOTHED, 3))
    other, _ = trained(step, start(4, kind), 3)  # the step makes the state itself where create_state did not
    close((other.params, other.transform), (state.params, state.transform), rtol=0, atol=0)


# ---- what a step may see and give


def test_aux_values_are_means_over_devices_whatever_their_dtype():
    def loss(params, batch, rng):
        half = batch.mean().astype(jnp.bfloat16)
        return (params["w"] * batch).mean(), {"count": (batch > 2).sum(), "vector": batch, "half": half, "four": 4}

    step = train.make_train_step(loss)
    _, metrics = step(start(4, params={"w": jnp.ones(())}), jnp.array([1.0, 2.0, 3.0, 6.0]))
    found = {name: value.tolist() for name, value in metrics.items()}
    assert found == {"loss": 3.0, "count": 0.5, "vector": [3.0], "half": 3.0, "four": 4.0}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "kind"), IN_TURN)
def test_leaves_that_are_not_floating_are_left_alone(engine, kind):
    params = {"count": jnp.arange(3), "w": jnp.ones(3), "mask": jnp.array([True, False, True])}

    def loss(params, batch, rng):
        return (params["w"] * params["mask"] * batch[0]).sum() * params["count"][1], {}

    state, _ = train.make_train_step(loss, engine=engine)(start(2, kind, params=params), jnp.ones((2, 1)))
    out = state.params
    assert out["count"].tolist() == [0, 1, 2]
    assert out["mask"].tolist() == [True, False, True]
    np.testing.assert_allclose(out["w"], [0.9, 1.0, 0.9], rtol=1e-6)


def test_narrow_parameters_keep_their_dtype():
    params = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.zeros(())}
    state, metrics = step_of(squares)(start(4, params=params), line())
    assert jax.tree.map(lambda x: str(x.dtype), state.params) == {"w": "bfloat16", "b": "float32"}
    assert metrics["loss"].dtype == jnp.float32


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "pushes", "value", "param", "residual"),
    [
        *[({"engine": engine}, 2, 0.8, -1.0, 0.15) for engine in ("pmap", "shard_map")],  # with the second push, 0.25
        ({"accumulate": 2}, 1, 0.8, 0.0, 0.2),  # one push, below the threshold
        ({"loss_scale": "dynamic"}, 1, 0.8, 0.0, 0.2),  # gradients that are not scaled
        ({"local_steps": 2}, 2, 0.6, -1.0, 0.05),  # a round moves each device by 1.2, a quarter of it is 0.3
    ],
    ids=str,
)
def test_a_compressed_store_trains(options, pushes, value, param, residual):
    """What was sent and what the residuals hold is what all four devices push, each a quarter of the value."""
    rows = 4 * options.get("accumulate", 1)
    given = {"compression": {"type": "2bit", "threshold": 0.25}, "devices": jax.devices()[:4], **options}
    loss = lambda p, b, rng: ((p["w"] * b[0]).sum(), {})  # noqa: E731
    state, step = train.start({"w": jnp.zeros(64)}, optax.sgd(1.0), loss, **given)
    structure = jax.tree.structure(step.complete(state))
    for _ in range(pushes):
        state, _ = step(state, jnp.full((rows, 64), value))
        assert jax.tree.structure(state) == structure
    np.testing.assert_array_equal(state.params["w"], np.full(64, param))
    np.testing.assert_allclose(state.store.residuals[0]["residual"], np.full((4, 64), residual), rtol=1e-5)


# ---- one program, memory handed on, nothing through the host


def test_a_step_that_fails_says_why():
    """Its state is deleted then, which is not the fault."""

    def checked(params, batch, rng):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return squares(params, batch, rng)[0] + jax.pure_callback(refuse, shape, batch["x"][0, 0]), {}

    def refuse(x):
        raise ValueError("the token is out of range")

    state, step = start(1), train.make_train_step(checked)
    with pytest.raises(Exception, match="the token is out of range"):
        train.fit(state, step, line(), max_steps=1, batch_size=16, progress=False)
    with pytest.raises(Exception, match="the token is out of range"):
        jax.block_until_ready(step(start(1), line()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_one_program_whose_state_is_donated(engine, kind):
    state = start(4, kind, adam())
    batches = [line(seed=i) for i in range(4)]
    step = step_of(squares, engine=engine)
    with compilations() as count:
        new, _ = step(state, batches[0])
    assert count() <= 3
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.store.values, state.store.updater_state)))
    _, metrics = world.steady(step, new, batches)
    assert np.isfinite(float(metrics["loss"]))


def test_the_compiled_text(engine):
    text = text_of(4, "device", engine=engine)
    head = text.splitlines()[0]
    assert head.count("may-alias") + head.count("must-alias") >= 2 * 3 + 2  # w and b: value, mu, nu; count; the step
    names = [name for name, _ in collectives_in(text)]
    assert names in (["all-reduce"], ["all-reduce"] * 2), "gradients in one bucket, metrics in another"


@pytest.mark.parametrize(("engine", "kind"), [("pmap", "device"), ("shard_map", "local")])
def test_one_device_needs_no_collective(engine, kind):
    assert collectives_in(text_of(1, kind, engine=engine)) == []


def test_the_store_that_was_given_stays_valid():
    store = kv.from_params({"w": jnp.ones(3), "b": jnp.zeros(())}, optimizer=optax.sgd(0.1), devices=jax.devices()[:4])
    state = train.create_state(store, jax.random.key(0))
    step_of(squares)(state, line())
    np.testing.assert_array_equal(kv.to_params(store)["w"], np.ones(3))


def test_raw_keys_and_ints_are_rngs():
    store = kv.from_params({"w": jnp.ones(3), "b": jnp.zeros(())})
    for rng in (jax.random.key(3), 3, np.int64(3), jax.random.PRNGKey(3)):
        state = train.create_state(store, rng, devices=jax.devices()[:2])
        state, _ = step_of(squares)(state, line())
        assert int(state.step) == 1


def test_a_step_moves_a_state_to_its_own_devices():
    devices = tuple(jax.devices()[:2])
    state, _ = step_of(squares, devices=devices)(start(4), line())
    assert state.store.values[0].sharding.device_set == set(devices)
    close(state.params, by_hand(optax.sgd(0.1), 1))


# ---- errors


@pytest.mark.slow
def test_a_batch_that_lies_as_an_earlier_one_is_looked_at_too():
    step = step_of(squares, accumulate=2)
    state, _ = step(start(2), world.placed(line(16), 2))
    with pytest.raises(ValueError, match="each of 2 devices 3 examples, which cannot be cut in accumulate=2"):
        step(state, world.placed(line(6), 2))
    with pytest.raises(ValueError, match="must share the length of their first axis"):
        step(state, world.placed({"x": np.ones((4, 3)), "y": np.ones(8)}, 2))
    state, _ = step(state, world.placed(line(8), 2))
    assert int(state.step) == 2


def test_the_parts_of_a_state_that_a_step_made():
    state = start(2, tx=adam())
    step = step_of(squares)
    made, _ = step(state, line())
    assert list(vars(made)) == [field.name for field in dataclasses.fields(made)], "it remembers nothing else"
    assert list(vars(made.store)) == [field.name for field in dataclasses.fields(made.store)]
    assert not hasattr(made, "__array__")
    copies = [copy.copy(made), dataclasses.replace(made), jax.tree.map(lambda x: x, made)]
    assert (int(made.step), made.transform) == (1, ())
    assert made.rng is state.rng
    assert not made.rng.is_deleted()
    assert jax.tree.structure(made) == jax.tree.structure(state)
    for other in copies:
        assert other.store == made.store
    by_hand, _ = step(dataclasses.replace(made, step=made.step + 0), line())
    assert int(by_hand.step) == 2
    with pytest.raises(RuntimeError, match="this state was donated to a step"):
        step(made, line())  # it lives on in part


def test_an_error_of_the_loss_function_is_raised_at_once():
    calls = []

    def loss(params, batch, rng):
        calls.append(len(batch["y"]))
        if len(batch["y"]) == 4:
            raise TypeError("no batch of four")
        return squares(params, batch, rng)

    step = train.make_train_step(loss)
    state, _ = step(start(1), line(8))
    calls.clear()
    with pytest.raises(TypeError, match="no batch of four"):
        step(state, line(4))
    assert calls == [4], "it was called again after its error"


def test_batches_that_lie_elsewhere_in_the_middle_of_a_run():
    devices, other = tuple(jax.devices()[:2]), jax.devices()[3]
    step = step_of(squares, devices=devices)
    states = [start(2), start(2)]
    for place in (None, None, other, None, other):
        batch = line()
        states[0], _ = step(states[0], batch)
        states[1], _ = step(states[1], batch if place is None else jax.device_put(batch, place))
    assert states[0].store == states[1].store
    with pytest.raises(ValueError, match="a batch of 7 cannot be divided by 2 devices; use a batch of 6 or 8"):
        step(states[0], line(7))
    assert int(states[0].step) == 5


# ---- a stack of states


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"engine": "jit"}, {"kind": "sharded"}, {"local_steps": 2}], ids=str)
def test_a_stack_of_states_can_be_shown_and_says_what_it_is(options):
    """`jax.vmap(step)` trains several models at once. What it returns is no state of one."""
    loss = lambda params, batch, rng: (((params["w"] - batch) ** 2).mean(), {})  # noqa: E731
    options |= {"devices": jax.devices()[:2]}
    state, step = train.start({"w": jnp.zeros(())}, optax.sgd(0.25), loss, **options)
    state = step.complete(state)
    stacked, metrics = jax.vmap(step)(jax.tree.map(lambda x: jnp.stack([x] * 3), state), jnp.ones((3, 4)))
    assert metrics["loss"].tolist() == [1, 1, 1]
    assert "step=[1, 1, 1]" in repr(stacked)
    assert "step=[1, 1, 1]" in stacked._repr_html_()
    for call in (
        lambda: step(stacked, jnp.ones(4)),
        lambda: step.finish(stacked),
        lambda: train.fit(stacked, step, {"x": np.ones(8)}, epochs=1, batch_size=4, progress=False),
        lambda: train.check_finite(metrics, stacked),
    ):
        with pytest.raises(ValueError, match=r"this is a stack of 3 states, as jax.vmap returns it; take one"):
            call()
    if "kind" not in options and "local_steps" not in options:
        one, _ = step(jax.tree.map(lambda x: x[0], stacked), jnp.ones(4))
        assert int(one.step) == 2


def test_a_batch_that_lies_as_the_last_one_is_not_checked_again(monkeypatch):
    devices, checked = tuple(jax.devices()[:2]), []
    monkeypatch.setattr(programs, "check_even", lambda *args: checked.append(1))
    batches = programs.Batches(devices, 2, 1, (split_over(devices),))
    typed = jax.make_mesh((2,), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Explicit,))
    for batch, times in (
        (jax.device_put(jnp.arange(4.0), split_over(devices)), 1),
        (np.arange(4.0), 2),  # its owner may write into it
        (jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(typed, jax.sharding.PartitionSpec("data"))), 2),
    ):
        checked.clear()
        for _ in range(2):
            placed = batches.place({"x": batch})["x"]
            assert placed.sharding == split_over(devices)
            np.testing.assert_array_equal(placed, np.arange(4.0))
        assert len(checked) == times
