"""What `data` refuses: the call, the exception, and the names and values that its message must have, in this order.

What people do by mistake is in tests/house/test_mistakes.py, with what to do. Files of data sets are in
test_data_load.py.
"""

import re
import types
import unittest.mock

import jax
import numpy as np
import pytest

from jaxpar import data, train
from jaxpar._devices import processes
from jaxpar.data import Dataset

FOUR = jax.devices()[:4]
X, Y = np.zeros((48, 4), np.float32), np.arange(48)
LOADER = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8)]
BATCHES = [{"x": np.full(4, i, np.float32)} for i in range(10)]
UNEVEN = {"x": np.zeros((64, 3)), "y": np.zeros(16)}
DRAWS = np.random.default_rng(0)
TOO_LARGE = np.array([0, 2**32] * 4)
SPEC = jax.sharding.PartitionSpec("data")


def images(size):
    return Dataset(np.zeros((size, 2), np.uint8), np.arange(size))


def read(source, batch_size=8, **options):
    return list(data.from_iterable(source, **options).batches(batch_size))


def arrays(content):
    return data.from_arrays(content)


class Loader:
    """As a DataLoader."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(LOADER[:3])


def loader_of(batch_size, drop_last):
    return Loader(batch_size=batch_size, drop_last=drop_last, dataset=range(40))


def of_library(module, name):
    """An object of a class derived from one that another library calls so."""
    return type("Mine", (type(name, (), {"__module__": module}),), {})()


def of_two_processes(call):
    with unittest.mock.patch.object(processes, "count", return_value=2):
        call()


T, V, A = TypeError, ValueError, AttributeError
REFUSED = {
    # Which batches, on which devices.
    "a batch that devices cannot share": (
        V,
        lambda: data.batches(images(40), 6, devices=FOUR),
        ["data.batches", "batch of 6", "4 devices", "batch of 4 or 8"],
    ),
    "a batch smaller than the devices": (
        V,
        lambda: data.batches(images(40), 2, devices=FOUR),
        ["batch of 2", "4 devices", "batch of 4"],
    ),
    "a last batch that devices cannot share": (
        V,
        lambda: data.batches(images(42), 8, devices=FOUR, drop_remainder=False),
        ["2 examples", "4 devices", "drop_remainder=True"],
    ),
    "less than a batch": (V, lambda: data.batches(images(5), 8), ["5 examples", "of 8", "drop_remainder=False"]),
    "nothing": (V, lambda: data.batches(images(0), 8, drop_remainder=False), ["data.batches", "0 examples"]),
    "a batch of nothing": (V, lambda: data.batches(images(40), 0), ["batch_size", "1 or more", "got 0"]),
    "no devices": (V, lambda: data.batches(images(40), 8, devices=[]), ["devices", "different devices"]),
    "a start before the first batch": (V, lambda: data.batches(images(40), 8, start=-1), ["start", "got -1"]),
    "epochs below 0": (V, lambda: data.batches(images(40), 8, epochs=-1), ["epochs", "got -1"]),
    "a generator for a key": (T, lambda: images(40).batches(8, rng=DRAWS), ["rng", "jax.random.key(0)", "Generator"]),
    "a spec without a mesh": (T, lambda: data.batches(images(4), 4, sharding=SPEC), ["sharding", "jax.set_mesh"]),
    "a spec without a mesh for prefetch": (T, lambda: data.prefetch([X], SPEC), ["data.prefetch", "jax.set_mesh"]),
    # Arrays.
    "images and labels of two lengths": (
        V,
        lambda: Dataset(np.zeros((3, 2)), np.zeros(2)),
        ["images (3, 2)", "labels (2,)"],
    ),
    "arrays of two lengths": (V, lambda: arrays((X, Y[:3])), ["first axis", "[(48, 4), (3,)]"]),
    "lists of numbers": (V, lambda: arrays({"x": [1.0] * 15, "y": [1] * 15}), ["()", "30 in all", "np.array(numbers)"]),
    "no arrays": (V, lambda: arrays({}), ["data.from_arrays", "none", "{}"]),
    "random keys": (
        T,
        lambda: arrays({"key": jax.random.split(jax.random.key(0), 3)}),
        ["'key'", "PRNGKeyArray", "key<fry>"],
    ),
    "large labels": (V, lambda: Dataset(np.zeros((8, 2)), TOO_LARGE), ["Dataset: labels", "int32", "4294967296"]),
    "large images": (V, lambda: Dataset(TOO_LARGE, np.zeros(8)), ["Dataset: images", "int32", "4294967296"]),
    "a large array": (V, lambda: arrays({"id": TOO_LARGE}), ["data.from_arrays: 'id'", "int32", "4294967296"]),
    "large rows": (
        V,
        lambda: arrays([{"id": int(number)} for number in TOO_LARGE]),
        ["data.from_arrays: 'id'", "int32", "4294967296"],
    ),
    "large batches": (
        V,
        lambda: next(data.batches([{"id": TOO_LARGE}], 8)),
        ["data.batches: 'id'", "int32", "4294967296"],
    ),
    "large batches on devices": (
        V,
        lambda: next(data.batches([{"id": TOO_LARGE}], 8, devices=FOUR)),
        ["data.batches: 'id'", "int32", "4294967296"],
    ),
    "large batches sent ahead": (
        V,
        lambda: next(data.prefetch([{"id": TOO_LARGE}])),
        ["data.prefetch: batch['id']", "int32", "4294967296"],
    ),
    # Rows.
    "a row with a text": (T, lambda: data.as_source([{"x": 1.0, "name": "a"}]), ["'name'", "str", "<U1"]),
    "rows of two shapes": (
        V,
        lambda: data.as_source([{"x": np.ones(2), "y": 1}, {"x": np.ones(3), "y": 1}]),
        ["'x'", "[(2,), (3,)]", "pad"],
    ),
    "a row that lacks a name": (
        V,
        lambda: data.as_source([{"x": 1, "y": 1}, {"x": 1, "y": 1}, {"x": 1}]),
        ["example 2 of 3", "no 'y'"],
    ),
    "a row with one name more": (
        V,
        lambda: data.as_source([{"x": 1}, {"x": 1, "y": 1}]),
        ["example 1 of 2", "has 'y'"],
    ),
    "a row with None": (
        V,
        lambda: data.as_source([{"x": 1, "y": 1}, {"x": None, "y": 1}]),
        ["example 1 of 2", "no 'x'"],
    ),
    "a row with a dict": (
        V,
        lambda: data.as_source([{"x": 1, "y": 1}, {"x": {"a": 1}, "y": 1}]),
        ["example 1 of 2", "no 'x'"],
    ),
    # Elements of a loader.
    "an example for a batch": (V, lambda: read([{"image": X[0], "label": 3}]), ["'label' ()", "batched=False"]),
    "a short batch": (V, lambda: read([(X[:5], Y[:5])]), ["batch 0", "8 examples", "'image' (5, 4)", "drop_last=True"]),
    "a tuple of one": (V, lambda: read([(X[:8],)]), ["tuple of 1", "2 names ('image', 'label')", "names="]),
    "texts": (T, lambda: read([{"text": ["a"] * 8}]), ["'text'", "list", "<U1"]),
    "objects": (T, lambda: read([{"x": object()}]), ["'x'", "object"]),
    "examples of two shapes": (
        V,
        lambda: read([{"x": np.ones(2)}, {"x": np.ones(3)}] * 4, batched=False),
        ["data.from_iterable", "'x'", "[(2,), (3,)]"],
    ),
    "examples of two shapes for collect": (
        V,
        lambda: data.collect([(X[0], 1), (X[0, :2], 1)], batched=False),
        ["data.collect", "'image'", "[(2,), (4,)]"],
    ),
    "an array that devices cannot share": (
        V,
        lambda: next(data.from_iterable([{**UNEVEN, "y": np.zeros(6)}]).batches(64, devices=FOUR)),
        ["'y'", "batch of 6", "4 devices"],
    ),
    "batches of two lengths": (
        V,
        lambda: read([UNEVEN, {**UNEVEN, "y": np.zeros(8)}], 64),
        ["batch 1", "'x' of 64 rows", "'y' of 16 rows", "'y' (8,)"],
    ),
    "a longest array of another length": (V, lambda: read([UNEVEN], 32), ["batch 0", "32 examples", "batch_size="]),
    # Sources.
    "a number": (T, lambda: data.as_source(3), ["iterable", "a int"]),
    "a name": (T, lambda: data.as_source("mnist"), ["'mnist'", "data.load('mnist')"]),
    "another array in a later batch": (
        V,
        lambda: list(data.from_iterable([BATCHES[0], {**BATCHES[1], "z": BATCHES[1]["x"]}]).batches(4)),
        ["batch 1 of the epoch has", "'z'", "but the first batch has"],
    ),
    "no steps": (V, lambda: data.from_iterable(LOADER, steps_per_epoch=0), ["steps_per_epoch", "got 0"]),
    "a word for steps": (V, lambda: data.from_iterable(LOADER, steps_per_epoch="every"), ["steps_per_epoch 'every'"]),
    "epochs of what is read once": (
        V,
        lambda: data.from_iterable(iter(LOADER), steps_per_epoch="all"),
        ['steps_per_epoch="all"', "read only once"],
    ),
    "too many steps": (V, lambda: read(LOADER, steps_per_epoch=9), ["a list", "6 of the 9 batches", "epoch 0"]),
    "too many steps of what is read once": (
        V,
        lambda: read(iter(LOADER[:3]), steps_per_epoch=4),
        ["list_iterator", "3 of the 4 batches", "epoch 0", "read only once"],
    ),
    "no length": (T, lambda: read(x for x in LOADER), ["generator", "no length", "steps_per_epoch=..."]),
    "devices that cannot share a batch of a loader": (
        V,
        lambda: list(data.from_iterable(LOADER).batches(8, devices=FOUR[:3])),
        ["batch of 8", "3 devices", "6 or 9"],
    ),
    "batches of another size": (
        V,
        lambda: read(loader_of(16, True)),
        ["Loader", "batches of 16", "batch_size is 8", "Loader(..., batch_size=8, drop_last=True)", "batch_size=16"],
    ),
    "batches of the size of all processes": (
        V,
        lambda: of_two_processes(lambda: read(loader_of(8, True))),
        ["batches of 8", "batch_size is 8", "each of 2 processes reads 4", "batch_size=4, drop_last", "batch_size=16"],
    ),
    "a short last batch": (V, lambda: read(loader_of(16, False), 16), ["last batch", "8 examples", "drop_last=True"]),
    "nothing to collect": (V, lambda: data.collect([]), ["data.collect", "none"]),
    "positions of other processes": (
        V,
        lambda: data._go_to(data.from_iterable(LOADER), [{}, {}]),
        ["2 processes", "1 run now", "start 2"],
    ),
    # Splits.
    "a loader split": (T, lambda: data.split(Loader(), 0.5), ["data.split", "a Loader", "indexed"]),
    "an iterator split": (T, lambda: data.split(iter(BATCHES), 0.5), ["a list_iterator", "indexed"]),
    "a function split": (T, lambda: data.split(lambda: BATCHES, 0.5), ["function", "indexed"]),
    "a source of one's own split": (
        A,
        lambda: data.split(types.SimpleNamespace(examples=len, batches=iter), 0.5),
        ["'split'"],  # of Python
    ),
    "epochs split": (
        V,
        lambda: data.split(data.from_iterable(BATCHES, steps_per_epoch=3), 0.5),
        ["data.split", "steps_per_epoch="],
    ),
    "all in one part": (V, lambda: data.split({"x": Y}, 2.0), ["data.split", "2.0 of 48 examples"]),
    "a small fraction": (V, lambda: images(50).split(0.001), ["0.001 of 50 examples", "from 1 to 49"]),
    "all examples": (V, lambda: images(50).split(50), ["50 of 50 examples"]),
    "a fraction above 1": (V, lambda: images(50).split(1.5), ["1.5 of 50 examples"]),
    "no fraction": (V, lambda: images(50).split(float("nan")), ["fraction", "number"]),
    "a word for a fraction": (T, lambda: images(50).split("0.5"), ["fraction", "got '0.5'"]),
    "a word for a key": (T, lambda: images(50).split(0.5, "a"), ["rng", "got 'a'"]),
    # Objects of other libraries.
    "all splits": (T, lambda: data.as_source(of_library("datasets.dataset_dict", "DatasetDict")), ["dataset['train']"]),
    "a frame without rows": (T, lambda: data.as_source(of_library("polars.lazyframe", "LazyFrame")), [".collect()"]),
    "a key that is not used": (V, lambda: images(50).split(0.5, 1, shuffle=False), ["shuffle=False", "rng"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, call, content = REFUSED[case]
    with pytest.raises(error, match=".*".join(map(re.escape, content))):
        call()


@pytest.mark.others
def test_columns_that_are_no_numbers_are_named():
    pandas = pytest.importorskip("pandas")
    named = pandas.DataFrame({"x": X[:2, 0], "name": ["a", "b"], "y": Y[:2]})
    with pytest.raises(TypeError, match=r"data.as_source: .*\['name'\].* write frame\[\['x', 'y'\]\]"):
        data.as_source(named)
    with pytest.raises(TypeError, match=r"evaluate: .*\['name'\]"):
        train.evaluate({}, data=named, eval_fn=lambda params, batch: batch)
    assert data.as_source(named[["x", "y"]]).examples(1) == 2
    twice = pandas.DataFrame(np.ones((2, 2)), columns=["x", "x"])
    with pytest.raises(ValueError, match=r"\['x', 'x'\]"):
        data.as_source(twice)
