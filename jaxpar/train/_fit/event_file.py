"""TensorBoard's event files, as far as numbers go: records of protocol buffers, each with its checksums.

The formats: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details and the messages Event,
Summary and SessionLog in tensorboard/compat/proto. TensorFlow and tensorboard are not needed to write them.
"""

from __future__ import annotations

import functools
import struct

_START = b"\x08\x01"  # SessionLog(status=START)


def header(time: float, step: int) -> bytes:
    """The beginning of a file: its version, and that it replaces what earlier files say from `step` on."""
    return _record(_event(time, 0, 3, b"brain.Event:2")) + _record(_event(time, step, 7, _START))


def scalars(time: float, step: int, values: dict[str, float]) -> bytes:
    """A record with numbers, float32 in the file, by their tags; `time` is in seconds since 1970.

    >>> len(scalars(0.0, 3, {"loss": 0.5}))
    42
    """
    packed = (_bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", v)) for tag, v in values.items())
    return _record(_event(time, step, 5, b"".join(packed)))


def _event(time: float, step: int, field: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time) + b"\x10" + _varint(step) + _bytes(field, content)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted, since checksums of data that holds checksums would be weak."""
    crc, table = 0xFFFFFFFF, _table()
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _table() -> tuple[int, ...]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return tuple(table)
