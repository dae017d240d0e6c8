"""Sums that several layers read, computed once.

On CPUs, XLA computes a value that is cheap again for each reader, with all that it is computed of. In a network with
residual connections each layer reads the sum of those before it several times, and adds to it. So the program, the time
to compile it and the arrays that a step reads grow with the square of the layers. Here such a sum is written to memory
once. With jax 0.10 XLA drops the barrier before it decides, and nothing changes.
"""

from __future__ import annotations

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


def _written(x: jax.Array, place: Place) -> jax.Array:
    return lax.optimization_barrier(x)


written_p = make(lax.copy_p, _written)  # the same numbers. On CPUs they are in memory, and elsewhere XLA decides


def sums_once(program: Program) -> Program:
    """A jaxpr, open or closed, in which each value is written that is cheaper to read than to compute again."""
    return _Rewriting().alone(program)


class _Rewriting:
    """The programs of one function that are rewritten so far. One object stays one in all its places."""

    def __init__(self) -> None:
        self.template: JaxprEqn = jax.make_jaxpr(written_p.bind)(0.0).eqns[0]
        # By the identity of a program, which is held with what is known of it.
        self.done: dict[tuple[int, tuple[int, ...]], tuple[Program, list[Arrays], Program]] = {}
        self.counted: dict[int, tuple[Counter[Var], Program]] = {}

    def alone(self, program: Program) -> Program:
        """The new program of one whose inputs are in memory, such as the body of a loop."""
        return self.rewrite(program, [1] * len(_opened(program).invars))[0]

    def rewrite(self, program: Program, counts: Sequence[int]) -> tuple[Program, list[Arrays]]:
        """The new program, and the arrays of each result.

        `counts`: of how many arrays each input is computed. Those of input i are `(i, 0)`, `(i, 1)`, ...
        """
        key = id(program), tuple(counts)
        if key in self.done:
            new, results, _ = self.done[key]
            return new, results
        opened, readers = _opened(program), self.readers(program)
        arrays: dict[Var, Arrays] = {v: tuple((i, k) for k in range(counts[i])) for i, v in enumerate(opened.invars)}
        eqns: list[JaxprEqn] = []
        for number, eqn in enumerate(opened.eqns):
            if eqn.primitive.name in _CALLS:
                eqn, of_results = self.call(eqn, number, arrays)
            elif eqn.primitive.name in _CHEAP:
                (result,) = eqn.outvars
                of_its_size = [v for v in _variables(eqn.invars) if _size(v) == _size(result)]
                of_results = [tuple(dict.fromkeys(array for v in of_its_size for array in arrays.get(v, (v,))))]
            else:
                eqn, of_results = with_programs(eqn, self.alone), [(v,) for v in eqn.outvars]
            computed: dict[Var, Var] = {}  # what is computed in place of what is written
            for result, read in zip(eqn.outvars, of_results, strict=True):
                # Each reader reads all of them. Or they are read once, and the value is written and read by each. Of
                # two arrays that saves little, and the smallest steps would wait for one loop more.
                count = readers[result]
                if len(read) > 2 and count * len(read) > len(read) + 1 + count:
                    computed[result] = Var(result.aval)
                else:
                    arrays[result] = read[:_MOST]
            eqns.append(eqn.replace(outvars=[computed.get(v, v) for v in eqn.outvars]))
            for result, before in computed.items():
                writes = self.template.replace(invars=[before], outvars=[result])
                eqns.append(writes.replace(source_info=eqn.source_info, ctx=eqn.ctx))
        new = opened.replace(eqns=eqns)
        new = new if opened is program else program.replace(jaxpr=new)
        results = [arrays.get(v, (v,)) if isinstance(v, Var) else () for v in opened.outvars]
        self.done[key] = new, results, program
        return new, results

    def call(self, eqn: JaxprEqn, number: int, arrays: dict[Var, Arrays]) -> tuple[JaxprEqn, list[Arrays]]:
        """An equation that is a program, such as a layer inside of `jit`, and the arrays of each of its results."""
        given = [arrays.get(v, (v,)) if isinstance(v, Var) else () for v in eqn.invars]
        program, results = self.rewrite(_program_of(eqn), [len(of_input) for of_input in given])

        def here(array: Any) -> Hashable:
            """An array of the program as the equations around it know it: one of an input, or one of this call."""
            is_given = type(array) is tuple and len(array) == 2
            return given[array[0]][array[1]] if is_given else (number, "inside", array)

        new = eqn.replace(params={**eqn.params, _name_of_program(eqn): program})
        return new, [tuple(map(here, of_result)) for of_result in results]

    def readers(self, program: Program) -> Counter[Var]:
        """How many equations read each variable, those inside of calls among them."""
        if id(program) in self.counted:
            return self.counted[id(program)][0]
        readers = Counter[Var](_variables(_opened(program).outvars))
        for eqn in _opened(program).eqns:
            if eqn.primitive.name not in _CALLS:
                readers.update(_variables(eqn.invars))
                continue
            inside = self.readers(_program_of(eqn))
            for v, given in zip(_opened(_program_of(eqn)).invars, eqn.invars, strict=True):
                if isinstance(given, Var):
                    readers[given] += inside[v]
        self.counted[id(program)] = readers, program
        return readers


def _name_of_program(eqn: JaxprEqn) -> str:
    return "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"


def _program_of(eqn: JaxprEqn) -> Program:
    return eqn.params[_name_of_program(eqn)]


def _variables(values: Sequence[Any]) -> list[Var]:
    """The variables among the operands of an equation, each once."""
    return list(dict.fromkeys(v for v in values if isinstance(v, Var)))


def _size(v: Any) -> int:
    return math.prod(v.aval.shape)


def _opened(program: Program) -> Program:
    return getattr(program, "jaxpr", program)
