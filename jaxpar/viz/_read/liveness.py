"""Which equations a result needs, and which only a gradient reads."""

from __future__ import annotations

from .raw import Eqn, Raw


def drop_dead(raw: Raw, carried: set[int]) -> None:
    """Drop the equations that no result needs.

    What a loop carries is kept, and so are layers of which only the gradient is needed.

    Args:
        raw: changed in place.
        carried: values that a loop hands from one pass to the next.
    """
    live = {raw.root(value) for value in (*raw.outputs, *carried)}
    differentiated = {number for eqn in raw.eqns if eqn.backward for number in raw.above(eqn)}
    differentiated -= {eqn.position for eqn in raw.eqns if eqn.again}
    keep: list[Eqn] = []
    for eqn in reversed(raw.eqns):
        needed = any(out in live for out in eqn.outs) or (eqn.view and raw.root(eqn.outs[0]) in live)
        eqn.dead = not needed
        if needed and (not eqn.view or raw.of(eqn.outs[0]).kind == "const"):
            live.update(raw.root(value) for value in eqn.ins)
        if needed or (not eqn.backward and not eqn.view and eqn.position in differentiated):
            eqn.flops = 0 if eqn.dead else eqn.flops
            keep.append(eqn)
    _renumber(raw, list(reversed(keep)))


def _renumber(raw: Raw, eqns: list[Eqn]) -> None:
    """Make these the equations, numbered from 0."""
    order = {eqn.id: number for number, eqn in enumerate(eqns)}
    for value in raw.values:
        value.producer = order.get(value.producer) if value.producer is not None else None
    raw.eqns = eqns
    for number, eqn in enumerate(eqns):
        eqn.id = number


def mark_residuals(raw: Raw) -> None:
    """Mark what differentiation computes next to an equation, only for its gradient."""
    followers = _followers(raw)
    readers: dict[int, list[Eqn]] = {}
    results = {raw.root(value) for value in raw.outputs}
    for eqn in raw.eqns:
        for value in () if eqn.view else eqn.ins:
            readers.setdefault(raw.root(value), []).append(eqn)
    for eqn in reversed(raw.eqns):
        if eqn.id in followers and results.isdisjoint(eqn.outs):
            read = (reader for out in eqn.outs for reader in readers.get(out, ()))
            eqn.residual = all(reader.backward or reader.residual for reader in read)


def _followers(raw: Raw) -> set[int]:
    """Differentiated equations that directly follow another one of the same place."""
    found: set[int] = set()
    first: Eqn | None = None
    for eqn in raw.eqns:
        if eqn.view or eqn.backward:
            continue
        places = {first.position, *first.enclosing}.difference(eqn.enclosing) if first is not None else set[int]()
        again = first is not None and eqn.prim == first.prim and eqn.out_shape == first.out_shape
        again = again and eqn.prim not in ("integer_pow", "pow")  # a power's derivative is one
        if eqn.tangent and not eqn.dead and not again and not places.isdisjoint(raw.above(eqn)):
            found.add(eqn.id)
        else:
            first = eqn
    return found
