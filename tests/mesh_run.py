"""What each of several processes runs for tests/devices/test_mesh_processes.py: engine `jit` and the user's mesh.

    python mesh_run.py HOST:PORT PROCESSES PROCESS FOLDER PHASE...

What the processes have to agree on is asserted here. What the topologies have to agree on is written to FOLDER.
"""

import contextlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jaxpar import checkpoint, data, kv, parallel, train, updaters

jax.config.update("jax_numpy_rank_promotion", "raise")

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
FSDP = parallel.fsdp("data", min_size=1)
RULES = parallel.sharding_rules({"hidden": P(None, "model"), "out": P("model")}, then=FSDP)
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mesh_of(*sizes, kind=AUTO, across="data"):
    """A mesh of all devices. `across` is the axis of two whose neighbours are of several processes."""
    grid = np.array(jax.devices()).reshape(sizes)
    if across == "model":
        grid = grid.T.reshape(sizes)
    return Mesh(grid, ("data", "model")[: len(sizes)], axis_types=(kind,) * len(sizes))


def params_of(rank=None):
    """Another one in each process: those of process 0 count."""
    seed = kv.rank() if rank is None else rank
    return {"hidden": numbers(8, 16, seed=seed) / 3, "bias": np.zeros(16, np.float32), "out": numbers(16, 4, seed=seed)}


def loss_fn(params, batch, rng, statistics):
    """With dropout and the batch's own mean, so that it matters what a share is."""
    h = jax.nn.relu(batch["x"] @ params["hidden"] + params["bias"][None])
    mean = h.mean(0, keepdims=True)
    h = (h - mean) * jax.random.bernoulli(rng, 0.8, h.shape)
    loss = ((h @ params["out"] - batch["y"]) ** 2).mean()
    return loss, {"spread": h.std()}, {"mean": 0.9 * statistics["mean"] + 0.1 * mean[0]}


def batch_of(seed):
    return {"x": numbers(16, 8, seed=seed), "y": numbers(16, 4, seed=seed + 100)}


def apply(params, x, statistics=None):
    return jax.nn.relu(x @ params["hidden"] + params["bias"][None]) @ params["out"]


CLASSIFIED = train.classification_loss(apply)


def examples(count=32):
    return data.Dataset(numbers(count, 8, seed=5), np.arange(count) % 4)


def whole(tree):
    """The arrays of a pytree in host memory, whole in each process."""
    leaves, structure = jax.tree.flatten(tree)
    spread = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not x.is_fully_addressable]
    if spread:
        copies = NamedSharding(leaves[spread[0]].sharding.mesh, P())
        jax.block_until_ready(tree)  # before collectives
        found = jax.jit(lambda xs: xs, out_shardings=copies)([leaves[i] for i in spread])
        for i, x in zip(spread, found, strict=True):
            leaves[i] = x.addressable_data(0)
    return structure.unflatten([np.asarray(x) for x in leaves])


def named(prefix, tree):
    leaves = jax.tree_util.tree_leaves_with_path(whole(tree))
    return {prefix + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


# Training under engine `jit`.


def made_where_they_belong(mesh, rule):
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params_of(0)))
    shardings = parallel.shardings_of(shapes, rule, mesh)
    return jax.jit(lambda: jax.tree.map(jnp.asarray, params_of(0)), out_shardings=shardings)()


def layouts():
    """(name, store, options of the step, of the state)."""
    square, line = mesh_of(2, 2), mesh_of(4)
    across = mesh_of(2, 2, kind=EXPLICIT, across="model")
    yield "model across", kv.from_params(params_of(), optimizer=ADAM, mesh=across, sharding=RULES), {"engine": "jit"}, {}
    yield "fsdp", kv.from_params(params_of(), optimizer=ADAM, mesh=line, sharding=FSDP), {"accumulate": 2}, {}
    yield "kind sharded", kv.from_params(params_of(), kind="sharded", optimizer=ADAM), {}, {}
    split = {**params_of(), "hidden": made_where_it_belongs(square)}
    clip = {"grad_transform": optax.trace(0.5)}
    options = {"nonfinite": "skip", "loss_scale": "dynamic", **clip}
    yield "some made there", kv.from_params(split, optimizer=optax.adam(0.01)), options, clip
    by_key = kv.from_params(params_of(), updater=updaters.mxnet_sgd(0.01, momentum=0.9))
    yield "a state a key", kv.place(by_key, mesh=square, sharding=RULES), {"mesh": square, "remat": True}, {}


def made_where_it_belongs(mesh):
    return jax.jit(lambda: jnp.asarray(params_of(0)["hidden"]), out_shardings=NamedSharding(mesh, P("data", "model")))()


def ran(store, options, more):
    step = train.make_train_step(loss_fn, **options)
    state, losses = train.create_state(store, 3 + kv.rank(), model_state={"mean": np.zeros(16, np.float32)}, **more), []
    for seed in range(3):
        state, metrics = step(state, batch_of(seed))
        losses.append(metrics)
    return state, losses


def trained(folder):
    """The same store and losses in every topology."""
    found = {}
    for name, store, options, more in layouts():
        began = time.monotonic()
        state, losses = ran(store, options, more)
        assert state.store.shardings, name
        kernel = state.params["hidden"]
        assert name == "kind sharded" or kernel.addressable_shards[0].data.size <= kernel.size // 4, name
        found |= named(name, {"losses": losses, "store": state.store, "model": state.model_state})
        print(name, round(time.monotonic() - began, 2), flush=True)
    keep(folder / "trained.npz", found)


# `fit`, evaluation and checkpoints.


def started(mesh, sharding=RULES, seed=3):
    store = kv.from_params(params_of(), optimizer=ADAM, mesh=mesh, sharding=sharding)
    return train.create_state(store, seed + kv.rank())


def fitted(directory, state, step=None, **options):
    step = step or train.make_train_step(CLASSIFIED)
    return train.fit(
        state,
        step,
        examples(),
        test_data=examples(13),
        apply_fn=apply,
        epochs=2,
        batch_size=8,
        progress=False,
        checkpoint_dir=directory,
        checkpoint_every=3,
        **options,
    )


def scores(state, history):
    """Of the run and after it. The same in every process."""
    names = ("loss", "accuracy", "test_loss", "test_accuracy")
    after = train.evaluate(state, apply, examples(13), batch_size=4)
    outputs = train.predict(state, apply, examples(13), batch_size=4)
    assert outputs.shape == (13, 4)
    np.testing.assert_allclose((outputs.argmax(1) == examples(13).labels).mean(), after["accuracy"], rtol=1e-6)
    rows = [[record[name] for name in names] for record in history]
    return {"rows": rows, "after": list(after.values()), "outputs": outputs}


def undisturbed(folder):
    state, history = fitted(folder / "undisturbed", started(mesh_of(2, 2)))
    assert int(state.step) == 8
    keep(folder / "undisturbed.npz", named("", {"scores": scores(state, history), "params": state.params}))


def killed(folder):
    """Saves after step 3, and never gets further than step 5: the test kills all processes there."""

    def on_step(step, metrics):
        if step > 4:
            time.sleep(600)

    fitted(folder / "run", started(mesh_of(2, 2)), on_step=on_step)


def resumed(folder):
    """On the same mesh by the same processes, or elsewhere."""
    same = kv.num_workers() == 2
    state = started(mesh_of(2, 2)) if same else started(mesh_of(4), FSDP)
    state, history = fitted(folder / "run", state, resume=True)
    assert int(state.step) == 8
    keep(folder / "resumed.npz", named("", {"scores": scores(state, history), "params": state.params}))


def restored(folder):
    """A checkpoint of one mesh on other meshes, kinds and engines, with the same bits. Then each trains."""
    state = started(mesh_of(2, 2))
    state, _ = train.make_train_step(CLASSIFIED)(state, next(iter(data.batches(examples(), 8, devices=jax.devices()))))
    checkpoint.save(folder / "state", state)
    expected, losses = whole({"params": state.params, "optimizer": state.store.optimizer_state}), []
    batch = next(iter(data.batches(examples(), 16, devices=jax.devices())))
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
    for like in (
        started(mesh_of(2, 2, across="model"), seed=9),
        started(mesh_of(4), FSDP, seed=9),
        train.create_state(kv.from_params(params_of(), optimizer=adam), 9),
        train.create_state(kv.place(state.store, mesh=mesh_of(2, 2, across="model"), sharding=FSDP), 9),
    ):
        found = checkpoint.restore(folder / "state", like)
        assert [x.sharding for x in jax.tree.leaves(found)] == [x.sharding for x in jax.tree.leaves(like)]
        same_bits({"params": found.params, "optimizer": found.store.optimizer_state}, expected)
        _, metrics = train.make_train_step(CLASSIFIED)(found, batch)
        losses.append(whole(metrics)["loss"])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, whole(one), whole(other))


def keep(file, found):
    if kv.rank() == 0:
        np.savez(file, **found)


def main():
    coordinator, count, index, folder, *phases = sys.argv[1:]
    if int(count) > 1:
        jax.distributed.initialize(coordinator, int(count), int(index), initialization_timeout=60)
    for phase in phases:
        began = time.monotonic()
        globals()[phase](Path(folder))
        print(f"{phase}: {time.monotonic() - began:.1f} s", flush=True)
    kv.barrier("done")


if __name__ == "__main__":
    main()
