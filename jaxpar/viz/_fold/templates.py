"""Patterns of equations as one layer: by a function that computes it, or by a match of cells.

The function of a `Pattern` is traced, and compared with a network step by step, from the result backwards. A function
of one array that works element by element has its values compared instead, so that it is found however it is spelled.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._read import jaxpr
from .._read.arguments import Argument
from .._read.raw import Eqn, Raw
from .calls import CALLS, fold_calls
from .cells import Cell, Cells
from .terms import constant, elements, is_convex, is_fixed, loose_ends, maker, owners, readers


@dataclass(frozen=True, slots=True)
class Fold:
    """A group of cells to draw as one layer.

    Attributes:
        cells: all cells of the layer.
        op, detail: kind and detail of the layer, as in a `Node`.
        major: True for a layer, False for a small operation between layers.
    """

    cells: tuple[Cell, ...]
    op: str
    detail: str = ""
    major: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern of cells that is folded into one layer. If a function computes the layer, use a `Pattern`.

    Attributes:
        name: a readable name.
        ops: the kinds of cells to try. Empty: all kinds.
        match: a function `match(cells, cell)` that returns a `Fold` with the cell, or None.
    """

    name: str
    ops: frozenset[str]
    match: Callable[[Cells, Cell], Fold | None]


@dataclass(frozen=True, eq=False)
class Pattern:
    """A layer that is found by a function that computes it.

    The function is traced once. Operations match if they compute the same, up to the order of operands, views, casts,
    axes and shapes. An elementwise function of one array matches every spelling with the same values.

    Attributes:
        op, detail: kind and detail of the layer, as in a `Node`.
        fn: a function of arrays. An argument with a default matches any constant. If the function returns several
            results, the first result is the output of the layer, and the others are intermediate values.
        shapes: the shapes of the arrays that the function is traced with. An array without an entry has (4, 8).
        where: a function `where(cells, values)` of the matched arrays, which returns whether the match counts.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import viz
        >>> swiglu = viz.Pattern("SwiGLU", lambda x, y: jax.nn.silu(x) * y)
        >>> net = lambda x, y: jnp.sin(y * (x / (1 + jnp.exp(-x))))
        >>> graph = viz.trace(net, jnp.ones((2, 4)), jnp.ones((2, 4)), params_argnums=None, rules=[swiglu])
        >>> [node.op for node in graph.layers]
        ['SwiGLU', 'sin']
    """

    op: str
    fn: Callable[..., Any]
    detail: str = ""
    shapes: Sequence[tuple[int, ...]] = ()
    where: Callable[[Cells, Sequence[int]], bool] | None = None


_SHAPE = (4, 8)
_PARTS = ("slice", "split", "gather", "dynamic_slice", "unstack")
_COMMUTE = ("add", "mul", "max", "min")
# What an equation may be called besides its primitive, and the primitives that are called so.
_CALLED = {
    "add": ("add", "add_any", "sub"),
    "mul": ("mul", "div", "neg"),
    "div": ("div", "integer_pow", "pow"),
    "pow": ("pow", "integer_pow"),
    "square": ("square", "mul", "integer_pow", "pow"),
    "sqrt": ("sqrt", "pow"),
    "rsqrt": ("rsqrt", "pow"),
    "part": _PARTS,
    "concatenate": ("concatenate", "stack"),
    "sigmoid": ("logistic",),
}
_MOST = 20  # equations of an activation
_X = np.array([-5.0, -3.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 5.0])  # where values are compared
_ALONE = ("tanh", "logistic", "max")  # each is an activation by itself
_COMPUTED: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "max": np.maximum, "min": np.minimum, "exp": np.exp, "log": np.log, "log1p": np.log1p, "expm1": np.expm1,
    "tanh": np.tanh, "sqrt": np.sqrt, "square": np.square, "pow": np.power, "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "erf": np.vectorize(math.erf), "erfc": np.vectorize(math.erfc), "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "ne": np.not_equal, "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]), "integer_pow": np.power,
}  # fmt: skip
_Operand = int | complex  # a value, or a number


@dataclass(frozen=True, slots=True)
class _Step:
    """How a value is computed. Its name is the same for all ways to write it."""

    name: str
    operands: tuple[_Operand, ...]
    eqns: dict[int, Eqn]


_Steps = Callable[[int], _Step | None]  # how each value is computed. None for what is given.


@dataclass(frozen=True, slots=True)
class _Template:
    """The function of a pattern."""

    raw: Raw  # what it computes
    steps: _Steps
    outs: list[int]  # its results
    arrays: list[int]  # its arguments
    numbers: list[int]


@functools.lru_cache(maxsize=512)
def _template_of(pattern: Pattern) -> _Template:
    """Trace the function of a pattern."""
    defaults = {name: each.default for name, each in inspect.signature(pattern.fn).parameters.items()}
    arrays = [name for name, default in defaults.items() if default is inspect.Parameter.empty]
    numbers = sorted(name for name, default in defaults.items() if type(default) in (int, float))
    shapes = itertools.chain(pattern.shapes, itertools.repeat(_SHAPE))
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in zip(arrays, shapes, strict=False)]
    # Numbers are arguments of the trace, and not their defaults: they stand for any constant of a network.
    scalars = dict.fromkeys(numbers, jax.ShapeDtypeStruct((), jnp.float32))
    try:
        closed = jax.make_jaxpr(lambda arrays, scalars: pattern.fn(*arrays, **scalars))(specs, scalars)
    except Exception as error:
        given = ", ".join(f"{name}: {spec.shape}" for name, spec in zip(arrays, specs, strict=True)) or "no array"
        hint = "give other shapes= to the Pattern"
        raise ValueError(f"viz: viz.Pattern {pattern.op!r} cannot be traced with {given} ({hint}): {error}") from error
    raw = jaxpr.read(closed, [Argument(name) for name in (*arrays, *numbers)], [""] * len(closed.out_avals))
    cells = Cells(raw)
    fold_calls(cells, CALLS)
    given = list(range(len(arrays) + len(numbers)))
    outs = [raw.root(out) for out in raw.outputs]
    return _Template(raw, _steps_of(cells), outs, given[: len(arrays)], given[len(arrays) :])


def fold_templates(cells: Cells, patterns: Iterable[Pattern]) -> None:
    """Make one cell wherever the equations of a network compute the function of a pattern, one after the other."""
    steps, ends = _steps_of(cells), functools.cache(functools.partial(_ends, cells))

    @functools.cache
    def read_by(value: int) -> set[str]:
        return _names_read(steps, value)

    for pattern in patterns:
        template = _template_of(pattern)
        last = template.steps(template.outs[0])
        names = _names_read(template.steps, template.outs[0])
        for value in ends(last.name) if last is not None else ():
            # Most fail at the steps before the last one already.
            match = _fold_at(cells, pattern, template, steps, value) if names <= read_by(value) else None
            if match is not None:
                cells.fold(match.cells, match.op, match.detail, match.major)


def _ends(cells: Cells, name: str) -> list[int]:
    """The values that may be made by a step of this name which is in no layer yet."""
    eqns = [eqn for prim in _CALLED.get(name, (name,)) for eqn in cells.by_prim.get(prim, ())]
    eqns = [e for e in eqns if (cell := cells.owner[e.id]) is None or not cell.major or cell.op == "Activation"]
    activations = [cells.output(cell) for cell in cells.of_kinds(("Activation",)) if cell.detail == name]
    return sorted({eqn.outs[0] for eqn in eqns if not (eqn.view or eqn.backward or eqn.residual)}.union(activations))


def _names_read(steps: _Steps, value: int) -> set[str]:
    """The names of the steps that the last step to a value reads."""
    last = steps(value)
    made = [steps(operand) for operand in last.operands if isinstance(operand, int)] if last is not None else ()
    return {step.name for step in made if step is not None}


def _fold_at(cells: Cells, pattern: Pattern, template: _Template, steps: _Steps, end: int) -> Fold | None:
    fit = _fit(template, steps, [(template.outs[0], end)], _Fit({}, {}))
    if fit is None:
        return None
    arrays = [value for at in template.arrays if isinstance(value := fit.values.get(at), int)]
    if pattern.where is not None and not pattern.where(cells, arrays):
        return None
    if any(out not in fit.values for out in template.outs):
        raise ValueError(
            f"viz: each result of the function of viz.Pattern {pattern.op!r} must be a step to its first one"
        )
    outs = {fit.values[out] for out in template.outs}
    # First with the equations that only take its arrays apart, for it alone, then without them.
    made = (maker(cells, value) for value in arrays)
    taken_apart = {
        eqn.id: eqn
        for eqn in made
        if eqn is not None
        and eqn.prim in _PARTS
        and all(user.id in fit.eqns for out in eqn.outs for user in readers(cells, out))
    }
    for eqns in (fit.eqns | taken_apart, fit.eqns):
        found = list(eqns.values())
        members = owners(cells, found, ("Activation",))
        if members is not None and loose_ends(cells, found) <= outs and is_convex(cells, found):
            return Fold(members, pattern.op, pattern.detail)
    return None


@dataclass(frozen=True, slots=True)
class _Fit:
    """What fits so far: a value of the network for each of the template, and the equations between them."""

    values: dict[int, _Operand]
    eqns: dict[int, Eqn]


def _fit(template: _Template, steps: _Steps, pairs: list[tuple[_Operand, _Operand]], fit: _Fit) -> _Fit | None:
    """Fit each pair of a value of the template and one of the network. A network may compute a step twice."""
    if not pairs:
        return fit
    (wanted, candidate), *remaining = pairs
    if not isinstance(wanted, int):
        return _fit(template, steps, remaining, fit) if _is_close(wanted, candidate) else None
    values = fit.values | {wanted: candidate}
    if wanted in template.arrays or wanted in template.numbers:
        before = fit.values.get(wanted, candidate)
        same = before == candidate if isinstance(before, int) else _is_close(before, candidate)
        fits = same and isinstance(candidate, int) == (wanted in template.arrays)
        return _fit(template, steps, remaining, _Fit(values, fit.eqns)) if fits else None
    # Both are computed. The steps must have one name, and their operands must fit, in any order where that is alike.
    step = template.steps(wanted)
    made = steps(candidate) if isinstance(candidate, int) else None
    if step is None or made is None or (step.name, len(step.operands)) != (made.name, len(made.operands)):
        return None
    for operands in (made.operands, made.operands[::-1])[: 1 + (made.name in _COMMUTE)]:
        new = [*zip(step.operands, operands, strict=True), *remaining]
        if (done := _fit(template, steps, new, _Fit(values, fit.eqns | made.eqns))) is not None:
            return done
    return None


def _is_close(wanted: complex, candidate: _Operand) -> bool:
    """Whether a number is another one, as far as 8 bits tell."""
    return not isinstance(candidate, int) and abs(candidate - wanted) <= 1e-2 * abs(wanted)


def _steps_of(cells: Cells) -> _Steps:
    """How the values are computed, as long as nothing but layers is folded: each is looked at once."""
    return functools.cache(functools.partial(_step, cells))


def _step(cells: Cells, value: int) -> _Step | None:
    """How a value is computed. None for what is given."""
    eqn = maker(cells, value)
    if eqn is None:
        return None
    cell = cells.owner[eqn.id]
    if cell is not None and cell.op == "Activation" and cells.output(cell) == value and len(cells.inputs(cell)) == 1:
        argument, eqns = cells.inputs(cell)[0], {step.id: step for step in cells.steps(cell)}
        return _Step("max", (argument, 0j), eqns) if cell.detail == "relu" else _Step(cell.detail, (argument,), eqns)
    if eqn.prim == "select_n" and (which := constant(cells, eqn.ins[0])) is not None:  # as in a variance
        picked = _step(cells, eqn.ins[1 + int(which.real)])
        return None if picked is None else replace(picked, eqns={eqn.id: eqn, **picked.eqns})
    operands = [cells.raw.root(at) if (number := constant(cells, at)) is None else number for at in eqn.ins]
    return _Step(*_named(eqn, operands), {eqn.id: eqn})


def _named(eqn: Eqn, operands: list[_Operand]) -> tuple[str, tuple[_Operand, ...]]:
    """The name and the operands of a step: `x - 2` as `x + -2`, `x / 2` as `x * 0.5`, `x ** -1` as `1 / x`."""
    first, last = (operands[0], operands[-1]) if operands else (0, 0)
    number = last if not isinstance(last, int) else None
    match eqn.prim:
        case prim if prim in _PARTS:
            return "part", (first,)
        case "integer_pow" | "pow":
            power = complex(eqn.params["y"]) if eqn.prim == "integer_pow" else last
            if isinstance(power, int):
                return "pow", (first, power)
            named: dict[complex, str] = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}
            if power == -1:
                return "div", (1 + 0j, first)
            return (named[power], (first,)) if power in named else ("pow", (first, power))
        case "mul" if isinstance(first, int) and first == last:
            return "square", (first,)
        case "neg":
            return "mul", (first, -1 + 0j)
        case "div" if number:
            return "mul", (first, 1 / number)
        case "sub" if number is not None:
            return "add", (first, -number)
        case "logistic":
            return "sigmoid", (first,)
        case _:
            return {"add_any": "add", "stack": "concatenate"}.get(eqn.prim, eqn.prim), tuple(operands)


@functools.lru_cache(maxsize=512)
def is_elementwise(pattern: Pattern) -> bool:
    """Whether a pattern is a function of one array that works element by element."""
    template = _template_of(pattern)
    steps = [eqn for eqn in template.raw.eqns if not eqn.view]
    shapes = {template.raw.values[value].shape for value in template.arrays} | {()}
    of_one = len(template.arrays) == 1 and (len(steps) > 1 or steps[0].prim in _ALONE)
    return of_one and all(eqn.prim in _COMPUTED and eqn.out_shape in shapes for eqn in steps)


def fold_elementwise(cells: Cells, patterns: Sequence[Pattern]) -> None:
    """Make one cell of the equations that have the values of one of these patterns. The first pattern counts."""
    for cell in list(cells):
        if cell.id not in cells.cells or cell.major:
            continue
        end = cells.output(cell)
        is_float = cells.raw.values[end].dtype.startswith(("float", "bfloat"))
        if is_float and (fold := _activation_at(cells, patterns, end)) is not None:
            cells.fold(fold.cells, fold.op, fold.detail, fold.major)


def _activation_at(cells: Cells, patterns: Sequence[Pattern], end: int) -> Fold | None:
    """The activation that ends in a value.

    One of exponentials only is a small step: a function of the user's that does more keeps its name.
    """
    for value, eqns in _expressions(cells, end):
        is_alone = len(eqns) == 1 and eqns[0].prim in _ALONE
        could_be = is_alone or (len(eqns) > 1 and elements(cells, end) > 1)
        pattern = _pattern_of(cells, patterns, value, end, eqns) if could_be else None
        if pattern is None:
            continue
        inner = {owner for eqn in eqns if (owner := cells.owner[eqn.id]) is not None and owner.op == "Activation"}
        eqns += [eqn for member in inner for eqn in cells.eqns(member) if eqn not in eqns]
        members = owners(cells, eqns, ("Activation",))
        if members is not None and loose_ends(cells, eqns) <= {end} and is_convex(cells, eqns):
            is_layer = any(eqn.prim in _ALONE for eqn in eqns) or any(member.major for member in members)
            return Fold(members, pattern.op, pattern.detail, is_layer or pattern.op != "Activation")
    return None


def _expressions(cells: Cells, end: int) -> Iterator[tuple[int, list[Eqn]]]:
    """The single values that a value is computed from, element by element, and the equations between them."""
    # Backwards, the latest equation first. Where a single value is read at last, all before it is a function of it.
    eqns, reads = list[Eqn](), {cells.raw.root(end)}
    while len(eqns) < _MOST:
        makers = {value: maker(cells, value) for value in reads}
        latest = max(reads, key=lambda value: -1 if (made := makers[value]) is None else made.id)
        eqn = makers[latest]
        if eqn is None or eqn.prim not in _COMPUTED or elements(cells, latest) != elements(cells, end):
            return
        eqns.append(eqn)
        reads = (reads - {latest}) | {cells.raw.root(value) for value in eqn.ins if not is_fixed(cells, value)}
        if len(reads) == 1:
            yield next(iter(reads)), list(eqns)


def _pattern_of(cells: Cells, patterns: Sequence[Pattern], value: int, end: int, eqns: Sequence[Eqn]) -> Pattern | None:
    """The first pattern whose function gives one value of another."""
    with np.errstate(all="ignore"):
        y = _computed(cells.raw, cells.raw.root(end), {value: _X})
        if y is None or np.shape(y) != _X.shape:
            return None
        literals = [each.real for eqn in eqns for at in eqn.ins if (each := constant(cells, at)) and each.real]
        literals += [1 / each for each in literals]
        rows, whose = _values(tuple(patterns), tuple(sorted({*literals, *(-each for each in literals)})))
        found = (np.abs(rows - y) <= 1e-3 + 1e-2 * np.abs(rows)).all(-1)  # as far as numbers of 8 bits tell
        if not found.any() or any(np.allclose(y, plain) for plain in (_X, abs(_X))):  # a leaky ReLU of slope 1 or -1
            return None
        return whose[int(found.argmax())]


@functools.lru_cache(maxsize=512)
def _values(patterns: tuple[Pattern, ...], numbers: tuple[float, ...]) -> tuple[np.ndarray, list[Pattern]]:
    """A row of values for each pattern and each way to choose its numbers among these, and the pattern of each row."""
    rows, whose = list[np.ndarray](), list[Pattern]()
    for pattern in patterns:
        template = _template_of(pattern)
        ways = list(itertools.product(numbers, repeat=len(template.numbers)))
        arguments = {at: np.array([way[n] for way in ways])[:, None] for n, at in enumerate(template.numbers)}
        y = _computed(template.raw, template.outs[0], {template.arrays[0]: _X, **arguments})
        rows.append(np.broadcast_to(y, (len(ways), len(_X))))
        whose += [pattern] * len(ways)
    return np.concatenate(rows), whose


def _computed(raw: Raw, value: int, values: dict[int, Any]) -> Any:
    """What a value is, given others. None where it cannot be told."""
    if value in values:
        return values[value]
    shown, values[value] = raw.values[value], None
    if shown.kind == "literal":
        values[value] = None if shown.literal is None else np.asarray(shown.literal, np.float64)
    elif shown.producer is not None and (eqn := raw.eqns[shown.producer]).prim in _COMPUTED:
        operands = [_computed(raw, raw.root(operand), values) for operand in eqn.ins]
        if all(operand is not None for operand in operands):
            operands += [eqn.params["y"]] if eqn.prim == "integer_pow" else []
            values[value] = np.asarray(_COMPUTED[eqn.prim](*operands), np.float64)
    return values[value]
