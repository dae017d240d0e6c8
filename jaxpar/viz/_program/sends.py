"""The collectives of a compiled program: what each sends, how often, between which devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .groups import axes_between, axes_of, groups_of
from .hlo import Array, Instruction, Program

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
    """One collective of a compiled program.

    Attributes:
        instruction: its own, or the first half of an asynchronous one.
        kind: one of `KINDS`.
        arrays: what one device hands in.
        devices: how many devices exchange it.
        axes: of the mesh. Empty where the devices are no set of its axes.
        times: how often it runs in a step.
        is_exact: whether `times` is known. A loop of unknown length counts once.
    """

    instruction: Instruction
    kind: str
    arrays: tuple[Array, ...]
    devices: int
    axes: tuple[str, ...]
    times: int
    is_exact: bool

    @property
    def bytes(self) -> int:
        """That one device hands in each time."""
        return sum(array.bytes for array in self.arrays)


def sends_of(program: Program, mesh: Mapping[str, int], devices: int) -> list[Send]:
    """Every collective between at least two devices, in the order of the text.

    An asynchronous collective counts where it begins. What an `async-start` wraps counts in its own computation.

    Args:
        program: as compiled.
        mesh: the size of each axis.
        devices: how many devices the program runs on.

    Raises:
        ValueError: the devices of a collective cannot be read.
    """
    runs = runs_of(program)
    return [send for one in _collectives(program) if (send := _send(program, one, runs, mesh, devices)).devices > 1]


def kind_of(instruction: Instruction) -> str:
    """The kind of a collective. Empty for other instructions, and for the second half of an asynchronous one."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def _collectives(program: Program) -> Iterator[Instruction]:
    for one in program:
        wraps = [name for how, name in one.called if how == "calls"]
        if kind_of(one) and not any(name in program.computations for name in wraps):
            yield one


def _send(
    program: Program, one: Instruction, runs: dict[str, tuple[int, bool]], mesh: Mapping[str, int], devices: int
) -> Send:
    times, is_exact = runs.get(program.home[one.name], (1, False))
    kind, groups = kind_of(one), groups_of(one, devices)
    permutes = kind == "collective-permute"
    axes = axes_between(groups, mesh) if permutes else axes_of(groups, mesh)
    members = {device for group in groups for device in group}
    count = len(members) if permutes else max(map(len, groups), default=1)
    return Send(one, kind, operand_arrays(program, one), count, axes, times, is_exact)


def operand_arrays(program: Program, one: Instruction) -> tuple[Array, ...]:
    """The arrays that an instruction reads."""
    found = (program[name] for name in one.operands if name in program.home)
    return tuple(array for operand in found for array in operand.arrays)


def runs_of(program: Program) -> dict[str, tuple[int, bool]]:
    """How often each computation runs, and whether that is known. A branch counts as taken."""
    callers = _callers(program)
    found: dict[str, tuple[int, bool]] = {program.entry: (1, True)}

    def count(name: str) -> tuple[int, bool]:
        if name not in found:
            found[name] = (0, True)  # a computation that nothing calls does not run
            times, known = 0, True
            for caller, trips, exact in callers.get(name, ()):
                outer, sure = count(caller)
                times, known = times + outer * trips, known and exact and sure
            found[name] = (times, known)
        return found[name]

    for name in program.computations:
        count(name)
    return found


def _callers(program: Program) -> dict[str, list[tuple[str, int, bool]]]:
    """For each computation: who calls it, how often, and whether that is known."""
    found: dict[str, list[tuple[str, int, bool]]] = {}
    for one in program:
        loops = one.opcode == "while"
        for _, name in dict(one.called).items() if loops else one.called:
            trips = (one.trips if one.trips is not None else 1) if loops else 1
            exact = not loops or one.trips is not None
            found.setdefault(name, []).append((program.home[one.name], trips, exact))
    return found
