"""EfficientNet-B0 of Tan and Le: inverted bottlenecks with squeeze and excitation, in Flax Linen."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

norm = partial(nn.BatchNorm, use_running_average=True, momentum=0.99, epsilon=1e-3)
# expansion, features, blocks, stride, kernel
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


class SqueezeExcite(nn.Module):
    reduced: int

    @nn.compact
    def __call__(self, x):
        scale = x.mean((1, 2), keepdims=True)
        scale = nn.silu(nn.Conv(self.reduced, (1, 1), name="reduce")(scale))
        scale = nn.sigmoid(nn.Conv(x.shape[-1], (1, 1), name="expand")(scale))
        return x * scale


class MBConv(nn.Module):
    expansion: int
    features: int
    stride: int
    kernel: int

    @nn.compact
    def __call__(self, x):
        inputs = x.shape[-1]
        hidden = inputs * self.expansion
        y = x
        if self.expansion != 1:
            y = nn.Conv(hidden, (1, 1), use_bias=False, name="expand")(y)
            y = nn.silu(norm(name="expand_norm")(y))
        kernel, strides = (self.kernel, self.kernel), (self.stride, self.stride)
        y = nn.Conv(hidden, kernel, strides, feature_group_count=hidden, use_bias=False, name="depthwise")(y)
        y = nn.silu(norm(name="depthwise_norm")(y))
        y = SqueezeExcite(max(1, inputs // 4), name="se")(y)
        y = nn.Conv(self.features, (1, 1), use_bias=False, name="project")(y)
        y = norm(name="project_norm")(y)
        return x + y if x.shape == y.shape else y


class EfficientNet(nn.Module):
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (3, 3), (2, 2), use_bias=False, name="stem")(x)
        x = nn.silu(norm(name="stem_norm")(x))
        for number, (expansion, features, blocks, stride, kernel) in enumerate(STAGES, 1):
            for block in range(blocks):
                name = f"stage{number}_block{block + 1}"
                x = MBConv(expansion, features, stride if block == 0 else 1, kernel, name=name)(x)
        x = nn.Conv(1280, (1, 1), use_bias=False, name="head")(x)
        x = nn.silu(norm(name="head_norm")(x)).mean((1, 2))
        x = nn.Dropout(0.2, deterministic=True)(x)
        return nn.Dense(self.classes, name="classifier")(x)


def efficientnet_b0():
    model = EfficientNet()
    images = jax.ShapeDtypeStruct((32, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    return model.apply, (variables, images), {"title": "EfficientNet-B0"}
