"""Whether two functions or objects of two processes are the same, as far as Python shows what they are made of."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import jax
import numpy as np

from ..._core.arrays import is_of_numbers
from ..._devices.mesh import is_donated

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_MOST_BYTES = 1 << 16  # of an array. Of a larger one the shape says enough
_MOST_DEPTH = 24
_MOST_TEXTS = 20_000  # so that an object that leads to half of a library takes no time


def fingerprint(*values: Any) -> str:
    """A hash of code, constants, defaults, what functions close over, and public attributes.

    It is the same in another process, where the same Python runs. What is beyond Python is not seen, such as a file
    that a function reads.
    """
    hasher = hashlib.sha256()
    for text in itertools.islice(_texts(values, _MOST_DEPTH), _MOST_TEXTS):
        hasher.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return hasher.hexdigest()[:16]


def _texts(value: Any, depth_left: int) -> Iterator[str]:
    """The type of a value, and its content or that of its members, depth first. No addresses and no order of sets."""
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
        yield f"{value.dtype} {value.shape}"
        # An array of other processes, or one that a step took, has no numbers here.
        is_here = not isinstance(value, jax.Array) or (value.is_fully_addressable and not is_donated(value))
        if is_here and is_of_numbers(value) and value.nbytes <= _MOST_BYTES:
            yield np.asarray(value).tobytes().hex()
    elif isinstance(value, (type, types.ModuleType)):
        yield value.__name__
    elif depth_left:
        if isinstance(value, Set):  # whose order differs from process to process
            members: Iterable[Any] = sorted(" ".join(_texts(member, depth_left - 1)) for member in value)
        elif isinstance(value, Mapping):
            members = itertools.chain.from_iterable(value.items())
        else:
            members = value if isinstance(value, (tuple, list)) else _members(value)
        for member in members:
            yield from _texts(member, depth_left - 1)


def _members(value: Any) -> Iterator[Any]:
    """What a function or an object is made of."""
    if isinstance(value, types.FunctionType):
        yield from (value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is not bound yet
                yield None
        # Of global names those that are numbers and texts, such as LEARNING_RATE.
        named = {name: value.__globals__.get(name) for name in sorted(_global_names(value.__code__))}
        yield {name: content for name, content in named.items() if content is not None and isinstance(content, _PLAIN)}
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


def _global_names(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in a function, and in those that are written inside of it."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_global_names, inner))
