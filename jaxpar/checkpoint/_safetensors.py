"""Params in a `.safetensors` file, which other trainers, hubs and runtimes read. The file holds no code."""

from __future__ import annotations

import collections
import math
import os

import jax
import jax.numpy as jnp
import numpy as np

from .._core import files
from .._core.arrays import PyTree
from .._core.files import CheckpointError
from .._core.transfers import allows_transfers
from .._devices import mesh, processes
from . import _bucket, _leaves
from ._arrays import to_numpy
from ._bucket import BucketPath

_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{f"{kind}{n}": f"{name}{n}" for kind, name in (("I", "int"), ("U", "uint")) for n in (8, 16, 32, 64)},
}


@allows_transfers
def export(state: PyTree, path: str | os.PathLike[str]) -> None:
    """Write the params of a state to a `.safetensors` file, by name, such as "conv1.kernel".

    The names are those of the pytree of params, with dots. Optimizer states, steps and random keys are left out. With
    several processes, all of them must call `export`, and the first one writes. All params pass through its memory.

    Args:
        state: a `train.TrainState`, a `kv.KVStore`, or a pytree of params.
        path: the file. One that is there is replaced.

    Raises:
        ModuleNotFoundError: the package `safetensors` is not installed; `jaxpar[others]` brings it.
        TypeError: a leaf is not an array of numbers.
        SafetensorError: such files do not have the dtype of a leaf.
        ValueError: two params would have the same name.
        OSError: the file cannot be written. One that was there is as before.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import checkpoint
        >>> checkpoint.export({"dense": {"kernel": jnp.ones((2, 3))}}, "model.safetensors")  # doctest: +SKIP
        >>> checkpoint.load("model.safetensors")["dense.kernel"].shape  # doctest: +SKIP
        (2, 3)
    """
    target = _bucket.as_path(path, "checkpoint.export: path")
    from safetensors.numpy import save  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    # Of a state, the values of its store; of another pytree, all leaves.
    slots = _leaves.slots_of(state)
    if any(slot.array is not None for slot in slots):
        slots = [slot for slot in slots if slot.array is not None and slot.array.startswith("params/")]
    names = [(slot.array or slot.name or "value").removeprefix("params/").replace("/", ".") for slot in slots]
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise ValueError(f"checkpoint.export: two params would have the name {twice[0]!r}; rename one of them")
    arrays: dict[str, np.ndarray] = {}
    for name, slot in zip(names, slots, strict=True):
        leaf = mesh.to_host(slot.leaf)
        array = to_numpy(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
        if jax.process_index() == 0:
            arrays[name] = np.ascontiguousarray(array.reshape(-1)[: math.prod(slot.shape)]).reshape(slot.shape)
    with processes.raise_together():
        if jax.process_index() == 0:
            content = save(arrays)
            if isinstance(target, BucketPath):
                _bucket.put(target, content)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                files.replace(target, content)


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a `.safetensors` file, by name. Nothing in the file is run.

    Args:
        path: a file by `export`, or by another trainer or hub.

    Returns:
        {name: array} in the order of the names, such as {"conv1.kernel": array}.

    Raises:
        ModuleNotFoundError: the package `safetensors` is not installed; `jaxpar[others]` brings it.
        OSError: the file cannot be read.
        CheckpointError: it is no such file, or it is damaged.

    Example:
        >>> from jaxpar import checkpoint
        >>> checkpoint.load("model.safetensors")  # doctest: +SKIP
    """
    source = _bucket.as_path(path, "checkpoint.load: path")
    from safetensors import deserialize  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    if isinstance(source, BucketPath):
        content, _ = _bucket.get(source)
        if content is None:
            raise FileNotFoundError(f"checkpoint.load: there is nothing at {source}")
    else:
        with files.opened(source) as file:
            content = file.read()
    try:
        # safetensors' own reader for NumPy knows no bfloat16 and no float8.
        arrays = {
            name: np.frombuffer(bytes(entry["data"]), jnp.dtype(_DTYPES[entry["dtype"]])).reshape(entry["shape"])
            for name, entry in deserialize(content)
        }
    except Exception as error:
        raise CheckpointError(f"{source} is not a good .safetensors file ({error})") from error
    return {name: arrays[name].copy() for name in sorted(arrays)}
