"""Windows of 3 × 3 by 16 products where 36 are usual, as Winograd's formula for 2 × 2 results has them.

With a tile x of 4 × 4 numbers of the images, the window w, the tile y of 2 × 2 results, and products place by place:

    y = R ((W w W') * (I x I')) R'

For each of the 16 places, channels are summed over by a matrix product over all tiles. The gradient of the window is
the transpose of that, in which a matrix product sums over the tiles:

    w = W' (sum over tiles (R' y R) * (I x I')) W

Images and results are only added, and windows halved, so both round as plain sums do. See Winograd (1980), and Lavin
and Gray (2016), "Fast algorithms for convolutional neural networks".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .problem import ConvProblem
from .products import entries_from

# I and R above. Rows of W are (1, 0, 0), (1/2, 1/2, 1/2), (1/2, -1/2, 1/2) and (0, 0, 1).
_OF_IMAGE = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
_OF_RESULT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])

# Sums and differences of a tile are copies, which products have to pay for: at least so many for each copied number,
# and so many tiles, or the sums of the windows cost more (measured against XLA's own, benchmarks/NOTES.md).
_PRODUCTS, _TILES = 80, 32
_MOST_NUMBERS = 1 << 27  # copied at once, in 512 MB: a training step of large images should not need much more memory


def pays(images: int, sizes: Sequence[int], channels: int, features: int) -> bool:
    """Whether the formulas are faster for so many images, whose results have these two spatial sizes."""
    tiles, copied = images * math.prod(-(-size // 2) for size in sizes), channels + features
    return tiles >= _TILES and 2 * channels * features >= _PRODUCTS * copied and 16 * tiles * copied <= _MOST_NUMBERS


def is_gradient(problem: ConvProblem) -> bool:
    """Whether `gradient` computes it."""
    return problem.window == (3, 3) and {*problem.strides, *problem.dilation} == {1} and not problem.is_turned


def convolution(x: jax.Array, w: jax.Array, edges: Sequence[tuple[int, int]], is_turned: bool) -> jax.Array:
    """N x H x W x O from N x H x W x C, with so many zeros around it, and from 3 x 3 x C x O.

    With `is_turned`, the window is 3 x 3 x O x C, as that of a gradient of images is. It is not transposed in memory.
    """
    features, summed = (w.shape[2], 1) if is_turned else (w.shape[3], 0)
    # A tile has 2 x 2 results. Where a size is odd, there is one row or column more, which is cut off at the end.
    high, wide = (size + low + up - 2 for size, (low, up) in zip(x.shape[1:3], edges, strict=True))
    x = _pad(x, [(low, up + size % 2) for (low, up), size in zip(edges, (high, wide), strict=True)])
    # W w W' and I x I', by the place [a][b] in the tile: C x O, and N x tiles x tiles x C.
    windows = [_of_window(row) for row in _of_window(w)]
    images = _of_tiles(_in_memory(x))
    # A product for each of the 16 places: (N * tiles * tiles) x C by C x O. It sums over the channels.
    shape = (*images[0][0].shape[:3], features)
    numbers = ((1,), (summed,)), ((), ())
    products = [[lax.dot_general(_matrix(images[a][b]), windows[a][b], numbers) for b in range(4)] for a in range(4)]
    # R (...) R': along the columns, then along the rows. The 2 x 2 results of a tile stand beside each other then, as
    # N x tiles x 2 x tiles x 2 x O.
    of_columns = zip(*(_combine(_OF_RESULT, column) for column in zip(*products, strict=True)), strict=True)
    tiles = [_combine(_OF_RESULT, row) for row in of_columns]
    y = jnp.stack([jnp.stack([place.reshape(shape) for place in row], 3) for row in tiles], 2)
    return _in_memory(y.reshape(shape[0], 2 * shape[1], 2 * shape[2], features)[:, :high, :wide])


def gradient(images: jax.Array, cotangent: jax.Array, problem: ConvProblem) -> jax.Array:
    """The gradient of the window, 3 x 3 x C x O, from N x H x W x C and the cotangent of the result, N x H x W x O."""
    # What lies under the window, for an even number of results: a further result has a cotangent of zero.
    for axis, (low, size) in enumerate(zip(problem.low, problem.results, strict=True), start=1):
        images = entries_from(images, axis, -low, size + size % 2 + 2)
    cotangent = _pad(cotangent, [(0, size % 2) for size in cotangent.shape[1:3]])
    of_images, of_results = _of_tiles(_in_memory(images)), _of_places(_in_memory(cotangent))
    # For each of the 16 places C x O, summed over images and tiles. Then W' (...) W, along the columns and the rows.
    sums = [[_sum(of_images[a][b], of_results[a][b]) for b in range(4)] for a in range(4)]
    of_columns = zip(*(_to_window(column) for column in zip(*sums, strict=True)), strict=True)
    return _in_memory(jnp.stack([jnp.stack(_to_window(row)) for row in of_columns]))


def _in_memory(x: jax.Array) -> jax.Array:
    """The array, which XLA computes once. It would compute it again in each of the loops that read it."""
    return lax.optimization_barrier(x)


def _of_tiles(x: jax.Array) -> list[list[jax.Array]]:
    """I x I' of the tiles, which begin at every second entry: for each of the 16 places N x tiles x tiles x C."""
    return _both_axes(x, lambda y, axis: _combine(_OF_IMAGE, _every_second(y, axis, 4)))


def _of_places(y: jax.Array) -> list[list[jax.Array]]:
    """R' y R of the tiles of the results."""
    return _both_axes(y, lambda z, axis: _combine(_OF_RESULT.T, _every_second(z, axis, 2)))


def _both_axes(x: jax.Array, transform: Callable[[jax.Array, int], list[jax.Array]]) -> list[list[jax.Array]]:
    """What `transform` makes of an array along axis 1, and of each of these along axis 2."""
    return [transform(rows, 2) for rows in transform(x, 1)]


def _every_second(x: jax.Array, axis: int, places: int) -> list[jax.Array]:
    """The entries of an axis at each place of the tiles."""
    count = (x.shape[axis] - places) // 2 + 1
    return [lax.slice_in_dim(x, at, at + 2 * count - 1, 2, axis) for at in range(places)]


def _of_window(w: jax.Array) -> list[jax.Array]:
    """W w along the first axis: the four rows of W times the three entries of a window."""
    ends = w[0] + w[2]
    return [w[0], 0.5 * (ends + w[1]), 0.5 * (ends - w[1]), w[2]]


def _to_window(sums: Sequence[jax.Array]) -> list[jax.Array]:
    """W' along the first axis: the three entries of a window from those of the four rows of W."""
    middle = 0.5 * (sums[1] + sums[2])
    return [sums[0] + middle, 0.5 * (sums[1] - sums[2]), middle + sums[3]]


def _combine(matrix: np.ndarray, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums and differences of arrays by a matrix of -1, 0 and 1."""
    sums: list[jax.Array] = []
    for row in matrix:
        (first, *further) = ((sign, x) for sign, x in zip(row, xs, strict=True) if sign)
        total = first[1] if first[0] > 0 else -first[1]
        for sign, x in further:
            total = total + x if sign > 0 else total - x
        sums.append(total)
    return sums


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """C x O, summed over images and tiles."""
    return lax.dot_general(_matrix(x), _matrix(y), (((0,), (0,)), ((), ())))


def _matrix(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _pad(x: jax.Array, edges: Sequence[tuple[int, int]]) -> jax.Array:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((low, up, 0) for low, up in edges), (0, 0, 0)])
