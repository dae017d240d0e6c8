"""Text for people and by people: tables, words of messages, printed lines. No JAX here."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import html
import os
import sys
import threading
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under a title, as text for a prompt and as HTML for a notebook."""

    title: str  # the line above the rows
    columns: tuple[str, ...]  # the head of each column, shown in HTML only
    rows: Sequence[Sequence[str]]  # the cells of each row, as many as `columns`
    most: int = 20  # how many rows are shown. Longer tables are cut.
    align: str = "left"  # of the cells in HTML, `left` or `right`
    first: int | None = None  # how many of the shown rows are before the cut. None: all of them.

    def __str__(self) -> str:
        above, cut, below = self._cut()
        widths = [max(map(len, column)) for column in zip(*above, *below, strict=True)]

        def line(row: Sequence[str]) -> str:
            return "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

        middle = [f"  {cut}"] if cut else []
        return "\n".join([self.title, *map(line, above), *middle, *map(line, below)])

    def _repr_html_(self) -> str:
        above, cut, below = self._cut()

        def row(cells: Sequence[str], tag: str = "td") -> str:
            style = f"text-align:{self.align};white-space:nowrap"
            marked = [f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell in cells]
            return f"<tr>{''.join(marked)}</tr>"

        middle = f'<tr><td colspan="{len(self.columns)}">{cut}</td></tr>' if cut else ""
        body = "".join([*map(row, above), middle, *map(row, below)])
        table = f"<table><thead>{row(self.columns, 'th')}</thead><tbody>{body}</tbody></table>" if self.rows else ""
        return f"<div><p>{html.escape(self.title)}</p>{table}</div>"

    def _cut(self) -> tuple[Sequence[Sequence[str]], str, Sequence[Sequence[str]]]:
        """The rows before the cut, what is written there, and the rows after it."""
        hidden = len(self.rows) - self.most
        if hidden <= 0:
            return self.rows, "", ()
        first = self.most if self.first is None else self.first
        return self.rows[:first], f"... and {hidden} more", self.rows[first + hidden :]


def say(message: str, who: str = "jaxpar") -> None:
    """Write one line to standard error, with a name before it. A notebook shows it on red."""
    print(f"{who}: {message}", file=sys.stderr, flush=True)


def say_news(message: str) -> None:
    """Write one line to standard output, with a name before it. For success messages."""
    print(f"jaxpar: {message}", flush=True)


def say_before_exit(line: str) -> None:
    """Write a line to standard error and flush both streams."""
    # If another thread holds their locks for a second, the line is written past them.

    def write() -> None:
        sys.stdout.flush()
        sys.stderr.write(line + "\n")  # one call, since other threads write too
        sys.stderr.flush()

    thread = threading.Thread(target=write, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter shuts down and starts no threads
        return write()
    thread.join(1.0)
    if thread.is_alive():
        os.write(2, line.encode() + b"\n")


# What is between the line of a user and a warning: jaxpar, JAX that traces a loss, and Python's own wrappers.
_BETWEEN = ("jaxpar", "jax", "jaxlib", "contextlib", "functools", "concurrent", "threading")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that led here."""
    # Python 3.12 has `skip_file_prefixes` for it, and 3.11 has not.
    level, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=2 if frame is None else level)  # a thread has no line of the user


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


# Words of messages.


def describe(value: Any) -> str:
    """What came, in a few words: `float32[2,3]`, `a list of 3`, `None`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except Exception:  # as of an int of 5,000 digits
        text = ""
    return text if 0 < len(text) < 40 else f"a {type(value).__name__}"


def shorten(items: Sequence[object], most: int = 8) -> str:
    """The items as a list, cut after `most`."""
    shown = ", ".join(map(str, items[:most]))
    return f"[{shown}, ... {len(items)} in all]" if len(items) > most else f"[{shown}]"


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """The end of a message: the nearest known word, as in `; did you mean --epochs?`, or nothing."""
    near = difflib.get_close_matches(str(word), list(choices), 1)
    return f"; did you mean {near[0]}?" if near else ""


def plural(count: int, noun: str) -> str:
    """A count and its noun: `1 key`, `1,200 keys`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# Names of parameters, and texts that must fit where they are shown.


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern is of a parameter, or of a module around it."""
    keys, count = path.split("/"), pattern.count("/") + 1
    modules = ("/".join(keys[at : at + count]) for at in range(len(keys) - count + 1))
    return any(fnmatch.fnmatchcase(name, pattern) for name in (path, *modules))


def cut_middle(text: str, width: int) -> str:
    """A text of at most `width` characters. What is too long loses its middle."""
    if len(text) <= width:
        return text
    first = width // 2
    return f"{text[:first]}…{text[len(text) - (width - first - 1) :]}" if width > 1 else "…"[:width]


def printable(text: str) -> str:
    """The text with its control characters written as Python does, and without half of a surrogate pair."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


def for_terminal(text: str, most: int = 1 << 16) -> str:
    """The text as a terminal may show it: what cannot be printed is escaped, and what is longer than `most` is cut."""
    # Stricter than `printable`, for what other processes and files say: a mark that turns the direction is escaped too.
    text = text if len(text) < most else text[:most] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def columns(text: str) -> int:
    """The columns that a text takes on a terminal. East Asian letters take two, marks above others none."""
    if text.isascii():
        return len(text)
    wide = (2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)
    return sum(wide)


def fit(text: str, width: int) -> str:
    """A text of at most `width` columns, see `cut_middle`."""
    most = width
    while columns(shown := cut_middle(text, most)) > width:
        most -= 1
    return shown
