"""One process that the launcher has started, and what it prints."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

_LONGEST = 1 << 16  # bytes of a line without an end that are held back


class Output(threading.Thread):
    """Writes to standard output and error in a thread: a pager that stops reading must not stop the launcher."""

    def __init__(self) -> None:
        super().__init__(name="jaxpar-output", daemon=True)
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.broken = False

    def run(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, rest = item
            while rest and not self.broken:
                try:
                    rest = rest[os.write(descriptor, rest) :]
                except OSError:  # nobody reads any more: `| head`
                    self.broken = True

    def write(self, descriptor: int, data: bytes) -> None:
        self._queue.put((descriptor, data))

    def say(self, line: str) -> None:
        self.write(2, f"jaxpar launch: {line}\n".encode(errors="backslashreplace"))

    def finish(self, seconds: float | None) -> None:
        self._queue.put(None)
        self.join(seconds)


class Stream:
    """A pipe of a child; each line of it goes on with the rank in front, whole and alone."""

    def __init__(self, pipe: IO[bytes], prefix: str, write: Callable[[bytes], None]):
        os.set_blocking(pipe.fileno(), False)
        self.pipe, self.open = pipe, True
        self._prefix, self._write, self._rest = prefix.encode(), write, b""

    def read(self) -> None:
        """Takes what is there; `open` is False from the end on."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self._rest + data).split(b"\n")
        if rest and (not data or len(rest) > _LONGEST):
            lines, rest = [*lines, rest], b""
        self._rest = rest
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))
        self.open = bool(data)


class Child:
    """A process in a session of its own, so that it can be ended with all that it started."""

    def __init__(self, rank: int, slot: int, command: Sequence[str], env: Mapping[str, str], output: Output):
        self.rank, self.slot, self.status = rank, slot, None
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
        self.streams = [
            Stream(self.process.stdout, f"[{rank}] ", lambda data: output.write(1, data)),
            Stream(self.process.stderr, f"[{rank}] ", lambda data: output.write(2, data)),
        ]

    status: int | None

    def poll(self) -> bool:
        """Whether it has just ended; `status` is then what a shell would say."""
        if self.status is None and (code := self.process.poll()) is not None:
            self.status = code if code >= 0 else 128 - code
            return True
        return False

    def signal(self, number: int) -> None:
        """Sends a signal to the process and all that it started; a stopped one is woken to take it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                os.killpg(self.process.pid, signal.SIGCONT)

    def register(self, selector: selectors.BaseSelector) -> None:
        for stream in self.streams:
            selector.register(stream.pipe, selectors.EVENT_READ, lambda stream=stream: self._read(stream, selector))

    def _read(self, stream: Stream, selector: selectors.BaseSelector) -> None:
        stream.read()
        if not stream.open:
            selector.unregister(stream.pipe)
            stream.pipe.close()

    @property
    def silent(self) -> bool:
        """Whether all that it printed has been read."""
        return not any(stream.open for stream in self.streams)


def how(status: int) -> str:
    """In words: how a process with this status ended."""
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(status - 128).name}"
    return f"status {status}"
