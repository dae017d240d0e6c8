"""What the heartbeat server knows of each process."""

from __future__ import annotations

import dataclasses

from .connection import JsonConnection
from .messages import Message


@dataclasses.dataclass(frozen=True)
class Lost:
    """The first process that was lost.

    Attributes:
        rank, host: which process, and where it ran.
        why: the reason, as a clause.
    """

    rank: int
    host: str
    why: str


@dataclasses.dataclass(eq=False)
class Peer:
    """One connection to the server.

    Attributes:
        connection: the server's end.
        last_message: when the last message came, or when it connected.
        rank: which process of the run it is. It is -1 before the hello.
        challenge: what was sent to it, where the run has a secret. It is empty before the hello.
        hello: its hello, while it has not proved that it knows the secret.
        timeout: seconds for which it waits for the other processes.
        is_leaving: whether it ends, or was refused. Its further messages do not count.
        is_paused: whether it is not read for now, since it sent too much.
        is_dropped: whether its connection is closed.
    """

    connection: JsonConnection
    last_message: float
    rank: int = -1
    challenge: str = ""
    hello: Message | None = None
    timeout: float = 0.0
    is_leaving: bool = False
    is_paused: bool = False
    is_dropped: bool = False
