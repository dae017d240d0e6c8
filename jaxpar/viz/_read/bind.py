"""A function and its arguments as a function of arrays, each with its name, the modules around it, and its kind.

Flax NNX, Equinox and Keras know these of their arrays. None of them is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import jax

from ..._core.arrays import PyTree, is_prng_key
from ..._core.text import describe

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
        key = _key(entry)
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


def _key(entry: object) -> Any:
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


def _has_base(value: object, module: str, names: tuple[str, ...] = ()) -> bool:
    """Whether a class of a value is of a module, and has one of these names if there are any."""
    bases = type(value).__mro__[:-1]
    return any(base.__module__.startswith(module) and (not names or base.__name__ in names) for base in bases)


def is_node(value: object) -> bool:
    """Whether this is an NNX module or another object that `nnx.split` takes apart."""
    return _has_base(value, "flax.nnx.", ("Pytree", "Object", "Module"))


def is_variable(value: object) -> bool:
    """Whether this is an NNX variable."""
    return _has_base(value, "flax.nnx.", ("Variable",))


def is_equinox(value: object) -> bool:
    """Whether this is a module of Equinox. Of its leaves only arrays are traced."""
    return _has_base(value, "equinox.")


def is_module(value: object) -> bool:
    """Whether this is a module whose arrays are parameters: of Flax NNX or Equinox."""
    return is_node(value) or is_equinox(value)


def is_linen(value: object) -> bool:
    """Whether this is a module of Flax Linen, which has no arrays of its own."""
    return _has_base(value, "flax.linen.", ("Module",))


def linen_variables(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The shapes of what `init` of a Linen module makes for these arguments. Nothing is computed."""
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))

    def init(key: Any, arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        traced = [next(given) if is_array(leaf) else leaf for leaf in leaves]
        positional, keywords = tree.unflatten(traced)
        keywords.pop("mutable", None)  # of `apply`: `init` makes all collections
        rngs = keywords.pop("rngs", None)
        names = rngs if isinstance(rngs, Mapping) else ("dropout",)
        return module.init({"params": key, **dict.fromkeys(names, key)}, *positional, **keywords)

    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(init, key, [leaf for leaf in leaves if is_array(leaf)])


def is_mxnet(value: object) -> bool:
    """Whether this is a network of MXNet, `jaxpar.mxnet.Model`, which holds its arrays and is called by its `apply`."""
    return _has_base(value, "jaxpar.mxnet.", ("Model",))


def mxnet_function(
    model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]]:
    """A function of params, state and named inputs that a network of MXNet is, and these arguments.

    Without a params file the network has no arrays. Then the shapes of its inputs say what they are, in float32.
    """
    if len(inputs) > len(model.inputs):
        raise ValueError(f"viz: {len(inputs)} inputs are given, the network has {list(model.inputs)}")
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        named = dict(inputs[0])
    else:
        named = dict(zip(model.inputs, inputs, strict=False))  # labels may be missing
    named |= {name: array for name, array in kwargs.items() if name in model.inputs}
    options = {name: option for name, option in kwargs.items() if name not in named}
    if unknown := options.keys() - {"train", "rng"}:
        raise TypeError(
            f"viz: the network has no {sorted(unknown)}; its inputs are {list(model.inputs)}, and train and rng"
        )
    params, state = model.params, model.state
    if not params and not state:
        shapes = model.shapes(**{name: array.shape for name, array in named.items()})
        arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        kinds: Mapping[str, str] = model._arrays  # "arg" or "aux": nothing else tells a statistic from a param
        params = {name: array for name, array in arrays.items() if kinds.get(name) == "arg"}
        state = {name: array for name, array in arrays.items() if kinds.get(name) == "aux"}

    def apply(params: Any, state: Any, **arrays: Any) -> Any:
        given = {name: array for name, array in arrays.items() if name in named}
        others = {name: option for name, option in arrays.items() if name not in named}
        return model.apply(params, given, state=state, **others)

    return apply, [params, state], {**named, **options}


def called_method(fn: object) -> tuple[Any, int]:
    """The method that `apply` of Flax Linen or a model of Keras runs, or None, and how many arguments come before."""
    owner: Any = getattr(fn, "__self__", fn)
    name = getattr(fn, "__name__", "")
    if name == "apply" and _has_base(owner, "flax.linen.", ("Module",)):
        return owner.__call__, 1
    if is_keras(owner) and (owner is fn or name in ("stateless_call", "__call__")):
        return owner.call, 2 if name == "stateless_call" else 0
    return None, 0


def is_state(value: object) -> bool:
    """Whether this is the state of an Equinox network."""
    return type(value).__name__ == "State" and type(value).__module__.startswith("equinox.")


def variable_kind(variable: object, otherwise: str) -> tuple[str, bool]:
    """The kind of an NNX variable, and whether it is state. That of an optimizer is as `otherwise` says."""
    if isinstance(variable, nnx().Param):
        return "weight", False
    if any(base.__name__ in _OPTIMIZER for base in type(variable).__mro__):
        return otherwise, False
    return "weight", True


class _KerasVariable(Protocol):
    @property
    def path(self) -> str: ...


def is_keras(value: object) -> bool:
    """Whether this is a model or layer of Keras."""
    return _has_base(value, "keras.", ("Layer",))


def keras_arguments(model: object, name: str, leaves: Sequence[Any]) -> list[Argument] | None:
    """The arguments that a list of these arrays is, where it is a list of a model's variables. Else None."""
    for kind in ("trainable_variables", "non_trainable_variables"):
        variables = list(getattr(model, kind))
        shapes = [tuple(variable.shape) for variable in variables]
        if variables and shapes == [tuple(getattr(leaf, "shape", ())) for leaf in leaves]:
            return [keras_argument(variable, name, kind != "trainable_variables") for variable in variables]
    return None


def keras_argument(variable: _KerasVariable, name: str, state: bool) -> Argument:
    """The argument that a variable of Keras is."""
    path = tuple(str(variable.path).split("/"))
    return Argument(f"{name}['{variable.path}']", path, "weight", state, name)


def held_arrays(name: str, value: PyTree) -> Iterator[tuple[Any, Argument]]:
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
    shown = path_of(role.name, in_store(path, stores)) if weight and not flat else ()
    return Argument(name, shown, "weight" if weight else "input", state, "" if role.bare else role.name)


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
