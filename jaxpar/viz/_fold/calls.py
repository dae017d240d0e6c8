"""The folds by the place in the program: calls of known functions, optimizers, and the user's own small functions.

A stack has places, not calls. So the order of the places tells where a function began again, and what was read tells
branches of a network from the leaves of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ..._core.text import plural
from .._graph import BACKWARD
from .._read.raw import Eqn
from .._read.source import ANONYMOUS, Frame
from .._searches import connected
from .cells import COLLECTIVES, Cell, Cells, components, label_of, plain_name, runs

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
    # one operation for each axis
    Call("resize", "Resize", matrices=True, files=("image/scale.py",), tree=True),
    Call("scale_and_translate", "Resize", matrices=True, files=("image/scale.py",), tree=True),
    Call("segment_sum", "SegmentSum", files=("ops/scatter.py",)),
    Call("segment_prod", "SegmentProd", files=("ops/scatter.py",)),
    Call("segment_max", "SegmentMax", files=("ops/scatter.py",)),
    Call("segment_min", "SegmentMin", files=("ops/scatter.py",)),
    Call("max_pool", "Pooling", "max", files=("_cpu/pooling.py",)),
    Call("avg_pool", "Pooling", "mean", files=("_cpu/pooling.py",)),
    Call("associative_scan", "AssociativeScan", matrices=True, files=("control_flow/loops.py",), tree=True),
)
MINOR = frozenset(("Random", "OneHot", "SegmentSum", "SegmentProd", "SegmentMax", "SegmentMin"))


def normalize(name: str) -> str:
    """The key of a function: "layernorm" for "LayerNorm.__call__" and "_layer_norm"."""
    name = name.removesuffix(".__call__").rsplit(".", 1)[-1]
    return name.replace("_", "").lower()


def fold_calls(cells: Cells, calls: Iterable[Call]) -> None:
    """Make one cell of each call in the table or of JAX's own functions, and of each other equation but gradients."""
    table = {normalize(call.function): call for call in calls}
    forward = [e for e in cells.raw.eqns if not (e.view or e.backward or e.residual or cells.owner[e.id])]
    _fold_calls(cells, table, forward, 0)


_Key = tuple[tuple[int, ...], int, Call | None]  # the place of a call, its depth on the stack, its entry in the table


def _fold_calls(cells: Cells, table: Mapping[str, Call], eqns: list[Eqn], start: int) -> None:
    """Fold the calls of equations from a depth of the stack on. An equation that is in no call has its own number."""
    keys: dict[object, _Key | None] = {}

    def key(eqn: Eqn) -> _Key | int:
        place = (eqn.position, *(frame.call for frame in eqn.stack if frame.call < 0))
        if place not in keys:
            keys[place] = _key(eqn.stack, table, start)
        return keys[place] or eqn.id

    def begins_again(eqn: Eqn, run: list[Eqn]) -> bool:
        if eqn.position != run[0].position or eqn.prim != run[0].prim or plain_name(eqn.prim) in COLLECTIVES:
            return False
        call_key, last = key(eqn), run[-1]
        is_tree = not isinstance(call_key, int) and call_key[2] is not None and call_key[2].tree
        return last.position != eqn.position or (not is_tree and last.prim == eqn.prim and not eqn.tangent)

    for call_key, run in runs(eqns, key, begins_again):
        _, depth, call = call_key if not isinstance(call_key, int) else (None, -1, None)
        if call is not None and not _is_layer(cells, run[0].stack[depth], call, run):
            _fold_calls(cells, table, run, depth + 1)  # look inside
        else:
            _fold_run(cells, run[0].stack[depth].name if depth >= 0 else "", call, run)


def _key(stack: tuple[Frame, ...], table: Mapping[str, Call], start: int) -> _Key | None:
    """The outermost call in the table, or else the outermost public JAX function."""
    boundary = None
    for depth, frame in enumerate(stack):
        call = table.get(normalize(frame.name)) if depth >= start else None
        if call and "<locals>" not in frame.name and (not call.files or frame.file.endswith(call.files)):
            return _place(stack, depth), depth, call
        if frame.origin != "jax":
            boundary = None
        elif boundary is None and not ("<" in frame.name or "." in frame.name or frame.name.startswith("_operator")):
            boundary = depth
    return None if boundary is None else (_place(stack, boundary), boundary, None)


def _place(stack: tuple[Frame, ...], depth: int) -> tuple[int, ...]:
    """The place of a call: those around it, and its function, which may be called at several places."""
    return (*(frame.call for frame in stack[:depth]), -2 - stack[depth].function)


def _fold_run(cells: Cells, name: str, call: Call | None, run: list[Eqn]) -> None:
    """Make cells of a call of a function of this name."""
    prims = {eqn.prim for eqn in run}
    if call is not None:
        detail = name.removesuffix(".__call__").strip("_") if call.detail is None else call.detail
        cells.new([eqn.id for eqn in run], call.op, detail, major=call.op not in MINOR)
    elif not name or len(run) == 1 or (prims & (MATRIX | WINDOWS) and not prims & SOLVERS):
        for eqn in run:
            cells.new([eqn.id], *label_of(cells.raw, eqn), major=eqn.prim in SOLVERS or eqn.prim == "pallas_call")
    elif COLLECTIVES.intersection(map(plain_name, prims)):
        # One cell of each array that is sent, as `pmean` of a tree is a sum and a division of each leaf.
        for sent in components(cells, [cells.new([eqn.id], *label_of(cells.raw, eqn)) for eqn in run]):
            if len(sent) > 1:
                detail = next((cell.detail for cell in sent if cell.op in COLLECTIVES), "")
                cells.fold(sent, name.strip("_"), detail)
    else:
        cells.new([eqn.id for eqn in run], name.strip("_"), major=not prims.isdisjoint(SOLVERS))


def _is_layer(cells: Cells, frame: Frame, call: Call, run: list[Eqn]) -> bool:
    """Whether a call of a known name is the layer, and no module around layers with parameters."""
    products = [eqn for eqn in run if eqn.prim in MATRIX and not call.matrices]
    weights = (cells.raw.weight_of(value) for eqn in products for value in eqn.ins)
    if any(weight is not None for weight in weights):
        return False
    prims = {eqn.prim for eqn in run}
    computes = all(prims.intersection(names.split()) for names in call.needs) and prims.isdisjoint(call.lacks)
    return computes or frame.origin == "jax" or bool(prims & _OPAQUE)


_UPDATES = frozenset(("update", "update_fn", "apply_updates", "apply"))
# Transforms of optax, and the optimizer that they are the core of. The first that is found names it.
_CORES = {
    "schedule_free": "ScheduleFree",
    "lookahead": "Lookahead",
    "scale_by_lion": "Lion",
    "scale_by_sophia": "Sophia",
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
    """Make one cell of each call of an optimizer, with the addition of the updates that it computed."""
    made: dict[int, Cell] = {}
    others: dict[int, list[str]] = {}  # of an update of several optimizers, those that do not name it
    for (_, function), run in runs((eqn for eqn in cells.raw.eqns if not eqn.view), _update):
        names = _names(cells, run)
        cell = cells.new([eqn.id for eqn in run], names[0], major=True)
        sources = cells.sources(cell)
        if function == "apply_updates" and len(sources) == 1 and sources[0].id in made:
            names = [sources[0].op, *others[sources[0].id]]
            cell = cells.fold((sources[0], cell), sources[0].op, major=True)
        arrays = plural(sum(cells.raw.values[value].kind == "op" for value in cells.data(cell)), "array")
        cell.detail = ", ".join((*(f"and {name}" for name in names[1:]), arrays))
        made[cell.id], others[cell.id] = cell, names[1:]


def _update(eqn: Eqn) -> tuple[tuple[int, ...], str] | None:
    """The place and the function of the outermost update around an equation."""
    stack = () if eqn.backward or eqn.prim in COLLECTIVES else eqn.stack
    for depth, frame in enumerate(stack):
        if frame.origin == "library" and _is_optimizer(frame):
            return _place(stack, depth), _last(frame.name)
    return None


def _is_optimizer(frame: Frame) -> bool:
    if frame.package == "optax":
        return _last(frame.name) in _UPDATES
    return frame.package == "jaxpar" and frame.file.startswith("updaters/")


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


_SPLITS = frozenset(("partition", "multi_transform"))  # transforms of optax that give some params to each of several


def _names(cells: Cells, run: list[Eqn]) -> list[str]:
    """The names of the optimizers of an update, the one that it goes by first.

    Where params are given to several, those of each are an update by themselves: no array of one is read for another.
    """
    name = _name(run)
    if name in ("Muon", _PLAIN_UPDATE) or not _SPLITS.intersection(map(_transform, _frames_of(run))):
        return [name]  # Muon gives what is no matrix to Adam
    made = {out: eqn.id for eqn in run for out in eqn.outs if cells.raw.values[out].shape}
    edges = ((eqn.id, made[root]) for eqn in run for value in eqn.ins if (root := cells.raw.root(value)) in made)
    parts = connected([eqn.id for eqn in run if any(cells.raw.values[out].shape for out in eqn.outs)], edges)
    found = dict.fromkeys(_name([cells.raw.eqns[number] for number in part]) for part in parts)
    return [other for other in found if other != _PLAIN_UPDATE] or [name]


def _frames_of(run: list[Eqn]) -> list[Frame]:
    """The calls of an optimizer's functions around its equations."""
    frames = (frame for eqn in run for frame in eqn.stack if frame.package in ("optax", "jaxpar"))
    return [frame for frame in frames if _is_optimizer(frame)]


def _transform(frame: Frame) -> str:
    return frame.name.split(".")[0].removeprefix("_")


def _name(run: list[Eqn]) -> str:
    """The optimizer's name, from the transforms that it is made of."""
    transforms = set(map(_transform, _frames_of(run)))
    core = next((name for transform, name in _CORES.items() if transform in transforms), None)
    if core is None:
        unknown = any(transform.startswith("scale_by_") and transform not in _RATES for transform in transforms)
        return "SGD" if transforms & _RATES and not unknown else _PLAIN_UPDATE
    if "add_decayed_weights" in transforms:
        core = _DECAYED.get(core, core)
    return _TRUSTED.get(core, core) if "scale_by_trust_ratio" in transforms else core


def updates(cells: Cells, late: set[int]) -> dict[int, int]:
    """The user's functions that make parameters anew after a gradient, by cell, and how many of them each makes.

    `late` are the cells of gradients and behind them.
    """
    counts = dict[int, int]()
    for cell in (cell for cell in cells if cell.id in late and not (cell.major or cell.op in COLLECTIVES)):
        made = {cells.raw.values[out].shape for eqn in cells.eqns(cell) for out in eqn.outs}
        of_each = {shape[1:] for shape in made}  # under `vmap`: for each task, as in an inner loop
        weights = [cells.raw.values[weight].shape for weight in cells.weights(cell)]
        count = max(sum(shape in shapes for shape in weights) for shapes in (made, of_each))
        if count and not cell.op.endswith(BACKWARD):
            counts[cell.id] = count
    return counts


_DEEPEST = 12  # calls around a step, below which functions stay as they are


def fold_helpers(cells: Cells) -> None:
    """Make one cell of each function call that has only small steps, and one of calls that each handle a leaf."""
    deepest = max((len(own_stack(cells, cell)) for cell in cells), default=0)
    # From the outside in. A call that is folded is one cell then, and its inner calls are not looked at.
    for depth in range(1, min(deepest, _DEEPEST)):

        def call(cell: Cell, depth: int = depth) -> tuple[object, ...] | None:
            stack = own_stack(cells, cell)
            if len(stack) <= depth or stack[depth].name.endswith(ANONYMOUS):
                return None
            return _place(stack, depth)

        for _, run in runs((cell for cell in cells if not cells.is_backward(cell)), call):
            if any(cell.major or cell.op in COLLECTIVES for cell in run):
                continue
            # Calls that each handle a leaf of a tree are one cell. Of other calls each is one by itself.
            calls = _equal_parts(cells, run) or _returns(cells, run, depth)
            for steps in [run] if len(calls) > 1 and _is_of_leaves(cells, calls) else calls:
                if len(steps) > 1 and sum(len(cell.eqns) for cell in steps) >= 3:
                    stacks = [own_stack(cells, cell) for cell in steps]
                    cells.fold(steps, _helper_name(stacks, depth, {cell.op for cell in steps}))


# What functions of jaxpar's own step do, in words, by their rooms and names. Others go by their names.
_OWN_PARTS = {
    ("_step", "finish_step"): "keep or update",
    ("_step", "gradient"): "unscale",
    ("_step", "join"): "random keys",
    ("_step", "of_shard"): "loss of a shard",
    ("_step", "recorded"): "norms",
    ("_store", "rotate_queue"): "queue of gradients",
    ("_devices", "to_rows"): "cut in rows",
}


def _helper_name(stacks: list[tuple[Frame, ...]], depth: int, kinds: Collection[str]) -> str:
    """What a call at this depth is named by: its function, or the class of an object that is called.

    `stacks` and `kinds` are those of its steps.
    """
    frame = stacks[0][depth]
    insides = {stack[depth + 1].function: stack[depth + 1] for stack in stacks if len(stack) > depth + 1}
    goes_on = len(insides) == 1 and all(len(stack) > depth + 1 for stack in stacks)
    # A bound method of a library only calls the function of others.
    is_call = frame.origin == "library" and frame.name.endswith(".__call__")
    if is_call and goes_on and all(inside.package != frame.package for inside in insides.values()):
        return _helper_name(stacks, depth + 1, kinds)
    words = frame.name.split(".")
    names = [word for word in words if word not in ("<locals>", "__call__", "call")] or words  # Keras has `call`
    plain = names[-1].strip("_")
    if frame.origin != "library":
        return plain
    if frame.package == "jaxpar":
        room = frame.file.partition("/")[0]
        return next(iter(kinds)) if len(kinds) == 1 else _OWN_PARTS.get((room, plain), plain.replace("_", " "))
    return f"{frame.package}.{'update' if plain == 'update_fn' else plain}"


_NOT_ELEMENTWISE = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin sort top_k gather dynamic_slice "
    "dynamic_update_slice scatter scatter-add scatter-mul scatter-min scatter-max cumsum cumprod cummax cummin "
    "cumlogsumexp dot_general fft".split()
)


def fold_statements(cells: Cells) -> None:
    """Make one cell of three or more connected steps of one line."""

    def line(cell: Cell) -> tuple[object, ...] | None:
        stack = own_stack(cells, cell)
        if cells.is_backward(cell) or cell.major or cell.op in (*COLLECTIVES, "cond", "Activation") or not stack:
            return None
        return (cells.raw.eqns[cell.eqns[0]].scope, *(f.call for f in stack[:-1]), stack[-1].function, stack[-1].line)

    for _, run in runs(cells, line, lambda cell, run: _begins_again(cells, cell, run)):
        for steps in components(cells, run):
            if len(steps) >= 3:
                # The dearest step that is not done to each element by itself names the box: a sum, a gather.
                others = [cell for cell in steps if cells.prims(cell) & _NOT_ELEMENTWISE]
                dearest = max(others, key=lambda cell: sum(eqn.flops for eqn in cells.eqns(cell)), default=None)
                ops = list(dict.fromkeys(cell.op for cell in steps))
                op = ops[0] if len(ops) == 1 else "Elementwise" if dearest is None else dearest.op
                names = [name for name in ops if name != op]
                if len(ops) == 1:  # several steps of one kind, such as random numbers
                    names = list(filter(None, dict.fromkeys(cell.detail for cell in steps)))
                cells.fold(steps, op, ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""))


def fold_siblings(cells: Cells) -> None:
    """Make one cell "×8" of the steps that one line does for each leaf."""
    for _, run in runs(cells, lambda cell: None if cell.major or cells.is_backward(cell) else True):
        groups: dict[tuple[str, str, object], list[Cell]] = {}
        for cell in run:
            place = (cells.raw.eqns[cell.eqns[0]].scope, *(frame.call for frame in own_stack(cells, cell)))
            groups.setdefault((cell.op, cell.detail, place), []).append(cell)
        for (op, detail, _), same in groups.items():
            if len(same) > 1 and _is_of_leaves(cells, [[cell] for cell in same]):
                cells.fold(same, op, f"{detail} ×{len(same)}".strip())


def own_stack(cells: Cells, cell: Cell) -> tuple[Frame, ...]:
    """The calls around a cell, without those inside of JAX."""
    return cells.raw.own_stack(cells.raw.eqns[cell.eqns[0]])


def _begins_again(cells: Cells, cell: Cell, run: list[Cell]) -> bool:
    """Whether a cell repeats the first of a run, and reads the run."""
    first, new = cells.raw.eqns[run[0].eqns[0]], cells.raw.eqns[cell.eqns[0]]
    return first.position == new.position and first.prim == new.prim and _reads(cells, [cell], _ids(run))


def _reads(cells: Cells, readers: list[Cell], read_ids: set[int]) -> bool:
    """Whether one of these cells reads one of those, which are given by their ids."""
    return any(source.id in read_ids for cell in readers for source in cells.sources(cell))


def _ids(group: Iterable[Cell]) -> set[int]:
    return {cell.id for cell in group}


def _equal_parts(cells: Cells, run: list[Cell]) -> list[list[Cell]]:
    """The run as the largest number of equal sequences of steps. Empty where it is none."""
    steps = [(cells.raw.eqns[cell.eqns[0]].position, cell.op) for cell in run]
    for size in (size for size in range(1, len(run) // 2 + 1) if len(run) % size == 0):
        if steps[size:] == steps[:-size]:
            return [run[at : at + size] for at in range(0, len(run), size)]
    return []


def _returns(cells: Cells, run: list[Cell], depth: int) -> list[list[Cell]]:
    """The run, split where a step returns to the first one, and reads what came before, or nothing after it does."""
    calls = [own_stack(cells, cell)[depth].call for cell in run]
    position = cells.raw.eqns[run[0].eqns[0]].position
    pieces: list[list[Cell]] = []
    for number, cell in enumerate(run):
        first = cells.raw.eqns[cell.eqns[0]].position == position
        if number == 0 or (first and (calls[number - 1] != calls[0] or _begins_again(cells, cell, pieces[-1]))):
            pieces.append([])
        pieces[-1].append(cell)
    separate, before = pieces[:1], _ids(pieces[0])
    for piece in pieces[1:]:
        if _reads(cells, piece[:1], before) or not _reads(cells, piece, before):
            separate.append(piece)
        else:
            separate[-1] += piece
        before |= _ids(piece)
    return separate


def _is_of_leaves(cells: Cells, steps: list[list[Cell]]) -> bool:
    """Whether equal steps each handle a leaf of a tree, as an optimizer does, and are no branches of a network.

    Each has arrays of its own: parameters, gradients, arguments, or what such steps made of them. Most come after a
    gradient: some parameters are frozen, or have none. Where fewer do, nothing may read two of them.
    """
    arrays_of = [_arrays(cells, step) for step in steps]
    whose = {cell.id: number for number, step in enumerate(steps) for cell in step}
    read = ((n, source.id) for n, step in enumerate(steps) for cell in step for source in cells.sources(cell))
    shared = sum(map(len, arrays_of)) > len(set[int]().union(*arrays_of))
    if shared or any(whose.get(source, number) != number for number, source in read):  # one reads another
        return False
    no_gradient = [arrays for arrays in arrays_of if arrays.isdisjoint(cells.after_gradient)]
    if 2 * len(no_gradient) < len(arrays_of):
        return True
    made = [cell for arrays in no_gradient for root in arrays if (cell := cells.producer(root)) is not None]
    of_layers = any(cell.major and cell.op not in OPTIMIZERS for cell in made)
    return all(no_gradient) and not of_layers and not _joins(cells, steps)


def _arrays(cells: Cells, step: list[Cell]) -> set[int]:
    """The arrays that these cells read from outside. Scalars do not count."""
    made = {out for cell in step for eqn in cells.eqns(cell) for out in eqn.outs}
    roots = {root for cell in step for root in cells.inputs(cell)} - made
    return {root for root in roots if math.prod(cells.raw.values[root].shape) != 1 or cells.producer(root) is None}


def _joins(cells: Cells, steps: list[list[Cell]]) -> bool:
    """Whether something is computed from two of these, or one of them from another one."""
    inside = {number: n for n, step in enumerate(steps) for cell in step for number in cell.eqns}
    whose: dict[int, int] = {}  # of each value, the step that it is computed from
    for eqn in cells.raw.eqns[min(inside) :]:
        parts = {whose[root] for value in eqn.ins if (root := cells.raw.root(value)) in whose}
        if eqn.id in inside:
            parts.add(inside[eqn.id])
        if len(parts) > 1:
            return True
        for part in parts:
            whose |= dict.fromkeys(eqn.outs, part)
    return False
