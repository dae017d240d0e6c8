"""Compiled programs on disk, so that the next run need not compile them."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from pathlib import Path

import jax

from ..._core.files import as_path


def use_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Keep compiled programs in jax's persistent compilation cache.

    The first step of a run then loads its program if an earlier run compiled the same one. In a notebook, call this in
    the first cell. `python -m jaxpar train` calls it, except for several emulated devices with jax before 0.12: there a
    cached program of your own could hang, see docs/seeing_a_run.md.

    Args:
        directory: the cache directory. None: `jaxpar/<a name for this kind of processor>` in $XDG_CACHE_HOME or
            ~/.cache, since several machines may share a home directory.

    Returns:
        The directory. If `jax_compilation_cache_dir` is already set, its value, and nothing changes. None if no
        directory was given and the default is not safe: it cannot be created, or other users can write to it or to a
        parent. A given directory that cannot be created is an `OSError`.

    Example:
        >>> import tempfile
        >>> from jaxpar import train
        >>> before = jax.config.jax_compilation_cache_dir
        >>> train.use_compilation_cache(tempfile.mkdtemp()).is_dir()
        True
        >>> jax.config.update("jax_compilation_cache_dir", before)
    """
    users_own = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if users_own:
        return Path(users_own)
    chosen = _own_directory() if directory is None else as_path(directory, "use_compilation_cache: directory")
    if chosen is None:
        return None
    chosen.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    # By default JAX keeps what took a second to compile. The programs of a small model take less, and there are many.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return chosen


def _own_directory() -> Path | None:
    """The default directory, if nobody else can write programs into it."""
    # What is read from there runs as a program of this user.
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaxpar")
        # By the model and the features of this processor: a program for features that another one lacks would end the
        # process there, and a home may be shared by several kinds of machines.
        about = cpu_info()
        features = [about.get(name, "") for name in ("model name", "flags", "Features")]
        texts = [platform.machine(), platform.processor(), *features]
        name = f"{platform.machine()}-{hashlib.sha256(' '.join(texts).encode()).hexdigest()[:12]}"
        chosen = parent / name
        for folder in (parent, chosen):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return chosen if _is_safe(chosen) and os.access(chosen, os.W_OK) else None
    except (OSError, RuntimeError):  # no home, or a read-only one
        return None


def _is_safe(place: Path) -> bool:
    """Whether only the user can write to a directory, or put another one in its place or in that of a parent."""
    if not hasattr(os, "getuid"):
        return True
    about = place.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        return False
    for parent in {*place.absolute().parents, *place.resolve().parents}:
        about = parent.stat()
        other_writers = stat.S_IWOTH if _is_own_group(about.st_gid) else stat.S_IWOTH | stat.S_IWGRP
        # In a sticky folder nobody can rename what is another's.
        if about.st_uid not in (0, os.getuid()) or (about.st_mode & other_writers and not about.st_mode & stat.S_ISVTX):
            return False
    return True


def _is_own_group(number: int) -> bool:
    """Whether a group is the user's private one: many systems let it write to all that the user makes."""
    import grp  # Unix only
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def cpu_info() -> dict[str, str]:
    """What Linux says about its last processor. Empty on other systems."""
    try:
        with open("/proc/cpuinfo") as lines:
            pairs = [line.partition(":") for line in lines if ":" in line]
            return {name.strip(): value.strip() for name, _, value in pairs}
    except OSError:
        return {}
