"""Save and restore a training state, through orbax and without pickle.

    _save      saves, restores and finds checkpoints, and writes those of a run
    _leaves    a state as named arrays, and back, and a hash of them
    _arrays    arrays on disk: each process writes its shards by orbax, and reads and verifies what it needs
    _files     writes, verifies, reads and copies the directory of a checkpoint: arrays and their manifest
    _bucket    objects in a bucket, `gs://` or `s3://`, and how a checkpoint there is whole or not at all
    _format1   reads the checkpoints of jaxpar 0.1 and 0.2, for one more release
    _safetensors   params by name in a file that other programs read
    _mxnet     arrays from `.params` files of MXNet, and back
    _run       what a run keeps beside its checkpoints: the lock of the one process that writes, and its records

`load_mxnet` reads files of MXNet, as `jp.mxnet.load_params` does.

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
from ._bucket import AnyPath as _AnyPath, BucketPath as BucketPath, as_path as _as_path
from ._files import (
    MANIFEST as _MANIFEST,
    CheckpointError as CheckpointError,
    adopt as _adopt,
    check_writable as _check_writable,
    newest_first as _newest_first,
    of_step as _of_step,
    whole_copy as _whole_copy,
)
from ._leaves import StateHash as _StateHash, hash_sums as _hash_sums
from ._mxnet import load_mxnet as load_mxnet, to_bytes as _mxnet_bytes
from ._run import DirectoryLock as _DirectoryLock, Records as _Records
from ._safetensors import export as export, load as load
from ._save import (
    Found as Found,
    Manager as Manager,
    best as best,
    latest as latest,
    newest_good as _newest_good,
    place as _place,
    restore as restore,
    save as save,
)
