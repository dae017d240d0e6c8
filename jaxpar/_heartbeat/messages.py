"""The messages of a run, in both directions, and the valid values of each field.

A message is one line of JSON. It is an object with exactly the fields of its type. Anything else is invalid.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from .._core.text import for_terminal

Message = dict[str, Any]
Types = Mapping[str, tuple[str, ...]]  # the field that names the type, and the other fields

LOST = 75  # exit status of a process that ends because another was lost: EX_TEMPFAIL of sysexits.h, "try again"
REFUSED = 78  # of a process that would compute something else than the others: EX_CONFIG, "do not try again"
LONGEST = 1 << 16  # bytes of one message
MOST_SECONDS = 7 * 24 * 3600.0  # the largest time limit
_MOST_PROCESSES = 1 << 20

FROM_PROCESS: Types = {
    "hello": ("job", "rank", "size", "host", "timeout"),
    "answer": ("proof",),
    "heartbeat": (),
    "hint": (),
    "failed": (),
    "interrupted": (),
    "leaving": (),
    "released": (),
    "working": (),
}
FROM_SERVER: Types = {
    "challenge": (),
    "proof": (),
    "welcome": (),
    "other_run": (),
    "heartbeat": (),
    "hint": (),
    "go": ("host",),
    "lost": ("host", "why"),
    "refused": (),
    "closing": (),
    "left": (),
}


@dataclasses.dataclass(frozen=True)
class _Field:
    """The valid values of a field.

    Attributes:
        words: what they are.
        is_valid: whether a value is one of them.
        longest: a longer text is cut before it is sent.
    """

    words: str
    is_valid: Callable[[Any], bool]
    longest: int = 0


def _integer(low: int, high: int) -> _Field:
    return _Field(f"an int from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def _text(longest: int, *, or_null: bool = False) -> _Field:
    def is_valid(value: Any) -> bool:
        if value is None:
            return or_null
        return isinstance(value, str) and len(value) <= longest and value.isprintable()

    return _Field(f"printable text of at most {longest} characters{' or null' if or_null else ''}", is_valid, longest)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MOST_SECONDS  # false for NaN


_FIELDS = {
    **dict.fromkeys(
        ("hello", "heartbeat", "leaving", "working", "welcome", "other_run", "go", "closing"), _integer(1, 1)
    ),
    **dict.fromkeys(("challenge", "answer", "proof"), _text(64)),
    "job": _text(300),
    "rank": _integer(0, _MOST_PROCESSES - 1),
    **dict.fromkeys(("lost", "left", "released"), _integer(0, _MOST_PROCESSES - 1)),
    "size": _integer(1, _MOST_PROCESSES),
    "timeout": _Field(f"a number from 0 to {MOST_SECONDS:g}", _is_time),
    "host": _text(255),
    "hint": _text(4096, or_null=True),
    **dict.fromkeys(("failed", "interrupted", "refused", "why"), _text(1000)),
}


def parse(line: bytes, types: Types) -> Message:
    """The message on a line.

    Raises:
        ValueError: the line is not a message of one of the types, with all fields in range.
    """
    if len(line) > LONGEST:
        raise ValueError(f"a message has at most {LONGEST} bytes")
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        raise ValueError("a message is a line of JSON") from None
    if not isinstance(message, dict) or not any({name, *more} == message.keys() for name, more in types.items()):
        raise ValueError(f"a message is one of: {', '.join(types)}; each with its own fields")
    for name, value in message.items():
        if not _FIELDS[name].is_valid(value):
            raise ValueError(f"{name} must be {_FIELDS[name].words}, got {_short(value)}")
    return message


def encode(message: Message) -> bytes:
    """A message as a line. Its texts are escaped and cut to the longest valid length."""
    fields = {n: for_terminal(v)[: _FIELDS[n].longest] if isinstance(v, str) else v for n, v in message.items()}
    return json.dumps(fields).encode() + b"\n"


def job_name(job: str) -> str:
    """The name of a job as messages carry it."""
    return for_terminal(job)[: _FIELDS["job"].longest]


def _short(value: Any) -> str:
    """A value in at most 60 printable characters. A container is shown by its type."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__}"
    if isinstance(value, str) and len(value) > 40:
        return f"{len(value)} characters"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
