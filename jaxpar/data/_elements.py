"""Tables and elements of other libraries as arrays.

Nothing of these libraries is imported. Tables are known by the module of their type. An element of a loader is a pytree
of what NumPy or DLPack can read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks
from .._core.arrays import KeyPath, PyTree, check_plain

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


class _Column(Protocol):
    def to_numpy(self) -> np.ndarray: ...


class _Frame(Protocol):
    """What is used of a DataFrame of pandas or polars."""

    @property
    def columns(self) -> Iterable[Any]: ...
    def __getitem__(self, name: Any, /) -> _Column: ...


def as_arrays(table: PyTree, caller: str) -> PyTree:
    """A table as a dict of arrays: a DataFrame of pandas or polars, or a list of dicts with one example each.

    All other data stays as it is. `TypeError` for data that has no rows yet, or that can be read in several ways.
    """
    table = _plain(table)
    if _is_of(table, "pandas", "DataFrame") or _is_of(table, "polars", "DataFrame"):
        frame: _Frame = table
        names = list(frame.columns)
        if len(set(names)) < len(names):  # frame[name] would have both columns
            raise ValueError(f"{caller}: two columns of the DataFrame have one name, {names}; rename one of them")
        columns = {name: frame[name].to_numpy() for name in names}
        numeric = [name for name, column in columns.items() if column.dtype.kind in "biufc"]
        if numeric != names:
            not_numeric = [name for name in names if name not in numeric]
            raise TypeError(
                f"{caller}: the columns {not_numeric} of the DataFrame are not numeric; write frame[{numeric}] for the "
                "others, or turn them into numbers first"
            )
        return columns
    if _is_list_of_examples(table):
        return join([as_dict(row, (), caller) for row in table], caller)
    for (library, name), advice in _ADVICE.items():
        if _is_of(table, library, name):
            raise TypeError(f"{caller}: {advice}")
    return table


def _plain(element: PyTree) -> PyTree:
    """A mapping that JAX does not know, such as the `BatchEncoding` of a tokenizer, as a dict."""
    if not isinstance(element, Mapping) or type(element) is dict:
        return element
    leaves = jax.tree.leaves(element)
    is_leaf = len(leaves) == 1 and leaves[0] is element
    return dict(cast(Mapping[Any, Any], element)) if is_leaf else element


def _is_of(value: object, library: str, name: str) -> bool:
    """Whether this is an object of a library's class, or of one that is derived from it."""
    return any(each.__name__ == name and each.__module__.split(".")[0] == library for each in type(value).__mro__)


def _is_list_of_examples(elements: PyTree) -> bool:
    """Whether this is a list of dicts with one example each, and not one of batches."""
    if not isinstance(elements, (list, tuple)) or not elements or not isinstance(elements[0], Mapping):
        return False
    # An array of a batch has an axis of examples. So a dict with a scalar is one example.
    leaves = jax.tree.leaves(elements[0], is_leaf=lambda leaf: isinstance(leaf, (list, str)))
    return any(isinstance(leaf, (str, int, float)) or getattr(leaf, "ndim", None) == 0 for leaf in leaves)


def path_name(path: KeyPath) -> str:
    """The name of an array in a pytree, for messages: 'x/deep'."""
    return repr(jax.tree_util.keystr(path, simple=True, separator="/")) if path else "an element"


def as_dict(element: PyTree, names: tuple[str, ...], caller: str) -> PyTree:
    """An element as a pytree of arrays. A tuple or a list becomes a dict with these names."""
    if isinstance(element, (tuple, list)) and not hasattr(element, "_fields"):
        if len(element) != len(names):
            raise ValueError(
                f"{caller}: an element is {checks.describe(element)}, but there are {len(names)} names {names}; give "
                "names= one for each, or elements that are dicts"
            )
        element = dict(zip(names, element, strict=True))

    element = _plain(element)

    def convert(path: KeyPath, leaf: object) -> np.ndarray | jax.Array:
        return as_array(leaf, f"{caller}: {path_name(path)}")

    # A list of numbers is one array, not a pytree of scalars.
    return jax.tree_util.tree_map_with_path(convert, element, is_leaf=lambda x: isinstance(x, (list, str)))


def as_array(leaf: Any, name: str) -> np.ndarray | jax.Array:
    """Convert a leaf to a NumPy or JAX array. `name` is for messages."""
    check_plain(leaf, name)
    if isinstance(leaf, (np.ndarray, jax.Array)):
        array = leaf
    else:
        try:
            array = np.asarray(leaf)  # it may share the memory of the leaf
        except (TypeError, ValueError, RuntimeError):  # memory of an accelerator, a dtype that NumPy has not
            leaf = leaf.contiguous() if hasattr(leaf, "contiguous") else leaf  # JAX takes no strided tensor of PyTorch
            array = jnp.from_dlpack(leaf, copy=True) if hasattr(leaf, "__dlpack__") else np.empty(0, object)
    if getattr(array.dtype, "kind", "O") in "OUSMm":  # random keys have no kind
        raise TypeError(
            f"{name} is a {type(leaf).__name__} of dtype {array.dtype}, which is not an array of numbers; leave it out "
            "of the elements, or turn it into numbers there"
        )
    return array


def join(trees: Sequence[PyTree], caller: str, *, batched: bool = False) -> PyTree:
    """Examples, or batches, leaf by leaf as one batch. Their shapes must agree."""

    def join_leaves(path: KeyPath, *leaves: Any) -> np.ndarray:
        shapes = {np.shape(leaf)[batched:] for leaf in leaves}
        if len(shapes) > 1:
            raise ValueError(
                f"{caller}: {path_name(path)} has examples of different shapes, {sorted(shapes)}, which make no batch; "
                "pad, crop or resize them first"
            )
        arrays = [np.asarray(leaf) for leaf in leaves]
        joined = np.concatenate(arrays) if batched else np.stack(arrays)
        if joined.dtype == object:  # one of them has None or several arrays there
            raise TypeError(f"{caller}: {path_name(path)} is not an array of numbers in each example")
        return joined

    try:
        return jax.tree_util.tree_map_with_path(join_leaves, *trees)
    except (TypeError, ValueError):
        # Records of JSON often lack a name. JAX's own error has all values of both, and does not say which records.
        names_of_each = [{path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)} for tree in trees]
        for number, names in enumerate(names_of_each):
            for name in sorted(names ^ names_of_each[0]):
                differs = (
                    f"has {name}, which example 0 lacks" if name in names else f"has no {name}, which example 0 has"
                )
                raise ValueError(
                    f"{caller}: example {number} of {len(trees)} {differs}; give each the same arrays"
                ) from None
        raise
