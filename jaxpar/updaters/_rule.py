"""What an update computes, without its hyperparameters: a digest that another run of Python gives too.

The update is traced. A result is named by the operation that makes it and by the names of what the operation takes, so
the order of the operations does not count. Numbers in the program, and what follows from them and from the scalars of
the state alone, are hyperparameters: rates, schedules, decays, counts. All of them have one name.

A second digest has a name for each of these too. Where only that one differs, the optimizer has other numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]  # jax 0.12: an alias

from .._core.recent import Recent
from .._devices.user_mesh import outside_mesh
from ._base import Updater, accumulate, assign
from ._elementwise import CALLS
from ._optimizer import TreeOptimizer

_SAME = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "optimization_barrier"})
_IN_ANY_ORDER = frozenset({"add", "add_any", "max", "min", "mul"})
_PROGRAMS = ("jax", "optax", "jaxpar")  # another version may compute the same by other operations
Name = str | None  # None: a hyperparameter


def rules(init: Callable[..., Any], update: Callable[..., Any], params: Any) -> list[str | None]:
    """For each param what identifies the computation of its next value, and its numbers. None if it cannot be traced.

    `init(params)` gives a state, whose scalars are hyperparameters, and `update(grads, state, params, loss)` params.

    Example:
        >>> import jax.numpy as jnp
        >>> def rule(f):
        ...     return rules(lambda x: jnp.zeros(()), lambda g, count, x, loss: f(x, g, count), jnp.ones(2))[0]
        >>> first = rule(lambda x, g, count: x - 0.1 * g)
        >>> changed, other = rule(lambda x, g, count: x - g * (0.2 / count)), rule(lambda x, g, count: x + 0.1 * g)
        >>> is_other_rule(changed, first), has_other_numbers(changed, first), is_other_rule(other, first)
        (False, True, True)
    """
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        with outside_mesh():
            state = jax.eval_shape(init, params)
            closed = jax.make_jaxpr(update)(params, state, params, loss)
    except Exception:  # an update that needs more than is there, or the values themselves
        return [None] * len(jax.tree.leaves(params))
    scalars = jax.tree.leaves((params, jax.tree.map(lambda x: not x.shape, state), params, loss))
    given = [None if scalar is True else str(i) for i, scalar in enumerate(scalars)]
    versions = ", ".join(f"{name} {_version(name)}" for name in _PROGRAMS)
    kinds = _results(closed.jaxpr, given)
    numbers = _results(closed.jaxpr, list(map(str, range(len(scalars)))), list(map(_number, closed.consts)))
    return [f"{_digest(kind)} {versions}; {_digest(all)}" for kind, all in zip(kinds, numbers, strict=True)]


def _of_each(updater: Any, structure: Any, keys: tuple[int, ...], specs: tuple[Any, ...]) -> dict[int, str | None]:
    if isinstance(updater, TreeOptimizer):

        def update(grads: Any, state: Any, params: Any, loss: Any) -> Any:
            return updater.update(grads, state, params, loss)[0]

        return dict(zip(keys, rules(updater.init, update, structure.unflatten(specs)), strict=True))
    if not isinstance(updater, Updater) or updater in (assign, accumulate):
        return dict.fromkeys(keys)
    first = dict(zip(reversed(specs), reversed(keys), strict=True))  # keys of one shape have one rule

    def rule(spec: Any, key: int) -> str | None:
        def update(pushed: Any, state: Any, stored: Any, _: Any) -> Any:
            return updater.update(key, pushed, state, stored)[0]

        return rules(lambda value: updater.init(key, value), update, spec)[0]

    found = {spec: rule(spec, key) for spec, key in first.items()}
    return {k: found[spec] for k, spec in zip(keys, specs, strict=True)}


# `rule_of_each(updater, structure, keys, specs)`: the rule by which each key is updated. A run saves often, and traces
# once. The structure is that of the user's pytree with the keys' specs as leaves, for a `TreeOptimizer`.
rule_of_each = Recent(_of_each)


def is_other_rule(one: str | None, other: str | None) -> bool:
    """Whether two rules are certainly different. Those of other versions of the programs are not compared."""
    (kind, versions, _), (other_kind, other_versions, _) = _parts(one), _parts(other)
    return versions == other_versions and kind != other_kind


def has_other_numbers(one: str | None, other: str | None) -> bool:
    """Whether the numbers of two rules are certainly different. Older checkpoints do not have them."""
    (kind, versions, numbers), (other_kind, other_versions, other_numbers) = _parts(one), _parts(other)
    same = (kind, versions) == (other_kind, other_versions)
    return same and bool(numbers and other_numbers) and numbers != other_numbers


def _parts(rule: str | None) -> tuple[str, str, str]:
    """The digest without numbers, the versions, the digest with numbers."""
    rest, _, numbers = (rule or "").partition("; ")
    kind, _, versions = rest.partition(" ")
    return kind, versions, numbers


def _results(jaxpr: Jaxpr, given: Sequence[Name], constants: Sequence[Name] | None = None) -> list[Name]:
    """The names of what a program returns, for those of its arguments and constants. None: numbers have no names."""
    known: dict[Any, Name] = dict(zip(jaxpr.invars, given, strict=True))
    known |= zip(jaxpr.constvars, constants or [None] * len(jaxpr.constvars), strict=True)

    def name(atom: Any) -> Name:
        if isinstance(atom, Literal):
            return None if constants is None else _number(atom.val)
        return known[atom]

    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, _equation(eqn, list(map(name, eqn.invars)), constants is not None), strict=True)
    return list(map(name, jaxpr.outvars))


def _equation(eqn: Any, given: list[Name], named: bool) -> list[Name]:
    """The names of what an equation returns. `named`: numbers have names."""
    kind, count = eqn.primitive.name, len(eqn.outvars)
    if not (named or any(given)):
        return [None] * count
    if kind in _SAME and count == 1:
        return given[:1]
    constants = [] if named else None
    inner = [_results(program, _last(given, len(program.invars)), constants) for program in _programs(eqn)]
    if kind in CALLS:
        return inner[0]
    operands = sorted(map(str, given)) if kind in _IN_ANY_ORDER else given
    numbers = [v for _, v in sorted(eqn.params.items()) if isinstance(v, int | float)] if named else []  # x ** 2
    return [_digest(kind, i, operands, inner, *numbers) for i in range(count)]


def _number(value: Any) -> str:
    array = np.asarray(value)
    return f"{array.dtype}{array.tolist()}"


def _last(given: list[Name], count: int) -> list[Name]:
    """The names of the arguments of a program inside an equation. The operands of loops and branches come last."""
    return ["inner"] * (count - len(given)) + given[max(len(given) - count, 0) :]


def _programs(eqn: Any) -> Iterator[Jaxpr]:
    """The programs inside an equation: of a call, a loop, branches."""
    for _, value in sorted(eqn.params.items()):
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (ClosedJaxpr, Jaxpr)):
                yield part.jaxpr if isinstance(part, ClosedJaxpr) else part


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # an embedded copy
        return "unknown"
