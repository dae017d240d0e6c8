"""Mamba (130 M) of Gu and Dao in Equinox: a selective state space as one associative scan."""

import equinox as eqx
import jax
import jax.numpy as jnp

VOCABULARY, WIDTH, LAYERS, STATE, KERNEL = 50_280, 768, 24, 16, 4
INNER, RANK = 2 * WIDTH, WIDTH // 16


def selective_scan(x_TxD, dt_TxD, a_DxN, b_TxN, c_TxN, d_D):
    """h[t] = exp(dt a) h[t-1] + dt b x[t], y[t] = c h[t] + d x[t]."""
    decay = jnp.exp(dt_TxD[:, :, None] * a_DxN)
    drive = (dt_TxD * x_TxD)[:, :, None] * b_TxN[:, None, :]

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, h_TxDxN = jax.lax.associative_scan(combine, (decay, drive))
    return jnp.einsum("tdn,tn->td", h_TxDxN, c_TxN) + d_D * x_TxD


class MambaMixer(eqx.Module):
    in_proj: eqx.nn.Linear
    conv1d: eqx.nn.Conv1d
    x_proj: eqx.nn.Linear
    dt_proj: eqx.nn.Linear
    a_log: jax.Array
    d: jax.Array
    out_proj: eqx.nn.Linear

    def __init__(self, rng):
        rngs = jax.random.split(rng, 5)
        self.in_proj = eqx.nn.Linear(WIDTH, 2 * INNER, use_bias=False, key=rngs[0])
        self.conv1d = eqx.nn.Conv1d(INNER, INNER, KERNEL, padding=[(KERNEL - 1, 0)], groups=INNER, key=rngs[1])
        self.x_proj = eqx.nn.Linear(INNER, RANK + 2 * STATE, use_bias=False, key=rngs[2])
        self.dt_proj = eqx.nn.Linear(RANK, INNER, key=rngs[3])
        self.a_log = jnp.log(jnp.tile(jnp.arange(1.0, STATE + 1), (INNER, 1)))
        self.d = jnp.ones(INNER)
        self.out_proj = eqx.nn.Linear(INNER, WIDTH, use_bias=False, key=rngs[4])

    def __call__(self, x_TxD):
        x, gate = jnp.split(jax.vmap(self.in_proj)(x_TxD), 2, axis=-1)
        x = jax.nn.silu(self.conv1d(x.T).T)
        dt, b, c = jnp.split(jax.vmap(self.x_proj)(x), [RANK, RANK + STATE], axis=-1)
        dt = jax.nn.softplus(jax.vmap(self.dt_proj)(dt))
        y = selective_scan(x, dt, -jnp.exp(self.a_log), b, c, self.d)
        return jax.vmap(self.out_proj)(y * jax.nn.silu(gate))


class Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    mixer: MambaMixer

    def __init__(self, rng):
        self.norm = eqx.nn.RMSNorm(WIDTH, use_bias=False)
        self.mixer = MambaMixer(rng)

    def __call__(self, x):
        return x + self.mixer(jax.vmap(self.norm)(x))


class Mamba(eqx.Module):
    embedding: eqx.nn.Embedding
    layers: list[Block]
    norm_f: eqx.nn.RMSNorm

    def __init__(self, rng):
        rng, rng_embedding = jax.random.split(rng)
        self.embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=rng_embedding)
        self.layers = [Block(rng_layer) for rng_layer in jax.random.split(rng, LAYERS)]
        self.norm_f = eqx.nn.RMSNorm(WIDTH, use_bias=False)

    def __call__(self, tokens_T):
        x = jax.vmap(self.embedding)(tokens_T)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.norm_f)(x) @ self.embedding.weight.T


def mamba():
    model = eqx.filter_eval_shape(Mamba, jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def apply(params, tokens):
        return jax.vmap(eqx.combine(params, static))(tokens)

    tokens = jax.ShapeDtypeStruct((4, 1024), jnp.int32)
    return apply, (params, tokens), {"title": "Mamba 130M"}
