"""The collectives of a compiled program: what each sends, how often, between which devices, and what hides it.

Begin with `sends_of`. Three compilers write one collective in three ways: as one instruction, as a start and an end, or
as steps in several fusions.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .hlo import Array, Flow, Instruction, Program, runs_of

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True, slots=True)
class Send:
    """One collective of a compiled program."""

    instruction: Instruction  # or the first half of an asynchronous one
    kind: str  # one of `KINDS`
    arrays: tuple[Array, ...]  # what one device hands in
    devices: int  # that exchange it
    axes: tuple[str, ...]  # of the mesh; empty where the devices are no set of its axes
    times: int  # in a step
    is_exact: bool  # whether `times` is known; a loop of unknown length counts once
    is_overlapped: bool = False  # whether the device computes while it runs

    @property
    def bytes(self) -> int:
        """That one device hands in each time."""
        return sum(array.bytes for array in self.arrays)

    @property
    def sent(self) -> int:
        """Bytes that go out of one device each time, around a ring of the devices."""
        return sent_around_ring(self.kind, self.bytes, self.devices)


def sent_around_ring(kind: str, size: int, devices: int) -> int:
    """Bytes that go out of one device, of a collective that each hands so many in.

    >>> sent_around_ring("all-reduce", 800, 4), sent_around_ring("all-gather", 800, 4)
    (1200, 2400)
    """
    other_devices = devices - 1
    if kind == "all-gather":
        return size * other_devices
    if kind in ("all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return (1 + (kind == "all-reduce")) * size * other_devices // devices
    return size


def sends_of(program: Program, mesh: Mapping[str, int], devices: int) -> list[Send]:
    """Every collective between at least two devices, in the order of the text.

    An asynchronous collective counts where it begins. What an `async-start` wraps counts in its own computation. TPUs
    write one collective into each of the fusions that compute while it runs. It counts in the first.
    """
    flow = Flow(program)
    runs, overlaps = runs_of(flow), Overlaps(flow)
    sends: list[Send] = []
    for instruction in program:
        is_wrapped = any(how == "calls" and name in program.computations for how, name in instruction.called)
        if kind_of(instruction) and not is_wrapped and overlaps.is_first(instruction):
            sends.append(_send(program, instruction, runs, mesh, devices, overlaps))
    return [send for send in sends if send.devices > 1]


def kind_of(instruction: Instruction) -> str:
    """The kind of a collective. Empty for other instructions, and for the second half of an asynchronous one."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def _send(
    program: Program,
    instruction: Instruction,
    runs: dict[str, tuple[int, bool]],
    mesh: Mapping[str, int],
    devices: int,
    overlaps: Overlaps,
) -> Send:
    home = program.home[instruction.name]
    times, is_exact = runs.get(home, (1, False))
    kind, groups = kind_of(instruction), groups_of(instruction, devices)
    permutes = kind == "collective-permute"
    axes = axes_between(groups, mesh) if permutes else axes_of(groups, mesh)
    members = {device for group in groups for device in group}
    count = len(members) if permutes else max(map(len, groups), default=1)
    if kind == "all-reduce" and home.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # so TPUs write it: a sum of everything in a fusion that keeps a part
    arrays = tuple(array for name in instruction.operands if name in program.home for array in program[name].arrays)
    return Send(instruction, kind, arrays, count, axes, times, is_exact, overlaps.is_hidden(instruction))


_COMPUTES = frozenset(("fusion", "custom-call", "dot", "convolution", "while", "call", "conditional", "sort"))


class Overlaps:
    """From where to where the collectives of a program run."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._steps: dict[str, list[Instruction]] = {}  # what a TPU does of a collective in each of several fusions
        for instruction in flow.program:
            if channel := _channel_of_steps(instruction):
                self._steps.setdefault(channel, []).append(instruction)

    def is_first(self, instruction: Instruction) -> bool:
        """Whether a collective is written here and in no fusion before."""
        return not (steps := self._steps.get(_channel_of_steps(instruction))) or steps[0] is instruction

    def is_hidden(self, instruction: Instruction) -> bool:
        """Whether something is computed between the beginning and the end of a collective."""
        if steps := self._steps.get(_channel_of_steps(instruction)):
            ends = [caller for step in steps for caller in self._callers(step)]
        else:
            begin = (
                instruction
                if instruction.opcode.endswith("-start")
                else next(iter(self._callers(instruction)), instruction)
            )
            ends = [begin, *self._done(begin)] if begin.opcode.endswith("-start") else [instruction]
        home = self._flow.program.computations[self._flow.program.home[ends[0].name]].instructions
        numbers = [end.number for end in ends if end.name in home]
        between = (other for other in home.values() if min(numbers) < other.number < max(numbers))
        return any(other.opcode in _COMPUTES for other in between)

    def _callers(self, instruction: Instruction) -> list[Instruction]:
        return [caller for _, caller in self._flow.callers.get(self._flow.program.home[instruction.name], ())]

    def _done(self, begin: Instruction) -> list[Instruction]:
        """The second half of an asynchronous instruction. Updates may be between."""
        readers = [self._flow.program[name] for name, _ in self._flow.readers((begin.name, None))]
        updates = [done for reader in readers if reader.opcode == "async-update" for done in self._done(reader)]
        return updates + [reader for reader in readers if reader.opcode.endswith("-done")]


def _channel_of_steps(instruction: Instruction) -> str:
    """The channel of a collective that is written into several fusions. Empty for others."""
    return (
        instruction.attribute("channel_id")
        if re.search(r"\basync_collective_fusion_config\b", instruction.attributes)
        else ""
    )


Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"(?:^|, )replica_groups=@?mesh\[([^\]]*)\](?:, ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)


def groups_of(instruction: Instruction, devices: int) -> Groups:
    """The devices that exchange something in a collective, in groups: of a permutation each (source, target)."""
    pairs = instruction.attribute("source_target_pairs")
    if pairs:
        return _lists(pairs)
    if mesh := _MESH.search(instruction.attributes):
        return _of_mesh(mesh)
    text = instruction.attribute("replica_groups")
    if not text or text == "{}":
        return (tuple(range(devices)),)
    if iota := _IOTA.match(text):
        return _rows(_iota(_ints(iota[2]), _ints(iota[3])), _ints(iota[1])[-1])
    if text.startswith("{"):
        return _lists(text)
    raise ValueError(f"viz: the devices of {instruction.name} are in a form that is not known here: {text}")


def axes_of(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh that these groups run along. Empty where they are no set of axes.

    >>> axes_of(((0, 2), (1, 3)), {"data": 2, "model": 2})
    ('data',)
    """
    wanted = {frozenset(group) for group in groups}
    names = [name for name, size in sizes.items() if size > 1]
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            if {frozenset(group) for group in _along(axes, sizes)} == wanted:
                return axes
    return ()


def axes_between(pairs: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes in which the two devices of a pair of a permutation differ."""
    if max(map(max, pairs), default=0) >= math.prod(sizes.values()):
        return ()
    places = np.unravel_index(np.array(pairs, int).reshape(-1, 2), tuple(sizes.values()))
    return tuple(name for name, at in zip(sizes, places, strict=True) if np.any(at[:, 0] != at[:, 1]))


def _along(axes: tuple[str, ...], sizes: Mapping[str, int]) -> Groups:
    """The groups of devices that differ only along these axes."""
    order = sorted(range(len(sizes)), key=lambda at: list(sizes)[at] in axes)
    return _rows(_iota(tuple(sizes.values()), order), math.prod(sizes[name] for name in axes))


def _iota(shape: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """The numbers from 0 in this shape, its axes in another order. As they are without one."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(order) if order else numbers


def _rows(numbers: np.ndarray, length: int) -> Groups:
    return tuple(map(tuple, numbers.reshape(-1, length).tolist()))


def _lists(text: str) -> Groups:
    """`{{0,1},{2,3}}`."""
    return tuple(_ints(group) for group in re.findall(r"\{([\d,]+)\}", text.replace(" ", "")))


def _of_mesh(mesh: re.Match[str]) -> Groups:
    """`mesh['data'=2,'model'=4] {'model'}`, where an axis may be split: `'model':(2)2` is its second half."""
    named = re.findall(r"'([^']*)'=(\d+)", mesh[1])
    order: list[int] = _iota(_ints(mesh[2]) or [int(size) for _, size in named], _ints(mesh[3])).ravel().tolist()
    refs: list[tuple[str, str, str]] = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[4])
    wanted = {name: (int(before or 1), int(size or 0)) for name, before, size in refs}
    sizes: dict[str, int] = {}
    along: list[str] = []
    for name, size in ((name, int(size)) for name, size in named):
        before, length = wanted.get(name, (1, 1))
        length = length or size // before
        split = {f"{name}:0": before, f"{name}:1": length, f"{name}:2": size // before // length}
        sizes |= split
        along += [f"{name}:1"] if name in wanted else []
    return tuple(tuple(order[device] for device in group) for group in _along(tuple(along), sizes))


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))
