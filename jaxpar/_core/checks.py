"""Checks of what users give. Each message names the key or argument, what was expected, what came, and what to do.

`caller` begins the message: the function that the user called, as "kv.push", and more where one of its arguments has
several parts, as "kv.push: value for key 3".
"""

from __future__ import annotations

import difflib
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeGuard, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .arrays import Device, PyTree, Shaped, Value, check_plain, is_deleted, is_of_numbers, is_prng_key, is_tracing
from .host import in_kept_dtype
from .text import cut_middle, describe as describe, did_you_mean, matches, shorten as shorten

Engine = Literal["pmap", "shard_map"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
Key = int | str
Keys = list[int] | list[str] | list[int | str] | range
_INT64 = 2**63 - 1


# Keys of a store, and the values given for them.


class Keyed(Protocol):
    """What a store has: values by key, and the names of the keys where it was made of params."""

    @property
    def values(self) -> Mapping[int, object]: ...
    @property
    def paths(self) -> Sequence[tuple[int, str]]: ...


class UnknownKeyError(KeyError):
    """A key that was never initialised. A `KeyError` whose message is shown without quotes around it."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_values(keys: Sequence[int], value: object, caller: str, name: str = "value") -> list[Any]:
    """What was given for a list of keys: a list with a value for each."""
    is_list = isinstance(value, (list, tuple))
    if is_list and len(value) == len(keys):
        return list(value)
    error = ValueError if is_list else TypeError
    raise error(
        f"{caller}: {name} must be a list with one entry for each of the {len(keys)} keys {shorten(keys)}, a list "
        f"itself where several devices push, got {describe(value)}"
    )


def find_keys(key: Any, caller: str, store: Keyed | None = None) -> tuple[list[int], bool]:
    """The keys that a call names, as Python ints, and whether it gave a list. A bool is no key.

    With a store, each key must be there, with a value that was not deleted. The keys may be names.
    """
    many = isinstance(key, (list, range))
    keys: Sequence[Any] = key if many else (key,)

    # Names become numbers. The table of names is made only here, since a push by numbers needs none.
    if store is not None and store.paths and any(isinstance(k, str) for k in keys):
        by_name = {name: k for k, name in store.paths}
        for name in keys:
            if isinstance(name, str) and name not in by_name:
                near = difflib.get_close_matches(name, by_name, 3, 0.5)
                near = near or [path for path in by_name if path.endswith(f"/{name}")][:3]
                nearest = f"near are {', '.join(map(repr, near))}" if near else f"known are {shorten(list(by_name))}"
                raise UnknownKeyError(
                    f"{caller}: no parameter is called {name!r}, {nearest}; kv.names(store) has them all"
                )
        keys = [by_name[k] if isinstance(k, str) else k for k in keys]

    for k in keys:
        if not is_int(k):
            hint = "; give a list of ints for several keys" if isinstance(k, tuple) else ""
            hint = "; the keys of kv.from_params have names, kv.names(store)" if isinstance(k, str) else hint
            raise TypeError(f"a key of the store must be an int, got {k!r} of type {type(k).__name__}{hint}")
        if store is not None and k not in store.values:
            content = f"the store holds {shorten(sorted(store.values))}" if store.values else "the store is empty"
            raise UnknownKeyError(f"{caller}: key {k} was never initialised ({content}); call kv.init first")
        if store is not None and is_deleted(store.values[k]):
            raise RuntimeError(
                f"{caller}: key {k}: the stored value was deleted, as by donating this store to a jitted function; use "
                "the store that the function returned"
            )
    return list(map(operator.index, keys)), many


# Arrays.


def array(value: Any, caller: str) -> jax.Array:
    """`value` as a jax array with memory of its own. `TypeError` for what is no array of plain numbers."""
    # JAX refuses a deleted array wherever it is read. A tracer that has left its function could be stored in silence.
    if isinstance(value, jax.core.Tracer) and not is_tracing():
        raise jax.errors.UnexpectedTracerError(
            f"{caller}: {describe(value)} is a tracer of a jitted function that has ended; return the value from that "
            "function, and use what the call returns"
        )
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (list, tuple, str, bytes, dict)) or value is None:
        raise TypeError(f"{caller}: expected an array, got {describe(value)}")
    check_plain(value, caller)
    if isinstance(value, (np.ndarray, np.generic)) and is_of_numbers(value):
        value = in_kept_dtype(value, caller)
    try:
        return jnp.array(value)  # a copy: NumPy's memory may change later
    except jax.errors.JaxRuntimeError:  # a copy that the user's jax.transfer_guard disallows
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last: PyTorch, with a gradient
        reason = cut_middle(" ".join(str(error).split()), 200)  # a module has many lines
        raise TypeError(f"{caller}: expected an array, got {describe(value)} ({reason})") from None


def storable(value: Shaped, shape: tuple[int, ...], stored: np.dtype[Any], caller: str) -> None:
    """`ValueError` for an array of another shape, `TypeError` if it cannot be stored as the dtype `stored` safely.

    Floating to floating is a cast, whatever the widths, and so is complex to complex. Anything else must be
    safe in NumPy's sense and must not turn integers into floating numbers.
    """
    if value.shape != shape:
        raise ValueError(f"{caller}: expected shape {shape}, got {value.shape}")
    dtype = value.dtype
    if dtype == stored:
        return
    for family in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(dtype, family) and jnp.issubdtype(stored, family):
            return
    integral = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)
    if (integral and not jnp.issubdtype(stored, jnp.integer)) or not np.can_cast(dtype, stored, "safe"):
        raise TypeError(f"{caller}: expected dtype {stored}, got {dtype}; use value.astype({str(stored)!r})")


# Devices and batches.


def devices(value: object, caller: str) -> tuple[Device, ...]:
    """The devices as a tuple, at least one and none twice. `TypeError` for no list of devices, such as their number."""
    chosen = device_list(value, caller)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"{caller}: devices must be one or more different devices, got {list(chosen)}")
    return chosen


def device_list(value: Any, caller: str) -> tuple[Device, ...]:
    """The devices as a tuple, which may have one twice. `TypeError` for anything else than devices."""
    value = value.ravel() if isinstance(value, np.ndarray) else value  # the devices of a mesh
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, jax.Array))
    items = tuple(value) if is_list else ()
    if is_list and all(hasattr(item, "process_index") for item in items):
        return items
    hint = "; write [device] for one" if hasattr(value, "process_index") else ""
    hint = f"; for the first {value} of them write jax.devices()[:{value}]" if is_int(value) else hint
    raise TypeError(f"{caller}: devices must be a list of devices such as jax.devices(), got {value!r}{hint}")


def check_own(devices: Iterable[Device], caller: str) -> None:
    """`ValueError` for a device of another process, to which nothing can be sent. `TypeError` for what is no device."""
    for d in device_list(devices, caller):
        if d.process_index != jax.process_index():
            raise ValueError(
                f"{caller}: {d} belongs to process {d.process_index} and this is process {jax.process_index()}; give "
                "devices of this process, jax.local_devices()"
            )


def batch_length(data: PyTree, caller: str, axis: int = 0, advice: str = "") -> int:
    """The length of an axis that all arrays of a batch share: axis 1 where several batches are stacked."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(data)]
    lengths = {shape[axis : axis + 1] for shape in shapes}
    if len(lengths) == 1 and () not in lengths:
        return next(iter(lengths))[0]
    if not shapes:
        raise ValueError(f"{caller}: expected arrays with a row for each example, got none in {describe(data)}")
    which = "second axis, the one after that of the steps" if axis else "first axis"
    hint = advice
    if () in shapes:
        hint = "; write a list of numbers as np.array(numbers), and one number for n examples as np.full(n, number)"
    raise ValueError(
        f"{caller}: the arrays of a batch must share the length of their {which}, got {shorten(shapes)}{hint}"
    )


def whole_batch(examples: int, batch_size: int, caller: str, advice: str = "") -> None:
    """`ValueError` if there are fewer examples than a batch needs."""
    if examples < batch_size:
        raise ValueError(
            f"{caller}: {examples} examples make no whole batch of {batch_size}; use a smaller batch_size{advice}"
        )


def even_share(n: int, count: int, caller: str, advice: str = "", of: str = "devices") -> int:
    """How many of `n` examples each of `count` devices gets. The `ValueError` names the nearest batches that divide."""
    if n % count == 0:
        return n // count
    sizes = " or ".join(str(size) for size in dict.fromkeys((n // count * count, -(-n // count) * count)) if size)
    raise ValueError(f"{caller}: a batch of {n} cannot be divided by {count} {of}; use a batch of {sizes}{advice}")


# Options.


def is_int(value: object) -> TypeGuard[int]:
    """Whether this is an int of Python or of NumPy. A bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def whole_number(value: object, caller: str, name: str, least: int = 1, most: int = _INT64) -> int:
    """`value` as an int from `least` to `most`. A NumPy int is a number, a bool is none."""
    if is_int(value) and least <= value <= most:
        return operator.index(value)
    error, shown = (ValueError, operator.index(value)) if is_int(value) else (TypeError, value)
    limits = f"of {least} or more" if most == _INT64 else f"from {least} to {most:,}"
    raise error(f"{caller}: {name} must be an int {limits}, got {describe(shown)}")


def number(value: Any, caller: str, name: str, expected: str, allowed: Callable[[float], bool]) -> float:
    """`value` as a float for which `allowed` holds. A NumPy scalar is a number, a bool is none.

    `expected` are the words of the message, such as "a number above 0".
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and allowed(float(value)):
        return float(value)
    error, shown = (ValueError, float(value)) if is_number else (TypeError, value)
    raise error(f"{caller}: {name} must be {expected}, got {describe(shown)}")


def text(value: object, caller: str, name: str) -> str:
    """`value`, a string of Unicode. `TypeError` for anything else, `ValueError` for half a character."""
    if not isinstance(value, str):
        raise TypeError(f"{caller}: {name} must be a string, got {describe(value)}")
    if not value.isprintable():
        raise ValueError(f"{caller}: {name} must be a string of characters that can be printed, got {value!r}")
    return value


def choice(value: object, caller: str, name: str, options: Iterable[str]) -> str:
    """`value`, which must be one of the options. The `ValueError` lists these and suggests the nearest."""
    options = list(options)
    if isinstance(value, str) and value in options:
        return value
    near = did_you_mean(describe(value), map(repr, options))
    raise ValueError(f"{caller}: unknown {name} {describe(value)}; known are {', '.join(options)}{near}")


def at_most_one(caller: str, **options: object) -> None:
    """`ValueError` if more than one of these options is given. One of them would be ignored."""
    names = [f"{name}=" for name, value in options.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{caller}: give {' or '.join(names)}, not both")


# What belongs to a model.


def labels(array: jax.Array | np.ndarray, caller: str) -> None:
    """`TypeError` unless the array holds one integer per example. Only shape and dtype are checked."""
    if array.ndim == 1 and jnp.issubdtype(array.dtype, jnp.integer):
        return
    hint = "make floating class numbers integers by labels.astype(int)"
    if array.ndim > 1:
        hint = "drop an axis of length 1 by labels[:, 0], turn one-hot labels into integers by labels.argmax(-1)"
    raise TypeError(f"{caller}: labels must be integers of shape (n,), one an example, got {describe(array)}; {hint}")


def function(value: Value, caller: str) -> Value:
    """`value`, a function. `TypeError` for anything else, as where the arguments are in another order."""
    if not callable(value):
        raise TypeError(f"{caller}: expected a function, got {describe(value)}; look at the order of the arguments")
    return value


def random_key(rng: Any, caller: str) -> jax.Array:
    """`rng` as a random key. An int makes one. `TypeError` for anything else."""
    if is_int(rng):
        return jax.random.key(rng)
    key: Any = rng
    if not isinstance(rng, (jax.Array, np.ndarray)) or not (is_prng_key(rng) or rng.dtype == np.uint32):
        raise TypeError(f"{caller}: rng must be an int or a random key, such as jax.random.key(0), got {describe(rng)}")
    return key


def transform(tx: Value, caller: str) -> Value:
    """`tx`, an optax transform. `TypeError` for anything else, such as the function that makes one."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return tx
    name = getattr(tx, "__name__", None) if callable(tx) else None
    hint = f"; call it first, {name}(0.1)" if name else " such as optax.sgd(0.1)"
    raise TypeError(f"{caller}: expected an optax.GradientTransformation{hint}; got {describe(tx)}")


def arrays_of_numbers(tree: PyTree, caller: str) -> None:
    """`TypeError` for a leaf of a pytree that is no array of numbers, such as a list's number or an array of words."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = caller + jax.tree_util.keystr(path)
        check_plain(leaf, name)
        if not isinstance(leaf, jax.Array) and not is_of_numbers(leaf):
            raise TypeError(f"{name} must be an array of numbers, got {describe(leaf)}")


def matched(patterns: Sequence[str], names: Sequence[str], caller: str) -> list[bool]:
    """Which of the names of params match one of the patterns, or of `a|b`. `ValueError` for one that matches none."""
    patterns = [part for pattern in patterns for part in ([pattern] if pattern in names else pattern.split("|"))]
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            subtrees = {subtree for name in names for subtree in (name, name.rpartition("/")[0])}
            hint = did_you_mean(pattern, subtrees) or f"; some are {shorten(names, 4)}"
            raise ValueError(f"{caller}={pattern!r} matches no param{hint}")
    return [any(matches(name, pattern) for pattern in patterns) for name in names]
