"""Laws of the store, on random requests, against the NumPy model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
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


def same(store, other):
    for key in SHAPES:
        np.testing.assert_array_equal(kv.pull(store, key), other.values[key])


requests = st.lists(
    st.tuples(keys_of, st.integers(0, 3), st.integers(0, 6)).map(lambda r: (r[0], [r[1]] * len(r[0]), r[2])),
    min_size=1,
    max_size=3,
)


@few
@given(kinds, requests)
def test_any_pushes_equal_the_model_and_no_store_changes(kind, requests):
    store, other, handed_out = begun(kind), model(), []
    for keys, counts, first in requests:
        handed_out.append((store, snapshot(store)))
        lists = [[fill(k, i + 1) for i in range(n)] for k, n in zip(keys, counts, strict=True)]
        store = kv.push(store, keys, [put(vs, jax.devices()[first:]) for vs in lists])
        other.push(keys, lists)
    same(store, other)
    for old, before in handed_out:
        assert_unchanged(old, before)


@few
@given(kinds, st.lists(st.integers(-50, 50), min_size=1, max_size=6), st.data())
def test_splitting_a_push_in_any_way_gives_the_same_sum(kind, numbers, data):
    places = data.draw(st.lists(st.integers(0, 7), min_size=len(numbers), max_size=len(numbers)))
    values = [jax.device_put(fill(3, n), jax.devices()[p]) for n, p in zip(numbers, places, strict=True)]
    store = kv.push(begun(kind), 3, values)
    np.testing.assert_array_equal(kv.pull(store, 3), fill(3, 3 + sum(numbers)))


@few
@given(kinds, st.permutations(list(SHAPES)), st.data())
def test_permuted_keys_and_any_subset_pulled(kind, order, data):
    store = kv.push(begun(kind), order, [fill(k, 2 * k) for k in order])
    wanted = data.draw(keys_of)
    for key, value in zip(wanted, kv.pull(store, wanted), strict=True):
        np.testing.assert_array_equal(value, fill(key, 3 * key))


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


def test_equality_sees_values_states_and_settings():
    store = kv.init(kv.create("device"), 3, jnp.ones(2))
    assert store == kv.init(kv.create("device"), 3, jnp.ones(2))
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
