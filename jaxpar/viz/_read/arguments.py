"""The arrays that a function takes: their names, the modules around them, and their kinds."""

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
    """An array that a function takes."""

    name: str  # "params['conv1']['bias']"
    path: tuple[str, ...] = ()  # its modules and its own name, ("conv1", "bias"). Empty where nothing names it.
    kind: str = "input"  # "weight" or "input"
    state: bool = False  # whether it is a weight that no optimizer trains, such as a running mean
    group: str = ""  # the name of the argument that it is a leaf of. Empty for a bare array.
    padding: int = 0  # how many of its elements are none of the param, whose shares have one length on all devices


def name_of(argument: str, entries: Sequence[Any]) -> str:
    """The name of a leaf: "params['conv1']['bias']"."""
    return argument + jax.tree_util.keystr(tuple(without_value(entries)))


def without_value(entries: Sequence[Any]) -> list[Any]:
    """The entries of a path without the last one of a Flax Variable."""
    entries = list(entries)
    if entries and getattr(entries[-1], "name", None) in _VALUES:
        entries.pop()
    return entries


def path_of(argument: str, entries: Sequence[Any]) -> tuple[str, ...]:
    """The modules of a leaf and its own name. Numbers join what they number.

    >>> from jax.tree_util import DictKey, SequenceKey
    >>> path_of("params", (DictKey("blocks"), SequenceKey(0), DictKey("attn"), DictKey("query")))
    ('blocks.0', 'attn', 'query')
    """
    names: list[str] = []
    for entry in without_value(entries):
        key = key_of(entry)
        if isinstance(key, int):
            names = [*names[:-1], f"{names[-1]}.{key}"] if names else [str(key)]
        elif names or key not in _HOLDERS:
            names += [name for name in str(key).split("/") if name not in ("~", "")]
    while names and names[0] in _COLLECTIONS:
        names = names[1:]
    if names and names[0].replace(".", "").isdigit():  # the list of layers has the name of the argument
        names = [f"{argument}.{names[0]}", *names[1:]] if len(names) > 2 else []
    if RANDOM in names:
        names = names[: names.index(RANDOM) + 1]
    return tuple(names)


def is_in_state(entries: Sequence[Any]) -> bool:
    """Whether a collection on the way to a leaf is state by its name."""
    return any(key_of(entry) in STATE_NAMES for entry in entries)


def key_of(entry: object) -> Any:
    """The key, the number or the name that an entry of a path is."""
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return str(entry)


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype")
