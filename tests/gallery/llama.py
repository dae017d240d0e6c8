"""Llama 3 8B in plain JAX: RMS norm, rotary embeddings, grouped-query attention, SwiGLU; in bfloat16."""

import jax
import jax.numpy as jnp

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS = 128_256, 4096, 14_336, 32, 32, 8
HEAD = WIDTH // HEADS


def layer_init():
    shapes = {
        "attention_norm": (WIDTH,),
        "wq": (WIDTH, HEADS * HEAD),
        "wk": (WIDTH, KV_HEADS * HEAD),
        "wv": (WIDTH, KV_HEADS * HEAD),
        "wo": (HEADS * HEAD, WIDTH),
        "ffn_norm": (WIDTH,),
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    return {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in shapes.items()}


def init():
    return {
        "tok_embeddings": jnp.zeros((VOCABULARY, WIDTH), jnp.bfloat16),
        "layers": [layer_init() for _ in range(LAYERS)],
        "norm": jnp.ones(WIDTH, jnp.bfloat16),
        "output": jnp.zeros((WIDTH, VOCABULARY), jnp.bfloat16),
    }


def rms_norm(weight, x, eps=1e-5):
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype) * weight


def rope_angles(length, theta=500_000.0):
    frequencies = 1.0 / theta ** (jnp.arange(0, HEAD, 2) / HEAD)
    return jnp.outer(jnp.arange(length), frequencies)


def apply_rope(x_BxTxHxD, angles_TxD2):
    cos, sin = jnp.cos(angles_TxD2)[None, :, None], jnp.sin(angles_TxD2)[None, :, None]
    first, second = jnp.split(x_BxTxHxD.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxTxHxD.dtype)


def attention(params, x_BxTxD, angles):
    batch, length, _ = x_BxTxD.shape
    q = (x_BxTxD @ params["wq"]).reshape(batch, length, HEADS, HEAD)
    k = (x_BxTxD @ params["wk"]).reshape(batch, length, KV_HEADS, HEAD)
    v = (x_BxTxD @ params["wv"]).reshape(batch, length, KV_HEADS, HEAD)
    q, k = apply_rope(q, angles), apply_rope(k, angles)
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, -1) @ params["wo"]


def feed_forward(params, x):
    return (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"]


def apply(params, tokens):
    x = params["tok_embeddings"][tokens]
    angles = rope_angles(tokens.shape[1])
    for layer in params["layers"]:
        x = x + attention(layer, rms_norm(layer["attention_norm"], x), angles)
        x = x + feed_forward(layer, rms_norm(layer["ffn_norm"], x))
    return rms_norm(params["norm"], x) @ params["output"]


def llama():
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    return apply, (jax.eval_shape(init), tokens), {"title": "Llama 3 8B"}
