"""The launcher: starts several processes on this machine, ends them after a failure, starts them again.

It holds the heartbeat server, so it notices a frozen process too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import secrets
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from .._core.process import Signals
from .._heartbeat import secret, thread
from .._heartbeat.connection import LOST, REFUSED
from .._heartbeat.server import HEARTBEAT_TIMEOUT, INTERRUPT_GRACE, INTERRUPTED, HeartbeatServer

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)  # the last one where the output is closed
_EXIT_TIME = 3.0  # seconds in which a process ends by itself after a report: it waits for one, then for its peers
_START_AGAIN = 1.0  # seconds from the loss of a process to its next start, so that one that fails at once costs little
_POLL_INTERVAL = 0.25  # seconds between two checks of the processes without a signal
_REST_TIME = 1.0  # seconds to read the rest of the output: a process in the background may hold a pipe open
_WRITE_TIME = 5.0  # seconds to write it after a signal: a pager may not read

_MOST_OWN = 3  # failures by itself, without a signal, before a process has worked again: the third is no accident
_MOST = 10  # deaths of any kind, before it has worked again: short of memory, a machine may kill it a few times
_MOST_IN_TIME, _TIME = 50, 600.0  # deaths within so many seconds, though it worked in between
_LONGEST = 1 << 16  # bytes of a line without an end that are held back, such as a bar that is drawn again and again


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to start, see the options of `command`."""

    command: Sequence[str]
    processes: int
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # for all of them
    gpus: Sequence[str] = ()  # CUDA_VISIBLE_DEVICES of each process; empty leaves the variable as it is
    max_restarts: int = 0  # how often all are started again after a failure
    min_processes: int | None = None  # a restart leaves out the process that was lost, down to this many
    port: int | None = None  # of the coordinator; None takes a free one, another at each start
    grace: float = 30.0  # seconds between SIGTERM and SIGKILL: a checkpoint may take so long
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    elastic: bool = False  # the others go on after the loss of one, which is started again by itself


def launch(plan: Plan) -> int:
    """Run the processes until all have ended with 0, or one failed and no restart is left.

    Return 0 where all ended with 0, 128 + signal where a signal ended the launcher, else the status of the process that
    failed first: 128 + signal where it was killed, 137 where it was frozen.
    """
    output = Output()
    slots, restart = list(range(plan.processes)), 0
    with Signals((*_ENDING[:3], signal.SIGTSTP, signal.SIGCHLD), wakes=True) as signals:
        while True:
            run = _Run(plan, slots, restart, signals, output)
            status = run.wait()
            if status == 0 or _endings(signals) or restart == plan.max_restarts:
                break
            restart += 1
            if plan.min_processes is not None and len(slots) > plan.min_processes and run.first is not None:
                slots = [slot for slot in slots if slot != run.first.slot]
            resume = f", from {run.server.hint}" if run.server.hint else ""
            number = f"{len(slots)} process{'es' if len(slots) > 1 else ''}"
            output.say(f"restart {restart} of {plan.max_restarts} with {number}{resume}")
    endings = _endings(signals)
    output.finish(_WRITE_TIME if endings else None)
    return 128 + endings[0] if endings else status


def _endings(signals: Signals) -> list[int]:
    """The signals so far that end the run."""
    return [number for number in signals.received if number in _ENDING]


class Deaths:
    """How often the processes of an elastic run have died, by rank, and when that is endless."""

    def __init__(self) -> None:
        self._in_a_row: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        self._times: collections.defaultdict[int, list[float]] = collections.defaultdict(list)

    def add(self, rank: int, status: int) -> str:
        """Note that a process ended with this status. Return why it is not to be started again, or nothing."""
        now, row = time.monotonic(), self._in_a_row[rank]
        row.append(status)
        times = self._times[rank] = [at for at in self._times[rank] if now - at < _TIME] + [now]
        own = sum(status < 128 and status != LOST for status in row)
        if own >= _MOST_OWN or len(row) >= _MOST:
            return f", {len(row)} times in a row"
        if len(times) >= _MOST_IN_TIME:
            return f", {len(times)} times within {(now - times[0]) / 60:.0f} minutes"
        return ""

    def end_row(self, rank: int) -> None:
        self._in_a_row[rank].clear()


class _Run:
    """One start of all processes, to its end."""

    def __init__(self, plan: Plan, slots: Sequence[int], restart: int, signals: Signals, output: Output):
        self.plan, self.signals, self.output = plan, signals, output
        self.first: Child | None = None  # the process that failed first
        self._timers: list[tuple[float, Callable[[], object]]] = []  # what to do when
        self._is_interrupted, self._signals_handled = False, 0
        self._deaths = Deaths()
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wake, selectors.EVENT_READ, signals.clear)
        listener = socket.create_server(("127.0.0.1", 0))
        job, own = secrets.token_hex(8), secret.new("the launcher")
        self.server = HeartbeatServer(
            self._selector,
            listener,
            job=job,
            size=len(slots),
            secret=own,
            heartbeat_timeout=plan.heartbeat_timeout,
            launched=True,
            on_leave=self._kill if plan.elastic else None,
            on_work=self._deaths.end_row,
        )
        hub = f"127.0.0.1:{listener.getsockname()[1]}"
        meeting = {"JAXPAR_HUB": hub, "JAXPAR_JOB": job, secret.VARIABLE: own.key.decode()}
        self._shared = {**_environment(plan, len(slots), restart), **meeting}
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
        return Child(rank, slot, self.plan.command, {**self._shared, **own}, self.output, self._selector)

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
            if not self.plan.elastic or child.rank == 0 or self._is_ending:
                self._end_others(child, describe_status(child.status or 0))
            else:
                self._go_on_without(child)
        now = time.monotonic()
        due = [timer for timer in self._timers if now >= timer[0]]
        self._timers = [timer for timer in self._timers if now < timer[0]]
        for _, action in due:
            action()

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    @property
    def _is_ending(self) -> bool:
        """Whether no lost process is started again."""
        return self.first is not None or self._is_interrupted or bool(self.children[0].status)

    # An elastic run: who is lost is killed, and started again by itself

    def _kill(self, rank: int, why: str) -> None:
        """Kill a process that the server has found lost, if it still runs. `_step` sees its end."""
        child, peer = self.children[rank], self.server.peers.get(rank)
        if peer is not None and peer.is_leaving:  # it has said that it fails, and ends with a status of its own
            self._later(_EXIT_TIME, lambda: child.status is None and child.send_signal(signal.SIGKILL))
        elif child.status is None and child.process.poll() is None:
            self.output.say(f"process {rank} (pid {child.process.pid}) is lost: {why}")
            child.send_signal(signal.SIGKILL)

    def _go_on_without(self, child: Child) -> None:
        """Start a process again that failed. Where it dies endlessly, end the others."""
        status = child.status or 0
        how = describe_status(status)
        if endless := self._deaths.add(child.rank, status):
            return self._end_others(child, how + endless)
        how = f"process {child.rank} (pid {child.process.pid}) failed: {how}"
        child.send_signal(signal.SIGKILL)  # what it left running
        self.server.forget(child.rank)
        if self.children[0].status is not None:
            self.output.say(f"{how}; the run is over")
        elif status == REFUSED:
            self.output.say(f"{how}, with another program; it is not started again, and the others continue")
        else:
            self._later(_START_AGAIN, lambda: self._start_again(child))
            self.output.say(f"{how}; the others continue")

    def _start_again(self, child: Child) -> None:
        if not self._is_ending and self.children[0].status is None:
            self.children[child.rank] = again = self._start(child.rank, child.slot)
            self.output.say(f"process {child.rank} is started again as pid {again.process.pid}")

    # The end of all: after a signal, or after the first failure

    def _handle_signals(self) -> None:
        """Pass signals on to the processes. A second Ctrl-C kills them."""
        if signal.SIGTSTP in self.signals.received:
            while signal.SIGTSTP in self.signals.received:  # a new list would lose a signal that comes meanwhile
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
            self._later(self.plan.grace, lambda: self._send_signal(signal.SIGKILL))
        elif len(endings) > self._signals_handled:
            self._signals_handled = len(endings)
            self._send_signal(signal.SIGKILL)

    def _end_others(self, failed: Child, why: str, from_server: bool = False) -> None:
        """End all after the first failure."""
        # Processes with a heartbeat client get a report and end by themselves. The others get SIGTERM.
        if self.first is not None:
            return
        self.first = failed
        # Where one was interrupted the others may have been, too; one that waits for it cannot end by itself.
        is_interrupt = self._is_interrupted or failed.status in INTERRUPTED
        wait = min(INTERRUPT_GRACE, self.plan.grace) if is_interrupt else 0.0
        reported = "the run is being ended" if self._is_interrupted else why
        self._later(wait, lambda: self.server.report(failed.rank, reported))
        if self._is_interrupted:
            return
        self.output.say(f"process {failed.rank} (pid {failed.process.pid}) failed: {why}; ending the others")
        connected = set(self.server.peers)
        if from_server and failed.rank in connected and not self.server.peers[failed.rank].is_leaving:
            failed.send_signal(signal.SIGKILL)  # frozen
        for other in self.children:
            if other.rank not in connected and not wait:
                other.send_signal(signal.SIGTERM)
        wait += _EXIT_TIME if connected else 0.0
        self._later(wait, lambda: self._is_interrupted or self._send_signal(signal.SIGTERM))
        self._later(wait + self.plan.grace, lambda: self._send_signal(signal.SIGKILL))

    def _send_signal(self, number: int) -> None:
        for child in self.children:
            if child.status is None:
                child.send_signal(number)

    def _read_rest(self) -> None:
        """Read the rest of the output, after the end of all processes."""
        if self.first is not None or self._is_interrupted:
            self._kill_rest()
        end = time.monotonic() + _REST_TIME
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


# A process, and its output.


class Output:
    """Writes to standard output and error in a thread: a pager that stops reading must not stop the launcher."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.is_broken = False  # whether the reader has closed the pipe
        lost = "what the processes print is lost, and the run is ended"
        self._thread = thread.daemon("jaxpar-output", self._run, lost, self._break)
        self._thread.start()

    def _break(self) -> None:
        self.is_broken = True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, rest = item
            while rest and not self.is_broken:
                try:
                    rest = rest[os.write(descriptor, rest) :]
                except OSError:  # the pipe is closed: `| head`
                    self.is_broken = True

    def write(self, descriptor: int, data: bytes) -> None:
        self._queue.put((descriptor, data))

    def say(self, line: str) -> None:
        """Write a line of the launcher's own to standard error."""
        self.write(2, f"jaxpar launch: {line}\n".encode(errors="backslashreplace"))

    def finish(self, seconds: float | None) -> None:
        """Wait until all is written, for `seconds` at most."""
        self._queue.put(None)
        self._thread.join(seconds)


class Stream:
    """A pipe of a child, which the selector reads until its end. Each line is written whole, after a prefix."""

    def __init__(self, pipe: IO[bytes], prefix: str, descriptor: int, output: Output, selector: selectors.BaseSelector):
        self.is_open = True
        self._pipe, self._prefix, self._rest = pipe, prefix.encode(), b""
        self._descriptor, self._output, self._selector = descriptor, output, selector
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self._rest + data).split(b"\n")
        if rest and (not data or len(rest) > _LONGEST):
            lines, rest = [*lines, rest], b""
        self._rest = rest
        if lines:
            self._output.write(self._descriptor, b"".join(self._prefix + line + b"\n" for line in lines))
        if not data:
            self.is_open = False
            self._selector.unregister(self._pipe)
            self._pipe.close()


class Child:
    """A process in a session of its own, so that it can be ended with all that it started."""

    def __init__(
        self,
        rank: int,
        slot: int,
        command: Sequence[str],
        env: Mapping[str, str],
        output: Output,
        selector: selectors.BaseSelector,
    ):
        self.rank = rank  # its number in this start
        self.slot = slot  # its number in the first start, which chooses its GPUs
        self.status: int | None = None  # as a shell would say it, None while it runs
        self.process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._streams = [
            Stream(self.process.stdout, f"[{rank}] ", 1, output, selector),
            Stream(self.process.stderr, f"[{rank}] ", 2, output, selector),
        ]

    def poll(self) -> bool:
        """Update `status` and return whether the process has just ended."""
        if self.status is None and (code := self.process.poll()) is not None:
            self.status = code if code >= 0 else 128 - code
            return True
        return False

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and all that it started. A stopped one is continued to take it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                os.killpg(self.process.pid, signal.SIGCONT)

    @property
    def is_read(self) -> bool:
        return not any(stream.is_open for stream in self._streams)


def describe_status(status: int) -> str:
    """How a process with this exit status ended."""
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(status - 128).name}"
    return f"status {status}"
