"""Models of other libraries: a step over four devices is the step of the library's own code on the whole batch."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from step_model import close, mostly_slow

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


def test_a_whole_equinox_module_says_what_to_do():
    with pytest.raises(TypeError, match=r"leaf 'activation' of params.*eqx.partition"):
        kv.from_params(eqx.nn.MLP(6, 3, width_size=5, depth=1, key=jax.random.key(0)))
