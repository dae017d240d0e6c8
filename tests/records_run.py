"""What each of several processes runs for tests/mxnet/test_mxnet_records.py: it writes the images of its own devices.

python records_run.py HOST:PORT PROCESSES PROCESS FOLDER
"""

import sys
from pathlib import Path

import jax
import numpy as np

from jaxpar import data, distributed, mxnet

OPTIONS = {"data_shape": (3, 21, 22), "shuffle": True, "rand_crop": True, "rand_mirror": True, "pad": 2, "mean_r": 9.0}


def batches(folder, **options):
    """Three epochs and a part of them again, from the middle."""
    source = mxnet.image_record_source(folder / "lossless.rec", 4, **OPTIONS)
    rng = jax.random.key(5)
    for start in (0, 3):
        yield from data.batches(source, rng=rng, epochs=3, start=start, **options)


def main(address, processes, process, folder):
    distributed.initialize(address, int(processes), int(process))
    found = {}
    for i, batch in enumerate(batches(Path(folder), devices=jax.devices())):
        for name, array in batch.items():
            for shard in array.addressable_shards:
                found[f"{i} {name} {shard.index[0].start or 0}"] = np.asarray(shard.data)
    np.savez(Path(folder) / f"process{process}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
