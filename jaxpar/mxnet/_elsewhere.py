"""Names of MXNet that are elsewhere here, and what to write in their place: of `mx`, of its objects, and arguments.

Those of a KVStore are in `_store/mxnet_names.py`, with the arguments of `Module.fit` and `gluon.Trainer`, since rooms
below this one answer them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """{name: hint} of {"name name": hint}"""
    return {name: hint for names, hint in table.items() for name in names.split()}


_TRAIN = "mxnet.load_symbol(path) gives a model, and train.start and train.fit train it: docs/from_mxnet.md"
_ARRAYS = "write jax.numpy; mxnet.load_params(file) reads a file of arrays"
_LAYERS = (
    "write the network in JAX, Flax or Equinox; `jaxpar port` writes one of a symbol file; mxnet.operator(name) is an "
    "operator of MXNet"
)

# After `jp.mxnet.`
NAMES = _by_name(
    {
        "Module BucketingModule SequentialModule PythonModule FeedForward mod module model executor Executor": _TRAIN,
        "ImageRecordIter ImageRecordUInt8Iter ImageRecordInt8Iter ImageDetRecordIter io image img": (
            "write mxnet.image_record_source(rec, batch_size)"
        ),
        "NDArrayIter DataIter DataBatch DataDesc CSVIter LibSVMIter MNISTIter": "write data.Dataset(images, labels)",
        "MXRecordIO MXIndexedRecordIO IRHeader recordio unpack unpack_img pack": "write mxnet.RecordFile(rec, idx)",
        "lr_scheduler FactorScheduler MultiFactorScheduler PolyScheduler CosineScheduler LRScheduler": (
            "give a schedule of optax as learning_rate: mxnet.sgd(optax.cosine_decay_schedule(0.1, 10_000))"
        ),
        "metric EvalMetric Accuracy TopKAccuracy CrossEntropy Perplexity F1 MSE MAE RMSE CompositeEvalMetric": (
            "write train.accuracy, train.top_k and others of jp.train"
        ),
        "initializer init Xavier MSRAPrelu Uniform Normal Zero One Constant Orthogonal Bilinear": (
            "write jax.nn.initializers; the module of `jaxpar port` has init(rng)"
        ),
        "viz visualization plot_network print_summary": "write jp.viz.plot_network, jp.viz.print_summary",
        "nd ndarray NDArray np numpy npx": _ARRAYS,
        "sym symbol Symbol Variable var Group gluon HybridBlock Block SymbolBlock rnn contrib": _LAYERS,
        "autograd": "write jax.grad, jax.value_and_grad",
        "optimizer opt create SGD Adam NAG RMSProp AdaGrad": (
            "write mxnet.sgd, mxnet.nag, mxnet.adam, mxnet.rmsprop, mxnet.adagrad, or optax"
        ),
        "kv kvstore KVStore kvstore_server": "write jp.kv",
        "Trainer": "write state, step = train.start(params, mxnet.sgd(0.1), loss_fn)",
        "callback Speedometer do_checkpoint module_checkpoint ProgressBar": (
            "write callbacks= and checkpoint_dir= of train.fit, which shows progress itself"
        ),
        "cpu gpu cpu_pinned num_gpus Context context current_context device": "write jax.devices()",
        "random rnd seed": "write jax.random; train.start takes rng=",
        "load": "write mxnet.load_symbol, mxnet.load_checkpoint or mxnet.load_params",
        "save": "write model.save_params(file, params, state)",
        "mon monitor Monitor": "write model.compare(file), which names the first layer that differs",
        "profiler profile": "write train.fit(profile=...)",
        "engine waitall": "write jax.block_until_ready(value)",
        "amp": "write compute_dtype=jnp.bfloat16 in train.start",
        "AttrScope NameManager attribute name": "write the attributes in the symbol file; model.lr_mult reads them",
        "test_utils util runtime libinfo": "leave it out",
    }
)

# After a model, as of a Module, a Symbol or a Block
METHODS = _by_name(
    {
        "forward predict": "write model.apply(model.params, images)",
        "backward update fit init_optimizer forward_backward": (
            "write state, step = train.start(model.params, mxnet.sgd(0.1), loss_fn, model_state=model.state), and "
            "train.fit(state, step, data)"
        ),
        "score": "write train.evaluate",
        "bind simple_bind set_params init_params initialize hybridize collect_params cast eval": (
            "leave it out: model.apply is a function of params, which you pass"
        ),
        "infer_shape infer_shape_partial": "write model.shapes(data=(1, 3, 224, 224))",
        "get_params list_arguments list_auxiliary_states get_outputs arg_params aux_params": (
            "write model.params, model.state, model.inputs, model.outputs"
        ),
        "list_outputs output_names": "write model.outputs",
        "list_inputs data_names label_names": "write model.inputs",
        "get_internals attr attr_dict list_attr tojson debug_str": "write model.symbol, which has the nodes",
        "save save_checkpoint save_parameters export": "write model.save_params(file, params, state)",
        "load load_parameters load_params load_checkpoint": "write mxnet.load_checkpoint(prefix, epoch)",
    }
)

# Of `model.apply` and `model.shapes`
ARGUMENTS = _by_name(
    {
        "data data0 data1 x softmax_label label": 'give inputs by position, or as one dict: apply(params, {"data": x})',
        "is_train training": "call it train",
        "aux_states aux_params aux model_state": "call it state",
        "arg_params": "give params as the first argument",
        "key": "call it rng",
    }
)

# Of `load_symbol` and `load_checkpoint`
FILE_ARGUMENTS = _by_name(
    {
        "ctx context": "leave it out: jax.device_put, or train.start(devices=), puts params on devices",
        "input_names": "leave it out: model.inputs has the names of the file",
        "allow_missing ignore_extra": "leave it out: arrays that the graph does not have are left out",
        "load_optimizer_states": "see docs/from_mxnet.md, In the middle of training",
    }
)

if TYPE_CHECKING:  # a type checker knows the names, and finds others wrong
    __all__: list[str] = []
else:
    __all__ = ["__getattr__"]

    def __getattr__(name: str) -> object:
        hint = f"; {NAMES[name]}" if name in NAMES else ""
        raise AttributeError(f"module 'jaxpar.mxnet' has no attribute {name!r}{hint}")
