"""`from_params` and `to_params`: any pytree of arrays, of any library."""

import dataclasses
import xml.etree.ElementTree as ET
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kv_model import KINDS, put, whole_numbers

from jaxpar import kv, sparse, updaters

X = jnp.ones((1, 3))
ROWS = sparse.RowSparse(jnp.array([0, 2]), jnp.ones((2, 3)), (4, 3))


class Layer(NamedTuple):
    weight: jax.Array
    bias: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: jax.Array
    right: list


def linen():
    import flax.linen as nn

    return nn.Dense(2).init(jax.random.key(0), X)


def nnx():
    from flax import nnx

    return nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)


def equinox():
    import equinox as eqx

    return eqx.filter(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), eqx.is_array)


def haiku():
    import haiku as hk

    return hk.transform(lambda x: hk.Linear(2)(x)).init(jax.random.key(0), X)


TREES = {
    "dict": lambda: {"w": jnp.ones((2, 3)), "b": {"x": jnp.zeros(2)}},
    "list": lambda: [jnp.ones(2), [jnp.zeros(3)], ()],
    "named": lambda: Layer(jnp.ones((2, 3)), jnp.zeros(2)),
    "dataclass": lambda: Pair(jnp.ones(2), [jnp.zeros(1), None]),
    "array": lambda: jnp.ones(3),
    "numpy": lambda: {"w": np.ones(3, np.float32)},
    "empty": dict,
    "linen": linen,
    "nnx": nnx,
    "equinox": equinox,
    "haiku": haiku,
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the other libraries, not ours
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "sharded") for name in TREES), *((name, "device") for name in ("dict", "empty", "nnx"))]
)
def test_a_tree_goes_in_and_comes_out(name, kind):
    params = TREES[name]()
    leaves, structure = jax.tree.flatten(params)
    store = kv.from_params(params, kind=kind, optimizer=optax.sgd(0.5))
    assert sorted(store.values) == list(range(len(leaves)))
    out = kv.to_params(store)
    assert jax.tree.structure(out) == structure
    for mine, theirs in zip(jax.tree.leaves(out), leaves, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    store = kv.push(store, list(range(len(leaves))), [jnp.ones_like(leaf) for leaf in leaves])
    for mine, theirs in zip(jax.tree.leaves(kv.to_params(store)), leaves, strict=True):
        np.testing.assert_allclose(mine, theirs - 0.5, rtol=1e-6)


def test_names_are_the_paths():
    assert kv.names(kv.from_params(TREES["dict"]())) == {0: "b/x", 1: "w"}
    assert kv.names(kv.from_params(TREES["list"]())) == {0: "0", 1: "1/0"}
    assert kv.names(kv.from_params(TREES["named"]())) == {0: "weight", 1: "bias"}
    assert kv.names(kv.from_params(TREES["dataclass"]())) == {0: "left", 1: "right/0"}
    assert kv.names(kv.init(kv.create(), [7, 3], [X, X])) == {3: "3", 7: "7"}
    assert kv.names(kv.from_params(linen())) == {0: "params/bias", 1: "params/kernel"}
    assert kv.names(kv.from_params(haiku())) == {0: "linear/b", 1: "linear/w"}


def test_keys_added_later_leave_the_tree_alone():
    store = kv.init(kv.from_params({"w": X}), 7, jnp.zeros(2))
    assert kv.to_params(store).keys() == {"w"}
    assert kv.names(store) == {0: "w", 7: "7"}


def test_updater_and_devices():
    devices = jax.devices()[1:3]
    store = kv.from_params({"w": X}, updater=updaters.accumulate, devices=devices)
    assert store.values[0].sharding.device_set == set(devices)
    np.testing.assert_array_equal(kv.to_params(kv.push(store, 0, X))["w"], 2 * X)


def test_params_on_different_devices_meet_where_their_gradients_are():
    devices = jax.devices()[:2]
    params = {name: jax.device_put(jnp.ones(2), device) for name, device in zip("ab", devices, strict=True)}
    store = kv.from_params(params, optimizer=optax.sgd(0.25))
    with pytest.raises(ValueError, match="incompatible devices"):
        kv.push(store, ["a", "b"], list(params.values()))
    store = kv.push(store, ["a", "b"], [put([x, x], devices) for x in params.values()])
    assert [x.tolist() for x in kv.to_params(store).values()] == [[0.5, 0.5]] * 2


def test_under_jit():
    @jax.jit
    def run(params):
        store = kv.from_params(params, optimizer=optax.sgd(1.0))
        return kv.to_params(kv.push(store, [0, 1], [params["a"], params["b"]]))

    out = run({"a": X, "b": jnp.ones(())})
    assert not any(leaf.any() for leaf in jax.tree.leaves(out))


@pytest.mark.parametrize("leaf", ["text", object(), [1, "a"]], ids=["text", "object", "list"])
def test_a_leaf_that_is_no_array(leaf):
    with pytest.raises(TypeError, match=r"kv.from_params: leaf 'a/w.* of params: expected an array"):
        kv.from_params({"a": {"w": leaf}})


@pytest.mark.parametrize("params", [ROWS, {"a": {"w": ROWS}, "b": X}, [X, (ROWS,)]], ids=["bare", "dict", "list"])
def test_a_row_sparse_leaf_is_refused(params):
    """Its row numbers would be a param of their own."""
    with pytest.raises(TypeError, match=r"kv.from_params: leaf '.*' of params is a RowSparse.*sparse.to_dense"):
        kv.from_params(params, optimizer=optax.sgd(0.1))


def test_errors():
    with pytest.raises(ValueError, match="optimizer= or updater=, not both"):
        kv.from_params({"w": X}, optimizer=optax.sgd(0.1), updater=updaters.assign)
    with pytest.raises(ValueError, match="unknown kind 'foo'"):
        kv.from_params({"w": X}, kind="foo")


@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_a_store_is_a_pytree(kind):
    store = kv.from_params({"w": jnp.ones((2, 3))}, kind=kind, optimizer=optax.adam(0.1))
    leaves, structure = jax.tree.flatten(store)
    assert structure.unflatten(leaves) == store
    assert jax.tree.structure(jax.tree.map(lambda x: x, store)) == structure
    abstract = jax.eval_shape(lambda: store)
    assert isinstance(abstract, kv.KVStore)
    assert "float32[2,3]" in repr(abstract)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(store)[0]]
    assert ".values[0]" in paths


# ---- names of parameters as keys


PARAMS = {
    "conv1": {"bias": whole_numbers(0, 2), "weight": whole_numbers(1, 4, 2)},
    "dense": {"weight": whole_numbers(2, 6)},
}
NAMES = ["conv1/bias", "conv1/weight", "dense/weight"]


def store_of(kind="device", **options):
    return kv.from_params(PARAMS, kind=kind, **options)


@pytest.mark.sampled(1)
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
        with pytest.raises(TypeError, match=r"key of the store must be an int, got .w..*from_params have names"):
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


# ---- what a store looks like, typed at the prompt and in a notebook, and which are equal


def test_the_text_of_a_store():
    store = kv.from_params({"w<1>": jnp.ones((2, 3)), "b": jnp.zeros(4, jnp.bfloat16)}, optimizer=optax.sgd(0.1))
    lines = repr(store).splitlines()
    assert lines[0] == "KVStore(kind='device', updater=optax transform of all params, 2 keys, 32 bytes)"
    assert lines[1].split() == ["0", "b", "bfloat16[4]", "8", "cpu:0"]
    assert lines[2].split() == ["1", "w<1>", "float32[2,3]", "24", "cpu:0"]


@settings(max_examples=8, deadline=None)
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


def test_bytes_of_the_updater_and_the_compression_are_told():
    store = kv.init(kv.create("device"), 3, jnp.zeros(1000))
    store = kv.set_gradient_compression(kv.set_optimizer(store, optax.adam(0.1)), {"type": "2bit"})
    head = repr(store).splitlines()[0]
    assert "1 key, 4,000 bytes" in head
    assert "updater state 8,004 bytes" in head
    assert "compression=TwoBit(threshold=0.5)" in head


def test_the_updater_is_named():
    named = {"assign": updaters.assign, "accumulate": updaters.accumulate, "max": updaters.stateless(max)}
    for name, updater in {**named, "<lambda>": lambda k, p, s: p}.items():
        assert f"updater={name}" in repr(kv.set_updater(kv.create(), updater))


def test_the_devices_of_a_value():
    devices = jax.devices()[:3]
    device = kv.push(kv.init(kv.create("device"), 0, jnp.ones(6)), 0, put([jnp.ones(6)] * 3, devices))
    assert "a copy on cpu:0, cpu:1, cpu:2" in repr(device)
    sharded = kv.init(kv.create("sharded", devices=devices), 0, jnp.ones((2, 3)))
    assert "float32[2,3]" in repr(sharded)
    assert "spread over cpu:0, cpu:1, cpu:2" in repr(sharded)
    assert "cpu:1" in repr(kv.init(kv.create(), 0, jax.device_put(1.0, jax.devices()[1])))


@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_it_shows_in_every_state(kind):
    store = kv.from_params({"w": jnp.ones((2, 3))}, kind=kind, devices=jax.devices()[:2])
    shown = []
    jax.jit(lambda s: shown.append(repr(s)) or shown.append(s._repr_html_()))(store)
    assert "traced" in shown[0]
    assert "float32[2,3]" in shown[0]
    specs = kv.partition_specs(store, "data")
    assert "P" in repr(specs)
    assert specs == kv.partition_specs(store, "data")
    assert specs != kv.partition_specs(store, "other") or kind == "device"
    assert repr(jax.tree.map(lambda x: None, store)).startswith("KVStore(")
    for leaf in jax.tree.leaves(store):
        leaf.delete()
    assert "float32[2,3]" in repr(store)


def test_the_table_of_a_notebook():
    store = kv.from_params({"<script>": jnp.ones((2, 3))}, devices=jax.devices()[:2])
    cells = [e.text for e in ET.fromstring(store._repr_html_()).iter() if e.tag in ("td", "th")]
    titles = ["key", "name", "value", "bytes", "devices"]
    assert cells == [*titles, "0", "<script>", "float32[2,3]", "24", "a copy on cpu:0, cpu:1"]
    assert "<script>" not in store._repr_html_()


def test_long_stores_are_cut():
    store = kv.init(kv.create(), range(25), [jnp.zeros(1)] * 25)
    assert repr(store).count("\n") == 21
    assert repr(store).endswith("... and 5 more")
    assert "... and 5 more" in store._repr_html_()
