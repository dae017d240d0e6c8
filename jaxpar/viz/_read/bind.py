"""A function and its arguments as a function of arrays, each with its name and kind; those that it captured too."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
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


_Rebuild = Callable[["_Values"], Any]


@dataclass(slots=True)
class _Values:
    """The arrays of one call, and the NNX objects made of them."""

    arrays: Sequence[Any]
    objects: Sequence[Any] = ()


@dataclass(slots=True)
class Bound:
    """A function whose arguments are a flat list of arrays. What is no array is a part of the function.

    Attributes:
        arrays, arguments: each array, and its name and kind.
        captured: the named arrays that the function holds, by id.
        static: each argument that is no array, number, flag or function, as "name=value".
        call: called with the list. Returns the result, and what the function changed in NNX objects, by name.
    """

    arrays: list[Any] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)
    captured: dict[int, tuple[Any, Argument]] = field(default_factory=dict)
    static: list[str] = field(default_factory=list)
    call: Callable[[Sequence[Any]], tuple[Any, dict[str, Any]]] = lambda arrays: (None, {})


@dataclass(frozen=True, slots=True)
class _Role:
    """What the leaves of one argument are."""

    name: str
    trained: bool = False
    state: bool = False
    bare: bool = False


class _Binder:
    """Collects the arrays of all arguments. Methods return how to rebuild an argument of them."""

    def __init__(self, models: Sequence[Any], captured: Mapping[int, tuple[Any, Argument]]) -> None:
        self.bound = Bound(captured=dict(captured))
        self.models = models
        self.objects: list[tuple[_Role, Any]] = []
        self.stores: list[tuple[int, Any]] = []  # those in the present argument, and how deep

    def tree(self, role: _Role, value: Any) -> _Rebuild:
        """Take an argument apart."""
        stores = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_store)
        self.stores = [(len(path), store) for path, store in stores if is_store(store)]
        leaves, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_whole)
        known = next((k for m in self.models if (k := keras_arguments(m, role.name, [v for _, v in leaves]))), None)
        if known is not None and not role.bare:
            parts = [self.array(leaf, argument) for (_, leaf), argument in zip(leaves, known, strict=True)]
        else:
            parts = [self.leaf(role, path, leaf) for path, leaf in leaves]
        return lambda values: treedef.unflatten([part(values) for part in parts])

    def leaf(self, role: _Role, path: tuple[Any, ...], leaf: Any) -> _Rebuild:
        """Take a leaf: an NNX object or variable, an array, or what is a part of the function."""
        if is_node(leaf):
            number = len(self.objects)
            self.objects.append((replace(role, name=name_of(role.name, path)), leaf))
            return lambda values: values.objects[number]
        if is_variable(leaf):
            return self.variable(role, path, leaf)
        if is_equinox(leaf):
            return self.equinox(role, path, leaf)
        number = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
        if is_array(leaf) or (number and (role.trained or path)):
            return self.array(leaf, self.argument(role, path, leaf))
        if not isinstance(leaf, (bool, int, float, complex)) and not inspect.isroutine(leaf):
            self.bound.static.append(f"{name_of(role.name, path)}={describe(leaf)}")
        return _constant(leaf)

    def variable(self, role: _Role, path: tuple[Any, ...], variable: Any) -> _Rebuild:
        """Take an NNX variable. Its type says what it is."""
        kind, state = variable_kind(variable, "weight" if role.trained else "input")

        def take(inner: tuple[Any, ...], leaf: Any) -> _Rebuild:
            name, shown = name_of(role.name, (*path, *inner)), path_of(role.name, (*path, *inner))
            return self.array(leaf, Argument(name, shown, kind, state, role.name))

        return _each(variable, take)

    def equinox(self, role: _Role, path: tuple[Any, ...], module: Any) -> _Rebuild:
        """Take a module of Equinox. Its numbers, functions and strings are a part of the function."""

        def take(inner: tuple[Any, ...], leaf: Any) -> _Rebuild:
            return self.array(leaf, self.argument(role, (*path, *inner), leaf)) if is_array(leaf) else _constant(leaf)

        return _each(module, take)

    def argument(self, role: _Role, path: tuple[Any, ...], leaf: Any) -> Argument:
        """The name and kind of a leaf."""
        _, known = self.bound.captured.get(id(leaf), (None, None))
        name = name_of(role.name, path)
        if known is not None and role.trained and "flat index" not in name and name.startswith("model._"):
            return known  # a wrapped module hides the names
        weight = (role.trained or role.state) and not role.bare and not is_prng_key(leaf)
        state = weight and (role.state or is_in_state(path))
        group = "" if role.bare else role.name
        shown = path_of(role.name, in_store(path, self.stores)) if weight and "flat index" not in name else ()
        return Argument(name, shown, "weight" if weight else "input", state, group)

    def array(self, leaf: Any, argument: Argument) -> _Rebuild:
        """Take one array."""
        number = len(self.bound.arrays)
        self.bound.arrays.append(leaf)
        self.bound.arguments.append(argument)
        return lambda values: values.arrays[number]

    def objects_of(self) -> Callable[[_Values], tuple[Sequence[Any], Callable[[], dict[str, Any]]]]:
        """Take all NNX objects apart together, since they may share variables."""
        if not self.objects:
            return lambda values: ((), dict)
        graphdef, state = nnx().split(tuple(value for _, value in self.objects))
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)
        parts = list[_Rebuild]()
        for (first, *path), leaf in leaves:
            parts.append(self.leaf(self.objects[first.key][0], tuple(path), leaf))

        def build(values: _Values) -> tuple[Sequence[Any], Callable[[], dict[str, Any]]]:
            built = treedef.unflatten([part(values) for part in parts])
            given = {id(leaf) for leaf in jax.tree.leaves(built)}
            objects = nnx().merge(graphdef, built)
            return objects, lambda: self.changes(objects, given)

        return build

    def changes(self, objects: Sequence[Any], given: set[int]) -> dict[str, Any]:
        """The arrays in NNX objects that are others than before, by name."""
        found: dict[str, Any] = {}
        _, state = nnx().split(tuple(objects))
        for (first, *path), leaf in jax.tree_util.tree_leaves_with_path(state):
            if id(leaf) not in given:
                found[name_of(self.objects[first.key][0].name, path)] = leaf
        return found


def _is_whole(value: Any) -> bool:
    return is_node(value) or is_variable(value) or is_equinox(value)


def _each(tree: Any, take: Callable[[tuple[Any, ...], Any], _Rebuild]) -> _Rebuild:
    """Take every leaf of a tree, given its path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    parts = [take(path, leaf) for path, leaf in leaves]
    return lambda values: treedef.unflatten([part(values) for part in parts])


def _constant(value: Any) -> _Rebuild:
    return lambda values: value


def bind(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], argnums: Set[int]
) -> Bound:
    """The function of arrays that a function or module is with these arguments. `argnums` hold parameters."""
    _refuse_iterators(fn, {**dict(zip(names, args, strict=True)), **kwargs})
    binder = _Binder([value for _, value in _held(fn, _DEPTH) if is_keras(value)], captured_arrays(fn))
    holder, method = _module_of(fn)
    make_fn = binder.tree(_Role("model", trained=True), holder) if holder is not None else None
    holds = holder is not None or any(argument.kind == "weight" for _, argument in binder.bound.captured.values())
    alone = holds or (len(args) == 1 and not kwargs)
    parts = list[_Rebuild]()
    for number, (name, arg) in enumerate(zip(names, args, strict=True)):
        parts.append(binder.tree(_role(name, arg, number in argnums, alone), arg))
    keywords = {name: binder.tree(_role(name, arg, False, False), arg) for name, arg in kwargs.items()}
    make_objects = binder.objects_of()

    def call(arrays: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        values = _Values(arrays)
        values.objects, changes = make_objects(values)
        run = fn if make_fn is None else method(make_fn(values))
        positional = [part(values) for part in parts]
        result = run(*positional, **{name: part(values) for name, part in keywords.items()})
        return result, changes()

    binder.bound.call = call
    binder.bound.arguments = _named_apart(binder.bound.arguments)
    return binder.bound


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
