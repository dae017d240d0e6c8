"""Kernels for JAX on CPUs: finds the library, and registers its handlers with XLA."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path

import jax

HANDLERS = (
    *("Convolution", "ConvolutionFilter", "ConvolutionBf16", "ConvolutionFilterBf16"),
    *("LstmForward", "LstmBackward", "GruForward", "GruBackward", "RecurrentWeight"),
)
"""The handlers of the library. XLA knows each as `jaxpar_cpu.NAME`."""

_LIBRARY = Path(__file__).parent / "libjaxpar_cpu.so"


def is_off() -> bool:
    """Whether the user has turned the kernels off."""
    return os.environ.get("JAXPAR_CPU_KERNELS") == "0"


@functools.cache
def why_not() -> str | None:
    """Registers the handlers. None, or why they cannot be used here."""
    if is_off():
        return "JAXPAR_CPU_KERNELS=0 turns them off"
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        return f"the library cannot be loaded ({error})"
    built, running = (library.JaxparFfiMajor(), library.JaxparFfiMinor()), ffi_version()
    if running is None:
        return f"the FFI of jaxlib {jax.lib.__version__} says no version"
    # XLA takes handlers of older minor versions. It stops at one that is newer, and JAX with it.
    if built[0] != running[0] or built[1] > running[1]:
        return "they are built for FFI {}.{}, and this jaxlib has {}.{}: install jaxpar-cpu again".format(
            *built, *running
        )
    for name in HANDLERS:
        jax.ffi.register_ffi_target(f"jaxpar_cpu.{name}", jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return None


def has_fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32: by AMX or by AVX-512's instructions for it."""
    library = ctypes.CDLL(str(_LIBRARY))
    library.JaxparHasFastBf16.restype = ctypes.c_bool
    return library.JaxparHasFastBf16()


def ffi_version() -> tuple[int, int] | None:
    """The version of the FFI of the jaxlib that runs, from its header."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    text = header.read_text() if header.exists() else ""
    matches = [re.search(rf"#define XLA_FFI_API_{name} (\d+)", text) for name in ("MAJOR", "MINOR")]
    major, minor = (int(match[1]) if match else -1 for match in matches)
    return None if -1 in (major, minor) else (major, minor)
