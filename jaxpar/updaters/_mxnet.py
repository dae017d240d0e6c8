"""The optimizers of MXNet 1.9.1 as updaters, for results that equal MXNet's step by step.

They differ from optax's of the same name. SGD has the learning rate inside the momentum buffer, weight decay is added
to the gradient in most of them, and epsilon is in other places. g is the pushed sum times `rescale_grad`, w the stored
value. Arithmetic is in the stored dtype, or in float32 if that is narrower.

| | the step |
|---|---|
| sgd | m = momentum·m - rate·(clip(g) + wd·w); w = w + m |
| nag | m = momentum·m; w' = w + momentum·m - (1 + momentum)·rate·(clip(g) + wd·w); m = m - rate·(clip(g) + wd·w') |
| adam | h = clip(g + wd·w); w = w - rate·√(1-β₂ᵗ)/(1-β₁ᵗ)·m/(√v + ε), m and v the running means of h and h² |
| rmsprop | h = clip(g + wd·w); n = γ₁·n + (1-γ₁)·h²; w = w - rate·h/√(n + ε) |
| rmsprop, centered | m the running mean of h too; d = γ₂·d - rate·h/√(n - m² + ε); w = w + d |
| adagrad | h = clip(g); n = n + h²; w = w - rate·(h/√(n + ε) + wd·w) |

`learning_rate` is a number, or a schedule `count -> rate` of the earlier pushes. In a store `count` is the largest of
any key, as in MXNet, so a key that is pushed now and then has the rate of the others. With `rate_in_state` the state of
each key holds the rate, and `set_learning_rate` changes it without a new compilation.
`lr_mult` and `wd_mult` are factors by key, see `multipliers`. Equal arguments give equal updaters, which are one
compiled program.

A push of a `RowSparse` updates the pushed rows only ("lazy"), or the whole table as a dense push would. MXNet does the
same with rows that are pushed into a dense value:

| | lazy |
|---|---|
| sgd | with `lazy_update`, if the value has no float32 copy (`multi_precision`) |
| nag | without momentum, if the value has no float32 copy |
| adam | with `lazy_update` |
| rmsprop | never |
| adagrad | always. Weight decay is refused, as in MXNet |
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any, Unpack

from .._core import checks
from .._core.updater import Updater
from . import _mxnet_rules as rules
from ._mxnet_names import renamed
from ._mxnet_rules import Options, Rate, make


def mxnet_sgd(
    learning_rate: Rate | None = 0.01,
    momentum: float = 0.0,
    wd: float = 0.0,
    *,
    lazy_update: bool = True,
    **common: Unpack[Options],
) -> Updater:
    """MXNet's SGD. A change of the rate acts on new gradients only.

    Args:
        learning_rate: a number, or a schedule `count -> rate`. None is 0.01, as in MXNet.
        momentum: factor of the buffer. 0 keeps none.
        wd: weight decay, added to the clipped gradient as wd · value.
        lazy_update: whether a push of a `RowSparse` updates its rows only.
        **common: `rescale_grad` (1.0), `clip_gradient` (None, or a limit for each element. 0 is none), `lr_mult` and
            `wd_mult` (key -> factor), `multi_precision` (False. Whether the state of a value narrower than float32 has
            a float32 copy, which is what is trained), `begin_num_update` (0, the first count), `rate_in_state` (False).
            The same for every optimizer here.

    Returns:
        An `Updater` of floating values. Its state has the shape of the value, in float32 or wider.

    Raises:
        TypeError: an argument of the wrong kind or name.
        ValueError: a number out of range.

    Example:
        >>> import jax.numpy as jnp
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
    return make(mxnet_sgd, rules.sgd, learning_rate, wd, common, slots, lazy=bool(lazy_update), momentum=momentum)


def mxnet_nag(
    learning_rate: Rate | None = 0.01, momentum: float = 0.0, wd: float = 0.0, **common: Unpack[Options]
) -> Updater:
    """MXNet's Nesterov accelerated gradient. Arguments as of `mxnet_sgd`, without `lazy_update`.

    The momentum contains the weight decay of the value after the step, since MXNet's kernel writes the value first.
    Where MXNet's stored value is row-sparse itself, it contains that of the value before. Values are dense here.

    Example:
        >>> import jax.numpy as jnp
        >>> updater, value = mxnet_nag(0.1, momentum=0.5), jnp.zeros(2)
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].round(3).tolist()
        [-0.15000000596046448, -0.15000000596046448]
    """
    slots = ("momentum",) if momentum else ()
    return make(mxnet_nag, rules.nag, learning_rate, wd, common, slots, lazy=not momentum, momentum=momentum)


def mxnet_adam(
    learning_rate: Rate | None = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    wd: float = 0.0,
    *,
    lazy_update: bool = True,
    **common: Unpack[Options],
) -> Updater:
    """MXNet's Adam. Weight decay is part of the gradient and clipped with it. Others as of `mxnet_sgd`.

    Example:
        >>> import jax.numpy as jnp
        >>> updater, value = mxnet_adam(0.5), jnp.zeros(2)
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].round(3).tolist()
        [-0.5, -0.5]
    """
    checks.number(beta1, "mxnet_adam", "beta1", "a number from 0 to below 1", lambda n: 0 <= n < 1)
    checks.number(beta2, "mxnet_adam", "beta2", "a number from 0 to 1", lambda n: 0 <= n <= 1)
    return make(
        mxnet_adam,
        rules.adam,
        learning_rate,
        wd,
        common,
        ("mean", "variance"),
        lazy=bool(lazy_update),
        lazy_with_master=bool(lazy_update),
        is_counted=True,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
    )


def mxnet_rmsprop(
    learning_rate: Rate | None = 0.001,
    gamma1: float = 0.9,
    epsilon: float = 1e-8,
    wd: float = 0.0,
    *,
    gamma: float | None = None,
    gamma2: float = 0.9,
    centered: bool = False,
    clip_weights: float | None = None,
    **common: Unpack[Options],
) -> Updater:
    """MXNet's RMSProp. Others as of `mxnet_sgd`, without `lazy_update`.

    Args:
        learning_rate, wd: as of `mxnet_sgd`.
        gamma1, gamma: factor of the running means, by two names.
        epsilon: inside the square root.
        gamma2: momentum of the centered form.
        centered: whether the square of the mean gradient is taken off its mean square.
        clip_weights: a limit for each element of the new value. None and 0 are none.
        **common: as of `mxnet_sgd`.

    Example:
        >>> import jax.numpy as jnp
        >>> updater, value = mxnet_rmsprop(0.5, gamma1=0.75), jnp.zeros(2)
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].round(3).tolist()
        [-1.0, -1.0]
    """
    gamma1 = renamed(mxnet_rmsprop, "gamma1", gamma1, "gamma", gamma)
    clip_weights = 0.0 if clip_weights is None else clip_weights
    options: dict[str, Any] = {"gamma1": gamma1, "epsilon": epsilon, "clip_weights": clip_weights}
    rule, slots = rules.rmsprop, ("square",)
    if centered:
        rule, slots, options["gamma2"] = rules.centered_rmsprop, ("square", "mean", "delta"), gamma2
    return make(mxnet_rmsprop, rule, learning_rate, wd, common, slots, lazy=False, **options)


def mxnet_adagrad(
    learning_rate: Rate | None = 0.01,
    epsilon: float = 1e-7,
    wd: float = 0.0,
    *,
    eps: float | None = None,
    **common: Unpack[Options],
) -> Updater:
    """MXNet's AdaGrad. Weight decay is added to the scaled gradient.

    Others as of `mxnet_sgd`, without `lazy_update`. A push of a `RowSparse` to a key with weight decay is refused.

    Args:
        learning_rate, wd: as of `mxnet_sgd`.
        epsilon, eps: inside the square root. `eps` is MXNet's name.
        **common: as of `mxnet_sgd`, but a `clip_gradient` of 0 is refused. In MXNet it makes dense gradients 0 and
            does nothing to rows.

    Example:
        >>> import jax.numpy as jnp
        >>> updater, value = mxnet_adagrad(0.5), jnp.zeros(2)
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].round(3).tolist()
        [-0.5, -0.5]
    """
    epsilon = renamed(mxnet_adagrad, "epsilon", epsilon, "eps", eps)
    if common.get("clip_gradient") == 0:
        raise ValueError("mxnet_adagrad: clip_gradient must be a number above 0, or None for no clipping, got 0")
    rows = {"lazy": True, "lazy_with_master": True, "takes_decay": False}
    return make(mxnet_adagrad, rules.adagrad, learning_rate, wd, common, ("history",), **rows, epsilon=epsilon)


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
