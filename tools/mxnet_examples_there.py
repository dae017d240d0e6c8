"""MXNet's own example networks, built by its `example/` folder, for tools/mxnet_models.py.

    .venv-mxnet/bin/python tools/mxnet_examples_there.py FOLDER EXAMPLES [NAME ...]

EXAMPLES is the folder `example` of MXNet 1.9.1's source. Other than in tools/mxnet_models_there.py, whose networks are
small, these have their own widths, and small images. Each gives the files that are described there.
"""

import importlib
import importlib.util
import pathlib
import sys
import types

import mxnet as mx
from mxnet_models_there import attempt, numbers

FOLDER, EXAMPLES = map(pathlib.Path, sys.argv[1:3])
ZOO = "image-classification/symbols"


def image(size, channels=3):
    return {"data": (1, channels, size, size), "softmax_label": ((1,), "i4")}


def depth(layers, size):
    return {"num_layers": layers, "image_shape": f"3,{size},{size}", "num_classes": 10}


def states(names, layers, batch, width):
    return {f"l{i}_init_{n}": (batch, width) for i in range(layers) for n in names}


BOXES = {
    "anchor_scales": (2, 4),
    "anchor_ratios": (0.5, 1, 2),
    "rpn_feature_stride": 16,
    "rpn_pre_topk": 50,
    "rpn_post_topk": 8,
    "rpn_nms_thresh": 0.7,
    "rpn_min_size": 4,
    "num_classes": 4,
    "rcnn_feature_stride": 16,
    "rcnn_pooled_size": (7, 7),
    "rcnn_batch_size": 1,
}
RCNN = {"data": (1, 3, 96, 128), "im_info": ((1, 3), "u")}
SSD = {"num_classes": 4, "data_shape": 300}
WORDS = {"seq_len": 4, "input_size": 9, "num_hidden": 6, "num_embed": 5, "num_label": 9}
TEXT = {"data": ((3, 4), "i9"), "softmax_label": ((3, 4), "i9")}
ONES = dict.fromkeys("v w w0".split(), 1.0)
SPARSE = {"data": ((4, 10), "i2"), "softmax_label": ((4, 1), "i2")}
INIT = {"v": mx.init.Normal(0.1), "w": mx.init.Normal(0.1), "w0": mx.init.Zero()}
PAIRS = {"user": ((4,), "i6"), "item": ((4,), "i5")}
MANY = {"factor_size_mlp": 8, "factor_size_gmf": 4, "model_layers": [16, 8], "max_user": 6, "max_item": 5}

# name: (file, function, arguments, inputs)
NETWORKS = {
    "alexnet": (f"{ZOO}/alexnet.py", "get_symbol", {"num_classes": 10}, image(224)),
    "googlenet": (f"{ZOO}/googlenet.py", "get_symbol", {"num_classes": 10}, image(224)),
    "inception_bn": (f"{ZOO}/inception-bn.py", "get_symbol", {"num_classes": 10, "image_shape": "3,28,28"}, image(28)),
    "inception_bn_large": (
        f"{ZOO}/inception-bn.py",
        "get_symbol",
        {"num_classes": 10, "image_shape": "3,224,224"},
        image(224),
    ),
    "inception_resnet_v2": (f"{ZOO}/inception-resnet-v2.py", "get_symbol", {"num_classes": 10}, image(299)),
    "inception_v3": (f"{ZOO}/inception-v3.py", "get_symbol", {"num_classes": 10}, image(299)),
    "inception_v4": (f"{ZOO}/inception-v4.py", "get_symbol", {"num_classes": 10}, image(299)),
    "lenet": (f"{ZOO}/lenet.py", "get_symbol", {}, image(28, 1)),
    "lenet_stn": (f"{ZOO}/lenet.py", "get_symbol", {"add_stn": True}, image(28, 1)),
    "mlp": (f"{ZOO}/mlp.py", "get_symbol", {}, image(28, 1)),
    "mobilenet": (f"{ZOO}/mobilenet.py", "get_symbol", {"num_classes": 10, "alpha": 0.25}, image(224)),
    "mobilenet_compact": (f"{ZOO}/mobilenet.py", "get_symbol_compact", {"num_classes": 10, "alpha": 0.25}, image(224)),
    "mobilenet_v2": (f"{ZOO}/mobilenetv2.py", "get_symbol", {"num_classes": 10}, image(64)),
    "resnet_v1": (f"{ZOO}/resnet-v1.py", "get_symbol", depth(18, 64), image(64)),
    "resnet_small": (f"{ZOO}/resnet.py", "get_symbol", depth(20, 28), image(28)),
    "resnet_bottle": (f"{ZOO}/resnet.py", "get_symbol", depth(50, 64), image(64)),
    "resnext": (f"{ZOO}/resnext.py", "get_symbol", depth(50, 64), image(64)),
    "vgg": (f"{ZOO}/vgg.py", "get_symbol", {"num_classes": 10, "batch_norm": True}, image(32)),
    "fcn32s": (
        "fcn-xs/symbol_fcnxs.py",
        "get_fcn32s_symbol",
        {},
        {"data": (1, 3, 64, 64), "softmax_label": ((1, 4096), "i4")},
    ),
    "fcn8s": (
        "fcn-xs/symbol_fcnxs.py",
        "get_fcn8s_symbol",
        {},
        {"data": (1, 3, 64, 64), "softmax_label": ((1, 4096), "i4")},
    ),
    "rcnn_resnet": (
        "rcnn/symnet/symbol_resnet.py",
        "get_resnet_test",
        {**BOXES, "units": (1, 1, 1, 1), "filter_list": (16, 32, 64, 64)},
        RCNN,
    ),
    "rcnn_vgg": ("rcnn/symnet/symbol_vgg.py", "get_vgg_test", BOXES, RCNN),
    "ssd_vgg": (
        "ssd/symbol/symbol_factory.py",
        "get_symbol",
        {"network": "vgg16_reduced", **SSD},
        {"data": (1, 3, 300, 300)},
    ),
    "ssd_vgg_train": (
        "ssd/symbol/symbol_factory.py",
        "get_symbol_train",
        {"network": "vgg16_reduced", **SSD},
        # One box: a further one would be small, and overlap many anchors as much, but for rounding.
        {"data": (1, 3, 300, 300), "label": ((1, 1, 5), "b0.5")},
    ),
    "ssd_resnet50": (
        "ssd/symbol/symbol_factory.py",
        "get_symbol",
        {"network": "resnet50", **SSD},
        {"data": (1, 3, 300, 300)},
    ),
    "ssd_legacy": ("ssd/symbol/legacy_vgg16_ssd_300.py", "get_symbol", {"num_classes": 4}, {"data": (1, 3, 300, 300)}),
    "factorization_machine": (
        "sparse/factorization_machine/model.py",
        "factorization_machine_model",
        {"factor_size": 3, "num_features": 10, "lr_mult_config": ONES, "wd_mult_config": ONES, "init_config": INIT},
        SPARSE,
    ),
    "matrix_factorization": (
        "sparse/matrix_factorization/model.py",
        "matrix_fact_net",
        {"factor_size": 4, "num_hidden": 3, "max_user": 6, "max_item": 5, "dense": False},
        {**PAIRS, "score": (4, 1)},
    ),
    "wide_deep": (
        "sparse/wide_deep/model.py",
        "wide_deep_model",
        {
            "num_linear_features": 10,
            "num_embed_features": 2,
            "num_cont_features": 3,
            "input_dims": (6, 6),
            "hidden_units": (4, 8, 8),
        },
        {"csr_data": ((4, 10), "i2"), "dns_data": ((4, 5), "i6"), "softmax_label": ((4,), "i2")},
    ),
    "parallel_factorization": (
        "model-parallel/matrix_factorization/model.py",
        "matrix_fact_model_parallel_net",
        {"factor_size": 4, "num_hidden": 3, "max_user": 6, "max_item": 5},
        {**PAIRS, "score": (4, 1)},
    ),
    "collaborative": (
        "neural_collaborative_filtering/core/model.py",
        "get_model",
        MANY,
        {**PAIRS, "softmax_label": ((4, 1), "i2")},
    ),
    "word_vectors": (
        "nce-loss/wordvec_net.py",
        "get_word_net",
        {"vocab_size": 9, "num_input": 3},
        {"data": ((2, 3), "i9"), "label": ((2, 4), "i9"), "label_weight": ((2, 4), "i2")},
    ),
    "subwords": (
        "nce-loss/wordvec_net.py",
        "get_subword_net",
        {"vocab_size": 9, "num_input": 3, "embedding_size": 4},
        {
            "data": ((2, 3, 5), "i9"),
            "mask": ((2, 3, 5, 1), "i2"),
            "label": ((2, 4, 5), "i9"),
            "label_mask": ((2, 4, 5, 1), "i2"),
            "label_weight": ((2, 4), "i2"),
        },
    ),
    "nce_lstm": (
        "nce-loss/lstm_net.py",
        "get_lstm_net",
        {"vocab_size": 9, "seq_len": 3, "num_lstm_layer": 1, "num_hidden": 100},
        {
            "data": ((2, 3), "i9"),
            "label": ((2, 3, 4), "i9"),
            "label_weight": ((2, 3, 4), "i2"),
            **states("ch", 1, 2, 100),
        },
    ),
    "old_lstm": ("rnn/old/lstm.py", "lstm_unroll", {"num_lstm_layer": 2, **WORDS}, {**TEXT, **states("ch", 2, 3, 6)}),
    "old_gru": ("rnn/old/gru.py", "gru_unroll", {"num_gru_layer": 2, **WORDS}, {**TEXT, **states("h", 2, 3, 6)}),
    "dsb": ("kaggle-ndsb1/symbol_dsb.py", "get_symbol", {}, image(48)),
    "capsnet": (
        "capsnet/capsulenet.py",
        "capsnet",
        {"batch_size": 2, "n_class": 10, "num_routing": 2, "recon_loss_weight": 0.4},
        {"data": (2, 1, 28, 28), "softmax_label": ((2,), "i9")},
    ),
}


def built(file, function, arguments):
    """What a function of an example gives. Examples import their neighbours."""
    path = EXAMPLES / file
    for folder in (path.parents[1], path.parent):
        sys.path.insert(0, str(folder))
    for name in ("find_mxnet", "mxboard"):  # of no use for a symbol
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].SummaryWriter = None
    if (path.parent / "__init__.py").exists() and "-" not in path.stem:
        module = importlib.import_module(f"{path.parent.name}.{path.stem}")
    else:
        spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, function)(**arguments)


def main(names):
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (file, function, arguments, inputs) in NETWORKS.items():
        if not names or name in names:
            with mx.name.NameManager():
                attempt(
                    f"example_{name}",
                    lambda: numbers(f"example_{name}", built(file, function, arguments), inputs, FOLDER),  # noqa: B023
                )


if __name__ == "__main__":
    main(sys.argv[3:])
