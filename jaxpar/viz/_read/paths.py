"""The place of an array in its argument: its name, and the modules around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

# Collections of arrays that no optimizer trains, by the names that their libraries and users give them.
STATE_NAMES = frozenset(
    "batch_stats bn_state bn_stats model_state net_state non_trainable non_trainable_variables non_trainable_params "
    "extra_variables moving_stats running_stats".split()
)
RANDOM = "rngs"  # the random state of a module
_COLLECTIONS = STATE_NAMES | {"params", "variables", "trainable_variables", "cache", "state"}
_HOLDERS = frozenset(("__self__", "__wrapped__", "__func__", "_fun", "fn", "func"))  # a bound or wrapped module
_VALUES = frozenset(("value", "raw_value"))  # what a Flax Variable keeps its array in


@dataclass(frozen=True, slots=True)
class Argument:
    """An array that a function takes.

    Attributes:
        name: "params['conv1']['bias']".
        path: its modules and its own name, ("conv1", "bias"). Empty where nothing names it.
        kind: "weight" or "input".
        state: whether it is a weight that no optimizer trains, such as a running mean.
        group: the name of the argument that it is a leaf of. Empty for a bare array.
    """

    name: str
    path: tuple[str, ...] = ()
    kind: str = "input"
    state: bool = False
    group: str = ""


def name_of(argument: str, entries: Sequence[Any]) -> str:
    """The name of a leaf: "params['conv1']['bias']"."""
    return argument + jax.tree_util.keystr(tuple(without_value(entries)))


def without_value(entries: Sequence[Any]) -> list[Any]:
    """The entries of a path without the last one of a Flax Variable."""
    entries = list(entries)
    if len(entries) > 1 and getattr(entries[-1], "name", None) in _VALUES:
        entries.pop()
    return entries


def path_of(argument: str, entries: Sequence[Any]) -> tuple[str, ...]:
    """The modules of a leaf and its own name. Numbers join what they number.

    >>> from jax.tree_util import DictKey, SequenceKey
    >>> path_of("params", (DictKey("blocks"), SequenceKey(0), DictKey("attn"), DictKey("query")))
    ('blocks.0', 'attn', 'query')
    """
    parts: list[str] = []
    for entry in without_value(entries):
        key = _key(entry)
        if isinstance(key, int):
            parts = [*parts[:-1], f"{parts[-1]}.{key}"] if parts else [str(key)]
        elif parts or key not in _HOLDERS:
            parts += [part for part in str(key).split("/") if part not in ("~", "")]
    while parts and parts[0] in _COLLECTIONS:
        parts = parts[1:]
    if parts and parts[0].replace(".", "").isdigit():  # the list of layers has the name of the argument
        parts = [f"{argument}.{parts[0]}", *parts[1:]] if len(parts) > 2 else []
    if RANDOM in parts:
        parts = parts[: parts.index(RANDOM) + 1]
    return tuple(parts)


def is_store(value: object) -> bool:
    """Whether this is a store of `jaxpar.kv`, which knows the paths of the parameters that it holds."""
    return type(value).__module__.startswith("jaxpar._store.") and hasattr(value, "paths") and hasattr(value, "values")


def in_store(entries: Sequence[Any], stores: Sequence[tuple[int, Any]]) -> Sequence[Any]:
    """The entries of a path. In the values of a store they are those of the parameter, as `kv.from_params` got it.

    Args:
        entries: from the argument to the array.
        stores: each store in the argument, after the number of entries that lead to it.
    """
    for depth, store in stores:
        if len(entries) == depth + 2 and getattr(entries[depth], "name", "") == "values":
            name = dict(store.paths).get(_key(entries[depth + 1]))
            return entries if name is None else [_entry(part) for part in name.split("/")]
    return entries


def _entry(part: str) -> Any:
    return jax.tree_util.SequenceKey(int(part)) if part.isdigit() else jax.tree_util.DictKey(part)


def is_in_state(entries: Sequence[Any]) -> bool:
    """Whether a collection on the way to a leaf is state by its name."""
    return any(_key(entry) in STATE_NAMES for entry in entries)


def _key(entry: Any) -> Any:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return str(entry)


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype")
