"""How values are kept: replicated, in rows, or split over a mesh. What a store holds follows from its layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from kv_model import FOUR

from jaxpar import kv, parallel
from jaxpar._store.store import REPLICATED, Form, Layout, sharding_of, state_layouts

MESH = jax.make_mesh((4,), ("data",), devices=FOUR)
PARAMS = {
    "bias": jnp.float32(3),
    "kernel": jnp.arange(15.0).reshape(3, 5),
    "table": jnp.arange(8.0),
    "type": jnp.arange(3),
}


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (4, 8), (0, 2), (17,), (150, 120)])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_what_is_stored_is_full_again(shape, count):
    value = jnp.arange(float(np.prod(shape))).reshape(shape)
    for layout in (REPLICATED, Layout(Form.ROWS, shape, count), Layout(Form.SPLIT, sharding=NamedSharding(MESH, P()))):
        stored = layout.stored(value)
        np.testing.assert_array_equal(layout.full(stored), value)
    rows = Layout(Form.ROWS, shape, count)
    assert rows.stored(value).shape == (count, rows.chunk)


@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_shapes_and_shardings_follow_from_the_layouts(kind):
    store = kv.from_params(PARAMS, kind=kind, devices=FOUR)
    shapes = tuple((k, np.shape(x)) for k, x in enumerate(jax.tree.leaves(PARAMS)))
    assert store.shardings == ()
    rows = tuple((k, Layout(Form.ROWS, shape, 4)) for k, shape in shapes)
    assert store.layouts == (rows if kind == "sharded" else ())
    split = kv.place(store, mesh=MESH, sharding=parallel.fsdp("data"))
    assert [k for k, _ in split.shardings] == [0, 1, 2, 3]
    assert split.layouts == tuple((k, Layout(Form.SPLIT, sharding=sharding)) for k, sharding in split.shardings)
    assert all(split.values[k].sharding == sharding for k, sharding in split.shardings)


def test_each_key_of_a_store_without_names_gets_its_own_sharding():
    store = kv.init(kv.create("device"), [2, 10], [jnp.ones(4096), jnp.ones(3)])
    placed = kv.place(store, mesh=MESH, sharding=parallel.fsdp("data"))
    assert {k: v.sharding.spec for k, v in placed.values.items()} == {2: P("data"), 10: P()}
    again = kv.place(placed, sharding=P())  # on the mesh where it is
    assert [v.sharding.spec for v in again.values.values()] == [P(), P()]
    assert {v.sharding.mesh for v in again.values.values()} == {v.sharding.mesh for v in placed.values.values()}


def test_layouts_are_static_and_equal_ones_share_a_program():
    compiled = jax.jit(lambda store: store.values)
    for _ in range(2):
        compiled(kv.from_params(PARAMS, kind="sharded", devices=FOUR))
    assert compiled._cache_size() == 1


def flat():
    """A transform whose state is a list, so that nobody can tell whose each leaf is."""

    def init(params):
        return [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)]

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: -u, updates), [
            s + u for s, u in zip(state, jax.tree.leaves(updates), strict=True)
        ]

    return optax.GradientTransformation(init, update)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tx", [optax.adam(0.1), flat()], ids=["adam", "list"])
def test_the_state_of_an_optimizer_is_kept_as_the_params(tx):
    """Of a list nobody knows to which param a leaf belongs. In rows that is not needed: the shapes say it."""
    whole = kv.from_params(PARAMS, optimizer=tx, devices=FOUR)
    rows = kv.from_params(PARAMS, kind="sharded", optimizer=tx, devices=FOUR)

    def leaves(store):
        """(layout, leaf, the same leaf of a whole state) of each."""
        trees = state_layouts(store), store.optimizer_state, whole.optimizer_state
        return zip(*map(jax.tree.leaves, trees), strict=True)

    for layout, leaf, same in leaves(rows):
        assert layout == (REPLICATED if jnp.issubdtype(leaf.dtype, jnp.integer) else Layout(Form.ROWS, same.shape, 4))
        np.testing.assert_array_equal(layout.full(leaf), same)
    for target in ({"devices": FOUR[:3]}, {"mesh": MESH}):
        moved = kv.place(rows, **target)
        for layout, leaf, same in leaves(moved):
            np.testing.assert_array_equal(layout.full(leaf), same)
            assert leaf.sharding.is_equivalent_to(sharding_of(moved, layout), leaf.ndim)


@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_a_value_pulled_from_a_mesh_is_the_callers(kind):
    rule = parallel.fsdp("data", min_size=1)
    store = kv.from_params({"w": jnp.arange(8.0)}, kind=kind, optimizer=optax.sgd(0.1), mesh=MESH, sharding=rule)
    pulled = kv.pull(store, 0)
    jax.jit(lambda x: x + 1, donate_argnums=0)(pulled)
    assert pulled.is_deleted()
    assert kv.pull(store, 0).tolist() == list(range(8))
