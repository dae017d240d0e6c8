"""A compiled program: instructions from its text, what reads what in them, and how often each runs.

`parse` reads the text, `Flow` says what becomes of an array, through loops, calls and tuples, and `runs_of` how often a
computation runs. Each pattern is of what XLA writes today, for CPUs, GPUs or TPUs.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_START = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = ")
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d\w*|token|opaque)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|called_computations|branch_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
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

    number: int  # its place in the text; each computation is in the order in which it runs
    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of its result, those of a tuple one after the other
    is_tuple: bool
    operands: tuple[str, ...]  # the names of what it reads
    attributes: str
    called: tuple[tuple[str, str], ...] = ()  # how, and which computation: ("body", "region_0")
    op_name: str = ""  # where JAX made it: "jit(step)/transpose(jvp(net))/dot_general"
    frames: _Frames = ()  # empty where the text has none
    trips: int | None = None  # of a loop; None where the text does not say
    index: int | None = None  # of a parameter, or of the array of a tuple that it gets
    value: int | None = None  # of a constant integer
    is_root: bool = False

    @property
    def bytes(self) -> int:
        """Of the result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def argument(self) -> str:
        """The name of the argument that a parameter of the program is. Empty where the text has none."""
        return self.op_name.replace("\\'", "'")

    def attribute(self, name: str) -> str:
        """The text after `name=`, up to the next attribute. Empty where there is none."""
        match = re.search(rf"(?:^|, ){name}=", self.attributes)
        if match is None:
            return ""
        following = self.attributes[match.end() :]
        end = next((at for at, character in _outside(following) if character == ","), len(following))
        return following[:end].strip()


@dataclass(slots=True, eq=False)
class Computation:
    """Instructions that run one after the other."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Instruction]:
        """In the order of their numbers."""
        parameters = (instruction for instruction in self.instructions.values() if instruction.opcode == "parameter")
        return sorted(parameters, key=lambda instruction: instruction.index or 0)

    @property
    def root(self) -> Instruction:
        """The instruction whose result is that of the computation."""
        marked = (instruction for instruction in self.instructions.values() if instruction.is_root)
        return next(marked, next(reversed(self.instructions.values())))


@dataclass(slots=True, eq=False)
class Program:
    """A compiled program."""

    head: str = ""  # the first line of its text
    entry: str = ""  # the computation that runs first
    computations: dict[str, Computation] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)  # the computation of each instruction

    def __iter__(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions.values()

    def __getitem__(self, name: str) -> Instruction:
        return self.computations[self.home[name]].instructions[name]

    @property
    def arguments(self) -> list[Instruction]:
        """The arrays that the program is given, in order."""
        return [instruction for instruction in self.computations[self.entry].parameters if instruction.arrays]

    @property
    def is_scheduled(self) -> bool:
        """Whether the text is in the order in which the instructions run."""
        return "is_scheduled=true" in self.head


def parse(text: str) -> Program:
    """The program of this text, as `jax.stages.Compiled.as_text` gives it."""
    lines = text.splitlines()
    program = Program(lines[0] if lines else "")
    frames = _read_frames(lines)
    # A computation begins with a name and a brace, and ends with a brace in the first column.
    inside: Computation | None = None
    for line in lines:
        if inside is None and (head := _HEAD.match(line)) is not None:
            inside = program.computations[head[2]] = Computation(head[2])
            program.entry = head[2] if head[1] else program.entry
        elif line.startswith("}"):
            inside = None
        elif inside is not None and (start := _START.match(line)) is not None:
            made = _instruction(line, start, len(program.home), frames)
            inside.instructions[made.name] = made
            program.home[made.name] = inside.name
    if not program.entry:
        raise ValueError("viz: the text of the compiled program has no ENTRY, so it cannot be read")
    return program


def _instruction(line: str, start: re.Match[str], number: int, frames: dict[int, _Frames]) -> Instruction:
    following = re.sub(r"/\*.*?\*/", "", line[start.end() :])
    end = next((at for at, character in _outside(following) if character == " "), len(following))  # of the type
    shape, following = following[:end], following[end:].lstrip()
    opcode, _, following = following.partition("(")
    opcode = opcode.strip()
    close = next((at for at, character in _outside(following) if character == ")"), len(following))
    inside, attributes = following[:close], following[close + 1 :].lstrip(", ")
    frame, trips, op_name = (pattern.search(attributes) for pattern in (_FRAME, _TRIPS, _OP_NAME))
    number_in = {"get-tuple-element": attributes.partition("index=")[2], "parameter": inside}.get(opcode, "")
    index = re.match(r"\d+", number_in)
    return Instruction(
        number=number,
        name=start[2],
        opcode=opcode,
        arrays=arrays_of(shape),
        is_tuple=shape.startswith("("),
        operands=_operands(inside) if opcode not in ("constant", "parameter") else (),
        attributes=attributes,
        called=tuple(
            (how, name) for how, names in _CALLED.findall(attributes) for name in re.findall(r"[\w.-]+", names)
        ),
        op_name=op_name[1] if op_name else "",
        frames=frames.get(int(frame[1]), ()) if frame else (),
        trips=int(trips[1]) if trips else None,
        index=int(index[0]) if index else None,
        value=int(inside) if opcode == "constant" and re.fullmatch(r"-?\d+", inside) else None,
        is_root=bool(start[1]),
    )


def arrays_of(shape: str) -> tuple[Array, ...]:
    """The arrays in the text of a type.

    >>> [array.bytes for array in arrays_of("(f32[2,3]{1,0}, bf16[4]{0}, pred[])")]
    [24, 8, 1]
    """
    types = _ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape))
    return tuple(Array(dtype, tuple(int(n) for n in re.findall(r"\d+", dims))) for dtype, dims in types)


def _outside(text: str) -> Iterator[tuple[int, str]]:
    """The characters that are in no brackets and no quotes. A bracket that closes the whole is one of them."""
    depth, quoted, escaped = 0, False, False
    for at, character in enumerate(text):
        if quoted:
            quoted, escaped = character != '"' or escaped, character == "\\" and not escaped
        elif character == '"':
            quoted = True
        elif character in ")}]":
            depth -= 1
            if depth < 0:
                yield at, character
        elif character in "({[":
            depth += 1
        elif depth == 0:
            yield at, character


def _operands(text: str) -> tuple[str, ...]:
    """The names in the brackets after an opcode. Their types may stand before them."""
    cuts = [at for at, character in _outside(text) if character == ","]
    operands = [text[a + 1 : b].strip() for a, b in zip([-1, *cuts], [*cuts, len(text)], strict=True)]
    return tuple(operand.split()[-1].lstrip("%") for operand in operands if operand)


def _read_frames(lines: list[str]) -> dict[int, _Frames]:
    """The calls of each stack frame, from the tables at the beginning of the text."""
    files = {n: text.strip('"') for n, text in _table(lines, "FileNames")}
    places: dict[int, tuple[str, int]] = {}
    for number, text in _table(lines, "FileLocations"):
        entry = _numbers(text)
        places[number] = (files.get(entry.get("file_name_id", 0), ""), entry.get("line", 0))
    frames: dict[int, _Frames] = {}
    for number, text in _table(lines, "StackFrames"):
        entry = _numbers(text)
        outer = frames.get(entry.get("parent_frame_id", 0) - 1, ())  # 1 stands for "none"
        place = places.get(entry.get("file_location_id", 0))
        frames[number] = outer if place is None else (*outer, place)
    return frames


def _table(lines: list[str], name: str) -> Iterator[tuple[int, str]]:
    """The numbered rows of one of the tables."""
    if name not in lines:
        return
    for line in lines[lines.index(name) + 1 :]:
        number, _, text = line.partition(" ")
        if not number.isdigit():
            return
        yield int(number), text


def _numbers(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}


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
        own_cycles = sum(map(int, _CYCLES.findall(instruction.attributes)))
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
    if test.attribute("direction") != "LT" or counter.opcode != "get-tuple-element" or bound.value is None:
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
