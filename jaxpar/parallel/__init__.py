"""Devices: emulate them, spread a batch over them, sum over them, run one function on all, split parameters over them.

_devices    emulated CPU devices, a batch split over devices, params copied to them
_allreduce  the sum of arrays on several devices, on each of them
_spmd       one function on every device, by `pmap` or `shard_map`

How parameters are split over a mesh is in `_devices`, because a store needs it too: `sharding_rules`, `shardings`.
"""

from .._devices.sharding_rules import fsdp as fsdp, sharding_rules as sharding_rules
from .._devices.shardings import shardings_of as shardings_of
from ._allreduce import allreduce as allreduce
from ._devices import (
    copy_to as copy_to,
    replicate as replicate,
    split_and_load as split_and_load,
    use_cpu_devices as use_cpu_devices,
)
from ._spmd import spmd as spmd
