"""Models from symbol files: what they hold, as pure functions, on several devices; and files that are no such."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from symbols import CASES, node, save, symbol_of, write

from jaxpar import checkpoint, mxnet


def dense(folder, **more):
    x, w, b = (node("null", n) for n in ("data", "fc_weight", "fc_bias"))
    attrs = {"num_hidden": "2", "__lr_mult__": "2", **more}
    return symbol_of(folder, x, w, b, node("FullyConnected", "fc", (0, 0, 0), 1, (2, 0, 0), **attrs))


@pytest.fixture
def model(tmp_path):
    save(tmp_path, "normalized 1")
    return mxnet.load_checkpoint(tmp_path / "case", 7)


IMAGES = np.float32(np.random.RandomState(0).standard_normal((8, 3, 9, 9)))


def test_what_a_model_holds(model, tmp_path):
    assert model.inputs == ("data", "softmax_label")
    assert model.outputs == ("softmax_output",)
    assert set(model.state) == {"bn_moving_mean", "bn_moving_var"}
    assert set(model.params) == {"conv_weight", "bn_gamma", "bn_beta", "fc_weight", "fc_bias"}
    assert [n.op for n in model.symbol.nodes if not n.is_variable][:2] == ["Convolution", "BatchNorm"]
    assert repr(model).startswith("Model(6 operators, inputs ('data', 'softmax_label')")
    model.save_params(tmp_path / "again.params")
    again = checkpoint.load_mxnet(tmp_path / "again.params")
    assert set(again) == {f"arg:{n}" for n in model.params} | {f"aux:{n}" for n in model.state}
    assert all(np.array_equal(again[f"arg:{n}"], a) for n, a in model.params.items())


@pytest.mark.slow
def test_apply_is_pure(model):
    out = model.apply(model.params, IMAGES)
    np.testing.assert_allclose(jax.jit(model.apply)(model.params, {"data": IMAGES}), out, rtol=1e-5)
    outs, state = jax.jit(functools.partial(model.apply, train=True))(model.params, IMAGES)
    assert outs.shape == out.shape
    assert not np.array_equal(state["bn_moving_mean"], model.state["bn_moving_mean"])
    assert np.array_equal(model.apply(model.params, IMAGES), out)
    whole = jax.jit(jax.grad(lambda p: -jnp.log(model.apply(p, IMAGES)[:, 0]).mean()))(model.params)
    assert set(whole) == set(model.params)
    assert all(np.isfinite(g).all() for g in whole.values())
    by_row = jax.jit(jax.vmap(lambda x: model.apply(model.params, x[None])[0]))(IMAGES)
    np.testing.assert_allclose(by_row, out, rtol=1e-4)


@pytest.mark.parametrize(
    ("op", "weights", "attrs", "shape"),
    [
        ("FullyConnected", ("w", "b"), {"num_hidden": -1}, "(-1, 648)"),
        ("Convolution", ("w", "b"), {"kernel": "(3, 3)", "num_filter": -2}, "(-2, 8, 3, 3)"),
        ("Embedding", ("w",), {"input_dim": -5, "output_dim": 3}, "(-5, 3)"),
    ],
)
def test_a_size_below_zero_names_the_layer(op, weights, attrs, shape, tmp_path):
    nodes = [node("null", name) for name in ("data", *weights)]
    model = mxnet.load_symbol(symbol_of(tmp_path, *nodes, node(op, "layer", *range(len(nodes)), **attrs)))
    with pytest.raises(ValueError, match=re.escape(f"{op} 'layer'") + ".*" + re.escape(shape)):
        model.shapes(data=(4, 8, 9, 9))


def test_shapes_without_params(tmp_path):
    model = mxnet.load_symbol(write(tmp_path, "lenet 1"))
    assert (model.params, model.state) == ({}, {})
    shapes = model.shapes(data=(2, 1, 28, 28))
    assert (shapes["conv1_weight"], shapes["fc1_weight"]) == ((50, 20, 5, 5), (128, 800))
    assert shapes["softmax_label"] == (2,)  # as MXNet's infer_shape


def test_attributes_that_mxnet_ignores(tmp_path):
    """gluoncv's CenterNet gives zeros_like a dtype."""
    path = symbol_of(tmp_path, node("null", "x"), node("zeros_like", "z", 0, dtype="int64"))
    out = mxnet.load_symbol(path).apply({}, jnp.ones(2))
    assert (out.tolist(), out.dtype) == ([0, 0], np.float32)
    assert "mx_zeros_like(data" not in mxnet.port(path)


def test_up_sampling_takes_a_weight_or_images(tmp_path):
    """As MXNet, it infers the shape of the weight, which is trained. Without one, what it takes are inputs."""
    nodes = [node("null", "x"), node("null", "y")]
    attrs = {"scale": 3, "num_args": 2}
    bilinear = node("UpSampling", "up", 0, 1, sample_type="bilinear", num_filter=4, **attrs)
    model = mxnet.load_symbol(symbol_of(tmp_path, *nodes, bilinear))
    assert model.inputs == ("x",)
    assert model.shapes(x=(2, 4, 5, 5)) == {"x": (2, 4, 5, 5), "y": (4, 1, 5, 5)}
    model = mxnet.load_symbol(
        symbol_of(tmp_path, *nodes, node("UpSampling", "up", 0, 1, sample_type="nearest", **attrs))
    )
    assert model.inputs == ("x", "y")


@pytest.mark.parametrize("key", ["attr", "param", "attrs"])
def test_attributes_of_every_version(key, tmp_path):
    model = mxnet.load_symbol(dense(tmp_path, key=key))
    params = {"fc_weight": jnp.ones((2, 3)), "fc_bias": jnp.zeros(2)}
    assert model.apply(params, jnp.ones((1, 3))).tolist() == [[3, 3]]


def test_statistics_that_old_files_do_not_name(tmp_path):
    nodes = [node("null", n) for n in ("data", "bn_gamma", "bn_beta")]
    nodes += [node("BatchNorm", "bn", 0, 1, 2), node("relu", "out", 3)]
    model = mxnet.load_symbol(symbol_of(tmp_path, *nodes, version=0))
    shapes = model.shapes(data=(4, 2))
    assert list(shapes) == ["data", "bn_gamma", "bn_beta", "bn_moving_mean", "bn_moving_var"]
    ones = {n: jnp.ones(2) for n in shapes}
    state = {n: ones.pop(n) for n in ("bn_moving_mean", "bn_moving_var")}
    del ones["data"]
    assert model.apply(ones, jnp.ones((4, 2)), state=state).tolist() == [[1, 1]] * 4


def test_an_axis_of_minus_one_meant_all_axes_before_0_9_5(tmp_path):
    for version, expected in ((904, [2]), (905, [1, 0])):
        path = symbol_of(tmp_path, node("null", "x"), node("argmax", "a", 0, key="attr", axis=-1), version=version)
        assert mxnet.load_symbol(path).apply({}, jnp.array([[1.0, 2], [4, 3]])).tolist() == expected


def test_operators_of_ones_own(tmp_path):
    nodes = [node("null", "x"), node("Twice", "a", 0, by=3), node("Twice", "b", 1), node("Odd", "c", 2)]
    path = symbol_of(tmp_path, *nodes)

    def twice(x, *, by: int = 2):
        return x * by

    model = mxnet.load_symbol(path, operators={"Twice": twice, "Odd": lambda x: x + 1})
    assert model.apply({}, jnp.ones(2)).tolist() == [7, 7]


@pytest.mark.slow
def test_dropout_is_drawn_by_the_key(tmp_path):
    path = symbol_of(tmp_path, node("null", "x"), node("Dropout", "d", 0, p=0.5, axes=(1,)))
    model, x = mxnet.load_symbol(path), jnp.ones((40, 5))
    assert (model.apply({}, x) == 1).all()
    out, _ = model.apply({}, x, train=True, rng=0)
    assert set(np.unique(out)) == {0, 2}
    assert (out == out[:, :1]).all()
    assert not np.array_equal(out, model.apply({}, x, train=True, rng=1)[0])


X = '{"nodes": [{"op": "null", "name": "x"}, '
HOSTILE = {
    "text": "no json",
    "deep": "[" * 100000,
    "deep nodes": '{"nodes": ' + "[" * 50000 + "]" * 50000 + "}",
    "a list": "[]",
    "no nodes": "{}",
    "a huge number": '{"nodes": [], "heads": [[' + "9" * 5000 + ", 0]]}",
    "no heads": '{"nodes": []}',
    "node": '{"nodes": [3], "heads": [[0, 0]]}',
    "names": '{"nodes": [{"op": 1, "name": 2}], "heads": [[0, 0]]}',
    "attrs": '{"nodes": [{"op": "null", "name": "x", "attrs": {"a": []}}], "heads": [[0, 0]]}',
    "itself": '{"nodes": [{"op": "relu", "name": "x", "inputs": [[0, 0, 0]]}], "heads": [[0, 0]]}',
    "later": '{"nodes": [{"op": "relu", "name": "x", "inputs": [[7, 0, 0]]}], "heads": [[0, 0]]}',
    "negative": '{"nodes": [{"op": "relu", "name": "x", "inputs": [[-1, 0, 0]]}], "heads": [[0, 0]]}',
    "a variable's inputs": X + '{"op": "null", "name": "y", "inputs": [[0, 0]]}], "heads": [[0, 0]]}',
    "further": X + '{"op": "relu", "name": "y", "inputs": [[0, 5]]}], "heads": [[1, 0]]}',
    "a negative output": X
    + '{"op": "relu", "name": "y", "inputs": [[0, 0]]}, {"op": "relu", "name": "z", "inputs": [[1, -1]]}], '
    '"heads": [[2, 0]]}',
    "no arrays": '{"nodes": [{"op": "relu", "name": "x", "inputs": []}], "heads": [[0, 0]]}',
    "pairs": '{"nodes": [{"op": "relu", "name": "x", "inputs": [["a", 0]]}], "heads": [[0, 0]]}',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=list(HOSTILE))
def test_what_is_no_symbol_file(content, tmp_path):
    path = tmp_path / "x-symbol.json"
    path.write_text(content)
    with pytest.raises(checkpoint.CheckpointError, match=r"x-symbol\.json"):
        mxnet.load_symbol(path)


def test_no_cut_file_is_read(tmp_path):
    whole = CASES["dense"]["symbol"].rstrip().encode()
    path = tmp_path / "x-symbol.json"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(checkpoint.CheckpointError):
            mxnet.load_symbol(path)


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("_zeros", {"shape": "(100000, 100000, 100000)"}),
        ("_arange", {"start": "0", "stop": "1e15"}),
        ("_arange", {"start": "0", "stop": "1", "step": "0"}),
        ("SliceChannel", {"num_outputs": "1000000000000"}),
        ("RNN", {"state_size": "1000000000", "num_layers": "1000000000", "mode": "lstm"}),
        ("Reshape", {"shape": "(-3, -3, -3)"}),
    ],
)
def test_attributes_that_ask_for_too_much(op, attrs, tmp_path):
    inputs = {"SliceChannel": 1, "Reshape": 1, "RNN": 4}.get(op, 0)
    names = [node("null", f"x{i}") for i in range(inputs)]
    model = mxnet.load_symbol(symbol_of(tmp_path, *names, node(op, "n", *range(inputs), **attrs)))
    given = {n: jnp.ones((2, 2, 2)) for n in model.inputs}
    params = {node.name: jnp.ones(4) for node in model.symbol.nodes if node.is_variable and node.name not in given}
    with pytest.raises((ValueError, TypeError)):
        model.apply(params, given)
