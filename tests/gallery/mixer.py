"""MLP-Mixer-B/16 of Tolstikhin et al. in Equinox: one image, mapped over the batch."""

import equinox as eqx
import jax
import jax.numpy as jnp

IMAGE, PATCH, WIDTH, LAYERS, CLASSES = 224, 16, 768, 12, 1000
TOKENS = (IMAGE // PATCH) ** 2


class MixerBlock(eqx.Module):
    norm1: eqx.nn.LayerNorm
    token_mixing: eqx.nn.MLP
    norm2: eqx.nn.LayerNorm
    channel_mixing: eqx.nn.MLP

    def __init__(self, rng):
        rng_tokens, rng_channels = jax.random.split(rng)
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.token_mixing = eqx.nn.MLP(TOKENS, TOKENS, WIDTH // 2, 1, jax.nn.gelu, key=rng_tokens)
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.channel_mixing = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=rng_channels)

    def __call__(self, x_TxD):
        x_TxD = x_TxD + jax.vmap(self.token_mixing)(jax.vmap(self.norm1)(x_TxD).T).T
        return x_TxD + jax.vmap(self.channel_mixing)(jax.vmap(self.norm2)(x_TxD))


class Mixer(eqx.Module):
    patches: eqx.nn.Conv2d
    blocks: list[MixerBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, rng):
        rng_patches, rng_head, rng = jax.random.split(rng, 3)
        self.patches = eqx.nn.Conv2d(3, WIDTH, PATCH, stride=PATCH, key=rng_patches)
        self.blocks = [MixerBlock(rng_block) for rng_block in jax.random.split(rng, LAYERS)]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=rng_head)

    def __call__(self, image):
        x = self.patches(image).reshape(WIDTH, TOKENS).T
        for block in self.blocks:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x).mean(0))


def mlp_mixer():
    model = eqx.filter_eval_shape(Mixer, jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def apply(params, images):
        return jax.vmap(eqx.combine(params, static))(images)

    images = jax.ShapeDtypeStruct((32, 3, IMAGE, IMAGE), jnp.float32)
    return apply, (params, images), {"title": "MLP-Mixer-B/16 (Equinox)"}
