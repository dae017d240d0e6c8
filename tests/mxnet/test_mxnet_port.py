"""`mxnet.port` and `jaxpar port`: modules in plain JAX that give what the symbols give."""

import functools
import importlib
import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_symbols import NAMES, SHAPE, random_symbol
from symbols import CASES, MORE, Symbol, language_model, node, parts_of, save, symbol_of, transformer, write
from world import mostly_slow

from jaxpar import checkpoint, mxnet, viz
from jaxpar.__main__ import main
from jaxpar.mxnet import _port_layers
from jaxpar.train import start

QUICK = ("lenet 1", "factorization 1", "normalized 1", "gluon lstm")
ZOO = "resnet18_v1 squeezenet1_1 resnet18_v2 resnet50_v1 resnet50_v2"
ZOO += " mobilenet0_25 mobilenet_v2_0_25 densenet121 vgg11_bn alexnet inception_v3"
LONG = ("alexnet", "densenet121", "inception_v3", "resnet50_v1", "resnet50_v2", "vgg11_bn")
ROW = dict.fromkeys(LONG, pytest.mark.release)
SLOW = [pytest.param(f"zoo {name}", marks=ROW.get(name, pytest.mark.slow)) for name in ZOO.split()]
# Lines of the layers of a network, without the functions that each module begins with.
MOST_LINES = {"lenet 1": 12, "zoo resnet18_v1": 45, "zoo squeezenet1_1": 45, "zoo resnet50_v1": 66}
MOST_LINES |= {"zoo densenet121": 45, "zoo inception_v3": 110, "zoo vgg11_bn": 40}


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # as users have it
        yield


def run(text):
    """The names of a written module."""
    found = {}
    exec(compile(text, "ported.py", "exec"), found)
    return found


def check(symbol, text, params, state, inputs, file=None, jit=jax.jit):
    """Outputs and running statistics are those of the symbol, in training and else."""
    model, module = mxnet.load_symbol(symbol, file), run(text)
    for train in (False, True):
        options = {"state": state, "train": train, "rng": jax.random.key(3)}
        expected = jit(lambda p, o=options: model.apply(p, inputs, **o))(params)
        found = jit(lambda p, o=options: module["apply"](p, *inputs.values(), **o))(params)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            # Statistics of a small batch make the rounding of the two programs larger.
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=(5e-4 if train else 2e-5) * np.abs(b).max())


def files_of(folder, name):
    """(symbol file, params file, params, state, inputs without labels) of a case."""
    params, state, inputs = parts_of(name)
    return *save(folder, name), params, state, {n: a for n, a in inputs.items() if n[-5:] not in "label score"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_module_gives_what_its_symbol_gives(name, tmp_path):
    symbol, file, params, state, inputs = files_of(tmp_path, name)
    text = mxnet.port(symbol, file, shapes={n: a.shape for n, a in inputs.items()})
    check(symbol, text, params, state, inputs, file)
    module = run(text)
    for new, like in zip(jax.eval_shape(module["init"], jax.random.key(0)), (params, state), strict=True):
        assert {n: a.shape for n, a in new.items()} == {n: a.shape for n, a in like.items()}
    loaded = module["load"](file)
    assert all(np.array_equal(loaded[0][n], a) for n, a in params.items())
    assert set(loaded[1]) == set(state)
    if name in MOST_LINES:
        layers = text.partition("def split(")[2].partition("def apply(")[0]
        assert len([line for line in layers.splitlines() if line]) <= MOST_LINES[name]


@pytest.mark.slow
def test_the_gradient_is_that_of_the_symbol_without_labels(tmp_path):
    symbol, file, params, state, inputs = files_of(tmp_path, "normalized 1")
    model, module = mxnet.load_symbol(symbol), run(mxnet.port(symbol, file))

    def loss(apply):
        return lambda p: -jnp.log(apply(p, inputs["data"], state=state, train=True)[0][:, 0]).sum()

    found, expected = (jax.jit(jax.grad(loss(apply)))(params) for apply in (module["apply"], model.apply))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


def test_the_module_of_the_guide(tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "from_mxnet.md").read_text()
    (shown,) = [block for block in guide.split("```")[1::2] if "written by `jaxpar port`" in block]
    path = write(tmp_path, "lenet 1").rename(tmp_path / "lenet-symbol.json")
    assert shown == "python\n" + mxnet.port(path, shapes={"data": (1, 1, 28, 28)})


@pytest.mark.parametrize(
    ("name", "size", "wrong"), [("lenet 1", (1, 1, 28, 28), ["fc1"]), ("zoo resnet18_v1", (1, 3, 224, 224), [])]
)
def test_the_tables_of_layers_in_the_guide(name, size, wrong, tmp_path):
    model = mxnet.load_symbol(write(tmp_path, name))
    shapes = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in model.shapes(data=size).items()}
    state = {n: shapes.pop(n) for n in CASES[name]["aux"]}
    data, *_ = [shapes.pop(n) for n in model.inputs]  # the label too

    def network(params, data, state):
        return model.apply(params, data, state=state)

    graph = viz.trace(network, shapes, data, state, depth=0, repeats=False)
    guide = (Path(__file__).parents[2] / "docs" / "from_mxnet.md").read_text().partition("### The table of layers")[2]
    tables = [table.splitlines() for table in re.findall(r"(?:^\| `.*\n)+", guide, re.MULTILINE)]
    rows = [[cell.strip(" `").replace(",", "") for cell in row.split("|")] for row in tables[name != "lenet 1"]]
    assert {row[1]: int(row[6]) for row in rows} == {n.name: n.params for n in graph.layers if n.op != "input"}
    assert [row[1] for row in rows if row[4] != row[6]] == wrong
    assert graph.layers[-1].shape == (1, 10) or name == "lenet 1"


def check_with_ruff(folder, *rules):
    """The modules of a folder are as ruff writes them, in its own settings."""
    pytest.importorskip("ruff")
    for words in (["format", "--diff"], ["check", "--select", ",".join(rules)])[: 1 + bool(rules)]:
        command = [sys.executable, "-m", "ruff", words[0], "--isolated", "--no-cache", *words[1:], str(folder)]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[:4000] + ran.stderr


@pytest.mark.parametrize("part", mostly_slow([*range(8), "zoo"], 0))
def test_modules_are_written_as_ruff_writes_them(part, tmp_path):
    small = [name for name in CASES if not name.startswith("zoo")]
    names = [name for name in CASES if name not in small] if part == "zoo" else small[part::8]
    (tmp_path / "modules").mkdir()
    for number, name in enumerate(names):
        symbol, shapes = write(tmp_path, name), {n: tuple(CASES[name]["arrays"][n][0]) for n in CASES[name]["inputs"]}
        model, file = mxnet.load_symbol(symbol), None
        if part != "zoo":  # rare operators need the shapes of their arrays
            arrays, state, inputs = parts_of(name, model.inputs)
            file, shapes = tmp_path / "w.params", {n: a.shape for n, a in inputs.items()}
            model.save_params(file, arrays, state)
        text = mxnet.port(symbol, file, shapes=shapes, nnx=number % 2 == 1)
        (tmp_path / "modules" / f"{name.replace('/', '_')}.py").write_text(text)
    check_with_ruff(tmp_path / "modules", "I", "F", "E")


# Symbols of one's own


SEVERAL = {"SliceChannel": {"axis": 0, "squeeze_axis": True}, "_split_v2": {"indices": (), "axis": 0, "sections": 1}}


@pytest.mark.parametrize(("op", "attrs"), [*SEVERAL.items(), ("amp_multicast", {})])
def test_one_output_of_operators_that_have_several_is_an_array(op, attrs, tmp_path):
    """gluoncv's detectors split a batch of one image."""
    count = {} if op == "_split_v2" else {"num_outputs": 1}
    nodes = [node("null", "data"), node(op, "one", 0, **attrs, **count), node("softmax", "after", 1)]
    path, data = symbol_of(tmp_path, *nodes), np.arange(3, dtype=np.float32)[None]
    assert mxnet.operator(op)(data, **attrs, **count).shape == (data[0] if "squeeze_axis" in attrs else data).shape
    check(path, mxnet.port(path), {}, {}, {"data": data}, jit=lambda fn: fn)


def chain_of(*nodes):
    """Nodes one behind the other: (op, attributes)."""
    return [node("null", "data"), *(node(op, f"n{i}", i, **attrs) for i, (op, attrs) in enumerate(nodes))]


def test_what_repeats_is_written_so(tmp_path):
    """Four lines are one function, and a loop leaves no half of its window behind it."""
    add, twice = ("_plus_scalar", {"scalar": 1.5}), ("_mul_scalar", {"scalar": 2.0})
    activations = [("Activation", {"act_type": kind}) for kind in ("relu", "tanh", "softsign")]
    text = mxnet.port(symbol_of(tmp_path, *chain_of(*3 * [add, *activations])))
    assert "    return jax.nn.soft_sign(jax.nn.tanh(jax.nn.relu(x + 1.5)))\n" in text
    text = mxnet.port(symbol_of(tmp_path, *chain_of(add, twice, add, twice, twice)))
    assert " for " not in text.partition("def network(")[2].partition("def apply(")[0]


def test_attributes_whose_names_are_those_of_values(tmp_path):
    """A crop has the attributes x and y, and differs in them from the next."""
    crops = [("_image_crop", {"x": i, "y": 2 - i, "width": 9 - 2 * i, "height": 7 - 2 * i}) for i in range(3)]
    nodes = [node for crop in crops for node in (crop, ("_image_flip_left_right", {}))]
    path, data = symbol_of(tmp_path, *chain_of(*nodes)), np.float32(np.random.RandomState(0).randn(9, 11, 2))
    text = mxnet.port(path)
    assert "(net, x, x_, y_, width, height):" in text
    check(path, text, {}, {}, {"data": data}, jit=lambda fn: fn)


def test_the_dense_layer_of_a_module_flattens():
    net = _port_layers.Net(lambda name, *shape: jnp.ones(shape), {}, False, None)
    assert _port_layers.dense(net, jnp.ones((2, 3, 4)), "fc", 5, no_bias=True).tolist() == [[12] * 5] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["cells", "attention"])
def test_lines_that_share_several_values_are_functions(name, tmp_path):
    """A cell gives its output and its memory; a layer of a transformer reads the mask too."""
    if name == "cells":
        nodes, shapes = language_model(5), {"data": (2, 5)}
        call, calls = r"\w, \w = cell\(net, \w, \w, \w, [01]\)", 10
    else:
        nodes, shapes = transformer(3), {"data": (2, 5), "mask": (2, 5, 5)}
        call, calls = r"(x =|return) attention\(net, x, y, \d, \d+\)", 3
    symbol = symbol_of(tmp_path, *nodes)
    text = mxnet.port(symbol, shapes=shapes)
    assert len(re.findall(call, text.partition("def network(")[2])) == calls
    assert len(text.partition("def network(")[2].partition("def apply(")[0].splitlines()) < 25
    params, state = run(text)["init"](jax.random.key(0))
    random = np.random.RandomState(0)
    check(symbol, text, params, state, {n: np.float32(random.randint(0, 9, shape)) for n, shape in shapes.items()})


def mlp(names=("fc1", "fc2", "fc3", "out"), data="data"):
    """Dense layers with ReLU and dropout, and a softmax at the end."""
    nodes = [node("null", data)]
    at = 0
    for name in names:
        nodes += [node("null", f"{name}_weight"), node("null", f"{name}_bias")]
        nodes.append(node("FullyConnected", name, at, len(nodes) - 2, len(nodes) - 1, num_hidden=6))
        nodes.append(node("Activation", f"{name}_act", len(nodes) - 1, act_type="relu"))
        nodes.append(node("Dropout", f"{name}_drop", len(nodes) - 1, p=0.4))
        at = len(nodes) - 1
    label = node("null", "softmax_label")
    return [*nodes, label, node("SoftmaxOutput", "softmax", at, len(nodes))]


@pytest.mark.slow
def test_an_mlp_is_a_loop_and_its_dropout_that_of_the_symbol(tmp_path):
    path = symbol_of(tmp_path, *mlp())
    text = mxnet.port(path, shapes={"data": (5, 6)})
    assert "def network(net, data):" in text
    assert 'for name, key in (("fc1", 5), ("fc2", 10), ("fc3", 15), ("out", 20)):' in text
    module = run(text)
    params, state = module["init"](jax.random.key(0))
    check(path, text, params, state, {"data": np.float32(np.random.RandomState(0).standard_normal((5, 6)))})
    with pytest.raises(ValueError, match="dropout needs rng="):
        module["apply"](params, jnp.ones((5, 6)), train=True)


def normalized(names):
    """Convolutions with BatchNorm and ReLU, each of which gets what the one before got and gave."""
    net = Symbol()
    at = net.var("data")
    for name in names:
        statistics = [f"{name}_bn_{end}" for end in ("gamma", "beta", "moving_mean", "moving_var")]
        out = net.add("Convolution", name, at, f"{name}_weight", kernel=(3, 3), pad=(1, 1), num_filter=4, no_bias=True)
        out = net.add(
            "Activation", f"{name}_act", net.add("BatchNorm", f"{name}_bn", out, *statistics), act_type="relu"
        )
        at = net.add("Concat", f"{name}_cat", at, out, dim=1)
    return net.nodes


def activated(name):
    """A dense layer in an activation, which are one line of the module where that fits."""
    net = Symbol()
    net.add("Activation", "act", net.add("FullyConnected", name, "x", f"{name}_weight", f"{name}_bias", num_hidden=6))
    net.nodes[-1]["attrs"]["act_type"] = "relu"
    return net.nodes


FITS = "d" * (88 - len('    return jax.nn.relu(dense(net, x, "", 6))'))  # with this name the line has 88 characters
WRITTEN = {
    "a loop": (
        mlp(),
        """\
def dense_relu_dropout(net, x, name, key):
    \"""FullyConnected, Activation, Dropout: 4 times in the network.\"""
    x = jax.nn.relu(dense(net, x, name, 6))
    return dropout(net, x, key, p=0.4)


def network(net, data):
    x = data
    for name, key in (("fc1", 5), ("fc2", 10), ("fc3", 15), ("out", 20)):
        x = dense_relu_dropout(net, x, name, key)
    return softmax_output(x)""",
    ),
    "densely connected layers": (
        normalized(["c1", "c2"]),
        """\
def dense_layer(net, x, n):
    \"""Convolution, BatchNorm, Activation, Concat: 2 times in the network.\"""
    y = convolution(net, x, f"c{n}", 4, kernel=3, pad=1, no_bias=True)
    y = batch_norm(net, y, f"c{n}_bn", eps=0.001, fix_gamma=True, by="moving")
    y = jax.nn.relu(y)
    return jnp.concatenate([x, y], axis=1)


def network(net, data):
    x = dense_layer(net, data, 1)
    return dense_layer(net, x, 2)""",
    ),
    "a call that is too long for a line, and for two": (
        normalized(["long " * 6]),
        f"""\
def network(net, data):
    x = convolution(
        net, data, "{"long " * 6}", 4, kernel=3, pad=1, no_bias=True
    )
    x = batch_norm(
        net,
        x,
        "{"long " * 6}_bn",
        eps=0.001,
        fix_gamma=True,
        by="moving",
    )
    x = jax.nn.relu(x)
    return jnp.concatenate([data, x], axis=1)""",
    ),
    "88 characters": (
        activated(FITS),
        f'def network(net, x):\n    return jax.nn.relu(dense(net, x, "{FITS}", 6))',
    ),
    "89 characters": (
        activated(f"{FITS}d"),
        f'def network(net, x):\n    x = dense(net, x, "{FITS}d", 6)\n    return jax.nn.relu(x)',
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_how_layers_are_written(name, tmp_path):
    nodes, expected = WRITTEN[name]
    text = mxnet.port(symbol_of(tmp_path, *nodes))
    assert text.partition("in state}, state\n")[2].partition("def apply(")[0].strip() == expected


OF_PYTHON_OR_THE_MODULE = ("net", "x", "class", "dense", "n", "1st", "y")
HOSTILE = ('a"; import os; "', "a{net.__class__}", "a\\", "a\nb", "{s[0].value}", "it's", "007", "\u2028x", "a1b02")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HOSTILE + OF_PYTHON_OR_THE_MODULE)
def test_names_are_never_code(name, tmp_path):
    path = symbol_of(tmp_path, *mlp((f"{name}1", f"{name}2", f"{name}x"), data=name))
    text = mxnet.port(path, shapes={name: (2, 6)})
    params, state = run(text)["init"](jax.random.key(0))
    assert f"{name}1_weight" in params
    check(path, text, params, state, {name: jnp.ones((2, 6))}, jit=lambda fn: fn)  # of many small networks


def test_rare_operators_several_outputs_and_inputs(tmp_path):
    nodes = [
        node("null", "a-b"),
        node("null", "a_b"),
        node("null", "l_gamma", __shape__="(4,)"),
        node("LeakyReLU", "l", 0, 2, act_type="prelu"),
        node("SliceChannel", "s", 3, num_outputs=2),
        node("LRN", "lrn", 1, nsize=3, alpha=0.1),
        node("broadcast_mul", "m", (4, 1), 5),
        node("elemwise_add", "p", 6, 4),
        node("_rminus_scalar", "r", 7, scalar=2),
    ]
    path = symbol_of(tmp_path, *nodes, heads=[[8, 0, 0], [4, 1, 0], [1, 0, 0]])
    text = mxnet.port(path, shapes={"a-b": (2, 4), "a_b": (2, 2)})
    assert 'mx_lrn = operator("LRN")' in text
    module = run(text)
    params, state = module["init"](jax.random.key(0))
    assert params["l_gamma"].shape == (4,)
    random = np.random.RandomState(0)
    inputs = {"a-b": np.float32(random.randn(2, 4)), "a_b": np.float32(random.randn(2, 2))}
    check(path, text, {"l_gamma": jnp.array([0.5, 1, 2, 3])}, state, inputs)


def test_operators_of_labels_alone_are_left_out(tmp_path):
    nodes = [node("null", "data"), node("null", "label"), node("one_hot", "h", 1, depth=4)]
    text = mxnet.port(symbol_of(tmp_path, *nodes, node("LinearRegressionOutput", "out", 0, 2)), shapes={"data": (2, 4)})
    assert "operator" not in text
    assert "def apply(params, data, *" in text


def halved(x, *, by: float = 2.0):
    return x / by


def first_and_last(x):
    return x[:, :1], x[:, 1:]


TWO_IN_A_LINE = (lambda x, *, by: x / float(by)), (lambda x: x * 4)


def operators_of_ones_own():
    """Functions that a module can import, and others that it must copy."""

    def shifted(x, *, by: int = 1, train):
        return jnp.where(train, x + by, np.float32(0.5) * x)

    return {
        "Halved": halved,
        "a/Halved": TWO_IN_A_LINE[0],
        "_Halved": TWO_IN_A_LINE[1],
        "Ends": first_and_last,
        "Shifted": shifted,
        "tanh": jnp.cos,  # in the place of MXNet's
        "relu": lambda x: -x,
        "Any": lambda x, **attrs: x * len(attrs["no name"]) + float(attrs["class"]),
    }


def with_operators_of_ones_own():
    return [
        node("null", "x"),
        node("Halved", "a", 0, by=5),
        node("a/Halved", "b", 1, by="-0.0"),
        node("_Halved", "c", 0),
        node("Ends", "d", 3),
        node("Shifted", "e", (4, 1), by=3),
        node("tanh", "f", 5),
        node("relu", "g", 6),
        node("Any", "h", 7, **{"no name": "'{x}'", "class": "inf"}),
        node("Ends", "i", 0),
    ]


def test_operators_of_ones_own(tmp_path):
    path, own = symbol_of(tmp_path, *with_operators_of_ones_own(), heads=[[n, 0, 0] for n in (2, 4, 8, 9)]), {}
    with pytest.raises(ValueError, match=r"Halved in 'a'; .* Give operators={name: function}, and .* --operator NAME"):
        mxnet.port(path)
    own = operators_of_ones_own()
    text = mxnet.port(path, operators=own)
    assert "import halved as mx_halved\n" in text
    assert "jaxpar.mxnet import load_params\n" in text
    module, model = run(text), mxnet.load_symbol(path, operators=own)
    x = np.float32(np.random.RandomState(0).standard_normal((2, 4)))
    for train in (False, True):
        expected, found = (apply({}, x, train=train) for apply in (model.apply, module["apply"]))
        jax.tree.map(np.testing.assert_array_equal, found, expected)

    scale = 3.0
    for fn, words in (
        (
            lambda x, **more: x * scale,
            "uses scale of its own file; define it at the top of a module that can be imported",
        ),
        (lambda x, **more: check(x), "uses check of its own file"),
        (lambda x, **more: operator.neg(x), "uses operator of its own file"),  # the module means jaxpar's by it
        (type("Own", (), {"__call__": lambda self, x, **more: x})(), "has no source that can be copied"),
    ):
        with pytest.raises(ValueError, match=r"operators\['Halved'\].*" + words):
            mxnet.port(path, operators=own | {"Halved": fn})


def test_a_name_that_functions_of_ones_own_mean_two_modules_by_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, module in (("first_own", "numpy"), ("second_own", "jax.numpy"), ("third_own", "jax.numpy")):
        lines = [
            f"import {module} as np",
            "from flax import nnx",
            "def make():",
            "    return lambda x: nnx.relu(np.sin(x))",
        ]
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
    makes = [importlib.import_module(name).make for name in ("first_own", "second_own", "third_own")]
    path = symbol_of(tmp_path, node("null", "x"), node("A", "a", 0), node("B", "b", 1))
    with pytest.raises(ValueError, match="mean several modules by np"):
        mxnet.port(path, operators={"A": makes[0](), "B": makes[1]()})
    x = np.float32([[0.5, -2]])
    found = run(mxnet.port(path, operators={"A": makes[1](), "B": makes[2]()}))["apply"]({}, x)
    np.testing.assert_allclose(found, np.sin(np.maximum(np.sin(x), 0)), rtol=1e-6)


# Any names, any numbers


def check_random(seed, folder):
    random = np.random.RandomState(seed)
    nodes, heads, names = random_symbol(random, random.randint(1, 40))
    path = symbol_of(folder, *nodes, heads=heads)
    model = mxnet.load_symbol(path)
    shapes = model.shapes(**dict.fromkeys(names["data"], SHAPE))
    params, state = ({n: np.float32(random.randn(*shapes[n])) for n in names[kind]} for kind in ("arg", "aux"))
    state = {n: np.abs(a) for n, a in state.items()}
    inputs = {n: np.float32(random.randn(*SHAPE)) for n in model.inputs if n in names["data"]}
    text = mxnet.port(path, shapes=dict.fromkeys(names["data"], SHAPE), nnx=True)
    module = run(text)
    for train in (False, True):
        expected = model.apply(params, inputs, state=state, train=train, rng=jax.random.key(1))
        found = module["apply"](params, *inputs.values(), state=state, train=train, rng=jax.random.key(1))
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            finite = np.abs(np.where(np.isfinite(b), b, 0))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, finite.max(initial=0)))
    for new, like in zip(jax.eval_shape(module["init"], jax.random.key(0)), (params, state), strict=True):
        assert {n: a.shape for n, a in new.items()} == {n: a.shape for n, a in like.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # 1e39 as float32
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_random_networks_of_any_names_and_numbers(part, tmp_path):
    for seed in range(20 * part, 20 * part + 20) if part else range(6):
        check_random(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_name_as_an_input_and_as_a_layer(step, tmp_path):
    for name in NAMES[::step]:
        nodes = [node("null", name), node("null", f"{name} "), node("null", "_")]
        nodes += [node("null", f"{name}_{end}") for end in ("weight", "bias", "own_scale")]
        nodes.append(node("FullyConnected", name, 0, 3, 4, num_hidden=4))
        nodes.append(node("SliceChannel", f"{name}s", 6, num_outputs=2))  # its first output is not used
        nodes.append(node("Concat", "c", (7, 1), 1, 2, dim=1, num_args=3))
        nodes[5]["attrs"] |= {"__init__": "one", "__shape__": "(1, 10)"}
        nodes.append(node("broadcast_mul", f"{name}m", 8, 5))
        nodes.append(node("_plus_scalar", f"{name}p", 9, scalar="-inf"))
        path = symbol_of(tmp_path, *nodes)
        model = mxnet.load_symbol(path)
        inputs = {n: np.full(SHAPE, i + 1, np.float32) for i, n in enumerate(model.inputs)}
        params = {f"{name}_weight": np.eye(4), f"{name}_bias": np.ones(4), f"{name}_own_scale": np.ones((1, 10))}
        module = run(mxnet.port(path, shapes=dict.fromkeys(inputs, SHAPE)))
        found, expected = module["apply"](params, *inputs.values()), model.apply(params, inputs)
        np.testing.assert_array_equal(found, expected)
        assert {*module["init"](jax.random.key(0))[0]} == {*params}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dims", [2, 3])
def test_a_softmax_is_over_what_belongs_to_an_example(dims, tmp_path):
    """A dense layer that keeps the axes gives several rows for each."""
    arrays = [node("null", n) for n in ("data", "fc_weight", "fc_bias", "label")]
    nodes = [*arrays, node("FullyConnected", "fc", 0, 1, 2, num_hidden=3, flatten=False)]
    path = symbol_of(tmp_path, *nodes, node("SoftmaxOutput", "out", 4, 3))
    x = np.float32(np.random.RandomState(0).standard_normal((2, 5, 4)[-dims:]))
    params = {"fc_weight": np.ones((3, 4), np.float32), "fc_bias": np.float32([0, 1, 2])}
    module = run(mxnet.port(path, shapes={"data": x.shape}))
    np.testing.assert_allclose(module["apply"](params, x), mxnet.load_symbol(path).apply(params, x), rtol=1e-6)


def test_integers_stay_integers(tmp_path):
    """MXNet cuts a number beside integers to a whole one."""
    nodes = [node("null", "x"), node("Cast", "i", 0, dtype="int32"), node("_plus_scalar", "p", 1, scalar=2.5)]
    nodes += [node("elemwise_div", "d", 2, 1), node("mean", "m", 3, axis=1)]
    path = symbol_of(tmp_path, *nodes)
    x = np.float32([[3, 5, 9], [2, 4, 1]])
    found, expected = run(mxnet.port(path, shapes={"x": (2, 3)}))["apply"]({}, x), mxnet.load_symbol(path).apply({}, x)
    assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist()) == (np.int32, [1, 2])


def test_statistics_of_other_names(tmp_path):
    names = ("data", "scale", "shift", "average", "spread")
    nodes = [node("BatchNorm", "bn", *range(5), output_mean_var=True, fix_gamma=False)]
    path = symbol_of(tmp_path, *map(functools.partial(node, "null"), names), *nodes, heads=[[5, 0, 0], [5, 2, 0]])
    params, state = {"scale": np.full(3, 2.0), "shift": np.ones(3)}, {"average": np.ones(3), "spread": np.full(3, 4.0)}
    text = mxnet.port(path, shapes={"data": (6, 3)})
    check(path, text, params, state, {"data": np.float32(np.random.RandomState(0).randn(6, 3))}, jit=lambda fn: fn)
    (tmp_path / "w.params").write_bytes(checkpoint._mxnet_bytes(params | state))
    assert [{*part} for part in run(text)["load"](tmp_path / "w.params")] == [{*params}, {*state}]


OPERATORS = [name for name in CASES if " " in name and not name.startswith(("zoo", "lenet", "fact", "rnn"))]
OPERATORS = [name for name in OPERATORS if name not in MORE["cases"]]
ALONE = [name for name in MORE["cases"] if not name.endswith(" behind")]
PARTS = [part[i::4] for part in (OPERATORS, ALONE) for i in range(4)]


@pytest.mark.parametrize("names", mostly_slow(PARTS, most=5), ids=lambda names: names[0])
def test_every_operator(names, tmp_path):
    for name in names:
        symbol = write(tmp_path, name)
        model = mxnet.load_symbol(symbol)
        arrays, state, inputs = parts_of(name, model.inputs)
        model.save_params(tmp_path / "w.params", arrays, state)
        shapes = {n: a.shape for n, a in inputs.items()}
        text = mxnet.port(symbol, tmp_path / "w.params", shapes=shapes)
        taken = inspect.signature(run(text)["apply"]).parameters
        used = {n: a for n, a in inputs.items() if n in taken}  # labels are left out
        check(symbol, text, arrays, state, used, tmp_path / "w.params")


# In Flax


def grouped():
    """A grouped convolution, normalized, beside a factor of its own for each channel."""
    names = ("data", "c_weight", "c_bias", "n_gamma", "n_beta", "n_moving_mean", "n_moving_var", "own_scale")
    shape = {"own_scale": {"__shape__": "(1, 6, 1, 1)", "__init__": "One"}}
    return [
        *(node("null", name, **shape.get(name, {})) for name in names),
        node("Convolution", "c", 0, 1, 2, kernel=(3, 3), num_filter=6, num_group=2),
        node("BatchNorm", "n", 8, *range(3, 7), fix_gamma=False),
        node("broadcast_mul", "m", 9, 7),
        node("Pooling", "p", 10, pool_type="avg", global_pool=True, kernel=(1, 1)),
        node("Flatten", "f", 11),
    ]


# Two layers of the MLP share their arrays.
OWN = {"mlp": (mlp(("fc1", "fc1", "fc2", "out")), (5, 6)), "grouped": (grouped(), (4, 4, 5, 5))}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_network_of_flax_is_trained_as_its_symbol(name, tmp_path):
    path, shape = symbol_of(tmp_path, *OWN[name][0]), OWN[name][1]
    text = mxnet.port(path, shapes={"data": shape}, nnx=True)
    assert max(map(len, text.splitlines())) <= 100
    module = run(text)
    params, state = module["init"](jax.random.key(0))
    inputs = {"data": np.float32(np.random.RandomState(0).standard_normal(shape))}
    if name == "grouped":  # the functions of the MLP are checked above
        check(path, text, params, state, inputs)
    network = module["Network"](params, state)
    network.eval()
    np.testing.assert_array_equal(network(inputs["data"]), module["apply"](params, inputs["data"], state=state))
    graphdef, *variables = nnx.split(network, nnx.Param, ...)

    def of_plain(params, state, images, rng):
        return module["apply"](params, images, state=state, train=True, rng=rng)

    def of_flax(params, state, images, rng):
        network = nnx.merge(graphdef, params, state, copy=True)
        network.train()
        return network(images, rngs=rng), nnx.split(network, nnx.Param, ...)[2]

    def trained(apply, params, state):
        def loss_fn(params, batch, rng, state):
            outputs, state = apply(params, state, batch["data"], rng)
            return (outputs * jnp.cos(jnp.arange(outputs.size)).reshape(outputs.shape)).sum(), {}, state

        state, step = start(params, mxnet.sgd(0.01), loss_fn, model_state=state, devices=jax.devices()[:1])
        state, _ = step(state, inputs)
        return state.params, state.model_state

    expected = trained(of_plain, params, state)
    found = module["arrays_of"](nnx.merge(graphdef, *trained(of_flax, *variables)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert any(np.any(a != params[n]) for n, a in found[0].items())


# The command


@pytest.mark.slow
def test_the_command_and_the_test_that_it_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    symbol, file, *_ = files_of(tmp_path, "normalized 1")
    words = ["port", symbol.name, file.name, "-o", "small_net.py", "--shape", "data=4x3x9x9"]
    assert main([*words, "--test"]) == 0
    assert "small_net.py and test_small_net.py: written from case-symbol.json" in capsys.readouterr().out
    written = run((tmp_path / "test_small_net.py").read_text())
    test = written["test_the_module_gives_what_the_symbol_gives"]
    test(False)
    test(True)
    changed = (tmp_path / "small_net.py").read_text().replace("jax.nn.relu", "jnp.tanh")
    monkeypatch.setitem(written, "small_net", type("Module", (), run(changed)))
    with pytest.raises(AssertionError, match="Not equal"):
        test(False)
    assert main(words) == 1
    assert capsys.readouterr().err == "jaxpar port: small_net.py exists; choose another name, or give --force\n"
    assert main([*words, "--force", "--nnx"]) == 0
    assert "class Network(nnx.Module):" in (tmp_path / "small_net.py").read_text()


def test_the_command_with_an_operator_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_ops.py").write_text("def twice(x, *, by: int = 2):\n    return x * by\n")
    symbol_of(tmp_path, node("null", "x"), node("Twice", "a", 0, by=3), name="odd")
    words = ["port", "odd-symbol.json", "-o", "odd_net.py", "--shape", "x=2x3", "--test"]
    assert main(words) == 2
    assert "--operator NAME=MODULE:FUNCTION" in capsys.readouterr().err
    assert main([*words, "--operator", "Twice=my_ops:twice"]) == 0
    assert "from my_ops import twice as mx_twice" in (tmp_path / "odd_net.py").read_text()
    check_with_ruff(tmp_path, "F", "E")  # which module is one's own is a matter of the folder
    run((tmp_path / "test_odd_net.py").read_text())["test_the_module_gives_what_the_symbol_gives"](False)
    for wrong, line in (
        ("Twice", "expected NAME=MODULE:FUNCTION"),
        ("Twice=my_ops:no", "'my_ops' has no attribute 'no'"),
    ):
        assert main([*words, "--operator", wrong]) == 2
        assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["no.json", "-o", "m.py"], 1, "no.json'"),
        (["case-symbol.json", "no.params", "-o", "m.py"], 1, "no.params'"),
        (["case-symbol.json", "-o", "m.txt"], 2, "expected the name of a module such as model.py, got m.txt"),
        (["case-symbol.json", "-o", "m.py", "--shape", "data:3"], 2, "expected NAME=SHAPE"),
        (["case-symbol.json", "-o", "m.py", "--shape", "dat=3"], 2, "no 'dat'"),
        (["case-symbol.json", "-o", "m.py", "--test"], 2, "--test needs the shapes"),
        (["odd-symbol.json", "-o", "m.py"], 2, "Odd in 'c'"),
        (["case-symbol.json", "-o", "no/m.py"], 1, "No such file or directory"),
    ],
)
def test_errors_are_one_line(words, status, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "dense")
    symbol_of(tmp_path, node("null", "x"), node("Odd", "c", 0), name="odd")
    assert main(["port", *words]) == status
    shown = capsys.readouterr()
    assert shown.err.startswith("jaxpar port: ")
    assert line in shown.err
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "m.py").exists()
