"""Training data of any origin: what `train.fit` asks of it, data sets and arrays as such.

Read `Source` first, the interface, then `source_of`, by which all other data becomes one. Data in memory is here, what
is read from other libraries in `_iterable`, and how batches reach the devices in `_batches`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Unpack, cast, overload, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._core import checks
from .._core.arguments import no_such_arguments
from .._core.arrays import Device, PyTree, check_plain
from .._core.host import integers_fit
from .._core.transfers import allows_transfers
from .._devices import processes
from .._devices.mesh import STORE_AXIS
from .._devices.user_mesh import each_in_user_mesh
from . import _batches
from ._batches import DatasetBatchOptions, batch_struct, placed_batch, split_rows
from ._elements import as_array, as_arrays, as_dict, join, path_name
from ._iterable import IterableSource, from_iterable, length_of

Batch = dict[str, jax.Array]


@runtime_checkable
class Source(Protocol):
    """The interface of training data for `train.fit`. `as_source` converts other data."""

    def examples(self, batch_size: int) -> int:
        """The number of examples in an epoch, which has `examples // batch_size` batches."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        rng: jax.Array | None = None,
        epochs: int | None = 1,
        start: int = 0,
        devices: Sequence[Device] | None = None,
    ) -> Iterator[PyTree]:
        """Batches on the devices from batch `start` on, split along the first axis.

        With `epochs=None` the batches never end. A source may also take `sharding=`, a `NamedSharding`. A step that
        splits a batch over some axes of a mesh passes it in place of `devices`. Otherwise a batch is split over all
        devices. A source may also take `virtual_shards=`. It then yields a `PaddedBatch` if the devices cannot share
        that many shards evenly.

        A source may also have `get_state()`, which returns its position as JSON or None, and `set_state(state)`. `fit`
        saves the position in its checkpoints. On resume, `fit` sets the position before it asks for the batches from
        `start` on.
        """
        ...


# A data set in memory.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Images and labels in host memory.

    `Dataset(images, labels)` takes your own arrays, of any shape and dtype. Do not change the arrays afterwards, since
    the devices may hold copies.

    Attributes:
        images: `(n, ...)`. `load` gives uint8 `(n, 28, 28, 1)` for Fashion-MNIST.
        labels: `(n, ...)`. Integers become int32.
        source: the origin: "prepared", "files", "debian", "download", or "arrays".
        name: the data set's name.
        part: the part of the data set, such as "train".

    Raises:
        ValueError: the numbers of images and labels differ, or int32 cannot hold a label or an image's integer.

    >>> import numpy as np
    >>> Dataset(np.zeros((6, 28, 28, 1), np.uint8), np.arange(6))
    Dataset(6 images uint8 (28, 28, 1), labels int32, source='arrays')
    """

    images: np.ndarray
    labels: np.ndarray
    source: str = "arrays"
    name: str = ""
    part: str = ""

    def __post_init__(self) -> None:
        check_plain(self.images, "Dataset: images")
        check_plain(self.labels, "Dataset: labels")
        images, labels = np.asarray(self.images), np.asarray(self.labels)
        if images.ndim == 0 or labels.ndim == 0 or len(images) != len(labels):
            raise ValueError(f"a data set needs one label per image: images {images.shape}, labels {labels.shape}")
        integers_fit(images, "Dataset: images")
        if np.issubdtype(labels.dtype, np.integer):
            integers_fit(labels, "Dataset: labels", np.int32)
            labels = labels.astype(np.int32, copy=False)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels)

    def __len__(self) -> int:
        return len(self.images)

    @no_such_arguments(_batches.HINTS)
    @allows_transfers
    def batches(
        self,
        batch_size: int,
        *,
        rng: jax.Array | int | None = None,
        epochs: int | None = 1,
        drop_remainder: bool = True,
        devices: Sequence[Device] | None = None,
        sharding: NamedSharding | PartitionSpec | None = None,
        axis_name: str = STORE_AXIS,
        start: int = 0,
        dtype: DTypeLike | None = jnp.float32,
        resident: bool | None = None,
        virtual_shards: int | None = None,
    ) -> Iterator[Batch]:
        """`data.batches` of the data set."""
        plan = _batches.plan_batches(
            len(self),
            batch_size,
            "data.batches",
            rng=rng,
            epochs=epochs,
            start=start,
            drop_remainder=drop_remainder,
            devices=devices,
            sharding=sharding,
            axis_name=axis_name,
            virtual_shards=virtual_shards,
        )
        # Gathered on the devices where copies of the data set fit there, else sent from the host batch by batch.
        dtype = None if dtype is None else np.dtype(dtype)
        if (copies := _batches.resident(self, plan.placement, resident)) is not None:
            groups = _batches.from_devices(*copies, plan, dtype)
            return each_in_user_mesh(batch for batches, number in groups for batch in batches[:number])
        return _batches.from_host({"image": self.images, "label": self.labels}, plan, dtype)

    def split(
        self, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True
    ) -> tuple[Dataset, Dataset]:
        """`data.split(dataset, fraction, rng, shuffle=shuffle)`, as two data sets.

        >>> import numpy as np
        >>> dataset = Dataset(np.zeros((10, 2)), np.arange(10))
        >>> train, valid = dataset.split(0.8)
        >>> len(train), len(valid), sorted([*train.labels.tolist(), *valid.labels.tolist()]) == list(range(10))
        (8, 2, True)
        """
        first, second = (
            dataclasses.replace(self, images=self.images[rows], labels=self.labels[rows])
            for rows in split_rows(len(self), fraction, rng, shuffle, "Dataset.split")
        )
        return first, second

    def __repr__(self) -> str:
        name = f"{self.name} {self.part}: " if self.name else ""
        return (
            f"Dataset({name}{len(self)} images {self.images.dtype} {self.images.shape[1:]}, "
            f"labels {self.labels.dtype}, source={self.source!r})"
        )


def num_batches(size: int, batch_size: int, *, drop_remainder: bool = True) -> int:
    """The number of batches in one epoch over `size` examples.

    >>> num_batches(60000, 256), num_batches(60000, 256, drop_remainder=False)
    (234, 235)
    """
    size = checks.whole_number(size, "data.num_batches", "size", least=0)
    batch_size = checks.whole_number(batch_size, "data.num_batches", "batch_size")
    return size // batch_size if drop_remainder else -(-size // batch_size)


# Data of any origin.


def source_of(data: Any) -> Source:
    """One data set, arrays or a loader as a `Source`. `as_source` takes several too."""
    if isinstance(data, Dataset):
        return DatasetSource(data)
    data = as_arrays(data, "data.as_source")
    # A list is a loader, whose elements are batches. A tuple of arrays has all examples.
    is_array = hasattr(data, "dtype") and hasattr(data, "shape") and not isinstance(data, Source)
    is_tuple_of_arrays = type(data) is tuple and all(hasattr(each, "dtype") for each in data)
    if is_array or isinstance(data, dict) or is_tuple_of_arrays:
        return from_arrays(data)
    return data if isinstance(data, Source) else from_iterable(data)


@overload
def batches(
    dataset: Dataset, batch_size: int | None = None, **options: Unpack[DatasetBatchOptions]
) -> Iterator[Batch]: ...
@overload
def batches(
    dataset: Any, batch_size: int | None = None, **options: Unpack[DatasetBatchOptions]
) -> Iterator[PyTree]: ...
@no_such_arguments(_batches.HINTS)
@allows_transfers
def batches(
    dataset: Any,
    batch_size: int | None = None,
    *,
    rng: jax.Array | int | None = None,
    epochs: int | None = 1,
    drop_remainder: bool = True,
    devices: Sequence[Device] | None = None,
    sharding: NamedSharding | PartitionSpec | None = None,
    axis_name: str = STORE_AXIS,
    start: int = 0,
    dtype: DTypeLike | None = jnp.float32,
    resident: bool | None = None,
    virtual_shards: int | None = None,
) -> Iterator[PyTree]:
    """Iterate over batches on the devices.

    A data set is copied to each device once, in its stored dtype. The copy lives as long as the data set. Batches are
    gathered on the device without a transfer from the host, up to eight small ones by one compiled program. A data set
    that is too large for the devices streams from the host, two batches ahead.

    Args:
        dataset: a `Dataset` of n examples; or other data that `train.fit` takes: a dict of arrays, a DataFrame, a
            loader. A loader keeps its own order.
        batch_size: examples per batch, over all devices together: a multiple of the number of devices. None: the size
            of the given batches, or else 32.
        rng: a random key, or an int that makes one. Epoch e is permuted by `fold_in(rng, e)`, equally on any number of
            devices. None: the stored order in each epoch.
        epochs: how many passes over the data set. None: without end.
        drop_remainder: drop a last batch of fewer than `batch_size` examples. Only data sets and arrays take False.
        devices: the devices that share the batches along axis 0, `NamedSharding(Mesh(devices, (axis_name,)),
            P(axis_name))`. None: plain arrays on the default device.
        sharding: the sharding of batches, in place of `devices`: a `NamedSharding` that splits the first axis or none,
            such as `NamedSharding(mesh, P("data"))`, or a `PartitionSpec` inside `jax.set_mesh(mesh)`. The mesh may
            have more axes and may span several processes.
        axis_name: the name of the mesh axis for `devices`.
        start: skip this many batches, counted from the first of epoch 0, to resume a run.
        dtype: the dtype of the images, or of the array named "image". uint8 is divided by 255 on the devices, into [0,
            1]. Other dtypes are only cast. None keeps the stored dtype.
        resident: whether to copy a data set to the devices. None: if twice its size is free there.
        virtual_shards: V, for a step of `train.make_train_step(loss_fn, virtual_shards=V)`. V must divide every batch.
            If the devices cannot share V shards evenly, a batch is a `PaddedBatch`, whose padding the step ignores.

    Returns:
        An iterator of dicts: "image" `(batch_size, ...)` of `dtype` and "label" `(batch_size, ...)`, or the names of
        the data. If the number of devices does not divide V, an iterator of `PaddedBatch`es.

    Raises:
        TypeError: a size is not an int; `rng` is no random key and no int; `sharding` is not a sharding; `dataset` is
            not data, or does not have a given option.
        ValueError: the devices cannot share a batch evenly; the data set has fewer examples than a batch; both
            `devices` and `sharding` are given; `sharding` splits more axes than the first.

    >>> import numpy as np
    >>> from jaxpar.data import Dataset
    >>> dataset = Dataset(np.zeros((6, 2, 2, 1), np.uint8), np.arange(6))
    >>> [batch["label"].tolist() for batch in batches(dataset, 4, drop_remainder=False)]
    [[0, 1, 2, 3], [4, 5]]
    """
    source = source_of(dataset)
    if batch_size is None:
        batch_size = usual_batch_size(source)
    # Every `Source` has rng, epochs, start and devices. Not every one has the others, so these are passed only where
    # they are asked for. A source that lacks one answers with a TypeError.
    asked: dict[str, Any] = {}
    if not drop_remainder:
        asked["drop_remainder"] = drop_remainder
    if sharding is not None:
        asked["sharding"] = sharding
    if axis_name != STORE_AXIS:
        asked["axis_name"] = axis_name
    if resident is not None:
        asked["resident"] = resident
    if virtual_shards is not None:
        asked["virtual_shards"] = virtual_shards
    if dtype != jnp.float32:
        if isinstance(source, (ArraySource, IterableSource)):  # the dtype is a field of theirs
            source = dataclasses.replace(source, dtype=dtype)
        else:
            asked["dtype"] = dtype
    if rng is not None:  # a source of the user's own gets a key
        rng = checks.random_key(rng, "data.batches")
    return source.batches(batch_size, rng=rng, epochs=epochs, start=start, devices=devices, **asked)


@allows_transfers
def split(given: Any, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True) -> Any:
    """Split data into two parts, for example for training and validation.

    The same arguments give the same split on every machine. Each part keeps the stored order.

    Args:
        given: a `Dataset`, a dict of arrays, a DataFrame, or a result of `from_arrays`; or a list of batches; or a
            result of `from_iterable` whose source has a length and an index, as a list or a Hugging Face data set has.
        fraction: the share of examples in the first part, between 0 and 1, rounded to whole examples; or an int, their
            number. Batches of a list stay whole, so `fraction` counts batches there.
        rng: a random key, or an int seed, that draws the examples of the first part. None is the seed 0.
        shuffle: False puts the first examples into the first part, as for a time series.

    Returns:
        (the first part, the rest). Neither is empty. The parts of a `Dataset` are `Dataset`s, the parts of other data
        are `Source`s. A part of a dict of arrays has a length, and `part[name]` is an array.

    Raises:
        TypeError: `fraction` is not a number, `rng` is not a key, or `given` is a loader, a function or an iterator.
        ValueError: a part would be empty, or `given` has a `steps_per_epoch`.

    >>> import numpy as np
    >>> train, valid = split({"x": np.arange(10)}, 0.8)
    >>> train.examples(1), valid.examples(1)
    (8, 2)
    """
    # A source of the user's own need not have the method. Its examples are unknown.
    source: Any = given if isinstance(given, Dataset) else source_of(given)
    return source.split(fraction, rng=rng, shuffle=shuffle)


def collect(elements: Iterable[Any], *, batched: bool = True) -> Dataset:
    """Read an iterable of another library into one `Dataset`, such as test data.

    Args:
        elements: dicts with "image" and "label", or (image, label) pairs, as for `from_iterable`.
        batched: True: an element is a batch, of any length. False: an element is one example.

    Raises:
        KeyError: an element lacks "image" or "label".
        ValueError: there are no elements, or examples differ in shape.

    >>> import numpy as np
    >>> loader = [(np.zeros((4, 2)), np.arange(4)), (np.zeros((1, 2)), np.arange(1))]
    >>> collect(loader)
    Dataset(5 images float64 (2,), labels int32, source='arrays')
    """
    names = ("image", "label")
    # Copies, since a loader may write the next element into the same memory.
    copies = [
        {name: each[name] if isinstance(each[name], jax.Array) else np.array(each[name]) for name in names}
        for each in (as_dict(element, names, "data.collect") for element in elements)
    ]
    if (length := length_of(elements)) is not None and len(copies) < length:
        raise ValueError(
            f"data.collect: the iterable of length {length} ended after {len(copies)}; look for an error in it"
        )
    if not copies:
        raise ValueError("data.collect: expected elements, got none")
    arrays = join(copies, "data.collect", batched=batched)
    return Dataset(arrays["image"], arrays["label"])


class _OfArrays:
    """The base of sources of arrays in host memory: a pytree of arrays with one row for each example."""

    arrays: PyTree
    dtype: Any  # a dtype, or None

    def examples(self, batch_size: int) -> int:
        return len(jax.tree.leaves(self.arrays)[0])

    def batch_shapes(self, batch_size: int) -> PyTree:
        return batch_struct(self.arrays, batch_size, self.dtype)

    def place(self, batch: PyTree, sharding: NamedSharding | None) -> PyTree:
        """Send a host batch to the devices. Each process gives the whole batch."""
        return placed_batch(batch, sharding, self.dtype, is_global=True)


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetSource(_OfArrays):
    """A `Dataset` as training data. `as_source` makes it."""

    dataset: Dataset

    dtype = jnp.float32

    @property
    def arrays(self) -> dict[str, np.ndarray]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {"image": self.dataset.images, "label": self.dataset.labels}

    def batches(self, batch_size: int, **options: Unpack[DatasetBatchOptions]) -> Iterator[Batch]:
        """`data.batches` of the data set."""
        return self.dataset.batches(batch_size, **options)

    def split(
        self, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True
    ) -> tuple[DatasetSource, DatasetSource]:
        """`data.split(source, fraction, rng, shuffle=shuffle)`."""
        first, second = self.dataset.split(fraction, rng, shuffle=shuffle)
        return DatasetSource(first), DatasetSource(second)


@allows_transfers
def batch_groups(
    source: Source,
    batch_size: int,
    most: int | None,
    *,
    rng: jax.Array,
    start: int,
    devices: Sequence[Device] | None = None,
    sharding: NamedSharding | None = None,
    virtual_shards: int | None = None,
) -> Iterator[tuple[PyTree, int]] | None:
    """Groups of batches of a source, for `step.many`.

    Args:
        most: how many batches a group has. None: as many as one program gathers.

    Returns:
        An iterator of (batches stacked on a new first axis, the number of real batches). At the end of an epoch a group
        has fewer real batches, and copies of the last example fill the others. None for a source that is not a data
        set, or a data set that does not fit on the devices.

    >>> import numpy as np
    >>> source = DatasetSource(Dataset(np.zeros((6, 2), np.float32), np.arange(6)))
    >>> options = dict(rng=jax.random.key(0), start=0, devices=jax.devices()[:1])
    >>> several, count = next(batch_groups(source, 2, 4, **options))
    >>> several["image"].shape, count
    ((4, 2, 2), 3)
    """
    # Only a data set whose copies are on the devices is gathered there, several batches by one program.
    if not isinstance(source, DatasetSource):
        return None
    plan = _batches.plan_batches(
        source.examples(batch_size),
        batch_size,
        "data.batch_groups",
        rng=rng,
        epochs=None,
        start=start,
        devices=devices,
        sharding=sharding,
        virtual_shards=virtual_shards,
    )
    if most is not None:
        checks.whole_number(most, "data.batch_groups", "most")
    if (copies := _batches.resident(source.dataset, plan.placement)) is None:
        return None
    return each_in_user_mesh(_batches.from_devices(*copies, plan, np.dtype(jnp.float32), most=most, stacked=True))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ArraySource(_OfArrays):
    """Named arrays in host memory. `from_arrays` and `split` make it.

    >>> import numpy as np
    >>> train, valid = split({"x": np.zeros((10, 3)), "y": np.arange(10)}, 0.8)
    >>> train, len(valid), valid["y"].shape
    (ArraySource(8 examples: x float64 (3,), y int64 ()), 2, (2,))
    """

    arrays: PyTree
    dtype: DTypeLike | None

    __iter__ = None  # of examples or of names: neither is asked for without saying which

    def __len__(self) -> int:
        return self.examples(1)

    def __getitem__(self, name: Hashable) -> Any:
        """The array of this name, or what the pytree of arrays has there."""
        return self.arrays[name]

    def __repr__(self) -> str:
        shapes: list[str] = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.arrays):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            shapes.append(f"{name} {leaf.dtype} {leaf.shape[1:]}".strip())
        return f"{type(self).__name__}({len(self)} examples: {', '.join(shapes)})"

    @no_such_arguments(_batches.HINTS)
    @allows_transfers
    def batches(
        self,
        batch_size: int,
        *,
        rng: jax.Array | int | None = None,
        epochs: int | None = 1,
        drop_remainder: bool = True,
        devices: Sequence[Device] | None = None,
        sharding: NamedSharding | PartitionSpec | None = None,
        axis_name: str = STORE_AXIS,
        start: int = 0,
        virtual_shards: int | None = None,
    ) -> Iterator[PyTree]:
        """Batches on the devices. Takes the options of `data.batches` except `dtype` and `resident`."""
        plan = _batches.plan_batches(
            self.examples(1),
            batch_size,
            "data.from_arrays",
            rng=rng,
            epochs=epochs,
            start=start,
            drop_remainder=drop_remainder,
            devices=devices,
            sharding=sharding,
            axis_name=axis_name,
            virtual_shards=virtual_shards,
        )
        return _batches.from_host(self.arrays, plan, self.dtype)

    def split(
        self, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True
    ) -> tuple[ArraySource, ArraySource]:
        """`data.split(source, fraction, rng, shuffle=shuffle)`."""
        first, second = (
            dataclasses.replace(self, arrays=jax.tree.map(lambda x, rows=rows: x.take(rows, 0), self.arrays))
            for rows in split_rows(self.examples(1), fraction, rng, shuffle, "data.split")
        )
        return first, second


@allows_transfers
def from_arrays(arrays: PyTree, *, dtype: DTypeLike | None = jnp.float32) -> ArraySource:
    """Make training data from named arrays.

    Args:
        arrays: a dict, or any pytree, of arrays that share a first axis of n examples; or a table, whose columns become
            arrays: a DataFrame of pandas or polars, or a list of dicts. Batches have the same structure. The arrays
            stay in host memory and are sent batch by batch. With several processes, each process gives the same arrays.
        dtype: the dtype of the array named "image", as in `from_iterable`.

    Raises:
        ValueError: the arrays differ in length, or there are none; int32 cannot hold a 64-bit integer.

    Example:
        >>> import numpy as np
        >>> source = from_arrays({"tokens": np.arange(12).reshape(6, 2), "next": np.arange(6)})
        >>> [batch["next"].tolist() for batch in source.batches(3)]
        [[0, 1, 2], [3, 4, 5]]
    """
    arrays = as_arrays(arrays, "data.from_arrays")
    arrays = jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.asarray(as_array(leaf, f"data.from_arrays: {path_name(path)}")), arrays
    )
    advice = "; data sets of different lengths, each with a batch of its own, are data.combine({name: data, ...})"
    checks.batch_length(arrays, "data.from_arrays", advice=advice)
    for path, array in jax.tree_util.tree_leaves_with_path(arrays):
        integers_fit(array, f"data.from_arrays: {path_name(path)}")
    return ArraySource(arrays, dtype)


# For `train.fit`.


def batch_options(
    source: Source, devices: Sequence[Device] | None, sharding: NamedSharding | None, virtual_shards: int | None
) -> dict[str, Any]:
    """The options of `source.batches` for a step: where its batches go, and for how many virtual shards."""
    # A user's source may lack `sharding=` and `virtual_shards=`, see `Source`. Only its signature tells.
    parameters = inspect.signature(source.batches).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if sharding is not None and (takes_any or "sharding" in parameters):
        return {"sharding": sharding}
    if virtual_shards is None:
        return {"devices": devices}
    if takes_any or "virtual_shards" in parameters:
        return {"devices": devices, "virtual_shards": virtual_shards}
    if virtual_shards % (count := len(devices or (None,))):
        raise TypeError(
            f"{type(source).__name__}.batches takes no virtual_shards={virtual_shards}, which {count} devices cannot "
            "share evenly; add it, or use a number of devices that divides it"
        )
    return {"devices": devices}


def usual_batch_size(source: object) -> int:
    """The size of a batch where none is asked for: that of the batches or of the source, otherwise 32."""
    if hasattr(source, "usual_batch_size"):  # several sources
        return cast(Any, source).usual_batch_size()
    return own_batch_size(source) or 32


def own_batch_size(source: object) -> int | None:
    """The size of the batches of a source, where it has one of its own."""
    if isinstance(source, ArraySource):  # images of records have one, `mxnet.image_record_source`
        return getattr(source, "batch_size", None)
    if not isinstance(source, IterableSource):
        return None
    # A loader makes batches of one size, and nobody cuts them anew. It says the size, or its first batch does.
    size: Any = getattr(source.source, "batch_size", None)
    if not checks.is_int(size):
        batch = source.first_batch()
        if batch is None:
            return None
        size = max(np.shape(leaf)[:1] or (0,) for leaf in jax.tree.leaves(batch))[0]
    return int(size) * processes.count()  # each process has a loader of its own


def place_in(source: Any) -> list[Any] | None:
    """The positions of all processes in a source with `get_state`, as JSON for a checkpoint, or None."""
    if not hasattr(source, "get_state"):
        return None
    states = [json.loads(text) for text in processes.exchange(json.dumps(source.get_state()))]
    return None if None in states else states


def go_to(source: Any, places: list[Any] | None) -> None:
    """Set a source to the position from `place_in`. `ValueError` for another number of processes."""
    # Each process has read its own share. No other number of processes can go on with these shares in the same order.
    if places is None or not hasattr(source, "set_state"):
        return
    if (count := len(places)) != processes.count():
        raise ValueError(
            f"fit: the checkpoint has the positions in the data of {count} processes, but {processes.count()} run now; "
            f"start {count}, or give resume=False"
        )
    source.set_state(places[jax.process_index()])
