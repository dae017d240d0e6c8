"""A part of a certified run computed again, without a change of its files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ... import checkpoint
from ..._core import checks, files
from .._step.state import check_is_state
from .._step.train_step import TrainStep
from .certificate import difference, header_of
from .fit import fit
from .run import FitOptions
from .saved import template


@dataclasses.dataclass(frozen=True)
class Verified:
    """What a verification found."""

    start: Path | None  # the checkpoint that it began at. None: the state that was given.
    steps: list[int]  # the certified steps that were compared
    differs: int | None  # the last of them, if it differs. None: all are the same.


def verify(
    path: str,
    certified: tuple[dict[str, Any], dict[int, str]],
    arguments: Any,
    first: int | None = None,
    last: int | None = None,
) -> Verified:
    """Compute certified steps again by these arguments of `fit`, and compare the hashes. Nothing is shown or written.

    `certified` is what `certificate.read` found in the file, before code of the user ran.

    It begins at the last checkpoint that is not after step `first`, or at the state that is given, and ends at step
    `last` or at the last line. `ValueError` without such steps, and for another machine, version or program.
    """
    header, lines = certified
    steps = [step for step in lines if (first or 0) <= step <= (last or step)]
    if not steps:
        existing = f"its steps are {min(lines)} to {max(lines)}" if lines else "it has none"
        asked = f"from {first or 0}" + (f" to {last}" if last else "")
        raise ValueError(f"{path} has no step {asked}; {existing}")

    # The arguments are what a function of the user's returned, so they may be anything.
    if not isinstance(arguments, dict):
        raise TypeError(f"expected the arguments of fit in a dict, got {checks.describe(arguments)}")
    needed = ("state", "step", "train_data")
    for name in needed:
        if name not in arguments:
            raise TypeError(f"missing a required argument: {name!r}")
    for name in arguments:
        if name not in needed and name not in FitOptions.__dataclass_fields__:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    state, step, train_data = (arguments[name] for name in needed)
    check_is_state(state, "verify")
    if why := difference(header, header_of(step, state)):
        raise ValueError(f"{path} is from another run ({why})")
    if "left_out" in header and isinstance(step, TrainStep):  # by `Undo`, which is no option of the step
        step = step.without(step.left_out | {*header["left_out"]})

    # Begin at the newest good checkpoint that is not after `first`. Without one, at the state that is given.
    start = None
    given_step, checkpoint_dir = int(state.step), arguments.get("checkpoint_dir")
    if checkpoint_dir is not None:
        directory = files.as_path(checkpoint_dir, "verify: checkpoint_dir")
        good = checkpoint._newest_good(
            directory, set(), lambda _, body: given_step < body.get("step", 0) <= (first or 0)
        )
        if good is not None:
            state, start = checkpoint.restore(good.path, template(state, step)), good.path
    if start is None and given_step > steps[0]:
        raise ValueError(
            f"the state is at step {given_step}, after the first step to compare, {steps[0]}; give an earlier state, "
            "or a later --from"
        )

    # Of the options these two may change bits: which examples a step has, and which program makes it.
    options = {name: arguments[name] for name in ("batch_size", "steps_per_execution") if name in arguments}
    compared: list[int] = []
    for certified_step in steps:
        num_steps = certified_step - int(state.step)
        if num_steps > 0:
            state, _ = fit(state, step, train_data, max_steps=num_steps, progress=False, **options)
        compared.append(certified_step)
        if str(checkpoint._StateHash(state)) != lines[certified_step]:
            return Verified(start, compared, differs=certified_step)
    return Verified(start, compared, differs=None)
