"""Keys of a store as a call gives them: ints, names of parameters, or a list of both."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from . import checks
from .arrays import is_gone

Key = int | str
Keys = list[int] | list[str] | list[int | str] | range

Paths = tuple[tuple[int, str], ...]


def find_keys(key: Any, values: dict[int, Any], paths: Paths, where: str) -> tuple[list[int], bool]:
    """The keys of the store that a call names, and whether it gave a list.

    Args:
        key: an int, a name of a parameter, or a list of both.
        values: what the store holds by key.
        paths: the names of its keys, if it has some.

    Raises:
        TypeError: it is neither, or a name for a store without names.
        KeyError: the store does not hold it.
        RuntimeError: its stored value was deleted.
    """
    many = isinstance(key, (list, range))
    given: Sequence[Any] = key if many else (key,)
    keys = [_of_name(k, paths, where) if isinstance(k, str) else checks.as_key(k) for k in given]
    checks.check_known(keys, values, where)
    check_stored(keys, values, where)
    return keys, many


def check_stored(keys: Iterable[int], values: Mapping[int, Any], where: str) -> None:
    """`RuntimeError` if the stored value of a key was deleted."""
    for k in keys:
        if is_gone(values[k]):
            raise RuntimeError(
                f"{where}: key {k}: the stored value was deleted, as by donating this store to a jitted function; go "
                "on with the store which that function returned"
            )


def check_names(leaves: Sequence[tuple[Any, Any]], names: Sequence[str], where: str) -> None:
    """`ValueError` if two leaves have one name, as a key of a dict with a slash can make them.

    Args:
        leaves: (path, leaf) of each, as `jax.tree_util.tree_flatten_with_path` gives them.
        names: of the leaves.
    """
    first: dict[str, Any] = {}
    for (path, _), name in zip(leaves, names, strict=True):
        if name in first:
            both = " and ".join(jax.tree_util.keystr(p) for p in (first[name], path))
            raise ValueError(
                f"{where}: the leaves {both} of params have the same name, {name!r}; a name is a key of the store, so "
                "rename one"
            )
        first[name] = path


def _of_name(name: str, paths: Paths, where: str) -> int:
    if not paths:
        return checks.as_key(name)  # raises
    keys = _keys_by_name(paths)
    if name not in keys:
        near = difflib.get_close_matches(name, keys, 3, 0.5) or [n for n in keys if n.endswith(f"/{name}")][:3]
        near = f"near are {', '.join(map(repr, near))}" if near else f"known are {checks.shorten(list(keys))}"
        raise checks.UnknownKeyError(f"{where}: no parameter is called {name!r}, {near}; kv.names(store) has them all")
    return keys[name]


@functools.lru_cache(maxsize=16)
def _keys_by_name(paths: Paths) -> dict[str, int]:
    return {name: key for key, name in paths}
