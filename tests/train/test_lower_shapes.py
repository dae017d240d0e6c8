"""`step.lower` of shapes gives the program that runs, whatever the step keeps in its state. Nothing is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_plan import COUNT, make
from world import EVERYWHERE, adam, line, placed, sgd, squares, start, step_of

from jaxpar import train
from jaxpar.train._step import programs

STEPS = [
    *({"engine": engine, "kind": kind} for engine, kind in EVERYWHERE),
    {"kind": "dist_async"},
    {"compression": "2bit"},
    {"compression": "powersgd"},
    {"local_steps": 2, "outer_optimizer": optax.sgd(0.1)},
    {"nonfinite": "skip", "loss_scale": "dynamic"},
    {"nonfinite": "skip", "engine": "jit"},
    {"grad_transform": optax.clip_by_global_norm(1.0)},
    {"grad_transform": optax.ema(0.9)},
    {"accumulate": 2},
    {"fsdp": True},
    {"many": True},
    {"many": True, "engine": "jit", "loss_scale": "dynamic"},
]


def texts(many=False, **options):
    """The program of a real state, and that of the shapes, whose step never sees an array."""
    devices = jax.devices()[:COUNT]
    step, state, shapes = make(devices, **options)
    if many:
        shapes = {"x": jax.ShapeDtypeStruct((3, *shapes["x"].shape), np.float32)}
    program, donated, rng = step._prepare(state, None)
    run, along = (program.several if many else program.one), program.batches.shardings[many]
    batch = jax.device_put(jax.tree.map(jnp.zeros_like, shapes), along)
    span = map(program.number, (0, 3) if many else ())
    real = run.trace(donated, rng, batch, *span).lower()
    step, *_ = make(devices, **options)
    return real, step.lower(jax.eval_shape(lambda: make(devices, **options)[1]), shapes, many=many)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", STEPS, ids=lambda options: "-".join(map(str, options)) or "plain")
def test_the_program_of_shapes_is_the_one_that_runs(options):
    real, lowered = texts(**options)
    assert lowered.as_text() == real.as_text()


def test_of_a_gradient_of_one_shard():
    step, state, shapes = make(jax.devices()[:COUNT], virtual_shards=8)
    text = step.lower(jax.eval_shape(lambda: make(jax.devices()[:COUNT])[1]), shapes).as_text()
    assert text == step.lower(state, jax.tree.map(jnp.zeros_like, shapes)).as_text()
    assert "tensor<2x64xf32>" in text  # 16 examples in 8 shards


def test_nothing_is_moved():
    """The state of other devices stays where it is, and stays valid."""
    state = start(COUNT)
    assert "num_partitions = 2" in step_of(squares, devices=tuple(jax.devices()[:2])).lower(state, line()).as_text()
    assert state.store.devices == tuple(jax.devices()[:COUNT])
    assert state.store.values[0].sharding.device_set == set(jax.devices()[:COUNT])


# ---- what a step adds to a program by hand


def started(engine, tx):
    """A step of the engine, and the state that its first call returned."""
    step = step_of(squares, engine=engine)
    state, _ = step(start(1, tx=tx), placed(line(), 1))
    return step, state


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tx", [sgd, adam])
def test_a_program_has_two_scalars_more_than_one_by_hand(engine, tx):
    """The count of steps, and no random key where the loss draws nothing. Adam counts once, not for each param."""
    step, state = started(engine, tx())
    by_hand = len(jax.tree.leaves((state.params, tx().init(state.params))))
    assert by_hand == (2 if tx is sgd else 7)
    compiled = step.lower(state, line()).compile()
    taken = jax.tree.leaves(compiled.input_shardings)  # of what XLA keeps
    assert len(taken) == by_hand + len(("step", "x", "y"))
    assert len(compiled.out_info[0]) == by_hand + len(("step",))
    assert len(jax.tree.leaves(compiled.out_info)) == by_hand + len(("step", "loss", "error"))
    aliases = compiled.as_text().split("input_output_alias={", 1)[1].split("entry_computation_layout")[0]
    assert aliases.count("alias)") == by_hand + len(("step",)), "all of the state is donated"


def test_a_batch_that_lies_as_the_last_one_is_not_laid_out_again(monkeypatch):
    step, state = started("pmap", sgd())
    checked = []
    are_on = programs.are_on

    def counted(batch, devices):
        checked.append(batch)
        return are_on(batch, devices)

    monkeypatch.setattr(programs, "are_on", counted)
    for seed in range(3):
        state, _ = step(state, placed(line(seed=seed), 1))
    assert len(checked) == 0
    state, _ = step(state, line())
    state, _ = step(state, line())
    assert len(checked) == 2, "arrays of NumPy are copied and laid out each time"
    state, _ = step(state, placed(line(), 1))
    assert len(checked) == 2
    with pytest.raises(TypeError, match="batch"):
        step(state, {"x": "words", "y": "words"})
    assert int(step(state, placed(line(), 1))[0].step) == 8


def test_states_share_what_never_changes():
    """JAX compares the structures of states. The same objects are equal at once."""
    step, state = started("shard_map", optax.adam(1e-2))
    later, _ = step(state, line())
    assert type(later) is train.TrainState
    for field in dataclasses.fields(later.store):
        if field.name not in ("values", "updater_state", "residuals", "pending", "optimizer_state"):
            assert getattr(later.store, field.name) is getattr(state.store, field.name), field.name
    assert (later.transform, later.model_state, later.local) == ((), (), ())


def test_a_state_of_equal_structure_from_elsewhere_keeps_its_own_key():
    step, state = started("pmap", sgd())
    other = train.create_state(start(1, tx=sgd()).store, 99, devices=jax.devices()[:1])
    state, _ = step(state, line())
    after, _ = step(other, line())
    assert (jax.random.key_data(after.rng) == jax.random.key_data(jax.random.key(99))).all()
    assert (int(state.step), int(after.step)) == (2, 1)
