"""A process that the launcher has started, and its output."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from .._heartbeat import thread

_LONGEST = 1 << 16  # bytes of a line without an end that are held back, such as a bar that is drawn again and again


class Output:
    """Writes to standard output and error in a thread: a pager that stops reading must not stop the launcher."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.is_broken = False  # whether the reader has closed the pipe
        lost = "what the processes print is lost, and the run is ended"
        self._thread = thread.daemon("jaxpar-output", self._run, lost, self._break)
        self._thread.start()

    def _break(self) -> None:
        self.is_broken = True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, rest = item
            while rest and not self.is_broken:
                try:
                    rest = rest[os.write(descriptor, rest) :]
                except OSError:  # the pipe is closed: `| head`
                    self.is_broken = True

    def write(self, descriptor: int, data: bytes) -> None:
        self._queue.put((descriptor, data))

    def say(self, line: str) -> None:
        """Write a line of the launcher's own to standard error."""
        self.write(2, f"jaxpar launch: {line}\n".encode(errors="backslashreplace"))

    def finish(self, seconds: float | None) -> None:
        """Wait until all is written, for `seconds` at most."""
        self._queue.put(None)
        self._thread.join(seconds)


class Stream:
    """A pipe of a child, which the selector reads until its end. Each line is written whole, after a prefix."""

    def __init__(self, pipe: IO[bytes], prefix: str, descriptor: int, output: Output, selector: selectors.BaseSelector):
        self.is_open = True
        self._pipe, self._prefix, self._rest = pipe, prefix.encode(), b""
        self._descriptor, self._output, self._selector = descriptor, output, selector
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self._rest + data).split(b"\n")
        if rest and (not data or len(rest) > _LONGEST):
            lines, rest = [*lines, rest], b""
        self._rest = rest
        if lines:
            self._output.write(self._descriptor, b"".join(self._prefix + line + b"\n" for line in lines))
        if not data:
            self.is_open = False
            self._selector.unregister(self._pipe)
            self._pipe.close()


class Child:
    """A process in a session of its own, so that it can be ended with all that it started."""

    def __init__(
        self,
        rank: int,
        slot: int,
        command: Sequence[str],
        env: Mapping[str, str],
        output: Output,
        selector: selectors.BaseSelector,
    ):
        self.rank = rank  # its number in this start
        self.slot = slot  # its number in the first start, which chooses its GPUs
        self.status: int | None = None  # as a shell would say it, None while it runs
        self.process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._streams = [
            Stream(self.process.stdout, f"[{rank}] ", 1, output, selector),
            Stream(self.process.stderr, f"[{rank}] ", 2, output, selector),
        ]

    def poll(self) -> bool:
        """Update `status` and return whether the process has just ended."""
        if self.status is None and (code := self.process.poll()) is not None:
            self.status = code if code >= 0 else 128 - code
            return True
        return False

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and all that it started. A stopped one is continued to take it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                os.killpg(self.process.pid, signal.SIGCONT)

    @property
    def is_read(self) -> bool:
        return not any(stream.is_open for stream in self._streams)


def describe_status(status: int) -> str:
    """How a process with this exit status ended."""
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(status - 128).name}"
    return f"status {status}"
