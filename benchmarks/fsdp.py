"""What a device holds of a model that is split over all of them: GPT-2 small, compiled for 8 and 64 emulated devices.

Nothing runs. The step is compiled by the engine `jit`, one text of 1,024 tokens for each device, with Adam in float32.
Each row is a process of its own, since the number of emulated devices is fixed when a process starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from _harness import arguments, environment, save, show

MESHES = {"8": (8,), "2 x 4": (2, 4), "64": (64,), "16 x 4": (16, 4)}


def compiled(sizes: tuple[int, ...], small: bool) -> dict[str, float]:
    """Megabytes of the compiled step on one device."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh

    from jaxpar import kv, parallel, train
    from jaxpar.models import transformer

    config = transformer.Config(2, 64, 4, 256, 16) if small else transformer.Config()
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), ("data", "model")[: len(sizes)])
    rule = parallel.fsdp(mesh.axis_names, stacked_dims=1)
    if len(sizes) > 1:
        rule = parallel.sharding_rules(transformer.TENSOR_PARALLEL, then=rule)
    shapes = jax.eval_shape(lambda rng: transformer.init(rng, config), jax.random.key(0))
    shardings = parallel.shardings_of(shapes, rule, mesh)
    params = jax.jit(lambda rng: transformer.init(rng, config), out_shardings=shardings)(jax.random.key(0))
    step = train.make_train_step(lambda params, batch, rng: (transformer.loss(params, batch), {}))
    state = train.create_state(kv.from_params(params, optimizer=optax.adam(1e-3)), 0)
    tokens = np.zeros((len(jax.devices()), config.positions + 1), np.int32)
    start = time.perf_counter()
    memory = step.lower(state, tokens).compile().memory_analysis()
    seconds = time.perf_counter() - start
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((state.store.values, state.store.optimizer_state)))
    mb = {"whole": whole, "arguments": memory.argument_size_in_bytes, "temporary": memory.temp_size_in_bytes}
    return {**{name: size / 1e6 for name, size in mb.items()}, "seconds": seconds}


def main() -> None:
    options = arguments("What a device holds of a model that is split over all of them.", 1, 1)
    if name := os.environ.get("FSDP_MESH"):
        print(json.dumps(compiled(MESHES[name], options.quick)))
        return
    rows = {}
    for name, sizes in list(MESHES.items())[: 2 if options.quick else None]:
        count = 1
        for size in sizes:
            count *= size
        env = {**os.environ, "FSDP_MESH": name, "JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu"}
        found = subprocess.run([sys.executable, *sys.argv], env=env, stdout=subprocess.PIPE, text=True, check=True)
        rows[name] = json.loads(found.stdout.splitlines()[-1])
    show(
        ("mesh", "MB of the state", "on a device", "of the whole", "temporary MB", "compiled in s"),
        [
            (
                name,
                f"{row['whole']:.0f}",
                f"{row['arguments']:.1f}",
                f"1/{row['whole'] / row['arguments']:.2f}",
                f"{row['temporary']:.0f}",
                f"{row['seconds']:.0f}",
            )
            for name, row in rows.items()
        ],
    )
    save(options, "fsdp", {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
