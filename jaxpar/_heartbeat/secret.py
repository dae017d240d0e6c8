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
from typing import Any

VARIABLE, FILE_VARIABLE = "JAXPAR_SECRET", "JAXPAR_SECRET_FILE"
_SHORTEST, _LONGEST = 16, 4096  # bytes of a secret. A shorter one could be guessed


@dataclasses.dataclass(frozen=True)
class Secret:
    """A secret. Its key is never shown."""

    key: bytes = dataclasses.field(repr=False)
    source: str  # where it was found, in words

    def proof(self, end: str, challenges: tuple[str, str], job: str, rank: int, size: int) -> str:
        """What only those can compute who know the secret, for one end ("process" or "server") of one connection."""
        parts = ["jaxpar 1", end, *challenges, job, str(rank), str(size)]
        framed = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.new(self.key, framed.encode(), hashlib.sha256).hexdigest()

    def is_proof(self, given: str, *about: Any) -> bool:
        """Whether a text is this proof, in a time that does not depend on the text."""
        return hmac.compare_digest(given.encode(), self.proof(*about).encode())


def new(source: str) -> Secret:
    """A secret of 32 random bytes."""
    return Secret(secrets.token_hex(32).encode(), source)


def challenge() -> str:
    return secrets.token_hex(16)


def find(env: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret in `JAXPAR_SECRET`, in the file `JAXPAR_SECRET_FILE`, or in `~/.config/jaxpar/secret`, if any.

    One of another length, or in a file that others can read, is a `RuntimeError`.
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
            about = os.fstat(descriptor)  # of what is open: the path may be another file by now
            if not stat.S_ISREG(about.st_mode):
                raise RuntimeError(f"distributed.initialize: the secret {path} is not a regular file")
            if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o077):
                raise RuntimeError(
                    f"distributed.initialize: the secret {path} must belong to you and be readable by you only; "
                    f"run `chmod 600 {path}`, and make a new one if others could read it"
                )
            return _checked(file.read(_LONGEST + 1), f"the file {path}")
    except OSError as error:
        raise RuntimeError(f"distributed.initialize: the secret in {path} cannot be read: {error.strerror}") from None


def _checked(key: bytes, source: str) -> Secret:
    key = key.strip()
    if not _SHORTEST <= len(key) <= _LONGEST:
        raise RuntimeError(
            f"distributed.initialize: the secret in {source} must have {_SHORTEST} to {_LONGEST} bytes; "
            "`python -c 'import secrets; print(secrets.token_hex(32))'` makes one"
        )
    return Secret(key, source)
