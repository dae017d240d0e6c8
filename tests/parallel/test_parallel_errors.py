"""What `parallel` refuses: the call, the exception, and the names and values that its message must have, in this order.

What people do by mistake is in tests/house/test_mistakes.py, with what to do.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import parallel

DEVICES = jax.devices()[:4]
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
OTHER = Mesh(np.array(jax.devices()[:2]), ("data",))
KERNEL = (768, 3072)
PARAMS = {
    "dense": {
        "kernel": jax.ShapeDtypeStruct(KERNEL, jnp.float32),
        "bias": jax.ShapeDtypeStruct((768,), jnp.float32),
    },
    "head": [jax.ShapeDtypeStruct((768, 10), jnp.float32)],
}


def split(batch):
    return parallel.split_and_load(batch, DEVICES)


def spmd(fn=lambda *args: args[0], devices=DEVICES, **options):
    return parallel.spmd(fn, axis_name="i", devices=devices, **options)


def split_by(rule, params=PARAMS):
    return parallel.shardings_of(params, rule, MESH, where="kv")


def of_patterns(*patterns):
    return parallel.sharding_rules(dict.fromkeys(patterns, P()))


def boxed(*names):
    """A dense layer of Flax whose kernel says how it is split."""
    init = linen.with_partitioning(linen.initializers.lecun_normal(), names)
    return jax.eval_shape(linen.Dense(8, kernel_init=init).init, jax.random.key(0), jnp.ones((1, 4)))


T, V = TypeError, ValueError
ELSEWHERE = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(OTHER, P("data")))
REFUSED = {
    # Batches and values of several devices.
    "a batch that devices cannot share": (V, lambda: split(np.ones((10, 2))), ["of 10", "4 devices", "8 or 12"]),
    "a batch smaller than the devices": (V, lambda: split(np.ones(3)), ["of 3", "4 devices", "of 4"]),
    "arrays of several lengths": (V, lambda: split({"a": np.ones(4), "b": np.ones(8)}), ["(4,)", "(8,)"]),
    "a number": (V, lambda: split(np.float32(1)), ["()"]),
    "no devices to split to": (V, lambda: parallel.split_and_load(np.ones(4), []), ["devices", "[]"]),
    "no devices to copy to": (V, lambda: parallel.replicate({"w": jnp.ones(3)}, []), ["replicate", "devices", "[]"]),
    "nothing to sum": (V, lambda: parallel.allreduce([]), ["values", "list of 0"]),
    "a sum of shapes": (V, lambda: parallel.allreduce([jnp.ones(2), jnp.ones(3)]), ["(2,)", "(3,)"]),
    "a sum of dtypes": (
        T,
        lambda: parallel.allreduce([jnp.ones(2), jnp.ones(2, int)]),
        ["value 1", "float32", "int32"],
    ),
    "a sum with nothing": (T, lambda: parallel.allreduce([jnp.ones(2), None]), ["value 1", "None"]),
    # One function on all devices.
    "a batch without an axis of devices": (V, lambda: spmd(engine="pmap")(jnp.ones(8)), ["4 devices", "(8,)"]),
    "the same by shard_map": (V, lambda: spmd(engine="shard_map")(jnp.ones(8)), ["4 devices", "(8,)"]),
    "an engine": (V, lambda: spmd(engine="xla"), ["engine", "'xla'", "pmap, shard_map"]),
    "a device twice": (V, lambda: spmd(devices=DEVICES[:1] * 2), ["devices"]),
    "a second axis by shard_map": (
        V,
        lambda: spmd(engine="shard_map", in_axes=1),
        ["spmd", "shard_map", "0 and None", "1", "'pmap'"],
    ),
    "a last axis by shard_map": (
        V,
        lambda: spmd(engine="shard_map", in_axes=(0, -1)),
        ["spmd", "shard_map", "-1", "'pmap'"],
    ),
    "a result of a second axis": (
        V,
        lambda: spmd(engine="shard_map", out_axes=1),
        ["spmd", "shard_map", "1", "'pmap'"],
    ),
    "axes of a tree": (
        V,
        lambda: spmd(engine="shard_map", in_axes=({"a": 0},)),
        ["spmd", "shard_map", "{'a': 0}", "'pmap'"],
    ),
    # Devices of a CPU.
    "no CPU devices": (V, lambda: parallel.use_cpu_devices(0), ["use_cpu_devices", "n", "1 to 4,096", "0"]),
    "fewer CPU devices": (V, lambda: parallel.use_cpu_devices(np.int64(-1)), ["n", "1 to 4,096", "-1"]),
    "2.0 CPU devices": (T, lambda: parallel.use_cpu_devices(2.0), ["n", "1 to 4,096", "2.0"]),
    "True CPU devices": (T, lambda: parallel.use_cpu_devices(True), ["n", "1 to 4,096", "True"]),
    "a text of CPU devices": (T, lambda: parallel.use_cpu_devices("4"), ["n", "1 to 4,096", "'4'"]),
    "other CPU devices after the start": (RuntimeError, lambda: parallel.use_cpu_devices(3), ["8 cpu"]),
    # Rules that split params, and what they are given to.
    "a negative size": (V, lambda: parallel.fsdp(min_size=-1), ["min_size", "-1"]),
    "a size of 1.5": (T, lambda: parallel.fsdp(min_size=1.5), ["min_size", "1.5"]),
    "negative dimensions": (V, lambda: parallel.fsdp(stacked_dims=-1), ["stacked_dims", "-1"]),
    "an axis that the mesh lacks": (
        V,
        lambda: parallel.fsdp("batch")("a/b", KERNEL, MESH),
        ["'a/b'", "(768, 3072)", "'batch'", "(data=2, model=4)"],
    ),
    "the same for a number": (V, lambda: parallel.fsdp("batch")("a/b", (), MESH), ["'a/b'", "(data=2, model=4)"]),
    "a pattern without a param": (
        V,
        lambda: split_by(of_patterns("dense/*", "dens/kernel")),
        ["'dens/kernel'", "['dense/kernel'", "3"],
    ),
    "a pattern behind a wider one": (
        V,
        lambda: split_by(of_patterns("*/kernel", "dense/k*")),
        ["'dense/k*'", "'*/kernel'", "'dense/k*'"],
    ),
    "a pattern within a rule": (
        V,
        lambda: split_by(parallel.sharding_rules({"dense/*": of_patterns("head/*")})),
        ["'head/*'"],
    ),
    "a pattern of a part": (V, lambda: split_by({"dense": of_patterns("head/*"), "head": None}), ["'head/*'"]),
    "an axis for a rule": (V, lambda: split_by("data"), ["kv", "'dense/bias'", "data", "PartitionSpec"]),
    "a sharding of another mesh": (
        V,
        lambda: split_by(NamedSharding(OTHER, P())),
        ["kv", "'dense/bias'", "(data=2, model=4)"],
    ),
    "a rule that gives a tuple": (
        T,
        lambda: split_by(lambda *_: ("data",)),
        ["kv", "'dense/bias'", "PartitionSpec", "('data',)"],
    ),
    "params that lie on another mesh": (
        V,
        lambda: split_by(None, {"layer": ELSEWHERE}),
        ["'layer'", "(8,)", "(data=2, model=4)"],
    ),
    "a sharding that jit does not know": (
        V,
        lambda: jax.jit(lambda x: split_by(None, {"x": x}))(jnp.ones(8)),
        ["'x'", "jit", "train.plan"],
    ),
    "metadata of Flax": (V, lambda: split_by(None, boxed("data", "modle")), ["Flax", "'params/kernel'", "modle"]),
}
SPECS = {  # specs that do not fit, and what jax says of them
    "rows that two devices cannot share": (P("data"), (7, 4), ["axis 0", "2 times", "7"]),
    "columns that eight cannot share": (P(None, ("data", "model")), (7, 4), ["axis 1", "8 times", "4"]),
    "more entries than dimensions": (P("data", None), (8,), ["2 entries", "1 dimensions"]),
    "an unknown axis": (P("date"), (8, 8), ["date", "('data', 'model')"]),
    "an axis twice": (P("data", "data"), (8, 8), ["duplicate", "`data`"]),
    "an axis twice, once with another": (P(("model", "data"), "data"), (8, 8), ["duplicate", "`data`"]),
    "what XLA would decide": (P(P.UNCONSTRAINED), (8, 8), ["full layout"]),
    "sums that are not done": (P(unreduced={"data"}), (8, 8), ["full layout"]),
}


def says(*content):
    return ".*".join(map(re.escape, content))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, call, content = REFUSED[case]
    with pytest.raises(error, match=says(*content)):
        call()
    assert len(jax.devices()) == 8


@pytest.mark.parametrize("case", SPECS)
def test_a_spec_that_does_not_fit(case):
    """Whichever way it is given, the message has the path, the shape, the spec and the mesh."""
    spec, shape, content = SPECS[case]
    params = {"dense": {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}}
    for call in (
        lambda: parallel.sharding_rules({"*/w": spec})("dense/w", shape, MESH),
        lambda: parallel.sharding_rules({}, default=spec)("dense/w", shape, MESH),
        lambda: split_by(spec, params),
        lambda: split_by({"dense": spec}, params),
        lambda: split_by(lambda path, shape, mesh: spec, params),
    ):
        with pytest.raises(ValueError, match=says("'dense/w'", str(shape), str(spec), "(data=2, model=4)", *content)):
            call()


@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
@pytest.mark.parametrize(
    ("axes", "args"),
    [
        ({"in_axes": (0, 0)}, 1),
        ({"in_axes": (0,)}, 2),
        ({"in_axes": ()}, 1),
        ({"out_axes": (0, 0)}, 1),
        ({"out_axes": (0,)}, 2),
        ({"out_axes": (0, 0, None)}, 2),
    ],
)
def test_a_tuple_of_axes_has_one_for_each(engine, axes, args):
    """In the words of jax. No argument and no result is left out."""
    run = spmd(lambda *x: x if len(x) > 1 else x[0], engine=engine, **axes)
    with pytest.raises(ValueError, match=r"tuple|Expected"):
        run(*[jnp.ones(4)] * args)
