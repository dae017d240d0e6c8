"""Whether two functions or objects of two processes are the same, as far as Python shows what they are made of."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import jax
import numpy as np

from ..._core.arrays import is_of_numbers
from ..._devices.mesh import is_donated

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_MOST_BYTES = 1 << 16  # of an array. Of a larger one the shape says enough
_MOST_DEPTH = 24
_MOST_WORDS = 20_000  # so that an object that leads to half of a library takes no time


def fingerprint(*values: Any) -> str:
    """A hash of code, constants, defaults, what functions close over, and public attributes.

    It is the same in another process, where the same Python runs. What is beyond Python is not seen, such as a file
    that a function reads.
    """
    found = hashlib.sha256()
    for word in itertools.islice(_words(values, _MOST_DEPTH), _MOST_WORDS):
        found.update(word.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()[:16]


def _words(value: Any, left: int) -> Iterator[str]:
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
        yield f"{value.dtype} {value.shape}"
        is_known = not isinstance(value, jax.Array) or (value.is_fully_addressable and not is_donated(value))
        if is_known and is_of_numbers(value) and value.nbytes <= _MOST_BYTES:
            yield np.asarray(value).tobytes().hex()
    elif isinstance(value, (type, types.ModuleType)):
        yield value.__name__
    elif left:
        if isinstance(value, Set):
            parts: Any = sorted(" ".join(_words(each, left - 1)) for each in value)  # their order is another each time
        elif isinstance(value, Mapping):
            parts = itertools.chain.from_iterable(value.items())
        else:
            parts = value if isinstance(value, (tuple, list)) else _parts(value)
        for part in parts:
            yield from _words(part, left - 1)


def _parts(value: Any) -> Iterator[Any]:
    """What a function or an object is made of."""
    if isinstance(value, types.FunctionType):
        yield from (value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is not bound yet
                yield None
        # Of global names those that are numbers and texts, such as LEARNING_RATE.
        names = {name: value.__globals__.get(name) for name in sorted(_names(value.__code__))}
        yield {name: found for name, found in names.items() if found is not None and isinstance(found, _PLAIN)}
    elif isinstance(value, types.CodeType):
        yield from (value.co_code, value.co_names, value.co_consts)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif callable(getattr(value, "__wrapped__", None)):
        yield value.__wrapped__
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                yield from (field.name, getattr(value, field.name, None))
    else:
        for name, attribute in getattr(value, "__dict__", {}).items():
            # One that begins with an underscore may be a cache or a random name. Functions and numbers with a point are
            # settings, as in optax.MultiSteps. Libraries number the names of models.
            kinds = (float, types.FunctionType) if name.startswith("_") else object
            if name != "name" and isinstance(attribute, kinds) and not isinstance(attribute, (np.ndarray, jax.Array)):
                yield from (name, attribute)


def _names(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in a function, and in those that are written inside of it."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))
