"""What a notebook and a prompt show of a step, a state, a manager of checkpoints and a history."""

import jax
import jax.numpy as jnp
import optax
import pytest
from world import line, squares

from jaxpar import checkpoint, train, viz

PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}


def test_a_step_shows_its_engine_devices_options_and_what_it_sends():
    options = {"accumulate": 2, "compute_dtype": jnp.bfloat16, "grad_transform": optax.clip_by_global_norm(1.0)}
    state, step = train.start(PARAMS, optax.sgd(0.1), squares, devices=jax.devices()[:4], nonfinite="skip", **options)
    rows = dict(text.split(maxsplit=1) for text in repr(step).splitlines()[1:])
    assert rows["loss_fn"] == "squares"
    assert rows["engine"] == "shard_map, chosen by 'auto'"
    assert rows["devices"] == "4 x cpu"
    assert (rows["accumulate"], rows["compute_dtype"], rows["grad_transform"]) == ("2", "bfloat16", "given")
    assert rows["nonfinite"] == "skip"
    assert "remat" not in rows  # as usual
    assert rows["gradients"] == "16 bytes, of which each device sends 24 a step"
    assert "<td" in step._repr_html_()

    # The compiled step sends just that, and its metrics and flags.
    _, step = train.start(PARAMS, optax.sgd(0.1), squares, devices=jax.devices()[:4])
    program = viz._program_of(step.lower(state, line()).compile())
    sent = sum(send.sent * send.times for send in viz._sends_of(program, {"data": 4}, 4))
    assert sent == 24 + 6 * len(["loss", "error"])

    step = train.make_train_step(squares, local_steps=3, virtual_shards=None)
    rows = dict(text.split(maxsplit=1) for text in repr(step).splitlines()[1:])
    assert rows["engine"] == "auto, chosen by the first state"
    assert (rows["devices"], rows["local_steps"]) == ("those of the state", "3")


def test_tab_lists_no_inner_parts():
    state, step = train.start(PARAMS, optax.sgd(0.1), squares)
    assert {"params", "step", "store", "model"} <= {*dir(state)}
    assert {"values", "kind", "devices"} <= {*dir(state.store)}
    assert {"many", "lower", "without"} <= {*dir(step)}
    assert not {"local", "outer", "module"} & {*dir(state)}
    assert not {"layouts", "treedef", "limits"} & {*dir(state.store)}
    assert not {"device_step", "global_step", "parts"} & {*dir(step)}


def test_a_state_shows_its_params_as_a_tree():
    pytest.importorskip("treescope")
    state, _ = train.start(PARAMS, optax.sgd(0.1), squares)
    assert "<summary>params</summary>" in state._repr_html_()


def test_a_manager_shows_its_checkpoints(tmp_path):
    manager = checkpoint.Manager(tmp_path, keep=2)
    assert repr(manager).endswith("keep=2): 0 checkpoints")
    state, _ = train.start(PARAMS, optax.sgd(0.1), squares)
    manager.save(state, best=True)
    manager.close()
    (tmp_path / "damaged").mkdir()
    assert repr(manager).splitlines()[1:] == ["  step_00000000  step 0, best", "  damaged        cannot be read"]
    assert "step_00000000" in manager._repr_html_()


def test_the_best_record():
    records = [{"epoch": i, "eval_error": e, "score": i} for i, e in enumerate([0.3, 0.2, 0.2, float("nan")])]
    history = train.History([*records, {"epoch": 4}])
    assert history.best("eval_error")["epoch"] == 1
    assert history.best("score", "max")["epoch"] == 3
    with pytest.raises(ValueError, match="the name 'score' does not tell"):
        history.best("score")
    with pytest.raises(ValueError, match="no record has a number 'loss'; known are eval_error, score"):
        history.best("loss")
