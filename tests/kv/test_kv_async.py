"""Kind `dist_async`: a push is applied some pushes later, whatever way it goes, and nothing is lost."""

import jax
import jax.numpy as jnp
import kv_model
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from kv_model import FOUR, assert_unchanged, collectives_in, compilations, on_mesh, over, put, snapshot, whole_numbers
from world import by_hand, close, line, sgd, squares, trained, update_of

from jaxpar import checkpoint, kv, sparse, train, updaters
from jaxpar.viz._program.hlo import program_of

SHAPE = (2, 3)
few = settings(max_examples=8, deadline=None)

# An updater that shows how often and in which order it ran.
COUNTING = updaters.Updater(
    init=lambda key, value: jnp.zeros((), jnp.int32),
    update=lambda key, pushed, state, stored: (2 * stored + pushed, state + 1),
)


def model_of(staleness, keys=(3,)):
    return kv_model.Model({key: np.zeros(SHAPE) for key in keys}, lambda pushed, stored: 2 * stored + pushed, staleness)


def same(store, model):
    for key, value in model.values.items():
        np.testing.assert_array_equal(kv.pull(store, key), value)
        assert int(store.updater_state[key]) == model.updates[key]


def begun(staleness, keys=(3,), updater=COUNTING, shape=SHAPE):
    store = kv.create("dist_async", staleness=staleness)
    return kv.set_updater(kv.init(store, list(keys), [jnp.zeros(shape)] * len(keys)), updater)


# ---- the numbers


# Of one key: how many values, from which device on, and whether on three devices in turn.
pushed = st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans())


@few
@given(st.integers(0, 3), st.lists(st.dictionaries(st.sampled_from([3, 5]), pushed, min_size=1), max_size=7))
@example(1, [{5: (1, 0, False)}, {3: (2, 0, True), 5: (2, 0, True)}])  # key 5 waits before key 3 does
def test_any_pushes_equal_the_model(staleness, pushes):
    """Any keys, any number of values on any devices, also another number than before; empty lists are no push."""
    store, model = begun(staleness, (3, 5)), model_of(staleness, (3, 5))
    for i, push in enumerate(pushes):
        lists = {}
        for key, (count, first, spread) in push.items():
            values = list(whole_numbers(100 * i + key, count, *SHAPE))
            lists[key] = put(values, jax.devices()[first : first + 3 if spread else first + 1])
        model.push(list(lists), list(lists.values()))
        before, old = snapshot(store), store
        store = kv.push(store, list(lists), list(lists.values()))
        assert_unchanged(old, before)
        same(store, model)
    model.flush()
    same(kv.flush(store), model)


def ways(store):
    """The ways to push `(4, *SHAPE)`, one row from each device: name to (store to begin with, push)."""
    placed = kv.place(store, FOUR)
    specs = kv.partition_specs(placed, "data")

    def push(store, value):
        return kv.push(store, 3, value, axis_name="data")

    return {
        "eager": (store, lambda s, v: kv.push(s, 3, put(list(v), FOUR))),
        "one device": (store, lambda s, v: kv.push(s, 3, list(v))),
        "placed": (placed, lambda s, v: kv.push(s, 3, put(list(v), FOUR))),
        "jit": (store, jax.jit(lambda s, v: kv.push(s, 3, list(v)))),
        "pmap": (placed, over("pmap", placed, FOUR, push)),
        "shard_map": (placed, on_mesh(lambda s, v: push(s, v[0]), FOUR, (specs, P("data")), specs, check_vma=True)),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["eager", "one device", "placed", "jit", "pmap", "shard_map"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_every_way_gives_the_same_numbers(staleness, way):
    store, push = ways(begun(staleness))[way]
    pushes, model = whole_numbers(0, 6, 4, *SHAPE), model_of(staleness)
    for values in pushes:
        store = push(store, values)
        model.push([3], [values])
        same(store, model)
        assert int(store.pending[3].count) == len(model.waiting[3])
    model.flush()
    flushed = kv.flush(store)
    same(flushed, model)
    assert kv.flush(flushed) == flushed


def test_scan_and_a_flush_inside_of_programs():
    pushes, model = whole_numbers(1, 6, 4, *SHAPE), model_of(2)
    for values in pushes:
        model.push([3], [values])
    store = kv.place(begun(2), FOUR)
    scanned, _ = jax.lax.scan(lambda s, v: (kv.push(s, 3, list(v)), None), store, pushes)
    same(scanned, model)
    specs = kv.partition_specs(store, "data")
    flush = on_mesh(lambda s: kv.flush(s, axis_name="data"), FOUR, (specs,), specs)
    model.flush()
    same(jax.jit(kv.flush)(scanned), model)
    same(flush(kv.place(scanned, FOUR)), model)


def test_before_the_first_one_is_due_nothing_changes_not_even_adams_count():
    store = begun(2, updater=updaters.from_optax(optax.adam(0.1)))
    before = snapshot((store.values, store.updater_state))
    push = jax.jit(lambda s, v: kv.push(s, 3, v))
    for jitted in (False, True):
        new = store
        for _ in range(2):
            new = push(new, jnp.ones(SHAPE)) if jitted else kv.push(new, 3, jnp.ones(SHAPE))
        assert_unchanged((new.values, new.updater_state), before)
        assert int(kv.push(new, 3, jnp.ones(SHAPE)).updater_state[3][0].count) == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 1])
def test_an_optimizer_of_the_whole_pytree_keeps_its_state_at_the_prompt(count):
    params = {"w": jnp.ones(SHAPE), "b": jnp.zeros(())}
    late = kv.from_params(params, kind="dist_async", staleness=1, optimizer=optax.adam(0.1))
    prompt = kv.from_params(params, kind="dist_sync", optimizer=optax.adam(0.1))
    for number in (1.0, 3.0, 2.0):
        values = [put([np.full(s, number, np.float32)] * count, jax.devices()[:count]) for s in ((), SHAPE)]
        late, before, prompt = kv.push(late, [0, 1], values), prompt, kv.push(prompt, [0, 1], values)
        close(late.optimizer_state, before.optimizer_state, rtol=1e-6, atol=0)
        jax.jit(kv.flush)(late)  # its arrays are together
    close(kv.to_params(kv.flush(late)), kv.to_params(prompt))


def test_a_plain_function_is_called_when_a_push_is_due():
    seen = []

    def updater(key, pushed, stored):
        seen.append((key, float(pushed[0])))
        return stored + pushed

    store = begun(2, (5, 3), updater, shape=(2,))
    for number in (1.0, 10.0, 100.0):
        assert seen == []
        store = kv.push(store, [5, 3], [jnp.full(2, number)] * 2)
    assert seen == [(3, 1.0), (5, 1.0)]
    kv.flush(store)
    assert seen[2:] == [(3, 10.0), (5, 10.0), (3, 100.0), (5, 100.0)]


@pytest.mark.slow
def test_no_staleness_is_dist_sync_bit_for_bit():
    rng = np.random.default_rng(0)
    stores = [kv.create("dist_async", staleness=0), kv.create("dist_sync"), kv.create("device")]
    stores = [kv.set_optimizer(kv.init(s, 3, jnp.zeros(SHAPE)), tx) for s in stores for tx in [optax.adam(0.1)]]
    for values in rng.standard_normal((3, 4, *SHAPE), np.float32):
        stores = [kv.push(s, 3, put(list(values), jax.devices())) for s in stores]
    assert stores[0].pending == {}
    for other in stores[1:]:
        for a, b in zip(jax.tree.leaves(stores[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "type"), [("eager", "2bit"), ("shard_map", "1bit")])
def test_what_is_sent_is_compressed_and_what_waits_is_not(way, type):
    """The delayed store is the other one some pushes ago, residuals too; a 1-bit code of nothing would not be 0."""
    shape = (4, 16)
    pushes = np.random.default_rng(0).standard_normal((5, 4, *shape)).astype(np.float32)

    def run(staleness, pushes):
        store = kv.set_gradient_compression(begun(staleness, updater=updaters.accumulate, shape=shape), {"type": type})
        store, push = ways(store)[way]
        for values in pushes:
            store = push(store, values)
        return store

    late, flushed = run(2, pushes), kv.flush(run(2, pushes))
    for delayed, prompt in ((late, run(0, pushes[:3])), (flushed, run(0, pushes))):
        np.testing.assert_allclose(kv.pull(delayed, 3), kv.pull(prompt, 3), rtol=1e-6, atol=1e-6)
        held, want = (np.asarray(s.residuals[3]["residual"]).reshape(4, *shape) for s in (delayed, prompt))
        np.testing.assert_allclose(held, want, rtol=1e-6, atol=1e-6)
    early = run(2, pushes[:2])
    assert not np.any(kv.pull(early, 3))
    assert not any(np.any(leaf["residual"]) for leaf in early.residuals.values())


# ---- a good citizen


@pytest.mark.parametrize("count", [1, 3, 8])
def test_other_devices_take_over_what_waits(count):
    store, model = kv.place(begun(2), FOUR), model_of(2)
    for values in whole_numbers(2, 3, 4, *SHAPE):
        store = kv.push(store, 3, put(list(values), FOUR))
        model.push([3], [values])
    moved = kv.place(store, jax.devices()[-count:])
    assert {v.shape for v in moved.pending[3].values} == {(count, *SHAPE)}
    more = whole_numbers(3, count, *SHAPE)
    moved = kv.push(moved, 3, put(list(more), jax.devices()[-count:]))
    model.push([3], [more])
    same(moved, model)
    model.flush()
    same(kv.flush(moved), model)


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(2, marks=pytest.mark.slow), 8])
def test_a_checkpoint_holds_what_waits(tmp_path, count, capsys):
    def loss_fn(params, batch, rng):
        return (params["w"] ** 2 - params["w"] * batch[0]).sum(), {}

    def state(count, staleness=2, pushes=0):
        options = {"kind": "dist_async", "staleness": staleness, "devices": jax.devices()[:count]}
        state, step = train.start({"w": jnp.zeros(SHAPE)}, updaters.from_optax(sgd()), loss_fn, **options)
        for i in range(pushes):
            state, _ = step(state, jnp.arange(8.0 * 6).reshape(8, *SHAPE) + i)
        return state, step

    saved, step = state(4, pushes=3)
    checkpoint.save(tmp_path / "a", saved)
    restored = checkpoint.restore(tmp_path / "a", state(count, pushes=1)[0])
    if count == 4:
        assert all(map(np.array_equal, *map(jax.tree.leaves, (restored.store, saved.store))))
    assert int(restored.store.pending[0].count) == 2
    close(step.finish(restored).params, step.finish(saved).params)
    assert capsys.readouterr().err == ""
    with pytest.raises(checkpoint.CheckpointError, match=r"key 0 \('w'\): values wait for 2 pushes.*has staleness 0"):
        checkpoint.restore(tmp_path / "a", state(count, 0)[0])
    checkpoint.save(tmp_path / "b", state(4, 0, pushes=1)[0])
    begun = checkpoint.restore(tmp_path / "b", state(4, 2, pushes=3)[0])  # nothing was saved, so nothing waits
    assert int(begun.store.pending[0].count) == 0
    assert not np.any(begun.store.pending[0].values)


def test_what_it_looks_like():
    store = kv.push(begun(2, shape=(5,)), 3, [jnp.ones(5)] * 4)
    assert "kind='dist_async'" in repr(store)
    assert "staleness=2, 1 key, 20 bytes, updater state 4 bytes, pending 160 bytes" in repr(store)
    assert "pending 160 bytes" in store._repr_html_()
    assert store != kv.push(begun(2, shape=(5,)), 3, [jnp.zeros(5)] * 4)


def test_errors():
    with pytest.raises(ValueError, match="staleness must be an int of 0 or more, got -1"):
        kv.create("dist_async", staleness=-1)
    for wrong in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="staleness must be an int of 0 or more"):
            kv.create("dist_async", staleness=wrong)
    with pytest.raises(ValueError, match="staleness=1 is for kind 'dist_async'; kind 'device'"):
        kv.from_params({"w": jnp.zeros(2)}, kind="device", staleness=1)
    assert kv.create("dist_async").staleness == 1
    assert kv.create("dist_sync", staleness=0).staleness == 0
    rows = sparse.RowSparse(jnp.array([1]), jnp.ones((1, 3)), SHAPE)
    with pytest.raises(ValueError, match="a store of staleness 1 cannot delay it; push dense values, or use kind"):
        kv.push(begun(1), 3, rows)
    store = kv.place(begun(1), FOUR)
    with pytest.raises(ValueError, match=r"key 3: values .* are pending, and each device pushes \(2, 3\).*kv.flush"):
        jax.vmap(lambda v: kv.push(store, 3, v, axis_name="d").values, axis_name="d")(jnp.ones((2, *SHAPE)))


# ---- the training step


def late_by_hand(tx, steps, staleness, finish=False):
    """The plain loop, with gradients that wait."""
    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    state, waiting = tx.init(params), []
    grad = jax.jit(lambda p, b: jax.grad(lambda p: squares(p, b, None)[0])(p))
    for i in range(steps + staleness * finish):
        if i < steps:
            waiting.append(grad(params, line(seed=i)))
        if len(waiting) > (staleness if i < steps else 0):
            params, state = update_of(tx)(waiting.pop(0), state, params)
    return params


def start(staleness, tx, **options):
    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    store = kv.from_params(params, kind="dist_async", staleness=staleness, optimizer=tx)
    return train.create_state(store, 7, devices=FOUR, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "staleness"), [pytest.param("pmap", 2, marks=pytest.mark.slow), ("shard_map", 1)])
def test_the_step_is_the_plain_loop_with_gradients_that_wait(engine, staleness):
    """With a transform whose state must not count the steps in which nothing is due."""
    tx, transform = optax.adam(0.05), optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9))
    state = start(staleness, tx, grad_transform=transform)
    step = train.make_train_step(squares, engine=engine, grad_transform=transform)
    structure, metrics = jax.tree.structure(state), {}
    for i in range(5):
        with compilations() as count:
            state, metrics = step(state, line(seed=i))
        assert not i or count() <= 1  # one program, and the batch's way to the devices
    assert jax.tree.structure(state) == structure
    whole = optax.chain(transform, tx)
    close(state.params, late_by_hand(whole, 5, staleness))
    before = late_by_hand(whole, 4, staleness)
    close(metrics["loss"], squares(before, line(seed=4), None)[0], rtol=1e-4)
    finished = step.finish(state)
    close(finished.params, late_by_hand(whole, 5, staleness, finish=True))
    assert step.finish(finished).store == finished.store
    assert int(state.step) == 5  # finish donates nothing


def test_no_staleness_in_a_step_is_the_plain_loop():
    step = train.make_train_step(squares)
    state, _ = trained(step, start(0, sgd()), 3)
    close(state.params, by_hand(sgd(), 3))
    assert step.finish(state) is state


@pytest.mark.slow
def test_a_step_that_is_skipped_pushes_nothing():
    step = train.make_train_step(squares, nonfinite="skip")
    state, bad = start(1, sgd()), line(seed=1)
    bad["y"][3] = np.inf
    for batch in (line(seed=0), bad, line(seed=1)):
        before = snapshot(state.store)
        state, _ = step(state, batch)
        if batch is bad:
            assert_unchanged(state.store, before)
    close(step.finish(state).params, late_by_hand(sgd(), 2, 1, finish=True))


# ---- what the compiled step waits for


def needed(compiled, op):
    """The names of the parameters of a compiled program that its collectives of a sort depend on."""
    program = program_of(compiled)
    entry = program.computations[program.entry].instructions
    to_see = [name for name in entry if entry[name].opcode in (op, f"{op}-start")]
    assert to_see
    seen = set()
    while to_see:
        name = to_see.pop()
        if name in entry and name not in seen:
            seen.add(name)
            to_see += entry[name].operands
    return {entry[name].op_name for name in seen if entry[name].opcode == "parameter"}


def arguments_of(state, field, count):
    """The arguments of a step's program that hold arrays of a field of the store; of pending pushes the values."""
    # The first leaf is the `rng`, which is not donated.
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)][1:]
    found = {f"donated[{i}]" for i, p in enumerate(paths) if p.startswith(f".store.{field}") and ".count" not in p}
    assert len(found) == count, paths
    return found


@pytest.mark.sampled(1)
def test_the_all_reduce_needs_nothing_of_this_step(engine):
    step = train.make_train_step(squares, engine=engine)
    late, prompt = (step.lower(start(n, sgd()), line()).compile() for n in (1, 0))
    assert needed(late, "all-reduce") == arguments_of(start(1, sgd()), "pending", 2)
    assert {"['x']", "['y']"} <= {name[-5:] for name in needed(prompt, "all-reduce")}  # the batch
    assert [name for name, _ in collectives_in(late.as_text())] == ["all-reduce", "all-to-all"]  # and the metrics


def test_the_same_with_a_compressor():
    options = {"kind": "dist_async", "compression": {"type": "2bit"}, "devices": FOUR}
    loss_fn = lambda p, b, rng: (((b @ p["w"]) ** 2).mean(), {})  # noqa: E731
    state, step = train.start({"w": jnp.zeros((64, 3))}, sgd(), loss_fn, **options)
    compiled = step.lower(state, np.ones((8, 64), np.float32)).compile()
    assert needed(compiled, "all-gather") == arguments_of(state, "pending", 1) | arguments_of(state, "residuals", 1)


PLACES = {"two": [[0, 1]], "many": [[0, 1], [3, 2], [0], [1, 1], [0, 1, 2, 3]], "one": [[2]], "same": [[1, 1]]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("home", [None, 3], ids=["anywhere", "on_a_device"])
def test_a_store_with_pending_pushes_is_an_argument_of_jit(home, place):
    """Its arrays of one key are on the same devices, whichever ones have pushed."""
    devices = jax.devices()
    value = jnp.zeros(3) if home is None else jax.device_put(jnp.zeros(3), devices[home])
    store = kv.set_optimizer(kv.init(kv.create("dist_async", staleness=2), 3, value), optax.sgd(0.5, momentum=0.5))
    model, total = np.zeros(3), []
    for step, places in enumerate(PLACES[place]):
        grads = whole_numbers(step, len(places), 3)
        total.append(grads.sum(0))
        store = kv.push(store, 3, put(list(grads), [devices[i] for i in places]))
        same = jax.jit(lambda s: s)(store)
        assert same == store
    trace = np.zeros(3)
    for due in total:
        trace = due + 0.5 * trace
        model = model - 0.5 * trace
    np.testing.assert_allclose(kv.pull(kv.flush(store), 3), model, rtol=1e-6)
    jax.jit(lambda s: s)(kv.flush(store))
