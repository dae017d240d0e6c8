"""A part of a certified run computed again, without a change of its files."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from ... import checkpoint
from ..._core import checks
from ..._core.text import did_you_mean
from .._step.state import check_is_state
from .certificate import difference, header_of, parse
from .fit import fit
from .resume import like_saved


class NotComparableError(ValueError):
    """A certificate says nothing about what would be computed here."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """What a verification found."""

    start: Path | None  # the checkpoint that it began at. None: the state that was given.
    steps: list[int]  # the certified steps that were compared
    differs: int | None  # the last of them, if it differs. None: all are the same.


def verify(path: Path, arguments: Any, first: int | None = None, last: int | None = None) -> Verified:
    """Compute certified steps again by these arguments of `fit`, and compare the hashes. Nothing is shown or written.

    It begins at the last checkpoint that is not after step `first`, or at the state that is given, and ends at step
    `last` or at the last line. `NotComparableError` without such steps, and for another machine, version or program.
    """
    try:
        header, lines = parse(path.read_bytes(), path)
    except OSError as error:
        raise NotComparableError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise NotComparableError(str(error)) from None
    steps = [step for step in lines if (first or 0) <= step <= (last or step)]
    if not steps:
        known = f"its steps are {min(lines)} to {max(lines)}" if lines else "it has none"
        asked = f"from {first or 0}" + (f" to {last}" if last else "")
        raise NotComparableError(f"{path} has no step {asked}; {known}")
    state, step, data, options = _split(arguments)
    if why := difference(header, header_of(step, state)):
        raise NotComparableError(f"{path} is from another run ({why})")
    state, start = _begin(state, step, options.pop("checkpoint_dir", None), first or 0, steps[0])
    done: list[int] = []
    for at in steps:
        if at > int(state.step):
            state, _ = fit(state, step, data, max_steps=at - int(state.step), progress=False, **options)
        done.append(at)
        if str(checkpoint._hash_of(state)) != lines[at]:
            return Verified(start, done, at)
    return Verified(start, done, None)


def _split(arguments: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    """State, step, data, and the options that decide about bits, with the place of checkpoints."""
    if not isinstance(arguments, dict):
        raise TypeError(f"expected the arguments of fit in a dict, got {checks.describe(arguments)}")
    known = list(inspect.signature(fit).parameters)
    for name in arguments:
        if name not in known:
            raise TypeError(f"fit: there is no argument {name!r}{did_you_mean(name, known)}")
    missing = [name for name in ("state", "step", "train_data", "batch_size") if name not in arguments]
    if missing:
        raise TypeError(f"the arguments of fit lack {' and '.join(missing)}")
    check_is_state(arguments["state"], "verify")
    kept = ("batch_size", "steps_per_execution", "checkpoint_dir")
    options = {name: arguments[name] for name in kept if name in arguments}
    return arguments["state"], arguments["step"], arguments["train_data"], options


def _begin(state: Any, step: Any, directory: Any, first: int, certified: int) -> tuple[Any, Path | None]:
    """The last state at or before a step that is known, and its checkpoint."""
    own = int(state.step)
    if directory is not None:
        found = checkpoint._newest_good(Path(directory), set(), wanted=lambda body: own < body.get("step", 0) <= first)
        if found is not None:
            return checkpoint.restore(found.path, like_saved(state, step)), found.path
    if own > certified:
        raise NotComparableError(
            f"the state is at step {own}, after the first step to compare, {certified}; give an earlier state, or a "
            "later --from"
        )
    return state, None
