"""`make_train_step(virtual_shards=V)`: the same bits on any number of devices, or an error in words."""

import functools
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import world
from kv_model import collectives_in, on_host
from process_run import dropped
from several_processes import Run

from jaxpar import checkpoint, data, kv, models, train, updaters
from jaxpar._devices.collectives import Deal
from jaxpar._devices.mesh import mesh_of, split_over
from jaxpar.models import transformer
from jaxpar.train._step import virtual

V = 8
ADAM = optax.adam(0.01)
STEP = train.make_train_step(dropped, virtual_shards=V)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(0.01, 20)))


def init():
    rng = np.random.default_rng(0)
    a, b = 0.3 * rng.normal(size=(12, 33)), rng.normal(size=(33, 5))
    return {name: jnp.asarray(x, jnp.float32) for name, x in {"a": a, "b": b, "c": np.zeros(5)}.items()}


def normed(params, batch, rng, seen):
    """A network with batch norm, whose model state has integers and a random key too."""
    hidden = batch["image"] @ params["a"]
    mean, var = hidden.mean(0), hidden.var(0)
    hidden = jnp.tanh((hidden - mean[None]) * jax.lax.rsqrt(var + 1e-5)[None])
    loss = ((hidden @ params["b"] + params["c"][None] - batch["label"][:, None]) ** 2).mean()
    new = {"mean": 0.9 * seen["mean"] + 0.1 * mean, "var": 0.9 * seen["var"] + 0.1 * var, "count": seen["count"] + 1}
    return loss, {}, {**new, "key": jax.random.split(seen["key"])[0]}


def seen():
    return {"mean": jnp.zeros(33), "var": jnp.ones(33), "count": jnp.int32(0), "key": jax.random.key(3)}


def elementwise(params, batch, rng):
    """A loss without a matrix product, which XLA simplifies otherwise in larger programs."""
    error = batch["image"] * params["w"][None] + 0.3 * params["b"][None] - batch["label"][:, None]
    return (error**2).mean(), {}


@functools.cache
def batches(count=3, size=64, shape=(12,), classes=5):
    rng = np.random.default_rng(1)
    return [
        {"image": rng.normal(size=(size, *shape)).astype(np.float32), "label": rng.integers(0, classes, size)}
        for _ in range(count)
    ]


def start(devices, params=None, kind="device", tx=ADAM, **options):
    return world.start(devices, kind, tx, init() if params is None else params, **options)


def everything(state, seen_metrics):
    """The bytes of every array."""
    parts = [getattr(state, k) for k in ("store", "step", "transform", "model_state", "loss_scale")]
    return [x.tobytes() for x in jax.tree.leaves(on_host((parts, seen_metrics)))]


def trained(step, state, given):
    found = []
    for batch in given:
        state, metrics = step(state, batch)
        found.append(metrics)
    return everything(state, found)


def ran(devices, engine, *, loss=dropped, kind="device", tx=ADAM, params=init, seen=tuple, given=batches, **options):
    """The bytes of all that steps return, on so many devices."""
    state = start(devices, params(), kind, tx, model_state=seen())
    return trained(train.make_train_step(loss, virtual_shards=V, engine=engine, **options), state, given())


def with_a_nan():
    first, second, *rest = batches()
    return [first, {**second, "image": np.where(np.arange(64)[:, None] == 40, np.nan, second["image"])}, *rest]


def tokens():
    rng = np.random.default_rng(2)
    return [rng.integers(0, 50, (16, 9)) for _ in range(2)]


SMALL = transformer.Config(layers=2, width=16, heads=2, vocabulary=50, positions=8)
CASES = {
    "clipped": partial(ran, grad_transform=optax.clip_by_global_norm(0.5)),
    "elementwise": partial(ran, loss=elementwise, params=lambda: {"w": jnp.full(12, 0.37), "b": jnp.full(12, 0.11)}),
    "model_state": partial(ran, loss=normed, seen=seen),
    "local": partial(ran, kind="local", tx=optax.sgd(0.1, momentum=0.9)),
    "dist_sync": partial(ran, kind="dist_sync", tx=CLIPPED),
    "accumulate": partial(ran, accumulate=2, remat=True),
    "bfloat16": partial(ran, compute_dtype=jnp.bfloat16, loss_scale=128.0),
    "bfloat16 params": partial(ran, params=lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), init())),
    "skip": partial(ran, nonfinite="skip", given=with_a_nan),
    "stop": partial(ran, nonfinite="stop", loss_scale="dynamic", given=with_a_nan),
    "mxnet": partial(ran, tx=updaters.mxnet_adam(0.01)),
    "lenet": partial(
        ran,
        loss=train.classification_loss(models.lenet.apply),
        tx=optax.sgd(0.2),
        params=lambda: models.lenet.init(jax.random.key(0)),
        given=lambda: batches(2, 64, (28, 28, 1), 10),
    ),
    "transformer": partial(
        ran,
        loss=lambda params, batch, rng: (transformer.loss(params, batch), {}),
        params=lambda: transformer.init(jax.random.key(0), SMALL),
        given=tokens,
    ),
}
PLACES = [(2, "shard_map"), (3, "pmap"), (4, "shard_map"), (5, "shard_map"), (8, "pmap")]


@pytest.mark.slow
@pytest.mark.parametrize("name", world.mostly_slow(CASES, "clipped"))
def test_the_same_bits(name):
    run = CASES[name]
    assert run(3, "pmap") == run(1, "shard_map")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_same_bits_on_any_number(place):
    assert CASES["clipped"](*place) == CASES["clipped"](1, "pmap")


@pytest.mark.slow
def test_on_other_devices():
    """A state goes from one device to three and to eight; the old one is given away at each step."""
    want = trained(STEP, start(1), batches())
    state, found = start(1), []
    for count, batch in zip((1, 3, 8), batches(), strict=True):
        there = STEP.on(jax.devices()[:count])
        assert there.virtual_shards == V
        assert there.devices == tuple(jax.devices()[:count])
        old = there.complete(state)
        state, metrics = there(old, batch)
        assert old.store.values[0].is_deleted()
        assert state.store.devices == there.devices
        found.append(metrics)
    assert everything(state, found) == want


def test_on_a_mesh_is_refused():
    step = train.make_train_step(dropped, mesh=jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match="made for a mesh"):
        step.on(jax.devices()[:1])


# The tree.


def by_hand(terms, first, level):
    if level == 0:
        return terms[first]
    left, middle = by_hand(terms, first, level - 1), first + (1 << level - 1)
    return left if middle >= len(terms) else left + by_hand(terms, middle, level - 1)


@pytest.mark.parametrize(("count", "devices"), [(8, 3), (12, 5), (7, 2), (6, 3), (1, 1), (3, 8)])
def test_the_tree(count, devices):
    """Nodes of neighbours, then the exchange: the sums of a tree over the terms, whoever has them."""
    terms = np.random.default_rng(count).normal(size=(count, 5)).astype(np.float32)
    deal = Deal(count, devices)
    own, most = [], 0
    for rank in range(devices):
        nodes = []
        for i, merges in zip(range(*deal.range_of(rank)), deal.merges[rank], strict=True):
            node = terms[i]
            for _ in range(merges):
                node = nodes.pop() + node
            nodes.append(node)
            most = max(most, len(nodes))
        own.append(np.array([*nodes, *[np.full(5, np.nan, np.float32)] * (deal.kept - len(nodes))]))
    run = virtual.exchange(deal, mesh_of(jax.devices()[:devices]))
    rows = [[np.stack([each[k] for each in own])] for k in range(deal.kept)]
    (total,), _ = run(jax.device_put(rows, split_over(tuple(jax.devices()[:devices]))), [])
    np.testing.assert_array_equal(total, by_hand(terms, 0, (count - 1).bit_length()), strict=True)
    assert most <= 2 * deal.slots.bit_length()
    assert devices > 1 or most <= max(1, (count - 1).bit_length())  # never all gradients at once


@pytest.mark.parametrize(
    ("devices", "size", "want"),
    [
        (4, 100_000, [("all-to-all", 400_000), ("all-gather", 400_000)]),
        (3, 99_999, [("all-to-all", 2 * 399_996), ("all-gather", 399_996)]),  # two nodes a device
        (2, 100_000, [("all-gather", 800_000)]),
        (8, 1000, [("all-gather", 32_000)]),
        (1, 1000, []),
    ],
)
def test_what_is_exchanged(devices, size, want):
    """Two exchanges of the size of the params at most, and for small params one gather."""
    devices = jax.devices()[:devices]
    deal = Deal(V, len(devices))
    node = jax.ShapeDtypeStruct((len(devices), size), np.float32, sharding=split_over(tuple(devices)))
    program = virtual.exchange(deal, mesh_of(devices))
    found = collectives_in(program.lower([[node]] * deal.kept, []).compile().as_text())
    assert sorted(found) == sorted(want)


# Data.


DATASET = data.Dataset(np.random.default_rng(5).normal(size=(200, 12)).astype(np.float32), np.arange(200) % 5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("resident", [True, False])
def test_padded_batches(resident):
    rng, devices = jax.random.key(1), jax.devices()[:3]
    padded = data.batches(DATASET, 64, rng=rng, devices=devices, virtual_shards=V, resident=resident)
    for mine, want in zip(padded, data.batches(DATASET, 64, rng=rng), strict=True):
        assert isinstance(mine, data.PaddedBatch)
        assert mine["image"].shape == (72, 12)
        assert mine["image"].sharding.is_equivalent_to(split_over(tuple(devices)), 2)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:64], b), mine.arrays, want)
    even = data.batches(DATASET, 64, devices=jax.devices()[:4], virtual_shards=V, resident=resident)
    assert next(even)["image"].shape == (64, 12)


def fitted(devices, given, step, **options):
    state, history = train.fit(start(devices), step, given, batch_size=64, progress=False, **{"epochs": 2, **options})
    return everything(state, []), [(r["loss"], r["accuracy"]) for r in history]


@pytest.mark.slow
def test_fit_on_any_number():
    """Data sets, arrays and loaders; the epoch's every example once, whatever the padding."""
    want = fitted(1, DATASET, STEP)
    assert fitted(3, DATASET, STEP) == want
    arrays = data.from_arrays({"image": DATASET.images, "label": DATASET.labels})
    assert fitted(3, arrays, STEP) == fitted(2, arrays, STEP) == want
    loader = data.from_iterable([(DATASET.images[i : i + 64], DATASET.labels[i : i + 64]) for i in (0, 64)])
    assert fitted(1, loader, STEP) == fitted(3, loader, STEP) != want


@pytest.mark.slow
def test_resumed_on_other_numbers(tmp_path):
    for epochs, devices in ((1, 1), (2, 3), (3, 8)):
        found, _ = fitted(devices, DATASET, STEP, epochs=epochs, checkpoint_dir=tmp_path)
    assert found == fitted(2, DATASET, STEP, epochs=3)[0]


@pytest.mark.slow
def test_lr_find():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    found = [train.lr_find(start(n, tx=tx), STEP, DATASET, batch_size=64, steps=3).losses for n in (1, 3)]
    assert found[0] == found[1]


# Refused.


SGD, CODES = optax.sgd(0.1), {"type": "2bit", "threshold": 0.5}


def spread():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    return train.create_state(kv.from_params(init(), optimizer=ADAM, mesh=mesh), 7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: start(2, tx=SGD, compression=CODES), "a compressor keeps a residual for each device"),
        (lambda: start(2, tx=SGD, kind="dist_async"), "pending pushes of a store of staleness"),
        (lambda: start(2, kind="sharded"), "kind 'sharded' each device updates a share"),
        (spread, "virtual_shards=8 fixes the order of sums"),
    ],
)
def test_stores_that_are_refused(state, words):
    given = state()
    with pytest.raises(ValueError, match=words):
        STEP(given, batches()[0])
    assert not given.store.values[0].is_deleted()


def test_batches_that_are_refused():
    step, state = train.make_train_step(dropped, virtual_shards=V, accumulate=3), start(3)
    for size in (44, 64):
        with pytest.raises(ValueError, match="cannot be cut in 8 virtual shards"):
            step(state, jax.tree.map(lambda x, size=size: x[:size], batches()[0]))
    with pytest.raises(ValueError, match="padded for 4 virtual shards"):
        step(state, data.PaddedBatch(batches()[0], 4))
    with pytest.raises(ValueError, match="several programs"):
        step.many(state, jax.tree.map(lambda x: np.stack([x[:48]] * 2), batches()[0]))
    with pytest.raises(ValueError, match="cannot run inside jit or grad; call it outside"):
        jax.jit(step)(state, batches()[0])
    with pytest.raises(ValueError, match="a batch of 44 cannot be divided by 8 virtual shards"):
        data.batches(DATASET, 44, virtual_shards=V)
    with pytest.raises(ValueError, match="a batch of 8 cannot be divided by 16 virtual shards"):
        data.batches(DATASET, 64, virtual_shards=16, drop_remainder=False)
    with pytest.raises(ValueError, match="a step with virtual_shards is several programs"):
        fitted(3, DATASET, step, steps_per_execution=2)


def test_a_collective_in_the_loss_is_refused():
    def loss(params, batch, rng):
        loss, aux = dropped(params, batch, rng)
        return jax.lax.pmean(loss, "data"), aux

    with pytest.raises(ValueError, match="loss_fn has a collective"):
        train.make_train_step(loss, virtual_shards=V)(start(2), batches()[0])


@pytest.mark.slow
def test_a_source_that_cannot_pad_is_refused():
    class Own:
        def examples(self, batch_size):
            return 128

        def batches(self, batch_size, *, rng=None, epochs=1, start=0, devices=None):
            return data.batches(DATASET, batch_size, rng=rng, epochs=epochs, start=start, devices=devices)

    with pytest.raises(TypeError, match="takes no virtual_shards="):
        fitted(3, Own(), STEP)
    assert fitted(2, Own(), STEP)[1]


# Processes.


def check_split(folder, devices):
    """A state that processes had parts of has the hash that it has in one process, where its checkpoint is restored."""
    header, *lines = map(json.loads, (folder / "split.jsonl").read_text().splitlines())
    assert (header["devices"], header["kind"]) == (devices, "sharded")
    assert [entry["step"] for entry in lines] == [2, 4, 6, 8]
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
    params = {"a": jnp.zeros((300, 80)), "b": jnp.zeros((80, 5)), "c": jnp.zeros(5)}
    like = train.create_state(kv.from_params(params, optimizer=tx), 0)
    for entry, path in zip(lines[1::2], sorted((folder / "split").glob("step_*")), strict=True):
        assert str(checkpoint._StateHash(checkpoint.restore(path, like))) == entry["state"]


@pytest.mark.slow
def test_in_any_number_of_processes(tmp_path):
    """One process with four devices, three with one each: the same bits. Two are in test_elastic_stops.py."""
    found, certificates = [], set()
    for processes, devices in ((1, 4), (3, 1)):
        with Run("process_run.py", tmp_path / f"{processes}x{devices}", processes, devices, "virtual") as run:
            run.wait()
            found += [run.saved(f"process{i}.npz") for i in range(processes)]
            certificates.add((run.folder / "run.jsonl").read_text().partition("\n")[2])
            check_split(run.folder, devices * processes)
    assert len(certificates) == 1
    assert certificates.pop().count("state") == 6
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, value in found[0].items():
            np.testing.assert_array_equal(other[name], value, err_msg=name, strict=True)
