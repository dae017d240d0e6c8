"""Whether an update is elementwise, so that each device may make it for its own share of a value.

A store of kind `sharded` keeps a value flat and cut into shares, and its updater sees one share at a time. That is
right only if `init` and `update` are the same elementwise program for the value and for a share. The proof is about
programs, since a trial with numbers misses thresholds, periods and masks. Nothing is computed. Both are traced on the
whole value and on a share, (chunk,), and `init` on the rows of all shares, (shards, chunk), too, as `kv.init` gives it.
All traces must give the same reading: the same equations in the same order, with equal constants and parameters, but
for the shape of the value. Each leaf of the state must be a scalar, or have one number for each element.

What a reading takes:

- An equation that depends on the value must be one of `ELEMENTWISE`.
- Its operands are numbers for each element of the value, or scalars. A broadcast scalar counts as the scalar.
- A `cond` may choose between elementwise programs by a scalar that does not depend on the value.
- Calls such as `jit` and `custom_jvp` are read as what they call.
- An equation that does not depend on the value may be any. Its own shapes are then part of the reading.

Reductions, matrix products, reshapes, sorts, gathers and loops over the value break the rule. A plain function sees
whole values at the prompt, so the rule does not concern it there.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]  # jax 0.12: an alias
from jax.typing import ArrayLike

from .._core import checks
from .._core.arrays import PyTree, is_traced
from .._core.updater import Grads, Params, State
from .._devices.collectives import chunk_size
from ._jaxprs import CALLS, ELEMENTWISE, Eqn, interpret, programs
from ._updaters import TreeOptimizer, Updater, accumulate, assign, first_line, program_of

Spec = jax.ShapeDtypeStruct
Line = tuple[object, ...]  # what an equation does, for comparison. The name of its primitive comes first

_ADVICE = "an updater of kind 'sharded' sees flat shares; use kind='device', or kv.from_params(params, optimizer=tx)"
# Keys that are traced together, which is quick. Where the trace is at fault each is traced alone, to name the one.
_TOGETHER = 256
Forms = tuple[Spec, Spec, Spec | None]  # the whole value, a flat share of it, the rows that `init` gets


def check_elementwise_tree(optimizer: TreeOptimizer, params: Params, shards: int, caller: str) -> None:
    """`ValueError` unless an optimizer of the whole pytree may be given shares of params of these shapes."""

    def cut(rows: tuple[int, ...]) -> Params:
        return jax.tree.map(lambda x: Spec((*rows, chunk_size(x.size, shards)), x.dtype), params)

    def update(key: int, pushed: Grads, state: State, stored: Params) -> tuple[Params, State]:
        return optimizer.update(pushed, state, stored, jnp.zeros(()))  # any loss

    updater = Updater(lambda key, value: optimizer.init(value), update)
    reason = fault(updater, [0], params, cut(()), cut((shards,)), judges_all=True)
    if reason is not None:
        raise ValueError(f"{caller}: {reason}; {_ADVICE}")


def check_elementwise(
    updater: Updater, values: Mapping[int, Forms], names: Mapping[int, str], caller: str, advice: str = _ADVICE
) -> None:
    """`ValueError` unless the updater may be given the shares of all values. The message ends in `advice`."""
    if updater in (assign, accumulate):
        return
    # Values of the same shapes whose keys have the same program are judged by one key.
    groups: dict[Hashable, tuple[Forms, dict[Hashable, int]]] = {}
    for key, forms in values.items():
        shapes = tuple((form.shape, form.dtype) for form in forms if form is not None)
        groups.setdefault(shapes, (forms, {}))[1].setdefault(program_of(updater, key), key)
    for forms, key_of_program in groups.values():
        judged = list(key_of_program.values())
        for keys in (judged[i : i + _TOGETHER] for i in range(0, len(judged), _TOGETHER)):
            if len(keys) > 1 and fault(updater, keys, *forms) is None:
                continue
            for key in keys:
                reason = fault(updater, [key], *forms)
                if reason is not None:
                    name = f" ({names[key]!r})" if key in names else ""
                    raise ValueError(f"{caller}: key {key}{name}: {reason}; {advice}")


def fault(
    updater: Updater,
    keys: Sequence[int],
    value: PyTree,
    share: PyTree,
    rows: PyTree = None,
    *,
    judges_all: bool = False,
) -> str | None:
    """Why an updater is not the same for a value and for a share of it, in words. None: it is.

    A value may be a pytree of specs, for an optimizer of all params. The keys have values of one shape.
    """
    # An updater that raises on both forms of one key is not judged, unless `judges_all`. It raises on every push.
    of_value, of_share = _trace(updater, keys, value), _trace(updater, keys, share)
    if isinstance(of_value, Exception) and isinstance(of_share, Exception) and len(keys) == 1:
        return f"the updater fails ({first_line(of_value)})" if judges_all else None
    of_rows = None if rows is None else _trace(updater, keys, rows, with_update=False)
    try:
        return _difference(of_value, of_share) or (of_rows and _difference(of_value, of_rows))
    except NotElementwise as error:
        return f"the updater is not elementwise: {error}"


class _Traces(NamedTuple):
    """What an updater does with one form of a value: its jaxprs, the state and what comes of both."""

    value: PyTree  # of specs
    init: ClosedJaxpr
    state: PyTree
    update: ClosedJaxpr | None = None
    out: PyTree = None  # (new values, new states) of the update


def _trace(updater: Updater, keys: Sequence[int], value: PyTree, with_update: bool = True) -> _Traces | Exception:
    """The traces, all keys in one, or what was raised."""

    def init(value: PyTree) -> list[State]:
        return [updater.init(key, value) for key in keys]

    def update(pushed: PyTree, states: list[State], stored: PyTree) -> tuple[list[PyTree], list[State]]:
        pairs = [updater.update(key, pushed, state, stored) for key, state in zip(keys, states, strict=True)]
        return [new for new, _ in pairs], [state for _, state in pairs]

    try:
        init_jaxpr, states = jax.make_jaxpr(init, return_shape=True)(value)
        if not with_update:
            return _Traces(value, init_jaxpr, states)
        update_jaxpr, out = jax.make_jaxpr(update, return_shape=True)(value, states, value)
    except Exception as error:  # any error is the updater's own
        return error
    return _Traces(value, init_jaxpr, states, update_jaxpr, out)


def _difference(of_value: _Traces | Exception, of_share: _Traces | Exception) -> str | None:
    """How the two differ, in words. `NotElementwise` if one of them breaks the rule."""
    # 1. It runs on both.
    for traces, name in ((of_value, "the whole value"), (of_share, "a share of it")):
        if isinstance(traces, Exception):
            return f"the updater fails on {name} only ({first_line(traces)})"
    assert isinstance(of_value, _Traces)
    assert isinstance(of_share, _Traces)

    # 2. The states have the same leaves: scalars, or one number for each element.
    specs = jax.tree.leaves(of_value.value)
    forms = f"{checks.describe(specs[0]) if len(specs) == 1 else 'whole values'} and for a share of it"
    not_same = f"the updater is not the same for {forms}"
    if jax.tree.structure(of_value.state) != jax.tree.structure(of_share.state):
        return f"{not_same}: its state has another structure"
    shapes = {(a.shape, b.shape) for a, b in zip(specs, jax.tree.leaves(of_share.value), strict=True)}
    for a, b in zip(*map(jax.tree.leaves, (of_value.state, of_share.state)), strict=True):
        is_scalar = not a.shape and not b.shape
        if a.dtype != b.dtype or not (is_scalar or (a.shape, b.shape) in shapes):
            leaves = " and ".join(map(checks.describe, (a, b)))
            return f"{not_same}: its state has {leaves}, and must have scalars or one number for each element"
    for traces in (of_value, of_share) if of_share.update is not None else ():
        (old, before), (new, after) = map(jax.tree.flatten, (traces.state, traces.out[1]))
        if before != after or [*map(np.shape, old)] != [*map(np.shape, new)]:
            return f"{not_same}: an update changes the structure or the shapes of its state"

    # 3. `init`, then `update`, are the same program of elements.
    values = [Extent.ELEMENTS] * len(specs)
    reason = _other_program(read(of_value.init, values), read(of_share.init, values))
    if reason is None and of_value.update is not None and of_share.update is not None:
        state = [Extent.ELEMENTS if leaf.shape else Extent.SCALAR for leaf in jax.tree.leaves(of_share.state)]
        extents = [*values, *state, *values]  # of the arguments: pushed, state, stored
        reason = _other_program(read(of_value.update, extents), read(of_share.update, extents))
    return None if reason is None else f"the updater is not the same program for {forms}: {reason}"


def _other_program(of_value: list[Line], of_share: list[Line]) -> str | None:
    """The first difference of two readings."""
    if len(of_value) != len(of_share):
        return f"it has {len(of_value) - 1} equations for the one and {len(of_share) - 1} for the other"
    for i, (line, other) in enumerate(zip(of_value, of_share, strict=True)):
        if line != other:
            names = " and ".join(sorted({repr(line[0]), repr(other[0])}))
            return f"equation {i + 1}, {names}, depends on the shape"
    return None


# The reading of a jaxpr.

_SILENT = ("debug_callback", "debug_print")  # they return nothing
_MOST_COMPARED = 1 << 20  # elements. Larger constants are equal if they are the same array
_NO_ARITHMETIC = ("sharding", "name", "out_sharding")


class Extent(enum.IntEnum):
    """What an intermediate result is: a scalar (broadcast or not), another array, one number for each element."""

    SCALAR = 0
    ARRAY = 1
    ELEMENTS = 2


class _Result(NamedTuple):
    name: tuple[object, ...]  # equal in two programs if the result is computed in the same way
    extent: Extent


class NotElementwise(Exception):
    """The message names the equation that breaks the rule."""


def read(closed: ClosedJaxpr, extents: Sequence[Extent]) -> list[Line]:
    """A jaxpr without the shape of the value, whose arguments have these extents. `NotElementwise` if it is not so.

    A line for each equation, with the name of its primitive first, and one of what it returns.
    """
    reader = _Reader()
    arguments = [_Result(("argument", i), extent) for i, extent in enumerate(extents)]
    results = reader.read(closed.jaxpr, closed.consts, arguments)
    return [*reader.lines, ("the result", [r.name for r in results])]


class _Reader:
    """Describes a jaxpr in lines that do not name the shape of the value."""

    def __init__(self):
        self.lines: list[Line] = []
        self.count = 0  # of the equations read so far, by which results are named

    def read(self, jaxpr: Jaxpr, consts: Sequence[ArrayLike], arguments: Sequence[_Result]) -> list[_Result]:
        """The results of the program, whose equations are added to the lines."""
        return interpret(jaxpr, list(map(_constant, consts)), arguments, _constant, self._equation)

    def _equation(self, eqn: Eqn, operands: list[_Result]) -> list[_Result]:
        name = eqn.primitive.name
        if name in CALLS:
            return self.read(*next(programs(eqn)), operands)
        if name in _SILENT:
            return []
        if name == "broadcast_in_dim" and operands[0].extent == Extent.SCALAR and not eqn.invars[0].aval.shape:
            return operands
        if name == "cond":
            return self._cond(eqn, operands)
        extent = max((operand.extent for operand in operands), default=Extent.SCALAR)
        if extent == Extent.ELEMENTS:
            # Each element of the results must depend on the same element of the value only.
            if name not in ELEMENTWISE:
                raise NotElementwise(f"{name!r} combines elements of the value")
            if any(operand.extent == Extent.ARRAY for operand in operands):
                raise NotElementwise(f"{name!r} takes an array that is not made of the value")
            pairs = zip(eqn.invars, operands, strict=True)
            shapes_of_value = {v.aval.shape for v, operand in pairs if operand.extent == Extent.ELEMENTS}
            if {v.aval.shape for v in eqn.outvars} != shapes_of_value:
                raise NotElementwise(f"{name!r} changes the shape of the value")
        # Shapes are part of the line only where they are not those of the value. Parameters are where they change what
        # is computed.
        extents, shapes = [extent] * len(eqn.outvars), ()
        if name not in ELEMENTWISE or extent == Extent.ARRAY:
            extents = [Extent.ARRAY if v.aval.shape else Extent.SCALAR for v in eqn.outvars]
            shapes = tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars))
        parameters = [(key, _parameter(x)) for key, x in sorted(eqn.params.items()) if key not in _NO_ARITHMETIC]
        self.lines.append((name, parameters, [operand.name for operand in operands], shapes))
        return self._results(extents)

    def _cond(self, eqn: Eqn, operands: list[_Result]) -> list[_Result]:
        """Each branch is read by itself. A result is what it may be in any of them."""
        index, *arguments = operands
        if index.extent == Extent.ELEMENTS:
            raise NotElementwise("'cond' looks at the value")
        lines, branches, extents = self.lines, [], []
        for branch in eqn.params["branches"]:
            self.lines = []
            results = self.read(branch.jaxpr, branch.consts, arguments)
            branches.append((self.lines, [r.name for r in results]))
            extents.append([r.extent for r in results])
        self.lines = lines
        possible = [set(of_result) for of_result in zip(*extents, strict=True)]  # extents of each result
        if any({Extent.ARRAY, Extent.ELEMENTS} <= of_result for of_result in possible):
            raise NotElementwise("'cond' chooses between the value and an array that is not made of it")
        self.lines.append(("cond", index.name, branches))
        return self._results([max(of_result) for of_result in possible])

    def _results(self, extents: Sequence[Extent]) -> list[_Result]:
        self.count += 1
        return [_Result(("line", self.count, i), extent) for i, extent in enumerate(extents)]


def _constant(value: ArrayLike) -> _Result:
    shape = np.shape(value)
    # What cannot be read here, or is too long to compare, is equal to itself only.
    if is_traced(value) or not getattr(value, "is_fully_addressable", True) or np.size(value) > _MOST_COMPARED:
        return _Result(("array", id(value)), Extent.ARRAY if shape else Extent.SCALAR)
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    name = ("constant", str(array.dtype), shape, np.asarray(array).tobytes())
    return _Result(name, Extent.ARRAY if shape else Extent.SCALAR)


def _parameter(value: object) -> object:
    if isinstance(value, ClosedJaxpr):
        return str(value.jaxpr), [_constant(c).name for c in value.consts]
    if isinstance(value, (tuple, list)):
        return [_parameter(v) for v in value]
    return _constant(value).name if isinstance(value, (np.ndarray, jax.Array)) else repr(value)
