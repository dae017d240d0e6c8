"""The first fold: a call of a known function is one cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .._read.raw import Eqn
from .._read.source import Frame
from .cells import Cells, plain_name

_MATRIX = frozenset(("dot_general", "conv_general_dilated"))
_WINDOWS = frozenset(("reduce_window_max", "reduce_window_sum", "reduce_window_min", "reduce_window"))


@dataclass(frozen=True, slots=True)
class Call:
    """A function that is drawn as one node.

    Attributes:
        function: its name, or the name of a class for its `__call__`. Case and underscores do not matter.
        op: the kind of layer.
        detail: what the label adds. None for the name of the function.
        matrices: whether it is folded even where it multiplies by a parameter, as an attention layer does.
    """

    function: str
    op: str
    detail: str | None = ""
    matrices: bool = False


def _calls(names: str, op: str, detail: str | None = "") -> tuple[Call, ...]:
    """One `Call` for each of several names."""
    return tuple(Call(name, op, detail) for name in names.split())


CALLS: tuple[Call, ...] = (
    *_calls(
        "relu relu6 gelu silu swish sigmoid hard_sigmoid hard_silu hard_swish hard_tanh log_sigmoid elu selu celu "
        "leaky_relu softplus soft_sign glu mish squareplus prelu sparse_plus",
        "Activation",
        None,
    ),
    *_calls("softmax", "Softmax"),
    *_calls("log_softmax", "LogSoftmax"),
    *_calls("dot_product_attention scaled_dot_product_attention", "Attention"),
    *_calls("attention", "Attention"),
    *_calls("layer_norm", "LayerNorm"),
    *_calls("batch_norm batch_norm1d batch_norm2d", "BatchNorm"),
    *_calls("group_norm", "GroupNorm"),
    *_calls("instance_norm", "InstanceNorm"),
    *_calls("rms_norm", "RMSNorm"),
    *_calls("weight_norm spectral_norm standardize", "Normalization", None),
    *_calls("dropout alpha_dropout", "Dropout"),
    *_calls("one_hot", "OneHot"),
    *_calls("rope rotary_embedding apply_rope rotary_position_embedding apply_rotary_embedding", "RoPE"),
    *_calls("softmax_cross_entropy softmax_cross_entropy_with_integer_labels", "Loss", "softmax cross-entropy"),
    *_calls("sigmoid_binary_cross_entropy", "Loss", "sigmoid cross-entropy"),
    *_calls("cross_entropy cross_entropy_loss", "Loss", "cross-entropy"),
    *_calls("l2_loss mse mse_loss mean_squared_error squared_error", "Loss", "squared error"),
    *_calls("huber_loss", "Loss", "Huber"),
    *_calls(
        "normal uniform bernoulli categorical gumbel truncated_normal randint permutation choice exponential split "
        "fold_in random_bits bits key PRNGKey",
        "Random",
        None,
    ),
)
_MINOR = frozenset(("Random", "OneHot"))


def normalize(name: str) -> str:
    """The key of a function: "layernorm" for "LayerNorm.__call__" and "_layer_norm"."""
    name = name.removesuffix(".__call__").rsplit(".", 1)[-1]
    return name.replace("_", "").lower()


def fold_calls(cells: Cells, calls: Iterable[Call]) -> None:
    """Make the first cells.

    A call in the table is one cell, and so is a call of JAX's own functions. Every other equation is one by itself.
    Gradients get no cells yet.
    """
    table = {normalize(call.function): call for call in calls}
    forward = [e for e in cells.raw.eqns if not (e.view or e.backward or e.residual or cells.owner[e.id])]
    _fold_calls(cells, table, forward, 0)


def _fold_calls(cells: Cells, table: Mapping[str, Call], eqns: list[Eqn], depth: int) -> None:
    for key, run in _runs(eqns, table, depth):
        if key is not None and key.call is not None and not key.call.matrices and _multiplies_weight(cells, run):
            _fold_calls(cells, table, run, key.depth + 1)  # no layer without parameters: look inside
        else:
            _fold_run(cells, key, run)


@dataclass(frozen=True, slots=True)
class _Key:
    """A call on the stack. `depth` is its place there, `call` its entry in the table."""

    place: tuple[int, ...]
    name: str
    call: Call | None
    depth: int


def _runs(eqns: list[Eqn], table: Mapping[str, Call], depth: int) -> list[tuple[_Key | None, list[Eqn]]]:
    """Equations of one call, next to each other. Where they begin again, it was called again."""
    runs: list[tuple[_Key | None, list[Eqn]]] = []
    keys: dict[object, _Key | None] = {}
    key: _Key | None = None
    for eqn in eqns:
        place = (eqn.position, *(frame.call for frame in eqn.stack if frame.call < 0))
        if place not in keys:
            keys[place] = _key(eqn.stack, table, depth)
        new = keys[place]
        if new is None or new != key or _begins_again(eqn, runs[-1][1]):
            runs.append((new, []))
        runs[-1][1].append(eqn)
        key = new
    return runs


def _begins_again(eqn: Eqn, run: list[Eqn]) -> bool:
    first, last = run[0], run[-1]
    if eqn.position != first.position or eqn.prim != first.prim:
        return False
    return last.position != first.position or (last.prim == eqn.prim and not eqn.tangent)


def _key(stack: tuple[Frame, ...], table: Mapping[str, Call], start: int) -> _Key | None:
    """The outermost call in the table, or else the outermost public JAX function."""
    boundary = None
    for depth, frame in enumerate(stack):
        call = table.get(normalize(frame.name)) if depth >= start else None
        if call is not None and "<locals>" not in frame.name:
            return _Key(_place(stack, depth), frame.name, call, depth)
        if frame.origin != "jax":
            boundary = None
        elif boundary is None and _is_public(frame):
            boundary = depth
    return None if boundary is None else _Key(_place(stack, boundary), _short(stack[boundary].name), None, boundary)


def _place(stack: tuple[Frame, ...], depth: int) -> tuple[int, ...]:
    return (*(frame.call for frame in stack[:depth]), -2 - stack[depth].function)


def _is_public(frame: Frame) -> bool:
    return "<" not in frame.name and "." not in frame.name and not frame.name.startswith("_operator")


def _short(name: str) -> str:
    return name.strip("_")


def _fold_run(cells: Cells, key: _Key | None, run: list[Eqn]) -> None:
    prims = {eqn.prim for eqn in run}
    if key is not None and key.call is not None:
        detail = _short(key.name.removesuffix(".__call__")) if key.call.detail is None else key.call.detail
        cells.new([eqn.id for eqn in run], key.call.op, detail, major=key.call.op not in _MINOR)
        return
    if key is None or len(run) == 1 or prims & _MATRIX or prims & _WINDOWS:
        for eqn in run:
            cells.new([eqn.id], plain_name(eqn.prim))
        return
    cells.new([eqn.id for eqn in run], key.name)


def _multiplies_weight(cells: Cells, run: list[Eqn]) -> bool:
    return any(eqn.prim in _MATRIX and any(cells.raw.weight_of(value) is not None for value in eqn.ins) for eqn in run)
