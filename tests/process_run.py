"""What each of several processes runs for tests/devices/test_processes.py: phases, named on the command line.

    python process_run.py HOST:PORT PROCESSES PROCESS FOLDER PHASE...

What the processes have to agree on is asserted here; what the topologies have to agree on is written to FOLDER.
"""

import dataclasses
import functools
import os
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.multihost_utils import process_allgather as gathered
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from several_processes import run_phases, stays_after

from jaxpar import checkpoint, data, distributed, kv, models, parallel, sparse, train, updaters
from jaxpar._core import checks
from jaxpar._devices import mesh
from jaxpar._devices.mesh import split_over
from jaxpar.checkpoint import _arrays, _files

jax.config.update("jax_numpy_rank_promotion", "raise")

TWO_BIT = {"type": "2bit", "threshold": 0.02}
STEPS = 6  # of a small run: two epochs of three


def linear(params, images):
    return images.reshape(images.shape[0], -1) @ params["w"] + params["b"][None]


def looked_up(params, batch):
    return ((params["table"][batch["id"]] @ params["w"] - batch["x"]) ** 2).mean()


LENET, LINEAR = train.classification_loss(models.lenet.apply), train.classification_loss(linear)
SMALL_STEP, ADAM = train.make_train_step(LINEAR), optax.adam(0.01)  # of all small runs, so that they share programs


def counted(params, batch, rng):
    """A mean over what counts: not over all examples, and not as many in each share."""
    each = train.cross_entropy(linear(params, batch["image"]), batch["label"])
    weight = batch["label"]
    return ((each * weight).sum(), weight.sum()), {"nats": ((each * weight).sum(), weight.sum())}


def images(side, count, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, side, side, 1)).astype(np.uint8)
    return data.Dataset(pixels, pixels.reshape(count, -1).sum(1) % 10)


def raises(kind, words, function):
    with pytest.raises(kind) as caught:
        function()
    assert words in str(caught.value)


def on_each(value):
    return [jax.device_put(value, d) for d in jax.local_devices()]


# The store.


def check_init(kind):
    """The value of process 0 counts; keys and shapes must be those of all."""
    rank = kv.rank()
    store = kv.init(kv.create(kind), [3, 5], [jnp.full((2, 3), 7.0 + rank), jnp.arange(4) + rank])
    assert kv.pull(store, 3).tolist() == [[7.0] * 3] * 2
    assert kv.pull(store, 5).tolist() == [0, 1, 2, 3]
    if kv.num_workers() > 1:
        wrong = lambda: kv.init(store, 20 + rank, jnp.ones(2))  # noqa: E731
        raises(ValueError, "process 0: key 20 float32[2], process 1: key 21 float32[2]", wrong)
    return store


def check_push(kind, store):
    """Values of this process's devices, lists of any length, single ones: the sum over all, in every process."""
    rank, workers, each = kv.rank(), kv.num_workers(), jax.local_device_count()
    ranks = sum(range(workers))
    store = kv.push(store, [5, 3], [jnp.arange(4) * rank, on_each(jnp.full((2, 3), 1.0 + rank))])
    assert kv.pull(store, 5).tolist() == (np.arange(4) * ranks).tolist()
    for copy in kv.pull(store, 3, devices=jax.local_devices()):
        assert copy.tolist() == [[each * (workers + ranks)] * 3] * 2
    store = kv.push(store, 3, [jnp.ones((2, 3))] * (rank + 1))  # another number of values in each process
    assert kv.pull(store, 3).tolist() == [[workers + ranks] * 3] * 2
    calls = []
    plain = kv.set_updater(store, lambda key, pushed, stored: (calls.append(key), stored - pushed)[1])
    plain = kv.push(plain, [5, 3], [jnp.arange(4), on_each(jnp.ones((2, 3)))])
    assert calls == [3, 5]
    assert kv.pull(plain, 3).tolist() == [[ranks + workers - workers * each] * 3] * 2
    adam = kv.set_optimizer(store, optax.adam(0.1))
    for _ in range(2):
        adam = kv.push(adam, 3, on_each(jnp.ones((2, 3)) * rank))
    everywhere = jax.device_get(kv.pull(adam, 3))
    assert all(np.array_equal(everywhere, other) for other in gathered(everywhere))
    return np.asarray(everywhere)


def check_wrong_pushes(kind, store):
    rank = kv.rank()
    value = jnp.ones((2, 3)) if rank == 0 else jnp.ones(4, jnp.int32)
    words = "every process must push the same keys, in the same shapes; process 0: key 3 float32[2,3], process 1: key 5"
    raises(ValueError, words, lambda: kv.push(store, 5 if rank else 3, value))
    total = kv.place(store, jax.devices())
    raises(ValueError, "key 3: this value is on devices of several", lambda: kv.push(store, 3, total.values[3]))
    nothing = lambda: kv.push(store, 3, [jnp.ones((2, 3))][:rank])  # noqa: E731
    raises(ValueError, "process 0: no key, process 1: key 3", nothing)
    adam = kv.from_params({"w": jnp.ones(2)}, kind=kind, optimizer=optax.adam(0.1))
    nothing = lambda: kv.push(adam, 0, [jnp.ones(2)][:rank])  # noqa: E731
    raises(ValueError, "process 0: no key, process 1: key 0", nothing)
    rows = sparse.RowSparse(np.arange(1), jnp.ones((1, 3)), (2, 3))
    mixed = lambda: kv.push(store, 3, rows if rank else value)  # noqa: E731
    raises(ValueError, "process 1: key 3 float32[2,3], of keys [3] rows", mixed)
    assert kv.push(store, [], []) == store
    words = "different barriers; process 0: barrier 0, process 1: barrier 1"
    raises(ValueError, words, lambda: kv.barrier(f"barrier {rank}"))
    there = next(d for d in jax.devices() if d.process_index != rank)
    for function in (
        lambda: kv.pull(store, 3, devices=[there]),
        lambda: kv.row_sparse_pull(store, 3, [0], devices=[there]),
        lambda: parallel.split_and_load(jnp.ones(2), [there]),
        lambda: parallel.copy_to(jnp.ones(2), there),
    ):
        raises(ValueError, f"belongs to process {there.process_index} and this is process {rank}", function)


def check_compressed(kind):
    """What each process sends is its own sum, compressed; what was lost is sent later."""
    store = kv.set_gradient_compression(kv.create(kind), {"type": "2bit", "threshold": 0.5})
    store = kv.init(store, 9, jnp.zeros(100))
    sums = []
    for _ in range(4):
        store = kv.push(store, 9, [jnp.full(100, 0.25), jnp.full(100, 0.125)])
        sums.append(float(kv.pull(store, 9)[50]))
    assert sums == [0.0, 0.5 * kv.num_workers(), 0.5 * kv.num_workers(), 0.5 * kv.num_workers()]
    assert jax.tree.leaves(store.residuals[9])[0].shape[0] == kv.num_workers()
    signs = kv.init(kv.set_gradient_compression(kv.create(kind), {"type": "int3"}), 9, jnp.zeros(100))
    signs = kv.push(signs, 9, [jnp.full(100, 0.25), jnp.full(100, 0.125)])
    assert kv.pull(signs, 9).tolist() == [0.375 * kv.num_workers()] * 100  # of equal elements a sign is all


def check_rows(kind):
    """Rows, another number in each process; process r has rows 0 to r."""
    rank, workers = kv.rank(), kv.num_workers()
    store = kv.set_updater(kv.init(kv.create(kind), 0, jnp.zeros((6, 2))), updaters.accumulate)
    rows = sparse.RowSparse(np.arange(rank + 1), jnp.ones((rank + 1, 2)), (6, 2))
    store = kv.push(store, 0, [rows, rows])
    assert kv.pull(store, 0)[:, 1].tolist() == [2.0 * max(0, workers - row) for row in range(6)]
    assert kv.row_sparse_pull(store, 0, jnp.array([1])).values.tolist() == [[2.0 * (workers - 1)] * 2]


def check_mapped(kind):
    """Inside pmap and shard_map, and a push at the prompt to a store on all devices."""
    everywhere, mine = jax.devices(), jax.local_device_count()
    store = kv.init(kv.create(kind), 5, jnp.zeros(4))
    shares = jnp.full((mine, 4), 1.0 + kv.rank())
    total = [float(sum(1 + d.process_index for d in everywhere))] * 4
    push = lambda store, share: kv.push(store, 5, share, axis_name="i")  # noqa: E731
    pushed = jax.pmap(push, "i", in_axes=(None, 0), out_axes=None)(store, shares)
    assert kv.pull(pushed, 5).tolist() == total
    for engine in checks.ENGINES:
        run = parallel.spmd(push, engine=engine, axis_name="i", devices=everywhere, in_axes=(None, 0), out_axes=None)
        assert kv.pull(run(store, shares), 5).tolist() == total, engine
    raises(ValueError, f"one entry for each of the {mine} devices", lambda: run(store, jnp.ones((mine + 1, 4))))
    spread = kv.place(store, everywhere)
    specs = kv.partition_specs(spread, "i")
    mesh = Mesh(np.array(everywhere), ("i",))
    rows = [jax.device_put(shares[:1], d) for d in jax.local_devices()]
    batch = jax.make_array_from_single_device_arrays((len(everywhere), 4), NamedSharding(mesh, P("i")), rows)
    body = lambda store, x: push(store, x[0])  # noqa: E731
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, P("i")), out_specs=specs, check_vma=False)
    assert kv.pull(jax.jit(mapped)(spread, batch), 5).tolist() == total
    spread = kv.push(spread, 5, jnp.ones(4))
    assert len(spread.values[5].sharding.device_set) == len(everywhere)
    assert kv.pull(spread, 5).tolist() == [kv.num_workers()] * 4
    assert all(v.tolist() == [kv.num_workers()] * 4 for v in kv.pull(spread, 5, devices=jax.local_devices()))
    assert repr(spread)


def check_large_scatter():
    """A reduce-scatter of 6 MiB a device, of a length that no number of devices divides, as in jax issue 40830."""
    size = 3 * jax.device_count() * (1 << 19) + 3
    value = np.float32(np.arange(size) % 1021)  # whole numbers, so that the sum is exact
    mesh = Mesh(np.array(jax.devices()), ("i",))
    store = kv.place(kv.init(kv.create("sharded"), 0, jnp.zeros(size)), jax.devices())
    specs = kv.partition_specs(store, "i")

    def body(store):
        return kv.push(store, 0, value * (1 + jax.lax.axis_index("i")), axis_name="i")

    pushed = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False))(store)
    np.testing.assert_array_equal(kv.pull(pushed, 0), value * sum(range(1, jax.device_count() + 1)))


def store(folder):
    results = {}
    for kind in ("dist_sync", "dist_device_sync"):
        results[kind] = check_push(kind, check_init(kind))
        check_rows(kind)
        check_mapped(kind)
        if kv.num_workers() > 1:
            check_compressed(kind)
            check_wrong_pushes(kind, check_init(kind))
    assert np.array_equal(results["dist_sync"], results["dist_device_sync"])
    check_large_scatter()


# Training.


def new_state(kind, compression=None, lenet=False):
    """Drawn from another rng in each process: process 0's counts."""
    rng = jax.random.key(kv.rank())
    if lenet:
        params, tx = models.lenet.init(rng), optax.sgd(0.1, momentum=0.9)
    else:
        params, tx = {"w": jax.random.normal(rng, (64, 10)) * 0.1, "b": jnp.zeros(10)}, ADAM
    spec = compression or {"type": "none"}
    made = kv.set_gradient_compression(kv.from_params(params, kind=kind, optimizer=tx), spec)
    return train.create_state(made, 3 + kv.rank())


def numbers(name, state):
    leaves = jax.tree_util.tree_flatten_with_path(kv.to_params(state.store))[0]
    return {f"{name}{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}


def training(folder):
    """Parameters and scores of a few runs; the same in every process."""
    found = {}
    for engine, kind, lenet in (
        ("pmap", "dist_sync", True),
        ("shard_map", "sharded", False),
        ("shard_map", "device", False),
        ("pmap", "sharded", False),
    ):
        step = train.make_train_step(LENET if lenet else LINEAR, engine=engine)
        apply_fn, side = (models.lenet.apply, 28) if lenet else (linear, 8)
        options = {"epochs": 1 if lenet else 2, "batch_size": 8, "progress": False}
        options |= {"test_data": images(side, 13, seed=1), "apply_fn": apply_fn}
        state, history = train.fit(new_state(kind, lenet=lenet), step, images(side, 24), **options)
        name = f"{engine} {kind} {'lenet' if lenet else 'linear'}"
        found |= numbers(name, state)
        scores = np.float32([history[-1][n] for n in ("loss", "accuracy", "test_loss", "test_accuracy")])
        assert all(np.array_equal(scores, other) for other in gathered(scores)), name
        found[name] = scores
        if not lenet:
            test = images(side, 13, seed=1)
            classes = train.predict(state, apply_fn, test, batch_size=8).argmax(1)
            assert (classes == test.labels).mean() == pytest.approx(scores[3]), name
    for kind in ("device", "sharded"):
        step = train.make_train_step(counted)
        options = {"epochs": 2, "batch_size": 8, "progress": False}
        state, history = train.fit(new_state(kind), step, images(8, 24), **options)
        assert history[-1]["loss"] == pytest.approx(history[-1]["nats"], rel=1e-6)
        found |= numbers(f"counted {kind}", state) | {f"counted {kind}": np.float32(history[-1]["loss"])}
    # A table by its rows. The processes look up other rows, and one row several times.
    pairs = {"id": np.arange(24, dtype=np.int32) * 7 % 10, "x": np.linspace(0, 1, 24, dtype=np.float32)}
    for kind in ("dist_sync", "sharded"):
        params = {"table": jnp.linspace(0.0, 1.0, 20).reshape(10, 2), "w": jnp.ones(2)}
        state, step = train.start(params, optax.sgd(0.05), looked_up, kind=kind, row_sparse="table")
        state, history = train.fit(state, step, pairs, epochs=2, batch_size=8, progress=False)
        found |= numbers(f"rows {kind}", state) | {f"rows {kind}": np.float32(history[-1]["loss"])}
    check_batches()
    if kv.num_workers() > 1:
        check_refused()
        check_data_refused()
    if kv.rank() == 0:
        np.savez(folder / "training.npz", **found)


def compressed(folder):
    """Parameters and residuals of runs whose codes are summed as integers: to the bit, whatever the processes."""
    found = {}
    for engine, spec in (("shard_map", {"type": "int3"}), ("pmap", {"type": "int3"}), ("shard_map", TWO_BIT)):
        step = train.make_train_step(LINEAR, engine=engine)
        state = new_state("device", spec)
        state, _ = train.fit(state, step, images(8, 24), epochs=2, batch_size=8, progress=False)
        name = f"{engine} {spec['type']}"
        found |= numbers(name, state)
        leaves = jax.tree.leaves(state.store.residuals)
        residuals = [np.asarray(gathered(leaf, tiled=True)) for leaf in leaves]  # whole, in every process
        assert any(residual.any() for residual in residuals), name
        found |= {f"{name} residual {i}": residual for i, residual in enumerate(residuals)}
    if kv.rank() == 0:
        np.savez(folder / "compressed.npz", **found)


def dropped(params, batch, rng):
    """A network with dropout, which tests/train/test_virtual_shards.py has too."""
    hidden = jax.nn.gelu(batch["image"] @ params["a"])
    hidden = hidden * jax.random.bernoulli(rng, 0.9, hidden.shape)
    logits = (hidden @ params["b"] + params["c"][None]).astype(jnp.float32)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(1) == batch["label"]).mean()}


def virtual(folder):
    """`fit` with a step of virtual shards; and of a state of which each device has a part, certified and saved."""
    draw = np.random.default_rng(0)
    given = data.Dataset(draw.normal(size=(200, 300)).astype(np.float32), np.arange(200) % 5)
    params = {"a": draw.normal(size=(300, 80)) * 0.1, "b": np.zeros((80, 5)), "c": np.zeros(5)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))

    def fitted(kind, shards, **options):
        state = train.create_state(kv.from_params(params, kind=kind, optimizer=tx), 7)
        step = train.make_train_step(dropped, virtual_shards=shards)
        return train.fit(state, step, given, epochs=2, progress=False, **options)

    state, history = fitted("dist_sync", 8, batch_size=64, certificate=folder / "run.jsonl", certificate_every=1)
    leaves = jax.tree.leaves((state.store.values, state.store.optimizer_state, state.step))
    found = {str(i): np.asarray(x.addressable_data(0)) for i, x in enumerate(leaves)}
    found["loss"] = np.array([record["loss"] for record in history])
    np.savez(folder / f"process{kv.rank()}.npz", **found)
    certified = {"certificate": folder / "split.jsonl", "certificate_every": 2, "checkpoint_dir": folder / "split"}
    fitted("sharded", None, batch_size=48, **certified)


def tokens_of(pixels):
    return {"x": pixels.images.reshape(len(pixels), -1) / np.float32(255), "label": pixels.labels}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Count:
    """A metric that is merged: how many rows there were, and the largest sum of one."""

    rows: jax.Array
    largest: jax.Array

    def merge(self, other):
        return Count(self.rows + other.rows, np.maximum(self.largest, other.largest))

    def compute(self):
        return {"rows": self.rows, "largest": self.largest}


def sums_of_batches(params, batch):
    nats = train.cross_entropy(linear(params, batch["x"]), batch["label"]).sum()
    return {"nats": (nats, len(batch["x"])), "count": Count(jnp.float32(len(batch["x"])), batch["x"].sum(1).max())}


def values_of_rows(params, batch):
    nats = train.cross_entropy(linear(params, batch["x"]), batch["label"])
    return {"nats": nats, "pair": (nats * 2, nats > -1), "perplexity": train.Mean(nats, nats > -1, np.exp)}


def evaluation(folder):
    """Any source gives the numbers of NumPy in every process: the same arrays, or batches of each process's own."""
    workers, rows = kv.num_workers(), tokens_of(images(8, 23, seed=2))
    uneven = [23 - (workers - 1) * 3] + [3] * (workers - 1)  # the first process has more batches than the others

    def share(most=4):
        """This process's batches, of its part of the rows."""
        first, last = sum(uneven[: kv.rank()]), sum(uneven[: kv.rank() + 1])
        return [jax.tree.map(lambda x, at=at: x[at : min(at + most, last)], rows) for at in range(first, last, most)]

    for kind in ("dist_sync", "sharded"):
        state = new_state(kind)
        params = jax.tree.map(np.asarray, kv.to_params(state.store))
        logits = rows["x"] @ params["w"] + params["b"]
        nats = (np.log(np.exp(logits).sum(1)) - logits[np.arange(23), rows["label"]]).mean()
        want = {"nats": nats, "pair": 2 * nats, "perplexity": np.exp(nats)}
        for source in (rows, share(), lambda: iter(share(5))):
            found = train.evaluate(state, data=source, eval_fn=values_of_rows, batch_size=8)
            assert found == {k: pytest.approx(v, rel=1e-5) for k, v in want.items()}
            found = np.float32(list(found.values()))
            assert all(np.array_equal(found, other) for other in gathered(found))
        found = train.evaluate(params, data=rows, eval_fn=values_of_rows, batch_size=7)
        assert found == {k: pytest.approx(v, rel=1e-5) for k, v in want.items()}  # each process by itself
        want = {"nats": nats, "count_rows": 23, "count_largest": rows["x"].sum(1).max()}
        for source in (rows, share(), lambda: iter(share(5))):  # without the rows that fill up a batch
            found = train.evaluate(state, data=source, eval_fn=sums_of_batches, batch_size=8)
            assert found == {k: pytest.approx(v, rel=1e-5) for k, v in want.items()}
    if workers > 1:
        check_batches_refused(state, share())


def check_batches_refused(state, mine):
    """In every process, before any of them waits for another."""

    def evaluate(source, eval_fn=values_of_rows):
        return train.evaluate(state, data=source, eval_fn=eval_fn, batch_size=8)

    nothing = iter(mine[: 1 - kv.rank()])
    raises(ValueError, "each process must have batches; they have", lambda: evaluate(nothing))
    raises(ValueError, "the order of all examples is unknown", lambda: train.predict(state, linear, mine, batch_size=8))
    wide = [{**part, "x": part["x"][:, : 64 - kv.rank()]} for part in mine]
    raises(ValueError, "all processes must have the same arrays", lambda: evaluate(wide))

    def broken():
        yield mine[0]
        if kv.rank():
            raise KeyError("only here")
        yield mine[0]

    raises(KeyError, "only here", lambda: evaluate(broken))
    whole = [jax.tree.map(lambda x: mesh.put(x, split_over(tuple(jax.devices()))), tokens_of(images(8, 8)))]
    raises(ValueError, "each process gives its own share", lambda: evaluate(whole))


def check_data_refused():
    """Data that are not the same in each process, or batches of which one has fewer, in `fit` and `evaluate`."""
    pairs = tokens_of(images(8, 24))
    least = lambda n: jax.tree.map(lambda x: x[: n - kv.rank()], pairs)  # noqa: E731
    other = jax.tree.map(lambda x: x + kv.rank(), pairs)
    fewer = [jax.tree.map(lambda x: x[:4], pairs)] * (5 - kv.rank())
    state, step = new_state("device"), train.make_train_step(lambda *_: None)
    for given, words in (
        (least(24), "fit: train_data: every process must give the same arrays"),
        (least(23), "fit: train_data: every process must give the same arrays"),
        (other, "fit: train_data: every process must give the same arrays"),
        (fewer, "fit: every process must have as many batches in an epoch; process 0: 5"),
    ):
        options = {"epochs": 1, "batch_size": 4 * kv.num_workers() if given is fewer else 8}
        raises(ValueError, words, functools.partial(train.fit, state, step, given, **options))
    state = train.create_state(state.store, 0, devices=jax.devices())
    evaluate = lambda: train.evaluate(state, data=least(20), eval_fn=values_of_rows)  # noqa: E731
    raises(ValueError, "evaluate: every process must give the same arrays", evaluate)


def check_refused():
    """A store that is on devices of several processes is pushed to inside a program only."""
    values = [jax.device_put(np.ones(10, np.float32), device) for device in jax.local_devices()]
    for kind in ("sharded", "device"):
        store = kv.set_updater(new_state(kind).store, updaters.accumulate)
        store = train.create_state(store, 0, devices=jax.devices()).store
        words = f"key 0: this store of kind '{kind}' is on devices of several processes"
        raises(ValueError, words, lambda store=store: kv.push(store, 0, values))
    there = [d for d in jax.devices() if d.process_index != kv.rank()][:1]
    words = "the given devices all belong to other processes"
    raises(ValueError, words, lambda: kv.from_params({"w": np.zeros(3)}, devices=there))


def check_batches():
    """Each process has its own part, from a data set on the devices and from one that streams."""
    devices, rng = jax.devices(), jax.random.key(0)
    for resident in (True, False):
        options = {"rng": rng, "devices": devices, "resident": resident}
        batch = next(iter(data.batches(images(8, 24), 8, **options)))
        parts = batch["label"].addressable_shards
        assert len(parts) == jax.local_device_count()
        whole = next(iter(data.batches(images(8, 24), 8, rng=rng)))["label"]
        for part in parts:
            assert part.data.tolist() == whole[part.index].tolist()


# Checkpoints.


def small_run(directory, **options):
    state = new_state("sharded", TWO_BIT)
    return train.fit(state, SMALL_STEP, images(8, 24), epochs=2, batch_size=8, checkpoint_dir=directory, **options)


def keep(file, state, history):
    arrays = numbers("", state)  # of a sharded store: all processes give their part
    if kv.rank() == 0:
        np.savez(file, losses=[record["loss"] for record in history], **arrays)


def undisturbed(folder):
    state, history = small_run(folder / "undisturbed", metrics_file=folder / "metrics.jsonl")
    assert int(state.step) == STEPS
    keep(folder / "undisturbed.npz", state, history)


def killed(folder):
    """Saves after step 2, and never gets further than step 3."""
    small_run(folder / "run", checkpoint_every=2, progress=False, on_step=stays_after(2))


def resumed(folder):
    state, history = small_run(folder / "run", checkpoint_every=2, progress=False, resume=True)
    assert int(state.step) == STEPS
    keep(folder / "resumed.npz", state, history)


class LastStops:
    """A callback with a memory that asks to stop in the last process only, within an epoch."""

    def init(self, state):
        return {"steps": np.zeros(STEPS)}

    def on_step(self, memory, step, metrics):
        return {"steps": memory["steps"] + np.eye(STEPS)[step - 1]}

    def on_epoch(self, memory, state, record):
        assert memory["steps"].sum() == record["step"]
        return memory, kv.rank() == kv.num_workers() - 1 and record["step"] == 4


def callbacks(folder):
    """All processes stop after the same step, keep the same best and go on with the same memories."""
    options = {"progress": False, "eval_every": 2, "callbacks": [train.KeepBest("loss"), LastStops()]}
    for _ in range(2):  # the second call finds that it is over
        state, history = small_run(folder / "stops", **options)
        assert [(r["step"], r.get("interrupted")) for r in history] == [(2, None), (3, None), (4, True)]
        assert int(state.step) == 4
    best = min(history, key=lambda record: record["loss"])["step"]
    assert checkpoint.best(folder / "stops").name == f"step_{best:08d}"
    found, _ = checkpoint.Manager(folder / "stops").restore_best(new_state("sharded", TWO_BIT))
    assert int(found.step) == best
    whole, records = small_run(folder / "whole", progress=False, callbacks=train.EarlyStopping("loss", patience=1))
    options = {"progress": False, "callbacks": train.EarlyStopping("loss", patience=1)}
    for most in (2, 5, STEPS):
        parts, pieces = small_run(folder / "parts", max_steps=most, **options)
    for name, value in numbers("", whole).items():
        np.testing.assert_array_equal(numbers("", parts)[name], value)
    assert [r["loss"] for r in pieces] == [r["loss"] for r in records]
    broken_evaluation(folder)


def broken_evaluation(folder):
    """An evaluation that one process cannot read costs no steps in any: the same call evaluates first."""
    looks, made = [], []

    def rows():
        looks.append(1)
        if len(looks) == 1 and kv.rank() == kv.num_workers() - 1:
            raise OSError("only here")
        yield tokens_of(images(8, 4))

    options = {"eval_data": rows, "eval_fn": lambda params, batch: {"sum": batch["x"].sum(1)}, "progress": False}
    raises(OSError, "only here", lambda: small_run(folder / "broken", **options))
    state, history = small_run(folder / "broken", **options, on_step=lambda step, metrics: made.append(step))
    straight, expected = small_run(folder / "straight", **options)
    assert made == list(range(STEPS // 2 + 1, STEPS + 1))
    assert [r["loss"] for r in history] == [r["loss"] for r in expected]
    for name, value in numbers("", straight).items():
        np.testing.assert_array_equal(numbers("", state)[name], value)


def failures(folder):
    """A checkpoint that process 0 cannot write, or that one process cannot read, is an error in every process."""
    state, rank = new_state("sharded"), kv.rank()
    last, before = kv.num_workers() - 1, "" if rank == 0 else "process 0: "
    good = folder / "good"
    checkpoint.save(good, state)
    raises(FileExistsError, f"{before}checkpoint.save: {good} exists", lambda: checkpoint.save(good, state))
    again = checkpoint.restore(good if rank == 0 else None, new_state("device"))
    assert kv.to_params(again.store)["w"].tolist() == kv.to_params(state.store)["w"].tolist()
    raises(FileNotFoundError, "there is nothing at", lambda: checkpoint.restore(folder / "nothing", state))
    local = {"w": jnp.arange(3.0), "key": jax.random.key(rank), "list": np.arange(2)}  # on the devices of each process
    own = Mesh(np.array(jax.local_devices()), ("x",))
    shards = np.arange(6.0, dtype=np.float32).repeat(own.size).reshape(6, -1)
    local["shards"] = jax.device_put(shards, NamedSharding(own, P(None, "x")))
    checkpoint.save(folder / "local", local)
    restored = checkpoint.restore(folder / "local", local)
    assert restored["w"].tolist() == [0.0, 1.0, 2.0]
    assert restored["shards"].tolist() == shards.tolist()
    manager = checkpoint.Manager(folder / "lost")
    manager.save(state)
    manager.wait()
    write = _files.write

    def full(*args):
        raise OSError(28, "No space left on device")

    _files.write = full  # fails in the background thread of process 0, which alone writes
    manager.save(state)
    raises(OSError, f"{before}[Errno 28] No space left", lambda: manager.save(state))
    raises(OSError, f"{before}[Errno 28] No space left", lambda: checkpoint.save(folder / "full", state))
    _files.write = write
    manager.save(state)
    manager.close()

    def fails(state, record):
        if rank == last:
            raise KeyError("only here")

    words = "only here" if rank == last else f"process {last}: 'only here'"
    raises(KeyError, words, lambda: small_run(folder / "callback", progress=False, callbacks=fails))

    def leaves(state, record):
        if rank == last:
            sys.exit(3)

    kind, words = (SystemExit, "3") if rank == last else (RuntimeError, f"process {last}: sys.exit(3)")
    raises(kind, words, lambda: small_run(folder / "leaves", progress=False, callbacks=leaves))
    ends = lambda state, record: rank == last  # noqa: E731
    state, history = small_run(folder / "ends", progress=False, callbacks=ends)
    assert (len(history), int(state.step)) == (1, STEPS // 2)
    if rank == 0:  # the newest one is damaged: all take the one before
        newest = max((folder / "ends").glob("step_*"))
        (newest / "jaxpar.json").write_text("{}")
    kv.barrier("damaged")
    assert checkpoint.Manager(folder / "ends").restore_latest(state) is None
    check_unreadable(folder / "unreadable", state)
    check_full_disk(folder / "full disk")
    found, _ = checkpoint.Manager(folder / "lost").restore_latest(new_state("sharded"))
    assert kv.to_params(found.store)["w"].tolist() == kv.to_params(again.store)["w"].tolist()


def check_full_disk(directory):
    """The shards of the last process do not fit on its disk: all raise, and the next save is complete."""
    store = kv.from_params({"w": np.ones((1024, 1024), np.float32)}, kind="sharded", devices=jax.devices())
    manager = checkpoint.Manager(directory)
    timeout, limits = _arrays.TIMEOUT, resource.getrlimit(resource.RLIMIT_FSIZE)
    _arrays.TIMEOUT = 3  # seconds for which the others wait
    if kv.rank() == kv.num_workers() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    manager.save(store)
    raises(OSError, "could not", manager.wait)
    _arrays.TIMEOUT = timeout
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    manager.save(store)
    manager.close()
    assert checkpoint.latest(directory) is not None


def check_unreadable(directory, state):
    """What the last process cannot read, all pass over; where nothing is left, all raise."""
    manager, opens, broken = checkpoint.Manager(directory), os.open, []
    for n in (1, 2, 3):
        manager.save(state, {"n": n})
    manager.wait()

    def fails(path, *args, **options):
        if any(name in str(path) for name in broken):
            raise OSError(5, "Input/output error", str(path))
        return opens(path, *args, **options)

    os.open = fails
    last = kv.rank() == kv.num_workers() - 1
    name = f"step_{int(state.step):08d}"
    for bad, expected in ((".3", 2), (".2", 1)):
        broken += [f"{name}{bad}"] if last else []
        assert checkpoint.Manager(directory).restore_latest(state)[1] == {"n": expected}
    broken += [name] if last else []
    words = f"process {kv.num_workers() - 1}: {directory / name} is unreadable: jaxpar.json: Input/output error"
    raises(checkpoint.CheckpointError, words, lambda: checkpoint.Manager(directory).restore_latest(state))
    for _ in range(2):
        raises(checkpoint.CheckpointError, "no earlier checkpoint that all", lambda: manager.restore_latest(state))
    os.open = opens
    manager.save(state, {"n": 4})
    assert manager.restore_latest(state)[1] == {"n": 4}
    manager.close()


def attach():
    distributed.initialize()
    assert distributed.known_processes() == jax.process_count()


if __name__ == "__main__":
    run_phases(globals(), attach)
