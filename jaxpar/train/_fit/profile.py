"""A trace of a few steps by jax's profiler, for XProf."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
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
        steps: how many steps the run has.

    Raises:
        ValueError: it asks for steps that the run does not have.
    """

    def __init__(self, profile: Profile | None, steps: int):
        self._directory, self._first, self._num = _read(profile, steps)
        self._made = 0
        self._on = False

    @property
    def is_on(self) -> bool:
        """Whether there is a trace at all."""
        return self._directory is not None

    def step(self, at: int, state: Any) -> contextlib.AbstractContextManager[None]:
        """A block for one step. `state` is the one before it."""
        return _NOTHING if self._directory is None else self._step(self._directory, at, state)

    @contextlib.contextmanager
    def _step(self, directory: str, at: int, state: Any) -> Generator[None]:
        if self._made == self._first:
            jax.block_until_ready(state)  # earlier steps are not in the trace
            jax.profiler.start_trace(directory)
            self._on = True
        if self._made == self._first + self._num:
            self.close(state)
        with jax.profiler.StepTraceAnnotation("train", step_num=at) if self._on else contextlib.nullcontext():
            yield
        self._made += 1

    def close(self, state: Any) -> None:
        """End a trace under way, when the state is computed."""
        if self._on:
            self._on = False
            try:
                if not is_donated(state):  # a step that failed may have taken its memory
                    jax.block_until_ready(state)
            finally:
                jax.profiler.stop_trace()


def _read(profile: Profile | None, steps: int) -> tuple[str | None, int, int]:
    if profile is None:
        return None, 0, 0
    if not isinstance(profile, tuple):  # in the steady state: compiled, and the device is fed ahead
        return os.fspath(as_path(profile, "fit: profile")), min(_FIRST, max(0, steps - _NUM)), _NUM
    directory, first, num = profile
    if first < 0 or num < 1 or first + num > steps:
        raise ValueError(
            f"fit: profile asks for {num} steps from step {first} of this call on, which has {steps} steps; "
            "(directory, first_step, num_steps) counts from 0"
        )
    return os.fspath(directory), first, num
