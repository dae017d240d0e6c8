"""Which examples come when: the order of an epoch, the batches of a run, the two parts of a split."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core import checks
from .._core.arrays import is_prng_key
from .._devices.user_mesh import on_own_mesh, outside_mesh

Order = Callable[[int], Any]  # of an epoch: int32 (examples,), in host memory or on the default device


@on_own_mesh
def order_of(rng: Any, size: int) -> Order:
    """The order of each epoch: `permutation(fold_in(rng, epoch), size)`, or the stored one if there is no key."""
    if rng is None:
        stored = np.arange(size, dtype=np.int32)
        return lambda epoch: stored
    return _each_epoch(rng, _permutation, size)


@on_own_mesh
def draws_of(rng: Any, size: int, count: int) -> Order:
    """`count` numbers for each example, in each epoch others: float32 (size, count) from 0 and below 1."""
    return _each_epoch(rng, _uniform, (size, count))


def _each_epoch(rng: Any, program: Callable[[Any, str | None], Callable[..., jax.Array]], size: Any) -> Order:
    if not isinstance(rng, jax.Array | np.ndarray):
        raise TypeError(f"rng must be a random key, such as jax.random.key(0); got {type(rng).__name__}")
    checks.random_key(rng, "data.batches")
    # The key goes through host memory, since it may be on other devices than the default one.
    impl = str(jax.random.key_impl(rng)) if is_prng_key(rng) else None
    words = np.asarray(rng if impl is None else jax.random.key_data(rng))
    return lambda epoch: program(size, impl)(words, np.uint32(epoch))


@functools.lru_cache(maxsize=32)
def _permutation(size: int, impl: str | None) -> Callable[..., jax.Array]:
    def draw(words: jax.Array, epoch: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(jax.random.wrap_key_data(words, impl=impl), epoch)
        return jax.random.permutation(rng, size).astype(np.int32)

    return jax.jit(draw)


@functools.lru_cache(maxsize=32)
def _uniform(shape: tuple[int, int], impl: str | None) -> Callable[..., jax.Array]:
    def draw(words: jax.Array, epoch: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(jax.random.wrap_key_data(words, impl=impl), 0xD4A35)  # not the key of an order
        return jax.random.uniform(jax.random.fold_in(rng, epoch), shape, np.float32)

    return jax.jit(draw)


class Run(NamedTuple):
    """Batches of one epoch and one size, one after another."""

    epoch: int
    first: int  # position of the first example in the order of the epoch
    batch_size: int
    number: int  # of batches


def runs(size: int, batch_size: int, epochs: int | None, start: int, drop_remainder: bool = True) -> Iterator[Run]:
    """All batches from batch `start` on. None epochs: without an end."""
    whole, rest = divmod(size, batch_size)
    steps = whole if drop_remainder or not rest else whole + 1
    for epoch, skipped in epochs_from(start, steps, epochs):
        if skipped < whole:
            yield Run(epoch, skipped * batch_size, batch_size, whole - skipped)
        if whole < steps:
            yield Run(epoch, whole * batch_size, rest, 1)


def epochs_from(start: int, steps: int, epochs: int | None) -> Iterator[tuple[int, int]]:
    """Each epoch from the one of batch `start` on, with how many of its `steps` batches to skip."""
    first, skipped = divmod(start, steps)
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        yield epoch, skipped if epoch == first else 0


def rows_of_parts(size: int, fraction: Any, rng: Any, shuffle: bool, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the two parts, in ascending order. Options and errors are as in `data.split`."""
    if checks.is_int(fraction):
        count = int(fraction)
    else:
        count = round(size * checks.number(fraction, where, "fraction", "a number", lambda x: math.isfinite(size * x)))
    if not 0 < count < size:
        raise ValueError(
            f"{where}: {fraction} of {size} examples leaves one of the two parts empty; give a fraction between 0 and "
            f"1, or a number of examples from 1 to {size - 1}"
        )
    if not shuffle:
        if rng is not None:
            raise ValueError(f"{where}: shuffle=False uses no rng; leave out one of them")
        return np.arange(count), np.arange(count, size)
    with outside_mesh():
        if rng is None or checks.is_int(rng):
            rng = jax.random.key(int(rng or 0))
        if not isinstance(rng, jax.Array):
            raise TypeError(f"{where}: rng must be a random key or an int, got {checks.describe(rng)}")
        order = np.asarray(order_of(rng, size)(0))
    return np.sort(order[:count]), np.sort(order[count:])


class Subset:
    """The elements of a sequence at some places, in the order of these."""

    def __init__(self, elements: Any, places: np.ndarray):
        self._elements, self._places = elements, places.tolist()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int) -> Any:
        return self._elements[self._places[i]]

    def __iter__(self) -> Iterator[Any]:
        return map(self._elements.__getitem__, self._places)
