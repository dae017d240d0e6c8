"""A store out of any pytree of arrays, and that pytree again.

Begin with `from_params`. Key k is leaf k of `jax.tree.flatten`, and its name is the path of that leaf. Most of the file
finds what a pytree has beside params (running means, random streams, two places of one array), which would be trained
in silence otherwise.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .. import updaters
from .._core import checks
from .._core.arguments import no_such_arguments
from .._core.arrays import Device, KeyPath, PyTree, is_traced
from .._core.portable import param_name
from .._core.transfers import allows_transfers
from .._devices import processes
from .._devices.mesh import mesh_of
from .._devices.user_mesh import in_user_mesh
from .._store import store as stores
from .._store.mxnet_names import ARGUMENTS as MXNET_ARGUMENTS
from .._store.store import KVStore
from ..sparse import RowSparse
from ._create import create, init, set_optimizer, set_updater
from ._place import default_rule, split_layouts
from ._pull import own_values, pull_whole

if TYPE_CHECKING:
    import optax

# What other libraries call `frozen=`.
_NOT_TRAINED = dict.fromkeys(
    ("trainable", "trainable_params", "trainable_mask", "requires_grad", "freeze", "frozen_params"),
    'name the params that are not trained: frozen="body", or frozen=lambda name, leaf: name.startswith("body/")',
)

# The last one is a pytree prefix of bools.
Frozen = str | Sequence[str] | Callable[[str, jax.Array], bool] | PyTree


@no_such_arguments({**MXNET_ARGUMENTS, **_NOT_TRAINED})
@allows_transfers
@in_user_mesh
def from_params(
    params: PyTree,
    *,
    kind: str = "device",
    optimizer: optax.GradientTransformation | updaters.Updater | None = None,
    updater: updaters.Updater | updaters.UpdateFn | None = None,
    devices: Sequence[Device] | None = None,
    staleness: int | None = None,
    mesh: Mesh | None = None,
    sharding: PyTree = None,
    frozen: Frozen = None,
) -> KVStore:
    """Make a store that holds a pytree of arrays.

    With `mesh` or `sharding`, or if a param is already split over devices, values keep their shapes and are split over
    a mesh. The training step's engine `jit` needs such a store. A store of kind `sharded` with an optimizer that is not
    elementwise is laid out like this too.

    Args:
        params: any pytree whose leaves are arrays.
        kind: as in `kv.create`.
        optimizer: an optax transform, as in `kv.set_optimizer`. It updates the whole pytree, with one state in
            `store.optimizer_state`, and sees None in place of leaves that are not floating. Or an `Updater`, such as
            `jp.updaters.mxnet_sgd(...)`, with one state for each key.
        updater: as in `kv.set_updater`. Not together with `optimizer`.
        devices, staleness: as in `kv.create`.
        mesh: a `jax.sharding.Mesh`, in place of `devices`.
        sharding: how params are split over the mesh, as in `jp.parallel.shardings_of`: a rule such as
            `jp.parallel.fsdp("data")`, or a pytree of `NamedSharding` or `PartitionSpec`. None keeps the sharding of
            the params. Params without one are replicated, or split by `fsdp` over the first axis in kind `sharded`.
        frozen: the params that are not trained: a function `(name, leaf) -> bool`; a pattern, or a list of patterns,
            for the name of a param or of a subtree, such as `"teacher"`, `"*/bias"` or `"teacher|head"`; or a
            pytree prefix of bools.
            Frozen params stay in `to_params` and `state.params`. They have no gradient and no optimizer state, and a
            push to one raises. Devices send nothing for frozen params, unless `sharding` splits them.

    Returns:
        A store with the keys 0 to n-1 in the order of `jax.tree.flatten`. The name of a key is the path of its leaf.
        `push`, `pull`, `pushpull` and `row_sparse_pull` take names as keys. The arrays of `params` are copied.

    Raises:
        TypeError: a leaf is not an array, or is a `RowSparse`; or no optimizer may change it, such as a running mean or
            a stream in a whole module of Flax NNX or Equinox, which is for `train.start`.
        ValueError: both an optimizer and an updater are given; two leaves have the same name, or are the same array;
            the kind cannot apply the optimizer, see `kv.set_optimizer`; a pattern of `frozen` matches no param, or its
            bools do not fit the params; all floating params are frozen.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> store = kv.from_params({"w": jnp.ones(2), "b": jnp.zeros(1)}, optimizer=optax.sgd(0.1))
        >>> kv.names(store)
        {0: 'b', 1: 'w'}
    """
    # 1. What is no params, or says two things at once.
    checks.at_most_one("kv.from_params", mesh=mesh, devices=devices)
    checks.at_most_one("kv.from_params", optimizer=optimizer, updater=updater)
    if params is None:
        raise ValueError("kv.from_params: params is None, so there is nothing to train; give a pytree of arrays")
    advice = ""
    if isinstance(params, KVStore):
        advice = "its params are kv.to_params(store)"
    elif isinstance(getattr(params, "store", None), KVStore):
        advice = "its params are state.params"
    elif type(params).__name__ == "LookaheadParams":
        advice = "give the fast params alone: the store makes the slow ones, and kv.eval_params has them"
    elif hasattr(params, "params") and hasattr(params, "opt_state"):
        advice = "its optimizer would be trained too; give its .params"
    if advice:
        raise TypeError(f"kv.from_params: expected params, got a {type(params).__name__}; {advice}")

    # 2. The leaves, with names. A key of a dict with a slash can make a name that is there. The store would train the
    #    two places of one array apart, and the user may mean one param. A `RowSparse` counts as a leaf, since it has
    #    two, of which the row numbers would become a param.
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, RowSparse))
    names = [param_name(path) for path, _ in leaves]
    path_of_name, name_of_array = dict[str, KeyPath](), dict[int, str]()
    for name, (path, leaf) in zip(names, leaves, strict=True):
        if name in path_of_name:
            two = " and ".join(map(jax.tree_util.keystr, (path_of_name[name], path)))
            raise ValueError(f"kv.from_params: the leaves {two} of params have the same name, {name!r}; rename one")
        path_of_name[name] = path
        first = name_of_array.setdefault(id(leaf), name) if isinstance(leaf, (jax.Array, np.ndarray)) else name
        if first != name:
            raise ValueError(f"kv.from_params: leaves {first!r} and {name!r} are one array; keep one, or jnp.copy it")
    untrained = _untrained(params)
    _check_trained(untrained, names, range(len(names)) if frozen is not None else ())

    # 3. The store, before the first use of JAX, since a kind `dist_*` joins the other processes. Then its arrays.
    store = create(kind, devices=devices, staleness=staleness)
    values = list[jax.Array]()
    for name, (_, leaf) in zip(names, leaves, strict=True):
        what = f"kv.from_params: leaf {name!r} of params"
        if isinstance(leaf, RowSparse):
            raise TypeError(f"{what} is a RowSparse; give sparse.to_dense(value)")
        try:
            values.append(checks.array(leaf, what))
        except jax.errors.UnexpectedTracerError:  # a `TypeError` with advice of its own
            raise
        except TypeError as error:
            if hasattr(params, "init") and hasattr(params, "apply"):  # Flax Linen and Haiku
                raise TypeError(
                    f"kv.from_params: expected params, got a {type(params).__name__}, which makes them: give what "
                    'model.init(jax.random.key(0), x) returns, of Linen its ["params"], and call model.apply in loss_fn'
                ) from None
            raise TypeError(f"{error}; params are arrays alone, and train.start takes whole modules too") from None
    frozen_keys = _frozen_keys(frozen, params, names, values)
    _check_trained(untrained, names, frozen_keys)
    store = dataclasses.replace(store, paths=tuple(enumerate(names)), treedef=treedef, frozen=frozen_keys)

    # 4. The mesh decides how `init` lays out the values, and `init` how the optimizer's state lies. So in this order.
    chosen = mesh if mesh is not None else _mesh_for(store, values, sharding, optimizer)
    if chosen is not None:
        if sharding is None and stores.KINDS[store.kind].in_rows and not _split_shardings(values):
            sharding = default_rule(store, chosen)
        layouts = split_layouts(store, range(len(values)), params, chosen, sharding, "kv.from_params")
        store = dataclasses.replace(store, devices=tuple(chosen.devices.flat), layouts=layouts)
    store = init(store, list(range(len(values))), values)
    if optimizer is not None:
        return set_optimizer(store, optimizer)
    return store if updater is None else set_updater(store, updater)


def _frozen_keys(frozen: Frozen, params: PyTree, names: Sequence[str], values: Sequence[jax.Array]) -> tuple[int, ...]:
    what, patterns = "kv.from_params: frozen", [frozen] if isinstance(frozen, str) else frozen
    if frozen is None:
        return ()
    if isinstance(patterns, (list, tuple)) and all(isinstance(pattern, str) for pattern in patterns):
        flags = checks.matched(patterns, names, what)
    elif callable(frozen) and jax.tree_util.all_leaves([frozen]):  # a module of Equinox is a pytree, and callable
        flags = [frozen(name, value) for name, value in zip(names, values, strict=True)]
    else:  # each bool of a prefix is for all leaves below it
        flags = jax.tree.leaves(
            jax.tree.map(lambda flag, subtree: jax.tree.map(lambda _: flag, subtree), frozen, params)
        )
    for name, flag in zip(names, flags, strict=True):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{what} must give True or False for each param, got {checks.describe(flag)} for {name!r}")
    if not any(jnp.issubdtype(v.dtype, jnp.inexact) and not f for v, f in zip(values, flags, strict=True)):
        raise ValueError(f"{what} leaves no floating param to train; freeze fewer params")
    return tuple(k for k, flag in enumerate(flags) if flag)


# A whole module is a pytree, and not all of its leaves are params. Trained as params, a running mean would stay at its
# start, weight decay would shrink it, and a stream of random numbers would give the same ones at each step.


class _Untrained(NamedTuple):
    """What a leaf is that no optimizer may change, and what to do."""

    what: str
    hint: str
    may_be_frozen: bool = True


_WHOLE = "train.start(model, optimizer, loss_fn) takes a whole module; into a store go its params alone: "
_BY_NNX = _WHOLE + "nnx.state(model, nnx.Param)"
_BY_EQUINOX = _WHOLE + "eqx.filter(model, eqx.is_inexact_array)"
_BY_STATE = "make the module by model, state = eqx.nn.make_with_state(Module)(...), and give state as model_state="
_BY_LINEN = 'give variables["params"] as params, and the other collections as model_state='
_COLLECTIONS = {"batch_stats", "cache", "intermediates", "perturbations"}  # of Flax Linen, beside "params"


def _untrained(params: PyTree) -> list[_Untrained | None]:
    """For each leaf of params what it is, if it is certain that no optimizer may change it."""
    # Whoever has a module of a library has imported it. Nothing is an instance of `()`.
    nnx: Any = sys.modules.get("flax.nnx")
    equinox: Any = sys.modules.get("equinox")
    variable = nnx.Variable if nnx else ()
    of_nnx: Any = (nnx.Module, nnx.State) if nnx else ()
    module = equinox.Module if equinox else ()
    kept_apart: Any = (equinox.nn.State, equinox.nn.StateIndex) if equinox else ()

    def is_known(node: object) -> bool:
        return isinstance(node, (variable, of_nnx, module, kept_apart, RowSparse)) or _is_mean_of_haiku(node)

    def is_member(node: object) -> bool:
        return isinstance(node, (variable, kept_apart, RowSparse))

    reasons: list[_Untrained | None] = []
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_known):
        # 1. The members of a module, each of which may be another thing. Elsewhere the outermost node that a library
        #    knows decides for all leaves below it. A state of NNX may be of bare arrays, as out of a file, which may
        #    well be params. Beside variables, and in a module, they are none.
        members: list[Any] = [node]
        in_nnx = in_equinox = False
        if isinstance(node, of_nnx):
            members = jax.tree.leaves(node, is_leaf=is_member)
            in_nnx = isinstance(node, nnx.Module) or any(isinstance(member, variable) for member in members)
        elif isinstance(node, module) and not isinstance(node, kept_apart):
            members, in_equinox = jax.tree.leaves(node, is_leaf=is_member), True

        # 2. What each member is.
        collection = getattr(path[0], "key", None) if path else None
        for member in members:
            why = None
            if isinstance(member, variable):
                if not isinstance(member, nnx.Param):
                    is_stream = isinstance(member, nnx.RngState)
                    why = _Untrained(f"of type {type(member).__name__}", _BY_NNX, may_be_frozen=not is_stream)
            elif in_nnx:
                why = _Untrained("no nnx.Param", _BY_NNX)
            elif isinstance(member, kept_apart):
                why = _Untrained("a running value of Equinox", _BY_STATE)
            elif in_equinox:
                if not hasattr(member, "dtype"):
                    why = _Untrained(f"no array but {checks.describe(member)}", _BY_EQUINOX)
            elif _is_mean_of_haiku(member):
                why = _Untrained("a running mean of Haiku", "give the state of its init as model_state=")
            elif isinstance(params, Mapping) and "params" in params and collection in _COLLECTIONS:
                why = _Untrained(f"in the collection {collection!r} of Flax", _BY_LINEN)
            # The caller reads the reasons beside its leaves, of which a `RowSparse` is one.
            reasons += [why] * (1 if isinstance(member, RowSparse) else len(jax.tree.leaves(member)))
    return reasons


def _is_mean_of_haiku(node: object) -> bool:
    """Whether this is the state of `hk.ExponentialMovingAverage`, which is that of a batch norm too."""
    return isinstance(node, Mapping) and node.keys() == {"average", "counter", "hidden"}


def _check_trained(untrained: Sequence[_Untrained | None], names: Sequence[str], frozen: Container[int]) -> None:
    """`TypeError` for leaves that no optimizer may change, unless they are frozen, where that is enough."""
    wrong = [
        (n, why)
        for k, (n, why) in enumerate(zip(names, untrained, strict=True))
        if why and not (why.may_be_frozen and k in frozen)
    ]
    if wrong:
        (name, why), more = wrong[0], len(wrong) - 1
        as_others = f", as {more} more are not" if more else ""
        is_not = f"leaf {name!r} of params is {why.what}, which cannot be trained{as_others}"
        raise TypeError(f"kv.from_params: {is_not}; {why.hint}")


def _mesh_for(
    store: KVStore,
    values: Sequence[jax.Array],
    sharding: PyTree,
    optimizer: optax.GradientTransformation | updaters.Updater | None,
) -> Mesh | None:
    """The mesh over which values are split in their own shapes. None: there is none."""
    # A mesh that is named, or that the params are on, is the user's word. A rule alone takes a mesh of all devices.
    named = [s for s in jax.tree.leaves(sharding) if isinstance(s, NamedSharding)]
    if shardings := named or _split_shardings(values):
        mesh = shardings[0].mesh
        assert isinstance(mesh, Mesh)
        return mesh
    if sharding is not None:
        return mesh_of(store.devices or processes.devices())
    if not stores.KINDS[store.kind].in_rows or optimizer is None or isinstance(optimizer, updaters.Updater):
        return None
    # Kind `sharded` cuts values into flat rows, which only an elementwise optimizer can update. With any other one the
    # values keep their shapes, and the compiler splits them.
    assert store.devices is not None
    specs: Any = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in enumerate(values)}
    trained = stores.tree_of(dataclasses.replace(store, values=specs), specs)
    try:
        updaters._check_elementwise_tree(updaters._TreeOptimizer(optimizer), trained, len(store.devices), "")
    except ValueError:  # it cannot be given shares of the params
        return mesh_of(store.devices)
    return None


def _split_shardings(values: Sequence[jax.Array]) -> list[NamedSharding]:
    """The shardings of params that come split over devices."""
    shardings = [v.sharding for v in values if not is_traced(v)]
    return [s for s in shardings if isinstance(s, NamedSharding) and not s.is_fully_replicated]


@allows_transfers
@in_user_mesh
def to_params(store: KVStore, *, axis_name: str | None = None, copy: bool = True) -> Any:
    """The current values, as the pytree given to `from_params`.

    Args:
        store: made by `from_params`.
        axis_name: for a store of kind `sharded` inside `pmap` or `shard_map`, as in `kv.pull`.
        copy: whether the arrays may be donated, as in `kv.pull`.

    Raises:
        ValueError: the store was not made by `from_params`. RuntimeError: a stored value was deleted, as by donating
            the store.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.to_params(kv.from_params({"w": jnp.ones(2)}))["w"].tolist()
        [1.0, 1.0]
    """
    if store.treedef is None:
        raise ValueError("kv.to_params: this store was not made by kv.from_params; kv.pull gives its values")
    keys, _ = checks.find_keys([k for k, _ in store.paths], "kv.to_params", store)
    values = pull_whole(store, keys, axis_name)
    return store.treedef.unflatten(own_values(store, values) if copy else values)


@allows_transfers
@in_user_mesh
def eval_params(store: KVStore, *, copy: bool = True) -> Any:
    """The params to evaluate, as the pytree given to `from_params`.

    Some optimizers evaluate other params than they train: `optax.contrib.schedule_free`, `optax.lookahead`,
    `optax.contrib.sam`, and `jp.updaters.average_params`. For any other optimizer, the result equals
    `to_params(store)`.

    Args:
        store: made by `from_params`.
        copy: as in `to_params`.

    Raises:
        ValueError: the store was not made by `from_params`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> tx = optax.lookahead(optax.sgd(1.0), sync_period=5, slow_step_size=0.5)
        >>> store = kv.push(kv.from_params({"w": jnp.ones(1)}, optimizer=tx), 0, jnp.ones(1))
        >>> kv.to_params(store)["w"].tolist(), kv.eval_params(store)["w"].tolist()
        ([0.0], [1.0])
    """
    params = to_params(store, copy=copy)
    if not isinstance(store.updater, updaters._TreeOptimizer) or not updaters._averages(store.optimizer_state):
        return params
    # The averages lie as the optimizer's state does, in rows too, and cover trained params only. The others are as they
    # are stored.
    leaves, structure = jax.tree.flatten(params)
    trained = stores.tree_of(store, dict(enumerate(leaves)))
    evaluated = stores.by_key(store, store.updater.evaluated(stores.whole_state(store), trained))
    return structure.unflatten([evaluated.get(k, leaf) for k, leaf in enumerate(leaves)])
