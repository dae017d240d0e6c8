"""Rules for the gates of recurrent cells."""

from __future__ import annotations

from .._fold.cells import Cell, Cells
from .._fold.patterns import Fold
from .._read.raw import Eqn
from .terms import is_convex, is_fixed, is_weight, maker, owners, readers, root

_FEEDERS = frozenset("add split slice squeeze".split())
_LAYERS = frozenset(("Activation",))


def lstm(cells: Cells, cell: Cell) -> Fold | None:
    """`o * tanh(f * c + i * g)`, where all but the state c are sigmoids and tanhs."""
    for end in cells.eqns(cell):
        inner = _tanh_of_state(cells, end) if end.prim == "mul" else None
        if inner is not None:
            return _gates(cells, [end, *inner], "LSTM")
    return None


def _operands(cells: Cells, eqn: Eqn) -> dict[str, Eqn]:
    """What makes the operands, by primitive."""
    return {made.prim: made for value in eqn.ins if (made := maker(cells, value)) is not None}


def _tanh_of_state(cells: Cells, end: Eqn) -> list[Eqn] | None:
    made = _operands(cells, end)
    if set(made) != {"logistic", "tanh"}:
        return None
    state = maker(cells, made["tanh"].ins[0])
    if state is None or state.prim != "add":
        return None
    products = [maker(cells, value) for value in state.ins]
    found = [*made.values(), state]
    kinds: list[set[str]] = []
    for product in products:
        if product is None or product.prim != "mul":
            return None
        gates = _operands(cells, product)
        kinds.append(gates.keys() & {"logistic", "tanh"})
        found += [product, *(gates[name] for name in kinds[-1])]
    return found if sorted(map(len, kinds)) == [1, 2] and all("logistic" in kind for kind in kinds) else None


def gru(cells: Cells, cell: Cell) -> Fold | None:
    """`(1 - z) * n + z * h` with `n = tanh(a + r * b)`, where z and r are sigmoids."""
    for end in cells.eqns(cell):
        if end.prim != "add":
            continue
        outer: dict[int, Eqn] = {}
        gates = _leaves(cells, end, outer)
        new = [eqn for eqn in gates if eqn.prim == "tanh"]
        if len(new) != 1 or len(gates) != 2 or not any(eqn.prim == "mul" for eqn in outer.values()):
            continue
        inner: dict[int, Eqn] = {}
        first = maker(cells, new[0].ins[0])
        reset = _leaves(cells, first, inner) if first is not None and first.prim == "add" else []
        if len(reset) == 1 and reset[0].prim == "logistic":
            return _gates(cells, [*outer.values(), *gates, *inner.values(), *reset], "GRU")
    return None


def _leaves(cells: Cells, end: Eqn, steps: dict[int, Eqn]) -> list[Eqn]:
    """The sigmoids and tanhs that sums and products are made of. `steps` gets the sums and products."""
    found: dict[int, Eqn] = {}
    todo = [end]
    while todo and len(steps) < 8:
        eqn = todo.pop()
        if eqn.prim in ("logistic", "tanh"):
            found[eqn.id] = eqn
        elif eqn is end or (eqn.prim in ("add", "sub", "mul") and _reaches(cells, eqn, 3)):
            steps[eqn.id] = eqn
            todo += [made for value in eqn.ins if (made := maker(cells, value)) is not None]
    return list(found.values())


def _reaches(cells: Cells, eqn: Eqn, steps: int) -> bool:
    """Whether a sigmoid or tanh is a few steps above."""
    makers = [made for value in eqn.ins if (made := maker(cells, value)) is not None]
    if any(made.prim in ("logistic", "tanh") for made in makers):
        return True
    return steps > 0 and any(made.prim in ("add", "sub", "mul") and _reaches(cells, made, steps - 1) for made in makers)


def _gates(cells: Cells, eqns: list[Eqn], op: str) -> Fold | None:
    found = {eqn.id: eqn for eqn in eqns}
    todo = list(found.values())
    while todo:
        for value in todo.pop().ins:
            made = maker(cells, value)
            if made is None or made.id in found or made.prim not in _FEEDERS or not _is_inside(cells, made, found):
                continue
            if made.prim == "add" and any(is_weight(cells, v) is not None and not is_fixed(cells, v) for v in made.ins):
                continue  # a bias
            if (owner := cells.owner[made.id]) is not None and owner.major and owner.op not in _LAYERS:
                continue  # a bias of several parameters
            found[made.id] = made
            todo.append(made)
    parts = owners(cells, found.values(), _LAYERS)
    if parts is None:
        parts = owners(cells, eqns, _LAYERS)
    return Fold(parts, op, "gates") if parts is not None and is_convex(cells, list(found.values())) else None


def _is_inside(cells: Cells, eqn: Eqn, found: dict[int, Eqn]) -> bool:
    """Whether only these equations read what an equation makes."""
    return all(
        not cells.is_returned(out) and all(reader.id in found for reader in readers(cells, root(cells, out)))
        for out in eqn.outs
    )
