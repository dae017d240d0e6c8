"""What MXNet 1.9.1 gave for operators and networks, recorded by tools/record_mxnet_symbols.py."""

import functools
import gzip
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from mxnet_rule import rule as rule

REFERENCE = Path(__file__).parents[1] / "reference"
CASES = json.loads(gzip.decompress((REFERENCE / "mxnet_symbols.json.gz").read_bytes()))["cases"]


@functools.cache
def recorded():
    """{case: {what: array}}"""
    found = {}
    with np.load(REFERENCE / "mxnet_symbols.npz", allow_pickle=False) as arrays:
        for key in arrays.files:
            name, _, what = key.partition("/")
            found.setdefault(name, {})[what] = arrays[key]
    return found


def arrays_of(name):
    return {n: rule(f"{name}/{n}", tuple(shape), kind) for n, (shape, kind) in CASES[name]["arrays"].items()}


def write(folder, name):
    """The symbol file of a case."""
    path = folder / "case-symbol.json"
    path.write_text(CASES[name]["symbol"])
    return path
