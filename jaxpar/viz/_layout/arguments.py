"""One input for each argument of the function, however many arrays it holds."""

from __future__ import annotations

import re

from .net import Draft, Net


def join_arguments(net: Net) -> None:
    """Merge the inputs that are leaves of one argument. One that is a single array keeps its name."""
    groups: dict[str, list[Draft]] = {}
    for draft in net.drafts:
        if draft.op == "input":
            groups.setdefault(argument_of(draft.name), []).append(draft)
    net.merge([(group, _join(name, group)) for name, group in groups.items() if len(group) > 1])


def _join(name: str, group: list[Draft]) -> Draft:
    first = group[0]
    outputs = [output for draft in group for output in draft.outputs]
    values = [draft.value for draft in group]
    return Draft(first.at, "input", f"{len(group)} arrays", first.value, name=name, outputs=outputs, leaves=values)


def argument_of(name: str) -> str:
    """The argument that a leaf is in.

    >>> argument_of("batch['image'].data[0]"), argument_of("x")
    ('batch', 'x')
    """
    return re.split(r"[\[.]", name, maxsplit=1)[0]


def leaf_of(name: str) -> str:
    """The path of a leaf in its argument, for people.

    >>> leaf_of("batch['image'].data[0]"), leaf_of("x")
    ('image.data[0]', '')
    """
    path = name[len(argument_of(name)) :]
    return re.sub(r"\['([^']*)'\]", r".\1", path).lstrip(".")
