"""The processes of an elastic run that compute together, agreed again after each step.

Which processes live, and that a block of work succeeded in all of them or in none, is jax's `live_devices`. What they
agree on beside that is a text in jax's key-value store, which process 0 holds.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils

from ..._core.arrays import Device
from ..._core.text import say_news

Result = TypeVar("Result")

_KEYS = "jaxpar/elastic"
_WAIT = 1000  # milliseconds of one look for a key
_MOST_TRIES = 8  # failures in a row, with the same processes, after which a step is given up
_MOST_ORDERS = 1 << 20  # that are looked through


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the processes of a group agreed on.

    Attributes:
        number: of the agreement, counted by process 0.
        devices: of all these processes, in an order that no group had before.
        offer: what process 0 says about the run.
    """

    number: int
    devices: tuple[Device, ...]
    offer: dict[str, Any]


class Group:
    """This process and those that compute with it.

    Attributes:
        terms: what they agreed on, or None where they must agree again.
        lost: the processes that were lost in the last block.
    """

    def __init__(self) -> None:
        self.terms: Terms | None = None
        self.lost: list[int] = []
        self._client: Any = multihost_utils.distributed.global_state.client  # pyright: ignore[reportPrivateImportUsage]
        self._members: dict[int, int] = {}
        self._tries: collections.Counter[str] = collections.Counter()
        self._failures = 0
        self._orders: dict[frozenset[int], Iterator[tuple[int, ...]]] = {}
        self._number, self._block = 0, ""
        if self._client is not None:
            self._forget_own_groups()

    @property
    def is_first(self) -> bool:
        return jax.process_index() == 0

    @property
    def members(self) -> list[int]:
        return sorted(self._members)

    def agree(self, offer: Callable[[], dict[str, Any]], prepare: Callable[[Terms], Result]) -> Result:
        """Agree with all processes that live, until `prepare` has succeeded in all of them.

        Args:
            offer: what process 0 says about the run. Only process 0 calls it.
            prepare: what each does with the terms: it may use collectives over their devices.
        """
        while True:
            found: list[Terms] = []

            def work(found: list[Terms] = found) -> Result:
                found.append(self._settle(offer))
                self._number = found[0].number
                return prepare(found[0])

            made = self._in_all("agree", work)
            if made is not None and self._is_same():
                self.terms, self._failures = found[0], 0
                return made[0]

    def run(self, at: int, work: Callable[[], Result]) -> Result | None:
        """The result of `work` in all processes. None: it failed in one, so it counts in none.

        Args:
            at: the number of the step.
            work: must be over when it returns, its collectives too.
        """
        made = self._in_all(str(at), work)
        if made is None or not self._is_same():
            self.terms = None
        if made is None:
            return None
        self._failures = 0
        return made[0]

    def broadcast(self, key: str, answer: Callable[[], Any]) -> Any:
        """The answer of process 0 in every process. Only process 0 calls `answer`. It must be JSON."""
        name = f"{_KEYS}/answers/{key}"
        if self.is_first:
            found = answer()
            self._client.key_value_set(name, json.dumps(found), allow_overwrite=True)
            return found
        return json.loads(self._read(name))

    def has_failed(self) -> bool:
        """Whether another process of the block under way has failed."""
        return bool(self._client.key_value_dir_get(self._block))

    def end(self) -> None:
        """Say that the run is over. Process 0 ends last, since the others need its service until then."""
        if self.is_first:
            self._client.key_value_set(f"{_KEYS}/over", "1", allow_overwrite=True)

    def wait_for_others(self) -> None:
        """Wait until all others have ended too. Called when the process ends."""
        for _ in range(2 if self.is_first else 1):
            with contextlib.suppress(Exception), multihost_utils.live_devices(jax.devices()):
                pass

    def _in_all(self, name: str, work: Callable[[], Result]) -> tuple[Result] | None:
        """The result in a tuple, where `work` succeeded in all processes."""
        self.lost, error, made = [], None, None
        self._block = self._name_block(name)
        try:
            with multihost_utils.live_devices(jax.devices()):
                self._members = _incarnations()
                try:
                    made = (work(),)
                except jax.errors.JaxRuntimeError as raised:
                    error = raised
                self._block = self._name_block(name)  # `work` may have changed the number
                if error is not None:
                    why = f"{error}"[:500]
                    self._client.key_value_set(f"{self._block}{jax.process_index()}", why, allow_overwrite=True)
        except multihost_utils.ProcessFailureError as failure:
            self.lost = sorted({d.process_index for d in failure.failed_devices})
            return None
        failed = self._client.key_value_dir_get(self._block)
        if not failed:
            return made
        self._failures += 1
        if self._failures == _MOST_TRIES:
            raise RuntimeError(_given_up(self._failures, failed)) from error
        return None

    def _forget_own_groups(self) -> None:
        """Let Gloo make groups of this process's devices, which an earlier process in its place may have had."""
        ids = ",".join(str(d.id) for d in jax.local_devices())
        self._client.key_value_delete(f"cpu:gloo/{ids}")

    def _name_block(self, name: str) -> str:
        return f"{_KEYS}/failed/{self._number}/{name}/"

    def _is_same(self) -> bool:
        """Whether the processes that live are those of the last block."""
        return _incarnations() == self._members

    def _settle(self, offer: Callable[[], dict[str, Any]]) -> Terms:
        """The terms for the processes that live. Process 0 makes them, and the others read them."""
        members = json.dumps(sorted(self._members.items()))
        self._tries[members] += 1  # every one of them has taken part in each try
        digest = hashlib.sha256(members.encode()).hexdigest()[:32]
        name = f"{_KEYS}/terms/{digest}/{self._tries[members]}"
        if self.is_first:
            terms: Any = {"number": self._number + 1, "order": self._next_order(), "offer": offer()}
            self._client.key_value_set(name, json.dumps(terms), allow_overwrite=True)
        else:
            terms = json.loads(self._read(name, or_over=True))
        if terms["order"] is None:
            raise OrdersUsedUp(_used_up(len(self._devices())))
        known = {d.id: d for d in jax.devices()}
        return Terms(terms["number"], tuple(known[i] for i in terms["order"]), terms["offer"])

    def _devices(self) -> list[Device]:
        return [d for d in jax.devices() if d.process_index in self._members]

    def _next_order(self) -> list[int] | None:
        """The ids of the devices in an order that no group had. None where all were used."""
        ids = sorted(d.id for d in self._devices())
        if len(self._members) == 1:
            return ids  # without Gloo
        orders = self._orders.setdefault(frozenset(ids), itertools.islice(itertools.permutations(ids), _MOST_ORDERS))
        order = next(orders, None)
        return None if order is None else list(order)

    def _read(self, name: str, or_over: bool = False) -> str:
        """The text that process 0 sets. With `or_over` the process ends here where the run is over."""
        while True:
            is_over = or_over and self._is_over()
            try:
                return self._client.blocking_key_value_get(name, _WAIT)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if is_over:
                say_news(f"process {jax.process_index()} came when the run was over, and ends")
                sys.stdout.flush()
                os._exit(0)  # jax's own shutdown needs process 0

    def _is_over(self) -> bool:
        try:
            return bool(self._client.key_value_try_get(f"{_KEYS}/over"))
        except jax.errors.JaxRuntimeError:  # NOT_FOUND
            return False


class OrdersUsedUp(RuntimeError):
    """Every order of the devices of a group was used."""


def _incarnations() -> dict[int, int]:
    """The processes that live, as the last block found. Each start of a process has a number of its own."""
    found: dict[Device, int] = multihost_utils.live_devices.devices or {}
    return {device.process_index: number for device, number in found.items()}


def _given_up(tries: int, failed: list[tuple[str, str]]) -> str:
    reasons = "; ".join(f"process {key.rpartition('/')[2]}: {why}" for key, why in failed)
    return (
        f"fit: a step failed {tries} times though no process was lost: {reasons}; where processes are slower than each "
        "other by seconds, give distributed.initialize a longer heartbeat_timeout"
    )


def _used_up(devices: int) -> str:
    return (
        f"fit: Gloo takes each order of {devices} devices once, and all were used by processes that left and joined; "
        "start the processes with more emulated devices each (jaxpar launch --devices 2)"
    )
