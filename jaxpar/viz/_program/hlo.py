"""The text of a compiled program as computations and instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_START = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = ")
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+\w*|token|opaque)\[([\d,<=]*)\]")
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
        return -(-_bits(self.dtype) * self.size // 8)


@dataclass(slots=True, eq=False)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
        number: its place in the text. Each computation is in the order in which it runs.
        arrays: the arrays of its result, those of a tuple one after the other.
        is_tuple: whether the result is a tuple.
        value: of a constant integer.
        operands: the names of what it reads.
        called: (how, computation) for each computation that it calls, such as ("body", "region_0").
        op_name: where JAX made it: "jit(step)/transpose(jvp(net))/dot_general".
        frames: (file, line) of the calls around it, from the outside in. Empty where the text has none.
        trips: how often a loop runs. None where the text does not say.
    """

    number: int
    name: str
    opcode: str
    arrays: tuple[Array, ...]
    is_tuple: bool
    operands: tuple[str, ...]
    attributes: str
    called: tuple[tuple[str, str], ...] = ()
    op_name: str = ""
    frames: tuple[tuple[str, int], ...] = ()
    trips: int | None = None
    index: int | None = None
    value: int | None = None
    is_root: bool = False

    @property
    def bytes(self) -> int:
        """Of the result."""
        return sum(array.bytes for array in self.arrays)

    def attribute(self, name: str) -> str:
        """The text after `name=`, up to the next attribute. Empty where there is none."""
        found = re.search(rf"(?:^|, ){name}=", self.attributes)
        if found is None:
            return ""
        rest = self.attributes[found.end() :]
        end = next((at for at, character in _outside(rest) if character == ","), len(rest))
        return rest[:end].strip()


@dataclass(slots=True, eq=False)
class Computation:
    """Instructions that run one after the other."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose result is that of the computation."""
        marked = (one for one in self.instructions.values() if one.is_root)
        return next(marked, next(reversed(self.instructions.values())))


@dataclass(slots=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
        head: the first line of its text.
        entry: the name of the computation that runs first.
        computations: by name.
        home: the name of the computation of each instruction.
    """

    head: str = ""
    entry: str = ""
    computations: dict[str, Computation] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions.values()

    def __getitem__(self, name: str) -> Instruction:
        return self.computations[self.home[name]].instructions[name]

    @property
    def is_scheduled(self) -> bool:
        """Whether the text is in the order in which the instructions run."""
        return "is_scheduled=true" in self.head


def parse(text: str) -> Program:
    """The program of this text, as `jax.stages.Compiled.as_text` gives it.

    Raises:
        ValueError: the text has no `ENTRY`.
    """
    lines = text.splitlines()
    program = Program(lines[0] if lines else "")
    frames = _read_frames(lines)
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
    rest = re.sub(r"/\*.*?\*/", "", line[start.end() :])
    end = next((at for at, character in _outside(rest) if character == " "), len(rest))  # of the type
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    close = next((at for at, character in _outside(rest) if character == ")"), len(rest))
    attributes = rest[close + 1 :].lstrip(", ")
    frame, trips = _FRAME.search(attributes), _TRIPS.search(attributes)
    op_name, index = _OP_NAME.search(attributes), re.search(r"\bindex=(\d+)", attributes)
    return Instruction(
        number=number,
        name=start[2],
        opcode=opcode.strip(),
        arrays=arrays_of(shape),
        is_tuple=shape.startswith("("),
        operands=_operands(rest[:close]) if opcode.strip() != "constant" else (),
        attributes=attributes,
        called=tuple(
            (how, name) for how, names in _CALLED.findall(attributes) for name in re.findall(r"[\w.-]+", names)
        ),
        op_name=op_name[1] if op_name else "",
        frames=frames.get(int(frame[1]), ()) if frame else (),
        trips=int(trips[1]) if trips else None,
        index=int(index[1]) if index and opcode.strip() == "get-tuple-element" else None,
        value=int(rest[:close]) if opcode.strip() == "constant" and re.fullmatch(r"-?\d+", rest[:close]) else None,
        is_root=bool(start[1]),
    )


def arrays_of(shape: str) -> tuple[Array, ...]:
    """The arrays in the text of a type.

    >>> [array.bytes for array in arrays_of("(f32[2,3]{1,0}, bf16[4]{0}, pred[])")]
    [24, 8, 1]
    """
    found = _ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape))
    return tuple(Array(dtype, tuple(int(n) for n in re.findall(r"\d+", dims))) for dtype, dims in found)


def _bits(dtype: str) -> int:
    found = re.match(r"[a-z]+(\d+)", dtype)
    return _BITS[dtype] if dtype in _BITS else int(found[1]) if found else 0


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
    parts = [text[a + 1 : b].strip() for a, b in zip([-1, *cuts], [*cuts, len(text)], strict=True)]
    return tuple(part.split()[-1].lstrip("%") for part in parts if part)


def _read_frames(lines: list[str]) -> dict[int, _Frames]:
    """The calls of each stack frame, from the tables at the beginning of the text."""
    files = {n: text.strip('"') for n, text in _table(lines, "FileNames")}
    places: dict[int, tuple[str, int]] = {}
    for number, text in _table(lines, "FileLocations"):
        entry = _numbers(text)
        places[number] = (files.get(entry.get("file_name_id", 0), ""), entry.get("line", 0))
    found: dict[int, _Frames] = {}
    for number, text in _table(lines, "StackFrames"):
        entry = _numbers(text)
        outer = found.get(entry.get("parent_frame_id", 0) - 1, ())  # 1 stands for "none"
        place = places.get(entry.get("file_location_id", 0))
        found[number] = outer if place is None else (*outer, place)
    return found


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
