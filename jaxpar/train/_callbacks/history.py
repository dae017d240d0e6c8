"""What `fit` measured, epoch by epoch: a list of dicts, a table, a DataFrame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..._core.calls import answers
from ..._core.text import Table, describe, plural

Record = dict[str, Any]

SPEEDS = {"images_per_second": "images/s", "examples_per_second": "examples/s"}
# What a record has next to metrics.
NO_METRICS = ("epoch", "step", "seconds", *SPEEDS, "skipped", "interrupted", "under_way")

_MOST = 40  # rows of the table


class History(list[Record]):
    """A list with one dict for each epoch. Notebooks show it as a table.

    >>> History([{"epoch": 1, "loss": 2.5, "accuracy": None}])._repr_html_().count("<td")
    2
    """

    def _repr_html_(self) -> str:
        """Only what some epoch has. A long history shows the first and the last epochs."""
        names = [
            n for n in dict.fromkeys(n for record in self for n in record) if any(r.get(n) is not None for r in self)
        ]
        rows = [[_text(name, record.get(name)) for name in names] for record in self]
        columns = tuple(name.replace("_", " ") for name in names)
        table = Table(plural(len(self), "epoch"), columns, rows, _MOST, "right", first=_MOST // 4)
        return table._repr_html_()


def number_text(value: Any) -> str:
    """A metric in a few digits.

    >>> number_text(0.25), number_text(1e-7), number_text(3)
    ('0.2500', '1.000e-07', '3')
    """
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"


def line(record: Record, epochs: int | None = None) -> str:
    """One line about an epoch of so many: its metrics, except columns such as `eval_recall/0`, and its speed.

    >>> line({"epoch": 1, "loss": 2.3, "accuracy": 0.1, "seconds": 2.0, "images_per_second": 30000.0}, 5)
    'epoch 1/5  loss 2.3000  accuracy 0.1000  2.0 s  30,000 images/s'
    """
    words = [f"epoch {record['epoch']}" + (f"/{epochs}" if epochs else "")]
    for name, value in record.items():
        if name not in NO_METRICS and "/" not in name and value is not None and not isinstance(value, bool):
            words.append(f"{name.replace('_', ' ')} {number_text(value)}")
    words.append(f"{record['seconds']:.1f} s")
    words += [f"{record[name]:,.0f} {unit}" for name, unit in SPEEDS.items() if name in record]
    return "  ".join(words)


def metric_groups(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """The metrics that some record has, to be drawn together: a label and a name in the records for each curve.

    >>> metric_groups([{"epoch": 1, "loss": 2.0, "eval_loss": 3.0, "eval_recall/0": 0.5, "accuracy": None}])
    {'loss': {'train': 'loss', 'eval': 'eval_loss'}, 'recall': {'eval 0': 'eval_recall/0'}}
    """
    groups: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(name for record in records for name in record if name not in NO_METRICS):
        values = [record.get(name) for record in records]
        if any(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            part = next((part for part in ("test", "eval") if name.startswith(f"{part}_")), "train")
            group, _, column = name.removeprefix(f"{part}_").partition("/")
            groups.setdefault(group, {})[f"{part} {column}".strip()] = name
    return groups


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "seconds":
        return f"{value:.2f}"
    return f"{value:,.0f}" if name in SPEEDS else number_text(value)


@answers("to_pandas")
def to_pandas(history: Sequence[Record]) -> Any:
    """Convert a history to a `pandas.DataFrame` with one row for each epoch.

    Values that were not measured are missing. `to_pandas(history).to_csv("history.csv")` writes a table.

    Raises:
        ModuleNotFoundError: pandas is not installed.

    Example:
        >>> frame = to_pandas([{"epoch": 1, "loss": 2.5}, {"epoch": 2, "loss": 1.5}])  # doctest: +SKIP
        >>> float(frame["loss"].min())  # doctest: +SKIP
        1.5
    """
    check_records(history, "to_pandas")
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas") from error
    return pandas.DataFrame(list(history))


def check_records(history: Any, where: str) -> None:
    if not isinstance(history, Sequence) or not all(isinstance(record, dict) for record in history):
        raise TypeError(f"{where}: expected the history, the second result of train.fit; got {describe(history)}")
