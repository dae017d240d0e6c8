"""What the program of an update says: whether it is elementwise, and by which rule it computes.

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
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]  # jax 0.12: an alias
from jax.typing import ArrayLike

from .._core import checks
from .._core.arrays import PyTree, Recent, is_traced
from .._core.updater import Grads, Params, State
from .._devices.collectives import chunk_size
from .._devices.user_mesh import outside_mesh
from ._updaters import TreeOptimizer, Updater, accumulate, assign, first_line, program_of

Spec = jax.ShapeDtypeStruct
Eqn = Any  # a `JaxprEqn`: JAX gives its avals no type that has a shape
Line = tuple[object, ...]  # what an equation does, for comparison. The name of its primitive comes first

_ADVICE = "an updater of kind 'sharded' sees flat shares; use kind='device', or kv.from_params(params, optimizer=tx)"
# Keys that are traced together, which is quick. Where the trace is at fault each is traced alone, to name the one.
_TOGETHER = 256
Forms = tuple[Spec, Spec, Spec | None]  # the whole value, a flat share of it, the rows that `init` gets


def check_elementwise_tree(optimizer: TreeOptimizer, params: Params, shards: int, where: str) -> None:
    """`ValueError` unless an optimizer of the whole pytree may be given shares of params of these shapes."""

    def cut(rows: tuple[int, ...]) -> Params:
        return jax.tree.map(lambda x: Spec((*rows, chunk_size(x.size, shards)), x.dtype), params)

    def update(key: int, pushed: Grads, state: State, stored: Params) -> tuple[Params, State]:
        return optimizer.update(pushed, state, stored, jnp.zeros(()))  # any loss

    updater = Updater(lambda key, value: optimizer.init(value), update)
    reason = fault(updater, [0], params, cut(()), cut((shards,)), judges_all=True)
    if reason is not None:
        raise ValueError(f"{where}: {reason}; {_ADVICE}")


def check_elementwise(
    updater: Updater, values: Mapping[int, Forms], names: Mapping[int, str], where: str, advice: str = _ADVICE
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
        every = list(key_of_program.values())
        for keys in (every[i : i + _TOGETHER] for i in range(0, len(every), _TOGETHER)):
            if len(keys) > 1 and fault(updater, keys, *forms) is None:
                continue
            for key in keys:
                reason = fault(updater, [key], *forms)
                if reason is not None:
                    name = f" ({names[key]!r})" if key in names else ""
                    raise ValueError(f"{where}: key {key}{name}: {reason}; {advice}")


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
    for traces, name in ((of_value, "the whole value"), (of_share, "a share of it")):
        if isinstance(traces, Exception):
            return f"the updater fails on {name} only ({first_line(traces)})"
    assert isinstance(of_value, _Traces)
    assert isinstance(of_share, _Traces)
    specs = jax.tree.leaves(of_value.value)
    forms = f"{checks.describe(specs[0]) if len(specs) == 1 else 'whole values'} and for a share of it"
    if reason := _other_state(of_value, of_share):
        return f"the updater is not the same for {forms}: {reason}"
    values = [Extent.ELEMENTS] * len(specs)
    reason = _other_program(read(of_value.init, values), read(of_share.init, values))
    if reason is None and of_value.update is not None and of_share.update is not None:
        state = [Extent.ELEMENTS if leaf.shape else Extent.SCALAR for leaf in jax.tree.leaves(of_share.state)]
        extents = [*values, *state, *values]  # of the arguments: pushed, state, stored
        reason = _other_program(read(of_value.update, extents), read(of_share.update, extents))
    return None if reason is None else f"the updater is not the same program for {forms}: {reason}"


def _other_state(of_value: _Traces, of_share: _Traces) -> str | None:
    """How the states differ, before an update and after it."""
    if jax.tree.structure(of_value.state) != jax.tree.structure(of_share.state):
        return "its state has another structure"
    shapes = {(a.shape, b.shape) for a, b in zip(*map(jax.tree.leaves, (of_value.value, of_share.value)), strict=True)}
    for a, b in zip(*map(jax.tree.leaves, (of_value.state, of_share.state)), strict=True):
        is_scalar = not a.shape and not b.shape
        if a.dtype != b.dtype or not (is_scalar or (a.shape, b.shape) in shapes):
            leaves = " and ".join(map(checks.describe, (a, b)))
            return f"its state has {leaves}, and must have scalars or one number for each element"
    for traces in (of_value, of_share) if of_share.update is not None else ():
        (old, before), (new, after) = map(jax.tree.flatten, (traces.state, traces.out[1]))
        if before != after or [*map(np.shape, old)] != [*map(np.shape, new)]:
            return "an update changes the structure or the shapes of its state"
    return None


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

_NAMES = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil "
    "clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 "
    "expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max "
    "min mul mulhi ne neg nextafter not one_minus_square optimization_barrier or polygamma population_count pow real "
    "reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta"
)
ELEMENTWISE = frozenset(_NAMES.split())
_CALL_NAMES = "jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat remat2 checkpoint"
CALLS = frozenset(_CALL_NAMES.split())
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
        return _interpret(jaxpr, list(map(_constant, consts)), arguments, _constant, self._equation)

    def _equation(self, eqn: Eqn, operands: list[_Result]) -> list[_Result]:
        name = eqn.primitive.name
        if name in CALLS:
            return self.read(*next(_programs(eqn)), operands)
        if name in _SILENT:
            return []
        if name == "broadcast_in_dim" and operands[0].extent == Extent.SCALAR and not eqn.invars[0].aval.shape:
            return operands
        if name == "cond":
            return self._cond(eqn, operands)
        extent = max((operand.extent for operand in operands), default=Extent.SCALAR)
        if extent == Extent.ELEMENTS:
            self._check(eqn, operands)
        # Shapes are part of the line only where they are not those of the value.
        extents, shapes = [extent] * len(eqn.outvars), ()
        if name not in ELEMENTWISE or extent == Extent.ARRAY:
            extents = [Extent.ARRAY if v.aval.shape else Extent.SCALAR for v in eqn.outvars]
            shapes = tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars))
        self.lines.append((name, _parameters(eqn), [operand.name for operand in operands], shapes))
        return self._results(extents)

    def _check(self, eqn: Eqn, operands: list[_Result]) -> None:
        """`NotElementwise` unless each element of the results depends on the same element of the value only."""
        name = eqn.primitive.name
        if name not in ELEMENTWISE:
            raise NotElementwise(f"{name!r} combines elements of the value")
        if any(operand.extent == Extent.ARRAY for operand in operands):
            raise NotElementwise(f"{name!r} takes an array that is not made of the value")
        pairs = zip(eqn.invars, operands, strict=True)
        shapes = {v.aval.shape for v, operand in pairs if operand.extent == Extent.ELEMENTS}
        if {v.aval.shape for v in eqn.outvars} != shapes:
            raise NotElementwise(f"{name!r} changes the shape of the value")

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
    if is_traced(value) or not getattr(value, "is_fully_addressable", True) or np.size(value) > _MOST_COMPARED:
        return _Result(("array", id(value)), Extent.ARRAY if shape else Extent.SCALAR)
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    name = ("constant", str(array.dtype), shape, np.asarray(array).tobytes())
    return _Result(name, Extent.ARRAY if shape else Extent.SCALAR)


T = TypeVar("T")


def _interpret(
    jaxpr: Jaxpr,
    consts: Sequence[T],
    arguments: Sequence[T],
    constant: Callable[[ArrayLike], T],
    equation: Callable[[Eqn, list[T]], list[T]],
) -> list[T]:
    """What `equation` and `constant` make of the results of a program, from its constants and arguments."""
    env: dict[Any, T] = dict(zip(jaxpr.constvars, consts, strict=True))  # by variable
    env |= zip(jaxpr.invars, arguments, strict=True)

    def read_atom(atom: Any) -> T:
        return constant(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env |= zip(eqn.outvars, equation(eqn, list(map(read_atom, eqn.invars))), strict=True)
    return list(map(read_atom, jaxpr.outvars))


def _parameters(eqn: Eqn) -> list[tuple[str, object]]:
    """The parameters of an equation that change what it computes."""
    return [(name, _parameter(value)) for name, value in sorted(eqn.params.items()) if name not in _NO_ARITHMETIC]


def _parameter(value: object) -> object:
    if isinstance(value, ClosedJaxpr):
        return str(value.jaxpr), [_constant(c).name for c in value.consts]
    if isinstance(value, (tuple, list)):
        return [_parameter(v) for v in value]
    return _constant(value).name if isinstance(value, (np.ndarray, jax.Array)) else repr(value)


# What an update computes, without its hyperparameters: a digest that another run of Python gives too.
#
# A result is named by the operation that makes it and by the names of what the operation takes, so the order of the
# operations does not count. Numbers in the program, and what follows from them and from the scalars of the state alone,
# are hyperparameters: rates, schedules, decays, counts. All of them have one name. A second digest has a name for each
# of these too. Where only that one differs, the optimizer has other numbers.

_SAME = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "optimization_barrier"})
_IN_ANY_ORDER = frozenset({"add", "add_any", "max", "min", "mul"})
_PROGRAMS = ("jax", "optax", "jaxpar")  # another version may compute the same by other operations
Name = str | None  # None: a hyperparameter


def rules(
    init: Callable[[Params], State], update: Callable[[Grads, State, Params, jax.Array], Params], params: Params
) -> list[str | None]:
    """For each param what identifies the computation of its next value, and its numbers. None if it cannot be traced.

    `init(params)` gives a state, whose scalars are hyperparameters, and `update(grads, state, params, loss)` params.
    """
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        with outside_mesh():
            state = jax.eval_shape(init, params)
            closed = jax.make_jaxpr(update)(params, state, params, loss)
    except Exception:  # an update that needs more than is there, or the values themselves
        return [None] * len(jax.tree.leaves(params))
    # In place of each leaf of the state whether it is a scalar, and so a hyperparameter.
    leaves = jax.tree.leaves((params, jax.tree.map(lambda x: not x.shape, state), params, loss))
    names = [None if leaf is True else str(i) for i, leaf in enumerate(leaves)]
    versions = ", ".join([f"{name} {_version(name)}" for name in _PROGRAMS])
    kinds = _results(closed.jaxpr, names)
    numbers = _results(closed.jaxpr, list(map(str, range(len(leaves)))), list(map(_number, closed.consts)))
    return [f"{_digest(kind)} {versions}; {_digest(all)}" for kind, all in zip(kinds, numbers, strict=True)]


@Recent  # a run saves often, and traces once
def rule_of_each(
    updater: object, structure: Any, keys: tuple[int, ...], specs: tuple[Spec, ...]
) -> dict[int, str | None]:
    """The rule by which each key is updated. For a `TreeOptimizer`, `structure` is that of the pytree of the specs."""
    if isinstance(updater, TreeOptimizer):

        def update(grads: Grads, state: State, params: Params, loss: jax.Array) -> Params:
            return updater.update(grads, state, params, loss)[0]

        return dict(zip(keys, rules(updater.init, update, structure.unflatten(specs)), strict=True))
    if not isinstance(updater, Updater) or updater in (assign, accumulate):
        return dict.fromkeys(keys)
    first = dict(zip(reversed(specs), reversed(keys), strict=True))  # keys of one shape have one rule

    def rule(spec: Spec, key: int) -> str | None:
        def update(pushed: jax.Array, state: State, stored: jax.Array, _: jax.Array) -> jax.Array:
            return updater.update(key, pushed, state, stored)[0]

        return rules(lambda value: updater.init(key, value), update, spec)[0]

    rule_of = {spec: rule(spec, key) for spec, key in first.items()}
    return {k: rule_of[spec] for k, spec in zip(keys, specs, strict=True)}


def difference_of_rules(rule: str | None, other: str | None) -> str:
    """What is certainly different in two rules: "rule", "numbers" or ""."""
    # Those of other versions of the programs are not compared. Older checkpoints have no numbers.
    (kind, versions, numbers), (other_kind, other_versions, other_numbers) = _split_rule(rule), _split_rule(other)
    if versions != other_versions or kind != other_kind:
        return "rule" if versions == other_versions else ""
    return "numbers" if numbers and other_numbers and numbers != other_numbers else ""


def _split_rule(rule: str | None) -> tuple[str, str, str]:
    """The digest without numbers, the versions, the digest with numbers."""
    kind_and_versions, _, numbers = (rule or "").partition("; ")
    kind, _, versions = kind_and_versions.partition(" ")
    return kind, versions, numbers


def _results(jaxpr: Jaxpr, arguments: Sequence[Name], constants: Sequence[Name] | None = None) -> list[Name]:
    """The names of what a program returns, for those of its arguments and constants. None: numbers have no names."""
    named = constants is not None

    def equation(eqn: Eqn, operands: list[Name]) -> list[Name]:
        kind, count = eqn.primitive.name, len(eqn.outvars)
        if not (named or any(operands)):
            return [None] * count
        if kind in _SAME and count == 1:
            return operands[:1]
        inner = [_results(p, _last(operands, len(p.invars)), [] if named else None) for p, _ in _programs(eqn)]
        if kind in CALLS:
            return inner[0]
        ordered = sorted(map(str, operands)) if kind in _IN_ANY_ORDER else operands
        numbers = [v for _, v in sorted(eqn.params.items()) if isinstance(v, int | float)] if named else []  # x ** 2
        return [_digest(kind, i, ordered, inner, *numbers) for i in range(count)]

    constants = constants or [None] * len(jaxpr.constvars)
    return _interpret(jaxpr, constants, arguments, _number if named else lambda _: None, equation)


def _number(value: ArrayLike) -> str:
    array = np.asarray(value)
    return f"{array.dtype}{array.tolist()}"


def _last(operands: list[Name], count: int) -> list[Name]:
    """The names of the arguments of a program inside an equation. The operands of loops and branches come last."""
    return ["inner"] * (count - len(operands)) + operands[max(len(operands) - count, 0) :]


def _programs(eqn: Eqn) -> Iterator[tuple[Jaxpr, Sequence[ArrayLike]]]:
    """The programs inside an equation, with their constants: of a call, a loop, branches."""
    for _, value in sorted(eqn.params.items()):
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(inner, (ClosedJaxpr, Jaxpr)):
                yield (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())


def _digest(*fields: object) -> str:
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # an embedded copy
        return "unknown"
