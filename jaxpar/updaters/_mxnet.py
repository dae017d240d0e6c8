"""The optimizers of MXNet 1.9.1 as updaters, for results that equal MXNet's step by step.

They differ from optax's of the same name. SGD has the learning rate inside the momentum buffer, weight decay is added
to the gradient in most of them, and epsilon is in other places. g is the pushed sum times `rescale_grad`, w the stored
value. Arithmetic is in the stored dtype, or in float32 if that is narrower.

| | the step |
|---|---|
| sgd | m = momentum·m - rate·(clip(g) + wd·w); w = w + m |
| nag | m = momentum·m - rate·(clip(g) + wd·w); w = w + momentum·m - rate·(clip(g) + wd·w) |
| adam | h = clip(g + wd·w); w = w - rate·√(1-β₂ᵗ)/(1-β₁ᵗ)·m/(√v + ε), m and v the running means of h and h² |
| rmsprop | h = clip(g + wd·w); n = γ·n + (1-γ)·h²; w = w - rate·h/√(n + ε) |
| adagrad | h = clip(g); n = n + h²; w = w - rate·(h/√(n + ε) + wd·w) |

`learning_rate` is a number, or a schedule `count -> rate` of the key's earlier pushes, as in optax. With
`rate_in_state` the state of each key holds the rate, and `set_learning_rate` changes it without a new compilation.
`lr_mult` and `wd_mult` are factors by key, see `multipliers`. Equal arguments give equal updaters, which are one
compiled program.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping
from typing import Any, TypeVar, Unpack

import jax
import jax.numpy as jnp

from ._base import Updater
from ._mxnet_rules import Options, Rate, adagrad, adam, make, nag, rmsprop, sgd

Tree = TypeVar("Tree")


def mxnet_sgd(learning_rate: Rate = 0.01, momentum: float = 0.0, wd: float = 0.0, **common: Unpack[Options]) -> Updater:
    """MXNet's SGD. A change of the rate acts on new gradients only.

    Args:
        learning_rate: a number, or a schedule `count -> rate`.
        momentum: factor of the buffer. 0 keeps none.
        wd: weight decay, added to the clipped gradient as wd · value.
        **common: `rescale_grad` (1.0), `clip_gradient` (None, or a limit for each element), `lr_mult` and `wd_mult`
            (key -> factor), `rate_in_state` (False). The same for every optimizer here.

    Returns:
        An `Updater` of floating values. Its state has the shape of the value, in float32 or wider.

    Raises:
        TypeError: an argument of the wrong kind or name.
        ValueError: a number out of range.

    Example:
        >>> updater = mxnet_sgd(lambda count: jnp.where(count < 2, 1.0, 0.1), momentum=0.9)
        >>> value, state = jnp.zeros(()), updater.init(0, jnp.zeros(()))
        >>> for _ in range(4):
        ...     value, state = updater.update(0, jnp.ones(()), state, value)
        ...     print(round(float(value), 3))
        -1.0
        -2.9
        -4.71
        -6.439
    """
    slots = ("momentum",) if momentum else ()
    return make(sgd, slots, {"momentum": momentum}, learning_rate, wd, common)


def mxnet_nag(learning_rate: Rate = 0.1, momentum: float = 0.9, wd: float = 0.0, **common: Unpack[Options]) -> Updater:
    """MXNet's Nesterov accelerated gradient. Arguments as of `mxnet_sgd`.

    Example:
        >>> updater, value = mxnet_nag(0.1, momentum=0.5), jnp.zeros(2)
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].round(3).tolist()
        [-0.15000000596046448, -0.15000000596046448]
    """
    slots = ("momentum",) if momentum else ()
    return make(nag, slots, {"momentum": momentum}, learning_rate, wd, common)


def mxnet_adam(
    learning_rate: Rate = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    wd: float = 0.0,
    **common: Unpack[Options],
) -> Updater:
    """MXNet's Adam. Weight decay is part of the gradient and clipped with it. `common` as of `mxnet_sgd`.

    Example:
        >>> updater, value = mxnet_adam(0.5), jnp.zeros(2)
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].round(3).tolist()
        [-0.5, -0.5]
    """
    options = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    return make(adam, ("mean", "variance"), options, learning_rate, wd, common, counted=True)


def mxnet_rmsprop(
    learning_rate: Rate = 0.001,
    gamma: float = 0.9,
    epsilon: float = 1e-8,
    wd: float = 0.0,
    **common: Unpack[Options],
) -> Updater:
    """MXNet's RMSProp, not centred. `gamma` is MXNet's gamma1, `common` as of `mxnet_sgd`.

    Example:
        >>> updater, value = mxnet_rmsprop(0.5, gamma=0.75), jnp.zeros(2)
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].round(3).tolist()
        [-1.0, -1.0]
    """
    return make(rmsprop, ("square",), {"gamma": gamma, "epsilon": epsilon}, learning_rate, wd, common)


def mxnet_adagrad(
    learning_rate: Rate = 0.01, epsilon: float = 1e-7, wd: float = 0.0, **common: Unpack[Options]
) -> Updater:
    """MXNet's AdaGrad. Weight decay is added to the scaled gradient. `common` as of `mxnet_sgd`.

    Example:
        >>> updater, value = mxnet_adagrad(0.5), jnp.zeros(2)
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].round(3).tolist()
        [-0.5, -0.5]
    """
    return make(adagrad, ("history",), {"epsilon": epsilon}, learning_rate, wd, common)


def set_learning_rate(state: Tree, learning_rate: float | jax.Array) -> Tree:
    """The same state with another rate. Nothing recompiles.

    Only the optimizer's rate changes. A parameter or a model's own array of this name stays as it is.

    Args:
        state: of one key of an optimizer made with `rate_in_state=True`, a list or {key: state} of such states, or the
            state of `optax.inject_hyperparams`. Or a `KVStore`, a `TrainState` or a part of them with such states.
        learning_rate: a number or 0-d array.

    Returns:
        A pytree of the same structure, shapes and dtypes.

    Raises:
        ValueError: no rate is in `state`, or it follows a schedule of optax.

    Example:
        >>> updater = mxnet_sgd(1.0, rate_in_state=True)
        >>> state = set_learning_rate(updater.init(0, jnp.zeros(2)), 0.1)
        >>> updater.update(0, jnp.ones(2), state, jnp.zeros(2))[0].tolist() == jnp.full(2, -0.1).tolist()
        True
    """
    found: list[tuple[Any, ...]] = []

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        if _is_scheduled(path):
            raise ValueError("set_learning_rate: this rate follows a schedule; give optax.inject_hyperparams a number")
        if _is_rate(path):
            found.append(path)
            # In the array's own dtype and place, so that a compiled step takes it as it took the old one.
            return jnp.zeros_like(leaf) + jnp.asarray(learning_rate, leaf.dtype)
        return leaf

    state = jax.tree_util.tree_map_with_path(replace, state)
    if not found:
        raise ValueError(
            "set_learning_rate: no rate in this state; make the optimizer with rate_in_state=True, or by "
            "optax.inject_hyperparams"
        )
    return state


def _is_rate(path: tuple[Any, ...]) -> bool:
    """Whether this is where an optimizer has its rate.

    That is in the hyperparameters of optax, or directly in the state of a key. All else of this name is a parameter, or
    belongs to one.
    """
    steps = _steps(path)
    if not steps or steps[-1] != "learning_rate" or "model_state" in steps:
        return False
    if steps[-2:-1] == ["hyperparams"]:
        return True
    inner = steps[steps.index("updater_state") + 1 : -1] if "updater_state" in steps else steps[:-1]
    return all(isinstance(step, int) for step in inner)


def _is_scheduled(path: tuple[Any, ...]) -> bool:
    return ("hyperparams_states", "learning_rate") in itertools.pairwise(_steps(path))


def _steps(path: tuple[Any, ...]) -> list[Any]:
    return [getattr(p, "name", getattr(p, "key", getattr(p, "idx", None))) for p in path]


def multipliers(names: Mapping[int, str], patterns: Mapping[str, float]) -> dict[int, float]:
    """Factors by key out of factors by name, for `lr_mult` and `wd_mult`.

    Args:
        names: key -> name, as `kv.names(store)` gives it.
        patterns: name or pattern (`*`, `?`, `[...]`, case matters) -> factor. If several match, the last one counts.

    Returns:
        {key: factor} of the keys whose name matches.

    Raises:
        ValueError: a pattern that matches no name.

    Example:
        >>> names = {0: "conv1/weight", 1: "conv1/bias", 2: "dense1/bias"}
        >>> multipliers(names, {"*/bias": 2.0, "dense1/*": 0.5})
        {1: 2.0, 2: 0.5}
    """
    factors: dict[int, float] = {}
    for pattern, factor in patterns.items():
        keys = [k for k, name in names.items() if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not keys:
            raise ValueError(f"multipliers: {pattern!r} matches no name, known are {', '.join(names.values())}")
        factors.update(dict.fromkeys(keys, factor))
    return dict(sorted(factors.items()))


def mxnet_wd_mult(names: Mapping[int, str], kinds: tuple[str, ...] = ("weight", "gamma")) -> dict[int, float]:
    """MXNet's own rule: no weight decay for biases and the like.

    Only keys whose name ends in one of `kinds` keep it. The last word of a name counts, so `conv1/weight` and
    `['conv1']['weight']` end in `weight` as `conv1_weight` does.

    Args:
        names: key -> name, as `kv.names(store)` gives it.
        kinds: the last words that keep their decay. `("kernel", "scale")` for Flax.

    Returns:
        {key: 0.0} of the other keys, for `wd_mult`.

    Example:
        >>> mxnet_wd_mult({0: "conv1_weight", 1: "conv1_bias", 2: "norm/gamma", 3: "norm/beta"})
        {1: 0.0, 3: 0.0}
    """
    last_word = re.compile(rf"(^|[\W_])({'|'.join(map(re.escape, kinds))})\W*$")
    return {key: 0.0 for key, name in names.items() if not last_word.search(name)}
