"""Which metric of a record a callback looks at, and in which direction it is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Literal, NoReturn, get_args

from ..._core import checks
from .history import NO_METRICS, Record

Mode = Literal["auto", "min", "max"]

_UP = {
    *("acc", "accuracy", "auc", "auroc", "precision", "recall", "f1", "r2", "bleu", "rouge", "iou", "dice", "ndcg"),
    *("top", "psnr", "ssim", "likelihood", "correct", "map", "score", "reward"),
}
_DOWN = {
    *("loss", "error", "errors", "err", "perplexity", "ppl", "mse", "rmse", "mae", "nll", "entropy", "divergence"),
    *("kl", "bits", "bpc", "wer", "cer", "distance", "fid", "regret"),
}
_FIRST = ("eval_loss", "test_loss")


def check_monitor(monitor: Any, mode: Any, where: str) -> None:
    """Check both as they were given.

    Raises:
        TypeError: `monitor` is no name.
        ValueError: an unknown mode, a mode of no metric, or a name that says no direction, with mode "auto".
    """
    if monitor is not None and not isinstance(monitor, str):
        raise TypeError(f"{where}: monitor must be the name of a metric, got {checks.describe(monitor)}")
    checks.choice(mode, where, "mode", get_args(Mode))
    if monitor is not None:
        resolve_mode(monitor, mode, where)
    elif mode != "auto":
        raise ValueError(f"{where}: mode={mode!r} is of a metric; name it by monitor=")


def resolve_mode(monitor: str, mode: Mode, where: str) -> str:
    """ "min" or "max". `ValueError` where the name of the metric does not say it."""
    if mode != "auto":
        return mode
    found = _direction(monitor)
    if found is None:
        raise ValueError(
            f"{where}: the name {monitor!r} does not say whether more or less is better; give mode='min' or mode='max'"
        )
    return found


def default_monitor(record: Record) -> str:
    """The metric of a record to look at where none is named: of the evaluation if there is one, else the loss."""
    names = metric_names(record)
    known = [n for n in names if n.startswith(("eval_", "test_")) and _direction(n)]
    return next((name for name in _FIRST if name in names), known[0] if known else "loss")


def value_of(record: Record, monitor: str, where: str) -> float:
    """The value of the metric.

    Raises:
        ValueError: the record does not have it. The message names the metrics that there are.
    """
    value = record.get(monitor)
    if value is None or isinstance(value, (str, bool)):
        raise_unknown(monitor, metric_names(record), where)
    return float(value)


def raise_unknown(monitor: str, names: Iterable[str], where: str) -> NoReturn:
    """`ValueError` for a metric that there is not."""
    raise ValueError(f"{where}: there is no metric {monitor!r}; there are {', '.join(sorted(names)) or 'none'}")


def metric_names(record: Record) -> list[str]:
    """The names of the metrics that a record has values of."""
    return [
        name
        for name, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in NO_METRICS
    ]


def is_better(value: float, best: float, mode: str, min_delta: float = 0.0) -> bool:
    """Whether a value improves on the best. NaN does not.

    >>> is_better(0.5, 0.6, "min"), is_better(0.5, 0.6, "min", 0.2), is_better(float("nan"), 0.6, "max")
    (True, False, False)
    """
    if math.isnan(value):
        return False
    return value < best - min_delta if mode == "min" else value > best + min_delta


def worst(mode: str) -> float:
    """The value that every finite one improves on."""
    return math.inf if mode == "min" else -math.inf


def _direction(name: str) -> str | None:
    words = [part for word in re.split(r"[^a-z0-9]+", name.lower()) for part in (word, word.rstrip("0123456789"))]
    if _DOWN & set(words) or any(word.endswith(("loss", "error")) for word in words):
        return "min"
    return "max" if _UP & set(words) or any(w.endswith(("accuracy", "score")) for w in words) else None
