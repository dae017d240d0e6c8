"""`fit` evaluates any model after each epoch, and checks all that it will call before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import world
from flax import nnx
from kv_model import compilations
from world import LOSS, apply, numbers, run_on, same

from jaxpar import data, train

RNG = np.random.default_rng(0)


def rows(n, seed):
    x = np.random.default_rng(seed).standard_normal((n, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([1, 2, 3]) + 1}


TRAIN, EVAL = rows(48, 0), rows(21, 1)


def predictions(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def loss_fn(params, batch, rng):
    return train.mean_squared_error(predictions(params, batch), batch["y"]).mean(), {}


def eval_fn(params, batch):
    error = train.mean_squared_error(predictions(params, batch), batch["y"])
    return {"mse": error, "rmse": train.Mean(error, jnp.ones_like(error), np.sqrt)}


STEP = train.make_train_step(loss_fn)
TX = optax.sgd(0.1)


def start(params=None, **options):
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())} if params is None else params
    return world.start(4, tx=TX, params=params, **options)


def fit(state=None, step=STEP, train_data=None, **options):
    train_data = data.from_arrays(TRAIN) if train_data is None else train_data
    return run_on(train_data, start() if state is None else state, step=step, **options)


def want(state):
    error = np.asarray(predictions(jax.device_get(state.params), EVAL)) - EVAL["y"]
    return {"eval_mse": (error**2).mean(), "eval_rmse": np.sqrt((error**2).mean())}


def parts():
    return (jax.tree.map(lambda x, at=at: x[at : at + 13], EVAL) for at in (0, 13))


@pytest.mark.parametrize("eval_data", [EVAL, data.from_arrays(EVAL), parts], ids=["arrays", "from_arrays", "function"])
def test_a_regression(eval_data, capsys):
    state, history = fit(eval_data=eval_data, eval_fn=eval_fn, progress=True)
    assert {k: history[-1][k] for k in want(state)} == {k: pytest.approx(v, rel=1e-4) for k, v in want(state).items()}
    assert history[1]["eval_mse"] < history[0]["eval_mse"]
    assert train.evaluate(state, data=EVAL, eval_fn=eval_fn)["mse"] == pytest.approx(history[-1]["eval_mse"])
    printed = capsys.readouterr().out.splitlines()
    assert f"eval mse {history[0]['eval_mse']:.4f}  eval rmse" in printed[0]
    assert printed[0].endswith("examples/s")
    assert "accuracy" not in printed[0]


@pytest.mark.slow
def test_a_classifier_with_values_of_its_own_too(capsys):
    labels = RNG.integers(0, 3, 40)
    points = data.Dataset(RNG.random((40, 5), np.float32), labels)

    def per_class(params, batch):
        return {"recall": train.per_class_accuracy(apply(params, batch["image"]), batch["label"])}

    options = {"test_data": points, "apply_fn": apply, "eval_data": points, "eval_fn": per_class}
    _, history = fit(start({"w": jnp.zeros((5, 3))}), train.make_train_step(LOSS), points, progress=True, **options)
    recall = [history[-1][f"eval_recall/{i}"] for i in range(3)]
    mean = np.average(recall, weights=np.bincount(labels))
    assert mean == pytest.approx(history[-1]["test_accuracy"], rel=1e-5)
    line = capsys.readouterr().out.splitlines()[1]
    assert "test accuracy" in line
    assert line.endswith("images/s")
    assert "recall" not in line  # a line has no room for the columns
    figure = train.plot_history(history)
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy", "recall"]
    assert [line.get_label() for line in figure.axes[2].get_lines()] == ["eval 0", "eval 1", "eval 2"]


@pytest.mark.slow
def test_evaluation_is_compiled_once():
    def eval_fn(params, batch):
        return {"error": predictions(params, batch) - batch["y"], "sum": (batch["y"].sum(), 1)}

    fit(epochs=1)
    with compilations() as count:
        fit(epochs=20, eval_data=EVAL, eval_fn=eval_fn)
    assert count() <= 3  # 16 examples, and the last 5, which 4 devices cannot share, as 4 and 1


def test_without_an_eval_fn_the_loss_is_the_score():
    """21 examples in batches of 16 and 5: each counts once."""

    def loss_fn(params, batch):
        error = predictions(params, batch) - batch["y"]
        above = batch["y"] > 0
        aux = {"mae": abs(error).mean(), "above": ((above * abs(error)).sum(), above.sum())}
        return (error**2).mean(), aux

    state, history = fit(step=train.make_train_step(loss_fn), eval_data=EVAL)
    error = abs(np.asarray(predictions(jax.device_get(state.params), EVAL)) - EVAL["y"])
    want = {"eval_loss": (error**2).mean(), "eval_mae": error.mean(), "eval_above": error[EVAL["y"] > 0].mean()}
    assert {k: history[-1][k] for k in want} == {k: pytest.approx(v, rel=1e-4) for k, v in want.items()}
    assert not want.keys() ^ {name for name in history[-1] if name.startswith("eval_") and name != "eval_seconds"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"engine": "jit"}, marks=pytest.mark.slow),
        pytest.param({"engine": "pmap", "accumulate": 2}, marks=pytest.mark.slow),
        pytest.param({"virtual_shards": 4}, marks=pytest.mark.slow),
        pytest.param({"local_steps": 2}, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_metrics_in_a_dict_or_a_list_have_names_with_a_slash(options):
    """Of the steps, of the loss as a score, and of an eval_fn, as TensorBoard and the norms of a record have them."""

    def loss_fn(params, batch):
        error = predictions(params, batch) - batch["y"]
        weight = jnp.ones_like(error)
        return (error**2).mean(), {"of": {"mae": abs(error).mean(), "pair": (error**2, weight)}, "list": [error.mean()]}

    def eval_fn(params, batch):
        error = predictions(params, batch) - batch["y"]
        return {"of": {"mae": abs(error), "deep": {"pair": (error**2, jnp.ones_like(error))}}, "mse": error**2}

    seen = []
    step = train.make_train_step(loss_fn, **options)
    state, history = fit(step=step, epochs=1, eval_data=EVAL, on_step=lambda step, metrics: seen.append(metrics))
    record, error = history[-1], np.asarray(predictions(jax.device_get(state.params), EVAL)) - EVAL["y"]
    assert {"of/mae", "of/pair", "list/0", "loss"} == seen[0].keys() <= record.keys()
    assert record["of/pair"] == pytest.approx(record["loss"], rel=1e-5)
    for name, want in {"of/mae": abs(error).mean(), "of/pair": (error**2).mean(), "list/0": error.mean()}.items():
        assert record[f"eval_{name}"] == pytest.approx(want, rel=1e-4)
    scores = train.evaluate(state, data=EVAL, eval_fn=eval_fn, batch_size=16)
    want = {"of/mae": abs(error).mean(), "of/deep/pair": (error**2).mean(), "mse": (error**2).mean()}
    assert scores == {name: pytest.approx(value, rel=1e-4) for name, value in want.items()}


def test_a_loss_of_a_whole_module_is_the_score_in_evaluation_mode():
    """No dropout, and a collective of the loss sees the whole batch."""

    class Net(nnx.Module):
        def __init__(self):
            self.out, self.drop = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.out(self.drop(x))[:, 0]

    def loss_fn(net, batch):
        return jax.lax.pmean(((net(batch["x"]) - batch["y"]) ** 2).mean(), "data")

    state, step = train.start(Net(), TX, loss_fn, devices=jax.devices()[:4])
    state, history = fit(state, step, eval_data=EVAL)
    error = np.asarray(state.model(EVAL["x"])) - EVAL["y"]
    assert history[-1]["eval_loss"] == pytest.approx((error**2).mean(), rel=1e-4)


def values(value):
    return lambda params, batch: {"mse": value(predictions(params, batch) - batch["y"])}


POINTS = data.Dataset(RNG.random((21, 3), np.float32), RNG.integers(0, 2, 21))
NARROW = data.Dataset(POINTS.images[:, :2], POINTS.labels)


def logits(params, images):
    return jnp.stack([images @ params["w"]] * 2, 1)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"eval_fn": values(jnp.mean)}, ValueError, r"'mse' has shape \(\) for 16 examples; a mean over the batch"),
        ({"eval_fn": lambda p, b: {"mse": b["z"]}}, KeyError, "z"),
        ({"eval_fn": values(lambda e: [e, e, e])}, ValueError, "'mse' is a list of 3; return the values of the ex"),
        ({"eval_fn": lambda p, b: {"a/b": b["y"], "a": {"b": b["y"]}}}, ValueError, "two metrics have the name 'a/b'"),
        (
            {"step": lambda p, b: (predictions(p, b).mean(), {"a/b": 1.0, "a": {"b": 2.0}})},
            ValueError,
            "two metrics have the name 'a/b'",
        ),
        (
            {"step": lambda p, b: (predictions(p, b).mean(), {"eval_a": {"b": 1.0}})},
            ValueError,
            "aux of loss_fn has eval_a/b, which fit records itself",
        ),
        ({"eval_fn": lambda p: {}}, TypeError, r"fit: eval_fn must be a function of \(params, batch\), got <lambda>"),
        ({"eval_fn": None}, ValueError, "takes both eval_data and eval_fn, .* test_data and app.*this one takes more"),
        ({"eval_fn": None, "step": lambda p, b, *, step: step * 0.0}, ValueError, "this one takes more"),
        (
            {"eval_fn": None, "step": lambda p, b: (predictions(p, b).mean(), {"each": predictions(p, b)})},
            ValueError,
            r"'each' in aux of loss_fn has shape \(16,\); without eval_fn=",
        ),
        ({"eval_data": iter([EVAL])}, TypeError, "eval_data is read after each epoch, got a list_iterator"),
        ({"eval_data": {"x": EVAL["x"], "y": EVAL["y"][:3]}}, ValueError, "share the length of their first axis"),
        ({"eval_data": {"x": EVAL["x"][:, :2], "y": EVAL["y"]}}, TypeError, "dot_general"),
        ({"test_data": EVAL, "apply_fn": logits}, TypeError, "expected a data.Dataset.*for other models "),
        ({"test_data": POINTS, "apply_fn": lambda p, x: x @ p["w"]}, ValueError, r"logits of shape \(n, classes\)"),
        ({"test_data": POINTS, "apply_fn": lambda p: 0}, TypeError, r"apply_fn must be a function of \(params, images"),
        ({"test_data": NARROW, "apply_fn": logits}, TypeError, "dot_general"),
        ({"step": lambda p, b, r, s: 0.0}, TypeError, r"loss_fn must be a function of \(params, batch, rng\), got <l"),
        (
            {"step": lambda p, b: (predictions(p, b).mean(), 1.0)},
            TypeError,
            r"return loss or \(loss, aux\) with aux a dict",
        ),
        ({"step": lambda p, b, r: (predictions(p, b), {})}, TypeError, "the loss must be a scalar"),
        ({"step": lambda p, b, r: (loss_fn(p, b, r)[0], {"seconds": 1.0})}, ValueError, "has seconds, which"),
        ({"step": lambda p, b, r: (loss_fn(p, b, r)[0], {"eval_mse": 1.0})}, ValueError, "has eval_mse, which"),
    ],
)
def test_what_is_wrong_is_known_before_the_first_step(options, kind, words, tmp_path):
    options = {"eval_data": EVAL, "eval_fn": eval_fn, **options}
    if "step" in options:
        options["step"] = train.make_train_step(options["step"])
    state, file = start(), tmp_path / "metrics.jsonl"
    file.write_text("of another run\n")
    calls = []
    with pytest.raises(kind, match=words):
        fit(state, metrics_file=file, on_step=lambda step, metrics: calls.append(step), **options)
    assert not calls
    assert file.read_text() == "of another run\n"
    assert fit(state, epochs=1)[1][0]["loss"] > 0  # the state is as before


def test_a_wrong_loss_function_is_known_before_data_of_unknown_shapes_are_read(tmp_path):
    file, read = tmp_path / "metrics.jsonl", []
    file.write_text("of another run\n")
    unread = data.from_iterable(lambda: read.append(1) or iter([]), steps_per_epoch=3)
    step = train.make_train_step(lambda params, batch, rng, model_state: (predictions(params, batch).mean(), {}))
    with pytest.raises(TypeError, match=r"loss_fn must be a function of \(params, batch, rng\).*model_state="):
        fit(step=step, train_data=unread, metrics_file=file)
    assert not read
    assert file.read_text() == "of another run\n"


def test_a_model_with_a_state_names_the_arguments():
    state = start(model_state={"mean": jnp.zeros(3)})
    with pytest.raises(TypeError, match=r"loss_fn must be a function of \(params, batch, rng, model_state\).*since"):
        fit(state)


@pytest.mark.slow
def test_a_step_is_traced_once():
    """For single steps and for those of one program, as `auto` has both."""
    traces = []

    def loss_fn(params, batch, rng):
        traces.append(1)
        return ((batch["image"] @ params["w"]) ** 2).mean(), {}

    for per_program in (1, 3, "auto"):
        traces.clear()
        step = train.make_train_step(loss_fn)
        fit(start({"w": jnp.zeros(3)}), step, POINTS, batch_size=4, steps_per_execution=per_program)
        assert len(traces) == 1


def test_label_smoothing():
    images, labels = RNG.random((6, 4), np.float32), np.array([0, 1, 2, 2, 1, 0])
    apply = lambda params, images: images @ params  # noqa: E731
    params = RNG.standard_normal((4, 3)).astype(np.float32)
    plain, aux = train.classification_loss(apply)(params, {"image": images, "label": labels}, None)
    smooth = train.classification_loss(apply, label_smoothing=0.1)
    loss, smooth_aux = smooth(params, {"image": images, "label": labels}, None)
    log_p = np.asarray(jax.nn.log_softmax(images @ params))
    target = np.eye(3)[labels] * 0.9 + 0.1 / 3
    assert float(loss) == pytest.approx(-(target * log_p).sum(1).mean(), rel=1e-5)
    assert smooth_aux["accuracy"] == aux["accuracy"]
    assert train.classification_loss(apply, label_smoothing=0.0) == train.classification_loss(apply)
    assert float(plain) == pytest.approx(-log_p[np.arange(6), labels].mean(), rel=1e-5)
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="label_smoothing must be a number from 0 and below 1"):
            train.classification_loss(apply, label_smoothing=wrong)


class Broken(Exception):
    pass


@pytest.mark.parametrize("failing", [1, 2, 3], ids=["first", "middle", "last"])
def test_an_evaluation_that_fails_costs_no_steps(tmp_path, failing):
    looks = []

    def once_broken():
        """The parts of the data, which cannot be read after one of the epochs."""
        for number, part in enumerate(parts()):
            looks.extend([1] * number)  # the check of the shapes looks at the first part only
            if number and len(looks) == failing:
                raise Broken
            yield part

    options = {"epochs": 3, "eval_fn": eval_fn, "checkpoint_dir": tmp_path}
    with pytest.raises(Broken):
        fit(eval_data=once_broken, **options)
    made = []
    state, history = fit(eval_data=once_broken, on_step=lambda step, metrics: made.append(step), **options)
    straight, expected = fit(eval_data=parts, **{**options, "checkpoint_dir": None})
    assert made == list(range(3 * failing + 1, 10))  # the steps of the epoch that was not evaluated are not made again
    assert [row.keys() for row in history] == [row.keys() for row in expected]
    assert numbers(history) == numbers(expected)
    assert all(row["seconds"] > 0 and row["examples_per_second"] > 0 for row in history)
    same(state, straight)
