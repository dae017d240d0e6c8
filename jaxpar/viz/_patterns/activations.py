"""The rule for activations that are written out: by what they compute, however they are spelled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .._fold.cells import Cell, Cells
from .._fold.patterns import Fold, is_float
from .._read.raw import Eqn, Raw
from .terms import elements, is_convex, is_fixed, loose_ends, maker, owners, root

_MOST = 20  # equations of an activation
_X = np.array([-5.0, -3.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 5.0])  # where it is evaluated
_LAYERS = ("tanh", "logistic", "maximum")  # each is an activation by itself
_ONE, _MINUS_ONE = 6, 3  # the places of 1 and -1 there


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


_COMPUTED: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "max": np.maximum, "min": np.minimum, "exp": np.exp, "log": np.log, "log1p": np.log1p, "tanh": np.tanh,
    "sqrt": np.sqrt, "square": np.square, "pow": np.power, "logistic": _sigmoid, "erf": np.vectorize(math.erf),
    "erfc": np.vectorize(math.erfc), "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": np.not_equal, "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]),
    "clamp": lambda low, x, high: np.clip(x, low, high), "integer_pow": np.power,
}  # fmt: skip
_KNOWN: dict[str, Any] = {
    "sigmoid": _sigmoid(_X),
    "softplus": np.log1p(np.exp(_X)),
    "gelu": _X * (1 + np.tanh(math.sqrt(2 / math.pi) * (_X + 0.044715 * _X**3))) / 2,
    "mish": _X * np.tanh(np.log1p(np.exp(_X))),
    "hard_swish": _X * np.clip(_X + 3, 0, 6) / 6,
    "squared_relu": np.maximum(_X, 0) ** 2,
}


def inline_activation(cells: Cells, cell: Cell) -> Fold | None:
    """A function of one array, element by element, that is an activation. Its value is compared, not its form.

    One of exponentials only is a small step: a function of the user's that does more keeps its name.
    """
    if cell.major or not is_float(cells, cell) or elements(cells, cells.output(cell)) < 2:
        return None
    end = cells.output(cell)
    for value, eqns in _expressions(cells, end):
        if len(eqns) < 2 or not (name := _name_of(cells.raw, value, end)):
            continue
        inner = {owner for eqn in eqns if (owner := cells.owner[eqn.id]) is not None and owner.op == "Activation"}
        eqns += [eqn for part in inner for eqn in cells.eqns(part) if eqn not in eqns]
        parts = owners(cells, eqns, ("Activation",))
        if parts is not None and loose_ends(cells, eqns) == {end} and is_convex(cells, eqns):
            return Fold(parts, "Activation", name, any(part.major or part.op in _LAYERS for part in parts))
    return None


def _expressions(cells: Cells, end: int) -> Iterator[tuple[int, list[Eqn]]]:
    """The single values that a value is computed from, element by element, and the equations between them."""
    eqns, reads = list[Eqn](), {root(cells, end)}
    while len(eqns) < _MOST:
        makers = {value: maker(cells, value) for value in reads}
        latest = max(reads, key=lambda value: -1 if (made := makers[value]) is None else made.id)
        eqn = makers[latest]
        if eqn is None or eqn.prim not in _COMPUTED or elements(cells, latest) != elements(cells, end):
            return
        eqns.append(eqn)
        reads = (reads - {latest}) | {root(cells, value) for value in eqn.ins if not is_fixed(cells, value)}
        if len(reads) == 1:
            yield next(iter(reads)), list(eqns)


def _name_of(raw: Raw, value: int, end: int) -> str:
    """The activation that gives one value from another. Empty for none."""
    with np.errstate(all="ignore"):
        y = _computed(raw, raw.root(end), {value: _X})
        if y is None:
            return ""
        names = (name for name, known in _KNOWN.items() if _is_close(y, known))
        return next(names, "") or _with_number(y)


def _with_number(y: Any) -> str:
    """The name of an activation with a number in it: `x * sigmoid(c * x)`, `max(x, c * x)`."""
    factor = np.log(y[_ONE] / (1 - y[_ONE]))
    if 0.1 < factor < 10 and _is_close(y, _X * _sigmoid(factor * _X)):
        return "silu" if math.isclose(factor, 1, rel_tol=1e-2) else "swish"
    slope = -y[_MINUS_ONE]
    leaks = 0 <= slope < 1 and _is_close(y, np.maximum(_X, slope * _X))
    return ("leaky_relu" if slope else "relu") if leaks else ""


def _is_close(y: Any, known: Any) -> bool:
    return bool(np.allclose(y, known, rtol=1e-2, atol=1e-3))  # its numbers may be of 8 bits


def _computed(raw: Raw, value: int, known: dict[int, Any]) -> Any:
    """What a value is, given others. None where it cannot be told."""
    if value not in known:
        shown = raw.values[value]
        if shown.kind == "literal":
            known[value] = None if shown.literal is None else np.asarray(shown.literal, np.float64)
        else:
            known[value] = None if shown.producer is None else _result(raw, raw.eqns[shown.producer], known)
    return known[value]


def _result(raw: Raw, eqn: Eqn, known: dict[int, Any]) -> Any:
    operands = [_computed(raw, raw.root(operand), known) for operand in eqn.ins]
    if eqn.prim not in _COMPUTED or any(operand is None for operand in operands):
        return None
    operands += [eqn.params["y"]] if eqn.prim == "integer_pow" else []
    return np.asarray(_COMPUTED[eqn.prim](*operands), np.float64)
