"""A local proxy for jax's coordination service. It hides a lost connection from jax's client, which would abort.

The service is in process 0. When process 0 is killed, jax's client in every other process aborts within a tenth of a
second, with a C++ stack trace and status 134, before the loss can be reported. Through this proxy, which is in the same
process, the client sees no closed connection. It gives up after its own heartbeat timeout, which is longer than ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from asyncio import StreamReader, StreamWriter
from typing import Any

from .._core.process import daemon
from .connection import split

_CHUNK = 1 << 18
_MOST = 16  # connections at a time; jax's client has one or two
_RETRY = 0.05  # seconds between two attempts: jax's client waits, and a refused connection costs little
_CONNECT_TIMEOUT = 5.0  # seconds: a host that is gone answers nothing
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
        if len(self._silent) > _MOST:
            self._silent.pop(0).close()
        data = await _read(from_client)  # jax's client sends first
        if to_client in self._silent:
            self._silent.remove(to_client)
        if data and self._forwarded < _MOST:
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
                async with asyncio.timeout(_CONNECT_TIMEOUT):
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
