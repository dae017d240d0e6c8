"""Ctrl-C, a notebook's interrupt and SIGTERM, noted while a run is under way and obeyed between two of its steps."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

from ..._devices import processes

_NOTE_AFTER = 2.0  # seconds after which an interrupt that waits for its step is confirmed
_TELL_EVERY = 16  # steps after which several processes tell each other what they noted


class Signals:
    """While entered, the first SIGINT and the first SIGTERM are noted and told by `look`; a second one acts at once.

    Only the main thread can do that, and only where nobody else handles these signals: Python's own
    KeyboardInterrupt, the default of SIGTERM. The handlers there were before are put back on leaving.

    One of several processes that stopped by itself would leave the others waiting in a collective for ever. So they
    tell each other now and then, and all stop after the same step.

    Attributes:
        asked: the signal to obey, once `look` has said so.
    """

    def __init__(self, several_processes: bool = False):
        self.asked: int | None = None
        self._noted: int | None = None
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
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        for number in list(self._before):
            self._put_back(number)
        if self._timer is not None:
            self._timer.cancel()
        if kind is None and self._noted is not None and self.asked is None:  # it came after the last look
            if self._several:
                signal.raise_signal(self._noted)
            self.asked = self._noted

    def look(self, state: Any, step: int, over: bool) -> bool:
        """Whether to stop after this step; `state` is the one after it, `over` whether it ends an epoch."""
        if not self._several:
            self.asked = self._noted
        elif self._service and multihost_utils.reached_preemption_sync_point(step):
            self.asked = signal.SIGTERM
        elif over or step % _TELL_EVERY == 0:
            jax.block_until_ready(state)  # collectives of two programs must not get in each other's way
            self.asked = max(map(int, processes.exchange(str(int(self._noted or 0))))) or None
        return self.asked is not None

    def _note(self, number: int, frame: Any) -> None:
        self._noted = number
        self._put_back(number)
        # The handler may have stopped the main thread in the midst of a print, so another thread says it.
        self._timer = threading.Timer(_NOTE_AFTER, _confirm)
        self._timer.daemon = True
        self._timer.start()

    def _put_back(self, number: int) -> None:
        if number in self._before:
            signal.signal(number, self._before.pop(number))


def leave(number: int, state: Any, history: list[Any], where: str, on_interrupt: str) -> tuple[Any, Any]:
    """How `fit` ends after a signal: by what it returns or raises.

    Args:
        where: at which step it stopped and what was saved.
        on_interrupt: "return", "raise" or "auto": return in a notebook or at a prompt, where what is not returned
            would be lost, and raise in a script.
    """
    if number == signal.SIGTERM:
        say(f"fit: SIGTERM: stopped {where}")
        sys.exit(128 + signal.SIGTERM)  # not `raise SystemExit`: the monitor of several processes hears of this one
    if on_interrupt == "raise" or (on_interrupt == "auto" and not interactive()):
        # Of this very class: Python ends a script after a subclass as after an error, not as after Ctrl-C.
        interrupt = KeyboardInterrupt(f"fit: interrupted {where}")
        interrupt.state, interrupt.history = state, history  # pyright: ignore[reportAttributeAccessIssue]
        raise interrupt
    say(f"fit: interrupted {where}\nfit: this is the state and the history up to there")
    return state, history


def interactive() -> bool:
    """Whether someone sits at a notebook or a prompt."""
    if hasattr(sys, "ps1"):
        return True
    return "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None


def say(message: str) -> None:
    print(f"jaxpar: {message}", file=sys.stderr, flush=True)


def _confirm() -> None:
    say("fit: the interrupt was noted; it stops after the step that is under way. Once more stops it at once")


def where(step: int, epoch: int, epochs: int, saved: str | os.PathLike[str] | None) -> str:
    """
    >>> where(7, 2, 5, None)
    'after step 7, in epoch 2 of 5; nothing was saved, as there is no checkpoint_dir'
    """
    kept = "nothing was saved, as there is no checkpoint_dir" if saved is None else f"saved in {saved}"
    return f"after step {step}, in epoch {epoch} of {epochs}; {kept}"
