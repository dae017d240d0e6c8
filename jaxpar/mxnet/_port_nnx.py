"""Repeated lines as classes of flax.nnx: the same statements, with attributes for what has arrays or options."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from ._port_blocks import Block, about, free, head, indented, name_of, parameters, wrapped, written
from ._port_calls import Line, Value

# Parts of forms: a value, or an array that is an attribute, and a text.
_VALUE, _SLOT = r"(?:\{v\[\d+\]\}|self\.\w+\(\))", r"\{s\[\d+\]\}"
_ARRAY = re.compile(rf"net\.array\(({_SLOT}, \*{_SLOT})\)")
_LAYER = re.compile(rf"(\w+)\(net, ({_VALUE})(.*)\)")
_OPTIONS = re.compile(
    rf"(\w+)\(((?:(?:, )?{_VALUE})*)((?:(?:, )?(?:\w+=)?{_SLOT})*)"
    rf"(?:, train=net\.train, rng=net\.key\(({_SLOT})\))?\)"
)
_LAYERS = '''class Layer(nnx.Module):
    """A function above with its arrays. `train()` and `eval()` of a module switch those in it."""

    def __init__(self, arrays, function, *given, **options):
        self.function, self.given, self.options = function, given, tuple(options.items())
        self.deterministic = True
        kinds = "weight bias gamma beta running_mean running_var moving_mean moving_var".split()
        names = [given[0], *(f"{given[0]}_{kind}" for kind in kinds)]
        own = arrays if callable(arrays) else {n: arrays[n] for n in names if n in arrays}
        self.arrays = own if callable(own) else nnx.Dict(own)

    def array(self, name, *shape):
        return self.arrays(name, *shape) if callable(self.arrays) else self.arrays[name][...]

    def __call__(self, *inputs, rngs=None):
        new = {}
        net = Net(self.array, new, not self.deterministic, rngs)
        outputs = self.function(net, *inputs, *self.given, **dict(self.options))
        for name, array in new.items():
            self.arrays[name][...] = array
        return outputs


def arrays_of(model):
    """(params, running statistics) of a model, by MXNet's names."""
    found = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    return split({path[-1]: variable[...] for path, variable in found})'''
_OTHERS = {
    "own_array": """def own_array(net, name, *shape):
    return net.array(name, *shape)""",
    "switched": '''def switched(net, *given):
    """A function that needs to know whether it is trained."""
    *inputs, key, function = given
    return function(*inputs, train=net.train, rng=net.key(key))''',
}
_VARIABLES = """arrays = params  # or a function that gives them
if not callable(params):
    arrays = {name: nnx.Param(jnp.asarray(array)) for name, array in params.items()}
    for name, array in (state or {}).items():
        arrays[name] = nnx.BatchStat(jnp.asarray(array))"""


def classes(
    functions: Sequence[Block], items: Sequence[Line | Block], names: Mapping[Value, str], heads: Sequence[Value]
) -> list[str]:
    """The texts of the classes of a module: layers, one for each function, and the network."""
    random: dict[str, bool] = {}  # whether a class needs a random key, by the name of its function
    found = [_of_block(function, random) for function in functions]
    network = _Class(random)
    for item in items:
        if isinstance(item, Line):
            network.add(item)
            continue
        line = item.lines[0]
        if len(item.lines) > 1 or not _LAYER.fullmatch(line.form):
            name = free(name_of(item.lines), [*random])
            found.append(_of_block(dataclasses.replace(item, name=name), random))
            given = "".join(f", {parameter.partition('=')[0]}" for parameter in parameters(item))
            line = dataclasses.replace(line, form=f"{name}(net, {{v[0]}}{{s[0]}})", texts=(given,))
        network.add(dataclasses.replace(line, inputs=item.inputs, outputs=item.last), head(item))
    network.makes[:0] = _VARIABLES.split("\n")
    text = network.text("Network", "The network, with the arrays that it is given.", names, heads, "params, state=None")
    others = [other for name, other in _OTHERS.items() if re.search(rf"arrays,\s+{name},", "".join([*found, text]))]
    return [*others, _LAYERS, *found, text]


def _of_block(block: Block, random: dict[str, bool]) -> str:
    made = _Class(random)
    for line in block.lines:
        made.add(line)
    random[block.name] = made.is_random
    given = ", ".join(["arrays", *parameters(block)])
    return made.text(_class_name(block.name), about(block), {block.inputs[0]: "x"}, block.outputs, given)


def _class_name(function: str) -> str:
    return function.title().replace("_", "")


class _Class:
    """A class that is being written: the lines of `__init__` and of `__call__`."""

    def __init__(self, random: Mapping[str, bool]) -> None:
        self.makes: list[str] = []
        self.lines: list[Line] = []
        self._random = random
        self._attributes: list[str] = []

    @property
    def is_random(self) -> bool:
        return any("rngs=" in line.form for line in self.lines)

    def add(self, line: Line, loop: Sequence[str] = ()) -> None:
        """Add a line, or with the head of a loop a sequence of its modules."""

        def attribute(name: str, make: str) -> str:
            self._attributes.append(free(name, self._attributes))
            self.makes += _made(self._attributes[-1], make.format(s=line.texts), loop)
            return f"self.{self._attributes[-1]}"

        form = _ARRAY.sub(lambda match: attribute("array", f"Layer(arrays, own_array, {match[1]})") + "()", line.form)
        if match := _LAYER.fullmatch(form):
            function, value, given = match.groups()
            make = f"{_class_name(function)}(arrays" if function in self._random else f"Layer(arrays, {function}"
            rngs = ", rngs=rngs" if self._random.get(function, function == "dropout") else ""
            form = f"{attribute(function.rstrip('0123456789'), f'{make}{given})')}({value}{rngs})"
        elif (match := _OPTIONS.fullmatch(form)) and (match[3] or match[4]):
            function, values, options, key = match.groups()
            make = f"partial({function}{'' if values else ', '}{options})"
            make = f"Layer(arrays, switched, {key}, {make})" if key else make
            form = f"{attribute(function, make)}({values}{', rngs=rngs' if key else ''})"
        self.lines.append(dataclasses.replace(line, form=form))

    def text(self, name: str, about: str, names: Mapping[Value, str], heads: Sequence[Value], given: str) -> str:
        call = ["self", *names.values(), *(["*, rngs=None"] if self.is_random or name == "Network" else [])]
        lines = [f'"""{about}"""', "", f"def __init__(self, {given}):", *indented(self.makes or ["pass"]), ""]
        lines += [f"def __call__({', '.join(call)}):", *indented(written(self.lines, names, heads))]
        return "\n".join([f"class {name}(nnx.Module):", *indented(lines)])


def _made(attribute: str, make: str, loop: Sequence[str]) -> list[str]:
    """The assignment of an attribute. A loop makes a sequence."""
    start = f"self.{attribute} = "
    lines = wrapped(start, f"nnx.Sequential(*[{make} {' '.join(loop)}])" if loop else make)
    if loop and len(lines) > 1:
        return [f"{start}nnx.Sequential(", *indented(["*[", *indented([make, *loop]), "]"]), ")"]
    return lines
