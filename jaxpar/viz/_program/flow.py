"""Which instruction reads which, through tuples, calls, loops and branches; how often each runs, and how long."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from .hlo import Instruction, Program

Value = tuple[str, int | None]  # an instruction, and which array of its tuple

_CALLS = ("call", "async-start")
_PASSES = ("opt-barrier", "copy-start", "async-update", "async-done")
ALIASES = frozenset(("bitcast", "tuple", "get-tuple-element", "while", "call", "conditional", "parameter", *_PASSES))


class Flow:
    """The ways of arrays through a program.

    Args:
        program: as compiled.
        fused: whether the ways lead through the instructions inside of fusions. Else a fusion is one instruction.
    """

    def __init__(self, program: Program, *, fused: bool = False) -> None:
        self.program = program
        self._calls = (*_CALLS, "fusion") if fused else _CALLS
        self.users: dict[str, list[Instruction]] = {}
        self.callers: dict[str, list[tuple[str, Instruction]]] = {}
        for one in program:
            for name in dict.fromkeys(one.operands):
                self.users.setdefault(name, []).append(one)
            for how, name in one.called:
                self.callers.setdefault(name, []).append((how, one))

    def sources(self, value: Value) -> Iterator[Value]:
        """The arrays that this one is made of, one step back."""
        name, index = value
        one = self.program[name]
        if one.opcode == "get-tuple-element":
            yield one.operands[0], one.index
        elif one.opcode == "parameter":
            yield from self._arguments(one, index)
        elif one.opcode == "tuple" and index is not None:
            yield one.operands[index], None
        elif one.opcode in ("while", *self._calls, "conditional"):
            if one.opcode == "while":
                yield one.operands[0], index
            yield from ((self._root(body), index) for body in self._bodies(one))
        elif one.is_tuple and index is not None and index < len(one.operands) and one.opcode != "fusion":
            yield one.operands[index], None  # collectives, sorts
        else:
            yield from ((operand, index if one.opcode in _PASSES else None) for operand in one.operands)

    def readers(self, value: Value) -> Iterator[Value]:
        """The arrays that are made of this one, one step on."""
        name, index = value
        for user in self.users.get(name, ()):
            if user.opcode == "get-tuple-element":
                if index is None or user.index == index:
                    yield user.name, None
            elif user.opcode == "tuple":
                yield from ((user.name, at) for at, operand in enumerate(user.operands) if operand == name)
            elif user.opcode in ("while", *self._calls, "conditional"):
                yield from self._parameters(user, name, index)
                if user.opcode == "while":
                    yield user.name, index
            else:
                yield user.name, index if user.opcode in _PASSES else None
        yield from self._results(value)

    def _results(self, value: Value) -> Iterator[Value]:
        """Where the result of a computation goes, if this is it."""
        name, index = value
        home = self.program.home[name]
        if not self.program[name].is_root:
            return
        for how, caller in self.callers.get(home, ()):
            if how == "body":
                yield self._parameter(home, 0), index
            if how == "body" or caller.opcode in (*self._calls, "conditional"):
                yield caller.name, index

    def _arguments(self, one: Instruction, index: int | None) -> Iterator[Value]:
        """What is handed to a parameter. Nothing for one of the whole program."""
        home, number = self.program.home[one.name], number_of(one)
        for how, caller in self.callers.get(home, ()):
            if how in ("body", "condition"):
                yield caller.operands[0], index
                if how == "body":
                    yield self._root(home), index
            elif caller.opcode == "conditional":
                branch = self._bodies(caller).index(home)
                yield caller.operands[1 + branch], index
            elif caller.opcode in self._calls and number < len(caller.operands):
                yield caller.operands[number], index

    def _parameters(self, user: Instruction, name: str, index: int | None) -> Iterator[Value]:
        """The parameters of what an instruction calls that receive an operand."""
        for at, operand in enumerate(user.operands):
            if operand != name:
                continue
            if user.opcode == "while":
                yield from ((self._parameter(body, 0), index) for _, body in user.called)
            elif user.opcode == "conditional":
                yield from ((self._parameter(body, 0), index) for body in self._bodies(user)[max(0, at - 1) : at])
            else:
                yield from ((self._parameter(body, at), index) for body in self._bodies(user))

    def _bodies(self, one: Instruction) -> list[str]:
        known = (name for how, name in one.called if how != "condition")
        return [name for name in known if name in self.program.computations]

    def _root(self, computation: str) -> str:
        return self.program.computations[computation].root.name

    def _parameter(self, computation: str, number: int) -> str:
        found = self.program.computations[computation].instructions.values()
        return next(one.name for one in found if one.opcode == "parameter" and number_of(one) == number)


def number_of(parameter: Instruction) -> int:
    """The number of a parameter. The reader of the text takes it for an operand."""
    return int(re.sub(r"\D", "", parameter.operands[0])) if parameter.operands else 0


_CYCLES = re.compile(r'"estimated_cycles":"(\d{1,18})"')  # the largest number of 64 bits says that there is no estimate
_MOVES = ("copy", "bitcast", "get-tuple-element", "tuple", "copy-start", "copy-done", "opt-barrier")


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


def cycles_of(program: Program) -> int | None:
    """The cycles that the compiler of TPUs estimates for one step. None where the program says none.

    It estimates fusions, products and the like. Collectives and most copies have no estimate. Of branches the longest
    counts, and a loop of unknown length runs once.
    """
    flow = Flow(program)

    @functools.cache
    def cycles(computation: str) -> int:
        return sum(map(of, program.computations[computation].instructions.values()))

    def of(one: Instruction) -> int:
        own = sum(map(int, _CYCLES.findall(one.attributes)))
        inner = [cycles(name) for _, name in one.called if name in program.computations]
        if one.opcode == "conditional":
            return own + max(inner, default=0)
        times = _trips(flow, one) or 1 if one.opcode == "while" else 1
        return own + times * sum(inner)

    return cycles(program.entry) or None


def _callers(program: Program) -> dict[str, list[tuple[str, int, bool]]]:
    """For each computation: who calls it, how often, and whether that is known."""
    found: dict[str, list[tuple[str, int, bool]]] = {}
    flow = Flow(program)
    for one in program:
        loops = one.opcode == "while"
        for _, name in dict(one.called).items() if loops else one.called:
            trips = _trips(flow, one) if loops else 1
            found.setdefault(name, []).append((program.home[one.name], trips or 1, trips is not None))
    return found


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
    own = [at for name, at in added if program[name].opcode == "parameter" and program.home[name] == called["body"]]
    if first is None or own != [counter.index] or len(steps) != 1 or (by := steps[0] or 0) < 1:
        return None
    return max(0, -(-(bound.value - first) // by))


def _behind(flow: Flow, value: Value) -> Value:
    """Where a value is computed, behind copies and tuples."""
    while flow.program[value[0]].opcode in _MOVES and (sources := list(flow.sources(value))):
        value = sources[0]
    return value
