"""The kinds of store: how each sums what is pushed, and where it keeps a value.

A kind is one entry of `KINDS`. The rest of the package asks it and compares no names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._core import checks
from .._devices import collectives
from .._devices.collectives import BucketLimits
from ..compression import _allreduce as allreduce, _reduce_scatter as reduce_scatter
from ..mxnet import _KIND_ALIASES, _OTHER_KINDS

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a store sums what is pushed, and where its values are."""

    name: str  # as given to `create`
    # `reduce(values, axis_name, limits) -> sums`, inside a mapped axis.
    reduce: Callable[[Arrays, str, BucketLimits], list[jax.Array]]
    # The same of compressed values, see `compression._sums`.
    reduce_compressed: Callable[..., tuple[list[jax.Array], list[Any]]] = allreduce
    in_rows: bool = False  # whether a value is cut into one row for each device
    # Whether a value is on the first device only, and pushes at the prompt are gathered there.
    on_one_device: bool = False
    over_processes: bool = False  # whether a push at the prompt is summed over all processes
    within_process: str = ""  # the kind by which a process then sums its own values first
    delayed: bool = False  # whether pushes may be applied later


KINDS = {
    kind.name: kind
    for kind in (
        Kind("local", collectives.gather_sum, on_one_device=True),
        Kind("device", collectives.allreduce),
        Kind("sharded", collectives.reduce_scatter, reduce_scatter, in_rows=True),
        Kind("dist_sync", collectives.allreduce, over_processes=True, within_process="local"),
        Kind("dist_device_sync", collectives.allreduce, over_processes=True, within_process="device"),
        Kind("dist_async", collectives.allreduce, over_processes=True, within_process="local", delayed=True),
    )
}
_KIND_NAMES = (*KINDS, *_KIND_ALIASES)  # for the command line


def kind_named(name: str, where: str) -> Kind:
    """The kind of this name, or of MXNet's name for it."""
    name = str(name)
    if name in _OTHER_KINDS:
        raise ValueError(f"{where}: unknown kind {name!r}; known are {', '.join(KINDS)}; {_OTHER_KINDS[name]}")
    return KINDS[checks.choice(_KIND_ALIASES.get(name, name), where, "kind", KINDS)]
