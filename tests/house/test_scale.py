"""The scale benchmark: what it reads from programs, its model in closed form, and both against each other."""

import json
import math
import sys
from pathlib import Path

import jax
import optax
import pytest
from hypothesis import given, strategies as st

from jaxpar import kv, train

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _cost_model as model
import _hlo
import _scale_compile
import scale

LINK = model.Link(1e-5, 1e9)
CLUSTER = model.Cluster("toy", 1e12, 1e12, 4, model.Link(1e-6, 1e11), model.Link(1e-5, 1e10))
WORK = model.Work("toy", ((1000, 1000), (10,)), flops=1e9, examples=10, utilization=0.5)

sizes = st.floats(1, 1e10)
powers = st.integers(1, 16).map(lambda i: 2**i)
links = st.builds(model.Link, st.floats(0, 1e-3), st.floats(1e6, 1e12))


# What a program sends.

PROGRAM = """
%region (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}
ENTRY %main {
  %all-reduce.1 = (f32[1668]{0}, f32[5,20]{1,0}, f32[]) all-reduce(%x, %y, %z), channel_id=1, to_apply=%region
  %gather.23 = bf16[8,100]{1,0} all-gather(%x), dimensions={0}
  %scatter = s8[1,12]{1,0} reduce-scatter(%x), dimensions={0}
  %all-to-all = (u32[1,3]{1,0}, u32[1,3]{1,0}, /*index=2*/u32[1,3]{1,0}) all-to-all(%a, %b, %c)
  ROOT %permute = pred[7]{0} collective-permute(%x)
  %not.one = f32[9]{0} fusion(%all-reduce.1), calls=%all-gather
}
"""


def test_collectives_are_read_with_the_bytes_of_the_whole():
    assert _hlo.collectives(PROGRAM, 8) == [
        _hlo.Collective("all-reduce", 4 * (1668 + 100 + 1), 3),
        _hlo.Collective("all-gather", 2 * 800, 1),
        _hlo.Collective("reduce-scatter", 8 * 12, 1),
        _hlo.Collective("all-to-all", 4 * 9, 1),
        _hlo.Collective("collective-permute", 7, 1),
    ]
    assert _hlo.instructions(PROGRAM) == 7


def test_bytes_sent_by_the_ring():
    assert _hlo.sent(_hlo.Collective("all-reduce", 800), 8) == 2 * 700
    assert _hlo.sent(_hlo.Collective("all-gather", 800), 8) == 700
    assert _hlo.sent(_hlo.Collective("all-to-all", 800), 8) == 700
    assert _hlo.sent(_hlo.Collective("collective-permute", 800), 8) == 800


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [
        ("device", "none"),
        ("sharded", "none"),
        pytest.param(("local", "none"), marks=pytest.mark.slow),  # its program is that of `device`
        ("device", "int8"),
        ("device", "2bit"),
        ("device", "int3"),
    ],
    ids=" ".join,
)
def test_the_model_expects_the_bytes_that_the_compiled_step_sends(case):
    row = _scale_compile.compiled("lenet", *case)
    metrics = 2 * 7 / 8 * 4  # the mean of the loss
    assert row["sent_bytes"] == pytest.approx(row["model_sent_bytes"] + metrics, abs=1)
    assert row["parameter_bytes"] == 4 * 129_068
    state = 2 * row["parameter_bytes"]  # value and momentum
    residuals = {"none": 0, "int3": 9 / 8}.get(case[1], 1)  # of the parameters: own, and of what is owned
    whole = state / 8 if case[0] == "sharded" else state + residuals * row["parameter_bytes"]
    assert row["argument_bytes"] == pytest.approx(whole, rel=0.11)  # padding and the batch
    assert row["memory_bytes"] > row["argument_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [("device", "2bit"), ("sharded", "int8")], ids=" ".join)
def test_the_abstract_state_is_the_real_one_without_arrays(case):
    devices = tuple(jax.devices())
    abstract = _scale_compile.abstract_state("lenet", *case, devices)
    assert {type(x) for x in jax.tree.leaves(abstract)} == {jax.ShapeDtypeStruct}
    params, tx = _scale_compile.params_of("lenet"), optax.sgd(0.1, momentum=0.9)
    store = kv.from_params(params, kind=case[0], optimizer=tx, devices=devices)
    real = train.create_state(kv.set_gradient_compression(store, {"type": case[1]}), 0, devices=devices)
    for mine, true in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
        assert (mine.shape, mine.dtype) == (true.shape, true.dtype)
        assert mine.sharding.is_equivalent_to(true.sharding, true.ndim)


# The model.


def test_closed_forms():
    assert model.ring_all_reduce(8e6, 8, LINK) == pytest.approx(14 * (1e-5 + 1e-3))
    assert model.ring_gather(8e6, 8, LINK) == pytest.approx(7 * (1e-5 + 1e-3))
    assert model.halving_gather(8e6, 8, LINK) == pytest.approx(3e-5 + 7e-3)
    assert model.all_to_all(8e6, 8, LINK) == pytest.approx(7 * (1e-5 + 1e-3))
    assert model.tree_all_reduce(8e6, 8, LINK, chunk=1e5) == pytest.approx(6 * (1e-5 + 1e-4) + 16e-3)


COLLECTIVES = (model.ring_all_reduce, model.ring_gather, model.halving_gather, model.tree_all_reduce)


def test_one_device_sends_nothing():
    for collective in (*COLLECTIVES, model.all_to_all):
        assert collective(1e6, 1, LINK) == 0
    assert model.step(WORK, CLUSTER, 1).exposed == 0


@given(sizes, sizes, powers, links)
def test_more_bytes_take_longer_and_a_ring_is_its_two_halves(a, b, n, link):
    small, large = sorted((a, b))
    for collective in COLLECTIVES:
        assert collective(small, n, link) <= collective(large, n, link)
    assert model.ring_all_reduce(a, n, link) == pytest.approx(2 * model.ring_gather(a, n, link))
    assert model.halving_gather(a, n, link) <= model.ring_gather(a, n, link) * (1 + 1e-9)


@given(powers, links)
def test_large_sums_cost_bandwidth_alone_and_small_ones_latency_alone(n, link):
    flow = 1e18 / link.bandwidth
    assert model.ring_all_reduce(1e18, n, link) == pytest.approx(2 * (n - 1) / n * flow, rel=1e-2)
    assert model.tree_all_reduce(1e18, n, link) == pytest.approx(2 * flow, rel=1e-2)
    assert model.ring_all_reduce(0, n, link) == pytest.approx(2 * (n - 1) * link.latency)
    assert model.tree_all_reduce(0, n, link) == pytest.approx(2 * math.log2(n) * link.latency)


@given(sizes, powers)
def test_a_cluster_is_never_faster_than_its_wires(nbytes, n):
    for seconds in model.all_reduce_times(nbytes, n, CLUSTER).values():
        assert seconds >= 2 * (n - 1) / n * nbytes / CLUSTER.inside.bandwidth * (1 - 1e-9)
    assert model.gather_time(nbytes, n, CLUSTER) >= (n - 1) / n * nbytes / CLUSTER.inside.bandwidth * (1 - 1e-9)


def test_within_one_node_the_network_does_not_matter():
    slow = model.Cluster("toy", 1e12, 1e12, 4, CLUSTER.inside, model.Link(1, 1))
    assert model.all_reduce_times(1e6, 4, CLUSTER) == model.all_reduce_times(1e6, 4, slow)
    assert model.gather_time(1e6, 4, CLUSTER) == model.gather_time(1e6, 4, slow)
    assert model.all_to_all_time(1e6, 4, CLUSTER) == model.all_to_all_time(1e6, 4, slow)
    assert model.all_to_all_time(1e6, 8, CLUSTER) < 1e-3 < model.all_to_all_time(1e6, 8, slow)


def test_nodes_over_links_of_one_sort_save_latency():
    flat = model.Cluster("flat", 1e12, 1e12, 4, LINK, LINK)
    times = model.all_reduce_times(1, 1024, flat)
    assert times["hierarchical tree"] < times["hierarchical ring"] < times["ring"]
    assert times["ring"] == pytest.approx(2 * 1023 * 1e-5, rel=1e-3)
    assert times["hierarchical ring"] == pytest.approx((2 * 3 + 2 * 255) * 1e-5, rel=1e-3)


def test_the_parts_of_a_step():
    step = model.step(WORK, CLUSTER, 8)
    assert step.forward + step.backward == pytest.approx(1e9 * 10 / (1e12 * 0.5))
    assert step.backward == pytest.approx(2 * step.forward)
    assert step.update == pytest.approx(20 * 1_000_010 / 1e12)
    assert step.exposed == step.gradients > 0
    assert step.parameters == 0
    assert step.efficiency == pytest.approx(1 - step.exposed / step.seconds)
    sharded = model.step(WORK, CLUSTER, 8, kind="sharded")
    assert sharded.update == pytest.approx(step.update / 8)
    assert sharded.parameters > 0


@given(st.floats(0, 1), powers, st.sampled_from(["device", "sharded", "local"]))
def test_overlap_hides_no_more_than_its_share_and_the_backward_pass(overlap, n, kind):
    plain, step = (model.step(WORK, CLUSTER, n, kind=kind, overlap=o) for o in (0, overlap))
    hidden = plain.exposed - step.exposed
    assert hidden == pytest.approx(min(overlap * plain.gradients, plain.backward), abs=1e-12)
    assert step.exposed >= step.parameters


@pytest.mark.parametrize("kind", ["device", "sharded", "local"])
def test_more_devices_never_make_the_step_shorter(kind):
    work = model.resnet50()
    exposed = [model.step(work, model.H100, n, kind=kind).gradients for n in (8, 64, 512, 4096, 65536)]
    assert exposed == sorted(exposed)


def test_what_grows_with_the_devices():
    shapes = model.resnet50().shapes
    plain = 4 * model.resnet50().parameters

    def sent(kind, n, compressor="none"):
        return sum(model.sent_bytes(e, n) for e in model.exchanges(shapes, kind, n, compressor)) / plain

    for kind in ("device", "sharded"):
        assert sent(kind, 8) == pytest.approx(2 * 7 / 8, rel=0.01)
        assert sent(kind, 512) == pytest.approx(2, rel=0.03)
    # Codes of 2 bits to the owners, sums of 5 or 11 bits back. Of 8 bits, the sums come back as float32.
    for n, bits in ((8, 2 + 5), (512, 2 + 11)):
        assert sent("device", n, "2bit") == pytest.approx((n - 1) / n * bits / 32, rel=0.01)
        assert sent("device", n, "int8") == pytest.approx((n - 1) / n * 40 / 32, rel=0.01)
        assert sent("device", n, "int3") == pytest.approx((n - 1) / n * 6 / 32, rel=0.01)
    assert sent("device", 65536, "2bit") < 2


def test_merging_keeps_the_bytes():
    found = model.exchanges(model.resnet50().shapes, "sharded", 64)
    merged = model.combined(found, 30 << 20)
    assert len(merged) < len(found) / 5
    for gradient in (True, False):
        sums = [sum(e.nbytes for e in several if e.gradient == gradient) for several in (merged, found)]
        assert sums[0] == sums[1]
    star = model.combined([model.Exchange("all-to-all", 1)] * 3 + [model.Exchange("all-gather", 1)] * 3, 10)
    assert [(e.op, e.nbytes) for e in star] == [*3 * [("all-to-all", 1)], ("all-gather", 3)]


def test_the_networks_are_as_large_as_they_are_called():
    assert model.resnet50().parameters == 25_557_032
    assert model.one_billion().parameters == pytest.approx(1e9, rel=0.02)
    from _shapes import gpt2_small

    assert list(model.transformer(768, 12, 50257, 1024)) == gpt2_small()


A_SHARE, UNKNOWN = "overlap is a share from 0 to 1", "the model does not know"
A_LINK = "a link has a latency >= 0 and a bandwidth > 0"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: _hlo.collectives("%a = (f32[1], f32[8]) all-gather-start(%x)", 8), "all-gather-start"),
        (lambda: model.step(WORK, CLUSTER, 10), "10 devices do not fill nodes of 4"),
        (lambda: model.step(WORK, CLUSTER, 8, overlap=-0.1), A_SHARE),
        (lambda: model.step(WORK, CLUSTER, 8, overlap=1.1), A_SHARE),
        (lambda: model.exchanges(WORK.shapes, "dist_async", 8), UNKNOWN),
        (lambda: model.exchanges(WORK.shapes, "local", 8, "2bit"), UNKNOWN),
        (lambda: model.exchanges(WORK.shapes, "device", 8, "powersgd"), UNKNOWN),
        (lambda: model.Link(-1, 1), A_LINK),
        (lambda: model.Link(0, 0), A_LINK),
        (lambda: model.Link(0, math.nan), A_LINK),
        (lambda: model.fit(2, (4096, 1.0), (8192, 0.5)), "the larger sum must take longer"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# The fit.


@given(powers, links)
def test_the_fit_finds_the_link_again(n, link):
    sums = [(s, model.ring_all_reduce(s, n, link)) for s in (4096.0, 16777216.0)]
    found = model.fit(n, *sums)
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=1e-3)
    assert found.latency == pytest.approx(link.latency, rel=1e-3, abs=1e-6 * sums[1][1])


def test_measurements_that_follow_the_model_are_predicted_exactly():
    pieces = {"bytes": 3000, "arrays": 3}
    seconds = {"nothing": [0.2, 0.1]}
    for size in (1000, 50_000, 10_000_000):
        seconds[f"sum {size}"] = [9.0, 0.1 + model.ring_all_reduce(size, 4, LINK)]
    seconds["net alone"] = [0.5, 0.7]
    seconds["net together"] = [0.5 + 3 * model.ring_all_reduce(1000, 4, LINK), 1.0]
    link = scale.fitted(4, seconds)
    assert (link.latency, link.bandwidth) == pytest.approx((1e-5, 1e9))
    report = scale.held(4, {"seconds": seconds, "collectives": {"net": [pieces]}}, link, 4)
    assert [row["ratio"] for row in report["rows"].values()] == [1, 1, 1, 1]


# The script.


def test_a_case_that_takes_too_long_says_so_and_its_larger_ones_are_not_tried(monkeypatch, capsys):
    asked: list[tuple[str, str, int]] = []

    def too_slow(case, limit):
        asked.append((case["kind"], case["compressor"], case["devices"]))
        return {**case, "missing": f"more than {limit:.0f} s"}

    monkeypatch.setattr(scale, "compiled", too_slow)
    rows = scale.compile_part(scale.arguments(["--devices", "16", "8", "--networks", "lenet", "--limit", "7"]))
    assert asked == [(*case, 8) for case in scale.CASES]
    asked.clear()
    options = scale.arguments(["--devices", "8", "--networks", "lenet", "--cases", "local", "--limit", "3"])
    again = scale.compile_part(options, rows)
    assert asked == [("local", "none", 8)]
    assert [row["missing"] for row in again] == [f"more than {s} s" for s in (7, 7, 3, 7, 7, 7, 7, 7, 7)]
    assert [row["devices"] for row in rows] == [8] * len(scale.CASES)
    assert "more than 7 s" in capsys.readouterr().out


def test_a_child_is_ended_at_its_limit():
    case = {"network": "lenet", "kind": "device", "compressor": "none", "devices": 8}
    assert scale.compiled(case, 0.05) == {**case, "missing": "more than 0 s"}


@pytest.mark.slow  # prediction and picture up to 65,536 devices
def test_the_prediction_is_written_and_drawn(tmp_path, capsys):
    output, picture = tmp_path / "out.json", tmp_path / "scale.png"
    scale.main(["model", "--output", str(output), "--picture", str(picture)])
    report = json.loads(output.read_text())
    networks = report["model"]["networks"]
    assert set(networks) == {"ResNet-50", "1-billion transformer"}
    rows = networks["ResNet-50"]["rows"]
    assert len(rows) == len(scale.WAYS) * len(scale.PREDICTED) * len(scale.OVERLAPS)
    assert report["model"]["cluster"]["sources"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "65,536" in capsys.readouterr().out


def test_an_unknown_part_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        scale.main(["compiling"])
    assert ended.value.code == 2
    assert "unknown part 'compiling'" in capsys.readouterr().err


@pytest.mark.slow  # two processes that import JAX and compile
def test_two_processes_are_measured():
    measured = scale.together(2, 1, ["mlp"])
    sums = {"sum 4096", "sum 65536", "sum 1048576", "sum 16777216"}
    assert set(measured["seconds"]) == {"nothing", "mlp alone", "mlp together"} | sums
    assert all(len(times) == 1 and times[0] > 0 for times in measured["seconds"].values())
    parameters = 784 * 1024 + 1024 * 1024 + 1024 * 10
    assert measured["collectives"]["mlp"] == [{"bytes": 4 * parameters + 4, "arrays": 4}]


def test_a_process_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(scale, "HERE", Path("/nowhere"))
    with pytest.raises(RuntimeError, match="one of 2 processes ended with status 2"):
        scale.together(2, 1, [])
