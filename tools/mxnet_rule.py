"""The arrays with which networks are compared, made of a name and a shape by MXNet's environment and by the tests."""

import zlib

import numpy as np


def rule(name, shape, kind):
    """An array of a name: kind n is normal, u is from .5 to 1.5, wK is normal over K, iK is whole numbers below K."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    if kind == "n":
        return random.standard_normal(shape).astype(np.float32)
    if kind == "u":
        return (random.random_sample(shape) + 0.5).astype(np.float32)
    if kind[0] == "w":
        return (random.standard_normal(shape) / float(kind[1:])).astype(np.float32)
    return random.randint(0, int(kind[1:]), shape).astype(np.float32)
