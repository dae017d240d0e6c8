"""A transformer on a mesh of 2 by 4 devices: batch over `data`, heads and hidden features over `model`.

A step by shardings alone, where the compiler puts the collectives, and the loss by hand with `shard_map`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, HEAD = 32_000, 1024, 4096, 8, 16, 64
LAYER_SPECS = {
    **dict.fromkeys(("norm1", "norm2"), P()),
    **dict.fromkeys(("wq", "wk", "wv", "up"), P(None, "model")),
    **dict.fromkeys(("wo", "down"), P("model", None)),
}
SPECS = {"embedding": P(), "layers": [LAYER_SPECS] * LAYERS, "norm": P()}


def layer_init():
    return {
        **dict.fromkeys(("norm1", "norm2"), jnp.ones(WIDTH)),
        **dict.fromkeys(("wq", "wk", "wv", "wo"), jnp.zeros((WIDTH, WIDTH))),
        "up": jnp.zeros((WIDTH, HIDDEN)),
        "down": jnp.zeros((HIDDEN, WIDTH)),
    }


def init():
    layers = [layer_init() for _ in range(LAYERS)]
    return {"embedding": jnp.zeros((VOCABULARY, WIDTH)), "layers": layers, "norm": jnp.ones(WIDTH)}


def mesh_2x4():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def rms_norm(weight, x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def attention(params, x):
    """Of all heads, or of those of this device."""
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], -1, HEAD) for name in ("wq", "wk", "wv"))
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(*x.shape[:2], -1) @ params["wo"]


def mlp(params, x):
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def identity(x):
    return x


def forward(params, tokens, reduce=identity):
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = x + reduce(attention(layer, rms_norm(layer["norm1"], x)))
        x = x + reduce(mlp(layer, rms_norm(layer["norm2"], x)))
    return rms_norm(params["norm"], x) @ params["embedding"].T


def loss(params, tokens, targets, reduce=identity):
    log_probs = jax.nn.log_softmax(forward(params, tokens, reduce))
    return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1).mean()


def sgd(params, grads):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def arguments():
    tokens = jax.ShapeDtypeStruct((16, 512), jnp.int32)
    return jax.eval_shape(init), tokens, tokens


def sharded_jit():
    mesh = mesh_2x4()
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=lambda x: isinstance(x, P))
    batch = NamedSharding(mesh, P("data"))

    def train_step(params, tokens, targets):
        value, grads = jax.value_and_grad(loss)(params, tokens, targets)
        return sgd(params, grads), value

    step = jax.jit(train_step, in_shardings=(params, batch, batch), out_shardings=(params, None))
    return step, arguments(), {"title": "a transformer on 2x4 devices, by shardings"}


def sharded_shard_map():
    def local_loss(params, tokens, targets):
        value = loss(params, tokens, targets, reduce=lambda x: jax.lax.psum(x, "model"))
        return jax.lax.pmean(value, "data")

    specs = {"in_specs": (SPECS, P("data"), P("data")), "out_specs": P()}
    mapped = jax.jit(jax.shard_map(local_loss, mesh=mesh_2x4(), **specs))
    return mapped, arguments(), {"title": "a transformer on 2x4 devices, by shard_map"}
