"""`from_params` and `to_params`: any pytree of arrays, of any library."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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


@pytest.mark.sampled(5)
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
    with pytest.raises(ValueError, match="an optimizer or an updater, not both"):
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
