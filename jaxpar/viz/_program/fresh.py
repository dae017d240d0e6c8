"""A compiled program whose text has the lines of the source as it is now."""

from __future__ import annotations

import threading
from typing import Any

import jax

_IN_KEY = "jax_compilation_cache_include_metadata_in_key"
_LOCK = threading.Lock()
_DEFAULT: dict[str, Any] = {"xla_dump_hlo_as_text": False}  # with any option jax compiles again what it has compiled


def compile_from_source(lowered: Any) -> Any:
    """The compiled program of a lowered one, with the names and lines that it was lowered from.

    jax's persistent compilation cache takes no account of them. What it gives may have been compiled from the same
    operations in other lines, or in another directory. So with such a cache it is compiled again, under a key that has
    the lines.

    Args:
        lowered: a `jax.stages.Lowered`.
    """
    config: Any = jax.config
    if not (config.jax_enable_compilation_cache and config.jax_compilation_cache_dir):
        return lowered.compile()
    with _LOCK:
        before = getattr(config, _IN_KEY)
        config.update(_IN_KEY, True)
        try:
            return lowered.compile(compiler_options=_DEFAULT)
        finally:
            config.update(_IN_KEY, before)
