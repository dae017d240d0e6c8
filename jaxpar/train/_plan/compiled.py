"""What a compiled step says: memory, what is sent, FLOPs, cycles. Nothing is computed on a device."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..._core.arrays import PyTree
from ..._core.text import describe
from ..._devices.shardings import axes_of
from .._step.programs import DeviceProgram
from .._step.train_step import TrainStep
from .accelerators import Slice

# What the compiler of TPUs says of a program that does not fit: how much it needs, and how much there is.
_REFUSED = re.compile(r"([\d.]{1,20})([KMG])\)? (?:exceeds available HBM|of) \(?([\d.]{1,20})([KMG])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
# An array of a store in the path of a state: its field, and its key.
_KEYED = re.compile(r"(values|updater_state|residuals|pending)\[(\d+)\](?:\.values)?")
# The package's own folder: that of a checkout, where users have scripts too, is called jaxpar as well.
_JAXPAR = str(Path(__file__).absolute().parents[2]) + os.sep


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
