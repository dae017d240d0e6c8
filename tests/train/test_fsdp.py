"""Fully sharded training of a transformer: what the compiled program sends and holds, and that it trains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from kv_model import bytes_of, placed_collectives_in

from jaxpar import parallel, train
from jaxpar.models import transformer

CONFIG = transformer.Config(layers=5, width=128, heads=4, vocabulary=512, positions=32)
SHAPES = jax.eval_shape(lambda: transformer.init(jax.random.key(0), CONFIG))
LAYER = 4 * sum(leaf.size // CONFIG.layers for leaf in jax.tree.leaves(SHAPES["layers"]))


def loss_fn(params, batch, rng):
    return transformer.loss(params, batch["tokens"]), {}


def started(names, sizes, rule):
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)
    params = transformer.init(jax.random.key(0), CONFIG)
    axes = tuple(name for name in names if name != "model")
    return train.start(params, optax.adam(1e-3), loss_fn, mesh=mesh, sharding=rule, axis_name=axes)


def batch(seed=0, size=8):
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocabulary, (size, CONFIG.positions + 1))
    return {"tokens": tokens.astype(np.int32)}


def tensor_parallel(*axes):
    return parallel.sharding_rules(transformer.TENSOR_PARALLEL, then=parallel.fsdp(axes, min_size=1, stacked_dims=1))


MESHES = {
    "8": (("data",), (8,), parallel.fsdp("data", min_size=1, stacked_dims=1)),
    "2x4": (("data", "model"), (2, 4), tensor_parallel("data", "model")),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_program_is_fully_sharded(mesh):
    state, step = started(*MESHES[mesh])
    program, whole = step.lower(state, batch()).compile(), sum(x.nbytes for x in jax.tree.leaves(state.store))
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes < 1.02 * whole / 8 + batch()["tokens"].nbytes + 100
    assert memory.output_size_in_bytes < 1.02 * whole / 8 + 100
    found = placed_collectives_in(program.as_text())
    gathers = [(inside, shapes) for inside, kind, shapes in found if kind == "all-gather"]
    assert any(inside for inside, _ in gathers)
    stacked = [shape for _, shapes in gathers for _, shape in shapes if shape[:1] == (CONFIG.layers,)]
    assert not stacked, "the layers are gathered one by one, inside the scan"
    model = 1 if mesh == "8" else 4
    tables = 4 * (2 * CONFIG.vocabulary // model + CONFIG.positions) * CONFIG.width
    activations = 4 * 8 // (8 // model) * CONFIG.positions * CONFIG.width
    for inside, kind, shapes in found:
        most = max(LAYER // model, activations if model > 1 else 0) if inside else tables + activations + 4096
        assert sum(map(bytes_of, shapes)) <= 1.05 * most, (inside, kind, shapes)
    assert not [kind for _, kind, _ in found if kind in ("all-to-all", "collective-permute")]
    # The table is looked up and multiplied. A device adds both gradients before the devices sum them.
    summed = [shape for inside, kind, shapes in found if kind == "all-reduce" and not inside for _, shape in shapes]
    assert summed.count((CONFIG.vocabulary // model, CONFIG.width)) == 1


@pytest.mark.slow
def test_losses_as_on_one_device():
    losses = {}
    for name, mesh in {
        "1": (("data",), (1,), None),
        "2x2x2": (("data", "fsdp", "model"), (2, 2, 2), tensor_parallel("data", "fsdp")),
        **MESHES,
    }.items():
        state, step = started(*mesh)
        losses[name] = []
        for i in range(8):
            state, metrics = step(state, batch(i % 2))
            losses[name].append(float(metrics["loss"]))
        np.testing.assert_allclose(losses[name], losses["1"], atol=1e-5)
    assert losses["1"][-1] < losses["1"][0] - 0.1


@pytest.mark.slow
def test_copies_of_split_params_along_another_axis():
    """HSDP: each group along `copies` has the params once. The numbers are those of params that are whole."""

    def loss_fn(params, batch, rng):
        return ((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2).mean(), {}

    draw = np.random.default_rng(0).standard_normal
    params = {"a": jnp.float32(draw((16, 32))), "b": jnp.float32(draw((32, 16)))}
    batch = {"x": np.float32(draw((16, 16))), "y": np.float32(draw((16, 16)))}
    mesh = jax.make_mesh((2, 4), ("copies", "data"))
    rule = parallel.fsdp("data", min_size=1)
    hybrid = {"mesh": mesh, "sharding": rule, "axis_name": ("copies", "data")}
    losses = []
    for options in (hybrid, {}):
        state, step = train.start(params, optax.adam(0.01), loss_fn, **options)
        if options:
            assert state.params["a"].sharding.spec == jax.P(None, "data")
            groups = [shard.replica_id for shard in state.params["a"].addressable_shards]
            assert sorted(groups) == [0] * 4 + [1] * 4
        for _ in range(3):
            state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
