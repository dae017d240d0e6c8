"""Slices of TPUs and hosts with GPUs, by the names that people rent them under."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from ..._core.text import did_you_mean

_FLAT = ("1x1", "2x2", "2x4", "4x2", "4x4", "4x8", "8x4", "8x8", "8x16", "16x8", "16x16")


@dataclasses.dataclass(frozen=True)
class Chip:
    """What is known of one kind of accelerator.

    Attributes:
        memory: bytes of one device, or what the compiler of TPUs allows.
        most: chips in a pod. 0 for GPUs.
        config: of the compiler of TPUs.
        numbers: for the compiler of GPUs: cores, FPUs, shared memory of a core and of a block that asks for it, memory
            bandwidth, L2 cache, GHz, compute capability, name.
    """

    memory: int
    most: int = 0
    config: str = "default"
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
    "a100": Chip(
        85_100_068_864,
        numbers=(108, 64, 167_936, 166_912, 2_039_040_000_000, 41_943_040, 1.41, 8, "NVIDIA A100-SXM4-80GB"),
    ),
    "h100": Chip(
        84_942_979_072,
        numbers=(132, 128, 233_472, 232_448, 3_352_320_000_000, 52_428_800, 1.98, 9, "NVIDIA H100 80GB HBM3"),
    ),
    "h200": Chip(
        151_397_597_184,
        numbers=(132, 128, 233_472, 232_448, 4_800_000_000_000, 52_428_800, 1.98, 9, "NVIDIA H200 141GB HBM3e"),
    ),
    "b200": Chip(
        191_514_411_008,
        numbers=(148, 128, 233_472, 232_448, 7_672_320_000_000, 132_644_864, 1.965, 10, "NVIDIA B200"),
    ),
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


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of TPUs, or hosts with GPUs.

    Attributes:
        name: as given, "v5e:2x4".
        kind: "v5e".
        shape: chips along each axis of the torus, or (hosts, GPUs of each).
    """

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def is_gpu(self) -> bool:
        return bool(self.chip.numbers)

    def limit(self, fraction: float) -> int:
        """Bytes that programs may have on a device. `fraction` is what JAX takes of the memory of a GPU."""
        return int(self.chip.memory * fraction) if self.is_gpu else self.chip.memory

    def devices(self) -> tuple[Any, ...]:
        """The devices, which do not exist, from the compiler. Only in a process that has it."""
        from jax.experimental import topologies

        if self.is_gpu:
            config = _CONFIG.format(*self.chip.numbers, memory=self.chip.memory)
            shape = "1x{}x{}".format(*self.shape)  # slices, hosts of a slice, GPUs of a host
            found = topologies.get_topology_desc(platform="cuda", target_config=config, topology=shape)
        else:
            name = f"{self.kind}:{'x'.join(map(str, self.shape))}"
            found = topologies.get_topology_desc(platform="tpu", topology_name=name, chip_config_name=self.chip.config)
        return tuple(found.devices)


def slice_of(name: str, where: str) -> Slice:
    """The slice of this name. `ValueError` for one that cannot be rented."""
    kind, colon, sizes = str(name).partition(":")
    if kind not in CHIPS:
        hint = did_you_mean(kind, list(CHIPS)) or f"; known are {', '.join(CHIPS)}"
        raise ValueError(f"{where}: unknown accelerator {kind!r} in on={name!r}{hint}")
    chip, gpu = CHIPS[kind], bool(CHIPS[kind].numbers)
    flat = chip.most == 256
    example = f"{kind}:8 or {kind}:4x8, hosts x GPUs" if gpu else f"{kind}:{'4x4' if flat else '4x4x4'}"
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
        raise ValueError(f"{where}: on={name!r} must have the number of chips, such as {example}")
    shape = tuple(map(int, sizes.split("x")))
    if gpu:
        shape = (1, *shape) if len(shape) == 1 else shape
        if len(shape) != 2 or shape[1] not in (1, 2, 4, 8):
            raise ValueError(f"{where}: on={name!r}: a host has 1, 2, 4 or 8 GPUs; write {example}")
    elif flat and sizes not in _FLAT:
        raise ValueError(f"{where}: unknown slice {name!r}; {kind} has {', '.join(_FLAT)}")
    elif not flat and not _is_torus(shape, chip.most):
        rule = f"three sizes, 1, 2 or multiples of 4, and at most {chip.most:,} chips"
        raise ValueError(f"{where}: unknown slice {name!r}; {kind} has {rule}, such as {example}")
    return Slice(str(name), kind, shape)


def _is_torus(shape: tuple[int, ...], most: int) -> bool:
    fits = all(size in (1, 2) or size % 4 == 0 for size in shape)
    return len(shape) == 3 and fits and math.prod(shape) <= most and (shape[0] > 1 or shape == (1, 1, 1))
