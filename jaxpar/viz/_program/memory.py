"""The bytes that are live on a device while each instruction of a program runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .flow import ALIASES, Flow
from .hlo import Instruction, Program
from .wire import Message, integer, integers, message, nested, text

# Numbers of fields in XLA's hlo.proto.
_MODULE_COMPUTATIONS, _COMPUTATION_INSTRUCTIONS, _INSTRUCTION_NAME, _INSTRUCTION_ID = 3, 2, 1, 35
_BUFFERS, _ALLOCATIONS, _BUFFER_PLACE, _PLACE_INSTRUCTION, _PLACE_INDEX = 1, 3, 3, 4, 3
_SIZE, _THREAD_LOCAL, _PARAMETER, _LIVE_OUT, _ASSIGNED, _CONSTANT = 2, 3, 5, 7, 9, 12
_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one device.

    Attributes:
        total: bytes that XLA sets aside: arguments, results that reuse none of them, and temporaries.
        peak: bytes of arguments, results and live temporaries where they are most.
        is_exact: whether the peak is within 2 % of the total.
        at: bytes live while an instruction runs, by its name. Empty where the program does not say.
    """

    total: int
    peak: int
    is_exact: bool
    at: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A range of a temporary allocation, and the instruction that fills it."""

    allocation: int
    start: int
    end: int
    name: str
    index: int | None


def memory_of(program: Program, compiled: Any) -> Memory | None:
    """The memory of a compiled program. None where this backend does not say.

    Args:
        program: its text.
        compiled: a `jax.stages.Compiled`.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = kept + stats.temp_size_in_bytes
    buffers = _buffers(compiled, getattr(stats, "serialized_buffer_assignment_proto", None))
    if buffers is None or not program.is_scheduled:
        return Memory(total, total, False)
    at = {name: kept + live for name, live in _live(program, buffers)}
    peak = max(at.values(), default=kept)
    return Memory(total, peak, abs(peak - total) <= _TOLERANCE * total, at)


def _buffers(compiled: Any, assignment: bytes | None) -> list[_Buffer] | None:
    """The buffers of temporaries. None where the program does not say."""
    try:
        module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    except (AttributeError, IndexError, NotImplementedError, RuntimeError):
        return None
    if not assignment or not module:
        return None
    names = dict(_names(message(module)))
    found = message(assignment)
    places = {integer(buffer, 1): next(nested(buffer, _BUFFER_PLACE), Message()) for buffer in nested(found, _BUFFERS)}
    return [buffer for one in nested(found, _ALLOCATIONS) for buffer in _assigned(one, places, names)]


def _names(module: Message) -> Iterator[tuple[int, str]]:
    """The id and the name of each instruction."""
    for computation in nested(module, _MODULE_COMPUTATIONS):
        for one in nested(computation, _COMPUTATION_INSTRUCTIONS):
            yield integer(one, _INSTRUCTION_ID), text(one, _INSTRUCTION_NAME)


def _assigned(allocation: Message, places: dict[int, Message], names: dict[int, str]) -> Iterator[_Buffer]:
    """The buffers of an allocation. Arguments, results and constants are no temporaries."""
    if any(integer(allocation, kind) for kind in (_THREAD_LOCAL, _PARAMETER, _LIVE_OUT, _CONSTANT)):
        return
    for one in nested(allocation, _ASSIGNED):
        place = places.get(integer(one, 1), Message())
        name, start = names.get(integer(place, _PLACE_INSTRUCTION)), integer(one, 2)
        if name is not None:
            index = next(iter(integers(place, _PLACE_INDEX)), None)
            yield _Buffer(integer(allocation, 1), start, start + integer(one, 3), name, index)


def _live(program: Program, buffers: list[_Buffer]) -> Iterator[tuple[str, int]]:
    """The bytes of temporaries that are live while each instruction runs."""
    begin, end, order = _times(program)
    flow = Flow(program)
    starts: dict[int, list[tuple[int, _Buffer]]] = {}
    for buffer in buffers:
        if buffer.name in begin:
            last = _last_use(flow, begin, end, buffer)
            starts.setdefault(begin[buffer.name], []).append((last, buffer))
    live: list[tuple[int, _Buffer]] = []
    for time, name in enumerate(order):
        live = [(last, buffer) for last, buffer in live if last >= time] + starts.get(time, [])
        yield name, _union(buffer for _, buffer in live)


def _times(program: Program) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """When each instruction begins and ends, and the instructions in that order.

    An instruction that calls others ends with the last of them. A loop runs once here.
    """
    begin: dict[str, int] = {}
    end: dict[str, int] = {}
    order: list[str] = []

    def run(computation: str) -> None:
        for one in program.computations[computation].instructions.values():
            begin.setdefault(one.name, len(order))
            order.append(one.name)
            if one.opcode in ("while", "call", "conditional", "async-start"):
                for _, name in one.called:
                    if name in program.computations:
                        run(name)
            end[one.name] = len(order) - 1

    run(program.entry)
    return begin, end, order


def _last_use(flow: Flow, begin: dict[str, int], end: dict[str, int], buffer: _Buffer) -> int:
    """When the last instruction reads a buffer, or a view of it."""
    last = end[buffer.name] if flow.program[buffer.name].opcode != "while" else begin[buffer.name]
    seen = {(buffer.name, buffer.index)}
    work = [(buffer.name, buffer.index)]
    while work:
        name, index = work.pop()
        for reader in flow.readers((name, index)):
            if reader[0] not in begin or reader in seen:
                continue
            seen.add(reader)
            last = max(last, _read_until(flow.program[reader[0]], begin, end))
            if flow.program[reader[0]].opcode in ALIASES:
                work.append(reader)
    return last


def _read_until(reader: Instruction, begin: dict[str, int], end: dict[str, int]) -> int:
    return end[reader.name] if reader.opcode == "while" else begin[reader.name]


def _union(buffers: Iterator[_Buffer]) -> int:
    """The bytes that at least one of the buffers covers."""
    total, covered, allocation = 0, 0, -1
    for buffer in sorted(buffers, key=lambda one: (one.allocation, one.start)):
        if buffer.allocation != allocation:
            allocation, covered = buffer.allocation, 0
        total += max(0, buffer.end - max(covered, buffer.start))
        covered = max(covered, buffer.end)
    return total
