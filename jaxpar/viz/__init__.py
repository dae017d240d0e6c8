"""See any JAX function: `plot_network`, `print_summary` and the `trace` that both are drawn from."""

from __future__ import annotations

from ._calls import CALLS as CALLS, Call as Call
from ._fold import RULES as RULES, Fold as Fold, Rule as Rule
from ._graph import Edge as Edge, Graph as Graph, Node as Node
from ._trace import trace as trace
from ._plot import plot_network as plot_network
