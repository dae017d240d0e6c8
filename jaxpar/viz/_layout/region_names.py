"""Names for regions and repeated scopes: what they share, else what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .._graph import name_kinds
from .._shared_names import shared_name
from .items import Item

_NUMBERED = re.compile(r"(.*?)([._]?)(\d+)(?:–(\d+) ×\d+)?(?: \(\d+\))?")


def name_region(items: Sequence[Item]) -> str:
    """A name for a region of these items.

    It is what the names of its parameters or scopes begin with ("conv2_block1", "blocks 0-5"), where they share
    something. Else it is what is inside: "3 Convolution, 3 Activation", "Convolution + 3".
    """
    return shared_name([item.path for item in items if item.path]) or name_kinds((i.kind, i.flops) for i in items)


def name_copies(names: list[str], beside: Iterable[str]) -> str:
    """The name of a block that is drawn once.

    Args:
        names: the scopes of its copies.
        beside: the scopes that stay, next to the copies.

    >>> name_copies(["layers.0", "layers.1"], ["norm"]), name_copies(["layers.2", "layers.1"], ["layers.0"])
    ('layers ×2', 'layers.1–2 ×2')
    >>> name_copies(["relu", "relu (2)"], [])
    'relu ×2'
    """
    found = [match for name in names if (match := _NUMBERED.fullmatch(name)) and not match[4]]
    numbers = {int(match[3]) for match in found}
    if len(numbers) < len(names) or len({match[1] for match in found}) > 1 or not found[0][1]:
        return f"{names[0]} ×{len(names)}"
    stem, dot = found[0][1], found[0][2]
    others = (match for name in beside if (match := _NUMBERED.fullmatch(name)) and match[1] == stem)
    if all(set(range(int(match[3]), int(match[4] or match[3]) + 1)) <= numbers for match in others):
        return f"{stem} ×{len(names)}"
    return f"{stem}{dot}{min(numbers)}–{max(numbers)} ×{len(names)}"
