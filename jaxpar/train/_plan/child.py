"""The process that compiles for accelerators, without any of them: `ask` starts it, and `main` runs in it.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .accelerators import Slice
from .compiled import in_one_line

PYTHON = "JAXPAR_PLAN_PYTHON"
_HINT = f"`make plan-env` makes an environment with it and {PYTHON} names its Python, see docs/plan.md"
_BY_VALUE = "pip install cloudpickle, or put make and what it is given in a module"
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

Work = Callable[[Callable[..., Any], Slice, dict[str, Any], float], Any]  # such as `examine`


def ask(work: Work, make: Callable[..., Any], target: Slice, choices: dict[str, Any], caller: str) -> Any:
    """What `work(make, target, choices, fraction)` gives, from a process of its own, or the error that it gives."""
    python = os.environ.get(PYTHON) or sys.executable
    fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    try:  # functions of a notebook by value
        pickler = importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle")
        request = pickler.dumps((work, make, target, choices, fraction, settings))
    except Exception as error:
        raise ValueError(
            f"{caller}: make or a choice cannot be sent to the process that compiles ({error}); {_BY_VALUE}"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "request").write_bytes(request)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        version = "{}.{}".format(*sys.version_info)
        command = [python, "-c", _START.format(sep=os.pathsep), paths, version, folder]
        ended = subprocess.run(command, env=_environment(target), capture_output=True, text=True, check=False)
        answer = Path(folder) / "answer"
        if not answer.exists():
            last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"{caller}: {python}, which compiles, ended with {ended.returncode}: {last}")
        answered = pickle.loads(answer.read_bytes())
    if isinstance(answered, Exception):
        raise type(answered)(f"{caller}, on={target.name!r}: {answered}")
    return answered


def _environment(target: Slice) -> dict[str, str]:
    """Variables of the compilers, which read them when they load."""
    variables = {name: value for name, value in os.environ.items() if name not in _NOT_HERE}
    variables |= {"JAX_PLATFORMS": "cpu", "TPU_LOG_DIR": "disabled"}
    variables["TPU_SKIP_MDS_QUERY"] = "1"  # else libtpu asks a server of metadata, and waits
    variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else a second process ends at a lock
    if target.is_gpu:  # both would run kernels to choose among them; libtpu ends at a flag that it does not know
        variables["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    return variables


def main(folder: str) -> None:
    """Answer the request in a folder."""
    answer = _answer((Path(folder) / "request").read_bytes())
    (Path(folder) / "answer").write_bytes(pickle.dumps(answer))


def _answer(request: bytes) -> Any:
    # An error is an answer too, as text: its class may be of a module that the other process has not.
    try:
        work, make, target, choices, fraction, settings = pickle.loads(request)
    except Exception as error:
        return ValueError(f"make cannot be loaded in {sys.executable}: {type(error).__name__}: {error}; {_BY_VALUE}")
    for name, value in settings.items():
        jax.config.update(name, value)
    if problem := _missing(target):
        return RuntimeError(problem)
    try:
        return work(make, target, choices, fraction)
    except Exception as error:
        return ValueError(in_one_line(error))


def _missing(target: Slice) -> str:
    """Which compiler this Python lacks, and what to do. Empty where it has it."""
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin") if target.is_gpu else ("libtpu",)
    if any(map(importlib.util.find_spec, names)):
        return ""
    compiler = "CUDA plugin of JAX, the compiler for GPUs" if target.is_gpu else "libtpu, the compiler for TPUs"
    return f"{sys.executable} has no {compiler}{'' if target.is_gpu else ' (Linux on x86-64 only)'}; {_HINT}"
