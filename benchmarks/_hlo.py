"""What a compiled program sends between devices, read from its text."""

from __future__ import annotations

import dataclasses
import math
import re

_BYTES = {"pred": 1, "bf16": 2}  # of the others the name says how many bits
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)\[([\d,]*)\]")
_OPS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ({_OPS})(-start)?\(")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = ")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective over all devices of a program.

    Attributes:
        op: as XLA names it, `all-reduce` and so on.
        nbytes: bytes of the whole: what an all-reduce sums, what a gather makes, what a scatter is given.
        arrays: how many arrays travel in it; a backend may send them one by one.
    """

    op: str
    nbytes: int
    arrays: int = 1


def collectives(text: str, devices: int) -> list[Collective]:
    """Every collective in the text of a compiled program over `devices` devices.

    All of them are taken to run over all devices, as those of a data-parallel step do.

    Raises:
        ValueError: asynchronous collectives, which other backends than the CPU's write in two halves, or a dtype
            that is not known here.
    """
    found = []
    for line in text.splitlines():
        match = _COLLECTIVE.match(line)
        if match is None:
            continue
        shapes, op, start = match.groups()
        if start:
            raise ValueError(f"asynchronous collectives are not counted here, got {op}-start")
        arrays = _ARRAY.findall(shapes)
        nbytes = round(
            sum(_width(dtype) * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in arrays)
        )
        if op == "reduce-scatter":
            nbytes *= devices
        found.append(Collective(op, nbytes, 1 if op == "all-to-all" else len(arrays)))
    return found


def _width(dtype: str) -> float:
    return _BYTES[dtype] if dtype in _BYTES else int(re.sub(r"\D", "", dtype)) / 8


def sent(collective: Collective, devices: int) -> float:
    """Bytes that each device sends by the ring algorithm (pair by pair for all-to-all).

    All-reduce 2(n-1)/n of the whole, all-gather, reduce-scatter and all-to-all (n-1)/n: these are also the least
    that any algorithm can do with (Patarasuk and Yuan 2009), so rings and good trees differ in latency alone.
    """
    if collective.op == "collective-permute":
        return collective.nbytes
    return (2 if collective.op == "all-reduce" else 1) * (devices - 1) / devices * collective.nbytes


def instructions(text: str) -> int:
    """How many instructions the text has, those inside fusions too."""
    return sum(_INSTRUCTION.match(line) is not None for line in text.splitlines())
