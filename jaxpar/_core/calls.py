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
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from .arguments import describe, did_you_mean
from .arrays import check_not_gone
from .hints import INTS, fits, is_free, is_of_numbers, words

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
        if not fits(value, hint):
            within = f"; give its .{name}" if fits(getattr(value, name, None), hint) else ""
            raise TypeError(f"{where}: {name} must be {words(hint)}, got {describe(value)}{within}") from error
    odd = any(is_free(hint) and not all(map(_is_value, jax.tree.leaves(value))) for _, value, hint in given)
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
        return is_of_numbers(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if isinstance(leaf, int):
        return leaf in INTS
    return isinstance(leaf, (float, complex)) or type(leaf).__module__.startswith("jax")
