"""Heartbeats while this process cannot send them: something holds Python's lock, but the process is healthy.

A large pickle, a regular expression or a C extension may hold the lock for longer than a process may be silent. No
thread of Python runs then. So a small process beside this one has a copy of each connection, and sends the heartbeats
meanwhile. It sends none for a process that is stopped, and ends with its process.

This file is also the program of that process. So it imports nothing of jaxpar, starts at once and stays small.

    python -I -S pulse.py LINK PARENT QUIET MOST

LINK is the descriptor of a socket. Each byte on it is a heartbeat of the process PARENT, and may bring a connection.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time

_HEARTBEAT = b'{"heartbeat": 1}\n'
_INTERVAL = 1.0  # seconds from one heartbeat to the next


class Pulse:
    """The process beside this one. If it cannot or must not start, only Python sends heartbeats."""

    # It sends heartbeats after `quiet` seconds without a `beat`: two were late. After `most` seconds it stops, since a
    # process that holds its lock for so long hangs.

    def __init__(self, quiet: float = 2.5, most: float = 300.0, starts: bool = True):
        self._link: socket.socket | None = None
        # A frozen program has no interpreter to start, and only Linux says in /proc whether a process is stopped.
        if not (starts and sys.platform.startswith("linux") and sys.executable) or getattr(sys, "frozen", False):
            return
        own, other = socket.socketpair()
        with other:
            try:
                program = [sys.executable, "-I", "-S", __file__]
                program += [str(number) for number in (other.fileno(), os.getpid(), quiet, most)]
                silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
                self._process = subprocess.Popen(program, pass_fds=[other.fileno()], **silent)
            except OSError:
                own.close()
                return
        own.setblocking(False)
        self._link = own

    def add(self, sock: socket.socket) -> None:
        """Have heartbeats sent on a connection too, until it is shut down."""
        if (link := self._link) is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(link, [b"+"], [sock.fileno()])

    def beat(self) -> None:
        """Show that Python runs. To be called once a second."""
        if (link := self._link) is not None:  # another thread may close it
            with contextlib.suppress(OSError):
                link.send(b".")

    def close(self) -> None:
        """End the process beside this one."""
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # a fork, such as a worker that loads data, has a copy of it
            link.close()
            self._process.wait()


def main(link: socket.socket, parent: int, quiet: float, most: float) -> None:
    """Send heartbeats on all connections while the process is there, not stopped, and sends none itself."""
    connections: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(link, select.POLLIN)
    last = sent = time.monotonic()
    while os.getppid() == parent:
        for number, _ in poll.poll(500 * min(_INTERVAL, quiet)):
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
        if quiet < now - last < most and now - sent >= min(_INTERVAL, quiet) and _runs(parent):
            sent = now
            for connection in connections.values():
                with contextlib.suppress(OSError):
                    connection.send(_HEARTBEAT, socket.MSG_DONTWAIT)


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
