"""How arrays are split over a mesh: arguments as compiled, edges as far as the program shows them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .._program.hlo import Program
from .graph import StepArgument
from .places import Places, primitive_of


def mesh_of(compiled: Any, args: Any) -> dict[str, int]:
    """The name and the size of each axis of the mesh that a step runs on. Empty for one device."""
    placed = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    for sharding in (*jax.tree.leaves(compiled.input_shardings), *placed):
        if isinstance(sharding, NamedSharding):
            return {str(name): int(size) for name, size in sharding.mesh.shape.items()}
    return {}


def device_count(compiled: Any) -> int:
    """How many devices a compiled program runs on."""
    found = [len(sharding.device_set) for sharding in jax.tree.leaves(compiled.input_shardings)]
    return max(found, default=1)


def arguments_of(program: Program, compiled: Any, names: list[str], args: Any) -> tuple[StepArgument, ...]:
    """The arguments of a step, split as the compiled program takes them.

    A step may hand other arguments to its program. Those that have no name in it are split as they are placed.
    """
    leaves = jax.tree.leaves(args)
    taken = jax.tree.leaves(compiled.input_shardings[0])
    direct = len(taken) == len(leaves)
    shardings = taken if direct else [getattr(leaf, "sharding", None) for leaf in leaves]
    inside = {} if direct else _parameters(program)
    return tuple(_argument(*one, inside) for one in zip(names, leaves, shardings, strict=True))


def _parameters(program: Program) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of a program on one device, by its name."""
    instructions = program.computations[program.entry].instructions.values()
    found = (one for one in instructions if one.opcode == "parameter" and one.op_name and one.arrays)
    return {one.op_name.replace("\\'", "'"): one.arrays[0].shape for one in found}


def _argument(name: str, leaf: Any, sharding: Any, inside: Mapping[str, tuple[int, ...]]) -> StepArgument:
    shape, dtype = tuple(np.shape(leaf)), str(getattr(leaf, "dtype", type(leaf).__name__))
    if name in inside:
        return StepArgument(name, shape, dtype, inside[name], None)
    if not isinstance(sharding, NamedSharding):
        return StepArgument(name, shape, dtype, shape, None)
    return StepArgument(name, shape, dtype, tuple(sharding.shard_shape(shape)), spec_of(sharding, len(shape)))


def spec_of(sharding: Any, dimensions: int) -> tuple[str, ...] | None:
    """The axes that each dimension is split over, "" for none. None without a mesh."""
    if not isinstance(sharding, NamedSharding):
        return None
    parts = [*sharding.spec, *(None for _ in range(dimensions - len(sharding.spec)))]
    return tuple("+".join(map(str, part)) if isinstance(part, tuple) else str(part or "") for part in parts)[
        :dimensions
    ]


def spec_from_shapes(shape: tuple[int, ...], local: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes that each dimension is split over, from the shape of one device's part.

    Each axis splits one dimension. None where the sizes fit no or several ways.

    >>> spec_from_shapes((64, 256), (32, 64), {"data": 2, "model": 4})
    ('data', 'model')
    """
    if len(shape) != len(local) or any(length % part for length, part in zip(shape, local, strict=True) if part):
        return None
    factors = [length // part if part else 1 for length, part in zip(shape, local, strict=True)]
    names = [name for name, size in mesh.items() if size > 1]
    every = itertools.product(range(-1, len(shape)), repeat=len(names))
    ways = [way for way in every if _fits(way, names, factors, mesh)]
    if len(ways) != 1:
        return None
    return tuple("+".join(n for n, at in zip(names, ways[0], strict=True) if at == axis) for axis in range(len(shape)))


def _fits(way: tuple[int, ...], names: list[str], factors: list[int], mesh: Mapping[str, int]) -> bool:
    made = [1] * len(factors)
    for name, at in zip(names, way, strict=True):
        if at >= 0:
            made[at] *= mesh[name]
    return made == factors


def local_shapes(
    program: Program, places: Places, wanted: Mapping[int, tuple[str, tuple[int, ...]]], devices: int
) -> dict[int, tuple[int, ...]]:
    """The shape of one device's part of what each draft computes, where the program shows it.

    Args:
        program: as compiled.
        places: where its instructions come from.
        wanted: the primitive and the whole shape of each draft's result.
        devices: how many devices the program runs on.
    """
    seen: dict[int, Counter[tuple[int, ...]]] = {}
    for one in program:
        at = places.draft_of(one) if one.op_name and one.opcode not in ("parameter", "constant") else None
        if at in wanted and at is not None and primitive_of(one.op_name) == wanted[at][0]:
            whole = wanted[at][1]
            parts = (array.shape for array in one.arrays if is_part(array.shape, whole, devices))
            seen.setdefault(at, Counter()).update(parts)
    return {at: shapes.most_common(1)[0][0] for at, shapes in seen.items() if len(shapes) == 1}


def is_part(part: tuple[int, ...], whole: tuple[int, ...], devices: int) -> bool:
    """Whether an array may be one device's part of another."""
    if len(part) != len(whole) or not all(a and b % a == 0 for a, b in zip(part, whole, strict=True)):
        return False
    return math.prod(whole) // math.prod(part) <= devices
