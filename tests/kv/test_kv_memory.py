"""Whose memory an array is: what is stored or pulled can be donated, and what has no values is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import assert_unchanged, put, snapshot

from jaxpar import kv, parallel, updaters
from jaxpar.sparse import RowSparse

DEVICES = jax.devices()[:2]
SIZES = {"small": (2, 3), "large": (512, 512)}  # 1 MiB and more is shared by emulated devices
TWO = {"type": "2bit", "threshold": 0.5}


donate = jax.jit(lambda x: -x, donate_argnums=0)


def donate_all(tree):
    jax.block_until_ready(jax.tree.map(donate, tree))


def value_of(size):
    return jnp.arange(np.prod(SIZES[size]), dtype=jnp.float32).reshape(SIZES[size])


def start(kind, size, place):
    """A store with values that are on no particular device, on one, or on all of its own."""
    value = value_of(size)
    store = kv.create(kind, devices=DEVICES if place == "devices" else None)
    value = jax.device_put(value, DEVICES[1]) if place == "committed" else value
    return kv.init(store, [3, 5], [value, value + 1]), value


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", ["anywhere", "committed", "devices"])
@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
def test_the_store_the_caller_and_what_was_pulled_share_nothing(kind, place, size):
    store, value = start(kind, size, place)
    before, want = snapshot(store), np.asarray(value).copy()
    donate_all(value)
    pulls = (
        lambda: kv.pull(store, 3),
        lambda: kv.pull(store, [3, 5]),
        lambda: kv.pull(store, [3, 5], devices=DEVICES),
        lambda: kv.pull(store, 5, devices=[DEVICES[1]]),
    )
    for pull in pulls:
        donate_all(pull())
        for leaf in jax.tree.leaves(pull()):
            leaf.delete()
    assert_unchanged(store, before)
    whole, copies = kv.pull(store, 3), kv.pull(store, 3, devices=DEVICES)
    donate_all(store)
    assert whole.sharding.device_set == store.values[3].sharding.device_set or kind == "sharded"
    for pulled in (whole, *copies):
        np.testing.assert_array_equal(pulled, want)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_pulled_is_as_free_to_move_as_what_is_stored(size):
    store, _ = start("local", size, "anywhere")
    assert not kv.pull(store, 3).committed
    assert [v.committed for v in kv.pull(start("local", size, "committed")[0], [3, 5])] == [True, True]


@pytest.mark.parametrize("size", SIZES)
def test_params_are_copied_and_to_params_copies(size):
    params = {"w": value_of(size), "b": [jnp.ones(3)]}
    want = jax.tree.map(np.array, params)
    store = kv.from_params(params, optimizer=optax.adam(0.1), devices=DEVICES)
    donate_all(params)
    donate_all(kv.to_params(store))
    jax.tree.map(np.testing.assert_array_equal, kv.to_params(store), want)
    assert kv.to_params(store, copy=False)["w"] is store.values[1]
    assert kv.pull(store, 1, copy=False) is store.values[1]


@pytest.mark.parametrize("kind", ["local", "device", "sharded", "dist_async"])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_pushed_stays_the_callers(kind, size):
    """An assigned value too, which MXNet kept by reference."""
    value = value_of(size)
    store = kv.init(kv.create(kind), 3, jnp.zeros_like(value))
    for one in (jnp.copy(value), [jnp.copy(value)], put([value, 0 * value], DEVICES)):
        want = np.asarray(value)
        store = kv.push(store, 3, one)
        donate_all(one)
        np.testing.assert_array_equal(kv.pull(kv.flush(store), 3), want)


def test_broadcast_copies():
    value = jnp.ones(3)
    store, pulled = kv.broadcast(kv.create("device"), 3, value)
    donate_all((value, pulled))
    assert kv.pull(store, 3).tolist() == [1, 1, 1]


def test_the_state_of_an_updater_is_not_the_value_itself():
    keeps = updaters.Updater(lambda key, value: value, lambda key, pushed, state, stored: (stored + pushed, state))
    store = kv.set_updater(kv.init(kv.create(), 3, jnp.ones(3)), keeps)
    store = kv.init(store, 4, jnp.ones(3))
    new = jax.jit(lambda s: kv.push(s, 4, jnp.ones(3)), donate_argnums=0)(store)  # each buffer is donated once
    assert kv.pull(new, [3, 4])[1].tolist() == [2, 2, 2]


# ---- arrays without values


def deleted():
    gone = jnp.ones((2, 3))
    gone.delete()
    return gone


def leaked():
    found = []
    jax.jit(lambda x: found.append(x) or x)(jnp.ones((2, 3)))
    return found[0]


def rows(value):
    good = RowSparse(np.array([0]), jnp.ones((1, 3)), (2, 3))
    return jax.tree.unflatten(jax.tree.structure(good), [good.indices, value])


STORE = kv.init(kv.create("device"), 3, jnp.zeros((2, 3)))
VERBS = {
    "init": (lambda x: kv.init(kv.create(), 7, x), "kv.init: value of key 7: float32"),
    "init_list": (lambda x: kv.init(kv.create(), [6, 7], [jnp.ones(1), [x]]), "kv.init: value of key 7: float32"),
    "broadcast": (lambda x: kv.broadcast(kv.create(), 7, x), "kv.init: value of key 7: float32"),
    "from_params": (lambda x: kv.from_params({"a": jnp.ones(1), "w": x}), "leaf 'w' of params: float32"),
    "push": (lambda x: kv.push(STORE, 3, x), "kv.push: value for key 3: float32"),
    "push_list": (lambda x: kv.push(STORE, [3], [[jnp.ones((2, 3)), x]]), "kv.push: value for key 3: float32"),
    "pushpull": (lambda x: kv.pushpull(STORE, 3, x), "kv.push: value for key 3: float32"),
    "rows": (lambda x: kv.push(STORE, 3, rows(x)), "kv.push: rows for key 3: float32"),
    "allreduce": (lambda x: parallel.allreduce([jnp.ones((2, 3)), x]), "allreduce: value 1: float32"),
}


@pytest.mark.parametrize(("call", "words"), VERBS.values(), ids=VERBS)
def test_arrays_without_values_are_refused(call, words):
    before = snapshot(STORE)
    with pytest.raises(RuntimeError, match="deleted"):
        call(deleted())
    with pytest.raises(jax.errors.UnexpectedTracerError, match=f"{words}.* is a tracer of a jitted .* has ended"):
        call(leaked())
    assert_unchanged(STORE, before)


@pytest.mark.parametrize("transform", [jax.vmap, jax.grad, jax.make_jaxpr, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_tracers_of_every_transform_leak(transform):
    found = []
    transform(lambda x: (found.append(x), x.sum())[1])(jnp.ones(3))
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"kv.push: value for key 0"):
        kv.push(kv.init(kv.create(), 0, jnp.ones(found[0].shape)), 0, found[0])


def test_tracers_that_live_are_taken():
    def inner(outer):
        store = kv.init(kv.create(), 0, jnp.zeros(()))
        return jax.vmap(lambda x: kv.pull(kv.push(store, 0, [x, outer]), 0))(jnp.arange(3.0))

    assert jax.jit(inner)(1.0).tolist() == [1, 2, 3]
    assert jax.vmap(jax.grad(lambda x: inner(x).sum()))(jnp.ones(2)).tolist() == [3, 3]


def test_a_donated_store_says_which_one_to_use():
    store = kv.from_params({"w": jnp.ones(2)}, optimizer=optax.sgd(1.0))
    jax.jit(lambda s: kv.push(s, 0, jnp.ones(2)), donate_argnums=0)(store)
    words = "key 0: the stored value was deleted, as by donating this store .* the store that the function returned"
    calls = {
        "kv.pull": lambda: kv.pull(store, 0),
        "kv.push": lambda: kv.push(store, 0, jnp.ones(2)),
        "kv.row_sparse_pull": lambda: kv.row_sparse_pull(store, 0, [0]),
        "kv.to_params": lambda: kv.to_params(store),
        "kv.place": lambda: kv.place(store, DEVICES),
        "kv.set_updater": lambda: kv.set_updater(store, updaters.accumulate),
        "kv.set_optimizer": lambda: kv.set_optimizer(store, optax.adam(0.1)),
    }
    for where, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{where}: {words}"):
            call()
