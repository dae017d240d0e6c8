"""Data sets as arrays, and their batches, gathered on the devices.

    train = jp.data.load("fashion_mnist", "train")
    for batch in jp.data.batches(train, 256, rng=jax.random.key(0), devices=jax.devices()):
        batch["image"], batch["label"]  # float32 (256, 28, 28, 1) in [0, 1], int32 (256,)

Fashion-MNIST: Xiao, Rasul and Vollgraf, 2017, https://arxiv.org/abs/1708.07747.
"""

from ._batches import batches as batches, num_batches as num_batches
from ._dataset import Dataset as Dataset
from ._iterable import collect as collect
from ._load import FASHION_MNIST_CLASSES as FASHION_MNIST_CLASSES, load as load
from ._sources import (
    Source as Source,
    as_source as as_source,
    from_arrays as from_arrays,
    from_iterable as from_iterable,
)
