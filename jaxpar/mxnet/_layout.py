"""Arrays of MXNet in another order of their axes, and operators that take them so.

A network of layout "NHWC" has images as (batch, height, width, channels) and the weights of convolutions as (height,
width, in, out). An image stays so from operator to operator, as long as these commute with the change. Before any other
operator it is turned into MXNet's layout, so what a network computes is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from ._operators import Operator

IMAGES, KERNELS = (0, 2, 3, 1), (2, 3, 1, 0)  # MXNet's axes, in the order in which they are kept


@dataclasses.dataclass(frozen=True)
class Turned:
    """An array of MXNet with its axes in another order."""

    array: Any
    axes: tuple[int, ...]


def turn(array: Any, axes: tuple[int, ...]) -> Any:
    """An array of MXNet's order in this order. An array that has not four axes is the same in both."""
    return array.transpose(axes) if array.ndim == 4 else array


def back(array: Any, axes: tuple[int, ...]) -> Any:
    """An array of this order in MXNet's order."""
    return turn(array, tuple(np.argsort(axes)))


def wrap(array: Any, axes: tuple[int, ...]) -> Any:
    """An array that a network of this layout is given."""
    return Turned(array, axes) if array.ndim == 4 else array


def own(value: Any) -> Any:
    return back(value.array, value.axes) if isinstance(value, Turned) else value


def image(value: Any) -> Any:
    """A value of a network as one of layout NHWC."""
    if isinstance(value, Turned) and value.axes == IMAGES:
        return value.array
    return None if value is None else turn(own(value), IMAGES)


def run(
    operator: Operator,
    attrs: Mapping[str, Any],
    values: Sequence[Any],
    compute: Callable[[Sequence[Any], Mapping[str, Any]], Any],
) -> Any:
    """What an operator gives, by `compute(arrays, attributes)`: in the layout of its images where it can."""
    last = operator.last(attrs) if operator.last and any(isinstance(v, Turned) for v in values) else None
    data = values[:1] if operator.shapes else values  # the others are vectors and weights
    if last is None or not all(isinstance(v, Turned) or np.ndim(v) == 4 for v in data):
        return compute([own(v) for v in values], attrs)
    found = compute([image(v) for v in values], last)
    return jax.tree.map(lambda x: wrap(x, IMAGES), found)
