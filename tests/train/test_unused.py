"""`make_train_step(unused="skip")`: a param that the loss does not read stays as it is, with its part of the state."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from kv_model import collectives_in
from test_every_optimizer import NAMES, SORTS, by_axes, made
from world import EVERYWHERE, mostly_slow, step_of

from jaxpar import kv, train
from jaxpar._core.arrays import is_prng_key
from jaxpar._store.store import whole_state

FIELDS = ("0", "acc_grads", "count", "ema", "inner_state", "mu", "nu", "trace", "v_row")
BY_STRUCTURE = {"adamw, mask by name", "freeze", "masked", "multi_transform", "partition", "selective_transform"}


def by_group(params):
    return jax.tree.map(lambda p: "a" if p.ndim > 1 else "b", params)


WITH_FUNCTIONS = {
    "adamw, mask by path": lambda: optax.adamw(
        0.1, mask=lambda p: jax.tree_util.tree_map_with_path(lambda path, _: path[-1] == jax.tree_util.DictKey("w"), p)
    ),
    "lookahead": lambda: optax.lookahead(optax.adam(0.1), 2, 0.5),
    "masked": lambda: optax.masked(optax.adam(0.1), by_axes),
    "partition": lambda: optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, by_group),
}
PLACES = [*EVERYWHERE, ("jit", "device"), ("jit", "dist_sync"), ("pmap", "dist_async")]
SKIPPED = sorted({*NAMES} - BY_STRUCTURE - {"flatten"})


def params(fields):
    """The loss reads "w" only. The values of the others are nested, in tuples, and a bare array."""

    def some(*shape):
        return jnp.asarray(np.arange(1.0, 1 + np.prod(shape)).reshape(shape), jnp.float32)

    first, second, *others = fields
    idle = {first: some(4, 4), second: (some(4, 4), {"w": some(4)})}
    return {"w": some(4, 4)} | idle | {field: {"w": some(4, 4), "b": some(4)} for field in others}


def loss_fn(params, batch, rng):
    return (params["w"] * batch.mean(0)).sum(), {}


def trained(tx, fields, engine="pmap", kind="device", **options):
    store = kv.from_params(params(fields), optimizer=tx, kind=kind, devices=jax.devices()[:2])
    state = train.create_state(store, 0)
    start = arrays(state)  # the step donates the state
    step = step_of(loss_fn, engine="auto" if store.shardings else engine, unused="skip", **options)
    rng = np.random.default_rng(0)
    for _ in range(3):
        state, _ = step(state, rng.integers(-4, 5, (8, 4, 4)).astype(np.float32))
    return start, arrays(state)


def arrays(state):
    """The params and the optimizer's state, copied to the host."""
    tree = state.params, whole_state(state.store)
    return jax.tree.map(np.array, jax.tree.map(lambda x: jax.random.key_data(x) if is_prng_key(x) else x, tree))


def check(tx, **options):
    idle = [f"idle{i}" for i in range(len(FIELDS))]
    start, plain = trained(tx, idle, **options)
    found = trained(tx, FIELDS, **options)[1]
    before, after = map(jax.tree_util.tree_leaves_with_path, (start, plain))
    kept = [i for i, (path, _) in enumerate(before) if "idle" in jax.tree_util.keystr(path)]
    for i in kept:
        np.testing.assert_array_equal(after[i][1], before[i][1], jax.tree_util.keystr(before[i][0]))
    assert len(kept) >= len(jax.tree.leaves(params(idle))) - 1
    for (path, one), other in zip(after, jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(other, one, jax.tree_util.keystr(path))


# One of each sort first; the others are run before a release.
FIRST = [*WITH_FUNCTIONS, *(name for name in SORTS if name in SKIPPED and name not in WITH_FUNCTIONS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow([*FIRST, *sorted({*SKIPPED} - {*FIRST})], "adafactor, factored", most=20))
def test_names_of_params_do_not_matter(name):
    check(WITH_FUNCTIONS.get(name, lambda: made(name))())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "kind"), PLACES)
def test_names_of_params_do_not_matter_anywhere(engine, kind):
    check(optax.adamw(0.1), engine=engine, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"local_steps": 2}, {"loss_scale": "dynamic"}, {"virtual_shards": 4}], ids=str
)
def test_names_of_params_do_not_matter_to_options(options):
    check(optax.adamw(0.1), **options)


def test_params_that_are_one_tuple():
    tx = optax.chain(optax.trace(0.9), optax.adam(0.1))  # its state is a tuple of two as well
    loss = lambda p, batch, rng: ((p[1] * batch.mean(0)).sum(), {})  # noqa: E731
    state, step = train.start((jnp.ones(4), jnp.ones((4, 4))), tx, loss, unused="skip", devices=jax.devices()[:2])
    state, _ = step(state, np.ones((8, 4, 4), np.float32))
    trace, (adam, _) = state.store.optimizer_state
    for (idle, read), start in ((state.params, 1), (trace.trace, 0), (adam.nu, 0)):
        assert (idle == start).all()
        assert (read != start).all()


def from_init(init):
    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


@pytest.mark.parametrize(
    ("tx", "reason"),
    [
        (optax.flatten(optax.adam(0.1)), "does not map over the params"),
        (from_init(lambda p: jnp.zeros(sum(x.size for x in jax.tree.leaves(p)))), r"several params .* shape \(52,\)"),
        (from_init(lambda p: [jnp.zeros(x.shape) for x in jax.tree.leaves(p)]), "does not map over the params"),
        (from_init(lambda p: {"w": jnp.zeros_like(p["w"])}), "does not map over the params"),
    ],
    ids=["flatten", "one array", "a list", "by hand"],
)
def test_a_state_that_nobody_can_divide_is_refused(tx, reason):
    with pytest.raises(ValueError, match=f"unused=\"skip\" keeps 'a', 'b/0', 'b/1/w' and .*{reason}.*from_optax"):
        trained(tx, ["a", "b"])


@pytest.mark.parametrize("tx", [optax.adamw(0.1), optax.masked(optax.adam(0.1), {"mu": True, "w": False})])
def test_the_state_of_a_param_is_split_as_the_param(tx):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    given = {"mu": {"w": jnp.ones((2, 8))}, "w": jnp.ones((2, 8))}
    store = kv.from_params(given, optimizer=tx, mesh=mesh, sharding={"mu": {"w": P("data")}, "w": P(None, "data")})
    leaves = jax.tree_util.tree_leaves_with_path(store.optimizer_state)
    specs = {jax.tree_util.keystr(path): leaf.sharding.spec for path, leaf in leaves if leaf.ndim}
    assert len(specs) in (2, 4)
    for path, spec in specs.items():
        assert spec == (P("data") if path.endswith("['mu']['w']") else P(None, "data"))


SENT = {  # of "w", 64 bytes, and the loss, 4 bytes. In kind `sharded` each device gathers both params.
    "device": {"all-reduce": 64 + 4},
    "local": {"all-gather": 2 * 64, "all-reduce": 4},
    "sharded": {"reduce-scatter": 64 // 2, "all-gather": 2 * 64, "all-reduce": 4},
}


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:train step. the loss does not depend on")
@pytest.mark.parametrize("kind", SENT)
def test_zeros_are_not_sent(engine, kind):
    both, batch = {"w": jnp.ones((4, 4)), "idle": jnp.ones((4, 4))}, jnp.ones((8, 4, 4))
    state, step = train.start(both, optax.adamw(0.1), loss_fn, engine=engine, kind=kind, devices=jax.devices()[:2])
    sent = Counter()
    for name, size in collectives_in(step.lower(state, batch).compile().as_text()):
        sent[name] += size
    assert sent == SENT[kind]
    state, _ = step(state, batch)
    np.testing.assert_allclose(state.params["idle"], 1 - 0.1 * 1e-4, rtol=1e-6)  # weights still decay
