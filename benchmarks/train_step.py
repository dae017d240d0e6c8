"""Images per second of the LeNet training step: jaxpar beside plain JAX, Flax, PyTorch and MXNet.

Every contender trains the same network on a batch of the same size with plain SGD, and each repeat waits for its
last step. The plain JAX step is what one writes by hand for one device: the same LeNet, `jax.jit`, donated
parameters, `optax.sgd`. Flax runs the loop of its MNIST tutorial (nnx), on one device. PyTorch runs on all cores,
eagerly and compiled. MXNet runs the code of its article on several devices, and gluon's on one.
The pixels are random numbers: the time of a step does not depend on them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from _harness import Turn, arguments, environment, medians, ratio, save, show, start_mxnet, take_turns, timed
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import kv, train
from jaxpar.models import lenet

LEARNING_RATE = 0.2
STEPS = 3  # in one repeat: the host may run ahead of the device, as it does in a training loop
PEERS = ("plain JAX", "Flax", "PyTorch", "MXNet")


def batch_of(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.random((size, 28, 28, 1), np.float32)
    return {"image": images, "label": rng.integers(0, 10, size, dtype=np.int32)}


def loss_fn(params, batch, rng):
    del rng
    logits = lenet.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), {}


def jaxpar_step(batch, count: int, engine: str, loss_fn=loss_fn, params=None) -> Turn:
    return timed(jaxpar_loop(batch, count, engine, loss_fn, params))


def jaxpar_loop(batch, count: int, engine: str, loss_fn=loss_fn, params=None) -> Callable[[], dict[str, jax.Array]]:
    """A function that makes some steps and returns the metrics of the last one."""
    devices = jax.devices()[:count]
    store = kv.from_params(params or lenet.init(jax.random.key(0)), optimizer=optax.sgd(LEARNING_RATE))
    state = train.create_state(store, 0, devices=devices)
    step = train.make_train_step(loss_fn, engine=engine, devices=devices)
    batch = jax.device_put(batch, NamedSharding(Mesh(np.array(devices), ("data",)), P("data")))

    def once():
        nonlocal state
        for _ in range(STEPS):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        return metrics

    return once


def plain_conv(layer, x):
    """Convolution, ReLU and pooling as one writes them: pooling is slices added, which beats `reduce_window`."""
    x = jax.lax.conv_general_dilated(x, layer["weight"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.nn.relu(x + layer["bias"])[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
    x = x[:, ::2] + x[:, 1::2]
    return (x[:, :, ::2] + x[:, :, 1::2]) / 4


def plain_dense(layer, x):
    return x @ layer["weight"] + layer["bias"]


def plain_apply(params, images):
    x = plain_conv(params["conv2"], plain_conv(params["conv1"], images))
    x = jax.nn.relu(plain_dense(params["dense1"], x.reshape(x.shape[0], -1)))
    return plain_dense(params["dense2"], x)


def plain_loss(params, batch, rng):
    del rng
    logits = plain_apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), {}


def plain_step(batch, loss_fn=plain_loss, params=None, tx=None, steps=STEPS) -> Turn:
    tx = tx or optax.sgd(LEARNING_RATE)
    params = jax.device_put(params or lenet.init(jax.random.key(0)), jax.devices()[0])
    opt_state = tx.init(params)
    batch = jax.device_put(batch, jax.devices()[0])

    def update(params, opt_state, batch):
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, None)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jax.jit(update, donate_argnums=(0, 1))

    def once():
        nonlocal params, opt_state
        for _ in range(steps):
            params, opt_state, loss = step(params, opt_state, batch)
        jax.block_until_ready((params, loss))

    return timed(once)


def flax_step(batch) -> dict[str, Turn]:
    """The loop of Flax's MNIST tutorial: `nnx.jit` of a step that changes model, optimizer and metrics in place."""
    try:
        from flax import nnx
    except ImportError:
        print("no Flax: it is not installed in this environment; `pip install flax` adds it")
        return {}

    class LeNet(nnx.Module):
        def __init__(self, rngs):
            self.conv1 = nnx.Conv(1, 20, (3, 3), padding="VALID", rngs=rngs)
            self.conv2 = nnx.Conv(20, 50, (5, 5), padding="VALID", rngs=rngs)
            self.dense1 = nnx.Linear(800, 128, rngs=rngs)
            self.dense2 = nnx.Linear(128, 10, rngs=rngs)

        def __call__(self, x):
            pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
            x = pool(nnx.relu(self.conv2(pool(nnx.relu(self.conv1(x))))))
            return self.dense2(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))))

    def loss_fn(model, batch):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

    @nnx.jit
    def train_step(model, optimizer, metrics, batch):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    model = LeNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(LEARNING_RATE), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    batch = jax.device_put(batch, jax.devices()[0])

    def once():
        for _ in range(STEPS):
            train_step(model, optimizer, metrics, batch)
        jax.block_until_ready((nnx.state(model), nnx.state(metrics)))

    return {"Flax nnx, 1 device": timed(once)}


def torch_steps(batch) -> dict[str, Turn]:
    """PyTorch as it is typed, with its channels last, and both compiled where it finds a compiler."""
    try:
        import torch
    except ImportError:
        print("no PyTorch: it is not installed in this environment; `pip install torch` adds it")
        return {}
    turns = {}
    for layout in ("", ", channels last"):
        for compiled in (False, True):
            name = f"PyTorch {'compiled' if compiled else 'eager'}{layout}"
            try:
                turns[name] = _torch_step(torch, batch, bool(layout), compiled)
                turns[name](1)  # what is compiled is compiled here
            except Exception as error:  # the compilers of PyTorch raise what they like
                print(f"no {name}: {type(error).__name__}")
                turns.pop(name, None)
    return turns


def _torch_step(torch, batch, channels_last: bool, compiled: bool) -> Turn:
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(1, 20, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    images = torch.from_numpy(batch["image"].transpose(0, 3, 1, 2).copy())
    labels = torch.from_numpy(batch["label"].astype(np.int64))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def loss(images, labels):
        return nn.functional.cross_entropy(model(images), labels)

    loss = torch.compile(loss) if compiled else loss

    def once():
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            loss(images, labels).backward()
            optimizer.step()

    return timed(once)


def main() -> None:
    options = arguments("Images per second of the LeNet step, beside its peers.", 25, 0.2)
    size = 8 if options.quick else 256
    most = 2 if options.quick else min(4, len(jax.devices()))
    counts = [n for n in (1, 2, 4) if n <= most]
    batch = batch_of(size)
    contenders = {"plain JAX, 1 device": plain_step(batch)} | flax_step(batch)
    for engine in ("pmap", "shard_map"):
        for count in counts:
            contenders[f"jaxpar {engine}, {count} device{'s'[: count > 1]}"] = jaxpar_step(batch, count, engine)
    if not options.quick:
        contenders |= torch_steps(batch)
    mxnet = None if options.no_mxnet else start_mxnet(options.mxnet_python)
    if mxnet is not None:
        for name in mxnet.ask(do="lenet", batch=size, contexts=[1, 2] if options.quick else [1, 2, 4], steps=STEPS):
            words = "gluon, hybridized" if name == "gluon" else f"from scratch, {name} context{'s'[: name != '1']}"
            contenders[f"MXNet {words}"] = mxnet.turn(name)
    times = take_turns(contenders, options.rounds, options.turn_seconds)
    plain = "plain JAX, 1 device"
    best = {}
    for ours in (n for n in times if n.startswith("jaxpar")):
        best[ours] = {p: _against_best(times, p, ours) for p in PEERS}
    report = {
        "environment": environment(mxnet),
        "batch": size,
        "rounds": options.rounds,
        "images_per_second": {n: round(STEPS * size / s) for n, s in medians(times).items()},
        "against_best": best,
        "against_plain_jax": {n: round(ratio(times, plain, n), 3) for n in times},
    }
    rows = [(n, str(report["images_per_second"][n]), f"{r:.2f}x") for n, r in report["against_plain_jax"].items()]
    show(("LeNet, batch " + str(size), "images/s", "against plain JAX"), rows)
    print()
    rows = [(n, *("–" if r is None else f"{r:.2f}x" for r in ratios.values())) for n, ratios in best.items()]
    show(("against the best of", *PEERS), rows)
    save(options, "train_step", report)


def _against_best(times, peers: str, ours: str) -> float | None:
    """How many times as fast as whichever of the peers was the fastest in each round; the median of the rounds."""
    rivals = [turns for name, turns in times.items() if name.startswith(peers)]
    if not rivals:
        return None
    rounds = [min(turns) / own for *turns, own in zip(*rivals, times[ours], strict=True)]
    return round(statistics.median(rounds), 3)


if __name__ == "__main__":
    main()
