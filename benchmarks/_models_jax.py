"""The networks of `models.py` in JAX, measured on command in a process of its own.

Contenders of a network: "plain" is `jax.jit` with optax, on one device. "jaxpar" is the same function in a training
step of jaxpar, over all devices of the process. "many" is `step.many`, eight steps a call.
"""

from __future__ import annotations

import math
import os
import sys
import time
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import serve
from _shapes import MATRIX
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import kv, parallel, train
from jaxpar.sparse import RowSparse

LEARNING_RATE = 0.01
TOGETHER = 8  # steps in a call of "many"
NUMBERS = ("NHWC", "HWIO", "NHWC")


def normal(rng, *shape, scale=None):
    return np.float32(scale or 1 / math.sqrt(math.prod(shape[:-1]))) * rng.standard_normal(shape, np.float32)


def dense(layer, x):
    return x @ layer["weight"] + layer["bias"]


def dense_init(rng, before, after):
    return {"weight": normal(rng, before, after), "bias": np.zeros(after, np.float32)}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def classified(apply):
    def loss_fn(params, batch):
        return cross_entropy(apply(params, batch["x"]), batch["label"])

    return loss_fn


def max_pool(x, window_shape, strides):
    """As Flax's does."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, *window_shape, 1), (1, *strides, 1), "VALID")


def cnn(rng):
    """Three 3 x 3 convolutions with ReLU and max pooling, one dense layer. 128 images of 32 x 32 x 3."""
    widths = (3, 32, 64, 128)
    params = {f"conv{i}": {"weight": normal(rng, 3, 3, a, b)} for i, (a, b) in enumerate(pairwise(widths))}
    params["dense"] = dense_init(rng, 4 * 4 * 128, 10)

    def apply(params, x):
        for i in range(3):
            x = lax.conv_general_dilated(x, params[f"conv{i}"]["weight"], (1, 1), "SAME", dimension_numbers=NUMBERS)
            x = max_pool(jax.nn.relu(x), (2, 2), strides=(2, 2))
        return dense(params["dense"], x.reshape(x.shape[0], -1))

    return params, classified(apply), images(rng, 128)


def images(rng, count):
    return {
        "x": rng.standard_normal((count, 32, 32, 3), np.float32),
        "label": rng.integers(0, 10, count, dtype=np.int32),
    }


STAGES = (
    (64, 64, 1),
    (64, 64, 1),
    (64, 128, 2),
    (128, 128, 1),
    (128, 256, 2),
    (256, 256, 1),
    (256, 512, 2),
    (512, 512, 1),
)


def resnet18(rng):
    """ResNet-18 for small images, with batch norm by the statistics of the batch. 32 images of 32 x 32 x 3."""

    def layer(size, before, after):
        ones = np.ones(after, np.float32)
        return {"weight": normal(rng, size, size, before, after), "scale": ones, "bias": 0 * ones}

    params = {"first": layer(3, 3, 64), "dense": dense_init(rng, 512, 10)}
    for i, (before, after, stride) in enumerate(STAGES):
        params[f"block{i}"] = {"conv1": layer(3, before, after), "conv2": layer(3, after, after)}
        if stride != 1:
            params[f"block{i}"]["shortcut"] = layer(1, before, after)

    def normalized(layer, x, stride=1):
        y = lax.conv_general_dilated(x, layer["weight"], (stride, stride), "SAME", dimension_numbers=NUMBERS)
        mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
        return (y - mean) * (layer["scale"] * lax.rsqrt(variance + 1e-5)) + layer["bias"]

    def apply(params, x):
        x = jax.nn.relu(normalized(params["first"], x))
        for i, (_, _, stride) in enumerate(STAGES):
            block = params[f"block{i}"]
            y = jax.nn.relu(normalized(block["conv1"], x, stride))
            y = normalized(block["conv2"], y)
            x = jax.nn.relu(y + (normalized(block["shortcut"], x, stride) if stride != 1 else x))
        return dense(params["dense"], x.mean((1, 2)))

    return params, classified(apply), images(rng, 32)


def mlp(rng):
    """784-512-512-10 with ReLU. 256 examples."""
    widths = (784, 512, 512, 10)
    params = {f"dense{i}": dense_init(rng, a, b) for i, (a, b) in enumerate(pairwise(widths))}

    def apply(params, x):
        for i in range(3):
            x = dense(params[f"dense{i}"], jax.nn.relu(x) if i else x)
        return x

    batch = {"x": rng.standard_normal((256, 784), np.float32), "label": rng.integers(0, 10, 256, dtype=np.int32)}
    return params, classified(apply), batch


WIDTH, HEADS, TOKENS, VOCABULARY = 256, 8, 64, 1000


def transformer(rng):
    """Four layers of width 256 with 8 heads, causal, a vocabulary of 1,000. 16 texts of 64 tokens."""

    def norm_init():
        return {"scale": np.ones(WIDTH, np.float32), "bias": np.zeros(WIDTH, np.float32)}

    params = {
        "embedding": normal(rng, VOCABULARY, WIDTH, scale=0.02),
        "position": normal(rng, TOKENS, WIDTH, scale=0.02),
        "norm": norm_init(),
        "logits": dense_init(rng, WIDTH, VOCABULARY),
    }
    for i in range(4):
        params[f"layer{i}"] = {
            "norm1": norm_init(),
            "qkv": dense_init(rng, WIDTH, 3 * WIDTH),
            "out": dense_init(rng, WIDTH, WIDTH),
            "norm2": norm_init(),
            "up": dense_init(rng, WIDTH, 4 * WIDTH),
            "down": dense_init(rng, 4 * WIDTH, WIDTH),
        }

    def norm(layer, x):
        y = x - x.mean(-1, keepdims=True)
        return y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * layer["scale"] + layer["bias"]

    def attention(layer, x):
        q, k, v = jnp.split(dense(layer["qkv"], x).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return dense(layer["out"], y.reshape(x.shape))

    def loss_fn(params, batch):
        x = params["embedding"][batch["x"]] + params["position"]
        for i in range(4):
            layer = params[f"layer{i}"]
            x = x + attention(layer, norm(layer["norm1"], x))
            x = x + dense(layer["down"], jax.nn.gelu(dense(layer["up"], norm(layer["norm2"], x)), approximate=True))
        return cross_entropy(dense(params["logits"], norm(params["norm"], x)), batch["label"])

    tokens = rng.integers(0, VOCABULARY, (16, TOKENS + 1), dtype=np.int32)
    return params, loss_fn, {"x": tokens[:, :-1].copy(), "label": tokens[:, 1:].copy()}


def lstm(rng):
    """One LSTM of width 256 over 64 steps of 128 numbers, and a dense layer. 32 sequences."""
    params = {"input": dense_init(rng, 128, 1024), "state": {"weight": normal(rng, 256, 1024)}}
    params["dense"] = dense_init(rng, 256, 10)

    def apply(params, x):

        def cell(carry, x):
            c, h = carry
            i, f, g, o = jnp.split(x + h @ params["state"]["weight"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (c, h), None

        zeros = x[:, 0, :1] * jnp.zeros(256)
        (_, h), _ = lax.scan(cell, (zeros, zeros), dense(params["input"], x).swapaxes(0, 1))
        return dense(params["dense"], h)

    batch = {"x": rng.standard_normal((32, 64, 128), np.float32), "label": rng.integers(0, 10, 32, dtype=np.int32)}
    return params, classified(apply), batch


def matrix(users, items, width, size, rng):
    """Matrix factorization: a score is the product of a user's embedding and an item's; squared loss."""
    params = {"user": normal(rng, users, width, scale=0.01), "item": normal(rng, items, width, scale=0.01)}

    def loss_fn(params, batch):
        scores = (params["user"][batch["user"]] * params["item"][batch["item"]]).sum(-1)
        return 0.5 * ((scores - batch["score"]) ** 2).mean()

    ids = {name: rng.integers(0, count, size, dtype=np.int32) for name, count in (("user", users), ("item", items))}
    return params, loss_fn, ids | {"score": rng.integers(1, 6, size).astype(np.float32)}


contenders: dict[str, Any] = {}
NETWORKS = {
    "cnn": cnn,
    "resnet18": resnet18,
    "transformer": transformer,
    "mlp": mlp,
    "lstm": lstm,
    "matrix": partial(matrix, *MATRIX["matrix"]),
    "matrix large": partial(matrix, *MATRIX["matrix large"]),
}


def plain(loss_fn, params, batch):
    tx = optax.sgd(LEARNING_RATE)
    state = jax.device_put((params, tx.init(params)), jax.devices()[0])
    batch = jax.device_put(batch, jax.devices()[0])

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def once():
        nonlocal state
        state, loss = step(state, batch)
        return loss

    return once


def started(loss_fn, params, dtype):
    devices = jax.devices()
    state = train.create_state(kv.from_params(params, optimizer=optax.sgd(LEARNING_RATE)), 0, devices=devices)

    def with_aux(params, batch, rng):
        return loss_fn(params, batch), {}

    step = train.make_train_step(with_aux, devices=devices, compute_dtype=dtype)
    return step, state, Mesh(np.array(devices), ("data",))


def jaxpar(loss_fn, params, batch, dtype=None):
    step, state, mesh = started(loss_fn, params, dtype)
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))

    def once():
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return once


def many(loss_fn, params, batch):
    step, state, mesh = started(loss_fn, params, None)
    stacked = jax.tree.map(lambda x: np.stack([x] * TOGETHER), batch)
    batches = jax.device_put(stacked, NamedSharding(mesh, P(None, "data")))

    def once():
        nonlocal state
        state, metrics = step.many(state, batches)
        return metrics["loss"][-1]

    return once


def rows_of(params, batch):
    """The rows that a batch reads, and the loss of these rows."""
    rows = {name: params[name][batch[name]] for name in ("user", "item")}

    def loss_fn(rows):
        return 0.5 * (((rows["user"] * rows["item"]).sum(-1) - batch["score"]) ** 2).mean()

    return jax.value_and_grad(loss_fn)(rows)


def plain_rows(_, params, batch):
    """The gradient of the rows that the batch reads, scattered into the tables."""
    params, batch = jax.device_put((params, batch), jax.devices()[0])

    @partial(jax.jit, donate_argnums=0)
    def step(params, batch):
        loss, grads = rows_of(params, batch)
        return {k: params[k].at[batch[k]].add(-LEARNING_RATE * g) for k, g in grads.items()}, loss

    def once():
        nonlocal params
        params, loss = step(params, batch)
        return loss

    return once


def jaxpar_rows(_, params, batch):
    """The same gradient pushed as a `RowSparse`."""
    store = kv.set_optimizer(kv.init(kv.create(), [0, 1], [params["user"], params["item"]]), optax.sgd(LEARNING_RATE))
    batch = jax.device_put(batch, jax.devices()[0])

    @partial(jax.jit, donate_argnums=0)
    def step(store, batch):
        tables = dict(zip(("user", "item"), kv.pull(store, [0, 1]), strict=True))
        loss, grads = rows_of(tables, batch)
        pushed = [RowSparse(batch[k], grads[k], tables[k].shape) for k in tables]
        return kv.push(store, [0, 1], pushed), loss

    def once():
        nonlocal store
        store, loss = step(store, batch)
        return loss

    return once


MAKE = {
    "plain": plain,
    "jaxpar": jaxpar,
    "bfloat16": partial(jaxpar, dtype=jnp.bfloat16),
    "many": many,
    "plain rows": plain_rows,
    "jaxpar rows": jaxpar_rows,
}


def answer(request):
    """Set a contender up, measure it, or say a version."""
    match request["do"]:
        case "version":
            return jax.__version__
        case "device":
            return jax.devices()[0].device_kind
        case "start":
            params, loss_fn, batch = NETWORKS[request["network"]](np.random.default_rng(0))
            once = MAKE[request["contender"]](loss_fn, params, batch)
            contenders[request["name"]] = once, TOGETHER if request["contender"] == "many" else 1
            return [float(once()) for _ in range(3)]
        case "measure":
            once, steps = contenders[request["name"]]
            start = time.perf_counter()
            for _ in range(request["repeats"]):
                result = once()
            jax.block_until_ready(result)
            return (time.perf_counter() - start) / request["repeats"] / steps
        case other:
            raise ValueError(f"no request {other!r}")


if __name__ == "__main__":
    if "keep memory" in sys.argv:
        parallel.use_cpu_devices(int(os.environ["JAX_NUM_CPU_DEVICES"]), keep_memory=True)
    serve(answer)
