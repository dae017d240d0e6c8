"""Repeated lines as functions and loops.

Functions of one value in a chain become one where they come three times or more ("conv_bn"). So do other lines that
come twice and share few values with those around them ("residual"). What then repeats in a row is a loop. The
parameters of a function and the targets of a loop are what differs: a number in the names of arrays, a size, an option.
A number that is another one plus a constant needs no parameter, and nor does a multiple of another size.

The time grows with the lines, not with their square: networks that were unrolled have tens of thousands.
"""

from __future__ import annotations

import array
import bisect
import collections
import dataclasses
import heapq
import itertools
import math
import re
import string
import textwrap
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from ._port_text import WIDTH, text_of

Value = tuple[int, int]  # an output of a node
POSITION, KEYWORD = object(), object()  # the defaults of what each call gives
_LONGEST, _MOST_TARGETS = 4, 4  # of a chain, of a loop
_MOST_NAMED = 8  # outputs of a line that have names of their own
_LONGEST_BODY = 64  # lines of a function, of a loop
_MOST_INPUTS, _MOST_OUTPUTS = 4, 3  # of a function, beside what differs
_MOST_ALIVE = 16  # values that lines give to those behind them, where a function may still go on
_LONGEST_NAME = 32
_MOST_DIGITS = 18  # of a number in a name that is counted on
_SHORT = {"convolution": "conv", "batch_norm": "bn", "max_pool": "pool", "avg_pool": "pool"}
_SAFE = re.compile(r"[A-Za-z0-9_./: -]*")  # of names that need no escapes
_NAMES = "x y z u v w a b c d e f g h".split()


@dataclasses.dataclass(frozen=True)
class Slot:
    """What may differ between two lines of one form."""

    kind: str  # "name" of an array, its "shape", "index" (a number in a name, or of a random key), "size", or "value"
    key: str  # the word for it where it is a parameter
    value: Any
    default: Any = POSITION  # a value that is left out; POSITION or KEYWORD for none, by how it is given


@dataclasses.dataclass(frozen=True)
class Line:
    """One assignment. `form` has the places {v[0]}, ... of its inputs and {s[0]}, ... of its slots."""

    form: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    slots: tuple[Slot, ...]
    layer: str  # MXNet's operator, or the function of repeated lines
    texts: tuple[str, ...] = ()  # of the slots, as they are written


@dataclasses.dataclass
class _Pattern:
    """Windows of the lines that are alike.

    Attributes:
        length: how many lines each has.
        starts: the places of their first lines.
        outputs: what they give: (line of the window, output of the line).
        more: how many values they take and give beyond one of each.
    """

    length: int
    starts: list[int]
    outputs: Sequence[tuple[int, int]]
    more: int = 0


@dataclasses.dataclass(frozen=True)
class Variable:
    """What differs between repeated lines: its value in each of them."""

    name: str
    slot: Slot
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """Repeated lines, those of the first time, with the texts of their slots.

    Attributes:
        inputs: the values that the lines of the first time take, of a loop one.
        outputs, last: what they give, the first time and the last time.
    """

    name: str
    variables: Sequence[Variable]
    lines: Sequence[Line]
    count: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    last: tuple[Value, ...]


def fold(
    lines: list[Line], inputs: Sequence[Value], heads: Sequence[Value], taken: dict[str, int]
) -> tuple[list[Block], list[Line | Block]]:
    """The functions that the lines need, and what is left of the lines, with loops and without slots.

    The names of the functions are added to those that are `taken`, see `free_name`.
    """
    functions: list[Block] = []
    lines = _replaced(lines, _chosen(lines, _chains(lines, heads), 3), functions, taken)
    lines = _replaced(lines, _chosen(lines, _units(lines, heads), 2), functions, taken)
    items = _with_loops(lines, inputs, heads)
    return functions, [item if isinstance(item, Block) else _block("", [[item]]).lines[0] for item in items]


def free_name(word: str, taken: dict[str, int]) -> str:
    """The word, or the word and a number, so that it is new; then it is taken too.

    `taken` has the names, with the last number that was tried behind each.
    """
    name, number = word, taken.get(word, 1)
    while name in taken:
        number += 1
        name = f"{word}{number}"
    taken[word] = number
    taken.setdefault(name, 1)
    return name


def _key(lines: Sequence[Line]) -> Any:
    """Equal for lines that differ in their slots only."""
    numbers: dict[Value, int] = {}
    key: list[Any] = []
    for line in lines:
        values = tuple(numbers.setdefault(value, len(numbers)) for value in (*line.inputs, *line.outputs))
        key.append((line.form, values, tuple((slot.kind, slot.key) for slot in line.slots)))
    return tuple(key)


def _kinds(lines: Sequence[Line]) -> list[int]:
    """A number for each line: that of other lines that differ in their slots and values only."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(_key([line]), len(numbers)) for line in lines]


def _last_uses(lines: Sequence[Line | Block], heads: Iterable[Value]) -> dict[Value, int]:
    """The place of the line that is the last one to use a value. Heads are used after all lines."""
    uses = {value: at for at, line in enumerate(lines) for value in line.inputs}
    return uses | dict.fromkeys(heads, len(lines))


def _cuts(lines: Sequence[Line], inputs: Sequence[Value], heads: Sequence[Value]) -> list[int]:
    """The places before which a single value is alive."""
    last = _last_uses(lines, heads)
    change = [0] * (len(lines) + 2)  # of the number of values that are alive, at each place
    for made, values in [(-1, inputs), *((at, line.outputs) for at, line in enumerate(lines))]:
        for value in values:
            if (end := last.get(value, -1)) > made:
                change[made + 1] += 1
                change[end + 1] -= 1
    alive = itertools.accumulate(change[:-1])
    return [at for at, count in enumerate(alive) if count == 1]


def _is_wrapper(line: Line) -> bool:
    """Whether a line is a function of JAX of one value, which may be written around the line before."""
    return line.form.startswith(("jax.nn.", "jnp.", "softmax_output(")) and line.form.count("{v[") == 1


def _chains(lines: list[Line], heads: Sequence[Value]) -> list[_Pattern]:
    """Functions of one value behind one another, where nothing else reads what is between them."""
    users = collections.Counter([*heads, *(value for line in lines for value in line.inputs)])
    starts: dict[Any, list[int]] = {}
    for at in range(len(lines)):
        for length in range(2, min(_LONGEST, len(lines) - at) + 1):
            *before, line = window = lines[at : at + length]
            follows = line.inputs == before[-1].outputs and users[line.inputs[0]] == 1
            if not follows or len(before[0].inputs) != 1 or line.form in [other.form for other in before]:
                break
            starts.setdefault((length, _key(window)), []).append(at)
    return [
        _Pattern(length, of_form, [(length - 1, place) for place in range(len(lines[of_form[0] + length - 1].outputs))])
        for (length, _), of_form in starts.items()
    ]


def _units(lines: list[Line], heads: Sequence[Value]) -> list[_Pattern]:
    """Lines that recur, take few values and give few: a residual unit, a layer of a transformer, a recurrent cell."""
    last = _last_uses(lines, heads)
    made = {value: (at, place) for at, line in enumerate(lines) for place, value in enumerate(line.outputs)}
    kinds = _kinds(lines)

    # Windows that are alike so far, by their starts. Each step looks at one line more, of those that are still several.
    inputs: list[list[Value]] = [[] for _ in lines]  # what the window from each line on takes
    alive: list[set[Value]] = [set() for _ in lines]  # what it makes, and others read
    patterns: list[_Pattern] = []
    groups = [list(range(len(lines)))]
    for length in range(1, min(_LONGEST_BODY, len(lines) // 2) + 1):
        longer: dict[Any, list[int]] = {}
        for group, starts in enumerate(groups):
            for start in starts[: bisect.bisect(starts, len(lines) - length)]:
                at = start + length - 1
                line, refs = lines[at], list[tuple[int, int]]()
                for value in line.inputs:
                    of_line, place = made.get(value, (-1, 0))
                    if of_line < start:  # is made before, so it counts which of the inputs it is
                        if value not in inputs[start]:
                            inputs[start].append(value)
                        of_line, place = at, inputs[start].index(value)
                    refs.append((at - of_line, place))
                alive[start] = {value for value in (*alive[start], *line.outputs) if last.get(value, -1) > at}
                if len(inputs[start]) <= _MOST_INPUTS and len(alive[start]) <= _MOST_ALIVE:
                    longer.setdefault((group, kinds[at], tuple(refs)), []).append(start)
        groups = []
        for starts in longer.values():
            # What comes once begins no unit. Nor does what begins with two turns of one, in a row of them. Equal lines
            # may be branches: they are no turns.
            first = starts[0]
            window = kinds[first : first + length]
            turn, again = window[: length // 2], window[length // 2 :]
            is_twice = turn == again and len({*turn}) > 1
            if len(starts) == 1 or (is_twice and any(b - a == len(turn) for a, b in itertools.pairwise(starts))):
                continue
            groups.append(starts)
            outputs = {(made[value][0] - start, made[value][1]) for start in starts for value in alive[start]}
            # A window that ends as it begins is more than one turn.
            is_turn = length > 2 and not any(window[n:] == window[:-n] for n in range(1, length))
            if not is_turn or not inputs[first] or len(outputs) > _MOST_OUTPUTS:
                continue
            more = len(inputs[first]) - 1 + len(outputs) - 1
            if more or not _is_divisible(lines[first : first + length], outputs):
                patterns.append(_Pattern(length, starts, sorted(outputs), more))
    return patterns


def _is_divisible(lines: list[Line], outputs: Collection[tuple[int, int]]) -> bool:
    """Whether lines of one input and one output have a place where one value is alive, but before a last activation."""
    heads = [lines[at].outputs[place] for at, place in outputs]
    places = _cuts(lines, _inputs_of(lines), heads)
    return any(0 < at < len(lines) - _is_wrapper(lines[-1]) for at in places)


def _chosen(lines: list[Line], patterns: list[_Pattern], least: int) -> list[_Pattern]:
    """The patterns that become functions, the one that saves most first, with windows that share no line."""
    # What a pattern saves only becomes less when others take lines of it. So it is counted again when its turn comes.
    used = bytearray(len(lines))
    queue = [(-math.inf, 0, number) for number in range(len(patterns))]
    chosen: list[_Pattern] = []
    while queue:
        before, first, number = heapq.heappop(queue)
        pattern = patterns[number]
        length = pattern.length
        pattern.starts = [at for at in pattern.starts if used.find(1, at, at + length) < 0]
        starts, end = list[int](), 0
        for at in pattern.starts:
            if at >= end:
                starts.append(at)
                end = at + length
        # Each call is one line in place of several; a further input or output counts as a line too.
        saved = len(starts) * (length - 1 - pattern.more) - length
        if len(starts) < least or saved <= 0:
            continue
        if (before, first) != (-saved, starts[0]):
            heapq.heappush(queue, (-saved, starts[0], number))
            continue
        chosen.append(dataclasses.replace(pattern, starts=starts))
        for at in starts:
            used[at : at + length] = b"\1" * length
    return chosen


def _block(
    name: str, windows: Sequence[Sequence[Line]], outputs: Sequence[tuple[Value, ...]] = (), most: float = math.inf
) -> Block:
    """Windows of one form as one block, with variables for what differs. It is not finished if they are too many.

    `outputs` are those of each window, by default those of its last line.
    """
    variables = _Variables()
    lines: list[Line] = []
    for line, *same_lines in zip(*windows, strict=True):
        slots = zip(line.slots, *(each.slots for each in same_lines), strict=True)
        lines.append(dataclasses.replace(line, texts=tuple(map(variables.text, slots))))
        if len(variables.collected) > most:
            break
    first, last = (outputs[0], outputs[-1]) if outputs else (windows[0][-1].outputs, windows[-1][-1].outputs)
    return Block(name, variables.collected, lines, len(windows), _inputs_of(windows[0]), first, last)


def _inputs_of(lines: Sequence[Line]) -> tuple[Value, ...]:
    """The values that the lines take and do not make, each once."""
    made = {value for line in lines for value in line.outputs}
    return tuple(dict.fromkeys(value for line in lines for value in line.inputs if value not in made))


def _replaced(
    lines: list[Line], patterns: Sequence[_Pattern], functions: list[Block], taken: dict[str, int]
) -> list[Line]:
    """The lines with calls of new functions in the place of these patterns."""
    calls: dict[int, Line] = {}  # by the places of the lines that they stand for
    left_out: set[int] = set()
    for pattern in patterns:
        windows = [lines[at : at + pattern.length] for at in pattern.starts]
        outputs = [tuple(window[at].outputs[place] for at, place in pattern.outputs) for window in windows]
        function = _block(free_name(_name_of(windows[0], _inputs_of(windows[0]), outputs[0]), taken), windows, outputs)
        functions.append(function)
        slots = [variable.slot for variable in function.variables]
        places = [f", {{v[{i}]}}" for i in range(len(function.inputs))]
        places += [f", {{s[{i}]}}" for i, slot in enumerate(slots) if slot.default is POSITION]
        places += [f"{{s[{i}]}}" for i, slot in enumerate(slots) if slot.default is not POSITION]
        form = f"{function.name}(net{''.join(places)})"
        for number, (at, window) in enumerate(zip(pattern.starts, windows, strict=True)):
            slots_of_call = tuple(
                dataclasses.replace(v.slot, key=v.name, value=v.values[number])
                if v.slot.default is not POSITION
                else dataclasses.replace(v.slot, value=v.values[number])
                for v in function.variables
            )
            calls[at] = Line(form, _inputs_of(window), outputs[number], slots_of_call, function.name)
            left_out.update(range(at + 1, at + pattern.length))
    return [calls.get(at, line) for at, line in enumerate(lines) if at not in left_out]


def _with_loops(lines: list[Line], inputs: Sequence[Value], heads: Sequence[Value]) -> list[Line | Block]:
    """The lines with loops in the place of what repeats in a row."""
    cuts = {at for at in _cuts(lines, inputs, heads) if at == 0 or len(lines[at - 1].outputs) == 1}
    kinds, numbers, tokens = _kinds(lines), dict[Any, int](), list[int]()
    # Each line as one number: equal for lines of one kind that read what stands as far before them. So a loop is a
    # sequence of numbers that repeats.
    made = dict.fromkeys(inputs, -1) | {value: at for at, line in enumerate(lines) for value in line.outputs}
    for at, line in enumerate(lines):
        # How far before the line each value is made, and which output it is.
        refs = [(at - made[v], lines[made[v]].outputs.index(v) if made[v] >= 0 else 0) for v in line.inputs]
        tokens.append(numbers.setdefault((kinds[at], tuple(refs)), len(numbers)))
    periods = range(1, min(_LONGEST_BODY, len(lines) // 2) + 1)
    counts = [_counts(tokens, cuts, period) for period in periods]

    # The best loop from here, unless the one from the next line saves more.
    items: list[Line | Block] = []
    at, now = 0, _best_loop(lines, kinds, 0, counts)
    while at < len(lines):
        (saved, best), later = now, _best_loop(lines, kinds, at + 1, counts)
        if best is not None and saved >= later[0]:
            items.append(best)
            at += best.count * len(best.lines)
            now = _best_loop(lines, kinds, at, counts)
        else:
            items.append(lines[at])
            at, now = at + 1, later
    return items


def _counts(tokens: Sequence[int], cuts: Container[int], period: int) -> Sequence[int]:
    """How many windows of so many lines begin at each place, one behind the other, and are equal."""
    counts = array.array("l", [0]) * (len(tokens) + 1)
    same = 0  # how many lines from here on are equal to those one period later
    for at in range(len(tokens) - period, -1, -1):
        same = same + 1 if at + period < len(tokens) and tokens[at] == tokens[at + period] else 0
        if at in cuts and at + period in cuts:
            counts[at] = 1 + (counts[at + period] if same >= period else 0)
    return counts


def _best_loop(
    lines: list[Line], kinds: Sequence[int], at: int, counts: Sequence[Sequence[int]]
) -> tuple[tuple[int, int], Block | None]:
    """The best loop that begins at a line, with the lines that it saves and, negative, its number of targets."""
    saved: tuple[int, int] = (1, 0)
    best = None
    for period, of_period in enumerate(counts, 1):
        count = of_period[at]
        if (count - 1) * period <= saved[0]:
            continue
        # A longer window takes a run of equal lines whole, with none of it before or behind.
        if period > 1 and kinds[at + period - 1] in (kinds[at], *kinds[at + period * count :][:1]):
            continue
        loop = _longest_loop(lines, at, period, count)
        if loop is not None and (loop.count - 1) * period > saved[0]:
            saved, best = ((loop.count - 1) * period, -len(loop.variables)), loop
    return saved, best


def _longest_loop(lines: list[Line], at: int, period: int, count: int) -> Block | None:
    """The loop over the most windows, of `count`, that has not too many targets. None: two windows have too many."""
    best, size, above = None, 2, count + 1
    while best is None or size > best.count:
        windows = [lines[i : i + period] for i in range(at, at + size * period, period)]
        loop = _block("", windows, most=_MOST_TARGETS)
        if len(loop.variables) <= _MOST_TARGETS:
            best = loop
        elif best is None:
            return None
        else:
            above = size
        size = min(2 * best.count, count) if above > count else (best.count + above) // 2
    return best


class _Variables:
    """Collects what differs."""

    def __init__(self) -> None:
        self.collected: list[Variable] = []
        self._alike: dict[Any, list[tuple[Variable, int]]] = {}  # by `_pattern`
        self._taken: dict[str, int] = {}

    def text(self, slots: Sequence[Slot]) -> str:
        """The text of a slot that has these values in turn."""
        first, values = slots[0], tuple(slot.value for slot in slots)
        if first.kind == "shape":  # arguments behind others
            own = self._value(dataclasses.replace(first, kind="value"), values)
            return "".join(f", {size}" for size in first.value) if len({*values}) == 1 else f", *{own}"
        text = self._name(first, values) if first.kind == "name" else self._value(first, values)
        if first.default is POSITION:
            return text
        usual = text_of(first.default)
        return "" if all(text_of(value) == usual for value in values) else f", {first.key}={text}"

    def _value(self, slot: Slot, values: tuple[Any, ...]) -> str:
        if len(set(map(text_of, values))) == 1:
            return text_of(values[0])
        pattern, unit = _pattern(slot, values)
        alike = self._alike.setdefault(pattern, [])
        for variable, other in alike:
            if (text := _related(variable, unit, other)) is not None:
                return text
        word = slot.key if slot.kind != "index" or slot.key in ("stage", "unit", "block", "key") else "n"
        word += "_" * (word in _NAMES)  # which are those of values
        variable = Variable(free_name(word, self._taken), slot, values)
        self.collected.append(variable)
        alike.append((variable, unit))
        return variable.name

    def _name(self, slot: Slot, values: tuple[str, ...]) -> str:
        """A name whose numbers differ, a beginning and a number that differ, or a parameter."""
        if len(set(values)) == 1 or not all(map(_SAFE.fullmatch, values)):
            return self._value(slot, values)
        # Each name as texts and numbers in turn, a text first.
        pieces = [re.split(r"(\d+)", value) for value in values]
        numbers = [number for of_name in pieces for number in of_name[1::2]]
        if not all(len(number) <= _MOST_DIGITS and str(int(number)) == number for number in numbers):
            return self._value(slot, values)
        if len({tuple(of_name[::2]) for of_name in pieces}) == 1:
            return self._joined([*zip(*pieces, strict=True)])
        ends = [_ending(value) for value in values]
        if all(word and number for _, word, number in ends) and len({word for _, word, _ in ends}) == 1:
            return self._joined([*zip(*ends, strict=True)])
        return self._value(slot, values)

    def _joined(self, columns: Sequence[tuple[str, ...]]) -> str:
        """A name of texts and numbers, each with its values."""
        text, word = "", "n"
        for column in columns:
            if len(set(column)) == 1:
                text += column[0]
            elif column[0].isdigit():
                text += f"{{{self._value(Slot('index', word, 0), tuple(map(int, column)))}}}"
            else:
                text += f"{{{self._value(Slot('name', 'prefix', ''), column)}}}"
            before = column[0].lower().removesuffix("_")
            word = before[len(before.rstrip(string.ascii_lowercase)) :] or word
        return f'f"{text}"'


def _ending(name: str) -> tuple[str, str, str]:
    """A name as what is before its last word, that word, and the number behind it."""
    stem = name.rstrip(string.digits)
    before = stem.rstrip(string.ascii_letters)
    return before, stem[len(before) :], name[len(stem) :]


def _pattern(slot: Slot, values: tuple[Any, ...]) -> tuple[Any, int]:
    """What is equal for values that are others plus a constant (of an index), or times one (of a size), and that."""
    if slot.kind == "index":
        return ("index", tuple(value - values[0] for value in values)), values[0]
    if slot.kind == "size":
        unit = math.gcd(*values)
        return ("size", tuple(value // unit for value in values)), unit
    return (slot.kind, slot.key if slot.kind == "value" else "", tuple(map(text_of, values))), 0


def _related(variable: Variable, unit: int, other: int) -> str | None:
    """Values of the pattern of a variable as the variable, plus a constant, or times or by a whole number."""
    if unit == other:
        return variable.name
    if variable.slot.kind == "index":
        return f"{variable.name} {'+' if unit > other else '-'} {abs(unit - other)}"
    more, less = max(unit, other), min(unit, other)
    return f"{variable.name} {'*' if unit > other else '//'} {more // less}" if more % less == 0 else None


def _name_of(lines: Sequence[Line], inputs: Sequence[Value], outputs: Sequence[Value]) -> str:
    forms = " ".join(line.form for line in lines)
    sums = [line for line in lines if " + " in line.form and len(line.inputs) == 2]
    joined = [line for line in lines if line.form.startswith("jnp.concatenate")]
    if "softmax" in forms and re.search("dot|gemm", forms):
        return "attention"
    if len(outputs) > 1 and "sigmoid" in forms and "tanh" in forms:
        return "cell"
    if sums and len(inputs) == 1 and inputs[0] in sums[-1].inputs:
        return "residual"
    if sums and len(inputs) == 1 and "conv" in forms:
        return "downsample"
    if joined and len(inputs) == 1:
        return "dense_layer" if inputs[0] in joined[-1].inputs else "branches"
    names = [line.form.partition("(")[0].rpartition(".")[2] for line in lines]
    name = "_".join(_SHORT.get(name, name) for name in names)
    return name if len(name) < _LONGEST_NAME and name.isidentifier() else "block"


def functions_of(
    functions: Sequence[Block],
    items: Sequence[Line | Block],
    names: Mapping[Value, str],
    heads: Sequence[Value],
    name: str = "network",
) -> list[str]:
    """The texts of the functions of a module, and of the network or a graph. Long statements are not wrapped yet."""
    texts: list[str] = []
    for function in functions:
        count = f": {function.count} times in the network."
        layers = ", ".join(dict.fromkeys(line.layer for line in function.lines))
        layers = textwrap.shorten(layers, WIDTH - len(f'    """{count}"""'), placeholder=" ...")
        names_of_inputs = dict(zip(function.inputs, _NAMES, strict=False))
        body = _written(function.lines, names_of_inputs, function.outputs, WIDTH - 4)
        parameters = ", ".join(["net", *names_of_inputs.values(), *_parameters(function)])
        texts.append("\n".join([f"def {function.name}({parameters}):", *_indented([f'"""{layers}{count}"""', *body])]))
    body = _written(items, names, heads, WIDTH - 4)
    return [*texts, "\n".join([f"def {name}({', '.join(['net', *names.values()])}):", *_indented(body)])]


def _parameters(function: Block) -> list[str]:
    """The parameters of a function after `net` and `x`, in the order in which `_replaced` gives them."""
    defaults = {variable.name: variable.slot.default for variable in function.variables}
    plain = [name for kind in (POSITION, KEYWORD) for name, default in defaults.items() if default is kind]
    return [*plain, *(f"{name}={text_of(default)}" for name, default in defaults.items() if name not in plain)]


class _Locals:
    """Names for values: the first one of x, y, z, u, ... that is not in use."""

    def __init__(self, names: Iterable[str]):
        self._values = collections.Counter(names)  # how many values have a name
        self._unused = enumerate(itertools.chain(_NAMES, map("x{}".format, itertools.count())))
        self._places: dict[str, int] = {}
        self._dropped: list[tuple[int, str]] = []  # a heap

    def take(self, values: int = 1) -> str:
        while True:
            place, name = heapq.heappop(self._dropped) if self._dropped else next(self._unused)
            self._places[name] = place
            if name not in self._values:
                self._values[name] = values
                return name

    def drop(self, name: str) -> None:
        self._values[name] -= 1
        if not self._values[name]:
            del self._values[name]
            if name in self._places:  # else it is the name of an input, or comes later
                heapq.heappush(self._dropped, (self._places[name], name))


def _written(
    lines: Sequence[Line | Block],
    names: Mapping[Value, str],
    heads: Sequence[Value],
    width: int,
    returns: bool = True,
) -> list[str]:
    """Lines of Python. `names` are those of the values that are there before, `width` that of the lines."""
    last, name_of, code, at = _last_uses(lines, heads), dict(names), list[str](), 0
    local_names = _Locals(names.values())
    while at < len(lines):
        line, begin = lines[at], at
        at += 1
        if isinstance(line, Block):  # where a single value is alive
            code += [] if name_of[line.inputs[0]] == "x" else [f"x = {name_of[line.inputs[0]]}"]
            body = _written(line.lines, {line.inputs[0]: "x"}, line.outputs, width - 4, returns=False)
            code += [f"{_head(line)}:", *_indented(body)]
            name_of[line.last[0]] = "x"
            local_names = _Locals(["x"])
            continue
        # A chain of functions of one value is one expression, as long as it fits in a line.
        expression = line.form.format(v=[name_of[value] for value in line.inputs], s=line.texts)
        outputs = line.outputs
        while at < len(lines) and isinstance(after := lines[at], Line) and _is_wrapper(after):
            around = after.form.format(v=[expression], s=after.texts)
            if after.inputs != outputs or last[outputs[0]] != at or len(f"return {around}") > width:
                break
            expression, outputs, at = around, after.outputs, at + 1
        if returns and at == len(lines) and tuple(heads) == outputs:
            return [*code, f"return {expression}"]
        # The names of values that nothing reads any more are free for what comes.
        for value in dict.fromkeys(value for each in lines[begin:at] for value in each.inputs):
            if value in name_of and last[value] < at:
                local_names.drop(name_of[value].partition("[")[0])
        if len(outputs) > _MOST_NAMED:
            target = local_names.take(sum(output in last for output in outputs))
            name_of |= {output: f"{target}[{place}]" for place, output in enumerate(outputs)}
        else:
            name_of |= {output: local_names.take() if output in last else "_" for output in outputs}
            target = ", ".join(name_of[output] for output in outputs)
        code.append(f"{target} = {expression}")
    if not returns:
        return code
    given = ", ".join(name_of[head] for head in heads)
    return [*code, f"return ({given})" if len(f"return {given}") > width else f"return {given}"]


def _head(loop: Block) -> str:
    """The beginning of a loop, without a colon."""
    if not loop.variables:
        return f"for _ in range({loop.count})"
    targets = ", ".join(variable.name for variable in loop.variables)
    if len(loop.variables) == 1:
        return f"for {targets} in {_series(list(loop.variables[0].values))}"
    return f"for {targets} in {text_of(tuple(zip(*(variable.values for variable in loop.variables), strict=True)))}"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _series(values: list[Any]) -> str:
    if len(values) > 2 and isinstance(values[0], int):
        step = values[1] - values[0]
        if step > 0 and values == list(range(values[0], values[-1] + 1, step)):
            return f"range({values[0]}, {values[-1] + 1}{f', {step}' if step > 1 else ''})"
    return text_of(tuple(values))
