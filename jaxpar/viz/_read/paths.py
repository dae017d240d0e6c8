"""The arrays of an argument: the name, the modules around it and the kind of each.

Flax NNX, Equinox and Keras know these of their arrays. None of them is imported here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
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
    """The entries of a path. In the values of a store, given with its depth, they are those of the parameter."""
    for depth, store in stores:
        if len(entries) == depth + 2 and getattr(entries[depth], "name", "") == "values":
            name = dict(store.paths).get(_key(entries[depth + 1]))
            index, key = jax.tree_util.SequenceKey, jax.tree_util.DictKey
            return entries if name is None else [index(int(p)) if p.isdigit() else key(p) for p in name.split("/")]
    return entries


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


_OPTIMIZER = ("OptState", "OptVariable", "OptArray")


def nnx() -> Any:
    """`flax.nnx`, which is imported since one of its objects is there."""
    return importlib.import_module("flax.nnx")


def _has_base(value: Any, module: str, names: tuple[str, ...] = ()) -> bool:
    """Whether a class of a value is of a module, and has one of these names if there are any."""
    bases = type(value).__mro__[:-1]
    return any(base.__module__.startswith(module) and (not names or base.__name__ in names) for base in bases)


def is_node(value: Any) -> bool:
    """Whether this is an NNX module or another object that `nnx.split` takes apart."""
    return _has_base(value, "flax.nnx.", ("Pytree", "Object", "Module"))


def is_variable(value: Any) -> bool:
    """Whether this is an NNX variable."""
    return _has_base(value, "flax.nnx.", ("Variable",))


def is_equinox(value: Any) -> bool:
    """Whether this is a module of Equinox. Of its leaves only arrays are traced."""
    return _has_base(value, "equinox.")


def is_module(value: Any) -> bool:
    """Whether this is a module whose arrays are parameters: of Flax NNX or Equinox."""
    return is_node(value) or is_equinox(value)


def called_method(fn: Any) -> tuple[Any, int]:
    """The method that `apply` of Flax Linen or a model of Keras runs, or None, and how many arguments come before."""
    owner, name = getattr(fn, "__self__", fn), getattr(fn, "__name__", "")
    if name == "apply" and _has_base(owner, "flax.linen.", ("Module",)):
        return owner.__call__, 1
    if is_keras(owner) and (owner is fn or name in ("stateless_call", "__call__")):
        return owner.call, 2 if name == "stateless_call" else 0
    return None, 0


def is_state(value: Any) -> bool:
    """Whether this is the state of an Equinox network."""
    return type(value).__name__ == "State" and type(value).__module__.startswith("equinox.")


def variable_kind(variable: Any, otherwise: str) -> tuple[str, bool]:
    """The kind of an NNX variable, and whether it is state. That of an optimizer is as `otherwise` says."""
    if isinstance(variable, nnx().Param):
        return "weight", False
    if any(base.__name__ in _OPTIMIZER for base in type(variable).__mro__):
        return otherwise, False
    return "weight", True


def is_keras(value: Any) -> bool:
    """Whether this is a model or layer of Keras."""
    return _has_base(value, "keras.", ("Layer",))


def keras_arguments(model: Any, name: str, leaves: Sequence[Any]) -> list[Argument] | None:
    """The arguments that a list of these arrays is, where it is a list of a model's variables. Else None."""
    for kind in ("trainable_variables", "non_trainable_variables"):
        variables = list(getattr(model, kind))
        shapes = [tuple(variable.shape) for variable in variables]
        if variables and shapes == [tuple(getattr(leaf, "shape", ())) for leaf in leaves]:
            return [keras_argument(variable, name, kind != "trainable_variables") for variable in variables]
    return None


def keras_argument(variable: Any, name: str, state: bool) -> Argument:
    """The argument that a variable of Keras is."""
    path = tuple(str(variable.path).split("/"))
    return Argument(f"{name}['{variable.path}']", path, "weight", state, name)


def held_arrays(name: str, value: Any) -> Iterator[tuple[Any, Argument]]:
    """The arrays that an object holds, each with its name. Those of a module are of the kind "weight"."""
    if is_keras(value):
        for kind in ("trainable_variables", "non_trainable_variables"):
            for variable in getattr(value, kind):
                yield variable.value, keras_argument(variable, name, kind != "trainable_variables")
        return
    if is_node(value) and jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
        value = nnx().state(value)
    kind = "weight" if is_module(value) or _has_base(value, "flax.nnx.", ("State",)) else "const"
    for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_variable):
        for inner, array in jax.tree_util.tree_leaves_with_path(leaf):
            if is_array(array):
                entries = (*path, *inner)
                shown, state = variable_kind(leaf, kind) if is_variable(leaf) else (kind, False)
                state = state or is_in_state(entries)
                yield array, Argument(name_of(name, entries), path_of(name, entries), shown, state, name)
