"""Data sets of tensorflow-datasets (TFDS): downloaded, prepared and read without TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .._core.arguments import did_you_mean
from . import _decoded_cache, _idx


@functools.cache
def _tfds() -> Any:
    """The package, imported on first use (about a second)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports; none concerns the caller
        import tensorflow_datasets as tfds
    return tfds


def default_data_dir() -> Path:
    """TFDS's default folder: $TFDS_DATA_DIR, else ~/tensorflow_datasets. TFDS reads it once, at import."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


@functools.cache
def _builder_class(name: str) -> Any:
    """TFDS's builder of `name`. MNIST and its relatives read their idx files without TensorFlow."""
    tfds = _tfds()
    from tensorflow_datasets.image_classification import mnist

    stock = tfds.builder_cls(name)
    if stock not in (mnist.MNIST, mnist.FashionMNIST, mnist.KMNIST):
        return stock

    class Builder(stock, skip_registration=True):  # pyright: ignore
        __module__ = stock.__module__  # recorded in dataset_info.json, and where TFDS finds the checksums
        name = stock.name

        def _split_generators(self, dl_manager: Any) -> Any:
            return super()._split_generators(_WithoutExtraction(dl_manager))

        def _generate_examples(self, num_examples: int, data_path: Any, label_path: Any) -> Iterator[tuple[int, Any]]:
            images, labels = _idx.read(data_path), _idx.read(label_path)
            if not len(images) == len(labels) == num_examples:
                raise ValueError(f"expected {num_examples} images and labels, got {len(images)} and {len(labels)}")
            for index, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
                yield index, {"image": _png(image), "label": label}

    return Builder


def _png(image: np.ndarray) -> io.BytesIO:
    """The image as a PNG file, which TFDS stores as it is. TensorFlow would encode an array."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=3)  # the default takes twice as long, saves 3 %
    file.seek(0)
    return file


class _WithoutExtraction:
    """A download manager that leaves .gz files as they are. TFDS's extraction needs TensorFlow."""

    def __init__(self, dl_manager: Any):
        self.download_and_extract = dl_manager.download


def prepared_dir(name: str, data_dir: Path) -> Path | None:
    """The folder of a prepared `name` in `data_dir`, or None."""
    if (known := _decoded_cache.find(name, data_dir)) is not None:
        return known
    builder = _builder(name, data_dir)
    return Path(builder.data_dir) if Path(builder.data_dir).exists() else None


def prepare(name: str, data_dir: Path, *, files: Path | None = None) -> None:
    """Write TFDS's `name` into `data_dir` from the idx `files`. None: from TFDS's own download.

    TFDS writes into `incomplete.*` next to the target and renames it at the end. A process that finds the target there
    by then deletes its own, so that several may prepare at once.
    """
    with contextlib.ExitStack() as stack:
        manual_dir = None
        if files is not None:
            manual_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxpar-")))
            for file in _idx.OFFICIAL:
                (manual_dir / file).write_bytes(_idx.official_bytes(files / file))
            # TFDS prints, and draws bars, in a notebook too, for a download; here there is none.
            _tfds().disable_progress_bar()
            stack.callback(_tfds().enable_progress_bar)
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        config = _tfds().download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
        builder = _builder_class(name)(data_dir=data_dir, file_format="array_record")
        try:
            builder.download_and_prepare(download_dir=manual_dir, download_config=config)
        except OSError:
            if prepared_dir(name, data_dir) is None:
                raise


def read(name: str, split: str, data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a prepared data set, in its stored order, each record's checksum verified.

    The first time a whole split is decoded, a copy is kept for the next time.

    Raises:
        ValueError: no such split, no `image` and `label` in it, or what is on the disk is damaged.
    """
    folder = prepared_dir(name, data_dir)
    if folder is not None and (copy := _decoded_cache.load(folder, split)) is not None:
        return copy
    images, labels = _decode_split(name, split, data_dir)
    if folder is not None:
        _decoded_cache.save(folder, split, images, labels)
    return images, labels


def _decode_split(name: str, split: str, data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """The same from TFDS's own files."""
    builder = _builder(name, data_dir)
    if not builder.info.splits:
        raise _damage_error(builder.data_dir, "dataset_info.json is missing or names no split")
    try:
        expected = builder.info.splits[split].num_examples
    except (KeyError, ValueError):
        known = sorted(builder.info.splits)
        hint = did_you_mean(split, known) or "; a part of one is 'train[:50000]'"
        raise ValueError(f"{name} has no split {split!r}; it has {known}{hint}") from None
    features = builder.info.features
    if not hasattr(features, "keys") or not {"image", "label"} <= set(features.keys()):
        raise ValueError(f"jaxpar reads data sets of 'image' and 'label'; {name} has {features}")
    decode = _decoder(features["image"])
    decoders = {"image": _tfds().decode.SkipDecoding()} if decode else None
    try:
        images, labels = _decode_records(builder.as_data_source(split=split, decoders=decoders), decode)
        if len(images) != expected:
            raise RuntimeError(f"{expected} records expected, {len(images)} found")
        return np.stack(images), np.asarray(labels, np.int32)
    except NotImplementedError as error:  # prepared in a format that only TensorFlow reads
        raise ValueError(
            f"the data set in {builder.data_dir} is stored as {builder.info.file_format}, which cannot be "
            "read without TensorFlow; give another data_dir, or convert it to array_record"
        ) from error
    except Exception as error:
        raise _damage_error(builder.data_dir, f"split {split!r}: {error}") from error


def _decode_records(records: Any, decode: Callable[[bytes], np.ndarray] | None) -> tuple[list[Any], list[Any]]:
    """Images and labels of TFDS's records, read a thousand at a time."""
    images: list[Any] = []
    labels: list[Any] = []
    for start in range(0, len(records), 1000):
        for record in records.__getitems__(range(start, min(start + 1000, len(records)))):
            images.append(decode(record["image"]) if decode else record["image"])
            labels.append(record["label"])
    return images, labels


def _damage_error(folder: str | Path, reason: str) -> ValueError:
    return ValueError(f"the prepared data set in {folder} is damaged ({reason}). Delete that folder and load again.")


def _builder(name: str, data_dir: Path) -> Any:
    """TFDS's builder for reading. A dataset_info.json that it cannot read is named."""
    try:
        return _tfds().builder(name, data_dir=data_dir)
    except _tfds().core.DatasetNotFoundError:
        near = did_you_mean(name, _tfds().list_builders(with_community_datasets=False))
        raise ValueError(f"data.load: tensorflow-datasets knows no data set {name!r}{near}") from None
    except Exception as error:
        raise _damage_error(data_dir / name, str(error)) from error


def _decoder(feature: Any) -> Callable[[bytes], np.ndarray] | None:
    """Pillow's decoding of 8-bit images, faster than TFDS's own way to it. None for other features."""
    from PIL import Image

    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    shape = getattr(feature, "shape", ())
    if feature.np_dtype != np.uint8 or len(shape) != 3 or shape[-1] not in modes:
        return None
    mode, channels = modes[shape[-1]], shape[-1]

    def decode(encoded: bytes) -> np.ndarray:
        image = Image.open(io.BytesIO(encoded))
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        return pixels.reshape(*pixels.shape[:2], channels)

    return decode


def download_url(name: str) -> str | None:
    """The first address that TFDS would download `name` from. None where it does not say."""
    cls = _builder_class(name)
    urls = [cls.URL + "train-labels-idx1-ubyte.gz"] if hasattr(cls, "URL") else list(cls.url_infos or ())
    return urls[0] if urls else None


def check_reachable(url: str, seconds: float = 5.0) -> None:
    """Ask for `url` once, where TFDS would retry for minutes. Proxies count, as they do for TFDS.

    It runs in a thread of its own because a name look-up cannot be given a time limit. No body is read.

    Raises:
        ConnectionError: no answer within `seconds`, or one that is no success.
    """
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
        raise ConnectionError(f"cannot download {url}: {answer[0]}")
