"""What the names of several parameters share."""

from __future__ import annotations

import re
from collections.abc import Sequence


def keys_of(name: str) -> tuple[str, ...]:
    """The keys of a parameter, without the argument and its own name.

    >>> keys_of("params['blocks'][0]['attn']['kernel']")
    ('blocks', '0', 'attn')
    """
    return tuple(re.findall(r"[\w-]+", name)[1:-1])


def shared_name(paths: Sequence[tuple[str, ...]]) -> str:
    """What all paths begin with. Empty for nothing.

    >>> shared_name([("enc", "conv2_block1", "conv"), ("enc", "conv2_block1", "norm")])
    'enc/conv2_block1'
    >>> shared_name([("blocks", "0", "attn"), ("blocks", "1", "mlp")]), shared_name([("c3_1",), ("c3_2",)])
    ('blocks 0-1', 'c3_1-2')
    >>> shared_name([("0", "attn"), ("0", "mlp")])  # a number is no name
    ''
    """
    if not paths:
        return ""
    shared: list[str] = []
    for keys in zip(*paths, strict=False):
        if len(set(keys)) > 1:
            break
        shared.append(keys[0])
    name = "" if all(key.isdigit() for key in shared) else "/".join(shared[-2:])
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
