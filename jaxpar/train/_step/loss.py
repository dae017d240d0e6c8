"""What a loss function takes and gives, and the means that a step makes of it over the shards of a batch.

Every shard gives terms, the terms are added over the shards in whatever way an engine does it, and the mean is made of
the sums. So the same few functions serve every engine.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..._core import checks
from ..._core.arrays import KeyPath, PyTree, is_prng_key
from ..._core.functions import check_takes, has_parameter
from ..._core.text import warn
from .state import carries, is_floating


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A weighted mean over all examples: `finish(sum of totals / sum of weights)`.

    Attributes:
        total: the weighted sums, `(n, ...)` with one row for each example; or a scalar, the sum over the batch.
        weight: the weights, in the shape of `total`: for example, the number of tokens, or of examples of a class.
        finish: a function of the mean, such as `numpy.exp`. None: the mean itself.
        columns: True: each column of `(n, k)` has a separate mean. False: all entries are summed.

    Example:
        >>> import numpy as np
        >>> from jaxpar import train
        >>> def eval_fn(params, batch):
        ...     error = (params * batch["x"] - batch["y"]) ** 2
        ...     return {"rmse": train.Mean(error, jnp.ones_like(error), finish=np.sqrt)}
        >>> line = {"x": np.arange(3.0), "y": np.arange(3.0) + 2}
        >>> train.evaluate(1.0, data=line, eval_fn=eval_fn)
        {'rmse': 2.0}
    """

    total: Any
    weight: Any
    finish: Callable[[Any], Any] | None = dataclasses.field(default=None, metadata={"static": True})
    columns: bool = dataclasses.field(default=False, metadata={"static": True})


Batch = PyTree
Metrics = dict[str, jax.Array]
ShardMetrics = dict[str, jax.Array | Mean]  # of a shard, or their sums over shards
Loss = jax.Array | tuple[Any, Any] | Mean  # the mean over the examples, or (sum, weight)
LossFn = (  # with a model state, or without
    Callable[[Any, Any], Loss | tuple[Loss, dict[str, Any]]]
    | Callable[[Any, Any, jax.Array], Loss | tuple[Loss, dict[str, Any]]]
    | Callable[[Any, Any, jax.Array, Any], tuple[Loss, dict[str, Any], Any]]
)

LOSS_ARGUMENTS = ("params", "batch", "rng", "model_state")
_NO_GRAD = "; the step differentiates loss_fn itself, so leave out jax.grad"


def check_loss_fn(loss_fn: LossFn, caller: str) -> None:
    """`TypeError` unless it takes the arguments of a loss, with a model state or without."""
    _positions(loss_fn, (3, 2, 4), f"{caller}: loss_fn", "; rng and what follows may be left out")


def takes_batch_alone(loss_fn: LossFn) -> bool:
    """Whether it is a function of (params, batch), and of no random key, model state or number of the step."""
    count = _positions(loss_fn, (3, 2, 4), "fit: loss_fn", "")
    return count == 2 and not has_parameter(loss_fn, "step")


def check_loss_takes(loss_fn: LossFn, has_state: bool) -> int:
    """How many arguments a step gives it by position. `TypeError` where it takes others.

    An argument that is named `step` may come after them.
    """
    if has_state:
        return _positions(loss_fn, (4,), "train step: loss_fn", ", since the state has a model_state")
    hint = "; give the state one, train.create_state(store, rng, model_state=...)"
    return _positions(loss_fn, (3, 2), "train step: loss_fn", hint)


def _option_in_third_place(loss_fn: LossFn) -> str | None:
    """The name of a third positional argument whose default says that it is no random key."""
    try:
        parameters = [*inspect.signature(loss_fn, follow_wrapped=False).parameters.values()]
    except (TypeError, ValueError):  # no function, or a builtin
        return None
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(places) < 3 or places[2].name in ("rng", "key"):
        return None
    default = places[2].default
    # An array may be a key. It is asked first, since `==` of an array has no truth value.
    may_be_key = hasattr(default, "dtype") or default in (places[2].empty, None)
    return None if may_be_key else places[2].name


def _positions(loss_fn: LossFn, counts: tuple[int, ...], what: str, hint: str) -> int:
    """The first of these numbers of arguments that fits the function. `TypeError` where none does."""
    # An option of the user's own, `def loss_fn(params, batch, smoothing=0.1)`, is no place for a key.
    if 2 in counts and (third := _option_in_third_place(loss_fn)) is not None:
        counts = tuple(count for count in counts if count < 3)
        hint = f"; {third} has a default, so it is not given a key: call that argument rng, or bind it by partial"
    errors: list[TypeError] = []
    for count in counts:
        try:
            check_takes(loss_fn, LOSS_ARGUMENTS[:count], what, hint, also=("step",))
            return count
        except TypeError as error:
            errors.append(error)
    raise errors[0]


def call_loss(
    loss_fn: Callable[..., Any], params: PyTree, batch: Batch, rng: jax.Array, model_state: PyTree, step: jax.Array
) -> tuple[ShardMetrics, PyTree]:
    """Call a loss function and check what it returns: (metrics, new model state)."""
    has_state = carries(model_state)
    loss, aux, new_state = run_loss(loss_fn, (params, batch, rng, *((model_state,) if has_state else ())), step)

    # The loss as a scalar, or as the `Mean` of the shard. A sum of integers would become one of floats, without a
    # gradient, and the loss of each example one of them all: so the form is checked before anything is made of it.
    numbers: Any = (loss.total, loss.weight) if isinstance(loss, Mean) else loss if is_pair(loss) else (loss,)
    fault = None
    if not all(map(is_number, numbers)):
        fault = f"{checks.describe(loss)}{_NO_GRAD if isinstance(loss, (tuple, dict)) else ''}"
    elif len(numbers) == 1 and jnp.shape(numbers[0]) != ():
        fault = f"shape {jnp.shape(numbers[0])}"
    elif not jnp.issubdtype(jnp.result_type(numbers[0]), jnp.floating):
        fault = f"{jnp.result_type(numbers[0])}, which has no gradient"
    if fault is not None:
        raise TypeError(
            "train step: the loss must be a scalar, the mean over the examples, or a pair (sum, weight), of a floating "
            f"dtype; got {fault}"
        )
    if aux.get("loss", loss) is not loss:
        raise ValueError("train step: aux of loss_fn has another 'loss', which the step reports itself; rename it")
    loss_of_shard: jax.Array | Mean
    if is_pair(loss):
        mean = shard_mean(loss, "train step: the loss")
        loss_of_shard = Mean(mean.total, _constant(mean.weight))
    else:
        loss_of_shard = jnp.asarray(loss)

    # The other metrics.
    def of_aux(path: KeyPath, value: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return shard_mean(value, f"train step: {name!r} in aux of loss_fn") if is_pair(value) else value

    metrics = {**jax.tree_util.tree_map_with_path(of_aux, aux, is_leaf=is_pair), "loss": loss_of_shard}
    if not has_state:
        return metrics, ()

    # The new model state in the dtypes of the old one, or the next step would be another program.
    def cast(path: KeyPath, leaf: PyTree, old: jax.Array) -> jax.Array:
        name = f"train step: leaf {jax.tree_util.keystr(path, simple=True, separator='/')!r} of new_model_state"
        leaf = checks.array(leaf, name)
        checks.storable(leaf, old.shape, old.dtype, name)
        return leaf.astype(old.dtype)

    return metrics, jax.tree_util.tree_map_with_path(cast, new_state, model_state)


def run_loss(
    loss_fn: Callable[..., Any], arguments: tuple[Any, ...], step: jax.Array
) -> tuple[Any, dict[str, Any], PyTree]:
    """What a loss function gives for (params, batch, rng) or those and a model state: (loss, aux, new model state)."""
    has_state = len(arguments) == 4
    arguments = arguments[: check_loss_takes(loss_fn, has_state)]
    try:
        result = loss_fn(*arguments, **({"step": step} if has_parameter(loss_fn, "step") else {}))
    except (TypeError, KeyError, AttributeError) as error:
        # A loss that is written for the pairs of a loader, `x, y = batch`, or for a dict with other names.
        if isinstance(arguments[1], dict) and arguments[1].keys() == {"image", "label"}:
            error.add_note(
                'train step: the batch that loss_fn got is a dict with "image" and "label". Pairs of a loader have '
                'these names, and data.from_iterable(loader, names=("x", "y")) gives them others'
            )
        raise
    # Not a pair of numbers: it may be (sum, weight), and many people return (loss, accuracy).
    if not has_state and (isinstance(result, Mean) or is_number(result)):  # the loss alone
        return result, {}, ()
    wanted = ("loss", "aux", "new_model_state") if has_state else ("loss", "aux")
    if not (isinstance(result, tuple) and len(result) == len(wanted) and isinstance(result[1], dict)):
        names, hint = ", ".join(LOSS_ARGUMENTS[: len(arguments)]), _NO_GRAD if isinstance(result, dict) else ""
        if isinstance(result, tuple) and len(result) == 3 and not has_state:
            hint = "; a state made with create_state(model_state=...) is needed to return a third value"
        elif is_pair(result) and not has_state:
            hint = '; name a second value, (loss, {"accuracy": accuracy}); of a sum and its weight, ((sum, weight), {})'
        either = "" if has_state else "loss or "
        pair = f"{either}({', '.join(wanted)}) with aux a dict, which may be empty"
        raise TypeError(f"train step: loss_fn({names}) must return {pair}; got {checks.describe(result)}{hint}")
    return *result[:2], result[2] if has_state else ()


@jax.custom_jvp
def _constant(weight: jax.Array) -> jax.Array:
    """The weight of a loss. The gradient of the step is that of the sum, divided by the weight, so it has none."""
    return weight


def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    if isinstance(tangents[0], SymbolicZero):
        return primals[0], tangents[0]
    raise ValueError(
        "train step: the weight of the loss (sum, weight) depends on the params; wrap it in jax.lax.stop_gradient"
    )


_constant.defjvp(_refuse_gradient, symbolic_zeros=True)


def widen(x: Any) -> jax.Array:
    """The array in float32 or wider, the dtype for sums of such values."""
    x = jnp.asarray(x)
    is_wide = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4
    return x.astype(x.dtype if is_wide else jnp.float32)


def is_pair(value: object) -> bool:
    """Whether a value of a loss function is (sum, weight): a tuple of two, or a `Mean`."""
    return isinstance(value, Mean) or (type(value) is tuple and len(value) == 2)


def shard_mean(pair: Any, name: str) -> Mean:
    """What a shard adds to a mean over what counts: two scalars in float32 or wider."""
    pair = pair if isinstance(pair, Mean) else Mean(*pair)
    if pair.finish is not None or pair.columns:
        raise TypeError(f"{name}: a Mean with finish= or columns= is for eval_fn; in a step give (sum, weight)")
    # One weight for many values would count once. A pair of other things is no pair, and jax says what it is.
    if jnp.shape(pair.total) != jnp.shape(pair.weight):
        fault = f"the sum has shape {jnp.shape(pair.total)} and the weight {jnp.shape(pair.weight)}"
        raise ValueError(f"{name}: {fault}; give two scalars, or two arrays of one shape, which are summed")
    # A sum of the user's own has these dtypes by `compute_dtype`. bfloat16 rounds counts above 256, and float16 those
    # above 2048, of which the largest become infinite: then the loss would be 0.
    if jnp.shape(pair.weight) == () and jnp.result_type(pair.weight) in (jnp.bfloat16, jnp.float16):
        warn(
            f"{name}: the weight is a sum in {jnp.result_type(pair.weight)}, which rounds large counts; write "
            "mask.sum(dtype=jnp.float32), or give a row for each example, which the step sums in float32"
        )
    return Mean(widen(pair.total).sum(), widen(pair.weight).sum())


def is_number(value: object) -> bool:
    return hasattr(value, "dtype") or isinstance(value, (bool, int, float, complex))


def by_name(metrics: Mapping[str, Any], is_leaf: Callable[[Any], bool] = is_pair) -> dict[str, Any]:
    """Metrics with one name each: those of a dict or a list in the dict are "parts/mae", as loggers write them.

    `ValueError` where two have the same name.
    """
    if all(is_leaf(value) or jax.tree_util.all_leaves((value,)) for value in metrics.values()):
        return dict(metrics)  # in its order, and a dict may have names that do not compare
    named: dict[str, Any] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(dict(metrics), is_leaf=is_leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise ValueError(f"two metrics have the name {name!r}: one of them is in a dict or a list; rename one")
        named[name] = value
    return named


def over_microbatches(metrics: ShardMetrics, count: int) -> ShardMetrics:
    """The metrics of a shard, out of those of its microbatches, which have them as first axis."""
    summed = jax.tree.map(lambda x: widen(x).sum(0), metrics)
    return jax.tree.map(lambda x: x if isinstance(x, Mean) else x / count, summed, is_leaf=is_pair)


def finish(sums: ShardMetrics, count: int) -> Metrics:
    """The means out of the sums over `count` shards. A sum over no weight at all gives NaN."""
    # NaN, not 0: a step of which no example counts has no loss, and a guard leaves its update out.
    return jax.tree.map(lambda x: x.total / x.weight if isinstance(x, Mean) else x / count, sums, is_leaf=is_pair)


# Random streams of the user's own, as those of `nnx.Rngs`, in a model state. Each shard draws other numbers of them,
# while the state is one for all: the first shard has the stored keys, and what it makes of them is stored.

_OF_SHARDS = 2**32 - 1  # a stream is asked with its count, which never gets there


def with_own_streams(model_state: PyTree, number: int | jax.Array) -> PyTree:
    """The model state as shard `number` gets it, with random keys of its own."""

    def own_key(key: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(jax.random.fold_in(key, jnp.uint32(_OF_SHARDS)), number)
        return jnp.where(number == 0, key, folded)

    def of_leaf(x: jax.Array) -> jax.Array:
        return jax.vmap(own_key)(x.reshape(-1)).reshape(x.shape) if is_prng_key(x) else x

    return jax.tree.map(of_leaf, model_state)


# The mean of a model state must leave alone what all shards have alike. A sum of equal float32 is rounded, and only one
# of 1, 2 or 4 of them is exact in any order. The two halves of their digits add up exactly, for up to 4096 shards.


def model_state_terms(model_state: PyTree, count: int) -> list[tuple[jax.Array, ...]]:
    """What is added up over `count` shards for the mean of each floating leaf of a model state."""

    def terms(x: jax.Array) -> tuple[jax.Array, ...]:
        # What was widened has room for the digits of a sum, and is rounded to its own dtype after it. XLA reduces the
        # precision of real numbers only.
        value = widen(x)
        is_exact = count in (1, 2, 4) or x.dtype != value.dtype or jnp.iscomplexobj(x)
        if is_exact:
            return (value,)
        # What rounds up to infinity, in the upper half, is added as it is.
        digits = jnp.finfo(value.dtype)
        high = lax.reduce_precision(value, digits.nexp, digits.nmant // 2)
        high = jnp.where(jnp.isfinite(high), high, value)
        return high, jnp.where(jnp.isfinite(high), value - high, 0)

    return [terms(x) for x in jax.tree.leaves(model_state) if is_floating(x)]


def model_state_mean(model_state: PyTree, sums: list[tuple[jax.Array, ...]], count: int) -> PyTree:
    """The model state with the means in place of its floating leaves, out of the sums of their terms."""

    def mean(x: jax.Array, total: jax.Array, *low: jax.Array) -> jax.Array:
        divisor: int | jax.Array = count
        if low:  # XLA multiplies by the reciprocal of a constant, which is rounded
            divisor = lax.optimization_barrier(jnp.asarray(count, total.dtype))
        value = total / divisor
        return (value + low[0] / divisor if low else value).astype(x.dtype)

    sums_of_leaves = iter(sums)
    return jax.tree.map(lambda x: mean(x, *next(sums_of_leaves)) if is_floating(x) else x, model_state)


@dataclasses.dataclass(frozen=True)
class ClassificationLoss:
    """What `classification_loss` gives."""

    apply_fn: Callable[[Any, jax.Array], jax.Array]
    label_smoothing: float

    def __call__(self, params: PyTree, batch: dict[str, jax.Array], rng: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        if not isinstance(batch, dict) or not {"image", "label"} <= batch.keys():
            raise TypeError(
                'classification_loss: a batch must be a dict with "image" and "label", as data.batches makes them; got '
                f"{sorted(batch) if isinstance(batch, dict) else checks.describe(batch)}; for others write a loss_fn"
            )
        checks.labels(batch["label"], "classification_loss")
        # (n, classes), in float32: the logarithm of a softmax in bfloat16 has two digits.
        logits = self.apply_fn(params, batch["image"]).astype(jnp.float32)
        if logits.ndim != 2 or logits.shape[1] == 1:  # of one logit the softmax is always 1
            raise ValueError(
                f"classification_loss: apply_fn must return logits (n, classes), got {checks.describe(logits)}; of one "
                "logit an example write a loss_fn with optax.sigmoid_binary_cross_entropy"
            )
        labels = batch["label"][:, None]
        accuracy = (logits.argmax(axis=1) == labels[:, 0]).mean()
        if not self.label_smoothing:
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=1)
            # A label that is too large is NaN there. -1 would be the last class.
            return -jnp.where(labels < 0, jnp.nan, picked).mean(), {"accuracy": accuracy}
        from optax import losses

        targets = jax.nn.one_hot(labels[:, 0], logits.shape[1], dtype=logits.dtype)
        smooth = losses.smooth_labels(targets, self.label_smoothing)
        is_class = (labels[:, 0] >= 0) & (labels[:, 0] < logits.shape[1])
        # Added, since a choice between losses would round the gradients otherwise.
        no_loss = jnp.where(is_class.all(), 0, jnp.nan).astype(logits.dtype)
        return losses.softmax_cross_entropy(logits, smooth).mean() + no_loss, {"accuracy": accuracy}


def classification_loss(
    apply_fn: Callable[[Any, jax.Array], jax.Array],
    label_smoothing: float = 0.0,
) -> Callable[[Any, dict[str, jax.Array], jax.Array], tuple[jax.Array, dict[str, Any]]]:
    """Make a `loss_fn` for classifiers: mean cross-entropy, and the accuracy.

    Args:
        apply_fn: `apply_fn(params, images) -> logits` of shape (n, classes).
        label_smoothing: the part of each target that is spread evenly over all classes, in [0, 1). Accuracy and
            `evaluate` do not use it.

    Returns:
        `loss_fn(params, batch, rng) -> (loss, {"accuracy"})` for batches `{"image", "label"}` with integer
        labels. The loss is in nats per example, and NaN where a label is no class, such as -1.

    Raises:
        ValueError: `label_smoothing` is out of range.

    Example:
        >>> from jaxpar import models, train
        >>> loss_fn = train.classification_loss(models.lenet.apply)
        >>> batch = {"image": jnp.zeros((2, 28, 28, 1)), "label": jnp.array([3, 5])}
        >>> loss, aux = loss_fn(models.lenet.init(jax.random.key(0)), batch, jax.random.key(1))
        >>> round(float(loss), 3)
        2.303
    """
    wanted = "a number from 0 and below 1"
    smoothing = checks.number(label_smoothing, "classification_loss", "label_smoothing", wanted, lambda x: 0 <= x < 1)
    return ClassificationLoss(apply_fn, smoothing)
