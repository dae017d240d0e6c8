"""The heartbeat client of each process. It ends the process with one line when another is lost.

A collective that waits for a killed process may never return, so the main thread cannot notice the loss. A thread of
the client can. It needs the interpreter lock for a moment each second. `watch_end` tells the others how this process
itself ends, and `ServiceProxy` hides the death of process 0 from jax, which would otherwise end this process first.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import queue
import socket
import sys
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

from .._core.process import daemon
from .._core.text import say_before_exit
from .server import (
    FROM_SERVER,
    INTERRUPT_GRACE,
    INTERRUPTED,
    INTERVAL,
    LOST,
    SECRET,
    SECRET_FILE,
    AwakeClock,
    Field,
    HeartbeatServer,
    JsonConnection,
    Message,
    Secret,
    challenge,
    clean,
    split,
)

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
        self.rank, self.size, self.job, self.heartbeat_timeout = rank, size, job, heartbeat_timeout
        self.is_launched, self.server = launched, server
        ends = f"no loss would be noticed, so process {rank} of {size} ends with status {LOST}"
        self.thread = daemon("jaxpar-heartbeat-client", self._run, ends, lambda: os._exit(LOST))
        self._secret, self._mistrust = secret, ""  # why a server that answered is not the one of this run
        self._connection: JsonConnection | None = None

        # What the server says.
        self._server_name, self._server_host = "the launcher" if launched else "process 0", "?"
        self.hint: str | None = None  # what the processes resume from
        self._is_server_closing = self._is_peer_interrupted = False

        # How this process ends.
        self.status = 0  # its exit status, if it failed
        self._has_failed = self._is_leaving = False

        # In process 0 of an elastic run.
        self.losses: list[int] = []  # who was lost, one after the other
        self._lost = queue.SimpleQueue[int]()  # the same, until jax has forgotten them
        self.forget: Callable[[int], None] = lambda rank: None  # has jax forget one; it may not fail

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

            # Heartbeats until the server says that the run begins. It names the missing processes shortly after its own
            # time limit. Messages after that one are read by the thread.
            end += 2 * self.heartbeat_timeout
            while True:
                connection.send(heartbeat=1)
                message = connection.next_message(INTERVAL / 2)
                if "go" in message:
                    self._server_host = message["host"]
                    break
                if "refused" in message:
                    raise ConnectionError(message["refused"])
                if "lost" in message:
                    self._end_after_loss(message)
                if not message and connection.fault is not None:
                    raise ConnectionError(f"{self._server_name} sent an invalid message: {connection.fault}")
                if (not message and connection.is_closed) or time.monotonic() > end:
                    raise ConnectionError("the connection to process 0 was closed before all processes had joined")
        except BaseException:
            if self._connection is not None:
                self._connection.close()
            raise
        if self.rank == 0:
            ends = f"the others would wait for a lost process, so process 0 ends with status {LOST}"
            daemon("jaxpar-release", self._release, ends, lambda: os._exit(LOST)).start()
        self.thread.start()

    def send_resume_hint(self, hint: str | None) -> None:
        self.hint = None if hint is None else clean("hint", hint)
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
            if self._is_peer_interrupted:  # which is reported later
                time.sleep(INTERRUPT_GRACE)

    def leave(self) -> None:
        """Announce a normal end, so that the closed connection does not count as a loss, and end the thread."""
        self._send(leaving=1)
        self._is_leaving = True

    def _send(self, **message: Field) -> None:
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
            connection = JsonConnection(sock, FROM_SERVER)
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
                f"the server asks for the secret of the run, and this process has none; set {SECRET}, "
                f"or {SECRET_FILE} to a file that only you can read, to the same in all processes"
            )
            return False
        answer = challenge()
        about = ((first["challenge"], answer), self.job, self.rank, self.size)
        connection.send(answer=answer, proof=self._secret.proof("process", *about))
        proof = connection.next_message(_WELCOME_TIMEOUT).get("proof", "")
        if not self._secret.is_proof(proof, "server", *about):
            self._mistrust = f"the server has another secret than the one in {self._secret.source}"
            return False
        return True

    # The threads

    def _run(self) -> None:
        """Send and read heartbeats. After a loss, also of the server, the process ends here."""
        connection = self._connection
        assert connection is not None
        server_lost: str | None = None  # why
        clock, sent = AwakeClock(), 0.0
        received = clock.now
        try:
            while server_lost is None and not self._is_leaving:
                # 1. What the server says.
                connection.wait(INTERVAL / 2)
                now = clock.tick()
                messages = connection.receive()
                received = now if messages else received
                for message in messages:
                    if "hint" in message:
                        self.hint = message["hint"]
                    elif "left" in message:
                        self.losses.append(message["left"])
                        self._lost.put(message["left"])
                    elif "closing" in message:
                        self._is_server_closing = True
                    elif "interrupted" in message:
                        self._is_peer_interrupted = True
                    elif "lost" in message and not self._has_failed:
                        self._end_after_loss(message)

                # 2. Whether it is still there. The launcher's silence is no loss, see `launched`.
                if connection.fault is not None:
                    server_lost = f"it sent an invalid message: {connection.fault}"
                elif connection.is_closed:
                    server_lost = "its connection closed (killed?)"
                elif now - received > self.heartbeat_timeout and not self.is_launched:
                    server_lost = (
                        f"no heartbeat for {self.heartbeat_timeout:g} seconds: it is frozen, or its host is gone"
                    )

                # 3. A heartbeat of this process.
                elif now - sent >= INTERVAL:
                    sent = now
                    connection.send(heartbeat=1)
            if server_lost is not None and not (self._is_leaving or self._is_server_closing or self._has_failed):
                self._end_process(f"{self._server_name} (host {self._server_host}) was lost: {server_lost}")
        finally:
            connection.close()

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


def watch_end(client: HeartbeatClient) -> None:
    """Have the others learn how this process ends, and end it at once where it failed.

    | the end | who tells the others |
    |---|---|
    | the main program is over | `at_exit`: a goodbye, so that the closed connection is no loss |
    | an exception that nobody catches | `on_exception` says which |
    | `sys.exit` or `raise SystemExit` with a status | the launcher, which sees it. Without one, `at_exit` |
    | a signal, `os._exit`, a crash | the launcher. Without one, the connection that closes |
    | frozen, or its host is gone | nobody: the heartbeats end |
    """
    # A process that failed ends by os._exit: jax's own shutdown would wait minutes for the others, which wait for this
    # process in a collective.
    show, process = sys.excepthook, os.getpid()

    def is_in_run() -> bool:
        # In another thread an exit ends that thread only, and a fork is no process of the run.
        return threading.current_thread() is threading.main_thread() and os.getpid() == process

    def note(status: object) -> None:
        client.status = status & 0xFF if isinstance(status, int) else int(status is not None)

    # Python calls no hook where a SystemExit ends the program. From 3.12 on `sys.monitoring` says what leaves the
    # outermost frame. 3 and 4 are the numbers that Python leaves to tools such as this one.
    tool = None
    if sys.version_info >= (3, 12):
        tool = next((number for number in (4, 3) if sys.monitoring.get_tool(number) is None), None)
    if sys.version_info >= (3, 12) and tool is not None:

        def on_unwind(code: CodeType, offset: int, error: BaseException) -> None:
            if isinstance(error, SystemExit) and is_in_run():
                frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
                if frame.f_back is None:
                    note(error.code)

        sys.monitoring.use_tool_id(tool, "jaxpar")
        sys.monitoring.register_callback(tool, sys.monitoring.events.PY_UNWIND, on_unwind)
        sys.monitoring.set_events(tool, sys.monitoring.events.PY_UNWIND)
    else:

        class Exit(SystemExit):
            """What `sys.exit` raises here. Python reads its `code` if nobody catches it: then no frame is left."""

            @property
            def code(self) -> str | int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
                frame = inspect.currentframe()
                if frame is not None and frame.f_back is None:
                    note(self.args[0])
                return self.args[0]

        def sys_exit(status: str | int | None = None, /) -> None:
            raise Exit(status) if is_in_run() else SystemExit(status)

        sys.exit = sys_exit

    def on_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process or hasattr(sys, "ps1"):  # at a prompt the process goes on
            return show(kind, value, trace)
        is_interrupt = issubclass(kind, KeyboardInterrupt)
        if not is_interrupt:
            client.wait_for_loss_report()
        show(kind, value, trace)
        one_line = " ".join(str(value).split())
        why = f"{kind.__name__}: {one_line}" if one_line else kind.__name__
        client.report_failure(130 if is_interrupt else 1, why[:300])

    def at_exit() -> None:
        if os.getpid() != process:
            return
        if client.status == 0:
            return client.leave()
        client.wait_for_loss_report()
        if not client.is_launched:
            client.report_failure(client.status, f"status {client.status}")
        sys.stdout.flush()
        sys.stderr.flush()
        if client.server is not None:
            client.server.wait_for_peers(_LAST_MESSAGE_TIME + INTERRUPT_GRACE * (client.status in INTERRUPTED))
        os._exit(client.status)

    sys.excepthook = on_exception
    atexit.register(at_exit)


# The proxy for jax's coordination service, which is in process 0. When process 0 is killed, jax's client in every other
# process aborts within a tenth of a second, with a C++ stack trace and status 134, before the loss can be reported.
# Through this proxy, which is in the same process, the client sees no closed connection. It gives up after its own
# heartbeat timeout, which is longer than ours.

_CHUNK = 1 << 18
_MOST_PROXIED = 16  # connections at a time; jax's client has one or two
_RETRY = 0.05  # seconds between two attempts: jax's client waits, and a refused connection costs little
_SERVICE_TIMEOUT = 5.0  # seconds: a host that is gone answers nothing
_END = 5.0  # seconds which the service has to end after its client has


class ServiceProxy:
    """A listener at `address` on this host that forwards each connection to `target`. Both are "host:port"."""

    def __init__(self, target: str):
        self._target = split(target)
        self._silent: list[StreamWriter] = []  # connections that have sent nothing yet, the oldest first
        self._forwarded = 0  # how many others there are
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        consequence = "jax cannot connect to process 0 again"
        self.thread = daemon("jaxpar-proxy", lambda: asyncio.run(self._serve(listener)), consequence, listener.close)
        self.thread.start()

    async def _serve(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().set_exception_handler(_report)
        server = await asyncio.start_server(self._admit, sock=listener)
        await server.serve_forever()

    async def _admit(self, from_client: StreamReader, to_client: StreamWriter) -> None:
        """Forward a connection once it has sent something. Until then it makes room for newer ones."""
        self._silent.append(to_client)
        if len(self._silent) > _MOST_PROXIED:
            self._silent.pop(0).close()
        data = await _read(from_client)  # jax's client sends first
        if to_client in self._silent:
            self._silent.remove(to_client)
        if data and self._forwarded < _MOST_PROXIED:
            self._forwarded += 1
            try:
                await self._forward(data, from_client, to_client)
            finally:
                self._forwarded -= 1
        to_client.close()

    async def _forward(self, data: bytes, from_client: StreamReader, to_client: StreamWriter) -> None:
        """Forward both directions until the client ends. The end of the service is never forwarded."""
        while True:  # the service may start later
            try:
                async with asyncio.timeout(_SERVICE_TIMEOUT):
                    from_service, to_service = await asyncio.open_connection(*self._target)
                break
            except (OSError, RuntimeError):  # RuntimeError: at its end, Python starts no thread that looks up a host
                if from_client.at_eof() or to_client.is_closing():
                    return
                await asyncio.sleep(_RETRY)
        answers = asyncio.create_task(_copy(from_service, to_client))
        to_service.write(data)
        await _copy(from_client, to_service)
        with contextlib.suppress(OSError):
            to_service.write_eof()
        await asyncio.wait([answers], timeout=_END)
        answers.cancel()
        to_service.close()


async def _copy(source: StreamReader, drain: StreamWriter) -> None:
    """Copy from `source` until its end. What `drain` no longer takes is dropped."""
    while data := await _read(source):
        if not drain.is_closing():
            with contextlib.suppress(OSError):
                drain.write(data)
                await drain.drain()


async def _read(source: StreamReader) -> bytes:
    try:
        return await source.read(_CHUNK)
    except OSError:
        return b""


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what went wrong, but for sockets: where descriptors are used up, asyncio listens again a second later."""
    if not isinstance(context.get("exception", OSError()), OSError):
        loop.default_exception_handler(context)
