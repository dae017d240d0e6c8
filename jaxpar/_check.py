"""The one place that looks at what came in and words the message: key, expected, given, what to do."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class UnknownKeyError(KeyError):
    """A key that was never initialised. A `KeyError` whose message is shown without quotes around it."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_key(key: Any) -> int:
    """`key` as a Python int; `TypeError` for what is no int (a bool is none, a NumPy int is one)."""
    if isinstance(key, (bool, np.bool_)) or not isinstance(key, (int, np.integer)):
        hint = "; give a list of ints for several keys" if isinstance(key, tuple) else ""
        hint = "; kv.names(store) says which key a name has" if isinstance(key, str) else hint
        raise TypeError(f"a key of the store must be an int, got {key!r} of type {type(key).__name__}{hint}")
    return operator.index(key)


def as_keys(key: Any) -> tuple[list[int], bool]:
    """The keys as a list, and whether a list was given."""
    if isinstance(key, (list, range)):
        return [as_key(k) for k in key], True
    return [as_key(key)], False


def as_values(keys: Sequence[int], value: Any, many: bool, what: str) -> list[Any]:
    """One value a key; `ValueError` where the lists differ in length."""
    if not many:
        return [value]
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"{what}: for the list of keys {shorten(keys)} value must be a list with one entry for each, "
            f"got {describe(value)}"
        )
    if len(value) != len(keys):
        raise ValueError(
            f"{what}: {len(keys)} keys {shorten(keys)} but a list of {len(value)} values; give one entry for each key, "
            "a list itself where several devices push"
        )
    return list(value)


def known(keys: Iterable[int], values: dict[int, Any], what: str) -> None:
    """`KeyError` for a key the store does not hold."""
    for key in keys:
        if key not in values:
            there = f"the store holds {shorten(sorted(values))}" if values else "the store is empty"
            raise UnknownKeyError(f"{what}: key {key} was never initialised ({there}); call kv.init first")


def array(value: Any, where: str) -> jax.Array:
    """`value` as a jax array that nobody else can change; `TypeError` for what is no array of numbers."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (list, tuple, str, bytes, dict)) or value is None:
        raise TypeError(f"{where}: expected an array, got {describe(value)}")
    try:
        return jnp.array(value)  # a copy: NumPy's memory may change later
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: expected an array, got {describe(value)}") from error


def same_shape(value: Any, shape: tuple[int, ...], where: str) -> None:
    if value.shape != shape:
        raise ValueError(f"{where}: expected shape {shape}, got {value.shape}")


def castable(given: Any, stored: Any, where: str) -> None:
    """`TypeError` where a value of dtype `given` cannot be stored as dtype `stored` safely.

    Floating to floating is a cast, whatever the widths, and so is complex to complex; anything else must be
    safe in NumPy's sense and must not turn integers into floating numbers.
    """
    if given == stored:
        return
    for family in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(given, family) and jnp.issubdtype(stored, family):
            return
    integral = jnp.issubdtype(given, jnp.integer) or jnp.issubdtype(given, jnp.bool_)
    if integral and not jnp.issubdtype(stored, jnp.integer):
        raise TypeError(f"{where}: expected dtype {stored}, got {given}; use value.astype({str(stored)!r})")
    if not np.can_cast(given, stored, "safe"):
        raise TypeError(f"{where}: dtype {given} cannot be cast safely to the stored {stored}")


def devices(given: Any, where: str) -> tuple[Any, ...]:
    """The devices as a tuple; an error where they are none, one stands twice, or a number came in their place."""
    if not isinstance(given, Iterable) or isinstance(given, str):
        hint = f"; for the first {given} of them write jax.devices()[:{given}]" if isinstance(given, int) else ""
        raise TypeError(f"{where}: devices must be a list of devices such as jax.devices(), got {given!r}{hint}")
    chosen = tuple(given)
    if not chosen or len(set(chosen)) < len(chosen):
        hint = "" if chosen else "; give at least one device"
        raise ValueError(f"{where}: devices must be one or more different devices, got {list(chosen)}{hint}")
    return chosen


def labels(given: Any, where: str) -> None:
    """`TypeError` for what is no array of one integer for each example; shape and dtype are looked at alone."""
    if given.ndim == 1 and jnp.issubdtype(given.dtype, jnp.integer):
        return
    hint = "make floating class numbers integers by labels.astype(int)"
    if given.ndim > 1:
        hint = "drop an axis of length 1 by labels[:, 0], turn one-hot labels into integers by labels.argmax(-1)"
    raise TypeError(
        f"{where}: labels must be integers of shape (n,), one for each example, got {describe(given)}; {hint}"
    )


def hashable(value: Any, where: str) -> Any:
    """`value`, for which a compiled program is kept; `TypeError` where it can change and so has no hash."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{where}: expected a function, which is compiled once, got {describe(value)}, which has no hash and may "
            "change; give a function that calls it"
        ) from None
    return value


def describe(value: Any) -> str:
    """A few words on what came: `float32[2,3]`, `a list of 3`, `None`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def shorten(items: Sequence[Any], most: int = 8) -> str:
    """The items as a list, cut after `most`."""
    shown = ", ".join(map(str, items[:most]))
    return f"[{shown}, ... {len(items)} in all]" if len(items) > most else f"[{shown}]"
