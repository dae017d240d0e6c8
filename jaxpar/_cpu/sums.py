"""Sums that several layers read, computed once.

On CPUs, XLA computes a value that is cheap again for each reader, with all that it is computed of. In a network with
residual connections each layer reads the sum of those before it several times, and adds to it. So the program, the time
to compile it and the arrays that a step reads grow with the square of the layers. Here such a sum is written to memory
once. With jax 0.10 XLA drops the barrier before it decides, and nothing changes.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var

from .primitive import Place, Program, make, with_programs

# Cheap operations, of which each number of the result needs one number of each operand of the same size.
_CHEAP = frozenset(
    "add add_any sub mul neg max min abs sign square integer_pow select_n clamp eq ne lt le gt ge and or not xor "
    "convert_element_type reduce_precision copy reshape transpose squeeze expand_dims rev broadcast_in_dim".split()
)
# Equations that are their program: they have its inputs and its results.
_CALLS = frozenset("jit pjit checkpoint remat remat2 closed_call core_call custom_jvp_call custom_vjp_call".split())

# The arrays in memory of which XLA computes a value, each as large as the value. One that is in memory is its own.
Arrays = tuple[Hashable, ...]
_MOST = 8  # arrays of a value that are told apart. That many decide, and a sum of a thousand takes no longer

Done = dict[Hashable, tuple[Program, list[Arrays], Program]]


def _written(x: jax.Array, place: Place) -> jax.Array:
    return lax.optimization_barrier(x)


written_p = make(lax.copy_p, _written)  # the same numbers. On CPUs they are in memory, and elsewhere XLA decides


def sums_once(program: Program) -> Program:
    """A jaxpr, open or closed, in which each value is written that is cheaper to read than to compute again."""
    return _alone(program, {})


def _alone(program: Program, done: Done) -> Program:
    """The same for a program whose inputs are in memory, such as the body of a loop."""
    return _with_sums_once(program, [1] * len(_opened(program).invars), done)[0]


def _with_sums_once(program: Program, counts: Sequence[int], done: Done) -> tuple[Program, list[Arrays]]:
    """The new program, and the arrays of each result.

    Args:
        program: the jaxpr.
        counts: of how many arrays each input is computed. Those of input i are `(i, 0)`, `(i, 1)`, ...
        done: the programs that are made already. One object stays one in all its places.
    """
    key = id(program), tuple(counts)
    if key in done:
        new, results, _ = done[key]
        return new, results
    opened = _opened(program)
    arrays: dict[Var, Arrays] = {v: tuple((i, k) for k in range(counts[i])) for i, v in enumerate(opened.invars)}
    reads = [v for eqn in opened.eqns for v in _variables(eqn.invars)] + list(_variables(opened.outvars))
    readers = Counter(reads)
    eqns: list[JaxprEqn] = []
    for number, eqn in enumerate(opened.eqns):
        if eqn.primitive.name in _CALLS:
            eqn, results = _call(eqn, number, arrays, done)
            eqns.append(eqn)
            arrays.update(zip(eqn.outvars, results, strict=True))
            continue
        if eqn.primitive.name not in _CHEAP:
            eqns.append(with_programs(eqn, lambda inside: _alone(inside, done)))
            continue
        eqns.append(eqn)
        (result,) = eqn.outvars
        of_its_size = [v for v in _variables(eqn.invars) if _size(v) == _size(result)]
        read = tuple(dict.fromkeys(array for v in of_its_size for array in arrays.get(v, (v,))))
        # Each reader reads all of them. Or they are read once, and the value is written and read by each. Of two arrays
        # that saves little, and the smallest steps would wait for one loop more.
        if len(read) <= 2 or readers[result] * len(read) <= len(read) + 1 + readers[result]:
            arrays[result] = read[:_MOST]
            continue
        computed = Var(result.aval)
        eqns[-1] = eqn.replace(outvars=[computed])
        eqns.append(_template().replace(invars=[computed], outvars=[result], source_info=eqn.source_info, ctx=eqn.ctx))
    new = opened.replace(eqns=eqns)
    new = new if opened is program else program.replace(jaxpr=new)
    results = [arrays.get(v, (v,)) if isinstance(v, Var) else () for v in opened.outvars]
    done[key] = new, results, program  # which keeps the identity its own
    return new, results


def _call(eqn: JaxprEqn, number: int, arrays: dict[Var, Arrays], done: Done) -> tuple[JaxprEqn, list[Arrays]]:
    """An equation that is a program, such as a layer inside of `jit`, and the arrays of each of its results."""
    name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    given = [arrays.get(v, (v,)) if isinstance(v, Var) else () for v in eqn.invars]
    program, results = _with_sums_once(eqn.params[name], [len(of_input) for of_input in given], done)

    def here(array: Any) -> Hashable:
        """An array of the program as the equations around it know it: one of an input, or one of this call."""
        return given[array[0]][array[1]] if type(array) is tuple and len(array) == 2 else (number, "inside", array)

    return eqn.replace(params={**eqn.params, name: program}), [tuple(map(here, of_result)) for of_result in results]


def _variables(values: Sequence[Any]) -> dict[Var, None]:
    """The variables among the operands of an equation, each once."""
    return dict.fromkeys(v for v in values if isinstance(v, Var))


def _size(v: Any) -> int:
    return math.prod(v.aval.shape)


@functools.cache
def _template() -> JaxprEqn:
    return jax.make_jaxpr(written_p.bind)(0.0).eqns[0]


def _opened(program: Program) -> Program:
    return getattr(program, "jaxpr", program)
