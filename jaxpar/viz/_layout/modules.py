"""The modules around layers, by the paths of their parameters.

Where a library names no scopes, the path of a layer's parameters does: `encoder.blocks[0].attn.query` is in the modules
"encoder", "blocks.0" and "attn". A step without parameters is in the smallest module whose call it is made in. Which
call is of which module is known from the parameters that are read in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .._graph import is_region
from .._read.source import Frame

_Path = tuple[str, ...]


@dataclass(slots=True, eq=False)
class Step:
    """A layer on its way to a module.

    Attributes:
        frames: the calls around it, from the outside in.
        path: the modules of its parameters. None where it has none with a name.
        scope, levels: the named scopes and regions around it, and how many frames are around each. -1 for unknown.
        modules: what is found: each module, and the frame that calls it.
    """

    frames: tuple[Frame, ...]
    path: _Path | None
    scope: _Path
    levels: tuple[int, ...]
    modules: list[tuple[int, str]] = field(default_factory=list)


def find_modules(steps: Sequence[Step]) -> bool:
    """Write the modules of each step. False where named scopes already have the names of the modules."""
    anchors = [step for step in steps if step.path]
    named = sum(not set(step.path or ()).isdisjoint(step.scope) for step in anchors)
    if not anchors or 2 * named >= len(anchors):
        return False
    for _, group in itertools.groupby(steps, lambda step: step.frames[0].function if step.frames else -1):
        inside = list(group)
        _visit(inside, max(0, _depth_of_all(inside) - 1), [])
    return True


def _depth_of_all(steps: list[Step]) -> int:
    """How many calls are around all steps."""
    places = zip(*(step.frames for step in steps), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda frames: len({frame.call for frame in frames}) == 1, places))


def _visit(steps: list[Step], depth: int, modules: list[tuple[int, str]]) -> None:
    """Go through one call. `modules` are those around it, `depth` its place on the stack."""
    for _, group in itertools.groupby(steps, lambda step: _place(step, depth)):
        inside = list(group)
        if len(inside[0].frames) <= depth + 1 or not any(step.path for step in inside):
            for step in inside:
                step.modules = _own(step, modules)
            continue
        for call in _calls(inside, depth + 1):
            _visit(call, depth + 1, modules + _entered(call, depth + 1, [name for _, name in modules]))


def _place(step: Step, depth: int) -> object:
    """The call of a step from a frame: its place there and the function. A step of the frame itself has none."""
    return (step.frames[depth].call, step.frames[depth + 1].function) if len(step.frames) > depth + 1 else None


def _own(step: Step, modules: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The modules of a step: those of its parameters, else those around it."""
    if step.path is None:
        return modules
    names = tuple(name for _, name in modules)
    same = len(_prefix([names, step.path]))
    return [*modules[:same], *((len(step.frames) - 1, name) for name in step.path[same:])]


def _calls(steps: list[Step], depth: int) -> list[list[Step]]:
    """The separate calls of a function at one place: a loop over modules calls it for each."""
    shared = len(_prefix([step.path for step in steps if step.path is not None]))
    marks = [(n, s.path[shared] if len(s.path) > shared else "") for n, s in enumerate(steps) if s.path is not None]
    groups = [list(group) for _, group in itertools.groupby(marks, lambda mark: mark[1])]
    if len(groups) < 2 or len({group[0][1] for group in groups}) < len(groups):
        return [steps]
    places = [{tuple(frame.call for frame in steps[n].frames[depth:]) for n, _ in group} for group in groups]
    if any(a.isdisjoint(b) for a, b in itertools.pairwise(places)):
        return [steps]
    starts = [_start(steps, depth, before[-1][0], after[0][0]) for before, after in itertools.pairwise(groups)]
    return [steps[a:b] for a, b in itertools.pairwise([0, *starts, len(steps)])]


def _start(steps: list[Step], depth: int, last: int, first: int) -> int:
    """Where the next call begins, between the last step of one and the first of the next: where the lines go back."""
    places = {n: [frame.call for frame in steps[n].frames[depth:]] for n in range(last, first + 1)}
    return next((n for n in range(last + 1, first + 1) if places[n] < places[n - 1]), first)


def _entered(call: list[Step], depth: int, around: list[str]) -> list[tuple[int, str]]:
    """The modules that a call goes into.

    One that reads parameters at several places is of the module that these share. Another is a wrapper. It is of a
    module only where the calls inside are fewer than the modules on the path.
    """
    anchors = [step for step in call if step.path is not None]
    shared = _prefix([step.path for step in anchors if step.path is not None])
    if list(shared[: len(around)]) != around:
        return []
    new = shared[len(around) :]
    innermost = any(len(step.frames) == depth + 1 for step in anchors)
    if not innermost and len({_place(step, depth) for step in anchors}) < 2:
        spare = [len(step.path or ()) - len(around) - _methods(step.frames[depth:]) + 1 for step in anchors]
        new = new[: max(0, min(spare))] if _is_method(call[0].frames[depth]) else ()
    return [(depth, name) for name in new]


def _is_method(frame: Frame) -> bool:
    head, _, _ = frame.name.rpartition(".")
    return bool(head) and not head.endswith("<locals>") and "<" not in frame.name.rpartition(".")[2]


def _methods(frames: Sequence[Frame]) -> int:
    """The number of modules that are called: methods, without those that a class calls of itself."""
    count, last = 0, ""
    for frame in frames:
        if _is_method(frame):
            head, _, method = frame.name.rpartition(".")
            count += head != last or method == "__call__"
            last = head
    return count


def _prefix(paths: Sequence[_Path]) -> _Path:
    found: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return tuple(found)


def join_scopes(steps: Sequence[Step], is_junk: Callable[[str], bool]) -> list[_Path]:
    """The scope of each step: its named scopes and regions, and its modules, as they are nested.

    Args:
        steps: with their modules.
        is_junk: whether a named scope says nothing beside the modules.
    """
    common: dict[_Path, tuple[int, ...]] = {}
    for step in steps:
        calls = tuple(frame.function for frame in step.frames)
        for length in range(1, len(step.scope) + 1):
            key = step.scope[:length]
            known = common.get(key, calls)
            same = next((n for n, (a, b) in enumerate(zip(known, calls, strict=False)) if a != b), None)
            common[key] = known[: min(len(known), len(calls)) if same is None else same]
    return [_joined(step, common, is_junk) for step in steps]


def _joined(step: Step, common: dict[_Path, tuple[int, ...]], is_junk: Callable[[str], bool]) -> _Path:
    found: list[str] = []
    modules = list(step.modules)
    for number, (name, level) in enumerate(zip(step.scope, step.levels, strict=True)):
        if is_junk(name):
            continue
        around = level if level >= 0 else len(common[step.scope[: number + 1]])
        while modules and modules[0][0] < around:
            found.append(modules.pop(0)[1])
        if is_region(name) or name not in [module for _, module in step.modules]:
            found.append(name)
    return (*found, *(name for _, name in modules))
