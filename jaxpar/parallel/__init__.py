"""Emulate devices, split batches and params over devices, sum over devices, run one function on all.

How parameters are split over a mesh is in `_devices`, because a store needs it too: `sharding_rules`, `shardings`.
"""

from .._devices.sharding_rules import fsdp as fsdp, sharding_rules as sharding_rules
from .._devices.shardings import shardings_of as shardings_of
from ._devices import (
    allreduce as allreduce,
    copy_to as copy_to,
    replicate as replicate,
    split_and_load as split_and_load,
    spmd as spmd,
    use_cpu_devices as use_cpu_devices,
)
