"""What a compiled step says: memory, what is sent, FLOPs, cycles. Nothing is computed on a device."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ... import viz
from ..._core.text import describe
from ..._devices.sharding_rules import axes_of
from .._step.train_step import TrainStep
from .slices import Slice

_REFUSED = re.compile(r"([\d.]+)([KMG])\)? (?:exceeds available HBM|of) \(?([\d.]+)([KMG])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_KEYED = re.compile(r"\.store\.(values|updater_state|residuals|pending)\[(\d+)\](?:\.values)?")


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
    return step, *step.shapes(state, batch), step.parts(state, batch)


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
