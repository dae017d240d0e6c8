"""What a checkpoint says of its run beside the state, and the run that goes on from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ... import checkpoint, data, updaters
from ..._core import files, text
from ..._devices import mesh, processes, user_mesh
from .._callbacks.history import Record
from .._callbacks.memory import is_saved_memory
from .._step.state import TrainState
from .._step.train_step import TrainStep
from .run import Run


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What a checkpoint of `fit` says of its run, in values of JSON. What is None is not saved."""

    first: int  # the step at which the run began
    batch_size: int
    examples: int  # of an epoch, 0 where that is not known
    # The learning rates of the state that the run was given, where it has them.
    rates: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    # Which callbacks ended the training, and where it was to end. A checkpoint of an earlier jaxpar does not say it.
    ended_by: list[str] | None = None
    limit: int | None = None
    stopped: bool = False  # whether a callback ended the training, and would end it again
    interrupted: bool = False  # whether it stopped at this step by a signal, a NaN, or within an epoch by `max_steps`
    callbacks: list[dict[str, Any]] | None = None  # what they remember, as `Callbacks.to_json` gave it
    run: str | None = None  # the name of the run in its logs, where it has any
    data: str | None = None  # a hash of the data, where they are arrays
    # Of an epoch that has no record yet: the sums of its metrics, the number of steps in them, and their seconds.
    sums: dict[str, float] | None = None
    counted: int | None = None
    seconds: float | None = None
    # Where epochs differ in length: how many are over, and the step at which the next one began.
    epochs_over: int | None = None
    epoch_began: int | None = None
    place: list[Any] | None = None  # the position of each process in the data
    # What decides the numbers of the run: versions, processor, devices; hashes of model, data, optimizer, loss, step.
    made_by: dict[str, Any] | None = None
    left_out: list[int] | None = None  # the steps without an update
    certificate: str | None = None  # the file with the hashes of the run's states
    forked_from: list[Any] | None = None  # the directory of another run, and the step after which this one left it
    history: list[Record] | None = None  # the records of the epochs that are over. `checkpoint.Manager` adds them

    def to_json(self) -> dict[str, Any]:
        """The info as a checkpoint keeps it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, info: dict[str, Any]) -> RunInfo:
        """The info of a checkpoint that `has_good_info`."""
        return cls(**{field.name: info[field.name] for field in dataclasses.fields(cls) if field.name in info})


def has_good_info(path: checkpoint._AnyPath, body: dict[str, Any]) -> bool:
    """True, or a `CheckpointError` for the info of a run that `fit` cannot have saved."""
    info: dict[str, Any] = body.get("info", {})
    if "first" not in info:  # the user saved it
        return True
    # What another program or a person wrote would end in an odd error later, or in a run of other steps. Three must be
    # there, which every version wrote, and of the others those are looked at that are there.
    names = {"first", "batch_size", "examples", *info}
    bad_names = [name for name, is_good in _IS_GOOD.items() if name in names and not is_good(info.get(name))]
    if "first" not in bad_names and info["first"] > body.get("step", 0):
        bad_names.append("first")
    if bad_names:
        raise checkpoint.CheckpointError(f"{path} is damaged: wrong {' and '.join(bad_names)} in the info of the run")
    return True


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_count(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))  # pyright: ignore


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and _is_count(record.get("epoch")) and _is_count(record.get("step"))


_IS_GOOD: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("first", "batch_size", "examples", "limit", "counted", "epochs_over", "epoch_began"), _is_count),
    **dict.fromkeys(("stopped", "interrupted"), lambda value: isinstance(value, bool)),
    **dict.fromkeys(("run", "data", "certificate"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("rates", "sums"), _are_numbers),
    "seconds": _is_number,
    "ended_by": lambda value: isinstance(value, list) and all(isinstance(x, str) and x.split() for x in value),
    "callbacks": lambda value: isinstance(value, list) and all(map(is_saved_memory, value)),
    "place": lambda value: isinstance(value, list),
    "made_by": lambda value: isinstance(value, dict),
    "left_out": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "forked_from": lambda value: (
        isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_count(value[1])
    ),
    "history": lambda value: isinstance(value, list) and all(map(_is_record, value)),
}


# Where a run goes on.


def resume(run: Run, manager: checkpoint.Manager | None, state: TrainState) -> tuple[TrainState, RunInfo, bool]:
    """The state to train on, what is known of its run, and whether a checkpoint of `fit` said it.

    The latest checkpoint is taken where it is after the step of `state`, or of a run that was interrupted at that step.
    One of a run with other batches is refused.
    """
    saved = None
    if manager is not None and run.resume:
        with processes.raise_together():
            run.callbacks.before_resume(manager.directory)
        saved = manager._restore(lambda: template(state, run.step), has_good_info)
    if saved is None and run.resume is True:
        raise FileNotFoundError(
            f"fit: resume=True, but {run.checkpoint_dir} holds no checkpoint; give the checkpoint_dir of the run, or "
            "leave out resume= to begin a new one"
        )

    # The run of the given state, which a call of `fit` that failed may have donated: then a checkpoint is the only way.
    given_step = None if mesh.is_donated(state) else int(state.step)
    rates = {} if given_step is None or manager is None else updaters.learning_rates(state)
    digest = None if manager is None else run.data_digest
    new = RunInfo(given_step or 0, run.batch_size, run.examples, rates, data=digest)
    if saved is None:
        if given_step is None:
            raise ValueError("fit: this state was donated to an earlier step; use the state that it returned")
        return state, new, False

    # A checkpoint of the same step goes on only where the run was interrupted at it.
    saved_state, saved_info = saved
    step = int(saved_state.step)
    if given_step is not None and not (step > given_step or (step == given_step and saved_info.get("interrupted"))):
        return state, new, False
    if manager is not None and jax.process_index() == 0:
        text.say_news(f"resumed from step {step} in {files.shown(manager.directory)}")
        # The state keeps the rate of its checkpoint, whatever the call says now. Of the rates that the two calls were
        # given, since a callback may have changed the one in the state meanwhile.
        first_rates = saved_info.get("rates", {})
        if first_rates and rates and first_rates != rates:
            now, before, kept = (
                ", ".join(f"{rate:g}" for rate in each.values())
                for each in (rates, first_rates, updaters.learning_rates(saved_state))
            )
            text.say(
                f"fit: the given state has the learning rate {now}, but the run in {run.checkpoint_dir} began with "
                f"{before}. The resumed run keeps the rate of the checkpoint, {kept}. To change it, call "
                "updaters.set_learning_rate on the state that checkpoint.restore returns; resume=False begins a new run"
            )
    if "first" not in saved_info:  # the user saved it, so no epoch of that state is known
        return saved_state, dataclasses.replace(new, first=step if given_step is None else given_step), False

    # The run of the checkpoint.
    info = RunInfo.from_json(saved_info)
    if (info.batch_size, info.examples) != (run.batch_size, run.examples):
        raise ValueError(
            f"fit: the checkpoint is from a run with batches of {info.batch_size} out of {info.examples or 'all'} "
            f"examples, but this run has {run.batch_size} out of {run.examples or 'all'}; give the same again, another "
            "checkpoint_dir, or resume=False"
        )
    # The updates that were made cannot be unmade, and those that were left out not be made.
    left_out = set(info.left_out or [])
    # A step that `Undo` left out is in the checkpoint, and not in the step that the user gives.
    if (lacking := sorted(left_out - run.left_out)) and run.callbacks.undo is None:
        raise ValueError(
            f"fit: the run in {run.checkpoint_dir} leaves out step {lacking[0]}, and this step does not; give "
            f"step.without({sorted(left_out)}), or resume=False"
        )
    if late := sorted(number for number in run.left_out - left_out if number <= step):
        raise ValueError(
            f"fit: the run in {run.checkpoint_dir} is at step {step}, and made the update of step {late[0]}, which "
            "this step leaves out; go on from an earlier state, as train.open(...).fork gives one, or give resume=False"
        )
    # Where the data were. Only a source with a place of its own is moved; arrays find each batch by its number.
    data._go_to(run.source, info.place)  # after what refuses the call, so that an iterator stays where it is
    if jax.process_index() == 0 and None not in (digest, info.data) and digest != info.data:
        text.say(
            f"fit: train_data has other values than the run in {run.checkpoint_dir} had until step {step}. The resumed "
            "run goes on with the new ones. If that is not meant, give the same data again; resume=False or another "
            "checkpoint_dir begins a new run"
        )
    # A callback that ended the run would end it again. Another one, or another limit, is a wish to go on.
    stopped = info.stopped
    is_other_limit = info.limit is not None and info.limit != run.limit
    if stopped and (is_other_limit or not run.callbacks.stays_over(info.ended_by)):
        stopped = False
        if jax.process_index() == 0:
            text.say_news(
                f"a callback ended this run at step {step}; other callbacks or limits are given, so it goes on"
            )
    history = list(filter(_is_record, info.history or []))
    return saved_state, dataclasses.replace(info, rates=rates, data=digest, stopped=stopped, history=history), True


def template(state: TrainState, step: TrainStep) -> TrainState:
    """A state with all parts that the step's checkpoints have. A step of the user's own has those of `state`."""
    with user_mesh.outside_mesh():
        state = mesh.zeros_if_donated(state)
    return step.complete(state) if hasattr(step, "complete") else state
