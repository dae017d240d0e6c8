"""Loss and accuracy of a classifier over a whole data set, on the devices that hold its parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import data
from ..._core import checks
from ..._core.recent import Recent
from ..._devices.emulated import wait_before_collectives
from ..._devices.placement import put
from ..._devices.user_mesh import on_own_mesh
from .every_example import every_example, model_of
from .labels import check_classes


@on_own_mesh
def evaluate(
    state_or_params: Any,
    apply_fn: Callable[..., jax.Array],
    dataset: data.Dataset,
    *,
    batch_size: int,
) -> dict[str, float]:
    """Mean cross-entropy and accuracy over every example.

    Args:
        state_or_params: a `TrainState`, or the parameters. The batches go to their devices.
        apply_fn: `apply_fn(params, images) -> logits` of shape (n, classes), with images as `data.batches` gives them.
            With a `model_state`, `apply_fn(params, images, model_state)`. The same function object is compiled once.
            The programs of the last few are kept.
        dataset: a `data.Dataset` with integer labels.
        batch_size: how many examples at a time, rounded up to a multiple of the number of devices. It changes the
            result by float32 rounding only.

    Returns:
        `{"loss", "accuracy"}`, floats: mean cross-entropy in nats per example, and the fraction classified correctly.

    Raises:
        ValueError: a batch size below 1, an empty data set, labels that are no classes of the model.
        TypeError: another data set, an `apply_fn` without a hash, labels that are no integers.

    Example:
        >>> from jaxpar import data, models, train
        >>> images = data.Dataset(np.zeros((10, 28, 28, 1), np.uint8), np.arange(10))
        >>> params = models.lenet.init(jax.random.key(0))
        >>> round(train.evaluate(params, models.lenet.apply, images, batch_size=4)["accuracy"], 3)
        0.1
    """
    check_classified(dataset, "evaluate")
    check_classes("evaluate", apply_fn, model_of, state_or_params, dataset)
    model = model_of(state_or_params)
    examples = every_example("evaluate", model[0], dataset, batch_size)
    totals = jnp.zeros(2) if examples.copies is None else put(np.zeros(2, np.float32), examples.copies)
    leaves, structure = jax.tree.flatten(model)
    add_batch = _programs(checks.hashable(apply_fn, "evaluate: apply_fn"), structure)
    for batch, valid in examples.batches():
        wait_before_collectives((batch, totals), examples.devices or ())
        totals = add_batch(leaves, batch, np.int32(valid), totals)
    loss, right = np.asarray(totals)
    return {"loss": float(loss) / examples.number, "accuracy": float(right) / examples.number}


def check_classified(dataset: Any, where: str) -> None:
    """`TypeError` unless this is a data set with one integer label per example."""
    if not isinstance(dataset, data.Dataset):
        raise TypeError(
            f"{where}: expected a data.Dataset, such as data.Dataset(images, labels) or data.collect(loader); "
            f"got {checks.describe(dataset)}"
        )
    checks.labels(dataset.labels, where)


def _add_batch(
    apply_fn: Any, structure: Any, leaves: list[jax.Array], batch: Any, count: Any, totals: jax.Array
) -> jax.Array:
    """`totals` (summed loss, number correct) with the first `count` examples of a batch added."""
    params, *model_state = structure.unflatten(leaves)
    logits = apply_fn(params, batch["image"], *model_state).astype(jnp.float32)
    labels = batch["label"][:, None]
    valid = jnp.arange(logits.shape[0]) < count
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=1)[:, 0]
    right = logits.argmax(axis=1) == labels[:, 0]
    return totals + jnp.stack([jnp.where(valid, losses, 0).sum(), (valid & right).sum()])


_programs = Recent(lambda *key: jax.jit(functools.partial(_add_batch, *key), donate_argnums=3))
