"""Means over the shares of a batch: of a loss, of what counts with a weight, of the floats in a model state.

Every share gives terms, the terms are added over the shares in whatever way an engine does it, and the mean is made of
the sums. So the same few functions serve every engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core import checks
from ..._core.calls import answers_class


@answers_class("train.Mean")
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over what counts: `finish(sum of totals / sum of weights)` over all examples.

    Attributes:
        total: one row for each example, `(n, ...)`. Or a scalar, the sum over the batch.
        weight: the same, of what counts: tokens, examples of a class.
        finish: the last function of the mean, such as `numpy.exp`. None: the mean itself.
        columns: whether each column of `(n, k)` has a mean of its own. Otherwise all are summed.

    Example:
        >>> import numpy as np
        >>> from jaxpar import train
        >>> def eval_fn(params, batch):
        ...     error = (params * batch["x"] - batch["y"]) ** 2
        ...     return {"rmse": train.Mean(error, jnp.ones_like(error), finish=np.sqrt)}
        >>> line = {"x": np.arange(3.0), "y": np.arange(3.0) + 2}
        >>> train.evaluate(1.0, source=line, eval_fn=eval_fn)
        {'rmse': 2.0}
    """

    total: Any
    weight: Any
    finish: Callable[[Any], Any] | None = dataclasses.field(default=None, metadata={"static": True})
    columns: bool = dataclasses.field(default=False, metadata={"static": True})


def wide(x: Any) -> Any:
    """The dtype for sums of such values: float32 or wider."""
    dtype = jnp.result_type(x)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def widen(tree: Any) -> Any:
    """Every leaf in float32 or wider."""
    return jax.tree.map(lambda x: jnp.asarray(x).astype(wide(x)), tree)


def is_pair(value: Any) -> bool:
    """Whether a value of a loss function is (sum, weight): a tuple of two, or a `Mean`."""
    return isinstance(value, Mean) or (type(value) is tuple and len(value) == 2)


def share_of(pair: Any, where: str) -> Mean:
    """What a share adds to a mean over what counts: two scalars in float32 or wider.

    Raises:
        TypeError: no numbers, or a `Mean` that has more to it than a sum and a weight.
        ValueError: neither two scalars nor two arrays with a row for each example.
    """
    pair = pair if isinstance(pair, Mean) else Mean(*pair)
    if pair.finish is not None or pair.columns:
        raise TypeError(f"{where}: a Mean with finish= or columns= is for eval_fn; in a step give (sum, weight)")
    for name, part in (("sum", pair.total), ("weight", pair.weight)):
        if not is_number(part):
            raise TypeError(f"{where}: the {name} of (sum, weight) must be an array, got {checks.describe(part)}")
    shapes = jnp.shape(pair.total), jnp.shape(pair.weight)
    if shapes[0][:1] != shapes[1][:1]:
        raise ValueError(
            f"{where}: the sum has shape {shapes[0]} and the weight {shapes[1]}; give two scalars, or two arrays with "
            "a row for each example"
        )
    return Mean(*(x.sum() for x in widen((pair.total, pair.weight))))


def is_number(value: Any) -> bool:
    return hasattr(value, "dtype") or isinstance(value, (bool, int, float, complex))


def over_microbatches(metrics: Any, count: int) -> Any:
    """What a share gives out of what its microbatches give, which has them as first axis."""
    summed = jax.tree.map(lambda x: x.sum(0), widen(metrics))
    return jax.tree.map(lambda x: x if isinstance(x, Mean) else x / count, summed, is_leaf=_is_mean)


def finish(sums: Any, count: int) -> Any:
    """The means out of the sums over `count` shares. A sum over no weight at all gives NaN."""
    return jax.tree.map(lambda x: x.total / x.weight if isinstance(x, Mean) else x / count, sums, is_leaf=_is_mean)


def _is_mean(x: Any) -> bool:
    return isinstance(x, Mean)


# The mean of a model state must leave alone what all shares have alike. A sum of equal float32 is rounded, and only one
# of 1, 2 or 4 of them is exact in any order. The two halves of their digits add up exactly, for up to 4096 shares.


def state_terms(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """What is added up for the mean of a floating leaf of a model state over `count` shares."""
    value = x.astype(wide(x))
    is_exact = count in (1, 2, 4) or x.dtype != value.dtype or jnp.iscomplexobj(x)
    if is_exact:
        return (value,)
    digits = jnp.finfo(value.dtype)
    high = lax.reduce_precision(value, digits.nexp, digits.nmant // 2)
    high = jnp.where(jnp.isfinite(high), high, value)
    return high, jnp.where(jnp.isfinite(high), value - high, 0)


def state_mean(sums: tuple[jax.Array, ...], count: int, dtype: Any) -> jax.Array:
    """The mean of a floating leaf out of the sums of its terms."""
    divisor: Any = count
    if len(sums) == 2:  # XLA multiplies by the reciprocal of a constant, which is rounded
        divisor = lax.optimization_barrier(jnp.asarray(count, sums[0].dtype))
    mean, *rest = (s / divisor for s in sums)
    return (mean + rest[0] if rest else mean).astype(dtype)
