"""Which layer each instruction of a compiled step was compiled from, by the Python lines that both keep: `Places`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

from .._layout.net import Draft, Net
from .._program.hlo import Flow, Instruction, Program, Value
from .._read.raw import Eqn
from .._read.source import short_path
from .._searches import readers
from .phases import phases_of

# Instructions that only move arrays: a way goes on through them.
MOVES = frozenset(
    "bitcast tuple get-tuple-element while call conditional fusion parameter opt-barrier copy-start copy-done copy "
    "async-start async-update async-done convert all-reduce-done all-gather-done collective-permute-done".split()
)
_ROUNDS = 3
_MOST = 20_000  # instructions looked at for one question


class Places:
    """The draft that each instruction was compiled from, `draft_at`, and the phase that each draft is part of.

    Equations and instructions both keep the Python calls around them, and the innermost ones are compared first. Of
    equations with the same calls, those of the same pass and primitive are taken. Where several layers are left, as for
    the passes of a Python loop, the parameters that an instruction reads and its neighbours tell which. Where nothing
    tells, the instruction has no draft.
    """

    def __init__(self, program: Program, net: Net, names: dict[int, str]) -> None:
        self.program, self.net, self.names, self.phases = program, net, names, phases_of(net)
        self.flow = Flow(program, fused=True)
        self.arguments: dict[str, str] = _arguments(program, net)
        self.draft_at: dict[str, int] = {}
        self._resolve(_Index(net))

    def drafts_of(self, instruction: Instruction) -> list[int]:
        """The drafts of an instruction and of all that it fuses."""
        instructions = [instruction]
        for how, name in instruction.called:
            if how == "calls" and instruction.opcode == "fusion":
                instructions += self.program.computations[name].instructions.values()
        return list(dict.fromkeys(self.draft_at[inner.name] for inner in instructions if inner.name in self.draft_at))

    def _resolve(self, index: _Index) -> None:
        open_ones: dict[str, list[int]] = {}
        other_code: dict[str, list[int]] = {}  # of another platform than the trace
        for instruction in self.program:
            if not instruction.op_name or instruction.opcode in ("parameter", "constant"):
                continue
            drafts, is_same = index.drafts_of(instruction)
            if len(drafts) == 1:
                self.draft_at[instruction.name] = drafts[0]
            elif drafts:
                (open_ones if is_same else other_code)[instruction.name] = drafts
        # Parameters tell layers of one place apart, and neighbours tell what is left. An answer is a neighbour of
        # others, so that is asked again.
        self._by_parameters(open_ones)
        self._by_parameters(other_code)
        for _ in range(_ROUNDS):
            before = len(open_ones)
            self._by_neighbours(open_ones)
            if len(open_ones) == before:
                break

    def _by_parameters(self, open_ones: dict[str, list[int]]) -> None:
        """Decide by the parameters that an instruction reads."""
        readers_of = readers_of_parameters(self.net, self.net.layers)
        for name, drafts in list(open_ones.items()) if readers_of else ():
            reading = [readers_of.get(parameter, set()) for parameter in self.arguments_of(name)]
            fitting = [
                at
                for at in drafts
                if any(at in candidates and not candidates.issuperset(drafts) for candidates in reading)
            ]
            if len(fitting) == 1:
                self.draft_at[name] = fitting[0]
                del open_ones[name]

    def arguments_of(self, name: str) -> set[str]:
        """The names of the arguments that an instruction reads."""
        return {self.arguments[source] for source in self._before(name) if source in self.arguments}

    def _before(self, name: str) -> list[str]:
        return [
            source for source, _ in self.near([(operand, None) for operand in self.program[name].operands], back=True)
        ]

    def _by_neighbours(self, open_ones: dict[str, list[int]]) -> None:
        """Decide by the layers before and after an instruction."""
        before = self.net.sources()
        after = readers(before)
        for name in [*open_ones, *reversed(open_ones)]:
            if name not in open_ones:
                continue
            drafts = open_ones[name]
            outputs = [neighbour for neighbour, _ in self.near([(name, None)], back=False)]
            votes: Counter[int] = Counter()
            for near, joined in ((self._before(name), before), (outputs, after)):
                decided = {self.draft_at[neighbour] for neighbour in near if neighbour in self.draft_at}
                votes.update(at for at in drafts if decided.intersection([at, *joined.get(at, ())]))
            if len(votes) == 1:
                (self.draft_at[name],) = votes
                del open_ones[name]

    def near(
        self, start: list[Value], *, back: bool, goes_on: Callable[[Instruction], bool] | None = None
    ) -> list[Value]:
        """The nearest instructions in one direction that compute something, or end the program.

        `goes_on` says through which a way goes on: those that only move arrays.
        """
        step = self.flow.sources if back else self.flow.readers
        work = list(start) if back else [value for instruction in start for value in step(instruction)]
        seen, ends = set(work), list[Value]()
        while work and len(seen) < _MOST:
            value = work.pop()
            instruction = self.program[value[0]]
            moves = instruction.opcode in MOVES if goes_on is None else goes_on(instruction)
            if not moves or self.is_end(instruction, back=back):
                ends.append(value)
                continue
            new = [other for other in step(value) if other not in seen]
            seen.update(new)
            work += new
        return ends

    def is_end(self, instruction: Instruction, *, back: bool) -> bool:
        """Whether an instruction is an argument, or the result, of the whole program."""
        entry = self.program.computations[self.program.entry]
        if back:
            return instruction.opcode == "parameter" and instruction.name in entry.instructions
        return instruction is entry.root


_Frame = tuple[str, int]  # the last two parts of a file's path, and a line


class _Index:
    """Equations by the Python calls around them."""

    def __init__(self, net: Net) -> None:
        self._owner = {number: draft.at for draft in net.drafts for number in draft.eqns}
        self._inside: dict[_Frame, list[Eqn]] = {}
        self._through: dict[_Frame, list[Eqn]] = {}
        self._stacks: dict[int, tuple[_Frame, ...]] = {}
        self._known: dict[tuple[str, tuple[_Frame, ...], tuple[int, ...]], tuple[list[int], bool]] = {}
        for eqn in net.raw.eqns:
            frames = tuple((frame.file, frame.line) for frame in eqn.stack if frame.origin != "jax" and frame.file)
            if eqn.id in self._owner and frames:
                self._stacks[eqn.id] = frames
                self._inside.setdefault(frames[-1], []).append(eqn)
                for frame in set(frames):
                    self._through.setdefault(frame, []).append(eqn)

    def drafts_of(self, instruction: Instruction) -> tuple[list[int], bool]:
        """The drafts that an instruction may be of, and whether it is of the code that was traced."""
        sizes = tuple(array.size for array in instruction.arrays)
        key = (instruction.op_name, instruction.frames, sizes)
        if key not in self._known:
            candidates, is_same = self._equations(instruction)
            eqns = _alike(candidates, instruction) if is_same else _same_pass(candidates, instruction)
            self._known[key] = list(dict.fromkeys(self._owner[eqn.id] for eqn in eqns)), is_same
        return self._known[key]

    def _equations(self, instruction: Instruction) -> tuple[list[Eqn], bool]:
        """The equations that share the most calls with an instruction, seen from the inside.

        Code of another platform may have been compiled than traced. Then they share outer calls only.
        """
        frames = tuple((short_path(file), line) for file, line in instruction.frames)
        if frames and (candidates := self._inside.get(frames[-1])):
            shared = {eqn.id: _common_end(self._stacks[eqn.id], frames) for eqn in candidates}
            most = max(shared.values())
            return [eqn for eqn in candidates if shared[eqn.id] == most], True
        by_frame = (self._through[frame] for frame in reversed(frames) if frame in self._through)
        return next(by_frame, []), False


def _arguments(program: Program, net: Net) -> dict[str, str]:
    """The name of the argument of the traced function that each parameter of the program is.

    The program may name them otherwise, and lack those that nothing reads. The order is the same.
    """
    leaves = [value for value in net.raw.values if value.kind in ("weight", "input")]
    names: dict[str, str] = {}
    at = 0
    for parameter in program.arguments:
        shape = parameter.arrays[0].shape
        named = (n for n, leaf in enumerate(leaves) if leaf.name == parameter.op_name)
        next_one = (n for n in range(at, len(leaves)) if may_be(shape, leaves[n].shape))
        number = next(named, next(next_one, None))
        if number is not None:
            names[parameter.name], at = leaves[number].name, number + 1
    return names


def may_be(local_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array may be one device's part of another, also of one in padded rows, (devices, chunk)."""
    size, devices = math.prod(local_shape), shape[0] if len(shape) == 2 else 0
    in_rows = any(0 <= math.prod(shape) - size * count < devices for count in (1, devices))
    return is_part(local_shape, shape) or in_rows


def is_part(local_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array may be one device's part of another."""
    return len(local_shape) == len(shape) and all(_divides(a, b) for a, b in zip(local_shape, shape, strict=True))


def is_backward(op_name: str) -> bool:
    """Whether an instruction is of a gradient, or computed again for one."""
    return "transpose(" in op_name or "rematted_computation" in op_name


def primitive_of(op_name: str) -> str:
    """The primitive that an instruction was made of. Of several the last.

    >>> primitive_of("jit(step)/transpose(jvp(net))/dot_general")
    'dot_general'
    """
    return op_name.rstrip(")").rsplit("/", 1)[-1]


def _alike(eqns: list[Eqn], instruction: Instruction) -> list[Eqn]:
    """The equations of the same pass, and of the same primitive. Of those that are left, the ones of the same size."""
    prim, sizes = primitive_of(instruction.op_name), {array.size for array in instruction.arrays}
    same_pass = _same_pass(eqns, instruction)
    same = [eqn for eqn in same_pass if eqn.prim == prim]
    if not same:  # the size of another primitive tells nothing
        return same_pass
    return [eqn for eqn in same if any(_divides(size, math.prod(eqn.out_shape)) for size in sizes)] or same


def _same_pass(eqns: list[Eqn], instruction: Instruction) -> list[Eqn]:
    backward = is_backward(instruction.op_name)
    return [eqn for eqn in eqns if (eqn.backward or eqn.again) == backward] or eqns


def _divides(size: int, total: int) -> bool:
    return size > 0 and total % size == 0


def _common_end(frames: tuple[_Frame, ...], other: tuple[_Frame, ...]) -> int:
    """How many of the innermost calls are the same."""
    pairs = zip(reversed(frames), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def readers_of_parameters(net: Net, layers: Iterable[Draft]) -> dict[str, set[int]]:
    """Which of these layers read each parameter, by its name."""
    readers_of: dict[str, set[int]] = {}
    for draft in layers:
        for weight in draft.weights:
            readers_of.setdefault(net.raw.values[weight].name, set()).add(draft.at)
    return readers_of
