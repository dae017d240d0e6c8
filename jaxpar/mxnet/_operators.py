"""The table of MXNet's operators: what each computes, the shapes of its arrays, how it takes images."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import (
    _arrays as arrays,
    _boxes as boxes,
    _control as control,
    _elementwise as elementwise,
    _images as images,
    _layers as layers,
    _linear_algebra as linear_algebra,
    _losses as losses,
    _numpy as numpy,
    _random as random,
    _regions as regions,
    _shapes as shapes,
)
from ._elementwise import ARITHMETIC, aligned, in_dtype
from ._operator import Back, Last, Operator, dtype_of, row, same

A = TypeVar("A", jax.Array, np.ndarray)


def _rnn_outputs(attrs: Mapping[str, Any]) -> int:
    return (3 if attrs["mode"] == "lstm" else 2) if attrs["state_outputs"] else 1


def _and_statistics(attrs: Mapping[str, Any]) -> int:
    return 3 if attrs["output_mean_var"] else 1


# The attributes for images whose channels are last


def _axis(name: str, default: int) -> Last:
    """The attribute `name` is an axis."""

    def last(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**attrs, name: (0, 3, 1, 2)[attrs.get(name, default)]}

    return last


def _last_layout(attrs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    is_of_images = attrs.get("layout") in (None, "None", "NCHW") and len(attrs.get("kernel") or (1, 1)) == 2
    return {**attrs, "layout": "NHWC"} if is_of_images else None


def _last_split(attrs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return None if attrs.get("squeeze_axis") else _axis("axis", 1)(attrs)


def _last_leaky(attrs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A factor of each channel has its axis in the operator, and random ones follow the order of the values."""
    return None if attrs.get("act_type") in ("prelu", "rrelu") else attrs


def _unary(function: Callable[[Any], Any]) -> Operator:
    """These have no attributes. As in MXNet, those of a file are ignored, such as the dtype of zeros_like."""
    return row(lambda data, **ignored: in_dtype(function, data), same, shapes.back_same)


def _binary(function: Callable[[Any, Any], Any], back: Back | None = None) -> Operator:
    return row(lambda lhs, rhs: in_dtype(function, *aligned(lhs, rhs)), same, back)


def _with_scalar(function: Callable[[Any, Any], Any]) -> Operator:
    return row(
        lambda data, *, scalar=1.0, is_int=True: in_dtype(function, data if is_int else data * 1.0, scalar),
        same,
        shapes.back_same,
    )


def _amp_cast(data: jax.Array, *, dtype: str) -> jax.Array:
    """Only of floating arrays."""
    is_floating = jnp.issubdtype(data.dtype, jnp.floating)
    return data.astype(dtype_of(dtype)) if is_floating else data


def _amp_multicast(*data: jax.Array, num_outputs: int, cast_narrow: bool = False) -> Any:
    """All in the widest dtype of the arrays, or in the narrowest one."""
    choose = min if cast_narrow else max
    dtype = choose((x.dtype for x in data), key=lambda dtype: jnp.finfo(dtype).bits)
    outputs = tuple(x.astype(dtype) for x in data)
    return outputs[0] if len(outputs) == 1 else outputs


def _index_copy(old_tensor: jax.Array, index_vector: jax.Array, new_tensor: jax.Array) -> jax.Array:
    return old_tensor.at[index_vector.astype(jnp.int32)].set(new_tensor)


def _retain(data: jax.Array, indices: jax.Array) -> jax.Array:
    """The rows of these numbers. All others are 0."""
    rows = indices.astype(jnp.int32)
    return jnp.zeros_like(data).at[rows].set(data[rows])


def _whole(values: Any) -> jax.Array:
    return jnp.asarray(values, dtype_of("int64"))


_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "sum sum_axis": jnp.sum,
    "mean": jnp.mean,
    "prod": jnp.prod,
    "nansum": jnp.nansum,
    "nanprod": jnp.nanprod,
    "_square_sum": lambda data, **axes: jnp.square(data).sum(**axes),
    "max max_axis": arrays.extreme(jnp.max),
    "min min_axis": arrays.extreme(jnp.min),
}

# name: (the logarithm of the density, the names of the arrays)
_STATS = jax.scipy.stats
_DENSITIES: dict[str, tuple[Callable[..., jax.Array], str]] = {
    "uniform": (lambda x, low, high: _STATS.uniform.logpdf(x, low, high - low), "low high"),
    "normal": (_STATS.norm.logpdf, "mu sigma"),
    "gamma": (lambda x, alpha, beta: _STATS.gamma.logpdf(x * beta, alpha) + jnp.log(beta), "alpha beta"),
    "exponential": (lambda x, lam: jnp.log(lam) - lam * x, "lam"),
    "poisson": (_STATS.poisson.logpmf, "lam"),
    "negative_binomial": (random.log_negative_binomial, "k p"),
    "generalized_negative_binomial": (random.log_generalized_negative_binomial, "mu alpha"),
}


def _random_outputs(attrs: Mapping[str, Any]) -> int:
    return 2 if attrs.get("get_prob") else 1


_NAMED: dict[str, Operator] = {
    "Convolution Convolution_v1": Operator(layers.convolution, shapes.convolution, last=_last_layout),
    "Deconvolution": Operator(layers.deconvolution, shapes.deconvolution),
    "FullyConnected": Operator(layers.fully_connected, shapes.dense),
    "BatchNorm BatchNorm_v1 CuDNNBatchNorm _contrib_SyncBatchNorm": Operator(
        layers.batch_norm,
        shapes.channels(1),
        state=("moving_mean", "moving_var"),
        last=_axis("axis", 1),
        outputs=_and_statistics,
    ),
    "_contrib_BatchNormWithReLU": Operator(
        layers.batch_norm_with_relu,
        shapes.channels(1),
        state=("moving_mean", "moving_var"),
        last=_axis("axis", 1),
        outputs=_and_statistics,
    ),
    "Pooling": Operator(layers.pooling, last=_last_layout),
    "Pooling_v1": Operator(layers.pooling_v1),
    "Dropout": Operator(layers.dropout),
    "Activation": Operator(layers.activation, last=same),
    "LeakyReLU": Operator(
        layers.leaky_relu,
        shapes.channels(1),
        last=_last_leaky,
        outputs=lambda attrs: 2 if attrs["act_type"] == "rrelu" else 1,
    ),
    "L2Normalization": Operator(layers.l2_normalization),
    "LRN": Operator(layers.lrn),
    "LayerNorm": Operator(layers.layer_norm, shapes.channels(-1), outputs=_and_statistics),
    "InstanceNorm": Operator(layers.instance_norm, shapes.channels(1)),
    "GroupNorm": Operator(
        layers.group_norm,
        lambda _, a: dict.fromkeys(("gamma", "beta"), (a.get("num_groups", 1),)),
        outputs=_and_statistics,
    ),
    "UpSampling": Operator(layers.up_sampling, shapes.up_sampling),
    "RNN": Operator(layers.rnn, shapes.recurrent, outputs=_rnn_outputs),
    "Embedding _contrib_SparseEmbedding": Operator(
        arrays.embedding, lambda _, a: {"weight": (a["input_dim"], a["output_dim"])}
    ),
    "SoftmaxOutput Softmax": Operator(losses.softmax_output, labels=shapes.label_of_softmax),
    "LinearRegressionOutput": Operator(losses.linear_regression, labels=shapes.label_of_regression),
    "LogisticRegressionOutput": Operator(losses.logistic_regression, labels=shapes.label_of_regression),
    "MAERegressionOutput": Operator(losses.mae_regression, labels=shapes.label_of_regression),
    "MakeLoss": Operator(losses.make_loss),
    "make_loss": _unary(losses.make_loss),
    "IdentityAttachKLSparseReg": Operator(
        losses.with_sparse_activations, lambda data, _: {"moving_avg": data[1:2]}, state=("moving_avg",)
    ),
    "SVMOutput": Operator(losses.svm_output, labels=lambda data, _: data[:1]),
    "CTCLoss ctc_loss _contrib_CTCLoss _contrib_ctc_loss": Operator(losses.ctc_loss),
    "softmax_cross_entropy": Operator(losses.softmax_cross_entropy),
    "_contrib_hawkesll": Operator(losses.hawkes_log_likelihood, outputs=lambda attrs: 2),
    "softmax": Operator(elementwise.softmax(jax.nn.softmax), last=_axis("axis", -1)),
    "softmin": Operator(elementwise.softmax(jax.nn.softmax, -1), last=_axis("axis", -1)),
    "log_softmax": Operator(elementwise.softmax(jax.nn.log_softmax), last=_axis("axis", -1)),
    "SoftmaxActivation": Operator(layers.softmax_activation),
    "smooth_l1": Operator(elementwise.smooth_l1, last=same),
    "clip": Operator(elementwise.clip, last=same, back=shapes.back_same),
    "hard_sigmoid": Operator(elementwise.hard_sigmoid, last=same),
    "Reshape reshape": Operator(arrays.reshape, back=shapes.back_of_one(shapes.back_flat)),
    "reshape_like": Operator(arrays.reshape_like),
    "broadcast_like": Operator(arrays.broadcast_like),
    "Flatten flatten": row(lambda data: data.reshape(data.shape[0], -1)),
    "transpose": row(
        lambda data, *, axes=(): data.transpose(axes or None), back=shapes.back_of_one(shapes.back_transposed)
    ),
    "SwapAxis swapaxes SwapAxes": row(
        lambda data, *, dim1=0, dim2=0: data.swapaxes(dim1, dim2), back=shapes.back_of_one(shapes.back_swapped)
    ),
    "expand_dims": row(
        lambda data, *, axis: jnp.expand_dims(data, axis), back=shapes.back_of_one(shapes.back_expanded), axis="int"
    ),
    "squeeze": row(lambda data, *, axis=None: data.squeeze(axis), axis="tuple | None"),
    "Concat concat": row(lambda *data, dim=1: jnp.concatenate(data, dim), _axis("dim", 1), shapes.back_joined),
    "_rnn_param_concat": row(lambda *data, dim=1: jnp.concatenate(data, dim), back=shapes.back_packed),
    "stack": row(lambda *data, axis=0: jnp.stack(data, axis), back=shapes.back_stacked),
    "add_n ElementWiseSum _sum": row(lambda *args: sum(args[1:], args[0]), same, shapes.back_same),
    "tile": row(lambda data, *, reps: jnp.tile(data, reps), reps="tuple"),
    "repeat": row(lambda data, *, repeats, axis=None: data.repeat(repeats, axis), repeats="int", axis="int | None"),
    "Pad pad": Operator(arrays.pad),
    "reverse flip": row(lambda data, *, axis: jnp.flip(data, axis), axis="tuple"),
    "slice crop": Operator(arrays.slice_),
    "slice_axis": Operator(arrays.slice_axis, last=_axis("axis", 0)),
    "slice_like": Operator(arrays.slice_like),
    "SliceChannel split": Operator(
        arrays.slice_channel,
        last=_last_split,
        back=shapes.back_of_one(shapes.back_split),
        outputs=lambda attrs: attrs["num_outputs"],
    ),
    "_split_v2": Operator(
        arrays.split_v2, outputs=lambda attrs: attrs["sections"] if attrs["sections"] > 0 else len(attrs["indices"])
    ),
    "Crop": Operator(arrays.crop),
    "Cast cast": row(lambda data, *, dtype: data.astype(dtype_of(dtype)), same, shapes.back_same, dtype="str"),
    "norm": Operator(arrays.norm),
    "argmax": Operator(arrays.place(jnp.argmax)),
    "argmin": Operator(arrays.place(jnp.argmin)),
    "broadcast_to": Operator(arrays.broadcast_to),
    "broadcast_axis broadcast_axes": Operator(arrays.broadcast_axis),
    "dot": Operator(arrays.dot),
    "batch_dot": Operator(arrays.batch_dot),
    "take": Operator(arrays.take),
    "pick choose_element_0index": Operator(arrays.pick),
    "gather_nd": row(lambda data, indices: data[tuple(indices.astype(jnp.int32))]),
    "one_hot": Operator(arrays.one_hot),
    "where": Operator(arrays.where),
    "_zeros": Operator(arrays.filled(0.0)),
    "_ones": Operator(arrays.filled(1.0)),
    "_full": Operator(arrays.filled(None)),
    "_arange": Operator(arrays.arange),
    "_linspace": Operator(arrays.linspace),
    "_eye": Operator(arrays.eye),
    "_contrib_arange_like": Operator(arrays.arange_like),
    "cast_storage": row(lambda data, *, stype: data, same, shapes.back_same, stype="str"),
    "_sparse_retain": row(_retain),
    "amp_cast": row(_amp_cast, same, shapes.back_same, dtype="str"),
    "amp_multicast": Operator(_amp_multicast, last=same, outputs=lambda attrs: attrs["num_outputs"]),
    "sort": Operator(arrays.sort),
    "argsort": Operator(arrays.argsort),
    "topk": Operator(arrays.topk, outputs=lambda attrs: 2 if attrs["ret_typ"] == "both" else 1),
    "argmax_channel": row(lambda data: data.argmax(1).astype(data.dtype)),
    "batch_take": row(lambda a, indices: arrays.pick(a, indices)),
    "shape_array": row(lambda data: _whole(data.shape)),
    "size_array": row(lambda data: _whole(np.array([data.size]))),
    "scatter_nd": Operator(arrays.scatter_nd),
    "_slice_assign _crop_assign": Operator(arrays.slice_assign),
    "_slice_assign_scalar _crop_assign_scalar": Operator(arrays.slice_assign_scalar),
    "depth_to_space": Operator(arrays.depth_to_space),
    "space_to_depth": Operator(arrays.space_to_depth),
    "cumsum _np_cumsum": Operator(arrays.cumsum),
    "diag": Operator(arrays.diag),
    "moments": Operator(arrays.moments, outputs=lambda attrs: 2),
    "khatri_rao": Operator(arrays.khatri_rao),
    "_ravel_multi_index ravel_multi_index": row(
        lambda data, *, shape: jnp.ravel_multi_index(tuple(data.astype(int)), shape, mode="wrap").astype(data.dtype),
        shape="tuple",
    ),
    "_unravel_index unravel_index": row(
        lambda data, *, shape: jnp.stack(jnp.unravel_index(data.astype(int), shape)).astype(data.dtype), shape="tuple"
    ),
    "_histogram": Operator(arrays.histogram, outputs=lambda attrs: 2),
    "_identity_with_attr_like_rhs": row(lambda lhs, rhs: lhs),
    "_contrib_index_array": Operator(arrays.index_array),
    "_contrib_index_copy": row(_index_copy),
    "_contrib_allclose": row(
        lambda a, b, *, rtol=1e-5, atol=1e-8, equal_nan=True: jnp.allclose(a, b, rtol, atol, equal_nan).astype(
            jnp.float32
        )
    ),
    "_contrib_div_sqrt_dim": row(lambda data: data / math.sqrt(data.shape[-1])),
    "_contrib_quadratic": row(lambda data, *, a=0.0, b=0.0, c=0.0: a * data**2 + b * data + c, same, shapes.back_same),
    "_contrib_gradientmultiplier": row(
        lambda data, *, scalar=1.0, is_int=True: lax.stop_gradient(data) + scalar * (data - lax.stop_gradient(data)),
        same,
        shapes.back_same,
    ),
    "_contrib_interleaved_matmul_selfatt_qk": Operator(arrays.selfatt_qk),
    "_contrib_interleaved_matmul_selfatt_valatt": Operator(arrays.selfatt_valatt),
    "_contrib_interleaved_matmul_encdec_qk": Operator(arrays.encdec_qk),
    "_contrib_interleaved_matmul_encdec_valatt": Operator(arrays.encdec_valatt),
    "_contrib_AdaptiveAvgPooling2D": Operator(images.adaptive_avg_pooling),
    "_contrib_BilinearResize2D": Operator(images.bilinear_resize),
    "GridGenerator": Operator(images.grid_generator),
    "BilinearSampler": Operator(images.bilinear_sampler),
    "SpatialTransformer": Operator(images.spatial_transformer),
    "Correlation": Operator(images.correlation),
    "im2col": Operator(images.im2col),
    "col2im": Operator(images.col2im),
    "_contrib_DeformableConvolution": Operator(images.deformable_convolution, shapes.deformable),
    "_contrib_ModulatedDeformableConvolution": Operator(images.modulated_deformable_convolution, shapes.deformable),
    "_image_to_tensor": Operator(images.to_tensor),
    "_image_normalize": Operator(images.image_normalize),
    "_image_flip_left_right": row(lambda data: jnp.flip(data, -2)),
    "_image_flip_top_bottom": row(lambda data: jnp.flip(data, -3)),
    "_image_resize": Operator(images.image_resize),
    "_image_crop": row(
        lambda data, *, x, y, width, height: data[..., y : y + height, x : x + width, :],
        **dict.fromkeys(("x", "y", "width", "height"), "int"),
    ),
    "_contrib_box_iou": Operator(boxes.box_iou),
    "_contrib_box_nms _contrib_box_non_maximum_suppression": Operator(boxes.box_nms),
    "_contrib_bipartite_matching": Operator(boxes.bipartite_matching, outputs=lambda attrs: 2),
    "_contrib_box_decode": Operator(boxes.box_decode),
    "_contrib_box_encode": Operator(boxes.box_encode, outputs=lambda attrs: 2),
    "_contrib_MultiBoxPrior": Operator(boxes.multibox_prior),
    "_contrib_MultiBoxDetection": Operator(boxes.multibox_detection),
    "_contrib_MultiBoxTarget": Operator(boxes.multibox_target, outputs=lambda attrs: 3),
    "_contrib_Proposal _contrib_MultiProposal": Operator(
        boxes.proposal, outputs=lambda attrs: 2 if attrs["output_score"] else 1
    ),
    "_contrib_ROIAlign": Operator(regions.roi_align),
    "ROIPooling": Operator(regions.roi_pooling),
    "_contrib_PSROIPooling": Operator(regions.psroi_pooling),
    "_contrib_DeformablePSROIPooling": Operator(regions.deformable_psroi_pooling),
    "_contrib_RROIAlign": Operator(regions.rroi_align),
    **{
        f"_linalg_{name} linalg_{name}": Operator(function, outputs=lambda attrs, count=count: count)
        for name, function, count in (
            *((name, getattr(linear_algebra, name), 1) for name in "gemm gemm2 syrk trmm trsm potri".split()),
            *(
                (name, getattr(linear_algebra, name), 1)
                for name in "sumlogdiag makediag extracttrian maketrian".split()
            ),
            *((name, getattr(linear_algebra, name), 2) for name in ("gelqf", "syevd")),
        )
    },
    "_linalg_potrf linalg_potrf": row(lambda a: jnp.linalg.cholesky(a)),
    "_linalg_inverse linalg_inverse": row(lambda a: jnp.linalg.inv(a)),
    "_linalg_det linalg_det": row(lambda a: jnp.linalg.det(a)),
    "_linalg_slogdet linalg_slogdet": row(lambda a: tuple(jnp.linalg.slogdet(a)), outputs=lambda attrs: 2),
    "_linalg_extractdiag linalg_extractdiag": row(lambda a, *, offset=0: jnp.diagonal(a, offset, -2, -1)),
    **{names: Operator(function, outputs=_random_outputs) for names, function in random.OPERATORS.items()},
    **{
        f"_random_pdf_{name} random_pdf_{name}": Operator(random.density(function, arrays_of))
        for name, (function, arrays_of) in _DENSITIES.items()
    },
    "_random_pdf_dirichlet random_pdf_dirichlet": Operator(random.pdf_dirichlet),
    **{
        name: Operator(fn, back=back, outputs=lambda attrs: attrs["num_outputs"], graphs=graphs)
        for name, (fn, back, graphs) in control.OPERATORS.items()
    },
    "SequenceMask": Operator(arrays.sequence_mask),
    "SequenceLast": Operator(arrays.sequence_last),
    "SequenceReverse": Operator(arrays.sequence_reverse),
    **{names: Operator(arrays.reduction(function)) for names, function in _REDUCTIONS.items()},
    **{names: _with_scalar(function) for names, function in elementwise.REVERSED.items()},
    **{names: _unary(function) for names, function in elementwise.UNARY.items()},
    **{names: _binary(f, shapes.back_same) for f, names, _ in ARITHMETIC.values()},
    **{f"broadcast_{name}": _binary(f) for name, (f, _, _) in ARITHMETIC.items()},
    "broadcast_plus": _binary(jnp.add),
    "broadcast_minus": _binary(jnp.subtract),
    **{names: _with_scalar(f) for f, _, names in ARITHMETIC.values()},
}

OPERATORS: dict[str, Operator] = {
    name: operator for names, operator in (_NAMED | numpy.OPERATORS).items() for name in names.split()
}

# Operators which broadcast an axis of length 1 whose rows are all equal, or keep it so.
BY_ROWS = frozenset(
    [name for name, operator in OPERATORS.items() if operator.last is same]
    + "FullyConnected Convolution LeakyReLU SliceChannel split RNN where".split()
)


# Images whose channels are last. A network of layout "NHWC" has images as (batch, height, width, channels) and the
# weights of convolutions as (height, width, in, out). An image stays so from operator to operator, as long as these
# commute with the change. Before any other it is turned into MXNet's layout, so what a network computes is the same.

IMAGES, KERNELS = (0, 2, 3, 1), (2, 3, 1, 0)  # MXNet's axes, in the order in which they are kept


@dataclasses.dataclass(frozen=True)
class Turned:
    """An array of MXNet with its axes in another order."""

    array: jax.Array
    axes: tuple[int, ...]


def turn(array: A, axes: tuple[int, ...]) -> A:
    """An array of MXNet's order in this order. An array that has not four axes is the same in both."""
    return array.transpose(axes) if array.ndim == 4 else array


def back(array: A, axes: tuple[int, ...]) -> A:
    """An array of this order in MXNet's order."""
    return turn(array, tuple(np.argsort(axes)))


def wrap(array: jax.Array, axes: tuple[int, ...]) -> jax.Array | Turned:
    """An array that a network of this layout is given."""
    return Turned(array, axes) if array.ndim == 4 else array


def unwrap(value: Any) -> Any:
    """A value of a network in MXNet's order."""
    return back(value.array, value.axes) if isinstance(value, Turned) else value


def once(value: Any) -> Any:
    """A value of a network that XLA computes once, however many read it."""
    if isinstance(value, Turned):
        return Turned(lax.optimization_barrier(value.array), value.axes)
    return None if value is None else lax.optimization_barrier(value)


def image(value: Any) -> Any:
    """A value of a network as one of layout NHWC."""
    if isinstance(value, Turned) and value.axes == IMAGES:
        return value.array
    return None if value is None else turn(unwrap(value), IMAGES)


def run(
    operator: Operator,
    attrs: Mapping[str, Any],
    values: Sequence[Any],
    compute: Callable[[Sequence[Any], Mapping[str, Any]], Any],
) -> Any:
    """What an operator gives, by `compute(arrays, attributes)`: in the layout of its images where it can."""
    last = operator.last(attrs) if operator.last and any(isinstance(v, Turned) for v in values) else None
    images = values[:1] if operator.shapes else values  # the others are vectors and weights
    if last is None or not all(isinstance(v, Turned) or np.ndim(v) == 4 for v in images):
        return compute([unwrap(v) for v in values], attrs)
    outputs = compute([image(v) for v in values], last)
    return jax.tree.map(lambda x: wrap(x, IMAGES), outputs)
