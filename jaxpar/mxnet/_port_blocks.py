"""Repeated lines as functions and loops.

Lines of one form in a chain become a function where they come three times or more ("conv_bn"). So do the lines between
two places where a single value is alive ("residual"), if they come twice. What then repeats in a row is a loop. The
parameters of a function and the targets of a loop are what differs: a number in the names of arrays, a size, an option.
A number that is another one plus a constant needs no parameter, and nor does a multiple of another size.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Value = tuple[int, int]  # an output of a node
POSITION, KEYWORD = object(), object()  # the defaults of what each call gives
_LONGEST, _MOST_TARGETS, _WIDTH = 4, 4, 88  # of a chain, of a loop, of a line
_LONGEST_NAME = 32
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
    """Repeated lines, of one input: those of the first time, with the texts of their slots."""

    name: str
    variables: Sequence[Variable]
    lines: Sequence[Line]
    count: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]  # of the first time
    last: tuple[Value, ...]  # of the last time


def fold(lines: list[Line], inputs: Sequence[Value], heads: Sequence[Value]) -> tuple[list[Block], list[Line | Block]]:
    """The functions that the lines need, and what is left of the lines, with loops and without slots."""
    functions: list[Block] = []
    while windows := _chains(lines, heads, [function.name for function in functions]):
        lines = _replaced(lines, windows, functions)
    for windows in _between_cuts(lines, inputs, heads):
        lines = _replaced(lines, windows, functions)
    items = _with_loops(lines, inputs, heads)
    return functions, [item if isinstance(item, Block) else _block("", [[item]]).lines[0] for item in items]


def _key(lines: Sequence[Line]) -> Any:
    """Equal for lines that differ in their slots only."""
    numbers: dict[Value, int] = {}
    found: list[Any] = []
    for line in lines:
        values = tuple(numbers.setdefault(value, len(numbers)) for value in (*line.inputs, *line.outputs))
        found.append((line.form, values, tuple((slot.kind, slot.key) for slot in line.slots)))
    return tuple(found)


def _last_uses(lines: Sequence[Line | Block], heads: Iterable[Value]) -> dict[Value, int]:
    """The place of the line that is the last one to use a value. Heads are used after all lines."""
    uses = {value: at for at, line in enumerate(lines) for value in line.inputs}
    return uses | dict.fromkeys(heads, len(lines))


def _cuts(lines: Sequence[Line], inputs: Sequence[Value], heads: Sequence[Value]) -> list[int]:
    """The places before which a single value is alive."""
    last, alive, found = _last_uses(lines, heads), set(inputs), list[int]()
    for at in range(len(lines) + 1):
        alive = {value for value in alive if last.get(value, -1) >= at}
        found += [at] if len(alive) == 1 else []
        alive.update(lines[at].outputs if at < len(lines) else ())
    return found


def _is_wrapper(line: Line) -> bool:
    """Whether a line is a function of JAX of one value, which may be written around the line before."""
    return line.form.startswith(("jax.nn.", "jnp.")) and line.form.count("{v[") == 1


def _chains(lines: list[Line], heads: Sequence[Value], own: Sequence[str]) -> _Windows:
    """The chain of lines without functions that is best written as one."""
    users = [*heads, *(value for line in lines for value in line.inputs)]
    groups: dict[Any, _Windows] = {}
    ends: dict[Any, int] = {}
    for at in range(len(lines)):
        for length in range(2, min(_LONGEST, len(lines) - at) + 1):
            *before, line = window = lines[at : at + length]
            follows = line.inputs == before[-1].outputs and users.count(line.inputs[0]) == 1
            plain = line.layer not in own and before[0].layer not in own and len(before[0].inputs) == 1
            if not follows or not plain or line.form in [other.form for other in before]:
                break
            key = _key(window)
            if ends.get(key, 0) <= at:
                groups.setdefault(key, []).append(window)
                ends[key] = at + length
    often = [windows for windows in groups.values() if len(windows) > 2]
    return max(often, key=lambda windows: (len(windows) - 1) * (len(windows[0]) - 1), default=[])


def _between_cuts(lines: list[Line], inputs: Sequence[Value], heads: Sequence[Value]) -> list[_Windows]:
    """Lines between places with a single value, where they come several times."""
    places = _cuts(lines, inputs, heads)
    groups: dict[Any, _Windows] = {}
    for start, end in itertools.pairwise(places):
        if end + 1 in places and _is_wrapper(lines[end]):
            end += 1  # the activation of a residual unit
        window = lines[start:end]
        if len(window) > 2:
            groups.setdefault(_key(window), []).append(window)
    return [windows for windows in groups.values() if len(windows) > 1]


def _block(name: str, windows: _Windows) -> Block:
    """Windows of one form as one block, with variables for what differs."""
    variables = _Variables()
    lines: list[Line] = []
    for line, *others in zip(*windows, strict=True):
        slots = zip(line.slots, *(other.slots for other in others), strict=True)
        lines.append(dataclasses.replace(line, texts=tuple(map(variables.text, slots))))
    first, last = windows[0], windows[-1]
    return Block(name, variables.found, lines, len(windows), first[0].inputs[:1], first[-1].outputs, last[-1].outputs)


def _replaced(lines: list[Line], windows: _Windows, functions: list[Block]) -> list[Line]:
    """The lines with calls of a new function in the place of these windows."""
    function = _block(_free(_name_of(windows[0]), [other.name for other in functions]), windows)
    functions.append(function)
    slots = [variable.slot for variable in function.variables]
    places = [f", {{s[{i}]}}" for i, slot in enumerate(slots) if slot.default is POSITION]
    places += [f"{{s[{i}]}}" for i, slot in enumerate(slots) if slot.default is not POSITION]
    form = f"{function.name}(net, {{v[0]}}{''.join(places)})"
    found = {line.outputs: line for line in lines}
    for number, (first, *rest) in enumerate(windows):
        own = tuple(dataclasses.replace(v.slot, value=v.values[number]) for v in function.variables)
        found[first.outputs] = Line(form, first.inputs[:1], rest[-1].outputs, own, function.name)
        for line in rest:
            del found[line.outputs]
    return list(found.values())


def _with_loops(lines: list[Line], inputs: Sequence[Value], heads: Sequence[Value]) -> list[Line | Block]:
    """The lines with loops in the place of what repeats in a row."""
    cuts = {*_cuts(lines, inputs, heads)}
    found: list[Line | Block] = []
    at = 0
    while at < len(lines):
        (saved, best), (later, _) = _repeats(lines, at, cuts), _repeats(lines, at + 1, cuts)
        loop = best is not None and saved >= later
        found.append(best if best is not None and loop else lines[at])
        at += best.count * len(best.lines) if best is not None and loop else 1
    return found


def _repeats(lines: list[Line], at: int, cuts: set[int]) -> tuple[tuple[int, int], Block | None]:
    """The best loop that begins at a line, with the lines that it saves and, negative, its number of targets."""
    saved: tuple[int, int] = (1, 0)
    best = None
    for period in range(1, (len(lines) - at) // 2 + 1):
        windows: _Windows = []
        for start in range(at, len(lines) - period + 1, period):
            window = lines[start : start + period]
            if not {start, start + period} <= cuts or (windows and _key(window) != _key(windows[0])):
                break
            windows.append(window)
        # A longer window takes a run of equal lines whole, with none of it before or behind.
        ends = [_key([line]) for line in (lines[at], lines[at + period - 1], *lines[at + period * len(windows) :][:1])]
        whole = period == 1 or ends[1] not in (ends[0], *ends[2:])
        if (len(windows) - 1) * period > saved[0] and whole:
            loop = _block("", windows)
            if len(loop.variables) <= _MOST_TARGETS:
                saved, best = ((loop.count - 1) * period, -len(loop.variables)), loop
    return saved, best


class _Variables:
    """Collects what differs."""

    def __init__(self) -> None:
        self.found: list[Variable] = []

    def text(self, slots: Sequence[Slot]) -> str:
        """The text of a slot that has these values in turn."""
        first, values = slots[0], tuple(slot.value for slot in slots)
        text = self._name(first, values) if first.kind == "name" else self._value(first, values)
        if first.default is POSITION:
            return text
        return "" if {*values} == {first.default} else f", {first.key}={text}"

    def _value(self, slot: Slot, values: tuple[Any, ...]) -> str:
        if len(set(values)) == 1:
            return _text(values[0])
        for variable in self.found:
            comparable = variable.slot.kind == slot.kind and (slot.kind != "value" or slot.key == variable.slot.key)
            if comparable and (text := _related(variable, values)) is not None:
                return text
        taken = [variable.name for variable in self.found]
        word = slot.key if slot.kind != "index" or slot.key in ("stage", "unit", "block", "key") else "n"
        self.found.append(Variable(_free(word, taken), slot, values))
        return self.found[-1].name

    def _name(self, slot: Slot, values: tuple[str, ...]) -> str:
        """A name whose numbers differ, a beginning and a number that differ, or a parameter."""
        parts = [re.split(r"(\d+)", value) for value in values]
        plain = all(str(int(number)) == number for part in parts for number in part[1::2])
        if len(set(values)) == 1 or not plain or not all(map(_SAFE.fullmatch, values)):
            return self._value(slot, values)
        if len({tuple(part[::2]) for part in parts}) == 1:
            return self._joined([*zip(*parts, strict=True)])
        ends = [match.groups() for value in values if (match := re.fullmatch(r"(.*?)([a-zA-Z]+)(\d+)", value))]
        if len(ends) == len(values) and len({word for _, word, _ in ends}) == 1:
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
            word = re.sub(r".*?([a-z]*)_?$", r"\1", column[0].lower()) or word
        return f'f"{text}"'


def _related(variable: Variable, values: tuple[Any, ...]) -> str | None:
    """The values as those of a variable, plus a constant (of an index), or times or by a whole number (of a size)."""
    pairs = list(zip(values, variable.values, strict=True))
    if values == variable.values:
        return variable.name
    if variable.slot.kind == "index" and len({a - b for a, b in pairs}) == 1:
        return f"{variable.name} {'+' if values > variable.values else '-'} {abs(pairs[0][0] - pairs[0][1])}"
    if variable.slot.kind == "size" and 0 not in variable.values and len({a / b for a, b in pairs}) == 1:
        a, b = max(pairs[0]), min(pairs[0])
        return f"{variable.name} {'*' if values > variable.values else '//'} {a // b}" if a % b == 0 else None
    return None


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    return f'"{value}"' if isinstance(value, str) and _SAFE.fullmatch(value) else repr(value)


def _free(word: str, taken: Sequence[str]) -> str:
    return next(name for name in [word, *(f"{word}{n}" for n in range(2, len(taken) + 3))] if name not in taken)


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
    found: list[str] = []
    for function in functions:
        layers = ", ".join(dict.fromkeys(line.layer for line in function.lines))
        about = f'"""{layers}: {function.count} times in the network."""'
        body = _written(function.lines, {function.inputs[0]: "x"}, function.outputs)
        given = ", ".join(["net", "x", *_parameters(function)])
        found.append("\n".join([f"def {function.name}({given}):", *_indented([about, *body])]))
    body = _written(items, names, heads)
    return [*found, "\n".join([f"def network(net, {', '.join(names.values())}):", *_indented(body)])]


def _parameters(function: Block) -> list[str]:
    """The parameters of a function after `net` and `x`, in the order in which `_replaced` gives them."""
    slots = {variable.name: variable.slot.default for variable in function.variables}
    plain = [name for default in (POSITION, KEYWORD) for name, own in slots.items() if own is default]
    return [*plain, *(f"{name}={_text(own)}" for name, own in slots.items() if name not in plain)]


def _written(
    lines: Sequence[Line | Block], names: Mapping[Value, str], heads: Sequence[Value], returns: bool = True
) -> list[str]:
    """Lines of Python. `names` are those of the values that are there before."""
    last, known, code, at = _last_uses(lines, heads), dict(names), list[str](), 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if isinstance(line, Block):
            code += [] if known[line.inputs[0]] == "x" else [f"x = {known[line.inputs[0]]}"]
            *first, last_line = _head(line)
            body = _written(line.lines, {line.inputs[0]: "x"}, line.outputs, returns=False)
            code += [*first, f"{last_line}:", *_indented(body)]
            known[line.last[0]] = "x"
            continue
        expression = line.form.format(v=[known[value] for value in line.inputs], s=line.texts)
        outputs = line.outputs
        while at < len(lines) and isinstance(after := lines[at], Line) and _is_wrapper(after):
            around = after.form.format(v=[expression], s=after.texts)
            if after.inputs != outputs or last[outputs[0]] != at or len(around) > _WIDTH:
                break
            expression, outputs, at = around, after.outputs, at + 1
        if returns and at == len(lines) and tuple(heads) == outputs:
            return [*code, *_wrapped("return ", expression)]
        taken = {name for value, name in known.items() if last.get(value, -1) >= at}
        for output in outputs:
            order = [*_NAMES, *(f"x{n}" for n in range(len(lines)))]
            known[output] = next(name for name in order if name not in taken) if output in last else "_"
            taken.add(known[output])
        code += _wrapped(f"{', '.join(known[o] for o in outputs)} = ", expression)
    return [*code, f"return {', '.join(known[head] for head in heads)}"] if returns else code


def _wrapped(start: str, expression: str) -> list[str]:
    """A line, or several of a long call."""
    if len(start + expression) <= _WIDTH:
        return [start + expression]
    function, _, arguments = expression.partition("(")
    parts = [arguments[:-1]]
    if len(parts[0]) > _WIDTH:
        parts = [f"{part}," for part in re.split(r", (?![^(]*\))", parts[0])]
    return [f"{start}{function}(", *_indented(parts), ")"]


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
