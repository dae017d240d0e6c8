"""Data sets as arrays, and batches of them on the devices.

    train = jp.data.load("fashion_mnist", "train")
    for batch in jp.data.batches(train, 256, rng=jax.random.key(0), devices=jax.devices()):
        batch["image"], batch["label"]  # float32 (256, 28, 28, 1) in [0, 1], int32 (256,)

A batch passes through these modules:

    _load      finds, prepares and reads a data set by its name
    _sources   `Dataset`, and `Source`, the interface that `train.fit` needs, for a data set or other arrays
    _batches   the order of the examples, how devices share a batch, and batches that are streamed from the host, or
               gathered from a copy of the data set on each device

`_iterable` reads loaders and data sets of other libraries, and `_elements` converts their elements, and tables of
pandas and polars, to arrays. `_combined` makes one batch of those of several data sets. `_prefetch` sends batches of
any iterator ahead of their use.

Fashion-MNIST: Xiao, Rasul and Vollgraf, 2017, https://arxiv.org/abs/1708.07747.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from .._devices.collectives import PaddedBatch as PaddedBatch
from ._batches import (
    BatchOptions as _BatchOptions,
    BatchPlan as _BatchPlan,
    agree_on_arrays as _agree_on_arrays,
    ahead as _ahead,
    from_host as _from_host,
    order_of as _order_of,
    plan_batches as _plan_batches,
)
from ._combined import (
    CombinedSource as CombinedSource,
    as_source as as_source,
    combine as combine,
    sources_of as _sources_of,
)
from ._elements import as_arrays as _as_arrays
from ._iterable import READ_ONCE as _READ_ONCE, IterableSource as IterableSource, from_iterable as from_iterable
from ._load import FASHION_MNIST_CLASSES as FASHION_MNIST_CLASSES, load as load
from ._prefetch import prefetch as prefetch
from ._sources import (
    ArraySource as ArraySource,
    Batch as Batch,
    Dataset as Dataset,
    DatasetSource as DatasetSource,
    Source as Source,
    batch_groups as batch_groups,
    batch_options as _batch_options,
    batches as batches,
    collect as collect,
    from_arrays as from_arrays,
    go_to as _go_to,
    num_batches as num_batches,
    place_in as _place_in,
    split as split,
    usual_batch_size as _usual_batch_size,
)
