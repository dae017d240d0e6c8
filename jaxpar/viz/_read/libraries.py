"""What Flax NNX, Equinox and Keras know of their arrays. None of them is imported here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .paths import Argument, is_array, is_in_state, name_of, path_of

_OPTIMIZER = ("OptState", "OptVariable", "OptArray")


def nnx() -> Any:
    """`flax.nnx`, which is imported since one of its objects is there."""
    return importlib.import_module("flax.nnx")


def _has_base(value: Any, module: str, names: tuple[str, ...] = ()) -> bool:
    """Whether a class of a value is of a module, and has one of these names if there are any."""
    return _derives(type(value), module, names)


@functools.lru_cache(maxsize=4096)
def _derives(cls: type, module: str, names: tuple[str, ...]) -> bool:
    bases = cls.__mro__[:-1]
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
    """The method that `Module.apply` of Flax Linen or a model of Keras runs, and how many arguments come before its.

    None for another function.
    """
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
