"""Several steps by one program: the same numbers as one after the other, in `step.many` and in `fit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import world
from kv_model import collectives_in, compilations, on_host
from world import IN_TURN, STEP, TX as SGD, close, line, points, run_on, squares, step_of

from jaxpar import data, kv, train
from jaxpar._cpu import kernels
from jaxpar.data import _batches

TX = optax.adam(0.1)
LINES = [line(seed=i) for i in range(5)]


start = functools.partial(world.start, 2, tx=TX)


def stacked(batches=LINES):
    return jax.tree.map(lambda *x: np.stack(x), *batches)


def one_by_one(step, state):
    losses = []
    for batch in LINES:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, np.array(losses)


def same(state, other, rounding=0.0):
    close(on_host(state), on_host(other), rtol=rounding, atol=rounding)


def counted(params, batch, rng, seen):
    loss, aux = squares(params, batch, rng)
    return loss, aux, {"batches": seen["batches"] + 1, "mean": 0.9 * seen["mean"] + 0.1 * batch["x"].mean()}


LOCAL = {"local_steps": 2, "outer_optimizer": optax.sgd(0.7, momentum=0.9)}
TWO_BIT, POWER = {"type": "2bit"}, {"type": "powersgd"}
SEEN = {"batches": jnp.zeros((), jnp.int32), "mean": jnp.zeros(())}
CASES = {  # the engine, what the state is made with, what the step is made with
    "plain": ("pmap", {}, {}),
    "stop": ("pmap", {}, {"nonfinite": "stop"}),
    "dynamic": ("pmap", {}, {"loss_scale": "dynamic"}),
    "clipped": ("pmap", {}, {"grad_transform": optax.chain(optax.clip_by_global_norm(1.0), optax.ema(0.9))}),
    "accumulate": ("pmap", {}, {"accumulate": 2}),
    "local steps": ("pmap", {}, LOCAL),
    "powersgd": ("pmap", {"compression": POWER}, {}),
    "2bit, dist_async": ("pmap", {"compression": TWO_BIT, "kind": "dist_async"}, {}),
    "shard_map": ("shard_map", {}, {}),
    "local steps, shard_map": ("shard_map", {}, LOCAL),
    "2bit, local": ("shard_map", {"compression": TWO_BIT, "kind": "local"}, {}),
    "sharded": ("shard_map", {"kind": "sharded"}, {}),
    "powersgd, sharded": ("shard_map", {"compression": POWER, "kind": "sharded"}, {}),
    "model state": ("auto", {"model_state": SEEN}, {"loss": counted}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", world.mostly_slow(CASES, *[*CASES][:-1]))
def test_the_same_numbers_as_one_by_one(name):
    engine, of_state, of_step = CASES[name]
    step = step_of(engine=engine, **of_step)
    want, losses = one_by_one(step, start(**of_state))
    state, metrics = step.many(start(**of_state), stacked())
    rounding = 1e-6 if of_state.get("compression") == TWO_BIT else 0.0  # of what it leaves over
    same(state, want, rounding)
    np.testing.assert_array_equal(metrics["loss"], losses)


@pytest.mark.slow
def test_parts_are_the_same_program(engine):
    step = step_of(squares, engine=engine)
    want, losses = one_by_one(step, start())
    batches = jax.device_put(stacked())
    state, _ = step.many(start(), batches, 0, 0)
    assert int(state.step) == 0
    with compilations() as count:
        state, first = step.many(state, batches, end=2)
        state, rest = step.many(state, batches, 2)
        jax.block_until_ready(state)
    assert count() == 0
    same(state, want)
    np.testing.assert_array_equal(first["loss"], [*losses[:2], 0, 0, 0])
    np.testing.assert_array_equal(rest["loss"], [0, 0, *losses[2:]])


@pytest.mark.slow
def test_single_steps_in_between():
    step = step_of(squares)
    want, _ = one_by_one(step, start())
    state, _ = step(start(), LINES[0])
    state, _ = step.many(state, stacked(LINES[1:4]))
    state, _ = step(state, LINES[4])
    same(state, want)


@pytest.mark.slow
def test_inside_of_another_program():
    step = step_of(squares)
    want, _ = one_by_one(step, start())
    state, _ = jax.jit(step.many)(start(), stacked())
    same(state, want)
    state, _ = step.many(start(), stacked())  # nothing of that trace is left behind
    same(state, want)


def test_the_state_is_given_away():
    state, step = start(), step_of(squares)
    step.many(state, stacked())
    assert state.store.values[0].is_deleted()
    with pytest.raises(RuntimeError, match="this state was donated to a step"):
        step.many(state, stacked())


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kind"), IN_TURN)
def test_the_program_has_the_collectives_and_the_memory_of_one_step(engine, kind):
    """Nothing is copied that a step does not copy, and the state's memory is given to the new one."""
    params = {"w": jnp.ones(3), "b": jnp.zeros((64, 1024))}
    state = start(kind, params=params)

    def loss_fn(params, batch, rng):
        return squares({"w": params["w"], "b": params["b"].mean()}, batch, rng)

    step = train.make_train_step(loss_fn, engine=engine)
    batches = stacked()
    one = step.lower(state, LINES[0]).compile()
    many = step.lower(state, batches, many=True).compile()
    assert sorted(collectives_in(many.as_text())) == sorted(collectives_in(one.as_text()))
    one, many = one.memory_analysis(), many.memory_analysis()
    extra = sum(x.nbytes for x in jax.tree.leaves(batches)) + 1024
    assert many.alias_size_in_bytes >= one.alias_size_in_bytes
    assert many.temp_size_in_bytes <= one.temp_size_in_bytes + extra
    assert many.argument_size_in_bytes <= one.argument_size_in_bytes + extra


def test_a_step_that_stops_in_the_middle():
    batches = stacked()
    batches["y"][2, 0] = np.nan
    step = step_of(squares, nonfinite="stop")
    state, metrics = step.many(start(), batches)
    assert metrics["skipped"].tolist() == [0, 0, 1, 1, 1]
    assert int(state.step) == 2


def test_batches_on_another_device():
    step = train.make_train_step(squares, devices=jax.devices()[:2])
    want, _ = one_by_one(step_of(squares), start())
    batches = jax.device_put(stacked(), jax.devices()[3])
    state, _ = step.many(start(), batches, end=2)
    state, _ = step.many(state, batches, 2)
    same(state, want)


# ---- in fit

POINTS = points(50)


def fit(state=None, source=POINTS, **options):
    return run_on(source, state, **{"epochs": 3, "batch_size": 4, **options})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("most", "begin"), [(None, 0), (None, 7), (1, 12), (5, 0), (5, 25), (20, 7)])
def test_groups_are_the_batches(most, begin):
    options = {"rng": jax.random.key(5), "start": begin, "devices": jax.devices()[:2]}
    batches = data.batches(POINTS, 4, epochs=None, **options)
    groups = data.batch_groups(data.as_source(POINTS), 4, most, **options)
    found = 0
    while found < 40:
        group, number = next(groups)
        assert (begin + found) // 12 == (begin + found + number - 1) // 12  # of one epoch, which has 12
        assert group["image"].shape == (most or 8, 4, 4)
        for i in range(number):
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], group), next(batches))
        found += number


def told(into):
    return lambda step, metrics: into.append((step, metrics))


@functools.cache
def fit_one_by_one():
    one = []
    return *fit(steps_per_execution=1, on_step=told(one)), one


@pytest.mark.sampled(1)
@pytest.mark.parametrize("together", ["auto", 3, 12, 50])
def test_fit_is_the_same_with_any_number(together):
    many = []
    want, history, one = fit_one_by_one()
    state, record = fit(steps_per_execution=together, on_step=told(many))
    same(state, want)
    assert many == one
    assert [step for step, _ in one] == list(range(1, 37))
    assert [r["loss"] for r in record] == [r["loss"] for r in history]
    assert [r["step"] for r in record] == [12, 24, 36]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("together", ["auto", 5])
def test_checkpoints_and_the_last_step_cut_it_short(tmp_path, together):
    fit(checkpoint_dir=tmp_path, checkpoint_every=7, keep=99, epochs=2, steps_per_execution=together)
    saved = sorted(int(path.name[5:13]) for path in tmp_path.glob("step_*"))
    assert saved == [7, 12, 14, 21, 24]


def test_calls_of_the_step(monkeypatch):
    def seen(self, state, batches, first=0, end=None):
        calls.append((first, end))
        return many(self, state, batches, first, end)

    calls, many = [], train.TrainStep.many
    monkeypatch.setattr(train.TrainStep, "many", seen)
    fit(steps_per_execution=5, epochs=1)
    assert calls == [(0, 5), (0, 5), (0, 2)]
    calls.clear()
    fit(epochs=2)
    assert sum(end - first for first, end in calls) == 24
    assert max(end - first for first, end in calls) > 1
    calls.clear()
    fit(steps_per_execution=1, epochs=1)
    assert not calls


def test_convolutions_are_kept_out_of_loops(monkeypatch):
    monkeypatch.setattr(kernels, "are_loaded", lambda: False)  # those of jaxpar-cpu are fast in loops

    def loss_fn(params, batch, rng):
        found = jax.lax.conv(batch["image"].reshape(-1, 1, 4, 1), params["w"], (1, 1), "SAME")
        return (found**2).mean(), {}

    def refuse(*args):
        raise AssertionError("called")

    monkeypatch.setattr(train.TrainStep, "many", refuse)
    state, step = train.start({"w": jnp.ones((1, 1, 3, 1))}, SGD, loss_fn, devices=jax.devices()[:2])
    state, _ = fit(state, step=step, epochs=1)
    assert int(state.step) == 12
    with pytest.raises(AssertionError, match="called"):
        fit(state, step=step, epochs=1, steps_per_execution=4)


@pytest.mark.slow
def test_what_cannot_be_together(monkeypatch):
    arrays = data.from_arrays({"image": POINTS.images, "label": POINTS.labels})
    assert int(fit(source=arrays, epochs=1)[0].step) == 12  # "auto" is 1 here
    with pytest.raises(ValueError, match=r"steps_per_execution is 4, but train_data is not a data\.Dataset"):
        fit(source=arrays, steps_per_execution=4)
    with pytest.raises(ValueError, match="but the step was not made by make_train_step"):
        fit(step=lambda state, batch: STEP(state, batch), steps_per_execution=4)
    nowhere = train.TrainState(kv.from_params({"w": jnp.zeros((4, 3))}, optimizer=SGD), jnp.int32(0), jax.random.key(3))
    assert int(fit(nowhere, epochs=1, batch_size=8)[0].step) == 6
    with pytest.raises(ValueError, match="but the state does not know its devices"):
        fit(nowhere, steps_per_execution=4)
    monkeypatch.setattr(_batches, "resident", lambda dataset, split, wanted=None: None)
    assert int(fit(epochs=1)[0].step) == 12
    with pytest.raises(ValueError, match="steps_per_execution is 4, but the devices have no room for the data set"):
        fit(steps_per_execution=4)
    for wrong in (0, -1, True, 2.0, "many"):
        with pytest.raises((ValueError, TypeError), match=r"steps_per_execution must be an int of 1 or more, got"):
            fit(steps_per_execution=wrong)


def test_the_program_for_all_batches():
    """Where a loop of a known length is quicker, on GPUs, a whole stack has a program of its own."""
    step = step_of()
    program, donated, rng = step._prepare(start(), None)
    batches = program.batches.place(stacked(), axis=1)
    lowered = program.every.lower(donated, rng, batches)
    assert "known_trip_count" in lowered.compile().as_text()
    new, metrics = program.every(donated, rng, batches)
    state, expected = step.many(start(), stacked())
    close(new, jax.tree.leaves(state)[1:])
    close(metrics, expected)


def test_spans_by_numbers_have_one_program(monkeypatch):
    """So a step has the same bits, wherever a run has cut its stacks. The whole stack may have another one."""
    step = train.make_train_step(squares)
    program, *_ = step._prepare(world.start(1, tx=TX), None)
    monkeypatch.setattr(program, "counts_in_program", True)
    made = [step.many(world.start(1, tx=TX), stacked(), *span) for span in ((), (0, len(LINES)), (0, 2))]
    assert [program.every._cache_size(), program.several._cache_size()] == [1, 1]
    (state, metrics), (other, expected), _ = made
    same((state, metrics), (other, expected), rounding=1e-6)


@pytest.mark.slow
def test_each_program_has_its_own_blocks(monkeypatch):
    step = train.make_train_step(squares)
    program, *_ = step._prepare(start(), None)
    monkeypatch.setattr(program, "counts_in_program", True)
    for _ in range(2):
        states = [step.many(start(), stacked(), *span)[0] for span in ((), (0, len(LINES)))]
    same(*states, rounding=1e-6)
