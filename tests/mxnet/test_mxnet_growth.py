"""What files of MXNet cost grows with their size: counted in calls, at one size and at twice that size."""

import sys

import jax
import numpy as np
import pytest
from symbols import language_model, node, symbol_of, transformer

from jaxpar import mxnet

MOST = 2.5  # times the calls, for twice the nodes


def calls(run):
    """How many functions of Python and of C are called."""
    count = 0

    def event(frame, kind, _):
        nonlocal count
        count += kind in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def equal(count):
    """A chain of equal nodes."""
    return [node("null", "data"), *(node("Activation", f"r{i}", i, act_type="relu") for i in range(count))]


def mixed(count):
    """A chain of eight operators in a random order."""
    random = np.random.RandomState(0)
    nodes = [node("null", "data")]
    for i, kind in enumerate(random.randint(0, 8, count)):
        if kind < 3:
            nodes.append(node("Activation", f"a{i}", i, act_type=("relu", "tanh", "sigmoid")[kind]))
        elif kind < 5:
            nodes.append(node(("_plus_scalar", "_mul_scalar")[kind - 3], f"a{i}", i, scalar=0.5))
        elif kind < 7:
            nodes.append(node(("LRN", "negative")[kind - 5], f"a{i}", i, **({"nsize": 3} if kind == 5 else {})))
        else:
            nodes.append(node("elemwise_add", f"a{i}", i, i))
    return nodes


def dense(count):
    """Dense layers whose names, sizes and rates all differ: each is a line with its own values."""
    random = np.random.RandomState(0)
    nodes, at = [node("null", "data")], 0
    for i in range(count // 4):
        name = f"{'abcdefgh'[i % 8]}{random.randint(10**6)}x{i}"
        nodes += [node("null", f"{name}_weight"), node("null", f"{name}_bias")]
        size = {"num_hidden": random.randint(1, 99)}
        nodes.append(node("FullyConnected", name, at, len(nodes) - 2, len(nodes) - 1, **size))
        nodes.append(node("Dropout", f"{name}_drop", len(nodes) - 1, p=random.rand()))
        at = len(nodes) - 1
    return nodes


def twins(count):
    """Two halves of the same layers, without a place between them where a single value is alive."""
    nodes, at = [node("null", "data")], 0
    for i in range(count // 2):
        nodes.append(node("_mul_scalar", f"m{i}", at, scalar=0.5))
        nodes.append(node("elemwise_add", f"s{i}", len(nodes) - 1, max(len(nodes) - 5, 0)))
        at = len(nodes) - 1
    return nodes


def alive(count):
    """All values are in use until the end."""
    nodes = [node("null", "data"), *(node("_plus_scalar", f"p{i}", 0, scalar=i) for i in range(count))]
    return [*nodes, node("add_n", "sum", *range(1, count + 1), num_args=count)]


def inputs(count):
    """Inputs whose names are one in Python."""
    nodes = [node("null", "-" * (i % 7) + "a" + "-" * (i // 7)) for i in range(count // 2)]
    names = [node("null", "a" + "-b"[i % 2] + "." * 3 + "!?+"[i % 3] + chr(0x4E00 + i)) for i in range(count // 2)]
    return [*nodes, *names, node("add_n", "sum", *range(len(nodes) + len(names)))]


NETWORKS = {"equal": equal, "mixed": mixed, "dense": dense, "twins": twins, "alive": alive, "inputs": inputs}
NETWORKS["unrolled"] = lambda count: language_model(count // 20)
NETWORKS["transformer"] = lambda count: transformer(count // 40)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_port_and_load_symbol(name, tmp_path):
    found = []
    for count in (400, 400, 800):  # the first one imports what is needed
        path = symbol_of(tmp_path, *NETWORKS[name](count))
        shapes = {n: (4, 20 * count) for n in mxnet.load_symbol(path).inputs if n == "data"}
        shapes = {"data": (2, count // 20)} if name == "unrolled" else shapes
        shapes = {"data": (2, 5), "mask": (2, 5, 5)} if name == "transformer" else shapes
        found.append(
            (calls(lambda p=path: mxnet.load_symbol(p)), calls(lambda p=path, s=shapes: mxnet.port(p, shapes=s)))
        )
    (*_, (load, port), (load_twice, port_twice)) = found
    assert load_twice < MOST * load
    assert port_twice < MOST * port


def test_shapes_of_equal_nodes_are_found_once_in_one_trace(tmp_path, monkeypatch):
    evaluate, run, counts = jax.eval_shape, mxnet.Model._run, []
    for steps in (4, 8):
        found, traces = [], []
        monkeypatch.setattr(mxnet.Model, "_run", lambda *a, f=found, **k: f.append(a) or run(*a, **k))
        monkeypatch.setattr(jax, "eval_shape", lambda *a, traces=traces: traces.append(a) or evaluate(*a))
        model = mxnet.load_symbol(symbol_of(tmp_path, *language_model(steps)))
        shapes = model.shapes(data=(3, steps))
        assert shapes["l0_h2h_weight"] == (32, 8)
        assert len(traces) == 1
        counts.append(len(found))
    assert counts[0] == counts[1] < 30


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="its XLA takes the barriers away before it joins operations")
def test_the_program_of_a_network_grows_with_it(tmp_path):
    """XLA computed the sum of all layers before again in each layer: 7,705 lines for 200 operators, 31,818 for 400."""
    lines = []
    for count in (300, 600):
        model = mxnet.load_symbol(symbol_of(tmp_path, *transformer(count // 40)))
        shapes = model.shapes(data=(2, 5), mask=(2, 5, 5))
        arrays = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
        inputs = {name: arrays.pop(name) for name in model.inputs}
        lines.append(jax.jit(model.apply).lower(arrays, inputs).compile().as_text().count("\n"))
    assert lines[1] < MOST * lines[0]
