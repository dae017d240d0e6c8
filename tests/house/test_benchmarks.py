"""Each benchmark runs at all and writes what it promises; nothing here looks at how fast anything is."""

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


def run(name, tmp_path, *more):
    output = tmp_path / "out.json"
    words = [str(BENCHMARKS / f"{name}.py"), "--quick", "--output", str(output), *more]
    return python(*words, timeout=300, JAX_NUM_CPU_DEVICES="8").stdout, json.loads(output.read_text())


@pytest.mark.slow
def test_kvstore_measures_every_way_and_kind(tmp_path):
    shown, report = run("kvstore", tmp_path, "--no-mxnet")
    ways = {f"{way} {kind}" for way in ("compiled", "loop", "eager") for kind in ("local", "device", "sharded")}
    assert list(report["rows"]) == ["8 x 1 KB", "8 x 1 KB on one core", "mixed"]
    for row in report["rows"].values():
        assert set(row["ms"]) == ways
        assert all(ms > 0 for ms in row["ms"].values())
        assert row["against_mxnet"] == {}
    assert report["rows"]["mixed"]["bytes"] == 4 * (15 + 512 * 128 + 1)
    assert "compiled device" in shown


def test_a_process_kept_on_one_core_is_let_go_again():
    before = os.sched_getaffinity(0)
    with _harness.one_core(os.getpid()):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_train_step_stands_beside_the_plain_one(tmp_path):
    shown, report = run("train_step", tmp_path, "--no-mxnet")
    jaxpar = {f"jaxpar {e}, {n}" for e in ("pmap", "shard_map") for n in ("1 device", "2 devices")}
    assert jaxpar | {"plain JAX, 1 device"} <= set(report["images_per_second"])
    assert report["against_plain_jax"]["plain JAX, 1 device"] == 1
    assert report["images_per_second"]["Flax nnx, 1 device"] > 0
    assert all(best["Flax"] > 0 and best["PyTorch"] is None for best in report["against_best"].values())
    assert all(rate > 0 for rate in report["images_per_second"].values())
    assert "images/s" in shown


def test_flax_is_left_out_where_it_is_not_installed(capsys, monkeypatch):
    import train_step

    monkeypatch.setitem(sys.modules, "flax", None)
    assert train_step.flax_step(train_step.batch_of(8)) == {}
    assert capsys.readouterr().out.startswith("no Flax: ")


@pytest.mark.slow
def test_shapes_has_every_sort_of_row_beside_every_plain_step(tmp_path):
    shown, report = run("shapes", tmp_path)  # it compares the losses itself
    for name, row in report["rows"].items():
        plain = {"plain jit", "plain shard_map", "plain pmap"} if "2 devices" in name else {"plain jit"}
        assert set(row["ms_a_step"]) == plain | {"jaxpar pmap", "jaxpar shard_map", "jaxpar many"}
        assert all(v > 0 for v in [*row["ms_a_step"].values(), *row["against_plain"].values()])
        assert name in shown
    assert {name.split()[0] for name in report["rows"]} == {"LeNet", "small", "ResNet", "transformer"}
    for way in ("pmap", "many"):
        assert f"jaxpar {way}, slower than plain by more than 3 %:" in shown


@pytest.mark.slow
def test_lenet_parts_add_up(tmp_path):
    shown, report = run("lenet_parts", tmp_path)  # it compares the layers, one after the other, with the whole itself
    layers = {f"{layer} {way}" for layer in ("conv1", "conv2", "dense1", "dense2") for way in ("forward", "backward")}
    around = {"gather on the host", "gather on the device", "all-reduce, 4 devices", "call of a program"}
    for row in report["rows"].values():
        assert set(row["around"]) == around
        for name, parts in row["microseconds_an_image"].items():
            assert layers | {"loss", "SGD update", "empty step", "whole step"} <= set(parts)
            assert layers <= set(row["gflop_per_second"][name])
            counted = {n: us for n, us in parts.items() if n != "whole step" and not n.startswith("of that")}
            calls = (len(counted) - 1) * row["around"]["call of a program"]
            assert row["sum"][name] == pytest.approx(sum(counted.values()) - calls, abs=0.05)
            rate = row["gflop_per_second"][name]["conv2 backward"]
            assert rate == pytest.approx(6400 / parts["conv2 backward"], rel=0.01, abs=0.01)
    assert list(report["rows"]) == ["one core", "all cores"]
    assert "whole step, measured" in shown


@pytest.mark.slow
def test_first_step_says_where_the_seconds_go(tmp_path):
    shown, report = run("first_step", tmp_path)
    assert list(report["rows"]) == [f"1 device, cache {cache}" for cache in ("off", "cold", "warm")]
    for row in report["rows"].values():
        seconds = dict(row["seconds"])
        assert seconds.pop("total") == pytest.approx(sum(seconds.values()), abs=0.01)
        assert all(s > 0 for s in seconds.values())
        assert row["peak_mb"] > row["step_temp_mb"] + row["step_arguments_mb"] > 4 * 129_068 / 1e6
    assert "the goal is 5 s" in shown


@pytest.mark.slow
def test_xla_options_measures_processes_with_options_of_their_own(tmp_path):
    shown, report = run("xla_options", tmp_path)
    rows = report["rows"]
    assert list(rows) == ["4 devices", "4 devices, xla_cpu_multi_thread_eigen=false"]
    assert report["against_4_devices"]["4 devices"] == 1
    losses = [row["loss"] for row in rows.values()]
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-5)
    assert 0 < losses[0] < 2.303
    assert "images/s" in shown


@pytest.mark.slow
def test_a_flag_that_xla_does_not_know_costs_its_row_alone(monkeypatch, capsys):
    import xla_options

    monkeypatch.setitem(xla_options.ROWS, "unknown", {"devices": 1, "variables": {"XLA_FLAGS": "--xla_cpu_no_such=1"}})
    assert xla_options.started(["unknown"], 8) == ({}, {})
    assert capsys.readouterr().out.startswith("no unknown: ")


@pytest.mark.slow
def test_row_sparse_gives_what_dense_gives(tmp_path):
    _, report = run("row_sparse", tmp_path)  # it compares the two results itself
    assert report["table"] == [1000, 8]
    assert set(report["ms"]) == {"sparse", "dense"}
    assert report["sparse_against_dense"] > 0


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


@pytest.mark.slow
def test_small_steps_stand_beside_those_by_hand(tmp_path):
    shown, report = run("small_steps", tmp_path)
    (row,) = report["rows"].values()
    assert set(row["against_plain"]) == {f"jaxpar {way}" for way in ("pmap", "shard_map", "jit", "updater", "many")}
    assert set(row["host_us"]) == {"plain jit", "jaxpar pmap"}
    assert all(us > 0 for us in [*row["us_a_step"].values(), *row["host_us"].values()])
    assert "linear 10-1, batch 8, SGD, 1 device" in shown


@pytest.mark.slow
def test_fsdp_divides_the_state(tmp_path):
    _, report = run("fsdp", tmp_path)
    assert set(report["rows"]) == {"8", "2 x 4"}
    for row in report["rows"].values():
        assert row["whole"] / row["arguments"] > 6  # norms and biases stay whole


@pytest.mark.data
@pytest.mark.slow
def test_the_record_writes_each_seed(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPAR_TORCH_PYTHON", str(tmp_path / "no-such-python"))
    shown, report = run("record", tmp_path)
    assert "no PyTorch: " in shown
    (one,) = report["rows"]["jaxpar"]["runs"]
    assert one["seed"] == 0
    assert one["test_accuracy"] > 0.8
    assert one["seconds"] > 0


@pytest.mark.slow
def test_convolutions_have_the_numbers_of_xla(tmp_path):
    shown, report = run("convolutions", tmp_path, "mobilenet", "lenet")
    assert "times_as_fast" in report["layers"]["mobilenet"]["4 x 56·56, 128 → 128, 3·3, 128 groups"]["forward"]
    assert report["summary"]["convolutions"] == 6
    assert report["summary"]["largest_relative_error"] < 3e-5
    assert "mobilenet: GFLOP/s" in shown


@pytest.mark.slow
def test_layers_add_up_without_pytorch(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPAR_TORCH_PYTHON", str(tmp_path / "no-such-python"))
    shown, report = run("layers", tmp_path, "mlp")
    assert "no PyTorch: " in shown
    assert report["freed_memory_is_kept"]
    network = report["networks"]["mlp"]
    assert {row["kind"] for row in network["layers"].values()} == {"product", "ReLU", "cross-entropy", "SGD"}
    for row in network["layers"].values():
        assert row["milliseconds"]["jaxpar"] >= row["least"]["jaxpar"] > 0
        assert row["times_as_fast_as_pytorch"] is None
    counted = {name: row for name, row in network["layers"].items() if row["is_counted"]}
    assert not any(name.endswith("× 512, forward") for name in counted)  # a ReLU counts once, with its way back
    calls = sum(row["count"] for row in counted.values()) - 1
    call = network["limits"]["call of a program, forward"]["milliseconds"]["jaxpar"]
    layers = sum(row["count"] * row["milliseconds"]["jaxpar"] for row in counted.values())
    assert sum(network["sums"]["jaxpar"].values()) == pytest.approx(layers - calls * call)
    assert network["step"]["milliseconds"]["jaxpar"] > 0


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
