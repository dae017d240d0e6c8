"""The optimizers beside MXNet 1.9.1's own numbers, for every combination of their options.

The numbers are in tests/reference/mxnet_optimizers.json. tools/record_mxnet_optimizers.py says how they are recorded.
"""

import dataclasses
import functools
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import kv, updaters
from jaxpar._store import aggregate
from jaxpar.kv import _push
from jaxpar.sparse import RowSparse

RECORDED = json.loads((Path(__file__).parent.parent / "reference" / "mxnet_optimizers.json").read_text())
NAMES = list(RECORDED["defaults"])
FORMS = {  # the largest error, relative and absolute
    "dense float32": 2e-6,
    "rows float32": 2e-6,
    "dense float64": 2e-6,  # MXNet's options are float32 there
    "dense-master float16": 1e-3,  # one rounding to float16
    "rows-master float16": 1e-3,
    "dense float16": 1e-2,  # MXNet rounds after each operation
    "rows float16": 1e-2,
}
MULTIPLIERS = {name: {int(k): v for k, v in factors.items()} for name, factors in RECORDED["multipliers"].items()}
SHAPE = (3, 2)
KINDS = ("local", "device", "sharded")


def make(name, options, form="dense float32"):
    more = {"multi_precision": True} if "master" in form else {}
    return getattr(updaters, f"mxnet_{name}")(**options, **MULTIPLIERS, **more)


def table_of(rows, gradients):
    table = np.zeros(SHAPE)
    if rows:
        table[rows] = gradients
    return table


def gradients_of(third):
    """The rows and the gradient of each push."""
    for place, push in enumerate(RECORDED["pushes"]):
        yield third if third is not None and place == 2 else push


def run(updater, key, form, third):
    """What was recorded of a key: its value after the second and the last push."""
    how, dtype = form.split()
    if how.startswith("dense"):
        return run_dense(updater, key, dtype, third is not None)
    value, found = jnp.asarray(RECORDED["weights"][key], dtype), []
    state = updater.init(key, value)
    if not updater.update.is_lazy(state):
        return run_dense(updater, key, dtype, third is not None)
    for rows, gradients in gradients_of(third):
        if rows:
            value, state = update_rows(updater, key, np.array(rows), jnp.asarray(gradients, dtype), state, value)
        else:
            state = {**state, "count": state["count"] + 1} if "count" in state else state
        found.append(np.ravel(np.asarray(value, np.float64)))
    return found[1], found[3]


@functools.cache  # rows that are not lazy are dense pushes, which were run before
def run_dense(updater, key, dtype, empty_third):
    value, found = jnp.asarray(RECORDED["weights"][key], dtype), []
    state = updater.init(key, value)
    for rows, gradients in gradients_of(([], []) if empty_third else None):
        value, state = updater.update(key, jnp.asarray(table_of(rows, gradients), dtype), state, value)
        found.append(np.ravel(np.asarray(value, np.float64)))
    return found[1], found[3]


def update_rows(updater, key, rows, gradients, state, value):
    """The update of these rows, as slices in NumPy. It stands for `sparse.lazy_update`, which has tests of its own."""

    def cut(leaf):
        return leaf[rows] if leaf.ndim else leaf

    def paste(leaf, new):
        if not leaf.ndim:
            return new
        whole = np.array(leaf)
        whole[rows] = new
        return jnp.asarray(whole)

    new = updater.update(key, gradients, jax.tree.map(cut, state), cut(value))
    return jax.tree.map(paste, (value, state), new)


def cases_of(name, form):
    """The options, the third push and the numbers of each case."""
    return [(case[1], case[2], case[3][form]) for case in RECORDED["cases"] if case[0] == name and form in case[3]]


# MXNet makes the state of these float32 whatever the value is, and its kernels then refuse other values.
ABSENT = [
    (name, form) for name in ("rmsprop", "adagrad") for form in ("dense float16", "rows float16", "dense float64")
]


DTYPES = {"float32": "float32", "master": "-master float16", "float16": "float16", "float64": "float64"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_combination_of_options(name, dtype):
    for form in [form for form in FORMS if form.replace("dense", "").replace("rows", "").strip() == dtype]:
        cases = [case for case in cases_of(name, form) if not isinstance(case[2], str)]
        assert bool(cases) == ((name, form) not in ABSENT)
        with jax.enable_x64(dtype == "float64"):
            for options, third, numbers in cases:
                key = 1  # the one with multipliers
                recorded = np.array(numbers, np.float64).reshape(2, 2, 6)[:, key]
                found = np.stack(run(make(name, options, form), key, form, third))
                assert np.isfinite(found).all()
                # MXNet divides zero by zero in float16, where an epsilon of 1e-8 is 0.
                there, most = np.isfinite(recorded), FORMS[form]
                np.testing.assert_allclose(found[there], recorded[there], most, most, err_msg=f"{form}, {options}")


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_mxnets(name):
    function = getattr(updaters, f"mxnet_{name}")
    ours = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    theirs = RECORDED["defaults"][name]
    theirs = {{"eps": "epsilon"}.get(option, option): value for option, value in theirs.items()}
    theirs = {option: value for option, value in theirs.items() if option in ours}
    assert {option: ours[option] for option in theirs} == theirs
    assert function(**RECORDED["defaults"][name]) == function()  # the common ones too


# In a store.


def longest(name, form, lazy=True):
    """The case with the most options, and its numbers."""
    cases = [case for case in cases_of(name, form) if case[1] is None and not isinstance(case[2], str)]
    cases = [case for case in cases if case[0].get("lazy_update", True) == lazy]
    options, _, numbers = max(cases, key=lambda case: len(case[0]))
    return options, np.array(numbers, np.float64).reshape(2, 2, 6)


@dataclasses.dataclass(frozen=True)
class Each:
    """The optimizers as one function of an updater: keys 2n and 2n + 1 are the keys 0 and 1 of the optimizer n."""

    of: str
    each: tuple[updaters.Updater, ...]

    def __call__(self, key, *args):
        return getattr(self.each[key // 2], self.of)(key % 2, *args)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, "dense float32") for kind in KINDS), ("sharded", "dense-master float16")],
)
def test_dense_pushes_from_two_devices(kind, form):
    cases = [longest(name, form) for name in NAMES]
    each = tuple(make(name, options, form) for name, (options, _) in zip(NAMES, cases, strict=True))
    keys, devices, dtype = range(2 * len(NAMES)), jax.devices()[:2], form.split()[1]
    store = kv.create(kind, devices=devices if kind == "sharded" else None)
    store = kv.init(store, keys, [jnp.asarray(RECORDED["weights"][key % 2], dtype) for key in keys])
    store = kv.set_updater(store, updaters.Updater(Each("init", each), Each("update", each)))
    for place, (rows, gradients) in enumerate(gradients_of(None)):
        halves = [jax.device_put(table_of(rows, gradients).astype(dtype) / 2, device) for device in devices]
        store = kv.push(store, keys, [halves] * len(keys))
        if place in (1, 3):
            found = np.stack([np.asarray(value, np.float64) for value in kv.pull(store, keys)]).reshape(-1, 2, 6)
            expected = [numbers[place // 2] for _, numbers in cases]
            np.testing.assert_allclose(found, expected, FORMS[form], FORMS[form])


ROWS = [
    ("sgd", "rows float32", True),
    ("sgd", "rows float32", False),
    ("sgd", "rows-master float16", True),
    ("nag", "rows float32", True),
    ("adam", "rows-master float16", True),
    ("adam", "rows float32", False),
    ("rmsprop", "rows float32", True),
    ("adagrad", "rows float32", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "lazy"), ROWS)
def test_pushes_of_rows_from_two_devices(name, form, lazy, monkeypatch):
    # To compile the push takes longer than to run it. test_kv_sparse.py has the compiled ones.
    monkeypatch.setattr(_push, "_compiled", lambda updater: functools.partial(aggregate.update_by_rows, updater))
    (options, numbers), dtype = longest(name, form, lazy), form.split()[1]
    store = kv.init(kv.create("device"), 1, jnp.asarray(RECORDED["weights"][1], dtype))
    store = kv.set_updater(store, make(name, options, form))
    for place, (rows, gradients) in enumerate(gradients_of(None)):
        halves = [RowSparse(np.array(rows), jnp.asarray(gradients, dtype) / 2, SHAPE) for _ in range(2)]
        store = kv.push(store, 1, halves)
        if place in (1, 3):
            found = np.ravel(np.asarray(kv.pull(store, 1), np.float64))
            np.testing.assert_allclose(found, numbers[place // 2, 1], FORMS[form], FORMS[form])


def test_rows_with_decay_are_refused_where_mxnet_raises():
    for form in ("rows float32", "rows-master float16"):
        for name in NAMES:
            for options, _, numbers in cases_of(name, form):
                updater = make(name, options, form)
                if isinstance(numbers, str):
                    with pytest.raises(ValueError, match="mxnet_adagrad takes no RowSparse with weight decay"):
                        updater.update.check_rows(0)
                else:
                    updater.update.check_rows(0)
    rows = RowSparse(np.array([1]), jnp.ones((1, 2)), SHAPE)
    store = kv.init(kv.create(), [3, 4], [jnp.ones(SHAPE)] * 2)
    store = kv.set_updater(store, updaters.mxnet_adagrad(0.1, wd=0.1, wd_mult={4: 0}))
    with pytest.raises(ValueError, match=r"kv.push: key 3: .* of this key is 0.1; write wd=0 or wd_mult=\{3: 0\}"):
        kv.push(store, [4, 3], [rows, rows])
    assert kv.pull(kv.push(store, 4, rows), 4)[1, 0] < 1


def test_a_row_sparse_value_differs_from_a_dense_one_in_nag_only():
    """There MXNet's momentum has the decay of the old value. The docstring of mxnet_nag says so."""
    forms = ("sparse float32", "sparse-master float16")
    found = [case for case in RECORDED["cases"] if any(form in case[3] for form in forms)]
    assert found
    assert all(name == "nag" and options["momentum"] and options["wd"] for name, options, _, _ in found)
