"""A function and its arguments as a function of a flat list of arrays, and the arrays that it holds besides.

Begin with `bind`. What a function holds is found by Python's closures: JAX has the arrays, but no names of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from ..._core.arrays import PyTree, is_prng_key
from ..._core.text import describe
from .arguments import STATE_NAMES, Argument, is_array, is_in_state, name_of, path_of
from .libraries import (
    has_base,
    in_store,
    is_equinox,
    is_keras,
    is_module,
    is_node,
    is_state,
    is_store,
    is_variable,
    keras_argument,
    keras_arguments,
    nnx,
    variable_kind,
)


def held_arrays(name: str, value: PyTree) -> Iterator[tuple[Any, Argument]]:
    """The arrays that an object holds, each with its name. Those of a module are of the kind "weight"."""
    if is_keras(value):
        for kind in ("trainable_variables", "non_trainable_variables"):
            for variable in getattr(value, kind):
                yield variable.value, keras_argument(variable, name, kind != "trainable_variables")
        return
    if is_node(value) and jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
        value = nnx().state(value)
    kind = "weight" if is_module(value) or has_base(value, "flax.nnx.", ("State",)) else "const"
    for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_variable):
        for inner, array in jax.tree_util.tree_leaves_with_path(leaf):
            if is_array(array):
                entries = (*path, *inner)
                shown, state = variable_kind(leaf, kind) if is_variable(leaf) else (kind, False)
                state = state or is_in_state(entries)
                yield array, Argument(name_of(name, entries), path_of(name, entries), shown, state, name)


_DEPTH = 4  # functions that hold functions
_Held = Iterator[tuple[str, Any]]


def captured_arrays(fn: object) -> dict[int, tuple[Any, Argument]]:
    """The arrays in modules and trees that a function holds, by their ids. The arrays are kept alive."""
    captured: dict[int, tuple[Any, Argument]] = {}
    for name, value in _held(fn, _DEPTH):
        with contextlib.suppress(TypeError, ValueError):  # a tree that JAX cannot sort holds no arrays of a network
            for array, argument in held_arrays(name, value):
                captured.setdefault(id(array), (array, argument))
    return captured


def _held(fn: Any, depth: int) -> _Held:
    """What a function holds: in its closure, as a method, as a partial application, by the names of its module."""
    contents: list[tuple[str, Any]] = [("model", fn)]
    if isinstance(fn, functools.partial):
        positional = ((f"arg{number}", value) for number, value in enumerate(fn.args))
        contents = [("fn", fn.func), *positional, *fn.keywords.items()]
    elif isinstance(fn, MethodType):
        contents = [("model", fn.__self__), ("fn", fn.__func__)]
    elif isinstance(fn, FunctionType):
        contents = list(_names(fn))
    elif callable(wrapped := getattr(fn, "__wrapped__", None)):
        contents = [("model", wrapped)]
    for name, value in contents if depth else ():
        wraps = callable(getattr(value, "__wrapped__", None))  # a jitted function, or a jitted module
        if wraps or isinstance(value, (FunctionType, MethodType, functools.partial)):
            yield from _held(value, depth - 1)
        elif not isinstance(value, (ModuleType, type)):
            yield name, value


def _names(fn: FunctionType) -> _Held:
    """The variables of enclosing functions and of the module that a function reads, and its defaults."""
    with contextlib.suppress(ValueError):  # a variable that is not assigned yet
        variables = inspect.getclosurevars(fn)
        yield from variables.nonlocals.items()
        yield from variables.globals.items()
    for parameter in inspect.signature(fn, follow_wrapped=False).parameters.values():
        if parameter.default is not parameter.empty:
            yield parameter.name, parameter.default
    if callable(wrapped := getattr(fn, "__wrapped__", None)):
        yield "fn", wrapped


@dataclass(slots=True)
class Bound:
    """A function whose arguments are a flat list of arrays. What is no array is a part of the function."""

    arrays: list[Any] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)  # the name and kind of each array
    # the named arrays that the function holds, by id
    captured: dict[int, tuple[Any, Argument]] = field(default_factory=dict)
    # each argument that is no array, number, flag or function, as "name=value"
    static: list[str] = field(default_factory=list)
    # called with the list. Returns the result, and what the function changed in NNX objects, by name.
    call: Callable[[Sequence[Any]], tuple[Any, dict[str, Any]]] = lambda arrays: (None, {})


@dataclass(frozen=True, slots=True)
class _Role:
    """What the leaves of one argument are."""

    name: str
    trained: bool = False
    state: bool = False
    bare: bool = False


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of an argument, and the NNX variable or the module of Equinox that it is in."""

    role: _Role
    path: tuple[Any, ...]
    value: Any
    holder: Any = None


def bind(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], argnums: Set[int]
) -> Bound:
    """The function of arrays that a function or module is with these arguments. `argnums` hold parameters."""
    _refuse_iterators(fn, {**dict(zip(names, args, strict=True)), **kwargs})
    bound = Bound(captured=captured_arrays(fn))
    keras = [value for _, value in _held(fn, _DEPTH) if is_keras(value)]
    module, method = _module_of(fn)
    weights = any(argument.kind == "weight" for _, argument in bound.captured.values())
    alone = module is not None or weights or (len(args) == 1 and not kwargs)
    # A bare array is data, not a parameter, where parameters are known otherwise or it is the only argument.
    roles = [_role(name, arg, at in argnums, alone) for at, (name, arg) in enumerate(zip(names, args, strict=True))]
    roles += [_role(name, arg, False, False) for name, arg in kwargs.items()]
    # The leaves of all arguments in one row, those of a module that is called first. A leaf that is no array has no
    # `Argument`, and stays a part of the function.
    leaves, arguments = list[_Leaf](), list[Argument | None]()
    for role, value in zip([_Role("model", trained=True), *roles], [module, *args, *kwargs.values()], strict=True):
        role_leaves = list(_leaves(role, value))
        nodes_with_stores = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_store)
        stores = [(len(path), store) for path, store in nodes_with_stores if is_store(store)]
        leaves += role_leaves
        arguments += _of_keras(keras, role, role_leaves) or [_argument(bound, leaf, stores) for leaf in role_leaves]
    nodes, count = [leaf for leaf in leaves if is_node(leaf.value)], len(leaves)
    # All NNX objects are taken apart together, since they may share variables.
    graphdef, state = nnx().split(tuple(node.value for node in nodes)) if nodes else (None, ())
    holders = [replace(node.role, name=name_of(node.role.name, node.path)) for node in nodes]
    leaves += [replace(leaf, role=holders[leaf.path[0].key], path=leaf.path[1:]) for leaf in _leaves(_Role(""), state)]
    arguments += [_argument(bound, leaf, ()) for leaf in leaves[count:]]
    pairs = [(leaf.value, argument) for leaf, argument in zip(leaves, arguments, strict=True) if argument is not None]
    bound.arrays, bound.arguments = [array for array, _ in pairs], _named_apart([argument for _, argument in pairs])
    structure = jax.tree.structure((module, args, list(kwargs.values())), is_leaf=is_node)

    def call(arrays: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        remaining = iter(arrays)
        values = [
            leaf.value if argument is None else next(remaining)
            for leaf, argument in zip(leaves, arguments, strict=True)
        ]
        made = nnx().merge(graphdef, jax.tree.structure(state).unflatten(values[count:])) if nodes else ()
        objects = {id(node.value): node_made for node, node_made in zip(nodes, made, strict=True)}
        built, positional, keywords = structure.unflatten([objects.get(id(value), value) for value in values[:count]])
        run = fn if module is None else method(built)
        result = run(*positional, **dict(zip(kwargs, keywords, strict=True)))
        return result, _changes(holders, made, set(map(id, values[count:])))

    bound.call = call
    return bound


def _is_whole(value: object) -> bool:
    return is_node(value) or is_variable(value) or is_equinox(value)


def _leaves(role: _Role, value: PyTree) -> Iterator[_Leaf]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_whole):
        if is_variable(leaf) or is_equinox(leaf):
            for inner, array in jax.tree_util.tree_leaves_with_path(leaf):
                yield _Leaf(role, (*path, *inner), array, leaf)
        else:
            yield _Leaf(role, path, leaf)


def _of_keras(keras: Sequence[Any], role: _Role, leaves: Sequence[_Leaf]) -> Sequence[Argument]:
    """The arguments that leaves are, where they are a list of the variables of a model of Keras."""
    values = [leaf.value for leaf in leaves]
    matches = (arguments for model in keras if (arguments := keras_arguments(model, role.name, values)))
    return next(matches, ()) if not role.bare else ()


def _changes(holders: Sequence[_Role], made: Sequence[Any], old: Set[int]) -> dict[str, Any]:
    """The arrays in NNX objects that are others than before, of which the ids are given, by name."""
    if not made:
        return {}
    now = nnx().split(tuple(made))[1]
    new = ((path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(now) if id(leaf) not in old)
    return {name_of(holders[first.key].name, path): leaf for (first, *path), leaf in new}


def _argument(bound: Bound, leaf: _Leaf, stores: Sequence[tuple[int, Any]]) -> Argument | None:
    """The name and kind of a leaf. None where it is a part of the function."""
    role, path, value = leaf.role, leaf.path, leaf.value
    name = name_of(role.name, path)
    if is_variable(leaf.holder):
        kind, state = variable_kind(leaf.holder, "weight" if role.trained else "input")
        return Argument(name, path_of(role.name, path), kind, state, role.name)
    plain = isinstance(value, (bool, int, float, complex))
    number = plain and not isinstance(value, bool) and (role.trained or path)
    if not is_array(value) and (leaf.holder is not None or not number):
        if leaf.holder is None and not (plain or is_node(value) or inspect.isroutine(value)):
            bound.static.append(f"{name}={describe(value)}")
        return None
    flat = "flat index" in name
    _, argument = bound.captured.get(id(value), (None, None))
    if argument is not None and role.trained and not flat and name.startswith("model._"):
        return argument  # a wrapped module hides the names
    weight = (role.trained or role.state) and not role.bare and not is_prng_key(value)
    state = weight and (role.state or is_in_state(path))
    entries, shape = in_store(path, stores)
    shown = path_of(role.name, entries) if weight and not flat else ()
    # The last two axes are the rows. Those before are of a stack of stores, as `jax.vmap` takes one.
    rows = np.shape(value)
    padding = math.prod(rows) - math.prod((*rows[:-2], *shape)) if shape is not None else 0
    if not (rows or state) and (isinstance(value, int) or str(getattr(value, "dtype", "")).startswith(("int", "uint"))):
        padding = 1  # it counts steps, and is no param
    return Argument(name, shown, "weight" if weight else "input", state, "" if role.bare else role.name, padding)


def _refuse_iterators(fn: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """`TypeError` for what can be read only once. JAX would make it a leaf, with a warning."""
    of = getattr(fn, "__name__", type(fn).__name__)
    for name, arg in args.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg, is_leaf=lambda value: isinstance(value, Iterator)):
            if isinstance(leaf, Iterator):
                raise TypeError(
                    f"viz: argument {name_of(name, path)} of {of} is a {type(leaf).__name__}, which can be read only "
                    "once; expected an array or a jax.ShapeDtypeStruct, or a list of them"
                )


def _role(name: str, arg: PyTree, trained: bool, data: bool) -> _Role:
    """The role of an argument. A bare array is data where `data` says so."""
    bare = jax.tree_util.treedef_is_leaf(jax.tree.structure(arg)) and not _is_whole(arg)
    named = name in STATE_NAMES or (name == "state" and isinstance(arg, Mapping)) or is_state(arg)
    return _Role(name, trained and not (bare and data), not trained and not bare and named, bare and data)


def _module_of(fn: Any) -> tuple[Any, Callable[[Any], Callable[..., Any]]]:
    """The module that is called, and its method as a function of it. None where a function is called."""
    if is_node(fn) or not jax.tree_util.treedef_is_leaf(jax.tree.structure(fn)):
        return fn, lambda module: module
    owner = getattr(fn, "__self__", None) if isinstance(fn, MethodType) else None
    if is_module(owner):
        function = fn.__func__
        return owner, lambda module: MethodType(function, module)
    return None, lambda module: module


def _named_apart(arguments: Sequence[Argument]) -> list[Argument]:
    """Arguments with the same paths get their name in front: two networks that are trained together."""
    groups: dict[tuple[str, ...], set[str]] = {}
    for argument in arguments:
        if argument.path:
            groups.setdefault(argument.path, set()).add(argument.group)
    double = {group for groups_of in groups.values() if len(groups_of) > 1 for group in groups_of}
    return [
        replace(argument, path=(argument.group, *argument.path))
        if argument.path and argument.group in double
        else argument
        for argument in arguments
    ]
