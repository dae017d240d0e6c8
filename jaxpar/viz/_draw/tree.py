"""The rows of the table: modules with their sums, and the layers in them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..._core.arguments import did_you_mean
from .._graph import BACKWARD, Graph, Node, scope_stem
from .labels import output_text


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Attributes:
        level: how many modules it is in.
        name, kind: of the layer, "conv1" and "Convolution 3x3/1, 20". A module has no kind.
        shape: its output, "256x26x26x20 float32".
        params, flops: of a module those of all that is in it.
        trained: how many of the params are trained.
        previous: the layers that it reads.
        source: where the user's code makes it.
        layer: the name of its node. "" for a module.
        repeat: the number of copies that the row stands for.
    """

    level: int
    name: str
    kind: str
    shape: str
    params: int
    flops: int
    trained: int
    previous: tuple[str, ...] = ()
    source: str = ""
    layer: str = ""
    repeat: int = 1


@dataclass(slots=True)
class _Module:
    """What is in a scope, in order."""

    path: tuple[str, ...]
    items: list[Node | _Module] = field(default_factory=list)
    inner: dict[str, _Module] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """All nodes, those of the modules in it too."""
        found: list[Node] = []
        for item in self.items:
            found += item.nodes() if isinstance(item, _Module) else [item]
        return found


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the rows say beside the nodes: who reads whom, and how many parameters of each layer are trained."""

    previous: dict[str, tuple[str, ...]]
    trained: dict[str, int]


def rows(graph: Graph, depth: int | None = None, frozen: frozenset[str] = frozenset()) -> list[Row]:
    """The rows of a graph, modules before what is in them.

    Args:
        graph: with all its scopes open.
        depth: how many levels of modules are open. Scopes around the whole function do not count. None for all.
        frozen: the names of parameters that are not trained, besides those that the graph knows.
    """
    top = _Module(())
    for node in graph.nodes:
        module = top
        for name in node.scope:
            if name not in module.inner:
                module.inner[name] = _Module((*module.path, name))
                module.items.append(module.inner[name])
            module = module.inner[name]
        module.items.append(node)
    facts = _Facts(_previous(graph), _trained(graph, frozen))
    return _rows_of(top, 0, depth, facts)


def frozen_names(graph: Graph, patterns: Sequence[str]) -> frozenset[str]:
    """The names of the parameters that one of the patterns matches.

    A pattern is of a parameter ("conv1/weight", "*/bias") or of what is around it ("conv1").

    Raises:
        ValueError: a pattern matches no parameter.
    """
    known = {weight.name: parameter_path(weight.name) for weight in graph.weights}
    found: set[str] = set()
    for pattern in patterns:
        parts = pattern.count("/") + 1
        matched = {n for n, path in known.items() if any(fnmatch.fnmatchcase(p, pattern) for p in _tails(path, parts))}
        if not matched:
            some = ", ".join(list(known.values())[:4])
            near = did_you_mean(pattern, {part for path in known.values() for part in (path, path.rpartition("/")[0])})
            raise ValueError(f"print_summary: frozen={pattern!r} matches no parameter; some are {some}{near}")
        found |= matched
    return frozenset(found)


def parameter_path(name: str) -> str:
    """ "conv1/weight" for params['conv1']['weight']."""
    keys = re.findall(r"\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]|\.(\w+)", name)
    return "/".join(quoted or number or attribute for quoted, number, attribute in keys) or name


def _tails(path: str, count: int) -> Iterable[str]:
    """The path, and every run of `count` keys in it."""
    keys = path.split("/")
    return (path, *("/".join(keys[at : at + count]) for at in range(len(keys) - count + 1)))


def _previous(graph: Graph) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for edge in graph.edges:
        if not edge.carry:  # it goes back to an earlier layer
            found.setdefault(edge.target, []).append(edge.source)
    return {name: tuple(sources) for name, sources in found.items()}


def _trained(graph: Graph, frozen: frozenset[str]) -> dict[str, int]:
    """Elements of the trained parameters that each node is the first to use."""
    sizes = {weight.name: weight.params for weight in graph.weights}
    counted: set[str] = set()
    found: dict[str, int] = {}
    for node in graph.nodes:
        new = dict.fromkeys(name for name in node.weights if name not in counted) if node.params else {}
        counted.update(new)
        found[node.name] = sum(sizes[name] for name in new if name in graph.sizes.trained - frozen)
    return found


def _rows_of(module: _Module, level: int, depth: int | None, facts: _Facts) -> list[Row]:
    found: list[Row] = []
    for item in module.items:
        if isinstance(item, Node):
            found.append(_layer(item, level, facts))
        elif _is_one_layer(item):
            found += [_layer(node, level, facts, item.path[-1]) for node in item.nodes()]
        else:
            inner = None if depth is None else depth - (not _is_around_all(module, item))
            found.append(_module(item, level, facts))
            found += [] if inner is not None and inner < 0 else _rows_of(item, level + 1, inner, facts)
    return found


def _is_one_layer(module: _Module) -> bool:
    """Whether a module is one layer, or its gradient, or both."""
    forward = sum(not node.is_backward for node in module.nodes())
    return not module.inner and (forward == 1 or (not forward and len(module.items) == 1))


def _is_around_all(outer: _Module, inner: _Module) -> bool:
    """Whether a scope has everything that is computed in the scope around it."""
    return all(item is inner or (isinstance(item, Node) and item.op == "input") for item in outer.items)


def _layer(node: Node, level: int, facts: _Facts, name: str = "") -> Row:
    return Row(
        level,
        name + (BACKWARD if node.is_backward else "") if name else without_scopes(node.name, node.scope),
        f"{node.kind} {node.detail}".strip(),
        output_text(node),
        node.params,
        node.flops,
        facts.trained[node.name],
        tuple(without_scopes(name, node.scope) for name in facts.previous.get(node.name, ())),
        node.source,
        node.name,
        node.repeat,
    )


def _module(module: _Module, level: int, facts: _Facts) -> Row:
    nodes = module.nodes()
    forward = [node for node in nodes if not node.is_backward] or nodes
    return Row(
        level,
        module.path[-1] + (BACKWARD if all(node.is_backward for node in nodes) else ""),
        "",
        output_text(forward[-1]),
        sum(node.params for node in nodes),
        sum(node.flops for node in nodes),
        sum(facts.trained[node.name] for node in nodes),
    )


def without_scopes(name: str, scope: tuple[str, ...]) -> str:
    """A name without the scopes that it begins with. The rows above say them."""
    keys = name.split("/")
    for part in scope:
        same = scope_stem(keys[0]) == scope_stem(part) if "×" in part else keys[0] == part
        keys = keys[1:] if same and len(keys) > 1 else keys
    return "/".join(keys)
