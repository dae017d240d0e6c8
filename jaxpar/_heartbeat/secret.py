"""The secret of a run: where it is found, and how each end of a connection proves that it knows it.

The server sends a random challenge. The process answers with a challenge of its own and with a proof, and the server
proves the same in return. A proof is an HMAC with SHA-256 over both challenges and what the process says it is. The
secret itself is never sent. Later messages of the connection carry no proof, and nothing is encrypted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping

VARIABLE, FILE_VARIABLE = "JAXPAR_SECRET", "JAXPAR_SECRET_FILE"
_LONGEST = 4096  # bytes of a secret
_SHORTEST = 16


@dataclasses.dataclass(frozen=True)
class Secret:
    """A secret.

    Attributes:
        key: the bytes. They are not shown.
        source: where it was found, in words.
    """

    key: bytes = dataclasses.field(repr=False)
    source: str

    def proof(self, end: str, challenges: tuple[str, str], job: str, rank: int, size: int) -> str:
        """What only those can compute who know the secret, for one end ("process" or "server") of one connection."""
        parts = ["jaxpar 1", end, *challenges, job, str(rank), str(size)]
        framed = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.new(self.key, framed.encode(), hashlib.sha256).hexdigest()


def new(source: str) -> Secret:
    """A secret of 32 random bytes."""
    return Secret(secrets.token_hex(32).encode(), source)


def challenge() -> str:
    """A random text that is used once."""
    return secrets.token_hex(16)


def is_equal(one: str, other: str) -> bool:
    """Whether two proofs are equal, in a time that does not depend on them."""
    return hmac.compare_digest(one.encode(), other.encode())


def find(env: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret in `JAXPAR_SECRET`, in the file `JAXPAR_SECRET_FILE`, or in `~/.config/jaxpar/secret`. None: none.

    Raises:
        RuntimeError: it is shorter than 16 bytes or longer than 4096. A file that others can read, that belongs to
            another user, or that `JAXPAR_SECRET_FILE` names and that cannot be read.
    """
    if (value := env.get(VARIABLE)) is not None:
        return _checked(value.encode(errors="surrogateescape"), f"the variable {VARIABLE}")
    if (named := env.get(FILE_VARIABLE)) is not None:
        return _read(named)
    folder = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".config")
    path = os.path.join(folder, "jaxpar", "secret")
    return _read(path) if os.path.lexists(path) else None


def _read(path: str) -> Secret:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would not return
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            _check_owner(path, about)
            return _checked(file.read(_LONGEST + 1), f"the file {path}")
    except OSError as error:
        raise RuntimeError(f"distributed.initialize: the secret in {path} cannot be read: {error.strerror}") from None


def _check_owner(path: str, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise RuntimeError(f"distributed.initialize: the secret {path} is no regular file")
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o077):
        raise RuntimeError(
            f"distributed.initialize: the secret {path} must belong to you and be readable by you only; "
            f"run `chmod 600 {path}`, and make a new one if others could read it"
        )


def _checked(key: bytes, source: str) -> Secret:
    key = key.strip()
    if not _SHORTEST <= len(key) <= _LONGEST:
        raise RuntimeError(
            f"distributed.initialize: the secret in {source} must have {_SHORTEST} to {_LONGEST} bytes; "
            "`python -c 'import secrets; print(secrets.token_hex(32))'` makes one"
        )
    return Secret(key, source)
