"""A function that raises while it is traced: its error comes through, with what was traced before it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpar import viz

PARAMS = {"a": jnp.ones((3, 4)), "b": jnp.ones((5, 2))}
X = jnp.ones((2, 3))


def product(h, w):
    return h @ w  # PRODUCT


def plain(params, x):
    h = jnp.sin(jax.nn.relu(x @ params["a"]))
    return product(h, params["b"])


def jitted_inside(params, x):
    h = jnp.sin(jax.nn.relu(x @ params["a"]))
    return jax.jit(product)(h, params["b"])  # JITTED


def scanned(params, x):
    h = jnp.sin(jax.nn.relu(x @ params["a"]))
    return jax.lax.scan(lambda h, _: (product(h, params["b"]), None), h, None, length=3)  # SCANNED


def line_of(mark):
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def failure(fn, *args, draw=viz.trace):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        draw(fn, *args)
    return raised.value


@pytest.mark.parametrize(
    ("fn", "mark"),
    [(plain, "PRODUCT"), (jax.jit(plain), "PRODUCT"), (jitted_inside, "JITTED"), (scanned, "SCANNED")],
    ids=["plain", "jitted", "jitted inside", "scanned"],
)
def test_all_up_to_the_line_that_fails_is_drawn(fn, mark):
    error = failure(fn, PARAMS, X)
    assert type(error) is TypeError
    assert "contracting dimension" in str(error)
    assert any("this exception has `graph`" in note for note in error.__notes__)
    last = f"fails at test_viz_failure.py:{line_of(mark)}"
    assert [node.op for node in error.graph.layers] == ["FullyConnected", "Activation", "sin", last]
    assert [edge.source for edge in error.graph.edges if edge.target == error.graph.layers[-1].name][-1:] == ["sin0"]


def test_what_a_gradient_computed_before_it_is_drawn():
    error = failure(lambda params, x: jax.grad(lambda p: plain(p, x).sum())(params), PARAMS, X)
    assert {"FullyConnected", "Activation", "sin"} <= {node.op for node in error.graph.layers}
    assert error.graph.layers[-1].op.startswith("fails at test_viz_failure.py:")


def test_the_picture_marks_the_line():
    plot = failure(plain, PARAMS, X, draw=viz.plot_network).plot
    assert f"fails at test_viz_failure.py:{line_of('PRODUCT')}" in plot.source
    assert "#b30000" in plot.source
    assert "a line that raises" in plot.source


def test_an_error_comes_through_as_it_is_where_nothing_can_be_drawn():
    class Closed(Exception):
        @property
        def graph(self):
            raise AttributeError

    def closed(x):
        raise Closed

    def once(x, calls=[]):  # noqa: B006
        calls.append(x)
        raise KeyError(len(calls))

    assert type(failure(closed, X)) is Closed
    error = failure(once, X)
    assert (error.args, hasattr(error, "graph")) == ((1,), False)
    assert not hasattr(failure(lambda: 1 / 0), "graph")
    assert not hasattr(failure(plain, PARAMS, "x"), "graph")
