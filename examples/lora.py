"""LoRA: a decoder that has learned to count by one learns to count by three, by adapters of rank 4.

The decoder is `frozen`. Only the adapters have gradients and a state of the optimizer, and devices send each other only
these.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

decoder = jp.models.transformer
config = decoder.Config(layers=2, width=64, heads=4, vocabulary=32, positions=16)
draw = np.random.default_rng(0)


def texts(by):
    """Rows of numbers that count on, modulo 32."""
    return {"text": (draw.integers(0, 32, (1024, 1)) + by * np.arange(17)) % 32}


def next_number(params, batch, rng):
    logits, labels = decoder.apply(params, batch["text"][:, :-1]), batch["text"][:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, {"accuracy": (logits.argmax(-1) == labels).mean()}


run = dict(batch_size=64, progress=False)
state, step = jp.train.start(decoder.init(jax.random.key(0), config), optax.adam(3e-3), next_number)
state, history = jp.train.fit(state, step, texts(by=1), epochs=4, checkpoint_dir="runs/lora/body", **run)
print(f"by one: accuracy {history[-1]['accuracy']:.3f}")


def adapted(params):
    """The decoder with the product of two thin matrices added to each kernel of its perceptrons."""
    mlp = {name: dict(part) for name, part in params["body"]["layers"]["mlp"].items()}
    for name, (a, b) in params["adapters"].items():
        mlp[name]["kernel"] = mlp[name]["kernel"] + a @ b
    return {**params["body"], "layers": {**params["body"]["layers"], "mlp": mlp}}


def loss_fn(params, batch, rng):
    return next_number(adapted(params), batch, rng)


a = jax.random.normal(jax.random.key(1), (2, 64, 4)) / 8
adapters = {
    "up": (a, jnp.zeros((2, 4, 256))),
    "down": (jnp.concatenate([a] * 4, axis=1) / 2, jnp.zeros((2, 4, 64))),
}
params = {"body": jax.device_get(state.params), "adapters": adapters}
state, step = jp.train.start(params, optax.adam(1e-2), loss_fn, frozen="body")
state, history = jp.train.fit(state, step, texts(by=3), epochs=8, checkpoint_dir="runs/lora/adapters", **run)
print(f"by three, with adapters: accuracy {history[-1]['accuracy']:.3f}")
