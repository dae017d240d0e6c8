"""The heartbeat client of each process. It ends the process with one line when another is lost.

A collective that waits for a killed process may never return, so the main thread cannot notice the loss. This thread
can. It needs the interpreter lock for a moment each second. `watch_exit` reports how the process itself ends.
"""

from __future__ import annotations

import atexit
import os
import queue
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType

from .._core.process import daemon
from .._core.text import say_before_exit
from . import connection as protocol
from .connection import INTERVAL, LOST, JsonConnection, Message, Secret
from .server import INTERRUPT_GRACE, INTERRUPTED, HeartbeatServer

_CONNECT_TIMEOUT = 2.0  # seconds for one address: of eight ports a firewall may answer none
_WELCOME_TIMEOUT = 5.0  # seconds in which a server answers: it does nothing else
_MISTRUST_TIMEOUT = 15.0  # seconds after which a process with another secret gives up: its own server may come later
_REPORT_TIME = 1.0  # seconds in which the report of a loss arrives
_LAST_MESSAGE_TIME = 2.0  # seconds for which process 0 stays, so that the others read why


class HeartbeatClient:
    """The connection of this process to the heartbeat server. Its thread ends the process after a loss."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        job: str,  # the name of the run
        secret: Secret | None = None,  # None joins only a server without one
        heartbeat_timeout: float,  # seconds without a heartbeat after which the server is lost
        launched: bool,  # the launcher has the server; its silence is no loss, since here it can only be stopped
        server: HeartbeatServer | None = None,  # if it is in this process
    ):
        ends = f"no loss would be noticed, so process {rank} of {size} ends with status {LOST}"
        self.thread = daemon("jaxpar-heartbeat-client", self._run, ends, lambda: os._exit(LOST))
        self.rank, self.size, self.job, self.heartbeat_timeout = rank, size, job, heartbeat_timeout
        self.server, self._server_name, self._server_host = server, "the launcher" if launched else "process 0", "?"
        self.hint: str | None = None  # what the processes resume from
        self.status = 0  # the exit status of this process, if it failed
        self._launched = launched
        self.forget: Callable[[int], None] = lambda rank: None  # has jax forget a lost process; it may not fail
        self._secret, self._mistrust = secret, ""  # why a server that answered is not the one of this run
        self._has_failed = self._is_leaving = self._is_server_closing = False
        self._connection: JsonConnection | None = None
        self.losses: list[int] = []  # in process 0 of an elastic run: who was lost, one after the other
        self._lost = queue.SimpleQueue[int]()  # processes that jax has to forget

    def join_run(self, addresses: list[tuple[str, int]], seconds: float, absent: str) -> None:
        """Connect to the server at one of the addresses, and wait until all processes have joined.

        If no server answers within `seconds`, a `ConnectionError` names `absent`.
        """
        began = time.monotonic()
        end = began + seconds
        try:
            while (connection := self._connect(addresses, seconds)) is None:
                now = time.monotonic()
                if self._mistrust and now > min(end, began + _MISTRUST_TIMEOUT):
                    raise ConnectionError(self._mistrust)
                if now > end:
                    raise ConnectionError(f"{absent} within {seconds:g} seconds")
                time.sleep(0.1)
            self._connection = connection
            # The server names the missing processes shortly after its own time limit.
            self._wait_for_go(connection, end + 2 * self.heartbeat_timeout)
        except BaseException:
            if self._connection is not None:
                self._connection.close()
            raise
        if self.rank == 0:
            ends = f"the others would wait for a lost process, so process 0 ends with status {LOST}"
            daemon("jaxpar-release", self._release, ends, lambda: os._exit(LOST)).start()
        self.thread.start()

    def send_resume_hint(self, hint: str | None) -> None:
        self.hint = None if hint is None else protocol.clean("hint", hint)
        self._send(hint=self.hint)

    def report_failure(self, status: int, why: str) -> None:
        """Report that this process failed by itself."""
        # After an interrupt the others have time to end by themselves, since they were probably interrupted too.
        self.status = status
        if not self._has_failed:
            self._has_failed = True
            self._send(**{"interrupted" if status in INTERRUPTED else "failed": why})

    def report_working(self) -> None:
        self._send(working=1)

    def wait_for_loss_report(self) -> None:
        """Wait one second for a loss report, which ends the process: a collective can raise before it has come."""
        if not self._has_failed and self.status not in INTERRUPTED:
            time.sleep(_REPORT_TIME)

    def leave(self) -> None:
        """Announce a normal end, so that the closed connection does not count as a loss, and end the thread."""
        self._send(leaving=1)
        self._is_leaving = True

    def _send(self, **message: protocol.Field) -> None:
        if self._connection is not None:
            self._connection.send(**message)

    # Joining: a server that answers, both proofs of the secret, and the beginning of the run

    def _connect(self, addresses: list[tuple[str, int]], timeout: float) -> JsonConnection | None:
        """A connection to the server of this run, or None. `timeout` is sent to the server."""
        for address in addresses:
            try:
                sock = socket.create_connection(address, timeout=_CONNECT_TIMEOUT)
            except OSError:
                continue
            connection = JsonConnection(sock, protocol.FROM_SERVER)
            hello = {"job": self.job, "rank": self.rank, "size": self.size, "host": socket.gethostname()}
            connection.send(hello=1, timeout=timeout, **hello)
            if self._is_own_server(connection):
                return connection
            connection.close()  # another run, or another service
        return None

    def _is_own_server(self, connection: JsonConnection) -> bool:
        """Whether the server belongs to this run. With a secret, both sides prove that they know it."""
        first = connection.next_message(_WELCOME_TIMEOUT)
        if "challenge" not in first:
            is_server = "welcome" in first
            if is_server and self._secret is not None:
                connection.send(leaving=1)  # it may be one of this run that was started without
                self._mistrust = f"the server has no secret, and this process has one, in {self._secret.source}"
            return is_server and self._secret is None
        if self._secret is None:
            self._mistrust = (
                f"the server asks for the secret of the run, and this process has none; set {protocol.SECRET}, "
                f"or {protocol.SECRET_FILE} to a file that only you can read, to the same in all processes"
            )
            return False
        answer = protocol.challenge()
        about = ((first["challenge"], answer), self.job, self.rank, self.size)
        connection.send(answer=answer, proof=self._secret.proof("process", *about))
        proof = connection.next_message(_WELCOME_TIMEOUT).get("proof", "")
        if not self._secret.is_proof(proof, "server", *about):
            self._mistrust = f"the server has another secret than the one in {self._secret.source}"
            return False
        return True

    def _wait_for_go(self, connection: JsonConnection, end: float) -> None:
        """Send heartbeats until the server says that the run begins."""
        while True:
            connection.send(heartbeat=1)
            message = connection.next_message(INTERVAL / 2)
            if "go" in message:
                self._server_host = message["host"]
                return  # the thread handles later messages
            if "refused" in message:
                raise ConnectionError(message["refused"])
            if "lost" in message:
                self._end_after_loss(message)
            if not message and connection.fault is not None:
                raise ConnectionError(f"{self._server_name} sent an invalid message: {connection.fault}")
            if (not message and connection.is_closed) or time.monotonic() > end:
                raise ConnectionError("the connection to process 0 was closed before all processes had joined")

    # The threads

    def _run(self) -> None:
        assert self._connection is not None
        try:
            why = self._watch(self._connection)
            if why is not None and not (self._is_leaving or self._is_server_closing or self._has_failed):
                self._end_process(f"{self._server_name} (host {self._server_host}) was lost: {why}")
        finally:
            self._connection.close()

    def _watch(self, connection: JsonConnection) -> str | None:
        """Send and read heartbeats. Return why the server is lost, or None after `leave`."""
        clock, sent = protocol.AwakeClock(), 0.0
        received = clock.now
        while not self._is_leaving:
            connection.wait(INTERVAL / 2)
            now = clock.tick()
            messages = connection.receive()
            for message in messages:
                self._handle(message)
            received = now if messages else received
            if connection.fault is not None:
                return f"it sent an invalid message: {connection.fault}"
            if connection.is_closed:
                return "its connection closed (killed?)"
            if now - received > self.heartbeat_timeout and not self._launched:
                return f"no heartbeat for {self.heartbeat_timeout:g} seconds: it is frozen, or its host is gone"
            if now - sent >= INTERVAL:
                sent = now
                connection.send(heartbeat=1)
        return None

    def _handle(self, message: Message) -> None:
        if "hint" in message:
            self.hint = message["hint"]
        elif "left" in message:
            self.losses.append(message["left"])
            self._lost.put(message["left"])
        elif "closing" in message:
            self._is_server_closing = True
        elif "lost" in message and not self._has_failed:
            self._end_after_loss(message)

    def _release(self) -> None:
        """Have jax forget lost processes, one after the other: it may take long, at the start of a run."""
        while True:
            rank = self._lost.get()
            self.forget(rank)
            self._send(released=rank)

    def _end_after_loss(self, message: Message) -> None:
        lost = "counts as lost" if message["lost"] == self.rank else "was lost"
        self._end_process(f"process {message['lost']} (host {message['host']}) {lost}: {message['why']}")

    def _end_process(self, loss: str) -> None:
        resume = f"resume from {self.hint}" if self.hint else "no checkpoint is known to resume from"
        try:
            say_before_exit(f"jaxpar: {loss}. Process {self.rank} of {self.size} ends with status {LOST}; {resume}")
            if self.server is not None:
                self.server.wait_for_peers(_LAST_MESSAGE_TIME)
        finally:
            os._exit(LOST)


class _Exit(SystemExit):
    """What `sys.exit` raises. Its status counts where Python drops it when no code runs any more: nobody caught it."""

    def __init__(self, client: HeartbeatClient, status: str | int | None):
        super().__init__(status)
        self.client, self.code = client, status

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            code = self.code
            self.client.status = code if isinstance(code, int) else int(code is not None)


def watch_exit(client: HeartbeatClient) -> None:
    """Report an uncaught exception, `sys.exit` with a status, or an end without a failure."""
    # A process that failed ends without jax's shutdown, which would wait minutes for the others.
    show, process = sys.excepthook, os.getpid()

    def on_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:  # a fork has the hook, but is no process of the run
            return show(kind, value, trace)
        interrupt = issubclass(kind, KeyboardInterrupt)
        if not interrupt:
            client.wait_for_loss_report()
        show(kind, value, trace)
        client.report_failure(130 if interrupt else 1, " ".join(f"{kind.__name__}: {value}".split())[:300])

    def on_exit(status: str | int | None = None, /) -> None:
        if os.getpid() != process:
            raise SystemExit(status)
        raise _Exit(client, status)  # in no variable, whose frame would keep it

    def at_exit() -> None:
        if os.getpid() != process:
            return
        if not client.status:
            return client.leave()
        client.wait_for_loss_report()
        client.report_failure(client.status, f"it ended with status {client.status}")
        sys.stdout.flush()
        sys.stderr.flush()
        if client.server is not None:
            client.server.wait_for_peers(_LAST_MESSAGE_TIME + INTERRUPT_GRACE * (client.status in INTERRUPTED))
        os._exit(client.status & 0xFF)

    sys.excepthook, sys.exit = on_exception, on_exit
    atexit.register(at_exit)
