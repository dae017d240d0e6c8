"""Devices: emulating them, spreading a batch over them, summing over them, running one function on all."""

from ._allreduce import allreduce as allreduce
from ._devices import (
    copy_to as copy_to,
    replicate as replicate,
    split_and_load as split_and_load,
    use_cpu_devices as use_cpu_devices,
)
from ._spmd import spmd as spmd
