"""The known functions, and what a function of a known name must compute."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .._read.raw import Eqn
from .._read.source import Frame
from .patterns import COLLECTIVES

MATRIX = frozenset(("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"))
WINDOWS = frozenset(("reduce_window_max", "reduce_window_sum", "reduce_window_min", "reduce_window"))
SOLVERS = frozenset(
    "cholesky lu geqrf qr householder_product triangular_solve tridiagonal_solve svd eigh eig schur hessenberg".split()
)
_OPAQUE = frozenset("pallas_call custom_call ffi_call tpu_custom_call triton_call dot_product_attention_fwd".split())
_REDUCED = frozenset("reduce_sum reduce_max reduce_min reduce_prod argmax argmin sort".split())


@dataclass(frozen=True, slots=True)
class Call:
    """A function that is drawn as one node.

    Attributes:
        function: its name, or the name of a class for its `__call__`. Case and underscores do not matter.
        op: the kind of layer.
        detail: what the label adds. None for the name of the function.
        matrices: whether it is folded even where it multiplies by a parameter, as an attention layer does.
        files: how the path of its file may end. Empty for any file.
        needs: names of primitives. Outside of JAX the function computes at least one of each string.
        lacks: names of primitives. Outside of JAX the function computes none of them.
        tree: whether one call begins with the same step for each leaf of a tree.
    """

    function: str
    op: str
    detail: str | None = ""
    matrices: bool = False
    files: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    lacks: Collection[str] = ()
    tree: bool = False

    def is_of(self, frame: Frame) -> bool:
        """Whether a frame may be this function, by its file."""
        return not self.files or frame.file.endswith(self.files)

    def is_meant(self, frame: Frame, eqns: list[Eqn]) -> bool:
        """Whether these equations of a call may be what its name says."""
        prims = {eqn.prim for eqn in eqns}
        if frame.origin == "jax" or prims & _OPAQUE:
            return True
        return all(prims.intersection(some.split()) for some in self.needs) and prims.isdisjoint(self.lacks)


def _calls(
    names: str, op: str, detail: str | None = "", *needs: str, lacks: Collection[str] = (), files: tuple[str, ...] = ()
) -> tuple[Call, ...]:
    """One `Call` for each of several names."""
    return tuple(Call(name, op, detail, files=files, needs=needs, lacks=lacks) for name in names.split())


_ROOT = "rsqrt sqrt pow integer_pow div"
_SUM = "reduce_sum dot_general reduce_window_sum"
_SQUARE = "square integer_pow mul pow"

CALLS: tuple[Call, ...] = (
    *_calls(
        "relu relu6 gelu silu swish sigmoid hard_sigmoid hard_silu hard_swish hard_tanh log_sigmoid elu selu celu "
        "leaky_relu softplus soft_sign glu mish squareplus prelu sparse_plus",
        "Activation",
        None,
        lacks=MATRIX | WINDOWS | _REDUCED | COLLECTIVES,
    ),
    *_calls("softmax", "Softmax", "", "exp", "reduce_sum", lacks=MATRIX),
    *_calls("log_softmax", "LogSoftmax", "", "exp", "log", lacks=MATRIX),
    *_calls(
        "attention dot_product_attention scaled_dot_product_attention", "Attention", "", "dot_general", "exp logistic"
    ),
    *_calls("layer_norm", "LayerNorm", "", _ROOT, _SUM),
    *_calls("batch_norm batch_norm1d batch_norm2d", "BatchNorm", "", _ROOT + " mul"),
    *_calls("group_norm", "GroupNorm", "", _ROOT, _SUM),
    *_calls("instance_norm", "InstanceNorm", "", _ROOT, _SUM),
    *_calls("rms_norm", "RMSNorm", "", _ROOT, _SUM),
    *_calls("weight_norm spectral_norm standardize", "Normalization", None, _ROOT, _SUM),
    *_calls("dropout alpha_dropout", "Dropout", "", "select_n mul", lacks=MATRIX | WINDOWS | _REDUCED),
    *_calls("one_hot", "OneHot", "", "eq scatter"),
    *_calls(
        "rope rotary_embedding apply_rope rotary_position_embedding apply_rotary_embedding apply_rotary_emb "
        "apply_rotary_pos_emb",
        "RoPE",
        "",
        "mul",
        lacks=_REDUCED,
    ),
    *_calls(
        "softmax_cross_entropy softmax_cross_entropy_with_integer_labels",
        "Loss",
        "softmax cross-entropy",
        "exp",
        "log",
    ),
    *_calls("sigmoid_binary_cross_entropy", "Loss", "sigmoid cross-entropy", "log log1p logistic"),
    *_calls("cross_entropy cross_entropy_loss", "Loss", "cross-entropy", "log log1p"),
    *_calls("l2_loss mse mse_loss mean_squared_error squared_error", "Loss", "squared error", "sub", _SQUARE),
    *_calls("huber_loss", "Loss", "Huber", "sub", "abs min select_n clamp"),
    *_calls(
        "normal uniform bernoulli categorical gumbel truncated_normal randint permutation choice exponential split "
        "fold_in random_bits bits key PRNGKey",
        "Random",
        None,
        files=("random/core.py", "_src/random.py"),
    ),
    Call("max_pool", "Pooling", "max", files=("_cpu/pooling.py",)),
    Call("avg_pool", "Pooling", "mean", files=("_cpu/pooling.py",)),
    Call("associative_scan", "AssociativeScan", matrices=True, files=("control_flow/loops.py",), tree=True),
)
MINOR = frozenset(("Random", "OneHot"))


def normalize(name: str) -> str:
    """The key of a function: "layernorm" for "LayerNorm.__call__" and "_layer_norm"."""
    name = name.removesuffix(".__call__").rsplit(".", 1)[-1]
    return name.replace("_", "").lower()
