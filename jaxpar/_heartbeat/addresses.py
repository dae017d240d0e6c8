"""Addresses of the heartbeat server and of jax's coordination service."""

from __future__ import annotations

import contextlib
import socket


def bind_address(address: str) -> str | None:
    """The address at which jax's service listens. It is None for all interfaces."""
    host, port = split(address)
    return f"127.0.0.1:{port}" if is_loopback(host) else None


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    return host in ("localhost", "::1") or host.startswith("127.")


def own_address() -> str:
    """The address of this machine that others can reach. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("10.255.255.255", 1))
        return probe.getsockname()[0]
    return socket.gethostbyname(socket.gethostname())
