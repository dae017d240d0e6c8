"""`fit` in an elastic run: who is left makes a failed step again, and new processes join between steps.

Process 0 leads. It evaluates, calls the callbacks, saves and shows. It keeps a copy of the state before each step. When
processes were lost or have come, all agree on the devices, process 0 sends what it has, and the step is made again.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax

from ... import data, distributed
from ..._core.text import say
from ..._devices import processes
from ..._devices.send import plan_send, to_host
from .._callbacks.callbacks import Callbacks
from .._callbacks.history import Record
from .._step.state import TrainState, place_state
from .._step.train_step import TrainStep
from .certificate import Certificate
from .elastic_group import Group, OrdersUsedUp, Terms
from .elastic_program import Program, describe, digest
from .loop import SHUFFLE, Loop
from .readings import Steps
from .run import Run, RunHistory
from .watchdog import Watchdog

_MORE_FOR_COMPILATION = 10  # times as long as another step may take the first one over new devices
_PROVEN = 3  # steps after which a process that came back counts as one that works
_SHARE_EVERY = 16  # steps after which process 0 says whether it was interrupted, as `interrupt.Signals` asks then


class Elastic:
    """The steps of this process in an elastic run.

    Args:
        run: the inputs of `fit`.
        seed: the random key of the state that `fit` was given.
    """

    def __init__(self, run: Run, seed: jax.Array):
        _check(run)
        self._seed = seed
        self.run, self.group, self.watchdog = run, Group(), Watchdog()
        self._step: TrainStep = run.step
        self._state: Any = None  # on the devices of the group
        self._host: Any = None  # the same before the step under way, in host memory
        self._is_new = True  # whether the next step is the first one over these devices
        self._batches: Iterator[Any] | None = None
        self._batch: Any = None  # of the step under way, whole in this process, in host memory
        self._made = 0  # steps of this process

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.group.is_first

    def join(self, state: TrainState, past: RunHistory) -> tuple[TrainState, RunHistory]:
        """The state and the history of process 0, in every process."""
        check_state(state)
        self._host = to_host(state)
        self.group.check_program(self._compile(state))
        offer = {"first": past.first, "at": int(state.step), "history": past.history, "under_way": past.under_way}
        found = self._agree(lambda: self._offer_batch({**offer, "stopped": past.stopped}))
        state = self.local(self._host)
        if self.group.is_first:
            return state, past
        return state, RunHistory(found["first"], found["history"], found["under_way"], found["stopped"])

    def calls(self, loop: Loop) -> Iterator[tuple[TrainState, Steps]]:
        """Make the steps of a loop, each until it has succeeded. The loop counts one before it asks for the next."""
        while True:
            if self.group.terms is None:
                self._agree(lambda: self._offer(loop))
            self._load(loop.at)
            made = self.group.run(loop.at, lambda: self._make(loop.at))
            self._say_change(loop.at)
            if made is None:
                continue
            self._batch = None
            self._made += 1
            if self._made == _PROVEN:
                distributed._report_working()
            self._state, metrics = made
            if self.leads:
                self._host = to_host(self._state)
            yield self._state, Steps(metrics)

    def watch(self, what: str, at: int) -> contextlib.AbstractContextManager[None]:
        """A block that only process 0 has between steps. Where it is stuck, the step and the stack are said."""
        return self.watchdog.watch(f"{what} after step {at}", ends=False)

    def local(self, state: TrainState) -> TrainState:
        """The state on the devices of this process, for what one process does by itself."""
        return place_state(to_host(state), tuple(jax.local_devices()))

    def decide(self, loop: Loop, record: Record | None, stopped: bool, signal: int | None) -> tuple[bool, int | None]:
        """Whether process 0 stops after this step, and the signal that asked for it."""
        if record is None and loop.at % _SHARE_EVERY:
            return stopped, signal
        answer = self.group.broadcast(str(loop.at), lambda: {"stop": stopped, "signal": signal, "record": record})
        if record is not None and not self.leads:
            record.clear()
            record.update(answer["record"])
        return stopped or answer["stop"], signal or answer["signal"]

    @contextlib.contextmanager
    def ended(self) -> Generator[None]:
        """A block after which the run is over."""
        self.watchdog.start()
        try:
            with processes.elastic_fit():
                yield
        finally:
            self.watchdog.stop()
        self.group.end()
        atexit.register(self.group.wait_for_others)

    def _load(self, at: int) -> None:
        """Read the batch of the next step, where a failed step has not left it."""
        if self._batch is not None:
            return
        with self.watchdog.watch(f"loads the batch of step {at + 1}"):
            self._batches = self._batches or self._batches_from(at, self._host.rng)
            self._batch = to_host(next(self._batches))

    def _batches_from(self, at: int, rng: jax.Array) -> Iterator[Any]:
        order = jax.random.fold_in(rng, SHUFFLE)
        return iter(self.run.source.batches(self.run.batch_size, rng=order, epochs=None, start=at))

    def _compile(self, state: TrainState) -> Program:
        """Compile what each device runs by itself: later the others would wait for the compiler in a collective.

        Returns:
            What is computed, in short.
        """
        batch = to_host(next(self._batches_from(0, self._seed)))
        texts = self.run.step.on(jax.local_devices()).compile_own(self.local(state), batch)
        return describe(self.run, self._seed, state, texts, batch)

    def _make(self, at: int) -> tuple[TrainState, Any]:
        times = _MORE_FOR_COMPILATION if self._is_new else 1
        with self.watchdog.watch(f"computes step {at + 1}", self.group.has_failed, times):
            made = jax.block_until_ready(self._step(self._state, self._batch))
        self._is_new = False
        return made

    def _agree(self, offer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Agree with all that live, and take the state of process 0. Return its offer."""

        def prepare(terms: Terms) -> Callable[[], Any]:
            return plan_send(self._host, terms.devices)

        def take(terms: Terms, send: Callable[[], Any]) -> dict[str, Any]:
            self._host = send()
            self._state = place_state(self._host, terms.devices)
            self._step = self.run.step.on(terms.devices)
            self._is_new = True
            self._load(terms.offer["at"])
            if digest(self._batch) != terms.offer["batch"]:
                self.group.refuse("the data: the batch under way")
            return terms.offer

        try:
            return self.group.agree(offer, prepare, take)
        except OrdersUsedUp as error:
            _restart(error)
            raise

    def _offer(self, loop: Loop) -> dict[str, Any]:
        """What process 0 says of the run under way."""
        saved = loop.to_save()
        under_way = {name: saved[name] for name in ("sums", "counted", "seconds") if name in saved}
        found = {"first": loop.first, "at": loop.at, "history": saved["history"], "under_way": under_way}
        return self._offer_batch({**found, "stopped": False})

    def _offer_batch(self, offer: dict[str, Any]) -> dict[str, Any]:
        """The offer with what the batch under way is."""
        self._load(offer["at"])
        return {**offer, "batch": digest(self._batch)}

    def _say_change(self, at: int) -> None:
        """Say in process 0 who was lost in a step, and who joins after it."""
        if self.leads and self.group.lost:
            say(f"process {_names(self.group.lost)} was lost in step {at + 1}; the others make it again")
        if self.leads and self.group.joined:
            say(f"process {_names(self.group.joined)} joins after step {at + 1}")


def plan_elastic(run: Run, state: TrainState) -> Run:
    """The run as this process makes it, from the state that `fit` was given."""
    if not distributed.is_elastic():
        return run
    run = dataclasses.replace(run, elastic=Elastic(run, state.rng))
    if jax.process_index() == 0:
        return run
    nothing = {"test_data": None, "apply_fn": None, "eval_data": None, "eval_fn": None}
    quiet = dataclasses.replace(run.evaluation, **nothing)
    alone = {"callbacks": Callbacks(), "certificate": Certificate(None, 1)}
    return dataclasses.replace(run, **alone, evaluation=quiet, progress=False, profile=None)


def _check(run: Run) -> None:
    """Raise what cannot go on after a loss, before any work."""
    if getattr(run.step, "virtual_shards", None) is None:
        raise ValueError(
            "fit: in an elastic run the number of devices changes, and with it bits and the shares of a batch; make "
            "the step by train.make_train_step(loss_fn, virtual_shards=8)"
        )
    if isinstance(run.source, data.IterableSource):
        raise ValueError(
            "fit: in an elastic run a failed step is made again from its number, and an iterable has no batch by "
            "number; give a data.Dataset or arrays"
        )


def check_state(state: TrainState) -> None:
    """`ValueError` for a state of which each process has a part of its own."""
    if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state)):
        raise ValueError(
            f"fit: a lost process takes its shares of a store of kind {state.store.kind!r} with it, so an elastic run "
            "takes values that are whole on each device; use kind 'device', or initialize without elastic=True, where "
            "a loss ends all processes and they resume from a checkpoint"
        )


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _restart(error: Exception) -> None:
    """End this process as after a loss without elastic, so that all start again from a checkpoint."""
    say(f"{error}. This process ends with status {distributed.LOST}, so that all start again from a checkpoint")
    sys.exit(distributed.LOST)
