"""Where in a step each collective happens, and whose arrays travel in it."""

from __future__ import annotations

import math

from .._program.flow import Value
from .._program.hlo import Instruction
from .._program.sends import Send, kind_of
from .graph import Collective, Phase
from .phases import Phases
from .places import MOVES, Places, is_backward

# Instructions that put arrays together or take them apart. They are of no layer on the way of a gradient.
_REARRANGES = frozenset("reshape transpose broadcast slice dynamic-slice dynamic-update-slice concatenate pad".split())
_MOST = 4000  # instructions looked at for one collective
_FAR = 12  # elementwise instructions between a gradient and the parameter that it changes
_UNKNOWN = -2  # in place of a layer, for an instruction that computes and of which nothing tells the layer


class Placing:
    """Finds the layers and the phase of collectives."""

    def __init__(self, places: Places, phases: Phases, names: dict[int, str]) -> None:
        self.program, self.places, self.phases, self.names = places.program, places, phases, names
        self._glue = {draft.at for draft in phases.glue}
        self._optimizers = {draft.at for draft in phases.optimizers}
        self._readers = _readers(places, phases)

    def place(self, send: Send) -> Collective:
        """The collective, with its phase and its layers."""
        one = send.instruction
        phase, layers = self._where(one)
        file, line = one.frames[-1] if one.frames else ("", 0)
        return Collective(
            name=one.name,
            kind=send.kind,
            bytes=send.bytes,
            arrays=len(send.arrays),
            devices=send.devices,
            axes=send.axes,
            times=send.times,
            is_exact=send.is_exact,
            phase=phase,
            layers=tuple(dict.fromkeys(self.names[at] for at in layers)),
            op_name=one.op_name,
            source=f"{'/'.join(file.split('/')[-2:])}:{line}" if file else "",
        )

    def _where(self, one: Instruction) -> tuple[Phase, list[int]]:
        """Where most of the bytes go that are sent together, and the layers of all that go there."""
        own = self.places.draft_of(one)
        if own is not None and own in self._glue:
            return "gradients", self._behind(own)
        found: dict[Phase, tuple[int, list[int]]] = {}
        for number, name in enumerate(one.operands):
            phase, layers = self._way(one, own, name, number if one.is_tuple else None)
            size, known = found.get(phase, (0, []))
            found[phase] = (size + self.program[name].bytes, [*known, *layers])
        if not found:
            return "elsewhere", []
        phase = max(found, key=lambda phase: found[phase][0])
        return phase, sorted(found[phase][1])

    def _way(self, one: Instruction, own: int | None, name: str, number: int | None) -> tuple[Phase, list[int]]:
        """Where one array comes from and goes to."""
        before = self._near([(name, None)], back=True)
        after = self._near([(one.name, number)], back=False)
        passes, goals = {phase for _, phase in before}, {phase for _, phase in after}
        readers = [at for at, phase in after if phase in ("forward", "backward")]
        if passes == {"argument"} and readers:
            known = _known(readers)
            return ("parameters", known) if known else ("elsewhere", [])
        of_gradient = "backward" in passes or ("optimizer" in goals and is_backward(one.op_name))
        if of_gradient and goals <= {"optimizer", "result"}:
            layers = [at for at, phase in before if phase == "backward"]
            return "gradients", _known(layers) if _UNKNOWN not in layers else self._by_parameter(one, number)
        return self._by_own(one, own, [at for at, phase in before if phase in ("forward", "backward")])

    def _by_parameter(self, one: Instruction, number: int | None) -> list[int]:
        """The layers of the parameter that a gradient changes, through elementwise instructions of its size.

        None where several parameters are read on the way, or none.
        """
        size = math.prod(one.arrays[number or 0].shape)
        work: list[Value] = self.places.near([(one.name, number)], back=False)
        for _ in range(_FAR):
            names = {name for value in work for name in self._arguments(value[0]) if name in self._readers}
            if names or not work:
                return sorted(self._readers[names.pop()]) if len(names) == 1 else []
            same = [value for value in work if size in (math.prod(a.shape) for a in self.program[value[0]].arrays)]
            work = list(dict.fromkeys(new for value in same for new in self.places.near([value], back=False)))
        return []

    def _arguments(self, name: str) -> set[str]:
        """The names of the arguments that an instruction reads."""
        near = self.places.near([(operand, None) for operand in self.program[name].operands], back=True)
        return {self.places.arguments[one] for one, _ in near if one in self.places.arguments}

    def _by_own(self, one: Instruction, own: int | None, sources: list[int]) -> tuple[Phase, list[int]]:
        """The place that the collective's own metadata says, else that of what it sends."""
        if own in self._optimizers and own is not None:
            return "optimizer", [own]
        at = own if own in self.phases.row_of else next(iter(sources), None)
        if at is None or at == _UNKNOWN:
            return "elsewhere", []
        backward = is_backward(one.op_name) or self.phases.of.get(at) == "backward"
        return ("backward" if backward else "forward"), [self.phases.row_of[at].draft.at]

    def _behind(self, glue: int) -> list[int]:
        """The layers whose gradients reach what hands them on."""
        sources = self.places.net.sources()
        work, seen, found = [glue], {glue}, list[int]()
        while work:
            for source in sorted(sources.get(work.pop(), ())):
                row = self.phases.row_of.get(source)
                if row is not None:
                    found.append(row.draft.at)
                elif source not in seen:
                    seen.add(source)
                    work.append(source)
        return sorted(dict.fromkeys(found))

    def _near(self, start: list[Value], *, back: bool) -> list[tuple[int, str]]:
        """The nearest layers in one direction, each with its phase. -1 is no layer, but an argument or a result.

        What computes and is of no known layer ends the way too: what is beyond it is another layer.
        """
        found: dict[tuple[int, str], None] = {}
        work, seen = self.places.near(start, back=back), set[Value]()
        while work and len(seen) < _MOST:
            value = work.pop()
            if value in seen:
                continue
            seen.add(value)
            here = self._meaning(value[0])
            if here is not None:
                found[here] = None
            elif self.places.is_end(value[0], back=back):
                found[-1, "argument" if back else "result"] = None
            else:
                operands: list[Value] = [(name, None) for name in self.program[value[0]].operands]
                work += self.places.near(operands if back else [value], back=back)
        return list(found)

    def _meaning(self, name: str) -> tuple[int, str] | None:
        """The layer that an instruction computes for, and its phase. None for one that only hands arrays on."""
        one = self.program[name]
        at = self.places.draft_of(one)
        if one.opcode in MOVES or one.opcode in _REARRANGES or kind_of(one) or at in self._glue:
            return None
        if at is None:
            phase = "backward" if is_backward(one.op_name) else "forward" if "jvp(" in one.op_name else None
            return (_UNKNOWN, phase) if phase else None
        row = self.phases.row_of.get(at)
        return (row.draft.at if row else at), self.phases.of.get(at, "elsewhere")


def _known(layers: list[int]) -> list[int]:
    return [at for at in layers if at != _UNKNOWN]


def _readers(places: Places, phases: Phases) -> dict[str, set[int]]:
    """The layers that read each parameter."""
    values, found = places.net.raw.values, dict[str, set[int]]()
    for row in phases.rows:
        for weight in row.draft.weights:
            found.setdefault(values[weight].name, set()).add(row.draft.at)
    return found
