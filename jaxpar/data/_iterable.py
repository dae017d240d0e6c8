"""Loaders, data sets and iterators of other libraries as training data.

Begin with `from_iterable`. `IterableSource.batches` sends to the devices what `_read_on` reads: which batch of which
pass comes next, and where a run would go on that stops behind it. What an element is, `_elements` says.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from .._core import checks, host
from .._core.arrays import Device, KeyPath, PyTree
from .._core.functions import takes
from .._devices import processes
from .._devices.collectives import PaddedBatch, pad_rows
from .._devices.mesh import split_over
from . import _batches
from ._elements import as_dict, join, path_name

_CALLER = "data.from_iterable"
READ_ONCE = "an iterator can be read only once; give a list, a loader, or a function that returns an iterator"


@dataclasses.dataclass
class _Reading:
    """How far the batches of a source were read. It changes with each of them."""

    # After the last batch: how many there were of all epochs, the number of its pass, and how many of that pass. JSON.
    place: dict[str, Any] | None = None
    iterator: Any = None  # of that pass. None: the place has its state, or it has ended
    period: int = 0  # batches of a pass, where all passes have as many
    is_last: bool = False  # whether the last batch was the last one of its pass
    resume_from: dict[str, Any] | None = None  # what `set_state` has set, for the next call of `batches`


@dataclasses.dataclass(frozen=True, eq=False)
class IterableSource:
    """A source of batches or examples from another library. `from_iterable` makes it.

    Attributes:
        source, steps_per_epoch, batched, names, dtype: as given to `from_iterable`.
    """

    source: Any
    steps_per_epoch: int | Literal["all"] | None
    batched: bool
    names: tuple[str, ...]
    dtype: DTypeLike | None
    _reading: _Reading = dataclasses.field(default_factory=_Reading, init=False, repr=False)

    def examples(self, batch_size: int) -> int:
        """The number of examples in an epoch: batches times `batch_size`.

        Raises:
            TypeError: the length is unknown, or differs between epochs.
            ValueError: by its `batch_size` and `drop_last`, the loader will give batches of another size.
        """
        self.check(batch_size)
        if self.steps_per_epoch == "all":
            raise TypeError(f'{_CALLER}: with steps_per_epoch="all" an epoch has as many batches as the source gives')
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch * batch_size
        length = length_of(self.source)
        if length is None:
            raise TypeError(
                f"{_CALLER}: {_describe(self.source)} has no length, so give the number of batches in an epoch: "
                f'{_CALLER}(source, steps_per_epoch=...), or "all"'
            )
        return length * (batch_size if self.batched else processes.count())

    @property
    def is_pass_over(self) -> bool:
        """With `steps_per_epoch="all"`, whether the batch that came last was the last one of its epoch."""
        return self._reading.is_last

    def check(self, batch_size: int) -> None:
        """`ValueError` for a loader that will give batches of another size, and for epochs of different lengths in
        several processes.
        """
        if self.steps_per_epoch == "all" and processes.count() > 1:
            raise ValueError(
                f'{_CALLER}: steps_per_epoch="all" is for one process, since one of several processes could end an '
                "epoch before the others; give the number of batches"
            )

        # A DataLoader of PyTorch says the size of its batches before the first one is read, and whether the last one
        # may be short. Found out by reading, that would end a run at the end of its first epoch.
        loader: Any = self.source
        size, drop_last = getattr(loader, "batch_size", 0), getattr(loader, "drop_last", None)
        if not self.batched or not checks.is_int(size) or not isinstance(drop_last, bool):
            return
        num_processes, name = processes.count(), type(loader).__name__
        share = batch_size // num_processes
        write = f"write {name}(..., batch_size={share}, drop_last=True)"
        if size != share:
            each = f", of which each of {num_processes} processes reads {share}" if num_processes > 1 else ""
            raise ValueError(
                f"{_CALLER}: the {name} makes batches of {size}, but batch_size is {batch_size}{each}; {write}, or "
                f"give batch_size={size * num_processes} here"
            )
        if self.steps_per_epoch is None and not drop_last:  # its last batch is read
            # A sampler may draw a part of the data set, so its length comes first.
            drawn_from: list[Any] = [getattr(loader, "sampler", None), getattr(loader, "dataset", None)]
            num_examples = next((len(examples) for examples in drawn_from if hasattr(examples, "__len__")), 0)
            if remainder := num_examples % size:
                raise ValueError(f"{_CALLER}: the last batch of the {name} would have {remainder} examples; {write}")

    def batches(
        self,
        batch_size: int,
        *,
        rng: jax.Array | int | None = None,
        epochs: int | None = 1,
        start: int = 0,
        devices: Sequence[Device] | None = None,
        sharding: NamedSharding | None = None,
        virtual_shards: int | None = None,
    ) -> Iterator[PyTree]:
        """Batches on the devices, in the order of the iterable. `rng` is not used.

        `start` skips batches. Earlier epochs are not read, unless `steps_per_epoch` is "all". The earlier batches of
        this epoch are read and dropped, unless `set_state` set a position within the epoch. An iterator cannot be
        rewound, so it skips nothing.
        """
        batch_size = checks.whole_number(batch_size, _CALLER, "batch_size")
        share = checks.even_share(batch_size, processes.count(), _CALLER, of="processes")  # which this process reads

        # The plan says where batches go. Which elements they have, the source says.
        if self.steps_per_epoch == "all":
            self.check(batch_size)
            examples, steps = batch_size, None  # an epoch has as many batches as there are
        else:
            examples = self.examples(batch_size)
            checks.whole_batch(examples, batch_size, _CALLER)
            steps = examples // batch_size
        placement = _batches.plan_batches(
            examples,
            batch_size,
            _CALLER,
            epochs=epochs,
            start=start,
            devices=devices,
            sharding=sharding,
            virtual_shards=virtual_shards,
        ).placement
        padding = placement.rows(batch_size) - batch_size
        if padding and processes.count() > 1:  # each reads an equal share of a batch, and a padding is at its end
            raise ValueError(
                f"{_CALLER}: {placement.num_shards} devices cannot share the {virtual_shards} virtual shards of the "
                "step evenly; use a number that divides these, or data.from_arrays"
            )
        sharding = _share_sharding(batch_size + padding, placement)

        first_lengths: dict[str, int] = {}  # of the arrays of the first batch
        for number, batch in enumerate(self._read_on(start, epochs, steps, share), start):
            # A batch of another size would be a program of its own, and in one of several processes a hang.
            lengths = _lengths(batch, share, number if steps is None else number % steps, first_lengths)
            if not first_lengths and len(set(lengths.values())) > 1:  # each array is cut by its own length
                for name, n in lengths.items():
                    num_shards = virtual_shards or placement.num_shards
                    checks.even_share(n * processes.count(), num_shards, f"{_CALLER}: {name}")
            first_lengths = first_lengths or lengths

            # (share, ...) in host memory to (batch_size + padding, ...) on the devices.
            if padding:
                batch = jax.tree.map(lambda x: pad_rows(x, placement.rows(len(x)) - len(x)), batch)
            batch = self.place(batch, sharding)
            yield batch if placement.virtual_shards is None else PaddedBatch(batch, placement.virtual_shards)

    def _read_on(self, start: int, epochs: int | None, steps: int | None, share: int) -> Iterator[PyTree]:
        """This process's host batches from batch `start` on, for epochs of so many steps, or of one pass each.

        A pass reads the source from its beginning to its end. It has at least as many batches as an epoch. What an
        epoch leaves of it comes in the next epoch. With `steps_per_epoch="all"`, `steps` is None, and a pass is an
        epoch.
        """
        # Where batch `start` is: the number of its pass, and how many batches of that pass come before it.
        state, self._reading.resume_from = self._reading.resume_from, None
        state = state if state and state["batches"] == start else None
        length = None if self.is_read_once else length_of(self.source)
        total = length if length is None or self.batched else length // share  # batches of a pass, by its length
        period = 0 if steps is None else max(steps, total or 0)
        if state and "pass" in state:
            pass_number, num_skipped = state["pass"], state["before"]
        elif steps is None:
            pass_number, num_skipped = 0, start  # how long earlier passes are is known by reading them
        else:
            pass_number, num_skipped = divmod(start, period)

        end = None if steps is None or epochs is None else epochs * steps
        num_given = start  # batches of all epochs, those before `start` too
        while num_given != end and (steps is not None or epochs is None or pass_number < epochs):
            # 1. A pass begins, behind the batches that came before `start`. An iterator that is set to its place reads
            #    nothing twice. Nor does one that is read once: the run before left it there. Others read and drop them.
            elements: Any = iter(self._epoch(pass_number))
            batches = self._host_batches(elements, share)
            has_place = state is not None and not state.keys().isdisjoint(("json", "bytes"))
            if state and num_skipped and has_place and hasattr(elements, "set_state"):
                _set_state(elements, state)
                num_read = num_skipped
            elif self.is_read_once:
                num_read = num_skipped
            else:
                num_read = sum(1 for _ in itertools.islice(batches, num_skipped))
            state = None

            batch = next(batches, None)
            while batch is not None:
                num_read += 1  # batches of this pass
                num_given += 1
                place: dict[str, Any] = {"batches": num_given, "pass": pass_number, "before": num_read}
                iterator = elements  # `get_state` asks it for its state, when that is wanted

                # 2. Is it the last batch of its pass? Then a run that stops behind it goes on with the next pass. Only
                #    reading the next batch tells, so that is done where the pass may end here. It moves the iterator,
                #    whose state is therefore asked for now.
                if steps is None:
                    may_end = True
                elif self.steps_per_epoch is None:
                    may_end = num_read == total
                else:
                    may_end = num_given % steps == 0 and num_given != end and not self.is_read_once
                following, error = None, None
                if may_end:
                    place, iterator = place | _state_of(elements), None
                    try:
                        following = next(batches, None)
                    except Exception as raised:
                        error = raised
                    if following is not None and self.steps_per_epoch is None:
                        error = ValueError(
                            f"{_CALLER}: {_describe(self.source)} of length {length} has more batches in epoch "
                            f"{pass_number}; mend its length, or give steps_per_epoch="
                        )
                    if following is None and error is None and steps is None and num_read < (total or 0):
                        error = _end_error(self.source, pass_number, num_read, total)
                is_last = may_end and following is None and error is None
                if is_last:
                    place = {"batches": num_given, "pass": pass_number + 1, "before": 0}

                # 3. The place is written before the batch is given: the checkpoint of the step that trains on it says
                #    where to go on. An error of what comes next is raised behind that step.
                self._reading.place, self._reading.iterator = place, iterator
                self._reading.period, self._reading.is_last = period, is_last
                yield batch
                if num_given == end:
                    return
                if error is not None:
                    raise error
                batch = following if may_end else next(batches, None)

            # 4. The pass is over. What is read once, or has fewer batches than an epoch, cannot go on. Others begin
            #    again.
            if self.is_read_once:
                raise _end_error(self.source, num_given // (steps or 1), num_given % (steps or 1), steps)
            if num_read < (steps or 1):
                raise _end_error(self.source, pass_number, num_read, steps)
            pass_number, num_skipped = pass_number + 1, max(0, num_skipped - num_read)

    def get_state(self) -> dict[str, Any] | None:
        """The position after the last batch, as JSON.

        None if the number of the batch says it, and the iterator has no `get_state` and `set_state`.
        """
        place, period = self._reading.place, self._reading.period
        if place is None:  # nothing is read yet, but an iterator need not be at its beginning
            state = _state_of(self.source) if self.is_read_once else {}
            return {"batches": 0} | state if state else None
        is_usual = period and (place["pass"], place["before"]) == divmod(place["batches"], period)
        if is_usual or self.is_read_once:
            place = {name: value for name, value in place.items() if name not in ("pass", "before")}
        place = place | _state_of(self._reading.iterator)
        return place if len(place) > 1 else None

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position from `get_state`.

        An iterator moves at once. Other sources move at the next call of `batches`.
        """
        if self.is_read_once:
            _set_state(self.source, state)
        else:
            self._reading.resume_from = state

    def batch_shapes(self, batch_size: int, like: PyTree | None = None) -> PyTree:
        """The shapes and dtypes of a device batch.

        `like` is a host batch, by default `first_batch()`. None if there is no host batch.
        """
        like = self.first_batch() if like is None else like
        return None if like is None else _batches.batch_struct(like, batch_size, self.dtype)

    def first_batch(self) -> PyTree | None:
        """The first batch of a list of batches. None for other sources, which are not read ahead."""
        if not self.batched or not isinstance(self.source, (list, tuple)) or not self.source:
            return None
        return as_dict(self.source[0], self.names, _CALLER)

    def place(self, batch: PyTree, sharding: NamedSharding | None) -> PyTree:
        """Send a host batch to the devices. Each process gives its own share."""
        return _batches.placed_batch(batch, sharding, self.dtype, is_global=False)

    def every_batch(self, share: int) -> Iterator[PyTree]:
        """This process's host batches of epoch 0, including a smaller last one. `ValueError` unless that is all of it.

        Args:
            share: examples in a batch, if elements are examples. Batches of the source keep their length.
        """
        most = self.steps_per_epoch if isinstance(self.steps_per_epoch, int) else None
        length, unit = length_of(self.source), "batches" if self.batched else "examples"
        if most is not None and length is not None and length > (most if self.batched else most * share):
            raise ValueError(
                f"{_CALLER}: {_describe(self.source)} has {length} {unit}, and steps_per_epoch={most} leaves out some; "
                "leave it out to evaluate all, or give a part of the data"
            )
        batches = self._host_batches(iter(self._epoch(0)), share, drop_remainder=False)
        num_batches = num_examples = 0
        for batch in itertools.islice(batches, most):  # without a length it may be endless
            num_batches += 1
            num_examples += 0 if self.batched else checks.batch_length(batch, _CALLER)
            yield batch
        if num_batches < (most or 0):
            raise _end_error(self.source, 0, num_batches, most)
        num_read = num_batches if self.batched else num_examples
        if most is None and length is not None and num_read < length:
            raise ValueError(
                f"{_CALLER}: {_describe(self.source)} of length {length} ended after {num_read} {unit}; look for an "
                "error in it, such as an IndexError, or mend its length"
            )

    def split(
        self, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True
    ) -> tuple[IterableSource, IterableSource]:
        """`data.split(source, fraction, rng, shuffle=shuffle)`. Batches stay whole."""
        if not (hasattr(self.source, "__len__") and hasattr(self.source, "__getitem__")):
            raise TypeError(
                f"data.split: {_describe(self.source)} cannot be indexed; split what it reads, or give a list"
            )
        if self.steps_per_epoch is not None:  # a part has fewer, and would end in the middle of an epoch
            raise ValueError("data.split: leave out steps_per_epoch=, because the length of each part is known")
        rows_of_both = _batches.split_rows(len(self.source), fraction, rng, shuffle, "data.split")
        # A list stays a list, since the shapes of a list of batches are known before it is read.
        is_list = isinstance(self.source, (list, tuple))
        first, second = (
            [self.source[i] for i in rows] if is_list else _Subset(self.source, rows.tolist()) for rows in rows_of_both
        )
        return dataclasses.replace(self, source=first), dataclasses.replace(self, source=second)

    @property
    def is_read_once(self) -> bool:
        """Whether the source can be read only once."""
        return isinstance(self.source, Iterator)

    def _epoch(self, epoch: int) -> Iterable[Any]:
        if not _is_function(self.source):
            return self.source
        elements = self.source(epoch) if takes(self.source, 1) else self.source()
        if isinstance(elements, Mapping) or not (hasattr(elements, "__iter__") or hasattr(elements, "__getitem__")):
            raise TypeError(
                f"{_CALLER}: {_describe(self.source)} should return the batches of epoch {epoch}, got "
                f"{checks.describe(elements)}; cut it into batches there, as docs/data.md does for a curriculum"
            )
        return elements

    def _host_batches(self, elements: Iterator[Any], share: int, *, drop_remainder: bool = True) -> Iterator[PyTree]:
        """This process's batches as pytrees of arrays.

        `drop_remainder`: drop a last one of fewer examples than its share. Batches of the source are all given.
        """
        # Arrays of NumPy are copied as they come: the source may write what comes next into the same memory.
        if self.batched:

            def copied(path: KeyPath, leaf: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
                name = f"data.batches: {path_name(path)}"
                return leaf if isinstance(leaf, jax.Array) else host.own_copy(leaf, name)

            for element in elements:
                yield jax.tree_util.tree_map_with_path(copied, as_dict(element, self.names, _CALLER))
            return

        def own(leaf: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
            return leaf if isinstance(leaf, jax.Array) else np.array(leaf)

        while examples := [
            jax.tree.map(own, as_dict(element, self.names, _CALLER)) for element in itertools.islice(elements, share)
        ]:
            if len(examples) < share and drop_remainder:
                return  # as `DataLoader(drop_last=True)`: a batch of another size would be another program
            yield join(examples, _CALLER)


def from_iterable(
    source: Any,
    *,
    steps_per_epoch: int | Literal["all"] | None = None,
    batched: bool = True,
    names: Sequence[str] = ("image", "label"),
    dtype: DTypeLike | None = jnp.float32,
) -> IterableSource:
    """Make training data from an iterable of another library.

    The iterable may be a PyTorch DataLoader, a Grain or Hugging Face data set, a list, or a generator.

    Args:
        source: an iterable that each epoch iterates over again; or a function that returns an iterable, called as
            `source(epoch)` or `source()`; or an iterator, which is read once, epoch after epoch.
        steps_per_epoch: batches in an epoch. None: `len(source)`. If the source has more, the next epoch begins with
            the others. "all": an epoch ends where the source does, and epochs may differ in length.
        batched: True: an element is a batch, with n examples along the first axis of each array. False: an element is
            one example, and `batch_size` examples are stacked. A last, incomplete batch is dropped.
        names: the keys of the dict that replaces a tuple or list element. Any other pytree stays as it is. Leaves may
            be NumPy or JAX arrays, PyTorch tensors, Pillow images, or numbers.
        dtype: the dtype of the array named "image", as in `data.batches`: uint8 is divided by 255 on the device. None
            leaves images unchanged.

    Returns:
        A `Source` for `train.fit`. `source.batches(batch_size, devices=devices)` yields batches on the devices. With
        several processes, each process reads its own share of a batch, `batch_size / processes` examples. With
        `virtual_shards=V` and several processes, the number of devices must divide V.

    Raises:
        ValueError: at reading: a batch has another size, or the source has fewer batches than an epoch. An evaluation
            also refuses a `steps_per_epoch` below the length of the source.
        TypeError: at reading: a leaf is not numeric, such as text, or the length is unknown.

    Resuming:
        A run that resumes in the middle of an epoch reads the first batches of that epoch and drops them. The resumed
        run sees the same batches if each epoch yields the same batches again. A function of the epoch can ensure that:
        it seeds its shuffle with the epoch. An iterator is not rewound: the run continues with its next batch. If the
        iterator has `get_state` and `set_state`, as those of Grain, `fit` saves its state in each checkpoint and
        restores it.

    Example:
        >>> import numpy as np
        >>> loader = [(np.full((4, 2), i, np.uint8), np.arange(4)) for i in range(3)]
        >>> [batch["label"].shape for batch in from_iterable(loader).batches(4)]
        [(4,), (4,), (4,)]
        >>> rows = ({"x": float(i)} for i in range(10))
        >>> [batch["x"].tolist() for batch in from_iterable(rows, batched=False, steps_per_epoch=2).batches(3)]
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    # Python can iterate over each of these, and would give letters, names or rows in place of batches.
    if isinstance(source, (str, bytes)):
        raise TypeError(f"{_CALLER}: {source!r} is a name, not data; write data.load({source!r})")
    is_tuple_of_arrays = type(source) is tuple and all(hasattr(array, "dtype") for array in source)
    if isinstance(source, dict) or hasattr(source, "dtype") or is_tuple_of_arrays:
        kind = f"a tuple of {len(source)}" if isinstance(source, tuple) else f"{_describe(source)} of"
        raise TypeError(
            f"{_CALLER}: {kind} arrays is data, not a loader; use data.Dataset(images, labels) or "
            'data.from_arrays({"name": array})'
        )
    if not _is_function(source) and not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
        raise TypeError(
            f"{_CALLER}: expected an iterable, or a function of the epoch that returns one; got {_describe(source)}"
        )
    if isinstance(steps_per_epoch, str):
        checks.choice(steps_per_epoch, _CALLER, "steps_per_epoch", ("all",))
        if isinstance(source, Iterator):
            raise ValueError(f'{_CALLER}: steps_per_epoch="all" reads the data once in each epoch, and {READ_ONCE}')
    elif steps_per_epoch is not None:
        checks.whole_number(steps_per_epoch, _CALLER, "steps_per_epoch")
    return IterableSource(source, steps_per_epoch, batched, tuple(names), dtype)


def _set_state(iterator: Any, state: dict[str, Any]) -> None:
    iterator.set_state(state["bytes"].encode() if "bytes" in state else json.loads(state["json"]))


def _is_function(source: object) -> bool:
    return callable(source) and not isinstance(source, Iterable) and not hasattr(source, "__getitem__")


def length_of(source: Any) -> int | None:
    """The length of a source. None if it has none, or says so by a `TypeError`, as PyTorch's iterable data sets do."""
    try:
        return len(source)
    except TypeError:
        return None


def _state_of(iterator: Any) -> dict[str, str]:
    """The state of an iterator, as JSON. Empty if it cannot be set to it."""
    if not hasattr(iterator, "get_state") or not hasattr(iterator, "set_state"):
        return {}
    state = iterator.get_state()  # Grain's: bytes, which are JSON, or a dict
    return {"bytes": state.decode()} if isinstance(state, bytes) else {"json": json.dumps(state)}


def _lengths(batch: PyTree, share: int, at: int, first: dict[str, int]) -> dict[str, int]:
    """The lengths of the arrays of a batch, by name.

    `ValueError` unless the longest has this process's `share` of the examples, and all are as long as in the first.
    """
    shapes = {path_name(path): np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)}
    lengths = {name: shape[0] for name, shape in shapes.items() if shape}
    if lengths.keys() == shapes.keys() and max(lengths.values(), default=0) == share and lengths == (first or lengths):
        return lengths
    if first and shapes.keys() != first.keys():
        raise ValueError(
            f"{_CALLER}: batch {at} of the epoch has {', '.join(sorted(shapes))}, but the first batch has "
            f"{', '.join(sorted(first))}; give all batches the same arrays"
        )
    if len({*first.values()}) > 1:
        expected = f"{', '.join(f'{name} of {n} rows' for name, n in first.items())}, as the first batch"
        hint = "give all batches the same lengths"
    elif not first and len({*lengths.values()}) > 1:
        expected = f"{share} examples in its longest array"
        hint = "give batch_size= the length of the longest array, and each array a first axis"
    else:
        expected = f"{share} examples in each array, as batch_size= says (32 without it)"
        hint = (
            "give batch_size= their size, or drop an incomplete last one (drop_last=True); if an element is one "
            "example, give batched=False"
        )
    got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    raise ValueError(f"{_CALLER}: batch {at} of the epoch should have {expected}, got {got}; {hint}")


def _end_error(source: object, epoch: int, num_read: int, steps: int | None) -> ValueError:
    """The error for an epoch that ends early."""
    if steps is None:
        return ValueError(f"{_CALLER}: {_describe(source)} has no batch in epoch {epoch}")
    advice = READ_ONCE if isinstance(source, Iterator) else "give the right steps_per_epoch="
    return ValueError(
        f"{_CALLER}: {_describe(source)} ended after {num_read} of the {steps} batches of epoch {epoch}; {advice}"
    )


def _describe(source: object) -> str:
    name = getattr(source, "__name__", None)
    return f"the function {name}" if name and _is_function(source) else f"a {type(source).__name__}"


@dataclasses.dataclass(frozen=True)
class _Subset:
    """The elements of a sequence at some places, in the order of these. They are read when they are asked for."""

    elements: Any
    places: list[int]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> Any:
        return self.elements[self.places[i]]

    def __iter__(self) -> Iterator[Any]:  # without it, an IndexError of an element would end the epoch silently
        return map(self.elements.__getitem__, self.places)


def _share_sharding(rows: int, placement: _batches.Placement) -> NamedSharding | None:
    """The sharding of a batch whose rows are shared equally by the processes. None: the default device."""
    if placement.sharding is None:
        return None
    checks.even_share(rows, placement.num_shards, _CALLER)
    indices = placement.sharding.addressable_devices_indices_map((rows,)).values()
    local_rows = {index[0].indices(rows)[:2] for index in indices if index}  # several devices may have the same
    if sum(stop - start for start, stop in local_rows) * processes.count() == rows:
        return placement.sharding
    # It gives one row to several processes. So the batch is split over all devices, and a step sends the rows on.
    mesh: Any = placement.sharding.mesh
    checks.even_share(rows, mesh.size, _CALLER)
    return split_over(tuple(mesh.devices.flat))
