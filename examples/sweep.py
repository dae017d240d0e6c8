"""A sweep over the width of a network, its dropout and its learning rate.

A function makes a run of some options. Each run has a directory of its own. So the same script again goes on where it
was stopped, and a run that is complete gives its history at once.
"""

import itertools

import jax
import numpy as np
import optax

import jaxpar as jp

draw = np.random.default_rng(0)
x = draw.normal(size=(1024, 10)).astype("float32")
train, validation = jp.data.split({"x": x, "y": np.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2]}, 0.75)


def predict(params, x, drop=lambda x: x):
    return (drop(jax.nn.relu(x @ params["in"])) @ params["out"])[:, 0]


def scores(params, batch):
    return {"error": (predict(params, batch["x"]) - batch["y"]) ** 2}


def run(width, dropout, rate):
    def loss_fn(params, batch, rng):
        def drop(x):
            return x * jax.random.bernoulli(rng, 1 - dropout, x.shape) / (1 - dropout)

        return ((predict(params, batch["x"], drop) - batch["y"]) ** 2).mean(), {}

    first, second = jax.random.split(jax.random.key(0))
    params = {"in": jax.random.normal(first, (10, width)) / 3, "out": jax.random.normal(second, (width, 1)) / 8}
    state, step = jp.train.start(params, optax.adam(rate), loss_fn, virtual_shards=4)
    options = dict(epochs=10, batch_size=64, progress=False)
    folder = f"runs/sweep/{width}-{dropout}-{rate}"
    return jp.train.fit(state, step, train, eval_data=validation, eval_fn=scores, checkpoint_dir=folder, **options)


runs = {options: run(*options) for options in itertools.product((16, 64), (0.0, 0.2), (0.003, 0.03))}
best = min(runs, key=lambda options: runs[options][1][-1]["eval_error"])
state, history = runs[best]
print("best: width {}, dropout {}, rate {}".format(*best), f"with an error of {history[-1]['eval_error']:.3f}")
