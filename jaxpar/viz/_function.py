"""What users give: a function, as flat equations, and its options, checked.

A function that raises has the equations up to the line that failed, which is a node of its own. JAX hands out no jaxpr
of it. So it is traced once more, by one that stops where it raises and returns what the failing line reads. An equation
that computes nothing marks the line.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import FrameType
from typing import Any, cast

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._core import checks
from .._core.text import did_you_mean, plural
from ._copies import count_copies
from ._draw.style import DIRECTIONS, THEMES, Options
from ._fold.calls import Call
from ._fold.templates import Pattern, Rule
from ._graph import FAILS_AT
from ._read import jaxpr
from ._read.arguments import name_of
from ._read.bind import Bound, bind
from ._read.costs import Jaxpr
from ._read.libraries import called_method, is_keras, is_linen, is_mxnet, linen_variables, mxnet_function
from ._read.raw import Raw
from ._read.source import is_users

_OPTIONS = (
    "params_argnums depth open max_nodes repeats rules title hide_weights node_attrs heat theme legend direction "
    "time_limit".split()
)


def read(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    params_argnums: int | Sequence[int] | None,
    attached: tuple[str, Callable[[Raw], Any]] | None = None,
) -> tuple[Raw, Jaxpr, list[Any]]:
    """The flat equations of a function with the names of its arguments, the jaxpr that they are of, and its arrays.

    `attached` names an attribute of the error where `fn` raises, and gives what it is of the equations before.
    """
    kwargs = _with_shapes(fn, kwargs)
    if is_keras(fn) and not getattr(fn, "built", True):
        # Building it inside of the trace would leave traced arrays in it for good.
        name = type(fn).__name__
        raise ValueError(f"viz: this {name} of Keras has no weights yet; call its build(shape), or call it, first")
    if is_mxnet(fn):
        fn, args, kwargs = mxnet_function(fn, args, kwargs)
        params_argnums = 0
    if is_linen(fn):  # called by its `apply`, whose params come first
        fn, args, params_argnums = cast(Any, fn).apply, (linen_variables(fn, args, kwargs), *args), 0
    _check_keywords(fn, kwargs)
    bound = bind(fn, args, kwargs, _argument_names(fn, len(args)), argnums(params_argnums, len(args)))
    for array, argument in zip(bound.arrays, bound.arguments, strict=True):
        check_dtype(fn, argument.name, array)

    @functools.wraps(fn, updated=())
    def call(arrays: Sequence[Any]) -> Any:
        return bound.call(arrays)

    try:
        closed, (out, changed) = jax.make_jaxpr(call, return_shape=True)(bound.arrays)
    except Exception as error:
        if attached is not None:
            name, draw = attached
            with contextlib.suppress(Exception):  # the error is the user's, and comes through where this fails
                setattr(error, name, draw(_equations_until(error, bound)))
                error.add_note(f"jaxpar.viz: this exception has `{name}`, what was traced up to the line that failed")
        if not bound.static or not isinstance(error, (TypeError, AttributeError)):
            raise
        of, given = getattr(fn, "__name__", type(fn).__name__), ", ".join(bound.static[:5])
        raise TypeError(
            f"viz: {of} cannot be traced with {given}, which is not an array and was passed unchanged; expected an "
            f"array or a jax.ShapeDtypeStruct? {type(error).__name__}: {error}"
        ) from error
    results = [name_of("output", path) for path, _ in jax.tree_util.tree_leaves_with_path(out)]
    raw = jaxpr.read(closed, bound.arguments, [*results, *changed], bound.captured)
    count_copies(raw)
    return raw, closed, bound.arrays


def drawn_for(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What pictures trace: a function itself, or what a step of jaxpar has for them."""
    is_step = type(fn).__module__.startswith("jaxpar.train.")  # another object may have an attribute of any name
    return (is_step and getattr(fn, "_for_picture", None)) or fn


def _with_shapes(fn: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords with arrays of float32 in place of MXNet's `shape={"data": (1, 28, 28, 1)}`."""
    shapes = kwargs.get("shape")
    if not isinstance(shapes, Mapping) or not shapes:
        return kwargs
    shapes = cast("Mapping[Any, Any]", shapes)
    parameters = _parameters(called_method(fn)[0] or fn)
    if "shape" in [p.name for p in parameters] or (
        not is_mxnet(fn) and not shapes.keys() <= {p.name for p in parameters}
    ):
        return kwargs
    structs: dict[str, Any] = {}
    for name, shape in shapes.items():
        if not isinstance(shape, Sequence) or not all(isinstance(size, (int, np.integer)) for size in shape):
            raise TypeError(f"viz: the shape of {name!r} must be a tuple of ints, got {checks.describe(shape)}")
        structs[name] = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    return {**{name: value for name, value in kwargs.items() if name != "shape"}, **structs}


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    method, before = called_method(fn)
    parameters = _parameters(fn) if method is None else [*_parameters(fn)[:before], *_parameters(method)]
    single = itertools.takewhile(lambda p: p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD), parameters)
    names = [parameter.name for parameter in single][:count]
    return names + [f"arg{number}" for number in range(len(names), count)]


# Options of MXNet's plot_network and print_summary.
_OF_MXNET = {
    "save_format": 'the picture is shown as it is; .render("plot", format="pdf") writes a file',
    "shape": 'name its arguments, shape={"x": (1, 28, 28, 1)}, or give arrays or jax.ShapeDtypeStruct(shape, dtype)',
    "dtype": "give arrays as arguments, or jax.ShapeDtypeStruct(shape, dtype)",
    **dict.fromkeys(("symbol", "line_length", "positions"), "leave it out"),
}


def _check_keywords(fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """`TypeError` for an argument that the function does not take, which may be a misspelt option."""
    parameters = _parameters(fn)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for name in kwargs.keys() - {p.name for p in parameters}:
        of = getattr(fn, "__name__", type(fn).__name__)
        hint = f"; {_OF_MXNET[name]}" if name in _OF_MXNET else did_you_mean(name, _OPTIONS)
        raise TypeError(f"viz: {of} has no argument {name!r}{hint}")


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those of a function. None of one that Python cannot inspect."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


def _equations_until(error: Exception, bound: Bound) -> Raw:
    """The flat equations of a function up to the line at which it raised an error. `ValueError` for no such line."""
    # What `jit` traces by itself is lost with the error. So where no line is outside of it, all is traced without.
    for context in (contextlib.nullcontext(), jax.disable_jit()):
        for depth in itertools.count():
            try:
                with context:
                    closed = jax.make_jaxpr(lambda arrays: _stop(error, bound, arrays, depth))(bound.arrays)  # noqa: B023
            except IndexError:
                break
            # A line inside of another trace reads arrays of that trace, which are captured then.
            if not any(isinstance(array, jax.core.Tracer) for array in closed.consts):
                # All are kept: what nothing reads is a result.
                inside = closed.jaxpr
                used = {id(atom) for eqn in inside.eqns for atom in eqn.invars}
                loose = [out for eqn in inside.eqns for out in eqn.outvars if not used & set(map(id, eqn.outvars))]
                whole = closed.replace(jaxpr=inside.replace(outvars=loose))
                return jaxpr.read(whole, bound.arguments, [""] * len(loose), bound.captured)
    raise ValueError("no line that failed was found")


def _stop(error: Exception, bound: Bound, arrays: Sequence[jax.Array], depth: int) -> object:
    """Call a function until it raises, and mark the line of the user's call of that depth, counted from the error."""
    try:
        bound.call(arrays)
    except Exception as again:
        if (type(again), str(again)) != (type(error), str(error)):
            raise ValueError("it fails in another way") from None
        frames = [(f, n) for f, n in traceback.walk_tb(again.__traceback__) if is_users(f.f_code.co_filename)]
        frame, line = frames[::-1][depth]
        mark = jex.Primitive(f"{FAILS_AT}{PurePath(frame.f_code.co_filename).name}:{line}")
        mark.def_abstract_eval(lambda first, *others: first.update(shape=()))
        return mark.bind(*_arrays_of(frame, line))
    raise ValueError("it does not fail again")


def _arrays_of(frame: FrameType, line: int) -> list[Any]:
    """The arrays that a line reads, or else all that its function has. `IndexError` where there are none."""
    names_read: set[str] = set()
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.positions is not None and instruction.positions.lineno == line:
            read = instruction.argval  # Python 3.13 loads two names at once
            names_read.update(read if isinstance(read, tuple) else [str(read)])
    for names in (names_read, frame.f_locals):
        values = [value for name, value in frame.f_locals.items() if name in names]
        for candidates in (
            values,
            jax.tree.leaves(values),
        ):  # arrays first: a tree of parameters has those of all layers
            if arrays := [value for value in candidates if isinstance(value, jax.core.Tracer)]:
                return arrays
    raise IndexError


def check_trace(
    fn: object,
    count: int,
    params_argnums: object,
    depth: object,
    max_nodes: object,
    repeats: object,
    rules: object,
    what: str = "viz",
    opened: object = None,
) -> None:
    """Check the options of `trace`, and that `fn` is a function. `count` is the number of positional arguments."""
    if not callable(fn) and not is_mxnet(fn):
        hint = "; write its apply, then params and inputs" if callable(getattr(fn, "apply", None)) else ""
        raise TypeError(f"{what}: expected a function and then its arguments, got {checks.describe(fn)} first{hint}")
    argnums(params_argnums, count, what)
    if depth is not None:
        checks.whole_number(depth, what, "depth", least=0)
    if opened is not None and not callable(opened):
        raise TypeError(f"{what}: open must be a function of a viz.Node, got {checks.describe(opened)}")
    if max_nodes is not None:
        checks.whole_number(max_nodes, what, "max_nodes")
    true_or_false(repeats, what, "repeats")
    check_rules(rules, what)


def check_picture(options: Options, time_limit: object, what: str) -> None:
    """Check the options that `plot_network` has besides those of `trace`."""
    if not isinstance(cast("Any", options.title), str):
        raise TypeError(f"{what}: title must be a string, got {checks.describe(options.title)}")
    attrs: Any = options.node_attrs
    expected = f'{what}: node_attrs must be a dict of names and values such as {{"shape": "oval"}}, got '
    if attrs is not None and not isinstance(attrs, Mapping):
        raise TypeError(expected + checks.describe(attrs))
    for name in attrs or ():
        if not isinstance(name, str):
            raise TypeError(f"{expected}the name {checks.describe(name)}")
    checks.choice(options.theme, what, "theme", THEMES)
    checks.choice(options.direction, what, "direction", DIRECTIONS)
    if options.heat is not None:
        checks.choice(options.heat, what, "heat", ("flops", "bytes"))
    checks.number(time_limit, what, "time_limit", "a number of seconds above 0", lambda seconds: seconds > 0)
    true_or_false(options.hide_weights, what, "hide_weights")
    true_or_false(options.legend, what, "legend")


def argnums(positions: Any, count: int, what: str = "viz") -> frozenset[int]:
    """The positions of the arguments that hold parameters. 0, the default, is allowed where there are none.

    >>> sorted(argnums((0, -1), 3))
    [0, 2]
    """
    if positions is None:
        return frozenset()
    many = isinstance(positions, (Sequence, set, frozenset)) and not isinstance(positions, str)
    return frozenset(_argnum(number, count, what) for number in (positions if many else (positions,)))


def _argnum(number: object, count: int, what: str) -> int:
    if isinstance(number, (bool, np.bool_)) or not isinstance(number, (int, np.integer)):
        raise TypeError(
            f"{what}: params_argnums must be None, an int such as 0, or several of them, got {checks.describe(number)}"
        )
    number = int(number)
    if not -count <= number < max(count, 1):
        there = checks.shorten(range(count)) if count else "none"
        raise ValueError(
            f"{what}: params_argnums is {number}, and there {'is' if count == 1 else 'are'} "
            f"{plural(count, 'positional argument')}: {there}; None says that no argument holds parameters"
        )
    return number + count if number < 0 else number


def true_or_false(value: object, what: str, name: str) -> None:
    """`TypeError` for anything but a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what}: {name} must be True or False, got {checks.describe(value)}")


def check_rules(rules: Any, what: str) -> None:
    """`TypeError` for anything but a sequence of `Call`s, `Pattern`s and `Rule`s."""
    kinds = (Call, Pattern, Rule)
    example = '[viz.Call("attend", "Attention")]'
    expected = f"{what}: rules must be a list of viz.Call, viz.Pattern and viz.Rule such as {example}, got "
    if isinstance(rules, (str, *kinds)) or not isinstance(rules, Sequence):
        raise TypeError(expected + checks.describe(rules))
    for rule in rules:
        if not isinstance(rule, kinds):
            raise TypeError(f"{expected}{checks.describe(rule)} in it")
        if isinstance(rule, Call) and not (isinstance(rule.function, str) and isinstance(rule.op, str)):
            wrong = rule.op if isinstance(rule.function, str) else rule.function
            raise TypeError(f"{what}: the function and op of a viz.Call must be strings, got {checks.describe(wrong)}")
        if isinstance(rule, Pattern) and not (isinstance(rule.op, str) and callable(rule.fn)):
            got = f"{checks.describe(rule.op)} and {checks.describe(rule.fn)}"
            raise TypeError(f"{what}: a viz.Pattern has a string op and a function that computes it, got {got}")
        if isinstance(rule, Rule) and not callable(rule.match):
            got = checks.describe(rule.match)
            raise TypeError(f"{what}: the match of viz.Rule {rule.name!r} must be a function of cells, got {got}")


def check_dtype(fn: Callable[..., Any], name: str, leaf: Any) -> None:
    """`TypeError` for an array whose dtype JAX does not have: of objects, strings, dates or records."""
    if not hasattr(leaf, "dtype"):  # a number of Python
        return
    dtype, issubdtype = leaf.dtype, jnp.issubdtype
    kinds = (np.number, np.bool_, jax.dtypes.extended)
    if dtype == jax.dtypes.float0 or any(issubdtype(dtype, kind) for kind in kinds):
        return
    of = getattr(fn, "__name__", type(fn).__name__)
    raise TypeError(
        f"viz: argument {name} of {of} is an array of dtype {dtype}, which JAX does not have; expected numbers, "
        "bools or random keys"
    )
