"""Emulate devices, split batches and params over devices, sum over devices, run one function on all.

How parameters are split over a mesh is in `_devices.shardings`, because a store needs it too.
"""

from .._devices.shardings import fsdp as fsdp, sharding_rules as sharding_rules, shardings_of as shardings_of
from ._arrays import (
    allreduce as allreduce,
    copy_to as copy_to,
    replicate as replicate,
    split_and_load as split_and_load,
    use_cpu_devices as use_cpu_devices,
)
from ._spmd import spmd as spmd
