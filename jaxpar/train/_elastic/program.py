"""What a process of an elastic run would compute, in short.

A process that comes back reads the script again, and the script may have been edited meanwhile. So it is compared with
process 0 before it may take part. What is not compared: the Python functions that a program calls back
(`jax.pure_callback`), and examples that are neither in the batches compared nor among the rows hashed.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ..._core.arrays import without_keys
from .._step.state import TrainState

_MOST = 1 << 26  # bytes of an array of the data that are hashed. Of a larger one rows at even distances are
# The number of a device is in the text of a program with a callback.
_DEVICE = re.compile(r"device_ids = (\[\d*\]|dense<\d*> : tensor<\w*>)|(?<=maximal_mesh_)\d+|(?<=maximal device=)\d+")

Program = dict[str, str]


def describe(run: Any, seed: jax.Array, state: TrainState, texts: Iterable[str], batch: Any) -> Program:
    """What decides the numbers of a run, by names for people.

    Args:
        run: of `fit`, a `train._fit.run.Run`.
        seed: the random key that `fit` was given.
        state: any of the run.
        texts: the programs of a device before compilation.
        batch: the first one of the run, in host memory.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    shapes = [f"{jax.tree_util.keystr(path)} {x.dtype}{x.shape}" for path, x in leaves]
    options = run.options
    sizes = (options.batch_size, run.examples, run.num_steps, options.eval_every, run.step.virtual_shards)
    arrays = getattr(run.source, "dataset", run.source)
    arrays = [getattr(arrays, name, None) for name in ("images", "labels", "arrays")]
    return {
        "versions": f"jax {jax.__version__}, jaxpar {sys.modules['jaxpar'].__version__}",
        "the shapes of the params or of the optimizer's state": digest(shapes),
        "batch_size, the number of examples or of steps": digest(sizes),
        "the step, with its loss, optimizer and learning rate": digest([_DEVICE.sub("", text) for text in texts]),
        "the seed": digest(jax.random.key_data(seed)),
        "the data": digest([batch, jax.tree.map(_thinned, arrays)]),
    }


def differences(own: Program, first: Program) -> str:
    """In what a process differs from process 0, in words. Empty: in nothing."""
    names = [name for name in own if own[name] != first.get(name)]
    return " and ".join(
        f"{name} ({own[name]}, not {first.get(name)})" if name == "versions" else name for name in names
    )


def digest(tree: Any) -> str:
    """A hash of the structure of a pytree, and of what is in it."""
    plain, _ = without_keys(tree)
    leaves, structure = jax.tree.flatten(plain)
    found = hashlib.blake2b(str(structure).encode(), digest_size=16)
    for leaf in leaves:
        host = leaf if isinstance(leaf, str) else np.ascontiguousarray(leaf)
        found.update(host.encode() if isinstance(host, str) else f"{host.dtype}{host.shape}".encode() + host.tobytes())
    return found.hexdigest()


def _thinned(array: Any) -> Any:
    """The array, or some of its rows where it is large."""
    host: np.ndarray = array if isinstance(array, np.ndarray) else np.asarray(array)
    return host[:: max(1, -(-host.nbytes // _MOST))]
