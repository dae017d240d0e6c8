"""What the tests of `fit` and of evaluation share: a classifier, data, a run of two devices, what two runs share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import checkpoint, data, kv, train

TX = optax.sgd(0.5)


def apply(params, images):
    return images @ params["w"]


LOSS = train.classification_loss(apply)
STEP = train.make_train_step(LOSS)


def points(n, seed=0):
    images = np.random.default_rng(seed).random((n, 4), np.float32)
    return data.Dataset(images, images[:, :3].argmax(1))


TEST = points(20)


def start(tx=TX, *, count=2, rng=3, **options):
    store = kv.from_params({"w": jnp.zeros((4, 3))}, optimizer=tx, **options)
    return train.create_state(store, rng, devices=jax.devices()[:count])


def run_on(train_data, state=None, *, step=STEP, **options):
    """`fit` of two epochs, or of what the options say."""
    options = {"epochs": 2, "batch_size": 16, "progress": False, **options}
    return train.fit(start() if state is None else state, step, train_data, **options)


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
