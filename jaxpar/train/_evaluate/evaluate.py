"""Scores of a model over every example of a source, on the devices that hold its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import jax

from ... import data
from ..._core.calls import answers
from .classification import check_classified, classification
from .every_example import has_model_state, model_of
from .labels import check_classes
from .measure import measure

EvalFn = Callable[..., Any]


@overload
def evaluate(
    state_or_params: Any, apply_fn: Callable[..., jax.Array], dataset: data.Dataset, *, batch_size: int = ...
) -> dict[str, float]: ...


@overload
def evaluate(state_or_params: Any, *, source: Any, eval_fn: EvalFn, batch_size: int = ...) -> dict[str, Any]: ...


@answers("evaluate")
def evaluate(
    state_or_params: Any,
    apply_fn: Callable[..., jax.Array] | None = None,
    dataset: data.Dataset | None = None,
    *,
    source: Any = None,
    eval_fn: EvalFn | None = None,
    batch_size: int = 256,
) -> dict[str, Any]:
    """Scores over every example, each counted once.

    `evaluate(state, apply_fn, dataset)` is for classifiers: cross-entropy and accuracy. `evaluate(state, source=...,
    eval_fn=...)` is for any model and any values. It is what `fit(eval_data=..., eval_fn=...)` does.

    Args:
        state_or_params: a `TrainState`, whose `eval_params` are taken, or the parameters. The batches go to their
            devices. With several processes every one gets the same scores.
        apply_fn: `apply_fn(params, images) -> logits` of shape (n, classes), with images as `data.batches` gives them.
            With a `model_state`, `apply_fn(params, images, model_state)`.
        dataset: a `data.Dataset` with integer labels.
        source: a `data.Dataset`; a pytree of arrays with a common first axis of n examples; the result of
            `data.from_arrays` or `data.from_iterable`; or batches: a list, a loader, an iterator, or a function that
            returns one. Batches may be of any lengths. A list of arrays is a pytree, any other list is one of batches.
        eval_fn: `eval_fn(params, batch) -> {name: values}`. With a `model_state`,
            `eval_fn(params, batch, model_state)`. It is compiled: the same function object once for each shape of a
            batch. The programs of the last few are kept. See "Values" below.
        batch_size: how many examples at a time, rounded up to a multiple of the number of devices. It changes the
            result by float32 rounding only. Batches that a source gives stay as they are.

    Values:
        An array (n,) has one value for each example, and the score is the mean over all examples. A pair (sum, weight)
        is for all else, such as tokens that a mask leaves out: the score is the sum of the sums divided by the sum of
        the weights. Both have a row for each example, or both are scalars. A `Mean` is a pair with a last function, or
        with columns. `train.accuracy`, `cross_entropy`, `top_k`, `perplexity`, `mean_squared_error` and
        `per_class_accuracy` return one of these. An object with `merge(other)` and `compute()`, as the metrics of
        metrax and clu have, is merged over the batches. It may also stand in place of the dict.

        The last batch is filled up to the size of the others, and the rows that fill it are left out. So a value of an
        example must not depend on the other examples of a batch. With scalars or merged metrics no row can be left out.
        Then the last examples are evaluated as they are.

    Returns:
        Floats by name, and NumPy arrays for values with columns. For classifiers `{"loss", "accuracy"}`: mean
        cross-entropy in nats per example, and the fraction classified correctly. NaN where nothing counts.

    Raises:
        ValueError: a batch size below 1, no examples, labels that are no classes of the model, values that are no
            values per example and no pairs.
        TypeError: another data set or source, a function without a hash or of other arguments, labels that are no
            integers. All that shapes tell is checked before anything is computed. The shapes of batches that a source
            gives are known when it gives the first one.

    Example:
        >>> import numpy as np
        >>> from jaxpar import data, models, train
        >>> images = data.Dataset(np.zeros((10, 28, 28, 1), np.uint8), np.arange(10))
        >>> params = models.lenet.init(jax.random.key(0))
        >>> round(train.evaluate(params, models.lenet.apply, images, batch_size=4)["accuracy"], 3)
        0.1
        >>> def eval_fn(params, batch):
        ...     return {"error": abs(params * batch["x"] - batch["y"])}
        >>> train.evaluate(2.0, source={"x": np.arange(5.0), "y": np.arange(5.0)}, eval_fn=eval_fn, batch_size=2)
        {'error': 2.0}
    """
    if eval_fn is not None or source is not None:
        if eval_fn is None or source is None or apply_fn is not None or dataset is not None:
            raise TypeError(
                "evaluate: give (state, apply_fn, dataset) for a classifier, or source= and eval_fn= for anything else"
            )
        return measure("evaluate", state_or_params, eval_fn, source, batch_size)
    if not isinstance(dataset, data.Dataset) and dataset is not None:
        return _refuse(dataset)
    check_classified(dataset, "evaluate")
    of_classes = classification(apply_fn, has_model_state(state_or_params), "evaluate")
    check_classes("evaluate", apply_fn, model_of(state_or_params), dataset)
    return measure("evaluate", state_or_params, of_classes, dataset, batch_size)


def _refuse(dataset: Any) -> Any:
    try:
        check_classified(dataset, "evaluate")
    except TypeError as error:
        raise TypeError(f"{error}; for all else evaluate(state, source=..., eval_fn=...)") from None
