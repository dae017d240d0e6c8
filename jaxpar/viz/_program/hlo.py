"""A compiled program: instructions, what reads what in them, and how often each runs.

`program_of` reads the program of a `jax.stages.Compiled` as XLA keeps it, for CPUs, GPUs or TPUs. `Flow` says what
becomes of an array, through loops, calls and tuples, and `runs_of` how often a computation runs.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .groups import Groups, read_groups
from .proto import Message, inner, integer, integers, message, nested, signed, text

if TYPE_CHECKING:
    import jax

# XLA's PrimitiveType, by its numbers.
_DTYPES = (
    "? pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4 "
    "f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu buffer f6e3m2fn f6e2m3fn"
).split()
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_Frames = tuple[tuple[str, int], ...]  # the file and the line of each call, from the outside in


@dataclass(frozen=True, slots=True)
class Array:
    """The type of an array of one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Without padding."""
        number = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = _BITS.get(self.dtype, int(number[1]) if number else 0)
        return -(-bits * self.size // 8)


@dataclass(slots=True, eq=False)
class Instruction:
    """One instruction of a compiled program."""

    number: int  # its place in the program; each computation is in the order in which it runs
    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of its result, those of a tuple one after the other
    is_tuple: bool
    operands: tuple[str, ...]  # the names of what it reads
    called: tuple[tuple[str, str], ...] = ()  # how, and which computation: ("body", "region_0")
    op_name: str = ""  # where JAX made it: "jit(step)/transpose(jvp(net))/dot_general"; of a parameter its argument
    frames: _Frames = ()  # empty where the program has none
    index: int | None = None  # of a parameter, or of the array of a tuple that it gets
    value: int | None = None  # of a constant integer
    direction: str = ""  # of a comparison: "LT"
    channel: int = 0  # of a collective; 0 for none
    groups: Groups = ()  # of devices in a collective, see `read_groups`
    config: str = ""  # what the compiler of these devices has noted, as JSON

    @property
    def bytes(self) -> int:
        """Of the result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def trips(self) -> int | None:
        """How often a loop runs. None where its compiler has not noted it."""
        trips = _TRIPS.search(self.config)
        return int(trips[1]) if trips else None


@dataclass(slots=True, eq=False)
class Computation:
    """Instructions that run one after the other."""

    name: str
    root: Instruction  # whose result is that of the computation
    instructions: dict[str, Instruction]

    @property
    def parameters(self) -> list[Instruction]:
        """In the order of their numbers."""
        parameters = (instruction for instruction in self.instructions.values() if instruction.opcode == "parameter")
        return sorted(parameters, key=lambda instruction: instruction.index or 0)


@dataclass(slots=True, eq=False)
class Program:
    """A compiled program."""

    entry: str  # the computation that runs first
    is_scheduled: bool  # whether each computation is in the order in which it runs
    computations: dict[str, Computation] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)  # the computation of each instruction
    names: dict[int, str] = field(default_factory=dict)  # of instructions, by the numbers that XLA gives them

    def __iter__(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions.values()

    def __getitem__(self, name: str) -> Instruction:
        return self.computations[self.home[name]].instructions[name]

    @property
    def arguments(self) -> list[Instruction]:
        """The arrays that the program is given, in order."""
        return [instruction for instruction in self.computations[self.entry].parameters if instruction.arrays]


def program_of(compiled: jax.stages.Compiled) -> Program:
    """The program that was compiled. A `ValueError` where the compiler of these devices does not show it."""
    executable: Any = compiled.runtime_executable()
    try:
        (module,) = executable.hlo_modules()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"viz: the compiler of these devices does not show the compiled program: {error}") from error
    return parse(module.as_serialized_hlo_module_proto())


def parse(module: bytes) -> Program:
    """The program of a serialized HloModuleProto. The numbers below are those of its fields, see `proto`."""
    fields = message(module)
    computations = list(nested(fields, 3))
    called = {integer(computation, 5): text(computation, 1) for computation in computations}
    # A computation may be written in another order than that in which its instructions run.
    runs = {integer(entry, 1): integers(inner(entry, 2), 1) for entry in nested(inner(fields, 7), 1)}
    program = Program(entry=called.get(integer(fields, 6), ""), is_scheduled=bool(runs))
    if not program.entry:
        raise ValueError("viz: the compiled program has no computation that runs first, so it cannot be read")
    frames = _read_frames(inner(fields, 17))
    for computation in computations:
        made = {integer(instruction, 35): instruction for instruction in nested(computation, 2)}
        names = {number: text(instruction, 1) for number, instruction in made.items()}
        inside: dict[str, Instruction] = {}
        for number in runs.get(integer(computation, 5), made):
            inside[names[number]] = _instruction(made[number], len(program.home), names, called, frames)
            program.home[names[number]] = text(computation, 1)
        program.names |= names
        root = inside[names[integer(computation, 6)]]
        program.computations[text(computation, 1)] = Computation(text(computation, 1), root, inside)
    return program


# How instructions call computations, in the order in which XLA lists these.
_CALLED = {"while": ("body", "condition"), "fusion": ("calls",), "async-start": ("calls",)}


def _instruction(
    fields: Message, number: int, names: dict[int, str], called: dict[int, str], frames: dict[int, _Frames]
) -> Instruction:
    """The instruction of an HloInstructionProto. `names` are those of its computation."""
    name, opcode, metadata = text(fields, 1), text(fields, 2), inner(fields, 7)
    shape = inner(fields, 3)
    computations = [called[at] for at in integers(fields, 38)]
    hows = _CALLED.get(opcode, ("to_apply",) * len(computations))
    index = {"get-tuple-element": 13, "parameter": 9}.get(opcode)
    return Instruction(
        number=number,
        name=name,
        opcode=opcode,
        arrays=tuple(_arrays(shape)),
        is_tuple=_dtype(shape) == "tuple",
        operands=tuple(names[at] for at in integers(fields, 36)),
        called=tuple(sorted(zip(hows, computations, strict=True), key=lambda call: call[0] == "body")),  # the body last
        op_name=text(metadata, 2),
        frames=frames.get(integer(metadata, 15), ()),
        index=None if index is None else integer(fields, index),
        value=_integer_of(inner(fields, 8)) if opcode == "constant" else None,
        direction=text(fields, 63),
        channel=integer(fields, 26),
        groups=read_groups(fields, name) if opcode.removesuffix("-start") in COLLECTIVES else (),
        config=text(fields, 43),
    )


def _arrays(shape: Message) -> Iterator[Array]:
    """The arrays of a ShapeProto."""
    if 4 in shape:
        for part in nested(shape, 4):
            yield from _arrays(part)
    elif (dtype := _dtype(shape)) != "tuple":
        yield Array(dtype, tuple(integers(shape, 3)))


def _dtype(shape: Message) -> str:
    number = integer(shape, 2)
    if not 0 < number < len(_DTYPES):
        raise ValueError(f"viz: the compiled program has arrays of a type that is not known here, number {number}")
    return _DTYPES[number]


def _integer_of(literal: Message) -> int | None:
    """The value of a LiteralProto that is one integer of 32 or 64 bits."""
    numbers = [signed(number) for kind in (4, 5, 6, 7) for number in integers(literal, kind)]
    return numbers[0] if len(numbers) == 1 and not integers(inner(literal, 1), 3) else None


def _read_frames(index: Message) -> dict[int, _Frames]:
    """The calls of each stack frame of a StackFrameIndexProto, where files, places and frames count from 1."""
    files = [value.decode(errors="replace") for value in index.get(1, ()) if isinstance(value, bytes)]
    places = [(files[integer(place, 1) - 1], integer(place, 3)) for place in nested(index, 3)]
    frames: dict[int, _Frames] = {}
    for number, frame in enumerate(nested(index, 4), 1):
        outer = frames.get(integer(frame, 2), ())  # 0 for none
        frames[number] = (*outer, places[integer(frame, 1) - 1])
    return frames


Value = tuple[str, int | None]  # an instruction, and which array of its tuple: None for all of it

_CALLS = ("call", "async-start")
_PASSES = ("opt-barrier", "copy-start", "async-update", "async-done")
ALIASES = frozenset(("bitcast", "tuple", "get-tuple-element", "while", "call", "conditional", "parameter", *_PASSES))

# A wire's other end, and what becomes of an array of a tuple: "same" is the same array of another tuple. "take" and
# "put" are for one that leaves or enters a tuple at a number. "of" is read by the result of that number, "all" by any.
_Wire = tuple[str, str, int]


class Flow:
    """The ways of arrays through a program.

    With `fused` they lead through the instructions inside of fusions. Else a fusion is one instruction.
    """

    def __init__(self, program: Program, *, fused: bool = False) -> None:
        self.program = program
        self._calls = (*_CALLS, "fusion", "conditional") if fused else (*_CALLS, "conditional")
        self.callers: dict[str, list[tuple[str, Instruction]]] = {}
        self._into: dict[str, list[_Wire]] = {}
        self._out: dict[str, list[_Wire]] = {}
        for instruction in program:
            for how, name in instruction.called:
                self.callers.setdefault(name, []).append((how, instruction))
            for source, target, way, at in self._wires(instruction):
                self._into.setdefault(target, []).append((source, way, at))
                self._out.setdefault(source, []).append((target, way, at))

    def sources(self, value: Value) -> Iterator[Value]:
        """The arrays that this one is made of, one step back."""
        name, index = value
        for source, way, at in self._into.get(name, ()):
            if way == "same":
                yield source, index
            elif way == "take":
                yield source, at
            elif way == "all" or index is None or index == at:
                yield source, None

    def readers(self, value: Value) -> Iterator[Value]:
        """The arrays that are made of this one, one step on."""
        name, index = value
        for target, way, at in self._out.get(name, ()):
            if way == "same":
                yield target, index
            elif way == "put":
                yield target, at
            elif way != "take" or index is None or index == at:
                yield target, None

    def _wires(self, instruction: Instruction) -> Iterator[tuple[str, str, str, int]]:
        """From where to where arrays go in an instruction, and in what it calls."""
        computations = self.program.computations
        called = [(how, computations[name]) for how, name in instruction.called if name in computations]
        # All passes of a loop have one tuple: what it is given, the parameter of its condition and of its body, and its
        # result have the same arrays at the same numbers.
        if instruction.opcode == "while":
            (passed,) = instruction.operands
            yield from ((passed, inner.parameters[0].name, "same", 0) for _, inner in called)
            yield passed, instruction.name, "same", 0
            for body in (inner for how, inner in called if how == "body"):
                yield body.root.name, body.parameters[0].name, "same", 0
                yield body.root.name, instruction.name, "same", 0
        elif instruction.opcode in self._calls:
            for number, (_, inner) in enumerate(called):
                passed = (
                    instruction.operands[1 + number : 2 + number]
                    if instruction.opcode == "conditional"
                    else instruction.operands
                )
                pairs = zip(passed, inner.parameters, strict=False)
                yield from ((operand, parameter.name, "same", 0) for operand, parameter in pairs)
                yield inner.root.name, instruction.name, "same", 0
        elif instruction.opcode == "get-tuple-element":
            yield instruction.operands[0], instruction.name, "take", instruction.index or 0
        else:
            many = (
                instruction.is_tuple
                and instruction.opcode != "fusion"
                and len(instruction.arrays) == len(instruction.operands)
            )
            way = (
                "same"
                if instruction.opcode in _PASSES
                else "put"
                if instruction.opcode == "tuple"
                else "of"
                if many
                else "all"
            )
            yield from ((operand, instruction.name, way, at) for at, operand in enumerate(instruction.operands))


_CYCLES = re.compile(r'"estimated_cycles":"(\d{1,18})"')  # the largest number of 64 bits says that there is no estimate
_COPIES = ("copy", "bitcast", "get-tuple-element", "tuple", "copy-start", "copy-done", "opt-barrier")


def runs_of(flow: Flow) -> dict[str, tuple[int, bool]]:
    """How often each computation runs, and whether that is known. A branch counts as taken."""
    program = flow.program
    runs: dict[str, tuple[int, bool]] = {program.entry: (1, True)}

    def count(name: str) -> tuple[int, bool]:
        if name not in runs:
            runs[name] = (0, True)  # a computation that nothing calls does not run
            times, is_known = 0, True
            for _, caller in flow.callers.get(name, ()):
                outer, sure = count(program.home[caller.name])
                trips = _trips(flow, caller) if caller.opcode == "while" else 1
                times, is_known = times + outer * (trips or 1), is_known and sure and trips is not None
            runs[name] = (times, is_known)
        return runs[name]

    for name in program.computations:
        count(name)
    return runs


def cycles_of(program: Program) -> int | None:
    """The cycles that the compiler of TPUs estimates for one step. None where the program says none.

    It estimates fusions, products and the like. Collectives and most copies have no estimate. Of branches the longest
    counts, and a loop of unknown length runs once.
    """
    flow = Flow(program)

    @functools.cache
    def cycles(computation: str) -> int:
        return sum(map(of, program.computations[computation].instructions.values()))

    def of(instruction: Instruction) -> int:
        own_cycles = sum(map(int, _CYCLES.findall(instruction.config)))
        inner = [cycles(name) for _, name in instruction.called if name in program.computations]
        if instruction.opcode == "conditional":
            return own_cycles + max(inner, default=0)
        times = _trips(flow, instruction) or 1 if instruction.opcode == "while" else 1
        return own_cycles + times * sum(inner)

    return cycles(program.entry) or None


def _trips(flow: Flow, loop: Instruction) -> int | None:
    """How often a loop runs. None where that is not known.

    The programs of GPUs and CPUs say it. Those of TPUs compare a counter with a constant: it must begin at a constant,
    and the body must add one to it.
    """
    program, called = flow.program, dict(loop.called)
    if loop.trips is not None or not {"condition", "body"} <= called.keys():
        return loop.trips
    test = program.computations[called["condition"]].root
    counter, bound = (program[name] for name in test.operands) if len(test.operands) == 2 else (test, test)
    if test.direction != "LT" or counter.opcode != "get-tuple-element" or bound.value is None:
        return None
    first = program[_behind(flow, (loop.operands[0], counter.index))[0]].value
    step = program[_behind(flow, (program.computations[called["body"]].root.name, counter.index))[0]]
    added = [_behind(flow, (name, None)) for name in step.operands] if step.opcode == "add" else []
    steps = [program[name].value for name, _ in added if program[name].value]
    counters = [
        at for name, at in added if program[name].opcode == "parameter" and program.home[name] == called["body"]
    ]
    if first is None or counters != [counter.index] or len(steps) != 1 or (by := steps[0] or 0) < 1:
        return None
    return max(0, -(-(bound.value - first) // by))


def _behind(flow: Flow, value: Value) -> Value:
    """Where a value is computed, behind copies and tuples."""
    while flow.program[value[0]].opcode in _COPIES and (sources := list(flow.sources(value))):
        value = sources[0]
    return value
