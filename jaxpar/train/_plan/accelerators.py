"""Accelerators by the names that people rent them under, and their devices, which only the compiler knows."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from ..._core.text import describe, did_you_mean

_FLAT = ("1x1", "2x2", "2x4", "4x2", "4x4", "4x8", "8x4", "8x8", "8x16", "16x8", "16x16")


@dataclasses.dataclass(frozen=True)
class Chip:
    """What is known of one kind of accelerator."""

    memory: int  # bytes of one device, or what the compiler of TPUs allows
    most: int = 0  # chips in a pod. 0 for GPUs.
    config: str = "default"  # of the compiler of TPUs
    # For the compiler of GPUs: cores, FPUs, shared memory of a core and of a block that asks for it, memory bandwidth,
    # L2 cache, GHz, compute capability, name.
    numbers: tuple[Any, ...] = ()


_GIB = 2**30
# Memory of TPUs: what libtpu 0.0.52 says is available when it refuses a program. Pods and shapes of slices:
# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. GPUs: openxla/xla, xla/backends/gpu/target_config/specs.
CHIPS = {
    "v4": Chip(int(30.75 * _GIB), 4096, "megacore"),
    "v5e": Chip(int(15.75 * _GIB), 256),
    "v5p": Chip(int(95.73 * _GIB), 8960),
    "v6e": Chip(int(31.24 * _GIB), 256),
    "tpu7x": Chip(int(94.74 * _GIB), 9216),
    "a100": Chip(85_100_068_864, numbers=(
        108, 64, 167_936, 166_912, 2_039_040_000_000, 41_943_040, 1.41, 8, "NVIDIA A100-SXM4-80GB")),
    "h100": Chip(84_942_979_072, numbers=(
        132, 128, 233_472, 232_448, 3_352_320_000_000, 52_428_800, 1.98, 9, "NVIDIA H100 80GB HBM3")),
    "h200": Chip(151_397_597_184, numbers=(
        132, 128, 233_472, 232_448, 4_800_000_000_000, 52_428_800, 1.98, 9, "NVIDIA H200 141GB HBM3e")),
    "b200": Chip(191_514_411_008, numbers=(
        148, 128, 233_472, 232_448, 7_672_320_000_000, 132_644_864, 1.965, 10, "NVIDIA B200")),
}  # fmt: skip
_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {2} threads_per_core_limit: 2048 core_count: {0} fpus_per_core: {1}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {4} l2_cache_size: {5} clock_rate_ghz: {6} device_memory_size: {memory}
  shared_memory_per_block_optin: {3} cuda_compute_capability {{ major: {7} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{8}"
"""


class Slice:
    """A slice of TPUs, or hosts with GPUs. `ValueError` for one that cannot be rented."""

    def __init__(self, name: str, caller: str):
        self.name = str(name)  # such as "v5e:2x4"
        kind, _, sizes = self.name.partition(":")
        if kind not in CHIPS:
            hint = did_you_mean(kind, CHIPS) or f"; known are {', '.join(CHIPS)}"
            raise ValueError(f"{caller}: unknown accelerator, on={describe(name)}{hint}")
        self.kind, self.chip = kind, CHIPS[kind]
        self.is_gpu = bool(self.chip.numbers)
        flat = self.chip.most == 256  # a torus of two axes
        example = f"{kind}:8 or {kind}:4x8, hosts x GPUs" if self.is_gpu else f"{kind}:{'4x4' if flat else '4x4x4'}"
        # No number at all is an empty shape, which no rule below takes.
        shape = tuple(map(int, sizes.split("x"))) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) else ()
        if self.is_gpu:
            shape = (1, *shape) if len(shape) == 1 else shape
            rule, is_there = "a host has 1, 2, 4 or 8 GPUs", len(shape) == 2 and shape[1] in (1, 2, 4, 8)
        elif flat:
            rule, is_there = f"{kind} has {', '.join(_FLAT)}", sizes in _FLAT
        else:
            most = self.chip.most
            rule = f"{kind} has three sizes, 1, 2 or multiples of 4, and at most {most:,} chips"
            fits = all(size in (1, 2) or size % 4 == 0 for size in shape) and math.prod(shape) <= most
            is_there = len(shape) == 3 and fits and (shape[0] > 1 or shape == (1, 1, 1))
        if not is_there:
            raise ValueError(f"{caller}: unknown slice {name!r}; {rule}, such as {example}")
        self.shape = shape  # chips along each axis of the torus, or (hosts, GPUs of each)

    def limit(self, fraction: float) -> int:
        """Bytes that programs may have on a device. `fraction` is what JAX takes of the memory of a GPU."""
        return int(self.chip.memory * fraction) if self.is_gpu else self.chip.memory

    def devices(self) -> tuple[Any, ...]:
        """The devices, which do not exist, from the compiler. Only in a process that has it."""
        from jax.experimental import topologies

        if self.is_gpu:
            config = _CONFIG.format(*self.chip.numbers, memory=self.chip.memory)
            shape = "1x{}x{}".format(*self.shape)  # slices, hosts of a slice, GPUs of a host
            topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology=shape)
        else:
            name = f"{self.kind}:{'x'.join(map(str, self.shape))}"
            topology = topologies.get_topology_desc(
                platform="tpu", topology_name=name, chip_config_name=self.chip.config
            )
        return tuple(topology.devices)
