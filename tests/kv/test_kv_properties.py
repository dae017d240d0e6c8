"""Laws of the store, on random requests, against the NumPy model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kv_model import KINDS, Model, assert_unchanged, put, snapshot

from jaxpar import kv, updaters

SHAPES = {3: (2,), 5: (), 9: (0, 2), 11: (3, 1)}
few = settings(max_examples=8, deadline=None)
kinds = st.sampled_from(["local", "device", "sharded"])
keys_of = st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=4)


def fill(key, number):
    return np.full(SHAPES[key], number, np.float32)


@functools.cache
def begun(kind):
    store = kv.init(kv.create(kind), list(SHAPES), [fill(k, k) for k in SHAPES])
    return kv.set_updater(store, updaters.accumulate)


def model():
    return Model({k: fill(k, k) for k in SHAPES}, lambda pushed, stored: stored + pushed)


# Keys in any order and also twice, and the devices of the values of each.
pushes = st.tuples(keys_of, st.lists(st.integers(0, 7), max_size=5))


@few
@given(kinds, st.lists(pushes, min_size=1, max_size=3), keys_of)
def test_any_pushes_equal_the_model_and_no_store_changes(kind, pushes, wanted):
    store, other, handed_out = begun(kind), model(), []
    for keys, places in pushes:
        handed_out.append((store, snapshot(store)))
        devices = [jax.devices()[place] for place in places]
        lists = [[fill(key, i - 2) for i in range(len(devices))] for key in keys]
        store = kv.push(store, keys, [put(values, devices) for values in lists])
        other.push(keys, lists)
    for key, value in zip([*SHAPES, *wanted], kv.pull(store, [*SHAPES, *wanted]), strict=True):
        np.testing.assert_array_equal(value, other.values[key])
    for old, before in handed_out:
        assert_unchanged(old, before)


@few
@given(st.sampled_from(KINDS), st.sets(st.integers(-9, 9), max_size=4), st.booleans())
def test_repr_and_equality_never_fail(kind, keys, compress):
    store = kv.init(kv.create(kind), list(keys), [np.zeros(2, np.float32)] * len(keys))
    if compress:
        store = kv.set_gradient_compression(store, {"type": "2bit"})
    assert repr(store).startswith(f"KVStore(kind='{kind}'")
    assert ("<table>" in store._repr_html_()) == bool(keys)
    for other in (store, jax.tree.map(lambda x: x + 1, store), jax.tree.map(lambda x: x[None], store), kv.create(), 3):
        assert isinstance(store == other, bool)
    assert store == store
    assert store == jax.tree.map(jnp.copy, store)
    assert (store == kv.create(kind)) == (not keys and not compress)


def test_equality_sees_values_states_and_settings_and_not_where_they_lie():
    store = kv.init(kv.create("device"), 3, jnp.ones(2))
    assert store == kv.init(kv.create("device"), 3, jnp.ones(2))
    assert store == jax.device_put(store, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P()))
    for other in (
        kv.init(kv.create("local"), 3, jnp.ones(2)),
        kv.init(kv.create("device"), 4, jnp.ones(2)),
        kv.init(kv.create("device"), 3, jnp.ones(2, jnp.bfloat16)),
        kv.init(kv.create("device"), 3, jnp.array([1.0, 2.0])),
        kv.set_updater(store, updaters.accumulate),
        kv.set_gradient_compression(store, {"type": "2bit"}),
    ):
        assert store != other
    nan = kv.init(kv.create("device"), 3, jnp.full(2, jnp.nan))
    assert isinstance(nan == nan, bool)
