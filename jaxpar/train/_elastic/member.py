"""The steps of an elastic run: the remaining processes repeat a failed step, and new ones join between steps.

Process 0 leads. It alone trains as `fit` always does: it evaluates, calls the callbacks, saves and shows. The others
follow: they make the same steps until it says that the run is over. Process 0 keeps a copy of the state before each
step. When processes were lost or have come, all agree on the devices, process 0 sends what it has, and the step is made
again.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from ... import data, distributed
from ..._core.arrays import PyTree, without_keys
from ..._core.process import daemon
from ..._core.text import say, say_before_exit
from ..._devices import mesh, processes
from ..._heartbeat.server import AwakeClock
from .._callbacks.history import History
from .._step.nonfinite import check_finite
from .._step.state import TrainState, place_state
from .._step.train_step import TrainStep
from .._step.virtual import VirtualProgram
from .group import Devices, Group, Offer, Word
from .program import Program, Run, describe, digest

STUCK_AFTER = 10.0  # seconds, or JAXPAR_STUCK_TIMEOUT
_EVERY = 0.5  # seconds between two looks
_MOST_LINES = 12  # of a stack
_MORE_FOR_COMPILATION = 10  # times as long as another step may take the first one over new devices: XLA compiles
_PROVEN = 3  # steps after which a process that came back counts as one that works
_BEGIN = "begin"  # the place of the word before the first step
_TELL_EVERY = 16  # steps after which process 0 says whether it was interrupted: `Interrupts` asks then

Made = tuple[TrainState, dict[str, jax.Array]]


# What the steps of an elastic run read of the loop around them, which is of a higher room, `_fit`.


class Clock(Protocol):
    """A `train._fit.clock.Clock`."""

    first: int
    step: int
    last: int


class Training(Protocol):
    """A `train._fit.loop.Training`."""

    @property
    def clock(self) -> Clock: ...
    @property
    def state(self) -> TrainState: ...
    @property
    def history(self) -> History: ...


class Signals(Protocol):
    """A `train._fit.interrupt.Interrupts`."""

    asked: int | None

    def __enter__(self) -> object: ...
    def __exit__(self, *error: Any) -> None: ...
    def should_stop(self, state: TrainState, step: int, epoch_over: bool) -> bool: ...


class Member:
    """The steps of this process in an elastic run. `ValueError` for a run that cannot go on after a loss."""

    def __init__(self, run: Run, state: TrainState):
        processes.check_first_fit()
        check_can_go_on(run, state)
        self._run, self._seed = run, state.rng
        self._group, self._watchdog = Group(), Watchdog()
        self.leads: bool = self._group.is_first
        self._step: TrainStep = run.step  # over the devices of the group
        self._state = state  # on the devices of the group, once they have agreed
        self._host = state  # the one before the step under way, in host memory: a step that fails has taken the other
        self._is_new = True  # whether the next step is the first one over these devices
        self._batches: Iterator[PyTree] | None = None
        self._batch: PyTree = None  # of the step under way, whole in this process, in host memory
        self.first: int = 0  # steps that were made when the run began
        self._at = self._last = 0  # steps that were made, and at the end of the run
        self._made = 0  # steps of this process
        self._history = History()

    @contextlib.contextmanager
    def lead(
        self, training: Training, signals: Signals
    ) -> Generator[Iterator[tuple[TrainState, dict[str, jax.Array], None]]]:
        """A block with the steps of process 0. After it the others know that the run is over.

        The run stopped by itself where the block ends without an exception.
        """
        clock = training.clock
        self._at, self.first, self._last, self._history = clock.step, clock.first, clock.last, training.history
        with self._under_way(training.state):
            yield self._lead()
            for place in (_BEGIN, self._at):  # without a step, the others wait at the first of them
                self._group.tell(place, {"stop": True, "signal": signals.asked, "history": self._history})
        if signals.asked is None:
            self._group.end()
            atexit.register(self._group.wait_for_others)

    def _lead(self) -> Iterator[tuple[TrainState, dict[str, jax.Array], None]]:
        """The steps for the loop of process 0. Where it is stuck between two of them, its stack is said."""
        self._group.tell(_BEGIN, {"stop": False, "signal": None, "history": []})
        for state, metrics in self._steps():
            is_turn = self._is_turn()
            if is_turn:
                # The loop may evaluate it, and an evaluation over the devices of all would wait for the others.
                state = self._local()
            with self._watchdog.watch(f"is between two steps, after step {self._at}", ends=False):
                yield state, metrics, None
            if is_turn:
                new = [record for record in self._history[-1:] if record["step"] == self._at]
                self._group.tell(self._at, {"stop": False, "signal": None, "history": new})

    def follow(self, state: TrainState, signals: Signals) -> tuple[TrainState, History, int]:
        """Make the steps of process 0 until it says that the run is over, or a signal came here.

        The result is what process 0 has: the state, the history, and the number of the last step.
        """
        # The loop and all that it calls run in process 0 alone, `on_step` too. Here only steps are made, and every so
        # often it says whether there is another one: no process may begin a step that the others do not make.
        with self._under_way(state), signals:
            steps, stop = self._steps(), self._hear(_BEGIN)["stop"]
            while not stop:
                state, metrics = next(steps)
                if self._run.stops and float(metrics["skipped"]) > 0:
                    check_finite(metrics, self._local())
                is_turn = self._is_turn()
                stop = signals.should_stop(state, self._at, is_turn)
                if is_turn:
                    word = self._hear(self._at)
                    stop, signals.asked = stop or word["stop"], signals.asked or word["signal"]
            state = self._local()
        if signals.asked is None:
            atexit.register(self._group.wait_for_others)
        return state, self._history, self._at

    def _hear(self, place: int | str) -> Word:
        """What process 0 says after a step: whether the run is over, after which signal, and what is recorded."""
        word = self._group.hear(place)
        self._history = History([*([] if word["stop"] else self._history), *word["history"]])
        return word

    def _is_turn(self) -> bool:
        """Whether process 0 says after this step if the run goes on: after each record, and now and then."""
        is_epoch_over = (self._at - self.first) % (self._run.steps or 1) == 0
        return self._run.is_record_due(self._at, self._last, is_epoch_over) or self._at % _TELL_EVERY == 0

    # What process 0 and the others do alike.

    @contextlib.contextmanager
    def _under_way(self, state: TrainState) -> Generator[None]:
        """A block in which this process is one of the run, with the state of process 0."""
        self._watchdog.start()
        with processes.elastic_fit():
            self._host = _to_host(state)
            self._group.check_program(self._compile(state))
            self._agree()
            yield

    def _compile(self, state: TrainState) -> Program:
        """Compile what each device runs by itself: later the others would wait for the compiler in a collective."""
        # The result is what is computed, in short.
        batch = _to_host(next(self._run.batches(self._seed, 0)))
        local = place_state(_to_host(state), tuple(jax.local_devices()))
        program, donated, rng = self._run.step.on(jax.local_devices())._prepare(local, None)
        assert isinstance(program, VirtualProgram)  # see `check_can_go_on`
        texts = program.compile_own(donated, rng, batch)
        return describe(self._run, self._seed, state, texts, batch)

    def _agree(self) -> None:
        """Agree with all that live, and take the state of process 0."""

        def offer() -> Offer:
            self._load()
            batch = digest(self._batch)
            return Offer(at=self._at, first=self.first, last=self._last, history=self._history, batch=batch)

        def take(devices: Devices, offer: Offer, send: Callable[[], PyTree]) -> None:
            # The state of process 0, the step over these devices, and where the run is.
            self._host = send()
            self._state = place_state(self._host, devices)
            self._step = self._run.step.on(devices)
            self._is_new = True
            self._at, self.first, self._last = offer["at"], offer["first"], offer["last"]
            if not self.leads:
                self._history = History(offer["history"])
            # The batch of the step that is made again. Data that differ would give other sums without an error.
            self._load()
            if digest(self._batch) != offer["batch"]:
                self._group.refuse("the data of the current batch")

        self._group.agree(offer, lambda devices: processes.plan_send(self._host, devices), take)

    def _load(self) -> None:
        """Read the batch of the next step, where a failed step has not left it."""
        if self._batch is not None:
            return
        with self._watchdog.watch(f"loads the batch of step {self._at + 1}"):
            self._batches = self._batches or self._run.batches(self._host.rng, self._at)
            self._batch = _to_host(next(self._batches))

    def _steps(self) -> Iterator[Made]:
        """Make steps, each until it has succeeded in all processes."""

        def make() -> Made:
            # Where another process has failed, this one may wait for it in a collective without end, so it ends. Where
            # none has, the step only takes long.
            times = _MORE_FOR_COMPILATION if self._is_new else 1
            with self._watchdog.watch(f"computes step {self._at + 1}", self._group.has_failed, times):
                # Computed within the block of the group, whose barrier is to say that the step has succeeded.
                made = jax.block_until_ready(self._step(self._state, self._batch))
            self._is_new = False
            return made

        while True:
            if not self._group.agrees:
                self._agree()
            self._load()
            made = self._group.run(self._at, make)

            # Who was lost in it, and who joins after it.
            if self.leads and self._group.lost:
                lost = ", ".join(map(str, self._group.lost))
                say(f"process {lost} was lost in step {self._at + 1}; the others repeat it")
            if self.leads and self._group.joined:
                say(f"process {', '.join(map(str, self._group.joined))} joins after step {self._at + 1}")

            # It failed in a process, so it counts in none. The batch stays for the next try, and the state before it is
            # in the host memory of process 0, which sends it when all agree again.
            if made is None:
                continue
            self._batch = None
            self._at, self._made = self._at + 1, self._made + 1
            if self._made == _PROVEN:
                distributed._report_working()
            self._state, metrics = made
            if self.leads:
                self._host = _to_host(self._state)
            yield self._state, metrics

    def _local(self) -> TrainState:
        """The state on the devices of this process, for what one process does by itself."""
        return place_state(_to_host(self._state), tuple(jax.local_devices()))


def check_can_go_on(run: Run, state: TrainState) -> None:
    """`ValueError` for a run that cannot continue after a loss."""
    fault = None
    if getattr(run.step, "virtual_shards", None) is None:
        fault = (
            "in an elastic run the number of devices changes, so the step needs virtual_shards=; write "
            "train.make_train_step(loss_fn, virtual_shards=8)"
        )
    elif any(isinstance(source, data.IterableSource) for source in data._sources_of(run.source)):
        fault = "an elastic run repeats steps, and an iterable cannot give a batch again; give a data.Dataset or arrays"
    elif run.callbacks.restores_best:
        fault = (
            "an elastic run calls callbacks in process 0 only, so the other processes cannot restore the best state; "
            "in place of train.EarlyStopping(restore_best=True) use train.KeepBest and checkpoint.best"
        )
    elif run.left_out or run.callbacks.undo is not None:
        fault = "an elastic run leaves out no steps; leave out step.without(...) and train.Undo"
    elif not all(getattr(leaf, "is_fully_replicated", True) for leaf in jax.tree.leaves(state)):
        fault = (
            f"in kind {state.store.kind!r} the values of a lost process are lost too; use kind 'device', or "
            "initialize without elastic=True: then a loss ends all processes, and they resume from a checkpoint"
        )
    if fault is not None:
        raise ValueError(f"fit: {fault}")


def _to_host(tree: PyTree) -> Any:
    """A pytree whose arrays are copies in host memory. A step takes the memory that NumPy shares with a CPU device."""
    plain, restore = without_keys(tree)
    return restore(jax.tree.map(lambda leaf: np.array(mesh.to_host(leaf)), plain))


# The end of a stuck process. It sends heartbeats as any other, so the others would wait for it forever. Once it has
# ended they go on. What only process 0 does, such as callbacks, may take long for good reasons, and its end would end
# the run. So there the step and the stack are only said. Time in which the process was stopped (Ctrl-Z, a paused
# container) is not counted. A process that holds Python's lock is not seen here: its heartbeats end, see
# `distributed._initialize`.


@dataclasses.dataclass
class Work:
    """What the watched thread does, since when, and how long it may."""

    what: str
    limit: float
    is_stuck: Callable[[], bool]
    ends: bool
    since: float
    is_said: bool = False


class Watchdog:
    """Watches the thread that made it, inside of the blocks `watch`."""

    def __init__(self) -> None:
        self._watching = daemon("jaxpar-watchdog", self._run, "a stuck process is no longer noticed")
        self._limit = float(os.environ.get("JAXPAR_STUCK_TIMEOUT") or STUCK_AFTER)
        self._thread, self._clock = threading.get_ident(), AwakeClock()
        self._work: Work | None = None

    @contextlib.contextmanager
    def watch(
        self, what: str, is_stuck: Callable[[], bool] = lambda: True, times: int = 1, ends: bool = True
    ) -> Generator[None]:
        """A block that must be over within the limit, or some `times` of it.

        `what` is a verb and its object. `is_stuck` is asked when the limit is over: False if it only takes long. A
        stuck process `ends`, or only says so, once until `note_progress`.
        """
        before, self._work = self._work, Work(what, times * self._limit, is_stuck, ends, self._clock.now)
        try:
            yield
        finally:
            self._work = before
            self.note_progress()

    def note_progress(self) -> None:
        """Count the time of the block from now on."""
        if (work := self._work) is not None:
            work.since, work.is_said = self._clock.now, False

    def _run(self) -> None:
        while True:
            time.sleep(_EVERY)
            self._clock.tick()
            self.look()

    def look(self) -> None:
        """Look once whether the work is stuck."""
        work = self._work
        if work is None or work.is_said or self._clock.now - work.since <= work.limit:
            return
        # To ask takes time, in which the work may have ended.
        if not work.is_stuck() or self._work is not work:
            return
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)[-_MOST_LINES:]) if frame is not None else ""
        who = f"process {jax.process_index()}"
        why = f"jaxpar: {who} is stuck: it {work.what}, for more than {work.limit:g} seconds, here:\n{stack}"
        work.is_said = True
        if not work.ends:
            return say_before_exit(f"{why}The others wait for it. It may be slow only, so it is not ended")
        say_before_exit(f"{why}It ends with status {distributed.LOST}, and counts as lost")
        os._exit(distributed.LOST)

    def start(self) -> None:
        """Look twice a second. Batches of an evaluation are progress from now on."""
        processes.watch_progress(self.note_progress)
        self._watching.start()
