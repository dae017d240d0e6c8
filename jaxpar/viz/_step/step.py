"""`trace_step` and `plot_step`: from a step and its compiled program to its `StepGraph` and picture."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

from ..._core.calls import answers
from ..._core.text import did_you_mean, plural
from ...viz import _trace
from .._draw.style import Options
from .._fold.calls import Call
from .._fold.templates import Pattern, Rule
from .._graph import Graph
from .._layout.net import Net, name_drafts, to_graph
from .._options import check_picture, check_trace
from .._program.hlo import Program, parse
from .._program.memory import Memory, memory_of
from .._program.sends import sends_of
from .edges import arguments_of, device_count, edges_of, mesh_of
from .graph import StepGraph, StepLayer, StepMemory, StepPart
from .phases import Row, phases_of
from .places import Places, Placing
from .profile import Profile, check_profile, is_folder, seconds_of

if TYPE_CHECKING:
    from .dot import StepPlot

_HEATS = ("flop/byte", "memory")


@answers("trace_step")
def trace_step(
    step: Callable[..., Any],
    *args: Any,
    params_argnums: int | Sequence[int] | None = 0,
    profile: Profile | None = None,
    depth: int | None = None,
    max_nodes: int | None = 200,
    repeats: bool = True,
    rules: Sequence[Call | Pattern | Rule] = (),
) -> StepGraph:
    """Read a training step on its devices from its compiled program.

    The step is traced and compiled, and not run. Layers are found as in `trace`. Collectives, live memory and the parts
    of arrays on each device come from XLA's program, so that automatic sharding is included.

    Args:
        step: a step of `jaxpar.train`, or any function that computes gradients, jitted or not: `step(state, batch)`,
            `step(params, opt_state, batch)`.
        args: the arguments of the step, on the devices of the step.
        params_argnums: the numbers of the arguments with parameters.
        profile: a dict of seconds by layer ("conv1", "conv1 (backward)"), or a directory that `jax.profiler.trace`
            wrote while this step ran.
        depth, max_nodes, repeats, rules: as for `trace`.

    Raises:
        TypeError: an argument is not an array; an option, or the seconds of a layer, have the wrong type.
        ValueError: an option is out of range; the step cannot be traced or compiled with these arguments, or computes
            no gradient; the profile has an unknown layer, or no time of this step.

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


@answers("plot_step")
def plot_step(
    step: Callable[..., Any],
    *args: Any,
    title: str = "step",
    heat: Literal["flop/byte", "memory"] | Profile | None = None,
    theme: Literal["light", "dark"] = "light",
    time_limit: float = 30.0,
    params_argnums: int | Sequence[int] | None = 0,
    depth: int | None = None,
    max_nodes: int | None = 200,
    repeats: bool = True,
    rules: Sequence[Call | Pattern | Rule] = (),
) -> StepPlot:
    """Draw what a training step does on its devices.

    The forward pass is on the left and goes up. The backward pass is beside it and goes down. The parameters are a band
    between them, and the optimizer is on the right. Collectives are purple, on the edge where the compiled program
    sends the array. The step is compiled and not run.

    Args:
        step, args, params_argnums, depth, max_nodes, repeats, rules: as for `trace_step`.
        title: the text below the picture, and the file name for `render`.
        heat: colours the layers: "flop/byte"; "memory", the live bytes while a layer runs; a dict {layer: seconds}; or
            the directory of a profile of `jax.profiler.trace`.
        theme: "light" or "dark".
        time_limit: seconds that the renderer may take.

    Returns:
        A `Plot` whose `step` is the `StepGraph`. `save("step.svg")` writes it.

    Raises:
        TypeError: as for `trace_step`; the title is not a str.
        ValueError: as for `trace_step`; theme or heat is unknown; the time limit is not above 0.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def step(params, batch):
        ...     grads = jax.grad(lambda params: (batch @ params["w"]).sum())(params)
        ...     return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        >>> plot_step(step, {"w": jnp.ones((3, 2))}, jnp.ones((5, 3))).step.devices
        1
    """
    check_picture(title, None, theme, None, time_limit, True, True, "up", what="plot_step")
    named = isinstance(heat, str) and heat in _HEATS
    profile = None if named else heat
    if isinstance(profile, str) and not is_folder(profile):
        raise ValueError(
            f"plot_step: heat must be one of {', '.join(_HEATS)}, a dict of layers and seconds, or the directory of a "
            f"profile, got {profile!r}"
        )
    options = (depth, max_nodes, repeats, rules)
    graph, network = read_step(step, args, params_argnums, profile, options)
    shown = str(heat) if named else "seconds" if profile is not None else None
    return plot_drawn(graph, network, title, shown, theme, time_limit)


def plot_drawn(
    graph: StepGraph,
    network: Graph,
    title: str,
    heat: str | None = None,
    theme: str = "light",
    time_limit: float = 30.0,
) -> StepPlot:
    """The picture of a step that is read already."""
    from .dot import StepPlot  # loads graphviz

    return StepPlot(graph, network, Options(title, heat=heat, theme=theme), time_limit)


def read_step(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    params_argnums: Any,
    profile: Any,
    options: tuple[Any, ...],
    compiled: Any = None,
) -> tuple[StepGraph, Graph]:
    """The step and the network of the same function. Arguments and errors as of `trace_step`.

    `compiled` is the program of the step, where there is one already.
    """
    check_trace(step, len(args), params_argnums, *options, what="trace_step")
    check_profile(profile)
    program, compiled, net, names = _read(step, args, params_argnums, options, compiled)
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
    step: Callable[..., Any], args: tuple[Any, ...], params_argnums: Any, options: tuple[Any, ...], compiled: Any
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
            if compiled is None:
                jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
                compiled = compile_from_source(jitted.lower(*args))
    except Exception as error:
        raise _failure(step, args, "compiled", error) from error
    return parse(compiled.as_text() or ""), compiled, net, name_drafts(net)


def _failure(step: Any, args: tuple[Any, ...], what: str, error: Exception) -> ValueError:
    """What went wrong, with the shapes that the step was given."""
    shown = [f"{plural(len(jax.tree.leaves(arg)), 'array')} of shapes {_shapes(arg)}" for arg in args]
    given = "; ".join(f"argument {number}: {text}" for number, text in enumerate(shown))
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(f"trace_step: {_name(step)} cannot be {what} with these arguments ({given}): {first}")


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


_IN_KEY = "jax_compilation_cache_include_metadata_in_key"
_LOCK = threading.Lock()
_DEFAULT: dict[str, Any] = {"xla_dump_hlo_as_text": False}  # with any option jax compiles again what it has compiled


def compile_from_source(lowered: Any) -> Any:
    """The compiled program of a lowered one, with the names and lines that it was lowered from.

    jax's persistent compilation cache takes no account of them. What it gives may have been compiled from the same
    operations in other lines, or in another directory. So with such a cache it is compiled again, under a key that has
    the lines.
    """
    config: Any = jax.config
    if not (config.jax_enable_compilation_cache and config.jax_compilation_cache_dir):
        return lowered.compile()
    with _LOCK:
        before = getattr(config, _IN_KEY)
        config.update(_IN_KEY, True)
        try:
            return lowered.compile(compiler_options=_DEFAULT)
        finally:
            config.update(_IN_KEY, before)
