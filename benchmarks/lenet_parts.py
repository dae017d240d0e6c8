"""Where the time of a LeNet step goes: every layer forward and backward, and what is around them, each measured alone.

One device with a batch of 64, its share of 256 on four. Two formulations: `plain`, as one writes LeNet
(train_step.py), and `jaxpar`, the formulas for CPUs of jaxpar/models. Each part is a compiled program of its own: what
goes forward writes what the way back will read, and what goes back reads that. All parts take turns, and the whole step
with them; the sum of the parts counts one call of a program, not one for each part.

Rows are `one core` (Linux), in which the figures are processor time, and `all cores`. MFLOP is the arithmetic of the
sums as they are defined, only of what the poolings keep; `winograd` makes do with less, so its rate may be higher than
that of the machine, which the last line tells. The table has medians; `least` in the JSON file is the same from the
shortest turn of each, for a machine that others use as well.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_step
from _harness import arguments, environment, medians, one_core, save, show, take_turns, timed
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import data, kv
from jaxpar._cpu import lenet_layers
from jaxpar.models import lenet

DEVICES = 4
MFLOP = {"conv1": 24 * 24 * 20 * 9 * 2e-6, "conv2": 8 * 8 * 50 * 500 * 2e-6, "dense1": 0.2048, "dense2": 0.00256}
SUMMED = ("to batch last", "forward", "backward", "loss", "SGD update", "empty step")  # how the names of these end
EXTRA = "of that, "
ROWS = ("one core", "all cores") if hasattr(os, "sched_setaffinity") else ("all cores",)


def plain_layers(images):
    """What the first layer is given, and each layer as `(params, x) -> y`."""
    return images, {
        "conv1": train_step.plain_conv,
        "conv2": train_step.plain_conv,
        "dense1": lambda layer, x: jax.nn.relu(train_step.plain_dense(layer, x.reshape(x.shape[0], -1))),
        "dense2": train_step.plain_dense,
    }


def batch_last(images):
    """As `lenet._on_cpu` begins: the batch last, without the rows and columns that the poolings leave out."""
    return images[:, :26, :26, 0].transpose(2, 1, 0)


def jaxpar_layers(images):
    def dense1(layer, x_WxCxHxB):
        x_DxB = x_WxCxHxB.transpose(2, 0, 1, 3).reshape(-1, x_WxCxHxB.shape[-1])
        return jax.nn.relu(lenet._dense_batch_last(layer, x_DxB))

    return jax.jit(batch_last)(images), {
        "conv1": lambda layer, x: lenet_layers.direct(x, **layer),
        "conv2": lambda layer, x: lenet_layers.winograd(x, **layer),
        "dense1": dense1,
        "dense2": lambda layer, x: lenet._dense_batch_last(layer, x).T,
    }


FORMULATIONS = {"plain": plain_layers, "jaxpar": jaxpar_layers}


def waited(function, *args):
    return lambda: jax.block_until_ready(function(*args))


def layer_parts(layers, x, params):
    """What to call for each layer and way, and the logits."""
    parts = {}
    for name, layer in layers.items():
        forward = jax.jit(partial(jax.vjp, layer))
        y, vjp = forward(params[name], x)
        parts[f"{name} forward"] = waited(forward, params[name], x)
        saved, structure = jax.tree.flatten(vjp)
        g = jax.random.normal(jax.random.key(1), y.shape)

        def backward(of, structure, saved, g):
            grads = structure.unflatten(saved)(g)
            return [grads[i] for i in of]

        ways = {f"{name} backward": (0,)}  # nobody asks for the gradient of the images
        if name != "conv1":
            ways = {f"{name} backward": (0, 1), f"{EXTRA}{name} weights": (0,), f"{EXTRA}{name} input": (1,)}
        for way, of in ways.items():
            parts[way] = waited(jax.jit(partial(backward, of, structure)), saved, g)
        x = y
    return parts, x


def loss_part(logits, labels):
    def loss(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return waited(jax.jit(jax.value_and_grad(loss)), logits)


def update_part(params):
    tx = optax.sgd(train_step.LEARNING_RATE)
    grads = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(lambda p, g: optax.apply_updates(p, tx.update(g, tx.init(p), p)[0]), donate_argnums=0)
    params = jax.tree.map(jnp.copy, params)

    def once():
        nonlocal params
        params = jax.block_until_ready(update(params, grads))

    return once


def gather_parts(batch: int, examples: int):
    """A batch out of a data set: by NumPy and then to the device, and as `data.batches` does, on the device."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (examples, 28, 28, 1), dtype=np.uint8), rng.integers(0, 10, examples)
    dataset = data.Dataset(images, labels)
    resident = data.batches(dataset, batch, rng=jax.random.key(0), epochs=None, devices=jax.devices()[:1])

    def on_host():
        rows = rng.integers(0, examples, batch)
        jax.block_until_ready(jax.device_put((images[rows].astype(np.float32) / 255, dataset.labels[rows])))

    return {"gather on the host": on_host, "gather on the device": lambda: jax.block_until_ready(next(resident))}


def all_reduce_part(params):
    """A push of the gradients of all devices; its time is for the images of all of them."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    store = kv.place(kv.from_params(params), mesh.devices)
    keys, specs = list(kv.names(store)), kv.partition_specs(store, "data")

    def push(store, grads):
        return kv.push(store, keys, jax.tree.leaves(grads), axis_name="data")

    mapped = jax.shard_map(push, mesh=mesh, in_specs=(specs, P()), out_specs=specs, check_vma=False)
    grads = jax.device_put(jax.tree.map(jnp.ones_like, params), NamedSharding(mesh, P()))
    jax.block_until_ready((store, grads))  # see jaxpar/_devices/mesh.py
    return waited(jax.jit(mapped), store, grads)


def nothing_loss(params, batch, rng):
    del batch, rng
    return sum(leaf.sum() for leaf in jax.tree.leaves(params)), {}


def contenders_of(formulations, batch, quick: bool):
    """Turns by name, each of so many images: the parts of a formulation are called `formulation: part`."""
    size, params = len(batch["label"]), lenet.init(jax.random.key(0))
    images, labels = map(jnp.asarray, (batch["image"], batch["label"]))
    tiny = jax.tree.map(lambda x: jnp.zeros(1), params)
    turns = {}
    for name in formulations:
        x, layers = FORMULATIONS[name](images)
        parts, logits = layer_parts(layers, x, params)
        expected = lenet.apply if name == "jaxpar" else train_step.plain_apply
        np.testing.assert_allclose(logits, jax.jit(expected)(params, images), rtol=1e-4, atol=1e-6)
        if name == "jaxpar":
            turns["jaxpar: to batch last"] = timed(waited(jax.jit(batch_last), images))
        turns |= {f"{name}: {part}": timed(once) for part, once in parts.items()}
        turns[f"{name}: loss"] = timed(loss_part(logits, labels))
        turns[f"{name}: SGD update"] = timed(update_part(params))
        make = partial(train_step.jaxpar_step, count=1, engine="pmap") if name == "jaxpar" else train_step.plain_step
        turns[f"{name}: empty step"] = of_steps(make(batch, loss_fn=nothing_loss, params=tiny))
        turns[f"{name}: whole step"] = of_steps(make(batch))
    turns |= {name: timed(once) for name, once in gather_parts(size, 256 if quick else 60_000).items()}
    turns["all-reduce, 4 devices"] = timed(all_reduce_part(params))
    turns["call of a program"] = timed(waited(jax.jit(lambda x: x + 1), jnp.zeros(1)))
    matrix = jnp.ones((_gemm(quick), _gemm(quick)))
    turns["matrix product"] = timed(waited(jax.jit(jnp.matmul), matrix, matrix))
    return turns


def _gemm(quick: bool) -> int:
    return 64 if quick else 1024


def of_steps(turn):
    """A repeat of train_step.py is several steps."""
    return lambda repeats: turn(repeats) / train_step.STEPS


def mflop(part: str) -> float | None:
    """Of a part, an image; None where it is not counted."""
    layer, _, way = part.removeprefix(EXTRA).partition(" ")
    if layer not in MFLOP:
        return None
    return MFLOP[layer] * (2 if way == "backward" and layer != "conv1" else 1)


def report_of(seconds, size: int, formulations, gemm: int):
    microseconds = {name: 1e6 * s / size for name, s in seconds.items() if name != "matrix product"}
    microseconds["all-reduce, 4 devices"] /= DEVICES
    report = {"microseconds_an_image": {}, "sum": {}, "gflop_per_second": {}}
    for name in formulations:
        own = {n.split(": ")[1]: us for n, us in microseconds.items() if n.startswith(name + ":")}
        summed = [us for part, us in own.items() if part.endswith(SUMMED) and not part.startswith(EXTRA)]
        total = sum(summed) - (len(summed) - 1) * microseconds["call of a program"]
        rates = {part: 1e3 * flop / us for part, us in own.items() if (flop := mflop(part)) is not None}
        report["microseconds_an_image"][name] = {part: round(us, 3) for part, us in own.items()}
        report["sum"][name] = round(total, 3)
        report["gflop_per_second"][name] = {part: round(rate, 2) for part, rate in rates.items()}
    report["around"] = {n: round(us, 3) for n, us in microseconds.items() if ":" not in n}
    report["matrix_product_gflop_per_second"] = round(2e-9 * gemm**3 / seconds["matrix product"], 1)
    return report


def print_report(words: str, report) -> None:
    us, rates = report["microseconds_an_image"], report["gflop_per_second"]
    parts = list(dict.fromkeys(part for name in reversed(us) for part in us[name] if part != "whole step"))

    def cells(part):
        found = [us[n].get(part) for n in us] + [rates[n].get(part) for n in us]
        return ["–" if v is None else f"{v:.1f}" for v in found]

    rows = [(part, *cells(part), "–" if mflop(part) is None else f"{mflop(part):.2f}") for part in parts]
    blank = ["–"] * (len(us) + 1)
    rows.append(("sum", *(f"{report['sum'][n]:.1f}" for n in us), *blank))
    rows.append(("whole step, measured", *(f"{us[n]['whole step']:.1f}" for n in us), *blank))
    show((f"µs an image, {words}", *us, *(f"{n}, GFLOP/s" for n in us), "MFLOP"), rows)
    show((f"around it, {words}", "µs an image"), [(n, f"{v:.2f}") for n, v in report["around"].items()])
    print(f"a matrix product: {report['matrix_product_gflop_per_second']:.0f} GFLOP/s\n")


def main() -> None:
    options = arguments("Where the time of a LeNet step goes; rows: 'one core', 'all cores'.", 15, 0.05)
    size = 8 if options.quick else 64
    turns = contenders_of(FORMULATIONS, train_step.batch_of(size), options.quick)
    report = {"environment": environment(), "batch": size, "rounds": options.rounds, "mflop": MFLOP, "rows": {}}
    for row in options.rows or ROWS:
        with one_core(os.getpid()) if row == "one core" else contextlib.nullcontext():
            times = take_turns(turns, options.rounds, options.turn_seconds)
        least = {name: min(values) for name, values in times.items()}
        found, quietest = (report_of(s, size, FORMULATIONS, _gemm(options.quick)) for s in (medians(times), least))
        report["rows"][row] = found | {"least": quietest}
        print_report(row, report["rows"][row])
        save(options, "lenet_parts", report)


if __name__ == "__main__":
    main()
