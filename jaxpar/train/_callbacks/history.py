"""What `fit` measured, epoch by epoch: a list of dicts, a table, a DataFrame."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, get_args

from ..._core import checks
from ..._core.text import Table, plural
from .directions import Mode, resolve_mode

Record = dict[str, Any]

SPEEDS = {"images_per_second": "images/s", "examples_per_second": "examples/s"}
NO_METRICS = ("epoch", "step", "seconds", *SPEEDS, "skipped", "bad_records", "interrupted", "under_way")  # no metrics

_MOST_ROWS = 40  # of the table


class History(list[Record]):
    """A list with one dict for each epoch. Notebooks show it as a table."""

    def best(self, metric: str, mode: Mode = "auto") -> Record:
        """The record with the best value of a metric, the first of several. NaN is never the best.

        Args:
            metric: its name in the records.
            mode: as in `EarlyStopping`: "auto" decides by the name, if that is certain.

        Raises:
            ValueError: no record has a number of this name, or the name does not tell what is better.

        Example:
            >>> history = History([{"epoch": 1, "eval_error": 0.3}, {"epoch": 2, "eval_error": 0.2}])
            >>> history.best("eval_error")["epoch"]
            2
        """
        checks.choice(mode, "history.best", "mode", get_args(Mode))
        values = [(record[metric], record) for record in self if metric in metric_names(record)]
        # NaN is neither less nor more, so `min` and `max` would keep one that comes first.
        values = [(value, record) for value, record in values if not math.isnan(value)]
        if not values:
            names = dict.fromkeys(name for record in self for name in metric_names(record))
            raise ValueError(f"history.best: no record has a number {metric!r}; known are {', '.join(names) or 'none'}")
        choose = min if resolve_mode(metric, mode, "history.best") == "min" else max
        return choose(values, key=lambda pair: pair[0])[1]

    def _repr_html_(self) -> str:
        """Only what some epoch has. A long history shows the first and the last epochs."""
        names = list(dict.fromkeys(n for record in self for n, value in record.items() if value is not None))
        rows = [[_text(name, record.get(name)) for name in names] for record in self]
        columns = tuple(name.replace("_", " ") for name in names)
        table = Table(plural(len(self), "epoch"), columns, rows, _MOST_ROWS, "right", first=_MOST_ROWS // 4)
        return table._repr_html_()


def number_text(value: object) -> str:
    """A metric in a few digits: 0.2500, 1.000e-07, 3."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"


def line(record: Record, epochs: int | None = None) -> str:
    """One line about an epoch of so many: its metrics, except columns such as `eval_recall/0`, and its speed."""
    columns = [f"epoch {record['epoch']}" + (f"/{epochs}" if epochs else "")]
    for name, value in record.items():
        if name not in NO_METRICS and "/" not in name and value is not None and not isinstance(value, bool):
            columns.append(f"{name.replace('_', ' ')} {number_text(value)}")
    columns.append(f"{record['seconds']:.1f} s")
    columns += [f"{record[name]:,.0f} {unit}" for name, unit in SPEEDS.items() if name in record]
    return "  ".join(columns)


def metric_names(record: Record) -> list[str]:
    """The names of the metrics that a record has numbers of."""
    return [
        name
        for name, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in NO_METRICS
    ]


def metric_groups(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """The metrics that are drawn together: of each the curves, as {label: name in the records}."""
    groups: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(name for record in records for name in metric_names(record)):
        data = next((data for data in ("test", "eval") if name.startswith(f"{data}_")), "train")
        group, _, column = name.removeprefix(f"{data}_").partition("/")
        groups.setdefault(group, {})[f"{data} {column}".strip()] = name
    return groups


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "seconds":
        return f"{value:.2f}"
    return f"{value:,.0f}" if name in SPEEDS else number_text(value)


def to_pandas(history: Sequence[Record]) -> Any:
    """Convert a history to a `pandas.DataFrame` with one row for each epoch.

    It needs pandas. Values that were not measured are missing. `to_pandas(history).to_csv("history.csv")` writes a
    table.

    Example:
        >>> frame = to_pandas([{"epoch": 1, "loss": 2.5}, {"epoch": 2, "loss": 1.5}])  # doctest: +SKIP
        >>> float(frame["loss"].min())  # doctest: +SKIP
        1.5
    """
    return import_for("to_pandas", "pandas").DataFrame(list(history))


def import_for(who: str, module: str, extra: str = "") -> Any:
    """A module of an optional package. `ModuleNotFoundError` says who needs it and how it is installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(f"{who} needs {package}: pip install {extra or package}") from error
