"""`train.largest_batch`: the largest batch whose step fits the memory, by its compiled programs alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._core import checks
from ..._core.arrays import Device
from ..._devices import processes
from .accelerators import Slice
from .child import ask
from .compiled import construct, peak_bytes
from .plan import check_make

_CALLER = "train.largest_batch"
_CLOSE = 16  # the search ends within a sixteenth of the batch
_MOST = 2**24  # examples


def largest_batch(
    make: Callable[..., Any],
    on: str | None = None,
    limit: float = 0.9,
    *,
    devices: Sequence[Device] | None = None,
    multiple_of: int | None = None,
    **choices: Any,
) -> int:
    """The largest batch whose step fits the memory of each device.

    Steps are compiled for batches of growing size, and nothing is run. A step fits if its compiler says that state,
    batch, results and temporaries need no more than the limit at once, as `train.plan` reports. It does not know of
    other arrays on the devices, such as data that `fit` keeps there or batches that are sent ahead. The answer is
    within a sixteenth of the true one, and takes a dozen compilations, each as long as the first step of a run.

    Args:
        make: `make(devices, batch_size=..., **choices) -> (step, state, batch)`, as for `train.plan`. It is evaluated
            for shapes.
        on: devices that are not there, such as `"v5e:2x4"` or `"h100:8"`, as for `train.plan`, which says what it
            needs. None: devices of this machine.
        limit: a part of each device's memory, or bytes above 1. A part needs devices that say how much memory programs
            have, as GPUs and TPUs do and CPUs do not.
        devices: without `on`, the devices. None: all devices.
        multiple_of: batches are multiples of this. None: of the number of devices times `accumulate`, or of
            `virtual_shards` times `accumulate`.
        **choices: given to `make`.

    Raises:
        ValueError: no batch fits, the limit cannot be known, or `make` returns a batch of another size; both `on` and
            `devices` are given, or `on` is no such slice.
        RuntimeError: there is no compiler for the devices of `on`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from jaxpar import kv, train
        >>> def make(devices, batch_size):
        ...     store = kv.from_params({"w": jnp.zeros((8, 8))}, optimizer=optax.sgd(0.1), devices=devices)
        ...     step = train.make_train_step(lambda params, batch: (jnp.tanh(batch @ params["w"]) ** 2).mean())
        ...     return step, train.create_state(store, 0), jax.ShapeDtypeStruct((batch_size, 8), jnp.float32)
        >>> train.largest_batch(make, limit=0.9)  # doctest: +SKIP
    """
    check_make(make, _CALLER)
    checks.number(limit, _CALLER, "limit", "a part of the memory or a number of bytes", lambda x: x > 0)
    if multiple_of is not None:
        multiple_of = checks.whole_number(multiple_of, _CALLER, "multiple_of")
    if on is not None:
        if devices is not None:
            raise ValueError(f"{_CALLER}: on={on!r} has devices of its own; give on= or devices=, not both")
        work = functools.partial(_search_on, limit=limit, multiple_of=multiple_of)
        return ask(work, make, Slice(on, _CALLER), choices, _CALLER)
    chosen = checks.devices(processes.devices() if devices is None else devices, _CALLER)
    most_bytes = int(limit)
    if limit <= 1:
        # Of the devices of this process, which alone can be asked.
        stats = [device.memory_stats() or {} for device in chosen if device.process_index == jax.process_index()]
        limits: list[int] = [of_device["bytes_limit"] for of_device in stats if "bytes_limit" in of_device]
        if not limits:
            raise ValueError(f"{_CALLER}: {chosen[0]} does not say how much memory it has; give limit= in bytes")
        most_bytes = int(limit * min(limits))
    return _search(make, chosen, most_bytes, multiple_of, choices)


def _search_on(
    make: Callable[..., Any],
    target: Slice,
    choices: dict[str, Any],
    fraction: float,
    *,
    limit: float,
    multiple_of: int | None,
) -> int:
    """The search in the process that compiles for devices which are not there."""
    most_bytes = int(limit if limit > 1 else limit * target.limit(fraction))
    return _search(make, target.devices(), most_bytes, multiple_of, choices)


def _search(
    make: Callable[..., Any],
    devices: tuple[Device, ...],
    most_bytes: int,
    multiple_of: int | None,
    choices: dict[str, Any],
) -> int:
    def needed(size: int) -> int:
        """Bytes that a device needs at once for a batch of this size."""
        *_, batch, stages = construct(make, devices, {"batch_size": size, **choices})
        # A batch of one size for all would fit forever, and the search double it to its end.
        if size not in {leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape}:
            raise ValueError(f"{_CALLER}: make(devices, batch_size={size}) must return a batch of {size} examples")
        try:
            return max(peak_bytes(stage.traced.lower().compile(), stage) for stage in stages)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return sys.maxsize  # the compiler of TPUs refuses what does not fit

    if multiple_of is not None:
        unit = multiple_of
    else:
        made: list[Any] = []
        jax.eval_shape(lambda: made.extend(make(devices, batch_size=len(devices), **choices)))  # without arrays
        unit = (made[0].virtual_shards or len(devices)) * made[0].device_step.accumulate

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
