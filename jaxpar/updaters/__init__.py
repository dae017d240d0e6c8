"""Updaters: pure functions that apply a push to the stored value.

An `Updater` is a pair of pure functions, as in optax. `init` makes the state of a key. `update` takes the sum of the
pushed values, the state and the stored value, and returns the new value and the new state.

Updaters made of the same parts are equal, so a store with the same `tx` object compiles once. The optimizers of MXNet,
such as `mxnet_sgd`, are in `jp.mxnet`.

    _base         `assign`, `accumulate`, and updaters from functions or optax transforms
    _optimizer    an optax transform of all params; averaged params; the learning rate in the state
    _program      what the program of an update says: whether it is elementwise, and a digest of it for checkpoints
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from .._core.updater import UpdateFn as UpdateFn, Updater as Updater
from ..mxnet import (
    multipliers as multipliers,
    mxnet_adagrad as mxnet_adagrad,
    mxnet_adam as mxnet_adam,
    mxnet_nag as mxnet_nag,
    mxnet_rmsprop as mxnet_rmsprop,
    mxnet_sgd as mxnet_sgd,
    mxnet_wd_mult as mxnet_wd_mult,
)
from ._base import (
    accumulate as accumulate,
    assign as assign,
    check_rows as _check_rows,
    check_updater as _check_updater,
    couples_keys as _couples_keys,
    from_optax as from_optax,
    is_lazy as _is_lazy,
    program_of as _program_of,
    stateless as stateless,
)
from ._optimizer import (
    TreeOptimizer as _TreeOptimizer,
    UnknownOwners as _UnknownOwners,
    average_params as average_params,
    has_average as _has_average,
    learning_rates as learning_rates,
    set_learning_rate as set_learning_rate,
)
from ._program import (
    check_elementwise as _check_elementwise,
    check_elementwise_forms as _check_elementwise_forms,
    check_elementwise_tree as _check_elementwise_tree,
    has_other_numbers as _has_other_numbers,
    is_other_rule as _is_other_rule,
    rule_of_each as _rule_of_each,
)
