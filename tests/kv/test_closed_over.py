"""A store and values that a traced function closes over are constants: what is asked of them is as at the prompt."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from kv_model import FOUR, on_mesh

from jaxpar import kv

VALUES = [[jax.device_put(jnp.full(shape, 1.0 + i), d) for i, d in enumerate(FOUR)] for shape in ((8,), (4, 4))]
VERBS = {
    "push": lambda store: kv.pull(kv.push(store, [3, 5], VALUES), [3, 5]),
    "pushpull": lambda store: kv.pushpull(store, 3, VALUES[0])[1],
    "flush": lambda store: kv.pull(kv.flush(kv.push(store, 5, VALUES[1])), 5),
    "devices": lambda store: kv.pull(store, 3, devices=FOUR)[0],
    "rows": lambda store: kv.row_sparse_pull(store, 5, [0, 2]).values,
}
WAYS = {
    "jit": lambda f: jax.jit(f)(),
    "scan": lambda f: jax.tree.map(lambda x: x[0], jax.lax.scan(lambda c, _: (c, f()), 0, None, length=1)[1]),
    "vmap": lambda f: jax.vmap(lambda x: f(), out_axes=None, axis_size=2, in_axes=None)(0),
    "grad": lambda f: jax.value_and_grad(lambda x: (x, f()), has_aux=True)(1.0)[0][1],
}


def store_of(kind, compression=None):
    delay = {"staleness": 1} if kind == "dist_async" else {}
    store = kv.init(kv.create(kind, devices=FOUR, **delay), [3, 5], [jnp.arange(8.0), jnp.ones((4, 4))])
    if compression:
        store = kv.set_gradient_compression(store, {"type": compression})
    return kv.set_optimizer(store, optax.adam(0.1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "compression"), [("local", None), ("device", "2bit"), ("sharded", "int8"), ("dist_async", None)]
)
def test_constants_are_as_at_the_prompt(kind, compression, way):
    store = store_of(kind, compression)
    for verb in VERBS.values():
        at_prompt, traced = verb(store), WAYS[way](lambda verb=verb: verb(store))
        jax.tree.map(np.testing.assert_array_equal, traced, at_prompt)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_in_a_users_mesh(types):
    store = store_of("device", "2bit")
    with jax.set_mesh(Mesh(np.array(FOUR), ("data",), axis_types=(types,))):
        at_prompt = VERBS["push"](store)
        traced = jax.jit(lambda: VERBS["push"](store))()
    jax.tree.map(np.testing.assert_array_equal, traced, at_prompt)


def test_inside_of_shard_map_with_an_axis_a_constant_counts_on_each_device():
    store = kv.init(kv.create("device"), 3, jnp.zeros(2))
    one = jnp.ones(2)
    mapped = on_mesh(lambda x: kv.pull(kv.push(store, 3, one, axis_name="data"), 3) + x, FOUR)
    assert mapped(jnp.zeros(2)).tolist() == [4.0, 4.0]


@pytest.mark.slow
@pytest.mark.parametrize("around", ["nothing", "a mesh and jit"])
@pytest.mark.parametrize("kind", ["device", "dist_async", "sharded"])
def test_inside_of_shard_map_without_an_axis(kind, around):
    mesh = Mesh(np.array(FOUR), ("data",))
    store = store_of(kind)
    store = kv.push(store, 3, jnp.ones(8)) if kind == "dist_async" else store

    def body(x):
        return x + kv.pull(kv.flush(kv.push(store, 3, jnp.ones(8))), 3)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    mapped = jax.jit(mapped) if "jit" in around else mapped
    expected = np.asarray(body(0.0))
    in_mesh = jax.set_mesh(mesh) if "mesh" in around else contextlib.nullcontext()
    with in_mesh, pytest.warns(UserWarning, match="nothing is summed") as found:
        np.testing.assert_allclose(mapped(jnp.zeros(8)), expected, rtol=1e-6)
    assert {warning.filename for warning in found} == {__file__}
