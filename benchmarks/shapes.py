"""Is jaxpar's step ever slower than plain JAX? One row for each shape: model, batch, dtype, optimizer, devices.

Beside `train.make_train_step` stands what one writes by hand, with optax, for the same loss, batch and devices: on one
device a jitted step with its parameters donated, on several the fastest of `jax.jit` with shardings, `jax.shard_map`
and `jax.pmap`, the two with a `pmean` of the gradients. LeNet is jaxpar's own, beside the plain one of train_step.py;
the other models are the same function on both sides, so that only the step differs. A repeat makes some steps and
waits for the last, as a training loop does: five, or a hundred where one takes less time than the wait. "jaxpar many"
makes them by `step.many`, up to eight by one program, as `train.fit` does on CPUs.

The ratio of a row is plain / jaxpar, above 1 where jaxpar is faster. The rows go by name, or by a part of it:

    python benchmarks/shapes.py "LeNet 32" Adam
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import arguments, environment, medians, ratio, save, saved, show, take_turns, timed
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from train_step import batch_of, plain_apply

from jaxpar import kv, train
from jaxpar._devices.mesh import can_hang
from jaxpar.models import lenet

ENGINES = ("pmap", "shard_map")
TOGETHER = 8
NOISE = 0.97  # two runs of one and the same program differ by as much
OPTIMIZERS = {"SGD": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "Adam": optax.adam(1e-3)}


Once = Callable[[], float]
"""Makes the steps of a repeat, waits for the last, and returns its loss."""


@dataclasses.dataclass(frozen=True)
class Model:
    """`apply(params, inputs)` gives logits; with a `model_state` `apply(params, inputs, state)` gives a new one too.

    `plain` is the same by plain means where jaxpar has formulas of its own. A repeat makes so many `steps`.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[..., Any]
    batch: Callable[[int], dict[str, np.ndarray]]
    plain: Callable[..., Any] | None = None
    model_state: Any = ()
    steps: int = 5


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    batch: int
    devices: int
    optimizer: str = "SGD"
    dtype: str = "f32"

    def __str__(self) -> str:
        words = f"{self.model} {self.batch}, {self.dtype}, {self.optimizer}, {self.devices} device"
        return words + "s"[: self.devices > 1]


# The models


def vectors(length: int) -> Callable[[int], dict[str, np.ndarray]]:
    def batch(size: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((size, length), dtype=np.float32)
        return {"image": x, "label": rng.integers(0, 10, size, dtype=np.int32)}

    return batch


def pictures(size: int) -> dict[str, np.ndarray]:
    flat = vectors(16 * 16 * 3)(size)
    return flat | {"image": flat["image"].reshape(size, 16, 16, 3)}


def sentences(size: int) -> dict[str, np.ndarray]:
    words = np.random.default_rng(0).integers(0, 256, (size, 33), dtype=np.int32)
    return {"image": words[:, :-1], "label": words[:, 1:]}


def normals(rng: jax.Array, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Weights drawn from N(0, 1 / fan in); zeros for vectors."""
    return {
        name: jax.random.normal(k, s) / np.prod(s[:-1]) ** 0.5 if len(s) > 1 else jnp.zeros(s)
        for (name, s), k in zip(shapes.items(), jax.random.split(rng, len(shapes)), strict=True)
    }


def mlp(*widths: int) -> Model:
    def init(rng):
        pairs = zip(jax.random.split(rng, len(widths)), widths[:-1], widths[1:], strict=False)
        return [normals(k, weight=(m, n), bias=(n,)) for k, m, n in pairs]

    def apply(params, x):
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
        return x @ params[-1]["weight"] + params[-1]["bias"]

    return Model(init, apply, vectors(widths[0]), steps=5 if max(widths) > 100 else 100)


def resnet(width: int, blocks: int) -> Model:
    """He et al. (2015): a convolution, blocks of two with a shortcut, batch norm after each; running statistics."""
    norms = [f"norm{i}" for i in range(2 * blocks + 1)]

    def init(rng):
        rngs = jax.random.split(rng, 3)
        convs = {f"conv{i + 1}": (3, 3, width, width) for i in range(2 * blocks)}
        scales = {n: {"scale": jnp.ones(width), "shift": jnp.zeros(width)} for n in norms}
        return (
            normals(rngs[0], conv0=(3, 3, 3, width), **convs) | scales | {"last": normals(rngs[1], weight=(width, 10))}
        )

    def conv(weight, x):
        return lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def apply(params, x, state):
        new = {}

        def normed(i, x):
            x = conv(params[f"conv{i}"], x)
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            old, layer = state[f"norm{i}"], params[f"norm{i}"]
            new[f"norm{i}"] = {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * variance}
            return (x - mean) * lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["shift"]

        x = jax.nn.relu(normed(0, x))
        for i in range(1, 2 * blocks + 1, 2):
            x = jax.nn.relu(x + normed(i + 1, jax.nn.relu(normed(i, x))))
        return x.mean((1, 2)) @ params["last"]["weight"], new

    start = {n: {"mean": jnp.zeros(width), "var": jnp.ones(width)} for n in norms}
    return Model(init, apply, pictures, model_state=start)


def transformer(width: int, layers: int, heads: int = 4, words: int = 256, length: int = 32) -> Model:
    """Radford et al. (2019) in small: attention to what came before, then two dense layers, each with a layer norm."""

    def init(rng):
        shapes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        rngs = jax.random.split(rng, layers + 1)
        return {
            "ends": normals(rngs[0], words=(words, width), places=(length, width)),
            "blocks": [normals(k, **shapes, scale1=(width,), scale2=(width,)) for k in rngs[1:]],
        }

    def norm(scale, x):
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (1 + scale)

    def attention(p, x):
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]

    def apply(params, tokens):
        x = params["ends"]["words"][tokens] + params["ends"]["places"]
        for p in params["blocks"]:
            x = x + attention(p, norm(p["scale1"], x))
            x = x + jax.nn.gelu(norm(p["scale2"], x) @ p["up"]) @ p["down"]
        return x @ params["ends"]["words"].T

    return Model(init, apply, sentences)


MODELS = {
    "LeNet": Model(lenet.init, lenet.apply, batch_of, plain=plain_apply),
    "small MLP": mlp(16, 32, 10),
    "MLP": mlp(784, 256, 256, 10),
    "large MLP": mlp(784, 1024, 1024, 10),
    "ResNet": resnet(16, 3),
    "transformer": transformer(64, 2),
    "deep ResNet": resnet(16, 27),  # 55 convolutions
    "deep transformer": transformer(64, 24),
}


def all_rows() -> list[Row]:
    rows = []
    for n in (1, 2):
        rows += [Row("LeNet", max(size, n), n) for size in (1, 8, 32, 64, 100, 256, 1024)]
        rows += [Row("LeNet", 64, n, optimizer) for optimizer in ("momentum", "Adam")]
        rows += [Row("LeNet", 64, n, dtype="bf16")]
        rows += [Row("small MLP", size, n, optimizer) for size in (2, 64) for optimizer in OPTIMIZERS]
        rows += [Row("MLP", 64, n, optimizer) for optimizer in OPTIMIZERS]
        rows += [Row("MLP", 64, n, dtype="bf16")]
        rows += [Row("large MLP", 128, n, optimizer) for optimizer in ("SGD", "Adam")]
        rows += [Row("ResNet", size, n, "momentum") for size in (2, 32)]
        rows += [Row("transformer", size, n, "Adam") for size in (2, 16)]
        rows += [Row("deep ResNet", 32, n, "Adam"), Row("deep transformer", 16, n, "Adam")]
    return rows


QUICK = (
    Row("LeNet", 8, 1),
    Row("small MLP", 2, 2, "Adam", "bf16"),
    Row("ResNet", 2, 2, "momentum"),
    Row("transformer", 2, 1, "Adam"),
)


# The contenders


def loss_of(apply: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """The mean loss of a plain step: `(params, batch, model_state) -> (loss, new model_state)`."""

    def loss(params, batch, model_state):
        inputs = batch["image"]
        if dtype == "bf16":
            params, inputs = jax.tree.map(_half, (params, inputs))
        logits, new = apply(params, inputs, model_state) if model_state else (apply(params, inputs), ())
        if dtype == "bf16":
            logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), new

    return loss


def _half(x):
    return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x


def started(row: Row, engine: str) -> tuple[train.TrainStep, train.TrainState]:
    model, devices = MODELS[row.model], jax.devices()[: row.devices]
    loss = loss_of(model.apply, row.dtype)

    def loss_fn(params, batch, rng, *model_state):
        del rng
        value, new = loss(params, batch, *model_state or ((),))
        return (value, {}, new) if model_state else (value, {})

    store = kv.from_params(model.init(jax.random.key(0)), optimizer=OPTIMIZERS[row.optimizer])
    state = train.create_state(store, 0, devices=devices, model_state=model.model_state)
    return train.make_train_step(loss_fn, engine=engine, devices=devices), state


def jaxpar_step(row: Row, engine: str) -> Once:
    step, state = started(row, engine)
    model = MODELS[row.model]
    batch = jax.device_put(model.batch(row.batch), _along(jax.devices()[: row.devices]))

    def once():
        nonlocal state
        for _ in range(model.steps):
            state, metrics = step(state, batch)
        return float(jax.block_until_ready((state, metrics))[1]["loss"])

    return once


def jaxpar_many(row: Row) -> Once:
    step, state = started(row, ENGINES[0])
    model = MODELS[row.model]
    batches = jax.tree.map(lambda x: np.stack([x] * TOGETHER), model.batch(row.batch))
    mesh = _along(jax.devices()[: row.devices]).mesh
    batches = jax.device_put(batches, NamedSharding(mesh, P(None, "data")))

    def once():
        nonlocal state
        for made in range(0, model.steps, TOGETHER):
            end = min(TOGETHER, model.steps - made)
            state, metrics = step.many(state, batches, end=end)
        return float(jax.block_until_ready((state, metrics))[1]["loss"][end - 1])

    return once


def _along(devices) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("data",)), P("data"))


def update_of(row: Row, axis_name: str | None = None) -> Callable[..., Any]:
    """A step by hand: `(params, opt_state, model_state, batch) -> (params, opt_state, model_state, loss)`."""
    model, tx = MODELS[row.model], OPTIMIZERS[row.optimizer]
    loss_fn = loss_of(model.plain or model.apply, row.dtype)

    def update(params, opt_state, model_state, batch):
        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, model_state)
        if axis_name is not None:
            loss, model_state, grads = lax.pmean((loss, model_state, grads), axis_name)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state, loss

    return update


def plain_start(row: Row) -> tuple[Any, Any, Any]:
    model = MODELS[row.model]
    params = model.init(jax.random.key(0))
    return params, OPTIMIZERS[row.optimizer].init(params), jax.tree.map(jnp.copy, model.model_state)


def plain_jit(row: Row) -> Once:
    """One device, or several by shardings: XLA finds the collectives."""
    devices = jax.devices()[: row.devices]
    along = _along(devices)
    state = jax.device_put(plain_start(row), NamedSharding(along.mesh, P()) if row.devices > 1 else devices[0])
    batch = jax.device_put(MODELS[row.model].batch(row.batch), along if row.devices > 1 else devices[0])
    return plain_turn(jax.jit(update_of(row), donate_argnums=(0, 1, 2)), state, batch, MODELS[row.model].steps)


def plain_shard_map(row: Row) -> Once:
    along = _along(jax.devices()[: row.devices])
    update = jax.shard_map(
        update_of(row, "data"), mesh=along.mesh, in_specs=(P(), P(), P(), P("data")), out_specs=P(), check_vma=False
    )
    state = jax.device_put(plain_start(row), NamedSharding(along.mesh, P()))
    batch = jax.device_put(MODELS[row.model].batch(row.batch), along)
    return plain_turn(jax.jit(update, donate_argnums=(0, 1, 2)), state, batch, MODELS[row.model].steps)


def plain_pmap(row: Row) -> Once:
    devices = jax.devices()[: row.devices]
    along = _along(devices)
    update = jax.pmap(update_of(row, "data"), "data", devices=devices, donate_argnums=(0, 1, 2))
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (row.devices, *x.shape)), plain_start(row))
    batch = MODELS[row.model].batch(row.batch)
    batch = {k: x.reshape(row.devices, -1, *x.shape[1:]) for k, x in batch.items()}
    return plain_turn(update, *jax.device_put((state, batch), along), MODELS[row.model].steps)


def plain_turn(update, state, batch, steps: int) -> Once:
    # Those who write their step by hand wait there as well, once they have found out.
    wait = can_hang(tuple(jax.tree.leaves(batch)[0].sharding.device_set))

    def once():
        nonlocal state
        loss = None
        for _ in range(steps):
            if wait:
                jax.block_until_ready(loss)
            *state, loss = update(*state, batch)
        return float(jax.block_until_ready((state, loss))[1].ravel()[0])

    return once


def contenders(row: Row) -> dict[str, Once]:
    ours = {f"jaxpar {engine}": jaxpar_step(row, engine) for engine in ENGINES} | {"jaxpar many": jaxpar_many(row)}
    plain = {"plain jit": plain_jit(row)}
    if row.devices > 1:
        plain |= {"plain shard_map": plain_shard_map(row), "plain pmap": plain_pmap(row)}
    return ours | plain


def against_plain(times: dict[str, list[float]]) -> dict[str, float]:
    """How many times as fast each engine is as the plain step with the best median, the others being left out.

    Not as the best of each round: the least of three that are equally fast and vary is less than any of them.
    """
    best = min((name for name in times if name.startswith("plain")), key=medians(times).__getitem__)
    return {name: round(ratio(times, best, name), 3) for name in times if name.startswith("jaxpar")}


def check_equal(row: Row, losses: dict[str, float]) -> None:
    """They train the same; only the batch norm of one jitted step is over the batches of all devices."""
    if MODELS[row.model].model_state and row.devices > 1:
        del losses["plain jit"]
    np.testing.assert_allclose(list(losses.values()), losses["jaxpar pmap"], rtol=0.03 if row.dtype == "bf16" else 1e-3)


def measured(row: Row, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    ways = contenders(row)
    check_equal(row, {name: once() for name, once in ways.items()})
    turns = {name: timed(once) for name, once in ways.items()}
    times = take_turns(turns, options.rounds, options.turn_seconds, most_seconds=20)
    jax.clear_caches()
    ms = {name: round(1e3 * seconds / MODELS[row.model].steps, 4) for name, seconds in medians(times).items()}
    return {"ms_a_step": ms, "against_plain": against_plain(times)}


def main() -> None:
    options = arguments("Is the step ever slower than plain JAX? Rows by a part of their names.", 15, 0.05)
    rows = [row for row in (QUICK if options.quick else all_rows()) if row.devices <= len(jax.devices())]
    rows = [row for row in rows if not options.rows or any(part in str(row) for part in options.rows)]
    before = saved(options, "shapes").get("rows", {}) if options.rows else {}
    report = {"environment": environment(), "rounds": options.rounds, "rows": before}
    for row in rows:
        report["rows"][str(row)] = measured(row, options)
        save(options, "shapes", report)
    found = {str(row): report["rows"][str(row)] for row in rows}
    ways = [f"jaxpar {engine}" for engine in ENGINES] + ["jaxpar many"]
    lines = [
        (name, *(f"{row['against_plain'][way]:.2f}x" for way in ways), f"{row['ms_a_step'][ways[0]]:.3f}")
        for name, row in found.items()
    ]
    show(("against the best plain step", *ways, "ms a step"), lines)
    for way in (ways[0], ways[-1]):
        slower = [name for name, row in found.items() if row["against_plain"][way] < NOISE]
        print(f"\n{way}, slower than plain by more than {100 * (1 - NOISE):.0f} %: {'; '.join(slower) or 'no row'}")


if __name__ == "__main__":
    main()
