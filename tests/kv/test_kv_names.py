"""Names of parameters as keys, in stores of `from_params`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import whole_numbers

from jaxpar import kv, updaters

PARAMS = {
    "conv1": {"bias": whole_numbers(0, 2), "weight": whole_numbers(1, 4, 2)},
    "dense": {"weight": whole_numbers(2, 6)},
}
NAMES = ["conv1/bias", "conv1/weight", "dense/weight"]


def store_of(kind="device", **options):
    return kv.from_params(PARAMS, kind=kind, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["local", "device", "sharded", "dist_async"])
def test_a_name_is_a_key_wherever_a_key_is(kind):
    store = store_of(kind)
    np.testing.assert_array_equal(kv.pull(store, "conv1/weight"), PARAMS["conv1"]["weight"])
    for pulled, key in zip(kv.pull(store, ["dense/weight", 0, "conv1/weight"]), (2, 0, 1), strict=True):
        np.testing.assert_array_equal(pulled, kv.pull(store, key))
    store = kv.flush(kv.push(store, "conv1/bias", jnp.ones(2)))
    assert kv.pull(store, 0).tolist() == [1, 1]
    store = kv.flush(kv.push(store, ["conv1/bias", 2, 0], [jnp.ones(2), jnp.ones(6), [jnp.ones(2)] * 2]))
    assert [kv.pull(store, name)[0].item() for name in ("conv1/bias", "dense/weight")] == [3, 1]
    np.testing.assert_array_equal(kv.pull(store, NAMES)[1], PARAMS["conv1"]["weight"])
    store, pulled = kv.pushpull(store, "dense/weight", jnp.zeros(6), devices=jax.devices()[:2])
    assert len(pulled) == 2
    rows = kv.row_sparse_pull(store, ["conv1/weight", 0], [[3, 1], [0]])
    assert [r.indices.tolist() for r in rows] == [[1, 3], [0]]
    assert kv.row_sparse_pull(store, "conv1/weight", [2]).shape == (4, 2)


def test_names_inside_of_programs():
    store = store_of(updater=updaters.from_optax(optax.sgd(1.0)))
    store = jax.jit(lambda s, g: kv.push(s, "conv1/bias", [g, g]))(store, jnp.ones(2))
    np.testing.assert_array_equal(kv.pull(store, "conv1/bias"), PARAMS["conv1"]["bias"] - 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("conv1/wieght", "'conv1/wieght', near are 'conv1/weight'"),
        ("weight", "'weight', near are 'dense/weight', 'conv1/weight'"),
        ("xyzzy", r"'xyzzy', known are \[conv1/bias, conv1/weight, dense/weight\]"),
    ],
)
def test_an_unknown_name_shows_near_ones(name, words):
    for call in (kv.pull, lambda s, k: kv.push(s, k, jnp.ones(2)), lambda s, k: kv.row_sparse_pull(s, k, [0])):
        for key in (name, ["conv1/bias", name]):
            message = rf"kv\.\w+: no parameter is called {words}.*kv.names\(store\)"
            with pytest.raises(KeyError, match=message) as caught:
                call(store_of(), key)
            assert str(caught.value)[0] == "k"


def test_names_where_there_are_none():
    plain = kv.init(kv.create(), 3, jnp.ones(2))
    for call in (lambda: kv.pull(plain, "w"), lambda: kv.init(plain, "w", jnp.ones(2))):
        with pytest.raises(
            TypeError, match=r"a key of the store must be an int, got .w..*from_params have names, kv.names"
        ):
            call()
    with pytest.raises(TypeError, match="must be an int, got 'conv1/bias'"):
        kv.init(store_of(), "conv1/bias", jnp.ones(2))


def test_two_leaves_of_one_name():
    tree = {"a": {"b": jnp.ones(1)}, "a/b": jnp.zeros(1)}
    with pytest.raises(ValueError, match=r"kv.from_params: the leaves \['a'\]\['b'\] and \['a/b'\].*name, 'a/b'"):
        kv.from_params(tree)


def test_an_array_without_a_path_and_keys_added_later():
    assert kv.pull(kv.from_params(jnp.ones(2)), "").tolist() == [1, 1]
    store = kv.init(store_of(), 7, jnp.ones(2))
    with pytest.raises(KeyError, match="no parameter is called '7'"):
        kv.pull(store, "7")
