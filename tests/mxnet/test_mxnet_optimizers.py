"""MXNet's optimizers: learning rates that change, multipliers, dtypes. test_mxnet_reference.py has MXNet's numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import updaters

ARGS = {
    "sgd": (updaters.mxnet_sgd, {"learning_rate": 0.1}),
    "sgd_momentum_wd": (updaters.mxnet_sgd, {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    "adam": (updaters.mxnet_adam, {"learning_rate": 0.01}),
    "rmsprop": (updaters.mxnet_rmsprop, {"learning_rate": 0.01}),
    "adagrad": (updaters.mxnet_adagrad, {"learning_rate": 0.1}),
    "nag": (updaters.mxnet_nag, {"learning_rate": 0.1, "momentum": 0.9}),
}


def make(name, **more):
    function, args = ARGS[name]
    return function(**(args | more))


def pushes():
    """A value (2, 3) and the gradients of six pushes."""
    stream = np.random.RandomState(0).randn(7, 2, 3).astype(np.float32)
    return jnp.asarray(stream[0]), jnp.asarray(stream[1:])


def run(updater, value, gradients, key=0, state=None):
    state = updater.init(key, value) if state is None else state
    values = []
    for gradient in gradients:
        value, state = updater.update(key, gradient, state, value)
        values.append(value)
    return jnp.stack(values), state


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ARGS)
def test_a_compiled_loop_gives_the_eager_values(name):
    updater, (value, gradients) = make(name), pushes()
    values, state = run(updater, value, gradients)

    def push(carry, gradient):
        value, state = updater.update(0, gradient, *carry[::-1])
        return (value, state), value

    (_, last), found = jax.lax.scan(push, (value, updater.init(0, value)), gradients)
    np.testing.assert_allclose(found, values, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), last, state)


def halved(count):
    return jnp.where(count < 2, 1.0, 0.1)


def test_a_changed_rate_acts_on_new_gradients_alone_unlike_optax():
    gradients = jnp.ones(4)
    expected = [-1, -2.9, -4.71, -6.439]
    values, state = run(updaters.mxnet_sgd(halved, momentum=0.9), jnp.zeros(()), gradients)
    np.testing.assert_allclose(values, expected, atol=1e-6)
    assert int(state["count"]) == 4

    tx = optax.sgd(halved, momentum=0.9)
    value, state, theirs = jnp.zeros(()), tx.init(jnp.zeros(())), []
    for gradient in gradients:
        updates, state = tx.update(gradient, state)
        value = value + updates
        theirs.append(float(value))
    np.testing.assert_allclose(theirs[:2], expected[:2], atol=1e-6)
    np.testing.assert_allclose(theirs[2:], [-3.171, -3.5149], atol=1e-5)


def test_a_rate_in_the_state_changes_without_a_new_compilation():
    updater = updaters.mxnet_sgd(1.0, momentum=0.9, rate_in_state=True)
    traces = []

    @jax.jit
    def push(state, value):
        traces.append(None)
        return updater.update(0, jnp.ones(()), state, value)

    value = jnp.zeros(())
    states, values = {0: updater.init(0, value)}, []
    for rate in (1.0, 1.0, 0.1, 0.1):
        states = updaters.set_learning_rate(states, rate)
        value, states[0] = push(states[0], value)
        values.append(float(value))
    np.testing.assert_allclose(values, [-1, -2.9, -4.71, -6.439], atol=1e-6)
    assert len(traces) == 1


def test_what_is_clipped():
    value, gradient = jnp.array([10.0]), jnp.array([5.0])
    common = {"wd": 0.5, "clip_gradient": 1.0, "rescale_grad": 2.0}

    def step(updater):
        return float(run(updater, value, [gradient])[0][0, 0] - value[0])

    assert step(updaters.mxnet_sgd(0.1, **common)) == pytest.approx(-0.1 * (1 + 5))  # decay is not clipped
    assert step(updaters.mxnet_nag(0.1, momentum=0.9, **common)) == pytest.approx(-0.1 * 6 * 1.9)
    assert step(updaters.mxnet_adagrad(0.1, **common)) == pytest.approx(-0.1 * (1 + 5), rel=1e-5)
    _, state = run(updaters.mxnet_adam(0.1, **common), value, [gradient])
    np.testing.assert_allclose(state["mean"], 0.1 * 1, rtol=1e-6)  # the decayed gradient, clipped
    _, state = run(updaters.mxnet_rmsprop(0.1, **common), value, [gradient])
    np.testing.assert_allclose(state["square"], 0.1 * 1, rtol=1e-6)
    assert step(updaters.mxnet_sgd(0.1, rescale_grad=-0.5)) == pytest.approx(0.25)


def test_the_momentum_of_nag_has_the_decay_of_the_new_value():
    """As in MXNet's kernel, which writes the value first. By hand: 1, 0.905 and, with momentum -0.04525, 0.7823725."""
    values, state = run(updaters.mxnet_nag(0.1, momentum=0.9, wd=0.5), jnp.ones(()), jnp.zeros(2))
    np.testing.assert_allclose(values, [0.905, 0.7823725], rtol=1e-6)
    np.testing.assert_allclose(state["momentum"], 0.9 * -0.04525 - 0.05 * 0.7823725, rtol=1e-6)


def test_multipliers_by_key():
    updater = updaters.mxnet_sgd(0.1, wd=0.5, lr_mult={1: 2.0, 3: 0.0}, wd_mult={2: 0.0})
    value, gradient = jnp.ones(1), jnp.ones(1)
    steps = [float(run(updater, value, [gradient], key=key)[0][0, 0]) - 1 for key in range(4)]
    np.testing.assert_allclose(steps, [-0.15, -0.3, -0.1, 0.0], atol=1e-6)


NAMES = {0: "conv1_weight", 1: "conv1_bias", 2: "['dense1']['weight']", 3: "norm/gamma", 4: "norm/beta"}


def test_multipliers_by_name():
    assert updaters.multipliers(NAMES, {"conv1_*": 0.1, "conv1_bias": 2.0}) == {0: 0.1, 1: 2.0}
    assert updaters.multipliers(NAMES, {"['dense1']['weight']": 3.0}) == {2: 3.0}  # a whole name is no pattern


def test_mxnets_rule_of_weight_decay():
    assert updaters.mxnet_wd_mult(NAMES) == {1: 0.0, 4: 0.0}
    assert updaters.mxnet_wd_mult({0: "a/kernel", 1: "a/bias", 2: "overweight"}, ("kernel",)) == {1: 0.0, 2: 0.0}


@pytest.mark.parametrize(("name", "dtype"), [*zip(ARGS, ["bfloat16", "float16"] * 3, strict=True)])
def test_narrow_values_keep_their_dtype_and_a_wide_state(name, dtype):
    value, gradients = pushes()
    values, state = run(make(name), value.astype(dtype), gradients.astype(dtype))
    assert values.dtype == dtype
    slots = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert all(leaf.dtype == jnp.float32 and leaf.shape == (2, 3) for leaf in slots)
    np.testing.assert_allclose(values.astype(jnp.float32), run(make(name), value, gradients)[0], atol=0.15)


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        value, gradients = pushes()
        for name in ARGS:
            updater = make(name, learning_rate=lambda count: 0.1 / (1 + count))
            values, state = run(updater, value.astype("float64"), gradients.astype("float64"))
            assert values.dtype == jnp.float64
            assert all(leaf.dtype in (jnp.float64, jnp.int32) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("shape", [(), (3, 0)])
@pytest.mark.parametrize("name", ARGS)
def test_scalar_and_empty_values(name, shape):
    value = jnp.ones(shape)
    new, state = make(name).update(0, jnp.ones(shape), make(name).init(0, value), value)
    assert new.shape == shape
    assert not shape or not new.size
    assert shape or float(new) < 1
    assert jax.tree.structure(state) == jax.tree.structure(make(name).init(0, value))


@pytest.mark.parametrize("name", ARGS)
def test_equal_arguments_are_one_compiled_program(name):
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def push(updater, state, value):
        traces.append(updater)
        return updater.update(0, value, state, value)

    for _ in range(3):
        updater = make(name, lr_mult={2: 0.5, 1: 3.0})
        push(updater, updater.init(0, jnp.ones(2)), jnp.ones(2))
    assert len(traces) == 1
    assert make(name) != make(name, wd=0.25)


@pytest.mark.slow
def test_pmap_and_vmap_give_the_eager_values():
    devices = jax.devices()[:3]
    updater = make("adam")
    value, gradients = pushes()
    gradients = gradients[: len(devices)]
    state = updater.init(0, value)
    expected = jnp.stack([updater.update(0, g, state, value)[0] for g in gradients])

    def push(gradient):
        return updater.update(0, gradient, state, value)[0]

    np.testing.assert_allclose(jax.pmap(push, devices=devices)(gradients), expected, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(push)(gradients), expected, atol=1e-6)


def test_other_names_and_arguments_that_say_nothing():
    assert updaters.mxnet_rmsprop(gamma=0.8) == updaters.mxnet_rmsprop(gamma1=0.8)
    assert updaters.mxnet_adagrad(eps=1e-3) == updaters.mxnet_adagrad(epsilon=1e-3)
    nothing = {"lr_scheduler": None, "param_idx2name": {}, "sym": None, "param_dict": None, "begin_num_update": 0}
    assert updaters.mxnet_sgd(None, clip_gradient=0, **nothing) == updaters.mxnet_sgd()


def test_a_schedule_begins_at_begin_num_update():
    updater = updaters.mxnet_sgd(lambda count: 1.0 + count, begin_num_update=3)
    values, state = run(updater, jnp.zeros(1), jnp.ones((2, 1)))
    assert values.ravel().tolist() == [-4.0, -9.0]
    assert int(state["count"]) == 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_multi_precision_trains_a_copy_in_float32(dtype):
    """Steps that are lost in a narrow value add up in its copy."""
    plain, wide = (updaters.mxnet_sgd(1.0, multi_precision=copy) for copy in (False, True))
    value, gradients = jnp.ones(1, dtype), jnp.full((32, 1), 2.0**-13, dtype)
    assert run(plain, value, gradients)[0][-1] == 1
    values, state = run(wide, value, gradients)
    assert values.dtype == dtype
    assert values[-1] == 1 - 2.0**-8 == state["master"][0]
    assert updaters.mxnet_sgd(1.0).init(0, jnp.ones(1)) == wide.init(0, jnp.ones(1)) == {}


@pytest.mark.parametrize("compiled", [False, True])
def test_the_float32_copy_follows_a_value_that_was_changed(compiled):
    """Averaging over devices and restored parameters change the value and not the optimizer's state."""
    updater = updaters.mxnet_sgd(1.0, multi_precision=True)
    update = jax.jit(updater.update, static_argnums=0) if compiled else updater.update
    value = jnp.array([1, 1, -1e-7, 60000], "float16")
    pushed, state = jnp.array([2.0**-13, 2.0**-13, -6e-8, -9000], "float16"), updater.init(0, value)
    value, state = update(0, pushed, state, value)
    np.testing.assert_array_equal(value[:2], 1)
    value, state = update(0, pushed, state, value.at[0].set(3))
    expected = [3 - 2.0**-13, 1 - 2.0**-12, float(jnp.float16(-1e-7)) - 2 * float(pushed[2]), 78000]
    np.testing.assert_allclose(state["master"], expected, rtol=1e-6)
