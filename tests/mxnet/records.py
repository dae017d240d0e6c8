"""Files that MXNet 1.9.1 wrote, and what it read of them, recorded by tools/record_mxnet_records.py."""

import json
from pathlib import Path

import numpy as np

REFERENCE = Path(__file__).parents[1] / "reference"
RECORDED = json.loads((REFERENCE / "mxnet_records.json").read_text())


def write(folder):
    """All files in a folder, and the arrays by name."""
    with np.load(REFERENCE / "mxnet_records.npz", allow_pickle=False) as found:
        arrays = dict(found)
    for name in [name for name in arrays if name.startswith("files/")]:
        (folder / name[6:]).write_bytes(arrays.pop(name).tobytes())
    return arrays
