"""What jax's own check of replication in `shard_map` sees of a store."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from jaxpar import kv

DEVICES = 4


# The second row has kind `local` with compression, whose program is that of `device`.
KINDS_AND_COMPRESSION = [
    pytest.param(kind, compression, marks=pytest.mark.slow if kind == "local" and compression != "none" else ())
    for kind in ("local", "device", "sharded")
    for compression in ("none", "2bit", "powersgd", "int3")
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "compression"), KINDS_AND_COMPRESSION)
def test_pulled_values_are_known_to_be_equal_on_all_devices(kind, compression):
    devices = jax.devices()[:DEVICES]
    store = kv.create(kind, devices=devices if kind == "sharded" else None)
    store = kv.set_optimizer(kv.init(store, [3, 4], [jnp.zeros((8, 64)), jnp.zeros(3)]), optax.sgd(1.0))
    store = kv.set_gradient_compression(store, {"type": compression})

    def push_and_pull(store, large, small):
        store = kv.push(store, [3, 4], [large[0], small[0]], axis_name="d")
        return kv.pull(store, [3, 4], axis_name="d")

    run = jax.shard_map(
        push_and_pull,
        mesh=Mesh(np.array(devices), ("d",)),
        in_specs=(kv.partition_specs(store, "d"), P("d"), P("d")),
        out_specs=P(),  # refused while tracing where shard_map cannot see that the values are equal
        check_vma=True,
    )
    pulled = jax.jit(run)(store, jnp.full((DEVICES, 8, 64), 0.5), jnp.full((DEVICES, 3), 0.5))
    for value in pulled:
        np.testing.assert_allclose(value, np.full(value.shape, -0.5 * DEVICES), rtol=1e-5)


@pytest.mark.slow
def test_a_gradient_that_shard_map_summed_already_is_the_users_to_know():
    """The trap that `kv.push` warns of: with the check on, grad by replicated params is a sum already."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
    store = kv.init(kv.create("device"), 0, jnp.zeros(()))
    x = jnp.arange(DEVICES, dtype=jnp.float32)

    def pushed(w, x, *, own):
        w = jax.lax.pcast(w, "d", to="varying") if own else w
        return kv.pull(kv.push(store, 0, jax.grad(lambda w: (w * x).sum())(w), axis_name="d"), 0)

    def run(own):
        return jax.shard_map(
            lambda w, x: pushed(w, x, own=own), mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=True
        )(jnp.ones(()), x)

    assert float(run(own=True)) == float(x.sum())
    assert float(run(own=False)) == DEVICES * float(x.sum())
