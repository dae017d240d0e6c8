"""The shapes of arrays that MXNet infers: of an operator's weights, of its label, and back from what it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._layers import parameter_count
from ._operator import Back, Shape, Shapes

# Of weights, by the shape of an operator's first array


def convolution(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    last = (attrs.get("layout") or "NC").endswith("C") and "layout" in attrs
    channels = (data[-1] if last else data[1]) // attrs.get("num_group", 1)
    count, kernel = attrs["num_filter"], attrs["kernel"]
    return {"weight": (count, *kernel, channels) if last else (count, channels, *kernel), "bias": (count,)}


def deconvolution(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    count = attrs["num_filter"]
    return {"weight": (data[1], count // attrs.get("num_group", 1), *attrs["kernel"]), "bias": (count,)}


def dense(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    inputs = math.prod(data[1:]) if attrs.get("flatten", True) else data[-1]
    return {"weight": (attrs["num_hidden"], inputs), "bias": (attrs["num_hidden"],)}


def up_sampling(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    size = 2 * attrs["scale"] - attrs["scale"] % 2
    return {"weight": (data[1], 1, size, size)} if attrs["sample_type"] == "bilinear" else {}


def channels(axis: int) -> Shapes:
    def shapes(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
        channels = (data[attrs.get("axis", axis)],)
        return dict.fromkeys(("gamma", "beta", "moving_mean", "moving_var"), channels)

    return shapes


def recurrent(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    directions = 2 if attrs.get("bidirectional") else 1
    hidden, depth = attrs["state_size"], attrs["num_layers"]
    projection = attrs.get("projection_size")
    count = parameter_count(attrs["mode"], data[2], hidden, depth, directions, projection)
    cell = (depth * directions, data[1], hidden)
    state = (*cell[:2], hidden if projection is None else projection)
    lengths = data[1:2] if attrs.get("use_sequence_length") else ()
    fourth = {"state_cell": cell if attrs["mode"] == "lstm" else lengths}  # the lengths are behind the states
    return {"parameters": (count,), "state": state, **fourth, "sequence_length": lengths}


def deformable(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    channels = data[1] // attrs.get("num_group", 1)
    return {"weight": (attrs["num_filter"], channels, *attrs["kernel"]), "bias": (attrs["num_filter"],)}


# The shapes of labels, as MXNet infers them: first from what is predicted, then back to the variable


def label_of_softmax(data: Shape, attrs: Mapping[str, Any]) -> Shape:
    return (data[0], math.prod(data[2:])) if attrs.get("multi_output") else data[:-1]


def label_of_regression(data: Shape, attrs: Mapping[str, Any]) -> Shape:
    return data[:1] if len(data) == 2 and data[1] == 1 else data


# Back from the outputs to the arrays


def back_same(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    """Of operators whose arrays and outputs have one shape."""
    shape = next((shape for shape in (*outputs, *arrays) if shape is not None), None)
    return [shape] * len(arrays)


def back_of_one(function: Callable[[Shape, Mapping[str, Any]], Shape | None]) -> Back:
    """Of operators with one array, whose shape is a function of that of an output."""

    def back(
        outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
    ) -> Sequence[Shape | None]:
        output = next((shape for shape in outputs if shape is not None), None)
        return [None if output is None else function(output, attrs)]

    return back


def back_transposed(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    axes = attrs.get("axes") or range(len(shape))[::-1]
    return tuple(shape[list(axes).index(i)] for i in range(len(shape)))


def back_swapped(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    swapped = list(shape)
    a, b = attrs.get("dim1", 0), attrs.get("dim2", 0)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return tuple(swapped)


def back_expanded(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    axis = attrs["axis"] % len(shape)
    return shape[:axis] + shape[axis + 1 :]


def back_split(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    count, axis = attrs["num_outputs"], attrs.get("axis", 1)
    if attrs.get("squeeze_axis"):
        axis %= len(shape) + 1
        return (*shape[:axis], count, *shape[axis:])
    axis %= len(shape)
    return (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])


def back_flat(shape: Shape, attrs: Mapping[str, Any]) -> Shape | None:
    """What is reshaped to a shape that keeps its axes is known, and what is reshaped to (-1,) is not."""
    codes = attrs.get("shape") or ()
    plain = not attrs.get("reverse") and len(codes) == len(shape) and all(n == 0 for n in codes)
    return shape if plain else None


def back_joined(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    """Of Concat: an array that is alone unknown has what the others leave."""
    output, missing = outputs[0], [i for i, shape in enumerate(arrays) if shape is None]
    inferred = list(arrays)
    if output is not None and len(missing) == 1:
        axis = attrs.get("dim", 1) % len(output)
        left = output[axis] - sum(shape[axis] for shape in arrays if shape is not None)
        inferred[missing[0]] = (*output[:axis], left, *output[axis + 1 :])
    return inferred


def back_packed(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    """Of the packed weights of a recurrent layer: as in MXNet, the vectors that are unknown have equal lengths."""
    missing, output = arrays.count(None), outputs[0]
    if output is None or not missing:
        return arrays
    length = (output[0] - sum(shape[0] for shape in arrays if shape is not None)) // missing
    return [(length,) if shape is None else shape for shape in arrays]


def back_stacked(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    output = outputs[0]
    return [None if output is None else back_expanded(output, {"axis": attrs.get("axis", 0)})] * len(arrays)
