"""What is inside of the boxes of a picture: all layers of a net, in the frames and the boxes that the picture has.

The page of a picture opens its boxes, so its first view is the picture.
"""

from __future__ import annotations

from dataclasses import replace

from .._graph import BACKWARD
from .._scopes import Path, Scope, paths_of, unique
from .collapse import add_parts
from .net import Draft, Net


def frame_as(net: Net, picture: Net) -> None:
    """Give the layers of a net the scopes that `picture` has, which is the same net with some of it closed.

    A layer that is drawn is in the frames around it. A box that stands for several layers becomes a scope of these, and
    a box of their gradients another one. The scopes that they had inside of it stay. Those that hold many have parts.
    """
    shown = {draft.at: draft for draft in picture.drafts if draft.layers == 1}
    box_of = {eqn: draft for draft in picture.drafts if draft.layers > 1 for eqn in draft.eqns}
    parts: dict[int, Scope] = {}  # the scope of each box that is no module, by its layer
    taken = {path for draft in (*net.drafts, *picture.drafts) for path in paths_of(draft.scope)}
    inside: dict[int, list[Draft]] = {}  # the layers in each box, with their gradients
    renamed: dict[Path, Path] = {}
    for draft in net.drafts:
        box = shown.get(draft.at) or next((box_of[eqn] for eqn in draft.eqns if eqn in box_of), None)
        if box is None:
            continue
        own = draft.scope
        for frame in box.scope:
            own = own[1:] if own[:1] == (frame,) else own
        around = box.scope
        outside = draft.scope[: len(draft.scope) - len(own)]
        if box.layers > 1:
            name = box.op.removesuffix(BACKWARD)
            if own and own[0].numbered(1) == name:
                part, outside, own = own[0], (*outside, own[0]), own[1:]
            else:
                if box.layer.at not in parts:
                    parts[box.layer.at] = unique(Scope(name, "part"), lambda s, around=around: (*around, s) in taken)
                    taken.add((*around, parts[box.layer.at]))
                part = parts[box.layer.at]
            around = (*around, part if box.forward is None else Scope(part + BACKWARD, part.kind))
            inside.setdefault(box.layer.at, []).append(draft)
        if draft.forward is None:
            renamed |= {(*outside, *own[:length]): (*around, *own[:length]) for length in range(len(own) + 1)}
        draft.scope = (*around, *own)
    net.repeats = {renamed.get(path, path): count for path, count in net.repeats.items()}
    for drafts in inside.values():
        box = replace(net, drafts=drafts)
        add_parts(box)
        net.repeats = box.repeats
