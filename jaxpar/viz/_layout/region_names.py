"""Names for regions and repeated scopes: what they share, else what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .._graph import name_kinds
from .items import Item

_NUMBERED = re.compile(r"(.*?)([._]?)(\d+)(?:–(\d+) ×\d+)?(?: \(\d+\))?")


def name_region(items: Sequence[Item]) -> str:
    """A name for a region of these items.

    It is what the names of its parameters or scopes begin with ("conv2_block1", "blocks 0-5"), where they share
    something. Else it is what is inside: "3 Convolution, 3 Activation", "Convolution + 3".
    """
    return _shared_name([item.path for item in items if item.path]) or name_kinds((i.kind, i.flops) for i in items)


def _shared_name(paths: list[tuple[str, ...]]) -> str:
    """What all paths begin with.

    >>> _shared_name([("enc", "conv2_block1", "conv"), ("enc", "conv2_block1", "norm")])
    'enc/conv2_block1'
    >>> _shared_name([("blocks", "0", "attn"), ("blocks", "1", "mlp")]), _shared_name([("c3_1",), ("c3_2",)])
    ('blocks 0-1', 'c3_1-2')
    """
    if not paths:
        return ""
    shared: list[str] = []
    for keys in zip(*paths, strict=False):
        if len(set(keys)) > 1:
            break
        shared.append(keys[0])
    name = "/".join(shared[-2:])
    keys = [path[len(shared)] for path in paths if len(path) > len(shared)]
    if len(keys) < len(paths):
        return name
    if all(key.isdigit() for key in keys):
        return f"{name} {_range(keys)}" if name else ""
    prefix = _common_start(keys)
    if not prefix:
        return name
    numbers = [re.match(r"\d+", key[len(prefix) :]) for key in keys]
    ends = [number.group() for number in numbers if number is not None]
    own = prefix + _range(ends) if len(ends) == len(keys) else prefix.rstrip("_-. ")
    return "/".join([*shared[-1:], own])


def _common_start(keys: list[str]) -> str:
    """What all of these begin with, up to the end of a word or the beginning of a number.

    >>> _common_start(["conv2_block1", "conv2_block12"]), _common_start(["conv", "corr"])
    ('conv2_block', '')
    """
    length = 0
    while all(len(key) > length for key in keys) and len({key[length] for key in keys}) == 1:
        length += 1
    while length and any(_same_word(key, length) for key in keys):
        length -= 1
    return keys[0][:length]


def _same_word(key: str, at: int) -> bool:
    """Whether a cut here would be inside a word or a number."""
    if at >= len(key):
        return False
    before, after = key[at - 1], key[at]
    return (before.isalpha() and after.isalpha()) or (before.isdigit() and after.isdigit())


def _range(numbers: list[str]) -> str:
    """ "2-7", or the number if there is only one."""
    found = sorted({int(number) for number in numbers})
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


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
