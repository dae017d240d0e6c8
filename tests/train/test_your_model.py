"""Models of other libraries: a step over four devices is the step of the library's own code on the whole batch."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from world import close, mostly_slow

from jaxpar import kv, train

RNG = np.random.default_rng(0)
BATCH = {"image": RNG.random((16, 6), np.float32), "label": RNG.integers(0, 3, 16).astype(np.int32)}
X = BATCH["image"]
TX = optax.sgd(0.5)


def cross_entropy(logits, labels=BATCH["label"]):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class NnxNet(nnx.Module):
    def __init__(self, rngs, axis_name=None):
        self.hidden = nnx.Linear(6, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, momentum=0.9, axis_name=axis_name, rngs=rngs)
        self.out = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, images):
        return self.out(nnx.relu(self.norm(self.hidden(images))))


class LinenNet(linen.Module):
    axis_name: str | None = None

    @linen.compact
    def __call__(self, images):
        norm = linen.BatchNorm(use_running_average=False, momentum=0.9, axis_name=self.axis_name)
        return linen.Dense(3)(linen.relu(norm(linen.Dense(5)(images))))


class EqxNet(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key, axis_name="batch"):
        self.hidden = eqx.nn.Linear(6, 5, key=key)
        self.norm = eqx.nn.BatchNorm(5, axis_name=axis_name, momentum=0.9, mode="batch")
        self.out = eqx.nn.Linear(5, 3, key=key)

    def __call__(self, image, state):
        x, state = self.norm(self.hidden(image), state)
        return self.out(jax.nn.relu(x)), state


def of_nnx(axis_name):
    graphdef, params, stats = nnx.split(NnxNet(nnx.Rngs(0), axis_name), nnx.Param, ...)

    def forward(params, images, stats):
        net = nnx.merge(graphdef, params, stats, copy=True)
        net.train()
        return net(images), nnx.split(net, nnx.Param, ...)[2]

    return params, stats, forward


def of_linen(axis_name):
    net = LinenNet(axis_name)
    variables = jax.jit(net.init)(jax.random.key(0), X)

    def forward(params, images, stats):
        variables = {"params": params, "batch_stats": stats}
        logits, new = net.apply(variables, images, mutable=["batch_stats"])
        return logits, new["batch_stats"]

    return variables["params"], variables["batch_stats"], forward


def of_equinox(axis_name):
    name = "batch" if axis_name is None else ("batch", axis_name)
    net, stats = eqx.nn.make_with_state(EqxNet)(key=jax.random.key(0), axis_name=name)
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def forward(params, images, stats):
        run = jax.vmap(eqx.combine(params, static), in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        return run(images, stats)

    return params, stats, forward


def of_haiku(axis_name):
    def net(images):
        axis = None if hk.running_init() else axis_name
        norm = hk.BatchNorm(True, True, decay_rate=0.9, cross_replica_axis=axis)
        return hk.Linear(3)(jax.nn.relu(norm(hk.Linear(5)(images), is_training=True)))

    init, run = hk.without_apply_rng(hk.transform_with_state(net))
    params, stats = jax.jit(init)(jax.random.key(0), X)
    return params, stats, lambda params, images, stats: run(params, stats, images)


LIBRARIES = {"nnx": of_nnx, "linen": of_linen, "equinox": of_equinox, "haiku": of_haiku}


@pytest.mark.slow
@pytest.mark.parametrize("engine", mostly_slow(["pmap", "shard_map"], "pmap"))
@pytest.mark.parametrize("library", mostly_slow(LIBRARIES, "linen"))
def test_batch_norm_over_the_whole_batch_is_the_librarys_own(library, engine):
    """With the name of the step's axis, four devices normalize by the statistics of the whole batch."""
    params, stats, forward = LIBRARIES[library](None)
    mine = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, stats)

    def whole(params):
        logits, new = forward(params, X, stats)
        return cross_entropy(logits), new

    (_, want_stats), grads = jax.jit(jax.value_and_grad(whole, has_aux=True))(params)
    want = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    *_, forward = LIBRARIES[library]("data")

    def loss_fn(params, batch, rng, stats):
        logits, stats = forward(params, batch["image"], stats)
        return cross_entropy(logits, batch["label"]), {}, stats

    options = {"engine": engine, "devices": jax.devices()[:4], "model_state": mine[1]}
    state, step = train.start(mine[0], TX, loss_fn, **options)
    state, _ = step(state, BATCH)
    close(state.params, want)
    close(state.model_state, want_stats)


@pytest.mark.slow
def test_a_module_comes_back_out_of_the_state():
    net = eqx.nn.MLP(6, 3, width_size=5, depth=1, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def apply(params, images):
        return jax.vmap(eqx.combine(params, static))(images)

    state, step = train.start(params, TX, train.classification_loss(apply))
    state, _ = step(state, BATCH)
    trained = eqx.combine(state.params, static)
    assert isinstance(trained, eqx.nn.MLP)
    assert trained.activation is net.activation
    want = jax.jit(jax.grad(lambda p: cross_entropy(apply(p, X))))(params)
    close(eqx.filter(trained, eqx.is_inexact_array), jax.tree.map(lambda p, g: p - 0.5 * g, params, want))
    graphdef, weights = nnx.split(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), nnx.Param)
    store = kv.from_params(weights)
    assert nnx.merge(graphdef, kv.to_params(store))(X).shape == (16, 3)
    assert all("kernel" in name or "bias" in name for name in kv.names(store).values())


class Mine(nnx.Variable):
    """A variable of the user's own, which is no param."""


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(6, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


class WithArray(nnx.Module):
    def __init__(self, rngs):
        self.out, self.scale = nnx.Linear(6, 3, rngs=rngs), jnp.ones(6)


class EqxDropping(eqx.Module):
    out: eqx.nn.Linear
    drop: eqx.nn.Dropout


def linen_variables():
    net = linen.BatchNorm(use_running_average=False)
    return jax.tree.map(np.asarray, net.init(jax.random.key(0), X))


def haiku_both():
    net = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, True))
    return net.init(jax.random.key(0), X)


KEY, SPLIT = jax.random.key(0), r"train.start\(model, .*nnx.state\(model, nnx.Param\)"
PARTITION = r"train.start\(model, .*eqx.filter\(model, eqx.is_inexact_array\)"
WHOLE = {
    "nnx, batch norm": (lambda: NnxNet(nnx.Rngs(0)), f"'norm/mean' .* BatchStat, .* 1 more are not; .*{SPLIT}"),
    "nnx, dropout": (lambda: Dropping(nnx.Rngs(0)), f"'drop/rngs/count' .* RngCount, .*{SPLIT}"),
    "nnx, a state": (lambda: nnx.state(NnxNet(nnx.Rngs(0))), "BatchStat"),
    "nnx, a part": (lambda: {"w": jnp.ones(2), "net": NnxNet(nnx.Rngs(0))}, "'net/norm/mean' .* BatchStat"),
    "nnx, an own variable": (lambda: {"w": jnp.ones(2), "mine": Mine(jnp.ones(2))}, "'mine' .* Mine"),
    "nnx, a bare array": (lambda: WithArray(nnx.Rngs(0)), f"'scale' .* no nnx.Param.*{SPLIT}"),
    "nnx, an optimizer": (lambda: nnx.Optimizer(Dropping(nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param), SPLIT),
    "linen": (linen_variables, r"'batch_stats/mean' .* collection 'batch_stats'.*variables\[\"params\"\]"),
    "haiku": (haiku_both, "mean_ema/average' .* running mean of Haiku, .*model_state="),
    "equinox": (lambda: eqx.nn.MLP(6, 3, width_size=5, depth=1, key=KEY), f"leaf 'activation' .*{PARTITION}"),
    "equinox, dropout": (
        lambda: EqxDropping(eqx.nn.Linear(6, 3, key=KEY), eqx.nn.Dropout(0.5)),
        f"'drop/p'.* 0.5, .*{PARTITION}",
    ),
    "equinox, batch norm": (lambda: eqx.partition(EqxNet(KEY), eqx.is_inexact_array)[0], "make_with_state"),
    "equinox, its state": (lambda: eqx.nn.make_with_state(EqxNet)(KEY), "running value of Equinox|norm"),
    "a training state": (
        lambda: TrainState.create(apply_fn=print, params={"w": jnp.ones(2)}, tx=optax.adam(0.1)),
        "got a TrainState; .*give its .params",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", WHOLE)
def test_a_module_with_leaves_that_are_not_trained_says_what_to_do(what):
    make, words = WHOLE[what]
    with pytest.raises(TypeError, match=f"(?s)kv.from_params: .*{words}"):
        kv.from_params(make())


class LikeAParam(nnx.Param):
    pass


PARAMS_ONLY = {
    "a module": lambda: nnx.Linear(6, 3, rngs=nnx.Rngs(0)),
    "its state": lambda: nnx.state(NnxNet(nnx.Rngs(0)), nnx.Param),
    "bare arrays": lambda: nnx.to_pure_dict(nnx.state(NnxNet(nnx.Rngs(0)), nnx.Param)),
    "adapters": lambda: nnx.state(nnx.LoRA(6, 1, 3, rngs=nnx.Rngs(0)), nnx.LoRAParam),
    "an own kind of param": lambda: {"w": LikeAParam(jnp.ones(2))},
    "linen": lambda: {"params": linen_variables()["params"]},
    "haiku": lambda: haiku_both()[0],
    "equinox": lambda: eqx.partition(eqx.nn.make_with_state(EqxNet)(KEY)[0], eqx.is_inexact_array)[0],
    "a layer of equinox": lambda: eqx.nn.Linear(6, 3, key=KEY),
    "with integers": lambda: {"w": jnp.ones(2), "table": jnp.arange(3)},
}


@pytest.mark.parametrize("what", PARAMS_ONLY)
def test_what_has_params_only_is_taken(what):
    params = PARAMS_ONLY[what]()
    jax.tree.map(np.testing.assert_array_equal, kv.to_params(kv.from_params(params)), params)


def test_frozen_statistics_are_taken_and_frozen_streams_are_not():
    """A batch norm that is evaluated only is a common part of a network. A stream would draw the same at each step."""
    assert kv.from_params(NnxNet(nnx.Rngs(0)), frozen=["*/mean", "*/var"]).frozen
    assert kv.from_params(NnxNet(nnx.Rngs(0)), frozen="*/mean|*/var").frozen
    assert kv.from_params(linen_variables(), frozen="batch_stats").frozen
    with pytest.raises(TypeError, match="RngCount"):
        kv.from_params(Dropping(nnx.Rngs(0)), frozen="drop")
    with pytest.raises(TypeError, match=r"'norm/var' .* BatchStat"):
        kv.from_params(NnxNet(nnx.Rngs(0)), frozen="*/mean")


@pytest.mark.slow
@pytest.mark.parametrize("engine", mostly_slow(["pmap", "shard_map", "jit"], "shard_map"))
def test_the_dropout_of_an_nnx_module_differs_between_devices(engine):
    graph, params, rest = nnx.split(Dropping(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, rng, rest):
        net = nnx.merge(graph, params, rest, copy=True)
        kept = net.drop(jnp.ones((len(batch["row"]), 32))) > 0
        drawn = kept @ 0.5 ** jnp.arange(1.0, 33.0)
        loss = net.out(jnp.ones((1, 6))).mean()
        return loss, {"drawn": jnp.zeros(16).at[batch["row"]].set(drawn)}, nnx.split(net, nnx.Param, ...)[2]

    found = {}
    for count in (1, 4):
        options = {"engine": engine, "devices": jax.devices()[:count], "model_state": rest}
        state, step = train.start(params, TX, loss_fn, **options)
        found[count] = []
        for _ in range(2):
            state, metrics = step(state, {"row": np.arange(16)})
            found[count].append(np.asarray(metrics["drawn"]) * count)
        assert len(np.unique(np.round(found[count], 6))) == 32
    plain = Dropping(nnx.Rngs(0))
    for rows, (of_one, of_four) in enumerate(zip(found[1], found[4], strict=True)):
        want = (plain.drop(jnp.ones((16, 32))) > 0) @ 0.5 ** np.arange(1.0, 33.0)
        np.testing.assert_allclose(of_one, want, rtol=1e-6, err_msg=str(rows))
        assert (np.abs(of_four - want) < 1e-6).sum() == 4  # those of the first device


def test_an_option_in_the_third_place_is_no_key():
    def smoothed(params, batch, smoothing=0.25):
        return (params["w"] * batch["x"]).mean() * smoothing

    def noisy(params, batch, noise=None):
        return (params["w"] * batch["x"]).mean() + jax.random.normal(noise)

    losses = []
    for loss in (smoothed, noisy):
        state, step = train.start({"w": jnp.ones(())}, optax.sgd(0.1), loss)
        losses.append(float(step(state, {"x": jnp.ones(8)})[1]["loss"]))
    assert losses[0] == 0.25
    assert losses[1] != 1


def test_params_of_integers_are_not_trained():
    with pytest.raises(ValueError, match="int32"):
        train.start({"w": np.zeros(3, np.int32)}, TX, lambda params, batch: jnp.float32(params["w"].sum()))
