"""Whole modules of Flax NNX and Equinox: taken apart for a step, and put together for a loss function.

A step knows pytrees only. So `take_apart` splits a module once into params, a model state and all else, which is
static, and `ModuleLoss` makes of a loss function of the module one of these parts. What a library needs for that is one
class here, `OfNnx` and `OfEquinox`. Both are pytrees without leaves, so that a state has them beside its arrays.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.arrays import PyTree, is_prng_key
from ..._core.portable import path_name
from .loss import Batch, run_loss
from .state import carries

# Whoever has a module of a library has imported it.


def nnx() -> Any:
    return sys.modules.get("flax.nnx")


def equinox() -> Any:
    return sys.modules.get("equinox")


class Constant(NamedTuple):
    """An array or random keys as a static value, which becomes a constant of a program."""

    data: bytes
    shape: tuple[int, ...]
    dtype: str
    impl: str | None  # of keys

    @classmethod
    def of(cls, x: Any) -> Constant:
        impl = str(jax.random.key_impl(x)) if is_prng_key(x) else None
        x = np.asarray(x if impl is None else jax.random.key_data(x))
        return cls(x.tobytes(), x.shape, str(x.dtype), impl)

    def array(self) -> jax.Array:
        x = jnp.asarray(np.frombuffer(self.data, self.dtype).reshape(self.shape))
        return x if self.impl is None else jax.random.wrap_key_data(x, impl=self.impl)


class Parts(NamedTuple):
    """A module taken apart."""

    module: OfNnx | OfEquinox  # what puts it together
    params: PyTree
    model_state: PyTree  # what a call of the module may change, or ()
    frozen: PyTree  # for each param whether `wrt` leaves it out. None without `wrt`.
    modes: list[Mode]  # of its layers that have one


class Mode(NamedTuple):
    """The mode of a layer that computes something else in training than in evaluation, such as a batch norm."""

    layer: str  # its path, `encoder/norm`. Empty for the model itself
    is_evaluation: bool
    changes_nothing: bool  # a dropout of rate 0 is the same in both modes

    @classmethod
    def of(cls, layer: Any, path: str, names: Iterable[str]) -> list[Mode]:
        """By the attributes of the layer with these names, of which some may be None until they are set."""
        # Dropout of Flax has a `rate`, its attention a `dropout_rate`, and dropout of Equinox a `p`.
        rates = [getattr(layer, name, None) for name in ("rate", "dropout_rate", "p")]
        drops_nothing = any(isinstance(rate, (int, float)) and rate == 0 for rate in rates)
        flags = [getattr(layer, name, None) for name in names]
        return [cls(path, flag, drops_nothing) for flag in flags if isinstance(flag, bool)]


def trained_in_evaluation_mode(modes: list[Mode], is_trained: dict[str, bool]) -> list[str]:
    """The layers that are trained in evaluation mode, by their paths, if all are that have a mode.

    Then nobody has called `model.train()`, while one layer of many may be meant so. `is_trained` says it of each param,
    by its name. Layers of a frozen part do not count: its mode is a choice. An encoder in evaluation mode has no
    dropout, and its running statistics stay.
    """
    # Whether a module has a trained param, for each module that has params at all.
    has_trained: dict[str, bool] = {}
    for name, is_one in is_trained.items():
        parts = name.split("/")
        for depth in range(len(parts) + 1):
            module = "/".join(parts[:depth])  # the model itself is the empty path
            has_trained[module] = has_trained.get(module, False) or is_one

    counted: list[Mode] = []
    for mode in modes:
        # A layer without params, as dropout is, is of the module around it.
        module = mode.layer
        while module not in has_trained:
            module = module.rpartition("/")[0]
        if has_trained[module]:
            counted.append(mode)
    if not all(mode.is_evaluation for mode in counted):
        return []
    return [mode.layer or "the model itself" for mode in counted if not mode.changes_nothing]


Axes = str | tuple[str, ...]


def take_apart(model: Any, wrt: Any = None, axes: Axes | None = None) -> Parts | None:
    """The parts of an `nnx.Module` or `eqx.Module`. None for what is no module, or has arrays alone.

    A dict or a list of NNX's modules is an `nnx.Dict` or `nnx.List`. Modules of Equinox may be in any pytree. With
    `axes`, each batch norm that has no axes of devices yet has its statistics over these when it is trained.
    """
    has_nnx = nnx() is not None and bool(_with(model, lambda x: isinstance(x, nnx().Module)))
    has_equinox = equinox() is not None and bool(_with(model, lambda x: isinstance(x, equinox().Module)))
    if has_nnx and type(model) in (dict, list):
        several = model.values() if isinstance(model, dict) else model
        if all(isinstance(each, nnx().Module) for each in several):
            model = nnx().Dict(model) if isinstance(model, dict) else nnx().List(model)
    if has_nnx and isinstance(model, nnx().Module):
        return OfNnx.take_apart(model, wrt, axes)
    # Arrays alone are params as they are, as those that `eqx.partition` gives. What has modules of both libraries goes
    # into a store if it has no other variables.
    is_of_arrays = wrt is None and all(map(_is_param, jax.tree.leaves(model)))
    if has_equinox and not has_nnx and not is_of_arrays:
        return OfEquinox.take_apart(model, wrt, axes)
    return None


def transform_of(optimizer: Any, wrt: Any) -> tuple[Any, Any]:
    """The transform of an `nnx.Optimizer` and what it trains, or the optimizer that it was."""
    if not nnx() or not isinstance(optimizer, nnx().Optimizer):
        return optimizer, wrt
    if updates := int(optimizer.step[...]):  # its state would be lost
        hint = "give optimizer.tx to begin with a new state"
        raise ValueError(f"train.start: this nnx.Optimizer has made {updates} updates, which would be lost; {hint}")
    return optimizer.tx, optimizer.wrt if wrt is None and optimizer.wrt is not nnx().Param else wrt


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OfNnx:
    """An `nnx.Module` without the arrays of a state.

    All `nnx.Param`s are params. Random streams are static: each share and step draws from their keys and its own key,
    so that a resumed run draws the same. All else is model state: running statistics, caches, counters, raw arrays.
    A call that writes into a param is refused, since params change by the optimizer alone.
    """

    to_train: ClassVar[str] = "model.train()"

    graph: Any  # an `nnx.GraphDef`
    streams: tuple[Constant, ...]
    structure_of_streams: Any
    wrt: Any
    axes: Axes | None

    @classmethod
    def take_apart(cls, model: Any, wrt: Any, axes: Axes | None) -> Parts:
        # Of a copy, since the user's module is to stay as it is.
        model = nnx().clone(model)
        nnx().pop(model, nnx().Intermediate)  # what `sow` left
        graph, streams, params, model_state = nnx().split(model, *cls._filters(wrt))
        for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
            if is_prng_key(leaf):  # each share would draw other numbers, and the module may mean one key for all
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(f"train.start: the model has a random key in {name!r}; make it a stream, as nnx.Rngs")
        frozen = None if wrt is None else _frozen(params, nnx().state(model, wrt), wrt)
        leaves, structure = jax.tree.flatten(streams)
        modes: list[Mode] = []
        for path, layer in nnx().iter_graph(model):
            if isinstance(layer, nnx().Module):
                modes += Mode.of(layer, "/".join(map(str, path)), ("deterministic", "use_running_average"))
        module = cls(graph, tuple(map(Constant.of, leaves)), structure, wrt, axes)
        return Parts(module, params, _or_none(model_state), frozen, modes)

    @staticmethod
    def _filters(wrt: Any) -> tuple[Any, ...]:
        """Random streams; params, of which `wrt` chooses the trained ones, or which it adds to; all else."""
        return nnx().RngState, nnx().Param if wrt is None else nnx().Any(nnx().Param, wrt), ...

    @staticmethod
    def _norms(model: Any) -> list[Any]:
        """Each batch norm that is trained by the statistics of a batch and has no axes of devices."""
        norms = [node for _, node in nnx().iter_graph(model) if isinstance(node, nnx().BatchNorm)]
        return [norm for norm in norms if norm.axis_name is None and not norm.use_running_average]

    def _join(self, params: PyTree, model_state: PyTree, rng: jax.Array | None) -> Any:
        """The module, with streams for the key of a share and a step, or with those that it came with."""
        streams = [stream.array() for stream in self.streams]
        if rng is not None:
            bits = jax.random.bits(rng, (2,))  # 64 bits: with 32 two of some ten thousand steps would draw the same
            streams = [_drawn(x, bits) if is_prng_key(x) else jnp.zeros_like(x) for x in streams]
        states = (
            params,
            self.structure_of_streams.unflatten(streams),
            *((model_state,) if carries(model_state) else ()),
        )
        return nnx().merge(self.graph, *states, copy=True)

    def evaluated(self, params: PyTree, model_state: PyTree) -> Any:
        """The module in evaluation mode."""
        model = self._join(params, model_state, None)
        model.eval()
        return model

    def arguments(self, params: PyTree, model_state: PyTree) -> tuple[Any, ...]:
        """What a function of the module is given for its evaluation, beside the batch."""
        return (Unjoined(params, model_state, self),)

    def has_unsynced_norms(self, params: PyTree, model_state: PyTree) -> bool:
        return bool(self._norms(self._join(params, model_state, None)))

    def loss(
        self,
        loss_fn: Callable[..., Any],
        params: PyTree,
        batch: Batch,
        rng: jax.Array,
        model_state: PyTree,
        step: jax.Array,
    ) -> tuple[Any, dict[str, Any], PyTree]:
        """(loss, aux, new model state) of a share."""
        # The module of this share and step. Its batch norms have the statistics of all devices, or of the share where
        # there are no axes.
        model = self._join(params, model_state, jax.random.fold_in(rng, _OF_STREAMS))
        for norm in self._norms(model):
            norm.axis_name = self.axes
        loss, aux, _ = run_loss(loss_fn, (model, batch, rng), step)

        # What the call has changed in it: the new model state, and nothing else. A param that a call writes would be
        # lost, as the optimizer's update is of the old one.
        nnx().pop(model, nnx().Intermediate)
        _, _, params_after, new = nnx().split(model, *self._filters(self.wrt))
        before, after = (dict(nnx().to_flat_state(state)) for state in (params, params_after))
        # What was not written is the very array that it was.
        if written := [path for path in before if after[path][...] is not before[path][...]]:
            raise ValueError(
                f"train step: a call of the model writes into the params {_named(written)}, which change by the "
                "optimizer alone; make what a call changes a variable of another type, such as nnx.BatchStat, which is "
                "kept as model state, or drop what it writes, by nnx.clone(model) in loss_fn"
            )
        # A state of another structure would be another program at the next step, and no checkpoint would fit.
        before, after = (dict(nnx().to_flat_state(s)) for s in (model_state or nnx().State({}), new))
        if changed := before.keys() ^ after.keys():
            raise ValueError(
                f"train step: a call of the model makes or removes {_named(changed)}, which a "
                "state must have from the start; make all variables when the module is made"
            )
        return loss, aux, _or_none(new)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OfEquinox:
    """An `eqx.Module` without the arrays of a state.

    All arrays are params. Random keys, functions and other leaves are static. The `eqx.nn.State` of a module is given
    beside it, as `model_state`.
    """

    to_train: ClassVar[str] = "eqx.nn.inference_mode(model, False)"

    leaves: tuple[Any, ...]
    structure: Any
    axes: Axes | None

    @classmethod
    def take_apart(cls, model: Any, wrt: Any, axes: Axes | None) -> Parts:
        # Static leaves are a part of the structure of a state, by which programs are found. So they must compare and
        # hash, which an array does not: a random key is kept as a `Constant`.
        params, static = equinox().partition(model, _is_param)
        frozen = None if wrt is None else _frozen(params, equinox().filter(model, wrt), wrt)
        leaves, structure = jax.tree.flatten(static)
        leaves = [Constant.of(x) if is_prng_key(x) else x for x in leaves]
        modes: list[Mode] = []
        has_mode = lambda x: isinstance(getattr(x, "inference", None), bool)  # noqa: E731
        for path, layer in jax.tree_util.tree_leaves_with_path(model, is_leaf=has_mode):
            modes += Mode.of(layer, path_name(path), ("inference",))
        return Parts(cls(tuple(leaves), structure, axes), params, (), frozen, modes)

    def _join(self, params: PyTree) -> Any:
        static = self.structure.unflatten([x.array() if isinstance(x, Constant) else x for x in self.leaves])
        return equinox().combine(params, static)

    def _is_unsynced_norm(self, layer: Any) -> bool:
        is_trained = isinstance(layer, equinox().nn.BatchNorm) and layer.inference is False
        return is_trained and not set(_as_tuple(self.axes or ())) & set(_as_tuple(layer.axis_name))

    def evaluated(self, params: PyTree, model_state: PyTree) -> Any:
        """The module in evaluation mode."""
        return equinox().nn.inference_mode(self._join(params))

    def arguments(self, params: PyTree, model_state: PyTree) -> tuple[Any, ...]:
        """What a function of the module is given for its evaluation, beside the batch."""
        model = Unjoined(params, (), self)
        return (model, model_state) if carries(model_state) else (model,)

    def has_unsynced_norms(self, params: PyTree, model_state: PyTree) -> bool:
        return bool(_with(self._join(params), self._is_unsynced_norm))

    def loss(
        self,
        loss_fn: Callable[..., Any],
        params: PyTree,
        batch: Batch,
        rng: jax.Array,
        model_state: PyTree,
        step: jax.Array,
    ) -> tuple[Any, dict[str, Any], PyTree]:
        """(loss, aux, new model state) of a share."""

        def synced(layer: Any) -> Any:
            if self.axes is None or not self._is_unsynced_norm(layer):
                return layer
            axes = (*_as_tuple(layer.axis_name), *_as_tuple(self.axes))
            return equinox().tree_at(lambda norm: norm.axis_name, layer, axes)

        model = jax.tree.map(synced, self._join(params), is_leaf=self._is_unsynced_norm)
        state = (model_state,) if carries(model_state) else ()
        return run_loss(loss_fn, (model, batch, rng, *state), step)


@dataclasses.dataclass(frozen=True)
class ModuleLoss:
    """A loss function of a module as one of its parts."""

    loss_fn: Callable[..., Any]
    module: OfNnx | OfEquinox

    def __call__(self, params: PyTree, batch: Batch, rng: jax.Array, *model_state: PyTree, step: jax.Array) -> Any:
        state = model_state[0] if model_state else ()
        loss, aux, new = self.module.loss(self.loss_fn, params, batch, rng, state, step)
        return (loss, aux, new) if model_state else (loss, aux)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unjoined:
    """A module in parts, which can be arguments of a program."""

    params: PyTree
    model_state: PyTree
    module: OfNnx | OfEquinox = dataclasses.field(metadata={"static": True})


def joined(*arguments: Any) -> tuple[Any, ...]:
    """The arguments of a function, with a module in evaluation mode where one is `Unjoined`."""
    return tuple(x.module.evaluated(x.params, x.model_state) if isinstance(x, Unjoined) else x for x in arguments)


_OF_STREAMS = 2**32 - 1  # what draws streams out of the key of a share. Microbatches and users count from 0.


def _drawn(keys: jax.Array, bits: jax.Array) -> jax.Array:
    """Keys that follow from these and from the bits."""
    flat = keys.reshape(-1)
    for i in range(len(bits)):
        flat = jax.vmap(jax.random.fold_in, (0, None))(flat, bits[i])
    return flat.reshape(keys.shape)


def _frozen(params: PyTree, trained: PyTree, wrt: Any) -> PyTree:
    """For each param whether it is none of the trained ones."""
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(trained)}
    if not paths:
        raise ValueError(f"train.start: wrt={wrt!r} chooses no array of the model, so nothing would be trained")
    return jax.tree_util.tree_map_with_path(lambda path, _: path not in paths, params)


def _with(model: Any, is_such: Callable[[Any], bool]) -> list[Any]:
    """The layers of a model, or the model itself, of which this is true."""
    return [layer for layer in jax.tree.leaves(model, is_leaf=is_such) if is_such(layer)]


def _is_param(x: Any) -> bool:
    """Whether a leaf of an `eqx.Module` is an array of numbers."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and not is_prng_key(x)


def _as_tuple(axes: Any) -> tuple[Any, ...]:
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _named(paths: Iterable[tuple[Any, ...]]) -> str:
    """The names of variables, for people."""
    return ", ".join(sorted(repr("/".join(map(str, path))) for path in paths))


def _or_none(model_state: PyTree) -> PyTree:
    return model_state if jax.tree.leaves(model_state) else ()
