"""The HTML of a picture on which nothing moves, in the colours of its reader."""

from __future__ import annotations

import dataclasses
import html

from .._draw.style import THEMES
from .page import asset, colours, script

_SHAPES = ":is(polygon,ellipse,path,polyline)"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def to_still_page(picture: str, table: str, title: str, theme: str) -> str:
    """One HTML file that needs nothing else. Without scripts it has the colours of the system.

    Args:
        picture: SVG of Graphviz in the colours of `theme`, or HTML that says why there is none.
        table: HTML below it.
        title: the name of the page.
        theme: "light" for the colours of the reader, "dark" for always dark.
    """
    svg = picture[picture.find("<svg") :] if "<svg" in picture else picture
    plot = ' data-plot="dark" data-theme="dark"' if theme == "dark" else ""
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += f"<title>{html.escape(title)}</title><style>{_colours_of(theme)}{asset('still.css')}</style>"
    body = f"{svg}{table}<script>{script('theme.js')}{script('still.js')}</script>"
    return f'<!DOCTYPE html><html lang="en"{plot}><head>{head}</head><body>{body}</body></html>'


def _colours_of(theme: str) -> str:
    """Rules that give the reader's colours to what Graphviz drew in those of a theme. Boxes keep theirs."""
    known = dataclasses.asdict(THEMES[theme])
    rules = [f'text[fill="{known[name]}"]{{fill:var(--{name})}}' for name in ("text", "line", "carry")]
    for name, colour in known.items():
        rules.append(f'{_SHAPES}[fill="{colour}"]{{fill:var(--{name})}}')
        rules.append(f'{_SHAPES}[stroke="{colour}"]{{stroke:var(--{name})}}')
    dark = colours().split("data-theme=dark]", 1)[1].strip()
    return colours() + f"@media (prefers-color-scheme:dark){{:root:not([data-theme]){dark}}}\n" + "".join(rules)
