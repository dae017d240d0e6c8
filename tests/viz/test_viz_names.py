"""Names and clusters as authors wrote them, state and constants apart from parameters, what is no array."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
import viz_models as m
from flax import nnx

from jaxpar import kv, train, viz

f32 = jnp.float32
IMAGES, TOKENS = m.Spec((2, 8, 8, 3), f32), m.Spec((5,), jnp.int32)
SIZE = 16


# Networks written with Flax NNX and Equinox, as their users write them


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.query, self.key, self.value, self.out = (nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(4))

    def __call__(self, x_TxD):
        weights = jax.nn.softmax(self.query(x_TxD) @ self.key(x_TxD).T)
        return self.out(weights @ self.value(x_TxD))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln1, self.ln2 = nnx.LayerNorm(SIZE, rngs=rngs), nnx.LayerNorm(SIZE, rngs=rngs)
        self.attn, self.up = Attention(rngs), nnx.Linear(SIZE, SIZE, rngs=rngs)

    def __call__(self, x_TxD):
        x_TxD = x_TxD + self.attn(self.ln1(x_TxD))
        return x_TxD + jax.nn.gelu(self.up(self.ln2(x_TxD)))


class Encoder(nnx.Module):
    def __init__(self, blocks, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(SIZE, rngs=rngs)

    def __call__(self, x_TxD):
        for block in self.blocks:
            x_TxD = block(x_TxD)
        return self.norm(x_TxD)


class Transformer(nnx.Module):
    def __init__(self, rngs, blocks=2):
        self.embed = nnx.Embed(10, SIZE, rngs=rngs)
        self.encoder = Encoder(blocks, rngs)
        self.head = nnx.Linear(SIZE, 10, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


class Cnn(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.dense = nnx.Linear(4, 10, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.drop(nnx.relu(self.bn(self.conv(x))).mean((1, 2))))


class Scanned(nnx.Module):
    def __init__(self, blocks, rngs):
        self.blocks = nnx.split_rngs(splits=blocks)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)
        self.head = nnx.Linear(SIZE, 10, rngs=rngs)

    def __call__(self, x_TxD):
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(run(self.blocks, x_TxD))


class NoPytree(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.first = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.again, self.act = self.first, jnp.tanh

    def __call__(self, x):
        return self.act(self.again(self.act(self.first(x))))


class EqxBlock(eqx.Module):
    attend: eqx.nn.MultiheadAttention
    norms: list
    mlp: eqx.nn.MLP

    def __init__(self, key):
        key_a, key_m = jax.random.split(key)
        self.attend = eqx.nn.MultiheadAttention(2, SIZE, key=key_a)
        self.norms = [eqx.nn.LayerNorm(SIZE), eqx.nn.LayerNorm(SIZE)]
        self.mlp = eqx.nn.MLP(SIZE, SIZE, 32, 1, jax.nn.gelu, key=key_m)

    def __call__(self, x_TxD):
        h_TxD = jax.vmap(self.norms[0])(x_TxD)
        x_TxD = x_TxD + self.attend(h_TxD, h_TxD, h_TxD)
        return x_TxD + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x_TxD))


class EqxNet(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list
    act: object

    def __init__(self, key, blocks=2):
        keys = jax.random.split(key, blocks + 1)
        self.embed = eqx.nn.Embedding(10, SIZE, key=keys[0])
        self.blocks = [EqxBlock(key) for key in keys[1:]]
        self.act = jax.nn.relu

    def __call__(self, tokens):
        x_TxD = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x_TxD = block(x_TxD)
        return self.act(x_TxD)


@functools.cache
def transformer():
    return Transformer(nnx.Rngs(0))


@functools.cache
def cnn():
    return Cnn(nnx.Rngs(0))


@functools.cache
def equinox_net():
    return EqxNet(jax.random.key(0))


def places(graph):
    """Where each layer is, and its name or kind."""
    last = {node.name: node.name.rpartition("/")[2] if node.params or node.state else node.op for node in graph.layers}
    return ["/".join((*node.scope, last[node.name])) for node in graph.layers]


BLOCK = ["ln1", "attn/query", "attn/key", "attn/value", "attn/Attention", "attn/out", "add"]
BLOCK += ["ln2", "up", "Activation", "add"]
TRANSFORMER = ["embed", *(f"encoder/blocks.{n}/{name}" for n in range(2) for name in BLOCK), "encoder/norm", "head"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["module", "argument", "closure", "method", "merge", "jit"])
def test_nnx_modules_are_the_clusters_that_their_author_wrote(way):
    model = transformer()
    graphdef, state = nnx.split(model)
    fn, *args = {
        "module": (model,),
        "argument": (lambda model, tokens: model(tokens), model),
        "closure": (lambda tokens: model(tokens),),
        "method": (model.__call__,),
        "merge": (lambda state, tokens: nnx.merge(graphdef, state)(tokens), state),
        "jit": (nnx.jit(lambda model, tokens: model(tokens)), model),
    }[way]
    graph = viz.trace(fn, *args, TOKENS, repeats=False)
    assert sorted(places(graph)) == sorted(TRANSFORMER)
    assert [node.name for node in graph.inputs] == ["tokens"]
    assert graph.total_params == sum(leaf.size for leaf in jax.tree.leaves(state))
    assert (graph.total_state, graph.total_constants) == (0, 0)
    assert graph["blocks.1/attn/query"].scope == ("encoder", "blocks.1", "attn")
    assert viz.trace(fn, *args, TOKENS)["query"].repeat == 2


@pytest.mark.slow
def test_an_nnx_training_step_returns_what_it_changes():
    model = cnn()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, images, labels):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    graph = viz.trace(train_step, model, optimizer, IMAGES, m.Spec((2,), jnp.int32))
    assert {node.name for node in graph.layers if not node.is_backward} >= {"conv", "bn", "drop", "dense", "loss0"}
    assert graph.total_params == (27 * 4 + 4) + 8 + (40 + 10)
    assert (graph["bn"].params, graph["bn"].state) == (8, 8)
    assert graph["bn"].outputs == ("model['bn']['mean']", "model['bn']['var']")
    assert any("model['conv']['kernel']" in node.outputs for node in graph.layers)
    assert {node.name.partition("[")[0] for node in graph.inputs} == {"images", "labels", "optimizer"}
    assert not any("wrap" in node.op for node in graph.layers)


def test_a_variable_of_nnx_alone_is_drawn_as_its_array():
    w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
    for weight in (w, nnx.Param(w)):
        (layer,) = viz.trace(lambda w, x: x @ w[...], weight, x).layers
        assert (layer.name, layer.weights) == ("fullyconnected0", ("w",))


@pytest.mark.slow
def test_scanned_nnx_layers_and_modules_that_are_no_pytrees():
    graph = viz.trace(Scanned(3, nnx.Rngs(0)), m.Spec((5, SIZE), f32))
    assert graph["query"].scope == ("scan ×3", "blocks", "attn")
    assert graph["query"].params == 3 * (16 * 16 + 16)
    assert graph["head"].scope == ()
    shared = viz.trace(NoPytree(nnx.Rngs(0)), m.Spec((5, SIZE), f32))
    assert [(node.op, node.params) for node in shared.layers if node.params] == [("FullyConnected", 16 * 16 + 16)]
    assert [node.name for node in shared.layers] == ["again", "tanh0", "again 2", "tanh1"]


EQX = ["norms.0", "attend/query_proj", "attend/key_proj", "attend/value_proj", "attend/Attention", "attend/Flatten"]
EQX += ["attend/output_proj", "add", "norms.1", "mlp/layers.0", "mlp/Activation", "mlp/layers.1", "add"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["module", "argument", "closure", "jit", "gradient"])
def test_equinox_modules_are_the_clusters_that_their_author_wrote(way):
    net = equinox_net()
    fn, *args = {
        "module": (net,),
        "argument": (lambda net, tokens: net(tokens), net),
        "closure": (lambda tokens: net(tokens),),
        "jit": (eqx.filter_jit(net),),
        "gradient": (eqx.filter_grad(lambda net, tokens: net(tokens).sum()), net),
    }[way]
    graph = viz.trace(fn, *args, TOKENS, repeats=False)
    found = [place.removeprefix("EqxNet/") for place in places(graph) if "backward" not in place]
    blocks = ["embed", *(f"blocks.{n}/{name}" for n in range(2) for name in EQX)]
    assert found[:-1] == blocks  # and what becomes of the activation
    assert [node.detail for node in graph.layers if node.op == "Activation"][:2] == ["gelu", "gelu"]
    assert viz.trace(fn, *args, TOKENS)["query_proj"].repeat == 2
    assert [node.name for node in graph.inputs] == ["tokens"]
    assert graph.total_params == sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(net, eqx.is_array)))


def test_linen_keeps_its_scopes_and_batch_stats_are_state():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, images, train):
            x = nn.Dense(4, name="first")(images)
            return nn.Dense(2)(nn.relu(nn.BatchNorm(use_running_average=not train)(x)))

    net = Net()
    variables = jax.eval_shape(lambda rng, x: net.init(rng, x, False), jax.random.key(0), IMAGES)
    graph = viz.trace(net.apply, variables, IMAGES, train=True, mutable=["batch_stats"])
    assert [(node.scope, node.name) for node in graph.layers] == [
        (("Net",), "first"), (("Net",), "BatchNorm_0"), (("Net",), "relu0"), (("Net",), "Dense_0"),
    ]  # fmt: skip
    assert [node.name for node in graph.inputs] == ["images"]
    assert (graph.total_params, graph.total_state) == (16 + 8 + 10, 8)
    stats = "output[1]['batch_stats']['BatchNorm_0']"
    assert graph["BatchNorm_0"].outputs == (f"{stats}['mean']", f"{stats}['var']")

    def apart(params, batch_stats, images):
        return net.apply({"params": params, "batch_stats": batch_stats}, images, False)

    def renamed(params, other, images):
        return apart(params, other, images)

    for fn in (apart, renamed):  # by the name, and by what reads it
        split = viz.trace(fn, variables["params"], variables["batch_stats"], IMAGES)
        assert [node.name for node in split.inputs] == ["images"]
        assert (split.total_params, split.total_state, split["BatchNorm_0"].state) == (34, 8, 8)


def test_what_only_a_normalization_reads_is_data_where_it_has_more_than_one_axis():
    def fn(params, batch):
        return m.layer_norm(params, batch["x"])

    params = {"g": m.Spec((4,), f32), "b": m.Spec((4,), f32)}
    graph = viz.trace(fn, params, {"x": m.Spec((2, 3, 4), f32)})
    assert [node.name for node in graph.inputs] == ["batch['x']"]
    assert graph.total_state == 0


def test_haiku_state_is_state():
    def net(x, train):
        return hk.nets.MLP([4, 3])(hk.BatchNorm(True, True, 0.9)(x, train))

    made = hk.transform_with_state(net)
    params, state = jax.eval_shape(lambda rng, x: made.init(rng, x, True), jax.random.key(0), m.Spec((2, 3), f32))
    graph = viz.trace(made.apply, params, state, None, m.Spec((2, 3), f32), True)
    assert [(node.scope, node.name) for node in graph.layers if node.params] == [
        ((), "batch_norm"), (("mlp",), "linear_0"), (("mlp",), "linear_1"),
    ]  # fmt: skip
    assert [node.name for node in graph.inputs] == ["x"]
    assert (graph.total_params, graph.total_state) == (6 + 16 + 15, 2 * (3 + 1))  # the averages are only written


def _keras_model(keras):
    layers = keras.layers
    images = keras.Input((8, 8, 3), name="images")
    x = layers.ReLU()(layers.BatchNormalization(name="bn")(layers.Conv2D(4, 3, name="c1")(images)))
    tower = keras.Sequential([layers.Dense(8, activation="relu", name="a"), layers.Dense(8, name="b")], name="tower")
    x = layers.LayerNormalization(name="ln")(tower(layers.GlobalAveragePooling2D()(x)))
    return keras.Model(images, layers.Dense(10, name="head")(x))


@pytest.mark.others
def test_keras_models_have_the_names_of_their_layers(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    with jax.numpy_rank_promotion("allow"):  # Keras adds its biases so
        model = _keras_model(keras)
    trained, rest = ([v.value for v in kind] for kind in (model.trainable_variables, model.non_trainable_variables))

    def loss(trained, rest, images):
        return model.stateless_call(trained, rest, images, training=True)[0].sum()

    names = ["c1", "bn", "a", "b", "ln", "head"]
    for fn, *args in ((model.stateless_call, trained, rest), (loss, trained, rest), (model,)):
        with jax.numpy_rank_promotion("allow"):
            graph = viz.trace(fn, *args, IMAGES)
        assert [node.name for node in graph.layers if node.params] == names
        assert (graph["bn"].op, graph["ln"].op, graph["a"].scope[-2:]) == ("BatchNorm", "LayerNorm", ("tower", "a"))
        assert graph.total_params == sum(leaf.size for leaf in trained)
        assert graph["c1"].weights[0].endswith("['c1/kernel']")
        assert [node.name for node in graph.inputs] == ["images" if fn is loss else "inputs"]
    assert graph.total_state == graph["bn"].state == 8


def test_state_of_equinox_is_state():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")

    def fn(norm, state, x):
        return jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    graph = viz.trace(fn, norm, state, m.Spec((4, 3), f32))
    assert [node.name for node in graph.inputs] == ["x"]
    assert (graph.total_params, graph.total_state) == (6, 7)


def test_trees_of_parameters_name_clusters():
    graph = viz.trace(m.transformer, m.transformer_params(2), m.TOKENS, repeats=False)
    assert {node.scope for node in graph.layers} == {
        (), ("blocks.0",), ("blocks.0", "attn"), ("blocks.1",), ("blocks.1", "attn"),
    }  # fmt: skip
    assert graph["blocks.1/attn/q"].weights == ("params['blocks'][1]['attn']['q']",)
    assert graph["attention1"].scope == ("blocks.1", "attn")
    assert graph["gelu1"].scope == ("blocks.1",)
    assert graph.layers[-1].name == "= embed"  # its table once more


def test_a_layer_with_the_weight_of_another_is_called_after_it_or_after_its_own_bias():
    def autoencoder(p, x):
        h = jnp.tanh(x @ p["encoder"]["w"] + p["encoder"]["b"][None])
        return h @ p["encoder"]["w"].T + p["reconstruction"][None]

    params = {"encoder": {"w": m.Spec((6, 2), f32), "b": m.Spec((2,), f32)}, "reconstruction": m.Spec((6,), f32)}
    assert [node.name for node in viz.trace(autoencoder, params, m.Spec((3, 6), f32)).layers][::2] == [
        "encoder",
        "reconstruction",
    ]

    def logits(p, ids):
        return jnp.tanh(p["wte"][ids] @ p["mlp"]["w"]) @ p["wte"].T

    params = {"wte": m.Spec((9, 4), f32), "mlp": {"w": m.Spec((4, 4), f32)}}
    graph = viz.trace(logits, params, m.Spec((5,), m.i32))
    assert [node.name for node in graph.layers] == ["wte", "mlp", "tanh0", "= wte"]
    assert graph["= wte"].params == 0
    params["embedding"] = params.pop("wte")  # a word of many networks, without a module around it
    layers = viz.trace(lambda p, ids: logits({**p, "wte": p["embedding"]}, ids), params, m.Spec((5,), m.i32)).layers
    assert layers[-1].name == "= embedding"
    params["wte"] = params.pop("embedding")

    def decayed(p, ids):
        return logits(p, ids).mean() + 1e-4 * jnp.sum(p["wte"] ** 2)

    layers = viz.trace(decayed, params, m.Spec((5,), m.i32)).layers
    assert [node.name for node in layers if node.name.startswith("= ")] == ["= wte"]  # a penalty is none


@pytest.mark.slow
def test_two_networks_in_one_step_are_two_clusters():
    graph = viz.trace(lambda gen, disc, x: gen(x) + disc(x), cnn(), Cnn(nnx.Rngs(1)), IMAGES)
    assert {node.scope for node in graph.layers} == {("gen",), ("disc",), ()}
    assert graph.total_params == 2 * viz.trace(cnn(), IMAGES).total_params


def test_constants_are_no_parameters():
    table, mask, matrix = jnp.ones((5, 4)), jnp.tril(jnp.ones((5, 5))), jnp.ones((4, 4))

    def attend(x):
        x = x * table + jnp.arange(4.0)[None]
        return jax.nn.softmax(jnp.where(mask > 0, x @ x.T, -1e9)) @ x

    x = m.Spec((5, 4), f32)
    graph = viz.trace(lambda x: attend(x) @ matrix, x)  # of what it holds, a layer reads the matrix
    assert (graph.total_params, graph.total_constants) == (16, 20 + 25)
    assert "gt" not in [node.op for node in graph.layers]
    graph = viz.trace(lambda params, x: attend(x) @ matrix @ params["w"], {"w": matrix}, x)
    assert (graph.total_params, graph.total_constants) == (16, 20 + 25 + 16)  # parameters come as an argument
    twice = viz.trace(lambda x: jax.jit(lambda x: x * table)(x) + jax.jit(lambda x: x - table)(x), x)
    assert twice.total_constants == 20


def apply(params, x, mode, scale=2, act=None):
    x = x @ params["w"] * scale
    return (act or jax.nn.relu)(x) if mode == "act" else x


PARAMS, DATA = {"w": m.Spec((3, 3), f32)}, m.Spec((2, 3), f32)


@pytest.mark.parametrize(
    ("fn", "static"),
    [
        (apply, {}),
        (jax.jit(apply, static_argnums=(2,), static_argnames=("scale", "act")), {"scale": 0.5}),
        (jax.jit(apply, static_argnames=("mode", "scale")), {"scale": 3}),
    ],
)
def test_what_is_no_array_is_a_part_of_the_function(fn, static):
    graph = viz.trace(fn, PARAMS, DATA, "act", **static)
    assert [node.op for node in graph.layers] == ["FullyConnected", "Activation"]
    assert [node.name for node in graph.inputs] == ["x"]
    assert [node.op for node in viz.trace(fn, PARAMS, DATA, "none", **static).layers] == ["FullyConnected"]


def test_functions_flags_and_none_may_be_arguments_or_in_trees():
    named = viz.trace(lambda p, x, flag, none: p["act"](x) if flag else x, {"act": jnp.tanh}, DATA, True, None)
    assert [node.detail for node in named.layers] == ["tanh"]
    assert viz.trace(apply, PARAMS, DATA, "act", act=jnp.tanh).layers[-1].detail == "tanh"
    number = viz.trace(lambda params, x: x * params["scale"], {"scale": 2.0}, DATA)
    assert number.total_params == 1  # a number in a tree is an array


def test_a_module_that_is_called_again_is_a_second_cluster_and_one_that_goes_on_is_not():
    params = {"enc": {"a": {"w": m.Spec((4, 4), f32)}, "b": {"w": m.Spec((4, 4), f32)}}, "out": (m.Spec((4, 4), f32),)}
    x = m.Spec((3, 4), f32)

    def goes_on(params, x):
        return jnp.tanh(x @ params["enc"]["a"]["w"]) @ params["enc"]["b"]["w"]

    def encode(params, x):
        return jnp.tanh(x @ params["a"]["w"]) @ params["b"]["w"]

    def again(params, x, y):
        return encode(params["enc"], x) @ params["out"][0] + encode(params["enc"], y)

    assert [node.scope for node in viz.trace(goes_on, params, x).layers] == [("enc",)] * 3  # not "enc (2)"
    graph = viz.trace(again, params, x, x)
    assert [(node.scope, node.name) for node in graph.layers] == [
        (("enc",), "a"), (("enc",), "tanh0"), (("enc",), "b"), ((), "out.0"),
        (("enc (2)",), "a 2"), (("enc (2)",), "tanh1"), (("enc (2)",), "b 2"), ((), "add0"),
    ]  # fmt: skip
    pairs = {"first": (m.Spec((4, 4), f32), m.Spec((4,), f32))}
    named = viz.trace(lambda params, x: x @ params["first"][0] + params["first"][1][None], pairs, x)
    assert [node.name for node in named.layers] == ["first"]


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="b")(jnp.tanh(nn.Dense(4, name="a")(x)))


class NnxTower(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


class NnxTwins(nnx.Module):
    def __init__(self, rngs):
        self.tower, self.head = NnxTower(rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, y):
        return self.head(self.tower(x) + self.tower(y))


def _linen_twins():
    class Twins(nn.Module):
        @nn.compact
        def __call__(self, x, y):
            tower = Tower(name="tower")
            return nn.Dense(1, name="head")(tower(x) + tower(y))

    x = m.Spec((3, 4), f32)
    return Twins().apply, jax.eval_shape(Twins().init, jax.random.key(0), x, x), x, x


def _plain_twins():
    def tower(params, x):
        return jnp.tanh(x @ params["a"]["w"]) @ params["b"]["w"]

    def twins(params, x, y):
        return (tower(params["tower"], x) + tower(params["tower"], y)) @ params["head"]["w"]

    w, x = m.Spec((4, 4), f32), m.Spec((3, 4), f32)
    return twins, {"tower": {"a": {"w": w}, "b": {"w": w}}, "head": {"w": w}}, x, x


def _nnx_twins():
    x = m.Spec((3, 4), f32)
    return NnxTwins(nnx.Rngs(0)), x, x


@pytest.mark.parametrize("make", [_linen_twins, _nnx_twins, _plain_twins])
def test_a_module_that_is_called_twice_in_a_row_is_two_clusters(make):
    """The two calls were in one frame, which tangled their arrows."""
    fn, *args = make()
    scopes = [node.scope[-1] if node.scope else "" for node in viz.trace(fn, *args).layers]
    around = "Twins" if make is _linen_twins else ""
    assert scopes == ["tower"] * 3 + ["tower (2)"] * 3 + [around] * 2


def test_a_module_that_reads_its_parameters_in_a_loop_is_called_once():
    def cell(params, h, x):
        return jnp.tanh(x @ params["wx"] + h @ params["wh"])

    def rnn(params, xs):
        h = jnp.zeros((2, 4))
        for x in xs:
            h = cell(params["rnn"], h, x)
        return h @ params["head"]["w"]

    w = m.Spec((4, 4), f32)
    args = {"rnn": {"wx": w, "wh": w}, "head": {"w": w}}, [m.Spec((2, 4), f32)] * 3
    for repeats in (True, False):
        found = viz.trace(rnn, *args, repeats=repeats)
        assert {node.scope[:1] for node in found.layers} == {("rnn",), ()}


def test_a_bias_that_is_added_apart_from_its_product_has_its_own_name():
    """It was called as the product, "fc1 2"."""

    def fn(params, x):
        for layer in params.values():
            x = jnp.tanh(jnp.sin(x @ layer["w"]) + layer["b"][None])
        return x

    layer = {"w": m.Spec((4, 4), f32), "b": m.Spec((4,), f32)}
    graph = viz.trace(fn, {"fc1": layer, "fc2": layer}, m.Spec((3, 4), f32), repeats=False)
    assert {node.name: node.params for node in graph.layers if node.params} == {
        "fc1": 16, "fc1/b": 4, "fc2": 16, "fc2/b": 4,
    }  # fmt: skip


def test_parameters_in_a_store_have_the_names_that_they_were_given_with():
    params = {"blocks": [{"w": jnp.ones((3, 3)), "b": jnp.ones(3)} for _ in range(2)], "head": {"w": jnp.ones((3, 1))}}

    def loss_fn(params, batch, rng):
        x = batch["x"]
        for block in params["blocks"]:
            x = jnp.tanh(x @ block["w"] + block["b"][None])
        return ((x @ params["head"]["w"]) ** 2).mean(), {}

    store = kv.from_params(params, optimizer=optax.sgd(0.1))
    state = train.create_state(store, 0, devices=jax.devices()[:1])
    batch = {"x": m.Spec((4, 3), f32)}
    graph = viz.trace(train.make_train_step(loss_fn), state, batch)
    shown = {node.name: node.params for node in graph.layers if node.params}
    assert shown == {"blocks.0": 12, "blocks.1": 12, "head": 3}
    assert graph.sizes.trained == {f"state.store.values[{key}]" for key in store.values}
    spoken = viz.trace(lambda store, x: x @ kv.to_params(store)["head"]["w"], store, batch["x"])
    assert [node.name for node in spoken.layers] == ["head"]


def test_blocks_of_haiku_that_take_keys_are_one_repeat():
    """`next_rng_key` splits a key for two blocks, and takes one of the two for each."""

    def net(x):
        for number in range(4):
            hidden = hk.Linear(8, name=f"up{number}")(x)
            hidden = hk.dropout(hk.next_rng_key(), 0.1, jax.nn.gelu(hidden))
            x = x + hk.Linear(4, name=f"down{number}")(hidden)
        return x

    model, x = hk.transform(net), jax.ShapeDtypeStruct((3, 4), jnp.float32)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    graph = viz.trace(model.apply, jax.eval_shape(model.init, rng, x), rng, x)
    assert {node.repeat for node in graph.layers} == {4}
    assert [node.op for node in graph.layers].count("Dropout") == 1


def _linen_stack(depth):
    """A module of many plain layers, whose parameters Flax keeps in the collection "params"."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            for number in range(depth):
                x = nn.relu(nn.Conv(8 + number // 10, (3,), kernel_dilation=1 + number % 7)(x))
            return x

    x = m.Spec((2, 64, 3), f32)
    return Stack().apply, jax.eval_shape(Stack().init, jax.random.key(0), x), x


def test_no_frame_has_the_name_of_a_collection_or_an_argument():
    """What the layers of a part share is read from their modules, not from the printed name of a parameter."""
    closed = viz.trace(*_linen_stack(30), max_nodes=10)
    ranges = [re.fullmatch(r"Conv_(\d+)-(\d+)", node.name) for node in closed.layers]
    assert [n for found in ranges for n in range(int(found[1]), int(found[2]) + 1)] == list(range(30))
    shown = {part for node in viz.plot_network(*_linen_stack(30)).whole().nodes for part in (*node.scope, node.op)}
    assert any(re.fullmatch(r"Conv_0-\d+", part) for part in shown)
    assert not [part for part in shown if "params" in part or "variables" in part]


def test_a_parameter_is_named_by_its_modules_on_its_oval():
    fn, variables, x = _linen_stack(1)
    kernel, _ = viz.trace(fn, variables, x).weights
    assert (kernel.name, kernel.detail) == ("variables['params']['Conv_0']['kernel']", "Conv_0/kernel")
    source = viz.plot_network(fn, variables, x, hide_weights=False).source
    assert ">Conv_0/bias<" in source
    assert ">params/" not in source
    layers = [{"w": m.Spec((3, 2), f32)}]
    (weight,) = viz.trace(lambda layers, x: x @ layers[0]["w"], layers, m.Spec((4, 3), f32)).weights
    assert weight.detail == "[0].w"  # nothing names it


@pytest.mark.parametrize("name", ["conditioner", "remat_block", "whiles", "custom_head", "branch_left"])
def test_a_module_whose_name_begins_like_a_loop_is_a_module(name):
    def net(params, x):
        with jax.named_scope(name):
            x = jnp.tanh(x @ params["a"]) @ params["b"]
        return jax.lax.scan(lambda c, _: (jnp.sin(c) @ params["b"], None), x, None, length=3)[0]

    plot = viz.plot_network(net, {"a": m.Spec((4, 4), f32), "b": m.Spec((4, 4), f32)}, m.Spec((2, 4), f32))
    (frame,) = [line for line in plot.source.splitlines() if f'label="{name}"' in line]
    assert "dashed" not in frame
    (loop,) = [line for line in plot.source.splitlines() if 'label="scan ×3"' in line]
    assert "dashed" in loop


def test_a_scale_beside_modules_has_its_own_name():
    """It was called "layers", and a gate beside `q` was called as the module of both."""

    def fn(params, x):
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["up"]["w"]) @ layer["down"]["w"] * layer["gamma"][None]
        return x * jax.nn.sigmoid(x @ params["mix"]["q"]) * params["mix"]["scale"][None]

    w, v = m.Spec((4, 4), m.f32), m.Spec((4,), m.f32)
    layers = [{"up": {"w": w}, "down": {"w": w}, "gamma": v} for _ in range(3)]
    graph = viz.trace(fn, {"layers": layers, "mix": {"q": w, "scale": v}}, w)
    assert [node.name for node in graph.layers if node.params] == ["up", "down", "gamma", "q", "scale"]


def test_a_layer_has_its_name_beside_a_closed_box_of_that_name():
    """It was called "head 2"."""

    def body(p, x):
        return head(p["head"], jnp.tanh(x @ p["in"]))

    def head(p, x):
        return jnp.tanh(x @ p["up"]) @ p["down"]

    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    params = {"body": {"in": square, "head": {"up": square, "down": square}}, "head": square}
    graph = viz.trace(lambda p, x: body(p["body"], x) @ p["head"], params, square, depth=1)
    assert [(node.name, node.op) for node in graph.layers][-2:] == [("head 2", "head"), ("head", "FullyConnected")]


def test_a_product_of_two_params_has_their_names_in_the_module_that_it_is_in():
    """It had no name, and no frame."""

    def cross(p, queries, x):
        return (queries @ p["q"]) @ (x @ p["k"]).T @ (x @ p["v"])

    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    params = {"latents": square, "cross": dict.fromkeys("qkv", square), "out": square}
    graph = viz.trace(lambda p, x: cross(p["cross"], p["latents"], x) @ p["out"], params, square)
    assert [(node.name, node.scope) for node in graph.layers if node.params == 32] == [("latents, q", ("cross",))]
