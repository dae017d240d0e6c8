"""What a step returns beside its new state: how each result is called, and the layers that it is computed from."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Mapping

from .._fold.cells import COLLECTIVES, plain_name
from .._layout.net import Draft, Net
from .._read.raw import Eqn, Raw

_OBJECT = re.compile(r"^output(\[\d+\])?\.")
_ARGUMENT = re.compile(r"^output(\[\d+\])?")
_KEY = re.compile(r"\['([^']+)'\]|\.(\w+)")


def results_of(raw: Raw) -> dict[str, str]:
    """The results that are no new state, and how each is called: "loss" for "output[1]['loss']", "" for "output[2]".

    A new state has the path below its argument, the shape and the dtype of an old one.
    """
    old = {
        (value.name.removeprefix(value.argument), value.shape, value.dtype)
        for value in raw.values
        if value.kind in ("weight", "input")
    }
    new = {
        name
        for name, number in zip(raw.output_names, raw.outputs, strict=True)
        for tail in (name.removeprefix("output"), _ARGUMENT.sub("", name))
        if (tail, raw.values[number].shape, raw.values[number].dtype) in old
    }
    # The first step of a run may add fields to an object, such as what it notes of a NaN.
    objects = {match[0] for name in new if (match := _OBJECT.match(name))}
    results: dict[str, str] = {}
    for name in raw.output_names:
        match = _OBJECT.match(name)
        if name not in new and not (match and match[0] in objects):
            keys = _KEY.findall(name)
            results[name] = "".join(keys[-1]) if keys else ""
    return results


_Part = tuple[int, int] | None  # the elements of an array of one axis that are meant: from and to. None for all.


def layers_below(net: Net, result: int, layers: Container[int]) -> tuple[set[int], set[int]]:
    """The nearest of these layers that a result is computed from, and the arguments that it reads without them.

    Devices sum small arrays in one bucket. Of what is cut out of it, only that is meant which was put in there. Whether
    a number is finite, one bool, is not computed from it.
    """
    raw, owner = net.raw, {number: draft.at for draft in net.layers for number in draft.eqns}
    found, arguments, work = set[int](), set[int](), list[tuple[int, _Part]]([(result, None)])
    seen = set(work)
    while work:
        value, part = work.pop()
        shown = [raw.values[number] for number in raw.shown(value)]
        producer = shown[-1].producer
        arguments |= {raw.root(value)} if producer is None else set[int]()
        if producer is None or (value != result and (shown[-1].dtype, shown[-1].shape) == ("bool", ())):
            continue
        at = owner.get(producer)
        if at is not None and at in layers:
            found.add(at)
            continue
        is_whole = len({math.prod(array.shape) for array in shown}) > 1  # a view of another size, as by broadcasting
        new = {*_operands(raw, raw.eqns[producer], raw.root(value), None if is_whole else part)} - seen
        seen |= new
        work += new
    return found, arguments


def _operands(raw: Raw, eqn: Eqn, out: int, part: _Part) -> list[tuple[int, _Part]]:
    """What a part of a result is computed from: which part of which operands."""
    if plain_name(eqn.prim) in COLLECTIVES and len(eqn.ins) == len(eqn.outs):
        return [(eqn.ins[eqn.outs.index(out)], part)]
    if eqn.prim == "slice" and len(eqn.out_shape) == 1 and eqn.params["strides"] in (None, (1,)):
        start = eqn.params["start_indices"][0]
        low, high = part or (0, eqn.out_shape[0])
        return [(eqn.ins[0], (start + low, start + high))]
    if eqn.prim == "concatenate" and len(eqn.out_shape) == 1 and part is not None:
        begin, operands = 0, list[tuple[int, _Part]]()
        for value, (length,) in zip(eqn.ins, eqn.in_shapes, strict=True):
            low, high = max(part[0] - begin, 0), min(part[1] - begin, length)
            operands += [(value, (low, high))] if low < high else []
            begin += length
        return operands
    same_size = math.prod(raw.values[out].shape)
    return [
        (value, part if math.prod(shape) == same_size else None)
        for value, shape in zip(eqn.ins, eqn.in_shapes, strict=False)
    ]


def metrics_of(
    net: Net, layers: Mapping[int, Draft], losses: Collection[int], ends: Container[int]
) -> dict[str, list[int]]:
    """The name of each result that is computed from layers and is no new state, and these layers. The loss comes first.

    `losses` are the layers that may be the loss, and `ends` where no way goes on: at the layers and at updates.
    """
    results, metrics = results_of(net.raw), dict[str, list[int]]()
    params = {weight for draft in layers.values() for weight in draft.weights}
    for name, number in zip(net.raw.output_names, net.raw.outputs, strict=True):
        if name not in results:
            continue
        found, arguments = layers_below(net, number, ends)
        below = sorted(layers.keys() & found)
        if losses and not (found or params.isdisjoint(arguments)):  # of a pass of its own, which is not drawn
            below = [max(losses)]
        if below:
            is_loss = net.raw.of(number).shape == () and not found.isdisjoint(losses)
            shown = results[name] or ("loss" if is_loss else name)
            metrics[name if shown in metrics else shown] = below
    return dict(sorted(metrics.items(), key=lambda metric: metric[0] != "loss"))
