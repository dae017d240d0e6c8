"""Attributes and strings of the dot language."""

from __future__ import annotations

from ..._core.text import printable


class Html(str):
    """One of Graphviz's HTML-like labels. Every other text is quoted, whatever it looks like."""


def quote(text: str) -> str:
    r"""A quoted string.

    >>> print(quote('a "b"'))
    "a \"b\""
    """
    lines = [printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'


def attributes(**values: object) -> str:
    """The attributes of a graph, node or edge.

    >>> print(attributes(label=Html("<<B>x</B>>"), tooltip="<b>", penwidth=2))
    [label=<<B>x</B>> tooltip="<b>" penwidth="2"]
    """
    shown = {key: value if isinstance(value, Html) else quote(str(value)) for key, value in values.items()}
    return "[" + " ".join(f"{key}={value}" for key, value in shown.items()) + "]"
