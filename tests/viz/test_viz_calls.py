"""Every call behaves: options, names, files, functions and arguments of any kind."""

import copy
import functools
import io
import os
import pathlib
import pickle
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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"params_argnums": 9}, ValueError, r"params_argnums is 9, and there are 2 positional arguments: \[0, 1\]"),
        ({"params_argnums": -3}, ValueError, "params_argnums is -3, and there are 2"),
        ({"params_argnums": (0, 2)}, ValueError, "params_argnums is 2"),
        ({"params_argnums": True}, TypeError, "params_argnums must be .* or several of them, got True"),
        ({"params_argnums": "params"}, TypeError, "params_argnums must be .* got 'params'"),
        ({"params_argnums": 0.0}, TypeError, r"got 0\.0"),
        ({"depth": -1}, ValueError, "depth must be an int of 0 or more, got -1"),
        ({"depth": True}, TypeError, "depth must be an int"),
        ({"max_nodes": 0}, ValueError, "max_nodes must be an int of 1 or more, got 0"),
        ({"repeats": "no"}, TypeError, "repeats must be True or False, got 'no'"),
        ({"rules": 3}, TypeError, "rules must be a list of viz.Call, viz.Pattern and viz.Rule .* got 3"),
        ({"rules": ["attend"]}, TypeError, "got 'attend' in it"),
        ({"title": None}, TypeError, "title must be a string, got None"),
        ({"theme": "blue"}, ValueError, "plot_network: unknown theme 'blue'; known are light"),
        ({"heat": "watts"}, ValueError, "plot_network: unknown heat 'watts'; known are "),
        ({"direction": "left"}, ValueError, "plot_network: unknown direction 'left'; known are up, down"),
        ({"hide_weights": "no"}, TypeError, "hide_weights must be True or False"),
        ({"legend": 1}, TypeError, "legend must be True or False, got 1"),
        ({"time_limit": -1}, ValueError, "time_limit must be a number of seconds above 0, got -1"),
        ({"time_limit": float("nan")}, ValueError, "time_limit must be a number"),
        ({"time_limit": "1"}, TypeError, "time_limit must be a number"),
        ({"node_attrs": {3: "a"}}, TypeError, "node_attrs must be a dict .* got the name 3"),
    ],
)  # fmt: skip
def test_options_that_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        draw(**options)


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
    assert isinstance(plot.unflatten(stagger=3), graphviz.Source)
    more.clear()
    assert more.source == "digraph plot {\n}\n"


def test_pipe_and_render_take_what_graphviz_takes(tmp_path, monkeypatch):
    plot, shown = drawn().copy(), []
    monkeypatch.setattr(graphviz, "view", lambda path, **options: shown.append(path))
    assert plot.pipe("svg", encoding="utf-8", quiet=True).startswith("<?xml")
    assert plot.pipe("svg", engine="neato") != plot.pipe("svg")
    with pytest.raises(ValueError, match="png is not text; leave out encoding='utf-8'"):
        plot.pipe("png", encoding="utf-8")
    with pytest.raises(TypeError, match="format must be a string"):
        plot.pipe(3)
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


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", ValueError, "must not be empty"),
        (".svg", ValueError, r"'\.svg' is only an ending; write a name before it, such as 'plot\.svg'"),
        (pathlib.Path("sub/.PNG"), ValueError, r"only an ending"),
        ("x\0.svg", ValueError, "NUL"),
        ("x.xyz", viz.RenderError, "cannot draw xyz, which is not a format; the usual ones are html, svg, png"),
        ("x.svgg", viz.RenderError, "did you mean svg"),
        ("folder.svg", IsADirectoryError, r"folder\.svg is a folder; write the name of a file in it"),
        ("file/x.svg", NotADirectoryError, "file is not a directory"),
        (3, TypeError, 'expected a path such as "net.svg", got 3'),
        (io.BytesIO(), TypeError, r'file\.write\(plot\.pipe\("svg"\)\)'),
    ],
)
def test_names_of_files_that_are_refused_before_anything_is_drawn(name, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("jaxpar.viz._draw.render.render", lambda *args: pytest.fail("drawn"))
    with pytest.raises(error, match=message):
        drawn().save(name)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.svg"]


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


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        ("linear", (PARAMS, X), "expected a function and then its arguments, got 'linear' first"),
        (PARAMS, (linear, X), "expected a function and then its arguments, got a dict"),
        (None, (), "got None first"),
        (linear, (PARAMS, (i for i in range(3))), "argument x of linear is a generator, which can be read only once"),
        (linear, ({"w": iter([X])}, X), r"argument params\['w'\] of linear is a list_iterator"),
        (linear, (PARAMS, np.array([None, "a"])), "argument x of linear is an array of dtype object, which JAX"),
        (linear, (PARAMS, np.datetime64("2020-01-01")), r"dtype datetime64\[D\], which JAX does not have"),
        (linear, (PARAMS, np.zeros(2, [("a", int)])), "which JAX does not have"),
        (linear, (PARAMS, "train"), "linear cannot be traced with x='train', which is not an array"),
        (linear, (PARAMS, jnp.float32), "linear cannot be traced with x=.*, which is not an array"),
    ],
)  # fmt: skip
def test_what_is_no_function_or_no_array(fn, args, message):
    with pytest.raises(TypeError, match=message):
        viz.plot_network(fn, *args)


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
