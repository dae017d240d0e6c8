"""What newcomers get wrong, and what they are told: each message says what to do, and nothing has changed by then."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import checkpoint, data, kv, parallel, train
from jaxpar._core import checks

DEVICES = jax.devices()[:4]
PARAMS = {"w": jnp.zeros((4, 3))}
TX = optax.sgd(0.1)
BATCH = {"image": np.ones((8, 4), np.float32), "label": np.zeros(8, np.int32)}
ARRAYS = data.Dataset(BATCH["image"], BATCH["label"])
STORE = kv.init(kv.create("device"), 3, jnp.zeros(2))


def apply(params, images):
    return images @ params["w"]


STEP = train.make_train_step(train.classification_loss(apply))


def start(params=PARAMS, **options):
    return train.create_state(kv.from_params(params, optimizer=TX, **options), 0, devices=DEVICES)


def mistake(call, error, *words):
    """Makes the call, and finds the words in its message in this order."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    at = -1
    for word in words:
        at = message.find(word, at + 1)
        assert at >= 0, f"{word!r} is missing, or comes too early, in: {message}"


def test_a_batch_that_the_devices_cannot_share():
    state = start()
    batch = jax.tree.map(lambda x: x[:6], BATCH)
    mistake(lambda: STEP(state, batch), ValueError, "a batch of 6", "4 devices", "use a batch of 4 or 8, or pad it")
    fit = {"epochs": 1, "batch_size": 6, "progress": False}
    mistake(lambda: train.fit(state, STEP, ARRAYS, **fit), ValueError, "6 cannot", "4 devices", "use a batch of 4 or 8")
    mistake(lambda: parallel.split_and_load(np.ones(6), DEVICES), ValueError, "use a batch of 4 or 8, or even_split=F")
    STEP(state, BATCH)  # the state was not given away


def test_devices_asked_for_after_jax_has_started():
    mistake(lambda: parallel.use_cpu_devices(3), RuntimeError, "runs already, on 8 cpu", "restart", "kernel", "first")


@pytest.mark.parametrize("engine", checks.ENGINES)
def test_axis_name_forgotten_inside(engine):
    def run(store, **options):
        def push_and_pull(store, value):
            return kv.pull(kv.push(store, 3, value, **options), 3)

        on_all = parallel.spmd(push_and_pull, engine=engine, axis_name="data", devices=DEVICES, in_axes=(None, 0))
        return on_all(store, jnp.arange(8.0).reshape(4, 2)).tolist()

    with pytest.warns(UserWarning, match="over 'data', without axis_name, nothing is summed .* give axis_name='data'"):
        assert run(STORE) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert run(STORE, axis_name="data") == [[12, 16]] * 4
    own = kv.init(kv.create("local"), 3, jnp.zeros(2))
    assert run(own)[1] == [2, 3]  # no warning: a store of its own on each device


def test_axis_name_given_outside():
    def push(store, value):
        return kv.push(store, 3, value, axis_name="data")

    words = "'data' is the axis of no pmap or shard_map", "leave it out"
    mistake(lambda: push(STORE, jnp.ones(2)), NameError, *words)
    mistake(lambda: jax.jit(push)(STORE, jnp.ones(2)), NameError, *words)


def test_keys_and_lists_of_the_wrong_kind():
    def push(key, value):
        return lambda: kv.push(STORE, key, value)

    mistake(push([3], jnp.ones(2)), TypeError, "keys [3]", "a list with one entry for each", "float32[2]")
    mistake(push([3], [jnp.ones(2)] * 2), ValueError, "1 keys [3]", "2 values", "one entry for each key, a list itself")
    mistake(push((3,), [jnp.ones(2)]), TypeError, "must be an int", "(3,)", "give a list of ints")
    mistake(push("w", jnp.ones(2)), TypeError, "must be an int", "'w'", "kv.names(store)")
    mistake(push(4, jnp.ones(2)), KeyError, "key 4 was never initialised", "holds [3]", "call kv.init first")


def test_integer_gradients():
    mistake(
        lambda: kv.push(STORE, 3, jnp.ones(2, jnp.int32)), TypeError, "key 3", "float32", "int32", "astype('float32')"
    )


def test_a_state_used_again_after_a_step_took_it():
    state = start()
    new, _ = STEP(state, BATCH)
    advice = "given to the state that a step made of it", "state, metrics = step(state, batch)", "device_get"
    mistake(lambda: STEP(state, BATCH), RuntimeError, "train step", *advice)
    mistake(lambda: state.params, RuntimeError, "state.params", *advice)
    mistake(lambda: train.evaluate(state, apply, ARRAYS, batch_size=8), RuntimeError, *advice)
    mistake(
        lambda: train.fit(state, STEP, ARRAYS, epochs=1, batch_size=8, progress=False), ValueError, "use the one that"
    )
    STEP(new, BATCH)


def test_an_updater_that_changes_in_place():
    def adds(key, pushed, stored):
        stored += pushed  # makes another array, which is thrown away

    def assigns(key, pushed, stored):
        stored[:] = pushed
        return stored

    def push(updater):
        return lambda: kv.push(kv.set_updater(STORE, updater), 3, jnp.ones(2))

    mistake(push(adds), TypeError, "key 3 is None", "returns the new value", "cannot change `stored` in place")
    mistake(push(assigns), TypeError, "immutable", ".at[")
    assert kv.pull(STORE, 3).tolist() == [0, 0]


def test_training_without_an_optimizer():
    state = train.create_state(kv.from_params(PARAMS), 0, devices=DEVICES)
    mistake(
        lambda: train.fit(state, STEP, ARRAYS, epochs=1, batch_size=8),
        ValueError,
        "no optimizer",
        "replace the parameters by their gradients",
        "optimizer=optax.sgd(0.1)",
    )
    mistake(lambda: kv.from_params(PARAMS, optimizer=optax.sgd), TypeError, "call it first, sgd(0.1)")
    mistake(lambda: kv.from_params(PARAMS, optimizer="sgd"), TypeError, "optax.sgd(0.1)", "'sgd'")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.eye(3, dtype=np.float32)[np.zeros(8, int)], ("(n,)", "float32[", "one-hot", "labels.argmax(-1)")),
        (np.zeros((8, 1), np.int32), ("(n,)", "int32[", "labels[:, 0]")),
        (np.zeros(8, np.float32), ("(n,)", "float32[", "labels.astype(int)")),
    ],
    ids=["one-hot", "column", "floating"],
)
def test_labels_of_the_wrong_form(labels, words):
    mistake(lambda: STEP(start(), {**BATCH, "label": labels}), TypeError, "classification_loss: labels", *words)
    dataset = data.Dataset(BATCH["image"], labels)
    mistake(lambda: train.evaluate(PARAMS, apply, dataset, batch_size=8), TypeError, "evaluate: labels", *words)


def test_a_loss_that_is_not_one():
    def step(loss_fn):
        return lambda: train.make_train_step(loss_fn)(start(), BATCH)

    def each(params, batch, rng):
        return apply(params, batch["image"]).mean(1), {}

    def bare(params, batch, rng):
        return apply(params, batch["image"]).mean()

    mistake(step(each), TypeError, "the loss must be a scalar, the mean over the examples", "(2,)")
    mistake(step(bare), TypeError, "must return (loss, aux)", "a dict, which may be empty", "float32[]")
    mistake(step(apply(PARAMS, BATCH["image"])), TypeError, "the function loss_fn(params, batch, rng) itself")
    mistake(lambda: STEP(start(), (BATCH["image"], BATCH["label"])), TypeError, '"image" and "label"', "a tuple of 2")


def test_another_model_at_restore(tmp_path):
    checkpoint.save(tmp_path / "saved", start())
    wider, renamed = start({"w": jnp.zeros((5, 3))}), start({"v": jnp.zeros((4, 3))})
    path = tmp_path / "saved"
    mistake(lambda: checkpoint.restore(path, wider), ValueError, "('w')", "expected float32[5,3]", "found float32[4,3]")
    mistake(lambda: checkpoint.restore(path, renamed), ValueError, "('v')", "('w')", "was the model changed?")
    mistake(lambda: checkpoint.restore(tmp_path / "none", wider), FileNotFoundError, "there is nothing at", "none")


def test_one_thing_for_another():
    """Parameters for a store, a store for a state, a number for devices, methods for functions, data for a loader."""
    store = kv.from_params(PARAMS, optimizer=TX)
    mistake(lambda: train.create_state(PARAMS, 0), TypeError, "expected a store, kv.from_params", "got a dict")
    mistake(lambda: STEP(store, BATCH), TypeError, "expected a state, train.create_state(kv.from_params", "KVStore")
    for call in (
        lambda: kv.create("device", devices=4),
        lambda: train.create_state(store, 0, devices=4),
        lambda: parallel.split_and_load(np.ones(8), 4),
        lambda: parallel.replicate(PARAMS, 4),
    ):
        mistake(call, TypeError, "devices must be a list of devices", "got 4", "jax.devices()[:4]")
    mistake(lambda: STORE.push(3, jnp.ones(2)), AttributeError, "'push'", "store = kv.push(store, ...)")
    mistake(lambda: STORE.weight, AttributeError, "'KVStore' object has no attribute 'weight'")
    assert not hasattr(STORE, "pull")
    fit = {"epochs": 1, "batch_size": 8, "progress": False}
    for arrays in ((BATCH["image"], BATCH["label"]), BATCH, BATCH["image"]):
        mistake(
            lambda a=arrays: train.fit(start(), STEP, a, **fit), TypeError, "data.Dataset(images, labels) or data.f"
        )
    mistake(
        lambda: train.evaluate(PARAMS, apply, [1], batch_size=8), TypeError, "a data.Dataset", "data.collect(loader)"
    )


def test_host_arrays_are_no_mistake():
    """NumPy arrays, lists of them and views are copied; changing them later changes nothing."""
    value = np.ones(2, np.float32)
    store = kv.push(STORE, 3, [value, value])
    value[:] = 7
    assert kv.pull(store, 3).tolist() == [2, 2]
    _, metrics = STEP(start(), BATCH)
    assert float(metrics["loss"]) == pytest.approx(np.log(3))
