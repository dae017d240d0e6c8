"""The arrays with which networks are compared, made of a name and a shape by MXNet's environment and by the tests."""

import zlib

import numpy as np


def rule(name, shape, kind):
    """An array of a name.

    Kind n is normal, u is from .5 to 1.5, wK is normal over K, iK is whole numbers below K. s are symmetric matrices
    with positive eigenvalues. bK are boxes, their corners in the last four columns and below 2 K; a column before is a
    score, and the first of several is a whole number below 2.
    """
    random = np.random.RandomState(zlib.crc32(name.encode()))
    if kind == "n":
        return random.standard_normal(shape).astype(np.float32)
    if kind == "u":
        return (random.random_sample(shape) + 0.5).astype(np.float32)
    if kind == "s":
        half = random.standard_normal(shape)
        return (half @ half.swapaxes(-1, -2) / shape[-1] + np.eye(shape[-1])).astype(np.float32)
    if kind[0] == "b":
        boxes = random.random_sample(shape)
        boxes[..., -4:] *= float(kind[1:])
        boxes[..., -2:] += boxes[..., -4:-2]
        if shape[-1] > 4:
            boxes[..., 0] = random.randint(0, 2, shape[:-1])
        return boxes.astype(np.float32)
    if kind[0] == "w":
        return (random.standard_normal(shape) / float(kind[1:])).astype(np.float32)
    return random.randint(0, int(kind[1:]), shape).astype(np.float32)
