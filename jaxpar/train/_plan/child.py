"""Accelerators by the names that people rent them under, and the process that compiles for them, without any of them.

libtpu and JAX's CUDA plugin do not belong in the environment that trains: with both installed plain `jax.devices()`
complains. So another Python may have them. What only the training has comes behind its own packages.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..._core.arrays import PyTree
from ..._core.text import describe, did_you_mean
from ..._devices.shardings import axes_of
from .._step.programs import DeviceProgram
from .._step.train_step import TrainStep

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


# The process that compiles.

PYTHON = "JAXPAR_PLAN_PYTHON"
_HINT = f"`make plan-env` makes an environment with it and {PYTHON} names its Python, see docs/plan.md"
_BY_VALUE = "pip install cloudpickle, or put make and what it is given in a module"
_START = """
import sys
paths, version, folder = sys.argv[1].split({sep!r}), sys.argv[2], sys.argv[3]
if version != "%d.%d" % sys.version_info[:2]:
    sys.exit("it is Python %d.%d" % sys.version_info[:2] + ", and this is " + version + "; take the same version")
sys.path += [path for path in paths if path not in sys.path]
from jaxpar.train._plan.child import main
main(folder)
"""
# What changes programs, and may have been set without the environment.
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
_NOT_HERE = ("XLA_FLAGS", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAXPAR_COORDINATOR")
_REFUSED = re.compile(r"([\d.]{1,20})([KMG])\)? (?:exceeds available HBM|of) \(?([\d.]{1,20})([KMG])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_KEYED = re.compile(r"(values|updater_state|residuals|pending)\[(\d+)\](?:\.values)?")


Work = Callable[[Callable[..., Any], Slice, dict[str, Any], float], Any]  # such as `examine`


def ask(work: Work, make: Callable[..., Any], target: Slice, choices: dict[str, Any], caller: str) -> Any:
    """What `work(make, target, choices, fraction)` gives, from a process of its own, or the error that it gives."""
    python = os.environ.get(PYTHON) or sys.executable
    fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    try:  # functions of a notebook by value
        pickler = importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle")
        request = pickler.dumps((work, make, target, choices, fraction, settings))
    except Exception as error:
        raise ValueError(
            f"{caller}: make or a choice cannot be sent to the process that compiles ({error}); {_BY_VALUE}"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "request").write_bytes(request)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        version = "{}.{}".format(*sys.version_info)
        command = [python, "-c", _START.format(sep=os.pathsep), paths, version, folder]
        ended = subprocess.run(command, env=_environment(target), capture_output=True, text=True, check=False)
        answer = Path(folder) / "answer"
        if not answer.exists():
            last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"{caller}: {python}, which compiles, ended with {ended.returncode}: {last}")
        answered = pickle.loads(answer.read_bytes())
    if isinstance(answered, Exception):
        raise type(answered)(f"{caller}, on={target.name!r}: {answered}")
    return answered


def _environment(target: Slice) -> dict[str, str]:
    """Variables of the compilers, which read them when they load."""
    variables = {name: value for name, value in os.environ.items() if name not in _NOT_HERE}
    variables |= {"JAX_PLATFORMS": "cpu", "TPU_LOG_DIR": "disabled"}
    variables["TPU_SKIP_MDS_QUERY"] = "1"  # else libtpu asks a server of metadata, and waits
    variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else a second process ends at a lock
    if target.is_gpu:  # both would run kernels to choose among them; libtpu ends at a flag that it does not know
        variables["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    return variables


def main(folder: str) -> None:
    """Answer the request in a folder."""
    answer = _answer((Path(folder) / "request").read_bytes())
    (Path(folder) / "answer").write_bytes(pickle.dumps(answer))


def _answer(request: bytes) -> Any:
    # An error is an answer too, as text: its class may be of a module that the other process has not.
    try:
        work, make, target, choices, fraction, settings = pickle.loads(request)
    except Exception as error:
        return ValueError(f"make cannot be loaded in {sys.executable}: {type(error).__name__}: {error}; {_BY_VALUE}")
    for name, value in settings.items():
        jax.config.update(name, value)
    if problem := _missing(target):
        return RuntimeError(problem)
    try:
        return work(make, target, choices, fraction)
    except Exception as error:
        return ValueError(in_one_line(error))


def _missing(target: Slice) -> str:
    """Which compiler this Python lacks, and what to do. Empty where it has it."""
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin") if target.is_gpu else ("libtpu",)
    if any(map(importlib.util.find_spec, names)):
        return ""
    compiler = "CUDA plugin of JAX, the compiler for GPUs" if target.is_gpu else "libtpu, the compiler for TPUs"
    return f"{sys.executable} has no {compiler}{'' if target.is_gpu else ' (Linux on x86-64 only)'}; {_HINT}"


# The package's own folder: that of a checkout, where users have scripts too, is called jaxpar as well.
_JAXPAR = str(Path(__file__).absolute().parents[2]) + os.sep


def in_one_line(error: Exception) -> str:
    """An error of `make` or of the compiler, with the user's line that it comes from."""
    users_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_JAXPAR) and "site-packages" not in frame.filename
    ]
    place = f" ({Path(users_frames[-1].filename).name}:{users_frames[-1].lineno})" if users_frames else ""
    if isinstance(error, (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)):
        return f"make reads the values of an array{place}, but here arrays have only shapes; use the shapes"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


# What a compiled step says: memory, what is sent, FLOPs, cycles. Nothing is computed on a device.


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """One collective of a planned step.

    Attributes:
        kind: as XLA names it: "all-reduce", "all-gather", ...
        axes: of the mesh. Empty where the devices are no set of its axes.
        bytes: that a device sends each time, around a ring.
        runs: how often it runs in a step. A branch counts as taken.
        overlapped: whether the program computes something between its beginning and its end.
        is_exact: whether `runs` is known. A loop of unknown length counts once.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    runs: int
    overlapped: bool
    is_exact: bool


def examine(make: Callable[..., Any], target: Slice, choices: dict[str, Any], fraction: float) -> tuple[Any, Any]:
    """The fields of a `Plan`, and the step and network of its picture, or words why there is none."""
    from ... import viz  # who trains does not need it

    # What is known before the compiler runs: the arrays of state and batch, and the operations.
    step, state, batch, stages = construct(make, target.devices(), choices)
    devices = state.store.devices
    arguments = sorted(_arguments(state, batch), key=lambda argument: -argument["bytes"])
    engine, _ = step._engine_and_step(state.store)
    flops = sum(stage.runs * viz._body_cost(stage.traced.jaxpr)[0] for stage in stages)
    fields: dict[str, Any] = {
        "on": target.name,
        "choices": {name: str(value) for name, value in choices.items()},
        "devices": len(devices),
        "chip": devices[0].device_kind,
        "engine": engine,
        "batch_axes": tuple(sorted({name for leaf in jax.tree.leaves(batch) for name in _split_axes(leaf)})),
        "limit_bytes": target.limit(fraction),
        "argument_bytes": sum(argument["bytes"] for argument in arguments),
        "arguments": arguments[:5],
        # Inside shard_map shapes are those of one device.
        "flops": flops // len(devices) if engine == "jit" else flops,
    }

    # The compiled programs. The compiler of TPUs refuses one that does not fit, and says how much it needs.
    start = time.process_time()
    programs: list[Any] = []
    for stage in stages:
        try:
            programs.append(stage.traced.lower().compile())
        except Exception as error:
            refused = _REFUSED.search(str(error)) if "RESOURCE_EXHAUSTED" in str(error) else None
            if refused is None:
                raise
            peak = int(float(refused[1]) * _UNITS[refused[2]]) + stage.other_bytes
            fields |= {"fits": False, "peak_bytes": peak, "compile_seconds": round(time.process_time() - start, 1)}
            return fields, "the program does not fit"
    fields["compile_seconds"] = round(time.process_time() - start, 1)
    fields |= _memory(programs, stages, target, fields)

    # What the programs send, and the cycles that they take.
    mesh = {str(name): size for name, size in state.step.sharding.mesh.shape.items()}
    collectives: list[PlannedCollective] = []
    cycles = 0
    for compiled, stage in zip(programs, stages, strict=True):
        program = viz._program_of(compiled)
        cycles += stage.runs * (viz._cycles_of(program) or 0)
        for send in viz._sends_of(program, mesh, len(devices)):
            runs = stage.runs * send.times
            planned = PlannedCollective(send.kind, send.axes, send.sent, runs, send.is_overlapped, send.is_exact)
            collectives.append(planned)
    fields |= {"collectives": tuple(collectives), "cycles": cycles or None}

    if len(stages) > 1:
        return fields, "the step is several programs"
    return fields, picture_of(step, state, batch, programs[0])


def construct(make: Callable[..., Any], devices: tuple[Any, ...], choices: dict[str, Any]) -> Any:
    """The step, the shapes of state and batch on the devices, and the programs that it runs."""
    kept: list[Any] = []

    def build() -> Any:
        step, state, batch = make(devices, **choices)
        # As JAX takes an array: float64 of NumPy is float32.
        dtype = functools.partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
        kept[:] = step, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype(x.dtype)), batch)
        return step.complete(state)

    state = jax.eval_shape(build)
    step, batch = kept
    if not set(state.store.devices) <= set(devices):
        shown = ", ".join(map(str, state.store.devices[:2]))
        raise ValueError(f"make puts the state on {shown}; give the store the devices that make gets as its argument")
    return step, *step.parts(state, batch)


def _arguments(state: PyTree, batch: PyTree) -> list[dict[str, Any]]:
    """Name, shape and bytes on one device of each array that the step takes."""
    # Arrays of the store go by its keys, which are numbers. People know the names of the params.
    names = dict(state.store.paths)
    arguments: list[dict[str, Any]] = []
    for start, tree in (("", state), ("batch", batch)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = (start + jax.tree_util.keystr(path)).removeprefix(".store.")
            if keyed := _KEYED.match(name):
                field = "params" if keyed[1] == "values" else keyed[1]
                name = f"{field}/{names[int(keyed[2])]}{name[keyed.end() :]}"
            local = leaf.sharding.shard_shape(leaf.shape)
            size = int(np.prod(local)) * getattr(leaf.dtype, "itemsize", 8)
            arguments.append({"name": name, "shape": describe(leaf), "bytes": size, "axes": _split_axes(leaf)})
    return arguments


def _split_axes(leaf: Any) -> list[str]:
    """The axes of the mesh over which an array is split."""
    sizes = leaf.sharding.mesh.shape
    return [name for name in axes_of(leaf.sharding.spec) if sizes[name] > 1]


def peak_bytes(program: jax.stages.Compiled, stage: DeviceProgram) -> int:
    """What a device needs at once while it runs a program."""
    memory: Any = program.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The peak of a TPU's program has what collectives set aside, that of a GPU's lacks what results do not share.
    needed = max(kept + memory.temp_size_in_bytes, getattr(memory, "peak_memory_in_bytes", 0))
    return needed + stage.other_bytes


def _memory(programs: list[Any], stages: list[Any], target: Slice, fields: dict[str, Any]) -> dict[str, Any]:
    """What a device needs at once. The last program, the update if there are several, returns what the step returns."""
    last, peak = programs[-1].memory_analysis(), max(map(peak_bytes, programs, stages))
    sizes = {"donated_bytes": last.alias_size_in_bytes, "returned_bytes": last.output_size_in_bytes}
    if len(programs) == 1:
        sizes |= {"argument_bytes": last.argument_size_in_bytes, "temporary_bytes": last.temp_size_in_bytes}
    else:
        kept = fields["argument_bytes"] + sizes["returned_bytes"] - sizes["donated_bytes"]
        sizes |= {"temporary_bytes": peak - kept}
    # The compiler of TPUs has refused a program that does not fit.
    fits = peak <= fields["limit_bytes"] or (len(programs) == 1 and not target.is_gpu)
    return {"fits": fits, "peak_bytes": peak, **sizes}


def picture_of(step: TrainStep, state: PyTree, batch: PyTree, compiled: jax.stages.Compiled) -> Any:
    """The step and the network of its picture, or words why there is none."""
    from ... import viz

    try:
        return viz._read_step(step, (state, batch), compiled=compiled)
    except Exception as error:  # a plan without its picture is a plan
        return f"the step cannot be drawn: {' '.join(str(error).split())}"
