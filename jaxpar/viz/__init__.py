"""Any JAX function as a picture, a table and plain data.

    plot_network(fn, *args)     a `graphviz.Digraph` that a notebook shows as a page and `save` writes
    print_summary(fn, *args)    the table of layers
    trace(fn, *args)            the `Graph` of `Node`s and `Edge`s
    diff((f, args), (g, args))  two networks as one picture, with what changed in colour
    plot_step(step, *args)      what a training step does on its devices, from its compiled program
    trace_step(step, *args)     the `StepGraph` of the same

A function goes one way:

    _trace      its jaxpr, and the passes below in their order
    _read       nested jaxprs as one flat list of equations
    _fold       equations as layers: known calls, patterns, small helpers, gradients
    _patterns   what each pattern folds: norms, attention, losses, ...
    _layout     layers as nodes and edges with names, repeats and deep scopes collapsed
    _graph      the `Graph`
    _draw       dot text, the picture, the table
    _diff       two graphs matched and drawn as one
    _page       the interactive page
    _program    a compiled program: instructions, collectives, live bytes
    _step       a training step, from its trace and its compiled program

`CALLS` and `RULES` are what is folded into one layer. `rules=[Call("my_attention", "Attention")]` folds a function of
your own. A `Rule` matches a pattern of cells and returns a `Fold`.
"""

from ._diff.changes import Change as Change
from ._diff.compare import diff as diff
from ._diff.result import Diff as Diff
from ._draw.render import RenderError as RenderError
from ._fold.known import CALLS as CALLS, Call as Call
from ._fold.patterns import Fold as Fold, Rule as Rule
from ._fold.table import RULES as RULES
from ._graph import Edge as Edge, Graph as Graph, Node as Node
from ._lazy import *  # noqa: F403  `Plot`, which loads graphviz
from ._plot import plot_network as plot_network
from ._sizes import Sizes as Sizes
from ._step.graph import (
    Collective as Collective,
    StepArgument as StepArgument,
    StepEdge as StepEdge,
    StepGraph as StepGraph,
    StepLayer as StepLayer,
    StepMemory as StepMemory,
    StepPart as StepPart,
)
from ._step.plot import plot_step as plot_step
from ._step.step import trace_step as trace_step
from ._summary import print_summary as print_summary
from ._trace import trace as trace
