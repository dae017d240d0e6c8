"""The heartbeat client of each process. It ends the process with one line when another is lost.

A collective that waits for a killed process may never return, so the main thread cannot notice the loss. This thread
can. It needs the interpreter lock for a moment each second. While something else holds the lock, `pulse` sends the
heartbeats.
"""

from __future__ import annotations

import os
import socket
import time

from .._core.text import for_terminal, say_before_exit
from .connection import INTERVAL, AwakeClock, JsonConnection
from .messages import FROM_SERVER, LONGEST, LOST, Message
from .pulse import Pulse
from .releases import Releases
from .secret import FILE_VARIABLE, VARIABLE, Secret, challenge, is_equal
from .server import INTERRUPTED
from .server_thread import ServerThread
from .thread import daemon

_WELCOME_TIMEOUT = 5.0  # seconds in which a server answers
_MISTRUST_TIMEOUT = 15.0  # seconds after which a process with another secret than the server's gives up
_REPORT_TIME = 1.0  # seconds in which the report of a loss arrives


class HeartbeatClient:
    """The connection of this process to the heartbeat server.

    Args:
        rank, size: which process this is, of how many.
        job: the name of the run.
        secret: of the run. None joins only a server without one.
        heartbeat_timeout: seconds without a heartbeat after which the server is lost.
        launched: whether the server is in the launcher. Its silence is no loss: on this machine it can only be stopped.
        server: the server's thread, if it is in this process.
        pulse: gets the connection, and ends with it.
        releases: has jax forget lost processes, in process 0 of an elastic run.

    Attributes:
        hint: what the processes resume from, or None.
        status: the exit status of this process, if it failed. Else 0.
        thread: sends and reads heartbeats until `stop`. A loss ends the process.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        job: str,
        secret: Secret | None = None,
        heartbeat_timeout: float,
        launched: bool,
        server: ServerThread | None = None,
        pulse: Pulse | None = None,
        releases: Releases | None = None,
    ):
        ends = f"no loss would be noticed, so process {rank} of {size} ends with status {LOST}"
        self.thread = daemon("jaxpar-heartbeat-client", self._run, ends, lambda: os._exit(LOST))
        self.rank, self.size, self.job, self.heartbeat_timeout = rank, size, job, heartbeat_timeout
        self.server, self._server_name, self._server_host = server, "the launcher" if launched else "process 0", "?"
        self.hint: str | None = None
        self.status = 0
        self._pulse, self._releases, self._launched = pulse, releases, launched
        self._secret, self._mistrust = secret, ""  # why a server that answered is not the one of this run
        self._has_failed = self._is_leaving = self._is_stopped = self._is_server_closing = False
        self._connection: JsonConnection | None = None
        self._unhandled: list[Message] = []

    def join_run(self, addresses: list[tuple[str, int]], seconds: float, absent: str) -> None:
        """Connect to the server at one of the addresses, and wait until all processes have joined.

        Args:
            addresses: host and port of each.
            seconds: how long to wait for the server.
            absent: the message where no server answers, without the seconds.

        Raises:
            ConnectionError: no server answers within `seconds`, or the server refuses this process.
        """
        began = time.monotonic()
        end = began + seconds
        try:
            while self._connection is None:
                self._connection = self._connect(addresses, seconds)
                now = time.monotonic()
                if self._connection is None and self._mistrust and now > min(end, began + _MISTRUST_TIMEOUT):
                    raise ConnectionError(self._mistrust)
                if self._connection is None and now > end:
                    raise ConnectionError(f"{absent} within {seconds:g} seconds")
                time.sleep(0 if self._connection else 0.1)
            # The server names the missing processes shortly after its own time limit.
            self._wait_for_go(self._connection, end + 2 * self.heartbeat_timeout)
        except BaseException:
            if self._connection is not None:
                self._connection.close()
            self._end_pulse()
            raise
        if self._pulse is not None:
            self._pulse.add(self._connection.sock)
        self.thread.start()

    def _run(self) -> None:
        assert self._connection is not None
        try:
            if (why := self._watch(self._connection)) is not None:
                self._end_without_server(why)
        finally:
            self._connection.close()
            self._end_pulse()

    def _end_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.close()

    def _watch(self, connection: JsonConnection) -> str | None:
        """Send and read heartbeats. Return why the server is lost, or None after `stop`."""
        clock, sent = AwakeClock(), 0.0
        received = clock.now
        while not self._is_stopped:
            connection.wait(INTERVAL / 2)
            now = clock.tick()
            messages, self._unhandled = self._unhandled + connection.receive(), []
            for message in messages:
                self._handle(message)
            received = now if messages else received
            if connection.fault is not None:
                return f"it {_describe_fault(connection.fault)}"
            if connection.is_closed:
                return "its connection closed (killed?)"
            if now - received > self.heartbeat_timeout and not (self._is_leaving or self._launched):
                return f"no heartbeat for {self.heartbeat_timeout:g} seconds: it is frozen, or its host is gone"
            if now - sent >= INTERVAL:
                sent = now
                connection.send(heartbeat=1)
                if self._pulse is not None:
                    self._pulse.beat()
        return None

    def stop(self) -> None:
        """Leave the run and end this thread."""
        self.leave()
        self._is_stopped = True
        self.thread.join()

    def send_resume_hint(self, hint: str | None) -> None:
        """Send all processes what to resume from."""
        self.hint = None if hint is None else for_terminal(hint)[:LONGEST]
        if self._connection is not None:
            self._connection.send(hint=self.hint)

    def report_failure(self, status: int, why: str) -> None:
        """Report that this process failed by itself.

        After an interrupt the others have time to end by themselves, since they were probably interrupted too.
        """
        self.status = status
        if not self._has_failed:
            self._has_failed = True
            if self._connection is not None:
                self._connection.send(**{"interrupted" if status in INTERRUPTED else "failed": why})

    def report_working(self) -> None:
        """Report that this process does its work."""
        if self._connection is not None:
            self._connection.send(working=1)

    def wait_for_loss_report(self) -> None:
        """Wait one second for a loss report: a collective can raise before the server has sent it.

        It does not return where another process was lost. The process then ends with one line.
        """
        if not self._has_failed and self.status not in INTERRUPTED:
            time.sleep(_REPORT_TIME)

    def leave(self) -> None:
        """Announce that this process ends without a failure. Its closed connection is no loss then."""
        self._is_leaving = True
        if self._connection is not None:
            self._connection.send(leaving=1)
        self._end_pulse()  # nobody waits for heartbeats any more

    def _connect(self, addresses: list[tuple[str, int]], timeout: float) -> JsonConnection | None:
        """A connection to the server of this run, or None. `timeout` is sent to the server."""
        for address in addresses:
            try:
                sock = socket.create_connection(address, timeout=2)
            except OSError:
                continue
            connection = JsonConnection(sock, FROM_SERVER)
            hello = {"job": self.job, "rank": self.rank, "size": self.size, "host": socket.gethostname()}
            connection.send(hello=1, timeout=timeout, **hello)
            if self._is_own_server(connection):
                return connection
            connection.close()  # another run, or another service
        return None

    def _is_own_server(self, connection: JsonConnection) -> bool:
        """Whether the server is the one of this run. Both prove that they know the secret, where there is one."""
        messages = _next_messages(connection)
        first = messages[0] if messages else {}
        if "challenge" not in first:
            self._unhandled = messages
            is_server = any({"welcome", "refused"} & set(message) for message in messages)
            if is_server and self._secret is not None:
                connection.send(leaving=1)  # it may be one of this run that was started without
                self._mistrust = f"the server has no secret, and this process has one, in {self._secret.source}"
            return is_server and self._secret is None
        if self._secret is None:
            self._mistrust = (
                f"the server asks for the secret of the run, and this process has none; set {VARIABLE}, or "
                f"{FILE_VARIABLE} to a file that only you can read, to the same in all processes"
            )
            return False
        own = challenge()
        about = ((first["challenge"], own), self.job, self.rank, self.size)
        connection.send(answer=own, proof=self._secret.proof("process", *about))
        messages = _next_messages(connection)
        proof = messages.pop(0).get("proof", "") if messages else ""
        if not is_equal(proof, self._secret.proof("server", *about)):
            self._mistrust = f"the server has another secret than the one in {self._secret.source}"
            return False
        self._unhandled = messages
        return True

    def _wait_for_go(self, connection: JsonConnection, end: float) -> None:
        """Send heartbeats until the server says that the run begins."""
        sent = 0.0
        while True:
            self._unhandled += connection.receive()
            while self._unhandled:
                message = self._unhandled.pop(0)
                if "go" in message:
                    self._server_host = message["host"]
                    return  # later messages are for `run`
                if "refused" in message:
                    raise ConnectionError(message["refused"])
                if "lost" in message:
                    self._end_process(message)
            if connection.fault is not None:
                raise ConnectionError(f"{self._server_name} {_describe_fault(connection.fault)}")
            if connection.is_closed or time.monotonic() > end:
                raise ConnectionError("the connection to process 0 was closed before all processes had joined")
            if time.monotonic() - sent > INTERVAL:
                sent = time.monotonic()
                connection.send(heartbeat=1)
            connection.wait(INTERVAL / 2)

    def _handle(self, message: Message) -> None:
        if "hint" in message:
            self.hint = message["hint"]
        elif "left" in message:
            self._release(message["left"])
        elif "closing" in message:
            self._is_server_closing = True
        elif "lost" in message and not self._has_failed:
            self._end_process(message)

    def _release(self, rank: int) -> None:
        """Have jax forget a lost process, and say so."""
        assert self._connection is not None
        send = self._connection.send
        forget = self._releases.add if self._releases else lambda rank, done: done(rank)
        forget(rank, lambda rank: send(released=rank))

    def _end_without_server(self, why: str) -> None:
        if not (self._is_leaving or self._is_server_closing or self._has_failed):
            self._end_process({"name": self._server_name, "host": self._server_host, "why": why})

    def _end_process(self, message: Message) -> None:
        """End this process with one line on standard error and status 75."""
        name = message.get("name", f"process {message.get('lost')}")
        lost = "is taken for lost by the others" if message.get("lost") == self.rank else "was lost"
        resume = f"resume from {self.hint}" if self.hint else "no checkpoint is known to resume from"
        try:
            say_before_exit(
                f"jaxpar: {name} (host {message['host']}) {lost}: {message['why']}. "
                f"Process {self.rank} of {self.size} ends with status {LOST}; {resume}"
            )
            if self.server is not None:
                self.server.wait_for_peers(2.0)
        finally:
            os._exit(LOST)


def _next_messages(connection: JsonConnection) -> list[Message]:
    """The messages that come next, within five seconds. None where the connection ends or nothing comes."""
    end = time.monotonic() + _WELCOME_TIMEOUT
    while not connection.is_closed and (left := end - time.monotonic()) > 0:
        connection.wait(left)
        if messages := connection.receive():
            return messages
    return []


def _describe_fault(fault: str) -> str:
    return f"sent an invalid message: {fault}"
