"""Names for regions and repeated scopes: what they share, else what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .._graph import common_prefix, name_kinds
from .._shared_names import shared_name
from .items import Item
from .scopes import GENERIC

_NUMBER = re.compile(r"([._\- ]?\d+)")
_CALL = re.compile(r" \(\d+\)$")


def name_region(items: Sequence[Item]) -> str:
    """A name for a region of these items.

    It is what the names of its parameters or scopes begin with ("conv2_block1", "blocks 0-5"), where they share
    something. Else it is what is inside: "3 Convolution, 3 Activation", "Convolution + 3".
    """
    return shared_name([item.path for item in items if item.path]) or name_kinds((i.kind, i.flops) for i in items)


def name_copies(names: Sequence[str], beside: Iterable[str]) -> str:
    """The name of a block that is drawn once.

    Args:
        names: the scopes of its copies.
        beside: the scopes that stay, next to the copies.

    >>> name_copies(["layers.0", "layers.1"], ["norm"]), name_copies(["layers.2", "layers.1"], ["layers.0"])
    ('layers ×2', 'layers.1–2 ×2')
    >>> name_copies(["relu", "relu (2)"], [])
    'relu ×2'
    """
    names = [_CALL.sub("", name) for name in names]
    words, places = _numbers(names)
    name = without_numbers(names)
    if len(places) == 1:
        at = places[0]
        dot, numbers = words[0][at].rstrip("0123456789"), {int(own[at].lstrip("._- ")) for own in words}
        before, after = "".join(words[0][:at]) + dot, "".join(words[0][at + 1 :])
        same = re.compile(rf"{re.escape(before)}(\d+)(?:–(\d+))?{re.escape(after)}(?: ×\d+)?(?: \(\d+\))?")
        others = (match for other in beside if (match := same.fullmatch(other)))
        if not all(set(range(int(match[1]), int(match[2] or match[1]) + 1)) <= numbers for match in others):
            name = f"{before}{min(numbers)}–{max(numbers)}{after}"
    return f"{name} ×{len(names)}"


def without_numbers(names: Sequence[str]) -> str:
    """The name of all copies: without the numbers that tell them apart. That of the first, where they differ in more.

    >>> without_numbers(["layer_0_norm", "layer_1_norm"]), without_numbers(["conv1", "conv1"])
    ('layer_norm', 'conv1')
    >>> without_numbers(["up1", "down2"])
    'up1'
    """
    words, places = _numbers(names)
    kept = (word for at, word in enumerate(words[0]) if at not in places)
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
    words = [_NUMBER.split(name) for name in names]
    if len(set(map(len, words))) > 1:
        return words, []
    places = [at for at, own in enumerate(zip(*words, strict=True)) if len(set(own)) > 1]
    return words, places if all(at % 2 for at in places) else []
