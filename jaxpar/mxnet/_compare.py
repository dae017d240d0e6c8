"""Where a network differs from MXNet's own outputs: the first layer, and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ._graph import Graph, Node

_TOLERANCE, _TOLERANCE_OF_16_BITS = 1e-4, 1e-2


@dataclasses.dataclass(frozen=True)
class Difference:
    """A layer whose output is not MXNet's. Its text says the same.

    Attributes:
        name, op: of the node.
        shape, expected_shape: of its output here, and in MXNet.
        max_abs: the largest difference. NaN where the shapes differ.
        relative: that over the largest absolute value of MXNet's output.
        index: where it is. value, expected: the numbers there, here and in MXNet.
        equal: how many layers before it give what they give in MXNet.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    expected_shape: tuple[int, ...]
    max_abs: float
    relative: float
    index: tuple[int, ...]
    value: float
    expected: float
    equal: int

    def __str__(self) -> str:
        before = f"{self.op} {self.name!r} differs from MXNet, after {self.equal} equal layers: "
        if self.shape != self.expected_shape:
            return f"{before}its output has the shape {self.shape}, in MXNet {self.expected_shape}"
        at = f"{self.value:.7g} in place of {self.expected:.7g} at {self.index}"
        return f"{before}by up to {self.max_abs:.3g}, {self.relative:.2g} of the largest value: {at}, {self.shape}"


def first_difference(
    graph: Graph,
    run: Callable[[int, Sequence[Any]], Sequence[Any]],
    arrays: Mapping[str, Any],
    reference: Mapping[str, Any],
    tolerance: float | None,
) -> Difference | None:
    """The first node whose output is not that of the reference. Each gets the values of the reference.

    Args:
        run: the outputs of a node, of its number and the values that it takes.
        arrays: by the names of variables.
        reference: outputs by MXNet's names.

    Raises:
        ValueError: the reference has no output of the network.
    """
    values: list[list[Any]] = []
    equal = 0
    for number, node in enumerate(graph.nodes):
        if node.is_variable:
            values.append([arrays.get(node.name)])
            continue
        outputs = list(run(number, [values[i][k] for i, k in node.inputs]))
        for k, output in enumerate(outputs):
            names = (f"{node.name}_output", f"{node.name}_output0") if k == 0 else (f"{node.name}_output{k}",)
            expected = next((np.asarray(reference[name]) for name in names if name in reference), None)
            if expected is None:
                continue
            if (difference := _difference(node, np.asarray(output), expected, tolerance, equal)) is not None:
                return difference
            outputs[k], equal = expected, equal + 1
        values.append(outputs)
    if not equal:
        raise ValueError(f"Model.compare: the reference has no output of the network, but {list(reference)[:8]}")
    return None


def _difference(
    node: Node, here: np.ndarray, there: np.ndarray, tolerance: float | None, equal: int
) -> Difference | None:
    shapes = here.shape, there.shape
    if here.shape != there.shape:
        return Difference(node.name, node.op, *shapes, np.nan, np.nan, (), np.nan, np.nan, equal)
    if tolerance is None:
        tolerance = _TOLERANCE_OF_16_BITS if min(here.dtype.itemsize, there.dtype.itemsize) == 2 else _TOLERANCE
    a, b = here.astype(np.float64), there.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
    gap = np.where(np.isnan(gap), np.inf, gap)
    largest = float(np.abs(b[np.isfinite(b)]).max(initial=0))
    if gap.max(initial=0) <= tolerance * largest:
        return None
    at = np.unravel_index(gap.argmax(), gap.shape)
    relative = float(gap[at]) / largest if largest else np.inf
    index = tuple(int(i) for i in at)
    return Difference(node.name, node.op, *shapes, float(gap[at]), relative, index, float(a[at]), float(b[at]), equal)
