"""The optimizers beside MXNet 1.9.1's own numbers, for every combination of their options.

The numbers are in tests/reference/mxnet_optimizers.json. tools/record_mxnet_optimizers.py says how they are recorded.
"""

import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import kv, updaters
from jaxpar.sparse import RowSparse

RECORDED = json.loads((Path(__file__).parent.parent / "reference" / "mxnet_optimizers.json").read_text())
NAMES = list(RECORDED["defaults"])
FORMS = [
    *((form, 2e-6) for form in ("dense float32", "rows float32")),
    ("dense float64", 2e-6),  # MXNet's options are float32 there
    *((form, 1e-3) for form in ("dense-master float16", "rows-master float16")),  # one rounding to float16
    *((form, 1e-2) for form in ("dense float16", "rows float16")),  # MXNet rounds each operation
]
MULTIPLIERS = {name: {int(k): v for k, v in factors.items()} for name, factors in RECORDED["multipliers"].items()}
SHAPE = (3, 2)


def make(name, options, **more):
    return getattr(updaters, f"mxnet_{name}")(**options, **MULTIPLIERS, **more)


def pushes(third):
    for place, push in enumerate(RECORDED["pushes"]):
        yield push if third is None or place != 2 else third


def dense(rows, gradients):
    table = np.zeros(SHAPE)
    if rows:
        table[rows] = gradients
    return table


def run(updater, form, third=None):
    """What the record has: both values after the second and the last push."""
    how, dtype = form.split()
    values = {key: jnp.asarray(value, dtype) for key, value in enumerate(RECORDED["weights"])}
    store = kv.set_updater(kv.init(kv.create(), [0, 1], list(values.values())), updater)
    states, found = {key: updater.init(key, value) for key, value in values.items()}, []
    for place, (rows, gradients) in enumerate(pushes(third)):
        pushed = dense(rows, gradients).astype(dtype)
        if how.startswith("rows"):
            rows = RowSparse(np.array(rows, np.int32), jnp.asarray(gradients, dtype).reshape(-1, 2), SHAPE)
            store = kv.push(store, [0, 1], [rows, rows])
            values = dict(store.values)
        else:
            for key, value in values.items():
                values[key], states[key] = updater.update(key, jnp.asarray(pushed), states[key], value)
        if place in (1, 3):
            found.append(np.concatenate([np.ravel(np.asarray(values[key], float)) for key in (0, 1)]))
    return np.stack(found)


def recorded(name, form):
    """The options, the third push and the numbers of every case."""
    return [(case[1], case[2], case[3][form]) for case in RECORDED["cases"] if case[0] == name and form in case[3]]


@pytest.mark.parametrize(("form", "atol"), FORMS, ids=[form for form, _ in FORMS])
@pytest.mark.parametrize("name", NAMES)
def test_every_combination_of_options(name, form, atol):
    wrong = []
    with jax.enable_x64("64" in form), jax.disable_jit():
        for options, third, expected in recorded(name, form):
            more = {"multi_precision": True} if "master" in form else {}
            if isinstance(expected, str):
                continue
            expected = np.array(expected, float)
            found = run(make(name, options, **more), form, third)
            if not np.allclose(np.where(np.isnan(expected), found, found), np.where(np.isnan(expected), found, expected), rtol=atol, atol=atol):
                wrong.append((options, third, np.nanmax(abs(found - expected))))
    assert not wrong
