"""A trace of a few steps by jax's profiler, for XProf."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax

from ..._core.files import as_path
from ..._devices.donation import is_donated

Profile = str | os.PathLike[str] | tuple[str | os.PathLike[str], int, int]

_FIRST, _NUM = 10, 5
_NOTHING = contextlib.nullcontext()


class Trace:
    """Traces some of the steps of a run.

    Args:
        profile: a directory, or (directory, first step, number of steps) with steps counted from 0 at the start of this
            call of `fit`. None: no trace.
        began, last: how many steps were made at this start, and will be at the end.

    Raises:
        ValueError: it asks for steps that the run does not have.
    """

    def __init__(self, profile: Profile | None, began: int, last: int):
        self._directory, first, num, steps = None, 0, 0, last - began
        if isinstance(profile, tuple):
            directory, first, num = profile
            self._directory = os.fspath(directory)
            if first < 0 or num < 1 or first + num > steps:
                raise ValueError(
                    f"fit: profile asks for {num} steps from step {first} of this call on, which has {steps} steps; "
                    "(directory, first_step, num_steps) counts from 0"
                )
        elif profile is not None:  # in the steady state: compiled, and the device is fed ahead
            self._directory = os.fspath(as_path(profile, "fit: profile"))
            first, num = min(_FIRST, max(0, steps - _NUM)), _NUM
        self._traced = range(began + first, began + first + num)
        self._on = False

    @property
    def is_on(self) -> bool:
        """Whether there is a trace at all."""
        return self._directory is not None

    def step(self, at: int, state: Any) -> contextlib.AbstractContextManager[Any]:
        """A block for the step after `at` others. `state` is the one before it."""
        if self._directory is None:
            return _NOTHING
        if at == self._traced.start:
            jax.block_until_ready(state)  # earlier steps are not in the trace
            jax.profiler.start_trace(self._directory)
            self._on = True
        if at == self._traced.stop:
            self.close(state)
        return jax.profiler.StepTraceAnnotation("train", step_num=at) if self._on else _NOTHING

    def close(self, state: Any) -> None:
        """End a trace under way, when the state is computed."""
        if self._on:
            self._on = False
            try:
                if not is_donated(state):  # a step that failed may have taken its memory
                    jax.block_until_ready(state)
            finally:
                jax.profiler.stop_trace()
