"""The table of layers."""

import io
import itertools
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import optax
import pytest
import viz_models as m
from viz_models import summary

from jaxpar import train, viz
from jaxpar._core.text import columns
from jaxpar.models import lenet
from jaxpar.viz._draw.table import rows, to_html, to_text


def test_the_table_of_lenet():
    """Its layers are MXNet's: test_lenet_is_the_layers_of_mxnets_plot."""
    text = summary(lenet.apply, m.LENET, m.IMAGES)
    rows = [line for line in text.splitlines() if "float32" in line]
    for row, node in zip(rows, m.traced("lenet").nodes, strict=True):
        assert (node.detail if node.op == "Activation" else node.op) in row
        shape, params = re.search(r" ([\dx]+) float32 +([\d,]+)", row).groups()
        assert shape == "x".join(map(str, node.shape))
        assert int(params.replace(",", "")) == node.params
    assert "Total params: 129,068\n" in text
    assert f"Total FLOPs: {viz.trace(lenet.apply, m.LENET, m.IMAGES).total_flops:,}\n" in text
    assert re.search(r"relu0 .* conv1$", text, re.M)


def test_scalars_vectors_and_shared_weights():
    text = summary(m.factorization_loss, *m.factorization(), m.Spec((32,), m.f32))
    assert re.search(r"loss0 \(Loss squared error\) +scalar float32", text)
    assert "Total params: 168,000" in text
    assert "Total params: 9\n" in summary(lambda w, x: x @ w @ w, jnp.ones((3, 3)), jnp.ones((2, 3)))


def test_every_layer_is_in_the_table_repeats_once():
    args = m.transformer, m.transformer_params(4), m.TOKENS
    assert "q (FullyConnected 64) ×4" in summary(*args)
    assert summary(*args).count("LayerNorm") == 3
    assert summary(*args, repeats=False).count("LayerNorm") == 9


def numbers_of(text):
    """The footer: each total by its name."""
    return {name: float(number.replace(",", "")) for name, number in re.findall(r"^(\S.*): ([\d,.]+)$", text, re.M)}


def bytes_of(*trees):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))


def test_the_totals_are_those_of_the_leaves():
    tx = optax.adam(1e-3)
    state, step = jax.eval_shape(tx.init, m.LENET), m.training_step(tx, lambda p, batch: m.lenet_loss(p, *batch))
    args = m.LENET, state, (m.IMAGES, m.LABELS)
    sizes, total = viz.trace(step, *args).sizes, 129068
    assert (sizes.params, sizes.optimizer) == (bytes_of(m.LENET), bytes_of(state))
    assert sizes.inputs == bytes_of(m.IMAGES, m.LABELS)
    shown = numbers_of(summary(step, *args))
    assert shown["Total params"] == shown["Trainable params"] == total
    assert shown["Optimizer state (MB)"] == round(bytes_of(state) / 1e6, 2)
    assert shown["Params size (MB)"] == round(bytes_of(m.LENET) / 1e6, 2)
    graph = viz.trace(m.transformer, m.transformer_params(2), m.TOKENS)
    outputs = [node.repeat * m.Spec(node.shape, node.dtype).size * 4 for node in graph.layers]
    assert graph.sizes.forward == sum(outputs)
    assert viz.trace(m.transformer_scanned, m.scanned_params(3), m.TOKENS).sizes.params == bytes_of(m.scanned_params(3))


def frozen_step(freeze):
    """A step of SGD, or its like, in which conv2 is frozen in one of the usual ways."""
    labels = {name: "frozen" if name == "conv2" else "free" for name in m.LENET}
    tx = optax.multi_transform({"frozen": optax.set_to_zero(), "free": optax.sgd(0.1)}, labels)

    def loss(params, *batch):
        if freeze == "stop_gradient":
            params = {**params, "conv2": jax.lax.stop_gradient(params["conv2"])}
        return m.lenet_loss(params, *batch)

    def by_optax(params, *batch):
        updates, _ = tx.update(jax.grad(loss)(params, *batch), jax.eval_shape(tx.init, params))
        return optax.apply_updates(params, updates)

    def by_keys(params, *batch):
        grads = jax.grad(lambda free: loss({**params, **free}, *batch))({k: params[k] for k in params if k != "conv2"})
        return params | jax.tree.map(lambda p, g: p - 0.1 * g, {k: params[k] for k in grads}, grads)

    return {"stop_gradient": jax.value_and_grad(loss), "optax": by_optax, "keys": by_keys}[freeze]


@pytest.mark.parametrize("freeze", ["stop_gradient", "optax", "keys"])
def test_what_a_step_does_not_train_is_not_trainable(freeze):
    shown = numbers_of(text := summary(frozen_step(freeze), m.LENET, m.IMAGES, m.LABELS))
    assert (shown["Trainable params"], shown["Non-trainable params"]) == (129068 - 25050, 25050)
    assert re.search(r"conv2 \(Conv.* \(25,050\) ", text)


OPTIONS = {
    "a chain": {},
    "local": {"kind": "local"},
    "sharded": {"kind": "sharded"},
    "late": {"kind": "dist_async"},
    "later": {"kind": "dist_async", "staleness": 2},
    "2bit": {"compression": {"type": "2bit"}},
    "skip": {"nonfinite": "skip"},
    "accumulate": {"accumulate": 2},
    "jit": {"engine": "jit"},
    "clip": {"grad_transform": optax.clip_by_global_norm(1.0)},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.filterwarnings("ignore:train step. the loss does not depend on 'b3'")
def test_the_trained_params_are_the_same_on_any_number_of_devices(options, count):
    """Small gradients travel as one array, but for that of "b3", which are zeros."""

    def loss(params, batch, rng):
        detached = params | ({} if "dist_async" in options.values() else {"b3": jax.lax.stop_gradient(params["b3"])})
        return sum(jnp.sin(batch * bias.sum()).mean() for bias in detached.values()), {}

    params = {f"b{number}": jnp.ones(24) for number in range(8)}
    tx = optax.sgd(0.1) if options else optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    state, step = train.start(params, tx, loss, devices=jax.devices()[:count], **options)
    shown = numbers_of(summary(step, state, jnp.ones(8)))
    trained = 8 if "dist_async" in options.values() else 7
    assert (shown["Trainable params"], shown["Non-trainable params"]) == (trained * 24, (8 - trained) * 24)


def test_frozen_by_pattern():
    text = summary(lenet.apply, m.LENET, m.IMAGES, frozen=["conv2", "*/bias"])
    assert numbers_of(text)["Non-trainable params"] == 25050 + 20 + 128 + 10
    assert re.search(r"conv2 .* \(25,050\) ", text)
    assert re.search(r"conv1 .* 200 ", text)


def test_state_constants_and_unused_parameters_are_named():
    table = jnp.arange(6.0).reshape(2, 3)
    params = {"w": jnp.ones((3, 3)), "u": jnp.ones(7)}
    text = summary(lambda p, x: jnp.sin(x @ p["w"]) + table, params, jnp.ones((2, 3)))
    assert "Unread, not counted: 7\n" in text
    assert "Constants: 6\n" in text
    assert "Total params: 9\n" in text


def test_running_statistics_are_state():
    import flax.linen as nn

    net = nn.Sequential([nn.Dense(5), nn.BatchNorm(use_running_average=True)])
    x = m.Spec((2, 3), m.f32)
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    shown = numbers_of(summary(net.apply, variables, x))
    assert (shown["Total params"], shown["Trainable params"], shown["Non-trainable params"]) == (30, 30, 0)
    assert shown["Non-trainable state"] == 10
    assert viz.trace(net.apply, variables, x).sizes.state == 40


def scoped(depth):
    """A tree of modules, two in each."""

    def fn(params, x, path=()):
        with jax.named_scope("".join(map(str, path)) or "net"):
            if len(path) == depth:
                return jnp.tanh(x @ params["".join(map(str, path))])
            return fn(params, jnp.sin(fn(params, x, (*path, 0))), (*path, 1))

    names = ["".join(path) for path in itertools.product("01", repeat=depth)]
    return fn, {name: m.Spec((4, 4), m.f32) for name in names}, m.Spec((2, 4), m.f32)


@pytest.mark.parametrize("model", ["scoped", "haiku", "transformer"])
def test_a_module_has_the_sums_of_what_is_in_it(model):
    graph = viz.trace(*scoped(3), max_nodes=None) if model == "scoped" else m.traced(model)
    found, modules = rows(graph), 0
    for at, row in enumerate(found):
        inside = list(itertools.takewhile(lambda other, level=row.level: other.level > level, found[at + 1 :]))
        layers = [other for other in inside if other.layer]
        if not row.layer:
            modules += 1
            for field in ("params", "flops", "trained"):
                assert getattr(row, field) == sum(getattr(other, field) for other in layers)
    assert modules > (5 if model == "scoped" else 0)
    assert {row.layer for row in found} - {""} == {node.name for node in graph.nodes}
    closed = rows(graph, depth=0)
    first = min(row.level for row in closed if row.params)
    assert sum(row.params for row in closed if row.level == first) == graph.total_params
    assert len(closed) < len(found)


LONG = "n" * 200


def long_names(params, x):
    with jax.named_scope(LONG):
        x = jnp.tanh(x @ params[LONG]["漢" * 100])
    return jnp.sin(x) @ params[LONG]["w"]


LONG_NAMES = long_names, {LONG: {"漢" * 100: m.Spec((4, 4), m.f32), "w": m.Spec((4, 4), m.f32)}}, m.Spec((2, 4), m.f32)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "model", ["lenet", "transformer", "gradient", "long", pytest.param("resnet", marks=pytest.mark.slow)]
)
def test_no_line_is_longer_than_the_width(model, width):
    graph = viz.trace(*LONG_NAMES) if model == "long" else m.traced(model)
    text = to_text(graph, width)
    assert max(map(columns, text.splitlines())) <= width
    rule = text.splitlines()[0]
    heads = text.splitlines()[1]
    end = heads.index("Param #") + len("Param #")
    assert all(columns(line[:end]) > end or line[end - 1].isdigit() or line[end - 1] == ")" for line in
               text.split("=" * len(rule))[1].strip("\n").splitlines())  # fmt: skip


def test_a_terminal_without_the_letters_of_the_tree():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    viz.print_summary(*scoped(2), file=file)
    file.seek(0)
    assert "|-" in (text := file.read())
    assert "`-" in text


def test_html_is_escaped_and_complete():
    def fn(params, x):
        with jax.named_scope("a<b>"):
            return x @ params["w<1>"]

    graph = viz.trace(fn, {"w<1>": m.Spec((4, 4), m.f32)}, m.Spec((3, 4), m.f32))
    page = to_html(graph)
    assert page.count("role='row'") == 1 + len(graph.nodes)
    assert "<1>" not in page
    assert "16 parameters" in page


@pytest.mark.slow
def test_modules_of_the_html_open_and_close():
    """A module is around its layers. Of a long table only the first levels are open."""
    for blocks, is_open in ((2, True), (12, False)):
        fn, args = m.flax_transformer(blocks)
        graph = viz.trace(fn, *args, max_nodes=None, repeats=False)
        page, found = to_html(graph), rows(graph)
        modules = [row for row in found if not row.kind]
        assert page.count("<details") == page.count("</details>") == page.count("<summary") == len(modules)
        assert (page.count("<details open=''>") == len(modules)) == is_open
        assert page.count("role='row'") == 1 + len(found)
        ET.fromstring(page)  # every tag is closed in its place


def test_columns_of_memory():
    """Sums over the layers are those of the graph. Kept is what the backward pass reads, also in a loop."""

    def loss(params, x, remat):
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.square(jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["w"])[0]).mean()

    args = {"w": jnp.ones((3, 8, 8))}, jnp.ones((16, 8))
    graphs = {
        remat: viz.trace(jax.value_and_grad(lambda p, x, remat=remat: loss(p, x, remat)), *args)
        for remat in (False, True)
    }
    for graph in graphs.values():
        assert sum(node.output_bytes for node in graph.layers if node.is_backward) == graph.sizes.backward
        assert sum(node.output_bytes for node in graph.layers if not node.is_backward) == graph.sizes.forward
    inside = {remat: sum(node.kept_bytes for node in graph.layers) for remat, graph in graphs.items()}
    assert inside[False] >= 3 * 16 * 8 * 4  # the result of each tanh
    assert inside[True] < inside[False]
    text = summary(jax.value_and_grad(lambda p, x: loss(p, x, False)), *args, memory=True, width=160)
    assert re.search("FLOPs +Forward B +Backward B +Kept B +Previous Layer", text)
    assert "Kept B" not in summary(lambda p, x: loss(p, x, False), *args)
    assert "Kept B" in to_html(graphs[False], memory_columns=True)
