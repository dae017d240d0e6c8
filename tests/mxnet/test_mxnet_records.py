"""RecordIO files that MXNet wrote, read as it reads them; and damaged ones, which end in an error that says where."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxpar import checkpoint, mxnet

sys.path.insert(0, str(Path(__file__).parent))
from records import write

MAGIC = struct.pack("<I", 0xCED7230A)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    return folder, write(folder)


def part(kind, content, length=None):
    word = kind << 29 | (len(content) if length is None else length)
    return MAGIC + struct.pack("<I", word) + content + bytes(-len(content) % 4)


@pytest.fixture
def rec(tmp_path):
    """A .rec of these bytes, and a .idx of that text."""

    def make(content, index=None):
        (tmp_path / "x.rec").write_bytes(content)
        if index is None:
            return mxnet.RecordFile(tmp_path / "x.rec")
        (tmp_path / "x.idx").write_text(index)
        return mxnet.RecordFile(tmp_path / "x.rec", tmp_path / "x.idx")

    return make


def test_records_are_those_that_mxnet_wrote(files):
    folder, arrays = files
    expected = [arrays[f"parts/{i}"].tobytes() for i in range(7)]
    assert sum(MAGIC in record for record in expected) == 4  # these are in several parts
    bare = mxnet.RecordFile(folder / "parts.rec")
    indexed = mxnet.RecordFile(str(folder / "parts.rec"), str(folder / "parts.idx"))
    assert list(bare) == list(indexed) == expected == bare[:]
    assert (len(bare), bare[-1], bare[np.int64(2)], bare[4:2:-1]) == (7, expected[6], expected[2], expected[4:2:-1])
    assert indexed.keys.tolist() == list(range(10, 17))
    assert bare.keys.tolist() == list(range(7))
    assert repr(bare) == f"RecordFile(7 records of {folder / 'parts.rec'})"
    for outside in (7, -8):
        with pytest.raises(IndexError, match=f"has 7 records, there is no record {outside}"):
            bare[outside]


def test_headers_with_labels_of_any_width(files, rec):
    folder, _ = files
    several = mxnet.RecordFile(folder / "labels.rec").unpack(0)
    assert several.label.tolist() == [1, 2.5, -3]
    assert several.label.dtype == np.float32
    assert several.content.startswith(b"\x89PNG")
    record = part(0, struct.pack("<IfQQ", 0, 7.5, 2**63, 9) + b"abc")
    assert rec(record).unpack(0) == (np.float32([7.5]), 2**63, 9, b"abc")
    wide = rec(part(0, struct.pack("<IfQQ", 1000, 0, 1, 0) + np.arange(1000, dtype="<f4").tobytes()))
    assert wide.unpack(0).label.tolist() == list(range(1000))
    assert wide.unpack(0).content == b""
    for record in (b"", b"short", struct.pack("<IfQQ", 2**31, 0, 1, 0) + bytes(8)):
        with pytest.raises(checkpoint.CheckpointError, match=r"damaged at byte 0.*expected a header and \d+ labels"):
            rec(part(0, record)).unpack(0)


DAMAGED = {
    "no record": (b"RIFF" + bytes(8), r"at byte 0.*begins with 0xced7230a, got 0x46464952"),
    "second": (part(0, b"abc") + b"xxxxxxxx", r"at byte 12.*begins with 0xced7230a"),
    "long": (part(0, b"abc", 2**29 - 1), r"at byte 0.*expected 536870911 bytes, the file ends at byte 12"),
    "cut head": (part(0, b"abc") + MAGIC, r"at byte 12.*the file ends at byte 16"),
    "middle": (part(2, b"abc"), "expected a part of kind 0 or 1, got 2"),
    "unknown": (part(5, b"abc"), "expected a part of kind 0 or 1, got 5"),
    "whole in parts": (part(1, b"a") + part(0, b"b"), "at byte 12.*expected a part of kind 2 or 3, got 0"),
    "no end": (part(1, b"a") + part(2, b"") * 1000, "expected a record, the file ends at byte 8012"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(rec, name):
    content, words = DAMAGED[name]
    with pytest.raises(checkpoint.CheckpointError, match=words) as error:
        rec(content)
    assert "x.rec" in str(error.value)
    places = [0, 12] if "12" in words and name != "long" else [0]
    with pytest.raises(checkpoint.CheckpointError, match=words):
        list(rec(content, "".join(f"{i}\t{place}\n" for i, place in enumerate(places))))


def test_an_index_of_another_file(rec):
    records = part(0, b"abcd") + part(0, b"efgh")
    assert list(rec(records, "5\t12\r\n4\t0\n")) == [b"efgh", b"abcd"]  # in the order of the index
    assert list(rec(b"")) == list(rec(b"", "")) == []
    for place in (4, 24, 10**17):
        with pytest.raises(checkpoint.CheckpointError, match=f"at byte {place}, or its .idx is of another file"):
            rec(records, f"0\t{place}\n")[0]
    for line in ("0", "0\t-4", "a\t0", "0\t0\t0", "0 1e3", "0\t" + "9" * 30, "\0"):
        with pytest.raises(checkpoint.CheckpointError, match=r"line 2: expected a key and a byte of the \.rec"):
            rec(records, "0\t0\n" + line)
    with pytest.raises(FileNotFoundError):
        mxnet.RecordFile("none.rec")
    with pytest.raises(TypeError, match="rec must be a path"):
        mxnet.RecordFile(3)


def test_a_file_that_is_cut_while_it_is_read(rec, tmp_path):
    records = rec(part(0, b"a" * 5000))
    (tmp_path / "x.rec").write_bytes(part(0, b"a" * 5000)[:3000])
    with pytest.raises(checkpoint.CheckpointError, match="was cut since it was opened"):
        records[0]


def test_lists(tmp_path):
    (tmp_path / "x.lst").write_text("5\t1.000000\tcats/a b.jpg\n0\t2\t-0.5\tdögs/1.jpg\r\n", encoding="utf-8")
    (first, label, path), second = mxnet.load_list(tmp_path / "x.lst")
    assert (first, label.tolist(), path) == (5, [1], "cats/a b.jpg")
    assert second[1].tolist() == [2, -0.5]
    assert second[1].dtype == np.float32
    assert second[2] == "dögs/1.jpg"
    for line in ("0\ta.jpg", "x\t1\ta.jpg", "0\tcat\ta.jpg", "0\tnan\ta.jpg", "0\t1e39\ta.jpg", ""):
        (tmp_path / "x.lst").write_text(f"0\t1\ta.jpg\n{line}\n0\t1\ta.jpg\n")
        with pytest.raises(checkpoint.CheckpointError, match="line 2: expected an id, labels and a path"):
            mxnet.load_list(tmp_path / "x.lst")
