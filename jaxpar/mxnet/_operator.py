"""An operator of MXNet: what it computes, the shapes of its arrays, how it takes images.

It is a function of arrays, and of attributes by keyword. Two keywords are no attributes: `train` says whether the
network is being trained, and `rng` is a random key of this node.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

_BY_MODEL = frozenset(("train", "rng"))  # keywords that the model gives itself
Shape = tuple[int, ...]
Shapes = Callable[[Shape, Mapping[str, Any]], Mapping[str, Shape]]
Last = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
# The shapes of an operator's arrays, of those of its outputs, of its arrays as far as they are known, and attributes.
Back = Callable[[Sequence[Shape | None], Sequence[Shape | None], Mapping[str, Any]], Sequence[Shape | None]]


@dataclasses.dataclass(frozen=True)
class Operator:
    """What a node computes."""

    fn: Callable[..., Any]  # of its arrays and attributes
    shapes: Shapes | None = None  # of its other arrays, of the first one's shape and the attributes
    state: tuple[str, ...] = ()  # the last arrays, if they are running statistics. Then `fn` gives (outputs, new ones)
    # Of a loss layer, the shape of its label, of the first array's shape and the attributes. It is the array after the
    # first, and may be missing where nothing is trained.
    labels: Callable[[Shape, Mapping[str, Any]], Shape] | None = None
    # The attributes with which `fn` takes images whose channels are last, of those of the file. None, or a function
    # that gives None: such images have to be turned into MXNet's layout before.
    last: Last | None = None
    back: Back | None = None  # None: the shapes of its arrays do not follow from those of its outputs
    outputs: Callable[[Mapping[str, Any]], int] = lambda attrs: 1  # how many it gives, of all attributes
    # Of a loop or a branch, of its attributes: of each graph inside of the node the places of its variables among the
    # arrays of the node. `fn` is given the graphs as an attribute, `subgraphs`.
    graphs: Callable[[Mapping[str, Any]], Sequence[tuple[int, ...]]] | None = None

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.fn).parameters

    @functools.cached_property
    def slots(self) -> tuple[str, ...]:
        """The names of its arrays."""
        return tuple(n for n, p in self.parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))

    @functools.cached_property
    def attributes(self) -> Mapping[str, inspect.Parameter]:
        return {n: p for n, p in self.parameters.items() if p.kind == p.KEYWORD_ONLY and n not in _BY_MODEL}

    @functools.cached_property
    def by_model(self) -> frozenset[str]:
        """Which of `train` and `rng` it takes."""
        return _BY_MODEL & self.parameters.keys()


def dtype_of(name: str | None, default: str = "float32") -> np.dtype[Any]:
    """The dtype that an attribute names, as JAX keeps it: of 64 bits only where these are switched on."""
    return jax.dtypes.canonicalize_dtype(default if name in (None, "None") else name)


def row(
    fn: Callable[..., Any],
    last: Last | None = None,
    back: Back | None = None,
    outputs: Callable[[Mapping[str, Any]], int] = lambda attrs: 1,
    **forms: str,
) -> Operator:
    """An operator in one line. Its attributes are read as `forms` say, and else as their defaults are."""
    attributes = [p for p in inspect.signature(fn).parameters.values() if p.kind == p.KEYWORD_ONLY]
    fn.__annotations__ = {p.name: type(p.default).__name__ for p in attributes} | forms
    return Operator(fn, last=last, back=back, outputs=outputs)


def named(
    fn: Callable[..., Any],
    arrays: Sequence[str],
    attributes: Mapping[str, Any],
    *,
    forms: Mapping[str, str] | None = None,
    optional: bool = False,
    draws: bool = False,
) -> Callable[..., Any]:
    """A function of any arrays and attributes, with the names of those that it takes.

    `attributes` has their defaults. Each is read as `forms` says, and else as its default is. The arrays may be left
    out if they are `optional`. What `draws` takes `rng`.
    """
    kind = inspect.Parameter
    parameters = [kind(n, kind.POSITIONAL_OR_KEYWORD, default=None if optional else kind.empty) for n in arrays]
    for name, default in attributes.items():
        form = (forms or {}).get(name) or ("str | None" if default is None else type(default).__name__)
        parameters.append(kind(name, kind.KEYWORD_ONLY, default=default, annotation=form))
    if draws:
        parameters.append(kind("rng", kind.KEYWORD_ONLY))
    fn.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def same(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of operators that take images whose channels are last with the attributes that they have."""
    return attrs
