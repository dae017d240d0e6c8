"""`plot_network`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._calls import Call
from ._dot import Options
from ._fold import Rule
from ._style import THEMES
from ._trace import trace

if TYPE_CHECKING:
    from ._render import Plot


def plot_network(
    fn: Callable[..., Any],
    *args: Any,
    title: str = "plot",
    hide_weights: bool = True,
    node_attrs: Mapping[str, str] | None = None,
    depth: int | None = None,
    params_argnums: int | Sequence[int] | None = 0,
    max_nodes: int | None = 200,
    repeats: bool = True,
    rules: Sequence[Rule | Call] = (),
    heat: str | None = None,
    theme: str = "light",
    legend: bool = True,
    time_limit: float = 30.0,
    **kwargs: Any,
) -> Plot:
    if theme not in THEMES:
        raise ValueError(f"plot_network: theme must be one of {', '.join(THEMES)}, got {theme!r}")
    if heat not in (None, "flops", "bytes"):
        raise ValueError(f"plot_network: heat must be None, 'flops' or 'bytes', got {heat!r}")
    graph = trace(
        fn, *args, params_argnums=params_argnums, depth=depth, max_nodes=max_nodes, repeats=repeats, rules=rules,
        **kwargs,
    )  # fmt: skip
    from ._render import Plot

    return Plot(graph, Options(title, hide_weights, node_attrs, heat, theme, legend), time_limit)
