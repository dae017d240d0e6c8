"""A data set by its name: where its files are, and the line that says so."""

from __future__ import annotations

import os
from pathlib import Path

from .._core.calls import answers
from .._core.checks import choice
from .._core.files import as_path
from .._core.text import say_news
from . import _idx, _tfds
from ._dataset import Dataset

FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")
_HINTS = {
    **dict.fromkeys(("batch_size", "shuffle"), "data.batches and train.fit make batches, in an order that is drawn"),
    **dict.fromkeys(("train", "subset"), "say which part, data.load(name, 'train') or data.load(name, 'test')"),
    **dict.fromkeys(("root", "path", "dir"), "call it data_dir"),
}
_SOURCES = ("auto", "prepared", "files", "debian", "download")


@answers("data.load", _HINTS)
def load(
    name: str = "fashion_mnist",
    split: str = "train",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    source: str = "auto",
    verbose: bool = True,
) -> Dataset:
    """Load a split of a data set of tensorflow-datasets (TFDS), without TensorFlow.

    What is not in `data_dir` yet is written there once, as a genuine TFDS data set. Other processes may do the same at
    the same time, and a crash leaves nothing half-written. Decoding 60,000 pictures takes seconds, so a decoded copy of
    a whole split of up to 1 GiB is kept next to TFDS's files, and made again when those change.

    Args:
        name: TFDS's name of an image classification data set. Without a network "fashion_mnist".
        split: "train", "test", or a part of one in TFDS's notation, "train[:1000]".
        data_dir: TFDS's folder. None: $TFDS_DATA_DIR, else ~/tensorflow_datasets, as TFDS has it.
        source: "prepared" is a TFDS data set in `data_dir`. "files" are the four idx .gz files in $JAXPAR_DATA_DIR.
            "debian" are those of the package dataset-fashion-mnist. "download" is TFDS's own. "auto" takes the first
            of these that is there.
        verbose: say in one line where the data came from.

    Returns:
        A `Dataset`: `images` uint8 `(n, 28, 28, 1)`, `labels` int32 `(n,)`, in TFDS's fixed order.

    Raises:
        ConnectionError: the download's host does not answer within 10 seconds. The message says what to do.
        FileNotFoundError: the source asked for is not there, or lacks one of its files.
        ValueError: an unknown name, split or source, or a damaged file or data set, which is named.
    """
    choice(source, "data.load", "source", _SOURCES)
    folder = as_path(data_dir, "data.load: data_dir").expanduser() if data_dir is not None else _tfds.default_data_dir()
    found, files = _find(name, folder, source)
    prepared = found == "prepared" or _tfds.prepared_dir(name, folder) is not None
    if files is not None:
        _idx.check(files)
    elif found == "download":
        _check_reachable(name)
    if not prepared:
        _tfds.prepare(name, folder, files=files)
    dataset = Dataset(*_tfds.read(name, split, folder), source=found, name=name, part=split)
    if verbose:
        place = f"{files}, kept in {folder}" if files else folder
        say_news(f"{name} {split}, {len(dataset)} images, source: {found} ({place})")
    return dataset


def _find(name: str, folder: Path, source: str) -> tuple[str, Path | None]:
    """The first source there is of those that `source` allows, and the folder of its idx files."""
    if source in ("auto", "prepared") and _tfds.prepared_dir(name, folder) is not None:
        return "prepared", None
    if source == "prepared":
        raise FileNotFoundError(f"{folder} holds no {name!r} prepared by tensorflow-datasets. {_advice(name)}")
    if source in ("files", "debian") and name != "fashion_mnist":
        raise ValueError(f"source={source!r} is for 'fashion_mnist' only; got name {name!r}")
    for word, place in _places().items():
        if name == "fashion_mnist" and source in ("auto", word):
            missing = _idx.missing(place) if place else list(_idx.OFFICIAL)
            if place and not missing:
                return word, place
            if source == word or len(missing) < len(_idx.OFFICIAL):
                lack = f"{place} lacks {', '.join(missing)}" if place else "$JAXPAR_DATA_DIR is not set"
                raise FileNotFoundError(f"source {word!r}: {lack}. {_advice(name)}")
    return "download", None


def _places() -> dict[str, Path | None]:
    """Folders of idx files, in the order of search."""
    given = os.environ.get("JAXPAR_DATA_DIR")
    return {"files": Path(given).expanduser() if given else None, "debian": DEBIAN_DIR}


def _check_reachable(name: str) -> None:
    """`ConnectionError` with advice where the download's host does not answer."""
    url = _tfds.download_url(name)
    try:
        if url:
            _tfds.check_reachable(url)
    except ConnectionError as error:
        raise ConnectionError(f"{error}. {_advice(name)}") from None


def _advice(name: str) -> str:
    """What to do where there is no network."""
    elsewhere = "give as data_dir a folder in which tensorflow-datasets has prepared it elsewhere"
    if name != "fashion_mnist":
        return f"Without a network: {elsewhere}."
    return (
        "Without a network: install Debian's package (apt-get install dataset-fashion-mnist), or set "
        f"$JAXPAR_DATA_DIR to a folder with {', '.join(_idx.OFFICIAL)}, or {elsewhere}."
    )
