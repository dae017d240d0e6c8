"""What one box is: labels that only fit what they say, and branches that stay apart."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P
from viz_models import Spec, f32

from jaxpar import viz

X, W = Spec((3, 4), f32), Spec((1, 4), f32)


def ops(fn, *args, **kwargs):
    return [node.op for node in viz.trace(fn, *args, **kwargs).layers]


def labels(fn, *args):
    return [(node.op, node.detail) for node in viz.trace(fn, *args).layers]


def branch(w, x):
    return jnp.cos(jnp.sin(x) * w) + x


def nested(w, x):
    return branch(w, x) + branch(2 * w, x)


def wrapped(w, x):
    return branch(w, x)


@pytest.mark.parametrize("fn", [branch, nested, wrapped])
def test_branches_of_one_function_stay_apart(fn):
    def comprehension(params, x):
        a, b = [fn(w, x) for w in params]
        return a + b

    def one_line(params, x):
        return fn(params[0], x) + fn(params[1], x)

    def loop(params, x):
        total = 0.0
        for w in params:
            total = total + fn(w, x)
        return total

    for network in (comprehension, one_line, loop):
        graph = viz.trace(network, [W, W], X)
        assert [node.op for node in graph.layers] == [fn.__name__, fn.__name__, "add"]
        first, second, total = graph.layers
        assert (first.weights, second.weights) == (("params[0]",), ("params[1]",))
        assert {(e.source, e.target) for e in graph.edges} >= {(first.name, total.name), (second.name, total.name)}
    assert ops(lambda x, y: sum([branch(1.0, v) for v in (x, y)]), X, X, params_argnums=None).count("branch") == 2


def test_the_leaves_of_an_optimizer_are_one_node():
    params = {"a": X, "b": W, "c": X}
    assert labels(lambda p, g: jax.tree.map(lambda p, g: p - 0.1 * g, p, g), params, params) == [("sub", "×3")]


def test_calls_that_go_on_behind_another_step_are_no_leaves():
    """They were one box "helper ×6" of the first call, and the steps of the others."""

    def helper(x):
        return jnp.sin(x) * 2 + jnp.cos(x)

    def network(x):
        for number in range(6):
            x = helper(x)
            x = jnp.cos(x) if number % 2 else jnp.cumsum(x, axis=0)
        return x

    layers = viz.trace(network, X, params_argnums=None, repeats=False).layers
    assert [(node.op, node.equations) for node in layers] == [
        ("helper", 4),
        ("cumsum", 1),
        ("helper", 4),
        ("cos", 1),
    ] * 3


PMEANS = [("pmean", "over data ×2, 60 B"), ("pmean", "over data, 4 B")]


@pytest.mark.parametrize(("check_vma", "sent"), [(False, PMEANS), (True, [("psum", "over data ×2, 60 B"), *PMEANS])])
def test_a_mean_over_devices_is_one_node_beside_the_sum_that_differentiation_adds(check_vma, sent):
    def loss(params, x):
        return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)

    def local(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.lax.pmean(grads, "data"), jax.lax.pmean(value, "data")

    mesh = Mesh(jax.devices()[:4], ("data",))
    specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P()), "check_vma": check_vma}
    params = {"w": Spec((4, 3), f32), "b": Spec((3,), f32)}
    graph = viz.trace(jax.shard_map(local, mesh=mesh, **specs), params, Spec((8, 4), f32))
    assert [(node.op, node.detail) for node in graph.layers if "over" in node.detail] == sent
    between = [edge for edge in graph.edges if edge.source.startswith("p") and edge.target.startswith("pmean")]
    assert not between or check_vma
    assert sum(node.kind == "FullyConnected" for node in graph.layers) == 2


def split(x):
    return jnp.sin(x) + x * x


def attention(x):
    return jnp.cos(x) * x + jnp.sin(x)


def layer_norm(x):
    return x * 2 + jnp.sin(x)


def softmax(x):
    return x / jnp.abs(x).sum(-1, keepdims=True)


def dropout(x):
    return x[:, 1:]


def relu(x):
    return x @ x.T


def mse(x):
    return jnp.sum(x**2)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (split, ["split"]),
        (attention, ["attention"]),
        (layer_norm, ["layer_norm"]),
        (softmax, ["softmax"]),
        (dropout, ["slice"]),
        (relu, ["MatMul"]),
        (mse, ["square", "sum"]),
    ],
)
def test_a_name_is_not_enough(fn, expected):
    assert ops(lambda x: fn(x), X) == expected


def _window(x, reduce, start):
    return jax.lax.reduce_window(x, start, reduce, (2, 2), (1, 2), "VALID")


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.split(x, 2, axis=1), [("split", "")]),
        (lambda x: jnp.maximum(x, 1), [("maximum", "")]),
        (lambda x: jnp.maximum(x.astype(jnp.int32), 0), [("maximum", "")]),
        (lambda x: x.sum() / 2.0, [("sum", "")]),
        (lambda x: 12 / x.sum(), [("sum", ""), ("div", "")]),
        (lambda x: 1 / (2 + jnp.exp(-x)), [("exp", ""), ("div", "")]),
        (lambda x: x * jax.nn.sigmoid(x[::-1]), [("rev", ""), ("Activation", "sigmoid"), ("mul", "")]),
        (lambda x: jnp.maximum(x, 2 * x), [("maximum", "")]),
        (lambda x: x - jnp.tanh(x), [("Activation", "tanh"), ("sub", "")]),
        (lambda x: jnp.concatenate([x[::2], x[1:2:2]]), [("slice", ""), ("slice", ""), ("Concat", "")]),
        (lambda x: x.sum() / 12, [("mean", "")]),
        (lambda x: ((x - x.mean()) ** 2).mean(), [("mean", "sub, square")]),
        (lambda x: ((x[:, None] - 2 * x[None]) ** 2).sum(-1), [("sum", "sub, square")]),
        (lambda x: jax.nn.logsumexp(x, -1).mean(), [("logsumexp", ""), ("mean", "")]),
        (lambda x: x.reshape(3, 2, 2).mean(-1), [("mean", "")]),
        (lambda x: _window(x, jax.lax.add, 0.0) / 4, [("Pooling", "avg, 2x2/1x2")]),
        (lambda x: _window(x, jax.lax.add, 0.0) / 7, [("Pooling", "sum, 2x2/1x2")]),
        (lambda x: _window(x, jax.lax.mul, 1.0), [("reduce_window", "")]),
        (lambda x: (x[:, ::2] + x[:, 1::2]) / 3, [("Pooling", "sum, 2/2")]),
        (lambda x: x[:2:2, ::2] + x[1::2, 1::2], [("Elementwise", "slice, add")]),
        (
            lambda x: -(jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(),
            [("Softmax", ""), ("LogSoftmax", ""), ("mul", ""), ("sum", "")],
        ),
    ],
)
def test_what_only_resembles_a_layer_is_none(fn, expected):
    assert labels(fn, X) == expected


def test_an_offset_after_a_softmax_is_no_bias_of_it():
    assert ops(lambda w, x: jax.nn.softmax(x) + w, W, X) == ["Softmax", "add"]


def test_an_associative_scan_is_one_node_with_one_gradient():
    def scan(x):
        return jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, x), axis=1)[1]

    assert ops(scan, X) == ["AssociativeScan"]
    assert ops(lambda x: scan(scan(x)), X) == ["AssociativeScan", "AssociativeScan"]
    backward = [op for op in ops(jax.grad(lambda x: scan(x).sum()), X) if op.endswith("(backward)")]
    assert backward.count("AssociativeScan (backward)") == 1


def test_a_fourier_transform_has_its_kind_and_length():
    assert labels(lambda x: jnp.fft.rfft(x), X) == [("FFT", "rfft, 4")]
    assert labels(lambda x: jnp.fft.ifft2(x), X) == [("FFT", "ifft, 3x4")]


def mean_of(x, *axes):
    return x.mean(axes, keepdims=True)


def scaled(x, *axes):
    return (x - mean_of(x, *axes)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


IMAGES, TOKENS, SHORT = Spec((2, 8, 6, 16), f32), Spec((2, 8, 16), f32), Spec((2, 8, 16), jnp.bfloat16)
VOLUMES = Spec((2, 3, 4, 5, 16), f32)
SCALES = {name: Spec((1, 1, 16), f32) for name in "gbmv"}


def layer_b(p, x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return p["b"] + p["g"] * (centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5))


def layer_c(p, x):
    mean = jnp.sum(x, -1, keepdims=True) / 16
    variance = jnp.mean(x**2, -1, keepdims=True) - mean**2
    return (x - mean) * ((variance + 1e-5) ** -0.5 * (1 + p["g"])) + p["b"]


def layer_d(p, x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)


def layer_e(p, x):
    y = x.astype(f32)
    y = (y - mean_of(y, -1)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * p["g"].astype(x.dtype)


def rms_a(p, x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["g"]


def group(p, x):
    y = x.reshape(2, 8, 6, 4, 4)
    y = (y - mean_of(y, 1, 2, 4)) / jnp.sqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * p["g"][None] + p["b"][None]


def stored(p, x):
    scale = jax.lax.rsqrt(p["v"] + 1e-5) * p["g"]
    x = jax.nn.relu(x)
    return x * scale[None] + (p["b"] - p["m"] * scale)[None]


LAYER, RMS, OVER_IMAGES = ("LayerNorm", ""), ("RMSNorm", ""), ("InstanceNorm", "")
UNIT = ("Normalization", "unit length")
NORMS = {
    "by var": (
        lambda p, x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["g"] + p["b"],
        TOKENS,
        LAYER,
    ),
    "by rsqrt": (layer_b, TOKENS, LAYER),
    "by squares": (layer_c, TOKENS, LAYER),
    "by std": (layer_d, TOKENS, LAYER),
    "bfloat16": (layer_e, SHORT, LAYER),
    "rms": (rms_a, TOKENS, RMS),
    "rms by sqrt": (lambda p, x: p["g"] * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6), TOKENS, RMS),
    "group": (group, IMAGES, ("GroupNorm", "4 groups")),
    "instance": (lambda p, x: scaled(x, 1, 2) * p["g"][None], IMAGES, OVER_IMAGES),
    "instance of volumes": (lambda p, x: scaled(x, 2, 3, 4) * p["g"][None, None], VOLUMES, OVER_IMAGES),
    "batch": (lambda p, x: scaled(x, 0, 1, 2) * p["g"][None], IMAGES, ("BatchNorm", "")),
    "batch, stored": (stored, IMAGES, ("BatchNorm", "")),
    "unit length": (lambda p, x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), TOKENS, UNIT),
}


@pytest.mark.parametrize(("fn", "x", "label"), NORMS.values(), ids=NORMS)
def test_a_normalization_is_one_node_however_written(fn, x, label):
    found = labels(lambda p, x: jnp.sin(fn(p, x)), SCALES, x)
    assert [(op, detail) for op, detail in found if op != "Activation"] == [label, ("sin", "")]
    gradient = ops(jax.grad(lambda p, x: jnp.sin(fn(p, x)).sum().astype(f32), argnums=(0, 1)), SCALES, x)
    assert gradient.count(f"{label[0]} (backward)") == 1


def test_running_statistics_that_read_a_normalization_leave_its_scale_in_it():
    def fn(p, x):
        mean, variance = x.mean((0, 1), keepdims=True), x.var((0, 1), keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["g"] + p["b"]
        return jnp.sin(y), 0.9 * p["m"] + 0.1 * mean, 0.9 * p["v"] + 0.1 * variance

    graph = viz.trace(fn, SCALES, TOKENS)
    assert (graph.layers[0].op, graph.layers[0].params) == ("BatchNorm", 2 * 16)
    assert [node.op for node in graph.layers].count("sin") == 1


def test_a_residual_stays_outside_of_a_normalization_and_a_condition_too():
    assert ops(lambda p, x: x + rms_a(p, x), SCALES, TOKENS) == ["RMSNorm", "add"]
    conditioned = ops(lambda p, x, c: layer_d(p, x) * jnp.tanh(c), SCALES, TOKENS, TOKENS)
    assert sorted(conditioned) == ["Activation", "LayerNorm", "mul"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x: jax.nn.relu(1 - jnp.sqrt(x.var(0) + 1e-4)).mean(),
        lambda p, x: (x * p["g"]).sum(-1) / jnp.sqrt((x * x).sum(-1)),
        lambda p, x: x * jnp.minimum(1.0, 1.0 / jnp.sqrt((x * x).sum())),
        lambda p, x: x / jnp.sqrt(p["v"] + 1e-5),
        lambda p, x: x * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6),
        lambda p, x: x + p["g"] / jnp.sqrt(sum((w * w).sum() for w in p.values())),
    ],
)
def test_what_only_has_a_root_is_no_normalization(fn):
    assert not any("Norm" in op for op in ops(fn, SCALES, TOKENS))


HEADS = Spec((2, 8, 4, 16), f32)
FEW, CACHE = Spec((2, 8, 2, 16), f32), Spec((2, 32, 4, 16), f32)
PADDING, POSITION = Spec((2, 8), jnp.int32), Spec((), jnp.int32)


def attend(q, k, v, mask=None, cap=None):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def causal(q, k, v):
    return attend(q, k, v, jnp.tril(jnp.ones((8, 8), bool))[None, None], cap=50.0)


def own_softmax(q, k, v):
    scores = (q * 0.25).transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return (weights.astype(q.dtype) @ v.transpose(0, 2, 1, 3)).reshape(2, 4, 128)


def padded(q, k, v, padding):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.where(padding[:, None, None, :] > 0, 0.0, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def cached(q, k, v, keys, values, position):
    keys = jax.lax.dynamic_update_slice(keys, k, (0, position, 0, 0))
    values = jax.lax.dynamic_update_slice(values, v, (0, position, 0, 0))
    seen = jnp.arange(32)[None, None, None, :] <= position + jnp.arange(8)[None, None, :, None]
    return attend(q, keys, values, seen), keys, values


def grouped(q, k, v):
    q = q.reshape(2, 8, 2, 2, 16)
    weights = jax.nn.softmax(jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / 4.0, -1)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(2, 8, 4, 16)


def repeated(q, k, v):
    return attend(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2))


def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


ATTENTION = [
    (attend, (HEADS,) * 3),
    (causal, (HEADS,) * 3),
    (own_softmax, (HEADS,) * 3),
    (padded, (HEADS, HEADS, HEADS, PADDING)),
    (cached, (HEADS, HEADS, HEADS, CACHE, CACHE, POSITION)),
    (grouped, (HEADS, FEW, FEW)),
    (repeated, (HEADS, FEW, FEW)),
    (library, (HEADS,) * 3),
]


@pytest.mark.parametrize(("fn", "args"), ATTENTION, ids=[fn.__name__ for fn, _ in ATTENTION])
def test_attention_is_one_node_however_written(fn, args):
    graph = viz.trace(fn, *args, params_argnums=None)
    assert [node.op for node in graph.layers] == ["Attention"]
    products = 2 * 2 * args[0].size * (32 if fn is cached else 8)
    assert products <= graph.total_flops <= 1.3 * products

    def loss(*args):
        return jnp.sum(jax.tree.leaves(fn(*args))[0] ** 2)

    gradient = viz.trace(jax.grad(loss, argnums=(0, 1, 2)), *args, params_argnums=None)
    assert [node.op for node in gradient.layers].count("Attention (backward)") == 1


def test_a_softmax_between_products_that_is_read_twice_is_no_attention():
    def fn(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), weights

    assert ops(fn, HEADS, HEADS, HEADS) == ["FullyConnected", "Softmax", "MatMul"]


SINES, WHOLE, TURNS = Spec((1, 8, 1, 8), f32), Spec((1, 8, 1, 16), f32), Spec((1, 8, 1, 8), jnp.complex64)


def halves(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_half(x, cos, sin):
    return x * cos + jnp.concatenate([-x[..., 8:], x[..., :8]], -1) * sin


def interleaved(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def complex_pairs(x, turns):
    pairs = x.reshape(2, 8, 4, 8, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
    return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)


def lax_complex(x, turns):
    turned = jax.lax.complex(x[..., ::2], x[..., 1::2]) * turns
    return jnp.stack([jnp.real(turned), jnp.imag(turned)], -1).reshape(x.shape)


ROTARY = [
    (halves, (SINES, SINES)),
    (rotate_half, (WHOLE, WHOLE)),
    (interleaved, (SINES, SINES)),
    (complex_pairs, (TURNS,)),
    (lax_complex, (TURNS,)),
]


@pytest.mark.parametrize(("fn", "tables"), ROTARY, ids=[fn.__name__ for fn, _ in ROTARY])
def test_a_rotary_embedding_is_one_node_however_written(fn, tables):
    assert ops(fn, HEADS, *tables, params_argnums=None) == ["RoPE"]
    both = ops(lambda q, k, *tables: (fn(q, *tables), fn(k, *tables)), HEADS, HEADS, *tables, params_argnums=None)
    assert both == ["RoPE", "RoPE"]
    gradient = ops(jax.grad(lambda x, *tables: jnp.sum(fn(x, *tables) ** 2)), HEADS, *tables, params_argnums=None)
    assert gradient.count("RoPE (backward)") == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, cos, sin: jnp.concatenate([x[..., :8] * cos, x[..., 8:] * sin], -1),
        lambda x, cos, sin: x[..., :8] * jax.nn.sigmoid(x[..., 8:]),
        lambda x, cos, sin: jnp.concatenate([x[..., :8] * cos + x[..., 8:] * sin, x[..., 8:] * cos], -1),
    ],
)
def test_halves_that_are_not_turned_are_no_rotary_embedding(fn):
    assert "RoPE" not in ops(fn, HEADS, SINES, SINES, params_argnums=None)


GATES = {"wx": Spec((16, 64), f32), "wh": Spec((16, 64), f32), "b": Spec((1, 64), f32)}
ROW = Spec((2, 16), f32)


def lstm(p, x, h, c):
    i, f, g, o = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, -1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru(p, x, h):
    r, z, n, _ = jnp.split(x @ p["wx"] + p["b"], 4, -1)
    hr, hz, hn, _ = jnp.split(h @ p["wh"], 4, -1)
    z = jax.nn.sigmoid(z + hz)
    return (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h


def test_the_gates_of_a_recurrent_cell_are_one_node():
    assert ops(lstm, GATES, ROW, ROW, ROW) == ["FullyConnected", "FullyConnected", "add", "LSTM"]
    assert ops(gru, GATES, ROW, ROW).count("GRU") == 1
    assert len(ops(gru, GATES, ROW, ROW)) <= 5

    def scan(p, rows):
        def step(state, x):
            h, c = lstm(p, x, *state)
            return (h, c), h

        return jax.lax.scan(step, (jnp.zeros((2, 16)), jnp.zeros((2, 16))), rows)[1].sum()

    gradient = ops(jax.grad(scan), GATES, Spec((8, 2, 16), f32))
    assert (gradient.count("LSTM"), gradient.count("LSTM (backward)")) == (1, 1)


def selective_scan(p, x, step, b, c):
    decay = jnp.exp(step[..., None] * -jnp.exp(p["a"])[None, None])
    added = step[..., None] * b[:, :, None] * x[..., None]
    _, h = jax.lax.associative_scan(lambda s, t: (s[0] * t[0], t[0] * s[1] + t[1]), (decay, added), axis=1)
    return (h * c[:, :, None]).sum(-1)


def test_a_selective_scan_is_a_node_by_its_name():
    x, b = Spec((2, 8, 32), f32), Spec((2, 8, 4), f32)
    graph = viz.trace(selective_scan, {"a": Spec((32, 4), f32)}, x, x, b, b)
    assert [(node.op, node.params) for node in graph.layers] == [("SelectiveScan", 128)]


def _nnx():
    net = nnx.eval_shape(lambda: nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0)))
    parts, state = nnx.split(net)
    return lambda state, x: nnx.merge(parts, state)(x, x), state, TOKENS


def _equinox():
    net = eqx.nn.MultiheadAttention(4, 16, key=jax.random.key(0))
    return lambda x: net(x, x, x, mask=jnp.tril(jnp.ones((8, 8), bool))), Spec((8, 16), f32)


@pytest.mark.parametrize("library", [_nnx, _equinox])  # others: test_transformers_of_the_libraries
def test_attention_of_the_libraries(library):
    layers = [op for op in ops(*library()) if op != "Flatten"]
    assert layers == ["FullyConnected"] * 3 + ["Attention", "FullyConnected"]


def test_parameters_that_are_joined_for_one_product_are_its_weights():
    """Query, key and value in one product; a bias of parts."""

    def attention(params, x):
        kernel = jnp.concatenate([params[name]["kernel"] for name in "qkv"], axis=-1)
        bias = jnp.concatenate([params[name]["bias"] for name in "qkv"])
        q, k, v = jnp.split(x @ kernel + bias[None], 3, axis=-1)
        return jax.nn.softmax(q @ k.T) @ v

    params = {name: {"kernel": Spec((8, 8), f32), "bias": Spec((8,), f32)} for name in "qkv"}
    for fn in (attention, jax.grad(lambda params, x: attention(params, x).sum())):
        graph = viz.trace(fn, params, Spec((5, 8), f32))
        (joined,) = [node for node in graph.layers if node.op == "FullyConnected"]
        assert (joined.name, joined.detail, joined.params) == ("q, k, v", "24", 3 * (64 + 8))
        assert not [node for node in graph.layers if node.kind == "Concat"]


def test_parameters_that_are_joined_for_two_products_are_a_layer():
    def net(params, x):
        kernel = jnp.concatenate([params["a"], params["b"]], axis=-1)
        return jnp.tanh(x @ kernel) @ kernel.T

    params = {name: Spec((8, 8), f32) for name in "ab"}
    assert ops(net, params, Spec((5, 8), f32))[0] == "Concat"


@pytest.mark.parametrize("kind", [jax.random.key, jax.random.PRNGKey])
def test_one_of_several_keys_is_no_layer(kind):
    """jax 0.12 takes keys apart by `unstack`, older versions by slices. The picture is the same."""

    def net(rng, x):
        first, second, third = jax.random.split(rng, 3)
        keys = jax.random.split(third, 4)
        x = jnp.tanh(x + jax.random.normal(first, x.shape))
        x = jnp.tanh(x + jax.random.uniform(second, x.shape))
        return jnp.tanh(x + jax.random.normal(keys[2], x.shape))

    found = labels(net, jax.eval_shape(lambda: kind(0)), Spec((4, 4), f32))
    assert found.count(("Random", "split")) == 2
    assert {detail for op, detail in found if op == "Random"} == {"split", "normal", "uniform"}
    assert {op for op, _ in found} == {"Random", "add", "Activation"}


def test_a_dilated_causal_convolution_is_one_layer():
    def wave(params, x):
        for number, kernel in enumerate(params):
            step = 2**number
            padded = jnp.pad(x, ((0, 0), (step, 0), (0, 0)))
            options = {"rhs_dilation": (step,), "dimension_numbers": ("NHC", "HIO", "NHC")}
            x = jnp.tanh(jax.lax.conv_general_dilated(padded, kernel, (1,), "VALID", **options))
        return x

    found = labels(wave, [Spec((2, 4, 4), f32)] * 3, Spec((1, 100, 4), f32))
    details = [detail for op, detail in found if op == "Convolution"]
    assert details == ["2/1, 4", "2/1, 4, dilated 2", "2/1, 4, dilated 4"]
    assert len(found) == 6


def test_zeros_that_others_read_or_other_values_are_no_part_of_a_convolution():
    def net(params, x):
        padded = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))
        ones = jnp.pad(x, ((0, 0), (1, 0), (0, 0)), constant_values=1.0)
        conv = lambda x: jax.lax.conv_general_dilated(x, params, (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"))  # noqa: E731
        return conv(padded), jnp.tanh(padded), conv(ones)

    assert ops(net, Spec((2, 4, 4), f32), Spec((1, 100, 4), f32)).count("pad") == 2


def test_what_is_behind_a_loop_is_no_part_of_a_layer_in_it():
    """The difference is of each pass, the squares are of the last one."""

    def solve(params, b):
        x = jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x - jnp.tanh(x @ params), b)
        return (x**2).sum()

    graph = viz.trace(solve, Spec((4, 4), f32), Spec((4,), f32))
    assert [(node.op, node.scope) for node in graph.layers][-3:] == [("sub", ("while",)), ("square", ()), ("sum", ())]

    def scanned(params, xs):
        _, ys = jax.lax.scan(lambda state, x: (state, x @ params["w"]), 0, xs)
        return ys + params["b"]

    params = {"w": Spec((4, 4), f32), "b": Spec((1, 1, 4), f32)}
    graph = viz.trace(scanned, params, Spec((5, 3, 4), f32))
    assert [(node.op, node.scope) for node in graph.layers] == [("FullyConnected", ("scan ×5",)), ("add", ())]


def test_a_rule_of_differentiation_without_a_name():
    """It has no name of the function around it, and is no layer's gradient, least of all its own."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, grad: (jnp.clip(grad, -1, 1),))

    def loss(params, xs):
        def cell(state, x):
            state = clipped(jnp.tanh(x @ params["x"] + state @ params["h"]))
            return state, state

        _, states = jax.lax.scan(cell, jnp.zeros((4, 8)), xs)
        return (states**2).mean()

    plot = viz.plot_network(jax.grad(loss), {"x": Spec((3, 8), f32), "h": Spec((8, 8), f32)}, Spec((10, 4, 3), f32))
    found = {node.op for node in plot.network.layers}
    assert not {"loss (backward)", "f (backward)"} & found
    pairs = [line.split(" -> ") for line in plot.source.splitlines() if 'dir="none"' in line]
    assert pairs
    assert not [pair for pair in pairs if pair[0].strip() == pair[1].split(" [")[0].strip()]


def _frozen_steps():
    """A running mean, a momentum by hand and a soft update, where some parameters are frozen or not used."""

    def net(x):
        x = jax.lax.stop_gradient(hk.Linear(8, name="stem")(x))
        for number in range(3):
            x = jnp.tanh(hk.Linear(8, name=f"mix{number}")(x))
        return hk.get_parameter("unused", (3,), init=jnp.zeros) * 0 + x.sum()

    model = hk.without_apply_rng(hk.transform(net))
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    tx = optax.adamw(1e-3)

    def mean(params, average, opt_state, x):
        grads = jax.grad(lambda params: model.apply(params, x).sum())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, params)

    def trained(params, average, opt_state, x):  # one module of five
        def loss(head):
            return model.apply(params | {"mix2": head}, x).sum()

        head = jax.tree.map(lambda w, g: w - 0.1 * g, params["mix2"], jax.grad(loss)(params["mix2"]))
        new = params | {"mix2": head}
        return new, opt_state, jax.tree.map(lambda a, w: a + 0.1 * (w - a), average, new)

    return [(fn, params, params, jax.eval_shape(tx.init, params), X) for fn in (mean, trained)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_parameter_without_a_gradient_does_not_unfold_a_tree(number):
    fn, *args = _frozen_steps()[number]
    leaves = len(jax.tree.leaves(args[0]))
    graph = viz.trace(fn, *args)
    averages = [node for node in graph.layers if any(name.startswith("output[2]") for name in node.outputs)]
    assert [len(node.outputs) for node in averages] == [leaves]


ACTIVATIONS = {
    **{name: [getattr(jax.nn, name)] for name in ("elu", "relu", "relu6")},
    "gelu": [
        jax.nn.gelu,
        lambda x: x / 2 * (1 + jnp.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
        lambda x: jax.lax.erfc(-x * 2**-0.5) * x / 2,
        lambda x: x * jax.scipy.stats.norm.cdf(x),
    ],
    "hard_swish": [
        lambda x: x * jnp.minimum(jnp.maximum(x + 3, 0), 6) * (1 / 6),
        lambda x: x * jnp.clip(x / 6 + 0.5, 0, 1),
    ],
    "leaky_relu": [
        jax.nn.leaky_relu,
        lambda x: jnp.maximum(x, 0.2 * x),
        lambda x: jnp.where(x < 0, 0.1 * x, x),
        lambda x: jax.nn.relu(x) - 0.01 * jax.nn.relu(-x),
    ],
    "mish": [lambda x: jnp.tanh(jnp.log(1 + jnp.exp(x))) * x, lambda x: x * jnp.tanh(jax.nn.softplus(x))],
    "softplus": [lambda x: jnp.log(1 + jnp.exp(x)), lambda x: jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))],
    "squared_relu": [lambda x: jnp.maximum(0, x) ** 2, lambda x: jax.nn.relu(x) * jax.nn.relu(x)],
    "sigmoid": [lambda x: jnp.exp(x) / (jnp.exp(x) + 1), lambda x: (1 + jnp.tanh(x / 2)) / 2],
    "silu": [lambda x: x / (1 + jnp.exp(-x)), lambda x: jax.nn.sigmoid(x) * x],
    "swish": [lambda x: x * jax.nn.sigmoid(1.702 * x), lambda x: x / (1 + jnp.exp(-1.5 * x))],
}


@pytest.mark.parametrize(("name", "fn"), [(name, fn) for name, spelled in ACTIVATIONS.items() for fn in spelled])
def test_an_activation_is_one_node_however_written(name, fn):
    for x in (X, Spec((3, 4), jnp.bfloat16)) if name != "gelu" else (X,):
        assert labels(lambda x: jnp.sin(fn(x)), x) == [("Activation", name), ("sin", "")]
    layers = {"a": Spec((4, 4), f32), "b": Spec((4, 4), f32)}
    gradient = ops(jax.grad(lambda p, x: (fn(x @ p["a"]) @ p["b"]).sum()), layers, X)
    assert [op for op in gradient if "Activation" in op] == ["Activation", "Activation (backward)"]
    assert len(gradient) == 7


VECTOR, SQUARES = Spec((64,), f32), Spec((2, 9, 9, 4), f32)


@pytest.mark.parametrize(
    ("fn", "args", "label"),
    [
        (lambda r: (r - r.mean()) * jax.lax.rsqrt(r.var() + 1e-8), (VECTOR,), ("Normalization", "mean and variance")),
        (lambda r: r / jnp.sqrt((r * r).mean() + 1e-6), (VECTOR,), ("Normalization", "root mean square")),
        (lambda r: r / jnp.linalg.norm(r), (VECTOR,), UNIT),
        (lambda p: p["g"] / jnp.linalg.norm(p["g"]), ({"g": VECTOR},), UNIT),
        (lambda p, r: (r - r.mean()) / r.std() * p["g"], ({"g": VECTOR}, VECTOR), ("LayerNorm", "")),
        (lambda p, r: r / jnp.sqrt((r * r).mean() + 1e-6) * p["g"], ({"g": VECTOR}, VECTOR), ("RMSNorm", "")),
    ],
)
def test_a_vector_that_is_standardized_is_no_layer_with_parameters(fn, args, label):
    assert labels(fn, *args) == [label]


@pytest.mark.parametrize(
    ("fn", "x", "detail"),
    [
        (lambda x: nn.avg_pool(x, (3, 3), (1, 1), "SAME", count_include_pad=False), SQUARES, "avg, 3x3/1x1"),
        (lambda x: hk.avg_pool(x, (1, 5, 5, 1), (1, 2, 2, 1), "SAME"), SQUARES, "avg, 5x5/2x2"),
        (eqx.nn.AvgPool2d(2, 1, padding=1), Spec((4, 8, 8), f32), "avg, 2x2/1x1"),
    ],
    ids=["linen", "haiku", "equinox"],
)
def test_an_average_at_the_border_is_one_node(fn, x, detail):
    assert ("Pooling", detail) in labels(lambda x: jnp.tanh(fn(x)), x)
    assert "div" not in ops(fn, x)


def test_windows_that_become_channels_are_one_node():
    """Patches that a Swin transformer merges, and samples of a sound."""

    def merge(params, x):
        corners = [x[:, row::2, column::2] for column in range(2) for row in range(2)]
        return jnp.concatenate(corners, -1) @ params["w"]

    patches = labels(merge, {"w": Spec((16, 8), f32)}, Spec((2, 8, 8, 4), f32))
    assert patches == [("SpaceToDepth", "2x2"), ("FullyConnected", "8")]
    samples = labels(lambda x: jnp.concatenate([x[:, n::3] for n in range(3)], -1), Spec((2, 9, 4), f32))
    assert samples == [("SpaceToDepth", "3")]
    assert "SpaceToDepth" not in ops(lambda x: jnp.concatenate([x[:, ::2], x[:, 1::2]], 1), Spec((2, 8, 4), f32))


def expert(p, x):
    order = jnp.argsort(x @ p["gate"])
    return jnp.zeros_like(x).at[order // 2].add(jax.nn.relu(x[order // 2] @ p["w"]))


def test_the_gradient_of_a_step_inside_of_jax_is_that_of_the_block_whose_values_it_reads():
    """Gathers of all blocks were the gradient of the last one's scatter, and the frames around them were wrong."""

    def loss(params, x):
        for p in params["blocks"]:
            x = x + expert(p, x)
        return jnp.sum(x**2)

    graph = viz.trace(
        jax.grad(loss), {"blocks": [{"w": Spec((8, 8), f32), "gate": Spec((8,), f32)}] * 3}, Spec((6, 8), f32)
    )
    assert {node.scope for node in graph.layers} == {(), ("blocks ×3",)}
    assert [node.repeat for node in graph.layers if node.kind == "scatter-add"] == [3, 3]


def test_what_only_a_gradient_reads_of_a_branch_is_part_of_its_layer():
    """It was a layer of its own: the derivative of tanh."""

    def loss(p, x, flag):
        return jnp.sum(jax.lax.cond(flag, lambda x: jnp.tanh(x @ p["up"]), lambda x: x @ p["down"], x))

    weights = {"up": Spec((4, 4), f32), "down": Spec((4, 4), f32)}
    graph = viz.trace(jax.grad(loss), weights, X, Spec((), jnp.bool_))
    names = [node.name for node in graph.layers if not node.is_backward and "cond" in node.scope]
    assert sorted(names) == ["cond0", "down", "tanh0", "up"]


def test_a_norm_in_a_loop_over_stacked_layers_has_its_scale():
    def fn(p, x):
        def layer(x, p):
            return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"][None] @ p["w"], None

        return jax.lax.scan(layer, x, p)[0]

    params = {"scale": Spec((3, 4), f32), "w": Spec((3, 4, 4), f32)}
    assert [(node.op, node.params) for node in viz.trace(fn, params, X).layers] == [
        ("RMSNorm", 12),
        ("FullyConnected", 48),
    ]


class Wave(eqx.Module):
    def score(self, x):
        return jnp.sin(x) * x + jnp.cos(x)


class Layer:
    def call(self, x):
        return jnp.sin(x) * x + jnp.cos(x)


def test_a_box_is_named_by_what_is_called_not_by_how():
    """They were called "equinox.BoundMethod" and "call"."""
    assert ops(lambda x: Wave().score(x), X) == ["score"]
    assert ops(lambda x: Layer().call(x), X) == ["Layer"]


def test_steps_of_one_kind_in_a_line_are_of_that_kind():
    def fn(x, key):
        a, b, c = jax.random.normal(first := jax.random.split(key)[0], (3,)), jax.random.uniform(first, (3,)), x[0, :3]
        return a * b * c

    assert labels(fn, X, jax.random.key(0))[0] == ("Random", "split, normal, uniform")


def test_a_product_of_groups_of_rows_is_a_layer():
    """It was called "ragged_dot_general"."""

    def fn(p, x, sizes):
        return jax.nn.relu(jax.lax.ragged_dot(x, p["up"], sizes))

    graph = viz.trace(fn, {"up": Spec((2, 4, 8), f32)}, X, Spec((2,), jnp.int32))
    assert [(node.name, node.op, node.detail) for node in graph.layers] == [
        ("up", "FullyConnected", "8, 2 groups"),
        ("relu0", "Activation", "relu"),
    ]


def test_a_norm_that_multiplies_by_one_over_the_root():
    def fn(p, x):
        return x * (1 / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) * (1 + p["scale"][None])

    assert [(node.op, node.params) for node in viz.trace(fn, {"scale": Spec((4,), f32)}, X).layers] == [("RMSNorm", 4)]


def test_what_equinox_says_about_an_array_is_no_layer():
    def fn(x):
        return jnp.sort(eqx.internal.nondifferentiable_backward(eqx.internal.nonbatchable(jnp.sort(x))))

    graph = viz.trace(fn, X)
    assert ([node.op for node in graph.layers], graph.uncounted) == (["sort", "sort"], ())


def test_the_params_of_each_task_are_one_update():
    """It said "1 array", the one whose shape was that of another array of the tasks."""

    def loss(p, x, y):
        return jnp.mean((jnp.tanh(x @ p["up"] + p["bias"][None]) @ p["down"] - y) ** 2)

    def adapted(p, x, y):
        return loss(jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x, y)), x, y)

    params = {"up": Spec((4, 8), f32), "bias": Spec((8,), f32), "down": Spec((8, 1), f32)}
    tasks = Spec((5, 3, 4), f32), Spec((5, 3, 1), f32)
    (update,) = (n for n in viz.trace(jax.vmap(adapted, (None, 0, 0)), params, *tasks).layers if n.op == "sub")
    assert update.detail == "3 arrays"
