"""Labels that do not go straight into a loss layer: not needed for outputs, and their shapes as MXNet infers them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from symbols import Symbol, language_model, node, symbol_of

from jaxpar import mxnet


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # as users of written modules have it
        yield


DATA = np.float32(np.random.RandomState(0).standard_normal((6, 4)))
ARRAYS = {"fc_weight": np.float32(np.random.RandomState(1).standard_normal((3, 4))), "fc_bias": np.zeros(3, np.float32)}


def network(label=None, loss="SoftmaxOutput", **attrs):
    """A dense layer and a loss layer, whose label `label(net)` makes."""
    net = Symbol()
    scores = net.add("FullyConnected", "fc", "data", "fc_weight", "fc_bias", num_hidden=3)
    net.add(loss, "out", scores, "label" if label is None else label(net), **attrs)
    return net


# How a label is made, and its shape where the loss layer takes (6,), or (6, 3). None: several are possible.
CHAINS = {
    "itself": (None, (6,)),
    "a cast": (lambda net: net.add("Cast", "l", "label", dtype="float32"), (6,)),
    "a number more": (lambda net: net.add("_plus_scalar", "l", "label", scalar=1), (6,)),
    "several": (lambda net: net.add("BlockGrad", "l2", net.add("clip", "l", "label", a_min=0, a_max=2)), (6,)),
    "reshaped": (lambda net: net.add("Reshape", "l", "label", shape=(-1,)), None),
    "kept": (lambda net: net.add("Reshape", "l", "label", shape=(0,)), (6,)),
    "flat": (lambda net: net.add("Reshape", "l", net.add("transpose", "t", "label"), shape=(-1,)), None),
    "a part": (lambda net: net.add("slice_axis", "l", "label", axis=0, begin=0, end=6), None),
    "joined": (lambda net: net.add("Concat", "l", "label", "other", dim=0, num_args=2), None),
    "added": (lambda net: net.add("elemwise_add", "l", "label", "other"), (6,)),
    "spread": (lambda net: net.add("broadcast_add", "l", "label", "other"), None),
    "one of two": (lambda net: (net.add("SliceChannel", "l", "label", num_outputs=2, squeeze_axis=True), 1), (6, 2)),
}
MATRICES = {
    "itself": (None, (6, 3)),
    "turned": (lambda net: net.add("transpose", "l", "label", axes=(1, 0)), (3, 6)),
    "swapped": (lambda net: net.add("SwapAxis", "l", "label", dim1=0, dim2=1), (3, 6)),
    "without an axis": (lambda net: net.add("Reshape", "l", net.add("expand_dims", "e", "label", axis=1)), None),
    "one of two": (lambda net: (net.add("SliceChannel", "l", "label", num_outputs=2), 0), (6, 6)),
    "stacked": (lambda net: net.add("transpose", "l", net.add("stack", "s", "label", "b", "c", axis=0)), (6,)),
}


def check(net, shape, folder):
    path = symbol_of(folder, *net.nodes)
    model = mxnet.load_symbol(path)
    shapes = model.shapes(data=(6, 4))
    assert (shapes["fc_weight"], shapes["fc_bias"]) == ((3, 4), (3,))
    assert shapes.get("label") == shape
    plain = mxnet.operator(net.nodes[-1]["op"])(DATA @ ARRAYS["fc_weight"].T)
    np.testing.assert_allclose(model.apply(ARRAYS, DATA), plain, rtol=1e-5)
    outputs, state = model.apply(ARRAYS, DATA, train=True)
    np.testing.assert_allclose(outputs, plain, rtol=1e-5)
    assert state == {}
    scope = {}
    exec(mxnet.port(path, shapes={"data": (6, 4)}), scope)
    np.testing.assert_allclose(scope["apply"](ARRAYS, DATA), plain, rtol=1e-5)


@pytest.mark.parametrize("name", CHAINS)
def test_a_label_of_classes(name, tmp_path):
    label, shape = CHAINS[name]
    check(network(label), shape, tmp_path)


@pytest.mark.parametrize("name", MATRICES)
def test_a_label_of_numbers(name, tmp_path):
    label, shape = MATRICES[name]
    losses = ("LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput")
    check(network(label, losses[list(MATRICES).index(name) % 3]), shape, tmp_path)


@pytest.mark.parametrize("multi_output", [False, True])
def test_a_label_of_images(multi_output, tmp_path):
    net = Symbol()
    scores = net.add("Convolution", "c", "data", "c_weight", "c_bias", kernel=(1, 1), num_filter=3)
    label = net.add("Cast", "l", "label", dtype="float32")
    net.add("SoftmaxOutput", "out", scores, label, multi_output=multi_output)
    path = symbol_of(tmp_path, *net.nodes)
    expected = (2, 20) if multi_output else (2, 3, 4)
    for layout, size in (None, (2, 7, 4, 5)), ("NHWC", (2, 4, 5, 7)):
        assert mxnet.load_symbol(path, layout=layout).shapes(data=size)["label"] == expected


def test_a_label_of_one_number_for_each_example(tmp_path):
    net = Symbol()
    scores = net.add("FullyConnected", "fc", "data", "fc_weight", "fc_bias", num_hidden=1)
    net.add("LinearRegressionOutput", "out", scores, net.add("Cast", "l", "label", dtype="float32"))
    assert mxnet.load_symbol(symbol_of(tmp_path, *net.nodes)).shapes(data=(6, 4))["label"] == (6,)


@pytest.mark.slow
def test_an_unrolled_language_model(tmp_path):
    model = mxnet.load_symbol(symbol_of(tmp_path, *language_model(2, layers=1)))
    assert model.inputs == ("data", "softmax_label")
    random = np.random.RandomState(0)
    shapes = model.shapes(data=(3, 2))
    params = {n: np.float32(random.standard_normal(s)) for n, s in shapes.items() if n not in model.inputs}
    words, label = random.randint(0, 11, (2, 3, 2))
    outputs = model.apply(params, words)
    assert outputs.shape == (6, 11)
    assert model.shapes(data=(3, 2), softmax_label=(3, 2))["softmax_label"] == (3, 2)

    # With the label, MXNet's gradient: that of the sum of the losses. The label is in the order of the outputs.
    found = jax.jit(jax.grad(lambda p: model.apply(p, words, label).sum()))(params)
    own = jax.jit(
        jax.grad(lambda p: -jnp.log(jnp.take_along_axis(model.apply(p, words), label.T.reshape(-1, 1), 1)).sum())
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, own(params))


def two_losses(*labels):
    """A network with two loss layers."""
    net = Symbol()
    scores = net.add("FullyConnected", "fc", "data", "fc_weight", "fc_bias", num_hidden=3)
    made = []
    for i, label in enumerate(labels):
        cast = net.add("Cast", f"cast{i}", label, dtype="float32")
        made.append(net.add("SoftmaxOutput", f"out{i}", scores, cast))
    return net, [[number, 0, 0] for number in made]


def test_two_losses_of_two_labels_and_of_one(tmp_path):
    for labels in ("first", "second"), ("first", "first"):
        net, heads = two_losses(*labels)
        model = mxnet.load_symbol(symbol_of(tmp_path, *net.nodes, heads=heads))
        shapes = model.shapes(data=(6, 4))
        assert {n: s for n, s in shapes.items() if n in labels} == dict.fromkeys(labels, (6,))
        for given in {}, {"first": np.zeros(6)}, dict.fromkeys(labels, np.zeros(6)):
            for outputs in model.apply(ARRAYS, {"data": DATA, **given}):
                np.testing.assert_allclose(outputs, jax.nn.softmax(DATA @ ARRAYS["fc_weight"].T), rtol=1e-5)


def test_a_label_of_two_inputs(tmp_path):
    net = network(lambda net: net.add("elemwise_mul", "l", "label", "mask"))
    model = mxnet.load_symbol(symbol_of(tmp_path, *net.nodes))
    whole = {"data": DATA, "label": np.ones(6), "mask": np.ones(6)}
    assert jax.tree.all(jax.tree.map(np.array_equal, model.apply(ARRAYS, whole), model.apply(ARRAYS, DATA)))


def test_a_label_that_outputs_are_computed_of_is_needed(tmp_path):
    net = network()
    shown = net.add("BlockGrad", "shown", "label")
    model = mxnet.load_symbol(symbol_of(tmp_path, *net.nodes, heads=[[shown - 1, 0, 0], [shown, 0, 0]]))
    with pytest.raises(ValueError, match="for input 'label': it is a label, and output 'shown_output' is computed of"):
        model.apply(ARRAYS, DATA)
    assert model.apply(ARRAYS, DATA, np.ones(6))[1].tolist() == [1] * 6


def test_the_data_as_a_label(tmp_path):
    """An autoencoder needs no label, and has MXNet's gradient."""
    net = Symbol()
    scores = net.add("FullyConnected", "fc", "data", "fc_weight", "fc_bias", num_hidden=4)
    net.add("LinearRegressionOutput", "out", scores, net.add("_mul_scalar", "twice", "data", scalar=2))
    model = mxnet.load_symbol(symbol_of(tmp_path, *net.nodes))
    params = {"fc_weight": np.eye(4, dtype=np.float32), "fc_bias": np.zeros(4, np.float32)}
    assert model.shapes(data=(6, 4)) == {"data": (6, 4), "fc_weight": (4, 4), "fc_bias": (4,)}
    gradient = jax.grad(lambda p: model.apply(p, DATA).sum())(params)
    np.testing.assert_allclose(gradient["fc_bias"], -DATA.sum(0) / 4, rtol=1e-5)


def test_layers_are_compared_without_the_label(tmp_path):
    model = mxnet.load_symbol(symbol_of(tmp_path, *network(CHAINS["flat"][0]).nodes))
    scores = DATA @ ARRAYS["fc_weight"].T
    reference = {"data": DATA, "fc_output": scores, "out_output": np.asarray(jax.nn.softmax(scores))}
    assert model.compare(reference, ARRAYS) is None
    assert model.compare(reference | {"out_output": scores}, ARRAYS).name == "out"


@pytest.mark.parametrize(("mode", "gates"), [("lstm", 4), ("gru", 3)])
def test_shapes_follow_backwards_through_packed_weights(mode, gates, tmp_path):
    """Gluon writes a 0 for the features, and MXNet's `infer_shape` finds them from the data."""
    marks = {"__lr_mult__": "1.0", "__wd_mult__": "1.0", "__storage_type__": "0"}
    weights = {"l0_i2h": f"({gates * 4}, 0)", "l0_h2h": f"({gates * 4}, 4)", "i2h": f"({gates * 4},)"}
    weights["h2h"] = weights["i2h"]
    nodes = [node("null", "data0"), node("null", "data1"), node("null", "data2")]
    for name, shape in weights.items():
        nodes += [
            node("null", name, __shape__=shape, **marks),
            node("Reshape", f"{name}_flat", len(nodes), shape="(-1,)"),
        ]
    nodes.append(node("_rnn_param_concat", "packed", 4, 6, 8, 10, dim=0))
    states = (1, 2) if mode == "lstm" else (1,)
    nodes.append(node("RNN", "rnn", 0, 11, *states, mode=mode, state_size=4, num_layers=1))
    model = mxnet.load_symbol(symbol_of(tmp_path, *nodes))
    shapes = model.shapes(data0=(5, 2, 3))
    assert model.inputs == ("data0", "data1", "data2")
    assert shapes["l0_i2h"] == (gates * 4, 3)
    assert shapes["data1"] == (1, 2, 4)
