"""What an update computes, as a digest by which a checkpoint knows its optimizer again.

Optimizers with the same state may update by other rules, as `optax.adamw` and `optax.nadamw`, or with another mask. The
names of functions and what they close over do not tell: a lambda has none, a learning rate and a mask are both
functions, and a transform that was renamed is the same. So the digest is of the operations that make the next value of
a param. Another run of Python, of another version too, gives the same digest.

An operation is named by its kind and by the names of what it takes, so their order does not count. Numbers in the
program, and what follows from them and from the scalars of the state alone, are hyperparameters: rates, schedules,
decays, counts. All of them have one name. A second digest has a name for each of these too. Where only that one
differs, the optimizer has other numbers.

A rule is the text "digest versions; digest with numbers". Those of other versions of jax, optax or jaxpar are not
compared, since these may compute the same by other operations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.typing import ArrayLike

from .._core.recent import Recent
from .._core.updater import Grads, Params, State
from .._devices.user_mesh import outside_mesh
from ._jaxprs import CALLS, Eqn, interpret, programs
from ._updaters import TreeOptimizer, Updater, accumulate, assign

_SAME = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "optimization_barrier"})
_IN_ANY_ORDER = frozenset({"add", "add_any", "max", "min", "mul"})
_PACKAGES = ("jax", "optax", "jaxpar")


@Recent  # a run saves often, and traces once
def rule_of_each(
    updater: object, structure: Any, keys: tuple[int, ...], specs: tuple[jax.ShapeDtypeStruct, ...]
) -> dict[int, str | None]:
    """The rule by which each key is updated. For a `TreeOptimizer`, `structure` is the treedef of the specs.

    None for what cannot be traced, and for a plain function.
    """
    if isinstance(updater, TreeOptimizer):

        def update(grads: Grads, state: State, params: Params, loss: jax.Array) -> Params:
            return updater.update(grads, state, params, loss)[0]

        return dict(zip(keys, _rules(updater.init, update, structure.unflatten(specs)), strict=True))
    if not isinstance(updater, Updater) or updater in (assign, accumulate):
        return dict.fromkeys(keys)
    first = dict(zip(reversed(specs), reversed(keys), strict=True))  # keys of one shape have one rule

    def rule(spec: jax.ShapeDtypeStruct, key: int) -> str | None:
        def update(pushed: jax.Array, state: State, stored: jax.Array, _: jax.Array) -> jax.Array:
            return updater.update(key, pushed, state, stored)[0]

        return _rules(lambda value: updater.init(key, value), update, spec)[0]

    rule_of = {spec: rule(spec, key) for spec, key in first.items()}
    return {k: rule_of[spec] for k, spec in zip(keys, specs, strict=True)}


def difference_of_rules(rule: str | None, other: str | None) -> str:
    """What is certainly different in two rules: "rule", "numbers" or ""."""
    (operations, _, numbers), (other_operations, _, other_numbers) = [(r or "").partition("; ") for r in (rule, other)]
    (digest, _, versions), (other_digest, _, other_versions) = [
        r.partition(" ") for r in (operations, other_operations)
    ]
    if versions != other_versions:
        return ""
    if digest != other_digest:
        return "rule"
    return "numbers" if numbers and other_numbers and numbers != other_numbers else ""  # older checkpoints have none


class _Name(NamedTuple):
    """What an intermediate result of an update is called. Equal names are computed in the same way."""

    rule: str | None  # without hyperparameters. None: it is one
    exact: str | None  # with all numbers


def _rules(
    init: Callable[[Params], State], update: Callable[[Grads, State, Params, jax.Array], Params], params: Params
) -> list[str | None]:
    """The rule of each param. `init(params)` gives a state, and `update(grads, state, params, loss)` params."""
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        with outside_mesh():
            state = jax.eval_shape(init, params)
            closed = jax.make_jaxpr(update)(params, state, params, loss)
    except Exception:  # an update that needs more than is there, or the values themselves
        return [None] * len(jax.tree.leaves(params))
    is_hyperparameter = jax.tree.map(lambda x: not x.shape, state)
    leaves = jax.tree.leaves((params, is_hyperparameter, params, loss))
    arguments = [_Name(None if leaf is True else str(i), str(i)) for i, leaf in enumerate(leaves)]
    versions = ", ".join(f"{package} {_version(package)}" for package in _PACKAGES)
    results = _results(closed.jaxpr, arguments, list(map(_number, closed.consts)))
    return [f"{_digest(name.rule)} {versions}; {_digest(name.exact)}" for name in results]


def _results(jaxpr: Jaxpr, arguments: Sequence[_Name], constants: Sequence[_Name]) -> list[_Name]:
    """The names of what a program returns, for those of its arguments and constants."""
    return interpret(jaxpr, constants, arguments, _number, _equation)


def _equation(eqn: Eqn, operands: list[_Name]) -> list[_Name]:
    # What only moves or casts a number is no operation of the rule: another jax may leave it out.
    kind, count = eqn.primitive.name, len(eqn.outvars)
    if kind in _SAME and count == 1:
        return operands[:1]
    # A call is what is in it. A loop or branches are one operation, named by all programs in it.
    inner = [
        _results(program, _last(operands, len(program.invars)), [_Name(None, None)] * len(program.constvars))
        for program, _ in programs(eqn)
    ]
    if kind in CALLS:
        return inner[0]
    # What is computed of hyperparameters alone is one too, so another schedule is the same rule.
    rules, exacts = [name.rule for name in operands], [name.exact for name in operands]
    is_hyperparameter = not any(rules)
    if kind in _IN_ANY_ORDER:
        rules, exacts = sorted(map(str, rules)), sorted(map(str, exacts))
    inner_rules = [[name.rule for name in names] for names in inner]
    inner_exacts = [[name.exact for name in names] for names in inner]
    numbers = [v for _, v in sorted(eqn.params.items()) if isinstance(v, int | float)]  # x ** 2
    return [
        _Name(
            None if is_hyperparameter else _digest(kind, i, rules, inner_rules),
            _digest(kind, i, exacts, inner_exacts, *numbers),
        )
        for i in range(count)
    ]


def _number(value: ArrayLike) -> _Name:
    array = np.asarray(value)
    return _Name(None, f"{array.dtype}{array.tolist()}")


def _last(operands: list[_Name], count: int) -> list[_Name]:
    """The names of the arguments of a program inside an equation. The operands of loops and branches come last."""
    return [_Name("inner", "inner")] * (count - len(operands)) + operands[max(len(operands) - count, 0) :]


def _digest(*fields: object) -> str:
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # an embedded copy
        return "unknown"
