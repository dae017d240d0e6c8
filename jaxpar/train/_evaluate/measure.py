"""One pass of an `eval_fn` over every example: the compiled program, what it returns, the sums on the host.

A value is one number for each example, a pair (sum, weight), a `Mean`, or an object with `merge` and `compute`, as the
metrics of clu and metrax are. Rows that fill up a batch can be left out of a value with one row for each example. A
value without such rows is right only for a batch that was not filled up, so it needs exact batches.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from ..._core import checks
from ..._core.calls import check_takes
from ..._core.recent import Recent
from ..._devices import processes
from ..._devices.emulated import can_hang, wait_before_collectives
from ..._devices.user_mesh import check_traced, outside_mesh
from .._step.loss import Mean, wide
from .every_example import Pass, model_of, pass_over, with_axes

_AHEAD = 8  # batches whose sums are not read yet, so that the host need not wait

Values = dict[str, Any]  # a Mean, or an object with merge and compute, for each name


def measure(where: str, state_or_params: Any, eval_fn: Any, source: Any, batch_size: int) -> dict[str, Any]:
    """What `eval_fn` gives over every example: floats by name, and NumPy arrays for values with columns."""
    with outside_mesh() as user:
        if user is None:
            check_traced(state_or_params, where)
        model = model_of(state_or_params)
        program, examples = _prepare(where, model, eval_fn, source, batch_size, user)
        leaves, devices = jax.tree.leaves(model), examples.devices or ()
        totals: Values = {}
        unread: collections.deque[Any] = collections.deque()
        ahead = 0 if can_hang(devices) else _AHEAD
        for batch, mask, _ in examples.batches(lambda shapes: program.kind(leaves, shapes)[1]):
            wait_before_collectives((leaves, batch, mask), devices)
            unread.append(program(leaves, batch, mask))
            while len(unread) > ahead:
                _add(totals, unread.popleft())
        for sums in unread:
            _add(totals, sums)
        scores: dict[str, Any] = {}
        for name, value in totals.items():
            add_scores(scores, _named(name, value.compute()))
        return scores


def check(where: str, state_or_params: Any, eval_fn: Any, source: Any, batch_size: int) -> list[str]:
    """Raise what `measure` would raise, as far as shapes are known. Nothing is computed.

    The result is the names of the values, none where the shapes are not known.
    """
    with outside_mesh() as user:
        model = model_of(state_or_params)
        program, examples = _prepare(where, model, eval_fn, source, batch_size, user)
        shapes = examples.shapes()
        return [] if shapes is None else program.kind(jax.tree.leaves(model), shapes)[0]


def _prepare(where: str, model: Any, eval_fn: Any, source: Any, batch_size: int, user: Any) -> tuple[_Program, Pass]:
    checks.hashable(eval_fn, f"{where}: eval_fn")
    names = ("params", "batch", "model_state")[: len(model) + 1]
    check_takes(eval_fn, names, f"{where}: eval_fn", "" if len(names) == 2 else ", since the state has a model_state")
    examples = pass_over(where, model, source, batch_size, user)
    return _programs(eval_fn, _key(model), examples.copies, examples.axes), examples


class _Program:
    """The sums of an `eval_fn` over a batch, compiled for each shape of a batch. `copies`: the sharding of the sums."""

    def __init__(self, eval_fn: Any, model_key: Any, copies: NamedSharding | None, axes: tuple[str, ...]):
        self._kinds: dict[Any, tuple[list[str], bool]] = {}  # by the shapes of a batch, filled when traced
        self._copies = copies
        self._values = functools.partial(_values, with_axes(eval_fn, axes), model_key[0])
        self._run = jax.jit(functools.partial(_sums, self._values, copies, self._kinds))
        self._is_by_example = getattr(eval_fn, "is_by_example", False)  # known to return a row for each example
        self._checked: set[Any] = set()

    def __call__(self, leaves: list[Any], batch: Any, mask: Any) -> Any:
        """The sums over the examples of a batch that count."""
        sums = self._run(leaves, batch, mask)
        return dict(zip(self._kinds[_key(batch)][0], sums, strict=True))

    def kind(self, leaves: list[Any], batch: Any) -> tuple[list[str], bool]:
        """The names of the values for batches of these shapes, and whether such batches must not be filled up.

        It raises what is wrong with the values for them.
        """
        key = _key(batch)
        if key not in self._checked:
            self._check(leaves, batch)
            self._checked.add(key)
        return self._kinds[key]

    def _check(self, leaves: list[Any], batch: Any) -> None:
        shapes = batch, jax.ShapeDtypeStruct((_rows(batch),), bool)
        if self._copies is not None:  # as batches have it, so that the trace is that of the first call
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._copies), shapes)
        try:
            self._run.eval_shape(leaves, *shapes)
        except Exception as error:
            error.add_note(f"eval_fn or apply_fn was traced for a batch {_describe(batch)}")
            raise
        if self._is_by_example:
            return
        # A value whose first axis is only by chance as long as the batch is found with twice as many examples.
        twice = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype), batch)
        try:
            jax.eval_shape(lambda batch: sum_up(self._values(leaves, batch), jnp.ones(_rows(batch), bool)), twice)
        except ValuesError:
            raise
        except Exception:  # a function for batches of one size
            return


def _values(eval_fn: Any, structure: Any, leaves: list[Any], batch: Any) -> Any:
    params, *model_state = structure.unflatten(leaves)
    return as_values(eval_fn(params, batch, *model_state), _rows(batch))


def _sums(values_of: Any, copies: Any, found: dict[Any, Any], leaves: list[Any], batch: Any, mask: jax.Array) -> Any:
    values = values_of(leaves, batch)
    # A value without rows is right only for a batch that was not filled up.
    is_exact = any(not isinstance(value, Mean) or not np.ndim(value.total) for value in values.values())
    found[_key(batch)] = list(values), is_exact
    sums = list(sum_up(values, mask).values())  # a dict would come back in the order of its names
    return sums if copies is None else lax.with_sharding_constraint(sums, copies)


def _rows(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _key(tree: Any) -> Any:
    """The structure, the shapes and the dtypes of a pytree."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves)


def _describe(batch: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return ", ".join(
        f"{jax.tree_util.keystr(path, simple=True, separator='/')} {checks.describe(x)}" for path, x in leaves
    )


_programs = Recent(_Program)


# What an `eval_fn` returns.


class ValuesError(ValueError):
    """An `eval_fn` returned an array that does not have one value for each example."""


_WANTED = (
    "return the values of the examples, of shape (n,), or a pair (sum, weight), or a metric with merge and compute"
)


def as_values(returned: Any, n: int) -> Values:
    """What an `eval_fn` returned for n examples, with a `Mean` or a metric for each name."""
    # A metric in place of the dict has the name "". Its `compute` gives the dict.
    if _is_metric(returned):
        return {"": returned}
    if not isinstance(returned, Mapping):
        raise TypeError(f"eval_fn must return a dict {{name: values}}, got {checks.describe(returned)}")
    for name in returned:
        if not isinstance(name, str) or not name:
            raise TypeError(f"eval_fn: the names that it returns must be strings, got {name!r}")
    return {name: _as_value(value, n, f"eval_fn: {name!r}") for name, value in returned.items()}


def sum_up(values: Values, mask: jax.Array) -> Values:
    """The sums over the examples that count, in float32 or wider."""

    def sum_rows(rows: Any, columns: bool) -> jax.Array:
        rows = rows.astype(wide(rows))
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


@dataclasses.dataclass
class _Sums:
    """The sums of a `Mean` in float64, as a metric."""

    total: np.ndarray
    weight: np.ndarray
    finish: Callable[[Any], Any] | None

    def merge(self, other: _Sums) -> _Sums:
        return _Sums(self.total + other.total, self.weight + other.weight, self.finish)

    def compute(self) -> Any:
        """The mean. NaN where nothing counts."""
        with np.errstate(all="ignore"):
            mean = np.divide(self.total, self.weight)
            return mean if self.finish is None else self.finish(mean)


def _add(totals: Values, sums: Values) -> None:
    """Add the sums of one batch to those of all batches before it, in host memory. Metrics are merged."""
    for name, value in sums.items():
        value = jax.tree.map(np.asarray, value)
        if isinstance(value, Mean):
            value = _Sums(value.total.astype(np.float64), value.weight.astype(np.float64), value.finish)
        totals[name] = totals[name].merge(value) if name in totals else value
    processes.note_progress()


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
    hint = "a mean over the batch cannot be averaged exactly; leave out the mean" if not array.ndim else ""
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
            "with a row for each example, so that padding can be left out, or both as scalars"
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


def _named(name: str, result: Any) -> dict[str, Any]:
    """A result, or those of a metric that gives a dict of them."""
    if isinstance(result, Mapping):
        both = {f"{name}_{key}" if name else str(key): part for key, part in result.items()}
        return {key: part for name, inner in both.items() for key, part in _named(name, inner).items()}
    array = np.asarray(result)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"evaluate: {name!r} must be a number or an array of them, got {checks.describe(result)}")
    return {name: float(array) if not array.ndim else array}
