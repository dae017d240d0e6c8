"""`step.lower` of shapes gives the program that runs, whatever the step keeps in its state. Nothing is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_model import EVERYWHERE, line

from jaxpar import kv, parallel, train

COUNT = 4
STEPS = [
    *({"engine": engine, "kind": kind} for engine, kind in EVERYWHERE if (engine, kind) != ("jit", "local")),
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
    real = run.lower(leaves, rng, jax.device_put(batch, along), *(part if many else ()))
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
