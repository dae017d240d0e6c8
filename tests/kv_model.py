"""What the tests of the store share: a NumPy model of it, MXNet's record, and readers of compiled programs."""

import contextlib
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from jaxpar import kv
from jaxpar._core.arrays import is_prng_key

REFERENCE = json.loads((Path(__file__).parent / "reference" / "mxnet_1_9_1.json").read_text())
KINDS = ("local", "device", "sharded", "dist_sync", "dist_device_sync")
FOUR = jax.devices()[:4]
ROUNDING = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6}


class Model:
    """A store of NumPy arrays: sums in float64, then the updater `update(pushed, stored) -> new_stored`.

    Of each key the last `staleness` sums wait for the updater.
    """

    def __init__(self, values, update=lambda pushed, stored: pushed, staleness=0):
        self.values, self.update = {k: np.asarray(v, np.float64) for k, v in values.items()}, update
        self.staleness, self.waiting, self.updates = staleness, {k: [] for k in values}, dict.fromkeys(values, 0)

    def push(self, keys, lists):
        sums = {}
        for key, values in zip(keys, lists, strict=True):
            for value in values:
                sums[key] = sums.get(key, 0) + np.asarray(value, np.float64)
        for key in sorted(sums):
            self.waiting[key].append(sums[key])
            self._apply(key, self.staleness)

    def flush(self):
        for key in self.waiting:
            self._apply(key, 0)

    def _apply(self, key, most):
        while len(self.waiting[key]) > most:
            self.values[key] = self.update(self.waiting[key].pop(0), self.values[key])
            self.updates[key] += 1


def put(values, devices):
    """Each value on its own device, the devices taken in turn."""
    return [jax.device_put(v, devices[i % len(devices)]) for i, v in enumerate(values)]


def whole_numbers(seed, *shape, most=8):
    """Small whole numbers as float32, so that sums are exact in any order."""
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float32)


def dense_of(rows):
    """The table of rows in NumPy: those of one index are summed, padding is left out."""
    table = np.zeros(rows.shape, rows.dtype)
    held = np.asarray(rows.indices)
    real = (held >= 0) & (held < rows.shape[0])
    np.add.at(table, held[real], np.asarray(rows.values)[real])
    return table


def on_host(tree):
    """Copies of the leaves as NumPy's arrays; of random keys their data."""
    return jax.tree.map(lambda x: np.array(jax.random.key_data(x) if is_prng_key(x) else x), tree)


def snapshot(tree):
    """A copy of everything in a store or a state, to see later whether it changed."""
    return jax.tree.leaves(on_host(tree)), jax.tree.structure(tree)


def assert_unchanged(tree, before):
    leaves, structure = before
    assert jax.tree.structure(tree) == structure
    for leaf, old in zip(jax.tree.leaves(on_host(tree)), leaves, strict=True):
        assert leaf.dtype == old.dtype
        np.testing.assert_array_equal(leaf, old)


def axes_of(store, axis_name="data"):
    """`in_axes` of a store for `pmap`, out of its partition specs."""
    leaves, structure = jax.tree.flatten(kv.partition_specs(store, axis_name))
    return structure.unflatten([0 if spec == P(axis_name) else None for spec in leaves])


def over(engine, store, devices, body):
    """`body(store, share) -> store` on each device, by `pmap` or `shard_map`. The store goes in and out."""
    if engine == "pmap":
        axes = axes_of(store)
        return jax.pmap(body, "data", in_axes=(axes, 0), out_axes=axes, devices=devices)
    specs = kv.partition_specs(store, "data")
    return on_mesh(lambda s, share: body(s, jax.tree.map(lambda x: x[0], share)), devices, (specs, P("data")), specs)


REPLICATED = P()


def on_mesh(body, devices, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False):
    """A function over a mesh of these devices with the one axis "data", jitted."""
    specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    return jax.jit(jax.shard_map(body, mesh=Mesh(np.array(devices), ("data",)), **specs))


def over_pmap(body, devices, *args):
    """`body` for each row of the arguments, over devices; so the next two."""
    return jax.pmap(body, axis_name="data", devices=devices)(*args)


def over_shard_map(body, devices, *args):
    return over_rows(body, devices)(*args)


def over_vmap(body, devices, *args):
    return jax.jit(jax.vmap(body, axis_name="data"))(*args)


def over_rows(body, devices):
    """`body` on each device, with a row of each argument, and the rows of its results."""

    def on_one(*args):
        return jax.tree.map(lambda x: x[None], body(*jax.tree.map(lambda x: x[0], args)))

    return on_mesh(on_one, devices, P("data"), P("data"), check_vma=True)


# ---- compiled programs

_COLLECTIVES = r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}


def collectives_in(text):
    """(name, bytes of the results) of each collective in the text of a compiled program."""
    return [(name, sum(map(bytes_of, shapes))) for _, name, shapes in placed_collectives_in(text)]


def placed_collectives_in(text):
    """(whether it is outside of the entry computation, as in a loop; name; (dtype, shape) of the results) of each."""
    found, inside = [], True
    for line in text.splitlines():
        if line.endswith("{"):
            inside = not line.startswith("ENTRY")
        if match := re.search(rf"= (.*?) ({_COLLECTIVES})(-start)?\(", line):
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            found.append((inside, match[2], [(d, tuple(map(int, filter(None, s.split(","))))) for d, s in shapes]))
    return found


def bytes_of(array):
    dtype, shape = array
    return BYTES[dtype] * math.prod(shape)


_counting = []  # for each body under way, the events of what was compiled in it


def _count(event, *args, **kwargs):
    for found in _counting if event == "/jax/core/compile/backend_compile_duration" else ():
        found.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def compilations():
    """Counts the programs that XLA compiles in its body: `with compilations() as count: ...; count()`."""
    found = []
    _counting.append(found)
    try:
        yield lambda: len(found)
    finally:
        _counting.pop()
