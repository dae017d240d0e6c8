"""Load a data set of tensorflow-datasets (TFDS) by name: found, prepared and read without TensorFlow.

Begin with `load`. `_find` says where the data is, `prepare` has TFDS write it, `read` decodes it or takes the decoded
copy of the time before.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import struct
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .._core import checks, files, text
from .._core.arguments import no_such_arguments
from ._sources import Dataset

_HINTS = {
    **dict.fromkeys(("batch_size", "shuffle"), "data.batches and train.fit make batches, and shuffle"),
    **dict.fromkeys(("train", "subset"), "say which part, data.load(name, 'train') or data.load(name, 'test')"),
    **dict.fromkeys(("root", "path", "dir"), "call it data_dir"),
}
PathLike = str | os.PathLike[str]
_SOURCES = ("auto", "prepared", "files", "debian", "download")
_COPY = "jaxpar-"  # the beginning of the name of a decoded copy
_MOST_BYTES = 1 << 30  # of the arrays of a decoded copy


@no_such_arguments(_HINTS)
def load(
    name: str = "fashion_mnist",
    split: str = "train",
    *,
    data_dir: PathLike | None = None,
    source: str = "auto",
    verbose: bool = True,
) -> Dataset:
    """Load a split of a data set of tensorflow-datasets (TFDS), without TensorFlow.

    The first call writes the data set into `data_dir`, as TFDS would. Other processes may do the same at the same time,
    and a crash leaves no half-written data set. Decoding 60,000 images takes seconds, so a decoded copy of each split
    of up to 1 GiB is kept next to TFDS's files. The copy is made again when those files change.

    Args:
        name: TFDS's name of an image classification data set. "fashion_mnist" works without a network.
        split: "train", "test", or a part in TFDS's notation, such as "train[:1000]".
        data_dir: TFDS's directory. None: $TFDS_DATA_DIR, else ~/tensorflow_datasets, as in TFDS.
        source: "prepared": a TFDS data set in `data_dir`. "files": the four idx .gz files in $JAXPAR_DATA_DIR.
            "debian": the files of the Debian package dataset-fashion-mnist. "download": TFDS downloads. "auto": the
            first available of these.
        verbose: print one line with the origin of the data.

    Returns:
        A `Dataset`: `images` uint8 `(n, 28, 28, 1)`, `labels` int32 `(n,)`, in TFDS's fixed order.

    Raises:
        ConnectionError: the download's host does not answer within 10 seconds. The message says what to do.
        FileNotFoundError: the source is missing, or lacks a file.
        ValueError: the name, split or source is unknown, or a file or data set is damaged. The message names it.
    """
    checks.choice(source, "data.load", "source", _SOURCES)
    if data_dir is None:
        data_dir = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"  # TFDS reads it once, at import
    folder = files.as_path(data_dir, "data.load: data_dir")
    origin, idx_files = _find(name, folder, source)
    if origin != "prepared" and prepared_dir(name, folder) is None:
        prepare(name, folder, idx_files)
    dataset = Dataset(*read(name, split, folder), source=origin, name=name, part=split)
    if verbose:
        place = f"{idx_files}, kept in {folder}" if idx_files else folder
        text.say_news(f"{name} {split}, {len(dataset)} images, source: {origin} ({place})")
    return dataset


def _find(name: str, folder: Path, source: str) -> tuple[str, Path | None]:
    """The first available source that `source` allows, and the directory of its idx files."""
    if source in ("auto", "prepared") and prepared_dir(name, folder) is not None:
        return "prepared", None
    if source == "prepared":
        raise FileNotFoundError(f"{folder} holds no {name!r} prepared by tensorflow-datasets. {_advice(name)}")
    if source in ("files", "debian") and name != "fashion_mnist":
        raise ValueError(f"source={source!r} is for 'fashion_mnist' only; got name {name!r}")
    files_dir = os.environ.get("JAXPAR_DATA_DIR")
    if source == "files" and not files_dir:
        raise FileNotFoundError(f"source 'files': $JAXPAR_DATA_DIR is not set. {_advice(name)}")
    idx_folders = {"files": files.as_path(files_dir, "data.load: $JAXPAR_DATA_DIR")} if files_dir else {}
    for origin, idx_folder in {**idx_folders, "debian": DEBIAN_DIR}.items():
        if name == "fashion_mnist" and source in ("auto", origin):
            missing = [file for file in OFFICIAL if not (idx_folder / file).is_file()]
            if not missing:
                return origin, idx_folder
            if source == origin or len(missing) < len(OFFICIAL):  # some of them are there, so the folder was meant
                raise FileNotFoundError(f"source {origin!r}: {idx_folder} lacks {', '.join(missing)}. {_advice(name)}")
    return "download", None


def _advice(name: str) -> str:
    """Advice for a machine without network."""
    elsewhere = "give data_dir=, a folder that tensorflow-datasets prepared on another machine"
    if name != "fashion_mnist":
        return f"Without a network: {elsewhere}."
    return (
        "Without a network: install Debian's package (apt-get install dataset-fashion-mnist), or set "
        f"$JAXPAR_DATA_DIR to a folder with {', '.join(OFFICIAL)}, or {elsewhere}."
    )


# The data sets of TFDS.


@functools.cache
def _tfds() -> Any:
    """The package, imported on first use (about a second)."""
    with warnings.catch_warnings(action="ignore"):  # of its own imports; none concerns the caller
        import tensorflow_datasets as tfds
    # TFDS recommends OpenCV at the first image, on standard error. Decoded copies make that advice useless.
    logging.getLogger("absl").addFilter(lambda record: not str(record.msg).startswith("OpenCV is not installed"))
    return tfds


@functools.cache
def _builder_class(name: str) -> Any:
    """TFDS's builder of `name`. MNIST and its relatives read their idx files without TensorFlow."""
    tfds = _tfds()
    from PIL import Image
    from tensorflow_datasets.image_classification import mnist

    stock = tfds.builder_cls(name)
    if stock not in (mnist.MNIST, mnist.FashionMNIST, mnist.KMNIST):
        return stock

    class Builder(stock, skip_registration=True):  # pyright: ignore
        __module__ = stock.__module__  # recorded in dataset_info.json, and where TFDS finds the checksums
        name = stock.name

        def _split_generators(self, dl_manager: Any) -> Any:
            # TFDS's extraction of .gz files needs TensorFlow, so they stay as they are.
            return super()._split_generators(types.SimpleNamespace(download_and_extract=dl_manager.download))

        def _generate_examples(
            self, num_examples: int, data_path: PathLike, label_path: PathLike
        ) -> Iterator[tuple[int, dict[str, Any]]]:
            images, labels = read_idx(data_path), read_idx(label_path)
            for index, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
                file = io.BytesIO()  # a PNG file, which TFDS stores as it is. TensorFlow would encode an array.
                Image.fromarray(image).save(file, "PNG", compress_level=3)  # the default takes twice as long, saves 3 %
                file.seek(0)
                yield index, {"image": file, "label": label}

    return Builder


def prepared_dir(name: str, data_dir: Path) -> Path | None:
    """The folder of a prepared `name` in `data_dir`, or None."""
    # A good copy in it saves the slow import of TFDS.
    copies = Path(data_dir, name).glob(f"*/{_COPY}*.npz")
    folders = {path.parent for path in copies if _read_copy(path) is not None}
    if len(folders) == 1:
        return folders.pop()
    builder = _builder(name, data_dir)
    return Path(builder.data_dir) if Path(builder.data_dir).exists() else None


def prepare(name: str, data_dir: Path, idx_files: Path | None) -> None:
    """Write TFDS's `name` into `data_dir` from the `idx_files`. None: from TFDS's own download."""
    # TFDS writes into `incomplete.*` next to the target and renames it at the end. A process that finds the target
    # there by then deletes its own, so that several may prepare at once.
    cls = _builder_class(name)
    if idx_files is None:
        urls = [cls.URL + "train-labels-idx1-ubyte.gz"] if hasattr(cls, "URL") else list(cls.url_infos or ())
        for url in urls[:1]:
            check_reachable(url, _advice(name))
    with contextlib.ExitStack() as stack:
        manual_dir = None
        if idx_files is not None:
            manual_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxpar-")))
            for file in OFFICIAL:
                (manual_dir / file).write_bytes(official_bytes(idx_files / file))
            # TFDS prints, and draws bars, in a notebook too, for a download; here there is none.
            _tfds().disable_progress_bar()
            stack.callback(_tfds().enable_progress_bar)
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        config = _tfds().download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
        builder = cls(data_dir=data_dir, file_format="array_record")
        try:
            builder.download_and_prepare(download_dir=manual_dir, download_config=config)
        except OSError:
            if prepared_dir(name, data_dir) is None:
                raise


def read(name: str, split: str, data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a prepared data set, in its stored order, each record's checksum verified."""
    # The first time a whole split is decoded, a copy is kept for the next time.
    folder = prepared_dir(name, data_dir)
    if folder is not None and (copy := load_copy(folder, split)) is not None:
        return copy
    images, labels = _decode_split(name, split, data_dir)
    if folder is not None:
        save_copy(folder, split, images, labels)
    return images, labels


def _decode_split(name: str, split: str, data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    builder = _builder(name, data_dir)
    if not builder.info.splits:
        raise _damage_error(builder.data_dir, "dataset_info.json is missing or names no split")
    try:
        expected = builder.info.splits[split].num_examples
    except (KeyError, ValueError):
        splits = sorted(builder.info.splits)
        hint = text.did_you_mean(split, splits) or "; a part of one is 'train[:50000]'"
        raise ValueError(f"{name} has no split {split!r}; it has {splits}{hint}") from None
    features = builder.info.features
    if not hasattr(features, "keys") or not {"image", "label"} <= set(features.keys()):
        raise ValueError(f"jaxpar reads data sets of 'image' and 'label'; {name} has {features}")
    images: list[np.ndarray] = []
    labels: list[int] = []
    try:
        records = builder.as_data_source(split=split)
        for start in range(0, len(records), 1000):  # at once, which is faster than one by one
            for record in records.__getitems__(range(start, min(start + 1000, len(records)))):
                images.append(record["image"])
                labels.append(record["label"])
        if len(images) != expected:
            raise RuntimeError(f"{expected} records expected, {len(images)} found")
        return np.stack(images), np.asarray(labels, np.int32)
    except NotImplementedError as error:  # prepared in a format that only TensorFlow reads
        raise ValueError(
            f"the data set in {builder.data_dir} is stored as {builder.info.file_format}, which cannot be read without "
            "TensorFlow; give another data_dir, or convert it to array_record"
        ) from error
    except Exception as error:
        raise _damage_error(builder.data_dir, f"split {split!r}: {error}") from error


def _damage_error(folder: str | Path, reason: str) -> ValueError:
    return ValueError(f"the prepared data set in {folder} is damaged ({reason}). Delete that folder and load again.")


def _builder(name: str, data_dir: Path) -> Any:
    """TFDS's builder for reading. A dataset_info.json that it cannot read is named."""
    try:
        return _tfds().builder(name, data_dir=data_dir)
    except _tfds().core.DatasetNotFoundError:
        near = text.did_you_mean(name, _tfds().list_builders(with_community_datasets=False))
        raise ValueError(f"data.load: tensorflow-datasets knows no data set {name!r}{near}") from None
    except Exception as error:
        raise _damage_error(data_dir / name, str(error)) from error


def check_reachable(url: str, advice: str, seconds: float = 5.0) -> None:
    """Ask for `url` once, where TFDS would retry for minutes. `ConnectionError` says what came instead."""
    # A name look-up cannot be given a time limit, so this is a thread of its own. Proxies count, as they do for TFDS.
    import requests

    answer: list[str] = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        try:
            with requests.get(url, stream=True, timeout=seconds) as response:
                answer[0] = "" if response.ok else f"HTTP status {response.status_code}"
        except requests.RequestException as error:
            answer[0] = f"the host cannot be reached ({type(error).__name__})"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if answer[0]:
        raise ConnectionError(f"cannot download {url}: {answer[0]}. {advice}")


# Decoded copies, so that the next process need not decode each image again. The copy of a split is a file among those
# of TFDS, `jaxpar-train.npz`, and is deleted with them. It records its source files and the version of
# tensorflow-datasets. A copy that is damaged, or of other files, is ignored.


def load_copy(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Images and labels of a whole split, if there is a good copy."""
    arrays = _read_copy(folder / f"{_COPY}{split}.npz", "images", "labels")
    if arrays is None:
        return None
    images, labels = arrays
    # The arrays must be those that `_decode_split` gives, whoever wrote the file.
    if images.dtype.kind not in "buif" or labels.dtype != np.int32:
        return None
    try:
        splits = json.loads((folder / "dataset_info.json").read_text())["splits"]
        count = sum(int(length) for entry in splits if entry["name"] == split for length in entry["shardLengths"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (images, labels) if images.shape[:1] == labels.shape[:1] == (count,) else None


def save_copy(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Keep a copy of a whole split, where that is possible."""
    origin = _origin(folder)
    if origin is None or not split.isidentifier() or images.nbytes + labels.nbytes > _MOST_BYTES:
        return
    with contextlib.suppress(OSError):  # a read-only or a full disk
        path = folder / f"{_COPY}{split}.npz"
        files.replace(path, lambda file: np.savez(file, images=images, labels=labels, origin=origin))


def _read_copy(path: Path, *names: str) -> list[np.ndarray] | None:
    """The arrays of a copy, with verified checksums. None if the copy is invalid."""
    try:
        with open(path, "rb") as file, np.load(file) as copy:
            return [copy[name] for name in names] if copy["origin"] == _origin(path.parent) else None
    except Exception:  # damaged headers raise almost anything: the split is decoded again
        return None


def _origin(folder: Path) -> str | None:
    """The origin of a copy: TFDS's version, and the names, sizes and times of its files. None if unknown."""
    try:
        version = importlib.metadata.version("tensorflow-datasets")
        data_files = sorted(entry for entry in folder.iterdir() if not entry.name.lstrip(".").startswith(_COPY))
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in data_files]
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    return json.dumps([version, stats])


# The four idx files of Fashion-MNIST: where they are, their published checksums, reading them without TensorFlow.

_CLASSES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
FASHION_MNIST_CLASSES = tuple(_CLASSES.split(", "))
DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")

# As the authors published them: the SHA-256 of each file, and the time in its gzip header.
OFFICIAL = {
    "train-images-idx3-ubyte.gz": ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 1504176606),
    "train-labels-idx1-ubyte.gz": ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 1504176606),
    "t10k-images-idx3-ubyte.gz": ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 1504176627),
    "t10k-labels-idx1-ubyte.gz": ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 1504176627),
}
_BARE_HEADER = 10  # bytes of a gzip header without a file name, RFC 1952


def official_bytes(path: Path) -> bytes:
    """The published .gz file, byte for byte, which is what TFDS asks for."""
    # Debian's package has the same compressed bytes after a header without file name and time stamp. With the published
    # header they have the published sha256. `ValueError` for a file that is another one, half-written or damaged.
    sha256, mtime = OFFICIAL[path.name]
    raw = path.read_bytes()
    name = path.name.removesuffix(".gz").encode()
    header = struct.pack("<4BLBB", 0x1F, 0x8B, 8, 8, mtime, 0, 3) + name + b"\0"
    for candidate in (raw, header + raw[_BARE_HEADER:]):
        if hashlib.sha256(candidate).hexdigest() == sha256:
            return candidate
    raise ValueError(
        f"{path} is not the official Fashion-MNIST file, or is damaged: expected sha256 {sha256}, "
        f"got {hashlib.sha256(raw).hexdigest()} ({len(raw)} bytes). Nothing was written. "
        "Put the file there again (Debian: apt-get install --reinstall dataset-fashion-mnist)."
    )


def read_idx(path: PathLike) -> np.ndarray:
    """The uint8 array in a gzipped idx file: images `(n, rows, columns)` or labels `(n,)`."""
    # Nothing is checked here: each file has had its published SHA-256, by `official_bytes` or by TFDS's download.
    with gzip.open(path, "rb") as file:
        content = file.read()
    ndim = content[3]  # after 0, 0 and 8, the number of unsigned bytes
    start = 4 + 4 * ndim
    return np.frombuffer(content, np.uint8, offset=start).reshape(struct.unpack(f">{ndim}I", content[4:start]))
