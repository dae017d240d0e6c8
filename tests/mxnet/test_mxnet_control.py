"""Loops and branches in symbols, layers of sequences of several lengths, and files of them that are damaged.

tests/mxnet/test_mxnet_operators.py compares them with MXNet, and test_mxnet_port.py their modules with the symbols.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from symbols import node, symbol_of

from jaxpar import mxnet, train, viz


def graph_of(*nodes, heads=None):
    """A graph inside of a node."""
    return {"nodes": nodes, "heads": heads or [[len(nodes) - 1, 0, 0]]}


def with_graphs(entry, *graphs):
    return {**entry, "subgraphs": graphs}


LOOP = {"in_data_locs": [0], "in_state_locs": [1], "remain_locs": [], "num_out_data": 0, "num_outputs": 1}
PLUS = graph_of(node("null", "x"), node("null", "s"), node("elemwise_add", "sum", 0, 1))


def dropped(folder):
    """A loop whose step is a dense layer and dropout, over (steps, batch, features) in two halves of the channels."""
    body = graph_of(
        *(node("null", n, __subgraph_name__="step") for n in ("x", "state", "w", "b")),
        node("FullyConnected", "fc", 0, 2, 3, num_hidden=3),
        node("Dropout", "drop", 4, p=0.5),
        node("elemwise_add", "sum", 5, 1),
        heads=[[5, 0, 0], [6, 0, 0]],
    )
    attrs = {"in_data_locs": [0], "in_state_locs": [1], "remain_locs": [2, 3], "num_out_data": 1, "num_outputs": 2}
    loop = with_graphs(node("_foreach", "loop", *range(4), **attrs), body)
    names = (node("null", n) for n in ("data", "begin", "fc_weight", "fc_bias"))
    return symbol_of(folder, *names, loop, heads=[[4, 0, 0], [4, 1, 0]])


SHAPES = {"data": (4, 2, 3), "begin": (2, 3)}


def arrays():
    random = np.random.RandomState(0)
    params = {"fc_weight": random.standard_normal((3, 3)), "fc_bias": random.standard_normal(3)}
    inputs = {n: random.standard_normal(shape) for n, shape in SHAPES.items()}
    return jax.tree.map(jnp.float32, (params, inputs))


def test_what_a_loop_trains_are_params_and_have_shapes(tmp_path):
    model = mxnet.load_symbol(dropped(tmp_path))
    assert model.inputs == ("data", "begin")
    assert model.shapes(**SHAPES) == {**SHAPES, "fc_weight": (3, 3), "fc_bias": (3,)}
    with pytest.raises(ValueError, match="'begin'"):
        model.shapes(data=(4, 2, 3))


def test_dropout_in_a_loop_is_another_one_in_each_step(tmp_path):
    """And in a module the same."""
    path = dropped(tmp_path)
    model, (params, inputs) = mxnet.load_symbol(path), arrays()
    inputs = {**inputs, "data": jnp.ones((9, 2, 3))}
    (out, last), _ = model.apply(params, inputs, train=True, rng=0)
    plain, _ = model.apply(params, inputs)
    assert np.array_equal(np.unique(np.round(out / plain, 4)), [0, 2])
    assert len({step.tobytes() for step in np.asarray(out == 0)}) > 5
    np.testing.assert_allclose(last, inputs["begin"] + out.sum(0), rtol=1e-5)
    module = {"__name__": "ported"}
    exec(mxnet.port(path, shapes=SHAPES), module)
    of_module, _ = module["apply"](params, inputs["data"], inputs["begin"], train=True, rng=jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, of_module, (out, last))
    assert {n: a.shape for n, a in module["init"](jax.random.key(0))[0].items()} == {
        "fc_weight": (3, 3),
        "fc_bias": (3,),
    }


def test_a_network_with_a_loop_is_drawn_and_trained(tmp_path):
    model, (params, inputs) = mxnet.load_symbol(dropped(tmp_path)), arrays()
    assert '" carry "' in viz.plot_network(model.apply, params, inputs).source

    def loss_fn(params, batch, rng):
        named = {"data": batch.swapaxes(0, 1), "begin": jnp.zeros(batch[:, 0].shape)}
        outputs, _ = model.apply(params, named, train=True, rng=rng)
        return (outputs[0] ** 2).mean()

    state, step = train.start(params, mxnet.sgd(0.1), loss_fn, devices=jax.devices()[:1])
    losses = []
    for _ in range(20):
        state, metrics = step(state, inputs["data"].swapaxes(0, 1))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 2


def test_convolutions_in_a_loop_of_a_network_whose_channels_are_last(tmp_path):
    body = graph_of(
        *(node("null", n) for n in ("x", "w", "state")),
        node("Convolution", "conv", 0, 1, kernel=(1, 1), num_filter=3, no_bias=True),
        node("elemwise_add", "sum", 3, 2),
    )
    attrs = {"in_data_locs": [0], "in_state_locs": [2], "remain_locs": [1], "num_out_data": 0, "num_outputs": 1}
    loop = with_graphs(node("_foreach", "loop", 3, 0, 2, **attrs), body)
    nodes = [node("null", n) for n in ("data", "rows", "conv_weight")]
    path = symbol_of(tmp_path, *nodes, node("expand_dims", "steps", 0, axis=0), loop)
    params = {"conv_weight": jnp.arange(9.0).reshape(3, 3, 1, 1)}
    images = jnp.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    model, last = (mxnet.load_symbol(path, layout=layout) for layout in (None, "NHWC"))
    assert model.shapes(data=(2, 3, 4, 5))["conv_weight"] == (3, 3, 1, 1)
    out = model.apply(params, {"data": images, "rows": images})
    found = last.apply(params, {n: images.transpose(0, 2, 3, 1) for n in ("data", "rows")})
    np.testing.assert_allclose(found.transpose(0, 3, 1, 2), out)


def test_a_loop_of_one_output_and_a_branch_in_a_module(tmp_path):
    """One output is an array, and no tuple. The graph of a branch is called as its script called it."""
    loop = with_graphs(node("_foreach", "loop", 0, 1, **LOOP), PLUS)
    halves = {"cond_input_locs": [1], "then_input_locs": [0], "else_input_locs": [0, 1], "num_outputs": 1}
    same = graph_of(node("null", "p"), node("identity", "copy", 0))
    twice = graph_of(node("null", "z", __subgraph_name__="twice"), node("_mul_scalar", "m", 0, scalar=2))
    branch = with_graphs(node("_cond", "branch", 2, 3, **halves), same, twice, PLUS)
    last = node("tanh", "last", 4)
    nodes = [node("null", "data"), node("null", "state"), loop, node("null", "p"), branch, last]
    path = symbol_of(tmp_path, *nodes)
    model, module, text = mxnet.load_symbol(path), {"__name__": "ported"}, mxnet.port(path)
    exec(text, module)
    assert "def twice(net, z):" in text
    inputs = jnp.arange(6.0).reshape(3, 2) / 9, jnp.ones(2) / 9
    for p in (0.0, 1.0):
        expected = np.tanh((inputs[0].sum(0) + inputs[1]) * (1 + p) if p else inputs[0].sum(0) + inputs[1])
        np.testing.assert_allclose(model.apply({}, *inputs, jnp.full(1, p)), expected, rtol=1e-6)
        np.testing.assert_allclose(module["apply"]({}, *inputs, jnp.full(1, p)), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gru", "lstm", "rnn_tanh"])
def test_a_layer_of_sequences_of_several_lengths(mode, tmp_path):
    """MXNet's CPU has none. Its cells compute the same by masks: each sequence by itself, and 0 behind it."""
    lengths, steps, hidden = [3, 1], 3, 2
    gates = {"lstm": 4, "gru": 3}.get(mode, 1)
    count = 2 * gates * hidden * (3 + hidden + 2) + 2 * gates * hidden * (2 * hidden + hidden + 2)
    names = ["x", "w", "s", *(["c"] if mode == "lstm" else [])]
    attrs = {"mode": mode, "state_size": hidden, "num_layers": 2, "bidirectional": True, "state_outputs": True}
    nodes = [node("null", n) for n in (*names, "lengths")]
    layer = node("RNN", "rnn", *range(len(nodes)), use_sequence_length=True, **attrs)
    heads = [[len(nodes), place, 0] for place in range(len(names) - 1)]
    model = mxnet.load_symbol(symbol_of(tmp_path, *nodes, layer, heads=heads))
    plain = mxnet.operator("RNN")
    shapes = ((steps, 2, 3), (count,), *[(4, 2, hidden)] * (len(names) - 2))
    x, w, *states = (jnp.float32(np.random.RandomState(0).standard_normal(shape)) for shape in shapes)

    def with_lengths(x, w, states):
        return model.apply({"w": w}, {"x": x, **dict(zip("sc", states)), "lengths": jnp.array(lengths)})  # noqa: B905

    def one_by_one(x, w, states):
        found = []
        for i, n in enumerate(lengths):
            of_one = [state[:, i : i + 1] for state in states]
            out, *last = plain(x[:n, i : i + 1], w, *of_one, train=False, rng=None, **attrs)
            found.append((jnp.pad(out, ((0, steps - n), (0, 0), (0, 0))), *last))
        return tuple(jnp.concatenate(each, 1) for each in zip(*found, strict=True))

    def gradients(run):
        def weighted(*arrays):
            outputs = run(*arrays)
            weights = [jnp.cos(jnp.arange(out.size)).reshape(out.shape) for out in outputs]
            return sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)), outputs

        return jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))(x, w, states)

    assert model.shapes(x=x.shape)["lengths"] == (2,)
    found, expected = gradients(with_lengths), gradients(one_by_one)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


NORM = graph_of(
    *(node("null", n) for n in ("x", "s", "gamma", "beta", "mean", "var")), node("BatchNorm", "norm", 0, 2, 3, 4, 5)
)
DEEP = PLUS
for _ in range(9):
    DEEP = graph_of(node("null", "x"), node("null", "s"), with_graphs(node("_foreach", "loop", 0, 1, **LOOP), DEEP))
DAMAGED = {
    "no graph": ([], {}, ["_foreach 'loop'", "0 graphs"]),
    "two graphs": ([PLUS, PLUS], {}, ["2 graphs"]),
    "no list of graphs": ({"nodes": []}, {}, ["node 2"]),
    "no graph at all": ([3], {}, ["graph inside"]),
    "a graph of no outputs": ([{"nodes": [], "heads": []}], {}, ["no outputs"]),
    "other outputs": ([PLUS], {"num_outputs": 2}, ["outputs"]),
    "places behind the arrays": ([PLUS], {"in_state_locs": [2]}, ["(0, -1)"]),
    "a place twice": ([PLUS], {"in_state_locs": [0]}, ["(1, -1)"]),
    "too few places": ([PLUS], {"in_state_locs": []}, ["2 arrays"]),
    "one name twice": (
        [graph_of(node("null", "x"), node("null", "x"), node("elemwise_add", "y", 0, 1))],
        {},
        ["2 arrays"],
    ),
    "too many levels": ([DEEP], {}, ["8th"]),
    "an unknown operator": (
        [graph_of(node("null", "x"), node("null", "s"), node("Mine", "m", 0, 1))],
        {},
        ["Mine in 'm'"],
    ),
    "running statistics": ([NORM], {"remain_locs": [2, 3, 4, 5]}, ["running statistics", "'mean', 'var'"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_graphs_that_are_damaged_or_not_read(name, tmp_path):
    graphs, attrs, content = DAMAGED[name]
    nodes = [node("null", f"v{i}") for i in range(6 if name == "running statistics" else 2)]
    loop = node("_foreach", "loop", *range(len(nodes)), **{**LOOP, **attrs})
    path = symbol_of(tmp_path, *nodes, {**loop, "subgraphs": graphs})
    with pytest.raises(ValueError, match=r"own-symbol\.json") as error:
        mxnet.load_symbol(path)
    assert all(word in str(error.value) for word in content), str(error.value)


def test_a_loop_whose_state_changes_its_shape_names_the_node(tmp_path):
    body = graph_of(node("null", "x"), node("null", "s"), node("Concat", "both", 0, 1, dim=0))
    loop = with_graphs(node("_foreach", "loop", 0, 1, **LOOP), body)
    model = mxnet.load_symbol(symbol_of(tmp_path, node("null", "data"), node("null", "state"), loop))
    with pytest.raises(ValueError, match="_foreach 'loop', of arrays of shapes"):
        model.apply({}, jnp.ones((3, 2)), jnp.ones(2))
