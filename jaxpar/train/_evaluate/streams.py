"""A pass over batches that something gives one by one, in one process or in several."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ... import data
from ..._core import checks
from ..._devices import processes
from ..._devices.placement import spans_processes
from ..._devices.user_mesh import without_types
from .every_example import IsExact, Piece, Places, fill


@dataclasses.dataclass(frozen=True)
class Stream:
    """A pass over the batches of an `IterableSource`.

    The first batch, rounded up to a multiple of the number of devices, is the size of all. Smaller batches are filled
    up to it. In several processes each one reads its own share of a batch. Where a batch must not be filled up, the
    processes send each other the examples of the last ones.

    Attributes:
        where: the function that asks, for messages.
        source: the batches.
        batch_size: of examples, where the source gives single ones. Over all processes.
        places: where batches go.
        user: the user's mesh, in which the source is read.
    """

    where: str
    source: data.IterableSource
    batch_size: int
    places: Places
    user: Mesh | None

    def shapes(self) -> Any:
        """None, since nothing is read before the pass, except of a list."""
        first = self.source.first_batch() if processes.count() == 1 else None
        if first is None:
            return None
        return self.source.batch_shapes(self.places.round_up(checks.batch_length(first, self.where)), first)

    def pieces(self, is_exact: IsExact) -> Iterator[Piece]:
        """Every example, in order. With several processes the batches of all of them side by side."""
        if processes.count() > 1:
            yield from self._of_processes(is_exact)
            return
        size = 0
        for batch in self._batches():
            n = checks.batch_length(batch, self.where)
            size = size or self.places.round_up(n)
            rows = max(size, self.places.round_up(n))
            exact = is_exact(self.source.batch_shapes(rows, batch))
            yield from self.places.pieces(self.source, batch, n, rows, exact)
        if not size:
            raise ValueError(f"{self.where}: expected examples, got no batch; {self._hint()}")

    def _of_processes(self, is_exact: IsExact) -> Iterator[Piece]:
        """The same where each process reads its own batches. All agree on the sizes before a program is started."""
        mine = self._local_devices()
        batches, rows, last = self._batches(), 0, None
        while True:
            batch = self._next(batches)
            sizes = self._sizes(batch)
            if not any(sizes):
                break
            if not all(sizes) and not rows:
                raise processes.in_all(
                    ValueError(f"{self.where}: each process must have batches; they have {sizes} examples")
                )
            last = batch if batch is not None else last
            own = sizes[jax.process_index()]
            rows = max(rows, *(-(-n // count) for n, count in zip(sizes, mine, strict=True)))  # on each device
            share = rows * mine[jax.process_index()]
            exact = is_exact(self.source.batch_shapes(rows * self.places.count, last))
            if exact and any(n != rows * count for n, count in zip(sizes, mine, strict=True)):
                yield from self._as_they_are(last, sizes, rows * self.places.count)
                continue
            base = last if own else jax.tree.map(lambda x: x[:1], last)
            filled = self.source.place(fill(base, share - max(own, 1)), self.places.split)
            mask = self.source.place(np.arange(share) < own, self.places.split)
            yield Piece(filled, mask, sum(sizes))
        if not rows:
            raise processes.in_all(ValueError(f"{self.where}: expected examples, got no batch; {self._hint()}"))

    def _as_they_are(self, batch: Any, sizes: list[int], rows: int) -> Iterator[Piece]:
        """The examples of all processes, of which each process gets all. What fills up a batch would be counted.

        Args:
            batch: of this process, of which it gives as many examples as `sizes` says.
            rows: of a batch that is filled up.
        """
        whole = processes.gather_rows(batch, sizes)
        source = data.ArraySource(whole, self.source.dtype)
        yield from self.places.pieces(source, whole, sum(sizes), rows, exact=True)

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch of this process. None at the end. An error in one process is raised in all."""
        with processes.raise_together():
            return next(batches, None)

    def _sizes(self, batch: Any) -> list[int]:
        """How many examples each process has. `ValueError` where their batches are of different shapes."""
        n, shapes = 0, None
        with processes.raise_together():
            if batch is not None:
                if any(map(spans_processes, jax.tree.leaves(batch))):
                    raise ValueError(
                        f"{self.where}: a batch is on devices of several processes; each process gives its own share, "
                        "in host memory or on its own devices"
                    )
                n = checks.batch_length(batch, self.where)
                shapes = str(jax.tree.map(lambda x: f"{x.dtype}{list(np.shape(x)[1:])}", batch))
        found = [json.loads(text) for text in processes.exchange(json.dumps([n, shapes]))]
        if len({each for _, each in found if each}) > 1:
            raise processes.in_all(ValueError(f"{self.where}: the batches of the processes must be alike, got {found}"))
        return [n for n, _ in found]

    def _local_devices(self) -> list[int]:
        """How many of the devices each process has."""
        owners = [d.process_index for d in self.places.devices or ()]
        counts = [owners.count(i) for i in range(processes.count())]
        if not all(counts):
            raise ValueError(
                f"{self.where}: in several processes each one reads its own share of the batches, so the parameters "
                "must be on devices of all of them, as those of a TrainState are; give a data.Dataset or arrays"
            )
        return counts

    def _batches(self) -> Iterator[Any]:
        """This process's batches in host memory, read inside of the user's mesh. Empty ones are left out."""
        share = -(-self.batch_size // processes.count())
        batches = self.source.every_batch(share)
        while True:
            with contextlib.nullcontext() if self.user is None else jax.set_mesh(self.user):
                batch = next(batches, None)
            if batch is None:
                return
            batch = without_types(batch)
            if checks.batch_length(batch, self.where):
                yield batch

    def _hint(self) -> str:
        if self.source.is_read_once:
            return "an iterator is read only once: give what can be iterated over again, or a function that returns one"
        return "give at least one"
