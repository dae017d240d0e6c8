"""The collectives of a compiled program: what each sends, how often, between which devices, and what hides it.

Begin with `sends_of`. Three compilers write one collective in three ways: as one instruction, as a start and an end, or
as steps in several fusions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .groups import axes_between, axes_of
from .hlo import COLLECTIVES, Array, Flow, Instruction, Program, runs_of


@dataclass(frozen=True, slots=True)
class Send:
    """One collective of a compiled program."""

    instruction: Instruction  # or the first half of an asynchronous one
    kind: str  # one of `COLLECTIVES`
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
    """Every collective between at least two devices, in the order of the program.

    An asynchronous collective counts where it begins. What an `async-start` wraps counts in its own computation. TPUs
    write one collective into each of the fusions that compute while it runs. It counts in the first.
    """
    flow = Flow(program)
    runs, overlaps = runs_of(flow), Overlaps(flow)
    sends: list[Send] = []
    for instruction in program:
        if kind_of(instruction) and overlaps.is_first(instruction):
            sends.append(_send(program, instruction, runs, mesh, devices, overlaps))
    return [send for send in sends if send.devices > 1]


def kind_of(instruction: Instruction) -> str:
    """The kind of a collective. Empty for other instructions, and for the second half of an asynchronous one."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else ""


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
    kind, groups = kind_of(instruction), instruction.groups or (tuple(range(devices)),)
    permutes = kind == "collective-permute"
    axes = axes_between(groups, mesh) if permutes else axes_of(groups, mesh)
    members = {device for group in groups for device in group}
    count = len(members) if permutes else max(map(len, groups), default=1)
    if kind == "all-reduce" and home.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # so TPUs write it: a sum of everything in a fusion that keeps a part
    arrays = tuple(array for name in instruction.operands for array in program[name].arrays)
    return Send(instruction, kind, arrays, count, axes, times, is_exact, overlaps.is_hidden(instruction))


_COMPUTES = frozenset(("fusion", "custom-call", "dot", "convolution", "while", "call", "conditional", "sort"))


class Overlaps:
    """From where to where the collectives of a program run."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._steps: dict[int, list[Instruction]] = {}  # what a TPU does of a collective in each of several fusions
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


def _channel_of_steps(instruction: Instruction) -> int:
    """The channel of a collective that is written into several fusions. 0 for others."""
    return instruction.channel if '"async_collective_fusion_config"' in instruction.config else 0
