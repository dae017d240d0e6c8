"""Which layers the collectives of a compiled step send for, and in which phase: `Placing`."""

from __future__ import annotations

from .._program.hlo import Instruction, Value
from .._program.sends import Send, kind_of
from .._read.source import short_path
from .._searches import reach, readers
from .graph import Collective, Phase
from .phases import changes_params
from .places import MOVES, Places, is_backward, readers_of_parameters

# Instructions that put arrays together or take them apart. They are of no layer on the way of a gradient.
_REARRANGES = frozenset("reshape transpose broadcast slice dynamic-slice dynamic-update-slice concatenate pad".split())
_FAR = 12  # elementwise instructions between a gradient and the parameter that it changes
_ROOM, _ALONG = 1.25, 64  # how many elements a sum of gradients has more than these, at most: padding, and metrics
_END = -1  # in place of a layer, for an argument or a result
_UNKNOWN = -2  # for an instruction that computes and of which nothing tells the layer


class Placing:
    """Finds the layers and the phase of collectives."""

    def __init__(self, places: Places) -> None:
        self.program, self.places, self.phases = places.program, places, places.phases
        self._sources = places.net.sources()
        self._glue = {draft.at for draft in self.phases.glue}
        self._optimizers = {draft.at for draft in self.phases.optimizers}
        # Collectives behind an update send new params, and no gradients.
        self._after_update = {follower: follower for follower in self.phases.follows}
        params = {weight for row in self.phases.rows for each in (row.draft, *row.gathered) for weight in each.weights}
        self._behind_of = readers(self._sources)
        for draft in self.phases.optimizers:
            if changes_params(draft, params):
                behind = reach([draft.at], self._behind_of) & self._glue
                self._after_update |= dict.fromkeys(behind, draft.at)
        self._readers = readers_of_parameters(places.net, (row.draft for row in self.phases.rows))

    def place(self, send: Send) -> Collective:
        """The collective, with its phase and its layers."""
        instruction = send.instruction
        phase, layers = self._where(instruction)
        if phase == "gradients":
            layers = [layer for at in layers for layer in self.phases.whose_gradients(at, self._sources)]
        along = self._metrics(instruction) if phase == "gradients" else ()
        file, line = instruction.frames[-1] if instruction.frames else ("", 0)
        return Collective(
            name=instruction.name,
            kind=send.kind,
            bytes=send.bytes,
            arrays=len(send.arrays),
            devices=send.devices,
            axes=send.axes,
            times=send.times,
            is_exact=send.is_exact,
            phase=phase,
            layers=tuple(dict.fromkeys(self.places.names[at] for at in layers)),
            op_name=instruction.op_name,
            source=f"{short_path(file)}:{line}" if file else "",
            metrics=tuple(along),
        )

    def _metrics(self, instruction: Instruction) -> list[str]:
        """The results whose values a collective sends beside gradients."""
        ats: set[int] = set()
        for number, name in enumerate(instruction.operands):
            after = self._near([(instruction.name, number if instruction.is_tuple else None)], back=False)
            if {phase for _, phase in after} & {"forward", "elsewhere", "result"}:
                ats |= {at for at, phase in self._near([(name, None)], back=True) if phase in ("forward", "elsewhere")}
        row_of = self.phases.row_of
        above = {at: set[int]() if at in row_of else read for at, read in self._sources.items()}
        layers = reach(ats, above)
        return [name for name, rows in self.phases.metrics.items() if layers.intersection(rows)]

    def _where(self, instruction: Instruction) -> tuple[Phase, list[int]]:
        """Where most of the bytes go that are sent together, and the layers of all that go there."""
        at = self.places.draft_at.get(instruction.name)
        if {array.dtype for array in instruction.arrays} == {"pred"}:  # whether something is finite, and no gradient
            return "elsewhere", []
        if at is not None and at in self.phases.reported and all(array.size == 1 for array in instruction.arrays):
            return self._of_metric(at)
        if at is not None and at in self._after_update:
            return "optimizer", [self._after_update[at]]
        if at is not None and at in self._glue:
            layers = self._summed(instruction, at)
            if layers or not self._is_alone(instruction, at):
                return "gradients", layers
            return self._of_metric(at)
        if at is not None and at in self.phases.gathers:
            return "parameters", [row.draft.at for row in self.phases.gathers[at]]
        ways: dict[Phase, tuple[int, list[int]]] = {}
        for number, name in enumerate(instruction.operands):
            phase, layers = self._way(instruction, at, name, number if instruction.is_tuple else None)
            size, known_layers = ways.get(phase, (0, []))
            ways[phase] = (size + self.program[name].bytes, [*known_layers, *layers])
        if not ways:
            return "elsewhere", []
        phase = max(ways, key=lambda phase: ways[phase][0])
        if phase == "elsewhere" and at is not None:
            return self._of_metric(at)
        return phase, sorted(ways[phase][1])

    def _is_alone(self, instruction: Instruction, at: int) -> bool:
        """Whether a collective sends what its equation does, and the compiler has joined no other one with it."""
        raw = self.places.net.raw
        eqns = (raw.eqns[number] for draft in self.places.net.layers if draft.at == at for number in draft.eqns)
        sent = {value for eqn in eqns if not eqn.view for value in eqn.ins}
        return sum(raw.values[value].bytes for value in sent) == sum(
            self.program[name].bytes for name in instruction.operands
        )

    def _of_metric(self, at: int) -> tuple[Phase, list[int]]:
        """The last layer before what is sent for the results alone: the loss, or whether all gradients are finite."""
        row_of = self.phases.row_of
        above = {target: read for target, read in self._sources.items() if target not in row_of}
        rows = [row_of[end].draft.at for end in reach([at], above) if self.phases.of.get(end) == "forward"]
        return ("forward", [max(rows)]) if rows else ("elsewhere", [])

    def _way(
        self, instruction: Instruction, draft: int | None, name: str, number: int | None
    ) -> tuple[Phase, list[int]]:
        """Where one array comes from and goes to."""
        before = self._near([(name, None)], back=True)
        after = self._near([(instruction.name, number)], back=False)
        passes, goals = {phase for _, phase in before}, {phase for _, phase in after}
        readers = [at for at, phase in after if phase in ("forward", "backward")]
        if passes == {"argument"} and readers:
            # What reads it may be fused, and named after another layer. So the params that it shows come first.
            ends = (self.places.arguments.get(end, "") for end, _ in self._ends([(name, None)], back=True))
            params = sorted({param for param in ends if param in self._readers})
            layers = [
                at for param in params for at in self._readers[param].intersection(readers) or self._readers[param]
            ]
            known_layers = layers or [at for at in readers if at != _UNKNOWN]
            return ("parameters", known_layers) if known_layers else ("elsewhere", [])
        if passes == {"argument"} and self.phases.late:  # gradients of an earlier step
            return "gradients", self.phases.waiting
        of_gradient = "backward" in passes or ("optimizer" in goals and is_backward(instruction.op_name))
        if of_gradient and goals <= {"optimizer", "result"}:
            layers = [at for at, phase in before if phase == "backward"]
            return "gradients", self._by_parameter(instruction, number) or ([] if _UNKNOWN in layers else layers)
        return self._by_own(instruction, draft, [at for at, phase in before if phase in ("forward", "backward")])

    def _summed(self, instruction: Instruction, glue: int) -> list[int]:
        """The layers whose gradients a sum sends: those near it, or all that reach the equations of the sum.

        Where more elements are sent than those near it have, it is of others too: a fusion goes by one of its layers.
        """
        behind, layers = self._behind(glue), set[int]()
        for number, name in enumerate(instruction.operands):
            phase, near = self._way(instruction, glue, name, number if instruction.is_tuple else None)
            if phase != "gradients" or not near:
                return behind
            layers.update(near)
        rows = (self.phases.row_of[at] for at in layers)
        weights = {weight for row in rows for each in (row.draft, *row.gathered) for weight in each.weights}
        own = sum(self.places.net.raw.values[weight].elements for weight in weights)
        sent = sum(array.size for name in instruction.operands for array in self.program[name].arrays)
        has_all = not weights or sent <= _ROOM * own + _ALONG
        return sorted(layers) if layers and layers.issubset(behind) and has_all else behind

    def _by_parameter(self, instruction: Instruction, number: int | None) -> list[int]:
        """The layers of the parameter that a gradient changes, through elementwise instructions of its size.

        A device may go on with its own part of the gradient, or gather the parts of all. None where several parameters
        are read on the way, or none.
        """
        sizes = {instruction.arrays[number or 0].size}
        work: list[Value] = self.places.near([(instruction.name, number)], back=False)
        for _ in range(_FAR):
            names = {name for value in work for name in self.places.arguments_of(value[0]) if name in self._readers}
            if names or not work:
                return sorted(self._readers[names.pop()]) if len(names) == 1 else []
            near = [self.program[name] for name, _ in work]
            cuts_or_gathers = (one for one in near if one.opcode == "dynamic-slice" or kind_of(one) == "all-gather")
            sizes |= {array.size for one in cuts_or_gathers for array in one.arrays}
            same = [
                (near_one.name, at)
                for near_one, (_, at) in zip(near, work, strict=True)
                if any(array.size in sizes for array in near_one.arrays)
            ]
            work = list(dict.fromkeys(new for value in same for new in self.places.near([value], back=False)))
        return []

    def _by_own(self, instruction: Instruction, own_at: int | None, sources: list[int]) -> tuple[Phase, list[int]]:
        """The place that the collective's own metadata says, else that of what it sends."""
        if own_at in self._optimizers and own_at is not None:
            return "optimizer", [own_at]
        at = own_at if own_at in self.phases.row_of else next(iter(sources), None)
        if at is None or at == _UNKNOWN:
            return "elsewhere", []
        backward = is_backward(instruction.op_name) or self.phases.of.get(at) == "backward"
        return ("backward" if backward else "forward"), [self.phases.row_of[at].draft.at]

    def _behind(self, glue: int) -> list[int]:
        """The layers whose gradients reach what hands them on."""
        row_of = self.phases.row_of
        sources = {at: given for at, given in self.phases.given.items() if at not in row_of}
        reached = reach([glue], sources)
        if not self.phases.late.isdisjoint(reach([glue], self._behind_of)) and len(reached) == 1:
            return self.phases.waiting  # the gradients of an earlier step, which the state has
        ends = (at for at in reached if self.phases.of.get(at) == "backward" and at in row_of)
        return sorted({row_of[at].draft.at for at in ends})

    def _near(self, start: list[Value], *, back: bool) -> list[tuple[int, str]]:
        """The nearest layers in one direction, each with its phase.

        What computes and is of no known layer ends the way too: what is beyond it is another layer.
        """
        end = _END, "argument" if back else "result"
        ends = self._ends(start, back=back)
        return list(dict.fromkeys(self._meaning(self.program[name]) or end for name, _ in ends))

    def _ends(self, start: list[Value], *, back: bool) -> list[Value]:
        """The nearest instructions in one direction that compute for a layer, or end the program."""
        return self.places.near(start, back=back, goes_on=lambda instruction: self._meaning(instruction) is None)

    def _meaning(self, instruction: Instruction) -> tuple[int, str] | None:
        """The layer that an instruction computes for, and its phase. None for one that only hands arrays on."""
        at = self.places.draft_at.get(instruction.name)
        if (
            instruction.opcode in MOVES
            or instruction.opcode in _REARRANGES
            or kind_of(instruction)
            or at in self._glue
            or at in self.phases.gathers
        ):
            return None
        if at is None:
            phase = (
                "backward" if is_backward(instruction.op_name) else "forward" if "jvp(" in instruction.op_name else None
            )
            return (_UNKNOWN, phase) if phase else None
        row = self.phases.row_of.get(at)
        return (row.draft.at if row else at), self.phases.of.get(at, "elsewhere")
