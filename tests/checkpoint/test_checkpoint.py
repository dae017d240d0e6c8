"""Checkpoints: what goes in comes out, on other devices too; what is damaged is refused; a killed run goes on."""

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import os
import pickle
import shutil
import signal
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import world
from jax.sharding import NamedSharding, PartitionSpec as P
from kv_model import assert_unchanged, snapshot
from launched import python
from world import close

from jaxpar import checkpoint, data, kv, train, updaters
from jaxpar._core import portable
from jaxpar.checkpoint import _arrays, _files, _leaves

PARAMS = {"dense": {"bias": np.zeros(3, np.float32), "weight": np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)}}


def loss_fn(params, batch, rng):
    noise = 0.01 * jax.random.normal(rng, (3,))
    scores = batch["image"] @ params["dense"]["weight"] + (params["dense"]["bias"] + noise)[None]
    wrong = ((scores - jax.nn.one_hot(batch["label"], 3)) ** 2).mean()
    return wrong, {"accuracy": (scores.argmax(-1) == batch["label"]).mean()}


def points(n=64, seed=0):
    rng = np.random.default_rng(seed)
    return data.Dataset(rng.normal(size=(n, 5)).astype(np.float32), rng.integers(0, 3, n))


def make(kind="device", count=4, *, params=PARAMS, tx=None, **options):
    options = {"rng": 3, "kind": kind, "devices": jax.devices()[:count], **options}
    return train.start(params, tx or ADAM, loss_fn, **options)[0]


ADAM = optax.adam(0.05)
STEP = train.make_train_step(loss_fn)
SAME_NOISE = train.make_train_step(lambda params, batch, rng: loss_fn(params, batch, jax.random.key(0)))


def trained(state, steps=2, step=STEP):
    batches = data.batches(points(), 16, epochs=None, devices=state.store.devices)
    return world.trained(step, state, itertools.islice(batches, steps))[0]


def same(a, b):
    assert_unchanged(a, snapshot(b))


# What goes in comes out.


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
def test_train_state_round_trip(tmp_path, kind):
    state = trained(make(kind))
    before = snapshot(state)
    checkpoint.save(tmp_path / "a", state)
    restored = checkpoint.restore(tmp_path / "a", make(kind, rng=8))
    same(restored, state)
    assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(make(kind))]
    assert jax.random.key_impl(restored.rng) == jax.random.key_impl(state.rng)
    trained(restored)  # donates the restored arrays: none of them may be memory of another
    assert_unchanged(state, before)


def test_any_pytree_of_arrays(tmp_path):
    on = NamedSharding(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]), P("x"))
    tree = {
        "half": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "empty": jnp.zeros((0, 3), jnp.int8),
        "flag": jnp.array(True),
        "host": np.arange(3, dtype=np.float64),
        "number": 7,
        "rate": 0.1,
        "rng": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "split": jax.device_put(jnp.arange(8.0), on),
        "nested/odd name": [jnp.ones(1), (jnp.zeros(2), {3: jnp.ones((), jnp.complex64)})],
    }
    checkpoint.save(tmp_path / "a", tree)
    restored = checkpoint.restore(tmp_path / "a", tree)
    same(*(jax.tree.map(jnp.asarray, {k: v for k, v in t.items() if k != "host"}) for t in (restored, tree)))
    assert type(restored["host"]) is np.ndarray
    assert restored["host"].dtype == np.float64
    assert (type(restored["number"]), type(restored["rate"]), restored["rate"]) == (int, float, 0.1)
    assert str(jax.random.key_impl(restored["rng"])) == "rbg"
    assert restored["split"].sharding == on


@pytest.mark.slow
def test_restore_from_shapes_alone(tmp_path):
    state = trained(make("sharded"))
    checkpoint.save(tmp_path / "a", state)
    same(checkpoint.restore(tmp_path / "a", jax.eval_shape(lambda s: s, state)), state)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    restored = checkpoint.restore(tmp_path / "a", placed)
    assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(state)]
    same(trained(restored), trained(state))


def test_store_alone_and_stores_in_a_tree(tmp_path):
    store = kv.init(kv.create("device"), [9, 4], [jnp.arange(3.0), jnp.ones((2, 2), jnp.int32)])
    checkpoint.save(tmp_path / "a", store)
    assert checkpoint.restore(tmp_path / "a", store) == store
    params = {**PARAMS, "nothing": np.zeros((3, 0), np.float32)}
    in_rows, whole = (kv.from_params(params, kind=kind, optimizer=ADAM) for kind in ("sharded", "device"))
    checkpoint.save(tmp_path / "b", {"one": store, "two": [in_rows]})
    late = kv.push(kv.from_params({"a": jnp.ones(2)}, kind="dist_async", staleness=1), 0, jnp.full(2, 3.0))
    checkpoint.save(tmp_path / "c", late)
    same(checkpoint.restore(tmp_path / "c", jax.tree.map(jnp.zeros_like, late)), late)
    for held in (in_rows, whole):
        tree = {"one": store, "two": [held]}
        same(checkpoint.restore(tmp_path / "b", jax.tree.map(jnp.zeros_like, tree)), tree)


def test_nothing_is_pickled(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickled")

    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    checkpoint.save(tmp_path / "a", make())
    checkpoint.restore(tmp_path / "a", make())


# On other devices, in stores of another kind.


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (("device", 4), ("sharded", 8)),
        (("device", 4), ("device", 1)),
        (("device", 4), ("sharded", 2)),
        (("sharded", 4), ("device", 2)),
        (("sharded", 4), ("sharded", 1)),
        (("sharded", 4), ("sharded", 8)),
        (("sharded", 4), ("local", 8)),
    ],
    ids=lambda x: f"{x[0]}{x[1]}",
)
def test_other_devices_and_kinds(tmp_path, saved, wanted):
    state = trained(make(*saved), step=SAME_NOISE)
    checkpoint.save(tmp_path / "a", state)
    restored = checkpoint.restore(tmp_path / "a", make(*wanted, rng=8))
    assert restored.store.kind == wanted[0]
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(restored)} == {wanted[1]}
    same(restored.params, state.params)
    assert int(restored.step) == 2
    on, there = trained(state, 3, SAME_NOISE), trained(restored, 3, SAME_NOISE)
    close(on.params, there.params, atol=1e-5)


@pytest.mark.slow
def test_residuals_stay_on_as_many_devices_and_start_again_on_others(tmp_path, capsys):
    two_bit = {"type": "2bit", "threshold": 0.5}
    wide = {"w": np.zeros((5, 64), np.float32)}
    make_wide = lambda count: make("device", count, compression=two_bit, params=wide)  # noqa: E731
    state = make_wide(4)
    held = jax.tree.map(lambda x: jnp.full_like(x, 0.25), state.store.residuals)
    assert held
    state = train.TrainState(kv.KVStore(**{**vars(state.store), "residuals": held}), state.step, state.rng)
    checkpoint.save(tmp_path / "a", state)

    same(checkpoint.restore(tmp_path / "a", make_wide(4)), state)
    assert capsys.readouterr().err == ""
    restored = checkpoint.restore(tmp_path / "a", make_wide(2))
    same(restored, make_wide(2))
    assert "residuals of keys [0] start anew" in capsys.readouterr().err


@pytest.mark.slow
def test_residuals_of_a_store_that_follows_its_devices(tmp_path):
    fresh = kv.set_gradient_compression(kv.init(kv.create("device"), 5, jnp.zeros(64)), {"type": "2bit"})
    pushed = kv.push(fresh, 5, [jnp.full(64, 0.3), jnp.full(64, 0.4)])
    checkpoint.save(tmp_path / "a", pushed)
    restored = checkpoint.restore(tmp_path / "a", fresh)
    assert restored == pushed
    assert kv.push(restored, 5, [jnp.full(64, 0.3)] * 2) == kv.push(pushed, 5, [jnp.full(64, 0.3)] * 2)


# What does not fit is named.


def swapped(*parts):
    return optax.chain(*parts), optax.chain(*reversed(parts))


OTHER_RULES = {
    "adam and lamb": (optax.adam(0.1), optax.lamb(0.1)),
    "adamw and nadamw": (optax.adamw(0.1), optax.nadamw(0.1)),
    "adam and adamw": (optax.adam(0.1), optax.adamw(0.1)),
    "momentum and Nesterov's": (optax.sgd(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "no state": (optax.sgd(0.1), optax.sign_sgd(0.1)),
    "another order": swapped(optax.clip(1.0), optax.scale(-0.1)),
    "another order around a norm": swapped(optax.clip_by_global_norm(1.0), optax.scale_by_sign()),
    "another mask": (optax.adamw(0.1), optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))),
    "in a loop": tuple(optax.MultiSteps(tx, 2) for tx in (optax.adam(0.1), optax.nadam(0.1))),
    "MXNet": (updaters.mxnet_sgd(0.1, momentum=0.9), updaters.mxnet_nag(0.1, momentum=0.9)),
    "one state a key": (updaters.from_optax(optax.adam(0.1)), updaters.from_optax(optax.nadam(0.1))),
}
cosine, linear = optax.cosine_decay_schedule(0.1, 10), optax.linear_schedule(0.1, 0.0, 7)
SAME_RULES = {
    "rate": (optax.adamw(0.1), optax.adamw(jnp.float32(0.2), weight_decay=0.3)),
    "decays": (optax.adam(0.1), optax.adam(0.1, b1=0.0, b2=0.5, eps=0.0, eps_root=1.0)),
    "schedule": (optax.sgd(cosine, momentum=0.9), optax.sgd(linear, momentum=0.0)),
    "schedule that is constant": (optax.adam(cosine), optax.adam(lambda count: 0.1)),
    "schedule in a loop": (optax.MultiSteps(optax.adam(cosine), 2), optax.MultiSteps(optax.adam(linear), 3)),
    "injected": tuple(optax.inject_hyperparams(optax.adam)(rate) for rate in (0.1, 0.2)),
    "clipping": tuple(optax.chain(optax.clip_by_global_norm(c), optax.adam(0.1)) for c in (1.0, 2.0)),
    "muon": (optax.contrib.muon(0.1), optax.contrib.muon(0.2, ns_steps=3)),
    "plateau": tuple(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=n, factor=1 / n)) for n in (2, 3)
    ),
    "MXNet": (updaters.mxnet_adam(0.1, wd=0.1), updaters.mxnet_adam(0.2, wd=0.2, beta1=0.5)),
}


def held_by(tx, kind="device"):
    given = {"updater" if isinstance(tx, updaters.Updater) else "optimizer": tx}
    return kv.from_params(PARAMS, kind=kind, devices=jax.devices()[:2], **given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pair", OTHER_RULES.values(), ids=OTHER_RULES)
def test_an_optimizer_with_the_same_state_and_another_rule(tmp_path, pair):
    first, second = map(held_by, pair)
    checkpoint.save(tmp_path / "a", first)
    with pytest.raises(checkpoint.CheckpointError, match=r"key [01] \('dense/.*'\).* another optimizer .*restored\)\)"):
        checkpoint.restore(tmp_path / "a", second)
    found = checkpoint.restore(tmp_path / "a", held_by(pair[0]))
    same(found, first)
    moved = jax.tree.unflatten(jax.tree.structure(second), jax.tree.leaves(found))  # as the message says
    assert moved.updater == second.updater
    kv.push(moved, [0, 1], jax.tree.leaves(PARAMS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", SAME_RULES.values(), ids=SAME_RULES)
def test_other_hyperparameters_are_no_other_optimizer(tmp_path, pair):
    first, second = map(held_by, pair)
    checkpoint.save(tmp_path / "a", first)
    same(checkpoint.restore(tmp_path / "a", second).values, first.values)


def test_rules_are_those_of_whole_values_in_every_kind(tmp_path):
    checkpoint.save(tmp_path / "a", held_by(ADAM, "sharded"))
    for kind in ("local", "device", "dist_sync"):
        checkpoint.restore(tmp_path / "a", held_by(ADAM, kind))
        with pytest.raises(checkpoint.CheckpointError, match="another optimizer"):
            checkpoint.restore(tmp_path / "a", held_by(optax.nadam(0.05), kind))


@pytest.mark.parametrize(
    "change", [lambda rule: None, lambda rule: rule.replace("jax 0", "jax 9")], ids=["none", "jax"]
)
def test_rules_of_older_checkpoints_and_other_versions_are_not_compared(tmp_path, monkeypatch, change):
    record = portable.SavedArray.record

    def changed(slot):
        about = record(slot)
        rule = change(about.pop("rule", ""))
        return about | ({"rule": rule} if rule else {})

    monkeypatch.setattr(portable.SavedArray, "record", changed)
    checkpoint.save(tmp_path / "a", held_by(ADAM))
    monkeypatch.undo()
    checkpoint.restore(tmp_path / "a", held_by(optax.nadam(0.05)))


@pytest.mark.slow
def test_rules_are_equal_in_every_process(tmp_path):
    program = (
        "import jax.numpy as jnp, optax, sys; from jaxpar import checkpoint, kv; "
        "checkpoint.save(sys.argv[1], kv.from_params({'w': jnp.ones((4, 4))}, optimizer=optax.contrib.muon(0.1)))"
    )
    rules = set()
    for seed in "12":
        path = tmp_path / seed
        python("-c", program, path, PYTHONHASHSEED=seed)
        rules |= {record["rule"] for record in _files.load(path)["leaves"] if "rule" in record}
    assert len(rules) == 1


@pytest.mark.slow
@pytest.mark.parametrize("tx", [ADAM, optax.novograd(0.1), optax.chain(optax.trace(0.9), ADAM)])
def test_a_state_for_each_key_becomes_one_for_all_params(tmp_path, tx, capsys):
    params = {"b": jnp.ones(2), "mu": {"b": jnp.ones(2), "trace": (jnp.ones(2), jnp.ones(2))}, "n": jnp.int32(1)}
    keys, grads = list(range(4)), [jnp.full(2, 1.0 + i) for i in range(4)]
    each = kv.push(kv.from_params(params, updater=updaters.from_optax(tx)), keys, grads)
    whole = kv.push(kv.from_params(params, optimizer=tx), keys, grads)
    checkpoint.save(tmp_path / "a", each)
    joined = checkpoint.restore(tmp_path / "a", kv.from_params(params, optimizer=tx))
    same(joined.optimizer_state, whole.optimizer_state)
    assert "was joined into one for all params" in capsys.readouterr().err
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer_state/0/0/.*expected .* found nothing"):
        checkpoint.restore(tmp_path / "a", kv.from_params(params, optimizer=optax.chain(tx, optax.ema(0.9))))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_an_average_that_was_saved_in_16_bits_is_kept_in_float32(tmp_path, kind, capsys):
    tx = optax.chain(optax.sgd(0.1), updaters.average_params(0.9))
    make = lambda value: kv.from_params({"w": jnp.full(3, value, jnp.bfloat16)}, optimizer=tx, kind=kind)  # noqa: E731
    new, old = make(0.0), make(1.5)
    checkpoint.save(tmp_path / "a", dataclasses.replace(old, optimizer_state=with_narrow_averages(old.optimizer_state)))
    same(checkpoint.restore(tmp_path / "a", new), old)
    assert "were saved in 16 bits" in capsys.readouterr().err
    if kind == "device":  # within a round of local steps each device has an average
        drift = lambda params, batch, rng: (0.0 * params["w"].sum() + batch.mean(), {})  # noqa: E731
        (new, _), (old, step) = [
            train.start({"w": jnp.full(3, x, jnp.bfloat16)}, tx, drift, local_steps=3) for x in (0, 1)
        ]
        new, old = (step(state, jnp.ones(8))[0] for state in (new, old))
        checkpoint.save(tmp_path / "b", with_narrow_averages(old))
        same(checkpoint.restore(tmp_path / "b", new).eval_params, old.eval_params)


def with_narrow_averages(tree):
    def is_average(node):
        return isinstance(node, updaters._AverageState)

    def narrow(node):
        if not is_average(node):
            return node
        return node._replace(average=jax.tree.map(lambda x: x.astype(jnp.bfloat16), node.average))

    return jax.tree.map(narrow, tree, is_leaf=is_average)


# Damaged, foreign, missing.


def test_a_manifest_of_nonsense(tmp_path):
    checkpoint.save(tmp_path / "a", jnp.ones(2))
    for text in ("", "[]", "null", "{}", '{"sha256": 1, "content": []}', "\udc80"):
        (tmp_path / "a" / _files.MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(checkpoint.CheckpointError, match=r"a is damaged: jaxpar\.json"):
            checkpoint.restore(tmp_path / "a", jnp.ones(2))


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "FORMAT", 99)
    checkpoint.save(tmp_path / "a", jnp.ones(2))
    monkeypatch.undo()
    with pytest.raises(checkpoint.CheckpointError, match=r"newer jaxpar \(format 99, this one has 2\)"):
        checkpoint.restore(tmp_path / "a", jnp.ones(2))


def test_foreign_checkpoints_are_passed_over_by_name(tmp_path, capsys):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as other:
        other.save(tmp_path / "foreign", args=ocp.args.PyTreeSave({"w": np.ones(2)}))
    (tmp_path / "plots").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert checkpoint.latest(tmp_path) is None
    heard = capsys.readouterr().err
    assert f"{tmp_path / 'foreign'} is not a checkpoint of jaxpar (an orbax checkpoint of another program)" in heard
    assert "plots is not a checkpoint of jaxpar" in heard
    assert "metrics" not in heard
    with pytest.raises(checkpoint.CheckpointError, match="foreign is not a checkpoint of jaxpar"):
        checkpoint.restore(tmp_path / "foreign", {"w": jnp.ones(2)})


def test_nothing_there(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.latest(tmp_path) is None


# The manager.


def test_the_last_few_stay(tmp_path, capsys):
    manager = checkpoint.Manager(tmp_path, keep=2)
    for n in range(4):
        manager.save({"w": jnp.full(2, float(n))}, {"n": n, "loss": [0.1 + n, float("inf")]})
    manager.close()
    assert sorted(os.listdir(tmp_path)) == ["save_00000003", "save_00000004"]
    shutil.rmtree(tmp_path / "save_00000004" / "state")
    again = checkpoint.Manager(tmp_path, keep=2)
    state, info = again.restore_latest({"w": jnp.zeros(2)})
    assert (state["w"].tolist(), info) == ([2.0, 2.0], {"n": 2, "loss": [2.1, float("inf")]})
    assert "save_00000004 is damaged" in capsys.readouterr().err
    again.save({"w": jnp.zeros(2)}, {"history": [{"epoch": i, "loss": 0.5} for i in range(9000)]})
    again.wait()
    assert checkpoint.latest(tmp_path) == tmp_path / "save_00000005"
    manifest = tmp_path / "save_00000005" / "jaxpar.json"
    assert b"\n" not in manifest.read_bytes()  # a long one is written faster in one line
    # Damaged ones do not count as one of two, and stay as they are.
    assert sorted(os.listdir(tmp_path)) == [".writer", "save_00000003", "save_00000004", "save_00000005"]
    again.save({"w": jnp.zeros(2)})
    again.wait()
    manifest.write_text("{}")
    again.save({"w": jnp.zeros(2)})
    again.close()
    assert sorted(os.listdir(tmp_path)) == [f"save_{n:08d}" for n in (4, 5, 6, 7)]


def test_a_step_that_is_there_already(tmp_path):
    for n in range(2):
        world.save_by_manager(tmp_path, make(rng=n))
    assert sorted(os.listdir(tmp_path)) == ["step_00000000", "step_00000000.2"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000000.2"


needs_peak = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory is Linux's")


def peak_of(call):
    """What the call returns, and by how many MiB the resident memory of this process grew at most."""

    def resident(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith(key))

    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc would hide a copy in memory that is free already
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again
    before = resident("VmRSS")
    result = call()
    return result, resident("VmHWM") - before


def frozen_store(params):
    """A store of params that no step changes, but for the last one. Each is split over the second axis."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    return kv.from_params(params, frozen=list(params)[:-1], mesh=mesh, sharding=P(None, "x"))


@needs_peak
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "how", "copies"),
    [
        ("device", "save", 0),
        ("device", "manager", 0),
        ("sharded", "save", 0),
        ("sharded", "manager", 0),
        ("frozen", "manager", 0),
        ("numpy", "save", 0),
        ("numpy", "manager", 1),  # the caller may write into them as soon as the call returns
    ],
)
def test_what_a_save_needs_in_host_memory(tmp_path, kind, how, copies):
    mib, arrays = 128, 16
    params = {f"w{i}": np.full((mib // arrays << 12, 64), i, np.float32) for i in range(arrays)}
    state = params
    if kind == "frozen":
        state = jax.block_until_ready(frozen_store(params))
    elif kind != "numpy":
        state = jax.block_until_ready(kv.from_params(params, kind=kind, devices=jax.devices()[:4]))
    del params
    checkpoint.save(tmp_path / "first", {"w": np.ones(3), "x": jnp.ones(3)})  # imports
    save = world.save_by_manager if how == "manager" else lambda path, state: checkpoint.save(path / "second", state)
    _, most = peak_of(lambda: save(tmp_path, state))
    # Where devices of this process have shards, one array is put together at a time.
    assert abs(most - copies * mib) < mib / 3, most
    restored = checkpoint.restore(checkpoint.latest(tmp_path), state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


@pytest.mark.parametrize("kind", ["frozen", "sharded"])
def test_one_array_of_shards_is_put_together_at_a_time(tmp_path, monkeypatch, kind):
    """The call of a save copies nothing: its arrays have the memory of the devices."""
    params = {f"w{i}": np.full((8, 64), i, np.float32) for i in range(6)}
    store = frozen_store(params) if kind == "frozen" else kv.from_params(params, kind=kind, devices=jax.devices()[:4])
    _, _, arrays, _ = _leaves.to_leaves(store, True, may_change=True)
    in_shards = [
        (array, value) for array, value in zip(arrays, store.values.values(), strict=True) if array is not value
    ]
    assert len(in_shards) >= 5
    for array, value in in_shards:
        of_devices = [np.asarray(shard.data) for shard in value.addressable_shards]
        for (_, shard), memory in zip(array._shards, of_devices, strict=True):
            assert np.shares_memory(shard, memory)

    made, alive = [], []
    put_together = _arrays.HostShards.__array__

    class Counted(np.ndarray):  # an array of NumPy itself has no weak references
        pass

    def counted(self, dtype=None, copy=None):
        array = put_together(self).view(Counted)
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(array))
        return array

    monkeypatch.setattr(_arrays.HostShards, "__array__", counted)
    checkpoint.save(tmp_path / "a", store)
    monkeypatch.undo()
    assert len(made) >= len(in_shards)
    assert max(alive) <= 1, alive
    restored = checkpoint.restore(tmp_path / "a", jax.tree.map(jnp.zeros_like, store))
    jax.tree.map(np.testing.assert_array_equal, kv.to_params(restored), params)


def test_a_numpy_array_that_is_changed_while_it_is_written(tmp_path, monkeypatch):
    write, may_write = _files.write, threading.Event()

    def late(*args):
        assert may_write.wait(60)
        write(*args)

    monkeypatch.setattr(_files, "write", late)
    array = np.zeros(1000)
    manager = checkpoint.Manager(tmp_path)
    manager.save({"a": array})
    array[:] = 1
    may_write.set()
    manager.close()
    assert not checkpoint.restore(checkpoint.latest(tmp_path), {"a": array})["a"].any()


def test_a_save_leaves_no_copy_of_an_array_in_host_memory():
    """jax keeps what `np.asarray` has assembled of several devices as long as the array lives."""
    sharding = NamedSharding(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), P("data"))
    array = jax.device_put(np.arange(64.0).reshape(8, 8), sharding)
    saved = _arrays.to_numpy(array)
    kept = np.asarray(array)
    np.testing.assert_array_equal(saved, kept)
    assert np.shares_memory(kept, np.asarray(array))  # kept by jax
    assert not np.shares_memory(kept, saved)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_the_state_may_be_donated_at_once(tmp_path, monkeypatch, kind):
    write, may_write = _files.write, threading.Event()

    def late(*args):
        assert may_write.wait(60)
        write(*args)

    monkeypatch.setattr(_files, "write", late)
    state = trained(make(kind))
    before = snapshot(state)
    manager = checkpoint.Manager(tmp_path)
    manager.save(state)  # returns before it is written
    assert checkpoint.latest(tmp_path) is None
    state = trained(state, 5)
    may_write.set()
    manager.close()
    assert_unchanged(checkpoint.restore(checkpoint.latest(tmp_path), state), before)


def test_a_full_disk(tmp_path, full_disk):
    large = {"w": jax.random.normal(jax.random.key(0), (300, 300))}
    manager = checkpoint.Manager(tmp_path)
    manager.save(large, {"n": 1})
    manager.wait()
    full_disk(100_000)
    manager.save(large, {"n": 2})
    with pytest.raises(OSError, match=r"save_00000002 could not be written \(.*earlier checkpoints are unchanged"):
        manager.wait()
    with pytest.raises(OSError, match="b could not be written"):
        checkpoint.save(tmp_path / "b", large)
    full_disk(10**9)
    assert set(os.listdir(tmp_path)) - {".writer"} == {"save_00000001"}
    manager.save(large, {"n": 3})
    manager.close()
    assert manager.restore_latest(large)[1] == {"n": 3}


@needs_peak
@pytest.mark.slow
def test_memory_for_a_save_and_a_restore(tmp_path):
    """In a process without a step, after which the C library keeps more of what is freed."""
    call = "import sys, test_checkpoint as t; t.save_and_restore_in_little_memory(sys.argv[1])"
    python("-c", call, str(tmp_path), JAX_NUM_CPU_DEVICES="8")


def save_and_restore_in_little_memory(folder):
    """A save of what devices have copies nothing, and a restore has its shards and a few saved ones beside them."""
    tmp_path = Path(folder)
    devices = NamedSharding(jax.make_mesh((8,), ("x",), devices=jax.devices()[:8]), P("x"))
    mib = 256  # eight shards of 32 MiB: smaller ones glibc does not give back at once
    one_shard = np.arange(mib << 15, dtype=np.float32)
    shards = [jax.device_put(one_shard + i, device) for i, device in enumerate(devices.mesh.devices)]
    w = jax.make_array_from_single_device_arrays((8 * one_shard.size,), devices, shards)
    for name, call, most in (
        ("save", lambda: checkpoint.save(tmp_path / "a", w), 0.5 * mib),
        (
            "restore",
            lambda: checkpoint.restore(tmp_path / "a", jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=devices)),
            1.4 * mib,
        ),
    ):
        result, grown = peak_of(call)
        assert grown < most, (name, grown)
    assert all(
        np.array_equal(x.data, y.data) for x, y in zip(result.addressable_shards, w.addressable_shards, strict=True)
    )


# A run that stops and goes on.


def run(state, directory=None, step=STEP, epochs=3, **options):
    return world.run_on(points(), state, step=step, epochs=epochs, checkpoint_dir=directory, **options)


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, 1, None])
def test_a_run_that_fails_in_an_epoch_goes_on_as_if_it_had_not(tmp_path, capsys, every):
    def fails(state, batch, seen=[]):  # noqa: B006
        seen.append(1)
        if len(seen) == 8:
            raise RuntimeError("at step 7")
        return STEP(state, batch)

    with pytest.raises(RuntimeError, match="at step 7"):
        run(make(), tmp_path, fails, checkpoint_every=every)
    state, history = run(make(), tmp_path, checkpoint_every=every)
    assert f"resumed from step { ({None: 4, 1: 7, 3: 6}[every]) } in {tmp_path}" in capsys.readouterr().out
    expected, records = run(make())
    same(state, expected)
    assert world.numbers(history) == world.numbers(records)
    assert all(r["seconds"] > 0 for r in history)

    def never(state, batch):
        raise AssertionError("the run was over")

    again, same_history = run(make(), tmp_path, never)
    same(again, expected)
    assert same_history == history


def test_resume_false_and_true_and_other_batches(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"resume=True, but .* holds no checkpoint; give the checkpoint_dir"):
        run(make(), tmp_path, resume=True)
    run(make(), tmp_path, epochs=1)
    with pytest.raises(ValueError, match="batches of 16 out of 64 examples, but this run has 32 out of 64"):
        run(make(), tmp_path, batch_size=32)
    _, history = run(make(), tmp_path, epochs=1, resume=False)
    assert len(history) == 1
    assert len(list(tmp_path.glob("step_*"))) == 2
    _, history = run(make(), tmp_path, epochs=2, resume=True)
    assert [r["epoch"] for r in history] == [1, 2]


@pytest.mark.parametrize("by", ["save", "Manager"])
def test_going_on_from_a_state_saved_by_hand(tmp_path, by):
    state, history = run(make(), epochs=1)
    if by == "save":
        checkpoint.save(tmp_path / "mine", state)
    else:
        world.save_by_manager(tmp_path, state, {"note": "mine"})
    resumed, records = run(make(), tmp_path, epochs=2)
    expected, whole = run(make(), epochs=2)
    same(resumed, expected)
    assert world.numbers(history + records) == world.numbers(whole)


def compressed_run(kind, directory=None, **options):
    params = {"dense": {"bias": np.zeros(3, np.float32), "weight": np.zeros((5, 3), np.float32)}}
    state = make(kind, params=params, compression={"type": "2bit", "threshold": 0.01})
    options |= {"epochs": 4, "batch_size": 8, "checkpoint_every": 2, "certificate_every": 3}
    return run(state, directory, **options)


KILLED = """
import os, signal, sys
import test_checkpoint

kind, directory, certificate, where, calls = sys.argv[1:]
left, fsync = [int(calls)], os.fsync

def count(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

def counted(handle):
    count()
    fsync(handle)

if where == "fsync":
    os.fsync = counted
on_step = count if where == "step" else None
test_checkpoint.compressed_run(kind, directory, certificate=certificate, on_step=on_step)
"""


@pytest.mark.parametrize("kind", world.mostly_slow(["sharded", "device"], most=1))
def test_a_killed_run_goes_on_to_the_last_bit(tmp_path, kind, capsys):
    """After steps, and in calls of fsync, which is while it writes a checkpoint. Its certificate is never wrong."""
    places = tmp_path / "run", tmp_path / "run.jsonl"
    expected, records = compressed_run(kind, certificate=tmp_path / "undisturbed.jsonl")
    certificate = (tmp_path / "undisturbed.jsonl").read_bytes()
    halves = 0
    for killed in (("step", "5"), ("fsync", "3"), ("fsync", "40"), ("step", "2")):
        python("-c", KILLED, kind, *places, *killed, expect=-signal.SIGKILL, timeout=200, JAX_NUM_CPU_DEVICES="8")
        halves += any(name.startswith(".unfinished") for name in os.listdir(tmp_path / "run"))
        assert certificate.startswith(places[1].read_bytes().rpartition(b"\n")[0])
    assert halves
    state, history = compressed_run(kind, tmp_path / "run", certificate=places[1])
    assert "resumed from step" in capsys.readouterr().out
    same(state, expected)
    assert world.numbers(history) == world.numbers(records)
    assert places[1].read_bytes() == certificate


def test_paths_that_people_and_their_tools_give(tmp_path, monkeypatch):
    """From a folder of notebooks up, through a link, and folders that are called by options."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "far" / "away").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks")
    Path("link").symlink_to(tmp_path / "far" / "away")
    for path in ("../runs/a", "gone/../b", "link/../c", "lr=[0.1]/d", "all*/e?", "back\\slash/f", "a b/%20/g"):
        checkpoint.save(path, {"w": jnp.arange(3.0)})
        assert checkpoint.restore(path, {"w": jnp.zeros(3)})["w"].tolist() == [0, 1, 2], path
        assert checkpoint.latest(Path(path).parent) is not None, path
    assert (tmp_path / "far" / "c").is_dir()
    world.save_by_manager("../[x]", {"w": jnp.ones(3)}, best=True)
    assert checkpoint.restore(checkpoint.best("../[x]"), {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]


def test_a_save_of_which_orbax_writes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(_arrays, "name_for_orbax", contextlib.nullcontext)
    (tmp_path / "[a]").mkdir()
    with pytest.raises(OSError, match="orbax has written no arrays"):
        checkpoint.save(tmp_path / "[a]" / "b", {"w": jnp.ones(3)})
    assert not list((tmp_path / "[a]").iterdir())


def test_names_that_are_not_unicode(tmp_path):
    directory = tmp_path / os.fsdecode(b"d\xff")
    saved = directory / os.fsdecode(b"a\xfe")
    checkpoint.save(saved, {"w": jnp.arange(3.0)})
    assert checkpoint.latest(directory) == saved
    assert checkpoint.restore(saved, {"w": jnp.zeros(3)})["w"].tolist() == [0, 1, 2]
    world.save_by_manager(directory, {"w": jnp.ones(3)}, best=True)
    assert checkpoint.best(directory) == checkpoint.latest(directory) == directory / "save_00000002"
