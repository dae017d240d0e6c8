"""What belongs where in a compiled step: drafts to phases and layers, instructions to drafts, collectives to layers.

Three questions in this order: `phases_of` (forward, backward, optimizer), `Places` (which layer an instruction was
compiled from, by the Python lines that both keep), `Placing` (which layers a collective sends for).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .._fold.cells import COLLECTIVES
from .._graph import BACKWARD
from .._layout.net import Draft, Net
from .._program.hlo import Flow, Instruction, Program, Value
from .._program.sends import Send, kind_of
from .._read.raw import Eqn, Raw
from .._read.source import short_path
from .._searches import reach, readers
from .graph import Collective, Phase


@dataclass(slots=True, eq=False)
class Row:
    """A layer: its draft, those of its gradient and of what is computed again for that, and what gathers its params."""

    draft: Draft
    backward: list[Draft] = field(default_factory=list)
    gathered: list[Draft] = field(default_factory=list)


@dataclass(slots=True)
class Phases:
    """Which draft is part of what."""

    rows: list[Row] = field(default_factory=list)  # the layers, in the order of the trace
    optimizers: list[Draft] = field(default_factory=list)  # what follows the gradients and is no glue
    glue: list[Draft] = field(default_factory=list)  # collectives and copies, which only hand gradients on
    of: dict[int, Phase] = field(default_factory=dict[int, Phase])  # of each draft
    row_of: dict[int, Row] = field(default_factory=dict)  # of each forward and backward draft
    gathers: dict[int, list[Row]] = field(default_factory=dict)  # what only gathers params: the layers that read it
    metrics: dict[str, list[int]] = field(default_factory=dict)  # each result that is no new state: its layers


def phases_of(net: Net) -> Phases:
    """The phases of a step. A step without gradients has no backward part anywhere."""
    phases = Phases()
    sources = net.sources()
    readers_of = readers(sources)
    gradients = {draft.at for draft in net.layers if draft.op.endswith(BACKWARD)}
    after = reach(gradients, readers_of)
    again = {d.at for d in net.layers if d.eqns and all(net.raw.eqns[number].again for number in d.eqns)}  # by remat
    before = reach(gradients | again, sources)
    layers = {draft.forward.at for draft in net.layers if draft.forward is not None}
    results = _results(net.raw)
    gathers = _gathers(net, sources, readers_of) - layers
    for draft in net.layers:
        if draft.at in gathers and draft.at in before:
            phases.of[draft.at] = "parameters"
        elif draft.at in gradients or draft.at in again:
            phases.of[draft.at] = "backward"
        elif draft.at in after:
            phases.of[draft.at] = "optimizer"
        elif draft.at in before or draft.at in layers:
            phases.of[draft.at] = "forward"
            row = phases.row_of[draft.at] = Row(draft)
            phases.rows.append(row)
        else:  # a schedule of the optimizer reads no layer; a metric, or the check of a loss for NaN, does
            reads_layers = not reach([draft.at], sources).isdisjoint(before | layers)
            is_schedule = not reads_layers and reach([draft.at], readers_of) & after
            phases.of[draft.at] = "optimizer" if is_schedule else "elsewhere"
    _add_backward(net, phases)
    for draft in (draft for draft in net.layers if phases.of[draft.at] == "parameters"):
        ways = {at: read if phases.of.get(at) == "parameters" else set[int]() for at, read in readers_of.items()}
        rows = [phases.row_of[at] for at in sorted(reach([draft.at], ways)) if at in phases.row_of]
        phases.gathers[draft.at] = list({row.draft.at: row for row in rows}.values())
        for row in rows[:1] if draft.weights else ():
            row.gathered.append(draft)
    for draft in (draft for draft in net.layers if phases.of[draft.at] == "optimizer"):
        # What hands gradients on to an optimizer reads no parameters and returns no new state, or is a collective.
        updates = draft.op not in COLLECTIVES and (draft.weights or any(name not in results for name in draft.outputs))
        (phases.glue if draft.at in after and not updates else phases.optimizers).append(draft)
    # A metric may pass a sum over the devices, which packs it with others. So its layers are all that reach the sum.
    updated = {draft.at for draft in phases.optimizers}
    above = {at: {} if at in phases.row_of or at in updated else read for at, read in sources.items()}
    for draft in net.layers:
        for name in (name for name in draft.outputs if name in results):
            rows = [at for at in reach([draft.at], above) if phases.of.get(at) == "forward" and at in phases.row_of]
            is_loss = draft.at in phases.row_of or draft.op == "Loss"
            shown = results[name] or ("loss" if is_loss else name)
            if rows:
                phases.metrics[name if shown in phases.metrics else shown] = sorted(rows)
    phases.metrics = dict(
        sorted(phases.metrics.items(), key=lambda metric: metric[0] != "loss")
    )  # the loss comes first
    return phases


def _gathers(net: Net, sources: Mapping[int, Iterable[int]], readers_of: Mapping[int, Iterable[int]]) -> set[int]:
    """What sends params between devices before a layer reads them, and the joining and cutting around that.

    The compiled program says what is sent, so a step has no boxes for these.
    """
    of_data = reach((draft.at for draft in net.drafts if draft.op == "input"), readers_of)
    of_params = {draft.at for draft in net.layers} - of_data
    sent = [draft.at for draft in net.layers if draft.at in of_params and draft.op in COLLECTIVES]
    around = (
        reach(sent, {at: of_params.intersection(ends) for at, ends in wires.items() if at in of_params})
        for wires in (sources, readers_of)
    )
    return set[int]().union(*around)


def _results(raw: Raw) -> dict[str, str]:
    """The results that are no new state, and how each is called: "loss" for "output[1]['loss']", "" for "output[2]".

    A new state has the path below its argument, the shape and the dtype of an old one.
    """
    old = {
        (value.name.removeprefix(value.argument), value.shape, value.dtype)
        for value in raw.values
        if value.kind in ("weight", "input")
    }
    results: dict[str, str] = {}
    for name, number in zip(raw.output_names, raw.outputs, strict=True):
        value = raw.values[number]
        tails = name.removeprefix("output"), _ARGUMENT.sub("", name)
        if not any((tail, value.shape, value.dtype) in old for tail in tails):
            keys = _KEY.findall(name)
            results[name] = "".join(keys[-1]) if keys else ""
    return results


_ARGUMENT = re.compile(r"^output(\[\d+\])?")
_KEY = re.compile(r"\['([^']+)'\]|\.(\w+)")


def _add_backward(net: Net, phases: Phases) -> None:
    """Give each backward draft to its layer. What is computed again belongs to the layer of the same place."""
    at_place: dict[int, Row] = {}
    sources = net.sources()
    for row in phases.rows:
        for number in row.draft.eqns:
            at_place.setdefault(net.raw.eqns[number].position, row)
    for draft in (draft for draft in net.layers if phases.of[draft.at] == "backward"):
        row = phases.row_of.get(draft.layer.at)
        if row is None:
            eqns = [net.raw.eqns[number] for owner in (draft.forward, draft) if owner for number in owner.eqns]
            places = [eqn.position for eqn in eqns] + [number for eqn in eqns for number in net.raw.above(eqn)]
            row = next((at_place[number] for number in places if number in at_place), None)
            row = row or _computed_again(net, phases, draft.layer, sources)
        if row is not None:
            row.backward.append(draft)
            phases.row_of[draft.at] = row


def _computed_again(net: Net, phases: Phases, again: Draft, sources: dict[int, set[int]]) -> Row | None:
    """The layer that remat computes again in another place: of the same line, and of the same params or operands."""

    def lines(draft: Draft) -> set[tuple[str, int]]:
        stacks = (net.raw.own_stack(net.raw.eqns[number]) for number in draft.eqns)
        return {(stack[-1].file, stack[-1].line) for stack in stacks if stack}

    at_lines = lines(again)
    rows = [row for row in phases.rows if row.draft.op == again.op and not at_lines.isdisjoint(lines(row.draft))]
    if again.weights:
        return next((row for row in rows if not set(row.draft.weights).isdisjoint(again.weights)), None)
    reads = {phases.row_of[at].draft.at if at in phases.row_of else at for at in sources.get(again.at, ())}
    same = [row for row in rows if not reads.isdisjoint(sources.get(row.draft.at, ()))]
    return same[0] if len(same) == 1 else rows[0] if len(rows) == 1 else None


# Instructions that only move arrays: a way goes on through them.
_MOVES = frozenset(
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
        readers_of = _readers_of_parameters(self.net, self.net.layers)
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
            moves = instruction.opcode in _MOVES if goes_on is None else goes_on(instruction)
            if not moves or self.is_end(instruction, back=back):
                ends.append(value)
                continue
            new = [other for other in step(value) if other not in seen]
            seen.update(new)
            work += new
        return ends

    def is_end(self, instruction: Instruction, *, back: bool) -> bool:
        """Whether an instruction is an argument, or the result, of the whole program."""
        if self.program.home[instruction.name] != self.program.entry:
            return False
        return instruction.opcode == "parameter" if back else instruction.is_root


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
        named = (n for n, leaf in enumerate(leaves) if leaf.name == parameter.argument)
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


# Instructions that put arrays together or take them apart. They are of no layer on the way of a gradient.
_REARRANGES = frozenset("reshape transpose broadcast slice dynamic-slice dynamic-update-slice concatenate pad".split())
_FAR = 12  # elementwise instructions between a gradient and the parameter that it changes
_END = -1  # in place of a layer, for an argument or a result
_UNKNOWN = -2  # for an instruction that computes and of which nothing tells the layer


class Placing:
    """Finds the layers and the phase of collectives."""

    def __init__(self, places: Places) -> None:
        self.program, self.places, self.phases = places.program, places, places.phases
        self._glue = {draft.at for draft in self.phases.glue}
        self._optimizers = {draft.at for draft in self.phases.optimizers}
        self._readers = _readers_of_parameters(places.net, (row.draft for row in self.phases.rows))

    def place(self, send: Send) -> Collective:
        """The collective, with its phase and its layers."""
        instruction = send.instruction
        phase, layers = self._where(instruction)
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
        net, row_of = self.places.net, self.phases.row_of
        above = {at: set[int]() if at in row_of else read for at, read in net.sources().items()}
        layers = reach(ats, above)
        return [name for name, rows in self.phases.metrics.items() if layers.intersection(rows)]

    def _where(self, instruction: Instruction) -> tuple[Phase, list[int]]:
        """Where most of the bytes go that are sent together, and the layers of all that go there."""
        at = self.places.draft_at.get(instruction.name)
        if at is not None and at in self._glue:
            return "gradients", self._summed(instruction, at)
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
        return phase, sorted(ways[phase][1])

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
        of_gradient = "backward" in passes or ("optimizer" in goals and is_backward(instruction.op_name))
        if of_gradient and goals <= {"optimizer", "result"}:
            layers = [at for at, phase in before if phase == "backward"]
            return "gradients", self._by_parameter(instruction, number) or ([] if _UNKNOWN in layers else layers)
        return self._by_own(instruction, draft, [at for at, phase in before if phase in ("forward", "backward")])

    def _summed(self, instruction: Instruction, glue: int) -> list[int]:
        """The layers whose gradients a sum sends: those near it, or all that reach the equations of the sum."""
        behind, layers = self._behind(glue), set[int]()
        for number, name in enumerate(instruction.operands):
            phase, near = self._way(instruction, glue, name, number if instruction.is_tuple else None)
            if phase != "gradients" or not near:
                return behind
            layers.update(near)
        return sorted(layers) if layers and layers.issubset(behind) else behind

    def _by_parameter(self, instruction: Instruction, number: int | None) -> list[int]:
        """The layers of the parameter that a gradient changes, through elementwise instructions of its size.

        A device may go on with its own part of the gradient. None where several parameters are read on the way, or
        none.
        """
        sizes = {instruction.arrays[number or 0].size}
        work: list[Value] = self.places.near([(instruction.name, number)], back=False)
        for _ in range(_FAR):
            names = {name for value in work for name in self.places.arguments_of(value[0]) if name in self._readers}
            if names or not work:
                return sorted(self._readers[names.pop()]) if len(names) == 1 else []
            near = [self.program[name] for name, _ in work]
            sizes |= {near_one.arrays[0].size for near_one in near if near_one.opcode == "dynamic-slice"}
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
        sources = {at: read for at, read in self.places.net.sources().items() if at not in row_of}
        return sorted({row_of[at].draft.at for at in reach([glue], sources) if at in row_of})

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
            instruction.opcode in _MOVES
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


def _readers_of_parameters(net: Net, layers: Iterable[Draft]) -> dict[str, set[int]]:
    """Which of these layers read each parameter, by its name."""
    readers_of: dict[str, set[int]] = {}
    for draft in layers:
        for weight in draft.weights:
            readers_of.setdefault(net.raw.values[weight].name, set()).add(draft.at)
    return readers_of
