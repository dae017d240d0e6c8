"""Segmentation: a small U-Net in Flax NNX finds the pixels of discs.

The intersection over union is one number of a whole data set, not a mean over images. So `eval_fn` returns both as a
pair of sums for each class.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar as jp

draw = np.random.default_rng(0)
rows, columns = np.mgrid[:16, :16]
middles, radii = draw.integers(4, 12, (640, 2)), draw.integers(2, 5, 640)
distances = np.hypot(rows - middles[:, 0, None, None], columns - middles[:, 1, None, None])
masks = (distances < radii[:, None, None]).astype("int32")
images = masks[..., None] + draw.normal(0, 0.5, (640, 16, 16, 1)).astype("float32")
train, test = jp.data.split({"image": images.astype("float32"), "mask": masks}, 0.8)


class UNet(nnx.Module):
    def __init__(self, rngs):
        self.down = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.bottom = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.up = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.join = nnx.Conv(16, 8, (3, 3), rngs=rngs)
        self.out = nnx.Conv(8, 2, (1, 1), rngs=rngs)

    def __call__(self, x):
        wide = nnx.relu(self.down(x))
        deep = nnx.relu(self.bottom(nnx.max_pool(wide, (2, 2), (2, 2))))
        x = jnp.concatenate([wide, self.up(deep)], axis=-1)
        return self.out(nnx.relu(self.join(x)))


graphdef, params = nnx.split(UNet(nnx.Rngs(0)), nnx.Param)


def predict(params, images):
    return nnx.merge(graphdef, params)(images)


def loss_fn(params, batch, rng):
    losses = optax.softmax_cross_entropy_with_integer_labels(predict(params, batch["image"]), batch["mask"])
    return losses.mean(), {}


def scores(params, batch):
    found = predict(params, batch["image"]).argmax(-1)

    def pair(label):
        a, b = found == label, batch["mask"] == label
        return 1.0 * (a & b).sum((1, 2)), (a | b).sum((1, 2))

    return {"iou_ground": pair(0), "iou_disc": pair(1)}


state, step = jp.train.start(params, optax.adam(3e-3), loss_fn)
run = dict(epochs=4, batch_size=32, checkpoint_dir="runs/unet", progress=False)
state, history = jp.train.fit(state, step, train, eval_data=test, eval_fn=scores, **run)
print(f"mean IoU {(history[-1]['eval_iou_ground'] + history[-1]['eval_iou_disc']) / 2:.3f}")
