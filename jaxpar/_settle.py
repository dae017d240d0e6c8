"""A wait that older XLA needs on emulated CPU devices.

Before jax 0.12 a program with collectives over several CPU devices could hang for ever when it was started while
its inputs were still being computed: its threads, as many as there are devices, wait in the collective for one
that has none left to run on. (Seen with jax 0.10.2: a batch gathered on four devices, then the step.) So there,
and only there, batches are handed out and such programs started when what they need is ready. The devices are the
host's own cores, so little is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ._types import Device, traced

_CAN_HANG = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)


def settle(tree: Any, devices: Sequence[Device]) -> None:
    """Waits for the arrays where a program over these devices could hang without it."""
    if can_hang(devices) and not traced(tree):
        jax.block_until_ready(tree)


def can_hang(devices: Sequence[Device]) -> bool:
    """Whether a program over these devices could."""
    return _CAN_HANG and len(devices) > 1 and devices[0].platform == "cpu"
