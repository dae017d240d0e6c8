"""Everything inside of the user's mesh: `jax.set_mesh` of Explicit and Auto meshes, any axes, any devices.

The programs are those that run without a mesh, so their bits are the same and nothing is compiled again.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from kv_model import on_host
from mesh_run import batch_of, numbers, params_of, state_of, step_of
from world import apply

from jaxpar import checkpoint, data, kv, parallel, train, updaters

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
DEVICES = jax.devices()[:4]  # of the stores
TX = optax.adam(0.1)


def mesh_of(shape, names, types, chosen=None):
    return Mesh(np.array(chosen or DEVICES).reshape(shape), names, axis_types=types)


MESHES = {
    "explicit": lambda: mesh_of((4,), ("data",), (EXPLICIT,)),
    "auto": lambda: mesh_of((4,), ("data",), (AUTO,)),
    "explicit2d": lambda: mesh_of((2, 2), ("data", "model"), (EXPLICIT, EXPLICIT)),
    "auto2d": lambda: mesh_of((2, 2), ("data", "model"), (AUTO, AUTO)),
}
OTHERS = {
    "mixed": lambda: mesh_of((2, 2), ("data", "model"), (EXPLICIT, AUTO)),
    "reversed": lambda: mesh_of((4,), ("data",), (EXPLICIT,), DEVICES[::-1]),
    "elsewhere": lambda: mesh_of((2,), ("x",), (EXPLICIT,), jax.devices()[6:]),
    "some": lambda: mesh_of((2,), ("data",), (EXPLICIT,), DEVICES[1:3]),
    "more": lambda: mesh_of((8,), ("data",), (EXPLICIT,), jax.devices()),
}


@contextlib.contextmanager
def inside(mesh):
    """A block with that mesh set, after which it must still be set. With None there is none."""
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        before = jax.sharding.get_abstract_mesh(), jax.sharding.get_mesh()
        yield
        assert (jax.sharding.get_abstract_mesh(), jax.sharding.get_mesh()) == before


def same_bits(tree, other):
    jax.tree.map(np.testing.assert_array_equal, on_host(tree), on_host(other))


def check_in(mesh, run):
    """`run` gives the same bits inside of the mesh as without one, with no more programs."""
    with inside(None):
        expected = run()
    with inside(mesh):
        same_bits(run(), expected)


BATCH = batch_of(0)


# The twelve combinations, and as many for meshes with two axes.


def pushes(kind):
    params, by_key = {"w": numbers(3, 5), "b": numbers(2)}, updaters.from_optax(TX)
    store = kv.from_params(params, kind=kind, updater=by_key, devices=DEVICES)
    each = [[jax.device_put(numbers(*s, seed=i), d) for i, d in enumerate(DEVICES)] for s in ((2,), (3, 5))]
    store = kv.push(store, [0, 1], each)
    store, pulled = kv.pushpull(store, [0, 1], [numbers(2, seed=8), numbers(3, 5, seed=9)], devices=DEVICES[:2])
    return pulled, kv.pull(store, [0, 1]), kv.to_params(store), repr(store)[:30] == ""


def start(**options):
    """A state of params and running statistics, for these steps."""
    return state_of(kv.from_params(params_of(), optimizer=TX, **options), devices=DEVICES)


def steps(engine, kind, mesh=None):
    step, batch, state = step_of(engine=engine), BATCH, start(kind=kind)
    if mesh is not None and set(mesh.devices.flat) == set(DEVICES):
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    state, first = step(state, batch)
    state, second = step(state, BATCH)
    return state.params, state.model_state, first, second


@functools.cache
def without_mesh(what, kind):
    return on_host(pushes(kind) if what == "push" else steps(what, kind))


# The second row has kind `device` in the other meshes; kind `sharded` has what depends on them too.
KINDS_AND_MESHES = [
    pytest.param(kind, name, marks=pytest.mark.slow if kind == "device" and name in OTHERS else ())
    for kind in ("device", "sharded")
    for name in (*MESHES, *OTHERS)
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "name"), KINDS_AND_MESHES)
@pytest.mark.parametrize("what", ["push", "pmap", "shard_map"])
def test_the_same_bits_as_without_a_mesh(what, kind, name):
    mesh = {**MESHES, **OTHERS}[name]()
    expected = without_mesh(what, kind)
    with inside(mesh):
        same_bits(pushes(kind) if what == "push" else steps(what, kind, mesh), expected)


# The verbs at the prompt.


def all_verbs():
    """Every verb, of kinds with a delay, with compression, rows and a plain updater too."""
    found = []
    for kind in ("local", "dist_async"):
        store = kv.set_updater(kv.init(kv.create(kind), [3, 5], [jnp.ones(4), numbers(6, 2)]), updaters.accumulate)
        for i in range(3):
            each = [jax.device_put(jnp.full(4, float(i)), d) for d in DEVICES]
            store = kv.push(store, [3, 5], [each, numbers(6, 2)])
        found += [kv.pull(store, [3, 5]), kv.pull(kv.flush(store), [3, 5])]
        store, copies = kv.broadcast(kv.flush(store), 7, numbers(2), devices=DEVICES[:2])
        found += [copies, kv.pull(kv.place(store, DEVICES[:2]), 7)]
    spec = {"type": "2bit", "threshold": 0.5}
    store = kv.set_gradient_compression(kv.init(kv.create("device"), 0, jnp.zeros((8, 64))), spec)
    for seed in range(2):
        store = kv.push(store, 0, [jax.device_put(numbers(8, 64, seed=seed + i), d) for i, d in enumerate(DEVICES)])
    found.append(kv.pull(store, 0))
    table = kv.set_optimizer(kv.init(kv.create("device", devices=DEVICES), 0, numbers(6, 2)), TX)
    rows = kv.row_sparse_pull(table, 0, np.array([4, 1, 4]))
    found += [rows, kv.pull(kv.push(table, 0, rows), 0), kv.row_sparse_pull(table, 0, np.array([0]), devices=DEVICES)]
    plain = kv.set_updater(kv.init(kv.create("sharded"), 0, numbers(5)), lambda key, pushed, stored: stored - pushed)
    return [*found, kv.pull(kv.push(plain, 0, jnp.ones(5)), 0)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param("explicit2d", marks=pytest.mark.slow), "auto2d", "reversed"])
def test_every_verb_at_the_prompt(name):
    check_in({**MESHES, **OTHERS}[name](), all_verbs)


def test_an_abstract_mesh():
    with jax.sharding.use_abstract_mesh(MESHES["explicit2d"]().abstract_mesh):
        same_bits(pushes("device"), without_mesh("push", "device"))
        assert not jax.sharding.get_abstract_mesh().empty


def test_an_error_leaves_the_mesh_set():
    store = kv.init(kv.create(), 3, jnp.ones(2))
    with inside(MESHES["explicit"]()), pytest.raises(ValueError, match="expected shape"):
        kv.push(store, 3, jnp.ones(3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["explicit", "explicit2d"])
def test_results_are_of_the_users_mesh(name):
    """So they can be used together with the user's other arrays. JAX lets nothing else be."""
    mesh = MESHES[name]()
    with inside(mesh):
        own = jax.device_put(numbers(4, 8), NamedSharding(mesh, P("data")))
        for kind in ("device", "sharded"):
            store = kv.from_params({"w": numbers(8)}, kind=kind, optimizer=TX, devices=DEVICES)
            store = kv.push(store, 0, [jax.device_put(numbers(8), d) for d in DEVICES])
            assert (own @ kv.pull(store, 0) + own @ kv.to_params(store)["w"]).shape == (4,)
            assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(store))
        state, metrics = step_of(engine="pmap")(start(), BATCH)
        assert (own @ state.params["hidden"] * metrics["loss"]).shape == (4, 16)
        own_mean = parallel.replicate({"x": numbers(8)}, DEVICES)["x"] + own.mean(0)
        assert own_mean.shape == (8,)


@pytest.mark.slow
def test_arrays_of_an_explicit_mesh_can_be_given():
    mesh = MESHES["explicit2d"]()

    def run(give):
        store = kv.from_params({"w": give(numbers(4, 4), P(None, "model"))}, kind="sharded", optimizer=TX)
        store = kv.push(store, 0, [give(numbers(4, 4, seed=1), P("data")), give(numbers(4, 4, seed=2), P())])
        both = kv.to_params(kv.from_params([give(numbers(3), P()), give(numbers(4), P("data"))], devices=DEVICES))
        halves = parallel.split_and_load(give(numbers(8, 2), P(("data", "model"))), DEVICES[:2])
        return kv.pull(store, 0), both, halves, parallel.copy_to(give(numbers(4), P("model")), DEVICES[3])

    expected = on_host(run(lambda x, spec: x))
    with inside(mesh):
        same_bits(run(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))), expected)


# Steps with options, fit, evaluation, checkpoints.

OPTIONS = {
    "accumulate": {"accumulate": 2, "remat": True},
    "guard": {"nonfinite": "skip", "loss_scale": "dynamic"},
    "local": {"local_steps": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
@pytest.mark.parametrize("option", [*OPTIONS, "stale"])
def test_options_of_a_step(engine, option):
    step = step_of(engine=engine, **OPTIONS.get(option, {}))

    def run():
        state = step.complete(start(**({"kind": "dist_async", "staleness": 1} if option == "stale" else {})))
        assert step.lower(state, BATCH).as_text()
        for _ in range(3):
            state, metrics = step(state, BATCH)
        train.check_finite(metrics, state)
        if option == "stale":
            state, metrics = step.many(state, jax.tree.map(lambda x: np.stack([x, x]), BATCH))
        state = step.finish(state)
        return state.params, state.model_state, metrics

    check_in(MESHES["explicit2d"](), run)


def pictures(n=24):
    return data.Dataset(numbers(n, 3), (np.arange(n) % 3).astype(np.int32))


CLASSIFIER = train.make_train_step(train.classification_loss(apply), engine="shard_map")


def trained(folder, source):
    step, seen = CLASSIFIER, []
    state = train.create_state(kv.from_params({"w": numbers(3, 3)}, optimizer=TX), 0, devices=DEVICES)
    options = {"batch_size": 8, "progress": False, "test_data": pictures(10), "apply_fn": apply}
    seen_mesh = lambda state, record: seen.append(jax.sharding.get_mesh())  # noqa: E731
    checkpoints = {"checkpoint_dir": folder, "callbacks": seen_mesh}
    state, history = train.fit(state, step, source, epochs=2, **options, **checkpoints)
    assert seen == [jax.sharding.get_mesh()] * 2  # what a user gives is called inside of the mesh
    like = train.create_state(kv.from_params({"w": numbers(3, 3)}, optimizer=TX), 1, devices=DEVICES)
    resumed, again = train.fit(like, step, source, epochs=3, **options, **checkpoints)
    restored = checkpoint.restore(checkpoint.latest(folder), like=state)
    assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(state)]
    matrix = train.confusion_matrix(resumed, apply, pictures(10))
    outputs = train.predict(resumed, apply, pictures(10), batch_size=4)
    keep = [{k: v for k, v in r.items() if "second" not in k} for r in [*history, *again]]
    return keep, restored.params, matrix, outputs, train.evaluate(resumed.params, apply, pictures(10), batch_size=4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "source"), [("explicit2d", "arrays"), ("explicit", "arrays"), ("explicit", "a loader")]
)
def test_fit_evaluation_and_checkpoints(name, source, tmp_path):
    loader = [{"image": numbers(8, 3, seed=i), "label": np.arange(8) % 3} for i in range(3)]
    folders = map(str, itertools.count())
    given = pictures() if source == "arrays" else loader
    check_in(MESHES[name](), lambda: trained(tmp_path / next(folders), given))


@pytest.mark.slow
def test_batches_of_a_mesh_go_into_a_step_where_none_is_set():
    mesh, expected = MESHES["explicit2d"](), steps("pmap", "device")
    same_bits(steps("pmap", "device", mesh), expected)


# Made inside of an Explicit mesh, used where none is set.

SPLIT = {"device": {}, "sharded": {"kind": "sharded"}, "mesh": {"sharding": P("data")}}


def made_inside(mesh, how):
    where = {"mesh": mesh} if how == "mesh" else {"devices": tuple(mesh.devices.flat)}
    with inside(mesh):
        return kv.from_params({"b": np.zeros(4, np.float32), "w": numbers(8, 4)}, optimizer=TX, **where, **SPLIT[how])


def biased(params, images):
    return images @ params["w"] + params["b"][None]


BIASED = train.make_train_step(train.classification_loss(biased))


def in_and_out(mesh, how, folder):
    """Every verb, step, loop and file, on a store and on a state of the mesh."""
    store, step = made_inside(mesh, how), BIASED
    pushed, pulled = kv.pushpull(store, [0, 1], [numbers(4), [numbers(8, 4)] * 2])
    found = [pulled, kv.pull(store, [0, 1], devices=DEVICES[:2]), kv.to_params(pushed), kv.eval_params(pushed)]
    found.append(kv.pull(jax.jit(lambda s: kv.push(s, [0, 1], [jnp.ones(4), jnp.ones((8, 4))]))(store), 1))
    found.append(kv.to_params(kv.place(store, DEVICES)))
    every = mesh.axis_names if how == "sharded" else None

    def typed():
        state = train.create_state(made_inside(mesh, how), 0)
        spec = lambda x: P(every) if every and x.ndim == 2 else x.sharding.spec  # noqa: E731
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), state)

    batch = {"image": numbers(8, 8), "label": np.arange(8) % 4}
    state, metrics = step(typed(), batch)
    found += [state.params, metrics, step.many(typed(), jax.tree.map(lambda x: np.stack([x, x]), batch))[1]]
    found += [typed().params, typed().eval_params]
    dataset = data.Dataset(numbers(16, 8), np.arange(16) % 4)
    fitted, history = train.fit(
        typed(), step, dataset, epochs=1, batch_size=8, progress=False, test_data=dataset, apply_fn=biased
    )
    found += [fitted.params, history[0]["loss"], history[0]["test_loss"]]
    found.append(train.predict(typed(), biased, dataset, batch_size=8))
    checkpoint.save(folder / "saved", typed())
    found.append(checkpoint.restore(checkpoint.latest(folder), typed()).params)
    return on_host(found)


@pytest.mark.slow
@pytest.mark.parametrize("how", SPLIT)
def test_made_inside_of_a_mesh_and_used_where_none_is_set(how, tmp_path):
    explicit, auto = (in_and_out(MESHES[name](), how, tmp_path / name) for name in ("explicit2d", "auto2d"))
    same_bits(explicit, auto)


def test_parallel():
    def run():
        shards = parallel.split_and_load({"x": np.arange(8.0), "y": jnp.arange(8)}, DEVICES)
        sums = parallel.allreduce([jax.device_put(numbers(3, seed=i), d) for i, d in enumerate(DEVICES)])
        over = {"axis_name": "i", "devices": DEVICES}
        total = lambda x: jax.lax.psum(x, "i")  # noqa: E731
        totals = [parallel.spmd(total, engine=e, **over)(numbers(4, 2)) for e in ("pmap", "shard_map")]
        return shards, sums, totals, parallel.replicate(jnp.ones(3), DEVICES)

    check_in(MESHES["explicit2d"](), run)


# Batches on a mesh.

SPECS = [("explicit", P("data")), ("explicit2d", P("data")), ("auto2d", P(("data", "model"))), ("explicit2d", P())]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("name", "spec"), [*SPECS, ("reversed", P("data"))])
def test_batches_on_a_mesh(name, spec, resident):
    mesh = {**MESHES, **OTHERS}[name]()
    sharding, rng = NamedSharding(mesh, spec), jax.random.key(0)
    expected = list(data.batches(pictures(), 8, rng=rng, epochs=2))
    for context in (None, mesh):
        with inside(context):
            found = list(data.batches(pictures(), 8, rng=rng, epochs=2, sharding=sharding, resident=resident))
        same_bits(found, expected)
        assert all(array.sharding.is_equivalent_to(sharding, array.ndim) for b in found for array in b.values())
        assert all(array.sharding.mesh == mesh for b in found for array in b.values())


def test_batches_by_a_spec_of_the_mesh_that_is_set():
    mesh = MESHES["explicit"]()
    with inside(mesh):
        batch = next(iter(data.batches(pictures(), 8, sharding=P("data"))))
        assert batch["image"].sharding == NamedSharding(mesh, P("data"))
        devices_of = next(iter(data.batches(pictures(), 8, devices=DEVICES)))
        assert (devices_of["image"] + batch["image"]).shape == (8, 3)


def test_what_is_no_sharding_of_a_batch():
    mesh = MESHES["explicit2d"]()
    for sharding in (P("data"), SingleDeviceSharding(DEVICES[0]), mesh):
        with pytest.raises(TypeError, match="sharding must be a NamedSharding"):
            data.batches(pictures(), 8, sharding=sharding)
    with pytest.raises(ValueError, match="splits its first axis only"):
        data.batches(pictures(), 8, sharding=NamedSharding(mesh, P("data", "model")))
    with pytest.raises(ValueError, match="not both"):
        data.batches(pictures(), 8, sharding=NamedSharding(mesh, P()), devices=DEVICES)
    with pytest.raises(ValueError, match="a batch of 6 cannot be divided by 4 devices"):
        data.batches(pictures(), 6, sharding=NamedSharding(mesh, P(("data", "model"))))


@pytest.mark.parametrize("size", [0, 1, 2])
def test_prefetch_reads_no_further_than_asked(size):
    mesh, read = MESHES["explicit"](), []

    def loader():
        for i in range(6):
            read.append(i)
            yield {"x": np.full((4, 2), i), "y": [np.arange(4.0), jnp.ones(4)]}

    sharding = NamedSharding(mesh, P("data"))
    with inside(mesh):
        batches = data.prefetch(loader(), sharding, size=size)
        assert read == []
        first = next(batches)
        assert len(read) == 1 + size
        assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(first))
        assert [np.asarray(b["x"])[0, 0] for b in batches] == [1, 2, 3, 4, 5]


def test_prefetch_raises_errors_in_their_place():
    def loader():
        yield np.zeros(4)
        yield np.ones(4)
        raise RuntimeError("the disk is gone")

    batches = data.prefetch(loader(), size=5)
    assert [next(batches).tolist(), next(batches).tolist()] == [[0.0] * 4, [1.0] * 4]
    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(batches)
    assert next(batches, None) is None


def test_prefetch_stops_early_without_a_trace():
    closed = []

    def loader():
        try:
            yield from map(np.array, range(9))
        finally:
            closed.append(True)

    source = loader()
    batches = data.prefetch(source)
    assert int(next(batches)) == 0
    batches.close()
    source.close()
    assert closed


def test_what_cannot_be_prefetched():
    mesh = MESHES["explicit2d"]()
    both = {"tokens": NamedSharding(mesh, P("data", "model")), "length": NamedSharding(mesh, P("data"))}
    batch = next(data.prefetch([{"tokens": numbers(2, 4), "length": np.ones(2)}], both))
    assert [array.sharding for array in (batch["tokens"], batch["length"])] == [both["tokens"], both["length"]]
    with pytest.raises(ValueError, match=r"'data'.* dimension size 3"):  # of JAX
        next(data.prefetch([{"tokens": numbers(2, 4), "length": np.ones(3)}], both))
    with pytest.raises(TypeError, match="sharding must be a NamedSharding"):
        data.prefetch([], DEVICES)
    with pytest.raises(ValueError, match="size must be an int of 0 or more"):
        data.prefetch([], size=-1)


# The verbs while something is traced.


def step_by_hand(store, x, y):
    """A training step of the user's own."""
    params = kv.to_params(store)
    grads = jax.grad(lambda p: ((x @ p["w"] - y) ** 2).mean())(params)
    store = kv.push(store, 0, [grads["w"] / 2, grads["w"] / 2])
    store, pulled = kv.pushpull(store, 0, grads["w"])
    return kv.flush(store), pulled


JITTED = [("local", None), ("device", None), ("sharded", None), ("dist_async", None), ("device", "2bit")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "compression"), JITTED)
@pytest.mark.parametrize("name", ["explicit2d", pytest.param("explicit", marks=pytest.mark.slow)])
def test_verbs_in_a_users_jit(kind, compression, name):
    """A store that was made inside of the mesh goes into a program over it."""
    x, y = numbers(8, 4), numbers(8, seed=1)
    chosen = None if kind == "local" else DEVICES

    def run(step, put):
        store = kv.from_params({"w": numbers(4)}, kind=kind, optimizer=optax.sgd(0.5), devices=chosen)
        if compression:
            store = kv.set_gradient_compression(store, {"type": compression})
            grads = [numbers(4, seed=i) for i in range(4)]
            return kv.pull(jax.jit(lambda s, g: kv.push(s, 0, g))(store, [put(g, P()) for g in grads]), 0)
        store, pulled = step(store, put(x, P("data")), put(y, P("data")))
        return kv.pull(store, 0), pulled

    expected = on_host(run(jax.jit(step_by_hand), lambda x, spec: x))
    mesh = MESHES[name]()
    with inside(mesh):
        found = run(jax.jit(step_by_hand), lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), on_host(found), expected)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P(None, "model"), P("model"), P("model", "data")])
def test_params_that_are_split_stay_split_in_a_users_jit(spec):
    mesh = MESHES["explicit2d"]()
    with inside(mesh):
        split = NamedSharding(mesh, spec)
        store = kv.set_optimizer(kv.init(kv.create("device"), 0, jax.device_put(numbers(4, 8), split)), TX)
        grads = jax.device_put(numbers(4, 8, seed=1), split)
        rows = kv.row_sparse_pull(store, 0, np.array([3, 1]))

        @jax.jit
        def step(store, grads):
            store = kv.push(store, 0, [grads, jax.reshard(grads, P())])
            return kv.push(store, 0, kv.row_sparse_pull(store, 0, np.array([3, 1])))

        new = step(store, grads)
        assert new.values[0].sharding.is_equivalent_to(split, 2)
    plain = kv.set_optimizer(kv.init(kv.create("device"), 0, numbers(4, 8)), TX)
    plain = kv.push(plain, 0, [numbers(4, 8, seed=1)] * 2)
    plain = kv.push(plain, 0, kv.row_sparse_pull(plain, 0, np.array([3, 1])))
    np.testing.assert_allclose(new.values[0], plain.values[0], rtol=1e-5)
    np.testing.assert_array_equal(rows.values, numbers(4, 8)[[1, 3]])


def test_a_store_of_another_mesh_in_a_users_jit():
    store = kv.from_params({"w": numbers(4)}, devices=DEVICES)
    mesh = MESHES["explicit2d"]()
    with inside(mesh):
        with pytest.raises(ValueError, match=r"push: a value of shape \(4,\) is on another mesh .* kv.place"):
            jax.jit(lambda s: kv.push(s, 0, jnp.ones(4)))(store)
        moved = kv.place(store, mesh.devices.flat)
        same_bits(kv.pull(jax.jit(lambda s: kv.push(s, 0, jnp.ones(4)))(moved), 0), np.ones(4))
        with pytest.raises(ValueError, match="train step: a value of shape"):
            jax.jit(step_of(engine="pmap"))(start(), BATCH)


MAPPED = [(name, kind) for name in ("explicit", "auto2d", "explicit2d", "mixed") for kind in ("device", "sharded")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("check_vma", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "kind"), [*MAPPED, ("explicit2d", "local")])
def test_verbs_in_a_users_shard_map(name, kind, check_vma):
    """Over the whole mesh, or over the axis "data" with the other axis Explicit or Auto and a value split along it."""
    mesh = {**MESHES, **OTHERS}[name]()
    count, partial = mesh.shape["data"], len(mesh.axis_names) > 1
    w, x = numbers(4, 6), numbers(count, 4, 6, seed=2)
    with inside(mesh):
        params, own = {"b": numbers(3), "w": w}, DEVICES[:count]
        store = kv.from_params(params, kind=kind, optimizer=optax.sgd(0.5), devices=own)
        specs = kv.partition_specs(store, "data")
        put = lambda leaf, spec: jax.device_put(np.asarray(leaf), NamedSharding(mesh, spec))  # noqa: E731
        store = jax.tree.map(put, store, specs)
        if partial and kind != "sharded":
            split = {**store.values, 1: put(w, P(None, "model"))}
            store = jax.tree.unflatten(jax.tree.structure(store), [split[0], split[1]])

        def run(store, x):
            ones = jnp.ones(3) + 0 * x[0, 0, :3]  # its type says that it differs by device
            store = kv.push(store, [0, 1], [ones, x[0]], axis_name="data")
            return kv.pull(store, [0, 1], axis_name="data")

        mapped = jax.shard_map(
            run, mesh=mesh, in_specs=(specs, P("data")), out_specs=P(), check_vma=check_vma, axis_names={"data"}
        )
        b, new = jax.jit(mapped)(store, put(x, P("data")))
    np.testing.assert_allclose(b, numbers(3) - 0.5 * count, rtol=1e-6)
    np.testing.assert_allclose(new, w - 0.5 * x.sum(0), rtol=1e-5, atol=1e-6)
