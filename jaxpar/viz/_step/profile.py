"""The seconds of each layer, from a profile of `jax.profiler`."""

from __future__ import annotations

import glob
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ..._core import checks
from .._program.hlo import Program
from .._program.sends import KINDS
from .places import Places

Profile = Mapping[str, float] | str | os.PathLike[str]


def is_folder(profile: Profile) -> bool:
    """Whether this is a directory, and no dict."""
    return not isinstance(profile, Mapping) and os.path.isdir(profile)


def check_profile(profile: Any) -> None:
    """Check what `trace_step` is given, before anything is compiled.

    Raises:
        TypeError: it is neither a dict nor a directory, or a layer's seconds are no number.
        ValueError: the seconds are less than 0 or not finite.
    """
    if profile is None or isinstance(profile, (str, os.PathLike)):
        return
    if not isinstance(profile, Mapping):
        raise TypeError(
            "trace_step: profile must be a dict of layers and seconds, or the directory that jax.profiler.trace wrote, "
            f"got a {type(profile).__name__}"
        )
    for name, seconds in profile.items():
        expected = "a number of seconds, 0 or more"
        checks.number(seconds, "trace_step", f"profile[{name!r}]", expected, lambda value: 0 <= value < math.inf)


def seconds_of(
    profile: Profile | None,
    program: Program,
    places: Places,
    names: dict[int, str],
) -> dict[str, float]:
    """The seconds of each layer, by its name. Those of a directory are the sum over its devices and steps.

    Raises:
        ValueError: the directory has no profile, or the profile has no instruction of this program.
    """
    if profile is None:
        return {}
    if isinstance(profile, Mapping):
        return {str(name): float(seconds) for name, seconds in profile.items()}
    found: dict[str, float] = {}
    for name, seconds in _events(os.fspath(profile)):
        at = _draft(program, places, name)
        if at is not None:
            found[names[at]] = found.get(names[at], 0.0) + seconds
    if not found:
        raise ValueError(f"trace_step: the profile in {os.fspath(profile)!r} has no instruction of this step")
    return found


def _draft(program: Program, places: Places, name: str) -> int | None:
    """The layer of an instruction. Of a fusion the one that it is named after."""
    if name not in program.home:
        return None
    one = program[name]
    if (
        one.opcode in ("while", "call", "conditional")
        or one.opcode.removesuffix("-done").removesuffix("-start") in KINDS
    ):
        return None  # what they call has events of its own; a collective waits for other devices
    own = places.draft_of(one) if one.op_name else None
    return own if own is not None else next(iter(places.drafts_of(one)), None)


def _events(folder: str) -> list[tuple[str, float]]:
    """The name of the instruction and the seconds of each event that is one."""
    files = sorted(glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True))
    if not files:
        raise ValueError(f"trace_step: there is no profile (*.xplane.pb) in {folder!r}; record one with jax.profiler")
    with warnings.catch_warnings():  # jax 0.12 ends the process where its reader warns and a warning is an error
        warnings.simplefilter("ignore")
        return [event for file in files for event in _read(file)]


def _read(file: str) -> Iterator[tuple[str, float]]:
    data: Any = jax.profiler.ProfileData.from_file(file)
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name:
                    yield str(name), event.duration_ns / 1e9
