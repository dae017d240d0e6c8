"""What `train` refuses: the error, the call, and the names and values that its message must have, in this order.

What people do by mistake is in tests/house/test_mistakes.py, with what to do. What goes wrong in the middle of a run is
in the tests of what the run does then.
"""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from world import apply as classify, line, points, run_on, squares, start, step_of

from jaxpar import data, kv, train
from jaxpar._devices.mesh import is_donated

PARAMS = {"w": np.ones((5, 4), np.float32)}
ROWS = {"x": np.ones((37, 5), np.float32), "y": np.ones((37, 4), np.float32)}
BYTES = data.Dataset(np.zeros((37, 5), np.uint8), np.arange(37) % 4)


def apply(params, images):
    return images @ params["w"]


def eval_fn(params, batch):
    return {"error": (apply(params, batch["x"]) - batch["y"]).mean(1)}


def options(**given):
    return lambda: train.make_train_step(**{"loss_fn": squares, **given})


def scale(**given):
    return lambda: train.DynamicLossScale(**given)


def step(batch, is_stack=False, **given):
    """One step of a new state, or the steps of a stack of batches. What is refused takes no state."""

    def call():
        state, step = start(), step_of(squares, **given)
        try:
            (step.many if is_stack else step)(state, batch)
        finally:
            assert not is_donated(state)

    return call


def many(batches):
    return step(batches, is_stack=True)


def new_model_state(**changed):
    held = {"mean": jnp.zeros(3), "seen": jnp.int32(0)}
    made = train.make_train_step(lambda params, batch, rng, model_state: (0.0, {}, {**model_state, **changed}))
    return lambda: made(start(2, model_state=held), line())


def evaluated(function=eval_fn, source=ROWS, **given):
    return lambda: train.evaluate(PARAMS, data=source, eval_fn=function, **{"batch_size": 8, **given})


def value(make):
    """Of a loss of a batch, as an `eval_fn` gives it."""
    return evaluated(lambda params, batch: {"loss": make(batch["x"])})


def classified(images=BYTES.images[:5], labels=BYTES.labels[:5], apply_fn=apply, **given):
    """By each function that takes a classifier and a data set."""

    def call():
        for function in (train.evaluate, train.confusion_matrix):
            with pytest.raises((TypeError, ValueError), match=rf"{function.__name__}|logits"):
                function(PARAMS, apply_fn, data.Dataset(images, labels), **given)
        train.mistakes(PARAMS, apply_fn, data.Dataset(images, labels), **given)

    return call


def predicted(source, apply_fn=apply):
    return lambda: train.predict(PARAMS, apply_fn, source, batch_size=10)


def fit(**given):
    return lambda: run_on(points(50), **given)


def stopping(monitor=None, **given):
    return lambda: train.EarlyStopping(monitor, **given)


OWN = types.SimpleNamespace(examples=lambda batch_size: 37, batches=lambda batch_size, **given: iter(()))
TWO_PARTS = {"x": np.ones((8, 3)), "y": np.ones((4, 3))}
T, V = TypeError, ValueError
REFUSED = {
    # Options of a step.
    "an unknown engine": (V, options(engine="pjit"), ["engine 'pjit'", "auto, pmap, shard_map, jit"]),
    "an unknown action": (V, options(nonfinite="raise"), ["nonfinite 'raise'", "ignore, skip, stop"]),
    "no microbatches": (V, options(accumulate=0), ["accumulate", "1 or more", "got 0"]),
    "a bool of microbatches": (T, options(accumulate=True), ["accumulate", "got True"]),
    "a float of microbatches": (T, options(accumulate=2.0), ["accumulate", "got 2.0"]),
    "integers to compute in": (T, options(compute_dtype=jnp.int8), ["compute_dtype", "int8"]),
    **{
        f"a loss scale of {wrong}": (
            V,
            options(loss_scale=wrong),
            ["loss_scale", "above 0", "'dynamic'", f"got {wrong}"],
        )
        for wrong in (0, -1.0, np.inf, np.nan)
    },
    "a word for a loss scale": (T, options(loss_scale="auto"), ["loss_scale", "'dynamic'", "got 'auto'"]),
    "a bool for a loss scale": (T, options(loss_scale=True), ["loss_scale", "got True"]),
    **{f"{wrong} local steps": (V, options(local_steps=wrong), ["local_steps", f"got {wrong}"]) for wrong in (0, -1)},
    **{
        f"{wrong!r} local steps": (T, options(local_steps=wrong), ["local_steps", f"got {wrong!r}"])
        for wrong in (True, 1.5, "4")
    },
    "an outer optimizer alone": (V, options(outer_optimizer=optax.sgd(0.7)), ["outer_optimizer", "local_steps="]),
    "a rate for an outer optimizer": (
        T,
        options(outer_optimizer=0.7, local_steps=2),
        ["outer_optimizer", "optax.GradientTransformation", "0.7"],
    ),
    "local steps of virtual shards": (V, options(virtual_shards=8, local_steps=2), ["virtual_shards=", "local_steps="]),
    "virtual shards of the compiler": (V, options(virtual_shards=8, engine="jit"), ["virtual_shards", "compiler"]),
    "no virtual shards": (V, options(virtual_shards=0), ["virtual_shards", "got 0"]),
    "another order of arguments": (
        T,
        options(loss_fn=lambda params, step: None),
        ["(params, batch, rng)", "step"],
    ),
    "a scale of 0": (V, scale(initial=0), ["DynamicLossScale", "initial", "above 0", "got 0"]),
    "a factor of 1": (V, scale(factor=1.0), ["DynamicLossScale", "factor", "above 1", "got 1.0"]),
    "a factor without end": (V, scale(factor=np.inf), ["factor", "got inf"]),
    "no period": (V, scale(period=0), ["period", "1 or more", "got 0"]),
    "a least scale above the first": (V, scale(least=2.0**20), ["least <= initial <= most", "1048576.0"]),
    "a most scale below the first": (V, scale(most=8), ["least <= initial <= most", "8"]),
    # States.
    "a store without params": (
        V,
        lambda: train.create_state(kv.init(kv.create(), 0, jnp.ones(2)), 0),
        ["create_state", "kv.from_params"],
    ),
    "a raw key in a model state": (
        T,
        lambda: start(4, model_state={"key": jax.random.PRNGKey(0)}),
        ["model_state['key']", "uint32[2]", "wrap_key_data"],
    ),
    "a model state of another shape": (V, new_model_state(mean=jnp.zeros(2)), ["'mean'", "(3,)", "(2,)"]),
    "a model state of another dtype": (T, new_model_state(seen=jnp.float32(1)), ["'seen'", "int32", "float32"]),
    "a text in a model state": (T, new_model_state(mean="x"), ["'mean'", "'x'"]),
    "a part more in a model state": (V, new_model_state(other=1), ["pytree structure"]),  # of JAX
    "another transform": (
        V,
        lambda: step_of(squares, grad_transform=optax.adam(0.1))(start(4, grad_transform=optax.trace(0.9)), line()),
        ["grad_transform", "create_state"],
    ),
    # Batches of a step.
    "a batch that devices cannot share": (V, step(line(18)), ["batch of 18", "4 devices", "16 or 20"]),
    "a share that cannot be cut": (V, step(line(24), accumulate=4), ["4 devices 6", "accumulate=4", "batch of 16"]),
    "a share that is too small": (V, step(line(8), accumulate=4), ["4 devices 2", "accumulate=4", "batch of 16"]),
    "large integers": (
        V,
        step(line() | {"y": np.array([0, 2**32] * 8)}),
        ["batch['y']", "int32", "4294967296"],
    ),
    "words in a batch": (T, step({"x": np.ones((16, 3)), "y": "words"}), ["batch['y']", "'words'"]),
    "stacks of two lengths": (
        V,
        many({"x": np.ones((2, 8, 3)), "y": np.ones((3, 8))}),
        ["many", "first axis", "[(2, 8, 3), (3, 8)]"],
    ),
    "one batch for a stack": (
        V,
        many({"x": np.ones((8, 3)), "y": np.ones(8)}),
        ["second axis", "[(8, 3), (8,)]"],
    ),
    "a stack that devices cannot share": (
        V,
        many({"x": np.ones((2, 7, 3)), "y": np.ones((2, 7))}),
        ["batch of 7", "4 devices"],
    ),
    "no state": (T, lambda: step_of(squares).many({}, line()), ["train step", "state", "got {}"]),
    # Options of `fit`, and callbacks.
    "no epochs": (V, fit(epochs=0), ["fit", "epochs", "1 or more", "got 0"]),
    "batches of fit of nothing": (V, fit(batch_size=0), ["batch_size", "1 or more", "got 0"]),
    "a classifier without test data": (V, fit(apply_fn=classify), ["test_data", "apply_fn"]),
    "no checkpoints to keep": (V, fit(keep=0), ["keep", "1 or more", "got 0"]),
    "checkpoints every 0 steps": (V, fit(checkpoint_every=0), ["checkpoint_every", "1 or more", "got 0"]),
    "an unknown progress": (V, fit(progress="plot"), ["progress", "True, False, 'bar'", "got 'plot'"]),
    "a line for -1 epochs": (V, fit(progress=-1), ["progress", "got -1"]),
    "an argument of another name": (T, fit(callback=print), ["fit", "'callback'", "callbacks="]),
    "a number for a callback": (T, fit(callbacks=3), ["callback", "(state, record)", "got 3"]),
    "a name for a callback": (T, fit(callbacks=["a"]), ["callback", "(state, record)", "got 'a'"]),
    "a number for on_step": (T, fit(on_step=3), ["on_step", "(step, metrics)", "got 3"]),
    "a metric whose name does not tell": (V, stopping("reply"), ["EarlyStopping", "'reply'"]),
    "a number for a metric": (T, stopping(3), ["monitor", "got 3"]),
    "an unknown mode": (V, stopping("loss", mode="mim"), ["mode 'mim'", "'min'"]),
    "a mode of no metric": (V, stopping(mode="max"), ["mode='max'", "monitor="]),
    "no patience": (V, stopping(patience=0), ["patience", "1 or more", "got 0"]),
    "a gain below 0": (V, stopping(min_delta=-1), ["min_delta", "0 or more", "got -1"]),
    "no number for a gain": (V, stopping(min_delta=float("nan")), ["min_delta", "got nan"]),
    "a number for a yes": (T, stopping(restore_best=3), ["restore_best", "True or False", "got 3"]),
    "a best by a name that does not tell": (V, lambda: train.KeepBest("reply"), ["KeepBest", "'reply'"]),
    "a word for a rate": (T, lambda: train.LearningRate("fast"), ["LearningRate", "0 or more", "got 'fast'"]),
    # Evaluation: what is asked for.
    "a function for a classifier": (
        T,
        lambda: train.evaluate(PARAMS, eval_fn, ROWS),
        ["evaluate", "evaluate(state, data=..., eval_fn=...)"],
    ),
    "data alone": (T, lambda: train.evaluate(PARAMS, data=ROWS), ["(state, apply_fn, data)", "eval_fn="]),
    "params alone": (T, lambda: train.evaluate(PARAMS), ["(state, apply_fn, data)", "eval_fn="]),
    "a classifier without data": (T, lambda: train.evaluate(PARAMS, apply), ["data.Dataset", "got None"]),
    "a function without data": (
        T,
        lambda: train.evaluate(PARAMS, eval_fn=eval_fn),
        ["(state, apply_fn, data)", "eval_fn="],
    ),
    "a function of params": (T, evaluated(lambda p: 0), ["evaluate: eval_fn", "(params, batch)", "<lambda>(p)"]),
    "a number for a function": (T, evaluated(3), ["evaluate: eval_fn", "(params, batch)", "got 3"]),
    "a function of a model's state": (
        T,
        lambda: train.evaluate(start(model_state={"a": jnp.ones(1)}), data=line(), eval_fn=lambda params, batch: {}),
        ["eval_fn", "(params, batch, model_state)"],
    ),
    # What a function gives.
    "a mean over a batch": (V, value(jnp.mean), ["'loss'", "()", "8 examples", "mean over the batch"]),
    "several values of an example": (V, value(lambda x: x), ["'loss'", "(8, 5)", "8 examples"]),
    "values of columns": (V, value(lambda x: x.mean(0)), ["'loss'", "(5,)", "8 examples"]),
    "one weight of a batch": (V, value(lambda x: (x.sum(1), 5)), ["sum", "(8,)", "weight", "()", "8 examples"]),
    "weights of another shape": (V, value(lambda x: (x.sum(1), x)), ["sum", "(8,)", "weight", "(8, 5)"]),
    "sums of columns": (V, value(lambda x: (x.sum(0), x.sum(0))), ["sum", "(5,)", "weight", "(5,)"]),
    "as many values by chance": (V, value(lambda x: x[0, 0] * jnp.ones(8)), ["'loss'", "(8,)", "16 examples"]),
    "as many weights by chance": (V, value(lambda x: (jnp.ones(8),) * 2), ["(8,)", "weight (8,)", "16"]),
    "three parts": (V, value(lambda x: (x, x, x)), ["tuple of 3", "(sum, weight)"]),
    "columns of pixels": (
        V,
        value(lambda x: train.per_class_accuracy(jnp.ones((8, 4, 4)), jnp.zeros((8, 4), int))),
        ["columns", "(n, k)"],
    ),
    "complex values": (T, value(lambda x: x[:, 0] * 1j), ["real", "complex64[8]"]),
    "values without a name": (T, evaluated(lambda p, b: b["x"].mean(1)), ["{name: values}", "float32[8]"]),
    # Data.
    "no batches": (V, evaluated(source=data.from_iterable([])), ["evaluate", "no batch"]),
    "empty arrays": (V, evaluated(source={"x": ROWS["x"][:0], "y": ROWS["y"][:0]}), ["evaluate", "empty arrays"]),
    "a number for data": (T, evaluated(source=3), ["iterable", "int"]),
    "arrays of two lengths": (V, evaluated(source={**ROWS, "y": ROWS["y"][:3]}), ["first axis", "[(37, 5), (3, 4)]"]),
    "too few batches": (
        V,
        evaluated(source=data.from_iterable([ROWS] * 5, steps_per_epoch=9)),
        ["5 of the 9 batches", "epoch 0"],
    ),
    # Classifiers, and other models.
    "labels beyond the classes": (V, classified(labels=np.arange(5)), ["mistakes", "4 classes", "0 to 4"]),
    "labels that are no integers": (T, classified(labels=np.arange(5.0)), ["mistakes", "labels", "(n,)", "float"]),
    "outputs that are no logits": (
        V,
        classified(apply_fn=lambda params, images: images.sum(1)),
        ["(n, classes)", "float32[5]"],
    ),
    "batches of nothing": (V, classified(batch_size=0), ["mistakes", "batch_size", "1 or more", "got 0"]),
    "batches below nothing": (V, classified(batch_size=-3), ["mistakes", "batch_size", "got -3"]),
    "an empty data set": (V, classified(BYTES.images[:0], BYTES.labels[:0]), ["mistakes", "empty data set"]),
    "images without labels": (T, lambda: train.mistakes(PARAMS, apply, BYTES.images), ["mistakes", "data.Dataset"]),
    "one output for a batch": (
        V,
        predicted(BYTES, lambda params, images: apply(params, images).sum(0)),
        ["one row per example", "(4,)", "10"],
    ),
    "a source that may leave out examples": (T, predicted(OWN), ["SimpleNamespace", "arrays"]),
    "no inputs": (V, predicted(BYTES.images[:0]), ["predict", "empty arrays"]),
    "a matrix that is not square": (V, lambda: train.plot_confusion_matrix(np.zeros((2, 3))), ["square", "(2, 3)"]),
    # Metrics.
    "a column of predictions": (
        V,
        lambda: train.mean_squared_error(np.ones((4, 1)), np.ones(4)),
        ["(4, 1)", "(4,)", "one shape"],
    ),
    "a column of labels": (
        V,
        lambda: train.accuracy(jnp.ones((4, 3)), jnp.ones((4, 1), int)),
        ["accuracy", "(n, ..., classes)", "(n, ...)", "(4, 3)", "(4, 1)", "labels[..., 0]"],
    ),
    "floating labels": (
        T,
        lambda: train.cross_entropy(jnp.ones((4, 3)), jnp.ones(4)),
        ["cross_entropy", "float32[4]", "labels.astype(int)"],
    ),
    "one-hot labels": (
        T,
        lambda: train.cross_entropy(jnp.ones((4, 3)), jnp.ones((4, 3))),
        ["cross_entropy", "float32[4,3]", "labels.argmax(-1)"],
    ),
    "one-hot labels of integers": (
        V,
        lambda: train.accuracy(jnp.ones((4, 3)), jnp.ones((4, 3), int)),
        ["accuracy", "(4, 3)", "labels.argmax(-1)"],
    ),
    "one logit an example": (
        V,
        lambda: train.accuracy(jnp.ones(4), jnp.ones(4, int)),
        ["accuracy", "(4,)", "(logits > 0) == labels"],
    ),
    "a column of logits, of which the first is always the largest": (
        V,
        lambda: train.accuracy(jnp.ones((4, 1)), jnp.ones(4, int)),
        ["accuracy", "(4, 1)", "(logits[..., 0] > 0) == labels"],
    ),
    "a classifier of one logit": (
        V,
        lambda: train.evaluate(
            {}, lambda params, images: images[:, :1], data.Dataset(np.ones((4, 2)), np.zeros(4, int))
        ),
        ["logits of shape (n, classes)", "float32[4,1]", "eval_fn="],
    ),
    "a loss of one logit": (
        V,
        lambda: train.classification_loss(lambda params, images: images[:, :1])(
            {}, {"image": jnp.ones((4, 2)), "label": jnp.zeros(4, int)}, jax.random.key(0)
        ),
        ["classification_loss", "float32[4,1]", "optax.sigmoid_binary_cross_entropy"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, call, content = REFUSED[case]
    with pytest.raises(error, match=".*".join(map(re.escape, content))):
        call()


PAIRS = [(np.ones((8, 4), np.float32), np.ones(8, np.float32))] * 2


def by_pair(params, batch):
    x, y = batch
    return ((x @ params["w"] - y) ** 2).mean()


LOSSES = {
    "a pair": by_pair,
    "an index": lambda params, batch: (batch[0] @ params["w"]).mean(),
    "another name": lambda params, batch: (batch["x"] @ params["w"]).mean(),
    "a field": lambda params, batch: (batch.x @ params["w"]).mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_for_pairs_is_told_what_a_batch_of_a_loader_is(loss):
    state, step = train.start({"w": np.zeros(4, np.float32)}, optax.sgd(0.1), LOSSES[loss])
    with pytest.raises((TypeError, KeyError, AttributeError)) as caught:
        train.fit(state, step, PAIRS, epochs=1, progress=False)
    (note,) = [note for note in caught.value.__notes__ if 'a dict with "image" and "label"' in note]  # JAX has others
    assert 'names=("x", "y")' in note


def test_a_loader_without_a_size_is_told_which_one_was_taken():
    class Loader:
        def __len__(self):
            return 2

        def __iter__(self):
            return iter(PAIRS)

    state, step = train.start({"w": np.zeros(4, np.float32)}, optax.sgd(0.1), by_pair)
    with pytest.raises(
        ValueError, match=r"32 examples in each array, as batch_size= says \(32 without it\), got 'image'"
    ):
        train.fit(state, step, Loader(), epochs=1, progress=False)


@pytest.mark.parametrize("label", [-1, -100, 3])
def test_a_label_that_is_no_class_has_no_loss(label):
    """-1 is the last class in NumPy and JAX, and a row of zeros in a one-hot array."""
    logits, labels = jnp.zeros((4, 3)), jnp.array([0, 1, label, 2])
    batch = {"image": np.zeros((4, 2), np.float32), "label": labels}
    for smoothing in (0.0, 0.1):
        loss, _ = train.classification_loss(lambda params, images: logits, smoothing)((), batch, None)
        assert np.isnan(loss)
    assert np.isnan(train.cross_entropy(logits, labels)).tolist() == [False, False, True, False]
    mask = labels == batch["label"].clip(0, 2)
    total, gradient = jax.value_and_grad(lambda logits: train.cross_entropy(logits, labels, mask).total.sum())(logits)
    assert np.isclose(total, 3 * np.log(3))
    assert np.isfinite(gradient).all()
