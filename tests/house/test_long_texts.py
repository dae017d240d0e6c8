"""Patterns take a time that grows with the text. One that tries all ways to share it would take hours here."""

import contextlib
import re
import signal
import sys
from pathlib import Path

import pytest

from jaxpar import mxnet
from jaxpar.mxnet import _graph
from jaxpar.train._plan import compiled
from jaxpar.viz import _scopes
from jaxpar.viz._diff import changes
from jaxpar.viz._layout import names
from jaxpar.viz._program import hlo

sys.path.insert(0, str(Path(__file__).parents[1] / "mxnet"))
from symbols import node, symbol_of

LONG = 1_000_000


@contextlib.contextmanager
def deadline(seconds=60):
    """An error in what is still running then. Patterns look at signals too."""

    def late(*_):
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


ONES, DOTS = "1" * LONG, "1." * (LONG // 2)
TEXTS = {
    "a number": (_graph._NUMBER, re.Pattern.fullmatch, ONES + "x"),
    "a number with a point": (_graph._NUMBER, re.Pattern.fullmatch, f"{ONES}.{ONES}x"),
    "an exponent": (_graph._NUMBER, re.Pattern.fullmatch, f"{ONES}e{ONES}"),
    "an integer": (_graph._INTEGER, re.Pattern.fullmatch, ONES + "x"),
    "a numbered weight": (changes._NUMBERED, re.Pattern.search, ONES + "x"),
    "a numbered scope": (_scopes._END, re.Pattern.search, f"a{ONES}-{ONES}x"),
    "numbers in a name": (names._NUMBER, re.Pattern.split, DOTS),
    "the passes of a loop": (hlo._TRIPS, re.Pattern.search, '"known_trip_count":{"n":"' * (LONG // 20)),
    "the cycles of a program": (hlo._CYCLES, re.Pattern.search, f'"estimated_cycles":"{ONES}'),
    "too much memory": (compiled._REFUSED, re.Pattern.search, DOTS),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TEXTS)
def test_patterns(name):
    pattern, method, text = TEXTS[name]
    with deadline():
        method(pattern, text)


@pytest.mark.parametrize("text", [ONES + "x", DOTS, f".{ONES}.", f"{ONES}e", "9" * LONG, "-" * LONG])
def test_numbers_of_symbol_files(text, tmp_path):
    for op, name in (("_plus_scalar", "scalar"), ("Dropout", "p"), ("expand_dims", "axis"), ("tile", "reps")):
        path = symbol_of(tmp_path, node("null", "x"), node(op, "y", 0, **{name: text}))
        with deadline():
            if text == "9" * LONG and name in ("scalar", "p"):
                mxnet.load_symbol(path)  # infinity
            else:
                with pytest.raises(ValueError, match="must be of the form"):
                    mxnet.load_symbol(path)


NAMES = [text * (LONG // 10 // len(text)) for text in ("a", "a1", "_", ", ", "(", "1")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES, ids=[name[:2] for name in NAMES])
def test_names_of_symbol_files(name, tmp_path):
    nodes = [node("null", "data")]
    for i in range(6):
        nodes.append(node("null", f"{name}{i}_weight"))
        nodes.append(
            node("FullyConnected", f"fc{i}", max(len(nodes) - 2, 0), len(nodes) - 1, no_bias=True, num_hidden=2)
        )
    path = symbol_of(tmp_path, *nodes)
    with deadline():
        compile(mxnet.port(path, shapes={"data": (1, 2)}), "ported.py", "exec")
