"""MXNet's RecordIO files: the records of a `.rec`, their places in a `.idx`, `.lst`, and images as training data.

A record is one part or several. A part is a magic number, a word of its kind and its length, the bytes, and zeros up to
a multiple of four. Where the bytes of a record have the magic number, MXNet leaves it out and begins a part there.

`RecordFile` reads bytes. `image_record_source` makes two columns of them, images and labels, that look like arrays and
read their rows when `data` asks for a batch. `_image` is what MXNet does with one image.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .. import data
from .._core import checks, files
from .._core.arguments import no_such_arguments
from .._core.files import CheckpointError
from .._core.text import warn

_MAGIC = 0xCED7230A
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)  # kinds of parts
_LENGTH_BITS = 29
_MOST_BYTES = 1 << 31  # of a .idx or .lst
_INDEX_LINE = re.compile(r"\s*(-?\d{1,18})\s+(\d{1,18})\s*", re.ASCII)
_HEADER = struct.Struct("<IfQQ")  # number of labels or 0, a label, id, id2


class ImageRecord(NamedTuple):
    """A record that `mx.recordio.pack` made, such as one of im2rec.

    Attributes:
        label: float32 (labels,), one or several.
        id, id2: as packed.
        content: what was packed, such as a JPEG file.
    """

    label: np.ndarray
    id: int
    id2: int
    content: bytes


class RecordFile(Sequence[bytes]):
    """The records of a RecordIO file of MXNet, by number.

    The file is opened for each read, so threads and processes may share an object. `image_record_source` keeps it open
    while its batches are read. Nothing in the file is run.

    Args:
        rec: the `.rec` file.
        idx: the `.idx` file beside it. None: the headers of all records are read once, which gives the same records.

    Attributes:
        path: of the `.rec`.
        keys: int64 (records,), those of the `.idx`, else 0, 1, 2, ... A record's number is its line in the `.idx`.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: a file is damaged or cut, or the `.idx` is of another file. The message names the byte.

    Example:
        >>> from jaxpar import mxnet
        >>> records = mxnet.RecordFile("train.rec", "train.idx")  # doctest: +SKIP
        >>> len(records), records[0], records.unpack(0).label  # doctest: +SKIP
    """

    path: Path
    keys: np.ndarray

    def __init__(self, rec: str | os.PathLike[str], idx: str | os.PathLike[str] | None = None):
        self.path = files.as_path(rec, "mxnet.RecordFile: rec")
        self._size = os.stat(self.path).st_size
        if idx is None:
            self._places = self._scan()
            self.keys = np.arange(len(self._places))
        else:
            self.keys, self._places = _read_index(files.as_path(idx, "mxnet.RecordFile: idx"))

    def __repr__(self) -> str:
        return f"RecordFile({len(self)} records of {self.path})"

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, number: int) -> bytes: ...
    @overload
    def __getitem__(self, number: slice) -> list[bytes]: ...
    def __getitem__(self, number: int | slice) -> bytes | list[bytes]:
        """The bytes of a record, as `mx.recordio` reads them."""
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        with files.opened(self.path) as file:
            return self._read(file, number)

    def _read(self, file: BinaryIO, number: int) -> bytes:
        contents: list[bytes] = []
        for length, end in self._parts(file, int(self._places[number])):
            contents.append(file.read(length))
            self._check(len(contents[-1]) == length, end, "the file was cut since it was opened")
        return struct.pack("<I", _MAGIC).join(contents)

    def unpack(self, number: int) -> ImageRecord:
        """The label, the ids and the content of an image's record.

        Raises:
            CheckpointError: the record is damaged, or not of this form.
        """
        return self._unpacked(self[number], number)

    def _unpacked(self, record: bytes, number: int) -> ImageRecord:
        count = label = id_ = id2 = 0
        if len(record) >= _HEADER.size:
            count, label, id_, id2 = _HEADER.unpack_from(record)
        start, place = _HEADER.size + 4 * count, int(self._places[number])
        problem = f"expected a header and {count} labels of an image, got {len(record)} bytes"
        self._check(len(record) >= start, place, problem)
        labels = np.frombuffer(record, "<f4", count, _HEADER.size) if count else np.array([label])
        return ImageRecord(labels.astype(np.float32), id_, id2, record[start:])

    def _parts(self, file: BinaryIO, at: int) -> Iterator[tuple[int, int]]:
        """Of each part of the record at a byte the length, and the byte behind it. The file stands before its bytes."""
        kind = None
        while kind not in (_WHOLE, _LAST):
            file.seek(min(at, self._size))
            head = file.read(8)
            self._check(len(head) == 8, at, f"expected a record, the file ends at byte {self._size}")
            magic, word = struct.unpack("<II", head)
            self._check(magic == _MAGIC, at, f"expected a record, which begins with {_MAGIC:#x}, got {magic:#x}")
            expected = (_WHOLE, _FIRST) if kind is None else (_MIDDLE, _LAST)
            kind, length = word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)
            self._check(kind in expected, at, f"expected a part of kind {expected[0]} or {expected[1]}, got {kind}")
            end = at + 8 + length
            self._check(end <= self._size, at, f"expected {length} bytes, the file ends at byte {self._size}")
            at += 8 + (length + 3) // 4 * 4
            yield length, at

    def _scan(self) -> np.ndarray:
        """Where the records begin."""
        places: list[int] = []
        at = 0
        with files.opened(self.path) as file:
            while at < self._size:
                places.append(at)
                *_, (_, at) = self._parts(file, at)
        return np.array(places, np.int64)

    def _check(self, is_sound: bool, at: int, problem: str) -> None:
        if not is_sound:
            raise CheckpointError(f"{self.path} is damaged at byte {at}, or its .idx is of another file: {problem}")


def _lines(path: Path) -> list[str]:
    return files.read(path, _MOST_BYTES).decode("utf-8", "replace").splitlines()


def _read_index(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Keys and places of the records."""
    rows: list[tuple[int, int]] = []
    for number, line in enumerate(_lines(path), 1):
        match = _INDEX_LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}, line {number}: expected a key and a byte of the .rec, got {line[:100]!r}")
        rows.append((int(match[1]), int(match[2])))
    table = np.array(rows, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def load_list(path: str | os.PathLike[str]) -> list[tuple[int, np.ndarray, str]]:
    """The lines of a `.lst`, the list of images that im2rec packs: (id, labels, path), labels float32 (labels,).

    Raises:
        OSError: the file cannot be read.
        CheckpointError: a line is not an id, finite labels and a path with tabs between them.

    Example:
        >>> from jaxpar import mxnet
        >>> mxnet.load_list("train.lst")[0]  # doctest: +SKIP
        (0, array([1.], dtype=float32), 'cats/1.jpg')
    """
    path = files.as_path(path, "mxnet.load_list: path")
    images: list[tuple[int, np.ndarray, str]] = []
    for number, line in enumerate(_lines(path), 1):
        try:
            id_, label, *more, name = line.rstrip("\r\n").split("\t")
            with np.errstate(over="ignore"):
                labels = np.array([label, *more], np.float32)
            if not np.isfinite(labels).all():
                raise ValueError
            images.append((int(id_), labels, name))
        except ValueError:
            raise CheckpointError(
                f"{path}, line {number}: expected an id, labels and a path with tabs between them, and the labels "
                f"finite float32, got {line[:100]!r}"
            ) from None
    return images


# Images of records as training data: what MXNet's ImageRecordIter does, as a source of `train.fit`.

_WHERE = "mxnet.image_record_source"
_JPEG, _END_OF_JPEG = b"\xff\xd8", b"\xff\xd9"
_MOST_PARTS = 256  # of batches, one for each device, of which labels are kept until they are asked for
# The number of an example, and what was drawn for it.
_ROW = np.dtype([("row", np.int64), ("top", np.float32), ("left", np.float32), ("mirror", np.float32)])

_HINTS = {
    name: hint
    for names, hint in {
        "path_imgrec": "give the file as first argument, image_record_source(rec, batch_size, ...)",
        "path_imgidx": "call it idx",
        "path_imglist": "leave it out. Labels are read from the records; mxnet.load_list reads a list",
        "num_parts part_index": "leave it out. Each process has the same file, and reads what its own devices get",
        "seed seed_aug shuffle_chunk_seed": "leave it out. What is drawn comes from the rng of train.create_state",
        "shuffle_chunk_size": "leave it out. shuffle=True draws from the whole file",
        "round_batch": "leave it out. Training drops a last, smaller batch, and evaluation counts its examples once",
        "ctx device_id prefetch_buffer verbose aug_seq": "leave it out. Batches go to the devices of the step, ahead",
        "dtype": "write data.batches(source, dtype=...), or cast in loss_fn",
        "data_name label_name": 'leave it out. A batch is {"image", "label"}',
        "mean_img": "subtract the mean image in loss_fn; mxnet.load_params reads it",
        "inter_method": "leave it out. Images are resized by MXNet's default, 1",
        "random_resized_crop max_rotate_angle max_aspect_ratio min_aspect_ratio max_shear_ratio max_crop_size"
        " min_crop_size max_random_scale min_random_scale max_random_area min_random_area max_img_size min_img_size"
        " brightness contrast saturation pca_noise random_h random_s random_l rotate mean_a std_a max_random_contrast"
        " max_random_illumination": "change images in loss_fn, by its rng, or write a loader for data.from_iterable",
    }.items()
    for name in names.split()
}


@no_such_arguments(_HINTS)
def image_record_source(
    rec: str | os.PathLike[str],
    batch_size: int,
    *,
    data_shape: tuple[int, int, int],
    idx: str | os.PathLike[str] | None = None,
    label_width: int = 1,
    shuffle: bool = False,
    resize: int = -1,
    pad: int = 0,
    fill_value: int = 255,
    rand_crop: bool = False,
    rand_mirror: bool = False,
    mirror: bool = False,
    mean_r: float = 0.0,
    mean_g: float = 0.0,
    mean_b: float = 0.0,
    std_r: float = 1.0,
    std_g: float = 1.0,
    std_b: float = 1.0,
    scale: float = 1.0,
    layout: str = "NHWC",
    preprocess_threads: int = 4,
    on_bad: Literal["raise", "skip", "decode"] = "raise",
) -> ImageRecordSource:
    """Training data out of a `.rec`, with the options of `mx.io.ImageRecordIter`.

    An image is decoded, resized, padded, cropped, mirrored, and becomes `(pixel - mean) * (scale / std)`, with MXNet's
    bits. Pillow decodes JPEG, PNG and BMP. Where it and MXNet's OpenCV may differ, at JPEG in CMYK and at images in
    colour that are read as grey, they do so by at most 2 of 255.

    What is drawn depends on the key, the epoch and the record only. So any number of devices and processes gives the
    same bits, and so does a run that is resumed. `train.fit` gives the key. Without one, as in evaluation, the order is
    the stored one, crops are in the middle, and `rand_mirror` does nothing.

    Args:
        rec: the `.rec` file.
        batch_size: over all devices and processes. `fit` takes it where it is given none.
        data_shape: (channels, height, width), as in MXNet, whatever the layout. Channels are 1 or 3.
        idx: its `.idx`. Without it the headers of all records are read first.
        label_width: labels of each record. One gives labels of shape (n,), else (n, label_width).
        shuffle: whether each epoch has an order of its own.
        resize: the length of the shorter side before the crop. -1: images stay as large as they are.
        pad, fill_value: pixels around the image, and their value.
        rand_crop: whether the place of the crop is drawn.
        rand_mirror, mirror: whether every second image is mirrored, by chance, or all of them.
        mean_r, mean_g, mean_b, std_r, std_g, std_b, scale: see above. Pixels are from 0 to 255. Grey images have r.
        layout: of a batch, "NHWC", or "NCHW" for networks that `load_symbol` gives.
        preprocess_threads: how many images are decoded at once.
        on_bad: "skip" leaves out records that are damaged or no whole image. All images are decoded once to find them,
            before anything else, and a warning says how many they are; `source.skipped` has their numbers, and each
            record of `fit` their count as `bad_records`. "decode" keeps JPEG files that were cut: what is missing of
            them is grey. MXNet repeats the last row there.

    Returns:
        A `data.Source`: batches `{"image", "label"}`, both float32.

    Raises:
        OSError, CheckpointError: as of `RecordFile`; when read: a record without an image, or with other labels.
        TypeError: an option of ImageRecordIter that is not here. The message has the line to write.
        ValueError: a wrong `data_shape`, `layout` or number; when read: an image smaller than `data_shape`.

    Example:
        >>> from jaxpar import mxnet
        >>> options = dict(data_shape=(3, 224, 224), resize=256, rand_crop=True, rand_mirror=True, shuffle=True)
        >>> source = mxnet.image_record_source("train.rec", 256, **options)  # doctest: +SKIP
        >>> state, history = train.fit(state, step, source, epochs=5)  # doctest: +SKIP
    """
    records = RecordFile(rec, idx)
    batch_size = checks.whole_number(batch_size, _WHERE, "batch_size")
    width = checks.whole_number(label_width, _WHERE, "label_width")
    threads = checks.whole_number(preprocess_threads, _WHERE, "preprocess_threads")
    sizes = [checks.whole_number(n, _WHERE, "data_shape") for n in data_shape]
    if len(sizes) != 3 or sizes[0] not in (1, 3):
        raise ValueError(f"{_WHERE}: data_shape must be (1 or 3, height, width), got {tuple(sizes)}")
    if resize != -1:
        checks.whole_number(resize, _WHERE, "resize")
    channels = sizes[0]
    mean, std = (np.array(rgb[:channels], np.float32) for rgb in ((mean_r, mean_g, mean_b), (std_r, std_g, std_b)))
    if not (np.isfinite([*mean, *std, scale]).all() and std.all()):
        raise ValueError(f"{_WHERE}: mean, std and scale must be finite, and std not 0, got {mean}, {std} and {scale}")
    channels_first = checks.choice(layout, _WHERE, "layout", ("NHWC", "NCHW")) == "NCHW"
    image = functools.partial(
        _image,
        size=(*sizes[1:], channels),
        resize=resize,
        pad=checks.whole_number(pad, _WHERE, "pad", least=0),
        fill_value=checks.whole_number(fill_value, _WHERE, "fill_value", least=0, most=255),
        rand_crop=rand_crop,
        rand_mirror=rand_mirror,
        mirror=mirror,
        mean=mean,
        factor=np.float32(scale) / std,
        channels_first=channels_first,
        takes_cut=on_bad == "decode",
    )
    # Two columns that look like arrays in host memory. `data` asks them for rows when it makes a batch, so nothing is
    # read before, and each process reads what its own devices get.
    form = _Form(records, image, width, threads)
    rows, skipped = np.arange(len(records)), ()
    if checks.choice(on_bad, _WHERE, "on_bad", ("raise", "skip", "decode")) != "raise":
        is_whole, is_cut = _sound(records, channels, threads)
        is_kept = is_whole | is_cut if on_bad == "decode" else is_whole
        skipped = tuple(rows[~is_kept].tolist())
        cut = tuple(rows[is_cut & is_kept].tolist())
        rows = rows[is_kept]
        for numbers, what in ((skipped, "are left out"), (cut, "are cut, and grey where nothing could be decoded")):
            if numbers:
                shown = ", ".join(map(str, numbers[:10])) + ", ..." * (len(numbers) > 10)
                text = f"{_WHERE}: {len(numbers)} of {len(records)} records of {records.path} {what}: {shown}"
                warn(text)
    images = _Column("image", tuple(sizes) if channels_first else (*sizes[1:], channels), rows, form)
    labels = _Column("label", (width,) if width > 1 else (), rows, form)
    return ImageRecordSource({"image": images, "label": labels}, jnp.float32, batch_size, shuffle, skipped)


def _sound(records: RecordFile, channels: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Which records are whole images, and which are images that were cut, bool (records,) each.

    Labels and sizes that do not fit are no damage, but a mistake.
    """

    def state(number: int) -> tuple[bool, bool]:
        for takes_cut in (False, True):
            try:
                _decoded(f"record {number}", records.unpack(number).content, channels, takes_cut)
            except CheckpointError:
                continue
            return not takes_cut, takes_cut
        return False, False

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        states = np.array([*pool.map(state, range(len(records)))], bool).reshape(-1, 2)
    return states[:, 0], states[:, 1]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ImageRecordSource(data.ArraySource):
    """What `image_record_source` returns.

    Attributes:
        batch_size, shuffle: as given.
        skipped: the numbers of the records that `on_bad` left out.
    """

    batch_size: int
    shuffle: bool
    skipped: tuple[int, ...] = ()

    def batches(self, batch_size: int, **options: Unpack[data._BatchOptions]) -> Iterator[dict[str, jax.Array]]:
        """Batches on the devices. The options are those of `data.batches`, without `resident`."""
        rng = options.get("rng")
        if not self.shuffle:
            options["rng"] = None  # of the order; the images are still cut and mirrored by the key
        plan = data._plan_batches(len(self), batch_size, _WHERE, **options)
        draws = None if rng is None else data._order_of(rng, len(self), 3)

        def order(epoch: int) -> np.ndarray:
            numbers = np.asarray(plan.order(epoch))
            if draws is None:
                return numbers
            rows = np.empty(len(self), _ROW)
            # What is drawn goes with the number of the example, so that its place in the order does not count.
            rows["row"] = numbers
            rows["top"], rows["left"], rows["mirror"] = np.asarray(draws(epoch))[numbers].T
            return rows

        return self._read(dataclasses.replace(plan, order=order))

    def _read(self, plan: data._BatchPlan) -> Iterator[dict[str, jax.Array]]:
        """The batches of a plan, of records that are read once, by threads that end with the batches."""
        with _Reader(self.arrays["image"].form) as reader:
            arrays = {name: dataclasses.replace(column, reader=reader) for name, column in self.arrays.items()}
            yield from data._from_host(arrays, plan, self.dtype)


class _Form(NamedTuple):
    """How records become images and labels."""

    records: RecordFile
    image: Callable[..., np.ndarray]  # of where the record is from, its content, and what was drawn for it
    label_width: int
    threads: int  # how many records are read at once

    def label(self, record: ImageRecord, number: int) -> np.ndarray:
        label, width = record.label, self.label_width
        if len(label) != width:
            raise CheckpointError(
                f"{self.records.path}: record {number} has {len(label)} labels, label_width is {width}"
            )
        return label if width > 1 else label[0]


class _Reader:
    """Reads records, each once for its image and its label. Threads share the work, and each has the file open."""

    def __init__(self, form: _Form):
        self._form = form
        self._files = contextlib.ExitStack()
        self._of_thread = threading.local()
        self._pool = concurrent.futures.ThreadPoolExecutor(form.threads)
        # The labels of the rows whose images were read last, for the column of labels, by the numbers of the records.
        self._labels: collections.OrderedDict[tuple[int, ...], list[np.ndarray]] = collections.OrderedDict()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._files.close()

    def images(self, tasks: Sequence[tuple[Any, ...]], *, with_labels: bool) -> Iterator[np.ndarray]:
        """An image for each (number of a record, what was drawn)."""

        def read(task: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray | None]:
            number, *drawn = task
            record = self._record(number)
            image = self._form.image(f"{self._form.records.path}: record {number}", record.content, *drawn)
            return image, self._form.label(record, number) if with_labels else None

        # A batch asks for its images first and for its labels then, device by device. A record has both, and is read
        # once: the labels wait here.
        labels: list[Any] = []
        for image, label in self._pool.map(read, tasks):
            labels.append(label)
            yield image
        if with_labels:
            self._labels[tuple(task[0] for task in tasks)] = labels
            if len(self._labels) > _MOST_PARTS:
                self._labels.popitem(last=False)

    def labels(self, tasks: Sequence[tuple[Any, ...]]) -> Iterable[np.ndarray]:
        numbers = tuple(task[0] for task in tasks)
        if (labels := self._labels.get(numbers)) is not None:
            return labels
        return self._pool.map(lambda number: self._form.label(self._record(number), number), numbers)

    def _record(self, number: int) -> ImageRecord:
        records = self._form.records
        if not hasattr(self._of_thread, "file"):
            self._of_thread.file = self._files.enter_context(files.opened(records.path))
        return records._unpacked(records._read(self._of_thread.file, number), number)


@dataclasses.dataclass(frozen=True, eq=False)
class _Column:
    """An array with a value for each record, which is read when rows are asked for."""

    name: str  # "image" or "label"
    value_shape: tuple[int, ...]
    numbers: np.ndarray  # of the records, int64 (rows,)
    form: _Form
    reader: _Reader | None = None  # that of the batches of a source. None: each look has its own
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.numbers), *self.value_shape)

    def __len__(self) -> int:
        return len(self.numbers)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype)

    def __getitem__(self, rows: Any) -> np.ndarray:
        """The values of rows: a slice, numbers, or a row of `_ROW` for each."""
        # Each row with what was drawn for it, if anything was.
        is_drawn = isinstance(rows, np.ndarray) and rows.dtype == _ROW
        tasks = rows.tolist() if is_drawn else [(row,) for row in np.arange(len(self))[rows].tolist()]
        tasks = [(int(self.numbers[row]), *drawn) for row, *drawn in tasks]
        out = np.empty((len(tasks), *self.value_shape), self.dtype)
        with contextlib.nullcontext(self.reader) if self.reader else _Reader(self.form) as reader:
            of_image = self.name == "image"
            values = reader.images(tasks, with_labels=bool(self.reader)) if of_image else reader.labels(tasks)
            for i, value in enumerate(values):
                out[i] = value
        return out

    def take(self, rows: np.ndarray, axis: int) -> _Column:
        """These rows, not read yet."""
        return dataclasses.replace(self, numbers=self.numbers[rows])


def _image(
    name: str,
    content: bytes,
    *drawn: float,
    size: tuple[int, ...],
    resize: int,
    pad: int,
    fill_value: int,
    rand_crop: bool,
    rand_mirror: bool,
    mirror: bool,
    mean: np.ndarray,
    factor: np.ndarray,
    channels_first: bool,
    takes_cut: bool,
) -> np.ndarray:
    """A record as an image, float32. `drawn` are three numbers from 0 and below 1, or nothing."""
    # (height, width, channels), in whole numbers until the last step, as in MXNet: else other bits would come out.
    pixels = _decoded(name, content, size[2], takes_cut)
    old = new = pixels.shape[:2]
    if resize > 0:
        new = tuple(resize * n // min(old) for n in old)

    # The rows and columns of the crop, as places in the resized image. Those of the padding are outside of it.
    places: list[np.ndarray] = []
    for axis in (0, 1):
        spare = new[axis] + 2 * pad - size[axis]
        if spare < 0:
            raise ValueError(
                f"{name}, {new[0]} x {new[1]} before padding, is too small for a crop of {size[0]} x {size[1]}; "
                "give resize=, or a smaller data_shape"
            )
        first = int(drawn[axis] * (spare + 1)) if rand_crop and drawn else spare // 2
        places.append(np.arange(first, first + size[axis]) - pad)
    inside = [(at >= 0) & (at < n) for at, n in zip(places, new, strict=True)]
    rows, columns = (at.clip(0, n - 1) for at, n in zip(places, new, strict=True))
    # Only the pixels of the crop are computed.
    out = pixels[rows][:, columns] if old == new else _resized(pixels, new, rows, columns)
    if pad:
        out = np.where((inside[0][:, None] & inside[1])[..., None], out, fill_value)
    if mirror or (rand_mirror and drawn and drawn[2] < 0.5):
        out = out[:, ::-1]
    out = (out.astype(np.float32) - mean) * factor
    return out.transpose(2, 0, 1) if channels_first else out


def _decoded(name: str, content: bytes, channels: int, takes_cut: bool) -> np.ndarray:
    """uint8 (height, width, channels)."""
    from PIL import Image, ImageOps

    # Behind a marker of its end, a JPEG file that was cut is decoded as far as it goes. In a whole one the marker is
    # behind the end, where nothing is read.
    content += _END_OF_JPEG if takes_cut and content.startswith(_JPEG) else b""
    try:
        # Further formats are left out, since Pillow has programs run for some.
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "BMP")) as image:
            if image.mode[0] in "IF":
                raise ValueError(f"pixels of mode {image.mode} have more than 8 bits")
            upright = ImageOps.exif_transpose(image)  # as OpenCV does
            pixels = np.asarray(upright.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # Pillow raises errors of many kinds at damaged images
        reason = str(error).partition(" <_io.")[0]  # without the name of a buffer
        raise CheckpointError(
            f"{name}: expected an image, JPEG or PNG, got {len(content)} bytes, of which Pillow says: {reason}; "
            'on_bad="skip" of image_record_source leaves such records out, on_bad="decode" keeps those that were cut'
        ) from error
    return pixels.reshape(*pixels.shape[:2], channels)


def _resized(pixels: np.ndarray, new: tuple[int, ...], rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Rows and columns of the image in its new size, with the bits of OpenCV's bilinear interpolation of uint8."""
    above, below, upper, lower = _neighbours(pixels.shape[0], new[0], rows)
    left, right, before, after = _neighbours(pixels.shape[1], new[1], columns)
    edge = (left == right)[:, None]  # where OpenCV has all the weight on one of two equal places
    before, after = np.where(edge, 2048, before[:, None]), np.where(edge, 0, after[:, None])

    def along(places: np.ndarray) -> np.ndarray:
        lines = pixels[places].astype(np.int32)
        return (lines[:, left] * before + lines[:, right] * after) >> 4

    upper, lower = upper[:, None, None], lower[:, None, None]
    return (((along(above) * upper) >> 16) + ((along(below) * lower) >> 16) + 2) >> 2


def _neighbours(old: int, new: int, at: np.ndarray) -> tuple[np.ndarray, ...]:
    """The two places of an axis between which new ones lie, and their weights of 2048."""
    exact = ((at + 0.5) * (1 / (new / old)) - 0.5).astype(np.float32)
    first = np.floor(exact)
    share = exact - first
    weights = (np.rint(x * np.float32(2048)).astype(np.int32) for x in (np.float32(1) - share, share))
    places = first.astype(np.int64)
    return (places.clip(0, old - 1), (places + 1).clip(0, old - 1), *weights)
