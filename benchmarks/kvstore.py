"""Push and pull of every key from 4 devices: jaxpar beside MXNet's KVStore.

Each repeat pushes one value for each key and device, and ends when every device has the sums. jaxpar is measured
in three ways:

- `compiled`: a call of one program under `jit` and `shard_map`, the store donated;
- `loop`: a program that pushes and pulls 10 times in a `scan`, as a compiled training loop does, against 10 pushes
  and pulls of MXNet with one wait at the end; small rows only, where the cost of a call matters;
- `eager`: `kv.pushpull` of lists of arrays, as it is typed in a notebook.

Where little is sent, the time is that of threads that wake one another, and that depends on whether the other core
sleeps. So the smallest row is measured a second time with both processes kept on one core.

A store whose values every device holds is pulled where it is; the `sharded` one gathers them in the same program.
"""

from __future__ import annotations

import contextlib
import math
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    Child,
    Turn,
    arguments,
    environment,
    medians,
    one_core,
    ratio,
    save,
    saved,
    show,
    start_mxnet,
    take_turns,
    timed,
)
from _shapes import gpt2_small, resnet50
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import kv

KINDS = ("local", "device", "sharded")
DEVICES = 4
ROWS = {
    "8 x 1 KB": [(256,)] * 8,
    "8 x 1 KB on one core": [(256,)] * 8,
    "64 x 1 KB": [(256,)] * 64,
    "256 x 1 KB": [(256,)] * 256,
    "8 x 4 MB": [(1 << 20,)] * 8,
    "ResNet-50": resnet50(),
    "12-layer transformer": gpt2_small(),
}
QUICK = {"8 x 1 KB": [(256,)] * 8, "8 x 1 KB on one core": [(256,)] * 8, "mixed": [(3, 5), (512, 128), (1,)]}
IN_A_ROW = 10
LOOP_BYTES = 1 << 20  # the largest row that is measured in a loop too
COPIES = 6  # of every value on every device: what a row needs at most, both sides together


def lists_of(shapes, devices):
    """For each key a value on each device; every value is the number of its device."""
    return [[jax.device_put(jnp.full(s, float(i)), d) for i, d in enumerate(devices)] for s in shapes]


def compiled(kind, shapes, lists, devices) -> Turn:
    """One donated program; the values are global arrays with the devices as first axis, made without a copy."""
    flat = [s or (1,) for s in shapes]
    along = NamedSharding(_mesh(devices), P("data"))
    values = [
        jax.make_array_from_single_device_arrays((len(devices) * s[0], *s[1:]), along, [v.reshape(s) for v in vs])
        for s, vs in zip(flat, lists, strict=True)
    ]
    return _program(kind, shapes, devices, values, P("data"), lambda exchange: exchange)


def loop(kind, shapes, lists, devices) -> Turn:
    """The same exchange in a scan over values that come with a first axis of time."""
    along = NamedSharding(_mesh(devices), P(None, "data"))
    each = [np.concatenate([np.asarray(v).reshape(s or (1,)) for v in vs]) for s, vs in zip(shapes, lists, strict=True)]
    values = [jax.device_put(np.stack([v] * IN_A_ROW), along) for v in each]

    def scanned(exchange):
        def run(store, values):
            def body(carry, values):
                return exchange(carry[0], values), None

            _, pulled = jax.eval_shape(exchange, store, [v[0] for v in values])
            return jax.lax.scan(body, (store, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), pulled)), values)[0]

        return run

    turn = _program(kind, shapes, devices, values, P(None, "data"), scanned)
    return lambda repeats: turn(repeats) / IN_A_ROW


def _program(kind, shapes, devices, values, spec, around) -> Turn:
    """A turn of the compiled exchange, `around` it a loop or nothing."""
    keys = list(range(len(shapes)))
    store = kv.place(_store(kind, shapes, devices), devices)
    specs = kv.partition_specs(store, "data")

    def exchange(store, values):
        shares = [v.reshape(s) for v, s in zip(values, shapes, strict=True)]
        store = kv.push(store, keys, shares, axis_name="data")
        return store, kv.pull(store, keys, axis_name="data") if kind == "sharded" else ()

    mapped = jax.shard_map(
        around(exchange), mesh=_mesh(devices), in_specs=(specs, spec), out_specs=(specs, P()), check_vma=False
    )
    # Without an updater the old values are not read; kept as arguments they still lend their memory to the new ones.
    run = jax.jit(mapped, donate_argnums=0, keep_unused=True)
    jax.block_until_ready((store, values))  # see jaxpar/_devices/mesh.py

    def once():
        nonlocal store
        store, pulled = run(store, values)
        pulled = pulled or kv.pull(store, keys, copy=False)
        jax.block_until_ready(pulled)
        return pulled

    _check(once(), devices)
    return timed(once)


def _mesh(devices) -> Mesh:
    return Mesh(np.array(devices), ("data",))


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
    nbytes = 4 * sum(map(math.prod, shapes))
    times: dict[str, list[float]] = {}
    against = {}
    for way, make in (("compiled", compiled), ("loop", loop), ("eager", eager)):
        if way == "loop" and nbytes > LOOP_BYTES:
            continue
        count = IN_A_ROW if way == "loop" else 1
        peers = mxnet_turns(mxnet, shapes, count)
        for kind in KINDS:
            name = f"{way} {kind}"
            contenders = {**peers, name: make(kind, shapes, lists, devices)}
            measured = take_turns(contenders, options.rounds, options.turn_seconds, most_seconds=20)
            for who, seconds in measured.items():
                times.setdefault(who, []).extend(seconds)
            if peers:
                against[name] = round(min(ratio(measured, peer, name) for peer in peers), 3)
    ms = {who: round(1e3 * seconds, 4) for who, seconds in medians(times).items()}
    counts = {"keys": len(shapes), "bytes": nbytes, "rounds_at_most": options.rounds}
    return {**counts, "ms": ms, "against_mxnet": against}


def mxnet_turns(mxnet: Child | None, shapes, in_a_row: int) -> dict[str, Turn]:
    if mxnet is None:
        return {}
    kinds = mxnet.ask(do="kvstore", shapes=shapes, devices=DEVICES, in_a_row=in_a_row)
    suffix = f", {in_a_row} in a row" if in_a_row > 1 else ""

    def turn(kind):
        return lambda repeats: mxnet.turn(kind)(repeats) / in_a_row

    return {f"MXNet {kind}{suffix}": turn(kind) for kind in kinds}


def pinned(mxnet: Child | None):
    """This process and MXNet's on one core."""
    return one_core(os.getpid(), *([] if mxnet is None else [mxnet.pid]))


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
    for name, shapes in (QUICK if options.quick else ROWS).items():
        if options.rows and name not in options.rows:
            continue
        if not fits(shapes):
            print(f"{name}: left out, too little free memory")
            continue
        with pinned(mxnet) if name.endswith("on one core") else contextlib.nullcontext():
            result = row(shapes, mxnet, options)
        _print(name, result)
        # Row by row, so that a run that is cut short, or of one row alone, keeps the others.
        report = {"environment": environment(mxnet), "devices": DEVICES}
        rows = {**saved(options, "kvstore").get("rows", {}), name: result}
        save(options, "kvstore", {**report, "rows": {n: rows[n] for n in [*ROWS, *rows] if n in rows}})


def _print(name: str, result: dict) -> None:
    print(f"\n{name}: {result['keys']} keys, {result['bytes'] / 1e6:.3g} MB, {DEVICES} devices")
    against = result["against_mxnet"]
    rows = [(who, f"{ms:.3f}", f"{against[who]:.2f}x" if who in against else "") for who, ms in result["ms"].items()]
    show(("", "ms", "times as fast as MXNet's better kind"), rows)


if __name__ == "__main__":
    main()
