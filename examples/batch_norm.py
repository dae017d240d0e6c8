"""Batch norm over the whole batch, in Flax, Equinox and Haiku.

A library's batch norm takes the name of the axis that the devices are on. Then its statistics are those of the whole
batch, and the numbers are the same on any number of devices. Running statistics are the `model_state`. The layer before
a batch norm has no bias: the norm subtracts it, so its gradient would be rounding noise, which Adam makes large.
"""

import equinox as eqx
import haiku as hk
import jax
import numpy as np
import optax
from flax import linen

import jaxpar as jp

draw = np.random.default_rng(0)
x = draw.normal(3.0, 2.0, (1024, 16)).astype("float32")
data = {"x": x, "label": (x[:, :8].sum(1) > x[:, 8:].sum(1)).astype("int32")}


class FlaxNet(linen.Module):
    @linen.compact
    def __call__(self, x, training):
        x = linen.Dense(32, use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not training, momentum=0.9, axis_name="data")(x)
        return linen.Dense(2)(linen.relu(x))


def in_flax():
    net = FlaxNet()
    variables = net.init(jax.random.key(0), x[:1], False)

    def logits_of(params, x, stats):
        logits, new = net.apply({"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"])
        return logits, new["batch_stats"]

    return variables["params"], variables["batch_stats"], logits_of


class EquinoxNet(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(16, 32, use_bias=False, key=first)
        self.out = eqx.nn.Linear(32, 2, key=second)
        self.norm = eqx.nn.BatchNorm(32, axis_name=("batch", "data"), momentum=0.9, mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.hidden(x), state)
        return self.out(jax.nn.relu(x)), state


def in_equinox():
    net, stats = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def logits_of(params, x, stats):
        over = jax.vmap(eqx.combine(params, static), (0, None), (0, None), axis_name="batch")
        return over(x, stats)

    return params, stats, logits_of


def in_haiku():
    def forward(x):
        axis = None if hk.running_init() else "data"
        norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis)
        return hk.Linear(2)(jax.nn.relu(norm(hk.Linear(32, with_bias=False)(x), is_training=True)))

    net = hk.without_apply_rng(hk.transform_with_state(forward))
    params, stats = net.init(jax.random.key(0), x[:2])
    return params, stats, lambda params, x, stats: net.apply(params, stats, x)


states = {}
for name, make in (("flax", in_flax), ("equinox", in_equinox), ("haiku", in_haiku)):
    params, stats, logits_of = make()

    def loss_fn(params, batch, rng, stats, logits_of=logits_of):
        logits, stats = logits_of(params, batch["x"], stats)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, {"accuracy": (logits.argmax(1) == batch["label"]).mean()}, stats

    state, step = jp.train.start(params, optax.adam(1e-2), loss_fn, model_state=stats)
    run = dict(epochs=4, batch_size=64, checkpoint_dir=f"runs/batch_norm/{name}", progress=False)
    states[name], history = jp.train.fit(state, step, data, **run)
    print(f"{name}: accuracy {history[-1]['accuracy']:.3f}")
