"""The walkthrough of MXNet's article and the edge cases, against what MXNet 1.9.1 itself gave."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import FOUR, KINDS, REFERENCE, put

from jaxpar import kv, updaters

SHAPE = tuple(REFERENCE["shape"])
SHAPES = [(), (0, 3), (5,), (7, 4)]
W0 = np.array(REFERENCE["w0"], np.float32)


def expected(shape):
    """The recorded walkthrough, its constant arrays in another shape."""

    def reshaped(value):
        array = np.array(value, np.float32)
        if array.shape == SHAPE:
            assert (array == array.flat[0]).all()
            return np.full(shape, array.flat[0])
        return [reshaped(v) for v in value]

    return [(name, value if name == "log" else reshaped(value)) for name, value in REFERENCE["walkthrough"]]


def walkthrough(kind, shape, devices, updater, contexts):
    """The article's cells; `contexts` is on how many devices the four ones are."""
    ones, keys = jnp.ones(shape), [5, 7, 9]
    on_devices = put([ones] * 4, devices[:contexts])
    store = kv.init(kv.create(kind), 3, ones * 2)
    yield "init", kv.pull(store, 3)
    store = kv.push(store, 3, ones * 8)
    yield "push", kv.pull(store, 3)
    store = kv.push(store, 3, on_devices)
    yield "push_list", kv.pull(store, 3)
    store = kv.set_updater(store, updater)
    yield "set_updater", kv.pull(store, 3)
    store = kv.push(store, 3, ones)
    yield "push_updated", kv.pull(store, 3)
    yield "pull_devices", kv.pull(store, 3, devices=devices[:4])
    store = kv.init(store, keys, [ones] * 3)
    store = kv.push(store, keys, [ones] * 3)
    yield "keys", kv.pull(store, keys)
    store = kv.push(store, keys, [on_devices] * 3)
    yield "keys_devices", kv.pull(store, keys)[1]


def check(steps, shape):
    *recorded, _ = expected(shape)
    for (name, got), (recorded_name, value) in zip(steps, recorded, strict=True):
        assert name == recorded_name
        many = isinstance(got, list)
        for one, other in zip(got if many else [got], value if many else [value], strict=True):
            assert one.shape == shape
            np.testing.assert_array_equal(one, other, err_msg=name)


def printing(key, pushed, stored):
    print(f"update on key: {key}")
    return stored + 2 * pushed


CASES = (
    [(kind, SHAPE, 4) for kind in KINDS]
    + [(kind, SHAPE, n) for kind in ("local", "device", "sharded") for n in (1, 8)]
    + [("sharded", shape, 4) for shape in SHAPES[:3]]
    + [("device", SHAPES[0], 4)]
    # Values that are not split have one program, whatever their shape.
    + [pytest.param("device", shape, 4, marks=pytest.mark.slow) for shape in SHAPES[1:3]]
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "shape", "contexts"), CASES)
def test_the_article_at_the_prompt(kind, shape, contexts, capsys):
    check(walkthrough(kind, shape, jax.devices(), printing, contexts), shape)
    assert capsys.readouterr().out.splitlines() == REFERENCE["walkthrough"][-1][1]


def twice(key, pushed, stored):
    return stored + 2 * pushed


@pytest.mark.parametrize("updater", [twice, updaters.stateless(twice)], ids=["function", "Updater"])
@pytest.mark.parametrize(
    ("kind", "shape"), [*(("device", s) for s in (SHAPE, *SHAPES[:2])), ("local", SHAPE), ("sharded", SHAPE)], ids=str
)
def test_the_article_under_jit(kind, shape, updater):
    names = []

    @jax.jit
    def run():
        steps = list(walkthrough(kind, shape, jax.devices(), updater, 1))
        names.extend(name for name, _ in steps)
        return [value for _, value in steps]

    values = run()
    check(zip(names, values, strict=True), shape)


def test_an_updater_under_jit_prints_where_it_asks_jax_to(capsys):
    def updater(key, pushed, stored):
        jax.debug.print("update on key: {}", key)
        return stored + 2 * pushed

    store = kv.set_updater(kv.init(kv.create(), [9, 5], [jnp.ones(2)] * 2), updater)
    push = jax.jit(lambda store: kv.push(store, [9, 5], [jnp.ones(2)] * 2))
    for _ in range(2):
        jax.block_until_ready(push(store))
        jax.effects_barrier()
    assert sorted(capsys.readouterr().out.splitlines()) == ["update on key: 5"] * 2 + ["update on key: 9"] * 2


# ---- the edge cases, as recorded


@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
def test_float16_and_duplicates(kind):
    store = kv.push(kv.init(kv.create(kind), 3, jnp.zeros(SHAPE)), 3, jnp.ones(SHAPE, jnp.float16))
    assert kv.pull(store, 3).dtype == jnp.float32
    np.testing.assert_array_equal(kv.pull(store, 3), REFERENCE["edge"]["float16_push"]["ok"])
    store = kv.push(store, [3, 3], [jnp.ones(SHAPE), jnp.full(SHAPE, 2.0)])
    np.testing.assert_array_equal(kv.pull(store, 3), REFERENCE["edge"]["duplicate_keys_one_push"]["ok"])


@pytest.mark.parametrize("kind", KINDS)
def test_pushpull_broadcast_and_row_sparse_pull(kind):
    store = kv.init(kv.create(kind), 3, jnp.asarray(W0))
    values = put([np.full(SHAPE, i, np.float32) for i in (1, 2, 3, 4)], FOUR)
    store, pulled = kv.pushpull(store, 3, values, devices=FOUR)
    np.testing.assert_array_equal(pulled, REFERENCE["pushpull"]["ok"])
    assert [p.devices() for p in pulled] == [{d} for d in FOUR]
    store, pulled = kv.broadcast(store, 4, jnp.asarray(W0), devices=FOUR)
    np.testing.assert_array_equal(pulled, np.array(REFERENCE["broadcast"]["ok"], np.float32))
    assert [p.devices() for p in pulled] == [{d} for d in FOUR]
    record = REFERENCE["row_sparse_pull"]["ok"]
    rows = kv.row_sparse_pull(store, 4, record["row_ids"])
    assert rows.indices.tolist() == record["indices"]
    np.testing.assert_array_equal(rows.values, np.array(record["dense"], np.float32))


# ---- what MXNet 1.9.1 does wrong


ONES = jnp.ones((2, 3))


def filled(kind="device"):
    return kv.init(kv.create(kind), [3, 5], [ONES, ONES])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_adam_counted_a_step_for_each_device(count):
    store = kv.set_optimizer(filled(), optax.adam(0.1))
    for _ in range(3):
        store = kv.push(store, 3, put([ONES / count] * count, jax.devices()))
    assert int(store.updater_state[3][0].count) == 3
    assert int(store.updater_state[5][0].count) == 0


def test_the_rate_was_ignored_on_the_store():
    """#15919, #8907: a rate that changes acts on the next push, without a new program."""
    store = kv.set_optimizer(filled(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    store = kv.push(store, 3, ONES)
    np.testing.assert_allclose(kv.pull(store, 3), np.full((2, 3), 0.5))
    store.updater_state[3].hyperparams["learning_rate"] = jnp.float32(0.1)
    np.testing.assert_allclose(kv.pull(kv.push(store, 3, ONES), 3), np.full((2, 3), 0.4), rtol=1e-6)
    store = kv.set_optimizer(filled(), optax.sgd(optax.piecewise_constant_schedule(0.5, {1: 0.2})))
    store = kv.push(kv.push(store, 3, ONES), 3, ONES)
    np.testing.assert_allclose(kv.pull(store, 3), np.full((2, 3), 0.4), rtol=1e-6)


def test_replicas_diverged():
    """After a push, the copies on all devices are one value."""
    store = kv.set_optimizer(filled(), optax.sgd(0.1, momentum=0.9))
    for i in range(2):
        store = kv.push(store, 3, put([i * ONES, ONES, -ONES, ONES / 3], FOUR))
    copies = kv.pull(store, 3, devices=FOUR)
    assert len({np.asarray(c).tobytes() for c in copies}) == 1
