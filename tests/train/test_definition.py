"""The definition of a step, in a few plain lines, and every engine, kind and option held against it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import on_host
from world import EVERYWHERE, IN_TURN, mostly_slow, trained, update_of

from jaxpar import data, train

ADAM, SGD = optax.adamw(0.05), optax.sgd(0.05)


# The definition.


def definition(loss_fn, params, batch, *, shares, rng, step, accumulate=1, scale=1.0, dtype=None, model_state=None):
    """(grads, metrics, model_state) of one step. It is written to be read, and runs on one device.

    The batch is cut in equal shares, and each has its own loss, random key and model state. If the loss is a pair
    (sum, weight), the gradients of the sums are added up and divided by the sum of the weights. Else the gradients of
    the losses are averaged over the shares.
    """

    terms, states = [], []
    for i, share in enumerate(cut(batch, shares)):
        key, state, of_share = jax.random.fold_in(jax.random.fold_in(rng, step), i), model_state, []
        for j, part in enumerate(cut(share, accumulate)):
            part_key = key if accumulate == 1 else jax.random.fold_in(key, j)
            grads, (values, state) = on_host(gradient(loss_fn, scale, dtype)(params, part, part_key, state))
            of_share.append((jax.tree.map(lambda g: g / scale, grads), values))
        terms.append(of_share)
        states.append(state)

    values = [values for of_share in terms for _, values in of_share]
    grads = jax.tree.map(lambda *x: sum(x), *(grads for of_share in terms for grads, _ in of_share))
    loss = values[0]["loss"]
    whole = sum(float(v["loss"][1]) for v in values) if isinstance(loss, tuple) else shares * accumulate
    grads = jax.tree.map(lambda g: g / whole, grads)
    metrics = {name: mean([v[name] for v in values]) for name in values[0]}
    return grads, metrics, None if model_state is None else jax.tree.map(lambda *x: sum(x) / shares, *states)


@functools.cache
def gradient(loss_fn, scale, dtype):
    """The gradient of the loss of one part of a batch, or of its sum."""

    def of_part(params, part, rng, state):
        if dtype is not None:
            params, part = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float32 else x, (params, part))
        result = loss_fn(params, part, rng) if state is None else loss_fn(params, part, rng, state)
        loss, aux, state = *result, *([None] if len(result) == 2 else [])
        value = loss[0] if isinstance(loss, tuple) else loss
        return jnp.float32(value) * scale, ({"loss": loss, **aux}, state)

    return jax.jit(jax.grad(of_part, has_aux=True))


def mean(values):
    """Over what counts, if these are pairs (sum, weight)."""
    if isinstance(values[0], tuple):
        return sum(float(s) for s, _ in values) / sum(float(w) for _, w in values)
    return sum(float(v) for v in values) / len(values)


def cut(batch, count):
    parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    return [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(count)]


# Losses.


@jax.custom_vjp
def clipped(x):
    """The same value. The backward pass clips each cotangent, so it is not linear."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_vjp
def reversed_(x):
    """Gradient reversal of each example, normalized to length 1."""
    return x


reversed_.defvjp(lambda x: (x, None), lambda _, g: (-g / (jnp.linalg.norm(g, axis=-1, keepdims=True) + 1e-6),))


def network(params, batch, rule):
    hidden = rule(jnp.tanh(batch["x"] @ params["w"]))
    return (hidden @ params["v"]).astype(jnp.float32)[:, 0] - batch["y"].astype(jnp.float32)


def by_rule(rule):
    def loss(params, batch, rng):
        error = network(params, batch, rule)
        return (error**2).mean(), {"error": jnp.abs(error).mean()}

    return loss


def counted(params, batch, rng):
    """A mean over what counts. Shares count differently, and one of them nothing."""
    error = network(params, batch, clipped)
    weight = batch["counts"]
    aux = {"error": ((jnp.abs(error) * weight).sum(), weight.sum()), "largest": jnp.abs(error).max()}
    return ((error**2 * weight).sum(), weight.sum()), aux


def dropped(params, batch, rng):
    x = batch["x"] * jax.random.bernoulli(rng, 0.8, batch["x"].shape)
    error = network(params, {**batch, "x": x}, lambda x: x)
    return (error**2).mean(), {}


def with_state(params, batch, rng, seen):
    """Running statistics, and what no step changes."""
    loss, aux = by_rule(lambda x: x)(params, batch, rng)
    return loss, aux, {"mean": 0.9 * seen["mean"] + 0.1 * batch["x"].mean(0), "fixed": seen["fixed"]}


LOSSES = {"clipped": by_rule(clipped), "reversed": by_rule(reversed_), "counted": counted, "dropped": dropped}


def init():
    draw = np.random.default_rng(1)
    return {name: jnp.asarray(draw.normal(size=size), jnp.float32) for name, size in {"w": (6, 5), "v": (5, 1)}.items()}


@functools.cache
def batches(count=3, size=24):
    draw = np.random.default_rng(3)
    found = []
    for _ in range(count):
        counts = draw.integers(0, 4, size)
        counts[:6] = 0  # the first of four shares
        x, y = draw.normal(size=(size, 6)), draw.normal(size=size)
        found.append({"x": np.float32(x), "y": np.float32(y), "counts": np.int32(counts)})
    return found


def expected(loss_fn, tx, *, shares=4, rng=None, model_state=None, **options):
    """Params, metrics of the last step and model state after the batches, by the definition."""
    params, rng = init(), jax.random.key(7) if rng is None else rng
    state = tx.init(params)
    for i, batch in enumerate(batches()):
        grads, metrics, model_state = definition(
            loss_fn, params, batch, shares=shares, rng=rng, step=i, model_state=model_state, **options
        )
        params, state = update_of(tx)(grads, state, params)
    return params, metrics, model_state


expected_of = functools.cache(expected)  # once for all tests of a process that ask for it


def found(loss_fn, tx, *, devices=4, rng=7, model_state=None, **options):
    options |= {"devices": jax.devices()[:devices], "model_state": model_state}
    state, step = train.start(init(), tx, loss_fn, rng=rng, **options)
    state, metrics = trained(step, state, batches())
    return state.params, metrics, None if model_state is None else state.model_state


def agree(got, wanted, rtol=3e-5):
    for part, other in zip(got, wanted, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), part, other)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("engine", "kind"), EVERYWHERE)
@pytest.mark.parametrize("name", mostly_slow(LOSSES, "clipped", "counted", "dropped"))
def test_every_engine_and_kind_computes_the_definition(name, engine, kind):
    """Also where a rule of the backward pass is not linear: each share has the cotangents of its own loss."""
    agree(found(LOSSES[name], ADAM, engine=engine, kind=kind), expected_of(LOSSES[name], ADAM))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4, 6])
@pytest.mark.parametrize("name", LOSSES)
def test_virtual_shards_compute_the_definition(name, shards):
    """The shares are the virtual shards, whatever the number of devices."""
    agree(found(LOSSES[name], ADAM, virtual_shards=shards), expected_of(LOSSES[name], ADAM, shares=shards))


OPTIONS = {
    "accumulate": ({"accumulate": 3}, {"accumulate": 3}, 3e-5),
    "loss_scale": ({"loss_scale": 64.0}, {"scale": 64.0}, 3e-5),
    "bfloat16": ({"compute_dtype": jnp.bfloat16}, {"dtype": jnp.bfloat16}, 5e-2),
    "float16": ({"compute_dtype": "float16"}, {"dtype": jnp.float16}, 5e-3),
    "remat": ({"remat": True}, {}, 3e-5),
    "all": ({"accumulate": 2, "loss_scale": 8.0, "remat": True}, {"accumulate": 2, "scale": 8.0}, 3e-5),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", [*IN_TURN, ("jit", "device"), ("pmap", "virtual")], ids=lambda w: "-".join(w))
@pytest.mark.parametrize("name", mostly_slow(["clipped", "counted", "dropped"], "counted"))
@pytest.mark.parametrize("option", mostly_slow(OPTIONS, "all"))
def test_every_option_computes_the_definition(option, name, where):
    given, defined, rtol = OPTIONS[option]
    engine, kind = where
    more = {"virtual_shards": 4, "devices": 2} if kind == "virtual" else {}  # of which each compiles its own program
    tx = SGD  # Adam turns the rounding of bfloat16 into whole steps
    got = found(LOSSES[name], tx, engine=engine, kind="device" if more else kind, **given, **more)
    if option in ("loss_scale", "all") and name == "clipped":  # the scaled cotangents are clipped, in both
        rtol *= 2
    agree(got, expected_of(LOSSES[name], tx, **defined), rtol)


def plain(params, batch, rng):
    return by_rule(lambda x: x)(params, batch, rng)


def weighed(params, batch, rng):
    error = network(params, batch, lambda x: x)
    return ((error**2 * batch["counts"]).sum(), batch["counts"].sum()), {}


def cast_by_itself(params, batch, rng):
    """A loss that computes in float16 without `compute_dtype`."""
    return plain(*jax.tree.map(lambda x: x.astype(jnp.float16), (params, {k: batch[k] for k in "xy"})), rng)


# From the smallest scale, at which most gradients are subnormal or 0, over those at which the sum of the shares is too
# large for float16 and no share is, to those at which each share is.
SCALES = [2.0**n for n in (-12, 0, 10, 11, 12, 13, 14, 15)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [plain, weighed, cast_by_itself], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("engine", mostly_slow(["shard_map", "pmap", "jit", "virtual"], "shard_map", "jit"))
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_all_engines_skip_the_same_steps_at_any_scale(dtype, engine, parts, loss):
    own = loss is cast_by_itself
    if own and (parts == 3 or dtype == jnp.bfloat16):
        pytest.skip("one case of a loss that casts is enough")
    scaling = train.DynamicLossScale(initial=1.0, least=2.0**-24)
    options = {"compute_dtype": None if own else dtype, "accumulate": parts, "loss_scale": scaling}
    options |= {"virtual_shards": 4} if engine == "virtual" else {"engine": engine}
    first, step = train.start(init(), SGD, loss, rng=7, devices=jax.devices()[:4], **options)
    first, skipped = step.complete(first), []
    for scale in SCALES:
        defined = {"shares": 4, "rng": jax.random.key(7), "step": 0, "accumulate": parts, "scale": scale}
        with np.errstate(invalid="ignore"):  # inf - inf
            grads, _, _ = definition(loss, init(), batches()[0], dtype=options["compute_dtype"], **defined)
        scaled = {**first.loss_scale, "scale": jnp.full_like(first.loss_scale["scale"], scale)}
        state = jax.tree.map(jnp.copy, dataclasses.replace(first, loss_scale=scaled))
        state, metrics = step(state, batches()[0])
        is_finite = all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
        assert float(metrics["skipped"]) == (not is_finite), scale
        skipped.append(not is_finite)
        wanted = jax.tree.map(lambda g, p: p - 0.05 * g, grads, on_host(init())) if is_finite else on_host(init())
        agree((state.params,), (wanted,), 2e-3 if dtype == jnp.bfloat16 else 2e-4)  # of params of 1, gradients of 3
    if dtype == jnp.float16:
        assert (skipped[0], skipped[-1]) == (False, True), "the scales do not reach what float16 has"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", [*IN_TURN, ("jit", "device")], ids=lambda w: "-".join(w))
@pytest.mark.parametrize("devices", mostly_slow([1, 2, 3, 6, 8], 3))
def test_a_mean_over_what_counts_is_the_same_on_any_number_of_devices(where, devices):
    """Without a rule that clips, the definition is the same for any number of shares: the mean over all examples."""

    def plain(params, batch, rng):
        error = network(params, batch, lambda x: x)
        return ((error**2 * batch["counts"]).sum(), batch["counts"].sum()), {}

    engine, kind = where
    agree(found(plain, ADAM, engine=engine, kind=kind, devices=devices), expected(plain, ADAM, shares=1))


def test_a_mean_over_what_counts_under_local_steps():
    """A round of one step of SGD, averaged, is the step of all devices."""
    agree(found(counted, SGD, local_steps=1), expected_of(counted, SGD))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_mean_over_what_counts_in_other_kinds(kind):
    state, step = train.start(init(), SGD, counted, rng=7, kind=kind, devices=jax.devices()[:4])
    state, metrics = step(state, batches()[0])
    state = step.finish(state)
    grads, wanted, _ = definition(counted, init(), batches()[0], shares=4, rng=jax.random.key(7), step=0)
    agree((state.params, metrics), (jax.tree.map(lambda p, g: p - 0.05 * g, on_host(init()), grads), wanted))


MAPPED = [{"engine": "pmap"}, {"engine": "shard_map"}, {"virtual_shards": 4}]


@pytest.mark.slow
@pytest.mark.parametrize("options", [*MAPPED, {"engine": "jit"}], ids=str)
@pytest.mark.parametrize("partitionable", [False, True])
def test_random_numbers_of_a_share(options, partitionable):
    """The same by every engine with threefry, whose numbers do not depend on how they are computed."""
    with jax.threefry_partitionable(partitionable):
        agree(found(dropped, ADAM, **options), expected(dropped, ADAM))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("options", MAPPED, ids=str)
def test_random_numbers_of_a_hardware_generator(options, impl):
    """The docs say that engine jit draws others: JAX's generator does, where keys are mapped."""
    key = jax.random.key(7, impl=impl)
    agree(found(dropped, ADAM, rng=jax.random.clone(key), **options), expected(dropped, ADAM, rng=key))


BEFORE = {"mean": jnp.zeros(6), "fixed": jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("where", mostly_slow(["pmap", "shard_map", "jit", "virtual", "accumulate", "remat"], "jit"))
@pytest.mark.parametrize("devices", mostly_slow([1, 3, 4, 6, 8], 3, 8))
def test_what_the_loss_leaves_alone_in_a_model_state_keeps_its_bits(where, devices):
    """A sum of equal float32 is rounded, and XLA divides by multiplying. The mean is exact all the same."""
    options = {
        "virtual": {"virtual_shards": devices},
        "accumulate": {"accumulate": 1 if devices == 8 else 2},
        "remat": {"remat": True, "engine": "jit"},
    }.get(where, {"engine": where})
    got = found(with_state, ADAM, devices=devices, model_state=BEFORE, **options)
    np.testing.assert_array_equal(got[2]["fixed"], BEFORE["fixed"])
    shares = {k: v for k, v in options.items() if k == "accumulate"}
    agree(got, expected(with_state, ADAM, shares=devices, model_state=BEFORE, **shares))


@pytest.mark.parametrize("devices", [5, 7])
@pytest.mark.parametrize("engine", mostly_slow(["pmap", "shard_map", "jit"], "shard_map"))
def test_unchanged_values_of_any_size_on_odd_numbers_of_devices(engine, devices):
    finite = np.float32([0.1, 1e-30, 3.0000002, 0.0, 16777217.0, 1 / 3, -4e37])
    others = np.float32([np.inf, -np.inf, np.nan])

    def loss(params, batch, rng, state):
        return (params["w"] * batch).mean(), {}, state

    held = {"a": jnp.asarray(finite), "b": jnp.asarray(others)}
    options = {"devices": jax.devices()[:devices], "model_state": held, "engine": engine}
    state, step = train.start({"w": jnp.ones(())}, optax.sgd(0.1), loss, **options)
    state, _ = step(state, np.ones(devices, np.float32))
    np.testing.assert_array_equal(state.model_state["a"], finite)
    np.testing.assert_array_equal(state.model_state["b"], others)


# The number of the step.


def annealed(params, batch, rng, *, step):
    error = network(params, batch, lambda x: x)
    return (error**2).mean() * jnp.minimum(step, 2), {"step": step}


def annealed_with_state(params, batch, rng, state, step):
    return *annealed(params, batch, rng, step=step), {"steps": state["steps"] + step}


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"engine": "pmap"},
    {"engine": "shard_map", "accumulate": 2},
    {"engine": "jit", "remat": True},
    {"virtual_shards": 4},
    {"local_steps": 2},
], ids=str)  # fmt: skip
def test_a_loss_with_a_parameter_step_gets_the_number_of_the_step(options):
    _, metrics, _ = found(annealed, ADAM, **options)
    assert float(metrics["step"]) == 2
    start = {"steps": jnp.zeros((), jnp.int32)}
    _, metrics, state = found(annealed_with_state, ADAM, model_state=start, **options)
    assert float(metrics["step"]) == 2
    assert int(state["steps"]) == (0 + 1 + 2) * options.get("accumulate", 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("loss", "number"),
    [(jax.jit(annealed), 2), (jax.checkpoint(annealed), 2), (functools.partial(annealed, step=1), 1)],
    ids=["jit", "checkpoint", "a partial, whose step stays"],
)
def test_a_wrapped_loss_gets_the_number_of_the_step(loss, number):
    assert float(found(loss, ADAM)[1]["step"]) == number


# What a loss may return.


def one_step(loss_fn, params=None, **options):
    devices = jax.devices()[: 2 if "virtual_shards" in options else 8]
    params = init() if params is None else params
    state, step = train.start(params, optax.sgd(0.1), loss_fn, devices=devices, **options)
    return step(state, batches()[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["pmap", "shard_map", "jit"])
def test_pairs_may_have_rows_and_stand_anywhere_in_aux(engine):
    def loss(params, batch, rng):
        error, counts = network(params, batch, lambda x: x), batch["counts"]
        aux = {"nested": {"list": [error.mean(), (error * counts, counts)]}, "whole": counts.sum(), "flag": True}
        return train.Mean(error**2 * counts, counts), aux

    _, metrics = one_step(loss, engine=engine)
    error, counts = np.asarray(network(init(), batches()[0], lambda x: x)), batches()[0]["counts"]
    np.testing.assert_allclose(metrics["loss"], (error**2 * counts).sum() / counts.sum(), rtol=1e-5)
    mean, weighted = metrics["nested"]["list"]
    np.testing.assert_allclose(mean, error.mean(), rtol=1e-5)
    np.testing.assert_allclose(weighted, (error * counts).sum() / counts.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["whole"], counts.sum() / 8, rtol=1e-6)
    assert float(metrics["flag"]) == 1


@pytest.mark.slow
def test_metrics_with_a_mask_are_pairs():
    """What `jp.train` computes under a mask can be the loss, and a value of aux."""

    def loss(params, batch, rng):
        logits, labels = batch["x"] @ params["w"], batch["counts"]
        mask = labels > 0
        return train.cross_entropy(logits, labels, mask), {"accuracy": train.accuracy(logits, labels, mask)}

    _, metrics = one_step(loss, unused="skip")
    logits, labels = jnp.asarray(batches()[0]["x"]) @ init()["w"], batches()[0]["counts"]
    mask = labels > 0
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(metrics["loss"], losses[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], (logits.argmax(1) == labels)[mask].mean(), rtol=1e-6)


def weighs(weight):
    def loss(params, batch, rng):
        error = network(params, batch, lambda x: x)
        return ((error**2).sum(), weight(params, batch)), {}

    return loss


WAYS = [{}, {"engine": "jit"}, {"accumulate": 3}, {"remat": True}, {"virtual_shards": 4}]


@pytest.mark.slow
@pytest.mark.parametrize("options", mostly_slow(WAYS, *WAYS[:2]), ids=str)
def test_a_weight_that_depends_on_the_params_is_an_error(options):
    with pytest.raises(ValueError, match=r"weight of the loss .* depends on the params"):
        one_step(weighs(lambda params, batch: jnp.abs(batch["x"] @ params["w"]).sum()), **options)
    # what has no gradient is a constant
    one_step(weighs(lambda params, batch: (batch["x"] @ params["w"] > 0).sum()), **options)
    one_step(weighs(lambda params, batch: jax.lax.stop_gradient(batch["x"] @ params["w"]).sum()), **options)
    one_step(weighs(lambda params, batch: 24), **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", mostly_slow(WAYS, {}, {"virtual_shards": 4}), ids=str)
def test_a_batch_in_which_nothing_counts_is_not_finite(options):
    """0/0, as everywhere. A step that looks leaves the params alone."""
    state, metrics = one_step(weighs(lambda params, batch: batch["counts"].sum() * 0), nonfinite="skip", **options)
    assert float(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, init())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ((jnp.ones(3), jnp.ones((3, 5))), r"the loss: the sum has shape \(3,\) and the weight \(3, 5\)"),
        ((jnp.ones(3), jnp.ones(2)), r"the loss: the sum has shape \(3,\) and the weight \(2,\)"),
        ((jnp.ones((), jnp.int32), 1), "of a floating dtype; got int32"),
        ((jnp.ones(()), {"w": 1}), "leave out jax.grad"),
        ((jnp.ones(()), "1"), "must be a scalar, the mean over the examples, or a pair"),
        (train.Mean(jnp.ones(()), 1.0, np.exp), "finish= or columns= is for eval_fn"),
        ([jnp.ones(()), 1.0], "must be a scalar, the mean over the examples, or a pair"),
    ],
)
def test_what_is_no_pair_is_refused(loss, message):
    with pytest.raises((TypeError, ValueError), match=message):
        one_step(lambda params, batch, rng: (loss, {}))
    if isinstance(loss, tuple) and isinstance(loss[1], jax.Array):
        name = "train step: 'part' in aux of loss_fn"
        with pytest.raises((TypeError, ValueError), match=name):
            one_step(lambda params, batch, rng: (jnp.float32(0) * params["w"].sum(), {"part": loss}))


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_an_axis_that_the_step_does_not_have(engine):
    with pytest.raises(NameError, match=r"loss_fn: .*axis name: batch; this step has 'data', which axis_name= changes"):
        one_step(lambda params, batch, rng: (jax.lax.pmean(params["w"].sum(), "batch"), {}), engine=engine)


@pytest.mark.slow
def test_fit_records_a_mean_over_what_counts():
    source = data.from_arrays({k: np.concatenate([b[k] for b in batches()]) for k in batches()[0]})
    records, loss = [], weighs(lambda params, batch: len(batch["x"]))
    for devices in (1, 4):
        state, step = train.start(init(), SGD, loss, devices=jax.devices()[:devices])
        records.append(train.fit(state, step, source, epochs=2, batch_size=24, progress=False)[1])
    assert [r["loss"] for r in records[0]] == pytest.approx([r["loss"] for r in records[1]], rel=1e-5)


@pytest.mark.slow
def test_many_steps_with_pairs_and_step():
    loss = lambda p, b, rng, step: (counted(p, b, rng)[0], {"step": step})  # noqa: E731
    state, step = train.start(init(), ADAM, loss, rng=7, devices=jax.devices()[:4])
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches())
    state, metrics = step.many(state, stacked)
    wanted = expected(lambda p, b, r: (counted(p, b, r)[0], {}), ADAM)
    agree((state.params,), wanted[:1])
    assert metrics["step"].tolist() == [0, 1, 2]


# Strict promotion of dtypes.


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [
    {"engine": "pmap"}, {"engine": "jit"}, {"virtual_shards": 4}, {"accumulate": 3}, {"compute_dtype": jnp.bfloat16},
    {"loss_scale": "dynamic"}, {"nonfinite": "stop"}, {"local_steps": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], "bfloat16"))
def test_strict_promotion_of_dtypes(options, dtype):
    def loss(params, batch, rng):
        error = batch["x"].astype(params["w"].dtype) @ params["w"]
        return (error**2).mean(), {"count": jnp.int32(3), "flag": jnp.bool_(True), "half": error.mean()}

    with jax.numpy_dtype_promotion("strict"):
        params = jax.tree.map(lambda x: x.astype(dtype), init())
        state, metrics = one_step(loss, params, unused="skip", **options)
        assert [metrics[k].dtype for k in ("loss", "count", "flag", "half")] == [np.float32] * 4
        assert state.params["w"].dtype == dtype


def test_the_weights_are_one_small_sum_more():
    """Two numbers: nothing else is sent for a mean over what counts."""
    sent = []
    for loss in (by_rule(clipped), counted):
        state, step = train.start(init(), ADAM, loss, devices=jax.devices()[:4])
        sent.append(step.lower(state, batches()[0]).as_text().count("all_reduce"))
    assert sent[1] == sent[0] + 1


def test_the_attributes_of_the_definition_are_those_of_the_step():
    """A new option of the step belongs into `definition`, or into this list of what changes no number."""
    fields = {f.name for f in dataclasses.fields(type(train.make_train_step(counted).device_step))}
    assert fields == {
        *("loss_fn", "axis_name", "accumulate", "compute_dtype", "remat", "platform"),
        *("grad_transform", "scaling", "guard", "unused", "axes"),
        *("row_sparse", "record"),
    }
