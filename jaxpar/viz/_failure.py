"""What was traced of a function that raises: all up to the line that failed, which is a node of its own.

JAX hands out no jaxpar of such a function. So it is traced once more, by one that stops where it raises and returns
what the failing line reads. An equation that computes nothing marks the line.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import traceback
from collections.abc import Callable
from pathlib import PurePath
from types import FrameType
from typing import Any

import jax
import jax.core
import jax.extend.core as jex

from ._graph import FAILS_AT
from ._read.bind import Bound
from ._read.jaxpr import read
from ._read.raw import Raw
from ._read.source import is_users


def attach(error: Exception, bound: Bound, name: str, draw: Callable[[Raw], Any]) -> None:
    """Leave what was traced up to the failure with the error, drawn, as an attribute of that name.

    The error is the user's own, so it comes through as it is where that fails.
    """
    with contextlib.suppress(Exception):
        setattr(error, name, draw(_read_until(error, bound)))
        error.add_note(f"jaxpar.viz: this exception has `{name}`, what was traced up to the line that failed")


def _read_until(error: Exception, bound: Bound) -> Raw:
    """The flat equations of a function up to the line at which it raised an error.

    Raises:
        ValueError: no line of the user's is known, or the function does not fail there again.
    """
    # What `jit` traces by itself is lost with the error. So where no line is outside of it, all is traced without.
    for context in (contextlib.nullcontext(), jax.disable_jit()):
        for depth in itertools.count():
            try:
                with context:
                    closed = jax.make_jaxpr(lambda arrays: _stop(error, bound, arrays, depth))(bound.arrays)  # noqa: B023
            except IndexError:
                break
            # A line inside of another trace reads arrays of that trace, which are captured then.
            if not any(isinstance(array, jax.core.Tracer) for array in closed.consts):
                return _read(closed, bound)
    raise ValueError("no line that failed was found")


def _stop(error: Exception, bound: Bound, arrays: Any, depth: int) -> Any:
    """Call a function until it raises, and mark the line of the user's call of that depth, counted from the error."""
    try:
        bound.call(arrays)
    except Exception as again:
        if (type(again), str(again)) != (type(error), str(error)):
            raise ValueError("it fails in another way") from None
        frames = [(f, n) for f, n in traceback.walk_tb(again.__traceback__) if is_users(f.f_code.co_filename)]
        frame, line = frames[::-1][depth]
        mark = jex.Primitive(f"{FAILS_AT}{PurePath(frame.f_code.co_filename).name}:{line}")
        mark.def_abstract_eval(lambda first, *others: first.update(shape=()))
        return mark.bind(*_arrays_of(frame, line))
    raise ValueError("it does not fail again")


def _arrays_of(frame: FrameType, line: int) -> list[Any]:
    """The arrays that a line reads, or else all that its function has. `IndexError` where there are none."""
    words: set[str] = set()
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.positions is not None and instruction.positions.lineno == line:
            read = instruction.argval  # Python 3.13 loads two names at once
            words.update(read if isinstance(read, tuple) else [str(read)])
    for known in (words, frame.f_locals):
        values = [value for name, value in frame.f_locals.items() if name in known]
        for found in (values, jax.tree.leaves(values)):  # arrays first: a tree of parameters has those of all layers
            if arrays := [value for value in found if isinstance(value, jax.core.Tracer)]:
                return arrays
    raise IndexError


def _read(closed: Any, bound: Bound) -> Raw:
    """Flat equations of which all are kept: what nothing reads is a result."""
    jaxpr = closed.jaxpr
    used = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars}
    loose = [out for eqn in jaxpr.eqns for out in eqn.outvars if not used & set(map(id, eqn.outvars))]
    return read(closed.replace(jaxpr=jaxpr.replace(outvars=loose)), bound.arguments, [""] * len(loose), bound.captured)
