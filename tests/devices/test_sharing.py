"""Large values on emulated devices: one memory, no copies, and no value that changes by what happens to another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from kv_model import compilations, put

from jaxpar import kv, updaters
from jaxpar._devices import mesh
from jaxpar._devices.mesh import mesh_of

LARGE = (600, 512)  # 1.2 MB of float32
SHAPES = [LARGE, (3,), (), (1024, 300), (7, 5)]


def address(array):
    return array.unsafe_buffer_pointer()


def grads(rng, devices, shapes=SHAPES):
    numbers = np.random.default_rng(rng)
    each = [[numbers.normal(size=s).astype(np.float32) for _ in devices] for s in shapes]
    return each, [put(xs, devices) for xs in each]


def test_arrays_that_are_there_already_stay_and_one_on_a_single_device_is_committed():
    devices = tuple(jax.devices()[:2])
    tree = {"there": jax.device_put(np.ones(2), mesh.copies_on(devices))}
    assert mesh.put(tree, mesh.copies_on(devices)) is tree
    assert len(mesh.put(tree, mesh.copies_on(devices[:1]))["there"].sharding.device_set) == 1
    loose = jnp.ones(2)
    assert not loose.committed
    assert mesh.put(loose, loose.sharding).committed


def test_a_value_is_seen_on_another_device_without_a_copy():
    first, second = jax.devices()[:2]
    value = jax.device_put(jnp.arange(1 << 18, dtype=jnp.float32), first)
    (seen,) = mesh.share_or_put([value], SingleDeviceSharding(second))
    assert seen.devices() == {second}
    assert address(seen) == address(value)
    np.testing.assert_array_equal(seen, value)


def test_what_is_spread_over_devices_is_moved_as_ever():
    devices = jax.devices()[:2]
    spread = jax.device_put(jnp.arange(8.0), NamedSharding(mesh_of(devices), P("data")))
    (moved,) = mesh.share_or_put([spread], SingleDeviceSharding(devices[1]))
    np.testing.assert_array_equal(moved, jnp.arange(8.0))


def test_a_value_over_processes_is_copied_where_it_lies(monkeypatch):
    """Without a program, which would wait for the other processes."""
    value = jax.device_put(jnp.arange(4.0), jax.devices()[1])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(mesh, "spans_processes", lambda array: True)
    monkeypatch.setattr(mesh, "_copy_program", None)
    (copy,) = mesh.donatable([value])
    assert (copy.tolist(), copy.sharding) == (value.tolist(), value.sharding)
    assert address(copy) != address(value)


def test_what_can_hang(monkeypatch):
    devices = jax.devices()
    for is_older in (True, False):
        monkeypatch.setattr(mesh, "_CAN_HANG", is_older)
        assert [mesh.can_hang(devices[:n]) for n in (0, 1, 2)] == [False, False, is_older]


@pytest.mark.parametrize("given_away", ["owner", "guest"])
def test_a_donated_array_does_not_change_the_one_that_shares_its_memory(given_away):
    devices = jax.devices()[:2]
    owner = jax.device_put(jnp.full(1 << 18, 3.0), devices[0])
    (guest,) = mesh.share_or_put([owner], SingleDeviceSharding(devices[1]))
    spend = jax.jit(lambda x: x + 1, donate_argnums=0)
    given, kept = (owner, guest) if given_away == "owner" else (guest, owner)
    np.testing.assert_array_equal(spend(given), 4)
    np.testing.assert_array_equal(kept, 3)


def test_the_memory_lives_as_long_as_somebody_sees_it():
    first, second = jax.devices()[:2]
    (seen,) = mesh.share_or_put([jax.device_put(jnp.full(1 << 18, 3.0), first)], SingleDeviceSharding(second))
    others = [jnp.zeros(1 << 18) for _ in range(8)]
    np.testing.assert_array_equal(seen, 3)
    assert len(others) == 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "follows", "count"),
    [
        *(("local", follows, count) for follows in (True, False) for count in (1, 4)),
        *(("device", True, 1), ("device", True, 4), ("device", False, 4)),
        *(("sharded", False, 4), ("dist_sync", True, 4)),
    ],
)
def test_large_and_small_values_pushed_together(kind, follows, count):
    devices = jax.devices()[:count]
    store = kv.create(kind) if follows else kv.create(kind, devices=devices)
    store = kv.init(store, range(len(SHAPES)), [jnp.zeros(s) for s in SHAPES])
    store = kv.set_optimizer(store, optax.sgd(0.1, momentum=0.9))
    params = [np.zeros(s, np.float32) for s in SHAPES]
    trace = [np.zeros(s, np.float32) for s in SHAPES]
    for turn in range(3):
        numbers, lists = grads(turn, devices)
        trace = [0.9 * t + sum(xs) for t, xs in zip(trace, numbers, strict=True)]
        params = [p - 0.1 * t for p, t in zip(params, trace, strict=True)]
        store, pulled = kv.pushpull(store, range(len(SHAPES)), lists, devices=devices)
        for expected, copies in zip(params, pulled, strict=True):
            for copy, device in zip(copies, devices, strict=True):
                assert copy.devices() == {device}
                np.testing.assert_allclose(copy, expected, rtol=1e-5, atol=1e-6)


def test_a_store_of_large_values_is_never_changed_by_what_comes_after():
    devices = jax.devices()[:4]
    numbers, lists = grads(0, devices)
    empty = kv.init(kv.create("device"), range(len(SHAPES)), [jnp.zeros(s) for s in SHAPES])
    first = kv.push(kv.set_updater(empty, updaters.accumulate), range(len(SHAPES)), lists)
    spend = jax.jit(lambda store: jax.tree.map(lambda x: x * 0, store), donate_argnums=0)
    second = kv.push(first, range(len(SHAPES)), lists)
    for value in jax.tree.leaves(spend(second)):
        np.testing.assert_array_equal(value, 0)
    for key, xs in enumerate(numbers):
        np.testing.assert_allclose(kv.pull(first, key), sum(xs), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(kv.pull(empty, key), 0)


def test_the_devices_hold_one_large_sum_together():
    devices = jax.devices()[:4]
    _, lists = grads(0, devices, [LARGE])
    store = kv.push(kv.init(kv.create("device"), 0, jnp.zeros(LARGE)), 0, lists[0])
    value = kv.pull(store, 0)
    assert value.sharding.is_fully_replicated
    assert value.sharding.device_set == set(devices)
    assert len({address(copy) for copy in kv.pull(store, 0, devices=devices)}) == 1
    assert len({address(shard.data) for shard in store.values[0].addressable_shards}) == 1


@pytest.mark.slow
def test_compressed_large_values_keep_to_the_wire():
    devices = jax.devices()[:4]
    store = kv.init(kv.create("device"), [0, 1], [jnp.zeros(LARGE), jnp.zeros(3)])
    store = kv.set_gradient_compression(store, {"type": "2bit", "threshold": 0.5})
    store = kv.push(store, [0, 1], [put([jnp.full(s, 0.6)] * 4, devices) for s in (LARGE, (3,))])
    np.testing.assert_array_equal(kv.pull(store, 0), 2.0)
    (residual,) = jax.tree.leaves(store.residuals[0])
    assert {shard.device: shard.data.shape[0] for shard in residual.addressable_shards} == dict.fromkeys(devices, 1)


def test_a_plain_updater_sees_large_values_in_the_order_of_the_keys():
    devices = jax.devices()[:2]
    seen = []
    store = kv.init(kv.create("device"), [2, 0, 1], [jnp.zeros(s) for s in (LARGE, (3,), LARGE)])
    store = kv.set_updater(store, lambda key, pushed, stored: seen.append(key) or stored + pushed)
    _, lists = grads(0, devices, [LARGE, (3,), LARGE])
    kv.push(store, [2, 0, 1], lists)
    assert seen == [0, 1, 2]


def test_a_second_push_of_large_values_compiles_nothing():
    devices, shapes = jax.devices()[:4], [(641, 512), (11,)]  # shapes of no other test
    _, lists = grads(0, devices, shapes)
    store = kv.init(kv.create("device"), [0, 1], [jnp.zeros(s) for s in shapes])
    with compilations() as count:
        store, _ = kv.pushpull(store, [0, 1], lists, devices=devices)
    assert count() > 0
    with compilations() as count:
        kv.pushpull(store, [0, 1], lists, devices=devices)
    assert count() == 0


def test_a_donated_state_becomes_a_template_of_zeros():
    """Of the same shapes and dtypes and on the same devices, also of random keys. What is there stays."""
    copies = mesh.copies_on(tuple(jax.devices()[:2]))
    state = {"w": mesh.put(np.ones(3), copies), "key": jax.random.key(1), "n": jnp.int32(5)}
    want = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    state["w"].delete()
    state["key"].delete()
    found = mesh.zeros_if_donated(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), found) == want
    assert (found["w"].tolist(), jax.random.key_data(found["key"]).tolist()) == ([0.0] * 3, [0, 0])
    assert found["n"] is state["n"]
