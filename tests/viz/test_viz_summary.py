"""The table of layers, and `jaxpar plot`."""

import argparse
import io
import re
import sys

import jax
import jax.numpy as jnp
import pytest
import viz_models as m

from jaxpar import viz
from jaxpar._cli import plot
from jaxpar.models import lenet, matrix_factorization
from jaxpar.viz._draw.table import to_html


def summary(fn, *args, **options):
    out = io.StringIO()
    viz.print_summary(fn, *args, file=out, **options)
    return out.getvalue()


def test_lenet_has_mxnets_layers_and_counts():
    """mxnet.visualization.print_summary of the same net: its layers and parameters, without the batch axis."""
    mxnet = [
        ("null", "1x28x28", 0), ("Convolution", "20x26x26", 200), ("relu", "20x26x26", 0), ("Pooling", "20x13x13", 0),
        ("Convolution", "50x9x9", 25050), ("relu", "50x9x9", 0), ("Pooling", "50x4x4", 0), ("Flatten", "800", 0),
        ("FullyConnected", "128", 102528), ("relu", "128", 0), ("FullyConnected", "10", 1290),
    ]  # fmt: skip
    text = summary(lenet.apply, m.LENET, m.IMAGES)
    rows = [line for line in text.splitlines() if "float32" in line]
    assert len(rows) == len(mxnet)
    for row, (kind, shape, params) in zip(rows, mxnet, strict=True):
        assert {"null": "input"}.get(kind, kind) in row
        found = re.search(r"256x([\dx]+) float32 +(\d+)", row)
        channels, *spatial = shape.split("x")
        assert found
        assert found[1] == "x".join([*spatial, channels])
        assert int(found[2]) == params
    assert "Total params: 129068\n" in text
    assert f"Total FLOPs: {viz.trace(lenet.apply, m.LENET, m.IMAGES).total_flops}\n" in text
    assert re.search(r"relu0 .* conv1$", text, re.M)


def test_scalars_vectors_and_shared_weights():
    text = summary(m.factorization_loss, *m.factorization(), m.Spec((32,), m.f32))
    assert re.search(r"loss0 \(Loss squared error\) +scalar float32", text)
    assert "Total params: 168000" in text
    assert "Total params: 9\n" in summary(lambda w, x: x @ w @ w, jnp.ones((3, 3)), jnp.ones((2, 3)))


def test_every_layer_is_in_the_table_repeats_once():
    args = m.transformer, m.transformer_params(4), m.TOKENS
    assert "attn/q (FullyConnected 64) ×4" in summary(*args)
    assert summary(*args).count("LayerNorm") == 3
    assert summary(*args, repeats=False).count("LayerNorm") == 9


def test_prints_to_standard_output(capsys):
    viz.print_summary(matrix_factorization.apply, *m.factorization())
    assert "user (Embedding 943x64)" in capsys.readouterr().out


def test_html_is_escaped_and_complete():
    def fn(params, x):
        with jax.named_scope("a<b>"):
            return x @ params["w<1>"]

    graph = viz.trace(fn, {"w<1>": m.Spec((4, 4), m.f32)}, m.Spec((3, 4), m.f32))
    page = to_html(graph)
    assert page.count("<tr") == 1 + len(graph.nodes)
    assert "<1>" not in page
    assert "16 parameters" in page


def run(*words):
    parser = argparse.ArgumentParser()
    plot.add_arguments(parser)
    return plot.run(parser.parse_args(words))


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import jax.numpy as jnp\nW = jnp.ones((4, 3))\ndef net(x):\n    return jnp.tanh(x @ W)\nVALUE = 3\n"
    (tmp_path / "my_nets.py").write_text(text)
    yield tmp_path
    sys.modules.pop("my_nets", None)


def test_plot_lenet_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "lenet.svg"
    assert run("lenet", "-o", str(path), "--summary") == 0
    assert "Convolution" in path.read_text()
    out = capsys.readouterr().out
    assert "129,068 parameters" in out
    assert "Total params: 129068" in out


def test_the_help_of_plot_names_what_it_writes(tmp_path):
    parser = argparse.ArgumentParser()
    plot.add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for ending in re.findall(r"\.[a-z]{3}\b", text.partition("its ending is the format: ")[2].partition("(")[0]):
        path = tmp_path / f"net{ending}"
        assert run("matrix_factorization", "-o", str(path)) == 0
        assert path.stat().st_size > 100
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".png", ".pdf", ".gif", ".dot"}


def test_plot_a_function_of_a_module(module, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run("my_nets:net", "--input", "8x4:f32", "-o", "net.dot", "--theme", "dark", "--heat", "flops") == 0
    text = (module / "net.dot").read_text()
    assert "8×4" in text
    assert "FullyConnected" in text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["my_nets"], 2, "expected MODULE:FUNCTION"),
        (["no_such_module:f"], 2, "cannot import no_such_module"),
        (["my_nets:missing"], 2, "has no missing"),
        (["my_nets:VALUE"], 2, "is a int; expected a function"),
        (["my_nets:net", "--input", "8by4"], 2, "expected SHAPE:DTYPE such as"),
        (["my_nets:net", "--input", "8x4:q7"], 2, "unknown dtype 'q7'"),
        (["my_nets:net", "--input", "8x4", "--params", "1"], 2, "there are 1 inputs"),
        (["my_nets:net", "--input", "8x5"], 1, "cannot be traced: TypeError"),
        (["my_nets:net", "--input", "8x4", "-o", "net.nonsense"], 1, "cannot draw nonsense"),
    ],
)
def test_bad_command_lines(module, monkeypatch, capsys, words, status, message):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run(*words) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("jaxpar plot: ")


def test_without_a_renderer_the_command_line_ends_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("matrix_factorization", "-o", str(tmp_path / "mf.svg")) == 1
    out, error = capsys.readouterr()
    assert error.startswith("jaxpar plot: jaxpar.viz: the program `dot`")
    assert error.count("\n") == 1
    assert "Embedding" in (tmp_path / "mf.layers.html").read_text()
    assert not out


@pytest.mark.parametrize(
    ("text", "shape", "dtype"), [("2x3:bf16", (2, 3), "bfloat16"), (":i32", (), "int32"), ("7", (7,), "float32")]
)
def test_parse_input(text, shape, dtype):
    found = plot.parse_input(text)
    assert (found.shape, found.dtype) == (shape, dtype)
