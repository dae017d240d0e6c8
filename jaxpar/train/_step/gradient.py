"""The gradient of one device's share of a batch: in microbatches, at another precision, with less memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..._core import checks
from ..._core.arguments import check_takes, has_parameter
from . import means
from .means import Mean, wide
from .state import carries

Grads = dict[int, jax.Array]
Loss = jax.Array | tuple[Any, Any] | Mean  # the mean over the examples, or (sum, weight)
LossFn = (  # with a model state, or without
    Callable[[Any, Any, jax.Array], tuple[Loss, dict[str, Any]]]
    | Callable[[Any, Any, jax.Array, Any], tuple[Loss, dict[str, Any], Any]]
)

LOSS_ARGUMENTS = ("params", "batch", "rng", "model_state")


class StepResult(NamedTuple):
    """What one device computed for its share.

    Attributes:
        grads: the gradient of the share's loss for the key of each floating parameter, in its dtype. Of a loss
            `(sum, weight)` it is the gradient of the sum.
        metrics: `loss`, and `aux` of `loss_fn`. What came as `(sum, weight)` is a `Mean` of two scalars.
        model_state: the new one, or ().
        unread: the keys of parameters that the loss does not depend on. Their gradients are zeros.
    """

    grads: Grads
    metrics: dict[str, Any]
    model_state: Any
    unread: frozenset[int] = frozenset()

    @property
    def weight(self) -> Any:
        """Of the loss. None: the loss is a mean, and all shares count alike."""
        loss = self.metrics["loss"]
        return loss.weight if isinstance(loss, Mean) else None


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How the gradient is computed. The attributes are options of `make_train_step`."""

    loss_fn: Callable[..., Any]
    accumulate: int = 1
    compute_dtype: Any = None
    remat: Any = False

    def __call__(self, params: Any, batch: Any, rng: Any, model_state: Any, step: Any, scale: Any) -> StepResult:
        """The gradient over the whole share.

        Args:
            step: the number of the step.
            scale: what the loss is multiplied by, and the gradient divided. None: nothing.
        """
        read: set[int] = set()  # filled while the loss is traced
        of = self._of_one if self.accumulate == 1 else self._of_many
        found = of(params, batch, rng, model_state, step, scale, read)
        found = found._replace(unread=frozenset(found.grads.keys() - read))
        if scale is None:
            return found
        return found._replace(grads={k: divide(g, scale) for k, g in found.grads.items()})

    def _of_one(
        self, params: Any, batch: Any, rng: jax.Array, model_state: Any, step: Any, scale: Any, read: set[int]
    ) -> StepResult:
        leaves, structure = jax.tree.flatten(params)
        keys = floating_keys(leaves)
        batch = self._cast(batch)

        def loss(trained: list[jax.Array]) -> tuple[jax.Array, Any]:
            marked = {k: record_gradient_use(x, k, read) for k, x in zip(keys, trained, strict=True)}
            merged = {**dict(enumerate(leaves)), **marked}
            whole = self._cast(structure.unflatten(list(merged.values())))
            metrics, new = self._call(whole, batch, rng, model_state, step)
            value = metrics["loss"]
            value = value.total if isinstance(value, Mean) else value.astype(wide(value))
            return value if scale is None else value * scale, (metrics, new)

        if self.remat is not False:
            loss = jax.checkpoint(loss, policy=None if self.remat is True else self.remat)
        (_, (metrics, new)), grads = jax.value_and_grad(loss, has_aux=True)([leaves[k] for k in keys])
        return StepResult(dict(zip(keys, grads, strict=True)), metrics, new)

    def _of_many(
        self, params: Any, batch: Any, rng: jax.Array, model_state: Any, step: Any, scale: Any, read: set[int]
    ) -> StepResult:
        """The mean over microbatches, or the sum of sums. They run one after the other, so memory holds the
        activations of one."""
        count, parts = self.accumulate, self._microbatches(batch)
        leaves = jax.tree.leaves(params)

        def add(carry: tuple[Grads, Any], part: tuple[jax.Array, Any]) -> tuple[tuple[Grads, Any], Any]:
            sums, model_state = carry
            i, batch = part
            found = self._of_one(params, batch, self._fold_in(rng, i), model_state, step, scale, read)
            sums = {k: total + found.grads[k].astype(total.dtype) for k, total in sums.items()}
            return (sums, found.model_state), found.metrics

        start = {k: jnp.zeros(leaves[k].shape, wide(leaves[k])) for k in floating_keys(leaves)}
        (sums, model_state), metrics = lax.scan(add, (start, model_state), (jnp.arange(count), parts))
        parts = 1 if isinstance(metrics["loss"], Mean) else count
        grads = {k: (total / parts).astype(leaves[k].dtype) for k, total in sums.items()}
        return StepResult(grads, means.over_microbatches(metrics, count), model_state)

    def _call(self, params: Any, batch: Any, rng: Any, model_state: Any, step: Any) -> tuple[dict[str, Any], Any]:
        """(metrics, new model state). The loss among the metrics is what is differentiated."""
        return call_loss(self.loss_fn, params, batch, rng, model_state, step)

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


def record_gradient_use(leaf: jax.Array, key: int, read: set[int]) -> jax.Array:
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


def divide(grad: jax.Array, divisor: Any) -> jax.Array:
    """The gradient divided in float32 or wider, in its own dtype."""
    return (grad.astype(wide(grad)) / divisor).astype(grad.dtype)


def check_loss_takes(loss_fn: Any, has_state: bool) -> None:
    """`TypeError` unless it takes what a step gives it. An argument that is named `step` may come after that."""
    hint = "; give the state one, train.create_state(store, rng, model_state=...)"
    if has_state:
        hint = ", since the state has a model_state"
    check_takes(loss_fn, LOSS_ARGUMENTS[: 3 + has_state], "train step: loss_fn", hint, also=("step",))


def call_loss(
    loss_fn: Any, params: Any, batch: Any, rng: Any, model_state: Any, step: Any
) -> tuple[dict[str, Any], Any]:
    """Call a loss function and check what it returns: (metrics, new model state)."""
    has_state = carries(model_state)
    check_loss_takes(loss_fn, has_state)
    named = {"step": step} if has_parameter(loss_fn, "step") else {}
    if not has_state:
        return _metrics(loss_fn(params, batch, rng, **named), ("loss", "aux")), ()
    result = loss_fn(params, batch, rng, model_state, **named)
    return _metrics(result, ("loss", "aux", "new_model_state")), _same_structure(result[2], model_state)


def _metrics(result: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The loss and aux that a loss function returned."""
    if not (isinstance(result, tuple) and len(result) == len(names) and isinstance(result[1], dict)):
        given = "(params, batch, rng)" if len(names) == 2 else "(params, batch, rng, model_state)"
        hint = "; a state made with create_state(model_state=...) is needed to return a third value"
        raise TypeError(
            f"train step: loss_fn{given} must return ({', '.join(names)}) with aux a dict, which may be empty; got "
            f"{_describe(result)}{hint if isinstance(result, tuple) and len(result) == 3 > len(names) else ''}"
        )
    loss, aux = result[:2]
    if aux.get("loss", loss) is not loss:
        raise ValueError("train step: aux of loss_fn has another 'loss', which the step reports itself; rename it")
    return {"loss": _loss(loss), **{name: _aux(value, name) for name, value in aux.items() if name != "loss"}}


def _aux(value: Any, name: str) -> Any:
    """A value of aux, with a `Mean` for each pair in it."""

    def leaf(path: Any, value: Any) -> Any:
        where = "/".join(filter(None, (name, jax.tree_util.keystr(path, simple=True, separator="/"))))
        where = f"train step: {where!r} in aux of loss_fn"
        if means.is_pair(value):
            return means.share_of(value, where)
        if not means.is_number(value):
            raise TypeError(f"{where} must be an array, got {checks.describe(value)}")
        return value

    return jax.tree_util.tree_map_with_path(leaf, value, is_leaf=means.is_pair)


def _loss(loss: Any) -> jax.Array | Mean:
    """The loss, or what the share adds to it."""
    wanted = "train step: the loss must be a scalar, the mean over the examples, or a pair (sum, weight)"
    parts: Any = (loss.total, loss.weight) if isinstance(loss, Mean) else loss
    if means.is_pair(loss) and all(map(means.is_number, parts)):
        _check_floating(parts[0], wanted)
        share = means.share_of(loss, "train step: the loss")
        return Mean(share.total, _constant(share.weight))
    if not means.is_number(loss):
        hint = "; the step differentiates loss_fn itself, so leave out jax.grad" if isinstance(loss, tuple) else ""
        raise TypeError(f"{wanted}; got {_describe(loss)}{hint}")
    if jnp.shape(parts) != ():
        raise TypeError(f"{wanted}; got shape {jnp.shape(parts)}")
    _check_floating(parts, wanted)
    return jnp.asarray(parts)


def _check_floating(loss: Any, wanted: str) -> None:
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(f"{wanted}, of a floating dtype; got {jnp.result_type(loss)}, which has no gradient")


@jax.custom_jvp
def _constant(weight: jax.Array) -> jax.Array:
    """The weight of a loss. The gradient of the step is that of the sum, divided by the weight, so it has none."""
    return weight


def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    if isinstance(tangents[0], SymbolicZero):
        return primals[0], tangents[0]
    raise ValueError(
        "train step: the weight of the loss (sum, weight) depends on the params, and the step takes it as a constant; "
        "wrap it in jax.lax.stop_gradient, or return the mean as a scalar"
    )


_constant.defjvp(_refuse_gradient, symbolic_zeros=True)


def _describe(result: Any) -> str:
    """What a loss function returned. A dict without arrays of its own name is a gradient most of the time."""
    if isinstance(result, dict):
        return f"a dict of {', '.join(map(repr, result))}; leave out jax.grad, the step differentiates loss_fn itself"
    return checks.describe(result)


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
