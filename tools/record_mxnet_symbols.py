"""What networks of MXNet 1.9.1 give, for tests/mxnet/test_mxnet_symbols.py and test_mxnet_networks.py.

It runs in an environment of its own, since MXNet's last release needs Python 3.8 and an old NumPy:

    python3.8 -m venv mxnet38
    mxnet38/bin/pip install -r benchmarks/requirements-mxnet.txt
    mxnet38/bin/python tools/record_mxnet_symbols.py tests/reference

Inputs and weights are not written: `rule` makes them of a name and a shape, there as here. The symbol files and the
shapes are in mxnet_symbols.json.gz. What MXNet gives is in mxnet_symbols.npz: for each operator and set of attributes
the outputs, the gradients and the running statistics; for the networks of Gluon's model zoo the logits; for some
networks five steps of SGD with momentum.
"""

import gzip
import json
import pathlib
import sys

import mxnet as mx
import numpy as np
from mxnet import gluon, sym
from mxnet.gluon.model_zoo import vision
from mxnet_rule import rule

FOLDER = pathlib.Path(sys.argv[1])
CASES, ARRAYS = {}, {}
v = sym.var


def kind_of(name, shape):
    """How the weights of a network are made."""
    if name.endswith(("gamma", "var")):
        return "u"
    if name.endswith("weight"):
        return f"w{(np.prod(shape[1:]) / 2) ** 0.5:.4f}"
    return "w10" if name.endswith(("bias", "beta", "mean")) else "n"


def bind(name, symbol, shapes, kinds, everything=False):
    """An executor whose arrays follow the rule, and what the test must know of them."""
    arguments, _, states = symbol.infer_shape(**shapes)
    known = dict(zip(symbol.list_arguments(), arguments))  # noqa: B905, Python 3.8
    aux = dict(zip(symbol.list_auxiliary_states(), states))  # noqa: B905
    of = {n: kinds.get(n) or (kind_of(n, s) if everything or n in aux else "n") for n, s in {**known, **aux}.items()}
    made = {n: mx.nd.array(rule(name + "/" + n, s, of[n])) for n, s in {**known, **aux}.items()}
    grad_req = {n: "null" if of[n][0] == "i" else "write" for n in known}
    executor = symbol.bind(
        mx.cpu(),
        {n: made[n] for n in known},
        {n: mx.nd.zeros(s) for n, s in known.items() if grad_req[n] == "write"},
        grad_req,
        {n: made[n] for n in aux},
    )
    CASES[name] = {
        "symbol": symbol.tojson(),
        "arrays": {n: [list(s), of[n]] for n, s in {**known, **aux}.items()},
        "aux": list(aux),
        "inputs": [n for n in symbol.list_inputs() if n in shapes],
    }
    return executor


def keep(name, **arrays):
    for key, value in arrays.items():
        ARRAYS[name + "/" + key] = value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value)


def case(name, symbol, random=False, eval_only=False, **given):
    """One operator: `given` has a shape, or (shape, kind), of each input."""
    shapes = {n: g[0] if g and isinstance(g[0], tuple) else g for n, g in given.items()}
    kinds = {n: g[1] for n, g in given.items() if g and isinstance(g[0], tuple)}
    try:
        executor = bind(name, symbol, shapes, kinds)
        for i, out in enumerate(executor.forward(is_train=False)):
            keep(name, **{f"eval{i}": out})
        if eval_only:
            return
        outs = executor.forward(is_train=True)
        heads = [mx.nd.array(rule(f"{name}/head{i}", o.shape, "n")) for i, o in enumerate(outs)]
        executor.backward(heads)
        for i, out in enumerate(outs):
            keep(name, **{f"out{i}": out})
        for n, grad in executor.grad_dict.items():
            if grad is not None:
                keep(name, **{"grad " + n: grad})
        for n, value in executor.aux_dict.items():
            keep(name, **{"aux " + n: value})
    except mx.base.MXNetError as error:
        CASES.pop(name, None)
        print("no", name, str(error).strip().splitlines()[-1][:200])


def layers():
    x = v("x")
    s4 = (2, 4, 7, 6)
    conv = {"kernel": (3, 3), "num_filter": 6, "name": "c"}
    for key, more in {
        "plain": {},
        "stride": {"stride": (2, 1), "pad": (1, 2)},
        "dilate": {"dilate": (2, 1), "pad": (2, 1)},
        "group": {"num_group": 2, "no_bias": True},
        "one": {"kernel": (1, 1), "stride": (2, 2)},
    }.items():
        case("conv " + key, sym.Convolution(x, **{**conv, **more}), x=s4)
    case("conv 1d", sym.Convolution(x, kernel=(3,), num_filter=5, stride=(2,), pad=(1,), name="c"), x=(2, 3, 9))
    case("conv 3d", sym.Convolution(x, kernel=(2, 3, 1), num_filter=3, pad=(1, 0, 0), name="c"), x=(1, 2, 4, 5, 3))
    for key, more in {
        "plain": {},
        "stride": {"stride": (2, 3), "pad": (1, 0), "adj": (1, 2), "no_bias": False},
        "target": {"stride": (2, 2), "target_shape": (15, 13)},
        "group": {"num_group": 2, "stride": (2, 2), "dilate": (1, 2)},
    }.items():
        case("deconv " + key, sym.Deconvolution(x, **{**conv, **more}), x=s4)
    case("dense", sym.FullyConnected(x, num_hidden=5, name="f"), x=(2, 3, 4))
    case("dense rows", sym.FullyConnected(x, num_hidden=5, flatten=False, no_bias=True, name="f"), x=(2, 3, 4))
    for key, more in {
        "default": {},
        "gamma": {"fix_gamma": False, "momentum": 0.7, "eps": 1e-5},
        "global": {"fix_gamma": False, "use_global_stats": True},
        "last": {"fix_gamma": False, "axis": -1},
    }.items():
        case("norm " + key, sym.BatchNorm(x, name="b", **more), x=(3, 4, 5, 2))
    case("norm two", sym.BatchNorm(x, name="b", fix_gamma=False), x=(8, 4))
    case("norm outputs", sym.BatchNorm(x, name="b", output_mean_var=True), eval_only=True, x=(3, 4, 5, 2))
    for kind in ("max", "avg", "sum", "lp"):
        for convention in ("valid", "full"):
            for count in (True, False):
                if kind != "avg" and not count:
                    continue
                for key, more in {"pad": {"pad": (1, 1)}, "stride": {"stride": (2, 3), "pad": (1, 0)}}.items():
                    more = {**more, **({"p_value": 2} if kind == "lp" else {})}
                    pool = sym.Pooling(
                        x, kernel=(3, 2), pool_type=kind, pooling_convention=convention, count_include_pad=count, **more
                    )
                    case(f"pool {kind} {convention} {count} {key}", pool, x=s4)
        lp = {"p_value": 2} if kind == "lp" else {}
        case("pool global " + kind, sym.Pooling(x, pool_type=kind, global_pool=True, kernel=(2, 2), **lp), x=s4)
    case("pool 1d", sym.Pooling(x, kernel=(3,), stride=(2,), pool_type="avg"), x=(2, 3, 9))
    case("pool 3d", sym.Pooling(x, kernel=(2, 2, 2), stride=(2, 2, 2), pool_type="max"), x=(1, 2, 4, 6, 4))
    for act in ("relu", "sigmoid", "tanh", "softrelu", "softsign"):
        case("act " + act, sym.Activation(x, act_type=act), x=(3, 5))
    for act in ("leaky", "elu", "selu", "gelu", "prelu"):
        case("leaky " + act, sym.LeakyReLU(x, act_type=act, name="l", slope=0.3), x=(3, 4, 2))
    case("leaky default", sym.LeakyReLU(x), x=(3, 4))
    case("leaky rrelu", sym.LeakyReLU(x, act_type="rrelu"), eval_only=True, x=(3, 4))
    case("dropout", sym.Dropout(x, p=0.4), eval_only=True, x=(3, 4))
    for mode in ("instance", "channel", "spatial"):
        case("l2 " + mode, sym.L2Normalization(x, mode=mode), x=(2, 3, 4, 2))
    case("lrn", sym.LRN(x, nsize=3), x=(2, 5, 3, 2))
    case("lrn options", sym.LRN(x, nsize=5, alpha=0.01, beta=0.5, knorm=1), x=(2, 6, 3, 2))
    case("layer norm", sym.LayerNorm(x, name="n"), x=(3, 2, 5))
    case("layer norm axis", sym.LayerNorm(x, axis=1, eps=1e-2, name="n"), x=(3, 4, 5))
    case("instance norm", sym.InstanceNorm(x, name="n"), x=(2, 3, 4, 2))
    case("group norm", sym.GroupNorm(x, num_groups=2, name="n"), x=(2, 4, 3, 2))
    case("up nearest", sym.UpSampling(x, scale=2, sample_type="nearest"), x=(1, 2, 3, 2))
    up = sym.UpSampling(x, v("w"), scale=2, sample_type="bilinear", num_filter=2, num_args=2)
    case("up bilinear", up, x=(1, 2, 3, 2), w=(2, 1, 4, 4))
    two = sym.UpSampling(x, v("y"), scale=2, sample_type="nearest", num_args=2)
    case("up two", two, x=(1, 2, 2, 3), y=(1, 3, 4, 6))


def losses():
    x, y = v("x"), v("y")
    for key, more in {
        "default": {},
        "scale": {"grad_scale": 0.3, "normalization": "batch"},
        "ignore": {"use_ignore": True, "ignore_label": 2, "normalization": "valid"},
        "valid": {"ignore_label": 1, "normalization": "valid"},
        "smooth": {"smooth_alpha": 0.1},
        "smooth ignore": {"smooth_alpha": 0.1, "use_ignore": True, "ignore_label": 0},
        "head": {"out_grad": True},
    }.items():
        case("softmax output " + key, sym.SoftmaxOutput(x, y, **more), x=(5, 4), y=((5,), "i4"))
        if "smooth" in key or "head" in key:
            continue
        case(
            "softmax output multi " + key,
            sym.SoftmaxOutput(x, y, multi_output=True, **more),
            x=(3, 4, 2),
            y=((3, 2), "i4"),
        )
        keep_shape = sym.SoftmaxOutput(x, y, preserve_shape=True, **more)
        case("softmax output shape " + key, keep_shape, x=(3, 2, 4), y=((3, 2), "i4"))
    case("softmax output soft", sym.SoftmaxOutput(x, y, grad_scale=2), x=(3, 4), y=((3, 4), "u"))
    for name in ("Linear", "Logistic", "MAE"):
        loss = getattr(sym, name + "RegressionOutput")
        case(name, loss(x, y), x=(3, 4), y=((3, 4), "n"))
        case(name + " scale", loss(x, y, grad_scale=0.5), x=(3, 2, 2), y=((3, 2, 2), "n"))
        case(name + " vector", loss(x, y), x=(3, 1), y=((3,), "n"))
    for key, more in {"default": {}, "batch": {"normalization": "batch"}, "valid": {"normalization": "valid"}}.items():
        case("MakeLoss " + key, sym.MakeLoss(x, grad_scale=0.5, **more), x=(3, 4))
    case("make_loss", sym.make_loss(x * 2), x=(3, 4))
    case("block", sym.BlockGrad(x) * x, x=(3, 4))
    case("cross entropy", sym.softmax_cross_entropy(x, y), x=(3, 4), y=((3,), "i4"))
    case("smooth l1", sym.smooth_l1(x, scalar=2.0), x=(3, 4))
    case("smooth l1 default", sym.smooth_l1(x), x=(3, 4))
    for key, more in {"default": {}, "axis": {"axis": 1}, "temperature": {"temperature": 2.0}}.items():
        for name in ("softmax", "log_softmax", "softmin"):
            case(f"{name} {key}", getattr(sym, name)(x, **more), x=(2, 3, 4))
    case("activation softmax rows", sym.SoftmaxActivation(x), x=(3, 4))
    case("activation softmax", sym.SoftmaxActivation(x), x=(2, 3, 2))
    case("activation softmax channel", sym.SoftmaxActivation(x, mode="channel"), x=(2, 3, 2))


def arithmetic():
    x, y = v("x"), v("y")
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "power", "hypot", "mod"):
        positive = "u" if name in ("power", "div", "mod") else "n"
        case(
            "broadcast " + name,
            getattr(sym, "broadcast_" + name)(x, y),
            x=((2, 3, 1), positive),
            y=((2, 1, 4), positive),
        )
    for name in (
        "equal",
        "not_equal",
        "greater",
        "greater_equal",
        "lesser",
        "lesser_equal",
        "logical_and",
        "logical_or",
    ):
        found = getattr(sym, "broadcast_" + name)(x, y)
        case("broadcast " + name, found, eval_only=True, x=((4, 3), "i2"), y=((4, 1), "i2"))
    for key, found in {
        "elemwise": x + y - x * y / (y + 3),
        "scalars": 2 - (x * 3 + 1) / 2 - 1 / (y + 3) + 2**x + (y + 3) ** 1.5,
        "compare": (x > 0) + (x < 1) * (y >= x) + (y != 0),
        "maximum": sym.maximum(x, 0.3) + sym.minimum(y, x),
        "add_n": sym.add_n(x, y, x),
    }.items():
        case("mixed " + key, found, x=((3, 4), "u"), y=((3, 4), "u"))
    for (
        name
    ) in "abs sign ceil floor trunc rint fix round square exp expm1 sin cos tan sinh cosh tanh arctan arcsinh".split():
        case("unary " + name, getattr(sym, name)(x), x=(3, 4))
    for name in "sqrt rsqrt cbrt rcbrt log log10 log2 log1p reciprocal gammaln".split():
        case("unary " + name, getattr(sym, name)(x), x=((3, 4), "u"))
    for name in "relu sigmoid softsign erf negative zeros_like ones_like identity hard_sigmoid".split():
        case("unary " + name, getattr(sym, name)(x), x=(3, 4))
    case("clip", sym.clip(x, a_min=-0.5, a_max=0.7), x=(3, 4))
    for name in ("sum", "mean", "max", "min", "prod", "nansum"):
        for key, more in {
            "all": {},
            "axis": {"axis": 1},
            "exclude": {"axis": (0, -1), "exclude": True, "keepdims": True},
        }.items():
            case(f"{name} {key}", getattr(sym, name)(x, **more), x=(2, 3, 4))
    case("max ties", sym.max(x, axis=1), x=((3, 6), "u"))
    for key, more in {"all": {}, "one": {"ord": 1, "axis": 1}, "keep": {"axis": (1, 2), "keepdims": True}}.items():
        case("norm of " + key, sym.norm(x, **more), x=(2, 3, 4))
    for key, more in {"axis": {"axis": 1}, "keep": {"axis": -1, "keepdims": True}, "all": {}}.items():
        case("argmax " + key, sym.argmax(x, **more), eval_only=True, x=(2, 3, 4))
        case("argmin " + key, sym.argmin(x, **more), eval_only=True, x=(2, 3, 4))
    case("dot", sym.dot(x, y), x=(3, 4), y=(4, 2))
    case("dot transposed", sym.dot(x, y, transpose_a=True, transpose_b=True), x=(4, 3), y=(2, 4))
    case("dot axes", sym.dot(x, y), x=(2, 3, 4), y=(4, 5))
    case("batch dot", sym.batch_dot(x, y), x=(2, 3, 4), y=(2, 4, 2))
    case("batch dot transposed", sym.batch_dot(x, y, transpose_a=True, transpose_b=True), x=(2, 4, 3), y=(2, 2, 4))


def shapes():
    x, y, i = v("x"), v("y"), v("i")
    for key, (old, new, reverse) in {
        "keep": ((2, 3, 4), (0, -1), False),
        "rest": ((2, 3, 4), (-2,), False),
        "rest one": ((2, 3, 4), (2, -2, 1, 1), False),
        "join": ((2, 3, 4, 5), (-3, -3), False),
        "join rest": ((2, 3, 4), (0, -3), False),
        "split": ((2, 3, 4), (-4, 1, 2, -2), False),
        "split rest": ((2, 3, 4), (2, -4, -1, 3, -2), False),
        "reverse": ((10, 5, 4), (-1, 0), True),
        "reverse split": ((6, 3, 4), (2, 3, -4, 0, 0), True),
    }.items():
        case("reshape " + key, sym.Reshape(x, shape=new, reverse=reverse), x=old)
    s = (2, 3, 4)
    for key, found in {
        "transpose": sym.transpose(x),
        "transpose axes": sym.transpose(x, axes=(1, 0, 2)),
        "swapaxes": sym.swapaxes(x, dim1=0, dim2=2),
        "flatten": sym.Flatten(x),
        "expand": sym.expand_dims(x, axis=1),
        "squeeze": sym.squeeze(sym.expand_dims(x, axis=2), axis=2),
        "squeeze all": sym.squeeze(sym.expand_dims(x, axis=0)),
        "stack": sym.stack(x, x * 2, axis=1),
        "tile": sym.tile(x, reps=(2, 1, 2)),
        "tile more": sym.tile(x, reps=(2, 2, 1, 1)),
        "repeat": sym.repeat(x, repeats=2, axis=1),
        "repeat all": sym.repeat(x, repeats=3),
        "reverse": sym.reverse(x, axis=1),
        "slice": sym.slice(x, begin=(0, None, 1), end=(None, 2, 3)),
        "slice step": sym.slice(x, begin=(None, 2, 3), end=(None, None, 0), step=(None, -2, -1)),
        "slice axis": sym.slice_axis(x, axis=-1, begin=-3, end=None),
        "slice axis end": sym.slice_axis(x, axis=1, begin=0, end=-1),
        "split": sym.Group(list(sym.split(x, num_outputs=2, axis=2))),
        "split squeeze": sym.Group(list(sym.SliceChannel(x, num_outputs=3, squeeze_axis=True))),
        "cast": sym.Cast(sym.Cast(x, dtype="float16"), dtype="float32"),
        "broadcast to": sym.broadcast_to(sym.slice_axis(x, axis=1, begin=0, end=1), shape=(0, 5, 0)),
        "broadcast axis": sym.broadcast_axis(sym.slice_axis(x, axis=1, begin=0, end=1), axis=1, size=3),
        "zeros": sym.zeros((2, 3, 4)) + x + sym.ones((2, 3, 4)),
        "arange": sym.arange(4) + sym.sum(x, axis=(0, 1)) + sym.arange(1, 3, 0.5),
        "concat": sym.Concat(x, x * 3, dim=2),
        "concat default": sym.concat(x, x + 1, x),
    }.items():
        case("shape " + key, found, x=s)
    case("slice like", sym.slice_like(x, y, axes=(0, -1)), x=s, y=(1, 9, 2))
    case("reshape like", sym.reshape_like(x, y), x=s, y=(4, 6))
    case("broadcast like", sym.broadcast_like(x, y), x=(1, 3, 1), y=s)
    for mode in ("constant", "edge", "reflect"):
        found = sym.pad(x, mode=mode, pad_width=(0, 0, 0, 0, 1, 2, 2, 1), constant_value=0.5)
        case("pad " + mode, found, x=(1, 2, 4, 3))
    case("crop", sym.Crop(x, y, center_crop=True, num_args=2), x=(1, 2, 6, 5), y=(1, 1, 3, 3))
    case("crop offset", sym.Crop(x, offset=(1, 2), h_w=(3, 2), num_args=1), x=(1, 2, 6, 5))
    case("embedding", sym.Embedding(i, input_dim=5, output_dim=3, name="e"), i=((2, 4), "i7"))
    case("take", sym.take(x, i), x=(5, 3), i=((2, 2), "i7"))
    case("take wrap", sym.take(x, i, axis=1, mode="wrap"), x=(5, 3), i=((4,), "i7"))
    case("pick", sym.pick(x, i), x=(4, 3), i=((4,), "i3"))
    case("pick axis", sym.pick(x, i, axis=1, keepdims=True), x=(2, 3, 4), i=((2, 4), "i3"))
    case("one hot", sym.one_hot(i, depth=4, on_value=2, off_value=-1), eval_only=True, i=((3, 2), "i6"))
    case("where", sym.where(i, x, y), i=((3, 4), "i2"), x=(3, 4), y=(3, 4))
    case("where rows", sym.where(i, x, y), i=((3,), "i2"), x=(3, 4), y=(3, 4))
    case("gather", sym.gather_nd(x, i), x=(4, 3, 2), i=((2, 5), "i3"))
    for name in ("SequenceMask", "SequenceLast", "SequenceReverse"):
        function = getattr(sym, name)
        case(name + " none", function(x), x=(4, 3, 2))
        with_length = function(x, i + 1, use_sequence_length=True)
        case(name, with_length, x=(4, 3, 2), i=((3,), "i4"))
    case(
        "SequenceMask axis",
        sym.SequenceMask(x, i + 1, use_sequence_length=True, axis=1, value=-2),
        x=(3, 4, 2),
        i=((3,), "i4"),
    )
    for mode in ("rnn_relu", "rnn_tanh", "lstm", "gru"):
        for layers_, both, states in ((1, False, False), (2, True, True)):
            named = {"state": v("s"), **({"state_cell": v("c")} if mode == "lstm" else {})}
            found = sym.RNN(
                x,
                v("w"),
                state_size=4,
                num_layers=layers_,
                mode=mode,
                bidirectional=both,
                state_outputs=states,
                **named,
            )
            state = (layers_ * (1 + both), 2, 4)
            more = {"s": state, **({"c": state} if mode == "lstm" else {})}
            case(f"rnn {mode} {layers_}", sym.Group(list(found)) if states else found, x=(5, 2, 3), **more)


class Recurrent(gluon.HybridBlock):
    """What Gluon exports for a recurrent layer: packed weights that are joined, and states of a batch of 0."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.embedding = gluon.nn.Embedding(7, 5)
            self.lstm = gluon.rnn.LSTM(4, num_layers=2, bidirectional=True)
            self.dense = gluon.nn.Dense(3)

    def hybrid_forward(self, F, x):
        return self.dense(self.lstm(self.embedding(x)).swapaxes(0, 1))


def lenet():
    x = v("data")
    for n, (filters, kernel) in enumerate(((20, 3), (50, 5))):
        x = sym.Activation(
            sym.Convolution(x, kernel=(kernel, kernel), num_filter=filters, name=f"conv{n}"), act_type="relu"
        )
        x = sym.Pooling(x, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    x = sym.Activation(sym.FullyConnected(x, num_hidden=128, name="fc1"), act_type="relu")
    return sym.SoftmaxOutput(sym.FullyConnected(x, num_hidden=10, name="fc2"), name="softmax")


def factorization():
    """The matrix factorization of MXNet's article: users, items, and a score of each pair."""
    user = sym.Embedding(v("user"), input_dim=20, output_dim=8, name="users")
    item = sym.Embedding(v("item"), input_dim=15, output_dim=8, name="items")
    score = sym.Flatten(sym.sum_axis(user * item, axis=1))
    return sym.LinearRegressionOutput(score, v("score"))


def normalized():
    x = sym.Convolution(v("data"), kernel=(3, 3), num_filter=8, pad=(1, 1), no_bias=True, name="conv")
    x = sym.Activation(sym.BatchNorm(x, fix_gamma=False, name="bn"), act_type="relu")
    x = sym.Pooling(x, pool_type="avg", global_pool=True, kernel=(1, 1))
    return sym.SoftmaxOutput(sym.FullyConnected(x, num_hidden=5, name="fc"), name="softmax")


def trained(name, symbol, shapes, kinds, devices=1):
    """Outputs of five steps of SGD with momentum on one batch, by a Module, and the arrays at the end."""
    bind(name, symbol, shapes, kinds, everything=True)  # for the rule and the list of cases
    spec = CASES[name]["arrays"]
    made = {n: mx.nd.array(rule(name + "/" + n, tuple(s), k)) for n, (s, k) in spec.items()}
    labels = [n for n in shapes if n.endswith(("label", "score"))]
    data = [n for n in shapes if n not in labels]
    module = mx.mod.Module(symbol, data, labels, context=[mx.cpu(i) for i in range(devices)])
    module.bind([(n, shapes[n]) for n in data], [(n, shapes[n]) for n in labels])
    args = {n: made[n] for n in spec if n not in shapes and n not in CASES[name]["aux"]}
    module.init_params(arg_params=args, aux_params={n: made[n] for n in CASES[name]["aux"]})
    rate = {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3}
    module.init_optimizer(kvstore="device" if devices > 1 else "local", optimizer="sgd", optimizer_params=rate)
    batch = mx.io.DataBatch([made[n] for n in data], [made[n] for n in labels])
    for step in range(5):
        module.forward(batch, is_train=True)
        keep(name, **{f"step{step}": module.get_outputs()[0]})
        module.backward()
        module.update()
    arg, aux = module.get_params()
    for n, value in {**arg, **aux}.items():
        keep(name, **{"sum " + n: np.float64(value.asnumpy()).sum(), "size " + n: np.abs(value.asnumpy()).sum()})


def zoo():
    names = [n for n in dir(vision) if n[:3] in ("ale", "den", "inc", "mob", "res", "squ", "vgg") and n != "resnet"]
    for name in sorted(names):
        make = getattr(vision, name)
        if not callable(make):
            continue
        size = 299 if "inception" in name else 224 if "dense" in name or "squeeze" in name or "alex" in name else 32
        size = {"alexnet": 64, "squeezenet1_0": 224, "squeezenet1_1": 224}.get(name, size)
        symbol = make(classes=10, prefix="net_")(v("data"))
        executor = bind("zoo " + name, symbol, {"data": (1, 3, size, size)}, {}, everything=True)
        keep("zoo " + name, eval0=executor.forward(is_train=False)[0])
        print("zoo", name, executor.outputs[0].asnumpy()[0, :3])


def main():
    layers()
    losses()
    arithmetic()
    shapes()
    case("gluon lstm", Recurrent()(v("data")), data=((3, 4), "i7"))
    image = {"data": (8, 1, 28, 28), "softmax_label": (8,)}
    pairs = {"user": (16,), "item": (16,), "score": (16,)}
    small = {"data": (8, 3, 9, 9), "softmax_label": (8,)}
    for count in (1, 4):
        trained(f"lenet {count}", lenet(), image, {"softmax_label": "i10"}, count)
        trained(f"factorization {count}", factorization(), pairs, {"user": "i20", "item": "i15", "score": "n"}, count)
        trained(f"normalized {count}", normalized(), small, {"softmax_label": "i5"}, count)
    zoo()
    content = json.dumps({"version": mx.__version__, "cases": CASES}, sort_keys=True).encode()
    (FOLDER / "mxnet_symbols.json.gz").write_bytes(gzip.compress(content, 9, mtime=0))
    np.savez_compressed(str(FOLDER / "mxnet_symbols.npz"), **ARRAYS)


if __name__ == "__main__":
    main()
