"""The bytes that are live on a device while each instruction of a program runs.

XLA gives each value of a program a place in an allocation, and the allocation is as large as the last place needs.
A place is live from the instruction that fills it to the last one that reads it. So the bytes of an allocation at one
moment are those of live places, and gaps: places of other moments, and holes that fit no value. What a loop carries is
a value of its own before the loop, in its condition, in its body and behind it, all in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import jax

from .hlo import ALIASES, Flow, Program, Value
from .proto import Message, inner, integer, integers, message, nested

# Numbers of fields in XLA's hlo.proto.
_BUFFERS, _ALLOCATIONS, _BUFFER_PLACE, _PLACE_INSTRUCTION, _PLACE_INDEX = 1, 3, 3, 4, 3
_SIZE, _THREAD_LOCAL, _PARAMETER, _LIVE_OUT, _ASSIGNED, _CONSTANT = 2, 3, 5, 7, 9, 12
_LATE = ("while", "conditional")
_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of one device during a step.

    Attributes:
        total: bytes that the compiler reserves: arguments, results that do not reuse arguments, temporaries.
        peak: the largest sum of arguments, results and live temporaries. A temporary is live from the instruction that
            writes it to the last instruction that reads it.
        gaps: total minus peak: bytes without a live value at the peak. The compiler reserved them for values of other
            times, or no value fits.
        is_exact: whether the offsets of all temporaries are known, add up to the total within 2 %, and do not overlap
            while live. False if the backend does not report the offsets. Then the peak is the total.
    """

    total: int
    peak: int
    gaps: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A range of a temporary allocation, and the instruction that fills it."""

    allocation: int
    start: int
    end: int
    name: str
    index: int | None


_Span = tuple[int, int, int, int]  # an allocation, a range of it, and when the last instruction reads that


def memory_of(program: Program, compiled: jax.stages.Compiled) -> tuple[StepMemory | None, dict[str, int]]:
    """The memory of a `jax.stages.Compiled`, and the bytes that are live while each instruction runs.

    None and empty where this backend does not say.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None, {}
    # Arguments and results are there all the time. A result in the place of a donated argument counts once.
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = kept + stats.temp_size_in_bytes
    assignment = getattr(stats, "serialized_buffer_assignment_proto", None)
    if not assignment or not program.is_scheduled:
        return StepMemory(total, total, 0, False), {}
    buffers, values = _buffers(program, assignment)
    moments = list(_moments(program, buffers, values))
    at = {name: kept + live for name, live, _ in moments}
    peak = max(at.values(), default=kept)
    is_whole = abs(kept + _extent(buffers) - total) <= _TOLERANCE * total
    is_known = all(buffer.name in program.home for buffer in buffers)
    is_exact = is_whole and is_known and all(is_clear for _, _, is_clear in moments)
    return StepMemory(total, peak, total - peak, is_exact), at


def _buffers(program: Program, assignment: bytes) -> tuple[list[_Buffer], set[Value]]:
    """The buffers of temporaries, and all values of the program, of a serialized BufferAssignmentProto."""
    fields = message(assignment)
    values = {integer(buffer, 1): _value(buffer, program.names) for buffer in nested(fields, _BUFFERS)}
    buffers = [buffer for allocation in nested(fields, _ALLOCATIONS) for buffer in _assigned(allocation, values)]
    return buffers, set(values.values())


def _value(buffer: Message, names: dict[int, str]) -> Value:
    """Where a buffer is filled. Without a name where the program lacks it."""
    place = inner(buffer, _BUFFER_PLACE)
    return names.get(integer(place, _PLACE_INSTRUCTION), ""), next(iter(integers(place, _PLACE_INDEX)), None)


def _assigned(allocation: Message, values: dict[int, Value]) -> Iterator[_Buffer]:
    """The buffers of an allocation. Arguments, results and constants are no temporaries."""
    if any(integer(allocation, kind) for kind in (_THREAD_LOCAL, _PARAMETER, _LIVE_OUT, _CONSTANT)):
        return
    for place in nested(allocation, _ASSIGNED):
        (name, index), start = values.get(integer(place, 1), ("", None)), integer(place, 2)
        yield _Buffer(integer(allocation, 1), start, start + integer(place, 3), name, index)


def _moments(program: Program, buffers: list[_Buffer], values: set[Value]) -> Iterator[tuple[str, int, bool]]:
    """Each instruction, the bytes of temporaries that are live while it runs, and whether no two of them share one."""
    lives = _Lives(program, values)
    starts: dict[int, list[_Span]] = {}
    for buffer in buffers:
        if buffer.name in lives.begin:
            span = buffer.allocation, buffer.start, buffer.end, lives.last(buffer)
            starts.setdefault(lives.first(buffer), []).append(span)
    # What is read for the last time now is still live, and what is filled now is already: both are there at once, and
    # may share a place. So overlaps are looked for among those that live on.
    live: list[_Span] = []
    for time, name in enumerate(lives.order):
        live = sorted([span for span in live if span[3] >= time] + starts.get(time, []))
        later = [span for span in live if span[3] > time]
        is_clear = all(
            earlier[0] != later_one[0] or earlier[2] <= later_one[1] for earlier, later_one in pairwise(later)
        )
        yield name, _union(live), is_clear


def _times(program: Program) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """When each instruction begins and ends, and the instructions in that order.

    An instruction that calls others ends with the last of them. A loop runs once here.
    """
    begin: dict[str, int] = {}
    end: dict[str, int] = {}
    order: list[str] = []

    def run(computation: str) -> None:
        for instruction in program.computations[computation].instructions.values():
            begin.setdefault(instruction.name, len(order))
            order.append(instruction.name)
            if instruction.opcode in ("while", "call", "conditional", "async-start"):
                for _, name in instruction.called:
                    if name in program.computations:
                        run(name)
            end[instruction.name] = len(order) - 1

    run(program.entry)
    return begin, end, order


class _Lives:
    """From when to when a buffer is live. What hands a value on unchanged, as a tuple does, is none of `values`."""

    def __init__(self, program: Program, values: set[Value]) -> None:
        self.begin, self.end, self.order = _times(program)
        self._flow, self._values = Flow(program), values

    def first(self, buffer: _Buffer) -> int:
        """When it is filled. What a loop or a branch gives is there when it ends."""
        is_late = self._flow.program[buffer.name].opcode in _LATE
        return (self.end if is_late else self.begin)[buffer.name]

    def last(self, buffer: _Buffer) -> int:
        """When the last instruction reads it, or a view of it."""
        last = self._least(buffer)
        seen: set[Value] = {(buffer.name, buffer.index)}
        work = list(seen)
        while work:
            for reader in self._flow.readers(work.pop()):
                if reader[0] not in self.begin or reader in seen:
                    continue
                seen.add(reader)
                last = max(last, self._read(reader))
                if self._flow.program[reader[0]].opcode in ALIASES and reader not in self._values:
                    work.append(reader)
        return last

    def _read(self, reader: Value) -> int:
        """When a reader has read. A loop that changes a value reads it once. Else it hands it on when it ends."""
        if reader in self._values and self._flow.program[reader[0]].opcode == "parameter":
            return 0  # the loop itself reads
        is_late = self._flow.program[reader[0]].opcode in _LATE and reader not in self._values
        return (self.end if is_late else self.begin)[reader[0]]

    def _least(self, buffer: _Buffer) -> int:
        """When a buffer that nothing reads is free. What a condition is given goes on to the body."""
        home = self._flow.program.home[buffer.name]
        is_asked = any(how == "condition" for how, _ in self._flow.callers.get(home, ()))
        if is_asked and self._flow.program[buffer.name].opcode == "parameter":
            return self.end[self._flow.program.computations[home].root.name]
        return self.first(buffer)


def _union(live: list[_Span]) -> int:
    """The bytes that at least one of the buffers covers. They are in the order of their places."""
    total, covered, last = 0, 0, -1
    for allocation, start, end, _ in live:
        covered = covered if allocation == last else 0
        total += max(0, end - max(covered, start))
        covered, last = max(covered, end), allocation
    return total


def _extent(buffers: list[_Buffer]) -> int:
    """The bytes up to the last place of each allocation."""
    ends: dict[int, int] = {}
    for buffer in buffers:
        ends[buffer.allocation] = max(ends.get(buffer.allocation, 0), buffer.end)
    return sum(ends.values())
