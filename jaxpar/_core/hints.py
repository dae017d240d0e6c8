"""Types of a signature: whether a value is of one, and what it is called in a message."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import takes

INTS = range(-(2**63), 2**63)
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


def is_of_numbers(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))


def is_free(hint: Any) -> bool:
    return hint is Any or hint is inspect.Parameter.empty or isinstance(hint, TypeVar)


def _options(hint: Any) -> Sequence[Any]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [part for option in typing.get_args(hint) for part in _options(option)] if is_union else [hint]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, where this can be seen without using the value up."""
    options = _options(hint)
    return any(map(is_free, options)) or any(_fits_one(value, option) for option in options)


def _fits_one(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is Callable:
        return callable(value) and (not isinstance(parts[0], list) or takes(value, len(parts[0])))
    if origin is not None:
        return not isinstance(origin, type) or (isinstance(value, origin) and _items_fit(value, parts))
    if hint in (jax.Array, np.ndarray):
        return is_of_numbers(value)
    if hint in (int, float):
        kinds = (int, np.integer) if hint is int else (int, float, np.integer, np.floating)
        is_number = isinstance(value, kinds) and not isinstance(value, (bool, np.bool_))
        return is_number and (not isinstance(value, int) or value in INTS)
    if getattr(hint, "_is_protocol", False):
        return not isinstance(value, type) and all(hasattr(value, n) for n in vars(hint) if not n.startswith("_"))
    return value is None if hint is None else not isinstance(hint, type) or isinstance(value, hint)


def _items_fit(value: Any, parts: Sequence[Any]) -> bool:
    """Whether the items of a collection fit. An iterator is not read."""
    if isinstance(value, Mapping):
        of_key, of_value = parts if len(parts) == 2 else (Any, Any)
        return all(fits(k, of_key) and fits(v, of_value) for k, v in value.items())
    if isinstance(value, tuple) and len(parts) > 1 and Ellipsis not in parts:
        return len(value) == len(parts) and all(map(fits, value, parts))
    is_read = isinstance(value, (list, tuple, set, frozenset)) and len(parts) > 0
    return not isinstance(value, (str, bytes)) and (not is_read or all(fits(item, parts[0]) for item in value))


def words(hint: Any) -> str:
    """What a type is called in a message."""
    if len(options := _options(hint)) > 1:
        return " or ".join(dict.fromkeys(map(words, options)))
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is Callable:
        return f"a function of {len(parts[0])} arguments" if isinstance(parts[0], list) else "a function"
    if isinstance(origin, type) and parts:
        item = parts[-1] if issubclass(origin, Mapping) else parts[0]
        name = "a dict" if issubclass(origin, Mapping) else "a list"
        return name if is_free(item) else f"{name}, each of it {words(item)}"
    return _WORDS.get(hint) or f"a {getattr(hint, '__name__', hint)}"
