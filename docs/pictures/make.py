"""Draws the pictures of README.md, how_the_store_maps.md and viz.md.

It needs Graphviz's dot, and Debian's fonts-liberation, which is as wide as Helvetica and Arial.

python docs/pictures/make.py [FOLDER]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxpar as jp

DEVICES = 4
LAYER = {"w": np.zeros((1000, 100), np.float32), "b": np.zeros(100, np.float32)}
SMALL = [np.zeros(100, np.float32) for _ in range(3)]
TX = optax.sgd(0.1)
ADAM = optax.adam(1e-3)


def push_and_pull(store, grads):
    """What one device does: hand in its gradients, get the parameters back."""
    keys = sorted(store.values)
    store = jp.kv.push(store, keys, [grad[0] for grad in grads], axis_name="data")
    return jp.kv.pull(store, keys, axis_name="data")


def drawn(store, title, **options):
    """The picture of `push_and_pull` on four devices."""
    devices = jax.devices()[:DEVICES]
    store = jp.kv.place(store, devices)
    shapes = [jp.kv.pull(store, key).shape for key in sorted(store.values)]
    grads = [jax.ShapeDtypeStruct((DEVICES, *shape), jnp.float32) for shape in shapes]
    on_four = jax.shard_map(
        push_and_pull,
        mesh=Mesh(np.array(devices), ("data",)),
        in_specs=(jp.kv.partition_specs(store, "data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    options |= {"params_argnums": None, "title": title}
    return jp.viz.plot_network(on_four, store, grads, **options)


def loss_fn(params, batch, rng):
    hidden = jax.nn.relu(batch["image"] @ params["hidden"]["w"] + params["hidden"]["b"][None])
    logits = hidden @ params["out"]["w"] + params["out"]["b"][None]
    accuracy = (logits.argmax(axis=-1) == batch["label"]).mean()
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": accuracy}


def step(theme):
    """The picture of a training step on four devices."""
    sizes = {"hidden": (784, 128), "out": (128, 10)}
    params = {
        name: {"w": np.zeros(size, np.float32), "b": np.zeros(size[1], np.float32)}
        for name, size in sizes.items()
    }
    options = {"devices": jax.devices()[:DEVICES], "engine": "shard_map"}
    state, train_step = jp.train.start(params, TX, loss_fn, **options)
    batch = {"image": np.zeros((256, 784), np.float32), "label": np.zeros(256, np.int32)}
    title = "a training step on four devices"
    return jp.viz.plot_step(train_step, state, batch, title=title, theme=theme)


def mesh_step():
    """The picture of a step whose weights are split over a mesh of 2×4 devices."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))

    def dense(layer, x):
        return x @ layer["w"] + layer["b"][None]

    def loss(params, batch):
        hidden = jax.nn.relu(dense(params["up"], batch["x"]))
        return ((dense(params["down"], hidden) - batch["y"]) ** 2).mean()

    def train_step(params, opt_state, batch):
        grads = jax.grad(loss)(params, batch)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def put(tree, spec):
        return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), tree)

    params = {
        "up": {
            "w": put(np.zeros((256, 1024), np.float32), P(None, "model")),
            "b": put(np.zeros(1024, np.float32), P("model")),
        },
        "down": {
            "w": put(np.zeros((1024, 256), np.float32), P("model")),
            "b": put(np.zeros(256, np.float32), P()),
        },
    }
    batch = put({name: np.zeros((64, 256), np.float32) for name in "xy"}, P("data"))
    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    return jp.viz.plot_step(
        jitted, params, ADAM.init(params), batch, title="a step on a 2×4 mesh"
    )


def deep_step(remat):
    """The picture of the live bytes of a step of four layers, and what exceeds 4 MB."""

    def layer(params, x):
        return jax.nn.gelu(x @ params["w"] + params["b"][None])

    def loss(params, x):
        for name in sorted(params):
            x = (jax.checkpoint(layer) if remat else layer)(params[name], x)
        return jnp.square(x).mean()

    def train_step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    weights = {"w": np.zeros((64, 64), np.float32), "b": np.zeros(64, np.float32)}
    args = {f"layer{number}": weights for number in range(4)}, np.zeros((2048, 64), np.float32)
    jitted = jax.jit(train_step, donate_argnums=0)
    title = f"live bytes, {'with' if remat else 'without'} remat"
    options = {"title": title, "repeats": False, "height": "memory", "limit": 4_000_000}
    return jp.viz.plot_step(jitted, *args, **options)


def nonfinite():
    """The picture of the first NaN or infinity of a loss."""

    def loss(params, x):
        hidden = jax.nn.relu(x @ params["hidden"]["w"])
        probabilities = hidden @ params["out"]["w"]
        return -jnp.log(probabilities).mean()

    sizes = {"hidden": (16, 8), "out": (8, 4)}
    params = {name: {"w": np.zeros(size, np.float32)} for name, size in sizes.items()}
    return jp.viz.first_nonfinite(loss, params, np.ones((32, 16), np.float32))


def pictures():
    """The name of each file and its picture."""
    device = jp.kv.from_params(LAYER, kind="device", optimizer=TX)
    compressed = jp.kv.set_gradient_compression(device, {"type": "2bit", "threshold": 0.5})
    yield "device", drawn(device, "device")
    yield "sharded", drawn(jp.kv.from_params(LAYER, kind="sharded", optimizer=TX), "sharded")
    yield "compressed", drawn(compressed, "device, compressed to 2 bits", depth=0)
    small = jp.kv.from_params(SMALL, kind="device", optimizer=TX)
    yield "buckets", drawn(small, "three small keys")
    params = jax.eval_shape(jp.models.lenet.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((256, 28, 28, 1), jnp.float32)
    yield "step", step("light")
    yield "step_dark", step("dark")  # for a dark README, which cannot be styled as the site is
    lenet = jp.models.lenet.apply
    yield "lenet", jp.viz.plot_network(lenet, params, images, title="LeNet")
    shapes = {"weight": (128, 20), "bias": (20,)}
    head = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    both = (lenet, (params, images)), (lenet, ({**params, "dense2": head}, images))
    yield "diff", jp.viz.diff(*both, title="LeNet with 20 classes")
    yield "mesh_step", mesh_step()
    yield "memory", deep_step(remat=False)
    yield "memory_remat", deep_step(remat=True)
    yield "nonfinite", nonfinite()


def main(folder=Path(__file__).parent):
    for name, picture in pictures():
        picture.save(str(Path(folder) / f"{name}.svg"))


if __name__ == "__main__":
    jp.parallel.use_cpu_devices(8)
    main(*sys.argv[1:])
