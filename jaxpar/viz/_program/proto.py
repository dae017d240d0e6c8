"""A protocol buffer, read without the library of that name: the values of its fields by their numbers.

XLA hands out programs and the places of their arrays in this form. The messages and the numbers of their fields are in
openxla/xla, `xla/service/hlo.proto` and `xla/xla_data.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator

Message = dict[int, list["int | bytes"]]
_LENGTHS = {1: 8, 5: 4}  # bytes of a field, by its form


def message(data: bytes) -> Message:
    """The values of each field, by its number. A nested message is bytes.

    >>> message(bytes([8, 150, 1, 18, 2, 104, 105]))
    {1: [150], 2: [b'hi']}
    """
    # Each field is a key, which has its number and its form, and then a number, or so many bytes.
    fields: Message = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, form = key >> 3, key & 7
        if form == 0:
            value, at = _varint(data, at)
        elif form in _LENGTHS or form == 2:
            length, at = _varint(data, at) if form == 2 else (_LENGTHS[form], at)
            if at + length > len(data):
                raise ValueError("viz: a protocol buffer ends within a field")
            value, at = data[at : at + length], at + length
        else:
            raise ValueError(f"viz: no protocol buffer: a field of form {form}")
        fields.setdefault(number, []).append(value)
    return fields


def integer(fields: Message, number: int) -> int:
    """The number in a field. 0 where it is missing, as in the format itself."""
    value = fields.get(number, [0])[-1]
    return value if isinstance(value, int) else 0


def text(fields: Message, number: int) -> str:
    """The text in a field. Empty where it is missing."""
    value = fields.get(number, [b""])[-1]
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def nested(fields: Message, number: int) -> Iterator[Message]:
    """The messages in a field."""
    return (message(value) for value in fields.get(number, ()) if isinstance(value, bytes))


def inner(fields: Message, number: int) -> Message:
    """The message in a field. Without fields where it is missing."""
    return next(nested(fields, number), {})


def integers(fields: Message, number: int) -> list[int]:
    """The numbers in a repeated field, packed or not."""
    numbers: list[int] = []
    for value in fields.get(number, ()):
        at = 0
        while isinstance(value, bytes) and at < len(value):
            unpacked, at = _varint(value, at)
            numbers.append(unpacked)
        numbers += [value] if isinstance(value, int) else []
    return numbers


def signed(number: int) -> int:
    """A number of 64 bits that may be below 0.

    >>> signed(2**64 - 3)
    -3
    """
    return number - 2**64 if number >= 2**63 else number


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
