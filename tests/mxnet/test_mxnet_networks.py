"""Whole networks beside MXNet 1.9.1: Gluon's model zoo, and training that goes on as there."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from symbols import CASES, parts_of, recorded, save

from jaxpar import kv, mxnet, train, updaters

QUICK = ("squeezenet1_1", "mobilenet_v2_0_25", "resnet18_v1")
# One of each family. The others have more of the same layers, and run before a release.
FAMILIES = ("alexnet", "densenet121", "inception_v3", "mobilenet0_5", "mobilenet_v2_0_5", "resnet34_v2", "vgg11_bn")


def zoo(*quick, slow=(*FAMILIES, *QUICK)):
    """The networks, each in its row."""
    for name in (name for name in CASES if name.startswith("zoo")):
        row = pytest.mark.slow if name[4:] in slow else pytest.mark.release
        yield pytest.param(name, marks=() if name[4:] in quick else row)


def load(folder, name):
    """The model of a case, saved and read with its arrays, and the arrays of its inputs."""
    (symbol, _), (params, state, inputs) = save(folder, name), parts_of(name)
    shapes = mxnet.load_symbol(symbol).shapes(**{n: a.shape for n, a in inputs.items()})
    assert shapes == {n: a.shape for n, a in (params | state | inputs).items()}
    model = mxnet.load_checkpoint(folder / "case", 7)
    assert list(model.inputs) == CASES[name]["inputs"]
    return model, inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", [*zoo(*QUICK)])
def test_the_model_zoo_gives_the_same_logits(name, tmp_path):
    model, inputs = load(tmp_path, name)
    expected = recorded()[name]["eval0"]
    found = jax.jit(model.apply)(model.params, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert np.ptp(expected) > 1e-3


def loss_of(model):
    """The mean loss that MXNet's loss layer means, of its predictions."""

    def loss_fn(params, batch, rng, model_state):
        *data, label = batch
        outputs, new = model.apply(params, *data, state=model_state, train=True, rng=rng)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        if label.ndim == outputs.ndim:
            return jnp.square(outputs - label).mean() / 2, {"outputs": outputs.mean()}, new
        chosen = jnp.take_along_axis(outputs, label[:, None].astype(int), 1)
        return -jnp.log(chosen).mean(), {}, new

    return loss_fn


def loss_there(outputs, label):
    if label.shape[0] == outputs.size:
        return np.square(outputs.reshape(-1) - label).mean() / 2
    return -np.log(outputs[np.arange(len(label)), label.astype(int)]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("network", ["lenet", "factorization", "normalized"])
def test_training_goes_on_as_in_mxnet(network, count, tmp_path):
    name = f"{network} {count}"
    model, inputs = load(tmp_path, name)
    store = kv.from_params(model.params, kind="device", devices=jax.devices()[:count])
    sgd = updaters.mxnet_sgd(0.05, momentum=0.9, wd=1e-3, wd_mult=updaters.mxnet_wd_mult(kv.names(store)))
    store = kv.set_updater(store, sgd)
    state = train.create_state(store, jax.random.key(0), model_state=model.state)
    step = train.make_train_step(loss_of(model), engine="shard_map", unused="skip")
    *data, label = (inputs[n] for n in model.inputs)
    batch = (*data, label[:, None] if network == "factorization" else label)
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    there = recorded()[name]
    expected = [loss_there(there[f"step{i}"], label) for i in range(5)]
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert abs(expected[-1] / expected[0] - 1) > 0.002
    for n, array in {**state.params, **(state.model_state or {})}.items():
        size = there[f"size {n}"]
        np.testing.assert_allclose(np.abs(np.float64(array)).sum(), size, rtol=1e-4, err_msg=n)
        np.testing.assert_allclose(np.float64(array).sum(), there[f"sum {n}"], atol=2e-4 * size, err_msg=n)


@pytest.mark.slow
def test_with_its_label_a_loss_layer_has_mxnets_gradient(tmp_path):
    model, inputs = load(tmp_path, "normalized 1")
    images, labels = (inputs[n] for n in model.inputs)
    gradient = lambda loss: jax.jit(jax.grad(loss))(model.params)  # noqa: E731
    with_label = gradient(lambda p: model.apply(p, images, labels, train=True)[0].sum())
    own = gradient(lambda p: 8 * loss_of(model)(p, (images, labels), None, model.state)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), with_label, own)


@pytest.mark.slow
def test_the_example_of_the_guide(tmp_path, monkeypatch):
    model, inputs = load(tmp_path, "lenet 1")
    for path in tmp_path.iterdir():
        path.rename(tmp_path / path.name.replace("case", "lenet").replace("0007", "0010"))
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "from_mxnet.md").read_text()
    code, *_ = [block for block in guide.split("```")[1::2] if "load_checkpoint" in block]
    images, labels = (np.tile(inputs[n], (4,) + (1,) * (inputs[n].ndim - 1)) for n in model.inputs)
    found = {"images": images, "labels": labels.astype(int)}
    exec(code.removeprefix("python\n"), found)
    again = mxnet.load_checkpoint("lenet", 11)
    assert not np.array_equal(again.params["fc2_bias"], model.params["fc2_bias"])
    assert np.isfinite(again.apply(again.params, inputs["data"])).all()
