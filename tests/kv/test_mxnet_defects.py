"""What MXNet 1.9.1 does wrong, and that jaxpar does better; test_kv_errors.py and others have the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import put

from jaxpar import kv

ONES = jnp.ones((2, 3))


def filled(kind="device"):
    return kv.init(kv.create(kind), [3, 5], [ONES, ONES])


def test_uint8_wrapped_when_it_was_pulled():
    with pytest.raises(TypeError, match="cannot be cast safely"):
        kv.push(kv.init(kv.create(), 3, jnp.zeros(2, jnp.uint8)), 3, jnp.full(2, 300.0))


def test_an_exact_2bit_of_float16_values():
    """#15252: 2bit was for float32 alone."""
    store = kv.init(kv.create("device"), 3, jnp.zeros(64, jnp.float16))
    store = kv.push(kv.set_gradient_compression(store, {"type": "2bit", "threshold": 0.5}), 3, jnp.ones(64))
    np.testing.assert_array_equal(kv.pull(store, 3), np.full(64, 0.5, np.float16))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_adam_counted_a_step_for_each_device(count):
    store = kv.set_optimizer(filled(), optax.adam(0.1))
    for _ in range(3):
        store = kv.push(store, 3, put([ONES / count] * count, jax.devices()))
    assert int(store.updater_state[3][0].count) == 3
    assert int(store.updater_state[5][0].count) == 0


def test_the_rate_was_ignored_on_the_store():
    """#15919, #8907: a rate that changes acts on the next push, without a new program."""
    store = kv.set_optimizer(filled(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    store = kv.push(store, 3, ONES)
    np.testing.assert_allclose(kv.pull(store, 3), np.full((2, 3), 0.5))
    store.updater_state[3].hyperparams["learning_rate"] = jnp.float32(0.1)
    np.testing.assert_allclose(kv.pull(kv.push(store, 3, ONES), 3), np.full((2, 3), 0.4), rtol=1e-6)
    store = kv.set_optimizer(filled(), optax.sgd(optax.piecewise_constant_schedule(0.5, {1: 0.2})))
    store = kv.push(kv.push(store, 3, ONES), 3, ONES)
    np.testing.assert_allclose(kv.pull(store, 3), np.full((2, 3), 0.4), rtol=1e-6)


def test_a_stale_gradient_was_applied_again():
    store = kv.set_optimizer(filled(), optax.sgd(0.5))
    store = kv.push(store, 3, ONES)
    pulled = kv.pull(kv.push(store, 5, ONES), 3)
    np.testing.assert_array_equal(pulled, np.full((2, 3), 0.5))


def test_replicas_diverged():
    """After a push, the copies on all devices are one value."""
    devices = jax.devices()[:4]
    store = kv.set_optimizer(filled(), optax.sgd(0.1, momentum=0.9))
    for i in range(2):
        store = kv.push(store, 3, put([i * ONES, ONES, -ONES, ONES / 3], devices))
    copies = kv.pull(store, 3, devices=devices)
    assert len({np.asarray(c).tobytes() for c in copies}) == 1


def test_ranks_and_barriers_without_other_processes():
    assert (kv.rank(), kv.num_workers()) == (0, 1)
    kv.barrier("here")
