"""The small worlds of the tests: a line with its plain loop for steps, a classifier for `fit`, and what they share.

Tests ask here for a step, so that those of a process share its program: compiling is what takes their time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import checkpoint, data, kv, train
from jaxpar._core import checks

ENGINES = checks.ENGINES
KINDS = ("device", "local", "sharded")
EVERYWHERE = [(engine, kind) for engine in ENGINES for kind in KINDS]
IN_TURN = [("pmap", "device"), ("shard_map", "local"), ("shard_map", "sharded")]  # each of them once


def mostly_slow(all_of_them, *quick, most=None):
    """The parameters of a test, all in the second row but these; those after so many are run before a release."""
    row = lambda i: pytest.mark.slow if most is None or i < most else pytest.mark.release  # noqa: E731
    return [x if x in quick else pytest.param(x, marks=row(i)) for i, x in enumerate(all_of_them)]


# A line of three weights and a bias, for steps.


def squares(params, batch, rng):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return (error**2).mean(), {"error": jnp.abs(error).mean()}


def line(n=16, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((n, 3)).astype(np.float32), "y": rng.standard_normal(n).astype(np.float32)}


def trained(step, state, batches, first=0):
    """The state after steps of these batches, or of so many of `line`, and the metrics of the last step."""
    for batch in [line(seed=i) for i in range(first, first + batches)] if isinstance(batches, int) else batches:
        state, metrics = step(state, batch)
    return state, metrics


def placed(batch, count=4):
    """A batch that lies as a step lays it."""
    return jax.device_put(batch, NamedSharding(Mesh(np.array(jax.devices()[:count]), ("data",)), P("data")))


def steady(step, state, batches):
    """`trained` on four devices, where a second call of the step compiles nothing and sends nothing to the host."""
    # It asks for devices when it is imported. Processes that have yet to join others import this file too.
    from kv_model import compilations

    batches = [placed(batch) for batch in batches]
    state, _ = step(state, batches[0])
    with compilations() as count, jax.transfer_guard("disallow"):
        state, metrics = trained(step, state, batches)
    assert count() == 0
    return state, metrics


def start(count=4, kind="device", tx=None, params=None, compression=None, **options):
    params = {"w": jnp.ones(3), "b": jnp.zeros(())} if params is None else params
    store = kv.from_params(params, kind=kind, optimizer=sgd() if tx is None else tx)
    store = kv.set_gradient_compression(store, compression) if compression else store
    return train.create_state(store, 7, devices=jax.devices()[:count], **options)


@functools.cache
def step_of(loss=squares, **options):
    """A training step; one, and one program for states of one sort, for all tests of a process that ask for it."""
    return train.make_train_step(loss, **options)


@functools.cache
def text_of(*where, loss=squares, **options):
    """The compiled program of a step of the model of one line with Adam; `where` is the count and the kind."""
    return step_of(loss, **options).lower(start(*where, adam()), line()).compile().as_text()


@functools.cache
def update_of(tx):
    """`(grads, state, params) -> (params, state)` of an optimizer; one program, not one for each of its operations."""

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


@functools.cache
def plain_step(tx, loss):
    """One step of the plain loop; one program for all tests of a process that have the same `tx` and `loss`."""
    return jax.jit(
        lambda params, state, batch: update_of(tx)(jax.grad(lambda p: loss(p, batch, None)[0])(params), state, params)
    )


def by_hand(tx, steps, params=None, loss=squares, batches=None):
    """The plain loop on one device."""
    params = {"w": jnp.ones(3), "b": jnp.zeros(())} if params is None else params
    state = tx.init(params)
    for i in range(steps):
        params, state = plain_step(tx, loss)(params, state, line(seed=i) if batches is None else batches[i])
    return params


def close(tree, other, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 2e-5, "atol": 1e-6, **tolerance}), tree, other
    )


@functools.cache
def sgd():
    return optax.sgd(0.1)


@functools.cache
def adam():
    return optax.adam(0.05)


# A classifier of points by the largest of three numbers, for `fit` and evaluation. Two devices.


TX = optax.sgd(0.5)


def apply(params, images):
    return images @ params["w"]


LOSS = train.classification_loss(apply)
STEP = train.make_train_step(LOSS)


def points(n, seed=0):
    images = np.random.default_rng(seed).random((n, 4), np.float32)
    return data.Dataset(images, images[:, :3].argmax(1))


TEST = points(20)


def start_classifier(tx=TX, *, count=2, rng=3, **options):
    store = kv.from_params({"w": jnp.zeros((4, 3))}, optimizer=tx, **options)
    return train.create_state(store, rng, devices=jax.devices()[:count])


def run_on(train_data, state=None, *, step=STEP, **options):
    """`fit` of two epochs, or of what the options say."""
    options = {"epochs": 2, "batch_size": 16, "progress": False, **options}
    return train.fit(start_classifier() if state is None else state, step, train_data, **options)


def crash_after(epoch):
    """A callback that raises after an epoch, before the checkpoint of it."""

    def crash(state, record):
        if record["epoch"] == epoch:
            raise RuntimeError("crash")

    return crash


def crash_at(step):
    """An `on_step` that raises when the metrics of a step are there."""

    def crash(now, metrics):
        if now == step:
            raise RuntimeError("crash")

    return crash


def save_by_manager(directory, state, info=None, **options):
    """A checkpoint of a manager of its own, which is written when this returns."""
    manager = checkpoint.Manager(directory)
    manager.save(state, info, **options)
    manager.close()


def same(state, other):
    np.testing.assert_array_equal(state.params["w"], other.params["w"])
    assert int(state.step) == int(other.step)


def numbers(history):
    """The records without what the clock measured."""
    timed = ("seconds", "images_per_second", "examples_per_second")
    return [{k: v for k, v in r.items() if k not in timed} for r in history]
