"""Fields of a serialized protocol buffer, without its schema."""

from __future__ import annotations

from collections.abc import Iterator

Message = dict[int, list["int | bytes"]]


def message(data: bytes) -> Message:
    """The values of each field, by its number. A nested message is bytes.

    >>> message(bytes([8, 150, 1, 18, 2, 104, 105]))
    {1: [150], 2: [b'hi']}

    Raises:
        ValueError: the bytes are no message.
    """
    found: Message = {}
    for number, value in _fields(data):
        found.setdefault(number, []).append(value)
    return found


def integer(fields: Message, number: int) -> int:
    """The number in a field. 0 where it is missing, as in the format itself."""
    value = fields.get(number, [0])[-1]
    return value if isinstance(value, int) else 0


def text(fields: Message, number: int) -> str:
    """The text in a field. Empty where it is missing."""
    value = fields.get(number, [b""])[-1]
    return value.decode() if isinstance(value, bytes) else ""


def nested(fields: Message, number: int) -> Iterator[Message]:
    """The messages in a field."""
    return (message(value) for value in fields.get(number, ()) if isinstance(value, bytes))


def integers(fields: Message, number: int) -> list[int]:
    """The numbers in a repeated field, packed or not."""
    found: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, form = key >> 3, key & 7
        if form == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if form == 2:
            length, at = _varint(data, at)
        elif form in (1, 5):
            length = 8 if form == 1 else 4
        else:
            raise ValueError(f"viz: no protocol buffer: a field of form {form}")
        if at + length > len(data):
            raise ValueError("viz: a protocol buffer ends within a field")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
    raise ValueError("viz: a protocol buffer ends within a number")
