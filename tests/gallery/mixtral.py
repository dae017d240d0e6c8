"""Mixtral 8x7B of Jiang et al. in Flax NNX: a transformer with eight experts, two of them for each token."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD = 32_000, 4096, 14_336, 32, 32, 8, 128
EXPERTS, CHOSEN, CAPACITY_FACTOR = 8, 2, 1.25
CONTEXT = 1024
BF16 = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}


def rotary_tables(length, theta=1e6):
    angles = np.outer(np.arange(length), 1.0 / theta ** (np.arange(0, HEAD, 2) / HEAD))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


COS, SIN = rotary_tables(CONTEXT)


def rotate_half(x):
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)


def rotary_embedding(x):
    cos, sin = (jnp.tile(table, 2)[None, : x.shape[1], None] for table in (COS, SIN))
    return (x * cos + rotate_half(x) * sin).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, *, rngs):
        self.q_proj = nnx.Linear(WIDTH, HEADS * HEAD, use_bias=False, rngs=rngs, **BF16)
        self.k_proj = nnx.Linear(WIDTH, KV_HEADS * HEAD, use_bias=False, rngs=rngs, **BF16)
        self.v_proj = nnx.Linear(WIDTH, KV_HEADS * HEAD, use_bias=False, rngs=rngs, **BF16)
        self.o_proj = nnx.Linear(HEADS * HEAD, WIDTH, use_bias=False, rngs=rngs, **BF16)

    def __call__(self, x):
        batch, length, _ = x.shape
        q = rotary_embedding(self.q_proj(x).reshape(batch, length, HEADS, HEAD))
        k = rotary_embedding(self.k_proj(x).reshape(batch, length, KV_HEADS, HEAD))
        v = self.v_proj(x).reshape(batch, length, KV_HEADS, HEAD)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.reshape(batch, length, HEADS * HEAD))


class MoE(nnx.Module):
    """Each token goes to two experts, as long as these have room."""

    def __init__(self, *, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs, **BF16)
        self.w_gate = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, HIDDEN), jnp.bfloat16))
        self.w_up = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, HIDDEN), jnp.bfloat16))
        self.w_down = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, WIDTH), jnp.bfloat16))

    def route(self, x_NxD):
        """The tokens of each expert, and how much of its answer each token takes."""
        capacity = int(CAPACITY_FACTOR * CHOSEN * x_NxD.shape[0] / EXPERTS)
        scores, chosen = jax.lax.top_k(self.router(x_NxD).astype(jnp.float32), CHOSEN)
        gates = jax.nn.softmax(scores, axis=-1)
        one_hot = jax.nn.one_hot(chosen, EXPERTS)
        place = jnp.cumsum(one_hot.reshape(-1, EXPERTS), axis=0).reshape(one_hot.shape) * one_hot - 1
        dispatch = jax.nn.one_hot(place.astype(jnp.int32), capacity)  # zero where an expert has no room
        combine = jnp.einsum("nk,nkec->nec", gates, dispatch)
        return dispatch.sum(1).astype(x_NxD.dtype), combine.astype(x_NxD.dtype)

    def __call__(self, x):
        tokens = x.reshape(-1, WIDTH)
        dispatch, combine = self.route(tokens)
        inputs = jnp.einsum("nd,nec->ecd", tokens, dispatch)
        gate = jnp.einsum("ecd,edh->ech", inputs, self.w_gate[...])
        up = jnp.einsum("ecd,edh->ech", inputs, self.w_up[...])
        outputs = jnp.einsum("ech,ehd->ecd", jax.nn.silu(gate) * up, self.w_down[...])
        return jnp.einsum("ecd,nec->nd", outputs, combine).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs, **BF16)
        self.attention = Attention(rngs=rngs)
        self.moe_norm = nnx.RMSNorm(WIDTH, rngs=rngs, **BF16)
        self.moe = MoE(rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class Mixtral(nnx.Module):
    def __init__(self, *, rngs):
        self.embed_tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs, **BF16)
        self.layers = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs, **BF16)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs, **BF16)

    def __call__(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def mixtral():
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Mixtral(rngs=nnx.Rngs(0))))

    def forward(params, tokens):
        return nnx.merge(graphdef, params)(tokens)

    tokens = jax.ShapeDtypeStruct((1, CONTEXT), jnp.int32)
    return forward, (params, tokens), {"title": "Mixtral 8x7B"}
