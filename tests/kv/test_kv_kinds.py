"""What the kinds do between devices, read from the compiled programs: collectives, bytes, memory, transfers."""

import dataclasses
import functools
import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from kv_model import FOUR, collectives_in, on_mesh, put, whole_numbers

from jaxpar import kv, updaters
from jaxpar._devices import collectives
from jaxpar._devices.collectives import BucketLimits
from jaxpar._store import aggregate, store as stores
from jaxpar._store.mxnet_names import KIND_ALIASES

MB = 1 << 20
LIMITS = BucketLimits()


def pushed(kind, shapes, spec=None, pull=False, first=False, **options):
    """The program of one `kv.push` inside `shard_map`, not compiled.

    `first`: only the first key leaves the program, which then compiles faster; its bucket travels all the same.
    """
    keys = list(range(len(shapes)))
    store = kv.init(kv.create(kind, devices=FOUR, **options), keys, [jnp.zeros(s) for s in shapes])
    if spec is not None:
        store = kv.set_gradient_compression(store, spec)
    store = kv.place(store, FOUR)
    specs = kv.partition_specs(store, "data")

    def body(store, shares):
        shares = [x[0] for x in shares]
        store = kv.push(store, keys, shares, axis_name="data")
        if first:
            return kv.pull(store, 0, axis_name="data") if pull else store.values[0]
        return (store, kv.pull(store, keys, axis_name="data")) if pull else store

    out = (specs, P()) if pull else specs
    if first:
        out = P() if pull else specs.values[0]
    shares = [jax.ShapeDtypeStruct((4, *s), jnp.float32) for s in shapes]
    return on_mesh(body, FOUR, (specs, P("data")), out).lower(store, shares)


def sent(*args, **options):
    """The collectives of the compiled program: a list of (name, bytes)."""
    return collectives_in(pushed(*args, **options).compile().as_text())


SMALL = [(4,)] * 64


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "push", "pull"),
    [
        ("device", ["all-reduce"], []),
        ("dist_sync", ["all-reduce"], []),
        ("local", ["all-gather"], []),
        ("sharded", ["reduce-scatter"], ["all-gather"]),
    ],
)
def test_many_small_values_are_one_collective(kind, push, pull):
    assert [name for name, _ in sent(kind, SMALL, first=True)] == push
    assert [name for name, _ in sent(kind, SMALL[:8], pull=True)] == push + pull


def test_buckets_end_at_their_size_and_large_values_travel_alone():
    shapes = [(MB // 4,), (4,), (4,), (MB // 4 - 1, 1)]  # 1 MB, 16 B, 16 B, 4 bytes less than 1 MB
    program = pushed("device", shapes, alone_bytes=MB, bucket_bytes=MB)
    # XLA may join collectives of its own accord, never the buffers.
    assert sum(size for _, size in collectives_in(program.compile().as_text())) == 2 * MB - 4 + 32
    text = program.as_text()
    assert text.count("stablehlo.all_reduce") == 3
    assert f"tensor<{MB // 4}xf32>" in text
    assert text.count("stablehlo.concatenate") == 1  # the two of 16 bytes


@pytest.mark.parametrize(("size", "width"), [(8192, 128), (1000, 125), (1016, 127), (4 * 127 + 1, 128)])
def test_rows_of_a_sharded_store_travel_in_lines_that_fill_tiles(size, width):
    """A TPU makes an all-reduce of a reduce-scatter whose rows share tiles. A prime number has no lines."""

    def body(value):
        rows = collectives.reduce_scatter([value], "data", LIMITS)
        return collectives.all_gather(rows, [(size,)], "data", LIMITS)

    run = on_mesh(body, FOUR)
    value, chunk = jnp.arange(float(size)), -(-size // 4)
    text = run.lower(value).as_text()
    if chunk % width:
        width = chunk
    lines = 4 * chunk // width
    assert f"(tensor<{lines}x{width}xf32>) -> tensor<{lines // 4}x{width}xf32>" in text
    assert f"(tensor<{lines // 4}x{width}xf32>) -> tensor<{lines}x{width}xf32>" in text
    np.testing.assert_array_equal(run(value)[0], 4 * value)


# ---- compression on the wire

ELEMENTS = 16384
PLAIN = 4 * ELEMENTS


# Of the plain bytes: the codes, what of them goes to owners, and what comes back: sums of 4 as integers of 4 bits,
# float32, or 3 bits. The codes of all are no more than owners would send of `1bit`, so all gather them.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "part", "owned", "back"),
    [
        ({"type": "2bit"}, 1 / 16, 1 / 16, 4 / 32),
        pytest.param({"type": "1bit"}, 1 / 32, 0, 4 / 32, marks=pytest.mark.slow),  # packed as 2bit is
        ({"type": "bf16"}, 1 / 2, 1 / 2, 1),
        ({"type": "int3"}, 3 / 32, 3 / 32, 3 / 32),
        # A scale for 1,024 elements. Four devices gather the codes of all; eight have owners (test_owners.py).
        pytest.param({"type": "int8"}, 1 / 4 + 1 / 1024, 0, 4 * (1 / 4 + 1 / 1024), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["a_bucket", "one_value"])
def test_bytes_on_the_wire(spec, part, owned, back, split):
    """Every device gets the codes of its own share from all; `device`: then all get its sum."""
    shapes = [(ELEMENTS // split,)] * split
    scales = [("all-reduce", 4 * split)] if spec["type"] == "int3" else []
    whole, shares = sent("device", shapes, spec), sent("sharded", shapes, spec)
    assert total_of(whole, "all-to-all") == PLAIN * owned
    assert total_of(whole, "all-gather") == PLAIN * back
    assert total_of(whole, "all-reduce") == 2 * sum(size for _, size in scales)
    assert total_of(shares, "all-to-all") == PLAIN * part
    assert [entry for entry in shares if entry[0] != "all-to-all"] == scales


def total_of(sent, op):
    return sum(size for name, size in sent if name == op)


def test_values_that_would_not_be_smaller_are_sent_as_they_are():
    assert sent("device", [(1,)], {"type": "2bit"}) == [("all-reduce", 4)]


# ---- memory: a sharded store keeps 1/N on each device


def bytes_on(device, tree):
    return sum(s.data.nbytes for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == device)


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 1])
def test_bytes_per_device_of_values_and_adam_state(count):
    devices = jax.devices()[:count]
    params = {"w": jnp.ones((64, 24)), "b": jnp.ones(64), "odd": jnp.ones((3, 3))}
    store = kv.from_params(params, kind="sharded", devices=devices, optimizer=optax.adam(0.1))
    padded = sum(-(-p.size // count) for p in params.values()) * 4

    def check(store):
        for device in devices:
            assert bytes_on(device, store.values) == padded
            assert bytes_on(device, store.optimizer_state) == 2 * padded + 4  # adam counts its steps

    check(store)
    grads = [put([p] * count, devices) for p in jax.tree.leaves(params)]
    store = kv.push(store, [0, 1, 2], grads)
    check(store)
    check(jax.jit(lambda s: kv.push(s, [0, 1, 2], jax.tree.leaves(params)))(store))
    whole = kv.from_params(params, kind="device", devices=devices, optimizer=optax.adam(0.1))
    total = sum(p.nbytes for p in params.values())
    assert bytes_on(devices[0], whole.optimizer_state) == 2 * total + 4


def test_the_updater_of_a_sharded_store_sees_its_share_alone():
    seen = []

    def update(key, pushed, state, stored):
        seen.append((pushed.shape, stored.shape))
        return stored + pushed, state

    store = kv.set_updater(
        kv.init(kv.create("sharded", devices=FOUR), 0, jnp.zeros((5, 7))), updaters.Updater(lambda k, v: (), update)
    )
    assert seen == [((5, 7), (5, 7)), ((9,), (9,))]  # traced, to see that it is elementwise
    seen.clear()
    store = kv.push(store, 0, put([jnp.ones((5, 7))] * 4, FOUR))
    assert set(seen) == {((9,), (9,))}
    np.testing.assert_array_equal(kv.pull(store, 0), np.full((5, 7), 4))


# ---- what a kind is


def test_the_table_of_create_has_every_kind_with_its_other_names():
    rows = {}
    for line in inspect.getdoc(kv.create).splitlines():
        name, *others = re.findall("`(.*?)`", line.split("|")[1]) if line.startswith("| `") else [""]
        rows[name] = sorted(others)
    del rows[""]
    expected = {k: sorted(other for other, name in KIND_ALIASES.items() if name == k) for k in stores.KINDS}
    assert rows == expected


def test_the_kinds_over_processes_are_kind_device_inside_of_programs():
    """So the tests that run in one process need not run again for them."""
    device = stores.KINDS["device"]
    for name in ("dist_sync", "dist_device_sync", "dist_async"):
        kind = stores.KINDS[name]
        for what in ("reduce", "reduce_compressed", "in_rows", "on_one_device"):
            assert getattr(kind, what) == getattr(device, what)
        assert kind.over_processes
        assert not stores.KINDS[kind.within_process].over_processes


def test_a_seventh_kind_is_one_entry(monkeypatch):
    """Nothing but the table knows the names of the kinds."""
    mean = lambda values, axis_name, limits: [jax.lax.pmean(v, axis_name) for v in values]  # noqa: E731
    seventh = dataclasses.replace(stores.KINDS["device"], name="mean", reduce=mean)
    monkeypatch.setitem(stores.KINDS, "mean", seventh)
    store = kv.push(
        kv.init(kv.create("mean"), 3, jnp.zeros(2)), 3, put([jnp.full(2, i) for i in (1.0, 3.0, 5.0, 7.0)], FOUR)
    )
    assert kv.pull(store, 3).tolist() == [4.0, 4.0]
    assert repr(store).startswith("KVStore(kind='mean'")
    assert kv.place(store, FOUR[:2]).kind == "mean"


# ---- placement


def test_where_values_live():
    devices = jax.devices()[2:6]
    value = jnp.ones(8)

    def where(kind, **options):
        return kv.init(kv.create(kind, **options), 0, value).values[0].sharding

    assert where("local", devices=devices).device_set == {devices[0]}
    assert where("device").device_set == value.devices()
    replicated, spread = where("device", devices=devices), where("sharded", devices=devices)
    assert replicated.device_set == spread.device_set == set(devices)
    assert replicated.is_fully_replicated
    assert not spread.is_fully_replicated
    assert where("sharded").device_set == set(jax.devices())


@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_a_push_and_a_pull_touch_the_host_nowhere(kind):
    keys, tx = [0, 1], optax.sgd(0.1, momentum=0.9)
    store = kv.set_optimizer(kv.init(kv.create(kind, devices=FOUR), keys, [jnp.zeros(9), jnp.zeros(())]), tx)
    grads = [put([jnp.ones(9)] * 4, FOUR), put([jnp.ones(())] * 4, FOUR)]
    store = kv.push(store, keys, grads)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            store = kv.push(store, keys, grads)
        kv.pull(store, keys, devices=FOUR)


def test_place_moves_and_copies():
    devices, momentum = jax.devices(), updaters.mxnet_sgd(0.1, momentum=0.9)
    for kind in ("local", "device", "sharded"):
        store = kv.from_params({"w": whole_numbers(0, 5, 3)}, kind=kind, updater=momentum, devices=devices[:2])
        for target in (devices[4:8], devices[:1]):
            moved = kv.place(store, target)
            assert all(leaf.sharding.device_set == set(target) for leaf in jax.tree.leaves(moved))
            np.testing.assert_array_equal(kv.pull(moved, 0), whole_numbers(0, 5, 3))
            jax.tree.map(lambda x: x.delete(), moved)
        np.testing.assert_array_equal(kv.pull(store, 0), whole_numbers(0, 5, 3))


@pytest.mark.parametrize("kind", ["local", "device", "sharded", "dist_async"])
def test_a_store_on_devices_that_are_not_the_first(kind):
    """So that a store on CPUs or on a second GPU has nothing on the first GPU."""
    devices = jax.devices()[5:6]
    store = kv.set_optimizer(kv.init(kv.create(kind, devices=devices), 3, np.zeros(4, np.float32)), optax.adam(0.1))
    for _ in range(3):
        store = kv.push(store, 3, put([np.ones(4, np.float32)], devices))
        assert {d for leaf in jax.tree.leaves(store) for d in leaf.devices()} == set(devices)


# ---- what jax's own check of replication sees of a store


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compression", ["none", "2bit", "powersgd", "int3"])
@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
def test_pulled_values_are_known_to_be_equal_on_all_devices(kind, compression):
    store = kv.create(kind, devices=FOUR if kind == "sharded" else None)
    store = kv.set_optimizer(kv.init(store, [3, 4], [jnp.zeros((8, 64)), jnp.zeros(3)]), optax.sgd(1.0))
    store = kv.set_gradient_compression(store, {"type": compression})

    def push_and_pull(store, large, small):
        store = kv.push(store, [3, 4], [large[0], small[0]], axis_name="data")
        return kv.pull(store, [3, 4], axis_name="data")

    specs = kv.partition_specs(store, "data"), P("data"), P("data")
    # Refused while tracing where shard_map cannot see that the values are equal.
    pulled = on_mesh(push_and_pull, FOUR, specs, check_vma=True)(
        store, jnp.full((4, 8, 64), 0.5), jnp.full((4, 3), 0.5)
    )
    for value in pulled:
        np.testing.assert_allclose(value, np.full(value.shape, -0.5 * 4), rtol=1e-5)


def test_a_gradient_that_shard_map_summed_already_is_warned_of():
    """With the check on, the gradient by replicated params is a sum already, as its type says."""
    store = kv.init(kv.create("device"), 0, jnp.zeros(()))
    x = jnp.arange(4, dtype=jnp.float32)

    def run(own):
        def pushed(w, x):
            w = jax.lax.pcast(w, "data", to="varying") if own else w
            return kv.pull(kv.push(store, 0, jax.grad(lambda w: (w * x).sum())(w), axis_name="data"), 0)

        return on_mesh(pushed, FOUR, (P(), P("data")), check_vma=True)(jnp.ones(()), x)

    assert float(run(own=True)) == float(x.sum())
    with pytest.warns(UserWarning, match="key 0: this value is the same on all devices of 'data'.* check_vma=False"):
        assert float(run(own=False)) == 4 * float(x.sum())


def test_a_row_on_a_tpu_is_updated_as_a_flat_array():
    """The same numbers as by the axis of rows, which other devices keep. No TPU is needed to compute them."""
    tx = optax.adamw(0.1)
    store = kv.from_params(
        {"w": jnp.zeros((64, 64)), "b": jnp.zeros(5)}, optimizer=tx, kind="sharded", devices=jax.devices()[:2]
    )
    on_tpu = dataclasses.replace(store, devices=(types.SimpleNamespace(platform="tpu"),) * 2)
    rows = {"w": jnp.arange(2048.0)[None], "b": jnp.arange(3.0)[None]}  # one row of each, of whole tiles and not
    state = tx.init(rows)
    is_row = jax.tree.map(lambda leaf: leaf.ndim > 1, state)

    def update(grads, state, params):
        assert all(leaf.ndim == 1 for leaf in jax.tree.leaves(grads))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    grads = jax.tree.map(jnp.cos, rows)
    by_axis, flat = (jax.jit(functools.partial(aggregate._of_each_row, s, update, is_row)) for s in (store, on_tpu))
    assert "optimization_barrier" in flat.lower(grads, state, rows).as_text()
    assert "optimization_barrier" not in by_axis.lower(grads, state, rows).as_text()
    jax.tree.map(np.testing.assert_array_equal, flat(grads, state, rows), by_axis(grads, state, rows))
