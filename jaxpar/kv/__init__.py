"""The key-value store: pure functions over an immutable pytree.

>>> import jax.numpy as jnp
>>> from jaxpar import kv
>>> store = kv.init(kv.create("device"), 3, jnp.full((2, 3), 2.0))
>>> store = kv.push(store, 3, [jnp.ones((2, 3))] * 4)
>>> kv.pull(store, 3).tolist()
[[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]

Outside `jit`, a push takes arrays or lists of arrays on any devices. Inside `pmap` or `shard_map`, with `axis_name`, a
push takes this device's share and sums over that axis.

docs/architecture.md says which modules a push passes through. `_place` has a store on other devices, and
`_saved` a store in a checkpoint.
"""

from .._store.store import _KIND_NAMES as _KIND_NAMES, KINDS as KINDS, KVStore as KVStore, names as names
from ._create import (
    barrier as barrier,
    create as create,
    init as init,
    num_workers as num_workers,
    rank as rank,
    set_gradient_compression as set_gradient_compression,
    set_optimizer as set_optimizer,
    set_updater as set_updater,
)
from ._params import (
    _NOT_TRAINED as _NOT_TRAINED,
    eval_params as eval_params,
    from_params as from_params,
    to_params as to_params,
)
from ._place import partition_specs as partition_specs, place as place
from ._pull import broadcast as broadcast, pull as pull, row_sparse_pull as row_sparse_pull
from ._push import flush as flush, push as push, pushpull as pushpull
from ._saved import (
    rule_of_each as _rule_of_each,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    with_wide_averages as _with_wide_averages,  # noqa: F401  # pyright: ignore[reportUnusedImport]
)
