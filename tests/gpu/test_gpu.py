"""On a real GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu`. The emulated CPU devices are beside it, as the peer.

Products are computed in full precision here; by default a GPU rounds the factors to 11 bits.
"""

import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import whole_numbers
from world import apply, points

from jaxpar import checkpoint, compression, data, kv, models, parallel, sparse, train, updaters, viz
from jaxpar._launch import visible_gpus
from jaxpar.data import _batches

pytestmark = pytest.mark.gpu
try:
    GPUS = jax.devices("gpu")
except RuntimeError as error:
    pytest.skip(f"needs a GPU, and JAX_PLATFORMS=cuda,cpu: {error}", allow_module_level=True)
KINDS = ("local", "device", "sharded", "dist_async")
SPECS = [{"type": t} for t in ("2bit", "1bit", "int3", "int8", "bf16", "powersgd")] + [{"type": "topk", "ratio": 0.25}]
LOSS = train.classification_loss(apply)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def gpus():
    return GPUS


@pytest.fixture
def cpus(gpus):
    return jax.devices("cpu")[: len(gpus)]


def close(tree, other, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol, atol), tree, other)


def platforms(tree):
    return {d.platform for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) for d in x.devices()}


# The store


def pushed(devices, kind, spec=None, updater=None):
    """Three pushes of a value of each device, and the store after them."""
    store = kv.create(kind, devices=devices)
    store = kv.init(store, [3, 5], [whole_numbers(0, 7, 5), np.zeros(3000, np.float32)])
    store = kv.set_updater(store, updater or updaters.from_optax(optax.adam(0.1)))
    store = store if spec is None else kv.set_gradient_compression(store, spec)
    for i in range(3):
        small = [jax.device_put(whole_numbers(i + 7 * j, 7, 5), d) for j, d in enumerate(devices)]
        large = [jax.device_put(whole_numbers(i + 9 * j, 3000) / 8, d) for j, d in enumerate(devices)]
        store = kv.push(store, [3, 5], [small, large])
    return kv.flush(store)


@pytest.mark.parametrize("kind", KINDS)
def test_a_push(kind, gpus, cpus):
    store, other = pushed(gpus, kind), pushed(cpus, kind)
    assert platforms(store) == {gpus[0].platform}
    assert platforms(other) == {"cpu"}
    close(kv.pull(store, [3, 5]), kv.pull(other, [3, 5]))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["type"])
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_a_compressed_push(kind, spec, gpus, cpus):
    sgd = updaters.from_optax(optax.sgd(0.1))
    store, other = (pushed(devices, kind, spec, sgd) for devices in (gpus, cpus))
    close(kv.pull(store, [3, 5]), kv.pull(other, [3, 5]), 1e-4, 1e-5)
    close(store.residuals, other.residuals, 1e-4, 1e-5)


def test_int8_keeps_blocks_of_subnormal_scales_in_the_residual(gpus):
    """A GPU keeps subnormal numbers, where a CPU makes zeros of them."""
    value, coder = jax.device_put(np.full(1024, 1e-37, np.float32), gpus[0]), compression.Int8()
    payload, state = jax.jit(coder.encode)(value, coder.init(value.shape, value.dtype))
    assert not payload["scales"].any()
    np.testing.assert_array_equal(state["residual"], value)


def test_rows(gpus, cpus):
    pulled = []
    for devices in (gpus, cpus):
        store = kv.init(kv.create("device", devices=devices), 3, np.zeros((50, 4), np.float32))
        store = kv.set_updater(store, updaters.mxnet_sgd(0.5))
        rows = [
            sparse.RowSparse(*jax.device_put((np.array([1, 7, 7, 49, 0, 1]), whole_numbers(j, 6, 4)), d), (50, 4))
            for j, d in enumerate(devices)
        ]
        pulled.append(kv.pull(kv.push(store, 3, rows), 3))
    close(*pulled)


def test_aggregation_repeats_its_bits(gpus):
    first, second = (pushed(gpus, "device", {"type": "int8"}) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first.residuals, second.residuals)
    np.testing.assert_array_equal(kv.pull(first, 5), kv.pull(second, 5))


# The step


def lenet_run(devices, steps=4, kind="device", tx=None, **options):
    params = models.lenet.init(jax.random.key(0))
    store = kv.from_params(params, optimizer=tx or optax.sgd(0.05), kind=kind)
    state = train.create_state(store, 0, devices=devices)
    step = train.make_train_step(train.classification_loss(models.lenet.apply), **options)
    rng = np.random.default_rng(0)
    images, labels = rng.random((16, 28, 28, 1), np.float32), rng.integers(0, 10, 16, dtype=np.int32)
    for _ in range(steps):
        state, metrics = step(state, {"image": images, "label": labels})
    return state, metrics


@pytest.mark.parametrize(
    ("engine", "kind"), [("pmap", "device"), ("shard_map", "sharded"), ("shard_map", "local"), ("jit", "device")]
)
def test_a_step_of_lenet(engine, kind, gpus, cpus):
    state, metrics = lenet_run(gpus, engine=engine, kind=kind)
    other, expected = lenet_run(cpus, engine=engine, kind=kind)
    assert platforms(state.params) == {gpus[0].platform}
    close(metrics["loss"], expected["loss"], 1e-4)
    close(state.params, other.params, 1e-3, 1e-4)


@pytest.mark.parametrize(
    "options", [{"compute_dtype": jnp.bfloat16}, {"compute_dtype": jnp.float16, "loss_scale": 8.0}]
)
def test_half_precision(options, gpus, cpus):
    (_, metrics), (_, expected) = (lenet_run(devices, **options) for devices in (gpus, cpus))
    close(metrics["loss"], expected["loss"], 3e-2)


def test_every_operation_runs_on_the_gpu(gpus):
    step = train.make_train_step(train.classification_loss(models.lenet.apply))
    state, _ = lenet_run(gpus, steps=1)
    batch = {"image": jnp.zeros((16, 28, 28, 1)), "label": jnp.zeros(16, jnp.int32)}
    text = step.lower(state, batch).compile().as_text()
    assert "jaxpar_" not in text  # the kernels of CPUs
    assert "callback" not in text
    assert "f64[" not in text


def test_the_memory_of_a_state_is_used_again(gpus):
    """Params and Adam's moments, 64 MB each: steps do not add to what is in use, and the given state is gone."""
    params = {"w": np.zeros((4096, 4096), np.float32)}
    state = train.create_state(kv.from_params(params, optimizer=optax.adam(1e-3), devices=gpus), 0)
    step = train.make_train_step(lambda p, batch, rng: ((batch["x"] @ p["w"]).mean(), {}))
    old, in_use = state, []
    for _ in range(4):
        state, _ = step(state, {"x": np.ones((8, 4096), np.float32)})
        jax.block_until_ready(state)
        in_use.append(gpus[0].memory_stats()["bytes_in_use"])
    assert all(x.is_deleted() for x in jax.tree.leaves(old.store.values))
    assert max(in_use) - min(in_use) < 2**20


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_batches_have_their_own_values(dtype, gpus):
    """A batch is sent while the host prepares the next ones: no batch may get another's values."""
    images = np.arange(64 * 1000, dtype=np.int64).reshape(64, 1000).astype(dtype)
    dataset = data.Dataset(images, np.arange(64, dtype=np.int32))
    for resident in (False, True):
        found = list(data.batches(dataset, 8, devices=gpus, resident=resident, dtype=dtype))
        np.testing.assert_array_equal(np.concatenate([np.asarray(b["image"]) for b in found]), images)
        assert platforms([b["image"] for b in found]) == {gpus[0].platform}


def test_a_data_set_that_has_no_room_is_streamed(gpus):
    class Large:
        images = labels = np.broadcast_to(np.float32(0), (2**30, 1000))

    free = _batches.free_bytes(gpus[0])
    assert 2**28 < free < 2**40
    assert _batches.resident(Large, _batches.plan_batches(8, 8, "test", devices=gpus).placement) is None


# A run


def run(devices, directory=None, epochs=3, tx=None, **options):
    store = kv.from_params({"w": jnp.zeros((4, 3))}, optimizer=tx or optax.adam(0.05))
    state = train.create_state(store, 3, devices=devices)
    options = {"batch_size": 16, "progress": False, "checkpoint_dir": directory, "test_data": points(32, 1), **options}
    return train.fit(state, train.make_train_step(LOSS), points(160), apply_fn=apply, epochs=epochs, **options)


def same_bits(state, other):
    jax.tree.map(np.testing.assert_array_equal, kv.to_params(state.store), kv.to_params(other.store))


def test_fit_and_resume(gpus, cpus, tmp_path):
    state, history = run(gpus)
    _, expected = run(cpus)
    close([r["loss"] for r in history], [r["loss"] for r in expected], 1e-4)
    run(gpus, tmp_path, epochs=1, checkpoint_every=3)
    resumed, again = run(gpus, tmp_path)
    same_bits(state, resumed)
    assert [r["loss"] for r in again] == [r["loss"] for r in history]
    elsewhere, _ = checkpoint.Manager(tmp_path).restore_latest(run(cpus, epochs=1)[0])  # the GPU's, on CPUs
    assert platforms(elsewhere.params) == {"cpu"}
    same_bits(elsewhere, resumed)


def test_what_is_read_where_implicit_transfers_are_disallowed(gpus, tmp_path):
    state, _ = run(gpus, epochs=1)
    loss = jax.device_put(np.float32(0.5), gpus[0])
    with jax.transfer_guard("disallow"):
        with train.progress(show=False) as bar:
            bar.step({"loss": loss})
        assert bar.means() == {"loss": 0.5}
        checkpoint.save(tmp_path / "one", state)
        manager = checkpoint.Manager(tmp_path / "another")
        manager.save(state)
        manager.close()
        restored, _ = manager.restore_latest(state)
    same_bits(restored, state)


def test_several_steps_in_one_program(gpus):
    (state, history), *others = (run(gpus, steps_per_execution=n) for n in (1, 5, "auto"))
    for other, expected in others:
        close(kv.to_params(state.store), kv.to_params(other.store))
        close([r["loss"] for r in history], [r["loss"] for r in expected])


def test_a_whole_stack_and_its_parts(gpus):
    """They are two programs: one of them knows how many steps there are, and does not ask the host after each."""
    examples = points(32)
    batches = {"image": examples.images.reshape(4, 8, 4), "label": examples.labels.reshape(4, 8)}
    states, losses = [], []
    for spans in ([()], [(0, 1), (1, 4)]):
        state, step = train.start({"w": jnp.zeros((4, 3))}, optax.adam(0.1), LOSS, devices=gpus)
        for span in spans:
            state, metrics = step.many(state, batches, *span)
        states.append(state)
        losses.append(metrics["loss"][3])
    close(states[0].params, states[1].params)
    close(*losses)
    text = step.lower(state, batches, many=True).compile().as_text()
    assert re.search(r'known_trip_count[^}]*"4"', text)


def test_virtual_shards(gpus, cpus):
    (_, metrics), (_, expected) = (lenet_run(devices, virtual_shards=4) for devices in (gpus, cpus))
    close(metrics["loss"], expected["loss"], 1e-4)


def test_evaluation(gpus, cpus):
    params = {"w": whole_numbers(0, 4, 3)}
    states = [train.create_state(kv.from_params(params), 0, devices=devices) for devices in (gpus, cpus)]
    tables = [train.confusion_matrix(state, apply, points(50), batch_size=8) for state in states]
    np.testing.assert_array_equal(*tables)


def test_pictures(gpus):
    state, _ = lenet_run(gpus, steps=1)
    step = train.make_train_step(train.classification_loss(models.lenet.apply))
    batch = {"image": jnp.zeros((16, 28, 28, 1)), "label": jnp.zeros(16, jnp.int32)}
    graph = viz.trace_step(step, state, batch)
    assert graph.memory is not None
    assert graph.memory.peak > 2**20


# CPUs in a process that has a GPU


def test_a_run_on_cpus_beside_a_gpu(gpus):
    few = jax.devices("cpu")[:4]
    state, history = run(few)
    assert platforms(state.params) == platforms(state.store) == {"cpu"}
    assert history[-1]["loss"] < history[0]["loss"]
    state, _ = lenet_run(few, steps=2)
    assert platforms(state.params) == {"cpu"}
    assert platforms(kv.pull(pushed(few, "device"), [3, 5])) == {"cpu"}
    parts = parallel.split_and_load(np.ones((8, 2), np.float32), few)
    assert [next(iter(p.devices())) for p in parts] == few
    x, w = np.ones((2, 9, 9, 4), np.float32), np.ones((3, 3, 4, 8), np.float32)

    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    for device in (gpus[0], few[0]):  # one function, each platform's own code
        found = jax.jit(models.fast_on_cpus(conv))(*jax.device_put((x, w), device))
        np.testing.assert_array_equal(found, jax.jit(conv)(*jax.device_put((x, w), few[0])))


# Other processes


def process(*command):
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=180)


SAY = """
    import sys
    import jaxpar as jp
    if sys.argv[1:]:
        jp.parallel.use_cpu_devices(int(sys.argv[1]))
    else:
        jp.distributed.initialize()
    import jax
    print(jax.process_count(), len(jax.devices()), jax.devices()[0].platform)
"""


def test_emulated_devices_on_a_machine_with_gpus(gpus):
    found = process("-c", textwrap.dedent(SAY), "8")
    assert found.stdout.split() == ["1", "8", "cpu"], found.stderr


def test_launched_processes_share_the_gpus(gpus):
    count = len(visible_gpus(os.environ))
    assert count == len(gpus)
    launch = "-m", "jaxpar", "launch"
    one = process(*launch, "-n", "1", "--", "python", "-c", textwrap.dedent(SAY))
    assert f"1 {count} gpu" in one.stdout, one.stderr
    more = process(*launch, "-n", str(count + 1), "--gpus-per-process", "1", "--", "python", "-c", "pass")
    assert more.returncode == 2
    assert f"need {count + 1}, there " in more.stderr
    cpus = process(*launch, "-n", "2", "--devices", "2", "--", "python", "-c", textwrap.dedent(SAY))
    assert "2 4 cpu" in cpus.stdout, cpus.stderr
