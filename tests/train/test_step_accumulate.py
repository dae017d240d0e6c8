"""Microbatches, precision, rematerialisation: the numbers of the plain step, and no more sent between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import collectives_in
from world import IN_TURN, adam, by_hand, close, line, squares, start, steady, step_of, trained

from jaxpar import train


def text_of(step, state, batch):
    return step.lower(state, batch).compile().as_text()


def wide_start(kind, count=4):
    return start(count, kind, adam(), {"w": jnp.ones((40, 30)), "b": jnp.zeros(30)})


def wide_squares(params, batch, rng):
    return ((jnp.tanh(batch["x"] @ params["w"]) + params["b"][None]) ** 2).mean(), {"seen": batch["x"].mean()}


WIDE = {"x": np.random.default_rng(0).standard_normal((32, 40)).astype(np.float32)}


# ---- accumulation


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "kind", "parts"), [(*IN_TURN[0], 2), (*IN_TURN[1], 4), (*IN_TURN[2], 8)])
def test_microbatches_are_the_plain_step(engine, kind, parts):
    batches = [line(32, seed=i) for i in range(3)]
    state, metrics = trained(step_of(squares, engine=engine, accumulate=parts), start(4, kind, adam()), batches)
    close(state.params, by_hand(adam(), 3, batches=batches))
    loss, aux = squares(by_hand(adam(), 2, batches=batches), batches[2], None)
    close(metrics, {"loss": loss, "error": aux["error"]}, rtol=1e-4)
    assert int(state.step) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kind"), IN_TURN)
def test_microbatches_send_nothing_more_and_compile_once(engine, kind):
    plain = step_of(wide_squares, engine=engine)
    many = step_of(wide_squares, engine=engine, accumulate=8)
    state, batch = wide_start(kind), WIDE
    sent = [sorted(collectives_in(text_of(step, state, batch))) for step in (plain, many)]
    assert sent[0] == sent[1], "the same collectives of the same bytes"
    steady(many, state, [batch] * 2)


def test_each_microbatch_has_its_rng_and_counts_in_the_metrics():
    def loss(params, batch, rng):
        noise = jax.random.uniform(rng)
        return params["w"] * 0.0, {"noise": noise, "square": noise**2, "big": (batch > 3).sum(), "all": 1, "x": batch}

    state = start(2, params={"w": jnp.zeros(())})
    _, metrics = train.make_train_step(loss, accumulate=4)(state, jnp.arange(8.0))
    assert metrics["square"] - metrics["noise"] ** 2 > 1e-3, "all microbatches drew the same number"
    assert float(metrics["big"]) == 0.5
    assert float(metrics["all"]) == 1.0
    assert metrics["x"].tolist() == [3.5]
    assert {str(x.dtype) for x in metrics.values()} == {"float32"}


def test_the_sum_over_microbatches_of_narrow_parameters_is_wide():
    """256 + 1 is 256 in bfloat16, so eight gradients of 1 beside one of 256 would be lost."""
    batch = jnp.array([256.0] + [1.0] * 15).reshape(16, 1)
    state = start(1, tx=optax.sgd(1.0), params={"w": jnp.zeros(1, jnp.bfloat16)})
    state, _ = train.make_train_step(lambda p, b, rng: ((p["w"] * b[0]).sum(), {}), accumulate=16)(state, batch)
    assert float(state.params["w"][0]) == -float(jnp.bfloat16(271 / 16))


# ---- precision


def test_compute_in_bfloat16_store_in_float32():
    seen = []

    def loss(params, batch, rng):
        seen.append([str(x.dtype) for x in (params["w"], params["b"], batch["x"], batch["n"])])
        out = batch["x"] @ params["w"] + params["b"]
        seen.append(str(out.dtype))
        return (out**2).mean() * batch["n"].mean(), {"mean": out.mean()}

    batch = {"x": line(16)["x"], "n": np.ones(16, np.int32)}
    state = start(4, tx=adam())
    state, metrics = train.make_train_step(loss, compute_dtype=jnp.bfloat16)(state, batch)
    assert seen == [["bfloat16", "bfloat16", "bfloat16", "int32"], "bfloat16"]
    assert {str(x.dtype) for x in jax.tree.leaves((state.store.values, metrics))} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(state.store.optimizer_state)} == {"float32", "int32"}


@pytest.mark.slow
def test_sums_are_float32_in_any_precision():
    text = text_of(step_of(wide_squares, compute_dtype=jnp.bfloat16), wide_start("device"), WIDE)
    plain = text_of(step_of(wide_squares), wide_start("device"), WIDE)
    assert "bf16[" in text
    assert collectives_in(text) == collectives_in(plain)


# ---- rematerialisation


def deep(params, batch, rng):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).mean(), {"mean": x.mean()}


def deep_start():
    return start(2, params=[jnp.eye(40) * 1.1 for _ in range(4)])


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "remat"), [("pmap", True), ("shard_map", jax.checkpoint_policies.dots_saveable)])
def test_what_is_computed_again_changes_nothing(engine, remat):
    found, sines = [], []
    for option in (False, remat):
        step = step_of(deep, engine=engine, remat=option, accumulate=2)
        sines.append(step.lower(deep_start(), WIDE).as_text().count("stablehlo.tanh"))
        found.append(step(deep_start(), WIDE))
    close(found[1][0].params, found[0][0].params)
    close(found[1][1], found[0][1])
    assert sines == [4, 8], "the tanh of each layer once more, on the way back"


def test_a_policy_saves_what_it_says():
    dots = {
        name: step_of(deep, remat=remat).lower(deep_start(), WIDE).as_text().count("dot_general")
        for name, remat in {"plain": False, "all": True, "dots": jax.checkpoint_policies.dots_saveable}.items()
    }
    assert dots["plain"] == dots["dots"] < dots["all"]
