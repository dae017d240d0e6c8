"""What a user made and let go is released: no program and no array stays for each new optimizer, loss or function."""

import copy
import dataclasses
import gc
import textwrap
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import compilations
from launched import python
from world import run_on

from jaxpar import data, kv, parallel, sparse, train, updaters, viz
from jaxpar._core import recent

DEVICES = jax.devices()[:2]
PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
VALUES = [jnp.ones(3), jnp.ones((4, 3))]  # for the keys of "b" and "w"
ON_EACH = [[jax.device_put(value, d) for d in DEVICES] for value in VALUES]
RNG = np.random.default_rng(0)
DATA = data.Dataset(RNG.random((16, 4), np.float32), RNG.integers(0, 3, 16))
BATCH = {"x": jnp.ones((8, 4))}
TX = optax.sgd(0.1)


def apply(params, images):
    return images @ params["w"] + params["b"][None]


@pytest.fixture
def most_one(monkeypatch):
    """Caches of one entry fill at once."""
    monkeypatch.setattr(recent, "MOST", 1)


def own():
    """A number that refers to an array of its own, which must go with it."""
    array = jnp.full(5, 0.5)
    return lambda: array[0]


def optimizer():
    number = own()
    return optax.chain(optax.trace(0.9), optax.stateless(lambda g, _: jax.tree.map(lambda x: -number() * x, g)))


def loss():
    number = own()
    return lambda params, batch, rng: (number() * (apply(params, batch["x"]) ** 2).mean(), {})


def apply_fn():
    number = own()
    return lambda params, images: number() * apply(params, images)


def updater():
    number = own()
    return lambda key, pushed, stored: stored + number() * pushed


def started(tx=TX, kind="device"):
    return train.create_state(kv.from_params(PARAMS, optimizer=tx, kind=kind), 0, devices=DEVICES)


FIT_STEP = train.make_train_step(train.classification_loss(apply))
STEPS = {
    "accumulated": train.make_train_step(loss(), engine="shard_map", accumulate=2, nonfinite="skip"),
    "late": train.make_train_step(loss(), engine="shard_map"),
    "local": train.make_train_step(loss(), local_steps=2, outer_optimizer=TX),
}


MANY = train.make_train_step(lambda params, batch, rng: (apply(params, batch["x"]).mean(), {}))


def fit():
    run_on(DATA, started(optimizer()), step=FIT_STEP, epochs=1, batch_size=8, test_data=DATA, apply_fn=apply)


def stepped(step, kind="device"):
    state, _ = STEPS[step](started(optimizer(), kind), BATCH)
    STEPS[step].finish(state)


def new_step(**options):
    train.make_train_step(loss(), **options)(started(), BATCH)


def push(kind, values, **options):
    kv.push(kv.from_params(PARAMS, kind=kind, **options), [0, 1], values)


THRESHOLDS = iter(range(1, 1000))


def compress():
    store = kv.init(kv.create("device"), 0, jnp.ones(64))
    store = kv.set_gradient_compression(store, {"type": "2bit", "threshold": float(next(THRESHOLDS))})
    kv.push(store, 0, [jax.device_put(jnp.ones(64), d) for d in DEVICES])


def push_rows():
    store = kv.init(kv.set_optimizer(kv.create("local"), optimizer()), 0, jnp.ones((4, 2)))
    kv.push(store, 0, sparse.RowSparse(jnp.array([1, 2]), jnp.ones((2, 2)), (4, 2)))


def run_on_all(engine):
    number = own()
    parallel.spmd(lambda x: number() * x, axis_name="i", engine=engine, devices=DEVICES)(jnp.ones(2))


DOORS = {
    "kv.from_params": lambda: kv.from_params(PARAMS, optimizer=optimizer()),
    "kv.set_optimizer": lambda: kv.set_optimizer(kv.from_params(PARAMS), optimizer()),
    "push device": lambda: push("device", ON_EACH, optimizer=optimizer()),
    "push device, one value": lambda: push("device", VALUES, optimizer=optimizer()),
    "push local": lambda: push("local", ON_EACH, optimizer=optimizer()),
    "push stateless": lambda: push("device", ON_EACH, updater=updaters.stateless(updater())),
    "push plain": lambda: push("device", ON_EACH, updater=updater()),
    "push rows": push_rows,
    "compression": compress,
    "fit": fit,
    "step, accumulated": lambda: stepped("accumulated"),
    "step, staleness": lambda: stepped("late", "dist_async"),
    "step, local steps": lambda: stepped("local"),
    "make_train_step pmap": new_step,
    "make_train_step shard_map": lambda: new_step(engine="shard_map", grad_transform=optimizer()),
    "evaluate": lambda: train.evaluate(PARAMS, apply_fn(), DATA, batch_size=8),
    "evaluate a data set": lambda: train.evaluate(PARAMS, apply, copy.deepcopy(DATA), batch_size=8),
    "confusion_matrix": lambda: train.confusion_matrix(PARAMS, apply_fn(), DATA, batch_size=8),
    "mistakes": lambda: train.mistakes(PARAMS, apply_fn(), DATA, batch_size=8),
    "spmd pmap": lambda: run_on_all("pmap"),
    "spmd shard_map": lambda: run_on_all("shard_map"),
    "viz.trace": lambda: viz.trace(apply_fn(), PARAMS, jnp.ones((8, 4))),
}


def alive():
    """(executables, arrays) that are alive."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables()), len(jax.live_arrays())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_let_go_is_released(door, most_one, quick_collections):
    DOORS[door]()  # fills the caches
    before = alive()
    DOORS[door]()
    executables, arrays = alive()
    assert executables <= before[0], "programs stay"
    assert arrays <= before[1], "arrays stay"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["pmap", "shard_map", "jit"])
def test_loss_optimizer_and_state_are_dead_after_a_fit(engine, most_one, quick_collections):
    def fit_once():
        loss_fn, tx = loss(), optimizer()
        given = started(tx)
        state, history = run_on(
            {"x": np.ones((16, 4), np.float32)},
            given,
            step=train.make_train_step(loss_fn, engine=engine),
            epochs=2,
            batch_size=8,
        )
        return [weakref.ref(each) for each in (loss_fn, tx.update, given, state, history)]

    made = fit_once()
    fit_once()  # the caches, of one entry, hold what was used last
    gc.collect()
    assert [each() for each in made] == [None] * 5


@pytest.mark.slow
def test_a_state_that_is_held_holds_no_program(most_one, quick_collections):
    def trained():
        step = train.make_train_step(loss())
        return step(started(), BATCH)[0]

    states = [trained(), trained()]
    executables, _ = alive()
    states += [trained(), trained()]
    assert alive()[0] <= executables
    assert len({id(state) for state in states}) == 4


def test_numbers_of_steps_are_kept_for_the_last_calls_only(quick_collections):
    state, batches = started(), {"x": jnp.ones((80, 8, 4))}
    for i in range(70):
        state, _ = MANY.many(state, batches, i, i)
    _, arrays = alive()
    for i in range(70, 79):
        state, _ = MANY.many(state, batches, i, i)
    assert alive()[1] <= arrays


# ---- and nothing is compiled twice that is used again


@pytest.mark.slow
def test_two_optimizers_in_turn_compile_nothing_more():
    pair = [optimizer(), optimizer()]

    def each():
        for tx in pair:
            state, _ = STEPS["late"](started(tx, "dist_async"), BATCH)
            STEPS["late"].finish(state)
            push("device", ON_EACH, optimizer=tx)
            push("local", ON_EACH, optimizer=tx)

    each()
    with compilations() as count:
        each()
    assert count() == 0


@pytest.mark.slow
def test_a_state_goes_on_with_its_program_after_others_were_released(most_one):
    state, _ = STEPS["late"](started(), BATCH)
    stepped("late")
    state, metrics = STEPS["late"](state, BATCH)
    assert int(state.step) == 2
    assert np.isfinite(float(metrics["loss"]))


def test_one_function_is_compiled_once_by_spmd():
    def double(x):
        return 2 * x

    def run():
        return parallel.spmd(double, axis_name="i", devices=DEVICES)(jnp.ones(2))

    run()
    with compilations() as count:
        assert run().tolist() == [2, 2]
    assert count() == 0


# ---- the cache


def test_the_one_used_longest_ago_goes(monkeypatch):
    monkeypatch.setattr(recent, "MOST", 2)
    made = []
    double = recent.Recent(lambda x: made.append(x) or 2 * x)
    assert [double(x) for x in (1, 2, 1, 3, 1, 2)] == [2, 4, 2, 6, 2, 4]
    assert made == [1, 2, 3, 2]
    assert double(1, make=False) == 2
    assert double(3, make=False) is None


def test_keys_that_cannot_be_compared_are_different():
    @dataclasses.dataclass
    class Scale:
        by: np.ndarray

    scales = [Scale(np.ones(2)), Scale(np.full(2, 3.0))]
    of = recent.Recent(lambda scale: scale.by[0])
    assert [of(scale) for scale in (*scales, *scales)] == [1, 3, 1, 3]


def test_a_function_that_changes_gives_what_it_computes_now():
    """It has no hash, and equals itself after the change."""

    @dataclasses.dataclass
    class Model:
        scale: float = 1.0

        def __call__(self, params, images):
            return self.scale * apply(params, images)

    model = Model()
    once = train.predict(PARAMS, model, DATA, batch_size=8)
    for scale in (2.0, 1.0):
        model.scale = scale
        assert np.array_equal(train.predict(PARAMS, model, DATA, batch_size=8), scale * once)


@pytest.mark.parametrize("engine", ["pmap", "shard_map", "jit"])
def test_a_program_is_freed_with_its_last_user(engine):
    """Not when the garbage collector finds it: until then 45 MB of programs had come together."""
    loss = lambda params, batch, rng: ((params["w"] * batch).mean(), {})  # noqa: E731
    state, step = train.start({"w": jnp.ones(())}, TX, loss, engine=engine, devices=DEVICES)
    program, donated, rng = step._prepare(state, None)
    step._programs = None  # which keeps it for the next call
    if engine != "jit":
        program.finish(donated, rng)  # of the steps of one device
    program(donated, rng, jnp.ones(4))
    freed = weakref.ref(program)
    gc.disable()
    try:
        del program
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_60_fits_with_60_optimizers_hold_memory():
    """The one test of the memory that the system sees, in a process of its own: 60 compilations."""
    program = textwrap.dedent("""
        import resource, test_memory

        def measure():
            with open("/proc/self/statm") as file:
                mib = int(file.read().split()[1]) * resource.getpagesize() / 2**20
            return mib, *test_memory.alive()

        for _ in range(20):
            test_memory.fit()
        before = measure()
        for _ in range(40):
            test_memory.fit()
        print(*(now - then for now, then in zip(measure(), before)))
    """)
    if not Path("/proc/self/statm").exists():
        pytest.skip("the system has no /proc/self/statm to read the memory of a process from")
    done = python("-c", program, timeout=1800, JAX_NUM_CPU_DEVICES="8")
    mib, executables, arrays = map(float, done.stdout.split())
    assert mib < 10
    assert (executables, arrays) == (0, 0)
