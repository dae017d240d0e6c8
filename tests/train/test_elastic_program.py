"""What a process of an elastic run would compute is compared with what process 0 computes."""

import functools
import inspect
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launched import python

from jaxpar import data, kv, train
from jaxpar.train._elastic.group import differences, digest
from jaxpar.train._elastic.member import Member
from jaxpar.train._fit.run import plan_run

STEP = "the step, with its loss, optimizer and learning rate"
SHAPES = "the shapes of the params or of the optimizer's state"
SIZES = "batch_size, the number of examples or of steps"


def program(
    scale=1.0, optimizer=optax.adam, rate=0.1, seed=0, shift=0.0, shards=4, device=0, options=(), wide=2, **sizes
):
    """What a process computes whose script has these constants."""

    def loss_fn(params, batch, rng):
        jax.debug.callback(lambda x: None, batch["x"][0, 0])
        table = jnp.asarray(np.arange(2000, dtype=np.float32))[batch["y"].astype(int)]
        return scale * ((batch["x"] @ params["w"]) ** 2).mean() + table.mean(), {}

    examples = {"x": np.ones((96, wide), np.float32), "y": np.arange(96, dtype=np.float32)}
    examples["y"][-1] += shift
    where = jax.devices()[device : device + 1]
    state = train.create_state(kv.from_params({"w": jnp.ones(wide)}, optimizer=optimizer(rate), devices=where), seed)
    step = train.make_train_step(loss_fn, virtual_shards=shards, devices=where, **dict(options))
    defaults = {name: p.default for name, p in inspect.signature(train.fit).parameters.items() if name != "unknown"}
    chosen = {**defaults, "epochs": 2, "batch_size": 16, "progress": False, **sizes}
    run = plan_run(**{**chosen, "state": state, "step": step, "train_data": data.from_arrays(examples)})
    return Member(run, state)._compile(run.check(state))


first = functools.cache(program)
CHANGES = {
    "the rate": ({"rate": 0.2}, STEP),
    "a schedule": ({"rate": optax.cosine_decay_schedule(0.1, 10)}, STEP),
    "a constant of the optimizer": ({"optimizer": lambda rate: optax.adam(rate, b1=0.8)}, STEP),
    "another optimizer with the same state": ({"optimizer": optax.nadam}, STEP),
    "the loss": ({"scale": 1.0000001}, STEP),
    "an option of the step": ({"options": {"grad_transform": optax.clip(1.0)}}, STEP),
    "the seed": ({"seed": 1}, "the seed and the data"),  # another order of the examples
    "one label": ({"shift": 1.0}, "the data"),
    "a wider layer": ({"wide": 3}, f"{SHAPES} and {STEP} and the data"),
    "the epochs": ({"epochs": 3}, SIZES),
}


SLOW = {*CHANGES} - {"one label"}  # each compiles


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CHANGES])
def test_what_differs_is_named(name):
    change, words = CHANGES[name]
    found = differences(program(**change), first())
    assert found in (words, f"{SHAPES} and {words}"), found


@pytest.mark.slow
def test_an_equal_program_is_equal_in_another_process_on_other_devices():
    source = f"import sys; sys.path[:0] = {sys.path!r}; import jax; jax.config.update('jax_num_cpu_devices', 5)\n"
    source += "import json, test_elastic_program as t; print(json.dumps(t.program(device=4)))"
    assert json.loads(python("-c", source, XLA_FLAGS="", PYTHONHASHSEED="7").stdout) == first()


def test_another_version_is_shown():
    own = first()
    assert differences({**own, "versions": "jax 9"}, own) == f"versions (jax 9, not {own['versions']})"


def test_a_digest_has_values_dtypes_shapes_and_signs_of_zero():
    one = {"a": np.zeros(4, np.float32), "b": "x"}
    others = [{**one, "a": np.zeros(4, np.int32)}, {**one, "a": np.zeros((2, 2), np.float32)}, {**one, "b": "y"}]
    others += [{**one, "a": -one["a"]}, {"a": one["a"], "c": "x"}]
    assert len({digest(tree) for tree in [one, *others]}) == 6
    assert digest({"k": jax.random.key(1)}) != digest({"k": jax.random.key(2)})
