"""Updaters: what a push does to the stored value, as pure functions.

An `Updater` is a pair of pure functions, in the manner of optax: `init` makes the state that belongs to a key,
`update` turns what was pushed (summed over devices), that state and the stored value into the new stored value
and the new state. MXNet's updater mutated the stored array and its return value was ignored; here it is the
other way round. MXNet's own optimizers are here too (`mxnet_sgd`, ...; see `jaxpar.updaters._mxnet`).

All of these compare equal when they are made from the same parts, so a store that carries one is a stable
static argument: the same `tx` object is one compiled program.
"""

from ._base import (
    UpdateFn as UpdateFn,
    Updater as Updater,
    accumulate as accumulate,
    assign as assign,
    ignores_key as ignores_key,
    program_of as program_of,
    stateless as stateless,
)
from ._mxnet import (
    multipliers as multipliers,
    mxnet_adagrad as mxnet_adagrad,
    mxnet_adam as mxnet_adam,
    mxnet_nag as mxnet_nag,
    mxnet_rmsprop as mxnet_rmsprop,
    mxnet_sgd as mxnet_sgd,
    mxnet_wd_mult as mxnet_wd_mult,
    set_learning_rate as set_learning_rate,
)
from ._optax import couples_keys as couples_keys, from_optax as from_optax
from ._shares import check_elementwise as check_elementwise, check_elementwise_forms as check_elementwise_forms
