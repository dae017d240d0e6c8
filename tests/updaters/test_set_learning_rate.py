"""`set_learning_rate` changes the rates of optimizers, and nothing else of that name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import kv, train, updaters

PARAMS = {"learning_rate": jnp.full(2, 7.0), "dense": {"learning_rate": jnp.float32(7), "w": jnp.ones(2)}}


def rates_of(before, after):
    """The paths of the leaves that changed, all to the new rate."""
    assert jax.tree.structure(before) == jax.tree.structure(after)
    old, new = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (before, after))
    changed = [(p, b) for (p, a), (_, b) in zip(old, new, strict=True) if not np.array_equal(a, b)]
    assert all(b == np.float32(0.25) for _, b in changed)
    return [jax.tree_util.keystr(p) for p, _ in changed]


def without_rng(state):
    return {"store": state.store, "transform": state.transform, "model_state": state.model_state}


MXNET = updaters.mxnet_sgd(0.5, momentum=0.9, rate_in_state=True)
ADAM_RATE = ".hyperparams['learning_rate']"
ADAM = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)


@pytest.mark.parametrize(
    ("options", "inner"),
    [
        ({"optimizer": MXNET}, "['learning_rate']"),
        ({"updater": updaters.from_optax(ADAM)}, ".hyperparams['learning_rate']"),
        ({"optimizer": ADAM}, None),
    ],
)
def test_only_the_rates_of_a_store_and_a_training_state(options, inner):
    store = kv.from_params(PARAMS, **options)
    want = [f".updater_state[{k}]{inner}" for k in range(3)] if inner else [".optimizer_state" + ADAM_RATE]
    assert rates_of(store, updaters.set_learning_rate(store, 0.25)) == want
    states = store.updater_state if inner else store.optimizer_state
    assert len(rates_of(states, updaters.set_learning_rate(states, 0.25))) == len(want)
    clip = optax.inject_hyperparams(lambda learning_rate: optax.scale(learning_rate))(learning_rate=1.0)
    model_state = {"learning_rate": jnp.float32(7), "norm": {"learning_rate": jnp.float32(7)}}
    state = train.create_state(store, 0, devices=jax.devices()[:1], grad_transform=clip, model_state=model_state)
    parts = without_rng(state)
    for after in (without_rng(updaters.set_learning_rate(state, 0.25)), updaters.set_learning_rate(parts, 0.25)):
        want_all = [*(f"['store']{path}" for path in want), "['transform'].hyperparams['learning_rate']"]
        assert rates_of(parts, after) == want_all


def test_moments_of_a_parameter_of_that_name():
    """An optimizer over the whole tree has the parameters' names in its moments."""
    state = ADAM.init(PARAMS)
    assert rates_of(state, updaters.set_learning_rate(state, 0.25)) == [".hyperparams['learning_rate']"]
