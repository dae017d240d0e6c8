"""The graph while it is made: drafts, which collapsing merges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .._graph import Sizes
from .._read.raw import Raw
from .._scopes import Path, common_prefix


@dataclass(slots=True, eq=False)
class Draft:
    """A node in the making.

    Attributes:
        at: its place in the trace. Inputs are below 0.
        value: the array it is known by.
        weights: the parameters that it reads.
        layers: how many it stands for, where a scope is closed.
        leaves: of an input with several arrays, those arrays.
        eqns: the ids of its equations, those of all copies.
        own: how many of the weights are of the first copy, where it is repeated.
        forward: of a backward draft, the draft whose gradient it is.
        tied: whether its parameters are another layer's.
        path: the modules around it and its own name, from the outside in. Empty where nothing names it.

    The others are as in a `Node`.
    """

    at: int
    op: str
    detail: str
    value: int
    scope: Path = ()
    source: str = ""
    flops: int = 0
    bytes: int = 0
    equations: int = 0
    weights: list[int] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    repeat: int = 1
    forward: Draft | None = None
    name: str = ""
    own: int | None = None
    layers: int = 1
    leaves: list[int] = field(default_factory=list)
    eqns: list[int] = field(default_factory=list)
    tied: bool = False
    path: tuple[str, ...] = ()

    @property
    def layer(self) -> Draft:
        """The layer that this is, or whose gradient it is."""
        return self if self.forward is None else self.forward

    def add(self, others: Iterable[Draft]) -> None:
        """Add what others cost, read and return."""
        same = [self, *others]
        self.flops = sum(draft.flops for draft in same)
        self.bytes = sum(draft.bytes for draft in same)
        self.weights = list(dict.fromkeys(weight for draft in same for weight in draft.weights))
        self.outputs = [output for draft in same for output in draft.outputs]
        self.eqns = [eqn for draft in same for eqn in draft.eqns]


@dataclass(slots=True)
class Net:
    """Drafts, and the edges between them.

    Attributes:
        edges: (from, to, value), in order.
        carries: as `edges`, from what computes a value in one pass of a loop to what reads it in the next.
        state: weights that only an optimizer reads. They are no parameters of the network.
        repeats: the number of copies of each repeated scope.
        sizes: the bytes of its arrays, before anything is collapsed.
    """

    raw: Raw
    drafts: list[Draft]
    edges: dict[tuple[int, int, int], None]
    state: set[int] = field(default_factory=set)
    repeats: dict[Path, int] = field(default_factory=dict[Path, int])
    carries: dict[tuple[int, int, int], None] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def layers(self) -> list[Draft]:
        """The drafts that compute something."""
        return [draft for draft in self.drafts if draft.op != "input"]

    def copy(self) -> Net:
        """The same with drafts of its own, which closing and naming change. The equations are shared."""
        made = {id(draft): replace(draft) for draft in self.drafts}
        for draft in made.values():
            draft.forward = made.get(id(draft.forward), draft.forward)
        return replace(self, drafts=list(made.values()), edges=dict(self.edges), repeats=dict(self.repeats))

    def sources(self) -> dict[int, set[int]]:
        """The drafts that each draft reads."""
        found: dict[int, set[int]] = {}
        for source, target, _ in self.edges:
            found.setdefault(target, set()).add(source)
        return found

    def merge(self, groups: list[tuple[list[Draft], Draft]]) -> None:
        """Replace each group of drafts by one. Edges inside a group vanish."""
        self.drafts = sorted([*self.drafts, *(new for _, new in groups)], key=lambda draft: draft.at)
        self.substitute({draft.at: new for group, new in groups for draft in group})

    def substitute(self, into: dict[int, Draft]) -> None:
        """Drop drafts for what they become, and send their edges there."""
        self.drafts = [draft for draft in self.drafts if into.get(draft.at, draft) is draft]
        for draft in self.drafts:
            if draft.forward is not None:
                draft.forward = into.get(draft.forward.at, draft.forward)
        self.redirect({at: new.at for at, new in into.items()})

    def redirect(self, names: dict[int, int]) -> None:
        """Send the ends of edges to other drafts. Loops vanish."""
        edges: dict[tuple[int, int, int], None] = {}
        for source, target, value in self.edges:
            source, target = names.get(source, source), names.get(target, target)
            if source != target:
                edges[source, target, value] = None
        self.edges = edges
        ends = ((names.get(s, s), names.get(t, t), s == t and s not in names, value) for s, t, value in self.carries)
        self.carries = {(s, t, value): None for s, t, own, value in ends if s != t or own}


def shared_scope(*groups: list[Draft]) -> Path:
    """The scope that all drafts of all groups are in."""
    return common_prefix(draft.scope for group in groups for draft in group)
