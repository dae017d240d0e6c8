"""Names of repeated scopes."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(.*?)([._]?)(\d+)(?:–(\d+) ×\d+)?(?: \(\d+\))?")


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
