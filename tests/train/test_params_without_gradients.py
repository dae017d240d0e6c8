"""Params that are not floating, such as random keys and counts, beside a `grad_transform`, in every kind and engine."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_model import EVERYWHERE, close, line, step_of

from jaxpar import kv, train

PLACES = [(engine, kind) for engine, kind in EVERYWHERE if kind != "sharded"] + [("jit", "device")]
CLIP, TRACE, OUTER = optax.clip_by_global_norm(0.1), optax.trace(0.9), optax.adam(0.1)


def trained(more, transform, engine, kind, is_given):
    params = {"b": jnp.zeros(()), "w": jnp.ones(3), **more}
    store = kv.from_params(params, kind=kind, optimizer=OUTER, devices=jax.devices()[:2])
    state = train.create_state(store, 0, grad_transform=transform if is_given else None)
    for _ in range(2):
        state, _ = step_of(engine=engine, grad_transform=transform)(state, line())
    return state


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("transform", "is_given"), [(CLIP, True), (TRACE, False)], ids=["clip", "trace"])
@pytest.mark.parametrize(("engine", "kind"), PLACES)
def test_a_grad_transform_sees_the_floating_params_only(engine, kind, transform, is_given):
    more = {"a": jax.random.key(3), "n": jnp.arange(3), "on": jnp.array([True, False])}
    state = trained(more, transform, engine, kind, is_given)
    plain = trained({}, transform, engine, kind, is_given)
    found = dict(state.params)
    assert (jax.random.key_data(found.pop("a")) == jax.random.key_data(more["a"])).all()
    np.testing.assert_array_equal(found.pop("n"), more["n"])
    np.testing.assert_array_equal(found.pop("on"), more["on"])
    close(found, plain.params)
    assert len(jax.tree.leaves(state.transform)) == len(jax.tree.leaves(plain.transform))


def test_random_keys_have_no_shares():
    params = {"w": jnp.ones(3), "key": jax.random.key(0)}
    with pytest.raises(TypeError, match=r"key 0 \('key'\): kind 'sharded' cuts no random keys; .*'device'"):
        kv.from_params(params, kind="sharded", optimizer=OUTER)


@pytest.mark.parametrize("tx", [optax.contrib.sophia(0.1), optax.lbfgs(0.1)], ids=["sophia", "lbfgs"])
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_an_optimizer_that_needs_the_loss_as_a_function_says_so_in_every_kind(kind, tx):
    store = kv.from_params({"b": jnp.zeros(()), "w": jnp.ones(3)}, kind=kind, optimizer=tx)
    state = train.create_state(store, 0)
    with pytest.raises((TypeError, ValueError), match=r"obj_fn must be provided|needs more than gradients .*value_fn"):
        step_of()(state, line())
    with pytest.raises(ValueError, match=r"the updater fails .*(obj_fn|value_fn)"):
        kv.set_optimizer(kv.from_params({"w": jnp.ones(3)}, kind="sharded"), tx)
