"""The small functions of `jaxpar/_core`: what they give, in the plainest cases."""

import argparse
import signal

import jax
import jax.numpy as jnp
import pytest

from jaxpar._core import arrays, calls, text
from jaxpar._core.process import Signals


def test_arrays_in_and_out_of_a_traced_function():
    one = jnp.ones(3)
    assert not arrays.is_tracing()
    assert jax.jit(arrays.is_tracing)()
    assert jax.vmap(lambda x: x + arrays.is_tracing())(jnp.zeros(1)).tolist() == [1]
    jax.jit(lambda x: x + 1, donate_argnums=0)(one)
    assert arrays.is_gone(one)
    assert not arrays.is_gone(jnp.ones(3))


def test_keys_as_integers():
    plain, restore = arrays.without_keys({"rng": jax.random.key(0), "x": jnp.ones(2)})
    assert plain["rng"].dtype == "uint32"
    assert str(restore(plain)["rng"].dtype) == "key<fry>"


def test_parameters_of_a_function():
    assert calls.has_parameter(lambda a, step: a, "step")
    assert not calls.has_parameter(lambda a, **rest: a, "step")


def test_words():
    assert str(text.Table("two keys", ("key", "bytes"), [("0", "8"), ("1", "1,024")])) == "two keys\n  0  8\n  1  1,024"
    assert text.cut_middle("encoder/block_11/attention/query", 17) == "encoder/…on/query"
    assert text.printable("a\x1b[31m") == "a\\x1b[31m"
    assert text.for_terminal("runs/\x1b[2J\u202e") == "runs/\\x1b[2J\\u202e"
    patterns = {"conv1": True, "*/bias": True, "teacher/conv1": True, "conv": False}
    assert {pattern: text.matches("teacher/conv1/bias", pattern) for pattern in patterns} == patterns


def test_numbers_of_the_command_line():
    assert (text.number(int, 1)("3"), text.number(float, 0, above=True)("0.5")) == (3, 0.5)
    with pytest.raises(argparse.ArgumentTypeError, match="must be an int of 1 or more, got '0'"):
        text.number(int, 1)("0")


def test_signals_that_are_recorded():
    with Signals([signal.SIGTERM]) as signals:
        signal.raise_signal(signal.SIGTERM)
    assert signals.received == [signal.SIGTERM]
