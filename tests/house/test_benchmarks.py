"""What the benchmarks share. Before a release each of them runs once, small.

Nothing here looks at how fast anything is.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from launched import python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import _harness  # noqa: E402
import _shapes  # noqa: E402

RUN_BEFORE_A_RELEASE = {
    "checkpoints": [],
    "convolutions": ["mobilenet", "lenet"],
    "first_step": [],
    "fit_overhead": [],
    "fsdp": [],
    "kvstore": ["--no-mxnet"],
    "layers": ["mlp"],
    "lenet_parts": [],
    "record": [],
    "row_sparse": [],
    "shapes": [],
    "small_steps": [],
    "tables": [],
    "train_step": ["--no-mxnet"],
    "verify": [],
    "xla_options": [],
}


@pytest.mark.release
@pytest.mark.parametrize("name", RUN_BEFORE_A_RELEASE)
def test_a_benchmark_runs(name, tmp_path, monkeypatch):
    """Many of them compare the numbers of the contenders before they time them, and fail where these differ."""
    monkeypatch.setenv("JAXPAR_TORCH_PYTHON", str(tmp_path / "no-such-python"))
    output = tmp_path / "out.json"
    words = [str(BENCHMARKS / f"{name}.py"), "--quick", "--output", str(output), *RUN_BEFORE_A_RELEASE[name]]
    python(*words, timeout=300, JAX_NUM_CPU_DEVICES="8")
    assert json.loads(output.read_text())


def test_a_process_kept_on_one_core_is_let_go_again():
    before = os.sched_getaffinity(0)
    with _harness.one_core(os.getpid()):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_flax_is_left_out_where_it_is_not_installed(capsys, monkeypatch):
    import train_step

    monkeypatch.setitem(sys.modules, "flax", None)
    assert train_step.flax_step(train_step.batch_of(8)) == {}
    assert capsys.readouterr().out.startswith("no Flax: ")


@pytest.mark.slow
def test_a_flag_that_xla_does_not_know_costs_its_row_alone(monkeypatch, capsys):
    import xla_options

    monkeypatch.setitem(xla_options.ROWS, "unknown", {"devices": 1, "variables": {"XLA_FLAGS": "--xla_cpu_no_such=1"}})
    assert xla_options.started(["unknown"], 8) == ({}, {})
    assert capsys.readouterr().out.startswith("no unknown: ")


@pytest.mark.parametrize(("python", "words"), [("no-such-python", "make mxnet"), (sys.executable, "no MXNet: ")])
def test_without_mxnet_one_line_says_so(python, words, capsys):
    assert _harness.start_mxnet(python) is None  # this Python has no MXNet
    (line,) = capsys.readouterr().out.splitlines()
    assert words in line


def test_turns_interleave_and_leave_a_first_repeat_out():
    calls = []

    def contender(name, seconds):
        def turn(repeats):
            calls.append((name, repeats))
            return seconds

        return turn

    times = _harness.take_turns({"a": contender("a", 0.1), "b": contender("b", 0.05)}, rounds=3, turn_seconds=0.2)
    assert times == {"a": [0.1] * 3, "b": [0.05] * 3}
    assert calls[4:] == [("a", 1), ("a", 2), ("b", 1), ("b", 4)] * 3
    assert _harness.ratio(times, "a", "b") == 2


def test_a_long_row_has_fewer_rounds_but_five():
    times = _harness.take_turns({"slow": lambda repeats: 10.0}, rounds=50, turn_seconds=0.1, most_seconds=60)
    assert len(times["slow"]) == 5


def test_the_ratio_is_formed_inside_each_round():
    assert _harness.ratio({"a": [2, 20, 300], "b": [1, 10, 100]}, "a", "b") == 2


@pytest.mark.parametrize(
    ("shapes", "values", "parameters"),
    [(_shapes.resnet50(), 161, 25_557_032), (_shapes.gpt2_small(), 148, 124_439_808)],
)
def test_the_networks_have_their_published_size(shapes, values, parameters):
    import math

    assert len(shapes) == values
    assert sum(map(math.prod, shapes)) == parameters


def test_the_layers_hold_the_parameters_of_their_networks():
    import _layers
    import _models_jax
    import jax
    import numpy as np

    for name, parts in _layers.NETWORKS.items():
        params = jax.tree.leaves(_models_jax.NETWORKS[name](np.random.default_rng(0))[0])
        (update,) = (part for part in parts if part.kind == "SGD")
        assert update.sizes == (sum(x.size for x in params),)


def test_results_that_differ_are_an_error():
    import layers

    layers._hold_against({}, [1.0, 2.0], [2.01, 1.0])
    with pytest.raises(RuntimeError, match="norms"):
        layers._hold_against({}, [1.0, 2.0], [1.0, 3.0])
