"""From a closed jaxpr to one flat list of equations, nested jaxprs written out in their place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.extend.core as jex

from .costs import flops, nbytes, size
from .source import Frame, Sources, is_jax_function

_INLINE = frozenset(
    [
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "core_closed_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "remat",
        "remat2",
        "checkpoint",
        "custom_lin",
        "run_state",
    ]
)
_VIEWS = frozenset(
    [
        "broadcast_in_dim",
        "convert_element_type",
        "squeeze",
        "expand_dims",
        "stop_gradient",
        "pvary",
        "pcast",
        "pbroadcast",
        "copy",
        "copy_p",
        "transpose",
        "optimization_barrier",
        "sharding_constraint",
        "reduce_precision",
        "device_put",
        "reshape",
        "mesh_cast",
        "reshard",
        "random_wrap",
        "random_unwrap",
    ]
)
_SCOPE = re.compile(r"[\w.~/\[\]()<>:+ -]+")
_JUNK_SCOPES = frozenset(("checkpoint", "closed_call", "remat", "core_call", "~"))


@dataclass(slots=True)
class Value:
    """An array: `kind` is "op", "input", "weight", "const" or "literal"; a view has the root that it shows."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: str
    name: str = ""
    literal: Any = None
    producer: int | None = None
    root: int = -1


@dataclass(slots=True)
class Eqn:
    """An equation with its operands and results as numbers of values."""

    id: int
    prim: str
    params: dict[str, Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shape: tuple[int, ...]
    stack: tuple[Frame, ...]
    position: int
    scope: tuple[str, ...]
    backward: bool
    tangent: bool
    flops: int
    enclosing: tuple[int, ...] = ()  # the places of the calls that it was written out of
    view: bool = False
    residual: bool = False  # computed beside another equation of its place, for the gradient alone
    again: bool = False  # computed again for the gradient (remat)
    dead: bool = False  # not computed; kept because the gradient of it is


@dataclass(slots=True)
class Raw:
    """Every equation that reaches a result, in order, and every value."""

    eqns: list[Eqn] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    output_names: list[str] = field(default_factory=list)
    count: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    _above: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def above(self, eqn: Eqn) -> tuple[int, ...]:
        """Its place and the places that it was called from, the innermost first.

        The rules of differentiation are called from the place of the equation that they differentiate.
        """
        if eqn.position not in self._above:
            key = place(eqn.stack)
            shorter = (self.places.get(key[:length]) for length in range(len(key), 0, -1))
            self._above[eqn.position] = tuple(number for number in shorter if number is not None)
        return self._above[eqn.position]

    def root(self, value: int) -> int:
        """The value that a view shows in the end."""
        while self.values[value].root != value:
            value = self.values[value].root
        return value

    def of(self, value: int) -> Value:
        """The value behind a view."""
        return self.values[self.root(value)]

    def weight_of(self, value: int) -> int | None:
        """The parameter that a value shows; None where it is none."""
        root = self.root(value)
        return root if self.values[root].kind == "weight" else None


@dataclass(frozen=True, slots=True)
class _Context:
    stack: tuple[Frame, ...] = ()
    scope: tuple[str, ...] = ()
    backward: bool = False
    tangent: bool = False
    times: int = 1
    enclosing: tuple[int, ...] = ()
    again: bool = False


def place(stack: tuple[Frame, ...]) -> tuple[int, ...]:
    """What tells one place of the program from another; a jitted function called anew is in the same place."""
    return tuple(frame.call for frame in stack if frame.call >= 0)


def read(closed: Any, names: Sequence[str], is_weight: Sequence[bool], output_names: Sequence[str]) -> Raw:
    """The flat graph of a closed jaxpr, without the equations that no result needs."""
    reader = _Reader()
    env: dict[Any, int] = {}
    for var, name, weight in zip(closed.jaxpr.invars, names, is_weight, strict=True):
        env[var] = reader.new(var.aval, "weight" if weight else "input", name)
    reader.constants(env, closed)
    reader.walk(closed.jaxpr, env, _Context())
    reader.raw.outputs = [reader.read(env, atom) for atom in closed.jaxpr.outvars]
    reader.raw.output_names = list(output_names)
    _drop_dead(reader.raw, reader.kept)
    _mark_residuals(reader.raw)
    return reader.raw


class _Reader:
    def __init__(self) -> None:
        self.raw = Raw()
        self.sources = Sources()
        self.kept: set[int] = set()  # values that a loop needs although nothing reads them
        self.regions: dict[tuple[str, ...], itertools.count[int]] = {}

    def new(self, aval: Any, kind: str = "op", name: str = "", root: int | None = None, literal: Any = None) -> int:
        number = len(self.raw.values)
        dtype = str(getattr(aval, "dtype", "token"))
        self.raw.values.append(
            Value(tuple(getattr(aval, "shape", ())), dtype, nbytes(aval), kind, name, literal, None, number)
        )
        if root is not None:
            self.raw.values[number].root = root
        return number

    def constants(self, env: dict[Any, int], closed: Any) -> None:
        """Arrays that the function captured: floating ones with more than one element are parameters."""
        for var in closed.jaxpr.constvars:
            floating = str(getattr(var.aval, "dtype", "")).startswith(("float", "bfloat", "complex"))
            weight = floating and size(var.aval) > 1
            number = sum(value.name.startswith("captured") for value in self.raw.values) if weight else 0
            env[var] = self.new(var.aval, "weight" if weight else "const", f"captured{number}" if weight else "")

    def read(self, env: dict[Any, int], atom: Any) -> int:
        if isinstance(atom, jex.Literal):
            return self.new(atom.aval, "literal", literal=atom.val)
        return env[atom]

    def walk(self, jaxpr: Any, env: dict[Any, int], context: _Context) -> None:
        for eqn in jaxpr.eqns:
            self.raw.count += 1
            inner = self.enter(eqn, context)
            name = eqn.primitive.name
            handler = _REGIONS.get(name)
            if handler is not None:
                handler(self, eqn, env, inner)
            elif name in _INLINE and (body := _body(eqn)) is not None:
                self.inline(eqn, body, env, inner)
            else:
                self.leaf(eqn, env, inner)

    def enter(self, eqn: Any, context: _Context) -> _Context:
        info = getattr(eqn, "source_info", None)
        names, backward, tangent, again = _name_stack(info)
        return _Context(
            context.stack + self.sources.stack(info),
            context.scope + names,
            (context.backward or backward) and not again,
            context.tangent or tangent,
            context.times,
            context.enclosing,
            context.again or again,
        )

    def leaf(self, eqn: Any, env: dict[Any, int], context: _Context) -> None:
        ins = tuple(self.read(env, atom) for atom in eqn.invars)
        in_avals, out_avals = [a.aval for a in eqn.invars], [v.aval for v in eqn.outvars]
        cost = flops(eqn.primitive.name, eqn.params, in_avals, out_avals) * context.times
        self.add(eqn.primitive.name, eqn.params, ins, eqn.outvars, env, context, cost, in_avals)

    def add(
        self,
        prim: str,
        params: dict[str, Any],
        ins: tuple[int, ...],
        outvars: Sequence[Any],
        env: dict[Any, int],
        context: _Context,
        cost: int,
        in_avals: Sequence[Any] = (),
    ) -> Eqn:
        raw, number = self.raw, len(self.raw.eqns)
        outs = tuple(self.new(var.aval) for var in outvars)
        shapes = tuple(tuple(getattr(aval, "shape", ())) for aval in in_avals)
        position = self.position(context.stack)
        new = Eqn(
            number, prim, params, ins, outs, shapes, raw.values[outs[0]].shape if outs else (),
            context.stack, position, context.scope, context.backward, context.tangent, cost,
            context.enclosing, again=context.again,
        )  # fmt: skip
        for var, out in zip(outvars, outs, strict=True):
            env[var] = out
            raw.values[out].producer = number
        new.view = _is_view(raw, new)
        if new.view:
            raw.values[outs[0]].root = ins[0]
        elif (index := _wrapped_index(raw, new)) is not None:
            new.view = True
            new.flops *= 3  # the test and the sum that it picks from are not drawn
            raw.values[outs[0]].root = index
        elif _is_constant(raw, new):
            new.view = True
            for out in outs:
                raw.values[out].kind = "const"
        raw.eqns.append(new)
        return new

    def position(self, stack: tuple[Frame, ...]) -> int:
        """A number for a place in the program; a jitted function called anew is the same place."""
        return self.raw.places.setdefault(place(stack), len(self.raw.places))

    def inline(self, eqn: Any, body: Any, env: dict[Any, int], context: _Context) -> None:
        closed_jaxpr = getattr(body, "jaxpr", body)
        name = str(eqn.params.get("name") or "")
        library = is_jax_function(closed_jaxpr) and not _has_region(closed_jaxpr)
        if library or eqn.primitive.name.startswith("custom_"):
            enclosing = (*context.enclosing, self.position(context.stack))
            context = replace(context, enclosing=enclosing)
        if library and name:
            number = -1 - self.raw.count  # a call of its own, wherever it is made
            frame = Frame("jax", "jax", name, "", 0, number, number)
            context = replace(context, stack=(*context.stack, frame))
        elif not is_jax_function(closed_jaxpr):
            context = self.region(context, _label(eqn, name))
        self.run(body, [self.read(env, atom) for atom in eqn.invars], eqn.outvars, env, context)

    def region(self, context: _Context, label: str, backward: bool = False) -> _Context:
        """A cluster of its own: a second one of the same name in the same place gets a number, "scan ×4 (2)"."""
        if not label:
            return context
        counter = self.regions.setdefault((*context.scope, label), itertools.count(1))
        number = next(counter)
        label = label if number == 1 else f"{label} ({number})"
        return replace(context, scope=(*context.scope, label))

    def run(self, body: Any, args: Sequence[int], outvars: Iterable[Any], env: dict[Any, int], context: _Context):
        """Write a nested jaxpr out; its results become those of the equation."""
        inner, results = self.nested(body, args, context)
        for var, value in zip(outvars, results, strict=True):
            env[var] = self.new(var.aval, root=value)
        return inner

    def nested(self, body: Any, args: Sequence[int], context: _Context) -> tuple[dict[Any, int], list[int]]:
        jaxpr = getattr(body, "jaxpr", body)
        inner: dict[Any, int] = {}
        for var, value in zip(jaxpr.invars, args, strict=True):
            inner[var] = self.new(var.aval, root=value)
        if hasattr(body, "consts"):
            self.constants(inner, body)
        self.walk(jaxpr, inner, context)
        return inner, [self.read(inner, atom) for atom in jaxpr.outvars]


def _scan(reader: _Reader, eqn: Any, env: dict[Any, int], context: _Context) -> None:
    length = eqn.params["length"]
    context = reader.region(context, f"scan ×{length}")
    context = replace(context, times=context.times * length)
    args = [reader.read(env, atom) for atom in eqn.invars]
    _, results = reader.nested(eqn.params["jaxpr"], args, context)
    carried = eqn.params.get("num_carry", 0)
    reader.kept.update(results[:carried])
    for var, value in zip(eqn.outvars, results, strict=True):
        env[var] = reader.new(var.aval, root=value)


def _while(reader: _Reader, eqn: Any, env: dict[Any, int], context: _Context) -> None:
    """Counted once, as XLA does: nobody knows how often it runs. The condition is not drawn."""
    context = reader.region(context, "while")
    args = [reader.read(env, atom) for atom in eqn.invars]
    skip = eqn.params["cond_nconsts"]
    _, results = reader.nested(eqn.params["body_jaxpr"], args[skip:], context)
    counters = [value for value in results if reader.raw.values[value].shape == ()]
    reader.kept.update(value for value in results if value not in counters)
    for var, value in zip(eqn.outvars, results, strict=True):
        env[var] = reader.new(var.aval, root=value)


def _cond(reader: _Reader, eqn: Any, env: dict[Any, int], context: _Context) -> None:
    context = reader.region(context, "cond")
    index, *args = (reader.read(env, atom) for atom in eqn.invars)
    ins = [index]
    for number, branch in enumerate(eqn.params["branches"]):
        _, results = reader.nested(branch, args, reader.region(context, f"branch {number}"))
        ins += results
    reader.add("cond", {}, tuple(ins), eqn.outvars, env, context, 0)


def _shard_map(reader: _Reader, eqn: Any, env: dict[Any, int], context: _Context) -> None:
    mesh = eqn.params.get("mesh")
    axes = dict(getattr(mesh, "shape", {}) or {})
    kind = "pmap" if any(f.file.endswith("/pmap.py") or f.name == "pmap" for f in context.stack) else "shard_map"
    kind = "pmap" if _traced_by_pmap(eqn) else kind
    label = f"{kind} " + ", ".join(f"{name}={size_}" for name, size_ in axes.items())
    args = [reader.read(env, atom) for atom in eqn.invars]
    reader.run(eqn.params["jaxpr"], args, eqn.outvars, env, reader.region(context, label.strip()))


def _pmap(reader: _Reader, eqn: Any, env: dict[Any, int], context: _Context) -> None:
    label = f"pmap {eqn.params.get('axis_name')}={eqn.params.get('axis_size')}"
    args = [reader.read(env, atom) for atom in eqn.invars]
    reader.run(_body(eqn), args, eqn.outvars, env, reader.region(context, label))


_REGIONS = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map, "xla_pmap": _pmap}


def _traced_by_pmap(eqn: Any) -> bool:
    info = getattr(getattr(eqn.params["jaxpr"], "debug_info", None), "func_src_info", "")
    return "pmap.py" in str(info)


def _body(eqn: Any) -> Any:
    """The nested jaxpr whose arguments are those of the equation; None where there is none."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        inner = getattr(body, "jaxpr", body)
        if inner is not None and len(getattr(inner, "invars", ())) == len(eqn.invars):
            return body
    return None


def _has_region(jaxpr: Any) -> bool:
    """Whether a loop, a branch or a map over devices stands directly inside, or one call deeper."""
    for eqn in jaxpr.eqns:
        body = _body(eqn) if eqn.primitive.name in _INLINE else None
        if eqn.primitive.name in ("shard_map", "xla_pmap"):
            return True
        if body is not None and _has_region(getattr(body, "jaxpr", body)):
            return True
    return False


def _label(eqn: Any, name: str) -> str:
    prim = eqn.primitive.name
    if prim in ("remat", "remat2", "checkpoint"):
        return "remat"
    if prim.startswith("custom_"):
        return name or prim.removesuffix("_call").removesuffix("_jaxpr").replace("_call", "")
    return "" if name == "<lambda>" else name


def _name_stack(info: Any) -> tuple[tuple[str, ...], bool, bool, bool]:
    """The scopes that people wrote; whether the equation is of a gradient, was differentiated, is computed again."""
    entries = getattr(getattr(info, "name_stack", None), "stack", ())
    names, backward, tangent, again = [], False, False, False
    for entry in entries:
        name = str(getattr(entry, "name", ""))
        if type(entry).__name__ == "Transform":
            backward |= name == "transpose"
            tangent |= name == "jvp"
        elif name == "rematted_computation":
            again = True
        elif _SCOPE.fullmatch(name) and "->" not in name and name not in _JUNK_SCOPES:
            names.append(name)
    return tuple(names), backward, tangent, again


def _is_view(raw: Raw, eqn: Eqn) -> bool:
    if eqn.prim == "slice" or eqn.prim == "dynamic_slice":
        return raw.weight_of(eqn.ins[0]) is not None and not eqn.backward
    if eqn.prim not in _VIEWS or not eqn.ins:
        return False
    return eqn.prim != "reshape" or not _flattens(eqn)


def _flattens(eqn: Eqn) -> bool:
    """To two dimensions, the first one kept; the gradient goes the other way."""
    shape, new = (eqn.out_shape, eqn.in_shapes[0]) if eqn.backward else (eqn.in_shapes[0], eqn.out_shape)
    return len(shape) > 2 and len(new) == 2 and shape[0] == new[0] and sum(d != 1 for d in shape[1:]) > 1


def _is_constant(raw: Raw, eqn: Eqn) -> bool:
    """Computed from literals alone: a mask, a scale. Random numbers and the place in a mesh are not."""
    if eqn.backward or eqn.prim in ("cond", "axis_index") or eqn.prim.startswith("random"):
        return False
    return all(raw.of(value).kind in ("literal", "const") for value in eqn.ins)


def _wrapped_index(raw: Raw, eqn: Eqn) -> int | None:
    """`select_n(i < 0, i, i + N)` is i: how NumPy's negative indices are read."""
    if eqn.prim != "select_n" or len(eqn.ins) != 3:
        return None
    test, index, wrapped = (raw.root(value) for value in eqn.ins)
    below, added = raw.values[test].producer, raw.values[wrapped].producer
    if below is None or added is None:
        return None
    lt, add = raw.eqns[below], raw.eqns[added]
    same = lt.prim == "lt" and add.prim == "add" and raw.root(lt.ins[0]) == index == raw.root(add.ins[0])
    return eqn.ins[1] if same and raw.of(lt.ins[1]).kind == "literal" else None


def _drop_dead(raw: Raw, kept: set[int]) -> None:
    """Keep what a result needs, what a loop carries, and what a gradient was taken of."""
    live = {raw.root(value) for value in (*raw.outputs, *kept)}
    differentiated = {number for eqn in raw.eqns if eqn.backward for number in raw.above(eqn)}
    differentiated -= {eqn.position for eqn in raw.eqns if eqn.again}
    keep = []
    for eqn in reversed(raw.eqns):
        needed = any(out in live for out in eqn.outs) or (eqn.view and raw.root(eqn.outs[0]) in live)
        eqn.dead = not needed
        if needed and (not eqn.view or raw.of(eqn.outs[0]).kind == "const"):
            live.update(raw.root(value) for value in eqn.ins)
        if needed or (not eqn.backward and not eqn.view and eqn.position in differentiated):
            eqn.flops = 0 if eqn.dead else eqn.flops
            keep.append(eqn)
    order = {eqn.id: number for number, eqn in enumerate(reversed(keep))}
    for value in raw.values:
        value.producer = order.get(value.producer) if value.producer is not None else None
    raw.eqns = list(reversed(keep))
    for eqn in raw.eqns:
        eqn.id = order[eqn.id]


def _mark_residuals(raw: Raw) -> None:
    """Differentiation computes, beside an equation and in its place, what only its gradient reads."""
    beside = _beside_another(raw)
    readers: dict[int, list[Eqn]] = {}
    results = {raw.root(value) for value in raw.outputs}
    for eqn in raw.eqns:
        for value in () if eqn.view else eqn.ins:
            readers.setdefault(raw.root(value), []).append(eqn)
    for eqn in reversed(raw.eqns):
        if eqn.id in beside and results.isdisjoint(eqn.outs):
            read = (reader for out in eqn.outs for reader in readers.get(out, ()))
            eqn.residual = all(reader.backward or reader.residual for reader in read)


def _beside_another(raw: Raw) -> set[int]:
    """Differentiated equations that directly follow another one of the same place."""
    found: set[int] = set()
    first: Eqn | None = None
    for eqn in raw.eqns:
        if eqn.view or eqn.backward:
            continue
        places = {first.position, *first.enclosing}.difference(eqn.enclosing) if first is not None else set()
        again = first is not None and eqn.prim == first.prim != "integer_pow" and eqn.out_shape == first.out_shape
        if eqn.tangent and not eqn.dead and not again and not places.isdisjoint(raw.above(eqn)):
            found.add(eqn.id)
        else:
            first = eqn
    return found
