"""Releases what JAX keeps of a function for `jax.pmap`.

JAX (0.10 to 0.12) keeps what it made of a mapped function as long as that function exists. What it made refers to the
function. So neither is ever released, nor are the programs and the arrays that the function refers to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax


def forget(fn: Callable[..., Any]) -> None:
    """Release what JAX made of a function for `jax.pmap`. A later call compiles again."""
    kept = getattr(sys.modules[jax.pmap.__module__], "_cached_shard_map", None)
    release = getattr(kept, "evict_function", None)
    if release is not None:
        release(fn)
