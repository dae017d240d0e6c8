"""The scale benchmark: what it reads from programs, its model in closed form, and both against each other."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

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
