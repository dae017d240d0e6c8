"""Rules for layers: normalization, convolution, dense, embedding, attention, losses, pooling.

Each rule is given one cell, the heart of its layer, such as a softmax or a convolution, and looks for the others around
it. It returns a `Fold` or None. `known.RULES` says in which order they are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from .._read.raw import Eqn
from .cells import Cell, Cells
from .templates import Fold
from .terms import (
    bias,
    by,
    divides_by,
    has_one_axis,
    is_convex,
    is_of_several,
    is_scale,
    made_of_params,
    number,
    readers,
    single,
    squared,
    tail,
    takes_scale,
)


def normalization(cells: Cells, cell: Cell) -> Fold | None:
    """A normalization with the params that scale and shift it, called by the axes of its sums."""
    members = [cell, *(made for value in cells.inputs(cell) for made in made_of_params(cells, value, cell))]
    last = cell
    while (user := _reader(cells, last)) is not None and (eqn := single(cells, user)) is not None:
        others = [value for value in eqn.ins if cells.producer(value) is not last]
        if eqn.prim not in ("mul", "add", "sub") or len(others) != 1:
            break
        is_weight = cells.raw.weight_of(others[0]) is not None or is_scale(cells, user)
        made = () if is_weight else made_of_params(cells, others[0], user)
        if not (is_weight or made) or not has_one_axis(cells, others[0]):
            break
        members += (*made, user)
        last = user
    return Fold(tuple(members), *_kind_of_norm(cells, cell, any(map(cells.weights, members))))


def _reader(cells: Cells, cell: Cell) -> Cell | None:
    """The only forward cell that reads the result of a normalization. Others may read its statistics."""
    result = cells.output(cell)
    owners = {cells.owner[eqn.id] for eqn in readers(cells, result)} - {cell}
    reader = owners.pop() if len(owners) == 1 and not cells.is_returned(result) else None
    return reader if reader is not None and cells.are_in_one_loop(cell, reader) else None


def _kind_of_norm(cells: Cells, cell: Cell, has_params: bool) -> tuple[str, str]:
    """The kind of a normalization by its statistics and the axes of their sums. What a name tells stays as it is."""
    plain = cell.op, cell.detail
    sums = [eqn for eqn in cells.eqns(cell) if eqn.prim == "reduce_sum"]
    if cell.detail not in ("mean and variance", "root mean square") or not sums:
        return plain
    shape, axes = sums[0].in_shapes[0], sums[0].params["axes"]
    rank = len(shape)
    kept = [axis for axis in range(rank) if axis not in axes and shape[axis] != 1]
    if len(axes) == rank and not has_params:  # a vector of rewards
        return plain
    if axes in ((rank - 1,), tuple(range(1, rank))):
        return ("LayerNorm" if cell.detail == "mean and variance" else "RMSNorm"), ""
    if cell.detail == "root mean square":
        return plain
    if kept and rank > len(cells.raw.of(sums[0].ins[0]).shape):  # its channels were split
        return "GroupNorm", f"{shape[kept[-1]]} groups"
    if 0 in axes and len(axes) == rank - 1:
        return "BatchNorm", ""
    return ("InstanceNorm", "") if 0 not in axes and rank > 2 else plain


_BIASED = ("add", "Convolution", "Deconvolution", "FullyConnected", "MatMul")


def convolution(cells: Cells, cell: Cell) -> Fold | None:
    """A convolution, or a transposed one, with its bias."""
    eqn = single(cells, cell)
    if eqn is None:
        return None
    numbers = eqn.params["dimension_numbers"]
    kernel_shape = eqn.in_shapes[1]
    kernel = [kernel_shape[axis] for axis in numbers.rhs_spec[2:]]
    dilated = any(step > 1 for step in eqn.params["lhs_dilation"])
    strides = eqn.params["lhs_dilation"] if dilated else eqn.params["window_strides"]
    detail = f"{by(kernel)}/{_stride(strides)}, {kernel_shape[numbers.rhs_spec[0]]}"
    groups = eqn.params["feature_group_count"]
    detail += f", {groups} groups" if groups > 1 else ""
    apart = eqn.params["rhs_dilation"]
    detail += f", dilated {_stride(apart)}" if any(step > 1 for step in apart) else ""
    members = (*_padding(cells, cell, eqn), *made_of_params(cells, eqn.ins[1], cell), cell, *bias(cells, cell))
    return Fold(members, "Deconvolution" if dilated else "Convolution", detail)


def _padding(cells: Cells, cell: Cell, eqn: Eqn) -> tuple[Cell, ...]:
    """The zeros that only this convolution has around its images, as of a causal one."""
    before = cells.producer(eqn.ins[0])
    pad = single(cells, before) if before is not None else None
    if before is None or pad is None or pad.prim != "pad" or number(cells, pad.ins[1]) != 0:
        return ()
    return (before,) if cells.sole_user(before) is cell else ()


def _stride(strides: Iterable[int]) -> str:
    """One number where all axes have the same stride."""
    strides = tuple(strides)
    return str(strides[0]) if strides and len(set(strides)) == 1 else by(strides)


def fully_connected(cells: Cells, cell: Cell) -> Fold | None:
    """A product with a parameter, or what is made of parameters, and its bias. Other products are "MatMul"."""
    eqn = single(cells, cell)
    if eqn is None:
        return None
    # Beside a param, the other operand is what the layer is given, though params and constants alone may make it, as in
    # the embedding of the number of a pass.
    weights = [cells.raw.weight_of(value) is not None for value in eqn.ins]
    made: list[tuple[Cell, ...]] = [() for _ in eqn.ins]
    if not any(weights):
        made = [made_of_params(cells, value, cell) for value in eqn.ins]
        weights = [bool(makers) for makers in made]
    if sum(weights) != 1:
        return Fold((cell,), "MatMul")
    side = weights.index(True)
    ragged = eqn.params.get("ragged_dot_dimension_numbers")  # rows of one group after the other, each with a matrix
    contracted, batched = eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    groups = ragged.rhs_group_dimensions if ragged is not None and side == 1 else ()
    fixed = {*contracted[side], *batched[side], *groups}
    features = math.prod(d for axis, d in enumerate(eqn.in_shapes[side]) if axis not in fixed)
    detail = "".join([str(features), *(f", {eqn.in_shapes[side][axis]} groups" for axis in groups)])
    return Fold((*made[0], *made[1], cell, *bias(cells, cell)), "FullyConnected", detail)


def late_bias(cells: Cells, cell: Cell) -> Fold | None:
    """A bias added later, as in `x + h @ w + b`."""
    eqn = single(cells, cell)
    if eqn is None or eqn.prim != "add" or cell.major:
        return None
    shapes = zip(eqn.ins, eqn.in_shapes, strict=True)
    weights = [shape for value, shape in shapes if cells.raw.weight_of(value) is not None]
    before = cells.producer(cells.data(cell)[0]) if len(weights) == 1 and cells.data(cell) else None
    if (
        before is None
        or before.op not in _BIASED
        or cells.sole_user(before) is not cell
        or not takes_scale(cells, before, cell)
    ):
        return None
    if max(weights[0], default=1) != math.prod(weights[0]):  # a bias has one axis that is longer than 1
        return None
    return Fold((before, cell), before.op, before.detail, before.major)


def embedding(cells: Cells, cell: Cell) -> Fold | None:
    """Rows of a parameter."""
    for eqn in () if cell.major else cells.eqns(cell):
        table = cells.raw.weight_of(eqn.ins[0]) if eqn.prim == "gather" else None
        if table is not None:
            shape = cells.raw.values[table].shape
            return Fold((cell,), "Embedding", by(shape))
    return None


def one_step(cells: Cells, cell: Cell) -> Fold | None:
    """A reshape that keeps the first axis, or arrays joined along one."""
    return Fold((cell,), "Concat" if cell.op == "stack" else cell.op, cell.detail)


def scale(cells: Cells, cell: Cell) -> Fold | None:
    """A constant factor or offset, as part of a neighbour. The cell before it comes first."""
    if not is_scale(cells, cell):
        return None
    value = next(iter(cells.data(cell)), None)
    before = cells.producer(value) if value is not None else None
    if before is not None and takes_scale(cells, before, cell) and cells.sole_user(before) is cell:
        return Fold((before, cell), before.op, before.detail, before.major)
    after = cells.sole_user(cell)
    if after is not None and takes_scale(cells, after, cell):
        return Fold((cell, after), after.op, after.detail, after.major)
    return None


def transform(cells: Cells, cell: Cell) -> Fold | None:
    """A Fourier transform, by its kind and lengths."""
    transforms = [eqn for eqn in cells.eqns(cell) if eqn.prim == "fft"]
    if len(transforms) != 1 or cell.major:
        return None
    kind = str(getattr(transforms[0].params["fft_type"], "name", transforms[0].params["fft_type"])).lower()
    return Fold((cell,), "FFT", f"{kind}, {by(transforms[0].params['fft_lengths'])}")


_MASKS = frozenset(("where", "select_n", "add", "sub", "mul", "clamp", "min", "max", "div"))
_UPDATES = frozenset(("dynamic_update_slice", "scatter", "Concat", "repeat", "dynamic_update_index_in_dim"))
_COMPARED = frozenset("eq ne lt le gt ge and or not iota select_n broadcast_in_dim convert_element_type".split())


def attention(cells: Cells, cell: Cell) -> Fold | None:
    """A product, scaled and masked, its softmax, and the product of that with the values."""
    above, scores = _chain(cells, cell, up=True)
    below, mixed = _chain(cells, cell, up=False)
    if scores is None or mixed is None or _reads_weights(cells, scores) or _reads_weights(cells, mixed):
        return None
    return Fold(_with_feeders(cells, (scores, *above, cell, *below, mixed)), "Attention")


def cache(cells: Cells, cell: Cell) -> Fold | None:
    """The caches, repeated heads and masks that only a known attention function reads."""
    members = _with_feeders(cells, (cell,))
    return Fold(members, cell.op, cell.detail) if len(members) > 1 else None


def _chain(cells: Cells, cell: Cell, *, up: bool) -> tuple[list[Cell], Cell | None]:
    """The scales and masks between a softmax and the matrix product before or after it, and that product."""
    between: list[Cell] = []
    for _ in range(10):
        step = _before(cells, cell) if up else cells.sole_user(cell)
        if step is None or (up and cells.sole_user(step) is not cell):
            break
        if step.op == "MatMul":
            return between, step
        masks = step.op in _MASKS or is_scale(cells, step) or step.op == "Dropout"
        if not masks and not (up and step.op in ("tanh", "Activation")):
            break
        between.append(step)
        cell = step
    return between, None


def _before(cells: Cells, cell: Cell) -> Cell | None:
    """The cell of the scores that a cell reads: the one with the most elements that only it reads."""
    values = [value for value in cells.data(cell) if cells.raw.values[value].dtype != "bool"]
    makers = {p.id: p for value in values if (p := cells.producer(value)) is not None}
    read_here = [maker for maker in makers.values() if cells.sole_user(maker) is cell]
    unmasked = [maker for maker in read_here if maker.op not in ("OneHot", "where")]
    # A `where` of bools only makes a mask. One that reads numbers hides some of the scores.
    masked = [maker for maker in read_here if maker.op == "where"]
    scored = [maker for maker in masked if any(cells.raw.values[v].dtype != "bool" for v in cells.data(maker))]
    products = [maker for maker in unmasked if maker.op == "MatMul"]
    return next(iter([*products, *unmasked, *scored]), None)


def _reads_weights(cells: Cells, cell: Cell) -> bool:
    return any(
        eqn.prim == "dot_general" and any(cells.raw.weight_of(value) is not None for value in eqn.ins)
        for eqn in cells.eqns(cell)
    )


def _with_feeders(cells: Cells, members: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """These cells and what only they read: updated caches, repeated heads, compared masks."""
    gathered = {member.id: member for member in members}
    for member in members:
        _add_feeders(cells, member, gathered)
    eqns = [eqn for member in gathered.values() for eqn in cells.steps(member)]
    return tuple(gathered.values()) if is_convex(cells, eqns) else members


def _add_feeders(cells: Cells, reader: Cell, gathered: dict[int, Cell]) -> None:
    for before in cells.sources(reader):
        if before.id in gathered or before.major:
            continue
        compared = cells.prims(before) <= _COMPARED
        updated = before.op in _UPDATES or bool(cells.prims(before) & {"dynamic_update_slice"})
        position = reader.op in ("le", "lt", "ge", "gt", "eq") and before.op in ("add", "sub")
        if (compared or updated or position) and all(user.id in gathered for user in cells.users(before)):
            gathered[before.id] = before
            _add_feeders(cells, before, gathered)


_REDUCTIONS = frozenset(("sum", "mean", "neg"))
_PICKS = frozenset("take_along_axis take gather getitem rewriting_take mul where sum mean neg squeeze".split())
_MEANS = ("mean", "sum", "pmean", "Pooling")
_LABELS = ("OneHot", "eq", "lt", "neg", "arange", "iota")


def mean(cells: Cells, cell: Cell) -> Fold | None:
    """A sum divided by the number of its terms."""
    user, eqn = cells.sole_user(cell), single(cells, cell)
    if user is None or eqn is None or eqn.prim != "reduce_sum":
        return None
    if not divides_by(cells, user, math.prod(eqn.in_shapes[0]) / max(1, math.prod(eqn.out_shape))):
        return None
    return Fold((cell, user), "mean", "", major=False)


def squared_error(cells: Cells, cell: Cell) -> Fold | None:
    """A difference, its square, and the sum or mean of that. A variance is none, nor are distances of pairs."""
    square = cells.sole_user(cell)
    if square is None or single(cells, square) is None or squared(cells, cells.output(square)) is None:
        return None
    if single(cells, cell) is None or len(cells.data(cell)) < 2:
        return None
    means = [value for below in cells.sources(cell) if below.op in _MEANS for value in cells.data(below)]
    reductions = tail(cells, square, _REDUCTIONS)
    if not any(step.op in _REDUCTIONS for step in reductions) or set(means) & set(cells.data(cell)):
        return None
    if len(cells.raw.values[cells.output(reductions[-1])].shape) > 1:
        return None
    return Fold((cell, square, *reductions), "Loss", "squared error")


def cross_entropy(cells: Cells, cell: Cell) -> Fold | None:
    """A log-softmax, the picked label, the mean, and what prepares the labels."""
    chain = [cell]
    while (user := cells.sole_user(chain[-1])) is not None:
        if (user.op not in _PICKS and not is_scale(cells, user)) or is_of_several(cells, user):
            break
        chain.append(user)
    while len(chain) > 1 and not _reduces(cells, chain[-1]) and not is_scale(cells, chain[-1]):
        chain.pop()
    if not any(_reduces(cells, step) for step in chain[1:]) or not _picks(cells, chain):
        return None
    for step in tuple(chain):
        for label in cells.sources(step):
            if label not in chain and label.op in _LABELS and cells.sole_user(label) is not None:
                chain.append(label)
    return Fold(tuple(chain), "Loss", "softmax cross-entropy")


def _picks(cells: Cells, chain: list[Cell]) -> bool:
    """Whether labels choose among the logits. An entropy weighs them by themselves."""
    logits = set(cells.data(chain[0]))
    for step in chain[1:]:
        if "gather" in cells.prims(step):
            return True
        if step.op == "mul" and not is_scale(cells, step):
            return not any(o not in chain and logits & set(cells.data(o)) for o in cells.sources(step))
    return False


def _reduces(cells: Cells, cell: Cell) -> bool:
    return bool(cells.prims(cell) & {"gather", "reduce_sum"})


def reduction(cells: Cells, cell: Cell) -> Fold | None:
    """The sum or mean of a loss."""
    reductions = tail(cells, cell, _REDUCTIONS)
    return Fold((cell, *reductions), "Loss", cell.detail) if reductions else None


_KINDS = {"reduce_window_max": "max", "reduce_window_min": "min", "reduce_window_sum": "sum"}


def window_pooling(cells: Cells, cell: Cell) -> Fold | None:
    """A `reduce_window`, and the division by its size."""
    windows = [eqn for eqn in cells.eqns(cell) if eqn.prim in _KINDS]
    if not windows or cell.major:
        return None
    eqn = windows[0]
    kind = _KINDS[eqn.prim]
    tail: tuple[Cell, ...] = ()
    if kind == "sum":
        tail = _division(cells, cell, math.prod(eqn.params["window_dimensions"]))
        kind = "avg" if tail or "div" in cells.prims(cell) else kind
    window, stride = eqn.params["window_dimensions"], eqn.params["window_strides"]
    axes = [i for i, (w, s) in enumerate(zip(window, stride, strict=True)) if w > 1 or s > 1]
    detail = f"{kind}, {by(window[i] for i in axes)}/{by(stride[i] for i in axes)}"
    return Fold((cell, *tail), "Pooling", detail)


def _division(cells: Cells, cell: Cell, count: int) -> tuple[Cell, ...]:
    """The cells that divide by the size of the window, if any."""
    user = cells.sole_user(cell)
    if user is None or user.op not in ("div", "mul"):
        return ()
    if is_scale(cells, user):
        return (user,) if divides_by(cells, user, count) else ()
    if _divides_by_counts(cells, user):
        return (user,)
    counts = [other for other in cells.sources(user) if other is not cell]
    if len(counts) == 1 and not cells.data(counts[0]) and cells.sole_user(counts[0]) is user:
        return counts[0], user
    return ()


def _divides_by_counts(cells: Cells, cell: Cell) -> bool:
    """Whether a cell divides by the constant number of elements in each window, fewer at the borders."""
    eqn = single(cells, cell)
    made = cells.raw.of(eqn.ins[1]).producer if eqn is not None and eqn.prim == "div" else None
    return made is not None and cells.raw.eqns[made].view and cells.raw.eqns[made].prim == "reduce_window_sum"


def slice_pooling(cells: Cells, cell: Cell) -> Fold | None:
    """The sum or maximum of strided slices of one array. Rows and columns may be separate steps."""
    users = cells.users(cell)
    if (users and all(user.op == "slice" for user in users)) or any(user.op == cell.op for user in users[:1]):
        return None  # a step of a larger one
    members: list[Cell] = []
    windows: dict[int, tuple[int, int]] = {}
    top: Cell | None = cell
    while top is not None and (step := _added_slices(cells, top)) is not None:
        added, source, axes = step
        members += added
        windows |= axes
        below = cells.producer(source)
        inner = below is not None and all(user in added for user in cells.users(below))
        top = below if inner and below is not None and below.op == cell.op else None
        if inner and below is not None and below.op == "slice" and single(cells, below) is not None:
            members.append(below)  # an odd last row or column cut off
    if not windows:
        return None
    tail = _division(cells, cell, math.prod(size for size, _ in windows.values())) if cell.op == "add" else ()
    kind = "max" if cell.op == "maximum" else "avg" if tail else "sum"
    sizes = [windows[axis] for axis in sorted(windows)]
    detail = f"{kind}, {by(k for k, _ in sizes)}/{by(s for _, s in sizes)}"
    return Fold((*members, *tail), "Pooling", detail)


def _added_slices(cells: Cells, top: Cell) -> tuple[list[Cell], int, dict[int, tuple[int, int]]] | None:
    """The cells of one step, the array sliced, and its `_strided_axes`."""
    # A tree of additions or maxima, whose leaves are the slices.
    added, slices, todo = list[Cell](), list[Eqn](), [top]
    while todo:
        cell = todo.pop()
        eqn = single(cells, cell)
        if eqn is None:
            return None
        if cell.op == "slice" and cell is not top:
            slices.append(eqn)
        elif cell.op == top.op and (cell is top or cells.sole_user(cell) is not None):
            producers = [cells.producer(value) for value in eqn.ins]
            if len(producers) != 2 or any(other is None for other in producers):
                return None
            todo += [other for other in producers if other is not None]
        else:
            return None
        added.append(cell)
    sources = {cells.raw.root(eqn.ins[0]) for eqn in slices}
    axes = _strided_axes(slices) if len(sources) == 1 and len(slices) >= 2 else {}
    return (added, sources.pop(), axes) if axes else None


def _strided_axes(slices: list[Eqn]) -> dict[int, tuple[int, int]]:
    """Window and stride of each strided axis. Empty where the slices are no windows."""
    axes: dict[int, tuple[int, int]] = {}
    for axis in range(len(slices[0].in_shapes[0])):
        starts = {eqn.params["start_indices"][axis] for eqn in slices}
        strides = {(eqn.params["strides"] or (1,) * 9)[axis] for eqn in slices}
        if len(strides) != 1 or max(starts) - min(starts) >= len(starts):
            return {}
        stride = strides.pop()
        if stride > 1:
            axes[axis] = (len(starts), stride)
        elif len(starts) > 1:
            return {}
    return axes if math.prod(size for size, _ in axes.values()) == len(slices) else {}


def space_to_depth(cells: Cells, cell: Cell) -> Fold | None:
    """All strided slices of one array, joined: each window becomes channels."""
    eqn = single(cells, cell)
    makers = [cells.producer(value) for value in eqn.ins] if eqn is not None else []
    slices = [
        sliced for maker in makers if maker is not None and maker.op == "slice" and (sliced := single(cells, maker))
    ]
    inner = [maker for maker in makers if maker is not None and cells.sole_user(maker) is cell]
    if len(slices) < 2 or len(inner) < len(makers) or len({cells.raw.root(sliced.ins[0]) for sliced in slices}) > 1:
        return None
    axes = _strided_axes(slices)
    if eqn is None or not axes or eqn.params["dimension"] in axes:
        return None
    if any(size != stride for size, stride in axes.values()):
        return None
    return Fold((*inner, cell), "SpaceToDepth", by(stride for _, stride in axes.values()))


def reshape_pooling(cells: Cells, cell: Cell) -> Fold | None:
    """A reshape such as (n, h, w, c) to (n, h/2, 2, w/2, 2, c), reduced over the twos."""
    eqn = cells.raw.eqns[cell.eqns[0]]
    if not eqn.prim.startswith("reduce_") or "axes" not in eqn.params or not eqn.ins:
        return None
    axes, shape, seen = eqn.params["axes"], eqn.in_shapes[0], cells.raw.of(eqn.ins[0]).shape
    if len(shape) != len(seen) + len(axes) or len(axes) < 1 or len(seen) < 3:
        return None
    merged = [d * shape[i + 1] if i + 1 in axes else d for i, d in enumerate(shape) if i not in axes]
    if tuple(merged) != seen or axes == (len(shape) - 1,):
        return None  # one last axis split is groups of channels
    sizes = by(shape[axis] for axis in axes)
    if eqn.prim == "reduce_max":
        return Fold((cell,), "Pooling", f"max, {sizes}/{sizes}")
    tail = () if cell.op == "mean" else _division(cells, cell, math.prod(shape[axis] for axis in axes))
    kind = "avg" if cell.op == "mean" or tail else "sum"
    return Fold((cell, *tail), "Pooling", f"{kind}, {sizes}/{sizes}")
