"""The gradient of one device's share of a batch: in microbatches, at another precision, with less memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._core import checks
from ..._core.arguments import check_takes
from ..._devices.formulas import fast_on_cpus
from .state import carries

Grads = dict[int, jax.Array]
LossFn = (  # with a model state, or without
    Callable[[Any, Any, jax.Array], tuple[jax.Array, dict[str, Any]]]
    | Callable[[Any, Any, jax.Array, Any], tuple[jax.Array, dict[str, Any], Any]]
)


class StepResult(NamedTuple):
    """What one device computed for its share.

    Attributes:
        grads: the gradient of the mean loss for the key of each floating parameter, in its dtype.
        metrics: `loss`, and `aux` of `loss_fn`.
        model_state: the new one, or ().
        unread: the keys of parameters that the loss does not depend on. Their gradients are zeros.
    """

    grads: Grads
    metrics: dict[str, Any]
    model_state: Any
    unread: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How the gradient is computed. The attributes are options of `make_train_step`."""

    loss_fn: Callable[..., Any]
    accumulate: int = 1
    compute_dtype: Any = None
    remat: Any = False

    def __call__(self, params: Any, batch: Any, rng: jax.Array, model_state: Any, scale: Any = None) -> StepResult:
        """The gradient over the whole share. The loss is multiplied by `scale`, and the gradient divided by it."""
        read: set[int] = set()  # filled while the loss is traced
        of = self._of_one if self.accumulate == 1 else self._of_many
        found = of(params, batch, rng, model_state, scale, read)
        found = found._replace(unread=frozenset(found.grads.keys() - read))
        if scale is None:
            return found
        return found._replace(grads={k: _divide(g, scale) for k, g in found.grads.items()})

    def _of_one(
        self, params: Any, batch: Any, rng: jax.Array, model_state: Any, scale: Any, read: set[int]
    ) -> StepResult:
        leaves, structure = jax.tree.flatten(params)
        keys = floating_keys(leaves)
        batch = self._cast(batch)

        def loss(trained: list[jax.Array]) -> tuple[jax.Array, Any]:
            marked = {k: _note_gradient(x, k, read) for k, x in zip(keys, trained, strict=True)}
            merged = {**dict(enumerate(leaves)), **marked}
            whole = self._cast(structure.unflatten(list(merged.values())))
            value, aux, new = self._call(whole, batch, rng, model_state)
            if self.compute_dtype is not None or scale is not None:
                value = value.astype(jnp.result_type(value, jnp.float32))
            return value if scale is None else value * scale, ({"loss": value, **_without_loss(aux)}, new)

        if self.remat is not False:
            loss = jax.checkpoint(loss, policy=None if self.remat is True else self.remat)
        found = fast_on_cpus(jax.value_and_grad(loss, has_aux=True))([leaves[k] for k in keys])
        (_, (metrics, new)), grads = found
        return StepResult(dict(zip(keys, grads, strict=True)), metrics, new)

    def _of_many(
        self, params: Any, batch: Any, rng: jax.Array, model_state: Any, scale: Any, read: set[int]
    ) -> StepResult:
        """The mean over microbatches. They run one after the other, so memory holds the activations of one."""
        count, parts = self.accumulate, self._microbatches(batch)
        leaves = jax.tree.leaves(params)

        def add(carry: tuple[Grads, Any], part: tuple[jax.Array, Any]) -> tuple[tuple[Grads, Any], Any]:
            sums, model_state = carry
            i, batch = part
            found = self._of_one(params, batch, self._fold_in(rng, i), model_state, scale, read)
            sums = {k: total + found.grads[k].astype(total.dtype) for k, total in sums.items()}
            return (sums, found.model_state), found.metrics

        start = {k: jnp.zeros(leaves[k].shape, wide(leaves[k])) for k in floating_keys(leaves)}
        loop = fast_on_cpus(partial(lax.scan, add))  # its convolutions are told that they are in a loop
        (sums, model_state), metrics = loop((start, model_state), (jnp.arange(count), parts))
        grads = {k: (total / count).astype(leaves[k].dtype) for k, total in sums.items()}
        return StepResult(grads, jax.tree.map(lambda x: x.astype(wide(x)).mean(0), metrics), model_state)

    def _call(self, params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, dict[str, Any], Any]:
        """(loss, aux, new model state)."""
        return call_loss(self.loss_fn, params, batch, rng, model_state)

    def _microbatches(self, batch: Any) -> Any:
        """The batch with a new first axis, that of the microbatches."""
        count = self.accumulate
        return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)

    def _fold_in(self, rng: jax.Array, i: Any) -> jax.Array:
        return jax.random.fold_in(rng, i)

    def _cast(self, tree: Any) -> Any:
        """The floating arrays in the dtype to compute in."""
        if self.compute_dtype is None:
            return tree
        return jax.tree.map(
            lambda x: x.astype(self.compute_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )


def _note_gradient(leaf: jax.Array, key: int, read: set[int]) -> jax.Array:
    """The leaf itself. Its key is added to `read` when a gradient for it is traced."""

    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        read.add(key)
        return (cotangent,)

    same.defvjp(lambda x: (x, None), backward)
    return same(leaf)


def floating_keys(leaves: list[jax.Array]) -> list[int]:
    """The keys of the parameters that have a gradient."""
    return [k for k, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def wide(x: Any) -> Any:
    """The dtype for sums of such values: float32 or wider."""
    return jnp.result_type(x, jnp.float32)


def _divide(grad: jax.Array, scale: Any) -> jax.Array:
    return (grad.astype(wide(grad)) / scale).astype(grad.dtype)


def call_loss(
    loss_fn: Any, params: Any, batch: Any, rng: Any, model_state: Any
) -> tuple[jax.Array, dict[str, Any], Any]:
    """Call a loss function and check what it returns."""
    if not carries(model_state):
        hint = "; give the state one, train.create_state(store, rng, model_state=...)"
        check_takes(loss_fn, ("params", "batch", "rng"), "train step: loss_fn", hint)
        return *_check_loss_result(loss_fn(params, batch, rng), ("loss", "aux")), ()
    loss, aux, new = _check_loss_result(loss_fn(params, batch, rng, model_state), ("loss", "aux", "new_model_state"))
    return loss, aux, _same_structure(new, model_state)


def _check_loss_result(result: Any, names: tuple[str, ...]) -> Any:
    if not (isinstance(result, tuple) and len(result) == len(names) and isinstance(result[1], dict)):
        given = "(params, batch, rng)" if len(names) == 2 else "(params, batch, rng, model_state)"
        hint = "; a state made with create_state(model_state=...) is needed to return a third value"
        raise TypeError(
            f"train step: loss_fn{given} must return ({', '.join(names)}) with aux a dict, which may be empty; got "
            f"{_describe(result)}{hint if isinstance(result, tuple) and len(result) == 3 > len(names) else ''}"
        )
    loss, aux = result[:2]
    _check_loss(loss)
    for path, value in jax.tree_util.tree_leaves_with_path(aux):
        if not _is_number(value):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(f"train step: {name!r} in aux of loss_fn must be an array, got {checks.describe(value)}")
    if aux.get("loss", loss) is not loss:
        raise ValueError("train step: aux of loss_fn has another 'loss', which the step reports itself; rename it")
    return result


def _check_loss(loss: Any) -> None:
    wanted = "train step: the loss must be a scalar, the mean over the examples"
    if not _is_number(loss):
        hint = "; the step differentiates loss_fn itself, so leave out jax.grad" if isinstance(loss, tuple) else ""
        raise TypeError(f"{wanted}; got {_describe(loss)}{hint}")
    if jnp.shape(loss) != ():
        raise TypeError(f"{wanted}; got shape {jnp.shape(loss)}")
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(f"{wanted}, of a floating dtype; got {jnp.result_type(loss)}, which has no gradient")


def _is_number(value: Any) -> bool:
    return hasattr(value, "dtype") or isinstance(value, (bool, int, float, complex))


def _describe(result: Any) -> str:
    """What a loss function returned. A dict without arrays of its own name is a gradient most of the time."""
    if isinstance(result, dict):
        return f"a dict of {', '.join(map(repr, result))}; leave out jax.grad, the step differentiates loss_fn itself"
    return checks.describe(result)


def _without_loss(aux: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in aux.items() if name != "loss"}


def _same_structure(new: Any, old: Any) -> Any:
    """The new model state in the dtypes of the old one."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise TypeError(
            "train step: the new_model_state of loss_fn must have the structure of the old one: expected "
            f"{jax.tree.structure(old)}, got {jax.tree.structure(new)}"
        )

    def cast(path: Any, leaf: Any, like: Any) -> Any:
        where = f"train step: leaf {jax.tree_util.keystr(path, simple=True, separator='/')!r} of new_model_state"
        leaf = checks.array(leaf, where)
        checks.same_shape(leaf, like.shape, where)
        checks.castable(leaf.dtype, like.dtype, where)
        return leaf.astype(like.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)
