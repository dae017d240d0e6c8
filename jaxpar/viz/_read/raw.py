"""The flat form of a function: its values and equations, and which of them are no layers.

A value that only shows another one (a reshape, a cast) is a view: it has a `root`, and its equation is part of an edge.
What differentiation alone computes is marked, so that it is not taken for a layer.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._scopes import Path
from .._searches import reach
from .source import Frame


@dataclass(slots=True)
class Value:
    """One array."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: str  # "op", "input", "weight", "const" or "literal"
    root: int  # the value at the end of a chain of views. Its own number where it is none.
    name: str = ""
    literal: Any = None
    shows: int | None = None  # the value that it shows, where it is a view
    producer: int | None = None  # the id of the equation that computes it
    path: tuple[str, ...] = ()  # of an argument: its modules and its own name
    state: bool = False  # whether it is a weight that no optimizer trains
    group: str = ""  # of an argument: the name of the tree that it is a leaf of
    padding: int = 0  # of an argument: how many of its elements are none of the param, or copies of it
    captured: bool = False  # whether the function captured it
    # of what goes into a loop or a map over devices, -1, and of what comes out, 1, where its shape changes there
    crosses: int = 0
    number: Any = None  # what it is everywhere, where XLA knows that while it compiles
    of_a_pass: bool = False  # whether it shows what one pass of a loop is given or makes, and others do not

    @property
    def argument(self) -> str:
        """The argument that it is or is a leaf of."""
        return self.group or self.name

    @property
    def elements(self) -> int:
        """The number of its elements, without a padding."""
        return math.prod(self.shape) - self.padding


@dataclass(slots=True)
class Eqn:
    """One equation. Its operands and results are numbers of values."""

    id: int
    prim: str
    params: dict[str, Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shape: tuple[int, ...]
    stack: tuple[Frame, ...]
    position: int  # the number of its place in the program
    scope: Path
    backward: bool
    tangent: bool
    flops: int
    enclosing: tuple[int, ...] = ()  # the places of the calls that it was written out of
    view: bool = False  # whether its result only shows an operand, so that it is part of an edge
    residual: bool = False  # whether it is computed next to another equation, only for the gradient
    again: bool = False  # whether it is computed again for the gradient, by remat
    dead: bool = False  # whether no result needs it. It is kept because its gradient is computed.
    # for each part of the scope, how many frames of the stack are around it. -1 where that is not known.
    levels: tuple[int, ...] = ()


@dataclass(slots=True)
class Raw:
    """Every equation that reaches a result, in order, and every value."""

    eqns: list[Eqn] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    output_names: list[str] = field(default_factory=list)
    count: int = 0
    # primitives without a formula in the condition of a loop, which is not drawn
    uncounted: set[str] = field(default_factory=set)
    copies: int = 1  # on how many devices of a `pmap` the params are, of which those of one are counted
    # what one pass of a loop reads of the pass before, the value that it is there, and the loop's scope
    carries: list[tuple[int, int, Path]] = field(default_factory=list)
    # of a carried value that a loop begins with a constant: that constant, which is no other pass's
    first_pass: dict[int, int] = field(default_factory=dict)
    # of a result of a loop: what its condition reads of the last pass
    tested: dict[int, tuple[int, ...]] = field(default_factory=dict)
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    _above: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _own_stacks: dict[int, tuple[Frame, ...]] = field(default_factory=dict)

    def position(self, stack: tuple[Frame, ...]) -> int:
        """The number of a place in the program."""
        return self.places.setdefault(place(stack), len(self.places))

    def above(self, eqn: Eqn) -> tuple[int, ...]:
        """Its place and those that it was called from, innermost first. A gradient is called from its equation's."""
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

    def show(self, value: int, shown: int) -> None:
        """Make a value a view of an earlier one."""
        self.values[value].shows, self.values[value].root = shown, self.values[shown].root

    def root(self, value: int) -> int:
        """The value at the end of a chain of views."""
        return self.values[value].root

    def shown(self, value: int) -> list[int]:
        """A value and those that it shows, up to its root."""
        chain = [value]
        while (shows := self.values[chain[-1]].shows) is not None:
            chain.append(shows)
        return chain

    def outside(self, value: int) -> int:
        """What a value is where it was made: its root, or what comes out of the loop of its root.

        A pass that reads what another pass left reads no more than that.
        """
        entered = 0
        for shown in self.shown(value):
            entered -= self.values[shown].crosses
            if entered < 0:
                return shown
        return self.root(value)

    def of(self, value: int) -> Value:
        """The value behind a view."""
        return self.values[self.values[value].root]

    def weight_of(self, value: int) -> int | None:
        """The parameter that a value shows, or None."""
        root = self.root(value)
        return root if self.values[root].kind == "weight" else None


def place(stack: tuple[Frame, ...]) -> tuple[int, ...]:
    """The key of a place in the program. Two calls of one jitted function have the same."""
    return tuple(frame.call for frame in stack if frame.call >= 0)


_VIEWS = frozenset(
    "broadcast_in_dim convert_element_type squeeze expand_dims stop_gradient pvary pcast pbroadcast copy copy_p "
    "transpose optimization_barrier sharding_constraint reduce_precision device_put reshape mesh_cast reshard "
    "random_wrap random_unwrap nonbatchable nondifferentiable_backward nontraceable".split()
)

# The operand of these with which nothing is computed, and its places. XLA drops such steps, and does not count them.
_NEUTRAL = {"add": (0, 0, 1), "add_any": (0, 0, 1), "sub": (0, 1), "mul": (1, 0, 1)}
# What XLA computes while it compiles, where each operand is one number everywhere.
_FOLDED: dict[str, Callable[..., Any]] = {
    "add": operator.add, "add_any": operator.add, "sub": operator.sub, "mul": operator.mul, "div": np.true_divide,
    "neg": operator.neg, "square": np.square, "max": np.maximum, "min": np.minimum, "gt": operator.gt,
    "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
    "round": np.round, "floor": np.floor, "ceil": np.ceil, "sign": np.sign, "abs": np.abs, "integer_pow": operator.pow,
    "select_n": lambda which, *cases: cases[int(which)],
}  # fmt: skip
_PICKS = frozenset("slice dynamic_slice gather unstack squeeze".split())


def mark_view(raw: Raw, eqn: Eqn) -> None:
    """Decide whether an equation is a view, and of which value. One without results shows none."""
    if not eqn.outs:
        return
    numbers = [raw.of(value).number for value in eqn.ins]
    if eqn.prim in _NEUTRAL and _computes_nothing(eqn, numbers):
        eqn.flops = 0
    if eqn.prim in ("empty", "empty2"):
        raw.values[eqn.outs[0]].number = np.zeros(())  # what a branch leaves open, which jax fills with zeros
    if eqn.prim in _FOLDED and all(number is not None for number in numbers):
        eqn.flops = 0
        with np.errstate(all="ignore"):
            power = (eqn.params["y"],) if eqn.prim == "integer_pow" else ()
            raw.values[eqn.outs[0]].number = _FOLDED[eqn.prim](*numbers, *power)
    if eqn.prim == "select_n" and numbers[0] is not None:  # XLA keeps the case that is picked everywhere
        eqn.flops = 0
        raw.values[eqn.outs[0]].number = numbers[1 + int(numbers[0])]
    cases = [_case(raw, value) for value in eqn.ins[1:]] if eqn.prim == "select_n" else []
    if len(cases) > 1:
        eqn.flops = eqn.flops // (len(cases) - 1) * _forks(cases)
    if _is_view(raw, eqn):
        eqn.view = True
        if raw.of(eqn.ins[0]).number is not None:
            eqn.flops = 0
        for out in eqn.outs:
            raw.show(out, eqn.ins[0])
    elif cases and len(set(cases)) == 1:
        # A `cond` under `vmap` hides from each branch by `stop_gradient` what it is not for.
        eqn.view = True
        raw.show(eqn.outs[0], eqn.ins[1])
    elif (index := _wrapped_index(raw, eqn)) is not None and raw.of(index).kind not in ("literal", "const"):
        eqn.view = True
        eqn.flops *= 3  # the test and the sum that it picks from are not drawn
        raw.show(eqn.outs[0], index)
    else:
        mark_constant(raw, eqn)


def _case(raw: Raw, value: int) -> object:
    """What two equal cases of a choice have in common: their number, or the array that `stop_gradient` was given.

    A nested jaxpr has names of its own for what it is given. Other views, such as a transpose, are other arrays.
    """
    if (number := raw.of(value).number) is not None:
        return "number", number.item()
    while (view := raw.values[value]).shows is not None and not (view.of_a_pass or view.crosses):
        if view.producer is not None and raw.eqns[view.producer].prim != "stop_gradient":
            break
        value = view.shows
    return value


def _forks(cases: list[object]) -> int:
    """How many choices between two jax makes of one between several. XLA drops those between equal cases."""
    if len(set(cases)) == 1:
        return 0
    middle = len(cases) // 2
    return 1 + _forks(cases[:middle]) + _forks(cases[middle:])


def mark_constant(raw: Raw, eqn: Eqn) -> None:
    """Make constants of the results where all operands are: a mask, a scale. Random numbers and places are none."""
    if eqn.backward or eqn.prim in ("cond", "axis_index") or eqn.prim.startswith("random"):
        return
    if all(raw.of(value).kind in ("literal", "const") for value in eqn.ins):
        eqn.view = True
        for out in eqn.outs:
            raw.values[out].kind = "const"


def _is_view(raw: Raw, eqn: Eqn) -> bool:
    if eqn.prim in _PICKS and raw.of(eqn.ins[0]).dtype.startswith("key<"):
        return True  # one of several random keys
    if eqn.prim in ("slice", "split", "unstack") and raw.of(eqn.ins[0]).number is not None:
        return True  # the same number
    if eqn.prim == "slice" or eqn.prim == "dynamic_slice":
        # Where the place is computed, the result depends on more than on the param.
        is_fixed = all(raw.of(value).kind in ("literal", "const") for value in eqn.ins[1:])
        return raw.weight_of(eqn.ins[0]) is not None and is_fixed and not eqn.backward
    if eqn.prim in ("reduce_precision", "optimization_barrier") and raw.of(eqn.ins[0]).number is not None:
        return False  # XLA does not know the number behind it
    if eqn.prim == "reduce_sum" and math.prod(eqn.in_shapes[0]) == math.prod(eqn.out_shape):
        return True  # over axes of length 1
    if eqn.prim not in _VIEWS or not eqn.ins:
        return False
    return eqn.prim != "reshape" or not _flattens(eqn)


def _computes_nothing(eqn: Eqn, numbers: list[Any]) -> bool:
    """Whether it adds 0, or multiplies by 1, given the operands that are one number everywhere."""
    neutral, *places = _NEUTRAL[eqn.prim]
    return any(numbers[at] is not None and bool(numbers[at] == neutral) for at in places)


def _flattens(eqn: Eqn) -> bool:
    """Whether a reshape keeps the first axis and joins the others. A gradient splits them."""
    shape, new = (eqn.out_shape, eqn.in_shapes[0]) if eqn.backward else (eqn.in_shapes[0], eqn.out_shape)
    return len(new) == 2 and sum(d != 1 for d in shape[1:]) > 1 and shape[0] == new[0]


def _wrapped_index(raw: Raw, eqn: Eqn) -> int | None:
    """The `i` of `select_n(i < 0, i, i + N)`, JAX's reading of negative indices."""
    if eqn.prim != "select_n" or len(eqn.ins) != 3:
        return None
    test, index, wrapped = (raw.root(value) for value in eqn.ins)
    below, added = raw.values[test].producer, raw.values[wrapped].producer
    if below is None or added is None:
        return None
    lt, add = raw.eqns[below], raw.eqns[added]
    same = lt.prim == "lt" and add.prim == "add" and raw.root(lt.ins[0]) == index == raw.root(add.ins[0])
    return eqn.ins[1] if same and raw.of(lt.ins[1]).kind == "literal" else None


def drop_dead(raw: Raw) -> None:
    """Drop the equations that no result needs, also in a later pass, and of which not even the gradient is needed."""
    wires = _wires(raw)
    live = computed = reach(raw.outputs, wires)
    # XLA also drops a case that is never picked.
    choices = (eqn for eqn in raw.eqns if eqn.prim == "select_n" and raw.values[eqn.outs[0]].shows is None)
    picks = ((eqn, raw.of(eqn.ins[0]).number) for eqn in choices)
    if picked := {eqn.outs[0]: (eqn.ins[1 + int(which)],) for eqn, which in picks if which is not None}:
        computed = reach(raw.outputs, wires | picked)
    differentiated = {number for eqn in raw.eqns if eqn.backward for number in raw.above(eqn)}
    differentiated -= {eqn.position for eqn in raw.eqns if eqn.again}
    # A forward equation whose gradient is computed stays, for nothing: the gradient belongs to its layer.
    keep: list[Eqn] = []
    for eqn in raw.eqns:
        eqn.dead = live.isdisjoint(eqn.outs) and not (eqn.view and raw.root(eqn.outs[0]) in live)
        if not eqn.dead or (not eqn.backward and not eqn.view and eqn.position in differentiated):
            eqn.flops = 0 if computed.isdisjoint(eqn.outs) else eqn.flops
            if eqn.prim == "cond" and not eqn.dead:  # of each branch, only the results that are needed
                are_live = [out in live for out in eqn.outs]
                eqn.ins = (eqn.ins[0], *itertools.compress(eqn.ins[1:], itertools.cycle(are_live)))
                eqn.outs = tuple(itertools.compress(eqn.outs, are_live))
            keep.append(eqn)
    raw.eqns = keep
    numbers = {eqn.id: number for number, eqn in enumerate(raw.eqns)}
    for value in raw.values:
        value.producer = numbers.get(value.producer) if value.producer is not None else None
    for eqn in raw.eqns:
        eqn.id = numbers[eqn.id]


def _wires(raw: Raw) -> dict[int, Sequence[int]]:
    """What each value comes from: what it shows, what it is computed from, and what a loop hands on to it."""
    wires: dict[int, Sequence[int]] = {n: (v.shows,) for n, v in enumerate(raw.values) if v.shows is not None}
    for eqn in raw.eqns:
        if eqn.prim == "cond":  # of each branch, the result of this place
            for at, out in enumerate(eqn.outs):
                wires[out] = (eqn.ins[0], *eqn.ins[1 + at :: len(eqn.outs)])
        # A view is needed as what it shows. Of a part of a param, the place is computed too.
        elif not eqn.view or eqn.prim == "dynamic_slice" or raw.of(eqn.outs[0]).kind == "const":
            wires |= dict.fromkeys(eqn.outs, eqn.ins)
    handed_on = [(first, last) for first, last, _ in raw.carries]
    for inside, outside in (*handed_on, *raw.first_pass.items()):
        wires[inside] = (*wires.get(inside, ()), outside)
    for result, tested in raw.tested.items():  # how often a loop runs
        wires[result] = (*wires.get(result, ()), *tested)
    return wires


def mark_residuals(raw: Raw) -> None:
    """Mark what differentiation computes next to an equation, only for its gradient."""
    followers = _followers(raw)
    readers: dict[int, list[Eqn]] = {}
    results = {raw.root(value) for value in raw.outputs}
    for eqn in raw.eqns:
        for value in () if eqn.view else eqn.ins:
            readers.setdefault(raw.root(value), []).append(eqn)

    def only_gradients_read(value: int) -> bool:
        return value not in results and all(
            # A choice hands on what a branch computes.
            all(map(only_gradients_read, _handed_on(raw, reader, value)))
            if reader.prim == "cond" and not reader.backward
            else reader.backward or reader.residual
            for reader in readers.get(value, ())
        )

    for eqn in reversed(raw.eqns):
        if eqn.id in followers:
            eqn.residual = all(map(only_gradients_read, eqn.outs))


def _handed_on(raw: Raw, choice: Eqn, value: int) -> list[int]:
    """The results of a `cond` that are this value in one of its branches, and all of them for what it picks one by."""
    which, *cases = map(raw.root, choice.ins)
    count = len(choice.outs)
    return [out for at, out in enumerate(choice.outs) if value in (which, *cases[at::count])]


def _followers(raw: Raw) -> set[int]:
    """Differentiated equations that directly follow another one of the same place."""
    followers: set[int] = set()
    first: Eqn | None = None
    for eqn in raw.eqns:
        if eqn.view or eqn.backward:
            continue
        places = {first.position, *first.enclosing}.difference(eqn.enclosing) if first is not None else set[int]()
        again = first is not None and eqn.prim == first.prim and eqn.out_shape == first.out_shape
        again = again and eqn.prim not in ("integer_pow", "pow")  # a power's derivative is one
        if eqn.tangent and not eqn.dead and not again and not places.isdisjoint(raw.above(eqn)):
            followers.add(eqn.id)
        else:
            first = eqn
    return followers
