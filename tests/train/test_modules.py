"""Whole modules of Flax NNX and Equinox: a step over several devices is that of the library on the whole batch."""

import functools
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from world import close, mostly_slow

from jaxpar import checkpoint, data, kv, parallel, train

TX = optax.sgd(0.1)


def batch_of(seed, n=16):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n, 8)).astype(np.float32), "y": rng.integers(0, 3, n).astype(np.int32)}


BATCHES = [batch_of(i) for i in range(3)]
ALL = {name: np.concatenate([batch[name] for batch in BATCHES]) for name in ("x", "y")}


def cross_entropy(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def trained(model, loss_fn=cross_entropy, batches=BATCHES, count=4, tx=TX, **options):
    """The module after steps of these batches, and the last loss."""
    state, step = train.start(model, tx, loss_fn, devices=jax.devices()[:count], **options)
    for batch in batches:
        state, metrics = step(state, batch)
    return state.model, float(metrics["loss"])


# Flax NNX.


class Normed(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.first(x)))))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.encode = nnx.Linear(8, 8, rngs=rngs)
        self.decode = self.encode
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.decode(nnx.relu(self.encode(x))))


class Counting(nnx.Module):
    """Variables of ints and bools, raw arrays, and what `sow` keeps."""

    def __init__(self, rngs):
        self.out = nnx.Linear(8, 3, rngs=rngs)
        self.calls, self.seen, self.three = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.array(False)), nnx.Variable(3)
        self.scale, self.table = jnp.full(8, 0.3), np.arange(3)

    def __call__(self, x):
        self.calls[...] += 1
        self.seen[...] = jnp.array(True)
        y = self.out(x * self.scale[None])
        with warnings.catch_warnings(action="ignore"):
            self.sow(nnx.Intermediate, "y", y)
        return y


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(8, 16, rngs=rngs)
        self.lora = nnx.LoRA(8, 2, 16, base_module=self.base, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.lora(x)))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.drop(nnx.relu(self.dense(x)))


class Scanned(nnx.Module):
    """Layers in one, with streams of shape (3,), behind a recurrent one, in a list."""

    def __init__(self, rngs):
        make = nnx.vmap(Layer, in_axes=0, out_axes=0)
        self.layers = make(rngs.fork(split=3) if not hasattr(rngs, "split") else rngs.split(3))
        self.rnn = nnx.RNN(nnx.LSTMCell(2, 8, rngs=rngs), rngs=rngs)
        self.last = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)])

    def __call__(self, x):
        x = self.rnn(x.reshape(-1, 4, 2))[:, -1]
        x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        return self.last[1](self.last[0](x))


def by_nnx(model, loss_fn=cross_entropy, wrt=nnx.Param):
    """What the plain loop of Flax makes of the module."""
    optimizer = nnx.Optimizer(model, TX, wrt=wrt)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, batch)
        optimizer.update(model, grads)
        return loss

    for batch in BATCHES:
        loss = step(model, optimizer, batch)
    return model, float(loss)


def arrays(model):
    return jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Any(nnx.RngState, nnx.Intermediate))))


NNX = {
    "batch norm": (Normed, None),
    "LoRA": (Adapted, nnx.LoRAParam),
    "counts": (Counting, None),
    "tied": (Tied, None),
    "scanned": (Scanned, None),
    "some by their path": (Scanned, nnx.All(nnx.Param, nnx.PathContains("last"))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", NNX)
def test_a_module_of_flax_is_trained_as_flax_trains_it(what):
    make, wrt = NNX[what]
    want, want_loss = by_nnx(make(nnx.Rngs(0)), wrt=wrt or nnx.Param)
    for count in (1, 4):
        model = make(nnx.Rngs(0))
        before = [np.array(x) for x in arrays(model)]
        new, loss = trained(model, count=count, wrt=wrt)
        assert abs(loss - want_loss) < 1e-6
        close(arrays(new), arrays(want), rtol=1e-6, atol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, arrays(model), before)  # the caller's module stays
    if what == "tied":
        assert new.encode is new.decode
    if what == "counts":
        assert (int(new.calls[...]), bool(new.seen[...]), int(new.three[...])) == (3, True, 3)


EVERYWHERE = {
    "jit": {"engine": "jit"},
    "sharded": {"kind": "sharded"},
    "pmap": {"engine": "pmap"},
    "a mesh": {"mesh": "data", "sharding": parallel.fsdp("data", min_size=1)},
    "two axes": {"mesh": ("data", "more"), "axis_name": ("data", "more")},
    "another axis": {"axis_name": "shares"},
    "remat": {"remat": True},
    "float16": {"loss_scale": 1024.0},
    "a guard": {"nonfinite": "skip"},
}


@functools.cache
def normed_by_nnx():
    return by_nnx(Normed(nnx.Rngs(0)))[0]


@pytest.mark.parametrize("where", mostly_slow(EVERYWHERE, "jit", "sharded"))
def test_batch_norm_is_of_the_whole_batch_on_every_engine(where):
    options = dict(EVERYWHERE[where])
    if axes := options.get("mesh"):
        mesh = jax.make_mesh((4,) if axes == "data" else (2, 2), (axes,) if axes == "data" else axes)
        state, step = train.start(Normed(nnx.Rngs(0)), TX, cross_entropy, **{**options, "mesh": mesh})
        for batch in BATCHES:
            state, _ = step(state, batch)
        new = state.model
    else:
        new, _ = trained(Normed(nnx.Rngs(0)), **options)
    close(arrays(new), arrays(normed_by_nnx()), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_batch_norm_of_each_share_is_what_the_parts_give_by_hand():
    graph, params, streams, rest = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, nnx.RngState, ...)

    def by_hand(params, batch, rng, rest):
        model = nnx.merge(graph, params, streams, rest, copy=True)
        return cross_entropy(model, batch), {}, nnx.split(model, nnx.Param, nnx.RngState, ...)[3]

    state, step = train.start(params, TX, by_hand, model_state=rest, devices=jax.devices()[:4])
    for batch in BATCHES:
        state, _ = step(state, batch)
    new, _ = trained(Normed(nnx.Rngs(0)), sync_batch_norm=False)
    close(arrays(new), jax.tree.leaves(nnx.merge_state(state.params, state.model_state)), rtol=1e-6, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(arrays(new), arrays(normed_by_nnx()), strict=True)) > 1e-3


class Masks(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(()))
        self.drop, self.again = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self):
        """A number for the mask of each layer."""
        masks = [drop(jnp.ones(24)) > 0 for drop in (self.drop, self.again)]
        return jnp.stack([mask @ 0.5 ** jnp.arange(1.0, 25.0) for mask in masks])


@pytest.mark.parametrize("options", [{}, *mostly_slow([{"engine": "jit"}, {"accumulate": 2}, {"virtual_shards": 4}])])
def test_dropout_differs_by_device_layer_and_step(options):
    def loss_fn(model, batch):
        mine = model()
        return model.w[...] * mine.mean(), {"masks": jnp.zeros((8, 2)).at[batch["row"]].set(mine[None])}

    state, step = train.start(
        Masks(nnx.Rngs(0)), optax.sgd(0.0), loss_fn, devices=jax.devices()[:4], sync_batch_norm=False, **options
    )
    found = []
    for _ in range(2):
        state, metrics = step(state, {"row": np.arange(8)})
        found.append(np.asarray(metrics["masks"]) * 4 * options.get("accumulate", 1))
    a_share = 8 // 4 // options.get("accumulate", 1)  # rows of one mask
    assert len(np.unique(np.round(found, 6))) == 2 * 2 * 8 // a_share
    assert not jax.tree.leaves(state.model_state)  # streams are no part of it
    keys = [jax.random.key_data(model.drop.rngs.key[...]) for model in (state.model, Masks(nnx.Rngs(0)))]
    np.testing.assert_array_equal(*keys)


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_the_whole_one(tmp_path):
    """Dropout and batch norm, over virtual shards, on other numbers of devices."""

    def run(count, steps, saved=None):
        options = {"devices": jax.devices()[:count], "virtual_shards": 4, "sync_batch_norm": False}
        state, step = train.start(Normed(nnx.Rngs(0), rate=0.5), optax.adam(0.01), cross_entropy, **options)
        state = checkpoint.restore(saved, step.complete(state)) if saved else state
        for batch in BATCHES[int(state.step) : steps]:
            state, _ = step(state, batch)
        return state

    checkpoint.save(tmp_path / "half", run(1, 2))
    whole, resumed = run(4, 3), run(2, 3, tmp_path / "half")
    jax.tree.map(np.testing.assert_array_equal, *[(s.params, s.model_state, s.opt_state) for s in (whole, resumed)])
    x = BATCHES[0]["x"]
    np.testing.assert_array_equal(whole.model(x), resumed.model(x))
    assert whole.module == resumed.module


def test_adapters_alone_are_sent():
    state, step = train.start(Adapted(nnx.Rngs(0)), TX, cross_entropy, wrt=nnx.LoRAParam, devices=jax.devices()[:4])
    text = step.lower(state, BATCHES[0]).compile().as_text()
    sent = [line.split(" = ")[1].split(" all-reduce")[0] for line in text.splitlines() if " all-reduce(" in line]
    assert sum(map(int, re.findall(r"f32\[(\d+)\]", str(sent)))) == 8 * 2 + 2 * 16
    assert set(state.store.frozen) == {k for k, name in kv.names(state.store).items() if "lora/" not in name}
    assert "lora/lora_a" in kv.names(state.store).values()  # without the attribute `value`


# Equinox.


class EqxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    out: eqx.nn.Linear
    key: jax.Array
    name: str = "net"

    def __init__(self, key, rate=0.0):
        a, b, self.key = jax.random.split(key, 3)
        self.first, self.out = eqx.nn.Linear(8, 8, key=a), eqx.nn.Linear(8, 3, key=b)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch", momentum=0.9)
        self.drop = eqx.nn.Dropout(rate)

    def __call__(self, x, state, key):
        x, state = self.norm(self.first(x) + jax.random.normal(self.key, (8,)), state)
        return self.out(self.drop(jax.nn.relu(x), key=key)), state


def of_batch(model, x, state, rng=None):
    over = {"in_axes": (0, None, None if rng is None else 0), "out_axes": (0, None), "axis_name": "batch"}
    return jax.vmap(model, **over)(x, state, None if rng is None else jax.random.split(rng, len(x)))


def eqx_loss(model, batch, rng, state):
    logits, state = of_batch(model, batch["x"], state, rng)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {}, state


@functools.cache
def by_equinox():
    """The plain loop of Equinox."""
    model, state = eqx.nn.make_with_state(EqxNet)(jax.random.key(0))
    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, opt_state, batch):
        def loss(model):
            value, _, new = eqx_loss(model, batch, jax.random.key(0), state)
            return value, new

        (value, new), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        updates, opt_state = TX.update(grads, opt_state)
        return eqx.apply_updates(model, updates), new, opt_state, value

    for batch in BATCHES:
        model, state, opt_state, value = step(model, state, opt_state, batch)
    return eqx.filter(model, eqx.is_inexact_array), state, float(value)


@pytest.mark.parametrize("options", mostly_slow([{"count": 4}, {"count": 1}, {"engine": "jit"}], {"count": 4}))
def test_a_module_of_equinox_is_trained_as_equinox_trains_it(options):
    options = dict(options)
    want, want_state, want_loss = by_equinox()
    model, first = eqx.nn.make_with_state(EqxNet)(jax.random.key(0))
    devices = jax.devices()[: options.pop("count", 4)]
    state, step = train.start(model, TX, eqx_loss, model_state=first, devices=devices, **options)
    for batch in BATCHES:
        state, metrics = step(state, batch)
    assert abs(float(metrics["loss"]) - want_loss) < 1e-6
    new = state.model
    close(eqx.filter(new, eqx.is_inexact_array), want, rtol=1e-6, atol=1e-6)
    close(state.model_state, want_state, rtol=1e-6, atol=1e-6)
    assert (type(new), new.name, new.drop.inference, new.norm.axis_name) == (EqxNet, "net", True, "batch")
    x = BATCHES[0]["x"]
    want_logits, _ = of_batch(eqx.nn.inference_mode(eqx.combine(want, model)), x, want_state)
    predicted = train.predict(state, lambda model, x, state: of_batch(model, x, state)[0], x, batch_size=8)
    np.testing.assert_allclose(predicted, want_logits, rtol=1e-5, atol=1e-5)


def test_a_filter_of_equinox_says_what_is_trained():
    model = eqx.nn.MLP(8, 3, width_size=8, depth=1, key=jax.random.key(0))
    last = eqx.tree_at(lambda m: m.layers[1], jax.tree.map(lambda _: False, model), True)

    def loss_fn(model, batch):
        return cross_entropy(jax.vmap(model), batch)

    new, _ = trained(model, loss_fn, wrt=last)
    np.testing.assert_array_equal(new.layers[0].weight, model.layers[0].weight)
    assert np.abs(new.layers[1].weight - model.layers[1].weight).max() > 1e-3
    assert new.activation is model.activation
    line = eqx.nn.Linear(8, 3, key=jax.random.key(0))  # of arrays alone
    new, _ = trained(line, loss_fn, wrt=eqx.tree_at(lambda m: m.bias, jax.tree.map(lambda _: False, line), True))
    np.testing.assert_array_equal(new.weight, line.weight)
    assert np.abs(new.bias - line.bias).max() > 1e-3
    new, _ = trained(line, loss_fn)
    assert isinstance(new, eqx.nn.Linear)


# Both, in `fit` and around it.


def test_fit_evaluate_and_predict_take_a_function_of_the_module(tmp_path):
    options = {"devices": jax.devices()[:2]}
    run = {"batch_size": 16, "progress": False, "eval_data": ALL, "checkpoint_dir": tmp_path}
    run["eval_fn"] = lambda model, batch: {"right": model(batch["x"]).argmax(1) == batch["y"]}
    state, step = train.start(Normed(nnx.Rngs(0), rate=0.5), optax.adam(0.05), cross_entropy, **options)
    state, _ = train.fit(state, step, ALL, epochs=1, **run)
    again, step = train.start(Normed(nnx.Rngs(0), rate=0.5), optax.adam(0.05), cross_entropy, **options)
    state, history = train.fit(again, step, ALL, epochs=2, **run)
    assert [record["epoch"] for record in history] == [1, 2]  # resumed
    model = state.model
    logits = np.asarray(model(ALL["x"]))  # without dropout, by running statistics
    assert history[-1]["eval_right"] == pytest.approx((logits.argmax(1) == ALL["y"]).mean())
    for given in (state, model):
        predicted = train.predict(given, lambda model, x: model(x), ALL["x"], batch_size=20)
        np.testing.assert_allclose(predicted, logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"eval_fn must be a function of \(params, batch\)"):
        train.evaluate(state, data=ALL, eval_fn=lambda model, batch, stats: {})


def test_a_classifier_checks_its_labels():
    loss_fn = train.classification_loss(Normed.__call__)
    state, step = train.start(Normed(nnx.Rngs(0)), TX, loss_fn, devices=jax.devices()[:2])
    good, bad = data.Dataset(ALL["x"], ALL["y"]), data.Dataset(ALL["x"], ALL["y"] + 1)
    with pytest.raises(ValueError, match="the model has 3 classes, but labels from 1 to 3"):
        train.fit(state, step, bad, epochs=1, batch_size=16, progress=False)
    assert train.evaluate(state, Normed.__call__, good)["accuracy"] <= 1.0


def test_an_optimizer_of_flax_brings_its_transform_and_its_filter():
    model = Adapted(nnx.Rngs(0))
    new, _ = trained(Adapted(nnx.Rngs(0)), tx=nnx.Optimizer(model, TX, wrt=nnx.LoRAParam))
    close(arrays(new), arrays(by_nnx(Adapted(nnx.Rngs(0)), wrt=nnx.LoRAParam)[0]), rtol=1e-6, atol=1e-6)
    used = nnx.Optimizer(model, TX, wrt=nnx.Param)
    by = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    used.update(model, by)
    with pytest.raises(ValueError, match=r"has made 1 updates.*optimizer\.tx"):
        train.start(model, used, cross_entropy)


class WithKey(nnx.Module):
    def __init__(self, rngs):
        self.out, self.key = nnx.Linear(8, 3, rngs=rngs), jax.random.key(1)


def eqx_model():
    return eqx.nn.MLP(8, 3, width_size=8, depth=1, key=jax.random.key(0))


REFUSED = {
    "virtual shards": (Normed, {"virtual_shards": 4}, r"virtual_shards= .* one share .*sync_batch_norm=False"),
    "local steps": (Normed, {"local_steps": 2}, r"local_steps= .* one share .*sync_batch_norm=False"),
    "two states": (Normed, {"model_state": {"a": jnp.ones(1)}}, "leave out model_state="),
    "wrt and frozen": (Adapted, {"wrt": nnx.LoRAParam, "frozen": "base"}, "give one of them"),
    "nothing trained": (Normed, {"wrt": nnx.LoRAParam}, "wrt=.*LoRAParam.* chooses no array"),
    "a key": (WithKey, {}, "random key in 'key'.*nnx.Rngs"),
    "params": (lambda rngs: {"w": jnp.ones(2)}, {"wrt": nnx.Param}, "is for a whole"),
    "equinox, nothing trained": (lambda rngs: eqx_model(), {"wrt": lambda leaf: False}, "chooses no array"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_module_cannot_have_is_said(what):
    make, options, words = REFUSED[what]
    with pytest.raises(ValueError, match=f"(?s)train.start: .*{words}"):
        train.start(make(nnx.Rngs(0)), TX, cross_entropy, **options)


def test_a_module_is_trained_in_its_mode():
    model = Normed(nnx.Rngs(0))
    model.norm.eval()
    new, _ = trained(model)
    np.testing.assert_array_equal(new.norm.mean[...], np.zeros(8))
    model.eval()
    with pytest.warns(UserWarning, match=r"evaluation mode.*model.train\(\)"):
        train.start(model, TX, cross_entropy)
    with pytest.warns(UserWarning, match="inference_mode"):
        train.start(eqx.nn.inference_mode(eqx.nn.make_with_state(EqxNet)(jax.random.key(0))[0]), TX, eqx_loss)


def test_attention_without_dropout_has_no_mode():
    """A model comes out of a state in evaluation mode. Nothing is said where the modes do not differ."""
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    attention.eval()
    train.start(attention, TX, cross_entropy)  # a warning is an error here
    train.start(eqx.nn.inference_mode(eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))), TX, eqx_loss)
    dropping = nnx.MultiHeadAttention(2, 8, decode=False, dropout_rate=0.1, rngs=nnx.Rngs(0))
    dropping.eval()
    with pytest.warns(UserWarning, match="evaluation mode"):
        train.start(dropping, TX, cross_entropy)


class Tuned(nnx.Module):
    """A head on an encoder, which has batch norm and dropout. The head alone has no mode."""

    def __init__(self, rngs, rate):
        self.encoder, self.head = Normed(rngs, 0.5), nnx.Linear(3, 3, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x):
        x = self.encoder(x)
        return self.head(x if self.drop is None else self.drop(x))


def tuned(rate=None):
    """Its encoder is in evaluation mode, and its statistics are not those of a fresh one."""
    model = Tuned(nnx.Rngs(0), rate)
    model.encoder.norm.mean[...] = jnp.linspace(-1, 1, 8)
    model.encoder.eval()
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"frozen": "encoder"},
        *mostly_slow([{"frozen": lambda name, leaf: name.startswith("encoder/")}, {"wrt": nnx.PathContains("head")}]),
    ],
)
def test_a_head_is_trained_on_a_frozen_encoder_in_evaluation_mode(options):
    """Its dropout is off, its statistics stay, and no warning asks for `model.train()`, which would change both."""
    heads = nnx.All(nnx.Param, nnx.PathContains("head"))
    want, want_loss = by_nnx(tuned(), wrt=heads)
    new, loss = trained(tuned(), **options)  # a warning is an error here
    assert abs(loss - want_loss) < 1e-6
    close(arrays(new), arrays(want), rtol=1e-6, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, arrays(new.encoder), arrays(tuned().encoder))
    assert np.abs(new.head.kernel[...] - tuned().head.kernel[...]).max() > 1e-3


def test_a_frozen_encoder_in_training_mode_is_trained_in_it():
    """The mode is the user's own choice, as in Flax: frozen are the params alone."""
    model = tuned()
    model.encoder.norm.train()
    new, _ = trained(model, frozen="encoder")
    close(arrays(new), arrays(by_nnx(model, wrt=nnx.All(nnx.Param, nnx.PathContains("head")))[0]), rtol=1e-6, atol=1e-6)


def test_what_is_trained_in_evaluation_mode_beside_a_frozen_part_is_named():
    model = tuned(rate=0.5)
    train.start(model, TX, cross_entropy, frozen="encoder")  # its dropout is in training mode
    model.eval()
    words = r"the layers \[drop\] are not frozen and are in evaluation mode.* model.train\(\), and then put the frozen"
    with pytest.warns(UserWarning, match=words):
        train.start(model, TX, cross_entropy, frozen="encoder")
    # A dropout without params belongs to the module around it, of which a part is trained here.
    with pytest.warns(UserWarning, match=r"the layers \[drop, encoder/drop\] are"):
        train.start(model, TX, cross_entropy, frozen=["encoder/first", "encoder/norm"])


def test_a_frozen_part_of_equinox_may_be_in_evaluation_mode():
    first, second, rng = *jax.random.split(jax.random.key(0)), jax.random.key(1)
    body = eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=first), eqx.nn.Dropout(0.5)])
    models = {"body": eqx.nn.inference_mode(body), "head": eqx.nn.Linear(8, 3, key=second)}

    def loss_fn(models, batch):
        logits = jax.vmap(lambda x: models["head"](models["body"](x, key=rng)))(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    new, loss = trained(models, loss_fn, frozen="body")  # a warning is an error here
    assert loss < float(loss_fn(models, BATCHES[-1]))
    np.testing.assert_array_equal(new["body"].layers[0].weight, models["body"].layers[0].weight)
    with pytest.warns(UserWarning, match=r"evaluation mode.* eqx.nn.inference_mode\(model, False\)$"):
        train.start(models, TX, loss_fn)


class Growing(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        self.last = nnx.Variable(x)
        return self.out(x)


def test_a_variable_that_a_call_makes_is_not_lost_in_silence():
    state, step = train.start(Growing(nnx.Rngs(0)), TX, cross_entropy)
    with pytest.raises(ValueError, match=r"a call of the model makes or removes 'last'"):
        step(state, BATCHES[0])


class Writing(nnx.Module):
    def __init__(self, rngs):
        self.out, self.scale = nnx.Linear(8, 3, rngs=rngs), nnx.Param(jnp.ones(()))

    def __call__(self, x):
        self.scale[...] *= 2
        return self.out(x) * self.scale[...]


def test_what_a_call_writes_into_a_param_is_not_dropped_in_silence():
    state, step = train.start(Writing(nnx.Rngs(0)), TX, cross_entropy)
    with pytest.raises(ValueError, match=r"writes into the params 'scale'.* nnx.clone\(model\)"):
        step(state, BATCHES[0])
    dropped = lambda model, batch: cross_entropy(nnx.clone(model), batch)  # noqa: E731
    state, step = train.start(Writing(nnx.Rngs(0)), optax.sgd(0.0), dropped)
    state, _ = step(state, BATCHES[0])
    assert float(state.model.scale[...]) == 1.0


# Several modules in a dict or a list.

SEVERAL = {
    "of flax": lambda: {"first": Normed(nnx.Rngs(0)), "second": nnx.Linear(8, 3, rngs=nnx.Rngs(1))},
    "of equinox": lambda: {"first": eqx.nn.MLP(8, 3, 8, 1, key=jax.random.key(0)), "second": [eqx.nn.Dropout(0.5)]},
}


@pytest.mark.parametrize("library", SEVERAL)
def test_modules_in_a_dict_are_trained_as_one(library):
    def loss_fn(models, batch):
        run = models["first"] if library == "of flax" else jax.vmap(models["first"])
        return optax.softmax_cross_entropy_with_integer_labels(run(batch["x"]), batch["y"]).mean()

    state, step = train.start(SEVERAL[library](), TX, loss_fn, devices=jax.devices()[:2], unused="skip")
    new, metrics = step(state, BATCHES[0])
    assert float(step(new, BATCHES[0])[1]["loss"]) < float(metrics["loss"])


def test_modules_of_two_libraries_are_params_or_refused():
    both = {"flax": nnx.BatchNorm(8, rngs=nnx.Rngs(0)), "equinox": eqx.nn.Linear(8, 3, key=jax.random.key(0))}
    with pytest.raises(TypeError, match="'flax/mean' of params is of type BatchStat, which cannot be trained"):
        train.start(both, TX, cross_entropy)


def test_a_module_of_equinox_is_no_params_as_long_as_it_has_functions():
    """`train.start` takes it apart. A store takes its arrays."""
    model = eqx_model()
    with pytest.raises(TypeError, match=r"'activation' of params is no array but .*eqx\.filter\(model"):
        kv.from_params(model)
    assert kv.names(kv.from_params(eqx.filter(model, eqx.is_inexact_array)))[0] == "layers/0/weight"


# What a loss function may leave out, of a module and of params.


def squares(params, x):
    return (x @ params["w"]) ** 2


LOSSES = {
    "a scalar": lambda params, batch: squares(params, batch[0]).mean(),
    "with aux": lambda params, batch: (squares(params, batch[0]).mean(), {"a": 1.0}),
    "with a key": lambda params, batch, rng: squares(params, batch[0]).mean(),
    "with the step": lambda params, batch, step: squares(params, batch[0]).mean() + 0 * step,
    "with both": lambda params, batch, rng, *, step: squares(params, batch[0]).mean() + 0 * step,
    "a mean": lambda params, batch: train.Mean(each := squares(params, batch[0]), jnp.ones_like(each)),
    "a sum and a weight": lambda params, batch: ((squares(params, batch[0]).sum(), float(len(batch[0]))), {}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_may_leave_out_what_it_does_not_use(what):
    """Of data in a tuple, too."""
    state, step = train.start({"w": jnp.ones(8)}, TX, LOSSES[what], devices=jax.devices()[:2])
    arrays = (BATCHES[0]["x"], BATCHES[0]["y"])
    state, history = train.fit(state, step, arrays, epochs=1, batch_size=16, progress=False)
    want = np.mean(BATCHES[0]["x"].sum(1) ** 2)
    assert history[0]["loss"] == pytest.approx(want, rel=1e-5)
    grad = (2 * BATCHES[0]["x"] * BATCHES[0]["x"].sum(1, keepdims=True)).mean(0)
    np.testing.assert_allclose(state.params["w"], 1 - 0.1 * grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", mostly_slow(["device", "sharded"], "sharded"))
def test_the_optimizers_state_is_where_one_looks_for_it(kind):
    tx = optax.adam(0.1)
    state, step = train.start({"w": jnp.ones(6)}, tx, lambda params, batch: (params["w"] ** 2).mean(), kind=kind)
    state, _ = step(state, BATCHES[0])
    _, want = tx.update({"w": jnp.ones(6) / 3}, tx.init({"w": jnp.ones(6)}))
    close(state.opt_state, want)
