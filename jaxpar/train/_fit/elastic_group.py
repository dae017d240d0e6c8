"""Agreement of the processes of an elastic run: on their devices, and whether each step succeeded.

Which processes live, and that a block of work succeeded in all of them or in none, is jax's `live_devices`. What they
agree on beside that is a text in jax's key-value store, which process 0 holds. `elastic_members` says who they are.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
from jax.experimental import multihost_utils

from ... import distributed
from ..._core.arrays import Device
from .elastic_members import Members, joining
from .elastic_program import Program

Result = TypeVar("Result")
Prepared = TypeVar("Prepared")

_KEYS = distributed._KEYS
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
        joined: the processes that join after the last block.
    """

    def __init__(self) -> None:
        self.terms: Terms | None = None
        self.lost: list[int] = []
        self.joined: list[int] = []
        self._client: Any = distributed._jax_client()
        self._members = Members(self._client)
        self._tries: collections.Counter[str] = collections.Counter()
        self._failures = 0
        self._orders: dict[frozenset[int], Iterator[tuple[int, ...]]] = {}
        self._number, self._block = 0, ""
        if self._client is not None:
            self._forget_own_groups()

    @property
    def is_first(self) -> bool:
        return jax.process_index() == 0

    def check_program(self, own: Program) -> None:
        """Compare what this process would compute with what process 0 does. Where it differs, the process ends here."""
        self._members.check_program(own)

    def refuse(self, why: str) -> NoReturn:
        """End this process, which does not compute what process 0 does."""
        self._members.refuse(why)

    def agree(
        self,
        offer: Callable[[], dict[str, Any]],
        prepare: Callable[[Terms], Prepared],
        take: Callable[[Terms, Prepared], Result],
    ) -> Result:
        """Agree with all members, until `prepare` and then `take` have succeeded in all of them.

        Gloo waits half a minute for a process that is lost while it connects. So that all begin to connect at once,
        what takes time before belongs in `prepare`.

        Args:
            offer: what process 0 says about the run. Only process 0 calls it.
            prepare: what each does with the terms. It may use no collectives.
            take: what each does with what it has prepared. It may use collectives over the devices of the terms.
        """
        if not self._members.starts:
            self._members.join()
        while True:
            if self.is_first:
                self._members.publish()
            found: list[tuple[Terms, Prepared]] = []

            def settle(found: list[tuple[Terms, Prepared]] = found) -> None:
                terms = self._settle(offer)
                self._number = terms.number
                found.append((terms, prepare(terms)))

            if self._in_all("agree", settle) is None:
                continue
            made = self._in_all("take", lambda found=found: take(*found[0]))
            if made is not None:
                self.terms, self._failures = found[0][0], 0
                return made[0]

    def run(self, at: int, work: Callable[[], Result]) -> Result | None:
        """The result of `work` in all processes. None: it failed in one, so it counts in none.

        Args:
            at: the number of the step.
            work: must be over when it returns, its collectives too.
        """
        before = self._members.starts
        made = self._in_all(str(at), work, invites=True)
        if self._members.starts != before:
            self.terms = None
        if made is None:
            self.terms = None
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
        return self._read(name, lambda found: {"stop", "signal", "record"} == found.keys())

    def has_failed(self) -> bool:
        """Whether another process of the block under way has failed."""
        return bool(_failures(self._client.key_value_dir_get(self._block)))

    def end(self) -> None:
        """Say that the run is over. Process 0 ends last, since the others need its service until then."""
        if self.is_first:
            distributed._end_run(self._client)

    def wait_for_others(self) -> None:
        """Wait until all others have ended too. Called when the process ends."""
        for _ in range(2 if self.is_first else 1):
            with contextlib.suppress(Exception), multihost_utils.live_devices(jax.devices()):
                pass

    def _in_all(self, name: str, work: Callable[[], Result], invites: bool = False) -> tuple[Result] | None:
        """The result in a tuple, where `work` succeeded in all members. With `invites` others may join after it."""
        self.lost, self.joined, made, errors = [], [], None, list[Exception]()
        self._block = self._name_block(name)
        try:
            with self._members.together():
                made = self._attempt(name, work, errors)
                if invites and made and self.is_first:
                    self._members.invite(self._block)
        except multihost_utils.ProcessFailureError as failure:
            self.lost = sorted({d.process_index for d in failure.failed_devices})
            self._members.leave_out_lost()
            return None
        entries = self._client.key_value_dir_get(self._block)
        if made and not _failures(entries):
            if new := joining(entries):
                self.joined = sorted(new)
                self._members.become({**self._members.starts, **new})
            return made
        self._count_failure(_failures(entries), errors)
        return None

    def _attempt(self, name: str, work: Callable[[], Result], errors: list[Exception]) -> tuple[Result] | None:
        """The result in a tuple. An error of jax is written for the others, and added to `errors`."""
        error, made = None, None
        try:
            made = (work(),)
        except jax.errors.JaxRuntimeError as raised:
            error = raised
        self._block = self._name_block(name)  # `work` may have changed the number
        if error is not None:
            errors.append(error)
            self._client.key_value_set(f"{self._block}{jax.process_index()}", f"{error}"[:500], allow_overwrite=True)
        return made

    def _count_failure(self, failed: list[tuple[str, str]], errors: list[Exception]) -> None:
        """Count a block that failed though nobody was lost. `RuntimeError` where there were too many in a row."""
        self._failures += 1
        if self._failures == _MOST_TRIES:
            raise RuntimeError(_given_up(self._failures, failed)) from (errors[0] if errors else None)

    def _forget_own_groups(self) -> None:
        """Let Gloo make groups of this process's devices, which an earlier process in its place may have had."""
        ids = ",".join(str(d.id) for d in jax.local_devices())
        self._client.key_value_delete(f"cpu:gloo/{ids}")

    def _name_block(self, name: str) -> str:
        return f"{_KEYS}/failed/{self._number}/{name}/"

    def _settle(self, offer: Callable[[], dict[str, Any]]) -> Terms:
        """The terms for the processes that live. Process 0 makes them, and the others read them."""
        members = json.dumps(sorted(self._members.starts.items()))
        self._tries[members] += 1  # every one of them has taken part in each try
        digest = hashlib.sha256(members.encode()).hexdigest()[:32]
        name = f"{_KEYS}/terms/{digest}/{self._tries[members]}"
        if self.is_first:
            terms: Any = {"number": self._number + 1, "order": self._next_order(), "offer": offer()}
            self._client.key_value_set(name, json.dumps(terms), allow_overwrite=True)
        else:
            terms = self._read(name, _is_terms)
        if terms["order"] is None:
            raise OrdersUsedUp(_used_up(len(self._members.devices)))
        known = {d.id: d for d in jax.devices()}
        return Terms(terms["number"], tuple(known[i] for i in terms["order"]), terms["offer"])

    def _next_order(self) -> list[int] | None:
        """The ids of the devices in an order that no group had. None where all were used."""
        ids = sorted(d.id for d in self._members.devices)
        if len(self._members.starts) == 1:
            return ids  # without Gloo
        orders = self._orders.setdefault(frozenset(ids), itertools.islice(itertools.permutations(ids), _MOST_ORDERS))
        order = next(orders, None)
        return None if order is None else list(order)

    def _read(self, name: str, is_valid: Callable[[Any], bool]) -> Any:
        """What process 0 sets, as JSON. What is not valid is not its own, and it is waited for."""
        while True:
            try:
                found = distributed._parse(self._client.blocking_key_value_get(name, _WAIT), is_valid)
                if found is not None:
                    return found
                time.sleep(_WAIT / 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


class OrdersUsedUp(RuntimeError):
    """Every order of the devices of a group was used."""


def _failures(entries: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The errors among the entries of a block, by the process that had them."""
    ranks = set(map(str, range(jax.process_count())))
    return [(key, text) for key, text in entries if key.rpartition("/")[2] in ranks]


def _is_terms(found: Any) -> bool:
    order, offer = found["order"], found["offer"]
    known = {d.id for d in jax.devices()}
    return type(found["number"]) is int and (order is None or {*order} <= known) and type(offer["at"]) is int


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
