"""Loss and accuracy over every example, from any devices, by one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import compilations

from jaxpar import data, kv, train

RNG = np.random.default_rng(0)
SET = data.Dataset(RNG.random((37, 5), np.float32), RNG.integers(0, 4, 37))
PARAMS = {"w": RNG.standard_normal((5, 4)).astype(np.float32)}


def apply(params, images):
    return images @ params["w"]


def want(dataset=SET):
    logits = dataset.images.astype(np.float64) @ PARAMS["w"].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    labels = dataset.labels
    return {"loss": -log_p[np.arange(len(labels)), labels].mean(), "accuracy": (logits.argmax(1) == labels).mean()}


def close(scores, expected):
    assert {k: type(v) for k, v in scores.items()} == {"loss": float, "accuracy": float}
    assert scores == {k: pytest.approx(v, rel=1e-5) for k, v in expected.items()}


@pytest.mark.parametrize("batch_size", [1, 10, 37, 64])
def test_every_example_counts_once(batch_size):
    close(train.evaluate(jax.tree.map(jnp.asarray, PARAMS), apply, SET, batch_size=batch_size), want())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["device", "local", "sharded"])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_of_a_state_on_any_devices(count, kind):
    store = kv.from_params(PARAMS, kind=kind, optimizer=optax.sgd(0.1))
    state = train.create_state(store, 0, devices=jax.devices()[:count])
    close(train.evaluate(state, apply, SET, batch_size=16), want())


def test_parameters_on_one_other_device_or_in_numpy():
    close(train.evaluate(jax.device_put(PARAMS, jax.devices()[3]), apply, SET, batch_size=16), want())
    close(train.evaluate(PARAMS, apply, SET, batch_size=16), want())


def test_fewer_examples_than_devices():
    few = data.Dataset(SET.images[:3], SET.labels[:3])
    state = train.create_state(kv.from_params(PARAMS), 0)
    close(train.evaluate(state, apply, few, batch_size=256), want(few))


def test_an_odd_last_batch_compiles_nothing_more():
    state = train.create_state(kv.from_params(PARAMS), 0, devices=jax.devices()[:2])
    programs = []

    def traced(params, images):
        programs.append(images.shape)
        return images @ params["w"]

    train.evaluate(state, traced, SET, batch_size=16)
    train.evaluate(state, traced, SET, batch_size=16)
    assert programs == [(1, 5), (16, 5)]  # one image is traced for the number of classes
    with compilations() as count:
        train.evaluate(state, traced, SET, batch_size=16)
    assert count() == 0


def test_a_logit_that_is_not_finite_in_the_padding_does_no_harm():
    dataset = data.Dataset(np.vstack([np.ones((4, 5)), np.full((1, 5), 2)]).astype(np.float32), np.zeros(5, int))

    def apply(params, images):
        return jnp.zeros((images.shape[0], 2)) + params["w"][0, 0] * 0

    assert train.evaluate(PARAMS, apply, dataset, batch_size=4) == {
        "loss": pytest.approx(np.log(2), rel=1e-6),
        "accuracy": 1.0,
    }


@pytest.mark.parametrize("batch_size", [0, -3])
def test_errors(batch_size):
    with pytest.raises(ValueError, match="evaluate: batch_size must be an int of 1 or more, got "):
        train.evaluate(PARAMS, apply, SET, batch_size=batch_size)
    with pytest.raises(ValueError, match="evaluate: expected examples, got an empty data set"):
        train.evaluate(PARAMS, apply, data.Dataset(SET.images[:0], SET.labels[:0]), batch_size=4)
