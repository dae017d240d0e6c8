"""Checks of what users give. Each message names the key or argument, what was expected, what came, and what to do."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import describe as describe, did_you_mean, is_int as is_int, shorten as shorten
from .arrays import Device, check_not_gone, check_plain

Engine = Literal["pmap", "shard_map"]
_INT64 = 2**63 - 1
ENGINES: tuple[Engine, ...] = get_args(Engine)


# Keys of a store, and the values given for them.


class UnknownKeyError(KeyError):
    """A key that was never initialised. A `KeyError` whose message is shown without quotes around it."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_key(key: Any) -> int:
    """`key` as a Python int. A NumPy int is a key, a bool is none.

    Raises:
        TypeError: it is no int.
    """
    if not is_int(key):
        hint = "; give a list of ints for several keys" if isinstance(key, tuple) else ""
        hint = "; the keys of kv.from_params have names, kv.names(store)" if isinstance(key, str) else hint
        raise TypeError(f"a key of the store must be an int, got {key!r} of type {type(key).__name__}{hint}")
    return operator.index(key)


def as_keys(key: Any) -> tuple[list[int], bool]:
    """The keys as a list, and whether a list was given."""
    if isinstance(key, (list, range)):
        return [as_key(k) for k in key], True
    return [as_key(key)], False


def as_values(keys: Sequence[int], value: Any, many: bool, what: str) -> list[Any]:
    """One value for each key.

    Args:
        many: whether a list of keys was given, as from `as_keys`.

    Raises:
        TypeError: a list of keys, and no list of values.
        ValueError: the lists differ in length.
    """
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


def check_known(keys: Iterable[int], values: dict[int, Any], what: str) -> None:
    """`UnknownKeyError` for a key that the store does not hold."""
    for key in keys:
        if key not in values:
            there = f"the store holds {shorten(sorted(values))}" if values else "the store is empty"
            raise UnknownKeyError(f"{what}: key {key} was never initialised ({there}); call kv.init first")


# Arrays.


def array(value: Any, where: str) -> jax.Array:
    """`value` as a jax array with memory of its own.

    Raises:
        TypeError: it is no array of plain numbers.
        RuntimeError, TypeError: it has no values, see `arrays.check_not_gone`.
    """
    if isinstance(value, jax.Array):
        return check_not_gone(value, where)
    if isinstance(value, (list, tuple, str, bytes, dict)) or value is None:
        raise TypeError(f"{where}: expected an array, got {describe(value)}")
    check_plain(value, where)
    try:
        return jnp.array(value)  # a copy: NumPy's memory may change later
    except jax.errors.JaxRuntimeError:  # a copy that the user's jax.transfer_guard disallows
        raise
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # the last: a tensor of PyTorch with a gradient
        raise TypeError(f"{where}: expected an array, got {describe(value)} ({error})") from error


def same_shape(value: Any, shape: tuple[int, ...], where: str) -> None:
    """`ValueError` for an array of another shape."""
    if value.shape != shape:
        raise ValueError(f"{where}: expected shape {shape}, got {value.shape}")


def castable(given: Any, stored: Any, where: str) -> None:
    """`TypeError` if a value of dtype `given` cannot be stored as dtype `stored` safely.

    Floating to floating is a cast, whatever the widths, and so is complex to complex. Anything else must be
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


# Devices and batches.


def devices(given: Any, where: str) -> tuple[Any, ...]:
    """The devices as a tuple.

    Raises:
        TypeError: no list of devices, for example their number.
        ValueError: no device, or one appears twice.
    """
    chosen = device_list(given, where)
    if not chosen or len(set(chosen)) < len(chosen):
        hint = "" if chosen else "; give at least one device"
        raise ValueError(f"{where}: devices must be one or more different devices, got {list(chosen)}{hint}")
    return chosen


def device_list(given: Any, where: str) -> tuple[Any, ...]:
    """The devices as a tuple, which may have one twice. `TypeError` for anything else than devices."""
    given = given.ravel() if isinstance(given, np.ndarray) else given  # the devices of a mesh
    many = isinstance(given, Iterable) and not isinstance(given, (str, jax.Array))
    items = list(given) if many else [given]
    if many and all(hasattr(item, "process_index") for item in items):
        return tuple(items)
    hint = f"; for the first {given} of them write jax.devices()[:{given}]" if is_int(given) else ""
    hint = "; write [device] for one" if hasattr(given, "process_index") else hint
    raise TypeError(f"{where}: devices must be a list of devices such as jax.devices(), got {given!r}{hint}")


def check_devices(given: Sequence[Device] | None, what: str) -> tuple[Device, ...]:
    """The devices as a tuple, all local ones for None. Errors as of `devices`."""
    return devices(jax.local_devices() if given is None else given, what)


def check_own(devices: Iterable[Device], what: str) -> None:
    """`ValueError` for a device of another process, to which nothing can be sent. `TypeError` for what is no device."""
    for d in device_list(devices, what):
        if d.process_index != jax.process_index():
            raise ValueError(
                f"{what}: {d} belongs to process {d.process_index} and this is process {jax.process_index()}; give "
                "devices of this process, jax.local_devices()"
            )


def check_engine(engine: str, what: str) -> None:
    """`ValueError` for a word that names no engine."""
    choice(engine, what, "engine", ENGINES)


def batch_length(data: Any, what: str, axis: int = 0) -> int:
    """The length of an axis that all arrays of a batch share.

    Args:
        axis: 0, or 1 for several batches stacked along a first axis.

    Raises:
        ValueError: no arrays, or their lengths differ.
    """
    lengths = {np.shape(leaf)[axis : axis + 1] for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1 or () in lengths:
        shapes = [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(data)]
        which = "second axis, the one after that of the steps" if axis else "first axis"
        raise ValueError(f"{what}: the arrays of a batch must share the length of their {which}, got {shapes}")
    return next(iter(lengths))[0]


def even_share(n: int, parts: int, where: str, advice: str = "") -> int:
    """How many of `n` examples each of `parts` devices gets.

    Raises:
        ValueError: `n` cannot be divided. The message names the nearest batches that can.
    """
    if n % parts == 0:
        return n // parts
    sizes = " or ".join(str(size) for size in dict.fromkeys((n // parts * parts, -(-n // parts) * parts)) if size)
    raise ValueError(f"{where}: a batch of {n} cannot be divided by {parts} devices; use a batch of {sizes}{advice}")


# Options.


def whole_number(value: Any, where: str, name: str, least: int = 1, most: int = _INT64) -> int:
    """`value` as an int from `least` to `most`. A NumPy int is a number, a bool is none.

    Raises:
        TypeError: it is no int.
        ValueError: it is less than `least` or more than `most`.
    """
    limits = f"of {least} or more" if most == _INT64 else f"from {least} to {most:,}"
    message = f"{where}: {name} must be an int {limits}, got {_quote(value)}"
    if not is_int(value):
        raise TypeError(message)
    if not least <= value <= most:
        raise ValueError(message)
    return operator.index(value)


def number(value: Any, where: str, name: str, expected: str, allowed: Callable[[float], bool]) -> float:
    """`value` as a float for which `allowed` holds. A NumPy scalar is a number, a bool is none.

    Args:
        expected: the words of the message, such as "a number above 0".

    Raises:
        TypeError: it is no real number.
        ValueError: it is not allowed.
    """
    message = f"{where}: {name} must be {expected}, got {_quote(value)}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        raise TypeError(message)
    try:
        result = float(value)
    except OverflowError as error:
        raise ValueError(f"{message}, beyond the range of floats") from error
    if not allowed(result):
        raise ValueError(message)
    return result


def text(value: Any, where: str, name: str) -> str:
    """`value`, a string of Unicode. `TypeError` for anything else, `ValueError` for half a character."""
    if not isinstance(value, str):
        raise TypeError(f"{where}: {name} must be a string, got {_quote(value)}")
    if not value.isprintable():
        raise ValueError(f"{where}: {name} must be a string of characters that can be printed, got {value!r}")
    return value


def choice(value: Any, where: str, name: str, known: Iterable[str]) -> str:
    """`value`, which must be one of the known words.

    Raises:
        ValueError: it is another. The message lists the known ones and suggests the nearest.
    """
    words = list(known)
    if isinstance(value, str) and value in words:
        return value
    came = _quote(value)
    raise ValueError(
        f"{where}: unknown {name} {came}; known are {', '.join(words)}{did_you_mean(came, map(repr, words))}"
    )


# What belongs to a model.


def labels(given: Any, where: str) -> None:
    """`TypeError` unless the array holds one integer per example. Only shape and dtype are checked."""
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


def function(value: Any, where: str) -> Any:
    """`value`, a function for which a compiled program is kept. Errors as of `hashable`."""
    if not callable(value):
        raise TypeError(f"{where}: expected a function, got {describe(value)}; look at the order of the arguments")
    return hashable(value, where)


def random_key(rng: Any, where: str) -> jax.Array:
    """`rng` as a random key. An int makes one. `TypeError` for anything else."""
    if is_int(rng):
        return jax.random.key(rng)
    key: Any = rng
    is_key = isinstance(rng, (jax.Array, np.ndarray)) and (
        jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or rng.dtype == np.uint32
    )
    if not is_key:
        raise TypeError(f"{where}: rng must be a random key, such as jax.random.key(0), got {describe(rng)}")
    return key


def transform(tx: Any, where: str) -> Any:
    """`tx`, an optax transform. `TypeError` for anything else, such as the function that makes one."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return tx
    name = getattr(tx, "__name__", None) if callable(tx) else None
    hint = f"; call it first, {name}(0.1)" if name else ", say optax.sgd(0.1)"
    raise TypeError(f"{where}: expected an optax.GradientTransformation{hint}; got {describe(tx)}")


def arrays_of_numbers(tree: Any, where: str) -> None:
    """`TypeError` for a leaf of a pytree that is no array of numbers, such as a list's number or an array of words."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        check_plain(leaf, f"{where}{jax.tree_util.keystr(path)}")
        if isinstance(leaf, jax.Array) or (dtype is not None and _is_numeric(dtype)):
            continue
        name = jax.tree_util.keystr(path)
        raise TypeError(f"{where}{name} must be an array of numbers, got {describe(leaf)}")


def _is_numeric(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))


# Words of messages.


def _quote(value: Any) -> str:
    return repr(value) if isinstance(value, np.generic) else describe(value)
