"""What only those who come from MXNet need: its optimizers to the bit, its files, its names.

    _symbol       networks from symbol files: the model and its `apply`
    _graph        such a file as plain data, its operators and variables, the first layer that differs from MXNet's
    _operators    the table of MXNet's operators, with channels last too; _operator is a row of it, and _shapes infers
                  shapes; _layers, _arrays, _elementwise, _images, _boxes, _regions, _losses, _linear_algebra,
                  _random and _control compute them; _numpy is the table of those of `mx.np`
    _elsewhere    names of MXNet that are elsewhere here, and what to write in their place
    _records      RecordIO files, and their images as training data
    _port         a network as the text of a Python module, by _port_blocks, _port_layers and _port_text

Nothing but the command line imports this room. `jp.mxnet.sgd` is `jp.updaters.mxnet_sgd`, and so on, and `load_params`
is `jp.checkpoint.load_mxnet`. The guide is docs/from_mxnet.md.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from ..checkpoint import load_mxnet as load_mxnet, load_mxnet as load_params
from ..updaters import (
    multipliers as multipliers,
    mxnet_adagrad as adagrad,
    mxnet_adagrad as mxnet_adagrad,
    mxnet_adam as adam,
    mxnet_adam as mxnet_adam,
    mxnet_nag as mxnet_nag,
    mxnet_nag as nag,
    mxnet_rmsprop as mxnet_rmsprop,
    mxnet_rmsprop as rmsprop,
    mxnet_sgd as mxnet_sgd,
    mxnet_sgd as sgd,
    mxnet_wd_mult as mxnet_wd_mult,
    mxnet_wd_mult as wd_mult,
)
from ._elsewhere import *  # noqa: F403
from ._graph import Difference as Difference
from ._port import port as port
from ._port_text import formatted as _formatted, text_of as _text_of
from ._records import (
    ImageRecord as ImageRecord,
    RecordFile as RecordFile,
    image_record_source as image_record_source,
    load_list as load_list,
)
from ._symbol import (
    Model as Model,
    load_checkpoint as load_checkpoint,
    load_symbol as load_symbol,
    operator as operator,
)
