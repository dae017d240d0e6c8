"""What large networks become: regions as scopes, names in boxes, loops, blocks that begin where a person would cut."""

import graphlib
import itertools
import re
from functools import partial

import gallery
import jax
import jax.numpy as jnp
import pytest
import viz_models as m
from jax.sharding import PartitionSpec as P
from test_viz_trace import check
from viz_models import f32

from jaxpar import viz
from jaxpar.mxnet._losses import softmax_output
from jaxpar.viz._draw import style
from jaxpar.viz._draw.extent import extent
from jaxpar.viz._draw.style import Options, join_sign
from jaxpar.viz._fold.cells import SENT
from jaxpar.viz._function import read
from jaxpar.viz._graph import BACKWARD, Node
from jaxpar.viz._layout.collapse import FEW_BOXES, close_until, collapse_scopes
from jaxpar.viz._layout.net import Draft, Net
from jaxpar.viz._page.blocks import tree
from jaxpar.viz._read.raw import Raw
from jaxpar.viz._trace import all_layers, close, whole_of

CONV = partial(jax.lax.conv_general_dilated, padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def convolve(w, x):
    return jax.nn.relu(CONV(x, w, (1, 1)))


def dense_net(join):
    """Two dense blocks of six and twelve layers, whose widths grow, so that nothing repeats."""
    params, width = {"stem": {"w": m.Spec((3, 3, 3, 8), m.f32)}}, 8
    for block, count in enumerate((6, 12)):
        for layer in range(count):
            sizes = {"w1": (1, 1, width, 16), "w2": (3, 3, 16, 4)}
            params[f"conv{block}_block{layer}"] = {name: m.Spec(size, m.f32) for name, size in sizes.items()}
            width += 4

    def apply(params, x):
        x = convolve(params["stem"]["w"], x)
        for block, count in enumerate((6, 12)):
            parts = [x]
            for layer in range(count):
                one = params[f"conv{block}_block{layer}"]
                new = convolve(one["w2"], convolve(one["w1"], x))
                parts = [*parts, new] if join == "list" else [x, new]
                x = jnp.concatenate(parts, -1)
        return x.mean((1, 2))

    return apply, params, m.Spec((2, 16, 16, 3), m.f32)


def test_regions_above_the_limit_have_the_names_of_their_parameters():
    graph = check(viz.trace(*dense_net("chain"), max_nodes=40))
    blocks = [*(f"conv0_block{n}" for n in range(6)), *(f"conv1_block{n}" for n in range(12))]
    assert [node.name for node in graph.layers if node.op != "Concat"] == ["stem", *blocks, "mean0"]
    assert {node.detail for node in graph.layers if node.name in blocks} == {"4 layers"}


@pytest.mark.parametrize("join", ["list", "chain"])
def test_dense_blocks_close_whole(join):
    graph = check(viz.trace(*dense_net(join), max_nodes=8))
    assert [node.name for node in graph.layers] == ["stem", "conv0_block0-5", "conv1_block0-11", "mean0"]
    assert graph["conv1_block0-11"].detail.endswith(" layers")
    assert graph.total_flops == viz.trace(*dense_net(join), max_nodes=None).total_flops


def test_regions_without_names_say_what_is_in_them():
    def fn(x):
        for width in range(30, 0, -1):
            x = x[:, :width] + jnp.tanh(jnp.sin(x[:, :width]) @ jnp.ones((width, width)))
        return x

    graph = check(viz.trace(fn, m.Spec((2, 40), m.f32), max_nodes=35))
    names = [node.op for node in graph.layers]
    assert 10 <= len(names) <= 35
    assert not any("..." in name or "…" in name for name in names)
    assert any(re.fullmatch(r"(\d+ )?\w+ \+ \d+", name) for name in names)


@pytest.mark.slow
def test_a_mask_for_all_blocks_does_not_hide_them():
    def fn(params, x, mask):
        kept = mask > 0
        for n in range(20):
            y = jnp.where(kept, x[:, : 30 - n] @ params[f"b{n}"]["w"], 0.0)
            x = x[:, : 30 - n] + jnp.tanh(y @ params[f"b{n}"]["v"])
        return x

    sizes = [30 - n for n in range(20)]
    params = {f"b{n}": {name: m.Spec((size, size), m.f32) for name in "wv"} for n, size in enumerate(sizes)}
    graph = check(viz.trace(fn, params, m.Spec((2, 30), m.f32), m.Spec((2, 1), m.f32), max_nodes=30))
    assert [node.name for node in graph.layers if re.fullmatch(r"b\d+", node.name)] == [f"b{n}" for n in range(20)]


def test_the_whole_net_has_regions_as_scopes_and_loses_nothing():
    fn, params, x = dense_net("chain")
    grad = jax.grad(lambda params, x: fn(params, x).sum())
    plain = viz.trace(grad, params, x, max_nodes=None)
    graph = check(whole_of(all_layers(read(grad, (params, x), {}, 0)[0], True, ())))
    assert [(n.name, n.op, n.flops) for n in graph.nodes] == [(n.name, n.op, n.flops) for n in plain.nodes]
    assert graph["conv0_block3/w2"].scope == ("conv0_block3",)
    assert graph["conv0_block3/w2 (backward)"].scope == ("conv0_block3",)
    children = {}
    for node in (node for node in graph.layers if not node.is_backward):
        for depth in range(len(node.scope) + 1):
            children.setdefault(node.scope[:depth], set()).add((*node.scope, node.name)[: depth + 1])
    assert max(map(len, children.values())) <= 24


def test_parts_are_called_by_the_layer_that_begins_them():
    """Steps go with the layer before them. An attention is a layer of its own, and so is what follows the last name."""

    def block(params, x_BxTxD):
        q, k, v = (jnp.reshape(x_BxTxD @ params[name], (2, 8, 2, 4)) for name in ("wq", "wk", "wv"))
        attended = jnp.reshape(jax.nn.dot_product_attention(q, k, v), (2, 8, 8))
        x_BxTxD = x_BxTxD + attended @ params["wo"]
        hidden = jax.nn.silu(x_BxTxD @ params["gate"]) * (x_BxTxD @ params["up"])
        return jnp.mean(x_BxTxD + hidden @ params["down"], 1)

    params = {name: m.Spec((8, 8), m.f32) for name in ("wq", "wk", "wv", "wo", "gate", "up", "down")}
    graph = check(viz.trace(block, params, m.Spec((2, 8, 8), m.f32), max_nodes=9))
    assert [node.name for node in graph.layers] == "wq wk wv attention0 wo gate up down mean0".split()


def test_a_gradient_closes_with_its_layers():
    fn, args = m.network("gradient")
    graph = check(viz.trace(fn, *args, max_nodes=6))
    names = [node.name for node in graph.layers]
    layers = ["conv1-2", "dense1-2", "loss0"]
    assert names == [*layers, *(f"{name} (backward)" for name in layers[::-1])]


def deep(params, x):
    for name, block in params.items():
        with jax.named_scope(name):
            for at, w in enumerate(block):
                with jax.named_scope(f"part{at}"):
                    x = jnp.tanh(jax.nn.relu(x @ w) @ w)
    return x


def deep_network():
    return {f"block{at}": [m.Spec((4, 4), m.f32)] * (3 + at) for at in range(5)}, m.Spec((2, 4), m.f32)


def test_a_picture_is_one_screen_of_which_no_box_stands_for_most():
    draw = partial(viz.plot_network, deep, *deep_network(), repeats=False)
    plot, whole = draw(), viz.trace(deep, *deep_network(), max_nodes=None, repeats=False)
    assert len(whole.layers) == 4 * 25
    closed = [int(node.detail.split()[0]) for node in plot.network.layers if node.detail.endswith("layers")]
    assert len(plot.network.layers) >= 8
    assert max(closed) <= 50
    assert plot.network.total_flops == whole.total_flops
    width, height = extent(plot.network, Options())
    assert (width < 1600, height < 1125) == (True, True)
    # What the user says is what is drawn.
    assert len(draw(max_nodes=None).network.layers) == 100
    assert len(draw(depth=1).network.layers) == 25


def stages(params, x):
    """A network whose stages halve the width first, and then keep it, beside a sum that is returned."""
    for at, stage in enumerate(params["stages"]):
        with jax.named_scope(f"stage{at}"):
            with jax.named_scope("half"):
                x = jnp.tanh(x @ stage["half"]["a"]) @ stage["half"]["b"]
                mean = jnp.mean(jnp.sin(x) + jnp.cos(x))
            with jax.named_scope("same"):
                x = x + jnp.tanh(x @ stage["same"]["a"]) @ stage["same"]["b"]
    return x, mean


def square(width):
    return m.Spec((width, width), f32)


STAGES = (
    {
        "stages": [
            {
                "half": {"a": square(width), "b": m.Spec((width, width // 2), f32)},
                "same": {"a": square(width // 2), "b": square(width // 2)},
            }
            for width in (32, 16)
        ]
    },
    m.Spec((4, 32), f32),
)


def test_a_function_says_what_is_open():
    seen = {}

    def changes_shape(node):
        seen[node.name] = node.input_shapes, node.shape
        return node.shape not in node.input_shapes

    for show in (viz.trace, lambda *args, **options: viz.plot_network(*args, **options).network):
        seen.clear()
        graph = check(show(stages, *STAGES, open=changes_shape))
        # The mean is made last in "half", but others read the product.
        assert seen == {
            "stage0": (((4, 32),), (4, 16)),
            "stage1": (((4, 16),), (4, 8)),
            "half": (((4, 32),), (4, 16)),
            "same": (((4, 16),), (4, 16)),
            "half 2": (((4, 16),), (4, 8)),
            "same 2": (((4, 8),), (4, 8)),
        }
        boxes = [node.scope for node in graph.layers if node.detail.endswith(" layers")]
        assert boxes == [("stage0",), ("stage1",)]
        assert graph.total_params == viz.trace(stages, *STAGES).total_params
    closed = viz.trace(stages, *STAGES, open=lambda node: False)
    assert [node.op for node in closed.layers] == ["stage0", "stage1"]
    # With a depth, nothing below it is open.
    deep = viz.trace(stages, *STAGES, open=lambda node: True, depth=1)
    assert {node.op for node in deep.layers} == {"half", "same"}
    everything = viz.trace(stages, *STAGES)
    assert viz.trace(stages, *STAGES, open=lambda node: True) == everything
    assert viz.diff((stages, STAGES), (stages, STAGES), open=lambda node: False).diff.after == closed


def test_a_function_says_what_is_open_of_a_gradient():
    grad = jax.grad(lambda params, x: jnp.sum(stages(params, x)[0]))
    graph = check(viz.trace(grad, *STAGES, open=lambda node: node.name.startswith("stage0")))
    boxes = [(node.op, node.scope) for node in graph.layers if node.detail.endswith(" layers")]
    assert boxes == [
        ("half", ("stage0",)),
        ("same", ("stage0",)),
        ("stage1", ()),
        ("stage1 (backward)", ()),
        ("same (backward)", ("stage0",)),
        ("half (backward)", ("stage0",)),
    ]


def test_a_frame_with_a_count_holds_only_what_repeats():
    """The frame "layers ×3" of the graph network also held the sum over each graph."""
    fn, args, options = gallery.make("gnn")
    with jax.numpy_rank_promotion("allow"):
        plot = viz.plot_network(fn, *args, **options)
    layers = [node for node in plot.network.layers if not node.detail.endswith(" layers")]
    assert {node.repeat for node in layers if "layers ×3" in node.scope} == {3}
    sums = [(node.scope, node.detail) for node in layers if node.op == "SegmentSum"]
    assert sums == [(("layers ×3",), "by receivers"), ((), "by graph_of_node")]


def test_a_box_of_two_layers_is_opened_where_there_is_room():
    """ "SegmentSum, Concat" was a box of the graph network: the sum of the messages was not to be seen."""
    fn, args, options = gallery.make("gnn")
    with jax.numpy_rank_promotion("allow"):
        graph = viz.plot_network(fn, *args, **options).network
    assert [node.name for node in graph.layers if node.detail.endswith(" layers")] == ["message"]


def test_a_closed_box_says_how_it_sends_between_devices():
    """Where the devices of the gallery's transformer talk was not to be seen: two boxes hid a sum each."""
    fn, args, options = gallery.make("sharded_shard_map")
    with jax.numpy_rank_promotion("allow"):
        plot = viz.plot_network(fn, *args, **options)
        gradients = viz.trace(jax.grad(fn), *args, max_nodes=14)
    boxes = {node.name: node.detail for node in plot.network.layers if node.detail.endswith(" layers")}
    assert list(boxes.values()) == ["4 layers", "psum, 3 layers", "psum, 6 layers"]
    bordered = re.findall(rf'^\s*"([^"]+)" \[.*color="{style.SENDING}" penwidth="2"', plot.source, re.MULTILINE)
    assert bordered == list(boxes)[1:]
    assert gradients.layers[0].detail == "psum, pmean, 19 layers"


def test_a_gradient_says_what_it_sends_itself():
    """That of a mean over devices sends nothing, and that of an all_gather sends by a psum_scatter."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))

    def local(params, x):
        whole = jax.lax.all_gather(params["w"], "data", tiled=True)
        with jax.named_scope("far"):
            return jax.lax.pmean(jnp.sum(jnp.tanh(x @ whole)), "data")

    specs = {"in_specs": ({"w": P("data")}, P("data")), "out_specs": P()}
    grad = jax.grad(jax.shard_map(local, mesh=mesh, **specs))
    args = {"w": m.Spec((4, 4), f32)}, m.Spec((2, 4), f32)
    sends = {node.name: node.sends for node in viz.trace(grad, *args).layers if node.kind in SENT}
    assert sends["all_gather0"] == ("all_gather",)
    assert sends["pmean0"] == ("pmean",)
    assert sends["pmean0 (backward)"] == ()
    assert ("reduce_scatter",) in sends.values()
    blocks = tree(viz.trace(grad, *args), Options())
    far = [block for block in range(blocks.root, blocks.root + len(blocks.blocks)) if blocks.name(block) == "far"]
    assert [blocks.sent_in(block) for block in far] == [["pmean"], []]


def test_a_box_is_called_by_a_scan_and_not_by_a_letter():
    """The selective scan of Mamba reads a param `d`. The box with the scan in it was called so."""
    fn, args, options = gallery.make("mamba")
    with jax.numpy_rank_promotion("allow"):
        graph = viz.plot_network(fn, *args, **options).network
    assert "SelectiveScan" in [node.op for node in graph.layers]


def test_what_rows_are_chosen_by_is_said():
    fn, args, _ = gallery.make("gnn")
    with jax.numpy_rank_promotion("allow"):
        graph = viz.trace(fn, *args)
    chosen = [(node.op, node.detail) for node in graph.layers if node.op in ("gather", "SegmentSum")]
    assert chosen == [
        *(("gather", "by senders"), ("gather", "by receivers")),
        *(("SegmentSum", "by receivers"), ("SegmentSum", "by graph_of_node")),
    ]
    # An index that is computed has no name.
    arrays = m.Spec((9, 4), m.f32), m.Spec((5,), m.i32)
    details = [
        [node.detail for node in viz.trace(fn, *arrays, params_argnums=None).layers if node.op == "gather"]
        for fn in (lambda x, i: x[i], lambda x, i: x[jnp.argsort(i)])
    ]
    assert details == [["by i"], [""]]


@pytest.mark.parametrize("direction", ["up", "right"])
@pytest.mark.parametrize("name", ["lenet", "gradient", "transformer"])
def test_the_size_of_a_picture_is_known_before_it_is_drawn(name, direction):
    fn, args = m.network(name)
    plot = viz.plot_network(fn, *args, direction=direction, max_nodes=30)
    real = map(float, re.search(rb'<svg width="(\d+)pt" height="(\d+)pt"', plot.pipe("svg")).groups())
    long = direction == "up"
    # It counts with a wide font. Of a narrow one, such as Liberation Sans, pictures are up to a quarter shorter.
    assert 0.85 < extent(plot.network, plot.options)[long] / [*real][long] < 1.25


def texts(plot):
    """The lines of each node and cluster, by the name of the node."""
    groups = m.groups(plot, "node", "cluster")
    return {g.find(m.SVG + "title").text: [t.text for t in g.iter(m.SVG + "text")] for g in groups}


def test_boxes_have_the_names_of_their_layers():
    fn, args = m.flax_transformer(2)
    found = texts(viz.plot_network(fn, *args))
    dense = [lines[0] for lines in found.values() if lines[1:2] == ["FullyConnected 16"]]
    assert sorted(dense) == ["Dense_0", "key", "out", "query", "value"]
    assert ["Activation", "gelu"] in found.values()  # "gelu0" would say no more
    assert [lines for name, lines in found.items() if name.startswith("add")] == [["+"], ["+"]]


def test_long_and_wide_names_fit():
    long = "a_layer_" * 60
    fn, shapes = (lambda p, x: jnp.tanh(x @ p["卷积层" * 4]["w"]) @ p[long]["w"]), m.Spec((4, 4), m.f32)
    plot = viz.plot_network(fn, {"卷积层" * 4: {"w": shapes}, long: {"w": shapes}}, shapes, title="t" * 500)
    assert len(plot.name) <= 100
    assert long in plot.network.layers[-1].name
    svg = plot.pipe("svg", encoding="utf-8")
    assert float(re.search(r'<svg width="(\d+)pt"', svg).group(1)) < 600
    assert plot.source.count(long) >= 1  # in the tooltip
    assert f'title="{long}: FullyConnected' in svg.replace("&#45;", "-")
    boxes = dict(re.findall(r'"([^"]*)" \[.*? width="([\d.]+)"', plot.source))
    assert float(boxes["卷积层" * 4]) * 72 >= 12 * 12  # twelve letters of twelve points


def post_norm_block(params, x):
    x = m.layer_norm(params["ln1"], x + m.attention(params["attn"], x, 4))
    return m.layer_norm(params["ln2"], x + jax.nn.gelu(x @ params["w1"]) @ params["w2"])


def residual_block(params, x):
    y = convolve(params["w1"], x)
    return jax.nn.relu(x + CONV(y, params["w2"], (1, 1)))


WIDE = m.Spec((3, 3, 8, 8), m.f32)


@pytest.mark.parametrize(
    ("block", "params", "x", "first", "last"),
    [
        (m.block, m.transformer_params(4)["blocks"], m.Spec((2, 5, 64), m.f32), "LayerNorm", "add"),
        (post_norm_block, m.transformer_params(4)["blocks"], m.Spec((2, 5, 64), m.f32), "FullyConnected", "LayerNorm"),
        (residual_block, [{"w1": WIDE, "w2": WIDE}] * 4, m.Spec((2, 9, 9, 8), m.f32), "Convolution", "Activation"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_blocks_begin_and_end_where_a_person_would_cut(block, params, x, first, last, named):
    """What is before the first block ends as a block does, and so the copies could begin there too."""

    def fn(params, x, y):
        x = x + y
        x = x if last == "add" else jax.nn.relu(x) if last == "Activation" else m.layer_norm(params["ln"], x)
        for one in params["blocks"]:
            x = block(one, x)
        return x.sum()

    norm = m.transformer_params(1)["ln"]
    args = {"ln": norm, "blocks": params}, x, x
    if not named:
        leaves, tree = jax.tree.flatten(args[0])
        args = leaves, x, x
    graph = check(viz.trace(fn if named else lambda leaves, *xs: fn(tree.unflatten(leaves), *xs), *args))
    inside = [node for node in graph.layers if node.repeat == 4]
    assert (inside[0].op, inside[-1].op) == (first, last)
    assert graph.layers[0].repeat == 1


def lstm(params, xs):
    def cell(carry, x):
        hidden, memory = carry
        forget, put, new, out = jnp.split(x @ params["wx"] + hidden @ params["wh"], 4, -1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(put) * jnp.tanh(new)
        return (jax.nn.sigmoid(out) * jnp.tanh(memory), memory), None

    zeros = jnp.zeros((xs.shape[1], 4))
    return jax.lax.scan(cell, (zeros, zeros), xs)[0][0]


LSTM = {"wx": m.Spec((3, 16), m.f32), "wh": m.Spec((4, 16), m.f32)}, m.Spec((7, 2, 3), m.f32)


def carries(graph):
    return [(graph[edge.source].op, graph[edge.target].op) for edge in graph.edges if edge.carry]


def test_a_loop_carries_what_it_computes_back_to_what_reads_it():
    graph = check(viz.trace(lstm, *LSTM))
    carried = [(edge.source, edge.target, edge.shape) for edge in graph.edges if edge.carry]
    assert carried == [(graph.layers[-1].name, "wh", (2, 4)), ("lstm0", "lstm0", (2, 4))]
    plot = viz.plot_network(lstm, *LSTM)
    assert plot.source.count('label=" carry, 2 arrays "') == plot.source.count(" carry") == 1
    assert "carry, 2 arrays" in plot.html()
    assert any(lines == ["scan ×7"] for lines in texts(plot).values())
    closed = viz.trace(lambda p, x: jnp.tanh(lstm(p, x)), *LSTM, depth=0)
    assert [(len(closed.layers), carries(closed))] == [(2, [])]  # the loop is one box
    backward = check(viz.trace(jax.grad(lambda p, x: lstm(p, x).sum()), *LSTM))
    assert all(a.endswith("(backward)") == b.endswith("(backward)") for a, b in carries(backward))
    assert len(carries(backward)) >= 4


def test_loops_of_every_kind_carry():
    x = m.Spec((4, 4), m.f32)
    newton = viz.trace(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.tanh(c) @ c, x), x)
    assert carries(newton) == [("MatMul", "Activation")]
    times = viz.trace(lambda x: jax.lax.fori_loop(0, 5, lambda _, c: jnp.tanh(c), x), x)
    assert carries(times) == [("Activation", "Activation")]
    swap = viz.trace(lambda x: jax.lax.scan(lambda c, _: ((c[1], c[0] @ c[1]), None), (x, x), length=3)[0], x)
    assert carries(swap) == [("MatMul", "MatMul")]
    assert carries(viz.trace(lambda x: jax.lax.scan(lambda c, y: (c, c @ y), x, jnp.ones((3, 4, 4)))[1], x)) == []
    blocks = m.traced("scan")
    shape = (2, 32, 64)
    assert [(blocks[e.target].op, e.shape) for e in blocks.edges if e.carry] == [("LayerNorm", shape), ("add", shape)]


def _memories():
    """Four layers read the state of the pass before, and one reads what comes in."""
    eqx, key = pytest.importorskip("equinox"), jax.random.key(0)
    state = {name: eqx.nn.Linear(4, 4, use_bias=False, key=key) for name in ("keys", "queries", "values", "rest")}

    def cell(layers, carry, x):
        hidden, memory = carry
        keys, queries, values, rest = (layers[name](hidden) for name in ("keys", "queries", "values", "rest"))
        memory = memory + jnp.sin(keys) * jnp.cos(values)
        return (jnp.tanh(memory * queries + rest + layers["new"](x)), memory), hidden

    def twice(layers, xs):
        zeros = jnp.zeros(4)
        for _ in range(2):
            _, xs = jax.lax.scan(lambda carry, x: cell(layers, carry, x), (zeros, zeros), xs)
        return xs

    return twice, state | {"new": eqx.nn.Linear(4, 4, use_bias=False, key=key)}, m.Spec((7, 4), m.f32)


def test_all_layers_of_a_loop_that_read_the_last_pass_have_an_arrow():
    fn, *args = _memories()
    graph = check(viz.trace(fn, *args, repeats=False))
    into = {node.name: {edge.source for edge in graph.edges if edge.target == node.name} for node in graph.layers}
    assert all(into.values())
    back = [edge for edge in graph.edges if edge.carry and edge.source != edge.target]
    readers = ["keys", "queries", "values", "rest"]
    assert [edge.target for edge in back] == [*readers, *(f"{name} 2" for name in readers)]
    assert all(graph[edge.source].scope[:1] == graph[edge.target].scope[:1] for edge in back)  # none to the other loop
    source = viz.plot_network(fn, *args, repeats=False).source
    assert source.count('label=" carry "') == 4  # once for each hidden state and each memory
    assert source.count('sametail="carry"') == len(back)
    backward = check(viz.trace(jax.grad(lambda layers, xs: fn(layers, xs).sum()), *args))
    assert all(a.endswith("(backward)") == b.endswith("(backward)") for a, b in carries(backward))


def test_branches_beside_each_other_stay_apart():
    def branch(w, x):
        return jnp.tanh(jnp.sin(x @ w) @ w)

    def fn(params, x):
        return sum(branch(w, x) for w in params)

    for count in (3, 6):
        graph = check(viz.trace(fn, [m.Spec((4, 4), m.f32)] * count, m.Spec((2, 4), m.f32)))
        assert [node.op for node in graph.layers].count("sin") == count
        assert [node.op for node in graph.layers].count("FullyConnected") == 2 * count
        assert graph.scopes == ()


def test_the_gradient_of_blocks_whose_input_is_read_again_is_one_block():
    """The first block's input is no block's output."""

    def rms_norm(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True))

    def fn(params, x):
        x = x @ params["out"]
        for one in params["blocks"]:
            x = x + jax.nn.gelu(rms_norm(x) @ one["a"]) @ one["b"]
        return (x @ params["out"]).sum()

    square = m.Spec((4, 4), m.f32)
    params = {"blocks": [{"a": square, "b": square}] * 6, "out": square}
    graph = check(viz.trace(jax.grad(fn), params, m.Spec((2, 4), m.f32)))
    assert [count for _, count in graph.scopes] == [6]  # layers and gradients


def test_an_input_for_most_layers_does_not_pull_them_aside():
    def fn(params, x, stats):
        for n in range(8):
            x = jnp.tanh(x @ params[f"l{n}"]["w"]) * stats[f"l{n}"]["scale"][None]
        return x

    sizes = [4 + n for n in range(9)]
    params = {f"l{n}": {"w": m.Spec(sizes[n : n + 2], m.f32)} for n in range(8)}
    stats = {f"l{n}": {name: m.Spec((sizes[n + 1],), m.f32) for name in ("scale", "unused")} for n in range(8)}
    plot = viz.plot_network(fn, params, m.Spec((2, 4), m.f32), stats)
    lines = [line for line in plot.body if line.strip().startswith('"stats" ->')]
    assert sum('constraint="false"' in line for line in lines) == len(lines) - 1 >= 7


def test_sums_around_parts_of_a_block_are_in_the_block():
    def llama_like(params, x):
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["q"]) @ layer["o"]
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return x @ params["head"]["w"]

    weight, x = m.Spec((6, 6), m.f32), m.Spec((2, 6), m.f32)
    params = {"layers": [dict.fromkeys(("q", "o", "up", "down"), weight) for _ in range(4)], "head": {"w": weight}}
    graph = check(viz.trace(llama_like, params, x))
    assert [len(node.scope) for node in graph.layers] == [1] * 8 + [0]
    assert len({node.scope for node in graph.layers if node.op == "add"}) == len(graph.scopes) == 1
    assert [count for _, count in graph.scopes] == [4]


def test_a_sum_of_two_modules_and_what_follows_a_module_are_in_none():
    def fn(params, x):
        left, right = (jnp.tanh(x @ params[name]["a"]) @ params[name]["b"] for name in ("left", "right"))
        return jnp.tanh(left + right) @ params["head"]["w"]

    weight = m.Spec((6, 6), m.f32)
    towers = {name: {"a": weight, "b": weight} for name in ("left", "right")}
    graph = check(viz.trace(fn, towers | {"head": {"w": weight}}, m.Spec((2, 6), m.f32)))
    assert [node.scope for node in graph.layers] == [("left",)] * 3 + [("right",)] * 3 + [()] * 3


def test_a_frame_in_a_block_has_no_number_of_a_copy():
    def fn(params, x):
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layers.{number}"), jax.named_scope("mlp2"):
                y = jnp.tanh(x @ layer["a"]) @ layer["b"]
            x = x + y  # in the block, outside of its frame
        return x

    layers = [dict.fromkeys("ab", m.Spec((6, 6), m.f32)) for _ in range(3)]
    graph = check(viz.trace(fn, {"layers": layers}, m.Spec((2, 6), m.f32)))
    assert [node.scope[1:] for node in graph.layers] == [("mlp2",)] * 3 + [()]  # "layers ×3" is framed once
    assert [count for _, count in graph.scopes] == [3]


def stack(params, x):
    x = x @ params["stem"]["w"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["a"]) @ layer["b"]
    return jnp.sin(x @ params["head"]["w"]).sum()


@pytest.mark.parametrize(("first", "label"), [(8, "layers ×4"), (5, "layers.1–3 ×3")])
def test_numbered_copies_are_named_by_what_they_share_everywhere(first, label):
    layers = [{"a": m.Spec((8, 8), m.f32), "b": m.Spec((8, 8), m.f32)} for _ in range(4)]
    layers[0] = {"a": m.Spec((first, 8), m.f32), "b": m.Spec((8, 8), m.f32)}
    stem, head = {"w": m.Spec((4, first), m.f32)}, {"w": m.Spec((8, 2), m.f32)}
    args = {"layers": layers, "stem": stem, "head": head}, m.Spec((2, 4), m.f32)
    count = int(label[-1])
    graph = check(viz.trace(jax.grad(stack), *args))
    assert graph.scopes == (((label,), count),)
    repeated = [node for node in graph.layers if node.repeat == count]
    assert {node.scope for node in repeated} == {(label,)}  # layers and their gradients
    assert {node.is_backward for node in repeated} == {False, True}
    closed = viz.trace(stack, *args, depth=0)
    assert label in {node.name for node in closed.layers}
    assert f"\n{label} " in m.summary(stack, *args)
    assert label in [line for lines in texts(viz.plot_network(stack, *args)).values() for line in lines]
    assert f'"{label}"' in viz.plot_network(stack, *args).html()
    step = viz.plot_step(jax.value_and_grad(stack), *args)
    assert label in step.pipe("svg", encoding="utf-8")


def test_an_update_by_hand_is_an_optimizer():
    def clip(grads):
        norm = jnp.sqrt(sum((grad * grad).sum() for grad in jax.tree.leaves(grads)))
        return jax.tree.map(lambda grad: grad * jnp.minimum(1.0, 1.0 / norm), grads)

    def sgd(params, grads):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    layers = [{"a": m.Spec((8, 8), m.f32), "b": m.Spec((8, 8), m.f32)}]
    params = {"layers": layers, "stem": {"w": m.Spec((4, 8), m.f32)}, "head": {"w": m.Spec((8, 2), m.f32)}}
    x = m.Spec((2, 4), m.f32)
    for change in (lambda grads: grads, clip):
        plot = viz.plot_network(lambda p, x, change=change: sgd(p, change(jax.grad(stack)(p, x))), params, x)
        update = plot.network.layers[-1]
        assert (update.detail, len(update.weights), len(update.outputs)) == ("4 arrays", 4, 4)
        assert style.fill(update) == style.fill(Node("adam0", "Adam"))
        lines = [line for line in plot.source.splitlines() if f'(backward)" -> "{update.name}"' in line]
        assert not any("label" in line for line in lines)
        assert len(lines) == (4 if change is not clip else 0)
    forward = viz.trace(stack, params, x)
    assert not any(style.is_update(node) for node in forward.nodes)


def test_kinds_that_are_known_have_a_colour():
    kinds = "RoPE Routing LSTM GRU AssociativeScan SelectiveScan".split()
    names = [style.legend([Node(kind, kind)])[0][1] for kind in kinds]
    assert names == ["softmax, attention"] * 2 + ["recurrent, scan"] * 4


def test_scopes_that_read_each_other_close_without_a_circle():
    """Each may be one box, but not both: "a" reads "b", which reads another layer of "a"."""
    drafts = [Draft(at, "sin", "", 0, scope=(scope,)) for at, scope in enumerate("abab")]
    net = Net(Raw(), [*drafts, Draft(4, "add", "", 0)], dict.fromkeys([(0, 3, 0), (1, 2, 0), (2, 4, 0), (3, 4, 0)]))
    collapse_scopes(net, 0)
    order = list(graphlib.TopologicalSorter(net.sources()).static_order())
    assert sum(draft.layers for draft in net.drafts) == 5
    assert {draft.at for draft in net.drafts} == set(order)


def test_a_net_and_its_copy_change_apart():
    fn, args = m.network("gradient")
    net = all_layers(read(fn, args, {}, 0)[0], True, ())
    made = net.copy()
    close(made, 0, 3)
    assert len(made.layers) <= 3 < len(net.layers)
    assert all(draft.forward in (None, *net.drafts) for draft in net.drafts)


def test_a_network_without_names_is_cut_between_its_blocks():
    """An activation where branches meet ends its block. A mask that all blocks read is no way into them."""

    def residual(weights, x, mask):
        for a, b in weights:
            x = jnp.tanh(x + jnp.sin(x @ a) @ b)
        return x

    def masked(weights, x, mask):
        mask = mask > 0
        for a, b in weights:
            x = x + jnp.where(mask, jnp.sin(x @ a), 0) @ b
        return x

    weights = [(m.Spec((4, 4), m.f32), m.Spec((4, 4), m.f32)) for _ in range(12)]
    for fn, last in ((residual, "Activation"), (masked, "add")):
        net = all_layers(read(fn, (weights, m.Spec((2, 4), m.f32), m.Spec((2, 4), m.f32)), {}, 0)[0], False, ())
        parts = itertools.groupby(whole_of(net).layers, lambda node: node.scope[:1])
        assert {list(part)[-1].op for _, part in parts} == {last}


def test_all_repeats_of_a_pass_change_the_edges_once(monkeypatch):
    """Forty stages of other sizes, each of four equal layers."""
    calls, substitute = [], Net.substitute
    monkeypatch.setattr(Net, "substitute", lambda net, into: calls.append(len(into)) or substitute(net, into))
    weights = [m.Spec((size, size), m.f32) for size in range(3, 43)]

    def stages(weights, x):
        for w in weights:
            x = jnp.pad(x, ((0, 0), (0, 1)))
            for _ in range(4):
                x = jnp.tanh(x @ w)
        return x

    net = all_layers(read(stages, (weights, m.Spec((5, 2), m.f32)), {}, 0)[0], True, ())
    assert sorted(draft.repeat for draft in net.layers) == [1] * 40 + [4] * 80
    assert len(net.repeats) == 40
    assert [count for count in calls if count] == [40 * 2 * 3]


def test_a_step_before_the_first_parameters_of_a_module_is_its_own():
    """Both scans are made by one line. The Concat reads no parameter."""

    def cell(params, state, x):
        state = jnp.tanh(jnp.concatenate([x, state], -1) @ params["w"])
        return state, state

    def apply(params, x):
        for one in params["cells"]:
            _, x = jax.lax.scan(lambda state, x, one=one: cell(one, state, x), jnp.zeros((2, 4)), x)
        return x

    params = {"cells": [{"w": m.Spec((8, 4), m.f32)}] * 2}
    graph = check(viz.trace(apply, params, m.Spec((5, 2, 4), m.f32), repeats=False))
    assert [node.scope[-1] for node in graph.layers] == ["cells.0"] * 3 + ["cells.1"] * 3


def test_a_product_has_the_shape_that_its_line_gives():
    q, k = m.Spec((2, 5, 3, 4), m.f32), m.Spec((2, 7, 3, 4), m.f32)

    def attend(q, k):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.tanh(jnp.einsum("bhqk,bkhd->bqhd", weights, k))

    graph = check(viz.trace(attend, q, k, params_argnums=None))
    assert [node.shape for node in graph.layers] == [(2, 5, 3, 4)] * 2
    assert [edge.shape for edge in graph.edges if edge.target == graph.layers[-1].name] == [(2, 5, 3, 4)]


def test_a_repeat_without_a_name_says_what_is_in_it():
    def net(params, x):
        for up, down in zip(params["up"], params["down"], strict=True):
            x = x + jnp.tanh(jax.nn.relu(x @ up) @ down)
        return x

    args = {"up": [m.Spec((4, 8), m.f32)] * 3, "down": [m.Spec((8, 4), m.f32)] * 3}, m.Spec((3, 4), m.f32)
    plot, closed = viz.plot_network(net, *args), viz.plot_network(net, *args, max_nodes=1)
    assert ["2 FullyConnected + 3 ×3"] in texts(plot).values()
    assert plot.html().count("2 FullyConnected + 3 ×3") > 1  # open and closed
    assert [node.op for node in closed.network.layers] == ["2 FullyConnected + 3 ×3"]
    assert ">2 FullyConnected + 3 ×3<" in closed.pipe("svg", encoding="utf-8")
    assert "2 FullyConnected + 3 ×3" in closed.html()


def test_an_open_repeat_without_a_name_has_that_of_its_parameters():
    def net(params, x):
        for a, b in (params["even"][:2], params["even"][2:]):
            x = jnp.sin(x) + jax.nn.relu(x @ a) @ b
        return x

    plot = viz.plot_network(net, {"even": [m.Spec((4, 4), m.f32)] * 4}, m.Spec((3, 4), m.f32))
    assert ["even ×2"] in texts(plot).values()


def test_a_sum_is_a_sign_only_where_it_joins_two_activations():
    def net(params, x):
        near = jax.nn.relu(x @ params["w"])
        gate = jax.nn.sigmoid(x @ params["v"])
        joined = near + x  # a residual sum
        scaled = joined * gate  # a gate
        return scaled + params["shift"], joined + 2.0, near + near.sum()

    params = {"w": m.Spec((4, 4), m.f32), "v": m.Spec((4, 4), m.f32), "shift": m.Spec((3, 4), m.f32)}
    graph = check(viz.trace(net, params, m.Spec((3, 4), m.f32)))
    signs = {name: sign for name, sign in join_sign(graph).items() if not name.endswith(BACKWARD)}
    shown = {sign: [edge.source for edge in graph.edges if edge.target == name] for name, sign in signs.items()}
    assert sorted(signs.values()) == ["+", "×"]
    assert {graph[name].op for name in shown["+"]} == {"Activation", "input"}
    assert sorted(graph[name].op for name in shown["×"]) == ["Activation", "add"]


def adapted(params, x):
    for layer in params:
        low = x @ layer["a"] @ layer["b"] * 2.0
        x = x + jax.nn.gelu(x @ layer["w"] + low)
    return jnp.mean(x**2)


def biased(params, x):
    bias = params["bias"] * 2.0
    for layer in params["layers"]:
        q, k, v = x @ layer["q"], x @ layer["k"], x @ layer["v"]
        x = x + jax.nn.softmax(q @ k.T + bias) @ v @ layer["o"]
    return jnp.mean(x**2)


def test_gradients_of_copies_are_closed_with_them():
    """Also where the first copy needs no gradient of its input, and where one sum goes through all."""
    square, low = m.Spec((8, 8), m.f32), {"a": m.Spec((8, 2), m.f32), "b": m.Spec((2, 8), m.f32)}
    lora = [{"w": square, **low} for _ in range(6)]
    shared = {"bias": m.Spec((10, 10), m.f32), "layers": [dict.fromkeys("qkvo", square) for _ in range(6)]}
    for fn, params in ((adapted, lora), (biased, shared)):
        graph = check(viz.trace(jax.value_and_grad(fn), params, m.Spec((10, 8), m.f32)))
        assert [count for _, count in graph.scopes] == [6]
        inside = [node for node in graph.layers if node.repeat > 1]
        assert {node.scope[:1] for node in inside} == {graph.scopes[0][0]}
        assert {node.repeat for node in inside if not node.is_backward} == {6}
        assert {node.repeat for node in inside if node.is_backward} <= {5, 6}
        assert all(node.repeat > 1 for node in graph.layers if node.weights and node.op != "mul")


@pytest.mark.parametrize("options", [{}, {"multi_output": True}, {"preserve_shape": True}])
def test_an_output_of_mxnet_has_the_shape_of_its_data(options):
    """It was that of the rows inside, 4x15x1."""

    def fn(w, x, label):
        return softmax_output(x @ w, label, **options)

    graph = viz.trace(fn, m.Spec((5, 5), m.f32), m.Spec((4, 3, 5), m.f32), m.Spec((4,), m.f32))
    assert [node.shape for node in graph.layers] == [(4, 3, 5)] * 2


def test_a_box_of_most_of_a_net_is_opened():
    """Eight small blocks are boxes enough, but what is in the ninth would be hidden."""

    def net(params, x):
        for number in range(8):
            with jax.named_scope(f"small{number}"):
                x = jnp.tanh(jnp.exp(x) @ params["w"])
        with jax.named_scope("large"):
            for _ in range(20):
                x = jnp.sin(jnp.sqrt(x) @ params["w"])
        return x

    raw, _, _ = read(net, [{"w": m.Spec((8, 8), m.f32)}, m.Spec((4, 8), m.f32)], {}, 0)
    drawn = all_layers(raw, False, ())
    count = len(drawn.layers)
    close_until(drawn, lambda net: len(net.layers) <= 20, few=FEW_BOXES)
    assert len(drawn.layers) <= 20
    assert 2 * max(draft.layers for draft in drawn.layers) <= count, [(d.op, d.layers) for d in drawn.layers]


def quantized(x):
    scale = jnp.max(jnp.abs(x)) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def heads(x):
    return jnp.cumsum(jnp.sin(x) * 2, 1).reshape(2, 4, 2)


def test_arrows_show_what_a_function_returns():
    """They showed the arrays before the last cast and reshape of the function."""

    def fn(params, x):
        y, scale = quantized(x)
        z = jax.lax.dot_general(y, params["up"], (((1,), (0,)), ((), ())), preferred_element_type=m.i32)
        return heads(z * scale) @ params["down"]

    graph = viz.trace(fn, {"up": m.Spec((8, 8), jnp.int8), "down": m.Spec((2, 2), m.f32)}, m.Spec((2, 8), m.f32))
    arrows = {(edge.source, edge.target): (edge.shape, edge.dtype) for edge in graph.edges}
    assert arrows["quantized0", "up"] == ((2, 8), "int8")
    assert arrows["heads0", "down"] == ((2, 4, 2), "float32")
    assert (graph["quantized0"].dtype, graph["heads0"].shape) == ("int8", (2, 4, 2))


def test_pieces_of_a_part_are_called_by_what_is_in_each():
    """Each had the name of the part, "FullyConnected + 11", and one of its gradients too."""

    def step(p, scale, x, y):
        def loss(p):
            return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2) * scale

        value, grads = jax.value_and_grad(loss)(p)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.all(jnp.array([jnp.isfinite(jnp.sum(g)) for g in jax.tree.leaves(grads)]))
        return jax.tree.map(lambda w, g: jnp.where(finite, w - 0.1 * g, w), p, grads), value / scale

    square = m.Spec((4, 4), m.f32)
    graph = viz.trace(step, {"up": square, "down": square}, m.Spec((), m.f32), square, square, max_nodes=8)
    closed = [node.op for node in graph.layers if "layers" in node.detail]
    assert len(closed) == len(set(closed))
    assert "mul_backward0" in [node.name for node in graph.layers]  # of the loss by its scale
