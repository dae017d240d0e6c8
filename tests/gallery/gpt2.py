"""GPT-2 (124 M) in plain JAX: the loss of its training, and one step of decoding with a key-value cache."""

import jax
import jax.numpy as jnp

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 50257, 1024, 768, 12, 12


def linear_init(inputs, outputs):
    return {"w": jnp.zeros((inputs, outputs)), "b": jnp.zeros(outputs)}


def norm_init():
    return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}


def block_init():
    return {
        "ln_1": norm_init(),
        "attn": {"c_attn": linear_init(WIDTH, 3 * WIDTH), "c_proj": linear_init(WIDTH, WIDTH)},
        "ln_2": norm_init(),
        "mlp": {"c_fc": linear_init(WIDTH, 4 * WIDTH), "c_proj": linear_init(4 * WIDTH, WIDTH)},
    }


def init():
    return {
        "wte": jnp.zeros((VOCABULARY, WIDTH)),
        "wpe": jnp.zeros((CONTEXT, WIDTH)),
        "h": [block_init() for _ in range(LAYERS)],
        "ln_f": norm_init(),
    }


def linear(params, x):
    return x @ params["w"] + params["b"]


def layer_norm(params, x):
    mean = x.mean(-1, keepdims=True)
    var = x.var(-1, keepdims=True)
    return params["scale"] * (x - mean) / jnp.sqrt(var + 1e-5) + params["bias"]


def split_heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


def attention(params, x, cache=None, position=0):
    """With a cache, `x` is one token, and its key and value are written at `position`."""
    q, k, v = map(split_heads, jnp.split(linear(params["c_attn"], x), 3, axis=-1))
    if cache is not None:
        k = jax.lax.dynamic_update_slice_in_dim(cache["k"], k, position, axis=1)
        v = jax.lax.dynamic_update_slice_in_dim(cache["v"], v, position, axis=1)
        cache = {"k": k, "v": v}
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    visible = jnp.arange(k.shape[1]) <= position + jnp.arange(q.shape[1])[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e10), axis=-1)
    x = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    return linear(params["c_proj"], x), cache


def mlp(params, x):
    return linear(params["c_proj"], jax.nn.gelu(linear(params["c_fc"], x)))


def block(params, x, cache=None, position=0):
    y, cache = attention(params["attn"], layer_norm(params["ln_1"], x), cache, position)
    x = x + y
    return x + mlp(params["mlp"], layer_norm(params["ln_2"], x)), cache


def gpt2(params, tokens, caches=(None,) * LAYERS, position=0):
    positions = position + jnp.arange(tokens.shape[1])
    x = params["wte"][tokens] + params["wpe"][positions]
    new_caches = []
    for block_params, cache in zip(params["h"], caches, strict=True):
        x, cache = block(block_params, x, cache, position)
        new_caches.append(cache)
    return layer_norm(params["ln_f"], x) @ params["wte"].T, new_caches


def loss(params, tokens):
    logits, _ = gpt2(params, tokens[:, :-1])
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()


def decode(params, caches, token, position):
    logits, caches = gpt2(params, token, caches, position)
    return jnp.argmax(logits[:, -1], axis=-1), caches


def gpt2_loss():
    tokens = jax.ShapeDtypeStruct((8, CONTEXT + 1), jnp.int32)
    return loss, (jax.eval_shape(init), tokens), {"title": "GPT-2, its training loss"}


def gpt2_decode():
    head = jax.ShapeDtypeStruct((1, CONTEXT, HEADS, WIDTH // HEADS), jnp.float32)
    caches = [{"k": head, "v": head}] * LAYERS
    token, position = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return decode, (jax.eval_shape(init), caches, token, position), {"title": "GPT-2, one token with a cache"}
