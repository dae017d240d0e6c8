"""`jp.mxnet`: one room for those who come from MXNet, whose names stay where they were too."""

import re
import sys
from pathlib import Path

import jax
import optax
import pytest
from symbols import node, symbol_of

import jaxpar as jp
from jaxpar import checkpoint, mxnet, updaters
from jaxpar._store import mxnet_names
from jaxpar.mxnet import _elsewhere
from jaxpar.updaters import _mxnet_names

SHORT = ("sgd", "nag", "adam", "rmsprop", "adagrad", "wd_mult")


def test_names_of_other_rooms():
    for name in SHORT:
        assert getattr(jp.mxnet, name) is getattr(mxnet, f"mxnet_{name}") is getattr(updaters, f"mxnet_{name}")
    assert mxnet.load_params is checkpoint.load_mxnet
    assert mxnet.multipliers is updaters.multipliers


def test_a_hint_stands_once():
    """A text that answers several names of MXNet is written once, so it is one object."""
    of_mxnet = _elsewhere.NAMES, _elsewhere.METHODS, _elsewhere.ARGUMENTS, _elsewhere.FILE_ARGUMENTS
    of_stores = mxnet_names.ARGUMENTS, mxnet_names.TRAINING_ARGUMENTS, mxnet_names.OTHER_KINDS
    for table in (*of_mxnet, *of_stores, _mxnet_names.ABSENT, _mxnet_names._OTHER):
        texts = list(table.values())
        assert len({id(text) for text in texts}) == len(set(texts))


@pytest.fixture
def model(tmp_path):
    return mxnet.load_symbol(symbol_of(tmp_path, node("null", "data"), node("relu", "r", 0)))


def test_names_of_mxnet_say_what_to_write(model):
    for table, owner in (_elsewhere.NAMES, mxnet), (_elsewhere.METHODS, model):
        for name, hint in table.items():
            with pytest.raises(AttributeError, match=f"'{name}'; {re.escape(hint)}"):
                getattr(owner, name)
    for owner in mxnet, model:
        with pytest.raises(AttributeError, match=r"'no_such_name'$"):
            getattr(owner, "no_such_" + "name")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda model, **names: model.apply({}, **names), "data"),
        (lambda model, **names: model.apply({}, 1, **names), "is_train"),
        (lambda model, **names: mxnet.load_symbol("a.json", **names), "ctx"),
        (lambda model, **names: mxnet.load_checkpoint("a", 1, **names), "allow_missing"),
        (lambda model, **names: jp.train.start({}, optax.sgd(0.1), None, **names), "kvstore"),
        (lambda model, **names: jp.train.start({}, optax.sgd(0.1), None, **names), "batch_end_callback"),
        (lambda model, **names: jp.train.fit(None, None, None, **names), "num_epoch"),
        (lambda model, **names: jp.viz.plot_network(model.apply, {}, 1, **names), "save_format"),
        (lambda model, **names: jp.viz.print_summary(jax.nn.relu, 1, **names), "shape"),
    ],
)
def test_arguments_of_mxnet_say_what_to_write(call, name, model):
    with pytest.raises(TypeError, match=f"no argument '{name}'; [a-z]+ "):
        call(model, **{name: None})


def test_a_picture_of_a_model_itself(model):
    graph = jp.viz.trace(model, shape={"data": (1, 2)})
    assert (graph.nodes[0].name, graph.nodes[0].op, graph.nodes[0].shape) == ("data", "input", (1, 2))
    assert [node.op for node in graph.nodes] == ["input", "Activation"]


def test_what_the_lines_name_is_there():
    tables = _elsewhere.NAMES, _elsewhere.METHODS, _elsewhere.ARGUMENTS, mxnet_names.TRAINING_ARGUMENTS
    for hint in {hint for table in tables for hint in table.values()}:
        for room, name in re.findall(r"\b(mxnet|train|kv|data|viz)\.(\w+)", hint):
            assert hasattr(getattr(jp, room), name), hint
    assert not any(hasattr(mxnet, name) for name in _elsewhere.NAMES)
    assert not any(hasattr(mxnet.Model, name) for name in _elsewhere.METHODS)


def test_the_page_of_operators_is_written(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    import mxnet_operators

    assert mxnet_operators.PAGE.read_text() == mxnet_operators.page(), "run python tools/mxnet_operators.py"
    assert sys.modules.pop("mxnet_operators") is mxnet_operators
