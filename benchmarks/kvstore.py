"""Push and pull of every key from 4 devices: jaxpar beside MXNet's KVStore.

Each repeat pushes one value for each key and device, and ends when every device has the sums. jaxpar is measured
in two ways: `compiled`, one program under `jit` and `shard_map` with the store donated, as in a training loop; and
`eager`, `kv.pushpull` of lists of arrays as it is typed in a notebook. A store whose values every device holds is
pulled where it is; the `sharded` one gathers them in the same program.
"""

from __future__ import annotations

import math
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Child, Turn, arguments, environment, medians, ratio, save, show, start_mxnet, take_turns, timed
from _shapes import gpt2_small, resnet50
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import kv

KINDS = ("local", "device", "sharded")
DEVICES = 4
ROWS = {
    "8 x 1 KB": [(256,)] * 8,
    "64 x 1 KB": [(256,)] * 64,
    "256 x 1 KB": [(256,)] * 256,
    "8 x 4 MB": [(1 << 20,)] * 8,
    "ResNet-50": resnet50(),
    "12-layer transformer": gpt2_small(),
}
QUICK = {"8 x 1 KB": [(256,)] * 8, "mixed": [(3, 5), (512, 128), (1,)]}
COPIES = 6  # of every value on every device: what a row needs at most, both sides together


def lists_of(shapes, devices):
    """For each key a value on each device; every value is the number of its device."""
    return [[jax.device_put(jnp.full(s, float(i)), d) for i, d in enumerate(devices)] for s in shapes]


def compiled(kind, shapes, lists, devices) -> Turn:
    """One donated program; the values are global arrays with the devices as first axis, made without a copy."""
    mesh, keys = Mesh(np.array(devices), ("data",)), list(range(len(shapes)))
    store = kv.place(_store(kind, shapes, devices), devices)
    specs = kv.partition_specs(store, "data")
    along = NamedSharding(mesh, P("data"))
    flat = [s or (1,) for s in shapes]
    values = [
        jax.make_array_from_single_device_arrays((len(devices) * s[0], *s[1:]), along, [v.reshape(s) for v in vs])
        for s, vs in zip(flat, lists, strict=True)
    ]

    def step(store, values):
        shares = [v.reshape(s) for v, s in zip(values, shapes, strict=True)]
        store = kv.push(store, keys, shares, axis_name="data")
        return store, kv.pull(store, keys, axis_name="data") if kind == "sharded" else ()

    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), check_vma=False),
        donate_argnums=0,
    )

    def once():
        nonlocal store
        store, pulled = run(store, values)
        pulled = pulled or kv.pull(store, keys)
        jax.block_until_ready(pulled)
        return pulled

    _check(once(), devices)
    return timed(once)


def eager(kind, shapes, lists, devices) -> Turn:
    """`kv.pushpull` of lists, one copy of each sum on each device."""
    store, keys = _store(kind, shapes, devices), list(range(len(shapes)))

    def once():
        nonlocal store
        store, pulled = kv.pushpull(store, keys, lists, devices=devices)
        jax.block_until_ready(pulled)
        return pulled

    _check([values[-1] for values in once()], devices)
    return timed(once)


def _store(kind, shapes, devices):
    store = kv.create(kind, devices=devices)
    return kv.init(store, list(range(len(shapes))), [jnp.zeros(s) for s in shapes])


def _check(pulled, devices) -> None:
    total = sum(range(len(devices)))
    assert all((np.asarray(p) == total).all() for p in pulled), "the sums are wrong"


def row(shapes, mxnet: Child | None, options) -> dict:
    """Each way and kind in turns with MXNet's two; one at a time, since the largest rows fill the memory."""
    devices = jax.devices()[:DEVICES]
    lists = lists_of(shapes, devices)
    peers = {}
    if mxnet is not None:
        peers = {f"mxnet {name}": mxnet.turn(name) for name in mxnet.ask(do="kvstore", shapes=shapes, devices=DEVICES)}
    result: dict = {"keys": len(shapes), "bytes": 4 * sum(map(math.prod, shapes)), "ms": {}, "against_mxnet": {}}
    for way, make in (("compiled", compiled), ("eager", eager)):
        for kind in KINDS:
            name = f"{way} {kind}"
            times = take_turns(
                {**peers, name: make(kind, shapes, lists, devices)}, options.rounds, options.turn_seconds
            )
            for who, seconds in medians(times).items():
                result["ms"].setdefault(who, []).append(round(1e3 * seconds, 4))
            if peers:
                # The better of MXNet's two in each round is not a kind one can choose; the better median is.
                result["against_mxnet"][name] = round(min(ratio(times, peer, name) for peer in peers), 3)
    result["ms"] = {who: round(float(np.median(values)), 4) for who, values in result["ms"].items()}
    return result


def fits(shapes) -> bool:
    """Whether the memory that is free now will do; where the system does not say, it is tried."""
    try:
        with open("/proc/meminfo") as lines:
            free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return True
    return COPIES * DEVICES * 4 * sum(map(math.prod, shapes)) < free


def main() -> None:
    options = arguments("Push and pull from 4 devices: jaxpar beside MXNet's KVStore.", 15, 0.05)
    mxnet = None if options.no_mxnet else start_mxnet(options.mxnet_python)
    report = {"environment": environment(mxnet), "devices": DEVICES, "rounds": options.rounds, "rows": {}}
    for name, shapes in (QUICK if options.quick else ROWS).items():
        if options.rows and name not in options.rows:
            continue
        if not fits(shapes):
            print(f"{name}: left out, too little free memory")
            continue
        report["rows"][name] = row(shapes, mxnet, options)
        _print(name, report["rows"][name])
    save(options, "kvstore", report)


def _print(name: str, result: dict) -> None:
    print(f"\n{name}: {result['keys']} keys, {result['bytes'] / 1e6:.3g} MB, {DEVICES} devices")
    better = min((ms for who, ms in result["ms"].items() if who.startswith("mxnet")), default=None)
    rows = []
    for who, ms in result["ms"].items():
        against = result["against_mxnet"].get(who)
        rows.append((who, f"{ms:.3f}", "" if better is None or against is None else f"{against:.2f}x"))
    show(("", "ms", "times faster than MXNet's better kind"), rows)


if __name__ == "__main__":
    main()
