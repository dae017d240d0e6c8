"""Arrays that MXNet 1.9.1 saved (tools/record_mxnet_params.py), and a LeNet that gives the same logits as there."""

import gzip
import json
import re
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import checkpoint
from jaxpar.models import lenet

REFERENCE = Path(__file__).parents[1] / "reference"


@pytest.fixture
def saved(tmp_path):
    """The path of a file as MXNet wrote it, or of the first bytes of it."""

    def save(name, size=None, change=bytes):
        path = tmp_path / f"{name}.params"
        path.write_bytes(change(gzip.decompress((REFERENCE / f"{name}.params.gz").read_bytes())[:size]))
        return path

    return save


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["lenet_gluon", "lenet_article"])
def test_a_lenet_of_mxnet_gives_the_same_logits(saved, name):
    params = lenet.from_mxnet(checkpoint.load_mxnet(saved(name)))
    pattern = ((np.arange(3 * 784) * 13 + np.arange(3 * 784) ** 2 // 7) % 61 - 29).reshape(3, 28, 28, 1) / 1024
    expected = np.array(json.loads((REFERENCE / "mxnet_params.json").read_text())["logits"])
    np.testing.assert_allclose(lenet.apply(params, jnp.float32(pattern * 16 + 0.5)), expected, rtol=1e-4, atol=1e-6)
    assert np.ptp(expected) > 1e-3  # so that they tell an order of the inputs from another


def test_every_dtype_and_names(saved):
    arrays = checkpoint.load_mxnet(saved("dtypes"))
    scalar = arrays.pop("scalar")
    assert scalar.tolist() == [7.0]
    for name, array in arrays.items():
        assert array.dtype == name
        assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert array.flags.writeable
    assert list(checkpoint.load_mxnet(saved("lenet_article"))) == [str(i) for i in range(8)]
    of_numpy = checkpoint.load_mxnet(saved("numpy"))
    assert (of_numpy["scalar"].shape, of_numpy["row"].tolist()) == ((), [0, 1, 2])
    assert "4.weight" in checkpoint.load_mxnet(saved("lenet_gluon"))


def test_what_is_no_such_file(saved, tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="sparse; in MXNet, save"):
        checkpoint.load_mxnet(saved("sparse"))
    path = tmp_path / "text"
    path.write_bytes(b"ll" + bytes(14))
    with pytest.raises(checkpoint.CheckpointError, match="begins with 0x6c6c"):
        checkpoint.load_mxnet(path)
    with pytest.raises(FileNotFoundError):
        checkpoint.load_mxnet(tmp_path / "none")


def test_no_cut_or_changed_file_is_read(saved):
    whole = saved("dtypes").read_bytes()
    for size in range(len(whole)):
        with pytest.raises(checkpoint.CheckpointError):
            checkpoint.load_mxnet(saved("dtypes", size))
    axes = whole.index(struct.pack("<iq", 2, 2))
    for number, words in ((1 << 30, "axes"), (-1, "axes")):
        with pytest.raises(checkpoint.CheckpointError, match=words):
            checkpoint.load_mxnet(
                saved("dtypes", change=lambda b, n=number: b[:axes] + struct.pack("<i", n) + b[axes + 4 :])
            )
    for shape in ((1 << 61, 3), (1 << 61, 0), (-2, 3)):
        packed = struct.pack("<qq", *shape)
        with pytest.raises(checkpoint.CheckpointError, match=f"array 0 has the shape {re.escape(str(shape))}"):
            checkpoint.load_mxnet(saved("dtypes", change=lambda b, p=packed: b[: axes + 4] + p + b[axes + 20 :]))


def test_arrays_of_older_forms(tmp_path):
    """MXNet 1.9.1 reads both, and writes neither."""
    values = struct.pack("<iii", 1, 0, 0) + np.arange(6, dtype="<f4").tobytes()
    oldest, older = struct.pack("<III", 2, 2, 3), struct.pack("<IIqq", 0xF993FAC8, 2, 2, 3)
    names = struct.pack("<QQ", 2, 1) + b"a" + struct.pack("<Q", 1) + b"b"
    whole = struct.pack("<QQQ", 0x112, 0, 2) + oldest + values + older + values + names
    path = tmp_path / "x.params"
    path.write_bytes(whole)
    arrays = checkpoint.load_mxnet(path)
    assert list(arrays) == ["a", "b"]
    assert all(array.tolist() == [[0, 1, 2], [3, 4, 5]] for array in arrays.values())
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(checkpoint.CheckpointError):
            checkpoint.load_mxnet(path)
    for magic in (33, 0xF993FAC7, 0xF993FACB, 2**32 - 1):
        path.write_bytes(struct.pack("<QQQI", 0x112, 0, 1, magic) + bytes(200))
        with pytest.raises(checkpoint.CheckpointError, match="array 0 has"):
            checkpoint.load_mxnet(path)


def test_arrays_of_another_network():
    arrays = {f"p{i}": np.zeros(s) for i, s in enumerate([(6, 1, 5, 5), (6,)])}
    with pytest.raises(ValueError, match=r"for conv1 a weight of shape \(20, 1, 3, 3\).*got 2 of shapes"):
        lenet.from_mxnet(arrays)
