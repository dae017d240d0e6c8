"""Modules and variables of Flax, Equinox and Keras, networks of MXNet, and stores of jaxpar, known by their classes.

None of these libraries is imported here before one of its objects is there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from .arguments import Argument, is_array, key_of


def nnx() -> Any:
    """`flax.nnx`, which is imported since one of its objects is there."""
    return importlib.import_module("flax.nnx")


def has_base(value: object, module: str, names: tuple[str, ...] = ()) -> bool:
    """Whether a class of a value is of a module, and has one of these names if there are any."""
    bases = type(value).__mro__[:-1]
    return any(base.__module__.startswith(module) and (not names or base.__name__ in names) for base in bases)


def is_node(value: object) -> bool:
    """Whether this is an NNX module or another object that `nnx.split` takes apart."""
    return has_base(value, "flax.nnx.", ("Pytree", "Object", "Module"))


def is_variable(value: object) -> bool:
    """Whether this is an NNX variable."""
    return has_base(value, "flax.nnx.", ("Variable",))


_OPTIMIZER = ("OptState", "OptVariable", "OptArray")


def variable_kind(variable: object, otherwise: str) -> tuple[str, bool]:
    """The kind of an NNX variable, and whether it is state. That of an optimizer is as `otherwise` says."""
    if isinstance(variable, nnx().Param):
        return "weight", False
    if any(base.__name__ in _OPTIMIZER for base in type(variable).__mro__):
        return otherwise, False
    return "weight", True


def is_equinox(value: object) -> bool:
    """Whether this is a module of Equinox. Of its leaves only arrays are traced."""
    return has_base(value, "equinox.")


def is_state(value: object) -> bool:
    """Whether this is the state of an Equinox network."""
    return type(value).__name__ == "State" and type(value).__module__.startswith("equinox.")


def is_module(value: object) -> bool:
    """Whether this is a module whose arrays are parameters: of Flax NNX or Equinox."""
    return is_node(value) or is_equinox(value)


def is_linen(value: object) -> bool:
    """Whether this is a module of Flax Linen, which has no arrays of its own."""
    return has_base(value, "flax.linen.", ("Module",))


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
    return has_base(value, "jaxpar.mxnet.", ("Model",))


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


class _KerasVariable(Protocol):
    @property
    def path(self) -> str: ...


def is_keras(value: object) -> bool:
    """Whether this is a model or layer of Keras."""
    return has_base(value, "keras.", ("Layer",))


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


def called_method(fn: object) -> tuple[Any, int]:
    """The method that `apply` of Flax Linen or a model of Keras runs, or None, and how many arguments come before."""
    owner: Any = getattr(fn, "__self__", fn)
    name = getattr(fn, "__name__", "")
    if name == "apply" and has_base(owner, "flax.linen.", ("Module",)):
        return owner.__call__, 1
    if is_keras(owner) and (owner is fn or name in ("stateless_call", "__call__")):
        return owner.call, 2 if name == "stateless_call" else 0
    return None, 0


def is_store(value: object) -> bool:
    """Whether this is a store of `jaxpar.kv`, which knows the paths of the parameters that it holds."""
    return type(value).__module__.startswith("jaxpar._store.") and hasattr(value, "paths") and hasattr(value, "values")


def in_store(entries: Sequence[Any], stores: Sequence[tuple[int, Any]]) -> tuple[Sequence[Any], tuple[int, ...] | None]:
    """The entries of a path, and the shape of what is there. None: that of the array.

    In the values of a store, given with its depth, they are those of the parameter. Kind "sharded" cuts that into rows
    of one length, with a padding.
    """
    for depth, store in stores:
        if len(entries) == depth + 2 and getattr(entries[depth], "name", "") == "values":
            number = key_of(entries[depth + 1])
            layout, name = dict(store.layouts).get(number), dict(store.paths).get(number)
            if name is not None:
                index, key = jax.tree_util.SequenceKey, jax.tree_util.DictKey
                entries = [index(int(p)) if p.isdigit() else key(p) for p in name.split("/")]
            return entries, layout.shape if layout is not None and layout.sharding is None else None
    return entries, None
