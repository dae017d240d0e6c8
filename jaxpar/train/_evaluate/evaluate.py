"""Scores of a model over every example: in one call, and for `fit` after its epochs. What is known of classifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..._core import checks
from ..._core.arguments import renamed_arguments
from ..._core.arrays import PyTree
from ..._core.functions import check_takes
from ..._core.transfers import allows_transfers
from ..._devices import mesh, user_mesh
from ...data import _READ_ONCE, Dataset, IterableSource
from .._callbacks.media import Media
from .._step.loss import LossFn, Mean, by_name, call_loss, takes_batch_alone
from .._step.modules import joined
from .._step.state import TrainState
from .every_example import EvalProgram, model_of
from .metrics import ValuesError, as_values, sum_up

EvalFn = Callable[..., Any]
_AHEAD = 8  # batches whose sums are not read yet, so that the devices need not wait for the host


@overload
def evaluate(
    state_or_params: PyTree, apply_fn: Callable[..., jax.Array], data: Dataset, *, batch_size: int = ...
) -> dict[str, float]: ...
@overload
def evaluate(state_or_params: PyTree, *, data: Any, eval_fn: EvalFn, batch_size: int = ...) -> dict[str, Any]: ...
@renamed_arguments(source="data", dataset="data")
@allows_transfers
def evaluate(
    state_or_params: PyTree,
    apply_fn: Callable[..., jax.Array] | None = None,
    data: Any = None,
    *,
    eval_fn: EvalFn | None = None,
    batch_size: int = 256,
) -> dict[str, Any]:
    """Compute scores over all examples, each counted once.

    `evaluate(state, apply_fn, data)` computes cross-entropy and accuracy of a classifier. `evaluate(state, data=...,
    eval_fn=...)` computes any scores of any model, as `fit(eval_data=..., eval_fn=...)` does.

    Args:
        state_or_params: a `TrainState`, whose `eval_params` are used, or the parameters. Batches are sent to their
            devices. With several processes, each process gets the same scores.
        apply_fn: `apply_fn(params, images) -> logits` of shape (n, classes), with images as `data.batches` gives them.
            With a `model_state`, `apply_fn(params, images, model_state)`.
        data: with `apply_fn` a `data.Dataset` with integer labels. With `eval_fn` a `data.Dataset`; a pytree of arrays
            that share a first axis; a DataFrame; the result of `data.from_arrays` or `data.from_iterable`; or batches
            of any lengths: a list, a loader, an iterator, or a function that returns one of these. A list of arrays is
            a pytree, a list of dicts of numbers is a list of examples, and any other list is a list of batches.
        eval_fn: `eval_fn(params, batch) -> {name: values}`, see "Values" below. With a `model_state`,
            `eval_fn(params, batch, model_state)`. Each call traces it, and compiles it if it computes something else
            than before: what it reads by name may have changed. The last few programs are kept. It gets whole batches,
            and the last one at its own size.
            A `jax.lax.psum` over an axis of the step's mesh, such as "data", returns its argument.
        batch_size: examples per batch, rounded up to a multiple of the number of devices. It changes the result only by
            float32 rounding. Batches of a source keep their size.

    Values:
        An array (n,) has one value for each example, and the score is the mean over all examples. For a pair (sum,
        weight), both with one row for each example or both scalars, it is the sum of the sums divided by the sum of the
        weights. A `Mean` is a pair with a final function, or with columns. `train.accuracy` and the other metrics of
        `jp.train` return such values. An object with `merge(other)` and `compute()`, such as a metric of metrax or clu,
        is merged over the batches. `eval_fn` may also return such an object in place of the dict. A dict in the dict
        has scores "name/inner". A `train.Image` or a `train.Text` is shown by the loggers of `fit`.

    Returns:
        {name: float}, or a NumPy array for values with columns. For classifiers `{"loss", "accuracy"}`: the mean
        cross-entropy in nats per example, and the fraction of correct examples. A score without any weight is NaN.

    Raises:
        ValueError: there are no examples; a label is not a class of the model; a value has neither one row for each
            example nor is a pair.
        TypeError: `data` has another type; a function takes other arguments; labels are not integers. Shapes
            are checked before any computation, those of a source by its first batch.

    Example:
        >>> import numpy as np
        >>> from jaxpar import data, models, train
        >>> images = data.Dataset(np.zeros((10, 28, 28, 1), np.uint8), np.arange(10))
        >>> params = models.lenet.init(jax.random.key(0))
        >>> round(train.evaluate(params, models.lenet.apply, images, batch_size=4)["accuracy"], 3)
        0.1
        >>> def eval_fn(params, batch):
        ...     return {"error": abs(params * batch["x"] - batch["y"])}
        >>> train.evaluate(2.0, data={"x": np.arange(5.0), "y": np.arange(5.0)}, eval_fn=eval_fn, batch_size=2)
        {'error': 2.0}
    """
    if (eval_fn is None) == (apply_fn is None) or (data is None and apply_fn is None):
        raise TypeError("evaluate: give (state, apply_fn, data) for a classifier, or data= and eval_fn= for others")
    if eval_fn is not None:
        return measure("evaluate", state_or_params, eval_fn, data, batch_size)
    check_classified(data, "evaluate", "; for other models write evaluate(state, data=..., eval_fn=...)")
    check_classes("evaluate", apply_fn, model_of(state_or_params), data)
    return measure("evaluate", state_or_params, Classification(apply_fn), data, batch_size)


class Evaluation:
    """The functions and data that scores come from, as given to `fit`. The errors are those of `fit`."""

    def __init__(
        self,
        *,
        test_data: Dataset | None,
        apply_fn: Callable[..., Any] | None,
        eval_data: object,
        eval_fn: EvalFn | None,
        loss_fn: LossFn | None,
        batch_size: int,
    ):
        # Who gives `eval_data` alone expects the loss of the training, and what is returned beside it.
        hint = ""
        if eval_data is not None and eval_fn is None and loss_fn is not None:
            if takes_batch_alone(loss_fn):
                eval_fn = LossScores(loss_fn)
            else:
                hint = "; eval_data alone is for a loss_fn(params, batch), and this one takes more, which may be noise"
        for names, source, fn in (
            ("test_data and apply_fn", test_data, apply_fn),
            ("eval_data and eval_fn", eval_data, eval_fn),
        ):
            if (source is None) != (fn is None):
                raise ValueError(
                    f"fit: evaluation takes both {names}, got only one of them; a classifier is evaluated with "
                    f"test_data and apply_fn{hint}"
                )
        self.parts: dict[str, tuple[Any, Any]] = {}  # `eval_fn` and data, by the beginning of the names of its scores
        self._batch_size = batch_size
        if test_data is not None:
            check_classified(test_data, "fit: test_data", "; for other models give eval_data and eval_fn")
            self.parts["test_"] = Classification(apply_fn), test_data
        if eval_data is not None:
            # A second evaluation of an iterator would find nothing.
            batches = eval_data.source if isinstance(eval_data, IterableSource) else eval_data
            if hasattr(batches, "__next__") and getattr(eval_data, "steps_per_epoch", None) is None:
                kind = type(batches).__name__
                raise TypeError(f"fit: eval_data is read after each epoch, got a {kind}; {_READ_ONCE}")
            self.parts["eval_"] = eval_fn, eval_data

    def check(self, state: TrainState) -> list[str]:
        """Raise what `scores` would raise, as far as shapes are known. Return the names of the scores, if known."""
        names: list[str] = []
        for prefix, (eval_fn, data) in self.parts.items():
            if isinstance(eval_fn, Classification):
                check_classes("fit: test_data", eval_fn.apply_fn, model_of(state), data)
            with user_mesh.outside_mesh() as user:
                program = _program_of("fit", state, eval_fn, data, self._batch_size, user)
                if (shapes := program.shapes()) is not None:
                    names += [prefix + name for name in program.trace(shapes).names]
        return names

    def scores(self, state: TrainState) -> tuple[dict[str, float], dict[str, Media]]:
        """The scores as a record names them, and what loggers show. Empty where there is nothing to evaluate."""
        scores: dict[str, float] = {}
        media: dict[str, Media] = {}
        for prefix, (eval_fn, data) in self.parts.items():
            for name, value in measure("fit", state, eval_fn, data, self._batch_size).items():
                # A record has numbers only, so that it is a line of JSON and a row of a table: one for each column.
                if isinstance(value, Media):
                    media[f"{prefix}{name}"] = value
                    continue
                if not np.ndim(value):
                    _add_score(scores, f"{prefix}{name}", value)
                    continue
                for i, column in enumerate(np.ravel(value)):
                    _add_score(scores, f"{prefix}{name}/{i}", column)
        return scores, media


# One pass of an `eval_fn` over every example: the compiled program of a batch, and the sums on the host.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Sums:
    """What an `eval_fn` gives over the examples of a batch, in its order."""

    values: list[Any]
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def measure(caller: str, state_or_params: PyTree, eval_fn: EvalFn, source: Any, batch_size: int) -> dict[str, Any]:
    """What `eval_fn` gives over every example: floats by name, and NumPy arrays for values with columns."""
    with user_mesh.outside_mesh() as user:
        program = _program_of(caller, state_or_params, eval_fn, source, batch_size, user)

        # The sums over all batches, in host memory and float64: in float32 a million examples lose their last digits.
        # Metrics are merged.
        totals: dict[str, Any] = {}
        for sums in program.run(ahead=0 if mesh.can_hang(program.devices) else _AHEAD):
            for name, value in zip(sums.names, sums.values, strict=True):
                value = jax.tree.map(np.asarray, value)
                if isinstance(value, Mean):
                    before = totals.get(name, Mean(0, 0))
                    total, weight = value.total.astype(np.float64), value.weight.astype(np.float64)
                    totals[name] = Mean(before.total + total, before.weight + weight, value.finish)
                else:
                    totals[name] = totals[name].merge(value) if name in totals else value

        # The scores: what a metric computes, or the mean, which is NaN where nothing counts.
        scores: dict[str, Any] = {}
        for name, total in totals.items():
            if isinstance(total, Mean):
                with np.errstate(all="ignore"):
                    mean = np.divide(total.total, total.weight)
                    _add_score(scores, name, mean if total.finish is None else total.finish(mean))
            else:
                _add_score(scores, name, total.compute())
        return scores


def _program_of(
    caller: str, state_or_params: PyTree, eval_fn: EvalFn, source: Any, batch_size: int, user: Mesh | None
) -> EvalProgram:
    """The program of an `eval_fn`, which takes what it is given."""
    is_classifier = isinstance(eval_fn, Classification)  # which is known to give a value for each example
    check = None if is_classifier else _check_twice
    program = EvalProgram(caller, state_or_params, source, batch_size, user, of=_sums, fn=eval_fn, check=check)
    has_state = len(program.model) == 2
    hint = ", since the state has a model_state" if has_state else ""
    if is_classifier:
        apply_fn = checks.function(eval_fn.apply_fn, f"{caller}: apply_fn")
        check_takes(apply_fn, ("params", "images", "model_state")[: 2 + has_state], f"{caller}: apply_fn", hint)
    else:
        check_takes(eval_fn, ("params", "batch", "model_state")[: 2 + has_state], f"{caller}: eval_fn", hint)
    return program


def _sums(call: Callable[[PyTree], Any], batch: PyTree) -> _Sums:
    values = as_values(call(batch), jax.tree.leaves(batch)[0].shape[0])
    return _Sums([sum_up(value) for value in values.values()], tuple(values))


def _check_twice(program: EvalProgram, batch: PyTree) -> None:
    """`ValuesError` for a value whose first axis is only by chance as long as the batch: twice as many show it."""
    twice = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype), batch)
    try:
        program.jit().eval_shape(program.leaves, twice, None)
    except ValuesError:
        raise
    except Exception:  # a function for batches of one size
        return


def _add_score(scores: dict[str, Any], name: str, result: Any) -> None:
    """Add a result, or those of a metric that gives a dict of them. `ValueError` for a name that is there already."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            _add_score(scores, f"{name}_{key}" if name else str(key), value)
        return
    if isinstance(result, Media):
        if name in scores:
            raise ValueError(f"eval_fn: two of its values are called {name!r}; rename one of them")
        scores[name] = result
        return
    array = np.asarray(result)
    if name in scores:
        raise ValueError(f"eval_fn: two of its values give the score {name!r}; rename one of them")
    scores[name] = float(array) if not array.ndim else array


@dataclasses.dataclass(frozen=True)
class LossScores:
    """`eval_fn(params, batch)` of a `loss_fn(params, batch)`: its loss, and the values that it returns beside it."""

    loss_fn: Any

    def __call__(self, params: PyTree, batch: PyTree) -> dict[str, Mean]:
        metrics, _ = call_loss(self.loss_fn, params, batch, jax.random.key(0), (), jnp.int32(0))
        n = jax.tree.leaves(batch)[0].shape[0]
        scores: dict[str, Mean] = {}
        for name, value in by_name(metrics).items():
            if np.ndim(value) and not isinstance(value, Mean):
                raise ValueError(
                    f"fit: {name!r} in aux of loss_fn has shape {np.shape(value)}; without eval_fn= it must be a "
                    "scalar, the mean over the examples, or a pair (sum, weight)"
                )
            # A mean over the examples of a batch counts as often as there are examples: the last batch may have fewer.
            scores[name] = value if isinstance(value, Mean) else Mean(value * n, n)
        return scores


# Classifiers: the `eval_fn` of an `apply_fn` that gives logits, and whether labels are classes of the model.


@dataclasses.dataclass(frozen=True)
class Classification:
    """`eval_fn(params, batch) -> {"loss", "accuracy"}` of an `apply_fn`."""

    apply_fn: Any  # a function, checked by `_program_of`

    def __call__(self, params: PyTree, batch: Mapping[str, jax.Array], *model_state: Any) -> dict[str, jax.Array]:
        logits = check_logits(self.apply_fn(params, batch["image"], *model_state), len(batch["image"]))
        logits = logits.astype(jnp.float32)
        labels = batch["label"][:, None]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=1)[:, 0]
        return {"loss": losses, "accuracy": logits.argmax(axis=1) == labels[:, 0]}


def check_logits(logits: Any, n: int) -> Any:
    """The logits. `ValueError` unless there is a row of them, of two classes or more, for each of n examples."""
    if not hasattr(logits, "shape") or len(logits.shape) != 2 or logits.shape[0] != n or logits.shape[1] == 1:
        hint = ""
        if getattr(logits, "shape", ()) in ((n,), (n, 1)):
            hint = "; of one logit an example give eval_data= and eval_fn="
        raise ValueError(
            f"apply_fn: a classifier needs logits of shape (n, classes), got {checks.describe(logits)} for {n} "
            f"images{hint}"
        )
    return logits


def check_classified(dataset: object, caller: str, hint: str = "") -> None:
    """`TypeError` unless this is a data set with one integer label per example. The hint is for other data."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{caller}: expected a data.Dataset, as data.collect(loader) gives; got {checks.describe(dataset)}{hint}"
        )
    checks.labels(dataset.labels, caller)


def check_classes(caller: str, apply_fn: Any, model: tuple[PyTree, ...], dataset: Any) -> None:
    """`ValueError` unless integer labels are classes of the model (params, *model_state). Nothing is computed."""
    # JAX takes an index out of range as another one, or gives NaN, and no error.
    if not dataset.labels.size or dataset.labels.dtype.kind not in "iu":
        return
    params, *model_state = model
    image = jax.ShapeDtypeStruct((1, *dataset.images.shape[1:]), jnp.float32)
    with user_mesh.outside_mesh():
        try:
            *rows, count = jax.eval_shape(lambda *args: apply_fn(*joined(*args)), params, image, *model_state).shape
        except Exception:  # what is wrong is said where `apply_fn` is called
            return
    low, high = int(np.min(dataset.labels)), int(np.max(dataset.labels))
    if rows == [1, *dataset.labels.shape[1:]] and (low < 0 or high >= count):
        raise ValueError(
            f"{caller}: the model has {count} classes, but labels from {low} to {high}; give labels 0 to {count - 1}"
        )
