"""The flat form of a function: its values and equations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .source import Frame


@dataclass(slots=True)
class Value:
    """One array.

    Attributes:
        kind: "op", "input", "weight", "const" or "literal".
        path: of an argument: its modules and its own name.
        state: whether it is a weight that no optimizer trains.
        group: of an argument: the name of the tree that it is a leaf of.
        captured: whether the function captured it.
        producer: the id of the equation that computes it.
        root: the value that it shows, where it is a view. Else its own number.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: str
    name: str = ""
    literal: Any = None
    producer: int | None = None
    root: int = -1
    path: tuple[str, ...] = ()
    state: bool = False
    group: str = ""
    captured: bool = False


@dataclass(slots=True)
class Eqn:
    """One equation. Its operands and results are numbers of values.

    Attributes:
        position: the number of its place in the program.
        enclosing: the places of the calls that it was written out of.
        levels: for each part of the scope, how many frames of the stack are around it. -1 where that is not known.
        view: whether its result only shows an operand, so that it is part of an edge.
        residual: whether it is computed next to another equation, only for the gradient.
        again: whether it is computed again for the gradient, by remat.
        dead: whether no result needs it. It is kept because its gradient is computed.
    """

    id: int
    prim: str
    params: dict[str, Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shape: tuple[int, ...]
    stack: tuple[Frame, ...]
    position: int
    scope: tuple[str, ...]
    backward: bool
    tangent: bool
    flops: int
    enclosing: tuple[int, ...] = ()
    view: bool = False
    residual: bool = False
    again: bool = False
    dead: bool = False
    levels: tuple[int, ...] = ()


@dataclass(slots=True)
class Raw:
    """Every equation that reaches a result, in order, and every value.

    Attributes:
        uncounted: primitives without a formula in the condition of a loop, which is not drawn.
        carries: what one pass of a loop reads of the pass before, the value that it is there, and the loop's scope.
    """

    eqns: list[Eqn] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    output_names: list[str] = field(default_factory=list)
    count: int = 0
    uncounted: set[str] = field(default_factory=set)
    carries: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    _above: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _own_stacks: dict[int, tuple[Frame, ...]] = field(default_factory=dict)

    def position(self, stack: tuple[Frame, ...]) -> int:
        """The number of a place in the program."""
        return self.places.setdefault(place(stack), len(self.places))

    def above(self, eqn: Eqn) -> tuple[int, ...]:
        """Its place and those that it was called from, innermost first.

        A rule of differentiation is called from the place of the equation that it differentiates.
        """
        if eqn.position not in self._above:
            key = place(eqn.stack)
            shorter = (self.places.get(key[:length]) for length in range(len(key), 0, -1))
            self._above[eqn.position] = tuple(number for number in shorter if number is not None)
        return self._above[eqn.position]

    def own_stack(self, eqn: Eqn) -> tuple[Frame, ...]:
        """The calls around an equation, without those inside of JAX. Those of one place have the same."""
        if eqn.position not in self._own_stacks:
            self._own_stacks[eqn.position] = tuple(frame for frame in eqn.stack if frame.origin != "jax")
        return self._own_stacks[eqn.position]

    def root(self, value: int) -> int:
        """The value at the end of a chain of views."""
        while self.values[value].root != value:
            value = self.values[value].root
        return value

    def of(self, value: int) -> Value:
        """The value behind a view."""
        return self.values[self.root(value)]

    def weight_of(self, value: int) -> int | None:
        """The parameter that a value shows, or None."""
        root = self.root(value)
        return root if self.values[root].kind == "weight" else None


def place(stack: tuple[Frame, ...]) -> tuple[int, ...]:
    """The key of a place in the program. Two calls of one jitted function have the same."""
    return tuple(frame.call for frame in stack if frame.call >= 0)
