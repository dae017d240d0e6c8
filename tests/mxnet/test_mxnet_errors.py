"""What `mxnet` refuses: the call, the exception, and the names and values that its message must have, in this order.

What people do by mistake is in tests/house/test_mistakes.py, with what to do. Names and arguments of MXNet that are
elsewhere here are in test_mxnet_room.py. Damaged files are in the tests of their form, the command in those of `port`.
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import write as write_records
from symbols import Symbol, apply, arrays_of, node, save, symbol_of, write

from jaxpar import checkpoint, mxnet

IMAGES = np.ones((8, 3, 9, 9), np.float32)
DATA = np.ones((6, 4), np.float32)
DENSE = {"fc_weight": np.ones((3, 4), np.float32), "fc_bias": np.zeros(3, np.float32)}


def dense(folder, label=None, **attrs):
    """A dense layer and a softmax by a label that `label` adds to the net, or the layer alone."""
    net = Symbol()
    net.add("FullyConnected", "fc", "data", "fc_weight", "fc_bias", **{"num_hidden": 3, **attrs})
    if label is not None:
        net.add("SoftmaxOutput", "out", len(net.nodes) - 1, label(net))
    return symbol_of(folder, *net.nodes)


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    """Files, and the models and records in them."""
    folder, records = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("records")
    write_records(records)
    (folder / "other.params").write_bytes(checkpoint._mxnet_bytes({"arg:other": np.ones(2, np.float32)}))
    recurrent = mxnet.load_symbol(write(folder, "rnn lstm 1"))
    save(folder, "normalized 1")
    shown = Symbol()
    scores = shown.add("FullyConnected", "fc", "data", "fc_weight", "fc_bias", num_hidden=3)
    shown.add("MakeLoss", "loss", shown.add("elemwise_sub", "gap", scores, "label"))
    return types.SimpleNamespace(
        folder=folder,
        model=mxnet.load_checkpoint(folder / "case", 7),
        recurrent=recurrent,
        both=mxnet.load_symbol(dense(folder, lambda net: net.add("elemwise_mul", "l", "label", "mask"))),
        labels_shown=mxnet.load_symbol(symbol_of(folder, *shown.nodes)),
        dropout=mxnet.load_symbol(symbol_of(folder, node("null", "x"), node("Dropout", "d", 0))),
        no_output=mxnet.load_symbol(symbol_of(folder, node("null", "x"), node("relu", "y", 0), heads=[[1, 10**9]])),
        factor=mxnet.load_symbol(symbol_of(folder, node("null", "w", __lr_mult__="much", __init__="zeros"))),
        compared=mxnet.load_symbol(records / "net-symbol.json", records / "net.params"),
        arrays=mxnet.load_params(records / "net-outputs.params"),
        records=mxnet.RecordFile(records / "parts.rec"),
        source=functools.partial(mxnet.image_record_source, records / "lossless.rec"),
    )


def unknown(folder):
    nodes = [node("null", "x"), node("Twice", "a", 0, by=3), node("Twice", "b", 1), node("Odd", "c", 2)]
    return symbol_of(folder, *nodes, name="unknown")


def of_images(**options):
    return lambda on: on.source(**{"batch_size": 4, "data_shape": (3, 21, 22), **options})


def of_layer(**attrs):
    return lambda on: mxnet.load_symbol(dense(on.folder, **attrs))


def branching(count):
    return 0.1 if count < 3 else 0.01


def rate(count):
    return 0.5


def jitted(updater):
    value = jnp.ones(2)
    return jax.jit(updater.update, static_argnums=0)(0, value, updater.init(0, value), value)


def state_of_one(on):
    """MXNet: "Shape inconsistent, Provided = [1,1,4], inferred shape=(1,2,4)"."""
    arrays = arrays_of("rnn lstm 1")
    return apply(on.recurrent, {**arrays, "s": arrays["s"][:, :1]}, {}, train=False)


T, V, DAMAGED = TypeError, ValueError, checkpoint.CheckpointError
REFUSED = {
    # Models.
    "params without one": (V, lambda on: on.model.apply({}, IMAGES), ["params", "'conv_weight'"]),
    "params with another": (V, lambda on: on.model.apply({**on.model.params, "fc": 1.0}, IMAGES), ["params", "'fc'"]),
    "no input": (V, lambda on: on.model.apply(on.model.params), ["'data'"]),
    "an input of another name": (
        V,
        lambda on: on.model.apply(on.model.params, {"dat": IMAGES}),
        ["'dat'", "['data', 'softmax_label']"],
    ),
    "too many inputs": (
        V,
        lambda on: on.model.apply(on.model.params, IMAGES, 1, 2),
        ["3 inputs", "['data', 'softmax_label']"],
    ),
    "a state without one": (
        V,
        lambda on: on.model.apply(on.model.params, IMAGES, state={}),
        ["state", "'bn_moving_mean'"],
    ),
    "a state of another batch": (V, state_of_one, ["(1, 2, 4)", "(1, 1, 4)"]),
    "shapes of another name": (V, lambda on: on.model.shapes(dat=(1, 3, 9, 9)), ["'dat'"]),
    "no shapes": (V, lambda on: on.model.shapes(), ["'data'"]),
    "half of a label": (
        V,
        lambda on: on.both.apply(DENSE, {"data": DATA, "label": np.ones(6)}),
        ["SoftmaxOutput 'out'", "'label', 'mask'", "'mask'"],
    ),
    "the other half": (
        V,
        lambda on: on.both.apply(DENSE, {"data": DATA, "mask": np.ones(6)}),
        ["SoftmaxOutput 'out'", "'label', 'mask'", "'label'"],
    ),
    "no label, which the output is made of": (V, lambda on: on.labels_shown.apply(DENSE, DATA), ["'label'"]),
    "no shape of such a label": (V, lambda on: on.labels_shown.shapes(data=(6, 4)), ["'label'"]),
    "dropout without a key": (V, lambda on: on.dropout.apply({}, jnp.ones(2), train=True), ["Dropout", "rng", "None"]),
    "random numbers without a key": (T, lambda on: mxnet.operator("_random_uniform")(shape=(2,), rng=None), ["rng"]),
    "an output that a node lacks": (
        DAMAGED,
        lambda on: on.no_output.apply({}, jnp.ones(2)),
        ["relu 'y'", "1000000000"],
    ),
    "a factor that is no number": (V, lambda on: on.factor.lr_mult, ["lr_mult", "'w'", "float", "'much'"]),
    # Files of models.
    "another layout": (
        V,
        lambda on: mxnet.load_symbol(dense(on.folder), layout="NCWH"),
        ["layout", "'NCWH'", "NHWC"],
    ),
    "params of another network": (
        DAMAGED,
        lambda on: mxnet.load_symbol(dense(on.folder), on.folder / "other.params"),
        ["'fc_weight', 'fc_bias'"],
    ),
    "an epoch that was not saved": (
        FileNotFoundError,
        lambda on: mxnet.load_checkpoint(on.folder / "case", 8),
        ["0008"],
    ),
    "a text for an epoch": (T, lambda on: mxnet.load_checkpoint(on.folder / "case", "3"), ["epoch", "'3'"]),
    "complex numbers for MXNet": (
        V,
        lambda on: on.model.save_params(on.folder / "x", {**on.model.params, "fc_bias": np.ones(5, np.complex64)}),
        ["complex64"],
    ),
    "operators that are unknown": (
        V,
        lambda on: mxnet.load_symbol(unknown(on.folder)),
        ["Twice in 'a', 'b'", "Odd in 'c'", "operators="],
    ),
    "the same in a module": (
        V,
        lambda on: mxnet.port(unknown(on.folder)),
        ["Twice in 'a', 'b'", "operators=", "--operator NAME"],
    ),
    "a word for a size": (V, of_layer(num_hidden="two"), ["num_hidden", "int", "'two'"]),
    "a size of 30 digits": (V, of_layer(num_hidden="9" * 30), ["num_hidden", "int"]),
    "a word for a bool": (V, of_layer(flatten="maybe"), ["flatten", "bool", "'maybe'"]),
    "an unknown attribute": (V, of_layer(no_such="1"), ["no_such='1'"]),
    # Outputs of MXNet that a model is compared with.
    "outputs without the input": (
        V,
        lambda on: on.compared.compare({"conv_output": on.arrays["conv_output"]}),
        ["'data'"],
    ),
    "outputs of another network": (
        V,
        lambda on: on.compared.compare({"data": on.arrays["data"], "x_output": np.zeros(3)}),
        ["['data', 'x_output']"],
    ),
    "a comparison without params": (V, lambda on: on.compared.compare(on.arrays, {}), ["params", "'conv_weight'"]),
    "no file of outputs": (FileNotFoundError, lambda on: on.compared.compare("none.params"), ["none.params"]),
    # Records.
    "record 7 of 7": (IndexError, lambda on: on.records[7], ["7", "size 7"]),
    "record -8 of 7": (IndexError, lambda on: on.records[-8], ["-8", "size 7"]),
    "no file of records": (FileNotFoundError, lambda on: mxnet.RecordFile("none.rec"), ["none.rec"]),
    "a number for a path": (T, lambda on: mxnet.RecordFile(3), ["rec", "3"]),
    "images of four colours": (
        V,
        of_images(data_shape=(4, 8, 8)),
        ["data_shape", "(1 or 3, height, width)", "(4, 8, 8)"],
    ),
    "images of two axes": (V, of_images(data_shape=(3, 8)), ["data_shape", "(3, 8)"]),
    "images of no height": (V, of_images(data_shape=(3, 0, 8)), ["data_shape", "0"]),
    "a size of 0": (V, of_images(resize=0), ["resize", "0"]),
    "the layout of images": (V, of_images(layout="NHCW"), ["layout", "'NHCW'"]),
    "a batch of nothing": (V, of_images(batch_size=0), ["batch_size", "0"]),
    "labels of no width": (V, of_images(label_width=0), ["label_width", "0"]),
    "a grey of 256": (V, of_images(fill_value=256), ["fill_value", "256"]),
    "a negative border": (V, of_images(pad=-1), ["pad", "-1"]),
    "a deviation of 0": (V, of_images(std_g=0), ["std", "0"]),
    "a mean that is no number": (V, of_images(mean_b=float("nan")), ["mean"]),
    "a word for bad records": (V, of_images(on_bad="ignore"), ["on_bad", "'ignore'"]),
    # Optimizers.
    "a text for a rate": (T, lambda on: mxnet.sgd("0.1"), ["mxnet_sgd", "learning_rate", "0.1"]),
    "a negative rate": (V, lambda on: mxnet.sgd(-0.1), ["learning_rate", "-0.1"]),
    "a schedule in the state": (T, lambda on: mxnet.sgd(rate, rate_in_state=True), ["learning_rate", "rate_in_state"]),
    "a schedule with an if": (T, lambda on: jitted(mxnet.sgd(branching)), ["mxnet_sgd", "branching", "jnp.where"]),
    "an argument of another one": (
        T,
        lambda on: mxnet.adam(momentum=0.9),
        ["mxnet_adam", "'momentum'", "learning_rate, b"],
    ),
    "lr": (T, lambda on: mxnet.sgd(lr=0.1), ["mxnet_sgd", "'lr'", "learning_rate=0.1"]),
    "eps": (T, lambda on: mxnet.adam(eps=1e-8), ["mxnet_adam", "'eps'", "epsilon=1e-08"]),
    "weight_decay": (T, lambda on: mxnet.sgd(weight_decay=0.1), ["'weight_decay'", "wd=0.1"]),
    "clip_gradients": (T, lambda on: mxnet.sgd(clip_gradients=1), ["'clip_gradients'", "clip_gradient=1"]),
    "nesterov": (T, lambda on: mxnet.sgd(nesterov=True), ["'nesterov'", "mxnet_nag"]),
    "lazy_update": (T, lambda on: mxnet.nag(lazy_update=False), ["'lazy_update'", "SGD", "Adam"]),
    "lr_scheduler": (T, lambda on: mxnet.sgd(lr_scheduler=rate), ["lr_scheduler=", "learning_rate=", "count + 1"]),
    "param_idx2name": (T, lambda on: mxnet.sgd(param_idx2name={0: "a_bias"}), ["wd_mult=", "mxnet_wd_mult(names)"]),
    "sym": (T, lambda on: mxnet.sgd(sym=object()), ["updaters.multipliers(names, patterns)"]),
    "two names of epsilon": (T, lambda on: mxnet.adagrad(epsilon=1e-3, eps=1e-4), ["mxnet_adagrad", "eps", "epsilon"]),
    "two names of gamma1": (T, lambda on: mxnet.rmsprop(gamma1=0.8, gamma=0.7), ["gamma", "gamma1"]),
    "factors by name": (T, lambda on: mxnet.sgd(0.1, lr_mult={"bias": 2.0}), ["'str'"]),
    "a pattern of no name": (V, lambda on: mxnet.multipliers({0: "a_bias"}, {"b*": 1.0}), ["'b*'", "a_bias"]),
    "params of whole numbers": (T, lambda on: mxnet.sgd(0.1).init(3, jnp.ones(2, int)), ["key 3", "int32"]),
    "a negative momentum": (V, lambda on: mxnet.sgd(0.1, momentum=-1), ["mxnet_sgd", "momentum", "-1"]),
    "a decay that is no number": (V, lambda on: mxnet.sgd(0.1, wd=float("nan")), ["wd", "nan"]),
    "a negative bound": (V, lambda on: mxnet.adam(0.1, clip_gradient=-1), ["mxnet_adam", "clip_gradient", "-1"]),
    "a bound of 0": (V, lambda on: mxnet.adagrad(clip_gradient=0), ["clip_gradient", "0"]),
    "beta1 of 1": (V, lambda on: mxnet.adam(beta1=1.0), ["beta1", "1.0"]),
    "beta2 of 1.1": (V, lambda on: mxnet.adam(beta2=1.1), ["beta2", "1.1"]),
    "a negative count": (V, lambda on: mxnet.adam(begin_num_update=-1), ["begin_num_update", "-1"]),
    "a negative bound of weights": (V, lambda on: mxnet.rmsprop(clip_weights=-1), ["clip_weights", "-1"]),
}  # fmt: skip


def says(content):
    return ".*".join(map(re.escape, content))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, on):
    error, call, content = REFUSED[case]
    with pytest.raises(error, match=f"(?s){says(content)}"):
        call(on)


Z = [0.0, -0.0, 1, -1]
IMAGE, KEY = jnp.ones((1, 1, 2, 2)), jax.random.key(0)
RANDOM = {"train": True, "rng": KEY}
# What MXNet 1.9.1 refuses too, but for `use_length`, `infer_range` and the lengths of an RNN, which has no effect on
# its CPU.
OPERATORS = [
    ("Activation", [Z], {"act_type": "gelu"}, ["act_type", "'gelu'", "softrelu"]),
    ("LeakyReLU", [Z], {"act_type": "swish", **RANDOM}, ["act_type", "'swish'"]),
    ("Pooling", [IMAGE], {"kernel": (2, 2), "pool_type": "median"}, ["pool_type", "'median'", "max, avg, sum, lp"]),
    ("Pooling", [IMAGE], {"kernel": (2, 2), "pool_type": "lp", "p_value": 4}, ["p_value", "1, 2 or 3", "4"]),
    ("Pooling", [IMAGE], {"kernel": (2, 2), "pooling_convention": "half"}, ["convention", "'half'", "valid, full"]),
    ("Pooling", [IMAGE], {"kernel": (2,)}, ["kernel", "2 numbers", "(2,)"]),
    ("Pooling", [IMAGE], {"kernel": (3, 3)}, ["3", "2"]),
    ("MakeLoss", [Z], {"normalization": "mean"}, ["normalization", "'mean'", "null, batch, valid"]),
    ("L2Normalization", [IMAGE], {"mode": "batch"}, ["mode", "'batch'", "instance, channel, spatial"]),
    ("SoftmaxActivation", [IMAGE], {"mode": "batch"}, ["mode", "'batch'", "instance, channel"]),
    ("Dropout", [Z], {"mode": "never", **RANDOM}, ["mode", "'never'", "training, always"]),
    ("Pad", [IMAGE], {"mode": "wrap", "pad_width": (0, 0, 0, 0, 1, 1, 1, 1)}, ["'wrap'", "constant, edge, reflect"]),
    ("UpSampling", [IMAGE], {"scale": 2, "sample_type": "cubic"}, ["sample_type", "'cubic'", "nearest, bilinear"]),
    ("take", [Z, [1.0]], {"mode": "nearest"}, ["mode", "'nearest'", "clip, wrap, raise"]),
    ("pick", [jnp.ones((2, 2)), [1.0, 1]], {"mode": "raise"}, ["mode", "'raise'", "clip, wrap"]),
    ("norm", [Z], {"ord": 3}, ["ord", "1 or 2", "3"]),
    ("topk", [Z], {"ret_typ": "values"}, ["ret_typ", "'values'", "value, indices, mask, both"]),
    ("CTCLoss", [jnp.ones((2, 1, 3)), [[1.0]]], {"blank_label": "0"}, ["blank_label", "'0'", "first, last"]),
    ("_contrib_box_iou", [jnp.ones((1, 4))] * 2, {"format": "xywh"}, ["format", "'xywh'", "corner, center"]),
    ("GridGenerator", [jnp.ones((1, 6))], {"transform_type": "flow"}, ["transform_type", "'flow'", "affine, warp"]),
    ("_contrib_BilinearResize2D", [IMAGE], {"mode": "even"}, ["mode", "'even'"]),
    ("_contrib_BilinearResize2D", [IMAGE], {"mode": "odd_scale", "scale_width": 1.0}, ["(2, 2)", "(0, 2)"]),
    ("_contrib_BilinearResize2D", [IMAGE], {"height": 10**9, "width": 1}, ["(2, 2)", "(1000000000, 1)"]),
    ("_contrib_AdaptiveAvgPooling2D", [IMAGE], {"output_size": (10**9,)}, ["(2, 2)", "(1000000000, 1000000000)"]),
    ("Correlation", [IMAGE] * 2, {"max_displacement": 10**6}, ["max_displacement", "1000000", "1"]),
    ("linalg_maketrian", [jnp.ones((1, 3))], {"offset": 10**9}, ["rows"]),
    ("_eye", [], {"N": 10**6}, ["1000000 rows", "1000000 columns"]),
    ("_linspace", [], {"start": 0.0, "stop": 1.0, "num": 10**9}, ["_linspace", "1,000,000,000"]),
    ("scatter_nd", [[1.0], [[0.0]]], {"shape": (10**9,)}, ["(1000000000,)"]),
    ("log_softmax", [jnp.ones((2, 3)), [2, 3]], {"axis": 1, "use_length": True}, ["use_length"]),
    ("_arange", [], {"start": 2.0, "stop": None, "infer_range": True}, ["infer_range=True"]),
    ("RNN", [jnp.ones((1, 1, 1)), jnp.ones(8), jnp.ones((1, 1, 1))],
     {"mode": "elman", "state_size": 1, "num_layers": 1, **RANDOM}, ["'elman'", "rnn_relu, rnn_tanh, lstm, gru"]),
    ("RNN", [jnp.ones((3, 2, 1)), jnp.ones(32), *[jnp.ones((1, 2, 2))] * 2],
     {"mode": "lstm", "state_size": 2, "num_layers": 1, "use_sequence_length": True, **RANDOM},
     ["use_sequence_length", "lengths"]),
    ("RNN", [jnp.ones((1, 1, 1)), jnp.ones(16), *[jnp.ones((1, 1, 1))] * 2],
     {"mode": "lstm", "state_size": 1, "num_layers": 1, "lstm_state_clip_min": -1.0, **RANDOM},
     ["lstm_state_clip_min"]),
    ("_npi_uniform", [], {"low": 0.0, "size": (2,), "rng": KEY}, ["['low', 'high']", "0 arrays for ['high']"]),
    ("_npi_normal_n", [Z], {"size": (2,), "rng": KEY}, ["1 arrays for ['loc', 'scale']"]),
    ("_npi_pareto", [Z, Z], {"size": (2,), "rng": KEY}, ["2 arrays for ['a']"]),
    ("_npi_bernoulli", [], {"is_logit": False, "size": (2,), "rng": KEY}, ["a number or an array", "prob"]),
    ("_npi_bernoulli", [], {"is_logit": True, "prob": 0.5, "size": (2,), "rng": KEY}, ["logit"]),
    ("RNN", [jnp.ones((1, 1, 1)), jnp.ones(8), jnp.ones((1, 1, 1))],
     {"mode": "gru", "state_size": 1, "num_layers": 1, "projection_size": 1, **RANDOM},
     ["projection_size", "lstm", "gru"]),
    ("_image_resize", [jnp.ones((2, 3, 1))], {"size": (4, 4), "interp": 3}, ["interp", "0 (nearest)", "3"]),
    ("_image_resize", [jnp.ones((2, 3, 1))], {}, ["size", "one or two", "()"]),
    ("_image_resize", [jnp.ones((2, 3, 1))], {"size": (10**9, 1)}, ["(2, 3)", "(1, 1000000000)"]),
    ("_np_sum", [Z], {"initial": 1.0}, ["initial"]),
    ("_npi_norm", [jnp.ones((2, 2, 2))], {"ord": 3.0}, ["one or two axes", "(0, 1, 2)"]),
    ("_npi_zeros", [], {"shape": (10**9,)}, ["(1000000000,)"]),
    ("_npi_pad", [Z], {"pad_width": "1", "mode": "wrap"}, ["mode", "'wrap'", "constant, edge"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arrays", "attrs", "content"), OPERATORS)
def test_what_operators_refuse(name, arrays, attrs, content):
    with pytest.raises(ValueError, match=says(content)):
        mxnet.operator(name)(*(a if a is None else jnp.asarray(a) for a in arrays), **attrs)
