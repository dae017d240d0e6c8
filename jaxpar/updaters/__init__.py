"""Updaters: pure functions that apply a push to the stored value.

An `Updater` is a pair of pure functions, as in optax. `init` makes the state of a key. `update` takes the sum of the
pushed values, the state and the stored value, and returns the new value and the new state.

Updaters made of the same parts are equal, so a store with the same `tx` object compiles once.

    _updaters    `assign`, `accumulate`, updaters from functions or optax transforms, an optax transform of all params
    _mxnet       the optimizers of MXNet to the bit, such as `mxnet_sgd`; _mxnet_rules has their formulas
    _elementwise whether an update may be made for a share of a value
    _lazy        whether an optimizer of all params may be given rows of a table
    _rules       a digest of what an update computes, by which a checkpoint knows its optimizer again
    _jaxprs      how these read the program of an update
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from .._core.updater import UpdateFn as UpdateFn, Updater as Updater
from ._elementwise import (
    check_elementwise as _check_elementwise,
    check_elementwise_tree as _check_elementwise_tree,
)
from ._lazy import lazy_fault as _lazy_fault, transform_fault as _transform_fault
from ._mxnet import (
    multipliers as multipliers,
    mxnet_adagrad as mxnet_adagrad,
    mxnet_adam as mxnet_adam,
    mxnet_nag as mxnet_nag,
    mxnet_rmsprop as mxnet_rmsprop,
    mxnet_sgd as mxnet_sgd,
    mxnet_wd_mult as mxnet_wd_mult,
)
from ._rules import difference_of_rules as _difference_of_rules, rule_of_each as _rule_of_each
from ._updaters import (
    AverageState as _AverageState,
    TreeOptimizer as _TreeOptimizer,
    UnknownOwners as _UnknownOwners,
    accumulate as accumulate,
    assign as assign,
    average_params as average_params,
    averages as _averages,
    check_rows as _check_rows,
    check_updater as _check_updater,
    couples_keys as _couples_keys,
    from_optax as from_optax,
    is_lazy as _is_lazy,
    learning_rates as learning_rates,
    rate_arrays as _rate_arrays,
    rate_names as _rate_names,
    set_learning_rate as set_learning_rate,
    stateless as stateless,
    takes_padding as _takes_padding,
)
