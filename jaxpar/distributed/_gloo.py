"""How the processes of an elastic run connect by Gloo, and how they give that up.

For each device of a group Gloo writes an address to jax's key-value store, with a number for each other device. It
waits 30 seconds for the address of another device, and then up to 150 seconds for a connection from there. A loss does
not end these waits, and no option shortens them. So process 0 ends them: it writes an empty address where one is
missing, and connects to those that are there in the place of the others, and hangs up. Then Gloo raises.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Callable, Generator, Sequence

import jax

from .._core.process import daemon
from .._core.text import say
from ._runtime import Client

_KEYS = "cpu:gloo"  # the beginning of the names, before the ids of the devices of a group
_POLL = 0.2  # seconds between two looks
_SLOW = 10  # looks after which it is said that the processes still connect
_TIMEOUT = 1.0  # seconds for a connection
_SIZE = struct.Struct("N")  # what precedes a text: its length
_NUMBER = 8  # bytes
_NO_ADDRESS = _SIZE.pack(0) * 2  # an empty name and an empty address, for which Gloo raises


def forget_group(client: Client, ids: Sequence[int]) -> None:
    """Forget how an earlier process with these devices connected."""
    client.key_value_delete(f"{_KEYS}/{_name(ids)}")


@contextlib.contextmanager
def connecting(client: Client, ids: Sequence[int], should_end: Callable[[], bool]) -> Generator[None]:
    """A block in which the processes connect the devices with these ids. They give up where `should_end`.

    `client` is a connection to jax's coordination service. Only process 0 makes this call.
    """
    is_done, made = threading.Event(), set[tuple[bytes, bytes]]()

    def watch() -> None:
        looks = 0
        while not is_done.wait(_POLL):
            looks += 1
            if should_end():
                _end_waits(client, ids, made)
            elif looks == _SLOW:
                say(f"the processes need more than {_SLOW * _POLL:g} seconds to connect and to take the state")

    thread = daemon("jaxpar-connecting", watch, "a loss while the processes connect may cost 150 seconds")
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _end_waits(client: Client, ids: Sequence[int], made: set[tuple[bytes, bytes]]) -> None:
    """End what Gloo waits for in a group. `made` are the connections that were made already, and get the new ones."""
    folder = f"{_KEYS}/{_name(ids)}/"
    addresses: dict[str, bytes] = dict(client.key_value_dir_get_bytes(folder))
    for device in range(len(ids)):
        if (text := addresses.get(f"{folder}{device}")) is None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # it has come meanwhile, and is read next time
                client.key_value_set_bytes(f"{folder}{device}", _NO_ADDRESS)
            continue
        # A lost process does not answer, and a stranger may have written what is no address.
        with contextlib.suppress(OSError, ValueError, OverflowError, struct.error):
            address, numbers = _parse(text)
            for number in (number for other, number in enumerate(numbers) if other != device):
                if (text, number) not in made:  # Gloo keeps a connection for which it does not wait
                    made.add((text, number))
                    with socket.create_connection(address, timeout=_TIMEOUT) as connection:
                        connection.sendall(number)


def _parse(text: bytes) -> tuple[tuple[str, int], list[bytes]]:
    """The address of a device, and the numbers by which the others say who they are."""
    at = _SIZE.size + _SIZE.unpack_from(text)[0]  # after the name of the host
    (length,) = _SIZE.unpack_from(text, at)
    at += _SIZE.size
    end = at + length
    # It begins with a sockaddr: the family, the port, and the address. In that of IPv6 four bytes come between.
    family, port = int.from_bytes(text[at : at + 2], sys.byteorder), int.from_bytes(text[at + 2 : at + 4], "big")
    host = text[at + 4 : at + 8] if family == socket.AF_INET else text[at + 8 : at + 24]
    numbers = [text[i : i + _NUMBER] for i in range(end, len(text), _NUMBER)]
    return (socket.inet_ntop(family, host), port), numbers


def _name(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
