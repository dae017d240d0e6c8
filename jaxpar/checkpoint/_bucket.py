"""Checkpoints in a bucket of Google Cloud Storage or of S3: `gs://bucket/run`, `s3://bucket/run`.

A bucket has objects with names. It has no folders, and nothing in it can be renamed, linked or locked. What it has: an
object is there whole or not at all, and it can be written on the condition that nobody has written it since. So a
checkpoint is first written to a temporary folder of this machine, as for a disk, and then sent. One object, its
manifest, decides what is there:

    none                              no checkpoint
    {"unfinished": {"owner", ...}}    a claim: a process is sending the checkpoint, or removing it
    a manifest                        the checkpoint is whole

The manifest is written on the condition that the claim is still the one of this save, and removing a checkpoint begins
by a claim in place of its manifest. So a process that was stopped for an hour cannot complete what another has removed.

Requests are those of tensorstore, on which orbax stands: it finds the credentials, as Google's and Amazon's own
programs do, and repeats what failed for a moment.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .._core import files, process, text
from .._core.files import CheckpointError

SCHEMES = ("gs", "s3")
FILE_SIZE = 64 << 20  # bytes after which orbax begins another file: one is sent whole, from memory
_MOST_IN_FLIGHT = 256 << 20  # bytes of files that are in memory while they are sent; one larger file goes alone
_OLD = 7 * 24 * 3600  # seconds after which a claim of another machine was left by somebody
# Of a request that fails for a moment: about three minutes. tensorstore's own 32 are a quarter of an hour.
_RETRIES = {"max_retries": 10}


class UnfinishedError(CheckpointError):
    """A checkpoint that a process is sending or removing, or was when it ended."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket, such as gs://name."""

    scheme: str
    name: str

    def spec(self) -> dict[str, Any]:
        """What tensorstore is told of it."""
        if self.scheme == "gs":
            return {"driver": "gcs", "bucket": self.name, "gcs_request_retries": _RETRIES}
        spec: dict[str, Any] = {"driver": "s3", "bucket": self.name, "s3_request_retries": _RETRIES}
        # Without it, where a store is not Amazon's, tensorstore looks first and writes then, and two processes could
        # both believe to be alone.
        spec["use_conditional_write"] = True
        # Stores that speak S3 and are not Amazon's have another address, which Amazon's own programs find here.
        if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region}
        return spec

    @functools.cached_property
    def context(self) -> Any:
        """What the requests to the bucket share: connections, and a few megabytes of what was read."""
        import tensorstore

        return tensorstore.Context({"cache_pool": {"total_bytes_limit": 16 << 20}})

    @functools.cached_property
    def store(self) -> Any:
        import tensorstore

        return tensorstore.KvStore.open(self.spec(), context=self.context).result()


@dataclasses.dataclass(frozen=True, repr=False)
class BucketPath(os.PathLike[str]):
    """A path in a bucket, such as gs://bucket/runs/lenet. `str` gives it as text.

    `checkpoint.latest` and the `directory` of a `checkpoint.Manager` are such paths where the checkpoints are in a
    bucket. Like a `pathlib.Path` it has `name`, `parent` and `/`.

    Example:
        >>> from jaxpar import checkpoint
        >>> checkpoint.latest("gs://bucket/runs/lenet").name  # doctest: +SKIP
        'step_00000120'
    """

    bucket: Bucket
    key: str  # without a "/" at either end

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        return BucketPath(self.bucket, self.key.rpartition("/")[0])

    def __repr__(self) -> str:
        return f"BucketPath({str(self)!r})"

    def __str__(self) -> str:
        return f"{self.bucket.scheme}://{self.bucket.name}/{self.key}".rstrip("/")

    def __fspath__(self) -> str:
        return str(self)


AnyPath = Path | BucketPath


def as_path(value: Any, what: str) -> AnyPath:
    """The path of checkpoints that a user means: in a bucket, or else as `files.as_path` says."""
    return parse(value, what) or files.as_path(value, what)


def parse(value: Any, what: str) -> BucketPath | None:
    """A path in a bucket, or None for one of this machine. `ValueError` for any other."""
    if isinstance(value, BucketPath):
        return value
    scheme, written = files.address(value)
    if scheme not in ("", "file", *SCHEMES):
        raise ValueError(
            f"{what} is {written!r}, on another system ({scheme}). Checkpoints are read and written in folders of this "
            "machine, gs://bucket/folder and s3://bucket/folder; a callback can copy them on (docs/checkpoints.md)"
        )
    if scheme not in SCHEMES or not written.lower().startswith(f"{scheme}:/"):
        return None
    bucket, _, key = files.checked(written, what)[len(scheme) + 1 :].lstrip("/").partition("/")
    parts = [part for part in key.split("/") if part]
    if not bucket or {".", ".."} & set(parts):
        raise ValueError(f"{what} is {written!r}; a path in a bucket is {scheme}://bucket/folder, without . and ..")
    return BucketPath(Bucket(scheme, bucket), "/".join(parts))


def temporary_folder() -> Path:
    """Where checkpoints are written before they are sent."""
    return Path(tempfile.gettempdir())


# Requests. They are no methods, so that a path has what a path of `pathlib` has, and Tab shows no more.


def spec(path: BucketPath) -> dict[str, Any]:
    """What tensorstore is told of the objects below a path."""
    return {**path.bucket.spec(), "path": f"{path.key}/" if path.key else ""}


def get(path: BucketPath) -> tuple[bytes | None, bytes]:
    """The content of the object, or None where there is none, and its generation, which changes with each write."""
    result = answer(path, opened(path).read(path.key))
    return (result.value if result.state == "value" else None), result.stamp.generation


def put(path: BucketPath, content: bytes) -> None:
    """Write the object, whatever is there."""
    answer(path, opened(path).write(path.key, content))


def put_if(path: BucketPath, content: bytes, generation: bytes) -> bytes:
    """Write the object if its generation is still this one, and return the next. `FileExistsError` if it is not.

    No other process may write the same content.
    """
    written = answer(path, opened(path).write(path.key, content, if_equal=generation)).generation
    if not written:
        # A request whose answer was lost is repeated, and then meets what it has written itself.
        now, written = get(path)
        if now != content:
            raise FileExistsError(errno.EEXIST, "another process has written it meanwhile", str(path))
    return written


def delete(path: BucketPath, generation: bytes | None = None) -> None:
    """Remove the object, if it is there, or only if its generation is still this one.

    S3 has no such condition. There tensorstore looks first, and removes then.
    """
    answer(path, opened(path).write(path.key, None, if_equal=generation))


def names(path: BucketPath) -> list[str]:
    """The names of all objects below, from here on, such as "step_00000120/jaxpar.json"."""
    import tensorstore

    prefix = f"{path.key}/" if path.key else ""
    last = f"{prefix[:-1]}0" if prefix else ""  # "0" comes after "/"
    found = answer(path, opened(path).list(tensorstore.KvStore.KeyRange(prefix, last), len(prefix.encode())))
    return [name.decode(errors="replace") for name in found]


def opened(path: BucketPath) -> Any:
    """The bucket of a path, as tensorstore has it."""
    return _guarded(path, lambda: path.bucket.store)


def answer(path: BucketPath, future: Any) -> Any:
    """What a request has given, as soon as it is there."""
    return _guarded(path, future.result)


def _guarded(path: BucketPath, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError:
        raise
    except Exception as error:  # tensorstore has ValueError for most
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise OSError(f"{path} cannot be read or written ({reason})") from error


# Claims.


def claim() -> bytes:
    """The content of a claim of this process. No two are the same."""
    about = {"owner": process.tag(), "host": socket.gethostname(), "pid": os.getpid(), "time": int(time.time())}
    return json.dumps({"unfinished": {**about, "token": secrets.token_hex(8)}}).encode()


class Claim(NamedTuple):
    """What a claim says."""

    owner: str  # see `process.tag`
    name: str  # which process that is, for people
    time: int  # by its clock, in seconds
    token: str  # which claim of that process


def as_claim(content: bytes | None) -> Claim | None:
    """The claim that the content of an object is, or None."""
    try:
        about = json.loads(content or b"")["unfinished"]
        name = f"process {int(about['pid'])} on {str(about['host'])[:100]}"
        return Claim(str(about["owner"]), text.for_terminal(name), int(about["time"]), str(about["token"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def refuse_without_conditions(path: BucketPath, nothing: bytes) -> None:
    """`OSError` where a store writes over an object that is there, though asked to write a new one only."""
    try:
        put_if(path, claim(), nothing)
    except FileExistsError:
        return
    raise OSError(
        f"checkpoint: {path.bucket.scheme}://{path.bucket.name} ignores the conditions of a write, so nothing would "
        "keep two runs apart; give a folder of a disk or mount"
    )


@contextlib.contextmanager
def sending(path: BucketPath, manifest: str, leaves_claim: bool) -> Generator[Sending]:
    """A block that sends a checkpoint to a path. What it does not complete is removed, as far as the bucket answers.

    With `leaves_claim` the next run removes it: other processes may be sending yet. `FileExistsError` where there is
    something already.
    """
    if names(path):
        raise FileExistsError(errno.EEXIST, "there is something already", str(path))
    _, nothing = get(path / manifest)
    own = claim()
    sent = Sending(path, path / manifest, put_if(path / manifest, own, nothing))
    try:
        refuse_without_conditions(path / manifest, nothing)
        yield sent
    except BaseException:
        if not sent.is_complete and not leaves_claim:
            with contextlib.suppress(OSError):
                remove(path, manifest, as_claim(own))
        raise


@dataclasses.dataclass
class Sending:
    """A checkpoint that is being sent. Its claim has this generation."""

    path: BucketPath
    manifest: BucketPath
    generation: bytes
    is_complete: bool = False

    def commit(self, manifest: bytes) -> None:
        """From now on the checkpoint is there."""
        put_if(self.manifest, manifest, self.generation)
        self.is_complete = True


def send(path: BucketPath, folder: Path, names: Iterable[str]) -> None:
    """Send files of a folder under the same names, several at a time.

    Where one cannot be written, none is on its way any more when the error is raised.
    """
    in_flight: collections.deque[tuple[BucketPath, int, Any]] = collections.deque()

    def wait_for_first() -> None:
        target, _, writing = in_flight.popleft()
        answer(target, writing)

    try:
        for name in names:
            content, target = (folder / name).read_bytes(), path / name
            while in_flight and sum(size for _, size, _ in in_flight) + len(content) > _MOST_IN_FLIGHT:
                wait_for_first()
            in_flight.append((target, len(content), opened(target).write(target.key, content)))
        while in_flight:
            wait_for_first()
    finally:
        # What was sent is removed after an error. An object that arrived after that would stay.
        for _, _, writing in in_flight:
            writing.exception()  # waits, and raises nothing


def remove_all(path: BucketPath) -> None:
    """Remove all objects below, as far as the bucket answers."""
    with contextlib.suppress(OSError):
        for name in names(path):
            delete(path / name)


def remove(path: BucketPath, manifest: str, claimed: Claim | None = None) -> None:
    """Remove a checkpoint, or what is left of one: with `claimed` only where it still has this claim."""
    decides = path / manifest
    content, generation = get(decides)
    if content is None or (claimed is not None and as_claim(content) != claimed):
        return
    try:
        claimed_now = put_if(decides, claim(), generation)
    except FileExistsError:  # another process removes it, or has completed it
        return
    for name in names(path):
        if name != manifest:
            delete(path / name)
    delete(decides, claimed_now)


def remove_leftovers(directory: BucketPath, manifest: str, lost: str, abandoned: bool) -> None:
    """Remove what processes that have ended left unfinished in a directory.

    `lost` is the tag of a process whose lock was taken over. Only who has the lock removes what is `abandoned`, too.
    """
    for folder, content in manifests(directory, manifest):
        if (found := as_claim(content)) is None:
            continue
        is_old = abandoned and time.time() - found.time > _OLD
        if process.has_ended(found.owner) or found.owner == lost or is_old:
            remove(folder, manifest, found)


def manifests(directory: BucketPath, manifest: str) -> list[tuple[BucketPath, bytes | None]]:
    """What would be the folders of a directory on a disk, but hidden ones, and the content of the manifest of each."""
    folder_names = {name.partition("/")[0] for name in names(directory) if "/" in name}
    folders = [directory / name for name in sorted(folder_names) if not name.startswith(".")]
    # All at once: an answer takes long, and a run may keep a thousand checkpoints.
    reading = [(opened(folder / manifest).read((folder / manifest).key), folder) for folder in folders]
    answers = [(folder, answer(folder, future)) for future, folder in reading]
    return [(folder, found.value if found.state == "value" else None) for folder, found in answers]
