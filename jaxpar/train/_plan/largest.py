"""`train.largest_batch`: the largest batch whose step fits the memory, by its compiled programs alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._core import checks
from ..._core.arrays import Device
from ..._devices import processes
from .child import construct, peak_bytes

_CALLER = "train.largest_batch"
_CLOSE = 16  # the search ends within a sixteenth of the batch
_MOST = 2**24  # examples


def largest_batch(
    make: Callable[..., Any],
    limit: float = 0.9,
    *,
    devices: Sequence[Device] | None = None,
    multiple_of: int | None = None,
    **choices: Any,
) -> int:
    """The largest batch whose step fits the memory of these devices.

    Steps are compiled for batches of growing size, and nothing is run. A step fits if its compiler says that state,
    batch, results and temporaries need no more than the limit at once, as `train.plan` reports. It does not know of
    other arrays on the devices, such as data that `fit` keeps there or batches that are sent ahead. The answer is
    within a sixteenth of the true one, and takes a dozen compilations, each as long as the first step of a run.

    Args:
        make: `make(devices, batch_size=..., **choices) -> (step, state, batch)`, as for `train.plan`. It is evaluated
            for shapes.
        limit: a part of each device's memory, or bytes above 1. A part needs devices that say how much memory programs
            have, as GPUs and TPUs do and CPUs do not.
        devices: None: all devices.
        multiple_of: batches are multiples of this. None: of the number of devices times `accumulate`, or of
            `virtual_shards` times `accumulate`.
        **choices: given to `make`.

    Raises:
        ValueError: no batch fits, the limit cannot be known, or `make` returns a batch of another size.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from jaxpar import kv, train
        >>> def make(devices, batch_size):
        ...     store = kv.from_params({"w": jnp.zeros((8, 8))}, optimizer=optax.sgd(0.1), devices=devices)
        ...     step = train.make_train_step(lambda params, batch: (jnp.tanh(batch @ params["w"]) ** 2).mean())
        ...     return step, train.create_state(store, 0), jax.ShapeDtypeStruct((batch_size, 8), jnp.float32)
        >>> train.largest_batch(make, limit=0.9)  # doctest: +SKIP
    """
    chosen = checks.devices(processes.devices() if devices is None else devices, _CALLER)
    checks.number(limit, _CALLER, "limit", "a part of the memory or a number of bytes", lambda x: x > 0)
    most_bytes = int(limit)
    if limit <= 1:
        # Of the devices of this process, which alone can be asked.
        stats = [device.memory_stats() or {} for device in chosen if device.process_index == jax.process_index()]
        limits: list[int] = [of_device["bytes_limit"] for of_device in stats if "bytes_limit" in of_device]
        if not limits:
            raise ValueError(f"{_CALLER}: {chosen[0]} does not say how much memory it has; give limit= in bytes")
        most_bytes = int(limit * min(limits))

    def needed(size: int) -> int:
        """Bytes that a device needs at once for a batch of this size."""
        *_, batch, stages = construct(make, chosen, {"batch_size": size, **choices})
        # A batch of one size for all would fit forever, and the search double it to its end.
        if size not in {leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape}:
            raise ValueError(f"{_CALLER}: make(devices, batch_size={size}) must return a batch of {size} examples")
        try:
            return max(peak_bytes(stage.traced.lower().compile(), stage) for stage in stages)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return sys.maxsize  # the compiler of TPUs refuses what does not fit

    if multiple_of is None:
        made: list[Any] = []
        jax.eval_shape(lambda: made.extend(make(chosen, batch_size=len(chosen), **choices)))  # without arrays
        multiple_of = (made[0].virtual_shards or len(chosen)) * made[0].device_step.accumulate
    unit = checks.whole_number(multiple_of, _CALLER, "multiple_of")

    # Double the batch until it does not fit, then halve the distance between one that fits and one that does not.
    fits, too_large = 0, unit
    while (peak := needed(too_large)) <= most_bytes:
        fits, too_large = too_large, 2 * too_large
        if too_large > _MOST:
            return fits
    if not fits:
        raise ValueError(
            f"{_CALLER}: a step of {unit} examples needs {peak:,} bytes on each device, and the limit is "
            f"{most_bytes:,}; split the state over the devices, by kind='sharded' or sharding=parallel.fsdp()"
        )
    while too_large - fits > max(unit, fits // _CLOSE):
        middle = (fits + too_large) // 2 // unit * unit
        fits, too_large = (middle, too_large) if needed(middle) <= most_bytes else (fits, middle)
    return fits
