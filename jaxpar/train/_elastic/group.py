"""The processes of an elastic run: who computes together, what they agreed on, and whether each step succeeded.

Which processes live, and that a block of work succeeded in all of them or in none, is jax's `live_devices`. What they
agree on beside that is a text in jax's key-value store, which process 0 holds.

A barrier of `live_devices` waits for each process of its devices that is connected. So it is over the devices of the
members only, and nobody waits for a process that has connected and still starts. A process that is ready says so in the
key-value store, and process 0 takes it in after a step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypedDict, TypeVar

import jax

from ... import distributed
from ..._core.arrays import Device
from ..._core.text import say, say_before_exit, say_news
from ..._heartbeat.server import REFUSED
from .._callbacks.history import Record
from .program import Program, differences, is_program

_JOIN = "join"  # the key in a block by which process 0 takes others in
_POLL = 0.05  # seconds between two looks at a key
_START = 60.0  # seconds that process 0 waits for the others at the start, or JAXPAR_INITIALIZATION_TIMEOUT
_MOST_TRIES = 8  # failures in a row, with the same processes, after which a step is given up

Devices = tuple[Device, ...]
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


class Offer(TypedDict):
    """What process 0 says about the run in an agreement, as JSON."""

    at: int  # the number of steps that were made
    first: int  # the number of them when the run began
    last: int  # and at its end
    history: list[Record]
    batch: str  # a digest of the batch of the step that is made next


class Word(TypedDict):
    """What process 0 says between two steps, as JSON."""

    stop: bool
    signal: int | None  # after which it stops
    history: list[Record]  # of a word to stop all records, else the one of this step


class Group:
    """This process and those that compute with it, its members."""

    def __init__(self, client: distributed._Client | None = None):
        # The members, by the index of each process, with the number that jax gave to its start. A process that comes
        # back has the index of the lost one and another start.
        self.starts: dict[int, int] = {}
        self.agrees = False  # whether they have agreed; after a change of members and a failure they must again
        self.lost: list[int] = []  # the processes that were lost in the last block
        self.joined: list[int] = []  # those that join after it
        self._board = distributed._Board(client)
        self._rank = jax.process_index()
        self.is_first = self._rank == 0
        self._live = distributed._live_devices()
        self._were = set[int]()  # the starts that were members
        # In all members the same: how often they have changed, and how often these ones have tried to agree.
        self._number = self._tries = 0
        self._failures = 0  # of blocks in a row, though nobody was lost
        self._block = ""  # the beginning of the keys of the last block
        self._program: Program = {}  # what this process computes
        self._orders: dict[frozenset[int], Iterator[tuple[int, ...]]] = {}
        if jax.distributed.is_initialized():
            # Gloo may know a group of these devices, of an earlier process in the place of this one.
            distributed._forget_group(self._board.client, [d.id for d in jax.local_devices()])

    @property
    def devices(self) -> list[Device]:
        return [d for d in jax.devices() if d.process_index in self.starts]

    def set_members(self, starts: dict[int, int], number: int | None = None) -> None:
        """Compute with these processes from now on. All members must make this call at the same place."""
        self.starts = dict(starts)
        # jax compares those that live after a block with those before it, which it keeps. A new `live_devices` has
        # none, and begins with one more barrier to learn them. In a process that joins it would be out of step with
        # those of the others, so all members are given the same.
        self._live = distributed._live_devices({d: starts[d.process_index] for d in self.devices})
        self._number, self._tries, self.agrees = self._number + 1 if number is None else number, 0, False
        self._were.update(starts.values())

    # 1. A process begins: it compares its program with that of process 0, and becomes a member.

    def check_program(self, program: Program) -> None:
        """Compare this process's program with that of process 0. End this process if they differ."""
        self._program = program
        if self.is_first:
            return self._board.set("program", program)
        while (first := self._board.get("program", is_program)) is None:
            self._leave_if_over()
        if why := differences(program, first):
            self.refuse(why)

    def refuse(self, why: str) -> NoReturn:
        """End this process, because its program differs from that of process 0. The other processes continue."""
        self._board.set(f"refused/{self._rank}", 1)
        say_before_exit(
            f"jaxpar: process {self._rank} differs from process 0 in: {why}. It ends with status {REFUSED}, and the "
            "run continues without it; start it with the same script, data and versions as the others"
        )
        os._exit(REFUSED)

    def _join(self) -> None:
        """Say that this process is ready, and wait until it is a member. Where the run is over, the process ends."""
        start = self._board.own_start(self._rank)
        self._board.set(f"ready/{self._rank}", start)
        if not self.is_first:
            while True:
                number, starts = self._board.release_others(self._rank)
                if starts.get(self._rank) == start:
                    return self.set_members(starts, number)
                self._leave_if_over()

        # Process 0 waits for all others, a minute at most. One that was refused does not come.
        end = time.monotonic() + float(os.environ.get("JAXPAR_INITIALIZATION_TIMEOUT") or _START)
        while True:
            ready = self._ready()
            coming = jax.process_count() - len(self._board.entries("refused"))
            if len(ready) >= coming or time.monotonic() >= end:
                return self.set_members(ready)
            time.sleep(_POLL)

    def _ready(self) -> dict[int, int]:
        return _by_rank(self._board.entries("ready", distributed._is_start))

    def _leave_if_over(self) -> None:
        """End this process where the run is over. Else wait until it is time for another look."""
        if self._board.is_over():
            say_news(f"process {self._rank} started after the end of the run, and ends")
            sys.stdout.flush()
            os._exit(0)  # jax's own shutdown needs process 0
        time.sleep(_POLL)

    # 2. All members agree, at the start and after each loss and each new member.

    def agree(
        self,
        offer: Callable[[], Offer],
        prepare: Callable[[Devices], Prepared],
        take: Callable[[Devices, Offer, Prepared], None],
    ) -> None:
        """Agree with all members, until `prepare` and then `take` have succeeded in all of them.

        `offer()` is what process 0 says about the run. `prepare(devices)` gets the devices of all, in an order that no
        group had, and uses no collectives. `take(devices, offer, prepared)` may use them.
        """
        if not self.starts:
            self._join()
        while not self.agrees:
            self.agrees = self._try_to_agree(offer, prepare, take)
            if self.is_first and self.lost:
                who = ", ".join(map(str, self.lost))
                say(f"process {who} was lost while the processes connected; the others connect again")
        self._failures = 0

    def _try_to_agree(
        self,
        offer: Callable[[], Offer],
        prepare: Callable[[Devices], Prepared],
        take: Callable[[Devices, Offer, Prepared], None],
    ) -> bool:
        """One attempt of `agree`. False where a member failed or was lost."""
        # The number of the attempt is in the key, so that nobody reads what was said in an earlier one.
        self._tries += 1
        terms_key = f"terms/{self._number}/{self._tries}"
        if self.is_first:
            self._board.set("members", [self._number, list(self.starts.items())])
            self._board.set("program", self._program)
        members, losses = set(self.starts), distributed._losses()
        num_losses = len(losses)

        # Process 0 says where the run is and in which order the devices compute, and each process prepares. After
        # that all begin to connect at once, so what takes time before belongs in `prepare`.
        def settle() -> tuple[Devices, Offer, Prepared]:
            if self.is_first:
                terms: Any = {"order": self._next_order(), "offer": offer()}
                self._board.set(terms_key, terms)
            else:
                terms = self._board.wait(terms_key, _is_terms)
            if terms["order"] is None:  # as after a loss without elastic: all start again from a checkpoint
                say(
                    f"fit: Gloo accepts each order of {len(self.devices)} devices once, and processes that left and "
                    "joined have used up all orders; start each process with more emulated devices (jaxpar launch "
                    f"--devices 2). This process ends with status {distributed.LOST}, so that all start again from a "
                    "checkpoint"
                )
                sys.exit(distributed.LOST)
            devices_by_id = {d.id: d for d in jax.devices()}
            devices = tuple(devices_by_id[i] for i in terms["order"])
            return devices, terms["offer"], prepare(devices)

        settled = self._in_all("agree", settle)
        if settled is None:
            return False
        ((devices, offered, prepared),) = settled

        # They connect by their first collectives. Gloo waits long for a process that was lost meanwhile or has failed.
        # Process 0, which learns of both, ends that wait for all.
        def is_in_vain() -> bool:
            return not members.isdisjoint(losses[num_losses:]) or self.has_failed()

        ids = [d.id for d in devices]
        connecting = distributed._connecting(self._board.client, ids, is_in_vain)
        with connecting if self.is_first else contextlib.nullcontext():
            return self._in_all("take", lambda: take(devices, offered, prepared)) is not None

    def _next_order(self) -> Sequence[int] | None:
        """The ids of the devices in an order that no group had. None where all were used."""
        # Gloo keeps the addresses of a group in jax's key-value store under the ids of its devices, in their order.
        # With an order that was used it would find the addresses of the earlier group, and wait for who is gone.
        ids = sorted(d.id for d in self.devices)
        if len(self.starts) == 1:
            return ids  # without Gloo
        return next(self._orders.setdefault(frozenset(ids), itertools.permutations(ids)), None)

    # 3. They make steps, each in a block that counts in all members or in none.

    def run(self, at: int, work: Callable[[], Result]) -> Result | None:
        """The result of `work`, which ends with its collectives. None: it failed in a process, so it counts in none."""
        made = self._in_all(str(at), work, invites=True)
        if made is None:
            self.agrees = False
            return None
        self._failures = 0
        return made[0]

    def _in_all(self, name: str, work: Callable[[], Result], invites: bool = False) -> tuple[Result] | None:
        """The result in a tuple, where `work` succeeded in all members. With `invites` others may join after it."""
        self.lost, self.joined, made, error = [], [], None, None
        self._block = f"blocks/{self._number}/{self._tries}/{name}"

        # The work. The block ends with a barrier. Behind it all members can read what one of them wrote before it: its
        # error, or whom process 0 invites. So all decide the same, without a further message that could be lost.
        try:
            with self._live(self.devices):
                try:
                    made = (work(),)
                except jax.errors.JaxRuntimeError as raised:
                    error = raised
                    self._board.set(f"{self._block}/{self._rank}", f"{error}"[:500])
                # Process 0 takes in who is ready. One that was lost has left its `ready` behind, with a start that was
                # a member. Nobody may wait for it again.
                if invites and made and self.is_first:
                    ready = self._ready().items()
                    new = [[rank, s] for rank, s in ready if rank not in self.starts and s not in self._were]
                    if new:
                        self._board.set(f"{self._block}/{_JOIN}", new)
        except distributed._process_failure() as failure:
            # A member was lost: the barrier raises in all others. They go on without those that it has found lost.
            # Where it counted this process among these, they are gone already, and this one would wait for nobody.
            self.lost = sorted({d.process_index for d in failure.failed_devices})
            living = {device.process_index: start for device, start in (self._live.devices or {}).items()}
            if living.get(self._rank) != self.starts[self._rank]:
                distributed._end_left_behind()
            self.set_members({rank: start for rank, start in self.starts.items() if living.get(rank) == start})
            return None

        # Nobody was lost. It succeeded in all, or in none.
        entries = self._board.entries(self._block)
        failed = _by_rank(entries)
        if made and not failed:
            invited: Any = entries.get(_JOIN)
            if distributed._is_starts(invited):
                self.joined = sorted(rank for rank, _ in invited)
                self.set_members({**self.starts, **dict(invited)})
            return made

        # It failed in a process, as where that was so slow that Gloo gave up. It is tried again, but not forever.
        self._failures += 1
        if self._failures == _MOST_TRIES:
            reasons = "; ".join(f"process {rank}: {why}" for rank, why in failed.items())
            raise RuntimeError(
                f"fit: a step failed {_MOST_TRIES} times, but no process was lost: {reasons}; if some processes are "
                "seconds slower than others, give distributed.initialize a longer heartbeat_timeout"
            ) from error
        return None

    def has_failed(self) -> bool:
        """Whether another process of the block under way has failed."""
        return bool(_by_rank(self._board.entries(self._block)))

    # 4. Process 0 says between the steps whether the run goes on, and all end.

    def tell(self, place: int | str, word: Word) -> None:
        """Say a word to the other processes after a step, or at another place. Only process 0 does."""
        self._board.set(f"words/{place}", word)

    def hear(self, place: int | str) -> Word:
        """The word of process 0 at a place. It is waited for."""
        return self._board.wait(f"words/{place}", lambda value: {"stop", "signal", "history"} == dict(value).keys())

    def end(self) -> None:
        """Say that the run is over. Only process 0 does."""
        self._board.set("over", 1)

    def wait_for_others(self) -> None:
        """Wait until all others have ended too. Process 0 ends last, since the others need its service until then."""
        # A block is a barrier: nobody leaves it before all are in it, or gone. The second one of process 0 is over when
        # all others are gone.
        live = distributed._live_devices()
        for _ in range(2 if self.is_first else 1):
            with contextlib.suppress(Exception), live(jax.devices()):
                pass


def _by_rank(entries: dict[str, Any]) -> dict[int, Any]:
    return {rank: entries[str(rank)] for rank in range(jax.process_count()) if str(rank) in entries}


def _is_terms(value: Any) -> bool:
    order, offer = value["order"], value["offer"]
    are_numbers = all(isinstance(offer[name], int) for name in ("at", "first", "last"))
    return are_numbers and (order is None or {*order} <= {d.id for d in jax.devices()})
