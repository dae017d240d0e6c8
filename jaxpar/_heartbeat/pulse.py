"""Heartbeats while this process cannot send them: something holds Python's lock, but the process is healthy.

A large pickle, a regular expression or a C extension may hold the lock for longer than a process may be silent. No
thread of Python runs then. So a small process beside this one has a copy of each connection, and sends the heartbeats
meanwhile. It sends none for a process that is stopped, and ends with its process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

_PROGRAM = Path(__file__).with_name("pulse_process.py")


class Pulse:
    """The process beside this one. Where it cannot be started there is none, and heartbeats are sent by Python only.

    Args:
        quiet: seconds without `beat` after which it sends heartbeats.
        most: seconds after which it does so no longer. A process that holds its lock for so long hangs.
    """

    def __init__(self, quiet: float = 2.5, most: float = 300.0):
        self._link: socket.socket | None = None
        if not sys.platform.startswith("linux") or not sys.executable or getattr(sys, "frozen", False):
            return
        own, other = socket.socketpair()
        with other:
            try:
                numbers = [str(number) for number in (other.fileno(), os.getpid(), quiet, most)]
                none = subprocess.DEVNULL
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_PROGRAM), *numbers],
                    pass_fds=[other.fileno()],
                    stdin=none,
                    stdout=none,
                    stderr=none,
                )
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
        if self._link is not None:
            link, self._link = self._link, None
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # a fork, such as a worker that loads data, has a copy of it
            link.close()
            self._process.wait()
