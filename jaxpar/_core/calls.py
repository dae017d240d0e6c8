"""Calls of public functions, and what is answered where one cannot be made.

`answers` is the one check of all of them. What the function does not take is refused. What it takes is compared with
its signature only after the call has failed in the words of JAX, NumPy or Python: so a call that works costs nothing,
and arguments count alike by position and by name.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import describe, did_you_mean, takes
from .arrays import check_not_gone

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
_MOST_SHOWN = 8  # options in a message
_NONE: Mapping[str, str] = {}

_BELOW = (
    sys.stdlib_module_names
    | {"jaxpar", "jax", "jaxlib", "numpy", "ml_dtypes", "optax"}
    | {"graphviz", "matplotlib", "pandas", "PIL", "tqdm"}
)
_COMMON = (TypeError, ValueError, IndexError, OverflowError, RuntimeError, NameError)
_INTS = range(-(2**63), 2**63)
_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an int of 64 bits",
    float: "a number",
    str: "a string",
    type(None): "None",
    jax.Array: "an array of numbers",
    np.ndarray: "an array of numbers",
    jax.Device: "a device",
}


def answers(where: str, hints: Mapping[str, str] = _NONE, many: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions whose calls with wrong arguments are answered in words.

    Args:
        where: the name of the function, for messages.
        hints: what to do instead, by the name of an argument that it does not have.
        many: the end of the message where too many arguments come without a name.

    Example:
        >>> @answers("area", {"x": "call it width"})
        ... def area(width, *, height=1):
        ...     return width * height
        >>> area(2, heigth=3)
        Traceback (most recent call last):
        TypeError: area: there is no argument 'heigth'; did you mean height?
        >>> area()
        Traceback (most recent call last):
        TypeError: area: width is missing; write area(width)
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        call = _Call(where, fn, hints, many)

        @functools.wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not call.is_complete(len(args), kwargs):
                call.refuse(len(args), kwargs)
            try:
                if not is_guarded():
                    return fn(*args, **kwargs)
                with own_transfers():
                    return fn(*args, **kwargs)
            except Exception as error:
                _explain(where, fn, args, kwargs, error)
                raise

        return checked

    return decorate


def is_guarded() -> bool:
    """Whether the user has set `jax.transfer_guard`."""
    config: Any = jax.config
    return bool(
        config.jax_transfer_guard_host_to_device
        or config.jax_transfer_guard_device_to_host
        or config.jax_transfer_guard_device_to_device
    )


@contextlib.contextmanager
def own_transfers() -> Generator[None]:
    """A block whose transfers are explicit for `jax.transfer_guard`: what a call is given goes to its devices.

    A guard that disallows explicit transfers too stays.
    """
    with contextlib.ExitStack() as stack:
        for way in ("host_to_device", "device_to_host", "device_to_device"):
            if getattr(jax.config, f"jax_transfer_guard_{way}") in ("disallow", "log"):
                stack.enter_context(getattr(jax, f"transfer_guard_{way}")("allow"))
        yield


def answers_class(where: str) -> Callable[[C], C]:
    """As `answers`, for the calls of a class."""

    def decorate(cls: C) -> C:
        cls.__init__ = answers(where)(cls.__init__)
        return cls

    return decorate


class _Call:
    """What a call of a function may have."""

    def __init__(self, where: str, fn: Callable[..., Any], hints: Mapping[str, str], many: str):
        parameters = inspect.signature(fn).parameters
        kinds = {p.kind for p in parameters.values()}
        given = [name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.where, self.hints, self.many = where, hints, many
        self.first = [name for name in given if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY]
        self.rest = [name for name in given if name not in self.first]
        self.most = sys.maxsize if inspect.Parameter.VAR_POSITIONAL in kinds else len(self.first)
        self.names = frozenset(given)
        self.takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        self._needed = [name for name in given if parameters[name].default is inspect.Parameter.empty]
        self._needed_first = len([name for name in self._needed if name in self.first])

    def is_complete(self, count: int, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with so many arguments without a name, and these, has all that it needs and no others."""
        if count > self.most or not (self.takes_any or self.names.issuperset(kwargs)):
            return False
        if count >= self._needed_first and len(self._needed) == self._needed_first:
            return True
        return not self._missing(count, kwargs)

    def _missing(self, count: int, kwargs: Mapping[str, Any]) -> list[str]:
        return [name for name in self._needed if name not in kwargs and name not in self.first[:count]]

    def refuse(self, count: int, kwargs: Mapping[str, Any]) -> None:
        """Raise the `TypeError` for a call."""
        first = [name for name in self.first if name != "self"]
        shown = ", ".join([*first, *(f"{name}=..." for name in self.rest[:_MOST_SHOWN])])
        if count > self.most:
            own = len(self.first) - len(first)
            raise TypeError(
                f"{self.where}: got {count - own} arguments without a name, expected at most {self.most - own}; write "
                f"{self.where}({shown}){self.many}"
            )
        wrong = next((name for name in kwargs if name not in self.names), "")
        if not wrong or self.takes_any:
            missing = " and ".join(self._missing(count, kwargs))
            needed = ", ".join(name if name in first else f"{name}=..." for name in self._needed if name != "self")
            raise TypeError(f"{self.where}: {missing} is missing; write {self.where}({needed})")
        known = [*first, *self.rest]
        hint = f"; {self.hints[wrong]}" if wrong in self.hints else did_you_mean(wrong, known)
        raise TypeError(f"{self.where}: there is no argument {wrong!r}{hint or '; known are ' + ', '.join(known)}")


def _explain(where: str, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], error: Exception) -> None:
    """Raise what names the argument that does not fit. Return, if jaxpar or the user's code has raised the error.

    Raises:
        RuntimeError: an array in an argument was deleted.
        TypeError: an argument is not what the signature says.
        Others: as `error`, with all arguments before its words. A `TypeError` for an error that is not common, where an
            argument of which the signature says nothing holds something else than arrays and numbers.
    """
    if not _is_from_below(error):
        return
    said = str(error).split("\n")[0]
    given = list(_given(fn, args, kwargs))
    for name, value, hint in given:
        _check_pytree(value, f"{where}: {name}")
        if not _fits(value, hint):
            within = f"; give its .{name}" if _fits(getattr(value, name, None), hint) else ""
            raise TypeError(f"{where}: {name} must be {_words(hint)}, got {describe(value)}{within}") from error
    odd = any(_is_free(hint) and not all(map(_is_value, jax.tree.leaves(value))) for _, value, hint in given)
    if odd or type(error) in _COMMON:
        call = ", ".join(f"{name}={describe(value)}" for name, value, _ in given)
        kind = type(error) if type(error) in _COMMON else TypeError
        raise kind(f"{where}({call}): {said}") from error


def _is_from_below(error: Exception) -> bool:
    """Whether JAX, NumPy or Python raised the error, and no code of the user was under way."""
    at, last = error.__traceback__, None
    while at is not None:
        if at.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _BELOW:
            return False
        at, last = at.tb_next, at
    assert last is not None
    is_raise = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return not (is_raise and last.tb_frame.f_globals["__name__"].startswith("jaxpar"))


def _given(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
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


def _type_of(annotation: Any, fn: Any) -> Any:
    """An annotation as a type. `Any` where only type checkers know it."""
    import optax

    try:
        return eval(annotation, {"optax": optax, **fn.__globals__}) if isinstance(annotation, str) else annotation
    except NameError:
        return Any


def _check_pytree(value: Any, where: str) -> None:
    """`RuntimeError` for an array that was deleted, `TypeError` for dicts of which JAX makes no pytree."""
    try:
        leaves = jax.tree_util.tree_leaves_with_path(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} must have keys of one type in each dict: {str(error).splitlines()[0]}") from error
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array):
            check_not_gone(leaf, where + jax.tree_util.keystr(path))


def _is_value(leaf: Any) -> bool:
    """Whether an argument of any type may well hold this."""
    if hasattr(leaf, "dtype"):
        return _is_of_numbers(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if isinstance(leaf, int):
        return leaf in _INTS
    return isinstance(leaf, (float, complex)) or type(leaf).__module__.startswith("jax")


def _is_of_numbers(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))


# Types of the signature, and values.


def _is_free(hint: Any) -> bool:
    return hint is Any or hint is inspect.Parameter.empty or isinstance(hint, TypeVar)


def _options(hint: Any) -> Sequence[Any]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [part for option in typing.get_args(hint) for part in _options(option)] if is_union else [hint]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, where this can be seen without using the value up."""
    options = _options(hint)
    return any(map(_is_free, options)) or any(_fits_one(value, option) for option in options)


def _fits_one(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is Callable:
        return callable(value) and (not isinstance(parts[0], list) or takes(value, len(parts[0])))
    if origin is not None:
        return not isinstance(origin, type) or (isinstance(value, origin) and _items_fit(value, parts))
    if hint in (jax.Array, np.ndarray):
        return _is_of_numbers(value)
    if hint in (int, float):
        kinds = (int, np.integer) if hint is int else (int, float, np.integer, np.floating)
        is_number = isinstance(value, kinds) and not isinstance(value, (bool, np.bool_))
        return is_number and (not isinstance(value, int) or value in _INTS)
    if getattr(hint, "_is_protocol", False):
        return not isinstance(value, type) and all(hasattr(value, n) for n in vars(hint) if not n.startswith("_"))
    return value is None if hint is None else not isinstance(hint, type) or isinstance(value, hint)


def _items_fit(value: Any, parts: Sequence[Any]) -> bool:
    """Whether the items of a collection fit. An iterator is not read."""
    if isinstance(value, Mapping):
        of_key, of_value = parts if len(parts) == 2 else (Any, Any)
        return all(_fits(k, of_key) and _fits(v, of_value) for k, v in value.items())
    if isinstance(value, tuple) and len(parts) > 1 and Ellipsis not in parts:
        return len(value) == len(parts) and all(map(_fits, value, parts))
    is_read = isinstance(value, (list, tuple, set, frozenset)) and len(parts) > 0
    return not isinstance(value, (str, bytes)) and (not is_read or all(_fits(item, parts[0]) for item in value))


def _words(hint: Any) -> str:
    """What a type is called in a message."""
    if len(options := _options(hint)) > 1:
        return " or ".join(dict.fromkeys(map(_words, options)))
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is Callable:
        return f"a function of {len(parts[0])} arguments" if isinstance(parts[0], list) else "a function"
    if isinstance(origin, type) and parts:
        item = parts[-1] if issubclass(origin, Mapping) else parts[0]
        name = "a dict" if issubclass(origin, Mapping) else "a list"
        return name if _is_free(item) else f"{name}, each of it {_words(item)}"
    return _WORDS.get(hint) or f"a {getattr(hint, '__name__', hint)}"
