"""RecordIO files that MXNet wrote, read as it reads them; and damaged ones, which end in an error that says where."""

import io
import struct
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import records_run
import several_processes
from PIL import Image
from records import RECORDED, write
from world import crash_at

from jaxpar import checkpoint, data, mxnet, train
from jaxpar.mxnet import _records

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


# ---- Images of RecordIO files as training data: MXNet's bits, and those of a run however it is cut and shared.


CASES = RECORDED["cases"]


@pytest.fixture
def source(files):
    def make(name="lossless", batch_size=4, **options):
        return mxnet.image_record_source(files[0] / f"{name}.rec", batch_size, **records_run.OPTIONS | options)

    return make


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_mxnet(files, name):
    folder, arrays = files
    file, options = CASES[name]
    images, labels = arrays[f"{name}/images"], arrays[f"{name}/labels"]
    rec, idx = (folder / f"{file}{end}" for end in (".rec", ".idx"))
    first = mxnet.image_record_source(rec, len(labels), layout="NCHW", **options)
    last = mxnet.image_record_source(rec, len(labels), idx=idx, preprocess_threads=1, **options)
    (batch,), (other,) = data.batches(first), data.batches(last)
    assert batch["image"].dtype == batch["label"].dtype == np.float32
    np.testing.assert_array_equal(batch["label"], labels)
    np.testing.assert_array_equal(other["image"].transpose(0, 3, 1, 2), batch["image"])
    apart = np.abs(np.asarray(batch["image"]) - images) * options.get("std_r" if name == "grey" else "", 1)
    assert apart.max() <= (1.001 if name in ("grey", "jpeg") else 0)
    if name in ("grey", "jpeg"):  # only what is in colour and read as grey, and CMYK, differs
        assert (apart.reshape(len(labels), -1).max(1) > 0.1).sum() <= 2


def test_every_option_of_imagerecorditer_is_here_or_answered(source):
    here = set(mxnet.image_record_source.__wrapped__.__annotations__)
    for name in RECORDED["options"]:
        assert (name in here) != (name in _records._HINTS), name
        if name not in here:
            with pytest.raises(TypeError, match=f"there is no argument '{name}'; "):
                source(**{name: 1})
    with pytest.raises(TypeError, match=r"'part_index'; leave it out\. Each process has the same file"):
        source(part_index=1)


@pytest.mark.slow
def test_what_is_drawn(files, source):
    found = list(data.batches(source(batch_size=11), rng=jax.random.key(1), epochs=40))
    orders = {tuple(batch["label"].tolist()) for batch in found}
    assert len(orders) == 40
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(11))}
    plain = mxnet.image_record_source(files[0] / "lossless.rec", 11, data_shape=(3, 30, 29))
    (still,) = data.batches(plain)
    (other,) = data.batches(plain, rng=jax.random.key(1))  # nothing to draw
    np.testing.assert_array_equal(other["image"], still["image"])
    exact = {"data_shape": (3, 30, 29), "mean_r": 0.0}
    tops, mirrored = set(), 0
    image = np.pad(np.asarray(still["image"][4]), ((2, 2), (2, 2), (0, 0)), constant_values=255)
    windows = {
        image[y : y + 30, x : x + 29][:, ::s].tobytes(): (y, x, s) for y in range(5) for x in range(5) for s in (1, -1)
    }
    for batch in data.batches(source(batch_size=11, shuffle=False, **exact), rng=jax.random.key(1), epochs=60):
        assert batch["label"].tolist() == list(range(11))
        y, x, step = windows[np.asarray(batch["image"][4]).tobytes()]
        tops.add((y, x))
        mirrored += step == -1
    assert len(tops) > 18
    assert 18 < mirrored < 42


def test_crops_begin_at_every_place_and_are_mirrored(tmp_path):
    """A number that is drawn, from 0 and below 1, is a place from the first one to the last, or a half that mirrors."""
    image = np.random.RandomState(0).randint(0, 256, (10, 12, 3)).astype(np.uint8)  # of which 8 x 8 are left
    source = of(tmp_path, png(image), rand_crop=True, rand_mirror=True)
    drawn = [(0.0, 0.0, 0.5), (0.34, 0.2, 0.49), (0.67, 0.41, 0.99), (0.999, 0.999, 0.0)]
    found = source.arrays["image"][np.array([(0, *numbers) for numbers in drawn], _records._ROW)]
    expected = [image[:8, :8], image[1:9, 1:9][:, ::-1], image[2:10, 2:10], image[2:10, 4:12][:, ::-1]]
    np.testing.assert_array_equal(found, expected)


def test_without_a_key_nothing_is_drawn(source):
    found = data.batches(source(), drop_remainder=False, epochs=2)
    labels = [batch["label"].tolist() for batch in found]
    assert labels == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]] * 2
    (whole,) = data.batches(source(batch_size=11, rand_crop=False, rand_mirror=False))
    np.testing.assert_array_equal(whole["image"], np.concatenate([b["image"] for b in data.batches(source(), 1)]))


def test_the_bits_do_not_depend_on_devices_or_batches(files, source):
    expected = list(records_run.batches(files[0]))
    assert len(expected) == 6 + 3
    for one, again in zip(expected[3:6], expected[6:], strict=True):
        np.testing.assert_array_equal(one["image"], again["image"])
    for count in (1, 4):
        for one, want in zip(records_run.batches(files[0], devices=jax.devices()[:count]), expected, strict=True):
            assert len(one["image"].sharding.device_set) == count
            jax.tree.map(np.testing.assert_array_equal, one, want)
    padded = next(iter(data.batches(source(), rng=jax.random.key(5), devices=jax.devices()[:4], virtual_shards=2)))
    np.testing.assert_array_equal(np.unique(padded["label"]), np.unique(expected[0]["label"]))
    single = np.concatenate([b["image"] for b in data.batches(source(), 1, rng=jax.random.key(5))])
    np.testing.assert_array_equal(single[:8], np.concatenate([b["image"] for b in expected[:2]]))


@pytest.mark.slow
def test_the_bits_do_not_depend_on_processes(files, tmp_path):
    write(tmp_path)
    with several_processes.Run("records_run.py", tmp_path, 2, 2) as run:
        run.wait()
    found = run.saved("process0.npz") | run.saved("process1.npz")
    for i, batch in enumerate(records_run.batches(files[0])):
        for name, array in batch.items():
            shards = [found.pop(f"{i} {name} {row}") for row in range(4)]
            np.testing.assert_array_equal(np.concatenate(shards), array)
    assert not found


def apply(params, images):
    return images.reshape(len(images), -1) @ params["w"] / 1000


def loss_fn(params, batch, rng):
    return train.cross_entropy(apply(params, batch["image"]), batch["label"].astype(int)).mean(), {}


STEP = train.make_train_step(loss_fn, virtual_shards=4)


def fit(source, count=1, **options):
    params = {"w": jnp.zeros((21 * 22 * 3, 11))}
    state, _ = train.start(params, optax.sgd(0.1, momentum=0.9), loss_fn, devices=jax.devices()[:count])
    return train.fit(state, STEP, source, epochs=3, progress=False, **options)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_bit(source, tmp_path):
    want, history = fit(source())
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    with pytest.raises(RuntimeError, match="crash"):
        fit(source(), on_step=crash_at(4), **options)
    got, resumed = fit(source(), count=4, **options)  # on other devices
    np.testing.assert_array_equal(got.params["w"], want.params["w"])
    assert [record["loss"] for record in resumed] == [record["loss"] for record in history]
    assert int(got.step) == 6
    assert np.abs(want.params["w"]).max() > 0


def test_every_example_is_evaluated(source):
    params = {"w": jnp.ones((21 * 22 * 3, 2))}
    found = train.predict(params, lambda params, batch: apply(params, batch["image"]), source(), batch_size=4)
    (whole,) = data.batches(source(batch_size=11))
    np.testing.assert_allclose(found, apply(params, whole["image"]), rtol=1e-5)


def test_each_record_is_read_once_by_threads_that_end(files, monkeypatch):
    """For its image and its label, on any number of devices: the file is open once for each thread."""
    reads, opens, before = [], [], threading.active_count()
    read, opened = mxnet.RecordFile._read, _records.files.opened
    monkeypatch.setattr(mxnet.RecordFile, "_read", lambda self, file, n: reads.append(n) or read(self, file, n))
    monkeypatch.setattr(_records.files, "opened", lambda path: opens.append(opened(path)) or opens[-1])
    source = mxnet.image_record_source(
        files[0] / "lossless.rec", 4, idx=files[0] / "lossless.idx", preprocess_threads=3, **records_run.OPTIONS
    )
    for devices in (None, jax.devices()[:2]):
        reads.clear(), opens.clear()
        found = list(data.batches(source, rng=jax.random.key(1), epochs=2, devices=devices))
        assert len(found) == 4
        assert len(reads) == 4 * 4
        assert 1 <= len(opens) <= 3
        assert all(file.closed for file in opens)
        assert threading.active_count() <= before
    some = data.batches(source, epochs=100)
    next(some)
    assert threading.active_count() > before
    some.close()  # a run that stops early
    assert all(file.closed for file in opens)
    assert threading.active_count() <= before


def test_parts_and_other_dtypes(source):
    one, rest = data.split(source(), 4, rng=jax.random.key(2))
    assert (len(one), len(rest), one.batch_size) == (4, 7, 4)
    labels = np.concatenate([one["label"], rest["label"]])
    assert sorted(labels.tolist()) == list(range(11))
    (batch,) = data.batches(one, dtype=jnp.bfloat16)
    assert batch["image"].dtype == jnp.bfloat16
    assert "image float32 (21, 22, 3), label float32 ()" in repr(rest)


def of(tmp_path, *contents, label=(0, 1.0), **options):
    """A source of one record for each content."""
    records = [part(0, struct.pack("<IfQQ", *label, i, 0) + content) for i, content in enumerate(contents)]
    (tmp_path / "x.rec").write_bytes(b"".join(records))
    return mxnet.image_record_source(tmp_path / "x.rec", 1, data_shape=(3, 8, 8), **options)


def png(array, form="PNG"):
    content = io.BytesIO()
    Image.fromarray(array).save(content, form)
    return content.getvalue()


def test_records_that_are_no_such_images(tmp_path):
    good = png(np.zeros((8, 9, 3), np.uint8))
    assert len(list(data.batches(of(tmp_path, good, good)))) == 2
    deep = png(np.zeros((8, 8), np.uint16))
    cut = png(np.random.RandomState(0).randint(0, 256, (20, 20, 3)).astype(np.uint8), "JPEG")[:-60]
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"  # Pillow would run Ghostscript
    refused = {b"": "got 0 bytes, of which Pillow says: cannot identify image file; on_bad="}
    refused |= {deep: "more than 8 bits", cut: "truncated", script: "cannot"}
    for content, words in refused.items():
        with pytest.raises(checkpoint.CheckpointError, match=f"x.rec: record 1: expected an image.*{words}"):
            list(data.batches(of(tmp_path, good, content)))
    with pytest.raises(ValueError, match="record 1, 8 x 7 before padding, is too small for a crop of 8 x 8; give res"):
        list(data.batches(of(tmp_path, good, png(np.zeros((8, 7, 3), np.uint8)))))
    with pytest.raises(checkpoint.CheckpointError, match="record 0 has 2 labels, label_width is 1"):
        list(data.batches(of(tmp_path, bytes(8) + good, label=(2, 0))))


def test_bad_records_are_left_out(tmp_path):
    """Those that are cut, empty or damaged in the .rec, for any number of devices. What is no damage is an error."""
    image = np.random.RandomState(0).randint(0, 256, (20, 20, 3)).astype(np.uint8)
    good, cut = png(image, "JPEG"), png(image, "JPEG")[:-60]
    contents = (good, cut, good, b"", good)
    with pytest.warns(UserWarning, match=r"2 of 5 records of .*x\.rec are left out: 1, 3$"):
        source = of(tmp_path, *contents, on_bad="skip")
    assert (len(source), source.skipped) == (3, (1, 3))
    assert source.arrays["image"][:].shape == (3, 8, 8, 3)
    for devices in jax.devices()[:1], jax.devices()[:2]:
        assert len(list(data.batches(source, 2, rng=jax.random.key(0), devices=devices))) == 1
    assert data.split(source, 1, rng=jax.random.key(0))[0].skipped == (1, 3)

    # Damage of the .rec itself, which is found by the .idx.
    content = (tmp_path / "x.rec").read_bytes()
    places = [content.index(MAGIC)]
    while (at := content.find(MAGIC, places[-1] + 4)) >= 0:
        places.append(at)
    (tmp_path / "x.idx").write_text("".join(f"{i}\t{place}\n" for i, place in enumerate(places)))
    (tmp_path / "x.rec").write_bytes(content[: places[2]] + b"RIFF" + content[places[2] + 4 :])
    with pytest.warns(UserWarning, match=r"3 of 5 records .* left out: 1, 2, 3"):
        mxnet.image_record_source(tmp_path / "x.rec", 1, data_shape=(3, 8, 8), idx=tmp_path / "x.idx", on_bad="skip")
    with pytest.raises(checkpoint.CheckpointError, match="record 0 has 2 labels"):
        list(data.batches(of(tmp_path, bytes(8) + good, label=(2, 0), on_bad="skip")))
    with pytest.raises(ValueError, match="too small for a crop"):
        list(data.batches(of(tmp_path, png(image[:7]), on_bad="skip")))
    for count, words in ((10, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9$"), (11, r"0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\.$")):
        with pytest.warns(UserWarning, match=f"{count} of {count + 1} records .* left out: {words}"):
            of(tmp_path, *[b""] * count, good, on_bad="skip")


def test_what_is_there_of_a_jpeg_that_was_cut(tmp_path):
    """The rest is grey. A PNG that was cut is left out, and `fit` counts what was left out."""
    image = Image.fromarray(np.random.RandomState(0).randint(0, 256, (8, 2, 3)).astype(np.uint8)).resize((64, 64))
    jpeg, lossless = png(np.asarray(image), "JPEG"), png(np.asarray(image))
    contents = (jpeg, jpeg[: len(jpeg) * 2 // 3], lossless[:-40], jpeg[:99])
    with pytest.warns() as warned:
        source = of(tmp_path, *contents, resize=8, on_bad="decode")
    texts = [str(warning.message) for warning in warned]
    assert [text.partition(" of 4 records")[0][-1] for text in texts] == ["2", "1"]
    assert "are left out: 2, 3" in texts[0]
    assert "are cut, and grey where nothing could be decoded: 1" in texts[1]
    whole, cut = source.arrays["image"][:]
    assert np.array_equal(whole[:2], cut[:2])
    assert (cut[-2:] == 128).all()
    loss_fn = lambda params, batch: params["w"] * batch["label"].mean()  # noqa: E731
    state, step = train.start({"w": np.zeros(())}, optax.sgd(0.1), loss_fn, devices=jax.devices()[:1])
    _, history = train.fit(state, step, source, epochs=1, batch_size=2, progress=False)
    assert history[0]["bad_records"] == 2


def test_damaged_images(tmp_path):
    """No change of bytes ends in an error of another kind, or never."""
    random = np.random.RandomState(0)
    smooth = np.add.outer(np.arange(24), np.arange(24))[..., None].repeat(3, 2).astype(np.uint8)
    refused = 0
    for i in range(90):
        content = bytearray(png(smooth, ("PNG", "JPEG", "BMP")[i % 3]))
        for at in random.randint(0, len(content), 4):
            content[at] = random.randint(256)
        try:
            of(tmp_path, bytes(content)).arrays["image"][:]
        except checkpoint.CheckpointError:
            refused += 1
    assert 20 < refused < 90
