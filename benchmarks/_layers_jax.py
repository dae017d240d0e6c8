"""The layers of `layers.py` in JAX, as the training step compiles them, on command in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import _models_jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import serve
from _layers import BOTH, FORWARD, HEADS, LEARNING_RATE, LIMITS, NETWORKS, Part, answers, numbers
from jax import lax

from jaxpar import models


def convolution(stride, x, w):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=_models_jax.NUMBERS)


def product(x, weight, bias):
    return _models_jax.dense({"weight": weight, "bias": bias}, x)


def batch_norm(x, scale, bias):
    return (x - x.mean((0, 1, 2))) * (scale * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)) + bias


def layer_norm(x, scale, bias):
    y = x - x.mean(-1, keepdims=True)
    return y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * scale + bias


def attention(qkv):
    q, k, v = jnp.split(qkv.reshape(*qkv.shape[:2], 3 * HEADS, -1), 3, axis=2)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*qkv.shape[:2], -1)


def lstm(x, input_weight, state_weight, bias):
    """As in `_models_jax`."""

    def cell(carry, x):
        c, h = carry
        i, f, g, o = jnp.split(x + h @ state_weight, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (c, jax.nn.sigmoid(o) * jnp.tanh(c)), None

    zeros = x[:, 0, :1] * jnp.zeros(state_weight.shape[0])
    return lax.scan(cell, (zeros, zeros), product(x, input_weight, bias).swapaxes(0, 1))[0][1]


FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    "call": lambda x: x + 1,
    "gemm": jnp.matmul,
    "product": product,
    "batch norm": batch_norm,
    "batch norm, ReLU": lambda *args: jax.nn.relu(batch_norm(*args)),
    "ReLU, max pool": lambda x: _models_jax.max_pool(jax.nn.relu(x), (2, 2), strides=(2, 2)),
    "mean over pixels": lambda x: x.mean((1, 2)),
    "residual, ReLU": lambda x, y: jax.nn.relu(x + y),
    "sum": jnp.add,
    "ReLU": jax.nn.relu,
    "GELU": partial(jax.nn.gelu, approximate=True),
    "layer norm": layer_norm,
    "attention": attention,
    "embedding": lambda table, position, tokens: table[tokens] + position,
    "cross-entropy": _models_jax.cross_entropy,
    "LSTM": lstm,
}


def start(network: str, index: int, direction: str) -> Callable[[], Any]:
    """A layer in one direction; the whole step where the index is -1."""
    if index < 0:
        params, loss_fn, batch = _models_jax.NETWORKS[network](np.random.default_rng(0))
        return _waited(_models_jax.jaxpar(loss_fn, params, batch))
    part = {**NETWORKS, "limits": LIMITS}[network][index]
    if part.kind == "SGD":
        return update(network)
    args, cotangent = jax.tree.map(jnp.asarray, numbers(part))
    program = jax.jit(models.fast_on_cpus(in_direction(part, direction)))
    return _waited(partial(program.lower(args, cotangent).compile(), args, cotangent))


def _waited(once: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(once())


def in_direction(part: Part, direction: str) -> Callable[..., Any]:
    """A function of all operands and a cotangent; what it does not need, the program does not take."""
    stride = (*part.sizes[5:], 1)[0]
    function = partial(convolution, stride) if part.kind == "convolution" else FUNCTIONS[part.kind]
    if part.kind == "LSTM":  # as in a step: the loop becomes a kernel before it is differentiated
        function = models.fast_on_cpus(function)
    trained = part.work().with_gradient()
    if direction in ("inputs", "weights"):
        trained = trained[:1] if direction == "inputs" else trained[1:]

    def program(args, cotangent):
        if direction == FORWARD:
            return function(*args)

        def of_trained(values):
            return function(*(dict(zip(trained, values, strict=True)).get(i, x) for i, x in enumerate(args)))

        result, backward = jax.vjp(of_trained, [args[i] for i in trained])
        (gradients,) = backward(cotangent)
        return (result, gradients) if direction == BOTH else gradients

    return program


def update(network: str) -> Callable[[], Any]:
    """The weights of a network, from zero on, with gradients of ones, by optax into their own memory."""
    tx = optax.sgd(LEARNING_RATE)
    weights = jax.tree.map(jnp.asarray, _models_jax.NETWORKS[network](np.random.default_rng(0))[0])
    values, gradients = jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.ones_like, weights)

    @partial(jax.jit, donate_argnums=0)
    def program(values, gradients):
        return optax.apply_updates(values, tx.update(gradients, tx.init(values))[0])

    def once():
        nonlocal values
        values = jax.block_until_ready(program(values, gradients))
        return values

    return once


def norms(results: Any) -> list[float]:
    return [float(np.linalg.norm(np.asarray(x, np.float64))) for x in jax.tree.leaves(results)]


if __name__ == "__main__":
    serve(answers(jax.__version__, start, norms))
