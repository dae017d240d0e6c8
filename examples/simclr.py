"""SimCLR: two views of an image are a pair, and all other images of the whole batch are negatives.

`all_gather` over the axis "data" brings the codes of all devices. A view is drawn from the number of its image and of
the step, not from `rng`, so it is the same on any number of devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

draw = np.random.default_rng(0)
classes = draw.integers(0, 4, 1024)
prototypes = draw.normal(size=(4, 64)).astype("float32")
images = prototypes[classes] + 0.5 * draw.normal(size=(1024, 64)).astype("float32")
data = {"image": images, "number": np.arange(1024)}


def encode(params, images):
    x = jax.nn.relu(images @ params["in"]) @ params["out"]
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def view(image, number, step, which):
    rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(which), step), number)
    noise, mask = jax.random.split(rng)
    return (image + 0.3 * jax.random.normal(noise, image.shape)) * jax.random.bernoulli(mask, 0.8, image.shape)


def loss_fn(params, batch, rng, step):
    views = [jax.vmap(view, (0, 0, None, None))(batch["image"], batch["number"], step, which) for which in (0, 1)]
    own, other = (encode(params, images) for images in views)
    others = jax.lax.all_gather(other, "data", tiled=True)  # of all devices
    first = jax.lax.axis_index("data") * len(own)
    logits, labels = own @ others.T / 0.2, first + jnp.arange(len(own))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": (logits.argmax(1) == labels).mean()}


first, second = jax.random.split(jax.random.key(0))
params = {"in": jax.random.normal(first, (64, 64)) / 8, "out": jax.random.normal(second, (64, 16)) / 8}
state, step = jp.train.start(params, optax.adam(1e-3), loss_fn)
run = dict(epochs=8, batch_size=128, checkpoint_dir="runs/simclr", progress=False)
state, history = jp.train.fit(state, step, data, **run)
codes = jp.train.predict(state, encode, images, batch_size=128)
nearest = np.argsort(-codes @ codes.T, axis=1)[:, 1]  # the first is the image itself
print(f"loss {history[-1]['loss']:.3f}, nearest neighbour of the same class {(classes[nearest] == classes).mean():.3f}")
