"""The launcher: starts several processes on this machine, ends them after a failure, starts them again.

It holds the heartbeat server, so it notices a frozen process too.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from .._core.signals import Signals
from .._heartbeat import secret
from .._heartbeat.elastic_server import ElasticServer
from .._heartbeat.messages import REFUSED
from .._heartbeat.server import HEARTBEAT_TIMEOUT, INTERRUPT_GRACE, INTERRUPTED, HeartbeatServer
from .child import Child, Output, describe_status
from .deaths import Deaths

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)  # the last one where the output is closed
_EXIT_TIME = 3.0  # seconds in which a process ends by itself after a loss report
_START_AGAIN = 1.0  # seconds from the loss of a process to its next start
_POLL_INTERVAL = 0.25  # seconds between two checks of the processes without a signal


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to start.

    Attributes:
        command: the program and its arguments.
        processes: how many.
        env: variables for all of them.
        gpus: for each process, the value of CUDA_VISIBLE_DEVICES. Empty leaves the variable as it is.
        max_restarts: how often all are started again after a failure.
        min_processes: a restart leaves out the process that was lost, down to this many. None leaves out none.
        port: of the coordinator. None takes a free one, another at each start.
        grace: seconds between SIGTERM and SIGKILL.
        heartbeat_timeout: seconds without a heartbeat after which a process counts as frozen.
        elastic: whether the others go on after the loss of a process other than 0, which is started again by itself.
    """

    command: Sequence[str]
    processes: int
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: Sequence[str] = ()
    max_restarts: int = 0
    min_processes: int | None = None
    port: int | None = None
    grace: float = 30.0
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    elastic: bool = False


def launch(plan: Plan) -> int:
    """Run the processes until all have ended with 0, or one failed and no restart is left.

    Returns:
        0 where all ended with 0. 128 + signal where a signal ended the launcher. Else the status of the process that
        failed first: 128 + signal where it was killed, 137 where it was frozen.
    """
    output = Output()
    output.start()
    slots, restart = list(range(plan.processes)), 0
    with Signals((*_ENDING[:3], signal.SIGTSTP, signal.SIGCHLD), wakes=True) as signals:
        while True:
            run = _Run(plan, slots, restart, signals, output)
            status = run.wait()
            if status == 0 or _endings(signals) or restart == plan.max_restarts:
                break
            restart += 1
            slots = _slots_left(plan, slots, run)
            resume = f", from {run.server.hint}" if run.server.hint else ""
            number = f"{len(slots)} process{'es' if len(slots) > 1 else ''}"
            output.say(f"restart {restart} of {plan.max_restarts} with {number}{resume}")
    endings = _endings(signals)
    output.finish(5.0 if endings else None)
    return 128 + endings[0] if endings else status


def _endings(signals: Signals) -> list[int]:
    """The signals so far that end the run."""
    return [number for number in signals.received if number in _ENDING]


def _slots_left(plan: Plan, slots: list[int], run: _Run) -> list[int]:
    """The slots of the next start. It is without the process that was lost where fewer are allowed."""
    if plan.min_processes is None or len(slots) <= plan.min_processes or run.first is None:
        return slots
    return [slot for slot in slots if slot != run.first.slot]


class _Run:
    """One start of all processes, to its end.

    Attributes:
        first: the process that failed first, or None.
        server: the heartbeat server of this start.
    """

    def __init__(self, plan: Plan, slots: Sequence[int], restart: int, signals: Signals, output: Output):
        self.plan, self.signals, self.output = plan, signals, output
        self.first: Child | None = None
        self._deadlines: list[tuple[float, int]] = []  # when to send which signal to those that still run
        self._report_at: float | None = None
        self._why = "the run is being ended"
        self._is_interrupted, self._signals_handled = False, 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wake, selectors.EVENT_READ, signals.clear)
        listener = socket.create_server(("127.0.0.1", 0))
        job, own = secrets.token_hex(8), secret.new("the launcher")
        self._deaths = Deaths()
        kind = HeartbeatServer
        if plan.elastic:
            kind = functools.partial(ElasticServer, on_leave=self._kill, on_work=self._deaths.end_row)
        self.server = kind(
            self._selector,
            listener,
            job=job,
            size=len(slots),
            secret=own,
            heartbeat_timeout=plan.heartbeat_timeout,
            on_close=lambda rank: None,  # its exit status says more
        )
        run = {"JAXPAR_HUB": f"127.0.0.1:{listener.getsockname()[1]}", "JAXPAR_JOB": job}
        run[secret.VARIABLE] = own.key.decode()
        self._shared = {**_environment(plan, len(slots), restart), **run}
        self._ending: dict[int, float] = {}  # when to kill which process that has said that it fails
        self._starts: dict[int, float] = {}  # when to start which lost process again
        self.children = [self._start(rank, slot) for rank, slot in enumerate(slots)]

    def wait(self) -> int:
        """Wait for the end of all processes, and return the exit status of the run."""
        try:
            while any(child.status is None for child in self.children):
                self._step(_POLL_INTERVAL)
            self._read_rest()
        finally:
            self._kill_rest()
            self.server.close()
            self._selector.close()
        return 0 if self.first is None else self.first.status or 1

    def _start(self, rank: int, slot: int) -> Child:
        own = {"JAXPAR_PROCESS_ID": str(rank)}
        if self.plan.gpus:
            own["CUDA_VISIBLE_DEVICES"] = self.plan.gpus[slot]
        child = Child(rank, slot, self.plan.command, {**self._shared, **own}, self.output)
        child.register(self._selector)
        return child

    def _step(self, seconds: float) -> None:
        # Before its messages are read: a process that has ended may have reported why, which says more than its status.
        failed = [child for child in self.children if child.poll() and child.status]
        for key, _ in self._selector.select(0 if failed else seconds):
            key.data()
        self.server.check()
        self._handle_signals()
        if self.server.lost is not None and self.first is None:  # silent, or it reported its own failure
            self._end_others(self.children[self.server.lost.rank], self.server.lost.why, from_server=True)
        for child in failed:
            if (why := self._start_again(child)) is not None:
                self._end_others(child, describe_status(child.status or 0) + why)
        self._start_due()
        now = time.monotonic()
        for rank in [rank for rank, end in self._ending.items() if now > end]:
            del self._ending[rank]
            self.children[rank].send_signal(signal.SIGKILL)
        if self._report_at is not None and self.first is not None and now >= self._report_at:
            self._report_at = None
            self.server.report(self.first.rank, self._why)
        while self._deadlines and now > self._deadlines[0][0]:
            self._send_signal(self._deadlines.pop(0)[1])

    def _kill(self, rank: int, why: str, is_ending: bool) -> None:
        """Kill a process that the others go on without, if it still runs. `_step` starts it again.

        Args:
            is_ending: whether it has said that it fails. Then it has time to end by itself, with a status of its own.
        """
        child = self.children[rank]
        if is_ending:
            self._ending[rank] = time.monotonic() + _EXIT_TIME
        elif child.status is None and child.process.poll() is None:
            self.output.say(f"process {rank} (pid {child.process.pid}) is lost: {why}")
            child.send_signal(signal.SIGKILL)

    def _start_again(self, child: Child) -> str | None:
        """Start a process again that failed, if the run is not over. None: the others go on. Else what to say more."""
        first = self.children[0]
        if not self.plan.elastic or child is first or self.first is not None or self._is_interrupted or first.status:
            return ""
        status = child.status or 0
        if endless := self._deaths.add(child.rank, status):
            return endless
        self._ending.pop(child.rank, None)
        how = f"process {child.rank} (pid {child.process.pid}) failed: {describe_status(status)}"
        child.send_signal(signal.SIGKILL)  # what it left running
        assert isinstance(self.server, ElasticServer)
        self.server.forget(child.rank)
        if first.status is not None:
            self.output.say(f"{how}; the run is over")
        elif status == REFUSED:
            self.output.say(f"{how}, for another program; it is not started again, and the others go on")
        else:
            self._starts[child.rank] = time.monotonic() + _START_AGAIN
            self.output.say(f"{how}; the others go on")
        return None

    def _start_due(self) -> None:
        """Start the lost processes again whose time has come."""
        for rank, due in list(self._starts.items()):
            if self.first is not None or self._is_interrupted or self.children[0].status is not None:
                del self._starts[rank]
            elif time.monotonic() > due:
                del self._starts[rank]
                self.children[rank] = self._start(rank, self.children[rank].slot)
                self.output.say(f"process {rank} is started again as pid {self.children[rank].process.pid}")

    def _handle_signals(self) -> None:
        """Pass signals on to the processes. A second Ctrl-C kills them."""
        if signal.SIGTSTP in self.signals.received:
            while signal.SIGTSTP in self.signals.received:
                self.signals.received.remove(signal.SIGTSTP)
            self._send_signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send_signal(signal.SIGCONT)
        if self.output.is_broken and not _endings(self.signals):
            self.signals.received.append(signal.SIGPIPE)
        endings = _endings(self.signals)
        if endings and not self._is_interrupted:
            self._is_interrupted, self._signals_handled = True, len(endings)
            self._send_signal(signal.SIGINT if endings[0] == signal.SIGINT else signal.SIGTERM)
            self._deadlines = [(time.monotonic() + self.plan.grace, signal.SIGKILL)]
        elif len(endings) > self._signals_handled:
            self._signals_handled = len(endings)
            self._send_signal(signal.SIGKILL)

    def _end_others(self, failed: Child, why: str, from_server: bool = False) -> None:
        """End all after the first failure.

        Processes with a heartbeat client get a report and end by themselves. The others get SIGTERM.
        """
        if self.first is not None:
            return
        self.first = failed
        now = time.monotonic()
        # Where one was interrupted the others may have been, too; one that waits for it cannot end by itself.
        is_interrupt = self._is_interrupted or failed.status in INTERRUPTED
        wait = min(INTERRUPT_GRACE, self.plan.grace) if is_interrupt else 0.0
        self._report_at = now + wait
        if self._is_interrupted:
            return
        self.output.say(f"process {failed.rank} (pid {failed.process.pid}) failed: {why}; ending the others")
        self._why = why
        connected = set(self.server.peers)
        if from_server and failed.rank in connected and not self.server.peers[failed.rank].is_leaving:
            failed.send_signal(signal.SIGKILL)  # frozen
        for other in self.children:
            if other.rank not in connected and not wait:
                other.send_signal(signal.SIGTERM)
        start = now + wait + (_EXIT_TIME if connected else 0.0)
        self._deadlines = [(start, signal.SIGTERM), (start + self.plan.grace, signal.SIGKILL)]

    def _send_signal(self, number: int) -> None:
        for child in self.children:
            if child.status is None:
                child.send_signal(number)

    def _read_rest(self) -> None:
        """Read the rest of the output, for a second at most: a process in the background may hold a pipe open."""
        if self.first is not None or self._is_interrupted:
            self._kill_rest()
        end = time.monotonic() + 1.0
        while time.monotonic() < end and not all(child.is_read for child in self.children):
            for key, _ in self._selector.select(0.1):
                key.data()

    def _kill_rest(self) -> None:
        """Kill what the processes left running, after a failure or a signal."""
        if self.first is not None or self._is_interrupted or any(child.status is None for child in self.children):
            for child in self.children:
                child.send_signal(signal.SIGKILL)
                child.process.wait()


def _environment(plan: Plan, processes: int, restart: int) -> dict[str, str]:
    """The variables that all processes of a start share."""
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **plan.env,
        "JAXPAR_COORDINATOR": f"127.0.0.1:{plan.port or _free_port()}",
        "JAXPAR_NUM_PROCESSES": str(processes),
        "JAXPAR_RESTART": str(restart),
        "JAXPAR_HEARTBEAT_TIMEOUT": f"{plan.heartbeat_timeout:g}",
        **({"JAXPAR_ELASTIC": "1"} if plan.elastic else {}),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
