"""Networks written with Flax NNX and Equinox, as their users write them. Not imported without these libraries."""

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

SIZE = 16


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.query, self.key, self.value, self.out = (nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(4))

    def __call__(self, x_TxD):
        weights = jax.nn.softmax(self.query(x_TxD) @ self.key(x_TxD).T)
        return self.out(weights @ self.value(x_TxD))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln1, self.ln2 = nnx.LayerNorm(SIZE, rngs=rngs), nnx.LayerNorm(SIZE, rngs=rngs)
        self.attn, self.up = Attention(rngs), nnx.Linear(SIZE, SIZE, rngs=rngs)

    def __call__(self, x_TxD):
        x_TxD = x_TxD + self.attn(self.ln1(x_TxD))
        return x_TxD + jax.nn.gelu(self.up(self.ln2(x_TxD)))


class Encoder(nnx.Module):
    def __init__(self, blocks, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(SIZE, rngs=rngs)

    def __call__(self, x_TxD):
        for block in self.blocks:
            x_TxD = block(x_TxD)
        return self.norm(x_TxD)


class Transformer(nnx.Module):
    def __init__(self, rngs, blocks=2):
        self.embed = nnx.Embed(10, SIZE, rngs=rngs)
        self.encoder = Encoder(blocks, rngs)
        self.head = nnx.Linear(SIZE, 10, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


class Cnn(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.dense = nnx.Linear(4, 10, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.drop(nnx.relu(self.bn(self.conv(x))).mean((1, 2))))


class Scanned(nnx.Module):
    def __init__(self, blocks, rngs):
        self.blocks = nnx.split_rngs(splits=blocks)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)
        self.head = nnx.Linear(SIZE, 10, rngs=rngs)

    def __call__(self, x_TxD):
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(run(self.blocks, x_TxD))


class NoPytree(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.first = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.again, self.act = self.first, jnp.tanh

    def __call__(self, x):
        return self.act(self.again(self.act(self.first(x))))


class EqxBlock(eqx.Module):
    attend: eqx.nn.MultiheadAttention
    norms: list
    mlp: eqx.nn.MLP

    def __init__(self, key):
        key_a, key_m = jax.random.split(key)
        self.attend = eqx.nn.MultiheadAttention(2, SIZE, key=key_a)
        self.norms = [eqx.nn.LayerNorm(SIZE), eqx.nn.LayerNorm(SIZE)]
        self.mlp = eqx.nn.MLP(SIZE, SIZE, 32, 1, jax.nn.gelu, key=key_m)

    def __call__(self, x_TxD):
        h_TxD = jax.vmap(self.norms[0])(x_TxD)
        x_TxD = x_TxD + self.attend(h_TxD, h_TxD, h_TxD)
        return x_TxD + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x_TxD))


class EqxNet(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list
    act: object

    def __init__(self, key, blocks=2):
        keys = jax.random.split(key, blocks + 1)
        self.embed = eqx.nn.Embedding(10, SIZE, key=keys[0])
        self.blocks = [EqxBlock(key) for key in keys[1:]]
        self.act = jax.nn.relu

    def __call__(self, tokens):
        x_TxD = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x_TxD = block(x_TxD)
        return self.act(x_TxD)
