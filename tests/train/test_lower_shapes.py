"""`step.lower` of shapes gives the program that runs, whatever the step keeps in its state. Nothing is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_model import EVERYWHERE, adam, line, placed, sgd, squares, start, step_of

from jaxpar import kv, parallel, train
from jaxpar.train._step import programs

COUNT = 4
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


def loss(params, batch, rng):
    error = jnp.tanh(batch["x"] @ params["w"]).sum(-1) + params["b"] - batch["y"]
    return (error**2).mean(), {}


def state_of(kind="device", compression=None, fsdp=False):
    place = {"devices": jax.devices()[:COUNT]}
    if fsdp:
        mesh = jax.make_mesh((COUNT,), ("data",), devices=place["devices"])
        place = {"sharding": parallel.fsdp("data", min_size=0), "mesh": mesh}
    params = {"w": jnp.ones((3, 8)), "b": jnp.zeros(())}
    store = kv.from_params(params, kind=kind, optimizer=optax.adam(0.1), **place)
    if compression:
        store = kv.set_gradient_compression(store, {"type": compression})
    return train.create_state(store, 7)


def texts(many=False, kind="device", compression=None, fsdp=False, **options):
    """The program of a real state, and that of the shapes, whose step never sees an array."""
    batch = line()
    if many:
        batch = {name: np.stack([x] * 3) for name, x in batch.items()}
    step = train.make_train_step(loss, **options)
    program, leaves = step._prepare(state_of(kind, compression, fsdp), None)
    rng, part = leaves.pop(program._rng_at), map(program._number, (0, 3))
    run, along = (program._several if many else program._one), program._batches.along[many]
    real = run.trace(leaves, rng, jax.device_put(batch, along), *(part if many else ())).lower()
    shapes = jax.eval_shape(lambda: state_of(kind, compression, fsdp))
    batch = jax.eval_shape(lambda: batch)
    return real, train.make_train_step(loss, **options).lower(shapes, batch, many=many)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", STEPS, ids=lambda options: "-".join(map(str, options)) or "plain")
def test_the_program_of_shapes_is_the_one_that_runs(options):
    real, lowered = texts(**options)
    assert lowered.as_text() == real.as_text()


def test_of_a_gradient_of_one_shard():
    step = train.make_train_step(loss, virtual_shards=8)
    shapes = jax.eval_shape(state_of)
    text = step.lower(shapes, jax.eval_shape(line)).as_text()
    assert text == step.lower(state_of(), line()).as_text()
    assert "tensor<2x3xf32>" in text  # 16 examples in 8 shards


def test_shapes_of_a_batch_are_checked():
    step = train.make_train_step(loss)
    with pytest.raises(ValueError, match="a batch of 15 cannot be divided by 4 devices"):
        step.lower(state_of(), jax.eval_shape(lambda: line(15)))


def test_nothing_is_moved():
    """The state of other devices stays where it is, and stays valid."""
    state = state_of()
    step = train.make_train_step(loss, devices=jax.devices()[:2])
    assert "num_partitions = 2" in step.lower(state, line()).as_text()
    assert state.store.devices == tuple(jax.devices()[:COUNT])
    assert state.store.values[0].sharding.device_set == set(jax.devices()[:COUNT])


# ---- what a step adds to a program by hand


def started(engine, tx):
    """A step of the engine, and the state that its first call returned."""
    step = step_of(squares, engine=engine)
    state, _ = step(start(1, tx=tx), placed(line(), 1))
    return step, state


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
    assert len(checked) == 1, "NumPy arrays go into the program as they are"
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
