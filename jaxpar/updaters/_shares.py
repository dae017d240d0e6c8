"""Whether an updater computes the same for one device's share of a value as for the whole value.

A store of kind `sharded` keeps a value flat and cut into shares, and its updater sees one share at a time. That is
right only if `init` and `update` are the same elementwise program for the value and for a share. The rule is about
programs, since a trial with numbers misses thresholds, periods and masks. Nothing is computed here.

- `init` and `update` are traced on the whole value and on a share, (chunk,).
- `init` is traced on the rows of all shares, (shards, chunk), too. That is what `kv.init` hands to it.
- All traces must give the same reading, see `_elementwise`.
- Each leaf of the state must have one number for each element of the value, or be a scalar.

A plain function sees whole values at the prompt, so the rule does not concern it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]  # jax 0.12: an alias

from .._core import checks
from .._devices.collectives import chunk_size
from ._base import Updater, accumulate, assign, program_of
from ._elementwise import Extent, NotElementwise, Reading, read
from ._tree import TreeOptimizer

Spec = jax.ShapeDtypeStruct


_ADVICE = (
    "a store of kind 'sharded' gives the updater one device's flat share of a value, so it must be elementwise; use "
    "kind='device', or kv.from_params(params, kind='sharded', optimizer=tx), which splits whole values over a mesh"
)
_TOGETHER = 256  # keys that are traced together
Forms = tuple[Spec, Spec, Spec | None]  # the whole value, a flat share of it, the rows that `init` gets


def check_elementwise(
    updater: Updater, values: Mapping[int, Spec], shards: int, names: Mapping[int, str], where: str
) -> None:
    """`ValueError` unless the updater may be given the shares of all values.

    Args:
        updater: what a push does.
        values: shapes and dtypes of the whole values by key.
        shards: how many shares a value is cut into.
        names: of the keys that have names.
        where: the function that is called, for the message.
    """

    def forms(value: Spec) -> Forms:
        chunk = chunk_size(value.size, shards)
        return value, Spec((chunk,), value.dtype), Spec((shards, chunk), value.dtype)

    check_elementwise_forms(updater, {k: forms(v) for k, v in values.items()}, names, where, _ADVICE)


def check_elementwise_tree(optimizer: TreeOptimizer, params: Any, shards: int, where: str) -> None:
    """`ValueError` unless an optimizer of the whole pytree may be given one device's shares of all params.

    Args:
        optimizer: of the store.
        params: shapes and dtypes of the whole params, in the user's pytree, with None where there is no gradient.
        shards: how many shares a value is cut into.
        where: the function that is called, for the message.
    """

    def cut(rows: tuple[int, ...]) -> Any:
        return jax.tree.map(lambda x: Spec((*rows, chunk_size(x.size, shards)), x.dtype), params)

    updater = Updater(lambda key, value: optimizer.init(value), _swapped(optimizer))
    reason = fault(updater, [0], params, cut(()), cut((shards,)), judges_all=True)
    if reason is not None:
        raise ValueError(f"{where}: {reason}; {_ADVICE}")


def _swapped(optimizer: TreeOptimizer) -> Any:
    """The update of an optimizer as that of an updater, whose values are pytrees."""

    def update(key: int, pushed: Any, state: Any, stored: Any) -> Any:
        del key
        return optimizer.update(pushed, state, stored, jnp.zeros(()))  # any loss

    return update


def check_elementwise_forms(
    updater: Updater, values: Mapping[int, Forms], names: Mapping[int, str], where: str, advice: str
) -> None:
    """`ValueError` unless the updater may be given all shares. The message ends in `advice`."""
    if updater in (assign, accumulate):
        return
    groups: dict[Any, tuple[Forms, dict[Any, int]]] = {}
    for key, forms in values.items():
        same = tuple((form.shape, form.dtype) for form in forms if form is not None)
        groups.setdefault(same, (forms, {}))[1].setdefault(program_of(updater, key), key)
    for forms, found in groups.values():
        for keys in _batches(list(found.values())):
            if len(keys) > 1 and fault(updater, keys, *forms) is None:
                continue
            for key in keys:
                reason = fault(updater, [key], *forms)
                if reason is not None:
                    name = f" ({names[key]!r})" if key in names else ""
                    raise ValueError(f"{where}: key {key}{name}: {reason}; {advice}")


def _batches(keys: list[int]) -> Iterator[list[int]]:
    return (keys[i : i + _TOGETHER] for i in range(0, len(keys), _TOGETHER))


def fault(
    updater: Updater, keys: Sequence[int], value: Any, share: Any, rows: Any = None, *, judges_all: bool = False
) -> str | None:
    """Why an updater is not the same for a value and for a share of it, in words. None: it is.

    A value may be a pytree of specs, for an optimizer of all params. The keys have values of one shape. An updater that
    raises on both forms of one key is not judged, unless `judges_all`. It raises on every push.

    Example:
        >>> import optax, jax.numpy as jnp
        >>> from jaxpar import updaters
        >>> value, share = Spec((4, 4), jnp.float32), Spec((8,), jnp.float32)
        >>> fault(updaters.from_optax(optax.adam(0.1)), [0], value, share)
        >>> fault(updaters.from_optax(optax.adaptive_grad_clip(0.1)), [0], value, share)
        "the updater is not elementwise: 'reduce_sum' combines elements of the value"
    """
    whole, part = _trace(updater, keys, value), _trace(updater, keys, share)
    if isinstance(whole, Exception) and isinstance(part, Exception) and len(keys) == 1:
        return f"the updater fails ({_first_line(whole)})" if judges_all else None
    laid_out = None if rows is None else _trace(updater, keys, rows, with_update=False)
    try:
        return _difference(whole, part) or (laid_out and _difference(whole, laid_out))
    except NotElementwise as error:
        return f"the updater is not elementwise: {error}"


@dataclasses.dataclass(frozen=True)
class _Traces:
    """What an updater does with one form of a value: its jaxprs, the state and what comes of both."""

    value: Any
    init: ClosedJaxpr
    state: Any
    update: ClosedJaxpr | None = None
    out: Any = None

    def leaves(self) -> list[Any]:
        return jax.tree.leaves(self.state)


def _trace(updater: Updater, keys: Sequence[int], value: Any, with_update: bool = True) -> _Traces | Exception:
    """The traces, all keys in one, or what was raised."""

    def init(value: Any) -> Any:
        return [updater.init(key, value) for key in keys]

    def update(pushed: Any, states: Any, stored: Any) -> Any:
        pairs = [updater.update(key, pushed, state, stored) for key, state in zip(keys, states, strict=True)]
        return [new for new, _ in pairs], [state for _, state in pairs]

    try:
        started, states = jax.make_jaxpr(init, return_shape=True)(value)
        rest = jax.make_jaxpr(update, return_shape=True)(value, states, value) if with_update else ()
    except Exception as error:  # any error is the updater's own
        return error
    return _Traces(value, started, states, *rest)


def _difference(whole: _Traces | Exception, part: _Traces | Exception) -> str | None:
    """How the two differ, in words. `NotElementwise` if one of them breaks the rule."""
    for form, name in ((whole, "the whole value"), (part, "a share of it")):
        if isinstance(form, Exception):
            return f"the updater fails on {name} only ({_first_line(form)})"
    assert isinstance(whole, _Traces)
    assert isinstance(part, _Traces)
    specs = jax.tree.leaves(whole.value)
    both = f"{checks.describe(specs[0]) if len(specs) == 1 else 'whole values'} and for a share of it"
    reason = _other_state(whole, part)
    if reason is not None:
        return f"the updater is not the same for {both}: {reason}"
    values = [Extent.ELEMENTS] * len(specs)
    reason = _other_program(read(whole.init, values), read(part.init, values))
    if reason is None and whole.update is not None and part.update is not None:
        state = [Extent.ELEMENTS if leaf.shape else Extent.SCALAR for leaf in part.leaves()]
        extents = [*values, *state, *values]
        reason = _other_program(read(whole.update, extents), read(part.update, extents))
    return None if reason is None else f"the updater is not the same program for {both}: {reason}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _other_state(whole: _Traces, part: _Traces) -> str | None:
    """How the states differ, before an update and after it."""
    if jax.tree.structure(whole.state) != jax.tree.structure(part.state):
        return "its state has another structure"
    values = {(a.shape, b.shape) for a, b in zip(*map(jax.tree.leaves, (whole.value, part.value)), strict=True)}
    for a, b in zip(whole.leaves(), part.leaves(), strict=True):
        scalar = not a.shape and not b.shape
        if a.dtype != b.dtype or not (scalar or (a.shape, b.shape) in values):
            found = " and ".join(map(checks.describe, (a, b)))
            return f"its state has {found}, and must have scalars or one number for each element"
    for form in (whole, part) if part.update is not None else ():
        if _shapes(form.out[1]) != _shapes(form.state):
            return "an update changes the structure or the shapes of its state"
    return None


def _shapes(state: Any) -> Any:
    leaves, structure = jax.tree.flatten(state)
    return structure, [leaf.shape for leaf in leaves]


def _other_program(whole: Reading, part: Reading) -> str | None:
    """The first difference of two readings."""
    if whole == part:
        return None
    if len(whole.lines) != len(part.lines):
        return f"it has {len(whole.lines)} equations for the one and {len(part.lines)} for the other"
    for i, (one, other) in enumerate(zip(whole.lines, part.lines, strict=True)):
        if one != other:
            names = " and ".join(sorted({repr(one[0]), repr(other[0])}))
            return f"equation {i + 1}, {names}, depends on the shape"
    return "it returns other results"
