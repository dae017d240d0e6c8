"""Training data of any origin: what `fit` asks of it, and adapters for arrays and for other libraries' loaders.

Nothing of PyTorch, Grain or Hugging Face is imported: an element is a pytree of what NumPy or DLPack can read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from . import _shuffle
from ._convert import as_dict, mesh_for, path_name, ready_batch, stack, to_devices

Batch = Any


@runtime_checkable
class Source(Protocol):
    """What `train.fit` asks of its training data. A `Dataset` is one, and so is what `from_iterable` returns."""

    def examples(self, batch_size: int) -> int:
        """How many examples an epoch has; an epoch is `examples // batch_size` batches."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        rng: jax.Array | None = None,
        epochs: int | None = 1,
        start: int = 0,
        devices: Sequence[Any] | None = None,
    ) -> Iterator[Batch]:
        """Batches on the devices, split along their first axis, from batch `start` on; None epochs: without end."""
        ...


def as_source(given: Any) -> Source:
    """`given` itself where it is a `Source`, else `from_iterable(given)`."""
    return given if isinstance(given, Source) else from_iterable(given)


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource:
    """Arrays in host memory under names of one's own; made by `from_arrays`."""

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
    ) -> Iterator[Batch]:
        """Batches on the devices; epoch e is in the order of a permutation drawn from `fold_in(rng, e)`."""
        steps = _steps(self, batch_size)
        mesh = mesh_for(batch_size, devices)
        for epoch, skipped in _epochs(start, steps, epochs):
            order = _shuffle.host_order(rng, epoch, self.examples(batch_size))
            for at in range(skipped, steps):
                rows = order[at * batch_size : (at + 1) * batch_size]
                batch = jax.tree.map(lambda x, rows=rows: x[rows], self.arrays)
                yield ready_batch(to_devices(batch, mesh, whole=True), mesh, self.dtype)


def from_arrays(arrays: Any, *, dtype: Any = jnp.float32) -> ArraySource:
    """Training data out of arrays with names of your own.

    Args:
        arrays: a dict, or any pytree, of arrays with a common first axis of n examples; batches have the same
            structure. They stay in host memory and are sent batch by batch. In several processes each one gives
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
    arrays = jax.tree.map(np.asarray, arrays)
    shapes = [x.shape for x in jax.tree.leaves(arrays)]
    if not shapes or () in shapes or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"data.from_arrays: the arrays must share the length of their first axis, got {shapes}")
    return ArraySource(arrays, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class IterableSource:
    """Batches or examples of another library; made by `from_iterable`."""

    source: Any
    steps_per_epoch: int | None
    batched: bool
    names: tuple[str, ...]
    dtype: Any

    def examples(self, batch_size: int) -> int:
        """Batches in an epoch times `batch_size`; `TypeError` where the length is not known."""
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch * batch_size
        try:
            return len(self.source) * (batch_size if self.batched else jax.process_count())
        except TypeError:
            raise TypeError(
                f"data.from_iterable: {_what(self.source)} has no length, so say how many batches make an epoch: "
                "data.from_iterable(source, steps_per_epoch=...)"
            ) from None

    def batches(
        self,
        batch_size: int,
        *,
        rng: jax.Array | None = None,
        epochs: int | None = 1,
        start: int = 0,
        devices: Sequence[Any] | None = None,
    ) -> Iterator[Batch]:
        """Batches on the devices. `rng` is not used: the order is the iterable's own.

        `start` skips batches: those of earlier epochs are never asked for, those of this epoch are read and
        dropped, and nothing is skipped of an iterator, which cannot be rewound.
        """
        del rng
        steps = _steps(self, batch_size)
        mesh = mesh_for(batch_size, devices)
        share = batch_size // jax.process_count()
        once = self.source if isinstance(self.source, Iterator) else None
        for epoch, skipped in _epochs(start, steps, epochs):
            elements = once if once is not None else iter(self._epoch(epoch))
            found = 0 if once is None else skipped
            for batch in itertools.islice(self._host(elements, share), steps - found):
                found += 1
                if once is not None or found > skipped:
                    _check_lengths(batch, share, found - 1)
                    yield ready_batch(to_devices(batch, mesh, whole=False), mesh, self.dtype)
            if found < steps:
                raise ValueError(_short(self.source, epoch, found, steps))

    def _epoch(self, epoch: int) -> Iterable[Any]:
        return self.source(epoch) if _is_function(self.source) else self.source

    def _host(self, elements: Iterator[Any], share: int) -> Iterator[Any]:
        """This process's batches as pytrees of arrays."""
        if self.batched:
            yield from (as_dict(element, self.names) for element in elements)
            return
        while len(some := [as_dict(e, self.names) for e in itertools.islice(elements, share)]) == share:
            yield stack(some)


def from_iterable(
    source: Any,
    *,
    steps_per_epoch: int | None = None,
    batched: bool = True,
    names: Sequence[str] = ("image", "label"),
    dtype: Any = jnp.float32,
) -> IterableSource:
    """Training data out of what another library iterates over: a PyTorch DataLoader, Grain, Hugging Face, a list.

    Args:
        source: something that can be iterated over anew for each epoch; or a function of the epoch, `source(0)`,
            `source(1)`, ..., that returns such a thing; or an iterator, which is read once, epoch after epoch.
        steps_per_epoch: batches in an epoch. None: as `len(source)` says.
        batched: whether an element is a batch, with n examples along the first axis of each array. False: an
            element is one example, and `batch_size` of them are stacked; those that fill no batch are left out.
        names: an element that is a tuple or a list becomes a dict with these names; any other pytree stays as it
            is. Leaves may be NumPy or JAX arrays, PyTorch tensors, pictures of Pillow, numbers.
        dtype: of what is called "image", as in `data.batches`: uint8 is divided by 255 on the device. None leaves
            images as they are.

    Returns:
        A `Source` for `train.fit`; `source.batches(batch_size, devices=devices)` are batches on the devices. In
        several processes, each one reads its own share of a batch, `batch_size / processes` examples.

    Raises:
        ValueError: when read: batches of another size, or fewer than an epoch has.
        TypeError: when read: a leaf that is no array of numbers, such as text; no known length.

    Resuming: a run that goes on in the middle of an epoch reads that epoch's first batches and drops them. So it
    sees what an undisturbed run would have seen where the same epoch gives the same batches again, say because a
    function of the epoch seeds the shuffling. An iterator is not rewound: what it yields next is next.

    Example:
        >>> import numpy as np
        >>> loader = [(np.full((4, 2), i, np.uint8), np.arange(4)) for i in range(3)]
        >>> [batch["label"].shape for batch in from_iterable(loader).batches(4)]
        [(4,), (4,), (4,)]
        >>> rows = ({"x": float(i)} for i in range(10))
        >>> [batch["x"].tolist() for batch in from_iterable(rows, batched=False, steps_per_epoch=2).batches(3)]
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    if isinstance(source, dict) or hasattr(source, "dtype") or (type(source) is tuple and _arrays(source)):
        raise TypeError(
            f"data.from_iterable: {_what(source)} of arrays is data, not a loader; use data.Dataset(images, labels) "
            'or data.from_arrays({"name": array})'
        )
    if not _is_function(source) and not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
        raise TypeError(
            "data.from_iterable: expected something to iterate over, or a function of the epoch that returns it; "
            f"got {_what(source)}"
        )
    if steps_per_epoch is not None and steps_per_epoch < 1:
        raise ValueError(f"data.from_iterable: steps_per_epoch must be 1 or more, got {steps_per_epoch!r}")
    return IterableSource(source, steps_per_epoch, batched, tuple(names), dtype)


def _is_function(source: Any) -> bool:
    return callable(source) and not isinstance(source, Iterable) and not hasattr(source, "__getitem__")


def _arrays(some: tuple[Any, ...]) -> bool:
    return all(hasattr(each, "dtype") for each in some)


def _steps(source: Source, batch_size: int) -> int:
    if batch_size < 1 or batch_size % jax.process_count():
        raise ValueError(f"batch_size must be a positive multiple of {jax.process_count()} processes, got {batch_size}")
    examples = source.examples(batch_size)
    if examples < batch_size:
        raise ValueError(f"{examples} examples make no whole batch of {batch_size}; use a smaller batch_size")
    return examples // batch_size


def _epochs(start: int, steps: int, epochs: int | None) -> Iterator[tuple[int, int]]:
    """Each epoch from the one that batch `start` lies in, with the number of its batches to skip."""
    first, skipped = divmod(start, steps)
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        yield epoch, skipped if epoch == first else 0


def _check_lengths(batch: Any, share: int, at: int) -> None:
    shapes = {path_name(path): np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)}
    if {shape[:1] for shape in shapes.values()} != {(share,)}:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"data.from_iterable: batch {at} of the epoch should have {share} examples in each array, got {given}; "
            "make the loader's batches that large and drop an incomplete last one (drop_last=True, "
            "drop_remainder=True); where an element is one example, say batched=False"
        )


def _short(source: Any, epoch: int, found: int, steps: int) -> str:
    what = f"data.from_iterable: {_what(source)} ended after {found} of the {steps} batches of epoch {epoch}; "
    if isinstance(source, Iterator):
        return what + (
            "an iterator is read only once: give what can be iterated over again (a list, a loader), or a function of "
            "the epoch that returns an iterator"
        )
    return what + "give steps_per_epoch= as many as there are"


def _what(source: Any) -> str:
    name = getattr(source, "__name__", None)
    return f"the function {name}" if name and _is_function(source) else f"a {type(source).__name__}"
