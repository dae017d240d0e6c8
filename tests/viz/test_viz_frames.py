"""Frames and names: each layer in the frame of its module, counts on the block that repeats, no number of a copy."""

import re
import shutil

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from viz_models import Spec, f32, i32, training_step

from jaxpar import viz

X, IDS, SQUARE = Spec((2, 5, 16), f32), Spec((2, 5), i32), Spec((16, 16), f32)
PIECE = re.compile(r"[+,\-–] *(×\d+)?$|^ *×")  # of a label


def scopes(graph, op):
    return [node.scope for node in graph.layers if node.op == op]


def check_names(graph):
    """No frame is a bare count or a piece of a name. No name in a repeated frame has the number of a copy."""
    assert not [scope for node in graph.nodes for scope in node.scope if PIECE.search(scope)]
    repeats = dict(graph.scopes)
    inside = [node for node in graph.layers for n in range(len(node.scope)) if node.scope[: n + 1] in repeats]
    assert not [node.name for node in inside if re.search(r"(layer|block|stage)[._]?\d", node.name)]
    return graph


def linen(body, *args):
    """A module with a head behind what `body` makes of the arguments."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return nn.Dense(4, name="head")(body(*args))

    return Net().apply, jax.eval_shape(Net().init, jax.random.key(0), *args), *args


def seen(ids):
    return (ids > 0)[:, None, :]


def attend(q, k, v, mask):
    return jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2), -1e9)) @ v


def _linen_mask():
    class Cross(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            q, k, v = (nn.Dense(16, name=name)(x) for name in "qkv")
            return nn.Dense(16, name="out")(attend(q, k, v, mask))

    return linen(lambda x, ids: x + Cross(name="attn")(x, seen(ids)), X, IDS)


def _nnx_mask():
    class Mix(nnx.Module):
        def __init__(self, rngs):
            self.q, self.k, self.v = (nnx.Linear(16, 16, rngs=rngs) for _ in range(3))

        def __call__(self, x, mask):
            return attend(self.q(x), self.k(x), self.v(x), mask)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.attn, self.head = Mix(rngs), nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x, ids):
            return self.head(self.attn(x, seen(ids)))

    return Net(nnx.Rngs(0)), X, IDS


def _plain_mask():
    def mix(params, x, mask):
        with jax.named_scope("mixing"):  # no module's name
            return attend(x @ params["q"], x @ params["k"], x @ params["v"], mask)

    def net(params, x, ids):
        mask = seen(ids)
        return mix(params["attn"], x, mask) @ params["head"]["w"]

    return net, {"attn": dict.fromkeys("qkv", SQUARE), "head": {"w": SQUARE}}, X, IDS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [_linen_mask, _nnx_mask, _plain_mask])
def test_a_mask_that_the_caller_compares_leaves_attention_in_its_module(make):
    graph = check_names(viz.trace(*make()))
    (scope,) = scopes(graph, "Attention")
    assert "attn" in scope
    assert {node.scope for node in graph.layers if node.name in ("q", "k", "v")} == {scope}
    assert not any("(2)" in part for node in graph.layers for part in node.scope)


def test_zeros_of_a_module_of_its_own_leave_a_convolution_in_its_module():
    class Zeros(hk.Module):
        def __call__(self, x):
            return jnp.pad(x, ((0, 0), (2, 0), (0, 0)))

    class Stage(hk.Module):
        def __call__(self, x):
            return jax.nn.relu(hk.LayerNorm(-1, True, True)(hk.Conv1D(16, 3, padding="VALID", name="causal")(x)))

    model = hk.without_apply_rng(hk.transform(lambda x: Stage(name="b")(Zeros()(Stage(name="a")(Zeros()(x))))))
    graph = check_names(viz.trace(model.apply, jax.eval_shape(model.init, jax.random.key(0), X), X, repeats=False))
    assert scopes(graph, "Convolution") == [("a",), ("b",)]
    assert [node.name for node in graph.layers if node.op == "Convolution"] == ["a/causal", "b/causal"]


def _linen_blocks():
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            for number in range(4):
                x = x + nn.silu(nn.Dense(16, name=f"block_{number}_mix")(x))
            return x

    return linen(lambda x: Decoder(name="decoder")(x), X)


def _nnx_blocks():
    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.block = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for one in self.block:
                x = x + nnx.silu(one(x))
            return x

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.decoder, self.head = Decoder(rngs), nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(self.decoder(x))

    return Net(nnx.Rngs(0)), X


def _haiku_blocks():
    class Decoder(hk.Module):
        def __call__(self, x):
            for number in range(4):
                x = x + jax.nn.silu(hk.Linear(16, name=f"block{number}")(x))
            return x

    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4, name="head")(Decoder()(x))))
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), X), X


def _equinox_blocks():
    class Decoder(eqx.Module):
        block: list

        def __call__(self, x):
            for one in self.block:
                x = x + jax.nn.silu(one(x))
            return x

    class Net(eqx.Module):
        decoder: Decoder
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(self.decoder(x))

    linear = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    return Net(Decoder([linear] * 4), eqx.nn.Linear(16, 4, key=jax.random.key(0))), Spec((16,), f32)


BLOCKS = [(_linen_blocks, "block_mix"), (_nnx_blocks, "block"), (_haiku_blocks, "block"), (_equinox_blocks, "block")]


@pytest.mark.parametrize(("make", "name"), BLOCKS, ids=[make.__name__ for make, _ in BLOCKS])
def test_the_count_is_on_the_block_not_on_the_module_that_holds_nothing_else(make, name):
    fn, *args = make()
    plot = viz.plot_network(fn, *args)
    graph = check_names(plot.network)
    ((path, count),) = graph.scopes
    assert (path[-2:], count) == (("decoder", f"{name} ×4"), 4)
    assert "label=decoder" in plot.source.replace('"', "")  # both are frames
    assert f"{name} ×4" in plot.source
    repeated = [node.name for node in graph.layers if node.params and node.repeat == 4]
    assert repeated == [name]


def test_a_number_inside_the_name_of_a_module_goes():
    def net(params, x):
        for number in range(3):
            stage = params[f"stage{number}_mlp"]
            x = jnp.sin(jnp.tanh(x @ stage["up2"]) @ stage["down"])
        return x

    graph = check_names(viz.trace(net, {f"stage{n}_mlp": {"up2": SQUARE, "down": SQUARE} for n in range(3)}, X))
    assert graph.scopes == ((("stage_mlp ×3",), 3),)
    assert [node.name for node in graph.layers if node.params] == ["up2", "down"]


def test_a_number_that_is_no_copys_stays():
    """A block's own conv1 and conv2, and copies that begin at 2."""

    def net(params, x):
        for layer in params["layers"]:
            x = x + jnp.tanh(jnp.tanh(x @ layer["conv1"]) @ layer["conv2"])
        return x

    first = {"conv1": Spec((16, 32), f32), "conv2": Spec((32, 16), f32)}
    graph = check_names(viz.trace(net, {"layers": [first, *[dict.fromkeys(first, SQUARE)] * 3]}, X))
    assert graph.scopes == ((("layers.1–3 ×3",), 3),)
    assert [node.name for node in graph.layers if node.repeat == 3 and node.params] == ["layers/conv1", "layers/conv2"]


def test_a_label_of_kinds_is_no_name_with_a_number():
    """Two stages of other widths, each of blocks that nothing names."""

    def net(params, x):
        for stage in params["stages"]:
            for a, b in zip(stage["a"], stage["b"], strict=True):
                x = x + jnp.sin(jax.nn.relu(x @ a) @ b)
            x = x @ stage["down"]
        return x

    sizes = [(16, 8), (8, 4)]
    stages = [
        {"a": [Spec((n, 2 * n), f32)] * 3, "b": [Spec((2 * n, n), f32)] * 3, "down": Spec((n, out), f32)}
        for n, out in sizes
    ]
    for most in (None, 6, 2, 1):
        check_names(viz.trace(net, {"stages": stages}, X, max_nodes=most))
        check_names(viz.trace(jax.grad(lambda p, x: net(p, x).sum()), {"stages": stages}, X, max_nodes=most))


def _linen_step():
    """Two modules that hold nothing but repeats, and their update."""

    class Tower(nn.Module):
        layers: int

        @nn.compact
        def __call__(self, x):
            for number in range(self.layers):
                x = x + nn.Dense(16, name=f"layer_{number}")(jnp.sin(nn.LayerNorm()(x)))
            return x

    apply, params, _ = linen(lambda x: Tower(4, name="decoder")(jnp.cos(Tower(3, name="encoder")(x))), X)
    tx = optax.adam(1e-3)
    step = training_step(tx, lambda params, x: (apply(params, x) ** 2).mean())
    return step, params, jax.eval_shape(tx.init, params), X


def _words(plot):
    return [word.strip() for word in re.findall(r">([^<>\n]+)</text>", plot.pipe("svg", encoding="utf-8"))]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")
def test_a_step_has_the_names_and_frames_of_the_network():
    fn, *args = _linen_step()
    step, network = _words(viz.plot_step(fn, *args)), _words(viz.plot_network(fn, *args))
    frames = {"FullyConnected + 3 ×3", "FullyConnected + 3 ×4"}
    assert {word for word in step if "×" in word} == frames & set(network) == frames
    names = {"layer", "head", "LayerNorm", "sin", "cos", "add", "Adam"}
    assert names <= set(step)
    assert not [word for word in step if re.fullmatch(r"[a-z]+\d+|(.+) \1 .*", word)]
    assert re.fullmatch(r"\d+ arrays", step[step.index("Adam") + 1])


# A module that a function calls again and again: the function is not the module, and what it adds is not in it.


def _plain_field():
    def field(params, y, t):
        y = jnp.tanh((y + t) @ params["first"]["w"])
        return jnp.tanh(y @ params["second"]["w"])

    params = {"head": {"w": SQUARE}, "field": {"first": {"w": SQUARE}, "second": {"w": SQUARE}}}
    return field, params, lambda params: params["field"]


class _NnxField(nnx.Module):
    def __init__(self):
        self.first, self.second = (nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2))

    def __call__(self, y, t):
        for layer in (self.first, self.second):
            y = jnp.tanh(layer(y + t))
        return y


class _NnxNet(nnx.Module):
    def __init__(self):
        self.head, self.field = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0)), _NnxField()


def _nnx_field():
    return lambda field, y, t: field(y, t), _NnxNet(), lambda net: net.field


class _EqxField(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, y, t):
        return jnp.tanh(self.second(jnp.tanh(self.first(y + t))))


def _eqx_field():
    layers = [eqx.nn.Linear(16, 16, use_bias=False, key=jax.random.key(0)) for _ in range(3)]
    call = lambda field, y, t: jax.vmap(field, (0, None))(y, t)  # noqa: E731
    return call, {"head": layers[2], "field": _EqxField(*layers[:2])}, lambda net: net["field"]


@pytest.mark.parametrize("make", [_plain_field, _nnx_field, _eqx_field])
@pytest.mark.parametrize("loop", [False, True])
def test_a_function_that_calls_one_module_again_is_not_the_module(make, loop):
    """All of a Runge-Kutta step was one frame "field". Its repeat was called as the layers, "conv ×3"."""
    call, net, of = make()

    def rk4(field, y, t):
        k1 = call(field, y, t)
        k2 = call(field, y + 0.5 * k1, t + 0.5)
        k3 = call(field, y + 0.5 * k2, t + 0.5)
        k4 = call(field, y + k3, t + 1.0)
        return y + (k1 + 2 * k2 + 2 * k3 + k4) / 6

    def apply(net, y):
        y = jax.lax.fori_loop(0, 5, lambda i, y: rk4(of(net), y, 1.0 * i), y) if loop else rk4(of(net), y, 0.0)
        head = net["head"] if isinstance(net, dict) else net.head
        if isinstance(head, eqx.Module):
            return jax.vmap(head)(y)
        return y @ head["w"] if isinstance(head, dict) else head(y)

    around = ("scan ×5",) if loop else ()
    graph = viz.trace(apply, net, Spec((4, 16), f32), repeats=False)
    calls = [(*around, name) for name in ("field", "field (2)", "field (3)", "field (4)")]
    assert [scope for scope in dict.fromkeys(scopes(graph, "FullyConnected")) if scope] == calls
    assert all(scope in [around, ()] for scope in scopes(graph, "add"))
    assert ((*around, "field ×3"), 3) in viz.trace(apply, net, Spec((4, 16), f32)).scopes


def test_a_module_that_is_called_twice_beside_each_other_is_two_frames():
    """Two inputs through one encoder, as in a contrastive loss. The distance is in neither."""

    def encoder(params, x):
        return jnp.tanh(jnp.tanh(x @ params["a"]["w"]) @ params["b"]["w"])

    def distance(params, x, y):
        return jnp.square(encoder(params["encoder"], x) - encoder(params["encoder"], y)).sum()

    def loss(params, x, y):
        return distance(params, x @ params["stem"], y @ params["stem"])

    params = {"stem": SQUARE, "encoder": {"a": {"w": SQUARE}, "b": {"w": SQUARE}}}
    graph = viz.trace(loss, params, Spec((4, 16), f32), Spec((4, 16), f32))
    assert list(dict.fromkeys(node.scope for node in graph.layers)) == [(), ("encoder",), ("encoder (2)",)]
    assert scopes(graph, "Loss") == [()]


def test_a_function_that_calls_a_helper_again_is_its_module():
    """Where a module has no modules inside, what reads its params again and again are steps of it."""

    def linear(w, x):
        return x @ w

    def cell(params, h, x):
        return jnp.tanh(linear(params["h"], h) + linear(params["x"], x))

    def rnn(params, x):
        h = cell(params, jnp.zeros_like(x), x)
        h = cell(params, 2 * h, x + 1)
        return jnp.cos(h)

    def attention(params, x):
        q, k, v = (linear(params["q"], x), linear(params["k"], x), linear(params["v"], x))
        return jnp.cos(linear(params["out"], jnp.sin(q @ k.T) @ v))

    def apply(params, x):
        return linear(params["head"], attention(params["attention"], rnn(params["rnn"], x)))

    params = {"rnn": {"h": SQUARE, "x": SQUARE}, "attention": dict.fromkeys(["q", "k", "v", "out"], SQUARE)}
    graph = viz.trace(apply, {**params, "head": SQUARE}, Spec((4, 16), f32))
    assert {node.scope for node in graph.layers} == {("rnn",), ("attention",), ()}
    assert scopes(graph, "cos") == [("rnn",), ("attention",)]
    assert [node.name for node in graph.layers if node.scope == ()] == ["head"]


def _inner_scan(params, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ params["a"] @ params["b"]), None), x, length=5)[0]


def _inner_remat(params, x):
    return jax.checkpoint(lambda params, x: jnp.tanh(x @ params["a"]) @ params["b"])(params, x)


@pytest.mark.parametrize(("inner", "frame"), [(_inner_scan, "scan ×5"), (_inner_remat, "remat")])
def test_copies_of_a_loop_and_steps_beside_it_are_called_as_their_module(inner, frame):
    """The loop keeps its own count."""

    def apply(params, x):
        for layer in params["layers"]:
            x = x + 2 * jnp.sin(inner(layer, x))
        return x @ params["head"]

    graph = viz.trace(apply, {"layers": [{"a": SQUARE, "b": SQUARE}] * 4, "head": SQUARE}, Spec((4, 16), f32))
    assert [scope[:2] for scope in scopes(graph, "FullyConnected")] == [("layers ×4", frame)] * 2 + [()]
    assert scopes(graph, "sin") == [("layers ×4",)]
