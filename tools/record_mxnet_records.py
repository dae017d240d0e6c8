"""RecordIO files of MXNet 1.9.1 and what its ImageRecordIter makes of them, for tests/mxnet/test_mxnet_records.py.

It runs in an environment of its own, since MXNet's last release needs Python 3.8 and an old NumPy:

    python3.8 -m venv mxnet38
    mxnet38/bin/pip install -r benchmarks/requirements-mxnet.txt pillow==10.4.0
    mxnet38/bin/python tools/record_mxnet_records.py tests/reference

Pillow makes the images. mxnet_records.npz has the files as bytes (`files/NAME`), and for each case of `CASES` the
images and labels of the batches (`NAME/images`, `NAME/labels`). The options of a case, and the names of all options,
are in mxnet_records.json. The files `net...` are a network and what tools/mxnet_outputs.py writes of it, for
tests/mxnet/test_mxnet_compare.py.
"""

import io
import json
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

import mxnet as mx
import numpy as np
from PIL import Image

FOLDER = pathlib.Path(sys.argv[1])
MAGIC = struct.pack("<I", 0xCED7230A)
IMAGENET = {"mean_r": 123.68, "mean_g": 116.779, "mean_b": 103.939, "std_r": 58.393, "std_g": 57.12, "std_b": 57.375}
# name: (file, options)
CASES = {
    "centre": ("lossless", {"data_shape": (3, 30, 29)}),
    "mean": ("lossless", {"data_shape": (3, 12, 11), "scale": 0.017, **IMAGENET}),
    "mirror": ("lossless", {"data_shape": (3, 30, 29), "mirror": True, "mean_r": 5.5}),
    "pad": ("lossless", {"data_shape": (3, 60, 66), "pad": 20, "fill_value": 7}),
    "grey": ("grey", {"data_shape": (1, 20, 20), "mean_r": 9.0, "std_r": 3.0}),
    "labels": ("labels", {"data_shape": (3, 20, 20), "label_width": 3}),
    "jpeg": ("jpeg", {"data_shape": (3, 32, 30)}),
    "large": ("large", {"data_shape": (3, 48, 40), "resize": 256}),
    **{f"resize {n}": ("lossless", {"data_shape": (3, 20, 20), "resize": n}) for n in (20, 31, 33, 64)},
}


def picture(height, width, channels=3):
    random = np.random.RandomState(height)
    y, x = np.mgrid[:height, :width]
    waves = [127 + 100 * np.sin(x / (5 + k) + y / (7 - k)) for k in range(channels)]
    noisy = np.stack(waves, -1) + random.normal(0, 4, (height, width, channels))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8).squeeze())


def encoded(image, form, **options):
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def write(folder, name, records):
    file = mx.recordio.MXIndexedRecordIO(str(folder / (name + ".idx")), str(folder / (name + ".rec")), "w")
    for i, record in enumerate(records):
        file.write_idx(i + 10, record)
    file.close()


def packed(contents, labels=None):
    labels = range(len(contents)) if labels is None else labels
    return [mx.recordio.pack(mx.recordio.IRHeader(0, y, i, 0), c) for i, (y, c) in enumerate(zip(labels, contents))]  # noqa: B905


def images():
    """The records of each file."""
    sizes = [(40, 50), (60, 37), (33, 64), (48, 48), (30, 29)]
    photo = picture(40, 50)
    turned = Image.Exif()
    turned[0x112] = 6
    forms = [{"quality": 95}, {"quality": 60}, {"subsampling": 0}, {"progressive": True}, {"exif": turned}]
    jpeg = [encoded(photo, "JPEG", **form) for form in forms]
    jpeg += [encoded(photo.convert(mode), "JPEG") for mode in ("L", "CMYK")]
    lossless = [encoded(picture(h, w), "PNG") for h, w in sizes] + [encoded(photo, "BMP")]
    lossless += [encoded(photo.convert(mode), "PNG") for mode in ("RGBA", "P", "L", "LA", "1")]
    parts = [b"", b"abc", MAGIC, b"abcd" + MAGIC + b"ef", MAGIC * 3 + b"x", b"ab" + MAGIC, bytes(range(256)) * 5]
    return {
        "lossless": packed(lossless),
        "grey": packed([encoded(picture(24, 20, 1), "PNG"), encoded(picture(21, 30, 1), "JPEG"), *lossless[:1], *jpeg]),
        "jpeg": packed(jpeg),
        "large": packed([encoded(picture(375, 500), "JPEG", quality=70), encoded(picture(500, 333), "JPEG")]),
        "labels": packed(lossless[:2], [np.float32([1, 2.5, -3]), np.float32([0, 7, 8])]),
        "parts": parts,
    }


def network(folder):
    """A network with all of its files, by tools/mxnet_outputs.py."""
    x = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=6, name="conv")
    x = mx.sym.LeakyReLU(mx.sym.BatchNorm(x, fix_gamma=False, name="norm"), slope=0.3, name="leaky")
    one, two = mx.sym.split(mx.sym.Dropout(x, name="dropout"), num_outputs=2, name="halves")
    x = mx.sym.FullyConnected(one * two, num_hidden=5, name="dense")
    symbol = mx.sym.SoftmaxOutput(x, name="softmax")
    arguments, _, states = symbol.infer_shape(data=(2, 3, 6, 5))
    random = np.random.RandomState(0)
    made = {}
    for kind, names, shapes in (
        ("arg:", symbol.list_arguments(), arguments),
        ("aux:", symbol.list_auxiliary_states(), states),
    ):
        made.update({kind + n: mx.nd.array(random.random_sample(s) + 0.1) for n, s in zip(names, shapes)})  # noqa: B905
    np.savez(str(folder / "inputs.npz"), data=made.pop("arg:data").asnumpy())
    made.pop("arg:softmax_label")
    symbol.save(str(folder / "net-symbol.json"))
    mx.nd.save(str(folder / "net.params"), made)
    names = "net-symbol.json", "net.params", "inputs.npz", "net-outputs.params"
    tool = pathlib.Path(__file__).with_name("mxnet_outputs.py")
    subprocess.run([sys.executable, str(tool), *[str(folder / name) for name in names]], check=True)
    return ["net-symbol.json", "net.params", "net-outputs.params"]


kept = {}
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    counts = {}
    for name, records in images().items():
        write(folder, name, records)
        counts[name] = len(records)
        for end in (".rec", ".idx"):
            kept["files/" + name + end] = np.frombuffer((folder / (name + end)).read_bytes(), np.uint8)
        read = mx.recordio.MXRecordIO(str(folder / (name + ".rec")), "r")
        assert [read.read() for _ in records] == records
    for name in network(folder):
        kept["files/" + name] = np.frombuffer((folder / name).read_bytes(), np.uint8)
    for i, record in enumerate(images()["parts"]):
        kept[f"parts/{i}"] = np.frombuffer(record, np.uint8)
    for name, (file, options) in CASES.items():
        rec, idx = (str(folder / (file + end)) for end in (".rec", ".idx"))
        found = mx.io.ImageRecordIter(
            path_imgrec=rec, path_imgidx=idx, batch_size=counts[file], preprocess_threads=1, **options
        ).next()
        pixels = found.data[0].asnumpy()
        whole = pixels.astype(np.uint8)
        kept[name + "/images"] = whole if (whole == pixels).all() else pixels
        kept[name + "/labels"] = found.label[0].asnumpy()
np.savez_compressed(str(FOLDER / "mxnet_records.npz"), **kept)
options = re.findall(r"^(\w+) : ", mx.io.ImageRecordIter.__doc__, re.MULTILINE)
cases = {"version": mx.__version__, "cases": CASES, "options": options}
(FOLDER / "mxnet_records.json").write_text(json.dumps(cases) + "\n")
