"""How a process ends after another was lost."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from .._heartbeat.client import HeartbeatClient
from .._heartbeat.server import INTERRUPTED, MOMENT


def watch_exit(monitor: HeartbeatClient) -> None:
    """Tells the hub how this process ends: an uncaught exception, `sys.exit` with a status, or in order.

    Where it failed, the process then leaves without jax's shutdown, which would wait minutes for the others.
    """
    show, leave, process = sys.excepthook, sys.exit, os.getpid()

    def on_exception(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if os.getpid() != process:  # a fork of this process has the hook, but is none of the run's processes
            return show(kind, value, trace)
        interrupt = issubclass(kind, KeyboardInterrupt)
        if not interrupt:
            monitor.hear()
        show(kind, value, trace)
        monitor.fail(130 if interrupt else 1, " ".join(f"{kind.__name__}: {value}".split())[:300])

    def on_exit(status: Any = None, /) -> None:
        monitor.status = status if isinstance(status, int) else int(status is not None)
        leave(status)

    def at_exit() -> None:
        if os.getpid() != process:
            return
        if not monitor.status:
            return monitor.leave()
        monitor.hear()
        monitor.fail(monitor.status, f"it ended with status {monitor.status}")
        sys.stdout.flush()
        sys.stderr.flush()
        if monitor.hub is not None:
            monitor.hub.linger(2.0 + MOMENT * (monitor.status in INTERRUPTED))
        os._exit(monitor.status & 0xFF)

    sys.excepthook, sys.exit = on_exception, on_exit
    atexit.register(at_exit)
