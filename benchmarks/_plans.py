"""Steps for `jaxpar plan`, see docs/plan.md: `jaxpar plan benchmarks._plans:decoder --on v5e:2x4`."""

import jax
import jax.numpy as jnp
import optax

from jaxpar import kv, models, parallel, train
from jaxpar.models import transformer


def lenet(devices, kind="device", examples=128, **options):
    """LeNet with SGD, so many examples on each device."""
    params = models.lenet.init(jax.random.key(0))
    state = train.create_state(kv.from_params(params, optimizer=optax.sgd(0.1), kind=kind, devices=devices), 0)
    n = examples * len(devices)
    batch = {"image": jax.ShapeDtypeStruct((n, 28, 28, 1), jnp.float32), "label": jax.ShapeDtypeStruct((n,), jnp.int32)}
    return train.make_train_step(train.classification_loss(models.lenet.apply), **options), state, batch


def mlp(devices, kind="device", compression=None, width=1024, layers=8, examples=128, fsdp=False, **options):
    """Layers of width x width with Adam: 8.4 million params."""

    def loss(params, batch, rng):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return ((x - batch["y"]) ** 2).mean(), {}

    params = [{"w": jnp.ones((width, width)), "b": jnp.zeros(width)} for _ in range(layers)]
    place = {"devices": devices}
    if fsdp:
        mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
        place = {"sharding": parallel.fsdp("data"), "mesh": mesh}
    store = kv.from_params(params, optimizer=optax.adam(1e-3), kind=kind, **place)
    if compression:
        store = kv.set_gradient_compression(store, {"type": compression})
    shape = jax.ShapeDtypeStruct((examples * len(devices), width), jnp.float32)
    return train.make_train_step(loss, **options), train.create_state(store, 0), {"x": shape, "y": shape}


STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


def resnet50(devices, kind="device", examples=128, **options):
    """ResNet-50 with momentum, computed in bfloat16, so many images of 224 x 224 on each device.

    25,557,032 params. Batch norm is by the statistics of the batch.
    """

    def layer(size, before, after):
        return {"kernel": jnp.ones((size, size, before, after)), "scale": jnp.ones(after), "bias": jnp.zeros(after)}

    params, before = {"first": layer(7, 3, 64)}, 64
    for stage, (width, blocks) in enumerate(STAGES):
        for i in range(blocks):
            block = [layer(1, before, width), layer(3, width, width), layer(1, width, 4 * width)]
            params[f"block{stage}.{i}"] = block if i else [*block, layer(1, before, 4 * width)]
            before = 4 * width
    params["dense"] = {"kernel": jnp.ones((2048, 1000)), "bias": jnp.zeros(1000)}

    def normalized(layer, x, stride=1):
        y = jax.lax.conv_general_dilated(
            x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean, var = jnp.mean(y, (0, 1, 2), jnp.float32), jnp.var(y.astype(jnp.float32), (0, 1, 2))
        scale = layer["scale"] * jax.lax.rsqrt(var + 1e-5)
        return y * scale.astype(y.dtype) + (layer["bias"] - mean * scale).astype(y.dtype)

    def apply(params, x):
        x = jax.nn.relu(normalized(params["first"], x, 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, (_, blocks) in enumerate(STAGES):
            for i in range(blocks):
                one, two, three, *shortcut = params[f"block{stage}.{i}"]
                stride = 2 if stage and not i else 1
                y = jax.nn.relu(normalized(one, x))
                y = normalized(three, jax.nn.relu(normalized(two, y, stride)))
                x = jax.nn.relu(y + (normalized(shortcut[0], x, stride) if shortcut else x))
        return x.mean((1, 2)) @ params["dense"]["kernel"] + params["dense"]["bias"]

    tx = optax.sgd(0.1, momentum=0.9)
    state = train.create_state(kv.from_params(params, optimizer=tx, kind=kind, devices=devices), 0)
    n = examples * len(devices)
    images = jax.ShapeDtypeStruct((n, 224, 224, 3), jnp.float32)
    loss = train.classification_loss(apply)
    step = train.make_train_step(loss, compute_dtype=jnp.bfloat16, **options)
    return step, state, {"image": images, "label": jax.ShapeDtypeStruct((n,), jnp.int32)}


def decoder(devices, layers=12, width=768, heads=12, texts=8, copies=1, **options):
    """A decoder with Adam and fsdp, computed in bfloat16, so many texts of 1,024 tokens on each device.

    The default has 124 million params. 24 layers of width 2048 have 1.3 billion, 32 of width 4096 have 6.7 billion.
    `copies` is the number of groups of devices, over each of which the params are split.
    """
    config = transformer.Config(layers=layers, width=width, heads=heads)

    def loss(params, batch, rng):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        logits = transformer.apply(half, batch["text"], data_axes=names).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["text"][:, 1:]).mean(), {}

    shape, names = (copies, len(devices) // copies), ("copies", "data")
    mesh = jax.make_mesh(shape, names, devices=devices, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = transformer.init(jax.random.key(0), config)
    store = kv.from_params(
        params, optimizer=optax.adam(1e-3), sharding=parallel.fsdp("data", stacked_dims=1), mesh=mesh
    )
    batch = {"text": jax.ShapeDtypeStruct((texts * len(devices), 1024), jnp.int32)}
    return train.make_train_step(loss, axis_name=names, **options), train.create_state(store, 0), batch
