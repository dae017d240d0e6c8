"""DenseNet-121 of Huang et al. with batch norm in train mode, in Flax Linen."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

conv = partial(nn.Conv, use_bias=False)
norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)


class DenseLayer(nn.Module):
    growth: int

    @nn.compact
    def __call__(self, x):
        y = nn.relu(norm(name="norm1")(x))
        y = conv(4 * self.growth, (1, 1), name="conv1")(y)
        y = nn.relu(norm(name="norm2")(y))
        y = conv(self.growth, (3, 3), name="conv2")(y)
        return jnp.concatenate([x, y], axis=-1)


class Transition(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(norm(name="norm")(x))
        x = conv(x.shape[-1] // 2, (1, 1), name="conv")(x)
        return nn.avg_pool(x, (2, 2), (2, 2))


class DenseBlock(nn.Module):
    layers: int
    growth: int

    @nn.compact
    def __call__(self, x):
        for number in range(self.layers):
            x = DenseLayer(self.growth, name=f"layer{number + 1}")(x)
        return x


class DenseNet(nn.Module):
    blocks: tuple = (6, 12, 24, 16)
    growth: int = 32
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        x = conv(2 * self.growth, (7, 7), (2, 2), name="conv0")(x)
        x = nn.relu(norm(name="norm0")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for number, layers in enumerate(self.blocks, 1):
            x = DenseBlock(layers, self.growth, name=f"block{number}")(x)
            if number < len(self.blocks):
                x = Transition(name=f"transition{number}")(x)
        x = nn.relu(norm(name="norm5")(x))
        return nn.Dense(self.classes, name="classifier")(x.mean((1, 2)))


def densenet121():
    model = DenseNet()

    def forward(params, batch_stats, images):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(variables, images, mutable=["batch_stats"])
        return logits, updates["batch_stats"]

    images = jax.ShapeDtypeStruct((32, 224, 224, 3), jnp.float32)
    made = jax.eval_shape(model.init, jax.random.key(0), images)
    return forward, (made["params"], made["batch_stats"], images), {"title": "DenseNet-121"}
