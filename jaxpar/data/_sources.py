"""Training data of any origin: what `train.fit` asks of it, data sets and arrays as such."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._core.arrays import check_plain
from .._core.calls import answers
from .._devices.mesh import STORE_AXIS
from . import _batches
from ._batches import epochs_from, whole_batches
from ._convert import batch_struct, path_name, placed_batch, share_sharding
from ._dataset import Dataset
from ._iterable import from_iterable
from ._parts import rows_of_parts
from ._shuffle import host_order
from ._split import split_of, with_virtual_shards


@runtime_checkable
class Source(Protocol):
    """What `train.fit` asks of its training data. `as_source` makes it of other data."""

    def examples(self, batch_size: int) -> int:
        """How many examples an epoch has. It is `examples // batch_size` batches."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        rng: jax.Array | None = None,
        epochs: int | None = 1,
        start: int = 0,
        devices: Sequence[Any] | None = None,
    ) -> Iterator[Any]:
        """Batches on the devices, split along their first axis, from batch `start` on. None epochs: forever.

        A source that also takes `sharding=`, a `NamedSharding`, gets it in place of `devices` from a step that splits
        a batch over some axes of a mesh. Without it a batch is split over all devices. One that also takes
        `virtual_shards=` gives a `PaddedBatch` where the devices cannot share so many shards evenly.
        """
        ...


def takes_sharding(source: Source) -> bool:
    """Whether a source can split a batch over some axes of a mesh."""
    found = inspect.signature(source.batches).parameters.values()
    return any(each.name == "sharding" or each.kind is each.VAR_KEYWORD for each in found)


def virtual_options(source: Source, virtual_shards: int | None, devices: Sequence[Any] | None) -> dict[str, Any]:
    """The options of `source.batches` for a step with so many virtual shards.

    Raises:
        TypeError: the devices cannot share the shards evenly, and the source cannot pad batches.
    """
    if virtual_shards is None:
        return {}
    found = inspect.signature(source.batches).parameters.values()
    if any(each.name == "virtual_shards" or each.kind is each.VAR_KEYWORD for each in found):
        return {"virtual_shards": virtual_shards}
    if virtual_shards % len(devices or (None,)) == 0:
        return {}
    raise TypeError(
        f"{type(source).__name__}.batches takes no virtual_shards=, and {len(devices or ())} devices cannot share the "
        f"{virtual_shards} virtual shards of the step evenly; give it that option, as data.batches has it, or use a "
        f"number of devices that divides {virtual_shards}"
    )


@answers("data.as_source")
def as_source(given: Any) -> Source:
    """`given` as training data.

    A `Source` stays as it is, a `Dataset` becomes a `DatasetSource`, a dict of arrays goes to `from_arrays`, anything
    else to `from_iterable`.

    >>> import numpy as np
    >>> as_source(Dataset(np.zeros((6, 2)), np.arange(6))).examples(batch_size=2)
    6
    """
    if isinstance(given, Dataset):
        return DatasetSource(given)
    if isinstance(given, dict):
        return from_arrays(given)
    return given if isinstance(given, Source) else from_iterable(given)


@answers("data.split")
def split(given: Any, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True) -> Any:
    """Two parts of the data that share no example, such as for training and validation.

    The same arguments give the same two on every machine. Each keeps the stored order.

    Args:
        given: a `Dataset`, a dict of arrays, what `from_arrays` returns. Or a list of batches, what `from_iterable`
            makes of a list, of a data set of Hugging Face, of all else that has a length and elements by number.
        fraction: of the examples in the first part, between 0 and 1, rounded to whole examples. Or their number, an
            int. Batches of a list stay whole, so there it is one of batches.
        rng: draws which examples: a random key, or an int to make one of. None is the int 0.
        shuffle: False takes the first examples, as for a series in time.

    Returns:
        The first part and the rest, both as `Dataset`s of a `Dataset`, else as a `Source`. Neither is empty.

    Raises:
        TypeError: a `fraction` that is no number, an `rng` that is no key, a loader, a function or an iterator.
        ValueError: one of the two would be empty, a `steps_per_epoch`.

    >>> import numpy as np
    >>> some, rest = split({"x": np.arange(10)}, 0.8)
    >>> some.examples(1), rest.examples(1)
    (8, 2)
    """
    options: Any = {"rng": rng, "shuffle": shuffle}
    source = given if isinstance(given, Dataset) else as_source(given)
    split_it: Any = getattr(source, "split", None)
    if split_it is None:
        raise TypeError(
            f"data.split: a {type(source).__name__} is a source of its own kind, whose examples are not known; split "
            "what it is made of"
        )
    return split_it(fraction, **options)


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetSource:
    """A `Dataset` as training data. `as_source` makes it."""

    dataset: Dataset

    def examples(self, batch_size: int) -> int:
        del batch_size
        return len(self.dataset)

    def batches(
        self,
        batch_size: int,
        *,
        rng: jax.Array | None = None,
        epochs: int | None = 1,
        start: int = 0,
        devices: Sequence[Any] | None = None,
        sharding: NamedSharding | None = None,
        virtual_shards: int | None = None,
    ) -> Iterator[Any]:
        """`data.batches` of the data set."""
        order: dict[str, Any] = {"rng": rng, "epochs": epochs, "start": start}
        where: dict[str, Any] = {"devices": devices, "sharding": sharding, "virtual_shards": virtual_shards}
        return _batches.batches(self.dataset, batch_size, **order, **where)

    def split(self, fraction: float | int, **options: Any) -> tuple[DatasetSource, DatasetSource]:
        """`data.split(source, fraction, **options)`."""
        first, rest = self.dataset.split(fraction, **options)
        return DatasetSource(first), DatasetSource(rest)

    def batch_shapes(self, batch_size: int) -> Any:
        """A batch as `jax.ShapeDtypeStruct`s."""
        arrays = {"image": self.dataset.images, "label": self.dataset.labels}
        return batch_struct(arrays, batch_size, jnp.float32)


@answers("data.batch_groups")
def batch_groups(
    source: Source,
    batch_size: int,
    most: int | None,
    *,
    rng: jax.Array,
    start: int,
    devices: Sequence[Any] | None = None,
    sharding: NamedSharding | None = None,
    virtual_shards: int | None = None,
) -> Iterator[tuple[Any, int]] | None:
    """The batches of `source.batches(..., epochs=None)`, several at a time, for `step.many`.

    Args:
        most: how many at a time. None: as many as one program gathers.

    Returns:
        (batches with one more axis in front, how many of them count). At the end of an epoch fewer count, and the rest
        are copies of the epoch's last example. None for a source other than a data set, or one for which the devices
        have no room.

    >>> import numpy as np
    >>> source = as_source(Dataset(np.zeros((6, 2), np.float32), np.arange(6)))
    >>> options = dict(rng=jax.random.key(0), start=0, devices=jax.devices()[:1])
    >>> several, count = next(batch_groups(source, 2, 4, **options))
    >>> several["image"].shape, count
    ((4, 2, 2), 3)
    """
    if not isinstance(source, DatasetSource):
        return None
    where: dict[str, Any] = {"devices": devices, "sharding": sharding, "virtual_shards": virtual_shards}
    return _batches.groups(source.dataset, batch_size, most, rng=rng, start=start, **where)


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource:
    """Arrays in host memory under names of one's own. `from_arrays` makes it."""

    arrays: Any
    dtype: Any

    def examples(self, batch_size: int) -> int:
        del batch_size
        return len(jax.tree.leaves(self.arrays)[0])

    def batches(
        self,
        batch_size: int,
        *,
        rng: jax.Array | None = None,
        epochs: int | None = 1,
        start: int = 0,
        devices: Sequence[Any] | None = None,
        sharding: NamedSharding | None = None,
        virtual_shards: int | None = None,
    ) -> Iterator[Any]:
        """Batches on the devices. Epoch e is in the order of a permutation drawn from `fold_in(rng, e)`."""
        where = "data.from_arrays"
        steps = whole_batches(self.examples(batch_size), batch_size, where, virtual_shards)
        split = with_virtual_shards(split_of(devices, STORE_AXIS, sharding, where), virtual_shards, where)
        padded = batch_size if split is None else split.rows(batch_size)
        sharding = share_sharding(padded, devices, where, sharding)
        for epoch, skipped in epochs_from(start, steps, epochs):
            order = host_order(rng, epoch, self.examples(batch_size))
            for at in range(skipped, steps):
                rows = order[at * batch_size : (at + 1) * batch_size]
                rows = np.pad(rows, (0, padded - batch_size), mode="edge")
                batch = self.place(jax.tree.map(lambda x, rows=rows: x[rows], self.arrays), sharding)
                yield batch if split is None else split.as_batch(batch)

    def split(
        self, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True
    ) -> tuple[ArraySource, ArraySource]:
        """`data.split(source, fraction, rng, shuffle=shuffle)`."""
        rows = rows_of_parts(self.examples(1), fraction, rng, shuffle, "data.split")
        first, rest = (jax.tree.map(lambda x, part=part: x[part], self.arrays) for part in rows)
        return ArraySource(first, self.dtype), ArraySource(rest, self.dtype)

    def batch_shapes(self, batch_size: int) -> Any:
        """A batch as `jax.ShapeDtypeStruct`s."""
        return batch_struct(self.arrays, batch_size, self.dtype)

    def place(self, batch: Any, sharding: NamedSharding | None) -> Any:
        """A batch of host memory on the devices, as `batches` gives them. Each process has the whole batch."""
        return placed_batch(batch, sharding, self.dtype, whole=True)


@answers("data.from_arrays")
def from_arrays(arrays: Any, *, dtype: Any = jnp.float32) -> ArraySource:
    """Training data out of arrays with names of your own.

    Args:
        arrays: a dict, or any pytree, of arrays with a common first axis of n examples. Batches have the same
            structure. The arrays stay in host memory and are sent batch by batch. In several processes each one gives
            the same arrays.
        dtype: of what is called "image", as in `from_iterable`.

    Raises:
        ValueError: arrays of different lengths, or none.

    Example:
        >>> import numpy as np
        >>> source = from_arrays({"tokens": np.arange(12).reshape(6, 2), "next": np.arange(6)})
        >>> [batch["next"].tolist() for batch in source.batches(3)]
        [[0, 1, 2], [3, 4, 5]]
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        check_plain(leaf, f"data.from_arrays: {path_name(path)}")
    arrays = jax.tree.map(np.asarray, arrays)
    shapes = [x.shape for x in jax.tree.leaves(arrays)]
    if not shapes or () in shapes or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"data.from_arrays: the arrays must share the length of their first axis, got {shapes}")
    return ArraySource(arrays, dtype)
