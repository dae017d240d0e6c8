"""Python as text, in the form that ruff and Black give it."""

from __future__ import annotations

import itertools
import re

WIDTH = 88  # of a line, the default of both
_STRING_OR_BRACKET = re.compile(r""" "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | [()\[\]{},] """, re.VERBOSE)


def text_of(value: object) -> str:
    """A number, a string or a tuple of these as Python. Infinity and NaN are those of `math`."""
    match value:
        case tuple():
            return f"({', '.join(map(text_of, value))}{',' * (len(value) == 1)})"
        case float():
            return re.sub("inf|nan", r"math.\g<0>", repr(value)).replace("e+", "e")
        case str():
            content = repr(f'"{value}')[2:-1]  # of a string between single quotes, which `repr` makes of this one
            if value.count('"') > value.count("'"):
                return f"'{content}'"
            return '"' + content.replace("\\'", "'").replace('"', '\\"') + '"'
        case _:
            return repr(value)


def formatted(text: str) -> str:
    """The text with its long lines wrapped. Such a line is a whole statement, or a comment or text that stays long."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")))
        lines += [indent + part for part in _wrapped(line[len(indent) :], WIDTH - len(indent))]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    """A statement or an item of one, in one line if it fits. Else what its last brackets hold has lines of its own."""
    if len(text) <= width:
        return [text]

    # The last brackets that are in no others, and the commas in them.
    depth, opened, closed, commas = 0, 0, 0, list[int]()
    for token in _STRING_OR_BRACKET.finditer(text):
        depth -= token[0] in ")]}"
        if depth == 0 and token[0] in "([{":
            opened, commas = token.end(), []
        elif depth == 0 and token[0] in ")]}":
            closed = token.start()
        elif depth == 1 and token[0] == ",":
            commas.append(token.start())
        depth += token[0] in "([{"
    before, content, after = text[:opened], text[opened:closed], text[closed:]

    # A statement whose brackets come too late, or that has none, gets some around its expression.
    if (not closed or len(before) > width) and (start := re.match(r"return |[\w, ]+ = ", text)):
        return [f"{start[0]}(", *_indented(_wrapped(text[start.end() :], width - 4)), ")"]
    if not closed:
        return [text]

    # The arguments of a call are in one line if they fit there. Parameters and items of a tuple or list never are.
    is_call = re.search(r"\w\($", before) and not before.startswith("def ")
    if (is_call and len(content) <= width - 4) or not commas:
        return [before, *_indented(_wrapped(content, width - 4)), after]
    places = itertools.pairwise([opened, *(at + 1 for at in commas), closed])
    items = [f"{item.strip().removesuffix(',')}," for a, b in places if (item := text[a:b])]
    return [before, *(line for item in items for line in _indented(_wrapped(item, width - 4))), after]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
