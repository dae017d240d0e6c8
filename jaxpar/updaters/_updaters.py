"""Updaters of one key, optimizers of all params, and what their states hold: averages to evaluate, learning rates."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._core import checks
from .._core.arrays import KeyPath, PyTree
from .._core.functions import check_takes
from .._core.recent import Recent
from .._core.transfers import allows_transfers
from .._core.updater import Grads, Params, State, UpdateFn, Updater
from ._jaxprs import dependence

if TYPE_CHECKING:
    import optax

AnyState = TypeVar("AnyState")
Average = Callable[[Any, Params], Params]  # (node of an optimizer's state, params) -> params to evaluate


def _no_state(key: int, value: jax.Array) -> State:
    return ()


def _assign(key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
    return pushed, state


def _accumulate(key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
    return stored + pushed, state


assign: Updater = Updater(_no_state, _assign)
accumulate: Updater = Updater(_no_state, _accumulate)


# The functions of an updater are frozen dataclasses, not closures: those made of one transform are equal, so a push
# finds its program also with an updater that was made again. With `uses_key = False` pushes of other keys in the same
# shapes share a program.


@dataclasses.dataclass(frozen=True)
class _Stateless:
    fn: UpdateFn

    def __call__(self, key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
        return self.fn(key, pushed, stored), state


def stateless(fn: UpdateFn) -> Updater:
    """Make an updater without state from a pure function.

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
    check_takes(fn, _PLAIN, "updaters.stateless: the function", _OTHERS)
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


def from_optax(tx: optax.GradientTransformation) -> Updater:
    """Make an updater from an optax transform. Then push gradients.

    Each key has its own optax state. A transform that couples keys, such as `optax.clip_by_global_norm`, sees one key
    at a time here, so `kv.set_optimizer(store, tx)` refuses it. Give such a transform to the training step as
    `grad_transform`. If each key by itself is what you want, give this updater to `kv.set_optimizer`.

    Args:
        tx: the transform. Updaters of the same object are equal. Updaters of two calls `optax.sgd(0.1)` are not.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> updater = from_optax(optax.sgd(0.5))
        >>> value = jnp.array([1.0, 2.0])
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].tolist()
        [0.5, 1.5]
    """
    checks.transform(tx, "updaters.from_optax")
    return Updater(_OptaxInit(tx), _OptaxUpdate(tx))


@Recent
def couples_keys(tx: optax.GradientTransformation) -> bool:
    """Whether updates of one param depend on the gradient or the value of another, as with clipping by a global norm.

    A transform that cannot be traced for two vectors is not judged (False).
    """
    # The elements of the second of two params are marked. What a step leaves marked in the state marks more in the next
    # one, so steps are repeated until nothing is added: `optax.MultiSteps` couples in a later step than the first.
    value = jax.ShapeDtypeStruct((4,), jnp.float32)
    params, second = (value, value), (np.zeros(4, bool), np.ones(4, bool))
    try:
        state = jax.eval_shape(tx.init, params)
        step = dependence(tx.update, params, state, params)
        before: State = jax.tree.map(lambda x: np.zeros(x.shape, bool), state)
        while True:
            (first, _), after = step(second, before, second)
            after = jax.tree.map(np.logical_or, before, after)
            if first.any() or jax.tree.all(jax.tree.map(np.array_equal, before, after)):
                return bool(first.any())
            before = after
    except Exception:  # an error here is about these two vectors, not about the user's values
        return False


_PLAIN = ("key", "pushed", "stored")
_OTHERS = "; one with a state is jp.updaters.Updater(init, update), and kv.set_optimizer takes an optax transform"


def check_updater(updater: object, caller: str) -> None:
    """`TypeError` for what is no updater, or for a function that does not take the arguments of a push."""
    # A function that Python cannot inspect is taken.
    if isinstance(updater, Updater):
        check_takes(updater.init, ("key", "value"), f"{caller}: Updater.init")
        hint = "; one without a state is jp.updaters.stateless(fn)"
        check_takes(updater.update, ("key", "pushed", "state", "stored"), f"{caller}: Updater.update", hint)
    else:
        check_takes(updater, _PLAIN, f"{caller}: an updater", _OTHERS)


def program_of(updater: Updater, key: int) -> Hashable:
    """What the programs of `init` and `update` depend on. Keys with equal answers share them."""
    if updater.init is not _no_state and getattr(updater.init, "uses_key", True):
        return key
    if updater in (assign, accumulate) or not getattr(updater.update, "uses_key", True):
        return None
    return getattr(updater.update, "program_of", int)(key)


def is_lazy(updater: object, state: State) -> bool:
    """Whether a push of rows updates these rows alone. Some of MXNet's optimizers update the whole table."""
    ask = getattr(getattr(updater, "update", None), "is_lazy", None)
    return ask is None or ask(state)


def takes_padding(updater: object) -> bool:
    """Whether rows of zeros among those that are pushed change nothing: of MXNet's optimizers, which see each alone."""
    # Others may look at all rows at once, such as `optax.adafactor` at their mean square.
    return updater in (assign, accumulate) or hasattr(getattr(updater, "update", None), "is_lazy")


def check_rows(updater: object, key: int) -> None:
    """`ValueError` for one of MXNet's optimizers that cannot be pushed rows of this key."""
    check = getattr(getattr(updater, "update", None), "check_rows", None)
    if check is not None:
        check(key)


# An optimizer that sees all params at once.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Placeholder:
    """Stands in a pytree for a param. It has no leaves, so functions that map over the params copy it."""

    key: int


def first_line(error: Exception) -> str:
    """An error of an optimizer's own in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


class UnknownOwners(Exception):
    """Why nobody can tell which leaf of an optimizer's state belongs to which param."""


@dataclasses.dataclass(frozen=True)
class TreeOptimizer:
    """An optax transform that sees all params at once. `kv.from_params(params, optimizer=tx)` makes it.

    The same `tx` object makes an equal optimizer, another `optax.sgd(0.1)` does not.
    """

    tx: optax.GradientTransformation

    def init(self, params: Params) -> State:
        import optax

        try:
            state = self.tx.init(params)
        except ValueError as error:
            message = str(error).strip().partition("\n")[0]
            if "pytree structure error" not in message:
                raise
            raise ValueError(
                "optimizer: the labels or the mask of this optimizer have another structure than the params "
                f"({message}); name all params, those that frozen= leaves out too, or give a function of the params"
            ) from None
        return Lookahead(state, params) if isinstance(state, optax.LookaheadState) else state

    def update(
        self, grads: Grads, state: State, params: Params, value: jax.Array | None = None
    ) -> tuple[Params, State]:
        """The next params, in their dtypes, and the next state. A transform that takes `value=` gets the loss."""
        import optax

        # The params and the state as the transform itself has them.
        seen, inner = params, state
        if isinstance(state, Lookahead):
            seen, inner = optax.LookaheadParams(fast=params, slow=state.slow), state.state
        tx = self.tx  # `optax.MultiSteps` is no GradientTransformation, and takes more arguments than the gradients
        if isinstance(tx, optax.GradientTransformation):
            tx = optax.with_extra_args_support(tx)
        loss_and_grads = {} if value is None else {"value": value, "grad": grads}
        try:
            updates, inner = tx.update(grads, inner, seen, **loss_and_grads)
        except TypeError as error:
            if value is None or "unexpected keyword argument" not in str(error):
                raise
            # `optax.contrib.sam` takes no other arguments, although its type says that it does.
            updates, inner = tx.update(grads, inner, seen)
        new: Params = optax.apply_updates(seen, updates)
        return (new.fast, Lookahead(inner, new.slow)) if isinstance(state, Lookahead) else (new, inner)

    def owners(self, params: Params) -> list[int | None]:
        """For each leaf of the state the position of the param that it belongs to. None: to no single one.

        `UnknownOwners` where `init` needs the params themselves, or puts several of them into one array.
        """
        # `init` is evaluated on params that have no leaves, each with its position. Where such a one stands in the
        # state, what `init` gives there for arrays belongs to that param. Nothing is computed. `optax.tree_map_params`
        # puts one placeholder for all params: it fails where `init` keeps several arrays for each param, or looks at
        # the structure of the params, and for each optimizer of optax gives the same.
        structure = jax.tree.structure(params)
        owners: list[int | None] = []

        def note(owner: _Placeholder | jax.ShapeDtypeStruct, subtree: PyTree) -> None:
            owners.extend([owner.key if isinstance(owner, _Placeholder) else None] * len(jax.tree.leaves(subtree)))
            if not isinstance(owner, _Placeholder) and owner.shape != subtree.shape:
                raise UnknownOwners(f"its state has an array for several params together, of shape {subtree.shape}")

        state = jax.eval_shape(self.init, params)
        try:
            marked = jax.eval_shape(self.init, structure.unflatten(map(_Placeholder, range(structure.num_leaves))))
            jax.tree.map(note, marked, state, is_leaf=lambda x: isinstance(x, _Placeholder))
        except UnknownOwners:
            raise
        except Exception as error:  # any error is the optimizer's own
            raise UnknownOwners(f"its init does not map over the params: {first_line(error)}") from error
        return owners

    def evaluated(self, state: State, params: Params) -> Params:
        """The params to evaluate, where these are others than those that are trained."""
        for average, node in averages(state):
            params = average(node, params)
        return params

    def reads_loss(self, params: Params) -> bool:
        """Whether an update depends on the loss. Nothing is computed."""

        def update(value: jax.Array, grads: Grads, state: State, params: Params) -> tuple[Params, State]:
            return self.update(grads, state, params, value)

        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        # The loss alone is marked. What is marked of the result depends on it.
        state = jax.eval_shape(self.init, specs)
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        unmarked = jax.tree.map(lambda x: np.zeros(x.shape, bool), (specs, state, specs))
        marked = dependence(update, loss, specs, state, specs)(np.True_, *unmarked)
        return any(marks.any() for marks in jax.tree.leaves(marked))


# Averages of params, which are evaluated in place of those that are trained.


class Lookahead(NamedTuple):
    """The state of `optax.lookahead`. The fast params are those of the store."""

    state: State  # that of the transform
    slow: Params  # the slow params


class AverageState(NamedTuple):
    """The state of `average_params`."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  # int32, the updates so far
    average: Params  # of the params


def average_params(decay: float) -> optax.GradientTransformation:
    """Keep an exponential moving average of the params for evaluation.

    Make it the last transform of an `optax.chain`. Updates pass unchanged. After each update, average = decay · average
    + (1 - decay) · params. The average starts at the first params. It is kept in float32 or wider. `kv.eval_params`,
    `state.eval_params`, `train.evaluate` and `train.predict` use the average, in the dtypes of the params.

    Args:
        decay: between 0 and 1, such as 0.999.

    Raises:
        ValueError: the decay is out of range.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv, updaters
        >>> tx = optax.chain(optax.sgd(1.0), updaters.average_params(0.5))
        >>> store = kv.from_params({"w": jnp.zeros(1)}, optimizer=tx)
        >>> store = kv.push(store, 0, -jnp.ones(1))
        >>> kv.to_params(store)["w"].tolist(), kv.eval_params(store)["w"].tolist()
        ([1.0], [0.5])
    """
    import optax

    if not 0 <= decay < 1:
        raise ValueError(f"average_params: decay must be at least 0 and below 1, got {decay!r}")

    def init(params: Params) -> AverageState:
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(_at_least_float32, params))

    def update(updates: Grads, state: AverageState, params: Params = None) -> tuple[Grads, AverageState]:
        new = optax.apply_updates(params, updates)

        def mean(a: jax.Array, p: jax.Array) -> jax.Array:
            return (decay * a + (1 - decay) * _at_least_float32(p)).astype(a.dtype)

        return updates, AverageState(state.count + 1, jax.tree.map(mean, state.average, new))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _at_least_float32(x: ArrayLike) -> jax.Array:
    array = jnp.asarray(x)
    is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return array.astype(jnp.float32) if is_narrow else array


def averages(state: State) -> list[tuple[Average, Any]]:
    """The parts of an optimizer's state that hold averages, each with the function that reads it."""
    import optax.contrib as contrib

    averages_of: dict[type, Average] = {
        Lookahead: lambda node, params: node.slow,
        AverageState: lambda node, params: _where_averaged(lambda average, _: average, node.average, params),
        contrib.ScheduleFreeState: lambda node, params: _where_averaged(
            lambda z, param: contrib.schedule_free_eval_params(node._replace(z=z), param), node.z, params
        ),
        contrib.SAMState: _outside_perturbation,
    }
    nodes = jax.tree.leaves(state, is_leaf=lambda x: type(x) in averages_of)
    return [(averages_of[type(node)], node) for node in nodes if type(node) in averages_of]


def _where_averaged(average: Callable[[jax.Array, jax.Array], jax.Array], averaged: PyTree, params: Params) -> Params:
    """`average(leaf of averaged, leaf of params)`, in the dtypes of the params.

    Params without an average, as under `optax.masked`, stay as they are.
    """
    import optax

    def leaf(averaged: jax.Array | optax.MaskedNode | None, param: jax.Array) -> jax.Array:
        if averaged is None or isinstance(averaged, optax.MaskedNode):
            return param
        return average(averaged, param).astype(param.dtype)

    return jax.tree.map(leaf, averaged, params, is_leaf=lambda x: x is None or isinstance(x, optax.MaskedNode))


def _outside_perturbation(state: Any, params: Params) -> Params:
    """Of `optax.contrib.sam`: the params before its present round of adversarial steps."""
    if state.cache is None:
        return params
    inside = state.steps_since_sync > 0
    return _where_averaged(lambda cached, param: jnp.where(inside, cached, param), state.cache, params)


# The learning rate, changed from outside.


@allows_transfers
def set_learning_rate(state: AnyState, learning_rate: float | jax.Array) -> AnyState:
    """Change the learning rate in a state, without recompilation.

    Only the optimizer's rate changes. Parameters and other arrays named `learning_rate` stay unchanged.

    Args:
        state: a `TrainState`, a `KVStore`, or a part of these, with an optimizer made with `rate_in_state=True` or with
            `optax.inject_hyperparams`; or an optimizer state, a list of states or a dict {key: state}.
        learning_rate: a number or 0-d array.

    Raises:
        ValueError: `state` has no rate, or the rate follows a schedule; `learning_rate` is not one finite number.

    Example:
        >>> from jaxpar import updaters
        >>> updater = updaters.mxnet_sgd(1.0, rate_in_state=True)
        >>> state = set_learning_rate(updater.init(0, jnp.zeros(2)), 0.1)
        >>> updater.update(0, jnp.ones(2), state, jnp.zeros(2))[0].tolist() == jnp.full(2, -0.1).tolist()
        True
    """
    if np.ndim(learning_rate):
        raise ValueError(f"set_learning_rate: learning_rate must be one number, got shape {np.shape(learning_rate)}")
    if not isinstance(learning_rate, jax.Array) and not np.isfinite(learning_rate):
        raise ValueError(f"set_learning_rate: learning_rate must be finite, got {learning_rate}")
    paths: list[KeyPath] = []  # of the rates that are changed

    def replace(path: KeyPath, leaf: Any) -> Any:
        if ("hyperparams_states", "learning_rate") in itertools.pairwise(_steps(path)):
            raise ValueError("set_learning_rate: this rate follows a schedule; give optax.inject_hyperparams a number")
        if _is_rate(path):
            paths.append(path)
            # In the array's own dtype and place, so that a compiled step takes it as it took the old one.
            return jnp.zeros_like(leaf) + jnp.asarray(learning_rate, leaf.dtype)
        return leaf

    state = jax.tree_util.tree_map_with_path(replace, state)
    if not paths:
        raise ValueError(
            "set_learning_rate: this state has no learning rate; make the optimizer with rate_in_state=True, or by "
            "optax.inject_hyperparams"
        )
    return state


@allows_transfers
def learning_rates(state: PyTree) -> dict[str, float]:
    """The learning rates in a state, {path: rate}. Waits for the state.

    Args:
        state: as for `set_learning_rate`. The rate may follow a schedule.

    Returns:
        One rate for each optimizer with a rate in the state, or {}.

    Example:
        >>> import optax
        >>> from jaxpar import kv
        >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        >>> store = kv.from_params({"w": jnp.zeros(2)}, optimizer=tx)
        >>> list(learning_rates(store).values())
        [0.5]
    """
    return {path: float(rate) for path, rate in rate_arrays(state).items()}


def rate_arrays(state: PyTree) -> dict[str, jax.Array]:
    """As `learning_rates`, as the scalars of the state, which may be traced."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    rates = {path: leaf for path, leaf in leaves if _is_rate(path) and jnp.ndim(leaf) == 0}
    return {"/".join(map(str, _steps(path))): leaf for path, leaf in rates.items()}


def rate_names(paths: Collection[str]) -> list[str]:
    """A name for each of several rates: what its path does not share with the others, or else its number."""
    steps = [path.split("/") for path in paths]
    common = set.intersection(*map(set, steps))
    names = ["_".join(step for step in each if step not in common) for each in steps]
    return [name or str(i) for i, name in enumerate(names)]


def _is_rate(path: KeyPath) -> bool:
    """Whether this is where an optimizer has its rate."""
    # That is in the hyperparameters of optax, or directly in the state of a key. All else of this name is a parameter,
    # or belongs to one.
    steps = _steps(path)
    if not steps or steps[-1] != "learning_rate" or "model_state" in steps:
        return False
    if steps[-2:-1] == ["hyperparams"] and isinstance(path[-2], jax.tree_util.GetAttrKey):
        return True
    inner = steps[steps.index("updater_state") + 1 : -1] if "updater_state" in steps else steps[:-1]
    return all(isinstance(step, int) for step in inner)


def _steps(path: KeyPath) -> list[str | int | None]:
    """The names, keys and positions of a path."""
    return [getattr(p, "name", getattr(p, "key", getattr(p, "idx", None))) for p in path]
