"""What each of several processes runs for tests/devices/test_processes.py: engine `jit` and the user's mesh.

Its network is that of tests/train/test_engine_jit.py and tests/devices/test_user_mesh.py too.

    python mesh_run.py HOST:PORT PROCESSES PROCESS FOLDER PHASE...

What the processes have to agree on is asserted here. What the topologies have to agree on is written to FOLDER.
"""

import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from several_processes import run_phases, stays_after

from jaxpar import checkpoint, data, kv, parallel, sparse, train, updaters
from jaxpar._devices import processes
from jaxpar._devices.mesh import to_host

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
    new = {"mean": 0.9 * statistics["mean"] + 0.1 * mean[0], "count": statistics["count"] + 1}
    return ((h @ params["out"] - batch["y"]) ** 2).mean(), {"spread": h.std()}, new


@functools.cache
def step_of(**options):
    """A training step; one for all who ask for it."""
    return train.make_train_step(loss_fn, **options)


def state_of(store, rng=0, **options):
    statistics = {"mean": np.zeros(16, np.float32), "count": np.int32(0)}
    return train.create_state(store, rng, model_state=statistics, **options)


def batch_of(seed, size=16):
    return {"x": numbers(size, 8, seed=seed), "y": numbers(size, 4, seed=seed + 100)}


def apply(params, x, statistics=None):
    return jax.nn.relu(x @ params["hidden"] + params["bias"][None]) @ params["out"]


CLASSIFIED = train.classification_loss(apply)


def examples(count=32):
    return data.Dataset(numbers(count, 8, seed=5), np.arange(count) % 4)


def whole(tree):
    """The arrays of a pytree in host memory, whole in each process."""
    jax.block_until_ready(tree)  # before collectives
    return jax.tree.map(lambda x: np.asarray(to_host(x)), tree)


def named(prefix, tree):
    leaves = jax.tree_util.tree_leaves_with_path(whole(tree))
    return {prefix + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


# Training under engine `jit`.


def layouts():
    """(name, store, options of the step, of the state)."""
    square, line = mesh_of(2, 2), mesh_of(4)
    across = mesh_of(2, 2, kind=EXPLICIT, across="model")
    crossed = kv.from_params(params_of(), optimizer=ADAM, mesh=across, sharding=RULES)
    yield "model across", crossed, {"engine": "jit"}, {}
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


def ran(store, more=None, **options):
    """The state and the metrics after a few steps. `more` is of the state, the options are of the step."""
    step = step_of(**options)
    state, losses = state_of(store, 3 + kv.rank(), **(more or {})), []
    for seed in range(3):
        state, metrics = step(state, batch_of(seed))
        losses.append(metrics)
    return state, losses


def trained(folder):
    """The same store and losses in every topology."""
    found = {}
    for name, store, options, more in layouts():
        began = time.monotonic()
        state, losses = ran(store, more, **options)
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


def fitted(directory, state, **options):
    options |= {"test_data": examples(13), "apply_fn": apply, "epochs": 2, "batch_size": 8, "progress": False}
    options |= {"checkpoint_dir": directory, "checkpoint_every": 3}
    return train.fit(state, train.make_train_step(CLASSIFIED), examples(), **options)


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
    """Saves after step 3, and never gets further than step 5."""
    fitted(folder / "run", started(mesh_of(2, 2)), on_step=stays_after(4))


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


def loaders(folder):
    """Data of any origin is split over the data axes only, and gives the same losses."""
    arrays = {"image": examples().images, "label": examples().labels}
    loader = [{name: x[8 * i : 8 * i + 8] for name, x in arrays.items()} for i in range(4)]
    workers, rank = kv.num_workers(), kv.rank()
    share = lambda x: np.split(x, workers)[rank]  # noqa: E731
    step, losses = train.make_train_step(CLASSIFIED), []
    for mesh in (mesh_of(2, 2), mesh_of(2, 2, across="model")):
        for source in (data.from_arrays(arrays), [jax.tree.map(share, batch) for batch in loader]):
            _, history = train.fit(started(mesh), step, source, epochs=1, batch_size=8, progress=False)
            losses.append(history[0]["loss"])
    np.testing.assert_allclose(losses[2:], losses[:2], rtol=1e-6)
    uneven = data.from_arrays({name: x[:6] for name, x in arrays.items()})
    _, history = train.fit(started(mesh_of(2, 2)), step, uneven, epochs=1, batch_size=2, progress=False)
    assert np.isfinite(history[0]["loss"])


def in_flight(folder):
    """Processes exchange texts while a program of all devices is under way, whose messages they do not take."""
    mesh = mesh_of(2, 2)

    def gather(x):
        for _ in range(40):
            x = jnp.tanh(x) + jax.lax.all_gather(x[0], "data").sum(0)[None] * 1e-3
        return x

    spread = NamedSharding(mesh, P("data", "model"))
    x = jax.make_array_from_callback((400, 400), spread, lambda index: np.ones((200, 200), np.float32))
    run = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=spread.spec, out_specs=spread.spec, check_vma=False))
    store = kv.init(kv.create("dist_sync"), 0, jnp.zeros(64))
    expected = whole(run(x))
    for i in range(8):
        found = run(x)
        time.sleep(np.random.default_rng(7 * i + kv.rank()).uniform(0, 0.05))
        assert processes.exchange(f"{i} from {kv.rank()}") == [f"{i} from {rank}" for rank in range(kv.num_workers())]
        assert kv.pull(kv.push(store, 0, jnp.ones(64)), 0).tolist() == [kv.num_workers()] * 64
        same_bits(found, expected)


# Inside the user's mesh.


def parts_of(sharding, array):
    """This process's rows of an array that is split along its first axis."""
    indices = sharding.addressable_devices_indices_map(array.shape).values()
    found = {index[0].indices(len(array))[:2] for index in indices}
    return np.concatenate([array[slice(*rows)] for rows in sorted(found)])


def batches(sharding, spec):
    rng, found = jax.random.key(0), []
    for resident in (True, False):
        options = {"rng": rng, "sharding": spec, "resident": resident}
        found += itertools.islice(data.batches(examples(), 8, **options), 2)
    arrays = [{"x": numbers(8, 3, seed=i), "y": np.arange(8.0, dtype=np.float32)} for i in range(2)]
    parts = [jax.tree.map(lambda x: parts_of(sharding, x), batch) for batch in arrays]
    found += data.prefetch(parts, spec)
    found += data.prefetch(jax.device_put(parts, jax.local_devices()[0]), spec)
    for batch in found:
        assert all(x.sharding == sharding for x in jax.tree.leaves(batch))
    same_bits(found[-2:], arrays)
    same_bits(found[-4:-2], arrays)
    return found


def pushes(rows):
    """Every verb at the prompt, of stores of this process and of stores over all."""
    found, everywhere, each = [], jax.devices(), [jax.device_put(numbers(8), d) for d in jax.local_devices()]
    for kind in ("dist_sync", "device"):
        store = kv.init(kv.create(kind), [3, 5], [numbers(8, seed=9), numbers(6, 2)])
        store = kv.set_updater(store, updaters.accumulate)
        store = kv.push(store, [3, 5], [each, numbers(6, 2)])
        store, pulled = kv.pushpull(store, 3, numbers(8), devices=jax.local_devices())
        found += [pulled, kv.pull(store, [3, 5])]
        store = kv.push(store, 5, rows)
        found += [kv.row_sparse_pull(store, 5, np.array([1, 4])), kv.pull(kv.place(store, everywhere), [3, 5])]
    for kind in ("dist_sync", "sharded"):
        store = kv.from_params(params_of(), kind=kind, optimizer=optax.adam(0.1), devices=everywhere)
        found += [kv.to_params(store), kv.pull(store, "hidden"), kv.pull(store, "out", devices=jax.local_devices())]
    pushed = kv.from_params(params_of(), kind="dist_sync", optimizer=optax.adam(0.1))
    pushed = kv.push(pushed, ["bias", "hidden", "out"], [numbers(16), [numbers(8, 16)] * 2, numbers(16, 4)])
    return [*found, kv.to_params(pushed), kv.pull(pushed, [0, 2])]


def on_the_mesh(mesh):
    """The verbs of a store that is split over the mesh."""
    split = kv.from_params(params_of(), kind="dist_sync", optimizer=ADAM, mesh=mesh, sharding=FSDP)
    found = [kv.to_params(split), kv.pull(split, 2), kv.eval_params(split)]
    split = kv.push(split, [0, 1, 2], [numbers(16), numbers(8, 16), [numbers(16, 4)] * 2])
    assert split.values[1].sharding.is_equivalent_to(dict(split.shardings)[1], 2)
    found += [kv.to_params(split), kv.pull(split, 0, devices=jax.local_devices())]
    moved = kv.place(split, mesh=mesh_of(4), sharding=FSDP)
    return [*found, kv.to_params(moved), moved.optimizer_state]


STEPS = {engine: train.make_train_step(CLASSIFIED, engine=engine) for engine in ("pmap", "shard_map", "jit")}
NUMBERED = {"explicit": ("pmap", "jit"), "auto": ("shard_map", "jit")}


def steps(name, mesh, batch):
    found = []
    for engine in NUMBERED[name]:
        step = STEPS[engine]
        where = {"mesh": mesh, "sharding": FSDP} if engine == "jit" else {"devices": tuple(mesh.devices.flat)}
        state = train.create_state(kv.from_params(params_of(), optimizer=optax.adam(0.1), **where), 1 + kv.rank())
        for _ in range(2):
            state, metrics = step(state, batch)
        found += [state.params, metrics, train.evaluate(state, apply, examples(13), batch_size=4)]
    return found


def inside(folder):
    """The same bits in the user's mesh as without one. The context stays as it was."""
    began = time.monotonic()
    rows = sparse.RowSparse(np.arange(2), np.ones((2, 2), np.float32), (6, 2))  # inside, jnp spreads over the mesh
    pushed = whole(pushes(rows))
    for name, mesh in (
        ("explicit", mesh_of(2, 2, kind=EXPLICIT, across="model")),
        ("auto", mesh_of(2, 2)),
    ):
        sharding = NamedSharding(mesh, P("data"))
        taken = batches(sharding, sharding)
        expected = whole([taken, pushed, on_the_mesh(mesh), steps(name, mesh, taken[0])])
        with jax.set_mesh(mesh):
            taken = batches(sharding, P("data"))
            found = [taken, pushes(rows), on_the_mesh(mesh), steps(name, mesh, taken[0])]
            assert jax.sharding.get_mesh() == mesh
        same_bits(found, expected)
        print(name, round(time.monotonic() - began, 1), flush=True)


def same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, whole(one), whole(other))


def keep(file, found):
    if kv.rank() == 0:
        np.savez(file, **found)


if __name__ == "__main__":
    run_phases(globals())
