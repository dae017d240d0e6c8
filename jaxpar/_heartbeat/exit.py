"""How a process ends: it reports to the heartbeat server whether it failed."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from .client import HeartbeatClient
from .server import INTERRUPT_GRACE, INTERRUPTED


class _Exit(SystemExit):
    """What `sys.exit` raises. Its status counts where Python drops it when no code runs any more: nobody caught it."""

    def __init__(self, client: HeartbeatClient, status: Any):
        super().__init__(status)
        self.client, self.code = client, status

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            code = self.code
            self.client.status = code if isinstance(code, int) else int(code is not None)


def watch_exit(client: HeartbeatClient) -> None:
    """Report an uncaught exception, `sys.exit` with a status, or an end without a failure.

    A process that failed ends without jax's shutdown, which would wait minutes for the others.
    """
    show, process = sys.excepthook, os.getpid()

    def on_exception(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if os.getpid() != process:  # a fork has the hook, but is no process of the run
            return show(kind, value, trace)
        interrupt = issubclass(kind, KeyboardInterrupt)
        if not interrupt:
            client.wait_for_loss_report()
        show(kind, value, trace)
        client.report_failure(130 if interrupt else 1, " ".join(f"{kind.__name__}: {value}".split())[:300])

    def on_exit(status: Any = None, /) -> None:
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
            client.server.wait_for_peers(2.0 + INTERRUPT_GRACE * (client.status in INTERRUPTED))
        os._exit(client.status & 0xFF)

    sys.excepthook, sys.exit = on_exception, on_exit
    atexit.register(at_exit)
