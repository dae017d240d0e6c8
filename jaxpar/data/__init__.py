"""Data sets as arrays, and their batches, gathered on the devices.

    train = jp.data.load("fashion_mnist", "train")
    for batch in jp.data.batches(train, 256, rng=jax.random.key(0), devices=jax.devices()):
        batch["image"], batch["label"]  # float32 (256, 28, 28, 1) in [0, 1], int32 (256,)

A batch of a data set goes one way:

    _load           find the files: `_tfds` reads what TFDS prepared, `_idx` the four files of Fashion-MNIST,
                    `_decoded_cache` what was decoded before
    _dataset        the value: images, labels and their origin
    _batches        which examples each batch has, from the host or from the devices
    _shuffle        the order of an epoch
    _device_copies  the data set on each device
    _gather         the compiled programs that take batches out of it
    _split          how a batch is split over the devices of a mesh
    _parts          which examples are for training, which for validation
    _prefetch       batches of any iterator, sent to the devices ahead of their use

`train.fit` sees a `Source` only. `_sources` has this protocol, and data sets and arrays as sources. `_iterable` has
what other libraries iterate over, and `_convert` their elements as arrays.

Fashion-MNIST: Xiao, Rasul and Vollgraf, 2017, https://arxiv.org/abs/1708.07747.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from .._devices.padded import PaddedBatch as PaddedBatch
from ._batches import Batch as Batch, batches as batches, num_batches as num_batches
from ._dataset import Dataset as Dataset
from ._iterable import IterableSource as IterableSource, collect as collect, from_iterable as from_iterable
from ._load import FASHION_MNIST_CLASSES as FASHION_MNIST_CLASSES, load as load
from ._prefetch import prefetch as prefetch
from ._sources import (
    ArraySource as ArraySource,
    DatasetSource as DatasetSource,
    Source as Source,
    as_source as as_source,
    batch_groups as batch_groups,
    from_arrays as from_arrays,
    split as split,
    takes_sharding as _takes_sharding,
    virtual_options as _virtual_options,
)
