"""From a closed jaxpr to one flat list of equations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.extend.core as jex

from .context import Context
from .costs import body_cost, dtype_name, flops, nbytes, size
from .expansions import expand
from .liveness import drop_dead, mark_residuals
from .paths import Argument
from .raw import Eqn, Raw, Value
from .regions import (
    INLINE,
    Region,
    body_of,
    branches_of,
    call_label,
    count_fillers,
    default_branch,
    is_inlined,
    maps_devices,
    region_of,
)
from .source import Sources, defined_in, is_jax_function
from .views import mark_view


def read(
    closed: Any,
    arguments: Sequence[Argument],
    output_names: Sequence[str],
    captured: Mapping[int, tuple[Any, Argument]] | None = None,
) -> Raw:
    """The flat form of a closed jaxpr.

    Nested jaxprs are written out in their place. Equations that no result needs are dropped.

    Args:
        closed: of the function.
        arguments: the name and kind of each argument.
        output_names: of each result.
        captured: the arrays that the function holds, by id, each with its name and kind.
    """
    reader = _Reader(captured or {}, any(argument.kind == "weight" for argument in arguments))
    env: dict[Any, int] = {}
    for var, argument in zip(closed.jaxpr.invars, arguments, strict=True):
        env[var] = reader.add_argument(var.aval, argument)
    reader.add_constants(env, closed)
    reader.walk(closed.jaxpr, env, Context())
    reader.raw.outputs = [reader.value_of(env, atom) for atom in closed.jaxpr.outvars]
    reader.raw.output_names = list(output_names)
    drop_dead(reader.raw, reader.carried)
    mark_residuals(reader.raw)
    return reader.raw


class _Reader:
    """Writes jaxprs out into one `Raw`. An `env` has the number of the value of each variable."""

    def __init__(self, captured: Mapping[int, tuple[Any, Argument]], has_weights: bool) -> None:
        self.raw = Raw()
        self.captured = captured
        self.has_weights = has_weights  # among the arguments
        self.constants: dict[int, int] = {}  # the id of a captured array: its value
        self.sources = Sources()
        self.carried: set[int] = set()  # values that a loop needs although nothing reads them
        self.calls = itertools.count()
        self.clusters: dict[tuple[str, ...], itertools.count[int]] = {}

    def new_value(
        self, aval: Any, kind: str = "op", name: str = "", root: int | None = None, literal: Any = None
    ) -> int:
        """The number of a new value."""
        number = len(self.raw.values)
        shape, dtype = tuple(getattr(aval, "shape", ())), dtype_name(aval)
        shown = number if root is None else root
        self.raw.values.append(Value(shape, dtype, nbytes(aval), kind, name, literal, None, shown))
        return number

    def value_of(self, env: dict[Any, int], atom: Any) -> int:
        """The number of the value of a variable or literal."""
        if isinstance(atom, jex.Literal):
            return self.new_value(atom.aval, "literal", literal=atom.val)
        return env[atom]

    def add_argument(self, aval: Any, argument: Argument) -> int:
        """Add an array that has a name."""
        number = self.new_value(aval, argument.kind, argument.name)
        value = self.raw.values[number]
        value.path, value.state, value.group = argument.path, argument.state, argument.group
        return number

    def add_constants(self, env: dict[Any, int], closed: Any) -> None:
        """Add the captured arrays. One that was captured twice is one value."""
        for var, array in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            if id(array) not in self.constants:
                self.constants[id(array)] = self.add_constant(var.aval, array)
            env[var] = self.constants[id(array)]

    def add_constant(self, aval: Any, array: Any) -> int:
        """Add a captured array.

        It is a parameter where no argument is one and it is floating. What no layer reads as its weights becomes a
        constant again, after folding.
        """
        floating = str(getattr(aval, "dtype", "")).startswith(("float", "bfloat", "complex"))
        _, known = self.captured.get(id(array), (None, None))
        name = known.name if known is not None else f"captured{len(self.constants)}"
        module = known is not None and known.kind == "weight"
        weight = not self.has_weights and (module or (floating and size(aval) > 1))
        argument = Argument(name, known.path if known is not None else (), "weight" if weight else "const")
        number = self.add_argument(aval, replace(argument, state=known.state if known is not None else False))
        self.raw.values[number].captured = not module
        return number

    def walk(self, jaxpr: Any, env: dict[Any, int], context: Context) -> None:
        """Write out every equation of a jaxpr."""
        for eqn in jaxpr.eqns:
            inner = context.of(eqn, self.sources)
            name = eqn.primitive.name
            self.raw.count += name != "platform_index"
            if (region := region_of(eqn, inner.stack)) is not None:
                self.add_region(eqn, region, env, inner)
            elif (branch := default_branch(eqn)) is not None:
                self.add_default(eqn, branch, env, inner)
            elif name == "cond":
                self.add_branches(eqn, env, inner)
            elif is_inlined(eqn) and not is_jax_function((body := eqn.params["jaxpr"]).jaxpr):
                self.add_in_place(eqn, body, eqn.invars, env, inner)
            elif name in INLINE and (body := body_of(eqn)) is not None:
                self.add_call(eqn, body, env, inner)
            elif (expanded := expand(eqn)) is not None:
                self.add_region(eqn, Region("", expanded[1]), env, inner.in_library(expanded[0], "", self.new_call()))
            else:
                self.add_leaf(eqn, env, inner)

    def add_leaf(self, eqn: Any, env: dict[Any, int], context: Context) -> None:
        """Add an equation that has no nested jaxpr."""
        ins = tuple(self.value_of(env, atom) for atom in eqn.invars)
        in_avals, out_avals = [a.aval for a in eqn.invars], [v.aval for v in eqn.outvars]
        cost = flops(eqn.primitive.name, eqn.params, in_avals, out_avals) * context.times
        new = self.new_eqn(eqn.primitive.name, ins, eqn.outvars, env, context)
        new.params, new.flops = eqn.params, cost
        new.in_shapes = tuple(tuple(getattr(aval, "shape", ())) for aval in in_avals)
        mark_view(self.raw, new)

    def new_eqn(
        self, prim: str, ins: tuple[int, ...], outvars: Sequence[Any], env: dict[Any, int], context: Context
    ) -> Eqn:
        """Append an equation. It costs nothing yet."""
        raw, number = self.raw, len(self.raw.eqns)
        outs = tuple(self.new_value(var.aval) for var in outvars)
        for var, out in zip(outvars, outs, strict=True):
            env[var] = out
            raw.values[out].producer = number
        new = Eqn(
            id=number,
            prim=prim,
            params={},
            ins=ins,
            outs=outs,
            in_shapes=(),
            out_shape=raw.values[outs[0]].shape if outs else (),
            stack=context.stack,
            position=raw.position(context.stack),
            scope=context.scope,
            backward=context.backward,
            tangent=context.tangent,
            flops=0,
            enclosing=context.enclosing,
            again=context.again,
            levels=context.levels,
        )
        raw.eqns.append(new)
        return new

    def add_call(self, eqn: Any, body: Any, env: dict[Any, int], context: Context) -> None:
        """Write out a jitted function, a custom gradient or a remat."""
        jaxpr = getattr(body, "jaxpr", body)
        name = str(eqn.params.get("name") or "")
        library = is_jax_function(jaxpr) and not maps_devices(jaxpr)
        if library or eqn.primitive.name.startswith("custom_"):
            enclosing = (*context.enclosing, self.raw.position(context.stack))
            context = context._replace(enclosing=enclosing)
        if library and name:
            context = context.in_library(name, defined_in(jaxpr), self.new_call())
        elif not is_jax_function(jaxpr):
            context = self.in_cluster(context, call_label(eqn, name))
        self.add_region(eqn, Region("", body), env, context)

    def new_call(self) -> int:
        """The number of a call of a function of JAX, wherever it is made."""
        return -1 - next(self.calls)

    def add_region(self, eqn: Any, region: Region, env: dict[Any, int], context: Context) -> None:
        """Write out a nested jaxpr. Its results become those of the equation."""
        context = self.in_cluster(context, region.label)
        context = context._replace(times=context.times * region.times)
        args = [self.value_of(env, atom) for atom in eqn.invars]
        read = args
        if region.carried:
            carried = {region.carry_at + number for number in region.carried}
            read = [self.carried_value(value) if at in carried else value for at, value in enumerate(args)]
        operands = read[region.skip :] if region.operands is None else [read[number] for number in region.operands]
        results = self.write_out(region.body, operands, context)
        if region.condition is not None:
            self.add_condition(region.condition, results, context.times)
        self.carried.update(results[number] for number in region.carried)
        ends = ((read[region.carry_at + number], results[number]) for number in region.carried)
        self.raw.carries += [(first, last, context.scope) for first, last in ends]
        for var, value in zip(eqn.outvars, results, strict=True):
            env[var] = self.new_value(var.aval, root=value)

    def add_condition(self, condition: Any, results: Sequence[int], times: int) -> None:
        """Add the cost of the condition of a loop to what the loop computes. It is not drawn."""
        cost, uncounted = body_cost(condition)
        self.raw.uncounted |= uncounted
        made = [at for value in results if (at := self.raw.of(value).producer) is not None]
        if made:
            self.raw.eqns[max(made)].flops += cost * times

    def carried_value(self, value: int) -> int:
        """What a loop reads: a view of an operand in the first pass, later what the pass before computed.

        It is no constant, even if the loop begins with one. A counter is, as it is not drawn.
        """
        first = self.raw.values[value]
        counts = first.shape == () and first.dtype.startswith(("int", "uint"))
        constant = not counts and self.raw.of(value).kind in ("const", "literal")
        number = len(self.raw.values)
        self.raw.values.append(Value(first.shape, first.dtype, first.bytes, "op", root=number if constant else value))
        return number

    def add_default(self, eqn: Any, branch: Any, env: dict[Any, int], context: Context) -> None:
        """Write out the default branch, as if the function had no other. The choice does not count."""
        self.raw.count -= count_fillers(branch.jaxpr)
        self.add_in_place(eqn, branch, eqn.invars[1:], env, context)

    def add_in_place(self, eqn: Any, body: Any, operands: Sequence[Any], env: dict[Any, int], context: Context) -> None:
        """Write out a nested jaxpr as if it were part of this one. Its equation does not count."""
        self.raw.count -= 1
        inner = {var: self.value_of(env, atom) for var, atom in zip(body.jaxpr.invars, operands, strict=True)}
        self.add_constants(inner, body)
        self.walk(body.jaxpr, inner, context)
        for var, atom in zip(eqn.outvars, body.jaxpr.outvars, strict=True):
            env[var] = self.value_of(inner, atom)

    def add_branches(self, eqn: Any, env: dict[Any, int], context: Context) -> None:
        """Write out all branches of a `cond`, and the node that picks one."""
        context = self.in_cluster(context, "cond")
        index, *args = (self.value_of(env, atom) for atom in eqn.invars)
        ins = [index]
        for label, branch in branches_of(eqn):
            ins += self.write_out(branch, args, self.in_cluster(context, label))
        mark_view(self.raw, self.new_eqn("cond", tuple(ins), eqn.outvars, env, context))

    def write_out(self, body: Any, args: Iterable[int], context: Context) -> list[int]:
        """Walk a nested jaxpr. Returns the values of its results."""
        jaxpr = getattr(body, "jaxpr", body)
        inner: dict[Any, int] = {}
        for var, value in zip(jaxpr.invars, args, strict=True):
            inner[var] = self.new_value(var.aval, root=value)
        if hasattr(body, "consts"):
            self.add_constants(inner, body)
        self.walk(jaxpr, inner, context)
        return [self.value_of(inner, atom) for atom in jaxpr.outvars]

    def in_cluster(self, context: Context, label: str) -> Context:
        """The context inside a cluster. A second one of this name gets a number, "scan ×4 (2)"."""
        if not label:
            return context
        counter = self.clusters.setdefault((*context.scope, label), itertools.count(1))
        number = next(counter)
        label = label if number == 1 else f"{label} ({number})"
        levels = (*context.levels, len(context.stack))
        return context._replace(scope=(*context.scope, label), levels=levels)
