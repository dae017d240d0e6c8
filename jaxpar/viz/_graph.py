"""The plain data that the picture and the table are drawn from.

Users get these: `trace` returns a `Graph`. Everything before it works on `Draft`s, see `_layout.net`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .._core.text import plural

BACKWARD = " (backward)"
FAILS_AT = "fails at "  # before the place of a line that raises


@dataclass(frozen=True, slots=True)
class Sizes:
    """The memory of a function's arrays, in bytes.

    Attributes:
        params: bytes of the used parameters, each counted once, with all copies for the devices of a `jax.pmap`.
        inputs: bytes of the other arguments, except the optimizer state.
        optimizer: bytes of the arguments that only an optimizer reads. 0 without a gradient.
        forward, backward: bytes of the first output of each layer and of each gradient. A scan counts each iteration.
        trained: the names of the trained parameters. In a function without a gradient, all parameters count as trained.
            In a function with gradients, a parameter counts as trained if its gradient or its new value depends on the
            backward pass, also if that gradient is multiplied by zero.
        unused: elements of parameters and optimizer state that the function does not read.
        state: bytes of arrays that no optimizer trains, such as running means.
    """

    params: int = 0
    inputs: int = 0
    optimizer: int = 0
    forward: int = 0
    backward: int = 0
    trained: frozenset[str] = frozenset()
    unused: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.params + self.state + self.inputs + self.optimizer + self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Node:
    """One layer of a network, or one of its inputs.

    Attributes:
        name: unique in the graph. The name of the parameters or module ("conv1"), or else the kind and a number
            ("pooling0").
        op: the kind of layer: "Convolution", "FullyConnected", "Activation", ..., "input", "weight", or the name of an
            unfolded JAX function or primitive. The gradient of a layer ends in " (backward)".
        detail: the rest of the label ("3x3/1, 20", "relu", "avg, 2x2/2x2"). For a parameter, its path
            ("conv1/weight"). May be empty.
        shape, dtype: shape and dtype of the first output, on one device inside pmap and shard_map. An input of several
            arrays has no shape, and a dtype only if the arrays share it.
        params: elements of its parameters. A weight shared by two layers counts in the first one. Arrays that no
            optimizer trains count in `state`.
        flops: floating-point operations as XLA counts them, without exp, tanh and the like.
        bytes: bytes of the distinct arrays that it reads and writes.
        scope: the enclosing modules, named scopes, jitted functions and loops, outermost first.
        source: "file.py:12 in function", the line of the user's code.
        weights: the names of the parameters that it uses.
        repeat: the number of copies that are drawn as one. Params, flops and bytes count all copies.
        equations: the number of folded jaxpr equations in each copy.
        outputs: the names of its outputs that are results of the function.
        leaves: "name: dtype[shape]" for each array of an input with several arrays.
        state: elements of its arrays that no optimizer trains, such as running means. A shared array counts once.
        output_bytes: bytes of its first output, in each copy and in each iteration of the loops around it.
        kept_bytes: bytes that it computes and the backward pass reads, before XLA's fusion. 0 without a gradient.
        input_shapes: the shapes of the arrays that it reads of other nodes, without parameters.
        sends: the collective that it is, or those inside of it ("psum"). Empty where nothing is sent.
        copy_weights: how many of `weights` one copy uses. They are the first ones.
    """

    name: str
    op: str
    detail: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    params: int = 0
    flops: int = 0
    bytes: int = 0
    scope: tuple[str, ...] = ()
    source: str = ""
    weights: tuple[str, ...] = ()
    repeat: int = 1
    equations: int = 0
    outputs: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    state: int = 0
    output_bytes: int = 0
    kept_bytes: int = 0
    input_shapes: tuple[tuple[int, ...], ...] = ()
    sends: tuple[str, ...] = ()
    copy_weights: int = 0

    @property
    def kind(self) -> str:
        """`op` without the " (backward)" of a gradient."""
        return self.op.removesuffix(BACKWARD)

    @property
    def is_backward(self) -> bool:
        """Whether this is the gradient of a layer."""
        return self.op.endswith(BACKWARD)


@dataclass(frozen=True, slots=True)
class Edge:
    """An array that flows between two nodes, or several of them.

    Attributes:
        source, target: the names of the nodes.
        shape, dtype: shape and dtype of the source's first output, or else of the largest array.
        label: the array's name in its argument ("image"), if the source is an input of several arrays.
        arrays: the number of arrays.
        carry: whether the edge goes back, from one iteration of a loop to the next. All other edges go to later nodes.
    """

    source: str
    target: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    label: str = ""
    arrays: int = 1
    carry: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """A function as a graph.

    Attributes:
        nodes: inputs and layers, in an order in which they can be computed.
        edges: the arrays between them.
        weights, weight_edges: the parameters as nodes, and their edges to layers.
        total_params: elements of the used parameters, each counted once.
        equations: the number of equations of the jaxpr, nested ones included.
        scopes: each repeated scope, and the number of its copies.
        sizes: the bytes of its arrays, and the names of trained parameters.
        uncounted: the primitives whose FLOPs are unknown and missing in the sums.
        total_state: elements of the arrays that no optimizer trains, each counted once.
        total_constants: elements of captured arrays other than parameters and scalars, each counted once.
        copies: on how many devices the parameters are, where `jax.pmap` is given them with an axis for its devices. All
            counts are those of one device then.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    weights: tuple[Node, ...] = ()
    weight_edges: tuple[Edge, ...] = ()
    total_params: int = 0
    equations: int = 0
    scopes: tuple[tuple[tuple[str, ...], int], ...] = ()
    sizes: Sizes = field(default_factory=Sizes)
    uncounted: tuple[str, ...] = ()
    total_state: int = 0
    total_constants: int = 0
    copies: int = 1

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that are arguments of the function."""
        return tuple(node for node in self.nodes if node.op == "input")

    @property
    def layers(self) -> tuple[Node, ...]:
        """The nodes that compute something."""
        return tuple(node for node in self.nodes if node.op != "input")

    @property
    def total_flops(self) -> int:
        """The FLOPs of all layers."""
        return sum(node.flops for node in self.nodes)

    def __getitem__(self, name: str) -> Node:
        """The node of this name.

        Raises:
            KeyError: there is none. The message lists the names.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"no node named {name!r}; the nodes are {[node.name for node in self.nodes]}")

    def __repr__(self) -> str:
        counts = {
            "input": len(self.inputs),
            "layer": len(self.layers),
            "edge": len(self.edges),
            "parameter": self.total_params,
            "equation": self.equations,
        }
        return f"Graph({', '.join(plural(count, noun) for noun, count in counts.items())})"


def parameters(graph: Graph) -> str:
    """How many parameters there are: "816 parameters", "816 parameters on each of 4 devices"."""
    return plural(graph.total_params, "parameter") + on_each_device(graph)


def on_each_device(graph: Graph) -> str:
    """ " on each of 4 devices" where a `pmap` is given so many copies of the parameters. Else empty."""
    return f" on each of {graph.copies} devices" if graph.copies > 1 else ""


def human(number: float, unit: str) -> str:
    """A number with three digits and a decimal prefix.

    >>> human(1_040_000_000, "FLOP"), human(516_272, "B")
    ('1.04 GFLOP', '516 kB')
    """
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:,.0f} P{unit}"
