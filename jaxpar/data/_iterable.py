"""Training data and data sets out of what other libraries iterate over.

Nothing of PyTorch, Grain or Hugging Face is imported: an element is a pytree of what NumPy or DLPack can read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._core import checks
from .._core.arguments import takes
from .._core.calls import answers
from .._devices import processes
from .._devices.mesh import STORE_AXIS
from .._devices.padded import pad_rows
from ._batches import epochs_from, whole_batches
from ._convert import as_dict, batch_struct, concatenate, path_name, placed_batch, share_sharding, stack
from ._dataset import Dataset
from ._parts import Some, rows_of_parts
from ._split import check_virtual_shards, rows_to_add, split_of, with_virtual_shards

_WHERE = "data.from_iterable"


@dataclasses.dataclass(frozen=True, eq=False)
class IterableSource:
    """Batches or examples of another library. `from_iterable` makes it.

    Attributes:
        source, steps_per_epoch, batched, names, dtype: as given to `from_iterable`.
    """

    source: Any
    steps_per_epoch: int | None
    batched: bool
    names: tuple[str, ...]
    dtype: Any

    def examples(self, batch_size: int) -> int:
        """Batches in an epoch times `batch_size`.

        Raises:
            TypeError: the length is not known.
        """
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch * batch_size
        try:
            return len(self.source) * (batch_size if self.batched else processes.count())
        except TypeError:
            raise TypeError(
                f"{_WHERE}: {_describe(self.source)} has no length, so say how many batches make an epoch: "
                f"{_WHERE}(source, steps_per_epoch=...)"
            ) from None

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
        """Batches on the devices, in the iterable's own order. `rng` is not used.

        `start` skips batches. Earlier epochs are not read. The first batches of this epoch are read and dropped. Of an
        iterator, which cannot be rewound, nothing is skipped.
        """
        del rng
        check_virtual_shards(batch_size, virtual_shards, _WHERE)
        steps = whole_batches(self.examples(batch_size), batch_size, _WHERE)
        split = with_virtual_shards(split_of(devices, STORE_AXIS, sharding, _WHERE), virtual_shards, _WHERE)
        padding = rows_to_add(split, batch_size, _WHERE)
        sharding = share_sharding(batch_size + padding, devices, _WHERE, sharding, whole=False)
        share = batch_size // processes.count()
        once = self.source if isinstance(self.source, Iterator) else None
        for epoch, skipped in epochs_from(start, steps, epochs):
            elements = once if once is not None else iter(self._epoch(epoch))
            found = 0 if once is None else skipped
            for batch in itertools.islice(self._host_batches(elements, share), steps - found):
                found += 1
                if once is not None or found > skipped:
                    _check_lengths(batch, share, found - 1)
                    batch = self.place(pad_rows(batch, padding), sharding)
                    yield batch if split is None else split.as_batch(batch)
            if found < steps:
                raise ValueError(_too_few(self.source, epoch, found, steps))

    def batch_shapes(self, batch_size: int, like: Any = None) -> Any:
        """A batch as `jax.ShapeDtypeStruct`s, out of one of host memory. None: of `first_batch`, if there is one."""
        like = self.first_batch() if like is None else like
        return None if like is None else batch_struct(like, batch_size, self.dtype)

    def first_batch(self) -> Any:
        """The first of a list of batches. None of anything else, which is not read before it is used."""
        if not self.batched or not isinstance(self.source, (list, tuple)) or not self.source:
            return None
        return as_dict(self.source[0], self.names)

    def place(self, batch: Any, sharding: NamedSharding | None) -> Any:
        """A batch of host memory on the devices, as `batches` gives them. Each process has its own share."""
        return placed_batch(batch, sharding, self.dtype, whole=False)

    def every_batch(self, share: int) -> Iterator[Any]:
        """This process's batches of epoch 0 in host memory, the last and smaller one too.

        Args:
            share: examples in a batch where elements are examples. Batches of the source stay as long as they are.
        """
        elements = iter(self._epoch(0))
        found = 0
        for batch in itertools.islice(self._host_batches(elements, share, rest=True), self.steps_per_epoch):
            found += 1
            yield batch
        if found < (self.steps_per_epoch or 0):
            raise ValueError(_too_few(self.source, 0, found, self.steps_per_epoch or 0))

    def split(
        self, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True
    ) -> tuple[IterableSource, IterableSource]:
        """`data.split(source, fraction, rng, shuffle=shuffle)`. Elements are split, batches stay whole."""
        if not (hasattr(self.source, "__len__") and hasattr(self.source, "__getitem__")):
            raise TypeError(
                f"data.split: {_describe(self.source)} has no elements by number; split what it reads, or give a list"
            )
        if self.steps_per_epoch is not None:
            raise ValueError("data.split: leave out steps_per_epoch=, since the length of each part is known")
        rows = rows_of_parts(len(self.source), fraction, rng, shuffle, "data.split")
        first, rest = (dataclasses.replace(self, source=_elements(self.source, part)) for part in rows)
        return first, rest

    @property
    def is_read_once(self) -> bool:
        """Whether a second pass over the source finds nothing."""
        return isinstance(self.source, Iterator)

    def _epoch(self, epoch: int) -> Iterable[Any]:
        if not _is_function(self.source):
            return self.source
        return self.source(epoch) if takes(self.source, 1) else self.source()

    def _host_batches(self, elements: Iterator[Any], share: int, rest: bool = False) -> Iterator[Any]:
        """This process's batches as pytrees of arrays. With `rest` also one of fewer examples than its share."""
        if self.batched:
            yield from (as_dict(element, self.names) for element in elements)
            return
        while some := [as_dict(e, self.names) for e in itertools.islice(elements, share)]:
            if len(some) < share and not rest:
                return
            yield stack(some)


@answers("data.from_iterable")
def from_iterable(
    source: Any,
    *,
    steps_per_epoch: int | None = None,
    batched: bool = True,
    names: Sequence[str] = ("image", "label"),
    dtype: Any = jnp.float32,
) -> IterableSource:
    """Training data out of what another library iterates over.

    That may be a PyTorch DataLoader, a data set of Grain or Hugging Face, a list, a generator.

    Args:
        source: something that can be iterated over again for each epoch. Or a function of the epoch, `source(0)`,
            `source(1)`, ..., or of nothing, that returns such a thing. Or an iterator, which is read once, epoch after
            epoch.
        steps_per_epoch: batches in an epoch. None: as `len(source)` says.
        batched: whether an element is a batch, with n examples along the first axis of each array. False: an
            element is one example, and `batch_size` of them are stacked. Those that fill no batch are left out.
        names: an element that is a tuple or a list becomes a dict with these names. Any other pytree stays as it
            is. Leaves may be NumPy or JAX arrays, PyTorch tensors, pictures of Pillow, numbers.
        dtype: of what is called "image", as in `data.batches`: uint8 is divided by 255 on the device. None leaves
            images as they are.

    Returns:
        A `Source` for `train.fit`. `source.batches(batch_size, devices=devices)` gives batches on the devices. In
        several processes, each one reads its own share of a batch, `batch_size / processes` examples. With
        `virtual_shards=V` in several processes, the number of devices must divide V.

    Raises:
        ValueError: when read: batches of another size, or fewer than an epoch has.
        TypeError: when read: a leaf that is no array of numbers, such as text, or no known length.

    Resuming:
        A run that goes on in the middle of an epoch reads that epoch's first batches and drops them. It sees what an
        undisturbed run would have seen if the same epoch gives the same batches again, as a function of the epoch can
        that seeds the shuffling. An iterator is not rewound: what it yields next is next.

    Example:
        >>> import numpy as np
        >>> loader = [(np.full((4, 2), i, np.uint8), np.arange(4)) for i in range(3)]
        >>> [batch["label"].shape for batch in from_iterable(loader).batches(4)]
        [(4,), (4,), (4,)]
        >>> rows = ({"x": float(i)} for i in range(10))
        >>> [batch["x"].tolist() for batch in from_iterable(rows, batched=False, steps_per_epoch=2).batches(3)]
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    if isinstance(source, (str, bytes)):
        raise TypeError(f"{_WHERE}: {source!r} is a name, not data; write data.load({source!r})")
    if isinstance(source, dict) or hasattr(source, "dtype") or _is_tuple_of_arrays(source):
        raise TypeError(
            f"{_WHERE}: {_describe(source)} of arrays is data, not a loader; use data.Dataset(images, labels) "
            'or data.from_arrays({"name": array})'
        )
    if not _is_function(source) and not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
        raise TypeError(
            f"{_WHERE}: expected something to iterate over, or a function of the epoch that returns it; "
            f"got {_describe(source)}"
        )
    if steps_per_epoch is not None:
        checks.whole_number(steps_per_epoch, _WHERE, "steps_per_epoch")
    return IterableSource(source, steps_per_epoch, batched, tuple(names), dtype)


@answers("data.collect")
def collect(elements: Iterable[Any], *, batched: bool = True) -> Dataset:
    """Read what another library iterates over into one `Dataset`, such as test data.

    Args:
        elements: dicts with "image" and "label", or pairs of these, as for `from_iterable`.
        batched: whether an element is a batch, of any length, or one example.

    Raises:
        KeyError: an element without "image" or "label".
        ValueError: no elements, or examples of different shapes.

    >>> import numpy as np
    >>> loader = [(np.zeros((4, 2)), np.arange(4)), (np.zeros((1, 2)), np.arange(1))]
    >>> collect(loader)
    Dataset(5 images float64 (2,), labels int32, source='arrays')
    """
    if not isinstance(elements, Iterable):
        raise TypeError(f"data.collect: expected something to iterate over, got {_describe(elements)}")
    found = [as_dict(element, ("image", "label")) for element in elements]
    if not found:
        raise ValueError("data.collect: there are no elements")
    join = concatenate if batched else stack
    whole = join([{"image": each["image"], "label": each["label"]} for each in found])
    return Dataset(whole["image"], whole["label"])


def _elements(source: Any, rows: np.ndarray) -> Any:
    """The elements at these places: a list of a list, of whose batches the shapes are known."""
    return [source[i] for i in rows] if isinstance(source, (list, tuple)) else Some(source, rows)


def _is_function(source: Any) -> bool:
    return callable(source) and not isinstance(source, Iterable) and not hasattr(source, "__getitem__")


def _is_tuple_of_arrays(source: Any) -> bool:
    return type(source) is tuple and all(hasattr(each, "dtype") for each in source)


def _check_lengths(batch: Any, share: int, at: int) -> None:
    """`ValueError` for a batch of another number of examples than this process's share."""
    shapes = {path_name(path): np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)}
    if {shape[:1] for shape in shapes.values()} != {(share,)}:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"{_WHERE}: batch {at} of the epoch should have {share} examples in each array, got {given}; "
            "make the loader's batches that large and drop an incomplete last one (drop_last=True, "
            "drop_remainder=True); where an element is one example, say batched=False"
        )


def _too_few(source: Any, epoch: int, found: int, steps: int) -> str:
    """The message for an epoch that ends early."""
    what = f"{_WHERE}: {_describe(source)} ended after {found} of the {steps} batches of epoch {epoch}; "
    if isinstance(source, Iterator):
        return what + (
            "an iterator is read only once: give what can be iterated over again (a list, a loader), or a function of "
            "the epoch that returns an iterator"
        )
    return what + "give steps_per_epoch= as many as there are"


def _describe(source: Any) -> str:
    name = getattr(source, "__name__", None)
    return f"the function {name}" if name and _is_function(source) else f"a {type(source).__name__}"
