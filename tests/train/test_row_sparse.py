"""Tables with gradients of rows: against the lazy rule in NumPy, wherever they lie, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from kv_model import bytes_of, collectives_in, placed_collectives_in
from world import adam, close, mostly_slow

from jaxpar import kv, sparse, train, updaters
from jaxpar._devices import collectives
from jaxpar.train._step import lookups

USERS, ITEMS, WIDTH, SIZE = 37, 23, 3, 16
TABLES = {"row_sparse": "user|item"}


def params():
    rng = np.random.default_rng(0)
    shapes = {"user": (USERS, WIDTH), "item": (ITEMS, WIDTH), "bias": (1,)}
    return {name: np.float32(rng.standard_normal(shape)) for name, shape in shapes.items()}


def batch(seed=0):
    """Ids repeat. Some are beyond the table: JAX looks up the last row for them, and adds their gradient nowhere."""
    rng = np.random.default_rng(seed)
    ids = {"user": rng.integers(0, USERS + 2, SIZE), "friend": rng.integers(0, 5, SIZE)}
    rating = rng.standard_normal(SIZE).astype("float32")
    return {**ids, "item": rng.integers(-ITEMS, ITEMS, SIZE), "rating": rating}


def loss_fn(params, batch):
    """Two towers of one table, and another table, which `jnp.take` looks up."""
    user = params["user"][batch["user"]] + params["user"][batch["friend"]]
    item = jnp.take(params["item"], batch["item"], axis=0)
    return (((user * item).sum(1) + params["bias"] - batch["rating"]) ** 2).mean()


def gradients(params, batch):
    """The gradients in NumPy, and which rows have one."""
    user, friend, item = (batch[name] for name in ("user", "friend", "item"))
    users = params["user"][np.minimum(user, USERS - 1)] + params["user"][friend]
    items = params["item"][item]
    slope = 2 / SIZE * ((users * items).sum(1) + params["bias"] - batch["rating"])[:, None]
    grads = {name: np.zeros_like(x, np.float64) for name, x in params.items()}
    within = user < USERS
    np.add.at(grads["user"], user[within], (slope * items)[within])
    np.add.at(grads["user"], friend, slope * items)
    np.add.at(grads["item"], item, slope * users)
    grads["bias"][:] = slope.sum()
    return grads, {"user": np.union1d(user[within], friend), "item": np.unique(item % ITEMS), "bias": ...}


RULES = {
    "adam": (adam(), 2),
    "momentum": (optax.sgd(0.1, momentum=0.9), 1),
    "adagrad": (optax.adagrad(0.1), 1),
    "sgd": (optax.sgd(0.1), 0),
}


def by_hand(rule, steps):
    """The lazy rule: rows without a gradient keep their value and their moments. All count the steps of the run."""
    values, moments = params(), [{n: np.zeros(x.shape) for n, x in params().items()} for _ in range(2)]
    if rule == "adagrad":
        moments[0] = {name: np.full(x.shape, 0.1) for name, x in params().items()}
    for t in range(1, steps + 1):
        grads, rows = gradients(values, batch(t))
        for name, at in rows.items():
            g, m, v = (np.array(x[name]) for x in (grads, *moments))
            if rule == "adam":
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                change = 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            elif rule == "momentum":
                m = 0.9 * m + g
                change = 0.1 * m
            elif rule == "adagrad":
                m = m + g**2
                change = 0.1 * g / np.sqrt(m + 1e-7)
            else:
                change = 0.1 * g
            for array, new in ((values[name], values[name] - change), (moments[0][name], m), (moments[1][name], v)):
                array[at] = new[at]
    return values, moments


def start(count=4, tx=None, **options):
    devices = jax.devices()[:count]
    return train.start(params(), adam() if tx is None else tx, loss_fn, devices=devices, **(TABLES | options))


def after(steps, state, step):
    for i in range(1, steps + 1):
        state, metrics = step(state, batch(i))
    return state, metrics


PLACES = [(4, "device", "shard_map"), (4, "sharded", "shard_map"), (1, "device", "pmap"), (1, "sharded", "shard_map")]
PLACES += [(2, "sharded", "pmap"), (4, "device", "pmap")]
EACH = [("adam", *PLACES[0]), ("momentum", *PLACES[1])]
EACH += [case for case in [(rule, *place) for rule in RULES for place in PLACES] if case not in EACH]


@pytest.mark.parametrize("case", mostly_slow(EACH, *EACH[:2]), ids=str)
def test_the_rows_of_a_batch_are_updated_by_the_lazy_rule(case):
    rule, count, kind, engine = case
    tx, moments = RULES[rule]
    state, _ = after(4, *start(count, tx, kind=kind, engine=engine))
    values, expected = by_hand(rule, 4)
    close(state.params, values)
    of_tables = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (USERS, WIDTH)]
    close(of_tables, [m["user"] for m in expected[:moments]])


OPTIONS = {
    "accumulate": {"accumulate": 2},
    "clip": {"grad_transform": optax.clip_by_global_norm(0.5)},
    "scale": {"loss_scale": 8.0, "remat": True},
    "dynamic": {"loss_scale": "dynamic", "accumulate": 2},
    "skip": {"nonfinite": "skip", "unused": "skip"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_options_mean_what_they_mean_for_dense_gradients(name, kind):
    """Plain SGD moves no row without a gradient, so rows and dense gradients give the same."""
    options = {**OPTIONS[name], "tx": RULES["sgd"][0], "kind": "device" if name == "clip" else kind}
    (state, metrics), (dense, expected) = (after(3, *start(**options, **rows)) for rows in ({}, {"row_sparse": None}))
    close(state.params, dense.params)
    close(metrics, expected)


@pytest.mark.slow
def test_a_bad_step_changes_no_row():
    state, step = start(nonfinite="skip")
    state, _ = step(state, batch())
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, {**batch(1), "rating": np.full(SIZE, np.inf, np.float32)})
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((state.params, state.opt_state)))


@pytest.mark.parametrize("kind", mostly_slow(["sharded", "device"], "sharded"))
def test_devices_send_rows_alone(kind):
    rows = 200  # of a table that is larger than all that is looked up

    def loss(params, batch):
        return (params["table"][batch] ** 2).mean()

    table = {"table": np.zeros((rows, 8), np.float32)}
    state, step = train.start(table, adam(), loss, kind=kind, devices=jax.devices()[:4], row_sparse="table")
    text = step.lower(state, np.arange(8)).compile().as_text()
    sent = [bytes_of(array) for _, _, arrays in placed_collectives_in(text) for array in arrays]
    assert sent
    assert max(sent) <= 8 * 8 * 4


@pytest.mark.slow
def test_lookups_go_round_what_is_wrong_in_gloo(monkeypatch):
    """As all sums of kind `sharded` do, where jaxlib is old and the process has joined others: jax issue 40830."""

    def looked_up():
        chunks = np.arange(4 * 15, dtype=np.float32).reshape(4, 15)  # a table (20, 3) on four devices

        def body(chunk, ids):
            return lookups.Shards(chunk.reshape(-1), (20, 3), "i").take(ids)

        mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
        args = chunks, np.array([3, 19, 0, 3, 7, 8, 12, 19])
        np.testing.assert_array_equal(run(*args), chunks.reshape(20, 3)[args[1]])
        return {name for name, _ in collectives_in(run.lower(*args).compile().as_text())}

    assert any("reduce-scatter" in name for name in looked_up())
    monkeypatch.setattr(collectives, "_GLOO_IS_WRONG", True)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert not any("reduce-scatter" in name for name in looked_up())


@pytest.mark.slow
def test_an_mxnet_optimizer_updates_rows_as_a_push_of_rows_does():
    state, step = start(1, updaters.mxnet_adam(0.1))
    state, _ = step(state, batch(1))
    grads, rows = gradients(params(), batch(1))
    store = kv.from_params(params(), optimizer=updaters.mxnet_adam(0.1))
    for name in ("user", "item"):
        store = kv.push(store, name, sparse.from_dense(np.float32(grads[name]), rows[name]))
        close(state.params[name], kv.pull(store, name))


# What a loss may do with a table.

TABLE = np.random.default_rng(0).standard_normal((20, 4)).astype("float32")
IDS = np.array([1, 2, 2, -1, 25, -30, 19])
WEIGHTS = np.random.default_rng(1).standard_normal((7, 4)).astype("float32")
LOOKUPS = {
    "rows": lambda t: (t[IDS] ** 2 * WEIGHTS).sum(),
    "twice": lambda t: (jnp.take(t, IDS, axis=0, mode="clip") * t[IDS[::-1]] * WEIGHTS).sum(),
    "filled": lambda t: jnp.nansum(jnp.take(t, IDS, axis=0) * WEIGHTS),
    "vmap": lambda t: jax.vmap(lambda i, w: (t[i] ** 2 * w).sum())(jnp.asarray(IDS), WEIGHTS).sum(),
    "checkpoint": jax.checkpoint(lambda t: jnp.sin(jnp.sin(t[IDS] * WEIGHTS)).sum()),
    "cast": lambda t: (t.astype(jnp.float16)[IDS] * WEIGHTS).sum().astype(jnp.float32),
    "jit": lambda t: jax.jit(lambda t: (t[IDS] * WEIGHTS).sum())(t),
    "two axes": lambda t: (t[IDS[:, None]] ** 2 * WEIGHTS[:, None]).sum(),
    "bytes": lambda t: (t[np.uint8(IDS % 20)] * WEIGHTS).sum(),
    "no gradient": lambda t: (t[IDS] * WEIGHTS).sum() + jax.lax.stop_gradient((t**2).mean()),
}
OTHERWISE = {
    "decay": lambda t: (t[IDS] ** 2).sum() + (t**2).mean(),
    "tied": lambda t: (t[IDS] @ t.T).sum(),
    "scaled": lambda t: ((2 * t)[IDS] * WEIGHTS).sum(),
    "scan": lambda t: jax.lax.scan(lambda c, i: (c + (t[i] ** 2).sum(), 0), 0.0, jnp.asarray(IDS))[0],
    "branch": lambda t: jax.lax.cond(jnp.sum(WEIGHTS) > 0, lambda: (t[IDS] ** 2).sum(), lambda: 0.0),
    "columns": lambda t: (t[:, np.array([0, 1])] ** 2).sum(),
    "elements": lambda t: (t[IDS, 0] ** 2).sum(),
    "slice": lambda t: (t[:3] ** 2).sum(),
    "one-hot": lambda t: (jax.nn.one_hot(IDS, 20) @ t).sum(),
}


def of_rows(fn):
    return lookups.value_and_grad(lambda p: (fn(p[0]), {"as table": jnp.zeros((20, 4))}), [TABLE], {0: "t"})


def test_rows_have_the_gradients_of_jax():
    @jax.jit
    def both():
        rows = {name: of_rows(fn) for name, fn in LOOKUPS.items()}
        return rows, {name: jax.value_and_grad(fn)(TABLE) for name, fn in LOOKUPS.items()}

    rows, dense = both()
    for name, ((loss, aux), (grad,)) in rows.items():
        assert isinstance(grad, sparse.RowSparse), name
        close((loss, sparse.to_dense(grad)), dense[name], rtol=1e-3 if name == "cast" else 2e-5)
        assert aux["as table"].shape == (20, 4)


def test_any_other_use_of_a_table_is_refused():
    for fn in OTHERWISE.values():  # which are traced only
        with pytest.raises(ValueError, match=r"row_sparse='t': .* look rows up by params\['t'\]\[ids\]"):
            jax.eval_shape(lambda fn=fn: of_rows(fn))


def test_a_table_of_which_no_row_is_looked_up_is_refused():
    _, step = start(row_sparse=("user", "bias2"))
    with pytest.raises(ValueError, match="'bias2' matches no param"):
        step.complete(start()[0])
    other = {**params(), "other": np.ones((4, 2), np.float32)}
    state, step = train.start(other, adam(), loss_fn, row_sparse="other", devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"looks up no rows of \['other'\]"):
        step(state, batch())


REFUSED = {
    "engine": ({"engine": "jit"}, "engine 'shard_map' or 'pmap'"),
    "virtual shards": ({"virtual_shards": 4}, "virtual_shards="),
    "local steps": ({"local_steps": 4}, "local_steps"),
    "staleness": ({"kind": "dist_async"}, "staleness"),
    "compression": ({"compression": {"type": "2bit", "threshold": 0.5}}, "compression"),
    "frozen": ({"frozen": "user"}, "frozen"),
    "clip in the optimizer": ({"tx": optax.chain(optax.clip_by_global_norm(1.0), adam())}, "grad_transform="),
    "trust ratio": ({"tx": optax.lamb(0.1)}, "depends on other rows"),
    "sums of steps": ({"tx": optax.apply_every(3)}, "more of a table than moments"),
    "random numbers": ({"tx": optax.chain(adam(), optax.add_noise(0.1, 0.5, key=jax.random.key(0)))}, "random"),
    "an updater of optax": ({"tx": updaters.from_optax(optax.lamb(0.1))}, "optimizer of optax"),
    "average": ({"tx": optax.chain(adam(), updaters.average_params(0.9))}, "average"),
    "mean of rows": ({"grad_transform": optax.clip_by_block_rms(1.0)}, "grad_transform"),
    "transform with a state": ({"grad_transform": optax.trace(0.9)}, "keeps a state"),
    "whole gradients": ({"kind": "sharded", "grad_transform": optax.clip(1.0)}, "whole gradients"),
}


def test_an_optimizer_may_have_an_array_of_a_small_param():
    """It is traced for few rows of a table, and for other params in their shapes, unless these are large."""
    factors = {"user": np.ones((1, 1)), "item": np.ones((1, 1)), "bias": np.array([2.0, 3.0])}
    scaled = optax.stateless(lambda grads, params: jax.tree.map(lambda g, f: g * f.astype(g.dtype), grads, factors))
    specs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), {**params(), "bias": np.zeros(2, np.float32)}
    )
    optimizer = updaters._TreeOptimizer(optax.chain(optax.adam(0.1), scaled))
    assert updaters._lazy_fault(optimizer, specs, [1, 2]) is None
    assert updaters._transform_fault(scaled, specs, [1, 2]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_by_rows_is_refused(name):
    options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        (lambda state, step: step.complete(state))(*start(**options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_a_run_is_resumed_on_another_number_of_devices(tmp_path, kind):
    data = {name: np.concatenate([batch(i)[name] for i in range(4)]) for name in batch()}

    def run(count, epochs, **options):
        options |= {"batch_size": SIZE, "progress": False, "epochs": epochs}
        return train.fit(*start(count, kind=kind), data, **options)

    expected, _ = run(4, 2)
    run(4, 1, checkpoint_dir=tmp_path)
    state, _ = run(2, 2, checkpoint_dir=tmp_path, certificate=tmp_path / "certificate.jsonl")
    assert int(state.step) == 8
    close((state.params, state.opt_state), (expected.params, expected.opt_state))
    opened = train.open(tmp_path, step=start(2, kind=kind)[1], data=data)
    close(opened.at(8).params, state.params)
    grads, _ = gradients(jax.device_get(opened.at(6).params), jax.device_get(opened.batch(7)))
    close(opened.metrics(7, 7)[0]["grad_norm"], np.sqrt(sum((g**2).sum() for g in grads.values())))


@pytest.mark.slow
def test_a_whole_module_with_an_embedding():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.words = nnx.Embed(50, 8, rngs=rngs)
            self.out = nnx.Linear(8, 1, rngs=rngs)

    def loss(model, batch):
        return (model.out(model.words(batch)) ** 2).mean()

    def trained(**options):
        state, step = train.start(Model(nnx.Rngs(0)), optax.sgd(0.1), loss, **options)
        for _ in range(3):
            state, _ = step(state, np.arange(16))
        return state.params

    close(trained(row_sparse="words"), trained())
