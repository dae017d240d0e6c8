"""ViT-B/16 of Dosovitskiy et al. in Flax Linen, and a whole step of its training with AdamW."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

IMAGES = jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.float32)


class MlpBlock(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        x = nn.gelu(nn.Dense(self.hidden)(x))
        return nn.Dense(width)(x)


class EncoderBlock(nn.Module):
    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(y, y)
        y = nn.LayerNorm()(x)
        return x + MlpBlock(self.hidden)(y)


class ViT(nn.Module):
    layers: int = 12
    width: int = 768
    heads: int = 12
    patch: int = 16
    classes: int = 1000

    @nn.compact
    def __call__(self, images):
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, patch, padding="VALID", name="embedding")(images)
        batch, height, width, dim = x.shape
        x = x.reshape(batch, height * width, dim)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, dim))
        x = jnp.concatenate([jnp.tile(cls, (batch, 1, 1)), x], axis=1)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for number in range(self.layers):
            x = EncoderBlock(self.heads, 4 * self.width, name=f"encoderblock_{number}")(x)
        x = nn.LayerNorm(name="encoder_norm")(x)
        return nn.Dense(self.classes, name="head")(x[:, 0])


def vit():
    model = ViT()
    variables = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    return model.apply, (variables, IMAGES), {"title": "ViT-B/16"}


def train_step(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def vit_step():
    model = ViT()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))

    def create(rng, images):
        return TrainState.create(apply_fn=model.apply, params=model.init(rng, images)["params"], tx=tx)

    state = jax.eval_shape(create, jax.random.key(0), IMAGES)
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    return train_step, (state, IMAGES, labels), {"title": "ViT-B/16, a training step"}
