"""Several labels for each image: which of five patterns are in it.

A label is a row of zeros and ones, and the loss is a binary cross-entropy for each. F1 is counted over the whole
validation set: `eval_fn` returns pairs of sums, and `fit` divides the sums.
"""

import jax
import numpy as np
import optax

import jaxpar as jp

draw = np.random.default_rng(0)
patterns = draw.random((5, 12, 12), dtype="float32")
tags = draw.integers(0, 2, (1280, 5))
images = np.tensordot(tags.astype("float32"), patterns, 1) + draw.normal(0, 0.3, (1280, 12, 12)).astype("float32")
train, validation = jp.data.split({"image": images, "tags": tags}, 0.8)


def predict(params, images):
    hidden = jax.nn.relu(images.reshape(len(images), -1) @ params["in"])
    return hidden @ params["out"]


def loss_fn(params, batch, rng):
    losses = optax.sigmoid_binary_cross_entropy(predict(params, batch["image"]), batch["tags"])
    return losses.mean(), {}


def scores(params, batch):
    found, tags = predict(params, batch["image"]) > 0, batch["tags"] == 1
    both, either = (found & tags).sum(1), found.sum(1) + tags.sum(1)
    return {"f1": (2.0 * both, either)}


first, second = jax.random.split(jax.random.key(0))
params = {"in": jax.random.normal(first, (144, 64)) / 12, "out": jax.random.normal(second, (64, 5)) / 8}
state, step = jp.train.start(params, optax.adam(1e-3), loss_fn)
run = dict(epochs=12, batch_size=64, checkpoint_dir="runs/multi_label", progress=False)
state, history = jp.train.fit(state, step, train, eval_data=validation, eval_fn=scores, **run)
print(f"F1 {history[-1]['eval_f1']:.3f}")
