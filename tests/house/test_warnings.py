"""A warning names the line of the user who called jaxpar, and not a line of jaxpar or of JAX."""

import ast
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import train

PARAMS = {"w": jnp.ones((4,)), "idle": jnp.ones(3)}
BATCH = np.ones((8, 4), np.float32)


def loss_fn(params, batch, rng):
    return ((batch @ params["w"]) ** 2).mean(), {}


def in_evaluation_mode():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    model.eval()
    train.start(model, optax.sgd(0.1), lambda model, batch: model(batch).mean())


def unread_in_step():
    state, step = train.start(PARAMS, optax.sgd(0.1), loss_fn)
    step(state, BATCH)


def unread_in_fit():
    state, step = train.start(PARAMS, optax.sgd(0.1), loss_fn)
    train.fit(state, step, BATCH, epochs=1, batch_size=8, progress=False)


def nan_in_fit():
    state, step = train.start({"w": jnp.full(4, jnp.nan)}, optax.sgd(0.1), loss_fn)
    train.fit(state, step, BATCH, epochs=1, batch_size=8, progress=False)


def array_in_aux():
    state, step = train.start(
        {"w": PARAMS["w"]}, optax.sgd(0.1), lambda params, batch: (params["w"].sum(), {"a": batch})
    )
    train.fit(state, step, BATCH, epochs=1, batch_size=8, progress=False)


def old_name():
    train.start(params={"w": PARAMS["w"]}, optimizer=optax.sgd(0.1), loss_fn=loss_fn)


CASES = (in_evaluation_mode, unread_in_step, unread_in_fit, nan_in_fit, array_in_aux, old_name)


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.__name__)
def test_the_line_of_the_user(call):
    with warnings.catch_warnings(record=True, action="always") as found:
        call()
    assert found
    assert {warning.filename for warning in found} == {__file__}


def test_all_warnings_are_made_so():
    """`text.warn` looks for that line. Another function of the source that warns would name its own."""
    calls = [
        f"{path.name}:{node.lineno}"
        for path in Path(jaxpar.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit")
    ]
    assert [call.partition(":")[0] for call in calls] == ["text.py"], calls
