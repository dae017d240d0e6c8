"""Programs of the last few things that a user made: optimizers, functions, compressions.

A module's own `jax.jit` keeps a program for each static argument forever, and with it all that the argument refers to.
So such programs are `jit`s of their own here, one for each thing, and the one used longest ago is released.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

MOST = 8  # how many are kept: a user tries a few optimizers or losses, and goes on with one


class Recent:
    """The values of the last few keys, each made by `make` from the parts of its key.

    A key is a tuple. It is compared, not hashed, so its parts need no hash.
    """

    def __init__(self, make: Callable[..., Any]):
        self._make = make
        self._entries: list[tuple[tuple[Any, ...], Any]] = []  # (key, value), the last one used comes first

    def __call__(self, *key: Any, make: bool = True) -> Any:
        """The value of this key. Where there is none yet, it is made, or without `make` the result is None."""
        entries = self._entries  # another thread may put another list there
        for i, (other, value) in enumerate(entries):
            try:
                is_same = other == key
            except Exception:  # keys that cannot be compared, as arrays cannot, are not equal
                is_same = False
            if is_same:
                if i:
                    self._entries = [entries[i], *entries[:i], *entries[i + 1 :]]
                return value
        if not make:
            return None
        value = self._make(*key)
        self._entries = [(key, value), *self._entries][:MOST]
        return value


def forget(fn: Callable[..., object]) -> None:
    """Release what JAX made of a function for `jax.pmap`. A later call compiles again."""
    # JAX (0.10 to 0.12) keeps what it made of a mapped function as long as that function exists. What it made refers
    # to the function. So neither is ever released, nor are the arrays that the function refers to.
    cached = getattr(sys.modules[jax.pmap.__module__], "_cached_shard_map", None)
    release = getattr(cached, "evict_function", None)
    if release is not None:
        release(fn)
