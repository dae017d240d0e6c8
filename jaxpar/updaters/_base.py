"""What a push does to a stored value."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._core import checks
from .._core.arguments import check_takes
from .._core.calls import answers

State = Any
UpdateFn = Callable[[int, jax.Array, jax.Array], jax.Array]  # (key, pushed, stored) -> new_stored


class Updater(NamedTuple):
    """A pair of pure functions that says what a push does.

    Attributes:
        init: `init(key, value) -> state`, any pytree of arrays. Called when the key is initialised.
        update: `update(key, pushed, state, stored) -> (new_stored, new_state)`. `pushed` and `stored` have the shape
            and dtype of the stored value, and `new_stored` must have them too. In a store of kind `sharded` both are
            one device's flat share of the value, so both functions must be elementwise there. `kv.set_updater` checks
            that.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv, updaters
        >>> halve = updaters.Updater(
        ...     init=lambda key, value: (),
        ...     update=lambda key, pushed, state, stored: (stored + pushed / 2, state),
        ... )
        >>> store = kv.set_updater(kv.init(kv.create(), 3, jnp.ones(2)), halve)
        >>> kv.pull(kv.push(store, 3, jnp.full(2, 4.0)), 3).tolist()
        [3.0, 3.0]
    """

    init: Callable[[int, jax.Array], State]
    update: Callable[[int, jax.Array, State, jax.Array], tuple[jax.Array, State]]


def _no_state(key: int, value: jax.Array) -> State:
    del key, value
    return ()


def _assign(key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
    del key, stored
    return pushed, state


def _accumulate(key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
    del key
    return stored + pushed, state


assign: Updater = Updater(_no_state, _assign)
accumulate: Updater = Updater(_no_state, _accumulate)


@dataclasses.dataclass(frozen=True)
class _Stateless:
    fn: UpdateFn

    def __call__(self, key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
        return self.fn(key, pushed, stored), state


@answers("updaters.stateless")
def stateless(fn: UpdateFn) -> Updater:
    """An updater without state, out of a pure function.

    An `Updater` is compiled into the push. The bare function, given to `kv.set_updater`, runs in Python on every push
    instead, so that a `print` in it prints.

    Args:
        fn: `fn(key, pushed, stored) -> new_stored`, arrays of the stored shape and dtype.

    Raises:
        TypeError: `fn` does not take three arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> updater = stateless(lambda key, pushed, stored: stored + 2 * pushed)
        >>> updater.update(3, jnp.ones(2), (), jnp.ones(2))[0].tolist()
        [3.0, 3.0]
    """
    if not callable(fn):
        hint = "; updaters.from_optax takes an optax transform" if hasattr(fn, "update") else ""
        raise TypeError(f"updaters.stateless: expected a function, got {checks.describe(fn)}{hint}")
    _check_takes(fn, _PLAIN, "updaters.stateless: the function")
    return Updater(_no_state, _Stateless(fn))


_PLAIN = ("key", "pushed", "stored")
_WITH_STATE = ("key", "pushed", "state", "stored")
_HINTS: dict[tuple[str, ...], str] = {
    _PLAIN: "one with a state is jp.updaters.Updater(init, update)",
    _WITH_STATE: "one without a state is jp.updaters.stateless(fn)",
}


def check_updater(updater: Any, where: str) -> None:
    """`TypeError` for what is no updater, or for a function that does not take the arguments of a push.

    A function that Python cannot inspect is taken.
    """
    if not callable(updater) and not isinstance(updater, Updater):
        hint = "; kv.set_optimizer takes an optax transform" if hasattr(updater, "update") else ""
        raise TypeError(
            f"{where}: expected updater(key, pushed, stored) -> new_stored or a jp.updaters.Updater, "
            f"got {checks.describe(updater)}{hint}"
        )
    if isinstance(updater, Updater):
        _check_takes(updater.init, ("key", "value"), f"{where}: Updater.init")
        _check_takes(updater.update, _WITH_STATE, f"{where}: Updater.update")
    else:
        _check_takes(updater, _PLAIN, f"{where}: an updater")


def _check_takes(fn: Any, names: tuple[str, ...], what: str) -> None:
    shown = getattr(fn, "__name__", type(fn).__name__)
    if _first_argument(fn) == "learning_rate":
        raise TypeError(
            f"{what} is called with ({', '.join(names)}), but {shown} makes one; call it first, {shown}(0.1)"
        )
    check_takes(fn, names, what, f"; {_HINTS[names]}" if names in _HINTS else "")


def _first_argument(fn: Any) -> str:
    try:
        return next(iter(inspect.signature(fn).parameters), "")
    except (TypeError, ValueError):
        return ""


def program_of(updater: Updater, key: int) -> Any:
    """What the programs of `init` and `update` depend on. Keys with equal answers share them."""
    if updater.init is not _no_state and getattr(updater.init, "uses_key", True):
        return key
    if updater in (assign, accumulate) or not getattr(updater.update, "uses_key", True):
        return None
    return getattr(updater.update, "program_of", int)(key)


def is_lazy(updater: Any, state: State) -> bool:
    """Whether a push of rows updates these rows only. `update.is_lazy` says otherwise for some updaters.

    Args:
        updater: what a push does.
        state: of the key.
    """
    asked = getattr(getattr(updater, "update", None), "is_lazy", None)
    return asked is None or bool(asked(state))


def check_rows(updater: Any, key: int) -> None:
    """`ValueError` if the updater takes no rows of this key. `update.check_rows` decides."""
    check = getattr(getattr(updater, "update", None), "check_rows", None)
    if check is not None:
        check(key)
