"""The steps of `_plans.py` on one GPU: milliseconds and memory, beside the same loss in plain JAX.

The plain step is `jax.jit` of the loss and optax, with donated params. It computes no other metric. "compiled" is the
memory that the compiler reserves for jaxpar's step, which `jaxpar plan --on h100:1` says without a GPU. "peak" is what
the device's allocator counted. The rows stand in the order of their memory, so that a peak is that of its own row.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cuda")

import _plans
import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_step
from _harness import Turn, arguments, environment, medians, ratio, save, show, take_turns, timed

STEPS = 5  # in one repeat: the host runs ahead of the device, as in a training loop
ROWS = {  # the function, its optimizer, and the dtype to which its step casts params and batch
    "LeNet, 128 images": ("lenet", optax.sgd(0.1), None),
    "MLP, 8.4 million params, 128 examples": ("mlp", optax.adam(1e-3), None),
    "decoder, 124 million params, 8 texts": ("decoder", optax.adam(1e-3), None),
    "ResNet-50, 128 images": ("resnet50", optax.sgd(0.1, momentum=0.9), jnp.bfloat16),
}


def main() -> None:
    options = arguments("Steps of four models on one GPU.", 7, 0.5)
    measured, table, highest = {}, [], 0
    for name in options.rows or ROWS:
        make, tx, dtype = ROWS[name]
        step, state, shapes = getattr(_plans, make)(jax.devices()[:1])
        batch = jax.device_put(_random(shapes), jax.devices()[0])
        params = jax.tree.map(np.asarray, state.params)
        memory = step.lower(state, batch).compile().memory_analysis()
        arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        turns = {"jaxpar": _jaxpar(step, state, batch)}
        del state
        turns["jaxpar"](1)
        stats = jax.devices()[0].memory_stats() or {}
        peak, highest = stats.get("peak_bytes_in_use", 0), max(highest, stats.get("peak_bytes_in_use", 0))
        if peak < highest:
            raise RuntimeError(
                f"{name}: an earlier row had the higher peak; give the rows in the order of their memory"
            )
        ms = {"jaxpar": take_turns(turns, options.rounds, options.turn_seconds)["jaxpar"]}
        turns.clear()  # its state
        ms |= take_turns({"plain JAX": _plain(step, params, tx, batch, dtype)}, options.rounds, options.turn_seconds)
        found = {name: round(1000 * seconds / STEPS, 3) for name, seconds in medians(ms).items()}
        gb = {"compiled_gb": round((arrays + memory.temp_size_in_bytes) / 1e9, 3), "peak_gb": round(peak / 1e9, 3)}
        measured[name] = {"milliseconds": found, "against_plain_jax": round(ratio(ms, "plain JAX", "jaxpar"), 3), **gb}
        table.append((name, *(f"{x:.2f}" for x in (*found.values(), *gb.values()))))
        print(*table[-1], flush=True)
        jax.clear_caches()
    show(("step", "jaxpar, ms", "plain JAX, ms", "compiled, GB", "peak, GB"), table)
    save(options, "gpu", {"environment": environment() | {"gpu": jax.devices()[0].device_kind}, "steps": measured})


def _random(shapes):
    rng = np.random.default_rng(0)

    def draw(leaf):
        if np.issubdtype(leaf.dtype, np.integer):
            return rng.integers(0, 10, leaf.shape, dtype=leaf.dtype)
        return rng.standard_normal(leaf.shape, leaf.dtype)

    return jax.tree.map(draw, shapes)


def _jaxpar(step, state, batch) -> Turn:
    def once():
        nonlocal state
        for _ in range(STEPS):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)

    return timed(once)


def _plain(step, params, tx, batch, dtype) -> Turn:
    def loss_fn(params, batch, rng):
        params, batch = _cast((params, batch), dtype) if dtype else (params, batch)
        return step.loss_fn(params, batch, rng)[0].astype(jnp.float32), None

    return train_step.plain_step(batch, loss_fn, params, tx, STEPS)


def _cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x, tree)


if __name__ == "__main__":
    main()
