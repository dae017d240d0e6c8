"""The small functions of `jaxpar/_core`: what they give, in the plainest cases."""

from jaxpar._core import functions, text


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
