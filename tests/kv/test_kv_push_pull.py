"""Every way to push and pull, each against the NumPy model of the store."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kv_model import FOUR, ROUNDING, Model, assert_unchanged, compilations, on_mesh, over, put, snapshot, whole_numbers

from jaxpar import kv, updaters

KINDS = ("local", "device", "sharded")
SHAPES = {0: (2, 3), 4: (), 7: (0, 3), 9: (17,)}


def add_twice(key, pushed, stored):
    return stored + 2 * pushed


def check(store, model):
    keys = sorted(model.values)
    for key, got in zip(keys, kv.pull(store, keys), strict=True):
        np.testing.assert_array_equal(got, model.values[key].astype(got.dtype), err_msg=f"key {key}")
        assert got.shape == model.values[key].shape


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def start(kind, update=None, **options):
    """The same values in a store and in the model."""
    values = {key: whole_numbers(key, *shape) for key, shape in SHAPES.items()}
    store = kv.init(kv.create(kind, **options), list(values), list(values.values()))
    if update is None:
        return store, Model(values)
    return kv.set_updater(store, update), Model(values, lambda pushed, stored: stored + 2 * pushed)


# ---- typed at the prompt: any number of values on any mix of devices

PLACES = {
    "one": [0],
    "not_the_first": [3],
    "eight": list(range(8)),
    "backwards": [3, 2, 1, 0],
    "others": [4, 5, 6, 7],
    "five_on_two": [0, 1, 0, 1, 0],
    "all_on_one": [2, 2, 2],
    "uneven": [5, 0, 5, 1],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_lists_on_any_devices(kind, place):
    store, model = start(kind, updaters.stateless(add_twice))
    devices = [jax.devices()[i] for i in PLACES[place]]
    keys = list(SHAPES)
    for step in range(2):
        lists = [list(whole_numbers(10 * step + k, len(devices), *SHAPES[k])) for k in keys]
        store = kv.push(store, keys, [put(values, devices) for values in lists])
        model.push(keys, lists)
        check(store, model)


keys_of = st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=4)
# Keys in any order and also twice, and the devices of the values of each.
any_push = st.tuples(keys_of, st.lists(st.integers(0, 7), max_size=5))


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(st.sampled_from(KINDS), st.booleans(), st.lists(any_push, min_size=1, max_size=3), keys_of)
def test_any_pushes_equal_the_model_and_no_store_changes(kind, is_plain, pushes, wanted):
    (store, model), handed_out = start(kind, add_twice if is_plain else updaters.stateless(add_twice)), []
    for keys, places in pushes:
        handed_out.append((store, snapshot(store)))
        devices = [jax.devices()[place] for place in places]
        lists = [list(whole_numbers(key, len(devices), *SHAPES[key])) for key in keys]
        store = kv.push(store, keys, [put(values, devices) for values in lists])
        model.push(keys, lists)
    check(store, model)
    for key, value in zip(wanted, kv.pull(store, wanted), strict=True):
        np.testing.assert_array_equal(value, model.values[key])
    for old, before in handed_out:
        assert_unchanged(old, before)


def test_lists_of_different_lengths_and_plain_arrays_in_one_push(kind):
    store, model = start(kind)
    devices = jax.devices()
    lists = {0: list(whole_numbers(1, 3, 2, 3)), 4: [np.float32(7)], 7: [], 9: list(whole_numbers(2, 5, 17))}
    given = [put(lists[0], devices), jnp.float32(7), [], put(lists[9], devices[2:])]
    store = kv.push(store, list(lists), given)
    model.push(list(lists), list(lists.values()))
    check(store, model)


def test_numpy_arrays_are_taken_and_copied():
    mine, stored = np.ones(3, np.float32), np.zeros(3, np.float32)
    store = kv.init(kv.create(), 0, stored)
    stored[:] = 9
    np.testing.assert_array_equal(kv.pull(store, 0), np.zeros(3))
    store = kv.push(store, 0, mine)
    mine[:] = 9
    np.testing.assert_array_equal(kv.pull(store, 0), np.ones(3))
    np.testing.assert_array_equal(kv.pull(kv.push(store, 0, [mine, mine]), 0), np.full(3, 18))


def test_numpy_ints_and_ranges_are_keys():
    store = kv.init(kv.create(), range(2), [jnp.zeros(1)] * 2)
    store = kv.push(store, [np.int64(1), np.uint8(0)], [jnp.ones(1), jnp.full(1, 2.0)])
    assert [v.item() for v in kv.pull(store, [np.int32(0), 1])] == [2.0, 1.0]
    assert all(type(k) is int for k in store.values)


def test_keys_may_be_negative_and_huge():
    keys = [-5, 2**40, 0]
    store = kv.init(kv.create(), keys, [jnp.full(1, float(i)) for i in range(3)])
    store = kv.push(store, keys[:2], [jnp.ones(1), jnp.zeros(1)])
    assert [v.item() for v in kv.pull(store, keys)] == [1.0, 0.0, 2.0]


def test_updaters_see_each_key_once_in_ascending_order():
    seen = []

    def updater(key, pushed, stored):
        seen.append((key, pushed.item()))
        return pushed

    store = kv.set_updater(kv.init(kv.create(), [1, 2], [jnp.zeros(1)] * 2), updater)
    store = kv.push(store, [2, 1, 2], [jnp.full(1, 1.0), jnp.full(1, 10.0), jnp.full(1, 5.0)])
    assert seen == [(1, 10.0), (2, 6.0)]
    assert [v.item() for v in kv.pull(store, [1, 2])] == [10.0, 6.0]


def test_an_empty_request_is_nothing():
    store, model = start("device")
    assert kv.push(store, 0, []) is store
    assert kv.push(store, [0, 4], [[], []]) is store
    assert kv.push(store, [], []) is store
    assert kv.pull(store, []) == []
    check(kv.init(store, [], []), model)


def test_pull_onto_devices(kind):
    store, model = start(kind)
    for devices in (jax.devices()[:1], jax.devices()[1:4], [jax.devices()[i] for i in (5, 0, 5)], []):
        pulled = kv.pull(store, [9, 0], devices=devices)
        for key, copies in zip([9, 0], pulled, strict=True):
            assert [c.devices() for c in copies] == [{d} for d in devices]
            for copy in copies:
                np.testing.assert_array_equal(copy, model.values[key])
        assert [c.devices() for c in kv.pull(store, 9, devices=devices)] == [{d} for d in devices]


# ---- dtypes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "uint8", "complex64"])
def test_dtypes_are_kept(kind, dtype):
    values = [jnp.asarray(whole_numbers(i, 5, most=9) % 7, dtype) for i in range(3)]
    store = kv.init(kv.create(kind), [3, 4], [jnp.ones(5, dtype), jnp.ones(5)])
    store = kv.push(store, [3, 4], [put(x, jax.devices()[:3]) for x in (values, [jnp.ones(5)] * 3)])
    got, other = kv.pull(store, [3, 4])  # no bucket has both
    assert other.tolist() == [3.0] * 5
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.complex64), sum(np.asarray(v, np.complex64) for v in values))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_floating_values_of_any_width_are_cast_before_they_are_summed(kind, dtype):
    values = np.random.default_rng(0).standard_normal((4, 33)).astype(dtype)
    for given in (put(values, FOUR), list(values)):
        store = kv.push(kv.init(kv.create(kind), 3, jnp.zeros(33)), 3, given)
        assert kv.pull(store, 3).dtype == jnp.float32
        np.testing.assert_allclose(kv.pull(store, 3), values.astype(np.float64).sum(0), atol=1e-6)
    store = kv.push(kv.init(kv.create(kind), 3, jnp.zeros(33, dtype)), 3, put(np.float32(values), FOUR))
    assert kv.pull(store, 3).dtype == dtype
    want = values.astype(np.float64).sum(0)
    np.testing.assert_allclose(np.float64(kv.pull(store, 3)), want, atol=8 * ROUNDING[dtype])


def test_small_integers_are_cast_to_wider_ones():
    store = kv.push(kv.init(kv.create(), 3, jnp.zeros(2, jnp.int32)), 3, jnp.full(2, 200, jnp.uint8))
    assert kv.pull(store, 3).dtype == jnp.int32
    assert kv.pull(store, 3).tolist() == [200, 200]


def test_float64_where_it_is_enabled(kind):
    with jax.enable_x64(True):
        store = kv.init(kv.create(kind), 3, np.zeros(5))
        store = kv.push(store, 3, put([np.full(5, 0.1)] * 3, jax.devices()[:3]))
        assert kv.pull(store, 3).dtype == jnp.float64
        np.testing.assert_allclose(kv.pull(store, 3), np.full(5, 0.1 + 0.1 + 0.1), rtol=1e-15)
        store = kv.push(store, 3, jnp.full(5, 0.5, jnp.float32))
        assert kv.pull(store, 3).dtype == jnp.float64
        assert kv.pull(store, 3)[0] == 0.5


# ---- values that are global arrays already


def test_values_that_are_spread_over_devices_already(kind):
    mesh = Mesh(np.array(FOUR), ("x",))
    spread, copies = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    value, grad = whole_numbers(0, 8, 2), whole_numbers(1, 8, 2)
    store = kv.init(kv.create(kind), 3, jax.device_put(value, spread))
    store = kv.set_updater(store, updaters.stateless(add_twice))
    store = kv.push(store, 3, jax.device_put(grad, spread))
    store = kv.push(store, 3, [jax.device_put(grad, spread), jax.device_put(grad, copies)])
    store = kv.push(store, 3, put([grad, grad], jax.devices()[2:6]))
    np.testing.assert_array_equal(kv.pull(store, 3), value + 10 * grad)


def test_a_spread_value_stays_spread():
    """A tensor cut over a mesh is pushed to where it lies; nothing gathers it."""
    spread = NamedSharding(Mesh(np.array(FOUR), ("x",)), P("x"))
    store = kv.init(kv.create("device"), 3, jax.device_put(jnp.ones((8, 2)), spread))
    store = kv.set_optimizer(store, optax.adam(0.1))
    for _ in range(2):
        store = kv.push(store, 3, jax.device_put(jnp.ones((8, 2)), spread))
    assert store.values[3].sharding.is_equivalent_to(spread, 2)
    mu = store.updater_state[3][0].mu
    assert mu.sharding.is_equivalent_to(spread, 2)


# ---- inside of programs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("updater", [add_twice, updaters.stateless(add_twice)], ids=["function", "Updater"])
def test_under_jit_with_lists(kind, updater):
    store, model = start(kind, updater)
    keys = list(SHAPES)
    lists = [list(whole_numbers(k, 3, *SHAPES[k])) for k in keys]
    push = jax.jit(lambda store, lists: kv.push(store, keys, lists))
    for _ in range(2):
        store = push(store, lists)
        model.push(keys, lists)
    check(store, model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_inside_pmap_and_shard_map(engine, kind, count):
    keys, devices = list(SHAPES), jax.devices()[:count]

    def body(store, shares):
        store, pulled = kv.pushpull(store, keys, shares, axis_name="data")
        return kv.push(store, keys, [p / count for p in pulled], axis_name="data")

    store, model = start(kind, updaters.stateless(add_twice))
    store = kv.place(store, devices)
    lists = [whole_numbers(k, count, *SHAPES[k]) for k in keys]
    store = over(engine, store, devices, body)(store, lists)
    model.push(keys, [list(values) for values in lists])
    for key in keys:
        model.values[key] = model.values[key] * 3
    for key, got in zip(keys, kv.pull(store, keys), strict=True):
        np.testing.assert_allclose(got, model.values[key], rtol=1e-6)


def test_lists_inside_shard_map_with_its_checks_on(kind):
    """They are summed first. `check_vma` knows a sum over the axis to be the same everywhere, and a shard to vary."""
    store, model = start(kind, add_twice)
    store, values = kv.place(store, FOUR), whole_numbers(1, 4, 17)
    specs = kv.partition_specs(store, "data")

    def body(store, share):
        return kv.push(store, 9, [share[0], share[0]], axis_name="data")

    model.push([9], [[*values, *values]])
    run = on_mesh(body, FOUR, (specs, P("data")), specs, check_vma=True)
    check(run(store, values), model)


def test_inside_scan(kind):
    store, model = start(kind, updaters.stateless(add_twice))
    values = whole_numbers(1, 5, 17)
    store, pulled = jax.lax.scan(lambda store, v: kv.pushpull(store, 9, v), store, values)
    for value, got in zip(values, pulled, strict=True):
        model.push([9], [[value]])
        np.testing.assert_array_equal(got, model.values[9])
    check(store, model)


def test_inside_vmap_a_batch_of_stores():
    stored, pushed = whole_numbers(0, 4, 3), whole_numbers(1, 4, 3)

    def one(value, grad):
        store = kv.set_updater(kv.init(kv.create(), 0, value), updaters.stateless(add_twice))
        return kv.pull(kv.push(store, 0, grad), 0)

    np.testing.assert_array_equal(jax.vmap(one)(stored, pushed), stored + 2 * pushed)
    sums = jax.vmap(lambda v, g: kv.pull(kv.push(kv.init(kv.create(), 0, v), 0, g, axis_name="i"), 0), axis_name="i")
    np.testing.assert_array_equal(sums(stored, pushed), np.broadcast_to(pushed.sum(0), (4, 3)))


def test_a_gradient_goes_through_a_push():
    def loss(value):
        return (kv.pull(kv.push(kv.init(kv.create(), 0, jnp.zeros(3)), 0, [value, 2 * value]), 0) ** 2).sum()

    np.testing.assert_allclose(jax.grad(loss)(jnp.arange(3.0)), 18 * np.arange(3.0))


@pytest.mark.sampled(2)
def test_donated_stores_give_their_memory(kind):
    store, model = start(kind, updaters.stateless(add_twice), devices=jax.devices()[:2])
    store = kv.place(store, jax.devices()[:2])
    push = jax.jit(functools.partial(kv.push, key=9), donate_argnums=0)
    value = jax.device_put(whole_numbers(3, 17), NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P()))
    new = push(store, value=value)
    assert store.values[9].is_deleted()
    model.push([9], [[value]])
    check(new, model)


def test_initialised_under_jit_and_used_outside():
    store = jax.jit(lambda v: kv.init(kv.create("sharded"), 3, v))(jnp.arange(5.0))
    store = kv.push(store, 3, jnp.ones(5))
    np.testing.assert_array_equal(kv.pull(store, 3), np.ones(5))


# ---- many keys, few programs


@pytest.mark.sampled(1)
def test_a_second_push_of_the_same_keys_compiles_nothing(kind):
    keys = list(range(20))
    store = kv.init(kv.create(kind, devices=FOUR), keys, [jnp.zeros(5)] * 20)
    store = kv.set_optimizer(store, optax.sgd(0.1, momentum=0.9))
    values = [put(whole_numbers(k, 4, 5), FOUR) for k in keys]
    for _ in range(2):  # the first push may move a value to where it then stays
        store = kv.push(store, keys, values)
        jax.block_until_ready(kv.pull(store, keys))
    with compilations() as count:
        for _ in range(3):
            store = kv.push(store, keys, values)
            jax.block_until_ready(kv.pull(store, keys))
    assert count() == 0


def test_the_first_push_is_one_program_where_values_are_at_home():
    store = kv.init(kv.create("device", devices=FOUR), [0, 1], [jnp.zeros((5, 7))] * 2)
    values = [put(whole_numbers(k, 4, 5, 7), FOUR) for k in (0, 1)]
    with compilations() as count:
        store = kv.push(store, [0, 1], values)
    assert count() <= 1 + len(FOUR)  # the packing, for each device, and the program of the sum
    with compilations() as count:
        store = kv.push(store, [0, 1], values)
    assert count() == 0


def test_the_same_optimizer_object_is_one_program():
    tx = optax.adam(0.01)
    values = put(whole_numbers(0, 2, 6), jax.devices()[:2])

    def run():
        store = kv.set_optimizer(kv.init(kv.create("device", devices=jax.devices()[:2]), 0, jnp.zeros(6)), tx)
        return jax.block_until_ready(kv.push(store, 0, values))

    run()
    with compilations() as count:
        run()
    assert count() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "count"), [(2000, 1), *(pytest.param(10_000, count, marks=pytest.mark.slow) for count in (1, 2))]
)
def test_thousands_of_keys(number, count):
    """More than Python's frames, and than the arguments of a call that is written out."""
    keys, devices = list(range(number)), jax.devices()[:count]
    values = whole_numbers(0, number, 2)
    on_devices = [jax.device_put(list(values), d) for d in devices]
    store = kv.init(kv.create("device"), keys, [jnp.zeros(2)] * number)
    store = kv.push(store, keys, [list(vs) for vs in zip(*on_devices, strict=True)])
    np.testing.assert_array_equal(np.stack(jax.device_get(kv.pull(store, keys))), count * values)
    assert f"{number:,} keys" in repr(store)


def test_a_plain_updater_on_values_that_live_on_different_devices():
    first, second = jax.devices()[:2]
    store = kv.init(kv.create(), [0, 1], [jax.device_put(jnp.ones(2), first), jax.device_put(jnp.ones(2), second)])
    store = kv.set_updater(store, lambda key, pushed, stored: stored + 2 * pushed)
    store = kv.push(store, [0, 1], [jnp.ones(2), jnp.ones(2)])
    assert [value.tolist() for value in kv.pull(store, [0, 1])] == [[3.0, 3.0]] * 2
    assert [value.devices() for value in kv.pull(store, [0, 1])] == [{first}, {second}]


def test_an_array_that_is_pushed_is_no_list_of_rows(kind, monkeypatch):
    """A walk through the rows takes 0.4 s for 10,000 of them."""

    def walk(array):
        raise AssertionError("the rows are read one by one")

    value = jnp.ones((4, 3))
    store = kv.init(kv.create(kind), 3, value)
    with monkeypatch.context() as patch:
        patch.setattr(type(value), "__iter__", walk)
        store = kv.push(store, 3, value + 1)
        store, _ = kv.pushpull(store, 3, value + 1, devices=jax.devices()[:2])
    np.testing.assert_array_equal(kv.pull(store, 3), value + 1)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_random_keys_are_pulled_onto_devices(kind):
    rng = jax.random.split(jax.random.key(3), 2)
    store = kv.init(kv.create(kind), [0, 1, 2], [rng, jnp.ones(2), jnp.ones(3)])
    devices = jax.devices()[1:3]
    pulled = kv.pull(store, [1, 0, 2], devices=devices)
    assert [[copy.device for copy in copies] for copies in pulled] == [devices] * 3
    assert all((jax.random.key_data(copy) == jax.random.key_data(rng)).all() for copy in pulled[1])
