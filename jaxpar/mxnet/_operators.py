"""The table of MXNet's operators: what each computes, the shapes of its arrays, how it takes images.

An operator is a function of arrays, and of attributes by keyword. Two keywords are no attributes: `train` says whether
the network is being trained, and `rng` is a random key of this node.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from . import (
    _arrays as arrays,
    _boxes as boxes,
    _images as images,
    _layers as layers,
    _linear_algebra as linear_algebra,
    _losses as losses,
    _random as random,
)

_BY_MODEL = frozenset(("train", "rng"))  # keywords that the model gives itself
A = TypeVar("A", jax.Array, np.ndarray)
Shape = tuple[int, ...]
Shapes = Callable[[Shape, Mapping[str, Any]], Mapping[str, Shape]]
Last = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
# The shapes of an operator's arrays, of those of its outputs, of its arrays as far as they are known, and attributes.
Back = Callable[[Sequence[Shape | None], Sequence[Shape | None], Mapping[str, Any]], Sequence[Shape | None]]


@dataclasses.dataclass(frozen=True)
class Operator:
    """What a node computes."""

    fn: Callable[..., Any]  # of its arrays and attributes
    shapes: Shapes | None = None  # of its other arrays, of the first one's shape and the attributes
    state: tuple[str, ...] = ()  # the last arrays, if they are running statistics. Then `fn` gives (outputs, new ones)
    # Of a loss layer, the shape of its label, of the first array's shape and the attributes. It is the array after the
    # first, and may be missing where nothing is trained.
    labels: Callable[[Shape, Mapping[str, Any]], Shape] | None = None
    # The attributes with which `fn` takes images whose channels are last, of those of the file. None, or a function
    # that gives None: such images have to be turned into MXNet's layout before.
    last: Last | None = None
    back: Back | None = None  # None: the shapes of its arrays do not follow from those of its outputs
    outputs: Callable[[Mapping[str, Any]], int] = lambda attrs: 1  # how many it gives, of all attributes

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.fn).parameters

    @functools.cached_property
    def slots(self) -> tuple[str, ...]:
        """The names of its arrays."""
        return tuple(n for n, p in self.parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))

    @functools.cached_property
    def attributes(self) -> Mapping[str, inspect.Parameter]:
        return {n: p for n, p in self.parameters.items() if p.kind == p.KEYWORD_ONLY and n not in _BY_MODEL}

    @functools.cached_property
    def by_model(self) -> frozenset[str]:
        """Which of `train` and `rng` it takes."""
        return _BY_MODEL & self.parameters.keys()


def _convolution_shapes(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    last = (attrs.get("layout") or "NC").endswith("C") and "layout" in attrs
    channels = (data[-1] if last else data[1]) // attrs.get("num_group", 1)
    count, kernel = attrs["num_filter"], attrs["kernel"]
    return {"weight": (count, *kernel, channels) if last else (count, channels, *kernel), "bias": (count,)}


def _deconvolution_shapes(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    count = attrs["num_filter"]
    return {"weight": (data[1], count // attrs.get("num_group", 1), *attrs["kernel"]), "bias": (count,)}


def _dense_shapes(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    inputs = math.prod(data[1:]) if attrs.get("flatten", True) else data[-1]
    return {"weight": (attrs["num_hidden"], inputs), "bias": (attrs["num_hidden"],)}


def _up_sampling_shapes(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    size = 2 * attrs["scale"] - attrs["scale"] % 2
    return {"weight": (data[1], 1, size, size)} if attrs["sample_type"] == "bilinear" else {}


def _channels(axis: int) -> Shapes:
    def shapes(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
        channels = (data[attrs.get("axis", axis)],)
        return dict.fromkeys(("gamma", "beta", "moving_mean", "moving_var"), channels)

    return shapes


def _rnn_shapes(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    directions = 2 if attrs.get("bidirectional") else 1
    hidden, depth = attrs["state_size"], attrs["num_layers"]
    count = layers.parameter_count(attrs["mode"], data[2], hidden, depth, directions)
    state = (depth * directions, data[1], hidden)
    return {"parameters": (count,), "state": state, "state_cell": state}


def _deformable_shapes(data: Shape, attrs: Mapping[str, Any]) -> Mapping[str, Shape]:
    channels = data[1] // attrs.get("num_group", 1)
    return {"weight": (attrs["num_filter"], channels, *attrs["kernel"]), "bias": (attrs["num_filter"],)}


def _rnn_outputs(attrs: Mapping[str, Any]) -> int:
    return (3 if attrs["mode"] == "lstm" else 2) if attrs["state_outputs"] else 1


def _and_statistics(attrs: Mapping[str, Any]) -> int:
    return 3 if attrs["output_mean_var"] else 1


# The shapes of labels, as MXNet infers them: first from what is predicted, then back to the variable


def _label_of_softmax(data: Shape, attrs: Mapping[str, Any]) -> Shape:
    return (data[0], math.prod(data[2:])) if attrs.get("multi_output") else data[:-1]


def _label_of_regression(data: Shape, attrs: Mapping[str, Any]) -> Shape:
    return data[:1] if len(data) == 2 and data[1] == 1 else data


def _back_same(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    """Of operators whose arrays and outputs have one shape."""
    shape = next((shape for shape in (*outputs, *arrays) if shape is not None), None)
    return [shape] * len(arrays)


def _back_of_one(function: Callable[[Shape, Mapping[str, Any]], Shape | None]) -> Back:
    """Of operators with one array, whose shape is a function of that of an output."""

    def back(
        outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
    ) -> Sequence[Shape | None]:
        output = next((shape for shape in outputs if shape is not None), None)
        return [None if output is None else function(output, attrs)]

    return back


def _back_transposed(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    axes = attrs.get("axes") or range(len(shape))[::-1]
    return tuple(shape[list(axes).index(i)] for i in range(len(shape)))


def _back_swapped(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    swapped = list(shape)
    a, b = attrs.get("dim1", 0), attrs.get("dim2", 0)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return tuple(swapped)


def _back_expanded(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    axis = attrs["axis"] % len(shape)
    return shape[:axis] + shape[axis + 1 :]


def _back_split(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    count, axis = attrs["num_outputs"], attrs.get("axis", 1)
    if attrs.get("squeeze_axis"):
        axis %= len(shape) + 1
        return (*shape[:axis], count, *shape[axis:])
    axis %= len(shape)
    return (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])


def _back_flat(shape: Shape, attrs: Mapping[str, Any]) -> Shape | None:
    """What is reshaped to a shape that keeps its axes is known, and what is reshaped to (-1,) is not."""
    codes = attrs.get("shape") or ()
    plain = not attrs.get("reverse") and len(codes) == len(shape) and all(n == 0 for n in codes)
    return shape if plain else None


def _back_joined(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    """Of Concat: an array that is alone unknown has what the others leave."""
    output, missing = outputs[0], [i for i, shape in enumerate(arrays) if shape is None]
    inferred = list(arrays)
    if output is not None and len(missing) == 1:
        axis = attrs.get("dim", 1) % len(output)
        left = output[axis] - sum(shape[axis] for shape in arrays if shape is not None)
        inferred[missing[0]] = (*output[:axis], left, *output[axis + 1 :])
    return inferred


def _back_packed(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    """Of the packed weights of a recurrent layer: as in MXNet, the vectors that are unknown have equal lengths."""
    missing, output = arrays.count(None), outputs[0]
    if output is None or not missing:
        return arrays
    length = (output[0] - sum(shape[0] for shape in arrays if shape is not None)) // missing
    return [(length,) if shape is None else shape for shape in arrays]


def _back_stacked(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    output = outputs[0]
    return [None if output is None else _back_expanded(output, {"axis": attrs.get("axis", 0)})] * len(arrays)


# The attributes for images whose channels are last


def _same(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    return attrs


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


# Elementwise


def _softmax(function: Callable[..., jax.Array], sign: float = 1) -> Callable[..., jax.Array]:
    def softmax(
        data: jax.Array,
        length: jax.Array | None = None,
        *,
        axis: int = -1,
        temperature: float | None = None,
        dtype: str | None = None,
        use_length: bool | None = False,
    ) -> jax.Array:
        if use_length and function is jax.nn.log_softmax:
            raise ValueError("log_softmax: use_length is not supported")
        data = sign * data / temperature if temperature else sign * data
        if use_length and length is not None:
            # Behind its length a sequence has no probability.
            inside = jnp.expand_dims(length, axis) > lax.broadcasted_iota(jnp.int32, data.shape, axis % data.ndim)
            data = jnp.where(inside, data, jnp.finfo(data.dtype).min)
            out = jnp.where(inside, function(data, axis), 0)
        else:
            out = function(data, axis)
        return out.astype(jax.dtypes.canonicalize_dtype(dtype)) if dtype else out

    return softmax


def _clip(data: jax.Array, *, a_min: float, a_max: float) -> jax.Array:
    """As in MXNet, a value at the bound has the whole gradient."""
    low, high = (jnp.asarray(bound).astype(data.dtype) for bound in (a_min, a_max))
    return jnp.where(data > high, high, jnp.where(data < low, low, data))


def _hard_sigmoid(data: jax.Array, *, alpha: float = 0.2, beta: float = 0.5) -> jax.Array:
    """As in MXNet, a value at the bound has no gradient."""
    line = alpha * data + beta
    return jnp.where(line >= 1, 1, jnp.where(line <= 0, 0, line))


def _smooth_l1(data: jax.Array, *, scalar: float = 1.0) -> jax.Array:
    square = scalar * scalar
    return jnp.where(jnp.abs(data) > 1 / square, jnp.abs(data) - 0.5 / square, 0.5 * square * data * data)


def _row(
    fn: Callable[..., Any],
    last: Last | None = None,
    back: Back | None = None,
    outputs: Callable[[Mapping[str, Any]], int] = lambda attrs: 1,
    **forms: str,
) -> Operator:
    """An operator in one line. Its attributes are read as `forms` say, and else as their defaults are."""
    attributes = [p for p in inspect.signature(fn).parameters.values() if p.kind == p.KEYWORD_ONLY]
    fn.__annotations__ = {p.name: type(p.default).__name__ for p in attributes} | forms
    return Operator(fn, last=last, back=back, outputs=outputs)


def _typed(function: Callable[..., Any], *values: Any) -> jax.Array:
    """What a function gives, in the dtype of the arrays as in MXNet. Beside whole numbers a scalar is cut to one."""
    dtype = jnp.result_type(*(value for value in values if not isinstance(value, float)))
    if jnp.issubdtype(dtype, jnp.integer):
        values = tuple(jnp.asarray(int(v)).astype(dtype) if isinstance(v, float) else v for v in values)
    out = function(*values)
    return out if dtype == np.dtype(bool) else out.astype(dtype)


def _unary(function: Callable[[Any], Any]) -> Operator:
    """These have no attributes. As in MXNet, those of a file are ignored, such as the dtype of zeros_like."""
    return _row(lambda data, **ignored: _typed(function, data), _same, _back_same)


def _binary(function: Callable[[Any, Any], Any], back: Back | None = None) -> Operator:
    return _row(lambda lhs, rhs: _typed(function, lhs, rhs), _same, back)


def _with_scalar(function: Callable[[Any, Any], Any]) -> Operator:
    return _row(
        lambda data, *, scalar=1.0, is_int=True: _typed(function, data if is_int else data * 1.0, scalar),
        _same,
        _back_same,
    )


def _rint(x: jax.Array) -> jax.Array:
    """As in MXNet, halves go down."""
    return jnp.where(x - jnp.floor(x) > jnp.ceil(x) - x, jnp.ceil(x), jnp.floor(x))


def _round(x: jax.Array) -> jax.Array:
    """Halves go away from 0."""
    return jnp.trunc(x) + jnp.trunc(2 * (x - jnp.trunc(x)))


def _divide(a: ArrayLike, b: ArrayLike) -> jax.Array:
    """Of integers that without its fraction."""
    dtype = jnp.result_type(a, b)
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.divide(a, b)
    return lax.div(*jnp.broadcast_arrays(jnp.asarray(a, dtype), jnp.asarray(b, dtype)))


def _mod(a: Any, b: Any) -> jax.Array:
    """As in MXNet, 0 where the divisor is, with the gradient of `a`."""
    remainder = jnp.mod(a, jnp.where(b == 0, 1, b))
    return jnp.where(b == 0, a - lax.stop_gradient(a), remainder)


def _maximum(a: Any, b: Any) -> jax.Array:
    """As in MXNet, the first of two equal values has the whole gradient."""
    return jnp.where((a >= b) | jnp.isnan(a), a, b)


def _minimum(a: Any, b: Any) -> jax.Array:
    return jnp.where((a <= b) | jnp.isnan(a), a, b)


def _straight(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A function whose gradient is passed on as it is."""
    return lambda x: lax.stop_gradient(function(x)) + (x - lax.stop_gradient(x))


def _amp_cast(data: jax.Array, *, dtype: str) -> jax.Array:
    """Only of floating arrays."""
    is_floating = jnp.issubdtype(data.dtype, jnp.floating)
    return data.astype(jax.dtypes.canonicalize_dtype(dtype)) if is_floating else data


def _amp_multicast(*data: jax.Array, num_outputs: int, cast_narrow: bool = False) -> Any:
    """All in the widest dtype of the arrays, or in the narrowest one."""
    choose = min if cast_narrow else max
    dtype = choose((x.dtype for x in data), key=lambda dtype: jnp.finfo(dtype).bits)
    outputs = tuple(x.astype(dtype) for x in data)
    return outputs[0] if len(outputs) == 1 else outputs


def _index_copy(old_tensor: jax.Array, index_vector: jax.Array, new_tensor: jax.Array) -> jax.Array:
    return old_tensor.at[index_vector.astype(jnp.int32)].set(new_tensor)


def _whole(values: ArrayLike) -> jax.Array:
    return jnp.asarray(values, jax.dtypes.canonicalize_dtype("int64"))


_UNARY: dict[str, Callable[[Any], jax.Array]] = {
    **{n: getattr(jnp, n) for n in "sign ceil floor trunc square sqrt exp log log10 log2 log1p expm1".split()},
    **{n: getattr(jnp, n) for n in "sin cos tan sinh cosh tanh arcsin arccos arctan arcsinh arccosh arctanh".split()},
    **{n: getattr(jnp, n) for n in "negative reciprocal cbrt degrees radians zeros_like ones_like".split()},
    "abs": arrays.absolute,
    "fix": jnp.trunc,
    "rint": _rint,
    "round": _round,
    "rsqrt": lambda x: lax.rsqrt(x * 1.0),  # of integers too
    "rcbrt": lambda x: 1 / jnp.cbrt(x),
    "relu": jax.nn.relu,
    "sigmoid": lambda x: jax.nn.sigmoid(x * 1.0),
    "softsign": jax.nn.soft_sign,
    "erf": jax.scipy.special.erf,
    "erfinv": jax.scipy.special.erfinv,
    "gamma": jax.scipy.special.gamma,
    "gammaln": jax.scipy.special.gammaln,
    "logical_not": lambda x: x == 0,
    "_contrib_round_ste": _straight(_round),
    "_contrib_sign_ste": _straight(jnp.sign),
    "_copyto _CrossDeviceCopy": jnp.asarray,
    "BlockGrad stop_gradient": lax.stop_gradient,
    "identity _copy": jnp.asarray,
    "make_loss": losses.make_loss,
}

# name: (function, names before 1.0, names with a number)
ARITHMETIC: dict[str, tuple[Callable[[Any, Any], jax.Array], str, str]] = {
    "add": (jnp.add, "elemwise_add broadcast_plus _plus _Plus _add _grad_add", "_plus_scalar _PlusScalar"),
    "sub": (jnp.subtract, "elemwise_sub broadcast_minus _minus _Minus _sub", "_minus_scalar _MinusScalar"),
    "mul": (jnp.multiply, "elemwise_mul _mul _Mul", "_mul_scalar _MulScalar"),
    "div": (_divide, "elemwise_div _div _Div", "_div_scalar _DivScalar"),
    "mod": (_mod, "_mod _Mod", "_mod_scalar _ModScalar"),
    "power": (jnp.power, "_power _Power _pow", "_power_scalar _PowerScalar"),
    "maximum": (_maximum, "_maximum _Maximum", "_maximum_scalar _MaximumScalar"),
    "minimum": (_minimum, "_minimum _Minimum", "_minimum_scalar _MinimumScalar"),
    "hypot": (jnp.hypot, "_hypot _Hypot", "_hypot_scalar _HypotScalar"),
    **{
        n: (
            getattr(jnp, n.replace("lesser", "less")),
            f"_{n} _{n.title()}",
            f"_{n}_scalar _{n.title().replace('_', '')}Scalar",
        )
        for n in "equal not_equal greater greater_equal lesser lesser_equal logical_and logical_or logical_xor".split()
    },
}
_REVERSED: dict[str, Callable[[Any, Any], jax.Array]] = {
    "_rminus_scalar _RMinusScalar": lambda data, scalar: jnp.subtract(scalar, data),
    "_rdiv_scalar _RDivScalar": lambda data, scalar: _divide(scalar, data),
    "_rpower_scalar _RPowerScalar": lambda data, scalar: jnp.power(scalar, data),
    "_rmod_scalar _RModScalar": lambda data, scalar: _mod(scalar, data),
}
_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "sum sum_axis": jnp.sum,
    "mean": jnp.mean,
    "prod": jnp.prod,
    "nansum": jnp.nansum,
    "nanprod": jnp.nanprod,
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
    "Convolution Convolution_v1": Operator(layers.convolution, _convolution_shapes, last=_last_layout),
    "Deconvolution": Operator(layers.deconvolution, _deconvolution_shapes),
    "FullyConnected": Operator(layers.fully_connected, _dense_shapes),
    "BatchNorm BatchNorm_v1 CuDNNBatchNorm _contrib_SyncBatchNorm": Operator(
        layers.batch_norm,
        _channels(1),
        state=("moving_mean", "moving_var"),
        last=_axis("axis", 1),
        outputs=_and_statistics,
    ),
    "_contrib_BatchNormWithReLU": Operator(
        layers.batch_norm_with_relu,
        _channels(1),
        state=("moving_mean", "moving_var"),
        last=_axis("axis", 1),
        outputs=_and_statistics,
    ),
    "Pooling": Operator(layers.pooling, last=_last_layout),
    "Pooling_v1": Operator(layers.pooling_v1),
    "Dropout": Operator(layers.dropout),
    "Activation": Operator(layers.activation, last=_same),
    "LeakyReLU": Operator(
        layers.leaky_relu,
        _channels(1),
        last=_last_leaky,
        outputs=lambda attrs: 2 if attrs["act_type"] == "rrelu" else 1,
    ),
    "L2Normalization": Operator(layers.l2_normalization),
    "LRN": Operator(layers.lrn),
    "LayerNorm": Operator(layers.layer_norm, _channels(-1), outputs=_and_statistics),
    "InstanceNorm": Operator(layers.instance_norm, _channels(1)),
    "GroupNorm": Operator(
        layers.group_norm,
        lambda _, a: dict.fromkeys(("gamma", "beta"), (a.get("num_groups", 1),)),
        outputs=_and_statistics,
    ),
    "UpSampling": Operator(layers.up_sampling, _up_sampling_shapes),
    "RNN": Operator(layers.rnn, _rnn_shapes, outputs=_rnn_outputs),
    "Embedding _contrib_SparseEmbedding": Operator(
        arrays.embedding, lambda _, a: {"weight": (a["input_dim"], a["output_dim"])}
    ),
    "SoftmaxOutput Softmax": Operator(losses.softmax_output, labels=_label_of_softmax),
    "LinearRegressionOutput": Operator(losses.linear_regression, labels=_label_of_regression),
    "LogisticRegressionOutput": Operator(losses.logistic_regression, labels=_label_of_regression),
    "MAERegressionOutput": Operator(losses.mae_regression, labels=_label_of_regression),
    "MakeLoss": Operator(losses.make_loss),
    "IdentityAttachKLSparseReg": Operator(
        losses.with_sparse_activations, lambda data, _: {"moving_avg": data[1:2]}, state=("moving_avg",)
    ),
    "SVMOutput": Operator(losses.svm_output, labels=lambda data, _: data[:1]),
    "CTCLoss ctc_loss _contrib_CTCLoss _contrib_ctc_loss": Operator(losses.ctc_loss),
    "softmax_cross_entropy": Operator(losses.softmax_cross_entropy),
    "softmax": Operator(_softmax(jax.nn.softmax), last=_axis("axis", -1)),
    "softmin": Operator(_softmax(jax.nn.softmax, -1), last=_axis("axis", -1)),
    "log_softmax": Operator(_softmax(jax.nn.log_softmax), last=_axis("axis", -1)),
    "SoftmaxActivation": Operator(layers.softmax_activation),
    "smooth_l1": Operator(_smooth_l1, last=_same),
    "clip": Operator(_clip, last=_same, back=_back_same),
    "hard_sigmoid": Operator(_hard_sigmoid, last=_same),
    "Reshape reshape": Operator(arrays.reshape, back=_back_of_one(_back_flat)),
    "reshape_like": Operator(arrays.reshape_like),
    "broadcast_like": Operator(arrays.broadcast_like),
    "Flatten flatten": _row(lambda data: data.reshape(data.shape[0], -1)),
    "transpose": _row(lambda data, *, axes=(): data.transpose(axes or None), back=_back_of_one(_back_transposed)),
    "SwapAxis swapaxes SwapAxes": _row(
        lambda data, *, dim1=0, dim2=0: data.swapaxes(dim1, dim2), back=_back_of_one(_back_swapped)
    ),
    "expand_dims": _row(
        lambda data, *, axis: jnp.expand_dims(data, axis), back=_back_of_one(_back_expanded), axis="int"
    ),
    "squeeze": _row(lambda data, *, axis=None: data.squeeze(axis), axis="tuple | None"),
    "Concat concat": _row(lambda *data, dim=1: jnp.concatenate(data, dim), _axis("dim", 1), _back_joined),
    "_rnn_param_concat": _row(lambda *data, dim=1: jnp.concatenate(data, dim), back=_back_packed),
    "stack": _row(lambda *data, axis=0: jnp.stack(data, axis), back=_back_stacked),
    "add_n ElementWiseSum _sum": _row(lambda *args: sum(args[1:], args[0]), _same, _back_same),
    "tile": _row(lambda data, *, reps: jnp.tile(data, reps), reps="tuple"),
    "repeat": _row(lambda data, *, repeats, axis=None: data.repeat(repeats, axis), repeats="int", axis="int | None"),
    "Pad pad": Operator(arrays.pad),
    "reverse flip": _row(lambda data, *, axis: jnp.flip(data, axis), axis="tuple"),
    "slice crop": Operator(arrays.slice_),
    "slice_axis": Operator(arrays.slice_axis, last=_axis("axis", 0)),
    "slice_like": Operator(arrays.slice_like),
    "SliceChannel split": Operator(
        arrays.slice_channel,
        last=_last_split,
        back=_back_of_one(_back_split),
        outputs=lambda attrs: attrs["num_outputs"],
    ),
    "_split_v2": Operator(
        arrays.split_v2, outputs=lambda attrs: attrs["sections"] if attrs["sections"] > 0 else len(attrs["indices"])
    ),
    "Crop": Operator(arrays.crop),
    "Cast cast": _row(
        lambda data, *, dtype: data.astype(jax.dtypes.canonicalize_dtype(dtype)), _same, _back_same, dtype="str"
    ),
    "norm": Operator(arrays.norm),
    "argmax": Operator(arrays.place(jnp.argmax)),
    "argmin": Operator(arrays.place(jnp.argmin)),
    "broadcast_to": Operator(arrays.broadcast_to),
    "broadcast_axis broadcast_axes": Operator(arrays.broadcast_axis),
    "dot": Operator(arrays.dot),
    "batch_dot": Operator(arrays.batch_dot),
    "take": Operator(arrays.take),
    "pick choose_element_0index": Operator(arrays.pick),
    "gather_nd": _row(lambda data, indices: data[tuple(indices.astype(jnp.int32))]),
    "one_hot": Operator(arrays.one_hot),
    "where": Operator(arrays.where),
    "_zeros": Operator(arrays.filled(0.0)),
    "_ones": Operator(arrays.filled(1.0)),
    "_full": Operator(arrays.filled(None)),
    "_arange": Operator(arrays.arange),
    "_linspace": Operator(arrays.linspace),
    "_eye": Operator(arrays.eye),
    "_contrib_arange_like": Operator(arrays.arange_like),
    "cast_storage": _row(lambda data, *, stype: data, _same, _back_same, stype="str"),
    "amp_cast": _row(_amp_cast, _same, _back_same, dtype="str"),
    "amp_multicast": Operator(_amp_multicast, last=_same, outputs=lambda attrs: attrs["num_outputs"]),
    "sort": Operator(arrays.sort),
    "argsort": Operator(arrays.argsort),
    "topk": Operator(arrays.topk, outputs=lambda attrs: 2 if attrs["ret_typ"] == "both" else 1),
    "argmax_channel": _row(lambda data: data.argmax(1).astype(data.dtype)),
    "batch_take": _row(lambda a, indices: arrays.pick(a, indices)),
    "shape_array": _row(lambda data: _whole(data.shape)),
    "size_array": _row(lambda data: _whole(np.array([data.size]))),
    "scatter_nd": Operator(arrays.scatter_nd),
    "_slice_assign _crop_assign": Operator(arrays.slice_assign),
    "_slice_assign_scalar _crop_assign_scalar": Operator(arrays.slice_assign_scalar),
    "depth_to_space": Operator(arrays.depth_to_space),
    "space_to_depth": Operator(arrays.space_to_depth),
    "cumsum _np_cumsum": Operator(arrays.cumsum),
    "diag": Operator(arrays.diag),
    "moments": Operator(arrays.moments, outputs=lambda attrs: 2),
    "khatri_rao": Operator(arrays.khatri_rao),
    "_ravel_multi_index ravel_multi_index": _row(
        lambda data, *, shape: jnp.ravel_multi_index(tuple(data.astype(int)), shape, mode="wrap").astype(data.dtype),
        shape="tuple",
    ),
    "_unravel_index unravel_index": _row(
        lambda data, *, shape: jnp.stack(jnp.unravel_index(data.astype(int), shape)).astype(data.dtype), shape="tuple"
    ),
    "_histogram": Operator(arrays.histogram, outputs=lambda attrs: 2),
    "_identity_with_attr_like_rhs": _row(lambda lhs, rhs: lhs),
    "_contrib_index_array": Operator(arrays.index_array),
    "_contrib_index_copy": _row(_index_copy),
    "_contrib_allclose": _row(
        lambda a, b, *, rtol=1e-5, atol=1e-8, equal_nan=True: jnp.allclose(a, b, rtol, atol, equal_nan).astype(
            jnp.float32
        )
    ),
    "_contrib_div_sqrt_dim": _row(lambda data: data / math.sqrt(data.shape[-1])),
    "_contrib_quadratic": _row(lambda data, *, a=0.0, b=0.0, c=0.0: a * data**2 + b * data + c, _same, _back_same),
    "_contrib_gradientmultiplier": _row(
        lambda data, *, scalar=1.0, is_int=True: lax.stop_gradient(data) + scalar * (data - lax.stop_gradient(data)),
        _same,
        _back_same,
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
    "_contrib_DeformableConvolution": Operator(images.deformable_convolution, _deformable_shapes),
    "_contrib_ModulatedDeformableConvolution": Operator(images.modulated_deformable_convolution, _deformable_shapes),
    "_image_to_tensor": Operator(images.to_tensor),
    "_image_normalize": Operator(images.image_normalize),
    "_image_flip_left_right": _row(lambda data: jnp.flip(data, -2)),
    "_image_flip_top_bottom": _row(lambda data: jnp.flip(data, -3)),
    "_image_crop": _row(
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
    "_contrib_ROIAlign": Operator(boxes.roi_align),
    "ROIPooling": Operator(boxes.roi_pooling),
    "_contrib_PSROIPooling": Operator(boxes.psroi_pooling),
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
    "_linalg_potrf linalg_potrf": _row(lambda a: jnp.linalg.cholesky(a)),
    "_linalg_inverse linalg_inverse": _row(lambda a: jnp.linalg.inv(a)),
    "_linalg_det linalg_det": _row(lambda a: jnp.linalg.det(a)),
    "_linalg_slogdet linalg_slogdet": _row(lambda a: tuple(jnp.linalg.slogdet(a)), outputs=lambda attrs: 2),
    "_linalg_extractdiag linalg_extractdiag": _row(lambda a, *, offset=0: jnp.diagonal(a, offset, -2, -1)),
    **{names: Operator(function, outputs=_random_outputs) for names, function in random.OPERATORS.items()},
    **{
        f"_random_pdf_{name} random_pdf_{name}": Operator(random.density(function, arrays_of))
        for name, (function, arrays_of) in _DENSITIES.items()
    },
    "_random_pdf_dirichlet random_pdf_dirichlet": Operator(random.pdf_dirichlet),
    "SequenceMask": Operator(arrays.sequence_mask),
    "SequenceLast": Operator(arrays.sequence_last),
    "SequenceReverse": Operator(arrays.sequence_reverse),
    **{names: Operator(arrays.reduction(function)) for names, function in _REDUCTIONS.items()},
    **{names: _with_scalar(function) for names, function in _REVERSED.items()},
    **{names: _unary(function) for names, function in _UNARY.items()},
    **{names: _binary(f, _back_same) for f, names, _ in ARITHMETIC.values()},
    **{f"broadcast_{name}": _binary(f) for name, (f, _, _) in ARITHMETIC.items()},
    "broadcast_plus": _binary(jnp.add),
    "broadcast_minus": _binary(jnp.subtract),
    **{names: _with_scalar(f) for f, _, names in ARITHMETIC.values()},
}

OPERATORS: dict[str, Operator] = {name: operator for names, operator in _NAMED.items() for name in names.split()}

# Operators which broadcast an axis of length 1 whose rows are all equal, or keep it so.
BY_ROWS = frozenset(
    [name for name, operator in OPERATORS.items() if operator.last is _same]
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
