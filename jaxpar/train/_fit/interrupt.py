"""Ctrl-C, a notebook's interrupt and SIGTERM: recorded while a run is under way, obeyed between two steps."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

from ..._core.text import say
from ..._devices import processes

_CONFIRM_AFTER = 2.0  # seconds after which an interrupt that waits for its step is confirmed
_EXCHANGE_EVERY = 16  # steps after which several processes exchange their signals


class Signals:
    """A block in which the first SIGINT and the first SIGTERM are recorded. A second one acts at once.

    Signals can be recorded in the main thread only, and only if nobody else handles them: SIGINT has Python's own
    handler and SIGTERM the default. The handlers are restored at the end.

    If one of several processes stopped by itself, the others would wait in a collective forever. So they exchange their
    signals now and then, and all stop after the same step.

    Attributes:
        asked: the signal to obey, once `should_stop` has returned True.
    """

    def __init__(self, several_processes: bool = False):
        self.asked: int | None = None
        self._recorded: int | None = None
        self._several = several_processes
        self._service = (  # then SIGTERM is jax's
            several_processes and jax.config.jax_enable_preemption_service  # pyright: ignore[reportAttributeAccessIssue]
        )
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                if signal.getsignal(number) is usual:
                    self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        for number in list(self._before):
            self._restore_handler(number)
        if self._timer is not None:
            self._timer.cancel()
        if kind is None and self._recorded is not None and self.asked is None:  # it came after the last step
            if self._several:
                signal.raise_signal(self._recorded)
            self.asked = self._recorded

    def should_stop(self, state: Any, step: int, epoch_over: bool) -> bool:
        """Whether to stop after a step. `state` is the one after it."""
        if not self._several:
            self.asked = self._recorded
        elif self._service and multihost_utils.reached_preemption_sync_point(step):
            self.asked = signal.SIGTERM
        elif epoch_over or step % _EXCHANGE_EVERY == 0:
            jax.block_until_ready(state)  # the exchange is a collective, and those of two programs must not overlap
            self.asked = max(map(int, processes.exchange(str(int(self._recorded or 0))))) or None
        return self.asked is not None

    def _record(self, number: int, frame: Any) -> None:
        self._recorded = number
        self._restore_handler(number)
        if self._timer is not None:  # of the other signal
            self._timer.cancel()
        # The handler may have stopped the main thread inside a print, so another thread writes.
        self._timer = threading.Timer(_CONFIRM_AFTER, _confirm)
        self._timer.daemon = True
        self._timer.start()

    def _restore_handler(self, number: int) -> None:
        if number in self._before:
            signal.signal(number, self._before.pop(number))


def finish_interrupted(
    number: int, state: Any, history: Any, where: str, on_interrupt: str, who: str = "fit"
) -> tuple[Any, Any]:
    """Return or raise as `fit` does after a signal.

    Args:
        where: at which step it stopped and what was saved.
        on_interrupt: "return", "raise" or "auto". "auto" returns in a notebook or at a prompt, where an exception would
            lose the state, and raises in a script.
        who: the name before the message.
    """
    if number == signal.SIGTERM:
        say(f"{who}: SIGTERM: stopped {where}")
        sys.exit(128 + signal.SIGTERM)  # not `raise SystemExit`: the heartbeat client watches `sys.exit`
    if on_interrupt == "raise" or (on_interrupt == "auto" and not _is_at_prompt()):
        # This very class: Python ends a script after a subclass as after an error, not as after Ctrl-C.
        interrupt = KeyboardInterrupt(f"{who}: interrupted {where}")
        interrupt.state, interrupt.history = state, history  # pyright: ignore[reportAttributeAccessIssue]
        raise interrupt
    words = "" if history is None else "\nfit: this is the state and the history up to there"
    say(f"{who}: interrupted {where}{words}")
    return state, history


def where(step: int, epoch: int, epochs: int, saved: str | os.PathLike[str] | None) -> str:
    """At which step a run stopped, in words.

    >>> where(7, 2, 5, None)
    'after step 7, in epoch 2 of 5; nothing was saved, as there is no checkpoint_dir'
    """
    place = "nothing was saved, as there is no checkpoint_dir" if saved is None else f"saved in {saved}"
    return f"after step {step}, in epoch {epoch} of {epochs}; {place}"


def _is_at_prompt() -> bool:
    """Whether this is a notebook or a prompt of Python."""
    if hasattr(sys, "ps1"):
        return True
    return "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None


def _confirm() -> None:
    say("the interrupt was noted; it stops after the step that is under way. Once more stops it at once")
