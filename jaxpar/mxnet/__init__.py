"""What only those who come from MXNet need: its optimizers to the bit, its files, its names.

    _optimizers   SGD, NAG, Adam, RMSProp and AdaGrad as updaters, and factors of rate and decay by name
    _options      the options that all of them share, and answers to MXNet's other arguments
    _rules        their formulas
    _params       arrays from `.params` files
    _store_names  kinds, arguments and methods of MXNet's KVStore, and what they are in `jp.kv`

`jp.mxnet.sgd` is also `jp.updaters.mxnet_sgd`, and so on, and `load_params` is `jp.checkpoint.load_mxnet`. So each has
two names here, for those doors to take. The guide is docs/from_mxnet.md.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from ._optimizers import (
    adagrad as adagrad,
    adam as adam,
    multipliers as multipliers,
    mxnet_adagrad as mxnet_adagrad,
    mxnet_adam as mxnet_adam,
    mxnet_nag as mxnet_nag,
    mxnet_rmsprop as mxnet_rmsprop,
    mxnet_sgd as mxnet_sgd,
    mxnet_wd_mult as mxnet_wd_mult,
    nag as nag,
    rmsprop as rmsprop,
    sgd as sgd,
    wd_mult as wd_mult,
)
from ._params import load_mxnet as load_mxnet, load_params as load_params
from ._store_names import (
    ALIASES as _KIND_ALIASES,
    ARGUMENTS as _STORE_ARGUMENTS,
    OTHER_KINDS as _OTHER_KINDS,
    line_for as _line_for,
)
