"""What each process does about the others: it beats, listens, and ends with one clear line when one is lost.

A collective that waits for a killed process may never raise, so nothing in the main thread can notice; this thread
beside it can. It needs the interpreter lock for a moment each second, so pauses of up to `silence` seconds (a
long trace, a large pickle) do no harm; XLA compiles without the lock.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from .connection import BEAT, AwakeClock, JsonConnection
from .messages import FROM_HUB, Message, printable
from .server import INTERRUPTED, HubThread

LOST = 75  # exit status of a process that ends because another was lost: EX_TEMPFAIL of sysexits.h, "try again"


_WELCOME = 5.0  # seconds in which a hub answers


_NEWS = 1.0  # seconds in which a failing process waits to hear that another failed first


class HeartbeatClient(threading.Thread):
    """The connection of this process to the hub."""

    def __init__(self, rank: int, size: int, *, job: str, silence: float, launched: bool, hub: HubThread | None):
        super().__init__(name="jaxpar-monitor", daemon=True)
        self.rank, self.size, self.job, self.silence = rank, size, job, silence
        self.hub, self._hub_name = hub, "the launcher" if launched else "process 0"
        self.hint: str | None = None
        self.status = 0  # what this process failed with
        self._told = self._left = self._stopped = self._hub_leaves = False
        self._line: JsonConnection | None = None
        self._hub_host = "?"
        self._early: list[Message] = []

    def join_run(self, addresses: list[tuple[str, int]], seconds: float, absent: str) -> None:
        """Connects to the hub at one of the addresses and waits until all are there.

        Raises:
            ConnectionError: nobody there within `seconds` (`absent` says who), or the hub refuses.
        """
        try:
            self._meet(addresses, seconds, absent)
        except BaseException:
            if self._line is not None:
                self._line.close()
            raise
        self.start()

    def _meet(self, addresses: list[tuple[str, int]], seconds: float, absent: str) -> None:
        end = time.monotonic() + seconds
        while self._line is None:
            self._line = self._knock(addresses, seconds)
            if self._line is None and time.monotonic() > end:
                raise ConnectionError(f"{absent} within {seconds:g} seconds")
            time.sleep(0 if self._line else 0.1)
        beaten = 0.0
        while True:  # the hub says which are missing when they do not come, shortly after its own time limit
            self._early += self._line.receive()
            while self._early:
                message = self._early.pop(0)
                if "go" in message:
                    self._hub_host = message["host"]
                    return  # what came with it is for `run`
                if "refused" in message:
                    raise ConnectionError(message["refused"])
                if "lost" in message:
                    self._end(message)
            if self._line.fault is not None:
                raise ConnectionError(f"{self._hub_name} {_rubbish(self._line.fault)}")
            if self._line.closed or time.monotonic() > end + 2 * self.silence:
                raise ConnectionError("the connection to process 0 was closed before all processes were there")
            if time.monotonic() - beaten > BEAT:
                beaten = time.monotonic()
                self._line.send(beat=1)
            self._line.wait(BEAT / 2)

    def run(self) -> None:
        assert self._line is not None
        clock, beaten = AwakeClock(), 0.0
        heard = clock.now
        while not self._stopped:
            self._line.wait(BEAT / 2)
            now = clock.tick()
            messages, self._early = self._early + self._line.receive(), []
            for message in messages:
                self._on_message(message)
            heard = now if messages else heard
            if self._line.fault is not None:
                return self._hub_lost("it " + _rubbish(self._line.fault))
            if self._line.closed:
                return self._hub_lost("its connection closed without a word (killed?)")
            if now - heard > self.silence and not self._left:
                return self._hub_lost(
                    f"no sign of life for {self.silence:g} seconds: it is frozen, or its host is gone"
                )
            if now - beaten >= BEAT:
                beaten = now
                self._line.send(beat=1)
        self._line.close()

    def stop(self) -> None:
        """Leaves, and ends the thread: nobody is watched any more."""
        self.leave()
        self._stopped = True
        self.join()

    def tell_hint(self, hint: str | None) -> None:
        self.hint = None if hint is None else printable(hint)
        if self._line is not None:
            self._line.send(hint=self.hint)

    def fail(self, status: int, why: str) -> None:
        """Tells the others that this process failed by itself.

        Where it was interrupted they probably were, too, and have a moment to end in order.
        """
        self.status = status
        if not self._told:
            self._told = True
            if self._line is not None:
                self._line.send(**{"interrupted" if status in INTERRUPTED else "failed": why})

    def hear(self) -> None:
        """Gives the news time to arrive: a collective that lost its peer may raise before the hub has told so.

        It does not return where this process fails because another was lost: the process ends with one line.
        """
        if not self._told and self.status not in INTERRUPTED:
            time.sleep(_NEWS)

    def leave(self) -> None:
        """Tells the others that this process ends in order: that its connection closes is no loss then."""
        self._left = True
        if self._line is not None:
            self._line.send(leaving=1)

    def _knock(self, addresses: list[tuple[str, int]], patience: float) -> JsonConnection | None:
        for address in addresses:
            try:
                sock = socket.create_connection(address, timeout=2)
            except OSError:
                continue
            line = JsonConnection(sock, FROM_HUB)
            hello = {"job": self.job, "rank": self.rank, "size": self.size, "host": socket.gethostname()}
            line.send(hello=1, patience=patience, **hello)
            line.wait(_WELCOME)
            self._early = line.receive()
            if any({"welcome", "refused"} & set(m) for m in self._early):
                return line
            line.close()  # not our hub: another run, or another service at one of these ports
        return None

    def _on_message(self, message: Message) -> None:
        if "hint" in message:
            self.hint = message["hint"]
        if "closing" in message:
            self._hub_leaves = True
        elif "lost" in message and not self._told:
            self._end(message)

    def _hub_lost(self, why: str) -> None:
        if self._left or self._hub_leaves or self._told:
            return
        self._end({"name": self._hub_name, "host": self._hub_host, "why": why})

    def _end(self, message: Message) -> None:
        name = message.get("name", f"process {message.get('lost')}")
        lost = "is taken for lost by the others" if message.get("lost") == self.rank else "was lost"
        resume = f"resume from {self.hint}" if self.hint else "no checkpoint is known to resume from"
        try:
            last_words(
                f"jaxpar: {name} (host {message['host']}) {lost}: {message['why']}. "
                f"Process {self.rank} of {self.size} ends with status {LOST}; {resume}"
            )
            if self.hub is not None:
                self.hub.linger(2.0)
        finally:
            os._exit(LOST)


def _rubbish(fault: str) -> str:
    return f"sent what is no message of this run: {fault}"


def last_words(line: str) -> None:
    """Writes a line to standard error and flushes both streams, whatever the main thread holds on to."""

    def say() -> None:
        sys.stdout.flush()
        sys.stderr.write(line + "\n")  # in one piece: others write too
        sys.stderr.flush()

    thread = threading.Thread(target=say, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down and starts no thread any more
        return say()
    thread.join(1.0)
    if thread.is_alive():
        os.write(2, line.encode() + b"\n")
