"""Rows pushed into a store: sums, lazy updates, every place they may come from."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import FOUR, dense_of, over, put, whole_numbers

from jaxpar import kv, updaters
from jaxpar.sparse import RowSparse

SHAPE = (6, 2)
INDICES = [[4, 0], [0, 0], [5, 1]]


def rows_of(i, indices=None):
    indices = INDICES[i] if indices is None else indices
    return RowSparse(np.array(indices, np.int32), whole_numbers(i, len(indices), 2), SHAPE)


def table(kind="device", updater=updaters.accumulate):
    return kv.set_updater(kv.init(kv.create(kind), 3, whole_numbers(9, *SHAPE)), updater)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["local", "device", "dist_sync"])
@pytest.mark.parametrize("count", [1, 3])
def test_lists_of_rows_are_summed_by_row(kind, count):
    given = [rows_of(i) for i in range(count)]
    total = sum(dense_of(rows) for rows in given)
    store = kv.push(table(kind), 3, put(given, jax.devices()))
    np.testing.assert_array_equal(kv.pull(store, 3), whole_numbers(9, *SHAPE) + total)
    store = kv.push(kv.set_updater(store, updaters.assign), 3, given)  # MXNet: rows not mentioned become 0
    np.testing.assert_array_equal(kv.pull(store, 3), total)


def test_lazy_updates_leave_other_rows_and_their_state_alone():
    """MXNet's lazy_update, its own numbers."""
    store = kv.init(kv.create(), 0, jnp.ones((4, 2)))
    store = kv.set_optimizer(store, updaters.mxnet_sgd(learning_rate=0.1, momentum=0.9, wd=0.01))
    for row in (0, 1, 0):
        store = kv.push(store, 0, RowSparse(np.array([row]), np.float32([[1, 2]]), (4, 2)))
    want = [[0.707201, 0.417301], [0.899, 0.799], [1, 1], [1, 1]]
    np.testing.assert_allclose(kv.pull(store, 0), want, atol=1e-6)


@pytest.mark.slow
def test_rows_and_dense_values_of_different_keys_in_one_push():
    store = kv.init(table(), 7, jnp.zeros(3))
    store = kv.push(store, [7, 3], [[jnp.ones(3)] * 2, [rows_of(0), rows_of(1)]])
    np.testing.assert_array_equal(kv.pull(store, 7), np.full(3, 2.0))
    np.testing.assert_array_equal(
        kv.pull(store, 3), whole_numbers(9, *SHAPE) + dense_of(rows_of(0)) + dense_of(rows_of(1))
    )


def test_under_jit():
    push = jax.jit(lambda s, rows: kv.push(s, 3, rows))
    store = push(push(table(), [rows_of(0), rows_of(2)]), rows_of(1))
    total = sum(dense_of(rows_of(i)) for i in range(3))
    np.testing.assert_array_equal(kv.pull(store, 3), whole_numbers(9, *SHAPE) + total)


@pytest.mark.sampled(1)
def test_over_devices_without_a_dense_table(engine):
    indices = np.array([*INDICES, [2, 2]], np.int32)
    values = whole_numbers(1, 4, 2, 2)

    def body(store, rows):
        return kv.push(store, 3, RowSparse(*rows, SHAPE), axis_name="data")

    want = whole_numbers(9, *SHAPE)
    np.add.at(want, indices.reshape(-1), values.reshape(-1, 2))
    run = over(engine, table(), FOUR, body)
    np.testing.assert_array_equal(kv.pull(run(table(), (indices, values)), 3), want)


def test_a_plain_function_updates_rows_too():
    seen = []

    def updater(key, pushed, stored):
        seen.append((key, pushed.shape))
        return stored - pushed

    store = kv.push(table(updater=updater), 3, rows_of(0))
    assert seen == [(3, (2, 2))]
    np.testing.assert_array_equal(kv.pull(store, 3), whole_numbers(9, *SHAPE) - dense_of(rows_of(0)))


@pytest.mark.parametrize("mapped", [False, True])
def test_optimizers_that_update_the_whole_table_as_in_mxnet(mapped):
    """MXNet 1.9.1: rmsprop with decay .1 and one row pushed gives .99684 in every other row."""
    store = kv.init(kv.create("device"), 3, jnp.ones(SHAPE))
    store = kv.set_updater(store, updaters.mxnet_rmsprop(wd=0.1))
    rows = RowSparse(np.array([1], np.int32), np.ones((1, 2), np.float32), SHAPE)
    if mapped:
        body = lambda s, v: kv.push(s, 3, RowSparse(rows.indices, v, SHAPE), axis_name="data")  # noqa: E731
        store = over("pmap", store, jax.devices()[:2], body)(store, jnp.full((2, 1, 2), 0.5))
    else:
        store = kv.push(store, 3, [rows])
    np.testing.assert_allclose(kv.pull(store, 3), np.full(SHAPE, 0.99684), atol=1e-5)


@pytest.mark.slow
def test_adam_on_rows_is_adam_on_these_rows_alone():
    tx = optax.adam(0.1)
    store = kv.set_optimizer(kv.init(kv.create(), 3, whole_numbers(9, *SHAPE)), tx)
    alone = kv.set_optimizer(kv.init(kv.create(), 0, whole_numbers(9, *SHAPE)[[0, 4]]), tx)
    for _ in range(3):
        store = kv.push(store, 3, rows_of(0))
        alone = kv.push(alone, 0, dense_of(rows_of(0))[[0, 4]])
    np.testing.assert_allclose(kv.pull(store, 3)[jnp.array([0, 4])], kv.pull(alone, 0), rtol=1e-6)
    np.testing.assert_array_equal(kv.pull(store, 3)[1:4], whole_numbers(9, *SHAPE)[1:4])


@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
@pytest.mark.parametrize("ids", [[3, 0, 3, 1], [], [5], np.array([[1, 2], [2, 1]])], ids=str)
def test_pulling_rows(kind, ids):
    store = kv.init(kv.create(kind), 3, whole_numbers(9, *SHAPE))
    rows = kv.row_sparse_pull(store, 3, jnp.asarray(ids, jnp.int32))
    unique = np.unique(np.asarray(ids, np.int32))
    np.testing.assert_array_equal(rows.indices, unique)
    np.testing.assert_array_equal(rows.values, whole_numbers(9, *SHAPE)[unique])
    assert rows.shape == SHAPE
    np.testing.assert_array_equal(kv.row_sparse_pull(store, 3, ids).values, rows.values)


def test_pulling_rows_of_several_keys_onto_devices():
    devices = jax.devices()[1:3]
    store = kv.init(kv.create(), [3, 4], [whole_numbers(9, *SHAPE), whole_numbers(8, *SHAPE)])
    pulled = kv.row_sparse_pull(store, [4, 3], [jnp.array([0]), jnp.array([2, 1])], devices=devices)
    assert [[r.indices.tolist() for r in rows] for rows in pulled] == [[[0], [0]], [[1, 2], [1, 2]]]
    assert [r.values.devices() for r in pulled[1]] == [{d} for d in devices]
    one_for_all = kv.row_sparse_pull(store, [4, 3], jnp.array([5]))
    assert [r.indices.tolist() for r in one_for_all] == [[5], [5]]
    same = kv.row_sparse_pull(store, [4, 3], [5, 1])  # plain ints: one list for all keys
    assert [r.indices.tolist() for r in same] == [[1, 5], [1, 5]]


PER_DEVICE = {
    "arrays": ([np.array([0, 1]), np.array([2, 2])], [[0, 1], [2]]),
    "lists": ([[0, 1], [2, 2]], [[0, 1], [2]]),
    "unequal": ((jnp.array([5, 0, 5]), [3]), [[0, 5], [3]]),
    "one_is_empty": ([[], [4]], [[], [4]]),
    "one_for_all": ([np.array([2, 1])], [[1, 2], [1, 2]]),
    "numbers": ([np.int64(2), np.int64(1)], [[1, 2], [1, 2]]),
    "two_axes": (np.array([[0, 1], [2, 2]]), [[0, 1, 2], [0, 1, 2]]),
}


@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
@pytest.mark.parametrize(("ids", "want"), PER_DEVICE.values(), ids=PER_DEVICE)
def test_each_device_gets_the_rows_of_its_own_list(ids, want, kind):
    """MXNet: as many lists of ids as there are arrays to write to, or one for all."""
    devices, values = jax.devices()[1:3], whole_numbers(9, *SHAPE)
    store = kv.init(kv.create(kind), [3, 4], [values, -values])
    pulled = kv.row_sparse_pull(store, 3, ids, devices=devices)
    assert [r.indices.tolist() for r in pulled] == want
    assert [r.values.devices() for r in pulled] == [{d} for d in devices]
    for rows in pulled:
        np.testing.assert_array_equal(rows.values, values[np.asarray(rows.indices)])
    both = kv.row_sparse_pull(store, [4, 3], [ids, np.array([5])], devices=devices)
    assert [[r.indices.tolist() for r in rows] for rows in both] == [want, [[5], [5]]]
    np.testing.assert_array_equal(both[0][1].values, -values[np.array(want[1])])


def test_as_many_lists_of_ids_as_devices():
    store = kv.init(kv.create(), [3, 4], [whole_numbers(9, *SHAPE)] * 2)
    lists, devices = [np.array([0, 1]), np.array([2]), np.array([3])], jax.devices()[:2]
    with pytest.raises(ValueError, match=r"key 3: expected one array of ids, .* got 3 lists of ids and 2 devices"):
        kv.row_sparse_pull(store, 3, lists, devices=devices)
    with pytest.raises(ValueError, match=r"key 4: expected one array of ids, .* got 3 lists of ids and 2 devices"):
        kv.row_sparse_pull(store, [3, 4], [[0], lists], devices=devices)
    with pytest.raises(ValueError, match=r"key 3: expected one array of ids, .*got 3 lists of ids and no devices="):
        kv.row_sparse_pull(store, 3, lists)
    on = jax.jit(lambda s, ids: kv.row_sparse_pull(s, 3, [ids, ids[:1]], devices=devices))(store, jnp.array([3, 1]))
    assert [r.indices.tolist() for r in on] == [[1, 3], [3]]


def test_pulling_rows_under_jit():
    store = table()
    rows = jax.jit(lambda s, ids: kv.row_sparse_pull(s, 3, ids))(store, jnp.array([3, 0, 3]))
    assert rows.indices.tolist() == [0, 3, 6]  # 6 pads
    np.testing.assert_array_equal(rows.values[:2], whole_numbers(9, *SHAPE)[[0, 3]])
    on = jax.jit(lambda s, ids: kv.row_sparse_pull(s, 3, ids, devices=jax.devices()[:2]))(store, jnp.array([3]))
    assert [r.indices.tolist() for r in on] == [[3], [3]]


def test_other_numbers_of_rows_need_no_other_programs(caplog):
    """Each batch of a recommender has another number of different ids."""
    rng, updater = np.random.default_rng(0), updaters.mxnet_sgd(0.1, momentum=0.9)
    table = jnp.asarray(rng.normal(size=(50, 3)), jnp.float32)
    start = kv.set_updater(kv.init(kv.create("device"), 0, table), updater)

    def pushed(rows):
        return RowSparse(rows, rng.normal(size=(len(rows), 3)).astype(np.float32), (50, 3))

    batches = [pushed(rng.permutation(50)[:count]) for count in (8, 8, 5, 6, 7)]
    store = kv.push(kv.push(start, 0, batches[0]), 0, batches[1])  # the first one puts the state on its device
    kv.row_sparse_pull(store, 0, [1, 2])
    kv.pull(store, 0)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for batch in batches[2:]:
            store = kv.push(store, 0, batch)
            rows = kv.row_sparse_pull(store, 0, np.asarray(batch.indices))
            np.testing.assert_array_equal(rows.indices, np.sort(batch.indices))
            np.testing.assert_array_equal(rows.values, np.asarray(kv.pull(store, 0))[rows.indices])
    assert [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling")] == []
    # To the bit what a program for the very number of rows gives: inside of a `jit` nothing is padded.
    expected = start
    for batch in batches:
        expected = jax.jit(lambda store, batch: kv.push(store, 0, batch))(expected, batch)
    assert expected == store


@pytest.mark.parametrize(
    "updater",
    [
        updaters.from_optax(optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1.0))),
        updaters.Updater(lambda key, value: (), lambda key, pushed, state, stored: (stored + pushed.mean(), state)),
    ],
    ids=["optax", "own"],
)
def test_an_updater_that_looks_at_all_rows_sees_no_others(updater):
    store = kv.set_updater(kv.init(kv.create("device"), 0, jnp.zeros((9, 2))), updater)
    rows = RowSparse([1, 4, 7], np.arange(6, dtype=np.float32).reshape(3, 2), (9, 2))
    new, _ = updater.update(0, rows.values, updater.init(0, rows.values), jnp.zeros((3, 2)))
    np.testing.assert_allclose(kv.pull(kv.push(store, 0, rows), 0)[np.array([1, 4, 7])], new, rtol=1e-6)
    # Nor those that are left over where two values have the same rows.
    halves = [RowSparse(rows.indices, rows.values / 2, (9, 2))] * 2
    np.testing.assert_allclose(kv.pull(kv.push(store, 0, halves), 0)[np.array([1, 4, 7])], new, rtol=1e-6)


def test_a_plain_function_gets_the_rows_that_were_pushed():
    shapes = []

    def updater(key, pushed, stored):
        shapes.append(pushed.shape)
        return stored + pushed

    store = kv.set_updater(kv.init(kv.create("device"), 0, jnp.zeros((9, 2))), updater)
    store = kv.push(store, 0, RowSparse([4, 1, 7], np.ones((3, 2), np.float32), (9, 2)))
    assert shapes == [(3, 2)]
    assert np.flatnonzero(np.asarray(kv.pull(store, 0)).any(1)).tolist() == [1, 4, 7]
