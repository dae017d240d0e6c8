"""What MXNet 1.9.1 gave for operators and networks, and symbols by hand.

tools/record_mxnet_symbols.py recorded the networks and the first operators, tools/record_mxnet_operators.py the others.
"""

import functools
import gzip
import json
import sys
from pathlib import Path

import numpy as np

from jaxpar import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from mxnet_rule import rule as rule

REFERENCE = Path(__file__).parents[1] / "reference"
CASES = json.loads(gzip.decompress((REFERENCE / "mxnet_symbols.json.gz").read_bytes()))["cases"]
MORE = json.loads(gzip.decompress((REFERENCE / "mxnet_operators.json.gz").read_bytes()))
CASES |= MORE["cases"]


@functools.cache
def recorded():
    """{case: {what: array}}"""
    found = {}
    with np.load(REFERENCE / "mxnet_symbols.npz", allow_pickle=False) as arrays:
        for key in arrays.files:
            name, _, what = key.partition("/")
            found.setdefault(name, {})[what] = arrays[key]
    with np.load(REFERENCE / "mxnet_operators.npz", allow_pickle=False) as numbers:
        left = dict(numbers)
    for key, shape, dtype in MORE["places"]:
        name, _, what = key.partition("/")
        size = int(np.prod(shape))
        found.setdefault(name, {})[what] = left[dtype][:size].reshape(shape)
        left[dtype] = left[dtype][size:]
    return found


def arrays_of(name, cases=CASES):
    return {n: rule(f"{name}/{n}", tuple(shape), kind) for n, (shape, kind) in cases[name]["arrays"].items()}


def parts_of(name, inputs=None):
    """The arrays of a case: params, state and inputs."""
    params = arrays_of(name)
    state = {n: params.pop(n) for n in CASES[name]["aux"]}
    return params, state, {n: params.pop(n) for n in (CASES[name]["inputs"] if inputs is None else inputs)}


def write(folder, name, cases=CASES):
    """The symbol file of a case."""
    path = folder / "case-symbol.json"
    path.write_text(cases[name]["symbol"])
    return path


def save(folder, name):
    """The symbol file and the params file of a case, as of epoch 7."""
    symbol, file, (params, state, _) = write(folder, name), folder / "case-0007.params", parts_of(name)
    # Those of recurrent layers of gluon are inputs of a network without its params.
    named = {f"{kind}:{n}": a for kind, some in (("arg", params), ("aux", state)) for n, a in some.items()}
    file.write_bytes(checkpoint._mxnet_bytes(named))
    return symbol, file


def apply(model, arrays, state, train=True, rng=None):
    """The outputs of a model, as a tuple, and its new state. Some of the arrays are inputs, the others params."""
    inputs = {n: a for n, a in arrays.items() if n in model.inputs}
    params = {n: a for n, a in arrays.items() if n not in inputs}
    found = model.apply(params, inputs, state=state, train=train, rng=rng)
    outs, fresh = found if train else (found, state)
    return outs if isinstance(outs, tuple) else (outs,), fresh


def node(op, name, *inputs, key="attrs", **attrs):
    """A node of a symbol. An input is the number of a node, or a tuple of that and the number of its output."""
    places = [[i, 0] if isinstance(i, int) else list(i) for i in inputs]
    return {"op": op, "name": name, "inputs": places, key: {k: str(v) for k, v in attrs.items()}}


def symbol_of(folder, *nodes, heads=None, version=10901, name="own"):
    """The file of a symbol of these nodes, of which the last is the output if `heads` names no others."""
    path = folder / f"{name}-symbol.json"
    heads = [[len(nodes) - 1, 0, 0]] if heads is None else heads
    attrs = {"mxnet_version": ["int", version]} if version else {}
    path.write_text(json.dumps({"nodes": nodes, "heads": heads, "attrs": attrs}))
    return path


class Symbol:
    """Nodes of a symbol, added one by one."""

    def __init__(self):
        self.nodes = []
        self.numbers = {}

    def var(self, name, **attrs):
        """The number of a variable."""
        if name not in self.numbers:
            self.numbers[name] = self.add("null", name, **attrs)
        return self.numbers[name]

    def add(self, op, name, *inputs, **attrs):
        """The number of a node. An input that is a text is a variable."""
        places = [self.var(i) if isinstance(i, str) else i for i in inputs]
        self.nodes.append(node(op, name, *places, **attrs))
        return len(self.nodes) - 1


def language_model(steps, layers=2, hidden=8, words=11):
    """MXNet's unrolled LSTM of words: the label is transposed and reshaped before it goes into the loss layer."""
    net = Symbol()
    embedded = net.add("Embedding", "embed", "data", "embed_weight", input_dim=words, output_dim=hidden)
    split = net.add("SliceChannel", "steps", embedded, num_outputs=steps, axis=1, squeeze_axis=1)
    state = {}
    for layer in range(layers):
        for kind in "hc":
            name = f"l{layer}_begin_{kind}"
            state[layer, kind] = net.add("_zeros", name, shape=(0, hidden))
    outputs = []
    for step in range(steps):
        at = (split, step)
        for layer in range(layers):
            own = f"l{layer}_t{step}"
            parts = []
            for word, value in (("i2h", at), ("h2h", state[layer, "h"])):
                arrays = [f"l{layer}_{word}_weight", f"l{layer}_{word}_bias"]
                parts.append(net.add("FullyConnected", f"{own}_{word}", value, *arrays, num_hidden=4 * hidden))
            gates = net.add("elemwise_add", f"{own}_gates", *parts)
            cut = net.add("SliceChannel", f"{own}_slice", gates, num_outputs=4)
            into, forget, out = (net.add("Activation", f"{own}_{n}", (cut, n), act_type="sigmoid") for n in (0, 1, 3))
            new = net.add("Activation", f"{own}_new", (cut, 2), act_type="tanh")
            kept = net.add("elemwise_mul", f"{own}_kept", forget, state[layer, "c"])
            added = net.add("elemwise_mul", f"{own}_added", into, new)
            state[layer, "c"] = net.add("elemwise_add", f"{own}_c", kept, added)
            shown = net.add("Activation", f"{own}_tanh", state[layer, "c"], act_type="tanh")
            at = state[layer, "h"] = net.add("elemwise_mul", f"{own}_h", out, shown)
        outputs.append(at)
    joined = net.add("Concat", "hidden", *outputs, dim=0)
    scores = net.add("FullyConnected", "pred", joined, "pred_weight", "pred_bias", num_hidden=words)
    turned = net.add("transpose", "turned", "softmax_label")
    label = net.add("Reshape", "label", turned, shape=(-1,))
    net.add("SoftmaxOutput", "softmax", scores, label)
    return net.nodes


def transformer(layers, units=8, heads=2):
    """Layers of attention, each of which reads the mask too."""
    net = Symbol()
    at = net.add("Embedding", "embed", "data", "embed_weight", input_dim=11, output_dim=units)
    mask = net.add("expand_dims", "mask_of_heads", "mask", axis=1)
    for layer in range(layers):

        def dense(value, name, size=units, own=f"layer{layer}"):
            arrays = [f"{own}_{name}_{end}" for end in ("weight", "bias")]
            return net.add("FullyConnected", f"{own}_{name}", value, *arrays, num_hidden=size, flatten=False)

        def to_heads(value, name, own=f"layer{layer}"):
            split = net.add("Reshape", f"{own}_{name}_split", dense(value, name), shape=(0, 0, heads, -1))
            return net.add("transpose", f"{own}_{name}_heads", split, axes=(0, 2, 1, 3))

        def normalized(value, name, own=f"layer{layer}"):
            arrays = [f"{own}_{name}_{end}" for end in ("gamma", "beta")]
            return net.add("LayerNorm", f"{own}_{name}", value, *arrays)

        own = f"layer{layer}"
        query, key, value = (to_heads(at, name) for name in ("query", "key", "value"))
        scaled = net.add("_mul_scalar", f"{own}_scaled", query, scalar=(units // heads) ** -0.5)
        scores = net.add("linalg_gemm2", f"{own}_scores", scaled, key, transpose_b=True)
        masked = net.add("broadcast_add", f"{own}_masked", scores, mask)
        weights = net.add("Dropout", f"{own}_drop", net.add("softmax", f"{own}_softmax", masked), p=0.1)
        context = net.add(
            "transpose", f"{own}_back", net.add("linalg_gemm2", f"{own}_context", weights, value), axes=(0, 2, 1, 3)
        )
        joined = net.add("Reshape", f"{own}_joined", context, shape=(0, 0, -1))
        at = normalized(net.add("elemwise_add", f"{own}_sum", dense(joined, "out"), at), "norm1")
        inner = net.add("LeakyReLU", f"{own}_gelu", dense(at, "ffn1", 4 * units), act_type="gelu")
        at = normalized(net.add("elemwise_add", f"{own}_sum2", dense(inner, "ffn2"), at), "norm2")
    return net.nodes
