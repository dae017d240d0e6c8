"""Images and texts that an `eval_fn` returns beside its scores, for the loggers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..._core import checks


class Media:
    """Rows of an array that are shown and not averaged: the first `most` of an evaluation. A metric with `merge`."""

    rows: Any  # an array (n, ...). Of a tree that JAX maps, what it puts there
    most: int

    def merge(self, other: Any) -> Any:
        """The first rows of both, on the host."""
        return self._with(np.concatenate([np.asarray(self.rows), np.asarray(other.rows)])[: self.most])

    def compute(self) -> Any:
        """Itself, with the rows on the host."""
        return self._with(np.asarray(self.rows))

    def _with(self, rows: Any) -> Any:
        new = object.__new__(type(self))  # JAX maps trees whose leaves are no arrays, which `__init__` would refuse
        new.__dict__.update(self.__dict__, rows=rows)
        return new

    def __init_subclass__(cls) -> None:
        def flatten(media: Media) -> tuple[tuple[Any], tuple[Any, ...]]:
            return (media.rows,), tuple((name, value) for name, value in media.__dict__.items() if name != "rows")

        def unflatten(static: tuple[Any, ...], children: Any) -> Any:
            new = object.__new__(cls)
            new.__dict__.update(static, rows=children[0])
            return new

        jax.tree_util.register_pytree_node(cls, flatten, unflatten)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({checks.describe(self.rows)})"


class Image(Media):
    """Images for the loggers, returned by an `eval_fn`.

    `fit` gives them to `to_tensorboard`, `to_wandb` and `to_mlflow` after each evaluation. They are in no record and in
    no checkpoint. `evaluate` returns them beside the scores, with `rows` in host memory.

    Args:
        rows: (n, height, width), or (n, height, width, 1, 3 or 4 channels). Floats are from 0 to 1, and are clipped to
            that. Integers are uint8. Bools are black and white.
        most: how many images of an evaluation are shown, its first ones.

    Raises:
        ValueError: `rows` has another shape or dtype.

    >>> import numpy as np
    >>> from jaxpar import train
    >>> def eval_fn(params, batch):
    ...     return {"error": batch["x"].mean((1, 2)), "samples": train.Image(params * batch["x"], most=2)}
    >>> train.evaluate(0.5, data={"x": np.ones((5, 4, 4))}, eval_fn=eval_fn, batch_size=4)
    {'error': 1.0, 'samples': Image(float32[2,4,4])}
    """

    def __init__(self, rows: Any, most: int = 8):
        rows = rows if hasattr(rows, "dtype") else np.asarray(rows)
        shape, dtype = rows.shape, np.dtype(rows.dtype)
        is_image = len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3, 4))
        if not is_image or not (dtype.name in ("uint8", "bool") or jax.numpy.issubdtype(dtype, np.floating)):
            raise ValueError(
                "train.Image: expected (n, height, width) or (n, height, width, 1, 3 or 4 channels), of floats from 0 "
                f"to 1 or of uint8, got {dtype}{list(shape)}"
            )
        self.most: int = checks.whole_number(most, "train.Image", "most")
        self.rows: Any = rows[: self.most]

    def pixels(self) -> list[np.ndarray]:
        """Each image as uint8 (height, width, channels)."""
        rows = np.asarray(self.rows)
        if rows.dtype != np.uint8:
            rows = np.nan_to_num(rows.astype(np.float32)).clip(0, 1)
            rows = (rows * 255).round().astype(np.uint8)
        return list(rows if rows.ndim == 4 else rows[..., None])


class Text(Media):
    """Texts for the loggers, returned by an `eval_fn` as numbers of words or letters.

    Args:
        rows: (n, length), or any array (n, ...): JAX has no texts.
        decode: the text of a row, a function of an array of NumPy, which is called after the evaluation.
        most: how many texts of an evaluation are shown, its first ones.

    >>> import numpy as np
    >>> from jaxpar import train
    >>> def eval_fn(params, batch):
    ...     return {"written": train.Text(batch["letters"], decode=lambda row: bytes(row.tolist()).decode(), most=1)}
    >>> letters = np.frombuffer(b"abcd", np.uint8).reshape(2, 2)
    >>> train.evaluate(0.0, data={"letters": letters}, eval_fn=eval_fn)["written"].texts()
    ['ab']
    """

    def __init__(self, rows: Any, decode: Callable[[np.ndarray], str], most: int = 8):
        self.decode: Callable[[np.ndarray], str] = checks.function(decode, "train.Text: decode")
        self.most: int = checks.whole_number(most, "train.Text", "most")
        self.rows: Any = rows[: self.most]

    def texts(self) -> list[str]:
        """The text of each row."""
        return [str(self.decode(row)) for row in np.asarray(self.rows)]


def png(pixels: np.ndarray) -> bytes:
    """An image, uint8 (height, width, 1, 3 or 4 channels), as a file. https://www.w3.org/TR/png"""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    # Each line of pixels begins with its filter, 0 for none.
    lines = np.hstack([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)])
    data = zlib.compress(lines.tobytes())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
