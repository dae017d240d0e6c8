"""Several data sets in one batch, each read at its own pace: `combine`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding

from .._core import checks
from .._core.arrays import Device, PyTree
from .._core.transfers import allows_transfers
from .._devices.collectives import PaddedBatch
from .._devices.user_mesh import outside_mesh
from ._iterable import IterableSource
from ._sources import Dataset, Source, batch_options, own_batch_size, source_of

_CALLER = "data.combine"


class CombinedSource:
    """Several sources, of which a batch has one batch each. `combine` makes it.

    Attributes:
        sources: by name, or in their order.
        batch_sizes: for each of them; None: the `batch_size` of the run.
        until: "longest" or "shortest".
    """

    def __init__(
        self,
        sources: dict[Any, Source],
        batch_sizes: dict[Any, int | None],
        until: Literal["longest", "shortest"],
        is_tuple: bool,
    ):
        self.sources: dict[Any, Source] = sources
        self.batch_sizes: dict[Any, int | None] = batch_sizes
        self.until: Literal["longest", "shortest"] = until
        self._is_tuple = is_tuple

    def _sizes(self, batch_size: int) -> dict[Any, int]:
        """The batch size of each source. `ValueError` unless `batch_size` is the largest."""
        sizes = {name: size or batch_size for name, size in self.batch_sizes.items()}
        if max(sizes.values()) != batch_size:
            raise ValueError(
                f"{_CALLER}: batch_size is {batch_size}, but the batches have {sizes}; give the largest of them"
            )
        return sizes

    def usual_batch_size(self) -> int:
        """The largest size that is known, otherwise 32."""
        return max((size for size in self.batch_sizes.values() if size), default=32)

    def examples(self, batch_size: int) -> int:
        """`batch_size` for each batch of an epoch, which ends with the longest or the shortest source."""
        sizes, steps = self._sizes(batch_size), dict[Any, int]()
        for name, source in self.sources.items():
            examples = source.examples(sizes[name])
            checks.whole_batch(examples, sizes[name], f"{_CALLER}: {name!r}")
            steps[name] = examples // sizes[name]
        return batch_size * (max if self.until == "longest" else min)(steps.values())

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
        """Batches on the devices, with those of all sources. Options are those of `data.batches`.

        Batch k has batch k of each source, which goes through its own epochs without an end. So a run that resumes at
        `start=k` sees the same batches.
        """
        batch_size = checks.whole_number(batch_size, _CALLER, "batch_size")
        start = checks.whole_number(start, _CALLER, "start", least=0)
        sizes, steps = self._sizes(batch_size), self.examples(batch_size) // batch_size
        streams = list[Iterator[PyTree]]()
        for number, (name, source) in enumerate(self.sources.items()):
            with outside_mesh():
                # With one key, two data sets of one length would have one order: example i always beside example i.
                own_rng = None if rng is None else jax.random.fold_in(checks.random_key(rng, _CALLER), number)
            options = batch_options(source, devices, sharding, virtual_shards)
            streams.append(iter(source.batches(sizes[name], rng=own_rng, epochs=None, start=start, **options)))
        end = None
        if epochs is not None:
            end = max(0, checks.whole_number(epochs, _CALLER, "epochs", least=0) * steps - start)
        for several in itertools.islice(zip(*streams, strict=True), end):
            arrays = [batch.arrays if isinstance(batch, PaddedBatch) else batch for batch in several]
            combined = tuple(arrays) if self._is_tuple else dict(zip(self.sources, arrays, strict=True))
            if virtual_shards is not None and isinstance(several[0], PaddedBatch):
                yield PaddedBatch(combined, virtual_shards)
            else:
                yield combined

    def batch_shapes(self, batch_size: int) -> PyTree:
        """The shapes and dtypes of a device batch. None if those of a source are not known before it is read."""
        sizes, shapes = self._sizes(batch_size), dict[Any, PyTree]()
        for name, source in self.sources.items():
            shapes[name] = getattr(source, "batch_shapes", lambda batch_size: None)(sizes[name])
        if any(each is None for each in shapes.values()):
            return None
        return tuple(shapes.values()) if self._is_tuple else shapes

    @property
    def is_read_once(self) -> bool:
        """Whether one of the sources can be read only once."""
        return any(getattr(source, "is_read_once", False) for source in self.sources.values())

    def get_state(self) -> list[Any] | None:
        """The positions in the sources, as JSON. None where the number of the batch says them, or nothing does."""
        states: list[Any] = []
        for source in self._list:
            states.append(source.get_state() if hasattr(source, "get_state") else None)
            if states[-1] is None and getattr(source, "is_read_once", False):
                return None  # nothing says where this one is
        return None if all(state is None for state in states) else states

    def set_state(self, state: list[Any]) -> None:
        """Continue at positions from `get_state`."""
        for source, own_state in zip(self._list, state, strict=True):
            if own_state is not None:
                source.set_state(own_state)

    @property
    def _list(self) -> list[Any]:  # a user's source may have more methods than a `Source`
        return list(self.sources.values())

    def __repr__(self) -> str:
        return f"CombinedSource({', '.join(f'{name}: {source}' for name, source in self.sources.items())})"


@allows_transfers
def combine(
    several: Mapping[str, Any] | Sequence[Any],
    *,
    batch_sizes: Mapping[str, int | None] | Sequence[int | None] | None = None,
    until: Literal["longest", "shortest"] = "longest",
) -> CombinedSource:
    """Make training data of several data sets, with a batch of each in a batch.

    Each data set is shuffled and read at its own pace: when it ends, it begins again in a new order, also within an
    epoch of the run, and the next epoch goes on where it is. So no example comes twice before all others of its data
    set came.

    Args:
        several: a dict or a tuple of what `train.fit` takes: arrays, `Dataset`s, loaders. `loss_fn` gets a dict or a
            tuple of batches.
        batch_sizes: the size of each one's batch, by the same names or in the same order. None: `batch_size` of `fit`,
            or the size of a loader. The largest is the `batch_size` of the run.
        until: the data set whose end is the end of an epoch, "longest" or "shortest".

    Returns:
        A `Source` for `train.fit`. Examples per second count the largest batch alone.

    Raises:
        ValueError: there is no data; names differ; a source has `steps_per_epoch="all"`.

    >>> import numpy as np
    >>> data = combine({"a": {"x": np.arange(6)}, "b": {"y": np.arange(4)}})
    >>> for batch in data.batches(2):
    ...     print(batch["a"]["x"], batch["b"]["y"])
    [0 1] [0 1]
    [2 3] [2 3]
    [4 5] [0 1]
    """
    is_tuple = not isinstance(several, Mapping)
    # By sorted names, as the leaves of a dict in JAX: the order in which it was written changes no random key.
    members: dict[Any, Any] = dict(enumerate(several)) if is_tuple else {key: several[key] for key in sorted(several)}
    if not members:
        raise ValueError(f"{_CALLER}: expected several data sets, got none")
    checks.choice(until, _CALLER, "until", ("longest", "shortest"))
    asked: dict[Any, int | None] = {}
    if batch_sizes is not None:
        asked = dict(batch_sizes) if isinstance(batch_sizes, Mapping) else dict(enumerate(batch_sizes))
        if asked.keys() != members.keys():
            raise ValueError(f"{_CALLER}: batch_sizes has {list(asked)}, but the data are {list(members)}")
    sources, sizes = dict[Any, Source](), dict[Any, int | None]()
    for name, data in members.items():
        source = sources[name] = as_source(data)
        if any(isinstance(each, IterableSource) and each.steps_per_epoch == "all" for each in sources_of(source)):
            raise ValueError(f'{_CALLER}: {name!r} has steps_per_epoch="all"; give the number of its batches')
        size = asked.get(name)
        sizes[name] = own_batch_size(source) if size is None else checks.whole_number(size, _CALLER, "batch_sizes")
    return CombinedSource(sources, sizes, until, is_tuple)


def as_source(given: Any) -> Source:
    """Convert data to a `Source`.

    A `Source` is returned unchanged. A `Dataset` becomes a `DatasetSource`. `from_arrays` takes an array, a dict or a
    tuple of arrays, a DataFrame of pandas or polars, and a list of dicts with one example each. `combine` takes a dict
    or a tuple of data sets and loaders. `from_iterable` takes all other data.

    >>> import numpy as np
    >>> from jaxpar.data import Dataset
    >>> as_source(Dataset(np.zeros((6, 2)), np.arange(6))).examples(batch_size=2)
    6
    """

    def is_data(member: object) -> bool:
        """Whether it is a data set or a loader, and no array or batch."""
        if isinstance(member, (Dataset, Source)):
            return True
        is_array = hasattr(member, "dtype") or hasattr(member, "columns")
        is_batch = isinstance(member, (Mapping, list, tuple, str, bytes))
        return isinstance(member, Iterable) and not is_array and not is_batch

    members = list(given.values()) if isinstance(given, Mapping) else given
    is_plain = isinstance(members, (list, tuple)) and not hasattr(members, "_fields")  # a named tuple is a batch
    return combine(given) if is_plain and members and all(map(is_data, members)) else source_of(given)


def sources_of(source: Source) -> list[Source]:
    """The source, or those that it combines."""
    if not isinstance(source, CombinedSource):
        return [source]
    return [each for member in source.sources.values() for each in sources_of(member)]
