"""What layers, parts and copies are called: texts made of the names of params, modules and kinds of layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence

from .._read.arguments import RANDOM
from .._scopes import Scope, common_prefix

_NUMBER = re.compile(r"([._\- ]?\d+)")
_WORDS = re.compile(r"[^\W\d_]+|\d+|.")  # words, numbers and what is between them
_LONGEST = 3  # kinds that are all named
_LONG = 24  # letters in the name of a layer that has the parameters of several modules
GENERIC = frozenset(
    "w W weight weights kernel b B bias scale offset embedding embeddings table gamma beta g mean var average "
    "moving_mean moving_variance hidden counter".split()
) | {RANDOM}


def name_of_weights(paths: list[tuple[str, ...]], modules: Container[tuple[str, ...]] = ()) -> str:
    """A name for a layer with these weights: that of the weight, or of the module around "kernel" and "bias".

    `modules` hold more than one layer. A "gamma" in such a one is called "gamma".

    >>> name_of_weights([("conv1", "weight"), ("conv1", "bias")]), name_of_weights([("attn", "q")])
    ('conv1', 'q')
    >>> name_of_weights([("block", "gamma")], [("block",)])
    'gamma'
    >>> name_of_weights([("lstm", "hi", "kernel"), ("lstm", "hf", "kernel")])
    'hi, hf'
    >>> name_of_weights([("latents",), ("cross", "query", "kernel")])
    'latents, query'
    """
    if not paths:
        return ""
    around = common_prefix(path[:-1] for path in paths)
    inner = dict.fromkeys(path[len(around)] for path in paths)
    if len(inner) > 1 and all(len(path) == len(around) + 2 and path[-1] in GENERIC for path in paths):
        joined = ", ".join(inner)  # modules whose parameters are used together
        return joined if len(joined) <= _LONG else around[-1] if around else ""
    if len(paths) == 1 and around in modules:
        return paths[0][-1]
    parts = [[path for path in paths if path[:-1] == module] for module in dict.fromkeys(path[:-1] for path in paths)]
    if len(parts) == 2 and not around:  # a product of params of two modules
        joined = ", ".join(name_of_weights(part, modules) or part[0][-1] for part in parts)
        return joined if len(joined) <= _LONG else ""
    if {path[-1] for path in paths} <= GENERIC or len(parts) > 1:
        return around[-1] if around else ""
    stems = {path[-1].rstrip("0123456789") for path in paths}
    pair = len(paths) > 1 and len(stems) == 1 and paths[0][-1] not in stems
    return stems.pop().rstrip(".") if pair else paths[0][-1]  # "enc" for the pair enc[0], enc[1]


def name_kinds(layers: Iterable[tuple[str, int]]) -> str:
    """What is in a part of a network, given as kinds and FLOPs. The kind with most FLOPs comes first.

    An attention comes before the products around it, as it says what the part is.

    >>> name_kinds([("Activation", 1), ("Dense", 9), ("Dense", 9)]), name_kinds([("a", 1), ("b", 2), ("c", 3)])
    ('2 Dense, Activation', 'c + 2')
    >>> name_kinds([("Dense", 9), ("Dense", 9), ("RoPE", 2), ("Attention", 5)])
    'Attention + 3'
    """
    count, cost = Counter[str](), Counter[str]()
    for kind, flops in layers:
        count[kind] += 1
        cost[kind] += flops
    kinds = sorted(count, key=lambda kind: (kind != "Attention", -cost[kind]))
    if len(kinds) < _LONGEST:
        return ", ".join(_counted(kind, count[kind]) for kind in kinds)
    return f"{_counted(kinds[0], count[kinds[0]])} + {count.total() - count[kinds[0]]}"


def _counted(kind: str, number: int) -> str:
    return kind if number == 1 else f"{number} {kind}"


def shared_name(names: Sequence[str]) -> str:
    """What all names begin with, up to whole words, and their numbers where nothing else follows. Empty for nothing.

    >>> shared_name(["conv2_block1_conv", "conv2_block1_norm"]), shared_name(["c3_1", "c3_2"]), shared_name(["0", "1"])
    ('conv2_block1', 'c3_1-2', '')
    >>> shared_name(["conv2_block1_conv", "conv2_block12_conv"]), shared_name(["conv", "corr"])
    ('conv2_block1-12', '')
    >>> shared_name(["MatMul (4)", "MatMul (6)"])
    'MatMul (4-6)'
    """
    if len(set(names)) < 2:
        return names[0] if names else ""
    prefix = "".join(common_prefix(tuple(_WORDS.findall(name)) for name in names))
    numbers = [number.group() for name in names if (number := re.match(r"\d+", name[len(prefix) :])) is not None]
    if not prefix or len(numbers) < len(names):
        return prefix.rstrip("_-. ")
    values = sorted(map(int, numbers))
    end = ")" if prefix.endswith("(") else ""
    return f"{prefix}{values[0]}" + (f"-{values[-1]}" if values[0] < values[-1] else "") + end


def name_copies(scopes: Sequence[Scope], beside: Iterable[Scope]) -> Scope:
    """The scope of a block that is drawn once, of those of its copies and of those that stay beside them.

    >>> def name(scopes, beside=()):
    ...     return str(name_copies(list(map(Scope, scopes)), list(map(Scope, beside))))
    >>> name(["layers.0", "layers.1"], ["norm"]), name(["layers.2", "layers.1"], ["layers.0"]), name(["relu", "relu"])
    ('layers ×2', 'layers.1–2 ×2', 'relu ×2')
    >>> name_copies([Scope("block", times=3), Scope("block", times=3)], [])
    'block ×3 ×2'
    """
    names = [scope.numbered(1) for scope in scopes]  # a repeat of repeats keeps both counts
    pieces, places = _numbers(names)
    name = without_numbers(names)
    if len(places) == 1:
        at = places[0]
        dot, numbers = pieces[0][at].rstrip("0123456789"), {int(piece[at].lstrip("._- ")) for piece in pieces}
        before, after = "".join(pieces[0][:at]) + dot, "".join(pieces[0][at + 1 :])
        same = re.compile(rf"{re.escape(before)}(\d+)(?:–(\d+))?{re.escape(after)}")
        matches = (match for other in beside if (match := same.fullmatch(other.name)))
        if not all(set(range(int(match[1]), int(match[2] or match[1]) + 1)) <= numbers for match in matches):
            name = f"{before}{min(numbers)}–{max(numbers)}{after}"
    return Scope(name, scopes[0].kind, len(names))


def without_numbers(names: Sequence[str]) -> str:
    """The name of all copies: without the numbers that tell them apart. That of the first, where they differ in more.

    >>> without_numbers(["layer_0_norm", "layer_1_norm"]), without_numbers(["up1", "down2"])
    ('layer_norm', 'up1')
    """
    pieces, places = _numbers(names)
    kept = (word for at, word in enumerate(pieces[0]) if at not in places)
    return ("".join(kept).lstrip("._- ") if places else "") or names[0]


def names_of_parameters(copies: Sequence[Sequence[tuple[str, ...]]]) -> list[str]:
    """What the parameters of the copies of a block are called. Nothing where they differ in more than numbers.

    >>> names_of_parameters([[("enc", "layer_0", "kernel")], [("enc", "layer_1", "kernel")]])
    ['layer_0', 'layer_1']
    >>> names_of_parameters([[("up.0",), ("down.0",)], [("up.1",), ("down.1",)]])
    []
    """
    depth = len(common_prefix(common_prefix(paths) for paths in copies))
    names = list(dict.fromkeys(path[depth] for paths in copies for path in paths if len(path) > depth))
    return names if names and _numbers(names)[1] and without_numbers(names) not in GENERIC else []


def _numbers(names: Sequence[str]) -> tuple[list[list[str]], list[int]]:
    """The words and numbers of names, and where they differ. In no place, if they differ in more than numbers."""
    pieces = [_NUMBER.split(name) for name in names]
    if len(set(map(len, pieces))) > 1:
        return pieces, []
    places = [at for at, column in enumerate(zip(*pieces, strict=True)) if len(set(column)) > 1]
    return pieces, places if all(at % 2 for at in places) else []
