"""Every example once, in batches of one size, on the devices that hold the parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ... import data
from ..._core import checks
from ..._core.arrays import Device
from ..._devices.mesh import copies_on
from ..._devices.user_mesh import without_types
from .._step.state import TrainState, carries


@dataclasses.dataclass(frozen=True)
class Examples:
    """The batches of a pass over examples.

    Attributes:
        source: a data set, or a pytree of arrays with a common first axis.
        number: of examples.
        size: of a batch, a multiple of the number of devices.
        devices: of the parameters, if they are several.
    """

    source: Any
    number: int
    size: int
    devices: tuple[Device, ...] | None

    @property
    def copies(self) -> NamedSharding | None:
        """The sharding of results of which each device has a copy."""
        return None if self.devices is None else copies_on(self.devices)

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Batches of one size, with the number of examples that count.

        The last examples are filled up to a whole batch by copies of the last one, which do not count.
        """
        full, rest = divmod(self.number, self.size)
        if full:
            for batch in self._batches(self.source):
                yield batch, self.size
        if rest:
            rows = np.minimum(np.arange(full * self.size, self.number + self.size - rest), self.number - 1)
            yield next(self._batches(_rows(self.source, rows), resident=False)), rest

    def _batches(self, source: Any, **options: Any) -> Iterator[Any]:
        if isinstance(source, data.Dataset):
            return iter(data.batches(source, self.size, devices=self.devices, **options))
        return data.from_arrays(source).batches(self.size, devices=self.devices)


def every_example(where: str, params: Any, source: Any, batch_size: int) -> Examples:
    """The batches of a pass over a data set, or over arrays.

    Args:
        where: the function that asks, for messages.
        params: the batches go to their devices.
        batch_size: rounded up to a multiple of the number of devices.

    Raises:
        TypeError: `batch_size` is no int.
        ValueError: no examples, or a batch size below 1.
    """
    batch_size = checks.whole_number(batch_size, where, "batch_size")
    is_dataset = isinstance(source, data.Dataset)
    number = len(source) if is_dataset else checks.batch_length(source, where)
    if not number:
        raise ValueError(f"{where}: expected examples, got {'an empty data set' if is_dataset else 'empty arrays'}")
    devices = _devices_of(params)
    count = len(devices or (None,))
    return Examples(source, number, min(-(-batch_size // count), -(-number // count)) * count, devices)


def model_of(state_or_params: Any) -> tuple[Any, ...]:
    """(params to evaluate,), or (params, model_state) of a state that has one."""
    if not isinstance(state_or_params, TrainState):
        return (without_types(state_or_params),)
    model_state = state_or_params.model_state
    return without_types((state_or_params.eval_params, *((model_state,) if carries(model_state) else ())))


def _rows(source: Any, rows: np.ndarray) -> Any:
    if isinstance(source, data.Dataset):
        return data.Dataset(source.images[rows], source.labels[rows])
    return jax.tree.map(lambda x: np.asarray(x)[rows], source)


def _devices_of(params: Any) -> tuple[Device, ...] | None:
    """The devices of the parameters, if they are several."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            return tuple(np.asarray(leaf.sharding.mesh.devices).flat)
    return None
