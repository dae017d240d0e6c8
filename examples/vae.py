"""A variational autoencoder whose KL term grows during the first 100 steps.

A parameter of `loss_fn` named `step` is the number of the step. The noise is drawn from `rng`, which belongs to a share
of the batch. `virtual_shards=4` fixes the shares, so any number of devices draws the same noise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

draw = np.random.default_rng(0)
angles = draw.uniform(0, 2 * np.pi, 1024)
rows, columns = np.mgrid[:8, :8] - 3.5
images = np.cos(angles[:, None, None]) * rows + np.sin(angles[:, None, None]) * columns > 0
data = {"image": images.reshape(1024, 64).astype("float32")}


def dense(rng, *sizes):
    keys = jax.random.split(rng, len(sizes) - 1)
    return [jax.random.normal(k, (n, m)) / n**0.5 for k, n, m in zip(keys, sizes, sizes[1:])]


def mlp(layers, x):
    for w in layers[:-1]:
        x = jax.nn.relu(x @ w)
    return x @ layers[-1]


def loss_fn(params, batch, rng, step):
    mean, log_scale = jnp.split(mlp(params["encoder"], batch["image"]), 2, axis=1)
    code = mean + jnp.exp(log_scale) * jax.random.normal(rng, mean.shape)
    logits = mlp(params["decoder"], code)
    rebuilt = optax.sigmoid_binary_cross_entropy(logits, batch["image"]).sum(1).mean()
    kl = 0.5 * (mean**2 + jnp.exp(2 * log_scale) - 1 - 2 * log_scale).sum(1).mean()
    weight = jnp.minimum(step / 100, 1.0)
    return rebuilt + weight * kl, {"rebuilt": rebuilt, "kl": kl, "weight": weight}


first, second = jax.random.split(jax.random.key(0))
params = {"encoder": dense(first, 64, 64, 8), "decoder": dense(second, 4, 64, 64)}
state, step = jp.train.start(params, optax.adam(2e-3), loss_fn, virtual_shards=4)
run = dict(epochs=12, batch_size=64, checkpoint_dir="runs/vae", progress=False)
state, history = jp.train.fit(state, step, data, **run)
print(f"rebuilt {history[-1]['rebuilt']:.2f} nats, KL {history[-1]['kl']:.2f}, weight {history[-1]['weight']:.2f}")
