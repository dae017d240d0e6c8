"""Where a run is: its steps, its epochs, and how long a step takes."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Run
    from .saved import RunInfo


@dataclasses.dataclass
class Clock:
    """The steps and epochs of a run. Steps count from the state that the run began with, which need not be at 0."""

    first: int  # the step at which the run began
    began: int  # the step at which this call of `fit` began
    step: int  # the number of steps that were made
    last: int  # the step at which the run ends
    # The steps at which epochs began, last the one under way, or the next one where no step of it was made. Where
    # epochs differ in length, those of earlier calls of `fit` are not known, and only their number is right.
    epoch_starts: list[int]
    step_time: float = math.inf  # seconds of a step, by the metrics that were read last
    read_at: float = 0.0  # when that was, by `time.perf_counter`

    @classmethod
    def resume(cls, run: Run, info: RunInfo, step: int) -> Clock:
        """The clock at a step of a run that goes on, or begins."""
        # The number of a step says in which epoch it is, where all have as many steps. Where an epoch ends with the
        # data, only the checkpoint knows how many are over.
        if run.steps is None:
            epochs_over = info.epochs_over or 0
            epoch_began = info.first if info.epoch_began is None else info.epoch_began
        else:
            epochs_over, steps_of_epoch = divmod(step - info.first, run.steps)
            epoch_began = step - steps_of_epoch
        # A run that is over makes no step, and is returned as it is.
        is_over = info.stopped or (run.steps is None and run.epochs is not None and epochs_over >= run.epochs)
        last = step if is_over else max(step, info.first + run.num_steps)
        return cls(info.first, step, step, last, [*[info.first] * epochs_over, epoch_began])

    @property
    def steps_of_run(self) -> int | None:
        """The number of all steps of the run. None where it ends with the data."""
        return None if self.last >= sys.maxsize else self.last - self.first

    @property
    def is_between_epochs(self) -> bool:
        """Whether an epoch ended with the last step, or none has begun."""
        return self.step == self.epoch_starts[-1]

    @property
    def epoch(self) -> int:
        """The number of the epoch of the last step, from 1."""
        return len(self.epoch_starts) - self.is_between_epochs

    @property
    def next_epoch(self) -> int:
        """The number of the epoch of the next step, from 1."""
        return len(self.epoch_starts)

    @property
    def epochs_over(self) -> int:
        return len(self.epoch_starts) - 1

    @property
    def steps_of_epoch(self) -> int:
        """The number of steps that were made of the epoch under way."""
        return self.step - self.epoch_starts[-1]

    def advance(self, run: Run, rows: range | None) -> None:
        """Count what a program of `own_steps` made: one step, or one for each of `rows`."""
        self.step += 1 if rows is None else len(rows)
        if run.is_epoch_over(self.steps_of_epoch):
            self.epoch_starts.append(self.step)
            # Where epochs end with the data, the last step is known only when it was made.
            if run.steps is None and run.epochs is not None and self.epochs_over >= run.epochs:
                self.last = self.step

    def go_back(self, step: int) -> None:
        """Forget the steps after this one."""
        self.step = step
        # An epoch that ended after this step is under way again.
        while self.epoch_starts[-1] > step:
            self.epoch_starts.pop()
