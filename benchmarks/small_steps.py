"""Steps of less than 0.1 ms: what the host adds. Two tiny models, three optimizers, every engine, 1 and 4 devices.

Beside `train.make_train_step` stands what one writes by hand with optax: on one device a jitted function with its
parameters and the optimizer's state donated, on four the fastest of `jax.jit` with shardings and `jax.shard_map`. Both
compute the same loss of the same batch. jaxpar's also counts its steps and takes a random key. "updater" is jaxpar's
own optimizer with a state for each key, by the engine `pmap`, beside optax's of the same name. "many" is `step.many`,
eight steps a call, as `train.fit` makes them on CPUs. The ratio is plain / jaxpar in each round, above 1 where jaxpar
is faster.

"host" is the time of a call until it returns, when the step before is over. Rows go by a part of their names.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from _harness import arguments, environment, medians, save, saved, show, take_turns, timed
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from shapes import _along, against_plain, normals

from jaxpar import kv, train, updaters
from jaxpar._devices.mesh import can_hang

STEPS = 200  # in one repeat, without a wait between them
TOGETHER = 8
ENGINES = ("pmap", "shard_map", "jit")
OPTIMIZERS = {"SGD": optax.sgd(0.01), "momentum": optax.sgd(0.01, momentum=0.9), "Adam": optax.adam(1e-3)}
UPDATERS = {
    "SGD": updaters.mxnet_sgd(0.01),
    "momentum": updaters.mxnet_sgd(0.01, momentum=0.9),
    "Adam": updaters.mxnet_adam(1e-3),
}
MODELS = {"linear 10-1, batch 8": ((10, 1), 8), "MLP 16-32-4, batch 16": ((16, 32, 4), 16)}

Once = Callable[[], float]
"""Makes the steps of a repeat, waits for the last, and returns its loss."""


def params_of(model: str) -> list[dict[str, jax.Array]]:
    widths, _ = MODELS[model]
    pairs = zip(jax.random.split(jax.random.key(0), len(widths)), widths[:-1], widths[1:], strict=False)
    return [normals(k, weight=(m, n), bias=(n,)) for k, m, n in pairs]


def batch_of(model: str) -> dict[str, np.ndarray]:
    widths, size = MODELS[model]
    rng = np.random.default_rng(0)
    return {"x": rng.random((size, widths[0]), np.float32), "y": rng.random((size, widths[-1]), np.float32)}


def loss_of(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return ((x @ params[-1]["weight"] + params[-1]["bias"] - batch["y"]) ** 2).mean()


def started(model: str, optimizer: Any, engine: str, count: int) -> tuple[train.TrainStep, train.TrainState, Any]:
    devices = jax.devices()[:count]
    where = {"mesh": _along(devices).mesh} if engine == "jit" else {"devices": devices}
    step = train.make_train_step(lambda params, batch, rng: (loss_of(params, batch), {}), engine=engine, **where)
    state = train.create_state(kv.from_params(params_of(model), optimizer=optimizer), 0, devices=devices)
    return step, state, batch_of(model)


def by_steps(model: str, optimizer: Any, engine: str, count: int) -> Once:
    step, state, batch = started(model, optimizer, engine, count)
    batch = jax.device_put(batch, _along(jax.devices()[:count]))

    def once():
        nonlocal state
        for _ in range(STEPS):
            state, metrics = step(state, batch)
        return float(jax.block_until_ready((state, metrics))[1]["loss"])

    return once


def by_many(model: str, optimizer: Any, count: int) -> Once:
    step, state, batch = started(model, optimizer, "pmap", count)
    along = NamedSharding(_along(jax.devices()[:count]).mesh, P(None, "data"))
    batches = jax.device_put({k: np.stack([x] * TOGETHER) for k, x in batch.items()}, along)

    def once():
        nonlocal state
        for _ in range(STEPS // TOGETHER):
            state, metrics = step.many(state, batches)
        return float(jax.block_until_ready((state, metrics))[1]["loss"][-1])

    return once


def by_hand(model: str, tx: optax.GradientTransformation, count: int, mapped: bool = False) -> Once:
    step, state, batch = hand_written(model, tx, count, mapped)
    wait = can_hang(jax.devices()[:count])  # those who write their step by hand wait there as well, once they found out

    def once():
        nonlocal state
        loss = None
        for _ in range(STEPS):
            if wait:
                jax.block_until_ready(loss)
            *state, loss = step(*state, batch)
        return float(jax.block_until_ready((state, loss))[1])

    return once


def hand_written(model: str, tx: Any, count: int, mapped: bool) -> tuple[Any, Any, Any]:
    def update(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        if mapped:
            loss, grads = lax.pmean((loss, grads), "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    along = _along(jax.devices()[:count])
    if mapped:
        specs = (P(), P(), P("data"))
        update = jax.shard_map(update, mesh=along.mesh, in_specs=specs, out_specs=P(), check_vma=False)
    params = params_of(model)
    state = params, tx.init(params)
    if count == 1:
        one = jax.devices()[0]
        return jax.jit(update, donate_argnums=(0, 1)), jax.device_put(state, one), jax.device_put(batch_of(model), one)
    state = jax.device_put(state, NamedSharding(along.mesh, P()))
    return jax.jit(update, donate_argnums=(0, 1)), state, jax.device_put(batch_of(model), along)


def contenders(model: str, name: str, count: int) -> dict[str, Once]:
    tx = OPTIMIZERS[name]
    ways = {"plain jit": by_hand(model, tx, count)}
    if count > 1:
        ways["plain shard_map"] = by_hand(model, tx, count, mapped=True)
    ways |= {f"jaxpar {engine}": by_steps(model, tx, engine, count) for engine in ENGINES}
    ways["jaxpar updater"] = by_steps(model, UPDATERS[name], "pmap", count)
    ways["jaxpar many"] = by_many(model, tx, count)
    return ways


def host_microseconds(model: str, name: str, rounds: int) -> dict[str, float]:
    """How long a call takes until it returns, after the step before is over. Medians, calls taking turns."""
    step, state, batch = started(model, OPTIMIZERS[name], "pmap", 1)
    batch = jax.device_put(batch, _along(jax.devices()[:1]))
    hand, (params, opt_state), own = hand_written(model, OPTIMIZERS[name], 1, mapped=False)
    times: dict[str, list[int]] = {"plain jit": [], "jaxpar pmap": []}
    for _ in range(100 * rounds):
        start = time.perf_counter_ns()
        params, opt_state, loss = hand(params, opt_state, own)
        times["plain jit"].append(time.perf_counter_ns() - start)
        jax.block_until_ready((params, opt_state, loss))
        start = time.perf_counter_ns()
        state, metrics = step(state, batch)
        times["jaxpar pmap"].append(time.perf_counter_ns() - start)
        jax.block_until_ready((state, metrics))
    return {way: round(statistics.median(ns) / 1e3, 1) for way, ns in times.items()}


def measured(model: str, name: str, count: int, options: Any) -> dict[str, Any]:
    ways = contenders(model, name, count)
    losses = {way: once() for way, once in ways.items()}
    np.testing.assert_allclose(list(losses.values()), losses["plain jit"], rtol=1e-3)
    times = take_turns({way: timed(once) for way, once in ways.items()}, options.rounds, options.turn_seconds, 10)
    found = {
        "us_a_step": {way: round(1e6 * seconds / STEPS, 1) for way, seconds in medians(times).items()},
        "against_plain": against_plain(times),
    }
    return found | ({"host_us": host_microseconds(model, name, options.rounds)} if count == 1 else {})


def main() -> None:
    options = arguments("Steps of less than 0.1 ms beside plain jit. Rows by a part of their names.", 25, 0.03)
    name = f"small_steps_jax_{jax.__version__}"
    rows = {f"{m}, {o}, {n} device{'s'[: n > 1]}": (m, o, n) for n in (1, 4) for m in MODELS for o in OPTIMIZERS}
    rows = {k: row for k, row in rows.items() if not options.rows or any(part in k for part in options.rows)}
    if options.quick:
        rows = dict(list(rows.items())[:1])
    before = saved(options, name).get("rows", {}) if options.rows else {}
    report: dict[str, Any] = {"environment": environment(), "rounds": options.rounds, "rows": before}
    for row, of in rows.items():
        report["rows"][row] = measured(*of, options)
        save(options, name, report)
        jax.clear_caches()
    ways = [f"jaxpar {way}" for way in (*ENGINES, "updater", "many")]
    lines = []
    for row in rows:
        found = report["rows"][row]
        us = found["us_a_step"]
        plain = min(t for way, t in us.items() if way.startswith("plain"))
        ratios = [f"{found['against_plain'][way]:.2f}x" for way in ways]
        lines.append((row, *ratios, f"{plain:.1f}", f"{us[ways[0]]:.1f}"))
    show(("against the best plain step", *ways, "plain, us", "pmap, us"), lines)


if __name__ == "__main__":
    main()
