"""Save and restore a training state, through orbax and without pickle.

`_save` saves one checkpoint, restores it and finds the newest good one. `_manager` keeps the checkpoints of a run.
`_leaves` turns a state into named arrays and back, `_hash` gives a hash of them. `_files` writes and reads a directory.
`_manifest` checks what a checkpoint says about itself, and `_owner` knows whose unfinished files may go. `_adopt` takes
a checkpoint from one directory to another. `load_mxnet`, for files of MXNet, is `jp.mxnet.load_params`.

>>> import tempfile
>>> import jax.numpy as jnp
>>> from jaxpar import checkpoint
>>> path = tempfile.mkdtemp() + "/first"
>>> checkpoint.save(path, {"w": jnp.ones(2), "step": jnp.int32(7)})
>>> int(checkpoint.restore(path, {"w": jnp.zeros(2), "step": jnp.int32(0)})["step"])
7
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from ..mxnet import load_mxnet as load_mxnet
from ._adopt import adopt as _adopt, whole_copy as _whole_copy
from ._hash import StateHash as _StateHash, hash_of as _hash_of
from ._manager import Manager as Manager
from ._manifest import CheckpointError as CheckpointError
from ._save import (
    Found as Found,
    best as best,
    latest as latest,
    newest_good as _newest_good,
    restore as restore,
    save as save,
)
