"""Loops, branches, calls and device maps: their nested jaxprs and their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._scopes import Scope
from .source import Frame, function_of

INLINE = frozenset(
    "jit pjit closed_call core_call core_closed_call eval_jaxpr custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "remat remat2 checkpoint custom_lin run_state composite custom_vmap_call".split()
)


@dataclass(frozen=True, slots=True)
class Region:
    """A nested jaxpr, written out in the place of its equation.

    Attributes:
        scope: of its cluster. None for no cluster.
        body: the jaxpr, open or closed.
        skip: how many operands of the equation come before those of the body.
        times: how often it runs, as far as that is known.
        carried: the results that the next pass reads, by position.
        operands: the positions of those that the body has. None for all after `skip`.
        carry_at: the operand that is the first of these in the first pass.
        condition: the jaxpr that says whether there is another pass.
    """

    scope: Scope | None
    body: Any
    skip: int = 0
    times: int = 1
    carried: Sequence[int] = ()
    operands: Sequence[int] | None = None
    carry_at: int = 0
    condition: Any = None


def region_of(eqn: Any, stack: tuple[Frame, ...]) -> Region | None:
    """The region that an equation is, or None. A `cond` has several branches and is none."""
    describe = _REGIONS.get(eqn.primitive.name, lambda eqn, stack: None)
    return describe(eqn, stack)


def _scan(eqn: Any, stack: tuple[Frame, ...]) -> Region:
    length = eqn.params["length"]
    first, carried = _scan_sizes(eqn.params)
    return Region(
        Scope("scan", "region", length), eqn.params["jaxpr"], times=length, carried=range(carried), carry_at=first
    )


def _scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many it carries. Jax 0.12 has them as a tree."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)


def _while(eqn: Any, stack: tuple[Frame, ...]) -> Region:
    """One pass and one condition, as XLA counts it. The condition is not drawn, nor are counters."""
    body = eqn.params["body_jaxpr"]
    carried = [n for n, var in enumerate(body.jaxpr.outvars) if getattr(var.aval, "shape", ()) != ()]
    skip = eqn.params["cond_nconsts"]
    carry_at = skip + eqn.params["body_nconsts"]
    condition = eqn.params["cond_jaxpr"]
    return Region(Scope("while", "region"), body, skip=skip, carried=carried, carry_at=carry_at, condition=condition)


def _shard_map(eqn: Any, stack: tuple[Frame, ...]) -> Region:
    axes = dict(getattr(eqn.params.get("mesh"), "shape", {}) or {})
    by_pmap = any(f.file.endswith("/pmap.py") or f.name == "pmap" for f in stack)
    by_pmap = by_pmap or "pmap.py" in function_of(eqn.params["jaxpr"])
    label = ("pmap " if by_pmap else "shard_map ") + ", ".join(f"{name}={size}" for name, size in axes.items())
    return Region(Scope(label.strip(), "region"), eqn.params["jaxpr"])


def _linear_solve(eqn: Any, stack: tuple[Frame, ...]) -> Region:
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


def is_inlined(eqn: Any) -> bool:
    """Whether this calls a function jitted with `inline=True`. Jax 0.12 keeps such calls in the jaxpr."""
    inline = eqn.params.get("inline")
    return getattr(inline, "name", inline) in (True, "JAX_EARLY", "JAX_LATE")


def default_branch(eqn: Any) -> Any:
    """The jaxpr of the default of a `jax.lax.platform_dependent`, or None."""
    platforms = eqn.params.get("branches_platforms") or () if eqn.primitive.name == "cond" else ()
    return eqn.params["branches"][platforms.index(None)] if None in platforms else None


def count_fillers(jaxpr: Any) -> int:
    """How many equations only fill in residuals of another branch."""
    fillers: set[int] = set()  # the ids of variables, since literals cannot be hashed
    for eqn in jaxpr.eqns:
        empty = eqn.primitive.name.startswith("empty") and not eqn.invars
        if empty or (eqn.invars and all(id(atom) in fillers for atom in eqn.invars)):
            fillers.update(map(id, eqn.outvars))
    return len(fillers)


def branches_of(eqn: Any) -> list[tuple[Scope, Any]]:
    """The scope and the jaxpr of each branch of a `cond`."""
    branches = eqn.params["branches"]
    platforms = eqn.params.get("branches_platforms") or [(str(number),) for number in range(len(branches))]
    return [
        (Scope("branch " + ", ".join(names), "region"), body) for names, body in zip(platforms, branches, strict=True)
    ]


def body_of(eqn: Any) -> Any:
    """The nested jaxpr whose arguments are those of the equation, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        body = eqn.params.get(name)
        inner = getattr(body, "jaxpr", body)
        if inner is not None and len(getattr(inner, "invars", ())) == len(eqn.invars):
            return body
    return None


def maps_devices(jaxpr: Any) -> bool:
    """Whether a map over devices is directly inside, or inside a call."""
    for eqn in jaxpr.eqns:
        body = body_of(eqn) if eqn.primitive.name in INLINE else None
        if eqn.primitive.name == "shard_map":
            return True
        if body is not None and maps_devices(getattr(body, "jaxpr", body)):
            return True
    return False


def scope_of_call(eqn: Any, name: str) -> Scope | None:
    """The scope of a call of a function of this name. None for one without a name."""
    prim = eqn.primitive.name
    if prim in ("remat", "remat2", "checkpoint"):
        return Scope("remat", "region")
    if prim.startswith("custom_") and not name:
        return Scope(prim.removesuffix("_call").removesuffix("_jaxpr").replace("_call", ""), "region")
    return Scope(name) if name not in ("", "<lambda>") else None
