"""What is written in the boxes of a step's picture and beside its edges, and what its colours are of."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .._draw import style
from .._draw.style import Options, cut, own_name
from .._graph import Node, human
from .graph import StepArgument, StepEdge, StepLayer, StepPart, spec_text
from .marks import Line, size


def tooltip(layer: StepLayer, part: StepPart) -> str:
    lines = [f"{layer.name}: {layer.op} {layer.detail}".strip(), f"{part.flops:,} FLOP, {part.bytes:,} B"]
    lines += [f"{part.peak:,} bytes live on a device"] if part.peak is not None else []
    lines += [f"{part.seconds:.3g} s"] if part.seconds is not None else []
    return "\n".join([*lines, layer.source])


def edge_text(edge: StepEdge) -> list[Line]:
    """The line beside an edge: the shape, and how it is split."""
    kind = "" if edge.dtype in ("float32", "") else f" {edge.dtype}"
    return [(f"{style.shape_text(edge.shape)}{kind} {spec_text(edge.spec)}".strip(), "plain")]


def weights_text(layer: StepLayer, arguments: Iterable[StepArgument]) -> list[Line]:
    """The lines of a cell of the band: how many parameters, and how they are split."""
    specs_of = {argument.name: spec_text(argument.spec) for argument in arguments if argument.name in layer.weights}
    specs = dict.fromkeys(specs_of[name] for name in layer.weights if specs_of.get(name))
    return [(text, "plain") for text in (f"{layer.params:,} params", *list(specs)[:2])]


def layer_lines(
    layer: StepLayer, part: StepPart, options: Options, *, backward: bool, room: float = math.inf
) -> list[Line]:
    """The lines of a box. A layer is called as in `plot_network`.

    Where the lines need more than `room`, in points, its name and its live bytes stay, at least as one line.
    """
    name = own_name(Node(layer.name, layer.op, layer.detail, scope=layer.scope))
    op = "on a condition" if layer.op == "cond" else layer.op
    if backward:
        texts = [name or layer.op, "backward"]
    else:
        texts = [name, f"{op} {layer.detail}".strip()] if name else [op, layer.detail]
    lines = [(cut(text), "plain" if number else "big") for number, text in enumerate(texts)]
    heat, by_memory = options.heat, options.height == "memory" or options.heat == "memory"
    if heat == "seconds" and part.seconds is not None:
        lines.append((human_seconds(part.seconds), "plain"))
    lines += [(f"{part.flops_per_byte:.3g} FLOP/B", "plain")] if heat == "flop/byte" else []
    # A box as high as its bytes may be too low for all lines. Its frame says too what is computed again.
    amount = human(part.peak, "B") if by_memory and part.peak is not None else ""
    live = (f"{amount} live", "plain")
    lines += [live] if amount else []
    lines += [("computed again (remat)", "plain")] if options.height == "memory" and backward and part.again else []
    lines = [line for line in lines if line[0]]
    while size(lines)[1] > room and len(lines) > 2:
        lines.remove(next(line for line in reversed(lines) if line != live))
    return lines if size(lines)[1] <= room else [(f"{lines[0][0]}, {amount}", "plain")]


def cost(part: StepPart, heat: str | None) -> float:
    """What `heat` colours by."""
    amount = {"seconds": part.seconds, "flop/byte": part.flops_per_byte, "memory": part.peak}.get(heat or "")
    return amount or 0.0


def human_seconds(seconds: float) -> str:
    """A time with three digits.

    >>> human_seconds(0.00123)
    '1.23 ms'
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
