"""What modules by `mxnet.port` begin with: it copies what they use of this file, as it stands.

Layers take attributes by MXNet's names. A node with attributes that its layer lacks is written as a rare operator.
The lines are of at most 88 characters, as in the modules.
"""

# pyright: basic

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..checkpoint import load_mxnet as load_params


class Net(NamedTuple):
    """What layers share. `array(name, *shape)` gives an array."""

    array: Any
    new: dict[str, Any]  # running statistics
    train: bool
    rng: Any

    def key(self, number):
        return None if self.rng is None else jax.random.fold_in(self.rng, number)


def per_axis(x, *sizes):
    """Each size as a tuple, for the axes of an image."""
    return [n if isinstance(n, tuple) else (n,) * (x.ndim - 2) for n in sizes]


def convolution(
    net,
    x,
    name,
    num_filter,
    *,
    kernel,
    stride=1,
    pad=0,
    dilate=1,
    num_group=1,
    no_bias=False,
):
    kernel, stride, pad, dilate = per_axis(x, kernel, stride, pad, dilate)
    weight = net.array(f"{name}_weight", num_filter, x.shape[1] // num_group, *kernel)
    options = {"rhs_dilation": dilate, "feature_group_count": num_group}
    x = lax.conv_general_dilated(x, weight, stride, [(n, n) for n in pad], **options)
    if no_bias:
        return x
    return x + net.array(f"{name}_bias", num_filter).reshape(1, -1, *[1] * len(kernel))


def dense(net, x, name, num_hidden, *, no_bias=False, flatten=True):
    x = x.reshape(x.shape[0], -1) if flatten else x
    x = x @ net.array(f"{name}_weight", num_hidden, x.shape[-1]).T
    return x if no_bias else x + net.array(f"{name}_bias", num_hidden)


def batch_norm(
    net,
    x,
    name,
    *,
    eps=1e-5,
    momentum=0.9,
    fix_gamma=False,
    use_global_stats=False,
    axis=1,
    by="running",
):
    """Normalizes channels, in training by the batch and else by running statistics."""
    kinds = ("gamma", "beta", f"{by}_mean", f"{by}_var")
    arrays = (net.array(f"{name}_{kind}", x.shape[axis]) for kind in kinds)
    gamma, beta, mean, var = arrays
    axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if net.train and not use_global_stats:
        old, (mean, var) = (mean, var), (y.mean(axes), y.var(axes))
        for kind, before, now in zip(kinds[2:], old, (mean, var), strict=True):
            new = before * momentum + now * (1 - momentum)
            net.new[f"{name}_{kind}"] = lax.stop_gradient(new)
    factor = lax.rsqrt(var + eps) * (jnp.ones_like(gamma) if fix_gamma else gamma)
    y = (y - jnp.expand_dims(mean, axes)) * jnp.expand_dims(factor, axes)
    return (y + jnp.expand_dims(beta, axes)).astype(x.dtype)


def pool(x, start, function, kernel, stride, pad):
    kernel, stride, pad = per_axis(x, kernel, stride, pad)
    windows, strides = (1, 1, *kernel), (1, 1, *stride)
    padding = [(0, 0), (0, 0), *((n, n) for n in pad)]
    return lax.reduce_window(x, start, function, windows, strides, padding)


def max_pool(x, *, kernel, stride=1, pad=0):
    return pool(x, -jnp.inf, lax.max, kernel, stride, pad)


def avg_pool(x, *, kernel, stride=1, pad=0):
    return pool(x, 0.0, lax.add, kernel, stride, pad) / math.prod(*per_axis(x, kernel))


def softmax_output(x):
    """The softmax over all that belongs to an example."""
    return jax.nn.softmax(x.reshape(x.shape[0], -1)).reshape(x.shape)


def dropout(net, x, key, *, p=0.5):
    if not net.train:
        return x
    if net.rng is None:
        raise ValueError("dropout needs rng=, a random key")
    kept = jax.random.bernoulli(net.key(key), 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p), 0).astype(x.dtype)


def embedding(net, x, name, input_dim, output_dim):
    weight = net.array(f"{name}_weight", input_dim, output_dim)
    return jnp.take(weight, x.astype(jnp.int32), axis=0, mode="clip")


def with_statistics(net, found, *names):
    """The outputs of an operator, of whose running statistics the new ones are kept."""
    outputs, new = found
    if net.train:
        net.new.update(zip(names, new, strict=True))
    return outputs


def part(net, function, *places):
    """A graph inside of a node, of those of its arrays that are at these places."""

    def of_arrays(*arrays, train, rng):
        found = function(net._replace(rng=rng), *(arrays[place] for place in places))
        return found if isinstance(found, tuple) else (found,)

    return of_arrays


def first_outputs(found, count):
    """The first outputs of an operator, which may give more."""
    found = found if isinstance(found, tuple) else (found,)
    return found[0] if count == 1 else found[:count]


def new_array(key, name, shape):
    """Weights have the variance 2 / fan-in."""
    if len(shape) > 1:
        return jax.random.normal(key, shape) * (2 / max(math.prod(shape[1:]), 1)) ** 0.5
    return jnp.full(shape, 1.0 if name.endswith(("gamma", "var")) else 0.0)


def split(arrays):
    """(params, running statistics)"""
    endings = ("_running_mean", "_running_var", "_moving_mean", "_moving_var")
    state = {name: array for name, array in arrays.items() if name.endswith(endings)}
    return {name: array for name, array in arrays.items() if name not in state}, state


def load(file):
    """(params, running statistics) of a .params file of MXNet."""
    found = {name: jnp.asarray(array) for name, array in load_params(file).items()}
    names = {name: name.removeprefix("arg:").removeprefix("aux:") for name in found}
    return split({names[name]: array for name, array in found.items()})
