"""Networks in the layout NHWC give what they give in MXNet's layout, whatever operator comes after an image."""

import filecmp
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from symbols import CASES, apply, arrays_of, node, recorded, rule, symbol_of, write
from test_mxnet_networks import load, zoo
from test_mxnet_operators import OPERATORS

from jaxpar import mxnet


def last(array):
    return jnp.transpose(array, (0, 2, 3, 1)) if array.ndim == 4 else jnp.asarray(array)


@pytest.mark.parametrize("name", [*zoo(slow=("alexnet", "mobilenet_v2_0_5", "resnet18_v1", "squeezenet1_1"))])
def test_the_model_zoo_with_its_channels_last(name, tmp_path):
    plain, inputs = load(tmp_path, name)
    model = mxnet.load_checkpoint(tmp_path / "case", 7, layout="NHWC")
    images, there = last(inputs["data"]), recorded()[name]["eval0"]
    arrays = {"data": images} | model.params | model.state
    assert model.shapes(data=images.shape) == {n: a.shape for n, a in arrays.items()}
    found = jax.jit(model.apply)(model.params, images)
    np.testing.assert_allclose(found, there, rtol=1e-4, atol=1e-4 * np.abs(there).max())
    files = [tmp_path / "plain.params", tmp_path / "last.params"]
    for one, file in zip((plain, model), files, strict=True):
        one.save_params(file)
    assert filecmp.cmp(*files, shallow=False)  # bytes in the assertion would be told apart for minutes
    equations = jax.make_jaxpr(model.apply)(model.params, images).jaxpr.eqns
    turned = [e for e in equations if e.params.get("permutation") == (0, 3, 1, 2)]  # images into MXNet's layout
    assert len(turned) < 3


def check(symbol, arrays, state=()):
    """Outputs and gradients in both layouts. `arrays` are in MXNet's layout."""
    models = {layout: mxnet.load_symbol(symbol, layout=layout) for layout in (None, "NHWC")}
    arrays = {n: jnp.asarray(a) for n, a in arrays.items()}
    state = {n: arrays.pop(n) for n in state}

    def run(layout, arrays):
        model = models[layout]

        def turned(n, a):
            return last(a) if n in model.inputs else a.transpose(2, 3, 1, 0) if n in model._kernels else a

        return apply(model, {n: turned(n, a) if layout else a for n, a in arrays.items()}, state, rng=0)

    (expected, statistics), (found, own) = (jax.jit(run, static_argnums=0)(layout, arrays) for layout in models)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, last(b), rtol=1e-5, atol=1e-5)
    for n in state:
        np.testing.assert_allclose(own[n], statistics[n], rtol=1e-5, atol=1e-5)
    floats = {n: a for n, a in arrays.items() if not n.endswith("label")}
    heads = [rule(f"head{i}", out.shape, "n") for i, out in enumerate(expected)]

    def loss(layout, floats):
        outs, _ = run(layout, {**arrays, **floats})
        turn = last if layout else jnp.asarray
        return sum((out * turn(head)).sum() for out, head in zip(outs, heads, strict=True))

    there, here = (jax.jit(jax.grad(functools.partial(loss, layout)))(floats) for layout in models)
    for n in floats:
        np.testing.assert_allclose(here[n], there[n], rtol=1e-4, atol=1e-4, err_msg=n)


# What comes after a convolution whose output is (2, 4, 6, 6): operator, attributes, shapes of its other arrays.
AFTER = [
    ("BatchNorm", {"fix_gamma": False}, ["gamma", "beta", "moving_mean", "moving_var"]),
    ("BatchNorm", {"fix_gamma": False, "axis": -1}, [(6,), (6,), (6,), (6,)]),
    ("Pooling", {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 0), "pool_type": "avg"}, []),
    ("Pooling", {"kernel": (2, 2), "pool_type": "max", "pooling_convention": "full", "stride": (3, 3)}, []),
    ("Pooling", {"global_pool": True, "pool_type": "avg"}, []),
    ("Convolution", {"kernel": (3, 3), "num_filter": 4, "num_group": 2, "dilate": (2, 1)}, [(4, 2, 3, 3), (4,)]),
    ("Convolution", {"kernel": (3, 3), "num_filter": 5, "no_bias": True, "layout": "NHWC"}, [(5, 3, 3, 6)]),
    ("Deconvolution", {"kernel": (3, 3), "num_filter": 3, "stride": (2, 2)}, [(4, 3, 3, 3)]),
    ("FullyConnected", {"num_hidden": 3}, [(3, 144), (3,)]),
    ("FullyConnected", {"num_hidden": 3, "flatten": False}, [(3, 6), (3,)]),
    ("Flatten", {}, []),
    ("Reshape", {"shape": (0, -3, 0)}, []),
    ("Reshape", {"shape": (0, 2, 2, -1)}, []),
    ("transpose", {"axes": (0, 2, 1, 3)}, []),
    ("SwapAxis", {"dim1": 1, "dim2": 2}, []),
    *[("Concat", {"dim": dim}, [(2, 4, 6, 6)]) for dim in (0, 1, 2, 3, -1)],
    ("SliceChannel", {"num_outputs": 2}, []),
    ("SliceChannel", {"num_outputs": 3, "axis": 2}, []),
    ("SliceChannel", {"num_outputs": 6, "axis": -1, "squeeze_axis": True}, []),
    ("slice_axis", {"axis": 1, "begin": 1, "end": 3}, []),
    ("slice_axis", {"axis": -1, "begin": 0, "end": 4}, []),
    ("slice", {"begin": (0, 1), "end": (2, 3)}, []),
    *[(op, {"axis": axis}, []) for op in ("softmax", "log_softmax") for axis in (1, 2, -1)],
    ("SoftmaxActivation", {"mode": "channel"}, []),
    ("SoftmaxOutput", {"multi_output": True}, ["label"]),
    *[("broadcast_mul", {}, [s]) for s in ((2, 4, 6, 6), (1, 4, 1, 1), (1, 1, 6, 1))],
    ("elemwise_add", {}, [(2, 4, 6, 6)]),
    ("add_n", {}, [(2, 4, 6, 6), (2, 4, 6, 6)]),
    ("_plus_scalar", {"scalar": 2}, []),
    ("Activation", {"act_type": "tanh"}, []),
    ("LeakyReLU", {"act_type": "elu"}, []),
    ("LeakyReLU", {"act_type": "prelu"}, [(4,)]),
    ("LeakyReLU", {"act_type": "rrelu"}, []),
    ("Dropout", {"p": 0.5}, []),
    ("LRN", {"nsize": 3}, []),
    ("L2Normalization", {"mode": "channel"}, []),
    ("InstanceNorm", {}, [(4,), (4,)]),
    ("LayerNorm", {"axis": 1}, [(4,), (4,)]),
    ("GroupNorm", {"num_groups": 2}, [(2,), (2,)]),
    ("mean", {"axis": (2, 3)}, []),
    ("max", {"axis": 1, "keepdims": True}, []),
    ("Pad", {"mode": "edge", "pad_width": (0, 0, 0, 0, 1, 2, 0, 1)}, []),
    ("UpSampling", {"scale": 2, "sample_type": "nearest"}, []),
    ("Crop", {"h_w": (3, 2), "offset": (1, 2)}, []),
    ("where", {}, [(2, 4, 6, 6), (2, 4, 6, 6)]),
    ("reshape_like", {}, [(4, 2, 6, 6)]),
]


QUICK_ONES = ("BatchNorm", "FullyConnected", "Flatten", "SoftmaxOutput", "broadcast_mul")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "attrs", "more"),
    [pytest.param(*row, marks=() if row[0] in QUICK_ONES else pytest.mark.slow) for row in AFTER],
    ids=[f"{op} {attrs} {more}" for op, attrs, more in AFTER],
)
def test_each_operator_after_a_convolution(op, attrs, more, tmp_path):
    shapes = {"x": (2, 3, 6, 6), "c_weight": (4, 3, 3, 3)}
    slots = {"BatchNorm": ["gamma", "beta", "moving_mean", "moving_var"], "SoftmaxOutput": ["label"]}.get(op)
    slots = slots or (["gamma"] if op == "LeakyReLU" else ["weight", "bias"] if "num" in "".join(attrs) else None)
    names = [f"o_{slot}" for slot in (slots or [f"in{i}" for i in range(len(more))])[: len(more)]]
    for name, shape in zip(names, more, strict=True):
        shapes[name] = {"label": (2, 6, 6)}.get(shape, (4,)) if isinstance(shape, str) else shape
    variables = [node("null", n) for n in ("x", "c_weight", *names)]
    conv = node("Convolution", "c", 0, 1, kernel=(3, 3), pad=(1, 1), num_filter=4, no_bias=True)
    inputs = [len(variables), *range(2, len(variables))]
    nodes = [*variables, conv, node(op, "o", *inputs, **attrs)]
    outputs = attrs.get("num_outputs", 1)
    heads = [[len(nodes) - 1, i] for i in range(outputs)] + [[len(nodes) - 2, 0]]
    kinds = {"o_moving_var": "u", "o_label": "i4"}
    arrays = {n: rule(n, shape, kinds.get(n, "n")) for n, shape in shapes.items()}
    check(symbol_of(tmp_path, *nodes, heads=heads, version=0), arrays, [n for n in names if "moving" in n])


def test_a_network_with_its_channels_last(tmp_path):
    """One network in both layouts: each operator's axis is another one there, and shapes are those of the layout."""
    # Its images are (2, 3, 6, 6), and its layers have heights and widths of their own: a wrong axis has another length.
    variables = ("x", "c_weight", "c_bias", "b_gamma", "b_beta", "b_moving_mean", "b_moving_var")
    nodes = [
        *(node("null", name) for name in variables),
        node("Convolution", "c", 0, 1, 2, kernel=(3, 2), num_filter=4, pad=(1, 0)),  # (2, 4, 6, 5)
        node("BatchNorm", "b", 7, 3, 4, 5, 6, fix_gamma=False),
        node("Pooling", "p", 8, kernel=(3, 2), stride=(1, 2), pool_type="avg"),  # (2, 4, 4, 2)
        node("Concat", "wide", 9, 9, dim=3),
        node("Concat", "high", 10, 10, dim=2),  # (2, 4, 8, 4)
        node("SliceChannel", "parts", 11, num_outputs=4, axis=2),
        node("SliceChannel", "squeezed", 11, num_outputs=8, axis=2, squeeze_axis=True),
        node("softmax", "out", (12, 3), axis=1),
    ]
    heads = [[8, 0], [11, 0], [13, 1], [14, 0]]
    path = symbol_of(tmp_path, *nodes, heads=heads, version=0)
    plain, model = mxnet.load_symbol(path), mxnet.load_symbol(path, layout="NHWC")
    shapes = plain.shapes(x=(2, 3, 6, 6))
    assert shapes["c_weight"] == (4, 3, 3, 2)
    assert model.shapes(x=(2, 6, 6, 3)) == shapes | {"x": (2, 6, 6, 3), "c_weight": (3, 2, 3, 4)}
    arrays = {n: jnp.asarray(rule(n, shape, "u" if "var" in n else "n")) for n, shape in shapes.items()}
    state = {n: arrays.pop(n) for n in variables[5:]}
    turned = arrays | {"x": last(arrays["x"]), "c_weight": arrays["c_weight"].transpose(2, 3, 1, 0)}
    (expected, _), (found, _) = jax.jit(lambda a, b: (apply(plain, a, state, False), apply(model, b, state, False)))(
        arrays, turned
    )
    assert [out.shape for out in expected] == [(2, 4, 6, 5), (2, 4, 8, 4), (2, 4, 4), (2, 4, 2, 4)]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, last(b), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OPERATORS if any(len(s) == 4 for s, _ in CASES[n]["arrays"].values())])
def test_the_operators_of_images(name, tmp_path):
    check(write(tmp_path, name), arrays_of(name), CASES[name]["aux"])
