"""The words in the picture of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._draw.labels import cut, own_name, shape_text
from .._graph import Node, human
from .graph import Collective, StepArgument, StepEdge, StepGraph, StepLayer, StepPart


def spec_text(spec: tuple[str, ...] | None) -> str:
    """ "(data, –)" for what is split over "data" along its first dimension. Empty for what is not split.

    >>> spec_text(("data", ""))
    '(data, –)'
    """
    if spec is None or not any(spec):
        return ""
    return f"({', '.join(part or '–' for part in spec)})"


def edge_text(edge: StepEdge) -> tuple[str, ...]:
    """The lines beside an edge: the shape, and each device's part of it."""
    spec = spec_text(edge.spec)
    kind = "" if edge.dtype in ("float32", "") else f" {edge.dtype}"
    first = f"{shape_text(edge.shape)}{kind}"
    return (first, spec) if spec else (first,)


def sends_text(collectives: Sequence[Collective], mesh: dict[str, int]) -> list[str]:
    """One line for each kind of collective and its axes: "all-reduce 1.2 MB over data=4"."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for one in collectives:
        over = ", ".join(f"{name}={mesh[name]}" for name in one.axes) or f"{one.devices} devices"
        groups.setdefault((one.kind, over), []).append(one)
    return [_send_text(kind, over, group) for (kind, over), group in groups.items()]


def _send_text(kind: str, over: str, group: list[Collective]) -> str:
    runs, size = sum(one.times for one in group), human(sum(one.total_bytes for one in group), "B")
    least = "" if all(one.is_exact for one in group) else "at least "
    return f"{kind} {least}{size} over {over}" + (f", {runs} times" if runs > 1 else "")


def weights_text(layer: StepLayer, arguments: Iterable[StepArgument]) -> list[str]:
    """The lines of a cell of the band: how many parameters, and how they are split."""
    named = {argument.name: argument for argument in arguments}
    mine = [named[name] for name in layer.weights if name in named]
    specs = list(dict.fromkeys(text for one in mine if (text := spec_text(one.spec))))
    return [f"{layer.params:,} params", *specs[:2]]


def layer_lines(layer: StepLayer, part: StepPart, heat: str | None, *, backward: bool) -> list[tuple[str, bool]]:
    """The lines of a box, and whether each is bold. A layer is called as in `plot_network`."""
    name = own_name(Node(layer.name, layer.op, layer.detail, scope=layer.scope))
    if backward:
        words = [name or layer.op, "backward"]
    else:
        words = [name, f"{layer.op} {layer.detail}".strip()] if name else [layer.op, layer.detail]
    lines = [(cut(text), number == 0) for number, text in enumerate(words)]
    if heat is not None and heat != "memory":
        lines.append((cost_text(part, heat), False))
    if part.peak is not None:
        lines.append((f"{human(part.peak, 'B')} live", False))
    return [line for line in lines if line[0]]


def cost(part: StepPart, heat: str | None) -> float:
    """What `heat` colours by."""
    found = {"seconds": part.seconds, "flop/byte": part.flops_per_byte, "memory": part.peak}.get(heat or "")
    return found or 0.0


def cost_text(part: StepPart, heat: str) -> str:
    """ "1.2 ms", "3.4 FLOP/B". Empty where it is not known."""
    if heat == "seconds":
        return human_seconds(part.seconds) if part.seconds is not None else ""
    return f"{part.flops_per_byte:.3g} FLOP/B" if heat == "flop/byte" else ""


def human_seconds(seconds: float) -> str:
    """A time with three digits.

    >>> human_seconds(0.00123)
    '1.23 ms'
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def caption_lines(graph: StepGraph, heat: str | None) -> list[str]:
    """The lines below the title."""
    mesh = ", ".join(f"{name}={size}" for name, size in graph.mesh)
    where = f"{graph.devices} device{'s' * (graph.devices != 1)}" + (f" ({mesh})" if mesh else "")
    sent = f"{human(graph.total_bytes, 'B')} handed in to collectives by each" if graph.collectives else "nothing sent"
    lines = [f"{graph.total_params:,} parameters · {where} · {sent}"]
    if graph.memory is not None:
        memory = f"memory of a device: {human(graph.memory.total, 'B')}, live at most {human(graph.memory.peak, 'B')}"
        lines.append(memory)
    if heat is not None:
        lines.append(f"colour: {heat}, white is none, red the most of all")
    return lines
