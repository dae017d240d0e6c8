"""ResNet-50 of He et al. with batch norm in train mode, in Flax NNX."""

import jax
import jax.numpy as jnp
from flax import nnx


class Bottleneck(nnx.Module):
    def __init__(self, inputs, width, stride, *, rngs):
        outputs = 4 * width
        self.conv1 = nnx.Conv(inputs, width, (1, 1), use_bias=False, rngs=rngs)
        self.bn1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), stride, padding=1, use_bias=False, rngs=rngs)
        self.bn2 = nnx.BatchNorm(width, rngs=rngs)
        self.conv3 = nnx.Conv(width, outputs, (1, 1), use_bias=False, rngs=rngs)
        self.bn3 = nnx.BatchNorm(outputs, rngs=rngs)
        if stride == 1 and inputs == outputs:
            self.downsample = None
        else:
            self.downsample = nnx.Sequential(
                nnx.Conv(inputs, outputs, (1, 1), stride, use_bias=False, rngs=rngs), nnx.BatchNorm(outputs, rngs=rngs)
            )

    def __call__(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return nnx.relu(x + shortcut)


class ResNet(nnx.Module):
    def __init__(self, counts, classes=1000, *, rngs):
        self.conv1 = nnx.Conv(3, 64, (7, 7), 2, padding=3, use_bias=False, rngs=rngs)
        self.bn1 = nnx.BatchNorm(64, rngs=rngs)
        inputs = 64
        stages = []
        for stage, count in enumerate(counts):
            width, blocks = 64 * 2**stage, []
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(Bottleneck(inputs, width, stride, rngs=rngs))
                inputs = 4 * width
            stages.append(nnx.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), [(1, 1), (1, 1)])
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean(axis=(1, 2)))


def resnet50_nnx():
    model = nnx.eval_shape(lambda: ResNet((3, 4, 6, 3), rngs=nnx.Rngs(0)))
    model.train()
    graphdef, params, batch_stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def forward(params, batch_stats, images):
        model = nnx.merge(graphdef, params, batch_stats)
        logits = model(images)
        return logits, nnx.state(model, nnx.BatchStat)

    images = jax.ShapeDtypeStruct((32, 224, 224, 3), jnp.float32)
    return forward, (params, batch_stats, images), {"title": "ResNet-50 (Flax NNX)"}
