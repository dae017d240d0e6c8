"""`model.compare` finds the layer that does not give what MXNet gave, in a file that tools/mxnet_outputs.py wrote."""

import jax.numpy as jnp
import numpy as np
import pytest
from records import write
from symbols import node, symbol_of

from jaxpar import mxnet


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    write(folder)

    def make(layout=None, **operators):
        files = folder / "net-symbol.json", folder / "net.params"
        return mxnet.load_symbol(*files, layout=layout, operators=operators)

    make.reference = folder / "net-outputs.params"
    make.arrays = mxnet.load_params(make.reference)
    return make


@pytest.mark.slow
def test_a_network_that_is_equal(load):
    assert load().compare(load.reference) is None
    assert load().compare({name: jnp.asarray(array) for name, array in load.arrays.items()}) is None
    assert {"data", "conv_output", "halves_output1", "softmax_output"} < set(load.arrays)
    assert load("NHWC").compare(load.reference) is None
    assert load().compare(load.reference, tolerance=0).relative < 1e-5  # rounding


def wrong_leaky(x, *, slope: float):
    return jnp.where(x > 9, x, slope * x)


@pytest.mark.parametrize(
    ("operator", "function", "name", "equal"),
    [
        ("LeakyReLU", wrong_leaky, "leaky", 2),
        ("SliceChannel", lambda x, **attrs: (x[:, :3], x[:, :3]), "halves", 5),
        ("elemwise_mul", lambda a, b: a + b, "_mul0", 6),
        ("BatchNorm", lambda x, gamma, beta, mean, var, **attrs: x * 0.9, "norm", 1),
        ("FullyConnected", lambda x, w, b, *, num_hidden, flatten="True": x.reshape(2, -1) @ w.T, "dense", 7),
    ],
)
def test_a_wrong_operator_is_found_at_its_layer(load, operator, function, name, equal):
    found = load(**{operator: function}).compare(load.reference)
    assert (found.name, found.op, found.equal) == (name, operator, equal)
    assert found.max_abs == abs(found.value - found.expected) > 0
    key = next(key for key in (f"{name}_output", f"{name}_output1") if key in load.arrays)
    assert found.expected == load.arrays[key][found.index]
    assert found.relative == pytest.approx(found.max_abs / np.abs(load.arrays[key]).max())
    assert str(found).startswith(f"{operator} {name!r} differs from MXNet, after {equal} equal layers: by up to")


def test_other_params_are_found_at_their_layer(load):
    model = load()
    found = model.compare(load.reference, model.params | {"dense_bias": model.params["dense_bias"] + 1})
    assert (found.name, found.max_abs) == ("dense", pytest.approx(1, abs=1e-3))
    state = {name: array + 1 for name, array in model.state.items()}
    assert model.compare(load.reference, state=state).name == "norm"
    assert model.compare(load.reference, state=state, tolerance=1e9) is None


def test_other_shapes_and_numbers_that_are_none(load):
    found = load(elemwise_mul=lambda a, b: (a * b)[:1]).compare(load.reference)
    assert str(found).endswith("'_mul0' differs from MXNet, after 6 equal layers: its output has the shape "
                               "(1, 3, 4, 3), in MXNet (2, 3, 4, 3)")  # fmt: skip
    found = load(elemwise_mul=lambda a, b: a * b * jnp.nan).compare(load.reference)
    assert (found.name, found.max_abs) == ("_mul0", np.inf)
    arrays = load.arrays | {"dense_output": np.full_like(load.arrays["dense_output"], np.nan)}
    assert load().compare(arrays).name == "dense"


def test_outputs_that_mxnet_calls_by_other_words(tmp_path):
    inputs = [node("null", "x"), node("null", "y")]
    path = symbol_of(tmp_path, *inputs, node("_npi_matmul", "product", 0, 1), node("relu", "last", 2))
    model, x = mxnet.load_symbol(path), np.eye(2, dtype=np.float32)
    reference = {"x": x, "y": x, "product_out": x + 1, "last_output": x + 1}
    assert model.compare(reference).name == "product"
    assert model.compare(reference | {"product_out": x, "last_output": x}) is None
    layer = node("LayerNorm", "norm", 0, 1, 2, output_mean_var=True)
    norm = symbol_of(tmp_path, *inputs, node("null", "z"), layer, heads=[[3, 0, 0], [3, 2, 0]])
    assert mxnet.load_symbol(norm).outputs == ("norm_output", "norm_std")
