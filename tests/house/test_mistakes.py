"""The mistakes that people make, what each call says, and one line of what to do. docs/errors.md is written from it:

JAX_NUM_CPU_DEVICES=4 PYTHONPATH=.:tests python tests/house/test_mistakes.py

Other wrong calls may end in the words of Python or JAX, if nothing is lost, wrong or hung.
"""

import dataclasses
import functools
import operator
import pickle
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from world import LOSS, STEP, apply

import jaxpar
from jaxpar import checkpoint, data, kv, parallel, train, viz
from jaxpar._devices.mesh import is_donated

DEVICES = jax.devices()[:4]
PARAMS = {"w": jnp.zeros((4, 3))}
TX = optax.sgd(0.1)
BATCH = {"image": np.ones((8, 4), np.float32), "label": np.zeros(8, np.int32)}
ARRAYS = data.Dataset(BATCH["image"], BATCH["label"])
STORE = kv.init(kv.create("device"), 3, jnp.zeros(2))
Dense = dataclasses.make_dataclass("Dense", ["init", "apply"])
LINEN = Dense(lambda rng, x: PARAMS, apply)  # as a module of Linen or what `hk.transform` gives
FIT = {"epochs": 1, "batch_size": 8, "progress": False}
evaluate = functools.partial(train.evaluate, batch_size=8)


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


@pytest.mark.parametrize(
    "call",
    [
        lambda store, value: kv.push(store, 3, value).values[3],
        lambda store, value: kv.pushpull(store, 3, value)[1],
        lambda store, value: kv.flush(store).values[3],
    ],
    ids=["push", "pushpull", "flush"],
)
def test_the_warning_is_of_the_line_that_forgot_it(call):
    """Of a delayed push too, which goes through the queue."""
    store = kv.push(kv.init(kv.create("dist_async"), 3, jnp.zeros(2)), 3, jnp.ones(2))
    run = parallel.spmd(call, axis_name="data", devices=DEVICES, in_axes=(None, 0))
    with pytest.warns(UserWarning, match="without axis_name, nothing is summed") as caught:
        run(store, jnp.arange(8.0).reshape(4, 2))
    assert {warning.filename for warning in caught} == {__file__}


def test_a_state_used_again_after_a_step_took_it():
    state = start()
    new, _ = STEP(state, BATCH)
    advice = "this state was donated to a step", "state, metrics = step(state, batch)", "device_get"
    mistake(lambda: STEP(state, BATCH), RuntimeError, "train step", *advice)
    mistake(lambda: state.params, RuntimeError, "state.params", *advice)
    mistake(lambda: evaluate(state, apply, ARRAYS), RuntimeError, *advice)
    mistake(lambda: train.fit(state, STEP, ARRAYS, **FIT), ValueError, "use the state that")
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
    mistake(lambda: evaluate(PARAMS, apply, dataset), TypeError, "evaluate: labels", *words)


def test_another_model_at_restore(tmp_path):
    checkpoint.save(tmp_path / "saved", start())
    wider, renamed = start({"w": jnp.zeros((5, 3))}), start({"v": jnp.zeros((4, 3))})
    path = tmp_path / "saved"
    mistake(lambda: checkpoint.restore(path, wider), ValueError, "('w')", "expected float32[5,3]", "found float32[4,3]")
    mistake(lambda: checkpoint.restore(path, renamed), ValueError, "('v')", "('w')", "was the model changed?")
    mistake(lambda: checkpoint.restore(tmp_path / "none", wider), FileNotFoundError, "there is nothing at", "none")


SIX = jax.tree.map(lambda x: x[:6], BATCH)
LOGITS = apply(PARAMS, BATCH["image"])
PAIR = {"a": jnp.ones(2), "b": jnp.ones(2)}
ROWS = kv.init(kv.create(), 0, jnp.ones((4, 2)))
KEY = jax.random.key(0)

make_step = train.make_train_step
from_params = functools.partial(kv.from_params, PARAMS)
plot = functools.partial(viz.plot_network, apply, PARAMS)


@functools.cache
def state():
    """One for all rows, since each of them must fail before it is donated."""
    return start()


@functools.cache
def taken():
    """A state that a step took."""
    old = start()
    STEP(old, BATCH)
    return old


def without_optimizer():
    return train.create_state(from_params(), 0, devices=DEVICES)


def fit(**options):
    return train.fit(state(), STEP, ARRAYS, **{**FIT, **options})


def step_of(loss_fn):
    return make_step(loss_fn)(state(), BATCH)


def total(params):
    return jnp.sum(params["w"])


def each(params, batch, rng):
    return apply(params, batch["image"]).mean(1), {}


def mxnet_order(key, stored, pushed):
    return stored + pushed


def push_over_data(store, value):
    return kv.push(store, 3, value, axis_name="data")


def save_and_restore(like):
    folder = Path(tempfile.mkdtemp())  # a call of a row leaves nothing in the working directory
    checkpoint.save(folder / "saved", start())
    checkpoint.restore(folder / "saved", like)


# By room: the error, the call, words of the message in their order, and what to do.
T, V, R, A, N = TypeError, ValueError, RuntimeError, AttributeError, NameError
MISTAKES = {
    "The store": {
        "an unknown kind": (
            V,
            lambda: kv.create("devcie"),
            ["unknown kind 'devcie'", "did you mean 'device'?"],
            "Write one of the kinds that the message lists.",
        ),
        "a number of devices": (
            T,
            lambda: kv.create("device", devices=4),
            ["devices must be a list of devices", "jax.devices()[:4]"],
            "Give devices, `jax.devices()[:4]`.",
        ),
        "a word for devices": (
            T,
            lambda: kv.create(devices="cpu"),
            ["devices must be a list of devices", "got 'cpu'"],
            'Give devices, `jax.devices("cpu")`.',
        ),
        "the state for the store": (
            T,
            lambda: kv.pull(state(), 0),
            ["store must be a KVStore", "got a TrainState; give its .store"],
            "Give `state.store`.",
        ),
        "params for the store": (
            T,
            lambda: kv.push(PARAMS, 3, jnp.ones(2)),
            ["store must be a KVStore", "got a dict"],
            "Make a store first: `kv.from_params(params)`.",
        ),
        "a name in a store of numbers": (
            T,
            lambda: kv.push(STORE, "w", jnp.ones(2)),
            ["must be an int", "'w'", "kv.names(store)"],
            "`kv.from_params` makes a store whose keys have names.",
        ),
        "a key that is not there": (
            KeyError,
            lambda: kv.push(STORE, 4, jnp.ones(2)),
            ["key 4 was never initialised", "[3]", "kv.init"],
            "Call `kv.init` with the key first.",
        ),
        "several keys in a tuple": (
            T,
            lambda: kv.push(STORE, (3,), [jnp.ones(2)]),
            ["must be an int", "(3,)", "give a list of ints"],
            "Write the keys as a list.",
        ),
        "one value for a list of keys": (
            T,
            lambda: kv.push(STORE, [3], jnp.ones(2)),
            ["value must be a list", "keys [3]", "float32[2]"],
            "Give a list of values, one for each key.",
        ),
        "another shape": (
            V,
            lambda: kv.push(STORE, 3, jnp.ones(3)),
            ["expected shape (2,)", "got (3,)"],
            "Push arrays of the shape that the key has. Nothing is broadcast.",
        ),
        "a call as of MXNet's object": (
            A,
            lambda: STORE.push(3, jnp.ones(2)),
            ["'push'", "store = kv.push(store, ...)"],
            "Functions return a new store: `store = kv.push(store, 3, grad)`.",
        ),
        "an item of a store": (T, lambda: STORE[3], ["no items", "kv.pull(store, 3)"], "`kv.pull(store, 3)`"),
        "an item set": (
            T,
            lambda: operator.setitem(STORE, 3, 1),
            ["never changes", "store = kv.push(store, 3, value)"],
            "`store = kv.push(store, 3, value)`",
        ),
        "an axis that is not there": (
            N,
            lambda: push_over_data(STORE, jnp.ones(2)),
            ["no pmap or shard_map around this call has the axis axis_name='data'", "leave it out"],
            "Leave out `axis_name` outside of `pmap` and `shard_map`.",
        ),
        "the function of an optimizer": (
            T,
            lambda: from_params(optimizer=optax.sgd),
            ["expected an optax", "sgd(0.1)"],
            "Call it: `optax.sgd(0.1)`.",
        ),
        "a word for an optimizer": (
            T,
            lambda: from_params(optimizer="sgd"),
            ["optax.sgd(0.1)", "'sgd'"],
            "Give `optax.sgd(0.1)`.",
        ),
        "no params": (
            V,
            lambda: kv.from_params(None, optimizer=TX),
            ["params is None", "nothing to train"],
            "Look at what the init function returned.",
        ),
        "a model for params": (
            T,
            lambda: kv.from_params(apply),
            ["expected an array", "params are arrays alone", "train.start takes whole modules"],
            "A store takes params. `train.start` takes [a whole module](your_model.md) too.",
        ),
        "a Linen module for params": (
            T,
            lambda: train.start(LINEN, TX, LOSS),
            ["expected params, got a Dense", "model.init(jax.random.key(0), x)", "model.apply"],
            '`model.init(jax.random.key(0), x)["params"]`. A module of NNX or Equinox is taken as it is.',
        ),
        "masks of the trained part": (
            V,
            lambda: kv.from_params(PAIR, optimizer=optax.masked(optax.sgd(0.1), {"a": True}), frozen="b"),
            ["labels or the mask", "name all params, those that frozen= leaves out too"],
            "Labels and masks name all params.",
        ),
        "MXNet's order of an updater": (
            T,
            lambda: kv.set_updater(STORE, mxnet_order),
            ["pushed, stored", "another order"],
            "Write `def updater(key, pushed, stored)`. MXNet's computes other numbers without an error.",
        ),
        "an updater of two": (
            T,
            lambda: kv.set_updater(STORE, lambda pushed, stored: stored),
            ["(key, pushed, stored)", "got <lambda>(pushed, stored)"],
            "Write `def updater(key, pushed, stored)`.",
        ),
        "an updater of one key in a chain": (
            T,
            lambda: kv.from_params(PAIR, optimizer=optax.chain(optax.clip(1.0), jaxpar.mxnet.sgd(0.1))),
            ["mxnet_sgd is an updater with a state for each key", "give it alone as optimizer="],
            "Give it alone, or an optimizer of optax in the chain.",
        ),
        "row ids as floats": (
            T,
            lambda: kv.row_sparse_pull(ROWS, 0, jnp.full(2, 0.5)),
            ["row ids must be integers"],
            "`ids.astype(int)`",
        ),
        "a row too many": (
            V,
            lambda: kv.row_sparse_pull(ROWS, 0, np.array([9])),
            ["row 9", "rows are 0 to 3"],
            "Rows are counted from 0.",
        ),
    },
    "The training step": {
        "a state that a step took": (
            R,
            lambda: STEP(taken(), BATCH),
            ["this state was donated to a step", "state, metrics = step(state, batch)", "device_get"],
            "Write `state, metrics = step(state, batch)`, and use the new state.",
        ),
        "params of a state that a step took": (
            R,
            lambda: taken().params,
            ["state.params", "this state was donated to a step", "device_get"],
            "Read them before the step, or from the new state.",
        ),
        "the store for the state": (
            T,
            lambda: STEP(from_params(), BATCH),
            ["expected a state", "train.create_state", "KVStore"],
            "`train.create_state(store, 0)`, or begin with `train.start`.",
        ),
        "params for the store of a state": (
            T,
            lambda: train.create_state(PARAMS, 0),
            ["store must be a KVStore", "got a dict"],
            "`train.create_state(kv.from_params(params, optimizer=tx), 0)`",
        ),
        "a word for a random key": (
            T,
            lambda: train.create_state(from_params(), "0"),
            ["jax.random.key(0)", "got '0'"],
            "Give an int or `jax.random.key(0)`.",
        ),
        "a batch that devices cannot share": (
            V,
            lambda: STEP(state(), SIX),
            ["a batch of 6", "4 devices", "use a batch of 4 or 8"],
            "Use a batch that the number of devices divides.",
        ),
        "a batch of lists": (
            T,
            lambda: STEP(state(), {"image": [[1.0]], "label": [0]}),
            ["batch['image'][0][0]"],
            "Make arrays: `np.array(batch)`.",
        ),
        "a tuple for a batch": (
            T,
            lambda: STEP(state(), tuple(BATCH.values())),
            ['"image" and "label"', "a tuple of 2"],
            '`{"image": x, "label": y}`, or a loss function that takes the tuple.',
        ),
        "one-hot labels": (
            T,
            lambda: STEP(state(), {**BATCH, "label": np.eye(3, dtype=np.float32)[np.zeros(8, int)]}),
            ["classification_loss: labels", "(n,)", "labels.argmax(-1)"],
            "`labels.argmax(-1)`",
        ),
        "labels as floats": (
            T,
            lambda: STEP(state(), {**BATCH, "label": np.zeros(8, np.float32)}),
            ["classification_loss: labels", "(n,)", "labels.astype(int)"],
            "`labels.astype(int)`",
        ),
        "a loss of one argument": (
            T,
            lambda: make_step(lambda params: (0.0, {})),
            ["(params, batch, rng)", "got <lambda>(params)"],
            "`def loss_fn(params, batch, rng)`. `rng` may be left out.",
        ),
        "a loss of each example": (
            T,
            lambda: step_of(each),
            ["the loss must be a scalar, the mean over the examples"],
            "Return `losses.mean()`.",
        ),
        "a loss with a value that has no name": (
            T,
            lambda: step_of(lambda p, b: (total(p), total(p))),
            ["must return loss or (loss, aux)", "a dict"],
            '`return loss, {"penalty": penalty}`',
        ),
        "a gradient for a loss": (
            T,
            lambda: step_of(jax.grad(LOSS, has_aux=True)),
            ["leave out jax.grad"],
            "Give the loss itself.",
        ),
        "a misspelt engine": (
            V,
            lambda: make_step(LOSS, engine="pmpa"),
            ["did you mean 'pmap'?"],
            "Write one of the engines that the message lists.",
        ),
        "the optimizer for the step": (
            T,
            lambda: make_step(LOSS, optimizer=TX),
            ["'optimizer'; give the optimizer to train.start"],
            "`train.start(params, optimizer, loss_fn)`",
        ),
    },
    "fit": {
        "a state that a step took, for fit": (
            V,
            lambda: train.fit(taken(), STEP, ARRAYS, **FIT),
            ["use the state that"],
            "Use the state that the step or `fit` returned.",
        ),
        "params for a state": (
            T,
            lambda: train.fit(PARAMS, STEP, ARRAYS, **FIT),
            ["expected a state", "got a dict"],
            "`state, step = train.start(params, optimizer, loss_fn)`",
        ),
        "a loss for a step": (
            T,
            lambda: train.fit(state(), LOSS, ARRAYS, **FIT),
            ["(state, batch)", "make_train_step"],
            "`train.make_train_step(loss_fn)`",
        ),
        "no optimizer": (
            V,
            lambda: train.fit(without_optimizer(), STEP, ARRAYS, **FIT),
            ["no optimizer", "optax.sgd(0.1)"],
            "`kv.from_params(params, optimizer=optax.sgd(0.1))`",
        ),
        "no epochs": (
            V,
            lambda: train.fit(state(), STEP, ARRAYS, batch_size=8),
            ["epochs= or max_steps="],
            "Give one of the two.",
        ),
        "a batch_size that devices cannot share": (
            V,
            lambda: fit(batch_size=6),
            ["6 cannot", "4 devices", "use a batch of 4 or 8"],
            "Use a multiple of the number of devices.",
        ),
        "a batch larger than the data": (
            V,
            lambda: fit(batch_size=16),
            ["no whole batch of 16", "smaller"],
            "Use a smaller batch_size.",
        ),
        "a callback of one argument": (
            T,
            lambda: fit(callbacks=lambda state: None),
            ["(state, record)", "got <lambda>(state)"],
            "`def callback(state, record)`. It is checked before the first epoch.",
        ),
        "the class of a callback": (
            T,
            lambda: fit(callbacks=train.LivePlot),
            ["not a class", "LivePlot("],
            "`train.LivePlot(...)`",
        ),
        "Keras's validation_data": (
            T,
            lambda: fit(validation_data=ARRAYS),
            ["'validation_data'", "test_data="],
            "`test_data=..., apply_fn=...`",
        ),
        "Keras's patience": (
            T,
            lambda: fit(patience=3),
            ["'patience'", "train.EarlyStopping(patience=3)"],
            "`callbacks=train.EarlyStopping(patience=3)`",
        ),
        "Keras's class_weight": (
            T,
            lambda: fit(class_weight={0: 2.0}),
            ["class_weight", "return ((w * losses).sum(), w.sum())"],
            "Weigh in the loss function.",
        ),
        "Keras's metrics": (
            T,
            lambda: fit(metrics=["accuracy"]),
            ["'metrics'; return them beside the loss", "eval_fn="],
            "`return loss, {'accuracy': accuracy}` in `loss_fn`, and `eval_fn=` for scores of other data.",
        ),
        "Lightning's max_epochs": (T, lambda: fit(max_epochs=1), ["'max_epochs'; write epochs="], "`epochs=5`"),
        "Keras's x and y": (
            T,
            lambda: train.fit(state(), STEP, BATCH["image"], BATCH["label"], **FIT),
            ["expected 3 arguments", "got 4", "data.Dataset(x, y)"],
            "`data.Dataset(x, y)`, or a dict of arrays.",
        ),
        "Keras's steps_per_epoch": (
            T,
            lambda: fit(steps_per_epoch=5),
            ["'steps_per_epoch'", "data.from_iterable", "max_steps="],
            "`data.from_iterable(loader, steps_per_epoch=5)`, or `max_steps=`.",
        ),
        "Keras's verbose": (T, lambda: fit(verbose=1), ["'verbose'; write progress="], "`progress=False`"),
    },
    "Data": {
        "an array for images and labels": (
            T,
            lambda: train.fit(state(), STEP, BATCH["image"], **FIT),
            ['a batch must be a dict with "image" and "label"'],
            "`data.Dataset(images, labels)`. An array alone is data for a `loss_fn` of arrays.",
        ),
        "a name for data": (
            T,
            lambda: train.fit(state(), STEP, "mnist", **FIT),
            ["data.load('mnist')"],
            "`data.load('mnist')`",
        ),
        "a misspelt data set": (
            V,
            lambda: data.load("fashion_mnsit"),
            ["did you mean fashion_mnist?"],
            "Write one of the names that the message lists.",
        ),
        "PyTorch's train=": (
            T,
            lambda: data.load(train=True),
            ["data.load(name, 'train')"],
            "`data.load(name, 'train')`",
        ),
        "shuffled batches": (
            T,
            lambda: data.batches(ARRAYS, 8, shuffle=True),
            ["give rng=jax.random.key(0)"],
            "`rng=jax.random.key(0)`",
        ),
        "an array of six for four devices": (
            V,
            lambda: parallel.split_and_load(np.ones(6), DEVICES),
            ["use a batch of 4 or 8, or even_split=F"],
            "Use a multiple, or `even_split=False`.",
        ),
    },
    "Evaluation": {
        "model and params swapped": (
            T,
            lambda: evaluate(apply, PARAMS, ARRAYS),
            ["expected a function, got a dict", "order"],
            "`train.evaluate(params, apply_fn, data)`",
        ),
        "a list to evaluate": (
            T,
            lambda: evaluate(PARAMS, apply, [1]),
            ["a data.Dataset", "data.collect(loader)"],
            "`data.collect(loader)` makes a data set of a loader.",
        ),
        "evaluation of a state that a step took": (
            R,
            lambda: evaluate(taken(), apply, ARRAYS),
            ["this state was donated to a step", "device_get"],
            "Evaluate the new state.",
        ),
    },
    "Checkpoints": {
        "state and path swapped": (
            T,
            lambda: checkpoint.save(state(), "path"),
            ["the first argument", "a TrainState"],
            "`checkpoint.save(path, state)`",
        ),
        "a state to pickle": (
            T,
            lambda: pickle.dumps(state()),
            ["checkpoint.save(path, state)", "jax.device_get(state.params)"],
            "`checkpoint.save(path, state)`, or pickle `jax.device_get(state.params)`.",
        ),
        "nothing there": (
            FileNotFoundError,
            lambda: checkpoint.restore("none", state()),
            ["there is nothing at", "none"],
            "Look at the path that the message has in full.",
        ),
        "a wider model": (
            V,
            lambda: save_and_restore(start({"w": jnp.zeros((5, 3))})),
            ["('w')", "expected float32[5,3]", "found float32[4,3]"],
            "Restore into the model that was saved.",
        ),
        "renamed params": (
            V,
            lambda: save_and_restore(start({"v": jnp.zeros((4, 3))})),
            ["('v')", "('w')", "was the model changed?"],
            "Restore into the model that was saved.",
        ),
    },
    "Pictures": {
        "a word for an array": (
            T,
            lambda: plot("x"),
            ["images='x', which is not an array", "jax.ShapeDtypeStruct"],
            "Give an array, or `jax.ShapeDtypeStruct(shape, dtype)`.",
        ),
        "a misspelt theme": (V, lambda: plot(BATCH["image"], theme="drak"), ["did you mean 'dark'?"], '`theme="dark"`'),
        "a model for the function": (
            T,
            lambda: viz.plot_network(jaxpar.models),
            ["expected a function and then its arguments", "got a module"],
            "`viz.plot_network(apply, params, images)`",
        ),
    },
    "Coming from MXNet": {
        "out=": (
            T,
            lambda: kv.pull(STORE, 3, out=jnp.ones(2)),
            ["'out'", "value = kv.pull(store, key)"],
            "`value = kv.pull(store, key)`",
        ),
        "priority=": (
            T,
            lambda: kv.push(STORE, 3, jnp.ones(2), priority=-1),
            ["'priority'", "leave it out"],
            "Leave it out.",
        ),
        "kvstore=": (
            T,
            lambda: train.start(PARAMS, TX, LOSS, kvstore=None),
            ["'kvstore'", "call it kind"],
            '`kind="device"`',
        ),
        "mx.mod.Module": (
            A,
            lambda: jaxpar.mxnet.Module,
            ["no attribute 'Module'", "mxnet.load_symbol"],
            "`mxnet.load_symbol(path)`, then `train.start` and `train.fit`, see [from MXNet](from_mxnet.md).",
        ),
        "mx.io.ImageRecordIter": (
            A,
            lambda: jaxpar.mxnet.ImageRecordIter,
            ["no attribute 'ImageRecordIter'", "mxnet.image_record_source"],
            "`mxnet.image_record_source(rec, batch_size)`",
        ),
        "path_imgidx=": (
            T,
            lambda: jaxpar.mxnet.image_record_source("a.rec", 8, path_imgidx="a.idx"),
            ["'path_imgidx'", "call it idx"],
            '`idx="a.idx"`',
        ),
    },
}
ROWS_OF_ALL = {what: row for rows in MISTAKES.values() for what, row in rows.items()}
PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


@pytest.mark.parametrize("what", ROWS_OF_ALL)
def test_a_mistake_that_people_make(what, tmp_path, monkeypatch):
    """It is jaxpar that raises, with one traceback, and nothing has happened by then."""
    monkeypatch.chdir(tmp_path)
    error, call, words, _ = ROWS_OF_ALL[what]
    before = kv.pull(STORE, 3).tolist()
    mistake(call, error, *words)
    with pytest.raises(error) as caught:
        call()
    assert Path(caught.traceback[-1].path).is_relative_to(Path(jaxpar.__file__).parent)
    if what != "a word for an array":  # there the first traceback is of the user's function
        assert not caught.value.__cause__, "two tracebacks are printed"
        assert not caught.value.__context__ or caught.value.__suppress_context__, "two tracebacks are printed"
    assert not is_donated(state())
    assert kv.pull(STORE, 3).tolist() == before
    assert not list(tmp_path.iterdir())


def page():
    lines = [
        "# What an error means, and what to do",
        "",
        "The mistakes that people make most, by room. Each is raised before any work: no state is lost, no file is "
        "written. Other wrong calls end in the words of Python or JAX.",
    ]
    for room, rows in MISTAKES.items():
        lines += ["", f"## {room}", "", "| mistake | what it says | what to do |", "|---|---|---|"]
        for what, (error, _, words, do) in rows.items():
            lines.append(f"| {what} | `{error.__name__}: {' ... '.join(words)}` | {do} |")
    return "\n".join(lines) + "\n"


def test_the_page_of_errors_is_the_table():
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
