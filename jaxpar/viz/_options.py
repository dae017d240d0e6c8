"""Checks of what `trace` and `plot_network` are given. Each message names the option and what to write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks
from .._core.text import plural
from ._draw.style import DIRECTIONS, THEMES
from ._fold.calls import Call
from ._fold.templates import Pattern, Rule


def check_trace(
    fn: Any, count: int, params_argnums: Any, depth: Any, max_nodes: Any, repeats: Any, rules: Any, what: str = "viz"
) -> None:
    """Check the options of `trace`, and that `fn` is a function. `count` is the number of positional arguments.

    Raises:
        TypeError: an option of a wrong type.
        ValueError: a number out of range.
    """
    if not callable(fn):
        raise TypeError(f"{what}: expected a function and then its arguments, got {checks.describe(fn)} first")
    argnums(params_argnums, count, what)
    if depth is not None:
        checks.whole_number(depth, what, "depth", least=0)
    if max_nodes is not None:
        checks.whole_number(max_nodes, what, "max_nodes")
    true_or_false(repeats, what, "repeats")
    check_rules(rules, what)


def check_picture(
    title: Any,
    node_attrs: Any,
    theme: Any,
    heat: Any,
    time_limit: Any,
    hide_weights: Any,
    legend: Any,
    direction: Any,
    what: str = "plot_network",
) -> None:
    """Check the options that `plot_network` has besides those of `trace`. Errors as of `check_trace`."""
    if not isinstance(title, str):
        raise TypeError(f"{what}: title must be a string, got {checks.describe(title)}")
    expected = f'{what}: node_attrs must be a dict of names and values such as {{"shape": "oval"}}, got '
    if node_attrs is not None and not isinstance(node_attrs, Mapping):
        raise TypeError(expected + checks.describe(node_attrs))
    for name in node_attrs or ():
        if not isinstance(name, str):
            raise TypeError(f"{expected}the name {checks.describe(name)}")
    checks.choice(theme, what, "theme", THEMES)
    checks.choice(direction, what, "direction", DIRECTIONS)
    if heat is not None:
        checks.choice(heat, what, "heat", ("flops", "bytes"))
    checks.number(time_limit, what, "time_limit", "a number of seconds above 0", lambda seconds: seconds > 0)
    true_or_false(hide_weights, what, "hide_weights")
    true_or_false(legend, what, "legend")


def argnums(given: Any, count: int, what: str = "viz") -> frozenset[int]:
    """The positions of the arguments that hold parameters. Negative numbers count from the end, as Python's do.

    Example:
        >>> sorted(argnums((0, -1), 3))
        [0, 2]

    Raises:
        TypeError: no int, no sequence of ints, or a bool.
        ValueError: there is no such argument. 0, the default, is allowed where there are no arguments.
    """
    if given is None:
        return frozenset()
    many = isinstance(given, (Sequence, set, frozenset)) and not isinstance(given, str)
    return frozenset(_argnum(number, count, what) for number in (given if many else (given,)))


def _argnum(number: Any, count: int, what: str) -> int:
    if isinstance(number, (bool, np.bool_)) or not isinstance(number, (int, np.integer)):
        raise TypeError(
            f"{what}: params_argnums must be None, an int such as 0, or several of them, got {checks.describe(number)}"
        )
    number = int(number)
    if not -count <= number < max(count, 1):
        there = checks.shorten(range(count)) if count else "none"
        raise ValueError(
            f"{what}: params_argnums is {number}, and there {'is' if count == 1 else 'are'} "
            f"{plural(count, 'positional argument')}: {there}; None says that no argument holds parameters"
        )
    return number + count if number < 0 else number


def true_or_false(value: Any, what: str, name: str) -> None:
    """`TypeError` for anything but a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what}: {name} must be True or False, got {checks.describe(value)}")


def check_rules(rules: Any, what: str) -> None:
    """`TypeError` for anything but a sequence of `Call`s, `Pattern`s and `Rule`s."""
    kinds = (Call, Pattern, Rule)
    example = '[viz.Call("attend", "Attention")]'
    expected = f"{what}: rules must be a list of viz.Call, viz.Pattern and viz.Rule such as {example}, got "
    if isinstance(rules, (str, *kinds)) or not isinstance(rules, Sequence):
        raise TypeError(expected + checks.describe(rules))
    for rule in rules:
        if not isinstance(rule, kinds):
            raise TypeError(f"{expected}{checks.describe(rule)} in it")
        if isinstance(rule, Call) and not (isinstance(rule.function, str) and isinstance(rule.op, str)):
            wrong = rule.op if isinstance(rule.function, str) else rule.function
            raise TypeError(f"{what}: the function and op of a viz.Call must be strings, got {checks.describe(wrong)}")
        if isinstance(rule, Pattern) and not (isinstance(rule.op, str) and callable(rule.fn)):
            got = f"{checks.describe(rule.op)} and {checks.describe(rule.fn)}"
            raise TypeError(f"{what}: a viz.Pattern has a string op and a function that computes it, got {got}")
        if isinstance(rule, Rule) and not callable(rule.match):
            got = checks.describe(rule.match)
            raise TypeError(f"{what}: the match of viz.Rule {rule.name!r} must be a function of cells, got {got}")


def check_dtype(fn: Callable[..., Any], name: str, leaf: Any) -> None:
    """`TypeError` for an array whose dtype JAX does not have: of objects, strings, dates or records."""
    if not hasattr(leaf, "dtype"):  # a number of Python
        return
    dtype, issubdtype = leaf.dtype, jnp.issubdtype
    kinds = (np.number, np.bool_, jax.dtypes.extended)
    if dtype == jax.dtypes.float0 or any(issubdtype(dtype, kind) for kind in kinds):
        return
    of = getattr(fn, "__name__", type(fn).__name__)
    raise TypeError(
        f"viz: argument {name} of {of} is an array of dtype {dtype}, which JAX does not have; expected numbers, "
        "bools or random keys"
    )
