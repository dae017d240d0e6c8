"""Convolutions of many networks: `models.conv_general_dilated` beside XLA's own, forward and in both gradients.

One device, each direction a program of its own, the two take turns. Where ours is XLA's program letter by letter it is
said so, and only the speed is measured. The gemm limit is that of a large product in the same run.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _convolution_layers import NETWORKS, Layer
from _harness import arguments, environment, ratio, save, saved, show, take_turns, timed
from jax import lax

from jaxpar import models

DIRECTIONS = ("forward", "images", "filter")
GEMM = 1536


def main() -> None:
    options = arguments("Convolutions of many networks, beside XLA's own.", 7, 0.03)
    name = f"convolutions_jax_{jax.__version__}"
    report = saved(options, name) or {"environment": environment(), "layers": {}}
    for network in options.rows or list(NETWORKS):
        limit = gemm_limit()
        layers = NETWORKS[network][: 1 if options.quick else None]
        found = {str(layer): _measure(layer, options) | {"gemm": round(limit)} for layer in layers}
        report["layers"][network] = found
        _show(network, limit, found)
        report["summary"] = _summary(report["layers"])
        save(options, name, report)
    print(report["summary"])


def gemm_limit() -> float:
    """GFLOP/s of a product of large matrices with all threads: the best of a few."""
    a = jnp.asarray(np.random.default_rng(0).standard_normal((GEMM, GEMM), np.float32))
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    return 2e-9 * GEMM**3 / min(timed(lambda: product(a, a).block_until_ready())(1) for _ in range(7))


def _measure(layer: Layer, options: Any) -> dict[str, Any]:
    directions = [_direction(layer, direction, options) for direction in DIRECTIONS]
    return dict(zip(DIRECTIONS, directions, strict=True))


def _direction(layer: Layer, direction: str, options: Any) -> dict[str, Any]:
    """GFLOP/s of both, how many times as fast ours is, and how far its numbers are from XLA's."""
    args, flops = _operands(layer, direction)
    convolutions = {"XLA": lax.conv_general_dilated, "jaxpar": models.conv_general_dilated}
    lowered = {name: jax.jit(_program(layer, direction, conv)).lower(*args) for name, conv in convolutions.items()}
    texts = {stablehlo.as_text() for stablehlo in lowered.values()}
    compiled = {name: program.compile() for name, program in lowered.items()}
    if len(texts) == 1:
        del compiled["jaxpar"]
    results = {name: np.asarray(program(*args), np.float64) for name, program in compiled.items()}
    turns = {name: timed(functools.partial(_once, program, args)) for name, program in compiled.items()}
    times = take_turns(turns, options.rounds, options.turn_seconds, most_seconds=2)
    speeds = {name: round(flops / statistics.median(seconds) / 1e9, 1) for name, seconds in times.items()}
    if len(texts) == 1:
        return speeds | {"is_same_program": True}
    error = np.abs(results["jaxpar"] - results["XLA"]).max() / np.abs(results["XLA"]).max()
    return speeds | {"times_as_fast": round(ratio(times, "XLA", "jaxpar"), 3), "relative_error": float(f"{error:.1e}")}


def _once(program: Callable[..., jax.Array], args: tuple[jax.Array, ...]) -> None:
    program(*args).block_until_ready()


def _operands(layer: Layer, direction: str) -> tuple[tuple[jax.Array, ...], int]:
    """What the direction needs of images, filter and cotangent."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(layer.dtype)
    x, w = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in layer.shapes())
    result = jax.eval_shape(lambda x, w: lax.conv_general_dilated(x, w, **layer.options()), x, w)
    cotangent = jnp.asarray(rng.standard_normal(result.shape, np.float32), dtype)
    return {"forward": (x, w), "images": (w, cotangent), "filter": (x, cotangent)}[direction], layer.flops(result.shape)


def _program(layer: Layer, direction: str, conv: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    images, window = (jax.ShapeDtypeStruct(shape, layer.dtype) for shape in layer.shapes())
    both = functools.partial(conv, **layer.options())
    if direction == "forward":
        return both
    if direction == "images":
        return lambda w, cotangent: jax.linear_transpose(lambda x: both(x, w), images)(cotangent)[0]
    return lambda x, cotangent: jax.linear_transpose(lambda w: both(x, w), window)(cotangent)[0]


def _show(network: str, limit: float, found: dict[str, Any]) -> None:
    """A table of GFLOP/s: XLA's, ours, and how many times as fast."""
    rows = [(layer, *(_cell(directions[name]) for name in DIRECTIONS)) for layer, directions in found.items()]
    show((f"{network}: GFLOP/s, a product {limit:.0f}", *DIRECTIONS), rows)
    print()


def _cell(found: dict[str, Any]) -> str:
    if "is_same_program" in found:
        return f"{found['XLA']:.0f}"
    return f"{found['XLA']:.0f} → {found['jaxpar']:.0f}, {found['times_as_fast']:.2f}x"


def _summary(networks: dict[str, Any]) -> dict[str, Any]:
    rows = {
        f"{network}: {layer}, {direction}": found[direction]
        for network, layers in networks.items()
        for layer, found in layers.items()
        for direction in DIRECTIONS
    }
    own = {name: row for name, row in rows.items() if "times_as_fast" in row}
    ratios = sorted(row["times_as_fast"] for row in own.values())
    return {
        "convolutions": len(rows),
        "by_formulas": len(own),
        "slower_by_more_than_5_percent": [name for name, row in own.items() if row["times_as_fast"] < 0.95],
        "times_as_fast": {"least": ratios[0], "median": statistics.median(ratios), "most": ratios[-1]}
        if ratios
        else {},
        "largest_relative_error": max((row["relative_error"] for row in own.values()), default=0.0),
    }


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    begin = time.perf_counter()
    main()
    print(f"{time.perf_counter() - begin:.0f} s")
