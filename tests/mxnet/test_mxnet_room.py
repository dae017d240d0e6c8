"""`jp.mxnet`: one room for those who come from MXNet, whose names stay where they were too."""

import jaxpar as jp
from jaxpar import checkpoint, mxnet, updaters
from jaxpar._store import mxnet_names
from jaxpar.updaters import _mxnet_names

SHORT = ("sgd", "nag", "adam", "rmsprop", "adagrad", "wd_mult")


def test_names_of_other_rooms():
    for name in SHORT:
        assert getattr(jp.mxnet, name) is getattr(mxnet, f"mxnet_{name}") is getattr(updaters, f"mxnet_{name}")
    assert mxnet.load_params is checkpoint.load_mxnet
    assert mxnet.multipliers is updaters.multipliers


def test_a_hint_stands_once():
    """A text that answers several names of MXNet is written once, so it is one object."""
    for table in (mxnet_names.ARGUMENTS, mxnet_names.OTHER_KINDS, _mxnet_names.ABSENT, _mxnet_names._OTHER):
        texts = list(table.values())
        assert len({id(text) for text in texts}) == len(set(texts))
