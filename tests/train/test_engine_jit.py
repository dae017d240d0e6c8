"""The engine `jit` gives the numbers of `pmap`, with params that are split over a mesh in their own shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from mesh_run import RULES, apply, batch_of, loss_fn, params_of, ran, state_of, step_of
from world import LOSS, close, run_on

from jaxpar import data, kv, parallel, sparse, train, updaters


def mesh_of(*sizes, names=("data", "model", "third"), kind=AxisType.Auto):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)], axis_types=(kind,) * len(sizes))


def batches(steps, size=16):
    return [batch_of(seed, size) for seed in range(steps)]


def same(one, other, **tolerance):
    (state, losses), (expected, others) = one, other
    close(losses, others, rtol=1e-5)
    close(state.params, expected.params, rtol=2e-5, atol=2e-6, **tolerance)
    close(state.model_state, expected.model_state)


ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01, mask=lambda p: jax.tree.map(jnp.ndim, p)))


def store_on(**where):
    return kv.from_params(params_of(), optimizer=ADAM, **where)


@functools.cache
def by_pmap(count):
    return ran(store_on(devices=jax.devices()[:count]), engine="pmap")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "store",
    [
        lambda: store_on(mesh=mesh_of(2)),
        lambda: store_on(mesh=mesh_of(2, 4, kind=AxisType.Explicit), sharding=RULES),
        lambda: store_on(kind="sharded", devices=jax.devices()[:2]),
    ],
    ids=["one axis", "rules on two axes", "kind sharded"],
)
def test_as_pmap(store):
    same(ran(store()), by_pmap(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"nonfinite": "skip", "loss_scale": "dynamic"},
        {"remat": True, "grad_transform": optax.clip_by_global_norm(0.1)},
    ],
    ids=lambda options: ",".join(options),
)
def test_options_as_under_pmap(options):
    plain = ran(store_on(devices=jax.devices()[:2]), engine="pmap", **options)
    same(ran(store_on(mesh=mesh_of(2, 2), sharding=RULES), **options), plain)


@pytest.mark.slow
def test_several_data_axes_and_a_third():
    mesh = mesh_of(2, 2, 2, names=("data", "fsdp", "model"))
    split = parallel.fsdp(("data", "fsdp"), min_size=1)
    rules = parallel.sharding_rules({"hidden": P(None, "model")}, then=split)
    store = store_on(mesh=mesh, sharding=rules)
    same(ran(store, axis_name=("data", "fsdp")), by_pmap(4))


@pytest.mark.slow
def test_many_steps_in_one_program():
    store = store_on(mesh=mesh_of(2, 2), sharding=RULES)
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches(3))
    state, metrics = step_of().many(state_of(store, 3), stacked)
    expected, losses = by_pmap(2)
    close(metrics["loss"], [row["loss"] for row in losses])
    close(state.params, expected.params, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("update", [updaters.mxnet_sgd(0.01, momentum=0.9), updaters.from_optax(optax.adam(0.01))])
def test_updaters_with_one_state_a_key(update):
    plain = kv.from_params(params_of(), updater=update, devices=jax.devices()[:2])
    store = kv.from_params(params_of(), updater=update, mesh=mesh_of(2, 2), sharding=RULES)
    same(ran(store), ran(plain, engine="pmap"))


def test_kind_sharded_keeps_a_part_of_whole_values_where_the_optimizer_needs_them():
    store = kv.from_params({"w": jnp.ones((64, 64))}, kind="sharded", optimizer=optax.contrib.muon(0.01))
    assert store.values[0].shape == (64, 64)
    for leaf in (store.values[0], *jax.tree.leaves(store.optimizer_state)):
        assert leaf.ndim < 2 or leaf.addressable_shards[0].data.size == leaf.size // jax.device_count()


def after_two(tx=None, **options):
    """The state after two steps of a loss that does not read the parameter "idle"."""
    tx = optax.adamw(0.1, weight_decay=0.1) if tx is None else tx
    given = {"w": jnp.ones((8, 2)), "idle": jnp.ones(3)}
    loss = lambda params, batch, rng: (((batch["x"] @ params["w"]) ** 2).mean(), {})  # noqa: E731
    state, step = train.start(given, tx, loss, devices=jax.devices()[:2], **options)
    for row in batches(2):
        state, _ = step(state, row)
    return step.finish(state)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["pmap", "shard_map", "jit"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "remat": True}], ids=["plain", "accumulate, remat"])
def test_a_parameter_that_the_loss_does_not_read(engine, options):
    with pytest.warns(
        UserWarning, match=r"does not depend on 'idle';.*frozen=\['idle'\]\) or unused=\"skip\""
    ) as caught:
        moved = after_two(engine=engine, **options)
    assert len(caught) == 1
    assert float(moved.params["idle"][0]) < 1
    state = after_two(engine=engine, unused="skip", **options)
    np.testing.assert_array_equal(state.params["idle"], np.ones(3))
    close(state.params["w"], moved.params["w"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "sharded", "dist_async"])
def test_unused_parameters_are_left_with_one_state_a_key_too(kind):
    state = after_two(updaters.mxnet_sgd(0.1, momentum=0.9, wd=0.1), kind=kind, unused="skip")
    np.testing.assert_array_equal(state.params["idle"], np.ones(3))
    assert float(state.params["w"][0, 0]) != 1


@pytest.mark.slow
def test_params_keep_the_sharding_that_they_come_with():
    mesh = mesh_of(2, 4, kind=AxisType.Explicit)
    given = params_of()
    given["out"] = jax.device_put(given["out"], NamedSharding(mesh, P("model")))
    state, losses = ran(kv.from_params(given, optimizer=ADAM))
    assert state.params["out"].sharding.spec == P("model")
    same((state, losses), by_pmap(2))


@pytest.mark.slow
def test_what_auto_takes():
    def taken(store, **options):
        step = train.make_train_step(loss_fn, **options)
        return step._engine_and_step(store)[0]

    plain = store_on()
    rows = kv.from_params(params_of(), optimizer=optax.adam(0.1), kind="sharded")
    whole = store_on(kind="sharded")
    assert taken(plain) == taken(rows) == "shard_map"
    assert taken(whole) == taken(plain, mesh=mesh_of(2)) == "jit"
    with jax.set_mesh(mesh_of(2, 4)):
        assert taken(plain) == "shard_map"


@pytest.mark.slow
def test_fit_and_evaluate():
    rng = np.random.default_rng(0)
    dataset = data.Dataset(rng.standard_normal((64, 8)).astype(np.float32), rng.integers(0, 4, 64))

    def fitted(**where):
        state, step = train.start(params_of(), ADAM, train.classification_loss(apply), **where)
        return run_on(dataset, state, step=step, test_data=dataset, apply_fn=apply)

    state, history = fitted(mesh=mesh_of(2, 2), sharding=RULES)
    plain, others = fitted(devices=jax.devices()[:2])
    close(state.params, plain.params, rtol=1e-4, atol=1e-5)
    close([row["loss"] for row in history], [row["loss"] for row in others], rtol=1e-4)
    assert history[-1]["test_accuracy"] == others[-1]["test_accuracy"]


@pytest.mark.slow
def test_pushes_at_the_prompt_keep_the_shardings():
    store = store_on(mesh=mesh_of(2, 4), sharding=RULES)
    plain = store_on(devices=jax.devices()[:1])
    grads = [jnp.ones_like(x) for x in jax.tree.leaves(params_of())]
    for _ in range(2):
        store, plain = kv.push(store, [0, 1, 2], grads), kv.push(plain, [0, 1, 2], grads)
    close(kv.to_params(store), kv.to_params(plain))
    assert store.values[1].sharding.spec == P("data", "model")
    assert store.optimizer_state[1][0].mu["hidden"].sharding.spec == P("data", "model")
    assert store.optimizer_state[1][0].count.sharding.is_fully_replicated
    copies = kv.pull(store, 1, devices=jax.devices()[:2])
    np.testing.assert_array_equal(copies[1], store.values[1])


def test_loss_may_name_the_other_axes():
    def loss(params, batch, rng):
        h = jax.lax.with_sharding_constraint(batch["x"] @ params["hidden"], P(None, "model"))
        return ((h @ params["out"] - batch["y"]) ** 2).mean(), {"all": jax.lax.pmean(h.mean(), "data")}

    options = {"mesh": mesh_of(2, 4), "sharding": RULES, "unused": "skip"}
    state, step = train.start(params_of(), optax.sgd(0.1), loss, **options)
    _, metrics = step(state, batches(1)[0])
    close(metrics["all"], (batches(1)[0]["x"] @ params_of()["hidden"]).mean())


@pytest.mark.parametrize(("spec", "axes"), [(P("data"), "data"), (P(None, ("model", "data")), ("data", "model"))])
def test_loss_may_not_name_the_axis_of_the_batch(spec, axes):
    def loss(params, batch, rng):
        h = jax.lax.with_sharding_constraint(batch["x"] @ params["hidden"], spec)
        return ((h @ params["out"] - batch["y"]) ** 2).mean(), {}

    options = {"mesh": mesh_of(2, 4), "sharding": RULES, "axis_name": axes}
    state, step = train.start(params_of(), optax.sgd(0.1), loss, **options)
    with pytest.raises(ValueError, match=r"constrains an array to P\(.* write None in place of these axes"):
        step(state, batches(1)[0])


class OwnSource:
    """Training data of a user's own, which knows of devices only."""

    def examples(self, batch_size):
        return 24

    def batches(self, batch_size, *, rng=None, epochs=1, start=0, devices=None):
        assert len(devices) == 8
        return iter([{"image": np.ones((batch_size, 8), np.float32), "label": np.zeros(batch_size, np.int32)}] * 24)


@pytest.mark.slow
def test_fit_splits_a_batch_over_the_data_axes_only():
    """Batches of 6 over two devices, on a mesh of 2 × 4."""
    rng = np.random.default_rng(0)
    arrays = {"image": rng.standard_normal((18, 8)).astype(np.float32), "label": rng.integers(0, 4, 18)}
    dataset = data.Dataset(arrays["image"], arrays["label"])
    loader = [{name: x[6 * i : 6 * i + 6] for name, x in arrays.items()} for i in range(3)]

    def losses(source, **where):
        state, step = train.start({"w": np.ones((8, 4), np.float32)}, optax.sgd(0.1), LOSS, **where)
        _, history = run_on(source, state, step=step, epochs=1, batch_size=6)
        return [record["loss"] for record in history]

    for source in (dataset, loader):
        split = losses(source, mesh=mesh_of(2, 4), sharding=P(None, "model"))
        close(split, losses(source, devices=jax.devices()[:2]), rtol=1e-6)
    losses(data.from_arrays(arrays), mesh=mesh_of(2, 4), sharding=P(None, "model"))
    state, step = train.start({"w": np.ones((8, 4), np.float32)}, ADAM, LOSS, mesh=mesh_of(2, 4))
    with pytest.raises(ValueError, match="a batch of 9 cannot be divided by 2 devices"):
        run_on(dataset, state, step=step, epochs=1, batch_size=9)
    run_on(OwnSource(), state, step=step, epochs=1, batch_size=8)


def split(**options):
    return store_on(mesh=mesh_of(2), **options)


W, ROWS = {"w": jnp.ones((4, 2))}, sparse.RowSparse(jnp.array([1]), jnp.ones((1, 2)), (4, 2))
OVER_ROWS = {"mesh": mesh_of(2, names=("rows",))}


def table(**options):
    split = {"updater": updaters.accumulate, "mesh": mesh_of(2, 2), "sharding": P("data")}
    return kv.from_params(W, **split | options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: split(kind="local"), "one device; use kind 'device'"),
        (lambda: split(kind="dist_async"), "delayed pushes"),
        (lambda: kv.set_gradient_compression(split(), {"type": "2bit"}), "the compiler sums their gradients"),
        (lambda: ran(split(), engine="pmap"), "use engine 'jit' or 'auto'"),
        (lambda: ran(split(), local_steps=2), "local_steps are updates"),
        (lambda: step_of(engine="jit", local_steps=2), "local_steps= updates each device separately"),
        (lambda: train.make_train_step(loss_fn, **OVER_ROWS), "axis_name='data': .* no such axis; its axes are rows"),
        (lambda: ran(store_on(**OVER_ROWS)), "axis_name='data': the mesh has no such axis; its axes are rows"),
        (lambda: train.make_train_step(loss_fn, engine="pmap", mesh=mesh_of(2)), "mesh= is for engine 'jit'"),
        (lambda: ran(split(), mesh=mesh_of(4)), "the state is on a mesh"),
        (lambda: step_of(mesh=mesh_of(8))(state_of(store_on()), batches(1, 12)[0]), "cannot be divided by 8"),
        (lambda: kv.push(table(), 0, ROWS), "split over a mesh and take no RowSparse"),
        (lambda: kv.push(table(updater=None, optimizer=ADAM), 0, ROWS), "from_optax.*without mesh= and sharding="),
        (lambda: kv.init(table(), 7, jnp.ones(3)), r"keys \[7\]: .* its values are split over a mesh"),
        (lambda: kv.broadcast(table(), 7, jnp.ones(3)), r"keys \[7\]: .* its values are split over a mesh"),
        (lambda: kv.place(split(), jax.devices()[:4]), r"write kv.place\(store, mesh=mesh"),
        (lambda: kv.place(table(), jax.devices()[:4], sharding=P("model")), "sharding= splits .*; give mesh="),
        (lambda: kv.place(kv.from_params(W), sharding=P("model")), "sharding= splits .*; give mesh="),
        (lambda: kv.place(table(), jax.devices()[:4], mesh=mesh_of(2, 2)), "give mesh= or devices=, not both"),
    ],
)
def test_refusals(call, words):
    """Each names what is wrong with a store that is split over a mesh."""
    with pytest.raises(ValueError, match=words):
        call()


def test_a_sharding_on_the_mesh_of_the_store():
    assert kv.place(table(), sharding=P(None, "model")).values[0].sharding.spec == P(None, "model")


@pytest.mark.slow
def test_the_gradient_of_a_table_that_is_split():
    """Rows that several shares look up, with repeats: the scatter of openxla/xla issue 42481."""

    def loss(params, batch, rng):
        return ((params["table"][batch["ids"]] @ params["out"]) ** 2).mean(), {}

    draw = np.random.default_rng(0)
    start = {"table": np.float32(draw.normal(size=(32, 8))), "out": np.float32(draw.normal(size=(8, 4)))}
    batch = {"ids": draw.integers(0, 5, (16, 6))}

    def after_one(**where):
        state, step = train.start(start, optax.sgd(0.5), loss, **where)
        return step(state, batch)[0].params

    alone = after_one(devices=jax.devices()[:1])
    for spec in (P("model", None), P(None, "model"), P(("data", "model"), None)):
        close(after_one(mesh=mesh_of(2, 4), sharding={"table": spec, "out": P()}), alone)
