"""`python -m jaxpar launch`: several processes on this machine, as one run. No JAX here.

The launcher starts the processes, writes what they print, ends them after a failure and starts them again. It holds the
heartbeat server, so it notices a frozen process too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import queue
import sched
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from subprocess import DEVNULL, PIPE
from typing import IO

from ._core.options import add_options, number, option, positional, read
from ._core.process import Signals, daemon
from ._heartbeat.server import (
    ELASTIC_TIMEOUT,
    HEARTBEAT_TIMEOUT,
    INTERRUPT_GRACE,
    INTERRUPTED,
    LOST,
    REFUSED,
    SECRET,
    HeartbeatServer,
    new_secret,
)

_ABOUT = """\
Start n processes on this machine. Each line that they print begins with the rank of its process. A script that begins
with jaxpar.distributed.initialize() needs nothing else. If one process fails, is killed or freezes, the launcher ends
all. With --max-restarts it starts all again. With --elastic it starts only the lost process again, and the others
continue; if process 0 is lost, all end. `python` as the first word is the interpreter that runs the launcher.

The launcher is for one machine. For several, start the same script by SLURM, Open MPI, Kubernetes, Ray Train or
SkyPilot, see docs/cluster.md.

exit status: 0: all ended with 0. 2: bad arguments. 128 + signal: a signal ended the launcher. Otherwise the status of
the process that failed first, or 128 + signal if a signal killed it.
"""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXIT_TIME = 3.0  # seconds in which a process ends by itself after a report: it waits for one, then for its peers
_START_AGAIN = 1.0  # seconds from the loss of a process to its next start, so that one that fails at once costs little
_POLL_INTERVAL = 0.1  # seconds between two looks at the processes and at signals
_REST_TIME = 1.0  # seconds to read the rest of the output: a process in the background may hold a pipe open
_WRITE_TIME = 5.0  # seconds to write it after a signal: a pager may not read

_MOST_FAILURES = 3  # failures by itself, without a signal, before a process has worked again: the third is no accident
_MOST = 10  # deaths of any kind, before it has worked again: short of memory, a machine may kill it a few times
_MOST_IN_TIME, _TIME = 50, 600.0  # deaths within so many seconds, though it worked in between
_LONGEST = 1 << 16  # bytes of a line without an end that are held back, such as a bar that is drawn again and again


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65535, got {text!r}")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


_count, _timeout = number(int, 1), number(float, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What `jaxpar launch` is told."""

    processes: int = option(None, "how many, required", "-n", "--processes", required=True, type=_count, metavar="N")
    devices: int | None = option(
        None, "emulated CPU devices of each process, no GPU (default: none)", type=_count, metavar="K"
    )
    gpus_per_process: int | None = option(
        None, "GPUs of each process (default: an even share)", type=_count, metavar="K"
    )
    max_restarts: int = option(0, "starts after a failure (default: 0)", type=number(int, 0), metavar="R")
    min_processes: int | None = option(
        None, "a restart leaves out the lost one, down to M (default: N)", type=_count, metavar="M"
    )
    elastic: bool = option(
        False, "continue after a loss, and start the lost process again (default: no)", action="store_true"
    )
    coordinator_port: int | None = option(
        None, "where they meet (default: a free one at each start)", type=_port, metavar="P"
    )
    env: tuple[tuple[str, str], ...] = option((), "a variable for all (default: none)", type=_pair, metavar="K=V")
    grace: float = option(30.0, "seconds from SIGTERM to SIGKILL (default: 30)", type=number(float, 0), metavar="S")
    heartbeat_timeout: float | None = option(
        None,
        "seconds without a heartbeat after which a process counts as frozen (default: $JAXPAR_HEARTBEAT_TIMEOUT, or "
        f"{HEARTBEAT_TIMEOUT:g}, with --elastic {ELASTIC_TIMEOUT:g})",
        type=_timeout,
        metavar="S",
    )
    command: tuple[str, ...] = positional("after --", nargs=argparse.REMAINDER, action="store")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "launch",
        help="start several processes on this machine",
        description=_ABOUT,
        usage="jaxpar launch -n N [options] -- python script.py [arguments]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, LaunchOptions)
    parser.set_defaults(run=lambda args: run(read(args, LaunchOptions), parser), parser=parser)


def run(options: LaunchOptions, parser: argparse.ArgumentParser) -> int:
    """Launch as the options say. `parser` reports those that do not fit each other or this machine."""
    for first, second in (("devices", "gpus_per_process"), ("min_processes", "elastic")):
        if getattr(options, first) and getattr(options, second):
            names = [f"--{name.replace('_', '-')}" for name in (second, first)]
            parser.error(f"argument {names[0]}: not allowed with argument {names[1]}")
    if options.min_processes is not None and options.min_processes > options.processes:
        parser.error(f"--min-processes {options.min_processes} is more than -n {options.processes}")

    # The command, after the dashes before it.
    command = options.command[1:] if options.command[:1] == ("--",) else options.command
    if not command:
        parser.error("no command given; end the line with: -- python script.py")
    if command[0] == "python":
        command = (sys.executable, *command[1:])
    if shutil.which(command[0]) is None:
        parser.error(f"cannot find the command {command[0]!r}, or it may not be executed")

    timeout = options.heartbeat_timeout
    if timeout is None and (text := os.environ.get("JAXPAR_HEARTBEAT_TIMEOUT")):
        try:
            timeout = _timeout(text)
        except argparse.ArgumentTypeError as error:
            parser.error(f"JAXPAR_HEARTBEAT_TIMEOUT {error}")
    timeout = timeout or (ELASTIC_TIMEOUT if options.elastic else HEARTBEAT_TIMEOUT)

    # The devices: emulated ones, or GPUs, of which each process sees its share.
    env, gpus = options.env, list[str]()
    if options.devices is not None:
        env = (("JAX_NUM_CPU_DEVICES", str(options.devices)), ("JAX_PLATFORMS", "cpu"), *env)
    else:
        of_processes = {**os.environ, **dict(env)}
        platforms = set(filter(None, of_processes.get("JAX_PLATFORMS", "").split(",")))
        if options.gpus_per_process is not None or not platforms or platforms & {"cuda", "gpu"}:
            visible = visible_gpus(of_processes)
            try:
                if visible or options.gpus_per_process is not None:
                    gpus = share_gpus(visible, options.processes, options.gpus_per_process)
            except ValueError as error:
                parser.error(str(error))
    return launch(dataclasses.replace(options, command=command, env=env, heartbeat_timeout=timeout), gpus)


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """The GPUs of CUDA_VISIBLE_DEVICES, or those that `nvidia-smi -L` lists."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return [name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):  # there is none
        return []
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listing.stdout.splitlines()))]


def share_gpus(gpus: Sequence[str], processes: int, each: int | None) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each process. `each` None shares all GPUs evenly."""
    each = each or max(1, len(gpus) // processes)
    if each * processes > len(gpus):
        hint = "start fewer processes, or give --devices to emulate devices on the CPU"
        need = f"{processes} processes with {each} GPU each need {each * processes}"
        raise ValueError(f"{need}, there are {len(gpus)}; {hint}")
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(processes)]


# A run.


def launch(options: LaunchOptions, gpus: Sequence[str]) -> int:
    """Run the processes until all have ended with 0, or one failed and no restart is left.

    `gpus` has CUDA_VISIBLE_DEVICES of each process. Empty leaves the variable as it is.

    Return 0 where all ended with 0, 128 + signal where a signal ended the launcher, else the status of the process that
    failed first: 128 + signal where it was killed, 137 where it was frozen.
    """
    output = Output()
    slots, restart = list(range(options.processes)), 0
    with Signals(_ENDING) as endings, Signals([signal.SIGTSTP]) as stops:
        while True:
            run = _Run(options, gpus, slots, restart, endings.received, stops.received, output)
            status = run.wait()
            if status == 0 or endings.received or restart == options.max_restarts:
                break
            restart += 1
            if options.min_processes is not None and len(slots) > options.min_processes and run.first is not None:
                slots = [slot for slot in slots if slot != run.first.slot]
            resume = f", from {run.server.hint}" if run.server.hint else ""
            many = "es" if len(slots) > 1 else ""
            output.say(f"restart {restart} of {options.max_restarts} with {len(slots)} process{many}{resume}")
    output.finish(_WRITE_TIME if endings.received else None)
    return 128 + endings.received[0] if endings.received else status


class Deaths:
    """How often the processes of an elastic run have died, by rank, and when that is endless."""

    def __init__(self) -> None:
        self._in_a_row = collections.defaultdict[int, list[int]](list)  # statuses
        self._times = collections.defaultdict[int, list[float]](list)

    def add(self, rank: int, status: int) -> str:
        """Note that a process ended with this status. Return why it is not to be started again, or nothing."""
        now, row = time.monotonic(), self._in_a_row[rank]
        row.append(status)
        times = self._times[rank] = [at for at in self._times[rank] if now - at < _TIME] + [now]
        failures = sum(status < 128 and status != LOST for status in row)
        if failures >= _MOST_FAILURES or len(row) >= _MOST:
            return f", {len(row)} times in a row"
        if len(times) >= _MOST_IN_TIME:
            return f", {len(times)} times within {(now - times[0]) / 60:.0f} minutes"
        return ""

    def end_row(self, rank: int) -> None:
        self._in_a_row[rank].clear()


class _Run:
    """One start of all processes, to its end."""

    def __init__(
        self,
        options: LaunchOptions,
        gpus: Sequence[str],
        slots: Sequence[int],
        restart: int,
        endings: list[int],  # the signals so far that end all
        stops: list[int],  # that stop them (Ctrl-Z)
        output: Output,
    ):
        self._options, self._gpus = options, gpus
        self.output, self._endings, self._stops = output, endings, stops
        self.first: Child | None = None  # the process that failed first
        self._timers = sched.scheduler(time.monotonic)
        self._is_interrupted, self._signals_handled = False, 0
        self._deaths = Deaths()
        listener = socket.create_server(("127.0.0.1", 0))
        job, secret = secrets.token_hex(8), new_secret("the launcher")
        self.server = HeartbeatServer(
            listener,
            job=job,
            size=len(slots),
            secret=secret,
            heartbeat_timeout=options.heartbeat_timeout or HEARTBEAT_TIMEOUT,
            launched=True,
            on_leave=self._kill if options.elastic else None,
            on_work=self._deaths.end_row,
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = options.coordinator_port or free.getsockname()[1]
        # What the run needs comes after the variables of the user, which would otherwise break it.
        self._shared = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # a line is there as soon as it is printed
            **dict(options.env),
            "JAXPAR_COORDINATOR": f"127.0.0.1:{port}",
            "JAXPAR_NUM_PROCESSES": str(len(slots)),
            "JAXPAR_RESTART": str(restart),
            "JAXPAR_HEARTBEAT_TIMEOUT": f"{self.server.heartbeat_timeout:g}",
            "JAXPAR_HUB": f"127.0.0.1:{listener.getsockname()[1]}",
            "JAXPAR_JOB": job,
            SECRET: secret.key.decode(),
            **({"JAXPAR_ELASTIC": "1"} if options.elastic else {}),
        }
        self.children = [self._start(rank, slot) for rank, slot in enumerate(slots)]

    def wait(self) -> int:
        """Wait for the end of all processes, and return the exit status of the run."""
        try:
            while any(child.status is None for child in self.children):
                self._turn()
        finally:
            if self.first is not None or self._is_interrupted or any(child.status is None for child in self.children):
                for child in self.children:  # and what they left running
                    child.send_signal(signal.SIGKILL)
                    child.process.wait()
            self.server.close()
        end = time.monotonic() + _REST_TIME
        for reader in (reader for child in self.children for reader in child.readers):
            reader.join(max(0.0, end - time.monotonic()))
        return 0 if self.first is None else self.first.status or 1

    def _start(self, rank: int, slot: int) -> Child:
        env = {**self._shared, "JAXPAR_PROCESS_ID": str(rank)}
        if self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = self._gpus[slot]
        return Child(rank, slot, self._options.command, env, self.output)

    def _turn(self) -> None:
        """Look once at the processes, at their messages and at signals."""
        # Who has ended is found before the messages are read: such a process may have reported why, which says more
        # than its status.
        failed = [child for child in self.children if child.poll() and child.status]
        self.server.turn(0.0 if failed else _POLL_INTERVAL)
        self._handle_signals()
        if self.server.lost is not None and self.first is None:  # silent, or it reported its own failure
            self._end_others(self.children[self.server.lost["lost"]], self.server.lost["why"], from_server=True)
        for child in failed:
            if not self._options.elastic or child.rank == 0 or self._is_ending:
                self._end_others(child, describe_status(child.status or 0))
            else:
                self._go_on_without(child)
        self._timers.run(blocking=False)

    @property
    def _is_ending(self) -> bool:
        """Whether no lost process is started again."""
        return self.first is not None or self._is_interrupted or bool(self.children[0].status)

    # An elastic run: who is lost is killed, and started again by itself

    def _kill(self, rank: int, why: str) -> None:
        """Kill a process that the server has found lost, if it still runs. `_turn` sees its end."""
        child, peer = self.children[rank], self.server.peers.get(rank)
        if peer is not None and peer.is_leaving:  # it has said that it fails, and ends with a status of its own
            self._timers.enter(_EXIT_TIME, 0, lambda: child.status is None and child.send_signal(signal.SIGKILL))
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
            self._timers.enter(_START_AGAIN, 0, lambda: self._start_again(child))
            self.output.say(f"{how}; the others continue")

    def _start_again(self, child: Child) -> None:
        if not self._is_ending and self.children[0].status is None:
            self.children[child.rank] = again = self._start(child.rank, child.slot)
            self.output.say(f"process {child.rank} is started again as pid {again.process.pid}")

    # The end of all: after a signal, or after the first failure

    def _handle_signals(self) -> None:
        """Pass signals on to the processes. A second Ctrl-C kills them."""
        if self._stops:
            self._stops.clear()
            self._send_signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send_signal(signal.SIGCONT)
        if self.output.broken.is_set() and not self._endings:
            self._endings.append(signal.SIGPIPE)
        number = len(self._endings)
        if number and not self._is_interrupted:
            self._is_interrupted, self._signals_handled = True, number
            self._send_signal(signal.SIGINT if self._endings[0] == signal.SIGINT else signal.SIGTERM)
            self._timers.enter(self._options.grace, 0, lambda: self._send_signal(signal.SIGKILL))
        elif number > self._signals_handled:
            self._send_signal(signal.SIGKILL)

    def _end_others(self, failed: Child, why: str, from_server: bool = False) -> None:
        """End all after the first failure. Later ones are its consequences."""
        if self.first is not None:
            return
        self.first = failed

        # The report. Processes with a heartbeat client end by themselves then. Where one was interrupted the others may
        # have been, too, and get some seconds to end in order; one that waits for it in a collective cannot.
        is_interrupt = self._is_interrupted or failed.status in INTERRUPTED
        wait = min(INTERRUPT_GRACE, self._options.grace) if is_interrupt else 0.0
        reported = "the run is being ended" if self._is_interrupted else why
        if wait:
            self.server.report_interrupt(failed.rank, reported, wait)
        else:
            self._timers.enter(0, 0, lambda: self.server.report(failed.rank, reported))
        if self._is_interrupted:  # `_handle_signals` ends them
            return
        self.output.say(f"process {failed.rank} (pid {failed.process.pid}) failed: {why}; ending the others")

        # Signals, for those that do not end so: one that is frozen, those without a client, and at last all.
        connected = set(self.server.peers)
        if from_server and failed.rank in connected and not self.server.peers[failed.rank].is_leaving:
            failed.send_signal(signal.SIGKILL)
        for other in self.children:
            if other.rank not in connected and not wait:
                other.send_signal(signal.SIGTERM)
        wait += _EXIT_TIME if connected else 0.0
        self._timers.enter(wait, 0, lambda: self._is_interrupted or self._send_signal(signal.SIGTERM))
        self._timers.enter(wait + self._options.grace, 0, lambda: self._send_signal(signal.SIGKILL))

    def _send_signal(self, number: int) -> None:
        for child in self.children:
            if child.status is None:
                child.send_signal(number)


# A process, and its output.


class Output:
    """Writes to standard output and error in a thread: a pager that stops reading must not stop the launcher."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.broken = threading.Event()  # once the reader has closed the pipe
        self._writer = self._start("jaxpar-output", self._write_all)

    def _start(self, name: str, run: Callable[[], object]) -> threading.Thread:
        thread = daemon(name, run, "what the processes print is lost, and the run is ended", self.broken.set)
        thread.start()
        return thread

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, unwritten = item
            while unwritten and not self.broken.is_set():
                try:
                    unwritten = unwritten[os.write(descriptor, unwritten) :]
                except OSError:  # the pipe is closed: `| head`
                    self.broken.set()

    def copy(self, pipe: IO[bytes], prefix: str, descriptor: int) -> threading.Thread:
        """Copy each line of a pipe, whole and after a prefix, in a thread of its own."""

        def run() -> None:
            with pipe:
                while line := pipe.readline(_LONGEST):
                    self._queue.put((descriptor, prefix.encode() + line.removesuffix(b"\n") + b"\n"))

        return self._start(f"jaxpar-output {prefix}", run)

    def say(self, line: str) -> None:
        """Write a line of the launcher's own to standard error."""
        self._queue.put((2, f"jaxpar launch: {line}\n".encode(errors="backslashreplace")))

    def finish(self, seconds: float | None) -> None:
        """Wait until all is written, for `seconds` at most."""
        self._queue.put(None)
        self._writer.join(seconds)


class Child:
    """A process in a session of its own, so that it can be ended with all that it started."""

    def __init__(self, rank: int, slot: int, command: Sequence[str], env: Mapping[str, str], output: Output):
        self.rank = rank  # its number in this start
        self.slot = slot  # its number in the first start, which chooses its GPUs
        self.status: int | None = None  # as a shell would say it, None while it runs
        self.process = subprocess.Popen(
            command, env=env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        pipes = (self.process.stdout, self.process.stderr)
        self.readers = [output.copy(pipe, f"[{rank}] ", i) for i, pipe in enumerate(pipes, 1) if pipe is not None]

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


def describe_status(status: int) -> str:
    """How a process with this exit status ended."""
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(status - 128).name}"
    return f"status {status}"
