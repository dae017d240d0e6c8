"""Loading: each source, what is refused, and what is left on the disk. All on the real files."""

import contextlib
import gzip
import http.server
import importlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from launched import background, free_port, python, until

from jaxpar import data
from jaxpar.data import _load
from jaxpar.data._load import DEBIAN_DIR, OFFICIAL

pytestmark = pytest.mark.data

SETTINGS = ("JAXPAR_DATA_DIR", "TFDS_DATA_DIR")
SHARD = "fashion_mnist-test.array_record-00000-of-00001"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def offline(monkeypatch):
    """A proxy that takes connections and never answers: the slowest way to have no network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield


@pytest.fixture
def no_debian(monkeypatch, tmp_path):
    monkeypatch.setattr(_load, "DEBIAN_DIR", tmp_path / "no-such-package")


LOAD = "import sys, jaxpar; print(len(jaxpar.data.load('fashion_mnist', 'test[:10]', data_dir=sys.argv[1])))"


def start_loading(folder):
    return background([sys.executable, "-c", LOAD, str(folder)])


def wait_for_writing(folder, process, already=()):
    """Until a folder that is not among `already` is being written; returns all that are unfinished then."""

    def is_written():
        return {path.parent for path in folder.glob("fashion_mnist/incomplete.*/*")} - set(already)

    until(lambda: is_written() or process.poll() is not None, 120)
    return set(folder.glob("fashion_mnist/incomplete.*"))


@pytest.fixture(scope="module")
def debian():
    """What reads Debian's files is skipped where they are not installed."""
    if not all((DEBIAN_DIR / name).is_file() for name in OFFICIAL):
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")


@pytest.fixture(scope="module")
def prepared(debian):
    """The user's own data_dir, which the pages and the notebooks read too, and the training set in it."""
    return Path.home() / "tensorflow_datasets", data.load("fashion_mnist", "train", verbose=False)


@pytest.fixture
def copy(prepared, tmp_path):
    """A data_dir with a copy, to be damaged, and the folder of the data set in it. The training set is linked."""

    def copy_or_link(source, target):
        return os.symlink(source, target) if "train" in Path(source).name else shutil.copy2(source, target)

    folder = tmp_path / "copy" / "fashion_mnist" / "3.0.1"
    shutil.copytree(prepared[0] / "fashion_mnist" / "3.0.1", folder, copy_function=copy_or_link)
    return tmp_path / "copy", folder


@pytest.fixture
def idx_files(debian, tmp_path):
    folder = tmp_path / "idx"
    shutil.copytree(DEBIAN_DIR, folder)
    return folder


def in_file_order(images, labels):
    """TFDS stores the examples in an order of its own; this one depends on the examples alone."""
    order = np.lexsort((*images.reshape(len(images), -1).T[300:500:8], labels, images.sum((1, 2, 3), np.int64)))
    return images[order], labels[order]


def check_it_is_fashion_mnist(train):
    assert train.images.shape == (60000, 28, 28, 1)
    assert train.images.dtype == np.uint8
    assert train.labels.dtype == np.int32
    assert np.bincount(train.labels).tolist() == [6000] * 10
    assert (train.name, train.part) == ("fashion_mnist", "train")
    images = _load.read_idx(DEBIAN_DIR / "train-images-idx3-ubyte.gz")[..., None]
    labels = _load.read_idx(DEBIAN_DIR / "train-labels-idx1-ubyte.gz")
    for mine, original in zip(in_file_order(train.images, train.labels), in_file_order(images, labels), strict=True):
        np.testing.assert_array_equal(mine, original)


def test_it_is_fashion_mnist(prepared):
    check_it_is_fashion_mnist(prepared[1])


@pytest.mark.slow  # writes the whole data set twice
def test_debians_files_become_fashion_mnist(debian, tmp_path):
    """Two processes write them at once, after a third one was killed while it wrote."""
    import tensorflow_datasets as tfds

    folder = tmp_path / "tfds"
    killed = start_loading(folder)
    left = wait_for_writing(folder, killed)
    killed.kill()
    killed.communicate()
    assert len(left) == 1, "the process was killed before or after it wrote"
    assert not (folder / "fashion_mnist" / "3.0.1").exists()
    other = start_loading(folder)
    try:
        beside = wait_for_writing(folder, other, left) - left
        train = data.load("fashion_mnist", "train", data_dir=folder, source="debian", verbose=False)
        printed, errors = other.communicate(timeout=120)
    finally:
        other.kill()
        other.communicate()
    assert len(beside) == 1, "the other process was not writing when this one began"
    assert (other.returncode, printed.splitlines()[-1]) == (0, "10"), errors
    assert "source: debian" in printed
    assert len(data.load(split="test", data_dir=folder, source="prepared", verbose=False)) == 10000
    assert train.source == "debian"
    check_it_is_fashion_mnist(train)

    # Plain TFDS reads what was written.
    source = tfds.data_source("fashion_mnist", split="train", download=False, data_dir=folder)
    assert len(source) == 60000
    for index in (0, 1, 59999):
        np.testing.assert_array_equal(source[index]["image"], train.images[index])
        assert source[index]["label"] == train.labels[index]
    info = json.loads((folder / "fashion_mnist" / "3.0.1" / "dataset_info.json").read_text())
    assert info["name"] == "fashion_mnist"
    assert info["moduleName"] == "tensorflow_datasets.image_classification.mnist"
    assert int(info["downloadSize"]) == 30878645  # of the official files, as TFDS lists them
    assert os.listdir(folder) == ["fashion_mnist"]
    assert sorted(os.listdir(folder / "fashion_mnist")) == ["3.0.1", *(path.name for path in left)]
    names = tfds.builder("fashion_mnist", data_dir=folder).info.features["label"].names
    assert tuple(names) == data.FASHION_MNIST_CLASSES


def test_checksums_are_the_ones_tfds_lists():
    infos = _load._builder_class("fashion_mnist").url_infos.values()
    assert {info.filename: info.checksum for info in infos} == {n: sha256 for n, (sha256, _) in OFFICIAL.items()}


def test_a_prepared_set_comes_first_and_the_line_says_so(prepared, capsys, offline, no_debian):
    test = data.load("fashion_mnist", "test", data_dir=prepared[0])
    assert test.source == "prepared"
    assert repr(test).startswith("Dataset(fashion_mnist test: 10000 images uint8 (28, 28, 1)")
    streams = capsys.readouterr()
    assert streams.err == ""  # which a notebook shows on red
    assert streams.out == f"jaxpar: fashion_mnist test, 10000 images, source: prepared ({prepared[0]})\n"
    part = data.load(split="test[:100]", data_dir=str(prepared[0]), source="prepared", verbose=False)
    np.testing.assert_array_equal(part.images, test.images[:100])
    assert capsys.readouterr() == ("", "")


def test_files_come_before_debian_and_empty_folders_are_passed_over(prepared, idx_files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXPAR_DATA_DIR", str(idx_files))
    assert _load._find("fashion_mnist", tmp_path / "new", "auto") == ("files", idx_files)
    monkeypatch.setenv("JAXPAR_DATA_DIR", str(tmp_path / "nothing"))
    assert _load._find("fashion_mnist", tmp_path / "new", "auto") == ("debian", DEBIAN_DIR)
    assert _load._find("mnist", tmp_path / "new", "auto") == ("download", None)
    monkeypatch.setenv("JAXPAR_DATA_DIR", str(idx_files))
    again = data.load(split="test[:10]", source="files", data_dir=prepared[0])
    assert again.source == "files"
    assert str(idx_files) in capsys.readouterr().out


def test_the_default_folder_is_the_one_tfds_has(prepared, monkeypatch, capsys):
    data.load(split="test[:10]")
    assert f"source: prepared ({Path.home() / 'tensorflow_datasets'})" in capsys.readouterr().out
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared[0]))
    assert data.load(split="test[:10]", verbose=False).source == "prepared"


def test_the_official_files_have_the_official_checksum(idx_files):
    name = "t10k-labels-idx1-ubyte.gz"
    official = _load.official_bytes(idx_files / name)
    assert official != (idx_files / name).read_bytes()
    (idx_files / name).write_bytes(official)
    assert _load.official_bytes(idx_files / name) == official


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def recompress(path):
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))


@pytest.mark.parametrize("damage", [truncate, flip, recompress, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["t10k-labels-idx1-ubyte.gz", "train-images-idx3-ubyte.gz"])
def test_a_damaged_file_is_refused_by_name(name, damage, idx_files, tmp_path, monkeypatch):
    if damage is recompress and "images" in name:
        name = "train-labels-idx1-ubyte.gz"  # quick to compress
    damage(idx_files / name)
    monkeypatch.setenv("JAXPAR_DATA_DIR", str(idx_files))
    with pytest.raises(ValueError, match=f"{name} is not the official.*{OFFICIAL[name][0]}.*got [0-9a-f]"):
        data.load(data_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_missing_file_is_named(idx_files, tmp_path, monkeypatch, no_debian):
    (idx_files / "t10k-labels-idx1-ubyte.gz").unlink()
    monkeypatch.setenv("JAXPAR_DATA_DIR", str(idx_files))
    for source in ("auto", "files"):
        with pytest.raises(FileNotFoundError, match=r"idx lacks t10k-labels-idx1-ubyte.gz\. .*apt-get install"):
            data.load(data_dir=tmp_path / "new", source=source)


def test_a_source_that_is_not_there_is_an_error(tmp_path, monkeypatch, no_debian):
    with pytest.raises(FileNotFoundError, match=r"JAXPAR_DATA_DIR is not set.*apt-get install dataset-fashion"):
        data.load(data_dir=tmp_path, source="files")
    with pytest.raises(FileNotFoundError, match="no-such-package lacks train-images"):
        data.load(data_dir=tmp_path, source="debian")
    with pytest.raises(FileNotFoundError, match="holds no 'fashion_mnist' prepared"):
        data.load(data_dir=tmp_path, source="prepared")
    with pytest.raises(ValueError, match=r"data\.load: unknown source 'web'; known are auto, prepared, .*download"):
        data.load(data_dir=tmp_path, source="web")
    with pytest.raises(ValueError, match="source='debian' is for 'fashion_mnist' only; got name 'mnist'"):
        data.load("mnist", data_dir=tmp_path, source="debian")
    with pytest.raises(ValueError, match="knows no data set 'fashion_nist'"):
        data.load("fashion_nist", data_dir=tmp_path)
    assert os.listdir(tmp_path) == []


def cut_to(size):
    return lambda folder: os.truncate(folder / SHARD, size)


DAMAGES = {
    "empty": cut_to(0),
    "64 KB": cut_to(65536),
    "half": cut_to(3_000_000),
    "last block": cut_to(6_225_920),
    "flipped": lambda folder: flip(folder / SHARD),
    "no shard": lambda folder: (folder / SHARD).unlink(),
    "half info": lambda folder: (folder / "dataset_info.json").write_text('{"name": "fash'),
    "no info": lambda folder: (folder / "dataset_info.json").unlink(),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_prepared_set_is_refused_by_name(damage, copy):
    DAMAGES[damage](copy[1])
    with pytest.raises(ValueError, match=r"prepared data set in .*copy/fashion_mnist.* is damaged .*Delete that"):
        data.load(split="test", data_dir=copy[0])


FRESH = """
import sys
import numpy as np
import jaxpar
found = jaxpar.data.load("fashion_mnist", "train", data_dir=sys.argv[1], verbose=False)
np.savez(sys.argv[2], images=found.images, labels=found.labels)
print("tensorflow_datasets" in sys.modules, found)
"""


def test_what_was_decoded_once_is_not_decoded_again(prepared, tmp_path):
    said = python("-c", FRESH, prepared[0], tmp_path / "found.npz").stdout
    assert said.startswith("False Dataset(fashion_mnist train: 60000 images uint8")
    assert "source='prepared'" in said
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_array_equal(found["images"], prepared[1].images)
        np.testing.assert_array_equal(found["labels"], prepared[1].labels)
        assert found["labels"].dtype == np.int32


@pytest.mark.slow
def test_decoding_writes_nothing_to_standard_error(prepared):
    """TFDS recommends OpenCV there, which a notebook shows in red."""
    output, errors = start_loading(prepared[0]).communicate(timeout=120)
    assert output.endswith("10\n")
    assert errors == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "change",
    [
        lambda folder: os.utime(folder / SHARD),
        pytest.param(lambda folder: (folder / "another-file").write_text(""), marks=pytest.mark.slow),
        pytest.param(lambda folder: flip(folder / "jaxpar-test.npz"), marks=pytest.mark.slow),
        pytest.param(lambda folder: (folder / "jaxpar-test.npz").write_bytes(b""), marks=pytest.mark.slow),
        lambda folder: (folder / "jaxpar-test.npz").unlink(),
    ],
    ids=["a shard's time", "a new file", "flipped", "empty", "none"],
)
def test_a_copy_that_is_damaged_or_older_does_not_count_and_is_made_anew(change, copy, monkeypatch):
    def load():
        return data.load(split="test", data_dir=copy[0], verbose=False)

    expected, decoded = load(), []
    arrays = expected.images, expected.labels  # decoding takes seconds
    monkeypatch.setattr(_load, "_decode_split", lambda *args: decoded.append(args) or arrays)
    load()
    assert not decoded
    change(copy[1])
    for _ in range(2):
        found = load()
        np.testing.assert_array_equal(found.images, expected.images)
        np.testing.assert_array_equal(found.labels, expected.labels)
    assert len(decoded) == 1
    assert not list(copy[1].glob(".jaxpar*"))


def cached(folder, labels=20, dtype=np.int32):
    """A folder as TFDS's, of 20 examples, with a decoded copy of other arrays in it."""
    info = {"splits": [{"name": "test", "shardLengths": ["12", "8"]}, {"name": "train", "shardLengths": ["5"]}]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    images = np.arange(20 * 12, dtype=np.uint8).reshape(20, 3, 4)
    _load.save_copy(folder, "test", images, np.arange(labels, dtype=dtype))
    return folder / "jaxpar-test.npz", images


@pytest.mark.slow
def test_no_flipped_bit_of_a_copy_gets_out(tmp_path):
    """In the headers of the zip file, where a bit decides what `zipfile` raises; in the arrays a checksum finds it."""
    path, images = cached(tmp_path)
    good = path.read_bytes()
    members = [good.index(name) for name in (b"images.npy", b"labels.npy", b"origin.npy")]
    directory = good.index(b"PK\x01\x02")
    places = [*(i for at in members for i in range(at - 30, at + 10)), *range(directory, len(good))]
    lost = 0
    for place in places:
        for bit in (place % 8, (place + 4) % 8):
            damaged = bytearray(good)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            found = _load.load_copy(tmp_path, "test")
            lost += found is None
            if found is not None:
                np.testing.assert_array_equal(found[0], images)
                np.testing.assert_array_equal(found[1], np.arange(20))
    assert lost > len(places) // 4
    path.write_bytes(good)
    assert _load.load_copy(tmp_path, "test") is not None


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, TypeError, MemoryError, RecursionError])
def test_whatever_a_damaged_copy_raises_it_is_decoded_again(error, tmp_path, monkeypatch):
    def damaged(file):
        raise error

    cached(tmp_path)
    monkeypatch.setattr(np, "load", damaged)
    assert _load.load_copy(tmp_path, "test") is None


@pytest.mark.parametrize(
    "forged", [{"labels": 19}, {"labels": 21}, {"labels": 0}, {"dtype": np.int64}, {"dtype": float}]
)
def test_a_forged_copy_is_refused(forged, tmp_path):
    cached(tmp_path, **forged)
    assert _load.load_copy(tmp_path, "test") is None


def test_a_copy_of_another_number_of_examples_is_refused(tmp_path):
    path, _ = cached(tmp_path)
    path.rename(tmp_path / "jaxpar-train.npz")
    assert _load.load_copy(tmp_path, "train") is None
    assert _load.load_copy(tmp_path, "test[:5]") is None


def test_a_copy_without_its_data_set_is_no_error(tmp_path, monkeypatch):
    """Someone removed the files of TFDS meanwhile."""
    cached(tmp_path)
    assert _load.load_copy(tmp_path, "test") is not None
    origin = _load._origin(tmp_path)
    monkeypatch.setattr(_load, "_origin", lambda folder: origin)
    (tmp_path / "dataset_info.json").unlink()
    assert _load.load_copy(tmp_path, "test") is None
    monkeypatch.undo()
    _load.save_copy(tmp_path / "removed", "test", np.zeros((2, 3), np.uint8), np.zeros(2, np.int32))
    assert not (tmp_path / "removed").exists()


@pytest.mark.slow
def test_parts_and_large_splits_are_not_kept_and_a_full_disk_is_no_error(copy, monkeypatch):
    for path in copy[1].glob("jaxpar-*"):
        path.unlink()
    assert len(data.load(split="test[:10]", data_dir=copy[0])) == 10

    def full(*args, **arrays):
        raise OSError("No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(np, "savez", full)
        test = data.load(split="test", data_dir=copy[0])
    assert len(test) == 10000
    monkeypatch.setattr(_load, "_decode_split", lambda *args: (test.images, test.labels))  # which takes seconds
    monkeypatch.setattr(_load, "_MOST_BYTES", 1000)
    assert len(data.load(split="test", data_dir=copy[0])) == 10000
    assert not list(copy[1].glob("jaxpar-*"))


def test_an_unknown_split_and_a_format_for_tensorflow_are_said(copy):
    with pytest.raises(ValueError, match=r"no split 'valid'; it has \['test', 'train'\]"):
        data.load(split="valid", data_dir=copy[0])
    info = copy[1] / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    for shard in copy[1].glob("*.array_record-*"):
        shard.rename(str(shard).replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match="cannot be read without TensorFlow; give another data_dir"):
        data.load(split="test", data_dir=copy[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fashion_mnist", r"cannot download http.*apt-get install dataset-fashion-mnist"),
        ("mnist", r"cvdf-datasets/mnist/.* Without a network: give data_dir="),
    ],
)
def test_without_a_network_it_fails_soon_and_says_what_to_do(name, message, offline, no_debian, tmp_path, monkeypatch):
    (seconds,) = _load.check_reachable.__defaults__
    assert seconds <= 5
    monkeypatch.setattr(_load.check_reachable, "__defaults__", (0.3,))
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=message):
        data.load(name, data_dir=tmp_path / "new")
    assert time.monotonic() - start < 20
    assert not (tmp_path / "new").exists()


@pytest.fixture
def web(monkeypatch, idx_files):
    """A proxy that answers every request with the official file of that name, made from `idx_files`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            path = idx_files / self.path.rsplit("/", 1)[1]
            content = _load.official_bytes(path) if path.name not in damaged else path.read_bytes()
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the probe reads no body
                self.wfile.write(content)

        def log_message(self, *args):
            pass

    damaged = set()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("no_proxy", raising=False)
        yield damaged
        server.shutdown()


def test_the_download_keeps_the_official_checksums(web, no_debian, tmp_path):
    web.add("t10k-labels-idx1-ubyte.gz")
    with pytest.raises(Exception, match=r"t10k-labels-idx1-ubyte.gz, downloaded to .* has wrong checksum"):
        data.load(split="test", data_dir=tmp_path / "new", verbose=False)
    assert not (tmp_path / "new" / "fashion_mnist" / "3.0.1").exists()


@pytest.mark.slow
def test_the_download_is_the_same_data_set(web, no_debian, tmp_path, prepared, monkeypatch):
    """The test set; of the training set 1,000 images are written, which test_debians_files_... compares whole."""
    mnist, read_idx = importlib.import_module(_load._builder_class("fashion_mnist").__module__), _load.read_idx
    monkeypatch.setattr(mnist, "_TRAIN_EXAMPLES", 1000)
    monkeypatch.setattr(_load, "read_idx", lambda path: (found := read_idx(path))[: {60000: 1000}.get(len(found))])
    test = data.load(split="test", data_dir=tmp_path / "new", verbose=False)
    assert test.source == "download"
    expected = data.load(split="test", data_dir=prepared[0], verbose=False)
    np.testing.assert_array_equal(test.images, expected.images)
    np.testing.assert_array_equal(test.labels, expected.labels)


def test_a_refusing_host_is_no_network_either():
    port = free_port()
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port}/x: the host cannot be reached"):
        _load.check_reachable(f"http://127.0.0.1:{port}/x", "", 2.0)


@pytest.mark.parametrize("is_there", [True, False])
def test_an_error_counts_where_no_other_process_has_written_the_data_set(is_there, copy, idx_files, monkeypatch):
    """Of two processes that write at once, the second one finds the target there at the end, and TFDS raises."""

    def end_late(builder, **options):
        raise OSError("Directory not empty")

    monkeypatch.setattr(_load._tfds().core.DatasetBuilder, "download_and_prepare", end_late)
    folder = copy[0] if is_there else copy[0] / "new"
    with contextlib.nullcontext() if is_there else pytest.raises(OSError, match="Directory not empty"):
        _load.prepare("fashion_mnist", folder, idx_files)


def numbered(n):
    return data.Dataset(np.arange(n, dtype=np.float32)[:, None], np.arange(n), source="mine", name="n", part="train")


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.8, 81), (0.01, 1), (7, 7), (np.int64(100), 100), (np.float32(0.5), 50)]
)
def test_a_split_shares_no_example(fraction, count):
    first, rest = numbered(101).split(fraction)
    assert (len(first), len(rest)) == (count, 101 - count)
    np.testing.assert_array_equal(np.sort([*first.labels, *rest.labels]), np.arange(101))
    np.testing.assert_array_equal(first.images[:, 0], first.labels)  # an image keeps its label
    assert (first.source, first.name, first.part) == ("mine", "n", "train")


def test_a_split_is_drawn_by_its_key_only():
    first, _ = numbered(50).split(0.9)
    assert first.labels.tolist() != list(range(45))
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):
        same, _ = numbered(50).split(0.9, rng=0)
    other, _ = numbered(50).split(0.9, rng=jax.random.key(1))
    np.testing.assert_array_equal(first.labels, same.labels)
    assert first.labels.tolist() != other.labels.tolist()
    first, rest = numbered(50).split(10, shuffle=False)
    assert (first.labels.tolist(), rest.labels.tolist()) == ([*range(10)], [*range(10, 50)])
