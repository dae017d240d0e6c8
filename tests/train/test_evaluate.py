"""Loss and accuracy over every example, from any devices, by one program."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_model
from fit_model import apply, run_on
from kv_model import compilations

from jaxpar import data, train

RNG = np.random.default_rng(0)
SET = data.Dataset(RNG.random((37, 5), np.float32), RNG.integers(0, 4, 37))
PARAMS = {"w": RNG.standard_normal((5, 4)).astype(np.float32)}


state_on = functools.partial(step_model.start_or_params, params=PARAMS)


def probabilities(dataset):
    images = dataset.images / (255 if dataset.images.dtype == np.uint8 else 1)
    logits = images.astype(np.float64) @ PARAMS["w"].astype(np.float64)
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def want(dataset=SET):
    p, labels = probabilities(dataset), dataset.labels
    return {"loss": -np.log(p[np.arange(len(p)), labels]).mean(), "accuracy": (p.argmax(1) == labels).mean()}


def close(scores, expected):
    assert {k: type(v) for k, v in scores.items()} == {"loss": float, "accuracy": float}
    assert scores == {k: pytest.approx(v, rel=1e-5) for k, v in expected.items()}


def test_parameters_on_one_other_device_or_in_numpy():
    for params in (jax.device_put(PARAMS, jax.devices()[3]), PARAMS):
        close(train.evaluate(params, apply, SET, batch_size=16), want())


def test_fewer_examples_than_devices():
    few = data.Dataset(SET.images[:3], SET.labels[:3])
    close(train.evaluate(state_on(8), apply, few, batch_size=256), want(few))


def test_an_odd_last_batch_compiles_nothing_more():
    state, programs = state_on(2), []

    def traced(params, images):
        programs.append(images.shape)
        return images @ params["w"]

    train.evaluate(state, traced, SET, batch_size=16)
    # One image is traced for the number of classes. A batch is traced in each call: is it still the same program?
    assert programs == [(1, 5), (16, 5), (16, 5)]
    train.evaluate(state, traced, SET, batch_size=16)
    assert programs[3:] == [(1, 5), (16, 5)]
    with compilations() as count:
        train.evaluate(state, traced, SET, batch_size=16)
    assert count() == 0


def test_a_logit_that_is_not_finite_in_the_padding_does_no_harm():
    dataset = data.Dataset(np.vstack([np.ones((4, 5)), np.full((1, 5), 2)]).astype(np.float32), np.zeros(5, int))

    def apply(params, images):
        return jnp.zeros((images.shape[0], 2)) + params["w"][0, 0] * 0

    close(train.evaluate(PARAMS, apply, dataset, batch_size=4), {"loss": np.log(2), "accuracy": 1.0})


@pytest.mark.parametrize("batch_size", [0, -3])
def test_errors(batch_size):
    with pytest.raises(ValueError, match="evaluate: batch_size must be an int of 1 or more, got "):
        train.evaluate(PARAMS, apply, SET, batch_size=batch_size)
    with pytest.raises(ValueError, match="evaluate: expected examples, got an empty data set"):
        train.evaluate(PARAMS, apply, data.Dataset(SET.images[:0], SET.labels[:0]), batch_size=4)


# ---- the confusion matrix and the mistakes of a classifier


BYTES = data.Dataset(RNG.integers(0, 256, (37, 5), np.uint8), RNG.integers(0, 4, 37))


WANT = np.zeros((4, 4), np.int64)  # the matrix of these
np.add.at(WANT, (BYTES.labels, probabilities(BYTES).argmax(1)), 1)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("batch_size", [1, 10, 37, 64])
@pytest.mark.parametrize(("count", "kind"), [(None, ""), (1, "device"), (8, "device"), (3, "local"), (3, "sharded")])
def test_against_numpy(kind, count, batch_size):
    state = state_on(count, kind)
    matrix = train.confusion_matrix(state, apply, BYTES, batch_size=batch_size)
    np.testing.assert_array_equal(matrix, WANT)
    assert matrix.dtype == np.int64
    close(train.evaluate(state, apply, BYTES, batch_size=batch_size), want(BYTES))

    wrong = train.mistakes(state, apply, BYTES, batch_size=batch_size)
    p = probabilities(BYTES)
    assert sorted(wrong.indices) == np.flatnonzero(p.argmax(1) != BYTES.labels).tolist()
    np.testing.assert_array_equal(wrong.predicted, p.argmax(1)[wrong.indices])
    np.testing.assert_array_equal(wrong.labels, BYTES.labels[wrong.indices])
    np.testing.assert_allclose(wrong.probabilities, p.max(1)[wrong.indices], rtol=1e-5)
    assert (np.diff(wrong.probabilities) <= 0).all()
    assert len(wrong) == matrix.sum() - matrix.trace()


def test_the_most_certain_ones():
    wrong, few = train.mistakes(PARAMS, apply, BYTES), train.mistakes(PARAMS, apply, BYTES, most=3)
    np.testing.assert_array_equal(few.indices, wrong.indices[:3])
    assert repr(few) == "Mistakes(3 of 37 examples)"
    assert few._repr_html_().count("<tr>") == 4
    assert "more" not in few._repr_html_()
    assert f"... and {len(wrong) - 10} more" in wrong._repr_html_()


@pytest.mark.parametrize("call", [train.confusion_matrix, train.mistakes])
def test_what_is_no_classifier(call):
    with pytest.raises(ValueError, match="the model has 4 classes, but labels from 0 to 4"):
        call(PARAMS, apply, data.Dataset(BYTES.images[:5], np.arange(5)))
    with pytest.raises(TypeError, match=rf"{call.__name__}: labels must be integers of shape \(n,\)"):
        call(PARAMS, apply, data.Dataset(BYTES.images[:5], np.arange(5.0)))
    with pytest.raises(ValueError, match=r"needs logits of shape \(n, classes\), got float32\[37\]"):
        call(PARAMS, lambda params, images: images.sum(1), BYTES)
    with pytest.raises(ValueError, match="batch_size must be an int of 1 or more, got 0"):
        call(PARAMS, apply, BYTES, batch_size=0)
    with pytest.raises(TypeError, match=r"expected a data\.Dataset"):
        call(PARAMS, apply, BYTES.images)


@pytest.mark.parametrize(("count", "kind"), [(None, ""), (2, "device"), (3, "sharded")])
def test_the_outputs_of_every_example(kind, count):
    def outputs(params, inputs):
        return {"logits": inputs["x"] @ params["w"], "bytes": (inputs["i"] % 5).astype(jnp.uint8)}

    state = state_on(count, kind)
    inputs = {"x": BYTES.images.astype(np.float32), "i": np.arange(37)}
    got = train.predict(state, outputs, inputs, batch_size=10)
    np.testing.assert_array_equal(got["bytes"], np.arange(37) % 5)
    assert got["bytes"].dtype == np.uint8
    np.testing.assert_allclose(got["logits"], inputs["x"] @ PARAMS["w"], rtol=1e-4)
    of_images = train.predict(state, apply, BYTES, batch_size=64)
    np.testing.assert_allclose(of_images * 255, got["logits"], rtol=1e-4)
    np.testing.assert_array_equal(of_images, train.predict(state, apply, data.as_source(BYTES), batch_size=64))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [3, 1])
def test_a_model_with_a_state_of_its_own(count):
    def shifted(params, images, model_state):
        return apply(params, images) + model_state["shift"][None]

    shift = np.array([0, 0, 0, 9], np.float32)
    state = state_on(count, model_state={"shift": jnp.asarray(shift)})
    logits = train.predict(state, shifted, BYTES, batch_size=16)
    np.testing.assert_allclose(logits, BYTES.images / 255 @ PARAMS["w"] + shift, rtol=1e-4, atol=1e-5)
    matrix = train.confusion_matrix(state, shifted, BYTES, batch_size=16)
    assert matrix.sum(0).tolist() == np.bincount(logits.argmax(1), minlength=4).tolist()
    wrong = train.mistakes(state, shifted, BYTES, batch_size=16)
    assert len(wrong) == 37 - matrix.trace()
    alone = train.evaluate(PARAMS, lambda p, images: shifted(p, images, {"shift": shift}), BYTES, batch_size=16)
    close(train.evaluate(state, shifted, BYTES, batch_size=16), alone)
    assert matrix.trace() / matrix.sum() == pytest.approx(alone["accuracy"])


def test_what_predict_refuses():
    with pytest.raises(ValueError, match=r"one row per example; got shape \(4,\) for a batch of 10"):
        train.predict(PARAMS, lambda params, images: apply(params, images).sum(0), BYTES, batch_size=10)
    own = types.SimpleNamespace(examples=lambda batch_size: 37, batches=lambda batch_size, **options: iter(()))
    with pytest.raises(TypeError, match="got SimpleNamespace, which may leave out the last examples; give the arrays"):
        train.predict(PARAMS, apply, own, batch_size=10)
    with pytest.raises(ValueError, match="predict: expected examples, got empty arrays"):
        train.predict(PARAMS, apply, BYTES.images[:0], batch_size=10)


def test_the_picture_of_a_confusion_matrix(tmp_path):
    names = ["cat", "dog", "bird", "whale"]
    figure = train.plot_confusion_matrix(WANT, class_names=names, path=tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == names
    assert [t.get_text() for t in figure.axes[0].texts] == [str(x) for x in WANT.ravel()]
    assert figure._repr_png_()[:4] == b"\x89PNG"
    train.plot_confusion_matrix(np.zeros((100, 100), int))
    with pytest.raises(ValueError, match="3 class_names for 4 classes"):
        train.plot_confusion_matrix(WANT, class_names=names[:3])
    with pytest.raises(ValueError, match=r"must be square, got shape \(2, 3\)"):
        train.plot_confusion_matrix(np.zeros((2, 3)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("channels", [(), (1,), (3,)])
def test_the_picture_of_mistakes(tmp_path, channels):
    images = data.Dataset(RNG.random((12, 6, 5, *channels), np.float32), np.arange(12) % 4)

    def apply(params, images):
        return jax.nn.one_hot((images.reshape(len(images), -1).sum(1) * 100).astype(jnp.int32) % 4, 4) * 3

    wrong = train.mistakes({}, apply, images)
    figure = train.plot_mistakes(wrong, images, class_names=["a", "b", "c", "d"], most=7, path=tmp_path / "m.svg")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == min(7, len(wrong))
    said, label = "abcd"[wrong.predicted[0]], "abcd"[wrong.labels[0]]
    assert titles[0] == f"{said} 87%\nis {label}"
    with pytest.raises(ValueError, match="1 class_names for"):
        train.plot_mistakes(wrong, images, class_names=["a"])
    with pytest.raises(ValueError, match=r"expected images of shape .*, got \(.*, 5\)"):
        train.plot_mistakes(train.mistakes(PARAMS, lambda p, x: x @ p["w"], BYTES), BYTES)
    with pytest.raises(ValueError, match="nothing to show: 0 mistakes"):
        train.plot_mistakes(train.mistakes({}, apply, images, most=0), images)


# ---- labels that are no classes of the model


IMAGES = np.ones((8, 2), np.float32)


def started():
    return step_model.start(8, params={"w": jnp.ones((2, 3))})


def fit(dataset, state=None, **options):
    options = {"epochs": 1, "batch_size": 8, **options}
    return run_on(dataset, started() if state is None else state, **options)


@pytest.mark.parametrize(("last", "words"), [(3, "from 0 to 3"), (-1, "from -1 to 0")])
def test_labels_out_of_range(last, words):
    wrong = data.Dataset(IMAGES, np.array([0] * 7 + [last]))
    right = data.Dataset(IMAGES, np.arange(8) % 3)
    message = f"the model has 3 classes, but labels {words}; give labels 0 to 2"
    with pytest.raises(ValueError, match=f"fit: train_data: {message}"):
        fit(wrong)
    with pytest.raises(ValueError, match=f"fit: test_data: {message}"):
        fit(right, test_data=wrong, apply_fn=apply)
    with pytest.raises(ValueError, match=f"evaluate: {message}"):
        train.evaluate({"w": jnp.ones((2, 3))}, apply, wrong, batch_size=4)
    state, _ = fit(right, test_data=right, apply_fn=apply)
    assert train.evaluate(state, apply, right, batch_size=4)["accuracy"] == 0.375


def test_what_cannot_be_known_is_left_to_the_model():
    """A model that fails says so itself. Targets that are no classes are not looked at."""
    dataset = data.Dataset(IMAGES, np.arange(8))
    with pytest.raises(TypeError, match="dot_general"):
        train.evaluate({"w": jnp.ones((5, 3))}, apply, dataset, batch_size=8)

    def squares(params, batch, rng):
        return ((apply(params, batch["image"])[:, 0] - batch["label"]) ** 2).mean(), {}

    fit(dataset, step=train.make_train_step(squares))


def test_a_donated_state_is_checked_too(tmp_path):
    state = started()
    fit(data.Dataset(IMAGES, np.arange(8) % 3), state, checkpoint_dir=tmp_path)
    assert state.store.values[0].is_deleted()
    with pytest.raises(ValueError, match="but labels from 0 to 7"):
        fit(data.Dataset(IMAGES, np.arange(8)), state, epochs=2, checkpoint_dir=tmp_path)
