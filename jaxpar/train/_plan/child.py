"""The process that compiles. It has the compilers, and takes no accelerator.

libtpu and JAX's CUDA plugin do not belong in the environment that trains: with both installed plain `jax.devices()`
complains. So another Python may have them. What only the training has comes behind its own packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import jax

from .slices import Slice

PYTHON = "JAXPAR_PLAN_PYTHON"
_HINT = f"`make plan-env` makes an environment with it and {PYTHON} names its Python, see docs/plan.md"
_START = """
import sys
paths, version, folder = sys.argv[1].split({sep!r}), sys.argv[2], sys.argv[3]
if version != "%d.%d" % sys.version_info[:2]:
    sys.exit("it is Python %d.%d" % sys.version_info[:2] + ", and this is " + version + "; take the same version")
sys.path += [path for path in paths if path not in sys.path]
from jaxpar.train._plan.child import main
main(folder)
"""
# What changes programs, and may have been set without the environment.
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
_NOT_HERE = ("XLA_FLAGS", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAXPAR_COORDINATOR")


def ask(make: Any, where: Slice, choices: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What `examine` gives, from a process of its own.

    Raises:
        RuntimeError: there is no compiler for these devices, or it ended.
        ValueError: the process cannot have `make`, or `make` raises.
    """
    python = os.environ.get(PYTHON) or sys.executable
    fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    request = _dumps((make, where, choices, fraction, settings))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "request").write_bytes(request)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        version = "{}.{}".format(*sys.version_info)
        words = [python, "-c", _START.format(sep=os.pathsep), paths, version, folder]
        try:
            ended = subprocess.run(words, env=_environment(where), capture_output=True, text=True, check=False)
        except OSError as error:
            raise RuntimeError(f"train.plan: {PYTHON} cannot be started: {error}") from None
        answer = Path(folder) / "answer"
        if not answer.exists():
            last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(
                f"train.plan: the process that compiles, {python}, ended with {ended.returncode}: {last}"
            )
        kind, *rest = pickle.loads(answer.read_bytes())
    if kind != "plan":
        raise (RuntimeError if kind == "compiler" else ValueError)(f"train.plan, on={where.name!r}: {rest[0]}")
    return rest[0], rest[1]


def _dumps(request: Any) -> bytes:
    """The request, functions of a notebook by value."""
    make = request[0]
    try:
        return importlib.import_module("cloudpickle").dumps(request)
    except ImportError:
        hint = "pip install cloudpickle, or put make and what it is given in a module"
    if getattr(make, "__module__", None) == "__main__":
        raise ValueError(f"train.plan: the process that compiles cannot import {make.__qualname__} of __main__; {hint}")
    try:
        return pickle.dumps(request)
    except Exception as error:
        raise ValueError(
            f"train.plan: make or a choice cannot be sent to the process that compiles ({error}); {hint}"
        ) from None


def _environment(where: Slice) -> dict[str, str]:
    """Variables of the compilers, which read them when they load."""
    found = {name: value for name, value in os.environ.items() if name not in _NOT_HERE}
    found |= {"JAX_PLATFORMS": "cpu", "TPU_LOG_DIR": "disabled"}
    found["TPU_SKIP_MDS_QUERY"] = "1"  # else libtpu asks a server of metadata, and waits
    found["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else a second process ends at a lock
    if where.is_gpu:  # both would run kernels to choose among them; libtpu ends at a flag that it does not know
        found["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    return found


def main(folder: str) -> None:
    """Answer the request in a folder."""
    answer = _answer(Path(folder) / "request")
    (Path(folder) / "answer").write_bytes(pickle.dumps(answer))


def _answer(request: Path) -> tuple[Any, ...]:
    from .examine import examine

    try:
        make, where, choices, fraction, settings = pickle.loads(request.read_bytes())
    except Exception as error:
        return "make", f"make cannot be loaded in {sys.executable}: {type(error).__name__}: {error}"
    for name, value in settings.items():
        jax.config.update(name, value)
    if problem := _missing(where):
        return "compiler", problem
    try:
        return "plan", *examine(make, where, choices, fraction)
    except Exception as error:
        return "make", _words(error)


def _missing(where: Slice) -> str:
    """Which compiler this Python lacks, and what to do. Empty where it has it."""
    if where.is_gpu:
        if any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            return ""
        return f"{sys.executable} has no CUDA plugin of JAX, the compiler for GPUs; {_HINT}"
    if importlib.util.find_spec("libtpu"):
        return ""
    return f"{sys.executable} has no libtpu, the compiler for TPUs (Linux on x86-64 only); {_HINT}"


def _words(error: Exception) -> str:
    """An error of `make` or of the compiler in one line, with the user's line that it comes from."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}jaxpar{os.sep}" not in frame.filename and "site-packages" not in frame.filename
    ]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if isinstance(error, (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)):
        return f"make reads the values of an array{place}, but here arrays have only shapes; use the shapes"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
