"""`jaxpar plot`: functions, shapes and parameters by name, formats, and what is refused."""

import os
import re
import sys

import pytest
from test_command_line import parser_of

from jaxpar import viz
from jaxpar._cli import commands


def run(*words):
    args = parser_of("plot").parse_args(words)
    return args.run(args)


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = """
import jax
import jax.numpy as jnp
W = jnp.ones((4, 3))
VALUE = 3
def net(x):
    return jnp.tanh(x @ W)
def apply(params, x):
    return jnp.tanh(x @ params["w"])
def init(rng):
    return {"w": jax.random.normal(rng, (4, 3))}
def init_like(rng, x):
    return {"w": jax.random.normal(rng, (x.shape[-1], 7))}
def like_flax(rng, *args, **options):
    return init_like(rng, *args)
def fixed():
    return {"w": W}
def fails():
    return 1 / 0
class Model:
    def apply(self, params, x):
        return apply(params, x)
model = Model()
"""
    (tmp_path / "my_nets.py").write_text(text)
    (tmp_path / "broken_nets.py").write_text("def net(:")
    yield tmp_path
    sys.modules.pop("my_nets", None)


def test_plot_lenet_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "lenet.svg"
    assert run("lenet", "-o", str(path), "--summary") == 0
    assert "Convolution" in path.read_text()
    out = capsys.readouterr().out
    assert "129,068 parameters" in out
    assert "Total params: 129,068" in out


def test_a_reader_that_has_read_enough_is_no_error(tmp_path, monkeypatch, capsys):
    """As `head` in `jaxpar plot lenet --summary | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert run("lenet", "-o", str(tmp_path / "lenet.dot"), "--summary") == 1
    assert capsys.readouterr().err == ""


def test_the_help_of_plot_names_what_it_writes(tmp_path):
    text = " ".join(parser_of("plot").format_help().split())
    for ending in re.findall(r"\.[a-z]{3,4}\b", text.partition("its ending is the format: ")[2].partition("(")[0]):
        path = tmp_path / f"net{ending}"
        assert run("matrix_factorization", "-o", str(path)) == 0
        assert path.stat().st_size > 100
    assert {path.suffix for path in tmp_path.iterdir()} == {".html", ".svg", ".png", ".pdf", ".gif", ".dot"}


def test_plot_a_function_of_a_module(module):
    assert run("my_nets:net", "--input", "8x4:f32", "-o", "net.dot", "--theme", "dark", "--heat", "flops") == 0
    text = (module / "net.dot").read_text()
    assert "8×4" in text
    assert "FullyConnected" in text


INITS = {"my_nets:init": 12, "my_nets:init_like": 28, "my_nets:like_flax": 28, "my_nets:fixed": 12, "0": 20, None: 0}


@pytest.mark.parametrize(("init", "params"), INITS.items())
@pytest.mark.parametrize("name", ["my_nets:apply", "my_nets:model.apply"])
def test_the_parameters_of_a_function(module, capsys, init, params, name):
    first = [] if init and ":" in init else ["--shape", '{"w": "4x5:bf16"}']
    more = ["--params", init] if init else []
    assert run(name, *first, "--shape", "8x4", *more, "-o", "net.gv", "--summary", "--title", "") == 0
    out = capsys.readouterr().out
    assert f" {params} parameters" in out
    assert f"Total params: {params}\n" in out
    assert "<B></B>" not in (module / "net.gv").read_text()


def test_a_bad_output_is_refused_before_anything_is_traced(module, monkeypatch, capsys):
    monkeypatch.setattr(viz, "plot_network", lambda *args, **options: pytest.fail("traced"))
    assert run("lenet", "-o", "lenet.docx") == 2
    assert "not a format; the usual ones are html, svg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["my_nets"], 2, "expected MODULE:FUNCTION"),
        (["no_such_module:f"], 2, "cannot import no_such_module"),
        (["my_nets:missing"], 2, "module 'my_nets' has no attribute 'missing'"),
        (["my_nets:VALUE"], 2, "is not a callable object"),
        (["my_nets:net", "--input", "8by4"], 2, "expected SHAPE:DTYPE such as"),
        (["my_nets:net", "--input", "8x4:q7"], 2, "data type 'q7' not understood"),
        (["my_nets:net", "--shape", "8x4", "--params", "1"], 1, "params_argnums is 1, and there is"),
        (["my_nets:net", "--shape", "8x4", "--params", "x"], 2, "expected MODULE:FUNCTION, or the number of a --shape"),
        (["my_nets:net"], 2, "my_nets:net takes (x), and there are 0 arguments; give one --shape for each"),
        (["my_nets.py:net"], 2, "got the file my_nets.py; write my_nets:net"),
        (["broken_nets:net"], 2, "cannot import broken_nets:net: SyntaxError"),
        (["my_nets:net", "--shape", '{"w": 3}'], 2, "--shape 3: expected SHAPE:DTYPE"),
        (["my_nets:net", "--shape", '{"w"'], 2, "is not JSON"),
        (["my_nets:apply", "--shape", "8x4", "--params", "my_nets:Model.apply"], 2, "must take nothing, a random key"),
        (["my_nets:apply", "--shape", "8x4", "--params", "my_nets:fails"], 2, "fails: ZeroDivisionError"),
        (["lenet", "--shape", "8x4", "--shape", "8x4"], 2, "lenet takes (params"),
        (["my_nets:net", "--shape", "8x4", "-o", ".svg"], 2, "only an ending"),
        (["my_nets:net", "--shape", "8x4", "-o", "my_nets.py/x.svg"], 1, "is not a directory"),
        (["my_nets:net", "--input", "8x5"], 1, "cannot be traced: TypeError"),
        (["my_nets:net", "--shape", "8x4", "-o", "net.nonsense"], 2, "cannot draw nonsense"),
    ],
)
def test_bad_command_lines(module, capsys, words, status, message):
    assert run(*words) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("jaxpar plot: ")
    assert error.count("\n") == 1
    assert sorted(path.name for path in module.iterdir() if path.suffix) == ["broken_nets.py", "my_nets.py"]


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
    ("text", "shape", "dtype"),
    [("2x3:bf16", (2, 3), "bfloat16"), (":i32", (), "int32"), ("7", (7,), "float32"), ("0x4", (0, 4), "float32"),
     ("2:key", (2,), "key<fry>"), ("4:float8_e4m3fn", (4,), "float8_e4m3fn")],
)  # fmt: skip
def test_parse_shape(text, shape, dtype):
    found = commands.parse_shape(text)
    assert (found.shape, str(found.dtype)) == (shape, dtype)
