"""Compiles one training step for many emulated devices and says what came out; a child of `scale.py`.

Nothing is run and no parameter exists: state and batch are shapes with shardings. JAX_NUM_CPU_DEVICES says how many
devices there are. The request is a JSON object on the command line, the answer one on standard output.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from typing import Any

import _shapes
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _cost_model import exchanges, sent_bytes
from _hlo import collectives, instructions, sent
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import kv, train
from jaxpar.models import lenet

EXAMPLES = 4  # on each device


def lenet_loss(params: Any, batch: Any, rng: Any) -> Any:
    del rng
    logits = lenet.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), {}


def shapes_loss(params: Any, batch: Any, rng: Any) -> Any:
    """Stands for a network of these parameters: every gradient has to be computed and differs between devices."""
    del rng
    return batch["x"].mean() * sum((p * p).sum() for p in jax.tree.leaves(params)), {}


def params_of(network: str) -> Any:
    if network == "lenet":
        return lenet.init(jax.random.key(0))
    return [jnp.zeros(shape) for shape in getattr(_shapes, network)()]


def shapes_of(network: str) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(jax.eval_shape(lambda: params_of(network)))]


def expected_bytes(network: str, kind: str, compressor: str, n: int) -> int | None:
    """What each device sends of parameters and gradients by the cost model; None for a case it does not know."""
    if kind != "device" and compressor != "none":
        return None
    return round(sum(sent_bytes(e, n) for e in exchanges(shapes_of(network), kind, n, compressor)))


def abstract_state(network: str, kind: str, compressor: str, devices: tuple[Any, ...]) -> train.TrainState:
    """The state before the first step, as shapes with the shardings it would have."""

    def make() -> train.TrainState:
        store = kv.from_params(params_of(network), kind=kind, optimizer=optax.sgd(0.1, momentum=0.9), devices=devices)
        if compressor != "none":
            store = kv.set_gradient_compression(store, {"type": compressor})
        return train.create_state(store, 0, devices=devices)

    state = jax.eval_shape(make)
    specs = jax.tree.map(lambda _: P(), state)
    specs = dataclasses.replace(specs, store=kv.partition_specs(state.store, "data"))
    mesh = Mesh(np.array(devices), ("data",))
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), state, specs
    )


def abstract_batch(network: str, devices: tuple[Any, ...]) -> Any:
    along = NamedSharding(Mesh(np.array(devices), ("data",)), P("data"))
    n = EXAMPLES * len(devices)
    shapes = {"image": ((n, 28, 28, 1), jnp.float32), "label": ((n,), jnp.int32)}
    shapes = shapes if network == "lenet" else {"x": ((n,), jnp.float32)}
    return {name: jax.ShapeDtypeStruct(*shape, sharding=along) for name, shape in shapes.items()}


def compiled(network: str, kind: str, compressor: str = "none") -> dict[str, Any]:
    """What the compiler made of the step over all devices: times in seconds, bytes for each device."""
    devices = tuple(jax.devices())
    state, batch = abstract_state(network, kind, compressor, devices), abstract_batch(network, devices)
    step = train.make_train_step(lenet_loss if network == "lenet" else shapes_loss, engine="shard_map")
    start = time.perf_counter()
    lowered = step.lower(state, batch)
    middle = time.perf_counter()
    program = lowered.compile()
    end = time.perf_counter()
    text, memory, n = program.as_text(), program.memory_analysis(), len(devices)
    assert text is not None
    assert memory is not None
    found = collectives(text, n)
    ops = {op: [c for c in found if c.op == op] for op in sorted({c.op for c in found})}
    return {
        "network": network,
        "kind": kind,
        "compressor": compressor,
        "devices": n,
        "lower_seconds": round(middle - start, 3),
        "compile_seconds": round(end - middle, 3),
        "instructions": instructions(text),
        "collectives": {op: {"arrays": sum(c.arrays for c in cs), "bytes": _bytes(cs)} for op, cs in ops.items()},
        "sent_bytes": round(sum(sent(c, n) for c in found)),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "memory_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "parameter_bytes": sum(4 * math.prod(shape) for shape in shapes_of(network)),
        "model_sent_bytes": expected_bytes(network, kind, compressor, n),
    }


def _bytes(found: list[Any]) -> int:
    return sum(round(c.nbytes) for c in found)


if __name__ == "__main__":
    print(json.dumps(compiled(**json.loads(sys.argv[1]))))
