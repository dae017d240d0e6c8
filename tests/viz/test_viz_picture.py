"""The picture: text that fits, stable output, themes, files, and what happens without `dot`."""

import base64
import functools
import os
import re
import struct
import subprocess
import xml.etree.ElementTree as ET

import graphviz
import jax
import jax.numpy as jnp
import optax
import pytest
import viz_models as m
from viz_models import SVG

from jaxpar import viz
from jaxpar.viz._draw import render
from jaxpar.viz._draw.style import Options, caption_of


def draw(name, **options):
    fn, args = m.network(name)
    return viz.plot_network(fn, *args, title=name, **options)


@functools.cache
def drawn(name):
    """For the tests that only look, without another trace."""
    return viz.Plot(m.traced(name), Options(name), 30.0)


def boxes(plot):
    """(texts with their sizes and weights, left, right) of each node and cluster."""
    for group in m.groups(plot, "node", "cluster"):
        texts = [(t.text or "", float(t.get("font-size")), t.get("font-weight")) for t in group.iter(SVG + "text")]
        ellipse = next(group.iter(SVG + "ellipse"), None)
        if ellipse is not None:
            centre, radius = float(ellipse.get("cx")), float(ellipse.get("rx"))
            yield texts, centre - radius, centre + radius
            continue
        shape = next(e for e in group.iter() if e.tag in (SVG + "polygon", SVG + "path"))
        xs = [float(x) for x in re.findall(r"(-?[\d.]+),-?[\d.]+", shape.get("points") or shape.get("d"))]
        yield texts, min(xs), max(xs)


@pytest.fixture(scope="module")
def width():
    """The width of a text in DejaVu Sans, wider than the fonts that a browser takes for Helvetica."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    @functools.cache
    def measure(text, size, weight):
        if not text.strip():
            return 0.0
        font = FontProperties(family="DejaVu Sans", weight=weight or "normal")
        return TextPath((0, 0), text, size=size, prop=font).get_extents().width

    return measure


LARGE = ("resnet", "flax")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in m.NETWORKS]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_renders_and_no_label_is_wider_than_its_box(name, width):
    plot = drawn(name)
    found = list(boxes(plot))
    assert len(found) >= len(plot.network.nodes)
    for texts, left, right in found:
        for text, size, weight in texts:
            assert width(text, size, weight) <= right - left, text


@pytest.mark.parametrize("options", [{"heat": "flops"}, {"heat": "bytes"}, {"hide_weights": False}, {"theme": "dark"}])
def test_renders_with_every_option(options, width):
    for texts, left, right in boxes(draw("gradient", **options)):
        assert all(width(*text) <= right - left for text in texts)


def test_the_picture_of_lenet_says_what_mxnets_did():
    plot = drawn("lenet")
    assert isinstance(plot, graphviz.Digraph)
    assert isinstance(plot, viz.Plot)
    nodes, edges = ({g.find(SVG + "title").text: g for g in m.groups(plot, kind)} for kind in ("node", "edge"))
    assert list(nodes) == [node.name for node in plot.network.nodes]
    assert list(edges) == [f"{edge.source}->{edge.target}" for edge in plot.network.edges]
    conv = nodes["conv1"]
    assert [t.text for t in conv.iter(SVG + "text")] == ["conv1", "Convolution 3×3/1, 20", "200 params"]
    assert next(conv.iter(SVG + "path")).get("fill") == "#fb8072"
    assert next(nodes["images"].iter(SVG + "ellipse")).get("fill") == "#8dd3c7"
    labels = [text.text.strip() for edge in edges.values() for text in edge.iter(SVG + "text")]
    assert labels[:2] == ["256×28×28×1", "256×26×26×20"]
    link = conv.find(f"{SVG}g/{SVG}a")
    assert "lenet.py:" in link.get("{http://www.w3.org/1999/xlink}title")
    height = {name: float(next(g.iter(SVG + "text")).get("y")) for name, g in nodes.items()}
    assert height["images"] > height["conv1"] > height["dense2"]  # bottom-up


@pytest.mark.slow
def test_repeated_blocks_and_devices_are_labelled_clusters():
    def labels(name):
        return [next(group.iter(SVG + "text")).text for group in m.groups(drawn(name), "cluster")]

    assert labels("transformer") == ["blocks ×12", "attn"]
    assert labels("scan") == ["scan ×12", "blocks", "attn"]
    assert labels("pmap") == ["pmap data=4"]
    assert "Block ×12" in labels("flax")


def test_the_same_function_gives_the_same_text():
    for name in ("gradient", "scan", "pmap", "haiku"):
        assert draw(name, max_nodes=200).source == drawn(name).source


def test_losses_are_side_by_side_and_their_gradients_are_the_other_way_round():
    """The discriminator of a GAN: the arrows of one part of the batch went through the boxes of the other."""

    def step(p, real, fake):
        def loss(p):
            real_loss = optax.sigmoid_binary_cross_entropy(real @ p["w"], jnp.ones(4)).mean()
            return real_loss + optax.sigmoid_binary_cross_entropy(jnp.tanh(fake) @ p["w"], jnp.zeros(4)).mean()

        return jax.grad(loss)(p)

    source = viz.plot_network(step, {"w": m.Spec((3,), m.f32)}, m.Spec((4, 3), m.f32), m.Spec((4, 3), m.f32)).source
    row = " -> ".join(f'"{name}"' for name in ("loss0", "loss1", "loss1 (backward)", "loss0 (backward)"))
    assert f'{{ rank=same {row} [style="invis"] }}' in source
    assert '{ rank=same "loss0" "loss0 (backward)" }' not in source
    # The outer arrow passes above the row. With a number beside it, it went through the boxes between.
    assert '"loss0" -> "loss0 (backward)" [tailport="n" headport="n"]' in source
    assert '"loss1" -> "loss1 (backward)" [label=' in source


def test_arrows_to_an_optimizer_leave_beside_those_between_gradients():
    """They crossed the shapes there."""

    def step(p, x):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(jnp.tanh(x @ p["up"]) @ p["down"])))(p)
        return optax.apply_updates(p, optax.sgd(0.1).update(grads, optax.sgd(0.1).init(p))[0])

    def ports(direction):
        lines = viz.plot_network(step, p, m.Spec((4, 3), m.f32), direction=direction).source.splitlines()
        return {line.split('"')[1]: 'tailport="e"' in line for line in lines if '(backward)" -> "SGD"' in line}

    p = {"up": m.Spec((3, 3), m.f32), "down": m.Spec((3, 3), m.f32)}
    assert ports("up") == {"down (backward)": True, "up (backward)": False}
    assert ports("right") == {"down (backward)": False, "up (backward)": False}


def test_options_are_in_the_text():
    assert "#1e1e1e" in draw("lenet", theme="dark").source
    assert "params['conv1']['weight']" in draw("lenet", hide_weights=False).source
    plain = drawn("lenet").source
    assert "\"params['conv1']['weight']\" [" not in plain
    assert plain.count("pooling</FONT>") == 1
    assert "pooling</FONT>" not in draw("lenet", legend=False).source
    assert draw("lenet", heat="flops").source.count("FLOP</FONT>") == 11
    assert 'shape="hexagon"' in draw("lenet", node_attrs={"shape": "hexagon"}).source
    assert 'color="red"' in draw("lenet", node_attrs={"color": "red"}).source
    assert drawn("lenet").source.startswith("digraph lenet {")


def pixels(shown):
    data = base64.b64decode(shown["image/png"])
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_a_notebook_that_is_not_trusted_shows_a_png_of_a_sane_size():
    """JupyterLab drops frames and SVG there."""
    width, height = pixels(drawn("lenet")._repr_mimebundle_())
    assert 100 < width <= 960
    assert 400 < height <= 2400
    wide = viz.plot_network(lambda *xs: sum(jnp.tanh(x) for x in xs), *[m.Spec((2,), m.f32)] * 40)
    assert pixels(wide._repr_mimebundle_())[0] in range(900, 970)


def test_the_renderer_is_stopped_in_time():
    plot = draw("lenet", time_limit=0.001)
    with pytest.raises(viz.RenderError, match=r"did not finish in 0\.001 s and was stopped.*depth=0"):
        plot.pipe("svg")
    assert lists_all_layers(plot._repr_mimebundle_()["text/html"], plot.network)


def test_graphs_that_graphviz_cannot_draw_together_are_drawn_one_by_one(monkeypatch):
    """Graphviz 2.43 ends with "corrupted size vs. prev_size in fastbins" for the page of some steps."""
    run = render._run

    def crashes(command, text, time_limit):
        failed = subprocess.CompletedProcess(command, -6, b"", b"corrupted size vs. prev_size in fastbins")
        return failed if render.NEXT in text else run(command, text, time_limit)

    monkeypatch.setattr(render, "_run", crashes)
    drawn = render.render(render.NEXT.join(["digraph {first}", "digraph {second}"]), "json0", 30.0)
    assert re.findall(rb'"name": "(first|second)"', drawn) == [b"first", b"second"]


def test_what_graphviz_cannot_rank_is_drawn_otherwise():
    """Graphviz 2.43 ends with "trouble in init_rank" here."""
    tangled, x = m.tangle(400), m.Spec((4,), m.f32)
    plot = viz.plot_network(jax.grad(lambda x: tangled(x).sum()), x)
    done = subprocess.run(["dot", "-Tsvg"], input=plot.source.encode(), capture_output=True)
    if done.returncode == 0:
        pytest.skip("this Graphviz can rank it")
    assert len(m.groups(plot)) >= len(plot.network.layers)


@pytest.fixture
def no_dot(monkeypatch):
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def no_renderer(no_dot, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def lists_all_layers(table, graph):
    """Whether a page has a row for each node, and closes what it opens."""
    _, *rows = (each for each in ET.fromstring(f"<div>{table}</div>").iter() if each.get("role") == "row")
    names = [row[0].text for row in rows]
    return len(names) == len(graph.nodes) and all(map(str.startswith, names, (node.name for node in graph.nodes)))


def test_without_a_renderer_a_notebook_says_what_to_install_and_shows_the_table(no_renderer):
    plot = drawn("gradient")
    with pytest.raises(viz.RenderError, match=r"apt-get install graphviz.*pip install pygraphviz"):
        plot.pipe("svg")
    shown = plot._repr_mimebundle_()
    assert set(shown) == {"text/html", "text/plain"}
    assert [text.count("pip install pygraphviz") for text in shown.values()] == [1, 1]
    assert lists_all_layers(shown["text/html"], plot.network)


def test_a_graphviz_without_the_engine_of_steps_says_what_to_install(tmp_path, monkeypatch):
    """Debian's package of Graphviz 14 has the engine dot alone."""
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho 'Error: Layout type: \"nop2\" not recognized. Use one of: dot' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(viz.RenderError, match=r"not recognized.*\n.*neato_layout.*libgvplugin-neato-layout8"):
        draw("lenet").pipe("svg")


@pytest.mark.parametrize("write", ["save", "render"])
def test_without_a_renderer_the_table_is_written(no_renderer, tmp_path, write):
    plot, folder = drawn("gradient"), tmp_path / "new"
    with pytest.raises(viz.RenderError, match=r"pip install pygraphviz.*written to .*net\.layers\.html instead"):
        plot.save(folder / "net.png") if write == "save" else plot.render(folder / "net", format="png")
    (file,) = folder.iterdir()
    assert lists_all_layers(file.read_text(), plot.network)
    assert plot.save(tmp_path / "net.dot").endswith("net.dot")  # which needs no renderer


def test_without_dot_pygraphviz_draws(no_dot, monkeypatch, tmp_path):
    """A stand-in for the package: what is asked of it, and that its picture comes back."""
    (tmp_path / "pygraphviz.py").write_text(
        "class AGraph:\n"
        "    def __init__(self, string): self.string = string\n"
        "    def draw(self, format, prog, args): return f'{prog} {format} {len(self.string)}'.encode()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    plot = drawn("lenet")
    assert plot.pipe("svg") == f"dot svg {len(plot.source)}".encode()


@pytest.mark.parametrize("copies", [1, 3])
def test_an_arrow_of_two_arrays_says_so(copies):
    """It had the shape of one. Copies of a block that is drawn once do not count."""

    def net(layers, x):
        for number, w in enumerate(layers):
            with jax.named_scope(f"block{number}"):
                with jax.named_scope("split"):
                    wide, narrow = jnp.sin(h := jnp.tanh(x @ w)), jnp.exp(h[:, :2])
                with jax.named_scope("join"):
                    x = jax.nn.relu(jnp.concatenate([wide[:, :6], jnp.cos(narrow)], -1) @ w)
        return x

    w, x = m.Spec((8, 8), m.f32), m.Spec((4, 8), m.f32)
    args = [w] * copies, x
    assert '"split" -> "join" [label=" 4×2 and 1 more "]' in viz.plot_network(net, *args, depth=0).source
    assert "more" not in viz.plot_network(net, *args).source


@pytest.mark.parametrize(("count", "rows"), [(0, []), (4, [4]), (5, [3, 2]), (7, [4, 3]), (9, [3, 3, 3])])
def test_the_rows_of_a_legend_are_about_equally_long(count, rows):
    """A colour alone in the last row was as wide as the picture."""
    caption = caption_of([("title", 14, True)], [("#ffffff", f"kind {number}") for number in range(count)])
    assert [row.count("BGCOLOR") for row in caption.split("<TR><TD><TABLE")[1:]] == rows


def a_function_with_a_name_of_37_letters(p, x):
    return jnp.cos(x) * jnp.sin(x) + p["gain"]


def test_a_long_kind_without_details_is_drawn():
    """Its label had an empty line, which Graphviz refuses."""
    step = lambda p, x: a_function_with_a_name_of_37_letters(p, x)  # noqa: E731
    plot = viz.plot_network(step, {"gain": m.Spec((), m.f32)}, m.Spec((4,), m.f32))
    assert "a_function_with_a_name_of_37_letters" in m.words(plot)
    assert "1 params" not in m.words(plot)
