"""What `fit` measured, epoch by epoch: a list of dicts, a table in a notebook, a DataFrame, a picture."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from typing import Any

_MOST = 40


class History(list[dict[str, Any]]):
    """A list with a dict for each epoch, which a notebook shows as a table.

    >>> History([{"epoch": 1, "loss": 2.5, "accuracy": None}])._repr_html_().count("<td")
    2
    """

    def _repr_html_(self) -> str:
        """Values that are None in every epoch have no column; of a long history the first and last epochs."""
        names = [
            n for n in dict.fromkeys(n for record in self for n in record) if any(r.get(n) is not None for r in self)
        ]
        head = "".join(_cell("th", name.replace("_", " ")) for name in names)
        rows: list[dict[str, Any] | None] = list(self)
        if len(rows) > _MOST:
            rows[_MOST // 4 : len(rows) - (_MOST - _MOST // 4)] = [None]
        body = "".join("<tr>" + "".join(_cell("td", _text(n, row)) for n in names) + "</tr>" for row in rows)
        count = f"{len(self)} epoch{'s' if len(self) != 1 else ''}"
        return f"<div><p>{count}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(tag: str, text: str) -> str:
    return f'<{tag} style="text-align:right;white-space:nowrap">{html.escape(text)}</{tag}>'


def _text(name: str, record: dict[str, Any] | None) -> str:
    value = "…" if record is None else record.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if name == "seconds":
        return f"{value:.2f}"
    if name == "images_per_second":
        return f"{value:,.0f}"
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3e}"


def to_pandas(history: Sequence[dict[str, Any]]) -> Any:
    """A history as a `pandas.DataFrame` with a row for each epoch; what was not measured is missing in it.

    Raises:
        ModuleNotFoundError: pandas is not installed.

    Example:
        >>> frame = to_pandas([{"epoch": 1, "loss": 2.5}, {"epoch": 2, "loss": 1.5}])  # doctest: +SKIP
        >>> float(frame["loss"].min())  # doctest: +SKIP
        1.5
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas makes a pandas.DataFrame: pip install pandas") from error
    return pandas.DataFrame(list(history))


def plot_history(history: Sequence[dict[str, Any]], path: str | os.PathLike[str] | None = None) -> Any:
    """Loss and accuracy by epoch, side by side; needs matplotlib.

    Args:
        history: what `fit` returned.
        path: a file to write the picture to, in the format its name ends with.

    Returns:
        The matplotlib figure; a notebook shows it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: an empty history.

    Example:
        >>> figure = plot_history([{"epoch": 1, "loss": 2.3, "accuracy": 0.1, "test_accuracy": 0.2}])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['loss', 'accuracy']
    """
    if not history:
        raise ValueError("plot_history: the history is empty")
    from ..._core.figures import figure as new_figure, saved

    figure = new_figure("plot_history", 9, 3.2)
    epochs = [record["epoch"] for record in history]
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for label, field in (("train", name), ("test", f"test_{name}")):
            values = [record.get(field) for record in history]
            if any(value is not None for value in values):
                axes.plot(epochs, [float("nan") if v is None else v for v in values], marker="o", label=label)
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if axes.get_lines():
            axes.legend()
    return saved(figure, path)
