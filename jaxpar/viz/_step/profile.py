"""The seconds of each layer of a step: given by name, or read from what `jax.profiler` wrote while the step ran."""

from __future__ import annotations

import glob
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ..._core import checks
from ..._core.files import as_path
from ..._core.text import did_you_mean
from .._program.hlo import COLLECTIVES
from .places import Places

Profile = Mapping[str, float] | str | os.PathLike[str]


def check_profile(profile: Any) -> Mapping[str, float] | Path | None:
    """What `trace_step` is given, checked before anything is compiled."""
    if profile is None or isinstance(profile, (str, os.PathLike)):
        return None if profile is None else as_path(profile, "trace_step: profile")
    if not isinstance(profile, Mapping):
        raise TypeError(
            "trace_step: profile must be a dict of layers and seconds, or the directory that jax.profiler.trace wrote, "
            f"got a {type(profile).__name__}"
        )
    for name, seconds in profile.items():
        expected = "a number of seconds, 0 or more"
        checks.number(seconds, "trace_step", f"profile[{name!r}]", expected, lambda value: 0 <= value < math.inf)
    return profile


def seconds_of(profile: Mapping[str, float] | Path | None, places: Places) -> dict[str, float]:
    """The seconds of each layer, by its name. Those of a directory are the sum over its devices and steps."""
    seconds: dict[str, float] = {}
    if isinstance(profile, Mapping):
        seconds |= {str(name): float(number) for name, number in profile.items()}
    elif profile is not None:
        for event, duration in _events(str(profile)):
            if (at := _draft_of(event, places)) is not None:
                seconds[places.names[at]] = seconds.get(places.names[at], 0.0) + duration
        if not seconds:
            raise ValueError(f"trace_step: the profile in {str(profile)!r} has no instruction of this step")
    names = list(places.names.values())
    for name in sorted(seconds.keys() - set(names)):
        raise ValueError(
            f"trace_step: the profile has a layer {name!r}, which the step lacks{did_you_mean(name, names)}"
        )
    return seconds


def _draft_of(event: str, places: Places) -> int | None:
    """The layer of an instruction. Of a fusion the one that it is named after."""
    if event not in places.program.home:
        return None
    instruction = places.program[event]
    kind = instruction.opcode.removesuffix("-done").removesuffix("-start")
    if kind in ("while", "call", "conditional", "async", "async-update") or kind in COLLECTIVES:
        return None  # what they call has events of its own; a collective waits for other devices
    draft_at = places.draft_at.get(event)
    return draft_at if draft_at is not None else next(iter(places.drafts_of(instruction)), None)


def _events(folder: str) -> list[tuple[str, float]]:
    """The name of the instruction and the seconds of each event of a profile that is one."""
    files = sorted(glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True))
    if not files:
        raise ValueError(f"trace_step: there is no profile (*.xplane.pb) in {folder!r}; record one with jax.profiler")
    timed: list[tuple[str, float]] = []
    with warnings.catch_warnings():  # jax 0.12 ends the process where its reader warns and a warning is an error
        warnings.simplefilter("ignore")
        for data in map(jax.profiler.ProfileData.from_file, files):
            events = (event for plane in data.planes for line in plane.lines for event in line.events)
            named = ((dict(event.stats).get("hlo_op"), event.duration_ns / 1e9) for event in events)
            timed += [(str(name), seconds) for name, seconds in named if name]
    return timed
