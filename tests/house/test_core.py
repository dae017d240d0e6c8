"""The small functions of `jaxpar/_core`: what they give, in the plainest cases."""

import pytest

from jaxpar._core import checks, functions, text


def test_parameters_of_a_function():
    assert functions.has_parameter(lambda a, step: a, "step")
    assert not functions.has_parameter(lambda a, **rest: a, "step")


def test_words():
    assert str(text.Table("two keys", ("key", "bytes"), [("0", "8"), ("1", "1,024")])) == "two keys\n  0  8\n  1  1,024"
    assert text.cut_middle("encoder/block_11/attention/query", 17) == "encoder/…on/query"
    assert text.printable("a\x1b[31m") == "a\\x1b[31m"
    assert text.for_terminal("runs/\x1b[2J\u202e") == "runs/\\x1b[2J\\u202e"
    patterns = {"conv1": True, "*/bias": True, "teacher/conv1": True, "conv": False}
    assert {pattern: text.matches("teacher/conv1/bias", pattern) for pattern in patterns} == patterns


def test_what_is_no_array_is_told_in_one_line():
    class Module:
        def __repr__(self):
            return "Module(\n" + "    a long line of attributes\n" * 50 + ")"

        dtype = None

    with pytest.raises(TypeError) as caught:
        checks.array(Module(), "kv.from_params: leaf 'x'")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
