"""One pass of an `eval_fn` over every example: the compiled program, what is known before it runs, the results."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from ..._core import checks
from ..._core.arguments import check_takes
from ..._core.recent import Recent
from ..._devices import processes
from ..._devices.emulated import can_hang, wait_before_collectives
from ..._devices.user_mesh import check_traced, outside_mesh
from .classification import Classification
from .every_example import Arrays, arrays_pass, as_eval_source, model_of, places_of
from .streams import Stream
from .values import Totals, ValuesError, as_values, needs_exact, sum_up

_AHEAD = 8  # batches whose sums are not read yet, so that the host need not wait


def measure(where: str, state_or_params: Any, eval_fn: Any, source: Any, batch_size: int) -> dict[str, Any]:
    """What `eval_fn` gives over every example of the source.

    Args:
        where: the function that asks, for messages.

    Returns:
        Floats by name, and NumPy arrays where a value has columns.
    """
    with outside_mesh() as user:
        if user is None:
            check_traced(state_or_params, where)
        model = model_of(state_or_params)
        program, examples = _prepare(where, model, eval_fn, source, batch_size, user)
        leaves, totals = jax.tree.leaves(model), Totals()
        unread: collections.deque[Any] = collections.deque()
        devices = examples.places.devices or ()
        ahead = 0 if can_hang(devices) else _AHEAD
        for piece in examples.pieces(program.checker(leaves)):
            wait_before_collectives((leaves, piece.batch, piece.mask), devices)
            unread.append(program(leaves, piece.batch, piece.mask))
            while len(unread) > ahead:
                totals.add(unread.popleft())
                processes.note_progress()
        for sums in unread:
            totals.add(sums)
            processes.note_progress()
        return totals.scores()


def check(where: str, state_or_params: Any, eval_fn: Any, source: Any, batch_size: int) -> list[str]:
    """Raise what `measure` would raise, as far as shapes are known. Nothing is computed.

    Returns:
        The names of the values. Empty where the shapes are not known.
    """
    with outside_mesh() as user:
        model = model_of(state_or_params)
        program, examples = _prepare(where, model, eval_fn, source, batch_size, user)
        shapes = examples.shapes()
        if shapes is None:
            return []
        program.checker(jax.tree.leaves(model))(shapes)
        return program.names(shapes)


def _prepare(where: str, model: Any, eval_fn: Any, source: Any, batch_size: int, user: Any) -> tuple[_Program, Any]:
    checks.hashable(eval_fn, f"{where}: eval_fn")
    names = ("params", "batch", "model_state")[: len(model) + 1]
    check_takes(eval_fn, names, f"{where}: eval_fn", "" if len(names) == 2 else ", since the state has a model_state")
    batch_size = checks.whole_number(batch_size, where, "batch_size")
    examples = examples_of(where, model, source, batch_size, user)
    return _programs(eval_fn, jax.tree.structure(model), examples.places.copies), examples


def examples_of(where: str, model: Any, source: Any, batch_size: int, user: Any) -> Arrays | Stream:
    """A pass over a source, on the devices of the model's parameters."""
    source, places = as_eval_source(where, source), places_of(model[0])
    if hasattr(source, "every_batch"):
        return Stream(where, source, batch_size, places, user)
    return arrays_pass(where, source, batch_size, places)


class _Program:
    """The sums of an `eval_fn` over a batch, compiled for each shape of a batch.

    Args:
        structure: of the model.
        copies: the sharding of the sums. None: one device.
    """

    def __init__(self, eval_fn: Any, structure: Any, copies: NamedSharding | None):
        self._kinds: dict[Any, tuple[list[str], bool]] = {}  # by the shapes of a batch, filled when traced
        self._copies = copies
        self._values = functools.partial(_values, eval_fn, structure)
        self._run = jax.jit(functools.partial(_sums, self._values, copies, self._kinds))
        self._is_by_example = isinstance(eval_fn, Classification)  # known to return a row for each example
        self._checked: set[Any] = set()

    def __call__(self, leaves: list[Any], batch: Any, mask: Any) -> Any:
        """The sums over the examples of a batch that count."""
        sums = self._run(leaves, batch, mask)
        return dict(zip(self._kinds[_key(batch)][0], sums, strict=True))

    def names(self, batch: Any) -> list[str]:
        """The names of the values, after a check for batches of these shapes."""
        return self._kinds[_key(batch)][0]

    def checker(self, leaves: list[Any]) -> Callable[[Any], bool]:
        """A function of the shapes of a batch: whether such batches must not be filled up.

        It raises what is wrong with the values for them.
        """
        of_model = _key(leaves)

        def is_exact(batch: Any) -> bool:
            key = of_model, _key(batch)
            if key not in self._checked:
                self._check(leaves, batch)
                self._checked.add(key)
            return self._kinds[_key(batch)][1]

        return is_exact

    def _check(self, leaves: list[Any], batch: Any) -> None:
        try:
            self._run.eval_shape(leaves, *self._on_devices((batch, jax.ShapeDtypeStruct((_rows(batch),), bool))))
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

    def _on_devices(self, shapes: Any) -> Any:
        """The shapes with the shardings of batches, so that the trace is that of the first call."""
        if self._copies is None:
            return shapes
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._copies), shapes)


def _values(eval_fn: Any, structure: Any, leaves: list[Any], batch: Any) -> Any:
    params, *model_state = structure.unflatten(leaves)
    return as_values(eval_fn(params, batch, *model_state), _rows(batch))


def _sums(values_of: Any, copies: Any, found: dict[Any, Any], leaves: list[Any], batch: Any, mask: jax.Array) -> Any:
    values = values_of(leaves, batch)
    found[_key(batch)] = list(values), needs_exact(values)
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
