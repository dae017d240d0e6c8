"""Every transform of optax and optax.contrib with the plain interface trains as plain optax does on one device."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from world import close, mostly_slow, update_of

from jaxpar import kv, parallel, train, updaters

PARAMS = {
    "dense": {"bias": np.arange(1.0, 5.0), "kernel": np.arange(12.0).reshape(3, 4) - 5.5},
    "scale": np.array(2.0),
    "table": np.arange(16.0).reshape(4, 4) - 7.5,
}
PARAMS = jax.tree.map(lambda x: np.asarray(x, np.float32), PARAMS)
LABELS = {"dense": {"bias": "b", "kernel": "a"}, "scale": "b", "table": "a"}
MATRICES = {"dense": {"bias": False, "kernel": True}, "scale": False, "table": True}


def by_axes(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def plateau():
    return contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)


# Transforms that need other arguments than a rate, and combinations that people write.
GIVEN = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "adamw, mask by axes": lambda: optax.adamw(0.1, weight_decay=0.1, mask=by_axes),
    "adamw, mask by name": lambda: optax.adamw(0.1, weight_decay=0.1, mask=MATRICES),
    "adafactor, factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, 0),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 2),
    "chain, clip by the global norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "chain": lambda: optax.chain(optax.clip(2.0), optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.sgd(0.1), lambda step: step > 1),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.sgd(0.1), lambda step: step > 1),
    "cocob": contrib.cocob,
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "freeze": lambda: optax.chain(optax.sgd(0.1), optax.freeze(MATRICES)),
    "galore": lambda: contrib.galore(0.1, rank=2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(0.1, 5)),
    "keep_params_nonnegative": lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "masked": lambda: optax.masked(optax.sgd(0.1), MATRICES),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "MultiSteps, plateau": lambda: optax.MultiSteps(optax.chain(optax.sgd(0.1), plateau()), 2),
    "multi_transform": lambda: optax.multi_transform({"a": optax.adam(0.1), "b": optax.set_to_zero()}, LABELS),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(2.0)), ("adam", optax.adam(0.1))),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "normalize": lambda: optax.chain(contrib.normalize(), optax.sgd(0.1)),
    "partition": lambda: optax.partition({"a": optax.lamb(0.1), "b": optax.sgd(0.1)}, LABELS),
    "polyak_sgd": lambda: optax.polyak_sgd(0.1),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(0.1), plateau()),
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05))),
    "scale_by_galore": lambda: contrib.scale_by_galore(rank=2),
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 5)),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(optax.linear_schedule(1.0, 0.1, 5)),
    "schedule_free": lambda: contrib.schedule_free(optax.adam(0.1, b1=0.0), 0.1),
    "selective_transform": lambda: optax.selective_transform(optax.adam(0.1), freeze_mask=MATRICES),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(0.1)),
    "stateless": lambda: optax.stateless(lambda grads, params: jax.tree.map(lambda g, p: -0.1 * g * p, grads, params)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -0.1 * g * p),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.sgd(0.1)),
}
# Those that are left out, and why.
REASONS = {
    "is a part of monitor and returns no updates": "measure_with_ema",
    "takes matrices only, which muon chooses": "scale_by_muon",
    "deprecated": "inject_stateful_hyperparams optimistic_adam",
    "promotes ranks, which these tests forbid": "scale_by_distance_over_gradients",
    "takes pairs of params, tested below": "lookahead",
    "needs the loss as a function": "lbfgs scale_by_backtracking_linesearch scale_by_zoom_linesearch sophia",
    "is a part of lbfgs": "scale_by_lbfgs",
    "needs the gradient of each example": "dpsgd differentially_private_aggregate",
}
LEFT_OUT = {name for names in REASONS.values() for name in names.split()}


def returns_transform(fn):
    try:
        return "GradientTransformation" in str(inspect.signature(fn).return_annotation)
    except (TypeError, ValueError):
        return False


PUBLIC = {
    name: fn
    for room in (optax, contrib)
    for name, fn in sorted(vars(room).items())
    if not name.startswith("_") and inspect.isfunction(fn) and returns_transform(fn) and name not in LEFT_OUT
}


def made(name):
    if name in GIVEN:
        return GIVEN[name]()
    try:
        return PUBLIC[name](0.1)
    except TypeError:
        return PUBLIC[name]()


if not hasattr(contrib, "galore"):  # optax 0.2.5
    del GIVEN["galore"], GIVEN["scale_by_galore"]
NAMES = sorted({*PUBLIC, *GIVEN})


def params_for(name):
    return {k: v for k, v in PARAMS.items() if k != "scale" or name not in ("sm3", "scale_by_sm3")}


def loss_fn(params, batch, rng=None):
    """The gradient is the mean over the batch, the same to the bit in whatever order it is summed."""
    terms = jax.tree.map(lambda p, x: (p * x.mean(0)).sum(), params, batch)
    return sum(jax.tree.leaves(terms)), {}


def batches(params):
    rng = np.random.default_rng(0)
    return [jax.tree.map(lambda p: rng.integers(-4, 5, (8, *p.shape)).astype(np.float32), params) for _ in range(4)]


def plain(tx, start):
    """The params after a few steps of plain optax."""
    update = tx.update if isinstance(tx, optax.MultiSteps) else optax.with_extra_args_support(tx).update

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch)[0])(params)
        extra = {"value": loss} if "grad_fn" not in inspect.signature(update).parameters else {}
        updates, state = update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, start)
    state = tx.init(params)
    for batch in batches(start):
        params, state = step(params, state, batch)
    return params, state


def trained(tx, start, kind, engine, count):
    store = kv.from_params(start, kind=kind, optimizer=tx, devices=jax.devices()[:count])
    if store.shardings:  # the optimizer needs whole values
        assert kind == "sharded"
        engine = "auto"
    step = train.make_train_step(loss_fn, engine=engine)
    state = train.create_state(store, 0)
    for batch in batches(start):
        state, _ = step(state, batch)
    return state


def check(name, kind, engine, count):
    tx, start = made(name), params_for(name)
    state = trained(tx, start, kind, engine, count)
    params, expected = plain(tx, start)
    close(state.params, params, rtol=2e-5, atol=2e-5)
    if kind == "device":
        assert jax.tree.structure(state.store.optimizer_state) == jax.tree.structure(expected)


# One of each sort: elementwise, masked, coupled, by shape, factored, delayed, with the loss, averaged.
SORTS = ["adam", "adamw, mask by name", "chain, clip by the global norm", "lamb", "adafactor, factored"]
SORTS += ["MultiSteps, plateau", "polyak_sgd", "partition", "schedule_free_sgd"]


def test_the_names_are_all_there():
    assert len(NAMES) >= 100
    assert not LEFT_OUT - set(vars(optax)) - set(vars(contrib))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", mostly_slow([*SORTS, *sorted({*NAMES} - {*SORTS})], *SORTS))
def test_as_plain_optax(name):
    check(name, "device", "pmap", 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow([*SORTS, *sorted({*NAMES} - {*SORTS})], most=20))
def test_as_plain_optax_sharded(name):
    """Those beyond the sorts, whose updates are the same and lie elsewhere, are run before a release."""
    check(name, "sharded", "shard_map", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine", "count"),
    [("local", "pmap", 8), ("sharded", "pmap", 8), ("dist_sync", "shard_map", 1), ("device", "shard_map", 8)],
)
@pytest.mark.parametrize("name", ["adam", "chain, clip by the global norm", "reduce_on_plateau"])
def test_as_plain_optax_everywhere(name, kind, engine, count):
    check(name, kind, engine, count)


@pytest.mark.slow
def test_lookahead_trains_fast_params_and_evaluates_slow_ones(engine):
    tx = optax.lookahead(optax.adam(0.1), 3, 0.5)
    state = trained(tx, PARAMS, "device", engine, 2)
    params = optax.LookaheadParams.init_synced(jax.tree.map(jnp.asarray, PARAMS))
    held = tx.init(params)
    for batch in batches(PARAMS):
        params, held = update_of(tx)(jax.tree.map(lambda x: x.mean(0), batch), held, params)
    close(state.params, params.fast)
    close(state.eval_params, params.slow)
    assert not np.allclose(params.fast["table"], params.slow["table"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_schedule_free_evaluates_its_average(kind):
    tx = optax.chain(optax.clip(3.0), contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9))
    state = trained(tx, PARAMS, kind, "pmap", 4)
    params, held = plain(tx, PARAMS)
    close(state.eval_params, contrib.schedule_free_eval_params(held[1], params))
    evaluated = train.predict(state, lambda p, x: x + p["scale"], np.zeros(4, np.float32), batch_size=4)
    close(evaluated, np.full(4, state.eval_params["scale"]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_average_params(kind):
    tx = optax.chain(optax.sgd(0.1), updaters.average_params(0.5))
    state = trained(tx, PARAMS, kind, "shard_map", 2)
    params = average = PARAMS
    for batch in batches(PARAMS):
        params = jax.tree.map(lambda p, x: p - 0.1 * x.mean(0), params, batch)
        average = jax.tree.map(lambda a, p: 0.5 * a + 0.5 * p, average, params)
    close(state.params, params)
    close(state.eval_params, average)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "sharded", "mesh"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_slow_average_does_not_stand_still(dtype, kind):
    """The average of 100 steps that each move it by less than a rounding of 16 bits, against one in float64."""

    def moved_by_one(params, batch, rng):
        return -(params["w"].sum() + params["plain"].sum()).astype(np.float32) * batch.mean() / 16, {}

    tx = optax.masked(updaters.average_params(0.999), {"w": True, "plain": False, "frozen": True})
    tx = optax.chain(optax.sgd(1.0), tx)
    where = {"sharding": parallel.fsdp("data", min_size=1)} if kind == "mesh" else {"kind": kind}
    params = {"w": jnp.zeros(4, dtype), "plain": jnp.zeros(4, dtype), "frozen": jnp.ones(4, dtype)}
    state, step = train.start(params, tx, moved_by_one, frozen="frozen", devices=jax.devices()[:2], **where)
    average, params = 0.0, np.zeros(4)
    for _ in range(100):
        state, _ = step(state, np.ones(2, np.float32))
        params = params + 1 / 16
        average = 0.999 * average + 0.001 * params
    found = state.eval_params
    assert {str(x.dtype) for x in found.values()} == {dtype}
    np.testing.assert_array_equal(np.float64(state.params["w"]), params)
    np.testing.assert_allclose(np.float64(found["w"]), average, rtol=0.01)
    np.testing.assert_array_equal(np.float64(found["plain"]), params)


@pytest.mark.slow
def test_a_part_that_is_not_averaged_stays_as_it_is():
    tx = optax.masked(contrib.schedule_free(optax.sgd(0.1), 0.1), MATRICES)
    state = trained(tx, PARAMS, "device", "pmap", 2)
    np.testing.assert_array_equal(state.eval_params["scale"], state.params["scale"])
    assert not np.allclose(state.eval_params["table"], state.params["table"])


def recorder():
    """A transform whose state is the last loss that it was given."""

    def update(updates, state, params=None, *, value, **extra):
        return updates, value

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)


VALUES = [{}, {"accumulate": 2}, {"loss_scale": 1024.0}, {"loss_scale": "dynamic"}, {"nonfinite": "skip"}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", VALUES, ids=str)
def test_value_is_the_global_mean_loss(engine, options):
    tx = optax.chain(optax.sgd(0.1), recorder())
    state, step = train.start(PARAMS, tx, loss_fn, engine=engine, devices=jax.devices()[:4], **options)
    batch = batches(PARAMS)[0]
    state, metrics = step(state, batch)
    expected = loss_fn(PARAMS, batch)[0]
    np.testing.assert_allclose(state.store.optimizer_state[1], expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


@pytest.mark.slow
def test_a_skipped_update_changes_no_state():
    tx = optax.chain(optax.adam(0.1), recorder())
    state, step = train.start(PARAMS, tx, loss_fn, nonfinite="skip", devices=jax.devices()[:2])
    first, second, *_ = batches(PARAMS)
    state, _ = step(state, first)
    before = jax.tree.map(np.asarray, state.store.optimizer_state)
    state, metrics = step(state, {**second, "scale": np.full(8, np.inf, np.float32)})
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.store.optimizer_state, before)


def test_what_an_optimizer_needs_is_named():
    params = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match="keyword-only argument: 'value'"):
        kv.push(kv.from_params(params, optimizer=contrib.reduce_on_plateau()), 0, jnp.ones(2))
    with pytest.raises(ValueError, match="reads the loss"):
        kv.from_params(params, optimizer=contrib.reduce_on_plateau(), kind="dist_async")
    kv.from_params(params, optimizer=optax.chain(optax.sgd(0.1)), kind="dist_async")
