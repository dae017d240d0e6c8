"""What the arrays of a net take, and which parameters are trained."""

from __future__ import annotations

import math
import re

from .._graph import BACKWARD
from .._read.raw import Raw
from .._sizes import Sizes
from .net import Draft, Net

_LOOP = re.compile(r"scan ×(\d+)")


def sizes_of(net: Net) -> Sizes:
    """The sizes of a net, before anything in it is collapsed."""
    raw = net.raw
    numbers = {kind: [n for n, v in enumerate(raw.values) if v.kind == kind] for kind in ("weight", "input")}
    used = {weight for draft in net.drafts for weight in draft.weights}
    state = {weight for weight in used if raw.values[weight].state}
    params = used - net.state - state
    steps = _read_by_optimizer(net) if any(eqn.backward for eqn in raw.eqns) else set[int]()
    loose = {number for number in numbers["input"] if number in steps}
    return Sizes(
        params=_bytes(raw, params),
        inputs=_bytes(raw, set(numbers["input"]) - loose),
        optimizer=_bytes(raw, loose | net.state),
        forward=sum(_output(net, draft) for draft in net.layers if not draft.op.endswith(BACKWARD)),
        backward=sum(_output(net, draft) for draft in net.layers if draft.op.endswith(BACKWARD)),
        trained=frozenset(raw.values[weight].name for weight in trained(raw, params)),
        unused=sum(
            math.prod(raw.values[number].shape) for number in set(numbers["weight"]) - used if _is_given(raw, number)
        ),
        state=_bytes(raw, state),
    )


def trained(raw: Raw, params: set[int]) -> set[int]:
    """The parameters whose results depend on the backward pass. All of them where there is none."""
    if not any(eqn.backward for eqn in raw.eqns):
        return params
    names = dict(zip(raw.output_names, raw.outputs, strict=True))
    results = {weight: _results(raw, names, weight) for weight in params}
    if not any(results.values()):  # the gradients stay inside
        return params
    depends = _depends_on_backward(raw)
    return {weight for weight in params if any(raw.root(value) in depends for value in results[weight])}


def _results(raw: Raw, names: dict[str, int], weight: int) -> list[int]:
    """The results that have the path and the shape of a parameter: its gradient, or its new value."""
    value = raw.values[weight]
    start = re.search(r"[\[.]", value.name)
    tail = value.name[start.start() :] if start else ""
    return [n for name, n in names.items() if name.endswith(tail) and raw.values[n].shape == value.shape]


def _depends_on_backward(raw: Raw) -> set[int]:
    """The values that an equation of the backward pass computes from another value, and all computed from those."""
    found: set[int] = set()
    for eqn in raw.eqns:
        roots = [raw.root(value) for value in eqn.ins]
        reads = any(raw.values[root].kind not in ("literal", "const") for root in roots)
        if (eqn.backward and reads) or any(root in found for root in roots):
            found.update(raw.root(out) for out in eqn.outs)
    return found


def _read_by_optimizer(net: Net) -> set[int]:
    """The inputs from which neither a differentiated layer nor a gradient is reached."""
    layers = {draft.forward.at for draft in net.drafts if draft.forward is not None}
    reached = {draft.at for draft in net.drafts if draft.at in layers or draft.op.endswith(BACKWARD)}
    readers, waiting = net.sources(), list(reached)
    while waiting:
        for source in readers.get(waiting.pop(), ()):
            if source not in reached:
                reached.add(source)
                waiting.append(source)
    numbers = {draft.at: draft.value for draft in net.drafts if draft.op == "input"}
    return {value for at, value in numbers.items() if at not in reached}


def _output(net: Net, draft: Draft) -> int:
    """Bytes of the output of a layer, in each turn of the loops around it."""
    turns = math.prod(int(match[1]) for scope in draft.scope if (match := _LOOP.match(scope)))
    return net.raw.values[draft.value].bytes * turns


def _is_given(raw: Raw, number: int) -> bool:
    """Whether a weight is a parameter in an argument."""
    return not raw.values[number].captured and not raw.values[number].state


def _bytes(raw: Raw, numbers: set[int]) -> int:
    return sum(raw.values[number].bytes for number in numbers)
