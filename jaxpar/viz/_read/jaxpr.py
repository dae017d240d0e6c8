"""From a closed jaxpr to one flat list of equations: loops, branches, calls and device maps are written out.

Begin with `read`, then `_Reader.walk`. A nested jaxpr is written out where it is called; its variables become the
values of the caller. What a reader should see of the nesting stays in the scope of each equation.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

from .._scopes import Path, Scope
from .arguments import Argument
from .costs import Jaxpr, body_cost, dtype_name, flops, nbytes, size
from .raw import Eqn, Raw, Value, drop_dead, mark_residuals, mark_view
from .source import Frame, Sources, function_of, is_jax_function, name_stack, short_path

INLINE = frozenset(
    "jit pjit closed_call core_call core_closed_call eval_jaxpr custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "remat remat2 checkpoint custom_lin run_state composite custom_vmap_call".split()
)


_Shapes = tuple[tuple[int, ...], ...]


class Context(NamedTuple):
    """Where an equation is, as far as its own jaxpr and those around it say."""

    stack: tuple[Frame, ...] = ()
    scope: Path = ()
    levels: tuple[int, ...] = ()
    backward: bool = False
    tangent: bool = False
    times: int = 1
    enclosing: tuple[int, ...] = ()
    again: bool = False

    def of(self, eqn: jex.JaxprEqn, sources: Sources) -> Context:
        """The context of an equation in a jaxpr of this context."""
        info = getattr(eqn, "source_info", None)
        names, backward, tangent, again = name_stack(info)
        return Context(
            self.stack + sources.stack(info),
            self.scope + tuple(map(Scope, names)),
            self.levels + (-1,) * len(names),
            (self.backward or backward) and not again,
            self.tangent or tangent,
            self.times,
            self.enclosing,
            self.again or again,
        )

    def in_library(self, name: str, file: str, number: int) -> Context:
        """The context inside a function of JAX. Its number is negative and its own, as it is a call of its own."""
        return self._replace(stack=(*self.stack, Frame("jax", "jax", name, file, 0, number, number)))


def expand(eqn: jex.JaxprEqn) -> tuple[str, Any] | None:
    """The name of such a primitive, and the jaxpr that it stands for. None of other equations."""
    if eqn.primitive.name != "call_hi_primitive":
        return None
    meant = eqn.params["_prim"]
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    if not all(hasattr(aval, "shape") for aval in avals):
        return None  # of types that are no arrays
    arrays = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    def call(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(meant.expand(*jax.tree.unflatten(meant.in_tree, arrays)))

    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(meant).__name__).lower()  # custom_root for CustomRoot
    return name, jax.make_jaxpr(call)(*arrays)


def read(
    closed: Jaxpr,
    arguments: Sequence[Argument],
    output_names: Sequence[str],
    captured: Mapping[int, tuple[Any, Argument]] | None = None,
) -> Raw:
    """The flat form of a closed jaxpr, without what no result needs. `captured` are arrays by id."""
    reader = _Reader(captured or {}, any(argument.kind == "weight" for argument in arguments))
    env: dict[Any, int] = {}
    for var, argument in zip(closed.jaxpr.invars, arguments, strict=True):
        env[var] = reader.add_argument(var.aval, argument)
    reader.add_constants(env, closed)
    reader.walk(closed.jaxpr, env, Context())
    reader.raw.outputs = [reader.value_of(env, atom) for atom in closed.jaxpr.outvars]
    reader.raw.output_names = list(output_names)
    drop_dead(reader.raw)
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
        self.calls = itertools.count()
        self.clusters = Counter[Path]()

    def new_value(
        self, aval: object, kind: str = "op", name: str = "", shows: int | None = None, literal: object = None
    ) -> int:
        """The number of a new value."""
        number = len(self.raw.values)
        shape, dtype = tuple(getattr(aval, "shape", ())), dtype_name(aval)
        self.raw.values.append(Value(shape, dtype, nbytes(aval), kind, number, name, literal))
        if shows is not None:
            self.raw.show(number, shows)
        return number

    def value_of(self, env: dict[Any, int], atom: object) -> int:
        """The number of the value of a variable or literal."""
        if isinstance(atom, jex.Literal):
            number = self.new_value(atom.aval, "literal", literal=atom.val)
            if np.ndim(atom.val) == 0 and not self.raw.values[number].dtype.startswith(("key", "token")):
                self.raw.values[number].number = np.asarray(atom.val)
            return number
        return env[atom]

    def add_argument(self, aval: object, argument: Argument) -> int:
        """Add an array that has a name."""
        number = self.new_value(aval, argument.kind, argument.name)
        value = self.raw.values[number]
        value.path, value.state, value.group = argument.path, argument.state, argument.group
        value.padding = argument.padding
        return number

    def add_constants(self, env: dict[Any, int], closed: Jaxpr) -> None:
        """Add the captured arrays. One that was captured twice is one value."""
        for var, array in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            if id(array) not in self.constants:
                self.constants[id(array)] = self.add_constant(var.aval, array)
            env[var] = self.constants[id(array)]

    def add_constant(self, aval: object, array: object) -> int:
        """Add a captured array, as a parameter where no argument is one, until no layer reads it as its weights."""
        floating = str(getattr(aval, "dtype", "")).startswith(("float", "bfloat", "complex"))
        _, argument = self.captured.get(id(array), (None, Argument(f"captured{len(self.constants)}")))
        weight = not self.has_weights and (argument.kind == "weight" or (floating and size(aval) > 1))
        number = self.add_argument(aval, replace(argument, kind="weight" if weight else "const"))
        self.raw.values[number].captured = argument.kind != "weight"
        return number

    def walk(self, jaxpr: jex.Jaxpr, env: dict[Any, int], context: Context) -> None:
        """Write out every equation of a jaxpr."""
        for eqn in jaxpr.eqns:
            inner = context.of(eqn, self.sources)
            name = eqn.primitive.name
            self.raw.count += name != "platform_index"
            if name in _REGIONS:
                self.add_region(eqn, _REGIONS[name](eqn), env, inner)
            elif (branch := default_branch(eqn)) is not None:
                # As if the function had no other branch. The choice does not count.
                self.raw.count -= 1 + count_fillers(branch.jaxpr)
                self.add_region(eqn, Region(None, branch, operands=range(1, len(eqn.invars))), env, inner)
            elif name == "cond":
                self.add_branches(eqn, env, inner)
            elif is_inlined(eqn) and not is_jax_function((body := eqn.params["jaxpr"]).jaxpr):
                self.raw.count -= 1
                self.add_region(eqn, Region(None, body), env, inner)
            elif name in INLINE and (body := body_of(eqn)) is not None:
                self.add_call(eqn, body, env, inner)
            elif (expanded := expand(eqn)) is not None:
                self.add_region(eqn, Region(None, expanded[1]), env, inner.in_library(expanded[0], "", self.new_call()))
            else:
                self.add_leaf(eqn, env, inner)

    def add_leaf(self, eqn: jex.JaxprEqn, env: dict[Any, int], context: Context) -> None:
        """Add an equation that has no nested jaxpr."""
        ins = tuple(self.value_of(env, atom) for atom in eqn.invars)
        in_avals, out_avals = [a.aval for a in eqn.invars], [v.aval for v in eqn.outvars]
        shapes = tuple(tuple(getattr(aval, "shape", ())) for aval in in_avals)
        cost = flops(eqn.primitive.name, eqn.params, in_avals, out_avals) * context.times
        self.add_eqn(eqn, ins, shapes, cost, env, context)

    def add_eqn(
        self, eqn: jex.JaxprEqn, ins: Sequence[int], shapes: _Shapes, cost: int, env: dict[Any, int], context: Context
    ) -> None:
        """Append an equation."""
        raw, number = self.raw, len(self.raw.eqns)
        outs = tuple(self.new_value(var.aval) for var in eqn.outvars)
        for var, out in zip(eqn.outvars, outs, strict=True):
            env[var] = out
            raw.values[out].producer = number
        new = Eqn(
            id=number,
            prim=eqn.primitive.name,
            params=eqn.params,
            ins=tuple(ins),
            outs=outs,
            in_shapes=shapes,
            out_shape=raw.values[outs[0]].shape if outs else (),
            position=raw.position(context.stack),
            flops=cost,
            stack=context.stack,
            scope=context.scope,
            levels=context.levels,
            backward=context.backward,
            tangent=context.tangent,
            enclosing=context.enclosing,
            again=context.again,
        )
        raw.eqns.append(new)
        mark_view(raw, new)

    def add_call(self, eqn: jex.JaxprEqn, body: Jaxpr, env: dict[Any, int], context: Context) -> None:
        """Write out a jitted function, a custom gradient or a remat."""
        jaxpr = getattr(body, "jaxpr", body)
        name = str(eqn.params.get("name") or "")
        library = is_jax_function(jaxpr) and not maps_devices(jaxpr)
        if library or eqn.primitive.name.startswith("custom_"):
            enclosing = (*context.enclosing, self.raw.position(context.stack))
            context = context._replace(enclosing=enclosing)
        if library and name:
            file = short_path(function_of(jaxpr).partition(" at ")[2].rpartition(":")[0])
            context = context.in_library(name, file, self.new_call())
        elif not is_jax_function(jaxpr):
            context = self.in_cluster(context, scope_of_call(eqn, name, jaxpr))
        self.add_region(eqn, Region(None, body), env, context)

    def new_call(self) -> int:
        """The number of a call of a function of JAX, wherever it is made."""
        return -1 - next(self.calls)

    def add_region(self, eqn: jex.JaxprEqn, region: Region, env: dict[Any, int], context: Context) -> None:
        """Write out a nested jaxpr. Its results become those of the equation."""
        # What a loop carries gets a new value inside, since a pass reads what the pass before made. All else inside
        # shows the values outside, and the results outside show those inside.
        context = self.in_cluster(context, region.scope)
        context = context._replace(times=context.times * region.times)
        args = [self.value_of(env, atom) for atom in eqn.invars]
        operands = args if region.operands is None else [args[number] for number in region.operands]
        counters = counters_of(region)
        carried = [number for number in range(region.carried) if number not in counters]
        for number in range(region.carried):
            at = region.carry_at + number
            operands[at] = self.counter(operands[at]) if number in counters else self.carried_value(operands[at])
        if region.loop or region.maps:
            parts_at = region.carry_at + region.carried
            operands[parts_at:] = map(self.unknown_number, operands[parts_at:])
        results = self.write_out(region.body, operands, context)
        tested: tuple[int, ...] = ()
        if region.condition is not None:
            self.add_condition(region.condition, results, context.times)
            tested = tuple(itertools.compress(results, read_by(region.condition)[-len(results) :]))
        ends = ((operands[region.carry_at + number], results[number]) for number in carried)
        self.raw.carries += [(first, last, context.scope) for first, last in ends]
        for var, value in zip(eqn.outvars, results, strict=True):
            shown = self.unknown_number(value) if region.loop or region.maps else value
            env[var] = self.new_value(var.aval, shows=shown)
            self.raw.values[env[var]].crosses = int(self.changes_shape(env[var]))
            self.raw.values[env[var]].of_a_pass = region.loop
            self.raw.tested[env[var]] = tested

    def add_condition(self, condition: Jaxpr, results: Sequence[int], times: int) -> None:
        """Add the cost of the condition of a loop to what the loop computes. It is not drawn."""
        cost, uncounted = body_cost(condition)
        self.raw.uncounted |= uncounted
        values = (self.raw.of(value) for value in results)
        made = [value.producer for value in values if value.kind == "op" and value.producer is not None]
        if made:
            self.raw.eqns[max(made)].flops += cost * times

    def like(self, value: int, kind: str, **more: Any) -> int:
        """The number of a new value with the shape of another one."""
        first, number = self.raw.values[value], len(self.raw.values)
        self.raw.values.append(Value(first.shape, first.dtype, first.bytes, kind, number, **more))
        return number

    def carried_value(self, value: int) -> int:
        """What a pass of a loop reads. It is no constant, even if the loop begins with one."""
        number = self.like(value, "op", of_a_pass=True)
        if self.raw.of(value).kind in ("const", "literal"):
            self.raw.first_pass[number] = value
        else:
            self.raw.show(number, value)
        return number

    def counter(self, value: int) -> int:
        """The number of a pass. It is a constant that is not drawn, but not the one that the loop begins with."""
        if self.raw.of(value).kind in ("const", "literal"):
            return self.like(value, "const", of_a_pass=True)
        number = self.like(value, "op", of_a_pass=True)
        self.raw.show(number, value)
        return number

    def unknown_number(self, value: int) -> int:
        """What goes into or out of a loop pass by pass, or of a map over devices.

        XLA does not know its number, even if it is one everywhere.
        """
        known = self.raw.of(value)
        if known.kind not in ("const", "literal") or known.number is None:
            return value
        number = self.like(value, known.kind, literal=known.literal)
        self.raw.first_pass[number] = value
        return number

    def add_branches(self, eqn: jex.JaxprEqn, env: dict[Any, int], context: Context) -> None:
        """Write out all branches of a `cond`, and the node that picks one."""
        context = self.in_cluster(context, scope_of_choice(eqn))
        index, *args = (self.value_of(env, atom) for atom in eqn.invars)
        ins = [index]
        branches = eqn.params["branches"]
        platforms = eqn.params.get("branches_platforms") or [(str(number),) for number in range(len(branches))]
        for names, branch in zip(platforms, branches, strict=True):
            scope = Scope("branch " + ", ".join(names), "region")
            ins += self.write_out(branch, args, self.in_cluster(context, scope))
        self.add_eqn(eqn, ins, (), 0, env, context)

    def write_out(self, body: Jaxpr, args: Iterable[int], context: Context) -> list[int]:
        """Walk a nested jaxpr. Returns the values of its results."""
        jaxpr = getattr(body, "jaxpr", body)
        inner: dict[Any, int] = {}
        for var, value in zip(jaxpr.invars, args, strict=True):
            inner[var] = self.new_value(var.aval, shows=value)
            self.raw.values[inner[var]].crosses = -int(self.changes_shape(inner[var]))
        if hasattr(body, "consts"):
            self.add_constants(inner, body)
        self.walk(jaxpr, inner, context)
        return [self.value_of(inner, atom) for atom in jaxpr.outvars]

    def changes_shape(self, value: int) -> bool:
        """Whether a value has another shape than what it shows."""
        shows = self.raw.values[value].shows
        return shows is not None and self.raw.values[value].shape != self.raw.values[shows].shape

    def in_cluster(self, context: Context, scope: Scope | None) -> Context:
        """The context inside a cluster. A second one of this name gets a number, "scan ×4 (2)"."""
        if scope is None:
            return context
        path = (*context.scope, scope)
        self.clusters[path] += 1
        levels = (*context.levels, len(context.stack))
        return context._replace(scope=(*context.scope, scope.numbered(self.clusters[path])), levels=levels)


@dataclass(frozen=True, slots=True)
class Region:
    """A nested jaxpr, written out in the place of its equation."""

    scope: Scope | None  # of its cluster. None for no cluster.
    body: Jaxpr
    times: int = 1  # how often it runs, as far as that is known
    loop: bool = False
    maps: bool = False  # whether it maps over devices
    carried: int = 0  # how many of the results the next pass reads. They come first.
    operands: Sequence[int] | None = None  # the positions of those that the body has. None for all.
    carry_at: int = 0  # which operand of the body is the first of these
    condition: Any = None  # the jaxpr that says whether there is another pass


def _scan(eqn: jex.JaxprEqn) -> Region:
    length = eqn.params["length"]
    if "num_carry" in eqn.params:
        first, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    else:  # jax 0.12 has them as a tree
        first, carried = map(len, eqn.params["ft_in"].unpack()[:2])
    scope, body = Scope("scan", "region", length), eqn.params["jaxpr"]
    return Region(scope, body, times=length, loop=True, carried=carried, carry_at=first)


def _while(eqn: jex.JaxprEqn) -> Region:
    """One pass and one condition, as XLA counts it. The condition is not drawn."""
    body, condition = eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
    operands = range(eqn.params["cond_nconsts"], len(eqn.invars))
    carried, carry_at = len(body.jaxpr.outvars), eqn.params["body_nconsts"]
    scope = Scope("while", "region")
    return Region(scope, body, loop=True, carried=carried, operands=operands, carry_at=carry_at, condition=condition)


def read_by(body: Jaxpr) -> list[bool]:
    """Which of its arguments a nested jaxpr reads."""
    jaxpr = getattr(body, "jaxpr", body)
    read = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars} | set(map(id, jaxpr.outvars))
    return [id(var) in read for var in jaxpr.invars]


def counters_of(region: Region) -> set[int]:
    """Which carried values only count passes: whole numbers that come from themselves and literals alone."""
    jaxpr = getattr(region.body, "jaxpr", region.body)
    inputs = jaxpr.invars[region.carry_at : region.carry_at + region.carried]
    whole = [
        n for n, var in enumerate(inputs) if var.aval.shape == () and dtype_name(var.aval).startswith(("int", "u"))
    ]
    counters, count_before = set(whole), -1
    while len(counters) != count_before:
        # Ids, since literals cannot be hashed.
        counting = {id(inputs[number]) for number in counters}
        for eqn in jaxpr.eqns if counters else ():
            if eqn.invars and all(isinstance(atom, jex.Literal) or id(atom) in counting for atom in eqn.invars):
                counting.update(map(id, eqn.outvars))
        count_before, ends = len(counters), jaxpr.outvars
        counters = {n for n in counters if isinstance(ends[n], jex.Literal) or id(ends[n]) in counting}
    return counters


def _shard_map(eqn: jex.JaxprEqn) -> Region:
    axes = dict(getattr(eqn.params.get("mesh"), "shape", {}) or {})
    # `jax.pmap` maps a function of its own. Nothing else in the jaxpr tells.
    name = "pmap" if "/jax/_src/pmap.py" in function_of(eqn.params["jaxpr"]).replace("\\", "/") else "shard_map"
    label = f"{name} " + ", ".join(f"{axis}={size}" for axis, size in axes.items())
    return Region(Scope(label.strip(), "region"), eqn.params["jaxpr"], maps=True)


def _linear_solve(eqn: jex.JaxprEqn) -> Region:
    """The solver. The products with the matrix are only for its gradient."""
    lengths, count = eqn.params["const_lengths"], len(eqn.invars)
    start = lengths.matvec + lengths.vecmat
    right = range(start + lengths.solve + lengths.transpose_solve, count)
    return Region(None, eqn.params["jaxprs"].solve, operands=[*range(start, start + lengths.solve), *right])


_REGIONS = {
    "custom_linear_solve": _linear_solve,
    "scan": _scan,
    "while": _while,
    "shard_map": _shard_map,
}


def is_inlined(eqn: jex.JaxprEqn) -> bool:
    """Whether this calls a function jitted with `inline=True`. Jax 0.12 keeps such calls in the jaxpr."""
    inline = eqn.params.get("inline")
    return getattr(inline, "name", inline) in (True, "JAX_EARLY", "JAX_LATE")


def default_branch(eqn: jex.JaxprEqn) -> Jaxpr:
    """The jaxpr of the default of a `jax.lax.platform_dependent`, or None."""
    platforms = eqn.params.get("branches_platforms") or () if eqn.primitive.name == "cond" else ()
    return eqn.params["branches"][platforms.index(None)] if None in platforms else None


def count_fillers(jaxpr: jex.Jaxpr) -> int:
    """How many equations only fill in residuals of another branch."""
    fillers: set[int] = set()  # the ids of variables, since literals cannot be hashed
    for eqn in jaxpr.eqns:
        empty = eqn.primitive.name.startswith("empty") and not eqn.invars
        if empty or (eqn.invars and all(id(atom) in fillers for atom in eqn.invars)):
            fillers.update(map(id, eqn.outvars))
    return len(fillers)


def body_of(eqn: jex.JaxprEqn) -> Jaxpr:
    """The nested jaxpr whose arguments are those of the equation, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        body = eqn.params.get(name)
        inner = getattr(body, "jaxpr", body)
        if inner is not None and len(getattr(inner, "invars", ())) == len(eqn.invars):
            return body
    return None


def maps_devices(jaxpr: jex.Jaxpr) -> bool:
    """Whether a map over devices is directly inside, or inside a call."""
    for eqn in jaxpr.eqns:
        body = body_of(eqn) if eqn.primitive.name in INLINE else None
        if eqn.primitive.name == "shard_map":
            return True
        if body is not None and maps_devices(getattr(body, "jaxpr", body)):
            return True
    return False


_MOST_NAMES = 3  # of the functions that a choice is between


def scope_of_choice(eqn: jex.JaxprEqn) -> Scope:
    """The scope of a `cond`: "cond: average" where one branch is that function, and the others compute nothing.

    Several names are in the order of `lax.cond`, whose last branch is that for True. Where a branch has none, none is
    said: it would hide what that branch computes.
    """
    branches: Sequence[Jaxpr] = eqn.params["branches"] if not eqn.params.get("branches_platforms") else ()
    bodies = [getattr(branch, "jaxpr", branch) for branch in reversed(branches)]
    compute = [body for body in bodies if count_fillers(body) < len(body.eqns)]
    names = list(dict.fromkeys(function_of(body).partition(" at ")[0] for body in compute))
    are_names = 0 < len(names) <= _MOST_NAMES and all(name.isidentifier() for name in names)
    return Scope(f"cond: {' or '.join(names)}" if are_names else "cond", "region")


def scope_of_call(eqn: jex.JaxprEqn, name: str, body: jex.Jaxpr) -> Scope | None:
    """The scope of a call of a function of this name. None for one without a name."""
    prim = eqn.primitive.name
    if prim in ("remat", "remat2", "checkpoint"):
        return Scope("remat", "region")
    if prim.startswith("custom_") and not name:
        name = function_of(body).partition(" at ")[0].rpartition(".")[2]
        if not name.isidentifier():
            return Scope(prim.removesuffix("_call").removesuffix("_jaxpr").replace("_call", ""), "region")
    name = name.strip("_") or name
    return Scope(name) if name not in ("", "<lambda>") else None
