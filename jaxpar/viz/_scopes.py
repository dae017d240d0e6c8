"""The scopes around layers, what several of them share, and the tree that they make.

`Scope` is a text that keeps what it was made of. A path of scopes is where a layer is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

_Part = TypeVar("_Part")
_Leaf = TypeVar("_Leaf")
_END = re.compile(r"((?<=\w)[._ ]|(?<=[^\W\d]))\d+([–-]\d+)?$")
# "module" for modules, named scopes and functions. "region" for a loop, branch, device map, remat or a custom gradient
# without a name. "part" for layers that nothing names, called by what they are.
Kind = Literal["module", "region", "part"]


class Scope(str):
    """A module, a named scope, a loop or a part of a network around a layer.

    It is the text that a user sees. What that was made of is kept beside it, and never read from it again.

    >>> Scope("layers.1–5", times=5, call=2), Scope("layers.1–5", times=5).stem, Scope("scan", "region", 4)
    ('layers.1–5 ×5 (2)', 'layers', 'scan ×4')
    """

    __slots__ = ("call", "kind", "name", "times")
    name: str  # without what follows it
    kind: Kind
    times: int | None  # how often a loop runs, or the number of copies that are drawn as one
    call: int  # 2 where a module is called for the second time

    def __new__(cls, name: str, kind: Kind = "module", times: int | None = None, call: int = 1) -> Scope:
        """The text of these."""
        counted = name if times is None else f"{name} ×{times}"
        made = super().__new__(cls, counted if call == 1 else f"{counted} ({call})")
        made.name, made.kind, made.times, made.call = name, kind, times, call
        return made

    @classmethod
    def of(cls, text: str) -> Scope:
        """A scope as it is. A text of the user's is a module."""
        return text if isinstance(text, Scope) else cls(text)

    def numbered(self, call: int) -> Scope:
        """The same in another call."""
        return Scope(self.name, self.kind, self.times, call)

    @property
    def is_region(self) -> bool:
        """Whether this is a loop, a branch, a device map or the like."""
        return self.kind == "region"

    @property
    def stem(self) -> str:
        """The name without the number at its end. The numbers in a part's name count what is in it."""
        return self.name if self.kind == "part" else _END.sub("", self.name)


Path = tuple[Scope, ...]


def unique(scope: Scope, is_taken: Callable[[Scope], Any]) -> Scope:
    """The scope, with a number where it is taken."""
    while is_taken(scope):
        scope = scope.numbered(scope.call + 1)
    return scope


@dataclass(slots=True)
class Block(Generic[_Leaf]):
    """A scope and what is in it, leaves and blocks in order. The outermost one has an empty path."""

    path: Path = ()
    items: list[_Leaf | Block[_Leaf]] = field(default_factory=list[Any])

    def all_leaves(self) -> Iterator[_Leaf]:
        """The leaves in it, at any depth."""
        for item in self.items:
            if isinstance(item, Block):
                yield from item.all_leaves()
            else:
                yield item


def nest(leaves: Iterable[tuple[_Leaf, Iterable[Path]]]) -> Block[_Leaf]:
    """The tree of leaves, each given with the paths of the blocks around it, from the outside in."""
    top = Block[_Leaf]()
    blocks: dict[Path, Block[_Leaf]] = {}
    for leaf, around in leaves:
        inside = top
        for path in around:
            if path not in blocks:
                blocks[path] = Block(path)
                inside.items.append(blocks[path])
            inside = blocks[path]
        inside.items.append(leaf)
    return top


def paths_of(scope: tuple[str, ...]) -> list[Path]:
    """A scope and those around it, from the outside in."""
    scopes = tuple(map(Scope.of, scope))
    return [scopes[:length] for length in range(1, len(scopes) + 1)]


def common_prefix(paths: Iterable[tuple[_Part, ...]]) -> tuple[_Part, ...]:
    """What all of these paths begin with."""
    paths = list(paths)
    prefix: list[_Part] = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        prefix.append(level[0])
    return tuple(prefix)


def main_prefix(paths: Iterable[tuple[tuple[_Part, ...], int]]) -> tuple[_Part, ...]:
    """What the paths begin with that have more than half of the weight.

    >>> main_prefix([(("net", "attn"), 90), (("net", "attn", "mask"), 5), (("net",), 5)]), main_prefix([((), 1)])
    (('net', 'attn'), ())
    """
    inside: dict[tuple[_Part, ...], int] = {}
    for path, weight in paths:
        inside[path] = inside.get(path, 0) + weight
    # One name after the other: the heaviest, as long as it has more than half of all.
    total, prefix = sum(inside.values()), tuple[_Part, ...]()
    while len(inside) > 1:
        names = Counter[_Part]()
        for path, weight in inside.items():
            if len(path) > len(prefix):
                names[path[len(prefix)]] += weight
        if not names or 2 * max(names.values()) <= total:
            return prefix
        prefix = (*prefix, max(names, key=names.__getitem__))
        inside = {path: weight for path, weight in inside.items() if path[: len(prefix)] == prefix}
    return next(iter(inside), prefix)
