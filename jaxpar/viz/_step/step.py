"""`trace_step`: from a step and its compiled program to its `StepGraph`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._core.arguments import did_you_mean
from ..._core.calls import answers
from .. import _trace
from .._fold.known import Call
from .._fold.patterns import Rule
from .._graph import Graph
from .._layout.graph import to_graph
from .._layout.names import name_drafts
from .._layout.net import Net
from .._options import check_trace
from .._program.fresh import compile_from_source
from .._program.hlo import Program, parse
from .._program.memory import Memory, memory_of
from .._program.sends import sends_of
from .edges import edges_of
from .graph import StepGraph, StepLayer, StepMemory, StepPart
from .phases import Row, phases_of
from .places import Places
from .placing import Placing
from .profile import Profile, check_profile, seconds_of
from .shards import arguments_of, device_count, mesh_of


@answers("trace_step")
def trace_step(
    step: Callable[..., Any],
    *args: Any,
    params_argnums: int | Sequence[int] | None = 0,
    profile: Profile | None = None,
    depth: int | None = None,
    max_nodes: int | None = 200,
    repeats: bool = True,
    rules: Sequence[Rule | Call] = (),
) -> StepGraph:
    """What a training step does on its devices, read from its compiled program.

    The step is traced and compiled, and not run. Layers are those of `trace`. Collectives, live memory and the parts of
    arrays on each device are those of the program that XLA made, so that those of automatic sharding are there too.

    Args:
        step: a step of `jaxpar.train`, or any function that computes gradients, jitted or not: `step(state, batch)`,
            `step(params, opt_state, batch)`.
        args: what it is called with, placed on the devices that it will run on.
        params_argnums: which arguments hold the parameters.
        profile: seconds of each layer, by its name ("conv1", "conv1 (backward)"). Or a directory that
            `jax.profiler.trace` wrote while this step ran.
        depth, max_nodes, repeats, rules: as for `trace`.

    Raises:
        TypeError: an argument is no array. An option, or the seconds of a layer, has a wrong type.
        ValueError: an option is out of range. The step cannot be traced or compiled with these arguments, or computes
            no gradient. The profile has a layer that the step lacks, or no time of this step.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def step(params, batch):
        ...     grads = jax.grad(lambda params: (batch @ params["w"]).sum())(params)
        ...     return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        >>> graph = trace_step(step, {"w": jnp.ones((3, 2))}, jnp.ones((5, 3)))
        >>> graph.devices, graph.collectives, [layer.op for layer in graph.layers]
        (1, (), ['FullyConnected'])
    """
    return read_step(step, args, params_argnums, profile, (depth, max_nodes, repeats, rules))[0]


def read_step(
    step: Callable[..., Any], args: tuple[Any, ...], params_argnums: Any, profile: Any, options: tuple[Any, ...]
) -> tuple[StepGraph, Graph]:
    """The step and the network of the same function. Arguments and errors as of `trace_step`."""
    check_trace(step, len(args), params_argnums, *options, what="trace_step")
    check_profile(profile)
    program, compiled, net, names = _read(step, args, params_argnums, options)
    phases, places = phases_of(net), Places(program, net)
    if not any(row.backward for row in phases.rows):
        raise ValueError(
            f"trace_step: {_name(step)} computes no gradient. Give a whole training step, or draw it with plot_network"
        )
    mesh, devices = mesh_of(compiled, args), device_count(compiled)
    placing, memory = Placing(places, phases, names), memory_of(program, compiled)
    parts = _Parts(net, names, peaks_of(program, places, memory), seconds_of(profile, program, places, names))
    leaf_names = [value.name for value in net.raw.values[: len(jax.tree.leaves(args))]]
    network = to_graph(net)
    counted = {node.name: node.params for node in network.nodes}
    layers = tuple(parts.layer(row, counted[names[row.draft.at]]) for row in phases.rows)
    graph = StepGraph(
        layers=layers,
        optimizers=tuple(parts.layer(Row(draft), 0) for draft in phases.optimizers),
        edges=edges_of(net, phases, names, program, places, mesh, devices),
        collectives=tuple(placing.place(send) for send in sends_of(program, mesh, devices)),
        arguments=arguments_of(program, compiled, leaf_names, args),
        mesh=tuple(mesh.items()),
        devices=devices,
        total_params=network.total_params,
        memory=StepMemory(memory.total, memory.peak, memory.gaps, memory.is_exact) if memory is not None else None,
    )
    return graph, network


def _read(
    step: Callable[..., Any], args: tuple[Any, ...], params_argnums: Any, options: tuple[Any, ...]
) -> tuple[Program, Any, Net, dict[int, str]]:
    """The compiled program of a step, and its layers with their names."""
    try:
        raw = _trace.read(step, *args, params_argnums=params_argnums)
    except Exception as error:
        if str(error).startswith("viz: "):  # an argument that is no array, an option
            raise
        raise _failure(step, args, "traced", error) from error
    net = _trace.layers(raw, *options)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
            compiled = compile_from_source(jitted.lower(*args))
    except Exception as error:
        raise _failure(step, args, "compiled", error) from error
    return parse(compiled.as_text() or ""), compiled, net, name_drafts(net)


def _failure(step: Any, args: tuple[Any, ...], what: str, error: Exception) -> ValueError:
    """What went wrong, with the shapes that the step was given."""
    shown = [f"{_count(arg)} of shapes {_shapes(arg)}" for arg in args]
    given = "; ".join(f"argument {number}: {text}" for number, text in enumerate(shown))
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(f"trace_step: {_name(step)} cannot be {what} with these arguments ({given}): {first}")


def _count(arg: Any) -> str:
    count = len(jax.tree.leaves(arg))
    return f"{count} array{'s' * (count != 1)}"


def _shapes(arg: Any) -> str:
    leaves = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(arg)]
    return ", ".join(map(str, leaves[:4])) + (", ..." if len(leaves) > 4 else "")


def _name(step: Any) -> str:
    return getattr(step, "__name__", type(step).__name__)


def peaks_of(program: Program, places: Places, memory: Memory | None) -> dict[int, int]:
    """The most bytes that are live while an instruction of each draft runs."""
    found: dict[int, int] = {}
    for name, live in (memory.at if memory is not None else {}).items():
        for at in places.drafts_of(program[name]):
            found[at] = max(found.get(at, 0), live)
    return found


class _Parts:
    """Makes layers of rows."""

    def __init__(self, net: Net, names: dict[int, str], peaks: dict[int, int], seconds: dict[str, float]) -> None:
        self.net, self.names, self.peaks, self.seconds = net, names, peaks, seconds
        unknown = seconds.keys() - set(names.values())
        for name in sorted(unknown):
            hint = did_you_mean(name, list(names.values()))
            raise ValueError(f"trace_step: the profile has a layer {name!r}, which the step lacks{hint}")

    def layer(self, row: Row, params: int) -> StepLayer:
        draft = row.draft
        value = self.net.raw.values[draft.value]
        return StepLayer(
            name=self.names[draft.at],
            op=draft.op,
            detail=draft.detail,
            shape=value.shape,
            dtype=value.dtype,
            scope=draft.scope,
            source=draft.source,
            repeat=draft.repeat,
            params=params,
            weights=tuple(self.net.raw.values[weight].name for weight in draft.weights),
            forward=self._part([draft]),
            backward=self._part(row.backward) if row.backward else None,
        )

    def _part(self, drafts: list[Any]) -> StepPart:
        peaks = [self.peaks[draft.at] for draft in drafts if draft.at in self.peaks]
        seconds = [self.seconds[name] for draft in drafts if (name := self.names[draft.at]) in self.seconds]
        return StepPart(
            flops=sum(draft.flops for draft in drafts),
            bytes=sum(draft.bytes for draft in drafts),
            peak=max(peaks, default=None),
            seconds=sum(seconds) if seconds else None,
        )
