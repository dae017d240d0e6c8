"""`trace_step` and `plot_step`: from a step, its compiled program and a profile to its `StepGraph` and picture.

Begin with `read_step`: it traces and compiles the same function, and joins what both say.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

from ..._core import checks
from ..._core.arrays import PyTree
from ..._core.files import as_path
from ..._core.text import plural
from .._draw.style import Options
from .._fold.calls import Call
from .._fold.templates import Pattern, Rule
from .._function import check_picture, check_trace, drawn_for, read
from .._graph import BACKWARD, Graph
from .._layout.collapse import FEW_BOXES, close_until
from .._layout.net import Draft, Net, name_drafts, to_graph
from .._program.hlo import Program, program_of
from .._program.memory import StepMemory, memory_of
from .._program.sends import sends_of
from .._read.costs import Jaxpr
from .._trace import all_layers, close
from .closing import close_conditions, close_moves, join_scales, name_parts, open_remats
from .edges import arguments_of, device_count, edges_of, mesh_of
from .gathered import read_as_params
from .graph import StepGraph, StepLayer, StepPart
from .phases import Row, phases_of
from .places import Places
from .profile import Profile, check_profile, seconds_of
from .sent import Placing

if TYPE_CHECKING:
    from .picture import StepPlot

_HEATS = ("flop/byte", "memory")
_MOST_NODES = 200  # layers in a picture
_ROWS = (12, 10, 8, 6)  # of boxes, that a picture has at most until it fits a screen


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
    return read_step(
        step,
        args,
        params_argnums=params_argnums,
        profile=profile,
        depth=depth,
        max_nodes=max_nodes,
        repeats=repeats,
        rules=rules,
    )[0]


def plot_step(
    step: Callable[..., Any],
    *args: Any,
    title: str = "step",
    heat: Literal["flop/byte", "memory"] | Profile | None = None,
    height: Literal["memory"] | None = None,
    limit: int | None = None,
    theme: Literal["light", "dark"] = "light",
    time_limit: float = 30.0,
    params_argnums: int | Sequence[int] | None = 0,
    depth: int | None = None,
    max_nodes: int | Literal["screen"] | None = "screen",
    repeats: bool = True,
    rules: Sequence[Call | Pattern | Rule] = (),
) -> StepPlot:
    """Draw what a training step does on its devices.

    The forward pass is on the left and goes up. The backward pass is beside it and goes down. The parameters are a band
    between them, and the optimizer is on the right. Collectives are purple, on the edge where the compiled program
    sends the array. The step is compiled and not run.

    Args:
        step, args, params_argnums, depth, repeats, rules: as for `trace_step`.
        max_nodes: "screen": blocks are closed until a screen of 1280 × 900 pixels shows all at 60 %, unless `depth`,
            `height` or times are given. An int or None: as for `trace_step`.
        title: the text below the picture, and the file name for `render`.
        heat: colours the layers: "flop/byte"; "memory", the live bytes while a layer runs; a dict {layer: seconds}; or
            the directory of a profile of `jax.profiler.trace`.
        height: "memory": a box is as high as the bytes that are live while it runs, from 0. What remat computes again
            is marked.
        limit: with `height`, the bytes of a device. Boxes above it are red.
        theme: "light" or "dark".
        time_limit: seconds that the renderer may take.

    Returns:
        A `Plot` whose `step` is the `StepGraph`. `save("step.svg")` writes it.

    Raises:
        TypeError: as for `trace_step`; the title is not a str.
        ValueError: as for `trace_step`; theme, heat or height is unknown; the time limit is not above 0; a limit
            without `height`; this backend does not say which bytes are live.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def step(params, batch):
        ...     grads = jax.grad(lambda params: (batch @ params["w"]).sum())(params)
        ...     return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        >>> plot_step(step, {"w": jnp.ones((3, 2))}, jnp.ones((5, 3))).step.devices
        1
    """
    check_picture(Options(title, theme=theme), time_limit, "plot_step")
    if height is not None:
        checks.choice(height, "plot_step", "height", ("memory",))
    if limit is not None:
        checks.whole_number(limit, "plot_step", "limit", least=1)
        if height is None:
            raise ValueError('plot_step: limit is of height="memory", which makes boxes as high as the live bytes')
    named = isinstance(heat, str) and heat in _HEATS
    profile = None if named else heat
    if isinstance(profile, str) and not as_path(profile, "plot_step: heat").is_dir():
        raise ValueError(
            f"plot_step: heat must be one of {', '.join(_HEATS)}, a dict of layers and seconds, or the directory of a "
            f"profile, got {profile!r}"
        )
    from .picture import fits_screen  # loads graphviz

    on_screen = max_nodes == "screen" and depth is None and height is None and profile is None
    graph, network = read_step(
        step,
        args,
        params_argnums=params_argnums,
        profile=profile,
        depth=depth,
        max_nodes=_MOST_NODES if max_nodes == "screen" else max_nodes,
        repeats=repeats,
        rules=rules,
        fits=functools.partial(fits_screen, options=Options(title)) if on_screen else None,
    )
    shown = str(heat) if named else "seconds" if profile is not None else None
    parts = (part for layer in (*graph.layers, *graph.optimizers) for part in (layer.forward, layer.backward) if part)
    asks = 'height="memory"' if height is not None else 'heat="memory"' if shown == "memory" else None
    if asks is not None and all(part.peak is None for part in parts):
        why = "the compiler of these devices does not report"
        if not _is_one_program(step):
            why = "several programs of a step with virtual_shards have each for itself; train.plan says what they need"
        raise ValueError(f"plot_step: {asks} needs the places of arrays, which {why}")
    return plot_drawn(graph, network, title, shown, theme, time_limit, height, limit)


def plot_drawn(
    graph: StepGraph,
    network: Graph,
    title: str,
    heat: str | None = None,
    theme: str = "light",
    time_limit: float = 30.0,
    height: str | None = None,
    limit: int | None = None,
) -> StepPlot:
    """The picture of a step that is read already."""
    from .picture import StepPlot  # loads graphviz

    return StepPlot(graph, network, Options(title, heat=heat, theme=theme, height=height, limit=limit), time_limit)


def read_step(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    params_argnums: int | Sequence[int] | None = 0,
    profile: Profile | None = None,
    depth: int | None = None,
    max_nodes: int | None = _MOST_NODES,
    repeats: bool = True,
    rules: Sequence[Call | Pattern | Rule] = (),
    compiled: jax.stages.Compiled | None = None,
    fits: Callable[[StepGraph, Graph], bool] | None = None,
) -> tuple[StepGraph, Graph]:
    """The step and the network of the same function. Arguments and errors as of `trace_step`.

    `compiled` is the program of the step, where there is one already. Blocks are closed until the picture `fits`.
    """
    check_trace(step, len(args), params_argnums, depth, max_nodes, repeats, rules, what="trace_step")
    seconds_or_folder = check_profile(profile)
    # Layers come from the trace; what is sent and what is live come from the compiled program. `Places` says which
    # instruction is of which layer.
    traced, is_one_program = drawn_for(step), _is_one_program(step)
    if isinstance(seconds_or_folder, Path) and not is_one_program:
        raise ValueError(
            "trace_step: the host starts several programs for each step with virtual_shards, and a profile tells only "
            "those of one apart; give a dict of layers and seconds"
        )
    whole, jaxpr = _traced(step, traced, args, params_argnums, repeats, rules)
    compiled = compiled or _compiled(step, traced, args)
    program = program_of(compiled)
    # What is live in one program that joins several is live in none of them.
    memory = memory_of(program, compiled) if is_one_program else (None, dict[str, int]())
    # A picture that is too high is made again, of fewer rows.
    rows = iter(_ROWS)
    while True:
        net = whole.copy()
        close(net, depth, max_nodes)
        graph, network = _graph_of(step, args, net, jaxpr, compiled, program, memory, seconds_or_folder)
        if fits is None or fits(graph, network) or (fewer := next(rows, None)) is None:
            return graph, network
        close_until(whole, functools.partial(_has_rows, most=fewer), few=2 * FEW_BOXES)  # a row has two


def _is_one_program(step: Callable[..., Any]) -> bool:
    """Whether the host starts one program for each step, and not several as with virtual shards."""
    return not type(step).__module__.startswith("jaxpar.train.") or getattr(step, "virtual_shards", None) is None


def _has_rows(net: Net, most: int) -> bool:
    """Whether a step has at most so many rows, one for each layer of the forward pass."""
    return len(phases_of(net).rows) <= most


def _graph_of(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    net: Net,
    jaxpr: Jaxpr,
    compiled: jax.stages.Compiled,
    program: Program,
    memory_and_live: tuple[StepMemory | None, dict[str, int]],
    seconds_or_folder: Mapping[str, float] | Path | None,
) -> tuple[StepGraph, Graph]:
    """The step and the network of one net, and the program that was compiled for it."""
    mesh, devices = mesh_of(compiled, args, jaxpr), device_count(compiled)
    memory, live = memory_and_live
    names = name_drafts(net)
    places = Places(program, net, names)
    phases = places.phases
    if not any(row.backward for row in phases.rows):
        raise ValueError(
            f"trace_step: {_name(step)} computes no gradient. Give a whole training step, or draw it with plot_network"
        )
    placing = Placing(places)
    part = functools.partial(_part, places, _peaks(places, live), seconds_of(seconds_or_folder, places))
    leaf_names = [value.name for value in net.raw.values[: len(jax.tree.leaves(args))]]
    network = to_graph(net)
    counted = {node.name: node.params for node in network.nodes}
    graph = StepGraph(
        layers=tuple(_layer(places, row, counted, part) for row in phases.rows),
        optimizers=tuple(_layer(places, Row(draft), {}, part) for draft in phases.optimizers),
        edges=edges_of(places, mesh, devices),
        collectives=tuple(placing.place(send) for send in sends_of(program, mesh, devices)),
        arguments=arguments_of(program, compiled, leaf_names, args, mesh),
        mesh=tuple(mesh.items()),
        devices=devices,
        total_params=network.total_params,
        memory=memory,
    )
    return graph, network


def _traced(
    step: Callable[..., Any],
    traced: Callable[..., Any],
    args: tuple[Any, ...],
    params_argnums: int | Sequence[int] | None,
    repeats: bool,
    rules: Sequence[Call | Pattern | Rule],
) -> tuple[Net, Jaxpr]:
    """The layers of a step, and its jaxpr."""
    try:
        raw, jaxpr, _ = read(traced, args, {}, params_argnums)
    except Exception as error:
        if str(error).startswith("viz: "):  # an argument that is no array, an option
            raise
        raise _failure(step, args, "traced", error) from error
    read_as_params(raw)
    net = all_layers(raw, repeats, rules)
    if repeats and any(_joins_layers(draft) for draft in net.layers):
        # Gradients of gradients come again for layers that do not, and would all be of one of these.
        return _traced(step, traced, args, params_argnums, False, rules)
    open_remats(net)
    name_parts(net)
    join_scales(net)
    close_moves(net)
    close_conditions(net)
    return net, jaxpr


def _joins_layers(draft: Draft) -> bool:
    """Whether gradients of several layers are drawn as copies of one, and the layers are not."""
    return draft.op.endswith(BACKWARD) and draft.repeat > 1 and draft.layer.repeat == 1


def _compiled(step: Callable[..., Any], traced: Callable[..., Any], args: tuple[Any, ...]) -> jax.stages.Compiled:
    """The compiled program of a step."""
    jitted: Any = traced if hasattr(traced, "lower") else jax.jit(traced)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return compile_from_source(jitted.lower(*args))
    except Exception as error:
        raise _failure(step, args, "compiled", error) from error


def _failure(step: object, args: tuple[Any, ...], what: str, error: Exception) -> ValueError:
    """What went wrong, with the shapes that the step was given."""
    shown = [f"{plural(len(jax.tree.leaves(arg)), 'array')} of shapes {_shapes(arg)}" for arg in args]
    inputs = "; ".join(f"argument {number}: {text}" for number, text in enumerate(shown))
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(f"trace_step: {_name(step)} cannot be {what} with these arguments ({inputs}): {first}")


def _shapes(arg: PyTree) -> str:
    leaves = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(arg)]
    return ", ".join(map(str, leaves[:4])) + (", ..." if len(leaves) > 4 else "")


def _name(step: object) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _peaks(places: Places, live: dict[str, int]) -> dict[int, int]:
    """The most bytes that are live while an instruction of each draft runs."""
    peaks: dict[int, int] = {}
    for name, size in live.items():
        for at in places.drafts_of(places.program[name]):
            peaks[at] = max(peaks.get(at, 0), size)
    return peaks


def _layer(places: Places, row: Row, counted: dict[str, int], part: Callable[[list[Draft]], StepPart]) -> StepLayer:
    draft, values = row.draft, places.net.raw.values
    reads = [draft, *row.gathered]
    return StepLayer(
        name=places.names[draft.at],
        op=draft.op,
        detail=draft.detail,
        shape=values[draft.value].shape,
        dtype=values[draft.value].dtype,
        scope=draft.scope,
        source=draft.source,
        repeat=draft.repeat,
        params=sum(counted.get(places.names[each.at], 0) for each in reads),
        weights=tuple(values[weight].name for each in reads for weight in each.weights),
        forward=part([draft]),
        backward=part(row.backward) if row.backward else None,
    )


def _part(places: Places, peaks: dict[int, int], seconds: dict[str, float], drafts: list[Draft]) -> StepPart:
    names, eqns = places.names, places.net.raw.eqns
    measured = [seconds[names[draft.at]] for draft in drafts if names[draft.at] in seconds]
    return StepPart(
        flops=sum(draft.flops for draft in drafts),
        bytes=sum(draft.bytes for draft in drafts),
        peak=max((peaks[draft.at] for draft in drafts if draft.at in peaks), default=None),
        seconds=sum(measured) if measured else None,
        again=any(eqns[number].again for draft in drafts for number in draft.eqns),
    )


_IN_KEY = "jax_compilation_cache_include_metadata_in_key"
_LOCK = threading.Lock()
_DEFAULT: dict[str, Any] = {"xla_dump_hlo_as_text": False}  # with any option jax compiles again what it has compiled


def compile_from_source(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
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
