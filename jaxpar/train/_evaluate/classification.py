"""The `eval_fn` of a classifier: cross-entropy and accuracy of its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ... import data
from ..._core import checks
from ..._core.arguments import check_takes


@dataclasses.dataclass(frozen=True)
class Classification:
    """`eval_fn(params, batch) -> {"loss", "accuracy"}` of an `apply_fn`."""

    apply_fn: Callable[..., jax.Array]

    def __call__(self, params: Any, batch: Any, *model_state: Any) -> dict[str, jax.Array]:
        logits = check_logits(self.apply_fn(params, batch["image"], *model_state), len(batch["image"]))
        logits = logits.astype(jnp.float32)
        labels = batch["label"][:, None]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=1)[:, 0]
        return {"loss": losses, "accuracy": logits.argmax(axis=1) == labels[:, 0]}


def classification(apply_fn: Any, has_state: bool, where: str) -> Classification:
    """The `eval_fn` of a classifier. `TypeError` for an `apply_fn` that cannot be one."""
    checks.function(apply_fn, f"{where}: apply_fn")
    names = ("params", "images", "model_state") if has_state else ("params", "images")
    hint = ", since the state has a model_state" if has_state else ""
    check_takes(apply_fn, names, f"{where}: apply_fn", hint)
    return Classification(apply_fn)


def check_logits(logits: Any, n: int) -> Any:
    """The logits. `ValueError` unless there is a row of them for each of n examples."""
    if not hasattr(logits, "shape") or len(logits.shape) != 2 or logits.shape[0] != n:
        raise ValueError(
            f"apply_fn: a classifier needs logits of shape (n, classes), got {checks.describe(logits)} for {n} images"
        )
    return logits


def check_classified(dataset: Any, where: str) -> None:
    """`TypeError` unless this is a data set with one integer label per example."""
    if not isinstance(dataset, data.Dataset):
        raise TypeError(
            f"{where}: expected a data.Dataset, such as data.Dataset(images, labels) or data.collect(loader); "
            f"got {checks.describe(dataset)}"
        )
    checks.labels(dataset.labels, where)
