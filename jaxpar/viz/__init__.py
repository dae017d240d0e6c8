"""Any JAX function as a picture, a table, or plain data.

    plot_network(fn, *args)     a `graphviz.Digraph` that a notebook shows as a page and `save` writes
    print_summary(fn, *args)    the table of layers
    trace(fn, *args)            the `Graph` of `Node`s and `Edge`s
    diff((f, args), (g, args))  two networks as one picture, with what changed in colour
    plot_step(step, *args)      a picture of a training step on its devices, from its compiled program
    trace_step(step, *args)     the `StepGraph` of that picture
    first_nonfinite(fn, *args)  runs it once: the layer that makes the first NaN or infinity is red

A function passes through these modules:

    _trace      runs the passes below in order
    _function   checks the options and makes the jaxpr, also of the part of a function before it raises
    _read       flattens nested jaxprs into one list of equations
    _fold       folds equations into layers: known calls, patterns that are functions, small helpers, gradients
    _layout     makes nodes and edges with names, and collapses repeats and deep scopes
    _graph      the `Graph`
    _draw       dot text, the picture, the table
    _diff       matches two graphs and draws them as one
    _page       the interactive page
    _program    a compiled program: instructions, collectives, live bytes
    _step       a training step, from its trace and its compiled program
    _nonfinite  a run of the equations, each of which looks for a NaN in its result

`CALLS` and `RULES` list the functions and patterns that are folded into one layer. `rules=[Call("my_attention",
"Attention")]` folds your own function, and `rules=[Pattern("SwiGLU", lambda x, y: jax.nn.silu(x) * y)]` folds all
operations that compute this function. A `Rule` matches a pattern of cells and returns a `Fold`. A later release removes
`Rule` and `Fold`.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from ._diff.changes import Change as Change, Diff as Diff
from ._draw.render import RenderError as RenderError
from ._fold.calls import CALLS as CALLS, Call as Call
from ._fold.known import RULES as RULES
from ._fold.templates import Fold as Fold, Pattern as Pattern, Rule as Rule
from ._graph import Edge as Edge, Graph as Graph, Node as Node, Sizes as Sizes
from ._lazy import *  # `Plot`, which loads graphviz
from ._nonfinite.find import first_nonfinite as first_nonfinite
from ._nonfinite.found import Nonfinite as Nonfinite
from ._program.hlo import cycles_of as _cycles_of, program_of as _program_of
from ._program.memory import StepMemory as StepMemory
from ._program.sends import sends_of as _sends_of
from ._read.costs import body_cost as _body_cost
from ._step.graph import (
    Collective as Collective,
    StepArgument as StepArgument,
    StepEdge as StepEdge,
    StepGraph as StepGraph,
    StepLayer as StepLayer,
    StepPart as StepPart,
)
from ._step.step import (
    plot_drawn as _plot_drawn,
    plot_step as plot_step,
    read_step as _read_step,
    trace_step as trace_step,
)
from ._trace import (
    diff as diff,
    plot_marked as _plot_marked,
    plot_network as plot_network,
    print_summary as print_summary,
    trace as trace,
)
