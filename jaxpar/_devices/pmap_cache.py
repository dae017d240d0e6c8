"""`jax.pmap` without what JAX keeps of it for ever.

JAX (0.10 to 0.12) keeps what it made of a mapped function as long as that function lives. What it made refers to the
function, so neither ever goes, nor do the programs and the arrays that the function refers to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax


def forget(fn: Callable[..., Any]) -> None:
    """Releases what JAX made of a function for `jax.pmap`; a later call compiles again."""
    kept = getattr(sys.modules[jax.pmap.__module__], "_cached_shard_map", None)
    release = getattr(kept, "evict_function", None)
    if release is not None:
        release(fn)
