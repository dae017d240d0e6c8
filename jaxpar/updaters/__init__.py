"""Updaters: what a push does to the stored value, as pure functions.

An `Updater` is a pair of pure functions, in the manner of optax. `init` makes the state of a key. `update` takes the
sum of what was pushed, that state and the stored value, and returns the new value and the new state.

Updaters that are made of the same parts are equal. So a store that has one is a stable static argument: the same `tx`
object is one compiled program. The optimizers of MXNet, `mxnet_sgd` and others, are of the room `jp.mxnet`.

    _base          `assign`, `accumulate`, functions and optax transforms as updaters
    _learning_rate the rate in an optimizer's state, read and changed from outside
    _tree          an optax transform that sees all params at once
    _evaluated     averages of params in an optimizer's state, for evaluation
    _shares        refuses an updater that is not elementwise, where values are split over devices
    _rule          what an update computes, as a digest for checkpoints
    _elementwise   whether a program is elementwise, read from its jaxpr
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
from ._evaluated import average_params as average_params, has_average as _has_average
from ._learning_rate import learning_rates as learning_rates, set_learning_rate as set_learning_rate
from ._rule import is_other_rule as _is_other_rule, rule_of_each as _rule_of_each
from ._shares import (
    check_elementwise as _check_elementwise,
    check_elementwise_forms as _check_elementwise_forms,
    check_elementwise_tree as _check_elementwise_tree,
)
from ._tree import TreeOptimizer as _TreeOptimizer, UnknownOwners as _UnknownOwners
