"""The interactive page: blocks, layouts, HTML that nothing can break out of. A browser looks at it elsewhere."""

import base64
import functools
import html
import html.parser
import itertools
import json
import pickle
import re
import subprocess
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
import viz_models as m
from jax.sharding import PartitionSpec as P

from jaxpar import viz
from jaxpar.viz import _trace
from jaxpar.viz._draw.render import NEXT, render
from jaxpar.viz._draw.style import Options, cut, tooltip
from jaxpar.viz._page import blocks as blocks_of_page
from jaxpar.viz._page.blocks import CROWDED, draw_lines, tree
from jaxpar.viz._page.layout import layouts


def nested(params, x):
    """Blocks in blocks, a shortcut around one, and two that are alike."""
    for number in (0, 1):
        with jax.named_scope(f"stage{number}"):
            x = x + bottleneck(params, jnp.tanh(x))
            x = jax.nn.relu(bottleneck(params, jax.nn.relu(x)) + x)
    return jax.nn.softmax(x @ params[2])


@jax.named_scope("bottleneck")
def bottleneck(params, x):
    return jnp.tanh(jnp.tanh(x @ params[0]) @ params[1])


@functools.cache
def drawn(name, **options):
    w = m.Spec((4, 4), m.f32)
    fn, args = (nested, ([w] * 3, w)) if name == "nested" else m.network(name)
    return viz.plot_network(fn, *args, title=name, **options)


@functools.cache
def blocks(name):
    found = tree(drawn(name).whole(), Options())
    draw_lines(found)
    return found


def data(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def names(page):
    return [node[7].split()[0].rstrip(":") for node in data(page)["nodes"]]


class Tags(html.parser.HTMLParser):
    """Which elements a page has, and what they load or link to."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.links = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "action", "data", "srcdoc")]
        if tag not in ("meta", "input", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["lenet", "gradient", "nested", "scan"])
def test_a_page_is_whole_and_loads_nothing(name):
    page = drawn(name).html()
    found = Tags(page)
    assert found.open == found.links == []
    assert found.tags.count("script") == 2
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|\$\w+\b(?=<)", page)
    nodes = [node.name.split()[0] for node in drawn(name).whole().nodes if node.shape or node.op != "input"]
    assert names(page) == nodes
    assert len(page) < 100_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gradient", "nested", "transformer", "tangle", "scan"])
def test_each_node_is_in_one_block_and_each_edge_is_a_chain_of_lines(name):
    found = blocks(name)
    placed = [item for block in found.blocks for item in block.items]
    assert sorted(placed) == sorted(set(range(len(found.nodes) + len(found.blocks))) - {found.root})
    steps = set()  # (array, from, to), each an item or (a block, its port)
    for number, block in enumerate(found.blocks, found.root):
        for line in block.lines:
            ends = [
                (number, port) if item < 0 else (item, port) if found.is_block(item) else item
                for item, port in ((line.tail, line.tail_port), (line.head, line.head_port))
            ]
            steps |= {(key, *ends) for key in line.keys}
    after = {}
    for key, tail, head in steps:
        after.setdefault((key, tail), []).append(head)
    for flow in found.flows:
        work, seen = [flow.source], set()
        while work:
            for head in after.get(((flow.source, flow.kind), work.pop()), ()):
                if head not in seen:
                    seen.add(head)
                    work.append(head)
        assert flow.target in seen, flow.edge


@pytest.mark.parametrize("direction", ["up", "right"])
@pytest.mark.parametrize("name", ["gradient", "nested", "tangle"])
def test_no_box_of_a_layout_covers_another(name, direction):
    found = blocks(name)
    places, which = layouts(found, direction, 30.0)
    for block, at in zip(found.blocks, which, strict=True):
        boxes = [(*place, *found.size(item)) for place, item in zip(places[at].items, block.items, strict=True)]
        for (ax, ay, aw, ah), (bx, by, bw, bh) in itertools.combinations(boxes, 2):
            assert abs(ax - bx) >= (aw + bw) / 2 - 1 or abs(ay - by) >= (ah + bh) / 2 - 1
        assert all(len(line) % 3 == 1 for line in places[at].lines)


def test_equal_blocks_share_a_layout():
    found = data(drawn("nested", repeats=False).html())
    stages = ["stage0", "bottleneck", "bottleneck", "stage1", "bottleneck", "bottleneck"]
    assert [block[3] for block in found["blocks"]] == ["", *stages]
    assert len(found["layouts"]) < len(found["blocks"])


def test_a_long_block_is_cut_into_parts_that_graphviz_can_lay_out():
    found = blocks("tangle")
    assert len(found.nodes) > 300
    assert max(len(block.items) for block in found.blocks) <= 80
    assert all(len(block.items) > 1 for block in found.blocks)


def test_gradients_flow_back_beside_their_layers():
    found = blocks("gradient")
    (block,) = found.blocks
    assert len(block.pairs) == sum(node.is_backward for node in found.nodes)
    places, _ = layouts(found, "up", 30.0)
    where = dict(zip(block.items, places[0].items, strict=True))
    assert all(abs(where[layer][1] - where[gradient][1]) < 8 for layer, gradient in block.pairs)
    back = [line for line in block.lines if line.kind == "back"]
    assert back
    assert all(where[line.tail][1] > where[line.head][1] for line in back)


def test_a_loop_carries_back():
    found = blocks("scan")
    assert [flow for flow in found.flows if flow.kind == "carry"]
    lines = [line for block in found.blocks for line in block.lines if line.kind == "carry"]
    assert {line.label for line in lines} == {"carry"}
    assert len({line.tail for line in lines}) == 1 < len(lines)  # from the last sum, to a norm and a sum


def test_a_loop_of_one_layer():
    def net(x):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ h), x), x, None, 5)[0]

    assert "carry" in viz.plot_network(net, m.Spec((4, 4), m.f32)).html()


def hostile():
    """The plot of a network whose names look like HTML."""
    name = "</script><script>alert(1)</script>'\"&\u2028<!--"

    def fn(params, x):
        with jax.named_scope(name):
            return jnp.tanh(jnp.tanh(x @ params[name]) @ params[name])

    w = m.Spec((4, 4), m.f32)
    return viz.plot_network(fn, {name: w}, w, title=name)


def still(page):
    """The picture of a page before its script draws."""
    return re.search(r'<svg id="svg".*?</svg>', page, re.DOTALL)[0]


def test_without_scripts_the_page_has_the_picture():
    plot = drawn("lenet")
    picture = still(plot.html())
    assert [*re.findall(r">(conv1|pooling0|dense2)</text>", picture)] == ["conv1", "dense2"]
    assert "<title>" not in picture
    assert "xlink:href" not in picture
    assert len(plot.html()) < 60_000


def test_the_picture_without_scripts_has_what_graphviz_drew():
    """The same places in whole points, colours and words, written shorter. The page says title and legend itself."""
    plot = drawn("lenet").copy()
    plot.body[0] = re.sub(r" label=<.*>\]", "]", plot.body[0])
    svg = plot.pipe("svg", encoding="utf-8")
    picture = still(plot.html())
    whole = [[int(float(n)) for n in re.findall(r"-?[\d.]+", d)] for d in re.findall(r' d="([^"]*)"', svg)]
    paths = []
    for start, steps in re.findall(r' d="M([-\d,]+)c([-\d, ]+)"', picture):
        places = [int(n) for n in re.findall(r"-?\d+", start)]
        moves = [int(n) for n in re.findall(r"-?\d+", steps)]
        for at in range(0, len(moves), 6):  # each of three points is from where the curve before ended
            x, y = places[-2:]
            places += [moves[at + n] + (x, y)[n % 2] for n in range(6)]
        paths.append(places)
    assert paths == whole
    shown, before = (ElementTree.fromstring(text).iter() for text in (picture, svg))
    texts = [
        [(one.text, float(one.get("font-size"))) for one in tree if one.tag.endswith("}text")]
        for tree in (shown, before)
    ]
    assert texts[0] == texts[1]
    assert len(picture) < 0.6 * len(svg)


def test_names_that_look_like_html_stay_text():
    plot = hostile()
    page = plot.html()
    found = Tags(page)
    assert found.open == []
    assert found.tags.count("script") == 2
    assert any("alert" in node[7] for node in data(page)["nodes"])
    frame = plot._repr_mimebundle_()["text/html"]
    tags = Tags(frame)
    assert tags.tags == ["iframe", "div", "img"]
    assert tags.links[0] == page.replace("\r", "")


def test_a_notebook_gets_the_page_and_a_png():
    plot = drawn("lenet")
    shown = plot._repr_mimebundle_()
    assert set(shown) == {"text/html", "image/png", "text/plain"}
    page, preview = Tags(shown["text/html"]).links
    assert page == plot.html()
    assert preview == "data:image/png;base64," + shown["image/png"]
    assert base64.b64decode(shown["image/png"]).startswith(b"\x89PNG")
    assert sum(map(len, shown.values())) < 130_000


def loss(w, x):
    return jnp.log(jax.nn.relu(x @ w)).sum()


@pytest.mark.parametrize("kind", ["diff", "step", "marked", "nonfinite"])
def test_a_notebook_gets_the_picture_of_each_kind_and_not_that_of_its_network(kind):
    w, x = jnp.zeros((3, 4)), jnp.zeros((2, 3))
    plot = {
        "diff": lambda: viz.diff((loss, (w, x)), (lambda w, x: loss(w, x) + 1, (w, x))),
        "step": lambda: viz.plot_step(jax.grad(loss), w, x),
        "marked": lambda: viz._plot_marked(loss, (w, x), ["w"], "t"),
        "nonfinite": lambda: viz.first_nonfinite(loss, w, x),
    }[kind]()
    (page, _) = Tags(plot._repr_mimebundle_()["text/html"]).links
    assert page == plot.html()
    assert '<script id="data"' not in page


def first_view(page):
    """The labels of the closed blocks, and how many nodes are in no closed block, before the reader opens anything."""
    found = data(page)
    root, labels, nodes, work = len(found["nodes"]), [], 0, [len(found["nodes"])]
    while work:
        for item in found["blocks"][work.pop() - root][9]:
            if item < root:
                nodes += 1
            elif item in found["open"]:
                work.append(item)
            else:
                labels.append(found["blocks"][item - root][3])
    return sorted(labels), nodes


def blocks_of_picture(graph):
    """The labels of the boxes that stand for several layers, and how many other nodes there are."""
    closed = [node for node in graph.nodes if re.fullmatch(r"\d+ layers", node.detail)]
    return sorted(cut(node.op) for node in closed), len(graph.nodes) - len(closed)


FIRST_VIEWS = {
    "lenet": {},
    "nested": {"repeats": False},
    "transformer": {"repeats": False, "max_nodes": 20},
    "transformer gradient": {"repeats": False},
    "tangle": {},
    "resnet": {"depth": 1},
    "flax": {"repeats": False, "max_nodes": 30},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FIRST_VIEWS)
def test_the_first_view_of_the_page_is_the_picture(name):
    """The same boxes are closed. The layers of a network are in the same frames."""
    plot = drawn(name, **FIRST_VIEWS[name])
    labels, nodes = blocks_of_picture(plot.network)
    assert bool(labels) is (name != "lenet")
    assert first_view(plot.html()) == (labels, nodes)
    whole = plot.whole()
    assert sum(node.flops for node in whole.nodes) == sum(node.flops for node in plot.network.nodes)


def test_a_picture_that_was_changed_is_shown_as_it_is():
    plot = drawn("lenet").copy()
    plot.node("mine")
    shown = plot._repr_mimebundle_()
    assert set(shown) == {"image/svg+xml", "image/png", "text/plain"}
    assert "mine" in shown["image/svg+xml"]


def test_save_writes_the_page(tmp_path):
    plot = drawn("nested")
    with open(plot.save(tmp_path / "net.html"), encoding="utf-8") as file:
        assert file.read() == plot.html() == pickle.loads(pickle.dumps(plot)).html()
    assert plot.render(str(tmp_path / "other"), format="html").endswith("other.html")


@pytest.mark.parametrize(("direction", "rankdir"), [("up", "BT"), ("down", "TB"), ("right", "LR")])
def test_direction(direction, rankdir):
    plot = drawn("lenet", direction=direction)
    assert f'rankdir="{rankdir}"' in plot.source
    found = data(plot.html())
    assert found["direction"] == direction
    layout = found["layouts"][0]
    assert (layout["w"] > layout["h"]) is (direction == "right")


def test_options_of_the_page():
    assert '<html lang="en" data-plot="dark" data-theme="dark">' in drawn("lenet", theme="dark").html()
    assert '<html lang="en">' in drawn("lenet").html()
    assert data(drawn("nested", depth=0).html())["asked"] is True
    assert data(drawn("nested", open=lambda node: True).html())["asked"] is True
    assert data(drawn("nested").html())["asked"] is False
    assert len(data(drawn("nested", depth=0).html())["blocks"]) == len(data(drawn("nested").html())["blocks"])
    assert "softmax, attention</span>" in drawn("nested").html()
    assert "<footer></footer>" in drawn("nested", legend=False).html()
    assert "200 params" in drawn("lenet").html()
    heat = data(drawn("nested", heat="flops").html())
    assert all(re.fullmatch("#[0-9a-f]{6}", block[6]) for block in heat["blocks"])
    weights = names(drawn("lenet", hide_weights=False).html())
    assert "params['conv1']['weight']" in weights


def test_a_plot_keeps_no_arrays():
    x = jnp.ones((3, 4))
    plot = viz.plot_network(lambda w, x: x @ w, x.T, x, title="t")
    kept = jax.tree.leaves((plot.whole.args[1:], plot.whole.keywords))
    assert not [leaf for leaf in kept if isinstance(leaf, jax.Array)]


def test_a_page_without_layers():
    for plot in (viz.plot_network(lambda x: x, m.Spec((4,), m.f32)), viz.plot_network(lambda: 1)):
        assert data(plot.html())["nodes"] == []


def test_what_graphviz_cannot_draw_together_it_draws_one_by_one():
    """Graphviz 2.43 frees the ranks of this graph twice, and aborts at the next one."""
    graph = """digraph {
    { rank=same; b; d }
    a -> c [label="128x1x1x1"]
    b -> e [label="scalar"]
    b -> d [label="128"]
    c -> e [label="scalar"]
    f -> d [label="128"]
    f -> g [label="8x64"]
    f -> h [label="8x64"]
    }"""
    alone = render(graph, "plain", 30.0)
    assert render(NEXT.join([graph] * 3), "plain", 30.0) == 3 * alone


def test_without_time_there_is_no_page():
    plot = viz.Plot(m.traced("lenet"), Options("lenet"), 0.0001)
    with pytest.raises(viz.RenderError, match="did not finish"):
        plot.html()


def counted(monkeypatch, module, name):
    """How often a function of a module is called from now on."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append(name) or function(*args, **kwargs))
    return calls


def test_the_work_of_a_picture_and_its_page(monkeypatch):
    """A function is traced and folded once for both. Graphviz runs once for each, whatever its blocks and nodes are.

    And once for the picture that a page shows before its script.
    """
    traces = []
    folds = counted(monkeypatch, _trace, "fold_patterns")
    words = counted(monkeypatch, blocks_of_page, "_words")
    runs = counted(monkeypatch, subprocess, "run")
    fn, args = m.network("transformer")
    plot = viz.plot_network(lambda *args: traces.append(1) or fn(*args), *args, repeats=False, max_nodes=20)
    plot.pipe("svg")
    assert (len(traces), len(folds), len(runs)) == (1, 1, 1)
    assert plot.html() == plot.html()
    assert (len(traces), len(folds), len(runs)) == (1, 1, 3)
    written = len(words)
    found = tree(plot.whole(), Options())
    assert written == len(found.nodes) + len(found.blocks)


def test_a_crowded_block_has_one_line_between_two_items():
    """Each of twelve blocks reads both arrays of all before it."""

    def fn(x):
        pairs = [(jnp.sin(x), jnp.cos(x))]
        for number in range(12):
            with jax.named_scope(f"stage{number}"):
                pairs.append((jax.lax.max(*map(sum, zip(*pairs, strict=True))), jnp.tanh(sum(map(sum, pairs)))))
        return pairs[-1]

    found = tree(viz.trace(fn, m.Spec((4,), m.f32), max_nodes=None, repeats=False), Options())
    draw_lines(found)
    whole = found.blocks[0]
    between = [(line.tail, line.head) for line in whole.lines if found.is_block(line.tail)]
    assert len(between) == len(set(between)) == 66
    assert sum(len(line.keys) for line in whole.lines) > CROWDED


def test_a_closed_block_says_how_it_sends_between_devices():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))

    def both(params, x):
        with jax.named_scope("near"):
            x = jnp.tanh(jnp.tanh(x @ params[0]))
        with jax.named_scope("far"):
            return jnp.tanh(jax.lax.psum(x @ params[1], "data"))

    mapped = jax.shard_map(both, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    page = viz.plot_network(mapped, [m.Spec((4, 4), m.f32)] * 2, m.Spec((2, 4), m.f32)).html()
    blocks = {texts[0][0]: (texts[1][0], sends) for *_, texts, _, _, _, _, _, _, _, sends in data(page)["blocks"][1:]}
    assert blocks["near"] == ("3 layers · 16 params", 0)
    assert blocks["far"] == ("psum, 3 layers · 16 params", 1)


def test_a_hint_names_the_params_of_one_copy():
    def chain(params, x):
        for number in range(12):
            x = jnp.tanh(x @ params[f"block{number}"]["w"] + params[f"block{number}"]["b"][None])
        return x

    params = {f"block{number}": {"w": m.Spec((4, 4), m.f32), "b": m.Spec((4,), m.f32)} for number in range(12)}
    hints = [node[7] for node in data(viz.plot_network(chain, params, m.Spec((2, 4), m.f32)).html())["nodes"]]
    (dense,) = (hint.splitlines() for hint in hints if "FullyConnected" in hint)
    assert "weights params['block0']['w'], params['block0']['b'], ..." in dense
    assert "drawn once for 12 copies" in dense

    def shared(params, x):  # as many params as copies, and each copy uses all of them
        for number in range(4):
            scale = jax.lax.rsqrt(params["var"] + 1e-5) * params["gamma"]
            x = jnp.tanh((x - params["mean"][None]) * scale[None] + params["beta"][None]) * params["sizes"][number]
        return x

    params = {name: m.Spec((4,), m.f32) for name in ("var", "gamma", "mean", "beta", "sizes")}
    (norm,) = (node for node in viz.trace(shared, params, m.Spec((2, 4), m.f32)).layers if node.op == "BatchNorm")
    assert (norm.repeat, len(norm.weights)) == (4, 4)
    assert f"weights {', '.join(norm.weights)}" in tooltip(norm).splitlines()
