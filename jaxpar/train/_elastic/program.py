"""What a process of an elastic run would compute, in short, so that it can be compared with what process 0 computes.

A process that comes back reads the script again, and the script may have been edited meanwhile. So it is compared
before it may take part: another loss or another seed would give other sums without an error. What is not compared: the
Python functions that a program calls back (`jax.pure_callback`), and examples that are neither in the batches compared
nor among the rows hashed.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

import jax
import numpy as np

from ... import data
from ..._core.arrays import PyTree, without_keys
from .._callbacks.callbacks import Callbacks
from .._step.state import TrainState
from .._step.train_step import TrainStep

_MOST_BYTES = 1 << 26  # of an array of the data that are hashed. Of a larger one rows at even distances are
# The number of a device is in the text of a program with a callback.
_DEVICE = re.compile(r"device_ids = (\[\d*\]|dense<\d*> : tensor<\w*>)|(?<=maximal_mesh_)\d+|(?<=maximal device=)\d+")

Program = dict[str, str]  # hashes, by names for people


class Run(Protocol):
    """What is read of a `train._fit.run.Run`, which is of a higher room."""

    @property
    def step(self) -> TrainStep: ...
    @property
    def source(self) -> data.Source: ...
    @property
    def callbacks(self) -> Callbacks: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def examples(self) -> int: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def eval_every(self) -> int | None: ...
    @property
    def stops(self) -> bool: ...
    @property
    def left_out(self) -> frozenset[int]: ...
    def batches(self, rng: jax.Array, start: int) -> Iterator[PyTree]: ...
    def is_record_due(self, step: int, last: int, is_epoch_over: bool) -> bool: ...


def describe(run: Run, seed: jax.Array, state: TrainState, texts: Iterable[str], batch: PyTree) -> Program:
    """What decides the numbers of a run of `fit`, by names for people.

    `texts` are the programs of a device before compilation, `batch` is the first one of the run, in host memory.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    shapes = [f"{jax.tree_util.keystr(path)} {x.dtype}{x.shape}" for path, x in leaves]
    sizes = (run.batch_size, run.examples, run.num_steps, run.eval_every, run.step.virtual_shards)
    arrays = getattr(run.source, "arrays", None)  # a source of the user's own need not have them
    thinned = jax.tree.map(lambda array: array[:: max(1, -(-array.nbytes // _MOST_BYTES))], arrays)
    return {
        "versions": f"jax {jax.__version__}, jaxpar {sys.modules['jaxpar'].__version__}",
        "the shapes of the params or of the optimizer's state": digest(shapes),
        "batch_size, the number of examples or of steps": digest(sizes),
        "the step, with its loss, optimizer and learning rate": digest([_DEVICE.sub("", text) for text in texts]),
        "the seed": digest(jax.random.key_data(seed)),
        "the data": digest([batch, thinned]),
    }


def differences(program: Program, first: Program) -> str:
    """In what a process differs from process 0, in words. Empty: in nothing."""
    names = [name for name in program if program[name] != first.get(name)]
    return " and ".join(
        f"{name} ({program[name]}, not {first.get(name)})" if name == "versions" else name for name in names
    )


def digest(tree: PyTree) -> str:
    """A hash of the structure of a pytree, and of what is in it."""
    plain, _ = without_keys(tree)
    leaves, structure = jax.tree.flatten(plain)
    hasher = hashlib.blake2b(str(structure).encode(), digest_size=16)
    for leaf in leaves:
        host = np.ascontiguousarray(leaf)  # of a text too
        hasher.update(f"{host.dtype}{host.shape}".encode() + host.tobytes())
    return hasher.hexdigest()


def is_program(value: object) -> bool:
    """Whether another process can have written this as its program. Anybody can write to jax's key-value store."""
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())  # pyright: ignore
