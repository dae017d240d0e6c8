"""A function and its arguments as a function of arrays, each with its name and kind; those that it captured too."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax

from ..._core.arrays import is_prng_key
from ..._core.text import describe
from .paths import (
    STATE_NAMES,
    Argument,
    held_arrays,
    in_store,
    is_array,
    is_equinox,
    is_in_state,
    is_keras,
    is_module,
    is_node,
    is_state,
    is_store,
    is_variable,
    keras_arguments,
    name_of,
    nnx,
    path_of,
    variable_kind,
)

_DEPTH = 4  # functions that hold functions
_Held = Iterator[tuple[str, Any]]


def captured_arrays(fn: Any) -> dict[int, tuple[Any, Argument]]:
    """The arrays in modules and trees that a function holds, by their ids. The arrays are kept alive."""
    found: dict[int, tuple[Any, Argument]] = {}
    for name, value in _held(fn, _DEPTH):
        with contextlib.suppress(TypeError, ValueError):  # a tree that JAX cannot sort holds no arrays of a network
            for array, argument in held_arrays(name, value):
                found.setdefault(id(array), (array, argument))
    return found


def _held(fn: Any, depth: int) -> _Held:
    """What a function holds: in its closure, as a method, as a partial application, by the names of its module."""
    if depth == 0 or isinstance(fn, (ModuleType, type)):
        return
    for name, value in _parts(fn):
        wraps = callable(getattr(value, "__wrapped__", None))  # a jitted function, or a jitted module
        if wraps or isinstance(value, (FunctionType, MethodType, functools.partial)):
            yield from _held(value, depth - 1)
        elif not isinstance(value, (ModuleType, type)):
            yield name, value


def _parts(fn: Any) -> _Held:
    if isinstance(fn, functools.partial):
        yield "fn", fn.func
        yield from ((f"arg{number}", value) for number, value in enumerate(fn.args))
        yield from fn.keywords.items()
    elif isinstance(fn, MethodType):
        yield "model", fn.__self__
        yield "fn", fn.__func__
    elif isinstance(fn, FunctionType):
        yield from _names(fn)
    elif callable(wrapped := getattr(fn, "__wrapped__", None)):
        yield "model", wrapped
    else:
        yield "model", fn


def _names(fn: FunctionType) -> _Held:
    """The variables of enclosing functions and of the module that a function reads, and its defaults."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            yield name, fn.__globals__[name]
    defaults = fn.__defaults__ or ()
    yield from zip(fn.__code__.co_varnames[fn.__code__.co_argcount - len(defaults) :], defaults, strict=False)
    yield from (fn.__kwdefaults__ or {}).items()
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
    roles = [_role(name, arg, at in argnums, alone) for at, (name, arg) in enumerate(zip(names, args, strict=True))]
    roles += [_role(name, arg, False, False) for name, arg in kwargs.items()]
    given = [(_Role("model", trained=True), module), *zip(roles, (*args, *kwargs.values()), strict=True)]
    leaves = [(role, value, list(_leaves(role, value))) for role, value in given]
    nodes = [leaf for _, _, found in leaves for leaf in found if is_node(leaf.value)]
    parts = [_part(bound, value, found, _known(keras, role, found)) for role, value, found in leaves]
    make_nodes = _nodes(bound, nodes)
    bound.arguments = _named_apart(bound.arguments)

    def call(arrays: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        made, changes = make_nodes(arrays)
        built, *values = (part(arrays, made) for part in parts)
        run = fn if module is None else method(built)
        result = run(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
        return result, changes()

    bound.call = call
    return bound


def _is_whole(value: Any) -> bool:
    return is_node(value) or is_variable(value) or is_equinox(value)


def _leaves(role: _Role, value: Any, around: tuple[Any, ...] = ()) -> Iterator[_Leaf]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_whole):
        if is_variable(leaf) or is_equinox(leaf):
            for inner, array in jax.tree_util.tree_leaves_with_path(leaf):
                yield _Leaf(role, (*around, *path, *inner), array, leaf)
        else:
            yield _Leaf(role, (*around, *path), leaf)


def _known(keras: Sequence[Any], role: _Role, leaves: Sequence[_Leaf]) -> Sequence[Argument | None]:
    """The arguments that leaves are, where they are a list of the variables of a model of Keras."""
    values = [leaf.value for leaf in leaves]
    found = (known for model in keras if (known := keras_arguments(model, role.name, values)))
    return next(found, ()) if not role.bare else ()


_Part = Callable[[Sequence[Any], Mapping[int, Any]], Any]


def _part(bound: Bound, value: Any, leaves: Sequence[_Leaf], known: Sequence[Argument | None] = ()) -> _Part:
    """Note the arrays of a value. Returns how to make it of others, and of other NNX objects, by their ids."""
    stores = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_store)
    depths = [(len(path), store) for path, store in stores if is_store(store)]
    places: dict[int, int] = {}  # of the leaves that are arrays, in the list of arrays
    for number, (leaf, argument) in enumerate(zip_longest(leaves, known)):
        argument = argument or _argument(bound, leaf, depths)
        if argument is not None:
            places[number] = len(bound.arrays)
            bound.arrays.append(leaf.value)
            bound.arguments.append(argument)
    treedef = jax.tree.structure(value, is_leaf=is_node)

    def make(arrays: Sequence[Any], nodes: Mapping[int, Any]) -> Any:
        values = (nodes.get(id(leaf.value), leaf.value) for leaf in leaves)
        return treedef.unflatten([arrays[places[n]] if n in places else own for n, own in enumerate(values)])

    return make


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
    _, known = bound.captured.get(id(value), (None, None))
    if known is not None and role.trained and not flat and name.startswith("model._"):
        return known  # a wrapped module hides the names
    weight = (role.trained or role.state) and not role.bare and not is_prng_key(value)
    state = weight and (role.state or is_in_state(path))
    shown = path_of(role.name, in_store(path, stores)) if weight and not flat else ()
    return Argument(name, shown, "weight" if weight else "input", state, "" if role.bare else role.name)


_Changes = Callable[[], dict[str, Any]]


def _nodes(bound: Bound, nodes: Sequence[_Leaf]) -> Callable[[Sequence[Any]], tuple[dict[int, Any], _Changes]]:
    """Take all NNX objects apart together, since they may share variables.

    Returns how to make them of other arrays, by the ids of the given ones, and what is changed in them, by name.
    """
    if not nodes:
        return lambda arrays: ({}, dict)
    named = [replace(node.role, name=name_of(node.role.name, node.path)) for node in nodes]
    graphdef, state = nnx().split(tuple(node.value for node in nodes))
    leaves = [replace(leaf, role=named[leaf.path[0].key], path=leaf.path[1:]) for leaf in _leaves(named[0], state)]
    part = _part(bound, state, leaves)

    def make(arrays: Sequence[Any]) -> tuple[dict[int, Any], _Changes]:
        built = part(arrays, {})
        old, made = {id(leaf) for leaf in jax.tree.leaves(built)}, nnx().merge(graphdef, built)

        def changes() -> dict[str, Any]:
            now = jax.tree_util.tree_leaves_with_path(nnx().split(tuple(made))[1])
            new = ((path, leaf) for path, leaf in now if id(leaf) not in old)
            return {name_of(named[first.key].name, path): leaf for (first, *path), leaf in new}

        return {id(node.value): one for node, one in zip(nodes, made, strict=True)}, changes

    return make


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


def _role(name: str, arg: Any, trained: bool, data: bool) -> _Role:
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
    double = {group for found in groups.values() if len(found) > 1 for group in found}
    return [
        replace(argument, path=(argument.group, *argument.path))
        if argument.path and argument.group in double
        else argument
        for argument in arguments
    ]
