"""Local steps: each device by itself, then one agreement a round, against a plain loop over the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import assert_unchanged, collectives_in, compilations, snapshot
from world import adam, by_hand, close, line, sgd, squares, start, step_of, trained, update_of

from jaxpar import checkpoint, train

COUNT = 4


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def alone(params, batch, device):
    part = jax.tree.map(lambda x: x.reshape(COUNT, -1, *x.shape[1:])[device], batch)
    return jax.grad(lambda p: squares(p, part, None)[0])(params)


def diloco(tx, outer, length, steps, finish=False):
    """Algorithm 1 of the paper, written out: (the common parameters, those of each device)."""
    common = {"w": jnp.ones(3), "b": jnp.zeros(())}
    own, inner = [common] * COUNT, [tx.init(common)] * COUNT
    outer_state, since = outer.init(common) if outer else None, 0
    grad = jax.jit(alone, static_argnums=2)
    for i in range(steps):
        for d in range(COUNT):
            own[d], inner[d] = update_of(tx)(grad(own[d], line(seed=i), d), inner[d], own[d])
        since += 1
        if since == length or (finish and i == steps - 1):
            gap = jax.tree.map(lambda c, *each: sum(np.asarray(c) - e for e in each) / COUNT, common, *own)
            if outer:
                common, outer_state = update_of(outer)(gap, outer_state, common)
            else:
                common = jax.tree.map(lambda c, g: np.asarray(c) - g, common, gap)
            own, since = [common] * COUNT, 0
    return common, own


ROUNDS = {"average": ("pmap", None), "nesterov": ("pmap", NESTEROV), "shard_map": ("shard_map", NESTEROV)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "outer"), ROUNDS.values(), ids=ROUNDS)
def test_rounds_are_the_papers_algorithm(engine, outer):
    step = step_of(squares, engine=engine, local_steps=3, outer_optimizer=outer)
    state = step.complete(start(COUNT, "dist_sync", adam()))
    structure, metrics = jax.tree.structure(state), {}
    for i in range(8):
        with compilations() as count:
            state, metrics = step(state, line(seed=i))
        assert not i or count() == 0
    assert jax.tree.structure(state) == structure
    common, own = diloco(adam(), outer, 3, 8)
    close(state.params, common)
    close(state.local["values"], {0: jnp.stack([p["b"] for p in own]), 1: jnp.stack([p["w"] for p in own])})
    assert len(np.unique(state.local["values"][0])) == COUNT
    _, before = diloco(adam(), outer, 3, 7)
    parts = [jax.tree.map(lambda x, d=d: x[4 * d : 4 * d + 4], line(seed=7)) for d in range(COUNT)]
    losses = [squares(p, part, None)[0] for p, part in zip(before, parts, strict=True)]
    close(metrics["loss"], np.mean(losses), rtol=1e-4)
    finished = step.finish(state)
    close(finished.params, diloco(adam(), outer, 3, 8, finish=True)[0])
    assert int(finished.outer["since"]) == 0
    assert step.finish(finished).store == finished.store, "momentum must not go on by itself"


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_averaging_after_every_step_of_sgd_is_dist_sync(kind):
    state, _ = trained(step_of(squares, local_steps=1), start(COUNT, kind, sgd()), 4)
    close(state.params, by_hand(sgd(), 4))
    close(state.local["values"][1], jnp.broadcast_to(state.params["w"], (COUNT, 3)))


def test_a_long_round_is_what_each_device_does_alone():
    """The common parameters stay as they are, to the bit."""
    state = start(COUNT, tx=sgd())
    before = snapshot(state.store)
    state, _ = trained(step_of(squares, local_steps=10), state, 4)
    assert_unchanged(state.store, before)
    for d in range(COUNT):
        batches = [jax.tree.map(lambda x: x[4 * d : 4 * d + 4], line(seed=i)) for i in range(4)]  # noqa: B023
        close(state.local["values"][1][d], by_hand(sgd(), 4, batches=batches)["w"])


@pytest.mark.slow
def test_a_transform_of_each_devices_gradients_with_a_state():
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9))
    step = step_of(squares, local_steps=2, outer_optimizer=NESTEROV, grad_transform=transform)
    state, _ = trained(step, start(COUNT, tx=sgd()), 5)
    close(step.finish(state).params, diloco(optax.chain(transform, sgd()), NESTEROV, 2, 5, finish=True)[0])


def test_a_step_that_is_skipped_is_none_of_the_round():
    step, bad = step_of(squares, local_steps=2, nonfinite="skip"), line(seed=1)
    bad["y"][3] = np.inf
    state, _ = trained(step, start(COUNT, tx=sgd()), [line(seed=0), bad, line(seed=1)])
    close(state.params, diloco(sgd(), None, 2, 2)[0])
    assert int(state.step) == 3


def test_what_is_sent(engine):
    """The metrics at every step; the parameters in a branch that is taken once a round."""
    step = step_of(squares, engine=engine, local_steps=4, outer_optimizer=NESTEROV)
    text = step.lower(start(COUNT, tx=sgd()), line()).compile().as_text()
    branches, _, every_step = text.partition("\nENTRY ")
    assert collectives_in(every_step) == [("all-reduce", 8)]
    assert collectives_in(branches) == [("all-reduce", 16)]
    assert " conditional(" in every_step


# ---- other devices, checkpoints


def run(count, steps):
    step = step_of(squares, local_steps=3, outer_optimizer=NESTEROV)
    state = step.complete(start(count, "dist_sync", adam()))
    return trained(step, state, steps)[0] if steps else state, step


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_of_a_round(tmp_path, capsys):
    state, step = run(COUNT, 4)
    checkpoint.save(tmp_path / "a", state)
    restored = checkpoint.restore(tmp_path / "a", run(COUNT, 1)[0])
    jax.tree.map(np.testing.assert_array_equal, restored.local, state.local)
    (state, _), (restored, _) = trained(step, state, 3), trained(step, restored, 3)
    assert state.store == restored.store
    assert capsys.readouterr().err == ""
    with pytest.raises(checkpoint.CheckpointError, match=r"outer/since.*expected no such leaf.*same model and optim"):
        checkpoint.restore(tmp_path / "a", start(COUNT, "dist_sync", adam()))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_other_devices_go_on_from_the_mean(tmp_path, count, capsys):
    state, step = run(COUNT, 4)
    checkpoint.save(tmp_path / "a", state)
    restored = checkpoint.restore(tmp_path / "a", run(count, 0)[0])
    said = f"separate parameters and updater states on {COUNT} devices; they were averaged for {count}"
    assert said in capsys.readouterr().err
    for other in (restored, step.on(jax.devices()[:count]).complete(state)):
        mean = state.local["values"][1].mean(0)
        close(other.local["values"][1], jnp.broadcast_to(mean, (count, 3)))
        assert other.local["optimizer_state"][0].count.tolist() == [4] * count
        close(step.finish(other).params, step.finish(state).params)


@pytest.mark.slow
def test_errors():
    step = step_of(squares, local_steps=2)
    for kind, staleness in (("sharded", 0), ("dist_async", 1)):
        with pytest.raises(ValueError, match=f"all params on each device.* '{kind}' and staleness {staleness}"):
            step(start(COUNT, kind), line())
    state, _ = step(start(COUNT), line())
    with pytest.raises(ValueError, match="the state belongs to another outer_optimizer"):
        train.make_train_step(squares, local_steps=2, outer_optimizer=NESTEROV)(state, line())
    with pytest.raises(ValueError, match=r"separate parameters for each device.*finish\(state\)"):
        train.make_train_step(squares)(state, line())
    plain = step_of(squares)
    state, _ = plain(train.create_state(step.finish(state).store, 0), line())
    assert int(state.step) == 1
