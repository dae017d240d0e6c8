"""Several processes on this machine: started together, watched, ended together, started again.

The launcher holds the hub (`_hub`), so it sees a frozen process as well as one that ended. It uses no JAX.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from .._heartbeat.server import INTERRUPTED, MOMENT, SILENCE, HeartbeatServer
from .child import Child, Output, how
from .signals import Signals

_TOLD = 3.0  # seconds in which a process that was told of a loss ends by itself
_LOOK = 0.25  # seconds between two looks at the processes, where no signal came


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to start.

    Attributes:
        command: the program and its arguments.
        processes: how many.
        env: variables for all of them.
        gpus: for each process, the value of CUDA_VISIBLE_DEVICES; empty leaves it alone.
        max_restarts: how often all are started again after a failure.
        min_processes: where given, a restart leaves out those that were lost as long as so many remain.
        port: of the coordinator; None takes a free one, another at each start.
        grace: seconds between SIGTERM and SIGKILL.
        silence: seconds without a beat after which a process counts as frozen.
    """

    command: Sequence[str]
    processes: int
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: Sequence[str] = ()
    max_restarts: int = 0
    min_processes: int | None = None
    port: int | None = None
    grace: float = 30.0
    silence: float = SILENCE


def launch(plan: Plan) -> int:
    """Runs the processes until all have ended in order, or one failed and no restart is left.

    Returns:
        0 where all ended with 0; 128 + signal where the launcher was told to end; else the status of the process
        that failed first (128 + signal where it was killed; a frozen one is killed by SIGKILL: 137).
    """
    output = Output()
    output.start()
    slots, restart = list(range(plan.processes)), 0
    with Signals() as signals:
        while True:
            run = _Run(plan, slots, restart, signals, output)
            status = run.wait()
            if status == 0 or signals.ending or restart == plan.max_restarts:
                break
            restart += 1
            slots = _remaining(plan, slots, run)
            resume = f", from {run.hint}" if run.hint else ""
            number = f"{len(slots)} process{'es' if len(slots) > 1 else ''}"
            output.say(f"restart {restart} of {plan.max_restarts} with {number}{resume}")
    output.finish(5.0 if signals.ending else None)
    return 128 + signals.ending if signals.ending else status


def _remaining(plan: Plan, slots: list[int], run: _Run) -> list[int]:
    """The places that are used again: without the one that was lost, where fewer processes are allowed."""
    if plan.min_processes is None or len(slots) <= plan.min_processes or run.first is None:
        return slots
    return [slot for slot in slots if slot != run.first.slot]


class _Run:
    """One start of all processes, to its end."""

    def __init__(self, plan: Plan, slots: Sequence[int], restart: int, signals: Signals, output: Output):
        self.plan, self.signals, self.output = plan, signals, output
        self.first: Child | None = None  # the one that failed first
        self._deadlines: list[tuple[float, int]] = []  # when to send which signal to those that are left
        self._report_at: float | None = None
        self._why = "the run is being ended"
        self._passed_on, self._seen = False, 0  # whether a signal was passed on, and how many came
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wake, selectors.EVENT_READ, signals.clear)
        listener = socket.create_server(("127.0.0.1", 0))
        job = secrets.token_hex(8)
        self.hub = HeartbeatServer(
            self._selector, listener, job=job, size=len(slots), silence=plan.silence, closed=lambda rank: None
        )
        shared = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **plan.env,
            "JAXPAR_COORDINATOR": f"127.0.0.1:{plan.port or _free_port()}",
            "JAXPAR_NUM_PROCESSES": str(len(slots)),
            "JAXPAR_HUB": f"127.0.0.1:{listener.getsockname()[1]}",
            "JAXPAR_JOB": job,
            "JAXPAR_RESTART": str(restart),
            "JAXPAR_HEARTBEAT_TIMEOUT": f"{plan.silence:g}",
        }
        self.children: list[Child] = []
        for rank, slot in enumerate(slots):
            own = {"JAXPAR_PROCESS_ID": str(rank)}
            if plan.gpus:
                own["CUDA_VISIBLE_DEVICES"] = plan.gpus[slot]
            child = Child(rank, slot, plan.command, {**shared, **own}, output)
            child.register(self._selector)
            self.children.append(child)

    @property
    def hint(self) -> str | None:
        return self.hub.hint

    def wait(self) -> int:
        try:
            while any(child.status is None for child in self.children):
                self._step(_LOOK)
            self._clean()
        finally:
            self._kill()
            self.hub.close()
            self._selector.close()
        return 0 if self.first is None else self.first.status or 1

    def _step(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            key.data()
        self.hub.look()
        self._obey()
        if self.hub.lost is not None and self.first is None:  # silent, or it told that it failed
            self._failed(self.children[self.hub.lost.rank], self.hub.lost.why, told=True)
        for child in self.children:
            if child.poll() and child.status:
                self._failed(child, how(child.status))
        now = time.monotonic()
        if self._report_at is not None and self.first is not None and now >= self._report_at:
            self._report_at = None
            self.hub.report(self.first.rank, self._why)
        while self._deadlines and now > self._deadlines[0][0]:
            self._send(self._deadlines.pop(0)[1])

    def _obey(self) -> None:
        """Passes signals on; a second Ctrl-C ends at once."""
        if self.signals.stopped:
            self.signals.stopped = False
            self._send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(signal.SIGCONT)
        if (self.signals.ending or self.output.broken) and not self._passed_on:
            self.signals.ending = self.signals.ending or signal.SIGPIPE
            number = signal.SIGINT if self.signals.ending == signal.SIGINT else signal.SIGTERM
            self._passed_on, self._seen = True, self.signals.times
            self._send(number)
            self._deadlines = [(time.monotonic() + self.plan.grace, signal.SIGKILL)]
        elif self.signals.times > self._seen:
            self._seen = self.signals.times
            self._send(signal.SIGKILL)

    def _failed(self, child: Child, why: str, told: bool = False) -> None:
        """The first failure ends all: those that listen are told and end by themselves, the others get SIGTERM."""
        if self.first is not None:
            return
        self.first = child
        now = time.monotonic()
        # Where one was interrupted the others may have been, too; one that waits for it cannot end by itself.
        wait = min(MOMENT, self.plan.grace) if self._passed_on or child.status in INTERRUPTED else 0.0
        self._report_at = now + wait
        if self._passed_on:
            return
        self.output.say(f"process {child.rank} (pid {child.process.pid}) failed: {why}; ending the others")
        self._why = why
        listening = set(self.hub.peers)
        if told and child.rank in listening and not self.hub.peers[child.rank].leaving:
            child.signal(signal.SIGKILL)  # frozen
        for other in self.children:
            if other.rank not in listening and not wait:
                other.signal(signal.SIGTERM)
        start = now + wait + (_TOLD if listening else 0.0)
        self._deadlines = [(start, signal.SIGTERM), (start + self.plan.grace, signal.SIGKILL)]

    def _send(self, number: int) -> None:
        for child in self.children:
            if child.status is None:
                child.signal(number)

    def _clean(self) -> None:
        """Reads what is left in the pipes; a process in the background that holds one open is not waited for."""
        if self.first is not None or self._passed_on:
            self._kill()
        end = time.monotonic() + 1.0
        while time.monotonic() < end and not all(child.silent for child in self.children):
            for key, _ in self._selector.select(0.1):
                key.data()

    def _kill(self) -> None:
        """Ends what the processes left behind, after a failure or a signal; nothing after an end in order."""
        if self.first is not None or self._passed_on or any(child.status is None for child in self.children):
            for child in self.children:
                child.signal(signal.SIGKILL)
                child.process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
