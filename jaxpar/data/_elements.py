"""Data of other libraries as arrays. Nothing of these libraries is imported.

Tables are known by the module of their type. An element of a loader is a pytree of what NumPy or DLPack can read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arrays import check_plain
from ._sharding import path_name

_WHERE = "data.from_iterable"
# Data that has no rows yet, or that can be read in several ways, by library and class.
_ADVICE = {
    ("polars", "LazyFrame"): "a LazyFrame of polars has no rows yet; write frame.collect()",
    **dict.fromkeys(
        (("datasets", "DatasetDict"), ("datasets", "IterableDatasetDict")),
        "expected one split of a data set, got all of them; write dataset['train']",
    ),
    ("datasets", "Dataset"): (
        "a data set of Hugging Face can be read in two ways; write "
        "data.from_arrays(dataset.with_format('numpy')[:]) to have it in memory and shuffled, or "
        "data.from_iterable(dataset.with_format('numpy'), batched=False) to read its rows one by one, in its order"
    ),
    ("datasets", "IterableDataset"): (
        "a stream of Hugging Face gives single examples; write "
        "data.from_iterable(dataset.with_format('numpy'), batched=False, steps_per_epoch=...)"
    ),
}


def as_arrays(given: Any, where: str) -> Any:
    """A table as a dict of arrays: a DataFrame of pandas or polars, or a list of dicts with one example each."""
    # All other data stays as it is. `TypeError` for a column that is no array of numbers, and for data that can be read
    # in several ways: the message has a line for each.
    if _is_of(given, "pandas", "DataFrame") or _is_of(given, "polars", "DataFrame"):
        return _columns(given, where)
    if _is_rows(given):
        return stack([as_dict(row, (), where) for row in given], where)
    for (library, name), advice in _ADVICE.items():
        if _is_of(given, library, name):
            raise TypeError(f"{where}: {advice}")
    return given


def _is_of(given: Any, library: str, name: str) -> bool:
    """Whether this is an object of a library's class, or of one that is derived from it."""
    return any(each.__name__ == name and each.__module__.split(".")[0] == library for each in type(given).__mro__)


def _columns(frame: Any, where: str) -> dict[Any, np.ndarray]:
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: two columns of the DataFrame have one name, {names}; rename one of them")
    columns = {name: frame[name].to_numpy() for name in names}
    numbers = [name for name, column in columns.items() if column.dtype.kind in "biufc"]
    if numbers != names:
        others = [name for name in names if name not in numbers]
        raise TypeError(
            f"{where}: the columns {others} of the DataFrame are not numeric; write frame[{numbers}] for the others, "
            "or turn them into numbers first"
        )
    return columns


def _is_rows(given: Any) -> bool:
    """Whether this is a list of examples. An array of a batch has an axis of examples, so no scalar is in one."""
    if not isinstance(given, (list, tuple)) or not given or not isinstance(given[0], Mapping):
        return False
    leaves = jax.tree.leaves(given[0], is_leaf=lambda leaf: isinstance(leaf, (list, str)))
    return any(isinstance(leaf, (str, int, float)) or getattr(leaf, "ndim", None) == 0 for leaf in leaves)


def as_dict(element: Any, names: tuple[str, ...], where: str = _WHERE) -> Any:
    """An element as a pytree of arrays. A tuple or a list becomes a dict with these names."""
    if isinstance(element, (tuple, list)) and not hasattr(element, "_fields"):
        if len(element) != len(names):
            raise ValueError(
                f"{where}: an element is a {type(element).__name__} of {len(element)}, but there are "
                f"{len(names)} names {names}; give names= one for each, or elements that are dicts"
            )
        element = dict(zip(names, element, strict=True))

    def convert(path: Any, leaf: Any) -> Any:
        return as_array(leaf, f"{where}: {path_name(path)}")

    return jax.tree_util.tree_map_with_path(convert, element, is_leaf=lambda x: isinstance(x, (list, str)))


def as_array(leaf: Any, name: str) -> Any:
    """Convert a leaf to a NumPy or JAX array. `name` is for messages."""
    check_plain(leaf, name)
    if isinstance(leaf, (np.ndarray, jax.Array)):
        array = leaf
    else:
        try:
            array = np.asarray(leaf)
        except (TypeError, ValueError, RuntimeError):  # memory of an accelerator, a dtype that NumPy has not
            leaf = leaf.contiguous() if hasattr(leaf, "contiguous") else leaf  # JAX takes no strided tensor of PyTorch
            array = jnp.from_dlpack(leaf) if hasattr(leaf, "__dlpack__") else np.empty(0, object)
    if getattr(array.dtype, "kind", "O") in "OUSMm":  # random keys have no kind
        raise TypeError(
            f"{name} is a {type(leaf).__name__} of dtype {array.dtype}, which is not an "
            "array of numbers; leave it out of the elements, or turn it into numbers there"
        )
    return array


def stack(examples: Sequence[Any], where: str = _WHERE) -> Any:
    return _join(np.stack, examples, 0, where)


def concatenate(batches: Sequence[Any], where: str = _WHERE) -> Any:
    return _join(np.concatenate, batches, 1, where)


def _join(join: Callable[[list[np.ndarray]], np.ndarray], trees: Sequence[Any], first: int, where: str) -> Any:
    """The trees leaf by leaf as one. Shapes must agree from axis `first` on."""

    def join_leaves(path: Any, *leaves: Any) -> np.ndarray:
        shapes = {np.shape(leaf)[first:] for leaf in leaves}
        if len(shapes) > 1:
            raise ValueError(
                f"{where}: {path_name(path)} has examples of different shapes, {sorted(shapes)}, which make "
                "no batch; pad, crop or resize them first"
            )
        return join([np.asarray(leaf) for leaf in leaves])

    return jax.tree_util.tree_map_with_path(join_leaves, *trees)
