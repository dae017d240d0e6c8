"""Calls of public functions, and the answer to one with wrong arguments.

`answers` is the one check of all of them. It costs nothing while calls work: arguments are compared with the signature
only after a call has failed in the words of JAX, NumPy or Python. So they count alike by position and by name.

What a signature cannot say is checked by `check_takes`, for functions that a user gives, and in `checks`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .arrays import PyTree, gone_error, is_gone, is_of_numbers, is_traced
from .text import describe, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
Hint = Any  # a type as a signature says it: a class, a union, a generic alias, a `TypeVar`
_MOST_SHOWN = 8  # options in a message
_NONE: Mapping[str, str] = {}

# Packages whose errors are answered. An error of any other module is the user's own.
_BELOW = (
    sys.stdlib_module_names
    | {"jaxpar", "jax", "jaxlib", "numpy", "ml_dtypes", "optax"}
    | {"graphviz", "matplotlib", "pandas", "PIL", "tqdm"}
)
# Kinds of errors that callers expect of wrong arguments. Any other becomes a `TypeError`.
_COMMON = (TypeError, ValueError, IndexError, OverflowError, RuntimeError, NameError)

_WAYS = ("host_to_device", "device_to_host", "device_to_device")
_GUARDS = {f"jax_transfer_guard_{way}": getattr(jax, f"transfer_guard_{way}") for way in _WAYS}

_INTS = range(-(2**63), 2**63)  # larger ones overflow inside of JAX, in words of C
_TYPE_NAMES: dict[Hint, str] = {
    bool: "True or False",
    int: "an int of 64 bits",
    float: "a number",
    str: "a string",
    type(None): "None",
    jax.Array: "an array of numbers",
    np.ndarray: "an array of numbers",
    jax.Device: "a device",
    Mesh: "a jax.sharding.Mesh",
}


def answers(
    where: str, hints: Mapping[str, str] = _NONE, many: str = "", renamed: Mapping[str, str] = _NONE
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions whose calls with wrong arguments are answered in words, which begin with `where`.

    `hints`: what to do instead of an argument that is not there, by its name. `many`: instead of too many by position.
    `renamed`: the new names of arguments by their old ones, which work and warn.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True  # IPython and pytest leave this frame out of a traceback
            if renamed:
                _use_new_names(where, renamed, kwargs)
            try:
                # What a call is given goes to its devices, though the user may have set `jax.transfer_guard`. A guard
                # that disallows explicit transfers too stays.
                guards = [each for name, each in _GUARDS.items() if getattr(jax.config, name) in ("disallow", "log")]
                if not guards:  # nothing runs after `fn`, where Ctrl-C would lose the state that `fit` returns
                    return fn(*args, **kwargs)
                with contextlib.ExitStack() as block:
                    for guard in guards:
                        block.enter_context(guard("allow"))
                    return fn(*args, **kwargs)
            except Exception as error:
                if isinstance(error, TypeError):
                    _check_names(where, fn, args, kwargs, hints, many)
                _explain(where, fn, args, kwargs, error)
                raise

        return checked

    return decorate


def answers_class(where: str) -> Callable[[C], C]:
    """As `answers`, for the calls of a class."""

    def decorate(cls: C) -> C:
        cls.__init__ = answers(where)(cls.__init__)
        return cls

    return decorate


def users_level() -> int:
    """The `stacklevel` by which a warning of the caller is shown at the line of the user."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("jaxpar."):
        level, frame = level + 1, frame.f_back
    return level


def _use_new_names(where: str, names: Mapping[str, str], kwargs: dict[str, Any]) -> None:
    """Give the keywords of a call their new names. An old one warns, at the line of the caller."""
    for old in names.keys() & kwargs.keys():
        if (new := names[old]) in kwargs:
            raise TypeError(f"{where}: {old}= is now called {new}=; give only {new}=")
        warnings.warn(f"{where}: {old}= is now called {new}=", DeprecationWarning, stacklevel=3)
        kwargs[new] = kwargs.pop(old)


def _check_names(
    where: str,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    hints: Mapping[str, str],
    many: str,
) -> None:
    """`TypeError` unless a call has all the arguments that the function needs, and no others."""
    signature = inspect.signature(fn)
    with contextlib.suppress(TypeError):
        signature.bind(*args, **kwargs)
        return  # so the error came from inside of the function
    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    count = len(args) - ("self" in signature.parameters)
    kinds = {p.kind for p in parameters}
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    first = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    names = [p.name for p in named]
    needed = [p.name for p in named if p.default is p.empty]
    wrong = [name for name in kwargs if name not in names]
    twice = [name for name in first[:count] if name in kwargs]
    if count > len(first) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        keyword_only = names[len(first) :]
        shown = ", ".join([*first, *(f"{name}=..." for name in keyword_only[:_MOST_SHOWN])])
        problem = f"got {count} arguments without a name, expected at most {len(first)}; write {where}({shown}){many}"
    elif wrong and inspect.Parameter.VAR_KEYWORD not in kinds:
        hint = f"; {hints[wrong[0]]}" if wrong[0] in hints else did_you_mean(wrong[0], names)
        problem = f"there is no argument {wrong[0]!r}{hint or '; known are ' + ', '.join(names)}"
    elif twice:
        problem = f"{twice[0]} is given twice, by position and by name"
    else:
        missing = " and ".join(name for name in needed if name not in kwargs and name not in first[:count])
        shown = ", ".join(name if name in first else f"{name}=..." for name in needed)
        problem = f"{missing} is missing; write {where}({shown})"
    raise TypeError(f"{where}: {problem}") from None


def _explain(
    where: str, fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], error: Exception
) -> None:
    """Raise what names the argument that does not fit. Return, if jaxpar or the user's code has raised the error.

    Where all arguments fit, the error is raised again with all of them before its words. It is a `TypeError` if it is
    not common, and an argument of which the signature says nothing holds something else than arrays and numbers. All
    are raised `from None`, so that one traceback is printed.
    """
    if not _is_from_below(error):
        return
    message, arguments = str(error).split("\n")[0], list(_arguments(fn, args, kwargs))
    for name, value, hint in arguments:
        _check_pytree(value, f"{where}: {name}", message)
        if not _fits(value, hint):
            # A state for its store, a dataset for its images: the value may have what is wanted under that name.
            attribute = None if hasattr(value, "dtype") else getattr(value, name, None)
            within = f"; give its .{name}" if attribute is not None and _fits(attribute, hint) else ""
            raise TypeError(f"{where}: {name} must be {_type_name(hint)}, got {describe(value)}{within}") from None
    odd = any(_is_free(hint) and not all(map(_is_value, jax.tree.leaves(value))) for _, value, hint in arguments)
    if odd or type(error) in _COMMON:
        call = ", ".join(f"{name}={describe(value)}" for name, value, _ in arguments)
        kind = type(error) if type(error) in _COMMON else TypeError
        raise kind(f"{where}({call}): {error}") from None


def _is_from_below(error: Exception) -> bool:
    """Whether JAX, NumPy or Python raised the error, and no code of the user was under way."""
    # A `raise` of jaxpar has words of its own. An operation of jaxpar that fails, as `3 + None` does, has not.
    at, last = error.__traceback__, None
    while at is not None:
        if at.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _BELOW:
            return False
        at, last = at.tb_next, at
    assert last is not None
    is_raise = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return not (is_raise and last.tb_frame.f_globals["__name__"].startswith("jaxpar"))


def _arguments(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, Any, Hint]]:
    """Of each argument of a call the name, the value, and the type that the signature says."""
    signature = inspect.signature(fn)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        parameter = signature.parameters[name]
        hint = _type_of(parameter.annotation, inspect.unwrap(fn))
        if parameter.kind == parameter.VAR_POSITIONAL:
            yield from ((f"{name}[{i}]", item, hint) for i, item in enumerate(value))
        elif parameter.kind == parameter.VAR_KEYWORD:
            yield from ((key, item, Any) for key, item in value.items())
        elif name != "self":
            yield name, value, hint


def _type_of(annotation: Hint, fn: Any) -> Hint:
    """An annotation as a type. `Any` where only type checkers know it."""
    import optax  # some annotations name it, and their modules import it for type checkers only

    try:
        return eval(annotation, {"optax": optax, **fn.__globals__}) if isinstance(annotation, str) else annotation
    except NameError:
        return Any


def _check_pytree(value: PyTree, where: str, message: str) -> None:
    """`RuntimeError` for an array that was deleted, `TypeError` for dicts of which JAX makes no pytree."""
    # A step that fails, as for lack of memory, has deleted the arrays of its state too. So the message of the error
    # decides whether a deleted array is what went wrong.
    is_deletion = "deleted" in message or "donated" in message
    try:
        leaves = jax.tree_util.tree_leaves_with_path(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} must have keys of one type in each dict: {str(error).splitlines()[0]}") from None
    for path, leaf in leaves:
        if is_gone(leaf) and (is_deletion or is_traced(leaf)):
            raise gone_error(leaf, where + jax.tree_util.keystr(path)) from None


def _is_value(leaf: Any) -> bool:
    """Whether an argument of any type may well hold this."""
    if hasattr(leaf, "dtype"):
        return is_of_numbers(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if isinstance(leaf, int):
        return leaf in _INTS
    return isinstance(leaf, (float, complex)) or type(leaf).__module__.startswith("jax")


# The types of a signature.


def _is_free(hint: Hint) -> bool:
    return hint is Any or hint is inspect.Parameter.empty or isinstance(hint, TypeVar)


def _options(hint: Hint) -> Sequence[Hint]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [inner for option in typing.get_args(hint) for inner in _options(option)] if is_union else [hint]


def _fits(value: object, hint: Hint) -> bool:
    """Whether a value is of a type, where this can be seen without using the value up."""
    options = _options(hint)
    return any(map(_is_free, options)) or any(_fits_one(value, option) for option in options)


def _fits_one(value: object, hint: Hint) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in args)
    if origin is Callable:
        return callable(value) and (not isinstance(args[0], list) or takes(value, len(args[0])))
    if origin is not None:
        return not isinstance(origin, type) or (isinstance(value, origin) and _items_fit(value, args))
    if hint in (jax.Array, np.ndarray):
        return is_of_numbers(value)
    if hint in (int, float):
        kinds = (int, np.integer) if hint is int else (int, float, np.integer, np.floating)
        is_number = isinstance(value, kinds) and not isinstance(value, (bool, np.bool_))
        return is_number and (not isinstance(value, int) or value in _INTS)
    if getattr(hint, "_is_protocol", False):
        return not isinstance(value, type) and all(hasattr(value, n) for n in vars(hint) if not n.startswith("_"))
    return value is None if hint is None else not isinstance(hint, type) or isinstance(value, hint)


def _items_fit(value: Any, args: Sequence[Hint]) -> bool:
    """Whether the items of a collection fit. An iterator is not read."""
    if isinstance(value, Mapping):
        # A subclass may have other parameters than a key's and a value's type.
        of_key, of_value = args if len(args) == 2 else (Any, Any)
        return all(_fits(k, of_key) and _fits(v, of_value) for k, v in value.items())
    if isinstance(value, tuple) and len(args) > 1 and Ellipsis not in args:
        return len(value) == len(args) and all(map(_fits, value, args))
    is_read = isinstance(value, (list, tuple, set, frozenset)) and len(args) > 0
    return not isinstance(value, (str, bytes)) and (not is_read or all(_fits(item, args[0]) for item in value))


def _type_name(hint: Hint) -> str:
    """What a type is called in a message."""
    if len(options := _options(hint)) > 1:
        return " or ".join(dict.fromkeys(map(_type_name, options)))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is Callable:
        return f"a function of {len(args[0])} arguments" if isinstance(args[0], list) else "a function"
    if isinstance(origin, type) and args:
        item = args[-1] if issubclass(origin, Mapping) else args[0]
        name = "a dict" if issubclass(origin, Mapping) else "an iterable" if origin is Iterable else "a list"
        return name if _is_free(item) else f"{name}, each of it {_type_name(item)}"
    return _TYPE_NAMES.get(hint) or f"a {getattr(hint, '__name__', hint)}"


# Functions that a user gives.


def takes(fn: Callable[..., object], count: int) -> bool:
    """Whether a call with so many positional arguments fits the function. True where Python does not know."""
    return _bind(fn, [str(i) for i in range(count)]) is not None


def check_takes(fn: object, names: Sequence[str], what: str, hint: str = "", also: Sequence[str] = ()) -> None:
    """`TypeError` unless a call by position with arguments of these names fits the function, as Python knows it.

    `what` and `hint` begin and end the message. `also`: arguments that follow by keyword where the function has them.
    """
    expected = f"{what} must be a function of ({', '.join(names)})"
    if not callable(fn):
        raise TypeError(f"{expected}, got {describe(fn)}{hint}")
    also = [name for name in also if has_parameter(fn, name)]
    bound = _bind(fn, names, also)
    if bound is None:
        after = f", and then {', '.join(also)}" if also else ""
        raise TypeError(f"{expected}{after}, got {_shown(fn)}{hint}")
    # `bound` has for each parameter the name of what it would get.
    if any(name in names and parameter in names and parameter != name for parameter, name in bound.items()):
        raise TypeError(f"{expected}, and {_shown(fn)} names them in another order; reorder them")


def has_parameter(fn: Callable[..., object], name: str) -> bool:
    """Whether a function has a parameter of this name that a keyword can give, and that `partial` has not given."""
    try:
        outer, inner = inspect.signature(fn, follow_wrapped=False), inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin
        return False
    preset = fn.keywords if isinstance(fn, functools.partial) else ()
    # A wrapper with **kwargs passes the keyword on to the function inside.
    takes_any = inspect.Parameter.VAR_KEYWORD in [p.kind for p in outer.parameters.values()]
    return name in inner.parameters and name not in preset and (takes_any or name in outer.parameters)


def _bind(
    fn: Callable[..., object], values: Sequence[str], by_keyword: Sequence[str] = ()
) -> Mapping[str, object] | None:
    """The values by the names of the arguments that get them. None: the function does not take so many."""
    try:
        signature = inspect.signature(fn, follow_wrapped=False)  # a wrapper may take other arguments
    except (TypeError, ValueError):  # a builtin
        return {}
    try:
        return signature.bind(*values, **dict.fromkeys(by_keyword)).arguments
    except TypeError:
        return None


def _shown(fn: Callable[..., object]) -> str:
    return f"{getattr(fn, '__name__', type(fn).__name__)}{inspect.signature(fn, follow_wrapped=False)}"
