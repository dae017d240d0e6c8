"""Finds loops of an LSTM and of a GRU: a scan whose body is exactly such a cell becomes a `recurrent.loop`.

The body is evaluated once, with a symbol in place of each carried array. What does not depend on these is computed for
all steps at once, before the loop: the products with the inputs, and the biases. What does depend on them has to be, in
full, one of

    c' = sigmoid(f) c + sigmoid(i) tanh(g),  h' = sigmoid(o) tanh(c')
    h' = (1 - sigmoid(z)) tanh(x + sigmoid(r) q) + sigmoid(z) h

with f, i, g, o, z, r, q each an `Affine` of h, up to the order of operands. Anything else stays the scan that it was: a
further carried array or operation, another activation, another dtype than float32, a scan in reverse.

Read it in this order: `fused` looks at a scan from outside, `_loop` makes the loop, `_evaluate` turns the body into
symbols, `_lstm` and `_gru` recognize the cell in these. Wherever the body is none of both, `_require` raises
`NoCellError`, which `fused` catches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import AxisType

from . import kernels, recurrent
from .primitive import Program

_FLOAT32 = jnp.dtype("float32")
_PROGRAMS = ("jit", "pjit", "closed_call", "core_call")
_SAME = ("pvary", "pcast", "copy", "copy_p")
# A kernel lays out the weight once a call. Measured: that pays for a state of at most `_NARROW` columns, and for a
# wider one if the weight is used for `_FEWEST` rows of states or more, all steps together.
_NARROW, _FEWEST = 64, 96
# What draws random numbers. Drawn for all steps at once, keys of `rbg` give other numbers.
_DRAWS = ("random_bits", "rng_bit_generator", "rng_uniform")
# Products of float32 that XLA computes alike on CPUs.
_PRECISIONS = (None, lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)


class NoCellError(Exception):
    """The body is no cell that a loop computes."""


def _require(is_so: bool) -> None:
    """`NoCellError` unless it is so."""
    if not is_so:
        raise NoCellError


def fused(eqn: JaxprEqn) -> JaxprEqn | None:
    """The equation of a scan with a `recurrent.loop` in its place, or None where the scan is no loop of a cell."""
    constants, carried = scan_sizes(eqn.params)
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    # 1. What can be seen without reading the body. A GRU carries h, an LSTM h and c. The kernels go forward from the
    #    first step.
    if not kernels.are_loaded():
        return None
    if carried not in (1, 2) or eqn.params["reverse"] or length < 2 or body.effects or body.consts or eqn.effects:
        return None
    inside = getattr(body, "jaxpr", body)
    states = inside.outvars[:carried]
    if len(inside.outvars) != len(eqn.outvars) or any(isinstance(x, Literal) for x in states):
        return None
    # h and c are float32, (*batch, width), of one shape, for which a kernel is faster: it lays out the weight once a
    # call.
    shape = states[0].aval.shape
    if not shape or 0 in shape or not all(isinstance(size, int) for size in shape):
        return None
    if any(x.aval.dtype != _FLOAT32 or x.aval.shape != shape for x in states):
        return None
    *batch, width = shape
    if width > _NARROW and length * math.prod(batch) < _FEWEST:
        return None
    # The kernels take the axes of the batch as one: a reshape of what explicit axes split, see `primitive`.
    avals: list[Any] = [x.aval for x in eqn.invars if hasattr(x.aval, "sharding")]
    if any(AxisType.Explicit in aval.sharding.mesh.axis_types for aval in avals):
        return None
    if any(name in str(inside) for name in _DRAWS):
        return None

    # 2. The loop is only traced here: `NoCellError` says that the scan stays, before anything of it is changed.

    def loop(*operands: Any) -> list[Any]:
        first = constants + carried
        return _loop(body, length, operands[:constants], operands[constants:first], operands[first:])

    try:
        program = jax.make_jaxpr(jax.jit(loop))(*(x.aval for x in eqn.invars))
    except NoCellError:
        return None

    # 3. The call of the inner `jit` is the one equation. It takes the scan's operands and gives its results, so that it
    # can stand in the scan's place, if it is also of the same types, the axes of a `shard_map` along which they vary
    # among them.
    (call,) = program.eqns
    if [_type(x) for x in program.jaxpr.outvars] != [_type(x) for x in eqn.outvars]:
        return None
    return eqn.replace(primitive=call.primitive, params=call.params, effects=call.effects)


def _type(x: Any) -> Any:
    return x.aval.shape, x.aval.dtype, getattr(x.aval, "manual_axis_type", None)


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many it carries. Jax 0.12 has them as a tree."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)


@dataclasses.dataclass(eq=False)
class Affine:
    """h times a weight, plus what does not depend on the state. Each is a list of columns of arrays, or None for zero.

    `carry` is the number of h among the carried arrays.
    """

    carry: int
    weight: Columns
    offset: Columns | None
    shape: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Columns:
    """The columns from `first` on of the last axis of an array, `count` of them."""

    array: Any
    first: int
    count: int
    is_constant: bool

    def cut(self, first: int, count: int) -> Columns:
        return dataclasses.replace(self, first=self.first + first, count=count)

    def value(self) -> Any:
        if self.count == self.array.shape[-1]:
            return self.array
        return lax.slice_in_dim(self.array, self.first, self.first + self.count, axis=-1)


@dataclasses.dataclass(eq=False)
class Carried:
    """A carried array before the step."""

    number: int
    shape: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Formula:
    """Another value that depends on the state: what an operation gives for such values and others."""

    operation: str
    operands: tuple[Any, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Known:
    """A value that does not depend on the state. It is constant if it does not depend on the step either."""

    value: Any
    is_constant: bool


Symbol = Any  # an `Affine`, `Carried`, `Formula` or `Known`, which `_require` tells apart


def _loop(
    body: Program, length: int, constants: Sequence[Any], states: Sequence[Any], inputs: Sequence[Any]
) -> list[Any]:
    """What the scan gives, by a loop. `NoCellError` where it cannot."""
    plan: list[Any] = []

    # What comes out of `step` are arrays only, as `vmap` needs it. The cell and what became of each result, which are
    # symbols, go out by `plan`.
    def step(constants: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
        symbols = [Known(x, True) for x in constants]
        symbols += [Carried(i, x.shape) for i, x in enumerate(states)]
        results = _evaluate(body, [*symbols, *(Known(x, False) for x in inputs)])
        cell = _lstm(results) if len(states) == 2 else _gru(results)
        of_step = [x.value for x in results[len(states) :] if isinstance(x, Known)]
        plan[:] = cell, results
        batch = states[0].shape[:-1]
        fixed = [jnp.broadcast_to(cell.bias, states[0].shape)] if cell.bias is not None else []
        return (cell.weight(), fixed), (cell.inputs(batch), of_step)

    # All steps at once: `x` is (length, *batch, columns). Weights and biases do not depend on the step: no axis for it.
    if inputs:
        (weight, fixed), (x, of_step) = jax.vmap(step, (None, 0), (None, 0))(list(constants), list(inputs))
    else:
        (weight, fixed), per_step = step(constants, inputs)
        x, of_step = jax.tree.map(lambda y: jnp.broadcast_to(y, (length, *y.shape)), per_step)
    # `recurrent.loop` takes (h, c), or (bias, h). A cell of the user may carry c before h: `cell.order` says it.
    cell, results = plan
    ordered = [states[i] for i in cell.order]
    if cell.name == "gru":
        ordered = [*(fixed or [jnp.zeros_like(states[0])]), *ordered]
    of_steps = recurrent.loop(cell.name, x, weight, *ordered)
    # A scan gives the last of what it carries, and all steps of the rest: states of all steps, or what was known
    # before.
    of_all = dict(zip(cell.order, of_steps, strict=True))  # by the number of the carried array
    carried, values_of_steps = results[: len(states)], iter(of_step)
    last = [of_all[i][-1] for i in range(len(states))]
    stacked = [
        next(values_of_steps) if isinstance(x, Known) else of_all[_index_of(x, carried)] for x in results[len(states) :]
    ]
    return [*last, *stacked]


def _index_of(symbol: Symbol, symbols: Sequence[Symbol]) -> int:
    """The index of this very object. Equal symbols may be other values."""
    indices = [i for i, other in enumerate(symbols) if other is symbol]
    _require(bool(indices))
    return indices[0]


@dataclasses.dataclass
class Cell:
    """What a loop needs to know of a cell: its gates in the order of `recurrent`, and which carried array is which."""

    name: str
    order: tuple[int, ...]
    gates: list[Affine]
    offsets: list[Columns | None]
    bias: Any = None

    def weight(self) -> Any:
        return _joined([gate.weight for gate in self.gates])

    def inputs(self, batch: tuple[int, ...]) -> Any:
        width = self.gates[0].weight.count
        zeros = jnp.zeros((*batch, width), _FLOAT32)
        if all(x is None for x in self.offsets):
            return jnp.zeros((*batch, width * len(self.gates)), _FLOAT32)
        return _joined([Columns(zeros, 0, width, True) if x is None else x for x in self.offsets])


def _joined(columns: list[Columns]) -> Any:
    """The columns beside each other: the array that they are cut from, where they are all of it in order."""
    first, at = columns[0], 0
    for piece in columns:
        if piece.array is not first.array or piece.first != at:
            return jnp.concatenate([piece.value() for piece in columns], -1)
        at += piece.count
    return first.array if at == first.array.shape[-1] else jnp.concatenate([piece.value() for piece in columns], -1)


def _lstm(results: list[Symbol]) -> Cell:
    """The cell that gives these results. A user's own cell may carry (h, c) or (c, h)."""
    try:
        return _lstm_with(results, 0, 1)
    except NoCellError:
        return _lstm_with(results, 1, 0)


def _lstm_with(results: list[Symbol], h: int, c: int) -> Cell:
    # From the result backwards: h' = out * tanh(c'), of the very c' that is carried on, and c' = kept + added.
    new_h, new_c = results[h], results[c]
    squashed, out = _operands(new_h, "mul", lambda x: _is(x, "tanh"))
    _require(squashed.operands[0] is new_c)
    kept, added = _operands(new_c, "add", lambda x: _is(x, "mul") and any(_is_carried(y, c) for y in x.operands))
    _, forget = _operands(kept, "mul", lambda x: _is_carried(x, c))
    update, write = _operands(added, "mul", lambda x: _is(x, "tanh"))
    gates = [
        _gate(write, "logistic", h),
        _gate(forget, "logistic", h),
        _gate(update, "tanh", h),
        _gate(out, "logistic", h),
    ]
    _check(gates, new_h, results[2:], (new_h, new_c))
    return Cell("lstm", (h, c), gates, [gate.offset for gate in gates])


def _gru(results: list[Symbol]) -> Cell:
    (new_h,) = results[:1]
    # From the result backwards: h' = kept + added, with kept = z h and added = (1 - z) new.
    kept, added = _operands(new_h, "add", lambda x: _is(x, "mul") and any(_is_carried(y, 0) for y in x.operands))
    _, z = _operands(kept, "mul", lambda x: _is_carried(x, 0))
    new, complement = _operands(added, "mul", lambda x: _is(x, "tanh"))
    _require(_is(complement, "sub") and complement.operands[1] is z)
    minuend = complement.operands[0]
    _require(isinstance(minuend, Known) and isinstance(minuend.value, Literal) and minuend.value.val == 1)
    # new = tanh(x + r q): r multiplies the product of h, and not h. The kernel takes one bias of q for all steps.
    product, x = _operands(new.operands[0], "add", lambda x: _is(x, "mul"))
    r, q = _operands(product, "mul", lambda x: _is(x, "logistic"))
    _require(isinstance(x, Known) and isinstance(q, Affine) and (q.offset is None or q.offset.is_constant))
    gates = [_gate(r, "logistic", 0), _gate(z, "logistic", 0), q]
    _check(gates, new_h, results[1:], (new_h,))
    # So the columns of n are x alone, and the bias of q is an operand of its own.
    added_to_n = jnp.broadcast_to(_array(x), new_h.shape)
    offsets = [gates[0].offset, gates[1].offset, Columns(added_to_n, 0, new_h.shape[-1], x.is_constant)]
    return Cell("gru", (0,), gates, offsets, None if q.offset is None else q.offset.value())


def _check(gates: list[Affine], new_h: Formula, outputs: Sequence[Symbol], states: tuple[Symbol, ...]) -> None:
    """`NoCellError` unless the gates are as wide as the state, and the other results are known, or states."""
    for gate in gates:
        _require(gate.shape == new_h.shape and gate.weight.array.shape[0] == new_h.shape[-1])
    for x in outputs:
        _require(isinstance(x, Known) or any(x is state for state in states))


def _gate(x: Symbol, activation: str, h: int) -> Affine:
    """What the activation of a gate is applied to."""
    _require(_is(x, activation) and isinstance(x.operands[0], Affine) and x.operands[0].carry == h)
    return x.operands[0]


def _is(x: object, operation: str) -> TypeGuard[Formula]:
    return isinstance(x, Formula) and x.operation == operation


def _is_carried(x: object, number: int) -> bool:
    return isinstance(x, Carried) and x.number == number


def _operands(x: Symbol, operation: str, is_first: Callable[[Symbol], bool]) -> tuple[Symbol, Symbol]:
    """The operands of an operation of two, that for which `is_first` holds before the other."""
    _require(_is(x, operation))
    a, b = x.operands
    _require(is_first(a) != is_first(b))
    return (a, b) if is_first(a) else (b, a)


def _evaluate(program: Program, operands: Sequence[Symbol]) -> list[Symbol]:
    """The results of a jaxpr whose operands are `Known` or symbols."""
    inside = getattr(program, "jaxpr", program)
    values: dict[Any, Any] = dict(zip(inside.invars, operands, strict=True))

    def read(x: Any) -> Any:
        return Known(x, True) if isinstance(x, Literal) else values[x]

    for eqn in inside.eqns:
        results = _results(eqn, [read(x) for x in eqn.invars])
        values |= zip(eqn.outvars, results, strict=True)
    return [Known(_array(read(x)), True) if isinstance(x, Literal) else read(x) for x in inside.outvars]


def _results(eqn: JaxprEqn, operands: list[Symbol]) -> list[Symbol]:
    # No operand depends on the state: the equation is computed for all steps at once, before the loop.
    name, params = eqn.primitive.name, eqn.params
    if all(isinstance(x, Known) for x in operands):
        is_constant = all(x.is_constant for x in operands)
        return [Known(x, is_constant) for x in _computed(eqn, operands)]
    if name in _PROGRAMS:
        inside: Program = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        _require(not inside.consts)
        return _evaluate(inside, operands)
    # From here on a state is among the operands. The kernels compute in float32, so another dtype is no cell.
    avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    _require(all(aval.dtype == _FLOAT32 for aval in avals))
    if name in _SAME or (name == "convert_element_type" and params["sharding"] is None):
        return operands
    if name == "split":
        x, ends = operands[0], list(itertools.accumulate(map(int, params["sizes"])))
        _require(isinstance(x, Affine) and params["axis"] == len(x.shape) - 1)
        return [_cut(x, end - int(size), int(size)) for end, size in zip(ends, params["sizes"], strict=True)]
    # What stays affine in h: slices, the product with a weight, and sums with known values. All others are formulas.
    shape = avals[len(eqn.invars)].shape
    if name == "slice":
        return [_slice(operands[0], params)]
    if name == "dot_general":
        return [_product(operands[0], operands[1], params, shape)]
    if name == "add" and any(isinstance(x, Affine) for x in operands):
        return [_sum(operands[0], operands[1], shape)]
    is_activation = name in ("logistic", "tanh") and params.get("accuracy") is None
    _require(is_activation or name in ("add", "sub", "mul"))
    return [Formula(name, tuple(operands), shape)]


def _computed(eqn: JaxprEqn, operands: Sequence[Known]) -> list[Any]:
    """The results of an equation."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # jax 0.12 has functions among the params
    with eqn.ctx.manager:
        values = [x.value.val if isinstance(x.value, Literal) else x.value for x in operands]
        results = eqn.primitive.bind(*functions, *values, **params)
    return results if eqn.primitive.multiple_results else [results]


def _array(x: Known) -> Any:
    value = x.value
    if not isinstance(value, Literal):
        return value
    aval: Any = value.aval
    return jnp.asarray(value.val, aval.dtype)


def _slice(x: Symbol, params: dict[str, Any]) -> Affine:
    """Some columns of all rows."""
    starts, limits, strides = params["start_indices"], params["limit_indices"], params["strides"]
    _require(isinstance(x, Affine) and (strides is None or {*strides} == {1}))
    _require(not any(starts[:-1]) and tuple(limits[:-1]) == x.shape[:-1])
    return _cut(x, starts[-1], limits[-1] - starts[-1])


def _cut(x: Affine, first: int, count: int) -> Affine:
    offset = None if x.offset is None else x.offset.cut(first, count)
    return Affine(x.carry, x.weight.cut(first, count), offset, (*x.shape[:-1], count))


def _product(x: Symbol, weight: Symbol, params: dict[str, Any], shape: tuple[int, ...]) -> Affine:
    """h times a weight that is the same at all steps, over the last axis of h."""
    _require(isinstance(x, Carried) and isinstance(weight, Known) and weight.is_constant)
    _require(len(weight.value.shape) == 2)
    (contracted, weight_over), (batch, _) = params["dimension_numbers"]
    precision = params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    _require(tuple(contracted) == (len(x.shape) - 1,) and not batch)
    _require(all(p in _PRECISIONS for p in precisions) and params["preferred_element_type"] in (None, _FLOAT32))
    value = weight.value if tuple(weight_over) == (0,) else weight.value.T
    return Affine(x.number, Columns(value, 0, value.shape[1], True), None, shape)


def _sum(a: Symbol, b: Symbol, shape: tuple[int, ...]) -> Affine:
    """An affine value with a known one added."""
    x, constant_term = (a, b) if isinstance(a, Affine) else (b, a)
    _require(isinstance(constant_term, Known) and x.shape == shape)
    added = jnp.broadcast_to(_array(constant_term), shape)
    constant = constant_term.is_constant
    if x.offset is not None:
        added, constant = x.offset.value() + added, constant and x.offset.is_constant
    return Affine(x.carry, x.weight, Columns(added, 0, shape[-1], constant), shape)
