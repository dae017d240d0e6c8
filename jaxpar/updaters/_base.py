"""What makes an updater: `assign` and `accumulate`, plain functions, optax transforms. And what a store asks of one."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._core import checks
from .._core.calls import answers, check_takes
from .._core.recent import Recent
from .._core.updater import State, UpdateFn, Updater

if TYPE_CHECKING:
    import optax


def _no_state(key: int, value: jax.Array) -> State:
    return ()


def _assign(key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
    return pushed, state


def _accumulate(key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
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
    """Make an updater without state from a pure function.

    An `Updater` is compiled into the push. A bare function, given to `kv.set_updater`, runs in Python at every push
    instead, so that it may print.

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
    _check_takes(fn, _PLAIN, "updaters.stateless: the function")
    return Updater(_no_state, _Stateless(fn))


@dataclasses.dataclass(frozen=True)
class _OptaxInit:
    tx: optax.GradientTransformation
    uses_key = False

    def __call__(self, key: int, value: jax.Array) -> State:
        return self.tx.init(value)


@dataclasses.dataclass(frozen=True)
class _OptaxUpdate:
    tx: optax.GradientTransformation
    uses_key = False

    def __call__(self, key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
        updates, state = self.tx.update(pushed, state, stored)
        return (stored + updates).astype(stored.dtype), state  # pyright: ignore[reportOperatorIssue]


@answers("updaters.from_optax")
def from_optax(tx: optax.GradientTransformation) -> Updater:
    """Make an updater from an optax transform. Then push gradients.

    Each key has its own optax state. A transform that couples keys, such as `optax.clip_by_global_norm`, would see one
    key at a time, so `kv.set_optimizer` refuses it. Give such a transform to the training step as `grad_transform`.

    Args:
        tx: the transform. Updaters of the same object are equal. Updaters of two calls `optax.sgd(0.1)` are not.

    Returns:
        An `Updater`. The state of a key is the state of `tx` for its value.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> updater = from_optax(optax.sgd(0.5))
        >>> value = jnp.array([1.0, 2.0])
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].tolist()
        [0.5, 1.5]
    """
    checks.transform(tx, "updaters.from_optax")
    return Updater(_OptaxInit(tx), _OptaxUpdate(tx))


def _is_coupling(tx: optax.GradientTransformation) -> bool:
    """Run `tx` on two vectors. The gradient of the second is ordinary, huge or NaN, and the update of the first must
    not change by a bit.
    """
    others = jnp.stack([jnp.ones(4), jnp.full(4, 1e30), jnp.full(4, jnp.nan)])

    def first_update(other: jax.Array) -> jax.Array:
        ones = jnp.ones(4)
        return tx.update((ones, other), tx.init((ones, ones)), (ones, ones))[0][0]  # pyright: ignore

    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
            first = jax.jit(jax.vmap(first_update))(others)
            return not bool((first == first[:1]).all())
    except Exception:  # an error here is about these two vectors, not about the user's values
        return False


# `couples_keys(tx)`: whether the update of one value depends on the gradient of another, as with clipping by a global
# norm. A transform that cannot take two plain vectors is not judged (False). Its program is released, the answer stays.
couples_keys = Recent(_is_coupling)


_PLAIN = ("key", "pushed", "stored")
_WITH_STATE = ("key", "pushed", "state", "stored")
_HINTS: dict[tuple[str, ...], str] = {
    _PLAIN: "one with a state is jp.updaters.Updater(init, update), and kv.set_optimizer takes an optax transform",
    _WITH_STATE: "one without a state is jp.updaters.stateless(fn)",
}


def check_updater(updater: Any, where: str) -> None:
    """`TypeError` for what is no updater, or for a function that does not take the arguments of a push."""
    # A function that Python cannot inspect is taken.
    if isinstance(updater, Updater):
        _check_takes(updater.init, ("key", "value"), f"{where}: Updater.init")
        _check_takes(updater.update, _WITH_STATE, f"{where}: Updater.update")
    else:
        _check_takes(updater, _PLAIN, f"{where}: an updater")


def _check_takes(fn: Any, names: tuple[str, ...], what: str) -> None:
    shown = getattr(fn, "__name__", type(fn).__name__)
    if _first_argument(fn) == "learning_rate":
        called = f"{what} is called with ({', '.join(names)})"
        raise TypeError(f"{called}, but {shown} makes one; call it first, {shown}(0.1)")
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
    """Whether a push of rows updates these rows only. Where `update.is_lazy(state)` is there, it decides."""
    asked = getattr(getattr(updater, "update", None), "is_lazy", None)
    return asked is None or bool(asked(state))


def check_rows(updater: Any, key: int) -> None:
    """`ValueError` if the updater takes no rows of this key. `update.check_rows` decides."""
    check = getattr(getattr(updater, "update", None), "check_rows", None)
    if check is not None:
        check(key)
