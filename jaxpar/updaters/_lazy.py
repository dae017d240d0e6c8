"""Whether an optimizer of all params may be given some rows of a table alone.

The rows that a step does not look up then keep their value and their part of the optimizer's state. That is right for
an optimizer that treats each row by itself, and whose state waits for the next gradient of the row. It would be wrong
for one that goes through all of its state at some step, as one that sums gradients of several steps does.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arrays import PyTree, Shaped, is_prng_key
from .._devices.user_mesh import outside_mesh
from ._jaxprs import dependence
from ._updaters import TreeOptimizer, UnknownOwners, averages, first_line

if TYPE_CHECKING:
    import optax

_ROWS = 4  # of a table that the optimizer is traced with


def lazy_fault(optimizer: TreeOptimizer, params: PyTree, tables: Sequence[int]) -> str | None:
    """Why an optimizer cannot be given some rows of these leaves of `params`, in words. None: it can.

    Nothing is computed.
    """
    import optax

    # The state of a table are moments of the gradients of its rows.
    moments = (
        optax.TraceState,
        optax.ScaleByAdamState,
        optax.ScaleByAmsgradState,
        optax.ScaleByBeliefState,
        optax.ScaleByLionState,
        optax.ScaleByRmsState,
        optax.ScaleByRssState,
        optax.ScaleByRStdDevState,
    )
    leaves, structure = jax.tree.flatten(params)
    state = jax.eval_shape(optimizer.init, params)
    if averages(state):
        return "it keeps an average of the params, which all rows go into at each step"
    try:
        owners = iter(optimizer.owners(params))
    except UnknownOwners as error:
        return f"which part of its state belongs to which param is unknown: {error}"
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, moments)):
        for leaf, owner in [(leaf, next(owners)) for leaf in jax.tree.leaves(node)]:
            if owner is None and (leaf.ndim or is_prng_key(leaf)):
                return "its state has arrays of no param, as the key of random numbers for all rows"
            if (
                owner is not None
                and owner in tables
                and not (isinstance(node, moments) and leaf.shape == leaves[owner].shape)
            ):
                accepted = ", ".join(t.__name__ for t in moments)
                return f"its state has more of a table than moments of its rows ({accepted})"

    # The elements of all rows but the first are marked. What a step leaves marked in the state marks more in the next.
    specs = structure.unflatten(_small(leaves, tables, _ROWS))
    try:
        state = jax.eval_shape(optimizer.init, specs)
        step = dependence(optimizer.update, specs, state, specs, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:  # any error is the optimizer's own
        return f"it cannot be traced for tables of {_ROWS} rows: {first_line(error)}"
    for i in tables:
        marks = [np.zeros(leaf.shape, bool) for leaf in jax.tree.leaves(specs)]
        marks[i][1:] = True
        marked_rows = structure.unflatten(marks)
        before: PyTree = jax.tree.map(lambda x: np.zeros(x.shape, bool), state)
        while True:
            new, after = step(marked_rows, before, marked_rows, np.False_)
            if any((marks[0] if j == i else marks).any() for j, marks in enumerate(jax.tree.leaves(new))):
                return "what it makes of a row depends on other rows; clip_by_global_norm goes into grad_transform="
            after = jax.tree.map(np.logical_or, before, after)
            if jax.tree.all(jax.tree.map(np.array_equal, before, after)):
                break
            before = after
    return None


def transform_fault(tx: optax.GradientTransformation, params: PyTree, tables: Sequence[int]) -> str | None:
    """Why a transform of gradients cannot be given rows in place of these leaves of `params`. None: it can.

    It is tried on gradients of three sizes: rows of zeros at the end of a table must change nothing, and stay zeros. A
    global norm is of that sort, a mean is not.
    """
    leaves, structure = jax.tree.flatten(params)
    if any(leaf.ndim for leaf in jax.tree.leaves(jax.eval_shape(tx.init, params))):
        return "it keeps a state of the gradients"
    # Sizes from small to large, since a transform may clip: below its limit it changes nothing.
    rng = np.random.default_rng(0)
    numbers = [rng.standard_normal(x.shape).astype(x.dtype) for x in _small(leaves, tables, 2 * _ROWS)]
    with outside_mesh(), jax.ensure_compile_time_eval():
        for size in (1e-3, 1.0, 1e3):
            grads = [np.asarray(size * x, x.dtype) for x in numbers]
            for i in tables:
                grads[i][_ROWS:] = 0

            def of_rows(rows: int, grads: Sequence[np.ndarray] = grads) -> list[np.ndarray]:
                grads_and_params = [
                    structure.unflatten([jnp.asarray(x[:rows] if i in tables else x) for i, x in enumerate(arrays)])
                    for arrays in (grads, numbers)
                ]
                return [
                    np.asarray(x)
                    for x in jax.tree.leaves(
                        tx.update(grads_and_params[0], tx.init(grads_and_params[1]), grads_and_params[1])[0]
                    )
                ]

            try:
                few, more = of_rows(_ROWS), of_rows(2 * _ROWS)
            except Exception as error:  # any error is the transform's own
                return f"it fails for tables of a few rows: {first_line(error)}"
            for i, (a, b) in enumerate(zip(few, more, strict=True)):
                if (i in tables and b[_ROWS:].any()) or not np.allclose(a, b[: len(a)] if a.ndim else b, 1e-5, 0):
                    return "it makes something of rows whose gradient is zero, or of how many rows there are"
    return None


def _small(leaves: Sequence[Shaped], tables: Container[int], rows: int) -> list[jax.ShapeDtypeStruct]:
    """Specs of params of few elements, with so many rows of each table."""

    def small(i: int, leaf: Shaped) -> jax.ShapeDtypeStruct:
        shape = (rows, *leaf.shape[1:]) if i in tables else tuple(min(n, _ROWS) for n in leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return [small(i, leaf) for i, leaf in enumerate(leaves)]
