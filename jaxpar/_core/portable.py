"""How a state is saved: the room that defines a type registers it here, and `checkpoint` asks.

A saved state is `{name: (record, array)}`. A record says in JSON what an array is. So `checkpoint` knows names, shapes
and dtypes, and nothing of stores or steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from .arrays import KeyPath, PyTree, is_prng_key

Saved = dict[str, tuple[dict[str, Any], np.ndarray]]  # (record, array) by name
PARTS = ("residual", "pending")  # what belongs to the devices that pushed, see `SavedArray.part`


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """One array of a state, as a checkpoint has it."""

    name: str  # its path in the state
    words: str  # what a message calls it
    leaf: Any  # what is there: an array, a `jax.ShapeDtypeStruct` or a Python number
    shape: tuple[int, ...]  # of the array as it is saved
    rows: bool = False  # whether the leaf has this array flat, padded and cut into one row for each device
    part: str | None = None  # one of `PARTS` for what belongs to the devices that pushed, else None
    rule: str | None = None  # what identifies the computation of its next value, if that is known
    frozen: bool = False  # whether it is not trained, so that checkpoints of a run have it once on disk
    array: str | None = None  # the name under which orbax and other tools find it, if that is another one

    @property
    def dtype(self) -> str:
        return str(self.leaf.dtype if hasattr(self.leaf, "dtype") else np.asarray(self.leaf).dtype)

    def record(self) -> dict[str, Any]:
        """What a checkpoint says about the array, as JSON."""
        about = {"name": self.name, "words": self.words, "shape": list(self.shape), "dtype": self.dtype}
        about |= {self.part: True} if self.part else {}
        about |= {"rule": self.rule} if self.rule else {}
        about |= {"frozen": True} if self.frozen else {}
        return about | ({"impl": str(jax.random.key_impl(self.leaf))} if is_prng_key(self.leaf) else {})


@dataclasses.dataclass(frozen=True)
class NodeFormat:
    """How the nodes of a type are saved and restored."""

    # `slots(node, prefix)` gives one `SavedArray` for each leaf, in the order of the leaves.
    slots: Callable[[Any, str], Iterable[SavedArray]]
    bare: Callable[[Any], Any]  # `bare(node)` is the node without what `complete` restores
    # `complete(filled, template, saved, prefix, remarks)` is the bare node with the rest of what was saved, for the
    # devices of the template. It adds a remark for the user where something could not be taken up.
    complete: Callable[[Any, Any, Saved, str, list[str]], Any]
    # `adapt(template, saved, prefix, remarks) -> saved` brings what an older version saved to the names of today.
    adapt: Callable[[Any, Saved, str, list[str]], Saved] = lambda template, saved, prefix, remarks: saved


# Filled where a module defines its type, and then only read.
# How the nodes of a type are saved. A node of another type is taken leaf by leaf.
FORMATS: dict[type, NodeFormat] = {}
# `adapt(template, saved, remarks) -> saved`, which brings a whole state of a type to another number of devices.
ADAPTERS: dict[type, Callable[[PyTree, Saved, list[str]], Saved]] = {}


def is_registered(node: object) -> bool:
    return type(node) in FORMATS


def path_name(path: KeyPath) -> str:
    """The name of a path of jax: `store/values/3`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def param_name(path: KeyPath) -> str:
    """The name of a param: `hidden/kernel`.

    A variable of Flax NNX, and a box of Linen, has its array in an attribute `value`, which says nothing.
    """
    is_of_variable = len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
    return path_name(path[:-1] if is_of_variable else path)


def join_names(prefix: str, name: str) -> str:
    """Two parts of a name, of which either may be empty, with a slash between them."""
    return f"{prefix}/{name}" if prefix and name else prefix or name


def describe_record(record: dict[str, Any]) -> str:
    """`float32[2,3]`, of a saved array."""
    return f"{record['dtype']}[{','.join(map(str, record['shape']))}]"
