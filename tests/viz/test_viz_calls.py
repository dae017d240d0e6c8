"""Every call behaves: options, names, files, functions and arguments of any kind."""

import copy
import functools
import os
import pathlib
import pickle
import shutil
import xml.etree.ElementTree as ET

import graphviz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import viz_models as m

from jaxpar import viz
from jaxpar.viz._draw.table import to_html

PARAMS = {"w": m.Spec((4, 3), m.f32), "b": m.Spec((3,), m.f32)}
X = m.Spec((2, 4), m.f32)


def linear(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None])


def draw(**options):
    return viz.plot_network(linear, PARAMS, X, **options)


@functools.cache
def drawn():
    return draw()


@pytest.mark.parametrize(
    ("title", "shown"),
    [("", ""), (" ", ""), ("漢字テスト", "漢字テスト"), ('a"\\b', 'a"\\b'), ('<b>"&\\', '<b>"&\\'), ("one\ntwo", "one"),
     ("<b>x</b>", "<b>x</b>"), ("\x00\x1b[31m", "\\x00\\x1b[31m"), ("\ud800", "\\ud800"), ("../../etc", "../../etc")],
)  # fmt: skip
def test_titles(title, shown):
    plot = draw(title=title)
    assert shown in m.words(plot)
    assert "/" not in plot.name
    assert plot.name


@pytest.mark.parametrize("title", ["<<a", "<a>", "<<a>>", "<<b>bold</b>>"])
def test_a_title_is_text_whatever_it_looks_like(title):
    for plot in (draw(title=title), viz.diff((linear, (PARAMS, X)), (linear, (PARAMS, X)), title=title)):
        words = ET.fromstring(plot.pipe("svg")).iter(m.SVG + "text")
        assert any("".join(word.itertext()) == title for word in words)


@pytest.mark.parametrize(
    ("argnums", "params"),
    [(-1, 8), (-2, 15), (np.int64(1), 8), (range(2), 23), ((0, 0), 15), ([0, -1], 23), (None, 0), ((), 0), ({1}, 8)],
)
def test_params_argnums_count_as_pythons_indices_do(argnums, params):
    assert viz.trace(linear, PARAMS, X, params_argnums=argnums).total_params == params


def test_a_picture_is_a_digraph():
    plot = drawn()
    for same in (plot.copy(), copy.copy(plot), copy.deepcopy(plot), pickle.loads(pickle.dumps(plot))):
        assert type(same) is viz.Plot
        assert (same.source, same.network) == (plot.source, plot.network)
    before, more = plot.source, plot.copy()
    more.attr(rankdir="LR")
    more.node("mine", label="my own")
    more.edge("mine", "x")
    with more.subgraph(name="cluster_mine") as inner:
        inner.node("inside")
    more.subgraph(graphviz.Digraph("other", body=["\tafterwards\n"]))
    assert "my own" in m.words(more)
    assert "subgraph cluster_mine {\n\t\tinside" in more.source
    assert "afterwards" in more.source
    assert plot.source == before
    whole = graphviz.Digraph()
    whole.subgraph(plot)
    assert "tanh0" in whole.source
    if shutil.which("unflatten"):  # a program of Graphviz of its own, which Debian's package has no more from 14 on
        assert isinstance(plot.unflatten(stagger=3), graphviz.Source)
    more.clear()
    assert more.source == "digraph plot {\n}\n"


def test_pipe_and_render_take_what_graphviz_takes(tmp_path, monkeypatch):
    plot, shown = drawn().copy(), []
    monkeypatch.setattr(graphviz, "view", lambda path, **options: shown.append(path))
    assert plot.pipe("svg", encoding="utf-8", quiet=True).startswith("<?xml")
    assert plot.pipe("svg", engine="neato") != plot.pipe("svg")
    plot.format = "png"
    assert plot.pipe().startswith(b"\x89PNG")
    assert plot.view("net", directory=tmp_path) == str(tmp_path / "net.png") == shown[0]
    assert plot.render(outfile=tmp_path / "out.svg", cleanup=True) == str(tmp_path / "out.svg")
    with pytest.raises(FileExistsError, match="raise_if_result_exists"):
        plot.render("net", tmp_path, raise_if_result_exists=True)


def test_where_a_picture_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("a.svg", "b.SVG", "c.d.svg", pathlib.Path("deep/new/e.svg"), b"f.svg", "漢.svg", "~/g.svg"):
        with open(drawn().save(name), "rb") as file:
            assert file.read(5) == b"<?xml"
    for name, start in (("deep/net.png", b"\x89PNG"), ("deep/net.pdf", b"%PDF")):
        assert pathlib.Path(drawn().save(name)).read_bytes().startswith(start)
    assert (tmp_path / "home" / "g.svg").exists()
    assert drawn().save() == "plot.gv"
    for name in ("plain", "net.gv", "net.dot"):
        assert pathlib.Path(drawn().save(name)).read_text() == drawn().source
    (tmp_path / "old.svg").write_text("old")
    drawn().save("old.svg", skip_existing=True)
    assert (tmp_path / "old.svg").read_text() == "old"


def test_no_permission_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
    with pytest.raises(PermissionError, match=r"net\.svg cannot be written, since there is no permission to write"):
        drawn().save(tmp_path / "net.svg")


class Model:
    def __init__(self):
        self.w = jnp.ones((4, 3))

    def __call__(self, x):
        return x @ self.w

    def method(self, params, x):
        return linear(params, x)


def keywords(params, x, *, scale, power=2.0):
    return linear(params, x) * scale**power


FUNCTIONS = {
    "varargs": (lambda *xs: sum(xs), (X, X, X), {}),
    "keywords": (lambda **xs: xs["a"] + xs["b"], (), {"a": X, "b": X}),
    "keyword only": (keywords, (PARAMS, X), {"scale": 2.0}),
    "default": (lambda params, x, n=3: linear(params, x) * n, (PARAMS, X), {}),
    "partial": (functools.partial(linear, jax.tree.map(lambda s: jnp.ones(s.shape), PARAMS)), (X,), {}),
    "partial keyword": (functools.partial(linear, x=np.ones((2, 4), np.float32)), (PARAMS,), {}),
    "bound method": (Model().method, (PARAMS, X), {}),
    "object": (Model(), (X,), {}),
    "jit": (jax.jit(linear), (PARAMS, X), {}),
    "vmap": (jax.vmap(linear, (None, 0)), (PARAMS, m.Spec((5, 2, 4), m.f32)), {}),
    "grad": (jax.grad(lambda params, x: linear(params, x).sum()), (PARAMS, X), {}),
    "pmap": (jax.pmap(linear, in_axes=(None, 0)), (PARAMS, m.Spec((1, 2, 4), m.f32)), {}),
    "nested result": (lambda params, x: {"a": [linear(params, x), (x, None)], "b": {}}, (PARAMS, X), {}),
    "zero size": (linear, (PARAMS, m.Spec((0, 4), m.f32)), {}),
    "key": (lambda key, x: x + jax.random.normal(key, x.shape), (m.Spec((), jax.random.key(0).dtype), X), {}),
    "python scalars": (lambda a, b: a * b, (2, 3.0), {}),
    "none argument": (lambda a, b: a * 2, (X, None), {}),
    "numpy": (linear, ({"w": np.ones((4, 3)), "b": np.ones(3)}, np.ones((2, 4))), {}),
    "string": (lambda x, mode: x * 2 if mode == "double" else x, (X, "double"), {}),
    "ufunc": (jnp.tanh, (X,), {}),
}
DTYPES = "bfloat16 float8_e4m3fn float8_e5m2 int4 uint4 complex64 float16 int8 uint32".split()
FUNCTIONS |= {dtype: (jnp.add, (m.Spec((2, 4), jnp.dtype(dtype)),) * 2, {}) for dtype in DTYPES}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_arguments_of_any_kind(name):
    fn, args, kwargs = FUNCTIONS[name]
    plot, table = viz.plot_network(fn, *args, **kwargs), m.summary(fn, *args, **kwargs)
    assert plot.network.layers
    assert all(node.name[:20] in table for node in plot.network.layers)


@pytest.mark.parametrize(
    "fn", [lambda params, x: None, lambda params, x: 3.0, lambda params, x: x, lambda params, x: jnp.ones(3)]
)
def test_a_function_that_computes_nothing_is_drawn_as_such(fn):
    assert "Nothing is computed from the arguments." in m.words(viz.plot_network(fn, PARAMS, X))
    assert "Nothing is computed from the arguments." in m.summary(fn, PARAMS, X)
    assert "Nothing is computed from the arguments." in to_html(viz.trace(fn, PARAMS, X))
    assert "Nothing is computed from the arguments." in to_html(viz.trace(lambda: 1.0))  # and not even a row


ODD = ["漢字", 'a"b', "a\\b", "a\nb", "<b>", "{}|", "", "🎉", "\x07", "port:n", "n" * 500, 'we"ird\\<name>& [1]']


@pytest.mark.parametrize("name", ODD)
def test_names_of_any_kind(name):
    def fn(params, x):
        with jax.named_scope(name or "empty"):
            return jnp.sin(jnp.tanh(x @ params[name])) @ params[name]

    args = {name: m.Spec((4, 4), m.f32)}, X
    assert "tanh" in m.words(viz.plot_network(fn, *args, hide_weights=False))
    assert max(map(len, m.summary(fn, *args).splitlines())) <= 120


RESIZED = {
    "nearest": lambda x: jax.image.resize(x, (2, 6, 8, 3), "nearest"),
    "bilinear": lambda x: jax.image.resize(x, (2, 6, 8, 3), "bilinear"),
    "translated": lambda x: jax.image.scale_and_translate(x, (2, 6, 8, 3), (1, 2), jnp.ones(2), jnp.zeros(2), "cubic"),
}


@pytest.mark.parametrize("name", RESIZED)
def test_an_image_resized_is_one_box(name):
    """It was a product or a gather for each axis."""
    graph = viz.trace(lambda w, x: jax.grad(lambda x: jnp.sin(RESIZED[name](x) @ w).sum())(x), W, IMAGE)
    resized = [node for node in graph.layers if node.kind == "Resize"]
    assert [(node.is_backward, node.shape) for node in resized] == [(False, (2, 6, 8, 3)), (True, (2, 3, 4, 3))]
    assert not {"MatMul", "gather"} & {node.kind for node in graph.layers}


def test_images_resized_in_a_loop_are_a_box_each():
    def decoder(ws, x):
        for w in ws:
            x = jnp.tanh(jax.image.resize(x, (2, 2 * x.shape[1], 2 * x.shape[2], 3), "linear") @ w)
        return x

    graph = viz.trace(decoder, [W, W], IMAGE)
    assert [node.shape for node in graph.layers if node.op == "Resize"] == [(2, 6, 8, 3), (2, 12, 16, 3)]


W, IMAGE = jax.ShapeDtypeStruct((3, 3), jnp.float32), jax.ShapeDtypeStruct((2, 3, 4, 3), jnp.float32)
