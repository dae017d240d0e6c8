"""What MXNet 1.9.1 gives for the operators beside those of record_mxnet_symbols.py, alone and behind another operator.

Like record_mxnet_symbols.py it runs in MXNet's environment, and writes what tests/mxnet/test_mxnet_operators.py reads:

    .venv-mxnet/bin/python tools/record_mxnet_operators.py tests/reference

Each case is recorded twice: as it is, and with three quarters of its arrays (" behind"), for some gradients of MXNet
are wrong only where an array is another operator's output. mxnet_operators.npz has them in float32, and in float16 what
MXNet computes in it.
"""

import functools
import gzip
import json
import os
import pathlib
import sys

os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"  # else several operators are computed as one

import mxnet as mx
import numpy as np
from mxnet import gluon, sym
from mxnet_rule import rule

FOLDER = pathlib.Path(sys.argv[1])
ONLY = sys.argv[2:]  # to look at some cases; nothing is written then
CASES, ARRAYS = {}, {}


def executor_of(name, symbol, has_grads, dtype=np.float32):
    """An executor of a case, whose arrays follow the rule."""
    case = CASES[name]
    types, _, _ = symbol.infer_type(**dict.fromkeys(case["inputs"], dtype))
    of = dict(zip(symbol.list_arguments(), types or []))  # noqa: B905, Python 3.8
    made = {
        n: mx.nd.array(rule(f"{name}/{n}", tuple(s), k), dtype=of.get(n, np.float32))
        for n, (s, k) in case["arrays"].items()
    }
    names = symbol.list_arguments()
    wanted = {n: "write" if has_grads and case["arrays"][n][1][0] != "i" else "null" for n in names}
    grads = {n: mx.nd.zeros(made[n].shape, dtype=made[n].dtype) for n in names if wanted[n] == "write"}
    return symbol.bind(mx.cpu(), {n: made[n] for n in names}, grads, wanted, {n: made[n] for n in case["aux"]})


def record(name, symbol, given, has_grads):
    shapes = {n: g[0] if g and isinstance(g[0], tuple) else g for n, g in given.items()}
    kinds = {n: g[1] for n, g in given.items() if g and isinstance(g[0], tuple)}
    arguments, _, states = symbol.infer_shape(**shapes)
    if arguments is None:  # of a branch, whose shapes MXNet knows when it runs
        arguments, states = [shapes[n] for n in symbol.list_arguments()], []
    aux = symbol.list_auxiliary_states()
    known = {**dict(zip(symbol.list_arguments(), arguments)), **dict(zip(aux, states))}  # noqa: B905
    arrays = {n: [list(s), kinds.get(n) or ("u" if n in aux else "n")] for n, s in known.items()}
    inputs = [n for n in symbol.list_inputs() if n in shapes]
    CASES[name] = {"symbol": symbol.tojson(), "arrays": arrays, "aux": aux, "inputs": inputs}
    executor = executor_of(name, symbol, has_grads)
    for i, out in enumerate(executor.forward(is_train=False)):
        ARRAYS[f"{name}/eval{i}"] = out.asnumpy()
    if has_grads:
        ARRAYS.update({f"{name}/{what}": value for what, value in trained(name, executor).items()})
        try:
            found = trained(name, executor_of(name, symbol, True, np.float16))
            ARRAYS.update({f"{name}/half {what}": value for what, value in found.items()})
        except (mx.base.MXNetError, TypeError) as error:
            print("no float16", name, str(error).strip().splitlines()[-1][:100])


def trained(name, executor):
    outs = executor.forward(is_train=True)
    found = {f"out{i}": out.asnumpy() for i, out in enumerate(outs)}
    executor.backward([mx.nd.array(rule(f"{name}/head{i}", o.shape, "n"), dtype=o.dtype) for i, o in enumerate(outs)])
    found.update({"grad " + n: grad.asnumpy() for n, grad in executor.grad_dict.items() if grad is not None})
    found.update({"aux " + n: value.asnumpy() for n, value in executor.aux_dict.items()})
    return found


def case(name, make, grads=True, behind=True, **given):
    """`make(**variables)` is a symbol. `given` has a shape, or (shape, kind), of each input."""
    if ONLY and not any(name.startswith(word) for word in ONLY):
        return
    is_whole = {n: g and isinstance(g[0], tuple) and g[1][0] == "i" for n, g in given.items()}
    for key in ("", " behind") if behind and not all(is_whole.values()) else ("",):
        variables = {n: sym.var(n) if is_whole[n] or not key else sym.var(n) * 0.75 for n in given}
        try:
            symbol = make(**variables)
            record(name + key, sym.Group(list(symbol)) if len(symbol.list_outputs()) > 1 else symbol, given, grads)
        except Exception as error:  # of all kinds, and all of them are to be seen
            CASES.pop(name + key, None)
            print("no", name + key, repr(error).strip()[-300:])


def attributes(name, function, first, cases, **given):
    """Cases of one operator: {key: attributes}, and which inputs it takes, in this order."""
    for key, more in cases.items():
        case(f"{name} {key}", lambda more=more, **v: function(*(v[n] for n in first.split()), **more), **given)


def whole(x):
    return sym.cast(x, dtype="int32")


def amp_and_elementwise():
    c = sym.contrib
    # Whole numbers, for XLA leaves a cast to float16 and back out, and rounds nothing.
    cast = lambda x: sym.amp_cast(sym.amp_cast(x, dtype="float16") / 4, dtype="float32")  # noqa: E731
    case("amp cast", cast, grads=False, x=((3, 4), "i9"))
    case("amp cast to itself", lambda x: sym.amp_cast(x, dtype="float32"), x=(3, 4))
    many = lambda x, y: sym.amp_multicast(x, y, num_outputs=2)  # noqa: E731
    case("amp multicast", many, x=(3, 4), y=(2,))
    narrow = lambda x, y: sym.amp_multicast(x, y, num_outputs=2, cast_narrow=True)  # noqa: E731
    case("amp multicast narrow", narrow, x=(3, 4), y=(2,))
    for name in ("erfinv",):
        case("unary " + name, lambda x: sym.erfinv(sym.tanh(x)), x=(3, 4))
    case("unary gamma", lambda x: sym.gamma(x), x=((3, 4), "u"))
    case("unary logical_not", lambda x: sym.logical_not(x), grads=False, x=((3, 4), "i2"))
    case("broadcast logical_xor", sym.broadcast_logical_xor, grads=False, lhs=((4, 3), "i2"), rhs=((4, 1), "i2"))
    case("scalar logical_xor", lambda x: sym.Symbol.__ne__(x, 0), grads=False, x=((4, 3), "i2"))
    case("unary arccos", lambda x: sym.arccos(sym.tanh(x)), x=(3, 4))
    case("unary arcsin", lambda x: sym.arcsin(sym.tanh(x)), x=(3, 4))
    case("unary arccosh", lambda x: sym.arccosh(x + 1), x=((3, 4), "u"))
    case("unary arctanh", lambda x: sym.arctanh(sym.tanh(x)), x=(3, 4))
    case("unary degrees", lambda x: sym.degrees(x), x=(3, 4))
    case("unary radians", lambda x: sym.radians(x), x=(3, 4))
    case("softmax length", lambda x, n: sym.softmax(x, whole(n) + 1, use_length=True), x=(2, 3, 4), n=((2, 3), "i4"))
    case(
        "softmax length axis",
        lambda x, n: sym.softmax(x, whole(n) + 1, use_length=True, axis=1, temperature=2.0),
        x=(2, 3, 4),
        n=((2, 4), "i3"),
    )
    case("div_sqrt_dim", c.div_sqrt_dim, data=(2, 3, 5))
    attributes("quadratic", c.quadratic, "x", {"default": {}, "set": {"a": 2, "b": -1, "c": 0.5}}, x=(3, 4))
    attributes("gradientmultiplier", c.gradientmultiplier, "x", {"default": {}, "set": {"scalar": -0.5}}, x=(3, 4))
    case("round_ste", c.round_ste, data=(3, 4))
    case("sign_ste", c.sign_ste, data=(3, 4))
    case("grad_add", lambda x, y: sym._internal._grad_add(x, y), grads=False, x=(3, 4), y=(3, 4))
    case("like rhs", lambda x, y: sym._internal._identity_with_attr_like_rhs(x, y), x=(3, 4), y=(3, 4))
    attributes(
        "moments", sym.moments, "x", {"axes": {"axes": (0, 2)}, "keep": {"axes": 1, "keepdims": True}}, x=(3, 2, 4)
    )
    attributes("moments", sym.moments, "x", {"all": {"axes": (0, 1, 2)}}, x=(3, 2, 4))
    attributes("SVMOutput", sym.SVMOutput, "x y", {
        "default": {}, "set": {"margin": 0.5, "regularization_coefficient": 0.3}, "linear": {"use_linear": True},
    }, x=(4, 5), y=((4,), "i5"))  # fmt: skip


def arrays():
    s = (2, 3, 4)
    i = sym._internal
    attributes("depth to space", sym.depth_to_space, "x", {"two": {"block_size": 2}}, x=(2, 8, 3, 2))
    attributes("space to depth", sym.space_to_depth, "x", {"two": {"block_size": 2}}, x=(2, 2, 4, 6))
    attributes("cumsum", sym.cumsum, "a", {"default": {}, "axis": {"axis": 1}}, a=s)
    attributes("diag", sym.diag, "x", {
        "default": {}, "k": {"k": 1}, "axes": {"k": -1, "axis1": 1, "axis2": 2},
    }, x=(3, 4, 2))  # fmt: skip
    attributes("diag vector", sym.diag, "x", {"default": {}, "k": {"k": -2}}, x=(3,))
    for key, more in {"default": {}, "axis": {"axis": 1, "is_ascend": False}, "all": {"axis": None}}.items():
        case("sort " + key, lambda x, more=more: sym.sort(x, **more), grads=key != "default", x=s)
        case("argsort " + key, lambda x, more=more: sym.argsort(x, **more), grads=False, x=s)
    case("argsort dtype", lambda x: sym.argsort(x, dtype="int32"), grads=False, x=s)
    case("argsort ties", lambda x: sym.argsort(x), grads=False, x=((4, 9), "i3"))
    for key, more in {
        "indices": {"k": 2}, "default": {}, "value": {"k": 3, "ret_typ": "value", "axis": 1},
        "both": {"k": 2, "ret_typ": "both", "is_ascend": True}, "mask": {"k": 2, "ret_typ": "mask"},
        "all": {"k": 5, "axis": None, "ret_typ": "value"}, "zero": {"k": 0, "ret_typ": "value"},
        "int32": {"k": 2, "dtype": "int32", "ret_typ": "both"},
        "mask ascend": {"k": 1, "ret_typ": "mask", "is_ascend": True, "axis": 0},
    }.items():  # fmt: skip
        grads = more.get("ret_typ") in ("value", "both")
        case("topk " + key, lambda x, more=more: sym.topk(x, **more), grads=grads, x=s)
    case("topk ties", lambda x: sym.topk(x, k=4), grads=False, x=((4, 9), "i3"))
    case("argmax_channel", sym.argmax_channel, grads=False, data=(3, 4))
    case(
        "batch_take", lambda a, indices: sym.batch_take(a, whole(indices)), grads=False, a=(3, 4), indices=((3,), "i4")
    )
    case("shape_array", lambda x: sym.shape_array(x), grads=False, x=s)
    case("size_array", lambda x: sym.size_array(x), grads=False, x=s)
    case("scatter_nd", lambda x, i: sym.scatter_nd(x, i, shape=(4, 3)), x=(5,), i=((2, 5), "i3"))
    for key, more in {"sections": {"sections": 2, "axis": 2}, "indices": {"indices": (0, 1), "axis": 1}}.items():
        case("split_v2 " + key, lambda x, more=more: i._split_v2(x, **{"indices": (), **more}), x=s)
    case("split_v2 squeeze", lambda x: i._split_v2(x, indices=(), sections=3, axis=1, squeeze_axis=True), x=s)
    for key, more in {"default": {}, "wide": {"M": 5, "k": 1}}.items():
        case(
            "eye " + key,
            lambda x, more=more: sym.broadcast_add(sym.eye(3, **more), sym.reshape(sym.sum(x), shape=(1, 1))),
            x=(3,),
        )
    case("linspace", lambda x: sym.linspace(1, 2, 5) + sym.linspace(0, 2, 5, endpoint=False) + x, x=(5,))
    case("arange like", lambda x: sym.contrib.arange_like(x, start=2, step=0.5), grads=False, x=(2, 3))
    case("arange like axis", lambda x: sym.contrib.arange_like(x, axis=1), grads=False, x=(2, 3))
    case("arange like repeat", lambda x: sym.contrib.arange_like(x, repeat=2), grads=False, x=(2, 4))
    case("khatri_rao", lambda x, y: sym.khatri_rao(x, y), grads=False, x=(2, 3), y=(4, 3))
    case("ravel", lambda x: sym.ravel_multi_index(x, shape=(3, 4)), grads=False, x=((2, 5), "i3"))
    case("unravel", lambda x: sym.unravel_index(x, shape=(3, 4)), grads=False, x=((5,), "i12"))
    attributes("im2col", sym.im2col, "x", {
        "default": {"kernel": (2, 3)}, "set": {"kernel": (2, 2), "stride": (2, 1), "dilate": (1, 2), "pad": (1, 0)},
    }, x=(2, 3, 5, 6))  # fmt: skip
    attributes("col2im", sym.col2im, "x", {"default": {"output_size": (4, 4), "kernel": (2, 2)}}, x=(2, 12, 9))
    more = {"output_size": (4, 5), "kernel": (2, 2), "stride": (2, 1), "dilate": (1, 2), "pad": (1, 0)}
    case("col2im set", lambda x: sym.col2im(x, **more), x=(2, 12, 9))
    case(
        "slice assign",
        lambda x, y: i._slice_assign(x, y, begin=(0, 1), end=(2, 4), step=(1, 2)),
        grads=False,
        x=(3, 4),
        y=(2, 2),
    )
    case(
        "slice assign scalar",
        lambda x: i._slice_assign_scalar(x, scalar=2, begin=(0, 1), end=(2, 3)),
        grads=False,
        x=(3, 4),
    )
    case("index_array", lambda x: sym.contrib.index_array(x), grads=False, x=(2, 3))
    case("index_array axes", lambda x: sym.contrib.index_array(x, axes=(1, 0)), grads=False, x=(2, 3, 2))
    case("index_copy", lambda x, i, y: sym.contrib.index_copy(x, i, y), x=(5, 3), i=((1,), "i5"), y=(1, 3))
    case("allclose", lambda x, y: sym.contrib.allclose(x, y, atol=1.0), grads=False, x=(2, 2), y=(2, 2))
    case("cast_storage", lambda x: sym.cast_storage(x, stype="default"), x=(2, 3))
    e = sym.contrib.SparseEmbedding
    case("SparseEmbedding", lambda i: e(i, input_dim=5, output_dim=3, name="e"), grads=False, i=((2, 4), "i7"))
    sparse = lambda i: sym.Embedding(i, input_dim=5, output_dim=3, name="e", sparse_grad=False)  # noqa: E731
    case("embedding wide", sparse, i=((2, 4), "i7"))
    case("histogram", lambda x: i._histogram(x, bin_cnt=4, range=(-1.0, 2.0)), grads=False, x=(5, 5))


def attention():
    c = sym.contrib
    case("selfatt qk", lambda x: c.interleaved_matmul_selfatt_qk(x, heads=2), x=(3, 2, 24))
    va = lambda x, a: c.interleaved_matmul_selfatt_valatt(x, a, heads=2)  # noqa: E731
    case("selfatt valatt", va, x=(3, 2, 24), a=(4, 3, 3))
    case("encdec qk", lambda q, kv: c.interleaved_matmul_encdec_qk(q, kv, heads=2), q=(3, 2, 8), kv=(5, 2, 16))
    va = lambda kv, a: c.interleaved_matmul_encdec_valatt(kv, a, heads=2)  # noqa: E731
    case("encdec valatt", va, kv=(5, 2, 16), a=(4, 3, 5))


def ctc():
    for key, more in {"first": {}, "last": {"blank_label": "last"}}.items():
        case(
            "ctc " + key,
            lambda x, y, more=more: sym.CTCLoss(x, y + (0 if more else 1), **more),
            x=(6, 2, 4),
            y=((2, 3), "i3"),
        )
    ties = lambda x, y: sym.CTCLoss(x, y + 1)  # noqa: E731
    case("ctc repeated", ties, x=(7, 3, 3), y=((3, 2), "i2"))
    lengths = lambda x, y, n: sym.CTCLoss(x, y + 1, n + 5, use_data_lengths=True)  # noqa: E731
    case("ctc data lengths", lengths, x=(7, 3, 4), y=((3, 2), "i3"), n=((3,), "i3"))
    lengths = lambda x, y, m: sym.CTCLoss(x, y + 1, label_lengths=m + 1, use_label_lengths=True)  # noqa: E731
    case("ctc label lengths", lengths, x=(7, 3, 4), y=((3, 3), "i3"), m=((3,), "i3"))

    def both(x, y, n, m):
        return sym.CTCLoss(x, y, n + 5, m + 1, use_data_lengths=True, use_label_lengths=True, blank_label="last")

    case("ctc impossible", lambda x, y: sym.CTCLoss(x, y + 1), grads=False, x=(3, 2, 4), y=((2, 3), "i2"))
    case("ctc both lengths", both, x=(7, 3, 4), y=((3, 3), "i3"), n=((3,), "i3"), m=((3,), "i3"))


def images():
    c = sym.contrib
    x = (2, 3, 5, 7)
    attributes("adaptive pool", c.AdaptiveAvgPooling2D, "x", {
        "default": {}, "one": {"output_size": 2}, "two": {"output_size": (3, 4)}, "larger": {"output_size": (7, 9)},
    }, x=x)  # fmt: skip
    attributes("resize", c.BilinearResize2D, "x", {
        "size": {"height": 8, "width": 4}, "default": {},
        "not aligned": {"height": 8, "width": 4, "align_corners": False},
        "scale": {"scale_height": 2.0, "scale_width": 1.5},
        "odd": {"mode": "odd_scale", "scale_height": 2.0, "scale_width": 0.5},
        "scale not aligned": {"scale_height": 0.5, "scale_width": 3.0, "align_corners": False},
        **{mode: {"mode": mode} for mode in ("to_even_down", "to_even_up", "to_odd_down", "to_odd_up")},
    }, x=x)  # fmt: skip
    case("resize like", lambda x, y: c.BilinearResize2D(x, y, mode="like"), x=x, y=(2, 1, 4, 9))
    case("grid affine", lambda x: sym.GridGenerator(x, transform_type="affine", target_shape=(3, 4)), x=(2, 6))
    case("grid warp", lambda x: sym.GridGenerator(x, transform_type="warp"), x=(2, 2, 3, 4))
    case("sampler", lambda x, g: sym.BilinearSampler(x, g), x=x, g=(2, 2, 4, 3))
    spatial = {"transform_type": "affine", "sampler_type": "bilinear"}
    case("transformer", lambda x, y: sym.SpatialTransformer(x, y, target_shape=(4, 3), **spatial), x=x, y=(2, 6))
    for key, more in {
        "default": {}, "set": {"kernel_size": 3, "max_displacement": 2, "stride1": 2, "stride2": 2, "pad_size": 2},
        "difference": {"is_multiply": False, "max_displacement": 2, "pad_size": 2},
    }.items():  # fmt: skip
        case(
            "correlation " + key, lambda x, y, more=more: sym.Correlation(x, y, **more), x=(1, 2, 6, 7), y=(1, 2, 6, 7)
        )
    norm = lambda x: c.SyncBatchNorm(x, key="k", name="b", fix_gamma=False, momentum=0.7)  # noqa: E731
    case("sync norm", norm, x=(3, 4, 5, 2))
    case("sync norm default", lambda x: c.SyncBatchNorm(x, key="k", name="b"), x=(3, 4, 5, 2))
    case("norm relu", lambda x: c.BatchNormWithReLU(x, name="b", fix_gamma=False), x=(3, 4, 5, 2))
    offsets = {"kernel": (3, 3), "num_filter": 4, "name": "d"}
    attributes("deformable", c.DeformableConvolution, "x o", {"plain": offsets}, x=(1, 4, 6, 5), o=(1, 18, 4, 3))
    more = {**offsets, "stride": (2, 1), "pad": (1, 1), "dilate": (1, 2), "num_group": 2, "num_deformable_group": 2}
    attributes(
        "deformable",
        c.DeformableConvolution,
        "x o",
        {"set": {**more, "no_bias": True}},
        x=(2, 4, 6, 5),
        o=(2, 36, 3, 3),
    )
    # MXNet computes no gradient of it on a CPU. A test has that of the function.
    modulated = functools.partial(c.ModulatedDeformableConvolution, **offsets)
    case("modulated", lambda x, o, m: modulated(x, o, m), grads=False, x=(1, 4, 6, 5), o=(1, 18, 4, 3), m=(1, 9, 4, 3))
    modulated_set = functools.partial(c.ModulatedDeformableConvolution, **more, no_bias=True)
    case("modulated set", lambda x, o, m: modulated_set(x, o * 3, m), grads=False, x=(2, 4, 6, 5), o=(2, 36, 3, 3),
         m=(2, 18, 3, 3))  # fmt: skip
    im = sym.image
    case("image upside down", im.flip_top_bottom, data=(4, 5, 3), grads=False)
    case("to tensor", lambda x: im.to_tensor(x * 100), x=((4, 5, 3), "u"), grads=False)
    case("to tensor batch", lambda x: im.to_tensor(x * 100), x=((2, 4, 5, 3), "u"), grads=False)
    case("image normalize", lambda x: im.normalize(x, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)), x=(3, 4, 5))
    case("image normalize batch", lambda x: im.normalize(x, mean=(0.1,), std=(0.5,)), x=(2, 3, 4, 5))
    case("image crop", lambda x: im.crop(x, x=1, y=2, width=3, height=2), x=(5, 6, 3))
    case("image flip", lambda x: im.flip_left_right(x), x=(5, 6, 3), grads=False)


def boxes():
    c = sym.contrib
    two = {"lhs": ((2, 3, 4), "b1"), "rhs": ((5, 4), "b1")}
    for form in ("corner", "center"):
        case("iou " + form, lambda lhs, rhs, f=form: c.box_iou(lhs, rhs, format=f), grads=False, **two)
    b = ((2, 9, 6), "b1")
    for key, more in {
        "default": {}, "ids": {"id_index": 0, "overlap_thresh": 0.3}, "force": {"id_index": 0, "force_suppress": True},
        "topk": {"topk": 4, "valid_thresh": 0.2}, "background": {"id_index": 0, "background_id": 1},
        "center": {"in_format": "center", "out_format": "corner", "overlap_thresh": 0.2},
        "to center": {"out_format": "center"},
    }.items():  # fmt: skip
        case("nms " + key, lambda x, more=more: c.box_nms(x, **more), behind="id_index" not in more, x=b)
    case("nms negative", lambda x: c.box_nms(x - 0.5, valid_thresh=-1, out_format="center"), x=b)
    case("nms none", lambda x: c.box_nms(x, valid_thresh=2), x=b)
    case("nms flat", lambda x: c.box_nms(x, coord_start=1, score_index=0, overlap_thresh=0.1), x=((7, 5), "b1"))
    case("matching", lambda x: c.bipartite_matching(x, threshold=0.1), grads=False, x=((2, 3, 4), "u"))
    more = {"threshold": 1.2, "is_ascend": True, "topk": 2}
    case("matching set", lambda x: c.bipartite_matching(x, **more), grads=False, x=((2, 5, 4), "u"))
    d = {"x": (2, 5, 4), "a": ((1, 5, 4), "b1")}
    case("decode", lambda x, a: c.box_decode(x, a), grads=False, **d)
    more = {"std0": 0.1, "std1": 0.1, "std2": 0.2, "std3": 0.2, "clip": 0.1, "format": "corner"}
    case("decode set", lambda x, a: c.box_decode(x, a, **more), grads=False, **d)

    def encode(s, m, a, r, mean, std):
        return c.box_encode(s * 2 - 1, m, a, r, mean, std)

    case("encode", encode, grads=False, behind=False, s=((2, 5), "i2"), m=((2, 5), "i3"), a=((2, 5, 4), "b1"),
         r=((2, 3, 4), "b1"), mean=(4,), std=((4,), "u"))  # fmt: skip
    r, x = ((3, 5), "b9"), (2, 8, 10, 9)
    for key, more in {
        "default": {}, "ratio": {"sample_ratio": 2}, "aligned": {"aligned": True, "spatial_scale": 0.5},
        "sensitive": {"position_sensitive": True, "pooled_size": (2, 2), "sample_ratio": 2},
    }.items():  # fmt: skip
        more = {"pooled_size": (2, 3), "spatial_scale": 1.0, **more}
        case("roi align " + key, lambda x, r, more=more: c.ROIAlign(x, r, **more), x=x, r=r, behind=False)
    case(
        "roi pooling", lambda x, r: sym.ROIPooling(x, r, pooled_size=(2, 3), spatial_scale=1.0), x=x, r=r, behind=False
    )
    case(
        "roi pooling scale",
        lambda x, r: sym.ROIPooling(x, r, pooled_size=(3, 2), spatial_scale=0.5),
        x=x,
        r=r,
        behind=False,
    )
    for key, more in {
        "default": {}, "set": {"sizes": (0.5, 0.25), "ratios": (1, 2, 0.5), "clip": True},
        "steps": {"steps": (0.3, 0.2), "offsets": (0.1, 0.7)},
    }.items():  # fmt: skip
        case("prior " + key, lambda x, more=more: c.MultiBoxPrior(x, **more), grads=False, x=(1, 2, 3, 4))
    for key, more, channels in (
        ("default", {"pooled_size": 2}, 12),
        ("set", {"pooled_size": 4, "group_size": 2, "spatial_scale": 0.5}, 12),
        ("odd", {"pooled_size": 3, "group_size": 2, "spatial_scale": 0.7}, 12),
    ):
        pooled = functools.partial(c.PSROIPooling, **{"spatial_scale": 1.0, "output_dim": 3, **more})
        case(f"psroi {key}", lambda x, r, f=pooled: f(x, r), x=(3, channels, 7, 6), r=((5, 5), "b4"))
    d = {"p": ((2, 3, 8), "u"), "d": ((2, 32), "w9"), "a": ((1, 8, 4), "b0.5")}
    for key, more in {
        "default": {}, "set": {"clip": False, "threshold": 0.3, "nms_threshold": 0.2, "nms_topk": 5},
        "force": {"force_suppress": True, "nms_threshold": 0.1, "variances": (0.2, 0.2, 0.1, 0.1)},
        "background": {"background_id": 1, "threshold": 0.4},
    }.items():  # fmt: skip
        make = lambda p, d, a, more=more: c.MultiBoxDetection(sym.softmax(p * 4, axis=1), d, a, **more)  # noqa: E731
        case("detection " + key, make, grads=False, **d)
    t = {"a": ((1, 8, 4), "b0.5"), "t": ((2, 3, 5), "b0.5"), "p": ((2, 3, 8), "n")}
    for key, more in {
        "default": {}, "overlap": {"overlap_threshold": 0.2, "variances": (0.2, 0.2, 0.1, 0.1)},
        "mining": {"negative_mining_ratio": 1, "negative_mining_thresh": 0.4, "ignore_label": -2},
        "least": {"negative_mining_ratio": 1, "minimum_negative_samples": 4},
    }.items():  # fmt: skip
        case("target " + key, lambda a, t, p, more=more: c.MultiBoxTarget(a, t, p, **more), grads=False, **t)

    def padded(a, t, p):
        """Labels of which the last ones are padding, and an image without any."""
        first = sym.slice_axis(sym.slice_axis(t, axis=0, begin=0, end=1), axis=1, begin=0, end=2)
        none = sym.zeros((1, 2, 5)) - 1
        labels = sym.concat(sym.concat(first, none, dim=1), sym.zeros((1, 4, 5)) - 1, dim=0)
        return c.MultiBoxTarget(a, labels, p)

    case("target padded", padded, grads=False, **t)

    def proposal(p, b, function, more):
        stride = more.get("feature_stride", 16)
        size = [sym._internal._full(shape=(1, 1), value=float(n)) for n in (4 * stride, 3 * stride, 1)]
        return function(sym.sigmoid(p), b, sym.concat(*size, dim=1), **more)

    for name in ("Proposal", "MultiProposal"):
        more = {
            "scales": (1, 2),
            "ratios": (0.5, 1, 2),
            "rpn_pre_nms_top_n": 40,
            "rpn_post_nms_top_n": 9,
            "rpn_min_size": 4,
        }
        function = getattr(c, name)
        for key, extra in {
            "": {}, " set": {"threshold": 0.4, "feature_stride": 8, "output_score": True}, " iou": {"iou_loss": True},
        }.items():  # fmt: skip
            case(name + key, lambda p, b, m={**more, **extra}, f=function: proposal(p, b, f, m),
                 grads=False, behind=False, p=(1, 12, 4, 3), b=((1, 24, 4, 3), "w4"))  # fmt: skip


def linear_algebra():
    la, spd = sym.linalg, ((2, 3, 3), "s")
    s = (2, 3, 4)
    case("gemm", lambda x, y, z: la.gemm(x, y, z), x=s, y=(2, 4, 5), z=(2, 3, 5))
    more = {"transpose_a": True, "transpose_b": True, "alpha": 0.5, "beta": 2.0}
    case("gemm set", lambda x, y, z: la.gemm(x, y, z, **more), x=(2, 4, 3), y=(2, 5, 4), z=(2, 3, 5))
    case("gemm2", lambda x, y: la.gemm2(x, y), x=s, y=(2, 4, 5))
    more = {"transpose_a": True, "transpose_b": True, "alpha": 0.5}
    case("gemm2 set", lambda x, y: la.gemm2(x, y, **more), x=(2, 4, 3), y=(2, 5, 4))
    case("gemm2 axis", lambda x, y: la.gemm2(x, y, axis=0), x=(3, 2, 4), y=(4, 2, 5))
    case("potrf", la.potrf, A=spd)
    case("potri", lambda x: la.potri(la.potrf(x)), x=spd)
    for key, more in {"default": {}, "set": {"transpose": True, "alpha": 2.0}, "upper": {"lower": False}}.items():
        for name in ("trmm", "trsm"):
            op = getattr(la, name)
            case(f"{name} {key}", lambda A, B, op=op, more=more: op(A, B, **more), A=spd, B=(2, 3, 4))
            case(
                f"{name} right {key}",
                lambda A, B, op=op, more=more: op(A, B, rightside=True, **more),
                A=spd,
                B=(2, 4, 3),
            )
    case("sumlogdiag", la.sumlogdiag, A=spd)
    attributes("syrk", la.syrk, "x", {"default": {}, "set": {"transpose": True, "alpha": 0.5}}, x=s)
    case("inverse", la.inverse, A=spd)
    case("det", la.det, A=(2, 3, 3))
    case("slogdet", la.slogdet, A=(2, 3, 3))
    attributes("extractdiag", la.extractdiag, "x", {"default": {}, "set": {"offset": 1}}, x=(2, 4, 4))
    attributes("makediag", la.makediag, "x", {"default": {}, "set": {"offset": -1}}, x=s)
    attributes(
        "extracttrian",
        la.extracttrian,
        "x",
        {"default": {}, "set": {"offset": 1, "lower": False}, "less": {"offset": -1}},
        x=(2, 4, 4),
    )
    attributes(
        "maketrian", la.maketrian, "x", {"default": {}, "set": {"lower": False}, "less": {"offset": -1}}, x=(2, 6)
    )
    case("gelqf", lambda x: la.gelqf(x), x=s)
    case("syevd", lambda x: la.syevd(x)[1], x=spd)


def densities():
    for name, args in (("normal", ("mu", "sigma")), ("gamma", ("alpha", "beta")), ("exponential", ("lam",)),
                       ("poisson", ("lam",)), ("uniform", ("low", "high"))):  # fmt: skip
        function = getattr(sym, "random_pdf_" + name)
        kind = "i4" if name == "poisson" else "u"
        for key, more in {"": {}, " log": {"is_log": True}}.items():
            given = dict.fromkeys(args, ((2,), "u"))

            def make(x, function=function, more=more, name=name, args=args, **v):
                values = [v[n] for n in args]
                if name == "uniform":
                    values = [values[0] - 1.5, values[1] + 1]
                return function(x, *values, **more)

            case(f"pdf {name}{key}", make, x=((2, 3), kind), **given)
    for key, more in {"": {}, " log": {"is_log": True}}.items():
        pdf = functools.partial(sym.random_pdf_negative_binomial, **more)
        case(f"pdf negative_binomial{key}", lambda x, k, p, f=pdf: f(x, k * 3, p / 2), x=((2, 3), "i4"), k=((2,), "u"),
             p=((2,), "u"))  # fmt: skip
        pdf = functools.partial(sym.random_pdf_generalized_negative_binomial, **more)
        case(f"pdf generalized{key}", pdf, sample=((2, 3), "i4"), mu=((2,), "u"), alpha=((2,), "u"))
        pdf = functools.partial(sym.random_pdf_dirichlet, **more)
        case(f"pdf dirichlet{key}", lambda x, a, f=pdf: f(sym.softmax(x), a), x=(2, 3, 4), a=((2, 4), "u"))


def further_attributes():
    """Attributes that neither the cases above nor record_mxnet_symbols.py have: each default, and one other value."""
    c, i, x4 = sym.contrib, sym._internal, (2, 4, 5, 4)
    # Older names of layers, which read fewer attributes.
    case("v1 convolution", lambda x: sym.Convolution_v1(x, kernel=(3, 2), num_filter=3, name="c"), behind=False, x=x4)
    case("v1 norm", lambda x: sym.BatchNorm_v1(x, fix_gamma=False, name="b"), behind=False, x=x4)
    pool = {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 0), "name": "p"}
    for kind in ("max", "avg", "sum"):
        attributes(f"v1 pooling {kind}", sym.Pooling_v1, "x", {
            "valid": {**pool, "pool_type": kind}, "global": {"kernel": (1, 1), "global_pool": True, "pool_type": kind},
            "full": {**pool, "stride": (3, 3), "pool_type": kind, "pooling_convention": "full"},
        }, behind=False, x=x4)  # fmt: skip
    attributes("deconv", sym.Deconvolution, "x", {
        "1d": {"kernel": (3,), "num_filter": 2, "stride": (2,), "name": "d"},
    }, behind=False, x=(2, 3, 4))  # fmt: skip
    case("dropout always", lambda x: sym.Dropout(x, p=0.0, mode="always"), behind=False, x=(3, 4))
    attributes("group norm", sym.GroupNorm, "x", {
        "default": {"name": "g"}, "eps": {"name": "g", "num_groups": 4, "eps": 0.1},
    }, behind=False, x=x4)  # fmt: skip
    outputs = {"output_mean_var": True, "name": "g"}
    case("group norm outputs", lambda x: sym.GroupNorm(x, num_groups=2, **outputs), grads=False, behind=False, x=x4)
    case("layer norm outputs", lambda x: sym.LayerNorm(x, **outputs), grads=False, behind=False, x=x4)
    case("instance norm eps", lambda x: sym.InstanceNorm(x, eps=0.1, name="i"), behind=False, x=x4)
    case("l2 eps", lambda x: sym.L2Normalization(x, eps=0.5), behind=False, x=x4)
    attributes("norm relu", c.BatchNormWithReLU, "x", {
        "default": {"name": "b"}, "set": {"name": "b", "fix_gamma": False, "eps": 0.1, "momentum": 0.5},
        "global": {"name": "b", "use_global_stats": True},
    }, behind=False, x=x4)  # fmt: skip
    attributes("sync norm", c.SyncBatchNorm, "x", {
        "global": {"name": "b", "key": "k", "eps": 0.1, "use_global_stats": True},
    }, behind=False, x=x4)  # fmt: skip
    case("leaky rrelu bounds", lambda x: sym.LeakyReLU(x, act_type="rrelu", lower_bound=0.4, upper_bound=0.6)[0],
         grads=False, behind=False, x=(3, 4))  # fmt: skip
    attributes("MakeLoss", sym.MakeLoss, "x", {
        "plain": {}, "threshold": {"normalization": "valid", "valid_thresh": 0.5},
    }, behind=False, x=(3, 4))  # fmt: skip
    case("pad 5", lambda x: sym.pad(x, mode="constant", pad_width=(0, 0, 0, 0, 1, 0, 0, 2, 1, 1)), behind=False,
         x=(1, 2, 3, 2, 2))  # fmt: skip
    more = {"state_size": 3, "num_layers": 1, "mode": "gru"}
    case("rnn size", lambda x, s: sym.RNN(x, sym.var("w"), s, **more), behind=False, x=(4, 2, 5), s=(1, 2, 3))
    attributes("reshape before 0.9", sym.Reshape, "x", {
        "target": {"target_shape": (0, 6)}, "highest": {"target_shape": (0, 12), "keep_highest": True},
    }, behind=False, x=(2, 3, 4))  # fmt: skip
    lengths = {"use_sequence_length": True, "axis": 1}
    case("SequenceLast axis", lambda x, n: sym.SequenceLast(x, n + 1, **lengths), behind=False, x=(3, 4, 2),
         n=((3,), "i4"))  # fmt: skip
    case("swapaxes set", lambda x: sym.swapaxes(x, dim1=2, dim2=1), behind=False, x=(2, 3, 4))
    case("up scale", lambda x: sym.UpSampling(x, scale=3, sample_type="nearest"), behind=False, x=x4)
    more = {"scale": 2, "sample_type": "nearest", "num_args": 2, "multi_input_mode": "sum"}
    case("up sum", lambda x, y: sym.UpSampling(x, y, **more), behind=False, x=(1, 2, 2, 3), y=(1, 2, 4, 6))
    up = lambda x, w: sym.UpSampling(x, w, scale=3, sample_type="bilinear", num_filter=2, num_args=2)  # noqa: E731
    case("up bilinear odd", up, behind=False, x=(1, 2, 3, 2), w=(2, 1, 5, 5))
    case("arange repeat", lambda x: sym.arange(1, 3, 0.5, repeat=3) + x, behind=False, x=(12,))
    case("allclose set", lambda x, y: c.allclose(x, y, rtol=10.0, atol=0.0), grads=False, x=(2, 2), y=(2, 2))
    case("selfatt one head", lambda x: c.interleaved_matmul_selfatt_qk(x, heads=1), behind=False, x=(3, 2, 12))
    one = lambda x, a: c.interleaved_matmul_selfatt_valatt(x, a, heads=1)  # noqa: E731
    case("valatt one head", one, behind=False, x=(3, 2, 12), a=(2, 3, 3))
    # Two arrays of one shape, and numbers, under their own names.
    names = "equal not_equal greater greater_equal lesser lesser_equal logical_and logical_or logical_xor"
    for name in names.split():
        case(f"same {name}", getattr(i, f"_{name}"), grads=False, behind=False, lhs=((5, 4), "i2"), rhs=((5, 4), "i2"))
        number = functools.partial(getattr(i, f"_{name}_scalar"), scalar=1)
        case(f"number {name}", number, grads=False, behind=False, data=((5, 4), "i3"))
    for name in "maximum minimum mod power hypot".split():
        both = dict.fromkeys(("lhs", "rhs"), ((3, 4), "u"))
        case(f"same {name}", getattr(i, f"_{name}"), behind=False, **both)
        number = functools.partial(getattr(i, f"_{name}_scalar"), scalar=0.8)
        case(f"number {name}", number, behind=False, data=((3, 4), "u"))
    case("number rmod", lambda x: i._rmod_scalar(x, scalar=3.3), behind=False, x=((3, 4), "u"))
    whole_eye = lambda x: sym.cast(sym.eye(2, 4, k=-1, dtype="int32"), dtype="float32") + x  # noqa: E731
    case("eye int", whole_eye, grads=False, behind=False, x=(2, 4))
    case("histogram bins", lambda x, b: i._histogram(x, sym.sort(b)), grads=False, behind=False, x=(5, 5), b=(4,))
    more = {"axis": 0, "alpha": 2.0, "beta": 0.5}
    case("gemm axis", lambda x, y, z: sym.linalg.gemm(x, y, z, **more), behind=False, x=(3, 2, 4), y=(4, 2, 5),
         z=(3, 2, 5))  # fmt: skip
    attributes("cumsum", sym.cumsum, "a", {"dtype": {"axis": 0, "dtype": "float32"}}, behind=False, a=(2, 3))
    case("broadcast axes", lambda x: sym.broadcast_axis(x, axis=(0, 2), size=(3, 2)), behind=False, x=(1, 2, 1))
    case("broadcast like axes", lambda x, y: sym.broadcast_like(x, y, lhs_axes=(0, 2), rhs_axes=(1, -1)),
         behind=False, x=(1, 2, 1), y=(5, 4, 3))  # fmt: skip
    begin = {"lhs_begin": 1, "lhs_end": 3, "rhs_begin": 0, "rhs_end": 2}
    case("reshape like part", lambda x, y: sym.reshape_like(x, y, **begin), behind=False, x=(2, 3, 4, 5), y=(2, 6, 9))
    case("reshape like end", lambda x, y: sym.reshape_like(x, y, lhs_begin=-1, rhs_begin=1), behind=False,
         x=(3, 12), y=(7, 2, 6))  # fmt: skip
    case("hard sigmoid set", lambda x: sym.hard_sigmoid(x, alpha=0.5, beta=0.1), behind=False, x=(3, 4))
    for name in ("softmax", "log_softmax", "softmin"):
        wide = functools.partial(getattr(sym, name), dtype="float32")
        case(f"{name} dtype", lambda x, f=wide: f(sym.cast(x * 0, "float16")), grads=False, behind=False, x=(2, 3, 4))
    attributes("nanprod", sym.nanprod, "x", {"default": {}, "set": {"axis": 1, "keepdims": True}}, behind=False,
               x=(2, 3, 4))  # fmt: skip
    case("norm dtype", lambda x: sym.norm(x, axis=1, out_dtype="float32"), behind=False, x=(2, 3))
    case("one hot default", lambda i: sym.one_hot(i, depth=3), grads=False, i=((4,), "i5"))
    case("one hot int", lambda i: sym.cast(sym.one_hot(i, depth=3, dtype="int32"), dtype="float32"), grads=False,
         i=((4,), "i3"))  # fmt: skip
    case("pick wrap", lambda x, i: sym.pick(x, i - 4, mode="wrap"), behind=False, x=(4, 3), i=((4,), "i9"))
    case("pick clip", lambda x, i: sym.pick(x, i - 4), behind=False, x=(4, 3), i=((4,), "i9"))
    case("take clip", lambda x, i: sym.take(x, i - 4), behind=False, x=(4, 3), i=((2, 3), "i9"))
    case("embedding beyond", lambda i: sym.Embedding(i - 3, input_dim=5, output_dim=2, name="e"), behind=False,
         i=((3, 4), "i9"))  # fmt: skip
    case("reverse two", lambda x: sym.reverse(x, axis=(0, 2)), behind=False, x=(2, 3, 4))
    case("slice like all", lambda x, y: sym.slice_like(x, y), behind=False, x=(3, 4), y=(2, 3))
    case("stack default", lambda x, y: sym.stack(x, y), behind=False, x=(3, 4), y=(3, 4))
    case("depth to space 3", lambda x: sym.depth_to_space(x, block_size=3), behind=False, x=(1, 9, 2, 1))
    case("space to depth 3", lambda x: sym.space_to_depth(x, block_size=3), behind=False, x=(1, 1, 6, 3))
    case("scatter_nd three", lambda x, i: sym.scatter_nd(x, i, shape=(4, 3, 2)), behind=False, x=(5, 2),
         i=((2, 5), "i3"))  # fmt: skip
    case("gather ties", lambda x, i: sym.gather_nd(x, i), behind=False, x=(3, 2), i=((1, 7), "i3"))
    case("ravel three", lambda x: sym.ravel_multi_index(x, shape=(3, 4, 2)), grads=False, x=((3, 5), "i2"))
    case("unravel three", lambda x: sym.unravel_index(x, shape=(2, 3, 2)), grads=False, x=((5,), "i12"))
    assign = lambda x, y: i._slice_assign(x, y, begin=(1, None), end=(None, 2))  # noqa: E731
    case("slice assign open", assign, grads=False, x=(3, 4), y=(2, 2))
    case("full", lambda x: i._full(shape=(2, 3), value=1.5) * x, behind=False, x=(2, 3))
    case("crop beginning", lambda x: sym.slice(x, begin=(1,), end=(3,)), behind=False, x=(4, 3))
    case("arccos ends", lambda x: sym.arccos(x - 1), grads=False, behind=False, x=((5, 4), "i3"))
    case("image flat crop", lambda x: sym.image.crop(x, x=0, y=0, width=2, height=4), behind=False, x=(2, 5, 4, 3))
    for key, more in {"default": {}, "set": {"sparseness_target": 0.3, "penalty": 0.1, "momentum": 0.5}}.items():
        sparse = functools.partial(sym.IdentityAttachKLSparseReg, name="k", **more)
        case(f"sparse activations {key}", lambda x, f=sparse: f(sym.sigmoid(x)), behind=False, x=(3, 4))
    # Regions and boxes: ties, none at all, padding.
    case("nms ties", lambda x: c.box_nms(sym.round(x * 2), coord_start=1, score_index=0, overlap_thresh=0.4),
         behind=False, x=((3, 9, 5), "b2"))  # fmt: skip
    case("nms below", lambda x: c.box_nms(x - 9, valid_thresh=0.0), behind=False, x=((2, 4, 6), "b1"))
    empty = lambda x, r: c.ROIAlign(x, r * 0, pooled_size=(2, 2), spatial_scale=1.0)  # noqa: E731
    case("roi align of a point", empty, behind=False, x=(1, 2, 4, 4), r=((2, 5), "b3"))
    out = lambda x, r: sym.ROIPooling(x, sym.abs(r) * 4, pooled_size=(2, 2), spatial_scale=1.0)  # noqa: E731
    case("roi pooling outside", out, behind=False, x=(9, 2, 4, 4), r=((3, 5), "b3"))
    ties = lambda x, r: sym.ROIPooling(sym.round(x), r, pooled_size=(2, 2), spatial_scale=1.0)  # noqa: E731
    case("roi pooling ties", ties, grads=False, behind=False, x=(2, 2, 6, 6), r=((3, 5), "b3"))
    case("iou of none", lambda lhs, rhs: c.box_iou(lhs * 0, rhs), grads=False, behind=False, lhs=((2, 4), "b1"),
         rhs=((3, 4), "b1"))  # fmt: skip
    d = {"p": ((2, 3, 8), "u"), "d": ((2, 32), "w9"), "a": ((1, 8, 4), "b0.5")}
    none = lambda p, d, a: c.MultiBoxDetection(sym.softmax(p, axis=1), d, a, threshold=0.999)  # noqa: E731
    case("detection none", none, grads=False, behind=False, **d)
    equal = lambda p, d, a: c.MultiBoxDetection(sym.softmax(p * 0, axis=1), d, a)  # noqa: E731
    case("detection ties", equal, grads=False, behind=False, **d)
    t = {"a": ((1, 8, 4), "b0.5"), "t": ((2, 3, 5), "b0.5"), "p": ((2, 3, 8), "n")}
    case("target none", lambda a, t, p: c.MultiBoxTarget(a, t * 0 - 1, p), grads=False, behind=False, **t)
    equal = lambda a, t, p: c.MultiBoxTarget(sym.round(a * 4) / 4, t, p * 0, negative_mining_ratio=1.0)  # noqa: E731
    case("target ties", equal, grads=False, behind=False, **t)
    # CTC: nothing but blanks, padding in front, one step, labels of one class.
    case("ctc ties", lambda x, y: sym.CTCLoss(x * 0, y + 1), behind=False, x=(6, 2, 4), y=((2, 3), "i3"))
    case("ctc one step", lambda x, y: sym.CTCLoss(x, y + 1), behind=False, x=(1, 2, 4), y=((2, 1), "i3"))
    case("ctc padded", lambda x, y: sym.CTCLoss(x, y), behind=False, x=(7, 6, 3), y=((6, 3), "i3"))
    case("ctc padded last", lambda x, y: sym.CTCLoss(x, y - 1, blank_label="last"), behind=False, x=(7, 6, 4),
         y=((6, 3), "i4"))  # fmt: skip
    one = lambda x, y: sym.CTCLoss(x, sym.ones_like(y))  # noqa: E731
    case("ctc one class", one, behind=False, x=(7, 2, 3), y=((2, 3), "i2"))
    # Ties of sorting.
    case("topk value ties", lambda x: sym.topk(x, k=3, ret_typ="value"), grads=False, behind=False, x=((3, 8), "i3"))
    case("topk ascending ties", lambda x: sym.topk(x, k=3, is_ascend=True), grads=False, behind=False, x=((3, 8), "i3"))
    case("argsort down ties", lambda x: sym.argsort(x, is_ascend=False), grads=False, behind=False, x=((3, 8), "i3"))
    case("argmax ties", lambda x: sym.argmax(x, axis=1), grads=False, behind=False, x=((3, 8), "i3"))
    case("argmin ties", lambda x: sym.argmin(x, axis=1), grads=False, behind=False, x=((3, 8), "i3"))
    case("batch take beyond", lambda a, i: sym.batch_take(a, whole(i - 4)), grads=False, behind=False, a=(5, 3),
         i=((5,), "i9"))  # fmt: skip


def numpy_case(name, make, first, grads=True, behind=True, **given):
    """A case of `mx.np`: `make` takes the inputs of `first` as symbols of `mx.np`, and gives one or several."""

    def made(**v):
        found = make(*(v[n].as_np_ndarray() for n in first.split()))
        outs = [out.as_nd_ndarray() for out in (found if isinstance(found, (list, tuple)) else [found])]
        return sym.Group(outs) if len(outs) > 1 else outs[0]

    with mx.util.np_shape(True):
        case(name, made, grads, behind, **given)


def of_numpy():
    """`mx.np`, of which networks under `npx.set_np()` are made."""
    n, x = sym.np, sym.npx
    one, two = {"a": (3, 4)}, {"a": (3, 1, 4), "b": (2, 4)}

    def functions(names):
        return [(name, getattr(n, name)) for name in names.split()]

    unary = (
        "sign square exp expm1 sin cos tan sinh cosh tanh arctan arcsinh negative cbrt degrees radians absolute"
        " reciprocal"
    )
    for name in unary.split():
        numpy_case(f"np {name}", getattr(n, name), "a", **one)
    for name in "sqrt log log10 log2 log1p".split():
        numpy_case(f"np {name}", getattr(n, name), "a", a=((3, 4), "u"))
    for name, f in functions("arcsin arccos arctanh"):
        numpy_case(f"np {name}", lambda a, f=f: f(n.tanh(a)), "a", behind=False, **one)
    numpy_case("np arccosh", lambda a: n.arccosh(a + 1), "a", behind=False, a=((3, 4), "u"))
    for name in "ceil floor trunc fix rint".split():
        numpy_case(f"np {name}", getattr(n, name), "a", behind=False, **one)
    for name in "logical_not isnan isinf isfinite isneginf isposinf".split():
        numpy_case(f"np {name}", getattr(n, name), "a", grads=False, behind=False, a=((3, 4), "i2"))
    numpy_case("np relu", x.relu, "a", **one)
    numpy_case("np sigmoid", x.sigmoid, "a", **one)
    numpy_case("np around", lambda a: n.around(a, 1), "a", behind=False, **one)
    numpy_case("np round", lambda a: n.around(a * 10), "a", behind=False, **one)
    numpy_case("np nan_to_num", lambda a: n.nan_to_num(n.log(a)), "a", grads=False, **one)
    more = {"nan": 1.5, "posinf": 3.0, "neginf": -2.0}
    numpy_case("np nan_to_num set", lambda a: n.nan_to_num(n.log(n.maximum(a, -0.1)), **more), "a", grads=False, **one)
    for name in "add subtract multiply true_divide copysign arctan2 hypot maximum minimum mod".split():
        numpy_case(f"np {name}", getattr(n, name), "a b", **two)
    numpy_case("np power", n.power, "a b", a=((3, 1, 4), "u"), b=(2, 4))
    numpy_case("np ldexp", n.ldexp, "a b", **two)
    for name, f in functions("equal not_equal less less_equal greater greater_equal"):
        numpy_case(f"np {name}", f, "a b", grads=False, behind=False, a=((3, 4), "i2"), b=((4,), "i2"))
        numpy_case(f"np {name} number", lambda a, f=f: f(a, 1), "a", grads=False, behind=False,
                   a=((3, 4), "i3"))  # fmt: skip
    for name, f in functions("bitwise_and bitwise_or bitwise_xor lcm"):
        both = lambda a, b, f=f: f(a.astype("int32"), b.astype("int32")).astype("float32")  # noqa: E731
        numpy_case(f"np {name}", both, "a b", grads=False, a=((3, 4), "i9"), b=((4,), "i9"))
        number = lambda a, f=f: f(a.astype("int32"), 6).astype("float32")  # noqa: E731
        numpy_case(f"np {name} number", number, "a", grads=False, a=((3, 4), "i9"))
    numpy_case("np bitwise_not", lambda a: n.bitwise_not(a.astype("int32")).astype("float32"), "a", grads=False,
               a=((3, 4), "i9"))  # fmt: skip
    for name in "add subtract multiply true_divide copysign arctan2 hypot maximum minimum mod power ldexp".split():
        f = getattr(n, name)
        more = {"grads": name != "copysign", "behind": False, "a": ((3, 4), "u")}  # MXNet's gradient of it is an error
        numpy_case(f"np {name} number", lambda a, f=f: f(a, 0.8), "a", **more)
        numpy_case(f"np {name} whole number", lambda a, f=f: f(a, 2), "a", **more)
        if name not in ("hypot", "maximum", "minimum"):
            numpy_case(f"np {name} of a number", lambda a, f=f: f(1.7, a), "a", **more)
    # Whole numbers become floating where NumPy's do.
    for key, make in {
        "half": lambda a: a * 0.5, "plus": lambda a: a + 1, "over": lambda a: a / 2, "power": lambda a: a**2,
        "minus": lambda a: 1.5 - a, "modulo": lambda a: a % 3, "root": lambda a: n.sqrt(a), "mean": lambda a: a.mean(),
        "sum": lambda a: n.sum(a, axis=0), "greater": lambda a: a > 1, "exp": lambda a: n.exp(a),
        "negative": lambda a: -a, "sigmoid of half": lambda a: x.sigmoid(a / 2), "std": lambda a: n.std(a),
    }.items():  # fmt: skip
        whole = lambda a, f=make: f(a.astype("int32")).astype("float32")  # noqa: E731
        numpy_case(f"np whole {key}", whole, "a", grads=False, behind=False, a=((3, 4), "i5"))
    a = {"a": (2, 3, 4)}
    for name in "sum prod max min mean std var".split():
        f = getattr(n, name)
        numpy_case(f"np {name}", f, "a", **a)
        numpy_case(f"np {name} axis", lambda a, f=f: f(a, axis=(0, 2), keepdims=True), "a", behind=False, **a)
        numpy_case(f"np {name} last", lambda a, f=f: f(a, axis=-1), "a", behind=False, **a)
    numpy_case("np max ties", lambda a: n.max(n.around(a), axis=1), "a", behind=False, **a)
    numpy_case("np var ddof", lambda a: n.var(a, axis=1, ddof=1), "a", behind=False, **a)
    numpy_case("np std ddof", lambda a: n.std(a, ddof=2), "a", behind=False, **a)
    numpy_case("np sum dtype", lambda a: n.sum(a, axis=0, dtype="float32"), "a", behind=False, **a)
    for name in "any all".split():
        f = getattr(sym._internal, f"_np_{name}", None) or getattr(n, name)
        numpy_case(f"np {name}", lambda a, f=f: f(a > 0, axis=1).astype("float32"), "a", grads=False, behind=False,
                   a=((3, 4), "i2"))  # fmt: skip
    for name in "argmax argmin".split():
        f = getattr(n, name)
        numpy_case(f"np {name}", lambda a, f=f: f(a, axis=1), "a", grads=False, behind=False, **a)
        numpy_case(f"np {name} all", f, "a", grads=False, behind=False, **a)
    numpy_case("np average", lambda a: n.average(a, axis=1), "a", behind=False, **a)
    numpy_case("np average weights", lambda a, b: n.average(a, axis=1, weights=b), "a b", behind=False, a=(2, 3),
               b=((3,), "u"))  # fmt: skip
    numpy_case("np average returned", lambda a, b: n.average(a, weights=b, returned=True), "a b", behind=False,
               a=(2, 3), b=((2, 3), "u"))  # fmt: skip
    for key, more in {
        "default": {}, "two": {"ord": 2, "axis": 1}, "one": {"ord": 1, "axis": 2}, "three": {"ord": 3, "axis": (0,)},
        "axis": {"axis": (0, 2), "keepdims": True}, "fro": {"ord": "fro", "axis": (1, 2)},
        "inf": {"ord": "inf", "axis": 1}, "spectral": {"ord": 2, "axis": (1, 2)},
        "nuc": {"ord": "nuc", "axis": (1, 2)}, "matrix one": {"ord": 1, "axis": (1, 2)},
    }.items():  # fmt: skip
        numpy_case(f"np norm {key}", lambda a, m=more: n.linalg.norm(a, **m), "a", behind=False, **a)
    for key, more in {
        "default": {},
        "axis": {"axis": 1, "keepdims": True},
        "lower": {"interpolation": "lower"},
    }.items():
        numpy_case(f"np percentile {key}", lambda a, m=more: n.percentile(a, 30, **m), "a", grads=False, behind=False,
                   **a)  # fmt: skip
    numpy_case("np percentiles", lambda a, q: n.percentile(a, q * 40), "a q", grads=False, behind=False, a=(3, 4),
               q=((2,), "u"))  # fmt: skip
    numpy_case("np diff", lambda a: n.diff(a), "a", behind=False, **a)
    numpy_case("np diff set", lambda a: n.diff(a, n=2, axis=1), "a", behind=False, **a)
    numpy_case("np ediff1d", lambda a: n.ediff1d(a), "a", behind=False, **a)
    numpy_case("np ediff1d ends", lambda a: n.ediff1d(a, to_end=2.0, to_begin=-1.0), "a", behind=False, **a)
    numpy_case("np ediff1d arrays", lambda a, b, c: n.ediff1d(a, to_end=b, to_begin=c), "a b c", behind=False, a=(5,),
               b=(2,), c=(3,))  # fmt: skip
    numpy_case("np ediff1d end", lambda a, b: n.ediff1d(a, to_end=b), "a b", behind=False, a=(5,), b=(2,))
    numpy_case("np polyval", n.polyval, "p x", p=(3,), x=(2, 2))
    # Shapes
    for key, make in {
        "reshape": lambda a: n.reshape(a, (4, -1)), "reshape method": lambda a: a.reshape(3, -1),
        "npx reshape keep": lambda a: x.reshape(a, (-2, -1)), "npx reshape rest": lambda a: x.reshape(a, (2, -4)),
        "npx reshape join": lambda a: x.reshape(a, (-5, -2)),
        "npx reshape split": lambda a: x.reshape(a, (-2, -2, -6, 2, -1)),
        "npx reshape reverse": lambda a: x.reshape(a, (-1, -2), reverse=True),
        "npx reshape leave out": lambda a: x.reshape(n.expand_dims(a, 1), (-2, -3, -5)),
        "squeeze": lambda a: n.squeeze(n.expand_dims(a, 1)),
        "squeeze axis": lambda a: n.squeeze(n.expand_dims(n.expand_dims(a, 1), 0), axis=0),
        "transpose": lambda a: n.transpose(a), "transpose axes": lambda a: n.transpose(a, (1, 0, 2)),
        "swapaxes": lambda a: n.swapaxes(a, 0, 2), "moveaxis": lambda a: n.moveaxis(a, 0, -1),
        "moveaxis two": lambda a: n.moveaxis(a, (0, 1), (1, 2)), "roll": lambda a: n.roll(a, 3),
        "roll axis": lambda a: n.roll(a, (1, -1), axis=(0, 2)), "flip": lambda a: n.flip(a, 1),
        "flip all": lambda a: n.flip(a), "rot90": lambda a: n.rot90(a), "rot90 set": lambda a: n.rot90(a, 3, (1, 2)),
        "broadcast_to": lambda a: n.broadcast_to(a, (5, 2, 3, 4)), "tril": lambda a: n.tril(a, -1),
        "tril default": lambda a: n.tril(a), "diagonal": lambda a: n.diagonal(a),
        "diagonal set": lambda a: n.diagonal(a, 1, 1, 2), "trace": lambda a: n.trace(a),
        "trace set": lambda a: n.trace(a, -1, 2, 1), "diagflat": lambda a: n.diagflat(a[0, 0], 1),
        "diag": lambda a: n.diag(a[0]), "diag vector": lambda a: n.diag(a[0, 0], k=-1),
        "concatenate": lambda a: n.concatenate([a, a * 2], axis=1),
        "concatenate flat": lambda a: n.concatenate([a, a * 2], axis=None),
        "stack": lambda a: n.stack([a, a + 1], axis=2),
        "vstack": lambda a: n.vstack([a, a]),
        "column_stack": lambda a: n.column_stack([a[0], a[1]]), "split": lambda a: n.split(a, 2, axis=2)[1],
        "split at": lambda a: n.split(a, (1, 2), axis=1)[2], "hsplit": lambda a: n.hsplit(a, 3)[1],
        "dsplit": lambda a: n.dsplit(a, 2)[1], "hsplit at": lambda a: n.hsplit(a, (1,))[1],
        "cumsum": lambda a: n.cumsum(a, axis=1), "repeat": lambda a: n.repeat(a, 2, axis=1),
        "tile": lambda a: n.tile(a, 2),
        "at": lambda a: a[1], "part": lambda a: a[:, 1:3], "clip": lambda a: n.clip(a, -0.5, 0.5),
        "full_like": lambda a: n.full_like(a, 1.5) * a, "zeros_like": lambda a: n.zeros_like(a) + a,
        "pad": lambda a: n.pad(a, ((1, 2), (0, 0), (2, 1))),
        "pad value": lambda a: n.pad(a, ((1, 2), (0, 0), (2, 1)), constant_values=1.5),
        "pad edge": lambda a: n.pad(a, ((1, 2), (0, 0), (2, 1)), mode="edge"),
        "pad reflect": lambda a: n.pad(a, ((1, 0), (0, 0), (2, 1)), mode="reflect"),
        "pad symmetric": lambda a: n.pad(a, ((1, 0), (0, 0), (2, 1)), mode="symmetric"),
        "atleast_2d": lambda a: n.atleast_2d(a[0, 0]), "atleast_3d": lambda a: n.atleast_3d(a[0]),
    }.items():  # fmt: skip
        numpy_case(
            f"np shape {key}", make, "a", "pad " not in key or key == "pad value", False, **a
        )  # MXNet has no gradient
    # Arrays of numbers
    for key, make in {
        "zeros": lambda a: n.zeros((3, 4)) + a, "ones": lambda a: n.ones((4,)) + a, "arange": lambda a: n.arange(4) * a,
        "arange set": lambda a: n.arange(1, 3, 0.5) * a, "eye": lambda a: n.eye(3, 4) * a,
        "eye k": lambda a: n.eye(4, k=1)[:3] * a, "identity": lambda a: n.identity(4)[:3] * a,
        "full": lambda a: n.full((3, 4), 2.5) * a, "linspace": lambda a: n.linspace(0, 2, 4) * a,
        "logspace": lambda a: n.logspace(0, 1, 4) * a, "logspace set": lambda a: n.logspace(0, 2, 4, False, 2.0) * a,
        "blackman": lambda a: n.blackman(4) * a, "hamming": lambda a: n.hamming(4) * a,
        "hanning": lambda a: n.hanning(4) * a,
        "indices": lambda a: n.indices((3, 4)).astype("float32") * a,
        "where": lambda a: n.where(a > 0, a, a * 0.1), "where left": lambda a: n.where(a > 0, 2.0, a),
        "where right": lambda a: n.where(a > 0, a, -1.5), "where both": lambda a: n.where(a > 0, 1.0, 2.0) * a,
        "where broadcast": lambda a: n.where(n.arange(4) > 1, a, -a),
        "scalar": lambda a: a - n.mean(a) / n.std(a),
    }.items():  # fmt: skip
        numpy_case(f"np {key}", make, "a", behind=False, **one)
    numpy_case("np diag_indices_from", lambda a: n.diag_indices_from(a), "a", grads=False, behind=False, a=(3, 3))
    # Products and linear algebra
    for key, shapes in {
        "matrices": ((3, 4), (4, 2)), "vectors": ((4,), (4,)), "matrix and vector": ((3, 4), (4,)),
        "more axes": ((2, 3, 4), (4, 5)), "all": ((2, 3, 4), (5, 4, 2)),
    }.items():  # fmt: skip
        numpy_case(f"np dot {key}", n.dot, "a b", a=shapes[0], b=shapes[1])
    for key, shapes in {
        "matrices": ((3, 4), (4, 2)), "batch": ((2, 3, 4), (4, 5)), "broadcast": ((2, 1, 3, 4), (5, 4, 2)),
        "vector": ((3, 4), (4,)), "vectors": ((4,), (4,)),
    }.items():  # fmt: skip
        numpy_case(f"np matmul {key}", n.matmul, "a b", a=shapes[0], b=shapes[1])
    numpy_case("np tensordot", lambda a, b: n.tensordot(a, b, 1), "a b", behind=False, a=(2, 3, 4), b=(4, 5))
    axes = ((1, 2), (1, 0))
    numpy_case("np tensordot axes", lambda a, b: n.tensordot(a, b, axes), "a b", behind=False, a=(2, 3, 4), b=(4, 3, 5))
    numpy_case("np einsum", lambda a, b: n.einsum("ijk,kl->il", a, b), "a b", behind=False, a=(2, 3, 4), b=(4, 5))
    numpy_case("np einsum one", lambda a: n.einsum("iij->j", a), "a", behind=False, a=(3, 3, 4))
    numpy_case("np einsum optimize", lambda a, b: n.einsum("ij,jk", a, b, optimize=True), "a b", behind=False, a=(2, 3),
               b=(3, 4))  # fmt: skip
    la, spd = n.linalg, {"a": ((2, 3, 3), "s")}
    numpy_case("np cholesky", la.cholesky, "a", **spd)
    numpy_case("np svd", lambda a: la.svd(a)[1], "a", behind=False, a=(3, 4))
    numpy_case("np eigh", lambda a: la.eigh(a)[0], "a", behind=False, **spd)
    numpy_case("np eigvalsh", lambda a: la.eigvalsh(a, "U"), "a", grads=False, behind=False, **spd)
    numpy_case("np inv", la.inv, "a", **spd)
    numpy_case("np det", la.det, "a", behind=False, a=(3, 3))
    numpy_case("np slogdet", lambda a: la.slogdet(a)[1], "a", behind=False, a=(3, 3))
    numpy_case("np solve", la.solve, "a b", a=((3, 3), "s"), b=(3, 2))
    numpy_case("np solve batch", la.solve, "a b", behind=False, a=((2, 3, 3), "s"), b=(2, 3, 2))
    numpy_case("np pinv", lambda a: la.pinv(a), "a", grads=False, behind=False, a=(3, 4))
    numpy_case(
        "np pinv cut", lambda a, r: la.pinv(a, r / 9), "a r", grads=False, behind=False, a=(2, 3, 4), r=((2,), "u")
    )
    numpy_case("np tensorinv", lambda a: la.tensorinv(a.reshape(2, 3, 6)), "a", behind=False, a=((6, 6), "s"))
    numpy_case("np tensorsolve", lambda a, b: la.tensorsolve(a.reshape(2, 3, 6), b), "a b", behind=False,
               a=((6, 6), "s"), b=(2, 3))  # fmt: skip


def rare():
    """Sparse rows, regions that turn or move, processes of events, projections of recurrent layers."""
    c, i = sym.contrib, sym._internal
    rows = lambda x: sym.cast_storage(x, stype="row_sparse")  # noqa: E731
    for key, more in {"rows": {"axis": 1}, "keep": {"axis": 1, "keepdims": True}, "columns": {"axis": 0}}.items():
        case(f"square sum {key}", lambda x, m=more: i._square_sum(rows(x), **m), grads=False, behind=False, x=(4, 3))
    retain = lambda x, i: sym.cast_storage(sym.sparse.retain(rows(x), i), stype="default")  # noqa: E731
    case("retain", retain, grads=False, behind=False, x=(5, 3), i=((2,), "i5"))
    for key, more in {
        "default": {"sampling_ratio": 2}, "one": {"sampling_ratio": 1, "spatial_scale": 0.5}, "free": {},
    }.items():  # fmt: skip
        more = {"pooled_size": (2, 3), "spatial_scale": 1.0, **more}

        def turned(x, r, more=more):
            # Image, middle, size and angle of regions inside of the image and across its edge
            r = sym.abs(r)
            parts = [sym.slice_axis(r, axis=1, begin=k, end=k + 1) for k in range(6)]
            return c.RROIAlign(x, sym.concat(parts[0] * 0, *(p * 3 for p in parts[1:5]), parts[5] * 70, dim=1), **more)

        case(f"rroi align {key}", turned, grads=False, behind=False, x=(1, 3, 7, 6), r=(5, 6))
    trans = {"no_trans": False, "trans_std": 0.3, "part_size": 2, "sample_per_part": 2}
    for key, more, channels, moves in (
        ("plain", {"no_trans": True}, 12, None), ("moved", trans, 12, (5, 2, 2, 2)),
        ("classes", {**trans, "pooled_size": 3, "part_size": 3, "spatial_scale": 0.6, "output_dim": 4}, 16,
         (5, 4, 3, 3)),
        ("group", {**trans, "group_size": 1, "part_size": 0, "sample_per_part": 3}, 3, (5, 2, 2, 2)),
    ):  # fmt: skip
        options = {"spatial_scale": 1.0, "output_dim": 3, "group_size": 2, "pooled_size": 2, **more}
        pool = functools.partial(c.DeformablePSROIPooling, **options)
        given = {"x": (3, channels, 7, 6), "r": ((5, 5), "b4"), **({"t": moves} if moves else {})}
        make = lambda x, r, t=None, f=pool: f(x, r, *([t] if t is not None else []))  # noqa: E731
        case(f"deformable psroi {key}", make, **given)
    shapes = {"mu": ((2, 3), "u"), "alpha": ((3,), "u"), "beta": ((3,), "u"), "state": ((2, 3), "u"),
              "lags": ((2, 6), "u"), "marks": ((2, 6), "i3"), "length": ((2,), "i6"), "end": ((2,), "u")}  # fmt: skip

    def hawkes(mu, alpha, beta, state, lags, marks, length, end):
        return c.hawkesll(mu, alpha / 2, beta, sym.BlockGrad(state), sym.BlockGrad(lags), whole(marks),
                          sym.BlockGrad(length), sym.BlockGrad(end + 6))  # fmt: skip

    case("hawkes", lambda **v: hawkes(**v)[0], behind=False, **shapes)
    # Without the likelihood MXNet computes no states.
    case("hawkes states", lambda **v: sym.Group(list(hawkes(**v))), grads=False, behind=False, **shapes)
    for key, more, states in (
        ("one", {"num_layers": 1, "state_outputs": True}, 1),
        ("both ways", {"num_layers": 2, "bidirectional": True, "state_outputs": True}, 4),
    ):
        lstm = functools.partial(sym.RNN, state_size=4, projection_size=3, mode="lstm", **more)
        make = lambda x, s, c, f=lstm: sym.Group(list(f(x, sym.var("w"), s, c)))  # noqa: E731
        case(f"rnn projection {key}", make, grads=False, behind=False, x=(5, 2, 3), s=(states, 2, 3), c=(states, 2, 4))
    resize = sym.image.resize
    for key, more in {
        "default": {"size": (4, 7)}, "nearest": {"size": (4, 7), "interp": 0}, "cubic": {"size": (9, 3), "interp": 2},
        "short side": {"size": (4,), "keep_ratio": True}, "square": {"size": (6,)}, "half": {"size": (3, 2)},
    }.items():  # fmt: skip
        case(f"image resize {key}", lambda x, m=more: resize(x, **m), grads=False, behind=False, x=((5, 6, 3), "u"))
    case("image resize batch", lambda x: resize(x, size=(4, 7)), grads=False, behind=False, x=((2, 5, 6, 3), "u"))


def loops_and_branches():
    """Operators that have graphs inside, of layers and of arrays from around them, one in the other."""
    c, dense = sym.contrib, sym.FullyConnected

    def cell(x, states, count=3):
        h = sym.tanh(dense(x, num_hidden=count, name="i2h") + dense(states[0], num_hidden=count, name="h2h"))
        return h * 2, [h]

    def several(x):
        return sym.Group([out for each in x for out in (each if isinstance(each, list) else [each])])

    case("foreach cell", lambda x, s: several(c.foreach(cell, x, [s])), x=(4, 2, 5), s=(2, 3))
    case(
        "foreach states only", lambda x, s: several(c.foreach(lambda x, s: ([], [s[0] * x]), x, [s])), x=(3, 2), s=(2,)
    )
    case("foreach no states", lambda x, y: several(c.foreach(lambda x, s: (x * y, []), x, [])), x=(3, 2), y=(2,))
    two = lambda x, y, s, t, u: several(  # noqa: E731
        c.foreach(lambda v, s: ([v[0] * u + s[1], v[1] * 2], [s[0] + v[0], s[1] * u]), [x, y], [s, t])
    )
    case("foreach two", two, behind=False, x=(3, 2), y=(3,), s=(2,), t=(2,), u=(2,))

    def inner(x, s):
        rows, last = c.foreach(lambda y, t: (y * t[0], [t[0] + y]), x, [s[0]])
        return rows, [last[0] * 0.5]

    case("foreach nested", lambda x, s: several(c.foreach(inner, x, [s])), x=(3, 4, 2), s=(2,))
    lstm = gluon.rnn.LSTMCell(4, prefix="lstm_")
    long = lambda x, h, s: several(c.foreach(lambda x, s: lstm(x, s), x, [h, s]))  # noqa: E731
    case("foreach lstm", long, x=(5, 2, 3), h=(2, 4), s=(2, 4))

    positive = lambda x: sym.sum(x) > 0  # noqa: E731
    for key, offset in ("then", 9), ("else", -9):
        chosen = lambda x, y, n=offset: c.cond(positive(x + n), lambda: x * y, lambda: x - sym.tanh(y))  # noqa: E731
        # Behind another operator MXNet's gradient of what a branch does not take is memory that nothing wrote to.
        case(f"cond {key}", chosen, behind=False, x=(2, 3), y=(2, 3))
        inside = lambda x, y, f=chosen: sym.tanh(f(x * 2, sym.tanh(y)))  # noqa: E731
        case(f"cond {key} inside", inside, grads=False, behind=False, x=(2, 3), y=(2, 3))
        layers = lambda x, w, v, b, n=offset: c.cond(  # noqa: E731
            positive(x + n), lambda: dense(x, w, b, num_hidden=2), lambda: dense(x, v, b, num_hidden=2)
        )
        case(f"cond layers {key}", layers, behind=False, x=(2, 3), w=(2, 3), v=(2, 3), b=(2,))

    # Behind the last step MXNet's outputs are memory that nothing wrote to, so they are cut.
    for key, most, steps in ("ends", 6, 3), ("is cut", 2, 2):

        def looped(i, x, y, most=most, steps=steps):
            start = sym.BlockGrad(i) * 0
            out, last = c.while_loop(
                lambda n, z: n < 3, lambda n, z: (z * y, [n + 1, sym.tanh(z) + y]), [start, x], max_iterations=most
            )
            return several([sym.slice_axis(out, axis=0, begin=0, end=steps), last[1]])

        case(f"while {key}", looped, i=(1,), x=(2, 3), y=(2, 3))
    none = lambda i, x: c.while_loop(  # noqa: E731
        lambda n, z: n < 0, lambda n, z: (z, [n + 1, z * 2]), [sym.BlockGrad(i) * 0, x], max_iterations=3
    )[1][1]
    case("while none", none, i=(1,), x=(2, 3))
    layer = lambda i, x, w, b: c.while_loop(  # noqa: E731
        lambda n, z: n < 3, lambda n, z: ([], [n + 1, dense(z, w, b, num_hidden=3)]), [sym.BlockGrad(i) * 0, x],
        max_iterations=4,
    )[1][1]  # fmt: skip
    case("while layer", layer, i=(1,), x=(2, 3), w=(3, 3), b=(3,))


def main():
    for part in (amp_and_elementwise, arrays, attention, ctc, images, boxes, linear_algebra, densities):
        part()
    further_attributes()
    of_numpy()
    rare()
    loops_and_branches()
    if not ONLY:
        # One array of all numbers of a dtype: in a file of many arrays each takes more bytes than its few numbers.
        places = [[key, list(a.shape), str(a.dtype)] for key, a in ARRAYS.items()]
        dtypes = dict.fromkeys(dtype for _, _, dtype in places)
        numbers = {dtype: [a.ravel() for a in ARRAYS.values() if str(a.dtype) == dtype] for dtype in dtypes}
        numbers = {dtype: np.concatenate(arrays) for dtype, arrays in numbers.items()}
        content = json.dumps({"version": mx.__version__, "cases": CASES, "places": places}, sort_keys=True).encode()
        (FOLDER / "mxnet_operators.json.gz").write_bytes(gzip.compress(content, 9, mtime=0))
        np.savez_compressed(str(FOLDER / "mxnet_operators.npz"), **numbers)
    print(len(CASES), "cases")


if __name__ == "__main__":
    main()
