"""The steps of a run, one by one or several in one program, as an iterator. An elastic run has others."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Set
from typing import Any

import jax

from ... import data
from ..._cpu import is_slow_in_a_loop
from .._step.state import TrainState
from .._step.train_step import TrainStep, leave_out
from .certificate import Certificate
from .clock import Clock
from .progress import Metrics
from .run import Run, shuffle_key

# The state after a step and its metrics. With a range they are after several steps, and the metrics are those of each,
# in these rows of their first axis. The devices may still compute them.
StepResult = tuple[TrainState, Metrics, range | None]

_AT_ONCE = 0.2  # seconds that the steps of one program take. Ctrl-C waits for them.


def own_steps(
    run: Run, clock: Clock, state: TrainState, left_out: Set[int], certificate: Certificate | None = None
) -> Generator[StepResult]:
    """Make the steps after `state`, on the devices of this process or of all. `clock` is at the last one made.

    The steps `left_out` make no update. A certificate gets hashes of the virtual shards of a step that is due.
    """
    # `left_out` has those of the step too, and of `Undo`, which the step knows nothing of.
    # The numbers of the steps are known here, so that nobody need ask a state, and wait, which one comes next.
    step = run.step.without(()) if run.left_out else run.step
    # Batches go to all devices, or over those axes of a mesh that the step splits a batch over.
    sharding = step.batch_sharding(state) if isinstance(step, TrainStep) else None
    virtual_shards = getattr(step, "virtual_shards", None)
    options = data._batch_options(run.source, state.store.devices, sharding, virtual_shards)

    # Where each step is a program.
    groups = _batch_groups(run, clock.step, state, options)
    if groups is None:
        for batch in run.batches(state.rng, clock.step, **options):
            number = clock.step + 1
            if number in left_out:
                state, metrics = leave_out(state)
            elif certificate is not None and certificate.is_due(number) and isinstance(step, TrainStep):
                state, metrics = certificate.make_step(number, step, state, batch)
            else:
                state, metrics = step(state, batch)
            yield state, metrics, None
        raise RuntimeError(
            f"fit: {type(run.source).__name__}.batches ended after step {clock.step}, but the run goes on to step "
            f"{clock.last}; with epochs=None give batches without an end"
        )

    # Where a program makes several. It must not step over a step after which something is due: only its last state
    # is there to be saved or evaluated.
    all_periods = {
        "checkpoints": run.checkpoint_every,
        "kept checkpoints": run.keep_every,
        "evaluations": run.eval_every,
        "hashes": None if certificate is None else certificate.every,
        "the trace": None if run.profile is None else 1,  # of single steps
        "copies for `Undo`": None if run.callbacks.undo is None else run.callbacks.undo.every,
    }
    periods = [every for every in all_periods.values() if every]
    for batches, number in groups:
        done = 0
        while done < number:
            # The first program has one step, since no step was measured: `step_time` is infinite.
            most = max(1, int(_AT_ONCE / clock.step_time)) if run.per_program == "auto" else run.per_program
            remaining = number - done, clock.last - clock.step, *[every - clock.step % every for every in periods]
            if clock.step + 1 in left_out:
                state, metrics = leave_out(state)
                yield state, metrics, None
                done += 1
                continue
            # It ends before the next step that makes no update, which is no part of a program.
            until_left_out = [number - clock.step - 1 for number in left_out if number > clock.step]
            end = done + min(most, *remaining, *until_left_out)
            state, metrics = step.many(state, batches, done, end)
            yield state, metrics, range(done, end)
            done = end


def _batch_groups(
    run: Run, start: int, state: TrainState, options: dict[str, Any]
) -> Iterator[tuple[data.Batch, int]] | None:
    """Batches for programs of several steps. None where each step is a program."""
    if run.per_program == 1:
        return None
    most = None if run.per_program == "auto" else run.per_program
    key = shuffle_key(state.rng)
    groups = data.batch_groups(run.source, run.batch_size, most, rng=key, start=start, **options)
    if most is not None:
        if groups is None:
            raise ValueError(
                f"fit: steps_per_execution is {most}, but the devices have no room for the data set; leave it out"
            )
        return groups
    if groups is None:
        return None
    # "auto": several steps are one program where that is quicker.
    batches, number = next(groups)
    is_quicker = len(jax.tree.leaves(batches)[0]) > 1  # one step needs no loop
    if is_quicker and "cpu" in {d.platform for d in state.store.devices or ()}:
        # XLA's convolutions are slow in a loop on CPUs.
        is_quicker = not is_slow_in_a_loop(run.step.lower(state, batches, many=True).as_text())
    return itertools.chain([(batches, number)], groups) if is_quicker else None
