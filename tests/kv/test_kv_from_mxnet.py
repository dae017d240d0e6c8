"""What code written for MXNet still says: taken where it means the same, else answered with the line to write."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import assert_unchanged, snapshot

from jaxpar import kv, train, updaters
from jaxpar.sparse import RowSparse

ONES = jnp.ones((2, 3))
STORE = kv.init(kv.create("device"), 3, ONES)

KINDS = {
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "local_allreduce_device": "device",
    "nccl": "device",
    "dist": "dist_sync",
    "dist_sync_device": "dist_device_sync",
    "dist_device_async": "dist_async",
}


def test_kinds_of_the_same_meaning():
    for name, kind in KINDS.items():
        assert kv.create(name) == kv.create(kind)
        assert kv.from_params({"w": ONES}, kind=name).kind == kind


@pytest.mark.parametrize(("name", "use"), [("p3", "'dist_sync'"), ("horovod", "'dist_sync'"), ("byteps", "'device'")])
def test_other_kinds_name_the_one_to_use(name, use):
    with pytest.raises(ValueError, match=rf"unknown kind '{name}'; known are local, device, .*; use .*{use}"):
        kv.create(name)


ARGUMENTS = {
    "out": (lambda: kv.pull(STORE, 3, out=ONES), r"kv.pull: .*'out'.*value = kv.pull\(store, key\)"),
    "out_pushpull": (lambda: kv.pushpull(STORE, 3, ONES, out=ONES), r"kv.pushpull: .*'out'"),
    "priority": (lambda: kv.push(STORE, 3, ONES, priority=-1), "kv.push: .*'priority'; leave it out"),
    "ignore_sparse": (lambda: kv.pull(STORE, 3, ignore_sparse=False), "row_sparse_pull reads some rows"),
    "rows_out": (lambda: kv.row_sparse_pull(STORE, 3, row_ids=[0], out=ONES), "'out'"),
    "broadcast": (lambda: kv.broadcast(kv.create(), 3, ONES, out=ONES), "kv.broadcast: .*'out'"),
    "name": (lambda: kv.create(name="device"), "'name'; call it kind"),
    "compression": (lambda: kv.set_gradient_compression(STORE, compression_params={}), "second argument"),
    "optimizer": (lambda: kv.set_optimizer(STORE, optimizer=optax.sgd(1.0)), "second argument"),
}


@pytest.mark.parametrize(("call", "words"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_are_not_here(call, words):
    with pytest.raises(TypeError, match=words):
        call()


ATTRIBUTES = {
    "type": "write store.kind",
    "rank": r"write kv.rank\(\)",
    "num_workers": r"write kv.num_workers\(\)",
    "_set_updater": r"write store = kv.set_updater\(store, updater\)",
    "_barrier": r"write kv.barrier",
    "set_optimizer": r"write store = kv.set_optimizer\(store, \.\.\.\)",
    "pull": r"write value = kv.pull\(store",
    "pushpull": r"write store, value = kv.pushpull\(store, \.\.\.\)",
    "save_optimizer_states": "write jp.checkpoint.save",
    "is_capable": "every kind takes an optimizer",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_methods_and_attributes_of_the_store(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'.*{ATTRIBUTES[name]}"):
        getattr(STORE, name)


@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
def test_a_list_of_one_value_is_that_value(kind):
    """In `init` as in `push`, and in both for lists of keys."""
    store = kv.init(kv.create(kind), 3, [ONES])
    store = kv.init(store, [4, 5], [[ONES], (2 * ONES,)])
    store, _ = kv.broadcast(store, 6, [ONES])
    store = kv.push(kv.push(store, 3, [ONES]), [4, 5], [[ONES], (3 * ONES,)])
    assert [v[0, 0].item() for v in kv.pull(store, [3, 4, 5, 6])] == [1, 1, 3, 1]
    for value in ([], [ONES, ONES], [[ONES]]):
        with pytest.raises(TypeError, match="key 7: expected an array, got a list of"):
            kv.init(store, 7, value)


def plain(key, pushed, stored):
    return stored + pushed


def with_state(key, pushed, state, stored):
    return stored + pushed, state


NOTHING = lambda key, value: ()  # noqa: E731
UPDATERS = {
    "four": (lambda: with_state, r"of \(key, pushed, stored\), got with_state\(key, pushed, state, .*Updater\("),
    "three": (lambda: updaters.Updater(NOTHING, plain), r"Updater.update .*\(key, pushed, state, stored\).*stateless"),
    "init": (lambda: updaters.Updater(lambda value: (), with_state), r"Updater.init must be .* of \(key, value\)"),
    "stateless": (lambda: updaters.stateless(with_state), r"updaters.stateless: .* must be a function of .*, got "),
}


@pytest.mark.parametrize(("make", "words"), UPDATERS.values(), ids=UPDATERS)
def test_updaters_of_other_arguments_are_refused_when_they_are_set(make, words):
    before = snapshot(STORE)
    with pytest.raises(TypeError, match=words):
        kv.set_updater(STORE, make())
    with pytest.raises(TypeError, match=words):
        kv.from_params({"w": ONES}, updater=make())
    assert_unchanged(STORE, before)


@pytest.mark.parametrize(
    "fits", [lambda *args: args[1], lambda key, pushed, stored, scale=2: pushed, jax.jit(lambda k, p, s: p), max]
)
def test_updaters_that_fit_or_cannot_be_inspected_are_taken(fits):
    kv.set_updater(STORE, fits)


@pytest.mark.parametrize("shape", [(2, 3), (4096, 3)])
def test_rows_are_not_sent_uncompressed_in_silence(shape):
    """MXNet's workers refuse a row-sparse push where gradients are compressed."""
    store = kv.set_gradient_compression(kv.init(kv.create("device"), 3, jnp.ones(shape)), {"type": "2bit"})
    before = snapshot(store)
    rows = RowSparse(np.array([0]), jnp.ones((1, 3)), shape)
    with pytest.raises(ValueError, match=r"keys \[3\]: gradient compression does not take a RowSparse.*separate store"):
        kv.push(store, 3, rows)
    with pytest.raises(ValueError, match="does not take a RowSparse"):
        jax.jit(lambda s: kv.push(s, 3, rows))(store)
    assert_unchanged(store, before)
    kv.push(kv.set_gradient_compression(store, {"type": "none"}), 3, rows)


@pytest.mark.parametrize("kind", ["local", "device", "sharded", "dist_sync", "dist_async"])
def test_a_store_begins_with_a_row_sparse_value(kind):
    rows = RowSparse(np.array([2, 0]), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), (4, 2))
    store = kv.init(kv.create(kind), [0, 1], [rows, [rows]])
    for key in (0, 1):
        np.testing.assert_array_equal(kv.pull(store, key), [[3, 4], [0, 0], [1, 2], [0, 0]])


def test_multipliers_change_in_the_middle_and_momentum_stays():
    """`opt.set_lr_mult({0: 0.5})` of MXNet: its SGD has the rate inside the momentum."""

    def sgd(**factors):
        return updaters.mxnet_sgd(0.1, momentum=0.9, **factors)

    store = kv.set_updater(kv.init(kv.create("device"), 0, jnp.zeros(1)), sgd())
    store = kv.push(kv.push(store, 0, jnp.ones(1)), 0, jnp.ones(1))
    store = kv.push(dataclasses.replace(store, updater=sgd(lr_mult={0: 0.5})), 0, jnp.ones(1))
    value, momentum = 0.0, 0.0
    for factor in (1, 1, 0.5):
        momentum = 0.9 * momentum - 0.1 * factor
        value += momentum
    np.testing.assert_allclose(kv.pull(store, 0), [value], rtol=1e-6)


PUSHES = [[0], [0, 1], [1], [0], [2, 0], [1, 0, 2], [2], [2, 1]]  # the keys of each push


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("local", False), ("device", False), ("sharded", False), ("dist_sync", False), ("local", True), ("device", True)],
)
def test_a_schedule_follows_the_largest_count_of_any_key(kind, rows):
    """As `Optimizer._update_count` and `_get_lr` of MXNet 1.9.1 do, in plain Python here."""
    store = kv.init(kv.create(kind, devices=jax.devices()[:2]), [0, 1, 2], [jnp.zeros((4, 1))] * 3)
    store = kv.set_updater(store, updaters.mxnet_sgd(lambda count: 1 / (count + 1), begin_num_update=2))
    value = jnp.ones((4, 1)) if not rows else RowSparse(np.arange(4), np.ones((4, 1), np.float32), (4, 1))
    counts, num_update, expected = dict.fromkeys(range(3), 2), 2, dict.fromkeys(range(3), 0.0)
    for keys in PUSHES:
        store = kv.push(store, keys, [value] * len(keys))
        for key in sorted(keys):
            counts[key] += 1
            num_update = max(counts[key], num_update)
            expected[key] -= 1 / num_update
        assert [int(store.updater_state[k]["count"]) for k in range(3)] == list(counts.values())
    assert all(state.keys() == {"count"} for state in store.updater_state.values())
    for key, wanted in expected.items():
        np.testing.assert_allclose(kv.pull(store, key), np.full((4, 1), wanted), rtol=1e-6)


def test_a_push_with_a_schedule_reads_few_counts():
    """The counts of keys that were not pushed since are known on the host. Calls of functions are counted."""

    def calls(rate):
        store = kv.init(kv.create("device"), list(range(200)), [jnp.zeros(2)] * 200)
        store = kv.set_updater(store, updaters.mxnet_sgd(rate))
        for key in range(3):
            store = kv.push(store, key, jnp.ones(2))
        count = 0

        def count_one(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(count_one)
        try:
            for key in range(20):
                store = kv.push(store, key, jnp.ones(2))
        finally:
            sys.setprofile(None)
        return count / 20

    # To read a count for the first time takes eight calls.
    assert calls(lambda count: 1 / (count + 1)) < calls(0.1) + 200


@pytest.mark.parametrize("compiled", [False, True], ids=["prompt", "jit"])
def test_a_schedule_counts_delayed_pushes_when_they_are_applied(compiled):
    """Key 0 had four updates and key 1 none. The first update of key 1 is asked with 4 - 1, as in MXNet."""
    one, run = jnp.ones(()), jax.jit if compiled else lambda fn: fn
    store = kv.init(kv.create("dist_async", staleness=1), [0, 1], [jnp.zeros(())] * 2)
    store = kv.set_updater(store, updaters.mxnet_sgd(lambda count: 1.0 + count))
    for _ in range(4):
        store = kv.push(store, 0, one)
    store = kv.push(kv.flush(store), 1, one)
    assert [int(state["count"]) for state in store.updater_state.values()] == [4, 0]
    # A flush applies that of key 1 alone, and a push of both keys applies that of key 1 only.
    assert float(kv.pull(run(kv.flush)(store), 1)) == -4
    store = run(lambda store: kv.push(store, [0, 1], [one, one]))(store)
    assert [float(kv.pull(store, key)) for key in (0, 1)] == [-(1 + 2 + 3 + 4), -4]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["pmap", "shard_map", "jit"])
def test_a_schedule_follows_the_largest_count_in_a_step(engine):
    """ "b" is not read and keeps its count, after pushes at the prompt that counted further than those of "w"."""
    tx = updaters.mxnet_sgd(lambda count: 1.0 + count)
    store = kv.from_params({"b": jnp.zeros(()), "w": jnp.zeros(())}, updater=tx, devices=jax.devices()[:2])
    for _ in range(3):
        store = kv.push(store, "b", jnp.ones(()))
    step = train.make_train_step(lambda p, batch, rng: (p["w"] * batch.mean(), {}), engine=engine, unused="skip")
    state = train.create_state(store, 0)
    for _ in range(4):
        state, _ = step(state, np.ones(4, np.float32))
    assert float(state.params["w"]) == -(3 + 3 + 3 + 4)
    assert [int(s["count"]) for s in state.store.updater_state.values()] == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
def test_a_step_counts_delayed_pushes_when_they_are_applied(engine):
    """ "b" had four updates at the prompt. A step then applies the pending push of "w" alone."""
    tx = updaters.mxnet_sgd(lambda count: 1.0 + count)
    store = kv.from_params({"b": jnp.zeros(()), "w": jnp.zeros(())}, kind="dist_async", optimizer=tx)
    for _ in range(4):
        store = kv.push(store, "b", jnp.ones(()))
    store = kv.push(kv.flush(store), "w", jnp.ones(()))
    step = train.make_train_step(lambda p, batch, rng: ((p["w"] + p["b"]) * batch.mean(), {}), engine=engine)
    state = train.create_state(store, 0, devices=jax.devices()[:2])
    state, _ = step(state, np.ones(4, np.float32))
    assert [float(state.params[name]) for name in ("b", "w")] == [-(1 + 2 + 3 + 4), -4]
