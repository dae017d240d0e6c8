"""What a step adds to a program by hand: arguments, results, work of the host between two calls."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from step_model import ENGINES, adam, line, sgd, squares, start, step_of

from jaxpar import train
from jaxpar.train._step import programs


def here(count=1):
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("data",)), P("data"))


def started(engine, tx):
    """A step of the engine, and the state that its first call returned."""
    step = step_of(squares, engine=engine)
    state, _ = step(start(1, tx=tx), jax.device_put(line(), here()))
    return step, state


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tx", [sgd, adam])
def test_a_program_has_two_scalars_more_than_one_by_hand(engine, tx):
    """The count of steps, and no random key where the loss draws nothing. Adam counts once, not for each param."""
    step, state = started(engine, tx())
    by_hand = len(jax.tree.leaves((state.params, tx().init(state.params))))
    assert by_hand == (2 if tx is sgd else 7)
    compiled = step.lower(state, line()).compile()
    taken = jax.tree.leaves(compiled.input_shardings)  # of what XLA keeps
    assert len(taken) == by_hand + len(("step", "x", "y"))
    assert len(compiled.out_info[0]) == by_hand + len(("step",))
    assert len(jax.tree.leaves(compiled.out_info)) == by_hand + len(("step", "loss", "error"))
    aliases = compiled.as_text().split("input_output_alias={", 1)[1].split("entry_computation_layout")[0]
    assert aliases.count("alias)") == by_hand + len(("step",)), "all of the state is donated"


def test_a_batch_that_lies_as_the_last_one_is_not_laid_out_again(monkeypatch):
    step, state = started("pmap", sgd())
    checked = []
    are_on = programs.are_on

    def counted(batch, devices):
        checked.append(batch)
        return are_on(batch, devices)

    monkeypatch.setattr(programs, "are_on", counted)
    for seed in range(3):
        state, _ = step(state, jax.device_put(line(seed=seed), here()))
    assert len(checked) == 0
    state, _ = step(state, line())
    state, _ = step(state, line())
    assert len(checked) == 1, "NumPy arrays go into the program as they are"
    state, _ = step(state, jax.device_put(line(), here()))
    assert len(checked) == 2
    with pytest.raises(TypeError, match="batch"):
        step(state, {"x": "words", "y": "words"})
    assert int(step(state, jax.device_put(line(), here()))[0].step) == 8


def test_states_share_what_never_changes():
    """JAX compares the structures of states. The same objects are equal at once."""
    step, state = started("shard_map", optax.adam(1e-2))
    later, _ = step(state, line())
    assert type(later) is train.TrainState
    for field in dataclasses.fields(later.store):
        if field.name not in ("values", "updater_state", "residuals", "pending", "optimizer_state"):
            assert getattr(later.store, field.name) is getattr(state.store, field.name), field.name
    assert later.rng is state.rng
    assert (later.transform, later.model_state, later.local) == ((), (), ())
    assert jax.tree.structure(later) == jax.tree.structure(state)


def test_a_state_of_equal_structure_from_elsewhere_keeps_its_own_key():
    step, state = started("pmap", sgd())
    other = train.create_state(start(1, tx=sgd()).store, 99, devices=jax.devices()[:1])
    state, _ = step(state, line())
    after, _ = step(other, line())
    assert (jax.random.key_data(after.rng) == jax.random.key_data(jax.random.key(99))).all()
    assert (int(state.step), int(after.step)) == (2, 1)
