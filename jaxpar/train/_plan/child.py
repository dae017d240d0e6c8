"""The process that compiles, and what it reads of the compiled step. It has the compilers, and takes no accelerator.

libtpu and JAX's CUDA plugin do not belong in the environment that trains: with both installed plain `jax.devices()`
complains. So another Python may have them. What only the training has comes behind its own packages.
"""

from __future__ import annotations

import importlib
import importlib.util
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

from ... import viz
from ..._core.text import describe
from ..._devices.shardings import axes_of
from .._step.train_step import TrainStep
from .slices import Slice

PYTHON = "JAXPAR_PLAN_PYTHON"
_HINT = f"`make plan-env` makes an environment with it and {PYTHON} names its Python, see docs/plan.md"
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
_REFUSED = re.compile(r"([\d.]+)([KMG])\)? (?:exceeds available HBM|of) \(?([\d.]+)([KMG])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_KEYED = re.compile(r"\.store\.(values|updater_state|residuals|pending)\[(\d+)\](?:\.values)?")


def ask(make: Any, where: Slice, choices: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What `examine` gives, from a process of its own.

    Raises:
        RuntimeError: there is no compiler for these devices, or it ended.
        ValueError: the process cannot have `make`, or `make` raises.
    """
    python = os.environ.get(PYTHON) or sys.executable
    fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    request = _dumps((make, where, choices, fraction, settings))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "request").write_bytes(request)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        version = "{}.{}".format(*sys.version_info)
        words = [python, "-c", _START.format(sep=os.pathsep), paths, version, folder]
        try:
            ended = subprocess.run(words, env=_environment(where), capture_output=True, text=True, check=False)
        except OSError as error:
            raise RuntimeError(f"train.plan: {PYTHON} cannot be started: {error}") from None
        answer = Path(folder) / "answer"
        if not answer.exists():
            last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(
                f"train.plan: the process that compiles, {python}, ended with {ended.returncode}: {last}"
            )
        kind, *rest = pickle.loads(answer.read_bytes())
    if kind != "plan":
        raise (RuntimeError if kind == "compiler" else ValueError)(f"train.plan, on={where.name!r}: {rest[0]}")
    return rest[0], rest[1]


def _dumps(request: Any) -> bytes:
    """The request, functions of a notebook by value."""
    make = request[0]
    try:
        return importlib.import_module("cloudpickle").dumps(request)
    except ImportError:
        hint = "pip install cloudpickle, or put make and what it is given in a module"
    if getattr(make, "__module__", None) == "__main__":
        raise ValueError(f"train.plan: the process that compiles cannot import {make.__qualname__} of __main__; {hint}")
    try:
        return pickle.dumps(request)
    except Exception as error:
        raise ValueError(
            f"train.plan: make or a choice cannot be sent to the process that compiles ({error}); {hint}"
        ) from None


def _environment(where: Slice) -> dict[str, str]:
    """Variables of the compilers, which read them when they load."""
    found = {name: value for name, value in os.environ.items() if name not in _NOT_HERE}
    found |= {"JAX_PLATFORMS": "cpu", "TPU_LOG_DIR": "disabled"}
    found["TPU_SKIP_MDS_QUERY"] = "1"  # else libtpu asks a server of metadata, and waits
    found["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else a second process ends at a lock
    if where.is_gpu:  # both would run kernels to choose among them; libtpu ends at a flag that it does not know
        found["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    return found


def main(folder: str) -> None:
    """Answer the request in a folder."""
    answer = _answer(Path(folder) / "request")
    (Path(folder) / "answer").write_bytes(pickle.dumps(answer))


def _answer(request: Path) -> tuple[Any, ...]:
    try:
        make, where, choices, fraction, settings = pickle.loads(request.read_bytes())
    except Exception as error:
        return "make", f"make cannot be loaded in {sys.executable}: {type(error).__name__}: {error}"
    for name, value in settings.items():
        jax.config.update(name, value)
    if problem := _missing(where):
        return "compiler", problem
    try:
        return "plan", *examine(make, where, choices, fraction)
    except Exception as error:
        return "make", _words(error)


def _missing(where: Slice) -> str:
    """Which compiler this Python lacks, and what to do. Empty where it has it."""
    if where.is_gpu:
        if any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            return ""
        return f"{sys.executable} has no CUDA plugin of JAX, the compiler for GPUs; {_HINT}"
    if importlib.util.find_spec("libtpu"):
        return ""
    return f"{sys.executable} has no libtpu, the compiler for TPUs (Linux on x86-64 only); {_HINT}"


def _words(error: Exception) -> str:
    """An error of `make` or of the compiler in one line, with the user's line that it comes from."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}jaxpar{os.sep}" not in frame.filename and "site-packages" not in frame.filename
    ]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if isinstance(error, (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)):
        return f"make reads the values of an array{place}, but here arrays have only shapes; use the shapes"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


# What a compiled step says: memory, what is sent, FLOPs, cycles. Nothing is computed on a device.


def examine(make: Callable[..., Any], where: Slice, choices: dict[str, Any], fraction: float) -> tuple[Any, Any]:
    """The fields of a `Plan`, and the step and network of its picture, or words why there is none.

    Args:
        make, choices: as of `train.plan`.
        where: the devices, which do not exist.
        fraction: what JAX takes of the memory of a GPU.
    """
    step, state, batch, parts = _construct(make, where.devices(), choices)
    devices = state.store.devices
    arguments = sorted(_arguments(state, batch), key=lambda one: -one["bytes"])
    engine, _ = step._engine_and_step(state.store)
    flops = sum(part.runs * viz._body_cost(part.traced.jaxpr)[0] for part in parts)
    limit = where.limit(fraction)
    found: dict[str, Any] = {
        "on": where.name,
        "choices": {name: str(value) for name, value in choices.items()},
        "devices": len(devices),
        "chip": devices[0].device_kind,
        "engine": engine,
        "batch_axes": tuple(sorted({name for leaf in jax.tree.leaves(batch) for name in _split_axes(leaf)})),
        "limit_bytes": limit,
        "argument_bytes": sum(one["bytes"] for one in arguments),
        "arguments": arguments[:5],
        # Inside shard_map shapes are those of one device.
        "flops": flops // len(devices) if engine == "jit" else flops,
    }
    start = time.process_time()
    programs: list[Any] = []
    for part in parts:
        try:
            programs.append(part.traced.lower().compile())
        except Exception as error:
            refused = _REFUSED.search(str(error)) if "RESOURCE_EXHAUSTED" in str(error) else None
            if refused is None:
                raise
            peak = int(float(refused[1]) * _UNITS[refused[2]]) + part.held
            return {**found, "fits": False, "peak_bytes": peak, **_spent(start)}, "the program does not fit"
    found |= _spent(start)
    found |= _sends(programs, parts, state, len(devices))
    if len(parts) == 1:
        return found | _memory(programs[0], where, limit), _picture(step, state, batch, programs[0])
    return found | _memory_of_parts(programs, parts, where, found), "the step is several programs"


def _spent(start: float) -> dict[str, Any]:
    return {"compile_seconds": round(time.process_time() - start, 1)}


def _construct(make: Callable[..., Any], devices: tuple[Any, ...], choices: dict[str, Any]) -> Any:
    """The step, the shapes of state and batch on the devices, and the programs that it runs."""
    kept: list[Any] = []

    def build() -> Any:
        made = make(devices, **choices)
        if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], TrainStep)):
            raise TypeError(f"make must return (step, state, batch), got {describe(made)}")
        step, state, batch = made
        kept[:] = step, jax.tree.map(_shape, batch)
        return step.complete(state)

    state = jax.eval_shape(build)
    step, batch = kept
    if not set(state.store.devices) <= set(devices):
        there = ", ".join(map(str, state.store.devices[:2]))
        raise ValueError(f"make puts the state on {there}; give the store the devices that make gets as its argument")
    return step, *step.parts(state, batch)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """As JAX takes an array: float64 of NumPy is float32."""
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True))


def _arguments(state: Any, batch: Any) -> list[dict[str, Any]]:
    """Name, shape and bytes on one device of each array that the step takes."""
    names = dict(state.store.paths)
    found: list[dict[str, Any]] = []
    for start, tree in (("", state), ("batch", batch)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = start + jax.tree_util.keystr(path)
            if keyed := _KEYED.match(name):
                part = "params" if keyed[1] == "values" else keyed[1]
                name = f"{part}/{names[int(keyed[2])]}{name[keyed.end() :]}"
            local = leaf.sharding.shard_shape(leaf.shape)
            size = int(np.prod(local)) * getattr(leaf.dtype, "itemsize", 8)
            shape = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            one = {"name": name.removeprefix(".store."), "shape": shape, "bytes": size}
            found.append({**one, "axes": _split_axes(leaf)})
    return found


def _split_axes(leaf: Any) -> list[str]:
    """The axes of the mesh over which an array is split."""
    sizes = leaf.sharding.mesh.shape
    return [name for name in axes_of(leaf.sharding.spec) if sizes[name] > 1]


def _memory(compiled: Any, where: Slice, limit: int) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The peak of a TPU's program has what collectives set aside, that of a GPU's lacks what results do not share.
    peak = max(total + memory.temp_size_in_bytes, getattr(memory, "peak_memory_in_bytes", 0))
    return {
        "fits": not where.is_gpu or peak <= limit,  # the compiler of TPUs refuses what does not
        "peak_bytes": peak,
        "argument_bytes": memory.argument_size_in_bytes,
        "donated_bytes": memory.alias_size_in_bytes,
        "returned_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def _memory_of_parts(programs: list[Any], parts: list[Any], where: Slice, found: dict[str, Any]) -> dict[str, Any]:
    """The same of a step of several programs. The last, the update, returns what the step returns."""
    limit = found["limit_bytes"]
    each = [_memory(program, where, limit) for program in programs]
    peak = max(one["peak_bytes"] + part.held for one, part in zip(each, parts, strict=True))
    returned, donated = each[-1]["returned_bytes"], each[-1]["donated_bytes"]
    return {
        "fits": peak <= limit,
        "peak_bytes": peak,
        "donated_bytes": donated,
        "returned_bytes": returned,
        "temporary_bytes": peak - found["argument_bytes"] - returned + donated,
    }


def _sends(programs: list[Any], parts: list[Any], state: Any, devices: int) -> dict[str, Any]:
    mesh = {str(name): size for name, size in state.step.sharding.mesh.shape.items()}
    collectives: list[dict[str, Any]] = []
    cycles = 0
    for compiled, part in zip(programs, parts, strict=True):
        program = viz._parse_program(compiled.as_text())
        cycles += part.runs * (viz._cycles_of(program) or 0)
        collectives += [
            {
                "kind": send.kind,
                "axes": send.axes,
                "bytes": send.sent,
                "runs": part.runs * send.times,
                "overlapped": send.is_overlapped,
                "is_exact": send.is_exact,
            }
            for send in viz._sends_of(program, mesh, devices)
        ]
    return {"collectives": collectives, "cycles": cycles or None}


def _picture(step: TrainStep, state: Any, batch: Any, compiled: Any) -> Any:
    try:
        return viz._read_step(step, (state, batch), 0, None, (None, 200, True, ()), compiled)
    except Exception as error:  # a plan without its picture is a plan
        return f"the step cannot be drawn: {' '.join(str(error).split())}"
