"""The processes that compute together in an elastic run, and how others come to be among them.

A barrier of jax's `live_devices` waits for each process of its devices that is connected. So it is over the devices of
the members only, and nobody waits for a process that has connected and still starts. A process that is ready says so
in jax's key-value store. Process 0 takes it in after a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from ... import distributed
from ..._core.arrays import Device
from ..._core.text import say_news
from .elastic_program import Program, differences

_READY, _REFUSED = f"{distributed._KEYS}/ready/", f"{distributed._KEYS}/refused/"
_PROGRAM = f"{distributed._KEYS}/program"
_POLL = 0.05  # seconds between two looks at a key
_START = 60.0  # seconds that process 0 waits for the others at the start, or JAXPAR_INITIALIZATION_TIMEOUT
JOIN = "join"  # the key in a block by which process 0 takes others in


class Members:
    """The members of an elastic run, as this process sees them.

    Attributes:
        starts: the number that jax gave to the start of each member, by its index.
    """

    def __init__(self, client: Any):
        self.starts: dict[int, int] = {}
        self._client, self._number = client, 0
        self._live: Any = multihost_utils.live_devices
        self._program: Program = {}  # what this process computes
        self._rank, self._were = jax.process_index(), set[int]()  # the starts that were members

    @property
    def devices(self) -> list[Device]:
        """The devices of the members."""
        return [d for d in jax.devices() if d.process_index in self.starts]

    def join(self) -> None:
        """Say that this process is ready, and wait until it is a member.

        Process 0 waits at the start for all others, a minute at most. Where the run is over, the process ends here.
        """
        own = distributed._own_start(self._client, self._rank)
        self._client.key_value_set(f"{_READY}{self._rank}", str(own), allow_overwrite=True)
        if self._rank == 0:
            return self.become(self._wait_for_all())
        while True:
            members = distributed._release_others(self._client, self._rank)
            if members.starts.get(self._rank) == own:
                return self.become(members.starts)
            if distributed._is_over(self._client):
                _leave()
            time.sleep(_POLL)

    def check_program(self, own: Program) -> None:
        """Compare what this process would compute with what process 0 does. Where it differs, the process ends here."""
        self._program = own
        if self._rank == 0:
            return self._publish_program()
        while (found := distributed._parse(distributed._get(self._client, _PROGRAM), _is_program)) is None:
            if distributed._is_over(self._client):
                _leave()
            time.sleep(_POLL)
        if why := differences(own, found):
            self.refuse(why)

    def refuse(self, why: str) -> NoReturn:
        """End this process, which does not compute what process 0 does."""
        self._client.key_value_set(f"{_REFUSED}{self._rank}", "1", allow_overwrite=True)
        distributed._refuse(self._rank, why)

    def become(self, starts: dict[int, int]) -> None:
        """Compute with these processes from now on. All members must make this call at the same place."""
        self.starts, self._live = dict(starts), type(multihost_utils.live_devices)()
        self._live.devices = {d: starts[d.process_index] for d in self.devices}  # as after a barrier among them
        self._number += 1
        self._were.update(starts.values())

    def publish(self) -> None:
        """Say who the members are, before their next block. Only process 0 does."""
        distributed._write_members(self._client, distributed._Members(self._number, self.starts))
        self._publish_program()

    def _publish_program(self) -> None:
        self._client.key_value_set(_PROGRAM, json.dumps(self._program), allow_overwrite=True)

    def together(self) -> contextlib.AbstractContextManager[object]:
        """A block that succeeds in all members or in none. It ends with a barrier, and begins without one.

        Raises:
            ProcessFailureError: a member was lost in it or before.
        """
        return self._live(self.devices)

    def leave_out_lost(self) -> None:
        """Compute without the members that the last block has found lost."""
        live: dict[Device, int] = self._live.devices or {}
        found = {device.process_index: start for device, start in live.items()}
        if found.get(self._rank) != self.starts[self._rank]:
            distributed._end_left_behind()
        self.become({rank: start for rank, start in self.starts.items() if found.get(rank) == start})

    def invite(self, block: str) -> None:
        """Take those in that are ready, after this block. Only process 0 does, within the block."""
        ready = self._ready().items()
        if new := {rank: start for rank, start in ready if rank not in self.starts and start not in self._were}:
            self._client.key_value_set(f"{block}{JOIN}", json.dumps(list(new.items())), allow_overwrite=True)

    def _ready(self) -> dict[int, int]:
        """The processes that have said that they are ready."""
        found: list[tuple[str, str]] = self._client.key_value_dir_get(_READY)
        pairs = [distributed._parse(f"[{key.rpartition('/')[2]}, {start}]", _is_pair) for key, start in found]
        return dict(pair for pair in pairs if pair and pair[0] < jax.process_count())

    def _refused(self) -> int:
        return len(self._client.key_value_dir_get(_REFUSED))

    def _wait_for_all(self) -> dict[int, int]:
        end = time.monotonic() + float(os.environ.get("JAXPAR_INITIALIZATION_TIMEOUT") or _START)
        while len(ready := self._ready()) < jax.process_count() - self._refused() and time.monotonic() < end:
            time.sleep(_POLL)
        return ready


def joining(entries: list[tuple[str, str]]) -> dict[int, int]:
    """The processes that were taken in by the entries of a block."""
    texts = [text for key, text in entries if key.endswith(f"/{JOIN}")]
    return dict(distributed._parse(texts[0] if texts else None, lambda found: all(map(_is_pair, found))) or ())


def _is_pair(found: Any) -> bool:
    return distributed._whole_numbers(found) and len(found) == 2


def _is_program(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(text, str) for text in found.values())  # pyright: ignore


def _leave() -> None:
    say_news(f"process {jax.process_index()} came when the run was over, and ends")
    sys.stdout.flush()
    os._exit(0)  # jax's own shutdown needs process 0
