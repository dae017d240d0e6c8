"""The program that `pulse` starts: heartbeats of a process whose Python cannot send them for now.

    python -I -S pulse_process.py LINK PARENT QUIET MOST

LINK is the descriptor of a socket. Each byte on it is a heartbeat of the process PARENT, and may bring a connection.
After QUIET seconds without one this program sends heartbeats, and after MOST seconds it does so no longer: the process
hangs then. It imports nothing of jaxpar, so that it starts at once and stays small.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time

HEARTBEAT = b'{"heartbeat": 1}\n'
INTERVAL = 1.0  # seconds from one heartbeat to the next


def main(link: socket.socket, parent: int, quiet: float, most: float) -> None:
    """Send heartbeats on all connections while the process is there, not stopped, and sends none itself."""
    connections: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(link, select.POLLIN)
    last = sent = time.monotonic()
    while os.getppid() == parent:
        for number, _ in poll.poll(500 * min(INTERVAL, quiet)):
            if number in connections:  # it is closed: nothing else is asked for
                poll.unregister(number)
                connections.pop(number).close()
                continue
            data, descriptors, _, _ = socket.recv_fds(link, 1, 1)
            if not data:
                return
            last = time.monotonic()
            for descriptor in descriptors:
                connections[descriptor] = socket.socket(fileno=descriptor)
                poll.register(descriptor, 0)
        now = time.monotonic()
        if quiet < now - last < most and now - sent >= min(INTERVAL, quiet) and _runs(parent):
            sent = now
            for connection in connections.values():
                with contextlib.suppress(OSError):
                    connection.send(HEARTBEAT, socket.MSG_DONTWAIT)


def _runs(number: int) -> bool:
    """Whether a process is there and not stopped, as far as Linux says."""
    try:
        with open(f"/proc/{number}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"T", b"t", b"Z", b"X")
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with its process
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
