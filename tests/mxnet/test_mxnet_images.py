"""Images of RecordIO files as training data: MXNet's bits, and those of a run however it is cut and shared."""

import io
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import records_run
import several_processes
from PIL import Image

from jaxpar import checkpoint, data, mxnet, train
from jaxpar.mxnet import _records

sys.path.insert(0, str(Path(__file__).parent))
from records import RECORDED, write

CASES = RECORDED["cases"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    return folder, write(folder)


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
    def on_step(step, metrics):
        if step == 4:
            raise OSError("the machine went away")

    want, history = fit(source())
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    with pytest.raises(OSError, match="went away"):
        fit(source(), on_step=on_step, **options)
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


def test_parts_and_other_dtypes(source):
    one, rest = data.split(source(), 4, rng=jax.random.key(2))
    assert (len(one), len(rest), one.batch_size) == (4, 7, 4)
    labels = np.concatenate([one["label"], rest["label"]])
    assert sorted(labels.tolist()) == list(range(11))
    (batch,) = data.batches(one, dtype=jnp.bfloat16)
    assert batch["image"].dtype == jnp.bfloat16
    assert "image float32 (21, 22, 3), label float32 ()" in repr(rest)


def of(tmp_path, *contents, label=(0, 1.0)):
    """A source of one record for each content."""
    records = [struct.pack("<IfQQ", *label, i, 0) + content for i, content in enumerate(contents)]
    heads = [struct.pack("<II", 0xCED7230A, len(record)) for record in records]
    parts = [h + r + bytes(-len(r) % 4) for h, r in zip(heads, records, strict=True)]
    (tmp_path / "x.rec").write_bytes(b"".join(parts))
    return mxnet.image_record_source(tmp_path / "x.rec", 1, data_shape=(3, 8, 8))


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
    for content, words in (
        (b"", "cannot identify"),
        (deep, "more than 8 bits"),
        (cut, "truncated"),
        (script, "cannot"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=f"x.rec: record 1: expected an image.*{words}"):
            list(data.batches(of(tmp_path, good, content)))
    with pytest.raises(
        ValueError, match=r"record 1, 8 x 7 before padding, is too small for a crop of 8 x 8; give resize"
    ):
        list(data.batches(of(tmp_path, good, png(np.zeros((8, 7, 3), np.uint8)))))
    with pytest.raises(checkpoint.CheckpointError, match="record 0 has 2 labels, label_width is 1"):
        list(data.batches(of(tmp_path, bytes(8) + good, label=(2, 0))))


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_shape": (4, 8, 8)}, r"data_shape must be \(1 or 3, height, width\), got \(4, 8, 8\)"),
        ({"data_shape": (3, 8)}, r"got \(3, 8\)"),
        ({"data_shape": (3, 0, 8)}, "data_shape must be"),
        ({"resize": 0}, "resize must be"),
        ({"layout": "NHCW"}, "unknown layout"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"label_width": 0}, "label_width must be"),
        ({"fill_value": 256}, "fill_value must be"),
        ({"pad": -1}, "pad must be"),
        ({"std_g": 0}, "std not 0"),
        ({"mean_b": float("nan")}, "must be finite"),
    ],
)
def test_wrong_options(source, options, words):
    with pytest.raises(ValueError, match=words):
        source(**options)
