"""What the tests of convolutions, pooling and loops on CPUs share: arrays, comparisons and the text of a program."""

import jax
import numpy as np


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def close(a, b, rtol=3e-5):
    """Equal but for rounding, measured by the largest number of each array."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max(initial=0)), a, b)


def near(given, wanted, rtol=3e-6):
    """Equal in shape, and but for rounding in numbers, measured by the largest number of each array alone."""
    for a, b in zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (given, wanted)), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * abs(b).max(), equal_nan=False)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def text(function, *args):
    return jax.jit(function).lower(*args).as_text()
