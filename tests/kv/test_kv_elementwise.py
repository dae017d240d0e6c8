"""Kind `sharded` takes elementwise updaters, with the numbers of kind `device`, and refuses all others."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from kv_model import FOUR, assert_unchanged, on_mesh, over, put, snapshot, whole_numbers
from world import close

from jaxpar import free_running, kv, train, updaters
from jaxpar.updaters import _elementwise

KERNEL = (3, 5)


def by_axes(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def updater_of(tx):
    return tx if isinstance(tx, updaters.Updater) else updaters.from_optax(tx)


PLAIN = "sgd adam adagrad adadelta adabelief adamax adan amsgrad lion nadamw radam rprop sign_sgd yogi".split()
ACCEPTED = {name: functools.partial(getattr(optax, name), 0.1) for name in PLAIN} | {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "schedule": lambda: optax.sgd(optax.warmup_cosine_decay_schedule(0, 0.1, 2, 5)),
    "interpolated schedule": lambda: optax.adam(optax.piecewise_interpolate_schedule("linear", 0.1, {2: 0.5, 3: 0.1})),
    "joined schedules": lambda: optax.sgd(
        optax.join_schedules([optax.linear_schedule(0, 0.1, 2), optax.exponential_decay(0.1, 5, 0.5)], [2])
    ),
    "adam, nesterov": lambda: optax.adam(0.1, nesterov=True),
    "adam, bfloat16": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "adamw, mask True": lambda: optax.adamw(0.1, mask=True),
    "centred rmsprop": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
    "optimistic": lambda: optax.optimistic_gradient_descent(0.1),
    "clip": lambda: optax.chain(optax.clip(2.0), optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "apply_every": lambda: optax.chain(optax.apply_every(2), optax.scale(-0.1)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(0.1, 5)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "conditionally": lambda: optax.chain(
        optax.conditionally_transform(optax.scale(0.5), lambda step: step > 1), optax.scale(-0.1)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, lambda p: jax.tree.map(lambda _: "a", p)
    ),
    "ademamix": lambda: optax.contrib.ademamix(0.1),
    "adopt": lambda: optax.contrib.adopt(0.1),
    "cocob": lambda: optax.contrib.cocob(),
    "madgrad": lambda: optax.contrib.madgrad(0.1),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "assign": lambda: updaters.assign,
    "accumulate": lambda: updaters.accumulate,
    "stateless": lambda: updaters.stateless(lambda key, pushed, stored: stored - (key + 1) * jnp.tanh(pushed)),
    "mxnet_sgd": lambda: updaters.mxnet_sgd(lambda count: 0.1 / (count + 1), momentum=0.9, wd=0.1),
    "mxnet_nag": lambda: updaters.mxnet_nag(0.1, momentum=0.9, wd=0.1, clip_gradient=2.0),
    "mxnet_adam": lambda: updaters.mxnet_adam(0.1, wd=0.1, lr_mult={1: 0.5}, rate_in_state=True),
    "mxnet_rmsprop": lambda: updaters.mxnet_rmsprop(0.1, wd_mult={0: 0.0}, wd=0.1, centered=True),
    "mxnet_adagrad": lambda: updaters.mxnet_adagrad(0.1, wd=0.1),
}

REDUCING = "novograd lamb lars fromage adaptive_grad_clip clip_by_block_rms".split()
REFUSED = {  # the transform, and why it is refused for a matrix
    **{name: (functools.partial(getattr(optax, name), 0.1), "'reduce_sum' combines elements") for name in REDUCING},
    "adamw, mask by axes": (lambda: optax.adamw(0.1, mask=by_axes), r"it has \d+ equations for the one and \d+ for"),
    "masked momentum": (lambda: optax.masked(optax.trace(0.9), by_axes), "its state has another structure"),
    "labels by axes": (
        lambda: optax.multi_transform(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, lambda p: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", p)
        ),
        "its state has another structure",
    ),
    "muon": (lambda: optax.contrib.muon(0.1), "its state has another structure"),
    "sm3": (lambda: optax.sm3(0.1), "its state has another structure"),
    "adafactor": (lambda: optax.adafactor(0.1), r"its state has float32\[1\]"),
    "galore": (lambda: optax.contrib.galore(0.1, rank=2), "its state has"),
    "trust ratio": (lambda: optax.scale_by_trust_ratio(), "'reduce_sum' combines elements"),
    "normalize": (lambda: optax.normalize_by_update_norm(), "'reduce_sum' combines elements"),
    "centralize": (lambda: optax.centralize(), "'reduce_sum' combines elements"),
    "zero_nans": (lambda: optax.zero_nans(), "'reduce_or' combines elements"),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 2), "'reduce_and' combines elements"),
    "MultiSteps that skips": (
        lambda: optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
        "equation \\d+, 'reduce_sum', depends on the shape",
    ),
    "prodigy": (lambda: optax.contrib.prodigy(), "'reshape' combines elements"),
    "dog": (lambda: optax.contrib.dog(), "'reduce_sum' combines elements"),
    "add_noise": (lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)), "takes an array that is not made of the value"),
    "noisy_sgd": (lambda: optax.noisy_sgd(0.1, key=0), "takes an array that is not made of the value"),
    "flatten": (lambda: optax.flatten(optax.adam(0.1)), r"its state has float32\[15\] and float32\[4\]"),
}


def refusal(update, shape=(4, 4), init=lambda key, value: ()):
    """Why an updater is refused for one value, or None."""
    chunk = -(-int(np.prod(shape)) // 4)
    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (chunk,), (4, chunk))]
    updater = updaters.Updater(init, lambda key, g, state, x: (update(key, g, state, x), state))
    return _elementwise.fault(updater, [0], *specs)


def trained(kind, made):
    """The values after pushes to a store for each updater, all in one program over four devices: that is quickest."""
    params = {"kernel": whole_numbers(1, *KERNEL)}
    stores = {n: kv.from_params(params, kind=kind, updater=u, devices=FOUR) for n, u in made.items()}
    specs = {n: kv.partition_specs(s, "data") for n, s in stores.items()}

    def push(stores, grads):
        return {n: kv.push(s, 0, grads[0], axis_name="data") for n, s in stores.items()}

    run = on_mesh(push, FOUR, (specs, P("data")), specs)
    for i in range(3):
        stores = run(stores, whole_numbers(i, 4, *KERNEL))
    return {n: kv.pull(s, 0) for n, s in stores.items()}


@pytest.mark.slow  # one program of all updaters for each kind
def test_elementwise_updaters_give_the_numbers_of_kind_device():
    made = {name: updater_of(make()) for name, make in ACCEPTED.items()}
    whole, shares = trained("device", made), trained("sharded", made)
    for name in ACCEPTED:
        np.testing.assert_allclose(shares[name], whole[name], rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_is_refused_with_the_key_and_the_reason(name):
    make, reason = REFUSED[name]
    if name == "galore" and not hasattr(optax.contrib, name):
        pytest.skip("this optax has no galore")
    updater, params = updater_of(make()), {"kernel": jnp.ones(KERNEL)}
    with pytest.raises(ValueError, match=rf"key 0 \('kernel'\): .*{reason}.*use kind='device'"):
        kv.from_params(params, kind="sharded", updater=updater, devices=FOUR)
    kv.from_params(params, kind="device", updater=updater)


# ---- the rule


def test_what_the_rule_takes():
    boundaries = np.array([1.0, 2.0, 5.0], np.float32)

    def table(key, g, state, x):
        """Arrays that have nothing to do with the value may be used in any way, as schedules do."""
        return x - g * jnp.sum(jnp.where(boundaries > 1.5, boundaries, 0))

    @jax.custom_jvp
    def scaled(x):
        return 2 * x

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), 2 * tangents[0]))

    def chosen(key, g, count, x):
        return jax.lax.cond(count > 2, lambda: jax.jit(jnp.sin)(g), lambda: jax.checkpoint(scaled)(g)) + x

    assert refusal(table) is None
    assert refusal(chosen, init=lambda key, value: jnp.int32(0)) is None
    for shape in ((), (1,), (0,), (2, 1, 3)):
        assert refusal(lambda key, g, state, x: x + jax.nn.relu(g) * jnp.ones_like(x), shape) is None


WRONG = {
    "a threshold": lambda key, g, state, x: jnp.where(jnp.abs(g).max() > 1e9, 0, g),
    "a size": lambda key, g, state, x: g / g.size,
    "a limit of sizes": lambda key, g, state, x: g * 2 if g.size > 10 else g,
    "a number of axes": lambda key, g, state, x: g * (1.0 if g.ndim > 1 else 2.0),
    "a count of ones": lambda key, g, state, x: g * jnp.ones_like(g).sum(),
    "a period": lambda key, g, state, x: g * (jnp.arange(g.size).reshape(g.shape) % 2),
    "a mask that was captured": lambda key, g, state, x: g * jnp.asarray(MASK)[: g.size].reshape(g.shape),
    "a sort": lambda key, g, state, x: jnp.sort(g),
    "a cumsum": lambda key, g, state, x: jnp.cumsum(g, axis=-1),
    "a product": lambda key, g, state, x: g @ g.T,
    "a roll": lambda key, g, state, x: jnp.roll(g, 1),
    "a loop": lambda key, g, state, x: jax.lax.fori_loop(0, 3, lambda i, y: y * 0.5, g),
    "a cond on an element": lambda key, g, state, x: jax.lax.cond(g.reshape(-1)[0] > 0, lambda: g, lambda: x),
    "a random number": lambda key, g, state, x: g + jax.random.normal(jax.random.key(0), g.shape),
    "a reduction in a branch": lambda key, g, state, x: jax.lax.cond(True, lambda: g - g.mean(), lambda: g),
    "an array in a branch": lambda key, g, state, x: jax.lax.cond(True, lambda: 1.0 * jnp.arange(g.size), lambda: g),
    "a reduction in a call": lambda key, g, state, x: jax.jit(jax.nn.softmax)(g),
}
MASK = (np.arange(16) % 3).astype(np.float32)


@pytest.mark.parametrize("name", WRONG)
def test_what_the_rule_refuses(name):
    assert refusal(WRONG[name]) is not None
    assert refusal(WRONG[name], shape=(16,)) is not None or name == "a number of axes"


def test_the_state_is_looked_at_too():
    def keep(key, g, state, x):
        return g

    def narrow(key, value):
        return jnp.zeros_like(value, jnp.bfloat16 if value.ndim > 1 else jnp.float32)

    assert "its state has bfloat16[4,4] and float32[4]" in refusal(keep, init=narrow)
    assert "its state has float32[3] and float32[3]" in refusal(keep, init=lambda key, value: jnp.zeros(3))
    assert "combines elements" in refusal(keep, init=lambda key, value: value.sum())
    assert "the updater fails on a share of it only (TypeError" in refusal(lambda key, g, state, x: g.reshape(4, 4))
    # What fails for whole values too is no matter of shares, but of every push, unless one judges it before all pushes.
    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 4), (4,))]
    fails = updaters.stateless(lambda key, g, x: x.T @ g.reshape(7))
    assert _elementwise.fault(fails, [0], *specs) is None
    assert "the updater fails (" in _elementwise.fault(fails, [0], *specs, judges_all=True)
    growing = updaters.Updater(lambda key, value: jnp.float32(0), lambda key, g, state, x: (g, state + g))
    assert "changes the structure or the shapes" in _elementwise.fault(growing, [0], *specs)


def test_each_key_is_looked_at_where_the_updater_uses_it():
    def update(key, pushed, stored):
        return stored + (pushed.sum() if key == 517 else pushed)

    forms = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4,), (2,), (2, 2)))
    with pytest.raises(ValueError, match=r"key 517: .*'reduce_sum'"):
        updaters._check_elementwise(updaters.stateless(update), dict.fromkeys(range(600), forms), {}, "here")


def test_ten_thousand_keys_of_one_shape_are_traced_once(quick_collections):
    calls = []

    def update(updates, state, params=None):
        calls.append(updates.shape)
        return jax.tree.map(lambda u: -0.1 * u, updates), state

    updater = updaters.from_optax(optax.GradientTransformation(lambda params: (), update))
    forms = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2,), (1,), (8, 1)))
    updaters._check_elementwise(updater, dict.fromkeys(range(10_000), forms), {}, "here")
    assert calls == [(2,), (1,)]
    kept = weakref.ref(update)
    del updater, update
    gc.collect()
    assert kept() is None


# ---- where it is looked at


def test_nothing_is_changed_before():
    devices = jax.devices()[:3]
    lamb, value = updaters.from_optax(optax.lamb(0.1)), jnp.ones(KERNEL)
    empty = kv.create("sharded", devices=devices)
    store = kv.init(empty, 3, value)
    before = snapshot(store)
    for change in (
        lambda: kv.set_updater(store, lamb),
        lambda: kv.set_optimizer(store, optax.lamb(0.1)),
        lambda: kv.init(kv.set_updater(empty, lamb), 3, value),
        lambda: kv.broadcast(kv.set_updater(empty, lamb), [3], [value], devices=devices),
        lambda: jax.jit(lambda v: kv.init(kv.set_updater(empty, lamb), 3, v))(value),
    ):
        with pytest.raises(ValueError, match=r"^kv\.(init|set_updater): key 3: the updater is not elementwise"):
            change()
    assert_unchanged(store, before)


def test_place_looks_at_the_new_shares():
    def update(key, pushed, stored):
        return stored + (pushed if stored.size > 2 else 2 * pushed)

    updater, devices = updaters.stateless(update), jax.devices()
    store = kv.from_params({"w": jnp.ones(12)}, kind="sharded", updater=updater, devices=devices[:4])
    kv.place(store, devices[4:8])
    with pytest.raises(ValueError, match=r"^kv\.place: key 0 \('w'\): the updater is not the same program"):
        kv.place(store, devices)
    with pytest.raises(ValueError, match=r"^kv\.place: key 0"):
        train.create_state(store, 0, devices=devices)


# ---- plain functions


def test_a_plain_function_sees_whole_values_at_the_prompt(capsys):
    def update(key, pushed, stored):
        print(key, pushed.shape)
        return stored - pushed / jnp.linalg.norm(pushed)

    devices, results = jax.devices()[:3], []
    for kind in ("device", "sharded"):
        store = kv.set_updater(kv.init(kv.create(kind, devices=devices), 3, jnp.ones(KERNEL)), update)
        store = kv.push(store, 3, put([whole_numbers(i, *KERNEL) for i in range(3)], devices))
        results.append(kv.pull(jax.jit(lambda s: kv.push(s, 3, jnp.ones(KERNEL)))(store), 3))
    np.testing.assert_allclose(*results, rtol=1e-6)
    assert capsys.readouterr().out == "3 (3, 5)\n" * 4  # two pushes, two traces


def test_a_plain_function_on_shares_must_be_elementwise(engine):

    def pushed_by(update):
        store = kv.set_updater(kv.init(kv.create("sharded", devices=FOUR), 3, jnp.ones(KERNEL)), update)
        run = over(engine, store, FOUR, lambda s, value: kv.push(s, 3, value, axis_name="data"))
        return run(store, jnp.ones((4, *KERNEL)))

    with pytest.raises(ValueError, match=r"^kv\.push: key 3: the updater is not elementwise: 'reduce_sum'"):
        pushed_by(lambda key, pushed, stored: stored - pushed.mean())
    assert pushed_by(lambda key, pushed, stored: stored - pushed).values[3].reshape(-1)[:15].tolist() == [-3.0] * 15


# ---- training


def squares(params, batch, rng):
    return ((batch @ params["w"]) ** 2).mean(), {}


def after_a_step(kind, engine, tx, **options):
    options |= {"kind": kind, "engine": engine, "devices": FOUR}
    state, step = train.start({"w": jnp.arange(1.0, 7.0)}, tx, squares, **options)
    return step(state, np.ones((8, 6), np.float32))[0].params


@pytest.mark.sampled(1)
def test_a_mask_by_axes_is_fine_where_all_values_are_vectors(engine):
    tx = optax.adamw(0.1, weight_decay=1.0, mask=by_axes)
    close(after_a_step("sharded", engine, tx), after_a_step("device", engine, tx))


@pytest.mark.slow
def test_grad_transform_takes_what_is_not_elementwise(engine):
    tx = optax.lamb(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="use engine 'jit' or 'auto'"):
        after_a_step("sharded", engine, tx)
    whole = after_a_step("device", engine, tx)
    close(after_a_step("sharded", "auto", tx), whole)
    close(after_a_step("sharded", engine, updaters.accumulate, grad_transform=tx), whole)


# ---- servers that cut a value


def test_a_value_that_servers_share_wants_an_elementwise_updater():
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"^free_running\.start: key 1 \('w'\): the updater is not elementwise.*split"):
        free_running.start(params, optimizer=optax.lamb(0.1), servers=2, split=6)
    with pytest.raises(ValueError, match=r"key 1 \('w'\).*'reduce_sum'"):
        free_running.start(params, updater=lambda key, pushed, stored: stored - pushed.mean(), servers=2, split=6)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        free_running.start(params, updater=lambda key, pushed, stored: stored - float(pushed[0, 0]), servers=2, split=6)


def test_random_keys_beside_params_that_are_split_in_their_own_shapes():
    """Kind `sharded` cuts no random keys into rows. Where its optimizer is not elementwise, nothing is cut."""
    params = {"w": jnp.ones((8, 4)), "key": jax.random.key(0)}
    store = kv.from_params(params, kind="sharded", optimizer=optax.lamb(0.1), devices=FOUR)
    assert jax.random.key_data(kv.to_params(store)["key"]).tolist() == jax.random.key_data(params["key"]).tolist()
    with pytest.raises(ValueError, match="to key<fry>"):
        kv.from_params(params, kind="sharded", optimizer=optax.adam(0.1), devices=FOUR)
