"""The parts of `fit` for a loop of one's own: a start, a bar, interrupts, and a search for the learning rate."""

import gc
import inspect
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import world
from jax.sharding import PartitionSpec as P
from kv_model import assert_unchanged, compilations, snapshot
from world import LOSS, STEP, mostly_slow, points

from jaxpar import checkpoint, data, kv, parallel, train, updaters

TRAIN = points(80)
TX = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)


def start(**options):
    options = {"devices": jax.devices()[:2], **options}
    return train.start({"w": jnp.zeros((4, 3))}, TX, LOSS, **options)


def test_a_start_is_the_three_calls():
    state, step = start(rng=3, kind="sharded", accumulate=2, engine="shard_map")
    other = world.start_classifier(TX, kind="sharded")
    other_step = train.make_train_step(LOSS, accumulate=2, engine="shard_map", devices=jax.devices()[:2])
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for batch in data.batches(TRAIN, 16, devices=jax.devices()[:2]):
        state, metrics = step(state, batch)
        other, others = other_step(other, batch)
        assert metrics["loss"] == others["loss"]
    np.testing.assert_array_equal(state.params["w"], other.params["w"])


def test_a_start_has_every_option_of_the_three_with_the_same_default():
    options = {}
    for fn in (kv.from_params, train.create_state, train.make_train_step):
        parameters = inspect.signature(fn).parameters.values()
        options |= {p.name: (p.default, p.annotation) for p in parameters if p.kind is p.KEYWORD_ONLY}
    del options["updater"], options["optimizer"]  # the optimizer has a place of its own
    parameters = inspect.signature(train.start).parameters
    own = {name: (p.default, p.annotation) for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    frozen = own.pop("frozen"), options.pop("frozen")
    assert {default for default, _ in frozen} == {None}
    options |= {"rng": (0, "jax.Array | int"), "compression": (None, "dict[str, Any] | None")}
    assert own == {"wrt": (None, "Any"), "sync_batch_norm": (True, "bool"), **options}  # of a whole module


@pytest.mark.slow
def test_what_a_start_can_be_given():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    state, step = start(devices=None, mesh=mesh, sharding=parallel.sharding_rules({"w": P(None, None)}))
    state, _ = train.fit(state, step, TRAIN, epochs=1, batch_size=16, progress=False)
    assert len(state.params["w"].sharding.device_set) == 4
    state, step = start(compression={"type": "2bit", "threshold": 0.5}, devices=jax.devices()[:1], model_state=None)
    assert state.store.compressor is not None
    with pytest.raises(TypeError, match="unexpected keyword argument 'acumulate'"):
        start(acumulate=2)
    with pytest.raises(TypeError, match=r"no argument 'trainable'.* frozen="):
        start(trainable="w")
    with pytest.raises(TypeError, match="no argument 'kvstore'; call it kind"):
        start(kvstore="device")
    with pytest.raises(TypeError, match=r"loss_fn must be a function of \(params, batch, rng\), got"):
        train.start(LOSS, TX, {"w": jnp.zeros(3)})


def test_the_loop_of_the_docs_is_that_of_fit(tmp_path):
    state, step = start()
    manager = checkpoint.Manager(tmp_path)
    with train.interruptible() as interrupt, train.progress(15, title="mine") as bar:
        for batch in data.batches(TRAIN, 16, rng=jax.random.key(1), epochs=3, devices=jax.devices()[:2]):
            state, metrics = step(state, batch)
            bar.step(metrics)
            if interrupt.should_stop(state):
                break
        manager.save(state)
        manager.close()
    assert set(bar.means()) == {"loss", "accuracy"}
    saved, _ = manager.restore_latest(start()[0])
    np.testing.assert_array_equal(saved.params["w"], state.params["w"])
    fitted, _ = train.fit(*start(), TRAIN, epochs=3, batch_size=16, progress=False)
    assert int(fitted.step) == int(saved.step)


def test_progress_reads_late_and_counts_each_step(capsys, monkeypatch):
    monkeypatch.setattr("jaxpar.train._fit.progress.in_notebook", lambda: True)

    class Value(float):
        shape, ndim = (), 0

        def __float__(self):
            read.append(int(self))
            return super().__float__()

    read = []
    monkeypatch.setattr(np, "ndim", lambda x: 0)
    with train.progress(20, title="mine", done=4) as bar:
        assert "mine:  20%" in capsys.readouterr().out
        for i in range(10):
            bar.step({"loss": Value(i)})
        assert read == [0, 1]
        assert bar.means() == {"loss": 4.5}
        assert read == list(range(10))
    assert "mine" in capsys.readouterr().out
    train.progress().__enter__().__exit__()
    with train.progress(3, show=False) as bar:
        bar.step({"loss": 1.0})
    assert bar.means() == {"loss": 1.0}
    with pytest.raises(ValueError, match=r"train.progress: total must be an int of 0 or more, got -1"):
        train.progress(-1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_the_block(number, monkeypatch, capsys):
    saved = []

    def loop(**options):
        with train.interruptible(**options) as interrupt:
            for i in range(9):
                if i == 3:
                    signal.raise_signal(number)
                if interrupt.should_stop(i):
                    break
            saved.append(i)
        assert interrupt.asked

    monkeypatch.delattr(sys, "ps1", raising=False)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        loop()
    assert saved == [3]
    if number == signal.SIGTERM:
        assert raised.value.code == 143
        assert capsys.readouterr().err == "jaxpar: train: SIGTERM: stopped after step 4\n"
        return
    assert str(raised.value) == "train: interrupted after step 4"
    loop(on_interrupt="return")
    assert capsys.readouterr() == ("jaxpar: train: interrupted after step 4\n", "")
    with pytest.raises(ValueError, match="unknown on_interrupt 'stop'"):
        train.interruptible("stop")


@pytest.mark.slow
@pytest.mark.parametrize("engine", mostly_slow(["pmap", "shard_map", "jit"], "jit"))
def test_a_search_for_the_rate_compiles_once_and_leaves_the_state_alone(engine):
    state, step = start(engine=engine)
    before = snapshot(state)
    options = {"batch_size": 16, "lowest": 1e-3, "highest": 100.0}
    found = train.lr_find(state, step, TRAIN, steps=30, **options)
    assert_unchanged(state, before)
    assert found.rates == pytest.approx(np.geomspace(1e-3, 100.0, 30)[: len(found.rates)])
    assert 1e-3 < found.suggestion < 100.0
    gc.collect()
    arrays = len(jax.live_arrays())
    with compilations() as count:
        again = train.lr_find(state, step, TRAIN, steps=25, **options)
    assert count() == 0
    gc.collect()
    assert len(jax.live_arrays()) <= arrays
    # The losses are those of steps with these rates.
    batches = data.batches(TRAIN, 16, rng=state.rng, epochs=None, devices=jax.devices()[:2])
    for rate, loss, batch in zip(again.rates, again.losses, batches, strict=False):
        state, metrics = step(updaters.set_learning_rate(state, rate), batch)
        assert float(metrics["loss"]) == loss


@pytest.mark.slow
def test_a_search_ends_where_the_loss_grows():
    def loss_fn(params, batch, rng):
        return ((batch["image"] @ params["w"] - 1.0) ** 2).mean(), {}

    state, step = train.start({"w": jnp.zeros(4)}, TX, loss_fn)
    found = train.lr_find(state, step, TRAIN, batch_size=16, lowest=1e-3, highest=1e6, steps=100)
    assert len(found.losses) == len(found.rates) == len(found.smoothed) < 90
    assert 1e-3 < found.suggestion < 2.0
    assert "suggestion" in found._repr_html_()
    span = f"{len(found.rates)} rates from 1.00e-03 to {found.rates[-1]:.2e}"
    assert repr(found) == f"RateTest({span}, suggestion {found.suggestion:.2e})"
    assert "data:image/png;base64,iVBORw0KGgo" in found._repr_html_()
    flat = train.make_train_step(lambda params, batch, rng: (0 * params["w"].sum() + 1.0, {}))
    found = train.lr_find(state, flat, TRAIN, batch_size=16, steps=5)
    assert found.suggestion is None
    assert "no rate makes the loss fall" in found._repr_html_()
    nan = train.make_train_step(lambda params, batch, rng: (params["w"].sum() * jnp.nan, {}))
    found = train.lr_find(state, nan, TRAIN, batch_size=16, steps=5)
    assert (len(found.losses), found.suggestion) == (1, None)
    assert "<img" in found._repr_html_()


CURVES = {  # losses of rates 1, 2, 4, ..., and the rate at which the average falls fastest
    "falls fast, then slowly": ([10, 10, 2, 2, 2, 2, 2], 4.0),
    "falls fastest after its least value": ([10, 9, 8, 7, 6, 60, 60, -1, -1, -1], 8.0),
    "falls to the end": ([10, 10, 9, 8, 6, 0], 32.0),
    "never falls": ([1, 2, 3, 4, 5, 6, 7], None),
    "NaN after a fall": ([10, 9, 4, np.nan], 4.0),
    "too few numbers": ([10, 1, np.nan], None),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_rate_is_where_the_loss_falls_fastest_before_its_least_value(name):
    (losses, want), state = CURVES[name], start()[0]
    left = iter(losses)
    found = train.lr_find(
        state,
        lambda state, batch: (state, {"loss": next(left)}),
        TRAIN,
        batch_size=16,
        lowest=1.0,
        highest=2.0 ** (len(losses) - 1),
        steps=len(losses),
    )
    np.testing.assert_array_equal(found.losses, losses)
    assert found.suggestion == (want if want is None else pytest.approx(want))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lowest": 1.0, "highest": 0.1}, ValueError, "lowest must be below highest, got 1.0 and 0.1"),
        ({"lowest": 0}, ValueError, "lowest must be a finite number above 0, got 0"),
        ({"steps": 1}, ValueError, "steps must be an int of 2 or more, got 1"),
        ({"batch_size": 99}, ValueError, "80 examples make no whole batch of 99"),
        ({"state": {}}, TypeError, r"expected a state, train.create_state\(store, rng\), got {}"),
    ],
)
def test_a_search_that_cannot_be(options, error, message):
    state, step = start()
    with pytest.raises(error, match=message):
        train.lr_find(**{"state": state, "step": step, "train_data": TRAIN, "batch_size": 16, **options})


@pytest.mark.slow
def test_a_search_without_a_rate_in_the_state():
    state, step = train.start({"w": jnp.zeros((4, 3))}, optax.sgd(0.5), LOSS)
    with pytest.raises(ValueError, match=r"this state has no learning rate; make .* with rate_in_state=True, or by"):
        train.lr_find(state, step, TRAIN, batch_size=16)
    scheduled = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(0.1))
    state, step = train.start({"w": jnp.zeros((4, 3))}, scheduled, LOSS)
    with pytest.raises(ValueError, match="this rate follows a schedule"):
        train.lr_find(state, step, TRAIN, batch_size=16)
    assert int(train.fit(state, step, TRAIN, epochs=1, batch_size=16, progress=False)[0].step) == 5


@pytest.mark.slow
def test_a_search_in_the_mesh_of_the_user():
    want = train.lr_find(*start(), TRAIN, batch_size=16, steps=12)
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):
        found = train.lr_find(*start(), TRAIN, batch_size=16, steps=12)
    assert found.losses == want.losses


@pytest.mark.slow
def test_a_sweep_compiles_once_and_does_not_grow():
    losses, arrays = [], []
    for i, rate in enumerate((0.1, 0.2, 0.4, 0.8)):
        state = updaters.set_learning_rate(world.start_classifier(TX), rate)
        with compilations() as count:
            _, history = train.fit(state, STEP, TRAIN, epochs=2, batch_size=16, progress=False)
        assert i == 0 or count() == 0
        losses.append(history[-1]["loss"])
        del state, _
        gc.collect()
        arrays.append(len(jax.live_arrays()))
    assert losses == sorted(losses, reverse=True)
    assert arrays[1] == arrays[2] == arrays[3]
