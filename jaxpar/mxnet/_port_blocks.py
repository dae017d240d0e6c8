"""Repeated lines as functions and loops.

Lines of one form in a chain become a function where they come three times or more ("conv_bn"). So do the lines between
two places where a single value is alive ("residual"), if they come twice. What then repeats in a row is a loop. The
parameters of a function and the targets of a loop are what differs: a number in the names of arrays, a size, an option.
A number that is another one plus a constant needs no parameter, and nor does a multiple of another size.

The time grows with the lines, not with their square: networks that were unrolled have tens of thousands.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import heapq
import itertools
import math
import re
import string
import tokenize
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

Value = tuple[int, int]  # an output of a node
POSITION, KEYWORD = object(), object()  # the defaults of what each call gives
_LONGEST, _MOST_TARGETS, _WIDTH = 4, 4, 88  # of a chain, of a loop, of a line
_LONGEST_BODY = 64  # lines of a loop
_LONGEST_NAME = 32
_MOST_DIGITS = 18  # of a number in a name that is counted on
_SHORT = {"convolution": "conv", "batch_norm": "bn", "max_pool": "pool", "avg_pool": "pool"}
_SAFE = re.compile(r"[A-Za-z0-9_./: -]*")  # of names that need no escapes
_NAMES = "x y z u v w a b c d e f g h".split()


@dataclasses.dataclass(frozen=True)
class Slot:
    """What may differ between two lines of one form."""

    kind: str  # "name" of an array, "index" (a number in such a name, or of a random key), "size", or "value"
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


_Windows = list[list[Line]]


@dataclasses.dataclass(frozen=True)
class Variable:
    """What differs between repeated lines: its value in each of them."""

    name: str
    slot: Slot
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """Repeated lines, of one input: those of the first time, with the texts of their slots.

    Attributes:
        inputs: the value that the lines of the first time take. Where the lines are no block but one: those of it.
        outputs, last: what the last line gives, the first time and the last time.
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
    lines = _replaced(lines, _chains(lines, heads), functions, taken)
    lines = _replaced(lines, _between_cuts(lines, inputs, heads), functions, taken)
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
    return line.form.startswith(("jax.nn.", "jnp.")) and line.form.count("{v[") == 1


def _chains(lines: list[Line], heads: Sequence[Value]) -> list[_Windows]:
    """The chains of lines that are written as functions, the one that saves most first. They share no line."""
    users = collections.Counter([*heads, *(value for line in lines for value in line.inputs)])
    starts: dict[Any, list[int]] = {}  # where the chains of a form begin, some of them one in another
    for at in range(len(lines)):
        for length in range(2, min(_LONGEST, len(lines) - at) + 1):
            *before, line = window = lines[at : at + length]
            follows = line.inputs == before[-1].outputs and users[line.inputs[0]] == 1
            if not follows or len(before[0].inputs) != 1 or line.form in [other.form for other in before]:
                break
            starts.setdefault((length, _key(window)), []).append(at)

    # What a form saves only becomes less when others take lines of it. So it is counted again when its turn comes.
    used = [False] * len(lines)
    queue = [(-math.inf, 0, form) for form in range(len(starts))]
    forms, chains = list(starts), list[_Windows]()
    while queue:
        saved, first, form = heapq.heappop(queue)
        length = forms[form][0]
        starts[forms[form]] = left = [at for at in starts[forms[form]] if not any(used[at : at + length])]
        chosen, end = list[int](), 0
        for at in left:
            if at >= end:
                chosen.append(at)
                end = at + length
        if len(chosen) <= 2:
            continue
        now = -(len(chosen) - 1) * (length - 1), chosen[0]
        if (saved, first) != now:
            heapq.heappush(queue, (*now, form))
            continue
        chains.append([lines[at : at + length] for at in chosen])
        for at in chosen:
            used[at : at + length] = [True] * length
    return chains


def _between_cuts(lines: list[Line], inputs: Sequence[Value], heads: Sequence[Value]) -> list[_Windows]:
    """Lines between places with a single value, where they come several times."""
    places = _cuts(lines, inputs, heads)
    is_cut = {*places}
    groups: dict[Any, _Windows] = {}
    for start, end in itertools.pairwise(places):
        if end + 1 in is_cut and _is_wrapper(lines[end]):
            end += 1  # the activation of a residual unit
        window = lines[start:end]
        if len(window) > 2:
            groups.setdefault(_key(window), []).append(window)
    return [windows for windows in groups.values() if len(windows) > 1]


def _block(name: str, windows: _Windows, most: float = math.inf) -> Block:
    """Windows of one form as one block, with variables for what differs. It is not finished if they are too many."""
    variables = _Variables()
    lines: list[Line] = []
    for line, *same_lines in zip(*windows, strict=True):
        slots = zip(line.slots, *(each.slots for each in same_lines), strict=True)
        lines.append(dataclasses.replace(line, texts=tuple(map(variables.text, slots))))
        if len(variables.collected) > most:
            break
    first, last = windows[0], windows[-1]
    outputs = first[-1].outputs
    return Block(name, variables.collected, lines, len(windows), _inputs_of(first), outputs, last[-1].outputs)


def _inputs_of(lines: Sequence[Line]) -> tuple[Value, ...]:
    """The values that the lines take and do not make, each once."""
    made = {value for line in lines for value in line.outputs}
    return tuple(dict.fromkeys(value for line in lines for value in line.inputs if value not in made))


def _replaced(
    lines: list[Line], groups: Sequence[_Windows], functions: list[Block], taken: dict[str, int]
) -> list[Line]:
    """The lines with calls of new functions in the place of these windows."""
    calls: dict[tuple[Value, ...], Line] = {}  # by the outputs of the line in whose place they are
    left_out: set[tuple[Value, ...]] = set()  # the outputs of the other lines of these windows
    for windows in groups:
        function = _block(free_name(_name_of(windows[0]), taken), windows)
        functions.append(function)
        slots = [variable.slot for variable in function.variables]
        places = [f", {{s[{i}]}}" for i, slot in enumerate(slots) if slot.default is POSITION]
        places += [f"{{s[{i}]}}" for i, slot in enumerate(slots) if slot.default is not POSITION]
        form = f"{function.name}(net, {{v[0]}}{''.join(places)})"
        for number, window in enumerate(windows):
            slots_of_call = tuple(
                dataclasses.replace(v.slot, key=v.name, value=v.values[number])
                if v.slot.default is not POSITION
                else dataclasses.replace(v.slot, value=v.values[number])
                for v in function.variables
            )
            outputs = window[-1].outputs
            calls[window[0].outputs] = Line(form, _inputs_of(window), outputs, slots_of_call, function.name)
            left_out.update(line.outputs for line in window[1:])
    return [calls.get(line.outputs, line) for line in lines if line.outputs not in left_out]


def _with_loops(lines: list[Line], inputs: Sequence[Value], heads: Sequence[Value]) -> list[Line | Block]:
    """The lines with loops in the place of what repeats in a row."""
    cuts = {at for at in _cuts(lines, inputs, heads) if at == 0 or len(lines[at - 1].outputs) == 1}
    numbers, tokens = dict[Any, int](), list[int]()
    # Each line as one number: equal for lines of one form that read what stands as far before them. So a loop is a
    # sequence of numbers that repeats.
    made = dict.fromkeys(inputs, -1) | {value: at for at, line in enumerate(lines) for value in line.outputs}
    for at, line in enumerate(lines):
        # How far before the line each value is made, and which output it is.
        refs = [(at - made[v], lines[made[v]].outputs.index(v) if made[v] >= 0 else 0) for v in line.inputs]
        tokens.append(numbers.setdefault((_key([line]), tuple(refs)), len(numbers)))
    periods = range(1, min(_LONGEST_BODY, len(lines) // 2) + 1)
    counts = [_counts(tokens, cuts, period) for period in periods]

    # The best loop from here, unless the one from the next line saves more.
    items: list[Line | Block] = []
    at, now = 0, _best_loop(lines, 0, counts)
    while at < len(lines):
        (saved, best), later = now, _best_loop(lines, at + 1, counts)
        if best is not None and saved >= later[0]:
            items.append(best)
            at += best.count * len(best.lines)
            now = _best_loop(lines, at, counts)
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


def _best_loop(lines: list[Line], at: int, counts: Sequence[Sequence[int]]) -> tuple[tuple[int, int], Block | None]:
    """The best loop that begins at a line, with the lines that it saves and, negative, its number of targets."""
    saved: tuple[int, int] = (1, 0)
    best = None
    for period, of_period in enumerate(counts, 1):
        count = of_period[at]
        if (count - 1) * period <= saved[0]:
            continue
        # A longer window takes a run of equal lines whole, with none of it before or behind.
        ends = [_key([line]) for line in (lines[at], lines[at + period - 1], *lines[at + period * count :][:1])]
        if period > 1 and ends[1] in (ends[0], *ends[2:]):
            continue
        loop = _longest_loop(lines, at, period, count)
        if loop is not None and (loop.count - 1) * period > saved[0]:
            saved, best = ((loop.count - 1) * period, -len(loop.variables)), loop
    return saved, best


def _longest_loop(lines: list[Line], at: int, period: int, count: int) -> Block | None:
    """The loop over the most windows, of `count`, that has not too many targets. None: two windows have too many."""
    best, size, above = None, 2, count + 1
    while best is None or size > best.count:
        loop = _block("", [lines[i : i + period] for i in range(at, at + size * period, period)], _MOST_TARGETS)
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
        text = self._name(first, values) if first.kind == "name" else self._value(first, values)
        if first.default is POSITION:
            return text
        usual = _text(first.default)
        return "" if all(_text(value) == usual for value in values) else f", {first.key}={text}"

    def _value(self, slot: Slot, values: tuple[Any, ...]) -> str:
        if len(set(map(_text, values))) == 1:
            return _text(values[0])
        pattern, unit = _pattern(slot, values)
        alike = self._alike.setdefault(pattern, [])
        for variable, other in alike:
            if (text := _related(variable, unit, other)) is not None:
                return text
        word = slot.key if slot.kind != "index" or slot.key in ("stage", "unit", "block", "key") else "n"
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
    return (slot.kind, slot.key if slot.kind == "value" else "", tuple(map(_text, values))), 0


def _related(variable: Variable, unit: int, other: int) -> str | None:
    """Values of the pattern of a variable as the variable, plus a constant, or times or by a whole number."""
    if unit == other:
        return variable.name
    if variable.slot.kind == "index":
        return f"{variable.name} {'+' if unit > other else '-'} {abs(unit - other)}"
    more, less = max(unit, other), min(unit, other)
    return f"{variable.name} {'*' if unit > other else '//'} {more // less}" if more % less == 0 else None


def _text(value: object) -> str:
    """The value as Python."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    if isinstance(value, float):
        return number_text(value)
    return f'"{value}"' if isinstance(value, str) and _SAFE.fullmatch(value) else repr(value)


def number_text(value: object) -> str:
    """A number as Python, where infinity has no name of its own."""
    text = repr(value)
    return text.replace("inf", "math.inf").replace("nan", "math.nan") if isinstance(value, float) else text


def _name_of(lines: Sequence[Line]) -> str:
    sums = [line for line in lines if " + " in line.form]
    joined = [line for line in lines if line.form.startswith("jnp.concatenate")]
    if sums:
        return "residual" if lines[0].inputs[0] in sums[-1].inputs else "downsample"
    if joined:
        return "dense_layer" if lines[0].inputs[0] in joined[-1].inputs else "branches"
    names = [line.form.partition("(")[0].rpartition(".")[2] for line in lines]
    name = "_".join(_SHORT.get(name, name) for name in names)
    return name if len(name) < _LONGEST_NAME and name.isidentifier() else "block"


def functions_of(
    functions: Sequence[Block], items: Sequence[Line | Block], names: Mapping[Value, str], heads: Sequence[Value]
) -> list[str]:
    """The texts of the functions of a module, and of the network."""
    texts: list[str] = []
    for function in functions:
        layers = ", ".join(dict.fromkeys(line.layer for line in function.lines))
        docstring = f'"""{layers}: {function.count} times in the network."""'
        body = _written(function.lines, {function.inputs[0]: "x"}, function.outputs)
        parameters = ", ".join(["net", "x", *_parameters(function)])
        texts.append("\n".join([f"def {function.name}({parameters}):", *_indented([docstring, *body])]))
    body = _written(items, names, heads)
    return [*texts, "\n".join([f"def network({', '.join(['net', *names.values()])}):", *_indented(body)])]


def _parameters(function: Block) -> list[str]:
    """The parameters of a function after `net` and `x`, in the order in which `_replaced` gives them."""
    defaults = {variable.name: variable.slot.default for variable in function.variables}
    plain = [name for kind in (POSITION, KEYWORD) for name, default in defaults.items() if default is kind]
    return [*plain, *(f"{name}={_text(default)}" for name, default in defaults.items() if name not in plain)]


class _Locals:
    """Names for values: the first one of x, y, z, u, ... that is not in use."""

    def __init__(self, names: Iterable[str]):
        self._taken = {*names}
        self._next = 0
        self._free: list[int] = []  # a heap of numbers below the next one

    def take(self) -> str:
        while True:
            if self._free:
                number = heapq.heappop(self._free)
            else:
                number, self._next = self._next, self._next + 1
            name = _NAMES[number] if number < len(_NAMES) else f"x{number - len(_NAMES)}"
            if name not in self._taken:
                self._taken.add(name)
                return name

    def drop(self, name: str) -> None:
        self._taken.remove(name)
        if name in _NAMES:
            number = _NAMES.index(name)
        elif re.fullmatch("x(0|[1-9][0-9]{0,8})", name):
            number = len(_NAMES) + int(name[1:])
        else:
            return  # of an input
        if number < self._next:
            heapq.heappush(self._free, number)


def _written(
    lines: Sequence[Line | Block], names: Mapping[Value, str], heads: Sequence[Value], returns: bool = True
) -> list[str]:
    """Lines of Python. `names` are those of the values that are there before."""
    last, name_of, code, at = _last_uses(lines, heads), dict(names), list[str](), 0
    local_names = _Locals(names.values())
    while at < len(lines):
        line, begin = lines[at], at
        at += 1
        if isinstance(line, Block):  # where a single value is alive
            code += [] if name_of[line.inputs[0]] == "x" else [f"x = {name_of[line.inputs[0]]}"]
            *first, last_line = _head(line)
            body = _written(line.lines, {line.inputs[0]: "x"}, line.outputs, returns=False)
            code += [*first, f"{last_line}:", *_indented(body)]
            name_of[line.last[0]] = "x"
            local_names = _Locals(["x"])
            continue
        # A chain of functions of one value is one expression, as long as it fits in a line.
        expression = line.form.format(v=[name_of[value] for value in line.inputs], s=line.texts)
        outputs = line.outputs
        while at < len(lines) and isinstance(after := lines[at], Line) and _is_wrapper(after):
            around = after.form.format(v=[expression], s=after.texts)
            if after.inputs != outputs or last[outputs[0]] != at or len(around) > _WIDTH:
                break
            expression, outputs, at = around, after.outputs, at + 1
        if returns and at == len(lines) and tuple(heads) == outputs:
            return [*code, *_wrapped("return ", expression)]
        # The names of values that nothing reads any more are free for what comes.
        for value in dict.fromkeys(value for each in lines[begin:at] for value in each.inputs):
            if value in name_of and last[value] < at:
                local_names.drop(name_of[value])
        for output in outputs:
            name_of[output] = local_names.take() if output in last else "_"
        code += _wrapped(f"{', '.join(name_of[o] for o in outputs)} = ", expression)
    return [*code, f"return {', '.join(name_of[head] for head in heads)}"] if returns else code


def _wrapped(start: str, expression: str) -> list[str]:
    """A line, or several of a long call."""
    if len(start + expression) <= _WIDTH:
        return [start + expression]
    depth, opened, closed, commas = 0, 0, 0, list[int]()  # the first bracket, its end, the commas in it
    for token in tokenize.generate_tokens(iter([expression]).__next__):
        depth -= token.string in (")", "]", "}") and token.type == tokenize.OP
        if token.type == tokenize.OP and not closed:
            if depth == 0 and token.string == "(" and not opened:
                opened = token.end[1]
            elif depth == 0 and token.string == ")" and opened:
                closed = token.start[1]
            elif depth == 1 and token.string == "," and opened:
                commas.append(token.start[1])
        depth += token.string in ("(", "[", "{") and token.type == tokenize.OP
    if closed != len(expression) - 1:  # not one call
        return [f"{start}(", *_indented([expression]), ")"]
    places = [opened, *(at + 1 for at in commas), closed]
    arguments = [expression[a:b].strip().removesuffix(",") for a, b in itertools.pairwise(places)]
    if len(expression[opened:closed]) <= _WIDTH:
        return [f"{start}{expression[:opened]}", *_indented([", ".join(arguments)]), ")"]
    return [f"{start}{expression[:opened]}", *_indented([f"{each}," for each in arguments if each]), ")"]


def _head(loop: Block) -> list[str]:
    """The beginning of a loop, without a colon."""
    rows = list(zip(*(variable.values for variable in loop.variables), strict=True))
    targets = ", ".join(variable.name for variable in loop.variables)
    if not rows:
        return [f"for _ in range({loop.count})"]
    if len(loop.variables) == 1:
        return [f"for {targets} in {_series([row[0] for row in rows])}"]
    line = f"for {targets} in ({', '.join(map(_text, rows))})"
    return (
        [line] if len(line) < _WIDTH else [f"for {targets} in (", *_indented([f"{_text(row)}," for row in rows]), ")"]
    )


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _series(values: list[Any]) -> str:
    if len(values) > 2 and isinstance(values[0], int):
        step = values[1] - values[0]
        if step > 0 and values == list(range(values[0], values[-1] + 1, step)):
            return f"range({values[0]}, {values[-1] + 1}{f', {step}' if step > 1 else ''})"
    return _text(tuple(values))
