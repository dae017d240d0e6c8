"""What `viz` refuses: the call, the exception, and the names and values that its message must have, in this order.

What people do by mistake is in tests/house/test_mistakes.py, with what to do. What stands in the way of drawing, such
as a program that is not installed, is in the tests of the picture.
"""

import io
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import viz_models as m

from jaxpar import viz

PARAMS = {"w": m.Spec((4, 3), m.f32), "b": m.Spec((3,), m.f32)}
X = m.Spec((2, 4), m.f32)
ARGS = PARAMS, X


def linear(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None])


def step(params, x):
    grads = jax.grad(lambda params: linear(params, x).sum())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def broken(params, x):
    return step(params, x)


def lower(*args):
    raise RuntimeError("out of memory while compiling")


broken.lower = lower


def never(*args):
    pytest.fail("traced")


NETWORK, PLOT = (linear, ARGS), viz.plot_network(linear, *ARGS)


def of_rule(rule):
    return lambda: viz.trace(jnp.sin, X, rules=[rule])


def drawn(*args, **options):
    return lambda: viz.plot_network(*(args or (linear, PARAMS, X)), **options)


def of_step(**options):
    return lambda: viz.plot_step(never, *ARGS, **options)


T, V = TypeError, ValueError
REFUSED = {
    # Functions and arrays.
    "the name of a function": (T, drawn("linear", *ARGS), ["'linear'"]),
    "params before the function": (T, drawn(PARAMS, linear, X), ["dict"]),
    "None for a function": (T, drawn(None), ["None"]),
    "a generator": (T, drawn(linear, PARAMS, (i for i in range(3))), ["x", "linear", "generator"]),
    "an iterator among params": (T, drawn(linear, {"w": iter([X])}, X), ["params['w']", "linear", "list_iterator"]),
    "an array of objects": (T, drawn(linear, PARAMS, np.array([None, "a"])), ["x", "linear", "object"]),
    "a date": (T, drawn(linear, PARAMS, np.datetime64("2020-01-01")), ["x", "linear", "datetime64[D]"]),
    "a table of columns": (T, drawn(linear, PARAMS, np.zeros(2, [("a", int)])), ["x", "linear", "dtype"]),
    "a text for an array": (T, drawn(linear, PARAMS, "train"), ["linear", "x='train'"]),
    "a dtype for an array": (T, drawn(linear, PARAMS, jnp.float32), ["linear", "x="]),
    "a shape of no argument": (T, drawn(linear, PARAMS, shape={"pictures": (2, 4)}), ["linear", "shape", "x"]),
    "a shape without a name": (T, drawn(linear, PARAMS, shape=(2, 4)), ["shape"]),
    "a text for a shape": (T, drawn(linear, PARAMS, shape={"x": "2x4"}), ["shape", "'2x4'"]),
    # Options of pictures.
    "argument 9 for params": (V, drawn(params_argnums=9), ["params_argnums", "9", "[0, 1]"]),
    "argument -3 for params": (V, drawn(params_argnums=-3), ["params_argnums", "-3", "2"]),
    "argument 2 among them": (V, drawn(params_argnums=(0, 2)), ["params_argnums", "2"]),
    "True for an argument": (T, drawn(params_argnums=True), ["params_argnums", "True"]),
    "the name of an argument": (T, drawn(params_argnums="params"), ["params_argnums", "'params'"]),
    "argument 0.0": (T, drawn(params_argnums=0.0), ["params_argnums", "0.0"]),
    "a negative depth": (V, drawn(depth=-1), ["depth", "-1"]),
    "True for a depth": (T, drawn(depth=True), ["depth", "True"]),
    "a depth for open": (T, drawn(open=1), ["open", "viz.Node", "1"]),
    "open for a table": (T, lambda: m.summary(linear, *ARGS, open=lambda node: True), ["open=", "depth="]),
    "no nodes": (V, drawn(max_nodes=0), ["max_nodes", "0"]),
    "a word for repeats": (T, drawn(repeats="no"), ["repeats", "'no'"]),
    "a number for rules": (T, drawn(rules=3), ["rules", "viz.Call", "viz.Pattern", "viz.Rule", "3"]),
    "a name for a rule": (T, drawn(rules=["attend"]), ["rules", "'attend'"]),
    "None for a title": (T, drawn(title=None), ["title", "None"]),
    "a theme": (V, drawn(theme="blue"), ["plot_network", "'blue'", "light"]),
    "a heat": (V, drawn(heat="watts"), ["plot_network", "'watts'", "flops"]),
    "a direction": (V, drawn(direction="left"), ["plot_network", "'left'", "up, down"]),
    "a word for hide_weights": (T, drawn(hide_weights="no"), ["hide_weights", "'no'"]),
    "a number for legend": (T, drawn(legend=1), ["legend", "1"]),
    "less than no time": (V, drawn(time_limit=-1), ["time_limit", "-1"]),
    "no number of seconds": (V, drawn(time_limit=float("nan")), ["time_limit", "nan"]),
    "a text of seconds": (T, drawn(time_limit="1"), ["time_limit", "'1'"]),
    "attributes by number": (T, drawn(node_attrs={3: "a"}), ["node_attrs", "3"]),
    "text in a format of pixels": (V, lambda: PLOT.pipe("png", encoding="utf-8"), ["png", "encoding='utf-8'"]),
    "a number for a format": (T, lambda: PLOT.pipe(3), ["format", "3"]),
    "a frozen param that is none": (V, lambda: m.summary(linear, *ARGS, frozen="w1"), ["frozen='w1'", "w, b"]),
    "a number of frozen params": (T, lambda: m.summary(linear, *ARGS, frozen=3), ["frozen", "3"]),
    "a name that viz lacks": (AttributeError, lambda: viz.plot, ["'jaxpar.viz'", "'plot'"]),
    "a shape for a search": (
        T,
        lambda: viz.first_nonfinite(lambda p, x: p * x, np.float32(1), X),
        ["x", "shape"],
    ),
    # Rules.
    "a pattern without a name": (T, of_rule(viz.Pattern(3, jnp.sin)), ["viz.Pattern", "op", "3"]),
    "a pattern without a function": (T, of_rule(viz.Pattern("Sine", "sin")), ["viz.Pattern", "function", "'sin'"]),
    "a pattern of other shapes": (V, of_rule(viz.Pattern("Mine", lambda x: x.reshape(5))), ["'Mine'", "x", "(4, 8)"]),
    "a pattern of two results": (V, of_rule(viz.Pattern("Mine", lambda x: (jnp.sin(x), jnp.cos(x)))), ["'Mine'"]),
    "a call of a number": (T, of_rule(viz.Call(3, "Attention")), ["viz.Call", "3"]),
    "a call without a name": (T, of_rule(viz.Call("attend", None)), ["viz.Call", "None"]),
    "a rule without a function": (T, of_rule(viz.Rule("mine", frozenset(), 3)), ["match", "viz.Rule", "'mine'", "3"]),
    "a rule that gives a number": (
        T,
        of_rule(viz.Rule("mine", frozenset(("sin",)), lambda *_: 5)),
        ["'mine'", "viz.Fold", "5"],
    ),
    # Two networks.
    "a function alone": (T, lambda: viz.diff(linear, NETWORK), ["first", "(fn, args)", "linear"]),
    "arguments beside the function": (T, lambda: viz.diff((linear, *ARGS), NETWORK), ["first", "dict"]),
    "one argument": (T, lambda: viz.diff((linear, X), NETWORK), ["first", "float32[2,4]"]),
    "no arguments": (T, lambda: viz.diff((linear,), NETWORK), ["first"]),
    "the name of a network": (T, lambda: viz.diff(("linear", ARGS), NETWORK), ["'linear'"]),
    "a number for a network": (T, lambda: viz.diff(NETWORK, 3), ["second", "3"]),
    "a number for the title of a diff": (T, lambda: viz.diff(NETWORK, NETWORK, title=3), ["diff", "title", "3"]),
    "a word for the depth of a diff": (T, lambda: viz.diff(NETWORK, NETWORK, depth="a"), ["depth", "'a'"]),
    # Steps. Options are looked at before anything is traced.
    "a function that trains nothing": (V, lambda: viz.trace_step(linear, *ARGS), ["trace_step", "linear"]),
    "a batch that does not fit": (
        V,
        lambda: viz.trace_step(step, PARAMS, m.Spec((2, 5), m.f32)),
        ["step", "argument 1", "(2, 5)"],
    ),
    "a text for a batch": (T, lambda: viz.trace_step(step, PARAMS, "text"), ["viz", "step", "x='text'"]),
    "a step without its batch": (V, lambda: viz.trace_step(step, PARAMS), ["step"]),
    "a step that does not compile": (V, lambda: viz.trace_step(broken, *ARGS), ["broken", "out of memory"]),
    "a negative depth of a step": (V, of_step(depth=-1), ["trace_step", "depth", "-1"]),
    "a word for the rules of a step": (T, of_step(rules="all"), ["trace_step", "rules", "viz.Call", "'all'"]),
    "a number for the repeats of a step": (T, of_step(repeats=1), ["trace_step", "repeats", "1"]),
    "a word for seconds": (T, of_step(heat={"layer0": "fast"}), ["profile['layer0']", "'fast'"]),
    "negative seconds": (V, of_step(heat={"layer0": -1.0}), ["profile['layer0']", "-1.0"]),
    "seconds that are none": (V, of_step(heat={"layer0": np.nan}), ["profile['layer0']", "nan"]),
    "a heat of a step": (V, of_step(heat="no such"), ["heat", "flop/byte, memory", "'no such'"]),
    "a theme of a step": (V, of_step(theme="blue"), ["'blue'"]),
    "a number for heat": (T, of_step(heat=3), ["profile", "int"]),
    "no time for a step": (V, of_step(time_limit=0), ["plot_step", "time_limit", "0"]),
    "a limit without heights": (V, of_step(limit=1), ["limit", 'height="memory"']),
}  # fmt: skip


def says(content):
    return ".*".join(map(re.escape, content))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, call, content = REFUSED[case]
    with pytest.raises(error, match=f"(?s){says(content)}"):
        call()


FILES = {
    "nothing": ("", V, ["empty"]),
    "an ending alone": (".svg", V, ["'.svg'", "'plot.svg'"]),
    "an ending in a folder": (Path("sub/.PNG"), V, [".PNG"]),
    "NUL": ("x\0.svg", V, ["NUL"]),
    "no format": ("x.xyz", viz.RenderError, ["xyz", "html, svg, png"]),
    "nearly a format": ("x.svgg", viz.RenderError, ["svgg", "svg"]),
    "a folder": ("folder.svg", IsADirectoryError, ["folder.svg"]),
    "a file for a folder": ("file/x.svg", NotADirectoryError, ["file"]),
    "a number": (3, T, ["3"]),
    "an open file": (io.BytesIO(), T, ['file.write(plot.pipe("svg"))']),
}


@pytest.mark.parametrize("case", FILES)
def test_names_of_files_that_are_refused_before_anything_is_drawn(case, tmp_path, monkeypatch):
    name, error, content = FILES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("jaxpar.viz._draw.render.render", lambda *args: pytest.fail("drawn"))
    with pytest.raises(error, match=says(content)):
        PLOT.save(name)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.svg"]
