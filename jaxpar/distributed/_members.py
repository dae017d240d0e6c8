"""Which processes compute together in an elastic run, as process 0 writes it for all.

A barrier among these members waits for each of them that is connected to jax's coordination service. A process that
comes back is connected in the place of the one that was lost. Until the others have noticed that loss, they would wait
for the new one. So it takes part in that one barrier, and is no member after it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from .._core.text import say_before_exit
from .._heartbeat.messages import LOST, REFUSED

KEYS = "jaxpar/elastic"  # in jax's key-value store
_GROUP, _OVER = f"{KEYS}/group", f"{KEYS}/over"
_POLL = 0.1  # seconds between two looks at a key
_NOTICED = 1.0  # seconds in which process 0 writes that it has noticed a loss
_MOST_WAIT = 10.0  # seconds that a barrier may take which others have left


@dataclasses.dataclass(frozen=True)
class Members:
    """The members at one time.

    Attributes:
        number: how often they have changed.
        starts: the number that jax gave to the start of each process, by its index.
    """

    number: int = 0
    starts: dict[int, int] = dataclasses.field(default_factory=dict[int, int])


def jax_client() -> Any:
    """The connection of this process to jax's coordination service, which holds the key-value store. None without."""
    return multihost_utils.distributed.global_state.client  # pyright: ignore[reportPrivateImportUsage]


def write_members(client: Any, members: Members) -> None:
    """Write the members for all processes. Only process 0 does."""
    text = json.dumps([members.number, list(members.starts.items())])
    client.key_value_set(_GROUP, text, allow_overwrite=True)


def read_members(client: Any) -> Members:
    """What process 0 wrote last. No member where it has not written."""
    number, starts = parse(get(client, _GROUP), _is_group) or (0, [])
    return Members(number, dict(starts))


def parse(text: str | None, is_valid: Callable[[Any], bool]) -> Any:
    """What a text of jax's key-value store says as JSON. None where it is not valid: anybody can write there.

    Example:
        >>> parse("[1, 2]", whole_numbers), parse("x", whole_numbers), parse('["1"]', whole_numbers)
        ([1, 2], None, None)
    """
    try:
        found = None if text is None else json.loads(text)
        return found if found is not None and is_valid(found) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def whole_numbers(found: Any) -> bool:
    """Whether this is a list of ints from 0 to 2**64."""
    return isinstance(found, list) and all(type(x) is int and 0 <= x < 1 << 64 for x in found)  # pyright: ignore


def _is_group(found: Any) -> bool:
    number, starts = found
    return whole_numbers([number]) and all(len(pair) == 2 and whole_numbers(pair) for pair in starts)


def refuse(rank: int, why: str) -> NoReturn:
    """End this process, which would compute something else than process 0. The others go on without it."""
    say_before_exit(
        f"jaxpar: process {rank} has another program than process 0, and the run goes on without it. Other: {why}. It "
        f"ends with status {REFUSED}; start it with the script, the data and the versions that the run began with"
    )
    os._exit(REFUSED)


def end_run(client: Any) -> None:
    """Write that the run is over. Only process 0 does."""
    client.key_value_set(_OVER, "1", allow_overwrite=True)


def is_over(client: Any) -> bool:
    """Whether process 0 has written that the run is over."""
    return get(client, _OVER) is not None


def own_start(client: Any, rank: int) -> int:
    """The number that jax gave to the start of this process. Where the others have left it behind, it ends."""
    if (start := client.get_live_nodes([rank]).get(rank)) is None:
        end_left_behind()
    return start


def end_left_behind() -> NoReturn:
    """End this process, without which the others have gone on."""
    say_before_exit(f"jaxpar: the others have gone on without this process. It ends with status {LOST}")
    os._exit(LOST)


def release_others(client: Any, rank: int) -> Members:
    """Return the members, after they have noticed the loss of the process that this one replaces.

    Args:
        client: jax's client, connected.
        rank: of this process.
    """
    own, released = own_start(client, rank), -1
    while (members := read_members(client)).starts.get(rank, own) != own and not is_over(client):
        time.sleep(_NOTICED)
        if members.number != released and read_members(client).number == members.number:
            _take_part(client, members)
            released = members.number
    return members


def _take_part(client: Any, members: Members) -> None:
    """Take part in the next barrier of the members. Where they have left it, this process ends."""
    barrier = threading.Thread(target=_wait, args=(client, members), daemon=True)
    barrier.start()
    left = None
    while barrier.is_alive():
        barrier.join(_POLL)
        if left is None and (read_members(client).number != members.number or is_over(client)):
            left = time.monotonic()
        if left is not None and time.monotonic() - left > _MOST_WAIT and barrier.is_alive():
            end_left_behind()


def _wait(client: Any, members: Members) -> None:
    try:
        client.get_live_nodes(sorted(members.starts))
    except jax.errors.JaxRuntimeError:  # process 0 is lost, which the heartbeats report
        return


def get(client: Any, key: str) -> str | None:
    """The text of a key, or None."""
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError:  # NOT_FOUND
        return None
