"""Loss and accuracy of a classifier over a whole data set, on the devices that hold its parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ... import data
from ..._core import checks
from ..._core.arrays import Device
from ..._core.recent import Recent
from ..._devices.emulated import wait_before_collectives
from ..._devices.placement import put
from .._step.state import TrainState, carries


def evaluate(
    state_or_params: Any,
    apply_fn: Callable[..., jax.Array],
    dataset: data.Dataset,
    *,
    batch_size: int,
) -> dict[str, float]:
    """Mean cross-entropy and accuracy over every example, the last partial batch too.

    Args:
        state_or_params: a `TrainState`, or the parameters themselves; the batches go where they are.
        apply_fn: `apply_fn(params, images) -> logits` of shape (n, classes); images as `data.batches` gives
            them. Where the state has a `model_state`, `apply_fn(params, images, model_state)`. The same function
            object is compiled once; the programs of the last few are kept.
        dataset: a `data.Dataset` with integer labels.
        batch_size: how many examples at a time; rounded up to a multiple of the number of devices. The result
            does not depend on it but for float32 rounding.

    Returns:
        `{"loss", "accuracy"}`, floats: nats an example, and the part that is classified right.

    Raises:
        ValueError: a batch size below 1, an empty data set.
        TypeError: an `apply_fn` without a hash, labels that are no integers.

    Example:
        >>> from jaxpar import data, models, train
        >>> images = data.Dataset(np.zeros((10, 28, 28, 1), np.uint8), np.arange(10))
        >>> params = models.lenet.init(jax.random.key(0))
        >>> round(train.evaluate(params, models.lenet.apply, images, batch_size=4)["accuracy"], 3)
        0.1
    """
    if not isinstance(dataset, data.Dataset):
        raise TypeError(
            "evaluate: expected a data.Dataset, such as data.Dataset(images, labels) or data.collect(loader); "
            f"got {checks.describe(dataset)}"
        )
    checks.labels(dataset.labels, "evaluate")
    if batch_size < 1 or not len(dataset):
        raise ValueError(f"evaluate: needs examples and a batch_size >= 1, got {len(dataset)} and {batch_size}")
    params, model_state = state_or_params, ()
    if isinstance(state_or_params, TrainState):
        params = state_or_params.params
        model_state = (state_or_params.model_state,) if carries(state_or_params.model_state) else ()
    devices = _devices_of(params)
    count = len(devices or (None,))
    size = min(-(-batch_size // count), -(-len(dataset) // count)) * count
    totals = jnp.zeros(2) if devices is None else put(np.zeros(2, np.float32), _everywhere(devices))
    leaves, structure = jax.tree.flatten((params, *model_state))
    add_batch = _programs(checks.hashable(apply_fn, "evaluate: apply_fn"), structure)
    for batch, valid in _batches(dataset, size, devices):
        wait_before_collectives((batch, totals), devices or ())
        totals = add_batch(leaves, batch, np.int32(valid), totals)
    loss, right = np.asarray(totals)
    return {"loss": float(loss) / len(dataset), "accuracy": float(right) / len(dataset)}


def _add_batch(
    apply_fn: Any, structure: Any, leaves: list[jax.Array], batch: Any, count: Any, totals: jax.Array
) -> jax.Array:
    """`totals` (summed loss, number right) with the first `count` examples of a batch added."""
    params, *model_state = structure.unflatten(leaves)
    logits = apply_fn(params, batch["image"], *model_state).astype(jnp.float32)
    labels = batch["label"][:, None]
    valid = jnp.arange(logits.shape[0]) < count
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=1)[:, 0]
    right = logits.argmax(axis=1) == labels[:, 0]
    return totals + jnp.stack([jnp.where(valid, losses, 0).sum(), (valid & right).sum()])


_programs = Recent(lambda *key: jax.jit(functools.partial(_add_batch, *key), donate_argnums=3))


def _batches(dataset: data.Dataset, size: int, devices: Any) -> Iterator[tuple[Any, int]]:
    """Batches of one size with the number of examples in them that count.

    The remaining examples are filled up to a whole batch with copies of the last one, which do not count.
    """
    full, rest = divmod(len(dataset), size)
    if full:
        for batch in data.batches(dataset, size, devices=devices):
            yield batch, size
    if rest:
        rows = np.minimum(np.arange(full * size, (full + 1) * size), len(dataset) - 1)
        filled = data.Dataset(dataset.images[rows], dataset.labels[rows])
        yield next(iter(data.batches(filled, size, devices=devices, resident=False))), rest


def _devices_of(params: Any) -> tuple[Device, ...] | None:
    """The devices of the parameters where they are several."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            return tuple(np.asarray(leaf.sharding.mesh.devices).flat)
    return None


def _everywhere(devices: tuple[Device, ...]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("data",)), P())
