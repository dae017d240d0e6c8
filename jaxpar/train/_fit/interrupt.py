"""Ctrl-C, a notebook's interrupt and SIGTERM: recorded while a run is under way, obeyed between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils

from ..._core import checks, process, text
from ..._core.arrays import PyTree
from ..._devices import processes

_CONFIRM_AFTER = 2.0  # seconds after which an interrupt that waits for its step is confirmed
_EXCHANGE_EVERY = 16  # steps after which several processes exchange their signals
_OF_LOOPS = ("asyncio.runners", "ipykernel.ipkernel")
State = TypeVar("State")
Records = TypeVar("Records")
_USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupts(process.Signals):
    """A block in which the first SIGINT and the first SIGTERM are recorded. A second one acts at once."""

    def __init__(self) -> None:
        # Only the main thread can record them, and only where nobody else handles them: SIGINT has Python's own handler
        # and SIGTERM the default.
        is_main = threading.current_thread() is threading.main_thread()
        super().__init__([number for number in _USUAL if is_main and _is_usual(number, signal.getsignal(number))])
        self.asked: int | None = None  # the signal to obey, once `should_stop` has returned True
        self._several = jax.process_count() > 1
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Interrupts:
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        if self._timer is not None:
            self._timer.cancel()
        if error[0] is None and self.received and self.asked is None:  # it came after the last step
            if self._several:
                signal.raise_signal(self.received[-1])
            self.asked = self.received[-1]

    def should_stop(self, state: PyTree, step: int, epoch_over: bool) -> bool:
        """Whether to stop after a step. `state` is the one after it."""
        recorded = self.received[-1] if self.received else None
        # Where this service of jax is on, SIGTERM is jax's.
        service = jax.config.jax_enable_preemption_service  # pyright: ignore[reportAttributeAccessIssue]
        if not self._several:
            self.asked = recorded
        elif service and multihost_utils.reached_preemption_sync_point(step):
            self.asked = signal.SIGTERM
        elif epoch_over or step % _EXCHANGE_EVERY == 0:
            # If one of several processes stopped by itself, the others would wait in a collective forever. The exchange
            # is a collective too, and those of two programs must not overlap. So it waits for the devices, and is made
            # seldom: after a record, which waits anyway, and every sixteenth step.
            jax.block_until_ready(state)
            self.asked = max(map(int, processes.exchange(str(int(recorded or 0))))) or None
        return self.asked is not None

    def _record(self, number: int, frame: FrameType | None) -> None:
        super()._record(number, frame)
        signal.signal(number, _USUAL[number])  # a second one acts at once
        if self._timer is not None:  # of the other signal
            self._timer.cancel()
        # The handler may have stopped the main thread inside a print, so another thread writes.
        message = "interrupted: the training stops after the current step; a second interrupt stops it at once"
        self._timer = threading.Timer(_CONFIRM_AFTER, text.say_news, (message,))
        self._timer.daemon = True
        self._timer.start()


@contextlib.contextmanager
def delayed() -> Generator[None]:
    """A block at whose end a signal takes effect. A second one does at once."""
    # A KeyboardInterrupt in the midst of tracing may leave JAX tracing, and then no operation of the process computes.
    with Interrupts() as signals:
        yield
    if signals.asked is not None:  # by the handler that was there before, which is in its place again
        signal.raise_signal(signals.asked)


def _is_usual(number: int, handler: Any) -> bool:
    """Whether a handler is nobody's own: Python's, or that of `asyncio.run` or of a notebook's cell with `await`."""
    # The latter two cancel a task of a loop, which cannot be before `fit` returns to it.
    module = getattr(getattr(handler, "func", handler), "__module__", None) or ""
    return handler is _USUAL[number] or (number == signal.SIGINT and module in _OF_LOOPS)


def finish_interrupted(
    number: int, state: State, history: Records, place: str, on_interrupt: str, who: str = "fit"
) -> tuple[State, Records]:
    """Return or raise as `fit` does after a signal. `place` says at which step it stopped and what was saved."""
    # "auto" returns in a notebook or at a prompt, where an exception would lose the state, and raises in a script.
    if number == signal.SIGTERM:
        text.say(f"{who}: SIGTERM: stopped {place}")
        sys.exit(128 + signal.SIGTERM)  # not `raise SystemExit`, of which others do not learn on Python 3.11
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    is_at_prompt = hasattr(sys, "ps1") or shell is not None
    if on_interrupt == "raise" or (on_interrupt == "auto" and not is_at_prompt):
        # This very class: Python ends a script after a subclass as after an error, not as after Ctrl-C.
        interrupt = KeyboardInterrupt(f"{who}: interrupted {place}")
        interrupt.state, interrupt.history = state, history  # pyright: ignore[reportAttributeAccessIssue]
        raise interrupt
    returns = "" if history is None else "\nfit: returns the state and the history so far"
    text.say_news(f"{who}: interrupted {place}{returns}")
    return state, history


def describe_stop(step: int, epoch: int, epochs: int | None, saved: str | os.PathLike[str] | None) -> str:
    """At which step a run stopped, in words."""
    place = "nothing was saved, as there is no checkpoint_dir" if saved is None else f"saved in {saved}"
    return f"after step {step}, in epoch {epoch}{f' of {epochs}' if epochs else ''}; {place}"


def interruptible(on_interrupt: str = "auto") -> Interruptible:
    """A context that delays Ctrl-C and SIGTERM to the end of a step.

    Inside the block, Ctrl-C, a notebook's interrupt and SIGTERM are only recorded, and `should_stop` returns True after
    the step. So your own loop can end and save its state. At the end of the block the interrupt takes effect, as in
    `fit`. A second signal takes effect at once.

    Args:
        on_interrupt: as in `fit`: with "raise" the block ends with a KeyboardInterrupt, with "return" normally. After
            SIGTERM it always ends with SystemExit(143).

    Returns:
        A context manager with `should_stop(state)`.

    Raises:
        ValueError: `on_interrupt` is unknown.

    Example:
        >>> from jaxpar import train
        >>> made = 0
        >>> with train.interruptible() as interrupt:
        ...     for batch in range(3):
        ...         made += 1
        ...         if interrupt.should_stop(made):
        ...             break
        ...     # save the state here
        >>> made, interrupt.asked
        (3, False)
    """
    checks.choice(on_interrupt, "train.interruptible", "on_interrupt", ("auto", "return", "raise"))
    return Interruptible(on_interrupt)


class Interruptible:
    """The context manager of `interruptible`."""

    def __init__(self, on_interrupt: str):
        self._on_interrupt, self._steps, self._state = on_interrupt, 0, None
        self._signals = Interrupts()

    @property
    def asked(self) -> bool:
        """Whether a signal came and `should_stop` has returned True."""
        return self._signals.asked is not None

    def should_stop(self, state: PyTree) -> bool:
        """Whether to stop. Call it after each step, with the new state, in every process.

        With several processes, the processes exchange their signals at every sixteenth call, and all stop after the
        same step.
        """
        self._steps, self._state = self._steps + 1, state
        return self._signals.should_stop(state, self._steps, False)

    def __enter__(self) -> Interruptible:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._signals.__exit__(kind, *error)
        if kind is None and self._signals.asked is not None:
            step = getattr(self._state, "step", self._steps)
            place = f"after step {int(step)}"
            finish_interrupted(self._signals.asked, self._state, None, place, self._on_interrupt, "train")
