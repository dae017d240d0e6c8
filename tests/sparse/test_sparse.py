"""Row-sparse values: MXNet's examples, a NumPy model of every function, and what may not be copied."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from kv_model import dense_of, on_mesh, over_pmap, over_shard_map, over_vmap

from jaxpar import kv, sparse, updaters
from jaxpar.models import matrix_factorization
from jaxpar.sparse import RowSparse
from jaxpar.updaters import _mxnet

TABLE = np.arange(12.0, dtype=np.float32).reshape(6, 2)


def rows_of(indices, shape=(6, 2), seed=0):
    values = np.random.default_rng(seed).integers(-9, 9, (len(indices), *shape[1:])).astype(np.float32)
    return RowSparse(np.array(indices, np.int32), jnp.asarray(values), shape)


def held(rows):
    """The rows that are no padding, in the order they are held."""
    real = np.asarray(rows.indices) < rows.shape[0]
    return np.asarray(rows.indices)[real], np.asarray(rows.values)[real]


def lists_of(size):
    return st.lists(st.integers(0, 5), min_size=size, max_size=size)


indices_lists = st.sampled_from([0, 5]).flatmap(lists_of)  # few sizes, so that the examples share their programs


# ---- the type


def test_is_a_pytree_with_a_static_shape():
    rows = rows_of([3, 0])
    leaves, tree = jax.tree.flatten(rows)
    assert [leaf.shape for leaf in leaves] == [(2,), (2, 2)]
    assert jax.tree.unflatten(tree, leaves).shape == (6, 2)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(rows)]
    assert paths == [".indices", ".values"]
    twice = jax.jit(lambda r: jax.tree.map(lambda x: x * 2, r))(rows)
    np.testing.assert_array_equal(twice.values, rows.values * 2)
    assert jax.eval_shape(lambda r: r, rows).values.shape == (2, 2)


def test_takes_any_integers_and_owns_what_it_holds():
    indices, values = np.array([3, 0], np.int32), np.ones((2, 2), np.float32)
    rows = RowSparse(indices, values, (np.int64(6), 2))
    indices[:], values[:] = 1, 7
    np.testing.assert_array_equal(rows.indices, [3, 0])
    np.testing.assert_array_equal(rows.values, np.ones((2, 2)))
    assert rows.shape == (6, 2)
    assert RowSparse(np.array([3], np.uint8), np.ones((1, 2)), (6, 2)).indices.dtype == jnp.int32
    assert RowSparse([], np.ones((0, 2), np.float32), (6, 2)).indices.dtype == jnp.int32


@pytest.mark.slow
def test_looking_rows_up():
    rows = sparse.take(TABLE, [4, 1])
    np.testing.assert_array_equal(rows[np.array([[4, 1], [1, 0]])], [TABLE[[4, 1]], [TABLE[1], [0, 0]]])
    np.testing.assert_array_equal(rows[jnp.array([[0, 5], [4, 4]])], [np.zeros((2, 2)), TABLE[[4, 4]]])
    np.testing.assert_array_equal(rows[4], TABLE[4])
    padded = sparse.take(TABLE, [4, 1], size=4)
    np.testing.assert_array_equal(
        jax.jit(lambda r, i: r[i])(padded, jnp.array([1, 5, 6, -1])), dense_of(rows)[[1, 5, 0, 0]]
    )
    assert sparse.take(TABLE, [])[jnp.array([2])].tolist() == [[0.0, 0.0]]


# ---- what is refused: the error, the call, and the names and values of its message, in their order


def built(indices, values, shape):
    return RowSparse(np.array(indices), jnp.ones(values), shape)


def updated(update, stored):
    return sparse.lazy_update(lambda pushed, state, stored: (update(stored), state), rows_of([0]), (), jnp.ones(stored))


T, V = TypeError, ValueError
REFUSED = {
    "an index that is no integer": (T, lambda: built([0.5], (1, 2), (6, 2)), ["RowSparse", "indices", "0.5"]),
    "a mask for indices": (T, lambda: built([True], (1, 2), (6, 2)), ["indices", "bool"]),
    "indices of two axes": (V, lambda: built([[0]], (1, 2), (6, 2)), ["indices", "(1, 1)"]),
    "more values than indices": (V, lambda: built([0], (2, 2), (6, 2)), ["1 rows", "(6, 2)", "(1, 2)", "(2, 2)"]),
    "wider values": (V, lambda: built([0], (1, 3), (6, 2)), ["values of shape (1, 2)", "(1, 3)"]),
    "a table of no axes": (V, lambda: built([0], (1,), ()), ["first axis", "2**30"]),
    "a table of too many rows": (V, lambda: built([0], (1, 2), (2**30, 2)), ["2**30", "(1073741824, 2)"]),
    "a negative row": (V, lambda: built([2, -1], (2, 2), (6, 2)), ["row -1", "0 to 5"]),
    "a row beyond the last": (V, lambda: built([7], (1, 2), (6, 2)), ["row 7", "0 to 5"]),
    # Ids that MXNet skips or aborts at.
    "an id beyond the last": (V, lambda: sparse.take(TABLE, [0, 6]), ["take", "row 6", "0 to 5"]),
    "a negative id": (V, lambda: sparse.take(TABLE, [-1]), ["take", "row -1", "0 to 5"]),
    "an id beyond int32": (V, lambda: sparse.take(TABLE, [2**40]), ["take", f"row {2**40}"]),
    "an id between two rows": (T, lambda: sparse.take(TABLE, [0.5]), ["take", "ids", "0.5"]),
    "an id that is no number": (T, lambda: sparse.take(TABLE, [1.0, np.nan]), ["take", "ids", "nan"]),
    "a floating id beyond int32": (V, lambda: sparse.take(TABLE, [2.0**40]), ["take", f"row {2**40}"]),
    "a floating id beyond int64": (T, lambda: sparse.take(TABLE, [2.0**70]), ["take", "ids", "1.18"]),
    "floating ids within jit": (
        T,
        lambda: jax.eval_shape(sparse.take, TABLE, jnp.array([3.0])),
        ["take", "ids", "float32"],
    ),
    "ids of a number": (V, lambda: sparse.take(jnp.ones(()), [0]), ["take", "first axis"]),
    # Sizes and shapes.
    "a size too small for ids": (V, lambda: sparse.take(TABLE, [4, 1], size=1), ["take", "size 1", "2"]),
    "a size too small for rows": (V, lambda: sparse.coalesce(rows_of([4, 1, 4]), size=1), ["size 1", "2"]),
    "a size too small for a sum": (V, lambda: sparse.add([rows_of([4, 1, 4])], size=1), ["size 1", "2"]),
    "a sum of two tables": (
        V,
        lambda: sparse.add([rows_of([0]), rows_of([0], (7, 2))]),
        ["one shape", "[(6, 2), (7, 2)]"],
    ),
    "a sum of nothing": (V, lambda: sparse.add([]), ["one shape", "[]"]),
    "a row of rows that are not sorted": (V, lambda: rows_of([3, 0])[jnp.array([0])], ["sorted", "coalesce"]),
    "a loop over rows": (T, lambda: list(rows_of([0])), ["iterable"]),
    "rows of another table": (V, lambda: updated(jnp.copy, (5, 2)), ["(6, 2)", "(5, 2)"]),
    "an update to another shape": (V, lambda: updated(jnp.sum, (6, 2)), ["(1, 2)", "()"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, call, content = REFUSED[case]
    with pytest.raises(error, match=".*".join(map(re.escape, content))):
        call()


# ---- functions against NumPy


@settings(max_examples=25, deadline=None)
@given(indices=indices_lists)
def test_coalesce(indices):
    rows = rows_of(indices)
    trimmed = sparse.coalesce(rows)
    np.testing.assert_array_equal(trimmed.indices, np.unique(indices))
    np.testing.assert_array_equal(trimmed.values, dense_of(rows)[np.unique(indices).astype(int)])
    padded = jax.jit(sparse.coalesce)(rows)
    assert padded.indices.shape == rows.indices.shape
    for got, expected in zip(held(padded), held(trimmed), strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(padded.values[len(trimmed.indices) :], 0)


@settings(max_examples=25, deadline=None)
@given(ids=indices_lists)
def test_take(ids):
    unique = np.unique(np.array(ids, int))
    rows = sparse.take(TABLE, ids)
    np.testing.assert_array_equal(rows.indices, unique)
    np.testing.assert_array_equal(rows.values, TABLE[unique])
    padded = jax.jit(sparse.take)(TABLE, jnp.array(ids, jnp.int32))
    assert padded.indices.shape == (len(ids),)
    np.testing.assert_array_equal(held(padded)[0], unique)
    np.testing.assert_array_equal(held(padded)[1], TABLE[unique])
    np.testing.assert_array_equal(sparse.to_dense(padded), dense_of(rows))


@settings(max_examples=20, deadline=None)
@given(parts=st.sampled_from([[4], [3, 0, 2]]).flatmap(lambda sizes: st.tuples(*map(lists_of, sizes))))
def test_add_is_the_dense_sum(parts):
    rows = [rows_of(indices, seed=i) for i, indices in enumerate(parts)]
    expected = sum(dense_of(one) for one in rows)
    total = sparse.add(rows)
    np.testing.assert_array_equal(total.indices, np.unique(np.concatenate([np.array(p, int) for p in parts])))
    np.testing.assert_array_equal(dense_of(total), expected)
    np.testing.assert_array_equal(sparse.to_dense(jax.jit(sparse.add)(rows)), expected)


def test_sizes():
    rows = rows_of([4, 1, 4])
    assert sparse.coalesce(rows, size=5).indices.tolist() == [1, 4, 6, 6, 6]
    assert sparse.take(TABLE, [4, 1, 4], size=3).indices.tolist() == [1, 4, 6]
    assert jax.jit(functools.partial(sparse.take, size=2))(TABLE, jnp.array([4, 1, 4])).indices.tolist() == [1, 4]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(6,), (6, 0), (0, 3), (6, 2, 3)], ids=str)
def test_tables_of_other_shapes(shape):
    table = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)
    ids = [] if not shape[0] else [5, 2, 5]
    rows = sparse.take(table, ids)
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows.values, table[np.unique(np.array(ids, int))])
    twice = sparse.add([rows, rows])
    np.testing.assert_array_equal(sparse.to_dense(twice), dense_of(twice))
    new, _ = sparse.lazy_update(lambda pushed, state, stored: (stored - pushed, state), rows, (), table)
    assert new.shape == shape
    np.testing.assert_array_equal(new, jnp.where(sparse.to_dense(rows) != 0, 0, table))


def test_from_dense():
    table = jnp.asarray(TABLE).at[0].set(0).at[3].set(jnp.array([0, 7]))
    table = table.at[4].set(0)
    assert sparse.from_dense(table).indices.tolist() == [1, 2, 3, 5]
    np.testing.assert_array_equal(sparse.to_dense(sparse.from_dense(table)), table)
    assert sparse.from_dense(table, [4, 0]).indices.tolist() == [0, 4]
    assert sparse.from_dense(jnp.array([0.0, 2.0])).indices.tolist() == [1]


@pytest.mark.parametrize("ids", [[3.0, 0.0, 3.0], np.float32([3, 0, 3]), jnp.float16([3, 0, 3])])
def test_whole_floating_ids_are_ids_as_in_mxnet(ids):
    assert sparse.take(TABLE, ids).indices.tolist() == [0, 3]
    rows = sparse.RowSparse(ids, np.ones((3, 2)), (6, 2))
    assert (rows.indices.tolist(), rows.indices.dtype) == ([3, 0, 3], np.int32)
    store = kv.init(kv.create("device"), 0, TABLE)
    assert kv.row_sparse_pull(store, 0, ids).indices.tolist() == [0, 3]


def test_ids_out_of_range_are_padding_under_jit():
    rows = jax.jit(sparse.take)(TABLE, jnp.array([-1, 6, 2, 2**31 - 1]))
    assert rows.indices.tolist() == [2, 6, 6, 6]
    np.testing.assert_array_equal(sparse.to_dense(rows), dense_of(sparse.take(TABLE, [2])))

    @jax.jit
    def built(indices):
        rows = RowSparse(indices, jnp.ones((4, 2)), (6, 2))
        new, _ = sparse.lazy_update(lambda pushed, state, stored: (stored + pushed, state), rows, (), TABLE)
        return sparse.to_dense(rows), sparse.to_dense(sparse.coalesce(rows)), new - TABLE

    for table in built(jnp.array([-1, 6, 2, 99])):
        np.testing.assert_array_equal(table, jnp.zeros((6, 2)).at[2].set(1))


# ---- over devices


@pytest.mark.sampled(2)
@pytest.mark.parametrize("over", [over_pmap, over_shard_map, over_vmap], ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", [None, 6])
def test_allreduce_is_the_sum_over_devices_on_each(over, size, devices):
    n = len(devices)
    parts = [rows_of(np.random.default_rng(i).integers(0, 6, 5), seed=i) for i in range(n)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *parts)
    total = jax.tree.map(np.asarray, over(lambda rows: sparse.allreduce(rows, "data", size=size), devices, stacked))
    assert total.indices.shape == (n, size or 5 * n)
    for device in range(n):
        one = jax.tree.map(lambda x, d=device: x[d], total)
        np.testing.assert_array_equal(held(one)[0], np.unique(np.concatenate([p.indices for p in parts])))
        np.testing.assert_array_equal(dense_of(one), sum(dense_of(p) for p in parts))


def test_allreduce_sends_rows_and_never_the_table():
    rows = RowSparse(np.zeros(4 * 8, np.int32), jnp.ones((4 * 8, 16)), (100_000, 16))
    reduce = on_mesh(lambda r: sparse.allreduce(r, "data"), jax.devices()[:4], P("data"), P("data"), check_vma=True)
    compiled = reduce.lower(rows).compile()
    assert "100000,16" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 100_000


# ---- lazy updates


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "over"),
    [(f"mxnet_{name}", jax.jit) for name in ("sgd", "nag", "adam", "rmsprop", "adagrad")]
    + [("mxnet_adam", lambda f: f)],
)
def test_lazy_update_is_the_dense_update_of_the_rows_present(name, over):
    more = {"momentum": 0.9} if name == "mxnet_nag" else {}
    updater = getattr(_mxnet, name)(lambda count: 0.1 / (1 + count), wd=0.1, **more)
    dense_update = jax.jit(functools.partial(updater.update, 0))
    table = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)), jnp.float32)
    state = dense_state = updater.init(0, table)
    dense = table

    def push(rows, state, table):
        return sparse.lazy_update(functools.partial(updater.update, 0), rows, state, table)

    for seed, indices in enumerate([[4, 1, 4], [4, 4, 4], [0, 3, 0], []]):  # few sizes, a program of each
        rows = rows_of(indices, seed=seed)
        new, new_state = dense_update(dense_of(rows), dense_state, dense)
        present = np.isin(np.arange(6), indices)[:, None]
        dense = np.where(present, new, dense)
        dense_state = jax.tree.map(
            lambda new, old, p=present: np.where(p, new, old) if new.ndim else new, new_state, dense_state
        )
        table, state = over(push)(rows, state, table)
    np.testing.assert_allclose(table, dense, atol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), state, dense_state)
    assert int(state["count"]) == 4


def test_a_donated_table_is_changed_in_place_at_the_cost_of_the_rows():
    updater = updaters.mxnet_adam(0.1)
    shape, m = (200_000, 16), 64
    nbytes = 4 * shape[0] * shape[1]
    table = jnp.ones(shape)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def push(rows, table, state):
        return sparse.lazy_update(functools.partial(updater.update, 0), rows, state, table)

    rows = RowSparse(np.arange(m), jnp.ones((m, 16)), shape)
    compiled = push.lower(rows, table, updater.init(0, table)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * nbytes  # the table and both of adam's moments
    assert memory.temp_size_in_bytes < nbytes / 100
    assert not re.search(r"= f32\[200000,16\]\S* copy\(", compiled.as_text())
    where = table.unsafe_buffer_pointer()
    new, _ = push(rows, table, updater.init(0, table))
    assert new.unsafe_buffer_pointer() == where
    assert float(new[0, 0]) < 1 == float(new[m, 0])


@pytest.mark.slow
def test_rows_known_to_be_coalesced_are_not_sorted_again():
    def push(rows, table, coalesced):
        update = lambda pushed, state, stored: (stored + pushed, state)  # noqa: E731
        return sparse.lazy_update(update, rows, (), table, coalesced=coalesced)[0]

    rows = sparse.coalesce(rows_of([4, 1, 4]), size=3)
    jitted = jax.jit(push, static_argnums=2)
    assert " sort(" in jitted.lower(rows, TABLE, False).compile().as_text()
    assert " sort(" not in jitted.lower(rows, TABLE, True).compile().as_text()
    np.testing.assert_array_equal(push(rows, jnp.asarray(TABLE), True), TABLE + dense_of(rows))


def test_lazy_update_sums_in_the_stored_dtype():
    ones = RowSparse(np.zeros(300, np.int32), np.ones((300, 1), jnp.bfloat16), (2, 1))
    add = jax.jit(lambda rows, table: sparse.lazy_update(lambda p, state, s: (s + p, state), rows, (), table)[0])
    table = add(ones, np.zeros((2, 1), np.float32))
    assert table.tolist() == [[300.0], [0.0]]  # bfloat16 would have stopped at 256


@pytest.mark.slow
def test_vmap_of_lazy_updates():
    pushes = RowSparse(jnp.array([0, 5]), jnp.ones((2, 2)), (6, 2))
    pushes = jax.tree.map(lambda x: jnp.stack([x, x]), pushes)
    tables = jnp.stack([jnp.zeros((6, 2)), jnp.ones((6, 2))])
    push = functools.partial(sparse.lazy_update, lambda p, state, s: (s + p, state))
    new, _ = jax.vmap(lambda rows, table: push(rows, (), table))(pushes, tables)
    np.testing.assert_array_equal(new[:, :, 0], [[1, 0, 0, 0, 0, 1], [2, 1, 1, 1, 1, 2]])


def test_scan_of_lazy_updates():
    pushes = jnp.array([[0, 1, 1], [5, 0, 0]])

    def push(table, indices):
        rows = RowSparse(indices, jnp.ones((3, 2)), (6, 2))
        return sparse.lazy_update(lambda p, state, s: (s + p, state), rows, (), table)[0], None

    table, _ = jax.lax.scan(push, jnp.zeros((6, 2)), pushes)
    np.testing.assert_array_equal(table[:, 0], [3, 2, 0, 0, 0, 1])


# ---- training


@pytest.mark.slow
@pytest.mark.parametrize("over", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_matrix_factorization_by_rows_equals_the_dense_computation(over):
    """Pull the rows of the batch, differentiate by them, push."""
    dense = matrix_factorization.init(jax.random.key(0), 20, 15, 4)
    store, draws = kv.from_params(dense, updater=updaters.mxnet_sgd(0.5)), np.random.default_rng(0)

    def loss_fn(params, users, items, ratings):
        return ((matrix_factorization.apply(params, users, items) - ratings) ** 2).mean()

    def step(store, dense, ids, ratings):
        batch = ids["user"], ids["item"], ratings
        loss, grads = jax.value_and_grad(loss_fn)(dense, *batch)
        rows = {name: kv.row_sparse_pull(store, name, ids[name]) for name in ids}
        row_loss, row_grads = sparse.value_and_grad(loss_fn)(rows, *batch)
        store = kv.push(store, list(ids), [row_grads[name] for name in ids])
        return store, jax.tree.map(lambda p, g: p - 0.5 * g, dense, grads), (loss, row_loss), row_grads

    for _ in range(5):
        ids = {"user": jnp.array(draws.integers(0, 20, 8)), "item": jnp.array(draws.integers(0, 15, 8))}
        store, dense, losses, row_grads = over(step)(store, dense, ids, jnp.array(draws.normal(size=8), jnp.float32))
        np.testing.assert_allclose(*losses, rtol=1e-5)
        for name in ids:
            assert held(row_grads[name])[0].tolist() == np.unique(ids[name]).tolist()
            np.testing.assert_allclose(kv.pull(store, name), dense[name], atol=1e-6)


def test_value_and_grad_of_rows_beside_dense_leaves_with_aux():
    rows = sparse.take(TABLE, [3, 1], size=3)
    params = {"table": rows, "scale": jnp.float32(2.0)}

    @jax.jit
    def run(params, ids):
        def loss_fn(params, ids):
            looked_up = params["table"][ids] * params["scale"]
            return looked_up.sum(), looked_up

        return sparse.value_and_grad(loss_fn, has_aux=True)(params, ids)

    (loss, aux), grads = run(params, jnp.array([3, 3, 1]))
    assert float(loss) == 2 * TABLE[[3, 3, 1]].sum()
    np.testing.assert_array_equal(aux, 2 * TABLE[[3, 3, 1]])
    assert float(grads["scale"]) == TABLE[[3, 3, 1]].sum()
    assert isinstance(grads["table"], RowSparse)
    np.testing.assert_array_equal(grads["table"].indices, [1, 3, 6])
    np.testing.assert_array_equal(grads["table"].values, [[2, 2], [4, 4], [0, 0]])
