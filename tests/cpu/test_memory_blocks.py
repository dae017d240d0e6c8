"""A step on CPUs has its intermediate values in blocks that the C library keeps: the same bits."""

import functools
import os
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxpar import train
from jaxpar._cpu import in_blocks
from jaxpar.train._step import programs
from jaxpar.viz._program.proto import integer, message, nested

MB = 250_000  # float32 numbers
OPTION = "xla_multiheap_size_constraint_per_heap"


def scanned(x):
    return jnp.sin(lax.scan(lambda total, row: (total + row, jnp.tanh(total)), x[0], x)[1])


def over_devices(x):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    return jax.shard_map(lambda x: jnp.sin(jnp.cos(x)), mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


@pytest.mark.parametrize(
    ("function", "shape", "block"),
    [
        (lambda x: jnp.tan(jnp.sin(jnp.cos(x))), (11 * MB,), 12),
        (lambda x: jnp.tan(jnp.sin(jnp.cos(x))), (10 * MB,), 0),  # one block for all of them is kept
        (lambda x: jnp.sin(jnp.cos(x)), (20 * MB,), 20),
        (lambda x: jnp.sin(jnp.cos(x)), (40 * MB,), 0),  # a block of that size is not
        (scanned, (16, MB), 16),  # of all steps together
        (lambda x: lax.cond(x[0] > 0, lambda: jnp.sin(jnp.cos(x)), lambda: x), (16 * MB,), 16),
        (over_devices, (64 * MB,), 16),  # of each device
        (lambda x: jax.random.split(jax.random.key(0), 3), (MB,), 0),
    ],
    ids=["several", "few", "large", "too large", "loop", "branch", "devices", "keys"],
)
def test_a_block_has_room_for_the_largest_value(function, shape, block):
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32))
    assert in_blocks(jaxpr) == ({OPTION: block * 1_000_000} if block else None)


def loss_fn(params, batch, rng):
    wide = jnp.tanh(batch["x"] @ params["wide"])
    return ((wide @ params["narrow"]) ** 2).mean(), {"largest": wide.max()}


def trained(engine, count=2):
    params = {"wide": jnp.full((3, 2 * MB), 1e-3), "narrow": jnp.full((2 * MB, 2), 1e-3)}
    state, step = train.start(params, optax.sgd(0.1), loss_fn, engine=engine, devices=jax.devices()[:count])
    batch = {"x": np.arange(12, dtype=np.float32).reshape(4, 3)}
    for _ in range(2):
        state, metrics = step(state, batch)
    return step, state, {name: np.asarray(x).tobytes() for name, x in [*metrics.items(), *state.params.items()]}


@pytest.mark.sampled(1)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the GNU C library keeps blocks")
@pytest.mark.parametrize("engine", ["shard_map", "pmap", "jit"])
def test_a_step_has_the_same_bits_in_blocks_and_xla_does_not_warn(engine, capfd, monkeypatch):
    step, state, found = trained(engine)
    program, *_ = step._prepare(state, None)
    assert program.one not in program._in_blocks.values()
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(programs, "in_blocks", lambda *args: None)
    assert trained(engine)[2] == found


def test_programs_of_blocks_are_known_by_shapes_and_dtypes_and_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(programs, "_MOST_SHAPES", 3)
    loss = lambda params, batch, rng: ((batch["x"].astype(jnp.float32) @ params["w"]).mean(), {})  # noqa: E731
    state, step = train.start({"w": jnp.ones(3)}, optax.sgd(0.1), loss, devices=jax.devices()[:2])
    for rows, dtype in [(2, np.float32), (2, np.int32), (4, np.float32), (6, np.float32), (2, np.float32)]:
        state, _ = step(state, {"x": np.ones((rows, 3), dtype)})
    program, *_ = step._prepare(state, None)
    assert list(program._in_blocks) == [(program.one, ((rows, 3), np.dtype("float32"))) for rows in (4, 6, 2)]


def test_xla_takes_several_blocks_in_place_of_one():
    def descend(weights, x):
        def loss(weights):
            return (functools.reduce(lambda x, weight: jnp.tanh(x @ weight), weights, x) ** 2).mean()

        return jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights))

    def args():  # the values of a layer take 10 MB
        return [jnp.eye(50) for _ in range(9)], jnp.ones((50_000, 50))

    def largest(options):
        program = jax.jit(descend, donate_argnums=0, compiler_options=options)
        about = program.lower(*args()).compile().memory_analysis().serialized_buffer_assignment_proto
        return max(integer(allocation, 2) for allocation in nested(message(about), 3))

    assert largest(in_blocks(jax.make_jaxpr(descend)(*args()))) <= 12_000_000
    assert largest(None) > 20_000_000


@pytest.mark.slow
def test_programs_around_a_step_take_memory_as_it_comes():
    step, state, _ = trained("shard_map")
    once, _ = step(state, {"x": np.ones((4, 3), np.float32)})
    step, state, _ = trained("shard_map")
    inside, _ = jax.jit(step)(state, {"x": np.ones((4, 3), np.float32)})
    np.testing.assert_allclose(inside.params["narrow"], once.params["narrow"], rtol=1e-6)


def test_one_device_keeps_blocks_of_less_than_a_large_program():
    jaxpr = jax.make_jaxpr(lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(jnp.cos(x)), x))(jnp.ones(4 * MB))
    assert in_blocks(jaxpr, is_alone=True) is None  # 8 MB: the library keeps one block
    x = jax.ShapeDtypeStruct((12 * MB,), jnp.float32)
    for count, is_kept in ((100, True), (400, False)):
        jaxpr = jax.make_jaxpr(lambda x, count=count: functools.reduce(lambda x, _: jnp.sin(x), range(count), x))(x)
        assert in_blocks(jaxpr) == {OPTION: 12_000_000}
        assert (in_blocks(jaxpr, is_alone=True) is not None) == is_kept


NEW_PAGES = """
import os, resource, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # XLA has a thread per core
from jaxpar import parallel, train
parallel.use_cpu_devices(int(sys.argv[1]))
import jax.numpy as jnp, numpy as np, optax

def loss(params, batch):  # twelve values of 8 MB, forward and backward
    x = batch["x"] @ params["first"]
    for weight in params["layers"]:
        x = jnp.tanh(x @ weight)
    return (x**2).mean()

params = {"first": jnp.ones((4, 64)), "layers": [jnp.eye(64) for _ in range(12)]}
state, step = train.start(params, optax.sgd(0.1), loss)
batch = {"x": np.ones((65_536, 4), np.float32)}

def pages():
    global state
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    state, metrics = step(state, batch)
    float(metrics["loss"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(50):  # each of XLA's threads takes blocks of its own once, whenever it first has a turn
    pages()
print(sorted(pages() for _ in range(51))[25])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the GNU C library keeps blocks")
@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_step_touches_no_new_pages(devices):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "MALLOC", "GLIBC"))}
    command = [sys.executable, "-c", NEW_PAGES, devices]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1_000
