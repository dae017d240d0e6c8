"""Networks of MXNet 1.9.1, and what MXNet computes with them, for tools/mxnet_models.py.

It runs where MXNet does, see tools/record_mxnet_symbols.py, and needs nothing of jaxpar:

    mxnet38/bin/python tools/mxnet_models_there.py FOLDER [NAME ...]
    mxnet38/bin/python tools/mxnet_models_there.py tests/reference --record

The second form writes what tests/mxnet/test_mxnet_models.py needs of a few networks, and makes all arrays by `rule`.

The networks are those of MXNet's examples, written again as small as their operators allow, and one of each family of
Gluon's model zoo, of gluoncv and of gluonnlp where these are installed. For each the folder gets

    NAME-symbol.json, NAME-0000.params    as `mx.model.save_checkpoint` writes them
    NAME.npz                              inputs, outputs in evaluation, in training, and the arrays after a step of SGD

and, as "shaken ...", the same of inputs that are off by the last bit of float32: what differs as much here as there is
rounding.

For the step dropout is off, for its random numbers are MXNet's own: NAME-train-symbol.json is that network. The
gradient is that of the loss layers, or of the sum of the outputs times `head` where there are none.
"""

import gzip
import json
import math
import os
import pathlib
import sys
import tempfile
import traceback

os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"

import mxnet as mx
import numpy as np
from mxnet import gluon, sym
from mxnet_rule import rule

v = sym.var
LR = 0.05
LOSSES = ("SoftmaxOutput", "Softmax", "SVMOutput", "MakeLoss", "make_loss")  # and those of regression
IMAGE, LABEL = (2, 3, 64, 64), ((2,), "i4")
TRAINED = ("weight", "bias", "gamma", "beta", "alpha", "_mean", "_var", "state")
RECORDED = ("unet", "attention", "deep_speech", "noise_contrastive", "capsule", "inception_v3")
NETWORKS = {}


def network(**shapes):
    """A function that makes a symbol, with the shape, or (shape, kind), of each input."""

    def register(function):
        NETWORKS[function.__name__] = function, shapes
        return function

    return register


def dense(x, count, name, act="relu"):
    x = sym.FullyConnected(x, num_hidden=count, name=name)
    return sym.Activation(x, act_type=act, name=f"{name}_{act}") if act else x


def conv(x, count, name, kernel=3, stride=1, pad=None, act="relu", norm=False, groups=1, bias=None, **more):
    """A convolution, with batch norm and an activation where they are asked for."""
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    pad = tuple(k // 2 for k in kernel) if pad is None else (pad, pad) if isinstance(pad, int) else pad
    options = {
        "stride": (stride, stride),
        "pad": pad,
        "num_group": groups,
        "no_bias": norm if bias is None else not bias,
    }
    x = sym.Convolution(x, num_filter=count, kernel=kernel, name=name, **options, **more)
    x = sym.BatchNorm(x, fix_gamma=False, eps=2e-5, momentum=0.9, name=f"{name}_bn") if norm else x
    return sym.Activation(x, act_type=act, name=f"{name}_{act}") if act else x


def pool(x, kind="max", kernel=3, stride=2, pad=0, name=None, **more):
    return sym.Pooling(x, kernel=(kernel,) * 2, stride=(stride,) * 2, pad=(pad,) * 2, pool_type=kind, name=name, **more)


def global_pool(x):
    return sym.Flatten(sym.Pooling(x, kernel=(7, 7), global_pool=True, pool_type="avg"))


def softmax(x, count=4, name="softmax"):
    return sym.SoftmaxOutput(sym.FullyConnected(sym.Flatten(x), num_hidden=count, name="fc_last"), name=name)


# Images


@network(data=(3, 1, 28, 28), softmax_label=((3,), "i4"))
def mlp():
    x = sym.Flatten(v("data"))
    return softmax(dense(dense(x, 16, "fc1"), 8, "fc2"))


@network(data=(3, 1, 28, 28), softmax_label=((3,), "i4"))
def lenet():
    x = pool(conv(v("data"), 4, "conv1", 5, pad=0, act="tanh"), kernel=2)
    x = pool(conv(x, 6, "conv2", 5, pad=0, act="tanh"), kernel=2)
    return softmax(dense(sym.Flatten(x), 10, "fc1", "tanh"))


@network(data=(2, 3, 224, 224), softmax_label=LABEL)
def alexnet():
    x = conv(v("data"), 6, "conv1", 11, 4, 0)
    x = pool(sym.LRN(x, alpha=0.0001, beta=0.75, knorm=2, nsize=5))
    x = conv(x, 8, "conv2", 5, pad=2)
    x = pool(sym.LRN(x, alpha=0.0001, beta=0.75, knorm=2, nsize=5))
    x = pool(conv(conv(conv(x, 8, "conv3"), 8, "conv4"), 6, "conv5"))
    for i in (1, 2):
        x = sym.Dropout(dense(sym.Flatten(x) if i == 1 else x, 12, f"fc{i}"), p=0.5)
    return softmax(x)


@network(data=IMAGE, softmax_label=LABEL)
def vgg():
    x = v("data")
    for stage, (layers, count) in enumerate(((1, 4), (1, 6), (2, 8), (2, 8), (2, 8)), 1):
        for i in range(layers):
            x = conv(x, count, f"conv{stage}_{i + 1}", norm=stage > 2, bias=True)
        x = pool(x, kernel=2, name=f"pool{stage}")
    for i in (6, 7):
        x = sym.Dropout(dense(sym.Flatten(x), 12, f"fc{i}"), p=0.5)
    return softmax(x)


def inception(x, name, one, reduce3, three, reduce5, five, proj, norm=False):
    branches = [
        conv(x, one, f"{name}_1x1", 1, norm=norm),
        conv(conv(x, reduce3, f"{name}_3x3_reduce", 1, norm=norm), three, f"{name}_3x3", norm=norm),
        conv(conv(x, reduce5, f"{name}_5x5_reduce", 1, norm=norm), five, f"{name}_5x5", 5, norm=norm),
        conv(pool(x, "max", 3, 1, 1), proj, f"{name}_proj", 1, norm=norm),
    ]
    return sym.Concat(*branches, name=f"ch_concat_{name}_chconcat")


@network(data=(2, 3, 96, 96), softmax_label=LABEL)
def googlenet():
    x = pool(conv(v("data"), 6, "conv1", 7, 2))
    x = pool(conv(conv(x, 6, "conv2", 1), 8, "conv3"))
    x = inception(x, "in3a", 4, 4, 6, 2, 3, 3)
    x = pool(inception(x, "in3b", 6, 6, 8, 3, 4, 4))
    x = inception(x, "in4a", 6, 4, 8, 2, 3, 4)
    return softmax(global_pool(inception(x, "in5a", 6, 6, 8, 3, 4, 4)))


@network(data=(2, 3, 96, 96), softmax_label=LABEL)
def inception_bn():
    x = pool(conv(v("data"), 6, "1", 7, 2, norm=True))
    x = inception(x, "3a", 4, 4, 6, 2, 3, 3, norm=True)
    left = conv(conv(x, 4, "3c_3x3_reduce", 1, norm=True), 6, "3c_3x3", stride=2, norm=True)
    right = conv(conv(conv(x, 4, "3c_d_reduce", 1, norm=True), 4, "3c_d_0", norm=True), 4, "3c_d_1", 3, 2, norm=True)
    x = sym.Concat(left, right, pool(x, "max", 3, 2, 1), name="ch_concat_3c_chconcat")
    return softmax(global_pool(inception(x, "5a", 6, 6, 8, 3, 4, 4, norm=True)))


@network(data=(3, 3, 28, 28), softmax_label=((3,), "i4"))
def inception_bn_28_small():
    x = conv(v("data"), 6, "conv1", norm=True)
    for i in range(2):
        x = sym.Concat(conv(x, 3, f"in{i}_1x1", 1, norm=True), conv(x, 4, f"in{i}_3x3", norm=True))
    x = sym.Concat(conv(x, 5, "down_conv", 3, 2, 1, norm=True), pool(x, "max", 3, 2, 1))
    return softmax(sym.Flatten(pool(x, "avg", 7, 1)))


@network(data=(2, 3, 139, 139), softmax_label=LABEL)
def inception_v3():
    x = conv(v("data"), 4, "conv", 3, 2, 0, norm=True)
    x = conv(conv(x, 4, "conv_1", 3, 1, 0, norm=True), 6, "conv_2", norm=True)
    x = pool(conv(pool(x), 6, "conv_3", 1, pad=0, norm=True))
    tower = conv(conv(x, 3, "mixed_tower_conv", 1, norm=True), 4, "mixed_tower_conv_1", 5, norm=True)
    x = sym.Concat(
        conv(x, 4, "mixed_conv", 1, norm=True), tower, conv(pool(x, "avg", 3, 1, 1), 3, "pool_conv", 1, norm=True)
    )
    # Factorized: 1x7 and 7x1, and in the last blocks two in parallel.
    y = conv(conv(x, 4, "mixed_4_conv", (1, 7), norm=True), 4, "mixed_4_conv_1", (7, 1), norm=True)
    x = sym.Concat(conv(x, 4, "mixed_4", 1, norm=True), y)
    x = sym.Concat(
        conv(x, 6, "mixed_9_1x3", (1, 3), norm=True),
        conv(x, 6, "mixed_9_3x1", (3, 1), norm=True),
        pool(x, "max", 3, 1, 1),
    )
    return softmax(sym.Dropout(global_pool(x), p=0.5))


@network(data=(2, 3, 107, 107), softmax_label=LABEL)
def inception_v4():
    x = conv(conv(v("data"), 4, "conv1", 3, 2, 0, norm=True), 4, "conv2", 3, 1, 0, norm=True)
    x = sym.Concat(pool(x), conv(x, 4, "stem", 3, 2, 0, norm=True), name="stem_concat")
    a = conv(conv(x, 4, "a1", 1, norm=True), 6, "a2", norm=True)
    x = sym.Concat(conv(pool(x, "avg", 3, 1, 1, pooling_convention="full"), 4, "a0", 1, norm=True), a)
    x = sym.Concat(pool(x, pooling_convention="valid"), conv(x, 6, "reduce_a", 3, 2, 0, norm=True))
    b = conv(conv(conv(x, 4, "b1", 1, norm=True), 4, "b2", (1, 7), norm=True), 6, "b3", (7, 1), norm=True)
    return softmax(sym.Dropout(global_pool(sym.Concat(x, b)), p=0.2))


@network(data=(2, 3, 75, 75), softmax_label=LABEL)
def inception_resnet_v2():
    x = pool(conv(v("data"), 8, "conv1a", 3, 2, 0, norm=True))
    for i in range(3):
        mixed = sym.Concat(
            conv(x, 3, f"b{i}_0", 1, norm=True), conv(conv(x, 3, f"b{i}_1", 1, norm=True), 4, f"b{i}_2", norm=True)
        )
        x = x + 0.17 * conv(mixed, 8, f"b{i}_out", 1, act=None, norm=True)
        x = sym.Activation(x, act_type="relu")
    return softmax(sym.Dropout(global_pool(x), p=0.2))


def residual(version, groups=1, squeeze=False):
    x = v("data")
    x = sym.BatchNorm(x, fix_gamma=True, eps=2e-5, momentum=0.9, name="bn_data") if version == 2 else x
    x = conv(x, 8, "conv0", 3, norm=version == 1, act="relu" if version == 1 else None, bias=False)
    for stage, count in enumerate((8, 16), 1):
        for unit in (1, 2):
            name, stride, short = f"stage{stage}_unit{unit}", 1 + (stage == 2 and unit == 1), x
            if version == 2:
                x = sym.Activation(sym.BatchNorm(x, fix_gamma=False, eps=2e-5, name=f"{name}_bn1"), act_type="relu")
                short = short if unit == 2 else conv(x, count, f"{name}_sc", 1, stride, 0, None, bias=False)
                x = conv(x, count // 4, f"{name}_conv1", 1, act="relu", norm=True)
                x = conv(
                    conv(x, count // 4, f"{name}_conv2", 3, stride, norm=True),
                    count,
                    f"{name}_conv3",
                    1,
                    act=None,
                    bias=False,
                )
            else:
                short = short if unit == 2 else conv(x, count, f"{name}_sc", 1, stride, 0, None, norm=True)
                x = conv(
                    conv(x, count, f"{name}_conv1", 1, norm=True),
                    count,
                    f"{name}_conv2",
                    3,
                    stride,
                    norm=True,
                    groups=groups,
                )
                x = conv(x, count, f"{name}_conv3", 1, act=None, norm=True)
            if squeeze:
                s = dense(dense(global_pool(x), 4, f"{name}_se1"), count, f"{name}_se2", "sigmoid")
                x = sym.broadcast_mul(x, sym.reshape(s, shape=(-1, count, 1, 1)))
            x = sym.elemwise_add(x, short, name=f"{name}_plus")
            x = x if version == 2 else sym.Activation(x, act_type="relu", name=f"{name}_relu")
    if version == 2:
        x = sym.Activation(sym.BatchNorm(x, fix_gamma=False, eps=2e-5, name="bn1"), act_type="relu", name="relu1")
    return softmax(global_pool(x))


@network(data=(3, 3, 32, 32), softmax_label=((3,), "i4"))
def resnet_v1():
    return residual(1)


@network(data=(3, 3, 32, 32), softmax_label=((3,), "i4"))
def resnet_v2():
    return residual(2)


@network(data=(3, 3, 32, 32), softmax_label=((3,), "i4"))
def resnext():
    return residual(1, groups=4)


@network(data=(3, 3, 32, 32), softmax_label=((3,), "i4"))
def senet():
    return residual(1, groups=2, squeeze=True)


@network(data=(3, 3, 32, 32), softmax_label=((3,), "i4"))
def densenet():
    x = conv(v("data"), 8, "conv0", bias=False, act=None)
    for block in (1, 2):
        for i in range(3):
            y = sym.Activation(sym.BatchNorm(x, fix_gamma=False, name=f"b{block}_{i}_bn1"), act_type="relu")
            y = conv(y, 8, f"b{block}_{i}_conv1", 1, norm=True)
            x = sym.Concat(x, sym.Dropout(conv(y, 4, f"b{block}_{i}_conv2", act=None, bias=False), p=0.2))
        x = sym.Activation(sym.BatchNorm(x, fix_gamma=False, name=f"t{block}_bn"), act_type="relu")
        x = pool(conv(x, 8, f"t{block}_conv", 1, act=None, bias=False), "avg", 2)
    return softmax(global_pool(x))


@network(data=(3, 3, 32, 32), softmax_label=((3,), "i4"))
def mobilenet():
    x = conv(v("data"), 8, "conv1", 3, 2, norm=True)
    for i, (count, stride) in enumerate(((8, 1), (12, 2), (12, 1), (16, 2)), 2):
        before = 8 if i < 4 else 12
        x = conv(x, before, f"conv{i}_dw", 3, stride, norm=True, groups=before)
        x = conv(x, count, f"conv{i}_sep", 1, norm=True)
    return softmax(global_pool(x))


@network(data=(3, 3, 32, 32), softmax_label=((3,), "i4"))
def mobilenet_v2():
    def relu6(x):
        return sym.clip(x, 0, 6, name=f"{x.name}_relu6")

    x = relu6(conv(v("data"), 8, "first", 3, 2, norm=True, act=None))
    for i in range(3):
        y = relu6(conv(x, 16, f"seq{i}_exp", 1, norm=True, act=None))
        y = relu6(conv(y, 16, f"seq{i}_dw", 3, norm=True, groups=16, act=None))
        x = sym.elemwise_add(conv(y, 8, f"seq{i}_linear", 1, norm=True, act=None), x, name=f"seq{i}_plus")
    x = sym.Pooling(x, kernel=(7, 7), global_pool=True, pool_type="avg")
    return sym.SoftmaxOutput(sym.Flatten(conv(x, 4, "fc7", 1, act=None)), name="softmax")


@network(data=IMAGE, softmax_label=LABEL)
def squeezenet():
    x = pool(conv(v("data"), 6, "conv1", 7, 2, 0))
    for i in (2, 3):
        s = conv(x, 4, f"fire{i}_squeeze", 1)
        x = sym.Concat(conv(s, 6, f"fire{i}_expand1", 1), conv(s, 6, f"fire{i}_expand3"), dim=1)
    x = conv(sym.Dropout(pool(x), p=0.5), 4, "conv10", 1)
    return sym.SoftmaxOutput(global_pool(x), name="softmax")


@network(data=(3, 3, 32, 32), softmax_label=((3,), "i4"))
def shufflenet():
    x = conv(v("data"), 12, "conv1", 3, 2, norm=True)
    for i in range(2):
        y = conv(x, 6, f"u{i}_g1", 1, norm=True, groups=3)
        y = sym.reshape(sym.reshape(y, shape=(0, -4, 3, -1, -2)).swapaxes(1, 2), shape=(0, -3, -2))
        y = conv(y, 6, f"u{i}_dw", 3, norm=True, act=None, groups=6)
        y = conv(y, 12, f"u{i}_g2", 1, norm=True, act=None, groups=3)
        x = sym.Activation(x + y, act_type="relu")
    return softmax(global_pool(x))


@network(data=(2, 3, 48, 48), softmax_label=LABEL)
def darknet():
    def leaky(x):
        return sym.LeakyReLU(x, act_type="leaky", slope=0.1)

    x = pool(leaky(conv(v("data"), 6, "conv1", norm=True, act=None)), kernel=2)
    x = leaky(conv(x, 8, "conv2", norm=True, act=None))
    y = leaky(conv(pool(x, kernel=2), 8, "conv3", norm=True, act=None))
    x = sym.Concat(sym.space_to_depth(x, block_size=2), y)  # the "reorg" of YOLO2
    return softmax(global_pool(leaky(conv(x, 6, "conv4", 1, act=None))))


@network(data=(2, 3, 28, 28), softmax_label=LABEL)
def spatial_transformer():
    data = v("data")
    loc = dense(sym.Flatten(pool(conv(data, 4, "loc_conv", 5, 2), "avg")), 6, "stn_loc", None)
    x = sym.SpatialTransformer(
        data, loc * 0.1 + 0.3, target_shape=(14, 14), transform_type="affine", sampler_type="bilinear"
    )
    return softmax(pool(conv(x, 6, "conv1", 5)))


@network(data=(2, 3, 24, 24), softmax_label=LABEL)
def deformable():
    x = conv(v("data"), 4, "conv1")
    offset = conv(x, 18, "offset", act=None)
    return softmax(
        global_pool(sym.contrib.DeformableConvolution(x, offset, num_filter=6, kernel=(3, 3), pad=(1, 1), name="dcn"))
    )


@network(data=(2, 3, 112, 112), softmax_label=LABEL)
def arcface():
    x = (v("data") - 127.5) * 0.0078125
    x = sym.LeakyReLU(conv(x, 6, "conv0", 3, 2, norm=True, act=None), act_type="prelu", name="relu0")
    x = sym.BatchNorm(
        sym.LeakyReLU(conv(x, 6, "conv1", 3, 2, norm=True, act=None), act_type="prelu", name="relu1"), name="bn1"
    )
    x = sym.FullyConnected(sym.Dropout(sym.Flatten(pool(x, "avg", 7, 7)), p=0.4), num_hidden=8, name="pre_fc1")
    x = sym.BatchNorm(x, fix_gamma=True, eps=2e-5, name="fc1")
    # The margin of ArcFace on the angle to the row of the label.
    label = v("softmax_label")
    weight = sym.L2Normalization(v("fc7_weight", shape=(4, 8)), mode="instance")
    cos = sym.FullyConnected(
        sym.L2Normalization(x, mode="instance") * 64, weight, no_bias=True, num_hidden=4, name="fc7"
    )
    theta = sym.arccos(sym.clip(sym.pick(cos, label, axis=1) / 64, -0.99, 0.99))
    more = sym.expand_dims(64 * sym.cos(theta + 0.5) - sym.pick(cos, label, axis=1), 1)
    out = cos + sym.broadcast_mul(sym.one_hot(label, depth=4, on_value=1.0, off_value=0.0), more)
    return sym.Group([sym.BlockGrad(x), sym.SoftmaxOutput(out, label, name="softmax", normalization="valid")])


@network(data=(2, 3, 24, 24), label=((2, 2), "i2"), softmax_label=LABEL)
def mtcnn():
    def prelu(x, name):
        return sym.LeakyReLU(x, act_type="prelu", name=name)

    x = pool(prelu(conv(v("data"), 6, "conv1", pad=0, act=None), "prelu1"), pooling_convention="full")
    x = prelu(conv(x, 8, "conv2", pad=0, act=None), "prelu2")
    x = prelu(sym.FullyConnected(x, num_hidden=12, name="conv4"), "prelu4")
    box = sym.LinearRegressionOutput(dense(x, 2, "bbox_pred", None), v("label"), grad_scale=0.5, name="bbox")
    return sym.Group(
        [sym.SoftmaxOutput(dense(x, 2, "cls", None), use_ignore=True, ignore_label=3, name="softmax"), box]
    )


@network(data=(2, 3, 20, 60), softmax_label=((2, 4), "i4"))
def captcha():
    x = dense(sym.Flatten(pool(conv(pool(conv(v("data"), 4, "c1", 5)), 4, "c2"))), 12, "fc1")
    digits = [dense(x, 5, f"fc2{i}", None) for i in range(4)]
    label = sym.Reshape(sym.transpose(v("softmax_label")), shape=(-1,))
    return sym.SoftmaxOutput(sym.Concat(*digits, dim=0), label, name="softmax")


@network(data=(3, 1, 28, 28), svm_label=((3,), "i4"))
def svm():
    x = dense(sym.Flatten(v("data")), 12, "fc1")
    return sym.SVMOutput(
        dense(x, 4, "fc2", None), name="svm", margin=1.0, regularization_coefficient=0.5, use_linear=True
    )


@network(data=(3, 1, 28, 28), softmax1_label=((3,), "i4"), softmax2_label=((3,), "i2"))
def multi_task():
    x = dense(sym.Flatten(v("data")), 12, "fc1")
    return sym.Group([sym.SoftmaxOutput(dense(x, n, f"out{n}", None), name=f"softmax{i}") for i, n in ((1, 4), (2, 2))])


# Detection and segmentation


def ssd(training):
    x, heads = conv(v("data"), 6, "conv1"), []
    for i in range(3):
        x = pool(conv(x, 8, f"conv{i + 2}"), kernel=2)
        y = sym.L2Normalization(x, mode="channel", name=f"norm{i}") * 20 if i == 0 else x
        sizes, ratios = [0.2 + 0.3 * i, 0.3 + 0.3 * i], [1, 2, 0.5]
        count = len(sizes) + len(ratios) - 1
        loc = sym.Flatten(sym.transpose(conv(y, count * 4, f"loc{i}", act=None), axes=(0, 2, 3, 1)))
        cls = sym.Flatten(sym.transpose(conv(y, count * 3, f"cls{i}", act=None), axes=(0, 2, 3, 1)))
        prior = sym.Flatten(sym.contrib.MultiBoxPrior(y, sizes=sizes, ratios=ratios, clip=False, steps=(-1.0, -1.0)))
        heads.append((loc, cls, prior))
    loc, cls, prior = (sym.Concat(*parts, dim=1) for parts in zip(*heads))  # noqa: B905
    prior = sym.Reshape(prior, shape=(0, -1, 4))
    cls = sym.transpose(sym.Reshape(cls, shape=(0, -1, 3)), axes=(0, 2, 1))
    if not training:
        scores = sym.SoftmaxActivation(cls, mode="channel")
        return sym.contrib.MultiBoxDetection(scores, loc, prior, nms_threshold=0.5, nms_topk=20, name="detection")
    target = sym.contrib.MultiBoxTarget(
        prior,
        v("label"),
        cls,
        overlap_threshold=0.5,
        ignore_label=-1,
        negative_mining_ratio=3,
        minimum_negative_samples=0,
        negative_mining_thresh=0.5,
        variances=(0.1, 0.1, 0.2, 0.2),
    )
    options = {
        "ignore_label": -1,
        "use_ignore": True,
        "grad_scale": 1.0,
        "multi_output": True,
        "normalization": "valid",
    }
    cls_prob = sym.SoftmaxOutput(cls, target[2], name="cls_prob", **options)
    loss = sym.MakeLoss(
        sym.smooth_l1(target[1] * (loc - target[0]), scalar=1.0), normalization="valid", name="loc_loss"
    )
    return sym.Group([cls_prob, loss, sym.MakeLoss(target[2], grad_scale=0, name="cls_label")])


@network(data=(2, 3, 32, 32), label=((2, 3, 5), "b0.4"))
def ssd_train():
    return ssd(True)


@network(data=(2, 3, 32, 32))
def ssd_detect():
    return ssd(False)


@network(data=(1, 3, 64, 64), im_info=((1, 3), "w0.02"))
def faster_rcnn():
    x = v("data")
    for i in range(3):
        x = pool(conv(x, 6, f"conv{i}"), kernel=2)
    y = conv(x, 8, "rpn_conv")
    score = sym.Reshape(conv(y, 12, "rpn_cls", 1, act=None), shape=(0, 2, -1, 0))
    score = sym.Reshape(sym.SoftmaxActivation(score, mode="channel"), shape=(0, 12, -1, 0))
    rois = sym.contrib.Proposal(
        cls_prob=score,
        bbox_pred=conv(y, 24, "rpn_bbox", 1, act=None) * 0.1,
        im_info=v("im_info") * 0 + 64,
        feature_stride=8,
        scales=(2, 4),
        ratios=(0.5, 1, 2),
        rpn_pre_nms_top_n=50,
        rpn_post_nms_top_n=8,
        threshold=0.7,
        rpn_min_size=4,
    )
    x = sym.ROIPooling(x, rois, pooled_size=(3, 3), spatial_scale=1 / 8, name="roi_pool")
    x = dense(sym.Flatten(x), 8, "fc6")
    return sym.Group([sym.softmax(dense(x, 3, "cls_score", None)), dense(x, 12, "bbox_pred", None)])


@network(data=(1, 3, 40, 44), softmax_label=((1, 40 * 44), "i3"))
def fcn():
    data = v("data")
    x = sym.Convolution(data, kernel=(3, 3), pad=(12, 12), num_filter=4, name="conv1")
    x = pool(sym.Activation(x, act_type="relu"), kernel=2, pooling_convention="full")
    low = pool(conv(x, 6, "conv2"), kernel=2, pooling_convention="full")
    score = conv(low, 3, "score", 1, act=None)
    up = sym.Deconvolution(score, kernel=(4, 4), stride=(2, 2), num_filter=3, no_bias=True, name="score2")
    fused = sym.Crop(up, conv(x, 3, "score_pool", 1, act=None), num_args=2, offset=(1, 1)) + conv(
        x, 3, "skip", 1, act=None
    )
    big = sym.Deconvolution(fused, kernel=(4, 4), stride=(2, 2), num_filter=3, no_bias=True, name="bigscore")
    out = sym.Crop(big, data, num_args=2, offset=(9, 9), name="upscore")
    return sym.SoftmaxOutput(
        sym.Reshape(out, shape=(0, 0, -1)), multi_output=True, use_ignore=True, ignore_label=2, name="softmax"
    )


@network(data=(2, 3, 32, 32), softmax_label=((2, 1, 32, 32), "u"))
def unet():
    a = conv(v("data"), 4, "down1", norm=True)
    b = conv(pool(a, kernel=2), 6, "down2", norm=True)
    c = conv(pool(b, kernel=2), 8, "down3", norm=True)
    up = sym.UpSampling(c, scale=2, sample_type="nearest")
    x = conv(sym.Concat(up, b), 6, "up2", norm=True)
    up = sym.UpSampling(x, v("up_weight"), scale=2, sample_type="bilinear", num_filter=6, num_args=2)
    x = conv(sym.Concat(up, a), 4, "up1", norm=True)
    return sym.LogisticRegressionOutput(conv(x, 1, "out", 1, act=None), name="softmax")


@network(data=(2, 4, 12, 12), label=((2, 1, 36, 36), "n"))
def super_resolution():
    x = conv(conv(v("data"), 8, "conv1", 5, act="tanh"), 9, "conv2", act=None)
    x = sym.Reshape(sym.Reshape(x, shape=(-4, -1, 1, 9, 12, 12)), shape=(-1, 1, 3, 3, 12, 12))
    x = sym.reshape(sym.transpose(x, axes=(0, 1, 4, 2, 5, 3)), shape=(0, 0, 36, 36))
    return sym.LinearRegressionOutput(x, v("label"), name="lro")


@network(data=(2, 3, 32, 32))
def openpose():
    x = conv(v("data"), 6, "feat")
    a, b = (conv(conv(x, 6, f"s1_{k}", 3), n, f"s1_{k}_out", 1, act=None) for k, n in (("L1", 4), ("L2", 3)))
    y = sym.concat(a, b, x, dim=1)
    c, d = (conv(conv(y, 6, f"s2_{k}", 7), n, f"s2_{k}_out", 1, act=None) for k, n in (("L1", 4), ("L2", 3)))
    return sym.Group([a, b, c, d])


# Pictures that are made


@network(data=(2, 6, 1, 1), label=((2, 3, 16, 16), "n"))
def dcgan_generator():
    x = v("data")
    for i, (kernel, stride, pad) in enumerate(((4, 1, 0), (4, 2, 1), (4, 2, 1)), 1):
        options = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (pad,) * 2, "no_bias": True}
        x = sym.Deconvolution(x, num_filter=3 if i == 3 else 8, name=f"g{i}", **options)
        if i < 3:
            x = sym.Activation(sym.BatchNorm(x, fix_gamma=True, eps=1e-5 + 1e-12, name=f"gbn{i}"), act_type="relu")
    return sym.LinearRegressionOutput(sym.Activation(x, act_type="tanh"), v("label"), name="out")


@network(data=(2, 3, 32, 32), label=((2,), "i2"))
def dcgan_discriminator():
    x = sym.LeakyReLU(conv(v("data"), 6, "d1", 4, 2, 1, act=None), act_type="leaky", slope=0.2)
    x = sym.LeakyReLU(conv(x, 8, "d2", 4, 2, 1, norm=True, act=None), act_type="leaky", slope=0.2)
    x = sym.Flatten(conv(x, 1, "d3", 8, 1, 0, act=None))
    return sym.LogisticRegressionOutput(x, v("label"), name="dloss")


@network(data=(1, 3, 24, 24))
def cyclegan():
    def norm(x, name, act="relu"):
        x = sym.InstanceNorm(x, v(f"{name}_gamma"), v(f"{name}_beta"), eps=1e-5, name=name)
        return sym.Activation(x, act_type=act) if act else x

    x = sym.Pad(v("data"), mode="reflect", pad_width=(0, 0, 0, 0, 3, 3, 3, 3))
    x = norm(conv(x, 4, "c1", 7, pad=0, act=None), "n1")
    y = norm(conv(sym.pad(x, mode="edge", pad_width=(0, 0, 0, 0, 1, 1, 1, 1)), 4, "c2", pad=0, act=None), "n2", None)
    x = sym.Deconvolution(x + y, num_filter=3, kernel=(3, 3), stride=(2, 2), pad=(1, 1), adj=(1, 1), name="up")
    return sym.tanh(x)


@network(data=(1, 3, 24, 24), target_gram_0=(4, 4), target_gram_1=(6, 6), target_content=(1, 6, 6, 6))
def neural_style():
    data = v("data")
    x = conv(data, 4, "relu1_1")
    y = conv(pool(x, "avg", 2), 6, "relu2_1")
    losses = []
    for i, (out, count) in enumerate(((x, 4), (y, 6))):
        flat = sym.Reshape(out, shape=(count, -1))
        gram = sym.FullyConnected(flat, flat, no_bias=True, num_hidden=count)
        losses.append(sym.sum(sym.square(gram / 100 - v(f"target_gram_{i}"))))
    content = sym.sum(sym.square(pool(y, "avg", 2) - v("target_content")))
    grad = sym.Convolution(
        data, v("tv_kernel", shape=(1, 3, 3, 3)), kernel=(3, 3), pad=(1, 1), num_filter=1, no_bias=True
    )
    return sym.Group([sym.MakeLoss(losses[0] + losses[1]), sym.MakeLoss(content), sym.MakeLoss(sym.sum(sym.abs(grad)))])


@network(data=(3, 20), label=((3, 20), "n"))
def autoencoder():
    x = v("data")
    for i, count in enumerate((12, 8, 4)):
        x = sym.Dropout(dense(x, count, f"encoder_{i}", "relu" if i < 2 else None), p=0.2)
    for i, count in enumerate((8, 12, 20)):
        x = dense(x, count, f"decoder_{i}", "relu" if i < 2 else None)
    return sym.LinearRegressionOutput(x, v("label"), name="out")


@network(data=((3, 20), "u"), noise=(3, 4))
def variational_autoencoder():
    data = v("data")
    x = dense(data, 12, "encoder_h", "tanh")
    mu, logvar = dense(x, 4, "mu", None), dense(x, 4, "logvar", None)
    z = mu + sym.broadcast_mul(sym.exp(0.5 * logvar), v("noise"))
    y = dense(dense(z, 12, "decoder_z", "tanh"), 20, "decoder_x", "sigmoid")
    kl = -0.5 * sym.sum(1 + logvar - sym.pow(mu, 2) - sym.exp(logvar), axis=1)
    loss = -sym.sum(data * 0.5 * sym.log(y) + (1 - data * 0.5) * sym.log(1 - y), axis=1)
    return sym.Group([sym.MakeLoss(loss + kl, name="loss"), sym.BlockGrad(y, name="y")])


@network(data=(2, 1, 20, 20), softmax_label=LABEL)
def capsule():
    def squash(x, axis):
        size = sym.sum(sym.square(x), axis=axis, keepdims=True)
        return sym.broadcast_mul(sym.sqrt(size + 1e-9) / (1 + size), x)

    x = conv(v("data"), 8, "conv1", 9, 2, 0)
    x = conv(x, 8, "primary", 3, 1, 0, act=None)  # 8 x 4 x 4
    u = squash(sym.expand_dims(sym.transpose(sym.reshape(x, shape=(0, 4, -1)), axes=(0, 2, 1)), 2), 3)  # 2, 32, 1, 4
    w = v("routing_weight", shape=(1, 32, 3 * 5, 4))
    votes = sym.reshape(sym.sum(sym.broadcast_mul(sym.tile(u, reps=(1, 1, 15, 1)), w), axis=3), shape=(0, 0, 3, 5))
    logits = sym.sum(sym.zeros_like(votes), axis=3, keepdims=True)
    for i in range(3):
        c = sym.softmax(logits, axis=2)
        out = squash(sym.sum(sym.broadcast_mul(c, sym.BlockGrad(votes) if i < 2 else votes), axis=1, keepdims=True), 3)
        logits = logits + sym.sum(sym.broadcast_mul(votes, out), axis=3, keepdims=True) if i < 2 else logits
    length = sym.reshape(sym.sqrt(sym.sum(sym.square(out), axis=3) + 1e-9), shape=(0, -1))
    hot = sym.one_hot(v("softmax_label"), 3)
    loss = hot * sym.square(sym.maximum(0, 0.9 - length)) + 0.5 * (1 - hot) * sym.square(sym.maximum(0, length - 0.1))
    return sym.Group([sym.MakeLoss(sym.sum(loss, axis=1)), sym.BlockGrad(length)])


# Sequences


def words_of(outputs, count=9, label="softmax_label"):
    scores = sym.FullyConnected(sym.Reshape(outputs, shape=(-1, 8)), num_hidden=count, name="pred")
    return sym.SoftmaxOutput(scores, sym.Reshape(v(label), shape=(-1,)), name="softmax")


def embedded(count=9):
    return sym.Embedding(v("data"), input_dim=count, output_dim=8, name="embed")


SENTENCES = {"data": ((3, 5), "i9"), "softmax_label": ((3, 5), "i9")}


@network(**SENTENCES)
def lstm_bucketing():
    stack = mx.rnn.SequentialRNNCell()
    for i in range(2):
        stack.add(mx.rnn.LSTMCell(8, prefix=f"lstm_l{i}_"))
    return words_of(stack.unroll(5, inputs=embedded(), merge_outputs=True)[0])


@network(**SENTENCES)
def gru_bucketing():
    stack = mx.rnn.SequentialRNNCell()
    for i in range(2):
        stack.add(mx.rnn.GRUCell(8, prefix=f"gru_l{i}_"))
        stack.add(mx.rnn.DropoutCell(0.3, prefix=f"drop{i}_"))
    return words_of(stack.unroll(5, inputs=embedded(), merge_outputs=True)[0])


@network(**SENTENCES)
def rnn_residual():
    stack = mx.rnn.SequentialRNNCell()
    stack.add(mx.rnn.RNNCell(8, prefix="rnn_"))
    stack.add(mx.rnn.ResidualCell(mx.rnn.LSTMCell(8, prefix="res_", forget_bias=2.0)))
    return words_of(stack.unroll(5, inputs=embedded(), merge_outputs=True)[0])


@network(**SENTENCES)
def cudnn_lstm_bucketing():
    cell = mx.rnn.FusedRNNCell(8, num_layers=2, mode="lstm", prefix="lstm_", dropout=0.2)
    outputs, _ = cell.unroll(5, inputs=sym.transpose(embedded(), axes=(1, 0, 2)), layout="TNC", merge_outputs=True)
    scores = sym.FullyConnected(sym.Reshape(outputs, shape=(-1, 8)), num_hidden=9, name="pred")
    label = sym.Reshape(sym.transpose(v("softmax_label")), shape=(-1,))
    return sym.SoftmaxOutput(scores, label, use_ignore=True, ignore_label=0, name="softmax")


@network(**SENTENCES)
def bi_lstm_sort():
    cell = mx.rnn.BidirectionalCell(mx.rnn.LSTMCell(4, prefix="l_"), mx.rnn.LSTMCell(4, prefix="r_"))
    return words_of(cell.unroll(5, inputs=embedded(), merge_outputs=True)[0])


@network(data=((3, 6, 5), "n"), softmax_label=((3, 6), "i4"))
def speech_lstm_projected():
    """The LSTM with a recurrent projection and peepholes of MXNet's speech recognition."""
    steps = sym.SliceChannel(v("data"), num_outputs=6, squeeze_axis=1)
    weights = {n: v(f"{n}_weight") for n in ("i2h", "h2h", "proj")}
    weights.update({n: v(f"{n}_weight", shape=(1, 8)) for n in ("c2i", "c2f", "c2o")})
    bias = v("i2h_bias")
    c, h, hidden = sym.zeros((3, 8)), sym.zeros((3, 4)), []
    for t in range(6):
        gates = sym.FullyConnected(steps[t], weights["i2h"], bias, num_hidden=32, name=f"t{t}_i2h")
        gates = gates + sym.FullyConnected(h, weights["h2h"], no_bias=True, num_hidden=32, name=f"t{t}_h2h")
        i, new, f, o = sym.SliceChannel(gates, num_outputs=4, name=f"t{t}_slice")
        i = sym.Activation(i + sym.broadcast_mul(weights["c2i"], c), act_type="sigmoid")
        f = sym.Activation(f + sym.broadcast_mul(weights["c2f"], c), act_type="sigmoid")
        c = f * c + i * sym.Activation(new, act_type="tanh")
        o = sym.Activation(o + sym.broadcast_mul(weights["c2o"], c), act_type="sigmoid")
        h = sym.FullyConnected(o * sym.tanh(c), weights["proj"], no_bias=True, num_hidden=4, name=f"t{t}_proj")
        hidden.append(h)
    x = sym.Reshape(sym.Concat(*hidden, dim=1), shape=(-1, 4))
    label = sym.Reshape(v("softmax_label"), shape=(-1,))
    return sym.SoftmaxOutput(sym.FullyConnected(x, num_hidden=4, name="pred"), label, name="softmax")


@network(data=(2, 1, 12, 16), label=((2, 3), "i4"))
def deep_speech():
    x = conv(v("data"), 4, "conv1", (3, 5), 1, norm=True, act=None)
    x = sym.clip(conv(x, 4, "conv2", (3, 5), 1, norm=True, act=None), 0, 20)
    x = sym.Reshape(sym.transpose(x, axes=(2, 0, 1, 3)), shape=(0, 0, -3))  # time, batch, features
    cell = mx.rnn.FusedRNNCell(6, mode="gru", bidirectional=True, prefix="gru_", get_next_state=True)
    x, _ = cell.unroll(12, inputs=x, layout="TNC", merge_outputs=True)
    x = sym.Reshape(sym.FullyConnected(sym.Reshape(x, shape=(-1, 12)), num_hidden=5, name="fc"), shape=(12, -1, 5))
    loss = sym.MakeLoss(sym.contrib.ctc_loss(x, v("label") + 1))
    return sym.Group([loss, sym.BlockGrad(sym.SoftmaxActivation(sym.Reshape(x, shape=(-1, 5))))])


@network(data=((3, 12), "i9"), softmax_label=((3,), "i2"))
def text_cnn():
    x = sym.Reshape(embedded(), shape=(-1, 1, 12, 8))
    pooled = []
    for size in (3, 4, 5):
        y = sym.Activation(sym.Convolution(x, kernel=(size, 8), num_filter=4, name=f"conv{size}"), act_type="relu")
        pooled.append(sym.Pooling(y, pool_type="max", kernel=(12 - size + 1, 1), stride=(1, 1)))
    x = sym.Reshape(sym.Concat(*pooled, dim=1), shape=(-1, 12))
    # A highway layer, as in the one of Chinese texts.
    high, gate = dense(x, 12, "highway_fc"), dense(x, 12, "highway_gate", "sigmoid")
    return softmax(sym.Dropout(high * gate + x * (1 - gate), p=0.5), 2)


@network(data=((2, 6, 8), "n"), length=((2,), "i6"), softmax_label=((2, 6), "i4"))
def attention():
    """An encoder of Sockeye: several heads, a mask by length, layer norm."""
    x, length = v("data"), v("length") + 1
    y = sym.LayerNorm(x, name="ln1")
    qkv = sym.FullyConnected(y, num_hidden=24, flatten=False, no_bias=True, name="i2h")
    q, k, value = (
        sym.reshape(sym.transpose(sym.reshape(part, shape=(0, 0, 2, -1)), axes=(0, 2, 1, 3)), shape=(-3, 0, 0))
        for part in sym.split(qkv, num_outputs=3, axis=2)
    )
    logits = sym.batch_dot(q / math.sqrt(4), k, transpose_b=True)
    times = sym.repeat(length, repeats=2, axis=0)
    logits = sym.SequenceMask(sym.transpose(logits, axes=(2, 0, 1)), times, use_sequence_length=True, value=-1e8)
    mixed = sym.batch_dot(sym.softmax(sym.transpose(logits, axes=(1, 2, 0))), value)
    mixed = sym.reshape(sym.transpose(sym.reshape(mixed, shape=(-4, -1, 2, 0, 0)), axes=(0, 2, 1, 3)), shape=(0, 0, -3))
    x = x + sym.FullyConnected(mixed, num_hidden=8, flatten=False, name="h2o")
    y = sym.LeakyReLU(
        sym.FullyConnected(sym.LayerNorm(x, name="ln2"), num_hidden=16, flatten=False, name="ff1"), act_type="gelu"
    )
    x = x + sym.FullyConnected(y, num_hidden=8, flatten=False, name="ff2")
    return sym.SoftmaxOutput(
        sym.FullyConnected(x, num_hidden=4, flatten=False, name="out"), preserve_shape=True, name="softmax"
    )


@network(data=((2, 24, 4), "n"), label=((2, 4), "n"))
def lstnet():
    x = v("data")
    y = sym.Activation(
        sym.Convolution(sym.reshape(x, shape=(0, 1, 24, 4)), kernel=(6, 4), num_filter=5, name="conv"), act_type="relu"
    )
    y = sym.transpose(sym.reshape(y, shape=(0, 0, -1)), axes=(0, 2, 1))  # 19 steps
    y = sym.Dropout(y, p=0.2)
    outputs, _ = mx.rnn.GRUCell(6, prefix="gru_").unroll(19, inputs=y, merge_outputs=False)
    skip, _ = mx.rnn.LSTMCell(4, prefix="skip_").unroll(
        4, inputs=sym.slice(y, begin=(None, 2, None), end=(None, 19, None), step=(1, 5, 1)), merge_outputs=False
    )
    hidden = sym.concat(outputs[-1], skip[-1], dim=1)
    linear = [sym.FullyConnected(sym.slice_axis(x, axis=2, begin=i, end=i + 1), num_hidden=1) for i in range(4)]
    return sym.LinearRegressionOutput(
        dense(hidden, 4, "fc", None) + sym.concat(*linear, dim=1), v("label"), name="loss"
    )


@network(data=((2, 4, 30), "n"), softmax_label=((2, 30), "i4"))
def wavenet():
    x, skips = sym.Convolution(v("data"), kernel=(1,), num_filter=6, name="in"), []
    for i in range(3):
        rate = 2**i
        y = sym.slice_axis(
            sym.Convolution(x, kernel=(2,), dilate=(rate,), pad=(rate,), num_filter=12, name=f"d{i}"),
            axis=2,
            begin=0,
            end=30,
        )
        a, b = sym.split(y, num_outputs=2, axis=1)
        y = sym.tanh(a) * sym.sigmoid(b)
        skips.append(sym.Convolution(y, kernel=(1,), num_filter=5, name=f"skip{i}"))
        x = x + sym.Convolution(y, kernel=(1,), num_filter=6, name=f"res{i}")
    out = sym.Convolution(sym.relu(sym.add_n(*skips)), kernel=(1,), num_filter=4, name="out")
    return sym.SoftmaxOutput(out, multi_output=True, name="softmax")


# Tables, recommenders, words


@network(user=((4,), "i6"), item=((4,), "i5"), score=((4,), "n"))
def matrix_factorization():
    user = sym.Embedding(v("user"), input_dim=6, output_dim=4, name="user_embed")
    item = sym.Embedding(v("item"), input_dim=5, output_dim=4, name="item_embed")
    user, item = dense(sym.Activation(user, act_type="relu"), 4, "fc_user", None), dense(item, 4, "fc_item", None)
    return sym.LinearRegressionOutput(sym.Flatten(sym.sum_axis(user * item, axis=1)), v("score"), name="lro")


@network(user=((4,), "i6"), item=((4,), "i5"), score=((4,), "n"))
def matrix_factorization_sparse():
    weights = [
        v(n, stype="row_sparse", shape=(count, 4), init=mx.init.Normal(0.01))
        for n, count in (("user_weight", 6), ("item_weight", 5))
    ]
    user, item = (
        sym.contrib.SparseEmbedding(v(n), w, input_dim=c, output_dim=4)
        for n, w, c in zip(("user", "item"), weights, (6, 5))  # noqa: B905
    )
    pred = sym.sum(user * item, axis=1)
    return sym.LinearRegressionOutput(sym.Flatten(pred), v("score"), name="lro")


@network(csr_data=((4, 10), "i2"), dns_data=((4, 5), "i6"), softmax_label=((4,), "i2"))
def wide_deep():
    linear = sym.broadcast_add(
        sym.sparse.dot(v("csr_data"), v("linear_weight", shape=(10, 2), stype="row_sparse")),
        v("linear_bias", shape=(2,)),
    )
    dns = v("dns_data")
    x = sym.slice_axis(dns, axis=1, begin=0, end=3)
    embeds = [
        sym.Flatten(sym.Embedding(part, input_dim=6, output_dim=4, name=f"embed_{i}"))
        for i, part in enumerate(sym.split(x, num_outputs=3, axis=1, squeeze_axis=1))
    ]
    hidden = sym.concat(*embeds, sym.slice_axis(dns, axis=1, begin=3, end=5), dim=1)
    deep = dense(dense(hidden, 8, "fc1"), 2, "fc2", None)
    return sym.SoftmaxOutput(linear + deep, name="softmax")


@network(data=((4, 10), "i2"), softmax_label=((4, 1), "i2"))
def factorization_machine():
    x = v("data", stype="csr")
    w = v("v", shape=(10, 3), stype="row_sparse")
    w1 = v("w1_weight", shape=(10, 1), stype="row_sparse")
    linear = sym.broadcast_add(sym.dot(x, w1), v("w1_bias", shape=(1,)))
    squares = sym.sum(sym.dot(sym.square(x), sym.square(w)), axis=1, keepdims=True)
    pairs = sym.sum(sym.square(sym.dot(x, w)), axis=1, keepdims=True)
    return sym.LogisticRegressionOutput(linear + 0.5 * (pairs - squares), name="softmax")


@network(data=((3, 4), "i9"), label=((3, 5), "i9"), label_weight=((3, 5), "u"))
def noise_contrastive():
    weight = v("embed_weight")
    words = sym.Embedding(v("data"), weight, input_dim=9, output_dim=4, name="data_embed")
    hidden = sym.sum(sym.reshape(words, shape=(0, 4, 4)), axis=1)
    labels = sym.Embedding(v("label"), weight, input_dim=9, output_dim=4, name="label_embed")
    pred = sym.sum(sym.broadcast_mul(sym.Reshape(hidden, shape=(-1, 1, 4)), labels), axis=2)
    return sym.LogisticRegressionOutput(pred, v("label_weight"))


@network(left=((3, 12), "n"), right=((3, 12), "n"), label=((3, 1), "n"))
def cosine_similarity():
    a, b = (dense(dense(v(n), 8, f"{n}_1", "tanh"), 4, f"{n}_2", "tanh") for n in ("left", "right"))
    size = sym.sqrt(sym.sum(a * a, axis=1, keepdims=True) * sym.sum(b * b, axis=1, keepdims=True) + 1e-8)
    return sym.MAERegressionOutput(sym.sum(a * b, axis=1, keepdims=True) / size, v("label"), name="mae")


@network(data=(3, 4, 20, 20), action=((3,), "i4"), reward=(3,))
def actor_critic():
    x = conv(conv(v("data"), 6, "conv1", 8, 4, 0), 6, "conv2", 2, 2, 0)
    x = dense(sym.Flatten(x), 8, "fc")
    logits, value, reward = dense(x, 4, "policy", None), dense(x, 1, "value", None).reshape((-1,)), v("reward")
    log_policy = sym.log_softmax(logits)
    advantage = reward - sym.BlockGrad(value)
    picked = sym.pick(log_policy, v("action"))
    policy_loss = sym.MakeLoss(-picked * advantage, name="policy_loss")
    entropy = sym.MakeLoss(0.01 * sym.sum(log_policy * sym.exp(log_policy), axis=1), name="entropy")
    value_loss = sym.MakeLoss(0.5 * sym.square(value - reward), name="value_loss")
    return sym.Group([policy_loss, entropy, value_loss, sym.BlockGrad(sym.exp(log_policy))])


@network(data=(3, 12), softmax_label=((3,), "i4"))
def maxout():
    x = sym.FullyConnected(v("data"), num_hidden=16, name="fc1")
    x = sym.max(sym.Reshape(x, shape=(-1, 8, 2)), axis=2)
    x = sym.broadcast_maximum(x, sym.mean(x, axis=1, keepdims=True)) + sym.minimum(x, 0.5) ** 2
    return softmax(sym.Dropout(x, p=0.5))


# What MXNet computes


def kind_of(name, shape):
    """How an array is made, so that values neither grow nor vanish from layer to layer."""
    if name.endswith(("gamma", "var")):
        return "u"
    if name.endswith(("weight", "parameters", "kernel")) and len(shape) > 1:
        return f"w{(np.prod(shape[1:]) / 2) ** 0.5:.4f}"
    return "w10" if name.endswith(("bias", "beta", "mean", "parameters")) else "w2"


def without_dropout(symbol):
    content = json.loads(symbol.tojson())
    for node in content["nodes"]:
        if node["op"] in ("Dropout", "RNN") and "p" in node.get("attrs", {}):
            node["attrs"]["p"] = "0"
    return mx.sym.load_json(json.dumps(content))


def numbers(name, symbol, shapes, folder, arrays=None, training=True):
    """Write the files of a network. `arrays` are its own, or the rule makes them."""
    given = {n: g if isinstance(g[0], tuple) else (g, "n") for n, g in shapes.items()}
    known, _, aux = symbol.infer_shape(**{n: s for n, (s, _) in given.items() if n in symbol.list_arguments()})
    of = dict(zip(symbol.list_arguments() + symbol.list_auxiliary_states(), known + aux))  # noqa: B905
    made = {}
    for n, shape in of.items():
        if n in given:
            made[n] = rule(f"{name}/{n}", given[n][0], given[n][1])
        else:
            made[n] = arrays[n] if arrays and n in arrays else rule(f"{name}/{n}", shape, kind_of(n, shape))
    # Where gamma is fixed, MXNet writes ones into it.
    nodes = json.loads(symbol.tojson())["nodes"]
    for node in nodes:
        if node["op"] == "BatchNorm" and node.get("attrs", {}).get("fix_gamma", "True") == "True":
            made[nodes[node["inputs"][1][0]]["name"]][:] = 1
    params = {n: mx.nd.array(made[n]) for n in symbol.list_arguments() if n not in given}
    states = {n: mx.nd.array(made[n]) for n in symbol.list_auxiliary_states()}
    mx.model.save_checkpoint(str(folder / name), 0, symbol, params, states)
    found = {f"input {n}": made[n] for n in symbol.list_inputs() if n in given}

    marks = symbol.attr_dict()
    kinds_of_storage = {
        n: ("default", "row_sparse", "csr")[int(m.get("__storage_type__", 0))] for n, m in marks.items()
    }
    has_rows = "SparseEmbedding" in symbol.tojson() or "row_sparse" in kinds_of_storage.values()

    def bound(symbol, made, dtype="float32"):
        arguments = {
            n: mx.nd.array(made[n], dtype=dtype).tostype(kinds_of_storage.get(n, "default"))
            for n in symbol.list_arguments()
        }
        grads = {n: mx.nd.zeros(arguments[n].shape, dtype=dtype) for n in params}
        if "SparseEmbedding" in symbol.tojson():
            grads = {n: mx.nd.sparse.zeros("row_sparse", arguments[n].shape) for n in params}
        elif has_rows:
            grads = {
                n: mx.nd.sparse.zeros("row_sparse", g.shape) if kinds_of_storage.get(n) == "row_sparse" else g
                for n, g in grads.items()
            }
        aux = {n: mx.nd.array(made[n], dtype=dtype) for n in symbol.list_auxiliary_states()}
        wanted = {n: "write" if n in params and training else "null" for n in arguments}
        return symbol.bind(mx.cpu(), arguments, grads, wanted, aux)

    # The last bit of inputs that are no whole numbers, and of arrays where all inputs are.
    floats = [n for n in given if n in made and (made[n] % 1).any()] or list(params)
    signs = {n: rule(f"{name}/shaken {n}", made[n].shape, "n") for n in floats}
    shaken = {**made, **{n: np.nextafter(made[n], np.float32(np.inf) * signs[n]) for n in floats}}
    for kind, arrays in (("", made), ("shaken ", shaken)):
        for i, out in enumerate(bound(symbol, arrays).forward(is_train=False)):
            found[f"{kind}eval{i}"] = out.asnumpy()
    if training:
        ops = {node["op"] for node in nodes}
        plain = without_dropout(symbol)
        plain.save(str(folder / f"{name}-train-symbol.json"))
        has_loss = any(op in LOSSES or op.endswith("RegressionOutput") for op in ops)

        def trained(dtype, made=made):
            executor = bound(plain, made, dtype)
            outs = executor.forward(is_train=True)
            heads = [
                np.ones(o.shape, np.float32) if has_loss else rule(f"{name}/head{i}", o.shape, "n")
                for i, o in enumerate(outs)
            ]
            executor.backward([mx.nd.array(head, dtype=dtype) for head in heads])
            mx.nd.waitall()  # errors come late
            return executor, outs, heads

        # In float64 where MXNet computes the network in it. In float32 some of its gradients, those of
        # norms of few values, are off by a tenth.
        try:
            # Gradients of rows are float32. In float64 MXNet gives the lower layers of an RNN no gradient, if its data
            # has none.
            if has_rows or "RNN" in ops:
                raise TypeError
            dtype, step = "float64", trained("float64")
        except (mx.base.MXNetError, TypeError):
            dtype, step = "float32", trained("float32")
        for kind, (executor, outs, heads) in {"": step, "shaken ": trained(dtype, shaken)}.items():
            optimizer = mx.optimizer.SGD(learning_rate=LR, momentum=0.9, wd=1e-3, rescale_grad=1 / heads[0].shape[0])
            updater = mx.optimizer.get_updater(optimizer)
            for i, n in enumerate(params):
                value = executor.arg_dict[n].tostype("default")
                updater(i, executor.grad_dict[n].tostype("default"), value)
                found[f"{kind}param {n}"] = value.asnumpy()
            found.update({f"{kind}state {n}": np.float32(a.asnumpy()) for n, a in executor.aux_dict.items()})
            found.update({f"{kind}out{i}": np.float32(o.asnumpy()) for i, o in enumerate(outs)})
        found.update({f"head{i}": h for i, h in enumerate(heads)})
    np.savez(folder / f"{name}.npz", **found)
    kinds = {n: given[n][1] if n in given else kind_of(n, shape) for n, shape in of.items()}
    return symbol, {n: [list(shape), kinds[n]] for n, shape in of.items()}, found


def record(folder):
    """A few networks as one file of symbols and shapes, and one of numbers. Of params after the step their sums."""
    cases, kept = {}, {}
    for name in RECORDED:
        function, shapes = NETWORKS[name]
        with tempfile.TemporaryDirectory() as scratch, mx.name.NameManager():
            symbol, arrays, found = numbers(name, function(), shapes, pathlib.Path(scratch))
        aux = symbol.list_auxiliary_states()
        cases[name] = {"symbol": symbol.tojson(), "arrays": arrays, "aux": aux, "inputs": list(shapes)}
        for key, value in found.items():
            if key.startswith("eval"):
                kept[f"{name}/{key}"] = value
            if key.startswith("param "):
                kept[f"{name}/{key}"] = np.array([value.sum(dtype=float), np.abs(value).sum(dtype=float)])
    (folder / "mxnet_models.json.gz").write_bytes(gzip.compress(json.dumps({"cases": cases}).encode(), mtime=0))
    np.savez_compressed(folder / "mxnet_models.npz", **kept)


def export(name, net, *inputs, folder, training=True):
    """A network of Gluon, hybridized, by the symbol that `export` writes."""
    net.initialize(mx.init.Uniform(0.1))
    net.hybridize()
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    net(*(array(rule(f"{name}/data{i}", s, k)) for i, (s, k) in enumerate(inputs)))
    net.export(str(folder / name), epoch=0)
    symbol = mx.sym.load(str(folder / f"{name}-symbol.json"))
    arrays = {n.split(":")[-1]: a.asnumpy() for n, a in mx.nd.load(str(folder / f"{name}-0000.params")).items()}
    constants = {n: a for n, a in arrays.items() if not n.endswith(TRAINED)}  # such as anchors
    names = [n for n in symbol.list_arguments() if n not in arrays]
    numbers(name, symbol, dict(zip(names, inputs)), folder, constants, training)  # noqa: B905


ZOO = "alexnet densenet121 inceptionv3 mobilenet0.25 mobilenetv2_0.25 resnet18_v1 resnet18_v2 squeezenet1.1 vgg11_bn"
CV = (
    "ssd_512_mobilenet1.0_voc yolo3_mobilenet0.25_voc center_net_resnet18_v1b_voc faster_rcnn_resnet50_v1b_voc"
    " mask_rcnn_resnet18_v1b_coco fcn_resnet50_voc psp_resnet50_ade deeplab_resnet50_ade"
    " simple_pose_resnet18_v1b mobile_pose_mobilenet1.0 alpha_pose_resnet101_v1b_coco cifar_resnet20_v1"
    " cifar_resnext29_32x4d resnet18_v1b resnext50_32x4d se_resnet18_v1 googlenet mobilenetv3_small"
    " residualattentionnet56 hrnet_w18_small_v1_c resnest14 i3d_inceptionv1_kinetics400"
    " r2plus1d_resnet18_kinetics400"
)
CV_SIZES = {  # of the first name that one begins with; of all others (2, 3, 128, 128)
    "cifar": (2, 3, 32, 32),
    "i3d": (1, 3, 32, 224, 224),
    "r2plus1d": (1, 3, 16, 112, 112),
    "googlenet residualattentionnet": (1, 3, 224, 224),
    "fcn psp deeplab": (1, 3, 480, 480),
    "faster_rcnn mask_rcnn": (1, 3, 256, 256),  # of one image
    "alpha_pose": (1, 3, 128, 96),
}


class Unrolled(gluon.HybridBlock):
    """A recurrent cell over (batch, steps, features)."""

    def __init__(self, cell, steps, **more):
        super().__init__(**more)
        self.steps = steps
        with self.name_scope():
            self.cell = cell

    def hybrid_forward(self, F, x):
        return self.cell.unroll(self.steps, x, merge_outputs=True)[0]


# Of MXNet's NumPy interface


class Residual(gluon.HybridBlock):
    """Two convolutions around which the images go too."""

    def __init__(self, channels, **more):
        super().__init__(**more)
        with self.name_scope():
            self.first, self.second = (gluon.nn.Conv2D(channels, 3, padding=1) for _ in range(2))
            self.around = gluon.nn.Conv2D(channels, 1)
            self.norm = gluon.nn.BatchNorm()

    def hybrid_forward(self, F, x):
        y = self.second(F.npx.relu(self.norm(self.first(x))))
        return F.npx.relu(y + self.around(x))


class Attention(gluon.HybridBlock):
    """Attention of several heads over (batch, steps, features), and a layer norm by hand."""

    def __init__(self, features, heads, **more):
        super().__init__(**more)
        self.heads = heads
        with self.name_scope():
            self.of_all = gluon.nn.Dense(3 * features, flatten=False)
            self.last = gluon.nn.Dense(features, flatten=False, activation="tanh")

    def hybrid_forward(self, F, x):
        split = F.npx.reshape(self.of_all(x), (-2, -2, 3, self.heads, -1))  # (batch, steps, kinds, heads, features)
        queries, keys, values = (
            F.npx.reshape(part, (-5, -2, -1)) for part in F.np.split(F.np.transpose(split, (0, 3, 2, 1, 4)), 3, axis=2)
        )
        scores = F.npx.batch_dot(queries, keys, transpose_b=True) / 2.0
        seen = F.npx.batch_dot(F.npx.softmax(scores, axis=-1), values)
        joined = F.npx.reshape(
            F.np.transpose(F.npx.reshape(seen, (-6, -1, self.heads, -4)), (0, 2, 1, 3)), (-2, -2, -1)
        )
        y = self.last(joined) + x
        y = y - F.np.mean(y, axis=-1, keepdims=True)
        return y / F.np.sqrt(F.np.mean(y**2, axis=-1, keepdims=True) + 1e-5)  # MXNet has no gradient of np.var


def numpy_networks():
    """The same of MXNet's NumPy interface, by names that begin with "np_"."""

    def sequence(*blocks):
        net = gluon.nn.HybridSequential()
        net.add(*blocks)
        return net

    nn = gluon.nn
    images, text = [((2, 3, 16, 16), "n")], [((5, 2, 4), "n")]
    return {
        "np_mlp": (lambda: sequence(nn.Dense(8, "relu"), nn.Dense(4)), [((3, 6), "n")], True),
        "np_lenet": (
            lambda: sequence(
                nn.Conv2D(4, 5, activation="sigmoid"),
                nn.AvgPool2D(2, 2),
                nn.Flatten(),
                nn.Dense(8, "tanh"),
                nn.Dense(4),
            ),
            images,
            True,
        ),
        "np_residual": (
            lambda: sequence(nn.Conv2D(4, 3), nn.MaxPool2D(2), Residual(6), nn.GlobalAvgPool2D(), nn.Dense(4)),
            images,
            True,
        ),
        "np_lstm": (lambda: gluon.rnn.LSTM(6, 2, bidirectional=True), text, True),
        "np_gru": (lambda: gluon.rnn.GRU(6), text, True),
        "np_attention": (lambda: sequence(Attention(8, 2), Attention(8, 4)), [((2, 5, 8), "n")], True),
        "np_embedding": (
            lambda: sequence(nn.Embedding(9, 4), nn.Flatten(), nn.Dense(6), nn.LeakyReLU(0.1), nn.LayerNorm()),
            [((3, 4), "i9")],
            True,
        ),
        "np_resnet18_v1": (
            lambda: gluon.model_zoo.vision.get_model("resnet18_v1", classes=10),
            [((2, 3, 32, 32), "n")],
            True,
        ),
    }


def gluon_networks():
    """Functions that make the networks of Gluon, by name, with their inputs and whether they are trained."""
    found = {}
    for name in ZOO.split():
        size = {"inceptionv3": 299}.get(
            name, 224 if name in ("alexnet", "densenet121", "squeezenet1.1", "vgg11_bn") else 64
        )
        found[f"zoo_{name}"] = (
            lambda name=name: gluon.model_zoo.vision.get_model(name, classes=10),
            [((2, 3, size, size), "n")],
            True,
        )
    try:
        import gluoncv
    except ImportError as error:
        print("no gluoncv:", error, flush=True)
    else:
        for name in CV.split():
            sizes = [size for starts, size in CV_SIZES.items() if name.startswith(tuple(starts.split()))]
            options = {"pretrained": False}
            if any(word in name for word in ("voc", "coco", "pose", "ade", "citys", "kinetics")):
                options["pretrained_base"] = False
            found[f"cv_{name}"] = (
                lambda name=name, o=options: gluoncv.model_zoo.get_model(name, **o),
                [((*sizes, (2, 3, 128, 128))[0], "n")],
                True,
            )
    try:
        import gluonnlp
    except ImportError as error:
        print("no gluonnlp:", error, flush=True)
    else:

        def bert(**more):
            encoder = gluonnlp.model.BERTEncoder(
                units=16, hidden_size=32, max_length=8, num_layers=2, num_heads=2, dropout=0.1
            )
            return gluonnlp.model.BERTModel(
                encoder, vocab_size=20, token_type_vocab_size=2, units=16, embed_size=16, **more
            )

        ids = [((2, 8), "i20"), ((2, 8), "i2"), ((2,), "i6")]
        found["nlp_bert"] = lambda: bert(use_pooler=True, use_decoder=False, use_classifier=False), ids, True
        found["nlp_textcnn"] = (
            lambda: gluonnlp.model.ConvolutionalEncoder(
                embed_size=8, num_filters=(3, 4), ngram_filter_sizes=(1, 2), output_size=6
            ),
            [((6, 2, 8), "n")],
            True,
        )
    for mode in ("rnn_relu", "rnn_tanh", "lstm", "gru"):
        layer = {"lstm": gluon.rnn.LSTM, "gru": gluon.rnn.GRU}.get(mode, gluon.rnn.RNN)
        found[f"gluon_{mode}"] = (
            lambda layer=layer, m=mode: layer(
                6, 2, bidirectional=True, **({"activation": m[4:]} if m[:3] == "rnn" else {})
            ),
            [((5, 2, 4), "n")],
            True,
        )
    # MXNet's CPU has no gradient of a projection.
    found["gluon_lstm_projection"] = lambda: gluon.rnn.LSTM(6, 2, projection_size=3), [((5, 2, 4), "n")], False
    found["gluon_lstmp_cell"] = (
        lambda: Unrolled(gluon.contrib.rnn.LSTMPCell(6, 3), 4),
        [((2, 4, 5), "n")],
        True,
    )
    return found


def main(folder, names):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (function, shapes) in NETWORKS.items():
        if not names or name in names:
            with mx.name.NameManager():
                attempt(name, lambda: numbers(name, function(), shapes, folder))  # noqa: B023
    for name, (make, inputs, training) in {**gluon_networks(), **numpy_networks()}.items():
        if not names or name in names:
            is_numpy = name.startswith("np_")
            with mx.util.np_shape(is_numpy), mx.util.np_array(is_numpy):
                attempt(name, lambda: export(name, make(), *inputs, folder=folder, training=training))  # noqa: B023


def attempt(name, run):
    try:
        run()
    except Exception:
        print("no", name, traceback.format_exc()[-1500:], flush=True)
    else:
        print("ok", name, flush=True)


if __name__ == "__main__":
    if sys.argv[2:] == ["--record"]:
        record(pathlib.Path(sys.argv[1]))
    else:
        main(sys.argv[1], sys.argv[2:])
