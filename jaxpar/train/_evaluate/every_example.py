"""Every example once, on the devices that hold the parameters.

A pass gives `Piece`s: batches of one size, in which the last examples are filled up by copies of the last one. Where a
result needs exact batches, the last examples come as they are. They are split over the devices where these can share
them evenly. Otherwise each device has all of them, so that any number is possible on any devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ... import data
from ..._core import checks
from ..._core.arrays import Device
from ..._devices.mesh import copies_on, split_over
from ..._devices.placement import put
from ..._devices.user_mesh import check_traced, without_types
from .._step.state import TrainState, carries

IsExact = Callable[[Any], bool]  # whether batches of these shapes must not be filled up


@dataclasses.dataclass(frozen=True)
class Piece:
    """A batch on the devices.

    Attributes:
        batch: as the source gives it.
        mask: bool (n,), which rows count.
        valid: how many count. In one process they are the first ones.
    """

    batch: Any
    mask: Any
    valid: int


@dataclasses.dataclass(frozen=True)
class Places:
    """Where batches go.

    Attributes:
        devices: of the parameters, if they are several.
    """

    devices: tuple[Device, ...] | None

    @property
    def count(self) -> int:
        return len(self.devices or (None,))

    @property
    def split(self) -> NamedSharding | None:
        """The sharding of a batch that the devices share."""
        return None if self.devices is None else split_over(self.devices)

    @property
    def copies(self) -> NamedSharding | None:
        """The sharding of what each device has a copy of."""
        return None if self.devices is None else copies_on(self.devices)

    def round_up(self, n: int) -> int:
        """The next number that the devices can share evenly."""
        return -(-n // self.count) * self.count

    def mask(self, rows: int, valid: int, sharding: NamedSharding | None) -> Any:
        return put(np.arange(rows) < valid, sharding)

    def pieces(self, source: Any, batch: Any, valid: int, rows: int, exact: bool) -> Iterator[Piece]:
        """The pieces of a batch of host memory with `valid` examples, to be filled up to `rows` unless exact."""
        if valid == rows or not exact:
            filled = fill(batch, rows - valid)
            yield Piece(source.place(filled, self.split), self.mask(rows, valid, self.split), valid)
            return
        for part in self._exact_parts(valid, rows):
            sharding = self.copies if len(part) % self.count else self.split
            some = jax.tree.map(lambda x, part=part: x[part.start : part.stop], batch)
            yield Piece(source.place(some, sharding), self.mask(len(part), len(part), sharding), len(part))

    def _exact_parts(self, valid: int, rows: int) -> list[range]:
        """The examples in parts that need no more memory than a whole batch does."""
        shared = valid - valid % self.count
        if not shared or valid <= rows // self.count:
            return [range(valid)]
        return [part for part in (range(shared), range(shared, valid)) if part]


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A pass over a data set or over arrays.

    Attributes:
        source: a `DatasetSource` or an `ArraySource`.
        number: of examples.
        size: of a batch, a multiple of the number of devices.
        places: where batches go.
    """

    source: Any
    number: int
    size: int
    places: Places

    def shapes(self) -> Any:
        """A whole batch as `jax.ShapeDtypeStruct`s."""
        return self.source.batch_shapes(self.size)

    def pieces(self, is_exact: IsExact) -> Iterator[Piece]:
        """Every example, in order."""
        exact = is_exact(self.shapes())
        full, rest = divmod(self.number, self.size)
        mask = self.places.mask(self.size, self.size, self.places.split)
        for batch in self._full(full):
            yield Piece(batch, mask, self.size)
        if rest:
            source = self._as_arrays()
            batch = jax.tree.map(lambda x: x[full * self.size :], source.arrays)
            yield from self.places.pieces(source, batch, rest, self.size, exact)

    def _full(self, count: int) -> Iterator[Any]:
        """The whole batches. Those of a data set come from its copies on the devices."""
        if isinstance(self.source, data.DatasetSource):
            return iter(self.source.batches(self.size, devices=self.places.devices) if count else ())
        rows = (slice(i * self.size, (i + 1) * self.size) for i in range(count))
        batches = (jax.tree.map(lambda x, part=part: x[part], self.source.arrays) for part in rows)
        return (self.source.place(batch, self.places.split) for batch in batches)

    def _as_arrays(self) -> data.ArraySource:
        if not isinstance(self.source, data.DatasetSource):
            return self.source
        dataset = self.source.dataset
        return data.ArraySource({"image": dataset.images, "label": dataset.labels}, jnp.float32)


def fill(batch: Any, count: int) -> Any:
    """The batch with so many copies of its last example behind it."""
    if not count:
        return batch
    arrays = jax.tree.map(np.asarray, batch)
    return jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[-1:], count, axis=0)]), arrays)


def arrays_pass(where: str, source: Any, batch_size: int, places: Places) -> Arrays:
    """A pass over a `DatasetSource` or an `ArraySource`.

    Args:
        where: the function that asks, for messages.
        batch_size: rounded up to a multiple of the number of devices.

    Raises:
        ValueError: no examples.
    """
    number = source.examples(batch_size)
    if not number:
        kind = "an empty data set" if isinstance(source, data.DatasetSource) else "empty arrays"
        raise ValueError(f"{where}: expected examples, got {kind}")
    return Arrays(source, number, min(places.round_up(batch_size), places.round_up(number)), places)


def as_eval_source(where: str, given: Any) -> Any:
    """A data set, arrays or batches as a `DatasetSource`, an `ArraySource` or an `IterableSource`.

    Raises:
        TypeError: nothing of these, or a source that may leave out examples.
        ValueError: arrays of different lengths.
    """
    if isinstance(given, data.Dataset):
        return data.DatasetSource(given)
    if isinstance(given, (data.DatasetSource, data.ArraySource, data.IterableSource)):
        return given
    if isinstance(given, data.Source):
        raise TypeError(
            f"{where}: expected a data.Dataset, arrays or batches, got {type(given).__name__}, which may leave out the "
            "last examples; give the arrays themselves, or what data.from_iterable takes"
        )
    if _is_arrays(given):
        check_traced(given, where)
        given = without_types(given)
        checks.batch_length(given, where)
        return data.from_arrays(given)
    if callable(given) or isinstance(given, Iterable) or hasattr(given, "__getitem__"):
        return data.from_iterable(given)
    raise TypeError(
        f"{where}: expected a data.Dataset, arrays with a common first axis, or something that gives batches; got "
        f"{checks.describe(given)}"
    )


def model_of(state_or_params: Any) -> tuple[Any, ...]:
    """(params to evaluate,), or (params, model_state) of a state that has one."""
    if not isinstance(state_or_params, TrainState):
        return (without_types(state_or_params),)
    model_state = (state_or_params.model_state,) if has_model_state(state_or_params) else ()
    return without_types((state_or_params.eval_params, *model_state))


def has_model_state(state_or_params: Any) -> bool:
    """Whether `model_of` gives a model state next to the params."""
    return isinstance(state_or_params, TrainState) and carries(state_or_params.model_state)


def places_of(params: Any) -> Places:
    """The devices of the parameters, if they are several."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            return Places(tuple(np.asarray(mesh.devices).flat) if isinstance(mesh, Mesh) else None)
    return Places(None)


def _is_arrays(given: Any) -> bool:
    """Whether this is a pytree of arrays. A list is one of arrays only, otherwise it is one of batches."""
    if isinstance(given, Iterator):
        return False
    if isinstance(given, list):
        return bool(given) and all(_is_array(each) for each in given)
    leaves = jax.tree.leaves(given)
    return _is_array(given) or (bool(leaves) and leaves[0] is not given)


def _is_array(given: Any) -> bool:
    return hasattr(given, "dtype") and hasattr(given, "shape")
