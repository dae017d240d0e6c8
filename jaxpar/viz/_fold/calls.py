"""The first folds: a call of a known function is one cell, and so is an optimizer's update of all parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..._core.text import plural
from .._graph import BACKWARD
from .._read.raw import Eqn
from .._read.source import Frame
from .cells import COLLECTIVES, Cell, Cells, components, plain_name, power_of, runs

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
        function: the name of the function, or the name of a class for its `__call__`. Case and underscores do not
            matter.
        op: the kind of layer.
        detail: the detail in the label. None: the name of the function.
        matrices: whether the function is folded even if it multiplies by a parameter, as an attention layer does.
        files: the suffixes that the path of the function's file may have. Empty: any file.
        needs: strings of names of primitives. A function outside JAX must compute at least one primitive of each
            string.
        lacks: names of primitives. A function outside JAX must compute none of them.
        tree: whether one call repeats its first operation for each leaf of a pytree.
    """

    function: str
    op: str
    detail: str | None = ""
    matrices: bool = False
    files: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    lacks: Collection[str] = ()
    tree: bool = False


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
    Call("selective_scan", "SelectiveScan", needs=("exp",)),
    Call("max_pool", "Pooling", "max", files=("_cpu/pooling.py",)),
    Call("avg_pool", "Pooling", "mean", files=("_cpu/pooling.py",)),
    Call("associative_scan", "AssociativeScan", matrices=True, files=("control_flow/loops.py",), tree=True),
)
MINOR = frozenset(("Random", "OneHot"))


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
        call = key if isinstance(key, _Key) else None
        if call is not None and call.call is not None and not _is_layer(cells, call.frame, call.call, run):
            _fold_calls(cells, table, run, call.depth + 1)  # look inside
        else:
            _fold_run(cells, call, run)


@dataclass(frozen=True, slots=True)
class _Key:
    """A call on the stack. `depth` is its place there, `call` its entry in the table."""

    place: tuple[int, ...]
    frame: Frame = field(compare=False)
    call: Call | None
    depth: int


def _runs(eqns: list[Eqn], table: Mapping[str, Call], depth: int) -> list[tuple[_Key | int, list[Eqn]]]:
    """The calls of equations, each with those of one call. Where they begin again, it was called again.

    The key of an equation that is in no call is its own number.
    """
    keys: dict[object, _Key | None] = {}

    def key(eqn: Eqn) -> _Key | int:
        place = (eqn.position, *(frame.call for frame in eqn.stack if frame.call < 0))
        if place not in keys:
            keys[place] = _key(eqn.stack, table, depth)
        return keys[place] or eqn.id

    def begins_again(eqn: Eqn, run: list[Eqn]) -> bool:
        known = key(eqn)
        first, last = run[0], run[-1]
        if eqn.position != first.position or eqn.prim != first.prim or plain_name(eqn.prim) in COLLECTIVES:
            return False
        if isinstance(known, _Key) and known.call is not None and known.call.tree:
            return last.position != first.position
        return last.position != first.position or (last.prim == eqn.prim and not eqn.tangent)

    return runs(eqns, key, begins_again)


def _key(stack: tuple[Frame, ...], table: Mapping[str, Call], start: int) -> _Key | None:
    """The outermost call in the table, or else the outermost public JAX function."""
    boundary = None
    for depth, frame in enumerate(stack):
        call = table.get(normalize(frame.name)) if depth >= start else None
        if call and "<locals>" not in frame.name and (not call.files or frame.file.endswith(call.files)):
            return _Key(_place(stack, depth), frame, call, depth)
        if frame.origin != "jax":
            boundary = None
        elif boundary is None and not ("<" in frame.name or "." in frame.name or frame.name.startswith("_operator")):
            boundary = depth
    return None if boundary is None else _Key(_place(stack, boundary), stack[boundary], None, boundary)


def _place(stack: tuple[Frame, ...], depth: int) -> tuple[int, ...]:
    return (*(frame.call for frame in stack[:depth]), -2 - stack[depth].function)


def _fold_run(cells: Cells, key: _Key | None, run: list[Eqn]) -> None:
    prims = {eqn.prim for eqn in run}
    if key is not None and key.call is not None:
        detail = key.frame.name.removesuffix(".__call__").strip("_") if key.call.detail is None else key.call.detail
        cells.new([eqn.id for eqn in run], key.call.op, detail, major=key.call.op not in MINOR)
        return
    if key is None or len(run) == 1 or (prims & (MATRIX | WINDOWS) and not prims & SOLVERS):
        for eqn in run:
            op, detail = power_of(cells.raw, eqn) if eqn.prim in ("integer_pow", "pow") else (plain_name(eqn.prim), "")
            cells.new([eqn.id], op, detail, major=eqn.prim in SOLVERS)
    elif COLLECTIVES.intersection(map(plain_name, prims)):
        _fold_collective(cells, key.frame.name.strip("_"), run)
    else:
        cells.new([eqn.id for eqn in run], key.frame.name.strip("_"), major=not prims.isdisjoint(SOLVERS))


def _fold_collective(cells: Cells, name: str, run: list[Eqn]) -> None:
    """One cell of each array that a call sends, as `pmean` of a tree is a sum and a division of each leaf."""
    singles = [cells.new([eqn.id], plain_name(eqn.prim)) for eqn in run]
    for part in components(cells, singles):
        if len(part) > 1:
            cells.new([number for cell in part for number in cell.eqns], name)


def _is_layer(cells: Cells, frame: Frame, call: Call, run: list[Eqn]) -> bool:
    """Whether a call of a known name is the layer, and no module around layers with parameters."""
    products = [eqn for eqn in run if eqn.prim in MATRIX and not call.matrices]
    weights = (cells.raw.weight_of(value) for eqn in products for value in eqn.ins)
    if any(weight is not None for weight in weights):
        return False
    prims = {eqn.prim for eqn in run}
    computes = all(prims.intersection(some.split()) for some in call.needs) and prims.isdisjoint(call.lacks)
    return computes or frame.origin == "jax" or bool(prims & _OPAQUE)


_UPDATES = frozenset(("update", "update_fn", "apply_updates", "apply"))
# Transforms of optax, and the optimizer that they are the core of. The first that is found names it.
_CORES = {
    "scale_by_lion": "Lion",
    "scale_by_muon": "Muon",
    "scale_by_factored_rms": "Adafactor",
    "scale_by_novograd": "NovoGrad",
    "scale_by_radam": "RAdam",
    "scale_by_amsgrad": "AMSGrad",
    "scale_by_adamax": "AdaMax",
    "scale_by_adan": "Adan",
    "scale_by_belief": "AdaBelief",
    "scale_by_yogi": "Yogi",
    "scale_by_sm3": "SM3",
    "scale_by_adadelta": "Adadelta",
    "scale_by_rss": "Adagrad",
    "scale_by_lbfgs": "L-BFGS",
    "scale_by_adam": "Adam",
    "scale_by_rms": "RMSProp",
    "scale_by_stddev": "RMSProp",
    "scale_by_sign": "SignSGD",
    "trace": "SGD",
}
_DECAYED = {"Adam": "AdamW"}
_TRUSTED = {"Adam": "LAMB", "AdamW": "LAMB", "SGD": "LARS"}
_RATES = frozenset(("scale", "scale_by_learning_rate", "scale_by_schedule"))
_PLAIN_UPDATE = "optimizer"
OPTIMIZERS = frozenset((*_CORES.values(), "AdamW", "LAMB", "LARS", _PLAIN_UPDATE))


def fold_optimizers(cells: Cells) -> None:
    """Make one cell of each call of an optimizer of optax or of this package.

    What is added to the parameters is part of the update that computed it.
    """
    last: Cell | None = None
    for (_, function), run in runs((eqn for eqn in cells.raw.eqns if not eqn.view), _update):
        cell = cells.new([eqn.id for eqn in run], _name(run), major=True)
        if function == "apply_updates" and last is not None and cells.sources(cell) == [last]:
            cell = cells.fold((last, cell), last.op, major=True)
        cell.detail = plural(sum(cells.raw.values[value].kind == "op" for value in cells.data(cell)), "array")
        last = cell


def _update(eqn: Eqn) -> tuple[tuple[int, ...], str] | None:
    """The place and the function of the outermost update around an equation."""
    stack = () if eqn.backward or eqn.prim in COLLECTIVES else eqn.stack
    for depth, frame in enumerate(stack):
        if frame.origin == "library" and _is_optimizer(frame):
            return (*(f.call for f in stack[:depth]), -2 - frame.function), _last(frame.name)
    return None


def _is_optimizer(frame: Frame) -> bool:
    if frame.package == "optax":
        return _last(frame.name) in _UPDATES
    return frame.package == "jaxpar" and frame.file.startswith("updaters/")


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _name(run: list[Eqn]) -> str:
    """The optimizer's name, from the transforms that it is made of."""
    frames = (frame for eqn in run for frame in eqn.stack if frame.package in ("optax", "jaxpar"))
    parts = {frame.name.split(".")[0].removeprefix("_") for frame in frames if _is_optimizer(frame)}
    core = next((name for part, name in _CORES.items() if part in parts), None)
    if core is None:
        unknown = any(part.startswith("scale_by_") and part not in _RATES for part in parts)
        return "SGD" if parts & _RATES and not unknown else _PLAIN_UPDATE
    if "add_decayed_weights" in parts:
        core = _DECAYED.get(core, core)
    return _TRUSTED.get(core, core) if "scale_by_trust_ratio" in parts else core


def updates(cells: Cells, ordered: Iterable[Cell]) -> dict[int, int]:
    """The functions of the user's that update parameters, by cell, and how many parameters each updates.

    They come after a gradient, read parameters, and make arrays of their shapes. `ordered` has all cells, each after
    those that it reads.
    """
    late, found = set[int](), dict[int, int]()
    for cell in ordered if any(cell.op.endswith(BACKWARD) for cell in cells) else ():
        if cell.op.endswith(BACKWARD):
            late.add(cell.id)
        elif any(source.id in late for source in cells.sources(cell)):
            late.add(cell.id)
            made = {cells.raw.values[out].shape for eqn in cells.eqns(cell) for out in eqn.outs}
            count = sum(cells.raw.values[weight].shape in made for weight in cells.weights(cell))
            if count and not cell.major and cell.op not in COLLECTIVES:
                found[cell.id] = count
    return found
