"""What a process runs for tests/devices/test_large_scatter.py: large reduce-scatters over Gloo, as jaxpar makes them.

    python scatter_run.py HOST:PORT PROCESSES PROCESS FOLDER GROUP MEBIBYTES TIMES

Each device sends and gets so many MiB, in groups of so many devices. Numbers are whole, so that sums are exact.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxpar._devices import collectives

coordinator, count, index, _, group, mebibytes, times = sys.argv[1:]
jax.distributed.initialize(coordinator, int(count), int(index), initialization_timeout=60)
group, chunk = int(group), int(mebibytes) << 18
mesh = Mesh(np.array(jax.devices()).reshape(-1, group), ("group", "i"))


def body(k):
    value = (jnp.arange(group * chunk) % 1021).astype(jnp.float32) + k
    at = lax.axis_index("i")
    (got,) = collectives.reduce_scatter([value * (1 + at)], "i", collectives.BucketLimits())
    wanted = lax.dynamic_slice_in_dim(value, at * chunk, chunk) * (group * (group + 1) // 2)
    return (got != wanted).sum().reshape(1, 1)


run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("group", "i"), check_vma=False))
for k in range(int(times)):
    wrong = [int(shard.data[0, 0]) for shard in run(jnp.float32(k)).addressable_shards]
    assert not any(wrong), f"sum {k}: so many wrong numbers on each device: {wrong}"
