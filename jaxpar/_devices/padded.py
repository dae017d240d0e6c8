"""Batches for virtual shards that the devices cannot share evenly."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """A batch with rows at its end that belong to no example, so that each device has room for as many shards.

    `data.batches(..., virtual_shards=V)` gives it where V is no multiple of the number of devices D. The shards of
    B / V rows are dealt to the devices in order, ceil(V / D) to each. A step with `virtual_shards=V` counts B rows.

    Attributes:
        arrays: a pytree of arrays (D * ceil(V / D) * B / V, ...).
        virtual_shards: V.
    """

    arrays: Any
    virtual_shards: int = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: Any) -> Any:
        """One of the arrays, with the rows of the padding."""
        return self.arrays[name]
