"""Two networks compared: what is matched, what the deltas are, and the picture and the table of them."""

import copy
import functools
import pickle
from collections import Counter

import graphviz
import jax
import jax.numpy as jnp
import pytest
import viz_models as m

from jaxpar import viz
from jaxpar._core.text import columns
from jaxpar.models import lenet
from jaxpar.viz._diff.picture import COLOURS


def dense(features, outputs):
    return {"w": m.Spec((features, outputs), m.f32), "b": m.Spec((outputs,), m.f32)}


PARAMS = {"dense1": dense(64, 128), "dense2": dense(128, 10)}
DEEPER = {**PARAMS, "mid": dense(128, 128)}
X = m.Spec((32, 64), m.f32)


def linear(params, x):
    return x @ params["w"] + params["b"][None]


def mlp(params, x, act=jax.nn.relu, drop=False):
    x = act(linear(params["dense1"], x))
    if drop:
        x = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x / 0.9, 0)
    if "mid" in params:
        x = act(linear(params["mid"], x))
    return linear(params["dense2"], x)


def half(tree):
    return jax.tree.map(lambda leaf: m.Spec(leaf.shape, jnp.bfloat16), tree)


WIDER = {**m.LENET, "dense1": {"weight": m.Spec((800, 256), m.f32), "bias": m.Spec((256,), m.f32)},
         "dense2": {"weight": m.Spec((256, 10), m.f32), "bias": m.Spec((10,), m.f32)}}  # fmt: skip
MLP = mlp, (PARAMS, X)
BATCH = m.LENET, m.IMAGES, m.LABELS
# the two networks; the names that changed, were added and were removed; the parameters that were added
CASES = {
    "same": (MLP, MLP, "", "", "", 0),
    "wider": ((lenet.apply, (m.LENET, m.IMAGES)), (lenet.apply, (WIDER, m.IMAGES)), "dense1 relu2 dense2", "", "",
              103808),
    "dropout": (MLP, (functools.partial(mlp, drop=True), (PARAMS, X)), "relu0", "elementwise0", "", 0),
    "gelu": (MLP, (functools.partial(mlp, act=jax.nn.gelu), (PARAMS, X)), "gelu0", "", "", 0),
    "inserted": (MLP, (mlp, (DEEPER, X)), "", "mid relu1", "", 16512),
    "taken out": ((mlp, (DEEPER, X)), MLP, "", "", "mid relu1", -16512),
    "bfloat16": (MLP, (mlp, (half(PARAMS), half(X))), "x dense1 relu0 dense2", "", "", 0),
    "nothing left": (MLP, (lambda params, x: x, (PARAMS, X)), "", "", "x dense1 relu0 dense2", -9610),
    "gradient": ((m.lenet_loss, BATCH), (jax.grad(m.lenet_loss), BATCH), "relu0 relu1 relu2 loss0",
                 [f"{name} (backward)" for name in ("loss0 dense2 relu2 dense1 flatten0 pooling1 relu1 conv2 pooling0 "
                                                    "relu0 conv1").split()], "", 0),
}  # fmt: skip


@functools.cache
def compared(name):
    before, after, *_ = CASES[name]
    return viz.diff(before, after, title=name)


@pytest.mark.parametrize("name", CASES)
def test_what_is_matched_and_what_it_costs(name):
    before, after, changed, added, removed, params = CASES[name]
    diff = compared(name).diff
    graphs = [viz.trace(fn, *args) for fn, args in (before, after)]
    assert [diff.before, diff.after] == graphs
    for status, names in (("changed", changed), ("added", added), ("removed", removed)):
        found = [change.node.name for change in diff.changes if change.status == status]
        assert found == (names if isinstance(names, list) else names.split())
    for side, graph in zip(("before", "after"), graphs, strict=True):
        nodes = [getattr(change, side) for change in diff.changes if getattr(change, side) is not None]
        assert sorted(nodes, key=repr) == sorted(graph.nodes, key=repr)  # each node is in one change
    assert diff.params == params == sum(change.params for change in diff.changes)
    assert diff.flops == graphs[1].total_flops - graphs[0].total_flops == sum(change.flops for change in diff.changes)
    sums = [sum(node.bytes for node in graph.nodes) for graph in graphs]
    assert diff.bytes == sums[1] - sums[0]
    assert sum(diff.counts.values()) == len(diff.changes)


def test_the_number_of_blocks():
    diff = viz.diff(*((m.transformer, (m.transformer_params(blocks), m.TOKENS)) for blocks in (3, 6))).diff
    assert diff.counts == {"same": 4, "changed": 12, "added": 0, "removed": 0}
    assert {(c.before.repeat, c.after.repeat) for c in diff.changes if c.status == "changed"} == {(3, 6)}
    assert "q ×3 → ×6 (FullyConnected 64)" in str(diff)


def test_an_inserted_layer_does_not_shift_numbered_names():
    def net(params, x):
        for name in params:
            x = jnp.tanh(x @ params[name])
        return x

    shapes = (64, 32), (32, 16), (16, 10)
    before = {f"Dense_{n}": m.Spec(shape, m.f32) for n, shape in enumerate(shapes)}
    after = {f"Dense_{n}": m.Spec(shape, m.f32) for n, shape in enumerate((shapes[0], (32, 32), *shapes[1:]))}
    diff = viz.diff((net, (before, X)), (net, (after, X))).diff
    assert diff.counts == {"same": 7, "changed": 0, "added": 2, "removed": 0}
    assert diff.params == 32 * 32


@pytest.mark.parametrize("name", CASES)
def test_the_picture_has_every_layer_in_the_colour_of_its_status(name):
    plot = compared(name)
    assert isinstance(plot, graphviz.Digraph)
    assert type(plot) is viz.DiffPlot
    fills = Counter(next(e.get("fill") for e in group.iter() if e.get("fill")) for group in m.groups(plot))
    assert fills == {COLOURS[status]: count for status, count in plot.diff.counts.items() if count}
    words = m.words(plot)
    assert name in words
    for status, count in plot.diff.counts.items():
        assert (f"{count} {status}" in words) == (count > 0)


def test_changed_boxes_have_before_after_and_the_deltas():
    words = m.words(compared("wider"))
    for text in ("FullyConnected 128 → 256", "256x128 → 256x256 float32", "+102,528 params, +52.5 MFLOP", "+541 kB",
                 "before: 129,068 params", "after: 232,876 params", "Δ +103,808 params · +53.1 MFLOP"):  # fmt: skip
        assert text in words
    assert "−16,512 params" in compared("taken out").source


@pytest.mark.parametrize("name", [*CASES, "long"])
def test_the_table(name):
    if name == "long":
        long = {"n" * 300: {"漢" * 100: m.Spec((4, 4), m.f32)}}
        fn = lambda params, x: x @ params["n" * 300]["漢" * 100]  # noqa: E731
        narrow, wide = m.Spec((2, 4), m.f32), m.Spec((20, 4), m.f32)
        diff = viz.diff((fn, (long, narrow)), (fn, (long, wide))).diff
    else:
        diff = compared(name).diff
    lines = str(diff).splitlines()
    assert max(map(columns, lines)) <= 120
    assert sum(line[:1] in "~+-" and line[1:4] == "   " for line in lines) == len(diff.changes) - diff.counts["same"]
    assert f"{diff.counts['changed']} changed" in repr(diff)
    assert "\n" not in repr(diff)


def test_a_layer_that_was_removed_can_have_the_name_of_another():
    def first(params, x):
        return jnp.sin(jnp.tanh(x @ params))

    def second(params, x):
        return jnp.tanh(jnp.sin(x @ params))

    args = m.Spec((4, 4), m.f32), m.Spec((2, 4), m.f32)
    plot = viz.diff((first, args), (second, args))
    assert plot.diff.counts == {"same": 3, "changed": 0, "added": 1, "removed": 1}
    assert len(m.groups(plot)) == 5


def test_it_is_saved_copied_and_shown_as_a_picture_is(tmp_path, monkeypatch):
    plot = compared("wider")
    assert plot.save(tmp_path / "d.png").endswith("d.png")
    for same in (plot.copy(), copy.deepcopy(plot), pickle.loads(pickle.dumps(plot))):
        assert (same.source, same.diff) == (plot.source, plot.diff)
    assert set(plot._repr_mimebundle_()) == {"text/html", "image/png", "text/plain"}
    page = plot.html()
    assert page.count("<svg") == 1
    assert "<td style='text-align:right;padding:2px 8px'>+102,528</td>" in page
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    shown = plot._repr_mimebundle_()
    assert "pip install pygraphviz" in shown["text/html"]
    assert shown["text/html"].count("<tr>") == 1 + 3
    with pytest.raises(viz.RenderError, match=r"d\.layers\.html instead"):
        plot.save(tmp_path / "d.svg")
    assert "+102,528" in (tmp_path / "d.layers.html").read_text()


def test_networks_in_other_forms():
    graph = viz.trace(mlp, PARAMS, X)
    plot = viz.diff(graph, (mlp, [PARAMS, X], {}), theme="dark", legend=False, title="")
    assert plot.diff.counts["same"] == 4
    assert "#1e1e1e" in plot.source
    keywords = viz.diff((lambda p, *, x: p @ x, (jnp.ones((2, 3)),), {"x": jnp.ones((3, 2))}), graph)
    assert keywords.diff.counts["added"] == 2
    names = [change.node.name for change in viz.diff(MLP, MLP, params_argnums=None).diff.changes]
    assert "x" in names
    assert len(names) > 4


def test_a_repeat_without_a_name_has_what_is_in_it():
    def net(params, x):
        for up, down in params:
            x = x + jax.numpy.tanh(x @ up) @ down
        return x

    def args(count, width):
        shapes = jax.ShapeDtypeStruct((8, width), "float32"), jax.ShapeDtypeStruct((width, 8), "float32")
        return [shapes] * count, jax.ShapeDtypeStruct((2, 8), "float32")

    assert "2 FullyConnected + 2 ×3" in viz.diff((net, args(3, 16)), (net, args(3, 32))).source
    assert "2 FullyConnected + 2 ×3 → ×4" in viz.diff((net, args(3, 16)), (net, args(4, 32))).source
