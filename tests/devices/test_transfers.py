"""How values travel: buckets to a store of kind `local`, copies pulled from one device, sums of large shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kv_model import on_mesh

from jaxpar import kv, updaters
from jaxpar._devices import collectives
from jaxpar._devices.collectives import BucketLimits

SHAPES = [(3,), (2, 2), (), (0,), (200, 50), (5,)]  # (200, 50) travels alone
DTYPES = [jnp.float32, jnp.float32, jnp.float32, jnp.float32, jnp.float32, jnp.int32]
KEYS = list(range(len(SHAPES)))


def values_on(devices, seed=0):
    """For each key a value on each device, of sizes so far apart that the order of the sum shows."""
    rng = np.random.default_rng(seed)
    return [
        [
            jax.device_put(jnp.asarray(rng.standard_normal(shape) * 10.0 ** (3 * (i % 4)), dtype), d)
            for i, d in enumerate(devices)
        ]
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def in_order(values):
    total = np.asarray(values[0])
    for value in values[1:]:
        total = total + np.asarray(value)
    return total


@pytest.fixture
def local():
    store = kv.create("local", devices=jax.devices()[:1])
    return kv.init(store, KEYS, [jnp.ones(s, d) for s, d in zip(SHAPES, DTYPES, strict=True)])


def test_a_local_push_adds_in_the_order_of_the_devices_to_the_bit(local, devices):
    store, values = kv.set_updater(local, updaters.accumulate), values_on(devices)
    store = kv.push(store, KEYS, values)
    for key, pushed in zip(KEYS, values, strict=True):
        np.testing.assert_array_equal(store.values[key], 1 + in_order(pushed))
        assert store.values[key].devices() == {jax.devices()[0]}


def test_a_local_store_takes_values_from_devices_it_does_not_live_on(local):
    values = values_on(jax.devices()[3:5])
    np.testing.assert_array_equal(kv.pull(kv.push(local, KEYS, values), 4), in_order(values[4]))


def test_a_bucket_casts_to_the_stored_dtype_before_the_sum(local):
    halves = [jax.device_put(jnp.full(3, 2049.0, jnp.float32).astype(jnp.bfloat16), d) for d in jax.devices()[:2]]
    others = [jax.device_put(jnp.ones((2, 2)), d) for d in jax.devices()[:2]]
    store = kv.push(local, [0, 1], [halves, others])
    np.testing.assert_array_equal(store.values[0], np.full(3, 4096, np.float32))


@pytest.mark.parametrize("places", [[1], [0, 1, 2], [2, 0], [5, 6], [3, 3, 0]], ids=str)
def test_pulled_copies_are_equal_and_where_they_were_asked_for(local, places):
    devices = [jax.devices()[i] for i in places]
    values = values_on(jax.devices()[:2])
    store = kv.push(local, KEYS, values)
    for key, copies in zip(KEYS, kv.pull(store, KEYS, devices=devices), strict=True):
        assert [c.devices() for c in copies] == [{d} for d in devices]
        for copy in copies:
            assert copy.dtype == DTYPES[key]
            np.testing.assert_array_equal(copy, in_order(values[key]))


def test_values_on_several_devices_are_pulled_together():
    store = kv.create("local")
    for key, device in enumerate(jax.devices()[:3]):
        store = kv.init(store, key, jax.device_put(jnp.full(2, float(key)), device))
    pulled = kv.pull(store, [2, 0, 1], devices=jax.devices()[:4])
    assert [[c.tolist() for c in copies] for copies in pulled] == [[[k, k]] * 4 for k in (2.0, 0.0, 1.0)]


@pytest.mark.slow
def test_more_keys_than_a_program_takes(local):
    store = kv.init(kv.create("local"), list(range(300)), [jnp.full(2, float(k)) for k in range(300)])
    pulled = kv.pull(store, list(range(300)), devices=jax.devices()[:2])
    assert [copies[1].tolist() for copies in pulled] == [[k, k] for k in range(300)]


@pytest.mark.parametrize("size", [7, 16 << 10, (64 << 10) + 3])
def test_a_gathered_sum_adds_in_the_order_of_the_devices_to_the_bit(size, devices):
    rng = np.random.default_rng(size)
    scales = 10.0 ** (3 * (np.arange(len(devices)) % 4))
    values = (rng.standard_normal((len(devices), size)) * scales[:, None]).astype(np.float32)
    run = on_mesh(lambda x: collectives.gather_sum([x[0]], "data", BucketLimits())[0], devices, P("data"))
    np.testing.assert_array_equal(run(values), in_order(list(values)))
