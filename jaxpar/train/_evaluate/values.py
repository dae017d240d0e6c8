"""What an `eval_fn` returns: checked, summed over a batch by a program, and added up on the host.

A value is one number for each example, a pair (sum, weight), a `Mean`, or an object with `merge` and `compute`, as the
metrics of clu and metrax are. Rows that fill up a batch can be left out of a value with one row for each example. A
value without such rows is right only for a batch that was not filled up, so it `needs_exact` batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core import checks
from .metrics import Mean

Values = dict[str, Any]  # a Mean, or an object with merge and compute, for each name


class ValuesError(ValueError):
    """An `eval_fn` returned an array that does not have one value for each example."""


_WANTED = (
    "return the values of the examples, of shape (n,), or a pair (sum, weight), or a metric with merge and compute"
)


def as_values(returned: Any, n: int) -> Values:
    """What an `eval_fn` returned for n examples, with a `Mean` or a metric for each name.

    A metric in place of the dict has the name "". Its `compute` gives the dict.

    Raises:
        TypeError: no dict, a name that is no string, a value that is nothing of the above.
        ValuesError: an array that does not have one value for each example.
    """
    if _is_metric(returned):
        return {"": returned}
    if not isinstance(returned, Mapping):
        raise TypeError(f"eval_fn must return a dict {{name: values}}, got {checks.describe(returned)}")
    for name in returned:
        if not isinstance(name, str) or not name:
            raise TypeError(f"eval_fn: the names that it returns must be strings, got {name!r}")
    return {name: _as_value(value, n, f"eval_fn: {name!r}") for name, value in returned.items()}


def needs_exact(values: Values) -> bool:
    """Whether some value is right only for a batch that was not filled up."""
    return any(not isinstance(value, Mean) or not np.ndim(value.total) for value in values.values())


def sum_up(values: Values, mask: jax.Array) -> Values:
    """The sums over the examples that count, in float32 or wider."""

    def sum_rows(rows: Any, columns: bool) -> jax.Array:
        rows = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
        if not rows.ndim:
            return rows
        valid = mask.reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(valid, rows, 0).sum(axis=0 if columns else None)

    def sum_value(value: Any) -> Any:
        if not isinstance(value, Mean):
            return jax.tree.map(jnp.asarray, value)
        total, weight = (sum_rows(part, value.columns) for part in (value.total, value.weight))
        return Mean(total, weight, value.finish, value.columns)

    return {name: sum_value(value) for name, value in values.items()}


class Totals:
    """The sums over all batches so far, in host memory and float64. Metrics are merged."""

    def __init__(self) -> None:
        self._values: Values = {}

    def add(self, sums: Values) -> None:
        """Add the sums of one batch."""
        sums = {name: jax.tree.map(np.asarray, value) for name, value in sums.items()}
        if not self._values:
            self._values = {name: _wide(value) for name, value in sums.items()}
            return
        self._values = {name: _add(value, sums[name]) for name, value in self._values.items()}

    def scores(self) -> dict[str, Any]:
        """The results: floats, and a NumPy array where there are several."""
        found: dict[str, Any] = {}
        for name, value in self._values.items():
            result = _mean(value) if isinstance(value, Mean) else value.compute()
            add_scores(found, _named(name, result))
        return found


def add_scores(found: dict[str, Any], more: dict[str, Any]) -> None:
    """Add scores to those that were found. `ValueError` for a name that both have."""
    both = found.keys() & more.keys()
    if both:
        raise ValueError(f"eval_fn: two of its values give the score {min(both)!r}; rename one of them")
    found |= more


def _is_metric(value: Any) -> bool:
    return callable(getattr(value, "merge", None)) and callable(getattr(value, "compute", None))


def _as_value(value: Any, n: int, where: str) -> Any:
    if isinstance(value, Mean):
        return _checked(value, n, where)
    if _is_metric(value):
        return value
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise TypeError(f"{where}: expected a pair (sum, weight), got {checks.describe(value)}; {_WANTED}")
        return _checked(Mean(*value), n, where)
    array = _array(value, where)
    if array.shape == (n,):
        return Mean(array, jnp.ones(n, jnp.float32))
    hint = "a mean over the batch cannot be averaged exactly, so leave out its mean" if not array.ndim else ""
    if array.shape[:1] == (n,):
        hint = "take the mean over the other axes, or give the pair (values, ones_like(values))"
    raise ValuesError(f"{where} has shape {array.shape} for {n} examples; {hint + '; ' if hint else ''}{_WANTED}")


def _checked(value: Mean, n: int, where: str) -> Mean:
    """The mean with arrays, of which both have a row for each example, or none has."""
    total, weight = (_array(part, where) for part in (value.total, value.weight))
    rows = total.shape[:1] == weight.shape[:1] == (n,)
    if value.columns and not (rows and total.ndim == 2 and total.shape == weight.shape):
        raise ValuesError(f"{where}: columns need totals and weights (n, k), got {total.shape} and {weight.shape}")
    if not rows and (total.ndim or weight.ndim):
        raise ValuesError(
            f"{where}: the sum has shape {total.shape} and the weight {weight.shape} for {n} examples; return both "
            "with a row for each example, so that filled rows can be left out, or both as scalars"
        )
    return Mean(total, weight, value.finish, value.columns)


def _array(value: Any, where: str) -> Any:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{where}: expected an array, got {checks.describe(value)}; {_WANTED}") from None
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_) or jnp.iscomplexobj(array):
        raise TypeError(f"{where}: expected real numbers, got {checks.describe(array)}")
    return array


def _wide(value: Any) -> Any:
    if not isinstance(value, Mean):
        return value
    return Mean(value.total.astype(np.float64), value.weight.astype(np.float64), value.finish, value.columns)


def _add(value: Any, other: Any) -> Any:
    if not isinstance(value, Mean):
        return value.merge(other)
    return Mean(value.total + other.total, value.weight + other.weight, value.finish, value.columns)


def _mean(value: Mean) -> Any:
    """NaN where nothing counts."""
    with np.errstate(all="ignore"):
        mean = np.divide(value.total, value.weight)
        return mean if value.finish is None else value.finish(mean)


def _named(name: str, result: Any) -> dict[str, Any]:
    """A result, or those of a metric that gives a dict of them."""
    if isinstance(result, Mapping):
        both = {f"{name}_{key}" if name else str(key): part for key, part in result.items()}
        return {key: part for name, inner in both.items() for key, part in _named(name, inner).items()}
    array = np.asarray(result)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"evaluate: {name!r} must be a number or an array of them, got {checks.describe(result)}")
    return {name: float(array) if not array.ndim else array}
