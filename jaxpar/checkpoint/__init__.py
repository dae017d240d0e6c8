"""Saving and restoring a training state, through orbax and without pickle.

>>> import tempfile
>>> import jax.numpy as jnp
>>> from jaxpar import checkpoint
>>> path = tempfile.mkdtemp() + "/first"
>>> checkpoint.save(path, {"w": jnp.ones(2), "step": jnp.int32(7)})
>>> int(checkpoint.restore(path, {"w": jnp.zeros(2), "step": jnp.int32(0)})["step"])
7
"""

from ._manager import Manager as Manager
from ._manifest import CheckpointError as CheckpointError
from ._save import Found as Found, latest as latest, restore as restore, save as save
