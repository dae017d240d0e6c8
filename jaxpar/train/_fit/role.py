"""The part that this process takes in a run: it trains, or makes the steps of a process that does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ... import distributed
from .._callbacks.history import History
from .._step.state import TrainState
from .interrupt import Interrupts, finish_interrupted, where
from .run import Run

Trained = tuple[TrainState, History]


def take_role(run: Run, state: TrainState, train: Callable[[Run, TrainState], Trained]) -> Trained:
    """What `train` returns. In an elastic run process 0 alone calls it, and the others follow."""
    if not distributed.is_elastic():
        return train(run, state)
    from .._elastic.member import Member  # other runs do not need it

    member = Member(run, state)
    if member.leads:
        return train(dataclasses.replace(run, make_steps=member.lead, behind=0), state)
    signals = Interrupts(several_processes=True)
    state, history, at = member.follow(run.check(state), signals)
    if signals.asked is None:
        return state, history
    place = where(at, -(-(at - member.first) // run.steps), run.epochs, None)
    return finish_interrupted(signals.asked, state, history, place, run.options.on_interrupt)
