"""Arrays from the files of MXNet: `.params` of Gluon and of Module, and what `mx.nd.save` writes.

Such a file is a list of arrays and a list of their names, little-endian. It holds no code. What MXNet 1.9.1 writes is
read, and the two older forms that it reads.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._core import files
from .._core.files import CheckpointError

# Before a list, an array of an older form, an array, an array of `mx.np`. The oldest begins with its number of axes.
_LIST, _ARRAY_OLD, _ARRAY, _ARRAY_NUMPY = 0x112, 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DTYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")
_BFLOAT16, _CPU = 12, 1
_MOST_ELEMENTS = 2**59  # of which NumPy can count the bytes, also where an axis of length 0 leaves none
_MOST_AXES = 32


def load_mxnet(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a `.params` file of MXNet, by name.

    MXNet itself is not needed, and nothing in the file is run. `models.lenet.from_mxnet` makes the params of LeNet of
    such arrays. For another network, MXNet keeps the weight of a convolution as (out, in, height, width), and that of
    a dense layer as (out, in).

    Args:
        path: a file by `net.save_parameters`, `net.export`, `module.save_params` or `mx.nd.save`.

    Returns:
        {name: array}, in the order of the file. Names are as MXNet wrote them, such as "0.weight" or "arg:fc1_bias".
        Arrays that were saved as a list have the names "0", "1", and so on.

    Raises:
        OSError: the file cannot be read.
        CheckpointError: it is no such file, it ends too early, or it holds sparse arrays or an unknown dtype.

    Example:
        >>> from jaxpar import models, mxnet
        >>> arrays = mxnet.load_params("lenet.params")  # doctest: +SKIP
        >>> params = models.lenet.from_mxnet(arrays)  # doctest: +SKIP
    """
    path = files.as_path(path, "mxnet.load_params: path")
    file = _Reader(path, files.read(path, os.stat(path).st_size))
    magic, _ = file.numbers("QQ")
    if magic != _LIST:
        raise CheckpointError(f"{path} is no .params file of MXNet: it begins with {magic:#x}, expected {_LIST:#x}")
    arrays = [file.array(i) for i in range(*file.numbers("Q"))]
    names = [file.text() for _ in range(*file.numbers("Q"))] or [str(i) for i in range(len(arrays))]
    if len(names) != len(arrays) or len(set(names)) != len(names):
        raise CheckpointError(f"{path} is damaged: it has {len(arrays)} arrays and {len(set(names))} different names")
    return dict(zip(names, arrays, strict=True))


def to_bytes(arrays: Mapping[str, ArrayLike]) -> bytes:
    """The content of a `.params` file of MXNet 1.9. `ValueError` for a dtype that it does not know."""
    content = [struct.pack("<QQQ", _LIST, 0, len(arrays))]
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.name not in _DTYPES or not array.shape:
            raise ValueError(f"{name}: MXNet saves no array of dtype {array.dtype} and shape {array.shape}")
        head = struct.pack(f"<Iii{array.ndim}q", _ARRAY, 0, array.ndim, *array.shape)
        device = struct.pack("<iii", _CPU, 0, _DTYPES.index(array.dtype.name))
        content += [head, device, np.ascontiguousarray(array).tobytes()]
    names = [name.encode() for name in arrays]
    content.append(struct.pack("<Q", len(names)))
    content += [struct.pack("<Q", len(name)) + name for name in names]
    return b"".join(content)


class _Reader:
    """Reads the content of a file from its beginning to its end."""

    def __init__(self, path: Path, content: bytes):
        self._path, self._content, self._at = path, content, 0

    def numbers(self, form: str) -> tuple[int, ...]:
        """Integers, by the letters of `struct`."""
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))

    def text(self) -> str:
        return self._take(*self.numbers("Q")).decode("utf-8", "replace")

    def array(self, number: int) -> np.ndarray:
        (magic,) = self.numbers("I")
        if magic in (_ARRAY, _ARRAY_NUMPY) and self.numbers("i") != (0,):
            raise CheckpointError(
                f"{self._path}: array {number} is sparse; in MXNet, save array.tostype('default') instead"
            )
        (axes,) = self.numbers("i") if magic >= _ARRAY_OLD else (magic,)
        self._check(0 <= axes <= _MOST_AXES and magic <= _ARRAY_NUMPY, f"array {number} has {axes} axes")
        shape = self.numbers(("q" if magic >= _ARRAY_OLD else "I") * axes)
        is_possible = min(shape, default=0) >= 0 and math.prod(max(n, 1) for n in shape) < _MOST_ELEMENTS
        self._check(is_possible, f"array {number} has the shape {shape}")
        _, _, flag = self.numbers("iii")  # a device and its number come first
        is_known = 0 <= flag < len(_DTYPES) or flag == _BFLOAT16
        self._check(is_known, f"array {number} has dtype {flag}, which MXNet 1.9 does not know")
        dtype = np.dtype(jnp.bfloat16 if flag == _BFLOAT16 else _DTYPES[flag])
        return np.frombuffer(self._take(math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()

    def _take(self, size: int) -> bytes:
        taken = self._content[self._at : self._at + size]
        self._check(len(taken) == size, f"it ends at byte {len(self._content)}, expected more")
        self._at += size
        return taken

    def _check(self, is_sound: bool, problem: str) -> None:
        if not is_sound:
            raise CheckpointError(f"{self._path} is damaged: {problem}")
