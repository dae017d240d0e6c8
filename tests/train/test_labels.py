"""Labels that are no classes of the model are refused before any work, where they are known."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import data, kv, train

IMAGES = np.ones((8, 2), np.float32)


def apply(params, images):
    return images @ params["w"]


def started():
    return train.create_state(kv.from_params({"w": jnp.ones((2, 3))}, optimizer=optax.sgd(0.1)), 0)


def fit(dataset, **options):
    step = train.make_train_step(train.classification_loss(apply))
    return train.fit(started(), step, dataset, epochs=1, batch_size=8, progress=False, **options)


@pytest.mark.parametrize(("last", "words"), [(3, "from 0 to 3"), (-1, "from -1 to 0")])
def test_labels_out_of_range(last, words):
    wrong = data.Dataset(IMAGES, np.array([0] * 7 + [last]))
    right = data.Dataset(IMAGES, np.arange(8) % 3)
    message = f"the model has 3 classes, but labels {words}; give labels 0 to 2"
    with pytest.raises(ValueError, match=f"fit: train_data: {message}"):
        fit(wrong)
    with pytest.raises(ValueError, match=f"fit: test_data: {message}"):
        fit(right, test_data=wrong, apply_fn=apply)
    with pytest.raises(ValueError, match=f"evaluate: {message}"):
        train.evaluate({"w": jnp.ones((2, 3))}, apply, wrong, batch_size=4)
    state, _ = fit(right, test_data=right, apply_fn=apply)
    assert train.evaluate(state, apply, right, batch_size=4)["accuracy"] == 0.375


def test_what_cannot_be_known_is_left_to_the_model():
    """A model that fails says so itself. Targets that are no classes are not looked at."""
    dataset = data.Dataset(IMAGES, np.arange(8))
    with pytest.raises(TypeError, match="dot_general"):
        train.evaluate({"w": jnp.ones((5, 3))}, apply, dataset, batch_size=8)

    def squares(params, batch, rng):
        return ((apply(params, batch["image"])[:, 0] - batch["label"]) ** 2).mean(), {}

    step = train.make_train_step(squares)
    train.fit(started(), step, dataset, epochs=1, batch_size=8, progress=False)


def test_a_donated_state_is_checked_too(tmp_path):
    step, state = train.make_train_step(train.classification_loss(apply)), started()
    options = {"batch_size": 8, "progress": False, "checkpoint_dir": tmp_path}
    train.fit(state, step, data.Dataset(IMAGES, np.arange(8) % 3), epochs=1, **options)
    assert state.store.values[0].is_deleted()
    with pytest.raises(ValueError, match="but labels from 0 to 7"):
        train.fit(state, step, data.Dataset(IMAGES, np.arange(8)), epochs=2, **options)
