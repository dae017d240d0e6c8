"""What newcomers get wrong, and what they are told: each message says what to do, and nothing has changed by then."""

import functools
import operator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from world import LOSS, STEP, apply

import jaxpar
from jaxpar import checkpoint, compression, data, kv, parallel, sparse, train, updaters, viz
from jaxpar._devices.mesh import is_donated
from jaxpar.models import lenet, matrix_factorization as factors

DEVICES = jax.devices()[:4]
PARAMS = {"w": jnp.zeros((4, 3))}
TX = optax.sgd(0.1)
BATCH = {"image": np.ones((8, 4), np.float32), "label": np.zeros(8, np.int32)}
ARRAYS = data.Dataset(BATCH["image"], BATCH["label"])
STORE = kv.init(kv.create("device"), 3, jnp.zeros(2))
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


# The tables of likely mistakes: a call, and words of the message in their order. More of them stand in the tests of
# the functions, such as test_kv_errors.py.

SIX = jax.tree.map(lambda x: x[:6], BATCH)
LOGITS = apply(PARAMS, BATCH["image"])
OTHERS = data.Dataset(BATCH["image"], BATCH["label"] + 1)
MESH = jax.make_mesh((4,), ("data",), devices=DEVICES)
ROWS = kv.init(kv.create(), 0, jnp.ones((4, 2)))
KEY = jax.random.key(0)
STATE_LAST = updaters.Updater(lambda key, value: (), lambda key, pushed, stored, state: (stored, state))
NO_DEVICES = ("devices must be a list of devices", "got 4", "jax.devices()[:4]")
ONE_DEVICE = "device must be one such as jax.devices()[0]"
A_DATA_SET = "data.Dataset(images, labels) or data.f"
NO_AXIS = ("no pmap or shard_map around this call has the axis axis_name='data'", "leave it out")

make_step = train.make_train_step
from_params = functools.partial(kv.from_params, PARAMS)
compress = functools.partial(kv.set_gradient_compression, STORE)
plot = functools.partial(viz.plot_network, apply, PARAMS)


@functools.cache
def state():
    """One for all rows, since each of them must fail before it is donated."""
    return start()


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


PAIR = {"a": jnp.ones(2), "b": jnp.ones(2)}
TYPES = {
    "an updater in a chain": (
        lambda: kv.from_params(PAIR, optimizer=optax.chain(optax.clip(1.0), jaxpar.mxnet.sgd(0.1))),
        "mxnet_sgd is an updater with a state for each key",
        "give it alone as optimizer=, or an optimizer of optax here",
    ),
    "an updater in MultiSteps": (
        lambda: kv.from_params(PAIR, optimizer=optax.MultiSteps(jaxpar.mxnet.sgd(0.1), 2)),
        "mxnet_sgd is an updater with a state for each key",
    ),
    "params of lookahead": (
        lambda: kv.from_params(optax.LookaheadParams.init_synced(PAIR)),
        "got LookaheadParams",
        "give the fast params",
    ),
    # the store
    "a string for devices": (lambda: kv.create(devices="cpu"), "a list of devices", "got 'cpu'"),
    "strings as devices": (lambda: kv.create(devices=["cpu:0"]), "a list of devices", "['cpu:0']"),
    "numbers as devices": (lambda: kv.create(devices=[0, 1]), "a list of devices", "[0, 1]"),
    "a number for devices": (lambda: kv.create("device", devices=4), *NO_DEVICES),
    "one device": (lambda: kv.create(devices=DEVICES[0]), "a list of devices", "write [device] for one"),
    "an argument twice": (lambda: from_params(params=PARAMS), "params is given twice", "by name"),
    "the function of an optimizer": (lambda: from_params(optimizer=optax.sgd), "expected an optax", "sgd(0.1)"),
    "a word for an optimizer": (lambda: from_params(optimizer="sgd"), "optax.sgd(0.1)", "'sgd'"),
    "an optimizer's state": (lambda: from_params(optimizer=TX.init(PARAMS)), "got a tuple of 2"),
    "a store for params": (lambda: kv.from_params(STORE), "got a KVStore", "kv.to_params(store)"),
    "a state for params": (lambda: kv.from_params(state()), "got a TrainState", "state.params"),
    "a model for params": (lambda: kv.from_params(apply), "expected an array", "eqx.partition", "nnx.split"),
    "a number for a mesh": (lambda: from_params(mesh=4), "mesh must be a jax.sharding.Mesh or None, got 4"),
    "a word for a rule": (lambda: from_params(mesh=MESH, sharding="fsdp"), "'w' must be a rule", "got 'fsdp'"),
    "the store forgotten": (lambda: kv.push(3, jnp.ones(2)), "value is missing", "kv.push(store, key, value)"),
    "params for the store": (lambda: kv.push(PARAMS, 3, jnp.ones(2)), "store must be a KVStore", "got a dict"),
    "a state for the store": (lambda: kv.pull(state(), 0), "must be a KVStore", "got a TrainState; give its .store"),
    "a name in a store of ints": (lambda: kv.init(STORE, "w", jnp.ones(2)), "'w'", "kv.names(store)"),
    "a name pushed": (lambda: kv.push(STORE, "w", jnp.ones(2)), "must be an int", "'w'", "kv.names(store)"),
    "a key of no kind": (lambda: kv.push(STORE, 3.0, jnp.ones(2)), "must be an int, got 3.0"),
    "a tuple of keys": (lambda: kv.push(STORE, (3,), [jnp.ones(2)]), "must be an int", "(3,)", "give a list of ints"),
    "a list of keys": (lambda: kv.push(STORE, [3], jnp.ones(2)), "value must be a list", "keys [3]", "float32[2]"),
    "a number for an axis": (lambda: kv.push(STORE, 3, jnp.ones(2), axis_name=0), "axis_name", "got 0"),
    "a number for devices to pull to": (lambda: kv.pull(STORE, 3, devices=4), "jax.devices()[:4]"),
    "an item of a store": (lambda: STORE[3], "no items", "kv.pull(store, 3)"),
    "an item set": (lambda: operator.setitem(STORE, 3, 1), "never changes", "store = kv.push(store, 3, value)"),
    "MXNet's order of an updater": (lambda: kv.set_updater(STORE, mxnet_order), "pushed, stored", "another order"),
    "another order of Updater.update": (lambda: kv.set_updater(STORE, STATE_LAST), "another order"),
    "an updater of two": (lambda: kv.set_updater(STORE, lambda pushed, stored: stored), "got <lambda>(pushed, stored)"),
    "a rate for an optimizer": (lambda: kv.set_optimizer(STORE, 0.1), "such as optax.sgd(0.1); got 0.1"),
    "compression as keywords": (lambda: compress(type="2bit"), "no argument 'type'", "known are store, spec"),
    "rows by floats": (lambda: kv.row_sparse_pull(ROWS, 0, jnp.full(2, 0.5)), "row ids must be integers"),
    # updaters
    "a misspelt rate": (lambda: updaters.mxnet_sgd(lerning_rate=0.1), "write learning_rate=0.1"),
    "from_optax of a function": (lambda: updaters.from_optax(optax.sgd), "call it first, sgd(0.1)"),
    "stateless of an optimizer": (lambda: updaters.stateless(TX), "kv.set_optimizer takes an optax"),
    # compression and rows
    "a word for a compression": (lambda: compression.make("2bit"), "spec must be a dict, got '2bit'"),
    "a table for rows": (lambda: sparse.to_dense(jnp.ones((3, 2))), "rows must be a RowSparse", "got float32[3,2]"),
    # the step
    "a misspelt option": (lambda: make_step(LOSS, acumulate=2), "'acumulate'; did you mean accumulate?"),
    "an optimizer for the step": (lambda: make_step(LOSS, optimizer=TX), "'optimizer'; give the optimizer to train"),
    "a misspelt dtype": (lambda: make_step(LOSS, compute_dtype="bfloat"), "compute_dtype='bfloat'"),
    "the function of a transform": (lambda: make_step(LOSS, grad_transform=optax.clip), "grad_transform", "call it"),
    "a loss of two arguments": (lambda: make_step(lambda params, batch: (0.0, {})), "got <lambda>(params, batch)"),
    "a loss that wants a model state": (lambda: step_of(lambda params, batch, rng, state: 0), "model_state=..."),
    "a loss of each example": (lambda: step_of(each), "the loss must be a scalar, the mean over the examples", "(2,)"),
    "a loss without aux": (lambda: step_of(lambda p, b, r: total(p)), "must return (loss, aux)", "a dict", "float32[]"),
    "logits for a loss": (lambda: step_of(LOGITS), "loss_fn must be a function of (params", "float32[8,3]"),
    "a gradient for a loss": (lambda: step_of(jax.grad(LOSS, has_aux=True)), "leave out jax.grad"),
    "a gradient and a value": (lambda: step_of(jax.value_and_grad(LOSS, has_aux=True)), "a scalar", "leave out"),
    "a loss of integers": (lambda: step_of(lambda *args: (jnp.int32(3), {})), "floating", "got int32"),
    "words in aux": (lambda: step_of(lambda p, b, r: (total(p), {"a": "x"})), "'a' in aux", "got 'x'"),
    "a list for aux": (lambda: step_of(lambda p, b, r: (total(p), [])), "with aux a dict"),
    "logits for a model": (lambda: train.classification_loss(LOGITS), "the function apply_fn", "float32[8,3]"),
    "params for the store of a state": (lambda: train.create_state(PARAMS, 0), "store must be a KVStore", "got a dict"),
    "a number for devices of a state": (lambda: train.create_state(from_params(), 0, devices=4), *NO_DEVICES),
    "no random key": (lambda: train.create_state(from_params()), "rng is missing", "(store, rng)"),
    "a word for a random key": (lambda: train.create_state(from_params(), "0"), "jax.random.key(0), got '0'"),
    "NumPy's generator": (lambda: train.create_state(from_params(), np.random.default_rng(0)), "jax.random.key(0)"),
    "a batch of lists": (lambda: STEP(state(), {"image": [[1.0]], "label": [0]}), "batch['image'][0][0]"),
    "a batch of words": (lambda: STEP(state(), {**BATCH, "label": np.array(["a"])}), "batch['label'] must be an array"),
    "a tuple for a batch": (lambda: STEP(state(), tuple(BATCH.values())), '"image" and "label"', "a tuple of 2"),
    "a data set for a batch": (lambda: STEP(state(), ARRAYS), "batch must be an array", "got a Dataset"),
    "a store for the state": (lambda: STEP(from_params(), BATCH), "expected a state", "train.create_state", "KVStore"),
    # fit
    "params for a state": (lambda: train.fit(PARAMS, STEP, ARRAYS, **FIT), "expected a state", "got a dict"),
    "a store for a state": (lambda: train.fit(from_params(), STEP, ARRAYS, **FIT), "create_state", "got a KVStore"),
    "a loss for a step": (lambda: train.fit(state(), LOSS, ARRAYS, **FIT), "(state, batch)", "make_train_step"),
    "an optimizer for a step": (lambda: train.fit(state(), TX, ARRAYS, **FIT), "(state, batch)", "make_train_step"),
    "a tuple for the data of fit": (lambda: train.fit(state(), STEP, tuple(BATCH.values()), **FIT), A_DATA_SET),
    "an array for the data of fit": (lambda: train.fit(state(), STEP, BATCH["image"], **FIT), A_DATA_SET),
    "epochs without a name": (lambda: train.fit(state(), STEP, ARRAYS, 5, 8), "got 5 arguments", "epochs=..."),
    "early stopping": (lambda: fit(early_stopping=True), "'early_stopping'", "callbacks=train.EarlyStopping("),
    "patience": (lambda: fit(patience=3), "'patience'", "train.EarlyStopping(patience=3)"),
    "validation data": (lambda: fit(validation_data=ARRAYS), "'validation_data'", "test_data="),
    "a split": (lambda: fit(validation_split=0.1), "validation_split", "= data.split(data.Dataset(x, y)"),
    "weights of classes": (lambda: fit(class_weight={0: 2.0}), "class_weight", "return ((w * losses).sum(), w.sum())"),
    "Keras's x and y": (lambda: train.fit(state(), STEP, LOGITS, 8, **FIT), "got 4 arguments", "data.Dataset(x, y)"),
    "a rate for fit": (lambda: fit(learning_rate=0.1), "'learning_rate'; give the optimizer to train.start"),
    "verbose": (lambda: fit(verbose=1), "'verbose'; write progress="),
    "shuffle": (lambda: fit(shuffle=True), "'shuffle'; fit shuffles by state.rng"),
    "a misspelt option of fit": (lambda: fit(num_epochs=1), "did you mean epochs?"),
    "half an epoch": (lambda: fit(epochs=1.5), "epochs must be an int of 1 or more, got 1.5"),
    "a name for data": (lambda: train.fit(state(), STEP, "mnist", **FIT), "data.load('mnist')"),
    "the class of a callback": (lambda: fit(callbacks=train.LivePlot), "not a class; write LivePlot("),
    "a callback of one argument": (lambda: fit(callbacks=lambda state: None), "(state, record), got <lambda>(state)"),
    "a number for a folder": (lambda: fit(checkpoint_dir=3), "checkpoint_dir must be a path", "got 3"),
    "model and params swapped": (lambda: evaluate(apply, PARAMS, ARRAYS), "expected a function, got a dict", "order"),
    "a list to evaluate": (lambda: evaluate(PARAMS, apply, [1]), "a data.Dataset", "data.collect(loader)"),
    "times for the data of mistakes": (
        lambda: train.plot_mistakes(train.mistakes(PARAMS, apply, OTHERS), np.array(["2026"], "datetime64[Y]")),
        *("plot_mistakes: data must be a Dataset", "got datetime64[Y][1]"),
    ),
    "both results of fit": (lambda: train.plot_history((1, [])), "the history, the second result of train.fit"),
    # data
    "PyTorch's train=": (lambda: data.load(train=True), "data.load(name, 'train')"),
    "arrays for a data set": (lambda: data.batches(tuple(BATCH.values()), 8), "a tuple of 2", "data.Dataset(images"),
    "shuffled batches": (lambda: data.batches(ARRAYS, 8, shuffle=True), "give rng=jax.random.key(0)"),
    "batches of words": (lambda: data.batches(ARRAYS, "8"), "batch_size must be an int", "got '8'"),
    "a number to collect": (lambda: data.collect(3), "elements must be an iterable, got 3"),
    # parallel
    "a word for a device": (lambda: parallel.copy_to(PARAMS, "cpu"), ONE_DEVICE, "got 'cpu'"),
    "devices for a device": (lambda: parallel.copy_to(PARAMS, DEVICES), ONE_DEVICE, "got a list of 4"),
    "a number for devices to load to": (lambda: parallel.split_and_load(np.ones(8), 4), *NO_DEVICES),
    "a number for devices to copy to": (lambda: parallel.replicate(PARAMS, 4), *NO_DEVICES),
    "an array to allreduce": (lambda: parallel.allreduce(jnp.ones(3)), "a list of arrays", "jax.lax.psum"),
    "no axis for spmd": (lambda: parallel.spmd(apply), "axis_name is missing", "axis_name=..."),
    # checkpoints
    "state and path swapped": (lambda: checkpoint.save(state(), "path"), "the first argument", "a TrainState"),
    "restore without a state": (lambda: checkpoint.restore("path"), "like is missing", "(path, like)"),
    "a function saved": (lambda: checkpoint.save("path", {"f": apply}), "leaf 'f' must be an array"),
    # pictures
    "a word for an array": (lambda: plot("x"), "images='x', which is not an array", "jax.ShapeDtypeStruct"),
    "a misspelt option of a picture": (lambda: plot(BATCH["image"], tittle="x"), "did you mean title?"),
    "a word for attributes": (lambda: plot(BATCH["image"], node_attrs="oval"), "a dict of names and values such as"),
    "a name for a file": (lambda: viz.print_summary(apply, PARAMS, BATCH["image"], file="x"), "an open file"),
    # models
    "images and params swapped": (lambda: lenet.apply(jnp.ones((2, 28, 28, 1)), lenet.init(KEY)), "lenet.init"),
    "ids that are no integers": (lambda: factors.apply(PARAMS, jnp.ones(2), jnp.ones(2)), "user_ids must be integers"),
}
VALUES = {
    "labels of the trained part": (
        lambda: train.start(PAIR, optax.multi_transform({"x": optax.sgd(0.1)}, {"a": "x"}), LOSS, frozen="b"),
        "labels or the mask",
        "name all params, those that frozen= leaves out too",
    ),
    "a mask of the trained part": (
        lambda: kv.from_params(PAIR, optimizer=optax.masked(optax.sgd(0.1), {"a": True}), frozen="b"),
        "labels or the mask",
        "name all params, those that frozen= leaves out too",
    ),
    # the store
    "an unknown kind": (lambda: kv.create("devcie"), "unknown kind 'devcie'", "did you mean 'device'?"),
    "a negative size": (lambda: kv.create(bucket_bytes=-1), "bucket_bytes", "0 or more, got -1"),
    "staleness of another kind": (lambda: kv.create("device", staleness=2), "staleness=2", "'dist_async'"),
    "no params": (lambda: kv.from_params(None, optimizer=TX), "params is None", "nothing to train"),
    "an axis of no mesh": (lambda: from_params(mesh=MESH, sharding=parallel.fsdp("model")), "'w'", "axis 'model'"),
    "a row too many": (lambda: kv.row_sparse_pull(ROWS, 0, np.array([9])), "row 9", "rows are 0 to 3"),
    # updaters
    "a negative rate": (lambda: updaters.mxnet_sgd(-1.0), "learning_rate must be", "0 or more", "got -1.0"),
    # compression and rows
    "rows of another length": (lambda: sparse.RowSparse(np.arange(2), np.ones((3, 2)), (4, 2)), "of shape (2, 2)"),
    # the step
    "a misspelt engine": (lambda: make_step(LOSS, engine="pmpa"), "did you mean 'pmap'?"),
    "a batch of 6": (lambda: STEP(state(), SIX), "a batch of 6", "4 devices", "use a batch of 4 or 8, or pad it"),
    # fit
    "no optimizer": (lambda: train.fit(without_optimizer(), STEP, ARRAYS, **FIT), "no optimizer", "optax.sgd(0.1)"),
    "no epochs": (lambda: train.fit(state(), STEP, ARRAYS, batch_size=8), "epochs= or max_steps="),
    "batches of 6": (lambda: fit(batch_size=6), "6 cannot", "4 devices", "use a batch of 4 or 8"),
    "a batch larger than the data": (lambda: fit(batch_size=16), "no whole batch of 16", "smaller"),
    "test data only": (lambda: fit(test_data=ARRAYS), "test_data"),
    "a word for resume": (lambda: fit(resume="yes"), "'auto', True or False, got 'yes'"),
    "a table for metrics": (lambda: fit(metrics_file="m.csv"), "JSON lines", "to_pandas"),
    # data
    "a misspelt data set": (lambda: data.load("fashion_mnsit"), "did you mean fashion_mnist?"),
    "a misspelt source": (lambda: data.load(source="debain"), "did you mean 'debian'?"),
    "an array of 6": (lambda: parallel.split_and_load(np.ones(6), DEVICES), "use a batch of 4 or 8, or even_split=F"),
    # pictures
    "a misspelt theme": (lambda: plot(BATCH["image"], theme="drak"), "did you mean 'dark'?"),
    # models
    "images without channels": (lambda: lenet.apply(lenet.init(KEY), jnp.ones((2, 28, 28))), "28, 28, 1), got (2, 28"),
    "a negative size of a table": (lambda: factors.init(KEY, -3, 3, 2), "users must be an int of 1 or more, got -3"),
}
NAMES = {
    "an axis outside": (lambda: push_over_data(STORE, jnp.ones(2)), *NO_AXIS),
    "an axis outside, in a jit": (lambda: jax.jit(push_over_data)(STORE, jnp.ones(2)), *NO_AXIS),
}
ATTRIBUTES = {
    "a method of a store": (lambda: STORE.push(3, jnp.ones(2)), "'push'", "store = kv.push(store, ...)"),
    "a parameter of a store": (lambda: STORE.weight, "'KVStore' object has no attribute 'weight'"),
    "the package's verb": (lambda: jaxpar.fit, "no attribute 'fit'; write jp.train.fit"),
    "a misspelt module": (lambda: jaxpar.dat, "did you mean data?"),
}
TABLES = {TypeError: TYPES, ValueError: VALUES, NameError: NAMES, AttributeError: ATTRIBUTES}
MISTAKES = {what: (error, *row) for error, rows in TABLES.items() for what, row in rows.items()}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_likely_mistake_is_answered(what, tmp_path, monkeypatch):
    """It is jaxpar that raises, neither JAX nor Python, and nothing has happened by then."""
    monkeypatch.chdir(tmp_path)
    error, call, *words = MISTAKES[what]
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
