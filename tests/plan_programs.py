"""Compile steps for devices that are not there, all in one process, for `test_plan_guard.py`.

    python plan_programs.py PATHS v5e:2x4

PATHS are of what this Python lacks. The last line of the output has, for each case, what `train.plan` knows of it and
what the text of its program has.
"""

import json
import os
import re
import sys

if __name__ == "__main__":
    sys.path += [path for path in sys.argv[1].split(os.pathsep) if path not in sys.path]

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxpar import kv, models, parallel, train, viz
from jaxpar.models import transformer
from jaxpar.train._plan import compiled as of_plan
from jaxpar.train._plan.accelerators import Slice
from jaxpar.train._step.programs import DeviceProgram

LAYERS, WIDTH, SHARE = 4, 1024, 128
RULES = {  # names of mesh axes, rule, axes of the batch
    "fsdp": (("data",), parallel.fsdp("data"), "data"),
    "hsdp": (("copies", "data"), parallel.fsdp("data"), ("copies", "data")),
    "tensor": (("data", "model"), parallel.sharding_rules({"*/w": P(None, "model"), "*/b": P("model")}), "data"),
}
# Name, devices, what is given to `mlp`. "by hand" is `jax.jit` with shardings, optax and donation.
TPU = {
    "by hand": {},
    **{engine: {"engine": engine} for engine in ("pmap", "jit")},  # a plan of "shard_map" is that of "pmap"
    **{kind: {"kind": kind} for kind in ("local", "sharded", "dist_async")},
    "by hand, fsdp": {"rule": "fsdp"},
    **{rule: {"rule": rule} for rule in RULES},
    **{name: {"compression": name} for name in ("2bit", "int8", "int3", "powersgd")},
    "sharded, 2bit": {"kind": "sharded", "compression": "2bit"},
    "accumulate": {"accumulate": 2},
    "many": {"many": 4},
    "local steps": {"local_steps": 4},
    "virtual shards": {"virtual_shards": 16},
    "guarded": {"nonfinite": "skip", "loss_scale": "dynamic"},
}
GPU = ["by hand", "pmap", "jit", "sharded", "by hand, fsdp", "fsdp", "2bit", "int8"]
BOTH = {"lenet": {}, "decoder": {}}
CASES = {
    "v5e:2x4": {**TPU, **BOTH},
    "v5e:16x16": {"shard_map": {}, "hsdp": {"rule": "hsdp"}},
    "h100:8": {**{name: TPU[name] for name in GPU}, **BOTH},
}
# Around the memory of one chip: the width of the layers, or examples. In the order of their sizes.
MODELS = [
    *(("params", width) for width in (18_432, 18_688, 18_816, 19_072)),
    *(("examples", 65_536 * n) for n in (11, 12)),
]


def init(width=WIDTH):
    return [{"w": jnp.ones((width, width)), "b": jnp.zeros(width)} for _ in range(LAYERS)]


def loss(params, batch, rng):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return ((x - batch["y"]) ** 2).mean(), {}


def batch_of(devices, *lead, share=SHARE, width=WIDTH):
    shape = jax.ShapeDtypeStruct((*lead, share * len(devices), width), jnp.float32)
    return {"x": shape, "y": shape}


def mesh_of(rule, devices):
    names = RULES[rule][0]
    sizes = (len(devices),) if len(names) == 1 else (len(devices) // 4, 4)
    return jax.make_mesh(sizes, names, devices=devices, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def mlp(devices, kind="device", compression=None, rule=None, many=None, width=WIDTH, share=SHARE, **options):
    place = {"devices": devices}
    if rule:
        mesh = mesh_of(rule, devices)
        place = {"mesh": mesh, "sharding": RULES[rule][1]}
        options |= {"mesh": mesh, "axis_name": RULES[rule][2]}
    store = kv.from_params(init(width), optimizer=optax.adam(1e-3), kind=kind, **place)
    if compression:
        store = kv.set_gradient_compression(store, {"type": compression})
    return (
        train.make_train_step(loss, **options),
        train.create_state(store, 0),
        batch_of(devices, share=share, width=width),
    )


def lenet(devices):
    params = models.lenet.init(jax.random.key(0))
    n = 128 * len(devices)
    batch = {"image": jax.ShapeDtypeStruct((n, 28, 28, 1), jnp.float32), "label": jax.ShapeDtypeStruct((n,), jnp.int32)}
    store = kv.from_params(params, optimizer=optax.sgd(0.1), devices=devices)
    return train.make_train_step(train.classification_loss(models.lenet.apply)), train.create_state(store, 0), batch


def decoder(devices):
    """Tokens of a table that is both looked up and multiplied."""
    config = transformer.Config(layers=2, width=512, heads=8, vocabulary=8192, positions=128)

    def loss(params, batch, rng):
        return transformer.loss(params, batch["text"]), {}

    mesh = mesh_of("fsdp", devices)
    params = transformer.init(jax.random.key(0), config)
    store = kv.from_params(
        params, optimizer=optax.adam(1e-3), sharding=parallel.fsdp("data", stacked_dims=1), mesh=mesh
    )
    batch = {"text": jax.ShapeDtypeStruct((len(devices), 129), jnp.int32)}
    return train.make_train_step(loss), train.create_state(store, 0), batch


def by_hand(devices, rule=None):
    tx, params = optax.adam(1e-3), jax.eval_shape(init)
    mesh = mesh_of(rule or "fsdp", devices)
    whole = NamedSharding(mesh, P())
    homes = parallel.shardings_of(params, RULES[rule][1], mesh) if rule else jax.tree.map(lambda _: whole, params)
    state = jax.eval_shape(tx.init, params)
    moments = optax.tree.map_params(tx, lambda _, home: home, state, homes, transform_non_params=lambda _: whole)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(p, batch, None)[0])(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def on(tree, shardings):
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    batch = batch_of(devices)
    along = jax.tree.map(lambda _: NamedSharding(mesh, P("data")), batch)
    given = on(params, homes), on(state, moments), on(batch, along)
    run = jax.jit(step, donate_argnums=(0, 1), out_shardings=(homes, moments, whole))
    return [run.lower(*given)], {"data": len(devices)}


def lowered(name, devices, options):
    """The programs before compilation, and the sizes of the mesh."""
    if name.startswith("by hand"):
        return by_hand(devices, **options)
    make = {"lenet": lenet, "decoder": decoder}.get(name, mlp)
    step, state, _, parts = of_plan.construct(make, devices, options)
    mesh = {str(axis): size for axis, size in state.step.sharding.mesh.shape.items()}
    if many := options.get("many"):
        return [step.lower(state, batch_of(devices, many), many=True)], mesh
    return [part.traced.lower() for part in parts], mesh


def case(name, where, devices, options):
    programs, mesh = lowered(name, devices, options)
    compiled = [program.compile() for program in programs]
    texts = [one.as_text() for one in compiled]
    last = of_plan._memory(compiled[-1:], [DeviceProgram(None)], where, {"limit_bytes": where.limit(0.75)})
    read = [viz._program_of(one) for one in compiled]
    sends = [one for program in read for one in viz._sends_of(program, mesh, len(devices))]
    return {
        "sends": [(one.kind, list(one.axes), one.sent, one.times) for one in sends],
        "peak": last["peak_bytes"],
        "donated": last["donated_bytes"],
        "returned": last["returned_bytes"],
        "arguments": last["argument_bytes"],
        "temporary": last["temporary_bytes"],
        "cycles": sum(viz._cycles_of(program) or 0 for program in read),
        "wide": sorted({found for text in texts for found in re.findall(r"= \(?([suf]64|c128)\[", text)}),
        "calls": sorted({found for text in texts for found in re.findall(r'custom_call_target="([^"]*)"', text)}),
        "host": [word for word in ("infeed", "outfeed", "is_host_transfer=true") if any(word in t for t in texts)],
        "convolutions": sum(program.as_text().count("stablehlo.convolution") for program in programs),
    }


def model(where, kind, size):
    """Whether a model fits, as `train.plan` says and as the compiler does."""
    options = {"width": size} if kind == "params" else {"share": size}
    found, _ = of_plan.examine(mlp, where, options, 0.75)
    peak, limit = found["peak_bytes"], found["limit_bytes"]
    return {"fits": found["fits"], "peak": peak, "limit": limit, "refused": "donated_bytes" not in found}


def main(on, word=""):
    where = Slice(on, "plan_programs")
    devices = where.devices()
    if on == "v5e:1x1":
        of_plan.picture_of = lambda *_: ""  # which is not asked for here
        found = {f"{kind} {size}": model(where, kind, size) for kind, size in MODELS}
    else:
        found = {name: case(name, where, devices, options) for name, options in CASES[on].items() if word in name}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[2:])
