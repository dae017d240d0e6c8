"""What an elastic run sets before jax starts, and which processes compute together then, as process 0 writes it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from .._core.text import say_before_exit
from .._devices import processes
from .._heartbeat.server import LOST, MOST_SECONDS
from . import _runtime
from ._environment import Cluster

VARIABLE = "JAXPAR_ELASTIC"  # the launcher sets it with --elastic
NEVER = round(MOST_SECONDS)  # the time limit of jax's own heartbeats where ours watch
_FLAG = "--xla_cpu_collective_timeout_seconds"
_WHERE = "distributed.initialize: elastic=True"
_KEYS = "jaxpar/elastic"  # the beginning of the names in jax's key-value store
_WAIT = 1000  # milliseconds of one look for a value that is waited for
_POLL = 0.1  # seconds between two looks at a key
_NOTICED = 1.0  # seconds in which process 0 writes that it has noticed a loss
_SHUTDOWN_TIMEOUT = 5  # seconds for which jax waits at its end; the default, 5 minutes, would be for the lost ones
_MOST_WAIT = 10.0  # seconds that a barrier may take which others have left


def check_elastic(cluster: Cluster | str, monitor: bool) -> None:
    """Raise what keeps a run from being elastic, before anything is set."""
    if not monitor:
        raise ValueError(f"{_WHERE}: elastic=True finds lost processes by their heartbeats; leave out monitor=False")
    why = ""
    if missing := _runtime.missing(_runtime.ELASTIC_NAMES):
        names = " and no ".join(missing)
        hint = "use jax 0.10.2 to 0.12, or leave out elastic"
        why = f"jax {jax.__version__} cannot continue after a loss: it has no {names}; {hint}"
    elif isinstance(cluster, str):
        names = "JAXPAR_COORDINATOR, JAXPAR_NUM_PROCESSES and JAXPAR_PROCESS_ID"
        why = f"in {cluster} a lost process cannot rejoin by itself; leave out elastic, or set {names}"
    elif cluster.server and os.environ.get(VARIABLE) != "1":
        why = "the launcher would end all processes after a loss; start them by jaxpar launch --elastic"
    if why:
        raise RuntimeError(f"{_WHERE}: {why}")


def configure(heartbeat_timeout: float) -> dict[str, Any]:
    """Set what jax reads at its start of an elastic run. Return options of `jax.distributed.initialize`."""
    # After this time a collective that waits for a lost process ends with an error, and the others repeat the step.
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={round(heartbeat_timeout)}".strip()
    jax.config.update("jax_enable_recoverability", True)
    processes.become_elastic()
    return {"shutdown_timeout_seconds": _SHUTDOWN_TIMEOUT}


def forget(address: str, processes: int, rank: int) -> None:
    """Have jax's coordination service forget a lost process. Called in process 0, where the service is."""
    # The service is meant to notice a loss by jax's own heartbeats. But it takes a run that was stopped for a loss of
    # every process, and ends them with SIGABRT. So its time limit is a week, and our heartbeats say who is lost: this
    # connects in the place of the lost process, and leaves in order.
    _runtime.connect_and_leave(
        address, processes, rank, heartbeat_timeout_seconds=NEVER, shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT
    )


class Board:
    """What the processes of an elastic run write for each other, as JSON in jax's key-value store."""

    # Any program that reaches the port of jax's coordination service can write there, without a secret. So what is
    # read is checked, and a value that is not valid counts as none.

    def __init__(self, client: _runtime.Client | None = None):
        self.client = client or _runtime.client()

    def set(self, name: str, value: object) -> None:
        self.client.key_value_set(f"{_KEYS}/{name}", json.dumps(value), allow_overwrite=True)

    def get(self, name: str, is_valid: Callable[[Any], bool] = bool) -> Any:
        try:
            return _parse(self.client.key_value_try_get(f"{_KEYS}/{name}"), is_valid)
        except jax.errors.JaxRuntimeError:  # NOT_FOUND
            return None

    def wait(self, name: str, is_valid: Callable[[Any], bool]) -> Any:
        """A value that process 0 writes sooner or later."""
        while True:
            try:
                text = self.client.blocking_key_value_get(f"{_KEYS}/{name}", _WAIT)
                if (value := _parse(text, is_valid)) is not None:
                    return value
                time.sleep(_WAIT / 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def entries(self, folder: str, is_valid: Callable[[Any], bool] = lambda value: True) -> dict[str, Any]:
        """The values in a folder, by the last part of their names."""
        texts: list[tuple[str, str]] = self.client.key_value_dir_get(f"{_KEYS}/{folder}/")
        values = {key.rpartition("/")[2]: _parse(text, is_valid) for key, text in texts}
        return {name: value for name, value in values.items() if value is not None}

    def is_over(self) -> bool:
        return self.get("over") is not None

    def members(self) -> tuple[int, dict[int, int]]:
        """How often the members have changed, and the start of each by its index, as process 0 wrote it last."""
        number, starts = self.get("members", lambda value: is_start(value[0]) and is_starts(value[1])) or (0, [])
        return number, dict(starts)

    def own_start(self, rank: int) -> int:
        """The number that jax gave to the start of this process. Where the others have left it behind, it ends."""
        # A process that was stopped (Ctrl-Z, a paused machine) goes on as if nothing had been. The others have a new
        # one in its place by then, and two of one rank would mix their sums.
        if (start := self.client.get_live_nodes([rank]).get(rank)) is None:
            end_left_behind()
        return start

    def release_others(self, rank: int) -> tuple[int, dict[int, int]]:
        """Return the members, after they have noticed the loss of the process that this one, of this rank, replaces."""
        # A barrier among the members waits for each of them that is connected to jax's coordination service. This
        # process is connected in the place of the one that was lost. Until the others have noticed that loss, they
        # would wait for this one. So it takes part in that one barrier, and is no member after it.
        own_start, released = self.own_start(rank), -1
        while True:
            number, starts = self.members()
            if starts.get(rank, own_start) == own_start or self.is_over():
                return number, starts
            time.sleep(_NOTICED)
            if number != released and self.members()[0] == number:
                self._take_part(number, starts)
                released = number

    def _take_part(self, number: int, starts: dict[int, int]) -> None:
        """Take part in the next barrier of these members. Where they have left it, this process ends."""

        def wait() -> None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is lost, which the heartbeats report
                self.client.get_live_nodes(sorted(starts))

        barrier = threading.Thread(target=wait, daemon=True)
        barrier.start()
        while barrier.is_alive() and self.members()[0] == number and not self.is_over():
            barrier.join(_POLL)
        barrier.join(_MOST_WAIT)
        if barrier.is_alive():
            end_left_behind()


def _parse(text: str, is_valid: Callable[[Any], bool]) -> Any:
    try:
        value = json.loads(text)
        return value if is_valid(value) else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def is_start(value: object) -> bool:
    """Whether this can be the number that jax gives to the start of a process."""
    return type(value) is int and 0 <= value < 1 << 64


def is_starts(value: object) -> bool:
    """Whether these are the indices of processes, each with the number of its start."""
    pairs: list[Any] = value if isinstance(value, list) else [None]
    return all(isinstance(pair, list) and len(pair) == 2 and all(map(is_start, pair)) for pair in pairs)  # pyright: ignore


def end_left_behind() -> NoReturn:
    say_before_exit(f"jaxpar: the other processes continued without this one. It ends with status {LOST}")
    os._exit(LOST)
